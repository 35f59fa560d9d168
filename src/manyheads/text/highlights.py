"""What is telling in a stack of attention maps: numbers for every head, and a few of them in words.

Habits say what a head does on average, findings what it does once: a single weight far above what the
same head gives to that key or at that small distance, or would give if it attended evenly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from manyheads import scores
from manyheads.maps import AttentionMap
from manyheads.masks import AfterSameToken, Diagonal, Keys, Mask, SameToken
from manyheads.text.tokens import Token

ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
PER_HEAD = 20  # the candidates that each head may enter
LEAST = 0.05  # what is this little above the usual, in weight or in nats, is not worth a word
NEARLY = 0.6  # of the greatest surprise: what is told beside it
NEAR = 4  # tokens: habits of distance are sought below it
ALIKE = 2  # findings for one reason, or for none
LONG = 512  # tokens, above which a position says more than "the 246th"
SOUGHT = 1024  # tokens from the first on, among which findings are sought: each head's matrix is built

Reason = Literal["same token", "after the same token"]


class Habits(NamedTuple):
    """What one head attends to: mean mass over the queries that could; None where none could."""

    previous_token: float | None
    next_token: float | None  # which no causal head may see
    first_token: float | None
    last_token: float | None  # seen from elsewhere, and so by no causal head
    same_token: float | None  # at other places
    after_same_token: float | None  # what followed the same token earlier: see `measures.induction`
    itself: float | None
    entropy: float  # the mean over queries, in nats


@dataclass(frozen=True)
class Finding:
    """One telling weight: of a layer, a head, a query and a key, all counted from 0."""

    layer: int
    head: int
    query: int
    key: int
    weight: float
    usual: float  # what the head, or all heads on average, give there anyway: see `usual`
    reason: Reason | None  # what the text has to say for it

    @property
    def surprise(self) -> float:
        """w · ln(w / usual), in nats: its share in the divergence of this row from the usual one."""
        return self.weight * math.log(self.weight / self.usual) if self.weight > 0 else 0.0

    @property
    def telling(self) -> float:
        """The surprise; it counts double where the text has a reason for it."""
        return self.surprise * (2 if self.reason else 1)


def habits(amap: AttentionMap, ids: Tensor) -> list[Habits]:
    """The habits of every head of one layer, on the first sequence; ids `[t]`."""
    columns: list[list[float | None]] = []
    for mask in _places(ids).values():
        mass, could = amap.masses(mask)  # both [b, h, t]
        means = ((mass * could)[0].sum(-1) / could[0].sum(-1)).tolist()  # [h]; NaN where none could
        columns.append([None if math.isnan(mean) else mean for mean in means])
    spread = amap.entropy()[0].mean(-1).tolist()  # [h]
    return [Habits(*one) for one in zip(*columns, spread, strict=True)]


def _places(ids: Tensor) -> dict[str, Mask]:
    """Where each habit looks."""
    return {
        "previous_token": Diagonal(-1),
        "next_token": Diagonal(1),
        "first_token": Keys([0]),
        "last_token": Keys([len(ids) - 1]) & ~Diagonal(0),
        "same_token": SameToken(ids) & ~Diagonal(0),
        "after_same_token": AfterSameToken(ids),
        "itself": Diagonal(0),
    }


def even(amap: AttentionMap) -> AttentionMap:
    """The map of heads that attend evenly to all that those of `amap` may see."""
    blank = torch.zeros_like(amap.problem.q)
    return AttentionMap.of(replace(amap.problem, q=blank, bias=None, sink=None))


def usual(weights: Tensor, seen: Tensor) -> Tensor:
    """What a head gives to each place anyway, `[t, s]`, from its weights and what may be seen, `[t, s]`.

    The largest of three: an even share; what the other queries that see it give to the same key; and,
    near the query, what the others give at the same distance on the same side. (A distance that is far
    and keeps coming back is not position but text that repeats.) A query that sees one key has no
    choice, and doesn't count.
    """
    sees = seen.sum(-1, keepdim=True)  # [t, 1]
    counted = (seen & (sees > 1)).float()  # [t, s]
    told = weights * counted
    share = (1 / sees.clamp(min=1)).expand(weights.shape)
    column = (told.sum(0) - told) / (counted.sum(0) - counted).clamp(min=1)  # but this one
    near = torch.zeros_like(told)
    for distance in range(1 - NEAR, NEAR):
        own, many = told.diagonal(distance), counted.diagonal(distance)
        near.diagonal(distance).copy_((own.sum() - own) / (many.sum() - many).clamp(min=1))
    return torch.stack((share, near, column)).amax(0)


def characteristic(
    amap: AttentionMap, ids: Tensor, own: Sequence[Habits], level: Sequence[Habits]
) -> list[str]:
    """For each head of a layer the habit that stands out most, by its name in `Habits`.

    own: the habits of its heads; level: those of heads that attend `even`ly.
    A habit stands out by how far it is above that of an even head; those of tokens also from what
    the head's habits of position give, so that a head that rests on the first token isn't taken for
    one that looks for the same token, only because the first came again. `entropy`: none stands out.
    """
    found = []
    for head, (one, plain) in enumerate(zip(own, level, strict=True)):
        expected = usual(*_start(amap, head))  # [t, s]
        base = plain._asdict()
        for name in ("same_token", "after_same_token"):
            inside = _visible(amap, head, _places(ids)[name])  # [t, s]
            if base[name] is not None and inside.any():
                given = (expected * inside).sum(-1)[inside.any(-1)]
                base[name] = max(base[name], float(given.mean()))
        above = {n: value - base[n] for n, value in one._asdict().items() if value is not None}
        above["entropy"] = LEAST
        found.append(max(above, key=above.__getitem__))
    return found


def _start(amap: AttentionMap, head: int) -> tuple[Tensor, Tensor]:
    """The weights of one head among the first tokens, and where it may look: both `[t, s]`."""
    return amap[0, head, :SOUGHT, :SOUGHT].float().cpu(), _visible(amap, head)


def _visible(amap: AttentionMap, head: int, mask: Mask | None = None) -> Tensor:
    """Where one head may look among the first tokens, `[t, s]`; and a mask does too, if one is given."""
    problem = amap.problem if mask is None else amap.problem.within(mask)
    rows, cols = slice(0, min(SOUGHT, amap.shape[2])), slice(0, min(SOUGHT, amap.shape[3]))
    seen = scores.visible(problem, rows, cols, slice(0, 1), slice(head, head + 1))  # [1, 1, t, s]
    return seen[0, 0].expand(rows.stop, cols.stop).cpu()


def candidates(
    maps: Sequence[AttentionMap], ids: Sequence[int], special: Collection[int] = ()
) -> list[Finding]:
    """The most telling weights of each head, the most telling first.

    `maps` are those of self-attention, one per layer; the first sequence of the batch, `ids`, is read.
    Of a text longer than `SOUGHT` tokens the first ones are looked at. special: positions of tokens
    that stand for nothing in the text, of which nothing is told as long as there are others.
    """
    heads = [(layer, head) for layer, amap in enumerate(maps) for head in range(amap.shape[1])]
    total, anywhere = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    for layer, head in heads:
        weights, seen = _start(maps[layer], head)
        total, anywhere = total + weights, anywhere | seen
    average = usual(total / len(heads), anywhere)
    said = torch.tensor([n not in special for n in range(len(average))])  # [t]
    said = said if said.any() else ~said
    pairs = said[:, None] & said  # [t, t]
    found: list[Finding] = []
    for layer, head in heads:
        weights, seen = _start(maps[layer], head)
        expected = torch.maximum(usual(weights, seen), average)
        surprise = torch.special.xlogy(weights, weights / expected)  # 0 where nothing may be seen
        surprise = surprise.masked_fill(~pairs, -math.inf)
        for flat in surprise.flatten().topk(min(PER_HEAD, int(pairs.sum()))).indices.tolist():
            query, key = divmod(flat, len(weights))
            at = float(weights[query, key]), float(expected[query, key])
            found.append(Finding(layer, head, query, key, *at, reason(query, key, ids)))
    # What differs by rounding alone, as all heads do over a single token, stays in the order of the heads.
    return sorted(found, key=lambda one: -round(one.telling, 4))


def reason(query: int, key: int, ids: Sequence[int]) -> Reason | None:
    """Is the key a token like the query, or what came after an earlier one?"""
    if key != query and ids[key] == ids[query]:
        return "same token"
    if 0 < key < query and ids[key - 1] == ids[query]:
        return "after the same token"
    return None


def findings(candidates: Sequence[Finding], count: int = 5) -> list[Finding]:
    """The most telling candidate and a few more, the strongest weight first; none for no surprise.

    Every one is of another head and another pair of tokens, and surprises nearly as much as the most
    surprising one does; none is stronger than the most telling one, which so comes first.
    """
    first = candidates[0]
    bar = max(LEAST, NEARLY * max(one.surprise for one in candidates))
    chosen = [first] if first.surprise >= LEAST else []
    for one in candidates[1:]:
        told = any(
            (one.layer, one.head) == (other.layer, other.head)
            or (one.query, one.key) == (other.query, other.key)
            for other in chosen
        )
        alike = sum(one.reason == other.reason for other in chosen)
        fits = one.surprise >= bar and one.weight <= first.weight
        if fits and not told and alike < ALIKE and len(chosen) < count:
            chosen.append(one)
    return sorted(chosen, key=lambda one: -one.weight)


# -- words -----------------------------------------------------------------------------------------


def sentence(finding: Finding, tokens: Sequence[Token]) -> str:
    """`layer 2 head 1: the second "the" looks at "train" (0.71), the token after the first "the"`."""
    query, key = finding.query, finding.key
    target = "itself" if key == query else name(key, tokens)
    said = (
        f"layer {finding.layer} head {finding.head}: {name(query, tokens)} looks at {target} "
        f"({finding.weight:.2f})"
    )
    if finding.reason == "after the same token":
        return f"{said}, the token after {name(key - 1, tokens)}"
    if abs(key - query) == 1:
        return f"{said}, the token {'before' if key < query else 'after'} it"
    if key == 0 < query:
        return f"{said}, the first token"
    if key == len(tokens) - 1 > query:
        return f"{said}, the last token"
    return said


def name(position: int, tokens: Sequence[Token]) -> str:
    """A token in quotes: with its word if it is a piece, and which one it is if it occurs more than once."""
    token, labels = tokens[position], [token.label for token in tokens]
    said = quoted(token.label)
    again = labels.count(token.label) > 1
    if again and len(tokens) <= LONG:
        said = f"the {ordinal(labels[: position + 1].count(token.label))} {said}"
    if token.word is not None:
        said = f"{said} of {quoted(token.word)}"
    return f"{said} at {position}" if again and len(tokens) > LONG else said


def quoted(text: str) -> str:
    """A text in the quotation marks that it doesn't hold."""
    return f"'{text}'" if '"' in text else f'"{text}"'


def ordinal(n: int) -> str:
    """first … tenth, 11th, 12th, …, 21st, …"""
    if n <= len(ORDINALS):
        return ORDINALS[n - 1]
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
