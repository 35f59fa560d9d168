"""Bugs in the parts besides attention: norms, rotary encodings, windows, biases, caps, gates and residuals.

A bug replaces a part by others: by the same part with another attribute, by an oracle that computes it wrongly, or
by nothing.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.checker.bugs import encodings
from manyheads.checker.encodings import Rotary
from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, compose, override, transform, wrap
from manyheads.checker.parts import (
    ACTIVATIONS,
    Alibi,
    Bias,
    Gate,
    Norm,
    NoWindow,
    NullKeys,
    OwnKeys,
    Part,
    ProjectedDistances,
    RelativeKeys,
    Residual,
    RotaryPositions,
    Scale,
    ShiftedWindow,
    Softcap,
    TableBias,
    Window,
    read,
)

Replacement = tuple[Part, ...]
Variants = Callable[[Any], list[Replacement]]


@dataclass(frozen=True)
class Wrong(Part):
    """A part that is computed wrongly: an oracle with other steps."""

    steps: type[Oracle]

    @cached_property
    def oracle(self) -> type[Oracle]:
        """The oracle with these steps."""
        return self.steps


class PartBug(Bug):
    """A known bug of a kind of part.

    Args:
        name: its name in reports.
        description: continues the sentence "attention …".
        fix: how to write it instead.
        kind: the class of the part, or several.
        replace: returns the replacements of a part, one for each way in which code can have the bug.
    """

    def __init__(
        self,
        name: str,
        description: str,
        fix: str,
        kind: type[Part] | tuple[type[Part], ...],
        replace: Variants,
    ) -> None:
        super().__init__(name, description, fix)
        self.kind, self.replace = kind, replace


def part_bugs(part: Part, parts: Replacement) -> Iterator[tuple[str, list[Replacement]]]:
    """Yield the name of each bug that one of several parts can have, and what may replace it."""
    for bug in BUGS:
        if isinstance(part, bug.kind) and (variants := bug.replace(part)):
            yield bug.name, variants
    windows = [each.size for each in parts if isinstance(each, Window)]
    if isinstance(part, RotaryPositions) and windows:
        yield "rotary-offset-trimmed", changed(begin=lambda o, steps: min(sum(steps[:-1]), windows[0]))(part)
    norms = [each for each in parts if isinstance(each, Norm) and each != part]
    if isinstance(part, Norm) and norms:
        yield "norm-shared", [(replace(part, scale=each.scale, bias=each.bias),) for each in norms]


def changed(**fields: Any) -> Variants:
    """Return a function that changes fields of a part; a field may be a list of values."""

    def variants(part: Part) -> list[Replacement]:
        found: list[Part] = [part]
        for name, values in fields.items():
            choices = values if isinstance(values, list) else [values]
            found = [replace(each, **{name: value}) for each in found for value in choices]
        return [(each,) for each in found if each != part]

    return variants


def without(part: Part) -> list[Replacement]:
    """Return nothing in place of a part."""
    return [()]


def wrong(*steps: type[Oracle]) -> list[Replacement]:
    """Return oracles in place of a part."""
    return [(Wrong(each),) for each in steps]


# -- rotary encodings ------------------------------------------------------------------------------


def rotary_bugs() -> Iterator[PartBug]:
    """Yield the bugs of rotary encodings alone, inside of attention."""
    for bug in encodings.BUGS:
        if issubclass(bug.variants[0], Rotary) and bug.name != "rotary-base":

            def variants(part: RotaryPositions, bug: Bug = bug) -> list[Replacement]:
                composed = [cast(type[Rotary], compose(part.encoding, each)) for each in bug.variants]
                return [(replace(part, encoding=encoding),) for encoding in composed]

            yield PartBug(bug.name, bug.description, bug.fix, RotaryPositions, variants)


def on_grid(*mistakes: str) -> Variants:
    """Return a function that returns encodings of an image's tokens with each of these mistakes."""
    orders = [False, True]  # of rows and columns, both of which may be meant
    return lambda part: changed(mistake=list(mistakes), columns_first=orders)(part) if part.axes else []


def opposite(part: RotaryPositions) -> list[Replacement]:
    """Return an encoding that rotates keys the other way than queries."""
    swapped = replace(part, direction=-part.direction)
    return [(replace(part, roles=one), replace(swapped, roles=other)) for one, other in ("qk", "kq")]


