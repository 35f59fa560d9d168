"""Attention layer that remembers its last map for the notebook's plots."""

import torch
from torch import nn

TARGET = "PlottableAttention"


class PlottableAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.attn_map = None

    def forward(self, x):
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        attn = torch.softmax(q @ k.transpose(-2, -1) / self.head_dim**0.5, dim=-1)
        self.attn_map = attn = attn.detach()
        out = (attn @ v).transpose(1, 2).flatten(2)
        return self.out_proj(out)
