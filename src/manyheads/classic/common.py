"""Functions that the presentations share: checks of inputs, and differentiable weights.

An `AttentionMap` is detached, and has the weights before dropout. Some originals return the weights that
produced the output. Their presentations call `weigh`, apply dropout, and call `mix`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from manyheads import scores
from manyheads.kernels import reference
from manyheads.problem import Problem
from manyheads.shapes import kind, sizes

Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # q, k, v and other arguments of `attention`


def check(x: Any, name: str, *letters: str | int) -> None:
    """Check that x is a floating-point tensor with these dimensions, each a letter or an exact size."""
    expected = "[" + ", ".join(map(str, letters)) + "]"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"Expected {name} to be a tensor {expected} of floats, got {kind(x)}.")
    matches = x.dim() == len(letters) and all(
        isinstance(letter, str) or letter == n for letter, n in zip(letters, x.shape, strict=True)
    )
    if not matches:
        raise ValueError(f"Expected {name} to be {expected}, got {sizes(x)}.")


def weigh(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return differentiable weights `[b, h, t, s]` before dropout, in the dtype of the scores.

    The arguments are those of `manyheads.attention`.
    """
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(weigh, (q, k, v), q, k, v, **options)
    with scores.disable_autocast(q.device):
        return reference.weights(Problem.of(q, k, v, **options))[0]


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights `[b, h, t, s]` · v `[b, h, s, w]` as `[b, h, t, w]`, in the dtype of v.

    A non-finite value doesn't affect queries that give it a weight of 0.
    """
    if has_torch_function_variadic(weights, v):
        return handle_torch_function(mix, (weights, v), weights, v)
    with scores.disable_autocast(v.device):
        wide = v.to(weights.dtype)
        out = weights @ wide if scores.finite(wide) else scores.mix(weights, weights != 0, wide)
        return out.to(v.dtype)
