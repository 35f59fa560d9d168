"""Styles and bugs of modules that the checker misjudged in a blind round, each in a small module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from manyheads.checker.candidates.documentation import read_mask, says_vectors
from manyheads.checker.parts import select_buckets
from tests.unit.checker.test_round_8 import Layer, bugs, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


# -- documentation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "mask: optional additive mask [b, 1, t, s]\n    (0 = keep, large negative = drop).",
        "mask: additive, broadcastable to [b, h, t, s] (0 keep, very negative drop).",
        "mask [>= n_ctx, >= n_ctx] added to the scores (-inf above the diagonal)",
    ],
)
def test_an_additive_mask_may_have_words_for_its_entries(text: str) -> None:
    assert read_mask("mask", text).is_additive


def test_a_shape_may_be_a_lower_bound() -> None:
    assert read_mask("mask", "mask [>= n_ctx, >= n_ctx] added to the scores").shapes == {"ts"}


def test_positions_may_be_vectors() -> None:
    assert says_vectors("pos", "pos: spatial embeddings of the image")
    assert says_vectors("pos", "memory [b, s, d], pos [b, s, d]")
    assert not says_vectors("pos", "x [b, t, d]; pos [b, t]")


# -- right modules ---------------------------------------------------------------------------------


class ScaledAlibi(Layer):
    """Causal attention with ALiBi, added before the scaling of the scores."""

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        slopes = 2.0 ** -torch.arange(2, 9, 2)[:, None, None]
        scores = (q @ k.mT + slopes * torch.arange(t)) * q.shape[-1] ** -0.5
        return self.merge(scores.masked_fill(~past(t, t), -torch.inf).softmax(-1), v)


class RelativeVectors(Layer):
    """Attention whose scores have the products of queries and vectors of distances."""

    def __init__(self, dim: int = 24, longest: int = 32) -> None:
        super().__init__(dim)
        self.longest, self.vectors = longest, nn.Embedding(2 * longest - 1, dim // self.num_heads)

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), at = self.heads(x), torch.arange(x.shape[1])
        table = self.vectors(at[:, None] - at + self.longest - 1)
        scores = q @ k.mT + torch.einsum("bhtd,tsd->bhts", q, table)
        return self.merge((scores / q.shape[-1] ** 0.5).softmax(-1), v)


class WithResidual(Layer):
    """Attention, to whose output the residual is added."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v) + residual


class BiasApart(Layer):
    """Attention that returns its output without the output's bias, and the bias."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        mixed = ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return mixed @ self.o_proj.weight.mT, self.o_proj.bias


class Grouped(nn.Module):
    """Causal attention whose packed rows are those of each group: its queries, its key and its value."""

    def __init__(self, dim: int = 32, n_head: int = 8, n_query_groups: int = 4) -> None:
        super().__init__()
        self.n_head, self.n_query_groups = n_head, n_query_groups
        d = dim // n_head
        self.attn, self.proj = nn.Linear(dim, (n_head + 2 * n_query_groups) * d), nn.Linear(dim, dim)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_head // self.n_query_groups, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        n = self.n_head // self.n_query_groups
        packed = self.attn(x).view(b, t, self.n_query_groups, n + 2, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (y.flatten(1, 2) for y in packed.split((n, 1, 1), 2))
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, e))


class Gated(nn.Module):
    """Attention whose query projection has a gate beside each head's query."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.q_proj = num_heads, nn.Linear(dim, 2 * dim)
        self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(3))

    def arrange(self, gate: Tensor) -> Tensor:
        return gate.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        q, gate = self.q_proj(x).view(b, t, self.num_heads, -1).chunk(2, -1)
        k, v = (y(x).view(b, t, self.num_heads, -1).transpose(1, 2) for y in (self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v) * self.arrange(gate).sigmoid()
        return self.o_proj(y.transpose(1, 2).reshape(b, t, e))


class OneScale(Layer):
    """Attention as in T5, with a relative bias without a context; scores aren't divided by the root of d."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.bias = nn.Parameter(torch.zeros(63, self.num_heads))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q = self.split(self.q_proj(x))
        k, v = (self.split(f(x if context is None else context)) for f in (self.k_proj, self.v_proj))
        scores, at = q @ k.mT, torch.arange(x.shape[1])
        if context is None:
            scores = scores + self.bias[(at - at[:, None]).clamp(-31, 31) + 31].permute(2, 0, 1)
        return self.merge(scores.softmax(-1), v)


class Ring:
    """The last keys and values, and the positions of the tokens that they are of."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v, self.at = k, v, torch.full(k.shape[2:3], -1)
        self.seen = 0


class Rolling(Layer):
    """A sliding window, the token itself included. A cache is made by new_cache and changed by each step.

    The prompt goes into an empty cache; then each step is one token.
    """

    def __init__(self, dim: int = 24, window: int = 4) -> None:
        super().__init__(dim)
        self.window = window

    def new_cache(self, batch: int) -> Ring:
        zeros = torch.zeros(batch, self.num_heads, self.window, 6)
        return Ring(zeros, zeros.clone())

    def visible(self, cache: Ring) -> Tensor:
        return (cache.at >= 0)[None]

    def forward(self, x: Tensor, cache: Ring | None = None) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        visible = past(t, t, self.window)
        if cache is not None:
            at = torch.arange(cache.seen, cache.seen + t)[-self.window :]
            slots = at % self.window
            cache.k[:, :, slots], cache.v[:, :, slots], cache.at[slots] = (
                k[:, :, -self.window :].detach(),
                v[:, :, -self.window :].detach(),
                at,
            )
            if cache.seen:
                if t > 1:
                    raise ValueError("a step is one token")
                k, v, visible = cache.k, cache.v, self.visible(cache)
            cache.seen += t
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v)


