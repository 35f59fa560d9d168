"""Lesson 1, exercise 2: multi-head attention, split by a reshape and a transpose."""

import math

import torch
from torch import nn


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention over x `[b, t, input_size]`, with a linear output layer."""

    def __init__(self, input_size: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = hidden // num_heads
        self.q = nn.Linear(input_size, hidden)
        self.k = nn.Linear(input_size, hidden)
        self.v = nn.Linear(input_size, hidden)
        self.mix = nn.Linear(hidden, hidden)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape  # [b, t, h·d]
        return x.reshape(b, t, self.num_heads, self.head_size).transpose(1, 2)  # [b, h, t, d]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))  # [b, h, t, d] each
        scores = q @ k.mT / math.sqrt(self.head_size)  # [b, h, t, t]
        out = scores.softmax(dim=-1) @ v  # [b, h, t, d]
        return self.mix(out.transpose(1, 2).flatten(2))  # [b, t, h·d]
