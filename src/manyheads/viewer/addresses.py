"""The parts of addresses: indices, ranges and words. Anything else raises LookupError."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.viewer import pictures


def parse_index(text: str, size: int, name: str) -> int:
    """Return an index below a size; raise LookupError if the text isn't one."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not int(text) < size:
        raise LookupError(f"Expected {name} between 0 and {size - 1}, got {text[:20]!r}.")
    return int(text)


def parse_range(start: str, stop: str, size: int, name: str) -> range:
    """Return a range of indices below a size; raise LookupError if it is empty or the text isn't one."""
    indices = range(parse_index(start, size, name), parse_index(stop, size + 1, f"end of {name}"))
    if not indices:
        raise LookupError(f"Expected a {name} and a later end, got {start} and {stop}.")
    return indices


def parse_place(text: str) -> tuple[str, str, str, str]:
    """Return the run, layer, head and sequence of "RUN,LAYER,HEAD,BATCH"; raise LookupError otherwise."""
    parts = text.split(",")
    if len(parts) != 4:
        raise LookupError(f"Expected a head as RUN,LAYER,HEAD,BATCH, got {text[:20]!r}.")
    return parts[0], parts[1], parts[2], parts[3]


def parse_drawing(pooling: str, scale: str, format: str) -> dict[str, str]:
    """Return how to draw a figure, as arguments of `draw_view`; raise LookupError for other words."""
    return {
        "pooling": parse_word(pooling, pictures.POOLINGS, "pooling"),
        "scale": parse_word(scale, pictures.SCALES, "scale"),
        "format": parse_word(format, pictures.FORMATS, "format"),
    }


def parse_word(text: str, words: Sequence[str], name: str) -> str:
    """Return one of some words; raise LookupError if the text is a different one."""
    if text not in words:
        raise LookupError(f"Expected {name} to be one of {', '.join(words)}, got {text[:20]!r}.")
    return text


def parse_heads(text: str, size: int) -> Sequence[int]:
    """Return the heads that are listed in an address; raise LookupError if one isn't a head."""
    return range(size) if text == "all" else [parse_index(head, size, "head") for head in text.split(",")]
