"""What PyTorch does to functions: vmap, batched gradients, torch.func, fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import manyheads as mh
from manyheads.masks import Mask

B, H, G, D = 2, 4, 2, 8
ALL = ("auto", "native", "sdpa", "chunked", "reference")
N = 3  # entries that vmap batches

# PyTorch's own kernel has no batched gradient: it loops, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def heads(
    t: int = 5, s: int = 7, dtype: torch.dtype = torch.float64, n: tuple[int, ...] = ()
) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*n, B, h, m, D, dtype=dtype) for h, m in ((H, t), (G, s), (G, s))]


close = torch.testing.assert_close


PARTS: dict[str, dict[str, Any]] = {
    "bare": {},
    "causal": {"mask": mh.Causal()},
    "window": {"mask": mh.Causal() & mh.Window(left=2), "offset": 1},
    "lengths": {"mask": mh.Lengths(torch.tensor([4, 7])), "offset": torch.tensor([0, 2])},
    "documents": {"mask": mh.Documents(torch.tensor([0, 0, 1, 1, 1, 2, 2]))},
    "keep": {"mask": mh.Keep(torch.rand(B, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.7)},
    "rule": {"mask": mh.Rule(lambda b, h, i, j: (i - j) % 2 == 0)},
    "alibi": {"bias": mh.ALiBi(H), "softcap": 2.0},
    "relative": {"bias": mh.Relative(torch.linspace(-1, 1, 5).expand(H, 5)), "sink": torch.zeros(H)},
    "dense": {"bias": mh.Dense(torch.linspace(-1, 1, 35).reshape(5, 7)), "mask": mh.Causal()},
}


# -- vmap --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vmap", [torch.vmap, torch.func.vmap], ids=["torch", "func"])
@pytest.mark.parametrize("parts", PARTS)
def test_vmap_is_a_loop(parts: str, vmap: Callable[..., Any]) -> None:
    q, k, v = heads(n=(N,))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, **PARTS[parts])

    expected = torch.stack([run(*entry) for entry in zip(q, k, v, strict=True)])
    close(vmap(run)(q, k, v), expected)
    close(
        vmap(run, in_dims=(1, 0, 3), out_dims=1)(q.movedim(0, 1), k, v.movedim(0, 3)), expected.movedim(0, 1)
    )
    close(vmap(run, in_dims=(0, None, None))(q, k[0], v[0]), torch.stack([run(x, k[0], v[0]) for x in q]))
    close(vmap(run, in_dims=(None, 0, 0))(q[0], k, v)[1], run(q[0], k[1], v[1]))
    nested = vmap(vmap(run, in_dims=(None, 0, 0)), in_dims=(0, None, None))(q, k, v)
    close(nested, torch.stack([torch.stack([run(x, *e) for e in zip(k, v, strict=True)]) for x in q]))


def test_vmap_over_the_tensors_of_masks_and_biases() -> None:
    q, k, v = heads()
    lengths, tables = torch.tensor([[4, 7], [1, 2], [7, 7]]), torch.randn(N, 5, 7, dtype=torch.float64)

    def padded(n: Tensor) -> Tensor:
        return mh.attention(q, k, v, mask=mh.Lengths(n))

    def biased(table: Tensor) -> Tensor:
        return mh.attention(q, k, v, bias=mh.Dense(table), mask=mh.Keep(table < 1))

    def sunk(sink: Tensor) -> Tensor:
        return mh.attention(q, k, v, sink=sink, mask=mh.Causal())

    def turned(offset: Tensor) -> Tensor:
        return mh.attention(q, k, v, offset=offset, mask=mh.Causal())

    for run, over in ((padded, lengths), (biased, tables), (sunk, torch.randn(N, H)), (turned, lengths)):
        close(torch.vmap(run)(over), torch.stack([run(x) for x in over]))


@pytest.mark.parametrize("parts", PARTS)
def test_vmap_of_a_gradient_and_a_gradient_of_vmap(parts: str) -> None:
    q, k, v = heads(n=(N,))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, **PARTS[parts]).square().sum()

    slope = torch.func.grad(loss, argnums=(0, 1, 2))
    one_by_one = [slope(*entry) for entry in zip(q, k, v, strict=True)]
    expected = tuple(torch.stack(several) for several in zip(*one_by_one, strict=True))
    close(torch.vmap(slope)(q, k, v), expected)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    close(torch.autograd.grad(torch.vmap(loss)(*leaves).sum(), leaves), expected)


def test_vmap_of_a_map() -> None:
    q, k, v = heads(n=(N,))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal())
        return out, amap.dense(), amap.lse, amap.entropy()

    expected = [torch.stack(x) for x in zip(*(run(*e) for e in zip(q, k, v, strict=True)), strict=True)]
    close(list(torch.vmap(run)(q, k, v)), expected)
    lengths = torch.tensor([[4, 7], [1, 2], [7, 0]])

    def padded(n: Tensor) -> tuple[Tensor, Tensor]:
        _, amap = mh.attention_with_map(q[0], k[0], v[0], mask=mh.Lengths(n))
        return amap.dense(), amap.lse

    expected = [torch.stack(x) for x in zip(*map(padded, lengths), strict=True)]
    close(list(torch.vmap(padded)(lengths)), expected)


def test_vmap_of_a_layer() -> None:
    layer, x = mh.MultiHeadAttention(12, 3, position=mh.Rotary(4), bias=mh.ALiBi(3)), torch.randn(N, 2, 5, 12)
    expected = torch.stack([layer(entry, mask=mh.Causal()) for entry in x])
    torch.testing.assert_close(torch.vmap(lambda x: layer(x, mask=mh.Causal()))(x), expected)


@pytest.mark.parametrize("kernel", ["native", "sdpa", "chunked"])
def test_a_kernel_by_name_under_vmap_raises(kernel: str) -> None:
    q, k, v = heads(n=(N,))
    with pytest.raises(ValueError, match=rf'^kernel="{kernel}" doesn\'t support this: .*vmap') as caught:
        torch.vmap(lambda q, k, v: mh.attention(q, k, v, kernel=kernel))(q, k, v)
    assert "\n" not in str(caught.value)


def test_dropout_under_vmap_follows_its_randomness() -> None:
    q, k, v = heads(n=(N,))
    run = torch.vmap(lambda q, k, v: mh.attention(q, k, v, dropout_p=0.5), randomness="different")
    assert run(q, k, v).shape == (N, B, H, 5, D)


# -- batched gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [5, 300], ids=["short", "long"])
@pytest.mark.parametrize("parts", [name for name in PARTS if name not in ("keep", "dense")])
@pytest.mark.parametrize("kernel", ALL)
def test_batched_gradients_are_a_loop(kernel: str, parts: str, t: int) -> None:
    """By `is_grads_batched`, and by vmap around a gradient whose forward pass ran before."""
    leaves = [x.requires_grad_() for x in heads(t, 7, torch.float32)]
    if kernel == "sdpa" and parts in ("alibi", "relative"):
        pytest.skip("it has no softcap and no sinks")
    out = mh.attention(*leaves, **PARTS[parts], kernel=kernel)
    upstream = torch.randn(N, *out.shape)

    def gradients(one: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, one, retain_graph=True)

    expected = tuple(torch.stack(x) for x in zip(*map(gradients, upstream), strict=True))
    close(torch.autograd.grad(out, leaves, upstream, is_grads_batched=True, retain_graph=True), expected)
    close(torch.vmap(gradients)(upstream), expected)
    twice = torch.vmap(torch.vmap(gradients))(torch.stack((upstream, -upstream)))
    close(tuple(x[1] for x in twice), tuple(-x for x in expected))


def assert_batched(out: Tensor, leaves: list[Tensor]) -> None:
    upstream = torch.randn(N, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, upstream, is_grads_batched=True, retain_graph=True)
    for n in range(N):
        expected = torch.autograd.grad(out, leaves, upstream[n], retain_graph=True)
        close(tuple(x[n] for x in found), expected)


@pytest.mark.parametrize("kernel", ["native", "chunked"])
def test_batched_gradients_of_biases_sinks_and_maps(kernel: str) -> None:
    q, k, v = (x.float() for x in heads())
    for make, table in (
        (mh.Relative, torch.randn(H, 5)),
        (mh.ALiBi, torch.rand(H)),
        (mh.Dense, torch.randn(H, 5, 7)),
    ):
        leaves = [table.requires_grad_(), torch.randn(H, requires_grad=True)]
        assert_batched(mh.attention(q, k, v, bias=make(leaves[0]), sink=leaves[1], kernel=kernel), leaves)


def test_batched_gradients_through_dropout_are_those_of_the_drawn_mask() -> None:
    leaves = [x.requires_grad_() for x in heads()]
    assert_batched(mh.attention(*leaves, dropout_p=0.5, kernel="chunked"), leaves)


@pytest.mark.parametrize("t", [5, 300], ids=["short", "long"])
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, in forward mode
def test_a_vectorized_jacobian(strategy: str, t: int) -> None:
    q, k, v = heads(t, t, torch.float32)

    def run(q: Tensor) -> Tensor:
        return mh.attention(q, k, v, mask=mh.Causal())[:, :, ::100].sum((0, 1))

    if strategy == "forward-mode":
        q = q[:, :, -2:]  # one pass per entry of q
    jacobian = torch.autograd.functional.jacobian
    close(jacobian(run, q, vectorize=True, strategy=strategy), jacobian(run, q))


@pytest.mark.parametrize("kernel", ["auto", "native", "sdpa", "chunked"])
def test_a_second_gradient_of_batched_ones_raises(kernel: str) -> None:
    """Around PyTorch's kernel in PyTorch's own words: inside vmap its gradient can't be marked."""
    refused = "is not implemented" if kernel == "sdpa" else "got a second one"
    leaves = [x.float().requires_grad_() for x in heads()]
    out = mh.attention(*leaves, kernel=kernel)
    upstream = torch.randn(N, *out.shape)
    (dq,) = torch.autograd.grad(out, leaves[0], upstream, is_grads_batched=True, create_graph=True)
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(dq.square().sum(), leaves[0])
    (dq,) = torch.vmap(lambda one: torch.autograd.grad(out, leaves[0], one, create_graph=True))(upstream)
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(dq.square().sum(), leaves[0])


