"""Causal attention as a function: the queries are the last of the keys' positions."""

import torch


def causal_attention(q, k, v):
    """q [b, h, t, d], k and v [b, h, s, d] with s ≥ t → [b, h, t, d]."""
    t, s = q.size(2), k.size(2)
    scores = (q / q.size(3) ** 0.5) @ k.transpose(2, 3)
    future = torch.ones(t, s, dtype=torch.bool, device=q.device).triu(1 + s - t)
    scores = scores.masked_fill(future, float("-inf"))
    weights = torch.softmax(scores, dim=3)
    return weights @ v
