"""Statistics of a map over ranks, added up from blocks: a part's queries with a part's keys.

A block is an ordinary problem (`blocks.block`), so an ordinary reduction computes its share of a statistic,
by fused statistics if a kernel has them. A `Total` creates that reduction, adds the shares of this rank's
blocks, and at the end, for statistics that aren't per query, adds the ranks' totals.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads import statistics
from manyheads.distributed.communication import all_reduce
from manyheads.distributed.positions import Part
from manyheads.distributed.ring import Ring
from manyheads.kernels.fused import FusedStatistics, Spec
from manyheads.masks import FAR
from manyheads.problem import Problem
from manyheads.shapes import kind
from manyheads.statistics import Reduction, Tile, TopKeys


class Total:
    """A statistic that is added up from blocks.

    Args:
        reduction: The statistic of the whole map, whose arguments are checked against it.
        ring: The ranks and the problem of the whole sequence.
        lse: The log-sum-exp of this rank's rows, `[b, h, n]`, in the order of positions, as all results.

    Attributes:
        per_query: True if the result has this rank's rows.
    """

    per_query: ClassVar[bool] = False

    def __init__(self, reduction: Any, ring: Ring, lse: Tensor) -> None:
        self.given, self.ring, self.lse = reduction, ring, lse
        self.check()
        self.allocate()

    def check(self) -> None:
        """Check the arguments against the whole problem."""
        self.given.begin(self.ring.whole)

    def allocate(self) -> None:
        """Allocate the totals."""

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the reduction of a block, or None if it adds nothing."""
        raise NotImplementedError

    def add(self, rows: Part, cols: Part, share: Any) -> None:
        """Add the result of a block's reduction."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the statistic. All ranks call it."""
        raise NotImplementedError

    def reduce(self, total: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum, or the maximum, of the ranks' tensors `[...]`."""
        all_reduce(total, self.ring.group, how)
        return total


def columns(part: Part, device: torch.device) -> slice | Tensor:
    """Return an index of a part's positions."""
    if part.is_run:
        return slice(part.hull.start, part.hull.stop)
    return part.tensor(device)


# -- one number per query ----------------------------------------------------------------------------


class RowSum(Total):
    """A sum over the keys: the entropy."""

    per_query = True

    def allocate(self) -> None:
        """Allocate the sums."""
        self.total = torch.zeros_like(self.lse)  # [b, h, n]

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the same statistic of the block."""
        return type(self.given)()

    def add(self, rows: Part, cols: Part, share: Tensor) -> None:
        """Add the sums `[b, h, r]` over the block's keys."""
        self.total[:, :, rows.rows] += share

    def result(self) -> Tensor:
        """Return the sums."""
        return self.total


class PartDistance(statistics.Distance):
    """The distance in positions between the queries and keys of two parts."""

    def __init__(self, rows: Part, cols: Part) -> None:
        self.queries, self.keys = rows, cols

    def spec(self) -> Spec | None:  # type: ignore[override]
        """Return the fused statistics, which count columns, for runs of consecutive positions only."""
        return super().spec() if self.queries.is_run and self.keys.is_run else None

    def add(self, tile: Tile) -> None:
        """Add a tile."""
        if self.queries.is_run and self.keys.is_run:
            super().add(tile)
            return
        device = tile.lse.device
        i, j = self.queries.tensor(device)[tile.rows], self.keys.tensor(device)[tile.cols]
        distances = (i[:, None] - j).abs().to(tile.lse.dtype)  # [r, c]
        self.total[:, :, tile.rows] += (tile.weights * distances).sum(-1)


class RowDistance(RowSum):
    """The mean distance."""

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the distance between the two parts."""
        return PartDistance(rows, cols)


class RowMaximum(RowSum):
    """The largest weight."""

    def add(self, rows: Part, cols: Part, share: Tensor) -> None:
        """Merge the largest weights `[b, h, r]` of the block."""
        self.total[:, :, rows.rows] = torch.maximum(self.total[:, :, rows.rows], share)


class RowSink(Total):
    """The weight of the sink, which needs no keys."""

    per_query = True

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return None: no block adds to it."""
        return None

    def result(self) -> Tensor:
        """Return the weights `[b, h, n]`."""
        self.given.lse = self.lse
        return self.given.result()


class LargestLogs(statistics.Top):
    """The largest weights of a block as logarithms, which are in order even where weights round to 0."""

    def result(self) -> TopKeys:
        """Return ln w and the columns, both `[b, h, t, k]`."""
        return TopKeys(self.best, self.keys)


class RowTop(Total):
    """The largest weights and their keys."""

    per_query = True

    def allocate(self) -> None:
        """Allocate the largest weights so far."""
        shape = *self.lse.shape, self.given.kept
        self.best = self.lse.new_full(shape, -math.inf)  # ln w, [b, h, n, k]
        self.keys = torch.full(shape, FAR, device=self.lse.device)

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the largest weights of the block."""
        return LargestLogs(self.given.kept)

    def add(self, rows: Part, cols: Part, share: TopKeys) -> None:
        """Merge the largest weights of the block."""
        positions = cols.tensor(self.lse.device)
        found = torch.where(share.keys < 0, FAR, positions[share.keys.clamp(min=0)])
        keys = torch.cat((self.keys[:, :, rows.rows], found), -1)
        logs = torch.cat((self.best[:, :, rows.rows], share.weights), -1)
        # Blocks arrive in any order. Sorted by key first, a stable sort by weight keeps ties in this order.
        keys, order = keys.sort(dim=-1, stable=True)
        logs, by_weight = logs.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        kept = self.given.kept
        self.best[:, :, rows.rows] = logs[..., :kept]
        self.keys[:, :, rows.rows] = keys.gather(-1, by_weight)[..., :kept]

    def result(self) -> TopKeys:
        """Return the weights and keys."""
        return self.given.pad(self.best.exp().clamp_(max=1.0), self.keys.masked_fill_(self.keys == FAR, -1))


# -- one number per key ------------------------------------------------------------------------------


class BlockReceived(statistics.Received):
    """Column sums of a block, and the numbers of queries if they are needed, before the division."""

    def result(self) -> Any:
        """Return the sums `[b, h, s]`, and numbers that broadcast to them or None."""
        return self.total, self.queries if self.normalize else None


class KeyReceived(Total):
    """The weight that each key receives, on every rank."""

    def allocate(self) -> None:
        """Allocate the sums."""
        shape = self.ring.whole.shape
        self.total = self.lse.new_zeros(shape.b, shape.h, shape.s)
        self.queries = torch.zeros(self.total.shape, dtype=torch.int64, device=self.lse.device)
        if not self.given.normalize:
            self.queries = self.queries[..., :0]

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the sums over the block's queries, or over those of them that are among the last."""
        first = torch.searchsorted(rows.tensor(), torch.tensor(self.given.start))
        last = len(rows) - int(first)
        return BlockReceived(last, self.given.normalize) if last else None

    def add(self, rows: Part, cols: Part, share: Any) -> None:
        """Add the sums of the block."""
        at = columns(cols, self.lse.device)
        self.total[:, :, at] += share[0]
        if share[1] is not None:
            self.queries[:, :, at] += share[1].long()

    def result(self) -> Tensor:
        """Return the sums `[b, h, s]`, or means."""
        total = self.reduce(self.total)
        if not self.given.normalize:
            return total
        return total / self.reduce(self.queries).clamp(min=1).to(total)


class KeyNorms(KeyReceived):
    """The weights that each key receives times the norm of its value, which is given for this rank's keys."""

    def check(self) -> None:
        """Check the values of this rank's tokens, and compute their norms."""
        whole, n = self.ring.whole, self.lse.shape[2]
        self.given.begin(_with_sizes(whole, n))

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the sums over the block's queries."""
        return BlockReceived()

    def result(self) -> Tensor:
        """Return the sums `[b, h, s]`."""
        total = super().result()
        norms = torch.zeros_like(total)
        for part in self.ring.parts[self.ring.rank]:
            norms[:, :, columns(part, norms.device)] = self.given.norms[:, :, part.rows]
        return torch.where(total == 0, 0.0, total * self.reduce(norms))


def _with_sizes(whole: Problem, n: int) -> Problem:
    """Return a problem with the sizes of n queries and keys, of which only the sizes are used."""
    q, k, v = (x[:, :, :n] for x in (whole.q, whole.k, whole.v))
    shape = whole.shape._replace(t=n, s=n)
    return Problem(q, k, v, None, None, whole.scale, whole.softcap, whole.sink, 0, 0.0, shape)


# -- pooled maps, heads and pairs of heads -----------------------------------------------------------


class PartPooled(statistics.Pooled):
    """The cells of a pooled map that a block overlaps: their sums or maxima over the block.

    Args:
        down: The edges of the cells among the block's rows, `[cells + 1]`.
        across: The edges of the cells among its columns.
        how: "mean", for sums, or "max".
    """

    def __init__(self, down: Tensor, across: Tensor, how: str) -> None:
        super().__init__(len(down) - 1, len(across) - 1, how)
        self.edges = down, across

    def begin(self, problem: Problem) -> None:
        """Set the edges."""
        super().begin(problem)
        are_equal = [torch.equal(*pair) for pair in zip((self.down, self.across), self.edges, strict=True)]
        self.are_fused = all(are_equal)  # kernels only have cells of equal size
        self.down, self.across = self.edges

    def spec(self) -> Spec | None:  # type: ignore[override]
        """Return the fused statistics if the kernel has these cells."""
        return super().spec() if self.are_fused else None

    def result(self) -> Tensor:
        """Return the sums or maxima `[b, h, rows, cols]`."""
        return self.cell


class PooledCells(Total):
    """A pooled map of the whole matrix, on every rank."""

    def allocate(self) -> None:
        """Allocate the cells."""
        self.cell = self.lse.new_zeros(*self.lse.shape[:2], *self.given.cells)
        self.found: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def _cells(self, part: Part, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells that a part overlaps, `[n]`, and their edges within the part, `[n + 1]`."""
        key = id(part), edges is self.given.down
        if key not in self.found:
            cells = torch.searchsorted(edges, part.tensor(), right=True) - 1
            cells, counts = cells.unique_consecutive(return_counts=True)
            self.found[key] = cells, torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        return self.found[key]

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the cells of the block."""
        down, across = self._cells(rows, self.given.down)[1], self._cells(cols, self.given.across)[1]
        return PartPooled(down, across, "mean" if self.given.mean else "max")

    def add(self, rows: Part, cols: Part, share: Tensor) -> None:
        """Add the cells of the block."""
        down, across = (
            cells[0].to(self.lse.device)
            for cells in (self._cells(rows, self.given.down), self._cells(cols, self.given.across))
        )
        at = slice(None), slice(None), down[:, None], across
        cell = self.cell[at]
        self.cell[at] = cell + share if self.given.mean else torch.maximum(cell, share)

    def result(self) -> Tensor:
        """Return the means or maxima `[b, h, rows, cols]`."""
        mean = self.given.mean
        self.given.cell = self.reduce(self.cell, dist.ReduceOp.SUM if mean else dist.ReduceOp.MAX)
        return self.given.result()


class HeadMaximum(Total):
    """The largest score of each head, on every rank."""

    def allocate(self) -> None:
        """Allocate the maxima."""
        self.top = self.lse.new_full(self.lse.shape[:2], -math.inf)  # [b, h]

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the largest score of the block."""
        return statistics.LogitsMax()

    def add(self, rows: Part, cols: Part, share: Tensor) -> None:
        """Merge the maxima of the block."""
        self.top = torch.maximum(self.top, share)

    def result(self) -> Tensor:
        """Return the maxima `[b, h]`."""
        return self.reduce(self.top, dist.ReduceOp.MAX)


class BlockDivergence(statistics.Divergence):
    """The divergences of a block, summed over its queries, of pairs in which the first head is lower."""

    def result(self) -> Tensor:
        """Return the sums `[b, h, h]` in float64."""
        return self.total


class HeadDivergence(Total):
    """The divergences between heads, on every rank."""

    def allocate(self) -> None:
        """Allocate the sums."""
        shape = self.ring.whole.shape
        self.total = torch.zeros(shape.b, shape.h, shape.h, dtype=torch.float64, device=self.lse.device)

    def block(self, rows: Part, cols: Part) -> Reduction | None:
        """Return the divergences of the block."""
        return BlockDivergence()

    def add(self, rows: Part, cols: Part, share: Tensor) -> None:
        """Add the divergences of the block."""
        self.total += share

    def result(self) -> Tensor:
        """Return the means `[b, h, h]`."""
        self.given.lse, self.given.total = self.lse, self.reduce(self.total)
        return self.given.result()


TOTALS: dict[type[Reduction], type[Total]] = {
    statistics.Entropy: RowSum,
    statistics.Distance: RowDistance,
    statistics.RowMax: RowMaximum,
    statistics.SinkWeight: RowSink,
    statistics.Top: RowTop,
    statistics.Received: KeyReceived,
    statistics.ValueNorms: KeyNorms,
    statistics.Pooled: PooledCells,
    statistics.LogitsMax: HeadMaximum,
    statistics.Divergence: HeadDivergence,
}


def make_total(reduction: Reduction, ring: Ring, lse: Tensor) -> Total:
    """Return the total of a statistic of the whole map.

    Args:
        reduction: The statistic.
        ring: The ranks and the problem of the whole sequence.
        lse: The log-sum-exp of this rank's rows, `[b, h, n]`.

    Returns:
        The total.

    Raises:
        TypeError: If the statistic can't be added up from blocks.
    """
    if type(reduction) not in TOTALS:
        names = ", ".join(each.__name__ for each in TOTALS)
        raise TypeError(
            f"Expected a statistic that can be added up over ranks ({names}), got {kind(reduction)}. "
            "Save the map, and compute it from AttentionMap.open(path)."
        )
    return TOTALS[type(reduction)](reduction, ring, lse)


def add_block(problem: Problem, lse: Tensor, totals: list[Total], rows: Part, cols: Part) -> None:
    """Compute the shares of a block in one pass, and add them.

    Args:
        problem: The block.
        lse: The log-sum-exp of its rows, `[b, h, r]`.
        totals: The statistics.
        rows: The positions of its queries.
        cols: The positions of its keys.
    """
    found = [(total, total.block(rows, cols)) for total in totals]
    pairs = [(total, reduction) for total, reduction in found if reduction is not None]
    fused: FusedStatistics = {}
    shares = statistics.Pass(problem, [reduction for _, reduction in pairs]).results(lse, fused)
    for (total, _), share in zip(pairs, shares, strict=True):
        total.add(rows, cols, share)
