"""What the faces share: a check at the door, and weights handed back that are still part of the graph.

An `AttentionMap` is detached and knows no dropout. A face whose original returns the very weights
that made its output asks for them here: `weigh`, its own dropout, `mix`.
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
    """x must be a floating-point tensor of these dimensions; a number is a size it must have."""
    want = "[" + ", ".join(map(str, letters)) + "]"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a tensor {want} of floats, and {kind(x)} came.")
    fits = x.dim() == len(letters) and all(
        isinstance(letter, str) or letter == n for letter, n in zip(letters, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must be {want}, and {sizes(x)} came.")


def weigh(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """The weights `[b, h, t, s]` before dropout, differentiable; the arguments of `attention`.

    float32, float64 for float64: what the core computes scores in.
    """
    problem = Problem.of(q, k, v, **rest)

    def own() -> Tensor:
        with scores.exactly(q.device):
            return reference.weights(problem)[0]

    return looked_at(problem, own, lambda: None, heads=None)  # removed heads still have their weights


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Weights `[b, h, t, s]` · v `[b, h, s, w]`, in v's dtype: `[b, h, t, w]`.

    A value that isn't finite reaches no query that gives it the weight 0.
    """
    with scores.exactly(v.device):
        wide = v.to(weights.dtype)
        out = weights @ wide if scores.finite(wide) else scores.mix(weights, weights != 0, wide)
        return without_removed(out.to(v.dtype))
