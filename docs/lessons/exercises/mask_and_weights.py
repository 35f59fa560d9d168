"""Lesson 2, exercise 2: masks (True = masked), and per-head or averaged weights.

Task: two lines don't do what the docstring of `forward` says. Find both. Run

    manyheads check exercises/mask_and_weights.py:MultiheadAttention --like torch-mha

and read the report. The exit code is 0 when all checks pass.
"""

import math

import torch
from torch import nn


class MultiheadAttention(nn.Module):
    """Like `torch.nn.MultiheadAttention`: sequence first, and True in a boolean mask means masked."""

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

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output `[t, b, e]`, and the weights if `need_weights`.

        The weights are `[b, h, t, s]`, or their average `[b, t, s]` over the heads if
        `average_attn_weights`.

        attn_mask `[t, s]` is boolean (True = masked) or floating point (added to the scores). A query
        without visible keys gets zeros.
        """
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        scores = q @ k.mT / math.sqrt(self.head_dim)  # [b, h, t, s]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -math.inf)
            else:
                scores = scores + attn_mask
        weights = scores.softmax(dim=-1)  # [b, h, t, s]
        weights = weights.masked_fill(scores == -math.inf, 0.0)  # instead of NaN, without visible keys
        out = self.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))  # [t, b, e]
        if not need_weights:
            return out, None
        return out, weights.mean(dim=1)