def exchanged_rest(part: RotaryPositions) -> list[Replacement]:
    """Return an encoding whose entries that aren't rotated are those of another role."""

    def encode(
        oracle: Attention, step: Callable[..., Tensor], role: str, x: Tensor, of: str, to: str
    ) -> Tensor:
        x = step(role, x)
        if role != to:
            return x
        other = oracle.split_heads(oracle.project(of, oracle.source(to)), oracle.count_heads(of))
        return torch.cat((x[..., : part.size], other[..., part.size :]), -1)

    if part.size == part.head_size:
        return []
    return [(part, Wrong(wrap(encode_heads=partial(encode, of=of, to=to)))) for of, to in ("qk", "kq", "vk")]


def other_bases(part: RotaryPositions) -> list[Replacement]:
    """Return other usual bases."""
    return [(replace(part, base=base),) for base in (*encodings.BASES, 10000.0) if base != part.base]


def miscounted(part: RotaryPositions) -> list[Replacement]:
    """Return an encoding whose cache counts calls, sequences, heads, key heads or the head size.

    It counts them in each step, or reads them once off a cache that isn't empty.
    """

    def begin(oracle: Attention, steps: tuple[int, ...], n: int, most: int) -> int:
        weights = oracle.weights
        sizes = () if weights is None else (weights.heads, weights.key_heads, weights.head_size)
        return min(len(steps) - 1, most) * (1, oracle.x.b, *sizes)[n]

    return changed(begin=[partial(begin, n=n, most=most) for most in (sys.maxsize, 1) for n in range(5)])(
        part
    )


def empty_slot(part: Window) -> list[Replacement]:
    """Return a window whose oldest key and value are zeros in steps that fill the cache for the first time."""

    def encode(oracle: Attention, step: Callable[..., Tensor], role: str, x: Tensor) -> Tensor:
        x, call = step(role, x), oracle.x
        if role == "q" or not call.steps or not call.steps[0] < part.size <= call.s:
            return x
        return x * (torch.arange(call.s) != call.s - part.size)[:, None]

    return [(part, Wrong(wrap(encode_heads=encode)))]


def misplaced_window(part: Window) -> list[Replacement]:
    """Return a window whose queries are counted without the cache, or shifted by it the wrong way."""

    def visible(oracle: Attention, n: int) -> Tensor:
        i, j = oracle.positions()
        return part.visible(i - n * oracle.x.offset, j)

    return wrong(*(wrap(masks=lambda o, step, n=n: [*step(), visible(o, n)]) for n in (1, 2)))


