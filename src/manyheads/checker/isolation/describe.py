"""Describe a candidate without calling it: its signature, documentation, parameters and source."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        attributes: The public attributes that are numbers, bools or strings, such as num_heads.
        source: Its Python code.
        module_doc: The docstring of its file.
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


def describe(target: Any, instance: Any) -> Description:
    """Describe a target, and its instance if there is one."""
    kind: Type = "module"
    if isinstance(target, type):
        kind = "class"
    elif inspect.isroutine(target) or isinstance(target, functools.partial):
        kind = "function"
    definition = type(target) if kind == "module" else target  # the object with source and documentation
    while isinstance(definition, functools.partial):
        definition = definition.func
    try:
        source = inspect.getsource(definition)
    except (OSError, TypeError):
        source = ""
    torch_module = isinstance(target, nn.Module) or (kind == "class" and issubclass(target, nn.Module))
    if kind == "function":
        call = read_signature(target, bound=True)
    else:
        name = "forward" if torch_module else "__call__"
        method = next((vars(c)[name] for c in definition.__mro__ if name in vars(c)), None)
        call = read_signature(method, bound=isinstance(method, staticmethod)) if method else ()
    module = instance if isinstance(instance, nn.Module) else None
    attributes = {} if kind == "function" else getattr(instance, "__dict__", {})
    return Description(
        type=kind,
        name=getattr(definition, "__name__", type(definition).__name__),
        doc=inspect.getdoc(definition) or "",
        init=read_signature(target, bound=True) if kind == "class" else None,
        call=call,
        torch_module=torch_module,
        parameters={name: tuple(x.shape) for kind, name, x in module_tensors(module) if kind == "parameter"},
        buffers={name: tuple(x.shape) for kind, name, x in module_tensors(module) if kind == "buffer"},
        layers={path: type(x).__name__ for path, x in module.named_modules()} if module else {},
        attributes={
            name: value
            for name, value in attributes.items()
            if type(value) in (bool, int, float, str) and not name.startswith("_") and name != "training"
        },
        source=source,
        module_doc=inspect.getdoc(sys.modules.get(getattr(definition, "__module__", "") or "")) or "",
    )


def module_tensors(module: Any) -> Iterator[tuple[Literal["parameter", "buffer"], str, Tensor]]:
    """Yield the parameters and buffers of a module, without lazy ones, which have no shape yet."""
    if isinstance(module, nn.Module):
        yield from (("parameter", n, x) for n, x in module.named_parameters() if not nn.parameter.is_lazy(x))
        yield from (("buffer", n, x) for n, x in module.named_buffers() if not nn.parameter.is_lazy(x))


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
    if not bound and parameters and parameters[0].kind != inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return tuple(
        Argument(
            name=parameter.name,
            kind=KINDS[parameter.kind],
            required=parameter.default is parameter.empty and "VAR" not in parameter.kind.name,
            default=None if parameter.default is parameter.empty else plain_default(parameter.default),
            annotation=""
            if parameter.annotation is parameter.empty
            else annotation_text(parameter.annotation),
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
        arguments = next(node.args for node in ast.walk(signature) if isinstance(node, ast.Lambda))
        parameters = []
        for names, defaults, kind in (
            (arguments.posonlyargs + arguments.args, arguments.defaults, parameter.POSITIONAL_OR_KEYWORD),
            (arguments.kwonlyargs, arguments.kw_defaults, parameter.KEYWORD_ONLY),
        ):
            for argument, default in zip(
                names, [None] * (len(names) - len(defaults)) + [*defaults], strict=True
            ):
                value = parameter.empty if default is None else ast.literal_eval(default)
                parameters.append(parameter(argument.arg, kind, default=value))
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
    """Return an annotation as text."""
    return annotation if isinstance(annotation, str) else print_safely(inspect.formatannotation, annotation)
