"""Rotary positions from tables of sines and cosines, halves in pairs; one tensor at a time."""

import torch
from torch import nn


class RotaryPositionalEmbeddings(nn.Module):
    def __init__(self, d: int, max_len: int = 512):
        super().__init__()
        self.d = d
        theta = 1.0 / (10_000 ** (torch.arange(0, d, 2).float() / d))
        idx = torch.einsum("n,d->nd", torch.arange(max_len).float(), theta)
        self.register_buffer("cos", idx.cos(), persistent=False)
        self.register_buffer("sin", idx.sin(), persistent=False)

    def forward(self, x):
        """x [b, h, t, d]"""
        t = x.shape[2]
        cos, sin = self.cos[:t], self.sin[:t]
        half = self.d // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
