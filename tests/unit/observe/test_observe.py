"""`observe`: attention calls of every kind are recorded, and nothing else changes.

Every model runs with and without `observe`. Outputs and gradients are compared bit for bit, maps with weights
that are computed here, in float64, from what reached the attention. Hugging Face has a file of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as bound_at_import
from torch.testing import assert_close as close

import manyheads as mh
from manyheads import observe
from manyheads.classic import annotated, components, modeling_attention
from manyheads.classic.torch_multihead import MultiheadAttention, replace
from manyheads.kernels import ORDER
from manyheads.lm.generate import Sampling, generate
from manyheads.lm.model import Config, LanguageModel
from tests.observed import (
    GPT,
    KEYS,
    OURS,
    PADDING,
    Call,
    D,
    E,
    Function,
    H,
    K,
    Q,
    V,
    assert_gpt_weights,
    assert_identical,
    assert_weights,
    encoder,
    gradients,
    inputs_of,
    nested,
    nothing_left,  # noqa: F401
    raises,
    randn,
    record,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# -- scaled_dot_product_attention ------------------------------------------------------------------


def test_a_model_like_nanogpt_needs_no_change():
    model, x = GPT(), randn(2, 7, E)
    recording = record(model, x)
    assert list(recording) == KEYS
    assert len(recording) == 2
    assert [recording[name].shape for name in recording] == [(2, H, 7, 7)] * 2
    assert_gpt_weights(recording, model, x)


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (Q, K, V, {}),
    "causal, more keys": (Q, K, V, {"is_causal": True}),
    "causal, fewer keys": (K, Q, Q, {"is_causal": True}),
    "wider values": (Q, K, (2, H, 7, 3), {}),
    "scale": (Q, K, V, {"scale": 0.3}),
    "scale of 0": (Q, K, V, {"scale": 0.0}),
    "negative scale": (Q, K, V, {"scale": -1.5}),
    "grouped": (Q, (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "one key head": (Q, (2, 1, 7, 8), (2, 1, 7, 8), {"enable_gqa": True}),
    "k and v grouped apart": (Q, (2, 1, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "q of one head": ((2, 1, 5, 8), K, V, {}),
    "k of one head": (Q, (2, 1, 7, 8), V, {}),
    "v of one head": (Q, K, (2, 1, 7, 8), {}),
    "q of one batch": ((1, H, 5, 8), K, V, {}),
    "k and v of one batch": (Q, (1, H, 7, 8), (1, H, 7, 8), {}),
    "k of one batch": (Q, (1, H, 7, 8), V, {}),
    "v of one batch": (Q, K, (1, H, 7, 8), {}),
    "no heads": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {}),
    "no heads, causal": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {"is_causal": True}),
    "no batch": ((5, 8), (7, 8), (7, 8), {}),
    "two batches": ((2, 3, H, 5, 8), (2, 3, H, 7, 8), (2, 3, H, 7, 8), {}),
    "two batches, one of them 1": ((2, 1, H, 5, 8), (1, 3, H, 7, 8), (1, 3, H, 7, 8), {}),
    "k and v of fewer dimensions": (Q, K[1:], V[1:], {}),
    "q of fewer dimensions": (Q[1:], K, V, {}),
    "no queries": ((2, H, 0, 8), K, V, {}),
    "no keys": (Q, (2, H, 0, 8), (2, H, 0, 8), {}),
    "one query": ((2, H, 1, 8), K, V, {}),
    "no batch entries": ((0, H, 5, 8), (0, H, 7, 8), (0, H, 7, 8), {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_every_shape(case: str):
    q, k, v, kwargs = CALLS[case]
    q, k, v = randn(q), randn(k), randn(v)
    recording = record(Call(), q, k, v, **kwargs)
    assert list(recording) == [""]
    assert len(recording.calls("")) == 1
    true, _ = weights(q, k)
    batch = torch.broadcast_shapes(true.shape[:-2], v.shape[:-2] if not kwargs.get("enable_gqa") else ())
    full = [
        x.expand(*batch, *x.shape[-2:]) if x.dim() > 2 and not kwargs.get("enable_gqa") else x for x in (q, k)
    ]
    assert_weights(recording[0], *full, causal=kwargs.get("is_causal", False), scale=kwargs.get("scale"))


def with_infinities(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0.4, -torch.inf)


MASKS: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "boolean": lambda shape: torch.rand(shape) < 0.6,
    "all masked": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "all visible": lambda shape: torch.ones(shape, dtype=torch.bool),
    "numbers": lambda shape: randn(shape),
    "large numbers": lambda shape: torch.where(torch.rand(shape) < 0.6, 0.0, -1e9),
    "-inf and numbers": lambda shape: with_infinities(randn(shape)),
    "-inf and 0": lambda shape: torch.where(torch.rand(shape) < 0.6, 0.0, -torch.inf),
}


@pytest.mark.parametrize("sort", MASKS)
@given(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 2), st.integers(0, 3))
def test_masks_of_every_shape_that_broadcasts(sort: str, full: list[bool], without: int, seed: int):
    torch.manual_seed(seed)
    q, k, v = randn(Q), randn(K), randn(V)
    shape = [n if keep else 1 for n, keep in zip((2, H, 5, 7), full, strict=True)][without:]
    mask = MASKS[sort](shape)
    assert_weights(record(Call(), q, k, v, mask)[0], q, k, mask)


@pytest.mark.parametrize(
    ("q", "k", "mask"),
    [
        ((3, 5, 8), (3, 7, 8), (3, 5, 7)),
        ((3, 5, 8), (3, 7, 8), (3, 1, 1)),
        ((3, 5, 8), (3, 7, 8), (5, 7)),
        ((5, 8), (7, 8), (5, 7)),
        ((5, 8), (7, 8), (7,)),
        ((2, 3, H, 5, 8), (2, 3, H, 7, 8), (3, 1, 5, 7)),
        ((2, 3, H, 5, 8), (2, 3, H, 7, 8), (2, 1, H, 1, 7)),
        ((2, 3, H, 5, 8), (2, 3, H, 7, 8), (5, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sort", ["boolean", "-inf and numbers"])
def test_masks_beside_fewer_or_more_dimensions(q: Any, k: Any, mask: Any, sort: str):
    q, k, mask = randn(q), randn(k), MASKS[sort](mask)
    assert_weights(record(Call(), q, k, k, attn_mask=mask)[0], q, k, mask)


def test_masks_that_are_recognized_are_values():
    q = randn(2, H, 6, 8)
    lengths = torch.tensor([[6], [4]])
    right = (torch.arange(6) < lengths)[:, None, None]
    triangle = torch.ones(6, 6, dtype=torch.bool).tril()

    def mask(given_: Any) -> str:
        return type(record(Call(), q, q, q, given_)[0].problem.mask).__name__

    assert mask(right) == mask(right.flip(-1)) == "Lengths"
    assert mask(triangle) == mask(torch.where(triangle, 0.0, -torch.inf)) == "Causal"
    assert mask(torch.where(triangle, 0.0, torch.finfo(torch.float32).min)) == "Causal"
    assert mask(torch.ones(6, 6, dtype=torch.bool)) == "NoneType"
    assert mask(triangle.T) == "Keep"


ROUTES: dict[str, Callable[..., Tensor]] = {
    "torch.nn.functional": lambda *args: F.scaled_dot_product_attention(*args),
    "bound at import": bound_at_import,
    "torch._C._nn": torch._C._nn.scaled_dot_product_attention,
    "torch.ops.aten": torch.ops.aten.scaled_dot_product_attention,
    "torch.ops.aten, overload": torch.ops.aten.scaled_dot_product_attention.default,
    "by keywords": lambda q, k, v, mask, p, causal: F.scaled_dot_product_attention(
        value=v, key=k, query=q, is_causal=causal, dropout_p=p, attn_mask=mask
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_way_to_call_it(route: str):
    q, k = randn(Q), randn(K)
    mask = torch.rand(5, 7) < 0.7
    assert_weights(record(Function(ROUTES[route]), q, k, k, mask, 0.0, False)[0], q, k, mask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_program():
    model, x = GPT().eval(), randn(2, 7, E)
    program = torch.export.export(model, (x,)).module()
    recording = record(program, x)
    assert [len(recording.calls(name)) for name in recording] == [2]  # its modules are gone, its calls aren't
    for call, name in zip(recording.calls(0), KEYS, strict=True):
        q, k, _ = model.get_submodule(name).heads(inputs_of(model, KEYS, x)[name])
        assert_weights(call, q, k, causal=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype):
    q, k, v = randn(Q).to(dtype), randn(K).to(dtype), randn(V).to(dtype)
    mask = randn(5, 7).to(dtype)
    amap = record(Call(), q, k, v, mask)[0]
    assert amap.problem.q.dtype == dtype
    assert_weights(amap, q, k, mask)


def test_autocast_records_the_dtype_of_the_kernel():
    q, k, v = randn(Q), randn(K).bfloat16(), randn(V).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert_weights(record(Call(), q, k, v)[0], q.bfloat16(), k)
        assert_weights(record(Call(), q, k.float(), v)[0], q.bfloat16(), k)
        model = GPT()
        assert all(amap.problem.q.dtype == torch.bfloat16 for amap in record(model, randn(2, 7, E)).values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("train", [False, True])
def test_modes_of_gradients_and_training(mode: Callable[[], Any], train: bool):
    model, x = GPT(dropout=0.3).train(train), randn(2, 7, E)
    with mode():
        recording = record(model, x)
    if not train:
        assert_gpt_weights(recording, model, x)
    assert not any(amap.problem.q.requires_grad or amap.dense().requires_grad for amap in recording.values())


def test_dropout_leaves_the_weights_as_they_are():
    q, k = randn(Q), randn(K)
    assert_weights(record(Call(), q, k, k, None, 0.5)[0], q, k)


def test_strided_inputs():
    q, k = randn(2, 5, H, 16).transpose(1, 2)[..., ::2], randn(H, 7, 2, 8).permute(2, 0, 1, 3)
    assert_weights(record(Call(), q, k, k)[0], q, k)


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_gradients_are_unchanged_and_recomputation_is_no_call(how: str):
    model, x = GPT(dropout=0.3, how=how), randn(2, 7, E, requires_grad=True)
    assert_identical(gradients(model, x, True), gradients(model, x, False))
    with observe(model) as recording:
        out = model(x).sum()
        out.backward(retain_graph=how == "plain")
        assert [len(recording.calls(name)) for name in KEYS] == [1, 1]
        model(x)
    assert [len(recording.calls(name)) for name in KEYS] == [2, 2]


def test_gradients_of_a_learned_mask():
    model, x = Function(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=model.bias)), randn(Q)
    model.bias = nn.Parameter(randn(H, 5, 5))
    assert_identical(gradients(model, x, True), gradients(model, x, False))
    assert_weights(record(model, x)[0], x, x, model.bias.detach())


def test_backward_after_the_block():
    model, x = GPT(how="not reentrant"), randn(2, 7, E, requires_grad=True)
    with observe(model) as recording:
        out = model(x)
    out.sum().backward()
    assert [len(recording.calls(name)) for name in KEYS] == [1, 1]


# -- flex_attention --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    model = Function(flex_attention)
    q, k = randn(2, H, 6, 16), randn(2, 2, 6, 16)
    band = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 3 + b), 2, None, 6, 6, device="cpu")
    i, j = torch.arange(6)[:, None], torch.arange(6)
    kept = (i >= j) & (i - j < 3 + torch.arange(2)[:, None, None, None])
    assert_weights(record(model, q, k, k, block_mask=band, enable_gqa=True)[0], q, k, kept)
    assert_weights(record(model, q, q, q, scale=0.5)[0], q, q, scale=0.5)
    with raises(ValueError, "flex_attention with a score_mod can't be observed"), observe(model):
        model(q, q, q, score_mod=lambda score, b, h, i, j: score + i)


# -- nn.MultiheadAttention -------------------------------------------------------------------------


def heads_of(layer: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's own weights `[b, h, t, s]`, in float64 and before dropout; 0 for its NaN."""
    wide = copy.deepcopy(layer).double().eval()
    args = tuple(x.double() for x in args)
    kwargs = {
        n: x.double() if isinstance(x, Tensor) and x.dtype != torch.bool else x for n, x in kwargs.items()
    }
    found = wide(*args, **kwargs, need_weights=True, average_attn_weights=False)[1].detach().nan_to_num(0.0)
    return found if found.dim() == 4 else found[None]


