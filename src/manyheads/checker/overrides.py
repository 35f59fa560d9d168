"""Oracles with other steps: how bugs and parts change a computation.

A bug that code can have in several ways has several variants, all with one name. Two bugs at once are a class
that inherits from both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyheads.checker.oracle import Attention, Oracle


class Bug:
    """A known bug.

    Args:
        name: its name in reports.
        description: continues the sentence "attention …".
        fix: how to write it instead.
        *variants: oracles with this bug.
    """

    def __init__(self, name: str, description: str, fix: str, *variants: type[Oracle]) -> None:
        self.name, self.description, self.fix, self.variants = name, description, fix, variants


def override(base: type[Oracle] = Attention, /, **steps: Any) -> type[Oracle]:
    """Return an oracle with other steps. A step is a method, or the value of a class attribute."""
    return type("Override", (base,), steps)


def wrap(base: type[Oracle] = Attention, /, **wrappers: Callable[..., Any]) -> type[Oracle]:
    """Return an oracle with wrapped steps: `wrapper(oracle, step, *args)` calls the inherited step."""

    def method(name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args: wrapper(self, getattr(super(oracle, self), name), *args)

    oracle = type("Wrap", (base,), {name: method(name, wrapper) for name, wrapper in wrappers.items()})
    return oracle


def transform(base: type[Oracle] = Attention, /, **changes: Callable[..., Any]) -> type[Oracle]:
    """Return an oracle with changed results of steps: `change(oracle, result)`, unless the result is None."""

    def wrapper(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(oracle: Oracle, step: Callable[..., Any], *args: Any) -> Any:
            result = step(*args)
            return None if result is None else change(oracle, result)

        return changed

    return wrap(base, **{name: wrapper(change) for name, change in changes.items()})


def compose(base: type[Oracle], *bugs: type[Oracle]) -> type[Oracle]:
    """Return an oracle with several bugs. If two override the same step, the later bug calls the earlier."""
    return type("", (*reversed(bugs), base), {}) if bugs else base


def overridden_steps(bugs: tuple[type[Oracle], ...], base: type[Oracle]) -> frozenset[str]:
    """Return the names of the steps that these bugs override."""
    classes = {cls for bug in bugs for cls in bug.__mro__} - set(base.__mro__)
    return frozenset(step for cls in classes for step in vars(cls) if not step.startswith("__"))
