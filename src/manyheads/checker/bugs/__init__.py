"""The family of known mistakes: each one a step of the recipe done otherwise, said in words, with its mend.

A mistake that can be made in several ways has several variants under one name. `HABITS` are right ways of
doing a step that differ only together with a mistake, such as what a masked score is filled with.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.checker.oracle import Recipe, linear

Change = Callable[[Recipe], None]


@dataclass(frozen=True)
class Mistake:
    """`is_` ends the sentence "it agrees with attention …"; `mend` says what to change."""

    name: str
    is_: str
    mend: str
    variants: tuple[Change, ...]


FAMILY: dict[str, Mistake] = {}


def mistake(name: str, is_: str, mend: str) -> Callable[[Change], Change]:
    """Add a change to the family; a name given again adds a variant."""

    def add(change: Change) -> Change:
        before = FAMILY.get(name)
        FAMILY[name] = Mistake(name, is_, mend, (*(before.variants if before else ()), change))
        return change

    return add


def also(name: str) -> Callable[[Change], Change]:
    """Another way to make the same mistake."""
    return lambda change: mistake(name, FAMILY[name].is_, FAMILY[name].mend)(change)


# -- scores ----------------------------------------------------------------------------------------


def _scaled(name: str, is_: str, mend: str, number: Callable[[Recipe], float]) -> None:
    def change(r: Recipe) -> None:
        r.put(scale=lambda: number(r))

    def default(r: Recipe) -> None:  # only where the call gives none
        r.put(scale=lambda: number(r) if r.x.scale is None else r.x.scale)

    mistake(name, is_, mend)(default)
    mistake(name, is_, mend)(change)


# Words of a mend name an axis only together with the layout that it is of: heads lie in many.
RIGHT = "divide the scores by the square root of the head size: scores / math.sqrt(d)"
PRODUCT = "a query's scores are its products with the keys, q kᵀ"

_scaled("unscaled", "whose scores are not divided by √d", RIGHT, lambda r: 1.0)
_scaled("scaled-by-width", "whose scores are divided by the root of the model width rather than of the head size",
        f"{RIGHT}, where d is the width of one head and not of all", lambda r: _width(r) ** -0.5)  # fmt: skip
_scaled("scaled-by-width", "whose scores are divided by the root of the model width rather than of the head size",
        f"{RIGHT}, where d is the width of one head and not of all",
        lambda r: (r.q.shape[1] * r.q.shape[-1]) ** -0.5)  # fmt: skip
_scaled("scaled-by-d", "whose scores are divided by d rather than by √d", RIGHT, lambda r: 1 / r.q.shape[-1])
_scaled("scaled-twice", "whose scores are divided by √d twice",
        "divide once: either q or the scores, not both", lambda r: 1 / r.q.shape[-1])  # fmt: skip
_scaled(
    "multiplied",
    "whose scores are multiplied by √d rather than divided",
    RIGHT,
    lambda r: r.q.shape[-1] ** 0.5,
)
_scaled("scaled-by-length", "whose scores are divided by the root of the number of keys", RIGHT,
        lambda r: r.x.s**-0.5)  # fmt: skip
_scaled("scaled-by-heads", "whose scores are divided by the root of the number of heads", RIGHT,
        lambda r: r.q.shape[1] ** -0.5)  # fmt: skip
_scaled("scaled-by-value-width", "whose scores are divided by the root of the values' width", RIGHT,
        lambda r: r.v.shape[-1] ** -0.5)  # fmt: skip
_scaled("scale-ignored", "that ignores the scale it is given",
        "multiply the scores by the scale of the call, where there is one", lambda r: r.q.shape[-1] ** -0.5)  # fmt: skip
_scaled("scale-doubled", "that multiplies by the scale it is given and by 1/√d too",
        "the scale of the call stands in place of 1/√d, not beside it",
        lambda r: r.q.shape[-1] ** -0.5 * (1 if r.x.scale is None else r.x.scale))  # fmt: skip


def _width(r: Recipe) -> int:
    return r.x.query.shape[-1] if r.w is not None else r.q.shape[1] * r.q.shape[-1]


@mistake("scaled-after-softmax", "whose weights, not its scores, are divided by √d",
         "divide before the softmax: " + RIGHT)  # fmt: skip
def _(r: Recipe) -> None:
    normalise = r.normalise
    r.put(scale=lambda: 1.0)
    r.put(normalise=lambda scores: normalise(scores) / r.q.shape[-1] ** 0.5)


@also("scaled-after-softmax")
def _(r: Recipe) -> None:
    normalise = r.normalise
    r.put(normalise=lambda scores: normalise(scores) / r.q.shape[-1] ** 0.5)


@also("scaled-after-softmax")
def _(r: Recipe) -> None:
    normalise, scale = r.normalise, r.scale
    r.put(scale=lambda: 1.0)
    r.put(normalise=lambda scores: normalise(scores) * scale())


@mistake(
    "queries-as-keys",
    "whose scores are of queries with queries",
    PRODUCT,
)
def _(r: Recipe) -> None:
    r.put(product=lambda: r.q @ r.q.mT)


@mistake("keys-as-queries", "whose scores are of keys with keys", PRODUCT)
def _(r: Recipe) -> None:
    r.put(product=lambda: r.k @ r.k.mT)


@mistake("scores-transposed", "whose scores are of keys with queries",
         "a row of scores belongs to a query: q kᵀ, not k qᵀ")  # fmt: skip
def _(r: Recipe) -> None:
    r.put(product=lambda: r.k @ r.q.mT)


@mistake(
    "keys-reshaped",
    "whose keys are reshaped to [d, s] rather than transposed",
    "transpose the keys' last two axes: a view or reshape to [b, h, d, s] only renames them",
)
def _(r: Recipe) -> None:
    r.put(product=lambda: r.q @ r.k.reshape(*r.k.shape[:2], r.k.shape[3], r.k.shape[2]))


@also("keys-reshaped")  # straight from the projection
def _(r: Recipe) -> None:
    def product() -> Tensor:
        x = r.project("k", r.source("k"))  # [b, s, h · d]
        return r.q @ x.reshape(x.shape[0], r.count("k"), -1, x.shape[1])

    r.put(product=product)


@mistake(
    "values-in-scores", "whose scores are of queries with values", "multiply q with k, and the weights with v"
)
def _(r: Recipe) -> None:
    r.put(product=lambda: r.q @ r.v.mT)


@mistake(
    "scores-negated",
    "whose scores have the wrong sign",
    "take the product of q and k as it is, not its negative",
)
def _(r: Recipe) -> None:
    product = r.product
    r.put(product=lambda: -product())


@mistake("cosine-scores", "whose queries and keys are brought to length 1",
         "use q and k as they are projected, without normalising them")  # fmt: skip
def _(r: Recipe) -> None:
    unit = torch.nn.functional.normalize
    r.put(product=lambda: unit(r.q, dim=-1) @ unit(r.k, dim=-1).mT)


@also("cosine-scores")
def _(r: Recipe) -> None:
    unit = torch.nn.functional.normalize
    r.put(product=lambda: unit(r.q, dim=-1) @ unit(r.k, dim=-1).mT)
    r.put(scale=lambda: 1.0)


@mistake(
    "bias-ignored", "that ignores the mask of numbers it is given", "add it to the scores before the softmax"
)
def _(r: Recipe) -> None:
    r.put(add=lambda scores: scores)


@mistake("bias-before-scale", "that scales what is added to the scores along with them",
         "scale the scores first, then add: scores / math.sqrt(d) + bias")  # fmt: skip
def _(r: Recipe) -> None:
    r.put(add=lambda scores: scores if r.x.bias is None else scores + r.x.bias * r.scale())


@mistake(
    "batch-as-tokens",
    "over the batch: it takes [b, t, e] for [t, b, e]",
    "say batch_first=True, or transpose the first two axes before and after",
)
def _(r: Recipe) -> None:
    source, finish = r.source, r.finish
    r.put(
        source=lambda role: source(role).transpose(0, 1) if r.w is not None else source(role),
        finish=lambda x: finish(x).transpose(0, 1) if r.w is not None else finish(x),
    )


def _renamed(x: Tensor) -> Tensor:
    """[b, t, e] that lies as [t, b, e], with its first two axes renamed and not moved."""
    return x.transpose(0, 1).reshape(x.shape)


def _reshaped(
    entering: Callable[[Tensor], Tensor] | None, leaving: Callable[[Tensor], Tensor] | None
) -> None:
    def change(r: Recipe) -> None:
        source, merge = r.source, r.merge
        if r.w is not None and entering is not None:
            r.put(source=lambda role: entering(source(role)))
        if r.w is not None and leaving is not None:
            r.put(merge=lambda x: leaving(merge(x)))

    mistake(
        "batch-reshaped",
        "whose batch and tokens change places by a reshape rather than by a transpose",
        "transpose the two axes, or permute: a view or reshape from [t, b, …] to [b, t, …] only renames them",
    )(change)


def _moved_back(x: Tensor) -> Tensor:
    """The same of [b, t, e] that is taken to be [t, b, e]."""
    return x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)


for there, back in ((_renamed, _moved_back), (_moved_back, _renamed)):
    _reshaped(there, None)
    _reshaped(None, back)
    _reshaped(there, back)


# -- masks -----------------------------------------------------------------------------------------

BEFORE = "fill masked scores with -inf before the softmax: scores.masked_fill(hidden, float('-inf'))"


@mistake("mask-ignored", "that ignores the mask it is given", BEFORE)
def _(r: Recipe) -> None:
    r.put(given=lambda: None)


@mistake("padding-ignored", "that attends to padding", f"hide padded keys: {BEFORE}")
def _(r: Recipe) -> None:
    r.put(padded=lambda: None)


@also("mask-ignored")
def _(r: Recipe) -> None:
    r.put(given=lambda: None, add=lambda scores: scores)


@also("mask-ignored")
def _(r: Recipe) -> None:
    r.put(given=lambda: None, padded=lambda: None)
    r.put(add=lambda scores: scores)


@also("mask-ignored")
@also("padding-ignored")  # where padding is said by the same argument
def _(r: Recipe) -> None:
    r.put(given=lambda: None, padded=lambda: None)


@mistake("causal-ignored", "without a causal mask", f"hide the future, keys j > i: {BEFORE}")
def _(r: Recipe) -> None:
    r.put(triangle=lambda: None)


def _triangle(name: str, is_: str, mend: str, sees: Callable[[Tensor, Tensor, Recipe], Tensor]) -> None:
    def change(r: Recipe) -> None:
        def triangle() -> Tensor | None:
            return sees(*r.positions(), r)[None, None] if r.x.causal else None

        r.put(triangle=triangle)

    mistake(name, is_, mend)(change)


TRIL = "a query sees itself and what is before it, keys j ≤ i: torch.ones(t, t, dtype=torch.bool).tril()"

_triangle(
    "causal-strict", "whose causal mask hides the query's own position too", TRIL, lambda i, j, r: j < i
)
_triangle("causal-late", "whose causal mask shows one key of the future", TRIL, lambda i, j, r: j <= i + 1)
_triangle("causal-flipped", "whose causal mask is the wrong way up: a query sees itself and the future", TRIL,
          lambda i, j, r: j >= i)  # fmt: skip
_triangle(
    "causal-flipped-strict",
    "whose causal mask shows the future and nothing else",
    TRIL,
    lambda i, j, r: j > i,
)
_triangle("causal-from-the-end", "whose causal mask counts queries from the last key",
          "the first query stands at the first key: torch.ones(t, s).tril()",
          lambda i, j, r: j <= i - r.x.offset + r.x.s - r.x.t)  # fmt: skip
_triangle("first-key-only",
          "whose causal mask counts queries from the first key, so that one query against a cache sees the first key only",
          "the last query stands at the last key: torch.ones(t, s).tril(diagonal=s - t)",
          lambda i, j, r: j <= i - r.x.offset)  # fmt: skip
_triangle(
    "causal-self-only", "whose causal mask shows the query's own position only", TRIL, lambda i, j, r: j == i
)


def _filled(name: str, is_: str, mend: str, fill: Callable[[Recipe, Tensor, Tensor], Tensor]) -> None:
    def change(r: Recipe) -> None:
        r.put(hide=lambda scores: scores if r.kept is None else fill(r, scores, r.kept))

    mistake(name, is_, mend)(change)


_filled("masked-zero", "whose masked scores are set to 0, or nearly 0, or multiplied by the mask",
        f"a score of 0 still gets a weight (and 1e-9 is not -1e9); {BEFORE}", lambda r, x, kept: x.masked_fill(~kept, 0.0))  # fmt: skip
_filled("masked-one", "whose masked scores are set to 1", f"a score of 1 still gets a weight; {BEFORE}",
        lambda r, x, kept: x.masked_fill(~kept, 1.0))  # fmt: skip
_filled("masked-minus-one", "whose masked scores are set to −1", f"a score of −1 still gets a weight; {BEFORE}",
        lambda r, x, kept: x.masked_fill(~kept, -1.0))  # fmt: skip
_filled("masked-plus-infinity", "whose masked scores are set to +inf or a huge positive number",
        f"the sign is wrong; {BEFORE}", lambda r, x, kept: x.masked_fill(~kept, 1e9))  # fmt: skip
_filled("masked-plus-infinity", "whose masked scores are set to +inf or a huge positive number",
        f"the sign is wrong; {BEFORE}", lambda r, x, kept: x.masked_fill(~kept, math.inf))  # fmt: skip
ONES = (
    "that adds its mask of ones and zeros to its scores",
    f"a mask of ones and zeros hides nothing when it is added; {BEFORE}",
)
_filled("masked-ones-added", *ONES, lambda r, x, kept: x + kept)
_filled("masked-ones-added", *ONES, lambda r, x, kept: x + ~kept)


@also("masked-ones-added")  # the given mask alone, the others as they should be
def _(r: Recipe) -> None:
    _added(r, "given")


@also("masked-ones-added")
def _(r: Recipe) -> None:
    _added(r, "padded")


def _added(r: Recipe, which: str) -> None:
    add, mask = r.add, getattr(r, which)
    r.put(**{which: lambda: None})

    def added(scores: Tensor) -> Tensor:
        kept = mask()
        return add(scores) if kept is None else add(scores) + ~kept

    r.put(add=added)


_filled("masked-minus-ten", "that takes a small number, not infinity, off its masked scores",
        f"a weight of exp(−10) is left; {BEFORE}", lambda r, x, kept: x - 10.0 * ~kept)  # fmt: skip


def _low(number: float) -> None:
    """A number in place of −inf: set or taken off, and the weights set to 0 afterwards or left."""
    is_ = (
        "whose masked scores are made low by a number such as −100, which low scores of visible keys undercut"
    )

    def set_(r: Recipe) -> None:
        r.put(hide=lambda x: x if r.kept is None else x.masked_fill(~r.kept, number))

    def added(r: Recipe) -> None:
        r.put(hide=lambda x: x if r.kept is None else x + number * ~r.kept)

    def left(change: Change) -> Change:
        def both(r: Recipe) -> None:
            change(r)
            r.put(empty=lambda weights: weights)

        return both

    for change in (set_, added, left(set_), left(added)):
        mistake("masked-low", is_, BEFORE)(change)


for number in (-10.0, -20.0, -50.0, -100.0, -200.0):
    _low(number)


@mistake("masked-after-softmax", "whose masked weights are set to 0 after the softmax, so that rows don't sum to 1",
         BEFORE)  # fmt: skip
def _(r: Recipe) -> None:
    r.put(hide=lambda scores: scores)
    r.put(empty=lambda w: w if r.kept is None else w.masked_fill(~r.kept, 0.0))


@mistake("masked-and-divided",
         "whose masked weights are set to 0 after the softmax and the rest divided by their sum: 0/0 where hidden keys outweigh the visible ones",
         BEFORE)  # fmt: skip
def _(r: Recipe) -> None:
    def empty(weights: Tensor) -> Tensor:
        if r.kept is None:
            return weights
        rest = r.scores.to(r.dtype).softmax(-1).masked_fill(~r.kept, 0.0)  # in which small weights are 0
        return (rest / rest.sum(-1, keepdim=True)).to(weights.dtype)

    r.put(hide=lambda scores: scores, empty=empty)


POLARITY = "the mask is read the wrong way round: turn it over (~mask), or mask == 0 into mask == 1"


@mistake("polarity-swapped", "that hides what its mask keeps, and keeps what it hides", POLARITY)
def _(r: Recipe) -> None:
    given, padded = r.given, r.padded
    r.put(given=lambda: _turned(given()))
    r.put(padded=lambda: _turned(padded()))


@also("polarity-swapped")
def _(r: Recipe) -> None:
    given = r.given
    r.put(given=lambda: _turned(given()))


@also("polarity-swapped")
def _(r: Recipe) -> None:
    padded = r.padded
    r.put(padded=lambda: _turned(padded()))


@also("polarity-swapped")
def _(r: Recipe) -> None:
    see = r.see
    r.put(see=lambda: _turned(see()))


@also("polarity-swapped")  # and no mask is a mask that hides nothing
def _(r: Recipe) -> None:
    given, padded = r.given, r.padded

    def see() -> Tensor | None:
        parts = [p for p in (given(), padded()) if p is not None]
        hidden = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        for part in parts:
            hidden = hidden & part
        triangle = r.triangle()
        return ~hidden if triangle is None else ~hidden & triangle

    r.put(see=see)


def _turned(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else ~keep


KEYS = (
    "a mask lies on the keys, for each query: beside scores [b, h, t, s], padding [b, s] becomes [b, 1, 1, s]"
)


@mistake("mask-transposed", "whose mask lies on queries where it should lie on keys", KEYS)
def _(r: Recipe) -> None:
    given, padded = r.given, r.padded
    r.put(given=lambda: _flipped(given()))
    r.put(padded=lambda: _flipped(padded()))


@also("mask-transposed")
def _(r: Recipe) -> None:
    given = r.given
    r.put(given=lambda: _flipped(given()))


@also("mask-transposed")
def _(r: Recipe) -> None:
    padded = r.padded
    r.put(padded=lambda: _flipped(padded()))


def _flipped(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.mT


@mistake("first-mask-for-all", "that uses the mask of the batch's first entry for all",
         "keep the mask's batch axis: each entry has a mask of its own")  # fmt: skip
def _(r: Recipe) -> None:
    given, padded = r.given, r.padded
    r.put(given=lambda: _first(given()))
    r.put(padded=lambda: _first(padded()))


@also("first-mask-for-all")
def _(r: Recipe) -> None:
    given = r.given
    r.put(given=lambda: _first(given()))


@also("first-mask-for-all")
def _(r: Recipe) -> None:
    padded = r.padded
    r.put(padded=lambda: _first(padded()))


def _first(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep[:1]


@mistake("masked-in-one-head", "whose mask reaches the first head only",
         "give the mask a head dimension of 1, so that it broadcasts over all heads")  # fmt: skip
def _(r: Recipe) -> None:
    def see() -> Tensor | None:
        kept = Recipe.see(r)
        if kept is None:
            return None
        first = torch.arange(r.q.shape[1])[:, None, None] == 0
        return kept | ~first

    r.put(see=see)


@mistake("mask-or", "that shows a key which any of its masks shows, rather than all of them",
         "join what is hidden with |, and what is kept with &")  # fmt: skip
def _(r: Recipe) -> None:
    def see() -> Tensor | None:
        kept = None
        for part in (r.triangle(), r.given(), r.padded()):
            if part is not None:
                kept = part if kept is None else kept | part
        return kept

    r.put(see=see)


@mistake("mask-in-place-of-causal", "that drops its causal mask when another mask is given",
         "join the two: hidden = future | ~mask")  # fmt: skip
def _(r: Recipe) -> None:
    triangle = r.triangle
    r.put(triangle=lambda: None if r.given() is not None or r.padded() is not None else triangle())


@mistake("causal-in-place-of-mask", "that drops the mask it is given where it is causal",
         "join the two: hidden = future | ~mask")  # fmt: skip
def _(r: Recipe) -> None:
    given, padded = r.given, r.padded
    r.put(given=lambda: None if r.x.causal else given())
    r.put(padded=lambda: None if r.x.causal else padded())


EMPTY = "give a row that may attend to nothing zeros: weights.masked_fill(hidden, 0.0) after the softmax"


@mistake("empty-rows-nan", "whose rows that may attend to nothing are NaN", EMPTY)
def _(r: Recipe) -> None:
    r.put(empty=lambda weights: weights)
    r.put(hide=lambda x: x if r.kept is None else x.masked_fill(~r.kept, -math.inf))


@mistake(
    "empty-rows-uniform", "whose rows that may attend to nothing average everything, the future too", EMPTY
)
def _(r: Recipe) -> None:
    r.put(empty=lambda weights: weights)
    r.put(hide=lambda x: x if r.kept is None else x.masked_fill(~r.kept, torch.finfo(r.dtype).min))


@also("empty-rows-uniform")
def _(r: Recipe) -> None:
    def hide(
        x: Tensor,
    ) -> Tensor:  # the lowest number is added; a row of which all are hidden is as if none were
        if r.kept is None:
            return x
        return torch.where(r.kept.any(-1, keepdim=True), x.masked_fill(~r.kept, -math.inf), x)

    r.put(empty=lambda weights: weights)
    r.put(hide=hide)


def _spoilt(name: str, is_: str, step: str, one_for_all: bool) -> None:
    """Zeros for what holds a row that may attend to nothing, from a step on."""

    def change(r: Recipe) -> None:
        before = getattr(r, step)

        def zeroed(x: Tensor) -> Tensor:
            y: Tensor = before(x)
            if r.kept is None:
                return y
            gone = ~r.kept.any(-1).flatten(1).all(-1)  # [b]: has this entry an empty row?
            gone = gone.any() if one_for_all else gone[(...,) + (None,) * (y.dim() - 1)]
            return y.masked_fill(gone, 0.0)

        r.put(**{step: zeroed})

    mistake(name, is_, f"{EMPTY}, and leave the other rows as they are")(change)


for step in ("merge", "finish"):
    for one_for_all in (True, False):
        _spoilt("empty-rows-spoil-others", "that gives zeros for every query where one may attend to nothing",
                step, one_for_all)  # fmt: skip


# -- softmax ---------------------------------------------------------------------------------------

KEYWISE = (
    "the softmax goes over the keys: dim=-1 where scores are [b, h, t, s], dim=1 where they are [t, s, b, h]"
)


def _normal(name: str, is_: str, mend: str, how: Callable[[Tensor, Recipe], Tensor]) -> None:
    def change(r: Recipe) -> None:
        r.put(normalise=lambda scores: how(scores, r))

    def beside(r: Recipe) -> None:  # a sink, which is one score more
        def normalise(scores: Tensor) -> Tensor:
            sink = r.sink()
            if sink is None:
                return how(scores, r)
            return how(torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1), r)[..., :-1]

        r.put(normalise=normalise)

    mistake(name, is_, mend)(change)
    if name != "sink-left-out":
        mistake(name, is_, mend)(beside)


_normal("softmax-over-queries", "whose softmax goes over queries", KEYWISE, lambda x, r: x.softmax(-2))
_normal("softmax-over-heads", "whose softmax goes over heads", KEYWISE, lambda x, r: x.softmax(1))
_normal("softmax-over-batch", "whose softmax goes over the batch", KEYWISE, lambda x, r: x.softmax(0))
_normal("softmax-joint", "whose softmax goes over queries and keys together", KEYWISE,
        lambda x, r: x.flatten(-2).softmax(-1).view_as(x))  # fmt: skip
_normal("softmax-twice", "whose softmax is applied twice", "apply the softmax once; cross-entropy and layers may hold one",
        lambda x, r: x.softmax(-1).softmax(-1))  # fmt: skip
_normal("softmax-missing", "whose scores are not turned into weights by a softmax",
        f"take it; {KEYWISE}", lambda x, r: x)  # fmt: skip
_normal("log-softmax", "whose weights are logarithms of a softmax", "use softmax, not log_softmax",
        lambda x, r: x.log_softmax(-1))  # fmt: skip
_normal("sigmoid", "whose weights are a sigmoid of the scores", KEYWISE, lambda x, r: x.sigmoid())
_normal("relu", "whose weights are the positive scores", KEYWISE, lambda x, r: x.relu())
_normal(
    "sum-normalised",
    "whose scores are divided by their sum",
    KEYWISE,
    lambda x, r: x / x.sum(-1, keepdim=True),
)
_normal("exp-unnormalised", "whose exponentials are not divided by their sum", KEYWISE, lambda x, r: x.exp())
_normal("base-two", "whose softmax has the base 2 rather than e", "use exp, not exp2 (or scale the scores by log2(e))",
        lambda x, r: (x * math.log(2)).softmax(-1))  # fmt: skip
_normal("hardmax", "that gives the largest score all the weight", KEYWISE,
        lambda x, r: (x == x.amax(-1, keepdim=True)).to(x.dtype))  # fmt: skip


@mistake("no-max-subtracted", "whose softmax overflows, as the row's maximum is not taken off before exp",
         "use torch.softmax, or take each query's largest score off its scores before exp")  # fmt: skip
def _(r: Recipe) -> None:
    def normalise(scores: Tensor) -> Tensor:
        e = scores.to(r.dtype).exp()
        sink = r.sink()
        share = 0.0 if sink is None else sink.to(r.dtype).exp()
        return (e / (e.sum(-1, keepdim=True) + share)).to(scores.dtype)

    r.put(normalise=normalise)


@also("softmax-twice")
def _(r: Recipe) -> None:
    empty = r.empty
    r.put(empty=lambda weights: empty(weights).softmax(-1))


@also("softmax-twice")  # with the mask between the two
def _(r: Recipe) -> None:
    hide = r.hide
    r.put(hide=lambda scores: hide(scores.softmax(-1)))


SINK = (
    "the sink joins the normaliser: it is one score more in each query's softmax, and its weight is left away"
)

_normal("sink-left-out", "whose sink takes no part in the softmax", SINK, lambda x, r: x.softmax(-1))


@mistake("sink-as-key", "whose sink's share of the weight goes to the first key", SINK)
def _(r: Recipe) -> None:
    normalise = r.normalise

    def share(scores: Tensor) -> Tensor:
        weights = normalise(scores)
        rest = torch.zeros_like(weights)
        rest[..., 0] = 1 - weights.sum(-1)
        return weights + rest

    r.put(normalise=share)


@also("sink-as-key")
def _(r: Recipe) -> None:
    normalise = r.normalise

    def share(scores: Tensor) -> Tensor:
        weights = normalise(scores)
        rest = torch.zeros_like(weights)
        rest[..., -1] = 1 - weights.sum(-1)
        return weights + rest

    r.put(normalise=share)


# -- mixing and heads ------------------------------------------------------------------------------


def _mixed(name: str, is_: str, mend: str, how: Callable[[Tensor, Recipe], Tensor]) -> None:
    def change(r: Recipe) -> None:
        r.put(mix=lambda weights: how(weights, r))

    mistake(name, is_, mend)(change)


MIX = "a query's output is the sum of the values, each times the query's weight on its key"

_mixed(
    "weights-transposed",
    "whose weights are transposed before they mix the values",
    MIX,
    lambda w, r: w.mT @ r.v,
)
_mixed("keys-as-values", "that mixes keys rather than values", MIX, lambda w, r: w @ r.k)
_mixed("queries-as-values", "that mixes queries rather than values", MIX, lambda w, r: w @ r.q)
_mixed("values-unmixed", "whose output is its values, without any weights", MIX, lambda w, r: r.v)
_mixed("mean-of-values", "that averages all values evenly", MIX, lambda w, r: r.v.mean(-2, keepdim=True).expand_as(r.v)
       if r.x.t == r.x.s else r.v.mean(-2, keepdim=True).expand(*w.shape[:3], r.v.shape[-1]))  # fmt: skip
_mixed("scores-as-weights", "that mixes values with the scores rather than with the weights", MIX,
       lambda w, r: r.scores.masked_fill(r.scores == -math.inf, 0.0) @ r.v)  # fmt: skip

SPLIT = (
    "split the width, then move the axes to [b, h, t, d]: x.view(b, t, h, d).transpose(1, 2) of x [b, t, e], "
    "x.view(t, b, h, d).permute(1, 2, 0, 3) of x [t, b, e]; a reshape alone mixes tokens"
)
MERGE = (
    "move the axes back, then merge the last two: of x [b, h, t, d], x.transpose(1, 2).flatten(2) is [b, t, e], "
    "x.permute(2, 0, 1, 3).flatten(2) is [t, b, e]; a reshape alone mixes tokens"
)


@mistake("split-without-transpose", "whose heads are split by a reshape without a transpose", SPLIT)
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x.reshape(x.shape[0], n, x.shape[1], -1))


@also("split-without-transpose")  # of [t, b, e]
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x.transpose(0, 1).reshape(x.shape[0], n, x.shape[1], -1))


@also("split-without-transpose")  # of a packed [b, t, 3 e]
def _(r: Recipe) -> None:
    def packed(role: str) -> Tensor:
        every = torch.cat([r.project(one, r.source(one)) for one in "qkv"], -1)
        b, t, _ = every.shape
        return every.reshape(b, 3, r.count(role), t, -1)[:, "qkv".index(role)]

    if r.w is not None:
        r.put(heads_of=packed)


@mistake(
    "split-after-transpose",
    "whose heads are split by a reshape after the transpose rather than before it",
    SPLIT,
)
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x.transpose(1, 2).reshape(x.shape[0], n, x.shape[1], -1))


@mistake("merge-without-transpose", "whose heads are merged by a reshape without a transpose", MERGE)
def _(r: Recipe) -> None:
    r.put(merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1))


@also("merge-without-transpose")  # to [t, b, e]
def _(r: Recipe) -> None:
    r.put(merge=lambda x: x.reshape(x.shape[2], x.shape[0], -1).transpose(0, 1))


ORDER = "the width is (heads, head size) in that order, wherever it is split and merged"


@mistake("split-the-other-way", "whose heads are split as [d, h] and merged as [h, d]", ORDER)
def _(r: Recipe) -> None:
    r.put(split=_interleaved)


@mistake("merge-the-other-way", "whose heads are split as [h, d] and merged as [d, h]", ORDER)
def _(r: Recipe) -> None:
    r.put(merge=lambda x: x.permute(0, 2, 3, 1).flatten(2))


@mistake("heads-interleaved",
         "whose heads are split and merged as [d, h]: an equivalent network, with its weights in another order",
         f"trained so it is as good, but weights of other attention don't fit it; for those, {ORDER}")  # fmt: skip
def _(r: Recipe) -> None:
    r.put(split=_interleaved, merge=lambda x: x.permute(0, 2, 3, 1).flatten(2))


def _interleaved(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (-1, n)).permute(0, 3, 1, 2)


@mistake("heads-as-tokens", "of each token's heads over its own heads, not of tokens over tokens",
         "move the heads' axis away from the last two before the product of q and k, and back after it; " + SPLIT)  # fmt: skip
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x.unflatten(-1, (n, -1)), merge=lambda x: x.flatten(2))  # [b, t, h, d]


@also("heads-as-tokens")  # and merged as if they had been moved
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x.unflatten(-1, (n, -1)))
    r.put(merge=lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


@mistake("heads-ignored", "of one head over the whole width", SPLIT)
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x[:, None])


@also("heads-ignored")
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: x[:, None])
    r.put(scale=lambda: (r.q.shape[-1] / (r.w.heads if r.w else 1)) ** -0.5)


@mistake(
    "first-head-for-all", "whose heads all use the first head's weights", "give each head its own scores"
)
def _(r: Recipe) -> None:
    empty = r.empty
    r.put(empty=lambda weights: empty(weights)[:, :1].expand_as(weights))


@also("first-head-for-all")
def _(r: Recipe) -> None:
    r.put(split=lambda x, n: Recipe.split(r, x, n)[:, :1].expand(-1, n, -1, -1))


@also("first-head-for-all")
def _(r: Recipe) -> None:
    r.put(mix=lambda weights: weights[:, :1] @ r.v)


@mistake("heads-averaged", "whose heads all use the average of their weights",
         "mix each head's values with its own weights; average only what is shown")  # fmt: skip
def _(r: Recipe) -> None:
    empty = r.empty
    r.put(empty=lambda weights: empty(weights).mean(1, keepdim=True).expand_as(weights))


@mistake("heads-reversed", "whose heads are merged in reverse", "concatenate the heads in their order")
def _(r: Recipe) -> None:
    merge = r.merge
    r.put(merge=lambda x: merge(x.flip(1)))


SHARE = "query head i uses key head i // (h / g): repeat_interleave(h // g) along the heads' axis, not repeat"


@mistake("key-heads-tiled", "whose key heads are repeated in the wrong order", SHARE)
def _(r: Recipe) -> None:
    r.put(share=lambda x: x.repeat(1, r.q.shape[1] // x.shape[1], 1, 1))


@mistake("key-heads-first-only", "whose query heads all use the first key head", SHARE)
def _(r: Recipe) -> None:
    def first(x: Tensor) -> Tensor:
        return x if x.shape[1] == r.q.shape[1] else x[:, :1].expand(-1, r.q.shape[1], -1, -1)

    r.put(share=first)


@also("key-heads-first-only")
def _(r: Recipe) -> None:
    r.put(share=lambda x: x[:, :1].expand(-1, r.q.shape[1], -1, -1))


@mistake(
    "value-heads-tiled", "whose value heads, unlike its key heads, are repeated in the wrong order", SHARE
)
def _(r: Recipe) -> None:
    mix = r.mix

    def other(weights: Tensor) -> Tensor:
        v = r.value()
        r.v = v.repeat(1, r.q.shape[1] // v.shape[1], 1, 1)
        return mix(weights)

    r.put(mix=other)


# -- projections -----------------------------------------------------------------------------------


def _roles(name: str, is_: str, mend: str, **roles: str) -> None:
    """The weights of other roles in place of a role's own."""

    mistake(name, is_, mend)(lambda r: _instead(r, roles))


