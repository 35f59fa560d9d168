"""The oracle: attention in small steps, which bugs override.

    source → project → split_heads → encode_heads → repeat_heads → dot_product · scale → cap_scores → add_bias
        → mask_scores → softmax → mask_weights → dropout → mix → merge_heads → gate → project_output → finish

Steps that plain attention doesn't have (`encode_heads`, `cap_scores`, `gate`, `finish`) return their input; a
part of a modern layer, such as a rotary encoding, overrides them (`parts`). It is written for clarity and
independently of the kernels; tests compare it with `manyheads.attention`. The positional encodings in
`encodings` are oracles too. Shapes use the library's letters: b batch, h heads, g key heads, t queries,
s keys, d head size, e model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

ROLES = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Weights:
    """The parameters of a module.

    Attributes:
        heads: The number of query heads.
        key_heads: The number of key heads.
        weight: The weights by role, `[out, in]`. The outputs of q, k and v and the input of o are ordered
            `[heads, head size]`.
        bias: The biases by role, `[out]`.
        sink: The sink's logits, `[h]`.
        other: Parameters and buffers that parts read, such as the scale of a norm, by their path.
    """

    heads: int
    key_heads: int
    weight: Mapping[str, Tensor]
    bias: Mapping[str, Tensor] = field(default_factory=dict)
    sink: Tensor | None = None
    other: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """Return the weights with `change` applied to each tensor."""
        weight, bias, other = (
            {name: change(x) for name, x in each.items()} for each in (self.weight, self.bias, self.other)
        )
        sink = None if self.sink is None else change(self.sink)
        return replace(self, weight=weight, bias=bias, sink=sink, other=other)

    def to(self, dtype: torch.dtype) -> Weights:
        """Return the same weights in another dtype."""
        return self.map(lambda x: x.to(dtype))

    @property
    def head_size(self) -> int:
        """The width of one head of q and k."""
        return self.weight["q"].shape[0] // self.heads

    @property
    def out_width(self) -> int:
        """The width of the output: of the output projection, or of the merged heads if there is none."""
        if "o" in self.weight:
            return self.weight["o"].shape[0]
        return self.weight["v"].shape[0] // self.key_heads * self.heads


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call: `[b, t, e]` for a module with projections, `[b, h, t, d]` for a function.

    Attributes:
        query: The queries, or the tokens that they are projected from.
        key: The keys, likewise.
        value: The values, likewise.
        keep: A mask that broadcasts to `[b, h, t, s]`, True = visible.
        padding: A mask `[b, s]`, True = a token.
        bias: A tensor that is added to the scores.
        causal: Whether to mask keys after position i + offset for query i.
        offset: The position of the first query.
        steps: The lengths of the steps that filled a cache, that of the queries last, if there is one.
        positions: The positions of the keys, `[b, s]`, where query i is the token of key i + offset; 0, 1, …
            if None.
        angles: The angles by which pairs of the keys' entries are rotated, `[b, s, n]`, if the call passes
            their cosines and sines; those of queries likewise.
        scale: The factor of the scores; 1/√d if None.
        sink: The sink's logits, `[h]`.
        need_weights: Whether to return the weights.
        average_weights: Whether to return their average over the heads.
        softcap: The cap of the scores, if the call gives one.
        window: (left, right) if the call gives a window: keys up to `left` positions before and `right` after
            a query are visible, all later ones if `right` is None.
        head_mask: Factors of the weights of each head, `[h]`.
        form: The mask of a call with one mask, a key of the adapter's `forms`; there may be several.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    keep: Tensor | None = None
    padding: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    offset: int = 0
    steps: tuple[int, ...] = ()
    positions: Tensor | None = None
    angles: Tensor | None = None
    scale: float | None = None
    sink: Tensor | None = None
    need_weights: bool = False
    average_weights: bool = False
    softcap: float | None = None
    window: tuple[int, int | None] | None = None
    head_mask: Tensor | None = None
    form: str | None = None

    def but(self, **fields: Any) -> Inputs:
        """Return a copy with some fields replaced."""
        return replace(self, **fields)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the inputs with floating-point tensors converted to `dtype`."""
        floats = {n: x for n, x in self.tensors().items() if x.is_floating_point() and n != "angles"}
        return self.but(**{n: x.to(dtype) for n, x in floats.items()})

    @property
    def b(self) -> int:
        """The batch size."""
        return self.query.shape[0]

    @property
    def t(self) -> int:
        """The number of queries."""
        return self.query.shape[-2]

    @property
    def s(self) -> int:
        """The number of keys."""
        return self.key.shape[-2]


