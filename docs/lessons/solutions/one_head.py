"""Lesson 1, exercise 1: self-attention with one head."""

import math

import torch
from torch import nn


class SelfAttention(nn.Module):
    """softmax(q kᵀ / √hidden) v, with q, k and v from one input x `[b, t, input_size]`."""

    def __init__(self, input_size: int, hidden: int) -> None:
        super().__init__()
        self.q = nn.Linear(input_size, hidden)
        self.k = nn.Linear(input_size, hidden)
        self.v = nn.Linear(input_size, hidden)
        self.scale = math.sqrt(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.q(x), self.k(x), self.v(x))  # [b, t, d]

    def head(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT / self.scale  # [b, t, t]
        weights = scores.softmax(dim=-1)  # [b, t, t], each row sums to 1
        return weights @ v  # [b, t, d]
