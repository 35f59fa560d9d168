"""The attention formula on any tile of a problem.

    scale · q·k  →  softcap  →  + bias  →  keep(mask)  →  softmax over keys (with sink)  →  · v

The reference kernel, the chunked kernel and the `AttentionMap` compute scores with `tile`, so that a map has
the weights that were computed.
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


def disable_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: scores and weights stay in their own dtype."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def finite(x: Tensor) -> bool:
    """Return True if all numbers of a tensor are finite, or can't be read. The tensor isn't copied."""
    if not can_read(x) or x.numel() == 0:
        return True
    x = x.detach()
    # A sum that includes NaN or Inf is never finite. A sum of finite numbers may overflow, so if it isn't
    # finite, the smallest and the largest number are checked. (They are NaN if a number is NaN.)
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
    # The longest axis is indexed first, so that no more than the tile is copied.
    q, k = problem.q[:, :, rows][batch][:, heads], problem.k[:, :, cols][batch]
    if heads is not ALL:
        h, g = problem.shape.h, problem.shape.g
        size = max(h // max(g, 1), 1)  # query heads of a key head
        head = _single(heads)
        if head is None:
            k = k[:, torch.arange(h, device=k.device)[heads] // size]  # [b, h, c, d]
        else:  # a view: the keys of a long text aren't copied
            k = k[:, head // size : head // size + 1]  # [b, 1, c, d]
    return q, k


def _single(heads: Rows) -> int | None:
    """Return the head that a slice like `3:4` selects; None for other indices."""
    if isinstance(heads, slice) and isinstance(heads.start, int) and isinstance(heads.stop, int):
        is_single = heads.step in (None, 1) and heads.start >= 0 and heads.stop == heads.start + 1
        return heads.start if is_single else None
    return None


def products(problem: Problem, *index: Rows) -> Tensor:
    """Return scale · q·k of a tile, `[b, h, r, c]`, indexed by rows, cols, batch and heads as in `tile`."""
    q, k = operands(problem, *index)
    q = q.to(problem.dtype) * problem.scale  # [b, h, r, d]
    k = k.to(problem.dtype)  # [b, g, c, d]
    with disable_autocast(q.device):
        return unfold(_dot(fold(q, k.shape[1]), k), q.shape[1])  # [b, h, r, c]


def logits(problem: Problem, *index: Rows) -> Tensor:
    """Return scale · q·k with softcap, `[b, h, r, c]`: scores before bias and mask."""
    product = products(problem, *index)
    return product if problem.softcap is None else problem.softcap * torch.tanh(product / problem.softcap)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return x `[…, r, d]` · y `[…, c, d]`. NaN and Inf in a masked pair don't affect the gradients.

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
    """Return the scores of a tile, differentiable: the attention formula.

    A weight is exp(score − lse), where lse is the log-sum-exp of the row, including the sink.

    Args:
        problem: The problem.
        rows: The rows, a slice or an index tensor of one dimension.
        cols: The columns, likewise.
        batch: The batch entries, likewise.
        heads: The heads, likewise.
        compute: A function to use instead of `logits`, for a kernel that sums q·k in a different order.

    Returns:
        The scores `[b, h, r, c]`, −inf where masked, float32 or float64 (for float64).
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
    """Return True where the key is visible, without computing scores: `[b or 1, h or 1, r, c]`."""
    b, h, i, j = problem.at(rows, cols, batch, heads)
    visible = torch.ones(1, 1, i.shape[2], j.shape[3], dtype=torch.bool, device=problem.q.device)
    if problem.bias is not None and problem.bias.can_mask:
        visible = visible & (problem.bias.add(b, h, i, j, problem.dtype) != -math.inf)
    if problem.mask is not None and not _keeps_all(problem, rows, cols):
        visible = visible & problem.keep(problem.mask, rows, cols, batch, heads)
    return visible


def is_fully_visible(problem: Problem, rows: Rows, cols: Rows) -> bool:
    """Return True if all keys of a tile are visible by the bounds of the mask, without reading pairs."""
    if problem.bias is not None and problem.bias.can_mask:
        return False
    return problem.mask is None or _keeps_all(problem, rows, cols)


def _keeps_all(problem: Problem, rows: Rows, cols: Rows) -> bool:
    """Return True if the mask keeps the whole tile by its bounds; False if these can't be computed."""
    if not can_read(problem.q) or not (isinstance(rows, slice) and isinstance(cols, slice)):
        return False
    start, stop, _ = rows.indices(problem.shape.t)
    left, right, _ = cols.indices(problem.shape.s)
    _, (first, last) = problem.span(start, stop)
    return first <= left and right <= last


def weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(score − lse) of scores `[…, r, c]` and lse `[…, r]`; 0 where masked, even if lse is NaN."""
    weight = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.where(scores == -math.inf, 0.0, weight)


def mix(weight: Tensor, keep: Tensor, x: Tensor) -> Tensor:
    """Return weight `[…, r, c]` · x `[…, c, d]`. NaN and Inf in x affect only rows to which they are visible.

    In a plain product they affect all rows, because a weight of 0 times NaN is NaN.
    """
    finite = x.isfinite()
    mixed = weight @ torch.where(finite, x, 0.0)  # […, r, d]
    columns = (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist()
    for c in columns:
        # x is masked before the product, so that masked numbers are in neither the product nor its gradient.
        masked = finite[..., None, c, :] | ~keep[..., c, None]
        mixed = mixed + weight[..., c, None] * torch.where(masked, 0.0, x[..., None, c, :])
    return mixed
