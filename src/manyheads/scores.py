"""One attention problem, and THE formula on any tile of it.

    scale · q·k  →  softcap  →  + bias  →  keep(mask)  →  softmax over keys (with sink)  →  · v

`tile` is the keystone: the reference kernel, the chunked kernel and the `AttentionMap` all read
scores through it, so that the picture shows the formula that was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from manyheads.biases import Bias
from manyheads.masks import FAR, Mask, extremes, opaque
from manyheads.shapes import Shape, can_read, kind, real, shape_of, sizes
from manyheads.trees import Value

Rows = slice | Tensor  # which rows or columns: a slice, or an index tensor of one dimension
ALL = slice(None)
WHOLES = (int, torch.SymInt)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)
FARTHEST = FAR // 4  # position of a row 0: its sum with the side of a band is below FAR, "no bound"


@dataclass(eq=False)  # not frozen, which makes the creation take four times as long
class Problem:
    """Everything that decides an attention output; made by `Problem.of`, which checks it, and never changed.

    q `[b, h, t, d]`, k `[b, g, s, d]`, v `[b, g, s, w]`; sink `[h]`; offset is the position of row 0,
    an int or one per sequence `[b]`; mask and bias are bound to it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    sink: Tensor | None
    offset: int | Tensor
    dropout_p: float
    shape: Shape

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        offset: int | Tensor | None = None,
    ) -> Problem:
        """Check the parts, fill in what was left out, and bind mask and bias to their place."""
        shape = shape_of(q, k, v)
        if scale is None:
            scale = 1 / math.sqrt(shape.d) if shape.d else 1.0
        else:
            scale = real(scale, "scale", math.isfinite, "a finite number (1/√d if None)")
        if softcap is not None:
            softcap = real(softcap, "softcap", lambda cap: 0 < cap < math.inf, "a positive number or None")
        dropout_p = real(dropout_p, "dropout_p", lambda p: 0 <= p <= 1, "a number between 0 and 1")
        place = shape.s - shape.t if offset is None else _checked_offset(offset, shape, q.device)
        if sink is not None:
            _check_sink(sink, shape, q.device)
        if mask is not None:
            _check_part(mask, Mask, "mask", "Keep(t), where True = may attend, or Drop(t)", q.device)
        if bias is not None:
            _check_part(bias, Bias, "bias", "Dense(t)", q.device)
        if mask is not None:
            mask.check(shape)
            mask = mask.bind(place, shape.s)
        if bias is not None:
            bias.check(shape)
            bias = bias.bind(place)
        return cls(q, k, v, mask, bias, scale, softcap, sink, place, dropout_p, shape)

    @property
    def dtype(self) -> torch.dtype:
        """What scores, weights and log-sum-exps are computed in: float32, or float64 for float64."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def options(self) -> tuple[Any, ...]:
        """Return the fields after q, k and v: `Problem(q, k, v, *problem.options)` is the same problem."""
        p = self
        return p.mask, p.bias, p.scale, p.softcap, p.sink, p.offset, p.dropout_p, p.shape

    def forward_mode(self) -> bool:
        """Return True if a tensor carries a forward-mode derivative (torch.func.jvp)."""
        if torch.compiler.is_compiling() or forward_ad._current_level < 0:
            return False
        parts = [self.q, self.k, self.v, self.sink, None if self.bias is None else self.bias.tensor()]
        return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in parts)

    def wants_gradient(self) -> bool:
        """Return True if autograd records what is computed from these tensors."""
        return torch.is_grad_enabled() and (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or (self.sink is not None and self.sink.requires_grad)
            or (self.bias is not None and self.bias.tensor().requires_grad)
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return the same problem with `change` applied to every tensor inside, always in the same order."""
        return Problem(  # `replace` would take longer than a small problem's gradient
            change(self.q),
            change(self.k),
            change(self.v),
            None if self.mask is None else self.mask.map(change),
            None if self.bias is None else self.bias.map(change),
            self.scale,
            self.softcap,
            None if self.sink is None else change(self.sink),
            change(self.offset) if isinstance(self.offset, Tensor) else self.offset,
            self.dropout_p,
            self.shape,
        )

    def detach(self) -> Problem:
        """Return the same problem with every tensor cut from its graph."""
        return self.map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> Problem:
        """Return the same problem with every tensor on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def cast(self, dtype: torch.dtype) -> Problem:
        """Return the same problem with q, k and v in another dtype."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def without_values(self) -> Problem:
        """Return the same problem with values of width 0: weights don't need them, nor dropout."""
        v = self.v.new_empty(*self.v.shape[:3], 0)
        shape = Shape(*self.shape[:-1], w=0)  # torch.compile of PyTorch 2.11 can't return what _replace makes
        return replace(self, v=v, dropout_p=0.0, shape=shape)

    def without_unseen(self, keep: Tensor) -> Problem:
        """Return the same problem with zeros for the keys and values that no query may see.

        keep: where the mask keeps, `[b or 1, h or 1, t, s]`. For kernels that can't look at what they
        compute, so that at least there NaN and Inf don't leak.
        """
        seen = keep.any(2)  # [b or 1, h or 1, s]
        if seen.shape[1] > 1:
            seen = seen.unflatten(1, (self.shape.g, -1)).any(2)  # [b or 1, g, s]
        seen = seen[..., None]
        return replace(self, k=torch.where(seen, self.k, 0.0), v=torch.where(seen, self.v, 0.0))

    def under(self, mask: Mask | None) -> Problem:
        """Return the same problem under another mask."""
        if mask is not None:
            _check_part(mask, Mask, "mask", "Keep(t), where True = may attend, or Drop(t)", self.q.device)
            mask.check(self.shape)
            mask = mask.bind(self.offset, self.shape.s)
        return replace(self, mask=mask)

    def within(self, mask: Mask) -> Problem:
        """Return the same problem under its own mask and another one."""
        inside = self.under(mask)
        if self.mask is None or inside.mask is None:
            return inside
        return replace(self, mask=self.mask & inside.mask)

    def only(self, batch: Sequence[int], heads: Sequence[int]) -> Problem:
        """Return the same problem for some batch entries and query heads, which are counted anew from 0.

        q, k and v are views where these follow each other.
        """
        n, device = self.shape, self.q.device
        b = torch.tensor(batch, dtype=torch.int64, device=device)
        h = torch.tensor(heads, dtype=torch.int64, device=device)
        group = h // max(n.h // max(n.g, 1), 1)  # the key head of each
        q, k, v = (_some(_some(x, 0, b), 1, n) for x, n in ((self.q, h), (self.k, group), (self.v, group)))
        return replace(
            self,
            q=q,
            k=k,
            v=v,
            mask=None if self.mask is None else self.mask.only(b, h),
            bias=None if self.bias is None else self.bias.only(b, h),
            sink=None if self.sink is None else self.sink[h],
            offset=self.offset if isinstance(self.offset, int) else self.offset[b],
            shape=shape_of(q, k, v),
        )

    def at(
        self, rows: Rows, cols: Rows, batch: Rows | None = None, heads: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return b, h, i (positions), j of a tile, shaped to broadcast against `[b, h, t, s]`.

        batch and heads are None for all: torch.compile of PyTorch 2.11 can't read a slice as a default.
        """
        n, device = self.shape, self.q.device

        def pick(size: int, chosen: Rows | None) -> Tensor:
            # In full where a graph must not learn the size; else no longer than the tile.
            if chosen is None:
                return torch.arange(size, device=device)
            if torch.compiler.is_compiling() or isinstance(chosen, Tensor):
                return torch.arange(size, device=device)[chosen]
            start, stop, step = chosen.indices(size)
            return torch.arange(start, max(start, stop), step, device=device)

        b = pick(n.b, batch)[:, None, None, None]
        h = pick(n.h, heads)[None, :, None, None]
        i = pick(n.t, rows)[None, None, :, None]
        j = pick(n.s, cols)[None, None, None, :]
        i = i + (self.offset if isinstance(self.offset, int) else self.offset.to(device)[b])
        return b, h, i, j

    def apart(self, part: Mask | Bias) -> tuple[int, int]:
        """Return for how many sequences and heads (1 or b, 1 or h) a mask or bias differs.

        It is evaluated for one row and one column.
        """
        corner = slice(0, min(self.shape.t, 1)), slice(0, min(self.shape.s, 1))
        if isinstance(part, Mask):
            b, h = self.keep(part, *corner).shape[:2]
        else:
            b, h = part.add(*self.at(*corner), self.dtype).shape[:2]
        return b, h

    def keep(
        self, mask: Mask, rows: Rows, cols: Rows, batch: Rows | None = None, heads: Rows | None = None
    ) -> Tensor:
        """Return where a mask bound to this problem keeps a tile: boolean, broadcasts to `[b, h, r, c]`."""
        b, h, i, j = self.at(rows, cols, batch, heads)
        kept = torch.as_tensor(mask.keep(b, h, i, j), device=self.q.device)
        want = (b.shape[0], h.shape[1], i.shape[2], j.shape[3])
        got = (1,) * (4 - kept.dim()) + tuple(kept.shape)
        if len(got) > 4 or any(n not in (1, m) for n, m in zip(got, want, strict=True)):
            raise ValueError(
                f"Expected a mask that broadcasts to [b, h, t, s] = {list(want)}, "
                f"got {sizes(kept)} from {mask}."
            )
        return kept.reshape(got)

    def span(self, start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the keys that some of rows [start, stop) may see and those that all see, within [0, s)."""
        s = self.shape.s
        if self.mask is None:
            return (0, s), (0, s)
        if not can_read(self.q):  # nor the numbers of the mask
            return (0, s), (0, 0)
        low, high = extremes(self.offset)
        some, every = self.mask.span(range(start + low, stop + high))
        return (some[0], min(some[1], s)), (every[0], min(every[1], s))


def _some(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Return some entries of an axis: a view where they follow each other."""
    first, n = (int(index[0]), len(index)) if len(index) else (0, 0)
    if torch.equal(index, torch.arange(first, first + n, device=index.device)):
        return x.narrow(axis, first, n)
    return x.index_select(axis, index)


def _checked_offset(offset: Any, shape: Shape, device: torch.device) -> Any:
    """Return the offset, an int or int64 `[b]`."""
    if isinstance(offset, Tensor):
        if offset.dtype not in INTEGERS or tuple(offset.shape) != (shape.b,):
            raise ValueError(
                f"Expected offset to be an int or a tensor [b] = [{shape.b}] of integers up to int64, "
                f"one per sequence, got {kind(offset)} {sizes(offset)}."
            )
        if offset.device != device:
            raise ValueError(f"q is on {device} and offset is on {offset.device}: move them together.")
        offset = offset.to(torch.int64)  # sums of narrow integers wrap around
    elif isinstance(offset, np.integer):
        offset = int(offset)
    elif isinstance(offset, bool) or not isinstance(offset, WHOLES):
        raise TypeError(f"Expected offset to be an int, integers [b], or None for s - t, got {offset!r}.")
    if torch.compiler.is_compiling() or (isinstance(offset, Tensor) and opaque(offset)):
        return offset
    low, high = extremes(offset)
    if low < -FARTHEST or high > FARTHEST:
        raise ValueError(f"Expected offset between -2**58 and 2**58, got {low if low < -FARTHEST else high}.")
    return offset


def _check_sink(sink: Any, shape: Shape, device: torch.device) -> None:
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise TypeError(f"Expected sink to be a tensor of floats [h], one logit per head, got {kind(sink)}.")
    if tuple(sink.shape) != (shape.h,):
        raise ValueError(f"Expected sink to be [h] = [{shape.h}], one logit per head, got {sizes(sink)}.")
    if sink.device != device:
        raise ValueError(f"q is on {device} and sink is on {sink.device}: move them together.")
    if device.type == "cpu" and can_read(sink) and not bool((sink < math.inf).all()):
        raise ValueError(f"Expected finite logits or -inf (no sink) in sink, got {sink.tolist()}.")


def _check_part(part: Any, kind_of: type[Value], name: str, wrap: str, device: torch.device) -> None:
    if not isinstance(part, kind_of):
        hint = f": wrap it as {wrap}" if isinstance(part, Tensor) else ""
        raise TypeError(f"Expected {name} to be a {kind_of.__name__} or None, got {kind(part)}{hint}.")
    for tensor in part.tensors():
        if tensor.device != device:
            raise ValueError(
                f"q is on {device} and the {name} is on {tensor.device}: "
                f"move it with {name}.to({str(device)!r})."
            )


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
    if problem.bias is not None and problem.bias.hides:
        seen = seen & (problem.bias.add(b, h, i, j, problem.dtype) != -math.inf)
    if problem.mask is not None and not _keeps_all(problem, rows, cols):
        seen = seen & problem.keep(problem.mask, rows, cols, batch, heads)
    return seen


def sees_all(problem: Problem, rows: Rows, cols: Rows) -> bool:
    """Return True if it is known without reading pairs that in this tile every query may see every key."""
    if problem.bias is not None and problem.bias.hides:
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
