"""Attention to a context that is an image, such as the feature map of a convolutional network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker
from tests.unit.checker.test_round_8 import bugs

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class ToImage(nn.Module):
    """Attention of queries to the cells of a feature map, as in DETR's mask head.

    mask [b, H, W]: True for cells that are padding
    """

    def __init__(self, dim: int = 24, context_dim: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.v_proj = nn.Conv2d(context_dim, dim, 1), nn.Conv2d(context_dim, dim, 1)

    def normalize(self, scores: Tensor) -> Tensor:
        return scores.flatten(3).softmax(-1).view(scores.shape)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1))
        k, v = (proj(context).unflatten(1, (self.num_heads, -1)) for proj in (self.k_proj, self.v_proj))
        scores = torch.einsum("bqnc,bnchw->bqnhw", q * q.shape[-1] ** -0.5, k)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None], -torch.inf)
        weights = self.normalize(scores)
        return self.out_proj(torch.einsum("bqnhw,bnchw->bqnc", weights, v).flatten(2)), weights


class ChannelsLast(nn.Module):
    """Attention of queries to the cells of a feature map [b, h, w, e]."""

    def __init__(self, dim: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, pos: Tensor | None = None) -> Tensor:
        b, _, _, _ = context.shape
        place = context if pos is None else context + pos
        inputs = (self.q_proj(x), self.k_proj(place), self.v_proj(context))
        q, k, v = (y.reshape(b, -1, self.num_heads, y.shape[-1] // 4).transpose(1, 2) for y in inputs)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class OverHeads(ToImage):
    """The softmax is over heads and cells together."""

    def normalize(self, scores: Tensor) -> Tensor:
        return scores.flatten(2).softmax(-1).view(scores.shape)


@pytest.mark.parametrize(("kind", "layout"), [(ToImage, "[b, e, h, w]"), (ChannelsLast, "[b, h, w, e]")])
def test_a_context_may_be_an_image(kind: type[nn.Module], layout: str) -> None:
    report = checker.check(kind)
    assert report.passed, report
    assert [role.role for role in report.roles if role.name == "layout of the context"] == [layout]


def test_a_bug_beside_an_image_is_named() -> None:
    report = checker.check(OverHeads)
    assert (report.verdict, bugs(report)) == ("failed", ["softmax-over-heads-and-keys"])
