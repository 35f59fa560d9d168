"""Presentation 4: sequence first, keyword arguments, scores to override."""

import copy
import math

import pytest
import torch
from torch import nn

from manyheads.classic.annotated import MultiHeadAttention, PrepareForMultiHeadAttention
from tests.errors import raises

INF = float("inf")


def close(mine, other, atol=1e-12):
    torch.testing.assert_close(mine, other, atol=atol, rtol=0)


def made(heads=3, d_model=12, dropout_prob=0.0, kind=MultiHeadAttention, **options):
    torch.manual_seed(0)
    return kind(heads, d_model, dropout_prob=dropout_prob, **options).double()


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def textbook(model, query, key, value, mask=None, added=0.0):
    """The presentation's formula in plain PyTorch: output, and weights [seq_q, seq_k, batch, heads]."""
    q, k, v = model.query(query), model.key(key), model.value(value)
    scores = (torch.einsum("ibhd,jbhd->ijbh", q, k) + added) * model.scale
    if mask is not None:
        scores = scores.masked_fill(mask[..., None] == 0, -INF)
    weights = model.softmax(scores)
    out = torch.einsum("ijbh,jbhd->ibhd", weights, v)
    return model.output(out.flatten(2)), weights


@pytest.mark.parametrize("bias", [True, False])
def test_prepare_splits_the_last_dimension(bias):
    prepare = PrepareForMultiHeadAttention(10, 3, 4, bias)
    assert (prepare.heads, prepare.d_k) == (3, 4)
    assert prepare.linear.weight.shape == (12, 10)
    assert (prepare.linear.bias is not None) == bias
    x = torch.randn(5, 2, 10)
    assert prepare(x).shape == (5, 2, 3, 4)
    assert prepare(x[0]).shape == (2, 3, 4)
    close(prepare(x)[1, 0, 2], prepare.linear(x[1, 0])[8:], 1e-6)


def test_attributes():
    model = MultiHeadAttention(4, 8)
    assert (model.heads, model.d_k, model.scale) == (4, 2, 1 / math.sqrt(2))
    assert model.softmax.dim == 1
    assert model.dropout.p == 0.1
    assert model.attn is None
    assert model.tracker is None
    plain = MultiHeadAttention(4, 8, bias=False)
    assert plain.query.linear.bias is None
    assert plain.key.linear.bias is None
    assert plain.value.linear.bias is not None  # always has one
    assert plain.output.bias is not None


MASKS = {
    "none": None,
    "full": (4, 6, 2),
    "one query": (1, 6, 2),
    "one batch": (4, 6, 1),
    "one of both": (1, 6, 1),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_it_equals_the_textbook_formula(shape):
    model = made()
    inputs = [draw(n, 2, 12).requires_grad_() for n in (4, 6, 6)]
    mask = None
    if shape:
        mask = torch.rand(shape) < 0.5
        mask[:, 0] = True
    want, weights = textbook(model, *inputs, mask)
    query, key, value = inputs
    out = model(query=query, key=key, value=value, mask=mask)
    close(out, want)
    assert model.attn.shape == (4, 6, 2, 3)
    assert not model.attn.requires_grad
    close(model.attn, weights.detach())
    wanted = [*inputs, *model.parameters()]
    mine = torch.autograd.grad(out.square().sum(), wanted)
    other = torch.autograd.grad(want.square().sum(), wanted)
    for a, b in zip(mine, other, strict=True):
        close(a, b)
    mapped, amap = model.attend(query=query, key=key, value=value, mask=mask)
    close(mapped, want)
    close(amap.dense().permute(2, 3, 0, 1), weights.detach())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64])
def test_zero_of_any_dtype_is_masked_and_anything_else_visible(dtype):
    model, x = made(), draw(3, 1, 12)
    mask = torch.tensor([[1, 0, 0], [2, 1, 0], [1, 1, 0]]).to(dtype)[:, :, None]
    if dtype.is_floating_point:
        mask = mask * -0.5
    model(query=x, key=x, value=x, mask=mask)
    shown = torch.tensor([[True, False, False], [True, True, False], [True, True, False]])
    assert ((model.attn[:, :, 0] > 0) == shown[:, :, None]).all()


