"""One head as tiles, at any zoom: cells of 2^level × 2^level weights, 256 × 256 of them in a tile.

A tile holds numbers: of each cell the mean weight and the largest, or, at level 0, the weight; NaN where no
query of the cell may see a key of it. Fine levels are computed when asked for. Coarse ones come from one
streaming pass over the head, `Head.passing`; until it ends they are read off one query for each row of cells,
and say so.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import scores
from manyheads.biases import ALiBi
from manyheads.kernels import native
from manyheads.kernels.native.look import Look
from manyheads.maps import AttentionMap
from manyheads.masks import Documents, Lengths, Mask, Window
from manyheads.scores import Problem

SIDE = 256  # cells of a tile, down and across
MOST = 2**24  # weights that are computed when asked for: 4,096 × 4,096
COARSE = 5  # the level that a pass fills: the first whose tiles hold more
SCALE = 2.0**15  # float16 holds numbers from 6e-8 to 65,504: times this, weights from 2e-12 to 1
STEP = 2**27  # weights between two stops of a pass: a tenth of a second
BLOCK = 2**20  # weights that are held at a time where no kernel looks at them


class Tile(NamedTuple):
    """Numbers `[1 or 2, r, c]`: weights at level 0, else means and maxima; NaN where nothing may be seen.

    sampled: of how many queries one was read; 1 where all were.
    """

    numbers: Tensor
    sampled: int = 1

    def packed(self) -> bytes:
        """The numbers times 2^15 in float16, little-endian, row by row."""
        return (self.numbers * SCALE).half().numpy().tobytes()


class Head:
    """One head of one sequence: its tiles, its single weights, and what a pass over all of it finds.

    amap: the map of one sequence and one head, `[1, 1, t, s]`.
    """

    def __init__(self, amap: AttentionMap) -> None:
        self.amap = amap
        self.t, self.s = amap.shape[2:]
        self.top = max(0, math.ceil(math.log2(max(self.t, self.s) / SIDE)))  # all of it is one tile here
        self.small = self.t * self.s <= MOST
        whole = _part(amap.problem, range(self.t), range(self.s))
        # Parts are read with the log-sum-exp of the whole, which must be the kernel's too.
        self.fast = whole is not None and native.looks(whole) and native.looks(amap.problem)
        self.received: Tensor | None = None  # [s]
        self.entropy: Tensor | None = None  # [t]
        self.progress = 0.0  # of the pass, between 0 and 1
        self._coarse: dict[int, Tensor] = {}  # by level: [2, r, c], float16 times 2^15

    @property
    def nbytes(self) -> int:
        """The bytes that it holds, beside what is a view of the run: what a pass found, and a log-sum-exp."""
        found = (*self._coarse.values(), *(x for x in (self.received, self.entropy) if x is not None))
        return 4 * self.t + sum(x.nbytes for x in found)

    @property
    def whole(self) -> bool:
        """Has the pass ended?"""
        return self.entropy is not None

    def span(self, level: int, x: int, y: int) -> tuple[range, range]:
        """The queries and keys of the tile in column x and row y; IndexError where there is none."""
        most = self.top + 8  # where one cell is all of it
        if not 0 <= level <= most:
            raise IndexError(f"levels go from 0 to {most} here, and level {level} was asked for.")
        side = SIDE << level
        down, across = -(-self.t // side), -(-self.s // side)
        if not (0 <= x < across and 0 <= y < down):
            raise IndexError(f"level {level} has {across} × {down} tiles, and {x}/{y} was asked for.")
        return _run(y, side, self.t), _run(x, side, self.s)

    def tile(self, level: int, x: int, y: int) -> Tile:
        """The tile in column x and row y of a level; IndexError where there is none."""
        rows, cols = self.span(level, x, y)
        if len(rows) * len(cols) <= MOST:
            return Tile(self._cells(rows, cols, level))
        if level in self._coarse:
            cells = self._coarse[level][:, y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE]
            return Tile(cells.float() / SCALE)
        return self._sampled(rows, cols, level)

    def value(self, i: int, j: int) -> float:
        """A single weight; NaN where the query may not see the key."""
        seen = scores.visible(self.amap.problem, slice(i, i + 1), slice(j, j + 1))
        return float(self.amap[0, 0, i, j]) if bool(seen.all()) else math.nan

    # -- all of it ---------------------------------------------------------------------------------

    def passing(self) -> Iterator[float]:
        """Fill the coarse levels, what keys receive and entropies; yields how much is done, from 0 to 1."""
        received, entropy = torch.zeros(self.s, dtype=torch.float64), torch.zeros(self.t)
        coarse = None if self.small else Coarse(self.t, self.s)
        start = 0
        while start < self.t:
            rows = self._step(start)
            cols = self._seen(rows)
            if cols:
                look = Look(rows=True, received=True)
                sums = self._look(rows, cols, COARSE, look, pooled=coarse is not None)
                received[cols.start : cols.stop] += look.found["received"][0, 0]
                entropy[rows.start : rows.stop] = look.found["entropy"][0, 0]
                if coarse is not None:
                    coarse.add(rows, cols, sums, _hidden(self.amap.problem, rows, cols, COARSE))
            start, self.progress = rows.stop, rows.stop / self.t
            yield self.progress
        self._coarse = {} if coarse is None else coarse.levels()
        self.received, self.entropy = received.float(), entropy

    def _step(self, start: int) -> range:
        """Queries from one on whose weights are about as many as a pass takes at a time."""
        unit = 2 << COARSE
        most = -(-(self.t - start) // unit)
        few = bisect_right(
            range(1, most + 1),
            STEP if self.fast else STEP // 16,
            key=lambda n: n * unit * len(self._seen(range(start, start + n * unit))),
        )
        return range(start, min(start + max(few, 1) * unit, self.t))

    def _seen(self, rows: range) -> range:
        """The keys that some of these queries may see, at least, in whole cells of two levels."""
        unit = 2 << COARSE
        low, high = self.amap.problem.span(rows.start, min(rows.stop, self.t))[0]
        return range(low // unit * unit, min(-(-high // unit) * unit, self.s))

    # -- cells -------------------------------------------------------------------------------------

    def _cells(self, rows: range, cols: range, level: int) -> Tensor:
        """The numbers of a tile, `[1 or 2, r, c]`."""
        problem = self.amap.problem
        if level == 0:
            down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
            numbers = self.amap[0, 0, down, across].float()[None]
        else:
            hidden = _hidden(problem, rows, cols, level)
            if bool(hidden.all()):
                return torch.full((2, *hidden.shape), math.nan)
            return _numbers(self._look(rows, cols, level), rows, cols, level, hidden)
        return numbers.masked_fill_(_hidden(problem, rows, cols, level), math.nan)

    def _look(
        self, rows: range, cols: range, level: int, look: Look | None = None, pooled: bool = True
    ) -> Tensor:
        """Sums and maxima of cells `[2, r, c]`, and more if a look asks for it.

        The kernel's cells are all alike, so what is left over at the lower and right edges goes by itself.
        """
        side = 1 << level
        cells = torch.zeros(2, _count(rows, level), _count(cols, level))
        if look is not None:
            look.found = {"entropy": torch.zeros(1, 1, len(rows)), "received": torch.zeros(1, 1, len(cols))}
        for down in _even(rows, side):
            for across in _even(cols, side):
                one = Look() if look is None else Look(look.rows, look.received)
                size = _count(down, level), _count(across, level)
                if pooled:
                    one.cells = {(*size, "sum"), (*size, "max")}
                self._weigh(down, across, one)
                i, j = (down.start - rows.start), (across.start - cols.start)
                for n, how in enumerate(("sum", "max") if pooled else ()):
                    cells[n, i // side :, j // side :][: size[0], : size[1]] = one.found[*size, how][0, 0]
                if look is not None:
                    look.found["entropy"][..., i : i + len(down)] += one.found["entropy"]
                    look.found["received"][..., j : j + len(across)] += one.found["received"]
        return cells

    def _weigh(self, rows: range, cols: range, look: Look) -> None:
        """Find what is asked of the weights of these rows and columns, by the kernel if it can."""
        part, lse = _part(self.amap.problem, rows, cols), self.amap.lse[:, :, rows.start : rows.stop]
        if part is not None and self.fast and native.looks(part) and bool(lse.amax() < math.inf):
            return native.look(part, lse, look)
        found = look.found
        found["entropy"], found["received"] = torch.zeros(1, 1, len(rows)), torch.zeros(1, 1, len(cols))
        for r, c, how in look.cells:
            found[r, c, how] = torch.zeros(1, 1, r, c)
        side = max((-(-len(rows) // r) for r, _, _ in look.cells), default=1)
        step = max(side, BLOCK // len(cols) // side * side)
        for start in range(0, len(rows), step):
            here = slice(rows.start + start, min(rows.start + start + step, rows.stop))
            weights = self.amap[0, 0, here, cols.start : cols.stop].float()
            found["entropy"][0, 0, start : start + step] = -torch.special.xlogy(weights, weights).sum(-1)
            found["received"][0, 0] += weights.sum(0)
            for r, c, how in look.cells:
                folded = _fold(weights, side, how, -(-len(cols) // c))
                found[r, c, how][0, 0, start // side :][: len(folded)] = folded

    def _sampled(self, rows: range, cols: range, level: int) -> Tile:
        """A tile of one query for each row of cells, the middle one."""
        side, problem = 1 << level, self.amap.problem
        middle = torch.arange(rows.start, rows.stop, side) + side // 2
        middle = middle.clamp(max=rows.stop - 1)  # [r]
        numbers = torch.zeros(2, len(middle), _count(cols, level))
        step = max(1, BLOCK // self.s)
        for n in range(0, len(middle), step):
            index = middle[n : n + step]
            if self.amap.knows_lse:
                weights = self.amap[0, 0, index, cols.start : cols.stop].float()
            else:
                every = scores.tile(problem, index)  # [1, 1, r, s]
                sink = every.new_full((1,), -math.inf) if problem.sink is None else problem.sink.to(every)
                lse = torch.logaddexp(every.logsumexp(-1), sink[:, None])
                weights = scores.weights(every, lse)[0, 0, :, cols.start : cols.stop].float()
            numbers[0, n : n + step] = _fold(weights, 1, "sum", side) / _areas(range(1), cols, level)
            numbers[1, n : n + step] = _fold(weights, 1, "max", side)
        return Tile(numbers.masked_fill_(_hidden(problem, rows, cols, level), math.nan), side)


class Coarse:
    """The coarse levels of a head [t, s] while a pass brings the cells of the first of them."""

    def __init__(self, t: int, s: int) -> None:
        self.rows, self.cols = range(t), range(s)
        size = _count(self.rows, COARSE), _count(self.cols, COARSE)
        self.first = torch.full((2, *size), math.nan, dtype=torch.float16)
        size = _count(self.rows, COARSE + 1), _count(self.cols, COARSE + 1)
        self.sums, self.seen = (
            torch.zeros(2, *size),
            torch.zeros(size),
        )  # of the second, which needs less room

    def add(self, rows: range, cols: range, sums: Tensor, hidden: Tensor) -> None:
        """Take in sums and maxima `[2, r, c]`, and where nothing may be seen `[r, c]`."""
        first = self.first[:, rows.start >> COARSE :, cols.start >> COARSE :]
        _put(first, _numbers(sums, rows, cols, COARSE, hidden) * SCALE)
        place = slice(rows.start >> COARSE + 1, None), slice(cols.start >> COARSE + 1, None)
        _put(self.sums[:, *place], _halved(sums))
        _put(self.seen[place], _fold((~hidden).float(), 2, "max"))

    def levels(self) -> dict[int, Tensor]:
        """All of them, up to a single cell: `[2, r, c]` in float16 times 2^15."""
        found, sums, seen, level = {COARSE: self.first}, self.sums, self.seen, COARSE + 1
        while True:
            found[level] = (_numbers(sums, self.rows, self.cols, level, seen == 0) * SCALE).half()
            if seen.numel() == 1:
                return found
            sums, seen, level = _halved(sums), _fold(seen, 2, "max"), level + 1


def _run(n: int, side: int, size: int) -> range:
    return range(n * side, min((n + 1) * side, size))


def _count(run: range, level: int) -> int:
    """Cells of a run that begins with one."""
    return -(-len(run) // (1 << level))


def _put(to: Tensor, numbers: Tensor) -> None:
    """Write numbers into the upper left of a tensor."""
    to[..., : numbers.shape[-2], : numbers.shape[-1]] = numbers


def _numbers(sums: Tensor, rows: range, cols: range, level: int, hidden: Tensor) -> Tensor:
    """Means and maxima of sums and maxima `[2, r, c]`; NaN where nothing may be seen."""
    means = sums[0] / _areas(rows, cols, level)
    return torch.stack((means, sums[1])).masked_fill_(hidden, math.nan)


def _halved(sums: Tensor) -> Tensor:
    """Sums and maxima of cells twice as large."""
    return torch.stack((_fold(sums[0], 2, "sum"), _fold(sums[1], 2, "max")))


def _even(run: range, side: int) -> list[range]:
    """The part of a run that whole cells cover, and the rest, if there is any."""
    edge = run.stop - len(run) % side
    return [part for part in (range(run.start, edge), range(edge, run.stop)) if part]


def _areas(rows: range, cols: range, level: int) -> Tensor:
    """How many weights are in each cell, `[r, c]`."""
    side = 1 << level
    down, across = (torch.arange(run.start, run.stop, side) for run in (rows, cols))
    heights, widths = (rows.stop - down).clamp(max=side), (cols.stop - across).clamp(max=side)
    return heights[:, None] * widths


def _fold(x: Tensor, down: int, how: str, across: int | None = None) -> Tensor:
    """Sums or maxima `[⌈r/down⌉, ⌈c/across⌉]` of what is at least 0, `[r, c]`."""
    across = down if across is None else across
    x = F.pad(x, (0, -x.shape[1] % across, 0, -x.shape[0] % down))
    x = x.unflatten(1, (-1, across)).unflatten(0, (-1, down))  # [R, down, C, across]
    return x.sum((1, 3)) if how == "sum" else x.amax((1, 3))


# -- parts of a problem ----------------------------------------------------------------------------


def _part(p: Problem, rows: range, cols: range) -> Problem | None:
    """The problem of one sequence and head for a run of rows and keys; None where its rules can't be cut."""
    if not (p.bias is None or isinstance(p.bias, ALiBi)):
        return None
    mask: Mask | None = None
    down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
    offset = _offset(p)
    if p.mask is not None:
        normal = p.mask.normal()
        low, high = normal.band
        odd = (low is not None and low > 0) or (high is not None and high < 0)
        if normal.rest or len(normal.segments) > 1 or odd:
            return None
        first, last = _real(p)
        parts: list[Mask] = [Window(None if low is None else -low, high)]
        parts += [Lengths(max(cols.stop - max(first, cols.start), 0), left=True)] if first else []
        parts += [Lengths(max(min(last, cols.stop) - cols.start, 0))] if last < p.shape.s else []
        for documents in normal.segments:
            queries, keys = _ids(p, documents)
            parts.append(Documents(keys[across], queries=queries[down]))
        for one in parts:
            mask = one if mask is None else mask & one
    return Problem.of(
        p.q[:, :, down],
        p.k[:, :, across],
        p.v[:, :, across],
        mask=mask,
        bias=p.bias,
        scale=p.scale,
        softcap=p.softcap,
        sink=p.sink,
        offset=offset + rows.start - cols.start,
    )


