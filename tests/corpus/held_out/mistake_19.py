"""Attention with a fast path, and a slow one that returns the weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

TARGET = "FastAttention"


class FastAttention(nn.Module):
    """Drop-in for nn.MultiheadAttention(batch_first=True).

    key_padding_mask: [batch, source], True for padding, as in PyTorch.
    """

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            self._heads(self.q_proj(query)),
            self._heads(self.k_proj(key)),
            self._heads(self.v_proj(value)),
        )
        if need_weights:
            weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
            out = weights @ v
        else:
            weights = None
            if key_padding_mask is None:
                out = F.scaled_dot_product_attention(q, k, v)
            else:
                keep = ~key_padding_mask[:, None, None, :]
                empty = ~keep.any(-1, keepdim=True)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep | empty)
                out = out.masked_fill(empty, 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights
