"""Presentation 4: sequence first, keyword arguments, and scores that a subclass may override.

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
from manyheads.classic.common import check, mix, weigh
from manyheads.functional import attention_with_map
from manyheads.maps import AttentionMap
from manyheads.masks import Keep
from manyheads.scores import Problem
from manyheads.shapes import divide, kind, real, sizes, whole

Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # q, k, v and the rest of attention's arguments


class PrepareForMultiHeadAttention(nn.Module):
    """One linear layer to heads · d_k, then the last dimension split.

    d_model: the width of x; heads, d_k: what it is split into; bias: has the layer one? Attributes
    `linear`, `heads`, `d_k`. TypeError or ValueError unless the sizes are at least 1.
    """

    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool) -> None:
        super().__init__()
        whole(d_model, "d_model", least=1)
        self.heads = whole(heads, "heads", least=1)
        self.d_k = whole(d_k, "d_k", least=1)
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[seq, batch, d_model]` or `[batch, d_model]` → `[…, heads, d_k]`.

        TypeError or ValueError for another x.
        """
        known = isinstance(x, Tensor) and x.dim() == 2
        check(x, "x", *("batch",) if known else ("seq", "batch"), self.linear.in_features)
        return self.linear(x).unflatten(-1, (self.heads, self.d_k))


