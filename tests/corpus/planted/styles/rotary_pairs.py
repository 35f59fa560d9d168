"""Rotary positions on neighbours, by a signed copy of each pair turned about."""

import torch


def rotate_every_two(x):
    x = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1)
    return x.flatten(-2)


def rotary_embed(q, k, positions):
    """q and k [b, h, t, d], positions [t] → both turned."""
    dim = q.shape[-1]
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    sinusoid = positions[:, None] * inv_freq[None, :]
    sin = sinusoid.sin().repeat_interleave(2, dim=-1).to(q.dtype)
    cos = sinusoid.cos().repeat_interleave(2, dim=-1).to(q.dtype)
    q = q * cos + rotate_every_two(q) * sin
    k = k * cos + rotate_every_two(k) * sin
    return q, k