@dataclass(frozen=True)
class Outputs:
    """The result of a call; weights are `[b, h, t, s]` or `[b, 1, t, s]`."""

    out: Tensor
    weights: Tensor | None = None


class Oracle:
    """A computation in steps, in the dtype of its inputs. A bug is a subclass that overrides steps.

    Args:
        weights: The parameters, if there are any.
        dtype: The candidate's dtype, on which the effect of some bugs depends.

    Attributes:
        noun: The name of the computation, for the report.
        axes: The names of the output's axes, by the number of axes.
        tolerance: The largest `difference` of outputs that are considered equal.
    """

    noun: ClassVar[str]
    axes: ClassVar[Mapping[int, tuple[str, ...]]]
    tolerance: ClassVar[float]

    def __init__(self, weights: Weights | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.weights, self.dtype = weights, dtype

    def __call__(self, x: Inputs) -> Outputs:
        """Return the outputs for these inputs."""
        raise NotImplementedError

    @staticmethod
    def difference(got: Tensor, expected: Tensor) -> float:
        """Return the difference between an output and the expected output, infinity for another shape."""
        raise NotImplementedError


class Attention(Oracle):
    """Attention. During a call, the inputs `x` and the results of earlier steps are attributes."""

    noun = "attention"
    axes: ClassVar[Mapping[int, tuple[str, ...]]] = {
        3: ("batch entry", "query", "column"),
        4: ("batch entry", "head", "query", "column"),
    }
    tolerance = 2e-5  # relative; allows for float32 sums in another order

    x: Inputs
    q: Tensor  # [b, h, t, d]
    k: Tensor  # [b, h, s, d]
    v: Tensor  # [b, h, s, d]
    raw_scores: Tensor  # [b, h, t, s]
    scores: Tensor  # [b, h, t, s], scaled and masked
    visible: Tensor | None  # broadcasts to [b, h, t, s]
    attention: Tensor  # [b, h, t, s]
    is_token: Tensor | None = None  # [rows, columns] of an image that a part fills up

    def __call__(self, x: Inputs) -> Outputs:
        """Run all steps."""
        self.x = x
        self.q = self.compute_heads("q")
        self.k, self.v = (self.repeat_heads(self.compute_heads(role)) for role in "kv")
        self.raw_scores = self.dot_product()
        self.visible = self.combine_masks()
        self.scores = self.mask_scores(self.add_bias(self.cap_scores(self.raw_scores * self.scale())))
        self.attention = self.mask_weights(self.softmax(self.scores))
        mixed = self.merge_heads(self.mix(self.dropout(self.attention)))
        out = self.finish(self.project_output(self.gate(mixed)))
        weights = self.average_weights(self.returned_weights()) if x.need_weights else None
        return Outputs(out, weights)

    # -- projections -------------------------------------------------------------------------------

    def source(self, role: str) -> Tensor:
        """Return the input that is projected to q, k or v."""
        return {"q": self.x.query, "k": self.x.key, "v": self.x.value}[role]

    def weight(self, role: str) -> Tensor:
        """Return the weight of a role, `[out, in]`."""
        return ({} if self.weights is None else self.weights.weight)[role]

    def bias(self, role: str) -> Tensor | None:
        """Return the bias of a role, `[out]`."""
        return None if self.weights is None else self.weights.bias.get(role)

    def project(self, role: str, x: Tensor) -> Tensor:
        """Apply the linear layer of a role."""
        bias = self.bias(role)
        return x @ self.weight(role).mT if bias is None else x @ self.weight(role).mT + bias

    def compute_heads(self, role: str) -> Tensor:
        """Return q `[b, h, t, d]`, or k or v `[b, g, s, d]`: the inputs, projected and split for a module."""
        x = self.source(role)
        if self.weights is not None:
            x = self.split_heads(self.project(role, x), self.count_heads(role))
        return self.encode_heads(role, x)

    def count_heads(self, role: str) -> int:
        """Return the number of heads of a role."""
        assert self.weights is not None
        return self.weights.heads if role == "q" else self.weights.key_heads

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Split `[b, t, h · d]` into `[b, h, t, d]`."""
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def encode_heads(self, role: str, x: Tensor) -> Tensor:
        """Return q `[b, h, t, d]`, or k or v `[b, g, s, d]`, normalized or rotated by a part."""
        return x

    def repeat_heads(self, x: Tensor) -> Tensor:
        """Repeat key heads: query heads j · h/g, …, (j + 1) · h/g − 1 use key head j."""
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], 1)

    # -- scores ------------------------------------------------------------------------------------

    def dot_product(self) -> Tensor:
        """Return the unscaled scores, `[b, h, t, s]`."""
        return self.q @ self.k.mT

    def default_scale(self) -> float:
        """Return the scale that is used if the call gives none."""
        return self.q.shape[-1] ** -0.5

    def scale(self) -> float:
        """Return the factor that multiplies the scores."""
        return self.default_scale() if self.x.scale is None else self.x.scale

    def cap_scores(self, scores: Tensor) -> Tensor:
        """Return the scaled scores, capped by the call or by a part."""
        cap = self.x.softcap
        return scores if cap is None else cap * (scores / cap).tanh()

    def add_bias(self, scores: Tensor) -> Tensor:
        """Add the bias of the call to the scores."""
        return scores if self.x.bias is None else scores + self.x.bias

    # -- masks -------------------------------------------------------------------------------------

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of queries `[t, 1]` and keys `[1, s]`."""
        return torch.arange(self.x.t)[:, None] + self.x.offset, torch.arange(self.x.s)[None]

    def is_past(self, i: Tensor, j: Tensor) -> Tensor:
        """Return True where a causal query at position i may attend to the key at position j."""
        return j <= i

    def causal_mask(self) -> Tensor | None:
        """Return `[1, 1, t, s]`, True = visible, or None without a causal mask."""
        return self.is_past(*self.positions())[None, None] if self.x.causal else None

    def given_mask(self) -> Tensor | None:
        """Return the mask of the call, True = visible."""
        return self.x.keep

    def padding_mask(self) -> Tensor | None:
        """Return the padding as `[b, 1, 1, s]`, True = visible."""
        return None if self.x.padding is None else self.x.padding[:, None, None]

    def given_window(self) -> Tensor | None:
        """Return the window of the call, `[t, s]`, True = visible."""
        if self.x.window is None:
            return None
        (i, j), (left, right) = self.positions(), self.x.window
        inside = i - j <= left
        return inside if right is None else inside & (j - i <= right)

    def masks(self) -> list[Tensor]:
        """Return all masks, True = visible, which broadcast to `[b, h, t, s]`."""
        masks = (self.causal_mask(), self.given_mask(), self.padding_mask(), self.given_window())
        return [mask for mask in masks if mask is not None]

    def combine_masks(self) -> Tensor | None:
        """Return the conjunction of all masks, or None without masks."""
        masks = self.masks()
        return reduce(torch.logical_and, masks) if masks else None

    def mask_scores(self, scores: Tensor) -> Tensor:
        """Set masked scores to -inf."""
        return scores if self.visible is None else scores.masked_fill(~self.visible, -math.inf)

    # -- weights -----------------------------------------------------------------------------------

    def sink(self) -> Tensor | None:
        """Return the sink's logits, `[h, 1, 1]`, of the module or of the call."""
        sink = self.x.sink if self.weights is None else self.weights.sink
        return None if sink is None else sink[:, None, None]

    def softmax(self, scores: Tensor) -> Tensor:
        """Normalize over the keys and the sink; the row of a query without visible keys becomes NaN."""
        sink = self.sink()
        if sink is None:
            return self.normalize(scores)
        with_sink = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1)
        return self.normalize(with_sink)[..., :-1]

    def normalize(self, scores: Tensor) -> Tensor:
        """Apply the softmax to scores that include the sink."""
        return scores.softmax(-1)

    def mask_weights(self, weights: Tensor) -> Tensor:
        """Set masked weights to 0, also those of a query without visible keys, and apply the head mask."""
        masked = weights if self.visible is None else weights.masked_fill(~self.visible, 0.0)
        return masked if self.x.head_mask is None else masked * self.x.head_mask[:, None, None]

    def dropout(self, weights: Tensor) -> Tensor:
        """Return the weights; in evaluation, dropout has no effect."""
        return weights

    def returned_weights(self) -> Tensor:
        """Return the weights that a call returns on request, `[b, h, t, s]`."""
        return self.attention

    def average_weights(self, weights: Tensor) -> Tensor:
        """Average over the heads if the call requests it: `[b, 1, t, s]`."""
        return weights.mean(1, keepdim=True) if self.x.average_weights else weights

    # -- output ------------------------------------------------------------------------------------

    def mix(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of values, `[b, h, t, d]`."""
        return weights @ self.v

    def merge_heads(self, x: Tensor) -> Tensor:
        """Merge `[b, h, t, d]` into `[b, t, h · d]` for a module; a function's output keeps its heads."""
        return x if self.weights is None else x.transpose(1, 2).flatten(2)

    def gate(self, x: Tensor) -> Tensor:
        """Return the merged heads, multiplied by a part's gate."""
        return x

    def project_output(self, x: Tensor) -> Tensor:
        """Apply the output projection, if there is one."""
        has_output = self.weights is not None and "o" in self.weights.weight
        return self.project("o", x) if has_output else x

    def finish(self, x: Tensor) -> Tensor:
        """Return the output, with a part's residual connection or norm."""
        return x

    @staticmethod
    def difference(got: Tensor, expected: Tensor) -> float:
        """Return the largest difference, relative to the largest finite magnitude in `expected`."""
        if got.shape != expected.shape:
            return math.inf
        if not got.numel():
            return 0.0
        largest = float(expected.abs().max())
        if math.isfinite(largest):
            return float((got - expected).abs().max().nan_to_num(math.inf)) / max(largest, 1e-3)
        finite = expected[expected.isfinite()].abs()
        return largest_difference(got, expected) / max(float(finite.max()) if finite.numel() else 1.0, 1e-3)


def exact(weights: Weights | None, x: Inputs, oracle: type[Oracle] = Attention) -> Outputs:
    """Run an oracle in float64."""
    return oracle(None if weights is None else weights.to(torch.float64), x.query.dtype)(x.to(torch.float64))


def allowed_error(weights: Weights | None, x: Inputs, attention: type[Oracle] = Attention) -> float:
    """Return the largest error that rounding explains: 4 · E + eps · (1 + max|score|) · A.

    E is the error of the oracle in the inputs' dtype. A is the largest output if values and parameters are
    replaced by their absolute values, with the same attention weights. This is twice the error budget of this
    library, because other implementations compute the steps in another order.

    Args:
        weights: The parameters.
        x: The inputs.
        attention: The class of the oracle: attention, possibly with parts.

    Returns:
        The largest error.
    """
    dtype = x.query.dtype
    rounded = attention(None if weights is None else weights.to(dtype), dtype)(x)
    oracle = attention(None if weights is None else weights.to(torch.float64), dtype)
    assert isinstance(oracle, Attention)
    expected = oracle(x.to(torch.float64))
    oracle.weights = None if oracle.weights is None else oracle.weights.map(torch.abs)
    oracle.x = replace(oracle.x, query=oracle.x.query.abs(), value=oracle.x.value.abs())
    oracle.v = oracle.repeat_heads(oracle.compute_heads("v"))
    mixed = oracle.merge_heads(oracle.attention @ oracle.v)
    bound = oracle.finish(oracle.project_output(oracle.gate(mixed))).abs()
    scores = oracle.raw_scores * oracle.scale()
    largest = float(scores.abs().max()) if scores.numel() else 0.0
    rounding = torch.finfo(dtype).eps * (1 + largest) * float(bound.max())
    return 4 * largest_difference(rounded.out, expected.out) + rounding


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference.

    Two NaNs and equal infinities differ by 0, other non-finite numbers and different shapes by infinity.
    """
    a, b = a.to(torch.float64), b.to(torch.float64)
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(difference.nan_to_num(math.inf, math.inf).max())
