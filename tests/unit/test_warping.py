"""Dynamic time warping: the path of least cost by a loop over all cells; blocks, ties; the median filter."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from manyheads import warping


def by_loop(costs: np.ndarray, dtype: type, whisper: bool) -> list[tuple[int, int]]:
    """The path through a matrix, cell by cell; with `whisper`, ties are broken as by its loop."""
    t, s = costs.shape
    total = np.full((t + 1, s + 1), np.inf, dtype)
    total[0, 0] = 0
    came_from = {}
    for j in range(1, s + 1):
        for i in range(1, t + 1):
            both, down, along = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if whisper:
                step = (1, 1) if both < min(down, along) else (1, 0) if down < min(both, along) else (0, 1)
            else:
                step = (0, 1) if along < min(both, down) else (1, 0) if down < both else (1, 1)
            total[i, j] = costs[i - 1, j - 1] + total[i - step[0], j - step[1]]
            came_from[i, j] = step
    i, j = t, s
    path = []
    while i and j:
        path.append((i - 1, j - 1))
        step = came_from[i, j]
        i, j = i - step[0], j - step[1]
    return path[::-1]


def least_cost(costs: np.ndarray) -> float:
    """The least cost of any path, without steps."""
    t, s = costs.shape
    total = np.full((t + 1, s + 1), np.inf)
    total[0, 0] = 0
    for i in range(1, t + 1):
        for j in range(1, s + 1):
            total[i, j] = costs[i - 1, j - 1] + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    return float(total[t, s])


def run(costs: np.ndarray, width: int, dtype: type = np.float64) -> np.ndarray:
    [path] = warping.warp(
        lambda start, stop: np.ascontiguousarray(costs[None, :, start:stop]), (1, *costs.shape), width, dtype
    )
    return path


sizes = st.tuples(st.integers(1, 12), st.integers(1, 30), st.integers(1, 31), st.integers(0, 10**6))


@given(sizes, st.booleans())
def test_the_path_has_the_least_cost_whatever_the_blocks(drawn: tuple, ties: bool) -> None:
    t, s, width, seed = drawn
    costs = np.random.default_rng(seed).normal(size=(t, s))
    costs = np.round(costs) if ties else costs
    path = run(costs, width)
    assert path[0].tolist() == [0, 0]
    assert path[-1].tolist() == [t - 1, s - 1]
    steps = np.diff(path, axis=0)
    assert set(map(tuple, steps.tolist())) <= {(0, 1), (1, 0), (1, 1)}
    assert costs[tuple(path.T)].sum() == pytest.approx(least_cost(costs), abs=1e-12)
    assert path.tolist() == [list(cell) for cell in by_loop(costs, np.float64, whisper=False)]


@given(sizes, st.booleans())
def test_float32_takes_the_steps_of_whisper(drawn: tuple, ties: bool) -> None:
    t, s, width, seed = drawn
    costs = np.random.default_rng(seed).normal(size=(t, s))
    costs = np.round(costs) if ties else costs
    path = run(costs, width, np.float32)
    assert path.tolist() == [list(cell) for cell in by_loop(costs, np.float32, whisper=True)]


def test_several_matrices_are_warped_together() -> None:
    costs = np.random.default_rng(0).normal(size=(3, 9, 200))
    together = warping.warp(lambda i, j: np.ascontiguousarray(costs[:, :, i:j]), costs.shape, 60)
    for path, matrix in zip(together, costs, strict=True):
        assert path.tolist() == run(matrix, 200).tolist()


@pytest.mark.parametrize("width", [1, 3, 5, 7, 9, 15, 17])
def test_the_median_is_that_of_a_sort(width: int) -> None:
    x = torch.randn(2, 3, 40, dtype=torch.float64).round(decimals=1)
    want = x.unfold(-1, width, 1).sort(-1).values[..., width // 2]
    assert torch.equal(warping.median(x, width), want)
