"""A decoder's layer with a cache: what it returned of keys and values comes back as `past`."""

import math

import torch
import torch.nn as nn


class CachedSelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, past=None):
        """x [b, t, e], the newest tokens → (out [b, t, e], (keys, values) so far, [b, h, s, d])."""
        b, t, e = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        s = k.shape[2]
        scores = q @ k.mT / math.sqrt(self.head_dim)
        rows = torch.arange(s - t, s, device=x.device)[:, None]
        columns = torch.arange(s, device=x.device)[None, :]
        scores = scores.masked_fill(columns > rows, -math.inf)
        attn = scores.softmax(-1)
        y = attn @ v
        y = y.permute(0, 2, 1, 3).reshape(b, t, e)
        return self.out(y), (k, v)
