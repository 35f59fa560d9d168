"""`accelerate`: PyTorch's function on the native kernel, and everything else untouched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import manyheads
from manyheads import acceleration, sdpa_hooks
from manyheads.kernels import native
from tests import cases

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.library.width is None, reason="the native kernel isn't built"),
]

SDPA = F.scaled_dot_product_attention


def attend(*args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate small calls too, and check that PyTorch's function is back."""
    monkeypatch.setattr(acceleration, "LEAST", dict.fromkeys(acceleration.LEAST, (0, 0)))
    acceleration._decisions.clear()
    yield
    acceleration._decisions.clear()
    assert F.scaled_dot_product_attention is SDPA


def reasons(report: acceleration.Acceleration) -> dict[str, int]:
    """The calls by reason, "native" for those that were accelerated."""
    return {row.reason or row.kernel: row.calls for row in report.rows}


def qkv(*sizes: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, s, d = sizes or (2, 4, 33, 20, 16)
    q = torch.randn(b, t, h, d, **options).transpose(1, 2)
    k, v = (torch.randn(b, s, h, d, **options).transpose(1, 2) for _ in range(2))
    return q, k, v


# -- what is accelerated ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "causal", "keep"])
def test_outputs_and_gradients_are_within_the_error_budget(mask: str, dtype: torch.dtype) -> None:
    inputs = cases.make(
        cases.Case((2, 4, 2, 19, 23, 16, 16), dtype, mask, offset="zero", layout="batch first")
    )
    answer, leaves = cases.oracle(inputs), inputs.leaves()
    tensor = torch.from_numpy(inputs.keep) if mask == "keep" else None
    with manyheads.accelerate() as report:
        out = F.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, attn_mask=tensor, is_causal=mask == "causal", enable_gqa=True
        )
    assert reasons(report) == {"native": 1}
    assert not cases.over(out, answer.values["out"], answer.errors["out"])
    for name, grad in cases.gradients(out, leaves, inputs.upstream).items():
        assert not cases.over(grad, answer.values[name], answer.errors[name]), name


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 4, 20, 16),
    "projected": lambda: torch.randn(2, 20, 4, 16).transpose(1, 2),
    "packed": lambda: torch.randn(2, 20, 3, 4, 16)[:, :, 0].transpose(1, 2),
    "sequence first": lambda: torch.randn(20, 2, 4, 16).permute(1, 2, 0, 3),
    "expanded": lambda: torch.randn(1, 4, 20, 16).expand(2, 4, 20, 16),
    "sliced": lambda: torch.randn(2, 4, 25, 16)[:, :, 3:23],
}


@pytest.mark.parametrize("mask", [None, torch.ones(20, 20, dtype=torch.bool).tril()])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_has_the_strides_of_pytorchs(layout: str, needs_gradient: bool, mask: Any) -> None:
    """Code such as `out.transpose(1, 2).view(b, t, -1)` works for some strides only."""
    q = LAYOUTS[layout]().requires_grad_(needs_gradient)
    expected = SDPA(q, q, q, attn_mask=mask)
    with manyheads.accelerate() as report:
        for _ in range(2):  # found, and remembered
            out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            assert out.stride() == expected.stride()
            torch.testing.assert_close(out, expected)
    assert report.accelerated == 2


