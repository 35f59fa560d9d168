"""The cells of a heat map: weights, or pooled weights if the weights don't all fit into a panel.

Maps are pooled in one pass over their tiles, without building the matrix; tensors are pooled the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from manyheads.maps import AttentionMap, sequence_labels
from manyheads.problem import Problem
from manyheads.shapes import kind, sizes, whole
from manyheads.statistics import Bins, Pooled, Reduction, Tile, edges
from manyheads.tokens import TokenizedText

Weights = AttentionMap | Tensor
Layers = AttentionMap | Sequence[AttentionMap] | Mapping[str, AttentionMap]
Labels = Sequence[str]
AxisLabels = tuple[Labels | None, Labels | None]  # of queries, of keys
Cells = Any  # a numpy masked array [rows, cols]; a cell is masked if all of its weights are
Heads = AttentionMap | list[Cells]  # the heads of one sequence: a map of b = 1, or the weights of each

DPI = 150
SHARP, POOLED = DPI // 2, DPI // 3  # the most cells per inch: of one token each, and of several
POOLING = {"max": "largest", "mean": "mean"}


class Panel(NamedTuple):
    """A heat map with its numbers of queries and keys. If it is pooled, it has fewer rows or columns."""

    cells: Cells
    t: int
    s: int


class Visible(Reduction):
    """The number of visible pairs of query and key in each cell, `[b, h, rows, cols]`."""

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols = rows, cols

    def begin(self, problem: Problem) -> None:
        """Compute the edges of the cells."""
        shape = problem.shape
        self.down, self.across = edges(shape.t, self.rows), edges(shape.s, self.cols)
        self.count = problem.q.new_zeros(shape.b, shape.h, self.rows, self.cols, dtype=torch.int64)

    def add(self, tile: Tile) -> None:
        """Add the visible pairs of a tile."""
        down, across = Bins(self.down, tile.rows), Bins(self.across, tile.cols)
        part = self.count[:, :, down.cells, across.cells]  # a view
        if tile.visible is None:
            part += (down.widths[:, None] * across.widths).to(part.device)
        else:
            part += down.sum(across.sum(tile.visible.long()).mT).mT

    def result(self) -> Tensor:
        """Return the counts."""
        return self.count


# -- selecting heads -------------------------------------------------------------------------------


def select_head(weights: Weights, batch: int, head: int, keep: Tensor | None) -> Heads:
    """Return one head, as a map of this head or as its weights."""
    if isinstance(weights, AttentionMap):
        _check_no_mask(keep)
        whole(batch, "batch", 0, weights.shape[0] - 1)
        whole(head, "head", 0, weights.shape[1] - 1)
        return _check_size(weights.only(batch, head))
    if not isinstance(weights, Tensor):
        raise TypeError(f"Expected weights to be an AttentionMap or a tensor, got {kind(weights)}.")
    return _check_size([_weights_array(weights, keep, "[t, s]")])


def select_rows(weights: Tensor | Layers, batch: int, keep: Tensor | None) -> dict[str, Heads]:
    """Return the rows of a grid by name: the sequences of a map or tensor, or the layers."""
    if isinstance(weights, Tensor):
        array = _weights_array(weights, keep, "[b, h, t, s]")
        rows: list[Heads] = [list(heads) for heads in array]
    else:
        _check_no_mask(keep)
        if not isinstance(weights, AttentionMap):
            return dict(select_layers(weights, batch))
        rows = [weights.only(n) for n in range(weights.shape[0])]
    return {f"sequence {n}": _check_size(heads) for n, heads in enumerate(_check_some(rows))}


def select_layers(maps: Layers, batch: int) -> dict[str, AttentionMap]:
    """Return the maps of one sequence by the names of their layers."""
    if isinstance(maps, AttentionMap):
        maps = {"": maps}
    elif isinstance(maps, Sequence) and not isinstance(maps, str):
        maps = {f"layer {n}": amap for n, amap in enumerate(maps)}
    if not isinstance(maps, Mapping):
        raise TypeError(f"Expected an AttentionMap, a list of them or a dict by name, got {kind(maps)}.")
    layers = {}
    for name, amap in _check_some(maps).items():
        if not isinstance(amap, AttentionMap):
            raise TypeError(f"Expected only AttentionMaps, got {kind(amap)} for {name}.")
        whole(batch, "batch", 0, amap.shape[0] - 1)
        _check_size(amap)
        layers[str(name)] = amap if amap.shape[0] == 1 else amap.only(batch)  # `only` copies
    return layers


def _check_some(rows: Any) -> Any:
    if not rows:
        raise ValueError("Expected at least one row of heads, got none.")
    return rows


def _check_size(heads: Heads) -> Heads:
    if not head_numbers(heads):
        raise ValueError("Expected at least one head in every row, got a row with none.")
    if not all(size(heads)):
        raise ValueError(f"Expected at least one query and one key, got [t, s] = {list(size(heads))}.")
    return heads


def _weights_array(weights: Tensor, keep: Tensor | None, shape: str) -> Cells:
    """Return weights as a masked array, checked to be at least 0 and to have as many axes as a shape."""
    if weights.dim() != shape.count(",") + 1 or not weights.is_floating_point():
        raise ValueError(
            f"Expected a floating-point tensor {shape}, got {sizes(weights)} of {weights.dtype}."
        )
    cells = masked_array(weights, None if keep is None else _expand(keep, weights))
    if cells.count() and cells.min() < 0:
        raise ValueError(f"Expected weights of at least 0, got {cells.min():.3g}.")
    return cells


def _check_no_mask(keep: Tensor | None) -> None:
    if keep is not None:
        raise ValueError("Expected no keep for a map, which has a mask. To change it, use amap.under(mask).")


def _expand(keep: Tensor, weights: Tensor) -> Tensor:
    """Broadcast a boolean mask to the weights' shape."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"Expected keep to be a boolean tensor (True = may attend), got {kind(keep)}.")
    try:
        return keep.detach().cpu().expand(weights.shape)
    except RuntimeError:
        raise ValueError(
            f"Expected keep to broadcast to the weights {sizes(weights)}, got {sizes(keep)}."
        ) from None


