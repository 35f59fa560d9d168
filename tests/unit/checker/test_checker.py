"""The checker: its oracle, its options, its reports, and the command's exit codes."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyheads as mh
from manyheads import checker, kernels, layers
from manyheads.checker import command
from manyheads.checker.bugs import CONVENTIONS, FAMILY, compose, family_of
from manyheads.checker.candidates import names
from manyheads.checker.candidates.construct import parse_arguments
from manyheads.checker.checks.registry import CHECKS
from manyheads.checker.oracle import Attention, Inputs, Weights, exact

pytestmark = pytest.mark.usefixtures("one_thread", "quick")


def bugs(report: checker.Report) -> list[str]:
    """Return the names of the bugs that a report found."""
    return [diagnosis.bug for diagnosis in report.diagnosis]


def failures(report: checker.Report) -> list[checker.Check]:
    return [check for check in report.checks if check.status == "failed"]


# -- the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_oracle_is_attention(causal: bool, sink: bool, scale: float | None) -> None:
    q, k, v = (torch.randn(2, n, s, 6, dtype=torch.float64) for n, s in ((4, 5), (2, 7), (2, 7)))
    keep = torch.rand(2, 1, 5, 7) < 0.6
    keep[1, :, 2] = False  # a fully masked row
    padding = torch.tensor([7, 4])
    bias = torch.randn(5, 7, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64) if sink else None
    options = {"scale": scale, "sink": sinks, "offset": 2}
    masks = {"keep": keep, "padding": torch.arange(7) < padding[:, None], "causal": causal}
    found = Attention()(Inputs(q, k, v, **masks, bias=bias, need_weights=True, **options))
    mask = mh.Keep(keep) & mh.Lengths(padding)
    mask = mask & mh.Causal() if causal else mask
    out, amap = mh.attention_with_map(q, k, v, mask=mask, bias=mh.Dense(bias), kernel="reference", **options)
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(found.weights, amap.dense())


def test_the_oracle_with_projections_is_our_layer() -> None:
    layer = layers.MultiHeadAttention(24, 4).double()
    named = dict(layer.named_parameters())
    w = Weights(4, 4, {r: named[f"{r}.weight"] for r in "qkvo"}, {r: named[f"{r}.bias"] for r in "qkvo"})
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(Attention(w)(Inputs(x, x, x)).out, layer(x))


@pytest.mark.full
def test_conventions_change_nothing_and_every_bug_changes_something() -> None:
    """Among inputs of all kinds; a bug that changes nothing could be named for anything."""
    torch.manual_seed(3)
    e, h = 24, 4
    weight = {r: torch.randn(24 if r in "qo" else 12, e, dtype=torch.float64) for r in "qkvo"}
    grouped = Weights(
        h, 2, weight, {r: torch.randn(x.shape[0], dtype=torch.float64) for r, x in weight.items()}
    )
    weight = {r: torch.randn(24, e, dtype=torch.float64) for r in "qkvo"}
    square = Weights(h, h, weight, {r: torch.randn(24, dtype=torch.float64) for r in "qkvo"})
    sunk = replace(square, sink=torch.randn(h, dtype=torch.float64))
    cases: list[tuple[Weights | None, Inputs]] = []
    for w in (grouped, square, sunk):
        x, y, z = (torch.randn(2, 6, e, dtype=torch.float64) for _ in range(3))
        keep = torch.rand(2, 1, 6, 6) < 0.7
        keep[..., 0] = True
        padding = torch.arange(6) < torch.tensor([6, 4])[:, None]
        for query, key, value in ((x, x, x), (x, y, y), (x, y, z)):
            for rest in (
                {},
                {"causal": True},
                {"causal": True, "keep": keep, "need_weights": True},
                {"need_weights": True, "average_weights": True},
                {"padding": padding, "keep": keep, "bias": torch.randn(6, 6).double(), "scale": 0.4},
                {
                    "query_vectors": torch.randn(2, 6, e).double(),
                    "key_vectors": torch.randn(2, 6, e).double(),
                },
            ):
                cases.append((w, Inputs(query, key, value, **rest)))
        cases.append((w, Inputs(x[:, :2], y, y, causal=True, offset=4)))
        cases.append((w, Inputs(x[:, :2], y, y, causal=True)))
    q, k, v = (torch.randn(2, 4, 5, 6, dtype=torch.float64) for _ in range(3))
    hidden = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    hidden[0, :, 1] = False
    cases += [
        (None, Inputs(q, k, v[..., :3], sink=torch.randn(4).double())),
        (None, Inputs(q, k, v, keep=hidden)),
    ]
    cases.append((None, Inputs(q.float() * 40, k.float() * 40, v.float())))
    right = [exact(w, x) for w, x in cases]
    for convention in CONVENTIONS[Attention]:
        for (w, x), want in zip(cases, right, strict=True):
            if x.keep is None or bool(x.keep.any(-1).all()):
                found = exact(w, x, compose(Attention, *convention))
                torch.testing.assert_close(found.out, want.out)
    unchanged = set()
    for bug in family_of(Attention):
        changes = False
        for variant in bug.variants:
            for (w, x), want in zip(cases, right, strict=True):
                try:
                    found = exact(w, x, variant)
                except (RuntimeError, KeyError, IndexError, TypeError):
                    continue
                changes |= found.out.shape != want.out.shape or not torch.allclose(found.out, want.out)
                changes |= found.weights is not None and not (
                    found.weights.shape == want.weights.shape and torch.allclose(found.weights, want.weights)
                )
        if not changes:
            unchanged.add(bug.name)
        assert bug.description
        assert bug.fix
    # These need a layer without an output projection, numbers of segments, or a cache.
    of_caches = {"empty-slots-visible", "cache-order", "cached-keys-as-values"}
    assert unchanged == {"heads-summed", "segments-by-order"} | of_caches


def test_the_family_has_over_a_hundred_bugs() -> None:
    assert len(FAMILY) >= 100


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("q_proj.weight", ("q", "weight", None)),
        ("W_k", ("k", "weight", None)),
        ("b_q", ("q", "bias", None)),
        ("to_out.0.weight", ("o", "weight", None)),
        ("heads.2.query.weight", ("q", "weight", 2)),
        ("in_proj_weight", ("qkv", "weight", None)),
        ("in_proj_bias", ("qkv", "bias", None)),
        ("c_attn.weight", ("qkv", "weight", None)),
        ("to_kv.weight", ("kv", "weight", None)),
        ("query.linear.weight", ("q", "weight", None)),
        ("attention.self.value.bias", ("v", "bias", None)),
        ("norm.weight", None),
        ("mlp.weight", None),
    ],
)
def test_names_of_parameters(path: str, role: Any) -> None:
    assert names.parameter_role(path) == role


def test_constructor_arguments() -> None:
    parsed = {"hidden": 16, "num_heads": 4, "name": "x", "bias": False}
    assert parse_arguments("hidden=16, num_heads=4, name='x', bias=False") == parsed
    for text in ("hidden", "hidden=torch.float", "**x", "hidden=", "hidden=1; x", "f(1)"):
        with pytest.raises(checker.Unclear, match="names and plain values for --init"):
            parse_arguments(text)


class Plain(nn.Module):
    """Two names that mean nothing, and a width that does."""

    def __init__(self, embed_dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.alpha(x), self.beta(x), self.gamma(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5 * self.scale
        return self.delta(scores.softmax(-1) @ v)


WEIGHTS = {"q": "alpha", "k": "beta", "v": "gamma", "o": "delta"}


def test_weights_without_a_known_name_need_an_option() -> None:
    with pytest.raises(checker.Unclear, match=r"no weights for q and k and v .*alpha\.weight.*--weights"):
        checker.check(Plain)
    assert checker.check(Plain, weights=WEIGHTS).passed
    assert checker.check(Plain(24), weights=WEIGHTS).passed  # an instance
    with pytest.raises(checker.Unclear, match=r"to name parameters .alpha.*, got 'epsilon' for q"):
        checker.check(Plain, weights={**WEIGHTS, "q": "epsilon"})


@pytest.mark.full
def test_a_swap_of_queries_and_keys_does_not_pass() -> None:
    swapped = {**WEIGHTS, "q": "beta", "k": "alpha"}
    assert "q-k-swapped" in bugs(checker.check(Plain, weights=swapped))
    with pytest.raises(AssertionError, match="q-k-swapped") as caught:
        checker.assert_attention(Plain, weights=swapped)
    assert "To fix it" in str(caught.value)


@pytest.mark.full
def test_an_unknown_scale_is_reported_to_the_digit() -> None:
    """No bug of the family, and still a true and useful sentence."""

    class Rescaled(Plain):
        def __init__(self, embed_dim: int = 24) -> None:
            super().__init__(embed_dim, scale=1.7)

    found = checker.check(Rescaled, weights=WEIGHTS)
    assert not found.passed
    (diagnosis,) = found.diagnosis
    assert (diagnosis.bug, diagnosis.verified) == ("", False)
    assert f"scores multiplied by {1.7 / 24**0.5:.5g}, where 1/√d = {24**-0.5:.5g}" in diagnosis.description


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out, x: 0.7 * out, "0.7 times what is right"),
        (lambda out, x: out + torch.linspace(0, 1, out.shape[-1]), "the same vector for every query"),
        (lambda out, x: torch.cat((out[:, :1] * 2, out[:, 1:]), 1), "in query 0 only"),
        (
            lambda out, x: torch.cat((out[..., :3] + 1, out[..., 3:] + 0.1 * x[..., 3:] ** 2), -1),
            "no known bug explains it",
        ),
    ],
)
def test_the_report_if_no_bug_fits(change: Any, text: str) -> None:
    class Odd(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return change(super().forward(x), x)

    found = checker.check(Odd, like="self", weights=WEIGHTS)
    assert not found.passed
    assert {diagnosis.bug for diagnosis in found.diagnosis} == {""}
    assert text in found.diagnosis[0].description, found.diagnosis[0].description


def test_invalid_options() -> None:
    for like in ("selfish", "classic.components.Nothing", "classic."):
        with pytest.raises(checker.Unclear, match="--like"):
            checker.check(Plain, like=like)
    with pytest.raises(checker.Unclear, match="Expected --layout batch"):
        checker.check(Plain, layout="tokens")
    with pytest.raises(checker.Unclear, match=r"for --init \(embed_dim, scale\), got 'width'"):
        checker.check(Plain, init={"width": 3})
    with pytest.raises(checker.Unclear, match="is built already"):
        checker.check(Plain(24), init={"embed_dim": 24})

    class Needs(nn.Module):
        def __init__(self, embed_dim: int, flavour: str) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(checker.Unclear, match=r"Needs needs 'flavour'.*--init 'flavour="):
        checker.check(Needs)


# -- what is right passes --------------------------------------------------------------------------


class Ours(nn.Module):
    """An adapter: our layer, with a mask `[b, t, s]`, True = may attend."""

    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.inner = layers.MultiHeadAttention(embed, heads)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_weights: bool = False) -> Any:
        """mask [b, t, s]: True keeps."""
        mask = None if mask is None else mh.Keep(mask[:, None])
        if not return_weights:
            return self.inner(x, mask=mask)
        out, amap = self.inner.attend(x, mask=mask)
        return out, amap.dense()


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "layer", [layers.SelfAttention, layers.CrossAttention, layers.MultiHeadAttention, Ours]
)
def test_our_layers_pass(layer: Any) -> None:
    checker.assert_attention(layer)


@pytest.mark.every(3)
@pytest.mark.parametrize("kernel", kernels.ORDER)
def test_our_kernels_pass(kernel: str) -> None:
    def attention(q, k, v, mask=None, scale=None, sinks=None):  # type: ignore[no-untyped-def]
        """mask [b, 1, t, s]: True keeps."""
        mask = None if mask is None else mh.Keep(mask)
        return mh.attention(q, k, v, mask=mask, scale=scale, sink=sinks, kernel=kernel)

    if kernel == "flex":
        with pytest.raises(checker.Unclear, match='kernel="flex" doesn\'t support this'):
            checker.check(attention, "attention")
        return
    if kernel == "sdpa":  # which has no sink, and refuses odd strides

        def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mh.attention(q, k, v, kernel=kernel)

        found = checker.check(fused)
        assert found.passed
        (convention,) = [check for check in found.checks if check.status == "convention"]
        assert convention.name == "non-contiguous inputs"
        assert "the last dimension of q, k or v isn't contiguous" in convention.reason
        return
    checker.assert_attention(attention, "attention")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name",
    [
        "components.SelfAttention",
        "components.CrossAttention",
        "components.attention",
        "annotated.MultiHeadAttention",
        "components.PositionalEncoder",
        "modeling_attention.SelfAttention",
        "modeling_attention.MultiHeadSelfAttention",
        "torch_multihead.MultiheadAttention",
    ],
)
def test_our_textbook_classes_pass_as_their_own_kind(name: str) -> None:
    module, _, thing = name.partition(".")
    ours = getattr(importlib.import_module(f"manyheads.classic.{module}"), thing)
    found = checker.check(ours, f"classic.{name}")
    assert found.passed, found
    last = found.checks[-1]
    assert last.name == f"like classic.{name}" or "PositionalEncoder" in name
    assert last.status == "passed" or name == "components.attention" or "PositionalEncoder" in name


def test_pytorchs_own_function_passes() -> None:
    checker.assert_attention(F.scaled_dot_product_attention, "sdpa")


def test_pytorchs_own_layer_passes_and_its_conventions_are_reported() -> None:
    options = {"embed_dim": 24, "num_heads": 4}
    found = checker.check(nn.MultiheadAttention, init=options)
    assert found.passed, found
    conventions = {check.option: check for check in found.checks if check.status == "convention"}
    assert set(conventions) == {"empty-rows", "mask-form", "masked-nan", "weights-after-dropout"}
    assert conventions["empty-rows"].reason.startswith("empty-rows-nan: ")
    assert "NaN when weights are requested" in conventions["empty-rows"].reason
    assert not bugs(found)
    strict = checker.check(nn.MultiheadAttention, init=options, strict="empty-rows")
    assert [check.name for check in failures(strict)] == ["empty rows"]
    assert bugs(strict) == ["empty-rows-nan"]


def test_a_configuration_object_is_filled() -> None:
    class Block(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.n_head = config.n_head
            self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
            self.c_proj = nn.Linear(config.n_embd, config.n_embd)
            self.dropout = config.dropout

        def forward(self, x: Tensor) -> Tensor:
            b, t, e = x.shape
            q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(e, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, e))

    found = checker.check(Block)
    assert found.passed, found
    assert "built as Block(config=Namespace(...))" in found.notes


# -- layers like PyTorch's --------------------------------------------------------------------------


class Layer(nn.Module):
    """As `torch.nn.MultiheadAttention`: sequence first, and a boolean mask hides where it is True."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)  # [b, h, t, d]

    def merge(self, x: Tensor) -> Tensor:
        return x.permute(2, 0, 1, 3).flatten(2)  # [t, b, e]

    def shown(self, weights: Tensor, average: bool) -> Tensor:
        return weights.mean(dim=1) if average else weights

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT / self.head_dim**0.5  # [b, h, t, s]
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1).masked_fill(scores == -math.inf, 0.0)
        return weights @ v, weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        out, weights = self.mixed(q, k, v, attn_mask)
        return self.out_proj(self.merge(out)), self.shown(
            weights, average_attn_weights
        ) if need_weights else None


