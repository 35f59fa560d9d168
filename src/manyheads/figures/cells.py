"""From weights to the cells of a heat map: as many as so many inches show, masked where nothing may attend.

What is pooled, a map pools itself, in one pass over its tiles; weights that are at hand are pooled alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from manyheads.maps import AttentionMap
from manyheads.reductions import Bins, Pooled, Reduction, Tile, edges
from manyheads.scores import Problem
from manyheads.shapes import kind, sizes

Weights = AttentionMap | Tensor
Layers = AttentionMap | Sequence[AttentionMap] | Mapping[str, AttentionMap]
Labels = Sequence[str]
Names = tuple[list[str] | None, list[str] | None]  # of queries, of keys
Cells = Any  # a numpy masked array [rows, cols]; masked = nothing in the cell may attend
Line = AttentionMap | list[Cells]  # one sequence: a map of b = 1, or the weights of each head

DPI = 150
SHARP, POOLED = DPI // 2, DPI // 3  # tokens an inch that are shown one by one, cells of those that are not
WAYS = {"max": "largest", "mean": "mean"}


class Panel(NamedTuple):
    """A heat map, and how many rows and columns it stands for: more than it has cells if it is pooled."""

    cells: Cells
    t: int
    s: int


class Visible(Reduction):
    """How many pairs of each cell may attend, `[b, h, rows, cols]`: none in a masked cell."""

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols = rows, cols

    def begin(self, problem: Problem, lse: Tensor) -> None:
        n = problem.shape
        self.down, self.across = edges(n.t, self.rows), edges(n.s, self.cols)
        self.count = lse.new_zeros(n.b, n.h, self.rows, self.cols, dtype=torch.int64)

    def take(self, tile: Tile) -> None:
        down, across = Bins(self.down, tile.rows), Bins(self.across, tile.cols)
        part = self.count[:, :, down.cells, across.cells]  # a view
        if tile.seen is None:
            part += (down.widths[:, None] * across.widths).to(part.device)
        else:
            part += down.sum(across.sum(tile.seen.long()).mT).mT

    def end(self) -> Tensor:
        return self.count


# -- what is to be drawn ---------------------------------------------------------------------------


def one_head(weights: Weights, batch: int, head: int, keep: Tensor | None) -> Line:
    """One head: a map of it alone, or its weights."""
    if isinstance(weights, AttentionMap):
        _knows(keep)
        _inside("batch", batch, weights.shape[0])
        _inside("head", head, weights.shape[1])
        return _drawable(weights.only(batch, head))
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be an AttentionMap or a tensor, and {kind(weights)} came.")
    if weights.dim() != 2 or not weights.is_floating_point():
        raise ValueError(
            "weights must be an AttentionMap or a floating-point tensor [t, s], and "
            f"{sizes(weights)} of {weights.dtype} came."
        )
    return _drawable([_positive(masked(weights, None if keep is None else _spread(keep, weights)))])


def all_heads(weights: Tensor | Layers, batch: int, keep: Tensor | None) -> dict[str, Line]:
    """The rows of a grid by their names: a sequence each of a map or tensor, else a layer each."""
    if isinstance(weights, Tensor):
        if weights.dim() != 4 or not weights.is_floating_point():
            raise ValueError(
                "a grid's tensor must be of floating point, [b, h, t, s], four dimensions, and "
                f"{sizes(weights)} of {weights.dtype} came: head() draws [t, s]."
            )
        seen = torch.ones_like(weights, dtype=torch.bool) if keep is None else _spread(keep, weights)
        lines: dict[str, Line] = {
            f"sequence {n}": [_positive(masked(x, k)) for x, k in zip(heads, kept, strict=True)]
            for n, (heads, kept) in enumerate(zip(weights, seen, strict=True))
        }
    else:
        _knows(keep)
        if not isinstance(weights, AttentionMap):
            return dict(layers(weights, batch))
        lines = {f"sequence {n}": weights.only(n) for n in range(weights.shape[0])}
    return {name: _drawable(line) for name, line in _some(lines).items()}


def layers(maps: Layers, batch: int) -> dict[str, AttentionMap]:
    """The maps of one sequence, by the names of their layers."""
    if isinstance(maps, AttentionMap):
        maps = {"": maps}
    elif isinstance(maps, Sequence) and not isinstance(maps, str):
        maps = {f"layer {n}": amap for n, amap in enumerate(maps)}
    if not isinstance(maps, Mapping):
        raise TypeError(f"maps must be AttentionMaps by name, a list of them, or one, and {kind(maps)} came.")
    found = {}
    for name, amap in _some(maps).items():
        if not isinstance(amap, AttentionMap):
            raise TypeError(f"maps must be AttentionMaps, and {kind(amap)} came among them.")
        _inside("batch", batch, amap.shape[0])
        _drawable(amap)
        found[str(name)] = amap if amap.shape[0] == 1 else amap.only(batch)  # which copies
    return found


def _some(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    if not rows:
        raise ValueError("a picture needs at least one row of heads, and none came.")
    return rows


def _drawable(line: Line) -> Line:
    if not heads(line):
        raise ValueError("a picture needs at least one head in every row, and a row without one came.")
    if not all(size(line)):
        raise ValueError(f"a picture needs at least one query and one key, and {list(size(line))} came.")
    return line


def _positive(weights: Cells) -> Cells:
    """Weights as they came, none of them below the 0 at which their colours begin."""
    if weights.count() and weights.min() < 0:
        raise ValueError(f"weights must be at least 0, and {weights.min():.3g} came among them.")
    return weights


def _knows(keep: Tensor | None) -> None:
    if keep is not None:
        raise ValueError("keep goes with a tensor; a map knows its own mask: see AttentionMap.under.")


def _inside(name: str, index: int, size: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be a whole number, 0 to {size - 1}, and {index!r} came.")
    if not 0 <= index < size:
        raise ValueError(f"{name} must lie between 0 and {size - 1}, and {index} came.")


def _spread(keep: Tensor, weights: Tensor) -> Tensor:
    """A boolean mask broadcast to the weights' shape."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"keep must be a boolean tensor, True = may attend, and {kind(keep)} came.")
    try:
        return keep.detach().cpu().expand(weights.shape)
    except RuntimeError:
        raise ValueError(
            f"keep must broadcast to the weights {sizes(weights)}, and {sizes(keep)} came."
        ) from None


