"""The elementary masks, to be composed: bands, prefixes, padding, documents, tokens, tensors, functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from manyheads.masks.algebra import (
    EVERYTHING,
    FAR,
    NOTHING,
    SIDE,
    Index,
    Mask,
    Normal,
    Span,
    can_read_cheaply,
    intersect,
    is_integer,
    min_max,
    summarize,
)
from manyheads.shapes import Shape, kind, sizes, whole
from manyheads.trees import bound, register_function

# -- positions -------------------------------------------------------------------------------------


class Band(Mask):
    """A mask with bounds low ≤ j − i ≤ high: the base class of Full, Causal, Window and Diagonal."""

    def band(self) -> tuple[int, int]:
        """Return low and high; −FAR and FAR mean no bound."""
        raise NotImplementedError

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        low, high = self.band()
        kept = (i == i) & (j == j)
        if low > -FAR:  # smaller numbers would overflow int64
            kept = kept & (j >= i + low)
        if high < FAR:
            kept = kept & (j <= i + high)
        return kept

    def only(self, batch: Tensor, heads: Tensor) -> Mask:
        return self

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask:
        return self  # j − i stays the same

    def normal(self) -> Normal:
        low, high = self.band()
        return Normal(band=(None if low <= -FAR else low, None if high >= FAR else high))

    def span(self, rows: range) -> Span:
        if not rows:
            return Span(NOTHING, EVERYTHING)
        low, high = self.band()
        top, bottom = rows[0], rows[-1]
        return Span(
            some=intersect(EVERYTHING, (top + low, bottom + high + 1)),
            all=intersect(EVERYTHING, (bottom + low, top + high + 1)),
        )


class Full(Band):
    """Every key is visible, as in the encoder of Vaswani et al. 2017 (arXiv:1706.03762)."""

    def band(self) -> tuple[int, int]:
        return -FAR, FAR


class Causal(Band):
    """A query attends to its own key and earlier ones: j ≤ i (Vaswani et al. 2017, section 3.2.3)."""

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return j <= i

    def band(self) -> tuple[int, int]:
        return -FAR, 0


class Window(Band):
    """A query attends to its own key, `left` keys before it and `right` keys after it.

    `Window(left=255, right=0)` is a causal window of 256 keys. This is local attention (Child et al. 2019,
    arXiv:1904.10509; Beltagy et al. 2020, arXiv:2004.05150).

    Attributes:
        left: The number of keys before the query's own, None for all.
        right: The number of keys after it, None for all.

    Raises:
        TypeError: If a side isn't an integer.
        ValueError: If a side is negative.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None:
                whole(side, f"Window's {name}, the number of keys on that side,")

    def band(self) -> tuple[int, int]:
        return -FAR if self.left is None else -self.left, FAR if self.right is None else self.right

    def __str__(self) -> str:
        return f"Window(left={self.left}, right={self.right})"


class Diagonal(Band):
    """A query attends to one key, k positions after its own: j = i + k.

    `Diagonal(-1)` is the mask of previous-token heads, found by Clark et al. 2019 (arXiv:1906.04341).

    Attributes:
        k: The position of the key relative to that of the query.

    Raises:
        TypeError: If k isn't an integer.
        ValueError: If k is below −2^60.
    """

    k: int = 0

    def __post_init__(self) -> None:
        whole(self.k, "Diagonal's k", least=-FAR)

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return j == i + self.k

    def band(self) -> tuple[int, int]:
        return self.k, self.k


def band_mask(low: int | None, high: int | None) -> Mask:
    """Return the mask low ≤ j − i ≤ high as `Causal` or `Window`; None means no bound."""
    return Causal() if (low, high) == (None, 0) else Window(None if low is None else -low, high)


class Counted(Mask):
    """A mask of the first n keys, j < n: the base class of Prefix and Lengths."""

    n: int | Tensor

    def __post_init__(self) -> None:
        name = type(self).__name__
        given: object = self.n
        if isinstance(given, list | tuple):
            raise TypeError(
                f"Expected an int or an integer tensor [b] for {name}, got {given!r}. Wrap it: "
                f"{name}(torch.tensor({list(given)!r}))."
            )
        if not isinstance(self.n, Tensor):
            whole(self.n, f"the number of keys in {name}")
        elif self.n.dim() != 1 or not is_integer(self.n):
            raise TypeError(
                f"Expected an int or an integer tensor [b] for {name}, got {kind(self.n)} {sizes(self.n)}."
            )
        elif can_read_cheaply(self.n) and bool((self.n < 0).any()):
            raise ValueError(
                f"Expected the numbers of keys in {name} to be at least 0, got {self.n.tolist()}."
            )

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return j < _per_batch(self.n, b)

    def span(self, rows: range) -> Span:
        least, most = min_max(self.n)
        return Span((0, most), (0, least))

    def check(self, shape: Shape) -> None:
        if isinstance(self.n, Tensor) and self.n.shape[0] not in (1, shape.b):
            raise ValueError(
                f"Expected one number for each of b = {shape.b} sequences in {type(self).__name__}, got "
                f"{self.n.shape[0]}."
            )


