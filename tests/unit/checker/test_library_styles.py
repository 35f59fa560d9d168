"""How libraries call attention: with x twice, with many options, and with tuples as outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from manyheads.checker.candidates.documentation import says_mask_replaces

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class Layer(nn.Module):
    """Attention with 4 heads."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def attend(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (
            layer(z).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, z in ((self.q_proj, x), (self.k_proj, y), (self.v_proj, y))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class XTwice(Layer):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is None or y.shape != x.shape:
            raise ValueError("pass x twice")
        return self.attend(x, y)[0]


class ManyOptions(Layer):
    def forward(self, x: Tensor, delta=None, mixture=None) -> Tensor:
        for option in (delta, mixture):
            if option is not None:
                raise ValueError("not that")
        return self.attend(x, x)[0]


class Replacing(Layer):
    """If mask is None, it is causal. mask [b, t, s], True = visible."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        triangle = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.attend(x, x, triangle if mask is None else mask[:, None])[0]


class Undocumented(Replacing):
    """Causal attention. mask [b, t, s], True = visible."""


class WithBias(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, weights = self.attend(x, x)
        return out, torch.zeros(1, *weights.shape[1:]), weights


def run(obj: Any, **options: Any) -> checker.Report:
    return checker.check(obj, "self", **options)


def test_an_argument_may_take_x_again() -> None:
    report = run(XTwice, args={"y": "x"})
    assert report.passed, report
    assert [role.role for role in report.roles if role.name in "xy"] == ["x", "x"]


def test_arguments_whose_role_nothing_says_are_asked_for() -> None:
    report = run(ManyOptions)
    assert report.verdict == "not judged", report
    assert run(ManyOptions, args={"*": "ignore"}).passed


@pytest.mark.full
def test_a_mask_that_replaces_the_causal_mask_is_a_convention_if_documented() -> None:
    report = run(Replacing)
    assert report.passed, report
    assert "mask in place of causal" in [
        check.name for check in report.checks if check.status == "convention"
    ]
    report = run(Replacing, strict="mask-in-place-of-causal")
    assert report.verdict == "failed"
    [diagnosis] = run(Undocumented).diagnosis
    assert diagnosis.bug == "mask-in-place-of-causal"


def test_sentences_about_masks_that_replace_the_causal_mask() -> None:
    for text in (
        "is_causal: sets the default mask to causal when no mask is provided.",
        "Without a mask it is causal.",
        "If mask is None, a causal mask is used.",
        "The mask replaces the causal mask.",
    ):
        assert says_mask_replaces(text)
    assert not says_mask_replaces("Causal attention. No mask is needed for padding.")
    assert not says_mask_replaces("mask: True = visible, together with the causal mask.")


def test_returned_weights_keep_their_place_in_the_output() -> None:
    report = run(WithBias)
    assert report.passed, report
