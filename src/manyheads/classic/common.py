"""What the presentations share: checks of inputs, and weights that are still part of the graph.

An `AttentionMap` is detached and knows no dropout. A presentation whose original returns the weights that
produced its output calls `weigh`, its own dropout, and `mix`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from manyheads import scores
from manyheads.functional import looked_at, without_removed
from manyheads.kernels import reference
from manyheads.scores import Problem
from manyheads.shapes import kind, sizes


def check(x: Any, name: str, *letters: str | int) -> None:
    """Check that x is a floating-point tensor with these dimensions; a number is an exact size."""
    want = "[" + ", ".join(map(str, letters)) + "]"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"Expected {name} to be a tensor {want} of floats, got {kind(x)}.")
    fits = x.dim() == len(letters) and all(
        isinstance(letter, str) or letter == n for letter, n in zip(letters, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"Expected {name} to be {want}, got {sizes(x)}.")


def weigh(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """Return the differentiable weights `[b, h, t, s]` before dropout, in the dtype of scores.

    The arguments are those of `manyheads.attention`.
    """
    problem = Problem.of(q, k, v, **rest)

    def own() -> Tensor:
        with scores.exactly(q.device):
            return reference.weights(problem)[0]

    return looked_at(problem, own, lambda: None, heads=None)  # removed heads still have their weights


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights `[b, h, t, s]` times v `[b, h, s, w]` as `[b, h, t, w]`, in the dtype of v.

    A value that isn't finite doesn't affect queries whose weight for it is 0.
    """
    with scores.exactly(v.device):
        wide = v.to(weights.dtype)
        out = weights @ wide if scores.finite(wide) else scores.mix(weights, weights != 0, wide)
        return without_removed(out.to(v.dtype))
