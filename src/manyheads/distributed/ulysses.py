"""Head-sharded attention (Ulysses): each rank computes some heads over the whole sequence.

An all-to-all gives each rank all tokens of its heads, and another one returns the outputs (Jacobs et al.
2023, arXiv:2309.14509). It sends less than the ring, but a rank has all keys of its heads, and there can't be
more ranks than key heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads import kernels
from manyheads.biases import ALiBi, Bias, Dense, Relative
from manyheads.distributed.communication import agree, all_reduce, count, explained
from manyheads.masks import And, Band, Ids, Keys, Lengths, Mask, Not, Or, Prefix, Rule
from manyheads.problem import Problem


def _exchange(x: Tensor, group: Any, split: int, join: int) -> Tensor:
    """Split an axis over the ranks, and join what the ranks send along another axis."""
    ranks = dist.get_world_size(group)
    pieces = torch.stack(x.chunk(ranks, split))  # [ranks, …]
    received = torch.empty_like(pieces)
    with explained():
        dist.all_to_all_single(received, pieces, group=group)
    sent = x.nbytes // ranks * (ranks - 1)
    count(sent, ranks - 1, sent)
    return torch.cat(received.unbind(), join)


class Exchange(torch.autograd.Function):
    """Move the sharding from one axis to another by an all-to-all; the gradient moves it back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split: int, join: int) -> Tensor:
        """Return x, which was sharded along `join`, sharded along `split`."""
        ctx.arguments = group, join, split
        return _exchange(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient of x, sharded as x was."""
        return Exchange.apply(grad, *ctx.arguments), None, None, None


class SumGradient(torch.autograd.Function):
    """Return a tensor unchanged; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Return a view of the tensor."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the sum over ranks, which is added in float32 (or float64)."""
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
        all_reduce(total, ctx.group)
        return total.to(grad.dtype), None


def attend(
    whole: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    order: Tensor | None,
    kernel: str,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's output `[b, h, n, w]` and, if wanted, its log-sum-exp `[b, h, n]`.

    Args:
        whole: The problem of the whole sequence, without its queries, keys and values.
        q: This rank's queries `[b, h, n, d]`.
        k: This rank's keys `[b, g, n, d]`.
        v: This rank's values `[b, g, n, w]`.
        group: The process group.
        order: The order by position of the tokens of all ranks, int64 `[s]`; None if they are in order.
        kernel: "auto" or a kernel's name.
        with_lse: Whether the log-sum-exp is wanted.

    Returns:
        The output and the log-sum-exp, or None.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(x: Tensor) -> Tensor:
        x = Exchange.apply(x, group, 1, 2)  # [b, h/ranks, s, d]
        return x if order is None else x.index_select(2, order)

    def scatter(x: Tensor) -> Tensor:
        if order is not None:
            x = x.index_select(2, order.argsort())
        return Exchange.apply(x, group, 2, 1)  # [b, h, n, w]

    n = whole.shape.h // ranks
    heads = torch.arange(rank * n, (rank + 1) * n, device=q.device)
    batch = torch.arange(whole.shape.b, device=q.device)
    q, k, v = (gather(x) for x in (q, k, v))
    mask = None if whole.mask is None else _of_heads(whole.mask, batch, heads)
    bias = None if whole.bias is None else _bias_of_heads(whole.bias, heads, group)
    sink = None if whole.sink is None else SumGradient.apply(whole.sink, group)[heads]
    problem = Problem.of(
        q, k, v, mask=mask, bias=bias, scale=whole.scale, softcap=whole.softcap, sink=sink, offset=0
    )
    results = []

    def run() -> dict[str, Any]:
        results.append(kernels.run(problem, kernel))
        return {}

    if any(isinstance(part, Rule) for part in problem.masks()):  # a function that may raise on one rank alone
        agree(group, run, ())
    else:
        run()
    result = results[0]
    lse = None
    if with_lse:
        with torch.no_grad():
            lse = result.lse_of_map(problem)
            lse = kernels.statistics(problem).lse if lse is None else lse
            lse = scatter(lse.detach()[..., None])[..., 0]
    return scatter(result.out), lse


def _of_heads(mask: Mask, batch: Tensor, heads: Tensor) -> Mask:
    """Return a mask for some heads, which are renumbered from 0."""
    if isinstance(mask, And | Or):
        left, right = (_of_heads(part, batch, heads) for part in mask.parts())
        return mask.but(left=left, right=right)
    if isinstance(mask, Not):
        return mask.but(mask=_of_heads(mask.mask, batch, heads))
    if isinstance(mask, Band | Ids | Keys | Lengths | Prefix):  # the same for all heads
        return mask
    return mask.only(batch, heads)


def _bias_of_heads(bias: Bias, heads: Tensor, group: Any) -> Bias:
    """Return a bias for some heads, which are renumbered from 0. Its gradient is summed over the ranks."""
    tensor = SumGradient.apply(bias.tensor(), group)
    if isinstance(bias, ALiBi):
        return bias.but(slopes=tensor if tensor.shape[0] == 1 else tensor[heads])
    if isinstance(bias, Relative):
        return bias.but(table=tensor if tensor.shape[0] == 1 else tensor[heads])
    assert isinstance(bias, Dense)
    one = tensor.dim() < 3 or tensor.shape[-3] == 1
    return bias.but(values=tensor if one else tensor.index_select(-3, heads))
