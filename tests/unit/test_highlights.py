"""What a head attends to, in words."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads import Causal, attention_with_map
from manyheads.highlights import (
    MAJORITY,
    PATTERNS,
    REPEATS,
    Pattern,
    describe_head,
    find_pattern,
    format_score,
    summarize,
)
from manyheads.maps import AttentionMap
from manyheads.observe.table import score_heads


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({"previous_token": 1.0, "first_token": 0.2}, "attends to the previous token (1.00)"),
        ({"first_token": 0.62, "entropy": 1.9}, "attends to the first token (0.62)"),
        ({"first_position": 0.62, "current_token": 0.3}, "attends to the first token (0.62)"),
        ({"current_token": 0.97}, "attends to the token itself (0.97)"),
        ({"next_token": 0.8}, "attends to the next token (0.80)"),
        ({"last_position": 0.8}, "attends to the last token (0.80)"),
        # Repeated tokens are the more specific pattern: what the head does where it can.
        (
            {"induction": 0.81, "first_token": 0.9},
            "attends to the token after an earlier occurrence (induction, 0.81)",
        ),
        (
            {"duplicate_token": 0.7, "first_token": 0.6},
            "attends to earlier occurrences of the same token (0.70)",
        ),
        ({"same_token": 0.7}, "attends to other occurrences of the same token (0.70)"),
        # But not if a pattern of positions explains it.
        ({"induction": 0.81, "previous_token": 0.9}, "attends to the previous token (0.90)"),
        ({"duplicate_token": 0.7, "first_token": 0.8}, "attends to the first token (0.80)"),
        # No pattern has most of the weight.
        ({"previous_token": 0.49, "first_token": 0.3, "entropy": 1.0}, None),
        (
            {"previous_token": 0.02, "entropy": 5.1},
            "spreads over about 160 tokens (entropy 5.1 nats)",
        ),
        ({"entropy": 9.35}, "spreads over about 11,000 tokens (entropy 9.3 nats)"),
        (
            {"induction": None, "previous_token": None, "first_token": 1.0},
            "attends to the first token (1.00)",
        ),
        ({}, None),
    ],
)
def test_a_head_in_words(scores: dict[str, float | None], words: str | None) -> None:
    assert describe_head(scores) == words


def test_a_score_below_1_isnt_written_as_1() -> None:
    written = {
        0.0: "0.00",
        0.7149: "0.71",
        0.9949: "0.99",
        0.9951: "0.995",
        0.9986: "0.999",
        0.99951: "0.9995",
    }
    written |= {0.99996: "1.00", 1.0: "1.00", 5.1: "5.10", -0.9986: "-0.999"}
    assert {value: format_score(value) for value in written} == written


def test_labels_are_short() -> None:
    assert Pattern("previous_token", 0.996).label == "previous token 0.996"
    assert Pattern("induction", 0.81).label == "induction 0.81"
    assert Pattern("entropy", 5.1).label == "about 160 tokens"
    assert all(len(Pattern(name, 1.0).label) < 20 for name in PATTERNS)


def test_what_a_uniform_head_has_too_is_no_pattern() -> None:
    uniform = {"first_token": 0.54, "previous_token": 0.36, "entropy": 0.8}
    assert describe_head(uniform) is not None
    assert describe_head(uniform, uniform) is None
    assert describe_head({**uniform, "first_token": 0.73}, uniform) is None
    assert describe_head({**uniform, "first_token": 0.75}, uniform) == "attends to the first token (0.75)"


def test_a_pattern_of_repeated_tokens_needs_several_of_them() -> None:
    scores = {"induction": 0.9, "first_token": 0.6}
    assert describe_head(scores, repeats=REPEATS) == describe_head(scores)
    assert describe_head(scores, repeats=REPEATS - 1) == "attends to the first token (0.60)"


def test_all_heads_in_a_sentence() -> None:
    first, before, copies = (Pattern(name, 0.9) for name in ("first_token", "previous_token", "induction"))
    spread = Pattern("entropy", 3.0)
    assert summarize([None, spread]) is None
    assert summarize([None, before]) == "Of 2 heads, 1 attends mostly to the previous token."
    assert summarize([None, before, first, first]) == (
        "Of 4 heads, 2 attend mostly to the first token and 1 to the previous token."
    )
    assert summarize([copies, copies, copies, first, first, before, spread]) == (
        "Of 7 heads, 3 attend mostly to the token after an earlier occurrence (induction), "
        "2 to the first token and 1 to the previous token."
    )


@given(st.dictionaries(st.sampled_from(sorted(PATTERNS)), st.floats(0, 1)), st.floats(0, 12))
def test_the_words_name_a_score_that_is_high_or_the_entropy(scores: dict[str, float], entropy: float) -> None:
    found = find_pattern({**scores, "entropy": entropy})
    if found is None:
        assert max(scores.values(), default=0) < MAJORITY or all(
            name in ("induction", "duplicate_token", "same_token")
            for name, value in scores.items()
            if value >= MAJORITY
        )
    elif found.name == "entropy":
        assert found.value == entropy
    else:
        assert found.value == scores[found.name] >= MAJORITY


def one_hot(keys: list[int]) -> AttentionMap:
    """A causal head whose query i attends to keys[i]."""
    t = len(keys)
    q = torch.full((t, t), 0.0)
    q[torch.arange(t), torch.tensor(keys)] = 30.0
    return attention_with_map(
        q[None, None], torch.eye(t)[None, None], torch.eye(t)[None, None], scale=1.0, mask=Causal()
    )[1]


def described(keys: list[int], ids: list[int]) -> str | None:
    """Return the words for the scores of the table of a recording, as the viewer has them."""
    columns = score_heads(one_hot(keys), torch.tensor(ids))
    return describe_head({name: float(column[0, 0]) for name, column in columns.items()})


def test_the_scores_of_a_table_describe_heads_of_each_kind() -> None:
    t, ids = 12, [0, 1, 2, 3, 4, 5] * 2
    assert described([max(0, n - 1) for n in range(t)], ids) == "attends to the previous token (1.00)"
    assert described([0] * t, ids) == "attends to the first token (1.00)"
    assert described(list(range(t)), ids) == "attends to the token itself (1.00)"
    copying = [0] * 6 + [n - 5 for n in range(6, t)]
    assert described(copying, ids) == "attends to the token after an earlier occurrence (induction, 1.00)"
    same = [0] * 6 + [n - 6 for n in range(6, t)]
    assert described(same, ids) == "attends to earlier occurrences of the same token (1.00)"


def test_a_uniform_head_spreads_over_as_many_tokens_as_it_sees() -> None:
    t = 400
    x = torch.zeros(1, 1, t, 4)
    amap = attention_with_map(x, x, x)[1]
    assert math.isclose(float(amap.entropy().mean()), math.log(t), abs_tol=1e-4)
    assert describe_head({"entropy": float(amap.entropy().mean())}) == (
        "spreads over about 400 tokens (entropy 6.0 nats)"
    )
