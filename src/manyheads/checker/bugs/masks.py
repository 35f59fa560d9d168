"""Bugs in masks: ignored, of the wrong shape or polarity, or applied in the wrong way.

In the tables, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from manyheads.checker.bugs.heads import FOLD, read_batch_first, read_heads_first
from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, override, transform, wrap

BEFORE = "fill masked scores with -inf before the softmax: scores.masked_fill(masked, float('-inf'))"
TRIL = "a query attends to itself and to what is before it, keys j ≤ i: torch.ones(t, t, dtype=torch.bool).tril()"
EMPTY = "set the weights of a fully masked row to zero: weights.masked_fill(masked, 0.0) after the softmax"
COMBINE = "combine the two: masked = future | ~mask"


def none(*_: object) -> None:
    return None


def same(_: Attention, x: Tensor) -> Tensor:
    return x


# -- how masked scores are filled ------------------------------------------------------------------

Fill = Callable[[Attention, Tensor, Tensor], Tensor]


def filled(fill: Fill, **steps: Callable[..., Tensor]) -> type[Oracle]:
    """Return an oracle that fills masked scores in another way: `fill(oracle, scores, masked)`."""

    def mask_scores(oracle: Attention, scores: Tensor) -> Tensor:
        return scores if oracle.visible is None else fill(oracle, scores, ~oracle.visible)

    return override(mask_scores=mask_scores, **steps)


def set_to(number: float) -> Fill:
    return lambda o, scores, masked: scores.masked_fill(masked, number)


def add(number: float) -> Fill:
    return lambda o, scores, masked: scores + number * masked


def set_to_lowest(oracle: Attention, scores: Tensor, masked: Tensor) -> Tensor:
    return scores.masked_fill(masked, torch.finfo(oracle.dtype).min)


def add_lowest(_: Attention, scores: Tensor, masked: Tensor) -> Tensor:
    """Add the lowest number, which the softmax cancels in a fully masked row."""
    return torch.where(masked.all(-1, keepdim=True), scores, scores.masked_fill(masked, -math.inf))


def filled_with_low(number: float) -> list[type[Oracle]]:
    """Return oracles with this number in place of -inf: set or added, and the weights set to 0 afterwards or not."""
    return [filled(fill(number), **steps) for steps in ({}, {"mask_weights": same}) for fill in (set_to, add)]


def added_separately(mask: str) -> type[Oracle]:
    """Return an oracle that adds the ones and zeros of one mask, and applies the other masks correctly."""

    class AddedSeparately(Attention):
        def add_bias(self, scores: Tensor) -> Tensor:
            visible = getattr(super(), mask)()
            scores = super().add_bias(scores)
            return scores if visible is None else scores + ~visible

    setattr(AddedSeparately, mask, none)
    return AddedSeparately


def add_triangle(oracle: Attention, step: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """Add 1 to the scores of visible keys, which a causal mask of ones and zeros does that is added."""
    triangle = Attention.causal_mask(oracle)
    return step(scores) if triangle is None else step(scores) + triangle


def triangles() -> list[type[Oracle]]:
    """Return oracles with a causal mask in calls that aren't causal, counted from the first or the last key."""

    def mask(
        oracle: Attention, step: Callable[[], Tensor | None], shift: Callable[[int], int]
    ) -> Tensor | None:
        (i, j), x = oracle.positions(), oracle.x
        return step() if x.causal else (j <= i + shift(x.s - x.t))[None, None]

    shifts: list[Callable[[int], int]] = [lambda n: 0, lambda n: max(n, 0), lambda n: n]
    return [wrap(causal_mask=partial(mask, shift=shift)) for shift in shifts]


def divide_visible(oracle: Attention, weights: Tensor) -> Tensor:
    """Divide visible weights by their sum, in the candidate's dtype: small weights are 0 in it."""
    if oracle.visible is None:
        return weights
    visible = oracle.scores.to(oracle.dtype).softmax(-1).masked_fill(~oracle.visible, 0.0)
    return (visible / visible.sum(-1, keepdim=True)).to(weights.dtype)


# -- which keys are visible ------------------------------------------------------------------------


def with_masks(change: Callable[[Attention, Tensor], Tensor]) -> list[type[Oracle]]:
    """Return oracles with both masks of the call changed, or one of them: `change(oracle, visible)`."""
    steps = dict.fromkeys(("given_mask", "padding_mask"), change)
    return [transform(**steps), *(transform(**{step: change}) for step in steps)]


def repeated(read: Callable[[Tensor], Tensor]) -> Callable[[Attention, Tensor], Tensor]:
    """Return a change that repeats a mask for each head in one order of batch and heads, and reads it in the other."""
    return lambda o, visible: read(visible.expand(o.x.b, o.q.shape[1], -1, -1))


