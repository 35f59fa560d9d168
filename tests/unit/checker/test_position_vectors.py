"""Vectors of positions, given to a call or learned by distance: they are exercised, and their bugs named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import checker
from manyheads.checker.candidates.documentation import (
    adds_to_tokens,
    says_numbers,
    says_one_role,
    says_vectors,
)
from tests.unit.checker.test_round_8 import Layer, bugs, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


# -- vectors that a call gives ---------------------------------------------------------------------


class Attend(Layer):
    """Attention whose queries, keys and values have inputs of their own."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k = self.split(self.q_proj(query)), self.split(self.k_proj(key))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return self.merge(scores.softmax(-1), self.split(self.v_proj(value)))


class OfTokens(Attend):
    """Attention as in DETR's encoder: q = k = x + pos."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        q = x if pos is None else x + pos
        return self.attend(q, q, x)


class OnValues(Attend):
    """Attention of x + pos."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        x = x if pos is None else x + pos
        return self.attend(x, x, x)


class OnQueries(Attend):
    """Attention of x + pos to x, although positions belong to keys too."""

    def forward(self, x: Tensor, query_pos: Tensor | None = None) -> Tensor:
        return self.attend(x if query_pos is None else x + query_pos, x, x)


class Required(Attend):
    """Attention whose positions have no default."""

    def forward(self, src: Tensor, pos: Tensor) -> Tensor:
        q = src + pos
        return self.attend(q, q, src)


class AfterProjection(Attend):
    """Attention whose positions are added to the projected queries and keys.

    pos: positional embedding [b, t, e], added to queries and keys
    """

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        pos = x * 0 if pos is None else pos
        q, k = self.split(self.q_proj(x) + pos), self.split(self.k_proj(x) + pos)
        return self.merge((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), self.split(self.v_proj(x)))


class OnOutput(Attend):
    """Attention whose output has the positions too."""

    def forward(self, x: Tensor, query_pos: Tensor | None = None) -> Tensor:
        q = x if query_pos is None else x + query_pos
        out = self.attend(q, q, x)
        return out if query_pos is None else out + query_pos


class Decoder(Attend):
    """Attention of queries to an image, as in DETR's decoder."""

    def forward(
        self, tgt: Tensor, memory: Tensor, pos: Tensor | None = None, query_pos: Tensor | None = None
    ) -> Tensor:
        q = tgt if query_pos is None else tgt + query_pos
        k = memory if pos is None else memory + pos
        return self.attend(q, k, self.values(memory, k))

    def values(self, memory: Tensor, key: Tensor) -> Tensor:
        return memory


class DecoderOnValues(Decoder):
    """The values have the positions of the image too."""

    def values(self, memory: Tensor, key: Tensor) -> Tensor:
        return key


class DecoderIgnores(Decoder):
    """The positions of the image aren't used."""

    def forward(
        self, tgt: Tensor, memory: Tensor, pos: Tensor | None = None, query_pos: Tensor | None = None
    ) -> Tensor:
        return super().forward(tgt, memory, None, query_pos)


class Optional(Decoder):
    """Self-attention without memory, where query_pos is added to queries and keys."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor | None = None,
        pos: Tensor | None = None,
        query_pos: Tensor | None = None,
    ) -> Tensor:
        if memory is None:
            q = tgt if query_pos is None else tgt + query_pos
            return self.attend(q, q, tgt)
        return super().forward(tgt, memory, pos, query_pos)


class OptionalOnValues(DecoderOnValues, Optional):
    """The values of the memory have its positions too."""


class Three(Attend):
    """Attention of three sequences, whose queries and keys have positions of their own."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
    ) -> Tensor:
        query = query if query_pos is None else query + query_pos
        return self.attend(query, key if key_pos is None else key + key_pos, value)


class OfContext(Attend):
    """Attention to an image, whose positions alone are given.

    pos: positional embedding, added to the keys only
    """

    def forward(self, x: Tensor, context: Tensor, pos: Tensor | None = None) -> Tensor:
        return self.attend(x, context if pos is None else context + pos, context)


class Unnamed(Attend):
    """Attention whose positions neither code nor documentation explain."""

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        q = x.clone()
        q = q if pos is None else pos + q
        return self.attend(q, q, x)


