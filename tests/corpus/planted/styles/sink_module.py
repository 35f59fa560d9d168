"""A layer with grouped queries whose heads have learned sinks; causal."""

import math

import torch
from torch import nn


class SinkAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size)
        self.sinks = nn.Parameter(torch.zeros(num_heads))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, return_weights: bool = False):
        """x [b, t, e] → out, or (out, weights [b, h, t, t]), whose rows sum to less than one."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.num_kv_heads, self.head_dim).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)

        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        future = torch.triu(torch.ones(t, t, device=x.device), diagonal=1).bool()
        masked = scores.masked_fill(future, -float("inf"))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        combined = torch.cat([masked, sinks], dim=-1)
        weights = torch.softmax(combined, dim=-1)[..., :-1]
        dropped = self.dropout(weights)

        out = torch.matmul(dropped, v).transpose(1, 2).reshape(b, t, -1)
        out = self.o_proj(out)
        if return_weights:
            return out, weights
        return out