class Prefix(Counted):
    """The first n keys are visible: j < n.

    `Causal() | Prefix(n)` is the mask of a prefix language model (Raffel et al. 2020, arXiv:1910.10683).

    Attributes:
        n: The number of keys, an int or an integer tensor `[b]`.

    Raises:
        TypeError: If n isn't an int or an integer tensor `[b]`.
        ValueError: If n is negative.
    """


class Lengths(Counted):
    """Padding: only the first n keys are visible, j < n; with `left=True` only the last n, j ≥ s − n.

    Only keys are masked, as with the key_padding_mask of `torch.nn.MultiheadAttention`: padded queries still
    attend.

    Attributes:
        n: The number of keys that aren't padding, an int or an integer tensor `[b]`.
        left: Whether the padding is on the left.
        s: The number of keys, padding included, which the library sets.

    Raises:
        TypeError: If n isn't an int or an integer tensor `[b]`, or left isn't a bool.
        ValueError: If n is negative.
    """

    left: bool = False
    s: int | None = bound(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.left, bool):
            raise TypeError(f"Expected left in Lengths to be True or False, got {self.left!r}.")

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        if not self.left:
            return super().keep(b, h, i, j)
        # Not j ≥ s − n: n may be int8, in which s − n overflows.
        return j + _per_batch(self.n, b) >= self._columns()

    def span(self, rows: range) -> Span:
        if not self.left:
            return super().span(rows)
        least, most = min_max(self.n)
        s = self._columns()
        return Span((max(s - most, 0), FAR), (max(s - least, 0), FAR))

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(s=s)

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask:
        n = torch.as_tensor(self.n)
        n = n - (self._columns() - cols.stop if self.left else cols.start)
        n = n.clamp(0, len(cols))
        return Lengths(int(n) if isinstance(self.n, int) else n, self.left)

    def normal(self) -> Normal:
        return Normal(lengths=(self,))

    def _columns(self) -> int:
        if self.s is None:
            raise ValueError(
                "Lengths(left=True) counts from the last key, so it needs the number of keys. "
                "Use the mask in attention, or bind it: mask.bind(first, s)."
            )
        return self.s

    def __str__(self) -> str:
        return f"Lengths({summarize(self.n)}{', left=True' if self.left else ''})"


class Keys(Mask):
    """Only these keys are visible, given as a list or a tensor `[n]`: `Keys([0, 5])`.

    `mask | Keys(…)` makes them global tokens, which every query may attend to (Beltagy et al. 2020,
    arXiv:2004.05150).

    Args:
        keys: The keys.

    Raises:
        TypeError: If keys isn't a list of integers or a tensor.
        ValueError: If a key is negative.
    """

    keys: tuple[int, ...]

    def __init__(self, keys: Sequence[int] | Tensor) -> None:
        if isinstance(keys, Tensor):
            keys = keys.tolist()
        if isinstance(keys, int) or not isinstance(keys, Sequence):
            raise TypeError(f"Expected a list of keys for Keys, got {keys!r}: write Keys([...]).")
        object.__setattr__(self, "keys", tuple(sorted({whole(key, "a key in Keys") for key in keys})))

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        j = torch.as_tensor(j)
        return torch.isin(j, torch.tensor(self.keys, dtype=j.dtype, device=j.device))

    def span(self, rows: range) -> Span:
        if not self.keys:
            return Span(NOTHING, NOTHING)
        some = (self.keys[0], self.keys[-1] + 1)
        return Span(some, some if some[1] - some[0] == len(self.keys) else NOTHING)

    def extent(self) -> tuple[int, int] | None:
        size = max([SIDE, *(key + 1 for key in self.keys)])
        return size, size

    def __str__(self) -> str:
        return f"Keys({list(self.keys)})"


def _per_batch(n: int | Tensor, b: Index) -> Any:
    """Return n if it is a number, else its entry for batch entry b."""
    if not isinstance(n, Tensor):  # an int, or a symbolic size while a model is exported
        return n
    if n.shape[0] == 0 and not isinstance(b, Tensor):  # a drawing of a mask for an empty batch
        return 0
    return n[0] if n.shape[0] == 1 else n[b]


