"""Normalized queries and keys, rotary positions, grouped heads, and a cache object that counts its tokens."""

import torch
from torch import nn
from torch.nn import functional as F


class Cache:
    """Keys and values [b, heads, s, d] of the tokens so far."""

    def __init__(self):
        self.keys = self.values = None
        self.seen = 0

    def append(self, keys, values):
        self.seen += keys.shape[2]
        if self.keys is not None:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x, start):
        positions = torch.arange(start, start + x.shape[2], device=x.device)
        angles = positions[:, None] * self.frequencies.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, dim=64, n_heads=4, n_kv_heads=2, eps=1e-6):
        super().__init__()
        self.head_dim = dim // n_heads
        self.q_proj = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=eps)
        self.rotary = Rotary(self.head_dim)

    def split(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, cache: Cache | None = None):
        start = cache.seen if cache is not None else 0
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        k = self.rotary(k, start)
        q = self.rotary(q, start)
        if cache is not None:
            k, v = cache.append(k, v)
        t, s = q.shape[2], k.shape[2]
        visible = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))
