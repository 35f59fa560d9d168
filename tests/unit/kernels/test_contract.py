"""The contract on every kernel, forward and backward, beyond the table of cases (test_kernels.py)."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import manyheads as mh
from manyheads import kernels
from manyheads.kernels import chunked, reference
from manyheads.problem import Problem
from tests.cases import CASES, KERNELS, Case, make

pytestmark = pytest.mark.usefixtures("one_thread", "small_blocks")

OWN = tuple(kernel for kernel in KERNELS if kernel != "sdpa")  # masked keys have no effect in these
DROPPING = ("reference", "chunked", "auto")  # these support dropout


def heads(b: int = 2, h: int = 4, g: int = 2, t: int = 5, s: int = 7, d: int = 8, w: int = 8) -> list[Tensor]:
    """Return q, k and v in float64, which require gradients."""
    shapes = ((b, h, t, d), (b, g, s, d), (b, g, s, w))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_row(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, softcap: float | None = None, sink: Tensor | None = None
) -> Tensor:
    """Attention of each query to its visible keys alone, gathered one query at a time."""
    (b, h, t, d), g = q.shape, k.shape[1]
    outs = []
    for n, m, row in product(range(b), range(h), range(t)):
        visible = keep.expand(b, h, t, k.shape[2])[n, m, row].nonzero().flatten()
        if not len(visible):
            outs.append(v.new_zeros(v.shape[-1]))
            continue
        kv = m // (h // g)
        score = k[n, kv, visible] @ q[n, m, row] / math.sqrt(d)
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        weight = (score if sink is None else torch.cat((score, sink[m : m + 1]))).softmax(-1)
        outs.append((weight[: len(visible), None] * v[n, kv, visible]).sum(0))
    return torch.stack(outs).reshape(b, h, t, v.shape[-1])


def grads(out: Tensor, leaves: list[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    if not out.requires_grad:  # no query sees a key
        return [torch.zeros_like(x) for x in leaves]
    upstream = torch.ones_like(out) if upstream is None else upstream
    found = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True)]


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_are_integers_of_any_width(kernel: str, dtype: torch.dtype) -> None:
    """And no narrow one wraps around: 120 + 8 and 250 + 8 are positions like others."""
    first = 120 if dtype == torch.int8 else 250
    q, k, v = heads(t=9, s=first + 9)
    for mask in (mh.Causal(), mh.Window(left=3), mh.Lengths(torch.tensor([first, 9]))):
        out = mh.attention(q, k, v, mask=mask, offset=torch.tensor([first, 0], dtype=dtype), kernel=kernel)
        wide = mh.attention(q, k, v, mask=mask, offset=torch.tensor([first, 0]), kernel="reference")
        close(out, wide)


@pytest.mark.parametrize("kind", [np.int64, np.int16, np.uint8])
def test_an_offset_may_be_a_numpy_integer(kind: type) -> None:
    q, k, v = heads(t=3, s=9)
    close(
        mh.attention(q, k, v, mask=mh.Causal(), offset=kind(4)),
        mh.attention(q, k, v, mask=mh.Causal(), offset=4),
    )


@pytest.mark.parametrize("offset", [2**58, -(2**58), 2**40, -(2**40)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_far_offsets_are_positions_like_others(kernel: str, offset: int) -> None:
    """As with Python's integers, which don't overflow."""
    q, k, v = heads(t=3, s=5)
    sides = (None, 0, abs(offset) - 2, abs(offset) + 1, 2**59, 2**63 - 1)
    for left, right in product(sides, sides):
        rows = [
            [
                (left is None or j >= offset + t - left) and (right is None or j <= offset + t + right)
                for j in range(5)
            ]
            for t in range(3)
        ]
        expected = mh.attention(q, k, v, mask=mh.Keep(torch.tensor(rows)), kernel="reference")
        mask = mh.Window(left=left, right=right)
        close(mh.attention(q, k, v, mask=mask, offset=offset, kernel=kernel), expected)


@pytest.mark.parametrize("least", [-(2**63), -(2**63) + 1, 0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_documents_of_any_id(kernel: str, least: int) -> None:
    """A query outside the ids has no id, not even the smallest number there is."""
    q, k, v = heads(t=7, s=5)
    ids = torch.tensor([least, least + 1, least, 2**63 - 1, least + 1])
    keep = torch.zeros(7, 5, dtype=torch.bool)
    keep[:5] = ids[:, None] == ids
    expected = mh.attention(q, k, v, mask=mh.Keep(keep), kernel="reference")
    close(mh.attention(q, k, v, mask=mh.Documents(ids), offset=0, kernel=kernel), expected)
    close(mh.attention(q, k, v, mask=mh.Documents(ids.expand(2, 5)), offset=0, kernel=kernel), expected)
    queries = torch.cat((ids, ids[:2]))
    keep[5:] = ids[:2, None] == ids
    expected = mh.attention(q, k, v, mask=mh.Keep(keep), kernel="reference")
    close(mh.attention(q, k, v, mask=mh.Documents(ids, queries=queries), kernel=kernel), expected)


def test_the_log_sum_exp_of_a_kernel_has_its_gradient() -> None:
    """Beside the output's, from kernels that give it (a map then detaches it)."""
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [*heads(), sink]
    found = []
    problem = Problem.of(*leaves[:3], sink=sink, mask=mh.Causal(), softcap=2.0)
    for out, lse in ((reference.run(problem)[0], reference.weights(problem)[1]), chunked.run(problem)):
        found.append(torch.autograd.grad(lse.sin().sum() + out.cos().sum(), leaves))
    for x, y in zip(*found, strict=True):
        close(x, y)


@st.composite
def poisoned(draw: st.DrawFn) -> dict[str, Any]:
    """A small problem with NaN and Inf anywhere in q, k and v, and a mask."""
    b, g, times = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    t, s, d = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.sampled_from([2, 3]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensors = {}
    for name, shape in (("q", (b, g * times, t, d)), ("k", (b, g, s, d)), ("v", (b, g, s, d))):
        x = torch.randn(shape, generator=gen, dtype=torch.float64)
        for _ in range(draw(st.integers(0, 2))):
            place = tuple(draw(st.integers(0, n - 1)) for n in shape)
            x[place] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        tensors[name] = x.requires_grad_()
    if draw(st.booleans()):
        mask: Any = mh.Causal()
        offset = draw(st.integers(-2, 3))
        keep = torch.arange(s) <= torch.arange(t)[:, None] + offset
    else:
        shape = draw(st.sampled_from([(b, g * times, t, s), (b, 1, 1, s), (1, 1, t, s)]))
        keep = torch.rand(shape, generator=gen) < draw(st.sampled_from([0.2, 0.6]))
        mask, offset = mh.Keep(keep), 0
    rest: dict[str, Any] = {"softcap": draw(st.sampled_from([None, None, 2.0]))}
    sink = torch.randn(g * times, generator=gen, dtype=torch.float64).requires_grad_()
    rest["sink"] = draw(st.sampled_from([None, None, sink]))
    return {"tensors": tensors, "mask": mask, "offset": offset, "keep": keep, "rest": rest}


@pytest.mark.parametrize("kernel", KERNELS)
@given(case=poisoned())
def test_nothing_leaks_through_a_mask(case: dict[str, Any], kernel: str) -> None:
    """Wherever gathering only the visible keys gives a number, so does the kernel, and the same one."""
    q, k, v = case["tensors"].values()
    rest = case["rest"]
    if kernel == "sdpa" and (rest["softcap"] or rest["sink"] is not None):
        return
    leaves = [q, k, v] + ([] if rest["sink"] is None else [rest["sink"]])
    expected = by_row(q, k, v, case["keep"], **rest)
    upstream = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).reshape(expected.shape)
    wanted = [expected, *grads(expected, leaves, upstream)]
    refusal = ""
    try:
        out = mh.attention(q, k, v, mask=case["mask"], offset=case["offset"], kernel=kernel, **rest)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert kernel == "sdpa"
        assert "NaN or Inf" in refusal
        return
    for x, y in zip([out, *grads(out, leaves, upstream)], wanted, strict=True):
        fine = y.isfinite()
        assert x[fine].isfinite().all()
        close(x[fine], y[fine])
    # NaN in a visible key or value reaches the output.
    for tensor in (q, k):
        if tensor.isinf().any():
            return
    assert out[expected.isnan()].isnan().all()


