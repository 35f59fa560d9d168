"""Bugs in the weights that are returned, and in the output when weights are asked for."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from manyheads.checker.bugs.family import override, register, transform
from manyheads.checker.oracle import Attention

RETURN = "return the weights that mix the values, after the mask and the softmax"
register("weights-before-mask", "whose returned weights ignore the mask that its output obeys", RETURN,
         override(returned_weights=lambda o: (o.raw_scores * o.scale()).softmax(-1)))  # fmt: skip
register("weights-are-scores", "that returns its scores in place of its weights", RETURN,
         override(returned_weights=lambda o: o.scores),
         override(returned_weights=lambda o: o.raw_scores * o.scale()),
         override(returned_weights=lambda o: o.raw_scores))  # fmt: skip
register(
    "weights-are-logarithms",
    "that returns the logarithms of its weights",
    RETURN,
    override(returned_weights=lambda o: o.attention.log()),
)
register(
    "returned-weights-transposed",
    "whose returned weights are transposed",
    RETURN,
    override(returned_weights=lambda o: o.attention.mT),
)
register("returned-heads-reversed", "whose returned weights have their heads in reverse", RETURN,
         override(returned_weights=lambda o: o.attention.flip(1)))  # fmt: skip

AVERAGE = "return each head's weights, and their mean over the heads only where an average is asked for, as by average_attn_weights"
MEAN = "take the mean over the heads"
AVERAGES: list[tuple[str, str, str, Callable[[Tensor, bool], Tensor]]] = [
    ("weights-averaged", "that returns the average of its heads where each head's weights are asked for", AVERAGE,
     lambda w, average: w.mean(1, keepdim=True)),
    ("weights-not-averaged", "that returns each head's weights where their average over the heads is asked for", AVERAGE,
     lambda w, average: w),
    ("average-inverted", "that returns each head's weights where an average is asked for, and the average where each head's are", AVERAGE,
     lambda w, average: w if average else w.mean(1, keepdim=True)),
    ("weights-summed", "that returns the sum of its heads' weights rather than their average", f"{MEAN}, not the sum",
     lambda w, average: w.sum(1, keepdim=True) if average else w),
    ("weights-averaged-over-batch", "that averages the returned weights over the batch rather than over the heads",
     f"{MEAN}: the axis 1 of [b, h, t, s], the last of [t, s, b, h]", lambda w, average: w.mean(0, keepdim=True) if average else w),
    ("first-head-returned", "that returns the first head's weights rather than the average of all", MEAN,
     lambda w, average: w[:, :1] if average else w),
]  # fmt: skip
for name, description, fix, rule in AVERAGES:
    step = lambda o, weights, rule=rule: rule(weights, o.x.average_weights)  # noqa: E731 (one per row of the table)
    register(name, description, fix, override(average_weights=step))


def only_without_weights(o: Attention, mask: Tensor | None) -> Tensor | None:
    return None if o.x.need_weights else mask


register("mask-dropped-with-weights", "that drops its mask when its weights are asked for",
         "compute weights and output from the same masked scores, whether weights are returned or not",
         *(transform(**{step: only_without_weights}) for step in ("combine_masks", "given_mask", "padding_mask", "causal_mask")))  # fmt: skip