class Remembering(Layer):
    """Causal attention. padding [b, t] is that of the call, True = padding; the state keeps the earlier."""

    def join(self, before: Tensor | None, padding: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        if before is None and padding is None:
            return None
        new = torch.zeros(shape, dtype=torch.bool) if padding is None else padding
        return new if before is None else torch.cat((before, new), 1)

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, incremental_state: dict[str, Any] | None = None
    ) -> Tensor:
        q, k, v = self.heads(x)
        if incremental_state is not None:
            if "k" in incremental_state:
                k, v = (
                    torch.cat((incremental_state["k"], k), 2),
                    torch.cat((incremental_state["v"], v), 2),
                )
                n = incremental_state["k"].shape[2]
                before = incremental_state["padding"]
                before = torch.zeros(len(x), n, dtype=torch.bool) if before is None else before
                padding_mask = self.join(before, padding_mask, x.shape[:2])
            incremental_state |= {"k": k, "v": v, "padding": padding_mask}
        hidden = ~past(x.shape[1], k.shape[2])
        if padding_mask is not None:
            hidden = hidden | padding_mask[:, None, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, torch.finfo(q.dtype).min)
        return self.merge(scores.softmax(-1), v)


class Slots(Layer):
    """Causal attention. With positions [t], keys and values are stored there, in a cache of 64 slots."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.register_buffer("cache_k", torch.zeros(4, self.num_heads, 64, 6), persistent=False)
        self.register_buffer("cache_v", torch.zeros(4, self.num_heads, 64, 6), persistent=False)

    def mask(self, t: int, s: int) -> Tensor:
        return past(t, s)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        (q, k, v), b = self.heads(x), len(x)
        if positions is not None:
            self.cache_k[:b, :, positions], self.cache_v[:b, :, positions] = k.detach(), v.detach()
            end = int(positions[-1]) + 1
            k, v = self.cache_k[:b, :, :end], self.cache_v[:b, :, :end]
        visible = self.mask(q.shape[2], k.shape[2])
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v)


class Local(Layer):
    """A window of tokens on both sides of each token."""

    def __init__(self, dim: int = 24, window: int = 3) -> None:
        super().__init__(dim)
        self.window = window

    def distance(self, t: int) -> Tensor:
        return (torch.arange(t)[:, None] - torch.arange(t)).abs()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        hidden = self.distance(x.shape[1]) >= self.window
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1), v)


class Sunk(Layer):
    """Causal attention with a sink for each head."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads))

    def softmax(self, scores: Tensor, sink: Tensor) -> Tensor:
        return torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1).softmax(-1)[..., :-1]

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~past(t, t), -torch.inf)
        return self.merge(self.softmax(scores, self.sinks[:, None, None]), v)


