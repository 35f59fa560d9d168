"""Presentation 3: single heads put together."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads import Causal, Lengths
from manyheads.classic.components import (
    CrossAttention,
    MultiHeadedAttention,
    PositionalEncoder,
    SelfAttention,
    attention,
)
from tests.errors import raises


def printed(tensor, numbers):
    """Equal to the printed digits: four decimals."""
    want = torch.tensor([float(n) for n in numbers.split()])
    assert (tensor.flatten() - want).abs().max() <= 0.501e-4


def close(mine, other, atol=1e-5):
    torch.testing.assert_close(mine, other, atol=atol, rtol=0)


def test_positional_encoder_as_printed():
    encoder = PositionalEncoder(512)
    assert encoder.pe.shape == (1, 80, 512)
    assert encoder.d_model == 512
    assert not list(encoder.parameters())  # not learned
    assert list(encoder.state_dict()) == ["pe"]
    out = encoder((torch.arange(1, 513) * 0.01).repeat(1, 4, 1))
    assert out.shape == (1, 4, 512)
    printed(out[0, 0, :5], "0.2263 1.4525 0.6788 1.9051 1.1314")
    printed(out[0, 1, :5], "1.0677 0.9929 1.5007 1.4748 1.9333")
    printed(out[0, 2, -5:], "115.9473 115.1738 116.3998 115.6263 116.8524")
    other = torch.tensor([1.0677, 1.0222, 1.4808, 1.5285, 1.8931])  # twice the index in the exponent
    assert (out[0, 1, :5] - other).abs().max() > 0.01


def test_positional_encoder_is_its_formula():
    pe = PositionalEncoder(64, max_seq_len=17).pe[0]
    for position in (0, 1, 16):
        for i in (0, 3, 31):
            angle = position / 10000 ** (2 * i / 64)
            assert abs(float(pe[position, 2 * i]) - math.sin(angle)) < 1e-6
            assert abs(float(pe[position, 2 * i + 1]) - math.cos(angle)) < 1e-6


def test_positional_encoder_moves_and_keeps_the_dtype():
    encoder = PositionalEncoder(8)
    for dtype in (torch.float64, torch.bfloat16):
        assert encoder(torch.zeros(1, 3, 8, dtype=dtype)).dtype == dtype
    longest = encoder(torch.zeros(2, 80, 8))  # exactly as long as it may be
    close(longest, encoder.pe.expand(2, 80, 8), 0)


def qkv():
    torch.manual_seed(42)
    return torch.randn(2, 5, 512), torch.randn(2, 5, 512), torch.randn(2, 5, 256)


def test_attention_as_printed():
    q, k, v = qkv()
    out, weights = attention(q, k, v)
    assert out.shape == (2, 5, 256)
    assert weights.shape == (2, 5, 5)
    printed(out[0, 0, :5], "-1.3709 -0.6827 0.3234 0.8677 -0.1474")
    printed(out[-1, -1, -3:], "0.6225 -0.4946 -0.2935")
    close(out, F.scaled_dot_product_attention(q, k, v))
    close(weights.sum(-1), torch.ones(2, 5))
    close(weights @ v, out)


def test_attention_under_a_mask():
    q, k, v = qkv()
    out, weights = attention(q, k, v, mask=Causal())
    close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert (weights.triu(1) == 0).all()
    out, weights = attention(q, k, v, Lengths(torch.tensor([0, 3])))
    assert (out[0] == 0).all()
    assert (weights[0] == 0).all()
    assert (weights[1, :, 3:] == 0).all()


def test_attention_is_differentiable_through_output_and_weights():
    q, k, v = (x.double().requires_grad_() for x in qkv())
    for mask, hidden in ((None, None), (Causal(), torch.ones(5, 5, dtype=torch.bool).triu(1))):
        out, weights = attention(q, k, v, mask)
        scores = q @ k.transpose(1, 2) / math.sqrt(512)
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        want = scores.softmax(-1)
        mine = torch.autograd.grad(out.sum() + weights.square().sum(), (q, k, v))
        other = torch.autograd.grad((want @ v).sum() + want.square().sum(), (q, k, v))
        for a, b in zip(mine, other, strict=True):
            close(a, b, 1e-12)


def test_self_attention_as_printed():
    torch.manual_seed(48)
    head = SelfAttention(512, 64, 512)
    out = head(torch.randn(4, 10, 512))
    assert out.shape == (4, 10, 512)
    want = torch.tensor([8.6836e-02, -4.1725e-02, -2.5798e-01, -9.6712e-02, 3.00e-05])
    digits = torch.tensor([1e-6, 1e-6, 1e-5, 1e-6, 1e-6])  # the fifth, a near-cancellation, has two
    assert ((out[0, 0, :5] - want).abs() <= 0.55 * digits).all()
    printed(out[-1, -1, :4], "0.1849 0.3706 0.1488 0.0898")
    assert [layer.weight.shape for layer in (head.linear_q, head.linear_k, head.linear_v)] == [
        (64, 512),
        (64, 512),
        (512, 512),
    ]


def test_self_attention_ignores_order():
    """Permuting the input permutes the output; a causal mask ends that."""
    torch.manual_seed(0)
    head, x, order = SelfAttention(16, 8, 12), torch.randn(2, 7, 16), torch.randperm(7)
    close(head(x[:, order]), head(x)[:, order])
    assert (head(x[:, order], Causal()) - head(x, Causal())[:, order]).abs().max() > 0.01


def test_cross_attention_as_printed():
    torch.manual_seed(14)
    head = CrossAttention(512, 256, 64, 128)
    x, y = torch.randn(3, 10, 512), torch.randn(3, 10, 256)
    out = head(x, y)
    assert out.shape == (3, 10, 128)
    printed(out[0, 0, :5], "-0.1544 0.0847 0.2329 0.0549 -0.1424")
    want, _ = attention(head.linear_q(x), head.linear_k(y), head.linear_v(y))
    close(out, want)


@pytest.mark.parametrize("mask", [None, Causal(), Lengths(torch.tensor([1, 4, 9]))])
def test_heads_are_attention_on_their_layers_with_any_mask(mask):
    torch.manual_seed(0)
    x, y = torch.randn(3, 5, 16), torch.randn(3, 9, 24)
    cross, itself = CrossAttention(16, 24, 8, 6), SelfAttention(24, 8, 6)
    for head, inputs in ((cross, (x, y)), (itself, (y, y))):
        q, k, v = head.linear_q(inputs[0]), head.linear_k(inputs[1]), head.linear_v(inputs[1])
        want, weights = attention(q, k, v, mask=mask)
        given = inputs if head is cross else inputs[:1]
        close(head(*given, mask=mask), want)
        out, amap = head.attend(*given, mask=mask)
        close(out, want)
        close(amap[:, 0], weights)


def test_multi_headed_attention_as_printed():
    torch.manual_seed(10)
    modules = [SelfAttention(256, 128, 8) for _ in range(8)]
    multi = MultiHeadedAttention(modules, 32)
    x = torch.randn(3, 10, 256)
    out = multi(x)
    assert out.shape == (3, 10, 32)
    printed(out[0, 0, :5], "0.2290 -0.0350 0.0918 -0.1069 -0.1679")
    assert list(multi.module_list) == modules
    assert multi.linear.in_features == 64
    close(out, multi.linear(torch.cat([head(x) for head in modules], -1)), 0)


def test_multi_headed_attention_of_cross_heads_of_several_widths_under_a_mask():
    torch.manual_seed(0)
    heads = nn.ModuleList([CrossAttention(16, 24, 8, 6), CrossAttention(16, 24, 4, 10)])
    multi = MultiHeadedAttention(heads, 5)
    assert multi.linear.in_features == 16
    x, y, mask = torch.randn(2, 5, 16), torch.randn(2, 5, 24), Causal()
    want = multi.linear(torch.cat([head(x, y, mask) for head in heads], -1))
    close(multi(x, y, mask=mask), want, 0)
    out, maps = multi.attend(x, y, mask=mask)
    close(out, want)
    assert [amap.shape for amap in maps] == [(2, 1, 5, 5)] * 2
    assert all((amap.dense().triu(1) == 0).all() for amap in maps)


X = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PositionalEncoder(7), "Expected d_model to be even, .* got 7. Use 8"),
        (lambda: PositionalEncoder(0), "d_model .*at least 2, .*0"),
        (
            lambda: PositionalEncoder(8, max_seq_len=4)(X),
            r"max_seq_len = 4 positions, got x \[2, 5, 8\]. Use PositionalEncoder\(8, max_seq_len=5\)",
        ),
        (lambda: PositionalEncoder(6)(X), r"Expected x to be \[N, L, 6\], got \[2, 5, 8\]"),
        (lambda: attention(X, X[..., :6], X), r"got 8 in q \[2, 5, 8\] and 6 in k \[2, 5, 6\]"),
        (lambda: attention(X[0], X, X), r"Expected q to be \[N, L, d_k\], got \[5, 8\]"),
        (lambda: attention(X[:1], X, X), r"the same N in q, k and v.*q \[1, 5, 8\]"),
        (lambda: attention(X, X, X[:, :4]), r"the same length in k and v.*v \[2, 4, 8\]"),
        (lambda: SelfAttention(6, 4, 4)(X), r"Expected x to be \[N, L, 6\], got \[2, 5, 8\]"),
        (lambda: CrossAttention(8, 6, 4, 4)(X, X), r"Expected y to be \[N, S, 6\], got \[2, 5, 8\]"),
        (lambda: CrossAttention(8, 8, 4, 4)(X, X[:1]), r"got x \[2, 5, 8\] and y \[1, 5, 8\]"),
        (lambda: SelfAttention(0, 4, 4), "Expected input_dim to be at least 1"),
        (lambda: MultiHeadedAttention([], 4), "at least one module"),
    ],
)
def test_invalid_sizes_raise(make, says):
    with raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MultiHeadedAttention([nn.Linear(8, 8)], 4), "with a linear_v, such as .*got a Linear"),
        (lambda: attention(X, X, X, torch.ones(5, 5)), "mask .* Tensor .*(Keep|wrap)"),
        (lambda: PositionalEncoder(8)(X.long()), "of floats, got a Tensor of torch.int64"),
    ],
)
def test_invalid_types_raise(make, says):
    with raises(TypeError, match=says):
        make()
