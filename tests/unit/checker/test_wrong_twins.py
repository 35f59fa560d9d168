"""Pairs of small modules, one right and one with a bug that the checker once passed or couldn't name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from manyheads.checker.candidates.documentation import is_always_called, is_read
from manyheads.checker.candidates.parts import scale_values
from manyheads.checker.checks.numerics import promises_dtype
from manyheads.checker.isolation.target import find
from tests.unit.checker.test_round_8 import Layer, bugs, past

IMPORTS = """from typing import Any
import torch
from torch import Tensor, nn
from torch.nn import functional as F"""
pytestmark = pytest.mark.usefixtures("quick", "one_thread")


# -- what code and documentation say ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "values"),
    [
        ("query_pre_attn_scalar", "", (0.25,)),
        ("query_pre_attn_scalar", "self.scaling = config.query_pre_attn_scalar ** -0.5", (0.25,)),
        ("scale", "scores / math.sqrt(scale)", (0.25,)),
        ("scaling", "scores = q @ k.mT * self.scaling", (16.0,)),
        ("softmax_scale", "sdpa(q, k, v, scale=softmax_scale)", (16.0,)),
        ("temperature", "scores / self.temperature", (0.0625,)),
        ("scale", "build(scale)", (16.0, 0.0625)),
    ],
)
def test_a_scale_is_what_code_computes_from_its_setting(
    name: str, source: str, values: tuple[float, ...]
) -> None:
    assert scale_values(name, 16.0, source) == values


def test_dtypes_that_documentation_promises() -> None:
    promised = {
        "Works in fp16 and bf16: convert the model with .half().": (True, True),
        "Convert it with module.half().": (True, False),
        "Training runs under bfloat16 autocast.": (False, False),
        "It doesn't run in float16.": (False, False),
        "The second half of the entries is rotated.": (False, False),
    }
    for text, (half, brain) in promised.items():
        assert promises_dtype(torch.float16, text) == half, text
        assert promises_dtype(torch.bfloat16, text) == brain, text


def test_layers_that_are_called_and_arguments_that_are_dropped() -> None:
    source = (
        "def forward(self, x, t):\n    _ = t\n    q = self.pos(x)\n    if self.flag:\n"
        "        q = self.rope(q)\n    return q\ndef turn(self, x):\n    return self.other(x)"
    )
    assert is_always_called("pos", source)
    assert not is_always_called("rope", source)
    assert not is_always_called("other", source)
    assert not is_always_called("pos", source.replace("q = self.rope(q)", "return x"))
    assert not is_read("t", source)
    assert is_read("x", source)


# -- modules ---------------------------------------------------------------------------------------


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate `[b, h, t, d]` by positions `[t]` or `[b, t]`."""
    d = x.shape[-1]
    angles = positions[..., None].float() * 10000.0 ** (-torch.arange(0, d, 2) / d)
    angles = (angles if angles.dim() == 2 else angles[:, None]).to(torch.float32)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Scaled(Layer):
    """Causal attention with rotary positions and scores times query_pre_attn_scalar ** -0.5."""

    is_twice = False

    def __init__(self, dim: int = 24, num_heads: int = 4, query_pre_attn_scalar: float = 6.0) -> None:
        super().__init__(dim, num_heads)
        self.scaling = query_pre_attn_scalar**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = (rotate(y, torch.arange(x.shape[1])) for y in (q, k))
        scale = None if self.is_twice else 1.0
        y = F.scaled_dot_product_attention(q * self.scaling, k, v, is_causal=True, scale=scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class ScaledTwice(Scaled):
    """Causal attention with rotary positions and scores times query_pre_attn_scalar ** -0.5."""

    is_twice = True


class Frequencies(Layer):
    """Causal attention with rotary positions. Works in fp32, and in bf16 after ``.bfloat16()``."""

    inv_freq: Tensor

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        d = dim // num_heads
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, d, 2) / d))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        angles = torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def turn(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class RotaryEncoding(nn.Module):
    """Rotates queries and keys along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, q: Tensor, k: Tensor) -> list[Tensor]:
        turned = (rotate(x.transpose(self.axis, -2), torch.arange(x.shape[self.axis])) for x in (q, k))
        return [x.transpose(self.axis, -2) for x in turned]


class RotaryAttention(Layer):
    """Causal self-attention; tokens are at positions 0 to seq - 1."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.rotary = RotaryEncoding(axis=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = self.rotary(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Plotted(Layer):
    """Attention that keeps its map for plots."""

    is_cut = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        self.plotted = weights.detach()
        return self.merge(self.plotted if self.is_cut else weights, v)


class Detached(Plotted):
    """Attention that keeps its map for plots."""

    is_cut = True


class NoGrad(Plotted):
    """Attention whose queries and keys are computed without gradients."""

    def heads(self, x: Tensor) -> list[Tensor]:
        *qk, v = super().heads(x)
        return [*(y.data for y in qk), v]


class ByBlocks(Layer):
    """Attention whose softmax is computed by blocks of keys, after the logarithm of its sum."""

    is_cut = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        blocks = [q @ each.mT / q.shape[-1] ** 0.5 for each in k.split(2, 2)]
        lse = torch.stack([block.logsumexp(-1) for block in blocks]).logsumexp(0)[..., None]
        lse = lse.detach() if self.is_cut else lse
        return self.merge(torch.cat([(block - lse).exp() for block in blocks], -1), v)


class SumWithoutGradient(ByBlocks):
    """Attention whose softmax is computed by blocks of keys, after the logarithm of its sum."""

    is_cut = True


class SteadyExponentials(Layer):
    """Attention whose largest scores are subtracted without gradients, which changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        exp = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        return self.merge(exp / exp.sum(-1, keepdim=True), v)


class Padded(Layer):
    """Attention. attention_mask: [batch, seq] with 1 for real tokens and 0 for padding."""

    def extend(self, mask: Tensor) -> Tensor:
        return mask[:, None, None, :]

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attention_mask is not None:
            scores = scores + (1.0 - self.extend(attention_mask.to(x.dtype))) * -10000.0
        return self.merge(scores.softmax(-1), v)


class PaddedQueries(Padded):
    """Attention. attention_mask: [batch, seq] with 1 for real tokens and 0 for padding."""

    def extend(self, mask: Tensor) -> Tensor:
        return mask[:, None, :, None]


class Documents(Layer):
    """Causal attention within documents. doc_ids [b, s]: the number of each token's document, rising."""

    def allow(self, i: Tensor, j: Tensor) -> Tensor:
        return i == j

    def number(self, doc_ids: Tensor) -> Tensor:
        same = doc_ids[:, :, None] == doc_ids[:, None]
        return torch.arange(doc_ids.shape[1]) - same.long().argmax(-1)

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        doc_ids = torch.zeros(x.shape[:2], dtype=torch.long) if doc_ids is None else doc_ids
        q, k = (rotate(y, self.number(doc_ids)) for y in (q, k))
        keep = self.allow(doc_ids[:, :, None], doc_ids[:, None])[:, None] & past(x.shape[1], x.shape[1])
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return self.merge(scores.masked_fill(~keep, -torch.inf).softmax(-1), v)


class EarlierDocuments(Documents):
    """Causal attention within documents. doc_ids [b, s]: the number of each token's document, rising."""

    def allow(self, i: Tensor, j: Tensor) -> Tensor:
        return i >= j


class StreamCache:
    """The keys and values of the last `window` tokens, and the position of the next one."""

    def __init__(self, window: int) -> None:
        self.window, self.next = window, 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def update(self, k: Tensor, v: Tensor, counts_kept: bool) -> tuple[Tensor, Tensor]:
        t = k.shape[2]
        if self.k is not None and self.v is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v = k[:, :, -self.window :], v[:, :, -self.window :]
        self.next = self.k.shape[2] if counts_kept else self.next + t
        return k, v


class Stream(Layer):
    """Causal attention in a sliding window with rotary positions; ``cache`` is a ``StreamCache(window)``."""

    counts_kept = False

    def __init__(self, dim: int = 24, num_heads: int = 4, window: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.window = window

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        q, k, v = self.heads(x)
        t, start = x.shape[1], 0 if cache is None else cache.next
        q, k = (rotate(y, torch.arange(start, start + t)) for y in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.counts_kept)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        masked = ~past(t, k.shape[2], self.window)
        return self.merge(scores.masked_fill(masked, -torch.inf).softmax(-1), v)


class KeptRows(Stream):
    """Causal attention in a sliding window with rotary positions; ``cache`` is a ``StreamCache(window)``."""

    counts_kept = True


class Carried(Layer):
    """Causal attention in a sliding window. Give the state that the previous call returned to the next."""

    def __init__(self, dim: int = 24, num_heads: int = 4, window: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.window = window

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Any:
        q, k, v = self.heads(x)
        if state is not None:
            pk, pv = state
            k = torch.cat((pk, k), 2)
            v = torch.cat((pv, v), 2)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if x.shape[1] > 0:
            scores = scores.masked_fill(~past(x.shape[1], k.shape[2], self.window), -torch.inf)
        return self.merge(scores.softmax(-1), v), (k[:, :, -self.window :], v[:, :, -self.window :])


class Pixels(nn.Module):
    """Self-attention over the pixels of x [batch, channels, height, width], with a residual."""

    axis = -1

    def __init__(self, n_channels: int, n_heads: int = 4, n_groups: int = 8) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.GroupNorm(n_groups, n_channels)
        self.projection = nn.Linear(n_channels, 3 * n_channels)
        self.output = nn.Linear(n_channels, n_channels)

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        _ = t
        tokens = self.projection(self.norm(x).flatten(2).mT)
        q, k, v = tokens.unflatten(-1, (self.n_heads, -1)).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(self.axis)
        return x + self.output((weights @ v).transpose(1, 2).flatten(2)).mT.reshape(x.shape)


class PixelsOverQueries(Pixels):
    """Self-attention over the pixels of x [batch, channels, height, width], with a residual."""

    axis = -2


RIGHT = [Scaled, Frequencies, RotaryAttention, Plotted, Padded, Documents, Stream, Carried, Pixels]
RIGHT += [ByBlocks, SteadyExponentials]
WRONG = [
    (Detached, "gradient-stopped"),
    (NoGrad, "gradient-stopped"),
    (SumWithoutGradient, "gradient-stopped"),
    (PaddedQueries, "mask-transposed"),
    (EarlierDocuments, "segments-by-order"),
    (KeptRows, "rotary-offset-trimmed"),
    (PixelsOverQueries, "softmax-over-queries"),
]


@pytest.mark.parametrize("kind", RIGHT)
def test_right_twins_pass(kind: type[nn.Module]) -> None:
    report = checker.check(kind)
    assert report.passed, report


@pytest.mark.parametrize(("kind", "bug"), WRONG)
def test_wrong_twins_are_named(kind: type[nn.Module], bug: str) -> None:
    report = checker.check(kind)
    assert (report.verdict, bugs(report)) == ("failed", [bug])


ANGLES = "torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()"
ROUNDED = "torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)"
CHANGES = [
    (Frequencies, {ANGLES: ROUNDED}, "rotary-rounded"),
    (RotaryAttention, {"axis=2": "axis=1"}, "rotary-idle"),
    (Carried, {"x.shape[1] > 0": "x.shape[1] > 1"}, "window-lost-in-steps"),
]


def change(path: Path, kind: type[nn.Module], changes: dict[str, str]) -> object:
    """Return a class with some of its code replaced, from a file."""
    source = inspect.getsource(kind)
    for before, after in changes.items():
        assert before in source
        source = source.replace(before, after)
    names = "Layer, RotaryEncoding, past"
    file = path / "changed.py"
    file.write_text(f"{IMPORTS}\nfrom {__name__} import {names}\n\n{source}")
    return find(f"{file}:{kind.__name__}")


@pytest.mark.parametrize(("kind", "changes", "bug"), CHANGES)
def test_changed_twins_are_named(
    kind: type[nn.Module], changes: dict[str, str], bug: str, tmp_path: Path
) -> None:
    report = checker.check(change(tmp_path, kind, changes))
    assert (report.verdict, bugs(report)) == ("failed", [bug])


def test_rounded_buffers_are_a_convention_where_documentation_does_not_promise_the_dtype(
    tmp_path: Path,
) -> None:
    promise = " Works in fp32, and in bf16 after ``.bfloat16()``."
    report = checker.check(change(tmp_path, Frequencies, {ANGLES: ROUNDED, promise: ""}))
    assert report.passed, report
    assert "bfloat16" in [check.name for check in report.checks if check.status == "convention"]


def test_a_scale_that_is_applied_twice_is_not_the_setting() -> None:
    report = checker.check(ScaledTwice)
    assert report.verdict == "failed"
    assert {"scaled-twice", "scaled-by-d"} <= set(bugs(report))
