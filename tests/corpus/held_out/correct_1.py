"""Self-attention with one fused projection, as in GPT-NeoX checkpoints."""

import torch.nn.functional as F
from torch import nn

TARGET = "FusedSelfAttention"


class FusedSelfAttention(nn.Module):
    """Bidirectional self-attention.

    The rows of ``query_key_value`` are packed head by head: ``[num_heads, 3, head_dim]``.

    Args:
        hidden_size: width of the hidden states.
        num_attention_heads: number of heads; must divide ``hidden_size``.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, bias: bool = True):
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.dense = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden_states, attention_mask=None):
        """hidden_states: [batch, seq, hidden]; attention_mask: [batch, seq], 1 for tokens, 0 for padding."""
        batch, seq, hidden = hidden_states.shape
        mixed = self.query_key_value(hidden_states)
        mixed = mixed.view(batch, seq, self.num_heads, 3 * self.head_dim).transpose(1, 2)
        query, key, value = mixed.split(self.head_dim, dim=-1)

        if attention_mask is None:
            context = F.scaled_dot_product_attention(query, key, value)
        else:
            keep = attention_mask.bool()
            some = keep.any(-1)
            allowed = (keep | ~some[:, None])[:, None, None, :]
            context = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
            context = context.masked_fill(~some[:, None, None, None], 0.0)

        context = context.transpose(1, 2).reshape(batch, seq, hidden)
        return self.dense(context)
