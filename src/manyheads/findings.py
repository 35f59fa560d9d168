"""What is telling in a stack of attention maps: numbers for every head, and a few of them in words.

Habits say what a head does on average, findings what it does once: a single weight far above what the
same head gives to that key or at that small distance, or would give if it attended evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from manyheads import measures
from manyheads.maps import AttentionMap
from manyheads.tokens import Token

ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
PER_HEAD = 20  # the candidates that each head may enter
LEAST = 0.05  # what is this little above the usual, in weight or in nats, is not worth a word
NEARLY = 0.6  # of the greatest surprise: what is told beside it
NEAR = 4  # tokens: habits of distance are sought below it
ALIKE = 2  # findings for one reason, or for none

Reason = Literal["same token", "after the same token"]


class Habits(NamedTuple):
    """What one head attends to: mean mass over the queries that could; None where none could."""

    previous_token: float | None
    first_token: float | None
    same_token: float | None
    after_same_token: float | None
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
    level = _means(even(amap), ids)
    return [
        Habits._make([m if could else None for m, could in zip(masses, rest, strict=True)] + [spread])
        for (*masses, spread), (*rest, _) in zip(_means(amap, ids), level, strict=True)
    ]


def _means(amap: AttentionMap, ids: Tensor) -> list[list[float]]:
    """A row per head, in the order of `Habits`; 0 where no query could."""
    rows = ids[None]  # [1, s]
    columns = (
        measures.previous_token(amap),
        measures.first_token(amap),
        measures.duplicate_token(amap, rows),
        measures.induction(amap, rows),
        measures.current_token(amap),
        amap.entropy().mean(-1),
    )  # each [b, h]
    return torch.stack(columns, -1)[0].tolist()


def even(amap: AttentionMap) -> AttentionMap:
    """The map of heads that attend evenly to all that those of `amap` may see."""
    blank = torch.zeros_like(amap.problem.q)
    return AttentionMap.of(replace(amap.problem, q=blank, bias=None, sink=None))


def usual(weights: Tensor) -> Tensor:
    """What a causal head gives to each place anyway, `[t, t]`, from its weights `[t, t]`.

    The largest of three: an even share; what the other queries that see it give to the same key; and,
    near the query, what the others give at the same distance. (A distance that is far and keeps coming
    back is not position but text that repeats.) Query 0 has no choice, and doesn't count.
    """
    t = len(weights)
    i = torch.arange(t)
    share = (1 / (i + 1.0))[:, None].expand(t, t)
    distance = (i[:, None] - i).clamp(min=0)  # [t, t]
    seen = torch.ones(t, t).tril()
    seen[0] = 0
    total = torch.zeros(t).index_add(0, distance.flatten(), (weights * seen).flatten())
    count = torch.zeros(t).index_add(0, distance.flatten(), seen.flatten())
    others = (total[distance] - weights) / (count[distance] - 1).clamp(min=1)  # but this one
    others[distance >= NEAR] = 0
    column = ((weights * seen).sum(0) - weights) / (seen.sum(0) - 1).clamp(min=1)
    return torch.stack((share, others, column)).amax(0)


def characteristic(amap: AttentionMap, ids: Tensor) -> list[str]:
    """For each head of a causal layer the habit that stands out most, by its name in `Habits`.

    A habit stands out by how far it is above that of an even head; those of tokens also from what
    the head's habits of position give, so that a head that rests on the first token isn't taken for
    one that looks for the same token, only because the first came again. `entropy`: none stands out.
    """
    level = habits(even(amap), ids)
    same = (ids[:, None] == ids).tril(-1)  # [t, t]
    after = torch.zeros_like(same)
    after[:, 1:] = (ids[:, None] == ids[:-1]).tril()[:, : len(ids) - 1]
    after = after.tril()
    found = []
    for head, (own, plain) in enumerate(zip(habits(amap, ids), level, strict=True)):
        expected = usual(amap[0, head].float().cpu())
        base = plain._asdict()
        for name, places in (("same_token", same), ("after_same_token", after)):
            if base[name] is not None:
                inside = (expected * places).sum(-1)[places.any(-1)]
                base[name] = max(base[name], float(inside.mean()))
        above = {n: value - base[n] for n, value in own._asdict().items() if value is not None}
        above["entropy"] = LEAST
        found.append(max(above, key=above.__getitem__))
    return found


def candidates(maps: Sequence[AttentionMap], ids: Sequence[int]) -> list[Finding]:
    """The most telling weights of each head, the most telling first.

    `maps` are causal, one per layer; the first sequence of the batch, `ids`, is read.
    """
    heads = [(layer, head) for layer, amap in enumerate(maps) for head in range(amap.shape[1])]

    def weights_of(layer: int, head: int) -> Tensor:
        return maps[layer][0, head].float().cpu()  # [t, t]

    average = usual(sum((weights_of(*one) for one in heads), torch.zeros(1)) / len(heads))
    found: list[Finding] = []
    for layer, head in heads:
        weights = weights_of(layer, head)
        expected = torch.maximum(usual(weights), average)
        surprise = torch.special.xlogy(weights, weights / expected)  # 0 above the diagonal
        for flat in surprise.flatten().topk(min(PER_HEAD, surprise.numel())).indices.tolist():
            query, key = divmod(flat, len(weights))
            at = float(weights[query, key]), float(expected[query, key])
            found.append(Finding(layer, head, query, key, *at, reason(query, key, ids)))
    return sorted(found, key=lambda one: -one.telling)


def reason(query: int, key: int, ids: Sequence[int]) -> Reason | None:
    """Is the key an earlier token like the query, or what came after such a one?"""
    if key < query and ids[key] == ids[query]:
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
    if key == query - 1:
        return f"{said}, the token before it"
    if key == 0 < query:
        return f"{said}, the first token"
    return said


def name(position: int, tokens: Sequence[Token]) -> str:
    """A token in quotes: with an ordinal where it occurs more than once, with its word if it is a piece."""
    token, labels = tokens[position], [token.label for token in tokens]
    said = quoted(token.label)
    if labels.count(token.label) > 1:
        said = f"the {ordinal(labels[: position + 1].count(token.label))} {said}"
    return said if token.word is None else f"{said} of {quoted(token.word)}"


def quoted(text: str) -> str:
    """A text in the quotation marks that it doesn't hold."""
    return f"'{text}'" if '"' in text else f'"{text}"'


def ordinal(n: int) -> str:
    """first … tenth, 11th, 12th, …, 21st, …"""
    if n <= len(ORDINALS):
        return ORDINALS[n - 1]
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
