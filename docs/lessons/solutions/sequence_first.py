"""Lesson 2, exercise 1: multi-head attention, sequence first, `[t, b, e]`."""

import math

import torch
from torch import nn


class MultiheadAttention(nn.Module):
    """Like `torch.nn.MultiheadAttention`, without masks: `[t, b, e]` → `[t, b, e]`.

    It also returns the weights `[b, t, s]`, averaged over the heads.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """`[t, b, e]` → `[b, h, t, d]`."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, h, t, d]` → `[t, b, e]`."""
        return x.permute(2, 0, 1, 3).flatten(2)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        weights = (q @ k.mT / math.sqrt(self.head_dim)).softmax(dim=-1)  # [b, h, t, s]
        return self.out_proj(self.merge(weights @ v)), weights.mean(dim=1)  # [t, b, e], [b, t, s]