@pytest.mark.sampled("kernel", "dtype")
@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("t", [1, 3, 70])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, "largest"])
def test_masked_keys_and_values_have_no_effect(poison: Any, t: int, dtype: torch.dtype, kernel: str) -> None:
    """Over several blocks, behind lengths, a causal mask and a bias of −inf; the largest overflows."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in heads(t=t, s=110))
    lengths = torch.tensor([40, 75])
    bias = torch.zeros(110, dtype=dtype)
    bias[10:20] = -math.inf
    masked = ((torch.arange(110) >= lengths[:, None]) | (bias == -math.inf))[:, None, :, None]  # [b, 1, s, 1]
    near = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 2e-2)
    poison = torch.finfo(dtype).max if poison == "largest" else poison
    dirty = [x.detach().masked_fill(masked, poison).requires_grad_() for x in (k, v)]
    for causal in (mh.Causal(), mh.Full()):
        options = {"mask": mh.Lengths(lengths) & causal, "bias": mh.Dense(bias), "kernel": kernel}
        (out, amap), (clean, other) = (mh.attention_with_map(q, *kv, **options) for kv in (dirty, (k, v)))
        results = [out, amap.lse, *grads(out, [q, *dirty])], [clean, other.lse, *grads(clean, [q, k, v])]
        assert kernel == "auto" or torch.equal(out, clean)  # auto may take another kernel for NaN
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=near, atol=near)


def test_sdpa_with_a_mask_raises_for_nan() -> None:
    q, k, v = heads()
    with torch.no_grad():
        v[:, :, 6] = math.nan
    with pytest.raises(ValueError, match=r'kernel="sdpa", .* got NaN or Inf'):
        mh.attention(q, k, v, mask=mh.Lengths(6), kernel="sdpa")
    assert mh.attention(q, k, v, mask=mh.Lengths(6)).isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale: float, kernel: str) -> None:
    """PyTorch's own causal mask is −inf times the scale: NaN."""
    q, k, v = (x.detach().float() for x in heads(t=7, s=7))
    scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT  # [b, h, t, s]
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = mh.attention(q, k, v, mask=mh.Causal(), scale=scale, offset=0, kernel=kernel)
    torch.testing.assert_close(out, weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1))


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("s", [1, 5, 40])
def test_without_a_mask_nan_is_nan(s: int, kernel: str) -> None:
    """It isn't hidden either: PyTorch's fused kernel answers a NaN query with zeros when keys are few."""
    q, k, v = (x.detach() for x in heads(s=s))
    dirty = v.clone()
    dirty[0, 0, s - 1, 3] = math.nan
    out = mh.attention(q, k, dirty, kernel=kernel)
    assert out.isnan().nonzero()[:, [0, 3]].unique(dim=0).tolist() == [[0, 3]]
    q[1, 3, 2, 0] = math.nan
    out = mh.attention(q, k, v, kernel=kernel)
    assert out.isnan().all(-1).nonzero().tolist() == [[1, 3, 2]]
    k[:, :, :, 1] = math.nan
    assert mh.attention(q, k, v, kernel=kernel).isnan().all()


def read_dropout(kernel: str, p: float, seed: int, t: int = 64, s: int = 70) -> tuple[Tensor, ...]:
    """With v the identity, output and weights and their quotient: what was drawn."""
    torch.manual_seed(1)
    q, k, _ = heads(b=2, h=2, g=1, t=t, s=s)
    v = torch.eye(s, dtype=torch.float64).expand(2, 1, s, s).clone().requires_grad_()
    torch.manual_seed(seed)
    out, amap = mh.attention_with_map(q, k, v, dropout_p=p, mask=mh.Causal(), kernel=kernel)
    weights = amap.dense()
    drawn = torch.where(weights > 0, out.detach() / weights.clamp(min=1e-300), 0)
    return q, k, v, out, weights, drawn


