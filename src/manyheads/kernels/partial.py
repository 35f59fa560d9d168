"""Attention over some of the keys of each row, for keys that are spread over processes.

A partial result is the output and the log-sum-exp over a block of keys. `Merged` adds partial results: their
log-sum-exps are the weights by which their outputs are averaged (Milakov & Gimelshein 2018,
arXiv:1805.02867; Liu et al. 2023, arXiv:2310.01889). The gradient of a block needs the output and the
log-sum-exp of the whole row, from which `backward` computes the weights again (Dao et al. 2022,
arXiv:2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.biases import ALiBi, Dense
from manyheads.kernels import chunked, native
from manyheads.kernels.native import passes
from manyheads.problem import Problem
from manyheads.scores import disable_autocast

NAMES = (native.NAME, chunked.NAME)  # the kernels that give a log-sum-exp and take one for gradients


class Gradients(NamedTuple):
    """A block's share of gradients."""

    q: Tensor  # [b, h, t, d]
    k: Tensor  # [b, g, s, d]
    v: Tensor  # [b, g, s, w]
    bias: Tensor | None  # in the shape of the bias's tensor


def choose(problem: Problem, kernel: str = "auto", bias_gradient: bool = False, finite: bool = True) -> str:
    """Return the name of the kernel for a block; the same for its forward and its backward pass.

    Args:
        problem: The block.
        kernel: "auto" or a name of `NAMES`.
        bias_gradient: Whether the bias needs a gradient.
        finite: Whether all numbers of q, k and v are finite, or no gradient is needed.

    Returns:
        The name.

    Raises:
        ValueError: If a kernel given by name doesn't support the block.
    """
    if kernel == chunked.NAME:
        return kernel
    reasons = native.why_unsupported(problem)
    if bias_gradient and not _differentiates(problem):
        reasons = [*reasons, "it has no gradient of this bias"]
    if kernel == "auto":
        return chunked.NAME if reasons or not finite else native.NAME
    if reasons:
        raise ValueError(
            f'kernel="{kernel}" doesn\'t support this: {"; ".join(reasons)}. Use kernel="auto" or "chunked".'
        )
    return kernel


def _differentiates(problem: Problem) -> bool:
    """Return True if the native kernel computes the gradient of the bias."""
    bias = problem.bias
    dense = isinstance(bias, Dense) and bias.values.shape[-1:] == (problem.shape.s,)
    return bias is None or isinstance(bias, ALiBi) or dense


def forward(problem: Problem, kernel: str) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]` of a block without a sink."""
    with torch.no_grad(), disable_autocast(problem.q.device):
        if kernel == native.NAME:
            return passes.forward(problem)[:2]
        return chunked.forward(problem)


def backward(
    problem: Problem, kernel: str, out: Tensor, lse: Tensor, d_out: Tensor, bias_gradient: bool = False
) -> Gradients:
    """Return the block's share of the gradients of q, k, v and the bias's tensor.

    Args:
        problem: The block, without a sink.
        kernel: The kernel of the forward pass.
        out: The output over all keys, `[b, h, t, w]`.
        lse: The log-sum-exp over all keys, sink included, `[b, h, t]`.
        d_out: The gradient of the output, `[b, h, t, w]`.
        bias_gradient: Whether the bias needs a gradient.

    Returns:
        The gradients.
    """
    with torch.no_grad(), disable_autocast(problem.q.device):
        grads: Sequence[Tensor | None] | None = None
        if kernel == native.NAME:
            bias = problem.bias if bias_gradient else None
            grads = passes.differentiate(problem, out, lse, d_out, None, bias)
        if grads is None:  # also if a number isn't finite, which `finite` in `choose` excludes for q, k and v
            needs = [True, True, True, False, bias_gradient]
            grads = chunked.backward(problem, out, lse, d_out, torch.zeros_like(lse), needs)
    dq, dk, dv, _, d_bias = grads
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return Gradients(dq, dk, dv, d_bias if bias_gradient else None)


class Merged:
    """Outputs of rows that are merged from partial results, in float32 (or float64).

    It has the maximum of the log-sum-exps of each row and sums relative to it, so that the rounding of the
    merged log-sum-exp doesn't affect the output.

    Args:
        q: The queries `[b, h, t, d]`.
        width: The width w of the values.
        dtype: The dtype of the sums.
        sink: A logit per head, `[h]`, or None.
    """

    def __init__(self, q: Tensor, width: int, dtype: torch.dtype, sink: Tensor | None) -> None:
        rows = q.shape[:3]
        self.out = q.new_zeros(*rows, width, dtype=dtype)  # [b, h, t, w]
        self.top = q.new_full(rows, -math.inf, dtype=dtype)  # [b, h, t]
        if sink is not None:
            self.top[:] = sink.detach().to(dtype)[None, :, None]
        self.total = (self.top != -math.inf).to(dtype)  # [b, h, t]

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add a partial output `[b, h, r, w]` and log-sum-exp `[b, h, r]` to some rows."""
        top = self.top[:, :, rows]
        higher = torch.maximum(top, lse)
        shift = torch.where(higher == -math.inf, 0.0, higher)  # −inf − −inf is NaN
        decay, gain = torch.exp(top - shift), torch.exp(lse - shift)
        self.total[:, :, rows] = self.total[:, :, rows] * decay + gain
        self.out[:, :, rows].mul_(decay[..., None]).addcmul_(out.to(self.out.dtype), gain[..., None])
        self.top[:, :, rows] = higher

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output `[b, h, t, w]` in a dtype, and the log-sum-exp `[b, h, t]`."""
        empty = self.total == 0
        out = self.out.div_(torch.where(empty, 1.0, self.total)[..., None]).to(dtype)
        return out, torch.where(empty, -math.inf, self.top + self.total.log())
