"""Attention in plain steps, as on the blackboard."""

import torch

TARGET = "attention"


def attention(q, k, v, mask=None):
    """q [b, h, t, d], k [b, h, s, d], v [b, h, s, d]; mask: bool, True = may look."""
    d = q.shape[-1]
    # step 1: similarities
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / d**0.5
    # step 2: make them positive
    weights = torch.exp(scores)
    if mask is not None:
        weights = weights * mask
    # step 3: normalise every row
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / (total + (total == 0))
    # step 4: mix
    return torch.einsum("bhts,bhsd->bhtd", weights, v)
