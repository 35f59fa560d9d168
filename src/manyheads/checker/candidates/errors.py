"""Errors that adapters raise."""

from __future__ import annotations

from manyheads.checker.isolation.errors import CandidateError

# Advice for code that has more than attention in it.
ALONE = (
    "To judge the attention alone, check a module or a function without the rest, such as "
    "f(q, k, v, mask) of heads [b, h, t, d] with --like attention"
)


class Unclear(Exception):
    """The error of a candidate that can't be imported, built or understood; it says why and how to fix it.

    Attributes:
        error: The error of the candidate's code in its first call, if that is the reason.
    """

    error: CandidateError | None = None


class UnexpectedOutput(Exception):
    """The error of an output that has another type, shape or dtype than attention returns."""
