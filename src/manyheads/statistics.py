"""Statistics of the weights of all heads, computed in one pass over the scores in O(L) memory.

    entropy, top = amap.reduce([Entropy(), Top(8)])

Each statistic is a `Reduction`. Most are derived from fused statistics, which a kernel computes in the same
pass as the weights (`Reduction.spec`, `Reduction.read`). The others, or all if no kernel supports the
problem, are accumulated tile by tile (`Reduction.add`). A `Tile` computes the numbers that several statistics
need only once. The methods of `maps.AttentionMap` define each statistic and cite its source. Nothing is
renormalized: with a sink, the weights of a row sum to less than one.

To add a statistic, write a `Reduction`, add it to `BY_NAME`, and add a method of that name to `AttentionMap`.
Then add an oracle to `EXACT` and a test in `tests/unit/test_statistics.py`, and list it in
docs/reference/index.md and CHANGELOG. `attention_with_map(statistics=...)`, `observe(keep=...)` and
files need no change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import kernels, scores
from manyheads.kernels.fused import MAX_TOP, FusedStatistics, Spec
from manyheads.masks import FAR, AfterSameToken, Causal, Diagonal, Documents, Full, Mask, Not, SameToken
from manyheads.problem import Problem
from manyheads.shapes import amount, kind, sizes, whole

MAX_BYTES = 2**30  # largest result of `Top` if k is larger than the number of keys
LEAST = -1e30  # in place of −inf, so that its product with a weight of 0 is 0 and not NaN


class Tile:
    """The scores, weights and sums of a tile. Each is computed when it is first used, and then cached."""

    def __init__(self, problem: Problem, lse: Tensor, rows: slice, cols: slice) -> None:
        self.problem, self.lse = problem, lse  # [b, h, t]
        self.rows, self.cols = rows, cols

    @cached_property
    def visible(self) -> Tensor | None:
        """The mask: True where visible, `[b or 1, h or 1, r, c]`; None if everything is visible."""
        if scores.is_fully_visible(self.problem, self.rows, self.cols):
            return None
        return scores.visible(self.problem, self.rows, self.cols)

    @cached_property
    def scores(self) -> Tensor:
        """The scores, `[b, h, r, c]`; −inf where masked."""
        return kernels.tile(self.problem, self.rows, self.cols)

    @cached_property
    def log_weights(self) -> Tensor:
        """The score − lse, `[b, h, r, c]`, but at least `LEAST`."""
        return _log_weights(self.scores, self.lse[:, :, self.rows, None])

    @cached_property
    def weights(self) -> Tensor:
        """The weights, `[b, h, r, c]`; 0 where masked, even in a row whose log-sum-exp is NaN."""
        weights = self.log_weights.exp()
        return weights if self.visible is None else weights.masked_fill_(~self.visible, 0.0)

    @cached_property
    def row_sums(self) -> Tensor:
        """The sum of each row's weights, `[b, h, r]`."""
        return self.weights.sum(-1)

    @cached_property
    def row_max(self) -> Tensor:
        """The largest log-weight of each row, `[b, h, r]`; `LEAST` where no key of the tile is visible."""
        return self.log_weights.amax(-1)


def tiles(problem: Problem, lse: Tensor, start: int = 0) -> Iterator[Tile]:
    """Yield the tiles that aren't fully masked, row by row, from those that contain row `start`."""
    for rows, columns in kernels.blocks(problem, start):
        for cols in columns:
            yield Tile(problem, lse, rows, cols)


class Reduction:
    """One statistic.

    `Pass` calls `begin`, then either `read`, or `allocate` and `add` for every tile, then `result`.
    """

    per_query: ClassVar[bool] = False  # True if the result is [b, h, t]
    uses_tiles: ClassVar[bool] = True
    start = 0  # the first row that is included
    problem: Problem
    lse: Tensor  # [b, h, t]; set after `begin`

    def key(self) -> tuple[Any, ...]:
        """Return the class and the arguments, which identify the statistic before `begin` is called."""
        return type(self), *vars(self).items()

    def begin(self, problem: Problem) -> None:
        """Check the arguments against the problem."""
        self.problem = problem

    def spec(self) -> Spec | None:
        """Return which fused statistics `read` needs, or None if the statistic isn't computed from them."""
        return None

    def read(self, fused: FusedStatistics) -> None:
        """Set the accumulators from fused statistics, in place of `allocate` and `add`.

        Several reductions share the tensors, so don't change them in place.
        """
        raise NotImplementedError

    def allocate(self) -> None:
        """Allocate the accumulators of `add`."""

    def add(self, tile: Tile) -> None:
        """Accumulate a tile."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the statistic."""
        raise NotImplementedError


