"""Scaled dot-product attention on tensors that are already split into heads."""

import torch

TARGET = "dot_product_attention"


def dot_product_attention(q, k, v, mask=None, scale=None):
    """q: [..., T, d], k: [..., S, d], v: [..., S, e]; mask: float, added to the scores, -inf to hide."""
    if scale is None:
        scale = 1.0 / q.shape[-1] ** 0.5
    logits = (q * scale) @ k.mT
    if mask is None:
        return logits.softmax(-1) @ v
    logits = logits + mask
    nothing = torch.isneginf(mask).all(-1, keepdim=True)
    p = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return p @ v