def _swapped(name: str, is_: str, mend: str, **roles: str) -> None:
    """Whole heads of other roles in place of a role's own, where no weights are projected."""

    def change(r: Recipe) -> None:
        source = r.source
        r.put(source=lambda role: source(roles.get(role) or role))
        if r.w is not None:
            _instead(r, roles)

    mistake(name, is_, mend)(change)


def _instead(r: Recipe, roles: dict[str, str]) -> None:
    r.put(
        project=lambda role, x: linear(x, r.weight(roles.get(role) or role), r.bias(roles.get(role) or role))
    )


OWN = "use each projection for what its name says: q = W_q x, k = W_k y, v = W_v y"

_roles("q-k-swapped", "whose query and key weights are swapped", OWN, q="k", k="q")
_roles("k-v-swapped", "whose key and value weights are swapped", OWN, k="v", v="k")
_roles("q-v-swapped", "whose query and value weights are swapped", OWN, q="v", v="q")
_roles(
    "roles-turned", "whose query, key and value weights have each other's places", OWN, q="k", k="v", v="q"
)
_roles(
    "roles-turned", "whose query, key and value weights have each other's places", OWN, q="v", k="q", v="k"
)
_roles("key-from-query-weights", "whose keys are projected by the query weights", OWN, k="q")
_roles("query-from-key-weights", "whose queries are projected by the key weights", OWN, q="k")
_roles("value-from-key-weights", "whose values are projected by the key weights", OWN, v="k")
_roles("key-from-value-weights", "whose keys are projected by the value weights", OWN, k="v")
_roles("value-from-query-weights", "whose values are projected by the query weights", OWN, v="q")
_roles("one-projection", "whose queries, keys and values all come from the query weights", OWN, k="q", v="q")
_roles("output-from-value-weights", "whose output is projected by the value weights", OWN, o="v")
_swapped(
    "q-k-arguments-swapped",
    "whose queries and keys are swapped",
    "q comes first: attention(q, k, v)",
    q="k",
    k="q",
)
_swapped("k-v-arguments-swapped", "whose keys and values are swapped", "k comes before v: attention(q, k, v)",
         k="v", v="k")  # fmt: skip
