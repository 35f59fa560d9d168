"""Raw weights for each head, and einsum all the way."""

import torch
from torch import nn


class EinsumAttention(nn.Module):
    """x [b, t, e] → (out [b, t, e], weights [b, h, t, t]).

    mask: boolean [b, s] or [b, t, s], True where a query may attend.
    """

    def __init__(self, e: int, h: int, d: int):
        super().__init__()
        self.W_q = nn.Parameter(torch.randn(h, e, d) * e**-0.5)
        self.W_k = nn.Parameter(torch.randn(h, e, d) * e**-0.5)
        self.W_v = nn.Parameter(torch.randn(h, e, d) * e**-0.5)
        self.W_o = nn.Parameter(torch.randn(h, d, e) * (h * d) ** -0.5)

    def forward(self, x, mask=None, causal=False):
        q = torch.einsum("bte,hed->bhtd", x, self.W_q)
        k = torch.einsum("bse,hed->bhsd", x, self.W_k)
        v = torch.einsum("bse,hed->bhsd", x, self.W_v)
        d = q.shape[-1]
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / d**0.5

        t, s = scores.shape[-2:]
        allowed = torch.ones(1, 1, t, s, dtype=torch.bool, device=x.device)
        if causal:
            allowed = allowed.tril()
        if mask is not None:
            mask = mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
            allowed = allowed & mask

        scores = scores.masked_fill(~allowed, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        weights = torch.where(allowed, weights, torch.zeros_like(weights))
        heads = torch.einsum("bhts,bhsd->bhtd", weights, v)
        out = torch.einsum("bhtd,hde->bte", heads, self.W_o)
        return out, weights