MULTI_HEAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "other widths": {"kdim": 12, "vdim": 20},
    "learned key and value": {"add_bias_kv": True},
    "zero key and value": {"add_zero_attn": True},
    "no bias": {"bias": False},
    "everything": {"kdim": 12, "vdim": 20, "add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "dropout": {"dropout": 0.4},
}


@pytest.mark.sampled
@pytest.mark.parametrize("sort", MULTI_HEAD)
@pytest.mark.parametrize("ours", [False, True], ids=["torch's", "ours"])
@given(
    st.booleans(),
    st.sampled_from([None, "boolean", "numbers", "per head", "-inf"]),
    st.sampled_from([None, "boolean", "numbers"]),
    st.sampled_from([{"need_weights": False}, {}, {"average_attn_weights": False}]),
    st.booleans(),
    st.booleans(),
)
def test_multihead_attention(
    sort: str,
    ours: bool,
    batched: bool,
    mask: str | None,
    padding: str | None,
    wants: Any,
    train: bool,
    grad: bool,
):
    torch.manual_seed(0)
    cls = MultiheadAttention if ours else nn.MultiheadAttention
    layer = cls(E, H, **MULTI_HEAD[sort]).train(train)
    q, k, v = randn(3, 5, E), randn(3, 7, layer.kdim), randn(3, 7, layer.vdim)
    kwargs: dict[str, Any] = {}
    if mask is not None:
        masked = torch.rand(3 * H if batched else H, 5, 7) < 0.4
        kwargs["attn_mask"] = {
            "boolean": masked[0],
            "numbers": randn(5, 7),
            "per head": masked,
            "-inf": torch.where(masked[0], -torch.inf, 0.5),
        }[mask]
    if padding is not None:
        ends = torch.arange(7) >= torch.tensor([[7], [4], [5]])
        kwargs["key_padding_mask"] = ends if padding == "boolean" else randn(3, 7)
    if not batched:
        q, k, v = q[1], k[1], v[1]
        kwargs |= {n: x[1] for n, x in kwargs.items() if n == "key_padding_mask"}
    elif not layer.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mixed = (mask not in (None, "numbers", "-inf") and padding == "numbers") or (
        padding == "boolean" and mask in ("numbers", "-inf")
    )
    with torch.set_grad_enabled(grad), ignoring_mixed_masks(mixed and not ours):
        recording = record(layer, q, k, v, **kwargs, **wants)
        truth = heads_of(layer, q, k, v, **kwargs)
    assert list(recording) == [""]
    assert len(recording.calls(0)) == 1
    torch.testing.assert_close(recording[0].dense().double(), truth, rtol=0, atol=2e-6)


