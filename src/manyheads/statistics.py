"""Statistics of the weights of all heads, computed in one pass over the scores in O(L) memory.

    entropy, top = amap.reduce([Entropy(), Top(8)])

Each statistic is a `Reduction`. Most are made of fused statistics, which a kernel computes of the weights in
the pass that computes them (`Reduction.spec`, `Reduction.read`); the others, or all where no kernel can, are
summed tile by tile (`Reduction.add`). A `Tile` computes once what several of them need. The methods of
`maps.AttentionMap` say what each statistic means, and where it is from. Nothing is renormalized: under a sink
a row's weights sum to less than one.

To add a statistic, write a `Reduction`, name it in `BY_NAME`, and give `AttentionMap` a method of that name;
then add an oracle to `EXACT` and a question to `tests/unit/test_statistics.py`, and name it in README and
CHANGELOG. `attention_with_map(statistics=...)`, `observe(keep=...)` and files need no change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from manyheads import kernels, scores
from manyheads.kernels.fused import MAX_TOP, Found, Spec
from manyheads.masks import FAR, AfterSameToken, Causal, Diagonal, Documents, Full, Mask, Not, SameToken
from manyheads.problem import Problem
from manyheads.shapes import amount, kind, sizes, whole

MAX_BYTES = 2**33  # of `Top`, for more places than there are keys
LEAST = -1e30  # in place of −inf, so that its product with a weight of 0 is 0 and not NaN


class Tile:
    """The scores of a tile and what follows from them: log-weights, weights, sums, each computed once."""

    def __init__(self, problem: Problem, lse: Tensor, rows: slice, cols: slice) -> None:
        self.problem, self.lse = problem, lse  # [b, h, t]
        self.rows, self.cols = rows, cols

    @cached_property
    def visible(self) -> Tensor | None:
        """Where the query may attend to the key, `[b or 1, h or 1, r, c]`; None: everywhere."""
        if scores.is_fully_visible(self.problem, self.rows, self.cols):
            return None
        return scores.visible(self.problem, self.rows, self.cols)

    @cached_property
    def scores(self) -> Tensor:
        """`[b, h, r, c]`; −inf where masked."""
        return kernels.tile(self.problem, self.rows, self.cols)

    @cached_property
    def log_weights(self) -> Tensor:
        """The score − lse, `[b, h, r, c]`, but at least `LEAST`."""
        return _log_weights(self.scores, self.lse[:, :, self.rows, None])

    @cached_property
    def weights(self) -> Tensor:
        """`[b, h, r, c]`; 0 where masked, in a row of NaN too."""
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
    """Yield the tiles that aren't empty under the mask, from the one that has row `start`, row by row."""
    for rows, columns in kernels.blocks(problem, start):
        for cols in columns:
            yield Tile(problem, lse, rows, cols)


class Reduction:
    """One statistic: `begin`, then `read` or else `allocate` and `add` of every tile, then `result`."""

    start = 0  # the first row that counts
    per_query: ClassVar[bool] = False  # True if the result is [b, h, t]
    problem: Problem
    lse: Tensor  # [b, h, t]; known after `begin`

    def key(self) -> tuple[Any, ...]:
        """Return the class and the arguments, which identify a statistic before it begins."""
        return type(self), *vars(self).items()

    def begin(self, problem: Problem) -> None:
        """Check the arguments against the problem."""
        self.problem = problem

    def spec(self) -> Spec | None:
        """Return the fused statistics that this is made of; None if it needs tiles."""
        return None

    def read(self, found: Found) -> None:
        """Take the fused statistics in place of all tiles; they are shared, so never changed in place."""
        raise NotImplementedError

    def allocate(self) -> None:
        """Allocate the sums that tiles are added to."""

    def add(self, tile: Tile) -> None:
        """Add a tile."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the statistic."""
        raise NotImplementedError