class Always(Layer):
    """As `torch.nn.MultiheadAttention`, `[t, b, e]`, its weights always there, averaged over the heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return super().forward(query, key, value)


class Either(Layer):
    """As `torch.nn.MultiheadAttention`, `[t, b, e]`. Its weights are always there."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, average_attn_weights: bool = True) -> Any:
        return super().forward(query, key, value, True, None, average_attn_weights)


def checked(base: type[Layer], **steps: Any) -> checker.Report:
    return checker.check(type(base.__name__, (base,), {"__doc__": base.__doc__, **steps}), "torch-mha")


@pytest.mark.every(3)
@pytest.mark.parametrize("base", [Layer, Always, Either])
def test_a_layer_like_pytorchs_passes(base: type[Layer]) -> None:
    found = checked(base)
    assert found.passed, found


@pytest.mark.full
@pytest.mark.parametrize(
    ("base", "name", "shown"),
    [
        (Either, "weights-averaged", lambda self, w, average: w.mean(1)),
        (Either, "weights-not-averaged", lambda self, w, average: w),
        (Always, "weights-not-averaged", lambda self, w, average: w),
        (Always, "weights-summed", lambda self, w, average: w.sum(1)),
    ],
)
def test_returned_weights_are_those_of_the_call(base: type[Layer], name: str, shown: Any) -> None:
    found = checked(base, shown=shown)
    assert not found.passed
    assert bugs(found) == [name]
    assert found.pair is not None
    want, got, what = found.pair
    assert what == "weights"
    assert want.shape != got.shape or not torch.allclose(want, got.to(want.dtype), atol=1e-3)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("shown", "shape"),
    [
        (lambda self, w, average: w.mean(-1) if average else w, [3, 4, 5]),
        (lambda self, w, average: w.mean(1, keepdim=True) if average else w, [3, 1, 5, 7]),
    ],
)
def test_weights_of_another_shape_are_a_failure_of_shapes(shown: Any, shape: list[int]) -> None:
    [reason] = [check.reason for check in failures(checked(Layer, shown=shown)) if check.name == "shapes"]
    assert f"[b, t, s] = [3, 5, 7], got {shape}" in reason


