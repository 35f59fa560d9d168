"""Lesson 3, exercise 3: causal attention, with one wrong line.

Task: the weights on future keys are 0, but the output is wrong. Run the checker, fix the bug that it
names, and check again:

    manyheads check exercises/decoder_attention.py:DecoderAttention --like self
"""

import math

import torch
from torch import nn


class DecoderAttention(nn.Module):
    """One causal head over `[b, t, e]`: each query attends to itself and earlier tokens."""

    def __init__(self, input_dim, key_dim, output_dim):
        super().__init__()
        self.linear_q = nn.Linear(input_dim, key_dim)
        self.linear_k = nn.Linear(input_dim, key_dim)
        self.linear_v = nn.Linear(input_dim, output_dim)

    def forward(self, x):
        """x `[b, t, input_dim]` → `[b, t, output_dim]`."""
        q, k, v = self.linear_q(x), self.linear_k(x), self.linear_v(x)  # [b, t, key_dim], …
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])  # [b, t, t]
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)  # [t, t]: True = masked
        weights = scores.softmax(-1).masked_fill(future, 0.0)  # [b, t, t]
        return weights @ v  # [b, t, output_dim]
