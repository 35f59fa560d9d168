"""Attention with the interface that torchtune documents for `torchtune.modules`.

Its parts are modules that the constructor takes, so a check needs a function that builds them: `llama`, or
`qwen` with norms of queries and keys.
"""

import torch
from torch import nn
from torch.nn import functional


class RotaryPositionalEmbeddings(nn.Module):
    """Rotate the pairs of neighbouring entries of x [b, s, n_h, h_d]."""

    def __init__(self, dim: int, max_seq_len: int = 4096, base: int = 10_000):
        super().__init__()
        frequencies = base ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(max_seq_len).float(), frequencies)
        self.register_buffer("cache", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        table = self.cache[: x.shape[1]][None] if input_pos is None else self.cache[input_pos]
        cos, sin = table[:, :, None].unbind(-1)  # [b, s, 1, h_d / 2]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).type_as(x)


class KVCache(nn.Module):
    """Keys and values of earlier calls, [b, n_kv, max_seq_len, h_d]."""

    def __init__(
        self, batch_size: int, max_seq_len: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        super().__init__()
        shape = (batch_size, num_kv_heads, max_seq_len, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("cache_pos", torch.tensor(0), persistent=False)

    @property
    def size(self) -> int:
        return int(self.cache_pos)

    def reset(self) -> None:
        for buffer in (self.k_cache, self.v_cache, self.cache_pos):
            buffer.zero_()

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, _, tokens, _ = k.shape
        if batch > self.k_cache.shape[0] or self.size + tokens > self.k_cache.shape[2]:
            raise ValueError("the cache is too small for these keys")
        place = slice(self.size, self.size + tokens)
        self.k_cache[:batch, :, place], self.v_cache[:batch, :, place] = k, v
        self.cache_pos += tokens
        return self.k_cache[:batch, :, : self.size], self.v_cache[:batch, :, : self.size]


class MultiHeadAttention(nn.Module):
    """Attention with grouped heads, rotary positions, norms of queries and keys, and a cache.

    `is_causal` sets the default mask to causal when no mask is provided.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        kv_cache: KVCache | None = None,
        max_seq_len: int = 4096,
        is_causal: bool = True,
        attn_dropout: float = 0.0,
    ):
        super().__init__()
        if num_heads % num_kv_heads or embed_dim % num_heads:
            raise ValueError("embed_dim and num_kv_heads must fit num_heads")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.embed_dim, self.max_seq_len = embed_dim, max_seq_len
        self.is_causal, self.attn_dropout = is_causal, attn_dropout
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = q_proj, k_proj, v_proj, output_proj
        self.pos_embeddings, self.q_norm, self.k_norm = pos_embeddings, q_norm, k_norm
        self.kv_cache = kv_cache

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Make a cache for this many sequences and tokens."""
        self.kv_cache = KVCache(batch_size, max_seq_len, self.num_kv_heads, self.head_dim, dtype)

    def reset_cache(self) -> None:
        """Empty the cache."""
        if self.kv_cache is None:
            raise RuntimeError("call setup_cache() first")
        self.kv_cache.reset()

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from x to y, which is x in self-attention.

        Args:
            x: Queries [b, s_x, d].
            y: The source of keys and values [b, s_y, d]; may be left out if the cache is full.
            mask: Boolean [b, s_x, s_y]; True means that the query attends to the key. Without a mask, causal.
            input_pos: The positions of the tokens [b, s_x]; 0, 1, … if None.
        """
        q = self.heads(self.q_proj(x), self.q_norm, input_pos)
        if y is not None:
            k = self.heads(self.k_proj(y), self.k_norm, input_pos)
            v = self.v_proj(y).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
            if self.kv_cache is not None:
                k, v = self.kv_cache.update(k, v)
        elif self.kv_cache is not None:
            size = self.kv_cache.size
            k, v = self.kv_cache.k_cache[: len(x), :, :size], self.kv_cache.v_cache[: len(x), :, :size]
        else:
            raise ValueError("Must provide y input or use kv_cache to enable streaming decoding")
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask[:, None],
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.is_causal and mask is None and self.kv_cache is None,
        )
        return self.output_proj(mixed.transpose(1, 2).flatten(-2))

    def heads(self, x: torch.Tensor, norm: nn.Module | None, input_pos: torch.Tensor | None) -> torch.Tensor:
        """Split into heads, rotate, then normalize."""
        x = x.unflatten(-1, (-1, self.head_dim))
        if self.pos_embeddings is not None:
            x = self.pos_embeddings(x, input_pos=input_pos)
        x = x.transpose(1, 2)
        return x if norm is None else norm(x)


def build(norms: bool = False) -> MultiHeadAttention:
    """Return a small layer with 4 heads and 2 key heads."""
    width, heads, key_heads, head_dim = 32, 4, 2, 8
    return MultiHeadAttention(
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim,
        q_proj=nn.Linear(width, heads * head_dim, bias=False),
        k_proj=nn.Linear(width, key_heads * head_dim, bias=False),
        v_proj=nn.Linear(width, key_heads * head_dim, bias=False),
        output_proj=nn.Linear(heads * head_dim, width, bias=False),
        pos_embeddings=RotaryPositionalEmbeddings(head_dim, max_seq_len=4096),
        q_norm=nn.RMSNorm(head_dim) if norms else None,
        k_norm=nn.RMSNorm(head_dim) if norms else None,
    )


def llama() -> MultiHeadAttention:
    """Return a layer as in Llama: rotary positions and grouped heads."""
    return build()


def qwen() -> MultiHeadAttention:
    """Return a layer with norms of queries and keys too."""
    return build(norms=True)
