"""Parts of a sequence: masks and biases between two of them, their routes, costs, and merged outputs."""

from __future__ import annotations

import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import manyheads as mh
from manyheads import scores
from manyheads.distributed import cost
from manyheads.distributed.blocks import block, whole_problem
from manyheads.distributed.positions import Part, check_partition, check_positions, cut_into_parts
from manyheads.distributed.route import Route
from manyheads.kernels import partial
from manyheads.problem import Problem
from tests.cases import build, specs

S = 12


def part_of(positions: list[int] | range) -> Part:
    """A part; a range, or a list of positions."""
    return Part(0, positions if isinstance(positions, range) else torch.tensor(positions))


def drawn_parts() -> st.SearchStrategy[Part]:
    """Draw runs, progressions and scattered positions of S tokens."""
    runs = st.tuples(st.integers(0, S - 1), st.integers(1, S), st.integers(1, 4)).map(
        lambda x: range(x[0], min(x[0] + x[1] * x[2], S), x[2])
    )
    scattered = st.sets(st.integers(0, S - 1), min_size=1).map(sorted)
    return st.one_of(runs, scattered).map(part_of)


@given(specs(2, 2, S, S), drawn_parts(), drawn_parts())
def test_a_mask_between_two_parts_is_the_mask_at_their_positions(spec: Any, rows: Part, cols: Part) -> None:
    x = torch.zeros(2, 2, S, 4)
    whole = whole_problem(1, x, x, x, mask=build(spec))
    table = scores.visible(Problem.of(x, x, x, mask=build(spec), offset=0)).expand(2, 2, S, S)
    expected = table[:, :, rows.tensor()][..., cols.tensor()]
    q, k = x[:, :, : len(rows)], x[:, :, : len(cols)]
    problem = block(whole, q, k, k, rows, cols)
    assert torch.equal(scores.visible(problem).expand(expected.shape), expected)
    first, stop = problem.span(0, len(rows))[0]
    assert not expected[..., :first].any()
    assert not expected[..., stop:].any()
    first, stop = problem.span(0, len(rows))[1]
    assert expected[..., first:stop].all()
    if not expected.any():
        return
    seen = Route([[rows], [cols]], whole.mask, S).needed[0, 1]
    assert seen, "the keys that are seen aren't sent"


@given(st.sampled_from(["alibi", "relative", "dense", "dense keys"]), drawn_parts(), drawn_parts())
def test_a_bias_between_two_parts_is_the_bias_at_their_positions(kind: str, rows: Part, cols: Part) -> None:
    bias = {
        "alibi": mh.ALiBi(2),
        "relative": mh.Relative(torch.randn(2, 7)),
        "dense": mh.Dense(torch.randn(1, 2, S, S)),
        "dense keys": mh.Dense(torch.randn(2, 1, 1, S)),
    }[kind]
    x = torch.zeros(2, 2, S, 4)
    whole = whole_problem(1, x, x, x, bias=bias)
    problem = Problem.of(x, x, x, bias=bias, offset=0)
    table = scores.tile(problem)[:, :, rows.tensor()][..., cols.tensor()]
    q, k = x[:, :, : len(rows)], x[:, :, : len(cols)]
    assert torch.equal(scores.tile(block(whole, q, k, k, rows, cols)), table)


@given(st.sets(st.integers(0, 60)).map(sorted))
def test_parts_have_all_positions_in_order(positions: list[int]) -> None:
    parts = cut_into_parts(torch.tensor(positions, dtype=torch.int64))
    assert [int(n) for part in parts for n in part.tensor()] == positions
    assert [part.start for part in parts] == [0, *np.cumsum([len(part) for part in parts])[:-1]][: len(parts)]


def test_runs_and_progressions_are_one_part() -> None:
    assert [part.positions for part in cut_into_parts(torch.arange(5, 9))] == [range(5, 9)]
    assert [part.positions for part in cut_into_parts(torch.arange(1, 20, 4))] == [range(1, 18, 4)]
    chunks = cut_into_parts(torch.tensor([0, 1, 2, 9, 10, 11]))
    assert [part.positions for part in chunks] == [range(3), range(9, 12)]
    many = cut_into_parts(torch.arange(100).square())
    assert len(many) == 1
    assert isinstance(many[0].positions, torch.Tensor)


def test_positions_are_a_partition() -> None:
    check_partition([[part_of(range(4, 8))], [part_of(range(4))]])
    check_partition([[part_of(range(0, 8, 2))], [part_of(range(1, 8, 2))]])
    check_partition([[], []])
    with pytest.raises(
        ValueError, match=re.escape("position 2 twice (on ranks 0 and 1) and position 4 on no")
    ):
        check_partition([[part_of(range(3))], [part_of([2, 3])]])
    with pytest.raises(ValueError, match="got position -1 on rank 1"):
        check_partition([[part_of(range(3))], [part_of([-1, 3])]])
    with pytest.raises(TypeError, match="tensor of integers"):
        check_positions([0, 1], 2, 0)
    with pytest.raises(ValueError, match=r"each of this rank's 2 tokens, got positions \[3\]"):
        check_positions(torch.arange(3), 2, 0)