_swapped("q-v-arguments-swapped", "whose queries and values are swapped", "attention(q, k, v), in that order",
         q="v", v="q")  # fmt: skip


def _unprojected(name: str, is_: str, role: str) -> None:
    def change(r: Recipe) -> None:
        project = r.project
        r.put(project=lambda which, x: x if which == role else project(which, x))

    mistake(name, is_, f"project it: use the {role} weights")(change)


_unprojected("value-unprojected", "whose values are not projected", "v")
_unprojected("key-unprojected", "whose keys are not projected", "k")
_unprojected("query-unprojected", "whose queries are not projected", "q")
_unprojected("output-missing", "without its output projection", "o")


@mistake("output-twice", "whose output projection is applied twice", "apply the output projection once")
def _(r: Recipe) -> None:
    finish = r.finish
    r.put(finish=lambda x: r.project("o", finish(x)))


def _unbiased(name: str, is_: str, mend: str, roles: str) -> None:
    def change(r: Recipe) -> None:
        bias = r.bias
        r.put(bias=lambda role: None if role in roles else bias(role))

    mistake(name, is_, mend)(change)


ADD = "add the bias that the layer holds: x @ weight.T + bias"
_unbiased("input-bias-missing", "without the biases of its query, key and value projections", ADD, "qkv")
_unbiased("input-bias-missing", "without the biases of its query, key and value projections", ADD, "qv")
_unbiased("query-bias-missing", "without the bias of its query projection", ADD, "q")
_unbiased("key-bias-missing", "without the bias of its key projection", ADD, "k")
_unbiased("value-bias-missing", "without the bias of its value projection", ADD, "v")
_unbiased("output-bias-missing", "without the bias of its output projection", ADD, "o")
_unbiased("biases-missing", "without any of its biases", ADD, "qkvo")


