"""Head scores: how much a head attends to the previous token, to repeated tokens, and so on.

`SCORES` is the table of all head scores that are mean weights: recordings, the viewer and `manyheads show`
select from it by name. To add a score, add a row to it, and its name to the selections that should have it:
`observe.summaries.HEAD_SCORES`, `observe.table.TOKEN_SCORES` or `highlights.SCORES`. A mean statistic,
such as the entropy, is a head score too; `UNITS` has the units.

All of them take an `AttentionMap`, or on several processes a `ShardedMap`: every rank then calls them with
the same arguments, and gets the same result, that of the whole map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.maps import AttentionMap, BaseMap, resolve_rows
from manyheads.masks import AfterSameToken, Causal, Diagonal, Keys, Mask, SameToken, Window
from manyheads.shapes import kind, sizes

if TYPE_CHECKING:
    from manyheads.distributed.sharded_map import ShardedMap


@dataclass(frozen=True)
class Score:
    """A head score: the mean weight inside a mask, over the queries that have a visible key in the mask.

    Attributes:
        mask: A function of the map and the tokens that returns the mask.
        needs_tokens: True if the mask depends on the tokens; else they may be None.
    """

    mask: Callable[[Any, Any], Mask]
    needs_tokens: bool = False

    def mean_weight(self, amap: AttentionMap | ShardedMap, ids: Tensor | None = None) -> Tensor:
        """Return the score of every head, `[b, h]`; 0 if no query has a visible key in the mask.

        Args:
            amap: The map.
            ids: The tokens, integers `[s]` or `[b, s]`, if the mask depends on them.

        Returns:
            The score, between 0 and 1.
        """
        checked = _check_map(amap)
        tokens = checked._agree(lambda: _check_ids(ids, checked)) if self.needs_tokens else None
        return checked.mass(self.mask(checked, tokens), mean=True)


SCORES: dict[str, Score] = {
    "previous_token": Score(lambda amap, ids: Diagonal(-1)),
    "current_token": Score(lambda amap, ids: Diagonal(0)),
    "next_token": Score(lambda amap, ids: Diagonal(1)),
    "first_token": Score(lambda amap, ids: amap.first_key()),  # the first visible key of each query
    "first_position": Score(lambda amap, ids: Keys([0])),
    "last_position": Score(lambda amap, ids: Keys([amap.problem.tokens - 1]) & ~Diagonal(0)),
    "same_token": Score(lambda amap, ids: SameToken(ids) & ~Diagonal(0), needs_tokens=True),
    "duplicate_token": Score(lambda amap, ids: SameToken(ids) & Causal() & ~Diagonal(0), needs_tokens=True),
    "induction": Score(lambda amap, ids: AfterSameToken(ids), needs_tokens=True),
}
UNITS = {"entropy": "nats", "distance": "positions"}  # of mean statistics; weights have no unit


def previous_token(amap: AttentionMap | ShardedMap) -> Tensor:
    """Return the mean weight on the key just before the query, j = i − 1.

    It is high for a previous-token head (Clark et al. 2019, arXiv:1906.04341).

    Args:
        amap: The map.

    Returns:
        The score `[b, h]`, between 0 and 1.

    Raises:
        TypeError: If amap isn't a map.
    """
    return SCORES["previous_token"].mean_weight(amap)


def current_token(amap: AttentionMap | ShardedMap) -> Tensor:
    """Return the mean weight on the query's own key, j = i.

    Clark et al. 2019 (arXiv:1906.04341).

    Args:
        amap: The map.

    Returns:
        The score `[b, h]`, between 0 and 1.

    Raises:
        TypeError: If amap isn't a map.
    """
    return SCORES["current_token"].mean_weight(amap)


def first_token(amap: AttentionMap | ShardedMap) -> Tensor:
    """Return the mean weight on the first visible key.

    It is high for an attention sink (Xiao et al. 2024, arXiv:2309.17453).

    Args:
        amap: The map.

    Returns:
        The score `[b, h]`, between 0 and 1.

    Raises:
        TypeError: If amap isn't a map.
    """
    return SCORES["first_token"].mean_weight(amap)


def duplicate_token(amap: AttentionMap | ShardedMap, ids: Tensor) -> Tensor:
    """Return the mean weight on earlier keys with the query's own token.

    It is high for a duplicate-token head (Wang et al. 2023, arXiv:2211.00593).

    Args:
        amap: The map.
        ids: The tokens, integers `[s]` or `[b, s]`.

    Returns:
        The score `[b, h]`, between 0 and 1.

    Raises:
        TypeError: If amap isn't a map, or ids aren't integers.
        ValueError: If ids have the wrong shape.
    """
    return SCORES["duplicate_token"].mean_weight(amap, ids)


def induction(amap: AttentionMap | ShardedMap, ids: Tensor) -> Tensor:
    """Return the mean weight on keys that follow an earlier occurrence of the query's token.

    It is high for an induction head (Elhage et al. 2021; Olsson et al. 2022, arXiv:2209.11895).

    Args:
        amap: The map.
        ids: The tokens, integers `[s]` or `[b, s]`.

    Returns:
        The score `[b, h]`, between 0 and 1.

    Raises:
        TypeError: If amap isn't a map, or ids aren't integers.
        ValueError: If ids have the wrong shape.
    """
    return SCORES["induction"].mean_weight(amap, ids)


def local(amap: AttentionMap | ShardedMap, width: int) -> Tensor:
    """Return the mean weight within `width` keys of the query's position, on both sides.

    It is the weight that a window mask would keep (Beltagy et al. 2020, arXiv:2004.05150).

    Args:
        amap: The map.
        width: The number of keys on each side.

    Returns:
        The score `[b, h]`, between 0 and 1.

    Raises:
        TypeError: If amap isn't a map, or width isn't an integer.
        ValueError: If width is negative.
    """
    checked = _check_map(amap)
    return checked.mass(checked._agree(lambda: Window(left=width, right=width)), mean=True)


def _check_map(amap: object) -> BaseMap:
    if not isinstance(amap, BaseMap):
        raise TypeError(f"Expected an AttentionMap, got {kind(amap)}.")
    return amap


def _check_ids(ids: object, amap: BaseMap) -> Tensor:
    """Return the tokens on the map's device, checked."""
    s = amap.problem.tokens  # more than the map's keys if a Cache has dropped some
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        hint = " Wrap it as torch.tensor(ids)." if isinstance(ids, list | tuple) else ""
        raise TypeError(f"Expected ids to be the tokens, integers [s] or [b, s], got {kind(ids)}.{hint}")
    if ids.dim() not in (1, 2) or ids.shape[-1] != s:
        raise ValueError(f"Expected ids to be [s] or [b, s], one for each of s = {s} keys, got {sizes(ids)}.")
    return ids.to(amap.problem.q.device)


