"""A decoder looks at the encoder's output; padding is True where it hides."""

import torch
import torch.nn.functional as F
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, d_model, n_heads, dropout=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.p = dropout
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def split(self, x):
        b, n, _ = x.shape
        return x.reshape(b, n, self.n_heads, self.d_head).swapaxes(1, 2)

    def forward(self, x, memory, memory_key_padding_mask=None, need_weights=False):
        """x [b, t, e], memory [b, s, e], memory_key_padding_mask [b, s] → out, or (out, weights)."""
        q = self.split(self.w_q(x))
        k = self.split(self.w_k(memory))
        v = self.split(self.w_v(memory))
        energy = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.d_head**0.5

        pad = memory_key_padding_mask
        if pad is None:
            pad = torch.zeros(memory.shape[:2], dtype=torch.bool, device=x.device)
        pad = pad[:, None, None, :]
        masked = energy.masked_fill(pad, torch.finfo(energy.dtype).min)
        weights = F.softmax(masked, dim=-1).masked_fill(pad, 0.0)
        dropped = F.dropout(weights, p=self.p, training=self.training)

        out = torch.einsum("bhqk,bhkd->bhqd", dropped, v)
        out = self.w_o(out.swapaxes(1, 2).flatten(start_dim=2))
        return (out, weights) if need_weights else out
