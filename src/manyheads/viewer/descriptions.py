"""Names and texts of runs and layers, as pages and captions of figures show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyheads.maps import AttentionMap, sequence_labels
from manyheads.tokens import TokenizedText
from manyheads.viewer.pyramid import level_shifts
from manyheads.viewer.runs import Layer, ViewedRun, first_position

CAPTION = 80  # the number of characters of a text in the caption of a figure
EXCERPT = 200  # the number of characters of a text in the page's header
ALIKE = 12  # the number of characters after which texts that begin alike are named by where they differ
WORD = 20  # the number of characters before that place, at most


def have_same_tokens(layer: Layer, other: Layer, batch: int) -> bool:
    """Return True if the maps of two layers have the same queries and keys."""
    if not isinstance(layer.call, AttentionMap) or layer.call.shape[2:] != other.map.shape[2:]:
        return False
    return (
        batch < layer.call.shape[0]
        and first_position(layer.call, batch) == first_position(other.map, batch)
        and sequence_labels(layer.call.tokens, batch) == sequence_labels(other.map.tokens, batch)
    )


def read_queries(run: ViewedRun, cross: Layer, batch: int) -> TokenizedText | tuple[str, ...] | None:
    """Return the labels of the queries of cross-attention: the keys of the decoder's self-attention.

    This is the nearest layer before it, else after it, of self-attention over as many tokens as there are
    queries, of which all have labels. None if there is none.
    """
    queries = cross.call.shape[2]
    alike = [
        layer
        for layer in run.layers
        if isinstance(layer.call, AttentionMap)
        and layer.call.shape[2:] == (queries, queries)
        and batch < layer.call.shape[0]
        and sequence_labels(layer.call.tokens, batch) is not None
    ]
    before = [layer for layer in alike if layer.number < cross.number]
    nearest = before[-1] if before else next(iter(alike), None)
    return None if nearest is None else sequence_labels(nearest.call.tokens, batch)


def read_text(run: ViewedRun, batch: int) -> str | None:
    """Return the text of a sequence on one line; of the last one if there are fewer. None without labels."""
    call = run.layers[0].call
    labels = sequence_labels(call.tokens, min(batch, call.shape[0] - 1))
    if labels is None:
        return None
    if isinstance(labels, TokenizedText):
        special = set(labels.special)
        text = "".join(piece for n, piece in enumerate(labels.pieces) if n not in special)
    else:
        text = " ".join(labels)
    return " ".join(text.split())


def shorten(text: str | None) -> str | None:
    """Return the beginning of a text for a header; None without a text."""
    return text if text is None or len(text) <= EXCERPT else f"{text[:EXCERPT].rstrip()}…"


def tell_apart(texts: Sequence[str | None]) -> list[str | None]:
    """Return an excerpt of each text: from the word where it differs from those that begin alike."""
    excerpts: list[str | None] = []
    for text in texts:
        others = {other for other in texts if other is not None and other != text}
        if text is None or not others:
            excerpts.append(shorten(text))
            continue
        shared = max(_count_shared(text, other) for other in others)
        word = text.rfind(" ", 0, min(shared, len(text) - 1)) + 1
        start = max(word, shared - WORD)
        excerpts.append(shorten(text) if start < ALIKE else f"…{shorten(text[start:])}")
    return excerpts


def _count_shared(text: str, other: str) -> int:
    """Return the number of characters with which two different texts begin alike."""
    pairs = zip(text, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def name_head(layer: Layer, head: str) -> str:
    """Return the name of a head: the number of its layer, and its own."""
    return f"layer {layer.number}, head {layer.map.heads[int(head)]}"


def name_source(run: ViewedRun, layer: Layer, batch: int) -> str:
    """Return the model, the layer and the beginning of the text for the caption of a figure."""
    text = shorten(read_text(run, batch))
    if text is not None and len(text) > CAPTION:
        start = text[:CAPTION].rpartition(" ")[0] or text[:CAPTION]
        text = f"{start.rstrip(' .,:;')}…"
    names = dict.fromkeys([run.title, layer.name])  # equal for a single map
    return " · ".join([*names, *([] if text is None else [f"“{text}”"])])


def describe_text(tokens: TokenizedText) -> dict[str, Any]:
    """Return the pieces of a text for a page, and where a token continues the one before.

    Tokens are "special" if they aren't in the text, "shared" if they continue the characters of the token
    before, and "joined" if they continue its word.
    """
    positions = range(len(tokens))
    return {
        "pieces": tokens.pieces,
        "special": tokens.special,
        "shared": [n for n in positions if n > tokens.units[n][0]],
        "joined": [n for n in positions if n > tokens.words[n][0] and n == tokens.units[n][0]],
    }


def describe_layer(layer: Layer) -> dict[str, Any]:
    """Return the description of a layer for a page."""
    call = layer.call
    mask = call.problem.mask if isinstance(call, AttentionMap) else None
    return {
        "name": layer.name,
        "number": layer.number,
        "heads": list(call.heads),
        "shape": list(call.shape),
        "shifts": level_shifts(*call.shape[2:]),
        "mask": "no mask" if mask is None else str(mask),
        "has_weights": layer.has_weights,
        "has_patches": layer.has_patches,
        "finest": layer.finest,
    }