def rollout(
    maps: Sequence[AttentionMap] | Sequence[ShardedMap],
    rows: int | Sequence[int] | slice | Tensor | None = None,
) -> Tensor:
    """Return how much information each position of the input contributes to some positions of the output.

    This is attention rollout (Abnar & Zuidema 2020, arXiv:2005.00928): rows of the product Π (½ W + ½ I) over
    all layers, where W is a layer's weights averaged over heads, and ½ I is the residual connection. The rows
    are computed from the last layer to the first, in one pass over each, without storing a matrix. Nothing is
    renormalized: if rows of W sum to less than 1, because of a sink or a mask, so do rows of the rollout.

    Args:
        maps: The map of each layer, the first layer first, all `[b, h, t, t]` of one length.
        rows: The positions, as an index of the map's rows: an int, a slice, or integers `[r]`. Required,
            because all rows would be a dense t × t matrix, which takes t³ operations per layer.

    Returns:
        The shares `[b, r, s]`, between 0 and 1, or `[b, s]` for an int.

    Raises:
        TypeError: If maps aren't maps, or rows isn't an index.
        ValueError: If maps are empty or of different lengths, or rows is None.
        IndexError: If a row is out of range.
    """
    layers = _check_layers(maps)
    chosen = layers[0]._agree(lambda: _check_rows(rows, layers[0].shape[2]))
    b, _, t, _ = layers[0].shape
    share = layers[0].lse.new_zeros(b, len(chosen), t)
    share[:, torch.arange(len(chosen)), chosen] = 1.0  # [b, r, s]
    share = _propagate(layers, share)
    return share[:, 0] if isinstance(rows, int) else share


def _check_rows(rows: Any, t: int) -> list[int]:
    """Return the rows of `rollout`, checked."""
    if rows is None:
        raise ValueError(
            "Expected the rows of rollout, e.g. rows=-1 or rows=[0, 5], got None: all rows are a dense "
            f"{t} × {t} matrix."
        )
    if isinstance(rows, bool | float | str):
        raise TypeError(f"Expected rows to be positions, e.g. rows=-1 or rows=[0, 5], got {rows!r}.")
    return resolve_rows(rows, t)


def rollout_mean(
    maps: Sequence[AttentionMap] | Sequence[ShardedMap],
    rows: int | Sequence[int] | slice | Tensor = slice(None),
) -> Tensor:
    """Return the mean over some positions of `rollout`, in the memory and time of a single position.

    Args:
        maps: The map of each layer, as in `rollout`.
        rows: The positions, all by default.

    Returns:
        The shares `[b, s]`, between 0 and 1.

    Raises:
        TypeError: If maps aren't maps, or rows isn't an index.
        ValueError: If maps are empty or of different lengths, or rows select no position.
        IndexError: If a row is out of range.
    """
    layers = _check_layers(maps)
    b, _, t, _ = layers[0].shape

    def resolve() -> list[int]:
        chosen = resolve_rows(rows, t)
        if not chosen:
            raise ValueError(f"Expected at least one position to average over, got rows={rows!r}.")
        return chosen

    chosen = layers[0]._agree(resolve)
    counts = torch.bincount(torch.tensor(chosen), minlength=t) / len(chosen)
    share = counts.to(layers[0].lse).expand(b, 1, t)  # [b, 1, s]
    return _propagate(layers, share)[:, 0]


def _check_layers(maps: Any) -> Sequence[BaseMap]:
    """Return the layers of a rollout, checked."""
    if isinstance(maps, BaseMap) or not isinstance(maps, Sequence):
        raise TypeError(f"Expected a list of AttentionMaps for rollout, one per layer, got {kind(maps)}.")
    if not maps:
        raise ValueError("Expected a list of AttentionMaps for rollout, one per layer, got an empty one.")
    b, _, t, _ = _check_map(maps[0]).shape
    for amap in map(_check_map, maps):
        if amap.shape[0] != b or amap.shape[2:] != (t, t) or not amap.shape[1]:
            raise ValueError(
                f"Expected layers of one sequence for rollout, [b, h, t, t] with b = {b}, t = {t} and heads, "
                f"got {list(amap.shape)}."
            )
    return maps


def _propagate(layers: Sequence[BaseMap], share: Tensor) -> Tensor:
    """Return shares `[b, r, s]` of positions of the output as shares of positions of the input."""
    for amap in reversed(layers):
        share = (share + amap._mix_heads(share)) / 2
    return share
