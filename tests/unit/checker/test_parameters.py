"""Parameters get their roles: packed ones are split, in any number of dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


class Stacked(nn.Module):
    """q, k and v are stacked in one parameter, `[3, in, out]`."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Parameter(torch.randn(3, embed_dim, embed_dim))
        self.qkv_bias = nn.Parameter(torch.randn(3, embed_dim))

    def project(self, x: Tensor) -> Tensor:
        """Return q, k and v, `[3, b, h, t, d]`."""
        qkv = x @ self.qkv[:, None] + self.qkv_bias[:, None, None]
        return qkv.unflatten(-1, (self.num_heads, -1)).transpose(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(*self.project(x))
        return attended.transpose(1, 2).flatten(2)


class StackedByHead(Stacked):
    """Each head has q, k and v side by side, `[h, in, 3 · d]`."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.qkv = nn.Parameter(torch.randn(num_heads, embed_dim, 3 * embed_dim // num_heads))
        del self.qkv_bias

    def project(self, x: Tensor) -> Tensor:
        return torch.stack((x[:, None] @ self.qkv).chunk(3, -1))


class StackedSwapped(Stacked):
    """Its keys are used as queries."""

    def project(self, x: Tensor) -> Tensor:
        return super().project(x)[[1, 0, 2]]


@pytest.mark.parametrize("target", [Stacked, StackedByHead])
def test_a_parameter_of_three_dimensions_is_split(target: type[nn.Module]) -> None:
    found = checker.check(target, "self")
    assert found.passed, found


def test_swapped_projections_of_a_stacked_parameter_are_named() -> None:
    assert "q-k-swapped" in {each.bug for each in checker.check(StackedSwapped, "self").diagnosis}


class Mixed(nn.Module):
    """Attention. mask [b, t, t] is added to the scores: 0, or a big negative number where masked."""

    is_transposed = True

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_layer = nn.Linear(d_model, 3 * d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv_layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, -1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        values = (scores if mask is None else scores + mask[:, None]).softmax(-1) @ v
        return self.linear_layer((values.transpose(1, 2) if self.is_transposed else values).reshape(x.shape))


class MixedWithoutTranspose(Mixed):
    """Attention. mask [b, t, t] is added to the scores: 0, or a big negative number where masked."""

    is_transposed = False


def test_the_only_layer_left_is_the_output_projection() -> None:
    report = checker.check(Mixed, "self")
    assert report.passed, report
    report = checker.check(MixedWithoutTranspose, "self")
    assert [diagnosis.bug for diagnosis in report.diagnosis] == ["merge-without-transpose"]