class Pass:
    """Reductions of one problem in one pass, and the fused statistics that they need.

    Fused statistics of the lowest first row (`spec`) can be computed together with the output or the
    log-sum-exp, which costs less than after it.
    """

    def __init__(self, problem: Problem, reductions: Sequence[Reduction]) -> None:
        self.problem, self.reductions = problem, reductions
        self.fused: dict[int, Spec] = {}  # by the first row that counts
        self.fused_reductions: list[Reduction] = []
        with torch.no_grad(), scores.exactly(problem.q.device):
            for reduction in reductions:
                reduction.begin(problem)
        for reduction in reductions if kernels.fuses(problem) else ():
            spec = reduction.spec() if reduction.start < problem.shape.t else None
            if spec is not None:
                first = self.fused.get(reduction.start, Spec(first=reduction.start))
                self.fused[reduction.start] = first | spec
                self.fused_reductions.append(reduction)

    @property
    def spec(self) -> Spec | None:
        """The fused statistics to compute together with the log-sum-exp; None if there are none."""
        return self.fused[min(self.fused)] if self.fused else None

    def results(self, lse: Tensor, found: Found) -> list[Any]:
        """Return the statistics; lse `[b, h, t]`; found: the fused statistics of `spec`, empty if unknown."""
        with torch.no_grad(), scores.exactly(lse.device):
            # Fused statistics need finite rows; tiles take care of infinity and NaN.
            fused = self.fused_reductions if self.fused and bool(lse.amax() < math.inf) else []
            known = {self.spec.first: found} if self.spec is not None and found else {}
            for start, spec in self.fused.items() if fused else ():
                if start not in known:
                    known[start] = kernels.statistics(self.problem, spec, lse).found
            for reduction in self.reductions:
                reduction.lse = lse
                if reduction in fused:
                    reduction.read(known[reduction.start])
                else:
                    reduction.allocate()
            tiled = [reduction for reduction in self.reductions if reduction not in fused]
            start = min([self.problem.shape.t, *(reduction.start for reduction in tiled)])
            for tile in tiles(self.problem, lse, start):
                for reduction in tiled:
                    if reduction.start < tile.rows.stop:
                        reduction.add(tile)
            return [reduction.result() for reduction in self.reductions]


# -- a number per query: [b, h, t] -----------------------------------------------------------------


class Entropy(Reduction):
    """−Σ w·ln w."""

    per_query = True

    def allocate(self) -> None:
        self.total = torch.zeros_like(self.lse)  # [b, h, t]

    def add(self, tile: Tile) -> None:
        self.total[:, :, tile.rows] -= _dot(tile.weights, tile.log_weights)

    def spec(self) -> Spec:
        return Spec(rows=True)

    def read(self, found: Found) -> None:
        self.total = found["entropy"]

    def result(self) -> Tensor:
        # A weight may round to a little more than 1, and its part to a little less than 0.
        return self.total.clamp_(min=0.0)


class Distance(Reduction):
    """Σ w·|i − j|, in positions."""

    per_query = True

    def allocate(self) -> None:
        self.total = torch.zeros_like(self.lse)  # [b, h, t]

    def add(self, tile: Tile) -> None:
        problem, cols = tile.problem, tile.cols
        if isinstance(problem.offset, int):
            top, bottom = tile.rows.start + problem.offset, tile.rows.stop - 1 + problem.offset
            if top >= cols.stop - 1 or bottom <= cols.start:  # all keys on one side: |i − j| splits in two
                edge = cols.stop - 1 if top >= cols.stop - 1 else cols.start
                i = torch.arange(top, bottom + 1, device=tile.lse.device)
                j = torch.arange(cols.start, cols.stop, device=tile.lse.device)
                inner = tile.weights @ (j - edge).abs().to(tile.lse.dtype)  # [b, h, r]
                self.total[:, :, tile.rows] += tile.row_sums * (i - edge).abs() + inner
                return
        _, _, i, j = problem.at(tile.rows, cols)
        self.total[:, :, tile.rows] += _dot(tile.weights, (i - j).abs().to(tile.lse.dtype))

    def spec(self) -> Spec:
        return Spec(rows=True)

    def read(self, found: Found) -> None:
        self.total = found["distance"]

    def result(self) -> Tensor:
        return self.total


