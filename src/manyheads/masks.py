"""Which keys a query may see: frozen values, composed with `&`, `|` and `~`. True = may attend.

    mask = Causal() & Window(left=255) & Documents(ids)

A mask is asked about positions, not row numbers: a query's position is its row plus an offset, a
key's position is its column. `keep(b, h, i, j)` is a mask's only definition; `span(rows)` bounds it,
so that kernels can skip empty tiles and leave full ones unmasked; `normal()` is what a kernel reads
to say whether it can. What is given by row (`Keep`, `Drop`, `queries=`) or counts from the last key
(`Lengths(left=True)`) learns its place from `bind`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.shapes import Shape, can_read, kind, sizes, whole
from manyheads.trees import Value, bound, number

FAR = 1 << 60  # "no bound", on the axis of positions

Index = Any  # an int, or an integer tensor that broadcasts against [b, h, t, s]
Interval = tuple[int, int]  # half-open


class Span(NamedTuple):
    """Two intervals of keys: those that some of the rows may see, those that all of them see."""

    some: Interval
    all: Interval


class Normal(NamedTuple):
    """A mask as a conjunction: a band low ≤ j − i ≤ high (None: no bound), segments, lengths, rest."""

    band: tuple[int | None, int | None]
    segments: tuple[Documents, ...]
    lengths: tuple[Lengths, ...]
    rest: tuple[Mask, ...]


EVERYTHING: Interval = (0, FAR)
NOTHING: Interval = (0, 0)


class Mask(Value):
    """Which keys a query may see; True = may attend. Compose with `&`, `|`, `~`.

    Masks are immutable, compare by identity, and draw themselves (`repr`, notebooks, `draw`).
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        """May the query at position i of batch entry b and head h see key j?

        b, h, i, j are ints or integer tensors that broadcast together; the answer is a bool or a
        boolean tensor of the broadcast shape (or one that broadcasts to it).
        """
        raise NotImplementedError

    def span(self, rows: range) -> Span:
        """Conservative bounds on the keys seen from rows, as positions, over all batch entries and heads."""
        return Span(some=EVERYTHING, all=NOTHING)

    def parts(self) -> tuple[Mask, ...]:
        """Return the masks that this one is made of."""
        return ()

    def check(self, shape: Shape) -> None:
        """Raise ValueError unless what the mask holds goes with a problem of this shape."""
        for part in self.parts():
            part.check(shape)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        """Return the mask for queries whose row 0 stands at position `first` (int or `[b]`), and s keys."""
        return self

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        """Return the mask of some batch entries `[b]` and heads `[h]`, which are counted anew from 0."""
        return Only(self, batch, heads)

    def conjuncts(self) -> list[Mask]:
        """Return the masks whose `&` this is."""
        return [self]

    def normal(self) -> Normal:
        """Return the mask as band & segments & lengths & rest."""
        low, high = -FAR, FAR
        segments: list[Documents] = []
        lengths: list[Lengths] = []
        rest: list[Mask] = []
        for part in self.conjuncts():
            if isinstance(part, Band):
                low, high = max(low, part.band()[0]), min(high, part.band()[1])
            elif isinstance(part, Documents):
                segments.append(part)
            elif isinstance(part, Lengths):
                lengths.append(part)
            elif not isinstance(part, Full):
                rest.append(part)
        band = (None if low <= -FAR else low, None if high >= FAR else high)
        return Normal(band, tuple(segments), tuple(lengths), tuple(rest))

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

    # Drawing: the size is what the mask itself speaks of, at most 32 × 32, else 12 × 12.

    def extent(self) -> tuple[int, int] | None:
        """Return queries and keys that the mask itself speaks of, if it does."""
        return next(filter(None, (part.extent() for part in self.parts())), None)

    def table(
        self,
        t: int | None = None,
        s: int | None = None,
        offset: int | None = None,
        b: int = 0,
        h: int = 0,
    ) -> Tensor:
        """Return the mask of batch entry b and head h as a boolean `[t, s]`; offset is s − t if not given.

        Raises TypeError or ValueError for sizes and an offset that aren't whole numbers.
        """
        rows, columns = self.extent() or (12, 12)
        if offset is None and t is None and s is None:
            offset = columns - rows
        t = min(rows, 32) if t is None else whole(t, "t")
        s = min(columns, 32) if s is None else whole(s, "s")
        offset = s - t if offset is None else whole(offset, "offset", least=-FAR)
        bound = self.to("cpu").bind(offset, s if self.extent() is None else max(s, columns))
        i = torch.arange(t)[:, None] + offset  # [t, 1]
        j = torch.arange(s)[None, :]  # [1, s]
        return torch.as_tensor(bound.keep(b, h, i, j)).expand(t, s)

    def draw(self, t: int | None = None, s: int | None = None, offset: int | None = None) -> str:
        """Return a picture for a terminal: a line per query, a column per key, ■ where it may attend.

        Arguments as `table`, TypeError or ValueError too.
        """
        rows = self.table(t, s, offset).tolist()
        return "\n".join(" ".join("■" if kept else "·" for kept in row) for row in rows)

    def __repr__(self) -> str:
        return f"{self}\n{self.draw()}"

    def _repr_html_(self) -> str:
        cells = self.table()
        t, s = cells.shape
        squares = "".join(
            f'<rect x="{10 * j}" y="{10 * i}" width="9" height="9" '
            f'fill="{"#0072B2" if kept else "#E4E4E4"}"/>'
            for i, row in enumerate(cells.tolist())
            for j, kept in enumerate(row)
        )
        return (
            f"<figure><figcaption><code>{escape(str(self))}</code> "
            "(a row per query, a column per key, blue: may attend)</figcaption>"
            f'<svg width="{10 * s}" height="{10 * t}" role="img">{squares}</svg></figure>'
        )