@pytest.mark.parametrize("kernel", DROPPING)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_multiplies_weights_by_0_or_1_over_1_minus_p(p: float, kernel: str) -> None:
    _, _, _, _, weights, drawn = read_dropout(kernel, p, seed=3)
    drawn = drawn[weights > 1e-12]
    kept = drawn > 0
    close(drawn[kept], torch.full_like(drawn[kept], 1 / (1 - p)))
    n = len(drawn)  # some 10,000 draws: five standard deviations
    assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("kernel", DROPPING)
def test_dropouts_gradient_is_that_of_the_drawn_mask(kernel: str) -> None:
    q, k, v, out, _, drawn = read_dropout(kernel, 0.4, seed=5)
    keep = torch.arange(70) <= torch.arange(64)[:, None] + 6
    score = (q @ k.mT / math.sqrt(8)).masked_fill(~keep, -math.inf)
    expected = (score.softmax(-1) * (drawn > 0) / 0.6) @ v
    close(out, expected)
    upstream = torch.randn_like(out)
    for x, y in zip(grads(out, [q, k, v], upstream), grads(expected, [q, k, v], upstream), strict=True):
        close(x, y)


@pytest.mark.parametrize("kernel", DROPPING)
def test_dropout_is_drawn_anew_and_again_under_a_seed(kernel: str) -> None:
    *_, first = read_dropout(kernel, 0.5, seed=7)
    *_, again = read_dropout(kernel, 0.5, seed=7)
    *_, other = read_dropout(kernel, 0.5, seed=8)
    assert torch.equal(first > 0, again > 0)
    assert not torch.equal(first > 0, other > 0)
    torch.manual_seed(7)
    q = torch.randn(1, 1, 30, 8)
    one, two = (mh.attention(q, q, q, dropout_p=0.5, kernel=kernel) for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("kernel", DROPPING)
def test_dropout_is_independent_between_heads_rows_and_batch_entries(kernel: str) -> None:
    *_, weights, drawn = read_dropout(kernel, 0.5, seed=9)
    kept = torch.where(weights > 1e-12, (drawn > 0).double() * 2 - 1, 0.0)
    pairs = [
        (kept[0], kept[1]),  # batch entries
        (kept[:, 0], kept[:, 1]),  # heads
        (kept[..., 1:, :], kept[..., :-1, :]),  # rows
        (kept[..., 1:], kept[..., :-1]),  # columns
        (kept[..., 32:, :], kept[..., :32, :]),  # blocks of rows
        (kept[..., 32:64], kept[..., :32]),  # blocks of columns
    ]
    for x, y in pairs:
        n = int(((x != 0) & (y != 0)).sum())
        assert n > 100
        assert abs((x * y).sum() / math.sqrt(n)) < 5  # a sum of n signs, in standard deviations


@pytest.mark.parametrize("kernel", DROPPING)
def test_dropout_of_0_and_of_1(kernel: str) -> None:
    q, k, v = heads()
    close(mh.attention(q, k, v, dropout_p=0.0, kernel=kernel), mh.attention(q, k, v, kernel="reference"))
    out = mh.attention(q, k, v, dropout_p=1.0, kernel=kernel)
    assert not out.any()
    assert not any(x.any() for x in grads(out, [q, k, v]))


@pytest.mark.parametrize("kernel", OWN)
def test_a_saturated_softcap_passes_no_gradient(kernel: str) -> None:
    """Where tanh is 1 its slope is 0, not a rounding error times the keys."""
    q, k, v = heads(s=4)
    q, k = (x.detach().sign().mul(1e4).requires_grad_() for x in (q, k))
    out = mh.attention(q, k, v, softcap=0.7, kernel=kernel)
    dq, dk, _ = grads(out, [q, k, v], torch.randn_like(out))
    saturated = (q @ k.repeat_interleave(2, 1).mT != 0).all(-1)
    assert saturated.any()
    assert not dq[saturated].any()
    assert not dk[:, :1].isnan().any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_pytorchs_attention_does(low: torch.dtype, kernel: str) -> None:
    mixed = [x.detach().float() for x in heads(h=2)]
    mixed[1] = mixed[1].to(low)
    with torch.autocast("cpu", dtype=low):
        theirs = F.scaled_dot_product_attention(*mixed)
        ours, amap = mh.attention_with_map(*mixed, kernel=kernel)
    assert ours.dtype == theirs.dtype == low
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    rounded = [x.to(low) for x in mixed]
    torch.testing.assert_close(ours, mh.attention(*rounded, kernel=kernel), rtol=0, atol=0)
    assert amap.lse.dtype == torch.float32
    ones = torch.ones(2, 2, 5)
    torch.testing.assert_close(amap.dense().sum(-1), ones, rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=low):  # reading it there casts nothing
        torch.testing.assert_close(amap.dense().sum(-1), ones, rtol=0, atol=1e-6)
        assert amap.mass(mh.Full()).dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_leaves_float64_alone(kernel: str) -> None:
    q, k, v = heads()
    expected = mh.attention(q, k, v, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mh.attention(q, k, v, kernel=kernel)
    assert out.dtype == torch.float64
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_through_autocast(kernel: str) -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in heads())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mh.attention(q, k, v, mask=mh.Causal(), kernel=kernel)
        inside = grads(out.float().sum(), [q, k, v])  # as some loops do, although PyTorch advises against it
        out = mh.attention(q, k, v, mask=mh.Causal(), kernel=kernel)
    outside = grads(out.float().sum(), [q, k, v])
    exact = grads(mh.attention(q, k, v, mask=mh.Causal(), kernel="reference").sum(), [q, k, v])
    for x, y, z in zip(inside, outside, exact, strict=True):
        assert x.dtype == y.dtype == torch.float32
        torch.testing.assert_close(x, z, rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(y, z, rtol=5e-2, atol=5e-2)


DENSE = ((2, 4, 3, 4), (4, 1, 1), (3, 4), (2, 1, 1, 4), (1, 1, 3, 1), (1,), ())


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize(
    ("bias", "shape"),
    [(mh.ALiBi, (4,)), (mh.ALiBi, (1,)), (mh.Relative, (4, 5)), (mh.Relative, (1, 3))]
    + [(mh.Dense, shape) for shape in DENSE],
    ids=str,
)
def test_gradients_equal_numerical_ones(bias: Any, shape: tuple[int, ...], kernel: str) -> None:
    """Of q, k, v, the sink and every shape of bias."""
    more = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((4,), shape)]
    rest = {"softcap": 1.5, "mask": mh.Window(left=2, right=1), "offset": torch.tensor([1, -1])}

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, values: Tensor) -> Tensor:
        return mh.attention(q, k, v, sink=sink, bias=bias(values), kernel=kernel, **rest)

    assert torch.autograd.gradcheck(run, [*heads(t=3, s=4, d=2, w=3), *more], fast_mode=True)


