"""Multi-head attention with the interface of labml's: sequence first, and keywords only."""

import torch
from torch import nn


class PrepareForMultiHeadAttention(nn.Module):
    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool):
        super().__init__()
        self.linear, self.heads, self.d_k = nn.Linear(d_model, heads * d_k, bias=bias), heads, d_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unflatten(-1, (self.heads, self.d_k))


class MultiHeadAttention(nn.Module):
    """Attention.

    `mask` has shape [seq_len_q, seq_len_k, batch_size]; mask[i, j, b] says whether query i attends to key j.
    """

    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias)
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, True)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)
        self.attn = None

    def forward(self, *, query, key, value, mask=None):
        """Take query, key and value [seq_len, batch_size, d_model]."""
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->bhij", q, k) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask.permute(2, 0, 1)[:, None] == 0, float("-inf"))
        weights = self.dropout(scores.softmax(-1))
        self.attn = weights.detach()
        return self.output(torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(-2))
