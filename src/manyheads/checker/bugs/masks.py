"""Bugs in masks: ignored, of the wrong shape or polarity, or applied in the wrong way."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.checker.bugs.family import bug, override, transform
from manyheads.checker.oracle import Attention, Oracle

BEFORE = "fill masked scores with -inf before the softmax: scores.masked_fill(masked, float('-inf'))"
TRIL = "a query attends to itself and to what is before it, keys j ≤ i: torch.ones(t, t, dtype=torch.bool).tril()"
EMPTY = "set the weights of a row that may attend to nothing to zero: weights.masked_fill(masked, 0.0) after the softmax"
COMBINE = "combine the two: masked = future | ~mask"


def none(*_: object) -> None:
    return None


def same(_: Attention, x: Tensor) -> Tensor:
    return x


# -- how masked scores are filled ------------------------------------------------------------------


def filled(fill: Callable[[Tensor, Tensor], Tensor], **steps: Callable[..., Tensor]) -> type[Oracle]:
    """Return an oracle that fills masked scores in another way: `fill(scores, masked)`."""

    def mask_scores(o: Attention, scores: Tensor) -> Tensor:
        return scores if o.visible is None else fill(scores, ~o.visible)

    return override(mask_scores=mask_scores, **steps)


def filled_with(number: float, **steps: Callable[..., Tensor]) -> type[Oracle]:
    """Return an oracle that sets masked scores to a number."""
    return filled(lambda scores, masked: scores.masked_fill(masked, number), **steps)


def low(number: float) -> list[type[Oracle]]:
    """Return oracles with this number in place of -inf: set or added, and the weights set to 0 afterwards or not."""

    def add(scores: Tensor, masked: Tensor) -> Tensor:
        return scores + number * masked

    variants = []
    for steps in ({}, {"mask_weights": same}):
        variants += [filled_with(number, **steps), filled(add, **steps)]
    return variants


def added_apart(mask: str) -> type[Oracle]:
    """Return an oracle that adds the ones and zeros of one mask, and applies the other masks as they should be."""

    class AddedApart(Attention):
        def add_bias(self, scores: Tensor) -> Tensor:
            visible = getattr(super(), mask)()
            return super().add_bias(scores) if visible is None else super().add_bias(scores) + ~visible

    setattr(AddedApart, mask, none)
    return AddedApart


class MaskedAndDivided(Attention):
    """Divides in the candidate's dtype, in which small weights are 0."""

    def mask_scores(self, scores: Tensor) -> Tensor:
        return scores

    def mask_weights(self, weights: Tensor) -> Tensor:
        if self.visible is None:
            return weights
        rest = self.scores.to(self.dtype).softmax(-1).masked_fill(~self.visible, 0.0)
        return (rest / rest.sum(-1, keepdim=True)).to(weights.dtype)


# -- which keys are visible ------------------------------------------------------------------------


def changed_masks(change: Callable[[Tensor], Tensor]) -> list[type[Oracle]]:
    """Return oracles with both masks of the call changed, or one of them."""

    def maybe(_: Attention, visible: Tensor | None) -> Tensor | None:
        return None if visible is None else change(visible)

    both = {"given_mask": maybe, "padding_mask": maybe}
    return [transform(**both), *(transform(**{step: maybe}) for step in both)]


class NoMaskMasksNothing(Attention):
    """Inverts the combination of the masks given, where an absent mask counts as one that masks nothing."""

    def combine_masks(self) -> Tensor | None:
        kept = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        for mask in (self.given_mask(), self.padding_mask()):
            kept = kept if mask is None else kept & mask
        triangle = self.causal_mask()
        return ~kept if triangle is None else ~kept & triangle


class MaskOr(Attention):
    """Joins masks with the wrong operator."""

    def combine_masks(self) -> Tensor | None:
        visible = None
        for mask in (self.causal_mask(), self.given_mask(), self.padding_mask()):
            if mask is not None:
                visible = mask if visible is None else visible | mask
        return visible


def in_first_head(o: Attention, visible: Tensor | None) -> Tensor | None:
    return None if visible is None else visible | (torch.arange(o.q.shape[1])[:, None, None] > 0)


def without_other_masks(o: Attention, triangle: Tensor | None) -> Tensor | None:
    return triangle if o.given_mask() is None and o.padding_mask() is None else None


def unless_causal(o: Attention, visible: Tensor | None) -> Tensor | None:
    return None if o.x.causal else visible


# -- rows without a visible key --------------------------------------------------------------------


class Lowest(Attention):
    """Fills with the lowest number in place of -inf."""

    def mask_scores(self, scores: Tensor) -> Tensor:
        if self.visible is None:
            return scores
        return scores.masked_fill(~self.visible, torch.finfo(self.dtype).min)

    def mask_weights(self, weights: Tensor) -> Tensor:
        return weights


class LowestAdded(Lowest):
    """Adds the lowest number: a row that is masked entirely is as if nothing were."""

    def mask_scores(self, scores: Tensor) -> Tensor:
        if self.visible is None:
            return scores
        masked = scores.masked_fill(~self.visible, -math.inf)
        return torch.where(self.visible.any(-1, keepdim=True), masked, scores)


def zeroed(whole_batch: bool) -> Callable[[Attention, Tensor], Tensor]:
    """Return a change that zeroes every batch entry with an empty row, or the whole batch."""

    def change(o: Attention, x: Tensor) -> Tensor:
        if o.visible is None:
            return x
        has_empty = ~o.visible.any(-1).flatten(1).all(-1)  # [b]
        has_empty = has_empty.any() if whole_batch else has_empty[(...,) + (None,) * (x.dim() - 1)]
        return x.masked_fill(has_empty, 0.0)

    return change