def off_by_one(shift: int) -> type[Oracle]:
    """Return an oracle that takes sequences for longer or shorter than they are."""
    return transform(padding_mask=lambda o, x: torch.arange(o.x.s) < x.sum(-1, keepdim=True) + shift)


def shifted_mask(shift: int) -> type[Oracle]:
    """Return an oracle that uses the mask's entries of the tokens before or after."""

    def change(oracle: Attention, visible: Tensor) -> Tensor:
        rows, columns = ((torch.arange(n) + shift).clamp(0, n - 1) for n in visible.shape[-2:])
        return visible[..., rows, :][..., columns]

    return transform(given_mask=change)


def is_of_segments(keep: Tensor | None) -> bool:
    """Return True if a mask `[b, 1, t, t]` keeps the tokens of a query's own segment."""
    return keep is not None and keep.shape[-2] == keep.shape[-1] and torch.equal(keep, keep.mT)


def show_others(oracle: Attention, visible: Tensor, later: bool) -> Tensor:
    """Show the tokens of earlier segments too, or those of later ones."""
    if not is_of_segments(oracle.x.keep):
        return visible
    ones = torch.ones_like(visible)
    return visible | (ones.triu() if later else ones.tril())


def number_by_segment(oracle: Attention, step: Callable[[str], Tensor], role: str) -> Tensor:
    """Return the heads of a role, with positions that begin at 0 in each segment.

    That matters only if tokens attend to other segments.
    """
    keep = oracle.x.keep
    if keep is not None and is_of_segments(keep) and oracle.x.positions is None:
        first = keep[:, 0].to(torch.long).argmax(-1)
        oracle.x = oracle.x.but(positions=torch.arange(oracle.x.s) - first)
    return step(role)


def zeroed_padding(roles: str) -> type[Oracle]:
    """Return an oracle that sets the padded tokens of these roles to 0 before it projects them, and masks none."""

    def source(oracle: Attention, step: Callable[[str], Tensor], role: str) -> Tensor:
        x, padding = step(role), oracle.x.padding
        if padding is None or role not in roles or x.shape[-2] != padding.shape[-1]:
            return x
        return x * (padding[..., None] if x.dim() == 3 else padding[:, None, :, None])

    return wrap(override(padding_mask=none), source=source)


def mask_padded_queries_only(oracle: Attention, visible: Tensor) -> Tensor:
    """Mask padded keys only for queries that are padded too."""
    return visible | visible.mT if oracle.x.t == oracle.x.s else visible


def given_masks(oracle: Attention) -> list[Tensor]:
    return [mask for mask in (oracle.given_mask(), oracle.padding_mask()) if mask is not None]


def invert_joined_masks(oracle: Attention) -> Tensor:
    """Invert the combination of the given masks; without any, this masks every key."""
    inverted = ~reduce(torch.logical_and, given_masks(oracle), torch.ones(1, 1, 1, 1, dtype=torch.bool))
    triangle = oracle.causal_mask()
    return inverted if triangle is None else inverted & triangle


# -- caches ----------------------------------------------------------------------------------------


def put_new_first(oracle: Attention, step: Callable[[str], Tensor], role: str, roles: str) -> Tensor:
    """Return the heads of a role, with the tokens of later steps before those of earlier ones."""
    x = step(role)
    if role not in roles or len(oracle.x.steps) < 2:
        return x
    return torch.cat(x.split(oracle.x.steps, -2)[::-1], -2)


def take_cached(oracle: Attention, step: Callable[[str], Tensor], role: str, of: str, to: str) -> Tensor:
    """Return the heads of a role, those of cached tokens from another role."""
    x, steps = step(role), oracle.x.steps
    return (
        torch.cat((step(of)[..., : -steps[-1], :], x[..., -steps[-1] :, :]), -2)
        if role == to and len(steps) > 1
        else x
    )


# -- fully masked rows -----------------------------------------------------------------------------


def zeroed(whole_batch: bool) -> Callable[[Attention, Tensor], Tensor]:
    """Return a change that zeroes every batch entry with a fully masked row, or the whole batch."""

    def change(oracle: Attention, x: Tensor) -> Tensor:
        if oracle.visible is None:
            return x
        has_empty = ~oracle.visible.any(-1).flatten(1).all(-1)  # [b]
        has_empty = has_empty.any() if whole_batch else has_empty[(...,) + (None,) * (x.dim() - 1)]
        return x.masked_fill(has_empty, 0.0)

    return change


