"""Every kernel, on every case of the table, within the error budget: output, weights, gradients."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import manyheads as mh
from manyheads import kernels
from manyheads.kernels import sdpa
from manyheads.problem import Problem
from tests.cases import CASES, DTYPES, KERNELS, Answer, Case, Inputs, gradients, make, oracle, over, plain

pytestmark = pytest.mark.usefixtures("one_thread", "small_blocks")


@cache
def truth(case: Case, fused: bool = False) -> Answer:
    """The oracle's answer."""
    return oracle(make(case), fused)


def answer_for(case: Case, kernel: str) -> Answer:
    """The oracle's answer, with the errors that a kernel may make; "auto" may take PyTorch's."""
    return truth(case, kernel in ("sdpa", "flex", "auto"))


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
    check(case, kernel, {"out": out} | gradients(out, inputs.leaves(), inputs.upstream))


PLAINER = [c for c in CASES if c.bias != "none" and c.sink == "none" and c.softcap is None]


@pytest.mark.sampled
@pytest.mark.parametrize("case", PLAINER, ids=str)
def test_without_a_bias_gradient(case: Case) -> None:
    """A bias that requires no gradient: sdpa supports it then."""
    inputs = make(case)
    assert inputs.bias is not None
    inputs.bias = (inputs.bias[0], inputs.bias[1].detach())
    for kernel in KERNELS:
        if refused(inputs, kernel):
            continue
        out = mh.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments(), kernel=kernel)
        check(case, kernel, {"out": out} | gradients(out, inputs.leaves(), inputs.upstream))


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
        true = answer.values[name]
        assert not over(x, true, np.full_like(true, 1e-10 * abs(true).max(initial=1))), name


def test_sdpa_has_limits_on_cuda() -> None:
    """Of tensors without numbers, because there may be no GPU."""
    with FakeTensorMode():
        for d, dtype, grad, refused in [
            (12, torch.float16, True, "head size 12 is not a multiple of 8"),
            (12, torch.float16, False, None),
            (12, torch.float32, True, None),
            (16, torch.bfloat16, True, None),
            (264, torch.bfloat16, False, "head size 264 is above 256"),
            (16, torch.float64, False, "float64"),
        ]:
            q = torch.empty(2, 4, 6, d, dtype=dtype, device="cuda", requires_grad=grad)
            reasons = sdpa.why_unsupported(Problem.of(q, q, q))
            assert len(reasons) == (refused is not None)
            assert refused is None or refused in reasons[0]
