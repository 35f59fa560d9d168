"""The language model's text, tokens and batches."""

from __future__ import annotations

import collections
import itertools
import math
from itertools import pairwise
from pathlib import Path

import make_shipped_model as recipe
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.lm import data

DOCUMENTS = [data.Document(f"d{i}", f"document number {i} says hello {i}") for i in range(200)]


@pytest.mark.full
def test_python_text_is_deterministic_and_deduplicated(python_documents: list[data.Document]) -> None:
    assert data.digest(python_documents) == data.digest(data.python_documents())
    assert len({document.text for document in python_documents}) == len(python_documents)
    assert len({document.name for document in python_documents}) == len(python_documents)
    names = [document.name for document in python_documents]
    assert "topic:lambda" in names
    assert "module:json.decoder" in names
    assert not [name for name in names if name.startswith("module:test.") or ".tests." in name]
    assert recipe.byte_count(python_documents) > 1_000_000


@pytest.mark.full
def test_split_has_no_document_on_both_sides(python_documents: list[data.Document]) -> None:
    training, held_out = recipe.split(python_documents)
    assert not {d.text for d in training} & {d.text for d in held_out}
    assert sorted(training + held_out) == sorted(python_documents)
    assert 0.03 < recipe.byte_count(held_out) / recipe.byte_count(python_documents) < 0.2


def test_the_split_depends_on_each_name_alone() -> None:
    # So another Python's documents fall on the same sides as far as they have the same names.
    held = {d.name for d in recipe.split(DOCUMENTS)[1]}
    changed = [data.Document(d.name, d.text + "!") for d in DOCUMENTS if d.name != "d7"]
    assert {d.name for d in recipe.split(changed)[1]} == held - {"d7"}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_split_leaves_something_on_each_side(n: int) -> None:
    training, held_out = recipe.split(DOCUMENTS[:n])
    assert training
    assert held_out


def test_the_digest_depends_on_where_texts_are_cut() -> None:
    assert data.digest([data.Document("a", "bc")]) != data.digest([data.Document("ab", "c")])


@given(text=st.text())
def test_any_text_is_encoded_without_loss(text: str) -> None:
    tokenizer = TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


TOKENIZER = data.train_tokenizer(DOCUMENTS, 300)


def test_tokenizer_is_deterministic_and_keeps_its_size() -> None:
    assert TOKENIZER.to_str() == data.train_tokenizer(DOCUMENTS, 300).to_str()
    assert TOKENIZER.get_vocab_size() <= 300
    assert TOKENIZER.token_to_id(data.END) == data.END_ID


def test_encoded_documents_end_with_an_end_token() -> None:
    for document, ids in data.encode(TOKENIZER, DOCUMENTS[:3]):
        assert ids.dtype == np.uint16
        assert (ids == data.END_ID).sum() == 1
        assert ids[-1] == data.END_ID
        assert TOKENIZER.decode(ids.tolist()) == document.text


def test_token_files_are_mapped_and_checked(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint16)
    with data.token_file(tmp_path / "a.npy", ids.dtype) as append:
        for piece in (ids[:0], ids[:3], ids[3:]):
            append(piece)
    read = data.read_tokens(tmp_path / "a.npy")
    assert isinstance(read, np.memmap)
    np.testing.assert_array_equal(read, ids)
    np.save(tmp_path / "whole.npy", ids)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(b"no tokens")
    with pytest.raises(ValueError, match="token file"):
        data.read_tokens(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match="one row of uint16"):
        data.read_tokens(tmp_path / "c.npy")


@given(length=st.integers(2, 600), seed=st.integers(0, 1 << 32))
def test_repeats_are_predictable_from_earlier_tokens(length: int, seed: int) -> None:
    text = np.arange(1, 50)
    ids, repeated = data.repeats(length, text, 50, np.random.default_rng(seed))
    assert ids.shape == repeated.shape == (length,)
    assert ids.min() > data.END_ID
    assert ids.max() < 50
    for place in np.flatnonzero(repeated):  # this pair of tokens occurred before
        before = ids[max(0, place - 256) : place]
        assert (ids[place - 1], ids[place]) in set(pairwise(before))


