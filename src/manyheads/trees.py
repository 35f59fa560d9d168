"""Trees of plain values, tensors and records, and their conversion to JSON data.

A tree is a tensor, None, a bool, int, float, str or torch.dtype, a list, tuple or dict (with str keys) of
trees, or a record: an object of a known class whose fields are trees. `pack` converts a tree to JSON data
that refers to its tensors by number, and `unpack` converts it back. Custom operators take masks and biases in
this form (`kernels.operator`), and processes send messages in it (`checker.isolation`).

A `Value`, the base class of masks and biases, is a record of this library: a frozen dataclass that may
contain tensors, compares by identity and moves to another device with `.to`.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, ClassVar, Self, dataclass_transform
from weakref import WeakValueDictionary

import torch
from torch import Tensor

DEPTH = 64  # the deepest nesting of a tree
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
VALUES: dict[str, type] = {}  # every class of values, by its name in packed trees
_FUNCTIONS: WeakValueDictionary[int, Callable[..., Any]] = WeakValueDictionary()

# -- values ----------------------------------------------------------------------------------------


def bound(*, default: Any) -> Any:
    """Declare a field that is set by binding the value to a problem. It is packed as its default."""
    return field(default=default, metadata={"bound": True})


_numbers = count()


def register_function(function: Callable[..., Any]) -> int:
    """Register a function, and return the number that identifies it in packed trees while it exists."""
    number = next(_numbers)
    _FUNCTIONS[number] = function
    return number


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(bound, field))
class Value:
    """A frozen dataclass whose fields are tensors, numbers, tuples, functions and other values.

    Every subclass becomes a dataclass without a decorator.
    """

    # The name of the class in packed trees, the names of its fields, and the defaults of bound fields.
    # torch.compile can trace these, but not `dataclasses.fields`.
    record: ClassVar[str] = ""
    names: ClassVar[tuple[str, ...]] = ()
    unbound: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        made: Any = dataclass(frozen=True, eq=False, repr=cls.__repr__ is object.__repr__)(cls)
        declared = fields(made)
        cls.record = f"{cls.__module__}.{cls.__qualname__}"
        cls.names = tuple(part.name for part in declared)
        cls.unbound = {part.name: part.default for part in declared if part.metadata}
        VALUES[cls.record] = cls

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. The changes aren't checked."""
        new = object.__new__(type(self))
        for name in self.names:
            object.__setattr__(new, name, changes.get(name, getattr(self, name)))
        return new

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change` applied to every tensor `[...]`, including those of nested values."""
        changed: dict[str, Any] = {}
        for name in self.names:
            part = getattr(self, name)
            if isinstance(part, Tensor):
                changed[name] = change(part)
            elif isinstance(part, Value):
                changed[name] = part.map(change)
        return self.but(**changed) if changed else self

    def to(self, device: torch.device | str) -> Self:
        """Return the same value with its tensors on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        """Return the same value with its tensors detached from their graphs."""
        return self.map(lambda tensor: tensor.detach())

    def tensors(self) -> list[Tensor]:
        """Return the tensors `[...]` of the value and of nested values, in order, except bound fields."""
        tensors: list[Tensor] = []
        for name in self.names:
            part = None if name in self.unbound else getattr(self, name)
            if isinstance(part, Tensor):
                tensors.append(part)
            elif isinstance(part, Value):
                tensors += part.tensors()
        return tensors


# -- the codec -------------------------------------------------------------------------------------


def pack(tree: Any, add: Callable[[Tensor], int], records: Mapping[str, type] = VALUES) -> Any:
    """Return a tree as plain data.

    Args:
        tree: The tree.
        add: A function that takes each tensor and returns its number.
        records: The classes that records may have, by name.

    Returns:
        Lists, dicts with str keys, str, finite numbers, bools and None.

    Raises:
        TypeError: If an object inside isn't a tree.
    """
    kind = type(tree)
    if isinstance(tree, Tensor):
        return {"tensor": add(tree)}
    if tree is None or kind in (bool, int, str):
        return tree
    if kind is float:
        return tree if math.isfinite(tree) else {"float": str(tree)}
    if kind in (list, tuple):
        children = [pack(child, add, records) for child in tree]
        return children if kind is list else {"tuple": children}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: pack(child, add, records) for key, child in tree.items()}}
    if isinstance(tree, torch.dtype) and tree in NAMES:
        return {"dtype": NAMES[tree]}
    name = getattr(kind, "record", kind.__name__)
    if records.get(name) is not kind:
        raise TypeError(f"Expected a tensor or a plain value to pack, got a {kind.__name__}. Convert it.")
    packed: dict[str, Any] = {}
    for field_name in tree.names if isinstance(tree, Value) else vars(tree):
        part = getattr(tree, field_name)
        if isinstance(tree, Value) and field_name in tree.unbound:
            part = tree.unbound[field_name]
        is_function = isinstance(tree, Value) and callable(part)
        packed[field_name] = {"function": tree.number} if is_function else pack(part, add, records)
    return {"record": [name, packed]}


def unpack(
    node: Any, tensors: Sequence[Tensor], records: Mapping[str, type] = VALUES, depth: int = DEPTH
) -> Any:
    """Return the tree of packed data. Everything is checked except for the fields of a `Value`.

    Args:
        node: The result of `pack`.
        tensors: The tensors by number.
        records: The classes that records may have, by name; their fields must have the declared types.
        depth: The deepest allowed nesting.

    Returns:
        The tree.

    Raises:
        ValueError: If the data isn't a packed tree.
    """
    if depth == 0:
        raise ValueError("a tree that is nested too deeply")

    def children(nodes: Any, kind: type) -> dict[Any, Any]:
        pairs = expect(kind, nodes).items() if kind is dict else enumerate(expect(kind, nodes))
        return {key: unpack(child, tensors, records, depth - 1) for key, child in pairs}

    if type(node) is list:
        return list(children(node, list).values())
    if type(node) is not dict:
        return node
    match [*node.items()]:
        case [("tuple", nodes)]:
            return tuple(children(nodes, list).values())
        case [("dict", nodes)]:
            return children(nodes, dict)
        case [("tensor", number)] if 0 <= expect(int, number) < len(tensors):
            return tensors[number]
        case [("float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("dtype", str(name))] if name in DTYPES:
            return DTYPES[name]
        case [("function", int(number))] if number in _FUNCTIONS:
            return _FUNCTIONS[number]
        case [("record", [str(name), fields])] if name in records:
            return _make_record(records[name], children(fields, dict))
    raise ValueError(f"a node {str(node)[:80]}")


def functions(node: Any) -> list[Callable[..., Any]]:
    """Return the functions in packed data. Keep references to them until the data is unpacked."""
    if not isinstance(node, dict | list):
        return []
    if isinstance(node, dict) and "function" in node:
        return [_FUNCTIONS[node["function"]]]
    children = node.values() if isinstance(node, dict) else node
    return [function for child in children for function in functions(child)]


def expect(kind: type, value: Any) -> Any:
    """Return the value if it has exactly this type, else raise ValueError."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _make_record(record: type, fields: dict[str, Any]) -> Any:
    """Create a record; raise ValueError unless its fields have the types that its class declares."""
    if issubclass(record, Value):  # values are packed in this process only, so they aren't checked
        value = object.__new__(record)
        for name in record.names:
            object.__setattr__(value, name, fields[name])
        return value
    hints = typing.get_type_hints(record)
    if set(fields) != set(hints):
        raise ValueError(f"a record {record.__name__} of {sorted(fields)}")
    for name, hint in hints.items():
        if not fits(fields[name], hint):
            got = type(fields[name]).__name__
            raise ValueError(f"a record {record.__name__} whose {name} is a {got}, not {hint}")
    return record(**fields)


def fits(value: Any, hint: Any) -> bool:
    """Return True if a value has the type that an annotation declares."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in inner
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is tuple:
        return type(value) is tuple and all(fits(child, inner[0]) for child in value)
    if origin is dict:
        return type(value) is dict and all(fits(child, inner[1]) for child in value.values())
    return isinstance(value, Tensor) if hint is Tensor else type(value) is (hint or type(None))