class Numbers(Layer):
    """Attention whose query_pos are numbers that it doesn't need. query_pos: [b, t]."""

    def forward(self, x: Tensor, query_pos: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), v)


@pytest.mark.parametrize("kind", [OfTokens, Required, Decoder, Optional, Three, OfContext, Unnamed])
def test_vectors_of_positions_are_exercised(kind: type[Layer]) -> None:
    report = checker.check(kind)
    assert report.passed, (report.verdict, report.diagnosis)
    compared = [check.name.partition(" (")[0] for check in report.checks if check.status == "passed"]
    assert "position vectors" in compared or kind is Required
    assert any(role.role in ("vectors", "query-vectors", "key-vectors") for role in report.roles)


@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        (OnValues, "vectors-on-values"),
        (OnQueries, "vectors-on-one"),
        (AfterProjection, "vectors-after-projection"),
        (OnOutput, "vectors-on-output"),
        (DecoderOnValues, "vectors-on-values"),
        (DecoderIgnores, "vectors-on-one"),
        (OptionalOnValues, "vectors-on-values"),
    ],
)
def test_bugs_of_vectors_of_positions_are_named(kind: type[Layer], bug: str) -> None:
    report = checker.check(kind)
    assert (report.verdict, bugs(report)) == ("failed", [bug])


def test_vectors_that_are_ignored_fail() -> None:
    class Ignores(Layer):
        """Attention. query_pos: positional embedding, added to queries and keys."""

        def forward(self, x: Tensor, query_pos: Tensor | None = None) -> Tensor:
            q, k, v = self.heads(x)
            return self.merge((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), v)

    assert bugs(checker.check(Ignores)) == ["vectors-ignored"]


def test_numbers_of_positions_are_no_vectors() -> None:
    report = checker.check(Numbers)
    assert report.verdict == "not judged"
    assert "--arg query_pos" in str(report)


def test_the_shape_of_another_argument_says_nothing() -> None:
    assert not says_vectors("input_pos", "Without ``input_pos`` x [B, S, dim] is a whole sequence")
    assert says_vectors("pos", "pos is a tensor of shape (b, t, e)")


def test_a_role_can_be_given() -> None:
    class Renamed(Attend):
        def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
            shifted = x if where is None else x * 1 + where
            return self.attend(shifted, shifted, x)

    assert checker.check(Renamed, args={"where": "vectors"}).passed


def test_code_and_documentation_say_what_vectors_are_added_to() -> None:
    assert adds_to_tokens("pos", ["x", "memory"], "q = x + pos")
    assert adds_to_tokens("pos", ["src"], "q = k = self.with_pos_embed(self.norm(src), pos)")
    assert not adds_to_tokens("pos", ["src"], "def with_pos_embed(tensor, pos):\n    return tensor + pos")
    assert not adds_to_tokens("pos", ["x"], "i = start + pos")
    assert says_one_role("pos", "pos: added to the keys only") == "k"
    assert says_one_role("pos", "pos: added to the queries and keys") == ""
    assert says_numbers("query_pos", "query_pos: [b, t]")
    assert not says_numbers("query_pos", "query_pos: [b, t, e]")


# -- vectors that are learned by distance ----------------------------------------------------------


class Skewed(Layer):
    """Causal attention with vectors of distances, the last row for distance 0, as in Music Transformer."""

    shape: tuple[int, ...] = (32, 6)

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.E = nn.Parameter(torch.randn(self.shape))

    def vectors(self, t: int) -> Tensor:
        return self.E[..., self.E.shape[-2] - t :, :]

    def skew(self, x: Tensor) -> Tensor:
        t = x.shape[-1]
        return F.pad(x, (1, 0)).reshape(*x.shape[:2], t + 1, t)[:, :, 1:]

    def combine(self, scores: Tensor, products: Tensor, scale: float) -> Tensor:
        return (scores + products) * scale

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        products = self.skew(q @ self.vectors(t).mT)
        scores = self.combine(q @ k.mT, products, q.shape[-1] ** -0.5)
        return self.merge(scores.masked_fill(~past(t, t), -torch.inf).softmax(-1), v)


class SkewedByHead(Skewed):
    """Each head has its own vectors."""

    shape = (4, 32, 6)


