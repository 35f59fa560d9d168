"""A function that returns its weights when it is asked for them."""

import torch


def attention(q, k, v, mask=None, return_weights=False):
    """q [b, h, t, d]; k, v [b, h, s, d]; mask boolean, True keeps, broadcast to [b, h, t, s]."""
    raw = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is None:
        mask = torch.ones_like(raw, dtype=torch.bool)
    logits = raw.masked_fill(~mask, float("-inf"))
    top = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(raw.dtype).min)
    powers = torch.exp(logits - top)
    total = powers.sum(dim=-1, keepdim=True)
    weights = powers / total.clamp(min=torch.finfo(raw.dtype).tiny)
    out = weights @ v
    if return_weights:
        return out, weights
    return out
