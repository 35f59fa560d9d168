"""Lesson 4, exercise 1: rotary embeddings (Su et al. 2021, arXiv:2104.09864)."""

import torch


def rotate(x, positions):
    """Rotate x `[b, h, t, d]` by its positions `[t]`; entries 2n and 2n + 1 are a pair."""
    d = x.shape[-1]
    column = torch.arange(0, d, 2, dtype=torch.float64)  # [d/2]: 2n
    angle = positions[:, None] / 10000 ** (column / d)  # [t, d/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]  # [b, h, t, d/2]
    turned = even * cos - odd * sin, odd * cos + even * sin  # rotation by the angle
    return torch.stack(turned, -1).flatten(-2)  # [b, h, t, d]
