"""`manyheads show`: tokens, findings, sentences, JSON, pictures, and every wrong input."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text

from manyheads import AttentionMap, Causal, attention_with_map, lm, open_run
from manyheads.highlights import (
    Finding,
    describe,
    expected_weights,
    explain,
    find_candidates,
    format_score,
    left_out,
    most_characteristic,
    name_token,
    score_heads,
    select_findings,
    uniform,
)
from manyheads.lm.data import Document, train_tokenizer
from manyheads.text import report, terminal
from manyheads.tokens import TokenizedText
from tests.conftest import Ran

SENTENCE = "the train left the station on time"
CONTEXT = 48


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model with random weights, whose attention isn't uniform."""
    torch.manual_seed(0)
    texts = [f"{SENTENCE} . the station left on time , the train on the station ."] * 3
    tokenizer = train_tokenizer([Document(str(n), text) for n, text in enumerate(texts)], 300)
    config = lm.Config(tokenizer.get_vocab_size(), embed=16, heads=2, layers=3, hidden=8, context=CONTEXT)
    model = lm.LanguageModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.q.weight", "attention.k.weight")):
                parameter.normal_(std=1.0)
    folder = tmp_path_factory.mktemp("checkpoint")
    lm.save(folder, model, tokenizer)
    return folder


