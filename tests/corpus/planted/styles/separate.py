"""An eager layer of a model hub: four named projections, an additive mask."""

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_attention_heads: int, attention_dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
    ):
        """attention_mask [b, 1, t, s]: added to the scores; 0 keeps, the smallest number or -inf hides."""
        batch, length, width = hidden_states.shape
        shape = (batch, length, self.num_heads, self.head_dim)
        query_states = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)

        attn_scores = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        hidden = None
        if attention_mask is not None:
            lowest = torch.finfo(attn_scores.dtype).min
            hidden = attention_mask <= lowest
            attn_scores = (attn_scores + attention_mask).masked_fill(hidden, lowest)
        attn_weights = nn.functional.softmax(attn_scores, dim=-1)
        if hidden is not None:
            attn_weights = attn_weights.masked_fill(hidden, 0.0)
        attn_probs = nn.functional.dropout(attn_weights, p=self.attention_dropout, training=self.training)
        attn_output = torch.matmul(attn_probs, value_states)

        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(batch, length, width)
        attn_output = self.out_proj(attn_output)
        return attn_output, (attn_weights if output_attentions else None)
