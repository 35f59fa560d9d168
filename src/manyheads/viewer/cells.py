"""The size of cells, and how weights are pooled to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 2.0**15  # factor of cells in float16, whose range (6e-8 to 65,504) then covers 2e-12 to 1


class Cell(NamedTuple):
    """The size of a cell, in weights.

    Attributes:
        rows: The number of queries.
        cols: The number of keys.
    """

    rows: int
    cols: int


def count_cells(rows: range, cols: range, cell: Cell) -> tuple[int, int]:
    """Return the numbers of rows and columns of cells that cover a region, which begins at a cell's edge."""
    return -(-len(rows) // cell.rows), -(-len(cols) // cell.cols)


def ratio(coarse: Cell, fine: Cell) -> tuple[int, int]:
    """Return how many rows and columns of fine cells are in a coarse one."""
    return coarse.rows // fine.rows, coarse.cols // fine.cols


def write_corner(target: Tensor, cells: Tensor) -> None:
    """Write cells into the upper left corner of a tensor."""
    target[..., : cells.shape[-2], : cells.shape[-1]] = cells


def split_cells(indices: range, side: int) -> list[range]:
    """Split a range into its whole cells and a smaller last cell. Empty ranges are left out."""
    edge = len(indices) - len(indices) % side
    return [part for part in (indices[:edge], indices[edge:]) if part]


def areas(rows: range, cols: range, cell: Cell) -> Tensor:
    """Return the number of weights in each cell, `[r, c]`."""
    heights, widths = (sizes(indices, side) for indices, side in zip((rows, cols), cell, strict=True))
    return heights[:, None] * widths


def sizes(indices: range, side: int) -> Tensor:
    """Return the number of tokens in each cell of a range, in float32."""
    return (indices.stop - torch.arange(indices.start, indices.stop, side)).clamp(max=side).float()


def pool_mean(x: Tensor, height: int, width: int) -> Tensor:
    """Pool `[r, c]` to the mean of each cell; cells at the edges may be smaller."""
    return F.avg_pool2d(x[None], (height, width), ceil_mode=True, count_include_pad=False)[0]


def pool_max(x: Tensor, height: int, width: int) -> Tensor:
    """Pool `[r, c]` to the maximum of each cell; cells at the edges may be smaller."""
    return F.max_pool2d(x[None], (height, width), ceil_mode=True)[0]


def pool_sum(x: Tensor, height: int, width: int) -> Tensor:
    """Pool `[r, c]` to the sum of each cell; cells at the edges may be smaller."""
    return F.avg_pool2d(x[None], (height, width), ceil_mode=True, divisor_override=1)[0]