@pytest.fixture
def run(run_command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Any:
    """Run `manyheads show` on the tiny model."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words, model=checkpoint, **options: run_command(
        "show", "--model", model, *words, **options
    )


def map_of(*heads: list[list[float]], causal: bool = True) -> AttentionMap:
    """A map with these weights `[h][t][t]`, those above the diagonal only if it isn't causal."""
    weights = torch.tensor(heads)  # [h, t, t]
    weights = weights.tril() if causal else weights
    weights = weights / weights.sum(-1, keepdim=True)
    t = weights.shape[-1]
    q = weights.clamp(min=1e-12).log()[None]  # q · k is the logarithm of the weight
    k = torch.eye(t).expand(1, len(heads), t, t)
    return attention_with_map(q, k, k, mask=Causal() if causal else None, scale=1.0)[1]


# -- findings --------------------------------------------------------------------------------------


def previous(t: int, share: float = 0.9) -> list[list[float]]:
    """A previous-token head."""
    return [
        [share if j == i - 1 else (1 - share) / max(i, 1) if j <= i else 0 for j in range(t)]
        for i in range(t)
    ]


def resting(t: int, share: float = 0.9) -> list[list[float]]:
    """A head that attends to the first token."""
    return [
        [share if j == 0 else (1 - share) / max(i, 1) if j <= i else 0 for j in range(t)] for i in range(t)
    ]


def test_findings_are_exceptions_to_what_a_head_usually_does() -> None:
    odd, broken = previous(8), resting(8)
    odd[6] = [0.05, 0.05, 0.75, 0.05, 0.0, 0.05, 0.05, 0.0]
    broken[5] = [0.1, 0.0, 0.0, 0.85, 0.0, 0.05, 0.0, 0.0]
    found = select_findings(find_candidates([map_of(previous(8), odd), map_of(resting(8), broken)], range(8)))
    assert [(one.layer, one.head, one.query, one.key) for one in found] == [(1, 1, 5, 3), (0, 1, 6, 2)]
    assert found[0].weight == pytest.approx(0.85, abs=1e-5)
    assert found[0].surprise == pytest.approx(0.85 * math.log(0.85 / found[0].usual), abs=1e-4)


IDS = [3, 5, 0, 3, 2, 1, 4]  # of the sentence
WORDS = TokenizedText(tuple(re.split("(?= )", SENTENCE)))


def both_ways(t: int, ahead: int, share: float = 0.9) -> list[list[float]]:
    """A head without a mask that attends to the token at this distance after the query."""
    rest = (1 - share) / (t - 1)
    return [[share if j == i + ahead else rest for j in range(t)] for i in range(t)]


def test_without_a_mask_the_next_and_the_last_token_have_scores() -> None:
    ending = [[0.9 if j == 7 else 0.02 for j in range(8)] for _ in range(8)]
    amap = map_of(both_ways(8, 1), both_ways(8, -1), ending, [[1.0] * 8] * 8, causal=False)
    assert marks(amap, torch.arange(8)) == ["next_token", "previous_token", "last_token", "entropy"]
    for one in score_heads(map_of(previous(8)), torch.arange(8)):
        assert one["next_token"] is one["last_token"] is None  # no causal head can attend to them


def test_without_a_mask_findings_are_before_and_after_the_query() -> None:
    odd, twice = both_ways(9, 1), both_ways(9, -1)
    odd[2] = [0.02, 0.02, 0.02, 0.1, 0.02, 0.02, 0.76, 0.02, 0.02]
    twice[1] = [0.06, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.8, 0.02]
    ids = [0, 1, 2, 3, 4, 5, 6, 1, 8]
    found = select_findings(find_candidates([map_of(odd, twice, causal=False)], ids))
    told = [(one.head, one.query, one.key, one.reason) for one in found]
    assert told == [(1, 1, 7, "same token"), (0, 2, 6, None)]


def test_special_tokens_have_no_findings_unless_there_are_no_others() -> None:
    odd = both_ways(8, 1)
    odd[0] = [0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.86]
    odd[4] = [0.1, 0.7, 0.05, 0.05, 0.02, 0.02, 0.02, 0.04]
    amap = map_of(odd, causal=False)
    for special, pair in ((set(), (0, 7)), ({0, 7}, (4, 1))):
        found = select_findings(find_candidates([amap], range(8), special))
        assert [(one.query, one.key) for one in found] == [pair]
    alone = find_candidates([map_of([[0.2, 0.8], [0.5, 0.5]], causal=False)], [0, 1], {0, 1})
    assert len(alone) == 4  # but if there are no others


def test_in_a_long_text_findings_are_searched_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens have the same findings as without later ones, which a causal mask excludes."""
    torch.manual_seed(0)
    q, k = 3 * torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    ids = [n % 7 for n in range(30)]
    short = attention_with_map(q[:, :, :20], k[:, :, :20], k[:, :, :20], mask=Causal())[1]
    alone = find_candidates([short], ids[:20])
    monkeypatch.setattr("manyheads.highlights.SEARCHED", 20)
    within = find_candidates([attention_with_map(q, k, k, mask=Causal())[1]], ids)
    assert [(one.head, one.query, one.key, one.reason) for one in within] == [
        (one.head, one.query, one.key, one.reason) for one in alone
    ]
    assert [one.surprise for one in within] == pytest.approx([one.surprise for one in alone], abs=1e-5)


def test_the_example_of_the_sentence() -> None:
    """A finding that the text explains comes before a sharper one."""
    copying, sharp = resting(7, 0.6), resting(7, 0.6)
    copying[3] = [0.1, 0.71, 0.1, 0.09, 0, 0, 0]
    sharp[6] = [0, 0, 0.75, 0, 0, 0.15, 0.1]
    every = find_candidates([map_of(previous(7), resting(7)), map_of(sharp, copying)], IDS)
    (first, *rest) = select_findings(every)
    sentence = describe(first, WORDS)
    assert sentence == (
        'Layer 1, head 1 — induction: the second "the" attends to "train" (0.71), the token that followed '
        'the first "the".'
    )
    assert not any((one.query, one.key) == (6, 2) for one in rest)  # nothing stronger stands below it
    assert any((one.layer, one.head, one.query, one.key) == (1, 0, 6, 2) for one in every)


def test_findings_are_a_handful_each_of_another_head_and_pair() -> None:
    torch.manual_seed(0)
    q, k = 3 * torch.randn(1, 6, 20, 8), torch.randn(1, 6, 20, 8)
    maps = [attention_with_map(q + n, k, k, mask=Causal())[1] for n in range(3)]
    ids = [n % 7 for n in range(20)]
    every = find_candidates(maps, ids)
    found = select_findings(every)
    assert 1 < len(found) <= 5
    assert found[0] == every[0] == max(every, key=lambda one: one.interest)
    assert len({(one.layer, one.head) for one in found}) == len(found)
    assert len({(one.query, one.key) for one in found}) == len(found)
    assert max(Counter(one.reason for one in found).values()) <= 2
    assert all(one.weight >= other.weight for one, other in pairwise(found))
    causal = torch.ones(20, 20).tril().bool()
    average = expected_weights(sum(maps[n].dense()[0].sum(0) for n in range(3)) / 18, causal)
    for one in found:
        weights = maps[one.layer][0, one.head]
        assert one.weight == pytest.approx(float(weights[one.query, one.key]), abs=1e-5)
        expected = torch.maximum(expected_weights(weights, causal), average)
        assert one.usual == pytest.approx(float(expected[one.query, one.key]), abs=1e-5)


def test_the_reason_of_a_weight() -> None:
    assert explain(3, 0, IDS) == "same token"
    assert explain(3, 1, IDS) == "after the same token"
    assert explain(3, 2, IDS) is explain(0, 0, IDS) is explain(4, 4, IDS) is None
    assert explain(2, 1, [7, 7, 7]) == "same token"
    assert explain(2, 1, [7, 8, 7]) is None  # the previous token, which followed the first 7, too
    assert explain(2, 2, [0, 1, 1]) is None  # itself, which needs no other reason
    assert explain(0, 3, IDS) == "same token"  # that comes later, for a head that looks ahead
    assert explain(0, 4, IDS) is None


def test_heads_without_a_choice_have_no_findings() -> None:
    assert select_findings(find_candidates([map_of([[1.0]])], [3])) == []
    assert select_findings(find_candidates([map_of([[1.0, 1.0, 1.0]] * 3)], [1, 2, 3])) == []


SEEN = {
    "causal": lambda t: torch.ones(t, t).tril(),
    "everything": lambda t: torch.ones(t, t),
    "a window": lambda t: torch.ones(t, t).tril().triu(-2),
    "both sides": lambda t: torch.ones(t, t).tril(2).triu(-2),
}


@pytest.mark.parametrize("which", SEEN)
@settings(deadline=None, max_examples=25)
@given(t=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_expected_weights_against_a_double_loop(which: str, t: int, seed: int) -> None:
    seen = SEEN[which](t).bool()
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(t, t, generator=generator).exp() * seen
    weights /= weights.sum(-1, keepdim=True)
    found = expected_weights(weights, seen)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    for i, j in seen.nonzero().tolist():
        choosing = [n for n in range(t) if n != i and int(seen[n].sum()) > 1]
        near = [n for n in choosing if abs(i - j) < 4 and 0 <= n - i + j < t and seen[n, n - i + j]]
        near_by = mean([float(weights[n, n - i + j]) for n in near])
        same_key = mean([float(weights[n, j]) for n in choosing if seen[n, j]])
        assert float(found[i, j]) == pytest.approx(max(1 / int(seen[i].sum()), near_by, same_key), abs=1e-6)


@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_head_scores_against_a_double_loop(mask: Causal | None) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([5, 1, 2, 5, 1, 3, 5])
    q, k = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    amap = attention_with_map(q, k, k, mask=mask)[1]
    said = ids.tolist()
    rules = {
        "previous_token": lambda i, j: j == i - 1,
        "next_token": lambda i, j: j == i + 1,
        "first_token": lambda i, j: j == 0,
        "last_token": lambda i, j: j == 6 != i,
        "same_token": lambda i, j: j != i and said[j] == said[i],
        "after_same_token": lambda i, j: 0 < j <= i and said[j - 1] == said[i],
        "itself": lambda i, j: j == i,
    }
    for head, scores in enumerate(score_heads(amap, ids)):
        assert scores.keys() == {*rules, "entropy"}
        weights = amap.dense()[0, head].tolist()
        for name, rule in rules.items():
            last = [7 if mask is None else i + 1 for i in range(7)]  # visible keys
            rows = [[weights[i][j] for j in range(last[i]) if rule(i, j)] for i in range(7)]
            sums = [sum(row) for row in rows if row]
            expected = pytest.approx(sum(sums) / len(sums), abs=1e-6) if sums else None
            assert scores[name] == expected
        spread = [-sum(w * math.log(w) for w in row if w) for row in weights]
        assert scores["entropy"] == pytest.approx(sum(spread) / 7, abs=1e-5)


def test_a_score_that_no_query_can_have_is_none() -> None:
    (alone,) = score_heads(map_of([[1.0]]), torch.tensor([3]))
    assert alone["previous_token"] is alone["same_token"] is alone["after_same_token"] is None
    assert (alone["first_token"], alone["itself"], alone["entropy"]) == (1.0, 1.0, 0.0)


def marks(amap: AttentionMap, ids: torch.Tensor) -> list[str]:
    return most_characteristic(amap, ids, score_heads(amap, ids), score_heads(uniform(amap), ids))


def test_the_characteristic_score_stands_out_from_a_uniform_head() -> None:
    amap = map_of(previous(8), resting(8), [[1.0] * 8] * 8)
    assert marks(amap, torch.arange(8)) == ["previous_token", "first_token", "entropy"]
    (level, *_) = score_heads(uniform(amap), torch.arange(8))
    assert level["itself"] == pytest.approx(sum(1 / n for n in range(1, 9)) / 8)


def test_attending_to_a_first_token_that_is_repeated_is_not_searching_for_the_same() -> None:
    ids = torch.tensor([3, 5, 0, 3, 2, 1, 4])
    copying, looking = resting(7, 0.6), [[1.0] * 7] * 7
    copying[3] = [0.1, 0.8, 0.05, 0.05, 0, 0, 0]
    looking = [row if n != 3 else [0.9, 0.03, 0.03, 0.04, 0, 0, 0] for n, row in enumerate(looking)]
    amap = map_of(resting(7), previous(7), copying, looking)
    own = score_heads(amap, ids)[0]
    assert own["same_token"] > own["first_token"] - 0.1  # nearly as large, but not characteristic
    said = ["first_token", "previous_token", "after_same_token", "same_token"]
    assert marks(amap, ids) == said


def test_findings_as_sentences() -> None:
    def say(query: int, key: int) -> str:
        return describe(Finding(2, 1, query, key, 0.714, 0.1, explain(query, key, IDS)), WORDS)

    assert say(3, 1) == (
        'Layer 2, head 1 — induction: the second "the" attends to "train" (0.71), the token that followed '
        'the first "the".'
    )
    assert say(3, 0) == (
        'Layer 2, head 1: the second "the" attends to the first "the" (0.71), the first token.'
    )
    assert say(4, 4) == 'Layer 2, head 1: "station" attends to itself (0.71).'
    assert say(5, 4) == 'Layer 2, head 1: "on" attends to "station" (0.71), the token before it.'
    assert say(5, 1) == 'Layer 2, head 1: "on" attends to "train" (0.71).'
    assert say(4, 5) == 'Layer 2, head 1: "station" attends to "on" (0.71), the token after it.'
    assert say(4, 6) == 'Layer 2, head 1: "station" attends to "time" (0.71), the last token.'
    assert say(0, 3) == 'Layer 2, head 1: the first "the" attends to the second "the" (0.71).'


def name(position: int, *pieces: str, special: tuple[int, ...] = ()) -> str:
    """Return a token's name in a finding: the query of one that attends to itself."""
    finding = Finding(0, 0, position, position, 0.5, 0.1, None)
    said = describe(finding, TokenizedText(pieces, special))
    return said.removeprefix("Layer 0, head 0: ").removesuffix(" attends to itself (0.50).")


def test_readers_find_a_token_by_words_and_not_by_pieces() -> None:
    pieces = "the", " the", "me", " of", " the", " rea", "ding", ", rea", "ding"
    assert name(4, *pieces) == 'the second "the"'  # the first half of "theme" isn't one
    assert name(1, *pieces) == '"the" of "theme"'
    assert name(6, *pieces) == '"ding" of the first "reading"'
    assert name(8, "a ", "rea", "ding", " and", " rea", "ding", "s", " rea", "ding") == (
        '"ding" of the second "reading"'  # "readings" is another word
    )
    assert name(2, *pieces) == '"me" of "theme"'
    assert name(0, '"', "a") == "'\"'"
    assert (
        name(2, "a", ",", "b,", ",") == 'the second "b,"' or name(3, "a", ",", "b,", ",") == 'the third ","'
    )
    assert name(0, "[CLS]", "[", "CLS", "]", special=(0,)) == '"[CLS]"'
    assert name(2, "CLS", " CLS", " CLS") == 'the third "CLS"'
    assert name(1, "机", "", "", "机", "", "") == 'the first "机"'
    assert name(3, "n", "é", "", " x") == '"x"'
    assert name(2, "n", "é", "", " x") == '"é" of "né"'
    assert name(1, "a", "\n", "b", "\n") == 'the first "⏎"'


def say(query: int, key: int, tokens: TokenizedText, reason: Any = None) -> str:
    """Return the sentence of a finding without its head."""
    return describe(Finding(0, 0, query, key, 0.5, 0.1, reason), tokens).removeprefix("Layer 0, head 0")


def test_pieces_of_a_character_are_numbered_only_where_two_of_them_are_named() -> None:
    text = TokenizedText(("机", "", "", "好", "机", "", ""))
    assert say(5, 3, text) == ': the second "机" attends to "好" (0.50).'
    assert (
        say(6, 4, text)
        == ': the second "机" (token 3 of 3) attends to the second "机" (token 1 of 3) (0.50).'
    )
    assert say(4, 1, text, "after the same token") == (
        ' — induction: the second "机" attends to the first "机" (0.50), which shares a token with it.'
    )
    assert say(6, 5, text, "after the same token") == (
        ' — induction: the second "机" (token 3 of 3) attends to the second "机" (token 2 of 3) (0.50), '
        "the token that followed token 1 of 3."
    )


def test_in_a_long_text_a_word_is_named_with_the_words_around_it() -> None:
    before, after = (
        (" To", " run", " the", " checks", ",", " call"),
        (" We", "run", " on", "\n", "\n", " the", " run"),
    )
    long = TokenizedText((*before, *(f" w{n}" for n in range(600)), *after))
    assert say(612, 1, long) == ': "run" in "…on the run" attends to "run" in "To run the checks…" (0.50).'
    assert say(3, 2, long) == ': "checks" attends to "the" (0.50), the token before it.'
    assert say(612, 2, long, "after the same token") == (
        ' — induction: "run" in "…on the run" attends to "the" in "To run the checks…" (0.50), the token '
        'that followed an earlier "run".'
    )
    assert say(607, 300, long) == ': "run" of "Werun" attends to "w294" (0.50).'
    rest = tuple(f" w{n}" for n in range(600))
    compound = TokenizedText(("a well", "-kept", " old", " ox", " or", " so-", "called", " ox", *rest))
    assert name_token(3, compound) == '"ox" in "…old ox or…"'  # without a part of a compound
    chinese = TokenizedText(tuple("今天天气很好。我们去公园散步,然后回家。" * 40))
    assert say(26, 6, chinese) == (
        ': "。" in "…今天天气很好。我们去公园散…" attends to "。" in "今天天气很好。我们去公园散…" (0.50).'
    )


def test_in_a_long_text_words_with_the_same_words_around_them_are_earlier_or_later() -> None:
    ha = TokenizedText(("ha",) + (" ha",) * 600)
    name = '"ha" in "…ha ha ha ha ha ha ha ha ha…"'
    assert say(300, 200, ha) == f": {name} attends to an earlier {name} (0.50)."
    assert say(200, 300, ha) == f": {name} attends to a later {name} (0.50)."


def test_words_are_counted_up_to_the_fourth() -> None:
    tokens = TokenizedText(("a", " one", " a", " two", " a", " three", " a", " four", " a", " five"))
    names = [name_token(n, tokens) for n in (0, 2, 4, 6, 8)]
    assert names[:4] == ['the first "a"', 'the second "a"', 'the third "a"', 'the fourth "a"']
    assert names[4] == '"a" in "…a four a five"'


def test_tokens_that_differ_to_the_eye_share_a_token() -> None:
    """Tokens of bytes can be the same in different characters."""
    tokens = TokenizedText(("的", "", "一", " ", "ل", ""))
    said = describe(Finding(2, 1, 4, 2, 0.5, 0.1, "after the same token"), tokens)
    assert said.endswith(
        '"ل" attends to "一" (0.50), the token that followed "的", which shares a token with "ل".'
    )


def test_blanks_are_left_out() -> None:
    assert left_out(TokenizedText(("[CLS]", "a", " ", "\n\n", " b", "漢", ""), (0,))) == [0, 2, 3]


# -- the command -----------------------------------------------------------------------------------


def test_findings_come_first_and_then_one_picture(run: Any) -> None:
    ran = run(SENTENCE)
    assert (ran.code, ran.err) == (0, "")
    *sentences, blank, written, more = ran.out.splitlines()
    first = re.fullmatch(r"Layer (\d), head (\d)\b.*: .+ attends to .+ \([01]\.\d\d+\).*\.", sentences[0])
    assert first
    assert len(sentences) <= 5
    findings = [sentence for sentence in sentences if sentence.startswith("Layer")]
    weights = [float(re.search(r"\((\d\.\d\d+)\)", line)[1]) for line in findings]  # type: ignore[index]
    assert weights == sorted(weights, reverse=True)
    assert all(re.fullmatch(r"Of 6 heads, .+\.", line) for line in sentences[len(findings) :])
    assert (blank, written) == ("", "wrote manyheads-out/overview.png")
    assert f"--layer {first[1]} --head {first[2]} (one head)" in more
    assert [str(path) for path in Path().rglob("*.*")] == ["manyheads-out/overview.png"]
    assert "\x1b" not in ran.out  # no terminal, no escape codes


@pytest.mark.full
def test_all_adds_a_table_a_heat_map_and_a_picture_of_one_head(run: Any) -> None:
    brief, ran = run(SENTENCE), run(SENTENCE, "--all")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    told = lines[: lines.index("")]
    assert told == brief.out.splitlines()[: len(told)]
    first = re.match(r"Layer (\d), head (\d)", lines[0])
    assert first
    # The table: a row per head, one value of each marked.
    rows = [line.split() for line in lines if re.match(r"\s+\d\s+\d\s+\d\.", line)]
    assert [(row[0], row[1]) for row in rows] == [(str(n), str(m)) for n in range(3) for m in range(2)]
    assert all(sum("*" in value for value in row) == 1 for row in rows)
    # The heat map stands between the table and the names of the files.
    assert lines.count(lines[0]) == 2  # as a finding and over the heat map
    assert any(line.split()[:2] == ["the", "0"] for line in lines)
    files = ["manyheads-out/overview.png", f"manyheads-out/layer{first[1]}-head{first[2]}.png"]
    assert lines[-1] == f"wrote {files[0]} and {files[1]}"
    assert sorted(str(path) for path in Path().rglob("*.*")) == sorted(files)
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_chosen_head_is_drawn_alone(run: Any) -> None:
    ran = run(SENTENCE, "--layer", "1", "--head", "0")
    assert ran.out.splitlines()[-1] == "wrote manyheads-out/layer1-head0.png"
    assert re.search(r"^Layer 1, head 0", ran.out, re.MULTILINE)
    assert "uniform" not in ran.out  # the table


def test_the_overview_says_what_heads_attend_to_and_outlines_the_findings(checkpoint: Path) -> None:
    reading = report.read(f"{SENTENCE} {SENTENCE}", checkpoint)
    figure = report.draw_overview(reading)["overview"]
    panels = iter(figure.axes)
    for layer, heads in enumerate(reading.patterns):
        for head, pattern in enumerate(heads):
            axes = next(panels)
            captions = [text.get_text() for text in axes.texts]
            assert captions == ([] if pattern is None else [pattern.label])
            ringed = [tuple(patch.get_xy()) for patch in axes.patches]
            assert ringed == [
                (found.key - 0.5, found.query - 0.5)
                for found in reading.findings
                if (found.layer, found.head) == (layer, head)
            ]
    (title,) = {text.get_text() for text in figure.texts} - {"query", "key"}
    source = f'model: {reading.model} · text: "'
    assert title.replace("\n", " ").startswith(f"{reading.describe(reading.findings[0])} {source}")
    assert "outlined in red" in title
    rows = json.loads(report.to_json(reading, 0, 0, []))["measures"]
    patterns = [pattern for heads in reading.patterns for pattern in heads]
    assert [row["description"] for row in rows] == [p.phrase if p else None for p in patterns]


def test_a_terminal_has_lines_of_its_width_and_names_in_bold(checkpoint: Path) -> None:
    paper = TextIOWrapper(BytesIO(), "utf-8")
    console = terminal.Console(file=paper, force_terminal=True, width=60, highlight=False)
    sentence = "Layer 2, head 5 — induction: " + "the second the attends to train " * 4
    terminal._print_sentence(console, terminal.Text(sentence))
    paper.flush()
    printed = paper.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert printed.startswith("\x1b[1mLayer 2, head 5\x1b[0m — induction")
    lines = re.sub(r"\x1b\[\d*m", "", printed).splitlines()
    assert all(len(line.rstrip()) <= 60 for line in lines)
    assert " ".join(" ".join(lines).split()) == sentence.strip()


def test_the_words_agree_with_the_model(run: Any, checkpoint: Path) -> None:
    found = json.loads(run(SENTENCE, "--json").out)
    model, tokenizer = lm.load(checkpoint)
    ids = tokenizer.encode(f" {SENTENCE}").ids
    assert [token["id"] for token in found["tokens"]] == ids
    assert "".join(token["text"] for token in found["tokens"]) == found["text"] == SENTENCE
    with torch.no_grad():  # by the kernel that showed it
        _, maps = model.attend(torch.tensor([ids]))
    for one in found["findings"]:
        weight = float(maps[one["layer"]][0, one["head"], one["query"], one["key"]])
        assert one["weight"] == pytest.approx(weight, abs=1e-5)
        assert f"({format_score(weight)})" in one["sentence"]
    assert len(found["measures"]) == 6
    for row in found["measures"]:
        weights = maps[row["layer"]].dense()[0, row["head"]]
        assert row["previous_token"] == pytest.approx(float(weights.diagonal(-1).mean()), abs=1e-6)
        assert row["itself"] == pytest.approx(float(weights.diagonal().mean()), abs=1e-6)
        assert row["first_token"] == pytest.approx(float(weights[:, 0].mean()), abs=1e-6)


def test_json_is_the_only_output(run: Any) -> None:
    ran = run(SENTENCE, "--json", "--out", "here/below", "--format", "svg", "--layer", "1", "--head", "0")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["files"] == ["here/below/overview.svg", "here/below/layer1-head0.svg"]
    assert all(Path(file).stat().st_size for file in found["files"])
    assert found["shown"] == {"layer": 1, "head": 0}
    assert found["tokens_left_out"] == 0
    assert [token["position"] for token in found["tokens"]] == list(range(len(found["tokens"])))
    assert Counter(row["layer"] for row in found["measures"]) == {0: 2, 1: 2, 2: 2}
    assert "what_if_nothing_were_masked" not in found


@pytest.mark.full
def test_no_mask_also_shows_the_head_without_the_mask(run: Any) -> None:
    ran = run(SENTENCE, "--no-mask", "--layer", "2", "--head", "1", "--format", "svg")
    assert ran.code == 0
    assert "Layer 2, head 1: what if nothing were masked" in ran.out.splitlines()
    found = json.loads(run(SENTENCE, "--no-mask", "--json").out)
    free = found["what_if_nothing_were_masked"]
    assert len(free["measures"]) == 6
    assert free["even"]["itself"] == pytest.approx(1 / len(found["tokens"]))
    assert free["measures"] != found["measures"]


@pytest.mark.full
def test_the_unmasked_head_is_labelled_in_the_picture(checkpoint: Path) -> None:
    reading = report.read(SENTENCE, checkpoint)
    drawn = report.draw(reading, 2, 1, masked=False)
    titles = [axes.get_title() for axes in drawn["layer2-head1"].axes]
    assert titles[0] == "causal, as the model computes it"
    assert titles[1] == "what if nothing were masked"
    for axes in drawn["overview"].axes:
        assert "what if" not in axes.get_title()


@pytest.mark.every(3)
@pytest.mark.parametrize(("format", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(run: Any, format: str, magic: bytes) -> None:
    assert run(SENTENCE, "--format", format, "--layer", "0", "--head", "1", "--all").code == 0
    for name in ("overview", "layer0-head1"):
        assert Path(f"manyheads-out/{name}.{format}").read_bytes().startswith(magic)


def test_the_default_head_has_the_most_interesting_finding(checkpoint: Path) -> None:
    reading = report.read(SENTENCE, checkpoint)
    first = reading.findings[0]
    assert report.choose_head(reading) == (first.layer, first.head)
    assert report.choose_head(reading, 2, 0) == (2, 0)

    def best(layer: int | None = None, head: int | None = None) -> Finding:
        fits = [c for c in reading.candidates if layer in (None, c.layer) and head in (None, c.head)]
        return max(fits, key=lambda one: one.interest)

    for layer in range(3):
        assert report.choose_head(reading, layer) == (layer, best(layer=layer).head)
    for head in range(2):
        assert report.choose_head(reading, head=head) == (best(head=head).layer, head)


def test_a_file_and_standard_input(run: Any) -> None:
    Path("text.txt").write_bytes(b"\xef\xbb\xbfthe train\r\nleft\r\n")
    from_file = json.loads(run("--text-file", "text.txt", "--json").out)
    assert "".join(token["text"] for token in from_file["tokens"]) == "the train\nleft"
    piped = json.loads(run("--text-file", "-", "--json", stdin=b"the train\nleft\n").out)
    assert piped["tokens"] == from_file["tokens"]


@pytest.mark.full
def test_truncate_keeps_the_first_tokens_with_a_note(run: Any) -> None:
    long = "the station " * 60
    ran = run(long, "--truncate", "--all")
    assert ran.code == 0
    assert f"(--truncate: only the first {CONTEXT} of " in ran.out
    rows = [line for line in ran.out.splitlines() if re.search("[·░▒▓█]{2} ", line)]
    assert len(rows) == CONTEXT // 2 + 1  # pooled to fit the terminal, and the legend
    assert max(map(len, rows)) <= 100
    assert "the largest of up to 2 × 2 weights" in ran.out
    found = json.loads(run(long, "--truncate", "--json").out)
    assert len(found["tokens"]) == CONTEXT
    assert found["tokens_left_out"] > 0
    assert "--truncate" not in run(SENTENCE, "--truncate").out


def test_a_single_token(run: Any) -> None:
    ran = run("the", "--all")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "The text has a single token, which is all that a head can attend to."
    assert "Layer 0, head 0" in ran.out.splitlines()
    found = json.loads(run("the", "--json", "--no-mask").out)
    assert len(found["tokens"]) == 1
    assert found["findings"] == []
    assert found["measures"][0]["previous_token"] is None
    assert found["shown"] == {"layer": 0, "head": 0}


@pytest.mark.full
@pytest.mark.parametrize(
    "text", ["$x$ [bold]:smile: \x1b[31m", "漢字 🙂 é \u202e \u200b", "'\"'", "-- ---", "a\x07b\r\x00c"]
)
def test_any_text_is_printed_without_markup_or_escapes(run: Any, text: str) -> None:
    Path("text.txt").write_text(text, "utf-8")
    ran = run("--text-file", "text.txt", "--truncate", "--all")
    assert (ran.code, ran.err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\u200b]", ran.out)


def test_an_ascii_output_gets_ascii_only(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(paper, encoding="ascii"))
    assert run("the ␣ ⏎ left", "--all").code == 0
    sys.stdout.flush()
    assert "## " in paper.getvalue().decode("ascii")


def test_a_terminal_gets_colours(checkpoint: Path) -> None:
    from rich.console import Console

    reading = report.read(SENTENCE, checkpoint)
    paper = Console(file=TextIOWrapper(BytesIO()), force_terminal=True, color_system="truecolor", width=90)
    picture = terminal.draw_heat_map(reading.maps[0], 0, reading.tokens, paper)
    assert any("rgb(253,231,36)" in str(span.style) for span in picture.spans)  # a weight of 1
    assert "█" not in picture.plain


LANGUAGES = ["我爱机器学习，机器也爱我。", "السلام عليكم يا عالم", "नमस्ते दुनिया", "a 👩‍👧 is né\n\tx"]


@pytest.mark.parametrize("text", LANGUAGES)
def test_people_read_what_they_wrote(text: str, checkpoint: Path) -> None:
    """In JSON, in an SVG file, in the terminal and in a saved run."""
    reading = report.read(text, checkpoint, truncate=True)
    written = reading.tokens.text
    assert text.startswith(written)
    found = json.loads(report.to_json(reading, 0, 0, []))
    assert "".join(token["text"] for token in found["tokens"]) == found["text"] == written
    file = BytesIO()
    report.draw(reading, 0, 0)["layer0-head0"].savefig(file, format="svg")
    elements = ElementTree.fromstring(file.getvalue()).iter("{http://www.w3.org/2000/svg}text")
    shown = [element.text for element in elements]
    tokens = reading.tokens
    names = [tokens.word(word[0]) or tokens[word[0]] for word in dict.fromkeys(tokens.words)]
    keys = shown[: shown.index("key")]
    queries = shown[len(keys) + 1 : shown.index("query")]
    assert keys == queries == names
    reading.recording.save(path := checkpoint.parent / "run.safetensors")
    assert open_run(path)[0].tokens == reading.tokens


def test_the_terminal_names_characters_and_words(checkpoint: Path) -> None:
    console = terminal.Console(file=TextIOWrapper(BytesIO(), "utf-8"), width=200)
    reading = report.read("né 机 the", checkpoint)
    lines = terminal.draw_heat_map(reading.maps[0], 0, reading.tokens, console).plain.splitlines()
    rows = [f"{name} {n}".strip() for n, name in enumerate(reading.tokens.names)]
    assert rows[:3] == ["n 0", "é 1", "2"] or rows[:3] == ["␣ 0", "n 1", "é 2"]
    assert all(line.lstrip().startswith(row) for line, row in zip(lines, rows, strict=False))
    reading = report.read("zqzq " * 9, checkpoint)  # not all have a row: a piece is named by its word
    lines = terminal.draw_heat_map(reading.maps[0], 0, reading.tokens, console).plain.splitlines()
    assert len(lines) < len(reading.tokens)
    assert {line.split()[0] for line in lines[:15]} <= {"zqzq", "␣"}


# -- beyond the context ----------------------------------------------------------------------------

BEYOND = rf"\(tokens from {CONTEXT} on are beyond the trained context of {CONTEXT} \(extrapolated\)\)"


@pytest.mark.full
def test_a_long_text_is_read_and_labelled_and_its_time_estimated(run: Any) -> None:
    Path("long.txt").write_text("the train left the station on time " * 500)
    ran = run("--long", "--text-file", "long.txt", "--save", "run.safetensors")
    assert ran.code == 0
    assert re.fullmatch(r"reading 3,50\d tokens, about .+ (second|seconds|minutes)\n", ran.err), ran.err
    assert re.search(BEYOND, ran.out)
    assert all(Path(f"manyheads-out/{one.name}").stat().st_size for one in Path("manyheads-out").iterdir())
    seen = open_run("run.safetensors")
    assert seen.provenance["extrapolated_from"] == CONTEXT
    assert seen[0].shape[2] == len(seen.provenance["ids"]) > 3500

    found = json.loads(run("--long", "--text-file", "long.txt", "--json").out)
    assert sum("extrapolated" in note for note in found["notes"]) == 1
    assert len(found["tokens"]) == len(seen.provenance["ids"])
    amap = seen[found["shown"]["layer"]]
    (row,) = [one for one in found["measures"] if (one["layer"], one["head"]) == (1, 1)]
    assert row["first_token"] == pytest.approx(float(seen[1][0, 1, :, 0].mean()), abs=1e-5)
    assert amap.shape[3] == len(found["tokens"])


def test_extrapolated_tokens_are_marked_in_every_picture(checkpoint: Path) -> None:
    reading = report.read(f"{SENTENCE} " * 10, checkpoint, long=True)
    assert reading.trained == CONTEXT < len(reading.ids)
    for figure in report.draw(reading, 1, 0).values():
        words = " ".join(text.get_text().replace("\n", " ") for text in figure.findobj(Text))
        assert f"tokens from {CONTEXT} on are beyond the trained context (extrapolated)" in words
        for axes in figure.axes:
            if axes.images:
                (line,) = axes.lines
                assert list(line.get_ydata()) == [CONTEXT - 0.5] * 2


@pytest.mark.full
def test_long_changes_nothing_for_a_text_within_the_context(run: Any) -> None:
    plain, long = run(SENTENCE, "--json"), run(SENTENCE, "--json", "--long")
    assert (long.out, long.err, long.code) == (plain.out, "", 0)
    reading = report.read("the station " * 60, truncate=True, model=None)
    assert reading.trained is None


@pytest.mark.full
def test_longer_texts_raise_or_are_truncated(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.LONGEST == 32_768
    monkeypatch.setattr(report, "LONGEST", 100)
    long = "the station " * 60
    refused(
        run(long, "--long"), r"at most 100 tokens, got \d{3}\. Shorten it, or keep the first 100 tokens with"
    )
    refused(run(long), rf"at most {CONTEXT} tokens, got \d+\. Read up to 100 tokens with --long")
    found = json.loads(run(long, "--long", "--truncate", "--json").out)
    assert len(found["tokens"]) == 100
    assert found["tokens_left_out"] > 0
    assert any(note.startswith("--truncate: only the first 100 of") for note in found["notes"])


def test_the_time_is_estimated_from_the_first_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5 seconds per text, 3 per token and 2 per pair of tokens, the estimate is exact."""
    clock = [0.0]

    class Reader:
        def read(self, ids: list[int]) -> dict[str, Any]:
            clock[0] += 5 + 3 * len(ids) + 2 * len(ids) ** 2
            return {}

    monkeypatch.setattr(report, "perf_counter", lambda: clock[0])
    for t in (3, 9, 100, 3000):
        assert report.estimate_time(Reader(), range(t)) == pytest.approx(5 + 3 * t + 2 * t * t)  # type: ignore[arg-type]
    said = {0.1: "a second", 2.4: "2 seconds", 12.0: "10 seconds", 41.0: "40 seconds", 89.0: "90 seconds"}
    said |= {100.0: "2 minutes", 200.0: "3 minutes"}
    assert {seconds: report.round_duration(seconds) for seconds in said} == {
        seconds: f"about {text}" for seconds, text in said.items()
    }


# -- bad input -------------------------------------------------------------------------------------


def refused(ran: Ran, says: str) -> None:
    """One sentence on standard error, exit code 2, and nothing else anywhere."""
    assert ran.code == 2
    assert ran.out == ""
    assert re.fullmatch(r"manyheads: [^\n]+\.\n", ran.err), ran.err
    assert re.search(says, ran.err), ran.err
    assert not [path for path in Path().rglob("*") if path.suffix in (".png", ".part") or path.name[0] == "."]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "got neither"),
        ([SENTENCE, "--text-file", "-"], "got both"),
        ([""], "got a blank TEXT"),
        (["  \n\t "], "got a blank TEXT"),
        (["\udcff"], "invalid byte at 0 of TEXT"),
        (["--text-file", "-"], "got a blank standard input"),
        (["--text-file", "absent.txt"], "absent.txt can't be read: No such file"),
        (["--text-file", "."], "can't be read: Is a directory"),
        (["--text-file", "latin.txt"], "Expected UTF-8 text, got an invalid byte at 3 of latin.txt"),
        (["--long", ""], "got a blank TEXT"),
        (["--long", "--text-file", "absent.txt"], "absent.txt can't be read: No such file"),
        (["the station " * 60], rf"at most {CONTEXT} tokens, got \d+.*--truncate"),
        ([SENTENCE, "--layer", "3"], "Expected --layer to be between 0 and 2, got 3"),
        ([SENTENCE, "--layer", "-1"], "Expected --layer to be between 0 and 2, got -1"),
        ([SENTENCE, "--head", "2"], "Expected --head to be between 0 and 1, got 2"),
        ([SENTENCE, "--layer", "0", "--head", "99"], "Expected --head to be between 0 and 1, got 99"),
        ([SENTENCE, "--format", "gif"], "png, svg, pdf, got 'gif'"),
        ([SENTENCE, "--out", "latin.txt"], "got the file latin.txt"),
        ([SENTENCE, "--out", "latin.txt/deeper"], "latin.txt/deeper can't be written"),
        ([SENTENCE, "--out", "/proc/none/such"], "/proc/none/such can't be written"),
        ([SENTENCE, "--json", "--out", "latin.txt"], "got the file latin.txt"),
    ],
)
def test_bad_input_raises_one_sentence(run: Any, arguments: list[str], says: str) -> None:
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    refused(run(*arguments), says)


@pytest.mark.parametrize("arguments", [["--layer", "two"], ["--no-such-option"], ["two", "texts"]])
def test_wrong_use_exits_with_2(run: Any, arguments: list[str]) -> None:
    ran = run(SENTENCE, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err


def test_invalid_models_raise(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    refused(run(SENTENCE, model="absent"), "absent")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        for kind, harm in {
            "missing": lambda file: file.unlink(),
            "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
            "foreign": lambda file: file.write_bytes(b'{"model_type": "llama"}'),
        }.items():
            folder = tmp_path / f"{kind}-{name}"
            folder.mkdir()
            for file in checkpoint.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            harm(folder / name)
            refused(run(SENTENCE, model=folder), re.escape(name) if kind == "missing" else kind)


@pytest.mark.full
def test_a_picture_that_cannot_be_written_leaves_the_old_ones(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(SENTENCE, "--layer", "0", "--head", "0", "--all").code == 0
    before = {path: path.read_bytes() for path in Path("manyheads-out").iterdir()}
    real = report.Figure.savefig

    def full(figure: Any, path: Path, **options: Any) -> None:
        real(figure, path, **options)
        if "layer" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.Figure, "savefig", full)
    ran = run("on time on time", "--layer", "0", "--head", "0", "--all")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "No space left" in ran.err
    assert {path: path.read_bytes() for path in Path("manyheads-out").iterdir()} == before


def test_an_interrupt_exits_with_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report.Figure, "savefig", interrupted)
    ran = run(SENTENCE)
    assert ran.code == 130
    assert "Traceback" not in ran.err
    assert list(Path("manyheads-out").iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("columns", [30, 40, 60, 72, 80, 200])
def test_no_number_is_cut_on_a_narrow_terminal(
    run: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    def numbers(text: str) -> list[str]:
        return sorted(re.findall(r"\d\.\d\d\*?", text))

    wide = numbers(run(SENTENCE, "--all").out)
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = run(SENTENCE, "--all").out
    assert numbers(narrow) == wide
    assert "…" not in narrow.partition("what each head")[2].partition("Layer 0, head")[0].partition("*: ")[0]


# -- the model that ships --------------------------------------------------------------------------


def test_the_shipped_model_copies_repeated_words() -> None:
    """Over repeated words, the first finding is an induction head."""
    words = "socket tuple banana yield matrix window garden import letter number silver thread"
    reading = report.read(f"{words} {words}")
    assert reading.findings[0].reason == "after the same token", reading.findings
    marks = {mark for layer in reading.characteristic for mark in layer}
    assert {"previous_token", "after_same_token"} <= marks