def size(heads: Heads) -> tuple[int, int]:
    """Return the numbers of queries and keys."""
    return heads.shape[2:] if isinstance(heads, AttentionMap) else heads[0].shape


def head_numbers(heads: Heads) -> Sequence[int]:
    """Return the numbers of the heads in the model."""
    return heads.heads if isinstance(heads, AttentionMap) else range(len(heads))


# -- pooling ---------------------------------------------------------------------------------------


def pool_heads(heads: Heads, box: tuple[float, float], reduces: Sequence[str]) -> list[list[Panel]]:
    """Return the panels by reduction and head, with as many cells as fit into a box, given in inches."""
    t, s = size(heads)
    shape = count_cells(t, box[0]), count_cells(s, box[1])
    reductions = [Pooled(*shape, reduce) for reduce in reduces]  # raises an error for an unknown name
    if not isinstance(heads, AttentionMap):
        return [[pool(weights, shape, reduce) for weights in heads] for reduce in reduces]
    visible, *pooled = heads.reduce([Visible(*shape), *reductions])
    return [
        [Panel(masked_array(x, n > 0), t, s) for x, n in zip(cells[0], visible[0], strict=True)]
        for cells in pooled
    ]


def count_cells(size: int, inches: float) -> int:
    """Return the number of cells for `size` tokens: one per token if they fit, else one per several."""
    if size <= int(SHARP * inches + 1e-6):
        return size
    step = -(-size // max(1, int(POOLED * inches)))
    return -(-size // step)


def pool(weights: Cells, shape: tuple[int, int], reduce: str) -> Panel:
    """Pool weights `[t, s]` as `AttentionMap.pooled` does."""
    t, s = weights.shape
    if shape == (t, s):
        return Panel(weights, t, s)
    down, across = (edges(size, n).numpy() for size, n in zip((t, s), shape, strict=True))

    def over(ufunc: np.ufunc, x: np.ndarray) -> np.ndarray:
        return ufunc.reduceat(ufunc.reduceat(x, down[:-1], axis=0), across[:-1], axis=1)

    pooled = over(np.maximum if reduce == "max" else np.add, weights.filled(0.0))
    if reduce == "mean":
        pooled = pooled / np.outer(np.diff(down), np.diff(across))
    return Panel(np.ma.array(pooled, mask=over(np.logical_and, np.ma.getmaskarray(weights))), t, s)


def masked_array(values: Tensor, visible: Tensor | None) -> Cells:
    """Return numbers `[rows, cols]` as a masked array; raise ValueError if a visible one isn't finite."""
    numbers = values.detach().to("cpu", torch.float64).numpy()
    masked = np.zeros(numbers.shape, bool) if visible is None else ~visible.cpu().numpy()
    if not np.isfinite(numbers[~masked]).all():
        raise ValueError("Expected finite weights, got NaN or infinity. Pass keep if they are masked.")
    return np.ma.array(numbers, mask=masked)


# -- labels ----------------------------------------------------------------------------------------


def axis_labels(heads: Heads, tokens: Labels | None, keys: Labels | None = None) -> AxisLabels:
    """Return the labels of queries and keys, checked. The default is the map's tokens."""
    t, s = size(heads)
    if tokens is None and keys is None and isinstance(heads, AttentionMap):
        keys = sequence_labels(heads.tokens)
        tokens = keys if t == s else None
    if keys is None and t == s:
        keys = tokens
    for name, labels, n in (("tokens", tokens, t), ("keys", keys, s)):
        if labels is not None and len(labels) != n:
            raise ValueError(f"Expected {name} to be {n} labels, got {len(labels)}.")
    return tokens, keys


def labels_of_rows(tokens: Labels | Sequence[Labels] | None, count: int) -> list[Labels | None]:
    """Return the labels of each row of a grid."""
    if tokens is None:
        return [None] * count
    if isinstance(tokens, TokenizedText) or all(isinstance(name, str) for name in tokens):
        return [cast(Labels, tokens)] * count
    if len(tokens) != count:
        raise ValueError(
            f"Expected tokens to be a list of labels or {count} lists, one per row, got {len(tokens)}."
        )
    return list(tokens)


def short_names(names: list[str]) -> list[str]:
    """Return `layer 0`, `layer 1`, … for paths that differ only in one number; other names as they are."""
    numbers = [re.findall(r"(?<=\.)\d+(?=\.|$)", name) for name in names]
    around = {re.sub(r"(?<=\.)\d+(?=\.|$)", "0", name) for name in names}
    if len(around) == 1 and all(len(found) == 1 for found in numbers):
        return [f"layer {number}" for (number,) in numbers]
    return names


def check_names(names: Labels, count: int, unit: str) -> list[str]:
    """Return the names of a grid's rows or columns, checked."""
    if len(names) != count:
        raise ValueError(f"Expected a name for each of {count} {unit}s, got {len(names)} names.")
    return list(names)