@pytest.mark.full
def test_a_wrong_factor_of_the_weights_alone() -> None:
    found = checked(Layer, shown=lambda self, w, average: w.mean(1) * 1.5 if average else w * 1.5)
    (description,) = [diagnosis.description for diagnosis in found.diagnosis]
    assert "the output is right; the returned weights are 1.5 times what is right" in description
    assert "output is wrong" not in description


@pytest.mark.full
def test_a_merge_without_a_transpose_if_the_sequence_comes_first() -> None:
    wrong = checked(Layer, merge=lambda self, x: x.reshape(x.shape[2], x.shape[0], -1))
    assert bugs(wrong) == ["merge-without-transpose"]


class Pairs(nn.Module):
    """Self-attention, right unless its subclass overrides a step."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [b, h, t, d]

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)  # [b, t, e]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.o(self.merge(self.score(q, k).softmax(-1) @ v))


def reshape_to_merge(self: Pairs, x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x.reshape(b, t, h * d)


def reshape_to_split(self: Pairs, x: Tensor) -> Tensor:
    b, t, e = x.shape
    return x.reshape(b, self.num_heads, t, e // self.num_heads)


@pytest.mark.full
@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (lambda self, q, k: q @ k.mT, "unscaled"),
        pytest.param(
            lambda self, q, k: q @ k.mT / self.q.in_features**0.5, "scaled-by-width", marks=pytest.mark.full
        ),
    ],
)
@pytest.mark.parametrize(
    ("step", "change", "mixing"),
    [
        ("merge", reshape_to_merge, "merge-without-transpose"),
        pytest.param("split", reshape_to_split, "split-without-transpose", marks=pytest.mark.full),
    ],
)
def test_a_bug_that_mixes_heads_and_tokens_is_named_beside_another(
    scale: Any, name: str, step: str, change: Any, mixing: str
) -> None:
    """The order of earlier tokens changes the output, which isn't taken for an unknown part."""
    report = checker.check(type("Attention", (Pairs,), {"score": scale, step: change}))
    assert report.verdict == "failed"
    (found,) = bugs(report)
    assert {*found.split(" + ")} == {name, mixing}


