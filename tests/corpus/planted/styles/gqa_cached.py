"""Grouped queries with a cache, heads repeated with repeat_interleave."""

import torch
from torch import nn


class GroupedQueryAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = d_model // num_heads
        self.W_query = nn.Linear(d_model, num_heads * self.head_dim, bias=False)
        self.W_key = nn.Linear(d_model, num_kv_heads * self.head_dim, bias=False)
        self.W_value = nn.Linear(d_model, num_kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(num_heads * self.head_dim, d_model, bias=False)

    def forward(self, x, cache=None):
        """x [b, t, e] → (out, (keys, values)); the pair, [b, kv_heads, s, d], is the next cache."""
        b, num_tokens, _ = x.shape
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        keys = self.W_key(x).view(b, num_tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if cache is not None:
            keys = torch.cat((cache[0], keys), dim=2)
            values = torch.cat((cache[1], values), dim=2)
        cache = (keys, values)
        start = keys.shape[2] - num_tokens

        keys = keys.repeat_interleave(self.group_size, dim=1)
        values = values.repeat_interleave(self.group_size, dim=1)
        attn_scores = queries @ keys.transpose(2, 3)
        ones = torch.ones(num_tokens, keys.shape[2], dtype=torch.bool, device=x.device)
        attn_scores = attn_scores.masked_fill(torch.triu(ones, diagonal=start + 1), -torch.inf)
        attn_weights = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)
        context = (attn_weights @ values).transpose(1, 2).reshape(b, num_tokens, -1)
        return self.out_proj(context), cache
