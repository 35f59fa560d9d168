"""Masks as values: composed with `&`, `|` and `~`, bounded by intervals, brought to a normal form.

A mask is evaluated at positions, not at row numbers: a query's position is its row plus an offset, a key's
position is its column. `keep(b, h, i, j)` defines a mask; `span(rows)` bounds it, so that kernels can skip
empty tiles and leave full ones unmasked; `normal()` is the form in which kernels read it. `bind` sets the
position of row 0 and the number of keys, for masks given by row (`Keep`, `Drop`, `queries=`) or counted from
the last key (`Lengths(left=True)`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.masks import drawing
from manyheads.shapes import Shape, can_read, kind, whole
from manyheads.trees import Value

FAR = 1 << 60  # "no bound", on the axis of positions
MAX_SIDE = 32  # queries and keys of a drawing by default, for a mask whose tensors have sizes
SIDE = 12  # for one without

Index = Any  # an int, or an integer tensor that broadcasts against [b, h, t, s]
Interval = tuple[int, int]  # half-open

EVERYTHING: Interval = (0, FAR)
NOTHING: Interval = (0, 0)


class Span(NamedTuple):
    """Two intervals of keys: those visible to some of the rows, and those visible to all of them."""

    some: Interval
    all: Interval


class Normal(NamedTuple):
    """A mask as a conjunction: a band low ≤ j − i ≤ high (None: no bound), segments, lengths, rest."""

    band: tuple[int | None, int | None] = (None, None)
    segments: tuple[Any, ...] = ()  # of Documents
    lengths: tuple[Any, ...] = ()  # of Lengths
    rest: tuple[Mask, ...] = ()

    def merge(self, other: Normal) -> Normal:
        """Return the normal form of both masks joined by `&`."""
        (low, high), (other_low, other_high) = self.band, other.band
        low = other_low if low is None else low if other_low is None else max(low, other_low)
        high = other_high if high is None else high if other_high is None else min(high, other_high)
        return Normal(
            (low, high), self.segments + other.segments, self.lengths + other.lengths, self.rest + other.rest
        )


class Mask(Value):
    """Which keys each query may attend to (True = may attend). Compose with `&`, `|`, `~`.

    Masks are immutable, compare by identity, and draw themselves (`repr`, notebooks, `draw`).
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        """Return True where the query at position i of batch entry b and head h may attend to key j.

        b, h, i, j are ints or integer tensors that broadcast together; returns a bool or a boolean tensor of
        the broadcast shape, or one that broadcasts to it.
        """
        raise NotImplementedError

    def span(self, rows: range) -> Span:
        """Return bounds on the visible keys of rows (positions), over all batch entries and heads."""
        return Span(some=EVERYTHING, all=NOTHING)

    def parts(self) -> tuple[Mask, ...]:
        """Return the masks that this one is made of."""
        return ()

    def check(self, shape: Shape) -> None:
        """Raise ValueError unless the sizes of the mask's tensors fit a problem of this shape."""
        for part in self.parts():
            part.check(shape)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        """Return the mask for queries whose row 0 is at position `first` (int or `[b]`), and s keys."""
        return self

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        """Return the mask of some batch entries `[b]` and heads `[h]`, renumbered from 0."""
        return Only(self, batch, heads)

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask | None:
        """Return the mask of a range of rows and columns, renumbered from 0; None if that isn't supported.

        offset: the position of row 0, an int or `[b]`, for a bound mask. In the cut problem row 0 is at
        position offset + rows.start − cols.start.
        """
        return None

    def normal(self) -> Normal:
        """Return the mask as band & segments & lengths & rest."""
        return Normal(rest=(self,))

    def __and__(self, other: Mask) -> Mask:
        return And(self, _mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _mask(other))

    def __rand__(self, other: object) -> Mask:
        return And(_mask(other), self)

    def __ror__(self, other: object) -> Mask:
        return Or(_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(f"a mask has no truth value: compose with &, | and ~, not and, or, not ({self}).")

    def extent(self) -> tuple[int, int] | None:
        """Return the numbers of queries and keys that the mask's own tensors have, if it has any."""
        return next(filter(None, (part.extent() for part in self.parts())), None)

    def table(
        self, t: int | None = None, s: int | None = None, offset: int | None = None, b: int = 0, h: int = 0
    ) -> Tensor:
        """Return the mask of batch entry b and head h as a boolean `[t, s]`; offset is s − t by default.

        Raises TypeError or ValueError for sizes and an offset that aren't whole numbers.
        """
        rows, columns = self.extent() or (SIDE, SIDE)
        if offset is None and t is None and s is None:
            offset = columns - rows
        t = min(rows, MAX_SIDE) if t is None else whole(t, "t")
        s = min(columns, MAX_SIDE) if s is None else whole(s, "s")
        offset = s - t if offset is None else whole(offset, "offset", least=-FAR)
        bound = self.to("cpu").bind(offset, s if self.extent() is None else max(s, columns))
        i = torch.arange(t)[:, None] + offset  # [t, 1]
        j = torch.arange(s)[None, :]  # [1, s]
        return torch.as_tensor(bound.keep(b, h, i, j)).expand(t, s)

    def draw(self, t: int | None = None, s: int | None = None, offset: int | None = None) -> str:
        """Return a picture for a terminal: a line per query, a column per key, ■ where it may attend.

        Arguments as `table`, TypeError or ValueError too.
        """
        return drawing.text(self.table(t, s, offset))

    def __repr__(self) -> str:
        return f"{self}\n{self.draw()}"

    def _repr_html_(self) -> str:
        return drawing.html(str(self), self.table())


def _mask(value: object) -> Mask:
    if isinstance(value, Mask):
        return value
    hint = ": wrap it in Keep(...) (True = may attend) or Drop(...)" if isinstance(value, Tensor) else ""
    raise TypeError(f"Expected a mask to compose with, got {kind(value)}{hint}.")


class Pair(Mask):
    """Two masks: the base of And and Or."""

    left: Mask
    right: Mask

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return self.but(left=self.left.only(batch, heads), right=self.right.only(batch, heads))

    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(left=self.left.bind(first, s), right=self.right.bind(first, s))


@dataclass(frozen=True, eq=False, repr=False)
class And(Pair):
    """True where both masks are."""

    left: Mask
    right: Mask

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.left.keep(b, h, i, j) & self.right.keep(b, h, i, j)

    def span(self, rows: range) -> Span:
        x, y = self.left.span(rows), self.right.span(rows)
        return Span(intersect(x.some, y.some), intersect(x.all, y.all))

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask | None:
        left, right = (part.cut(rows, cols, offset) for part in self.parts())
        return None if left is None or right is None else And(left, right)

    def normal(self) -> Normal:
        return self.left.normal().merge(self.right.normal())

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts())