# fmt: off
ALL_MASKS = override(given_mask=none, padding_mask=none)  # where padding is part of the same argument
BUGS = [
    Bug("mask-ignored", "that ignores the mask it is given", BEFORE, override(given_mask=none), override(given_mask=none, add_bias=same),
        override(given_mask=none, padding_mask=none, add_bias=same), ALL_MASKS),
    Bug("padding-ignored", "that attends to padding", f"mask padded keys: {BEFORE}", override(padding_mask=none), ALL_MASKS),
    Bug("causal-ignored", "without a causal mask", f"mask the future, keys j > i: {BEFORE}", override(causal_mask=none)),
    Bug("causal-unasked", "that masks later keys although it isn't causal, such as those of a context",
        "apply the causal mask to self-attention alone, and only if it is asked for", *triangles()),
    Bug("causal-strict", "whose causal mask masks the query's own position too", TRIL, override(is_past=lambda o, i, j: j < i)),
    Bug("causal-late", "whose causal mask leaves one future key visible", TRIL, override(is_past=lambda o, i, j: j <= i + 1)),
    Bug("causal-flipped", "whose causal mask is flipped: a query attends to itself and to the future", TRIL,
        override(is_past=lambda o, i, j: j >= i)),
    Bug("causal-flipped-strict", "whose causal mask leaves only the future visible", TRIL, override(is_past=lambda o, i, j: j > i)),
    Bug("causal-from-the-end", "whose causal mask counts queries from the last key",
        "the first query is at the position of the first key: torch.ones(t, s).tril()",
        override(is_past=lambda o, i, j: j <= i - o.x.offset + o.x.s - o.x.t)),
    Bug("first-key-only", "whose causal mask counts queries from the first key, so that one query with a cache attends to the first key only",
        "the last query is at the position of the last key: torch.ones(t, s).tril(diagonal=s - t)",
        override(is_past=lambda o, i, j: j <= i - o.x.offset)),
    Bug("causal-self-only", "whose causal mask leaves only the query's own position visible", TRIL, override(is_past=lambda o, i, j: j == i)),
    Bug("causal-by-groups", "whose causal mask counts groups of tokens, so that a token attends to later tokens of its group", TRIL,
        *(override(is_past=lambda o, i, j, n=n: j // n <= i // n) for n in (2, 3, 4))),
    Bug("cache-order", "that puts the keys or values of a step before the cached ones, not after them", "torch.cat((cached, new), dim) for keys and for values",
        *(wrap(compute_heads=partial(put_new_first, roles=roles)) for roles in ("kv", "v", "k"))),
    Bug("cached-keys-as-values", "that takes its cached keys for values, or its cached values for keys", "cache and return (keys, values), in this order",
        wrap(compute_heads=partial(take_cached, of="k", to="v")), wrap(compute_heads=partial(take_cached, of="v", to="k"))),
    Bug("masked-zero", "whose masked scores are set to 0, or nearly 0, or multiplied by the mask",
        f"a score of 0 still gets a weight (and 1e-9 is not -1e9); {BEFORE}", filled(set_to(0.0))),
    Bug("masked-one", "whose masked scores are set to 1", f"a score of 1 still gets a weight; {BEFORE}", filled(set_to(1.0))),
    Bug("masked-minus-one", "whose masked scores are set to −1", f"a score of −1 still gets a weight; {BEFORE}", filled(set_to(-1.0))),
    Bug("masked-plus-infinity", "whose masked scores are set to +inf or a huge positive number", f"the sign is wrong; {BEFORE}",
        filled(set_to(1e9)), filled(set_to(math.inf))),
    Bug("masked-ones-added", "that adds its mask of ones and zeros to its scores",
        f"a mask of ones and zeros masks nothing when it is added; {BEFORE}",
        filled(lambda o, scores, masked: scores + ~masked), filled(add(1.0)),
        added_separately("given_mask"), added_separately("padding_mask"), added_separately("causal_mask"),
        wrap(override(causal_mask=none), add_bias=add_triangle)),
    Bug("masked-minus-ten", "that subtracts a small number, not infinity, from its masked scores",
        f"a weight of exp(−10) is left; {BEFORE}", filled(add(-10.0))),
    Bug("masked-low", "whose masked scores are set to a number such as −100, which low scores of visible keys undercut", BEFORE,
        *(variant for number in (-10.0, -20.0, -50.0, -100.0, -200.0) for variant in filled_with_low(number))),
    Bug("masked-after-softmax", "whose masked weights are set to 0 after the softmax, so that rows don't sum to 1", BEFORE,
        override(mask_scores=same, mask_weights=Attention.mask_weights)),
    Bug("masked-infinity-after-softmax", "whose masked weights are set to an infinity after the softmax", f"the sum of the values is then not finite; {BEFORE}",
        *(override(mask_scores=same, mask_weights=lambda o, weights, infinity=infinity: weights if o.visible is None else weights.masked_fill(~o.visible, infinity))
          for infinity in (-math.inf, math.inf))),
    Bug("masked-nan", "whose rows are NaN under a mask, because infinity is multiplied by the 0 of visible keys", f"0 · inf is NaN; {BEFORE}",
        filled(add(-math.inf)), filled(add(-math.inf), mask_weights=same)),
    Bug("masked-and-divided",
        "whose masked weights are set to 0 after the softmax and the rest divided by their sum: 0/0 where masked keys outweigh the visible ones",
        BEFORE, override(mask_scores=same, mask_weights=divide_visible)),
    Bug("polarity-swapped", "that masks what its mask keeps, and keeps what it masks",
        "the mask is read the wrong way round: invert it (~mask), or mask == 0 into mask == 1", *with_masks(lambda o, visible: ~visible),
        transform(combine_masks=lambda o, visible: ~visible), override(combine_masks=invert_joined_masks)),
    Bug("mask-transposed", "whose mask is applied to queries instead of keys",
        "a mask applies to the keys, for each query: with scores [b, h, t, s], padding [b, s] becomes [b, 1, 1, s]",
        *with_masks(lambda o, visible: visible.mT)),
    Bug("first-mask-for-all", "that uses the mask of the first batch entry for all",
        "keep the mask's batch axis: each entry has its own mask", *with_masks(lambda o, visible: visible[:1])),
    Bug("mask-tiled", "that uses the masks of other batch entries, because batch and heads share an axis in another order", FOLD,
        *(variant for read in (read_heads_first, read_batch_first) for variant in with_masks(repeated(read)))),
    Bug("mask-of-everything", "that masks every key as soon as it is given a mask", "invert a boolean mask: ~ of the integers 1 and 0 is −2 and −1, which are both true",
        *with_masks(lambda o, visible: torch.zeros_like(visible))),
    Bug("first-key-unmasked", "that never masks the first key", "compare a mask with 0 by equality, not by the sign of position · mask",
        *with_masks(lambda o, visible: visible | (torch.arange(visible.shape[-1]) == 0))),
    Bug("padding-off-by-one", "whose padding starts one key too early or too late", "mask keys j ≥ length: torch.arange(s) >= lengths[:, None]",
        off_by_one(1), off_by_one(-1)),
    Bug("segment-off-by-one", "whose segments begin one token too late or too early", "token p belongs to the segment whose start is at most p: torch.bucketize(p, ends, right=True)",
        shifted_mask(-1), shifted_mask(1)),
    Bug("segments-by-order", "whose tokens attend to earlier or later segments too",
        "compare the numbers of segments by equality, segment_ids[:, :, None] == segment_ids[:, None], not by order",
        *(transform(steps, given_mask=partial(show_others, later=later))
          for later in (False, True) for steps in (Attention, wrap(compute_heads=number_by_segment)))),
    Bug("padding-for-padding", "that masks padded keys only for padded queries", "mask padded keys for each query: padding [b, s] becomes [b, 1, 1, s]",
        transform(padding_mask=mask_padded_queries_only)),
    Bug("padding-zeroed", "that sets padded tokens to zero, and doesn't mask them", f"a score of 0 still gets a weight; {BEFORE}",
        zeroed_padding("kv"), zeroed_padding("qkv")),
    Bug("masked-in-one-head", "whose mask is applied in the first head only",
        "give the mask a head dimension of 1, so that it broadcasts over all heads",
        transform(combine_masks=lambda o, visible: visible | (torch.arange(o.q.shape[1])[:, None, None] > 0))),
    Bug("mask-or", "that keeps a key visible if any of its masks does, rather than all of them",
        "join what is masked with |, and what is kept with &", override(combine_masks=lambda o: reduce(torch.logical_or, o.masks()) if o.masks() else None)),
    Bug("mask-in-place-of-causal", "that drops its causal mask when another mask is given", COMBINE,
        transform(causal_mask=lambda o, triangle: None if given_masks(o) else triangle)),
    Bug("causal-in-place-of-mask", "that drops the mask it is given where it is causal", COMBINE,
        transform(**dict.fromkeys(("given_mask", "padding_mask"), lambda o, visible: None if o.x.causal else visible))),
    Bug("empty-rows-nan", "whose fully masked rows are NaN", EMPTY, filled(set_to(-math.inf), mask_weights=same)),
    Bug("empty-rows-uniform", "whose fully masked rows average all values, those of future keys too", EMPTY,
        filled(set_to_lowest, mask_weights=same), filled(add_lowest, mask_weights=same)),
    Bug("empty-rows-spoil-others", "that gives zeros for every query if one query is fully masked",
        f"{EMPTY}, and leave the other rows as they are",
        *(transform(**{step: zeroed(whole)}) for step in ("merge_heads", "project_output") for whole in (True, False))),
]
# fmt: on
