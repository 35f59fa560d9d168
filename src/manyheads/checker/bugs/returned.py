"""Bugs in the weights that are returned, and in the output of calls that return weights.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from manyheads.checker.bugs.family import Bug, override, transform
from manyheads.checker.oracle import Oracle

RETURN = "return the weights that mix the values, after the mask and the softmax"
AVERAGE = "return each head's weights, and their mean over the heads only where an average is requested, as by average_attn_weights"
MEAN = "take the mean over the heads"


def average_by(rule: Callable[[Tensor, bool], Tensor]) -> type[Oracle]:
    """Return an oracle with another rule for the weights that a call with or without averaging returns."""
    return override(average_weights=lambda o, weights: rule(weights, o.x.average_weights))


# fmt: off
BUGS = [
    Bug("weights-before-mask", "whose returned weights ignore the mask that its output obeys", RETURN,
        override(returned_weights=lambda o: (o.raw_scores * o.scale()).softmax(-1))),
    Bug("weights-are-scores", "that returns its scores in place of its weights", RETURN,
        override(returned_weights=lambda o: o.scores), override(returned_weights=lambda o: o.raw_scores * o.scale()),
        override(returned_weights=lambda o: o.raw_scores)),
    Bug("weights-are-logarithms", "that returns the logarithms of its weights", RETURN, override(returned_weights=lambda o: o.attention.log())),
    Bug("returned-weights-transposed", "whose returned weights are transposed", RETURN, override(returned_weights=lambda o: o.attention.mT)),
    Bug("returned-heads-reversed", "whose returned weights have their heads in reverse", RETURN,
        override(returned_weights=lambda o: o.attention.flip(1))),
    Bug("weights-averaged", "that returns the average of its heads where each head's weights are requested", AVERAGE,
        average_by(lambda w, average: w.mean(1, keepdim=True))),
    Bug("weights-not-averaged", "that returns each head's weights where their average over the heads is requested", AVERAGE,
        average_by(lambda w, average: w)),
    Bug("average-inverted", "that returns each head's weights where an average is requested, and the average where each head's are", AVERAGE,
        average_by(lambda w, average: w if average else w.mean(1, keepdim=True))),
    Bug("weights-summed", "that returns the sum of its heads' weights rather than their average", f"{MEAN}, not the sum",
        average_by(lambda w, average: w.sum(1, keepdim=True) if average else w)),
    Bug("weights-averaged-over-batch", "that averages the returned weights over the batch rather than over the heads",
        f"{MEAN}: the axis 1 of [b, h, t, s], the last of [t, s, b, h]", average_by(lambda w, average: w.mean(0, keepdim=True) if average else w)),
    Bug("first-head-returned", "that returns the first head's weights rather than the average of all", MEAN,
        average_by(lambda w, average: w[:, :1] if average else w)),
    Bug("mask-dropped-with-weights", "that drops its mask when its weights are requested",
        "compute weights and output from the same masked scores, whether weights are returned or not",
        *(transform(**{step: lambda o, mask: None if o.x.need_weights else mask}) for step in ("combine_masks", "given_mask", "padding_mask", "causal_mask"))),
]
# fmt: on
