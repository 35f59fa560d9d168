"""Transformers from scratch: wide self-attention."""

import torch
import torch.nn.functional as F
from torch import nn

TARGET = "SelfAttention"


class SelfAttention(nn.Module):
    def __init__(self, emb, heads=8):
        super().__init__()
        self.emb, self.heads = emb, heads

        self.tokeys = nn.Linear(emb, emb, bias=False)
        self.toqueries = nn.Linear(emb, emb, bias=False)
        self.tovalues = nn.Linear(emb, emb, bias=False)
        self.unifyheads = nn.Linear(emb, emb)

    def forward(self, x):
        b, t, e = x.size()
        h = self.heads
        s = e // h

        keys = self.tokeys(x).view(b, t, h, s).transpose(1, 2)
        queries = self.toqueries(x).view(b, t, h, s).transpose(1, 2)
        values = self.tovalues(x).view(b, t, h, s).transpose(1, 2)

        dot = torch.matmul(queries, keys.transpose(2, 3)) / s**0.5
        dot = F.softmax(dot)

        out = torch.matmul(dot, values)
        out = out.transpose(1, 2).contiguous().view(b, t, h * s)
        return self.unifyheads(out)