# -- ids -------------------------------------------------------------------------------------------


class Ids(Mask):
    """A query attends to the keys with its own id: the base class of Documents, SameToken, AfterSameToken.

    Key j has the id ids[j]. Without `queries`, the query at position i has the id ids[i]; with it, the query
    in row r has the id queries[r]. A query outside of the ids matches nothing, and so do keys in `table`;
    attention needs an id for each key.
    """

    ids: Tensor
    queries: Tensor | None = None
    first: int | Tensor = bound(default=0)  # the position of row 0; used only if queries are given

    def __post_init__(self) -> None:
        for name, ids, letters in (("ids", self.ids, "s"), ("queries", self.queries, "t")):
            if ids is None and name == "queries":
                continue
            if not isinstance(ids, Tensor) or not is_integer(ids) or ids.dim() not in (1, 2):
                got = f"{kind(ids)} {sizes(ids)}" if isinstance(ids, Tensor) else kind(ids)
                raise TypeError(
                    f"Expected {name} as an integer tensor [{letters}] or [b, {letters}] for "
                    f"{type(self).__name__}, got {got}."
                )

    def key(self, b: Index, j: Index) -> tuple[Any, Any]:
        """Return the id of key j of batch entry b, and whether it has an id."""
        return _look_up(self.ids, b, j)

    def query(self, b: Index, i: Index) -> tuple[Any, Any]:
        """Return the id of the query at position i of batch entry b, and whether it has an id."""
        if self.queries is None:
            return _look_up(self.ids, b, i)
        return _look_up(self.queries, b, i - _per_batch(self.first, b))

    def at(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of queries and keys, in which a position without an id has one that matches nothing.

        Args:
            i: The positions of the queries, `[b or 1, t]`.
            j: The keys, `[1, s]`.

        Returns:
            The ids of the queries `[b or 1, t]` and of the keys `[b or 1, s]`, int64.
        """
        batches = [x.shape[0] for x in (self.ids, self.queries, i) if x is not None and x.dim() == 2]
        b = torch.arange(max([1, *batches]))[:, None]
        (queries, has_query), (keys, has_key) = self.query(b, i), self.key(b, j)
        queries, keys = queries.to(torch.int64), keys.to(torch.int64)
        least = torch.iinfo(torch.int64).min
        # `least` and `least + 1` mark positions without an id. If they are ids too, the ids are renumbered.
        if any(x.numel() and x.min() <= least + 1 for x in (queries, keys)):
            ids = torch.cat((queries.flatten(), keys.flatten())).unique(return_inverse=True)[1]
            queries, keys = ids[: queries.numel()].view_as(queries), ids[queries.numel() :].view_as(keys)
        return torch.where(has_query, queries, least), torch.where(has_key, keys, least + 1)

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        (query, has_query), (key, has_key) = self.query(b, i), self.key(b, j)
        return (query == key) & has_query & has_key

    def span(self, rows: range) -> Span:
        """Return bounds on the visible keys of a range of positions.

        `some` is the interval from the first to the last key whose id occurs in the rows. `all` is the same
        interval if the rows and all keys in the interval have one id, else empty.
        """
        n = self.ids.shape[-1]
        low, high = min_max(self.first) if self.queries is not None else (0, 0)
        of_queries = self.ids if self.queries is None else self.queries
        start, stop = rows.start - high, rows.stop - low
        ids = of_queries[..., max(start, 0) : max(stop, 0)].unique()
        matches = torch.isin(self.ids, ids).reshape(-1, max(n, 1)).any(0).nonzero()
        if not len(matches):
            return Span(NOTHING, NOTHING)
        some = (int(matches[0]), int(matches[-1]) + 1)
        inside = start >= 0 and stop <= of_queries.shape[-1]
        if not inside or len(ids) > 1 or not bool((self.ids[..., some[0] : some[1]] == ids).all()):
            return Span(some, NOTHING)
        return Span(some, some)

    def check(self, shape: Shape) -> None:
        name = type(self).__name__
        for field_name, ids in (("ids", self.ids), ("queries", self.queries)):
            if ids is not None and ids.dim() == 2 and ids.shape[0] not in (1, shape.b):
                raise ValueError(
                    f"Expected {field_name} of {name} for b = {shape.b} sequences, got {sizes(ids)}."
                )
        if self.ids.shape[-1] < shape.s:  # more are ids of later tokens, which a cache doesn't have yet
            raise ValueError(
                f"Expected ids of {name} for at least s = {shape.s} keys, got {sizes(self.ids)}. Pass the "
                "ids of the whole sequence."
            )
        if self.queries is not None and self.queries.shape[-1] != shape.t:
            raise ValueError(
                f"Expected an id in {name}'s queries for each of t = {shape.t} queries, got "
                f"{sizes(self.queries)}."
            )

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self if self.queries is None else self.but(first=first)

    def extent(self) -> tuple[int, int] | None:
        s = self.ids.shape[-1]
        return (s if self.queries is None else self.queries.shape[-1]), s

    def __str__(self) -> str:
        queries = "" if self.queries is None else f", queries={summarize(self.queries)}"
        return f"{type(self).__name__}({summarize(self.ids)}{queries})"


def _look_up(ids: Tensor, b: Index, position: Index) -> tuple[Any, Any]:
    """Return the id at a position of batch entry b, and whether there is an id at this position."""
    n = ids.shape[-1]
    position = torch.as_tensor(position, device=ids.device)
    if n == 0 or (ids.dim() == 2 and ids.shape[0] == 0 and not isinstance(b, Tensor)):
        return torch.zeros_like(position), torch.zeros_like(position, dtype=torch.bool)
    inside = (position >= 0) & (position < n)
    position = position.clamp(0, n - 1)
    if ids.dim() == 1:
        return ids[position], inside
    return ids[0 if ids.shape[0] == 1 else b, position], inside


class Documents(Ids):
    """Packed sequences: a query attends to the keys of its own document, those with the same id.

    Packing is described in Krell et al. 2021 (arXiv:2107.02027).

    Attributes:
        ids: The ids of the keys, integers `[s]` or `[b, s]`.
        queries: The ids of the queries in cross-attention, `[t]` or `[b, t]`.
        first: The position of row 0, an int or `[b]`, which the library sets.

    Raises:
        TypeError: If the ids aren't such tensors.
    """

    def cut(self, rows: range, cols: range, offset: int | Tensor) -> Mask:
        queries, keys = self.at(
            torch.arange(rows.start, rows.stop) + torch.as_tensor(offset).reshape(-1, 1),
            torch.arange(cols.start, cols.stop)[None],
        )
        return Documents(keys, queries=queries)

    def normal(self) -> Normal:
        return Normal(segments=(self,))


class SameToken(Ids):
    """A query attends to the keys with the same token id: ids[j] = ids[i].

    This is the mask of duplicate-token heads (Wang et al. 2023, arXiv:2211.00593).

    Attributes:
        ids: The token ids of the keys, integers `[s]` or `[b, s]`.
        queries: The token ids of the queries in cross-attention, `[t]` or `[b, t]`.
        first: The position of row 0, an int or `[b]`, which the library sets.

    Raises:
        TypeError: If the ids aren't such tensors.
    """


class AfterSameToken(Ids):
    """A query attends to the keys after earlier occurrences of its token: ids[j − 1] = ids[i], 1 ≤ j ≤ i.

    This is the mask of induction heads (Olsson et al. 2022, arXiv:2209.11895).

    Attributes:
        ids: The token ids of the keys, integers `[s]` or `[b, s]`.
        queries: The token ids of the queries in cross-attention, `[t]` or `[b, t]`.
        first: The position of row 0, an int or `[b]`, which the library sets.

    Raises:
        TypeError: If the ids aren't such tensors.
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        return super().keep(b, h, i, j - 1) & (j >= 1) & (j <= i)

    def span(self, rows: range) -> Span:
        low, high = super().span(rows).some
        return Span(intersect((low + 1, high + 1), (1, rows.stop)), NOTHING)


# -- tensors and functions -------------------------------------------------------------------------


class Keep(Mask):
    """A boolean tensor, True = may attend: `[t, s]`, or four dimensions that broadcast to `[b, h, t, s]`.

    The polarity is that of `torch.nn.functional.scaled_dot_product_attention`.

    Attributes:
        tensor: The mask.
        first: The position of row 0, an int or `[b]`, which the library sets.

    Raises:
        TypeError: If it isn't a boolean tensor.
        ValueError: If it doesn't have two or four dimensions.
    """

    tensor: Tensor
    first: int | Tensor = bound(default=0)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.tensor, Tensor):
            raise TypeError(f"Expected a boolean tensor [t, s] for {name}, got {kind(self.tensor)}.")
        if self.tensor.dtype != torch.bool:
            raise TypeError(
                f"Expected a boolean tensor for {name}, got {self.tensor.dtype}. Compare it first, e.g. "
                f"{name}(tensor != 0)."
            )
        if self.tensor.dim() not in (2, 4):
            raise ValueError(
                f"Expected [t, s] or four dimensions that broadcast to [b, h, t, s] for {name}, got "
                f"{sizes(self.tensor)}. For padding use Lengths(n)."
            )

    def _entry(self, b: Index, h: Index, i: Index, j: Index) -> tuple[Any, Any]:
        """Return the tensor's entry, and whether the index is inside of the tensor."""
        row = i - _per_batch(self.first, b)
        inside: Any = True
        indices = []
        for index, size in zip((b, h, row, j)[-self.tensor.dim() :], self.tensor.shape, strict=True):
            index = torch.as_tensor(index, device=self.tensor.device)
            if size == 1 and self.tensor.dim() == 4:
                indices.append(torch.zeros_like(index))
            else:
                inside = (index >= 0) & (index < size) & inside
                indices.append(index.clamp(0, max(size - 1, 0)))
        if self.tensor.numel() == 0:
            return torch.zeros_like(inside), inside & False
        return self.tensor[tuple(indices)], inside

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        entry, inside = self._entry(b, h, i, j)
        return entry & inside

    def check(self, shape: Shape) -> None:
        name, expected = type(self).__name__, (shape.b, shape.h, shape.t, shape.s)
        got = tuple(self.tensor.shape)
        if len(got) == 2 and got != expected[2:]:
            raise ValueError(
                f"Expected the tensor of {name} to be [t, s] = [{shape.t}, {shape.s}], got "
                f"{sizes(self.tensor)}. For a mask of padding [b, s] use Lengths(n), or four dimensions "
                "[b, 1, 1, s]."
            )
        if len(got) == 4 and any(n not in (1, size) for n, size in zip(got, expected, strict=True)):
            raise ValueError(
                f"Expected the tensor of {name} to broadcast to [b, h, t, s] = {list(expected)}, got "
                f"{sizes(self.tensor)}."
            )

    def bind(self, first: int | Tensor, s: int) -> Mask:
        return self.but(first=first)

    def extent(self) -> tuple[int, int] | None:
        return self.tensor.shape[-2], self.tensor.shape[-1]

    def __str__(self) -> str:
        return f"{type(self).__name__}({sizes(self.tensor)})"


