"""Highlights of the attention maps of a text: scores of every head, and the most surprising single weights.

The scores are those of `manyheads.measures`, under the names that `show` prints (`SCORES`). A finding is a
single weight that is far above the head's other weights for that key or at that distance, and above uniform
attention.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from manyheads import measures, scores
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.text.tokens import Token

ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
PER_HEAD = 20  # candidates per head
THRESHOLD = 0.05  # the least surprise in nats, or the least difference of a score, that is worth reporting
COMPARABLE = 0.6  # the least surprise of a finding, as a share of the greatest one
NEAR = 4  # tokens: weights at shorter distances are compared with those of other queries at the distance
PER_REASON = 2  # findings with the same reason
LONG = 512  # tokens: in longer texts, tokens are named by their positions, not as "the 246th"
SEARCHED = 1024  # tokens at the start of a text that are searched for findings, with a matrix per head

Reason = Literal["same token", "after the same token"]
HeadScores = dict[str, float | None]  # by name; None where no query of the text could have a score

# The mean weights that `show` prints, by the names of its JSON, each with its name in `measures.SCORES`.
SCORES = {
    "previous_token": "previous_token",
    "next_token": "next_token",
    "first_token": "first_position",
    "last_token": "last_position",
    "same_token": "same_token",
    "after_same_token": "induction",
    "itself": "current_token",
}


@dataclass(frozen=True)
class Finding:
    """A surprising weight.

    Attributes:
        layer: The layer, counted from 0.
        head: The head, counted from 0.
        query: The position of the query.
        key: The position of the key.
        weight: The attention weight.
        usual: The expected weight, see `expected_weights`.
        reason: The explanation by the text, or None.
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float
    usual: float
    reason: Reason | None

    @property
    def surprise(self) -> float:
        """The weight's share of the divergence from the expected weights, w · ln(w / usual), in nats."""
        return self.weight * math.log(self.weight / self.usual) if self.weight > 0 else 0.0

    @property
    def interest(self) -> float:
        """The surprise, doubled if the text explains the weight."""
        return self.surprise * (2 if self.reason else 1)


# -- head scores -----------------------------------------------------------------------------------


