"""One head as a pyramid of tiles: 256 × 256 cells in a tile, 2^level × 2^level weights in a cell.

A cell has the mean and the maximum of its weights (at level 0 the weight itself), or NaN if all of them are
masked. Fine levels are computed on request. Coarse levels come from one streaming scan of the head,
`Pyramid.scan`; until it is complete, they are estimated from one query per row of cells.
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

SIDE = 256  # cells per side of a tile
MAX_WEIGHTS = 2**24  # largest tile that is computed on request: 4,096 × 4,096 weights
SCAN_LEVEL = 5  # the level that a scan computes: the finest whose tiles have more than MAX_WEIGHTS
SCALE = 2.0**15  # factor of cells in float16, whose range (6e-8 to 65,504) then covers 2e-12 to 1
STEP = 2**27  # weights per step of a scan, which then takes about 0.1 s
BLOCK = 2**20  # weights in memory at a time, unless a kernel computes fused statistics
MARGINALS = ("entropy", "received")  # the entropy of each query, the weight that each key receives


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


class Pyramid:
    """Tiles, single weights and marginal sums of one head of one sequence.

    Args:
        amap: The map of one sequence and one head, `[1, 1, t, s]`.

    Attributes:
        received: The weight that each key receives, `[s]`; None before a scan.
        entropy: The entropy of each query, `[t]`; None before a scan.
        progress: The share of the scan that is done, from 0 to 1.
    """

    def __init__(self, amap: AttentionMap) -> None:
        self.amap, self.problem = amap, amap.problem
        self.t, self.s = amap.shape[2:]
        self.top = max(0, math.ceil(math.log2(max(self.t, self.s) / SIDE)))  # the level of a single tile
        self.received: Tensor | None = None
        self.entropy: Tensor | None = None
        self.progress = 0.0
        self._coarse: dict[int, Tensor] = {}  # by level: [2, r, c], float16 times 2^15
        self._masked = _Masked(self.problem)
        # Cells are computed with fused statistics if the kernel supports a problem that is cut into tiles.
        part = self.problem.cut(range(self.t), range(self.s)) if kernels.fuses(self.problem) else None
        self._is_fast = part is not None and kernels.fuses(part, in_place=True)

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the recording's tensors: the results of a scan, and a log-sum-exp."""
        results = [*self._coarse.values(), *(x for x in (self.received, self.entropy) if x is not None)]
        return 4 * self.t + sum(x.nbytes for x in results)

    @property
    def is_complete(self) -> bool:
        """Return True once the scan has ended."""
        return self.entropy is not None

    def span(self, level: int, x: int, y: int) -> tuple[range, range]:
        """Return the queries and keys of the tile in column x and row y of a level."""
        highest = self.top + 8  # at this level, the head is a single cell
        if not 0 <= level <= highest:
            raise IndexError(f"Expected a level between 0 and {highest}, got {level}.")
        side = SIDE << level
        tile_rows, tile_columns = -(-self.t // side), -(-self.s // side)
        if not (0 <= x < tile_columns and 0 <= y < tile_rows):
            raise IndexError(
                f"Expected one of {tile_columns} × {tile_rows} tiles of level {level}, got {x}/{y}."
            )
        return range(self.t)[y * side : (y + 1) * side], range(self.s)[x * side : (x + 1) * side]

    def tile(self, level: int, x: int, y: int) -> Tile:
        """Return the tile in column x and row y of a level; raise IndexError if there is none."""
        rows, cols = self.span(level, x, y)
        if len(rows) * len(cols) <= MAX_WEIGHTS:
            return Tile(self._compute_cells(rows, cols, level))
        if level in self._coarse:
            cells = self._coarse[level][:, y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE]
            return Tile(cells.float() / SCALE)
        return self._sample(rows, cols, level)

    def weight(self, i: int, j: int) -> float:
        """Return a single weight; NaN if it is masked."""
        visible = scores.visible(self.problem, slice(i, i + 1), slice(j, j + 1))
        return float(self.amap[0, 0, i, j]) if bool(visible.all()) else math.nan

    def scan(self) -> Iterator[float]:
        """Compute the coarse levels, `received` and `entropy` in steps; yield the progress after each."""
        received, entropy = torch.zeros(self.s, dtype=torch.float64), torch.zeros(self.t)
        is_large = self.t * self.s > MAX_WEIGHTS  # else every tile is computed on request
        region = range(self.t), range(self.s)
        coarse = _shape(*region, SCAN_LEVEL) if is_large else (0, 0)
        finest = torch.full((2, *coarse), math.nan, dtype=torch.float16)
        sums = torch.zeros(_shape(*region, SCAN_LEVEL + 1))  # of the next level, to save memory
        start = 0
        while start < self.t:
            rows = self._next_rows(start)
            cols = self._visible_keys(rows)
            if cols:
                cells = self._pool(rows, cols, SCAN_LEVEL, entropy[rows.start :], received[cols.start :])
                if is_large:
                    i, j = rows.start >> SCAN_LEVEL, cols.start >> SCAN_LEVEL
                    masked = self._masked.cells(rows, cols, SCAN_LEVEL)
                    _write(finest[:, i:, j:], (cells * SCALE).masked_fill(masked, math.nan))
                    cell_sums = cells[0] * _areas(rows, cols, SCAN_LEVEL)
                    _write(sums[i // 2 :, j // 2 :], _sum_2x2(cell_sums))
            start, self.progress = rows.stop, rows.stop / self.t
            yield self.progress
        self._coarse = _coarse_levels(finest, sums, *region) if is_large else {}
        self.received, self.entropy = received.float(), entropy

    def _next_rows(self, start: int) -> range:
        """Return the queries of the next step: whole cells from `start` on, up to about `STEP` weights."""
        step = STEP if self._is_fast else STEP // 16
        rows = 2 << SCAN_LEVEL  # whole cells of this level and the next
        while (
            start + rows < self.t
            and 2 * rows * len(self._visible_keys(range(start, start + 2 * rows))) <= step
        ):
            rows *= 2
        return range(self.t)[start : start + rows]

    def _visible_keys(self, rows: range) -> range:
        """Return a range with all keys that these queries may attend to, in cells of `SCAN_LEVEL + 1`."""
        unit = 2 << SCAN_LEVEL
        low, high = self.problem.span(rows.start, min(rows.stop, self.t))[0]
        return range(self.s)[low // unit * unit : -(-high // unit) * unit]

    # -- cells -------------------------------------------------------------------------------------

    def _compute_cells(self, rows: range, cols: range, level: int) -> Tensor:
        """Return the cells of a tile, `[1 or 2, r, c]`."""
        masked = self._masked.cells(rows, cols, level)
        if level and bool(masked.all()):
            return torch.full((2, *masked.shape), math.nan)
        if level:
            cells = self._pool(rows, cols, level)
        else:
            cells = self.amap[0, 0, rows.start : rows.stop, cols.start : cols.stop].float()[None]
        return cells.masked_fill_(masked, math.nan)

    def _pool(
        self,
        rows: range,
        cols: range,
        level: int,
        entropy: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Return means and maxima of cells, `[2, r, c]`; if given, add to `entropy` and `received` in place.

        The kernel pools cells of equal size, so the smaller ones at the lower and right edges are pooled
        separately.
        """
        cells = torch.zeros(2, *_shape(rows, cols, level))
        for queries in _split_cells(rows, 1 << level):
            for keys in _split_cells(cols, 1 << level):
                shape = _shape(queries, keys, level)
                mean, largest, *sums = self._statistics(queries, keys, *shape, marginals=entropy is not None)
                i, j = queries.start - rows.start, keys.start - cols.start
                _write(cells[:, i >> level :, j >> level :], torch.stack((mean, largest)))
                if entropy is not None and received is not None:
                    entropy[i : i + len(queries)] += sums[0]
                    received[j : j + len(keys)] += sums[1]
        return cells

    def _statistics(self, rows: range, cols: range, r: int, c: int, marginals: bool) -> list[Tensor]:
        """Return means and maxima of r × c cells; with `marginals`, also the entropy and the received weight.

        A weight is exp(score − lse), where lse is the log-sum-exp of a whole row. The same kernel must
        compute both, so that their rounding errors cancel.
        """
        part = self.problem.cut(rows, cols) if self._is_fast else None
        if part is not None and kernels.fuses(part, in_place=True):
            amap = AttentionMap.of(part, self.amap.lse[:, :, rows.start : rows.stop])
            results = amap.statistics(*(MARGINALS if marginals else ()), pooled=[(r, c), (r, c, "max")])
            return [x[0, 0] for x in (*results.pop("pooled"), *results.values())]
        size = len(rows) // r, len(cols) // c
        step = max(size[0], BLOCK // len(cols) // size[0] * size[0])
        blocks = []
        for start in range(rows.start, rows.stop, step):
            weights = self.amap[0, 0, start : min(start + step, rows.stop), cols.start : cols.stop].float()
            entropy = -torch.special.xlogy(weights, weights).sum(-1)
            blocks.append((_mean(weights, *size), _max(weights, *size), entropy, weights.sum(0)))
        mean, largest, entropy, received = zip(*blocks, strict=True)
        return [torch.cat(mean), torch.cat(largest), torch.cat(entropy), torch.stack(received).sum(0)]

    def _sample(self, rows: range, cols: range, level: int) -> Tile:
        """Return a tile that is estimated from the middle query of each row of cells."""
        side = 1 << level
        middle = (torch.arange(rows.start, rows.stop, side) + side // 2).clamp(max=rows.stop - 1)  # [r]
        blocks = []
        for index in middle.split(max(1, BLOCK // self.s)):
            score = scores.tile(self.problem, index)  # [1, 1, r, s]
            sink = score.new_tensor([-math.inf]) if self.problem.sink is None else self.problem.sink.to(score)
            lse = torch.logaddexp(score.logsumexp(-1), sink[:, None])
            weights = scores.weights(score, lse)[0, 0, :, cols.start : cols.stop].float()
            blocks.append(torch.stack((_mean(weights, 1, side), _max(weights, 1, side))))
        cells = torch.cat(blocks, 1).masked_fill_(self._masked.cells(rows, cols, level), math.nan)
        return Tile(cells, side)


def _coarse_levels(finest: Tensor, sums: Tensor, rows: range, cols: range) -> dict[int, Tensor]:
    """Return all levels from `SCAN_LEVEL` to a single cell, `[2, r, c]` in float16 times 2^15.

    Args:
        finest: The cells of `SCAN_LEVEL`, `[2, r, c]` in float16 times 2^15.
        sums: The sum of each cell of the next level, `[r, c]`.
        rows: The queries.
        cols: The keys.

    Returns:
        The cells of each level.
    """
    levels, level = {SCAN_LEVEL: finest}, SCAN_LEVEL
    visible, largest = (~finest[0].isnan()).float(), finest[1].float().nan_to_num()
    while True:
        level += 1
        visible, largest = _max(visible, 2, 2), _max(largest, 2, 2)
        cells = torch.stack((sums / _areas(rows, cols, level) * SCALE, largest))
        levels[level] = cells.masked_fill_(visible == 0, math.nan).half()
        if sums.numel() == 1:
            return levels
        sums = _sum_2x2(sums)


# -- arithmetic of cells ---------------------------------------------------------------------------


def _shape(rows: range, cols: range, level: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of cells that cover a region, which begins at a cell's edge."""
    return -(-len(rows) >> level), -(-len(cols) >> level)


def _write(target: Tensor, cells: Tensor) -> None:
    """Write cells into the upper left corner of a tensor."""
    target[..., : cells.shape[-2], : cells.shape[-1]] = cells


def _split_cells(indices: range, side: int) -> list[range]:
    """Split a range into its whole cells and a smaller last cell. Empty ranges are left out."""
    edge = len(indices) - len(indices) % side
    return [part for part in (indices[:edge], indices[edge:]) if part]


def _areas(rows: range, cols: range, level: int) -> Tensor:
    """Return the number of weights in each cell, `[r, c]`."""
    heights, widths = (
        (indices.stop - torch.arange(indices.start, indices.stop, 1 << level)).clamp(max=1 << level)
        for indices in (rows, cols)
    )
    return heights[:, None] * widths


def _mean(x: Tensor, height: int, width: int) -> Tensor:
    """Pool `[r, c]` to the mean of each cell; cells at the edges may be smaller."""
    return F.avg_pool2d(x[None], (height, width), ceil_mode=True, count_include_pad=False)[0]


def _max(x: Tensor, height: int, width: int) -> Tensor:
    """Pool `[r, c]` to the maximum of each cell; cells at the edges may be smaller."""
    return F.max_pool2d(x[None], (height, width), ceil_mode=True)[0]


def _sum_2x2(x: Tensor) -> Tensor:
    """Pool `[r, c]` to the sums of 2 × 2 entries."""
    return F.avg_pool2d(x[None], 2, ceil_mode=True, divisor_override=1)[0]


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

    def cells(self, rows: range, cols: range, level: int) -> Tensor:
        """Return True for cells in which no query may attend to a key, `[r, c]`.

        In large regions a cell counts as visible if the documents of its queries and of its keys overlap as
        intervals, which is exact if ids never decrease along the sequence.
        """
        side = 1 << level
        if scores.is_fully_visible(self.problem, slice(rows.start, rows.stop), slice(cols.start, cols.stop)):
            return torch.zeros(_shape(rows, cols, level), dtype=torch.bool)
        if not self.are_intervals or (self.documents and len(rows) * len(cols) <= MAX_WEIGHTS):
            return self._masked_pairs(rows, cols, side)
        # The first and last position of each row of cells, and the first and last key of each column.
        i0 = torch.arange(rows.start, rows.stop, side)[:, None] + self.offset
        i1 = (i0 + side - 1).clamp(max=rows.stop - 1 + self.offset)
        j0 = torch.arange(cols.start, cols.stop, side)[None]
        j1 = (j0 + side - 1).clamp(max=min(cols.stop, self.last) - 1)
        j0 = j0.clamp(min=self.first)
        low, high = self.band
        visible = (j0 <= j1) & (i0 <= i1)
        visible = visible if low is None else visible & (j1 - i0 >= low)
        visible = visible if high is None else visible & (j0 - i1 <= high)
        for queries, keys in self.documents:
            (q_low, q_high), (k_low, k_high) = (
                (-_max_ids(-ids[part.start : part.stop], side), _max_ids(ids[part.start : part.stop], side))
                for ids, part in ((queries, rows), (keys, cols))
            )
            visible = visible & (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])
        return ~visible

    def _masked_pairs(self, rows: range, cols: range, side: int) -> Tensor:
        """Return the same as `cells`, computed from every query-key pair."""
        blocks = []
        step = max(side, BLOCK // len(cols) // side * side)
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            visible = scores.visible(self.problem, block, slice(cols.start, cols.stop))[0, 0]
            blocks.append(_max(visible.float(), side, side) == 0)
        return torch.cat(blocks)


def _max_ids(ids: Tensor, side: int) -> Tensor:
    """Return the largest id of each `side` consecutive ids."""
    least = torch.iinfo(torch.int64).min
    return F.pad(ids, (0, -len(ids) % side), value=least).unflatten(0, (-1, side)).amax(1)
