"""The attention of the queries of one part to the keys of another, as an ordinary problem.

The queries and keys of two parts are a `Problem` of fewer rows and columns. If both are runs of consecutive
tokens, its offset is their distance, so that masks and biases that are defined by distance stay as they are;
others are looked up by position (`MaskAtParts`, `BiasAtParts`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manyheads.biases import ALiBi, Bias, Dense, Relative
from manyheads.distributed.positions import Part
from manyheads.masks import FAR, And, Band, Documents, Lengths, Mask, Span
from manyheads.problem import Problem
from manyheads.shapes import Shape, shape_of
from manyheads.trees import bound


class MaskAtParts(Mask):
    """A mask of the whole sequence for the queries and keys of two parts.

    Attributes:
        mask: The bound mask of the whole sequence.
        queries: The positions of the queries, int64 `[t]`.
        keys: The positions of the keys, ascending int64 `[s]`.
        first: The position of row 0 in the problem of the parts.
    """

    mask: Mask
    queries: Tensor
    keys: Tensor
    first: int = bound(default=0)

    def keep(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Return the entries of the whole mask."""
        return self.mask.keep(b, h, self.queries[i - self.first], self.keys[j])

    def span(self, rows: range) -> Span:
        """Return the columns of the intervals of the whole mask."""
        chosen = self.queries[max(rows.start - self.first, 0) : max(rows.stop - self.first, 0)]
        if not len(chosen):
            return Span((0, 0), (0, FAR))
        some, every = self.mask.span(range(int(chosen[0]), int(chosen[-1]) + 1))
        columns = torch.searchsorted(self.keys, self.keys.new_tensor([*some, *every])).tolist()
        return Span((columns[0], columns[1]), (columns[2], columns[3]))

    def bind(self, first: int | Tensor, s: int) -> Mask:
        """Set the position of row 0. The whole mask is bound already."""
        return self.but(first=first)

    def __str__(self) -> str:
        return f"{self.mask} at {len(self.queries)} queries and {len(self.keys)} keys"


class BiasAtParts(Bias):
    """A bias of the whole sequence for the queries and keys of two parts; see `MaskAtParts`."""

    bias: Bias
    queries: Tensor
    keys: Tensor
    first: int = bound(default=0)

    @property
    def can_mask(self) -> bool:
        """Whether the bias can contain −inf, which masks."""
        return self.bias.can_mask

    def add(self, b: Any, h: Any, i: Any, j: Any, dtype: torch.dtype) -> Tensor:
        """Return the entries of the whole bias."""
        return self.bias.add(b, h, self.queries[i - self.first], self.keys[j], dtype)

    def collect(self, into: Tensor, grad: Tensor, b: Any, h: Any, i: Any, j: Any) -> None:
        """Add the gradient of a tile to that of the whole bias's tensor."""
        self.bias.collect(into, grad, b, h, self.queries[i - self.first], self.keys[j])

    def bind(self, first: int | Tensor) -> Bias:
        """Set the position of row 0. The whole bias is bound already."""
        return self.but(first=first)


class StridedBand(Band):
    """A band low ≤ j − i ≤ high between the indices of two progressions with the same step."""

    low: int
    high: int

    def band(self) -> tuple[int, int]:
        """Return low and high."""
        return self.low, self.high


def whole_problem(ranks: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Problem:
    """Check the arguments for the whole sequence, and return its problem, without queries, keys and values.

    Args:
        ranks: The number of ranks, each of which has n tokens.
        q: This rank's queries `[b, h, n, d]`.
        k: This rank's keys `[b, g, n, d]`.
        v: This rank's values `[b, g, n, w]`.
        **options: mask, bias, scale, softcap and sink, for the whole sequence.

    Returns:
        The problem, in whose q, k and v all tokens share the memory of one number.
    """
    shape_of(q, k, v)  # so that its errors have the sizes of this rank's tensors
    empty = (x.detach().new_zeros(1).expand(*x.shape[:2], x.shape[2] * ranks, x.shape[3]) for x in (q, k, v))
    return Problem.of(*empty, offset=0, **options)


def block(whole: Problem, q: Tensor, k: Tensor, v: Tensor, rows: Part, cols: Part) -> Problem:
    """Return the problem of a part's queries and a part's keys, without the sink.

    Args:
        whole: The problem of the whole sequence.
        q: The queries of the part, `[b, h, t, d]`.
        k: The keys of the part, `[b, g, s, d]`.
        v: The values of the part, `[b, g, s, w]`.
        rows: The positions of the queries.
        cols: The positions of the keys.

    Returns:
        The problem.
    """
    are_runs = rows.is_run and cols.is_run
    offset = rows.hull.start - cols.hull.start if are_runs else 0
    mask, bias = whole.mask, whole.bias
    if mask is not None:
        first, stop = mask.span(rows.hull).all
        every = first <= cols.hull.start and cols.hull.stop <= stop
        mask = None if every else _cut_mask(mask, rows, cols, q.device).bind(offset, len(cols))
    if bias is not None:
        bias = _cut_bias(bias, rows, cols, q.device).bind(offset)
    (n, h, t, d), (_, g, s, w) = q.shape, v.shape
    shape = Shape(n, h, g, t, s, d, w)
    return Problem(q, k, v, mask, bias, whole.scale, whole.softcap, None, offset, 0.0, shape)


def _cut_mask(mask: Mask, rows: Part, cols: Part, device: torch.device) -> Mask:
    """Return a bound mask for the queries and keys of two parts."""
    if isinstance(mask, And):
        return And(*(_cut_mask(part, rows, cols, device) for part in mask.parts()))
    queries, keys = rows.positions, cols.positions
    if isinstance(queries, range) and isinstance(keys, range) and queries.step == keys.step:
        supported = Band | Lengths | Documents if device.type == "cpu" else Band
        if queries.step == 1 and isinstance(mask, supported):
            part = mask.cut(queries, keys, 0)
            assert part is not None
            return part
        if isinstance(mask, Band):
            (low, high), ahead = mask.band(), queries.start - keys.start
            # low ≤ j − i ≤ high, where i = queries.start + step·i' and j = keys.start + step·j'
            return StridedBand(
                -FAR if low <= -FAR else math.ceil((low + ahead) / queries.step),
                FAR if high >= FAR else math.floor((high + ahead) / queries.step),
            )
    return MaskAtParts(mask, rows.tensor(device), cols.tensor(device))


def _cut_bias(bias: Bias, rows: Part, cols: Part, device: torch.device) -> Bias:
    """Return a bound bias for the queries and keys of two parts."""
    if rows.is_run and cols.is_run:
        if isinstance(bias, ALiBi | Relative):  # they depend on the distance only
            return bias
        if isinstance(bias, Dense):
            return bias.but(values=select_block(bias.values, rows, cols))
    return BiasAtParts(bias, rows.tensor(device), cols.tensor(device))


def select_block(values: Tensor, rows: Part, cols: Part) -> Tensor:
    """Return a view of the values `[…, t or 1, s or 1]` of a dense bias for two runs."""
    for axis, part in ((-1, cols), (-2, rows)):
        if values.dim() >= -axis and values.shape[axis] > 1:
            values = values.narrow(axis, part.hull.start, len(part))
    return values


def add_gradient(into: Tensor, grad: Tensor, bias: Bias, rows: Part, cols: Part) -> None:
    """Add the gradient of a block's bias to the gradient of the tensor of the whole bias."""
    if isinstance(bias, Dense) and rows.is_run and cols.is_run:
        into = select_block(into, rows, cols)
    into.add_(grad.reshape(into.shape))
