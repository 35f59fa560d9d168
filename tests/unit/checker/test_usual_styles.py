"""Usual ways to write a layer, each beside a wrong twin: what the checker says of both."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from manyheads.checker.candidates.documentation import read_mask
from manyheads.checker.isolation.candidate import Call, Candidate
from manyheads.checker.isolation.errors import CodeError

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class Layer(nn.Module):
    """Attention with 4 heads."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = self.split(x, self.q_proj), self.split(y, self.k_proj)
        return q @ k.mT / q.shape[-1] ** 0.5

    def merge(self, weights: Tensor, y: Tensor) -> Tensor:
        return self.o_proj((weights @ self.split(y, self.v_proj)).transpose(1, 2).flatten(2))

    def attend(self, x: Tensor, y: Tensor, visible: Tensor | None = None) -> Tensor:
        scores = self.scores(x, y)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), y)


def triangle(x: Tensor) -> Tensor:
    """Return the mask [t, t] of earlier tokens."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def names(report: checker.Report, status: str) -> set[str]:
    return {check.name for check in report.checks if check.status == status}


def bugs(report: checker.Report) -> list[str]:
    return [diagnosis.bug for diagnosis in report.diagnosis]


# -- masks -----------------------------------------------------------------------------------------


class CausalByDefault(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, t, s], True = visible."""
        if mask is None:
            visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        else:
            visible = mask[:, None]
        return self.attend(x, x, visible)


class CausalFlag(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, t, s], True = visible."""
        q, k, v = (self.split(x, layer) for layer in (self.q_proj, self.k_proj, self.v_proj))
        given = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class WholeMask(Layer):
    """Causal attention.

    mask [b, t, s], True = visible, stands for the whole mask, the causal part included.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, x, triangle(x) if mask is None else mask[:, None])


class KeysByDefault(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, s], True = visible."""
        if mask is None:
            visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        else:
            visible = mask[:, None, None]
        return self.attend(x, x, visible)


@pytest.mark.every(3)
@pytest.mark.parametrize("layer", [CausalByDefault, CausalFlag, WholeMask])
def test_a_general_mask_may_replace_the_causal_mask(layer: Any) -> None:
    report = checker.check(layer, "self")
    assert report.passed, report
    assert "mask in place of causal" in names(report, "convention")


def test_a_mask_of_keys_does_not_replace_the_causal_mask() -> None:
    report = checker.check(KeysByDefault, "self")
    assert report.verdict == "failed"
    assert bugs(report) == ["mask-in-place-of-causal"]


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("mask: [b, t, s], 0 where a query must not look.", True),
        ("mask: [b, t, s], 1 where a query must not look.", False),
        ("mask: additional mask broadcastable to (b, h, t, s), 0 by default.", None),
        ("mask: broadcastable to (b, h, t, s), 1 where a query may look.", True),
    ],
)
def test_polarity_in_other_words(text: str, keeps: bool | None) -> None:
    assert read_mask("mask", text).polarity is keeps


class Looks(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: broadcastable to [b, h, t, s], 1 where a query must not look."""
        return self.attend(x, x, None if mask is None else mask == 0)


class LooksAway(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: broadcastable to [b, h, t, s], 1 where a query must not look."""
        return self.attend(x, x, None if mask is None else mask != 0)


@pytest.mark.full
def test_documentation_of_where_a_query_must_not_look_gives_the_polarity() -> None:
    report = checker.check(Looks, "self")
    assert report.passed, report
    assert bugs(checker.check(LooksAway, "self")) == ["polarity-swapped"]


class Floats(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, t, s]: 1 = visible, 0 = masked."""
        scores = self.scores(x, x)
        if mask is not None:
            scores = scores + mask.float().sub(1).mul(1e4)[:, None]
        return self.merge(scores.softmax(-1), x)


class FloatsInPlace(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, t, s]: 1 = visible, 0 = masked."""
        scores = self.scores(x, x)
        if mask is not None:
            scores = scores + mask.float().sub_(1).mul_(1e4)[:, None]  # of booleans, float() is a copy
        return self.merge(scores.softmax(-1), x)


@pytest.mark.full
def test_a_mask_of_floats_changed_in_place_fails() -> None:
    report = checker.check(Floats, "self")
    assert report.passed, report
    report = checker.check(FloatsInPlace, "self")
    assert names(report, "failed") == {"state"}
    assert bugs(report) == ["input-changed"]


class Booleans(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: boolean, True = visible."""
        scores = self.scores(x, x)
        if mask is not None:
            scores = scores - (1.0 - mask.float()) * 1e4
        return self.merge(scores.softmax(-1), x)


class BooleansCrash(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: boolean, True = visible."""
        scores = self.scores(x, x)
        if mask is not None:
            scores = scores - (1.0 - mask) * 1e4
        return self.merge(scores.softmax(-1), x)


@pytest.mark.full
def test_a_documented_boolean_mask_that_crashes_fails() -> None:
    report = checker.check(Booleans, "self")
    assert report.passed, report
    report = checker.check(BooleansCrash, "self")
    assert names(report, "failed") == {"argument mask"}


class BothShapes(Layer):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask (seq_q, seq_k) or (batch, seq_q, seq_k), True = visible."""
        scores = self.scores(query, key)
        if mask is not None:
            visible = mask if mask.dim() == 2 else mask[:, None]
            scores = scores.masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), value)


