"""Causal self-attention with the interface of minGPT: a triangle as a buffer, any class of configuration."""

import math

import torch
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        triangle = torch.ones(config.block_size, config.block_size).tril()
        self.register_buffer("bias", triangle[None, None])

    def forward(self, x):
        batch, tokens, width = x.shape
        split = (batch, tokens, 3, self.n_head, width // self.n_head)
        q, k, v = self.c_attn(x).view(split).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(self.bias[..., :tokens, :tokens] == 0, float("-inf"))
        weights = self.attn_dropout(scores.softmax(dim=-1))
        mixed = torch.einsum("bhij,bhjd->bihd", weights, v)
        return self.resid_dropout(self.c_proj(mixed.reshape(batch, tokens, width)))
