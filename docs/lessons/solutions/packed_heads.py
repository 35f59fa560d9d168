"""Lesson 3, exercise 2: all heads in one projection, split and merged without a loop."""

import torch.nn.functional as F
from torch import nn


class PackedHeads(nn.Module):
    """Multi-head self-attention over `[b, t, e]`, with one packed layer each for q, k and v."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        """x `[b, t, e]` → `[b, t, e]`."""
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        out = F.scaled_dot_product_attention(q, k, v)  # [b, h, t, d]
        return self.out_proj(self.merge(out))  # [b, t, e]

    def split(self, x):
        """`[b, t, e]` → `[b, h, t, d]`: head n gets columns n·d … n·d + d − 1 of each token."""
        b, t, e = x.shape
        return x.view(b, t, self.num_heads, e // self.num_heads).transpose(1, 2)

    def merge(self, out):
        """`[b, h, t, d]` → `[b, t, e]`: concatenate the heads of each token."""
        return out.transpose(1, 2).flatten(2)