@pytest.mark.parametrize("kernel", OWN)
def test_only_tensors_that_require_gradients_get_them(kernel: str) -> None:
    q, k, v = heads()
    table = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    expected = grads(mh.attention(q, k, v, bias=mh.Relative(table), kernel="reference"), [table, v])
    out = mh.attention(q.detach(), k.detach(), v.detach(), bias=mh.Relative(table), kernel=kernel)
    close(grads(out, [table])[0], expected[0])
    out = mh.attention(q.detach(), k.detach(), v, bias=mh.Relative(table.detach()), kernel=kernel)
    close(grads(out, [v])[0], expected[1])
    assert not mh.attention(q.detach(), k.detach(), v.detach(), kernel=kernel).requires_grad
    with torch.no_grad():
        assert not mh.attention(q, k, v, bias=mh.Relative(table), kernel=kernel).requires_grad


@pytest.mark.parametrize("t", [4, 300], ids=["short", "long"])
@pytest.mark.parametrize("kernel", ["auto", "native", "sdpa", "chunked"])
def test_a_second_gradient_is_refused_in_one_sentence(kernel: str, t: int) -> None:
    """And the first one is right, with `create_graph=True` too."""
    q, k, v = (x.float().detach().requires_grad_() for x in heads(t=t, s=t))
    out = mh.attention(q, k, v, mask=mh.Causal(), kernel=kernel)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    expected = mh.attention(q, k, v, mask=mh.Causal(), kernel="reference")
    torch.testing.assert_close(dq, torch.autograd.grad(expected.square().sum(), q)[0])
    with pytest.raises(RuntimeError, match=r'got a second one.*kernel="reference" to attention or') as caught:
        torch.autograd.grad(dq.square().sum(), q)
    assert "\n" not in str(caught.value)


