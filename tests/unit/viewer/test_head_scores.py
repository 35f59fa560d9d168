"""Head scores of the viewer: exact, or estimated from every n-th query."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manyheads as mh
from manyheads.observe.table import COLUMNS, score_heads
from manyheads.viewer import head_scores
from manyheads.viewer.head_scores import Columns

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = (
    lambda t, s: None,
    lambda t, s: mh.Causal(),
    lambda t, s: mh.Window(left=9, right=4),
    lambda t, s: mh.Causal() & mh.Lengths(s - 5),
    lambda t, s: mh.Documents(torch.arange(s) // 23, queries=torch.arange(t) // 19),
    lambda t, s: mh.Rule(lambda b, h, i, j: (i + 2 * j + h) % 7 != 0),  # a mask for each head
    lambda t, s: mh.Keep(torch.arange(t)[:, None] % 50 < torch.arange(s) % 60 - 3),  # some rows are masked
)


def a_map(t: int, s: int, mask: mh.Mask | None, **parts: Any) -> mh.AttentionMap:
    torch.manual_seed(t)
    q, k = torch.randn(1, 2, t, 8) * 2, torch.randn(1, 2, s, 8)
    return mh.attention_with_map(q, k, k, mask=mask, **parts)[1]


def compute(amap: mh.AttentionMap, ids: torch.Tensor | None) -> tuple[Columns, int]:
    steps = head_scores.head_scores(amap, ids)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Estimate every layer, in steps of a few queries."""
    monkeypatch.setattr(head_scores, "EXACT_WEIGHTS", 0)
    monkeypatch.setattr(head_scores, "STEP_WEIGHTS", 1_000)
    return monkeypatch


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("t", [150, 130])
def test_every_query_gives_the_exact_scores(estimated: pytest.MonkeyPatch, mask: Any, t: int) -> None:
    estimated.setattr(head_scores, "SAMPLES", 150)
    amap, ids = a_map(t, 150, mask(t, 150)), torch.arange(150) % 7
    found, stride = compute(amap, ids)
    assert stride == 1
    assert set(found) == set(COLUMNS)
    for name, wanted in score_heads(amap, ids).items():
        torch.testing.assert_close(found[name], wanted[0], rtol=1e-5, atol=1e-6)


def test_scores_are_means_over_every_nth_query(estimated: pytest.MonkeyPatch) -> None:
    estimated.setattr(head_scores, "SAMPLES", 40)
    amap, ids = a_map(150, 150, mh.Causal()), torch.arange(150) % 7
    found, stride = compute(amap, ids)
    assert stride == 4
    rows, weights = range(2, 150, 4), amap.dense()[0].double()
    for head in range(2):
        previous = [float(weights[head, i, i - 1]) for i in rows]
        follows = [
            float(sum(weights[head, i, j] for j in range(1, i + 1) if ids[j - 1] == ids[i] and j - 1 < i))
            for i in rows
            if i >= 7
        ]
        distance = [float(sum(weights[head, i, j] * (i - j) for j in range(i + 1))) for i in rows]
        for name, values in (("previous_token", previous), ("induction", follows), ("distance", distance)):
            assert float(found[name][head]) == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_small_layers_are_exact_and_scores_of_tokens_need_ids() -> None:
    amap = a_map(60, 60, mh.Causal())
    found, stride = compute(amap, None)
    assert stride == 1
    assert set(COLUMNS) - set(found) == {"duplicate_token", "induction"}
    torch.testing.assert_close(found["entropy"], amap.entropy()[0].mean(-1))
