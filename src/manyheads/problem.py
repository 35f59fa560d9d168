"""An attention problem: its tensors, mask, bias and numbers, which are checked once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from manyheads.biases import Bias, BiasAtPositions
from manyheads.masks import FAR, AtPositions, Full, Mask, can_read_cheaply, look_up_positions, min_max
from manyheads.shapes import Shape, can_read, kind, real, shape_of, sizes

Rows = slice | Tensor  # an index of rows or columns: a slice, or an index tensor of one dimension
ALL = slice(None)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)
FARTHEST = FAR // 4  # the largest offset, so that positions plus the bounds of bands stay below FAR


@dataclass(eq=False)  # not frozen, because creating frozen dataclasses takes four times as long
class Problem:
    """The inputs of attention. `Problem.of` checks them; afterwards a problem is never changed.

    Attributes:
        q: The queries `[b, h, t, d]`.
        k: The keys `[b, g, s, d]`.
        v: The values `[b, g, s, w]`.
        mask: The mask, bound to the offset.
        bias: The bias, bound to the offset.
        scale: The factor of q·k.
        softcap: If given, scores become softcap · tanh(score / softcap).
        sink: A logit per head, `[h]`.
        offset: The position of row 0, an int or a tensor `[b]`.
        dropout_p: The probability with which a weight is dropped.
        shape: The sizes.
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
        """Check the arguments, fill in defaults, and bind mask and bias to the offset."""
        shape = shape_of(q, k, v)
        if scale is None:
            scale = 1 / math.sqrt(shape.d) if shape.d else 1.0
        else:
            scale = real(scale, "scale", math.isfinite, "a finite number (1/√d if None)")
        if softcap is not None:
            softcap = real(softcap, "softcap", lambda cap: 0 < cap < math.inf, "a positive number or None")
        dropout_p = real(dropout_p, "dropout_p", lambda p: 0 <= p <= 1, "a number between 0 and 1")
        if offset is None:
            placed = [part for part in (mask, bias) if isinstance(part, AtPositions | BiasAtPositions)]
            offset = (placed[0].tokens if placed else shape.s) - shape.t
        else:
            offset = _check_offset(offset, shape, q.device)
        if sink is not None:
            _check_sink(sink, shape, q.device)
        if mask is not None:
            mask = _check_mask(mask, shape, q.device).bind(offset, shape.s)
        if bias is not None:
            if not isinstance(bias, Bias):
                hint = " Wrap it as Dense(t)." if isinstance(bias, Tensor) else ""
                raise TypeError(f"Expected bias to be a Bias or None, got {kind(bias)}.{hint}")
            _check_part(bias, "bias", shape, q.device)
            bias = bias.bind(offset)
        return cls(q, k, v, mask, bias, scale, softcap, sink, offset, dropout_p, shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores, weights and log-sum-exps: float32, or float64 for float64."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def positions(self) -> Tensor | None:
        """The positions of the keys, `[b or 1, g or 1, s]`; None if they are 0, 1, …, s − 1.

        The keys of a `Cache` have other positions after some were dropped. Masks and biases use positions.
        """
        return self.mask.positions if isinstance(self.mask, AtPositions) else None

    @property
    def tokens(self) -> int:
        """The number of tokens that the positions of keys count: s, or more if some keys were dropped."""
        return self.mask.tokens if isinstance(self.mask, AtPositions) else self.shape.s

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields after q, k and v: `Problem(q, k, v, *problem.options)` is the same problem."""
        return (
            self.mask, self.bias, self.scale, self.softcap, self.sink, self.offset, self.dropout_p,
            self.shape,
        )  # fmt: skip

    def masks(self) -> list[Mask]:
        """Return the mask and all masks that it is composed of; none without a mask."""
        return [] if self.mask is None else self.mask.walk()

    def forward_mode(self) -> bool:
        """Return True if a tensor has a forward-mode derivative (torch.func.jvp)."""
        if torch.compiler.is_compiling() or forward_ad._current_level < 0:
            return False
        tensors = [self.q, self.k, self.v, self.sink, None if self.bias is None else self.bias.tensor()]
        return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)

    def wants_gradient(self) -> bool:
        """Return True if autograd records functions of these tensors."""
        return torch.is_grad_enabled() and (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or (self.sink is not None and self.sink.requires_grad)
            or (self.bias is not None and self.bias.tensor().requires_grad)
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return the same problem with `change` applied to every tensor, always in the same order."""
        return Problem(  # `replace` would take longer than the gradient of a small problem
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
        """Return the same problem with every tensor detached from its graph."""
        return self.map(lambda tensor: tensor.detach())

    def without_values(self) -> Problem:
        """Return the same problem with values of width 0 and without dropout, for the weights alone."""
        v = self.v.new_empty(*self.v.shape[:3], 0)
        shape = Shape(*self.shape[:-1], w=0)  # torch.compile of PyTorch 2.11 doesn't support _replace here
        return replace(self, v=v, dropout_p=0.0, shape=shape)

    def without_masked_keys(self, keep: Tensor) -> Problem:
        """Return the same problem with zeros for the keys and values that are masked for all queries.

        Use this if inputs and output can't be checked for NaN and Inf: in these keys and values they then
        have no effect.

        Args:
            keep: The mask, `[b or 1, h or 1, t, s]` (True = attend).

        Returns:
            The problem.
        """
        visible = keep.any(2)  # [b or 1, h or 1, s]
        if visible.shape[1] > 1:
            visible = visible.unflatten(1, (self.shape.g, -1)).any(2)  # [b or 1, g, s]
        visible = visible[..., None]
        return replace(self, k=torch.where(visible, self.k, 0.0), v=torch.where(visible, self.v, 0.0))

    def under(self, mask: Mask | None) -> Problem:
        """Return the same problem under a different mask. Keys keep their positions."""
        if isinstance(self.mask, AtPositions):
            mask = self.mask.but(mask=Full() if mask is None else _check_is_mask(mask))
        if mask is not None:
            mask = _check_mask(mask, self.shape, self.q.device).bind(self.offset, self.shape.s)
        return replace(self, mask=mask)

    def within(self, mask: Mask) -> Problem:
        """Return the same problem with its mask restricted by `mask` (the intersection of both)."""
        inside = self.under(mask)
        if self.mask is None or inside.mask is None:
            return inside
        return replace(self, mask=self.mask & inside.mask)

    def only(self, batch: Sequence[int], heads: Sequence[int]) -> Problem:
        """Return the same problem for some batch entries and query heads, which are renumbered from 0.

        If the indices are consecutive, q, k and v are views.
        """
        shape, device = self.shape, self.q.device
        b = torch.tensor(batch, dtype=torch.int64, device=device)
        h = torch.tensor(heads, dtype=torch.int64, device=device)
        group = h // max(shape.h // max(shape.g, 1), 1)  # the key head of each query head
        parts = ((self.q, h), (self.k, group), (self.v, group))
        q, k, v = (_select(_select(x, 0, b), 1, index) for x, index in parts)
        return replace(
            self,
            q=q,
            k=k,
            v=v,
            mask=None if self.mask is None else self.mask.only(b, h),
            bias=None if self.bias is None else self.bias.only(b, h),
            sink=None if self.sink is None else self.sink[h],
            offset=self.offset[b] if isinstance(self.offset, Tensor) else self.offset,
            shape=shape_of(q, k, v),
        )

    def cut(self, rows: range, cols: range) -> Problem | None:
        """Return the problem of a range of queries and keys, or None if the mask or the bias can't be cut.

        Rows and columns are renumbered from 0. The softmax is over the remaining keys.
        """
        mask = None if self.mask is None else self.mask.cut(rows, cols, self.offset)
        bias = None if self.bias is None else self.bias.cut()
        if (mask is None) != (self.mask is None) or (bias is None) != (self.bias is None):
            return None
        down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
        return Problem.of(
            self.q[:, :, down], self.k[:, :, across], self.v[:, :, across], mask=mask, bias=bias,
            scale=self.scale, softcap=self.softcap, sink=self.sink, dropout_p=self.dropout_p,
            offset=self.offset + rows.start - cols.start,
        )  # fmt: skip

    def at(
        self, rows: Rows, cols: Rows, batch: Rows | None = None, heads: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the indices of a tile, which broadcast to `[b, h, t, s]`.

        Args:
            rows: The rows.
            cols: The columns.
            batch: The batch entries. The default is None, not a slice, because torch.compile of PyTorch 2.11
                doesn't support slices as defaults.
            heads: The heads, likewise.

        Returns:
            The batch entries, the heads, the positions of the queries, and the keys.
        """
        shape, device = self.shape, self.q.device

        def expand(size: int, index: Rows | None) -> Tensor:
            if index is None:
                return torch.arange(size, device=device)
            # A compiled graph must not depend on the size, so it indexes the whole range.
            if torch.compiler.is_compiling() or isinstance(index, Tensor):
                return torch.arange(size, device=device)[index]
            start, stop, step = index.indices(size)
            return torch.arange(start, max(start, stop), step, device=device)

        b = expand(shape.b, batch)[:, None, None, None]
        h = expand(shape.h, heads)[None, :, None, None]
        i = expand(shape.t, rows)[None, None, :, None]
        j = expand(shape.s, cols)[None, None, None, :]
        i = i + (self.offset.to(device)[b] if isinstance(self.offset, Tensor) else self.offset)
        return b, h, i, j

    def distances(self, rows: Rows, cols: Rows) -> Tensor:
        """Return the distances in positions of the queries and keys of a tile, `[b or 1, h or 1, r, c]`."""
        b, h, i, j = self.at(rows, cols)
        if isinstance(self.mask, AtPositions):
            j = look_up_positions(self.mask.positions, self.mask.group, b, h, j)
        return (i - j).abs()

    def broadcast_sizes(self, part: Mask | Bias) -> tuple[int, int]:
        """Return the sizes (1 or b, 1 or h) of a mask or bias before it is broadcast to `[b, h, t, s]`.

        To find them, the mask or bias is evaluated for one row and one column.
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
        """Return a tile of a mask that is bound to this problem: it broadcasts to `[b, h, r, c]`."""
        b, h, i, j = self.at(rows, cols, batch, heads)
        kept = torch.as_tensor(mask.keep(b, h, i, j), device=self.q.device)
        expected = (b.shape[0], h.shape[1], i.shape[2], j.shape[3])
        got = (1,) * (4 - kept.dim()) + tuple(kept.shape)
        if len(got) > 4 or any(n not in (1, size) for n, size in zip(got, expected, strict=True)):
            raise ValueError(
                f"Expected a mask that broadcasts to [b, h, t, s] = {list(expected)}, "
                f"got {sizes(kept)} from {mask}."
            )
        return kept.reshape(got)

    def span(self, start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return two intervals of [0, s): keys visible to some of rows [start, stop), and to all of them."""
        s = self.shape.s
        if self.mask is None:
            return (0, s), (0, s)
        if not can_read(self.q):  # then the numbers of the mask can't be read either
            return (0, s), (0, 0)
        low, high = min_max(self.offset)
        some, every = self.mask.span(range(start + low, stop + high))
        return (some[0], min(some[1], s)), (every[0], min(every[1], s))


def _select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Return some entries of an axis; a view if they are consecutive."""
    first, n = (int(index[0]), len(index)) if len(index) else (0, 0)
    if torch.equal(index, torch.arange(first, first + n, device=index.device)):
        return x.narrow(axis, first, n)
    return x.index_select(axis, index)


def _check_offset(offset: Any, shape: Shape, device: torch.device) -> Any:
    """Check the offset, and return it as an int or int64 `[b]`."""
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
    elif isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt):
        raise TypeError(f"Expected offset to be an int, integers [b], or None for s - t, got {offset!r}.")
    if torch.compiler.is_compiling() or (isinstance(offset, Tensor) and not can_read_cheaply(offset)):
        return offset
    low, high = min_max(offset)
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


def _check_mask(mask: Any, shape: Shape, device: torch.device) -> Mask:
    _check_part(_check_is_mask(mask), "mask", shape, device)
    return mask


def _check_is_mask(mask: Any) -> Mask:
    if not isinstance(mask, Mask):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else kind(mask)
        raise TypeError(f"Expected mask to be a Mask or None, got {got}.{_advise_mask(mask)}")
    return mask


def _advise_mask(mask: Any) -> str:
    """Return how to fix a mask of another type, for an error."""
    if isinstance(mask, Tensor) and mask.is_floating_point():
        return " Pass bias=Dense(t) if it is added to the scores, or mask=Keep(t != 0) if 1 = attend."
    if isinstance(mask, Tensor):
        return " Wrap it as Keep(t), where True = may attend, or Drop(t)."
    if isinstance(mask, type) and issubclass(mask, Mask):
        required = any(p.default is p.empty for p in inspect.signature(mask).parameters.values())
        return f" Write {mask.__name__}({'…' if required else ''})."
    return " Use a mask object, such as mask=Causal()." if isinstance(mask, str) else ""


def _check_part(part: Mask | Bias, name: str, shape: Shape, device: torch.device) -> None:
    for tensor in part.tensors():
        if tensor.device != device:
            raise ValueError(
                f"q is on {device} and the {name} is on {tensor.device}: "
                f"move it with {name}.to({str(device)!r})."
            )
    part.check(shape)
