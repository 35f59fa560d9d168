"""Bugs in how heads are split, merged and shared.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, override, transform, wrap

SPLIT = (
    "split the width, then move the axes to [b, h, t, d]: x.view(b, t, h, d).transpose(1, 2) of x [b, t, e], "
    "x.view(t, b, h, d).permute(1, 2, 0, 3) of x [t, b, e]; a reshape alone mixes tokens"
)
MERGE = (
    "move the axes back, then merge the last two: of x [b, h, t, d], x.transpose(1, 2).flatten(2) is [b, t, e], "
    "x.permute(2, 0, 1, 3).flatten(2) is [t, b, e]; a reshape alone mixes tokens"
)
PACKED = (
    "x [b, t, 3 e] is q, k and v side by side: q, k, v = x.chunk(3, -1), or x.view(b, t, 3, h, d).unbind(2)"
)
ORDER = "the width is (heads, head size) in that order, wherever it is split and merged"
FOLD = (
    "fold and unfold in the same order: [b, h, t, d] becomes [b·h, t, d], and that .view(b, h, t, d) again; "
    "a mask [b, t, s] becomes mask.repeat_interleave(h, 0)"
)
REPEAT = (
    "query head i uses key head i // (h / g): repeat_interleave(h // g) along the heads' axis, not repeat"
)


def split_interleaved(_: Attention, x: Tensor, heads: int) -> Tensor:
    """Split the width as (d, h)."""
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


def merge_interleaved(_: Attention, x: Tensor) -> Tensor:
    """Merge to a width of (d, h)."""
    return x.permute(0, 2, 3, 1).flatten(2)


def keep_heads_last(_: Attention, x: Tensor, heads: int) -> Tensor:
    """Split without moving the heads' axis: `[b, t, h, d]`."""
    return x.unflatten(-1, (heads, -1))


def split_packed(shape: str) -> type[Oracle]:
    """Return an oracle that reshapes a packed `[b, t, 3 e]` to these axes; n are the three of q, k and v."""

    def compute_heads(oracle: Attention, role: str) -> Tensor:
        if oracle.weights is None:
            return oracle.source(role)
        packed = torch.cat([oracle.project(letter, oracle.source(letter)) for letter in "qkv"], -1)
        sizes = {"b": oracle.x.b, "t": oracle.x.t, "n": 3, "h": oracle.count_heads(role), "d": -1}
        packed = packed.reshape([sizes[letter] for letter in shape])
        heads = packed.permute([shape.index(letter) for letter in "nbhtd"])["qkv".index(role)]
        return oracle.encode_heads(role, heads)

    return override(compute_heads=compute_heads)


def read_heads_first(x: Tensor) -> Tensor:
    """Return [h · b, …] as it is read where the axis is taken for [b · h]."""
    return x.transpose(0, 1).reshape(x.shape)


def read_batch_first(x: Tensor) -> Tensor:
    """Return [b · h, …] as it is read where the axis is taken for [h · b]."""
    return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def one_head_scale(oracle: Attention) -> float:
    """Return the scale for the size of one of several heads."""
    return (oracle.q.shape[-1] / (oracle.weights.heads if oracle.weights else 1)) ** -0.5


