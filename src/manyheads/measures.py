"""What a head does, in the measures that papers use: each is the mean mass of a mask over the map.

All take a map, `amap`, and return `[b, h]`, averaged over those queries that have a key to look at under the
measure's mask. `ids` are the tokens, integers `[s]` or `[b, s]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyheads import statistics
from manyheads.maps import AttentionMap, picked_rows
from manyheads.masks import AfterSameToken, Causal, Diagonal, Mask, SameToken, Window
from manyheads.shapes import kind, sizes

# The masks whose mean mass are head scores: those that the map alone tells, and those that need the tokens.
MAP_MASKS: dict[str, Callable[[AttentionMap], Mask]] = {
    "previous_token": lambda amap: Diagonal(-1),
    "current_token": lambda amap: Diagonal(0),
    "first_token": AttentionMap.first_key,
}
TOKEN_MASKS: dict[str, Callable[[Tensor], Mask]] = {
    "duplicate_token": lambda ids: SameToken(ids) & Causal() & ~Diagonal(0),
    "induction": AfterSameToken,
}
UNITS = {"entropy": "nats", "distance": "positions"}  # of the other head scores, which aren't weights


def previous_token(amap: AttentionMap) -> Tensor:
    """Return the mean weight of amap on the key just before, j = i − 1: `[b, h]`, between 0 and 1.

    What a previous-token head has (Clark et al. 2019, arXiv:1906.04341). TypeError for what is no map.
    """
    return _score(amap, "previous_token")


def current_token(amap: AttentionMap) -> Tensor:
    """Return the mean weight of amap on the query's own key, j = i: `[b, h]`, between 0 and 1.

    Clark et al. 2019 (arXiv:1906.04341). TypeError for what is no map.
    """
    return _score(amap, "current_token")


def first_token(amap: AttentionMap) -> Tensor:
    """Return the mean weight of amap on the first key that the query may see: `[b, h]`, between 0 and 1.

    An attention sink (Xiao et al. 2024, arXiv:2309.17453). TypeError for what is no map.
    """
    return _score(amap, "first_token")


def duplicate_token(amap: AttentionMap, ids: Tensor) -> Tensor:
    """Return the mean weight of amap on earlier keys with the query's own token: `[b, h]`, between 0 and 1.

    ids: the tokens, integers `[s]` or `[b, s]`. What a duplicate-token head has (Wang et al. 2023,
    arXiv:2211.00593). TypeError for what is no map or no tokens, ValueError for another number of them.
    """
    return _token_score(amap, "duplicate_token", ids)


def induction(amap: AttentionMap, ids: Tensor) -> Tensor:
    """Return the mean weight of amap on keys that follow the query's own token: `[b, h]`, between 0 and 1.

    ids: the tokens, integers `[s]` or `[b, s]`. What an induction head has (Elhage et al. 2021; Olsson et
    al. 2022, arXiv:2209.11895). TypeError for what is no map or no tokens, ValueError for another number.
    """
    return _token_score(amap, "induction", ids)


def local(amap: AttentionMap, width: int) -> Tensor:
    """Return the mean weight of amap within `width` keys of the query's position, on both sides: `[b, h]`.

    It lies between 0 and 1, and is all that a window keeps (Beltagy et al. 2020, arXiv:2004.05150). TypeError
    or ValueError for what is no map or no width.
    """
    return _map(amap).mass(Window(left=width, right=width), mean=True)


def _score(amap: AttentionMap, name: str) -> Tensor:
    return _map(amap).mass(MAP_MASKS[name](amap), mean=True)


def _token_score(amap: AttentionMap, name: str, ids: Tensor) -> Tensor:
    mask = TOKEN_MASKS[name](_one_for_each_key(ids, _map(amap)))
    return amap.mass(mask, mean=True)


def _map(amap: object) -> AttentionMap:
    """Return a map, checked."""
    if not isinstance(amap, AttentionMap):
        raise TypeError(f"Expected an AttentionMap to measure, got {kind(amap)}.")
    return amap


def _one_for_each_key(ids: Tensor, amap: AttentionMap) -> Tensor:
    """Return the tokens, checked: integers `[s]` or `[b, s]`."""
    s = amap.shape[3]
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise TypeError(f"Expected ids to be the tokens, integers [s] or [b, s], got {kind(ids)}.")
    if ids.dim() not in (1, 2) or ids.shape[-1] != s:
        raise ValueError(f"Expected ids to be [s] or [b, s], one for each of s = {s} keys, got {sizes(ids)}.")
    return ids


def rollout(maps: Sequence[AttentionMap], rows: int | Sequence[int] | slice | Tensor | None = None) -> Tensor:
    """Where some positions' information comes from, through all layers: `[b, r, s]` (`[b, s]` for an int).

    Attention rollout (Abnar & Zuidema 2020, arXiv:2005.00928): the rows of Π (½ W + ½ I), W being a
    layer's weights averaged over heads, and ½ I what goes past it: shares between 0 and 1. The rows are
    carried from the last layer down, one pass over each, so that no matrix is built. Nothing is
    renormalised: where a sink or a mask leaves a row less than 1 to give, its part of the rollout is less.

    maps: one per layer, the first layer first, all `[b, h, t, t]` of one length.
    rows: which positions, as an index of the map's rows: an int, a slice, or integers `[r]`.

    Raises ValueError for all rows at once (`rows=None`): the product of matrices is as dense as
    they are, t × t in memory and t³ per layer in time; ValueError or TypeError for what are no such maps,
    TypeError for what are no rows, IndexError for rows that aren't there.
    """
    if isinstance(maps, AttentionMap) or not isinstance(maps, Sequence):
        raise TypeError(f"Expected a list of AttentionMaps for rollout, one per layer, got {kind(maps)}.")
    if not maps:
        raise ValueError("Expected a list of AttentionMaps for rollout, one per layer, got an empty one.")
    for amap in maps:
        if not isinstance(amap, AttentionMap):
            raise TypeError(
                f"Expected AttentionMaps for rollout, one per layer, got {kind(amap)} among them."
            )
    b, _, t, s = maps[0].shape
    for amap in maps:
        if amap.shape[0] != b or amap.shape[2:] != (t, t) or not amap.shape[1]:
            raise ValueError(
                f"Expected layers of one sequence for rollout, [b, h, t, t] with b = {b}, t = {t} and heads, "
                f"got {list(amap.shape)}."
            )
    if rows is None:
        raise ValueError(
            f"the whole rollout is a dense {t} × {t} matrix, whose product takes t³ for each layer, and no "
            "rollout needs rows, the positions to follow, e.g. rows=-1 or rows=[0, 5]."
        )
    if isinstance(rows, bool | float | str):
        raise TypeError(f"Expected rows to be positions, e.g. rows=-1 or rows=[0, 5], got {rows!r}.")
    chosen = picked_rows(rows, t)
    share = torch.zeros(b, len(chosen), s, dtype=maps[0].problem.dtype, device=maps[0].problem.q.device)
    share[:, torch.arange(len(chosen)), chosen] = 1.0  # [b, r, s]
    for amap in reversed(maps):
        amap._fresh()
        share = (share + statistics.mixed(amap.problem, amap.lse, share)) / 2
    return share[:, 0] if isinstance(rows, int) else share