def _mask(value: object) -> Mask:
    if isinstance(value, Mask):
        return value
    hint = ": wrap it in Keep(...) (True = may attend) or Drop(...)" if isinstance(value, Tensor) else ""
    raise TypeError(f"Expected a mask to compose with, got {kind(value)}{hint}.")


# -- nodes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """Seen where both masks see."""

    left: Mask
    right: Mask

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return And(self.left.only(batch, heads), self.right.only(batch, heads))

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.left.keep(b, h, i, j) & self.right.keep(b, h, i, j)

    def span(self, rows: range) -> Span:
        x, y = self.left.span(rows), self.right.span(rows)
        return Span(_meet(x.some, y.some), _meet(x.all, y.all))

    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(left=self.left.bind(first, s), right=self.right.bind(first, s))

    def conjuncts(self) -> list[Mask]:
        return self.left.conjuncts() + self.right.conjuncts()

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts())


@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """Seen where either mask sees."""

    left: Mask
    right: Mask

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return Or(self.left.only(batch, heads), self.right.only(batch, heads))

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.left.keep(b, h, i, j) | self.right.keep(b, h, i, j)

    def span(self, rows: range) -> Span:
        x, y = self.left.span(rows), self.right.span(rows)
        return Span(_hull(x.some, y.some), _join(x.all, y.all))

    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(left=self.left.bind(first, s), right=self.right.bind(first, s))

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts())


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """Seen where the mask doesn't see."""

    mask: Mask

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.mask.keep(b, h, i, j) ^ True

    def span(self, rows: range) -> Span:
        inner = self.mask.span(rows)
        # What some see is what not all see: a complement that is no interval widens to everything;
        # what all see is what none see, and there it shrinks to one of its two sides.
        outside_all, outside_some = _complement(inner.all), _complement(inner.some)
        return Span(
            some=outside_all[0] if len(outside_all) == 1 else EVERYTHING if outside_all else NOTHING,
            all=outside_some[-1] if outside_some else NOTHING,
        )

    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(mask=self.mask.bind(first, s))

    def conjuncts(self) -> list[Mask]:
        return self.mask.mask.conjuncts() if isinstance(self.mask, Not) else [self]

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, And | Or) else f"~{self.mask}"


