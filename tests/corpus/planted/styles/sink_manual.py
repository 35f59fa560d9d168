"""Sinks in the normaliser, written out; causal, and the queries are the last of the keys' positions."""

import torch


def sink_attention(q, k, v, sinks):
    """q [b, h, t, d]; k, v [b, h, s, d]; sinks [h] → [b, h, t, d]."""
    t, s, d = q.shape[-2], k.shape[-2], q.shape[-1]
    scores = torch.einsum("bhtd,bhsd->bhts", q, k).div(d**0.5)
    seen = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    scores = scores.masked_fill(~seen, float("-inf"))
    sinks = sinks[None, :, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True) + (sinks - top).exp()
    return torch.einsum("bhts,bhsd->bhtd", powers / total, v)