@mistake("biases-exchanged", "whose query and value biases are swapped", OWN)
def _(r: Recipe) -> None:
    bias = r.bias
    r.put(bias=lambda role: bias({"q": "v", "v": "q"}.get(role) or role))


@mistake("output-bias-twice", "whose output bias is added twice", "add it once; nn.Linear adds its own")
def _(r: Recipe) -> None:
    finish = r.finish

    def twice(x: Tensor) -> Tensor:
        b = r.bias("o")
        return finish(x) if b is None else finish(x) + b

    r.put(finish=twice)


def _transposed(name: str, is_: str, roles: str) -> None:
    def change(r: Recipe) -> None:
        weight = r.weight
        r.put(weight=lambda role: weight(role).mT if role in roles else weight(role))

    mistake(name, is_, "nn.Linear computes x @ weight.T: transpose the weight, or call the layer")(change)


_transposed("weight-transposed", "whose projections use their weights transposed", "qkvo")
_transposed("weight-transposed", "whose projections use their weights transposed", "qkv")
_transposed("weight-transposed", "whose projections use their weights transposed", "o")
_transposed("weight-transposed", "whose projections use their weights transposed", "q")
_transposed("weight-transposed", "whose projections use their weights transposed", "k")
_transposed("weight-transposed", "whose projections use their weights transposed", "v")


