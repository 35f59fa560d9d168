"""Sequence first throughout: the heads stay beside the width, and the softmax runs over dim 1."""

import math

import torch
from torch import nn


class SplitHeads(nn.Module):
    def __init__(self, d_model, heads, d_k, bias):
        super().__init__()
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)
        self.heads = heads
        self.d_k = d_k

    def forward(self, x):
        return self.linear(x).view(*x.shape[:-1], self.heads, self.d_k)


class MultiHeadAttention(nn.Module):
    """query [t, b, e], key and value [s, b, e] → [t, b, e]; mask [t, s, b], True or 1 keeps."""

    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True):
        super().__init__()
        self.d_k = d_model // heads
        self.heads = heads
        self.query = SplitHeads(d_model, heads, self.d_k, bias=bias)
        self.key = SplitHeads(d_model, heads, self.d_k, bias=bias)
        self.value = SplitHeads(d_model, heads, self.d_k, bias=True)
        self.softmax = nn.Softmax(dim=1)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)
        self.scale = 1 / math.sqrt(self.d_k)

    def get_scores(self, query, key):
        return torch.einsum("ibhd,jbhd->ijbh", query, key)

    def forward(self, *, query, key, value, mask=None):
        seq_len, batch_size, _ = query.shape
        query = self.query(query)
        key = self.key(key)
        value = self.value(value)

        scores = self.get_scores(query, key) * self.scale
        if mask is not None:
            mask = mask.unsqueeze(-1)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        attn = self.softmax(scores)
        if mask is not None:
            attn = attn.masked_fill(mask == 0, 0.0)
        attn = self.dropout(attn)

        x = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        x = x.reshape(seq_len, batch_size, -1)
        return self.output(x)
