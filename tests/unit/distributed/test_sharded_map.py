"""A map over several processes equals the map of one: every statistic, mask and layout; and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import Causal
from manyheads.statistics import TopKeys
from tests.cases import Case
from tests.ranks import on_ranks
from tests.sharded_maps import CASES, LAYOUTS, PER_QUERY, TILES, compute, positions_of, run_cases, whole


def close(got: Any, expected: Any, case: Case, name: str) -> None:
    """Compare trees of tensors; the keys of `top` where their weights are distinct."""
    if isinstance(expected, TopKeys):
        close(got.weights, expected.weights, case, name)
        gap = torch.nn.functional.pad(expected.weights, (0, 1)).diff(dim=-1).neg()
        before = torch.cat((gap.new_ones(*gap.shape[:-1], 1), gap[..., :-1]), -1)
        clear = (gap > 1e-3) & (before > 1e-3)
        assert torch.equal(got.keys[clear], expected.keys[clear]), f"{case} {name}"
        assert torch.equal(got.keys < 0, expected.keys < 0), f"{case} {name}"
    elif isinstance(expected, list | tuple):
        for n, pair in enumerate(zip(got, expected, strict=True)):
            close(*pair, case, f"{name}[{n}]")
    else:
        # Scores of 1,500 have rounding errors of 1e-4, which aren't the same in blocks of other sizes.
        tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-5
        tolerance *= 300 if case.size == "thousands" else 1
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance, equal_nan=True,
            msg=lambda text: f"{case} {name}: {text}",
        )  # fmt: skip


def join(results: list[Any], layout: str, name: str) -> Any:
    """Return the rows of all ranks in the order of positions; of other results, that of rank 0."""
    if name not in PER_QUERY:
        for other in results[1:]:
            assert_same(other, results[0])
        return results[0]
    if isinstance(results[0], list):
        return [join([each[n] for each in results], layout, name) for n in range(len(results[0]))]
    if isinstance(results[0], tuple):
        return type(results[0])(*(join([each[n] for each in results], layout, name) for n in (0, 1)))
    order = torch.cat([positions_of(layout, rank, len(results)) for rank in range(len(results))]).argsort()
    return torch.cat(results, 2)[:, :, order]


def assert_same(x: Any, y: Any) -> None:
    if isinstance(x, list):
        for pair in zip(x, y, strict=True):
            assert_same(*pair)
    else:
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def check(folder: Path, cases: Sequence[tuple[int, str, Case]], ranks: int) -> None:
    """Compare each case, on its number of ranks and in its layout, with the map of one process."""
    results = on_ranks(ranks, folder, run_cases, cases, timeout=240)
    for number, (n, layout, case) in enumerate(cases):
        amap, v, w_o = whole(case)
        expected = compute(amap, v, w_o)
        expected["tiles"] = [amap[index] for index in TILES]
        expected["gathered"] = expected["entropy"]
        some = amap.only(batch=[0], heads=[1, 2])
        expected["some"] = [some[...], some.under(Causal())[...], some.received()]
        found = [results[rank][number] for rank in range(n)]
        for name in expected:
            got = join([each[name] for each in found], layout, name)
            close(got, expected[name], case, f"{layout} {n} ranks: {name}")


@pytest.mark.full
def test_every_statistic_of_the_table_of_cases(tmp_path: Path) -> None:
    """On 1 to 4 ranks, in four layouts of positions."""
    check(tmp_path, [(1 + n % 4, LAYOUTS[n // 4 % 4], case) for n, case in enumerate(CASES)], 4)


def test_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, [(2, "balanced", CASES[0]), (2, "scattered", CASES[1])], 2)
