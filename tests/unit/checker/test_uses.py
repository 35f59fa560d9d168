"""Uses that a module offers only as it was built, in some calls, or after a method was called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from tests.unit.checker.test_round_8 import Layer, bugs
from tests.unit.checker.test_round_8 import past as past_mask

pytestmark = pytest.mark.usefixtures("quick", "one_thread")

Past = tuple[Tensor, Tensor]


def status(report: checker.Report, name: str) -> str:
    return next(check.status for check in report.checks if check.name == name)


# -- caches that one construction has --------------------------------------------------------------


class Decoder(Layer):
    """Attention; `past` is (k, v) of earlier tokens, each (b, h, past, d), of a decoder.

    Returns (output, (k, v)).
    """

    counts_from_first = False

    def __init__(self, dim: int = 24, num_heads: int = 4, decoder: bool = False) -> None:
        super().__init__(dim, num_heads)
        self.decoder = decoder

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        q, k, v = self.heads(x)
        if past is not None:
            assert self.decoder, "past is for the decoder"
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        scores, (t, s) = q @ k.mT / q.shape[-1] ** 0.5, (q.shape[2], k.shape[2])
        if self.decoder:
            visible = torch.ones(t, s).tril().bool() if self.counts_from_first else past_mask(t, s)
            scores = scores.masked_fill(~visible, float("-inf"))
        return self.merge(scores.softmax(-1), v), (k, v)


class DecoderCountsFromFirst(Decoder):
    """Attention; `past` is (k, v) of earlier tokens, each (b, h, past, d), of a decoder."""

    counts_from_first = True


class NoPast(Decoder):
    """Attention; `past` is (k, v) of earlier tokens."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)


def test_a_cache_that_another_flag_of_the_constructor_offers() -> None:
    report = checker.check(Decoder)
    assert report.passed, report
    assert (status(report, "cache"), status(report, "with decoder=True")) == ("not applicable", "passed")
    assert bugs(checker.check(DecoderCountsFromFirst)) == ["first-key-only"]


def test_a_cache_that_is_refused_is_not_a_failure() -> None:
    report = checker.check(NoPast)
    assert report.verdict == "not judged", report
    assert "--arg past=ignore" in str(report).replace("\n", " ")
    assert checker.check(NoPast, args={"past": "ignore"}).passed


# -- arguments for self-attention, beside a context ------------------------------------------------


class Context(Layer):
    """Attention to x, or to xa if it is given."""

    def attend(self, x: Tensor, xa: Tensor | None, visible: Tensor | None, rotates: bool = False) -> Tensor:
        source = x if xa is None else xa
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(source)), self.split(self.v_proj(source))
        if rotates:
            q, k = rotate(q), rotate(k)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return self.merge(scores.softmax(-1), v)


def rotate(x: Tensor) -> Tensor:
    """Return heads of 6 entries, rotated by their positions."""
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    (a, b), cos, sin = x.chunk(2, -1), angles.cos().to(x), angles.sin().to(x)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class CausalOfSelf(Context):
    """Attention to x, or to xa if it is given."""

    def forward(self, x: Tensor, xa: Tensor | None = None, causal: bool = False) -> Tensor:
        visible = past_mask(x.shape[1], x.shape[1]) if causal and xa is None else None
        return self.attend(x, xa, visible)


class CausalSaysCross(CausalOfSelf):
    """Attention to x, or to xa if it is given.

    causal: mask later keys, in cross attention to xa too.
    """


class CausalIgnored(Context):
    """Attention to x, or to xa if it is given."""

    def forward(self, x: Tensor, xa: Tensor | None = None, causal: bool = False) -> Tensor:
        return self.attend(x, xa, None)


class MaskOfSelf(Context):
    """Attention to x, or to xa if it is given. mask: [t, t], boolean, True = visible."""

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, xa, mask if xa is None else None)


