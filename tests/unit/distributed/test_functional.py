"""Attention over several processes equals attention on one, within the error budget; and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import Answer, Case, make, oracle, over
from tests.ranks import on_ranks
from tests.sharded import CASES, layout_of, positions_of, run_cases


@cache
def truth(case: Case) -> Answer:
    return oracle(make(case), partial=True)


def compare(case: Case, results: list[dict[str, Tensor]]) -> None:
    """Compare the results of all ranks with the oracle."""
    layout, answer = layout_of(case), truth(case)
    order = torch.cat([positions_of(layout, rank, len(results)) for rank in range(len(results))]).argsort()
    for name in results[0]:
        if name in ("sink", "bias"):
            found = [result[name] for result in results]
            assert all(torch.equal(x, found[0]) for x in found), f"{case} {name}: it differs between ranks"
            got = found[0]
        else:
            got = torch.cat([result[name] for result in results], 2)[:, :, order]
        wrong = over(got, answer.values[name], answer.errors[name])
        assert not wrong, f"{case} {layout} {name}: {wrong}"


def check(
    ranks: int, folder: Path, cases: Sequence[Case], method: str = "ring", kernel: str = "auto"
) -> None:
    results = on_ranks(ranks, folder, run_cases, cases, method, kernel)
    for n, case in enumerate(cases):
        compare(case, [result[n] for result in results])


def fits(case: Case, ranks: int) -> bool:
    """Can the ranks share the heads?"""
    return case.sizes[1] % ranks == 0 and case.sizes[2] % ranks == 0


def test_two_ranks(tmp_path: Path) -> None:
    check(2, tmp_path, CASES[::20])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring(ranks: int, tmp_path: Path) -> None:
    check(ranks, tmp_path, CASES[ranks - 2 :: 3])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_ulysses(ranks: int, tmp_path: Path) -> None:
    check(ranks, tmp_path, [case for case in CASES if fits(case, ranks)][ranks::4], "ulysses")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kernel", ["auto", "chunked"])
def test_every_case(ranks: int, kernel: str, tmp_path: Path) -> None:
    check(ranks, tmp_path, CASES, kernel=kernel)