class Drop(Keep):
    """A boolean tensor with the opposite polarity of `Keep`, True = may NOT attend.

    The polarity is that of `torch.nn.MultiheadAttention`.

    Attributes:
        tensor: The mask `[t, s]`, or four dimensions that broadcast to `[b, h, t, s]`.
        first: The position of row 0, an int or `[b]`, which the library sets.

    Raises:
        TypeError: If it isn't a boolean tensor.
        ValueError: If it doesn't have two or four dimensions.
    """

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        entry, inside = self._entry(b, h, i, j)
        return (entry ^ True) & inside


class Rule(Mask):
    """A mask that a function computes: `Rule(lambda b, h, i, j: (i - j) % 2 == 0)`.

    No tile is skipped, because the visible keys of a row are unknown. With `torch.compile`, create the rule
    outside of the compiled function.

    Attributes:
        fn: A function of integer tensors b, h, i, j (i and j are positions) that broadcast to `[b, h, t, s]`.
            It returns a boolean tensor, as a mask_mod of PyTorch's FlexAttention does (Dong et al. 2024,
            arXiv:2412.05496).
        number: The number that identifies the function in packed trees (`manyheads.trees`).

    Raises:
        TypeError: If fn isn't a function of four arguments.
    """

    fn: Callable[[Any, Any, Any, Any], Any]
    number: int = field(default=-1, init=False)

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
        except ValueError:  # a function that is written in C may have no signature
            pass
        try:
            object.__setattr__(self, "number", register_function(self.fn))
        except TypeError:  # e.g. an object with __slots__
            raise TypeError(
                f"Expected a function that supports weak references for Rule, got {kind(self.fn)}: "
                "wrap it in a lambda."
            ) from None

    def keep(self, b: Index, h: Index, i: Index, j: Index) -> Any:
        """Return the function's result, or raise TypeError if it isn't boolean."""
        kept = self.fn(b, h, i, j)
        if isinstance(kept, bool) or (isinstance(kept, Tensor) and kept.dtype == torch.bool):
            return kept
        raise TypeError(f"Expected Rule's function to return a boolean tensor, got {kind(kept)}.")

    def __str__(self) -> str:
        return f"Rule({getattr(self.fn, '__name__', 'fn')})"
