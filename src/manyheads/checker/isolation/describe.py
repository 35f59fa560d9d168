"""Describe a candidate without calling it: its signature, documentation, parameters and source."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from manyheads.checker.isolation.errors import print_safely

ArgumentKind = Literal["positional", "keyword", "var_positional", "var_keyword"]
Type = Literal["class", "module", "function"]


@dataclass(frozen=True)
class Argument:
    """One argument of a signature. A default that isn't a plain value is replaced by its repr."""

    name: str
    kind: ArgumentKind
    required: bool
    default: Any
    annotation: str

    @property
    def is_named(self) -> bool:
        """Return True for all but *args and **kwargs."""
        return self.kind in ("positional", "keyword")


@dataclass(frozen=True)
class Configuration:
    """The class of a configuration that a constructor takes.

    Attributes:
        name: Its name.
        fields: The arguments of its constructor and its class attributes.
    """

    name: str
    fields: tuple[Argument, ...]


@dataclass(frozen=True)
class Description:
    """The description of a candidate; parameters, buffers, layers and attributes are those of an instance.

    Attributes:
        type: The type of the target; "class" even after an instance was built.
        name: The name of the class or function.
        doc: Its docstring.
        init: The arguments of a class's constructor.
        call: The arguments of forward, `__call__` or the function, without self.
        torch_module: Whether it is a `torch.nn.Module`.
        parameters: The shapes of parameters by name.
        buffers: The shapes of buffers by name.
        layers: The class names of the submodules by path.
        attributes: The public attributes that are numbers, bools or strings, such as num_heads; of a
            function, the arguments that `functools.partial` binds.
        shared: The first name of the parameters of a layer that is in several places beside each other, by
            the other names.
        settings: The numbers and flags of its submodules and its configuration, by path.
        source: Its Python code.
        module_doc: The docstring of its file.
        configurations: The configurations that a class's constructor takes, by the name of the argument.
    """

    type: Type
    name: str
    doc: str
    init: tuple[Argument, ...] | None
    call: tuple[Argument, ...]
    torch_module: bool
    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    layers: dict[str, str]
    attributes: dict[str, int | float | bool | str]
    source: str
    module_doc: str = ""
    configurations: dict[str, Configuration] = field(default_factory=dict)
    settings: dict[str, bool | int | float] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)


def describe(target: Any, instance: Any) -> Description:
    """Describe a target, and its instance if there is one."""
    kind: Type = "module"
    definition = unwrap_partial(target)  # the object with source and documentation
    if isinstance(definition, type):
        kind = "class"
    elif inspect.isroutine(definition) or isinstance(target, functools.partial):
        kind = "function"
    else:
        definition = type(target)
    try:
        source = inspect.getsource(definition)
    except (OSError, TypeError):
        source = ""
    torch_module = kind != "function" and issubclass(definition, nn.Module)
    if kind == "function":
        call = read_signature(target, bound=True)
    else:
        name = "forward" if torch_module else "__call__"
        method = next((vars(c)[name] for c in definition.__mro__ if name in vars(c)), None)
        call = read_signature(method, bound=isinstance(method, staticmethod)) if method else ()
    module = instance if isinstance(instance, nn.Module) else None
    tensors, shared = [*module_tensors(module)], find_shared(module)
    attributes = bound_arguments(target) if kind == "function" else getattr(instance, "__dict__", {})
    return Description(
        type=kind,
        name=getattr(definition, "__name__", type(definition).__name__),
        doc=inspect.getdoc(definition) or "",
        init=read_signature(target, bound=True) if kind == "class" else None,
        call=call,
        torch_module=torch_module,
        parameters={name: tuple(x.shape) for name, x in named_parameters(tensors, shared)},
        buffers={name: tuple(x.shape) for kind, name, x in tensors if kind == "buffer"},
        shared=shared,
        layers={path: type(x).__name__ for path, x in module.named_modules()} if module else {},
        attributes={
            name: value
            for name, value in attributes.items()
            if type(value) in (bool, int, float, str) and not name.startswith("_") and name != "training"
        },
        source=source,
        settings=read_settings(instance, module),
        module_doc=inspect.getdoc(sys.modules.get(getattr(definition, "__module__", "") or "")) or "",
    )


def unwrap_partial(target: Any) -> Any:
    """Return the function or class whose arguments `functools.partial` binds, or any other object itself."""
    while isinstance(target, functools.partial):
        target = target.func
    return target


def bound_arguments(target: Any) -> dict[str, Any]:
    """Return the arguments that a `functools.partial` binds, by name."""
    if not isinstance(target, functools.partial):
        return {}
    names = [argument.name for argument in read_signature(target.func, bound=True)]
    return dict(zip(names, target.args, strict=False)) | target.keywords


