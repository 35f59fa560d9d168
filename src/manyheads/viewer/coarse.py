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

    The first two levels are stored in strips, which need half of the memory if the mask is causal. The third
    and coarser levels are computed from the sums and maxima of the third.

    Args:
        problem: The problem of one sequence and one head.
        cells: The cells of the first level and all that are coarser, the finest first.
        side: The number of cells along each side of a tile.
    """

    def __init__(self, problem: Problem, cells: Sequence[Cell], side: int) -> None:
        self.problem, self.cells, self.side = problem, cells, side
        self.queries, self.keys = range(problem.shape.t), range(problem.shape.s)
        self._strips: dict[tuple[int, int], Strip] = {}  # of the first two levels, by level and row of tiles
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
        self._write(0, rows, cols, packed)
        size = ratio(coarse, fine)
        sums = pool_sum(cells[0] * areas(rows, cols, fine), *size)
        largest = pool_max(packed[1].nan_to_num(nan=MASKED), *size)
        self._write(1, rows, cols, _pack(sums, areas(rows, cols, coarse), largest))
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

    def _write(self, level: int, rows: range, cols: range, cells: Tensor) -> None:
        """Write cells of the first or second level into their strip."""
        cell = self.cells[level]
        y, row = divmod(rows.start // cell.rows, self.side)
        if (level, y) not in self._strips:
            self._strips[level, y] = self._empty_strip(level, y)
        first, strip = self._strips[level, y]
        write_corner(strip[:, row:, cols.start // cell.cols - first :], cells)

    def _empty_strip(self, level: int, y: int) -> Strip:
        """Return a strip for all cells of a row of tiles that a query may attend to."""
        cell = self.cells[level]
        height = self.side * cell.rows
        rows = self.queries[y * height : (y + 1) * height]
        cols = self.visible_keys(rows)
        shape = count_cells(rows, cols, cell)
        return Strip(cols.start // cell.cols, torch.full((2, *shape), math.nan, dtype=torch.float16))

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
        tile = torch.full((2, *count_cells(rows, cols, cell)), math.nan)
        if (level, y) in self._strips:
            first, strip = self._strips[level, y]
            part = strip[:, :, max(0, left - first) : max(0, right - first)]
            write_corner(tile[:, :, max(0, first - left) :], part.float() / SCALE)
        return tile


def _pack(sums: Tensor, areas: Tensor, largest: Tensor) -> Tensor:
    """Return means and maxima in float16 times 2^15, NaN if masked, `[2, r, c]`; maxima already are."""
    return torch.stack(((sums * SCALE / areas).half(), largest)).masked_fill_(largest == MASKED, math.nan)