@mistake(
    "residual-added", "that adds its input to its output", "leave the residual to the block around attention"
)
def _(r: Recipe) -> None:
    finish = r.finish
    r.put(finish=lambda x: finish(x) + r.x.query)


@mistake("context-ignored", "whose keys and values come from the queries' sequence rather than from the other one",
         "project keys and values from the context (memory), queries from x")  # fmt: skip
def _(r: Recipe) -> None:
    r.put(source=lambda role: r.x.query)


@mistake("values-from-x", "whose values come from the queries' sequence rather than from the keys'",
         "project keys and values from the same sequence")  # fmt: skip
def _(r: Recipe) -> None:
    source = r.source
    r.put(source=lambda role: r.x.query if role == "v" else source(role))


@mistake("keys-from-x", "whose keys come from the queries' sequence rather than from the values'",
         "project keys and values from the same sequence")  # fmt: skip
def _(r: Recipe) -> None:
    source = r.source
    r.put(source=lambda role: r.x.query if role == "k" else source(role))


@mistake("queries-from-context", "whose queries come from the keys' sequence", "project queries from x")
def _(r: Recipe) -> None:
    source = r.source
    r.put(source=lambda role: r.x.key if role == "q" else source(role))


@mistake("key-as-value-input", "that ignores its value input and projects the key input",
         "project values from the value argument")  # fmt: skip
