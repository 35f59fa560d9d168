"""Presentation 4: sequence first, keyword arguments, and scores that a subclass can override.

`PrepareForMultiHeadAttention` and `MultiHeadAttention` follow Vaswani et al. 2017 (arXiv:1706.03762), section
3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import scores
from manyheads.biases import Dense
from manyheads.classic.common import Inputs, check, mix, weigh
from manyheads.functional import attention_with_map
from manyheads.maps import AttentionMap
from manyheads.masks import Keep
from manyheads.problem import Problem
from manyheads.shapes import divide, kind, real, sizes, whole


class PrepareForMultiHeadAttention(nn.Module):
    """A linear layer whose output is split into heads.

    Args:
        d_model: The width of x.
        heads: The number of heads.
        d_k: The width of a head.
        bias: Whether the layer has a bias.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is less than 1.
    """

    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool) -> None:
        super().__init__()
        whole(d_model, "d_model", least=1)
        self.heads = whole(heads, "heads", least=1)
        self.d_k = whole(d_k, "d_k", least=1)
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[seq, batch, d_model]` or `[batch, d_model]` as projected heads `[…, heads, d_k]`."""
        is_single = isinstance(x, Tensor) and x.dim() == 2
        check(x, "x", *("batch",) if is_single else ("seq", "batch"), self.linear.in_features)
        return self.linear(x).unflatten(-1, (self.heads, self.d_k))


