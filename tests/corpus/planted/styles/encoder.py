"""An encoder's layer of a model hub: attention without an output layer, a padding mask of ones and zeros."""

import math

import torch
from torch import nn


class EncoderSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, dropout_prob=0.1):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout_prob)

    def transpose_for_scores(self, x):
        shape = (*x.shape[:-1], self.num_attention_heads, self.attention_head_size)
        return x.view(shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        """attention_mask [b, s]: 1 for a token, 0 for padding."""
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))

        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        logits = attention_scores
        if attention_mask is not None:
            visible = attention_mask[:, None, None, :].bool()
            logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
        attention_probs = nn.Softmax(dim=-1)(logits)
        if attention_mask is not None:
            attention_probs = attention_probs.masked_fill(~visible, 0.0)
        dropped_probs = self.dropout(attention_probs)

        context_layer = torch.matmul(dropped_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*hidden_states.shape)
        return (context_layer, attention_probs) if output_attentions else (context_layer,)
