"""Lesson 4, exercise 2: attention whose scores can be overridden, with one wrong line.

Task: all shapes are right (sequence first; scores are [seq_q, seq_k, batch, heads]), but the output is
wrong. Run the checker, fix the bug that it names, and check again:

    manyheads check exercises/overridden.py:MultiHeadAttention --like classic.annotated.MultiHeadAttention
"""

import math

import torch
from torch import nn

from manyheads.classic.annotated import PrepareForMultiHeadAttention


class MultiHeadAttention(nn.Module):
    """Multi-head attention over `[seq, batch, d_model]`, with scores that a subclass may override."""

    def __init__(self, heads, d_model):
        super().__init__()
        d_k = d_model // heads
        self.query = PrepareForMultiHeadAttention(d_model, heads, d_k, bias=True)
        self.key = PrepareForMultiHeadAttention(d_model, heads, d_k, bias=True)
        self.value = PrepareForMultiHeadAttention(d_model, heads, d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)

    def get_scores(self, query, key):
        """q · k, unscaled: `[seq_q, seq_k, batch, heads]`."""
        return torch.einsum("ibhd,jbhd->ijbh", query, key)

    def forward(self, *, query, key, value, mask=None):
        """query `[seq_q, batch, d_model]`, key and value `[seq_k, batch, d_model]` → shape of query.

        `mask[i, j, b]` is True if query i of batch entry b may attend to key j.
        """
        query = self.query(query)  # [seq_q, batch, heads, d_k]
        key = self.key(key)  # [seq_k, batch, heads, d_k]
        value = self.value(value)  # [seq_k, batch, heads, d_k]
        scores = self.get_scores(query, key) / math.sqrt(query.shape[-1])  # [seq_q, seq_k, batch, heads]
        if mask is not None:
            masked = mask[..., None] == 0  # [seq_q, seq_k, batch, 1]
            scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=0)
        if mask is not None:
            weights = weights.masked_fill(masked, 0.0)  # zeros for queries without visible keys
        out = torch.einsum("ijbh,jbhd->ibhd", weights, value)  # [seq_q, batch, heads, d_k]
        return self.output(out.flatten(2))  # [seq_q, batch, d_model]