def test_second_derivatives_by_torch_func() -> None:
    """There the kernel is chosen inside: `auto` takes one that PyTorch can differentiate twice."""
    q, k, v = heads(2, 3)

    def loss(q: Tensor, kernel: str = "auto") -> Tensor:
        return mh.attention(q, k, v, mask=mh.Causal(), kernel=kernel).square().sum()

    expected = torch.autograd.functional.hessian(lambda q: loss(q, "reference"), q)
    close(torch.func.jacrev(torch.func.jacrev(loss))(q), expected)
    with pytest.raises(ValueError, match="no second gradient"):
        torch.func.jacrev(torch.func.jacrev(lambda q: loss(q, "sdpa")))(q)


# -- fake tensors ------------------------------------------------------------------------------------

FAKE_MASKS: dict[str, Callable[[], Mask]] = {
    "causal": mh.Causal,
    "window": lambda: mh.Causal() & mh.Window(left=3),
    "lengths": lambda: mh.Lengths(torch.tensor([4, 7])) | mh.Prefix(torch.tensor([1, 1])),
    "left lengths": lambda: mh.Lengths(torch.tensor([4, 7]), left=True),
    "documents": lambda: mh.Documents(torch.zeros(7, dtype=torch.int64)),
    "keep": lambda: mh.Keep(torch.ones(5, 7, dtype=torch.bool)),
}


