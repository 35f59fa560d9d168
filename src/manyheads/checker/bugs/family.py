"""How a bug is declared: a name, a description, a fix, and oracles that override a step.

A bug that can be made in several ways has several variants under one name. Two bugs at once are a class that
inherits from both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.checker.oracle import Attention, Oracle


@dataclass(frozen=True)
class Bug:
    """One entry of the table; `description` continues "attention …", `fix` says what to write instead."""

    name: str
    description: str
    fix: str
    variants: tuple[type[Oracle], ...]


def bug(name: str, description: str, fix: str, *variants: type[Oracle]) -> Bug:
    """Return one row of a table of bugs."""
    return Bug(name, description, fix, variants)


def override(base: type[Oracle] = Attention, /, **steps: Any) -> type[Oracle]:
    """Return an oracle with these steps in place of its own."""
    return type("Override", (base,), steps)


def transform(base: type[Oracle] = Attention, /, **changes: Callable[..., Any]) -> type[Oracle]:
    """Return an oracle whose steps' results are changed: `change(oracle, result)`."""

    def changed(step: str, change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args: change(self, getattr(super(oracle, self), step)(*args))

    oracle = type("Transform", (base,), {step: changed(step, change) for step, change in changes.items()})
    return oracle


def for_roles(roles: str, **changes: Callable[..., Any]) -> type[Oracle]:
    """Return an oracle whose steps' results are changed for some roles, their first argument."""

    def changed(step: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def result(self: Oracle, role: str, *args: Any) -> Any:
            before = getattr(super(oracle, self), step)(role, *args)
            return change(self, before) if role in roles else before

        return result

    oracle = type("ForRoles", (Attention,), {step: changed(step, change) for step, change in changes.items()})
    return oracle


def redirect(roles: Mapping[str, str], *steps: str) -> type[Oracle]:
    """Return an oracle that takes other roles in these steps."""

    def redirected(step: str) -> Callable[..., Any]:
        return lambda self, role, *args: getattr(super(oracle, self), step)(roles.get(role, role), *args)

    oracle = type("Redirect", (Attention,), {step: redirected(step) for step in steps})
    return oracle


def compose(base: type[Oracle], *bugs: type[Oracle]) -> type[Oracle]:
    """Return an oracle with several bugs; of two that override one step, the later calls the earlier."""
    return type("", (*reversed(bugs), base), {}) if bugs else base


def overridden_steps(bugs: tuple[type[Oracle], ...], base: type[Oracle]) -> frozenset[str]:
    """Return the steps that bugs override."""
    classes = {cls for bug in bugs for cls in bug.__mro__} - set(base.__mro__)
    return frozenset(step for cls in classes for step in vars(cls) if not step.startswith("__"))