@dataclass(frozen=True, eq=False, repr=False)
class Only(Mask):
    """A bound mask, seen from some batch entries `[b]` and heads `[h]` that are counted anew from 0."""

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
        if not isinstance(index, Tensor) or not _is_integer(index) or tuple(index.shape) != (size,):
            raise ValueError(f"Expected integers [{letter}] = [{size}] for Only, got {kind(index)}.")


def spread(first: int | Tensor, batch: Tensor) -> int | Tensor:
    """Positions `[b]` of some batch entries, put back where these stood before they were picked."""
    if isinstance(first, int) or not batch.numel():
        return first
    return first.new_zeros(int(batch.max()) + 1).index_copy_(0, batch, first)


def _meet(x: Interval, y: Interval) -> Interval:
    low, high = max(x[0], y[0]), min(x[1], y[1])
    return (low, high) if low < high else NOTHING


def _hull(x: Interval, y: Interval) -> Interval:
    if x[0] >= x[1] or y[0] >= y[1]:
        return y if x[0] >= x[1] else x
    return min(x[0], y[0]), max(x[1], y[1])


def _join(x: Interval, y: Interval) -> Interval:
    """Return the union where it is an interval, else the longer of the two: never more than the union."""
    if max(x[0], y[0]) <= min(x[1], y[1]):
        return _hull(x, y)
    return max(x, y, key=lambda interval: interval[1] - interval[0])


def _complement(x: Interval) -> list[Interval]:
    if x[0] >= x[1]:
        return [EVERYTHING]
    return [side for side in ((0, x[0]), (x[1], FAR)) if side[0] < side[1]]


# -- leaves: geometry ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    """Every query sees every key, as in the encoder of Vaswani et al. 2017 (arXiv:1706.03762)."""

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return self

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return (i == i) & (j == j)

    def span(self, rows: range) -> Span:
        return Span(EVERYTHING, EVERYTHING)

    def __str__(self) -> str:
        return "Full()"


class Band(Mask):
    """A mask that only asks for low ≤ j − i ≤ high: what Causal, Window and Diagonal share."""

    def band(self) -> tuple[int, int]:
        """Return low and high, ±FAR where there is no bound."""
        raise NotImplementedError

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return self

    def normal(self) -> Normal:
        low, high = self.band()
        return Normal((None if low <= -FAR else low, None if high >= FAR else high), (), (), ())

    def span(self, rows: range) -> Span:
        if not rows:
            return Span(NOTHING, EVERYTHING)
        low, high = self.band()
        top, bottom = rows[0], rows[-1]
        return Span(
            some=_meet(EVERYTHING, (top + low, bottom + high + 1)),
            all=_meet(EVERYTHING, (bottom + low, top + high + 1)),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Band):
    """A query sees itself and what precedes it: j ≤ i (Vaswani et al. 2017, section 3.2.3)."""

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return j <= i

    def band(self) -> tuple[int, int]:
        return -FAR, 0

    def __str__(self) -> str:
        return "Causal()"


