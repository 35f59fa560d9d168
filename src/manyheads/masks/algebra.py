"""The base class of masks, their composition with `&`, `|` and `~`, and their normal form.

A mask is evaluated at positions, not at row numbers: a query's position is its row plus an offset, a key's
position is its column. `keep(b, h, i, j)` defines a mask. `span(rows)` bounds the visible keys, so that
kernels skip fully masked tiles and apply no mask to fully visible ones. `normal()` is the form that kernels
read. `bind` sets the position of row 0 and the number of keys, which are needed by masks that are indexed by
row (`Keep`, `Drop`, `queries=`) or count from the last key (`Lengths(left=True)`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.masks import drawing
from manyheads.shapes import Shape, can_read, kind, sizes, whole
from manyheads.trees import Value

FAR = 1 << 60  # beyond all positions: "no bound"
SIDE = 12  # default number of queries and keys of a drawing
MAX_SIDE = 32  # the default is at most this, even if the mask's tensors are larger

Index = Any  # an int, or an integer tensor that broadcasts against [b, h, t, s]
Interval = tuple[int, int]  # half-open

EVERYTHING: Interval = (0, FAR)
NOTHING: Interval = (0, 0)


class Span(NamedTuple):
    """Two intervals of keys: those visible to some of the rows, and those visible to all of them."""

    some: Interval
    all: Interval


class Normal(NamedTuple):
    """A mask as a conjunction: a band low ≤ j − i ≤ high (None: no bound), documents, lengths, the rest."""

    band: tuple[int | None, int | None] = (None, None)
    segments: tuple[Any, ...] = ()  # each a Documents
    lengths: tuple[Any, ...] = ()  # each a Lengths
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

        Args:
            b: The batch entries: an int, or an integer tensor that broadcasts with the others.
            h: The heads.
            i: The positions of the queries.
            j: The keys.

        Returns:
            A bool, or a boolean tensor that broadcasts to the common shape.
        """
        raise NotImplementedError

    def span(self, rows: range) -> Span:
        """Return bounds on the visible keys of a range of positions, over all batch entries and heads."""
        return Span(some=EVERYTHING, all=NOTHING)

    def parts(self) -> tuple[Mask, ...]:
        """Return the masks that this mask is composed of."""
        return ()

    def walk(self) -> list[Mask]:
        """Return this mask, its parts, their parts, and so on."""
        found = [self]
        for part in self.parts():
            found += part.walk()
        return found

    def check(self, shape: Shape) -> None:
        """Raise ValueError unless the sizes of the mask's tensors fit a problem of this shape."""
        for part in self.parts():
            part.check(shape)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        """Return the mask for s keys and queries that start at the position `first` (an int or `[b]`)."""
        return self

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        """Return the mask restricted to batch entries `[b]` and heads `[h]`, which are renumbered from 0."""
        return Only(self, batch, heads)

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask | None:
        """Restrict a bound mask to a range of rows and columns, which are renumbered from 0.

        Args:
            rows: The rows.
            cols: The columns.
            offset: The position of row 0, an int or `[b]`. Row 0 of the result has the position
                offset + rows.start − cols.start.

        Returns:
            The mask, or None if that isn't supported.
        """
        return None

    def normal(self) -> Normal:
        """Return the mask as the conjunction of a band, documents, lengths and the rest."""
        return Normal(rest=(self,))

    def __and__(self, other: Mask) -> Mask:
        return other.__rand__(self) if isinstance(other, AtPositions) else And(self, _mask(other))

    def __or__(self, other: Mask) -> Mask:
        return other.__ror__(self) if isinstance(other, AtPositions) else Or(self, _mask(other))

    def __rand__(self, other: object) -> Mask:
        return And(_mask(other), self)

    def __ror__(self, other: object) -> Mask:
        return Or(_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(f"{self} has no truth value: compose masks with &, | and ~, not with and, or, not.")

    def extent(self) -> tuple[int, int] | None:
        """Return the numbers of queries and keys in the mask's tensors, or None if it has no tensors."""
        return next(filter(None, (part.extent() for part in self.parts())), None)

    def table(
        self, t: int | None = None, s: int | None = None, offset: int | None = None, b: int = 0, h: int = 0
    ) -> Tensor:
        """Return the mask as a boolean tensor.

        Args:
            t: The number of queries, by default that of the mask's tensors, at most 32; 12 without tensors.
            s: The number of keys, with the same default.
            offset: The position of row 0. By default the number of keys minus that of queries: of the mask's
                tensors if neither t nor s is given, else s − t.
            b: The batch entry.
            h: The head.

        Returns:
            The mask `[t, s]`, True where the query may attend to the key.

        Raises:
            TypeError: If a size or the offset isn't an integer.
            ValueError: If a size is negative.
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
        """Return a drawing for a terminal: a line per query, a column per key, ■ = may attend.

        Args:
            t: The number of queries, as for `table`.
            s: The number of keys.
            offset: The position of row 0.

        Returns:
            The lines of the drawing.

        Raises:
            TypeError: If a size or the offset isn't an integer.
            ValueError: If a size is negative.
        """
        return drawing.text(self.table(t, s, offset))

    def __str__(self) -> str:
        fields = (getattr(self, name) for name in self.names if name not in self.unbound)
        return f"{type(self).__name__}({', '.join(map(summarize, fields))})"

    def __repr__(self) -> str:
        return f"{self}\n{self.draw()}"

    def _repr_html_(self) -> str:
        return drawing.html(str(self), self.table())


def _mask(value: object) -> Mask:
    if isinstance(value, Mask):
        return value
    hint = (
        " Wrap it as Keep(t) (True = attend) or Drop(t) (True = masked)." if isinstance(value, Tensor) else ""
    )
    raise TypeError(f"Expected a Mask as the operand of & or |, got {kind(value)}.{hint}")


class Pair(Mask):
    """Two masks: the base class of And and Or."""

    left: Mask
    right: Mask

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return self.but(left=self.left.only(batch, heads), right=self.right.only(batch, heads))

    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(left=self.left.bind(first, s), right=self.right.bind(first, s))


class And(Pair):
    """A mask that is True where both masks are."""

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.left.keep(b, h, i, j) & self.right.keep(b, h, i, j)

    def span(self, rows: range) -> Span:
        left, right = self.left.span(rows), self.right.span(rows)
        return Span(intersect(left.some, right.some), intersect(left.all, right.all))

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask | None:
        left, right = (part.cut(rows, cols, offset) for part in self.parts())
        return None if left is None or right is None else And(left, right)

    def normal(self) -> Normal:
        return self.left.normal().merge(self.right.normal())

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts())


class Or(Pair):
    """A mask that is True where either mask is."""

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.left.keep(b, h, i, j) | self.right.keep(b, h, i, j)

    def span(self, rows: range) -> Span:
        left, right = self.left.span(rows), self.right.span(rows)
        return Span(_hull(left.some, right.some), _union(left.all, right.all))

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts())


class Not(Mask):
    """A mask that is True where the given mask is False."""

    mask: Mask

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.mask.keep(b, h, i, j) ^ True

    def span(self, rows: range) -> Span:
        span = self.mask.span(rows)
        # Keys outside `all` may be visible to some rows, and keys outside `some` are visible to all. If a
        # complement consists of two intervals, `some` becomes EVERYTHING and `all` the second interval.
        outside_all, outside_some = _complement(span.all), _complement(span.some)
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


class Only(Mask):
    """A bound mask, restricted to batch entries `[b]` and heads `[h]`, which are renumbered from 0."""

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
        check_indices(self.batch, self.heads, shape)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(mask=self.mask.bind(scatter_positions(first, self.batch), s))

    def __str__(self) -> str:
        return f"Only({self.mask})"


class AtPositions(Mask):
    """A mask whose keys aren't at the positions 0, 1, …: column j is the key at positions[b, key head, j].

    A `Cache` that has dropped keys uses it. The mask itself is written for all tokens.

    Attributes:
        mask: The mask.
        positions: The positions of the keys, ascending int64 `[b or 1, g or 1, s]`.
        tokens: The number of tokens, including the dropped ones.
        group: The number of query heads that share a key head, h / g.
    """

    mask: Mask
    positions: Tensor
    tokens: int
    group: int = 1

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        inside = torch.as_tensor(j) < self.positions.shape[2]  # a drawing may have more columns
        kept = self.mask.keep(b, h, i, look_up_positions(self.positions, self.group, b, h, j))
        return kept & inside.to(self.positions.device)

    def span(self, rows: range) -> Span:
        some, every = self.mask.span(rows)
        if not can_read_cheaply(self.positions):
            return Span(EVERYTHING if some[0] < some[1] else NOTHING, NOTHING)
        if not self.positions.numel():
            return Span(NOTHING, EVERYTHING)
        (first, last), (start, stop) = self._columns(some), self._columns(every)
        return Span(
            some=intersect(EVERYTHING, (int(first.min()), int(last.max()))),
            all=intersect(EVERYTHING, (int(start.max()), int(stop.min()))),
        )

    # Masks that are combined with this one are evaluated at the same positions.

    def __and__(self, other: Mask) -> Mask:
        return self.but(mask=self.mask & self._of_same_keys(other))

    def __or__(self, other: Mask) -> Mask:
        return self.but(mask=self.mask | self._of_same_keys(other))

    def __rand__(self, other: object) -> Mask:
        return self.but(mask=self._of_same_keys(other) & self.mask)

    def __ror__(self, other: object) -> Mask:
        return self.but(mask=self._of_same_keys(other) | self.mask)

    def __invert__(self) -> Mask:
        return self.but(mask=~self.mask)

    def _of_same_keys(self, other: object) -> Mask:
        """Return a mask by position; raise ValueError if it has its own positions, which differ."""
        if not isinstance(other, AtPositions):
            return _mask(other)
        if (self.tokens, self.group) != (other.tokens, other.group) or not torch.equal(
            self.positions, other.positions
        ):
            raise ValueError("Expected masks of the same keys, got masks that two caches have placed.")
        return other.mask

    def is_full(self, rows: range) -> bool:
        """Return True if these rows see every key, as far as the mask's intervals say. It reads no tensor."""
        first, stop = self.mask.span(rows).all
        return first <= 0 and stop >= self.tokens

    def _columns(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Return the first column inside an interval of positions and the first after it, per key head."""
        start, stop = interval
        return (self.positions < start).sum(-1), (self.positions < stop).sum(-1)

    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def check(self, shape: Shape) -> None:
        check_positions(self.positions, self.group, shape)
        self.mask.check(Shape(shape.b, shape.h, shape.g, shape.t, self.tokens, shape.d, shape.w))

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(mask=self.mask.bind(first, self.tokens))

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        positions = select_positions(self.positions, self.group, batch, heads)
        return AtPositions(self.mask.only(batch, heads), positions, self.tokens)

    def extent(self) -> tuple[int, int] | None:
        return (self.mask.extent() or (SIDE, SIDE))[0], self.positions.shape[2]

    def __str__(self) -> str:
        return f"{self.mask} at {self.positions.shape[2]} of {self.tokens} keys"


def look_up_positions(positions: Tensor, group: int, b: Index, h: Index, j: Index) -> Tensor:
    """Return the positions of the keys in columns j; positions are `[b or 1, g or 1, s]`."""
    device, (b_size, g, s) = positions.device, positions.shape
    b, h, j = (torch.as_tensor(index, device=device) for index in (b, h, j))
    if s == 0:
        return torch.zeros_like(j)
    key_head = h // group if g > 1 else torch.zeros_like(h)
    return positions[b if b_size > 1 else torch.zeros_like(b), key_head, j.clamp(max=s - 1)]


def select_positions(positions: Tensor, group: int, batch: Tensor, heads: Tensor) -> Tensor:
    """Return the positions `[b or 1, h or 1, s]` of batch entries `[b]` and query heads `[h]`."""
    if positions.shape[0] > 1:
        positions = positions[batch]
    return positions[:, heads // group] if positions.shape[1] > 1 else positions


def check_positions(positions: Tensor, group: int, shape: Shape) -> None:
    """Raise ValueError unless positions `[b or 1, g or 1, s]` fit a problem of this shape."""
    got, expected = tuple(positions.shape), (shape.b, shape.g, shape.s)
    fits = all(n in (1, size) for n, size in zip(got[:2], expected[:2], strict=True)) and got[2] == shape.s
    if not fits or (got[1] > 1 and group * shape.g != shape.h):
        raise ValueError(
            f"Expected positions for [b, g, s] = {list(expected)} and h / g = {shape.h // max(shape.g, 1)}, "
            f"got {sizes(positions)} and {group}. Use cache.place, after the keys are appended."
        )


def check_indices(batch: Tensor, heads: Tensor, shape: Shape) -> None:
    """Raise ValueError unless these are indices of batch entries `[b]` and heads `[h]`."""
    for name, index, size in (("batch", batch, shape.b), ("heads", heads, shape.h)):
        if not isinstance(index, Tensor) or not is_integer(index) or tuple(index.shape) != (size,):
            got_shape = f" {sizes(index)}" if isinstance(index, Tensor) else ""
            raise ValueError(f"Expected Only's {name} to be integers [{size}], got {kind(index)}{got_shape}.")


def scatter_positions(first: int | Tensor, batch: Tensor) -> int | Tensor:
    """Undo the selection of positions `[b]`: return a tensor that has them at the indices `batch`, else 0."""
    if not isinstance(first, Tensor) or not batch.numel():
        return first
    return first.new_zeros(int(batch.max()) + 1).index_copy_(0, batch, first)


def intersect(left: Interval, right: Interval) -> Interval:
    """Return the keys that are in both intervals."""
    start, stop = max(left[0], right[0]), min(left[1], right[1])
    return (start, stop) if start < stop else NOTHING


def _hull(left: Interval, right: Interval) -> Interval:
    """Return the smallest interval that contains both intervals."""
    nonempty = [interval for interval in (left, right) if interval[0] < interval[1]] or [NOTHING]
    return min(start for start, _ in nonempty), max(stop for _, stop in nonempty)


def _union(left: Interval, right: Interval) -> Interval:
    """Return the union if it is an interval, else the longer of the two."""
    if max(left[0], right[0]) <= min(left[1], right[1]):
        return _hull(left, right)
    return max(left, right, key=lambda interval: interval[1] - interval[0])


def _complement(interval: Interval) -> list[Interval]:
    """Return the nonempty intervals outside an interval."""
    start, stop = interval
    if start >= stop:
        return [EVERYTHING]
    return [side for side in ((0, start), (stop, FAR)) if side[0] < side[1]]


def can_read_cheaply(tensor: Tensor) -> bool:
    """Return True if a tensor's numbers can be read without waiting for its device."""
    return can_read(tensor) and tensor.device.type == "cpu"


def summarize(value: object) -> str:
    """Return a field as text: the entries of a small tensor, the size of a large one."""
    if not isinstance(value, Tensor):
        return str(value)
    return str(value.tolist()) if value.numel() <= 8 and can_read_cheaply(value) else sizes(value)


def is_integer(tensor: Tensor) -> bool:
    """Return True for a tensor of integers (not of booleans)."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def min_max(n: int | Tensor) -> tuple[int, int]:
    """Return the smallest and the largest number of a tensor `[b]` (0 and 0 if it is empty) or of an int."""
    if isinstance(n, int):
        return n, n
    return (int(n.min()), int(n.max())) if n.numel() else (0, 0)
