"""Alignments: planted ones, noise, words and times, masked keys, tiles; heads that follow the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from manyheads import alignment
from manyheads.alignment import Alignment
from manyheads.maps import AttentionMap
from manyheads.masks import Keep, Lengths, Mask
from manyheads.observe import Recording
from manyheads.problem import Problem
from manyheads.tokens import TokenizedText

CROSS = "decoder.layers.{}.encoder_attn"


def map_of(scores: Tensor, mask: Mask | None = None) -> AttentionMap:
    """A map with these scores `[b, h, t, s]`: queries are unit vectors, and keys columns of scores."""
    b, h, t, _ = scores.shape
    q = torch.eye(t, dtype=scores.dtype).expand(b, h, t, t).contiguous()
    k = scores.mT.contiguous()
    return AttentionMap.of(Problem.of(q, k, k[..., :1], scale=1.0, mask=mask, offset=0))


def planted(
    starts: Sequence[int], s: int, noise: float = 0.0, peak: float = 8.0, seed: int = 0, h: int = 1
) -> Tensor:
    """Scores `[1, h, t, s]` in which each token attends to its keys, from its start to the next."""
    generator = torch.Generator().manual_seed(seed)
    scores = noise * torch.randn(1, h, len(starts), s, generator=generator, dtype=torch.float64)
    for token, (start, stop) in enumerate(zip(starts, [*starts[1:], s], strict=True)):
        scores[:, :, token, start:stop] += peak
    return scores


def recording_of(*layers: Tensor, mask: Mask | None = None) -> Recording:
    recording = Recording()
    for n, scores in enumerate(layers):
        recording._calls[CROSS.format(n)] = [map_of(scores, mask)]
    return recording


@st.composite
def planted_starts(draw: st.DrawFn) -> tuple[list[int], int]:
    lengths = draw(st.lists(st.integers(5, 20), min_size=2, max_size=8))
    return [sum(lengths[:n]) for n in range(len(lengths))], sum(lengths)


@given(planted_starts(), st.sampled_from([0.0, 0.5]), st.integers(0, 1000))
@settings(max_examples=25)
def test_planted_starts_are_found(drawn: tuple[list[int], int], noise: float, seed: int) -> None:
    starts, s = drawn
    scores = planted(starts, s, noise, seed=seed)
    found = recording_of(scores).align([(0, 0)], median_filter=3, dtype=torch.float64)
    assert found.starts.tolist() == starts
    assert found.ends.tolist() == [*starts[1:], s]


def test_the_mean_of_noisy_heads_is_better_than_a_head() -> None:
    starts = list(range(0, 200, 10))
    scores = planted(starts, 200, noise=2.5, peak=3.0, h=8)
    recording = recording_of(scores)
    errors = [
        (recording.align(heads).starts - torch.tensor(starts)).abs().double().mean()
        for heads in ([(0, 0)], [(0, n) for n in range(8)])
    ]
    assert errors[1] < 1 < errors[0]


# -- heads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 1.0, 2.0])
def test_planted_heads_are_found_among_others(noise: float) -> None:
    """Among random heads, a sink, heads that attend to all keys, and one that reads backwards."""
    starts, s = list(range(0, 240, 20)), 240
    sink = torch.zeros(1, 1, len(starts), s, dtype=torch.float64)
    sink[..., 3] = 12.0
    backwards = planted(starts, s).flip(-1)
    random = planted(starts, s, noise=2.0, peak=0.0, seed=5, h=3)
    first = torch.cat((sink, planted(starts, s, noise, peak=5.0, seed=1), random), 1)
    second = torch.cat((backwards, torch.zeros_like(sink), planted(starts, s, noise, peak=5.0, seed=2)), 1)
    heads = recording_of(first, second).find_alignment_heads(least=-1.0, most=100)
    assert {(head.layer, head.head) for head in heads[:2]} == {(CROSS.format(0), 1), (CROSS.format(1), 2)}
    assert min(head.score for head in heads[:2]) > 4 * max(head.score for head in heads[2:])
    assert [head.score for head in heads] == sorted((head.score for head in heads), reverse=True)


def test_the_score_is_the_weight_on_own_keys_beyond_that_of_the_average_token() -> None:
    starts, s = [0, 10, 30, 45], 60
    scores = planted(starts, s, noise=0.3, peak=3.0)
    recording = recording_of(scores)
    [head] = recording.find_alignment_heads()
    path = recording.align([head], dtype=torch.float64).path
    w = scores.softmax(-1)[0, 0]
    want = sum(w[i, j] - w[:, j].mean() for i, j in path.tolist()) / len(starts)
    assert head.score == pytest.approx(float(want), abs=1e-12)


def test_perfect_heads_score_one_minus_one_token_and_equal_rows_zero() -> None:
    starts, s = list(range(0, 100, 10)), 100
    [head] = recording_of(planted(starts, s, peak=100.0)).find_alignment_heads()
    assert head.score == pytest.approx(0.9)
    same = torch.randn(1, 2, 1, 50).expand(1, 2, 6, 50)
    assert all(abs(head.score) < 1e-6 for head in recording_of(same).find_alignment_heads(least=-1.0))


def test_without_named_heads_the_best_are_used() -> None:
    starts, s = list(range(0, 60, 10)), 60
    random = planted(starts, s, noise=1.0, peak=0.0, h=2)
    recording = recording_of(torch.cat((random, planted(starts, s)), 1))
    found = recording.align()
    assert found.heads == ((CROSS.format(0), 2),)
    with pytest.raises(ValueError, match="No head's weights follow the order of the tokens"):
        recording_of(random).align()


# -- the weights that are aligned ----------------------------------------------------------------------


def test_padding_is_left_out() -> None:
    """The sequence with masked keys is aligned as the shorter one, on either side."""
    starts = [0, 10, 30]
    scores = planted(starts, 50, noise=0.3)
    padded = torch.cat((scores, 9 * torch.ones(1, 1, 3, 20, dtype=scores.dtype)), -1)
    want = recording_of(scores).align([(0, 0)])
    found = recording_of(padded, mask=Lengths(torch.tensor([50]))).align([(0, 0)])
    assert torch.equal(found.path, want.path)
    left = torch.cat((padded[..., 50:], scores), -1)
    found = recording_of(left, mask=Lengths(torch.tensor([50]), left=True)).align([(0, 0)])
    assert torch.equal(found.path, want.path + torch.tensor([0, 20]))
    assert found.keys.tolist() == list(range(20, 70))
    holes = torch.ones(1, 1, 1, 70, dtype=torch.bool)
    holes[..., 5] = False
    assert 5 not in recording_of(padded, mask=Keep(holes)).align([(0, 0)]).path[:, 1].tolist()
    with pytest.raises(ValueError, match="keys to be visible, got 20 that are masked, such as 50"):
        recording_of(padded, mask=Lengths(torch.tensor([50]))).align([(0, 0)], keys=slice(0, 70))


def test_chosen_queries_and_keys_are_aligned_alone() -> None:
    scores = planted([0, 5, 20, 40, 55], 80, noise=0.5)
    found = recording_of(scores).align([(0, 0)], queries=slice(1, 4), keys=slice(5, 60))
    alone = recording_of(scores.log_softmax(-1)[:, :, 1:4, 5:60]).align([(0, 0)], normalize=True)
    # The weights of the part differ by the factor of each row, so a planted path is compared.
    assert found.starts.tolist() == (alone.starts + 5).tolist() == [5, 20, 40]
    assert found.queries.tolist() == [1, 2, 3]
    assert found.path[:, 0].unique().tolist() == [1, 2, 3]
    every_second = recording_of(scores).align([(0, 0)], keys=list(range(0, 80, 2)))
    assert every_second.starts.tolist() == [0, 6, 20, 40, 56]


@pytest.mark.parametrize("t", [1, 2, 5])
@pytest.mark.parametrize("s", [1, 2, 3, 4, 9])
def test_few_tokens_and_keys(t: int, s: int) -> None:
    """Too few keys for the median filter, one token, more tokens than keys; equal weights say nothing."""
    for scores in (torch.randn(1, 2, t, s), torch.zeros(1, 2, t, s)):
        found = recording_of(scores).align([(0, 0), (0, 1)])
        assert found.path[0].tolist() == [0, 0]
        assert found.path[-1].tolist() == [t - 1, s - 1]
        assert len(found.starts) == len(found.ends) == t
        assert found.pooled(1, 1).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_and_blocks_of_any_size_give_the_same_path(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = planted(list(range(0, 300, 20)), 300, noise=2.0, peak=3.0, h=3)
    recording = recording_of(scores, 0.9 * scores.flip(1))
    heads = [(0, 0), (0, 2), (1, 1)]
    want, best = recording.align(heads, dtype=dtype), recording.find_alignment_heads(least=-1.0)
    pooled, largest = want.pooled(5, 7), want.largest()
    for name, size in (("TILE", 500), ("KEPT", 2000), ("BLOCK", 100), ("NARROWEST", 10), ("CHUNK", 2)):
        monkeypatch.setattr(alignment, name, size)
    found, again = recording.align(heads, dtype=dtype), recording.find_alignment_heads(least=-1.0)
    assert torch.equal(found.path, want.path)
    assert [head[:2] for head in again] == [head[:2] for head in best]
    torch.testing.assert_close([head.score for head in again], [head.score for head in best])
    torch.testing.assert_close(found.pooled(5, 7), pooled)
    assert torch.equal(found.largest(), largest)


def test_the_pooled_weights_are_means_of_the_heads() -> None:
    scores = planted([0, 8, 16], 24, noise=1.0, h=3)
    found = recording_of(scores).align([(0, 0), (0, 2)])
    w = scores.softmax(-1)[0, [0, 2]].mean(0)
    torch.testing.assert_close(found.pooled(3, 24), w.float())
    torch.testing.assert_close(found.pooled(1, 6), w.mean(0).unflatten(0, (6, 4)).mean(-1)[None].float())
    assert torch.equal(found.largest(), w.argmax(-1))


# -- times and words -----------------------------------------------------------------------------------


def timed(tokens: Any, starts: Sequence[int], s: int, **options: Any) -> Alignment:
    recording = recording_of(planted(starts, s))
    return recording.align([(0, 0)], tokens=tokens, median_filter=1, dtype=torch.float64, **options)


def test_times_are_keys_times_seconds() -> None:
    found = timed(["a", "b"], [0, 30], 50, seconds=0.02)
    torch.testing.assert_close(found.times, torch.tensor([[0, 0.6], [0.6, 1.0]], dtype=torch.float64))
    with pytest.raises(ValueError, match="has no seconds"):
        timed(["a", "b"], [0, 30], 50).times  # noqa: B018
    assert "tokens: 2, keys: 50, 0.02 s each, heads: 1" in repr(found)


def test_tokens_of_a_word_and_punctuation_are_joined() -> None:
    pieces = ("<s>", ' "', "Un", "believ", "able", ',"', " she", " said", " –", " twice", ".", "</s>")
    text = TokenizedText(pieces, special=(0, 11))
    starts = list(range(0, 120, 10))
    words = timed(text, starts, 120, seconds=0.1).words
    assert [(word.text, word.start, word.end) for word in words] == [
        ('"Unbelievable,"', 1.0, 6.0),
        ("she", 6.0, 7.0),
        ("said", 7.0, 8.0),
        ("–", 8.0, 9.0),
        ("twice.", 9.0, 11.0),
    ]
    assert "".join(text.pieces[n] for word in words for n in word.tokens) == text.text
    assert timed(text, starts, 120).words[0].start == 10  # keys
    # Special tokens aren't words, and chosen queries keep their labels.
    prompted = timed(text, starts, 120, queries=slice(6, None))
    assert [word.text for word in prompted.words] == ["she", "said", "–", "twice."]
    assert prompted.words[0].tokens == range(1)


def test_words_of_a_text_without_spaces_are_its_tokens() -> None:
    text = TokenizedText(("今日", "は", "。"))
    assert [word.text for word in timed(text, [0, 10, 20], 30).words] == ["今日", "は。"]


@pytest.mark.parametrize("tokens", [None, ["a", "b"]])
def test_words_need_a_text(tokens: Any) -> None:
    with pytest.raises(ValueError, match="Expected a TokenizedText, which knows words"):
        timed(tokens, [0, 30], 50).words  # noqa: B018


# -- wrong arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": []}, ValueError, "pairs .layer, head., got none"),
        ({"heads": 5}, TypeError, "pairs .layer, head., got an int"),
        ({"heads": [0, 1]}, TypeError, "got 0"),
        ({"heads": [(0, 9)]}, ValueError, "has the heads 0, and heads= names head 9"),
        ({"heads": [(0, True)]}, TypeError, "whole number, got True"),
        ({"heads": [(0, 0), (0, 0)]}, ValueError, "different heads"),
        ({"heads": [(3, 0)]}, KeyError, "no cross-attention layer 3: 1 were recorded"),
        ({"heads": [("encoder.5", 0)]}, KeyError, "No layer"),
        ({"batch": 1}, ValueError, "batch to be at most 0"),
        ({"queries": slice(9, None)}, ValueError, "which selects none"),
        ({"queries": [1, 0]}, ValueError, "increasing order"),
        ({"queries": 3}, TypeError, "got an int. For one of them, use queries="),
        ({"keys": "a"}, TypeError, "got a str"),
        ({"queries": []}, ValueError, "which selects none"),
        ({"queries": slice("a", None)}, TypeError, "a slice of integers"),
        ({"keys": [0, 99]}, ValueError, "keys between 0 and 49"),
        ({"keys": torch.ones(3, dtype=torch.bool)}, ValueError, "50 booleans, got 3"),
        ({"tokens": ["a"]}, ValueError, "labels of all 2 queries, got 1"),
        ({"tokens": "ab"}, TypeError, "list of strings"),
        ({"tokens": [7, 8]}, TypeError, "to be strings, got 7. Convert ids"),
        ({"seconds": 0}, ValueError, "a positive number, got 0"),
        ({"seconds": "1"}, TypeError, "the duration of a key"),
        ({"median_filter": 4}, ValueError, "to be odd, got 4"),
        ({"median_filter": 0}, ValueError, "at least 1"),
        ({"normalize": 1}, TypeError, "True or False"),
        ({"dtype": torch.float16}, TypeError, "torch.float32 or torch.float64"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    recording = recording_of(planted([0, 20], 50))
    with pytest.raises(error, match=message):
        recording.align(**{"heads": [(0, 0)], **options})


def test_a_batch_needs_the_number_of_a_sequence() -> None:
    scores = torch.cat((planted([0, 20], 50), planted([0, 35], 50)))
    recording = recording_of(scores)
    for call in (recording.align, recording.find_alignment_heads):
        with pytest.raises(ValueError, match="one of the 2 sequences"):
            call()
    assert [recording.align([(0, 0)], batch=n).starts.tolist() for n in range(2)] == [[0, 20], [0, 35]]


def test_heads_of_layers_of_different_lengths() -> None:
    recording = recording_of(planted([0, 20], 50), planted([0, 20], 60))
    with pytest.raises(
        ValueError, match=r"as many queries and keys, got \[t, s\] of \[2, 50\] and \[2, 60\]"
    ):
        recording.align([(0, 0), (1, 0)])


def test_weights_that_arent_finite_raise() -> None:
    scores = planted([0, 20], 50)
    scores[0, 0, 1, 7] = torch.nan
    with pytest.raises(ValueError, match="Expected finite weights to align, got NaN"):
        recording_of(scores).align([(0, 0)])
    with pytest.raises(ValueError, match="Expected finite weights to align, got NaN"):
        recording_of(scores).find_alignment_heads()