class Capped(Layer):
    """Attention with scores that are capped by tanh."""

    def __init__(self, dim: int = 24, softcap: float = 3.0) -> None:
        super().__init__(dim)
        self.softcap = softcap

    def cap(self, scores: Tensor) -> Tensor:
        return self.softcap * (scores / self.softcap).tanh()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(self.cap(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class Resampler(Layer):
    """Latents attend to x and to themselves, and to a learned key. mask [b, s], True = visible."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.null_kv = nn.Parameter(torch.zeros(2, self.num_heads, 6))

    def forward(self, x: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        both = torch.cat((x, latents), 1)
        q, k, v = (self.split(y) for y in (self.q_proj(latents), self.k_proj(both), self.v_proj(both)))
        null = self.null_kv[:, None, :, None].expand(2, len(x), -1, -1, -1)
        k, v = (torch.cat(each, 2) for each in ((null[0], k), (null[1], v)))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            visible = F.pad(mask, (1, latents.shape[1]), value=True)
            scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        return self.merge(scores.softmax(-1), v)


RIGHT = [
    *(ScaledAlibi, RelativeVectors, WithResidual, BiasApart, Grouped, Gated, OneScale),
    *(Resampler, Rolling, Remembering, Slots, Local, Sunk, Capped),
]


@pytest.mark.parametrize("module", RIGHT)
def test_a_right_module_passes(module: type) -> None:
    report = checker.check(module)
    assert report.passed, str(report)


# -- wrong modules ---------------------------------------------------------------------------------


class Tiled(Grouped):
    """Causal attention whose packed rows are those of each group: its queries, its key and its value."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.n_head // self.n_query_groups, 1, 1)


class GateReshaped(Gated):
    """Attention whose query projection has a gate beside each head's query."""

    def arrange(self, gate: Tensor) -> Tensor:
        b, t, h, d = gate.shape
        return gate.reshape(b, h, t, d)


class SlotsHidden(Rolling):
    """A sliding window, the token itself included. A cache is made by new_cache and changed by each step.

    The prompt goes into an empty cache; then each step is one token.
    """

    def visible(self, cache: Ring) -> Tensor:
        return (torch.arange(self.window) <= cache.seen % self.window)[None]


class Forgetting(Remembering):
    """Causal attention. padding [b, t] is that of the call, True = padding; the state keeps the earlier."""

    def join(self, before: Tensor | None, padding: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        return None if padding is None else super().join(before, padding, shape)


class FromFirstKey(Slots):
    """Causal attention. With positions [t], keys and values are stored there, in a cache of 64 slots."""

    def mask(self, t: int, s: int) -> Tensor:
        return torch.ones(t, s, dtype=torch.bool).tril() | torch.tensor(t == 1)


class OneSided(Local):
    """A window of tokens on both sides of each token."""

    def distance(self, t: int) -> Tensor:
        return torch.arange(t)[:, None] - torch.arange(t)


class Unshifted(Sunk):
    """Causal attention with a sink for each head."""

    def softmax(self, scores: Tensor, sink: Tensor) -> Tensor:
        exp = (scores - scores.amax(-1, keepdim=True).maximum(sink)).exp()
        return exp / (exp.sum(-1, keepdim=True) + sink.exp())


class TimesScore(Capped):
    """Attention with scores that are capped by tanh."""

    def cap(self, scores: Tensor) -> Tensor:
        return scores * (scores / self.softcap).tanh()


class AfterSoftmax(Layer):
    """Causal attention to texts of at most block_size tokens."""

    def __init__(self, dim: int = 24, block_size: int = 16) -> None:
        super().__init__(dim)
        self.register_buffer("tril", past(block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.merge(weights.masked_fill(~self.tril[:t, :t], 0.0), v)


class SharedBucket(Layer):
    """Attention with T5's relative bias."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.relative_attention_bias = nn.Embedding(16, self.num_heads)

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), at = self.heads(x), torch.arange(x.shape[1])
        distance = at - at[:, None]
        index = select_buckets(distance.clamp_max(0), 16, 128, True) + (distance > 0) * 8
        bias = self.relative_attention_bias(index).permute(2, 0, 1)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1), v)


WRONG = [
    (SharedBucket, ["buckets-future-shared"]),
    (AfterSoftmax, ["masked-after-softmax"]),
    (Tiled, ["key-heads-tiled"]),
    (GateReshaped, ["gate-reshaped"]),
    (SlotsHidden, ["window-slots-hidden"]),
    (Forgetting, ["padding-in-steps"]),
    (FromFirstKey, ["first-key-only"]),
    (OneSided, ["window-one-sided"]),
    (Unshifted, ["sink-unshifted"]),
    (TimesScore, ["cap-unscaled"]),
]


@pytest.mark.parametrize(("module", "names"), WRONG)
def test_a_wrong_module_is_named(module: type, names: list[str]) -> None:
    assert bugs(checker.check(module)) == names


# -- what can't be judged --------------------------------------------------------------------------


class Edges(Layer):
    """Causal attention to one packed sequence, x [1, t, e].

    edges: optional, where the packed segments end, after a 0 (cumulative lengths).
    """

    def __init__(self, dim: int = 24, shift: int = 0) -> None:
        super().__init__(dim)
        self.shift = shift

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        visible = past(t, t)
        if edges is not None:
            segment = torch.bucketize(torch.arange(t) + self.shift, edges, right=True)
            visible = visible & (segment[:, None] == segment)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v)


def test_documented_segments_are_asked_for() -> None:
    report = checker.check(Edges)
    assert report.verdict == "not judged"
    assert "--arg edges=ROLE" in str(report).replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize(("shift", "verdict"), [(0, "passed"), (1, "failed")])
def test_their_role_lets_the_check_go_on(shift: int, verdict: str) -> None:
    report = checker.check(Edges, init={"shift": shift}, args={"edges": "cumulative-lengths"})
    assert report.verdict == verdict, str(report)