def test_masks_and_shapes_of_every_kind() -> None:
    q, k, v = qkv()
    lowest, some = torch.finfo(torch.float32).min, torch.rand(33, 20) < 0.5
    calls: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
        "scale": ((q, k, v), {"scale": 0.5}),
        "whole scale": ((q, k, v), {"scale": 2}),
        "fewer queries": ((k, q, q), {"is_causal": True}),
        "more queries": ((q, k, v), {"is_causal": True}),
        "nothing visible": ((q, k, v), {"attn_mask": torch.zeros(33, 20, dtype=torch.bool)}),
        "per head": ((q, k, v), {"attn_mask": torch.rand(4, 33, 20) > 0.5}),
        "padding": ((q, k, v), {"attn_mask": torch.rand(2, 1, 1, 20) > 0.5}),
        "rows": ((q, k, v), {"attn_mask": torch.rand(33, 1) > 0.5}),
        "bias": ((q, k, v), {"attn_mask": torch.randn(33, 20)}),
        "-inf": ((q, k, v), {"attn_mask": torch.randn(2, 4, 33, 20).masked_fill(some, -torch.inf)}),
        "lowest": ((q, k, v), {"attn_mask": torch.zeros(33, 20).masked_fill(some, lowest)}),
        "all lowest": ((q, k, v), {"attn_mask": torch.full((33, 20), lowest)}),
        "wide values": ((q, k, v[..., :8]), {}),
        "three dimensions": ((q[0], k[0], v[0]), {"attn_mask": torch.rand(4, 33, 20) > 0.5}),
        "two dimensions": ((q[0, 0], k[0, 0], v[0, 0]), {"is_causal": True}),
        "five dimensions": ((q[None], k[None], v[None]), {"attn_mask": torch.rand(2, 1, 33, 20) > 0.3}),
        "negative view": ((torch._neg_view(q), k, v), {}),
    }
    for name, (tensors, options) in calls.items():
        expected = SDPA(*tensors, **options)
        with manyheads.accelerate() as report:
            out = F.scaled_dot_product_attention(*tensors, **options)
        assert (report.accelerated, report.total) == (1, 1), f"{name}: {report}"
        assert out.shape == expected.shape, name
        torch.testing.assert_close(out, expected, msg=name)


def test_autocast_and_inference_mode() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16), manyheads.accelerate() as report:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), SDPA(q, k, v, is_causal=True), rtol=0.02, atol=0.02)
    with torch.inference_mode(), manyheads.accelerate() as other:
        F.scaled_dot_product_attention(q, k, v)
    assert reasons(report) == reasons(other) == {"native": 1}


