"""The single head of a course's exercise."""

import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, input_dim, key_dim, value_dim):
        super().__init__()
        self.key_dim = key_dim
        self.query = nn.Linear(input_dim, key_dim)
        self.key = nn.Linear(input_dim, key_dim)
        self.value = nn.Linear(input_dim, value_dim)

    def forward(self, x, mask=None):
        """x: (batch, length, input_dim); mask: (batch, length, length), False hides."""
        queries = self.query(x)
        keys = self.key(x)
        values = self.value(x)

        scores = torch.bmm(queries, keys.transpose(1, 2)) / self.key_dim**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        attention = torch.softmax(scores, dim=2)
        if mask is not None:
            attention = attention.masked_fill(~mask, 0)
        weighted = torch.bmm(attention, values)
        return weighted