def _(r: Recipe) -> None:
    source = r.source
    r.put(source=lambda role: source("k") if role == "v" else source(role))


@mistake(
    "output-scaled",
    "whose output is divided by the number of heads",
    "concatenate the heads, don't average them",
)
def _(r: Recipe) -> None:
    merge = r.merge
    r.put(merge=lambda x: merge(x) / x.shape[1])


@mistake("output-scaled-by-d", "whose output is divided by √d", "scale the scores, not the output")
def _(r: Recipe) -> None:
    mix = r.mix
    r.put(mix=lambda w: mix(w) / r.q.shape[-1] ** 0.5)


# -- returned weights ------------------------------------------------------------------------------


def _reported(name: str, is_: str, mend: str, how: Callable[[Recipe], Tensor]) -> None:
    def change(r: Recipe) -> None:
        r.put(report=lambda: how(r))

    mistake(name, is_, mend)(change)


RETURN = "return the weights that mix the values, after the mask and the softmax"
_reported("weights-before-mask", "whose returned weights ignore the mask that its output obeys", RETURN,
          lambda r: (r.raw * r.scale()).softmax(-1))  # fmt: skip
_reported("weights-are-scores", "that returns its scores in place of its weights", RETURN, lambda r: r.scores)
_reported(
    "weights-are-scores",
    "that returns its scores in place of its weights",
    RETURN,
    lambda r: r.raw * r.scale(),
)
_reported("weights-are-scores", "that returns its scores in place of its weights", RETURN, lambda r: r.raw)
_reported(
    "weights-are-logarithms",
    "that returns the logarithms of its weights",
    RETURN,
    lambda r: r.attention.log(),
)
_reported(
    "returned-weights-transposed", "whose returned weights are transposed", RETURN, lambda r: r.attention.mT
)
_reported("returned-heads-reversed", "whose returned weights have their heads in reverse", RETURN,
          lambda r: r.attention.flip(1))  # fmt: skip


