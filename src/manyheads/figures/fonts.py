"""Fonts for the text of figures, chosen from those that are installed.

matplotlib's default font lacks Chinese, Devanagari and many more. A text is drawn with the default font and
the few others that it needs. matplotlib keeps the last 64 lists of fonts that were drawn with all of their
files open, so a list has no other fonts, and fonts are searched without matplotlib's cache.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache

from matplotlib.font_manager import FontEntry, FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font

from manyheads.tokens import escape

# The fonts of a character that Chinese, Japanese and Korean share differ. The last letters of their names, by
# the first words of the names of characters that only one language has.
REGIONS = {"HIRAGANA": "JP", "KATAKANA": "JP", "HANGUL": "KR"}
CHINESE = "SC"

# As `highlights.quote` and the viewer's page write them.
QUOTATION = re.compile(r"""\"[^"]+"|(?<!\S)'.+?'(?=[\s,.]|$)|“[^”]+”""", re.DOTALL)


def families(text: str, context: str | None = None) -> list[str]:
    """Return the font families to draw a text with: the default ones, and others for what they lack.

    Args:
        text: The text.
        context: A longer text, such as all labels of an axis, from whose fonts those of this text are taken.
            Characters that Chinese and Japanese share then look the same in all of them.

    Returns:
        The names of the families.
    """
    default = FontProperties().get_family()
    missing = _missing(text)
    chosen = _choose(_missing(context or text), _region(context or text)) if missing else {}
    return [*default, *(name for name, characters in chosen.items() if characters & missing)]


def lacking(text: str) -> str | None:
    """Return a sentence about the characters of a text that no installed font has; None if there are none."""
    missing = _missing(text)
    found = frozenset[str]().union(*_choose(missing, _region(text)).values())
    absent = [c for c in dict.fromkeys(text) if c in missing - found]
    if not absent:
        return None
    first = f"U+{ord(absent[0]):04X} ({unicodedata.name(absent[0], 'no name').lower()})"
    return f"No installed font has the characters drawn as boxes, such as {first}; Noto's fonts have most."


def legible(text: str) -> str:
    """Return a text with characters that aren't printable replaced by their escapes."""
    return "".join(escape(text, n) for n in range(len(text)))


def isolate_quotes(text: str) -> str:
    """Return an English text with what it quotes in Unicode's isolates, if any is written from right to left.

    Otherwise a quotation in Arabic or Hebrew would reorder the words and numbers around it.
    """
    if not _is_reordered(text):
        return text
    return QUOTATION.sub(_isolate_quote, text)


def _isolate_quote(quotation: re.Match[str]) -> str:
    """Return a quotation with its lines in isolates, in the quotation marks of the sentence around it."""
    first, *lines, last = quotation[0][0], *quotation[0][1:-1].split("\n"), quotation[0][-1]
    return first + "\n".join(map(_enclose, lines)) + last


def isolate(name: str) -> str:
    """Return a name in Unicode's isolates if it is written from right to left, for a number after it."""
    return _enclose(name) if _is_reordered(name) else name


def _enclose(line: str) -> str:
    return f"\u2068{line}\u2069"


def _is_reordered(text: str) -> bool:
    """Return True if characters of a text are written from right to left."""
    return any(unicodedata.bidirectional(c) in {"R", "AL", "AN"} for c in text)


def _missing(text: str) -> frozenset[str]:
    """Return the characters of a text that need a glyph which the default fonts don't have.

    Joiners and variants of other characters need none.
    """
    needed = frozenset(
        c
        for c in text
        if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f" and not c.isspace()
    )
    return needed - _default_characters(tuple(FontProperties().get_family()))


def _region(text: str) -> str:
    """Return the end of the names of fonts for the language of a text in Chinese characters."""
    words = (unicodedata.name(c, "").partition(" ")[0] for c in text)
    return next((REGIONS[word] for word in words if word in REGIONS), CHINESE)


@lru_cache(maxsize=8)
def _default_characters(default: tuple[str, ...]) -> frozenset[str]:
    """Return the characters that the fonts of these families have."""
    paths = (findfont(FontProperties(family=[family])) for family in default)
    return frozenset[str]().union(*(map(chr, FT2Font(path).get_charmap()) for path in paths))


@lru_cache(maxsize=256)
def _choose(missing: frozenset[str], region: str) -> Mapping[str, frozenset[str]]:
    """Return a few families that have these characters, and the characters to draw with each of them.

    Each font in turn is the one that has most of the rest. Among equal ones, upright fonts without serifs
    come first, then those of the region.
    """
    if not missing:
        return {}
    found: list[tuple[str, frozenset[str]]] = []
    for entry in sorted(fontManager.ttflist, key=lambda entry: _rank(entry, region)):
        if entry.name.startswith("Last Resort"):  # matplotlib's, with a box for every character
            continue
        try:
            font = FT2Font(entry.fname, face_index=entry.index)
        except FileNotFoundError:  # it was removed after matplotlib listed it
            continue
        if has := frozenset(c for c in missing if font.get_char_index(ord(c))):
            found.append((entry.name, has))
    chosen: dict[str, frozenset[str]] = {}
    while found:
        name, has = max(found, key=lambda pair: len(pair[1]))  # the first of equal ones
        chosen[name] = has
        missing -= has
        found = [(other, rest) for other, more in found if (rest := more & missing)]
    return chosen


def _rank(entry: FontEntry, region: str) -> tuple[object, ...]:
    """Return the place of a font among those that have the same characters."""
    is_plain = entry.style == "normal" and entry.weight == 400
    is_sans = "Sans" in entry.name and "Mono" not in entry.name
    return not is_plain, not is_sans, not entry.name.endswith(region), entry.name
