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
    # A sum with NaN or Inf in it is never finite; a sum of finite numbers may overflow.
    return math.isfinite(x.sum()) or all(bool(end.isfinite()) for end in x.aminmax())


def fold(x: Tensor, g: int) -> Tensor:
    """Group the rows of query heads that share a key head: `[b, h, r, …]` → `[b, g, (h/g)·r, …]`."""
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
    # Indexed along the longest axis first, so that no more than the tile is copied.
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
    """Return x `[…, r, d]` · y `[…, c, d]`, with a gradient in which NaN and Inf stay in their own pair.

    The gradient of a masked pair is 0, and 0 · NaN is NaN in a plain product. So pairs that aren't finite are
    computed separately, without a gradient.
    """
    plain = x @ y.mT
    if not plain.requires_grad or not can_read(plain):
        return plain
    finite = x.isfinite().all(-1)[..., :, None] & y.isfinite().all(-1)[..., None, :]
    if bool(finite.all()):
        return plain
    clean = torch.where(x.isfinite(), x, 0.0) @ torch.where(y.isfinite(), y, 0.0).mT
    return torch.where(finite, clean, plain.detach())


def tile(
    problem: Problem,
    rows: Rows = ALL,
    cols: Rows = ALL,
    batch: Rows = ALL,
    heads: Rows = ALL,
    compute: Callable[..., Tensor] = logits,
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, −inf where masked: the attention formula.

    rows, cols, batch and heads are slices or index tensors of one dimension. float32 (float64 for
    float64); differentiable. With lse the log-sum-exp of a row (sink included), the weight is
    exp(score − lse). compute: replaces `logits`, for a kernel that sums q·k in another order.
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
    """Return where the query may attend to the key, without scores: `[b or 1, h or 1, r, c]`."""
    b, h, i, j = problem.at(rows, cols, batch, heads)
    visible = torch.ones(1, 1, i.shape[2], j.shape[3], dtype=torch.bool, device=problem.q.device)
    if problem.bias is not None and problem.bias.can_mask:
        visible = visible & (problem.bias.add(b, h, i, j, problem.dtype) != -math.inf)
    if problem.mask is not None and not _keeps_all(problem, rows, cols):
        visible = visible & problem.keep(problem.mask, rows, cols, batch, heads)
    return visible


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
    """Return exp(score − lse) of scores `[…, r, c]`, lse `[…, r]`; 0 where masked, in a row of NaN too."""
    weight = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.where(scores == -math.inf, 0.0, weight)


def mix(weight: Tensor, keep: Tensor, x: Tensor) -> Tensor:
    """Return weight `[…, r, c]` · x `[…, c, d]`; pairs that aren't kept add nothing, even if x is NaN.

    In a plain product a weight of 0 times NaN is NaN. Here NaN and Inf in x change only the rows that keep
    them.
    """
    finite = x.isfinite()
    mixed = weight @ torch.where(finite, x, 0.0)  # […, r, d]
    columns = (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist()
    for c in columns:
        # Masked before it is multiplied, so that neither the product nor its gradient has what isn't kept.
        masked = finite[..., None, c, :] | ~keep[..., c, None]
        mixed = mixed + weight[..., c, None] * torch.where(masked, 0.0, x[..., None, c, :])
    return mixed