@given(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=S, max_size=S), specs(1, 1, S, S))
def test_keys_travel_to_each_rank_that_needs_them(owners: list[int], spec: Any) -> None:
    """Following the route, each rank gets the keys that its queries see, and both directions are possible."""
    parts = [cut_into_parts(torch.tensor([n for n in range(S) if owners[n] == rank])) for rank in range(4)]
    route = Route(parts, build(spec).bind(0, S), S)
    has = [{(rank, n) for n in range(len(parts[rank]))} for rank in range(4)]
    sent = 0
    present = has
    for step in range(1, 4):
        arriving: list[set[tuple[int, int]]] = []
        for rank in range(4):
            owner, before = route.owner(rank, step), route.next(rank, -1)
            keys = {(owner, n) for n in route.travellers(owner, step)}
            assert keys <= present[before], "a rank sends keys that it doesn't have"
            arriving.append(keys)
            sent += route.travelling_tokens(owner, step)
            if keys:
                assert step <= route.last_step(rank)
        present = arriving
        has = [old | new for old, new in zip(has, arriving, strict=True)]
    number = 0
    for owner in range(4):
        for n in range(len(parts[owner])):
            for rank in range(4):
                assert not route.needed[rank, number] or (owner, n) in has[rank]
            number += 1
    assert route.keys_sent().tokens == sent / 4
    assert route.minimum() <= route.keys_sent().tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -torch.inf])])
def test_merged_blocks_are_the_whole(dtype: torch.dtype, sink: torch.Tensor | None) -> None:
    q, k, v = (torch.randn(2, 2, 9, 4, dtype=dtype) * 3 for _ in range(3))
    mask = mh.Window(left=2, right=1)
    merged = partial.Merged(q, 4, dtype, sink)
    whole = whole_problem(1, q, k, v, mask=mask)
    for cols in (range(4), range(4, 5), range(5, 9)):
        at = slice(cols.start, cols.stop)
        problem = block(whole, q, k[:, :, at], v[:, :, at], part_of(range(9)), part_of(cols))
        merged.add(slice(0, 9), *partial.forward(problem, "chunked"))
    out, lse = merged.finish(dtype)
    expected, amap = mh.attention_with_map(q, k, v, mask=mask, sink=sink, kernel="chunked")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, amap.lse)


def test_a_kernel_given_by_name_is_used_or_raises() -> None:
    x = torch.zeros(1, 2, 4, 300)
    problem = Problem.of(x, x, x)
    assert partial.choose(problem) == "chunked"
    assert partial.choose(Problem.of(*[x[..., :8]] * 3), finite=False) == "chunked"
    with pytest.raises(
        ValueError, match='kernel="native" doesn\'t support this: it supports d and w up to 256'
    ):
        partial.choose(problem, "native")
    relative = Problem.of(*[x[..., :8]] * 3, bias=mh.Relative(torch.zeros(2, 3)))
    assert partial.choose(relative, bias_gradient=True) == "chunked"
    with pytest.raises(ValueError, match="no gradient of this bias"):
        partial.choose(relative, "native", bias_gradient=True)


# -- the cost model ----------------------------------------------------------------------------------


def test_the_costs_of_the_ring_are_those_on_paper() -> None:
    n, ranks = 1024, 8
    keys = n // ranks * 8 * 128 * 4  # bytes of a rank's keys and values
    full = cost(n, ranks)
    assert (full.bytes, full.minimum, full.messages) == (7 * keys, 7 * keys, 7)
    assert full.flops == 8 * (n // ranks) * n * 4 * 64
    causal = cost(n, ranks, mask=mh.Causal())
    assert causal.bytes == causal.minimum == 3.5 * keys
    balanced = cost(n, ranks, mask=mh.Causal(), layout="balanced")
    assert balanced.bytes == balanced.minimum == 0.75 * 7 * keys
    assert causal.flops / balanced.flops == pytest.approx(
        (2 - 1 / ranks), rel=0.01
    )  # the last rank has the most
    window = cost(n, ranks, mask=mh.Window(left=100, right=0))
    assert window.bytes == window.minimum == 7 / 8 * keys
    assert window.steps == 1
    learning = cost(n, ranks, gradient=True)
    assert learning.bytes == 3 * full.bytes  # keys twice, and their gradients
    assert cost(n, ranks, gradient=True, dtype=torch.bfloat16).bytes == 7 * keys * (2 + 2 + 4) / 4


def test_the_costs_of_heads_are_those_on_paper() -> None:
    found = cost(1024, 4, method="ulysses", key_heads=4, mask=mh.Causal())
    numbers = 256 * (8 * 64 + 4 * 128 + 8 * 64)
    assert found.bytes == found.minimum == numbers * 4 * 3 / 4
    assert found.messages == 12


def test_seconds_add_up_what_does_not_overlap() -> None:
    ring, heads = cost(1024, 4), cost(1024, 4, method="ulysses")
    assert ring.seconds(1e9, 1e15) == pytest.approx(ring.flops / 1e9)
    assert ring.seconds(1e18, 1e6) == pytest.approx(ring.bytes / 1e6, rel=1e-3)
    assert heads.seconds(1e9, 1e6) == pytest.approx(heads.flops / 1e9 + heads.bytes / 1e6)
    assert heads.seconds(1e18, 1e18, latency=1.0) == pytest.approx(heads.messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 3}, "multiple of 3, got 1000"),
        ({"ranks": 8, "layout": "balanced"}, "multiple of 16, got 1000"),
        ({"layout": "star"}, "one of contiguous, balanced, got 'star'"),
        ({"method": "star"}, "ring or ulysses, got 'star'"),
        ({"method": "ulysses", "heads": 3}, "got h = 3 and g = 3"),
        ({"mask": mh.Prefix(3)}, "a mask that is a band"),
        ({"ranks": 0}, "ranks to be at least 1"),
    ],
)
def test_wrong_costs_raise(arguments: dict[str, Any], message: str) -> None:
    given = {"ranks": 2} | arguments
    with pytest.raises(ValueError, match=message):
        cost(1000, given.pop("ranks"), **given)
