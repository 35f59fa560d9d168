"""The sinusoidal encoding made anew at each call, for any length, and added to x."""

import torch
from torch import nn


class SinusoidalPositions(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        angles = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.empty(len(t), self.dim, dtype=angles.dtype, device=x.device)
        emb[:, 0::2], emb[:, 1::2] = angles.sin(), angles.cos()
        return x + emb[None].to(x.dtype)
