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

    The first level is stored in strips, because they need half of the memory if the mask is causal. The
    third and coarser levels are computed from sums of the third level and maxima of the level before.

    Args:
        problem: The problem of one sequence and one head.
        cells: The cells of the first level and all that are coarser, the finest first.
        side: The number of cells along each side of a tile.
    """

    def __init__(self, problem: Problem, cells: Sequence[Cell], side: int) -> None:
        self.problem, self.cells, self.side = problem, cells, side
        self.queries, self.keys = range(problem.shape.t), range(problem.shape.s)
        self._strips: dict[int, Strip] = {}  # by row of tiles
        second, third = (count_cells(self.queries, self.keys, cell) for cell in cells[1:3])
        self._second = torch.full((2, *second), math.nan, dtype=torch.float16)
        self._third_sums = torch.zeros(third)
        self._levels: list[Tensor] = []  # from the second on, [2, r, c]

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
        means = sums * SCALE / areas(rows, cols, coarse)
        largest = pool_max(packed[1].nan_to_num(nan=MASKED), *size)
        pooled = torch.stack((means.half(), largest)).masked_fill_(largest == MASKED, math.nan)
        i, j = rows.start // coarse.rows, cols.start // coarse.cols
        write_corner(self._second[:, i:, j:], pooled)
        # A cell of the third level may be in several calls.
        height, width = ratio(third, coarse)
        (i, top), (j, left) = divmod(i, height), divmod(j, width)
        parts = pool_sum(F.pad(sums, (left, 0, top, 0)), height, width)
        self._third_sums[i : i + len(parts), j : j + parts.shape[1]] += parts

    def _empty_strip(self, y: int) -> Strip:
        """Return a strip for all cells of a row of tiles that a query may attend to."""
        height = self.side * self.cells[0].rows
        rows = self.queries[y * height : (y + 1) * height]
        cols = self.visible_keys(rows)
        shape = count_cells(rows, cols, self.cells[0])
        return Strip(cols.start // self.cells[0].cols, torch.full((2, *shape), math.nan, dtype=torch.float16))

    def finish(self) -> None:
        """Compute the levels after the second."""
        sums = self._third_sums
        self._levels = [self._second]
        del self._second, self._third_sums
        for finer, cell, next_cell in zip(
            self.cells[1:-1], self.cells[2:], (*self.cells[3:], None), strict=True
        ):
            largest = pool_max(self._levels[-1][1].nan_to_num(nan=MASKED), *ratio(cell, finer))
            means = sums * SCALE / areas(self.queries, self.keys, cell)
            level = torch.stack((means.half(), largest))
            self._levels.append(level.masked_fill_(largest == MASKED, math.nan))
            if next_cell is not None:
                sums = pool_sum(sums, *ratio(next_cell, cell))

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
        if level:
            cells = self._levels[level - 1][:, y * self.side : (y + 1) * self.side, left:right]
            return cells.float() / SCALE
        cell = self.cells[0]
        rows = self.queries[y * self.side * cell.rows : (y + 1) * self.side * cell.rows]
        cols = self.keys[left * cell.cols : right * cell.cols]
        tile = torch.full((2, *count_cells(rows, cols, cell)), math.nan)
        if y in self._strips:
            first, strip = self._strips[y]
            part = strip[:, :, max(0, left - first) : max(0, right - first)]
            write_corner(tile[:, :, max(0, first - left) :], part.float() / SCALE)
        return tile
