"""The sinusoidal encoding for sequence-first tensors, [t, b, e]."""

import math

import torch
import torch.nn as nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = 500):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        pos = torch.arange(max_len, dtype=torch.float)
        freq = torch.exp(-math.log(10000.0) * torch.arange(0, d_model, 2) / d_model)
        table = torch.zeros(max_len, 1, d_model)
        table[:, 0, 0::2] = torch.sin(pos[:, None] * freq)
        table[:, 0, 1::2] = torch.cos(pos[:, None] * freq)
        self.register_buffer("table", table)

    def forward(self, x):
        """x [t, b, e]"""
        return self.dropout(x + self.table[: x.size(0)])
