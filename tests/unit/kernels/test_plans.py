"""Plans: the third call of a layout skips checks and choices, with the same results and errors."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import manyheads as mh
from manyheads import kernels
from manyheads.kernels import plans
from manyheads.masks import Mask
from manyheads.problem import Problem

MASKS: tuple[Mask | None, ...] = (
    None, mh.Causal(), mh.Window(left=2), mh.Window(left=1, right=1), mh.Diagonal(-1),
)  # fmt: skip
DEFAULTS = {
    "mask": None,
    "bias": None,
    "scale": None,
    "softcap": None,
    "sink": None,
    "dropout_p": 0.0,
    "offset": None,
}


def operands(t: int = 3, s: int = 5, h: int = 4, g: int = 2, d: int = 8, **options: Any) -> list[Tensor]:
    return [torch.randn(2, heads, n, d, **options) for heads, n in ((h, t), (g, s), (g, s))]


def planned(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output of the third call, by a plan."""
    for _ in range(2):
        mh.attention(q, k, v, **options)
    layout = plans.layout(q, k, v, **{**DEFAULTS, "kernel": "auto", **options})
    assert layout is not None
    assert plans.find(layout) is not None
    return mh.attention(q, k, v, **options)


def unplanned(q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto", **options: Any) -> Tensor:
    return kernels.run(Problem.of(q, k, v, **options), kernel).out


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    g = draw(st.integers(1, 3))
    sizes = {
        "t": draw(st.integers(1, 20)),
        "s": draw(st.integers(1, 20)),
        "h": g * draw(st.integers(1, 3)),
        "g": g,
    }
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    tensors = operands(**sizes, d=draw(st.sampled_from([1, 8, 33])), dtype=dtype)
    if draw(st.booleans()):  # strided, as projections are
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    options = {
        "mask": lengths_of(draw, sizes["s"]) if draw(st.booleans()) else draw(st.sampled_from(MASKS)),
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([None, 5.0])),
        "offset": draw(st.sampled_from([None, 0, 4, -2])),
        "kernel": draw(st.sampled_from(["auto", "auto", "chunked", "reference"])),
    }
    return tensors, options


def lengths_of(draw: st.DrawFn, s: int) -> Mask:
    """Lengths of two sequences, as an int or a tensor of any integer dtype and stride."""
    n: int | Tensor = draw(st.integers(0, s + 2))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
        n = torch.tensor([n, draw(st.integers(0, s))], dtype=dtype)
        n = torch.stack((n, n + 1), 1)[:, 0] if draw(st.booleans()) else n[: draw(st.integers(1, 2))]
    lengths = mh.Lengths(n, left=draw(st.booleans()))
    band = draw(st.sampled_from([None, mh.Causal(), mh.Window(left=2)]))
    if band is None:
        return lengths
    return band & lengths if draw(st.booleans()) else lengths & band


@given(calls(), st.booleans())
def test_a_plan_gives_the_same_bits(call: tuple[list[Tensor], dict[str, Any]], gradient: bool) -> None:
    tensors, options = call
    plans.forget()
    upstream = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], dtype=tensors[0].dtype)
    found = []
    for compute in (planned, unplanned):
        leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_(gradient) for x in tensors]
        out = compute(*leaves, **options)
        found.append([out, *(torch.autograd.grad(out, leaves, upstream) if gradient else ())])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_gradients_of_some() -> None:
    q, k, v = operands()
    k.requires_grad_()
    (found,) = torch.autograd.grad(planned(q, k, v).sum(), [k])
    (expected,) = torch.autograd.grad(unplanned(q, k, v).sum(), [k])
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert not planned(q, k, v).requires_grad