class Pass:
    """Several reductions of one problem, computed in one pass, and the fused statistics that they need.

    Reductions that start at different rows need separate fused statistics. The fused statistics of the lowest
    start (`spec`) can be computed together with the output or the log-sum-exp, which takes less time than
    computing them later.
    """

    def __init__(self, problem: Problem, reductions: Sequence[Reduction]) -> None:
        self.problem, self.reductions = problem, reductions
        self.specs: dict[int, Spec] = {}  # by the first row that is included
        self.fused_reductions: list[Reduction] = []
        with torch.no_grad(), scores.disable_autocast(problem.q.device):
            for reduction in reductions:
                reduction.begin(problem)
        for reduction in reductions if kernels.fuses(problem) else ():
            spec = reduction.spec() if reduction.start < problem.shape.t else None
            if spec is not None:
                first = self.specs.get(reduction.start, Spec(first=reduction.start))
                self.specs[reduction.start] = first | spec
                self.fused_reductions.append(reduction)

    @property
    def spec(self) -> Spec | None:
        """The fused statistics to compute together with the log-sum-exp, or None."""
        return self.specs[min(self.specs)] if self.specs else None

    def results(self, lse: Tensor, fused: FusedStatistics) -> list[Any]:
        """Return the results of the reductions.

        Args:
            lse: The log-sum-exp `[b, h, t]`.
            fused: The fused statistics of `spec`, or {} if they aren't computed yet.

        Returns:
            The results, in the order of the reductions.
        """
        with torch.no_grad(), scores.disable_autocast(lse.device):
            # Fused statistics are used only if all log-sum-exps are finite; tiles also handle Inf and NaN.
            from_fused = self.fused_reductions if self.specs and bool(lse.amax() < math.inf) else []
            known = {self.spec.first: fused} if self.spec is not None and fused else {}
            for start, spec in self.specs.items() if from_fused else ():
                if start not in known:
                    known[start] = kernels.statistics(self.problem, spec, lse).fused
            tiled = []
            for reduction in self.reductions:
                reduction.lse = lse
                if reduction in from_fused:
                    reduction.read(known[reduction.start])
                elif reduction.uses_tiles:
                    reduction.allocate()
                    tiled.append(reduction)
            start = min([self.problem.shape.t, *(reduction.start for reduction in tiled)])
            for tile in tiles(self.problem, lse, start) if tiled else ():
                for reduction in tiled:
                    if reduction.start < tile.rows.stop:
                        reduction.add(tile)
            return [reduction.result() for reduction in self.reductions]


# -- one number per query: [b, h, t] -----------------------------------------------------------------


class RowStatistic(Reduction):
    """A statistic of each row, `[b, h, t]`: a sum over the keys, unless a subclass overrides `result`."""

    per_query = True
    fused_name: ClassVar[str]

    def allocate(self) -> None:
        self.total = torch.zeros_like(self.lse)  # [b, h, t]

    def spec(self) -> Spec:
        return Spec(rows=True)

    def read(self, fused: FusedStatistics) -> None:
        self.total = fused[self.fused_name]

    def result(self) -> Tensor:
        return self.total


class Entropy(RowStatistic):
    """−Σ w·ln w."""

    fused_name = "entropy"

    def add(self, tile: Tile) -> None:
        self.total[:, :, tile.rows] -= _dot(tile.weights, tile.log_weights)

    def result(self) -> Tensor:
        # A weight may round to slightly more than 1, so that its term is slightly negative.
        return self.total.clamp_(min=0.0)


class Distance(RowStatistic):
    """Σ w·|i − j|, in positions."""

    fused_name = "distance"

    def spec(self) -> Spec | None:  # type: ignore[override]
        return super().spec() if self.problem.positions is None else None  # kernels only know columns

    def add(self, tile: Tile) -> None:
        problem, cols = tile.problem, tile.cols
        if isinstance(problem.offset, int) and problem.positions is None:
            top, bottom = tile.rows.start + problem.offset, tile.rows.stop - 1 + problem.offset
            if top >= cols.stop - 1 or bottom <= cols.start:
                # All keys are on one side of all queries, so |i − j| = |i − edge| + |edge − j|.
                edge = cols.stop - 1 if top >= cols.stop - 1 else cols.start
                i = torch.arange(top, bottom + 1, device=tile.lse.device)
                j = torch.arange(cols.start, cols.stop, device=tile.lse.device)
                inner = tile.weights @ (j - edge).abs().to(tile.lse.dtype)  # [b, h, r]
                self.total[:, :, tile.rows] += tile.row_sums * (i - edge).abs() + inner
                return
        self.total[:, :, tile.rows] += _dot(
            tile.weights, problem.distances(tile.rows, cols).to(tile.lse.dtype)
        )