def test_a_query_without_visible_keys_gets_zeros():
    model, x = made(), draw(3, 2, 12)
    mask = torch.ones(3, 3, 2)
    mask[1, :, 0] = 0
    out = model(query=x, key=x, value=x, mask=mask)
    close(out[1, 0], model.output.bias)
    assert (model.attn[1, :, 0] == 0).all()


def test_the_tracker_gets_weights_before_dropout_and_attn_those_after():
    model, x = made(dropout_prob=0.5), draw(5, 2, 12)
    seen = {}
    model.tracker = seen.__setitem__
    out = model(query=x, key=x, value=x)
    before = seen["attn"]
    assert list(seen) == ["attn"]
    assert before.shape == model.attn.shape == (5, 5, 2, 3)
    close(before.sum(1), torch.ones_like(before.sum(1)))
    close(before, textbook(model, x, x, x)[1])
    kept = model.attn != 0
    assert 0 < kept.sum() < kept.numel()
    close(model.attn[kept], (2 * before)[kept])
    heads = torch.einsum("ijbh,jbhd->ibhd", model.attn, model.value(x))  # what made the output
    close(out, model.output(heads.flatten(2)))
    model.eval()(query=x, key=x, value=x)
    close(model.attn, seen["attn"].detach())
    model.tracker = None
    close(copy.deepcopy(model).attn, model.attn)  # no part of a graph, which can't be copied


