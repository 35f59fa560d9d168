"""Attention with einsum, weights kept as [model, heads, head_dim] tensors."""

import torch
from torch import nn

TARGET = "EinsumAttention"


class EinsumAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        head_dim = dim // num_heads
        self.wq = nn.Parameter(torch.randn(dim, num_heads, head_dim) * dim**-0.5)
        self.wk = nn.Parameter(torch.randn(dim, num_heads, head_dim) * dim**-0.5)
        self.wv = nn.Parameter(torch.randn(dim, num_heads, head_dim) * dim**-0.5)
        self.wo = nn.Parameter(torch.randn(num_heads, head_dim, dim) * dim**-0.5)
        self.scale = head_dim**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.einsum("bte,ehd->bhtd", x, self.wq)
        k = torch.einsum("bte,ehd->bhtd", x, self.wk)
        v = torch.einsum("bte,ehd->bhtd", x, self.wv)
        a = torch.einsum("bhid,bhjd->bhij", q, k).mul(self.scale).softmax(-1)
        y = torch.einsum("bhij,bhid->bhjd", a, v)
        return torch.einsum("bhtd,hde->bte", y, self.wo)