def score_heads(amap: AttentionMap, ids: Tensor) -> list[HeadScores]:
    """Return the scores of every head of a layer on the first sequence, ids `[t]`; the entropy is in nats."""
    columns: dict[str, list[float]] = {}
    for name in SCORES:
        mass, counted = amap.masses(_mask(name, amap, ids))  # both [b, h, t]
        columns[name] = (
            (mass * counted)[0].sum(-1) / counted[0].sum(-1)
        ).tolist()  # [h]; NaN if there are none
    columns["entropy"] = amap.entropy()[0].mean(-1).tolist()
    return [
        {name: None if math.isnan(value) else value for name, value in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


def _mask(name: str, amap: AttentionMap, ids: Tensor) -> Mask:
    """Return the mask of a score, by its name in the JSON."""
    return measures.SCORES[SCORES[name]].mask(amap, ids)


def uniform(amap: AttentionMap) -> AttentionMap:
    """Return the map of heads that give equal weights to all keys that the heads of `amap` may attend to."""
    blank = torch.zeros_like(amap.problem.q)
    return AttentionMap.of(replace(amap.problem, q=blank, bias=None, sink=None))


def most_characteristic(
    amap: AttentionMap, ids: Tensor, heads: Sequence[HeadScores], uniform: Sequence[HeadScores]
) -> list[str]:
    """Return, for each head of a layer, the name of the score that stands out most.

    A score stands out by its difference from that of a uniform head. Scores of tokens are also compared with
    those of the head's expected weights: otherwise a head that attends to the first token would seem to
    search for the same token wherever the first one is repeated.

    Args:
        amap: The map of the layer.
        ids: The tokens `[t]`.
        heads: The scores of its heads.
        uniform: The scores of uniform heads.

    Returns:
        A name for each head; "entropy" where nothing stands out.
    """
    names = []
    for head, (own, base) in enumerate(zip(heads, uniform, strict=True)):
        usual = expected_weights(*_head_start(amap, head))  # [t, s]
        above = {name: value - (base[name] or 0.0) for name, value in own.items() if value is not None}
        for name in ("same_token", "after_same_token"):
            inside = _visible_start(amap, head, _mask(name, amap, ids))  # [t, s]
            if name in above and inside.any():
                mean = float((usual * inside).sum(-1)[inside.any(-1)].mean())
                above[name] = min(above[name], (own[name] or 0.0) - mean)
        above["entropy"] = THRESHOLD
        names.append(max(above, key=above.__getitem__))
    return names


# -- findings --------------------------------------------------------------------------------------


def expected_weights(weights: Tensor, visible: Tensor) -> Tensor:
    """Return the expected weight of each key, from the head's weights for the other queries.

    It is the largest of three: a uniform share; the mean weight of the same key for the other queries that
    may attend to it; and, near the query, the mean weight of other queries at the same distance. (A large
    distance that recurs is caused by text that repeats, not by the head.) A query with a single visible key
    is not counted, because its weight is always 1.

    Args:
        weights: The weights `[t, s]`.
        visible: Which keys each query may attend to, `[t, s]`.

    Returns:
        The expected weights `[t, s]`.
    """
    keys = visible.sum(-1, keepdim=True)  # [t, 1]
    counted = (visible & (keys > 1)).float()  # [t, s]
    weights = weights * counted
    share = (1 / keys.clamp(min=1)).expand(weights.shape)
    # Each mean leaves out the query itself.
    same_key = (weights.sum(0) - weights) / (counted.sum(0) - counted).clamp(min=1)
    same_distance = torch.zeros_like(weights)
    for distance in range(1 - NEAR, NEAR):
        line, count = weights.diagonal(distance), counted.diagonal(distance)
        same_distance.diagonal(distance).copy_((line.sum() - line) / (count.sum() - count).clamp(min=1))
    return torch.stack((share, same_distance, same_key)).amax(0)


def _head_start(amap: AttentionMap, head: int) -> tuple[Tensor, Tensor]:
    """Return a head's weights among the first tokens, and where they are visible, both `[t, s]`."""
    return amap[0, head, :SEARCHED, :SEARCHED].float().cpu(), _visible_start(amap, head)


def _visible_start(amap: AttentionMap, head: int, mask: Mask | None = None) -> Tensor:
    """Return where weights among the first tokens are visible, and inside a mask (None: any), `[t, s]`."""
    problem = amap.problem if mask is None else amap.problem.within(mask)
    rows, cols = slice(0, min(SEARCHED, amap.shape[2])), slice(0, min(SEARCHED, amap.shape[3]))
    visible = scores.visible(problem, rows, cols, slice(0, 1), slice(head, head + 1))  # [1, 1, t, s]
    return visible[0, 0].expand(rows.stop, cols.stop).cpu()


def find_candidates(
    maps: Sequence[AttentionMap], ids: Sequence[int], special: Collection[int] = ()
) -> list[Finding]:
    """Return the weights of each head that stand out most, the most interesting first.

    Args:
        maps: The self-attention map of each layer, of which the first sequence is read. In a long text only
            the first `SEARCHED` tokens are searched.
        ids: The tokens.
        special: Positions of special tokens, which are left out unless there are no others.

    Returns:
        At most `PER_HEAD` findings for each head.
    """
    heads = [(layer, head) for layer, amap in enumerate(maps) for head in range(amap.shape[1])]
    total, anywhere = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    for layer, head in heads:
        weights, visible = _head_start(maps[layer], head)
        total, anywhere = total + weights, anywhere | visible
    average = expected_weights(total / len(heads), anywhere)
    ordinary = torch.tensor([n not in special for n in range(len(average))])  # [t]
    ordinary = ordinary if ordinary.any() else ~ordinary
    pairs = ordinary[:, None] & ordinary  # [t, t]
    candidates: list[Finding] = []
    for layer, head in heads:
        weights, visible = _head_start(maps[layer], head)
        usual = torch.maximum(expected_weights(weights, visible), average)
        surprise = torch.special.xlogy(weights, weights / usual)  # 0 where nothing is visible
        surprise = surprise.masked_fill(~pairs, -math.inf)
        for index in surprise.flatten().topk(min(PER_HEAD, int(pairs.sum()))).indices.tolist():
            query, key = divmod(index, len(weights))
            numbers = float(weights[query, key]), float(usual[query, key])
            candidates.append(Finding(layer, head, query, key, *numbers, explain(query, key, ids)))
    # The interest is rounded, so that heads that differ only by rounding (as all do over a single token) keep
    # their order.
    return sorted(candidates, key=lambda finding: -round(finding.interest, 4))


def explain(query: int, key: int, ids: Sequence[int]) -> Reason | None:
    """Return the reason why a query may attend to a key: the same token, or the one that followed it."""
    if key != query and ids[key] == ids[query]:
        return "same token"
    if 0 < key < query and ids[key - 1] == ids[query]:
        return "after the same token"
    return None


def select_findings(candidates: Sequence[Finding], count: int = 5) -> list[Finding]:
    """Return the most interesting candidate and a few more, the largest weight first.

    Each belongs to another head and another pair of tokens, and is nearly as surprising as the most
    surprising candidate. None has a larger weight than the most interesting one, which is therefore first.

    Args:
        candidates: The findings of `find_candidates`, which aren't empty.
        count: The largest number of findings.

    Returns:
        The findings; none if nothing is surprising.
    """
    first = candidates[0]
    least = max(THRESHOLD, COMPARABLE * max(finding.surprise for finding in candidates))
    chosen = [first] if first.surprise >= THRESHOLD else []
    for finding in candidates[1:]:
        repeated = any(
            (finding.layer, finding.head) == (other.layer, other.head)
            or (finding.query, finding.key) == (other.query, other.key)
            for other in chosen
        )
        alike = sum(finding.reason == other.reason for other in chosen)
        fits = finding.surprise >= least and finding.weight <= first.weight
        if fits and not repeated and alike < PER_REASON and len(chosen) < count:
            chosen.append(finding)
    return sorted(chosen, key=lambda finding: -finding.weight)


# -- sentences -------------------------------------------------------------------------------------


def describe(finding: Finding, tokens: Sequence[Token]) -> str:
    """Return a finding as a sentence.

    `Layer 2, head 1 — induction: the second "the" attends to "train" (0.71), the token that followed the
    first "the".`
    """
    query, key = finding.query, finding.key
    target = "itself" if key == query else name_token(key, tokens)
    pattern, detail = "", ""
    if finding.reason == "after the same token":
        pattern, detail = " — induction", f", the token that followed {name_token(key - 1, tokens)}"
    elif abs(key - query) == 1:
        detail = f", the token {'before' if key < query else 'after'} it"
    elif key == 0 < query:
        detail = ", the first token"
    elif query < key == len(tokens) - 1:
        detail = ", the last token"
    head = f"{name_head(finding.layer, finding.head)}{pattern}"
    return f"{head}: {name_token(query, tokens)} attends to {target} ({finding.weight:.2f}){detail}."


def name_head(layer: int, head: int) -> str:
    """Return the name of a head: `Layer 2, head 5`."""
    return f"Layer {layer}, head {head}"


def name_token(position: int, tokens: Sequence[Token]) -> str:
    """Return a token in quotes, with its word if it is a piece, and which of several equal ones it is."""
    token, labels = tokens[position], [token.label for token in tokens]
    name = quote(token.label)
    repeated = labels.count(token.label) > 1
    if repeated and len(tokens) <= LONG:
        name = f"the {ordinal(labels[: position + 1].count(token.label))} {name}"
    if token.word is not None:
        name = f"{name} of {quote(token.word)}"
    return f"{name} at {position}" if repeated and len(tokens) > LONG else name


def quote(text: str) -> str:
    """Return a text in quotation marks that it doesn't contain."""
    return f"'{text}'" if '"' in text else f'"{text}"'


def ordinal(n: int) -> str:
    """Return a number as first, second, …, tenth, 11th, …, 21st and so on."""
    if n <= len(ORDINALS):
        return ORDINALS[n - 1]
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