# fmt: off
ALL_MASKS = override(given_mask=none, padding_mask=none)  # where padding is part of the same argument
BUGS = [
    bug("mask-ignored", "that ignores the mask it is given", BEFORE, override(given_mask=none), override(given_mask=none, add_bias=same),
        override(given_mask=none, padding_mask=none, add_bias=same), ALL_MASKS),
    bug("padding-ignored", "that attends to padding", f"mask padded keys: {BEFORE}", override(padding_mask=none), ALL_MASKS),
    bug("causal-ignored", "without a causal mask", f"mask the future, keys j > i: {BEFORE}", override(causal_mask=none)),
    bug("causal-strict", "whose causal mask masks the query's own position too", TRIL, override(is_past=lambda o, i, j: j < i)),
    bug("causal-late", "whose causal mask leaves one future key visible", TRIL, override(is_past=lambda o, i, j: j <= i + 1)),
    bug("causal-flipped", "whose causal mask is flipped: a query attends to itself and to the future", TRIL,
        override(is_past=lambda o, i, j: j >= i)),
    bug("causal-flipped-strict", "whose causal mask leaves only the future visible", TRIL, override(is_past=lambda o, i, j: j > i)),
    bug("causal-from-the-end", "whose causal mask counts queries from the last key",
        "the first query is at the position of the first key: torch.ones(t, s).tril()",
        override(is_past=lambda o, i, j: j <= i - o.x.offset + o.x.s - o.x.t)),
    bug("first-key-only", "whose causal mask counts queries from the first key, so that one query with a cache attends to the first key only",
        "the last query is at the position of the last key: torch.ones(t, s).tril(diagonal=s - t)",
        override(is_past=lambda o, i, j: j <= i - o.x.offset)),
    bug("causal-self-only", "whose causal mask leaves only the query's own position visible", TRIL, override(is_past=lambda o, i, j: j == i)),
    bug("masked-zero", "whose masked scores are set to 0, or nearly 0, or multiplied by the mask",
        f"a score of 0 still gets a weight (and 1e-9 is not -1e9); {BEFORE}", filled_with(0.0)),
    bug("masked-one", "whose masked scores are set to 1", f"a score of 1 still gets a weight; {BEFORE}", filled_with(1.0)),
    bug("masked-minus-one", "whose masked scores are set to −1", f"a score of −1 still gets a weight; {BEFORE}", filled_with(-1.0)),
    bug("masked-plus-infinity", "whose masked scores are set to +inf or a huge positive number", f"the sign is wrong; {BEFORE}",
        filled_with(1e9), filled_with(math.inf)),
    bug("masked-ones-added", "that adds its mask of ones and zeros to its scores",
        f"a mask of ones and zeros masks nothing when it is added; {BEFORE}",
        filled(lambda scores, masked: scores + ~masked), filled(lambda scores, masked: scores + masked),
        added_apart("given_mask"), added_apart("padding_mask")),
    bug("masked-minus-ten", "that subtracts a small number, not infinity, from its masked scores",
        f"a weight of exp(−10) is left; {BEFORE}", filled(lambda scores, masked: scores - 10.0 * masked)),
    bug("masked-low", "whose masked scores are set to a number such as −100, which low scores of visible keys undercut", BEFORE,
        *(variant for number in (-10.0, -20.0, -50.0, -100.0, -200.0) for variant in low(number))),
    bug("masked-after-softmax", "whose masked weights are set to 0 after the softmax, so that rows don't sum to 1", BEFORE,
        override(mask_scores=same, mask_weights=Attention.mask_weights)),
    bug("masked-and-divided",
        "whose masked weights are set to 0 after the softmax and the rest divided by their sum: 0/0 where masked keys outweigh the visible ones",
        BEFORE, MaskedAndDivided),
    bug("polarity-swapped", "that masks what its mask keeps, and keeps what it masks",
        "the mask is read the wrong way round: invert it (~mask), or mask == 0 into mask == 1", *changed_masks(torch.logical_not),
        transform(combine_masks=lambda o, visible: None if visible is None else ~visible), NoMaskMasksNothing),
    bug("mask-transposed", "whose mask is applied to queries instead of keys",
        "a mask applies to the keys, for each query: with scores [b, h, t, s], padding [b, s] becomes [b, 1, 1, s]",
        *changed_masks(lambda visible: visible.mT)),
    bug("first-mask-for-all", "that uses the mask of the first batch entry for all",
        "keep the mask's batch axis: each entry has its own mask", *changed_masks(lambda visible: visible[:1])),
    bug("masked-in-one-head", "whose mask is applied in the first head only",
        "give the mask a head dimension of 1, so that it broadcasts over all heads", transform(combine_masks=in_first_head)),
    bug("mask-or", "that keeps a key visible if any of its masks does, rather than all of them",
        "join what is masked with |, and what is kept with &", MaskOr),
    bug("mask-in-place-of-causal", "that drops its causal mask when another mask is given", COMBINE, transform(causal_mask=without_other_masks)),
    bug("causal-in-place-of-mask", "that drops the mask it is given where it is causal", COMBINE,
        transform(given_mask=unless_causal, padding_mask=unless_causal)),
    bug("empty-rows-nan", "whose rows that may attend to nothing are NaN", EMPTY, filled_with(-math.inf, mask_weights=same)),
    bug("empty-rows-uniform", "whose rows that may attend to nothing average everything, the future too", EMPTY, Lowest, LowestAdded),
    bug("empty-rows-spoil-others", "that gives zeros for every query where one may attend to nothing",
        f"{EMPTY}, and leave the other rows as they are",
        *(transform(**{step: zeroed(whole)}) for step in ("merge_heads", "project_output") for whole in (True, False))),
]
# fmt: on