def ignoring_mixed_masks(mixed: bool) -> Any:
    """PyTorch warns of a boolean mask beside one of floats."""
    return pytest.warns(UserWarning, match="mismatched") if mixed else nullcontext()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window", "nothing"])
def test_is_causal_records_the_weights_of_the_call(
    mask: str, extra: dict[str, Any], wants: bool, padded: bool
):
    """PyTorch may follow is_causal in place of the mask, and mask appended keys."""
    layer = nn.MultiheadAttention(E, H, batch_first=True, **extra).double().eval()
    x = randn(2, 6, E, dtype=torch.float64)
    after = torch.ones(6, 6, dtype=torch.bool).triu(1)
    window = after | after.T.triu(-6).tril(-3)
    masked = {"causal": after, "window": window, "nothing": torch.zeros_like(after)}[mask]
    padding = torch.arange(6) >= torch.tensor([[6], [4]]) if padded else None
    kwargs = {"attn_mask": masked, "key_padding_mask": padding, "need_weights": wants, "is_causal": True}
    recording = record(layer, x, x, x, **kwargs)
    v = F.linear(x, layer.in_proj_weight[2 * E :], layer.in_proj_bias[2 * E :])
    if layer.bias_v is not None:
        v = torch.cat((v, layer.bias_v.expand(2, 1, -1)), 1)
    if layer.add_zero_attn:
        v = torch.cat((v, v.new_zeros(2, 1, E)), 1)
    mixed = recording[0].dense() @ v.unflatten(-1, (H, D)).transpose(1, 2)  # [b, h, t, d]
    rebuilt = layer.out_proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(rebuilt, layer(x, x, x, **kwargs)[0], rtol=0, atol=1e-12)