@dataclass(frozen=True, eq=False, repr=False)
class Window(Band):
    """A query sees `left` keys before its own position, itself, and `right` keys after it.

    An omitted side is unbounded: `Window(left=255, right=0)` is a causal window of 256 keys. Local
    attention: Child et al. 2019 (arXiv:1904.10509), Beltagy et al. 2020 (arXiv:2004.05150). TypeError or
    ValueError for a side that is no number of keys.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None:
                whole(side, f"Window's {name}, which counts keys beside the query's own,")

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        kept = (i == i) & (j == j)
        if self.left is not None:
            kept = kept & (j >= i - min(self.left, FAR))  # sums of int64 wrap around
        if self.right is not None:
            kept = kept & (j <= i + min(self.right, FAR))
        return kept

    def band(self) -> tuple[int, int]:
        return -FAR if self.left is None else -self.left, FAR if self.right is None else self.right

    def __str__(self) -> str:
        return f"Window(left={self.left}, right={self.right})"


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Band):
    """A query sees one key, k places after its own position: j = i + k. TypeError unless k is an int.

    `Diagonal(-1)` is where previous-token heads look, found by Clark et al. 2019 (arXiv:1906.04341).
    """

    k: int = 0

    def __post_init__(self) -> None:
        whole(self.k, "Diagonal's k", least=-FAR)

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return j == i + self.k

    def band(self) -> tuple[int, int]:
        return self.k, self.k

    def __str__(self) -> str:
        return f"Diagonal({self.k})"


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """Every query sees the first n keys: j < n.

    `Causal() | Prefix(n)` is a prefix language model (Raffel et al. 2020, arXiv:1910.10683). n is an int,
    or an integer tensor `[b]`: TypeError or ValueError where it counts no keys.
    """

    n: int | Tensor

    def __post_init__(self) -> None:
        _counts(self.n, "Prefix")

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return j < _per_batch(self.n, b)

    def span(self, rows: range) -> Span:
        least, most = extremes(self.n)
        return Span((0, most), (0, least))

    def check(self, shape: Shape) -> None:
        _check_batch(self.n, shape, "Prefix")

    def __str__(self) -> str:
        return f"Prefix({_short(self.n)})"


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Padding: only the first n keys are real, j < n; with `left=True` the last n, j ≥ s − n.

    n is an int, or an integer tensor `[b]`: TypeError or ValueError where it counts no keys. It masks keys
    only, as `torch.nn.MultiheadAttention`'s key_padding_mask does: padded queries still see.
    """

    n: int | Tensor
    left: bool = False
    s: int | None = bound(None)  # the number of keys

    def __post_init__(self) -> None:
        _counts(self.n, "Lengths")
        if not isinstance(self.left, bool):
            raise TypeError(f"Expected left in Lengths to be True or False, got {self.left!r}.")

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        n = _per_batch(self.n, b)
        return j + n >= self._columns() if self.left else j < n  # j is wide, n may be int8

    def span(self, rows: range) -> Span:
        least, most = extremes(self.n)
        if not self.left:
            return Span((0, most), (0, least))
        s = self._columns()
        return Span((max(s - most, 0), FAR), (max(s - least, 0), FAR))

    def check(self, shape: Shape) -> None:
        _check_batch(self.n, shape, "Lengths")

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(s=s)

    def _columns(self) -> int:
        if self.s is None:
            raise ValueError(
                "Lengths(left=True) counts from the last key and doesn't know how many there are: "
                "give it s=, or use it through attention, which tells it."
            )
        return self.s

    def __str__(self) -> str:
        return f"Lengths({_short(self.n)}{', left=True' if self.left else ''})"


@dataclass(frozen=True, eq=False, repr=False)
class Keys(Mask):
    """Every query sees these keys, a list or a tensor `[n]`, and no others: `Keys([0, 5])`.

    With `|` they are keys that all see, the global tokens of Beltagy et al. 2020 (arXiv:2004.05150).
    TypeError or ValueError for what is no column.
    """

    keys: tuple[int, ...]

    def __init__(self, keys: Sequence[int] | Tensor) -> None:
        if isinstance(keys, Tensor):
            keys = keys.tolist()
        if isinstance(keys, int) or not isinstance(keys, Sequence):
            raise TypeError(f"Expected a list of columns for Keys, got {keys!r}: write Keys([...]).")
        object.__setattr__(self, "keys", tuple(sorted({whole(key, "a column in Keys") for key in keys})))

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        j = torch.as_tensor(j)
        return torch.isin(j, torch.tensor(self.keys, dtype=j.dtype, device=j.device))

    def span(self, rows: range) -> Span:
        if not self.keys:
            return Span(NOTHING, NOTHING)
        run = (self.keys[0], self.keys[-1] + 1)
        return Span(run, run if run[1] - run[0] == len(self.keys) else NOTHING)

    def extent(self) -> tuple[int, int] | None:
        size = max(12, self.keys[-1] + 1) if self.keys else 12
        return size, size

    def __str__(self) -> str:
        return f"Keys({list(self.keys)})"


def _counts(n: object, name: str) -> None:
    """Check that n is a number of keys: an int ≥ 0, or an integer tensor [b] of them."""
    if not isinstance(n, Tensor):
        whole(n, f"the number of keys in {name}")
        return
    if n.dim() != 1 or not _is_integer(n):
        raise TypeError(f"Expected an int or an integer tensor [b] for {name}, got {kind(n)} {sizes(n)}.")
    if not opaque(n) and bool((n < 0).any()):
        raise ValueError(f"Expected the numbers of keys in {name} to be at least 0, got {n.tolist()}.")


