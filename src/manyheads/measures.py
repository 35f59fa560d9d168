"""What a head does, in the measures that papers use: each is the mean mass of a mask over the map.

All return `[b, h]`, averaged over those queries that have a key to look at under the measure's mask.
`ids` are the tokens, integers `[s]` or `[b, s]`.
"""

from __future__ import annotations

from torch import Tensor

from manyheads.maps import AttentionMap
from manyheads.masks import AfterSameToken, Causal, Diagonal, SameToken, Window


def previous_token(amap: AttentionMap) -> Tensor:
    """The weight on the key just before: j = i − 1."""
    return amap.mass(Diagonal(-1), mean=True)


def current_token(amap: AttentionMap) -> Tensor:
    """The weight on the query's own key: j = i."""
    return amap.mass(Diagonal(0), mean=True)


def first_token(amap: AttentionMap) -> Tensor:
    """The weight on the first key that the query may see: a sink (Xiao et al. 2024, arXiv:2309.17453)."""
    return amap.mass(amap.first_key(), mean=True)


def duplicate_token(amap: AttentionMap, ids: Tensor) -> Tensor:
    """The weight on earlier keys with the query's own token (Wang et al. 2023, arXiv:2211.00593)."""
    return amap.mass(SameToken(ids) & Causal() & ~Diagonal(0), mean=True)


def induction(amap: AttentionMap, ids: Tensor) -> Tensor:
    """The weight on keys that follow the query's own token (Olsson et al. 2022, arXiv:2209.11895)."""
    return amap.mass(AfterSameToken(ids), mean=True)


def local(amap: AttentionMap, width: int) -> Tensor:
    """The weight within `width` keys of the query's own position, on both sides."""
    return amap.mass(Window(left=width, right=width), mean=True)
