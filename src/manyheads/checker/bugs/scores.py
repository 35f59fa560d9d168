"""Bugs in the scores: their scale, the product of queries and keys, the bias.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import normalize

from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, override, transform

# A fix names an axis only together with the layout it belongs to: heads are laid out in many ways.
SCALE = "divide the scores by the square root of the head size: scores / math.sqrt(d)"
WIDTH = f"{SCALE}, where d is the width of one head and not of all"
PRODUCT = "the scores are the products of queries with keys, q kᵀ"


def merged_width_scale(oracle: Attention) -> float:
    return (oracle.q.shape[1] * oracle.q.shape[-1]) ** -0.5


def model_width_scale(oracle: Attention) -> float:
    return merged_width_scale(oracle) if oracle.weights is None else oracle.x.query.shape[-1] ** -0.5


def scaled_by(*factors: Callable[[Attention], float]) -> list[type[Oracle]]:
    """Return oracles with each factor, in place of the default scale only or of every scale."""
    return [override(**{step: factor}) for factor in factors for step in ("default_scale", "scale")]


def count_key_heads(oracle: Attention) -> int:
    return oracle.x.key.shape[1] if oracle.weights is None else oracle.weights.key_heads


class ScaledAfterSoftmax(Attention):
    """Multiplies the weights by the scale of the call."""

    def scale(self) -> float:
        return 1.0

    def softmax(self, scores: Tensor) -> Tensor:
        return super().softmax(scores) * super().scale()


def reshape_projected_keys(oracle: Attention) -> Tensor:
    """Reshape the output of the projection, `[b, s, h · d]`, rather than transpose each head."""
    x = oracle.project("k", oracle.source("k"))
    return oracle.q @ x.reshape(x.shape[0], oracle.count_heads("k"), -1, x.shape[1])


def cosine_similarity(oracle: Attention) -> Tensor:
    return normalize(oracle.q, dim=-1) @ normalize(oracle.k, dim=-1).mT


def swap_axes(oracle: Attention, x: Tensor) -> Tensor:
    return x if oracle.weights is None else x.transpose(0, 1)


def reshape_axes(oracle: Attention, x: Tensor) -> Tensor:
    """Swap the first two axes of `[b, t, e]` by a reshape of `[t, b, e]`, without moving any number."""
    return x if oracle.weights is None else x.transpose(0, 1).reshape(x.shape)


def reshape_axes_back(oracle: Attention, x: Tensor) -> Tensor:
    """Undo `reshape_axes`."""
    return x if oracle.weights is None else x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)


# fmt: off
BUGS = [
    Bug("unscaled", "whose scores are not divided by √d", SCALE, *scaled_by(lambda o: 1.0)),
    Bug("scaled-by-width", "whose scores are divided by the root of the model width rather than of the head size", WIDTH,
        *scaled_by(model_width_scale, merged_width_scale)),
    Bug("scaled-by-d", "whose scores are divided by d rather than by √d", SCALE, *scaled_by(lambda o: 1 / o.q.shape[-1])),
    Bug("scaled-twice", "whose scores are divided by √d twice", "divide once: either q or the scores, not both",
        *scaled_by(lambda o: 1 / o.q.shape[-1])),
    Bug("multiplied", "whose scores are multiplied by √d rather than divided", SCALE, *scaled_by(lambda o: o.q.shape[-1] ** 0.5)),
    Bug("scaled-by-length", "whose scores are divided by the root of the number of keys", SCALE, *scaled_by(lambda o: o.x.s**-0.5)),
    Bug("scaled-by-heads", "whose scores are divided by the root of the number of heads", SCALE, *scaled_by(lambda o: o.q.shape[1] ** -0.5)),
    Bug("scaled-by-value-width", "whose scores are divided by the root of the values' width", SCALE, *scaled_by(lambda o: o.v.shape[-1] ** -0.5)),
    Bug("scaled-by-fourth-root", "whose scores are divided by the fourth root of d rather than by √d", f"either divide both q and k by it, or {SCALE}",
        *scaled_by(lambda o: o.q.shape[-1] ** -0.25)),
    Bug("scale-on-values", "whose queries and values, not its queries and keys, are divided by the fourth root of d", f"divide q and k, or {SCALE}",
        transform(override(scale=lambda o: o.q.shape[-1] ** -0.25), mix=lambda o, x: x / o.q.shape[-1] ** 0.25)),
    Bug("head-size-miscounted", "whose scores are divided by the root of a head size that counts too few heads, such as the key heads", WIDTH,
        *scaled_by(lambda o: (o.q.shape[1] * o.q.shape[-1] / count_key_heads(o)) ** -0.5,
                   lambda o: ((1 + 2 * count_key_heads(o) / o.q.shape[1]) * o.q.shape[-1]) ** -0.5)),
    Bug("scale-hard-coded", "whose scale is that of heads of another size, such as 1/8 for 64", WIDTH,
        *scaled_by(*(lambda o, size=size: size**-0.5 for size in (32, 64, 128, 256)))),
    Bug("scaled-by-setting", "whose scores are multiplied or divided by another number of its constructor too, such as that of the layer",
        "undo it before the softmax if it only keeps numbers in range"),
    Bug("scale-ignored", "that ignores the scale it is given", "multiply the scores by the scale of the call, where there is one",
        override(scale=lambda o: o.default_scale())),
    Bug("scale-doubled", "that multiplies by the scale it is given and by 1/√d too", "the scale of the call replaces 1/√d",
        override(scale=lambda o: o.default_scale() * (1 if o.x.scale is None else o.x.scale))),
    Bug("scaled-after-softmax", "whose weights, not its scores, are divided by √d", f"divide before the softmax: {SCALE}",
        transform(override(scale=lambda o: 1.0), softmax=lambda o, weights: weights / o.q.shape[-1] ** 0.5),
        transform(softmax=lambda o, weights: weights / o.q.shape[-1] ** 0.5), ScaledAfterSoftmax),
    Bug("queries-as-keys", "whose scores are of queries with queries", PRODUCT, override(dot_product=lambda o: o.q @ o.q.mT)),
    Bug("keys-as-queries", "whose scores are of keys with keys", PRODUCT, override(dot_product=lambda o: o.k @ o.k.mT)),
    Bug("scores-transposed", "whose scores are of keys with queries", "a row of scores belongs to a query: q kᵀ, not k qᵀ",
        override(dot_product=lambda o: o.k @ o.q.mT)),
    Bug("keys-reshaped", "whose keys are reshaped to [d, s] rather than transposed",
        "transpose the last two axes of the keys: a view or reshape to [b, h, d, s] only renames them",
        override(dot_product=lambda o: o.q @ o.k.reshape(o.k.mT.shape)), override(dot_product=reshape_projected_keys)),
    Bug("values-in-scores", "whose scores are of queries with values", "multiply q with k, and the weights with v",
        override(dot_product=lambda o: o.q @ o.v.mT)),
    Bug("scores-negated", "whose scores have the wrong sign", "take the product of q and k as it is, not its negative",
        transform(dot_product=lambda o, scores: -scores)),
    Bug("cosine-scores", "whose queries and keys are normalized to length 1", "use q and k as they are projected, without normalizing them",
        override(dot_product=cosine_similarity), override(dot_product=cosine_similarity, scale=lambda o: 1.0)),
    Bug("bias-ignored", "that ignores the additive mask it is given", "add it to the scores before the softmax",
        override(add_bias=lambda o, scores: scores)),
    Bug("bias-before-scale", "that scales its additive mask along with the scores", "scale the scores first, then add: scores / math.sqrt(d) + bias",
        override(add_bias=lambda o, scores: scores if o.x.bias is None else scores + o.x.bias * o.scale())),
    Bug("batch-as-tokens", "over the batch: it takes [b, t, e] for [t, b, e]", "say batch_first=True, or transpose the first two axes before and after",
        transform(source=swap_axes, project_output=swap_axes)),
    Bug("batch-reshaped", "whose batch and tokens are exchanged by a reshape rather than by a transpose",
        "transpose the two axes, or permute: a view or reshape from [t, b, …] to [b, t, …] only renames them",
        *(transform(**steps) for enter, leave in ((reshape_axes, reshape_axes_back), (reshape_axes_back, reshape_axes))
          for steps in ({"source": enter}, {"merge_heads": leave}, {"source": enter, "merge_heads": leave}))),
]
# fmt: on
