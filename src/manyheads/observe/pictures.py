"""What the tokens of a recorded model attend to in a picture: queries, and attention rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from manyheads import measures
from manyheads.maps import AttentionMap, sequence_labels
from manyheads.masks import Full, Lengths
from manyheads.observe.summaries import Call, Reduced
from manyheads.patches import Patches, common, unpack
from manyheads.shapes import kind
from manyheads.tokens import TokenizedText


def check_map(name: str, call: Call) -> AttentionMap:
    """Return a layer's call as a map; raise ValueError if only statistics were recorded."""
    if isinstance(call, Reduced):
        raise ValueError(
            f'{name} was observed with keep="statistics", which keeps no weights. Observe with keep="maps".'
        )
    return call


def rollout_image(
    layers: Mapping[str, Call],
    queries: int | Sequence[int] | slice | Tensor | None,
    patches: Patches | None,
    number: int = 0,
) -> Tensor:
    """Return the attention rollout of some layers on the patches, as `Recording.rollout_image` does.

    Args:
        layers: The call of each layer, by name.
        queries: The tokens to average over, None for the class token or all tokens.
        patches: The patches, None for those of the layers.
        number: The number of the picture in the sequence.

    Returns:
        The shares `[b, rows, cols]`.

    Raises:
        TypeError: If patches has the wrong type.
        ValueError: If the patches aren't known or differ, or only statistics were recorded.
    """
    if patches is not None and not isinstance(patches, Patches):
        raise TypeError(f"Expected patches to be Patches, got {kind(patches)}.")
    if not layers:
        raise ValueError("Nothing was recorded, so there is no rollout. Run the model while it is observed.")
    located = {name: call.provenance.get("patches") for name, call in layers.items()}
    known = [name for name in layers if patches is not None or isinstance(located[name], list)]
    if not known:
        unpack(located[list(layers)[-1]])  # raises ValueError with the reason
    square = [name for name in known if layers[name].shape[2] == layers[name].shape[3]]
    if not square:
        raise ValueError(
            "No layer has as many queries as keys, so there is no rollout. Observe a self-attention encoder."
        )
    maps = [check_map(name, layers[name]) for name in square]
    last = square[-1]
    for name in square:
        same_patches = patches is not None or located[name] == located[last]
        if not same_patches or layers[name].shape[2] != layers[last].shape[2]:
            raise ValueError(
                f"Expected layers that read one sequence, got {name} and {last}. Select a part of the "
                'model, such as layers="vision" or layers="language_model".'
            )
    if patches is None:
        patches = common(unpack(located[last]), number)
    if patches.stop > layers[last].shape[3]:
        raise ValueError(f"Expected {patches} to be among the keys, got s = {layers[last].shape[3]} keys.")
    rows = patches.class_token if queries is None else queries
    share = measures.rollout_mean(maps, slice(None) if rows is None else rows)  # [b, s]
    return share[:, patches.keys.to(share.device)].unflatten(-1, patches.grid)  # [b, rows, cols]


def resolve_query(
    amap: AttentionMap, patches: Patches, query: Any
) -> tuple[list[int], str, tuple[int, int] | None]:
    """Return what a query of `Recording.overlay` is.

    Args:
        amap: The map of one sequence.
        patches: The patches of the picture.
        query: The query.

    Returns:
        The rows of the map, the name of the query, and its patch if it is a patch.

    Raises:
        TypeError: If the query has the wrong type.
        ValueError: If it isn't one token or word.
        IndexError: If it doesn't exist.
    """
    _, _, t, s = amap.shape
    offset = amap.problem.offset
    first = offset if isinstance(offset, int) else int(offset[0])
    if query is None:
        if t == 1:
            return [0], "its only query", None
        if patches.class_token is None:
            raise ValueError(
                "The model has no class token. Give the query: a patch (row, column), a token's number or "
                "a word."
            )
        tokens, name = [patches.class_token], "class token"
    elif isinstance(query, str):
        tokens = _find_word(amap, query)
        name = f"“{query}”"
    elif isinstance(query, tuple):
        if len(query) != 2:
            raise TypeError(f"Expected query to be a patch (row, column), got {query!r}.")
        # Fewer queries than keys, without a mask of later keys, are cross-attention.
        if t != s and not first and isinstance(amap.problem.mask, Full | Lengths | None):
            raise ValueError(
                f"The layer has {t} queries of its own, which aren't patches. Give the query's number, 0 to "
                f"{t - 1}, or select another layer, such as layer=-2."
            )
        tokens = [patches.token(*query)]
        name = "patch {}, {}".format(*(patches.place(tokens[0]) or query))
    elif isinstance(query, int) and not isinstance(query, bool):
        tokens, name = [query + first + t if query < 0 else query], f"token {query}"
    else:
        raise TypeError(
            f"Expected query to be a patch (row, column), a token's number or a word, got {query!r}."
        )
    for token in tokens:
        if not first <= token < first + t:
            raise IndexError(
                f"There is no query of token {token}: the layer has queries {first} to {first + t - 1}. "
                "Choose one of them."
            )
    return [token - first for token in tokens], name, patches.place(tokens[0]) if len(tokens) == 1 else None


def _find_word(amap: AttentionMap, word: str) -> list[int]:
    """Return the tokens of a word that occurs once in the labels of a map of one sequence."""
    labels = sequence_labels(amap.tokens)
    if labels is None:
        raise ValueError(
            f"The tokens have no labels, among which {word!r} would be. Use recording.label("
            "TokenizedText.from_ids(ids[0], tokenizer)), or give the token's number."
        )
    if isinstance(labels, TokenizedText):
        found = [list(tokens) for tokens in labels.find(word)]
    else:
        found = [[n] for n, label in enumerate(labels) if label.strip("Ġ▁ ") == word]
    if len(found) != 1:
        places = (
            f"{len(found)} times, at the tokens {', '.join(str(n[0]) for n in found[:8])}"
            if found
            else "never"
        )
        raise ValueError(
            f"Expected a word that occurs once, got {word!r}, which occurs {places}. Give the token's number."
        )
    return found[0]