class MaskOfKeysDropped(MaskOfSelf):
    """Attention to x, or to xa if it is given. mask: [b, s] of keys, boolean, True = visible."""

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, xa, mask[:, None, None] if mask is not None and xa is None else None)


class MaskOfPairsDropped(MaskOfSelf):
    """Attention to x, or to xa if it is given. mask: [b, t, s], boolean, True = visible."""

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, xa, mask[:, None] if mask is not None and xa is None else None)


class WindowOfSelf(Context):
    """Attention to x, or to xa if it is given. window: the keys on each side of a query that it sees."""

    def forward(self, x: Tensor, xa: Tensor | None = None, window: int | None = None) -> Tensor:
        i = torch.arange(x.shape[1])
        visible = None if window is None or xa is not None else (i - i[:, None]).abs() <= window
        return self.attend(x, xa, visible)


class OrderOfSelf(Context):
    """Attention to x with rotary positions, or to xa if it is given."""

    def forward(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
        return self.attend(x, xa, None, rotates=xa is None)


@pytest.mark.parametrize("right", [CausalOfSelf, MaskOfSelf, WindowOfSelf, OrderOfSelf])
def test_what_is_for_self_attention_alone_is_a_convention(right: type[nn.Module]) -> None:
    report = checker.check(right)
    assert report.passed, report
    if right is not OrderOfSelf:
        assert status(report, "self-attention alone") == "convention"
        assert checker.check(right, strict=["self-attention-alone"]).verdict == "failed"


def test_a_flag_or_a_mask_that_a_context_needs_is_no_convention() -> None:
    for wrong in (CausalSaysCross, CausalIgnored):
        assert bugs(checker.check(wrong)) == ["causal-ignored"]
    for doubtful in (MaskOfKeysDropped, MaskOfPairsDropped):
        assert checker.check(doubtful).verdict != "passed"


# -- caches of a fixed length, which a method makes ------------------------------------------------


class Static(Layer):
    """Causal attention. Call setup_caches first; `input_pos` are the positions of x, [t]."""

    rows_by_length = False

    def setup_caches(self, max_batch: int, max_seq: int, dtype: torch.dtype) -> None:
        shape = (max_batch, self.num_heads, max_seq, self.q_proj.out_features // self.num_heads)
        self.k_cache, self.v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.visible = torch.ones(max_seq, max_seq).tril().bool()

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        input_pos = torch.arange(t) if input_pos is None else input_pos
        visible = self.visible[:t] if self.rows_by_length else self.visible[input_pos]
        q, k, v = self.heads(x)
        self.k_cache[:b, :, input_pos], self.v_cache[:b, :, input_pos] = (
            k.to(self.k_cache),
            v.to(self.v_cache),
        )
        scores = q @ self.k_cache[:b].mT.to(q) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~visible, float("-inf"))
        return self.merge(scores.softmax(-1), self.v_cache[:b].to(q))


class StaticRowsByLength(Static):
    """Causal attention. Call setup_caches first; `input_pos` are the positions of x, [t]."""

    rows_by_length = True


class Freed(Static):
    """Causal attention, over a cache between allocate_cache and free_cache. `input_pos`: [t]."""

    capacity = 20

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.free_cache()

    def allocate_cache(self, batch: int) -> None:
        self.setup_caches(batch, self.capacity, torch.float32)
        self.is_allocated = True

    def free_cache(self) -> None:
        self.is_allocated = False

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if self.is_allocated:
            return super().forward(x, input_pos)
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        visible = past_mask(x.shape[1], x.shape[1])
        return self.merge(scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


class FreedRowsByLength(Freed):
    """Causal attention, over a cache between allocate_cache and free_cache. `input_pos`: [t]."""

    rows_by_length = True


@pytest.mark.parametrize(("right", "wrong"), [(Static, StaticRowsByLength), (Freed, FreedRowsByLength)])
def test_a_method_makes_the_cache(right: type[nn.Module], wrong: type[nn.Module]) -> None:
    report = checker.check(right)
    assert (report.verdict, status(report, "cache")) == ("passed", "passed"), report
    assert bugs(checker.check(wrong)) == ["first-key-only"]


class OfOneSize(Layer):
    """Causal attention over buffers for all batch entries. `input_pos` are the positions of x, [t]."""

    rows_by_length = False
    batch, capacity = 2, 32
    k_cache: Tensor
    v_cache: Tensor
    visible: Tensor

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        shape = (self.batch, num_heads, self.capacity, dim // num_heads)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("visible", torch.ones(self.capacity, self.capacity).tril().bool())

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        assert input_pos.dim() == 1
        assert len(x) == self.batch
        q, k, v = self.heads(x)
        keys, values = (y.to(x.dtype, copy=True) for y in (self.k_cache, self.v_cache))
        keys[:, :, input_pos], values[:, :, input_pos] = k, v
        with torch.no_grad():
            self.k_cache.copy_(keys)
            self.v_cache.copy_(values)
        visible = self.visible[: len(input_pos)] if self.rows_by_length else self.visible[input_pos]
        scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
        return self.merge(scores.softmax(-1), values)


class OfOneEntry(OfOneSize):
    batch = 1


class OfOneSizeRowsByLength(OfOneSize):
    rows_by_length = True


class OfOneEntryRowsByLength(OfOneEntry):
    rows_by_length = True


@pytest.mark.parametrize(
    ("right", "wrong"), [(OfOneSize, OfOneSizeRowsByLength), (OfOneEntry, OfOneEntryRowsByLength)]
)
def test_a_cache_takes_one_number_of_batch_entries(right: type[OfOneSize], wrong: type[nn.Module]) -> None:
    report = checker.check(right)
    assert (report.verdict, status(report, "cache")) == ("passed", "passed"), report
    assert f"takes batches of {right.batch}, as trial calls show" in report.notes
    assert bugs(checker.check(wrong)) == ["first-key-only"]


# -- attention of the first token alone ------------------------------------------------------------


class OfClass(Layer):
    """Class attention: the first token, that of the class, attends to all tokens.

    x: (b, n, e). mask: (b, n), True = visible. Returns (b, 1, e).
    """

    factor = 6**-0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q_proj(x[:, :1])), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = q @ k.mT * self.factor
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        return self.merge(self.drop(scores.softmax(-1)), v)

    def drop(self, weights: Tensor) -> Tensor:
        return weights


class OfClassSqueezed(OfClass):
    """Class attention: the first token attends. Returns (b, e) and the weights (b, h, 1, n)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k = self.split(self.q_proj(x[:, 0:1])), self.split(self.k_proj(x))
        weights = (q @ k.mT * self.factor).softmax(-1)
        return self.merge(weights, self.split(self.v_proj(x))).squeeze(1), weights


class OfClassUnscaled(OfClass):
    """Class attention: the first token attends. mask: (b, n), True = visible. Returns (b, 1, e)."""

    factor = 1.0


class OfClassDrops(OfClass):
    """Class attention: the first token attends. mask: (b, n), True = visible. Returns (b, 1, e)."""

    def drop(self, weights: Tensor) -> Tensor:
        return nn.functional.dropout(weights, 0.2)


class OfMean(OfClassSqueezed):
    """Attention pooling: the mean of all tokens attends. Returns (b, e)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat((x.mean(1, keepdim=True), x), 1))[0]


@pytest.mark.parametrize("right", [OfClass, OfClassSqueezed])
def test_class_attention(right: type[nn.Module]) -> None:
    report = checker.check(right)
    assert report.passed, report


def test_bugs_of_class_attention_are_named() -> None:
    assert bugs(checker.check(OfClassUnscaled)) == ["unscaled"]
    assert bugs(checker.check(OfClassDrops)) == ["dropout-left-on"]


def test_a_pooled_query_is_not_judged() -> None:
    with pytest.raises(checker.Unclear, match=r"one row for all tokens.* forward\(x, context\)"):
        checker.check(OfMean)
