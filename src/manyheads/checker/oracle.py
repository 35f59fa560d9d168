"""Attention as a recipe: the contract's formula in small steps, so that a mistake is one step replaced.

    sources → weigh → project → split → share → scores · scale → see → hide → normalise → mix → merge → finish

It is written apart from the kernels, for reading and for breaking: nothing in it is fast, and all of it
is checked against `manyheads.attention`. Letters are the project's: b batch, h heads, g key heads,
t queries, s keys, d head size, e model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Roles = tuple[str, ...]
PROJECTIONS: Roles = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Weights:
    """What a module learned, by role: `weight[role]` is `[out, in]`, `bias[role]` `[out]` or absent.

    Heads lie one after the other in q's, k's and v's outputs and in o's input.
    """

    heads: int
    groups: int
    weight: Mapping[str, Tensor]
    bias: Mapping[str, Tensor] = field(default_factory=dict)
    sink: Tensor | None = None  # [h]

    def to(self, dtype: torch.dtype) -> Weights:
        return replace(
            self,
            weight={role: x.to(dtype) for role, x in self.weight.items()},
            bias={role: x.to(dtype) for role, x in self.bias.items()},
            sink=None if self.sink is None else self.sink.to(dtype),
        )

    def absolute(self) -> Weights:
        return replace(
            self,
            weight={role: x.abs() for role, x in self.weight.items()},
            bias={role: x.abs() for role, x in self.bias.items()},
        )


@dataclass(frozen=True)
class Inputs:
    """One call: `[b, t, e]` for what is projected first, `[b, h, t, d]` where heads come split.

    keep is the mask, broadcasting to `[b, h, t, s]`, True = may attend; padding `[b, s]`, True = a token;
    bias is added to the scores; causal hides keys after position i + offset; sink is a logit per head.
    Where weights are asked for, average says that their average over the heads is meant.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    keep: Tensor | None = None
    padding: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    offset: int = 0
    scale: float | None = None
    sink: Tensor | None = None
    weights: bool = False  # are they asked for?
    average: bool = False  # over the heads, or each head's own?

    def but(self, **fields: Any) -> Inputs:
        """The same call with other fields."""
        return replace(self, **fields)

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers, rounded to `dtype`."""
        return self.but(**{n: x.to(dtype) for n, x in self.tensors().items() if x.is_floating_point()})

    @property
    def t(self) -> int:
        return self.query.shape[-2]

    @property
    def s(self) -> int:
        return self.key.shape[-2]


@dataclass(frozen=True)
class Found:
    """What came of a call: the output, and weights where they came, `[b, h, t, s]` or `[b, 1, t, s]`."""

    out: Tensor
    weights: Tensor | None = None


class Recipe:
    """Attention, a step a method, in the dtype of its inputs. A mistake replaces methods of one recipe.

    `x`, the call, and what the steps found (`scores`, `keep`, …) lie on the recipe while it runs, so that
    a mistake can take whatever its author could have taken.
    """

    x: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    raw: Tensor
    scores: Tensor
    kept: Tensor | None
    attention: Tensor
    dtype: torch.dtype  # that the candidate computes in, where a mistake's effect depends on it

    def __init__(self, weights: Weights | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.w, self.dtype = weights, dtype

    def __call__(self, x: Inputs) -> Found:
        self.x = x
        self.q = self.query()  # [b, h, t, d]
        self.k, self.v = self.share(self.key()), self.share(self.value())  # [b, h, s, d]
        self.raw = self.product()  # [b, h, t, s]
        self.kept = self.see()  # broadcasts to [b, h, t, s]
        self.scores = self.hide(self.add(self.raw * self.scale()))
        self.attention = self.empty(self.normalise(self.scores))
        out = self.finish(self.merge(self.mix(self.attention)))
        return Found(out, self.shown(self.report()) if x.weights else None)

    def put(self, **steps: Any) -> None:
        """Replace steps of this recipe, which is how a mistake is made."""
        vars(self).update(steps)

    # -- projections -------------------------------------------------------------------------------

    def source(self, role: str) -> Tensor:
        """What is projected to q, k or v."""
        return {"q": self.x.query, "k": self.x.key, "v": self.x.value}[role]

    def weight(self, role: str) -> Tensor:
        return ({} if self.w is None else self.w.weight)[role]

    def bias(self, role: str) -> Tensor | None:
        return None if self.w is None else self.w.bias.get(role)

    def project(self, role: str, x: Tensor) -> Tensor:
        return linear(x, self.weight(role), self.bias(role))

    def query(self) -> Tensor:
        return self.heads_of("q")

    def key(self) -> Tensor:
        return self.heads_of("k")

    def value(self) -> Tensor:
        return self.heads_of("v")

    def heads_of(self, role: str) -> Tensor:
        x = self.source(role)
        return x if self.w is None else self.split(self.project(role, x), self.count(role))

    def count(self, role: str) -> int:
        assert self.w is not None
        return self.w.heads if role == "q" else self.w.groups

    def split(self, x: Tensor, n: int) -> Tensor:
        return x.unflatten(-1, (n, -1)).transpose(1, 2)  # [b, n, t, d]

    def share(self, x: Tensor) -> Tensor:
        """Key head j serves the query heads j · h/g, …, (j + 1) · h/g − 1."""
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], 1)  # [b, h, s, d]

    # -- scores ------------------------------------------------------------------------------------

    def product(self) -> Tensor:
        return self.q @ self.k.mT  # [b, h, t, s]

    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.x.scale is None else self.x.scale

    def add(self, scores: Tensor) -> Tensor:
        return scores if self.x.bias is None else scores + self.x.bias

    # -- who sees whom -----------------------------------------------------------------------------

    def triangle(self) -> Tensor | None:
        if not self.x.causal:
            return None
        i, j = self.positions()
        return (j <= i)[None, None]  # [1, 1, t, s]

    def positions(self) -> tuple[Tensor, Tensor]:
        i = torch.arange(self.x.t)[:, None] + self.x.offset  # [t, 1]
        return i, torch.arange(self.x.s)[None]  # [1, s]

    def given(self) -> Tensor | None:
        return self.x.keep

    def padded(self) -> Tensor | None:
        return None if self.x.padding is None else self.x.padding[:, None, None]  # [b, 1, 1, s]

    def see(self) -> Tensor | None:
        parts = [part for part in (self.triangle(), self.given(), self.padded()) if part is not None]
        kept = None
        for part in parts:
            kept = part if kept is None else kept & part
        return kept

    def hide(self, scores: Tensor) -> Tensor:
        return scores if self.kept is None else scores.masked_fill(~self.kept, -math.inf)

    # -- weights -----------------------------------------------------------------------------------

    def normalise(self, scores: Tensor) -> Tensor:
        """exp(score) over its sum along the keys, in which a sink takes part; NaN in an empty row."""
        sink = self.sink()
        if sink is None:
            return scores.softmax(-1)
        return torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1).softmax(-1)[..., :-1]

    def sink(self) -> Tensor | None:
        """A logit per head, `[h, 1, 1]`: of the call, or of the module."""
        sink = self.x.sink if self.w is None else self.w.sink
        return None if sink is None else sink[:, None, None]

    def empty(self, weights: Tensor) -> Tensor:
        """A row that may attend to nothing has no weights."""
        return weights if self.kept is None else weights.masked_fill(~self.kept, 0.0)

    def report(self) -> Tensor:
        return self.attention

    def shown(self, weights: Tensor) -> Tensor:
        """What is returned of them, `[b, h, t, s]` or their average `[b, 1, t, s]`."""
        return weights.mean(1, keepdim=True) if self.x.average else weights

    # -- output ------------------------------------------------------------------------------------

    def mix(self, weights: Tensor) -> Tensor:
        return weights @ self.v  # [b, h, t, d]

    def merge(self, x: Tensor) -> Tensor:
        return x if self.w is None else x.transpose(1, 2).flatten(2)  # [b, t, h · d]

    def finish(self, x: Tensor) -> Tensor:
        return self.project("o", x) if self.w is not None and "o" in self.w.weight else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias."""
    return x @ weight.mT if bias is None else x @ weight.mT + bias