@pytest.mark.parametrize("mask", FAKE_MASKS)
@pytest.mark.parametrize("kernel", ALL)
def test_fake_tensors_have_shapes(kernel: str, mask: str) -> None:
    with FakeTensorMode():
        q, k, v = (torch.randn(B, h, m, D, requires_grad=True) for h, m in ((H, 5), (G, 7), (G, 7)))
        out = mh.attention(q, k, v, mask=FAKE_MASKS[mask](), kernel=kernel)
        assert out.shape == (B, H, 5, D)
        assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]
        out, amap = mh.attention_with_map(q, k, v, mask=FAKE_MASKS[mask](), kernel=kernel)
        assert out.shape == (B, H, 5, D)
        assert (amap.lse.shape, amap.dense().shape) == ((B, H, 5), (B, H, 5, 7))
    mh.explain(q, k, v, mask=mh.Causal())  # outside the mode too


@pytest.mark.parametrize("kernel", ["auto", "native", "chunked", "reference"])
def test_fake_biases_sinks_and_offsets(kernel: str) -> None:
    with FakeTensorMode():
        q, k, v = (torch.randn(B, h, m, D) for h, m in ((H, 5), (G, 7), (G, 7)))
        for bias in (mh.ALiBi(torch.rand(H)), mh.Relative(torch.rand(H, 5)), mh.Dense(torch.rand(H, 5, 7))):
            rest = {"sink": torch.randn(H), "offset": torch.tensor([0, 3]), "mask": mh.Causal()}
            assert mh.attention(q, k, v, bias=bias, **rest, kernel=kernel).shape == (B, H, 5, D)


def test_layers_of_fake_tensors() -> None:
    with FakeTensorMode():
        layer = mh.MultiHeadAttention(
            12, 6, kv_heads=3, position=mh.Rotary(2), bias=mh.ALiBi(6), qk_norm=torch.nn.RMSNorm
        )
        x = torch.randn(2, 5, 12)
        layer(x, mask=mh.Causal()).sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
        out, amap = layer.attend(x)
        assert (out.shape, amap.shape) == ((2, 5, 12), (2, 6, 5, 5))
        with torch.no_grad():
            assert layer(x[:, :1], cache=mh.Cache()).shape == (2, 1, 12)
        assert mh.SelfAttention(12)(x).shape == mh.CrossAttention(12)(x, x).shape == (2, 5, 12)
