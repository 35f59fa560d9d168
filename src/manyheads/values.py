"""Frozen values that may hold tensors: the ground that masks and biases stand on.

A value is a frozen dataclass; it compares by identity, moves with `.to`, and can be written down as
plain text beside a list of its tensors and read back. The text is how a mask passes through an
operator that takes only tensors and numbers, as `torch.compile` wants them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

V = TypeVar("V", bound="Value")

_KINDS: dict[str, type[Value]] = {}
_FUNCTIONS: list[Callable[..., Any]] = []


class Value:
    """A frozen dataclass whose fields are tensors, numbers, tuples, functions and other values."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed. They are not checked again: they come from our own code."""
        new = object.__new__(type(self))
        for place in fields(self):  # type: ignore[arg-type]
            object.__setattr__(new, place.name, changes.get(place.name, getattr(self, place.name)))
        return new

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to every tensor inside, however deep."""
        changed = {}
        for place in fields(self):  # type: ignore[arg-type]
            part = getattr(self, place.name)
            if isinstance(part, Tensor):
                changed[place.name] = change(part)
            elif isinstance(part, Value):
                changed[place.name] = part.map(change)
        return self.but(**changed) if changed else self

    def to(self, device: torch.device | str) -> Self:
        """The same value with its tensors on `device`."""
        return self.map(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        """The same value with its tensors cut from any graph."""
        return self.map(Tensor.detach)

    def tensors(self) -> list[Tensor]:
        """The tensors inside, in the order of the fields."""
        found: list[Tensor] = []
        write(self, found)
        return found


def bound(default: Any) -> Any:
    """A field that a problem fills in when it binds the value; it isn't written down."""
    return field(default=default, metadata={"bound": True})


def write(value: Value | None, tensors: list[Tensor]) -> str:
    """Write a value down as a Python literal; its tensors are appended to `tensors` by number."""
    if value is None:
        return "None"
    parts = [repr(type(value).__name__)]
    for place in fields(value):  # type: ignore[arg-type]
        part = place.default if place.metadata else getattr(value, place.name)
        if isinstance(part, Tensor):
            parts.append(f"('tensor', {len(tensors)})")
            tensors.append(part)
        elif isinstance(part, Value):
            parts.append(write(part, tensors))
        elif callable(part):
            if part not in _FUNCTIONS:
                _FUNCTIONS.append(part)
            parts.append(f"('function', {_FUNCTIONS.index(part)})")
        else:
            parts.append(f"('plain', {part!r})")
    return "(" + ", ".join(parts) + ",)"


def read(text: str, *tensors: list[Tensor]) -> tuple[Any, ...]:
    """Read back a tuple of what `write` wrote, each with its own list of tensors."""
    return tuple(
        _read(tree, own) for tree, own in zip(ast.literal_eval(text), tensors, strict=True)
    )


def _read(tree: Any, tensors: list[Tensor]) -> Any:
    if tree is None:
        return None
    name, *parts = tree
    if name == "tensor":
        return tensors[parts[0]]
    if name == "function":
        return _FUNCTIONS[parts[0]]
    if name == "plain":
        return parts[0]
    cls = _KINDS[name]
    new = object.__new__(cls)
    for place, part in zip(fields(cls), parts, strict=True):  # type: ignore[arg-type]
        object.__setattr__(new, place.name, _read(part, tensors))
    return new
