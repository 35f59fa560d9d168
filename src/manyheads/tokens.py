"""Tokens as people read them: what a byte-level BPE's tokens stand for, and how to show them.

Byte-level BPE (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") spells
every byte as a visible character, so that its tokens look like `Ġthe`; a character outside ASCII may
be cut in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
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
    """

    id: int
    text: str
    label: str
    word: str | None


def tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """The tokens that these ids are."""
    data = [_bytes(tokenizer.id_to_token(i) or "") for i in ids]
    text = b"".join(data).decode("utf-8", "surrogateescape")  # a stray byte becomes a character
    within = [n for n, c in enumerate(text) for _ in c.encode("utf-8", "surrogateescape")]  # per byte
    ends = list(accumulate(len(piece) for piece in data))
    starts = [0, *ends[:-1]]
    goes_on = [_goes_on(text, within, end) for end in ends]
    found: list[Token] = []
    first = 0  # of the tokens of one word
    for last in range(len(ids)):
        if goes_on[last]:
            continue
        word = _visible(_span(text, within, starts[first], ends[last])) if last > first else None
        for n in range(first, last + 1):
            shown = _visible(_span(text, within, starts[n], ends[n]))
            label = ("…" if n > first else "") + shown + ("…" if n < last else "")
            found.append(Token(ids[n], data[n].decode("utf-8", "backslashreplace"), label, word))
        first = last + 1
    return found


def _goes_on(text: str, within: Sequence[int], end: int) -> bool:
    """Does a word, or a character, go on over a cut after `end` bytes?"""
    if not 0 < end < len(within):
        return False
    before, after = within[end - 1], within[end]
    return before == after or (text[before].isalnum() and text[after].isalnum())


def _span(text: str, within: Sequence[int], start: int, end: int) -> str:
    """The characters that the bytes from start to end belong to."""
    return text[within[start] : within[end - 1] + 1] if end > start else ""


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


def _visible(text: str) -> str:
    """A text with its blanks made visible, without the space before a word."""
    if text.startswith(" ") and text.strip(" "):
        text = text[1:]
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    """A character that can't be shown, or a stray byte, as its escape."""
    if "\udc80" <= c <= "\udcff":
        return f"\\x{ord(c) - 0xDC00:x}"
    return c.encode("unicode_escape").decode()
