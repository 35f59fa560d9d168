"""Bugs in the softmax, its sink, and the mixing of values.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, override, transform, wrap

KEYS = "the softmax is over the keys: dim=-1 where scores are [b, h, t, s], dim=1 where they are [t, s, b, h]"
SINK = (
    "the sink joins the normalizer: it is one more score in each query's softmax, and its weight is dropped"
)
MIX = "a query's output is the sum of the values, each times the query's weight on its key"


def softmax_without_maximum(oracle: Attention, scores: Tensor) -> Tensor:
    """Compute exponentials in the candidate's dtype, without subtracting the largest score."""
    exp, sink = scores.to(oracle.dtype).exp(), oracle.sink()
    sink_exp = 0.0 if sink is None else sink.to(oracle.dtype).exp()
    return (exp / (exp.sum(-1, keepdim=True) + sink_exp)).to(scores.dtype)


def softmax_from(axis: int) -> Callable[[Tensor], Tensor]:
    """Return a softmax over this axis and those after it together."""
    return lambda x: x.flatten(axis).softmax(-1).view_as(x)


def softmax_with_one(scores: Tensor) -> Tensor:
    """Add 1 to the sum of exponentials after the largest score is subtracted."""
    exp = (scores - scores.amax(-1, keepdim=True)).exp()
    return exp / (1 + exp.sum(-1, keepdim=True))


def mix_by_entry(oracle: Attention, scale: float) -> Tensor:
    """Give each entry of the heads its own weights: the softmax of the products of that entry alone."""
    scores = oracle.q[..., :, None, :] * oracle.k[..., None, :, :] * scale  # [b, h, t, s, d]
    if oracle.visible is not None:
        scores = scores.masked_fill(~oracle.visible[..., None], -math.inf)
    return (scores.softmax(-2) * oracle.v[..., None, :, :]).sum(-2)


def replace_softmax(function: Callable[[Tensor], Tensor]) -> list[type[Oracle]]:
    """Return oracles with this function in place of the softmax: without a sink, or with it as one more score."""
    return [override(**{step: lambda o, scores: function(scores)}) for step in ("softmax", "normalize")]


def drop_key(oracle: Attention, scores: Tensor, sink_first: bool) -> Tensor:
    """Put the sink before or after the keys, and drop the weight at the other end rather than the sink's."""
    if (sink := oracle.sink()) is None:
        return scores.softmax(-1)
    sink = sink.expand(*scores.shape[:3], 1)
    weights = torch.cat((sink, scores) if sink_first else (scores, sink), -1).softmax(-1)
    return weights[..., :-1] if sink_first else weights[..., 1:]


def attend_to_empty_slots(oracle: Attention, weights: Tensor, slots: int, is_single: bool) -> Tensor:
    """Share the weights with the slots of a cache that are still zero, in steps of one token or in all."""
    steps, n = oracle.x.steps, slots - oracle.x.s
    if not steps or n <= 0 or (is_single and steps[-1] > 1):
        return weights
    scores = torch.nn.functional.pad(oracle.scores, (0, n))
    return scores.softmax(-1)[..., : oracle.x.s]


def attend_to_block_padding(oracle: Attention, weights: Tensor, size: int) -> Tensor:
    """Share the weights with keys of zeros that fill the last block of keys."""
    scores = torch.nn.functional.pad(oracle.scores, (0, -oracle.x.s % size))
    return weights if oracle.sink() is not None else scores.softmax(-1)[..., : oracle.x.s]


def mix_chunks(oracle: Attention, weights: Tensor, size: int) -> Tensor:
    """Add up chunks of keys, each relative to the maximum so far, and divide by the right sum of weights."""
    highest = torch.cat([x.amax(-1, keepdim=True).expand_as(x) for x in oracle.scores.split(size, -1)], -1)
    highest = highest.cummax(-1).values
    excess = (highest[..., -1:] - highest).exp()  # infinite or NaN where all keys so far are masked
    return (weights * excess).nan_to_num(0.0) @ oracle.v


def softmax_with_unshifted_sink(oracle: Attention, scores: Tensor) -> Tensor:
    """Subtract the row's maximum, that of the sink included, from the scores alone."""
    if (sink := oracle.sink()) is None:
        return scores.softmax(-1)
    exp = (scores - torch.maximum(scores.amax(-1, keepdim=True), sink)).exp()
    return exp / (exp.sum(-1, keepdim=True) + sink.exp())


def give_sink_to_key(weights: Tensor, key: int) -> Tensor:
    """Add the weight of the sink to the weight of a key."""
    return weights.index_add(-1, torch.tensor([key]), 1 - weights.sum(-1, keepdim=True))


