"""Grouped queries without repeating a key: the queries take one more axis."""

import torch


def grouped_attention(q, k, v):
    """q [b, h, t, d], k and v [b, g, s, d], h a multiple of g, causal → [b, h, t, d].

    The queries are the last of the keys' positions.
    """
    b, h, t, d = q.shape
    g, s = k.shape[1:3]
    q = q.reshape(b, g, h // g, t, d)
    scores = torch.einsum("bgrtd,bgsd->bgrts", q, k) * d**-0.5
    i = torch.arange(t, device=q.device) + (s - t)
    j = torch.arange(s, device=q.device)
    scores = scores.where(j[None, :] <= i[:, None], float("-inf"))
    weights = scores.softmax(dim=-1)
    out = torch.einsum("bgrts,bgsd->bgrtd", weights, v)
    return out.reshape(b, h, t, d)
