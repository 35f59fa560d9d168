"""The subject: the object under check, described, built, called in this process, and put back as it was.

A subject is a class, an instance (a module, or any object that can be called), or a function. What
goes into a call and what comes out is a tree of tensors and plain values: Tensor, None, bool, int,
float, str, and lists, tuples and dicts of them. All that goes wrong in the subject is a `Trouble`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import re
import shutil
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

# Taken by name before the subject is imported: one that patches torch doesn't patch these.
from torch import Tensor, empty_strided, equal, initial_seed, manual_seed, nn
from torch.random import fork_rng

from ...masks import Keep
from ...shapes import sizes
from .snapshot import GLOBALS, Snapshot

PRINTED = 2000  # characters of what a call prints that are kept
DEPTH = 32  # of a tree
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
}  # fmt: skip

Kind = Literal["import", "init", "call", "timeout", "memory", "crash", "protocol"]


class Trouble(Exception):
    """What went wrong with a subject, in one sentence.

    `kind` says where: "import", "init" (the constructor raised), "call", "timeout", "memory",
    "crash" (the process ended) or "protocol" (its message can't be read). `details` are the last
    lines of the traceback in the user's own files, or what the process last wrote; `error` is the
    exception's type in full, as `torch._dynamo.exc.Unsupported`. Both may be empty.
    """

    def __init__(self, kind: Kind, sentence: str, details: str = "", error: str = "") -> None:
        super().__init__(sentence)
        self.kind, self.details, self.error = kind, details, error

    @property
    def unwritten(self) -> bool:
        """Does its own code say that it is still to be written?"""
        raised = self.details.rpartition("\n")[2]
        return self.error.endswith("NotImplementedError") and "raise NotImplementedError" in raised


@dataclass(frozen=True)
class Argument:
    """One argument of a signature; a default that is no plain value is given as its repr."""

    name: str
    kind: Literal["positional", "keyword", "var_positional", "var_keyword"]
    required: bool
    default: Any
    annotation: str


@dataclass(frozen=True)
class Description:
    """What can be known of a subject without calling it.

    `what` is what the target is, and stays "class" when `make` has built an instance of it; only
    then are there parameters, buffers (name → shape), layers (path → class name) and attributes.
    """

    what: Literal["class", "module", "function"]
    name: str
    where: str  # "file.py:12", or "torch.nn.modules.activation:MultiheadAttention"
    doc: str
    init: tuple[Argument, ...] | None  # of a class's constructor
    call: tuple[Argument, ...]  # of forward, __call__ or the function, without self
    torch_module: bool
    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    layers: dict[str, str]
    attributes: dict[str, int | float | bool | str]  # public ones, such as num_heads
    source: str
    about: str = ""  # the docstring of its file


@dataclass(frozen=True)
class Call:
    """One call of a subject.

    `grads` are the paths of the tensors whose gradients are wanted: "0" is the first positional
    argument, "key" a keyword, "0.1" nested. `cotangent` is the gradient of the first tensor in the
    output, of its shape; with it the call runs with gradients on and Answer has them, without it
    they are off. A tensor given twice is one tensor, and each of its paths gets the whole gradient.
    `dtype` is for this call only: a copy of the module and every floating argument are cast to it.
    `attribute` names a method to call instead of the subject. Called `repeat` times, seeded once,
    the output is the list of outputs. `memory` asks for the peak.

    Raises ValueError for gradients wanted without a cotangent, or of more than one call.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    grads: tuple[str, ...] = ()
    cotangent: Tensor | None = None
    training: bool = False
    dtype: torch.dtype | None = None
    compiled: bool = False
    seed: int = 0
    attribute: str = ""
    repeat: int = 1
    memory: bool = False

    def __post_init__(self) -> None:
        if self.grads and self.cotangent is None:
            raise ValueError(
                f"grads {self.grads} need a cotangent, and None came: give the output's gradient."
            )
        if self.repeat < 1 or (self.repeat > 1 and self.cotangent is not None):
            raise ValueError(f"repeat must be at least 1, and 1 with a cotangent, and {self.repeat} came.")


@dataclass(frozen=True)
class Answer:
    """What came of a call; tensors are detached copies on the CPU.

    `weight_grads` has an entry for each parameter, None where no gradient came. `changed` names the
    global state that the call changed, put back since. `printed` is what it wrote to sys.stdout.
    `seconds` and `peak` (bytes resident at the peak beyond the start; None where Linux's
    /proc/self isn't there) are of the call and its backward pass.
    """

    output: Any
    grads: dict[str, Tensor | None]
    weight_grads: dict[str, Tensor | None]
    changed: tuple[str, ...]
    warnings: tuple[str, ...]
    printed: str
    seconds: float
    peak: int | None


@dataclass(frozen=True)
class Foreign:
    """An object in an output that is no tensor and no plain value: its type, and its repr shortened."""

    type: str
    text: str


# ----------------------------------------------------------------------------------------- trees


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values in order, uint8 `[bytes]`; on the CPU."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """The same values to the last bit, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and equal(raw(a), raw(b))


def laid_out(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of `values` with these strides; an expanded dimension (stride 0) stays expanded."""
    if not values.numel():
        return values.detach().clone()
    shape = tuple(values.shape)
    once = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    copied = empty_strided(once, stride, dtype=values.dtype, device=values.device)
    for axis, size in enumerate(once):
        values = values.narrow(axis, 0, size)
    return copied.copy_(values.detach()).expand(shape)


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with each tensor changed; a tensor that is there twice is changed once."""
    memo: dict[int, Tensor] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, Tensor):
            if id(node) not in memo:
                memo[id(node)] = change(node)
            return memo[id(node)]
        if isinstance(node, list | tuple):
            return type(node)(walk(child) for child in node)
        if isinstance(node, dict):
            return {key: walk(child) for key, child in node.items()}
        return node

    return walk(tree)


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with their paths, in order."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, list | tuple):
        for i, child in enumerate(tree):
            yield from tensors(child, f"{path}.{i}" if path else str(i))
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from tensors(child, f"{path}.{key}" if path else str(key))


def plain(value: Any, depth: int = 0) -> Any:
    """What a subject returned as a tree; tensors detached and copied to the CPU, objects as Foreign."""
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int and abs(value) < 2**63:
        return value
    if isinstance(value, np.ndarray | np.generic):
        with contextlib.suppress(TypeError):  # an array of objects or of strings
            return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else plain(value.item())
    if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in DTYPES.values():
        copied = value.detach().cpu().resolve_conj().resolve_neg()
        return copied.clone(memory_format=torch.contiguous_format).as_subclass(Tensor)
    if depth < DEPTH:
        if isinstance(value, list | tuple):
            children = [plain(child, depth + 1) for child in value]
            return tuple(children) if isinstance(value, tuple) else children
        if isinstance(value, Mapping) and all(type(key) is str for key in value):
            return {key: plain(child, depth + 1) for key, child in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    return Foreign(type(value).__name__, said(repr, value))


def _object(value: Any) -> Any:
    """Return the object that an argument stands for, if it stands for one.

    `{"__namespace__": {name: value}}` is a configuration or a module, `{"__keep__": tensor}` a `Keep`.
    """
    if isinstance(value, dict) and set(value) == {"__namespace__"}:
        return types.SimpleNamespace(**value["__namespace__"])
    if isinstance(value, dict) and set(value) == {"__keep__"}:
        return Keep(value["__keep__"])
    return value


def said(how: Callable[[Any], str], value: Any, most: int = 200) -> str:
    """str or repr of an object that may refuse to be printed, shortened."""
    try:
        text = str.__str__(how(value))  # no subclass of str
    except Exception as error:
        return f"a {type(value).__name__} whose {how.__name__} raises {type(error).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"


# --------------------------------------------------------------------------------------- troubles

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen")


def trouble(kind: Kind, what: str, error: BaseException) -> Trouble:
    """The Trouble of an exception that the subject raised while `what`."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)
    ]
    lines = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-4:]]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
        at = f" ({Path(error.filename).name}:{error.lineno})"
    message = error.msg if isinstance(error, SyntaxError) else said(str, error, 2000)
    first = said(str, next((line.strip() for line in message.splitlines() if line.strip()), ""), 300)
    name = type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        kind = "memory"
    sentence = f"{what} raised {name}{': ' if first else ''}{first.rstrip('.')}{at}."
    return Trouble(kind, sentence, "\n".join(lines), f"{type(error).__module__}.{type(error).__qualname__}")


# ---------------------------------------------------------------------------------------- targets


def find(target: str) -> Any:
    """The object that a target names: `module:name` or `path/to/file.py:name`, the name dotted or not.

    A file is imported as `python file.py` would see it, its folder first on sys.path (and left
    there: it may import its neighbours later); one inside a package is imported as that package's
    module. Raises Trouble("import") for a target of another form, what isn't there, and what the
    import raises.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise Trouble(
            "import",
            f"a target must be module:name or path/to/file.py:name, and {target!r} came: "
            "say which object is meant, as in attention.py:MyAttention.",
        )
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Trouble:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise Trouble(
                "import",
                f"{target!r} asks for a module {place!r}, and there is no module {error.name!r}: "
                "run where it can be imported, or name its file, as in path/to/file.py:name.",
            ) from None
        raise trouble("import", f"importing {place}", error) from None
    found: Any = module
    path = place
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            there = [other for other in dir(found) if not other.startswith("_")]
            near = difflib.get_close_matches(part, there, 3, 0.5) or _defined(found)[:5]
            hint = f"did you mean {' or '.join(near)}?" if near else "nothing is defined there."
            raise Trouble("import", f"{path} must have the name {part!r}, and it doesn't: {hint}") from None
        except Exception as error:
            raise trouble("import", f"reading {part!r} of {path}", error) from None
        path = f"{path}:{part}" if path == place else f"{path}.{part}"
    return found


def _defined(thing: Any) -> list[str]:
    """The classes and functions that a module or class defines itself, or else all its public names."""
    home = getattr(thing, "__name__", "")
    public = {name: value for name, value in vars(thing).items() if not name.startswith("_")}
    return [name for name, value in public.items() if getattr(value, "__module__", "") == home] or list(
        public
    )


def _file(path: Path) -> types.ModuleType:
    """A file's module; inside packages, by its name in them."""
    path = path.absolute()
    if not path.is_file():
        folder = path.parent
        near = difflib.get_close_matches(path.name, [f.name for f in folder.glob("*.py")], 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "look at its folder."
        raise Trouble("import", f"the file {path} must be there, and it isn't: {hint}")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    # By itself, and not under a name that something else has (a student's random.py).
    taken = getattr(sys.modules.get(path.stem), "__file__", str(path)) != str(path)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_under_check" if taken else path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


# ------------------------------------------------------------------------------------- signatures

_KINDS: dict[Any, Literal["positional", "keyword", "var_positional", "var_keyword"]] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "var_positional",
    inspect.Parameter.VAR_KEYWORD: "var_keyword",
}


def signature(thing: Callable[..., Any], bound: bool) -> tuple[Argument, ...]:
    """The arguments of a callable; the first one is left out where it is an unbound self.

    A function written in C has no signature: the one its docstring begins with is read then, and
    where there is none, arguments of any number are what it says.
    """
    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except (ValueError, TypeError):
        parameters = _documented(thing)
    if not bound and parameters and parameters[0].kind != inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return tuple(
        Argument(
            name=p.name,
            kind=_KINDS[p.kind],
            required=p.default is p.empty and "VAR" not in p.kind.name,
            default=_value(p.default) if p.default is not p.empty else None,
            annotation="" if p.annotation is p.empty else _annotation(p.annotation),
        )
        for p in parameters
    )


def _documented(thing: Any) -> list[inspect.Parameter]:
    """`name(query, key, scale=None)`, as the docstring of a function written in C begins."""
    name = re.escape(getattr(thing, "__name__", ""))
    begins = re.search(rf"\b{name}\(([^()]*(?:\([^()]*\)[^()]*)*)\)", inspect.getdoc(thing) or "")
    unknown = [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
    if not begins:
        return unknown
    try:
        function = ast.parse(f"def f({begins.group(1)}): pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        arguments = function.args
        defaults = [ast.literal_eval(node) for node in arguments.defaults]
        alone = [
            ast.literal_eval(node) if node else inspect.Parameter.empty for node in arguments.kw_defaults
        ]
    except (SyntaxError, ValueError):
        return unknown
    names = arguments.posonlyargs + arguments.args
    defaults = [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults
    return [
        *(
            inspect.Parameter(a.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for a, default in zip(names, defaults, strict=True)
        ),
        *(
            inspect.Parameter(a.arg, inspect.Parameter.KEYWORD_ONLY, default=default)
            for a, default in zip(arguments.kwonlyargs, alone, strict=True)
        ),
    ]


def _value(default: Any, depth: int = 0) -> Any:
    """A default as a JSON value, or its repr."""
    if default is None or type(default) in (bool, int, float, str):
        return default
    if type(default) in (list, tuple) and depth < 3:
        return type(default)(_value(child, depth + 1) for child in default)
    return said(repr, default)


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else said(inspect.formatannotation, annotation)


def _source(thing: Any) -> tuple[str, str]:
    """Where a class or function is written, and its source; "" where that can't be read."""
    module = getattr(thing, "__module__", None) or ""
    name = f"{module}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    try:
        source = inspect.getsource(thing)
        file, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):
        return name, ""
    installed = any(part in ("site-packages", "dist-packages") for part in Path(str(file)).parts)
    return name if installed else f"{Path(str(file)).name}:{line}", source


# -------------------------------------------------------------------------------------- the state


class _State:
    """Global state, a module's tensors and its training flags, as they were: to compare, and to put back."""

    def __init__(self, subject: Any) -> None:
        self.seed = initial_seed()
        self.globals = [read() for _, read, _ in GLOBALS]
        self.modules = list(subject.modules()) if isinstance(subject, nn.Module) else []
        self.flags = self.asked = [module.training for module in self.modules]
        self.slots = [(dict(module._parameters), dict(module._buffers)) for module in self.modules]
        self.module = subject if self.modules else None
        self.before = {
            name: (tensor, tensor.detach().clone(), said) for name, tensor, said in _tensors(self.module)
        }

    def train(self, mode: bool) -> None:
        """Ask for training or evaluation; what the module makes of it is what the call may not change."""
        if self.module is not None:
            self.module.train(mode)
        self.asked = [module.training for module in self.modules]

    def changed(self) -> Iterator[str]:
        """In words, what isn't as it was."""
        if initial_seed() != self.seed:
            yield "the random seed"
        for (name, read, _), value in zip(GLOBALS, self.globals, strict=True):
            if read() != value:
                yield name
        if any(module.training != flag for module, flag in zip(self.modules, self.asked, strict=True)):
            yield "the training flag"
        now = {name: tensor for name, tensor, _ in _tensors(self.module)}
        for name, (_, value, said) in self.before.items():
            if name not in now or not same(now[name], value):
                yield said
        for name, _, said in _tensors(self.module):
            if name not in self.before:
                yield said

    def put_back(self) -> None:
        for (_, read, put), value in zip(GLOBALS, self.globals, strict=True):
            if read() != value:
                put(value)
        for module, flag, (parameters, buffers) in zip(self.modules, self.flags, self.slots, strict=True):
            module.training = flag
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, value, _ in self.before.values():
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                tensor.data = value
            elif not same(tensor, value):
                tensor.data.copy_(value)


def _tensors(module: nn.Module | None) -> Iterator[tuple[str, Tensor, str]]:
    """A module's parameters and buffers, but for those without a shape yet, and how a change is told."""
    if module is not None:
        for name, parameter in module.named_parameters():
            if not nn.parameter.is_lazy(parameter):
                yield name, parameter, f"a parameter in place: {name}"
        for name, buffer in module.named_buffers():
            if not nn.parameter.is_lazy(buffer):
                yield name, buffer, f"a buffer: {name}"


class _Printed(io.TextIOWrapper):
    """A text file that takes all that is written and keeps the beginning; print and .buffer both work."""

    def __init__(self) -> None:
        self.bytes = _Kept()
        super().__init__(self.bytes, encoding="utf-8", errors="replace", write_through=True)

    def __str__(self) -> str:
        return bytes(self.bytes.kept).decode(errors="replace")[:PRINTED]


class _Kept(io.BytesIO):
    """Takes all bytes, keeps the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = bytearray()

    def write(self, data: Any) -> int:
        self.kept += bytes(data)[: 4 * PRINTED - len(self.kept)]
        return len(data)


def _resident(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS, what is resident now, or VmHWM, at its peak."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def _start_peak() -> int | None:
    """Begin measuring: give freed memory back to the system, reset the peak; bytes resident now."""
    try:
        with contextlib.suppress(OSError, AttributeError):  # glibc's alone
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _resident("VmRSS")
    except (OSError, IndexError):
        return None


# -------------------------------------------------------------------------------------- the subject


class Subject:
    """An object under check, in this process.

    `target` is a class, an instance that can be called, a function, or a factory: a function that
    can be called without arguments and returns one of those. Raises Trouble("import") for anything
    else. What the object does to this process when it crashes or never ends, it does.
    """

    def __init__(self, target: Any) -> None:
        self.target = _produced(target)
        self.instance = None if isinstance(self.target, type) else self.target

    def describe(self) -> Description:
        target, instance = self.target, self.instance
        what: Literal["class", "module", "function"] = (
            "class"
            if isinstance(target, type)
            else "function"
            if inspect.isroutine(target) or isinstance(target, functools.partial)
            else "module"
        )
        written = target if what != "module" else type(target)
        while isinstance(written, functools.partial):
            written = written.func
        where, source = _source(written)
        torch_module = isinstance(target, nn.Module) or (what == "class" and issubclass(target, nn.Module))
        if what == "function":
            call = signature(target, bound=True)
        else:
            name = "forward" if torch_module else "__call__"
            method = next((vars(c)[name] for c in written.__mro__ if name in vars(c)), None)
            call = signature(method, bound=isinstance(method, staticmethod)) if method else ()
        held = list(_tensors(instance if isinstance(instance, nn.Module) else None))
        plainly = (bool, int, float, str)
        return Description(
            what=what,
            name=getattr(written, "__name__", type(written).__name__),
            where=where,
            doc=inspect.getdoc(written) or "",
            init=signature(target, bound=True) if what == "class" else None,
            call=call,
            torch_module=torch_module,
            parameters={name: tuple(x.shape) for name, x, said in held if said.startswith("a parameter")},
            buffers={name: tuple(x.shape) for name, x, said in held if said.startswith("a buffer")},
            layers={path: type(module).__name__ for path, module in instance.named_modules()}
            if isinstance(instance, nn.Module)
            else {},
            attributes={
                name: value
                for name, value in getattr(instance, "__dict__", {}).items()
                if type(value) in plainly and not name.startswith("_") and name != "training"
            }
            if what != "function"
            else {},
            source=source,
            about=inspect.getdoc(sys.modules.get(getattr(written, "__module__", "") or "")) or "",
        )

    def make(self, init: dict[str, Any]) -> Description:
        """Build the class with these arguments, seeded; what is no class takes none. Trouble("init")."""
        if isinstance(self.target, type):
            with _seeded(0):
                try:
                    self.instance = self.target(**{name: _object(value) for name, value in init.items()})
                except (Exception, SystemExit) as error:
                    raise trouble(
                        "init", f"building {self.target.__name__}({_arguments(init)})", error
                    ) from None
        elif init:
            raise Trouble(
                "init",
                f"only a class takes constructor arguments, and {_arguments(init)} came with "
                f"{self.describe().name}: leave them out.",
            )
        return self.describe()

    def weights(self) -> dict[str, Tensor]:
        """Clones of the parameters and buffers, by name; a function has none."""
        module = self._made()
        return {
            name: tensor.detach().cpu().clone()
            for name, tensor, _ in _tensors(module if isinstance(module, nn.Module) else None)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy these values into the parameters and buffers of these names. Trouble("call")."""
        module = self._made()
        held = {name: x for name, x, _ in _tensors(module if isinstance(module, nn.Module) else None)}
        for name, values in tensors.items():
            if name not in held:
                raise Trouble("call", f"load takes names of {list(held)}, and {name!r} came.")
            if held[name].shape != values.shape:
                raise Trouble(
                    "call", f"{name!r} is {sizes(held[name])}, and {sizes(values)} came: load its own shape."
                )
        for name, values in tensors.items():
            held[name].data.copy_(values)

    def call(self, call: Call) -> Answer:
        """Call the subject, then put back what it changed. Raises Trouble("call") or ("memory")."""
        subject = self._made()
        written = type(subject) if not inspect.isroutine(subject) else subject
        name = getattr(written, "__name__", type(subject).__name__) + (
            f".{call.attribute}" if call.attribute else ""
        )

        def given(tensor: Tensor) -> Tensor:
            cast = call.dtype is not None and tensor.is_floating_point()
            copied = laid_out(tensor, tensor.stride())
            return copied.to(call.dtype, memory_format=torch.preserve_format) if cast else copied

        args, kwargs = mapped([call.args, call.kwargs], given)
        args, kwargs = [_object(x) for x in args], {name: _object(x) for name, x in kwargs.items()}
        passed = dict(tensors({**dict(enumerate(args)), **kwargs}))
        originals = {path: tensor.clone() for path, tensor in passed.items()}
        for path in call.grads:
            if path not in passed or not passed[path].is_floating_point():
                raise Trouble(
                    "call", f"grads takes paths of floating tensors in the call, and {path!r} came."
                )
            passed[path].requires_grad_(True)

        seen: list[warnings.WarningMessage] = []
        printed = _Printed()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_seeded(call.seed))
            stack.enter_context(torch.set_grad_enabled(call.cotangent is not None))
            try:
                subject = _cast(subject, call.dtype)
                state = _State(subject)
                stack.callback(state.put_back)
                state.train(call.training)
                held = list(subject.named_parameters()) if isinstance(subject, nn.Module) else []
                method = getattr(subject, call.attribute) if call.attribute else subject
                if call.compiled:
                    torch._dynamo.reset()  # no graph, and no count of graphs, of an earlier call
                    stack.callback(torch._dynamo.reset)
                    method = torch.compile(method, backend=_backend())
                seen = stack.enter_context(warnings.catch_warnings(record=True))
                warnings.simplefilter("always")
                stack.enter_context(contextlib.redirect_stdout(printed))
                resident = _start_peak() if call.memory else None
                start = time.perf_counter()
                outputs = [method(*args, **kwargs) for _ in range(call.repeat)]
                grads, weight_grads = _backward(outputs[0], call, passed, held)
                seconds = time.perf_counter() - start
                peak = None if resident is None else max(0, _resident("VmHWM") - resident)
                changed = [*state.changed()]
                outputs = [plain(output) for output in outputs]
            except (Exception, SystemExit) as error:
                raise (
                    error if isinstance(error, Trouble) else trouble("call", f"calling {name}", error)
                ) from None
        changed += [
            f"an argument in place: {path}" for path, x in passed.items() if not same(x, originals[path])
        ]
        return Answer(
            output=outputs[0] if call.repeat == 1 else outputs,
            grads=grads,
            weight_grads=weight_grads,
            changed=tuple(changed),
            warnings=tuple(said(str, w.message).split("\n")[0] for w in seen),
            printed=str(printed),
            seconds=seconds,
            peak=peak,
        )

    def close(self) -> None:
        """Nothing to end here."""

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _made(self) -> Any:
        if self.instance is None:
            raise Trouble("call", f"{self.target.__name__} is a class that isn't built yet: make() it first.")
        return self.instance


class BorrowedSubject(Subject):
    """A person's own object in this process; `close` restores it and the global state, whatever happened."""

    def __init__(self, target: Any) -> None:
        self._snapshot = Snapshot(target)
        try:
            super().__init__(target)
            self._snapshot.add(self.target)  # what a factory returned may be the person's own too
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._snapshot.restore()


def _produced(target: Any) -> Any:
    """The target, or what it returns where it is a factory."""
    if isinstance(target, type) or not inspect.isfunction(target):
        if callable(target):
            return target
        raise Trouble(
            "import",
            f"a target must be a class, a function, or an object that can be called, and a "
            f"{type(target).__name__} came: name one of those.",
        )
    arguments = signature(target, bound=True)
    if any(argument.required or "var" in argument.kind for argument in arguments):
        return target
    try:
        with _seeded(0):
            made = target()
    except (Exception, SystemExit) as error:
        # With arguments that all have defaults it may still be an attention function.
        if arguments:
            return target
        raise trouble("import", f"calling the factory {target.__name__}()", error) from None
    if callable(made) and not isinstance(made, Tensor):
        return made
    if arguments:
        return target
    raise Trouble(
        "import",
        f"{target.__name__}() takes no arguments, so it must be a factory that returns a class, a module or "
        f"a function, and it returned a {type(made).__name__}: return what is to be checked.",
    )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The random numbers of this seed, and the caller's own ones again afterwards."""
    with fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        manual_seed(seed)
        yield


def _cast(subject: Any, dtype: torch.dtype | None) -> Any:
    """A copy of a module in this dtype; complex and integer buffers stay as they are."""
    if dtype is None or not isinstance(subject, nn.Module):
        return subject
    return copy.deepcopy(subject)._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def _backend() -> str:
    """PyTorch's own compiler, or without a C++ compiler the graphs alone."""
    return "inductor" if any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))) else "aot_eager"


def _fields(output: Any) -> Any:
    """The fields of a dataclass or of another mapping as a dict, with the tensors as they are."""
    if isinstance(output, Mapping):
        return dict(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {one.name: getattr(output, one.name) for one in dataclasses.fields(output)}
    return output


def _backward(
    output: Any, call: Call, passed: dict[str, Tensor], held: list[tuple[str, nn.Parameter]]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The gradients of the arguments asked for and of the parameters; .grad is left as it was."""
    if call.cotangent is None:
        return {}, {}
    first = next((tensor for _, tensor in tensors(_fields(output))), None)
    kept = [parameter.grad for _, parameter in held]
    for _, parameter in held:
        parameter.grad = None
    try:
        if first is not None and first.shape != call.cotangent.shape:
            raise Trouble(
                "call",
                f"the cotangent must have the output's shape {sizes(first)}, and "
                f"{sizes(call.cotangent)} came: give one number for each of the output's.",
            )
        if first is not None and first.requires_grad:
            torch.autograd.backward(first, call.cotangent.to(first))
        return (
            {path: plain(passed[path].grad) for path in call.grads},
            {name: plain(parameter.grad) for name, parameter in held},
        )
    finally:
        for (_, parameter), grad in zip(held, kept, strict=True):
            parameter.grad = grad


def _arguments(init: dict[str, Any]) -> str:
    return ", ".join(f"{name}={said(repr, value, 40)}" for name, value in init.items())
