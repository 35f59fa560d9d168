"""One head as a pyramid of tiles: 256 × 256 cells in a tile, 2^level × 2^level weights in a cell.

A cell has the mean and the maximum of its weights (at level 0 the weight itself), or NaN if all of them are
masked. Fine levels are computed on request. Coarse levels come from one streaming scan of the head,
`Pyramid.scan`; until it is complete, they are estimated from one query per row of cells.

If there are at least four times as many keys as queries, cells are wider than tall: of 5 queries over 30,000
keys, only keys are pooled, so that each row of cells stays one query. With many queries over few keys, cells
are taller than wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import kernels, scores
from manyheads.maps import AttentionMap
from manyheads.masks import Full
from manyheads.problem import Problem
from manyheads.viewer.cells import SCALE, Cell, count_cells, pool_max, pool_mean, split_cells, write_corner
from manyheads.viewer.coarse import CoarseLevels
from manyheads.viewer.largest import LargestWeights, Weight

SIDE = 256  # cells per side of a tile
MAX_WEIGHTS = 2**24  # largest tile that is computed on request: 4,096 × 4,096 weights
ELONGATED = 4  # a matrix this many times as long as wide has cells that aren't square
STEP = 2**27  # weights per step of a scan, which then takes about 0.1 s
STEP_KEYS = 2**15  # keys per step of a scan; more queries per step are faster, and kernels copy the keys
BLOCK = 2**20  # weights in memory at a time, unless a kernel computes fused statistics
SAMPLE_BLOCK = 2**18  # the same while tiles are estimated, where each weight needs several numbers


class Marginals(NamedTuple):
    """What a scan computes of each query and key.

    Attributes:
        entropy: The entropy of each query in nats, `[t]`.
        received: The weight that each key receives, `[s]`.
        row_max: The largest weight of each query, `[t]`.
    """

    entropy: Tensor
    received: Tensor
    row_max: Tensor

    def part(self, rows: range, cols: range) -> Marginals:
        """Return views of some queries and keys."""
        down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
        return Marginals(self.entropy[down], self.received[across], self.row_max[down])

    def add(self, entropy: Tensor, received: Tensor, row_max: Tensor) -> None:
        """Add the numbers of more queries and keys in place."""
        self.entropy.add_(entropy)
        self.received.add_(received)
        torch.maximum(self.row_max, row_max, out=self.row_max)


class Tile(NamedTuple):
    """A tile of cells.

    Attributes:
        cells: Weights `[1, r, c]` at level 0, else means and maxima `[2, r, c]`; NaN if masked.
        sampled: n if the cells were estimated from one query in n; 1 if they are exact.
    """

    cells: Tensor
    sampled: int = 1

    def to_float16(self) -> bytes:
        """Return the cells times 2^15 in float16, little-endian, row by row."""
        return (self.cells * SCALE).half().numpy().tobytes()


def level_shifts(t: int, s: int) -> tuple[int, int]:
    """Return by how many levels the pooling of queries and of keys is delayed, at least one of them 0.

    A cell of a level has `2 ** max(0, level - shift)` weights along each axis.
    """
    if max(t, s) < ELONGATED * min(t, s):
        return 0, 0
    shift = math.ceil(math.log2(max(t, s) / min(t, s)))
    return (shift, 0) if t < s else (0, shift)


class Pyramid:
    """Tiles, single weights and marginal sums of one head of one sequence.

    Args:
        amap: The map of one sequence and one head, `[1, 1, t, s]`.

    Attributes:
        marginals: The numbers of each query and key; None before a scan.
        progress: The share of the scan that is done, from 0 to 1.
    """

    def __init__(self, amap: AttentionMap) -> None:
        self.amap, self.problem = amap, amap.problem
        self.t, self.s = amap.shape[2:]
        self.shifts = level_shifts(self.t, self.s)
        self.top = max(0, math.ceil(math.log2(max(self.t, self.s) / SIDE)))  # the level of a single tile
        self.marginals: Marginals | None = None
        self.progress = 0.0
        self._coarse: CoarseLevels | None = None  # after a scan of a large head
        self._largest: LargestWeights | None = None
        self._masked = _Masked(self.problem)
        # Cells are computed with fused statistics if the kernel supports a problem that is cut into tiles.
        part = self.problem.cut(range(self.t), range(self.s)) if kernels.fuses(self.problem) else None
        self._is_fast = part is not None and kernels.fuses(part, in_place=True)

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the recording's tensors: the results of a scan, and a log-sum-exp."""
        coarse = 0 if self._coarse is None else self._coarse.nbytes
        return 4 * self.t + coarse + sum(x.nbytes for x in self.marginals or ())

    @property
    def is_complete(self) -> bool:
        """Return True once the scan has ended."""
        return self.marginals is not None

    @property
    def highest(self) -> int:
        """The coarsest level: the longer axis is a single cell."""
        return self.top + SIDE.bit_length() - 1

    @property
    def scan_level(self) -> int:
        """The level that a scan computes: the finest whose tiles have more than `MAX_WEIGHTS`."""
        levels = range(self.highest + 1)
        return next((level for level in levels if self._tile_weights(level) > MAX_WEIGHTS), self.highest)

    def cell(self, level: int) -> Cell:
        """Return the size of a level's cells."""
        return Cell(*(1 << max(0, level - shift) for shift in self.shifts))

    def grid(self, level: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of a level's tiles."""
        cell = self.cell(level)
        return -(-self.t // (SIDE * cell.rows)), -(-self.s // (SIDE * cell.cols))

    def _tile_weights(self, level: int) -> int:
        """Return the number of weights of a level's largest tile."""
        rows, cols = self.cell(level)
        return min(self.t, SIDE * rows) * min(self.s, SIDE * cols)

    def span(self, level: int, x: int, y: int) -> tuple[range, range]:
        """Return the queries and keys of the tile in column x and row y of a level."""
        if not 0 <= level <= self.highest:
            raise IndexError(f"Expected a level between 0 and {self.highest}, got {level}.")
        height, width = (SIDE * size for size in self.cell(level))
        tile_rows, tile_columns = self.grid(level)
        if not (0 <= x < tile_columns and 0 <= y < tile_rows):
            raise IndexError(
                f"Expected one of {tile_columns} × {tile_rows} tiles of level {level}, got {x}/{y}."
            )
        return range(self.t)[y * height : (y + 1) * height], range(self.s)[x * width : (x + 1) * width]

    def tile(self, level: int, x: int, y: int) -> Tile:
        """Return the tile in column x and row y of a level; raise IndexError if there is none."""
        rows, cols = self.span(level, x, y)
        if len(rows) * len(cols) <= MAX_WEIGHTS:
            return Tile(self._compute_cells(rows, cols, self.cell(level)))
        if self._coarse is not None:
            return Tile(self._coarse.tile(level - self.scan_level, x, y))
        return self._sample(rows, cols, self.cell(level))

    def weight(self, i: int, j: int) -> float:
        """Return a single weight; NaN if it is masked."""
        visible = scores.visible(self.problem, slice(i, i + 1), slice(j, j + 1))
        return float(self.amap[0, 0, i, j]) if bool(visible.all()) else math.nan

    def largest(self, rank: int) -> Weight | None:
        """Return the weight that has `rank` larger ones in this head; None before a scan, or if it is 0."""
        if self._largest is None and self.marginals is not None:
            self._largest = LargestWeights(self.amap, self.marginals.row_max)
        return None if self._largest is None else self._largest.find(rank)

    def weights(self, rows: range, cols: range) -> Tensor:
        """Return weights `[r, c]` in float32; NaN if masked."""
        return self._compute_cells(rows, cols, Cell(1, 1))[0]

    def scan(self) -> Iterator[float]:
        """Compute the coarse levels and the marginals in steps; yield the progress after each."""
        sums_of_keys = torch.zeros(self.s, dtype=torch.float64)
        marginals = Marginals(torch.zeros(self.t), sums_of_keys, torch.zeros(self.t))
        levels = range(self.scan_level, self.highest + 1)
        cell, next_cell = self.cell(levels.start), self.cell(levels.start + 1)
        # Every tile of a small head is computed on request.
        is_large = self.t * self.s > MAX_WEIGHTS
        coarse = CoarseLevels(self.problem, [self.cell(n) for n in levels], SIDE) if is_large else None
        start = 0
        while start < self.t:
            rows = self._next_rows(start, next_cell)
            visible, most = self._visible_keys(rows, next_cell), max(STEP_KEYS, next_cell.cols)
            for first in range(0, len(visible), most):
                cols = visible[first : first + most]
                cells = self._pool(rows, cols, cell, marginals)
                if coarse is not None:
                    coarse.add(rows, cols, cells, self._masked.cells(rows, cols, cell))
                self.progress = (start + len(rows) * min(1, (first + most) / len(visible))) / self.t
                yield self.progress
            start, self.progress = rows.stop, rows.stop / self.t
        yield self.progress
        if coarse is not None:
            coarse.finish()
        self._coarse = coarse
        self.marginals = marginals._replace(received=sums_of_keys.float())

    def _next_rows(self, start: int, cell: Cell) -> range:
        """Return the queries of the next step: whole cells from `start` on, up to about `STEP` weights."""
        step, rows = STEP if self._is_fast else STEP // 16, cell.rows

        def count_keys(size: int) -> int:
            return min(len(self._visible_keys(range(start, start + size), cell)), STEP_KEYS)

        while start + rows < self.t and 2 * rows * count_keys(2 * rows) <= step:
            rows *= 2
        strip = SIDE * self.cell(self.scan_level).rows  # a step is within one row of tiles
        return range(self.t)[start : min(start + rows, (start // strip + 1) * strip)]

    def _visible_keys(self, rows: range, cell: Cell) -> range:
        """Return a range of whole cells with all keys that these queries may attend to."""
        unit = cell.cols
        low, high = self.problem.span(rows.start, min(rows.stop, self.t))[0]
        return range(self.s)[low // unit * unit : -(-high // unit) * unit]

    # -- cells -------------------------------------------------------------------------------------

    def _compute_cells(self, rows: range, cols: range, cell: Cell) -> Tensor:
        """Return the cells of a tile, `[1 or 2, r, c]`."""
        masked = self._masked.cells(rows, cols, cell)
        is_pooled = cell != (1, 1)
        if is_pooled and bool(masked.all()):
            return torch.full((2, *masked.shape), math.nan)
        if is_pooled:
            cells = self._pool(rows, cols, cell)
        else:
            cells = self.amap[0, 0, rows.start : rows.stop, cols.start : cols.stop].float()[None]
        return cells.masked_fill_(masked, math.nan)

    def _pool(self, rows: range, cols: range, cell: Cell, marginals: Marginals | None = None) -> Tensor:
        """Return means and maxima of cells, `[2, r, c]`; add to `marginals` in place, if given.

        The kernel pools cells of equal size, so the smaller ones at the lower and right edges are pooled
        separately.
        """
        cells = torch.zeros(2, *count_cells(rows, cols, cell))
        for queries in split_cells(rows, cell.rows):
            for keys in split_cells(cols, cell.cols):
                shape = count_cells(queries, keys, cell)
                mean, largest, *numbers = self._statistics(
                    queries, keys, *shape, with_marginals=marginals is not None
                )
                i, j = queries.start - rows.start, keys.start - cols.start
                write_corner(cells[:, i // cell.rows :, j // cell.cols :], torch.stack((mean, largest)))
                if marginals is not None:
                    marginals.part(queries, keys).add(*numbers)
        return cells

    def _statistics(self, rows: range, cols: range, r: int, c: int, with_marginals: bool) -> list[Tensor]:
        """Return means and maxima of r × c cells, and the three marginals if they are requested.

        A weight is exp(score − lse), where lse is the log-sum-exp of a whole row. The same kernel must
        compute both, so that their rounding errors cancel.
        """
        part = self.problem.cut(rows, cols) if self._is_fast else None
        if part is not None and kernels.fuses(part, in_place=True):
            amap = AttentionMap.of(part, self.amap.lse[:, :, rows.start : rows.stop])
            names = Marginals._fields if with_marginals else ()
            results = amap.statistics(*names, pooled=[(r, c), (r, c, "max")])
            return [x[0, 0] for x in (*results.pop("pooled"), *results.values())]
        size = len(rows) // r, len(cols) // c
        step = max(size[0], BLOCK // len(cols) // size[0] * size[0])
        blocks = []
        for start in range(rows.start, rows.stop, step):
            weights = self.amap[0, 0, start : min(start + step, rows.stop), cols.start : cols.stop].float()
            entropy = -torch.special.xlogy(weights, weights).sum(-1)
            marginals = entropy, weights.sum(0), weights.amax(-1)
            blocks.append((pool_mean(weights, *size), pool_max(weights, *size), *marginals))
        mean, largest, entropy, received, row_max = zip(*blocks, strict=True)
        by_key = torch.stack(received).sum(0)
        return [torch.cat(mean), torch.cat(largest), torch.cat(entropy), by_key, torch.cat(row_max)]

    def _sample(self, rows: range, cols: range, cell: Cell) -> Tile:
        """Return a tile that is estimated from the middle query of each row of cells.

        If a row of cells is a single query, the tile is exact.
        """
        starts = torch.arange(rows.start, rows.stop, cell.rows)
        middle = (starts + cell.rows // 2).clamp(max=rows.stop - 1)  # [r]
        blocks = []
        for index in middle.split(max(1, SAMPLE_BLOCK // self.s)):
            score = scores.tile(self.problem, index)  # [1, 1, r, s]
            sink = score.new_tensor([-math.inf]) if self.problem.sink is None else self.problem.sink.to(score)
            lse = torch.logaddexp(score.logsumexp(-1), sink[:, None])
            weights = scores.weights(score, lse)[0, 0, :, cols.start : cols.stop].float()
            blocks.append(torch.stack((pool_mean(weights, 1, cell.cols), pool_max(weights, 1, cell.cols))))
        cells = torch.cat(blocks, 1).masked_fill_(self._masked.cells(rows, cols, cell), math.nan)
        return Tile(cells, cell.rows)


# -- masked cells ----------------------------------------------------------------------------------


class _Masked:
    """The fully masked cells of a problem of one sequence and one head.

    Bands, padding and, in large regions, documents are computed from the bounds of each cell; other masks are
    computed from all of its query-key pairs.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.offset = problem, int(problem.offset)
        normal = (Full() if problem.mask is None else problem.mask).normal()
        self.band, (t, s) = normal.band, problem.shape[3:5]
        spans = [lengths.span(range(1)).some for lengths in normal.lengths]
        self.first = max([0, *(low for low, _ in spans)])  # the first key that isn't padding
        self.last = min([s, *(high for _, high in spans)])
        i, j = torch.arange(t)[None] + self.offset, torch.arange(s)[None]
        self.documents = [[ids[0] for ids in documents.at(i, j)] for documents in normal.segments]
        self.are_intervals = not normal.rest and not (problem.bias is not None and problem.bias.can_mask)

    def cells(self, rows: range, cols: range, cell: Cell) -> Tensor:
        """Return True for cells in which no query may attend to a key, `[r, c]`.

        In large regions a cell counts as visible if the documents of its queries and of its keys overlap as
        intervals, which is exact if ids never decrease along the sequence.
        """
        if scores.is_fully_visible(self.problem, slice(rows.start, rows.stop), slice(cols.start, cols.stop)):
            return torch.zeros(count_cells(rows, cols, cell), dtype=torch.bool)
        if not self.are_intervals or (self.documents and len(rows) * len(cols) <= MAX_WEIGHTS):
            return self._masked_pairs(rows, cols, cell)
        # The first and last position of each row of cells, and the first and last key of each column.
        i0 = torch.arange(rows.start, rows.stop, cell.rows)[:, None] + self.offset
        i1 = (i0 + cell.rows - 1).clamp(max=rows.stop - 1 + self.offset)
        j0 = torch.arange(cols.start, cols.stop, cell.cols)[None]
        j1 = (j0 + cell.cols - 1).clamp(max=min(cols.stop, self.last) - 1)
        j0 = j0.clamp(min=self.first)
        low, high = self.band
        visible = (j0 <= j1) & (i0 <= i1)
        visible = visible if low is None else visible & (j1 - i0 >= low)
        visible = visible if high is None else visible & (j0 - i1 <= high)
        for queries, keys in self.documents:
            (q_low, q_high), (k_low, k_high) = (
                (-_max_ids(-ids[part.start : part.stop], size), _max_ids(ids[part.start : part.stop], size))
                for ids, part, size in ((queries, rows, cell.rows), (keys, cols, cell.cols))
            )
            visible = visible & (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])
        return ~visible

    def _masked_pairs(self, rows: range, cols: range, cell: Cell) -> Tensor:
        """Return the same as `cells`, computed from every query-key pair."""
        blocks = []
        step = max(cell.rows, BLOCK // len(cols) // cell.rows * cell.rows)
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            visible = scores.visible(self.problem, block, slice(cols.start, cols.stop))[0, 0]
            blocks.append(pool_max(visible.float(), *cell) == 0)
        return torch.cat(blocks)


def _max_ids(ids: Tensor, side: int) -> Tensor:
    """Return the largest id of each `side` consecutive ids."""
    least = torch.iinfo(torch.int64).min
    return F.pad(ids, (0, -len(ids) % side), value=least).unflatten(0, (-1, side)).amax(1)