def test_pytorchs_math_path_keeps_its_second_gradient() -> None:
    q, k, v = heads()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = mh.attention(q, k, v, kernel="sdpa")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    torch.autograd.grad(dq.square().sum(), q)


def test_the_reference_has_a_second_gradient() -> None:
    q, k, v = heads(t=2, s=3, d=2)
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: mh.attention(q, k, v, mask=mh.Causal(), kernel="reference"), (q, k, v)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_forward_mode_derivative_is_right_or_refused(kernel: str) -> None:
    """Never a silent zero: `auto` gives it, a kernel that can't says so."""
    q, k, v = (x.detach() for x in heads())
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))

    def run(q: Tensor, k: Tensor, v: Tensor, kernel: str = kernel) -> Tensor:
        return mh.attention(q, k, v, mask=mh.Causal(), kernel=kernel)

    if kernel in ("chunked", "native", "sdpa"):
        with pytest.raises(ValueError, match="forward-mode"):
            torch.func.jvp(run, (q, k, v), tangents)
        return
    out, slope = torch.func.jvp(run, (q, k, v), tangents)
    close(out, run(q, k, v))
    step = 1e-6
    ahead = run(*(x + step * y for x, y in zip((q, k, v), tangents, strict=True)), kernel="reference")
    behind = run(*(x - step * y for x, y in zip((q, k, v), tangents, strict=True)), kernel="reference")
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_rule_outlives_the_call_for_its_gradient() -> None:
    """The gradient needs the mask, which the caller no longer has."""
    import gc

    q, k, v = heads()
    keep = torch.rand(2, 4, 5, 7) < 0.6
    out = mh.attention(q, k, v, mask=mh.Rule(lambda b, h, i, j: keep[b, h, i - 2, j]), kernel="chunked")
    gc.collect()
    expected = mh.attention(q, k, v, mask=mh.Keep(keep), kernel="reference")
    for x, y in zip(grads(out, [q, k, v]), grads(expected, [q, k, v]), strict=True):
        close(x, y)


def test_rules_are_freed() -> None:
    """A rule made for every step doesn't pile up, nor what its function holds on to."""
    import gc
    import weakref

    held = []
    q, k, v = heads()
    for _ in range(3):
        keep = torch.rand(2, 4, 5, 7) < 0.6
        held.append(weakref.ref(keep))
        out = mh.attention(
            q, k, v, mask=mh.Rule(lambda b, h, i, j, x=keep: x[b, h, i - 2, j]), kernel="chunked"
        )
        grads(out, [q])
        del keep, out
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_not_changed(kernel: str) -> None:
    q, k, v = (x.detach() for x in heads())
    copies, versions = [x.clone() for x in (q, k, v)], [x._version for x in (q, k, v)]
    out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal(), kernel=kernel)
    amap.dense(), amap.mass(mh.Causal())
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))
    assert [x._version for x in (q, k, v)] == versions
    assert out.data_ptr() not in {x.data_ptr() for x in (q, k, v)}


def test_auto_takes_the_first_that_refuses_nothing() -> None:
    q, k, v = heads()
    assert kernels.ORDER[-1] == "reference"
    for rest in ({}, {"softcap": 2.0}, {"mask": mh.Causal()}, {"dropout_p": 0.1}):
        problem = Problem.of(q, k, v, **rest)
        verdicts = kernels.verdicts(problem)
        assert list(verdicts) == list(kernels.ORDER)
        can = [name for name, reasons in verdicts.items() if not reasons]
        assert (
            next(name for name in can if not kernels.why_slower(kernels.load(name), problem))
            == kernels.choose(problem).NAME
        )

    def chosen(*qkv: Tensor, **rest: Any) -> str:
        return kernels.choose(Problem.of(*qkv, **rest)).NAME

    long = [torch.randn(1, 2, 70, 8) for _ in range(3)]
    assert chosen(*long) == chosen(*(x.detach().bfloat16() for x in heads())) == "native"
    assert chosen(*(x.double() for x in long)) == "sdpa"
    wanting = [x.clone().requires_grad_() for x in long]
    assert chosen(*wanting) == chosen(*wanting, softcap=2.0) == "native"


