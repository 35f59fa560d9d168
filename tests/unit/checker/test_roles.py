"""Roles: the table that says what each argument and parameter was taken for, and the options that set it."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.candidates.adapter import Options
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.probe import open_adapter, open_with_context
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.setup import parse_pairs, read_setup

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class Base(nn.Module):
    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor, layer: nn.Module) -> Tensor:
        heads: Tensor = layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def attend(
        self, x: Tensor, context: Tensor, keep: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """keep and bias broadcast to [b, h, t, s]."""
        q, k, v = self.split(x, self.q), self.split(context, self.k), self.split(context, self.v)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + (0 if bias is None else bias)
        if keep is not None:
            scores = scores.masked_fill(~keep, -math.inf)
        out: Tensor = self.o((scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).flatten(2))
        return out


def of_keys(mask: Tensor | None) -> Tensor | None:
    """`[b, s]` as `[b, 1, 1, s]`."""
    return None if mask is None else mask[:, None, None]


def roles(found: checker.Report) -> dict[str, str]:
    return {role.name: role.role for role in found.roles}


def bugs(found: checker.Report) -> list[str]:
    return [diagnosis.bug for diagnosis in found.diagnosis]


# -- the table -------------------------------------------------------------------------------------


class TwoMasks(Base):
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        pad_mask: Tensor | None = None,
        need_weights: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """mask [b, s]: True keeps. pad_mask [b, s]: True is padding."""
        keep = of_keys(mask)
        visible = None if pad_mask is None else of_keys(~pad_mask)
        both = keep if visible is None else visible if keep is None else keep & visible
        return self.attend(x, x, both)


def test_the_table_says_what_was_understood_and_why() -> None:
    found = checker.check(TwoMasks, init={"dim": 24})
    rows = {role.name: (role.kind, role.role, role.reason) for role in found.roles}
    assert rows["x"] == ("argument", "x", "its name")
    reason = "its name; polarity as its documentation says"
    assert rows["mask"] == ("argument", "mask: [b, s] boolean, True keeps", reason)
    assert rows["pad_mask"] == ("argument", "mask-of-keys: [b, s] boolean, True masks", reason)
    assert rows["name"][1] == "ignore"
    assert rows["q.weight"] == ("parameter", "q weight", "its name")
    assert rows["heads"] == ("setting", "4", "its attributes or constructor")  # its default of 1 is replaced
    assert rows["head size"][1] == "6"
    assert rows["layout"][1] == "[b, t, e]"
    assert found.as_json()["roles"][0] == {
        "name": "x",
        "role": "x",
        "reason": "its name",
        "kind": "argument",
    }


@pytest.mark.full
@pytest.mark.parametrize("argument", ["mask", "pad_mask"])
def test_each_mask_is_used_by_itself(argument: str) -> None:
    class Inverted(TwoMasks):
        def forward(self, x: Tensor, mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
            """mask [b, s]: True keeps. pad_mask [b, s]: True is padding."""
            masks = {"mask": mask, "pad_mask": pad_mask}
            if (given := masks[argument]) is not None:
                masks[argument] = ~given
            return super().forward(x, **masks)

    found = checker.check(Inverted, "self")
    assert found.verdict == "failed"
    assert all("polarity-swapped" in bug for bug in bugs(found) if bug), bugs(found)


# -- arguments -------------------------------------------------------------------------------------


class Labels(Base):
    def forward(self, labels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """mask [b, s]: True for a token."""
        return self.attend(labels, tokens, of_keys(mask != 0))


class Opaque(Base):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.attend(a, a, b != 0)


class Optional(Base):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.attend(a, a, b)


class RotarySelfAttention(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


class Added(Base):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """attn_mask [b, 1, t, s]: 0 where a query may attend, -inf where it may not."""
        return self.attend(x, x, bias=attn_mask)


class Switched(Base):
    """Without cross-attention, a context isn't used."""

    def __init__(self, dim: int, heads: int = 1, is_cross_attention: bool = False) -> None:
        super().__init__(dim, heads)
        self.is_cross_attention = is_cross_attention

    def forward(self, x: Tensor, context: Tensor | None = None, context_mask: Tensor | None = None) -> Tensor:
        """context_mask [b, s]: True for a token."""
        return self.attend(x, x if context is None else context, of_keys(context_mask))


BOTH = "mask: [b, 1, t, s] boolean, True keeps or [b, 1, 1, s] boolean, True keeps"


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Labels, {"labels": "x", "tokens": "context"}),
        (
            Opaque,
            {"a": "x", "b": BOTH},
        ),
        (
            Optional,
            {"a": "x", "b": BOTH},
        ),
        (RotarySelfAttention, {"x": "x"}),
        (Added, {"attn_mask": "mask: [b, 1, t, s] added to the scores, 0 or -inf"}),
        (Switched, {"x": "x", "context": "ignore", "context_mask": "ignore"}),
    ],
)
def test_roles_are_found(layer: Any, expected: dict[str, str]) -> None:
    found = checker.check(layer)
    assert found.passed, found
    assert roles(found).items() >= expected.items()


