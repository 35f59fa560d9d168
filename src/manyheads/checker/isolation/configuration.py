"""Convert plain data to arguments, such as the configurations of transformers' classes (a `LlamaConfig`)."""

from __future__ import annotations

import operator
import re
import sys
import types
import typing
from itertools import takewhile
from typing import Any

from torch import nn

from manyheads.checker.isolation.describe import Argument, Configuration, read_signature, unwrap_partial
from manyheads.masks import Keep

CLASS = re.compile(r"(Config|Configuration|Args|Arguments|Params|Parameters|Options)$")
ARGUMENT = re.compile(r"(.*_)?(config|cfg|conf|args|params|configuration|options)")
PLAIN = (bool, int, float, str, type(None))


def find_configurations(target: Any) -> dict[str, type]:
    """Return the classes of the configurations that a class takes, by the name of the argument.

    The class is the one in the argument's annotation. Without an annotation, it is the class in the file of
    the target whose name ends in Config or a similar word; of several, the one whose name begins most like
    the target's.
    """
    built = unwrap_partial(target)
    try:
        hints = typing.get_type_hints(built.__init__)
    except Exception:  # an annotation may name anything
        hints = {}
    found: dict[str, type] = {}
    for argument in read_signature(target, bound=True):
        if argument.default is not None or not argument.is_named:
            continue
        if argument.name in hints:
            annotation = hints[argument.name]
            classes = [each for each in (annotation, *typing.get_args(annotation)) if is_configuration(each)]
        else:
            classes = find_classes(built) if ARGUMENT.fullmatch(argument.name) else []
        if classes:
            found[argument.name] = classes[0]
    return found


def is_configuration(value: Any) -> bool:
    """Return True if a value is a class whose name says that it is a configuration."""
    return isinstance(value, type) and bool(CLASS.search(value.__name__)) and not issubclass(value, nn.Module)


def find_classes(target: type) -> list[type]:
    """Return the configurations in the file of a class, the most similar name first, without base classes."""
    names = vars(sys.modules.get(target.__module__, typing))
    classes = list(dict.fromkeys(filter(is_configuration, names.values())))
    used = [each for each in classes if not any(each in other.__mro__[1:] for other in classes)]

    def similarity(configuration: type) -> tuple[int, bool]:
        equal = takewhile(bool, map(operator.eq, configuration.__name__, target.__name__))
        return sum(equal), configuration.__module__ == target.__module__

    return sorted(used, key=similarity, reverse=True)


def describe_configurations(target: Any) -> dict[str, Configuration]:
    """Describe the classes of the configurations that a class takes, by the name of the argument."""
    found = {}
    for argument, configuration in find_configurations(target).items():
        fields = {each.name: each for each in read_signature(configuration, bound=True) if each.is_named}
        for name, value in (item for base in reversed(configuration.__mro__) for item in vars(base).items()):
            is_field = type(value) in PLAIN and not name.startswith("_")
            if is_field or name == "_attn_implementation":
                default = value if is_field else None
                fields.setdefault(name, Argument(name, "keyword", False, default, ""))
        found[argument] = Configuration(configuration.__name__, tuple(fields.values()))
    return found


def build_arguments(target: Any, init: dict[str, Any]) -> dict[str, Any]:
    """Convert constructor arguments; `{"__configuration__": name, "values": {…}}` is a configuration."""
    classes = find_configurations(target)
    return {
        name: build_configuration(classes[name], value["values"])
        if name in classes and isinstance(value, dict) and "__configuration__" in value
        else to_object(value)
        for name, value in init.items()
    }


def to_object(value: Any) -> Any:
    """Convert an argument that a tree can't contain from its encoding, and return others unchanged.

    `{"__namespace__": {name: value}}` is a module or a configuration of an unknown class,
    `{"__keep__": tensor}` a `Keep`.
    """
    match value:
        case {"__namespace__": dict(attributes), **others} if not others:
            return types.SimpleNamespace(**attributes)
        case {"__keep__": mask, **others} if not others:
            return Keep(mask)
    return value


def build_configuration(configuration: type, values: dict[str, Any]) -> Any:
    """Build a configuration; values that its constructor doesn't take are set as attributes."""
    arguments = read_signature(configuration, bound=True)
    takes_any = any(argument.kind == "var_keyword" for argument in arguments)
    taken = {argument.name for argument in arguments if argument.is_named}
    passed = {name: value for name, value in values.items() if name in taken or takes_any}
    built = configuration(**passed)
    for name in values.keys() - passed.keys():
        setattr(built, name, values[name])
    return built