# fmt: off
BUGS = [
    Bug("softmax-over-queries", "whose softmax is over the queries", KEYS, *replace_softmax(lambda x: x.softmax(-2))),
    Bug("softmax-over-heads", "whose softmax is over the heads", KEYS, *replace_softmax(lambda x: x.softmax(1))),
    Bug("softmax-over-batch", "whose softmax is over the batch", KEYS, *replace_softmax(lambda x: x.softmax(0))),
    Bug("softmax-joint", "whose softmax is over queries and keys together", KEYS, *replace_softmax(lambda x: x.flatten(-2).softmax(-1).view_as(x))),
    Bug("softmax-over-heads-and-keys", "whose softmax is over heads and keys together", KEYS,
        *replace_softmax(lambda x: x.transpose(1, 2).flatten(-2).softmax(-1).view(x.transpose(1, 2).shape).transpose(1, 2))),
    Bug("softmax-over-everything", "whose softmax is over all scores together: heads, queries and keys, or the batch too", KEYS,
        *(variant for axis in (1, 0) for variant in replace_softmax(softmax_from(axis)))),
    Bug("one-added-to-sum", "whose sum of exponentials has 1 added to it after the row's maximum is subtracted", f"divide by the sum alone; {KEYS}",
        *replace_softmax(softmax_with_one)),
    Bug("softmax-twice", "whose softmax is applied twice", "apply the softmax once; cross-entropy and layers may contain one",
        *replace_softmax(lambda x: x.softmax(-1).softmax(-1)), transform(mask_weights=lambda o, weights: weights.softmax(-1)),
        wrap(mask_scores=lambda o, mask_scores, scores: mask_scores(scores.softmax(-1)))),
    Bug("softmax-missing", "whose scores are not turned into weights by a softmax", f"apply it; {KEYS}", *replace_softmax(lambda x: x)),
    Bug("log-softmax", "whose weights are logarithms of a softmax", "use softmax, not log_softmax", *replace_softmax(lambda x: x.log_softmax(-1))),
    Bug("sigmoid", "whose weights are a sigmoid of the scores", KEYS, *replace_softmax(lambda x: x.sigmoid())),
    Bug("relu", "whose weights are the positive scores", KEYS, *replace_softmax(lambda x: x.relu())),
    Bug("sum-normalised", "whose scores are divided by their sum", KEYS, *replace_softmax(lambda x: x / x.sum(-1, keepdim=True))),
    Bug("exp-unnormalised", "whose exponentials are not divided by their sum", KEYS, *replace_softmax(lambda x: x.exp())),
    Bug("base-two", "whose softmax has the base 2 rather than e", "use exp, not exp2 (or scale the scores by log2(e))",
        *replace_softmax(lambda x: (x * math.log(2)).softmax(-1))),
    Bug("hardmax", "that gives the largest score all the weight", KEYS, *replace_softmax(lambda x: (x == x.amax(-1, keepdim=True)).to(x.dtype))),
    Bug("no-max-subtracted", "whose softmax overflows or underflows, because the row's maximum is not subtracted before exp",
        "use torch.softmax, or subtract each query's largest score from its scores before exp",
        override(softmax=softmax_without_maximum), override(softmax=lambda o, scores: softmax_without_maximum(o, scores - scores.max()))),
    Bug("sink-left-out", "whose sink takes no part in the softmax", SINK, override(softmax=lambda o, scores: scores.softmax(-1))),
    Bug("sink-unshifted", "whose sink isn't shifted by the row's maximum as its scores are, so that its share is wrong", "exp(sink - highest) beside exp(scores - highest)",
        override(softmax=softmax_with_unshifted_sink)),
    Bug("sink-as-key", "whose sink's share of the weight goes to the first key", SINK,
        transform(softmax=lambda o, weights: give_sink_to_key(weights, 0)),
        transform(softmax=lambda o, weights: give_sink_to_key(weights, o.x.s - 1))),
    Bug("sink-column-kept", "that drops the weight of a key rather than the sink's, so that values get the weights of other keys",
        "drop the column of the sink's logit: the first if it is concatenated first, the last if last",
        *(override(softmax=lambda o, scores, first=first: drop_key(o, scores, first), mask_weights=lambda o, weights: weights) for first in (True, False))),
    Bug("empty-slots-visible", "that attends to the slots of its cache that are still empty", "mask the slots that no token was written to: slots <= position of the query",
        *(transform(softmax=partial(attend_to_empty_slots, slots=2**n, is_single=is_single)) for n in range(3, 14) for is_single in (True, False))),
    Bug("block-padding-visible", "that attends to the keys of zeros with which its last block of keys is filled", "mask them: their scores are 0, not −inf",
        *(transform(softmax=partial(attend_to_block_padding, size=n)) for n in (2, 3, 4, 8, 16, 32, 64, 128))),
    Bug("scores-unsummed", "whose scores are not summed over the head's entries, so that each entry has weights of its own",
        "a score is the sum of products: (q * k).sum(-1), or q @ k.mT",
        override(mix=lambda o, weights: mix_by_entry(o, o.scale())), override(mix=lambda o, weights: mix_by_entry(o, 1.0))),
    Bug("chunks-not-rescaled", "that adds up chunks of keys without rescaling its sums of values when a later chunk raises the maximum",
        "out = out * (before - highest).exp() + weights @ values, as the sum of the weights is rescaled",
        *(override(mix=lambda o, weights, n=n: mix_chunks(o, weights, 2**n)) for n in range(1, 7))),
    Bug("weights-transposed", "whose weights are transposed before they mix the values", MIX, override(mix=lambda o, weights: weights.mT @ o.v)),
    Bug("keys-as-values", "that mixes keys rather than values", MIX, override(mix=lambda o, weights: weights @ o.k)),
    Bug("queries-as-values", "that mixes queries rather than values", MIX, override(mix=lambda o, weights: weights @ o.q)),
    Bug("values-unmixed", "whose output is its values, without any weights", MIX, override(mix=lambda o, weights: o.v)),
    Bug("mean-of-values", "that averages all values evenly", MIX,
        override(mix=lambda o, weights: o.v.mean(-2, keepdim=True).expand(*weights.shape[:3], -1))),
    Bug("mean-of-weighted-values", "whose weighted values are averaged over the keys rather than added", MIX,
        transform(mix=lambda o, x: x / o.x.s)),
    Bug("scores-as-weights", "that mixes values with the scores rather than with the weights", MIX,
        override(mix=lambda o, weights: o.scores.masked_fill(o.scores == -math.inf, 0.0) @ o.v)),
]
# fmt: on
