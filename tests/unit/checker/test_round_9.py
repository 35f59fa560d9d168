"""Styles and bugs of modules that the checker misjudged in a blind round, each in a small module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from manyheads.checker.candidates.documentation import read_mask
from manyheads.checker.candidates.forms import MaskForm
from tests.unit.checker.test_round_8 import Layer, bugs, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


# -- documentation and forms -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "polarity", "shapes"),
    [
        ("mask: (batch, len_q, len_k) bool, True = do not attend (padding of the source)", False, {"bts"}),
        ("mask (B, L) as it comes from the tokenizer,\n    1 for tokens and 0 for padding.", True, {"bs"}),
        ("mask: (n, n) additive causal mask, -inf above the diagonal", None, {"ts"}),
        ("x is (B, 3*K, dim).\nmask (B, K): 1 for real steps", True, set()),
    ],
)
def test_documentation_of_masks(text: str, polarity: bool | None, shapes: set[str]) -> None:
    documented = read_mask("mask", text)
    assert (documented.polarity, documented.shapes) == (polarity, shapes)


def test_segments_are_written_as_cumulative_lengths() -> None:
    segments = torch.tensor([1, 1, 2, 3, 3])
    keep = (segments[:, None] == segments)[None, None]
    assert MaskForm("cumulative-lengths").write(keep, torch.float32).tolist() == [0, 2, 3, 5]


# -- right modules ---------------------------------------------------------------------------------


class Projected(Layer):
    """A block with a projected residual connection that ends in an activation."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.shortcut = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return (self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v) + self.shortcut(x)).relu()


class PreNorm(Layer):
    """Cross-attention with a norm of the queries' input, and the input added to the output."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            self.split(y) for y in (self.q_proj(self.norm(x)), self.k_proj(memory), self.v_proj(memory))
        )
        return x + self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class TalkingHeads(Layer):
    """Causal attention whose heads are mixed before and after the softmax."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.before, self.after = (nn.Parameter(torch.eye(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        scores = torch.einsum("bhij,hg->bgij", q @ k.mT / q.shape[-1] ** 0.5, self.before)
        weights = scores.masked_fill(~past(t, t), -torch.inf).softmax(-1)
        return self.merge(torch.einsum("bhij,gh->bgij", weights, self.after), v)


class Documents(Layer):
    """Causal attention over documents. x: (tokens, dim); cu_seqlens: (documents + 1,), their ends after 0."""

    right = True

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x[None])
        visible = past(len(x), len(x))
        if cu_seqlens is not None:
            document = torch.bucketize(torch.arange(len(x)), cu_seqlens[1:], right=self.right)
            visible = visible & (document[:, None] == document)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v)[0]