class Relative(MultiHeadAttention):
    """q · k plus a learned number for each distance and head."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.table = nn.Parameter(torch.randn(11, self.heads))

    def added(self, t, s):
        distance = torch.arange(s)[None, :] - torch.arange(t)[:, None]
        return self.table[distance + 5][:, :, None]  # [t, s, 1, heads]

    def get_scores(self, query, key):
        return super().get_scores(query, key) + self.added(len(query), len(key))


@pytest.mark.parametrize("masked", [False, True])
def test_overridden_scores_are_used_scaled_masked_and_learned(masked):
    model = made(kind=Relative)
    query, key, value = (draw(n, 2, 12) for n in (4, 6, 6))
    mask = torch.ones(4, 6, 1).tril(1) if masked else None
    want, weights = textbook(model, query, key, value, mask, model.added(4, 6))
    out = model(query=query, key=key, value=value, mask=mask)
    close(out, want)
    close(model.attn, weights.detach())
    assert (out - textbook(model, query, key, value, mask)[0]).abs().max() > 0.01
    wanted = [model.table, *model.query.parameters(), *model.value.parameters()]
    mine = torch.autograd.grad(out.square().sum(), wanted)
    other = torch.autograd.grad(want.square().sum(), wanted)
    for a, b in zip(mine, other, strict=True):
        close(a, b)
    mapped, amap = model.attend(query=query, key=key, value=value, mask=mask)
    close(mapped, want)
    close(amap.dense().permute(2, 3, 0, 1), weights.detach())


def test_scores_overridden_on_an_instance():
    model, x = made(), draw(4, 2, 12)
    model.get_scores = lambda query, key: torch.zeros(4, 4, 2, 3, dtype=torch.float64)
    model(query=x, key=x, value=x)
    close(model.attn, torch.full((4, 4, 2, 3), 0.25, dtype=torch.float64))


def test_get_scores_is_the_plain_product():
    model, q, k = made(), draw(4, 2, 3, 4), draw(6, 2, 3, 4)
    close(model.get_scores(q, k), torch.einsum("ibhd,jbhd->ijbh", q, k))


def test_an_overridden_mask_may_differ_by_head():
    class FirstHeadSeesItself(MultiHeadAttention):
        def prepare_mask(self, mask, query_shape, key_shape):
            heads = super().prepare_mask(mask, query_shape, key_shape).repeat(1, 1, 1, self.heads)
            heads[..., 0] = torch.eye(query_shape[0])[..., None]
            return heads

    model, x = made(kind=FirstHeadSeesItself), draw(4, 2, 12)
    model(query=x, key=x, value=x, mask=torch.ones(4, 4, 1))
    close(model.attn[..., 0], torch.eye(4, dtype=torch.float64)[..., None].expand(4, 4, 2))
    assert (model.attn[..., 1:] > 0).all()


@pytest.mark.parametrize("kind", [MultiHeadAttention, Relative])
def test_a_masked_nan_does_not_leak(kind):
    model, x = made(kind=kind), draw(4, 2, 12)
    mask = torch.ones(4, 4, 1)
    mask[:, 3] = 0
    y = x.clone()
    y[3] = float("nan")
    results = []
    for source in (x, y):
        query = x.clone().requires_grad_()
        out = model(query=query, key=source, value=source, mask=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), query)))
    for a, b in zip(*results, strict=True):
        close(a, b)


X = torch.zeros(4, 2, 12)


def call(model=None, query=X, key=X, value=X, mask=None):
    (model or MultiHeadAttention(3, 12))(query=query, key=key, value=value, mask=mask)


def overriding(name, returned):
    model = MultiHeadAttention(3, 12)
    setattr(model, name, lambda *_: returned)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MultiHeadAttention(5, 12), "heads = 5.* d_model = 12"),
        (lambda: MultiHeadAttention(3, 0), "d_model .*at least 1, .*0"),
        (lambda: call(query=X[..., :8]), r"Expected query to be \[seq_q, batch, 12\], got \[4, 2, 8\]"),
        (lambda: call(key=X[0]), r"Expected key to be \[seq_k, batch, 12\], got \[2, 12\]"),
        (lambda: call(key=X[:3]), r"key \[3, 2, 12\], value \[4, 2, 12\]"),
        (lambda: call(query=X[:, :1]), r"the same batch in query, key and value.*query \[4, 1, 12\]"),
        (
            lambda: call(mask=torch.ones(4, 4)),
            r"Expected mask to be .* = \[4 or 1, 4, 2 or 1\], got \[4, 4\]",
        ),
        (lambda: call(mask=torch.ones(3, 4, 1)), r"got \[3, 4, 1\]"),
        (lambda: call(mask=torch.ones(4, 1, 1)), r"got \[4, 1, 1\]"),
        (lambda: call(mask=torch.ones(4, 4, 3)), r"got \[4, 4, 3\]"),
        (
            lambda: call(overriding("get_scores", torch.zeros(2, 3, 4, 4))),
            r"Expected get_scores to return .* = \[4, 4, 2, 3\], got \[2, 3, 4, 4\]",
        ),
        (
            lambda: call(overriding("prepare_mask", torch.ones(4, 4, 2)), mask=torch.ones(4, 4, 1)),
            r"Expected prepare_mask to return .* = \[4, 4, 2, 3\], got \[4, 4, 2\]",
        ),
        (
            lambda: call(overriding("get_scores", torch.full((4, 4, 2, 3), INF))),
            "scores or -inf .* from get_scores, got NaN or .inf",
        ),
        (
            lambda: PrepareForMultiHeadAttention(12, 3, 4, True)(X[..., :8]),
            r"Expected x to be \[seq, batch, 12\], got \[4, 2, 8\]",
        ),
    ],
)
def test_invalid_arguments_raise(make, says):
    with raises(ValueError, match=says):
        make()


def test_arguments_go_by_name_and_a_mask_is_a_tensor():
    with pytest.raises(TypeError):
        MultiHeadAttention(3, 12)(X, X, X)
    with pytest.raises(TypeError, match=r"Expected mask to be a tensor \[seq_q, seq_k, batch\], got a list"):
        call(mask=[[1]])
