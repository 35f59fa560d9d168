"""Assignment: implement multi-head self-attention (no masking needed)."""

import numpy as np
import torch
import torch.nn as nn

TARGET = "MHSA"


class MHSA(nn.Module):
    def __init__(self, hidden_dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = hidden_dim // n_heads
        self.query = nn.Linear(hidden_dim, hidden_dim)
        self.key = nn.Linear(hidden_dim, hidden_dim)
        self.value = nn.Linear(hidden_dim, hidden_dim)
        self.fc = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x):
        # x: [batch, length, hidden]
        bs, n, hid = x.shape
        Q = self.query(x).reshape(bs, n, self.n_heads, self.head_dim).permute(0, 2, 1, 3)
        K = self.key(x).reshape(bs, n, self.n_heads, self.head_dim).permute(0, 2, 1, 3)
        V = self.value(x).reshape(bs, n, self.n_heads, self.head_dim).permute(0, 2, 1, 3)

        # Q * K^T: [batch, heads, n, n]
        energy = torch.matmul(Q, K.reshape(bs, self.n_heads, self.head_dim, n)) / np.sqrt(self.head_dim)
        attention = torch.softmax(energy, dim=-1)
        x = torch.matmul(attention, V)
        x = x.permute(0, 2, 1, 3).reshape(bs, n, hid)
        return self.fc(x)