def opaque(tensor: Tensor) -> bool:
    """Return True if reading a tensor would break a graph or make a device wait."""
    return not can_read(tensor) or tensor.device.type != "cpu"


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _check_batch(n: int | Tensor, shape: Shape, name: str) -> None:
    if isinstance(n, Tensor) and n.shape[0] not in (1, shape.b):
        raise ValueError(
            f"{name} holds {n.shape[0]} numbers, and the batch b is {shape.b}: give one for each."
        )


def _per_batch(n: int | Tensor, b: Index) -> Any:
    """Return the number of batch entry b."""
    if isinstance(n, int):
        return n
    if n.shape[0] == 0 and not isinstance(b, Tensor):  # drawn for a batch of none
        return 0
    return n[0] if n.shape[0] == 1 else n[b]


def extremes(n: int | Tensor) -> tuple[int, int]:
    """Return the least and the greatest, of one number or one per sequence."""
    if isinstance(n, int):
        return n, n
    return (int(n.min()), int(n.max())) if n.numel() else (0, 0)


def _short(value: object) -> str:
    """Return a field as `str` prints it: small tensors whole, large ones by their size."""
    if not isinstance(value, Tensor):
        return str(value)
    return str(value.tolist()) if value.numel() <= 8 and not opaque(value) else sizes(value)


# -- leaves: identity ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Ids(Mask):
    """A mask that compares ids: what Documents, SameToken and AfterSameToken share.

    Without `queries`, the query at position i has ids[i]; with it, the query in row r has queries[r].
    A position outside the ids matches nothing.
    """

    ids: Tensor
    queries: Tensor | None = None
    first: int | Tensor = bound(0)  # the position of row 0, where queries are given

    def __post_init__(self) -> None:
        name = type(self).__name__
        for what, ids in (("ids", self.ids), ("queries", self.queries)):
            if ids is None and what == "queries":
                continue
            if not isinstance(ids, Tensor) or not _is_integer(ids) or ids.dim() not in (1, 2):
                got = f"{kind(ids)} {sizes(ids)}" if isinstance(ids, Tensor) else kind(ids)
                letters = "[s] or [b, s]" if what == "ids" else "[t] or [b, t]"
                raise TypeError(f"Expected {what} as an integer tensor {letters} for {name}, got {got}.")

    def key(self, b: Index, j: Index) -> tuple[Any, Any]:
        """Return the id of key j of batch entry b, and whether there is one."""
        return _look_up(self.ids, b, j)

    def query(self, b: Index, i: Index) -> tuple[Any, Any]:
        """Return the id of the query at position i of batch entry b, and whether there is one."""
        if self.queries is None:
            return _look_up(self.ids, b, i)
        return _look_up(self.queries, b, i - _per_batch(self.first, b))

    def match(self, b: Index, i: Index, j: Index) -> Any:
        """Do query i and key j of batch entry b have the same id?"""
        (mine, here), (theirs, there) = self.query(b, i), self.key(b, j)
        return (mine == theirs) & here & there

    def span(self, rows: range) -> Span:
        """From the first to the last key with an id of these rows; full where all share a single run."""
        n = self.ids.shape[-1]
        low, high = extremes(self.first) if self.queries is not None else (0, 0)
        source = self.ids if self.queries is None else self.queries
        start, stop = rows.start - high, rows.stop - low
        seen = source[..., max(start, 0) : max(stop, 0)].unique()
        matches = torch.isin(self.ids, seen).reshape(-1, max(n, 1)).any(0).nonzero()
        if not len(matches):
            return Span(NOTHING, NOTHING)
        some = (int(matches[0]), int(matches[-1]) + 1)
        inside = start >= 0 and stop <= source.shape[-1]
        if not inside or len(seen) > 1 or not bool((self.ids[..., some[0] : some[1]] == seen).all()):
            return Span(some, NOTHING)
        return Span(some, some)

    def check(self, shape: Shape) -> None:
        name = type(self).__name__
        for what, ids in (("ids", self.ids), ("queries", self.queries)):
            if ids is not None and ids.dim() == 2 and ids.shape[0] not in (1, shape.b):
                raise ValueError(f"{name}'s {what} are {sizes(ids)}, and the batch b is {shape.b}.")
        if self.queries is not None and self.queries.shape[-1] != shape.t:
            raise ValueError(
                f"{name}'s queries are {sizes(self.queries)}, and there are t = {shape.t} queries: "
                "give one id for each row."
            )

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self if self.queries is None else self.but(first=first)

    def extent(self) -> tuple[int, int] | None:
        s = self.ids.shape[-1]
        return (s if self.queries is None else self.queries.shape[-1]), s

    def __str__(self) -> str:
        queries = "" if self.queries is None else f", queries={_short(self.queries)}"
        return f"{type(self).__name__}({_short(self.ids)}{queries})"


