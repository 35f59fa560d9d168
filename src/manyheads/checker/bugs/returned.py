"""Bugs in the weights that are returned, and in the output of calls that return weights.

In the lambdas, `o` is the oracle whose step is overridden, and `w` are its weights `[b, h, t, s]`.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from manyheads.checker.bugs.heads import read_batch_first, read_heads_first
from manyheads.checker.oracle import Oracle
from manyheads.checker.overrides import Bug, override, transform

RETURN = "return the weights that multiply the values: after the mask and the softmax"
AVERAGE = "return each head's weights, or their mean over the heads if the call requests it, e.g. with average_attn_weights=True"
MEAN = "take the mean over the heads"


def average_by(rule: Callable[[Tensor, bool], Tensor]) -> type[Oracle]:
    """Return an oracle that returns `rule(weights, average)`; average: True if the mean is requested."""
    return override(average_weights=lambda o, weights: rule(weights, o.x.average_weights))


# fmt: off
BUGS = [
    Bug("weights-before-mask", "whose returned weights are computed without the mask, unlike its output", RETURN,
        override(returned_weights=lambda o: (o.raw_scores * o.scale()).softmax(-1))),
    Bug("weights-are-scores", "that returns its scores instead of its weights", RETURN,
        override(returned_weights=lambda o: o.scores), override(returned_weights=lambda o: o.raw_scores * o.scale()),
        override(returned_weights=lambda o: o.raw_scores)),
    Bug("weights-are-logarithms", "that returns the logarithms of its weights", RETURN, override(returned_weights=lambda o: o.attention.log())),
    Bug("returned-weights-transposed", "whose returned weights are transposed", RETURN, override(returned_weights=lambda o: o.attention.mT)),
    Bug("returned-heads-reversed", "whose returned weights have their heads in reverse order", RETURN,
        override(returned_weights=lambda o: o.attention.flip(1))),
    Bug("returned-across-batch", "whose returned weights are those of other heads and batch entries, because the two share an axis in another order",
        "weights [b·h, t, s] are weights.view(b, h, t, s); those of [h·b, t, s] are weights.view(h, b, t, s).swapaxes(0, 1)",
        override(returned_weights=lambda o: read_heads_first(o.attention)), override(returned_weights=lambda o: read_batch_first(o.attention))),
    Bug("weights-averaged", "that returns the mean over the heads although each head's weights are requested", AVERAGE,
        average_by(lambda w, average: w.mean(1, keepdim=True))),
    Bug("weights-not-averaged", "that returns each head's weights although their mean over the heads is requested", AVERAGE,
        average_by(lambda w, average: w)),
    Bug("average-inverted", "that averages the returned weights over the heads only if no average is requested", AVERAGE,
        average_by(lambda w, average: w if average else w.mean(1, keepdim=True))),
    Bug("weights-summed", "that returns the sum of its heads' weights rather than their mean", f"{MEAN}, not the sum",
        average_by(lambda w, average: w.sum(1, keepdim=True) if average else w)),
    Bug("weights-averaged-over-batch", "that averages the returned weights over the batch rather than over the heads",
        f"{MEAN}: axis 1 of [b, h, t, s], the last axis of [t, s, b, h]", average_by(lambda w, average: w.mean(0, keepdim=True) if average else w)),
    Bug("first-head-returned", "that returns the first head's weights rather than the mean over the heads", MEAN,
        average_by(lambda w, average: w[:, :1] if average else w)),
    Bug("mask-dropped-with-weights", "that drops its mask when its weights are requested",
        "compute weights and output from the same masked scores, whether weights are returned or not",
        *(transform(**{step: lambda o, mask: None if o.x.need_weights else mask}) for step in ("combine_masks", "given_mask", "padding_mask", "causal_mask"))),
]
# fmt: on
