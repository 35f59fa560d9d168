"""A candidate in this process: build it, call it, and undo the changes of each call."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import os
import shutil
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

# Imported by name before the candidate is: one that patches torch doesn't patch these.
from torch import Tensor, initial_seed, manual_seed, nn
from torch.random import fork_rng

from manyheads.checker.isolation.describe import Description, describe, module_tensors, read_signature
from manyheads.checker.isolation.errors import CandidateError, CodeError, describe_exception, print_safely
from manyheads.checker.isolation.snapshot import GLOBALS, Snapshot, read_globals, restore_globals
from manyheads.checker.isolation.trees import (
    is_same,
    iterate_tensors,
    map_tensors,
    to_tree,
    top_tensors,
    with_strides,
)
from manyheads.masks import Keep
from manyheads.shapes import sizes


@dataclass(frozen=True)
class Call:
    """One call of a candidate.

    Attributes:
        args: The positional arguments, trees.
        kwargs: The keyword arguments, trees.
        grads: The paths of tensors whose gradients are returned: "0" is the first positional argument,
            "key" a keyword, "0.1" nested. If one tensor is passed twice, it has one gradient.
        cotangent: The gradient of the output's first tensor, of its shape. Without it, gradients are off.
        training: The mode of the module.
        dtype: A dtype to which a copy of the module and every floating argument are cast.
        compiled: Whether to call it through torch.compile.
        seed: The random seed.
        memory: Whether to measure the peak of memory.

    Raises:
        ValueError: For gradients without a cotangent.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    grads: tuple[str, ...] = ()
    cotangent: Tensor | None = None
    training: bool = False
    dtype: torch.dtype | None = None
    compiled: bool = False
    seed: int = 0
    memory: bool = False

    def __post_init__(self) -> None:
        if self.grads and self.cotangent is None:
            raise ValueError(f"grads {self.grads} need a cotangent, the gradient of the output.")


@dataclass(frozen=True)
class Change:
    """An argument, a parameter, a buffer or a global setting that a call changed."""

    kind: Literal["argument", "parameter", "buffer", "state"]
    name: str


@dataclass(frozen=True)
class Answer:
    """The result of a call; tensors are detached copies on the CPU.

    Attributes:
        output: A tree.
        grads: The gradients of `Call.grads` by path; None for a tensor that gets no gradient.
        weight_grads: The gradients of all parameters, likewise.
        changed: The changes that the call made, and that were undone.
        peak: The increase of resident memory during the call at its peak, in bytes, or None if it wasn't
            measured or can't be.
    """

    output: Any
    grads: dict[str, Tensor | None]
    weight_grads: dict[str, Tensor | None]
    changed: tuple[Change, ...]
    peak: int | None