def exact(weights: Weights | None, x: Inputs, change: Any = None) -> Found:
    """The recipe in float64 on these numbers, changed by a mistake or not."""
    recipe = Recipe(None if weights is None else weights.to(torch.float64), x.query.dtype)
    if change is not None:
        change(recipe)
    return recipe(x.to(torch.float64))


def allowed(weights: Weights | None, x: Inputs) -> float:
    """The largest error that rounding explains: 4 · plain + eps · (1 + max|score|) · A.

    plain is what the same steps lose in the inputs' own dtype, A the largest output of absolute values.
    This library's own error budget, with twice the room, as other people take the steps in another order.
    """
    plain = Recipe(None if weights is None else weights.to(x.query.dtype), x.query.dtype)(x)
    recipe = Recipe(None if weights is None else weights.to(torch.float64), x.query.dtype)
    true = recipe(x.to(torch.float64))
    recipe.w = None if recipe.w is None else recipe.w.absolute()
    recipe.x = replace(recipe.x, value=recipe.x.value.abs())
    recipe.v = recipe.share(recipe.value())
    bound = recipe.finish(recipe.merge(recipe.attention @ recipe.v))
    largest = float((recipe.raw * recipe.scale()).abs().max()) if recipe.raw.numel() else 0.0
    eps = torch.finfo(x.query.dtype).eps
    return 4 * distance(plain.out, true.out) + eps * (1 + largest) * float(bound.max())


def distance(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; NaN and infinities are 0 apart where both have the same, else inf."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    apart = (a - b).abs()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, apart)
    return float(apart.nan_to_num(math.inf, math.inf).max())
