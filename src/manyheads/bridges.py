"""Lazy attention patterns for other tools: maps of the q and k that TransformerLens or nnsight have recorded.

    _, cache = model.run_with_cache(ids, names_filter=bridges.is_query_or_key)  # TransformerLens
    patterns = bridges.Patterns(cache)
    patterns["pattern", 0][0, 3, -1]  # the weights of one query, as cache["pattern", 0][0, 3, -1]

The patterns that these tools record are dense, `[b, h, t, s]` for every layer. q and k take O(L) memory, and
a map computes the weights that are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from manyheads.biases import Bias
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Mask
from manyheads.problem import Problem
from manyheads.shapes import kind

# Queries and keys in a TransformerLens cache, rotated ones first: [b, t, h, d] and [b, s, g, d].
QUERIES, KEYS = ("hook_rot_q", "hook_q"), ("hook_rot_k", "hook_k")
PATTERN = re.compile(r"blocks\.(\d+)\.attn\.hook_pattern")


def is_query_or_key(name: str) -> bool:
    """Return True for the hooks that `Patterns` reads: a `names_filter` of `run_with_cache`."""
    return name.rpartition(".")[2] in QUERIES + KEYS


def lazy_pattern(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> AttentionMap:
    """Return the map of queries and keys that another tool has recorded.

    Args:
        q: The queries `[b, h, t, d]`, with their positional encoding.
        k: The keys `[b, g, s, d]`.
        mask: The mask, `Causal()` if None; `Full()` for an encoder.
        bias: The bias of the scores.
        scale: The factor of q·k, 1/√d if None.
        softcap: The softcap of the scores.
        sink: A logit per head, `[h]`.

    Returns:
        The map `[b, h, t, s]`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If shapes, dtypes, devices or numbers don't fit each other.
    """
    mask = Causal() if mask is None else mask
    problem = Problem.of(q, k, k, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)
    return AttentionMap.of(problem).compact()


class Patterns(Mapping[Any, AttentionMap]):
    """The attention patterns of a TransformerLens cache, computed when they are read.

    A pattern has the key `("pattern", layer)`, `"blocks.{layer}.attn.hook_pattern"` or the layer's number,
    and is an `AttentionMap`, indexed as the dense pattern `[b, h, t, s]`. It is computed from the queries and
    keys in the cache, so `bias` and `softcap` have to be given if the model has them.

    Args:
        cache: What `run_with_cache` returns, with `hook_q` and `hook_k` of each layer, and `hook_rot_q` and
            `hook_rot_k` in models with rotary encoding.
        **options: The options of `lazy_pattern` for every layer.

    Raises:
        TypeError: If the cache isn't a mapping, or an option has the wrong type.
        ValueError: If the cache has no queries and keys, or an option doesn't fit them.
    """

    def __init__(self, cache: Mapping[str, Tensor], **options: Any) -> None:
        if not hasattr(cache, "keys") or not hasattr(cache, "__getitem__"):
            raise TypeError(f"Expected the cache of run_with_cache, got {kind(cache)}.")
        found: dict[int, dict[str, Tensor]] = {}
        for name in cache.keys():  # noqa: SIM118  # TransformerLens's cache iterates over other things
            match = re.fullmatch(r"blocks\.(\d+)\.attn\.(\w+)", name) if isinstance(name, str) else None
            if match and match[2] in QUERIES + KEYS:
                found.setdefault(int(match[1]), {})[match[2]] = cache[name]
        self._maps: dict[int, AttentionMap] = {}
        for layer, tensors in sorted(found.items()):
            q, k = (
                next((tensors[name] for name in names if name in tensors), None) for names in (QUERIES, KEYS)
            )
            if q is None or k is None or ("hook_rot_q" in tensors) != ("hook_rot_k" in tensors):
                raise ValueError(
                    f"Expected queries and keys of layer {layer} in the cache, got {', '.join(tensors)}. "
                    "Call run_with_cache with names_filter=is_query_or_key."
                )
            self._maps[layer] = lazy_pattern(q.transpose(1, 2), k.transpose(1, 2), **options)
        if not self._maps:
            raise ValueError(
                "Expected blocks.0.attn.hook_q and hook_k in the cache, got none. Call run_with_cache with "
                "names_filter=is_query_or_key."
            )

    def __getitem__(self, key: Any) -> AttentionMap:
        """Return the pattern of a layer.

        Args:
            key: `("pattern", layer)`, `"blocks.{layer}.attn.hook_pattern"` or the layer's number.

        Returns:
            The map.

        Raises:
            KeyError: If the cache has no such layer, or the key is for something else.
        """
        if isinstance(key, tuple) and len(key) in (2, 3) and key[0] == "pattern":
            layer = key[1]
        elif isinstance(key, str) and (match := PATTERN.fullmatch(key)):
            layer = int(match[1])
        else:
            layer = key
        if isinstance(layer, bool) or not isinstance(layer, int) or layer not in self._maps:
            layers = ", ".join(map(str, self._maps))
            raise KeyError(f'Expected ("pattern", layer) with a layer among {layers}, got {key!r}.')
        return self._maps[layer]

    def __iter__(self) -> Iterator[str]:
        return (f"blocks.{layer}.attn.hook_pattern" for layer in self._maps)

    def __len__(self) -> int:
        return len(self._maps)
