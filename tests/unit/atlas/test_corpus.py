"""The text of an atlas: shards, windows, and files that aren't text."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.atlas import corpus
from manyheads.tokens import TokenizedText


def encode(text: str, limit: int | None) -> tuple[list[int], TokenizedText]:
    """Every three characters are a token."""
    pieces = [text[n : n + 3] for n in range(0, len(text), 3)][:limit]
    return list(range(len(pieces))), TokenizedText(tuple(pieces))


def windows(found: corpus.Corpus, length: int) -> list[corpus.Window]:
    return [
        w for parts in found.shards for part in parts for w in corpus.windows(found, part, encode, length)
    ]


TEXTS = st.lists(st.text("ab é€😀\n", min_size=1, max_size=300).filter(str.strip), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.integers(20, 200))
def test_shards_and_windows_cover_every_character_once(tmp_path_factory, texts: list[str], size: int) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SMALLEST", size)
        patch.setattr(corpus, "BLOCK", 17)
        patch.setattr(corpus, "LINE", 23)
        found = corpus.survey([folder])
    parts = sorted((part.file, part.start, part.stop) for parts in found.shards for part in parts)
    for n, text in enumerate(texts):
        mine = [part for part in parts if part[0] == n]
        assert [start for _, start, _ in mine] == [0, *(stop for *_, stop in mine[:-1])]
        assert mine[-1][2] == len(text.encode())
        joined = "".join(corpus.read(found, corpus.Part(*part)) for part in mine)
        assert joined == text
    assert corpus.Corpus.unpack(found.pack()) == found
    for window in windows(found, 5):
        data = (folder / f"{window.part.file}.txt").read_bytes()
        covered = window.tokens.text.encode()
        assert data[window.byte : window.byte + len(covered)] == covered
        assert 2 <= len(window.ids) <= 5


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffabcdef".encode())
    (window,) = windows(corpus.survey([tmp_path / "a.txt"]), 5)
    assert (window.tokens.text, window.byte) == ("abcdef", 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "blank file"),
        (b" \n\t", "blank file"),
        (b"abc\xff", "invalid byte at 3"),
        (b"abc\xe2\x82", "invalid byte at 3"),
        (b"ab\0c", "NUL byte 2"),
    ],
)
def test_a_file_that_is_not_text_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus.survey([tmp_path / "a.txt"])


def test_missing_files_and_empty_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        corpus.survey([tmp_path / "a.txt"])
    with pytest.raises(ValueError, match="which has none"):
        corpus.survey([tmp_path])
    with pytest.raises(ValueError, match="Name at least one"):
        corpus.survey([])
    (tmp_path / "blank.txt").touch()
    with pytest.raises(ValueError, match="blank files only"):
        corpus.survey([tmp_path])


def test_a_file_that_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    found = corpus.survey([path])
    path.write_text("some longer text")
    with pytest.raises(ValueError, match="changed while it was read"):
        windows(found, 5)


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (2, 8):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text(("word " * 19 + "word\n") * (10_000 * megabytes))
        tracemalloc.start()
        found = corpus.survey([path])
        for parts in found.shards[:2]:
            for part in parts:
                assert sum(1 for _ in corpus.windows(found, part, encode, 2**12)) > 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
