"""Lesson 4, exercise 1: rotary embeddings (Su et al. 2021, arXiv:2104.09864).

Each pair of entries (2n, 2n + 1) of a query or key is rotated by the angle position · 10000^(−2n/d).
Task: write `turn`, which rotates a pair. Then run

    manyheads check exercises/rotary.py:rotate --like rotary
"""

import torch


def rotate(x, positions):
    """Rotate x `[b, h, t, d]` by its positions `[t]`; entries 2n and 2n + 1 are a pair."""
    d = x.shape[-1]
    column = torch.arange(0, d, 2, dtype=torch.float64)  # [d/2]: 2n
    angle = positions[:, None] / 10000 ** (column / d)  # [t, d/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]  # [b, h, t, d/2]
    turned = turn(even, odd, cos, sin)
    return torch.stack(turned, -1).flatten(-2)  # [b, h, t, d]


def turn(even, odd, cos, sin):
    """Return (even, odd) rotated by the angle with this cosine and sine: two tensors `[b, h, t, d/2]`."""
    raise NotImplementedError("Write turn: rotate (even, odd) by the angle.")