BAD: dict[str, dict[str, Any]] = {
    "scale is a bool": {"scale": True},
    "scale is NaN": {"scale": math.nan},
    "scale is a tensor": {"scale": torch.tensor(1.0)},
    "softcap is a bool": {"softcap": True},
    "softcap is 0": {"softcap": 0.0},
    "dropout is a bool": {"dropout_p": False},
    "dropout is negative": {"dropout_p": -1.0},
    "offset is a bool": {"offset": True},
    "offset is a float": {"offset": 1.0},
    "offset is far": {"offset": 1 << 60},
    "mask is a tensor": {"mask": torch.ones(3, 5, dtype=torch.bool)},
    "bias is a tensor": {"bias": torch.ones(3, 5)},
    "sink is a list": {"sink": [0.0]},
    "kernel is unknown": {"kernel": "fastest"},
    "kernel is a number": {"kernel": 1},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_wrong_options_raise_beside_a_plan(bad: dict[str, Any]) -> None:
    """True equals 1.0 as the key of a dict."""
    q, k, v = operands()
    errors = []
    for prepare in (lambda: None, lambda: [planned(q, k, v, **good) for good in ({}, GOOD)]):
        prepare()
        with pytest.raises((TypeError, ValueError)) as caught:
            mh.attention(q, k, v, **{**GOOD, **bad})
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


GOOD: dict[str, Any] = {"scale": 1.0, "softcap": 1.0, "offset": 1}


def test_wrong_tensors_raise_beside_a_plan() -> None:
    q, k, v = operands()
    planned(q, k, v)
    wrong: list[list[Any]] = [
        [q.tolist(), k, v],
        [q.long(), k, v],
        [q, k.double(), v],
        [q, k[:, :, :4], v],
        [q, k.to_sparse(), v],
        [q.to("meta"), k, v],
        [torch.nested.nested_tensor([torch.randn(4, 3, 8)] * 2, layout=torch.jagged), k, v],
        [q, k, None],
    ]
    for tensors in wrong:
        for _ in range(3):
            with pytest.raises((TypeError, ValueError)):
                mh.attention(*tensors)


def test_autocast_transforms_and_modes() -> None:
    q, k, v = operands(h=2)
    planned(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert mh.attention(q, k, v).dtype == torch.bfloat16
    batched = torch.vmap(mh.attention)(*(x[None].expand(3, *x.shape) for x in (q, k, v)))
    torch.testing.assert_close(batched[1], mh.attention(q, k, v))
    _, tangent = torch.func.jvp(lambda q: mh.attention(q, k, v), (q,), (torch.ones_like(q),))
    assert tangent.abs().sum() > 0
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mh.attention(*(mode.from_tensor(x) for x in (q, k, v)))
    assert fake.shape == q.shape


def test_an_observer_sees_a_planned_call() -> None:
    class Model(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return mh.attention(*tensors)

    tensors, model = operands(), Model()
    out = planned(*tensors)
    with mh.observe(model) as recording:
        assert torch.equal(model(*tensors), out)
    assert len(recording) == 1


def test_negated_views() -> None:
    """The imaginary part of a conjugate is a view whose numbers are negated when they are read."""
    plain = operands()
    planned(*plain)
    negated = [torch.complex(x, -x).conj().imag for x in plain]
    assert all(x.is_neg() for x in negated)
    contiguous = [torch.complex(x, x).imag for x in plain]
    planned(*contiguous)  # the same strides
    for _ in range(3):
        torch.testing.assert_close(mh.attention(*negated), mh.attention(*plain))


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_LAYOUTS", 4)
    for s in range(1, 20):
        q, k, v = operands(s=s)
        assert torch.equal(planned(q, k, v), unplanned(q, k, v))
        assert len(plans._plans) <= 4


def test_saved_tensors_may_come_back_with_other_strides() -> None:
    """As hooks that offload or compress them give them back."""
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in operands()]
    planned(*leaves)

    def move(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    with torch.autograd.graph.saved_tensors_hooks(move, lambda x: x):
        found = torch.autograd.grad(mh.attention(*leaves).sum(), leaves)
    expected = torch.autograd.grad(unplanned(*leaves).sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_changes_in_place_and_second_gradients_raise() -> None:
    leaves = [x.requires_grad_() for x in operands(t=16, s=16)]
    planned(*leaves)
    out = mh.attention(*leaves)
    with torch.no_grad():
        leaves[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    (first,) = torch.autograd.grad(mh.attention(*leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="Expected a first gradient"):
        first.sum().backward()


def test_threads_are_part_of_a_layout() -> None:
    q, k, v = operands(t=64, s=64)
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(planned(q, k, v))
    assert torch.equal(*outs)


def test_each_device_has_plans_of_its_own() -> None:
    """A device without numbers stands for a GPU, which has other kernels."""
    q, k, v = operands()
    there = [x.to("meta") for x in (q, k, v)]
    assert planned(*there).is_meta
    assert planned(q, k, v).is_cpu
    assert mh.attention(*there).is_meta


def test_compiled_code_has_no_plan() -> None:
    compiled: Callable[..., Tensor] = torch.compile(mh.attention, fullgraph=True, backend="eager")
    q, k, v = operands()
    out = planned(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), out)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: x.bfloat16(),
    "float64": lambda x: x.double(),
    "one head": lambda x: x[:, :1],
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("known", [True, False], ids=["planned", "unplanned"])
def test_hooks_that_do_not_restore_saved_tensors_raise(
    change: Callable[[Tensor], Tensor], known: bool
) -> None:
    leaves = [x.requires_grad_() for x in operands(t=4, s=700, h=8, g=8)]
    if known:
        planned(*leaves)
    with torch.autograd.graph.saved_tensors_hooks(change, lambda x: x):
        out = mh.attention(*leaves)
    with pytest.raises(RuntimeError, match="Saved-tensor hooks must restore what they pack"):
        torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize("known", [True, False], ids=["planned", "unplanned"])
def test_an_upstream_gradient_without_memory(known: bool) -> None:
    """PyTorch's own zeros, which have no storage."""
    leaves = [x.requires_grad_() for x in operands()]
    if known:
        planned(*leaves)
    out = mh.attention(*leaves)
    grads = torch.autograd.grad(out, leaves, torch._efficientzerotensor(out.shape))
    assert not any(grad.any() for grad in grads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_code_has_no_plan() -> None:
    """`torch.jit.trace` records operators, not calls of the library."""
    q, k, v = operands()
    out = planned(q, k, v)
    traced = torch.jit.trace(lambda *x: mh.attention(*x), (q, k, v))
    torch.testing.assert_close(traced(q, k, v), out)
    for kernel in ("native", "chunked"):
        with pytest.raises(ValueError, match=r"torch.jit.trace doesn't record it"):
            torch.jit.trace(lambda *x, kernel=kernel: mh.attention(*x, kernel=kernel), (q, k, v))


def test_plans_are_used_where_observe_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import manyheads.observe  # noqa: F401

    q, k, v = operands()
    planned(q, k, v)
    layout = plans.layout(q, k, v, **{**DEFAULTS, "kernel": "auto"})
    monkeypatch.setitem(plans._plans, layout, lambda *tensors: tensors[2])
    assert mh.attention(q, k, v) is v


LENGTHS: dict[str, Callable[[Tensor], Mask]] = {
    "right": lambda n: mh.Lengths(n),
    "left": lambda n: mh.Lengths(n, left=True),
    "band and lengths": lambda n: mh.Causal() & mh.Lengths(n),
    "lengths and band": lambda n: mh.Lengths(n, left=True) & mh.Window(left=2),
}
each_mask = pytest.mark.parametrize("mask_of", LENGTHS.values(), ids=list(LENGTHS))


@each_mask
@pytest.mark.parametrize("kernel", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_plan_reads_the_lengths_of_its_call(
    mask_of: Callable[[Tensor], Mask], kernel: str, gradient: bool
) -> None:
    leaves = [x.requires_grad_(gradient) for x in operands()]
    planned(*leaves, mask=mask_of(torch.tensor([5, 5])), kernel=kernel)
    known = dict(plans._plans)
    for n in (
        torch.tensor([1, 3]),
        torch.tensor([4, 0], dtype=torch.int32),
        torch.tensor([[2, 9], [7, 9]])[:, 0],
    ):
        outs = [attend(*leaves, mask=mask_of(n), kernel=kernel) for attend in (mh.attention, unplanned)]
        assert torch.equal(*outs)
        if gradient:
            grads = [torch.autograd.grad(out.sum(), leaves) for out in outs]
            assert all(map(torch.equal, *grads))
    assert plans._plans == known


def test_lengths_of_one_sequence_for_all() -> None:
    q, k, v = operands()
    planned(q, k, v, mask=mh.Lengths(torch.tensor([5])))
    for n in (0, 2, 4):
        mask = mh.Lengths(torch.tensor([n]))
        assert torch.equal(mh.attention(q, k, v, mask=mask), unplanned(q, k, v, mask=mask))


def test_layouts_of_other_masks_differ() -> None:
    q, k, v = operands()
    n = torch.tensor([2, 4])
    masks: list[Mask] = [
        *(mask_of(n) for mask_of in LENGTHS.values()), mh.Lengths(n[:1]), mh.Lengths(n) & mh.Causal(),
        *(mh.Lengths(size) for size in (0, 4, 5)), mh.Lengths(5, left=True), mh.Causal(),
        mh.Window(left=0, right=5), mh.Window(left=1, right=5), mh.Causal() & mh.Window(left=1),
        mh.Lengths(n.to("meta")),
    ]  # fmt: skip
    layouts = [plans.layout(q, k, v, **{**DEFAULTS, "mask": mask, "kernel": "auto"}) for mask in masks]
    assert None not in layouts
    assert len(set(layouts)) == len(masks)
    other = mh.Lengths(n) & mh.Lengths(n, left=True), mh.Lengths(n) | mh.Causal(), ~mh.Lengths(n)
    for mask in (*other, mh.Lengths(n) & mh.Causal() & mh.Causal()):
        assert plans.layout(q, k, v, **{**DEFAULTS, "mask": mask, "kernel": "auto"}) is None


def test_lengths_of_another_size_or_device_raise_as_without_a_plan() -> None:
    q, k, v = operands()
    planned(q, k, v, mask=mh.Lengths(torch.tensor([2, 4])))
    with pytest.raises(ValueError, match="Lengths"):
        mh.attention(q, k, v, mask=mh.Lengths(torch.tensor([2, 4, 1])))
    with pytest.raises(ValueError, match=r"move it with mask\.to"):
        mh.attention(q, k, v, mask=mh.Lengths(torch.tensor([2, 4], device="meta")))


@each_mask
def test_lengths_that_change_before_the_gradient_are_noticed(mask_of: Callable[[Tensor], Mask]) -> None:
    leaves = [x.requires_grad_() for x in operands()]
    n = torch.tensor([2, 4])
    planned(*leaves, mask=mask_of(n))
    out = mh.attention(*leaves, mask=mask_of(n))
    n[0] = 1
    assert torch.equal(mh.attention(*leaves, mask=mask_of(n)), unplanned(*leaves, mask=mask_of(n)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("mask_of", [lambda n: None, *LENGTHS.values()], ids=["none", *LENGTHS])
def test_plans_hold_no_tensors(mask_of: Callable[[Tensor], Mask | None]) -> None:
    tensors = [*operands(requires_grad=True), torch.tensor([2, 4])]
    planned(*tensors[:3], mask=mask_of(tensors[3])).sum().backward()
    references = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@each_mask
def test_saved_lengths_pass_through_hooks(mask_of: Callable[[Tensor], Mask]) -> None:
    leaves = [x.requires_grad_() for x in operands()]
    mask = mask_of(torch.tensor([2, 4]))
    planned(*leaves, mask=mask)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda n: packed[n]):
        out = mh.attention(*leaves, mask=mask)
    assert any(torch.equal(x, torch.tensor([2, 4])) for x in packed)
    found = torch.autograd.grad(out.sum(), leaves)
    expected = torch.autograd.grad(unplanned(*leaves, mask=mask).sum(), leaves)
    assert all(map(torch.equal, found, expected))


@each_mask
def test_gradients_without_the_plan_where_numbers_are_not_finite(mask_of: Callable[[Tensor], Mask]) -> None:
    q, k, v = operands()
    k[0, 0, 2] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = mask_of(torch.tensor([2, 4]))
    found = torch.autograd.grad(planned(*leaves, mask=mask).sum(), leaves)
    expected = torch.autograd.grad(unplanned(*leaves, mask=mask).sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