class Shifted(Layer):
    """Attention in windows of an image that is shifted. x: [b, h, w, e], both multiples of the window."""

    regions = slice(None)  # of rows and columns

    def __init__(self, dim: int = 24, window_size: int = 4, shift_size: int = 2) -> None:
        super().__init__(dim)
        self.window_size, self.shift_size = window_size, shift_size
        self.bias_table = nn.Parameter(torch.zeros((2 * window_size - 1) ** 2, 4))
        places = torch.cartesian_prod(*2 * [torch.arange(window_size)])
        distance = places[:, None] - places + window_size - 1
        self.register_buffer("index", distance[..., 0] * (2 * window_size - 1) + distance[..., 1])

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, e = x.shape
        n = self.window_size
        return x.view(b, h // n, n, w // n, n, e).transpose(2, 3).reshape(b, -1, n * n, e)

    def forward(self, x: Tensor) -> Tensor:
        (b, h, w, e), n, shift = x.shape, self.window_size, self.shift_size
        tokens = self.windows(x.roll((-shift, -shift), (1, 2)))
        q, k, v = self.heads(tokens.flatten(0, 1))
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias_table[self.index].permute(2, 0, 1)
        places = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        moved = self.windows((places >= torch.tensor([h, w]) - shift)[None].float())[0][..., self.regions]
        is_same = (moved[:, :, None] == moved[:, None]).all(-1)  # [windows, t, t]
        scores = scores.masked_fill(~is_same.repeat(b, 1, 1)[:, None], -torch.inf)
        out = self.merge(scores.softmax(-1), v).view(b, h // n, w // n, n, n, e).transpose(2, 3)
        return out.reshape(b, h, w, e).roll((shift, shift), (1, 2))


@pytest.mark.full
@pytest.mark.parametrize("layer", [Projected, PreNorm, TalkingHeads, Documents, Shifted])
def test_right_layers_pass(layer: Any) -> None:
    report = checker.check(layer)
    assert report.passed, report


# -- bugs ------------------------------------------------------------------------------------------


class LateDocuments(Documents):
    __doc__, right = Documents.__doc__, False


class RowsAlone(Shifted):
    regions = slice(1)


class Wrapped(Layer):
    """Cached attention in a window of 4 keys: y, cache = f(x, cache)."""

    def __init__(self, dim: int = 32, window: int = 4) -> None:
        super().__init__(dim)
        self.window = window

    def rotate(self, x: Tensor, start: int) -> Tensor:
        frequencies = 10000.0 ** (-torch.arange(4) / 4)
        angles = torch.arange(start, start + x.shape[-2])[:, None] * frequencies
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x: Tensor, kv: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.heads(x)
        start = 0 if kv is None else kv[0].shape[-2]
        q, k = self.rotate(q, start), self.rotate(k, start)
        if kv is not None:
            k, v = torch.cat((kv[0], k), -2), torch.cat((kv[1], v), -2)
        visible = past(q.shape[-2], k.shape[-2], self.window)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v), (k[..., -self.window :, :], v[..., -self.window :, :])


class BlockPadding(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (F.pad(y, (0, 0, 0, -x.shape[1] % 4)) for y in (k, v))
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class Grouped(Layer):
    """Causal attention."""

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), step = self.heads(x), torch.arange(x.shape[1]) // 3
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(step > step[:, None], -torch.inf)
        return self.merge(scores.softmax(-1), v)


class Accumulated(Layer):
    """Causal attention with ALiBi."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__(dim)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1).repeat(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        bias = self.mask[:, :t, :t]
        bias += 2.0 ** (-2 * torch.arange(1, 5.0))[:, None, None] * (
            torch.arange(t) - torch.arange(t)[:, None]
        )
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1), v)


class OnesAdded(Layer):
    """attention_mask (B, L): 1 for tokens, 0 for padding."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        mask = None if attention_mask is None else attention_mask[:, None, None].to(q.dtype)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class PaddedSteps(Layer):
    """attention_mask (B, S): 1 for tokens, 0 for padding on the left, for all tokens so far."""

    def forward(self, x: Tensor, attention_mask: Tensor, kv: Any = None) -> Any:
        q, k, v = self.heads(x)
        if kv is not None:
            k, v = torch.cat((kv[0], k), -2), torch.cat((kv[1], v), -2)
        visible = past(q.shape[-2], k.shape[-2])
        if kv is None:
            visible = visible & attention_mask.bool()[:, None, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, torch.finfo(q.dtype).min)
        return self.merge(scores.softmax(-1), v), (k, v)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layer", "bug"),
    [
        (LateDocuments, "segment-off-by-one"),
        (RowsAlone, "window-wraps"),
        (Wrapped, "rotary-offset-trimmed"),
        (BlockPadding, "block-padding-visible"),
        (Grouped, "causal-by-groups"),
        (Accumulated, "buffer-changed"),
        (OnesAdded, "masked-ones-added"),
        (PaddedSteps, "padding-in-steps"),
    ],
)
def test_bugs_are_named(layer: Any, bug: str) -> None:
    report = checker.check(layer)
    assert bugs(report) == [bug], report


class FirstMapMasked(Layer):
    """Differential attention, causal. key_padding_mask [b, s]: True = padding."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__(dim)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        first, second = (
            (a @ b.mT).masked_fill(~past(t, t), -torch.inf)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        if key_padding_mask is not None:
            first = first.masked_fill(key_padding_mask[:, None, None], torch.finfo(q.dtype).min)
        return self.merge(first.softmax(-1) - self.factor * second.softmax(-1), v)


@pytest.mark.full
@pytest.mark.usefixtures("undiagnosed")
def test_a_masked_key_of_an_unknown_causal_layer_changes_no_output() -> None:
    report = checker.check(FirstMapMasked)
    assert "hidden keys" in {check.name for check in report.select("failed")}, report
