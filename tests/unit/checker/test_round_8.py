"""Styles and bugs of modules that the checker misjudged in a blind round, each in a small module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from manyheads.checker.candidates.adapter import Options
from manyheads.checker.candidates.documentation import read_mask
from manyheads.checker.candidates.names import parameter_role
from manyheads.checker.candidates.parts import factorize
from manyheads.checker.candidates.probe import open_adapter
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.parts import TableBias

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


def bugs(report: checker.Report) -> list[str]:
    return [diagnosis.bug for diagnosis in report.diagnosis]


class Layer(nn.Module):
    """Attention with 4 heads, whose steps can be overridden."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj)]

    def merge(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def past(t: int, s: int, window: int = 1000) -> Tensor:
    """Return the mask of the last t of s tokens, [t, s]: the last `window` keys are visible."""
    return torch.ones(t, s, dtype=torch.bool).tril(s - t).triu(s - t - window + 1)


# -- names of parameters and documentation ---------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("query_dense.weight", "q"),
        ("output_dense.bias", "o"),
        ("attention.valueEmbedder.weight", "v"),
        ("ks_layer.weight", "k"),
        ("q_attn.weight", "q"),
        ("key_value_dense.weight", "kv"),
        ("kv_einsum", "kv"),
        ("query_tokens", None),
        ("query_embed.weight", None),
        ("norm_q_scale", None),
    ],
)
def test_words_of_a_name_give_the_role_of_a_parameter(path: str, role: str | None) -> None:
    found = parameter_role(path)
    assert (found and found[0]) == role


@pytest.mark.parametrize(
    "text",
    [
        "mask (Tensor): used for causal attention, where it keeps a query from looking ahead: (t, s), "
        "added to the scores.",
        "mask: (batch, 1, 1, keys), added to the scores: 0 for tokens, the lowest number for padding.",
    ],
)
def test_documentation_says_that_a_mask_is_added(text: str) -> None:
    assert read_mask("mask", text).is_additive


def test_windows_of_three_axes() -> None:
    assert set(factorize(12)) >= {(3, 4), (2, 2, 3), (3, 2, 2)}
    assert TableBias("table", "window", window=(2, 2, 3)).natural_strides == [15, 5, 1]


class Transposed(nn.Module):
    """A linear layer whose weight is stored as [in, out]."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D = type("Conv1D", (Transposed,), {})


class Crossing(nn.Module):
    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.num_heads = 4
        self.c_attn, self.q_attn, self.c_proj = (Conv1D(dim, n * dim) for n in (2, 1, 1))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2)
            for y in (self.q_attn(x), *self.c_attn(context).chunk(2, -1))
        )
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Wide(nn.Module):
    """A packed projection to heads that are together wider than the input."""

    def __init__(self, dim: int = 24, num_heads: int = 4, d_head: int = 16) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projection = nn.Linear(dim, 3 * num_heads * d_head)
        self.output = nn.Linear(num_heads * d_head, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, -1)
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Added(Layer):
    """mask: (batch, 1, 1, keys), added to the scores: 0 for tokens, the lowest number for padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return self.merge((scores if mask is None else scores + mask).softmax(-1), v)


@pytest.mark.full
@pytest.mark.parametrize("layer", [Crossing, Wide, Added])
def test_right_layers_pass(layer: Any) -> None:
    report = checker.check(layer)
    assert report.passed, report


class Compressed(Layer):
    """Keys and values of low rank."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        del self.k_proj, self.v_proj
        self.kv_a, self.kv_b = nn.Linear(dim, 8), nn.Linear(8, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv_b(self.kv_a(x)).chunk(2, -1)
        q, k, v = map(self.split, (self.q_proj(x), k, v))
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


def test_a_packed_projection_of_low_rank_is_not_known() -> None:
    with pytest.raises(checker.Unclear, match="low rank"):
        checker.check(Compressed, "self")


# -- bugs ------------------------------------------------------------------------------------------


class WrongCosine(Layer):
    """Attention by cosines, divided by a learned temperature."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.tau = nn.Parameter(torch.full((1, 4, 1, 1), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        cosines = q @ k.mT / (q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True)).clamp_min(1e-6)
        return self.merge((cosines / self.tau.clamp(min=0.01)).softmax(-1), v)


class CosineOverTokens(Layer):
    """Attention by cosines, times a learned temperature."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.temperature = nn.Parameter(torch.full((4, 1, 1), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = F.normalize(q, dim=-1) @ F.normalize(k.mT, dim=-1) * self.temperature
        return self.merge(scores.softmax(-1), v)


class IdleScales(Layer):
    """Attention whose queries and keys are normalized (L2), with scales; scores are multiplied by 8."""

    def __init__(self, dim: int = 24, scale: float = 8.0) -> None:
        super().__init__(dim)
        self.scale = scale
        self.alpha, self.beta = (nn.Parameter(torch.ones(4, 1, dim // 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale).softmax(-1), v)


class ReshapedBias(Layer):
    """Attention with a learned bias by distance."""

    def __init__(self, dim: int = 24, max_distance: int = 7) -> None:
        super().__init__(dim)
        self.most = max_distance
        self.table = nn.Parameter(torch.zeros(2 * max_distance + 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        distance = (torch.arange(t) - torch.arange(t)[:, None]).clamp(-self.most, self.most)
        bias = self.table[distance + self.most].reshape(4, t, t)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1), v)


class WrongVolume(Layer):
    """Attention in a volume of 2 × 2 × 3 tokens, with a learned bias by distance."""

    def __init__(self, dim: int = 24, volume: tuple[int, int, int] = (2, 2, 3)) -> None:
        super().__init__(dim)
        self.bias_table = nn.Parameter(torch.zeros(math.prod(2 * n - 1 for n in volume), 4))
        places = torch.cartesian_prod(*map(torch.arange, volume))  # [t, 3]
        distance = places[:, None] - places[None] + torch.tensor(volume) - 1
        self.register_buffer("index", (distance * torch.tensor([15, 3, 1])).sum(-1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        bias = self.bias_table[self.index].permute(2, 0, 1)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1), v)


class FirstColumnDropped(Layer):
    """Causal attention with a sink."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~past(x.shape[1], x.shape[1]), -torch.inf)
        sink = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        return self.merge(torch.cat((scores, sink), -1).softmax(-1)[..., 1:], v)


