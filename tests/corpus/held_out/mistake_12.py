"""Multi-head attention layer, ported from a Keras package."""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET = "MultiHeadAttention"


class ScaledDotProductAttention(nn.Module):
    def forward(self, query, key, value, mask=None):
        dk = query.size()[-1]
        scores = query.matmul(key.transpose(-2, -1)) / dk**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        attention = F.softmax(scores, dim=-1)
        if mask is not None:
            attention = attention.masked_fill(mask == 0, 0.0)
        return attention.matmul(value)


class MultiHeadAttention(nn.Module):
    """Multi-head attention.

    :param in_features: Size of each input sample.
    :param head_num: Number of heads.
    :param bias: Whether to use the bias term.
    """

    def __init__(self, in_features, head_num, bias=True):
        super().__init__()
        if in_features % head_num != 0:
            raise ValueError(f"`in_features`({in_features}) should be divisible by `head_num`({head_num})")
        self.in_features = in_features
        self.head_num = head_num
        self.linear_q = nn.Linear(in_features, in_features, bias)
        self.linear_k = nn.Linear(in_features, in_features, bias)
        self.linear_v = nn.Linear(in_features, in_features, bias)
        self.linear_o = nn.Linear(in_features, in_features, bias)

    def forward(self, q, k, v, mask=None):
        """mask: [batch, queries, keys], 1 where a query may attend."""
        q, k, v = F.relu(self.linear_q(q)), F.relu(self.linear_k(k)), F.relu(self.linear_v(v))
        q, k, v = self._reshape_to_batches(q), self._reshape_to_batches(k), self._reshape_to_batches(v)
        if mask is not None:
            mask = mask.repeat_interleave(self.head_num, 0)
        y = ScaledDotProductAttention()(q, k, v, mask)
        y = self._reshape_from_batches(y)
        return self.linear_o(y)

    def _reshape_to_batches(self, x):
        batch_size, seq_len, in_feature = x.size()
        sub_dim = in_feature // self.head_num
        return (
            x.reshape(batch_size, seq_len, self.head_num, sub_dim)
            .permute(0, 2, 1, 3)
            .reshape(batch_size * self.head_num, seq_len, sub_dim)
        )

    def _reshape_from_batches(self, x):
        batch_size, seq_len, in_feature = x.size()
        batch_size //= self.head_num
        out_dim = in_feature * self.head_num
        return (
            x.reshape(batch_size, self.head_num, seq_len, in_feature)
            .permute(0, 2, 1, 3)
            .reshape(batch_size, seq_len, out_dim)
        )
