"""Highlights of the attention maps of a text: what each head attends to, and the most surprising weights.

The scores are those of `manyheads.measures`, under the names that `show` prints (`SCORES`). A pattern is the
score that describes a head, in words (`describe_head`). A finding is a single weight that is far above the
head's other weights for that key or at that distance, and above uniform attention.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from manyheads import measures, scores
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.tokens import TokenizedText, count_words, is_boundary, is_within_word, printable

ORDINALS = ["first", "second", "third", "fourth"]  # readers don't count further
PER_HEAD = 20  # candidates per head
THRESHOLD = 0.05  # the least surprise in nats, or the least difference of a score, that is reported
COMPARABLE = 0.6  # the least surprise of a finding, as a share of the largest surprise
NEAR = 4  # tokens; a weight at a shorter distance is compared with other queries' weights at that distance
PER_REASON = 2  # the largest number of findings with the same reason
FINDINGS = 4  # the largest number of findings that are shown, beside the summary of all heads
LONG = 512  # tokens; in longer texts, equal words are named by the words around them, not counted
AROUND = 12  # the largest number of characters on each side of such a word; wide ones count twice
SEARCHED = 1024  # the number of tokens, at the start of a text, that are searched for findings
JOINING = "-‐./:_'’"  # within compounds, such as well-known, names in code and addresses
MAJORITY = 0.5  # the least score of a pattern, so that it has most of the weight
ABOVE_UNIFORM = 0.2  # the least difference between a pattern's score and that of a uniform head
REPEATS = 4  # the least number of repeated tokens from which patterns of repeated tokens are concluded
MANY = 4.5  # the least effective number of tokens, the exponential of the entropy, that are called many

Reason = Literal["same token", "after the same token"]
HeadScores = dict[str, float | None]  # by name; None if no query of the text can have the score

# The mean weights that `show` prints: their names in its JSON, and in `measures.SCORES`.
SCORES = {
    "previous_token": "previous_token",
    "next_token": "next_token",
    "first_token": "first_position",
    "last_token": "last_position",
    "same_token": "same_token",
    "after_same_token": "induction",
    "itself": "current_token",
}

# What a head attends to if a score of `measures.SCORES` is high: a label and a phrase.
PATTERNS = {
    "induction": ("induction", "the token after an earlier occurrence"),
    "duplicate_token": ("same token", "earlier occurrences of the same token"),
    "same_token": ("same token", "other occurrences of the same token"),
    "previous_token": ("previous token", "the previous token"),
    "next_token": ("next token", "the next token"),
    "current_token": ("itself", "the token itself"),
    "first_token": ("first token", "the first token"),
    "first_position": ("first token", "the first token"),
    "last_position": ("last token", "the last token"),
}
# Scores that depend on tokens, and the patterns that give a high score by chance: in "ha ha ha" the previous
# token is the same token, too.
CONFOUNDED = {
    "induction": ("previous_token", "current_token"),
    "duplicate_token": ("previous_token", "first_token", "first_position"),
    "same_token": ("previous_token", "next_token", "first_token", "first_position", "last_position"),
}


@dataclass(frozen=True)
class Pattern:
    """What a head attends to, by its scores.

    Attributes:
        name: The score that describes the head, one of `PATTERNS` or "entropy".
        value: The score; the entropy in nats.
    """

    name: str
    value: float

    @property
    def label(self) -> str:
        """A few words: `previous token 1.00`, `induction 0.81`, `about 160 tokens`."""
        if self.name == "entropy":
            return f"about {_round_count(math.exp(self.value))} tokens"
        return f"{PATTERNS[self.name][0]} {format_score(self.value)}"

    @property
    def phrase(self) -> str:
        """A phrase: `attends to the previous token (1.00)`."""
        if self.name == "entropy":
            count = _round_count(math.exp(self.value))
            return f"spreads over about {count} tokens (entropy {self.value:.1f} nats)"
        name = "induction, " if self.name == "induction" else ""
        return f"attends to {PATTERNS[self.name][1]} ({name}{format_score(self.value)})"


@dataclass(frozen=True)
class Finding:
    """A surprising weight.

    Attributes:
        layer: The layer, counted from 0.
        head: The head, counted from 0.
        query: The position of the query.
        key: The position of the key.
        weight: The attention weight.
        usual: The expected weight (see `expected_weights`).
        reason: How the text explains the weight, or None.
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
        """The weight's term of the divergence from the expected weights, w · ln(w / usual), in nats."""
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
        total, queries = (mass * counted)[0].sum(-1), counted[0].sum(-1)  # [h]
        columns[name] = (total / queries).tolist()  # NaN if no query counts
    columns["entropy"] = amap.entropy()[0].mean(-1).tolist()
    return [
        {name: None if math.isnan(value) else value for name, value in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


def _mask(name: str, amap: AttentionMap, ids: Tensor) -> Mask:
    """Return the mask of a score, by its name in the JSON."""
    return measures.SCORES[SCORES[name]].mask(amap, ids)


def uniform(amap: AttentionMap) -> AttentionMap:
    """Return the map of heads with equal weights on all keys that are visible to the heads of `amap`."""
    blank = torch.zeros_like(amap.problem.q)
    return AttentionMap.of(replace(amap.problem, q=blank, bias=None, sink=None))


def most_characteristic(
    amap: AttentionMap, ids: Tensor, heads: Sequence[HeadScores], uniform: Sequence[HeadScores]
) -> list[str]:
    """Return, for each head of a layer, the name of the score that stands out most.

    A score stands out if it differs much from that of a uniform head. Scores that depend on tokens are also
    compared with those of the head's expected weights. Otherwise a head that attends to the first token would
    get a high same-token score if the first token is repeated.

    Args:
        amap: The map of the layer.
        ids: The tokens `[t]`.
        heads: The scores of its heads.
        uniform: The scores of uniform heads.

    Returns:
        A name for each head; "entropy" if no score stands out.
    """
    names = []
    for head, (measured, base) in enumerate(zip(heads, uniform, strict=True)):
        usual = expected_weights(*_head_start(amap, head))  # [t, s]
        above = {name: value - (base[name] or 0.0) for name, value in measured.items() if value is not None}
        for name in ("same_token", "after_same_token"):
            inside = _visible_start(amap, head, _mask(name, amap, ids))  # [t, s]
            if name in above and inside.any():
                mean = float((usual * inside).sum(-1)[inside.any(-1)].mean())
                above[name] = min(above[name], (measured[name] or 0.0) - mean)
        above["entropy"] = THRESHOLD
        names.append(max(above, key=above.__getitem__))
    return names


# -- patterns --------------------------------------------------------------------------------------


def describe_head(
    scores: Mapping[str, float | None],
    uniform: Mapping[str, float | None] | None = None,
    repeats: int | None = None,
) -> str | None:
    """Return in words what a head attends to.

    `attends to the previous token (1.00)`, `attends to the token after an earlier occurrence (induction,
    0.81)`, `spreads over about 160 tokens (entropy 5.1 nats)`.

    Args:
        scores: Scores of the head, as in `find_pattern`.
        uniform: Scores of a uniform head with the same mask.
        repeats: The number of tokens that occurred earlier in the text.

    Returns:
        The words, or None if no score describes the head.
    """
    pattern = find_pattern(scores, uniform, repeats)
    return None if pattern is None else pattern.phrase


def find_pattern(
    scores: Mapping[str, float | None],
    uniform: Mapping[str, float | None] | None = None,
    repeats: int | None = None,
) -> Pattern | None:
    """Return what a head attends to: the pattern that has most of its weight, else its spread.

    A pattern of repeated tokens comes first, because it is the more specific, unless a pattern of positions
    explains its score. Among the others, the largest score is chosen.

    Args:
        scores: Scores of the head by their names in `measures.SCORES`, and "entropy" in nats; None for a
            score that doesn't exist. Other names are ignored.
        uniform: Scores of a uniform head with the same mask. In a text of few tokens these are high, too.
        repeats: The number of tokens that occurred earlier in the text. If there are fewer than `REPEATS`,
            patterns of repeated tokens are ignored: they would be concluded from a query or two.

    Returns:
        The pattern, or None if no score describes the head.
    """
    values = {name: scores.get(name) or 0.0 for name in PATTERNS}
    base = {name: (uniform or {}).get(name) or 0.0 for name in PATTERNS}
    high = [
        name
        for name, value in values.items()
        if value >= MAJORITY and (uniform is None or value >= base[name] + ABOVE_UNIFORM)
    ]
    has_repeats = repeats is None or repeats >= REPEATS
    for name, others in CONFOUNDED.items():
        if has_repeats and name in high and values[name] > max(values[other] for other in others):
            return Pattern(name, values[name])
    positional = [name for name in high if name not in CONFOUNDED]
    if positional:
        name = max(positional, key=values.__getitem__)
        return Pattern(name, values[name])
    entropy = scores.get("entropy") or 0.0
    return Pattern("entropy", entropy) if math.exp(entropy) >= MANY else None


def summarize(patterns: Sequence[Pattern | None]) -> str | None:
    """Return a sentence about what the heads of a model attend to, the most frequent pattern first.

    `Of 24 heads, 5 attend mostly to the first token, 3 to the token itself and 1 to the previous token.`

    Args:
        patterns: The pattern of each head.

    Returns:
        The sentence; None if no head has a pattern.
    """
    phrases = Counter(
        PATTERNS[pattern.name][1] + (" (induction)" if pattern.name == "induction" else "")
        for pattern in patterns
        if pattern is not None and pattern.name != "entropy"
    )
    if not phrases:
        return None
    (first, count), *others = phrases.most_common()
    verb = "attends" if count == 1 else "attend"
    parts = [f"{count} {verb} mostly to {first}", *(f"{count} to {phrase}" for phrase, count in others)]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if others else parts)
    return f"Of {len(patterns)} heads, {listed}."


def format_score(value: float) -> str:
    """Return a weight or a score with two decimals.

    A number below 1 that would be rounded to `1.00` has more, up to four: `0.999`. The viewer's page does the
    same (`numbers.js`).
    """
    texts = [f"{value:.{decimals}f}" for decimals in (2, 3, 4)]
    return next((text for text in texts if abs(float(text)) != 1), texts[0])


def _round_count(count: float) -> str:
    """Return a number of tokens, rounded to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return f"{round(count / unit) * unit:,}"


# -- findings --------------------------------------------------------------------------------------


def expected_weights(weights: Tensor, visible: Tensor) -> Tensor:
    """Return the expected weight of each key, from the head's weights for the other queries.

    It is the largest of three numbers: the weight of uniform attention; the mean weight that other queries
    give to the same key; and, for keys near the query, the mean weight of other queries at the same distance.
    (Large weights at the same large distance are caused by repeated text, not by the head.) A query with a
    single visible key is not counted, because its weight is always 1.

    Args:
        weights: The weights `[t, s]`.
        visible: True if the query may attend to the key, `[t, s]`.

    Returns:
        The expected weights `[t, s]`.
    """
    keys = visible.sum(-1, keepdim=True)  # [t, 1]
    counted = (visible & (keys > 1)).float()  # [t, s]
    weights = weights * counted
    share = (1 / keys.clamp(min=1)).expand(weights.shape)
    # The query itself is excluded from each mean.
    same_key = (weights.sum(0) - weights) / (counted.sum(0) - counted).clamp(min=1)
    same_distance = torch.zeros_like(weights)
    for distance in range(1 - NEAR, NEAR):
        line, count = weights.diagonal(distance), counted.diagonal(distance)
        same_distance.diagonal(distance).copy_((line.sum() - line) / (count.sum() - count).clamp(min=1))
    return torch.stack((share, same_distance, same_key)).amax(0)


def _head_start(amap: AttentionMap, head: int) -> tuple[Tensor, Tensor]:
    """Return a head's weights among the first tokens, and their mask (True = visible), both `[t, s]`."""
    return amap[0, head, :SEARCHED, :SEARCHED].float().cpu(), _visible_start(amap, head)


def _visible_start(amap: AttentionMap, head: int, mask: Mask | None = None) -> Tensor:
    """Return True for visible keys among the first tokens, restricted to a mask if one is given, `[t, s]`."""
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
        special: Positions of tokens that are left out unless there are no others (see `left_out`).

    Returns:
        At most `PER_HEAD` findings for each head.
    """
    steps = candidate_steps(maps, ids, special)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(list[Finding], end.value)


def left_out(tokens: TokenizedText) -> list[int]:
    """Return the positions of special tokens and of blanks, which readers can't find in a text."""
    special = {*tokens.special}
    return [n for n in range(len(tokens)) if n in special or not tokens.characters(n).strip()]


def candidate_steps(
    maps: Sequence[AttentionMap], ids: Sequence[int], special: Collection[int] = ()
) -> Generator[None, None, list[Finding]]:
    """Return the same as `find_candidates`, and yield after each head, so that a caller can do other work."""
    heads = [(layer, head) for layer, amap in enumerate(maps) for head in range(amap.shape[1])]
    total, anywhere = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    for layer, head in heads:
        weights, visible = _head_start(maps[layer], head)
        total, anywhere = total + weights, anywhere | visible
        yield
    average = expected_weights(total / len(heads), anywhere)
    ordinary = torch.tensor([n not in special for n in range(len(average))])  # [t]
    ordinary = ordinary if ordinary.any() else ~ordinary
    pairs = ordinary[:, None] & ordinary  # [t, t]
    candidates: list[Finding] = []
    for layer, head in heads:
        weights, visible = _head_start(maps[layer], head)
        usual = torch.maximum(expected_weights(weights, visible), average)
        surprise = torch.special.xlogy(weights, weights / usual)  # 0 for masked keys
        surprise = surprise.masked_fill(~pairs, -math.inf)
        for index in surprise.flatten().topk(min(PER_HEAD, int(pairs.sum()))).indices.tolist():
            query, key = divmod(index, len(weights))
            numbers = float(weights[query, key]), float(usual[query, key])
            candidates.append(Finding(layer, head, query, key, *numbers, explain(query, key, ids)))
        yield
    # The interest is rounded, so that heads whose interests differ only by rounding errors keep their order.
    # (For a text of a single token, these are all heads.)
    return sorted(candidates, key=lambda finding: -round(finding.interest, 4))


def explain(query: int, key: int, ids: Sequence[int]) -> Reason | None:
    """Return the reason why a query may attend to a key: the same token, or the one that followed it.

    The token directly before a query is its previous token, even if it also followed the same token.
    """
    if key != query and ids[key] == ids[query]:
        return "same token"
    if 0 < key < query - 1 and ids[key - 1] == ids[query]:
        return "after the same token"
    return None


def select_findings(candidates: Sequence[Finding], count: int = FINDINGS) -> list[Finding]:
    """Return the most interesting candidate and a few more, the largest weight first.

    No two belong to the same head or the same pair of tokens, and each is nearly as surprising as the most
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


def describe(finding: Finding, tokens: TokenizedText) -> str:
    """Return a finding as a sentence.

    `Layer 2, head 1 — induction: the second "the" attends to "train" (0.71), the token that followed the
    first "the".`
    """
    query, key = finding.query, finding.key
    source, target, pattern, detail = name_token(query, tokens), name_token(key, tokens), "", ""
    if finding.reason == "after the same token":
        pattern, detail = " — induction", _describe_induction(query, key, tokens)
    elif abs(key - query) == 1:
        detail = f", the token {'before' if key < query else 'after'} it"
    elif key == 0 < query:
        detail = ", the first token"
    elif query < key == len(tokens) - 1:
        detail = ", the last token"
    if key in tokens.units[query]:  # both are pieces of one character
        source, target = f"{source} ({_piece(query, tokens)})", f"{target} ({_piece(key, tokens)})"
    elif source == target:  # in a long text, with the same words around them
        target = f"{'an earlier' if key < query else 'a later'} {target}"
    elif detail and not pattern:  # which says where the key is
        target = name_token(key, tokens, with_context=False)
    if key == query:
        source, target = name_token(query, tokens), "itself"
    head = f"{name_head(finding.layer, finding.head)}{pattern}"
    return f"{head}: {source} attends to {target} ({format_score(finding.weight)}){detail}."


def _describe_induction(query: int, key: int, tokens: TokenizedText) -> str:
    """Return what precedes the key: an earlier token that is the same as the query."""
    if key - 1 in tokens.units[key]:
        followed = f"the token that followed {_piece(key - 1, tokens)}"
        return f", {followed if key in tokens.units[query] else 'which shares a token with it'}"
    name, is_counted = name_token(key - 1, tokens, with_context=False), _count(key - 1, tokens) is not None
    if tokens[key - 1] != tokens[query]:  # different characters, of which a byte is the same
        return f", the token that followed {name}, which shares a token with {quote(tokens[query])}"
    return f", the token that followed {name if is_counted else f'an earlier {name}'}"


def _piece(position: int, tokens: TokenizedText) -> str:
    """Return the number of a token among those of its character: `token 2 of 3`."""
    unit = tokens.units[position]
    return f"token {position - unit[0] + 1} of {len(unit)}"


def name_head(layer: int, head: int) -> str:
    """Return the name of a head: `Layer 2, head 5`."""
    return f"Layer {layer}, head {head}"


def name_token(position: int, tokens: TokenizedText, *, with_context: bool = True) -> str:
    """Return a token in quotes, as readers find it in the text.

    If its word, or the token itself, stands several times in the text, it is numbered as a reader would count
    it: `the second "the"`, `"ing" of the first "reading"`. From the fifth on, and in a long text, it is named
    with the words around it instead, unless `with_context` is False: `"run" in "…to run the checks…"`.
    """
    word = tokens.word(position)
    name, context, number = quote(word or tokens[position]), "", _count(position, tokens)
    start, found = _find(position, tokens)
    if number is not None:
        name = f"the {ORDINALS[number]} {name}" if _is_repeated(found, tokens) else name
    elif with_context:
        context = f" in {quote(_surroundings(tokens.text, start, start + len(found)))}"
    return (f"{quote(tokens[position])} of {name}" if word else name) + context


def _find(position: int, tokens: TokenizedText) -> tuple[int, str]:
    """Return where a token's word, or the token itself, starts in the text, and its characters."""
    counted = tokens.words[position] if tokens.word(position) else tokens.units[position]
    whole = "".join(map(tokens.piece, counted))
    start = tokens.starts[counted[0]] + len(whole) - len(whole.lstrip() or whole)
    return start, whole.strip() or whole  # empty for special tokens, which aren't in the text


def _is_repeated(found: str, tokens: TokenizedText) -> bool:
    return bool(found) and count_words(tokens.text, found) > 1


def _count(position: int, tokens: TokenizedText) -> int | None:
    """Return how often a token's word stands in the text before it; None if readers wouldn't count so far."""
    start, found = _find(position, tokens)
    if not _is_repeated(found, tokens):
        return 0
    number = count_words(tokens.text, found, start)
    return number if len(tokens) <= LONG and number < len(ORDINALS) else None


def _surroundings(text: str, start: int, stop: int) -> str:
    """Return a part of a text with a few words before and after it: `…to run the checks…`."""

    def cut(places: range, outward: int, default: int) -> int:
        """Return the first place between words, and between compounds such as "well-known" if there is one.

        `outward` is −1 where the part begins, and 0 where it ends.
        """

        def is_within_compound(n: int) -> bool:
            sign, beyond = (text[at : at + 1] for at in (n + outward, n + 3 * outward + 1))
            return bool(sign) and sign in JOINING and beyond.isalnum()

        found = [
            n
            for n in places
            if n in (0, len(text))
            or (text[n - 1 - outward].isalnum() and is_boundary(text, n) and not is_within_word(text, n))
        ]
        return next((n for n in found if not is_within_compound(n)), (found or [default])[0])

    around = AROUND // 2 if unicodedata.east_asian_width(text[start]) in "FW" else AROUND
    starts, stops = (
        range(max(0, start - around), start),
        range(min(len(text), stop + around), stop, -1),
    )
    first, last = cut(starts, -1, start), cut(stops, 0, stop)
    part = text[first:last]
    shown = printable(part) if text[start:stop].isspace() else " ".join(map(printable, part.split()))
    return f"{'…' if text[:first].strip() else ''}{shown}{'…' if text[last:].strip() else ''}"


def quote(text: str) -> str:
    """Return a text in quotation marks that it doesn't contain."""
    return f"'{text}'" if '"' in text else f'"{text}"'
