"""Parts of a problem: the scores of a cut are the scores of that tile of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import manyheads as mh
from manyheads import scores
from manyheads.masks import Mask
from manyheads.problem import Problem

B, T, S = 2, 7, 9

MASKS: dict[str, Mask | None] = {
    "none": None,
    "full": mh.Full(),
    "causal": mh.Causal(),
    "window": mh.Window(left=2, right=1),
    "diagonal ahead": mh.Diagonal(2),
    "lengths": mh.Lengths(5),
    "lengths of each sequence": mh.Lengths(torch.tensor([9, 3])),
    "padding on the left": mh.Lengths(torch.tensor([0, 6]), left=True),
    "documents": mh.Documents(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])),
    "documents of two texts": mh.Documents(
        torch.randint(3, (B, S), generator=torch.Generator().manual_seed(0)),
        queries=torch.randint(3, (B, T), generator=torch.Generator().manual_seed(1)),
    ),
    "several": mh.Causal() & mh.Lengths(8) & mh.Documents(torch.arange(S) // 4),
}
BIASES = {"none": None, "alibi": mh.ALiBi(4)}


def runs(size: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
        lambda ends: range(ends[0], min(sum(ends), size))
    )


def made(mask: Mask | None, bias: str = "none", offset: int | torch.Tensor = 2) -> Problem:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, 4, T, 8), torch.randn(B, 2, S, 8), torch.randn(B, 2, S, 8)
    return Problem.of(
        q, k, v, mask=mask, bias=BIASES[bias], softcap=3.0, sink=torch.ones(4), offset=offset, scale=0.3
    )


@given(
    mask=st.sampled_from(sorted(MASKS)),
    bias=st.sampled_from(sorted(BIASES)),
    offset=st.one_of(st.integers(-3, 6), st.just([1, -2])),
    rows=runs(T),
    cols=runs(S),
)
def test_the_scores_of_a_cut(mask: str, bias: str, offset: int | list[int], rows: range, cols: range) -> None:
    place = torch.tensor(offset) if isinstance(offset, list) else offset
    problem = made(MASKS[mask], bias, place)
    part = problem.cut(rows, cols)
    assert part is not None
    down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
    torch.testing.assert_close(scores.tile(part), scores.tile(problem, down, across))
    assert torch.equal(
        scores.visible(part).expand(scores.tile(part).shape), ~torch.isneginf(scores.tile(part))
    )


@pytest.mark.parametrize(
    "mask",
    [
        mh.Keep(torch.ones(T, S, dtype=torch.bool)),
        mh.Rule(lambda b, h, i, j: i >= j),
        mh.Causal() | mh.Prefix(2),
        mh.Causal() & mh.SameToken(torch.arange(S) % 2),
    ],
    ids=str,
)
def test_masks_without_a_cut(mask: Mask) -> None:
    assert made(mask).cut(range(2), range(3)) is None


def test_a_bias_without_a_cut() -> None:
    problem = made(None)
    dense = Problem.of(problem.q, problem.k, problem.v, bias=mh.Dense(torch.zeros(T, S)))
    assert dense.cut(range(2), range(3)) is None
