"""Presentation 1: SelfAttention, MultiHeadSelfAttention, and the test values."""

import math
from pathlib import Path

import make_test_values
import pytest
import torch

from manyheads import Lengths
from manyheads.classic import test_values
from manyheads.classic.modeling_attention import MultiHeadSelfAttention, SelfAttention
from manyheads.classic.test_values import MultiHeadAttentionTestValues, SelfAttentionTestValues
from tests.errors import raises


def close(mine, other, atol=1e-12):
    torch.testing.assert_close(mine, other, atol=atol, rtol=0)


def assign(model, values, names):
    for name in names.split():
        getattr(model, name).weight.data = getattr(values, f"{name}_weight")
        getattr(model, name).bias.data = getattr(values, f"{name}_bias")


def compare(output, expected):
    """As in the exercise: wrong shapes and wrong values have different messages."""
    assert output.shape == expected.shape, f"wrong shape: {output.shape}, not {expected.shape}"
    assert torch.allclose(output, expected, atol=1e-6), "right shape, wrong values"


def textbook(model, x):
    """The presentation's formula in plain PyTorch: output and probabilities [batch * heads, seq, seq]."""
    b, t, _ = x.shape
    h, d = model.num_heads, model.head_size

    def split(y):
        return y.reshape(b, t, h, d).transpose(1, 2).reshape(b * h, t, d)

    q, k, v = split(model.q(x)), split(model.k(x)), split(model.v(x))
    scores = q @ k.transpose(1, 2) / math.sqrt(d)
    if model.causal:
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
    probs = scores.softmax(-1)
    out = (probs @ v).reshape(b, h, t, d).transpose(1, 2).reshape(b, t, h * d)
    return model.mix(out), probs


def test_the_self_attention_exercise():
    model = SelfAttention(input_size=7, hidden=9)
    assign(model, SelfAttentionTestValues, "q k v")
    assert SelfAttentionTestValues.output.shape == (3, 5, 9)
    compare(model(SelfAttentionTestValues.x), SelfAttentionTestValues.output)
    with pytest.raises(AssertionError, match="wrong shape"):
        compare(model(SelfAttentionTestValues.x)[0], SelfAttentionTestValues.output)
    with pytest.raises(AssertionError, match="wrong values"):
        compare(model(SelfAttentionTestValues.x + 1), SelfAttentionTestValues.output)


@pytest.mark.parametrize("causal", [False, True])
def test_the_multi_head_exercise(causal):
    values = MultiHeadAttentionTestValues
    model = MultiHeadSelfAttention(input_size=7, hidden=9, num_heads=3, causal=causal)
    assign(model, values, "q k v mix")
    expected = values.output_causal if causal else values.output
    assert expected.shape == (3, 5, 9)
    compare(model(values.x), expected)
    compare(model(values.x, return_attention=True)[0], expected)


def test_the_values_are_those_that_the_script_writes():
    assert Path(test_values.__file__).with_suffix(".safetensors").read_bytes() == make_test_values.content()


def test_self_attention_divides_by_its_scale():
    torch.manual_seed(0)
    model = SelfAttention(7, 9).double()
    assert model.scale == 3.0
    assert [layer.weight.shape for layer in (model.q, model.k, model.v)] == [(9, 7)] * 3
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    for scale in (model.scale, 0.5):  # the attribute is the one that counts
        model.scale = scale
        want = (model.q(x) @ model.k(x).transpose(1, 2) / scale).softmax(-1) @ model.v(x)
        close(model(x), want)
    out, amap = model.attend(x, mask=Lengths(4))
    assert amap.shape == (2, 1, 5, 5)
    assert (amap[:, :, :, 4] == 0).all()
    close(out, amap.dense()[:, 0] @ model.v(x))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_are_those_of_the_textbook(causal):
    torch.manual_seed(0)
    model = MultiHeadSelfAttention(11, 15, 3, causal=causal).double()
    assert (model.num_heads, model.head_size, model.causal, model.dropout) == (3, 5, causal, 0)
    assert model.scale == math.sqrt(5)
    x = torch.randn(2, 4, 11, dtype=torch.float64, requires_grad=True)
    want, wanted_probs = textbook(model, x)
    out, probs = model(x, return_attention=True)
    assert probs.shape == (6, 4, 4)
    close(out, want)
    close(probs, wanted_probs)
    close(model(x), want)
    mapped, amap = model.attend(x)
    close(mapped, want)
    close(amap[0, 0], probs[0])  # probs[0] is sequence 0 head 0
    close(amap[1, 0], probs[3])  # and probs[num_heads] sequence 1 head 0
    for mine, other in ((out, want), (probs.square(), wanted_probs.square())):  # both in the graph
        mine_grad, other_grad = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (mine, other))
        close(mine_grad, other_grad)


