"""Tokens as people read them, aligned with their text by the offsets that tokenizers report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding

BLANKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


@dataclass(frozen=True)
class Token:
    """A token of a text.

    Attributes:
        id: The number of the token in the vocabulary.
        text: The characters that it covers, empty for a special token.
        label: The token as it is displayed: without the space before a word, with other blanks as ␣ ⏎ ⇥, and
            with … on the side where its word continues. For a Hugging Face model it is the tokenizer's own
            spelling.
        word: The whole word if the token is a piece of one, else None.
    """

    id: int
    text: str
    label: str
    word: str | None


def align(text: str, encoding: Encoding, *, own_spelling: bool = False) -> list[Token]:
    """Return the tokens of an encoded text.

    Args:
        text: The text that was encoded.
        encoding: The tokenizer's answer, with the offsets of its tokens.
        own_spelling: Label tokens as the tokenizer spells them, such as `##tion`, and let no word continue
            in another part of the text as the tokenizer splits it.

    Returns:
        One `Token` for each id of the encoding.
    """
    ids, spans, spellings = encoding.ids, encoding.offsets, encoding.tokens  # each access makes a new list
    tokens = []
    for n, run in enumerate(group_words(text, spans, encoding.word_ids if own_spelling else None)):
        covered = text[slice(*spans[n])]
        word = printable(text[spans[run[0]][0] : spans[run[-1]][1]]) if len(run) > 1 else None
        label = ("…" if n > run[0] else "") + printable(covered) + ("…" if n < run[-1] else "")
        if own_spelling:
            label = printable(spellings[n])
        tokens.append(Token(ids[n], covered, label, word))
    return tokens


def group_words(
    text: str, spans: Sequence[tuple[int, int]], parts: Sequence[int | None] | None = None
) -> list[range]:
    """Return, for each token, the range of tokens that form its word.

    Args:
        text: The text.
        spans: The characters of each token, as (start, stop); empty for a special token.
        parts: The part of the text that each token belongs to. A word never spans two parts.

    Returns:
        A range for each token: the pieces of its word, or the token alone.
    """
    words: list[range] = []
    for n, (start, stop) in enumerate(spans):
        following = spans[n + 1] if n + 1 < len(spans) else (0, 0)
        same_part = parts is None or parts[n : n + 1] == parts[n + 1 : n + 2]
        if same_part and start < stop and following[0] < following[1]:
            overlaps = following[0] < stop  # two pieces of one character
            adjacent = following[0] == stop and text[stop - 1].isalnum() and text[stop].isalnum()
            if overlaps or adjacent:
                continue
        run = range(len(words), n + 1)
        words += [run] * len(run)
    return words


def printable(text: str) -> str:
    """Return a text with blanks and unprintable characters made visible, without the space before a word."""
    bare = text[1:] if text.startswith(" ") and text.strip(" ") else text
    visible = bare.translate(BLANKS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in visible)
