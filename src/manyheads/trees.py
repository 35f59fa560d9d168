"""Frozen values that may hold tensors: the base of masks and biases.

A value is a frozen dataclass; it compares by identity, moves with `.to`, and can be written down as
plain text beside a list of its tensors and read back. The text is how a mask passes through an
operator that takes only tensors and numbers, as `torch.compile` wants them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from dataclasses import Field, field
from itertools import count
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_KINDS: dict[str, type[Value]] = {}
_FUNCTIONS: WeakValueDictionary[int, Callable[..., Any]] = WeakValueDictionary()


def bound(default: Any) -> Any:
    """Declare a field that a problem fills in when it binds the value; it isn't written down."""
    return field(default=default, metadata={"bound": True})


_numbers = count()


def number(function: Callable[..., Any]) -> int:
    """Return a number that stands for a function in text, as long as the function exists."""
    place = next(_numbers)
    _FUNCTIONS[place] = function
    return place


class Value:
    """A frozen dataclass whose fields are tensors, numbers, tuples, functions and other values."""

    # Field names, and the defaults of those that are bound: what `dataclasses.fields` would tell,
    # but plain enough for torch.compile to read.
    names: ClassVar[tuple[str, ...]] = ()
    unbound: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        _KINDS[f"{cls.__module__}.{cls.__qualname__}"] = cls
        own = (
            [name for name in cls.__annotations__ if name not in cls.names]
            if "__annotations__" in vars(cls)
            else []
        )
        cls.names = (*cls.names, *own)
        marked = {name: place for name, place in vars(cls).items() if isinstance(place, Field)}
        cls.unbound = cls.unbound | {name: place.default for name, place in marked.items() if place.metadata}

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. Changes aren't checked: they come from our own code."""
        new = object.__new__(type(self))
        for name in self.names:
            object.__setattr__(new, name, changes.get(name, getattr(self, name)))
        return new

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change` applied to every tensor inside, of any shape `[...]`, however deep."""
        changed: dict[str, Any] = {}
        for name in self.names:
            part = getattr(self, name)
            if isinstance(part, Tensor):
                changed[name] = change(part)
            elif isinstance(part, Value):
                changed[name] = part.map(change)
        return self.but(**changed) if changed else self

    def to(self, device: torch.device | str) -> Self:
        """Return the same value with its tensors on `device`; PyTorch's RuntimeError if there is none."""
        return self.map(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        """Return the same value with its tensors cut from any graph."""
        return self.map(lambda tensor: tensor.detach())

    def tensors(self) -> list[Tensor]:
        """Return the tensors inside, of any shapes `[...]`, in the order of the fields."""
        found: list[Tensor] = []
        for name in self.names:
            part = None if name in self.unbound else getattr(self, name)
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, Value):
                found += part.tensors()
        return found


def write(value: Value | None, tensors: list[Tensor]) -> str:
    """Write a value down as a Python literal; its tensors are appended to `tensors` by number."""
    if value is None:
        return "None"
    kind = type(value)
    parts = [f"'{kind.__module__}.{kind.__qualname__}'"]
    for name in value.names:
        part = value.unbound[name] if name in value.unbound else getattr(value, name)
        if isinstance(part, Tensor):
            parts.append(f"('tensor', {len(tensors)})")
            tensors.append(part)
        elif isinstance(part, Value):
            parts.append(write(part, tensors))
        elif callable(part):
            parts.append(f"('function', {value.number})")  # type: ignore[attr-defined]
        else:
            parts.append(f"('plain', {part})")
    return "(" + ", ".join(parts) + ",)"


def read(text: str, *tensors: list[Tensor]) -> tuple[Any, ...]:
    """Read back a tuple of what `write` wrote, each with its own list of tensors."""
    return tuple(_read(tree, own) for tree, own in zip(_tree(text), tensors, strict=True))


@functools.lru_cache(256)
def _tree(text: str) -> tuple[Any, ...]:
    """Parse a text into tuples; cached, as a training step reads the same few texts again and again."""
    return ast.literal_eval(text)


def functions(text: str) -> list[Callable[..., Any]]:
    """Return the functions that a text names: hold them to read it later."""
    return [_FUNCTIONS[int(place)] for place in re.findall(r"\('function', (\d+)\)", text)]


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
    for place, part in zip(cls.names, parts, strict=True):
        object.__setattr__(new, place, _read(part, tensors))
    return new
