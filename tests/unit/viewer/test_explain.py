"""The steps from q·k to a weight, a query's row, and the largest weights of a head."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import manyheads as mh
from manyheads import scores
from manyheads.viewer import explain
from manyheads.viewer.api import Api
from manyheads.viewer.explain import explain_weight, profile_row
from manyheads.viewer.largest import LargestWeights
from manyheads.viewer.pyramid import Pyramid
from tests.cases import CASES, SIZES, Case, bias_numbers, make, wide

pytestmark = pytest.mark.usefixtures("one_thread")


# Every mask, bias, softcap and sink of the table occurs in these, in sizes of few pairs.
FEW = [case for case in CASES if case.sizes in SIZES[:7] and case.size == "ordinary"]


@pytest.mark.every(5)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_steps_to_a_weight_equal_an_independent_computation(case: Case) -> None:
    inputs = make(case)
    b, h, g, t, s, *_ = case.sizes
    amap = mh.attention_with_map(inputs.q, inputs.k, inputs.v, **inputs.arguments())[1]
    q, k = wide(inputs.q), wide(inputs.k).repeat(h // g, 1)
    scale, cap, bias = float(inputs.scale), case.softcap, np.broadcast_to(bias_numbers(inputs), (b, h, t, s))
    for n, m, i, j in itertools.islice(itertools.product(range(b), range(h), range(t), range(s)), 0, None, 7):
        steps = explain_weight(amap, n, m, i, j)
        assert json.loads(json.dumps(steps, allow_nan=False)) == steps
        products = q[n, m, i] * k[n, m, j]
        size = 1 + float(abs(products).sum())
        near = {"rtol": 1e-5, "atol": 1e-6 * size}
        np.testing.assert_allclose(steps["products"], products.astype(float), **near)
        np.testing.assert_allclose(steps["dot"], float(products.sum()), **near)
        assert steps["scale"] == pytest.approx(scale)
        score = scale * float(products.sum())
        np.testing.assert_allclose(steps["scaled"], score, **near)
        assert steps["softcap"] == cap
        if cap is None:
            assert steps["capped"] is None
        else:
            score = cap * np.tanh(score / cap)
            np.testing.assert_allclose(steps["capped"], score, **near)
        is_masked = not inputs.keep[n, m, i, j] or bias[n, m, i, j] == -np.inf
        assert steps["is_masked"] == is_masked
        added = float(bias[n, m, i, j])
        if inputs.bias is None:
            assert steps["bias"] is None
        else:
            assert steps["bias"] == (None if np.isinf(added) else pytest.approx(added, rel=1e-5, abs=1e-6))
            score += added
        assert (steps["mask"] is None) == (inputs.mask is None)
        assert steps["weight"] == float(amap[n, m, i, j])
        if is_masked:
            assert steps["score"] is None
            assert steps["weight"] == 0
            continue
        np.testing.assert_allclose(steps["score"], score, **near)
        np.testing.assert_allclose(
            np.exp(steps["score"] - steps["lse"]), steps["weight"], rtol=1e-4, atol=1e-7
        )
        if inputs.sink is None:
            assert steps["sink"] is None
            assert steps["sink_weight"] is None
        else:
            wanted = float(amap.sink_weight()[n, m, i])
            assert steps["sink_weight"] == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert steps["value_norm"] is None
        assert steps["contribution"] is None


def test_the_table_of_cases_covers_every_step() -> None:
    for name in ("mask", "bias", "sink"):
        assert {getattr(case, name) for case in FEW} == {getattr(case, name) for case in CASES}
    assert {case.softcap is None for case in FEW} == {True, False}


def test_the_contribution_is_the_weight_times_the_norm_of_the_value() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 3)
    amap = mh.attention_with_map(q, k, v, mask=mh.Causal())[1]
    assert explain_weight(amap, 1, 3, 4, 2)["value_norm"] is None
    with_norms = replace(amap, value_norm=v.norm(dim=-1))
    steps = explain_weight(with_norms, 1, 3, 4, 2)
    norm = float((v[1, 1, 2].double() ** 2).sum().sqrt())
    assert steps["value_norm"] == pytest.approx(norm)
    assert steps["contribution"] == pytest.approx(float(amap[1, 3, 4, 2]) * norm)
    unknown = replace(amap, value_norm=torch.full((2, 2, 5), math.nan))  # JSON has no NaN
    steps = explain_weight(unknown, 1, 3, 4, 2)
    assert (steps["value_norm"], steps["contribution"]) == (None, None)


@pytest.mark.parametrize("bins", [5, 512])
def test_a_profile_holds_the_largest_weight_of_each_of_its_points(bins: int) -> None:
    sink = torch.tensor([0.3, -0.2])
    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 1, 23, 8)
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal(), sink=sink)[1]
    with patch.object(explain, "BINS", bins):
        profile = profile_row(amap, 0, 1, 2)  # at position 18
    width = profile["width"]
    assert len(profile["weights"]) == -(-23 // width) <= bins
    row = amap[0, 1, 2].tolist()
    for n, weight in enumerate(profile["weights"]):
        keys = [key for key in range(n * width, min(23, (n + 1) * width)) if key <= 18]
        assert weight == (max(row[key] for key in keys) if keys else None)
    wanted = sorted(((weight, key) for key, weight in enumerate(row)), reverse=True)[:12]
    assert profile["top"] == [[key, weight] for weight, key in wanted]
    assert profile["sink_weight"] == pytest.approx(1 - sum(row), abs=1e-6)


MASKS: tuple[Any, ...] = (None, mh.Causal(), mh.Window(left=3, right=0), mh.Lengths(2), mh.Keys([]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(2, 40), st.sampled_from(MASKS), st.booleans(), st.integers(0, 2**31))
def test_the_largest_weights_are_found_in_order(t: int, s: int, mask: Any, equal: bool, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(1, 1, t, 4) * (0 if equal else 3), torch.randn(1, 1, s, 4)
    amap = mh.attention_with_map(q, k, k, mask=mask)[1]
    head = Pyramid(amap)
    assert head.largest(0) is None
    for _ in head.scan():
        pass
    visible = scores.visible(amap.problem, slice(None), slice(None)).expand(1, 1, t, s)[0, 0]
    choice = amap[0, 0][visible.sum(1) > 1]  # of a single visible key, the weight is always 1
    wanted = sorted((x for x in choice.flatten().tolist() if x > 0), reverse=True)
    found = [head.largest(rank) for rank in range(len(wanted) + 1)]
    assert found.pop() is None
    weights = [weight for weight in found if weight is not None]
    np.testing.assert_allclose([x.weight for x in weights], wanted, rtol=2e-6)
    assert len({(x.query, x.key) for x in weights}) == len(wanted)
    for query, key, weight in weights:
        assert weight == float(amap[0, 0, query, key])


def test_finding_the_largest_weights_reads_few_rows() -> None:
    amap = mh.attention_with_map(*[torch.randn(1, 1, 500, 8) * 3] * 3, mask=mh.Causal())[1]
    search = LargestWeights(amap, amap.row_max()[0, 0])
    for rank in range(10):
        search.find(rank)
    assert len(search._sorted) <= 20


def test_profiles_explanations_and_largest_weights_over_the_api() -> None:
    q, k = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal())[1]
    api = Api(amap)

    def fetch(address: str) -> Any:
        return json.loads(api.request(address).result())

    assert fetch("profile/0/0/1/7/1") == profile_row(amap, 1, 1, 7)
    assert fetch("explain/0/0/1/7/3/1") == explain_weight(amap, 1, 1, 7, 3)
    nothing = {"query": None, "key": None, "weight": None, "complete": False}
    assert fetch("largest/0/0/1/0/1") == nothing
    while not fetch("scan/0/0/1/1")["complete"]:
        pass
    found = fetch("largest/0/0/1/1/1")
    assert found["weight"] == float(amap[1, 1, 1:].flatten().topk(2).values[1])  # query 0 sees one key
    assert float(amap[1, 1, found["query"], found["key"]]) == found["weight"]
    for address in ("explain/0/0/1/9/3/1", "explain/0/0/2/3/3/1", "profile/0/0/0/9/0", "largest/0/0/0/x/0"):
        with pytest.raises(LookupError):
            api.request(address).result()
    api.close()