def tile(oracle: Attention, x: Tensor) -> Tensor:
    """Repeat all key heads one after the other: 0, 1, 0, 1."""
    return x.repeat(1, oracle.q.shape[1] // x.shape[1], 1, 1)


def divide_by_key_heads(oracle: Attention, x: Tensor) -> Tensor:
    """Use key head i // g for query head i of h, instead of i // (h / g)."""
    g = x.shape[1]
    return x[:, (torch.arange(oracle.q.shape[1]) // g).clamp(max=g - 1)]


def use_first_key_head(oracle: Attention, x: Tensor) -> Tensor:
    """Use the first key head for all query heads."""
    return x[:, :1].expand(-1, oracle.q.shape[1], -1, -1)


def tile_value_heads(oracle: Attention, mix: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """Repeat the value heads in another order than the key heads."""
    oracle.v = tile(oracle, oracle.compute_heads("v"))
    return mix(weights)


def tile_score_heads(oracle: Attention, dot_product: Callable[[], Tensor]) -> Tensor:
    """Repeat the key heads in another order than the value heads."""
    oracle.k = tile(oracle, oracle.compute_heads("k"))
    return dot_product()


# fmt: off
BUGS = [
    Bug("split-without-transpose", "whose heads are split by a reshape without a transpose", SPLIT,
        override(split_heads=lambda o, x, heads: x.reshape(x.shape[0], heads, x.shape[1], -1)),
        override(split_heads=lambda o, x, heads: x.transpose(0, 1).reshape(x.shape[0], heads, x.shape[1], -1)),  # of [t, b, e]
        override(split_heads=lambda o, x, heads: x.reshape(x.shape[0], heads, x.shape[1], -1),  # and merged likewise
                 merge_heads=lambda o, x: x.reshape(x.shape[0], x.shape[2], -1)),
        split_packed("bnhtd")),
    Bug("packed-without-transpose", "whose packed queries, keys and values are taken apart by a reshape without a transpose", PACKED,
        split_packed("bnthd")),
    Bug("split-after-transpose", "whose heads are split by a reshape after the transpose rather than before it", SPLIT,
        override(split_heads=lambda o, x, heads: x.transpose(1, 2).reshape(x.shape[0], heads, x.shape[1], -1))),
    Bug("merge-without-transpose", "whose heads are merged by a reshape without a transpose", MERGE,
        override(merge_heads=lambda o, x: x.reshape(x.shape[0], x.shape[2], -1)),
        override(merge_heads=lambda o, x: x.reshape(x.shape[2], x.shape[0], -1).transpose(0, 1))),
    Bug("merge-across-batch", "whose heads are merged with those of other batch entries, because batch and heads share an axis in another order", FOLD,
        override(merge_heads=lambda o, x: x.transpose(0, 1).reshape(x.shape[0], x.shape[2], -1)),
        override(merge_heads=lambda o, x: x.permute(1, 2, 0, 3).reshape(x.shape[0], x.shape[2], -1)),
        wrap(merge_heads=lambda o, merge_heads, x: merge_heads(read_heads_first(x))),
        wrap(merge_heads=lambda o, merge_heads, x: merge_heads(read_batch_first(x)))),
    Bug("heads-summed", "whose heads are added rather than concatenated", "concatenate the heads, then project them; to add them is the same only if each head's value layer contains its part of the output projection",
        *(override(merge_heads=lambda o, x, merge=merge: x if o.weights is None else merge(x, 1)) for merge in (torch.sum, torch.mean))),
    Bug("split-the-other-way", "whose heads are split as [d, h] and merged as [h, d]", ORDER, override(split_heads=split_interleaved)),
    Bug("merge-the-other-way", "whose heads are split as [h, d] and merged as [d, h]", ORDER, override(merge_heads=merge_interleaved)),
    Bug("heads-interleaved", "whose heads are split and merged as [d, h]: an equivalent network, with its weights in another order",
        f"a model trained this way is equally good, but weights of other attention don't fit it; for those, {ORDER}",
        override(split_heads=split_interleaved, merge_heads=merge_interleaved)),
    Bug("heads-as-tokens", "of each token's heads over its own heads, not of tokens over tokens",
        f"move the heads' axis away from the last two before the product of q and k, and back after it; {SPLIT}",
        override(split_heads=keep_heads_last, merge_heads=lambda o, x: x.flatten(2)),
        override(split_heads=keep_heads_last, merge_heads=lambda o, x: x.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))),
    Bug("heads-ignored", "of one head over the whole width", SPLIT,
        *(override(split_heads=lambda o, x, heads: x[:, None], **steps) for steps in ({}, {"scale": one_head_scale}))),
    Bug("first-head-for-all", "whose heads all use the first head's weights", "give each head its own scores",
        transform(mask_weights=lambda o, weights: weights[:, :1].expand_as(weights)), transform(split_heads=lambda o, x: x[:, :1].expand_as(x)),
        override(mix=lambda o, weights: weights[:, :1] @ o.v)),
    Bug("heads-averaged", "whose heads all use the average of their weights",
        "mix each head's values with its own weights; average only what is returned",
        transform(mask_weights=lambda o, weights: weights.mean(1, keepdim=True).expand_as(weights))),
    Bug("heads-reversed", "whose heads are merged in reverse", "concatenate the heads in their order",
        wrap(merge_heads=lambda o, merge_heads, x: merge_heads(x.flip(1)))),
    Bug("key-heads-tiled", "whose key heads are repeated in the wrong order", REPEAT, override(repeat_heads=tile),
        override(repeat_heads=divide_by_key_heads)),
    Bug("key-heads-first-only", "whose query heads all use the first key head", REPEAT,
        override(repeat_heads=lambda o, x: x if x.shape[1] == o.q.shape[1] else use_first_key_head(o, x)),
        override(repeat_heads=use_first_key_head)),
    Bug("value-heads-tiled", "whose value heads, unlike its key heads, are repeated in the wrong order", REPEAT,
        wrap(mix=tile_value_heads)),
    Bug("score-heads-tiled", "whose key heads, unlike its value heads, are repeated in the wrong order", REPEAT,
        wrap(dot_product=tile_score_heads)),
]
# fmt: on