def read_settings(instance: Any, module: nn.Module | None) -> dict[str, bool | int | float]:
    """Return numbers and flags of a module's configuration and submodules, such as "config.rope_theta"."""
    owners = {name: getattr(instance, name, None) for name in ("config", "cfg", "args", "params")}
    owners |= dict(module.named_modules()) if module is not None else {}
    return {
        f"{path}.{name}": value
        for path, owner in owners.items()
        if path
        for name, value in (owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})).items()
        if type(value) in (bool, int, float) and isinstance(name, str) and not name.startswith("_")
    }


def module_tensors(module: Any) -> Iterator[tuple[Literal["parameter", "buffer"], str, Tensor]]:
    """Yield the parameters and buffers of a module, without lazy ones, which have no shape yet."""
    if isinstance(module, nn.Module):
        yield from (("parameter", n, x) for n, x in module.named_parameters() if not nn.parameter.is_lazy(x))
        yield from (("buffer", n, x) for n, x in module.named_buffers() if not nn.parameter.is_lazy(x))


def find_shared(module: nn.Module | None) -> dict[str, str]:
    """Return the first names of parameters by their other names, for layers beside each other that are one.

    Such are the four layers of `nn.ModuleList([nn.Linear(e, e)] * 4)`.
    """
    found = [] if module is None else [*module.named_parameters(remove_duplicate=False)]
    matrices = {name.rpartition(".")[0] for name, x in found if not nn.parameter.is_lazy(x) and x.dim() > 1}
    first: dict[int, str] = {}
    shared = {}
    for name, x in found:
        layer, original = name.rpartition(".")[0], first.setdefault(id(x), name)
        owners = [path.rpartition(".")[0].rpartition(".")[0] for path in (name, original)]
        if name != original and layer in matrices and owners[0] == owners[1]:
            shared[name] = original
    return shared


def named_parameters(
    tensors: list[tuple[Literal["parameter", "buffer"], str, Tensor]], shared: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by name, those with several names after their first one."""
    for kind, name, x in tensors:
        if kind == "parameter":
            yield name, x
            yield from ((other, x) for other, original in shared.items() if original == name)


# -- signatures ------------------------------------------------------------------------------------

KINDS: dict[Any, ArgumentKind] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "var_positional",
    inspect.Parameter.VAR_KEYWORD: "var_keyword",
}


def read_signature(function: Callable[..., Any], bound: bool) -> tuple[Argument, ...]:
    """Return the arguments of a callable, without self if it is unbound.

    A function written in C may have a signature only in its docstring. If it has none there either, the
    arguments are *args and **kwargs.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        parameters = read_documented_signature(function)
    if isinstance(function, functools.partial):  # its signature has the bound keywords as defaults
        parameters = [parameter for parameter in parameters if parameter.name not in function.keywords]
    if not bound and parameters and parameters[0].kind != inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return tuple(
        Argument(
            name=parameter.name,
            kind=KINDS[parameter.kind],
            required=parameter.default is parameter.empty and "VAR" not in parameter.kind.name,
            default=None if parameter.default is parameter.empty else plain_default(parameter.default),
            annotation=annotation_text(parameter.annotation),
        )
        for parameter in parameters
    )


def read_documented_signature(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of `name(query, key, scale=None)` in a docstring."""
    parameter = inspect.Parameter
    name = re.escape(getattr(function, "__name__", ""))
    match = re.search(rf"\b{name}\(([^()]*(?:\([^()]*\)[^()]*)*)\)", inspect.getdoc(function) or "")
    try:
        signature = ast.parse(f"(lambda {match[1] if match else '*'}: 0)", mode="eval")
        found = next(node.args for node in ast.walk(signature) if isinstance(node, ast.Lambda))
        positional, keywords = found.posonlyargs + found.args, found.kwonlyargs
        required = [None] * (len(positional) - len(found.defaults))
        parameters = []
        for argument, node in zip(
            positional + keywords, [*required, *found.defaults, *found.kw_defaults], strict=True
        ):
            default = parameter.empty if node is None else ast.literal_eval(node)
            kind = parameter.KEYWORD_ONLY if argument in keywords else parameter.POSITIONAL_OR_KEYWORD
            parameters.append(parameter(argument.arg, kind, default=default))
    except (SyntaxError, ValueError, TypeError):
        return [parameter("args", parameter.VAR_POSITIONAL), parameter("kwargs", parameter.VAR_KEYWORD)]
    return parameters


def plain_default(default: Any, depth: int = 0) -> Any:
    """Return a default if it is a plain value, else its repr."""
    if default is None or type(default) in (bool, int, float, str):
        return default
    if type(default) in (list, tuple) and depth < 3:
        return type(default)(plain_default(child, depth + 1) for child in default)
    return print_safely(repr, default)


def annotation_text(annotation: Any) -> str:
    """Return an annotation as text, "" for none."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return annotation if isinstance(annotation, str) else ""
    return print_safely(inspect.formatannotation, annotation)
