"""A learned sink for each head joins the softmax, and takes its share of the weight away."""

import math

import torch


def attention(q, k, v, sinks, mask=None):
    """q [b, h, t, d]; k, v [b, h, s, d]; sinks [h]; mask boolean, True keeps, broadcast to [b, h, t, s]."""
    b, h, t, d = q.shape
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (1 / math.sqrt(d))
    if mask is not None:
        scores = scores.masked_fill(~mask, -float("inf"))
    sink = sinks.view(1, h, 1, 1).expand(b, h, t, 1)
    logits = torch.cat([scores, sink], dim=-1)
    probs = torch.softmax(logits, dim=-1)
    weights = probs[..., :-1]
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)