class RowMax(RowStatistic):
    """The largest weight of each row."""

    fused_name = "max_score"

    def allocate(self) -> None:
        self.top = torch.full_like(self.lse, LEAST)  # the largest log-weight, [b, h, t]

    def add(self, tile: Tile) -> None:
        rows = self.top[:, :, tile.rows]
        torch.maximum(rows, tile.row_max, out=rows)

    def read(self, fused: FusedStatistics) -> None:
        self.top = _log_weights(fused["max_score"], self.lse)

    def result(self) -> Tensor:
        return self.top.exp_().clamp_(max=1.0)  # LEAST gives 0


class SinkWeight(Reduction):
    """The weight of the sink in each row, derived from the log-sum-exp alone."""

    per_query = True
    uses_tiles = False

    def result(self) -> Tensor:
        if self.problem.sink is None:
            return torch.zeros_like(self.lse)
        sink = self.problem.sink.to(self.lse.dtype)[:, None, None]  # [h, 1, 1]
        return scores.weights(sink, self.lse)[..., 0]  # [b, h, t]


class TopKeys(NamedTuple):
    """The largest weights of each query and their keys, both `[b, h, t, k]`."""

    weights: Tensor
    keys: Tensor  # int64; −1 where fewer than k keys are visible


class Top(Reduction):
    """The k largest weights of each row, the largest first; ties are in the order of the keys."""

    def __init__(self, k: int) -> None:
        self.k = whole(k, "k, the number of keys in top,", least=1)

    def begin(self, problem: Problem) -> None:
        shape, s = problem.shape, problem.shape.s
        size = shape.b * shape.h * shape.t * self.k * (problem.dtype.itemsize + 8)
        if self.k > s and size > MAX_BYTES:
            raise ValueError(
                f"top({self.k}) would take {amount(size)}, and there are only {s} keys. Use top({s})."
            )
        super().begin(problem)
        self.kept = min(self.k, max(s, 1))  # `pad` adds the others, so that they take no time in tiles

    def allocate(self) -> None:
        shape = *self.lse.shape, self.kept
        self.best = self.lse.new_full(shape, -math.inf)  # the k largest ln w so far
        self.keys = torch.full(shape, -1, device=self.lse.device)  # [b, h, t, k]

    def add(self, tile: Tile) -> None:
        best, keys = self.best[:, :, tile.rows], self.keys[:, :, tile.rows]  # views, [b, h, r, k]
        # Only rows with a weight above their k-th largest so far need sorting. Later tiles have few of them.
        # (`~(a <= b)`, unlike `a > b`, is also True for NaN, which has to be included.)
        rows = ~(tile.row_max <= best[..., -1])  # [b, h, r]
        logs = tile.log_weights[rows]  # [n, c]
        if not logs.numel():
            return
        if tile.visible is not None:
            logs = logs.masked_fill(~tile.visible.expand(tile.log_weights.shape)[rows], -math.inf)
        better = ~(logs <= best[rows][:, -1:])
        widest = int(better.sum(-1).max())
        # Both results are [n, …].
        values, columns = _left_align(logs, better, widest) if widest <= 16 else _largest(logs, self.kept)
        columns = torch.where(values == -math.inf, -1, columns + tile.cols.start)
        # Earlier keys are first, and a stable sort keeps ties in this order.
        merged = torch.cat((best[rows], values), -1).sort(dim=-1, descending=True, stable=True)
        best[rows] = merged.values[:, : self.kept]
        keys[rows] = torch.cat((keys[rows], columns), -1).gather(-1, merged.indices[:, : self.kept])

    def spec(self) -> Spec | None:
        return Spec(top=self.kept) if self.kept <= MAX_TOP else None

    def read(self, fused: FusedStatistics) -> None:
        self.keys = fused["top_keys"][..., : self.kept].contiguous()
        self.best = fused["top_scores"][..., : self.kept] - self.lse[..., None]
        self.best.masked_fill_(self.keys < 0, -math.inf)

    def result(self) -> TopKeys:
        return self.pad(self.best.exp_().clamp_(max=1.0), self.keys)

    def pad(self, weights: Tensor, keys: Tensor) -> TopKeys:
        """Return k weights and keys of each row, of those that there are."""
        missing = (0, self.k - self.kept)
        return TopKeys(F.pad(weights, missing), F.pad(keys, missing, value=-1))


