"""Bugs in the softmax, its sink, and the mixing of values."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.checker.bugs.family import bug, override, transform
from manyheads.checker.oracle import Attention, Oracle

KEYS = "the softmax is over the keys: dim=-1 where scores are [b, h, t, s], dim=1 where they are [t, s, b, h]"
SINK = (
    "the sink joins the normalizer: it is one more score in each query's softmax, and its weight is dropped"
)
MIX = "a query's output is the sum of the values, each times the query's weight on its key"


class MaskedBetween(Attention):
    """Applies a softmax, the mask, and another softmax."""

    def mask_scores(self, scores: Tensor) -> Tensor:
        return super().mask_scores(scores.softmax(-1))


class NoMaxSubtracted(Attention):
    """Computes exponentials in the candidate's dtype."""

    def softmax(self, scores: Tensor) -> Tensor:
        exp, sink = scores.to(self.dtype).exp(), self.sink()
        share = 0.0 if sink is None else sink.to(self.dtype).exp()
        return (exp / (exp.sum(-1, keepdim=True) + share)).to(scores.dtype)


def formula(function: Callable[[Tensor], Tensor]) -> list[type[Oracle]]:
    """Return oracles with this function in place of the softmax: without a sink, or with it as one more score."""

    def step(_: Attention, scores: Tensor) -> Tensor:
        return function(scores)

    return [override(softmax=step), override(normalize=step)]


def sink_to(key: int) -> Callable[[Attention, Tensor], Tensor]:
    """Return a change that gives a key the weight of the sink."""

    def change(_: Attention, weights: Tensor) -> Tensor:
        rest = torch.zeros_like(weights)
        rest[..., key] = 1 - weights.sum(-1)
        return weights + rest

    return change


# fmt: off
BUGS = [
    bug("softmax-over-queries", "whose softmax is over the queries", KEYS, *formula(lambda x: x.softmax(-2))),
    bug("softmax-over-heads", "whose softmax is over the heads", KEYS, *formula(lambda x: x.softmax(1))),
    bug("softmax-over-batch", "whose softmax is over the batch", KEYS, *formula(lambda x: x.softmax(0))),
    bug("softmax-joint", "whose softmax is over queries and keys together", KEYS, *formula(lambda x: x.flatten(-2).softmax(-1).view_as(x))),
    bug("softmax-twice", "whose softmax is applied twice", "apply the softmax once; cross-entropy and layers may contain one",
        *formula(lambda x: x.softmax(-1).softmax(-1)), transform(mask_weights=lambda o, weights: weights.softmax(-1)), MaskedBetween),
    bug("softmax-missing", "whose scores are not turned into weights by a softmax", f"apply it; {KEYS}", *formula(lambda x: x)),
    bug("log-softmax", "whose weights are logarithms of a softmax", "use softmax, not log_softmax", *formula(lambda x: x.log_softmax(-1))),
    bug("sigmoid", "whose weights are a sigmoid of the scores", KEYS, *formula(lambda x: x.sigmoid())),
    bug("relu", "whose weights are the positive scores", KEYS, *formula(lambda x: x.relu())),
    bug("sum-normalised", "whose scores are divided by their sum", KEYS, *formula(lambda x: x / x.sum(-1, keepdim=True))),
    bug("exp-unnormalised", "whose exponentials are not divided by their sum", KEYS, *formula(lambda x: x.exp())),
    bug("base-two", "whose softmax has the base 2 rather than e", "use exp, not exp2 (or scale the scores by log2(e))",
        *formula(lambda x: (x * math.log(2)).softmax(-1))),
    bug("hardmax", "that gives the largest score all the weight", KEYS, *formula(lambda x: (x == x.amax(-1, keepdim=True)).to(x.dtype))),
    bug("no-max-subtracted", "whose softmax overflows, because the row's maximum is not subtracted before exp",
        "use torch.softmax, or subtract each query's largest score from its scores before exp", NoMaxSubtracted),
    bug("sink-left-out", "whose sink takes no part in the softmax", SINK, override(softmax=lambda o, scores: scores.softmax(-1))),
    bug("sink-as-key", "whose sink's share of the weight goes to the first key", SINK,
        transform(softmax=sink_to(0)), transform(softmax=sink_to(-1))),
    *(bug(name, description, MIX, override(mix=mix)) for name, description, mix in (
        ("weights-transposed", "whose weights are transposed before they mix the values", lambda o, weights: weights.mT @ o.v),
        ("keys-as-values", "that mixes keys rather than values", lambda o, weights: weights @ o.k),
        ("queries-as-values", "that mixes queries rather than values", lambda o, weights: weights @ o.q),
        ("values-unmixed", "whose output is its values, without any weights", lambda o, weights: o.v),
        ("mean-of-values", "that averages all values evenly", lambda o, weights: o.v.mean(-2, keepdim=True).expand(*weights.shape[:3], -1)),
        ("scores-as-weights", "that mixes values with the scores rather than with the weights",
         lambda o, weights: o.scores.masked_fill(o.scores == -math.inf, 0.0) @ o.v),
    )),
]
# fmt: on