def test_most_repeats_are_predictable() -> None:
    text = np.arange(1, 50)
    shares = [data.repeats(512, text, 50, np.random.default_rng(seed))[1].mean() for seed in range(50)]
    assert 0.6 < np.mean(shares) < 0.95


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    tokens = np.concatenate([ids for _, ids in data.encode(TOKENIZER, DOCUMENTS)])

    def draw(seed: int, step: int) -> tuple[data.Tokens, data.Tokens]:
        return data.batch(tokens, rows=6, context=32, repeated=2, vocab=300, seed=seed, step=step)

    inputs, targets = draw(1, 5)
    np.testing.assert_array_equal(inputs, draw(1, 5)[0])
    assert (inputs != draw(1, 6)[0]).any()
    assert (inputs != draw(2, 5)[0]).any()
    text, whole = inputs[:4], np.asarray(tokens, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(whole, 33)
    for row, target in zip(text, targets[:4], strict=True):
        assert (windows == [*row, target[-1]]).all(1).any()
        np.testing.assert_array_equal(row[1:], target[:-1])
    said = targets[4:] != data.IGNORE
    assert said.any()
    np.testing.assert_array_equal(targets[4:, :-1][said[:, :-1]], inputs[4:, 1:][said[:, :-1]])


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("first\r\nsecond")
    (tmp_path / "b.txt").write_text("first\nsecond")  # the same once lines end alike
    (tmp_path / "long.txt").write_text("\n\n".join(f"paragraph {i} " * 100 for i in range(20)))
    (tmp_path / ".hidden").write_bytes(b"\xff")
    documents = list(data.TextFiles([tmp_path]))
    assert [d.text for d in documents].count("first\nsecond") == 1
    assert len(documents) > 4
    joined = "\n\n".join(d.text for d in documents if d.name.startswith("long"))
    assert joined == (tmp_path / "long.txt").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "UTF-8"), (b"", "got none in"), (b" \n\n ", "got none in"), (b"a\0b", "NUL")],
)
def test_files_without_text_raise(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(data.TextFiles([tmp_path / "a"]))


def test_missing_files_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is missing"):
        list(data.TextFiles([tmp_path / "none"]))
    with pytest.raises(ValueError, match="has none"):
        list(data.TextFiles([tmp_path]))


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="too short"):
        recipe.split(DOCUMENTS[:1])


@pytest.mark.parametrize("vocab", [3, 8])
def test_bigram_bits_against_a_dictionary(vocab: int) -> None:
    rng = np.random.default_rng(0)
    training = (rng.random(150) ** 2 * (vocab - 1)).astype(np.uint16)  # the last id never occurs
    held_out = rng.integers(0, vocab, 60).astype(np.uint16)
    pairs = collections.Counter(zip(training[:-1].tolist(), training[1:].tolist(), strict=True))
    once, twice = (sum(c == n for c in pairs.values()) for n in (1, 2))
    d = once / (once + 2 * twice) if once else 0.5

    def probability(v: int, w: int) -> float:
        single = (sum(p[1] == w for p in pairs) + 1) / (len(pairs) + vocab)
        total = sum(c for p, c in pairs.items() if p[0] == v)
        if not total:
            return single
        kinds = sum(p[0] == v for p in pairs)
        return max(pairs[v, w] - d, 0) / total + d * kinds / total * single

    for v in range(vocab):
        assert sum(probability(v, w) for w in range(vocab)) == pytest.approx(1)
    ids = held_out.tolist()
    bits = -sum(math.log2(probability(v, w)) for v, w in itertools.pairwise(ids))
    assert recipe.bigram_bits(training, held_out, vocab, 60) == pytest.approx(bits / 60)


def test_xz_bits() -> None:
    repeated = [data.Document("a", "again and again " * 1000)]
    assert recipe.xz_bits(repeated) < 0.2
    assert recipe.xz_bits(repeated, before=repeated) < recipe.xz_bits(repeated)