def test_a_named_kernel_raises_all_its_reasons() -> None:
    q, k, v = heads(w=3)
    with pytest.raises(ValueError, match='kernel="sdpa"') as caught:
        mh.attention(q, k, v, softcap=2.0, sink=torch.zeros(4), dropout_p=0.1, kernel="sdpa")
    message = str(caught.value)
    for word in ("softcap", "sinks", "dropout", "width 3", "width 8"):
        assert word in message
    assert "\n" not in message


def test_explain_prints_the_table_and_returns_it(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = heads()
    verdicts = mh.explain(q, k, v, softcap=2.0)
    printed = capsys.readouterr().out
    assert set(verdicts) == set(kernels.ORDER)
    for name, reasons in verdicts.items():
        assert name in printed
        for reason in reasons:
            assert reason in printed
    assert "yes" in printed
    assert "no" in printed
    assert "map" in printed
    assert any("softcap" in reason for reason in verdicts["sdpa"])


@pytest.mark.parametrize(
    "mask", [None, mh.Causal(), mh.Lengths(torch.tensor([3, 4])), mh.Rule(lambda b, h, i, j: j <= i)]
)
def test_explain_does_not_read_the_data(mask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = heads()
    clean, text = mh.explain(q, k, v, mask=mask), capsys.readouterr().out
    dirty = mh.explain(*(torch.full_like(x, math.nan, requires_grad=True) for x in (q, k, v)), mask=mask)
    assert clean == dirty
    assert capsys.readouterr().out == text


def test_a_rule_above_64_mb_is_refused_and_a_callers_tensor_is_not() -> None:
    """PyTorch makes numbers of q's dtype of a boolean mask, so those are counted."""

    def reasons(t: int, mask: mh.Mask, dtype: torch.dtype = torch.float32, b: int = 1) -> list[str]:
        q = torch.empty(1, 1, 1, 8, dtype=dtype).expand(b, 1, t, 8)
        problem = Problem.of(q, q, q, mask=mask)
        found = kernels.verdicts(problem)["sdpa"]
        return found

    limit = kernels.load("sdpa").LIMIT
    assert limit == 2**26
    window = mh.Window(left=3)
    assert not reasons(4096, window)  # 64 MB
    (reason,) = reasons(4100, window)
    assert "64" in reason
    assert not reasons(4100, window, torch.bfloat16)
    assert reasons(5800, window, torch.bfloat16)
    assert reasons(2900, window, torch.float64)
    lengths = mh.Causal() & mh.Lengths(torch.tensor([1, 2, 3]))
    assert not reasons(2300, lengths, b=3)  # 63 MB, one mask for each sequence
    assert reasons(2400, lengths, b=3)
    assert not reasons(8200, mh.Causal())  # said without a tensor
    assert not reasons(8200, mh.Keep(torch.ones(1, 1, dtype=torch.bool).expand(8200, 8200)))


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_never_takes_pytorchs_math_path(
    case: Case, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has a fused kernel for every problem that sdpa supports."""
    inputs, sdpa = make(case), kernels.load("sdpa")
    tensors = (x.detach().requires_grad_(training) for x in (inputs.q, inputs.k, inputs.v))
    problem = Problem.of(*tensors, **inputs.arguments())
    if sdpa.why_unsupported(problem):
        return
    choices: list[int] = []
    compute = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        choices.append(torch._fused_sdp_choice(q, k, v, **rest))
        return compute(q, k, v, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    sdpa.run(problem)
    assert len(choices) == 1
    assert choices[0] != 0, "PyTorch would build the weights"


def test_pytorchs_math_path_is_recognized() -> None:
    """The test above can fail."""
    q = torch.randn(1, 1, 3, 8)
    assert torch._fused_sdp_choice(q, q, q[..., :3]) == 0
    assert torch._fused_sdp_choice(q, q, q) != 0