class BothShapesOfOneLength(Layer):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask (seq_q, seq_k) or (batch, seq_q, seq_k), True = visible."""
        scores, t = self.scores(query, key), query.shape[1]
        if mask is not None:
            visible = mask.expand(t, t) if mask.dim() == 2 else mask[:, None]
            scores = scores.masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), value)


@pytest.mark.full
def test_both_documented_shapes_of_a_mask_are_used() -> None:
    report = checker.check(BothShapes, "multihead")
    assert report.passed, report
    report = checker.check(BothShapesOfOneLength, "multihead")
    assert report.verdict == "failed"
    assert any("raised RuntimeError" in check.reason for check in report.checks), report


class OfTheContext(Layer):
    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        out = self.attend(x, context, None if context_mask is None else context_mask[:, None, None])
        return out if mask is None else out * mask[..., None]


class BothOfTheContext(Layer):
    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        scores = self.scores(x, context)
        for given in (mask, context_mask):
            if given is not None:
                scores = scores.masked_fill(~given[:, None, None], -torch.inf)
        return self.merge(scores.softmax(-1), context)


@pytest.mark.full
def test_a_mask_beside_that_of_the_context_is_not_one_of_its_keys() -> None:
    report = checker.check(OfTheContext, "cross")
    assert report.passed, report
    report = checker.check(BothOfTheContext, "cross")
    assert report.verdict == "not judged", report
    assert names(report, "not judged") == {"argument mask"}
    report = checker.check(BothOfTheContext, "cross", args={"mask": "mask-of-keys"})
    assert report.passed, report


class Packed(Layer):
    def forward(self, x: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """segment_ids [b, t], integers: tokens attend within equal numbers, and to earlier ones."""
        visible = triangle(x)
        if segment_ids is not None:
            visible = visible & (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
        return self.attend(x, x, visible)


class PackedWithLater(Layer):
    def forward(self, x: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """segment_ids [b, t], integers: tokens attend within equal numbers, and to earlier ones."""
        visible = triangle(x)
        if segment_ids is not None:
            visible = visible & (segment_ids[:, :, None] >= segment_ids[:, None])[:, None]
        return self.attend(x, x, visible)


class PackedWithFirst(Layer):
    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """doc_ids [b, t], integers: tokens attend within equal numbers, and to earlier ones."""
        visible = triangle(x)
        if doc_ids is not None:
            visible = visible & (doc_ids[:1, :, None] == doc_ids[:1, None])[:, None]
        return self.attend(x, x, visible)


def test_tokens_attend_within_their_segment() -> None:
    report = checker.check(Packed, "self")
    assert report.passed, report
    assert "segments" in names(report, "passed")
    assert any("numbers of segments" in role.role for role in report.roles)
    for layer in (PackedWithLater, PackedWithFirst):
        assert "segments" in names(checker.check(layer, "self"), "failed")


class TakesFlags(Layer):
    def forward(self, x: Tensor, training_steps: int = 0, fast: bool = False) -> Tensor:
        return self.attend(x, x)


def test_flags_and_numbers_that_are_not_passed_are_listed() -> None:
    report = checker.check(TakesFlags, "self")
    assert report.passed, report
    listed = {role.name: (role.role, role.reason) for role in report.roles}
    assert listed["fast"] == ("ignore", "False, so it isn't checked")
    assert listed["training_steps"] == ("ignore", "0, so it isn't checked")
    assert "left at its default (False, so it isn't checked)" in repr(report)


# -- positions -------------------------------------------------------------------------------------


class OwnBias(Layer):
    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.rel_bias = nn.Parameter(torch.randn(num_heads, 41))

    def own(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return self.rel_bias[:, (i - i[:, None]).clamp(-20, 20) + 20]


class GivenBias(OwnBias):
    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:
        if position_bias is None:
            position_bias = self.own(x)
        return self.merge((self.scores(x, x) + position_bias).softmax(-1), x)


class GivenBiasHalved(OwnBias):
    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:
        if position_bias is None:
            position_bias = self.own(x) * 2
        return self.merge((self.scores(x, x) + position_bias / 2).softmax(-1), x)


class IdleBias(OwnBias):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


@pytest.mark.full
def test_a_given_bias_may_replace_the_layers_own() -> None:
    report = checker.check(GivenBias, "self")
    assert report.passed, report
    assert "given bias" in names(report, "convention")
    report = checker.check(GivenBiasHalved, "self")
    assert names(report, "failed") == {"added bias"}


class Norms(Layer):
    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.q_norm, self.k_norm = (nn.LayerNorm(dim // num_heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(self.split(x, self.q_proj)), self.k_norm(self.split(x, self.k_proj))
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), x)


class IdleNorms(Norms):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


@pytest.mark.parametrize(
    ("layer", "idle"), [(IdleBias, {"rel_bias"}), (IdleNorms, {"q_norm.weight", "k_norm.weight"})]
)
def test_tables_and_norms_without_effect_are_not_judged(layer: Any, idle: set[str]) -> None:
    report = checker.check(layer, "self")
    assert report.verdict == "not judged", report
    assert names(report, "not judged") == {f"parameter {name}" for name in idle}


def test_norms_of_queries_and_keys_pass() -> None:
    report = checker.check(Norms, "self")
    assert report.passed, report


class Rotary(Layer):
    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (self.split(x, layer) for layer in (self.q_proj, self.k_proj))
        q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), x)

    def angles(self, positions: Tensor) -> Tensor:
        d = 24 // self.num_heads
        return (positions[..., None] * 10000.0 ** (-torch.arange(0, d, 2) / d)).repeat(1, 1, 2)[:, None]


class RefusesPositions(Rotary):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if positions[:, 0].any():
            raise ValueError("positions must begin at 0")
        angles = self.angles(positions)
        return self.rotated(x, angles.cos(), angles.sin())


class ShortTable(Rotary):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table = self.angles(torch.arange(x.shape[1])[None])[0, 0]
        angles = table[positions][:, None]
        return self.rotated(x, angles.cos(), angles.sin())


@pytest.mark.full
def test_positions_that_a_layer_refuses_are_no_failure() -> None:
    report = checker.check(RefusesPositions, "self")
    assert report.passed, report
    assert "positions" in names(report, "not applicable")
    assert "positions" in names(checker.check(ShortTable, "self"), "failed")


class OptionalAngles(Rotary):
    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """cos and sin [t, d]."""
        return self.attend(x, x) if cos is None else self.rotated(x, cos, sin)


class NonFiniteAngles(Rotary):
    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        """cos and sin [t, d]."""
        return self.attend(x, x) if cos is None else self.rotated(x, cos / sin, sin)


@pytest.mark.full
def test_optional_angles_without_finite_outputs_are_left_out() -> None:
    report = checker.check(OptionalAngles, "self")
    assert report.passed, report
    report = checker.check(NonFiniteAngles, "self")
    assert report.verdict == "not judged", report
    assert names(report, "not judged") == {"argument cos", "argument sin"}


# -- layouts, weights and heads --------------------------------------------------------------------


class SequenceFirst(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the averaged weights (batch, tgt_len, src_len)."""
        x = x.transpose(0, 1)
        weights = self.scores(x, x).softmax(-1)
        return self.merge(weights, x).transpose(0, 1), weights.mean(1)


