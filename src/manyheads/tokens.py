"""Tokens as people read them: what a byte-level BPE's tokens stand for, and how to show them.

Byte-level BPE (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") spells
every byte as a visible character, so that its tokens look like `Ġthe`; a character outside ASCII may
be cut in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Token:
    """One token of a text.

    `text` is what it stands for, where bytes that are no whole character are written as `\\xe2`.
    `label` is how it is shown: without the space before a word, other blanks as ␣ ⏎ ⇥, and with …
    on the side where it goes on within its word. `word` is the whole word that it is a piece of, or
    None if it is no piece.
    """

    id: int
    text: str
    label: str
    word: str | None


def tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """The tokens that these ids are."""
    data = [_bytes(tokenizer.id_to_token(i) or "") for i in ids]
    whole = [piece.decode("utf-8", "replace") for piece in data]  # � is no letter
    goes_on = [a[-1:].isalnum() and b[:1].isalnum() for a, b in pairwise(whole)] + [False]
    texts = [piece.decode("utf-8", "backslashreplace") for piece in data]
    found: list[Token] = []
    start = 0
    for end in range(len(ids)):
        if not goes_on[end]:
            found += _word(ids[start : end + 1], texts[start : end + 1])
            start = end + 1
    return found


def _word(ids: Sequence[int], texts: Sequence[str]) -> list[Token]:
    """The tokens of one word, from its pieces."""
    shown = [_visible(text) for text in texts]
    word = "".join(shown) if len(shown) > 1 else None
    last = len(shown) - 1
    return [
        Token(i, text, ("…" if n > 0 else "") + piece + ("…" if n < last else ""), word)
        for n, (i, text, piece) in enumerate(zip(ids, texts, shown, strict=True))
    ]


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
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
