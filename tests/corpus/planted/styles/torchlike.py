"""The conventions of torch.nn.MultiheadAttention: packed weights, sequence first, True hides."""

import torch
import torch.nn.functional as F
from torch import nn


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True, batch_first=False):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
    ):
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        bsz, tgt_len, embed_dim = query.shape
        src_len = key.shape[1]

        w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        b_q, b_k, b_v = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None,) * 3
        q = F.linear(query, w_q, b_q)
        k = F.linear(key, w_k, b_k)
        v = F.linear(value, w_v, b_v)
        q = q.reshape(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.reshape(bsz, src_len, self.num_heads, self.head_dim).transpose(1, 2)
        v = v.reshape(bsz, src_len, self.num_heads, self.head_dim).transpose(1, 2)

        hidden = torch.zeros(bsz, 1, tgt_len, src_len, dtype=torch.bool, device=query.device)
        bias = torch.zeros(bsz, 1, tgt_len, src_len, dtype=query.dtype, device=query.device)
        if attn_mask is not None:
            if attn_mask.dim() == 3:  # [b * h, t, s]
                attn_mask = attn_mask.view(bsz, self.num_heads, tgt_len, src_len)
            if attn_mask.dtype == torch.bool:
                hidden = hidden | attn_mask
            else:
                bias = bias + attn_mask
                hidden = hidden | attn_mask.isneginf()
        if key_padding_mask is not None:
            hidden = hidden | key_padding_mask[:, None, None, :]

        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        scores = (scores + bias).masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
        dropped = F.dropout(weights, self.dropout, self.training)
        context = torch.matmul(dropped, v)
        context = context.transpose(1, 2).reshape(bsz, tgt_len, embed_dim)
        output = self.out_proj(context)

        if not self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        return output, weights.mean(dim=1) if average_attn_weights else weights
