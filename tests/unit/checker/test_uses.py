"""Uses that a module offers only as it was built, in some calls, or after a method was called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
