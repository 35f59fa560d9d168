"""A line-by-line tutorial's layer: four linear layers in a list, attention a function of its own."""

import copy
import math

import torch
from torch import nn


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


def attention(query, key, value, mask=None, dropout=None):
    """A mask of [b, 1, 1, s] or [b, 1, t, s]; 0 hides."""
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    p_attn = scores.softmax(dim=-1)
    if mask is not None:
        p_attn = p_attn.masked_fill(mask == 0, 0.0)  # a query that sees nothing takes nothing
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        self.h = h
        self.d_k = d_model // h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        inputs = (query, key, value)
        projected = [self.linears[i](x) for i, x in enumerate(inputs)]
        split = [x.view(nbatches, -1, self.h, self.d_k).transpose(1, 2) for x in projected]
        query, key, value = split
        x, self.attn = attention(query, key, value, mask, self.dropout)
        x = x.transpose(1, 2).reshape(nbatches, -1, self.h * self.d_k)
        return self.linears[3](x)