@dataclass(frozen=True, eq=False, repr=False)
class Or(Pair):
    """True where either mask is."""

    left: Mask
    right: Mask

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.left.keep(b, h, i, j) | self.right.keep(b, h, i, j)

    def span(self, rows: range) -> Span:
        x, y = self.left.span(rows), self.right.span(rows)
        return Span(_hull(x.some, y.some), _union(x.all, y.all))

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts())


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """True where the mask isn't."""

    mask: Mask

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.mask.keep(b, h, i, j) ^ True

    def span(self, rows: range) -> Span:
        inner = self.mask.span(rows)
        # Some rows see what not all rows saw: a complement that is no interval widens to everything.
        # All rows see what no row saw: there it shrinks to one of its two sides.
        outside_all, outside_some = _complement(inner.all), _complement(inner.some)
        return Span(
            some=outside_all[0] if len(outside_all) == 1 else EVERYTHING if outside_all else NOTHING,
            all=outside_some[-1] if outside_some else NOTHING,
        )

    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(mask=self.mask.bind(first, s))

    def normal(self) -> Normal:
        return self.mask.mask.normal() if isinstance(self.mask, Not) else super().normal()

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, And | Or) else f"~{self.mask}"


@dataclass(frozen=True, eq=False, repr=False)
class Only(Mask):
    """A bound mask of some batch entries `[b]` and heads `[h]`, renumbered from 0."""

    mask: Mask
    batch: Tensor
    heads: Tensor

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.mask.keep(self.batch[b], self.heads[h], i, j)

    def span(self, rows: range) -> Span:
        return self.mask.span(rows)

    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def check(self, shape: Shape) -> None:
        picked(self.batch, self.heads, shape)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(mask=self.mask.bind(spread(first, self.batch), s))

    def __str__(self) -> str:
        return f"Only({self.mask})"


def picked(batch: Tensor, heads: Tensor, shape: Shape) -> None:
    """Check that these are indices of batch entries `[b]` and heads `[h]`."""
    for index, size, letter in ((batch, shape.b, "b"), (heads, shape.h, "h")):
        if not isinstance(index, Tensor) or not is_integer(index) or tuple(index.shape) != (size,):
            raise ValueError(f"Expected integers [{letter}] = [{size}] for Only, got {kind(index)}.")


def spread(first: int | Tensor, batch: Tensor) -> int | Tensor:
    """Return positions `[b]` of picked batch entries at the places that these had before."""
    if isinstance(first, int) or not batch.numel():
        return first
    return first.new_zeros(int(batch.max()) + 1).index_copy_(0, batch, first)


def intersect(x: Interval, y: Interval) -> Interval:
    """Return the keys that are in both intervals."""
    low, high = max(x[0], y[0]), min(x[1], y[1])
    return (low, high) if low < high else NOTHING


def _hull(x: Interval, y: Interval) -> Interval:
    if x[0] >= x[1] or y[0] >= y[1]:
        return y if x[0] >= x[1] else x
    return min(x[0], y[0]), max(x[1], y[1])


def _union(x: Interval, y: Interval) -> Interval:
    """Return the union if it is an interval, else the longer of the two: never more than the union."""
    if max(x[0], y[0]) <= min(x[1], y[1]):
        return _hull(x, y)
    return max(x, y, key=lambda interval: interval[1] - interval[0])


def _complement(x: Interval) -> list[Interval]:
    if x[0] >= x[1]:
        return [EVERYTHING]
    return [side for side in ((0, x[0]), (x[1], FAR)) if side[0] < side[1]]


def opaque(tensor: Tensor) -> bool:
    """Return True if reading a tensor would break a graph or make a device wait."""
    return not can_read(tensor) or tensor.device.type != "cpu"


def is_integer(tensor: Tensor) -> bool:
    """Return True for a tensor of integers; booleans aren't."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def extremes(n: int | Tensor) -> tuple[int, int]:
    """Return the least and the greatest of one number, or of one per sequence."""
    if isinstance(n, int):
        return n, n
    return (int(n.min()), int(n.max())) if n.numel() else (0, 0)