@pytest.mark.full
def test_an_additive_mask_stays_additive_whatever_the_kind() -> None:
    class Layer(Added):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
        ) -> Tensor:
            """attn_mask [b, 1, t, s]: 0 where a query may attend, -inf where it may not."""
            q, k, v = self.split(query, self.q), self.split(key, self.k), self.split(value, self.v)
            scores = q @ k.mT / q.shape[-1] ** 0.5 + (0 if attn_mask is None else attn_mask)
            out: Tensor = self.o((scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).flatten(2))
            return out

    assert checker.check(Layer, "torch-mha", layout="batch").passed


def test_a_context_can_be_switched_on() -> None:
    found = checker.check(Switched, init={"dim": 24, "is_cross_attention": True})
    assert found.like == "self"  # its context is optional; it is checked without and with it
    assert found.passed, found


class Three(Base):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.attend(a, b, c)


class Hidden(Base):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.attend(a, a, None if b is None else ~b)


@pytest.mark.full
def test_what_is_unclear_is_asked_for_and_the_answer_works() -> None:
    with pytest.raises(checker.Unclear, match=r"Three needs a, b, c.*--arg a=ROLE --arg b=ROLE --arg c=ROLE"):
        checker.check(Three)
    assert checker.check(Three, args={"a": "x", "b": "context", "c": "mask"}).passed
    found = checker.check(Hidden)
    assert found.verdict == "not judged"
    assert "--arg b=drop, otherwise --arg b=keep" in repr(found)
    assert checker.check(Hidden, args={"b": "drop"}).passed
    assert bugs(checker.check(Hidden, args={"b": "keep"})) == ["polarity-swapped"]
    assert checker.check(Hidden, args={"b": "ignore"}).passed


class TwoSequences(Base):
    """As in many perceivers: mask is of queries, context_mask of keys."""

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        keep = of_keys(context_mask)
        if mask is not None:
            rows = mask[:, None, :, None]
            keep = rows if keep is None else rows & keep
        return self.attend(x, context, keep)


@pytest.mark.full
def test_a_mask_of_queries_is_not_taken_for_one_of_keys() -> None:
    found = checker.check(TwoSequences)
    assert found.passed, found
    assert roles(found)["mask"] == "mask-of-queries"

    class Alone(TwoSequences):  # it may be a mask of keys that is applied to queries
        def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, context, mask)

    found = checker.check(Alone)
    assert found.verdict == "not judged"
    assert "--arg mask=mask-of-queries" in repr(found)
    assert checker.check(Alone, args={"mask": "mask-of-queries"}).passed


def test_a_documented_mask_that_crashes_fails() -> None:
    class Crashes(Base):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            """mask [b, s]: True keeps."""
            return self.attend(x, x, None if mask is None else mask.view(3, 999))

    found = checker.check(Crashes)
    assert [check.name for check in found.checks if check.status == "failed"] == ["argument mask"]


class Counted(nn.Module):
    """Nothing says that n is the number of heads."""

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        out: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return out


def test_an_unknown_number_of_heads_is_asked_for() -> None:
    with pytest.raises(checker.Unclear, match=r"how many heads Counted has \(perhaps n = 4\).*--heads N"):
        checker.check(Counted(24, 4))
    assert checker.check(Counted(24, 4), heads=4).passed


def test_bound_arguments() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sharp: bool = True) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5 * (2 if sharp else 1)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1).nan_to_num() @ v

    found = checker.check(functools.partial(attention, sharp=False))
    assert found.passed, found
    assert set(roles(found)) >= {"q", "k", "v", "mask"}
    assert "sharp" not in roles(found)
    found = checker.check(functools.partial(RotarySelfAttention, heads=2))
    assert found.passed, found
    assert roles(found)["heads"] == "2"


# -- positions -------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, h, t, d] with cos and sin that broadcast to it, as the halves of each head."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Rotated(Base):
    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (rotate(self.split(x, layer), cos, sin) for layer in (self.q, self.k))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        out: Tensor = self.o((scores.softmax(-1) @ self.split(x, self.v)).transpose(1, 2).flatten(2))
        return out


class Embedded(Rotated):
    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (y[:, None] for y in position_embeddings)
        return self.rotated(x, cos, sin)