def _look_up(ids: Tensor, b: Index, position: Index) -> tuple[Any, Any]:
    """Return the ids at a position of batch entry b, and whether the position is inside."""
    n = ids.shape[-1]
    position = torch.as_tensor(position, device=ids.device)
    if n == 0 or (ids.dim() == 2 and ids.shape[0] == 0 and not isinstance(b, Tensor)):
        return torch.zeros_like(position), torch.zeros_like(position, dtype=torch.bool)
    inside = (position >= 0) & (position < n)
    position = position.clamp(0, n - 1)
    if ids.dim() == 1:
        return ids[position], inside
    return ids[0 if ids.shape[0] == 1 else b, position], inside


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Ids):
    """Packed sequences: a query sees the keys of its own document, those with the same id.

    ids: integers `[s]` or `[b, s]`; queries: the queries' ids `[t]` or `[b, t]` for cross-attention.
    The library sets first, the position of row 0, an int or `[b]`. TypeError for other ids. Krell et al. 2021
    (arXiv:2107.02027).
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.match(b, i, j)


@dataclass(frozen=True, eq=False, repr=False)
class SameToken(Ids):
    """A query sees the keys that hold its own token: ids[j] = ids[i].

    Where a duplicate-token head looks (Wang et al. 2023, arXiv:2211.00593). ids `[s]` or `[b, s]`, queries
    `[t]` or `[b, t]`, first, an int or `[b]`, TypeError for others, as in Documents.
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.match(b, i, j)