@pytest.mark.full
def test_an_unknown_effect_of_the_order_may_be_that_of_mixed_heads_and_tokens() -> None:
    def add_root_of_position(self: Pairs, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5 + 0.3 * torch.arange(k.shape[-2]).sqrt()

    wrong = type("Attention", (Pairs,), {"score": add_root_of_position})
    summary = " ".join(checker.check(wrong).summary().split())
    assert "or heads and tokens are mixed (e.g. by a reshape without a transpose)" in summary
    single = " ".join(checker.check(wrong, init={"embed_dim": 8, "num_heads": 1}).summary().split())
    assert "the order of earlier tokens changes the output" in single
    assert "heads and tokens are mixed" not in single


def test_heads_interleaved_is_the_network_with_its_weights_in_another_order() -> None:
    weight = {r: torch.randn(24, 24, dtype=torch.float64) for r in "qkvo"}
    bias = {r: torch.randn(24, dtype=torch.float64) for r in "qkvo"}
    order = torch.arange(24).view(6, 4).T.flatten()  # of columns: d · h as h · d
    moved = {r: weight[r][order] if r != "o" else weight[r][:, order] for r in "qkvo"}
    other = Weights(4, 4, moved, {r: bias[r][order] if r != "o" else bias[r] for r in "qkvo"})
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    (change,) = FAMILY["heads-interleaved"].variants
    torch.testing.assert_close(
        exact(Weights(4, 4, weight, bias), Inputs(x, x, x), change).out, exact(other, Inputs(x, x, x)).out
    )


def test_fixes_name_an_axis_only_with_its_layout() -> None:
    for bug in FAMILY.values():
        if "dim=" in bug.fix or "transpose(" in bug.fix or "permute(" in bug.fix:
            assert "[b, h, t, s]" in bug.fix or "[t, b, e]" in bug.fix, bug


class Tokens(nn.Module):
    """x `[b, t, e]`."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))  # [b, t, h, d], and no transpose

    def merge(self, x: Tensor) -> Tensor:
        return x.flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.out(self.merge(F.scaled_dot_product_attention(q, k, v)))


class Backwards(Tokens):
    """x `[b, t, e]`."""

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


class Early(Tokens):
    """x `[b, t, e]`."""

    def split(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], self.num_heads, x.shape[1], -1)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("wrong", "name"),
    [(Tokens, "heads-as-tokens"), (Backwards, "heads-as-tokens"), (Early, "split-after-transpose")],
)
def test_heads_that_are_never_moved(wrong: type[Tokens], name: str) -> None:
    assert bugs(checker.check(wrong, "self")) == [name]


def masked(step: Any) -> Any:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask `[t, s]`: True = may attend."""
        scores = q @ k.mT / q.shape[-1] ** 0.5
        out: Tensor = scores.softmax(-1) @ v if mask is None else step(scores, v, ~mask)
        return out

    return attention


def right(scores: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


def spoilt(scores: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return torch.zeros_like(out) if out.isnan().any() else out


def hundred(scores: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -100.0).softmax(-1).masked_fill(hidden, 0.0) @ v


def divided(scores: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    weights = scores.softmax(-1).masked_fill(hidden, 0.0)
    return weights / weights.sum(-1, keepdim=True) @ v


def high(scores: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, math.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


def between(scores: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return scores.softmax(-1).masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("step", "names", "failed"),
    [
        (right, [], []),
        (spoilt, ["empty-rows-spoil-others"], ["empty rows"]),
        (hundred, ["masked-low"], ["large scores"]),
        (divided, ["masked-and-divided"], ["large scores"]),
        (high, ["masked-plus-infinity", "masked-nan", "mask-of-everything"], ["mask"]),  # all are NaN
    ],
)
def test_masks_that_are_wrong_in_some_rows_only(step: Any, names: list[str], failed: list[str]) -> None:
    found = checker.check(masked(step), "attention")
    assert bugs(found) == names
    assert [check.name for check in failures(found)] == failed
    assert "overflows" not in f"{found}"


def test_checks_that_depend_on_a_wrong_mask_are_not_run() -> None:
    found = checker.check(masked(lambda scores, v, hidden: right(scores, v, ~hidden)), "attention")
    assert {diagnosis.bug for diagnosis in found.diagnosis} == {"polarity-swapped"}
    status = {check.name: check.status for check in found.checks}
    assert {status[name] for name in ("float16", "bfloat16", "large scores")} == {"could not be checked"}


def test_a_mask_between_two_softmaxes_alone() -> None:
    class Twice(nn.Module):
        """Causal attention of x `[b, t, hidden]`."""

        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            return between(scores, self.v(x), hidden)

    assert bugs(checker.check(Twice, "self")) == ["softmax-twice"]


def test_an_output_of_another_shape_is_reported_once() -> None:
    found = checked(Layer, merge=lambda self, x: x.transpose(1, 2).flatten(2))  # [b, t, e]
    failed = {check.name: check.reason for check in failures(found)}
    assert set(failed) <= {"shapes", "values", "mask", "added bias"}
    assert "with the first two axes swapped" in failed["shapes"]


def test_code_that_is_still_to_be_written() -> None:
    class Gap(Plain):
        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError("write it here")

    with pytest.raises(checker.Unclear, match="write it here") as caught:
        checker.check(Gap, "self", weights=WEIGHTS)
    assert "--like" not in f"{caught.value}"
    assert "adapter" not in f"{caught.value}"

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError("and here")

    with pytest.raises(checker.Unclear, match="and here") as caught:
        checker.check(rotate, "rotary")
    assert "adapter" not in f"{caught.value}"


# -- the command -----------------------------------------------------------------------------------


WRONG = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, hidden, num_heads=1):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)
"""


@pytest.mark.full
def test_the_command_writes_its_files(run_command: Any) -> None:
    Path("mine.py").write_text(WRONG)
    files = ("--out", "pictures", "--json", "r.json", "--junit", "r.xml")
    done = run_command("check", "mine.py:Attention", "--init", "hidden=16, num_heads=1", *files)
    assert done.code == 1, done.err
    printed = " ".join(done.out.split())
    for words in (
        "unscaled",
        "are not divided by √d (d = 16)",
        "To fix it",
        "not sandboxed",
        "expected",
        "got",
    ):
        assert words in printed, done.out
    data = json.loads(Path("r.json").read_text())
    values = {
        "format": 1,
        "target": "mine.py:Attention",
        "like": "self",
        "guessed": True,
        "verdict": "failed",
    }
    assert {name: data[name] for name in values} == values
    assert all(set(check) == {"name", "status", "reason", "error", "allowed"} for check in data["checks"])
    (bug,) = data["diagnosis"]
    assert bug["mistake"] == "unscaled"
    assert bug["verified"] is True
    assert bug["error"] < 1e-5
    suite = ElementTree.parse("r.xml").getroot()
    assert int(suite.get("tests", "0")) == len(data["checks"]) == len(suite.findall("testcase"))
    assert int(suite.get("failures", "0")) == len(suite.findall("testcase/failure")) > 0
    assert Path("pictures/check.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing.py:A",), "nothing.py"),
        (("mine.py:Attenshun",), "Attention"),
        (("mine.py",), "module:name"),
        (("mine.py:Attention", "--like", "cube"), "cube"),
        (("mine.py:Attention", "--init", "hidden"), "--init"),
        (("mine.py:Attention", "--weights", "q"), "--weights"),
        (("mine.py:Attention", "--layout", "rows"), "rows"),
        (("mine.py:Attention", "--memory", "lots"), "lots"),
        (("mine.py:Attention", "--timeout", "0"), "--timeout"),
        (("mine.py:unfillable",), "--init"),
    ],
)
def test_the_command_reports_invalid_use(arguments: tuple[str, ...], words: str, run_command: Any) -> None:
    unfillable = "class unfillable(nn.Module):\n    def __init__(self, zest): pass\n"
    Path("mine.py").write_text(f"{WRONG}\n{unfillable}    def forward(self, x): return x\n")
    done = run_command("check", *arguments)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.full
def test_a_call_that_never_ends_fails(run_command: Any) -> None:
    endless = "        while x.shape[1] > 8: pass\n        return (self"
    Path("mine.py").write_text(WRONG.replace("        return (self", endless))
    done = run_command("check", "mine.py:Attention", "--timeout", "3")
    assert done.code == 1
    assert "3" in done.out
    assert "had ended" in done.out


@pytest.mark.parametrize(
    ("text", "size"), [("4G", 4 * 2**30), ("500M", 500 * 2**20), ("1.5g", 3 * 2**29), ("536870912", 2**29)]
)
def test_sizes(text: str, size: int) -> None:
    assert command.parse_size(text) == size


def test_an_error_that_is_no_number_is_null() -> None:
    found = checker.Report("x", "self", True, [checker.Check("values", "failed", "so", math.inf, 1.0)])
    assert found.as_json()["checks"][0]["error"] is None


def test_checks_run_in_the_order_in_which_they_depend_on_each_other() -> None:
    order = [entry.name for entry in CHECKS]
    assert (
        order.index("conventions") < order.index("values") < order.index("causality") < order.index("state")
    )
    for entry in CHECKS:
        for name in {*entry.depends_on} & {*order}:
            assert order.index(name) < order.index(entry.name), (name, entry.name)
