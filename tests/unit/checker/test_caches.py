"""Caches of earlier keys and values: each way to use one passes, and each bug is found."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.candidates.adapter import Options
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.probe import open_adapter
from manyheads.checker.checks.cache import LONG_PREFILL, check_cache
from manyheads.checker.checks.evidence import gather
from manyheads.checker.checks.registry import Check
from manyheads.checker.isolation.process import open_candidate

pytestmark = pytest.mark.usefixtures("one_thread")


def judge(candidate: Any, kind: str = "self") -> tuple[Check, AttentionAdapter]:
    """Return the check of the candidate's cache alone, and the adapter."""
    with torch.no_grad(), torch.inference_mode(False), open_candidate(candidate) as opened:
        adapter = open_adapter(opened, Options(kind, False, {}, {}, None))
        assert isinstance(adapter, AttentionAdapter)
        result = check_cache(adapter)
        assert isinstance(result, Check)
        return result, adapter


class Layer(nn.Module):
    """Causal self-attention."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v `[b, h, t, d]`."""
        return tuple(f(x).unflatten(-1, (self.h, self.d)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the output; without a mask, the last query is the last key's."""
        t, s = q.shape[2], k.shape[2]
        visible = torch.ones(t, s, dtype=torch.bool).tril(s - t) if visible is None else visible
        weights = (q @ k.mT / self.d**0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def extend(past: Any, k: Tensor, v: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
    """Return the keys and values after those of the cache."""
    return (k, v) if past is None else (torch.cat((past[0], k), dim), torch.cat((past[1], v), dim))


# -- each way to use a cache -----------------------------------------------------------------------


class ReturnedTuple(Layer):
    def forward(self, x, layer_past=None, use_cache=False):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = extend(layer_past, k, v)
        out = self.attend(q, k, v)
        return (out, (k, v)) if use_cache else out


class ReturnedStack(Layer):
    def forward(self, x, past=None, need_weights=False):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = extend(past, k, v)
        return self.attend(q, k, v), None, torch.stack((k, v))


class ReturnedBySequence(Layer):
    def forward(self, hidden_states, past_k=None, past_v=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(hidden_states)
        k, v = (x.transpose(1, 2) for x in (k, v))
        k, v = extend(None if past_k is None else (past_k, past_v), k, v, 1)
        return self.attend(q, k.transpose(1, 2), v.transpose(1, 2)), k, v


class ReturnedDict(Layer):
    def forward(self, x, kv_cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = extend(kv_cache and (kv_cache["keys"], kv_cache["values"]), k, v)
        return {"out": self.attend(q, k, v), "cache": {"keys": k, "values": v}}


class ChangedDict(Layer):
    def forward(self, x, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = extend((cache["k"], cache["v"]) if "k" in cache else None, k, v)
            cache["k"], cache["v"] = k, v
        return self.attend(q, k, v)


class PreparedDict(Layer):
    def forward(self, x, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if cache is not None:
            if cache["key"] is not None:
                k, v = extend((cache["key"], cache["val"]), k, v)
            cache["key"], cache["val"] = k, v
        return self.attend(q, k, v)


class ChangedList(Layer):
    def forward(self, x, cache: list | None = None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
        return self.attend(q, k, v)


class Store:
    """Keys and values in tensors of a fixed size."""

    def __init__(self, max_batch: int, max_seq_len: int, n_kv_heads: int, head_dim: int) -> None:
        self.k, self.v = torch.zeros(2, max_batch, n_kv_heads, max_seq_len, head_dim)
        self.length = 0

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all."""
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class OwnClass(Layer):
    def forward(self, x, past: Store | None = None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        return self.attend(q, *((k, v) if past is None else past.add(k, v)))


class Prefilled(Layer):
    def forward(self, x, start_pos: int = 0, kv_cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if kv_cache is not None:
            end = start_pos + x.shape[1]
            kv_cache[0][:, :, start_pos:end], kv_cache[1][:, :, start_pos:end] = k, v
            k, v = kv_cache[0][:, :, :end], kv_cache[1][:, :, :end]
        return self.attend(q, k, v)


class InnerFlag(Layer):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.reset_cache()

    def reset_cache(self) -> None:
        self.cache_k = self.cache_v = None

    def forward(self, x, use_cache=False):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if use_cache:
            k, v = extend(None if self.cache_k is None else (self.cache_k, self.cache_v), k, v)
            self.cache_k, self.cache_v = k, v
        return self.attend(q, k, v)


class InnerStart(Layer):
    def __init__(self, d_model: int, num_heads: int, max_batch_size: int, max_seq_len: int) -> None:
        super().__init__(d_model, num_heads)
        self.cache_k = torch.zeros(max_batch_size, max_seq_len, num_heads, self.d)
        self.cache_v = torch.zeros(max_batch_size, max_seq_len, num_heads, self.d)

    def forward(self, x, start_pos):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        b, end = len(x), start_pos + x.shape[1]
        self.cache_k[:b, start_pos:end], self.cache_v[:b, start_pos:end] = (
            k.transpose(1, 2),
            v.transpose(1, 2),
        )
        return self.attend(q, *(cache[:b, :end].transpose(1, 2) for cache in (self.cache_k, self.cache_v)))


class KVCache(nn.Module):
    """Keys and values of a fixed number of positions."""

    def __init__(self, max_batch_size: int, max_seq_length: int, n_heads: int, head_dim: int) -> None:
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k_cache[:, :, input_pos], self.v_cache[:, :, input_pos] = k, v
        return self.k_cache, self.v_cache


class InnerModule(Layer):
    """Self-attention. mask [t, s]: True keeps."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.kv_cache = None

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        self.kv_cache = KVCache(max_batch_size, max_seq_length, self.h, self.d)

    def forward(self, x, mask=None, input_pos=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
        return self.attend(q, k, v, mask)


class InnerAttribute(InnerModule):
    """Self-attention. mask [t, s]: True keeps."""

    setup_caches = None  # type: ignore[assignment]


class Masked(Layer):
    """Self-attention. mask [t, s]: True keeps."""

    def forward(self, x, mask=None, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = extend(past, k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
        return self.attend(q, k, v, mask), (k, v)


class AlwaysInside(Layer):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.keys = self.values = None

    def reset(self) -> None:
        self.keys = self.values = None

    def forward(self, x):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        self.keys, self.values = extend(None if self.keys is None else (self.keys, self.values), k, v)
        return self.attend(q, self.keys, self.values)


class Required(Layer):
    def forward(self, x, cache):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = cache["k"], cache["v"] = extend((cache["k"], cache["v"]) if "k" in cache else None, k, v)
        return self.attend(q, k, v)


class RequiredClass(Layer):
    def forward(self, x, cache: Store):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        return self.attend(q, *cache.add(k, v))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of channels by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Turned(Layer):
    """Causal self-attention with a rotation."""

    def positions(self, t: int, start: int) -> Tensor:
        return torch.arange(start, start + t)

    def forward(self, x, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        positions = self.positions(x.shape[1], 0 if past is None else past[0].shape[2])
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = extend(past, k, v)
        return self.attend(q, k, v), (k, v)


class TurnedAtPositions(Layer):
    """Causal self-attention with a rotation."""

    def forward(self, x, position_ids=None, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        positions = torch.arange(x.shape[1]) if position_ids is None else position_ids[0]
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = extend(past, k, v)
        return self.attend(q, k, v), (k, v)


class Context(Layer):
    """Attention to a context, whose keys are computed once."""

    def forward(self, x, context, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = (f(y).unflatten(-1, (self.h, self.d)).transpose(1, 2) for f, y in self.pairs(x, context))
        k, v = (k, v) if cache is None else cache
        return self.attend(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)), (k, v)

    def pairs(self, x, context):  # type: ignore[no-untyped-def]
        return (self.q, x), (self.k, context), (self.v, context)


STYLES = [ReturnedTuple, ReturnedStack, ReturnedBySequence, ReturnedDict, ChangedDict, PreparedDict,
          ChangedList, OwnClass, Prefilled, InnerFlag, InnerStart, InnerModule, InnerAttribute, Masked,
          Turned, TurnedAtPositions, AlwaysInside, Required, RequiredClass, Context]  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_each_way_to_use_a_cache_passes(style: Any) -> None:
    result, adapter = judge(style, "cross" if style is Context else "self")
    assert result.status == "passed", (result, adapter.cache)
    assert adapter.cache is not None
    assert result.error is not None
    assert result.allowed is not None
    assert result.error <= result.allowed


def transformers_layers() -> list[Any]:
    """Return attention of transformers."""
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")

    class Llama(llama.LlamaAttention):  # type: ignore[name-defined,misc]
        """Causal self-attention."""

        def forward(self, x, past_key_values=None, cache_position=None):  # type: ignore[no-untyped-def]
            t = x.shape[1]
            positions = torch.arange(t) if cache_position is None else cache_position
            angles = positions[None, :, None] * 100.0 ** (-torch.arange(3).repeat(2) / 3)
            mask = torch.zeros(t, int(positions[-1]) + 1).masked_fill(
                torch.arange(int(positions[-1]) + 1) > positions[:, None], float("-inf")
            )
            embeddings = angles.cos(), angles.sin()
            return super().forward(x, embeddings, mask[None, None], past_key_values=past_key_values)[0]

    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    layers = [
        bert.BertSelfAttention(bert.BertConfig(**sizes), layer_idx=0),
        gpt2.GPT2Attention(gpt2.GPT2Config(n_embd=24, n_head=4, n_layer=1), layer_idx=0),
        Llama(llama.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=6), layer_idx=0),
        t5.T5Attention(
            t5.T5Config(d_model=24, num_heads=4, d_kv=6), has_relative_attention_bias=True, layer_idx=0
        ),
    ]
    layers[2].num_heads = 4  # the checker reads it, and not the configuration
    layers[2].num_key_value_heads = 2
    for layer in layers:
        layer.config._attn_implementation = "eager"
    return layers


@pytest.mark.full
def test_transformers_caches_pass() -> None:
    for layer in transformers_layers():
        result, adapter = judge(layer)
        assert result.status == "passed", result
        assert adapter.cache is not None
        assert "DynamicCache" in adapter.cache.description


# -- bugs ------------------------------------------------------------------------------------------


class Uncausal(Turned):
    """Causal self-attention with a rotation, but without a causal mask after a cache."""

    def attend(self, q, k, v, visible=None):  # type: ignore[no-untyped-def]
        t, s = q.shape[2], k.shape[2]
        return super().attend(q, k, v, None if t == s else torch.ones(t, s, dtype=torch.bool))


class UncausalInside(InnerStart):
    """Causal self-attention."""

    def attend(self, q, k, v, visible=None):  # type: ignore[no-untyped-def]
        t, s = q.shape[2], k.shape[2]
        return super().attend(
            q, k, v, torch.ones(t, s, dtype=torch.bool).tril() if t == s else torch.ones(t, s).bool()
        )


class Ignored(ReturnedTuple):
    def forward(self, x, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        return self.attend(q, k, v), extend(past, k, v)


class Overwritten(ReturnedTuple):
    def forward(self, x, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        return self.attend(q, *extend(past, k, v)), (k, v)


class OverwrittenInside(InnerFlag):
    def forward(self, x, use_cache=False):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        new = k, v
        if use_cache:
            k, v = extend(None if self.cache_k is None else (self.cache_k, self.cache_v), k, v)
            self.cache_k, self.cache_v = new
        return self.attend(q, k, v)


class NeverRead(InnerFlag):
    def forward(self, x, use_cache=False):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if use_cache:
            self.cache_k, self.cache_v = k, v
        return self.attend(q, k, v)


class WrongAxis(ReturnedTuple):
    def forward(self, x, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = extend(past, k, v, 1)
        return self.attend(q, k, v), (k, v)


class Restarting(Turned):
    """Causal self-attention with a rotation."""

    def positions(self, t: int, start: int) -> Tensor:
        return torch.arange(t)


class ByLength(Turned):
    """Causal self-attention with a rotation."""

    def positions(self, t: int, start: int) -> Tensor:
        if len(getattr(self, "last", ())) != t:
            self.last = torch.arange(start, start + t)
        return self.last


class Reversed(Turned):
    """Causal self-attention with a rotation."""

    def forward(self, x, past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        positions = self.positions(x.shape[1], 0 if past is None else past[0].shape[2])
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k, v = extend((k, v), *past)
        return self.attend(q, k, v), (k, v)


class Stale(InnerFlag):
    def reset_cache(self) -> None:
        if not hasattr(self, "cache_k"):
            super().reset_cache()


class Unasked(InnerFlag):
    def forward(self, x, use_cache=False):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if use_cache:
            k, v = extend(None if self.cache_k is None else (self.cache_k, self.cache_v), k, v)
        self.cache_k, self.cache_v = k, v
        return self.attend(q, k, v)


class OneBatch(InnerStart):
    b = 0

    def forward(self, x, start_pos):  # type: ignore[no-untyped-def]
        if start_pos:
            self.b = self.b or len(x)
        q, k, v = self.heads(x)
        b, end = (self.b or len(x)), start_pos + x.shape[1]
        self.cache_k[:b, start_pos:end], self.cache_v[:b, start_pos:end] = (
            k.transpose(1, 2),
            v.transpose(1, 2),
        )
        return self.attend(q, *(cache[:b, :end].transpose(1, 2) for cache in (self.cache_k, self.cache_v)))


class FirstKey(ReturnedTuple):
    def attend(self, q, k, v, visible=None):  # type: ignore[no-untyped-def]
        return super().attend(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril())


BUGS = [
    (
        Uncausal,
        "chunk-not-causal",
        "tokens 4 to 6 after a cache of 4: each attends to later tokens of its chunk",
    ),
    (UncausalInside, "chunk-not-causal", "tokens 4 to 6 after a cache of 4"),
    (Ignored, "cache-ignored", "token 1 after a cache of 1: the cached tokens have no effect"),
    (NeverRead, "cache-ignored", "token 1 after a cache of 1: the cached tokens have no effect"),
    (Overwritten, "cache-overwritten", "token 2 after a cache of 2: only the step before has an effect"),
    (
        OverwrittenInside,
        "cache-overwritten",
        "token 2 after a cache of 2: only the step before has an effect",
    ),
    (WrongAxis, None, "the step after a cache of 1 tokens raised an error"),
    (Restarting, "order-lost-in-steps", "the order of cached tokens has no effect"),
    (ByLength, "positions-by-length", "an earlier step had the same length"),
    (Reversed, None, "token"),
    (Stale, "cache-not-emptied", "a second sequence after a reset differs"),
    (Unasked, "cache-unasked", "a sequence differs after a call without the cache"),
    (OneBatch, None, "a sequence of another batch size"),
    (FirstKey, "first-key-only", "the causal mask counts from the first key"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("bug", "name", "reason"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_bug_of_a_cache_is_found(bug: Any, name: str | None, reason: str) -> None:
    result, _ = judge(bug)
    assert result.status == "failed"
    assert reason in result.reason
    assert (result.bug and result.bug.name) == name


class Rolling(Layer):
    """Causal self-attention with a sliding window. After `reset`: a prompt, then one token at a time."""

    def __init__(self, d_model: int, num_heads: int, window: int = 4) -> None:
        super().__init__(d_model, num_heads)
        self.window = window
        self.reset()

    def reset(self) -> None:
        self.seen, self.cached = 0, torch.zeros(0)

    def slots(self, positions: Tensor, is_prompt: bool) -> Tensor:
        return positions % self.window

    def forward(self, x: Tensor) -> Tensor:
        (q, *kv), start, t = self.heads(x), self.seen, x.shape[1]
        self.seen += t
        if start and t > 1:
            raise NotImplementedError("after the prompt, one token at a time")
        if not start:
            self.cached = torch.zeros(2, *kv[0].shape[:2], self.window, self.d)
        positions = torch.arange(start, self.seen)[-self.window :]
        self.cached[:, :, :, self.slots(positions, not start)] = torch.stack(kv)[
            ..., -len(positions) :, :
        ].detach()
        if start:
            n = min(self.seen, self.window)
            return self.attend(q, *self.cached[..., :n, :], torch.ones(1, n, dtype=torch.bool))
        distance = torch.arange(t)[:, None] - torch.arange(t)
        return self.attend(q, *kv, (distance >= 0) & (distance < self.window))


class RollingFromFirst(Rolling):
    """Causal self-attention with a sliding window. After `reset`: a prompt, then one token at a time."""

    def slots(self, positions: Tensor, is_prompt: bool) -> Tensor:
        return torch.arange(len(positions)) if is_prompt else super().slots(positions, is_prompt)


def test_a_prefill_that_is_longer_than_the_window() -> None:
    assert judge(Rolling)[0].status == "passed"
    result = judge(RollingFromFirst)[0]
    assert result.status == "failed"
    assert result.reason.startswith(LONG_PREFILL)


class Decoding(Layer):
    """Causal self-attention."""

    cached: Any = None

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, s = q.shape[2], k.shape[2]
        visible = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        weights = (q @ k.mT / self.d**0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self._mix(*self.heads(x))

    def decode(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.cached = extend(self.cached, k, v)
        return self._mix(q * self.d**0.5, *self.cached)


class AsAdvised(Decoding):
    """Causal self-attention."""

    def forward(self, x: Tensor) -> Tensor:
        self.cached = None
        return torch.cat([self.decode(token) for token in x.split(1, 1)], 1)


def test_a_method_that_forward_does_not_call_is_not_judged_and_the_adapter_is() -> None:
    found = checker.check(Decoding)
    assert found.verdict == "not judged"
    assert "self.decode(token) for token in x.split(1, 1)" in " ".join(found.words())
    assert [diagnosis.bug for diagnosis in checker.check(AsAdvised).diagnosis] == ["unscaled"]


# -- what is said, and what isn't ------------------------------------------------------------------


def test_the_report_names_the_bug_of_a_cache_once() -> None:
    report = checker.check(UncausalInside)
    assert [diagnosis.bug for diagnosis in report.diagnosis] == ["chunk-not-causal"]
    assert [check.name for check in report.checks if check.status == "failed"] == ["cache"]


class KeptInEvaluation(Layer):
    def forward(self, x):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if not self.training:
            earlier = getattr(self, "k_cache", None)
            fits = earlier is not None and len(earlier) == len(x)
            k, v = extend((earlier, self.v_cache) if fits else None, k, v)
            self.k_cache, self.v_cache = k, v
        return self.attend(q, k, v)


def test_a_cache_that_every_call_uses_and_nothing_empties() -> None:
    report = checker.check(KeptInEvaluation)
    assert [diagnosis.bug for diagnosis in report.diagnosis] == ["cache-unasked"]


def test_evidence_has_the_steps_of_each_way_to_call_a_cache() -> None:
    _, adapter = judge(InnerFlag)
    calls = {call.scenario: call for call in gather(adapter, range(200, 201)) if "cache" in call.scenario}
    assert [*calls] == ["cache, one token", "cache, chunk", "cache, after a reset"]
    for call in calls.values():
        assert adapter.is_right(call.inputs, call.outputs)
        assert call.inputs.offset == call.inputs.s - call.inputs.t


@pytest.mark.every(3)
@pytest.mark.skipif(os.name != "posix", reason="needs inherited pipes")
@pytest.mark.parametrize("style", ["OwnClass", "ReturnedDict", "InnerModule"])
def test_a_cache_in_another_process(style: str) -> None:
    result, _ = judge(f"{__file__}:{style}")
    assert result.status == "passed", result


def test_an_instance_is_as_before() -> None:
    layer = InnerFlag(24, 4)
    layer.cache_k = kept = torch.ones(2, 4, 1, 6)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    judge(layer)
    assert layer.cache_k is kept
    assert layer.cache_v is None
    assert bool((kept == 1).all())
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


class Opaque(ReturnedTuple):
    def forward(self, x, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if cache is not None:
            cache.grow(k, v)
            k, v = (torch.cat(parts, 2) for parts in zip(*cache.parts, strict=True))
        return self.attend(q, k, v)


@pytest.mark.full
def test_a_cache_that_cannot_be_made_is_not_judged_and_the_adapter_is() -> None:
    result, adapter = judge(Opaque)
    assert result.status == "not judged"
    assert adapter.cache is None
    text = result.reason.partition(":\n")[2]

    class MyCache:
        def __init__(self) -> None:
            self.parts: list[tuple[Tensor, Tensor]] = []

        def grow(self, k: Tensor, v: Tensor) -> None:
            self.parts.append((k, v))

    names: dict[str, Any] = {"Opaque": Opaque, "MyCache": MyCache, "__name__": __name__}
    exec(text, names)
    result, _ = judge(names["Adapter"])
    assert result.status == "passed", result


class OneToken(Uncausal):
    """Causal self-attention with a rotation. With a cache, x is one token."""


class Refuses(Turned):
    """Causal self-attention with a rotation."""

    def forward(self, x, past=None):  # type: ignore[no-untyped-def]
        if past is not None and x.shape[1] > 1:
            raise ValueError("Expected one token after the first step.")
        return super().forward(x, past)


@pytest.mark.every(2)
@pytest.mark.parametrize("layer", [OneToken, Refuses])
def test_steps_of_one_token_are_enough_where_others_are_excluded(layer: Any) -> None:
    result, _ = judge(layer)
    assert result.status == "passed"
    assert "several tokens at once" in result.reason


class ByDefault(ReturnedTuple):
    def forward(self, x, layer_past=None, use_cache=True):  # type: ignore[no-untyped-def]
        return super().forward(x, layer_past, use_cache)


def test_a_cache_that_is_used_by_default() -> None:
    result, adapter = judge(ByDefault)
    assert result.status == "passed"
    x = adapter.draw(torch.Generator(), 2, 3)
    assert isinstance(adapter.answer(x).output, Tensor)