def test_multi_head_attention_forward_called_by_itself():
    """Call it as CLIP's AttentionPool2d does: with a mean as first key, one query, another output width."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(randn(10, E))
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, E) for _ in range(3))
            self.c_proj = nn.Linear(E, 6)

        def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
            x = x.flatten(2).permute(2, 0, 1)  # [s, b, e]
            x = torch.cat([x.mean(0, keepdim=True), x]) + self.positions[:, None]
            projections = {f"{r}_proj_weight": getattr(self, f"{r}_proj").weight for r in "qkv"}
            bias = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
            return F.multi_head_attention_forward(
                query=x[:1], key=x, value=x, embed_dim_to_check=E, num_heads=H, **projections,
                in_proj_weight=None, in_proj_bias=bias, bias_k=None, bias_v=None, add_zero_attn=False,
                dropout_p=0, out_proj_weight=self.c_proj.weight, out_proj_bias=self.c_proj.bias,
                use_separate_proj_weight=True, training=self.training, need_weights=False, **masks,
            )[0].squeeze(0)  # fmt: skip

    model, x = Pool(), randn(2, E, 3, 3)
    flat = x.flatten(2).transpose(1, 2)
    full = torch.cat([flat.mean(1, keepdim=True), flat], 1) + model.positions  # [b, s, e]
    q, k = (part(full).unflatten(-1, (H, D)).transpose(1, 2) for part in (model.q_proj, model.k_proj))
    assert_weights(record(model, x)[0], q[:, :, :1], k)
    masked, padding = torch.arange(10)[None] == 4, torch.arange(10) >= torch.tensor([[10], [7]])
    visible = ~masked & ~padding[:, None, None]
    assert_weights(record(model, x, attn_mask=masked, key_padding_mask=padding)[0], q[:, :, :1], k, visible)


@nested
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("nesting", [True, False], ids=["nested", "not nested"])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(E)], ids=["bare", "norm"])
@pytest.mark.parametrize(("train", "grad"), [(False, False), (False, True), (True, True), (True, False)])
def test_transformer_encoders(padding: str, nesting: bool, norm: nn.Module | None, train: bool, grad: bool):
    """Also if PyTorch skips padding and returns zeros there, or the norm of zeros."""
    model = encoder(enable_nested_tensor=nesting, norm=norm).train(train)
    x, masked = randn(3, 6, E), PADDING[padding]
    with torch.set_grad_enabled(grad):
        recording = record(model, x, src_key_padding_mask=masked)
        assert list(recording) == ["layers.0.self_attn", "layers.1.self_attn"]
        assert [len(recording.calls(name)) for name in recording] == [1, 1]
    truth = heads_of(model.layers[0].self_attn, x, x, x, key_padding_mask=masked)
    torch.testing.assert_close(recording[0].dense().double(), truth, rtol=0, atol=2e-6)


@nested
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": False}, {"norm_first": True}, {"activation": "gelu"}], ids=str
)
@pytest.mark.parametrize("alone", [True, False], ids=["layer", "encoder"])
def test_transformer_encoders_of_every_kind(options: dict[str, Any], alone: bool, mask: str | None):
    model = encoder(**options).eval()
    model = model.layers[0] if alone else model
    x = randn(6, 6, E)
    given_ = None if mask is None else torch.ones(6, 6, dtype=torch.bool).triu(1)
    for mode in (torch.no_grad, torch.inference_mode, nullcontext):
        with mode():
            recording = record(model, x, given_)
            shape = (6, H, 6, 6)
            assert [amap.shape for amap in recording.values()] == [shape] * (1 if alone else 2)
            record(model, x, given_, src_key_padding_mask=torch.arange(6) >= torch.tensor([[6]] * 5 + [[3]]))


def test_a_fused_encoder_records_the_weights_of_an_unfused_one():
    model, x = encoder().eval(), randn(3, 6, E)
    with torch.no_grad():
        recording = record(model, x)
        inside = model.layers[0](x)
        truth = heads_of(model.layers[1].self_attn, inside, inside, inside)
    torch.testing.assert_close(recording[1].dense().double(), truth, rtol=0, atol=2e-6)


@nested
@pytest.mark.parametrize("train", [False, True])
def test_a_whole_transformer(train: bool):
    model = nn.Transformer(E, H, 2, 2, 32, batch_first=True).train(train)
    source, target, padding = randn(3, 6, E), randn(3, 5, E), PADDING["right"]
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    kwargs = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    for mode in (torch.no_grad, nullcontext):
        with mode():
            recording = record(model, source, target, **kwargs)
    assert list(recording) == [
        *(f"encoder.layers.{n}.self_attn" for n in range(2)),
        *(f"decoder.layers.{n}.{name}" for n in range(2) for name in ("self_attn", "multihead_attn")),
    ]
    own, cross = recording["decoder.layers.0.self_attn"], recording["decoder.layers.0.multihead_attn"]
    truth = heads_of(model.decoder.layers[0].self_attn, target, target, target, attn_mask=causal)
    torch.testing.assert_close(own.dense().double(), truth, rtol=0, atol=2e-6)
    assert cross.shape == (3, H, 5, 6)
    assert not cross.dense()[padding[:, None, None].expand(3, H, 5, 6)].any()


# -- our own layers, classic presentations and language model ----------------------------------------------


@pytest.mark.parametrize("sort", OURS)
@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.Causal() & mh.Window(left=2)], ids=str)
def test_our_layers(sort: str, mask: mh.Mask | None):
    layer, x = OURS[sort](), randn(2, 6, E)
    recording = record(layer, x, mask=mask)
    assert list(recording) == [""]
    assert len(recording.calls(0)) == 1
    truth = layer.eval().attend(x, mask=mask)[1]
    close(recording[0].dense(), truth.dense())  # with dropout, another kernel gave the log-sum-exp


def test_our_layers_by_attend_and_by_context():
    layer, x, context = mh.MultiHeadAttention(E, H, context_dim=9), randn(2, 5, E), randn(2, 7, 9)
    assert_identical(record(layer, x, context)[0].dense(), layer.attend(x, context)[1].dense())
    cross = mh.CrossAttention(E, 9)
    assert_identical(record(cross, x, context)[0].dense(), cross.attend(x, context)[1].dense())

    def attend(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        out, amap = layer.attend(x, context)
        return out, amap.dense()

    model = Function(attend)
    model.inner = layer
    recording = record(model, x, context)
    assert list(recording) == [""]
    assert len(recording.calls("")) == 1


@pytest.mark.parametrize("kernel", ["auto", *(name for name in ORDER if name != "flex")])
@pytest.mark.parametrize(
    "function", [mh.attention, lambda *args, **kwargs: mh.attention_with_map(*args, **kwargs)[0]]
)
def test_our_functions_within_a_module(kernel: str, function: Callable[..., Tensor]):
    q, k = randn(2, H, 5, 8), randn(2, 2, 7, 8)
    recording = record(Function(function), q, k, k, mask=mh.Causal(), kernel=kernel)
    assert len(recording.calls(0)) == 1
    assert_weights(recording[0], q, k, torch.ones(5, 7, dtype=torch.bool).tril(2))


def test_every_option_of_attention_is_recorded():
    q, k = randn(2, H, 5, 8), randn(2, 2, 7, 8)
    kwargs = {"mask": mh.Causal() & mh.Lengths(torch.tensor([7, 3])), "bias": mh.Dense(randn(H, 5, 7))}
    kwargs |= {"softcap": 3.0, "sink": randn(H), "offset": torch.tensor([1, 2]), "scale": 0.7}
    recording = record(Function(mh.attention), q, k, k, **kwargs)
    assert_identical(recording[0].dense(), mh.attention_with_map(q, k, k, **kwargs)[1].dense())


@nested
def test_our_multihead_attention_with_nested_tensors():
    layer, lengths = MultiheadAttention(E, H, batch_first=True).eval(), (3, 5)
    x = torch.nested.nested_tensor([randn(n, E) for n in lengths])
    with torch.no_grad(), observe(layer) as recording:
        out = layer(x, x, x, need_weights=False)[0]
        for n, (mine, alone) in enumerate(
            zip(out.unbind(), layer(x, x, x, need_weights=False)[0], strict=True)
        ):
            assert_identical(mine, alone)
            assert not recording[0][n, :, :, lengths[n] :].any()


def test_replaced_layers_of_a_transformer():
    model, x = replace(encoder()).eval(), randn(3, 6, E)
    with torch.no_grad():
        recording = record(model, x, src_key_padding_mask=PADDING["right"])
    assert [len(recording.calls(name)) for name in recording] == [1, 1]
    truth = model.layers[0].self_attn.attend(x, x, x, PADDING["right"])[1]
    torch.testing.assert_close(recording[0].dense(), truth.dense())


def test_the_classic_presentations():
    x = randn(2, 5, E)
    model = modeling_attention.MultiHeadSelfAttention(E, E, H)
    truth = model.attend(x)[1].dense()
    close(record(model, x)[0].dense(), truth)
    close(record(model, x, return_attention=True)[0].dense(), truth)
    heads = [components.SelfAttention(E, D, D) for _ in range(2)]
    recording = record(components.MultiHeadedAttention(heads, E), x)
    assert [len(recording.calls(name)) for name in recording] == [1, 1]
    for head, amap in zip(heads, recording.values(), strict=True):
        close(amap.dense(), head.attend(x)[1].dense())
    model = annotated.MultiHeadAttention(H, E)
    recording = record(model, query=x, key=x, value=x)
    assert len(recording.calls(0)) == 1
    close(recording[0].dense(), model.attend(query=x, key=x, value=x)[1].dense())


def language_model() -> LanguageModel:
    sizes = Config(vocab=40, embed=16, heads=2, layers=2, hidden=16, context=32)
    return LanguageModel(sizes).eval()


def test_the_language_model_and_its_generation():
    model, prompt = language_model(), torch.randint(0, 40, (1, 6))
    sampling = Sampling(0.0)
    alone = list(generate(model, prompt, 8, sampling))
    with observe(model) as steps:
        made = list(generate(model, prompt, 8, sampling))
    assert made == alone
    ids = torch.cat([prompt, torch.tensor([made])], 1)[:, :-1]
    recording = record(model, ids)
    assert list(steps) == list(recording) == ["blocks.0.attention", "blocks.1.attention"]
    for name, amap in zip(recording, model.attend(ids)[1], strict=True):
        assert_identical(recording[name].dense(), amap.dense())
        assert [call.shape for call in steps.calls(name)] == [(1, 2, 13, 13)]
        torch.testing.assert_close(steps[name].dense(), amap.dense(), rtol=0, atol=1e-6)


def test_generation_without_a_cache_is_many_calls():
    model = language_model()
    with observe(model) as recording:
        list(generate(model, torch.randint(0, 40, (1, 3)), 4, Sampling(0.0), cached=False))
    assert [call.shape[2] for call in recording.calls(0)] == [3, 4, 5, 6]