class RowMax(Reduction):
    """The largest weight of each row."""

    per_query = True

    def allocate(self) -> None:
        self.top = torch.full_like(self.lse, LEAST)  # [b, h, t]

    def add(self, tile: Tile) -> None:
        rows = self.top[:, :, tile.rows]
        torch.maximum(rows, tile.row_max, out=rows)

    def spec(self) -> Spec:
        return Spec(rows=True)

    def read(self, found: Found) -> None:
        self.top = _log_weights(found["max_score"], self.lse)

    def result(self) -> Tensor:
        return self.top.exp_().clamp_(max=1.0)  # LEAST gives 0


class SinkWeight(Reduction):
    """The weight of the sink in each row, which needs no tile."""

    per_query = True

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        self.start = problem.shape.t

    def result(self) -> Tensor:
        if self.problem.sink is None:
            return torch.zeros_like(self.lse)
        sink = self.problem.sink.to(self.lse.dtype)[None, :, None, None].expand(
            *self.lse.shape, 1
        )  # [b, h, t, 1]
        return scores.weights(sink, self.lse)[..., 0]


class TopKeys(NamedTuple):
    """The largest weights of each query and their keys, both `[b, h, t, k]`."""

    weights: Tensor
    keys: Tensor  # int64; −1 where fewer than k keys are visible


class Top(Reduction):
    """The k largest weights of each row, the largest first; among equals the first keys."""

    def __init__(self, k: int) -> None:
        self.k = whole(k, "k, the number of keys in top,", least=1)

    def begin(self, problem: Problem) -> None:
        n, s = problem.shape, problem.shape.s
        size = n.b * n.h * n.t * self.k * (problem.dtype.itemsize + 8)
        if self.k > s and size > MAX_BYTES:
            raise ValueError(
                f"top({self.k}) would take {amount(size)}, and there are {s} keys in all. Use top({s})."
            )
        super().begin(problem)

    def allocate(self) -> None:
        shape = *self.lse.shape, self.k
        self.best = self.lse.new_full(shape, -math.inf)  # ln w, below that of any key
        self.keys = torch.full(shape, -1, device=self.lse.device)  # [b, h, t, k]

    def add(self, tile: Tile) -> None:
        best, keys = self.best[:, :, tile.rows], self.keys[:, :, tile.rows]  # views, [b, h, r, k]
        # The further along a row, the rarer a tile has anything better than the k-th so far.
        # (Not `tops > last`: NaN must enter.)
        rows = ~(tile.row_max <= best[..., -1])  # [b, h, r]
        logs = tile.log_weights[rows]  # [n, c]
        if not logs.numel():
            return
        if tile.visible is not None:
            logs = logs.masked_fill(~tile.visible.expand(tile.log_weights.shape)[rows], -math.inf)
        better = ~(logs <= best[rows][:, -1:])
        widest = int(better.sum(-1).max())
        found, where = _packed(logs, better, widest) if widest <= 16 else _largest(logs, self.k)  # [n, …]
        where = torch.where(found == -math.inf, -1, where + tile.cols.start)
        # Earlier keys are first, and a stable sort keeps them first among equals.
        merged = torch.cat((best[rows], found), -1).sort(dim=-1, descending=True, stable=True)
        chosen = merged.indices[:, : self.k]
        best[rows] = merged.values[:, : self.k]
        keys[rows] = torch.cat((keys[rows], where), -1).gather(-1, chosen)

    def spec(self) -> Spec | None:
        return Spec(top=self.k) if self.k <= MAX_TOP else None

    def read(self, found: Found) -> None:
        self.keys = found["top_keys"][..., : self.k].contiguous()
        self.best = found["top_scores"][..., : self.k] - self.lse[..., None]
        self.best.masked_fill_(self.keys < 0, -math.inf)

    def result(self) -> TopKeys:
        return TopKeys(self.best.exp_().clamp_(max=1.0), self.keys)


