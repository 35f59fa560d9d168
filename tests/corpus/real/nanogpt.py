"""Causal self-attention with the interface of nanoGPT, after the description of GPT-2."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        width = config.n_embd
        self.c_attn = nn.Linear(width, 3 * width, bias=config.bias)
        self.c_proj = nn.Linear(width, width, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, width, config.dropout

    def forward(self, x):
        def heads(packed: torch.Tensor) -> torch.Tensor:
            return packed.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

        q, k, v = (heads(each) for each in self.c_attn(x).split(self.n_embd, dim=-1))
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(-2)))
