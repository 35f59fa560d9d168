"""Rules of masks: functions of the user, which may raise an error on one rank alone.

The other ranks still need that rank's keys, so the error waits until all messages are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from manyheads.distributed.communication import agree
from manyheads.masks import Mask, Rule
from manyheads.problem import Problem


class Guard:
    """A rule's function that masks everything in place of raising an error, which it stores."""

    def __init__(self, keep: Callable[..., Any]) -> None:
        self.keep = keep
        self.error: Exception | None = None

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Return what the rule keeps."""
        try:
            return self.keep(b, h, i, j)
        except Exception as error:
            self.error = self.error or error
            return (i == j) & False


def guard(problem: Problem) -> Problem:
    """Return a problem whose rules store their errors for `raise_errors`."""
    return problem if problem.mask is None else replace(problem, mask=_guard(problem.mask))


def _guard(mask: Mask) -> Mask:
    if isinstance(mask, Rule):
        return mask.but(fn=Guard(mask.keep))
    parts = {name: getattr(mask, name) for name in mask.names}
    return mask.but(**{name: _guard(part) for name, part in parts.items() if isinstance(part, Mask)})


def raise_errors(problem: Problem, group: Any) -> None:
    """Raise an error of a guarded rule on every rank. All ranks call it, with the same mask.

    Args:
        problem: The problem.
        group: The process group.

    Raises:
        ValueError: If a rule raised an error on another rank. The rank itself raises that error.
    """
    rules = [mask.fn for mask in problem.masks() if isinstance(mask, Rule)]
    guards = [function for function in rules if isinstance(function, Guard)]

    def check() -> dict[str, Any]:
        for error in (each.error for each in guards if each.error is not None):
            raise error
        return {}

    if guards:
        agree(group, check, ())
