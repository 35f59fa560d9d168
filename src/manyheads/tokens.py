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
    on the side where it goes on within its word.
    """

    id: int
    text: str
    label: str


def tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """The tokens that these ids are."""
    data = [_bytes(tokenizer.id_to_token(i) or "") for i in ids]
    whole = [piece.decode("utf-8", "replace") for piece in data]  # � is no letter
    joined = [a[-1:].isalnum() and b[:1].isalnum() for a, b in pairwise(whole)]
    found = []
    for i, piece, before, after in zip(ids, data, [False, *joined], [*joined, False], strict=False):
        text = piece.decode("utf-8", "backslashreplace")
        found.append(Token(i, text, ("…" if before else "") + _visible(text) + ("…" if after else "")))
    return found


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
