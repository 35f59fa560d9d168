"""Multi-query attention for a decoder: many query heads, one head of keys and values."""

import math

import torch
import torch.nn as nn

TARGET = "MultiQueryAttention"


class MultiQueryAttention(nn.Module):
    def __init__(self, d_model, n_heads, max_len=512):
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, self.d_head, bias=False)
        self.v_proj = nn.Linear(d_model, self.d_head, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        causal = torch.full((max_len, max_len), float("-inf")).triu(1)
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        q = self.q_proj(x).view(B, T, self.n_heads, self.d_head)
        k = self.k_proj(x)  # (B, T, d_head), shared by all heads
        v = self.v_proj(x)

        scores = torch.einsum("bthd,bsd->bhts", q, k) / math.sqrt(self.d_head)
        scores = scores + self.causal[:T, :T].to(scores.dtype)
        attn = torch.softmax(scores, dim=-1)
        y = torch.einsum("bhts,bsd->bthd", attn, v)
        return self.o_proj(y.reshape(B, T, C))
