"""Dynamic time warping (Sakoe & Chiba 1978) in blocks, and a median filter.

The costs of a matrix are accumulated anti-diagonal by anti-diagonal: the cells of one depend only on the two
before it, so NumPy computes them together. The compiled packages don't fit: dtw-python is licensed under the
GPL, and librosa needs SciPy and Numba. Blocks of columns are processed from left to right, and only the
column before each block is kept. Blocks are computed again when the path is followed back, so that a long
matrix needs little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

GROUP = 128  # anti-diagonals that are made contiguous at once
WIDEST = 15  # the widest median filter that isn't computed by sorting

DOWN, RIGHT = 1, 2  # steps of a path to the next row or the next column; 0 is the step to both


def median(x: Tensor, width: int) -> Tensor:
    """Return the medians of `width` adjacent entries (odd) along the last axis: `[…, n − width + 1]`.

    The smallest and the largest of some entries are dropped again and again, and another entry is added. Each
    step is a minimum and a maximum of whole tensors, which takes less than a tenth of the time of sorting.

    Args:
        x: The numbers `[…, n]`, n ≥ width.
        width: The number of entries.

    Returns:
        The medians.
    """
    count = x.shape[-1] - width + 1
    if width > WIDEST:
        return x.unfold(-1, width, 1).sort(-1).values[..., width // 2]
    entries = [x[..., n : n + count] for n in range(width)]
    kept, added = entries[: width // 2 + 2], entries[width // 2 + 2 :]
    while len(kept) > 1:
        for n in range(len(kept) - 1):  # the largest moves to the end
            kept[n : n + 2] = torch.minimum(*kept[n : n + 2]), torch.maximum(*kept[n : n + 2])
        for n in range(len(kept) - 2, 0, -1):  # the smallest moves to the start
            kept[n - 1 : n + 1] = torch.minimum(*kept[n - 1 : n + 1]), torch.maximum(*kept[n - 1 : n + 1])
        kept = kept[1:-1] + added[:1]
        added = added[1:]
    return kept[0]


def warp(
    costs: Callable[[int, int], np.ndarray],
    shape: tuple[int, int, int],
    width: int,
    dtype: type[np.floating[Any]] = np.float64,
) -> list[np.ndarray]:
    """Return the path of least cost through each of n matrices `[t, s]`, from the first to the last cell.

    A step goes to the next row, the next column, or both. With float32, steps and ties are Whisper's: where
    the two steps from the row above cost the same, and less than the third, the third is taken.

    Args:
        costs: A function of the first and the last column (exclusive) of a block that returns its costs
            `[n, t, c]`, contiguous float64. It is called twice for most blocks.
        shape: (n, t, s).
        width: The number of columns in a block.
        dtype: The precision of accumulated costs.

    Returns:
        The n paths, pairs (row, column) `[steps, 2]` int64.
    """
    n, t, s = shape
    column = np.full((n, t + 1), np.inf, dtype)
    column[:, 0] = 0
    starts = range(0, s, width)
    columns = []  # the column before each block
    for start in starts:
        columns.append(column)
        column, steps = _advance(costs(start, min(start + width, s)), column)
    rows = [t - 1] * n
    parts: list[list[np.ndarray]] = [[] for _ in range(n)]
    for start, column in zip(reversed(starts), reversed(columns), strict=True):
        if start != starts[-1]:
            _, steps = _advance(costs(start, min(start + width, s)), column)
        for number in range(n):
            rows[number], cells = steps.follow(number, rows[number])
            parts[number].append(np.add(cells, (0, start)))
    return [np.concatenate(cells)[::-1].copy() for cells in parts]


class Steps(NamedTuple):
    """The step to each cell of a block, by anti-diagonals: cell (i, j) is in the diagonal i + j."""

    columns: int
    groups: list[tuple[int, np.ndarray]]  # the first row of `GROUP` diagonals, and steps [n, diagonals, rows]

    def follow(self, number: int, row: int) -> tuple[int, np.ndarray]:
        """Follow a path backwards from a row of the last column.

        Returns the row in which the path enters the block's left neighbor, and the cells in backward order.
        """
        column, cells = self.columns - 1, []
        while column >= 0 and row >= 0:
            cells.append((row, column))
            group, diagonal = divmod(row + column, GROUP)
            top, steps = self.groups[group]
            step = steps[number, diagonal, row - top]
            row -= int(step != RIGHT)
            column -= int(step != DOWN)
        return row, np.array(cells, np.int64).reshape(-1, 2)


def _advance(costs: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, Steps]:
    """Accumulate the costs of a block.

    Args:
        costs: The costs `[n, t, c]`, contiguous.
        left: The accumulated costs of the column before the block, `[n, t + 1]`, with a row above the first.

    Returns:
        The accumulated costs of the last column, `[n, t + 1]`, and the steps.
    """
    n, t, c = costs.shape
    right = np.full_like(left, np.inf)
    is_whisper = left.dtype == np.float32
    # The accumulated costs of the two diagonals before, with a row above the first.
    before, last, now = (np.full_like(left, np.inf) for _ in range(3))
    before[:, 0], last[:, 1] = left[:, 0], left[:, 1]
    groups = []
    for first in range(0, t + c - 1, GROUP):
        stop = min(first + GROUP, t + c - 1)
        top, bottom = max(0, first - c + 1), min(t, stop)  # the rows of these diagonals
        # Cell (i, d − i) has the index i·(c − 1) + d, so diagonals are columns of a view, whose other cells
        # aren't used. The copy makes diagonals contiguous.
        flat = costs.reshape(n, t * c)[:, top * (c - 1) + first :]
        strides = flat.strides[0], flat.itemsize, (c - 1) * flat.itemsize
        shape = n, stop - first, bottom - top
        group = np.ascontiguousarray(as_strided(flat, shape, strides, writeable=False))
        steps = np.empty(shape, np.int8)
        groups.append((top, steps))
        for diagonal in range(first, stop):
            low, high = max(0, diagonal - c + 1), min(t, diagonal + 1)
            both, down, along = before[:, low:high], last[:, low:high], last[:, low + 1 : high + 1]
            inside = slice(low - top, high - top)
            least = np.minimum(both, down)
            is_along = along <= least if is_whisper else along < least
            if is_whisper:
                is_along |= both == down
            step = steps[:, diagonal - first, inside]
            np.less(down, both, out=step.view(bool))
            np.copyto(step, RIGHT, where=is_along)
            np.copyto(least, along, where=is_along)
            now[:, low + 1 : high + 1] = group[:, diagonal - first, inside] + least
            now[:, low] = np.inf
            if diagonal + 2 <= t:
                now[:, diagonal + 2] = left[:, diagonal + 2]
            if diagonal >= c - 1:  # the first of these cells is in the last column
                right[:, low + 1] = now[:, low + 1]
            before, last, now = last, now, before
    return right, Steps(c, groups)