def empty_keys(part: Window) -> list[Replacement]:
    """Return a window with keys of zeros where it reaches beyond the tokens, always or without a mask only."""

    def softmax(oracle: Attention, step: Callable[[Tensor], Tensor], scores: Tensor, always: bool) -> Tensor:
        i, x = oracle.positions()[0], oracle.x
        if part.kind.startswith("chunks"):
            n = part.size * (i < part.size)
            last = (x.s - 1) // part.size  # chunk
            n = n + part.size * (i // part.size == last) if "both" in part.kind else n
        else:
            n = (part.size - 1 - i).clamp_min(0)
            n = n + (i + part.size - x.s).clamp_min(0) if part.kind == "both sides" else n
        n = n if always or (x.keep is None and x.padding is None) else 0 * n
        zeros = n.to(scores).log().expand(*scores.shape[:3], 1)  # n scores of 0
        return step(torch.cat((scores, zeros), -1))[..., :-1]

    if part.kind == "chunks":
        return []
    return [(part, Wrong(wrap(normalize=partial(softmax, always=always)))) for always in (True, False)]


def first_not_causal(part: Window) -> list[Replacement]:
    """Return a window whose first tokens are visible to the queries before them too."""
    if not part.first:
        return []
    shown = transform(causal_mask=lambda o, mask: mask | (o.positions()[1] < part.first))
    return [(part, Wrong(shown))]


# -- scores ----------------------------------------------------------------------------------------


def cap_elsewhere(part: Softcap) -> list[Replacement]:
    """Return a cap after the mask, after the softmax, or before the scale.

    A capped mask hides no key, so that a causal one isn't noticed.
    """

    def cap(oracle: Attention, x: Tensor) -> Tensor:
        return part.cap * (x / part.cap).tanh()

    after_mask = transform(mask_scores=cap), override(transform(mask_scores=cap), mask_weights=lambda o, x: x)
    before_scale = transform(dot_product=cap)
    causal = (
        override(each, causal_mask=lambda o: o.is_past(*o.positions())[None, None]) for each in after_mask
    )
    return wrong(*after_mask, *causal, transform(mask_weights=cap), before_scale)


def cap_without_product(part: Softcap) -> list[Replacement]:
    """Return a cap that doesn't multiply, doesn't divide, or neither, or that multiplies by the score."""
    functions = (
        lambda x: (x / part.cap).tanh(),
        lambda x: part.cap * x.tanh(),
        lambda x: x.tanh(),
        lambda x: x * (x / part.cap).tanh(),
    )
    return wrong(*(transform(cap_scores=lambda o, x, f=f: f(x)) for f in functions))


def transposed_bias(part: Bias) -> list[Replacement]:
    """Return the bias with queries and keys exchanged."""
    if isinstance(part, TableBias) and part.kind == "buckets":
        return [(replace(part, sign=-part.sign),)]
    return changed_bias(part, lambda o, bias: bias.mT if o.x.t == o.x.s else bias)


def changed_bias(part: Bias, *changes: Callable[[Attention, Tensor], Tensor]) -> list[Replacement]:
    """Return the bias with each of these changes, `change(oracle, bias)`."""
    add = (lambda o, scores, change=change: scores + change(o, part.compute(o)) for change in changes)
    return wrong(*(transform(add_bias=each) for each in add))


def restarting_bias(part: Bias) -> list[Replacement]:
    """Return the bias whose queries are counted from the first key in steps with a cache."""

    class FromFirst(Attention):
        def positions(self) -> tuple[Tensor, Tensor]:
            i, j = super().positions()
            return i - self.x.offset * (len(self.x.steps) > 1), j

    def add(oracle: Attention, scores: Tensor) -> Tensor:
        from_first = FromFirst(oracle.weights, oracle.dtype)
        from_first.__dict__.update(oracle.__dict__)
        return scores + part.compute(from_first) * (oracle.scale() if part.is_scaled else 1)

    return wrong(transform(add_bias=add))


def bias_of_first_step(part: Bias) -> list[Replacement]:
    """Return the bias that steps after the first leave out."""
    return changed_bias(part, lambda o, bias: bias * (len(o.x.steps) < 2))


def window_index(part: TableBias) -> list[Replacement]:
    """Return the bias of a window with other factors of the distances on its axes."""
    if part.kind != "window":
        return []
    natural = part.natural_strides
    usual = {a * n + b for n in part.window for a in (1, 2, 3) for b in (-1, 0, 1)}
    usual |= {*range(1, 2 * part.window[-1] + 2)} if len(part.window) == 2 else {*natural}
    tried = product(sorted(n for n in usual if n > 0), repeat=max(len(natural) - 1, 0))
    return [(replace(part, strides=(*each, 1)),) for each in tried if [*each, 1] != natural]


def other_distances(part: TableBias) -> list[Replacement]:
    """Return T5's bias with other usual largest distances."""
    return (
        changed(max_distance=[16, 20, 32, 64, 100, 127, 128, 129, 256, 512])(part)
        if part.kind == "buckets"
        else []
    )


def shared_future(part: TableBias) -> list[Replacement]:
    """Return T5's bias of both directions with one bucket for all later keys."""

    def share(oracle: Attention, bias: Tensor) -> Tensor:
        i, j = part.positions(oracle)
        table = read(oracle, part.path)
        table = table if table.shape[-1] == bias.shape[-3] else table.mT
        return torch.where(j > i, table[table.shape[0] // 2][:, None, None], bias)

    return changed_bias(part, share) if part.kind == "buckets" and part.is_bidirectional else []


def bias_without_heads(part: Bias) -> list[Replacement]:
    """Return the bias of the first head for all heads, or with the heads in reverse."""
    return changed_bias(part, lambda o, bias: bias[:1], lambda o, bias: bias.flip(0))


def reshaped_bias(part: Bias) -> list[Replacement]:
    """Return the bias [t, s, h], reshaped rather than permuted to [h, t, s]."""
    return changed_bias(part, lambda o, bias: bias.movedim(0, -1).reshape(bias.shape))


def shifted_by_own(part: OwnKeys | NullKeys) -> list[Replacement]:
    """Return a part whose own keys stand at the other end of the keys than their entries of the mask."""

    def shift(oracle: Attention, visible: Tensor) -> Tensor:
        n = oracle.raw_scores.shape[-1] - oracle.x.s
        return visible.roll(n if isinstance(part, OwnKeys) else -n, -1)

    return [(part, Wrong(transform(combine_masks=shift)))]


# -- norms, gates, residuals -----------------------------------------------------------------------


def norm_of_width(part: Norm) -> list[Replacement]:
    """Return a norm over other axes: heads or tokens, or the last axis and one of these."""
    axes = (1, 2, (2, 3), (1, 3)) if part.place == "heads" else (1, (1, 2))
    found: list[Replacement] = [(replace(part, axis=axis),) for axis in axes]
    for right, other in ("qk", "kq") if part.roles == "qk" else ():
        found += [(replace(part, roles=right), replace(part, roles=other, axis=axis)) for axis in axes]
    return found


def norm_of_wrong_token(part: Norm) -> list[Replacement]:
    """Return cosines whose scores [i, j] are divided by the length of key i or of query j."""
    if (part.kind, part.roles, part.place) != ("L2", "qk", "heads"):
        return []

    def divide(oracle: Attention, scores: Tensor, role: str) -> Tensor:
        q, k = (x.norm(dim=-1).clamp_min(part.eps) for x in (oracle.q, oracle.k))
        wrong = q[..., :, None] * k[..., :, None] if role == "k" else q[..., None, :] * k[..., None, :]
        return scores / wrong

    return wrong(*(transform(dot_product=partial(divide, role=role)) for role in "kq"))


def one_norm_of_two(part: Norm) -> list[Replacement]:
    """Return a norm of q and k that leaves one of them out."""
    return [(replace(part, roles=role),) for role in part.roles] if len(part.roles) == 2 else []


# Roles to which a norm may be applied instead, those that two norms have together at the same place.
MISPLACED = {"q": ["k", "v", "k"], "k": ["v", "q", "q"], "qk": ["kv", "qv"]}
# Of the products with vectors of distances: a column of zeros on the other side, or another row dropped.
WRONG_SKEWS = [
    each for each in product(("left", "right"), (True, False), (True, False)) if each[:2] != ("left", False)
]
# fmt: off
ALIKE = "treat queries and keys alike"
WINDOW = "a query attends to the last `window` keys, its own included: (i − j < window) & (j ≤ i)"
CAP = "cap · tanh(scores / cap), after the scale and before the mask"
RELATIVE = "the bias of query i and key j belongs to the distance j − i, of its own head, and is added to the scaled scores"
BUGS: list[PartBug] = [
    *rotary_bugs(),
    PartBug("rotary-base", "whose rotary encoding has another base than its argument or its documentation says", "use the base that is given", RotaryPositions, other_bases),
    PartBug("rotary-opposite", "that rotates keys the other way than queries", "rotate queries and keys alike", RotaryPositions, opposite),
    PartBug("rotary-on-values", "that rotates its values too", "rotate queries and keys only", RotaryPositions, changed(roles="qkv")),
    PartBug("rotary-on-width", "that rotates the whole width before it is split into heads", "split the heads first, and rotate each head",
        RotaryPositions, changed(place="width")),
    PartBug("rotary-rest-exchanged", "whose entries that aren't rotated are those of another of q, k and v", "join each rotated part with the rest of the same tensor: torch.cat((q_rotated, q_rest), -1), and k likewise",
        RotaryPositions, exchanged_rest),
    PartBug("rotary-along-heads", "that rotates by the number of the head rather than by the token's position",
        "the axis of positions must be the one the tokens are on: [b, h, t, d] or [b, t, h, d]", RotaryPositions, changed(place="along heads")),
    PartBug("rotary-offset-ignored", "whose rotary positions ignore the tokens in the cache",
        "the first new token's position is the number of tokens in the cache", RotaryPositions, changed(begin=lambda o, steps: 0, moved=["q", "k", "qk"])),
    PartBug("rotary-offset-late", "whose rotary positions in a step with a cache are too large by the step's own length",
        "read the length of the cache before the step's keys are added to it", RotaryPositions, changed(begin=[lambda o, steps: sum(steps), lambda o, steps: sum(steps) * (len(steps) > 1)], moved=["q", "k", "qk"])),
    PartBug("rotary-offset-miscounted", "whose cache doesn't count tokens but calls, or another axis such as the heads: rotary positions are wrong after the first step",
        "add the number of new tokens, the axis of k that the sequence is on", RotaryPositions, miscounted),
    PartBug("rotary-offset-trimmed", "whose rotary positions stop at its window, because they count the tokens in a cache that is cut to it",
        "keep the number of all tokens so far beside the cache", RotaryPositions, lambda part: []),
    PartBug("rotary-again", "that rotates the keys in its cache again in each step", "cache keys after they are rotated and rotate the new ones alone, or cache them before",
        RotaryPositions, changed(rotates_again=True)),
    PartBug("rotary-grid-transposed", "whose rotary encoding takes an image's rows for columns: tokens are numbered row by row, and their coordinates column by column",
        'token n is in row n // columns and column n % columns: torch.meshgrid(rows, columns, indexing="ij"), flattened', RotaryPositions, on_grid("transposed")),
    PartBug("rotary-one-axis", "whose rotary encoding of an image uses one axis for both halves of the pairs", "one half turns with the row, the other with the column",
        RotaryPositions, on_grid("rows twice", "columns twice")),
    PartBug("rotary-prefix-misplaced", "whose rotary encoding of an image leaves out the last tokens rather than the first", "the tokens of a class and of registers come first: rotate x[:, :, prefix:]",
        RotaryPositions, lambda part: on_grid("prefix last")(part) if part.prefix else []),
    PartBug("window-off", "whose window is too wide or too narrow, often by one key", WINDOW, Window,
        lambda part: changed(size=[part.size - 1, part.size + 1, part.size + 2, part.size // 2])(part)),
    PartBug("window-slot-empty", "whose rolling cache moves on one token too early: an empty slot stands in place of the oldest key of its window",
        "let the oldest token go when the cache is full, at seen >= window, not before", Window, empty_slot),
    PartBug("window-ignored", "without its window", WINDOW, Window, without),
    PartBug("window-misplaced", "whose window in a step with a cache begins too early, because its queries aren't counted from the cache's end",
        "the query of row r is at position i = r + the cache's length: .triu(diagonal=past - window + 1)", Window, misplaced_window),
    PartBug("window-first-not-causal", "whose first tokens, which its window always shows, are visible before they occur", "the causal condition holds for them too: (j ≤ i) & ((i − j < window) | (j < first))",
        Window, first_not_causal),
    PartBug("window-empty-keys", "whose window attends to empty keys, with which it is filled up before the first token or after the last", "mask the keys that fill up the first and the last window",
        Window, empty_keys),
    PartBug("window-unasked", "with a window although the flag for it is off", "apply the window only where its flag is on", NoWindow,
        lambda part: [(part.window,)]),
    PartBug("window-both-sides", "whose window reaches into the future too", WINDOW, Window,
        lambda part: [(replace(part, kind="both sides"), Wrong(override(causal_mask=lambda o: None)))]),
    PartBug("window-one-sided", "whose window limits earlier keys alone, although it isn't causal", "compare the distance without its sign: (i − j).abs() < window", Window,
        lambda part: changed(kind="sliding")(part) if part.kind == "both sides" else []),
    PartBug("window-inverted", "that masks what is inside its window", WINDOW, Window,
        lambda part: wrong(wrap(masks=lambda o, step: [*step(), ~part.visible(*o.positions())]))),
    PartBug("window-wraps", "whose shifted windows let pixels from opposite sides of the image attend to each other", "number the regions between the slices of rows and of columns, and mask pairs of tokens of different numbers: img_mask[:, rows, columns, :] of an image [b, h, w, e]",
        ShiftedWindow, changed(separated=[(0,), (1,), ()])),
    PartBug("norm-missing", "without one of its norms", "apply the norm", Norm, without),
    PartBug("norm-of-one", "that normalizes only queries or only keys", ALIKE, Norm, one_norm_of_two),
    PartBug("norm-axis", "whose norm is over other axes than the last alone", "normalize over the last axis, each vector by itself", Norm, norm_of_width),
    PartBug("norm-of-wrong-token", "whose score of query i and key j is divided by the length of key i or of query j", "a cosine is q_i · k_j / (|q_i| |k_j|): normalize q and k before their product",
        Norm, norm_of_wrong_token),
    PartBug("norm-again", "that normalizes the keys in its cache again in each step", "cache keys after they are normalized and normalize the new ones alone, or cache them before",
        Norm, lambda part: changed(is_repeated=True)(part) if "k" in part.roles and part.place in ("heads", "width") else []),
    PartBug("norm-lost-in-steps", "that doesn't normalize the new queries or keys of steps with a cache", "normalize each step's queries and keys before they are cached",
        Norm, changed(is_first_only=True)),
    PartBug("norm-shared", "that uses the scale of one norm for another one too", "give queries and keys their own norms", Norm, lambda part: []),
    PartBug("norm-on-values", "that normalizes its values too", "normalize queries and keys only", Norm,
        lambda part: [(replace(part, roles=f"{part.roles}v"),)] if part.roles in ("q", "k", "qk") and part.place != "input" else []),
    PartBug("norm-misplaced", "whose norms of queries and keys are applied to others of q, k and v", "normalize q with its norm and k with its own, before their product",
        Norm, lambda part: changed(roles=MISPLACED[part.roles])(part) if part.roles in MISPLACED and part.place != "input" else []),
    PartBug("norm-unscaled", "whose norm leaves out its learned scale", "multiply by the scale", Norm,
        lambda part: [(replace(part, scale=""),), (replace(part, scale="", bias=""),)] if part.scale else []),
    PartBug("norm-mean-kept", "whose layer norm doesn't subtract the mean", "subtract the mean, then divide by the standard deviation", Norm,
        lambda part: [(replace(part, kind="RMS"),)] if part.kind == "layer" else []),
    PartBug("bias-transposed", "whose relative bias has queries and keys exchanged", RELATIVE, TableBias, transposed_bias),
    PartBug("bias-heads-mixed", "whose relative bias is that of another head", RELATIVE, TableBias, bias_without_heads),
    PartBug("bias-reshaped", "whose relative bias is reshaped from [t, s, h] to [h, t, s] rather than permuted", "permute the axes of the table's [t, s, h] so that it is added to scores [b, h, t, s]: bias.view(t, s, h).permute(2, 0, 1)", TableBias, reshaped_bias),
    PartBug("bias-scaled", "that scales its relative bias along with the scores", RELATIVE, TableBias, changed(is_scaled=True)),
    PartBug("bias-missing", "without its relative bias", RELATIVE, TableBias, without),
    PartBug("bias-offset-ignored", "whose relative bias ignores the tokens in the cache, or those before x: it counts the queries from the first key", "the query of row r of a step is at position r + the cache's length: bias[:, -t:, :]",
        Bias, restarting_bias),
    PartBug("bias-lost-in-steps", "without its relative bias in steps with a cache", "add the bias in steps too, for the distances from the step's queries to all keys",
        Bias, bias_of_first_step),
    PartBug("vectors-transposed", "whose vectors of distances are those of the opposite distances", "one order of distances for the table and its index: i − j or j − i, shifted by the largest distance", RelativeKeys,
        lambda part: changed(sign=-part.sign)(part) if part.rows == "both sides" else []),
    PartBug("vectors-slice", "that takes the first rows of its vectors of distances in a call of fewer tokens, although its last row is that of distance 0", "slice the last rows: E[max_len - t:]",
        RelativeKeys, lambda part: changed(rows="last of the call")(part) if part.rows == "last" else []),
    PartBug("vectors-skewed", "whose products with the vectors of distances are shifted to other queries or distances", "pad a column of zeros on the left, reshape [t, t + 1] to [t + 1, t], and drop the first row: x[:, :, 1:]",
        (RelativeKeys, ProjectedDistances), lambda part: changed(skew=WRONG_SKEWS)(part) if isinstance(part, ProjectedDistances) or part.rows == "last" else []),
    PartBug("vectors-unscaled", "whose products with the vectors of distances aren't scaled along with the scores", "(q kᵀ + products) / √d", RelativeKeys, changed(is_unscaled=True)),
    PartBug("vectors-missing", "without its vectors of distances", "add the product of queries and the vectors of distances to the scores, before the scale", RelativeKeys, without),
    PartBug("window-index", "whose relative bias has the wrong index: other distances share an entry", "distance of rows times 2 · columns − 1, plus distance of columns; in a volume, of layers times (2 · rows − 1)(2 · columns − 1)",
        TableBias, window_index),
    PartBug("buckets-bidirectional", "that uses T5's buckets of both directions in a causal layer, or those of one direction in a layer that isn't causal",
        "bidirectional=False in a causal layer (a decoder), True in others", TableBias,
        lambda part: changed(is_bidirectional=not part.is_bidirectional)(part) if part.kind == "buckets" else []),
    PartBug("buckets-distance", "whose buckets of T5's end at another distance than its argument or its documentation says", "all distances from max_distance on share a bucket: log(distance / exact) / log(max_distance / exact)",
        TableBias, other_distances),
    PartBug("buckets-overlap", "whose large distances share T5's buckets with small ones", "the buckets of large distances begin after those of exact ones: max_exact + (log(distance / max_exact) / log(max_distance / max_exact) * (n - max_exact))",
        TableBias, lambda part: changed(is_overlapping=True)(part) if part.kind == "buckets" else []),
    PartBug("buckets-future-shared", "whose later keys all share a bucket of T5's, whatever their distance", "take the distance without its sign before the buckets: relative_position.abs()",
        TableBias, shared_future),
    PartBug("alibi-sign", "whose ALiBi raises the scores of far keys rather than lowering them", "subtract slope · (i − j)", Alibi, changed(sign=1)),
    PartBug("alibi-slopes", "whose ALiBi slopes are wrong", "head n of h has the slope 2^(−8n/h), n from 1", Alibi,
        lambda part: [] if part.path else [*changed(start=0)(part), *changed(exponent=[4.0, 16.0, 1.0])(part), *bias_without_heads(part)]),
    PartBug("alibi-scaled", "that scales its ALiBi bias along with the scores", RELATIVE, Alibi, changed(is_scaled=True)),
    PartBug("alibi-missing", "without its ALiBi bias", RELATIVE, Alibi, without),
    PartBug("cap-elsewhere", "that caps its scores after the mask or the softmax, or before the scale", CAP, Softcap, cap_elsewhere),
    PartBug("cap-unscaled", "whose cap doesn't multiply by the cap, or doesn't divide by it", CAP, Softcap, cap_without_product),
    PartBug("cap-hard", "that clamps its scores rather than capping them smoothly", CAP, Softcap,
        lambda part: wrong(transform(cap_scores=lambda o, x: x.clamp(-part.cap, part.cap)))),
    PartBug("cap-missing", "without its cap of the scores", CAP, Softcap, without),
    PartBug("mask-beside-own-keys", "whose mask is shifted by the keys that it adds itself, because it is padded on the other side than they are on", "pad the mask where the keys are added: F.pad(mask, (0, n), value=True) if they are the last n",
        (OwnKeys, NullKeys), shifted_by_own),
    PartBug("gate-activation", "whose gate has no sigmoid, or another activation than it says", "multiply by torch.sigmoid(gate)", Gate,
        changed(function=[*ACTIVATIONS])),
    PartBug("gate-reshaped", "whose gates [b, t, h, d] are reshaped to [b, h, t, d] without a transpose", "a reshape mixes tokens and heads: swap the second and third axis of [b, t, h, d]", Gate,
        changed(is_reshaped=True)),
    PartBug("gate-missing", "without its gate", "multiply by torch.sigmoid(gate)", Gate, without),
    PartBug("residual-missing", "without its residual connection", "add the input to the output", Residual, without),
    PartBug("residual-normalized", "whose residual connection adds the normalized input", "add the input as it was before the norm", Residual,
        lambda part: wrong(transform(finish=lambda o, x: x + o.source("q")))),
    PartBug("scale-documented", "whose scores don't have the documented scale", "multiply the scores by the documented scale", Scale, without),
]
# fmt: on
