"""A text and its tokens, so that people read the text as it was written.

Tokenizers spell tokens in their own ways: `Ġthe`, `##ly`, `▁on`, and several tokens of bytes for one
character. Here a token is the piece of the text that it covers. Pieces of a word can be joined again, and a
character that is cut into several tokens has one label.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from reprlib import repr as brief
from typing import Any, overload

from manyheads.shapes import kind

BLANKS = {" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥"}
CHUNK = 64  # ids that are decoded together

# Ranges of characters, first and last: the parts of syllables of Hangul that come first, the others, and all.
LEADING = (("\u1100", "\u115f"), ("\ua960", "\ua97f"))
FOLLOWING = (("\u1160", "\u11ff"), ("\ud7b0", "\ud7ff"))
HANGUL = (*LEADING, *FOLLOWING, ("\uac00", "\ud7a3"))
# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, Chinese and Japanese characters, kana.
UNSPACED = (
    ("\u0e00", "\u0eff"),
    ("\u1000", "\u109f"),
    ("\u1780", "\u17ff"),
    ("\u2e80", "\u312f"),
    ("\u31a0", "\u9fff"),
    ("\uf900", "\ufaff"),
    ("\uff66", "\uff9f"),
    ("\U00020000", "\U0003ffff"),
)
# Signs that are drawn with the next character, such as those over numbers in Arabic.
PREFIXES = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e"
JOINERS = "\u200c\u200d"  # within words of Arabic and Indic scripts, and within emoji


@dataclass(frozen=True)
class TokenizedText(Sequence[str]):
    """A text and its tokens: as a sequence, the label of each token.

    A label is the text of a token as it is displayed: without the blanks around a word, with other blanks as
    ␣ ⏎ ⇥. All tokens of one character have the character as their label. The pieces of the tokens that aren't
    special, joined, are the text.

    Attributes:
        pieces: The text that each token covers, with the blanks before it. It is empty for a token that
            continues the character of the token before it. The piece of a special token, such as `[CLS]`, is
            its name.
        special: The positions of special tokens, in order. They aren't part of the text.

    Raises:
        TypeError: If pieces or positions have other types.
        ValueError: If a position doesn't exist, or the positions aren't in order.
    """

    pieces: tuple[str, ...]
    special: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, values, cls in (("pieces", self.pieces, str), ("special", self.special, int)):
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise TypeError(f"Expected {name} to be a tuple, got {kind(values)}.")
            for value in values:
                if not isinstance(value, cls) or isinstance(value, bool):
                    raise TypeError(f"Expected {name} to have only {cls.__name__}, got {kind(value)}.")
            object.__setattr__(self, name, tuple(values))
        if list(self.special) != sorted({*self.special} & {*range(len(self.pieces))}):
            raise ValueError(
                f"Expected special to be different positions between 0 and {len(self.pieces) - 1}, in order, "
                f"got {self.special}."
            )

    @classmethod
    def from_encoding(cls, text: str, encoding: Any) -> TokenizedText:
        """Return a text with the tokens of a fast tokenizer, which reports where in the text each token is.

        Characters that no token covers, such as blanks in BERT's tokenizer, belong to the next token.
        Combining marks and joiners that no token covers, such as the accents that BERT's tokenizer drops,
        belong to the token of their letter.

        Args:
            text: The text that was encoded.
            encoding: The result of `tokenizer(text)` (transformers) or `tokenizer.encode(text)` (tokenizers).

        Returns:
            The text and its tokens.

        Raises:
            TypeError: If the encoding has no offsets, because the tokenizer isn't a fast one.
            ValueError: If a second text was encoded with it, or the encoding is of another text.
        """
        encodings = getattr(encoding, "encodings", [encoding])  # transformers' result has a list of them
        if not encodings or not hasattr(encodings[0], "offsets"):
            raise TypeError(
                f"Expected the encoding of a fast tokenizer, which has offsets, got {kind(encoding)}. Use "
                "TokenizedText.from_ids(ids, tokenizer)."
            )
        encoding = encodings[0]
        if len(encodings) > 1 or set(encoding.sequence_ids) - {None, 0}:
            raise ValueError(
                "Expected the encoding of one text, got several. Pass each text with its encoding."
            )
        masked = encoding.special_tokens_mask
        spans = [None if masked[n] else span for n, span in enumerate(encoding.offsets)]
        _check_text(text, [span for span in spans if span], bool(encoding.overflowing))
        return cls.from_spans(text, spans, encoding.tokens, whole=not encoding.overflowing)

    @classmethod
    def from_spans(
        cls, text: str, spans: Sequence[tuple[int, int] | None], names: Sequence[str], whole: bool = True
    ) -> TokenizedText:
        """Return a text with tokens at these places of it.

        Args:
            text: The text.
            spans: The first character of each token, and the one after its last; None for a special token.
            names: The names of the tokens, of which those of special tokens are displayed.
            whole: True if the characters after the last token belong to the text.

        Returns:
            The text and its tokens. A token without characters is a special token, too.
        """
        pieces: list[str] = []
        special: list[int] = []
        stop = 0  # the end of the tokens so far
        first: int | None = None  # the token at which the last character begins
        for n, (span, name) in enumerate(zip(spans, names, strict=True)):
            blank, following = not name.strip("▁Ġ"), spans[n + 1] if n + 1 < len(spans) else None
            if span and following and blank and span[0] == following[0] and text[slice(*span)].strip():
                span = span[0], span[0]  # the space that a tokenizer puts before a text
            if span is None or (span[0] >= span[1] <= stop):
                special.append(n)
                pieces.append("␣" if blank else name)
                continue
            if first is not None:
                rest = _end_of_character(text, stop, span[0])
                pieces[first] += text[stop:rest]
                stop = max(stop, rest)
            if first is not None and span[0] < stop:  # it shares a character with the token before
                pieces[first] += text[stop : span[1]]
                pieces.append("")
            else:
                first = n
                pieces.append(text[stop : span[1]])
            stop = max(stop, span[1])
        if whole and first is not None:
            pieces[first] += text[stop:]
        return cls(tuple(pieces), tuple(special))

    @classmethod
    def from_ids(cls, ids: Any, tokenizer: Any) -> TokenizedText:
        """Return the text of ids, such as those that a model generated, with its tokens.

        Each id is decoded with its neighbors, so that a character of several tokens is whole.

        Args:
            ids: The ids, integers `[s]`.
            tokenizer: A tokenizer of transformers or of tokenizers.

        Returns:
            The text as the tokenizer decodes it, and its tokens.

        Raises:
            TypeError: If ids aren't integers.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if wrong := [n for n in ids if not isinstance(n, int)]:
            hint = " Pass one sequence, such as ids[0]." if isinstance(wrong[0], list | tuple) else ""
            raise TypeError(f"Expected ids to be integers [s], got {kind(ids)} of {kind(wrong[0])}.{hint}")
        if hasattr(tokenizer, "convert_ids_to_tokens"):
            special, name = set(tokenizer.all_special_ids), tokenizer.convert_ids_to_tokens
            unknown = {tokenizer.unk_token_id} - {
                tokenizer.bos_token_id,
                tokenizer.eos_token_id,
            }  # GPT-2 has one
            options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        else:
            added = tokenizer.get_added_tokens_decoder()
            special, name = {n for n, token in added.items() if token.special}, tokenizer.id_to_token
            unknown = {tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")}
            options = {"skip_special_tokens": False}
        special -= unknown  # an unknown word is a part of the text
        pieces: list[str] = []
        for run in _runs(ids, special):
            if ids[run[0]] in special:
                pieces += [name(ids[n]) for n in run]
            else:
                pieces += _decode(lambda part: tokenizer.decode(part, **options), [ids[n] for n in run])
        return cls(tuple(pieces), tuple(n for n, i in enumerate(ids) if i in special))

    # -- the sequence of labels --------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"TokenizedText({len(self)} tokens of {brief(self.text)})"

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> TokenizedText: ...

    def __getitem__(self, index: int | slice) -> str | TokenizedText:
        """Return the label of a token, or the text of a slice of the tokens."""
        if not isinstance(index, slice):
            return self.labels[index]
        chosen = range(len(self))[index]
        special = tuple(m for m, n in enumerate(chosen) if n in self._specials)
        return TokenizedText(self.pieces[index], special)

    @cached_property
    def labels(self) -> list[str]:
        """The label of each token."""
        return [printable(self.characters(n)) or "␣" for n in range(len(self))]

    @property
    def names(self) -> list[str]:
        """The label of each token, empty for a token that continues the characters of the token before it."""
        return [label if n == self.units[n][0] else "" for n, label in enumerate(self.labels)]

    # -- the text ----------------------------------------------------------------------------------

    @cached_property
    def text(self) -> str:
        """The text."""
        return "".join(map(self.piece, range(len(self))))

    def piece(self, n: int) -> str:
        """Return the text that a token covers, empty for a special token."""
        return "" if n in self._specials else self.pieces[n]

    def characters(self, n: int) -> str:
        """Return the whole characters that a token covers, or the name of a special token."""
        return "".join(self.pieces[m] for m in self.units[n])

    @cached_property
    def starts(self) -> list[int]:
        """The character of the text at which each token starts, and the length of the text."""
        return [0, *accumulate(len(self.piece(n)) for n in range(len(self)))]

    @cached_property
    def units(self) -> list[range]:
        """For each token the tokens that together cover its characters, which mostly is the token alone."""
        return self._group(lambda n: not self.pieces[n] or not is_boundary(self.text, self.starts[n]))

    @cached_property
    def words(self) -> list[range]:
        """For each token the tokens of its word, which is the token alone if it isn't a piece of one."""
        return self._group(
            lambda n: (
                n in self.units[n - 1] or (bool(self.pieces[n]) and is_within_word(self.text, self.starts[n]))
            )
        )

    def word(self, n: int) -> str | None:
        """Return the word that a token is a piece of, as it is displayed; None if it isn't a piece of one."""
        if self.words[n] == self.units[n]:
            return None
        return printable("".join(self.pieces[m] for m in self.words[n]))

    def find(self, word: str) -> list[range]:
        """Return the tokens of each occurrence of a word.

        Args:
            word: The word as it is displayed, of one or several tokens, or the label of a token.

        Returns:
            The tokens of each occurrence, in order.
        """
        starts = [n for n in range(len(self)) if n == self.words[n][0]]
        named = [self.words[n] for n in starts if (self.word(n) or self[n]) == word]
        return named or [unit for n, unit in enumerate(self.units) if n == unit[0] and self[n] == word]

    @cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(self.special)

    def _group(self, continues: Callable[[int], bool]) -> list[range]:
        """Return for each token its run of tokens, by whether a token continues the one before it."""
        groups: list[range] = []
        start = 0
        for n in range(1, len(self) + 1):
            apart = n == len(self) or n in self._specials or n - 1 in self._specials
            if apart or not continues(n):
                groups += [range(start, n)] * (n - start)
                start = n
        return groups


def _check_text(text: str, spans: Sequence[tuple[int, int]], truncated: bool) -> None:
    """Raise ValueError if tokens with these spans, in a perhaps truncated encoding, aren't of this text."""
    start, stop = min(spans, default=(0, 0))[0], max((stop for _, stop in spans), default=0)
    # Tokenizers may drop characters that they don't know, but not those that they have tokens for. An
    # encoding that starts within the text is a later part of a truncated one.
    truncated = truncated or bool(text[:start].strip())
    known = {character for span in spans for character in text[slice(*span)] if character.isalnum()}
    if stop > len(text) or (not truncated and known & {*text[stop:]}):
        raise ValueError(
            f"Expected the encoding of {brief(text)}, which has {len(text)} characters, got one whose last "
            f"token ends at character {stop}. Pass the text that was encoded."
        )


def _end_of_character(text: str, start: int, stop: int) -> int:
    """Return the first place from `start` to `stop` that isn't within the character before `start`."""
    while start < stop and not text[start].isspace() and not is_boundary(text, start):
        start += 1
    return start


def _runs(ids: Sequence[int], special: set[int]) -> Iterator[range]:
    """Return the runs of positions whose ids are all special, or all not."""
    start = 0
    for n in range(1, len(ids) + 1):
        if n == len(ids) or (ids[n] in special) != (ids[n - 1] in special):
            yield range(start, n)
            start = n


def _decode(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    """Return the text of each id. The first id of those that share a character has all their text.

    Ids are decoded together with those before them, because some decoders change the start of a text.
    """
    pieces = [""] * len(ids)
    context = start = 0
    while start < len(ids):
        stop = min(start + CHUNK, len(ids))
        while stop < len(ids) and decode(ids[start:stop]).endswith("\ufffd"):  # within a character
            stop += 1
        text, first, done = decode(ids[context:stop]), start, len(decode(ids[context:start]))
        for n in range(start, stop):
            decoded = decode(ids[context : n + 1])
            if len(decoded) > done and text.startswith(decoded):  # else later ids change its end
                pieces[first], first, done = text[done : len(decoded)], n + 1, len(decoded)
        context, start = start, stop
    return pieces


# -- characters and words --------------------------------------------------------------------------


def is_boundary(text: str, at: int) -> bool:
    """Return True if a text can be cut before a character without cutting what people see as one character.

    Combining marks and joiners stay with their letter, and a flag or an emoji of several parts is whole.
    These are the extended grapheme clusters of Unicode's annex 29, without its rarest cases.

    Args:
        text: The text.
        at: The character.

    Returns:
        True if it isn't within a character.
    """
    if not 0 < at < len(text):
        return True
    before, after = text[at - 1], text[at]
    if before == "\r" and after == "\n":
        return False
    if unicodedata.category(before) in ("Cc", "Zl", "Zp"):
        return True
    if "\U0001f1e6" <= after <= "\U0001f1ff":  # two of these letters are a flag
        letters = re.search("[\U0001f1e6-\U0001f1ff]*$", text[max(0, at - 64) : at])
        return letters is None or len(letters[0]) % 2 == 0
    return not (
        is_mark(after)
        or after in JOINERS
        or after in "\u0e33\u0eb3\uff9e\uff9f"  # marks of Thai, Lao and kana that aren't of category M
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= after <= "\U000e007f"  # tags, in flags of regions
        or (before in PREFIXES and not after.isspace())
        or (before == "\u200d" and not after.isspace())
        or (unicodedata.combining(before) == 9 and unicodedata.category(after) == "Lo")  # Indic conjuncts
        or (_in(before, HANGUL) and _in(after, FOLLOWING))
        or (_in(before, LEADING) and _in(after, HANGUL))
    )


def _in(character: str, ranges: Sequence[tuple[str, str]]) -> bool:
    return any(first <= character <= last for first, last in ranges)


def is_mark(character: str) -> bool:
    """Return True for a combining mark."""
    return unicodedata.category(character).startswith("M")


def is_within_word(text: str, at: int) -> bool:
    """Return True if a character and the one before it belong to one word, or to one number or name in code.

    In scripts without spaces between words, such as Chinese and Thai, every token is taken as a word.

    Args:
        text: The text.
        at: The character.

    Returns:
        True if the word goes on at this character.
    """
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if _in(before, UNSPACED) or _in(after, UNSPACED):
        return False
    if after in "'’":
        return before.isalpha() and text[at + 1 : at + 2].isalpha()
    if before in "'’":
        return after.isalpha() and text[: at - 1][-1:].isalpha()
    return all(
        letter.isalnum() or letter == "_" or is_mark(letter) or letter in JOINERS
        for letter in (before, after)
    )


def count_words(text: str, word: str, stop: int | None = None) -> int:
    """Return how often a word stands in a text before a character: not as a part of longer words.

    Args:
        text: The text.
        word: The word, or other characters.
        stop: The character, the end of the text if None.

    Returns:
        The number of places where it starts before that character.
    """
    starts = (
        place.start() for place in re.finditer(re.escape(word), text) if stop is None or place.start() < stop
    )
    return sum(not is_within_word(text, n) and not is_within_word(text, n + len(word)) for n in starts)


def printable(text: str) -> str:
    """Return a text without blanks around it, and with other blanks and unprintable characters visible."""
    visible = (text.strip() or text).replace("\r\n", "\n")
    shown = (" " if unicodedata.category(c) == "Zs" else c for c in visible)
    return "".join(BLANKS.get(c) or escape(visible, n) for n, c in enumerate(shown))


def escape(text: str, n: int) -> str:
    """Return a character of a text; its escape if it isn't printable, a space for unusual ones."""
    character = text[n]
    joins = character in JOINERS or "\U000e0020" <= character <= "\U000e007f"
    if character.isprintable() or (joins and n > 0 and text[n - 1].isprintable()):
        return character
    if unicodedata.category(character) == "Zs":
        return " "
    return character.encode("unicode_escape").decode()