def size(line: Line) -> tuple[int, int]:
    """Queries and keys."""
    return line.shape[2:] if isinstance(line, AttentionMap) else line[0].shape


def heads(line: Line) -> Sequence[int]:
    """The numbers of the heads."""
    return line.heads if isinstance(line, AttentionMap) else range(len(line))


def reduced(amap: AttentionMap, *asked: Reduction) -> list[Tensor]:
    """The results of reductions of a map, in one pass."""
    amap._fresh()
    return amap._reduced(list(asked))


# -- its cells -------------------------------------------------------------------------------------


def way(reduce: str) -> str:
    """A way of pooling, checked."""
    if reduce not in WAYS:
        raise ValueError(f'reduce must be "max" or "mean", and {reduce!r} came.')
    return reduce


def panels(line: Line, box: tuple[float, float], ways: Sequence[str]) -> list[list[Panel]]:
    """The panels of a line by way of pooling and by head, with the cells that a box of inches shows."""
    t, s = size(line)
    cells = count(t, box[0]), count(s, box[1])
    if not isinstance(line, AttentionMap):
        return [[pool(weights, cells, how) for weights in line] for how in ways]
    seen, *found = reduced(line, Visible(*cells), *(Pooled(*cells, how) for how in ways))  # [1, h, *cells]
    return [[Panel(masked(x, k > 0), t, s) for x, k in zip(one[0], seen[0], strict=True)] for one in found]


def count(size: int, inches: float) -> int:
    """How many cells so many inches show of so many tokens: one for each, or all but the last alike."""
    if size <= int(SHARP * inches + 1e-6):
        return size
    step = -(-size // max(1, int(POOLED * inches)))
    return -(-size // step)


def pool(weights: Cells, cells: tuple[int, int], how: str) -> Panel:
    """Weights that are at hand, `[t, s]`, pooled as `AttentionMap.pooled` does it."""
    t, s = weights.shape
    if cells == (t, s):
        return Panel(weights, t, s)
    down, across = (edges(size, n).numpy() for size, n in zip((t, s), cells, strict=True))

    def over(ufunc: np.ufunc, x: np.ndarray) -> np.ndarray:
        return ufunc.reduceat(ufunc.reduceat(x, down[:-1], axis=0), across[:-1], axis=1)

    pooled = over(np.maximum if how == "max" else np.add, weights.filled(0.0))
    if how == "mean":
        pooled = pooled / np.outer(np.diff(down), np.diff(across))
    return Panel(np.ma.array(pooled, mask=over(np.logical_and, np.ma.getmaskarray(weights))), t, s)


def masked(values: Tensor, seen: Tensor | None) -> Cells:
    """Numbers `[rows, cols]` as a masked array, masked where nothing is seen; they must be finite there."""
    numbers = values.detach().to("cpu", torch.float64).numpy()
    hidden = np.zeros(numbers.shape, bool) if seen is None else ~seen.cpu().numpy()
    if not np.isfinite(numbers[~hidden]).all():
        raise ValueError("weights must be finite, and NaN or infinity came among them.")
    return np.ma.array(numbers, mask=hidden)


# -- its names -------------------------------------------------------------------------------------


def labels(line: Line, tokens: Labels | None, keys: Labels | None = None) -> Names:
    """The names of queries and keys, checked against the weights; a map's own where none are given."""
    t, s = size(line)
    if tokens is None and keys is None and isinstance(line, AttentionMap) and line.tokens:
        own = line.tokens if isinstance(line.tokens[0], str) else line.tokens[0]
        tokens, keys = (own if t == s else None), cast(Labels, own)
    if keys is None and t == s:
        keys = tokens
    for what, names, n in (("tokens", tokens, t), ("keys", keys, s)):
        if names is not None and len(names) != n:
            raise ValueError(f"{what} must be {n} labels, one for each, and {len(names)} came.")
    return (None if tokens is None else list(tokens), None if keys is None else list(keys))


def each(tokens: Labels | Sequence[Labels] | None, down: int) -> list[Labels | None]:
    """The labels of each row of a grid."""
    if tokens is None:
        return [None] * down
    if all(isinstance(name, str) for name in tokens):
        return [cast(Labels, tokens)] * down
    if len(tokens) != down:
        raise ValueError(f"tokens must be one list, or one for each of {down} rows, and {len(tokens)} came.")
    return list(tokens)


def named(names: Labels, n: int, what: str) -> list[str]:
    """The names of a grid's rows or columns, checked."""
    if len(names) != n:
        raise ValueError(f"the grid has {n} {what}s and wants a name for each, and {len(names)} came.")
    return list(names)