class MultiHeadAttention(nn.Module):
    """Multi-head attention over `[seq, batch, d_model]`, whose scores and mask can be overridden.

    A subclass can override `get_scores` (for example for relative attention) and `prepare_mask`.

    Args:
        heads: The number of heads, a divisor of d_model.
        d_model: The width of queries, keys, values and the output.
        dropout_prob: The dropout probability of weights.
        bias: Whether the query and key projections have a bias. The value projection always has one.

    Attributes:
        softmax: The softmax over the keys of scores `[seq_q, seq_k, batch, heads]`. It exists for readers of
            the model and isn't called, because it doesn't return zeros for a query without visible keys.
        scale: The factor of the scores, 1/√d_k.
        attn: The weights `[seq_q, seq_k, batch, heads]` of the last call, detached, after dropout.
        tracker: A function that is called with "attn" and the weights before dropout.

    Raises:
        TypeError: If a size isn't an integer, or dropout_prob isn't a number.
        ValueError: If heads doesn't divide d_model, or dropout_prob isn't a probability.
    """

    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True) -> None:
        super().__init__()
        whole(d_model, "d_model", least=1)
        self.d_k = divide(d_model, whole(heads, "heads"), "d_model", "heads")
        self.heads = heads
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.softmax = nn.Softmax(dim=1)
        self.output = nn.Linear(d_model, d_model)
        dropout_prob = real(dropout_prob, "dropout_prob", lambda p: 0 <= p <= 1, "between 0 and 1")
        self.dropout = nn.Dropout(dropout_prob)
        self.scale = 1 / math.sqrt(self.d_k)
        self.attn: Tensor | None = None
        self.tracker: Callable[[str, Tensor], object] | None = None

    def get_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the unscaled scores q · k.

        Args:
            query: The queries `[seq_q, batch, heads, d_k]`.
            key: The keys `[seq_k, batch, heads, d_k]`.

        Returns:
            The scores `[seq_q, seq_k, batch, heads]`.

        Raises:
            TypeError: If an input isn't a tensor of floats.
            ValueError: If an input has the wrong shape.
        """
        check(query, "query", "seq_q", "batch", "heads", self.d_k)
        check(key, "key", "seq_k", "batch", "heads", self.d_k)
        q, k = _by_head(query), _by_head(key)  # [b, h, t, d], [b, h, s, d]
        return scores.logits(Problem.of(q, k, k, scale=1.0)).permute(2, 3, 0, 1).to(query.dtype)

    def prepare_mask(self, mask: Tensor, query_shape: Sequence[int], key_shape: Sequence[int]) -> Tensor:
        """Add a dimension for the heads to a mask.

        Args:
            mask: The mask `[seq_q or 1, seq_k, batch or 1]`, where 0 of any dtype is masked.
            query_shape: The shape of the queries, `[seq_q, batch, d_model]`.
            key_shape: The shape of the keys, `[seq_k, batch, d_model]`.

        Returns:
            The mask `[seq_q or 1, seq_k, batch or 1, 1]`.

        Raises:
            TypeError: If the mask isn't a tensor.
            ValueError: If the mask has the wrong shape.
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"Expected mask to be a tensor [seq_q, seq_k, batch], got {kind(mask)}.")
        t, s, b = query_shape[0], key_shape[0], query_shape[1]
        has_keys = mask.dim() == 3 and mask.shape[1] == s
        if not has_keys or mask.shape[0] not in (1, t) or mask.shape[2] not in (1, b):
            raise ValueError(
                f"Expected mask to be [seq_q or 1, seq_k, batch or 1] = [{t} or 1, {s}, {b} or 1], got "
                f"{sizes(mask)}."
            )
        return mask[..., None]

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from queries to keys.

        Args:
            query: The queries `[seq_q, batch, d_model]`.
            key: The keys `[seq_k, batch, d_model]`.
            value: The values `[seq_k, batch, d_model]`.
            mask: The mask `[seq_q, seq_k, batch]`. An entry of 0 masks the key for the query.

        Returns:
            The output `[seq_q, batch, d_model]`.

        Raises:
            TypeError: If an input isn't a tensor of floats.
            ValueError: If shapes don't fit each other, or an overridden method returns the wrong shape.
        """
        q, k, v, options = self._inputs(query, key, value, mask)
        weights = weigh(q, k, v, **options)  # [b, h, t, s]
        if self.tracker is not None:
            self.tracker("attn", weights.permute(2, 3, 0, 1))
        weights = self.dropout(weights)
        self.attn = weights.detach().permute(2, 3, 0, 1).to(v.dtype)  # [t, s, b, h]
        return self._merge(mix(weights, v))

    def attend(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[batch, heads, seq_q, seq_k]`, before dropout; `attn` isn't set.

        Args:
            query: The queries `[seq_q, batch, d_model]`.
            key: The keys `[seq_k, batch, d_model]`.
            value: The values `[seq_k, batch, d_model]`.
            mask: The mask `[seq_q, seq_k, batch]`.

        Returns:
            The output `[seq_q, batch, d_model]` and the map.

        Raises:
            TypeError: If an input isn't a tensor of floats.
            ValueError: If shapes don't fit each other, or an overridden method returns the wrong shape.
        """
        q, k, v, options = self._inputs(query, key, value, mask)
        dropout_p = self.dropout.p if self.training else 0.0
        out, amap = attention_with_map(q, k, v, dropout_p=dropout_p, **options)
        return self._merge(out), amap

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Inputs:
        width = self.query.linear.in_features
        check(query, "query", "seq_q", "batch", width)
        check(key, "key", "seq_k", "batch", width)
        check(value, "value", "seq_k", "batch", width)
        if query.shape[1] != key.shape[1] or key.shape != value.shape:
            raise ValueError(
                "Expected the same batch in query, key and value, and the same length in key and value, got "
                f"query {sizes(query)}, key {sizes(key)}, value {sizes(value)}."
            )
        keep = None if mask is None else self._keep(mask, query, key)
        projected = self.query(query), self.key(key), self.value(value)
        q, k, v = (_by_head(x) for x in projected)  # [b, h, t, d], [b, h, s, d], [b, h, s, d]
        options: dict[str, Any] = {"mask": keep, "scale": self.scale}
        if getattr(self.get_scores, "__func__", None) is not MultiHeadAttention.get_scores:
            options["bias"] = self._overridden_scores(projected[0], projected[1], keep)
            q, k = q[..., :0], k[..., :0]  # with width 0, q·k is 0, so that the bias gives the scores
        return q, k, v, options

    def _keep(self, mask: Tensor, query: Tensor, key: Tensor) -> Keep:
        prepared = self.prepare_mask(mask, query.shape, key.shape)
        expected = [query.shape[0], key.shape[0], query.shape[1], self.heads]
        has_four = isinstance(prepared, Tensor) and prepared.dim() == 4
        if not has_four or any(n not in (1, m) for n, m in zip(prepared.shape, expected, strict=True)):
            got = sizes(prepared) if isinstance(prepared, Tensor) else kind(prepared)
            raise ValueError(
                "Expected prepare_mask to return a tensor that broadcasts to [seq_q, seq_k, batch, heads] = "
                f"{expected}, got {got}."
            )
        return Keep((prepared != 0).permute(2, 3, 0, 1))  # [b, h, t, s]

    def _overridden_scores(self, query: Tensor, key: Tensor, keep: Keep | None) -> Dense:
        """Return the scaled scores of a subclass as a bias, with −inf for masked keys."""
        scores = self.get_scores(query, key)
        expected = [query.shape[0], key.shape[0], query.shape[1], self.heads]
        if not isinstance(scores, Tensor) or list(scores.shape) != expected:
            got = sizes(scores) if isinstance(scores, Tensor) else kind(scores)
            raise ValueError(
                f"Expected get_scores to return [seq_q, seq_k, batch, heads] = {expected}, got {got}."
            )
        scores = scores.permute(2, 3, 0, 1) * self.scale  # [b, h, t, s]
        try:
            return Dense(scores if keep is None else torch.where(keep.tensor, scores, -math.inf))
        except ValueError:
            raise ValueError(
                "Expected finite scores or -inf (masked) from get_scores, got NaN or +inf. Fix get_scores, "
                "or mask these keys."
            ) from None

    def _merge(self, out: Tensor) -> Tensor:
        return self.output(out.permute(2, 0, 1, 3).flatten(2))  # [t, b, d_model]


def _by_head(x: Tensor) -> Tensor:
    """Return x `[seq, batch, heads, d_k]` as `[batch, heads, seq, d_k]`."""
    return x.permute(1, 2, 0, 3)