@dataclass(frozen=True, eq=False, repr=False)
class AfterSameToken(Ids):
    """A query sees the keys that follow its own token: ids[j − 1] = ids[i], 1 ≤ j ≤ i.

    Where an induction head looks (Olsson et al. 2022, arXiv:2209.11895). ids `[s]` or `[b, s]`, queries
    `[t]` or `[b, t]`, first, an int or `[b]`, TypeError for others, as in Documents.
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return self.match(b, i, j - 1) & (j >= 1) & (j <= i)

    def span(self, rows: range) -> Span:
        low, high = super().span(rows).some
        return Span(_meet((low + 1, high + 1), (1, rows.stop)), NOTHING)


# -- leaves: tables and rules ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Keep(Mask):
    """A boolean tensor, True = may attend: `[t, s]`, or four dimensions that broadcast to `[b, h, t, s]`.

    The polarity of `torch.nn.functional.scaled_dot_product_attention`. TypeError for what isn't boolean,
    ValueError for another number of dimensions. The library sets first, the position of row 0, an int or
    `[b]`.
    """

    tensor: Tensor
    first: int | Tensor = bound(0)  # the position of row 0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.tensor, Tensor):
            raise TypeError(f"Expected a boolean tensor [t, s] for {name}, got {kind(self.tensor)}.")
        if self.tensor.dtype != torch.bool:
            raise TypeError(
                f"Expected a boolean tensor for {name}, got {self.tensor.dtype}: compare it first, e.g. "
                f"{name}(tensor != 0), so that it's plain what a number means."
            )
        if self.tensor.dim() not in (2, 4):
            raise ValueError(
                f"Expected [t, s] or four dimensions that broadcast to [b, h, t, s] for {name}, got "
                f"{sizes(self.tensor)}. For padding use Lengths(n)."
            )

    def _entry(self, b: Index, h: Index, i: Index, j: Index) -> tuple[Any, Any]:
        """Return the tensor's entry, and whether there is one: outside it matches nothing."""
        row = i - _per_batch(self.first, b)
        inside: Any = True
        places = []
        for place, size in zip((b, h, row, j)[-self.tensor.dim() :], self.tensor.shape, strict=True):
            place = torch.as_tensor(place, device=self.tensor.device)
            if size == 1 and self.tensor.dim() == 4:
                places.append(torch.zeros_like(place))
            else:
                inside = (place >= 0) & (place < size) & inside
                places.append(place.clamp(0, max(size - 1, 0)))
        if self.tensor.numel() == 0:
            return torch.zeros_like(inside), inside & False
        return self.tensor[tuple(places)], inside

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        entry, inside = self._entry(b, h, i, j)
        return entry & inside

    def check(self, shape: Shape) -> None:
        name, want = type(self).__name__, (shape.b, shape.h, shape.t, shape.s)
        got = tuple(self.tensor.shape)
        if len(got) == 2 and got != want[2:]:
            raise ValueError(
                f"{name} holds {sizes(self.tensor)}, and [t, s] is [{shape.t}, {shape.s}]; a mask of padding "
                "[b, s] is said as Lengths(n), or as four dimensions [b, 1, 1, s]."
            )
        if len(got) == 4 and any(n not in (1, m) for n, m in zip(got, want, strict=True)):
            raise ValueError(
                f"{name} holds {sizes(self.tensor)}, which doesn't broadcast to [b, h, t, s] = {list(want)}."
            )

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(first=first)

    def extent(self) -> tuple[int, int] | None:
        return self.tensor.shape[-2], self.tensor.shape[-1]

    def __str__(self) -> str:
        return f"{type(self).__name__}({sizes(self.tensor)})"


@dataclass(frozen=True, eq=False, repr=False)
class Drop(Keep):
    """A boolean tensor `[t, s]` with the other polarity: True = may NOT attend.

    The polarity of `torch.nn.MultiheadAttention`. Four dimensions, first (an int or `[b]`), TypeError and
    ValueError as in Keep.
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        entry, inside = self._entry(b, h, i, j)
        return (entry ^ True) & inside


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Mask):
    """A mask by a function: `Rule(lambda b, h, i, j: (i - j) % 2 == 0)`.

    The function, fn, gets integer tensors that broadcast to `[b, h, t, s]` (i and j are positions) and
    returns a boolean tensor. A kernel knows nothing of it but its answers, so no tile is skipped.
    With `torch.compile`, make the rule outside the compiled function. So a mask is said in PyTorch's
    FlexAttention (Dong et al. 2024, arXiv:2412.05496). TypeError for what can't be asked so.
    """

    fn: Callable[[Any, Any, Any, Any], Any]
    number: int = field(default=-1, init=False)  # what it is called where functions can't go

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                f"Expected a function (b, h, i, j) → boolean tensor for Rule, got {kind(self.fn)}."
            )
        try:
            signature(self.fn).bind(0, 0, 0, 0)
        except TypeError:
            raise TypeError(
                f"Expected a function of four arguments b, h, i, j for Rule, got {signature(self.fn)}."
            ) from None
        except ValueError:  # a function of C tells no signature
            pass
        try:
            object.__setattr__(self, "number", number(self.fn))
        except TypeError:  # an object with __slots__
            raise TypeError(
                f"Expected a function that can be referred to weakly for Rule, got {kind(self.fn)}: "
                "wrap it in a lambda."
            ) from None

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        """Return what the function answers; TypeError where that isn't boolean."""
        answer = self.fn(b, h, i, j)
        if isinstance(answer, bool) or (isinstance(answer, Tensor) and answer.dtype == torch.bool):
            return answer
        raise TypeError(f"Expected Rule's function to return a boolean tensor, got {kind(answer)}.")

    def __str__(self) -> str:
        return f"Rule({getattr(self.fn, '__name__', 'fn')})"