class MultiHeadAttention(nn.Module):
    """Multi-head attention over `[seq, batch, d_model]`, whose scores and mask can be overridden.

    Args:
        heads: the number of heads; it must divide d_model, and d_k = d_model / heads.
        d_model: the width of queries, keys, values and the output.
        dropout_prob: the probability with which a weight is dropped in training.
        bias: have the query and key projections one? The value projection always has.

    `query`, `key`, `value` and `output` are the projections, `scale` = 1/√d_k multiplies the scores,
    `dropout` acts on the weights. `softmax` says along which dimension of a score `[seq_q, seq_k,
    batch, heads]` the weights sum to one; it is there to be read: the core takes the softmax, so that
    a query that may see nothing gets zeros. `tracker`, a function of a name and a tensor, is called
    with "attn" and the weights before dropout, if there is one; `attn` keeps those after dropout,
    detached. Both are `[seq_q, seq_k, batch, heads]`.

    A subclass may override `get_scores` (for relative attention and the like) and `prepare_mask`. Raises
    TypeError or ValueError for sizes that don't go together and for what is no probability.
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
        """query `[seq_q, batch, heads, d_k]`, key `[seq_k, batch, heads, d_k]` → q · k, unscaled:
        `[seq_q, seq_k, batch, heads]`. TypeError or ValueError for others."""
        check(query, "query", "seq_q", "batch", "heads", self.d_k)
        check(key, "key", "seq_k", "batch", "heads", self.d_k)
        q, k = _by_head(query), _by_head(key)  # [b, h, t, d], [b, h, s, d]
        return scores.logits(Problem.of(q, k, k, scale=1.0)).permute(2, 3, 0, 1).to(query.dtype)

    def prepare_mask(self, mask: Tensor, query_shape: Sequence[int], key_shape: Sequence[int]) -> Tensor:
        """mask `[seq_q or 1, seq_k, batch or 1]` → the same with a last dimension for the heads.

        0 of any dtype hides, anything else shows. query_shape and key_shape are `[seq, batch,
        d_model]`. TypeError or ValueError for another mask.
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor [seq_q, seq_k, batch], and {kind(mask)} came.")
        t, s, b = query_shape[0], key_shape[0], query_shape[1]
        fits = mask.dim() == 3 and mask.shape[1] == s
        if not fits or mask.shape[0] not in (1, t) or mask.shape[2] not in (1, b):
            raise ValueError(
                f"mask must be [seq_q or 1, seq_k, batch or 1] = [{t} or 1, {s}, {b} or 1], "
                f"and {sizes(mask)} came."
            )
        return mask[..., None]

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query `[seq_q, batch, d_model]`, key and value `[seq_k, batch, d_model]` → as the query.

        The mask is `[seq_q, seq_k, batch]`:
        `mask[i, j, b]` says whether query i of batch entry b may see key j (0 hides).
        Raises TypeError or ValueError for other tensors, and for what an overridden method
        answers.
        """
        q, k, v, rest = self._inputs(query, key, value, mask)
        weights = weigh(q, k, v, **rest)  # [b, h, t, s]
        if self.tracker is not None:
            self.tracker("attn", weights.permute(2, 3, 0, 1))
        weights = self.dropout(weights)
        self.attn = weights.detach().permute(2, 3, 0, 1).to(v.dtype)  # [t, s, b, h]
        return self._merge(mix(weights, v))

    def attend(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionMap]:
        """The output and its map `[batch, heads, seq_q, seq_k]`: before dropout. `attn` isn't set.

        Arguments as `forward`, and it raises what that raises: TypeError, ValueError.
        """
        q, k, v, rest = self._inputs(query, key, value, mask)
        dropout_p = self.dropout.p if self.training else 0.0
        out, amap = attention_with_map(q, k, v, dropout_p=dropout_p, **rest)
        return self._merge(out), amap

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Inputs:
        width = self.query.linear.in_features
        check(query, "query", "seq_q", "batch", width)
        check(key, "key", "seq_k", "batch", width)
        check(value, "value", "seq_k", "batch", width)
        if query.shape[1] != key.shape[1] or key.shape != value.shape:
            raise ValueError(
                "query, key and value must share the batch, and key and value their length, and "
                f"query {sizes(query)}, key {sizes(key)}, value {sizes(value)} came."
            )
        keep = None if mask is None else self._keep(mask, query, key)
        projected = self.query(query), self.key(key), self.value(value)
        q, k, v = (_by_head(x) for x in projected)  # [b, h, t, d], [b, h, s, d], [b, h, s, d]
        rest: dict[str, Any] = {"mask": keep, "scale": self.scale}
        if getattr(self.get_scores, "__func__", None) is not MultiHeadAttention.get_scores:
            rest["bias"] = self._own_scores(projected[0], projected[1], keep)
            q, k = q[..., :0], k[..., :0]  # of width 0: they add nothing to the scores
        return q, k, v, rest

    def _keep(self, mask: Tensor, query: Tensor, key: Tensor) -> Keep:
        prepared = self.prepare_mask(mask, query.shape, key.shape)
        want = (query.shape[0], key.shape[0], query.shape[1], self.heads)
        fits = isinstance(prepared, Tensor) and prepared.dim() == 4
        if not fits or any(n not in (1, m) for n, m in zip(prepared.shape, want, strict=True)):
            came = sizes(prepared) if isinstance(prepared, Tensor) else kind(prepared)
            raise ValueError(
                "prepare_mask must return what broadcasts to [seq_q, seq_k, batch, heads] = "
                f"{list(want)}, and {came} came."
            )
        return Keep((prepared != 0).permute(2, 3, 0, 1))  # [b, h, t, s]

    def _own_scores(self, query: Tensor, key: Tensor, keep: Keep | None) -> Dense:
        """A subclass's scores, scaled, as what is added to none: −inf where the mask hides."""
        own = self.get_scores(query, key)
        want = [query.shape[0], key.shape[0], query.shape[1], self.heads]
        if not isinstance(own, Tensor) or list(own.shape) != want:
            came = sizes(own) if isinstance(own, Tensor) else kind(own)
            raise ValueError(
                f"get_scores must return [seq_q, seq_k, batch, heads] = {want}, and {came} came."
            )
        own = own.permute(2, 3, 0, 1) * self.scale  # [b, h, t, s]
        try:
            return Dense(own if keep is None else torch.where(keep.tensor, own, -math.inf))
        except ValueError:
            raise ValueError(
                "get_scores may return numbers and -inf (hidden), and NaN or +inf came: mask what they "
                "belong to, or mend get_scores."
            ) from None

    def _merge(self, out: Tensor) -> Tensor:
        return self.output(out.permute(2, 0, 1, 3).flatten(2))  # [t, b, d_model]


def _by_head(x: Tensor) -> Tensor:
    """`[seq, batch, heads, d_k]` → `[batch, heads, seq, d_k]`."""
    return x.permute(1, 2, 0, 3)
