"""What the faces share: a check at the door, and weights handed back that are still part of the graph.

An `AttentionMap` is detached and knows no dropout. A face whose original returns the very weights
that made its output asks for them here: `weigh`, its own dropout, `mix`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from manyheads import scores
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
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(weigh, (q, k, v), q, k, v, **rest)
    with scores.exactly(q.device):
        return reference.weights(Problem.of(q, k, v, **rest))[0]


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Weights `[b, h, t, s]` · v `[b, h, s, w]`, in v's dtype: `[b, h, t, w]`.

    A value that isn't finite reaches no query that gives it the weight 0.
    """
    if has_torch_function_variadic(weights, v):
        return handle_torch_function(mix, (weights, v), weights, v)
    with scores.exactly(v.device):
        wide = v.to(weights.dtype)
        out = weights @ wide if scores.finite(wide) else scores.mix(weights, weights != 0, wide)
        return out.to(v.dtype)