def _packed(x: Tensor, chosen: Tensor, widest: int) -> tuple[Tensor, Tensor]:
    """Return the chosen entries of each row `[n, c]`, moved to its front, and their places: `[n, widest]`."""
    rows, where = chosen.nonzero(as_tuple=True)
    place = chosen.cumsum(-1)[rows, where] - 1
    values = x.new_full((len(x), widest), -math.inf).index_put_((rows, place), x[rows, where])
    return values, where.new_zeros(len(x), widest).index_put_((rows, place), where)


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row `[n, c]` in order, and where; among equals the first ones."""
    k = min(k, x.shape[-1])
    found = x.topk(k)
    # topk takes any of those equal to the k-th, and gives equals in any order.
    where, order = found.indices.sort(-1)
    values, again = found.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    where = where.gather(-1, again)
    tied = (x == values[:, -1:]).sum(-1) > (values == values[:, -1:]).sum(-1)
    if bool(tied.any()):
        sort = x[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], where[tied] = sort.values[:, :k], sort.indices[:, :k]
    return values, where


# -- a number per key: [b, h, s] -------------------------------------------------------------------


class Received(Reduction):
    """Column sums over all queries or the last ones; with "age" divided by the queries that see the key."""

    def __init__(self, last: int | None = None, normalize: str | None = None) -> None:
        self.last = None if last is None else whole(last, "last, the number of queries that count,", least=1)
        if normalize not in (None, "age"):
            raise ValueError(
                'Expected normalize to be None or "age" (the mean over queries that see the key), '
                f"got {normalize!r}."
            )
        self.normalize = normalize

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        self.start = 0 if self.last is None else max(problem.shape.t - self.last, 0)

    def allocate(self) -> None:
        n = self.problem.shape
        self.total, self.queries = self.lse.new_zeros(2, n.b, n.h, n.s)

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

    def read(self, found: Found) -> None:
        self.total = found["received"]

    def result(self) -> Tensor:
        return self.total / self.queries.clamp(min=1).to(self.total) if self.normalize else self.total


def _count_queries(problem: Problem, start: int) -> Tensor | None:
    """Return how many queries from row `start` on may attend to each key, `[b or 1, 1, s]`.

    None if that takes every pair.
    """
    n, ends = problem.shape, (Full() if problem.mask is None else problem.mask).normal()
    if ends.segments or ends.rest or (problem.bias is not None and problem.bias.can_mask):
        return None
    b, h, i, j = problem.at(slice(start, start + 1), slice(None))
    low, high = (far if end is None else end for end, far in zip(ends.band, (-FAR, FAR), strict=True))
    last = torch.minimum(i + n.t - start - 1, j - low)  # [b or 1, 1, 1, s]
    counted = (last - torch.maximum(i, j - high) + 1).clamp(min=0)
    for lengths in ends.lengths:
        counted = counted * torch.as_tensor(lengths.keep(b, h, i, j))
    return counted[:, :, 0]


class ValueNorms(Received):
    """Column sums of w·‖v W_o‖."""

    def __init__(self, v: Tensor, w_o: Tensor) -> None:
        super().__init__()
        for name, x in (("v", v), ("w_o", w_o)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise TypeError(f"Expected {name} to be a tensor of floats, got {kind(x)}.")
        self.v, self.w_o = v, w_o

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        n, device, dtype = problem.shape, problem.q.device, problem.dtype
        v = self.v.detach().to(device, dtype)
        if v.dim() != 4 or v.shape[:3] != (n.b, n.g, n.s):
            raise ValueError(
                f"Expected v to be [b, g, s, w] with [{n.b}, {n.g}, {n.s}] here, got {sizes(v)}."
            )
        width = n.h * v.shape[3]
        if self.w_o.dim() != 2 or self.w_o.shape[1] != width:
            raise ValueError(
                f"Expected w_o to be [e, h·w] = [e, {width}], the weight of the nn.Linear after the heads, "
                f"got {sizes(self.w_o)}."
            )
        w_o = self.w_o.detach().to(device, dtype)
        w_o = w_o.reshape(w_o.shape[0], n.h, v.shape[3]).movedim(1, 0)  # [h, e, w]
        # ‖v W‖² = v (WᵀW) vᵀ would be cheaper where e > w, and lose half the digits.
        self.norms = v.new_empty(n.b, n.h, n.s)
        for head in range(n.h):
            for start in range(0, n.s, 4096):
                keys = slice(start, start + 4096)
                self.norms[:, head, keys] = (v[:, head * n.g // n.h, keys] @ w_o[head].mT).norm(dim=-1)

    def result(self) -> Tensor:
        return torch.where(self.total == 0, 0.0, self.total * self.norms)  # a masked NaN adds nothing


# -- pictures and pairs ----------------------------------------------------------------------------


class Pooled(Reduction):
    """The mean or the largest weight of each cell, `[b, h, rows, cols]`; what is masked counts as 0."""

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
        n = problem.shape
        for count, size, name, letter in zip(self.cells, (n.t, n.s), ("rows", "cols"), "ts", strict=True):
            if count > size:
                raise ValueError(
                    f"Expected at most {size} {name} of cells for pooled, {letter} = {size}, got {count}: "
                    "no cell may be empty."
                )
        self.down, self.across = (
            edges(size, count) for size, count in zip((n.t, n.s), self.cells, strict=True)
        )
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

    def read(self, found: Found) -> None:
        self.cell = found[*self.cells, self.how]

    def result(self) -> Tensor:
        if self.mean:
            area = self.down.diff()[:, None] * self.across.diff()  # [rows, cols]
            self.cell = self.cell / area.to(self.cell)
        return self.cell.clamp_(max=1.0)  # a weight may round to a little more


def edges(size: int, count: int) -> Tensor:
    """Where `count` bins of `size` entries begin, and where the last one ends: ⌊r · size / count⌋."""
    return torch.arange(count + 1) * size // count


class Bins:
    """The bins that a run of entries falls into, and sums and maxima over each of them."""

    def __init__(self, edges: Tensor, run: slice) -> None:
        first = int(torch.searchsorted(edges, run.start, right=True)) - 1
        last = int(torch.searchsorted(edges, run.stop, right=False))
        self.cells = slice(first, last)
        self.starts = (edges[first:last] - run.start).clamp(min=0)
        self.widths = (edges[first + 1 : last + 1] - run.start).clamp(max=run.stop - run.start) - self.starts
        self.single = last - first == 1

    def sum(self, x: Tensor) -> Tensor:
        """`[…, n]` → `[…, bins]`."""
        if self.single:
            return x.sum(-1, keepdim=True)
        return torch.zeros(*x.shape[:-1], len(self.widths), dtype=x.dtype, device=x.device).index_add_(
            -1, torch.arange(len(self.widths)).repeat_interleave(self.widths).to(x.device), x
        )

    def max(self, x: Tensor) -> Tensor:
        """`[…, n]` → `[…, bins]`."""
        if self.single:
            return x.amax(-1, keepdim=True)
        widest = int(self.widths.max())
        # Each bin's entries, the last one repeated where a bin has fewer than the widest.
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

    def read(self, found: Found) -> None:
        self.top = found["max_score"].amax(-1)

    def result(self) -> Tensor:
        return self.top


class Divergence(Reduction):
    """½ Σ p·ln(p/m) + ½ Σ q·ln(q/m), m = ½ (p + q), averaged over queries, between heads: `[b, h, h]`."""

    def allocate(self) -> None:
        n = self.problem.shape
        self.total = torch.zeros(n.b, n.h, n.h, dtype=torch.float64, device=self.lse.device)

    def add(self, tile: Tile) -> None:
        w = tile.weights
        for head in range(w.shape[1] - 1):
            apart = jensen_shannon(w[:, head : head + 1], w[:, head + 1 :])  # [b, h − head − 1, r, c]
            self.total[:, head, head + 1 :] += apart.sum((-2, -1))

    def result(self) -> Tensor:
        both = (self.total + self.total.mT).clamp_(min=0.0)  # of rows nearly alike, rounding may leave less
        return (both / max(self.problem.shape.t, 1)).to(self.lse.dtype)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """½ p·ln(p/m) + ½ q·ln(q/m) with m = ½ (p + q), entry by entry, in nats."""
    m = (p + q) / 2
    ground = torch.where(m == 0, 1.0, m)
    return (torch.special.xlogy(p, p / ground) + torch.special.xlogy(q, q / ground)) / 2


def between(one: tuple[Problem, Tensor], other: tuple[Problem, Tensor]) -> Tensor:
    """Return the mean Jensen–Shannon divergence head by head, `[b, h]`, of two problems of one shape."""
    n, lse = one[0].shape, one[1]
    total = torch.zeros(n.b, n.h, dtype=torch.float64, device=lse.device)
    with torch.no_grad(), scores.exactly(lse.device):
        for rows, columns in kernels.blocks(one[0].under(None)):
            spans = [problem.span(rows.start, rows.stop)[0] for problem, _ in (one, other)]
            for cols in columns:
                if any(cols.start < right and left < cols.stop for left, right in spans):
                    p, q = (Tile(*side, rows, cols).weights.to(lse) for side in (one, other))
                    total += jensen_shannon(p, q).sum((-2, -1))
    return (total.clamp_(min=0.0) / max(n.t, 1)).to(lse.dtype)


def mixed(problem: Problem, lse: Tensor, share: Tensor) -> Tensor:
    """Return share `[b, r, t]` · W `[b, t, s]`, the weights averaged over heads: `[b, r, s]`."""
    made = share.new_zeros(*share.shape[:2], problem.shape.s)
    with torch.no_grad(), scores.exactly(lse.device):
        for tile in tiles(problem, lse):
            part = share[:, :, tile.rows]  # a row without a share adds nothing, not even NaN
            made[:, :, tile.cols] += scores.mix(part, part != 0, tile.weights.mean(1).to(share))
    return made


# -- the weight inside a mask ----------------------------------------------------------------------


def masses(problem: Problem, lse: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the weight of each row inside a mask, and where there are keys in it, both `[b, h, t]`."""
    if mask is None:
        raise TypeError("Expected a mask for mass, got None. Use Full() for the whole weight of a row.")
    both = replace(problem.within(mask), sink=None)
    # The log-sum-exp is the one of the problem itself, so the same kernel must read both.
    fused = kernels.fuses(problem) and kernels.fuses(both, in_place=True)
    if fused and bool(lse.amax() < math.inf):
        return _row_sums(both, lse)
    by_token = _masses_by_token(problem, both, lse)
    if by_token is not None:
        return by_token
    inside = problem.under(mask)
    total = torch.zeros_like(lse)  # [b, h, t]
    has_keys = torch.zeros_like(lse, dtype=torch.bool)
    with torch.no_grad(), scores.exactly(lse.device):
        for tile in tiles(problem, lse):
            left, right = inside.span(tile.rows.start, tile.rows.stop)[0]
            if tile.cols.start < right and left < tile.cols.stop:
                kept = scores.visible(inside, tile.rows, tile.cols)  # [b or 1, h or 1, r, c]
                total[:, :, tile.rows] += torch.where(kept, tile.weights, 0.0).sum(-1)
                has_keys[:, :, tile.rows] |= (kept if tile.visible is None else kept & tile.visible).any(-1)
    return total, has_keys