def _left_align(x: Tensor, chosen: Tensor, widest: int) -> tuple[Tensor, Tensor]:
    """Move the chosen entries of each row of x `[n, c]` to the left; return them and their columns."""
    rows, columns = chosen.nonzero(as_tuple=True)
    target = rows, chosen.cumsum(-1)[rows, columns] - 1
    values = x.new_full((len(x), widest), -math.inf).index_put_(target, x[rows, columns])
    return values, columns.new_zeros(len(x), widest).index_put_(target, columns)


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row of x `[n, c]`, sorted, and their columns; ties in order."""
    k = min(k, x.shape[-1])
    largest = x.topk(k)
    # topk returns ties in any order, and any of the entries that are tied with the k-th.
    columns, order = largest.indices.sort(-1)
    values, order = largest.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    columns = columns.gather(-1, order)
    is_tied = (x == values[:, -1:]).sum(-1) > (values == values[:, -1:]).sum(-1)
    if bool(is_tied.any()):
        ordered = x[is_tied].sort(dim=-1, descending=True, stable=True)
        values[is_tied], columns[is_tied] = ordered.values[:, :k], ordered.indices[:, :k]
    return values, columns


# -- one number per key: [b, h, s] -------------------------------------------------------------------


class Received(Reduction):
    """Column sums over all queries, or over the last ones.

    With normalize="age" they are divided by the number of these queries to which the key is visible.
    """

    def __init__(self, last: int | None = None, normalize: str | None = None) -> None:
        self.last = None if last is None else whole(last, "last, the number of last queries to sum,", least=1)
        if normalize not in (None, "age"):
            raise ValueError(
                f'Expected normalize to be None or "age" (the mean over queries that may attend), got '
                f"{normalize!r}."
            )
        self.normalize = normalize

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        self.start = 0 if self.last is None else max(problem.shape.t - self.last, 0)

    def allocate(self) -> None:
        shape = self.problem.shape
        self.total, self.queries = self.lse.new_zeros(2, shape.b, shape.h, shape.s)

    def add(self, tile: Tile) -> None:
        weights, visible = tile.weights, tile.visible
        if tile.rows.start < self.start:
            weights = weights[..., self.start - tile.rows.start :, :]
            visible = None if visible is None else visible[..., self.start - tile.rows.start :, :]
        self.total[:, :, tile.cols] += weights.sum(-2)
        if self.normalize:
            self.queries[:, :, tile.cols] += weights.shape[-2] if visible is None else visible.sum(-2)

    def spec(self) -> Spec | None:
        if self.normalize:
            queries = _count_queries(self.problem, self.start)
            if queries is None:
                return None
            self.queries = queries
        return Spec(received=True)

    def read(self, fused: FusedStatistics) -> None:
        self.total = fused["received"]

    def result(self) -> Tensor:
        return self.total / self.queries.clamp(min=1).to(self.total) if self.normalize else self.total


def _count_queries(problem: Problem, start: int) -> Tensor | None:
    """Return the number of queries, from row `start` on, to which each key is visible: `[b or 1, 1, s]`.

    Return None for masks other than a band and lengths.
    """
    shape, normal = problem.shape, (Full() if problem.mask is None else problem.mask).normal()
    if normal.segments or normal.rest or (problem.bias is not None and problem.bias.can_mask):
        return None
    b, h, i, j = problem.at(slice(start, start + 1), slice(None))
    low, high = (far if side is None else side for side, far in zip(normal.band, (-FAR, FAR), strict=True))
    last = torch.minimum(i + shape.t - start - 1, j - low)  # [b or 1, 1, 1, s]
    counted = (last - torch.maximum(i, j - high) + 1).clamp(min=0)
    for lengths in normal.lengths:
        counted = counted * torch.as_tensor(lengths.keep(b, h, i, j))
    return counted[:, :, 0]


class ValueNorms(Received):
    """Column sums of w·‖v W_o‖: weights times the norms of projected values."""

    def __init__(self, v: Tensor, w_o: Tensor) -> None:
        super().__init__()
        for name, x in (("v", v), ("w_o", w_o)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise TypeError(f"Expected {name} to be a tensor of floats, got {kind(x)}.")
        self.v, self.w_o = v, w_o

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        (b, h, g, _, s, _, _), device, dtype = problem.shape, problem.q.device, problem.dtype
        v = self.v.detach().to(device, dtype)
        if v.dim() != 4 or v.shape[:3] != (b, g, s):
            raise ValueError(f"Expected v to be [b, g, s, w] = [{b}, {g}, {s}, w], got {sizes(v)}.")
        width = h * v.shape[3]
        if self.w_o.dim() != 2 or self.w_o.shape[1] != width:
            raise ValueError(
                f"Expected w_o to be [e, h·w] = [e, {width}], the weight of the nn.Linear after the heads, "
                f"got {sizes(self.w_o)}."
            )
        w_o = self.w_o.detach().to(device, dtype)
        w_o = w_o.reshape(w_o.shape[0], h, v.shape[3]).movedim(1, 0)  # [h, e, w]
        # ‖v W‖² = v (WᵀW) vᵀ would be faster if e > w, but would lose half of the digits.
        self.norms = v.new_empty(b, h, s)
        for head in range(h):
            for start in range(0, s, 4096):
                keys = slice(start, start + 4096)
                self.norms[:, head, keys] = (v[:, head * g // h, keys] @ w_o[head].mT).norm(dim=-1)

    def result(self) -> Tensor:
        return torch.where(self.total == 0, 0.0, self.total * self.norms)  # NaN values without weight add 0


# -- pooled maps, heads and pairs of heads ---------------------------------------------------------


class Pooled(Reduction):
    """The mean or the largest weight of each cell, `[b, h, rows, cols]`; masked weights are 0."""

    def __init__(self, rows: int, cols: int, reduce: str = "mean") -> None:
        self.cells = (
            whole(rows, "rows, the number of cells down,", least=1),
            whole(cols, "cols, the number of cells across,", least=1),
        )
        if reduce not in ("mean", "max"):
            raise ValueError(f'Expected reduce to be "mean" or "max", got {reduce!r}.')
        self.mean = reduce == "mean"
        self.how = "sum" if self.mean else "max"

    def begin(self, problem: Problem) -> None:
        t, s = problem.shape.t, problem.shape.s
        for count, size, name, letter in zip(self.cells, (t, s), ("rows", "cols"), "ts", strict=True):
            if count > size:
                raise ValueError(
                    f"Expected pooled to have at most {size} {name}, as {letter} = {size}, got {count}: "
                    "no cell may be empty."
                )
        self.down, self.across = edges(t, self.cells[0]), edges(s, self.cells[1])
        super().begin(problem)

    def allocate(self) -> None:
        self.cell = self.lse.new_zeros(*self.lse.shape[:2], *self.cells)

    def add(self, tile: Tile) -> None:
        down, across = Bins(self.down, tile.rows), Bins(self.across, tile.cols)
        part = self.cell[:, :, down.cells, across.cells]  # a view
        if self.mean:
            along = tile.row_sums[..., None] if across.single else across.sum(tile.weights)  # [b, h, r, C]
            part += down.sum(along.mT).mT
        else:
            along = tile.row_max.exp()[..., None] if across.single else across.max(tile.weights)
            torch.maximum(part, down.max(along.mT).mT, out=part)

    def spec(self) -> Spec:
        return Spec(cells=frozenset({(*self.cells, self.how)}))

    def read(self, fused: FusedStatistics) -> None:
        self.cell = fused[*self.cells, self.how]

    def result(self) -> Tensor:
        if self.mean:
            area = self.down.diff()[:, None] * self.across.diff()  # [rows, cols]
            self.cell = self.cell / area.to(self.cell)
        return self.cell.clamp_(max=1.0)  # a weight may round to slightly more than 1


def edges(size: int, count: int) -> Tensor:
    """Return the count + 1 edges of bins over `size` entries, ⌊n · size / count⌋ for n = 0 … count."""
    return torch.arange(count + 1) * size // count


class Bins:
    """The bins that overlap a slice of the entries, and sums and maxima of the slice in each of them."""

    def __init__(self, edges: Tensor, entries: slice) -> None:
        first = int(torch.searchsorted(edges, entries.start, right=True)) - 1
        last = int(torch.searchsorted(edges, entries.stop, right=False))
        self.cells = slice(first, last)
        inside = edges[first : last + 1].clamp(entries.start, entries.stop) - entries.start
        self.starts, self.widths = inside[:-1], inside.diff()
        self.single = last - first == 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums of the bins: `[…, n]` → `[…, bins]`."""
        if self.single:
            return x.sum(-1, keepdim=True)
        return torch.zeros(*x.shape[:-1], len(self.widths), dtype=x.dtype, device=x.device).index_add_(
            -1, torch.arange(len(self.widths)).repeat_interleave(self.widths).to(x.device), x
        )

    def max(self, x: Tensor) -> Tensor:
        """Return the maxima of the bins: `[…, n]` → `[…, bins]`."""
        if self.single:
            return x.amax(-1, keepdim=True)
        widest = int(self.widths.max())
        # The entries of each bin; the last entry is repeated in bins that are narrower than the widest.
        inside = torch.minimum(torch.arange(widest), self.widths[:, None] - 1)  # [bins, widest]
        return x[..., (self.starts[:, None] + inside).to(x.device)].amax(-1)