class Candidate(contextlib.AbstractContextManager["Candidate"]):
    """A class, a module, a function, or a factory that returns one of these and takes no arguments.

    Args:
        target: The object.

    Raises:
        CandidateError: Of kind "import", if the target can't be called.
    """

    def __init__(self, target: Any) -> None:
        self.target = call_factory(target)
        self.instance = None if isinstance(self.target, type) else self.target

    def describe(self) -> Description:
        """Describe the class, or the instance if it has been built."""
        return describe(self.target, self.instance)

    def build(self, init: dict[str, Any]) -> Description:
        """Build an instance with seed 0.

        Args:
            init: The constructor arguments, trees.

        Returns:
            The description of the instance.

        Raises:
            CandidateError: Of kind "init", if the constructor raises, or if the target isn't a class.
        """
        arguments = ", ".join(f"{name}={print_safely(repr, value, 40)}" for name, value in init.items())
        if isinstance(self.target, type):
            action = f"building {self.target.__name__}({arguments})"
            try:
                with seeded(0):
                    self.instance = self.target(**{name: to_object(value) for name, value in init.items()})
            except (Exception, SystemExit) as error:
                raise describe_exception("init", action, error) from None
        elif init:
            name = f"{self.describe().name}, which isn't a class"
            raise CodeError("init", f"Expected no constructor arguments for {name}, got {arguments}.")
        return self.describe()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers by name."""
        return {name: x.detach().cpu().clone() for _, name, x in module_tensors(self._built())}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy values into the parameters and buffers with these names."""
        targets = {name: x for _, name, x in module_tensors(self._built())}
        for name, values in tensors.items():
            if name not in targets:
                raise CodeError("call", f"Expected names of {list(targets)} to load, got {name!r}.")
            if targets[name].shape != values.shape:
                expected = sizes(targets[name])
                raise CodeError("call", f"Expected {expected} to load into {name!r}, got {sizes(values)}.")
        for name, values in tensors.items():
            targets[name].data.copy_(values)

    def call(self, call: Call) -> Answer:
        """Call the candidate, and undo its changes of parameters, buffers and global settings.

        Args:
            call: The arguments and options.

        Returns:
            The output, gradients and changes.

        Raises:
            CandidateError: Of kind "call" or "memory", if it raises.
        """
        candidate = self._built()
        definition = candidate if inspect.isroutine(candidate) else type(candidate)
        name = getattr(definition, "__name__", type(candidate).__name__)

        def copy_argument(tensor: Tensor) -> Tensor:
            copied = with_strides(tensor, tensor.stride())
            is_cast = call.dtype is not None and tensor.is_floating_point()
            return copied.to(call.dtype, memory_format=torch.preserve_format) if is_cast else copied

        args, kwargs = map_tensors([call.args, call.kwargs], copy_argument)
        args, kwargs = [to_object(x) for x in args], {name: to_object(x) for name, x in kwargs.items()}
        passed = dict(iterate_tensors({**dict(enumerate(args)), **kwargs}))
        originals = {path: tensor.clone() for path, tensor in passed.items()}
        for path in call.grads:
            if path not in passed or not passed[path].is_floating_point():
                raise CodeError("call", f"Expected the path of a floating tensor in grads, got {path!r}.")
            passed[path].requires_grad_(True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(seeded(call.seed))
            stack.enter_context(torch.set_grad_enabled(call.cotangent is not None))
            try:
                candidate = cast_module(candidate, call.dtype)
                state = State(candidate)
                stack.callback(state.restore)
                state.set_mode(call.training)
                function = candidate
                if call.compiled:
                    torch._dynamo.reset()  # graphs of earlier calls count against the limit of recompilations
                    stack.callback(torch._dynamo.reset)
                    # Without a C++ compiler, graphs are traced and not compiled.
                    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
                    backend = "inductor" if has_compiler else "aot_eager"
                    function = torch.compile(candidate, backend=backend)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                devnull = stack.enter_context(open(os.devnull, "w", encoding="utf-8", errors="replace"))
                stack.enter_context(contextlib.redirect_stdout(devnull))
                resident = reset_peak() if call.memory else None
                output = function(*args, **kwargs)
                grads, weight_grads = run_backward(output, call, passed, candidate)
                peak = None if resident is None else max(0, read_peak() - resident)
                changed = [*state.changes()]
                output = to_tree(output)
            except CandidateError:
                raise
            except (Exception, SystemExit) as error:
                raise describe_exception("call", f"calling {name}", error) from None
        changed += [Change("argument", path) for path, x in passed.items() if not is_same(x, originals[path])]
        return Answer(output, grads, weight_grads, tuple(changed), peak)

    def close(self) -> None:
        """Do nothing; subclasses restore the object."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def _built(self) -> Any:
        if self.instance is None:
            raise CodeError("call", f"{self.target.__name__} is a class: build() it first.")
        return self.instance


class BorrowedCandidate(Candidate):
    """An object of the caller, which `close` restores, and global state with it."""

    def __init__(self, target: Any) -> None:
        self._snapshot = Snapshot(target)
        try:
            super().__init__(target)
            self._snapshot.add(self.target)  # a factory may return an object that the caller uses
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the object."""
        self._snapshot.restore()


def call_factory(target: Any) -> Any:
    """Return the target, or if it is a factory, the object that it returns."""
    if isinstance(target, type) or not inspect.isfunction(target):
        if callable(target):
            return target
        kind = type(target).__name__
        raise CodeError("import", f"Expected a class, a function or a callable object, got a {kind}.")
    arguments = read_signature(target, bound=True)
    if any(argument.required or not argument.is_named for argument in arguments):
        return target
    try:
        with seeded(0):
            made = target()
    except (Exception, SystemExit) as error:
        if arguments:  # an attention function may have a default for every argument
            return target
        raise describe_exception("import", f"calling the factory {target.__name__}()", error) from None
    if callable(made) and not isinstance(made, Tensor):
        return made
    if arguments:
        return target
    raise CodeError(
        "import",
        f"{target.__name__}() takes no arguments, so it should return a class, module or function, "
        f"but it returned a {type(made).__name__}.",
    )


# -- arguments and state ---------------------------------------------------------------------------


def to_object(value: Any) -> Any:
    """Convert an argument that a tree can't contain from its encoding, and return others unchanged.

    `{"__namespace__": {name: value}}` is a configuration or a module, `{"__keep__": tensor}` a `Keep`.
    """
    if isinstance(value, dict) and set(value) == {"__namespace__"}:
        return types.SimpleNamespace(**value["__namespace__"])
    if isinstance(value, dict) and set(value) == {"__keep__"}:
        return Keep(value["__keep__"])
    return value


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set the seed, and restore the caller's random state afterwards."""
    with fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        manual_seed(seed)
        yield


def cast_module(candidate: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a module in this dtype; complex and integer buffers keep theirs."""
    if dtype is None or not isinstance(candidate, nn.Module):
        return candidate
    return copy.deepcopy(candidate)._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


class State:
    """The global state and a module's tensors and modes before a call."""

    def __init__(self, candidate: Any) -> None:
        self.seed = initial_seed()
        self.globals = read_globals()
        self.module = candidate if isinstance(candidate, nn.Module) else None
        modules = list(self.module.modules()) if self.module is not None else []
        self.modes = self.call_modes = [(module, module.training) for module in modules]
        entries: list[Any] = [each for module in modules for each in (module._parameters, module._buffers)]
        self.entries = [(each, dict(each)) for each in entries]
        self.before = {name: (kind, x, x.detach().clone()) for kind, name, x in module_tensors(self.module)}

    def set_mode(self, training: bool) -> None:
        """Set training or evaluation mode, which the call may not change; a module may override train()."""
        if self.module is not None:
            self.module.train(training)
        self.call_modes = [(module, module.training) for module, _ in self.modes]

    def changes(self) -> Iterator[Change]:
        """Yield the changes since then."""
        if initial_seed() != self.seed:
            yield Change("state", "the random seed")
        for (name, *_), now, before in zip(GLOBALS, read_globals(), self.globals, strict=True):
            if now != before:
                yield Change("state", name)
        if any(module.training != mode for module, mode in self.call_modes):
            yield Change("state", "the training flag")
        tensors = {name: (kind, x) for kind, name, x in module_tensors(self.module)}
        for name, (kind, _, value) in self.before.items():
            if name not in tensors or not is_same(tensors[name][1], value):
                yield Change(kind, name)
        yield from (Change(kind, name) for name, (kind, _) in tensors.items() if name not in self.before)

    def restore(self) -> None:
        """Restore global state, modes, parameters and buffers."""
        restore_globals(self.globals)
        for module, mode in self.modes:
            module.training = mode
        for entries, content in self.entries:
            entries.clear()
            entries.update(content)
        for _, tensor, value in self.before.values():
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                tensor.data = value
            elif not is_same(tensor, value):
                tensor.data.copy_(value)


# -- backward, compiler, memory --------------------------------------------------------------------


def run_backward(
    output: Any, call: Call, passed: dict[str, Tensor], candidate: Any
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return the gradients of arguments (`call.grads`) and of parameters, whose .grad is restored."""
    if call.cotangent is None:
        return {}, {}
    parameters = dict(candidate.named_parameters()) if isinstance(candidate, nn.Module) else {}
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        first = next((tensor for _, tensor in iterate_tensors(top_tensors(output) or output)), None)
        if first is not None and first.shape != call.cotangent.shape:
            expected, got = sizes(first), sizes(call.cotangent)
            raise CodeError("call", f"Expected a cotangent of the output's shape {expected}, got {got}.")
        if first is not None and first.requires_grad:
            torch.autograd.backward(first, call.cotangent.to(first))
        return (
            {path: to_tree(passed[path].grad) for path in call.grads},
            {name: to_tree(parameter.grad) for name, parameter in parameters.items()},
        )
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def reset_peak() -> int | None:
    """Reset the peak of resident memory, and return its current size in bytes; None except on Linux."""
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc returns freed memory to the system
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the only way to reset it
        read_peak()
        return int(psutil.Process().memory_info().rss)
    except (OSError, IndexError):
        return None


def read_peak() -> int:
    """Return the peak of resident memory in bytes (VmHWM), which psutil doesn't give on Linux."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024