def _row_sums(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of each row's weights, and where a row has visible keys, by fused statistics."""
    found = kernels.statistics(problem, Spec(rows=True), lse).found
    return found["row_sum"].clamp_(max=1.0), found["max_score"] != -math.inf


def _masses_by_token(problem: Problem, both: Problem, lse: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return `masses` of the other positions of the query's token, or of those after them; else None.

    Sorted by token, the positions of a token are a document, in the order of the text. A kernel that reads
    documents in place skips all other pairs: at 32,768 tokens of English about a hundredth is computed.
    """
    assert both.mask is not None
    n, normal = problem.shape, both.mask.normal()
    ids = [part for part in normal.rest if isinstance(part, SameToken | AfterSameToken)]
    others = [part for part in normal.rest if part not in ids]
    plain = normal.band in ((None, None), (None, 0)) and not normal.segments and not normal.lengths
    square = n.t == n.s and isinstance(problem.offset, int) and problem.offset == 0
    if len(ids) != 1 or not plain or not square or problem.bias is not None or n.t < 2:
        return None
    if not kernels.fuses(problem):
        return None
    (token,) = ids
    after = isinstance(token, AfterSameToken)  # the keys one behind, all of them earlier than the query's
    itself = [
        part
        for part in others
        if isinstance(part, Not) and isinstance(part.mask, Diagonal) and part.mask.k == 0
    ]
    if token.ids.shape != (n.s,) or token.queries is not None or others != itself or after == bool(itself):
        return None
    order = token.ids.argsort(stable=True)  # [t]
    total, has_keys = torch.zeros_like(lse), torch.zeros_like(lse, dtype=torch.bool)  # [b, h, t]
    for way in (
        [order] if after or normal.band[1] == 0 else [order, order.flip(0)]
    ):  # earlier keys, later keys
        queries, keys = way[1:], way[:-1]  # the last key of a query's row is the position before its own
        documents = Documents(token.ids[keys], queries=token.ids[queries])
        k = problem.k[:, :, (keys + 1).clamp(max=n.s - 1) if after else keys]  # [b, g, t - 1, d]
        sorted_ = Problem.of(
            problem.q[:, :, queries], k, k, mask=Causal() & documents, scale=problem.scale,
            softcap=problem.softcap, offset=0,
        )  # fmt: skip
        if not kernels.fuses(sorted_) or bool(lse.amax() == math.inf):
            return None
        sums, visible = _row_sums(sorted_, lse[:, :, queries])
        total[:, :, queries] += sums
        has_keys[:, :, queries] |= visible
    return total.clamp_(max=1.0), has_keys


def mass(problem: Problem, lse: Tensor, mask: Mask, mean: bool) -> Tensor:
    """Return the weight inside a mask by row `[b, h, t]`, or the mean of rows with keys there `[b, h]`."""
    if not isinstance(mean, bool):
        raise TypeError(f"Expected mean to be True or False, got {mean!r}.")
    total, has_keys = masses(problem, lse, mask)
    if not mean:
        return total
    return torch.where(has_keys, total, 0.0).sum(-1) / has_keys.sum(-1).clamp(min=1)


def first_keys(problem: Problem) -> Tensor:
    """Return the first visible key of each query, `[b, h, t]`; s if there is none. Computes no score."""
    n = problem.shape
    first = torch.full((n.b, n.h, n.t), n.s, device=problem.q.device)
    for rows, columns in kernels.blocks(problem):
        found = first[:, :, rows]  # a view
        for cols in columns:
            visible = scores.visible(problem, rows, cols)  # [b or 1, h or 1, r, c]
            in_tile = torch.where(visible.any(-1), cols.start + visible.to(torch.uint8).argmax(-1), n.s)
            torch.minimum(found, in_tile, out=found)
            if bool((found < n.s).all()):
                break
    return first


# -- by name ---------------------------------------------------------------------------------------


class Mass(Reduction):
    """`mass` as one of several statistics; it computes its own tiles."""

    def __init__(self, mask: Mask, mean: bool = False) -> None:
        self.mask, self.mean = mask, mean

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        self.start = problem.shape.t

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


def named(requested: Mapping[str, Any]) -> dict[str, list[Reduction]]:
    """Return reductions by their names, several for a list of arguments; ValueError for an unknown name."""
    for name in requested:
        if name not in BY_NAME:
            raise ValueError(f"Expected statistics among {', '.join(BY_NAME)}, got {name!r}.")
    return {
        name: [make(name, arguments) for arguments in (given if isinstance(given, list) else [given])]
        for name, given in requested.items()
    }


def make(name: str, given: Any) -> Reduction:
    """Return a reduction by its name, with one argument, a tuple of them, or a dict of them by name."""
    return BY_NAME[name](**arguments(name, given))


def arguments(name: str, given: Any) -> dict[str, Any]:
    """Return the arguments of a statistic by their names; TypeError where they don't fit."""
    made = BY_NAME[name]
    named = given if isinstance(given, dict) else {}
    plain = () if isinstance(given, dict) else given if isinstance(given, tuple) else (given,)
    try:
        bound = signature(made).bind(*plain, **named)
    except TypeError as error:
        takes = ", ".join(signature(made).parameters) or "no arguments"
        raise TypeError(f"Expected arguments of {name} to be {takes}: {error}.") from None
    bound.apply_defaults()
    return bound.arguments


def _log_weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return score − lse, but at least `LEAST`."""
    return (scores - torch.where(lse == -math.inf, 0.0, lse)).clamp_(min=LEAST)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ x·y along the last dimension."""
    return (x * y).sum(-1)
