"""Styles and bugs of modules that the checker misjudged in a blind round, each in a small module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.candidates.documentation import (
    code_dimensions,
    is_read,
    read_mask,
    says_unused,
    says_vectors,
)
from tests.unit.checker.test_round_8 import Layer, bugs, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


def unjudged(report: checker.Report) -> list[str]:
    return [check.name for check in report.checks if check.status == "not judged"]


# -- documentation and code ------------------------------------------------------------------------


def test_the_shape_of_another_argument_says_nothing() -> None:
    text = "Without ``places`` x [b, t, e] is a whole sequence."
    assert not says_vectors("places", text)
    assert says_vectors("places", "places: a tensor [b, t, e]")


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("m (bool): (tgt_len, src_len) for all, or (bsz, tgt_len, src_len) for each", {"ts", "bts"}),
        ("m: [t, s] or [b*h, t, s]", {"ts", "nts"}),
        ("m: (L, S) or (N * num_heads, L, S)", {"ts", "nts"}),
        ("m: mask [b, h, t, s], True = may attend", {"bhts"}),
        ("m: a mask, expanded to [b, h, t, s]", set()),
    ],
)
def test_shapes_of_masks_with_and_without_heads(text: str, shapes: set[str]) -> None:
    assert read_mask("m", text).shapes == shapes


def test_dimensions_that_code_tells_apart() -> None:
    source = "if m.dim() == 3: ...\nelif m.ndim in (2, 4): ...\nif x.dim() == 1 or len(m.shape) == 5: ..."
    assert code_dimensions("m", source) == {2, 3, 4, 5}


def test_arguments_that_code_does_not_use() -> None:
    source = "def forward(self, x, labels=None, tags=None):\n    del labels\n    return x + (tags is None)"
    assert not is_read("labels", source)
    assert is_read("tags", source)
    assert says_unused("labels", "labels: ignored")
    assert not says_unused("tags", "labels: ignored")


# -- arguments whose role nothing says -------------------------------------------------------------


class Tagged(Layer):
    """Attention.

    ``forward(x, tags=None)``.
    """

    def forward(self, x: Tensor, tags: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if tags is not None:
            scores = scores + tags.sum()
        return self.merge(scores.softmax(-1), v)


class Ignored(Tagged):
    """Attention. ``tags`` is ignored."""


class Flags(Layer):
    def forward(self, x: Tensor, sharp: bool = False, verbose: bool = False) -> Tensor:
        q, k, v = self.heads(x)
        if verbose:
            x = x + 0
        return self.merge((q @ k.mT / q.shape[-1] ** (0.4 if sharp else 0.5)).softmax(-1), v)


def test_an_argument_that_nothing_explains_is_not_judged() -> None:
    report = checker.check(Tagged, "self")
    assert (report.verdict, unjudged(report)) == ("not judged", ["argument tags"]), report
    assert checker.check(Tagged, "self", args={"tags": "ignore"}).passed
    assert checker.check(Ignored, "self").passed


def test_a_flag_is_tried() -> None:
    report = checker.check(Flags, "self")
    assert unjudged(report) == ["argument sharp"], report


# -- static caches ---------------------------------------------------------------------------------


class Static(Layer):
    """Causal attention; with ``where`` x [b, t, e] has the tokens at these places of the cache."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.register_buffer("k_cache", torch.zeros(4, num_heads, 64, dim // num_heads))
        self.register_buffer("v_cache", torch.zeros(4, num_heads, 64, dim // num_heads))
        self.register_buffer("causal_mask", past(64, 64))

    def rows(self, triangle: Tensor, where: Tensor) -> Tensor:
        return triangle[where]

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        (q, k, v), (b, t, _) = self.heads(x), x.shape
        mask = self.causal_mask[:t, :t]
        if where is not None:
            self.k_cache[:b, :, where] = k
            self.v_cache[:b, :, where] = v
            k, v = self.k_cache[:b], self.v_cache[:b]
            mask = self.rows(self.causal_mask, where)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        return self.merge(scores.softmax(-1), v)


def test_a_static_cache_is_exercised_by_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checker.check(Static, "self")
    assert report.passed, report
    assert "cache" in [check.name for check in report.checks if check.status == "passed"]
    monkeypatch.setattr(Static, "rows", lambda self, triangle, where: triangle[: len(where)])
    report = checker.check(Static, "self")
    assert bugs(report) == ["first-key-only"], report


# -- masks of several shapes -----------------------------------------------------------------------


class SeveralShapes(Layer):
    """Attention. mask [t, s], or [b, t, s] for each sequence, True = may attend."""

    repeats = staticmethod(lambda mask, h: mask.repeat_interleave(h, 0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.flatten(0, 1) for y in self.heads(x))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            mask = self.repeats(mask, self.num_heads) if mask.dim() == 3 else mask
            scores = scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1) @ v
        return self.o_proj(out.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2))


class Tiled(SeveralShapes):
    repeats = staticmethod(lambda mask, h: mask.repeat(h, 1, 1))


class UndocumentedShapes(SeveralShapes):
    """Attention. mask: True = may attend."""


class UndocumentedTiled(Tiled):
    """Attention. mask: True = may attend."""


class ByHead(SeveralShapes):
    """Attention. mask [t, s], or [b*h, t, s] for each head of each sequence, True = may attend."""

    repeats = staticmethod(lambda mask, h: mask)


class FirstHead(ByHead):
    """Attention. mask [t, s], or [b*h, t, s] for each head of each sequence, True = may attend."""

    repeats = staticmethod(lambda mask, h: mask[::h].repeat_interleave(h, 0))


@pytest.mark.parametrize("right", [SeveralShapes, UndocumentedShapes, ByHead])
def test_each_shape_of_a_mask_is_exercised(right: type[nn.Module]) -> None:
    report = checker.check(right, "self")
    assert report.passed, report
    [role] = [role.role for role in report.roles if role.name == "mask"]
    assert " or " in role


@pytest.mark.parametrize("wrong", [Tiled, UndocumentedTiled])
def test_a_mask_repeated_in_another_order_is_named(wrong: type[nn.Module]) -> None:
    report = checker.check(wrong, "self")
    assert bugs(report) == ["mask-tiled"], report


class TwoDimensions(SeveralShapes):
    """Attention. mask [t, s], or [b, t, s] for each sequence, True = may attend."""

    repeats = staticmethod(lambda mask, h: mask.view(mask.shape[1:]))


def test_a_documented_shape_that_no_call_accepts_is_not_judged() -> None:
    report = checker.check(TwoDimensions, "self")
    assert unjudged(report) == ["argument mask"], report
    assert "[b, t, s]" in report.select("not judged")[0].reason


def test_a_mask_of_heads_may_be_wrong_in_some() -> None:
    assert checker.check(FirstHead, "self").verdict == "failed"


# -- half precision --------------------------------------------------------------------------------


class LowNumber(Layer):
    """Attention. mask [b, s], 1 = token, 0 = padding."""

    is_product = True

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.register_buffer("low", torch.tensor(-1e9))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            keep = mask[:, None, None]
            if self.is_product:
                scores = scores + (1 - keep.to(scores.dtype)) * self.low
            else:
                scores = torch.where(keep.bool(), scores, self.low)
        return self.merge(scores.softmax(-1), v)


class Chosen(LowNumber):
    """Attention. mask [b, s], 1 = token, 0 = padding."""

    is_product = False


def test_a_buffer_that_overflows_in_half_precision() -> None:
    report = checker.check(LowNumber, "self")
    assert bugs(report) == ["fill-overflow"], report
    assert [check.name for check in report.checks if check.status == "failed"] == ["float16"]
    assert checker.check(Chosen, "self").passed


# -- contexts --------------------------------------------------------------------------------------


class Crossing(Layer):
    """Attention to x, or to ``context`` [b, s, e] if it is given."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.attend(x, x if context is None else context)

    def attend(self, x: Tensor, y: Tensor) -> Tensor:
        q, (_, k, v) = self.split(self.q_proj(x)), self.heads(y)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class KeepsFirst(Crossing):
    """Attention to x, or to ``context`` [b, s, e] if it is given."""

    def forward(self, x: Tensor, context: Tensor | None = None, kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
        if context is not None:
            context = kept.setdefault("context", context)
        return self.attend(x, x if context is None else context)


class KeepsNone(Crossing):
    """Attention to x, or to ``context`` [b, s, e] if it is given."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if context is not None:
            k, v = self.split(self.k_proj(x)), v
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


class SaysUnused(KeepsNone):
    """Attention to x. ``context`` isn't used."""


def test_a_context_that_is_kept_is_told_from_one_that_is_ignored() -> None:
    assert checker.check(Crossing, "self").passed or checker.check(Crossing).passed
    assert "context-kept" in bugs(checker.check(KeepsFirst))
    report = checker.check(KeepsNone)
    assert bugs(report) == ["context-ignored"], report
    assert unjudged(checker.check(SaysUnused)) == ["argument context"]


# -- parameters with several names -----------------------------------------------------------------


class Listed(nn.Module):
    """Attention with a list of layers: queries, keys, values, output."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linears = nn.ModuleList(self.layers(dim))

    def layers(self, dim: int) -> list[nn.Linear]:
        return [nn.Linear(dim, dim) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in self.linears[:3])
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.linears[-1]((weights @ v).transpose(1, 2).flatten(2))


class Repeated(Listed):
    """Attention with a list of layers: queries, keys, values, output."""

    def layers(self, dim: int) -> list[nn.Linear]:
        return [nn.Linear(dim, dim)] * 4


class RepeatedUnscaled(Repeated):
    """Attention with a list of layers: queries, keys, values, output."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in self.linears[:3])
        return self.linears[-1](((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class SharedOnPurpose(Repeated):
    """Attention whose projections share the weights of one linear layer."""


class SharedKeys(Listed):
    """Attention with a list of layers: queries and keys, values, output."""

    def layers(self, dim: int) -> list[nn.Linear]:
        keys, values, output = (nn.Linear(dim, dim) for _ in range(3))
        return [keys, keys, values, output]


class Aliased(Layer):
    """Attention; `to_q` is another name of `q_proj`."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.to_q, self.out = self.q_proj, self.o_proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)


@pytest.mark.parametrize("right", [Listed, SharedOnPurpose, SharedKeys, Aliased])
def test_layers_may_have_several_names(right: type[nn.Module]) -> None:
    report = checker.check(right, "self")
    assert report.passed, report


def test_projections_that_are_one_layer_by_mistake() -> None:
    report = checker.check(Repeated, "self")
    assert bugs(report) == ["projections-shared"], report
    assert set(bugs(checker.check(RepeatedUnscaled, "self"))) == {"unscaled", "projections-shared"}


class ScaledByDetour(Layer):
    """Attention times a factor that no known part has; `head_mask` has a factor for each head."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.detour = nn.Linear(dim, dim)

    def forward(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        if head_mask is not None:
            weights = weights * head_mask.view(1, -1, 1, 1)
        return self.merge(weights, v) * self.detour(x).sigmoid().mean(-1, keepdim=True).exp()


def test_a_head_mask_beside_something_unknown() -> None:
    report = checker.check(ScaledByDetour, "self")
    assert "values" in unjudged(report), report
    assert {check.name: check.status for check in report.checks}["float16"] == "passed", report