class LogitsMax(Reduction):
    """The largest score of each head, `[b, h]`; −inf where no key is visible."""

    def allocate(self) -> None:
        self.top = self.lse.new_full(self.lse.shape[:2], -math.inf)  # [b, h]

    def add(self, tile: Tile) -> None:
        torch.maximum(self.top, tile.scores.amax((-2, -1)), out=self.top)

    def spec(self) -> Spec:
        return Spec(rows=True)

    def read(self, fused: FusedStatistics) -> None:
        self.top = fused["max_score"].amax(-1)

    def result(self) -> Tensor:
        return self.top


class Divergence(Reduction):
    """The Jensen–Shannon divergence between each two heads, averaged over queries: `[b, h, h]`.

    For rows of weights p and q it is ½ Σ p·ln(p/m) + ½ Σ q·ln(q/m), m = ½ (p + q).
    """

    def allocate(self) -> None:
        shape = self.problem.shape
        self.total = torch.zeros(shape.b, shape.h, shape.h, dtype=torch.float64, device=self.lse.device)

    def add(self, tile: Tile) -> None:
        w = tile.weights
        for head in range(w.shape[1] - 1):
            terms = jensen_shannon(w[:, head : head + 1], w[:, head + 1 :])  # [b, h − head − 1, r, c]
            self.total[:, head, head + 1 :] += terms.sum((-2, -1))

    def result(self) -> Tensor:
        symmetric = (self.total + self.total.mT).clamp_(min=0.0)  # rounding may make it slightly negative
        return (symmetric / max(self.problem.shape.t, 1)).to(self.lse.dtype)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Return ½ p·ln(p/m) + ½ q·ln(q/m) with m = ½ (p + q) for each entry, in nats."""
    m = (p + q) / 2
    divisor = torch.where(m == 0, 1.0, m)
    return (torch.special.xlogy(p, p / divisor) + torch.special.xlogy(q, q / divisor)) / 2


def divergence_between(first: tuple[Problem, Tensor], second: tuple[Problem, Tensor]) -> Tensor:
    """Return the mean Jensen–Shannon divergence between the same heads of two problems, `[b, h]`.

    Each argument is a problem and its log-sum-exp; the problems have the same shape.
    """
    total, t = sum_divergences(first, second), first[0].shape.t
    return (total.clamp_(min=0.0) / max(t, 1)).to(first[1].dtype)


def sum_divergences(first: tuple[Problem, Tensor], second: tuple[Problem, Tensor]) -> Tensor:
    """Return the sum over queries of the divergences of `divergence_between`, float64 `[b, h]`."""
    problem, lse = first
    shape = problem.shape
    total = torch.zeros(shape.b, shape.h, dtype=torch.float64, device=lse.device)
    with torch.no_grad(), scores.disable_autocast(lse.device):
        for rows, columns in kernels.blocks(problem.under(None)):
            spans = [each.span(rows.start, rows.stop)[0] for each, _ in (first, second)]
            for cols in columns:
                if any(cols.start < right and left < cols.stop for left, right in spans):
                    p, q = (Tile(*pair, rows, cols).weights.to(lse) for pair in (first, second))
                    total += jensen_shannon(p, q).sum((-2, -1))
    return total


def mix_heads(problem: Problem, lse: Tensor, share: Tensor) -> Tensor:
    """Multiply share `[b, r, t]` by the mean of the heads' weights `[b, t, s]`, and return `[b, r, s]`."""
    product = share.new_zeros(*share.shape[:2], problem.shape.s)
    with torch.no_grad(), scores.disable_autocast(lse.device):
        for tile in tiles(problem, lse):
            rows = share[:, :, tile.rows]  # `mix` ignores weights of NaN if the share is 0
            product[:, :, tile.cols] += scores.mix(rows, rows != 0, tile.weights.mean(1).to(share))
    return product


