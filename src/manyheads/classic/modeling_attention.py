"""Presentation 1: batch first, with heads that are split off by a reshape.

Scores are divided by `scale`, the root of the key size. `probs[0]` is head 0 of sequence 0, and
`probs[num_heads]` head 0 of sequence 1.

`SelfAttention` is section 3.2.1 of Vaswani et al. 2017 (arXiv:1706.03762), `MultiHeadSelfAttention` 3.2.2.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.classic.common import Inputs, check, mix, weigh
from manyheads.functional import attention, attention_with_map
from manyheads.layouts import merge_heads, split_heads
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Mask
from manyheads.shapes import divide, real, whole


class SelfAttention(nn.Module):
    """One head: softmax(q kᵀ / √hidden) v.

    Args:
        input_size: The width of x.
        hidden: The width of q, k, v and the output.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is less than 1.
    """

    def __init__(self, input_size: int, hidden: int) -> None:
        super().__init__()
        whole(input_size, "input_size", least=1)
        whole(hidden, "hidden", least=1)
        self.q = nn.Linear(input_size, hidden)
        self.k = nn.Linear(input_size, hidden)
        self.v = nn.Linear(input_size, hidden)
        self.scale = math.sqrt(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[batch, seq, hidden]` for x `[batch, seq, input_size]`."""
        q, k, v, options = self._inputs(x, None)
        return attention(q, k, v, **options).squeeze(1)

    def attend(self, x: Tensor, *, mask: Mask | None = None) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map.

        Args:
            x: The input `[batch, seq, input_size]`.
            mask: A mask of manyheads.

        Returns:
            The output `[batch, seq, hidden]` and the map `[batch, 1, seq, seq]`.

        Raises:
            TypeError: If x isn't a tensor of floats, or the mask isn't a `Mask`.
            ValueError: If x has the wrong shape.
        """
        q, k, v, options = self._inputs(x, mask)
        out, amap = attention_with_map(q, k, v, **options)
        return out.squeeze(1), amap

    def _inputs(self, x: Tensor, mask: Mask | None) -> Inputs:
        check(x, "x", "batch", "seq", self.q.in_features)
        q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))  # [b, 1, t, d]
        return q, k, v, {"mask": mask, "scale": 1 / self.scale}


class MultiHeadSelfAttention(nn.Module):
    """Several heads, with an optional causal mask.

    Args:
        input_size: The width of x.
        hidden: The width of q, k, v and the output.
        num_heads: The number of heads, each of width head_size = hidden / num_heads.
        causal: Whether to mask the keys after each query.
        dropout: The dropout probability of weights.

    Raises:
        TypeError: If a size isn't an integer, or dropout isn't a number.
        ValueError: If num_heads doesn't divide hidden, or dropout isn't a probability.
    """

    def __init__(
        self,
        input_size: int,
        hidden: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0,
    ) -> None:
        super().__init__()
        whole(input_size, "input_size", least=1)
        whole(hidden, "hidden", least=1)
        self.head_size = divide(hidden, whole(num_heads, "num_heads"), "hidden", "num_heads")
        real(dropout, "dropout", lambda p: 0 <= p <= 1, "between 0 and 1")
        self.num_heads = num_heads
        self.scale = math.sqrt(self.head_size)
        self.causal = causal
        self.dropout = dropout
        self.k = nn.Linear(input_size, hidden)
        self.q = nn.Linear(input_size, hidden)
        self.v = nn.Linear(input_size, hidden)
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over a sequence.

        Args:
            x: The input `[batch, seq, input_size]`.
            return_attention: Whether to also return the weights.

        Returns:
            The output `[batch, seq, hidden]`, and the weights `[batch * num_heads, seq, seq]` after dropout,
            with the heads of a sequence adjacent.

        Raises:
            TypeError: If x isn't a tensor of floats.
            ValueError: If x has the wrong shape.
        """
        q, k, v, options = self._inputs(x, None)
        if not return_attention:
            return self._merge(attention(q, k, v, dropout_p=self._dropout_p(), **options))
        probs = F.dropout(weigh(q, k, v, **options), self._dropout_p())  # [b, h, t, t]
        return self._merge(mix(probs, v)), probs.flatten(0, 1).to(v.dtype)  # [b, t, hidden], [b * h, t, t]

    def attend(self, x: Tensor, *, mask: Mask | None = None) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map.

        Args:
            x: The input `[batch, seq, input_size]`.
            mask: A mask of manyheads, combined with the causal mask, e.g. `Lengths(lengths)` for padding.

        Returns:
            The output `[batch, seq, hidden]` and the map `[batch, num_heads, seq, seq]`, before dropout.

        Raises:
            TypeError: If x isn't a tensor of floats, or the mask isn't a `Mask`.
            ValueError: If x has the wrong shape.
        """
        q, k, v, options = self._inputs(x, mask)
        out, amap = attention_with_map(q, k, v, dropout_p=self._dropout_p(), **options)
        return self._merge(out), amap

    def _inputs(self, x: Tensor, mask: Mask | None) -> Inputs:
        check(x, "x", "batch", "seq", self.q.in_features)
        layers = self.q, self.k, self.v
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in layers)  # [b, h, t, d]
        if self.causal:
            mask = Causal() if mask is None else Causal() & mask
        return q, k, v, {"mask": mask, "scale": 1 / self.scale}

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _merge(self, out: Tensor) -> Tensor:
        return self.mix(merge_heads(out))  # [b, t, hidden]

    def extra_repr(self) -> str:
        """Return the sizes and options that `repr` shows."""
        return f"num_heads={self.num_heads}, head_size={self.head_size}, causal={self.causal}"
