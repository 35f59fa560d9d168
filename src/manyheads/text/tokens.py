"""Tokens as people read them: what a byte-level BPE's tokens stand for, and how to show them.

Byte-level BPE (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") spells
every byte as a visible character, so that its tokens look like `Ġthe`; a character outside ASCII may
be cut in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Token:
    """One token of a text.

    `text` is what it stands for, where bytes that are no whole character are written as `\\xe2`.
    `label` is how it is shown: without the space before a word, other blanks as ␣ ⏎ ⇥, and with …
    on the side where it goes on within its word or its character. `word` is the whole word that it is
    a piece of, or None if it is no piece.

    Of a model of Hugging Face, `text` are the characters that it covers, and `label` is what its own
    tokenizer calls it.
    """

    id: int
    text: str
    label: str
    word: str | None


def tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """The tokens that these ids are, of a byte-level BPE."""
    data = [_bytes(tokenizer.id_to_token(i) or "") for i in ids]
    text = b"".join(data).decode("utf-8", "surrogateescape")  # a stray byte becomes a character
    within = [n for n, c in enumerate(text) for _ in c.encode("utf-8", "surrogateescape")]  # per byte
    ends = list(accumulate(len(piece) for piece in data))
    spans = [
        (within[start], within[end - 1] + 1) if end > start else (0, 0) for start, end in pairwise([0, *ends])
    ]
    found = []
    for n, run in enumerate(words(text, spans)):
        shown = printable(_bare(text[slice(*spans[n])]))
        label = ("…" if n > run[0] else "") + shown + ("…" if n < run[-1] else "")
        word = printable(_bare(covered(text, spans, run))) if len(run) > 1 else None
        found.append(Token(ids[n], data[n].decode("utf-8", "backslashreplace"), label, word))
    return found


def words(
    text: str, spans: Sequence[tuple[int, int]], parts: Sequence[int | None] | None = None
) -> list[range]:
    """For each token the tokens that its word is made of, itself alone if it is no piece of one.

    spans: the characters of the text that each token covers, from the first to behind the last; none
    for a token that stands for nothing in it. parts: the part of the text that each token is of, if
    the tokenizer cuts it into parts; no word is in two of them.
    """
    found: list[range] = []
    for n, (start, end) in enumerate(spans):
        after = spans[n + 1] if n + 1 < len(spans) else (0, 0)
        one_part = parts is None or parts[n : n + 1] == parts[n + 1 : n + 2]
        if one_part and start < end and after[0] < after[1] and _goes_on(text, end, after[0]):
            continue
        run = range(len(found), n + 1)
        found += [run] * len(run)
    return found


def _goes_on(text: str, end: int, start: int) -> bool:
    """Does a character, or a word, go on from a token that ends here to the next, which starts there?"""
    return start < end or (start == end and text[end - 1].isalnum() and text[end].isalnum())


def covered(text: str, spans: Sequence[tuple[int, int]], run: range) -> str:
    """The characters that some tokens cover together."""
    return text[spans[run[0]][0] : spans[run[-1]][1]]


def _bytes(token: str) -> bytes:
    """What a token stands for, from its spelling."""
    alphabet = _alphabet()
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)


@cache
def _alphabet() -> dict[str, int]:
    """The byte of each character: visible Latin-1 stands for itself, U+0100 and on for the rest."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def _bare(text: str) -> str:
    """A text without the space before a word."""
    return text[1:] if text.startswith(" ") and text.strip(" ") else text


def printable(text: str) -> str:
    """A text with its blanks, and what can't be printed, made visible."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    """A character that can't be shown, or a stray byte, as its escape."""
    if "\udc80" <= c <= "\udcff":
        return f"\\x{ord(c) - 0xDC00:x}"
    return c.encode("unicode_escape").decode()
