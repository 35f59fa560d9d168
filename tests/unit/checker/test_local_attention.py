"""Local attention in chunks that see the chunks beside them, and keys that fill up the first window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads import checker
from tests.unit.checker.test_round_8 import Layer, bugs

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class LocalAttention(Layer):
    """Causal local attention: a token attends to its chunk up to itself, and to the chunk before."""

    masks_empty, before, after = True, 1, 0

    def __init__(self, dim: int = 24, num_heads: int = 4, chunk_size: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.chunk_size = chunk_size

    def look_around(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, self.before, self.after))
        n = x.shape[-3]
        return torch.cat([padded[..., i : i + n, :, :] for i in range(1 + self.before + self.after)], -2)

    def forward(self, x: Tensor) -> Tensor:
        t, size = x.shape[1], self.chunk_size
        fill = -t % size
        q, k, v = (F.pad(y, (0, 0, 0, fill)).unflatten(-2, (-1, size)) for y in self.heads(x))
        k, v = self.look_around(k), self.look_around(v)
        i = torch.arange(t + fill).view(-1, size)[:, :, None]
        j = i[:, :1] - self.before * size + torch.arange(k.shape[-2])
        is_hidden = j > i if not self.after else j != j
        if self.masks_empty:
            is_hidden = is_hidden | (j < 0) | (j >= t)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(is_hidden, -torch.inf)
        out = (scores.softmax(-1) @ v).flatten(2, 3)[:, :, :t]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BothNeighbors(LocalAttention):
    """Local attention: a token attends to its chunk and to both neighboring chunks."""

    after = 1


class EmptyKeys(LocalAttention):
    """The zeros before the first chunk aren't masked."""

    masks_empty = False


class SlidingEmptyKeys(Layer):
    """Causal attention whose window of 4 keys is cut from padded keys, which aren't masked."""

    def __init__(self, dim: int = 24, num_heads: int = 4, window_size: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.window_size = window_size

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (F.pad(y, (0, 0, self.window_size - 1, 0)).unfold(2, self.window_size, 1) for y in (k, v))
        weights = (torch.einsum("bhtd,bhtdw->bhtw", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        out = torch.einsum("bhtw,bhtdw->bhtd", weights, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "part"), [(LocalAttention, "see the chunk before too"), (BothNeighbors, "see both neighboring")]
)
def test_chunks_that_see_others_are_recognized(kind: type[Layer], part: str) -> None:
    report = checker.check(kind)
    assert report.passed, report
    assert any(part in note for note in report.notes)


@pytest.mark.parametrize("kind", [EmptyKeys, SlidingEmptyKeys])
def test_empty_keys_of_a_window_are_named(kind: type[Layer]) -> None:
    report = checker.check(kind)
    assert (report.verdict, bugs(report)) == ("failed", ["window-empty-keys"])
