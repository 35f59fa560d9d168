"""The corpus of planted bugs: each style is right as it stands, and each plant makes it wrong."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.corpus.planted import matrix

pytestmark = pytest.mark.usefixtures("one_thread")

# Plants that by their nature show in one situation only; all others show in an ordinary one.
SHOWN_IN = {
    "empty-rows-nan": "empty",
    "empty-rows-uniform": "empty",
    "no-max-subtracted": "large",
    "weights-after-dropout": "training",
}

B, T, S, H, D = 2, 5, 7, 3, 4
E = H * D

# -- the formula ---------------------------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | bool = True, bias: Tensor | float = 0.0, sinks: Any = None
) -> tuple[Tensor, Tensor]:
    """[b, h, t, d] and the weights [b, h, t, s]; a query that sees nothing gives zeros."""
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
    added = torch.as_tensor(bias, dtype=scores.dtype).expand(scores.shape)
    kept = torch.as_tensor(keep).expand(scores.shape) & (added > torch.finfo(scores.dtype).min)
    scores = torch.where(kept, scores + added, -1e300)
    top = scores.amax(-1, keepdim=True)
    shares = kept * torch.exp(scores - top)
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - top)
    weights = torch.where(total > 0, shares / total, 0.0)
    return torch.einsum("bhts,bhsd->bhtd", weights, v), weights


def split(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0, heads: int = H) -> Tensor:
    """[b, t, e] → [b, h, t, d], with the weight of a linear layer, [h * d, e]."""
    y = torch.einsum("bte,fe->btf", x, weight) + bias
    return torch.stack(y.chunk(heads, dim=-1), dim=1)


def join(heads: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """[b, h, t, d] → [b, t, e]."""
    return torch.einsum("btf,ef->bte", torch.cat(heads.unbind(1), dim=-1), weight) + bias


def past_only(t: int, s: int, offset: int = 0) -> Tensor:
    return torch.arange(s)[None, :] <= torch.arange(t)[:, None] + offset


def linear(layer: torch.nn.Linear) -> tuple[Tensor, Tensor | float]:
    return layer.weight, 0.0 if layer.bias is None else layer.bias


def annotated(m: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    q, k, v = (split(x, *linear(w)) for x, w in zip((query, key, value), m.linears, strict=False))
    return join(attend(q, k, v, True if mask is None else mask != 0)[0], *linear(m.linears[3]))


def nanogpt(m: Any, x: Tensor) -> Any:
    weight, bias = m.c_attn.weight, m.c_attn.bias
    q, k, v = (split(x, weight[i * E : (i + 1) * E], bias[i * E : (i + 1) * E]) for i in range(3))
    return join(attend(q, k, v, past_only(x.shape[1], x.shape[1]))[0], *linear(m.c_proj))


def einsum(m: Any, x: Tensor, mask: Any = None, causal: bool = False) -> Any:
    q, k, v = (torch.stack([x @ w for w in each], dim=1) for each in (m.W_q, m.W_k, m.W_v))
    keep = past_only(x.shape[1], x.shape[1], 0 if causal else x.shape[1])
    if mask is not None:
        keep = keep & (mask[:, None, None, :] if mask.dim() == 2 else mask[:, None])
    out, weights = attend(q, k, v, keep)
    return sum(out[:, i] @ w for i, w in enumerate(m.W_o)), weights


def torchlike(
    m: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
) -> Any:
    weights, biases = m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3)
    inputs = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = (split(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    keep, bias = torch.tensor(True), torch.tensor(0.0)
    if key_padding_mask is not None:
        keep = keep & ~key_padding_mask[:, None, None, :]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & ~(attn_mask.unflatten(0, (B, H)) if attn_mask.dim() == 3 else attn_mask)
    elif attn_mask is not None:
        bias = attn_mask
    out, given = attend(q, k, v, keep, bias)
    out = join(out, *linear(m.out_proj)).transpose(0, 1)
    return out, (given.mean(1) if average_attn_weights else given) if need_weights else None


def headlist(m: Any, x: Tensor) -> Any:
    q, k, v = (
        torch.stack([x @ getattr(head, name).weight.T for head in m.heads], dim=1)
        for name in ("query", "key", "value")
    )
    return join(attend(q, k, v, past_only(x.shape[1], x.shape[1]))[0], *linear(m.proj))


def separate(
    m: Any, hidden_states: Tensor, attention_mask: Any = None, output_attentions: bool = False
) -> Any:
    q, k, v = (split(hidden_states, *linear(w)) for w in (m.q_proj, m.k_proj, m.v_proj))
    out, weights = attend(q, k, v, bias=0.0 if attention_mask is None else attention_mask)
    return join(out, *linear(m.out_proj)), weights if output_attentions else None


def cross(m: Any, x: Tensor, context: Any = None, mask: Any = None) -> Any:
    context = x if context is None else context
    w_k, w_v = m.to_kv.weight.chunk(2)
    keep = True if mask is None else mask[:, None, None, :]
    out, _ = attend(split(x, m.to_q.weight), split(context, w_k), split(context, w_v), keep)
    return join(out, *linear(m.to_out))


def gqa(m: Any, x: Tensor, mask: Any = None) -> Any:
    groups = torch.arange(6) // 2
    q, k, v = split(x, m.wq.weight, heads=6), split(x, m.wk.weight), split(x, m.wv.weight)
    keep = past_only(x.shape[1], x.shape[1])
    keep = keep if mask is None else keep & mask[:, None, None, :]
    return join(attend(q, k[:, groups], v[:, groups], keep)[0], m.wo.weight)


def core(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    t, s = query.shape[2], key.shape[2]
    groups = torch.arange(query.shape[1]) * key.shape[1] // query.shape[1]
    keep, bias = past_only(t, s, 0 if is_causal else s), torch.tensor(0.0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        bias = attn_mask
    turned = query if scale is None else query * scale * query.shape[-1] ** 0.5
    return attend(turned, key[:, groups], value[:, groups], keep, bias)[0]


def simple(m: Any, x: Tensor, mask: Any = None) -> Any:
    q, k, v = (split(x, *linear(w), heads=1) for w in (m.query, m.key, m.value))
    return attend(q, k, v, True if mask is None else mask[:, None])[0][:, 0]


def sequence(m: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    pairs = zip((query, key, value), (m.query, m.key, m.value), strict=True)
    q, k, v = (split(x.transpose(0, 1), *linear(w.linear)) for x, w in pairs)
    keep = True if mask is None else mask.permute(2, 0, 1)[:, None] != 0
    return join(attend(q, k, v, keep)[0], *linear(m.output)).transpose(0, 1)


def sinks(_: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Any = None) -> Any:
    return attend(q, k, v, True if mask is None else mask, sinks=sinks)[0]


def cached(m: Any, x: Tensor, past: Any = None) -> Any:
    weights, biases = m.qkv.weight.chunk(3), m.qkv.bias.chunk(3)
    q, k, v = (split(x, w, b) for w, b in zip(weights, biases, strict=True))
    if past is not None:
        k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
    keep = past_only(q.shape[2], k.shape[2], k.shape[2] - q.shape[2])
    return join(attend(q, k, v, keep)[0], *linear(m.out)), (k, v)


def aligned(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attend(q, k, v, past_only(q.shape[2], k.shape[2], k.shape[2] - q.shape[2]))[0]


def encoder(
    m: Any, hidden_states: Tensor, attention_mask: Any = None, output_attentions: bool = False
) -> Any:
    q, k, v = (split(hidden_states, *linear(w)) for w in (m.query, m.key, m.value))
    keep = True if attention_mask is None else attention_mask[:, None, None, :] == 1
    out, weights = attend(q, k, v, keep)
    return torch.cat(out.unbind(1), dim=-1), weights if output_attentions else None


def returns(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, return_weights: bool = False) -> Any:
    out, weights = attend(q, k, v, True if mask is None else mask)
    return out, weights if return_weights else None


def memory(
    m: Any, x: Tensor, memory: Tensor, memory_key_padding_mask: Any = None, need_weights: bool = False
) -> Any:
    q, k, v = (split(y, *linear(w)) for y, w in ((x, m.w_q), (memory, m.w_k), (memory, m.w_v)))
    keep = True if memory_key_padding_mask is None else ~memory_key_padding_mask[:, None, None, :]
    out, weights = attend(q, k, v, keep)
    return join(out, *linear(m.w_o)), weights if need_weights else None


def grouped(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    groups = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    return aligned(_, q, k[:, groups], v[:, groups])


def gqa_cached(m: Any, x: Tensor, cache: Any = None) -> Any:
    q = split(x, m.W_query.weight, heads=2 * H)
    k, v = split(x, m.W_key.weight), split(x, m.W_value.weight)
    if cache is not None:
        k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
    return join(grouped(m, q, k, v), m.out_proj.weight), (k, v)


def sink_module(m: Any, x: Tensor, return_weights: bool = False) -> Any:
    groups = torch.arange(2 * H) // 2
    q = split(x, *linear(m.q_proj), heads=2 * H)
    k, v = split(x, *linear(m.k_proj))[:, groups], split(x, *linear(m.v_proj))[:, groups]
    out, weights = attend(q, k, v, past_only(x.shape[1], x.shape[1]), sinks=m.sinks)
    return join(out, *linear(m.o_proj)), weights if return_weights else None


def sink_manual(_: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
    keep = past_only(q.shape[2], k.shape[2], k.shape[2] - q.shape[2])
    return attend(q, k, v, keep, sinks=sinks)[0]


def waves(length: int, width: int) -> Tensor:
    """[length, width]: sin and cos of p / 10000^(2i / width), one number at a time."""
    p, c = torch.arange(length, dtype=torch.float64)[:, None], torch.arange(width)[None, :]
    angles = p / 10000.0 ** ((c - c % 2).double() / width)
    return torch.where(c % 2 == 0, angles.sin(), angles.cos())


def sinusoidal(_: Any, x: Tensor) -> Any:
    return x + waves(x.shape[1], x.shape[2])


def sinusoidal_function(_: Any, length: int, d_model: int) -> Any:
    return waves(length, d_model)


def sinusoidal_sequence(_: Any, x: Tensor) -> Any:
    return x + waves(x.shape[0], x.shape[2])[:, None]


def turn(x: Tensor, positions: Tensor, first: Tensor, second: Tensor, base: float = 10000.0) -> Tensor:
    """Pairs of columns as complex numbers, turned by p · base^(-2i / d)."""
    d = x.shape[-1]
    angles = positions[:, None] * base ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    z = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)
    out = torch.empty_like(x)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def rotary(_: Any, x: Tensor, positions: Tensor, base: float = 10000.0) -> Any:
    even = torch.arange(0, x.shape[-1], 2)
    return turn(x, positions, even, even + 1, base)


def rotary_half(_: Any, q: Tensor, k: Tensor) -> Any:
    low = torch.arange(q.shape[-1] // 2)
    return tuple(turn(x, torch.arange(x.shape[2]), low, low + len(low)) for x in (q, k))


def rotary_complex(_: Any, xq: Tensor, xk: Tensor) -> Any:
    positions = torch.arange(xq.shape[1])
    return tuple(rotary(_, x.transpose(1, 2), positions).transpose(1, 2) for x in (xq, xk))


def rotary_tables(_: Any, x: Tensor) -> Any:
    return rotary_half(_, x, x)[0]


def rotary_pairs(_: Any, q: Tensor, k: Tensor, positions: Tensor) -> Any:
    return rotary(_, q, positions), rotary(_, k, positions)


# -- the situations ------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(4)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


X, Y, Z = draw(B, T, E), draw(B, T, E), draw(B, T, E)
LONG, FAR = draw(B, S, E), draw(B, S, E)
WIDE = torch.cat((X, Y), dim=-1)  # [b, t, 2e], for twice as many query heads as key heads
Q, K, V = draw(B, H, T, D), draw(B, H, T, D), draw(B, H, T, D)
LONG_K, LONG_V = draw(B, H, S, D), draw(B, H, S, D)
# True keeps. Every query sees something, and the batch's entries differ.
PAIRS = (draw(B, T, T) > 0) | torch.eye(T, dtype=torch.bool)  # [b, t, t]
LONG_PAIRS = (draw(B, T, S) > 0) | torch.eye(T, S, dtype=torch.bool)  # [b, t, s]
PADDING = torch.arange(T) < torch.tensor([[T - 2], [T]])  # [b, t]
LONG_PADDING = torch.arange(S) < torch.tensor([[S - 1], [S - 3]])  # [b, s]
# The first entry's second query sees nothing; the second entry is all padding.
EMPTY = PAIRS & (torch.arange(B * T).view(B, T, 1) != 1)
NOTHING = torch.tensor([[True], [False]]).expand(B, T)
LARGE = 60.0


def added(keep: Tensor, lowest: float) -> Tensor:
    """A mask to be added: 0 keeps."""
    return torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, lowest)


def first(x: Tensor) -> Tensor:
    """Sequence first."""
    return x.transpose(0, 1)


class Style(NamedTuple):
    right: Callable[..., Any]
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
    arguments: dict[str, Any] | None = None  # of the constructor; None for a function
    tolerance: float = 1e-12  # positions are tabled in float32 in some of the styles


LOWEST = torch.finfo(torch.float64).min
STYLES = {
    "annotated": Style(
        annotated,
        {
            "plain": ((X, X, X), {}),
            "pairs": ((X, Y, Z, PAIRS[:, None]), {}),
            "numbers": ((X, X, X, PAIRS[:, None].int()), {}),
            "longer": ((X, LONG, FAR, LONG_PADDING[:, None, None]), {}),
            "empty": ((X, X, X, EMPTY[:, None]), {}),
            "large": ((LARGE * X, LARGE * Y, Z), {}),
        },
        {"h": H, "d_model": E, "dropout": 0.25},
    ),
    "nanogpt": Style(
        nanogpt,
        {"plain": ((X,), {}), "large": ((LARGE * X,), {})},
        {"n_embd": E, "n_head": H, "block_size": 8, "dropout": 0.25},
    ),
    "einsum": Style(
        einsum,
        {
            "plain": ((X,), {}),
            "causal": ((X,), {"causal": True}),
            "pairs": ((X, PAIRS), {}),
            "padding": ((X, PADDING), {"causal": True}),
            "empty": ((X, EMPTY), {}),
            "large": ((LARGE * X,), {}),
        },
        {"e": E, "h": H, "d": D},
    ),
    "torchlike": Style(
        torchlike,
        {
            "plain": ((first(X), first(Y), first(Z)), {}),
            "pairs": ((first(X), first(X), first(X)), {"attn_mask": ~PAIRS[0], "need_weights": False}),
            "heads": (
                (first(X), first(LONG), first(FAR)),
                {"attn_mask": ~LONG_PAIRS.repeat_interleave(H, 0), "average_attn_weights": False},
            ),
            "floats": (
                (first(X), first(LONG), first(FAR)),
                {"attn_mask": added(LONG_PAIRS[1], -torch.inf), "key_padding_mask": ~LONG_PADDING},
            ),
            "padding": ((first(X), first(X), first(X)), {"key_padding_mask": ~PADDING}),
            "empty": ((first(X), first(X), first(X)), {"attn_mask": ~EMPTY[0]}),
            "large": ((first(LARGE * X), first(LARGE * Y), first(Z)), {}),
            "training": ((first(X), first(Y), first(Z)), {"average_attn_weights": False}),
        },
        {"embed_dim": E, "num_heads": H, "dropout": 0.25},
    ),
    "headlist": Style(
        headlist,
        {"plain": ((X,), {}), "large": ((LARGE * X,), {})},
        {"num_heads": H, "head_size": D, "n_embd": E, "block_size": 8, "dropout": 0.25},
    ),
    "separate": Style(
        separate,
        {
            "plain": ((X,), {}),
            "weights": ((X,), {"output_attentions": True}),
            "lowest": ((X, added(PAIRS[:, None], LOWEST)), {"output_attentions": True}),
            "infinite": ((X, added(PAIRS[:, None], -torch.inf)), {}),
            "empty": ((X, added(EMPTY[:, None], LOWEST)), {}),
            "large": ((LARGE * X,), {}),
            "training": ((X,), {"output_attentions": True}),
        },
        {"hidden_size": E, "num_attention_heads": H, "attention_dropout": 0.25},
    ),
    "cross": Style(
        cross,
        {
            "plain": ((X[..., :10],), {}),
            "same": ((X[..., :10], Y[..., :10], PADDING), {}),
            "longer": ((X[..., :10], LONG[..., :10], LONG_PADDING), {}),
            "empty": ((X[..., :10], None, NOTHING), {}),
            "large": ((LARGE * X[..., :10],), {}),
        },
        {"dim": 10, "heads": H, "dim_head": D, "dropout": 0.25},
    ),
    "gqa": Style(
        gqa,
        {
            "plain": ((WIDE,), {}),
            "padding": ((WIDE, PADDING), {}),
            "empty": ((WIDE, PADDING.flip(1)), {}),
            "large": ((LARGE * WIDE,), {}),
        },
        {"dim": 2 * E, "n_heads": 2 * H, "n_kv_heads": H},
    ),
    "core": Style(
        core,
        {
            "plain": ((Q, K, V), {}),
            "pairs": ((Q, K, V, PAIRS[:, None]), {"scale": 0.3}),
            "floats": ((Q, LONG_K, LONG_V, added(LONG_PAIRS[:, None], -torch.inf)), {}),
            "causal": ((Q, LONG_K, LONG_V), {"is_causal": True}),
            "groups": ((torch.cat((Q, K), 1), LONG_K, LONG_V), {"enable_gqa": True}),
            "empty": ((Q, K, V, EMPTY[:, None]), {}),
            "large": ((LARGE * Q, LARGE * K, V), {}),
        },
    ),
    "simple": Style(
        simple,
        {
            "plain": ((X,), {}),
            "pairs": ((X, PAIRS), {}),
            "empty": ((X, EMPTY), {}),
            "large": ((LARGE * X,), {}),
        },
        {"input_dim": E, "key_dim": D, "value_dim": D},
    ),
    "sequence": Style(
        sequence,
        {
            "plain": ((), {"query": first(X), "key": first(X), "value": first(X)}),
            "pairs": (
                (),
                {"query": first(X), "key": first(Y), "value": first(Z), "mask": PAIRS.permute(1, 2, 0)},
            ),
            "longer": (
                (),
                {
                    "query": first(X),
                    "key": first(LONG),
                    "value": first(FAR),
                    "mask": LONG_PAIRS.permute(1, 2, 0).double(),
                },
            ),
            "empty": (
                (),
                {"query": first(X), "key": first(X), "value": first(X), "mask": EMPTY.permute(1, 2, 0)},
            ),
            "large": ((), {"query": first(LARGE * X), "key": first(LARGE * Y), "value": first(Z)}),
        },
        {"heads": H, "d_model": E, "dropout_prob": 0.25},
    ),
    "sinks": Style(
        sinks,
        {
            "plain": ((Q, K, V, draw(H)), {}),
            "pairs": ((Q, K, V, draw(H), PAIRS[:, None]), {}),
            "longer": ((Q, LONG_K, LONG_V, draw(H), LONG_PADDING[:, None, None]), {}),
            "empty": ((Q, K, V, draw(H), EMPTY[:, None]), {}),
            "large": ((LARGE * Q, LARGE * K, V, draw(H)), {}),
        },
    ),
    "cached": Style(
        cached,
        {
            "plain": ((X,), {}),
            "decode": ((X[:, :1], (LONG_K, LONG_V)), {}),
            "chunk": ((X[:, :2], (LONG_K, LONG_V)), {}),
            "large": ((LARGE * X,), {}),
        },
        {"embed_dim": E, "num_heads": H},
    ),
    "aligned": Style(
        aligned,
        {
            "plain": ((Q, K, V), {}),
            "decode": ((Q[:, :, :1], LONG_K, LONG_V), {}),
            "chunk": ((Q, LONG_K, LONG_V), {}),
            "large": ((LARGE * Q, LARGE * K, V), {}),
        },
    ),
    "encoder": Style(
        encoder,
        {
            "plain": ((X,), {}),
            "padding": ((X, PADDING), {}),
            "weights": ((X, PADDING.int()), {"output_attentions": True}),
            "empty": ((X, NOTHING), {}),
            "large": ((LARGE * X,), {}),
            "training": ((X,), {"output_attentions": True}),
        },
        {"hidden_size": E, "num_attention_heads": H, "dropout_prob": 0.25},
    ),
    "returns": Style(
        returns,
        {
            "plain": ((Q, K, V), {}),
            "pairs": ((Q, K, V, PAIRS[:, None]), {}),
            "weights": ((Q, LONG_K, LONG_V, LONG_PAIRS[:, None]), {"return_weights": True}),
            "empty": ((Q, K, V, EMPTY[:, None]), {}),
            "large": ((LARGE * Q, LARGE * K, V), {}),
        },
    ),
    "memory": Style(
        memory,
        {
            "same": ((X, Y), {}),
            "longer": ((X, LONG, ~LONG_PADDING), {}),
            "weights": ((X, LONG, ~LONG_PADDING), {"need_weights": True}),
            "empty": ((X, Y, ~NOTHING), {}),
            "large": ((LARGE * X, LARGE * Y), {}),
            "training": ((X, Y), {"need_weights": True}),
        },
        {"d_model": E, "n_heads": H, "dropout": 0.25},
    ),
    "grouped": Style(
        grouped,
        {
            "plain": ((torch.cat((Q, K), 1), K, V), {}),
            "decode": ((torch.cat((Q, K), 1)[:, :, :1], LONG_K, LONG_V), {}),
            "chunk": ((torch.cat((Q, K), 1), LONG_K, LONG_V), {}),
            "large": ((LARGE * torch.cat((Q, K), 1), LARGE * K, V), {}),
        },
    ),
    "gqa_cached": Style(
        gqa_cached,
        {
            "plain": ((WIDE,), {}),
            "decode": ((WIDE[:, :1], (LONG_K, LONG_V)), {}),
            "chunk": ((WIDE[:, :2], (LONG_K, LONG_V)), {}),
        },
        {"d_model": 2 * E, "num_heads": 2 * H, "num_kv_heads": H},
    ),
    "sink_module": Style(
        sink_module,
        {
            "plain": ((WIDE,), {}),
            "weights": ((WIDE,), {"return_weights": True}),
            "training": ((WIDE,), {"return_weights": True}),
        },
        {"hidden_size": 2 * E, "num_heads": 2 * H, "num_kv_heads": H, "dropout": 0.25},
    ),
    "sink_manual": Style(
        sink_manual,
        {
            "plain": ((Q, K, V, draw(H)), {}),
            "chunk": ((Q, LONG_K, LONG_V, draw(H)), {}),
            "large": ((LARGE * Q, LARGE * K, V, draw(H)), {}),
        },
    ),
    "sinusoidal": Style(
        sinusoidal, {"plain": ((X,), {})}, {"d_model": E, "dropout": 0.25, "max_len": 50}, tolerance=1e-5
    ),
    "sinusoidal_function": Style(sinusoidal_function, {"plain": ((T, E), {})}, tolerance=1e-6),
    "sinusoidal_loop": Style(sinusoidal_function, {"plain": ((T, E), {})}, tolerance=1e-6),
    "sinusoidal_sequence": Style(
        sinusoidal_sequence, {"plain": ((first(X),), {})}, {"d_model": E, "dropout": 0.25}, tolerance=1e-5
    ),
    "sinusoidal_live": Style(sinusoidal, {"plain": ((X,), {})}, {"dim": E}, tolerance=1e-5),
    "rotary": Style(
        rotary,
        {"plain": ((Q, torch.arange(T)), {}), "far": ((Q, torch.arange(T) + 30, 500.0), {})},
        tolerance=1e-5,
    ),
    "rotary_half": Style(rotary_half, {"plain": ((Q, K), {})}, {"dim": D}, tolerance=1e-5),
    "rotary_complex": Style(
        rotary_complex, {"plain": ((Q.transpose(1, 2), K.transpose(1, 2)), {})}, tolerance=1e-5
    ),
    "rotary_tables": Style(rotary_tables, {"plain": ((Q,), {})}, {"d": D}, tolerance=1e-5),
    "rotary_pairs": Style(rotary_pairs, {"plain": ((Q, K, torch.arange(T) + 3), {})}, tolerance=1e-5),
}
CELLS = [(style, bug) for style, plants in matrix.PLANTS.items() for bug in plants]

# -- running them --------------------------------------------------------------------------------------


def load(style: str, bug: str | None = None) -> Any:
    """The class or the function that the text of a style defines."""
    namespace: dict[str, Any] = {"__name__": style}
    exec(compile(matrix.source(style, bug), f"{style}: {bug}", "exec"), namespace)
    return namespace[matrix.target(style)]


def build(style: str, bug: str | None = None) -> Any:
    """A module for evaluation in float64, or the function."""
    made = load(style, bug)
    arguments = STYLES[style].arguments
    return made if arguments is None else made(**arguments).double().eval()


@cache
def right(style: str) -> Any:
    """The unbroken style with parameters drawn, biases too."""
    made = build(style)
    if isinstance(made, torch.nn.Module):
        for parameter in made.parameters():
            parameter.data.copy_(0.4 * draw(*parameter.shape))
    return made


def tensors(result: Any) -> list[Tensor]:
    """What a call returned, in one list."""
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    return [] if result is None else [result]


def run(made: Any, style: str, situation: str) -> list[Tensor]:
    """What the style returns; in training, where dropout draws, the weights alone."""
    arguments, named = STYLES[style].calls[situation]
    with torch.no_grad():
        if situation != "training":
            return tensors(made(*arguments, **named))
        made.train()
        given = tensors(made(*arguments, **named))[1:]
        made.eval()
        return given


@cache
def expected(style: str, situation: str) -> list[Tensor]:
    arguments, named = STYLES[style].calls[situation]
    with torch.no_grad():
        wanted = tensors(STYLES[style].right(right(style), *arguments, **named))
    return wanted[1:] if situation == "training" else wanted


def agree(style: str, got: list[Tensor], situation: str) -> bool:
    wanted = expected(style, situation)
    bound = STYLES[style].tolerance
    return len(got) == len(wanted) and all(
        x.shape == y.shape and bool((x.double() - y).abs().max() <= bound * (1 + y.abs().max()))
        for x, y in zip(got, wanted, strict=True)
    )


def plant(style: str, bug: str) -> Any:
    """The style with a bug, and with the same parameters as the unbroken one, but its own buffers."""
    planted = build(style, bug)
    if isinstance(planted, torch.nn.Module):
        drawn, own = dict(right(style).named_parameters()), dict(planted.named_parameters())
        assert {name: x.shape for name, x in own.items()} == {name: x.shape for name, x in drawn.items()}
        planted.load_state_dict(drawn, strict=False)
    return planted


@cache
def results(style: str, bug: str) -> dict[str, list[Tensor] | None]:
    """What a plant returns in each situation; None where it stops, as some do where the lengths differ."""
    planted = plant(style, bug)
    found: dict[str, list[Tensor] | None] = {}
    for situation in STYLES[style].calls:
        try:
            found[situation] = run(planted, style, situation)
        except RuntimeError:
            found[situation] = None
    return found


# -- the tests -----------------------------------------------------------------------------------------


def test_every_style_has_its_file_its_plants_and_its_situations() -> None:
    files = {path.stem for path in matrix.STYLES.glob("*.py")}
    assert files == set(STYLES) == set(matrix.PLANTS) == set(matrix.TARGET) == set(matrix.KIND)


@pytest.mark.parametrize(
    ("style", "situation"), [(style, situation) for style in STYLES for situation in STYLES[style].calls]
)
def test_a_style_as_it_stands_is_right(style: str, situation: str) -> None:
    got = run(right(style), style, situation)
    assert got
    assert all(torch.isfinite(x).all() for x in got)
    assert agree(style, got, situation)


@pytest.mark.parametrize(("style", "bug"), CELLS, ids=lambda part: part)
def test_a_plant_changes_the_result(style: str, bug: str) -> None:
    found = results(style, bug)
    shown = {x for x, got in found.items() if got is not None and not agree(style, got, x)}
    if bug in SHOWN_IN:
        assert shown == {SHOWN_IN[bug]}
        assert None not in found.values()
    else:
        assert shown - set(SHOWN_IN.values())


@pytest.mark.parametrize("style", matrix.PLANTS)
def test_no_two_plants_of_a_style_are_the_same(style: str) -> None:
    def same(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
        if one is None or other is None:
            return one is other
        pairs = list(zip(one, other, strict=True))
        return all(x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, equal_nan=True) for x, y in pairs)

    for one, other in combinations(matrix.PLANTS[style], 2):
        mine, others = results(style, one), results(style, other)
        assert not all(same(mine[x], others[x]) for x in mine), f"{one} and {other}"


def test_a_written_plant_runs_from_its_file(tmp_path: Path) -> None:
    for bug, changed in ((None, False), ("scaled-by-d", True)):
        path, name = matrix.write(tmp_path, "core", bug).rsplit(":", 1)
        planted = runpy.run_path(path)[name]
        assert agree("core", run(planted, "core", "plain"), "plain") is not changed


def test_a_plant_that_fits_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.PLANTS["einsum"], "unscaled", [("no such text", "")])
    with pytest.raises(ValueError, match="einsum, unscaled: expected 'no such text' once, found it 0 times"):
        matrix.source("einsum", "unscaled")
