"""Lesson 1, exercise 3: masked keys get no weight, and a query without visible keys gets zeros."""

import math

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q kᵀ / √d) v over the visible keys.

    q `[b, h, t, d]`, k and v `[b, h, s, d]`; mask `[t, s]` is boolean, True = may attend. A query without
    visible keys gets zeros.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [b, h, t, s]
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1)  # [b, h, t, s]; NaN if a row has only −inf
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return weights @ v  # [b, h, t, d]