def test_causal_attends_to_itself_and_earlier_tokens():
    torch.manual_seed(0)
    model = MultiHeadSelfAttention(7, 9, 3, causal=True)
    x = torch.randn(2, 5, 7)
    out, probs = model(x, return_attention=True)
    assert (probs.triu(1) == 0).all()  # exactly: one softmax, not a second over it
    close(probs.sum(-1), torch.ones(6, 5), 1e-6)
    close(out[:, 0], model.mix(model.v(x[:, 0])), 1e-6)  # the first token sees itself alone
    model.causal = False
    close(model(x)[:, -1], out[:, -1], 1e-6)  # for the last one nothing is hidden


def test_the_returned_probabilities_are_after_dropout():
    torch.manual_seed(0)
    model = MultiHeadSelfAttention(7, 9, 3, dropout=0.5)
    x = torch.randn(2, 5, 7)
    out, probs = model(x, return_attention=True)
    assert (probs == 0).any()
    v = model.v(x).unflatten(-1, (3, 3)).transpose(1, 2).flatten(0, 1)
    heads = (probs @ v).unflatten(0, (2, 3)).transpose(1, 2).flatten(2)
    close(out, model.mix(heads), 1e-6)
    _, amap = model.attend(x)
    whole = model.eval()(x, return_attention=True)[1]
    assert (whole > 0).all()
    close(amap.dense().flatten(0, 1), whole, 1e-6)  # the map: before dropout
    kept = probs != 0
    close(probs[kept], (2 * whole)[kept], 1e-6)
    close(model(x), model(x), 0)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_masked_in_the_map(causal):
    """The presentation's picture: three sequences of lengths 3, 4 and 7, padded to 7."""
    torch.manual_seed(0)
    model = MultiHeadSelfAttention(input_size=11, hidden=15, num_heads=3, causal=causal)
    x = torch.randn(3, 7, 11)
    out, amap = model.attend(x, mask=Lengths(torch.tensor([3, 4, 7])))
    for b, n in enumerate([3, 4, 7]):
        weights = amap[b]  # [h, 7, 7]
        assert (weights[:, :, n:] == 0).all()
        close(weights.sum(-1), torch.ones(3, 7), 1e-6)
        if causal:
            assert (weights.triu(1) == 0).all()
        close(out[b, :n], model(x[b : b + 1, :n])[0], 1e-6)  # as if the padding weren't there


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MultiHeadSelfAttention(7, 9, 2), "num_heads = 2.* hidden = 9"),
        (lambda: MultiHeadSelfAttention(7, 9, 0), "num_heads = 0.* hidden = 9"),
        (lambda: MultiHeadSelfAttention(7, 9, 3, dropout=-1), "dropout .*between 0 and 1, .*-1"),
        (lambda: SelfAttention(0, 9), "input_size .*at least 1, .*0"),
        (lambda: SelfAttention(7, 9)(torch.zeros(5, 7)), r"Expected x to be \[batch, seq, 7\], got \[5, 7\]"),
        (
            lambda: MultiHeadSelfAttention(7, 9, 3)(torch.zeros(2, 5, 9)),
            r"Expected x to be \[batch, seq, 7\], got \[2, 5, 9\]",
        ),
    ],
)
def test_invalid_arguments_raise(make, says):
    with raises(ValueError, match=says):
        make()


def test_token_ids_are_not_embeddings():
    with pytest.raises(TypeError, match=r"x to be a tensor \[batch, seq, 7\] of floats, got .*int64"):
        SelfAttention(7, 9)(torch.zeros(2, 5, 7, dtype=torch.int64))