class TimeBatchChannel(Layer):
    def forward(self, x: Tensor) -> Tensor:
        """x is Time x Batch x Channel."""
        x = x.transpose(0, 1)
        return self.attend(x, x).transpose(0, 1)


class BatchTimeChannel(Layer):
    def forward(self, x: Tensor) -> Tensor:
        """x is Time x Batch x Channel."""
        return self.attend(x, x)


@pytest.mark.parametrize("layer", [SequenceFirst, TimeBatchChannel])
def test_the_layout_is_that_of_documented_inputs(layer: Any) -> None:
    report = checker.check(layer, "self")
    assert report.passed, report
    [layout] = [role for role in report.roles if role.name == "layout"]
    assert layout.role == "[t, b, e]"


def test_another_layout_than_the_documented_one_fails() -> None:
    assert bugs(checker.check(BatchTimeChannel, "self")) == ["batch-as-tokens"]


class WeightsAlone(Layer):
    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor:
        weights = self.scores(x, x).softmax(-1)
        return weights if return_attention else self.merge(weights, x)


class ScoresAlone(Layer):
    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor:
        scores = self.scores(x, x)
        return scores if return_attention else self.merge(scores.softmax(-1), x)


@pytest.mark.full
def test_weights_may_be_returned_without_the_output() -> None:
    report = checker.check(WeightsAlone, "self")
    assert report.passed, report
    assert "rows sum to one" in names(report, "passed")
    assert bugs(checker.check(ScoresAlone, "self")) == ["weights-are-scores"]