class Gathered(Skewed):
    """The first row is that of distance 0, and vectors of all heads are in one row."""

    shape = (32, 24)

    def forward(self, x: Tensor) -> Tensor:
        (q, k, v), t = self.heads(x), x.shape[1]
        distances = (torch.arange(t)[:, None] - torch.arange(t)).clamp_min(0)
        vectors = self.E[distances].unflatten(-1, (4, 6))
        scores = (q @ k.mT + torch.einsum("bhtd,tshd->bhts", q, vectors)) * q.shape[-1] ** -0.5
        return self.merge(scores.masked_fill(~past(t, t), -torch.inf).softmax(-1), v)


class FirstRows(Skewed):
    """The first rows are taken in place of the last."""

    def vectors(self, t: int) -> Tensor:
        return self.E[:t]


class DropsLastRow(Skewed):
    """The last row of the padded products is dropped in place of the first."""

    def skew(self, x: Tensor) -> Tensor:
        t = x.shape[-1]
        return F.pad(x, (1, 0)).reshape(*x.shape[:2], t + 1, t)[:, :, :-1]


class PadsRight(SkewedByHead):
    """The column of zeros is on the wrong side."""

    def skew(self, x: Tensor) -> Tensor:
        t = x.shape[-1]
        return F.pad(x, (0, 1)).reshape(*x.shape[:2], t + 1, t)[:, :, 1:]


class Unscaled(Skewed):
    """The products aren't scaled."""

    def combine(self, scores: Tensor, products: Tensor, scale: float) -> Tensor:
        return scores * scale + products


@pytest.mark.parametrize("kind", [Skewed, SkewedByHead, Gathered])
def test_vectors_of_distances_are_recognized(kind: type[Layer]) -> None:
    report = checker.check(kind)
    assert report.passed, report
    assert any("learned vectors `E` by distances" in note for note in report.notes)


@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        (FirstRows, "vectors-slice"),
        (DropsLastRow, "vectors-skewed"),
        (PadsRight, "vectors-skewed"),
        (Unscaled, "vectors-unscaled"),
    ],
)
def test_bugs_of_vectors_of_distances_are_named(kind: type[Layer], bug: str) -> None:
    report = checker.check(kind)
    assert (report.verdict, bugs(report)) == ("failed", [bug])


class Segments(Layer):
    """Causal attention with distances as in Transformer-XL, whose keys may begin with earlier tokens."""

    drops = "first"

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.r_net = nn.Linear(dim, dim, bias=False)
        self.r_w_bias, self.r_r_bias = (nn.Parameter(torch.randn(num_heads, 6)) for _ in range(2))

    def shift(self, x: Tensor) -> Tensor:
        b, h, t, s = x.shape
        padded = F.pad(x, (1, 0)).reshape(b, h, s + 1, t)
        return (padded[:, :, 1:] if self.drops == "first" else padded[:, :, :-1]).reshape(b, h, t, s)

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Tensor:
        tokens = x if mems is None else torch.cat((mems, x), dim=1)
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(tokens)), self.split(self.v_proj(tokens))
        t, s, e = q.shape[2], k.shape[2], x.shape[-1]
        angles = torch.outer(torch.arange(s - 1, -1, -1.0), 10000 ** (-torch.arange(0.0, e, 2) / e))
        r = (
            self.r_net(torch.cat((angles.sin(), angles.cos()), -1).to(x))
            .unflatten(-1, (4, 6))
            .transpose(0, 1)
        )
        content = (q + self.r_w_bias[:, None]) @ k.mT
        position = self.shift((q + self.r_r_bias[:, None]) @ r.mT)
        scores = (content + position) * q.shape[-1] ** -0.5
        return self.merge(scores.masked_fill(~past(t, s), -torch.inf).softmax(-1), v)


class SegmentsWrong(Segments):
    """The shift drops the last row."""

    drops = "last"


def test_distances_of_transformer_xl_are_recognized() -> None:
    report = checker.check(Segments)
    assert report.passed, report
    assert "earlier tokens" in [check.name for check in report.checks if check.status == "passed"]


def test_a_wrong_shift_of_transformer_xl_is_named() -> None:
    report = checker.check(SegmentsWrong)
    assert (report.verdict, bugs(report)) == ("failed", ["vectors-skewed"])
