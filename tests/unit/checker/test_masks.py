"""A report passes only if every mask argument was judged: it was used and changes the output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads import checker, layers

pytestmark = pytest.mark.usefixtures("one_thread", "quick")


class Layer(nn.Module):
    """Self-attention; `attend` takes boolean masks, True = visible, and each class below its own masks."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def attend(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [b, h, t, d]
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5  # [b, h, t, s]
        for visible in masks:
            if visible is not None:
                scores = scores.masked_fill(~visible, -math.inf)
        weights = scores.softmax(-1).masked_fill(scores == -math.inf, 0.0)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def of_keys(mask: Tensor | None) -> Tensor | None:
    """`[b, s]` as `[b, 1, 1, s]`."""
    return None if mask is None else mask[:, None, None]


def hidden(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else ~mask


# -- judged ----------------------------------------------------------------------------------------


class TwoMasks(Layer):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        """attn_mask [t, s]: True keeps. pad_mask [b, s]: True is padding."""
        return self.attend(x, attn_mask, hidden(of_keys(pad_mask)))


class Additive(Layer):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """attention_mask [b, 1, 1, s] is additive: 0 for tokens, -inf for padding."""
        return self.attend(x, None if attention_mask is None else attention_mask == 0)


class InEvaluation(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [b, 1, t, s]: True keeps."""
        return self.attend(x, None if self.training else mask)


class Numbers(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, None if mask is None else 1.0 - mask == 0)  # raises for booleans


class Switch(Layer):
    def forward(self, x: Tensor, mask: bool = False) -> Tensor:
        t = x.shape[1]
        return self.attend(x, torch.ones(t, t, dtype=torch.bool).tril() if mask else None)


class Lengths(Layer):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.attend(
            x, None if lengths is None else of_keys(torch.arange(x.shape[1]) < lengths[:, None])
        )


class Beside(Layer):
    """Both masks are of keys, and each is used by itself."""

    def forward(self, x: Tensor, mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        """mask [b, s]: True keeps. pad_mask [b, s]: True is padding."""
        return self.attend(x, of_keys(mask), hidden(of_keys(pad_mask)))


class Third(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None, segment_mask: Tensor | None = None) -> Tensor:
        """mask [b, 1, t, s]: True keeps."""
        return self.attend(x, mask, segment_mask)


class Documented(Layer):
    def forward(self, x: Tensor, blocked: Tensor | None = None) -> Tensor:
        """blocked [b, 1, t, s]: True where a query must not attend: a boolean mask."""
        return self.attend(x, hidden(blocked))


class Required(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attend(x, mask != 0)


@pytest.mark.full
@pytest.mark.parametrize(
    "layer",
    [
        *(TwoMasks, Additive, InEvaluation, Numbers, Switch, Lengths, Beside, Third, Documented, Required),
        *(layers.SelfAttention, Layer),
    ],
)
def test_a_working_mask_passes(layer: Any) -> None:
    if layer is Layer:  # without a mask, as in a vision transformer
        layer = type("Vision", (Layer,), {"forward": lambda self, x: self.attend(x)})
    checker.assert_attention(layer, "self")


@pytest.mark.full
def test_a_mask_of_this_library_is_compared() -> None:
    class Ignored(layers.SelfAttention):
        def forward(self, x: Tensor, *, mask: mh.Mask | None = None) -> Tensor:
            return super().forward(x)

    found = checker.check(Ignored, "self")
    assert found.verdict == "failed"
    assert "mask-ignored" in {diagnosis.bug for diagnosis in found.diagnosis}
    assert "mask: manyheads.Keep of [b, 1, t, s]" in [role.role for role in found.roles]


# -- not judged ------------------------------------------------------------------------------------


class OfHeads(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None, head_mask: Tensor | None = None) -> Tensor:
        """mask [b, 1, t, s]: True keeps."""
        return self.attend(x, mask)


class Undocumented(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, hidden(mask))


class Raises(Layer):
    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        if src_key_padding_mask is not None:
            raise ValueError("give a nested tensor")
        return self.attend(x)


class Inverts(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask is added to the scores."""
        return self.attend(x, hidden(mask))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("layer", "argument", "why"),
    [
        (OfHeads, "head_mask", "no trial call shows that it scales the weights of heads."),
        (Undocumented, "mask", "nothing says whether True keeps or masks a key, and here True masks one."),
        (Raises, "src_key_padding_mask", "every call with it raised an error: calling Raises raised Value"),
        (Inverts, "mask", "every call with it raised an error: calling Inverts raised TypeError: ~ "),
    ],
)
def test_a_mask_that_is_not_used_is_not_judged(layer: Any, argument: str, why: str) -> None:
    found = checker.check(layer, "self")
    (check,) = [check for check in found.checks if check.status in ("not judged", "failed")]
    assert (check.name, check.status) == (f"argument {argument}", "not judged")
    assert check.reason.startswith(why)
    assert found.verdict == found.as_json()["verdict"] == "not judged"
    assert not found.passed
    assert not found.diagnosis
    said = " ".join(repr(found).split())
    assert "not judged: " in said
    assert f"Not judged: argument {argument}: {why}" in said
    suite = ElementTree.fromstring(found.as_junit())
    (error,) = suite.findall("testcase/error")
    assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
    assert error.get("message") == f"not judged: {check.reason}"
    with pytest.raises(AssertionError, match=f"not judged: {layer.__name__} as self"):
        checker.assert_attention(layer, "self")


@pytest.mark.full
def test_a_failure_outweighs_a_mask_that_was_not_judged() -> None:
    class Wrong(OfHeads):
        def attend(self, x: Tensor, *masks: Tensor | None) -> Tensor:
            return 2 * super().attend(x, *masks)

    found = checker.check(Wrong, "self")
    assert found.verdict == "failed"
    assert "not judged" in {check.status for check in found.checks}


def test_a_mask_that_is_ignored_fails_and_is_judged() -> None:
    class Ignored(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.attend(x)

    found = checker.check(Ignored, "self")
    assert found.verdict == "failed"
    assert "not judged" not in {check.status for check in found.checks}


SOURCE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x, mask=None):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        if mask is not None:
            {mask}
        return scores.softmax(-1).nan_to_num() @ self.v(x)
"""


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("mask", "code", "verdict"),
    [
        ("scores = scores.masked_fill(~mask, -torch.inf)", 0, "passed"),
        ("pass", 1, "failed"),
        ("raise RuntimeError('masks come later')", 2, "not judged"),
    ],
)
def test_the_command_ends_with_the_verdict(mask: str, code: int, verdict: str, run_command: Any) -> None:
    Path("mine.py").write_text(SOURCE.format(mask=mask))
    done = run_command("check", "mine.py:Attention", "--json", "r.json", "--junit", "r.xml")
    assert done.code == code, done
    assert f"{verdict}: " in done.out
    assert json.loads(Path("r.json").read_text())["verdict"] == verdict
    suite = ElementTree.parse("r.xml").getroot()
    assert suite.get("errors") == str(int(verdict == "not judged"))
    if verdict == "not judged":
        assert "masks come later" in " ".join(done.out.split())