class LowRank(Layer):
    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.k_proj = nn.Sequential(nn.Linear(dim, 8), nn.Linear(8, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


def test_projections_of_low_rank_are_refused_with_advice() -> None:
    with pytest.raises(checker.Unclear, match=r"weights of k.*low rank.*--like attention"):
        checker.check(LowRank, "self")


class Grouped(Layer):
    def __init__(self, dim: int = 48, num_heads: int = 8, n_kv_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.n_kv_heads = n_kv_heads
        self.k_proj, self.v_proj = (nn.Linear(dim, dim // 2) for _ in range(2))

    def grouped(self, x: Tensor, key_heads: Tensor) -> Tensor:
        q = self.split(x, self.q_proj)
        k, v = (
            layer(x).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)[:, key_heads]
            for layer in (self.k_proj, self.v_proj)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(x, torch.arange(self.num_heads) // (self.num_heads // self.n_kv_heads))


class GroupedByKeyHeads(Grouped):
    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(x, torch.arange(self.num_heads) // self.n_kv_heads)


@pytest.mark.full
def test_key_heads_chosen_by_their_number_are_named() -> None:
    report = checker.check(Grouped, "self")
    assert report.passed, report
    assert bugs(checker.check(GroupedByKeyHeads, "self")) == ["key-heads-tiled"]


# -- gradients, dtypes, state, dropout -------------------------------------------------------------


class NoGrad(Layer):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


class ForInference(Layer):
    """Attention of 4 heads, for inference only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x).detach()


class Detached(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x).detach()


@pytest.mark.full
@pytest.mark.parametrize("layer", [NoGrad, ForInference])
def test_code_for_inference_needs_no_gradients(layer: Any) -> None:
    report = checker.check(layer, "self")
    assert report.passed, report
    assert "gradients" in names(report, "convention")
    assert checker.check(layer, "self", strict="gradients").verdict == "failed"


def test_without_such_words_gradients_are_needed() -> None:
    assert names(checker.check(Detached, "self"), "failed") == {"gradients"}


class Whole(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.scores(x, x).softmax(-1, dtype=torch.float32), x)


class WholeThoughPromised(Layer):
    """Runs in float32 and bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.scores(x, x).softmax(-1, dtype=torch.float32), x)


class Cast(Layer):
    """Runs in float32 and bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.scores(x, x).softmax(-1, dtype=torch.float32).to(x.dtype), x)


@pytest.mark.full
def test_a_promised_dtype_must_run() -> None:
    report = checker.check(Cast, "self")
    assert report.passed, report
    report = checker.check(Whole, "self")
    assert report.passed, report
    assert {"float16", "bfloat16"} <= names(report, "convention")
    report = checker.check(WholeThoughPromised, "self")
    assert names(report, "failed") == {"bfloat16"}
    assert "float16" in names(report, "convention")


class LongText(Layer):
    def __init__(self, dim: int = 24, num_heads: int = 4, max_position_embeddings: int = 64) -> None:
        super().__init__(dim, num_heads)
        self.max_position_embeddings, self.factor = max_position_embeddings, 1.0

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if x.shape[1] > self.max_position_embeddings else self.factor
        return self.merge((self.scores(x, x) * factor).softmax(-1), x)


class LongTextKept(LongText):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.max_position_embeddings:
            self.factor = 2.0
        return self.merge((self.scores(x, x) * self.factor).softmax(-1), x)


@pytest.mark.full
def test_state_of_a_call_of_too_many_tokens_fails() -> None:
    report = checker.check(LongText, "self")
    assert report.passed, report
    report = checker.check(LongTextKept, "self")
    [state] = [check for check in report.checks if check.name == "state"]
    assert state.status == "failed"
    assert "after a call of 65 tokens" in state.reason


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, training: bool = False) -> Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return F.dropout(weights, dropout_p, training) @ v


def attention_that_drops(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, training: bool = False
) -> Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return F.dropout(weights, dropout_p) @ v


def test_a_function_that_drops_outside_training_fails() -> None:
    report = checker.check(attention, "attention")
    assert report.passed, report
    report = checker.check(attention_that_drops, "attention")
    assert report.verdict == "failed"
    assert bugs(report) == ["dropout-left-on"]


# -- options of the constructor that are off by default ---------------------------------------------


class Optional(Layer):
    """Attention with options, each off by default.

    Args:
        n_kv_heads: The number of key heads, by default that of the queries.
        window: How many keys each query sees, its own included, in a causal layer.
        qk_norm: Normalize queries and keys of each head.
        softcap: Cap scores smoothly at this value.
        causal: Whether a query sees earlier keys only.
        rotary: Rotate queries and keys by their positions.
        scale: The factor of the scores, by default 1/sqrt(d).
        bias: Whether the projections have biases.
    """

    wrong = ""

    def __init__(
        self,
        dim: int = 24,
        num_heads: int = 4,
        n_kv_heads: int | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        softcap: float | None = None,
        causal: bool = True,
        rotary: bool = False,
        scale: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, num_heads)
        self.n_kv_heads, self.window, self.cap, self.causal = n_kv_heads or num_heads, window, softcap, causal
        self.head_size = d = dim // num_heads
        self.scale, self.rotary, self.qk_norm = scale or d**-0.5, rotary, qk_norm
        if qk_norm:
            self.q_norm, self.k_norm = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, self.n_kv_heads * d, bias=bias) for _ in range(2))

    def heads(self, x: Tensor, layer: nn.Linear, n: int) -> Tensor:
        out = F.linear(x, layer.weight, None if self.wrong == "bias" else layer.bias)
        return out.unflatten(-1, (n, -1)).transpose(1, 2)

    def rotate(self, x: Tensor, sign: int = 1) -> Tensor:
        d = self.head_size
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d) * sign
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(x, self.q_proj, self.num_heads)
        k, v = (self.heads(x, layer, self.n_kv_heads) for layer in (self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.q_norm(k) if self.wrong == "qk_norm" else self.k_norm(k)
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k, -1 if self.wrong == "rotary" else 1)
        n = self.num_heads // self.n_kv_heads
        is_tiled = self.wrong == "n_kv_heads"
        k, v = (y.repeat(1, n, 1, 1) if is_tiled else y.repeat_interleave(n, 1) for y in (k, v))
        scores = q @ k.mT * (1 if self.wrong == "scale" and self.scale == 0.3 else self.scale)
        if self.cap and self.wrong != "softcap":
            scores = self.cap * (scores / self.cap).tanh()
        visible = triangle(x)
        if not self.causal and self.wrong != "causal":
            visible = torch.ones_like(visible)
        if self.window:
            visible = visible.triu(1 - self.window - 2 * (self.wrong == "window"))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.full
def test_options_that_are_off_by_default_are_judged_one_at_a_time() -> None:
    report = checker.check(Optional, "self")
    assert report.passed, report
    values = {"n_kv_heads": 2, "window": 3, "qk_norm": True, "softcap": 2.0, "causal": False, "rotary": True,
              "scale": 0.3, "bias": True}  # fmt: skip
    assert {f"with {name}={value}" for name, value in values.items()} <= names(report, "passed")


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "bug"),
    [
        ("n_kv_heads", "key-heads-tiled"),
        ("window", "window-off"),
        ("qk_norm", "norm-shared"),
        ("softcap", ""),
        ("causal", ""),
        ("rotary", "rotary-opposite"),
        ("scale", "unscaled"),
        ("bias", "input-bias-missing"),
    ],
)
def test_a_wrong_option_fails_and_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, wrong: str, bug: str
) -> None:
    monkeypatch.setattr(Optional, "wrong", wrong)
    report = checker.check(Optional, "self")
    [check] = [check for check in report.checks if check.status == "failed"]
    assert check.name.startswith(f"with {wrong}=")
    assert bugs(report) == [bug] if bug else "changes no output" in check.reason, report
    assert all(f"with {wrong}=" in each.description.lower() for each in report.diagnosis)


class Dependent(Layer):
    """Causal attention.

    window: how many keys each query sees if it is local.
    scale: a factor on top of 1/sqrt(d).
    """

    off_by = 0

    def __init__(
        self,
        dim: int = 24,
        num_heads: int = 4,
        local: bool = False,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(dim, num_heads)
        self.local, self.window, self.factor = local, window, scale or 1.0

    def forward(self, x: Tensor) -> Tensor:
        visible = triangle(x)
        if self.local and self.window:
            visible = visible.triu(1 - self.window - self.off_by)
        return self.merge((self.scores(x, x) * self.factor).masked_fill(~visible, -torch.inf).softmax(-1), x)


@pytest.mark.full
def test_an_option_is_judged_with_the_flag_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checker.check(Dependent, "self")
    assert report.passed, report
    assert "with window=3" in names(report, "passed")
    assert "left at their defaults, so not judged: local, scale" in report.notes
    monkeypatch.setattr(Dependent, "off_by", 2)
    report = checker.check(Dependent, "self")
    assert names(report, "failed") == {"with window=3"}
    assert bugs(report) == ["window-off"]


class ChunksAndSecond(Layer):
    """window: tokens attend within a chunk of so many tokens, and to the second chunk before."""

    def __init__(self, dim: int = 24, num_heads: int = 4, window: int | None = None) -> None:
        super().__init__(dim, num_heads)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        chunk = torch.arange(x.shape[1]) // (self.window or x.shape[1])
        return self.attend(x, x, triangle(x) & ((chunk[:, None] - chunk) % 3 != 1))


def test_an_option_that_is_not_understood_does_not_fail() -> None:
    report = checker.check(ChunksAndSecond, "self")
    assert report.passed, report
    assert "with window=3" in names(report, "could not be checked")


# -- scales and layouts ----------------------------------------------------------------------------


class ManyPairs(Layer):
    """Attention whose heads have a multiple of 8 entries, as in tests with a width of 32."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        if dim // num_heads % 8:
            raise ValueError("heads need a multiple of 8 entries")
        self.dim = dim

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return super().scores(x, y) * (self.dim // self.num_heads) ** 0.5 / self.divisor()

    def divisor(self) -> float:
        return (self.dim // self.num_heads) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


class ByWidth(ManyPairs):
    def divisor(self) -> float:
        return self.dim**0.5


class HardCoded(ManyPairs):
    def divisor(self) -> float:
        return 32**0.5


@pytest.mark.full
def test_another_width_separates_scales_that_are_equal() -> None:
    report = checker.check(ManyPairs, "self")
    assert report.passed, report
    assert bugs(checker.check(ByWidth, "self")) == ["scaled-by-width"]
    assert bugs(checker.check(HardCoded, "self")) == ["scale-hard-coded"]


@pytest.mark.full
def test_a_layout_that_does_not_fit_is_doubted() -> None:
    report = checker.check(CausalByDefault, "self", layout="sequence")
    assert report.verdict == "failed"
    assert "--layout sequence" in report.words()[0]
    assert "--layout" not in checker.check(BatchTimeChannel, "self", layout="sequence").summary()
    assert checker.check(CausalByDefault, "self", layout="batch").passed


# -- other mechanisms ------------------------------------------------------------------------------


class LinearAttention(Layer):
    """Causal linear attention: the weights are products of features, elu(x) + 1."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.products(x), x)

    def products(self, x: Tensor) -> Tensor:
        q, k = (F.elu(self.split(x, layer)) + 1 for layer in (self.q_proj, self.k_proj))
        weights = (q @ k.mT).tril()
        return weights / weights.sum(-1, keepdim=True)


class LinearAttentionOfTheFuture(LinearAttention):
    """Causal linear attention."""

    def products(self, x: Tensor) -> Tensor:
        q, k = (F.elu(self.split(x, layer)) + 1 for layer in (self.q_proj, self.k_proj))
        return (q @ k.mT) / (q @ k.mT).sum(-1, keepdim=True)


class Unlike(Layer):
    """Softmax attention, unlike linear attention."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge((self.scores(x, x) * 6**0.5).softmax(-1), x)


@pytest.mark.full
def test_a_documented_mechanism_other_than_softmax_attention_is_not_judged() -> None:
    report = checker.check(LinearAttention, "self")
    assert report.verdict == "not judged", report
    assert "something besides attention is in it: Linear Attention" in report.summary()
    assert not bugs(report)
    report = checker.check(LinearAttentionOfTheFuture, "self")
    assert names(report, "failed") == {"causality"}
    assert bugs(checker.check(Unlike, "self")) == ["unscaled"]


class DocumentedOnly(Layer):
    """Multi-head attention as in Performer models; here it is plain softmax attention."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


def test_softmax_attention_that_mentions_another_mechanism_passes() -> None:
    report = checker.check(DocumentedOnly, "self")
    assert report.passed, report


# -- a context -------------------------------------------------------------------------------------


class MaskOfSelf(Layer):
    """Self- and cross-attention.

    x: (batch, tokens, width)
    mask: (tokens, tokens), added, -inf above the diagonal; used for self-attention only
    context: (batch, keys, width)
    """

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x, x if context is None else context)
        added = mask if context is None else None
        weights = (scores if added is None else scores + added).softmax(-1)
        return self.merge(weights, x if context is None else context)


class MaskOfSelfInCode(Layer):
    """Self- and cross-attention."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x, x if context is None else context)
        if mask is not None and context is None:
            scores = scores + mask
        return self.merge(scores.softmax(-1), x if context is None else context)


class MaskOfBoth(Layer):
    """Self- and cross-attention. mask: (t, s), added: -inf masks a key of x, or of the context if given."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x, x if context is None else context)
        if mask is not None and context is None:
            scores = scores + mask
        return self.merge(scores.softmax(-1), x if context is None else context)


class MaskLost(Layer):
    """Self- and cross-attention. mask: (t, s), added: -inf masks a key."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y, scores = x, self.scores(x, x)
        if mask is not None:
            scores = scores + mask
        if context is not None:
            y, scores = context, self.scores(x, context)
        return self.merge(scores.softmax(-1), y)


@pytest.mark.full
def test_a_mask_that_is_documented_for_self_attention_is_not_judged_with_a_context() -> None:
    report = checker.check(MaskOfSelf)
    assert report.passed, report
    assert "mask isn't used with context, as documented" in report.notes


@pytest.mark.full
def test_a_mask_that_only_code_leaves_out_with_a_context_is_asked_for() -> None:
    report = checker.check(MaskOfSelfInCode)
    assert report.verdict == "not judged", report
    assert not report.diagnosis
    assert names(report, "not judged") == {"argument mask (with context)"}
    assert checker.check(MaskOfSelfInCode, args={"context": "ignore"}).passed


@pytest.mark.full
@pytest.mark.parametrize("layer", [MaskOfBoth, MaskLost])
def test_a_mask_that_is_lost_with_a_context_is_ignored(layer: type[Layer]) -> None:
    report = checker.check(layer)
    assert report.verdict == "failed"
    assert "mask-ignored" in bugs(report)


class CausalOfSelf(Layer):
    """Self-attention, causal with causal=True, or cross-attention."""

    forgets = False

    def __init__(self, dim: int = 24, num_heads: int = 4, causal: bool = False) -> None:
        super().__init__(dim, num_heads)
        self.causal = causal

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if context is None:
            return self.attend(x, x, triangle(x) if self.causal or self.forgets else None)
        if self.causal:
            raise ValueError("context with causal=True")
        return self.attend(x, context)


@pytest.mark.full
def test_settings_are_compared_with_the_default_build_after_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = checker.check(CausalOfSelf)
    assert report.passed, report
    assert "with causal=False" in names(report, "passed")
    monkeypatch.setattr(CausalOfSelf, "forgets", True)
    assert names(checker.check(CausalOfSelf), "failed") == {"with causal=False"}


class BiasOfStack(Layer):
    """Attention with learned biases of distances, given to the next layers of the stack."""

    factor = 1.0

    def __init__(self, dim: int = 24, num_heads: int = 4, distances: int = 32) -> None:
        super().__init__(dim, num_heads)
        self.relative_attention_bias = nn.Embedding(2 * distances + 1, num_heads)
        self.distances = distances

    def forward(
        self, x: Tensor, mask: Tensor | None = None, position_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """mask: additive, (b, 1, t, s). With is_decoder=True it is one-sided (later tokens are masked)."""
        scores = self.scores(x, x)
        if position_bias is None:
            if self.distances:
                place = torch.arange(x.shape[1])
                distance = (place - place[:, None]).clamp(-self.distances, self.distances) + self.distances
                position_bias = self.relative_attention_bias(distance).permute(2, 0, 1)[None]
            if mask is not None:
                position_bias = position_bias + mask
            scores = scores + position_bias
        else:
            scores = scores + position_bias * self.factor
        return self.merge(scores.softmax(-1), x), position_bias


@pytest.mark.full
def test_a_given_bias_may_replace_one_that_is_computed_in_a_nested_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = checker.check(BiasOfStack)
    assert report.passed, report
    assert {"given bias", "mask form"} <= names(report, "convention")
    monkeypatch.setattr(BiasOfStack, "factor", 0.5)
    assert checker.check(BiasOfStack).verdict == "failed"


def test_a_value_of_another_argument_is_no_polarity() -> None:
    other = "is_decoder=True makes it one-sided (the causal mask is part of `mask`). mask: additive"
    assert read_mask("mask", other).is_additive
    assert read_mask("mask", other).polarity is None
    assert read_mask("mask", "mask: (b, s), visible=True").polarity is True


# -- settings --------------------------------------------------------------------------------------


class WindowOfCaller(Layer):
    """Attention. window: kept for the caller, who makes the mask."""

    def __init__(self, dim: int = 24, num_heads: int = 4, window: int | None = None) -> None:
        super().__init__(dim, num_heads)
        self.window = window

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: [b, t, s], True keeps."""
        return self.attend(x, x, None if mask is None else mask[:, None])


@pytest.mark.full
def test_a_window_without_an_effect_is_asked_for() -> None:
    report = checker.check(WindowOfCaller)
    assert report.verdict == "not judged", report
    assert "--init 'window=None'" in report.summary()
    assert checker.check(WindowOfCaller, init={"window": None}).passed


# -- inference -------------------------------------------------------------------------------------


class ForInference(Layer):
    """Attention with a table of factors, which the compiler refuses in inference mode."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.table = torch.polar(torch.ones(64, 3), torch.zeros(64, 3))

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        table = self.table.to(x.device)[: x.shape[1]]
        return self.attend(x, x) * (table.view(1, -1, 3) * 1).real.repeat(1, 1, 8)


@pytest.mark.full
def test_an_error_of_the_compiler_leaves_pytorch_usable() -> None:
    candidate = Candidate(ForInference)
    candidate.build({})
    with pytest.raises(CodeError, match="BackendCompilerFailed"):
        candidate.call(Call((torch.zeros(2, 5, 24),), compiled=True))
    gc.collect()
    assert torch.randn(3).shape == (3,)
    assert candidate.call(Call((torch.zeros(2, 5, 24),))).output.shape == (2, 5, 24)


# -- steps of one token ----------------------------------------------------------------------------


class RingOfKeys(Layer):
    """Attention to the last keys. A whole sequence, or with `input_pos` one token at that position."""

    slots = 0  # by how many the ring is too short

    def __init__(self, dim: int, num_heads: int, window: int, max_batch: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.window = window
        self.register_buffer("ring", torch.zeros(max_batch, window, dim), persistent=False)

    def forward(self, x: Tensor, input_pos: int | None = None) -> Tensor:
        if input_pos is None:
            return self.attend(x, x, triangle(x).triu(1 - self.window))
        assert x.shape[1] == 1, "one token at a time"
        with torch.no_grad():
            self.ring[: len(x), input_pos % (self.window - self.slots)] = x[:, 0]
        return self.attend(x, self.ring[: len(x)].clone(), torch.arange(self.window) <= input_pos)


@pytest.mark.full
def test_a_cache_that_takes_single_tokens_only_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checker.check(RingOfKeys)
    assert report.passed, report
    assert "cache" in names(report, "passed")
    assert "sliding window of 3 keys" in report.notes
    monkeypatch.setattr(RingOfKeys, "slots", 1)
    assert names(checker.check(RingOfKeys), "failed") == {"cache"}


# -- queries and keys without values ---------------------------------------------------------------


class KeysAreValues(Layer):
    """Attention of queries to keys, of which the values are made too.

    ``key_padding_mask`` is (B, S) with True for pads, ``attn_mask`` is (T, S) and added to the scores.
    """

    pads = True

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        assert key is not None
        scores = self.scores(query, key)
        if attn_mask is not None:
            scores = scores + attn_mask
        if key_padding_mask is not None:
            masked = key_padding_mask[:, None, None].to(torch.bool)
            scores = scores.masked_fill(masked == self.pads, -torch.inf)
        return self.merge(scores.softmax(-1), key)


@pytest.mark.full
def test_keys_without_values_are_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checker.check(KeysAreValues)
    assert report.passed, report
    assert {role.name: role.role for role in report.roles}["key"] == "context"
    monkeypatch.setattr(KeysAreValues, "pads", False)
    assert "polarity-swapped" in bugs(checker.check(KeysAreValues))


def test_two_masks_in_one_sentence_are_read_apart() -> None:
    text = KeysAreValues.__doc__ or ""
    assert read_mask("attn_mask", text).is_additive
    assert read_mask("attn_mask", text).shapes == {"ts"}
    padding = read_mask("key_padding_mask", text)
    assert (padding.polarity, padding.is_additive, padding.shapes) == (False, False, {"bs"})