def test_layers_of_pytorch_are_accelerated() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 9, 32)
    expected = layer(x, x, x, need_weights=False)[0]
    with manyheads.accelerate() as report:
        out = layer(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(out, expected)
    assert reasons(report) == {"native": 1}


# -- what isn't ------------------------------------------------------------------------------------


class Subclass(Tensor):
    pass


def with_math(*tensors: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors)


def fake(*tensors: Tensor) -> Any:
    with FakeTensorMode() as mode:
        return F.scaled_dot_product_attention(*map(mode.from_tensor, tensors)).shape


UNTOUCHED: dict[str, tuple[str, Callable[..., Any]]] = {
    "dropout": ("it has dropout", lambda q, k, v: attend(q, k, v, dropout_p=0.5)),
    "math": ("torch.nn.attention.sdpa_kernel or torch.backends.cuda selects PyTorch's kernel", with_math),
    "subclass": (
        "a tensor subclass or a TorchFunctionMode is in use",
        lambda q, k, v: attend(q.as_subclass(Subclass), k, v),
    ),
    "meta": ("it runs on meta", lambda *x: attend(*(y.to("meta") for y in x)).shape),
    "fake": ("a tensor subclass or a TorchFunctionMode is in use", fake),
    "vmap": (
        "torch.func or torch.vmap transforms it",
        lambda q, k, v: torch.vmap(lambda x: attend(x, k, v))(q[None]),
    ),
    "float64": (
        "in float64 it is slower than PyTorch's products, and meant for comparisons",
        lambda *x: attend(*(y.double() for y in x)),
    ),
    "learned mask": (
        "its mask needs a gradient",
        lambda q, k, v: attend(q, k, v, torch.zeros(33, 20, requires_grad=True)),
    ),
    "gradient of other values": (
        "it needs a gradient, and values of another width: PyTorch can differentiate it twice",
        lambda q, k, v: attend(q.requires_grad_(), k, v[..., :8]),
    ),
    "gradient of three dimensions": (
        "it needs a gradient, and hasn't four dimensions: PyTorch can differentiate it twice",
        lambda q, k, v: attend(q[0].requires_grad_(), k[0], v[0]),
    ),
    "empty": ("a size is 0", lambda q, k, v: attend(q, k[:, :, :0], v[:, :, :0])),
    "one batch of keys": (
        "its arguments aren't supported",
        lambda q, k, v: attend(q, k[:1], v[:1]),
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, under vmap
@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_calls_are_pytorchs(name: str) -> None:
    """The same numbers, bit for bit, and the reason."""
    reason, call = UNTOUCHED[name]
    tensors = qkv()
    results = []
    for accelerated in (False, True):
        torch.manual_seed(1)
        report = manyheads.accelerate()
        with report if accelerated else sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            results.append(call(*(x.detach() for x in tensors)))
    assert reasons(report) == {reason: 1}
    expected, out = (x if isinstance(x, tuple) else (x,) for x in results)
    for one, other in zip(expected, out, strict=True):
        assert one == other if isinstance(one, int) else torch.equal(one, other)


WRONG: dict[str, Callable[..., Any]] = {
    "no value": lambda q, k, v: attend(q, k),
    "an unknown option": lambda q, k, v: attend(q, k, v, window=3),
    "a list": lambda q, k, v: attend([q], k, v),
    "other heads": lambda q, k, v: attend(q, k[:, :3], v[:, :3]),
    "other dtypes": lambda q, k, v: attend(q, k.half(), v),
    "integers": lambda q, k, v: attend(q.long(), k.long(), v.long()),
    "forward mode": lambda q, k, v: torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,)),
    "a mask of integers": lambda q, k, v: attend(q, k, v, torch.ones(33, 20).long()),
    "a mask of another size": lambda q, k, v: attend(q, k, v, torch.ones(3, 20).bool()),
    "a mask without rows": lambda q, k, v: attend(q, k, v, torch.ones(20).bool()),
    "is_causal=1": lambda q, k, v: attend(q, k, v, is_causal=1),
    "one dimension": lambda q, k, v: attend(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_errors_are_pytorchs(call: Callable[..., Any]) -> None:
    tensors = qkv()
    with pytest.raises(Exception) as expected:  # noqa: PT011
        call(*tensors)
    with manyheads.accelerate() as report, pytest.raises(type(expected.value)) as error:
        call(*tensors)
    assert str(error.value) == str(expected.value)
    assert report.total == 0


def test_an_input_changed_in_place_raises_in_backward() -> None:
    q, k, v = qkv()
    x = q.clone().requires_grad_() * 1
    with manyheads.accelerate() as report:
        out = F.scaled_dot_product_attention(x, k, v)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert report.accelerated == 1


def test_small_calls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v = qkv(1, 1, 2, 2, 4)
    with manyheads.accelerate() as report:
        F.scaled_dot_product_attention(q, k, v)
    assert reasons(report) == {"it is so small that PyTorch's function is faster": 1}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.full
def test_graphs_have_pytorchs_operator() -> None:
    q, k, v = qkv()

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    with manyheads.accelerate() as report:
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q), SDPA(q, k, v))
        traced = torch.jit.trace(attend, (q,), check_trace=False)
    assert torch.equal(traced(q), SDPA(q, k, v))
    assert reasons(report) == {"a graph is being traced": 1}


def test_a_default_device_is_no_reason_and_other_modes_see_one_call() -> None:
    q, k, v = qkv()
    with torch.device("cpu"), manyheads.accelerate() as report:
        F.scaled_dot_product_attention(q, k, v)
    assert reasons(report) == {"native": 1}

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            functions.append(func)
            return func(*args, **(kwargs or {}))

    functions: list[Any] = []
    with manyheads.accelerate(), Mode():
        F.scaled_dot_product_attention(q, k, v)
    assert functions == [SDPA]


# -- on and off ------------------------------------------------------------------------------------


def test_blocks_can_be_nested_and_used_again() -> None:
    q, k, v = qkv()
    outer, inner = manyheads.accelerate(), manyheads.accelerate()
    with outer:
        F.scaled_dot_product_attention(q, k, v)
        with inner, outer:
            F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(TypeError), inner:
            F.scaled_dot_product_attention(q, k)
        F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert (outer.accelerated, inner.accelerated) == (3, 1)
    with inner:
        F.scaled_dot_product_attention(q, k, v)
    assert inner.accelerated == 2


def test_it_can_be_enabled_for_good() -> None:
    q, k, v = qkv()
    report = manyheads.accelerate().enable()
    try:
        with manyheads.accelerate() as other:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    finally:
        report.disable()
    assert (report.total, other.total) == (2, 1)
    with pytest.raises(RuntimeError, match="Expected disable after enable"):
        report.disable()


def test_threads() -> None:
    """Blocks begin and end on some threads while others compute."""
    q, k, v = qkv()
    expected = SDPA(q, k, v)
    reports: list[acceleration.Acceleration] = []
    wrong: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            with manyheads.accelerate() as report:
                out = F.scaled_dot_product_attention(q, k, v)
            reports.append(report)
            if not torch.allclose(out, expected, atol=1e-5):
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(report.accelerated >= 1 for report in reports)


def test_another_program_may_replace_the_function_too(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    calls: list[str] = []

    def before(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("before")
        return SDPA(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", before)
        with manyheads.accelerate():
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            ours = F.scaled_dot_product_attention
            patch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: ours(*args, **kwargs))
        F.scaled_dot_product_attention(q, k, v)  # theirs refers to ours, which isn't on
    assert calls == ["before", "before"]


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_models_are_observed_while_they_are_accelerated() -> None:
    tensors, model = qkv(), Attend()
    with manyheads.accelerate() as report:
        expected = model(*tensors)
        with manyheads.observe(model) as recording:
            assert torch.equal(model(*tensors), expected)
        model(*tensors)
    assert reasons(report) == {"native": 3}
    with manyheads.observe(model) as other:
        with manyheads.accelerate() as inner:  # in the other order
            assert torch.equal(model(*tensors), expected)
        model(*tensors)
    assert reasons(inner) == {"native": 1}
    for amap in (recording[0], other[0]):
        torch.testing.assert_close(amap.dense() @ tensors[2], expected)
    first, second = manyheads.observe(model), manyheads.accelerate()  # which end in the order of their begin
    first.__enter__()
    second.__enter__()
    model(*tensors)
    first.__exit__(None, None, None)
    model(*tensors)
    second.__exit__(None, None, None)
    assert reasons(second) == {"native": 2}


def test_calls_outside_of_modules_are_still_counted_by_observe() -> None:
    tensors, model = qkv(), Attend()

    class Strays(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(*tensors))
            thread.start()
            thread.join()
            return model(*tensors)

    outer = Strays()
    outer.model = model
    with pytest.warns(UserWarning, match="1 attention calls ran on threads"), manyheads.observe(outer):  # noqa: SIM117
        with manyheads.accelerate():
            outer(*tensors)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = qkv()
    with manyheads.accelerate() as report:
        assert report.explain() == {"native": {}, "torch": {}}
        capsys.readouterr()
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert report.explain() == {"native": {"": 3}, "torch": {"it has dropout": 1}}
    expected = (
        "3 of 4 calls of scaled_dot_product_attention were accelerated\n"
        "  native       3  (such as q [2, 4, 33, 16], k [2, 4, 20, 16], float32)\n"
        "  torch        1: it has dropout  (such as q [2, 4, 33, 16], k [2, 4, 20, 16], float32)\n"
    )
    assert capsys.readouterr().out == expected
    assert repr(report) == f"<{expected.rstrip()}>"
    assert sdpa_hooks.SDPA is SDPA