AVERAGE = "return each head's weights, and their mean over the heads only where an average is asked for, as by average_attn_weights"


def _shown(name: str, is_: str, mend: str, how: Callable[[Tensor, bool], Tensor]) -> None:
    def change(r: Recipe) -> None:
        r.put(shown=lambda weights: how(weights, r.x.average))

    mistake(name, is_, mend)(change)


_shown("weights-averaged", "that returns the average of its heads where each head's weights are asked for", AVERAGE,
       lambda w, average: w.mean(1, keepdim=True))  # fmt: skip
_shown("weights-not-averaged", "that returns each head's weights where their average over the heads is asked for",
       AVERAGE, lambda w, average: w)  # fmt: skip
_shown("average-inverted", "that returns each head's weights where an average is asked for, and the average where each head's are",
       AVERAGE, lambda w, average: w if average else w.mean(1, keepdim=True))  # fmt: skip
_shown("weights-summed", "that returns the sum of its heads' weights rather than their average",
       "take the mean over the heads, not the sum",
       lambda w, average: w.sum(1, keepdim=True) if average else w)  # fmt: skip
_shown("weights-averaged-over-batch", "that averages the returned weights over the batch rather than over the heads",
       "take the mean over the heads: the axis 1 of [b, h, t, s], the last of [t, s, b, h]",
       lambda w, average: w.mean(0, keepdim=True) if average else w)  # fmt: skip
