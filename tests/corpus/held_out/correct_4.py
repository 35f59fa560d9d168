"""Multi-head attention as in section 3.2 of "Attention is all you need", with d_k and d_v of their own."""

import torch
from torch import nn

TARGET = "PaperMultiHead"


class PaperMultiHead(nn.Module):
    r"""softmax(Q K^T / sqrt(d_k)) V for every head, concatenated and projected.

    Shapes (sequence first):
        query: (L, N, d_model); key, value: (S, N, d_model)
        key_padding_mask: (N, S), True at padding
        returns: output (L, N, d_model) and weights (N, h, L, S)
    """

    def __init__(self, d_model: int, h: int, d_k: int = 6, d_v: int = 10) -> None:
        super().__init__()
        self.h, self.d_k, self.d_v = h, d_k, d_v
        self.w_q = nn.Linear(d_model, h * d_k)
        self.w_k = nn.Linear(d_model, h * d_k)
        self.w_v = nn.Linear(d_model, h * d_v)
        self.w_o = nn.Linear(h * d_v, d_model)

    def forward(self, query, key, value, key_padding_mask=None):
        L, N, _ = query.shape
        S = key.shape[0]
        q = self.w_q(query).reshape(L, N * self.h, self.d_k).transpose(0, 1)
        k = self.w_k(key).reshape(S, N * self.h, self.d_k).permute(1, 2, 0)
        v = self.w_v(value).reshape(S, N * self.h, self.d_v).transpose(0, 1)

        scores = torch.bmm(q * self.d_k**-0.5, k).view(N, self.h, L, S)
        if key_padding_mask is None:
            weights = torch.softmax(scores, -1)
        else:
            pad = key_padding_mask.view(N, 1, 1, S)
            empty = pad.all(-1, keepdim=True)
            scores = scores.masked_fill(pad, float("-inf")).masked_fill(empty, 0.0)
            weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)

        heads = torch.bmm(weights.view(N * self.h, L, S), v)
        joined = heads.transpose(0, 1).reshape(L, N, self.h * self.d_v)
        return self.w_o(joined), weights