def _offset(p: Problem) -> int:
    """The position of the first query of one sequence."""
    return p.offset if isinstance(p.offset, int) else int(p.offset)


def _real(p: Problem) -> tuple[int, int]:
    """The first key of one sequence that is no padding, and the one after the last."""
    first, last = 0, p.shape.s
    for one in p.mask.normal().lengths if p.mask is not None else ():
        n = int(one.n)
        first, last = (max(first, p.shape.s - n), last) if one.left else (first, min(last, n))
    return first, last


def _ids(p: Problem, documents: Documents) -> tuple[Tensor, Tensor]:
    """The documents of queries `[t]` and keys `[s]` of one sequence."""
    zero = torch.zeros(1, dtype=torch.int64)
    queries, here = documents.query(zero, torch.arange(p.shape.t) + _offset(p))
    keys, there = documents.key(zero, torch.arange(p.shape.s))
    nobody = torch.iinfo(torch.int64).min
    queries = torch.where(here, queries.to(torch.int64), nobody).flatten()
    return queries, torch.where(there, keys.to(torch.int64), nobody + 1).flatten()


def _hidden(p: Problem, rows: range, cols: range, level: int) -> Tensor:
    """Where no query of a cell may see a key of it, `[r, c]`.

    Of documents on coarse levels a cell counts as seen where ids of its queries and keys lie between each
    other's: where ids rise along the sequence, that is when they share one.
    """
    side = 1 << level
    if scores.sees_all(p, slice(rows.start, rows.stop), slice(cols.start, cols.stop)):
        return torch.zeros(_count(rows, level), _count(cols, level), dtype=torch.bool)
    normal = None if p.mask is None else p.mask.normal()
    many = len(rows) * len(cols) > MOST
    if (
        normal is None
        or normal.rest
        or (p.bias is not None and p.bias.hides)
        or (normal.segments and not many)
    ):
        return _looked_up(p, rows, cols, side)
    first, last = _real(p)
    i0 = torch.arange(rows.start, rows.stop, side)[:, None] + _offset(p)
    j0 = torch.arange(cols.start, cols.stop, side)[None]
    i1 = (i0 + side - 1).clamp(max=rows.stop - 1 + _offset(p))
    j1 = (j0 + side - 1).clamp(max=min(cols.stop, last) - 1)
    j0 = j0.clamp(min=first)
    low, high = normal.band
    seen = (j0 <= j1) & (i0 <= i1)
    seen = seen if low is None else seen & (j1 - i0 >= low)
    seen = seen if high is None else seen & (j0 - i1 <= high)
    for one in normal.segments:
        queries, keys = _ids(p, one)
        (q_low, q_high), (k_low, k_high) = (
            (-_fold_ids(-ids[run.start : run.stop], side), _fold_ids(ids[run.start : run.stop], side))
            for ids, run in ((queries, rows), (keys, cols))
        )
        seen = seen & (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])
    return ~seen


def _fold_ids(ids: Tensor, side: int) -> Tensor:
    """The largest of every `side` numbers."""
    least = torch.iinfo(torch.int64).min
    return F.pad(ids, (0, -len(ids) % side), value=least).unflatten(0, (-1, side)).amax(1)


def _looked_up(p: Problem, rows: range, cols: range, side: int) -> Tensor:
    """The same, pair by pair."""
    found = []
    step = max(side, BLOCK // len(cols) // side * side)
    for start in range(rows.start, rows.stop, step):
        here = slice(start, min(start + step, rows.stop))
        seen = scores.visible(p, here, slice(cols.start, cols.stop))[0, 0]
        found.append(_fold(seen.float(), side, "max") == 0)
    return torch.cat(found)
