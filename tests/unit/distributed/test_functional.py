"""Attention over several processes equals attention on one, within the error budget; and its errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import manyheads as mh
from manyheads import distributed
from manyheads.biases import BiasAtPositions
from manyheads.distributed.positions import cut_into_parts
from manyheads.distributed.route import Route
from tests.cases import Answer, Case, make, oracle, over
from tests.ranks import on_ranks
from tests.sharded import (
    CASES,
    ROUTES,
    TOKENS,
    attend_with_map,
    layout_of,
    measure_routes,
    positions_of,
    run_cases,
    try_faults,
    try_second_gradient,
)


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
    check(ranks, tmp_path, CASES[ranks - 2 :: 9])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_ulysses(ranks: int, tmp_path: Path) -> None:
    check(ranks, tmp_path, [case for case in CASES if fits(case, ranks)][ranks::4], "ulysses")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kernel", ["auto", "chunked"])
def test_every_case(ranks: int, kernel: str, tmp_path: Path) -> None:
    check(ranks, tmp_path, CASES, kernel=kernel)


FAULTS = {  # the text of the error on every rank, or that on the rank at fault and that on others
    "a length that doesn't divide": r"same number of tokens on every rank, got 6, 5, 6\. Pad .* to 18 tokens",
    "another batch": r"same shape of q on every rank, got \[1, 4, 8\] on rank 0 and \[2, 4, 8\] on rank 1",
    "another dtype": "same dtype on every rank, got torch.float32 on rank 0 and torch.float64 on rank 1",
    "another mask": r"same mask on every rank, got Causal\(\) on rank 0 and Window\(left=2, right=0\) on",
    "another mask of the same form": "same mask on every rank, got one on rank 0 and another one",
    "another function": "same mask on every rank",
    "a function that raises": ("a failure in a rule", "on rank 1 RuntimeError: a failure in a rule"),
    "a function that raises in Ulysses": (
        "a failure in a rule",
        "on rank 1 RuntimeError: a failure in a rule",
    ),
    "another scale": "same scale on every rank, got 1.0 on rank 0 and 2.0 on rank 1",
    "another sink": "same sink on every rank",
    "another bias": "same bias on every rank",
    "another method": "same method on every rank, got ring on rank 0 and ulysses on rank 1",
    "a gradient on one rank": "same requires_grad of q, k, v, sink and bias on every rank",
    "positions twice": r"position 0 twice \(on ranks 0 and 1\) and position 6 on no rank",
    "positions outside": "positions 0 to 17 of 18 tokens, got position 18 on rank 2",
    "a position for each token": (
        "each of this rank's 6 tokens, got positions",
        "on rank 1 ValueError: ",
    ),
    "positions of floats": (
        "positions to be a tensor of integers",
        "on rank 1 TypeError: ",
    ),
    "an error on one rank": (
        "Expected softcap to be a positive number",
        "on rank 1 ValueError: ",
    ),
    "an error on all ranks": "Expected mask to be a Mask or None, got a str",
    "a mask of another size": r"tensor of Keep to be \[t, s\] = \[18, 18\], got \[6, 6\]",
    "ids of one rank": r"ids of Documents for at least s = 18 keys, got \[6\]. Pass the ids of the whole",
    "three dimensions": r"Expected q to be \[b, h, t, d\], four dimensions, got \[4, 6, 8\]",
    "heads that don't divide": "3 ranks divide",
    "an unknown method": "method to be one of ring, ulysses, got 'star'",
    "a kernel without a log-sum-exp": "auto, native or chunked for method=\"ring\", got 'sdpa'",
    "a mask of a cache": "Expected a mask of the whole sequence",
    "a kernel that doesn't support it": 'kernel="native" doesn\'t support this: it supports d and w',
}


@pytest.mark.full
def test_a_fault_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    """And no rank hangs: the calls after it work."""
    results = on_ranks(3, tmp_path, try_faults, timeout=30)
    for name, text in FAULTS.items():
        mine, others = text if isinstance(text, tuple) else (text, text)
        for rank, result in enumerate(results):
            if name == "heads that don't divide":  # 3 ranks divide 3 heads
                assert name not in result
                continue
            assert name in result, f"{name}: no error on rank {rank}"
            assert re.search(mine if rank == 1 else others, result[name]), (
                f"{name}, rank {rank}: {result[name]}"
            )
            assert "\n" not in result[name]


@pytest.mark.full
def test_second_gradients_raise(tmp_path: Path) -> None:
    assert all("create_graph=True" in error for error in on_ranks(2, tmp_path, try_second_gradient))


@pytest.mark.full
def test_the_ring_sends_what_the_route_says(tmp_path: Path) -> None:
    """Bytes and messages are those of the route, the fewest possible if each rank ahead needs the keys."""
    results = on_ranks(4, tmp_path, measure_routes)
    for name, (mask, layout, is_minimal) in ROUTES.items():
        parts = [cut_into_parts(positions_of(layout, rank, 4).sort().values) for rank in range(4)]
        route = Route(parts, mask, TOKENS)
        size = 2 * 2 * 16 * 4  # bytes of a token's keys and values
        # A rank holds the keys of the present step and of the next; for a gradient, also sums: its own, those
        # of the step, of the step before, and those that arrive.
        assert all(result[name]["held"] <= 2 * TOKENS // 4 for result in results), name
        assert all(result[name]["held with gradient"] <= 6 * TOKENS // 4 for result in results), name
        keys, back = route.keys_sent(), route.gradients_sent()
        for what, tokens, messages in (
            ("forward", keys.tokens, keys.messages),
            ("backward", keys.tokens + back.tokens, keys.messages + back.messages),
        ):
            sent = [result[name][what] for result in results]
            assert sum(each["bytes"] for each in sent) == pytest.approx(4 * tokens * size), name
            assert sum(each["messages"] for each in sent) == pytest.approx(4 * messages), name
            least = route.minimum() * size * (1 + (what == "backward"))
            assert all(each["minimum"] == pytest.approx(least) for each in sent), name
            assert (sum(each["bytes"] for each in sent) == pytest.approx(4 * least)) == is_minimal, name


@pytest.mark.full
def test_the_map_comes_with_the_output(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, TOKENS, 8, generator=generator) for _ in range(3))
    out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal(), sink=torch.ones(4))
    results = on_ranks(2, tmp_path, attend_with_map)
    for rank, result in enumerate(results):
        positions = positions_of("balanced", rank, 2)
        for found in result.values():
            torch.testing.assert_close(found["out"], out[:, :, positions])
            torch.testing.assert_close(found["entropy"], amap.entropy()[:, :, positions])
            torch.testing.assert_close(found["received"], amap.received())


# -- without other processes -------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_one_rank_gives_the_bits_of_one_process(alone: DeviceMesh) -> None:
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    for mask in (None, mh.Causal(), mh.Causal() & mh.Documents(torch.arange(50) // 7)):
        outs = [attend(mask) for attend in (
            lambda mask: mh.attention(q, k, v, mask=mask, kernel="native"),
            lambda mask: distributed.attention(q, k, v, mesh=alone, mask=mask),
            lambda mask: distributed.attention(
                q, k, v, mesh=alone, mask=mask, method="ulysses", kernel="native"
            ),
        )]  # fmt: skip
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
        for out, grad in zip(outs[1:], grads[1:], strict=True):
            assert torch.equal(out, outs[0])
            assert all(torch.equal(x, y) for x, y in zip(grad, grads[0], strict=True))


def test_every_case_on_one_rank(alone: DeviceMesh) -> None:
    cases = CASES[::8]
    results = run_cases(alone, cases, "ring", "auto")
    for case, result in zip(cases, results, strict=True):
        compare(case, [result])


def test_gradcheck(alone: DeviceMesh) -> None:
    q, k, v = (torch.randn(1, 2, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sink: Tensor) -> Tensor:
        return distributed.attention(
            q, k, v, mesh=alone, mask=mh.Causal(), bias=mh.Relative(table), sink=sink, softcap=2.0,
            positions=torch.tensor([4, 1, 0, 3, 5, 2]),
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, (q, k, v, table, sink))


def test_empty_and_unusual_calls(alone: DeviceMesh) -> None:
    empty = torch.zeros(1, 2, 0, 4)
    assert distributed.attention(empty, empty, empty, mesh=alone).shape == (1, 2, 0, 4)
    x = torch.ones(1, 2, 4, 4)
    with pytest.raises(TypeError, match="Expected mesh to be a DeviceMesh, got a str"):
        distributed.attention(x, x, x, mesh="cpu")  # type: ignore[arg-type]
    plane = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "sequence"))
    with pytest.raises(ValueError, match="Expected a mesh of one dimension"):
        distributed.attention(x, x, x, mesh=plane)
    assert distributed.attention(x, x, x, mesh=plane["sequence"]).shape == x.shape
    with pytest.raises(ValueError, match="as many queries as keys"):
        distributed.attention(x, x[:, :, :2], x[:, :, :2], mesh=alone)
    with pytest.raises(ValueError, match=r"outside of torch\.func"):
        torch.func.grad(lambda x: distributed.attention(x, x, x, mesh=alone).sum())(x)
    with pytest.raises(ValueError, match="got position 0 twice"):
        distributed.attention(x, x, x, mesh=alone, positions=torch.tensor([0, 0, 1, 2]))
    placed = BiasAtPositions(mh.ALiBi(2), torch.arange(4)[None, None], 4)
    with pytest.raises(TypeError, match="Expected bias to be ALiBi"):
        distributed.attention(x, x, x, mesh=alone, bias=placed)


@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Rule(lambda b, h, i, j: j != 1)])
def test_masked_nan_has_no_effect(alone: DeviceMesh, mask: mh.Mask | None) -> None:
    """As on one process: also in gradients, and a visible NaN gives NaN."""
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    k[:, :, 1], v[:, :, 1] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = [mh.attention(*leaves, mask=mask), distributed.attention(*leaves, mesh=alone, mask=mask)]
    torch.testing.assert_close(outs[1], outs[0], equal_nan=True)
    for x, y in zip(*(torch.autograd.grad(out.nansum(), leaves) for out in outs), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


def test_autocast_is_applied(alone: DeviceMesh) -> None:
    x = torch.randn(1, 2, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distributed.attention(x, x, x, mesh=alone).dtype == torch.bfloat16