# -- the weight inside a mask ----------------------------------------------------------------------


def masses(problem: Problem, lse: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return each row's sum of weights inside a mask, and whether it has visible keys there: `[b, h, t]`."""
    if mask is None:
        raise TypeError("Expected a mask for mass, got None. Use Full() for the sum of all weights.")
    both = replace(problem.within(mask), sink=None)
    # Rounding errors of scores and log-sum-exp cancel only if the same kernel computes both.
    if kernels.fuses(problem) and kernels.fuses(both, in_place=True) and bool(lse.amax() < math.inf):
        return _row_sums(both, lse)
    by_token = _masses_by_token(problem, both, lse)
    if by_token is not None:
        return by_token
    inside = problem.under(mask)
    total = torch.zeros_like(lse)  # [b, h, t]
    has_keys = torch.zeros_like(lse, dtype=torch.bool)
    with torch.no_grad(), scores.disable_autocast(lse.device):
        for tile in tiles(problem, lse):
            left, right = inside.span(tile.rows.start, tile.rows.stop)[0]
            if tile.cols.start < right and left < tile.cols.stop:
                kept = scores.visible(inside, tile.rows, tile.cols)  # [b or 1, h or 1, r, c]
                total[:, :, tile.rows] += torch.where(kept, tile.weights, 0.0).sum(-1)
                has_keys[:, :, tile.rows] |= (kept if tile.visible is None else kept & tile.visible).any(-1)
    return total, has_keys


def _row_sums(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's sum of weights, and whether it has a visible key, from fused statistics."""
    fused = kernels.statistics(problem, Spec(rows=True), lse).fused
    return fused["row_sum"].clamp_(max=1.0), fused["max_score"] != -math.inf


def _masses_by_token(problem: Problem, both: Problem, lse: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return `masses` for the masks of duplicate-token and induction heads by a faster method, else None.

    The masks are SameToken without the diagonal, and AfterSameToken. After a stable sort by token id, the
    positions of each token are adjacent and in order, so they can be treated as a document. A kernel skips
    all pairs in different documents: for 32,768 tokens of English it computes about one score in a hundred.
    """
    assert both.mask is not None
    shape, normal = problem.shape, both.mask.normal()
    token_masks = [part for part in normal.rest if isinstance(part, SameToken | AfterSameToken)]
    others = [part for part in normal.rest if part not in token_masks]
    is_plain = normal.band in ((None, None), (None, 0)) and not normal.segments and not normal.lengths
    is_square = shape.t == shape.s and isinstance(problem.offset, int) and problem.offset == 0
    if len(token_masks) != 1 or not is_plain or not is_square or problem.bias is not None or shape.t < 2:
        return None
    (token,) = token_masks
    after = isinstance(token, AfterSameToken)  # its keys are one position later
    without_own_key = [
        isinstance(part, Not) and isinstance(part.mask, Diagonal) and part.mask.k == 0 for part in others
    ]
    if token.ids.shape not in ((shape.s,), (shape.b, shape.s)) or token.queries is not None:
        return None
    if not all(without_own_key) or after == bool(others):
        return None
    if not kernels.fuses(problem):
        return None
    ids, q, k, rows = token.ids, problem.q, problem.k, lse
    if ids.dim() == 2:  # the sequences become one, in which equal tokens of two sequences are different
        ids = ids - ids.min()
        ids = (ids + torch.arange(shape.b, device=ids.device)[:, None] * (ids.max() + 1)).flatten()  # [b·t]
        q, k, rows = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, rows))  # [1, h or g, b·t, …]
    order = ids.argsort(stable=True)  # [t or b·t]
    total, has_keys = (
        torch.zeros_like(rows),
        torch.zeros_like(rows, dtype=torch.bool),
    )  # as lse or [1, h, b·t]
    # A query attends to the positions before its own in sorted order; in reversed order these are later keys.
    for direction in [order] if after or normal.band[1] == 0 else [order, order.flip(0)]:
        queries, keys = direction[1:], direction[:-1]
        documents = Documents(ids[keys], queries=ids[queries])
        inner = k[:, :, (keys + 1).clamp(max=len(ids) - 1) if after else keys]  # [b or 1, g, … - 1, d]
        by_token = Problem.of(
            q[:, :, queries], inner, inner, mask=Causal() & documents, scale=problem.scale,
            softcap=problem.softcap, offset=0,
        )  # fmt: skip
        if not kernels.fuses(by_token) or bool(lse.amax() == math.inf):
            return None
        sums, visible = _row_sums(by_token, rows[:, :, queries])
        total[:, :, queries] += sums
        has_keys[:, :, queries] |= visible
    if token.ids.dim() == 2:
        total, has_keys = (x[0].unflatten(1, (shape.b, shape.t)).transpose(0, 1) for x in (total, has_keys))
    return total.clamp_(max=1.0), has_keys


def mass(problem: Problem, lse: Tensor, mask: Mask, mean: bool) -> Tensor:
    """Return the weight inside a mask, `[b, h, t]`, or its mean over rows with keys there, `[b, h]`."""
    if not isinstance(mean, bool):
        raise TypeError(f"Expected mean to be True or False, got {mean!r}.")
    total, has_keys = masses(problem, lse, mask)
    if not mean:
        return total
    return torch.where(has_keys, total, 0.0).sum(-1) / has_keys.sum(-1).clamp(min=1)


def first_keys(problem: Problem) -> Tensor:
    """Return each query's first visible key, `[b, h, t]`; s if there is none. No score is computed."""
    shape = problem.shape
    first = torch.full((shape.b, shape.h, shape.t), shape.s, device=problem.q.device)
    for rows, columns in kernels.blocks(problem):
        in_rows = first[:, :, rows]  # a view
        for cols in columns:
            visible = scores.visible(problem, rows, cols)  # [b or 1, h or 1, r, c]
            in_tile = torch.where(visible.any(-1), cols.start + visible.to(torch.uint8).argmax(-1), shape.s)
            torch.minimum(in_rows, in_tile, out=in_rows)
            if bool((in_rows < shape.s).all()):
                break
    return first


# -- statistics by name ----------------------------------------------------------------------------


class Mass(Reduction):
    """The function `mass` as a reduction, which computes its own tiles."""

    uses_tiles = False

    def __init__(self, mask: Mask, mean: bool = False) -> None:
        self.mask, self.mean = mask, mean

    def result(self) -> Tensor:
        return mass(self.problem, self.lse, self.mask, self.mean)


BY_NAME: dict[str, type[Reduction]] = {
    "entropy": Entropy,
    "distance": Distance,
    "row_max": RowMax,
    "received": Received,
    "top": Top,
    "mass": Mass,
    "pooled": Pooled,
    "value_norms": ValueNorms,
    "logits_max": LogitsMax,
    "sink_weight": SinkWeight,
    "divergence": Divergence,
}
SIGNATURES = {name: signature(reduction) for name, reduction in BY_NAME.items()}  # slow to compute


def make_reductions(requested: Mapping[str, Any]) -> dict[str, list[Reduction]]:
    """Create the reductions for statistics that are requested by name.

    Args:
        requested: The arguments of each statistic by its name, as for `arguments`, or a list of them to
            compute the statistic several times.

    Returns:
        The reductions of each name.

    Raises:
        TypeError: If arguments don't match the statistic.
        ValueError: If a name is unknown.
    """
    for name in requested:
        if name not in BY_NAME:
            raise ValueError(f"Expected statistics among {', '.join(BY_NAME)}, got {name!r}.")
    return {
        name: [
            BY_NAME[name](**arguments(name, each)) for each in (given if isinstance(given, list) else [given])
        ]
        for name, given in requested.items()
    }


def arguments(name: str, given: Any) -> dict[str, Any]:
    """Return the arguments of a statistic by name.

    Args:
        name: The name of the statistic.
        given: One argument, a tuple of arguments, or a dict of keyword arguments.

    Returns:
        The arguments, with defaults.

    Raises:
        TypeError: If they don't match the statistic's signature.
    """
    parameters = SIGNATURES[name]
    keyword = given if isinstance(given, dict) else {}
    positional = () if isinstance(given, dict) else given if isinstance(given, tuple) else (given,)
    try:
        bound = parameters.bind(*positional, **keyword)
    except TypeError as error:
        takes = ", ".join(parameters.parameters) or "no arguments"
        raise TypeError(f"Expected arguments of {name} to be {takes}: {error}. Pass these.") from None
    bound.apply_defaults()
    return bound.arguments


def _log_weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return score − lse, but at least `LEAST`."""
    return (scores - torch.where(lse == -math.inf, 0.0, lse)).clamp_(min=LEAST)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ x·y along the last dimension."""
    return (x * y).sum(-1)
