"""Cross-attention of latents to a context of another width."""

import torch
from torch import einsum, nn

TARGET = "CrossAttention"


def split(x, h):
    b, n, hd = x.shape
    return x.reshape(b, n, h, hd // h).permute(0, 2, 1, 3)


class CrossAttention(nn.Module):
    """Latents look at a context.

    mask: boolean, [batch, context length]. True hides: the positions that are True are not looked at.
    """

    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = query_dim if context_dim is None else context_dim
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def forward(self, x, context, mask=None):
        h = self.heads
        q, k, v = split(self.to_q(x), h), split(self.to_k(context), h), split(self.to_v(context), h)

        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if mask is not None:
            hidden = mask[:, None, None, :]
            sim = sim.masked_fill(hidden, torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1)
        if mask is not None:
            attn = attn.masked_fill(hidden, 0.0)

        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        out = out.permute(0, 2, 1, 3).flatten(2)
        return self.to_out(out)