_shown("first-head-returned", "that returns the first head's weights rather than the average of all",
       "take the mean over the heads", lambda w, average: w[:, :1] if average else w)  # fmt: skip


@mistake("mask-dropped-with-weights", "that drops its mask when its weights are asked for",
         "compute weights and output from the same masked scores, whether weights are returned or not")  # fmt: skip
def _(r: Recipe) -> None:
    see = r.see
    r.put(see=lambda: None if r.x.weights else see())


@also("mask-dropped-with-weights")
def _(r: Recipe) -> None:
    given = r.given
    r.put(given=lambda: None if r.x.weights else given())


@also("mask-dropped-with-weights")
def _(r: Recipe) -> None:
    padded = r.padded
    r.put(padded=lambda: None if r.x.weights else padded())


@also("mask-dropped-with-weights")
def _(r: Recipe) -> None:
    triangle = r.triangle
    r.put(triangle=lambda: None if r.x.weights else triangle())


# -- habits ----------------------------------------------------------------------------------------


def _lowest(r: Recipe) -> None:
    """The lowest number in place of −inf."""
    r.put(hide=lambda x: x if r.kept is None else x.masked_fill(~r.kept, torch.finfo(r.dtype).min))


def _bare(r: Recipe) -> None:
    """Nothing set to 0 after the softmax."""
    r.put(empty=lambda weights: weights)


HABITS: tuple[tuple[Change, ...], ...] = ((), (_bare,), (_lowest,), (_lowest, _bare))
