"""The attention formula on any tile of a problem.

    scale · q·k  →  softcap  →  + bias  →  keep(mask)  →  softmax over keys (with sink)  →  · v

The reference kernel, the chunked kernel and the `AttentionMap` all compute scores with `tile`, so that a
picture shows the formula that was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from manyheads.problem import ALL, Problem, Rows
from manyheads.shapes import can_read

_NOTHING = nullcontext()


def exactly(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: scores and weights stay in their own dtype."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    on = device.type
    if on == "meta" or not torch.is_autocast_enabled(on):
        return _NOTHING
    return torch.autocast(on, enabled=False)


def finite(x: Tensor) -> bool:
    """Return True if all of a tensor is finite, without a copy (NaN passes through aminmax).

    True where its numbers can't be read.
    """
    if not can_read(x) or x.numel() == 0:
        return True
    x = x.detach()
    # A sum of numbers that aren't all finite never is; one of finite numbers may overflow.
    return math.isfinite(x.sum()) or all(bool(end.isfinite()) for end in x.aminmax())


def fold(x: Tensor, g: int) -> Tensor:
    """Put query heads that share a key head side by side: `[b, h, r, …]` → `[b, g, (h/g)·r, …]`."""
    b, h, r = x.shape[:3]
    return x.reshape(b, g, h // g * r if g else r, *x.shape[3:])


def unfold(x: Tensor, h: int) -> Tensor:
    """Undo `fold`: `[b, g, (h/g)·r, …]` → `[b, h, r, …]`."""
    b, g, rows = x.shape[:3]
    return x.reshape(b, h, rows * g // h if h else rows, *x.shape[3:])


def operands(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> tuple[Tensor, Tensor]:
    """Return the queries `[b, h, r, d]` and keys `[b, g or h, c, d]` of a tile."""
    # The longest axis first, so that an index copies no more than the tile needs.
    q, k = problem.q[:, :, rows][batch][:, heads], problem.k[:, :, cols][batch]
    if heads is not ALL:
        h, g = problem.shape.h, problem.shape.g
        k = k[:, torch.arange(h, device=k.device)[heads] // max(h // max(g, 1), 1)]  # [b, h, c, d]
    return q, k


def products(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return scale · q·k of a tile, `[b, h, r, c]`."""
    q, k = operands(problem, rows, cols, batch, heads)
    q = q.to(problem.dtype) * problem.scale  # [b, h, r, d]
    k = k.to(problem.dtype)  # [b, g, c, d]
    with exactly(q.device):
        return unfold(_dot(fold(q, k.shape[1]), k), q.shape[1])  # [b, h, r, c]


def logits(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return scale · q·k, softcapped, `[b, h, r, c]`: scores before bias and mask."""
    raw = products(problem, rows, cols, batch, heads)
    return raw if problem.softcap is None else problem.softcap * torch.tanh(raw / problem.softcap)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return x `[…, r, d]` · y `[…, c, d]`, whose gradient keeps NaN and Inf of a pair out of others.

    A masked pair's gradient is 0, and 0 · NaN is NaN in a plain product: so pairs of what isn't
    finite are computed aside, without a gradient.
    """
    plain = x @ y.mT
    if not plain.requires_grad or not can_read(plain):
        return plain
    fine = x.isfinite().all(-1)[..., :, None] & y.isfinite().all(-1)[..., None, :]
    if bool(fine.all()):
        return plain
    clean = torch.where(x.isfinite(), x, 0.0) @ torch.where(y.isfinite(), y, 0.0).mT
    return torch.where(fine, clean, plain.detach())


def tile(
    problem: Problem,
    rows: Rows = ALL,
    cols: Rows = ALL,
    batch: Rows = ALL,
    heads: Rows = ALL,
    compute: Callable[..., Tensor] = logits,
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, −inf where masked: THE formula.

    rows, cols, batch and heads are slices or index tensors of one dimension. float32 (float64 for
    float64); differentiable. With lse the log-sum-exp of a row (sink included), the weight is
    exp(score − lse). compute: takes the place of `logits`, where a kernel sums q·k in another order.
    """
    score = compute(problem, rows, cols, batch, heads)
    if problem.mask is None and problem.bias is None:
        return score
    if problem.bias is not None:
        added = problem.bias.add(*problem.at(rows, cols, batch, heads), problem.dtype)
        score = torch.where(added == -math.inf, -math.inf, score + added)
    if problem.mask is not None and not _keeps_all(problem, rows, cols):
        score = torch.where(problem.keep(problem.mask, rows, cols, batch, heads), score, -math.inf)
    return score


def visible(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return where the query may see the key, without a score: `[b or 1, h or 1, r, c]`."""
    b, h, i, j = problem.at(rows, cols, batch, heads)
    seen = torch.ones(1, 1, i.shape[2], j.shape[3], dtype=torch.bool, device=problem.q.device)
    if problem.bias is not None and problem.bias.can_mask:
        seen = seen & (problem.bias.add(b, h, i, j, problem.dtype) != -math.inf)
    if problem.mask is not None and not _keeps_all(problem, rows, cols):
        seen = seen & problem.keep(problem.mask, rows, cols, batch, heads)
    return seen


def is_fully_visible(problem: Problem, rows: Rows, cols: Rows) -> bool:
    """Return True if mask and bias say, without reading pairs, that all keys of a tile are visible."""
    if problem.bias is not None and problem.bias.can_mask:
        return False
    return problem.mask is None or _keeps_all(problem, rows, cols)


def _keeps_all(problem: Problem, rows: Rows, cols: Rows) -> bool:
    """Return True if the mask is known to keep the whole tile: of plain slices, where numbers can be read."""
    if not can_read(problem.q) or not (isinstance(rows, slice) and isinstance(cols, slice)):
        return False
    start, stop, _ = rows.indices(problem.shape.t)
    left, right, _ = cols.indices(problem.shape.s)
    _, every = problem.span(start, stop)
    return every[0] <= left and right <= every[1]


def weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(score − lse): scores `[…, r, c]`, lse `[…, r]`; masked keys weigh 0 even in a row of NaN."""
    weight = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.where(scores == -math.inf, 0.0, weight)


def mix(weight: Tensor, keep: Tensor, x: Tensor) -> Tensor:
    """Return weight `[…, r, c]` · x `[…, c, d]`; pairs that aren't kept add nothing, whatever x holds.

    In a plain product a weight of 0 on a NaN is NaN: what isn't finite in x reaches only the rows
    that keep it.
    """
    finite = x.isfinite()
    mixed = weight @ torch.where(finite, x, 0.0)  # […, r, d]
    columns = (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist()
    for c in columns:
        # First hidden, then weighed: so neither the product nor its gradient meets what isn't kept.
        hidden = finite[..., None, c, :] | ~keep[..., c, None]
        mixed = mixed + weight[..., c, None] * torch.where(hidden, 0.0, x[..., None, c, :])
    return mixed