class Tables(Rotated):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos and sin [t, d]."""
        assert cos.dim() == 2
        return self.rotated(x, cos, sin)


class Placed(Rotated):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        d = x.shape[-1] // self.heads
        angles = position_ids[..., None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
        angles = torch.cat((angles, angles), -1)[:, None]
        return self.rotated(x, angles.cos(), angles.sin())


@pytest.mark.every(3)
@pytest.mark.parametrize("layer", [Embedded, Tables, Placed])
def test_positions_cosines_and_sines_are_passed(layer: Any) -> None:
    found = checker.check(layer, init={"dim": 24})
    assert found.passed, found
    assert "positions" in {check.name for check in found.checks}


def test_positions_that_are_ignored_fail() -> None:
    class Ignored(Placed):
        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(x, torch.arange(x.shape[1]).expand(x.shape[0], -1))

    found = checker.check(Ignored, init={"dim": 24})
    assert found.verdict == "failed"
    assert [check.name for check in found.checks if check.status == "failed"] == ["positions"]


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"args": {"z": "mask"}}, r"Expected an argument of Optional for --arg \(a, b\), got 'z'"),
        ({"args": {"b": "masks"}}, r"Expected a role for --arg b=ROLE \(x, .*, got 'masks'"),
        ({"args": {"a": "ignore"}}, "Expected a role other than ignore for 'a', which has no default"),
        ({"heads": 0}, "Expected at least one head for --heads, got 0"),
        ({"heads": 5}, "can't be split into 5 heads|must be divisible|the number of heads"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(checker.Unclear, match=match):
        checker.check(Optional(24, 4) if "heads" in options else Optional, **options)


def test_the_number_of_heads_can_be_given() -> None:
    found = checker.check(Optional, heads=3)
    assert found.passed, found
    assert roles(found)["heads"] == "3"


def test_roles_of_the_command() -> None:
    assert parse_pairs(["a = x", "b=keep", " k=b.c"], "pairs") == {"a": "x", "b": "keep", "k": "b.c"}
    for text in ("a", "=x", "a=", ""):
        with pytest.raises(checker.Unclear, match="Expected pairs, got"):
            parse_pairs([text], "pairs")


def test_weights_are_a_table_or_a_text(tmp_path: Path) -> None:
    file, expected = tmp_path / "check.toml", {"q": "a", "k": "b"}
    for text in ('weights = "q=a, k=b"', 'weights = {q = "a", k = "b"}'):
        file.write_text(text)
        assert read_setup(file).projections == expected
    file.write_text('weights = "q"')
    with pytest.raises(checker.Unclear, match="Expected --weights"):
        checker.check(Hidden, setup=file)


SETUP = """
init = "dim=24"
heads = 2

[args]
b = "drop"
"""


@pytest.mark.full
def test_a_file_sets_the_options(tmp_path: Path) -> None:
    file = tmp_path / "check.toml"
    file.write_text(SETUP)
    found = checker.check(Hidden, setup=file)
    assert found.passed, found
    assert roles(found)["heads"] == "2"
    assert checker.check(Hidden, setup=file, args={"b": "keep"}).verdict == "failed"
    for text, match in (
        ("colour = 1", r"Expected like, init, .* in .*, got 'colour'"),
        ("heads = 'two'", "Expected heads in .* to be of type int, got 'two'"),
        ("heads =", "Expected a TOML file for the setup"),
    ):
        file.write_text(text)
        with pytest.raises(checker.Unclear, match=match):
            checker.check(Hidden, setup=file)


# -- causality with a context ----------------------------------------------------------------------


class CachedContext(Base):
    def forward(self, x: Tensor, context: Tensor, past_key_value: Any = None) -> Tensor:
        return self.attend(x, context)


class Masked(Base):
    """Attention, causal without a context if `is_causal` is set."""

    def __init__(self, dim: int, heads: int = 1, is_causal: bool = True) -> None:
        super().__init__(dim, heads)
        self.is_causal = is_causal

    def masks_future(self, context: Tensor | None) -> bool:
        return self.is_causal and context is None

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        keys = x if context is None else context
        keep = torch.ones(x.shape[1], keys.shape[1]).tril().bool()
        return self.attend(x, keys, keep if self.masks_future(context) else None)


class MaskedContext(Masked):
    def masks_future(self, context: Tensor | None) -> bool:
        return self.is_causal


class Documented(MaskedContext):
    """Attention. is_causal: mask the future in self-attention."""


def adapt(target: Any, kind: str) -> AttentionAdapter:
    """Return the adapter of a class, for use within `torch.no_grad`."""
    adapter = open_adapter(Candidate(target), Options(kind, kind == "self", {}, {}, None))
    assert isinstance(adapter, AttentionAdapter)
    return adapter


def test_a_cached_context_is_not_causal() -> None:
    with torch.no_grad():
        assert not adapt(CachedContext, "cross").always_causal


@pytest.mark.parametrize("target", [Masked, Documented])
def test_a_context_is_not_causal(target: Any) -> None:
    with torch.no_grad():
        adapter = adapt(target, "self")
        assert adapter.always_causal
        crossing = open_with_context(adapter)
    assert isinstance(crossing, AttentionAdapter)
    assert not crossing.always_causal


def test_a_causal_mask_of_a_context_without_documentation_is_not_judged() -> None:
    with torch.no_grad():
        reason = open_with_context(adapt(MaskedContext, "self"))
    assert isinstance(reason, str)
    assert reason.startswith("built with is_causal=True, it masks later keys of context too")


@pytest.mark.full
def test_a_causal_mask_of_a_context_is_named() -> None:
    assert checker.check(Masked, heads=2).passed
    report = checker.check(Documented, heads=2)
    assert [found.bug for found in report.diagnosis] == ["causal-unasked"], report
    report = checker.check(MaskedContext, heads=2)
    assert report.verdict == "not judged", report
    assert checker.check(MaskedContext, heads=2, args={"context": "ignore"}).passed  # as the report says