class CappedMask(Layer):
    """Causal attention in a window, whose scores are capped."""

    def __init__(self, dim: int = 24, window: int = 4, logit_cap: float = 3.0) -> None:
        super().__init__(dim)
        self.window, self.logit_cap = window, logit_cap

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~past(x.shape[1], x.shape[1], self.window), -1e30)
        return self.merge((self.logit_cap * (scores / self.logit_cap).tanh()).softmax(-1), v)


class OneKeyMore(Layer):
    """Causal attention: a token attends to itself and to earlier ones, `window` keys in all."""

    def __init__(self, dim: int = 24, window: int = 4) -> None:
        super().__init__(dim)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        visible = past(x.shape[1], x.shape[1], self.window + 1)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


class Chunks(Layer):
    """Attention by chunks of keys with a running maximum, by which sums are not rescaled."""

    def __init__(self, dim: int = 24, chunk_size: int = 16) -> None:
        super().__init__(dim)
        self.chunk_size = chunk_size

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        highest, total, out = torch.full((*q.shape[:3], 1), -torch.inf), 0.0, 0.0
        for keys, values in zip(k.split(self.chunk_size, 2), v.split(self.chunk_size, 2), strict=True):
            scores = q @ keys.mT / q.shape[-1] ** 0.5
            before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = (scores - highest).exp()
            total = total * (before - highest).exp() + weights.sum(-1, keepdim=True)
            out = out + weights @ values
        return self.o_proj((out / total).transpose(1, 2).flatten(2))


class KeptMask(Layer):
    """mask [b, s]: True = visible."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            kept = self.__dict__.setdefault("kept", {})
            scores = scores.masked_fill(~kept.setdefault(mask.shape, mask)[:, None, None], -torch.inf)
        return self.merge(scores.softmax(-1), v)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layer", "bug"),
    [
        (WrongCosine, "norm-of-wrong-token"),
        (CosineOverTokens, "norm-axis"),
        (IdleScales, "norm-unscaled"),
        (ReshapedBias, "bias-reshaped"),
        (WrongVolume, "window-index"),
        (FirstColumnDropped, "sink-column-kept"),
        (CappedMask, "cap-elsewhere"),
        (OneKeyMore, "window-off"),
        (KeptMask, "mask-kept"),
        (Chunks, "chunks-not-rescaled"),
    ],
)
def test_bugs_are_named(layer: Any, bug: str) -> None:
    assert bugs(checker.check(layer, "self")) == [bug]


@pytest.mark.full
def test_inputs_fill_more_than_one_chunk_of_keys() -> None:
    candidate, options = Candidate(Chunks), Options("self", True, {}, {}, None, {}, None)
    assert open_adapter(candidate, options).length > 16


# -- caches ----------------------------------------------------------------------------------------


class Cached(Layer):
    """Causal attention in a window of 4 keys, its own included. Returns the output and (k, v)."""

    window = 4

    def __init__(self, dim: int = 24, window: int = 4) -> None:
        super().__init__(dim)
        self.window = window

    def encode(self, k: Tensor) -> Tensor:
        return k

    def visible(self, t: int, s: int) -> Tensor:
        return past(t, s, self.window)

    def cut(self, k: Tensor) -> Tensor:
        return k

    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        q, k, v = self.heads(x)
        if past_kv is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_kv, (k, v), strict=True))
        k, v = self.cut(self.encode(k)), self.cut(v)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
            ~self.visible(x.shape[1], k.shape[2]), -torch.inf
        )
        return self.merge(scores.softmax(-1), v), (k, v)


class NoWindowInSteps(Cached):
    """Causal attention in a window of 4 keys, its own included. Returns the output and (k, v)."""

    def visible(self, t: int, s: int) -> Tensor:
        return past(t, s, self.window if t > 1 else 1000)


class Trimmed(Cached):
    """Causal attention in a window of 4 keys, its own included. Returns the output and (k, v)."""

    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        t = x.shape[1]
        if past_kv is not None:
            past_kv = [y[:, :, -max(self.window - t, 0) or y.shape[2] :] for y in past_kv]
        return super().forward(x, past_kv)


class NormedAgain(Layer):
    """Causal attention with RMS norms of queries and keys. Returns the output and (k, v)."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // 4, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        q, k, v = self.heads(x)
        if past_kv is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_kv, (k, v), strict=True))
        q, k = self.q_norm(q), self.k_norm(k)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~past(x.shape[1], k.shape[2]), -torch.inf)
        return self.merge(scores.softmax(-1), v), (k, v)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (Cached, []),
        (NoWindowInSteps, ["window-lost-in-steps"]),
        (Trimmed, ["window-trimmed"]),
        (NormedAgain, ["norm-again"]),
    ],
)
def test_bugs_of_caches_are_named(layer: Any, names: list[str]) -> None:
    assert bugs(checker.check(layer, "self")) == names
