"""Every kernel, on every case of the table, within the error budget: output, weights, gradients."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import manyheads as mh
from manyheads import kernels
from manyheads.kernels import chunked
from manyheads.problem import Problem
from tests.cases import CASES, DTYPES, KERNELS, Answer, Case, Inputs, error, make, oracle, over, plain

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def truth(case: Case, fused: bool = False) -> Answer:
    """The oracle's answer."""
    return oracle(make(case), fused)


def answer_for(case: Case, kernel: str) -> Answer:
    """The oracle's answer, with the errors that a kernel may make; "auto" may take PyTorch's."""
    return truth(case, kernel in ("sdpa", "flex", "auto"))


def gradients(inputs: Inputs, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of every leaf, zeros where none came."""
    leaves = inputs.leaves()
    found = torch.autograd.grad(out, list(leaves.values()), inputs.upstream, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def refused(inputs: Inputs, kernel: str) -> bool:
    if kernel == "auto":
        return False
    problem = Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    return bool(kernels.verdicts(problem)[kernel])


def check(case: Case, kernel: str, got: dict[str, torch.Tensor]) -> None:
    answer = answer_for(case, kernel)
    for name, x in got.items():
        wrong = over(x, answer.values[name], answer.errors[name])
        assert not wrong, f"{name}: {wrong}"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest blocks (32 × 32), so that short problems have several."""
    monkeypatch.setattr(chunked, "BLOCK", 1)


@pytest.mark.sampled("kernel")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case: Case, kernel: str) -> None:
    inputs = make(case)
    if refused(inputs, kernel):
        with pytest.raises(ValueError, match=f'kernel="{kernel}"'):
            mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel=kernel)
        return
    out = mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel=kernel)
    assert out.dtype == case.dtype
    check(case, kernel, {"out": out} | gradients(inputs, out))


PLAINER = [c for c in CASES if c.bias != "none" and c.sink == "none" and c.softcap is None]


@pytest.mark.sampled
@pytest.mark.parametrize("case", PLAINER, ids=str)
def test_without_a_bias_gradient(case: Case) -> None:
    """A bias that asks for no gradient: there sdpa computes what it must refuse in training."""
    inputs = make(case)
    assert inputs.bias is not None
    inputs.bias = (inputs.bias[0], inputs.bias[1].detach())
    for kernel in KERNELS:
        if refused(inputs, kernel):
            continue
        out = mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel=kernel)
        leaves = {name: x for name, x in inputs.leaves().items() if x.requires_grad}
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.upstream, allow_unused=True)
        found = {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}
        check(case, kernel, {"out": out} | found)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_map(case: Case) -> None:
    """The map beside the output: its weights within the budget, lse as the definition has it."""
    inputs, answer = make(case), truth(case)  # a map's weights are never PyTorch's
    for kernel in KERNELS:
        if refused(inputs, kernel):
            continue
        out, amap = mh.attention_with_map(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel=kernel)
        alone = mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel=kernel)
        torch.testing.assert_close(out, alone, rtol=0, atol=0)
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        weights = amap.dense()
        assert weights.dtype == amap.lse.dtype == dtype
        assert not weights.requires_grad
        assert not amap.lse.requires_grad
        for name, x in (("weights", weights), ("lse", amap.lse)):
            wrong = over(x, answer.values[name], answer.errors[name])
            assert not wrong, f"{kernel}, {name}: {wrong}"


@pytest.mark.full
def test_the_table_reaches_every_kernel() -> None:
    """No kernel is tested by refusing: each computes at least a part of the table, in every dtype."""
    taken = {kernel: [case for case in CASES if not refused(make(case), kernel)] for kernel in KERNELS}
    for dtype in DTYPES:
        own = sum(case.dtype == dtype for case in CASES)
        for kernel in ("reference", "chunked", "auto"):
            assert sum(case.dtype == dtype for case in taken[kernel]) == own
        assert sum(case.dtype == dtype for case in taken["sdpa"]) >= 12
    assert taken["native"] == [case for case in CASES if 0 not in case.sizes]
    assert sum(case.mask not in ("none", "full") for case in taken["sdpa"]) >= 80


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == torch.float64][:12], ids=str)
def test_the_two_oracles_agree(case: Case) -> None:
    """The written-out gradients and PyTorch's autograd are two derivations of one formula."""
    answer = truth(case)
    for name, x in plain(make(case)).items():
        largest = abs(answer.values[name]).max(initial=1)
        assert error(x, answer.values[name]) <= 1e-10 * largest, name
