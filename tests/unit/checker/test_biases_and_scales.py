"""Bugs of biases that calls may replace, and of scales that a setting changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.parts import select_buckets
from tests.unit.checker.test_round_8 import Layer, bugs, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class T5Attention(Layer):
    """Attention as in T5's encoder: unscaled, with a relative bias, which a call can replace."""

    is_reshaped = False

    def __init__(self, dim: int = 24, num_heads: int = 4, relative_attention_num_buckets: int = 32) -> None:
        super().__init__(dim, num_heads)
        self.relative_attention_bias = nn.Embedding(relative_attention_num_buckets, num_heads)

    def compute_bias(self, t: int) -> Tensor:
        distances = torch.arange(t) - torch.arange(t)[:, None]
        bias = self.relative_attention_bias(select_buckets(distances, 32, 128, True))
        return bias.reshape(1, -1, t, t) if self.is_reshaped else bias.permute(2, 0, 1)[None]

    def forward(self, hidden_states: Tensor, position_bias: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(hidden_states)
        if position_bias is None:
            position_bias = self.compute_bias(q.shape[2])
        return self.merge((q @ k.mT + position_bias).softmax(-1), v)


class ReshapedT5(T5Attention):
    """The bias [t, s, h] is reshaped to [h, t, s]."""

    is_reshaped = True

    def forward(self, hidden_states: Tensor, position_bias: Tensor | None = None) -> Tensor:
        if position_bias is None:
            position_bias = self.compute_bias(hidden_states.shape[1])
        return super().forward(hidden_states, position_bias)


class WideT5(Layer):
    """Attention as in T5's encoder, unscaled, with as many buckets as a head has entries."""

    is_overlapping = False

    def __init__(
        self, dim: int = 64, num_heads: int = 4, num_buckets: int = 16, max_distance: int = 32
    ) -> None:
        super().__init__(dim, num_heads)
        self.max_distance = max_distance
        self.relative_bias = nn.Embedding(num_buckets, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        distances = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
        n = self.relative_bias.num_embeddings
        buckets = select_buckets(distances, n, self.max_distance, True, self.is_overlapping)
        return self.merge((q @ k.mT + self.relative_bias(buckets).permute(2, 0, 1)).softmax(-1), v)


class OverlappingT5(WideT5):
    """Attention as in T5's encoder, unscaled; large distances have the buckets of small ones."""

    is_overlapping = True


class BiasWithoutGradient(WideT5):
    """Attention as in T5's encoder, unscaled, whose bias is computed without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        table = self.relative_bias.forward
        self.relative_bias.forward = lambda index: table(index).detach()
        try:
            return super().forward(x)
        finally:
            del self.relative_bias.forward


class FrozenBias(BiasWithoutGradient):
    """Attention as in T5's encoder, unscaled. The table of its bias isn't trained."""


class WithMemory(T5Attention):
    """Causal attention with T5's bias, times √d, whose keys may begin with earlier tokens."""

    def forward(self, x: Tensor, mem: Tensor | None = None) -> Tensor:
        tokens = x if mem is None else torch.cat((mem, x), dim=1)
        return self.attend(x, tokens, tokens.shape[1] - x.shape[1])

    def attend(self, x: Tensor, tokens: Tensor, first: int) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(tokens)), self.split(self.v_proj(tokens))
        t, s = q.shape[2], k.shape[2]
        distances = torch.arange(s) - torch.arange(first, first + t)[:, None]
        buckets = select_buckets(distances, 32, 128, False)
        bias = self.relative_attention_bias(buckets).permute(2, 0, 1) * q.shape[-1] ** 0.5
        scores = (q @ k.mT) * q.shape[-1] ** -0.5 + bias
        return self.merge(scores.masked_fill(~past(t, s), -torch.inf).softmax(-1), v)


class MemoryNotCounted(WithMemory):
    """The bias counts queries from the first earlier token."""

    def forward(self, x: Tensor, mem: Tensor | None = None) -> Tensor:
        return self.attend(x, x if mem is None else torch.cat((mem, x), dim=1), 0)


class SwinAttention(Layer):
    """Attention in a window of 3 × 3 tokens with a learned bias, as in Swin."""

    is_reshaped = False

    def __init__(self, dim: int = 24, num_heads: int = 4, window_size: tuple[int, int] = (3, 3)) -> None:
        super().__init__(dim, num_heads)
        rows, columns = window_size
        self.relative_position_bias_table = nn.Parameter(
            torch.randn((2 * rows - 1) * (2 * columns - 1), num_heads)
        )
        at = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
        row, column = at[:, :, None] - at[:, None]
        index = (row + rows - 1) * (2 * columns - 1) + column + columns - 1
        self.register_buffer("relative_position_index", index)

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = bias.view(-1, t, t) if self.is_reshaped else bias.view(t, t, -1).permute(2, 0, 1)
        return self.merge((q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1), v)


class ReshapedSwin(SwinAttention):
    """The bias [t, s, h] is viewed as [h, t, s]."""

    is_reshaped = True


class LayerScaled(Layer):
    """Attention whose scores are divided by the number of the layer, and multiplied again in float32."""

    def __init__(self, dim: int = 24, num_heads: int = 4, layer_number: int = 6) -> None:
        super().__init__(dim, num_heads)
        self.layer_number = layer_number

    def restore(self, scores: Tensor) -> Tensor:
        return scores * self.layer_number

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / (q.shape[-1] ** 0.5 * self.layer_number)
        return self.merge(self.restore(scores).softmax(-1), v)


class NotRestored(LayerScaled):
    """The scores aren't multiplied again."""

    def __init__(self, hidden: int = 32, num_heads: int = 4, layer_number: int = 6) -> None:
        super().__init__(hidden, num_heads, layer_number)

    def restore(self, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("kind", [T5Attention, WithMemory, SwinAttention, LayerScaled])
def test_right_biases_and_scales_pass(kind: type[Layer]) -> None:
    report = checker.check(kind)
    assert report.passed, report


@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        (ReshapedT5, "bias-reshaped"),
        (ReshapedSwin, "bias-reshaped"),
        (MemoryNotCounted, "bias-offset-ignored"),
        (NotRestored, "scaled-by-setting"),
    ],
)
def test_bugs_of_biases_and_scales_are_named(kind: type[Layer], bug: str) -> None:
    report = checker.check(kind)
    assert (report.verdict, bugs(report)) == ("failed", [bug])


def test_earlier_tokens_are_exercised() -> None:
    report = checker.check(WithMemory)
    assert "earlier tokens" in [check.name for check in report.checks if check.status == "passed"]


def test_overlapping_buckets_are_named() -> None:
    report = checker.check(WideT5, "self")
    assert report.passed, report
    assert bugs(checker.check(OverlappingT5, "self")) == ["buckets-overlap"]


def test_a_bias_that_no_gradient_reaches_is_named() -> None:
    assert bugs(checker.check(BiasWithoutGradient, "self")) == ["gradient-stopped"]
    report = checker.check(FrozenBias, "self")
    assert report.passed, report
