"""The coarse levels of a head, collected while it is scanned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.problem import Problem
from manyheads.viewer.cells import (
    SCALE,
    Cell,
    areas,
    count_cells,
    pool_max,
    pool_sum,
    ratio,
    write_corner,
)

MASKED = -1.0  # takes the place of NaN, which no maximum can ignore


class Strip(NamedTuple):
    """Cells of one row of tiles, from the first to the last column with visible cells.

    Attributes:
        first: The column of the first cell.
        cells: The cells, `[2, r, c]`.
    """

    first: int
    cells: Tensor


class CoarseLevels:
    """The means and maxima of the cells of several levels of a head, in float16 times 2^15, NaN if masked.

    The first level is stored in strips, which need half of the memory if the mask is causal. The second is
    pooled from it on request. Sums and maxima of the third are collected, and give the coarser levels.

    Args:
        problem: The problem of one sequence and one head.
        cells: The cells of the first level and all that are coarser, the finest first.
        side: The number of cells along each side of a tile.
    """

    def __init__(self, problem: Problem, cells: Sequence[Cell], side: int) -> None:
        self.problem, self.cells, self.side = problem, cells, side
        self.queries, self.keys = range(problem.shape.t), range(problem.shape.s)
        self._strips: dict[int, Strip] = {}  # by row of tiles
        third = count_cells(self.queries, self.keys, cells[2])
        self._sums, self._largest = torch.zeros(third), torch.full(third, MASKED, dtype=torch.float16)
        self._levels: list[Tensor] = []  # from the third on, [2, r, c]

    @property
    def nbytes(self) -> int:
        """The bytes of all levels."""
        return sum(x.nbytes for x in (*(strip.cells for strip in self._strips.values()), *self._levels))

    def visible_keys(self, rows: range) -> range:
        """Return a range of whole cells of the second level with all keys that queries may attend to."""
        unit = self.cells[1].cols
        low, high = self.problem.span(rows.start, rows.stop)[0]
        return self.keys[low // unit * unit : -(-high // unit) * unit]

    def add(self, rows: range, cols: range, cells: Tensor, masked: Tensor) -> None:
        """Add cells of the first level.

        Args:
            rows: The queries, which are whole cells of the second level within one row of tiles.
            cols: The keys, whole cells of the second level.
            cells: The means and maxima of these cells, `[2, r, c]`.
            masked: True where a cell has no visible weight, `[r, c]`.
        """
        fine, coarse, third = self.cells[:3]
        packed = (cells * SCALE).masked_fill_(masked, math.nan).half()
        y, row = divmod(rows.start // fine.rows, self.side)
        if y not in self._strips:
            self._strips[y] = self._empty_strip(y)
        first, strip = self._strips[y]
        write_corner(strip[:, row:, cols.start // fine.cols - first :], packed)
        size = ratio(coarse, fine)
        sums = pool_sum(cells[0] * areas(rows, cols, fine), *size)
        largest = pool_max(packed[1].nan_to_num(nan=MASKED), *size)
        # A cell of the third level may be in several calls.
        size = ratio(third, coarse)
        i, top = divmod(rows.start // coarse.rows, size[0])
        j, left = divmod(cols.start // coarse.cols, size[1])
        edges = left, 0, top, 0
        sums = pool_sum(F.pad(sums, edges), *size)
        largest = pool_max(F.pad(largest, edges, value=MASKED), *size)
        region = slice(i, i + len(sums)), slice(j, j + sums.shape[1])
        self._sums[region] += sums
        self._largest[region] = torch.maximum(self._largest[region], largest)

    def _empty_strip(self, y: int) -> Strip:
        """Return a strip for all cells of a row of tiles that a query may attend to."""
        height = self.side * self.cells[0].rows
        rows = self.queries[y * height : (y + 1) * height]
        cols = self.visible_keys(rows)
        shape = count_cells(rows, cols, self.cells[0])
        return Strip(cols.start // self.cells[0].cols, torch.full((2, *shape), math.nan, dtype=torch.float16))

    def finish(self) -> None:
        """Compute the levels after the second."""
        sums, largest, finer = self._sums, self._largest, self.cells[2]
        del self._sums, self._largest
        for cell in self.cells[2:]:
            size = ratio(cell, finer)
            sums, largest, finer = pool_sum(sums, *size), pool_max(largest, *size), cell
            self._levels.append(_pack(sums, areas(self.queries, self.keys, cell), largest))

    def tile(self, level: int, x: int, y: int) -> Tensor:
        """Return the cells of a tile in column x and row y, `[2, r, c]`.

        Args:
            level: The level, where 0 is the first of these levels.
            x: The column of the tile.
            y: The row of the tile.

        Returns:
            The cells.
        """
        left, right = x * self.side, (x + 1) * self.side
        if level > 1:
            cells = self._levels[level - 2][:, y * self.side : (y + 1) * self.side, left:right]
            return cells.float() / SCALE
        cell = self.cells[level]
        rows = self.queries[y * self.side * cell.rows : (y + 1) * self.side * cell.rows]
        cols = self.keys[left * cell.cols : right * cell.cols]
        if level == 1:
            return self._pool_tile(x, y, areas(rows, cols, self.cells[0]), areas(rows, cols, cell))
        tile = torch.full((2, *count_cells(rows, cols, cell)), math.nan)
        if y in self._strips:
            first, strip = self._strips[y]
            part = strip[:, :, max(0, left - first) : max(0, right - first)]
            write_corner(tile[:, :, max(0, first - left) :], part.float() / SCALE)
        return tile

    def _pool_tile(self, x: int, y: int, fine_areas: Tensor, coarse_areas: Tensor) -> Tensor:
        """Return a tile of the second level, pooled from those of the first."""
        height, width = ratio(self.cells[1], self.cells[0])
        tiles = [[self.tile(0, width * x + i, height * y + j) for i in range(width)] for j in range(height)]
        means, largest = torch.cat([torch.cat(row, 2) for row in tiles], 1)
        sums = pool_sum(means.nan_to_num(nan=0.0) * fine_areas, height, width)
        largest = pool_max(largest.nan_to_num(nan=MASKED), height, width)
        return torch.stack((sums / coarse_areas, largest)).masked_fill_(largest == MASKED, math.nan)


def _pack(sums: Tensor, areas: Tensor, largest: Tensor) -> Tensor:
    """Return means and maxima in float16 times 2^15, NaN if masked, `[2, r, c]`; maxima already are."""
    return torch.stack(((sums * SCALE / areas).half(), largest)).masked_fill_(largest == MASKED, math.nan)
