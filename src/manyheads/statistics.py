"""Statistics of all heads at once, streamed: each takes tile after tile, and keeps O(L) numbers.

    entropy, top = reduce(problem, lse, [Entropy(), Top(8)])     # one pass over the scores for both

Where the native kernel can look at the weights, it does, and no tile is built: a statistic says what it is
made of (`ask`), and is made of what was found (`read`). A `Tile` computes once what several reductions need
of it. What each statistic means, and where it comes from, is said at its face in `maps.AttentionMap`.
Nothing is ever renormalised: under a sink a row's weights sum to less than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads import kernels, scores
from manyheads.kernels import chunked, native
from manyheads.kernels.native.look import DEEPEST, Look
from manyheads.masks import FAR, AfterSameToken, Causal, Diagonal, Documents, Full, Mask, Not, SameToken
from manyheads.problem import Problem
from manyheads.shapes import amount, kind, sizes, whole

MOST = 2**33  # bytes for the keys of a row that aren't there
LEAST = -1e30  # stands for −inf where a product with a weight of 0 must be 0 and not NaN


class Tile:
    """A tile's scores, and what is read off them: logarithms, weights, sums, each computed once."""

    def __init__(self, problem: Problem, lse: Tensor, rows: slice, cols: slice) -> None:
        self.problem, self.lse = problem, lse  # [b, h, t]
        self.rows, self.cols = rows, cols

    @cached_property
    def seen(self) -> Tensor | None:
        """Where the query may see the key, `[b or 1, h or 1, r, c]`; None: everywhere."""
        if scores.sees_all(self.problem, self.rows, self.cols):
            return None
        return scores.visible(self.problem, self.rows, self.cols)

    @cached_property
    def scores(self) -> Tensor:
        """`[b, h, r, c]`; −inf where the query may not see the key."""
        return kernels.reader(self.problem).tile(self.problem, self.rows, self.cols)

    @cached_property
    def logs(self) -> Tensor:
        """Logarithms of weights, score − lse, `[b, h, r, c]`, but at least `LEAST`."""
        return _below(self.scores, self.lse[:, :, self.rows, None])

    @cached_property
    def weights(self) -> Tensor:
        """`[b, h, r, c]`; what is masked weighs 0, in a row of NaN too."""
        weights = self.logs.exp()
        return weights if self.seen is None else weights.masked_fill_(~self.seen, 0.0)

    @cached_property
    def totals(self) -> Tensor:
        """The sum of each row's weights, `[b, h, r]`."""
        return self.weights.sum(-1)

    @cached_property
    def tops(self) -> Tensor:
        """The largest ln w of each row, `[b, h, r]`; `LEAST` where it sees no key of the tile."""
        return self.logs.amax(-1)


def tiles(problem: Problem, lse: Tensor, start: int = 0) -> Iterator[Tile]:
    """Return the tiles that aren't empty under the mask, but those above row `start`, row of tiles by row."""
    # Whole blocks: `chunked` sums the log-sum-exp in the same ones, and a product of another shape may round
    # otherwise.
    for rows, columns in chunked.blocks(problem, start):
        for cols in columns:
            yield Tile(problem, lse, rows, cols)


class Reduction:
    """One statistic on its way: `begin`, then `room`, `take` for every tile, and `end` gives the result."""

    start = 0  # the first row that it needs

    def key(self) -> tuple[Any, ...]:
        """Return what tells it from others before it begins: its class and arguments."""
        return type(self), *vars(self).items()

    def begin(self, problem: Problem, lse: Tensor) -> None:
        """Check the arguments against the problem; lse `[b, h, t]` may not be known yet."""
        self.problem, self.lse = problem, lse

    def room(self) -> None:
        """Make room for what tiles bring, if they are needed."""

    def take(self, tile: Tile) -> None:
        """Add what a tile brings."""
        raise NotImplementedError

    def ask(self, look: Look) -> bool:
        """Add to a look, from row `start` on, what this is made of; False if it is made of tiles alone."""
        return False

    def read(self, look: Look) -> None:
        """Take what the look found, in place of all tiles."""
        raise NotImplementedError

    def end(self) -> Any:
        """Return the statistic."""
        raise NotImplementedError


Compute = Callable[[Look | None], Tensor | None]  # a log-sum-exp [b, h, t], and what a look finds on the way


def reduce(
    problem: Problem, lse: Tensor, reductions: Sequence[Reduction], compute: Compute | None = None
) -> list[Any]:
    """Return the results of several reductions, in one pass over the scores.

    lse `[b, h, t]` is written where it isn't known yet: then `compute` gives it, or None where it can't.
    """
    with torch.no_grad(), scores.exactly(problem.q.device):
        for one in reductions:
            one.begin(problem, lse)
        left = _look(problem, lse, reductions, compute)
        for one in left:
            one.room()
        start = min([problem.shape.t, *(one.start for one in left)])
        for tile in tiles(problem, lse, start):
            for one in left:
                if one.start < tile.rows.stop:
                    one.take(tile)
        return [one.end() for one in reductions]


def _look(
    problem: Problem, lse: Tensor, reductions: Sequence[Reduction], compute: Compute | None
) -> Sequence[Reduction]:
    """Those that the native kernel can't make; the others have what they need."""
    looks = native.looks(problem)
    left: list[Reduction] = []
    asked: dict[int, tuple[Look, list[Reduction]]] = {}  # by the first row that counts
    for one in reductions:
        look, asking = asked.get(one.start, (Look(first=one.start), []))
        if looks and one.start < problem.shape.t and one.ask(look):
            asking.append(one)
            asked[one.start] = look, asking
        else:
            left.append(one)
    if compute is not None:
        computed = compute(asked[min(asked)][0] if asked else None)
        lse.copy_(kernels.reader(problem).lse(problem) if computed is None else computed)
    if asked and not bool(lse.amax() < math.inf):  # nor NaN: tiles take care of such rows
        return reductions
    for look, asking in asked.values():
        if not look.found:
            native.look(problem, lse, look)
        for one in asking:
            one.read(look)
    return left


# -- a number per query: [b, h, t] -----------------------------------------------------------------


class Entropy(Reduction):
    """−Σ w·ln w."""

    def room(self) -> None:
        self.total = torch.zeros_like(self.lse)  # [b, h, t]

    def take(self, tile: Tile) -> None:
        self.total[:, :, tile.rows] -= _dot(tile.weights, tile.logs)

    def ask(self, look: Look) -> bool:
        look.rows = True
        return True

    def read(self, look: Look) -> None:
        self.total = look.found["entropy"]

    def end(self) -> Tensor:
        # A weight may round to a little more than 1, and its part to a little less than 0.
        return self.total.clamp_(min=0.0)


class Distance(Reduction):
    """Σ w·|i − j|, in positions."""

    def room(self) -> None:
        self.total = torch.zeros_like(self.lse)  # [b, h, t]

    def take(self, tile: Tile) -> None:
        problem, cols = tile.problem, tile.cols
        if isinstance(problem.offset, int):
            top, bottom = tile.rows.start + problem.offset, tile.rows.stop - 1 + problem.offset
            if top >= cols.stop - 1 or bottom <= cols.start:  # all keys on one side: |i − j| splits in two
                edge = cols.stop - 1 if top >= cols.stop - 1 else cols.start
                i = torch.arange(top, bottom + 1, device=tile.lse.device)
                j = torch.arange(cols.start, cols.stop, device=tile.lse.device)
                inner = tile.weights @ (j - edge).abs().to(tile.lse.dtype)  # [b, h, r]
                self.total[:, :, tile.rows] += tile.totals * (i - edge).abs() + inner
                return
        _, _, i, j = problem.at(tile.rows, cols)
        self.total[:, :, tile.rows] += _dot(tile.weights, (i - j).abs().to(tile.lse.dtype))

    def ask(self, look: Look) -> bool:
        look.rows = True
        return True

    def read(self, look: Look) -> None:
        self.total = look.found["distance"]

    def end(self) -> Tensor:
        return self.total


class RowMax(Reduction):
    """The largest weight of each row."""

    def room(self) -> None:
        self.top = torch.full_like(self.lse, LEAST)  # [b, h, t]

    def take(self, tile: Tile) -> None:
        rows = self.top[:, :, tile.rows]
        torch.maximum(rows, tile.tops, out=rows)

    def ask(self, look: Look) -> bool:
        look.rows = True
        return True

    def read(self, look: Look) -> None:
        self.top = _below(look.found["best"], self.lse)

    def end(self) -> Tensor:
        return self.top.exp_().clamp_(max=1.0)  # LEAST gives 0


class SinkWeight(Reduction):
    """What the sink takes of each row: no tile is needed."""

    def begin(self, problem: Problem, lse: Tensor) -> None:
        super().begin(problem, lse)
        self.start = problem.shape.t

    def end(self) -> Tensor:
        if self.problem.sink is None:
            return torch.zeros_like(self.lse)
        sink = self.problem.sink.to(self.lse.dtype)[None, :, None, None].expand(
            *self.lse.shape, 1
        )  # [b, h, t, 1]
        return scores.weights(sink, self.lse)[..., 0]


class TopKeys(NamedTuple):
    """The largest weights of each query, and whose they are: both `[b, h, t, k]`."""

    weights: Tensor
    keys: Tensor  # int64; −1 where a query sees fewer than k keys


class Top(Reduction):
    """The k largest weights of each row, the largest first; among equals the first keys."""

    def __init__(self, k: int) -> None:
        self.k = whole(k, "k, the number of keys in top,", least=1)

    def begin(self, problem: Problem, lse: Tensor) -> None:
        s, size = problem.shape.s, lse.numel() * self.k * (lse.itemsize + 8)
        if self.k > s and size > MOST:
            raise ValueError(
                f"top({self.k}) would take {amount(size)}, and there are {s} keys in all: ask for top({s})."
            )
        super().begin(problem, lse)

    def room(self) -> None:
        shape = *self.lse.shape, self.k
        self.best = self.lse.new_full(shape, -math.inf)  # ln w, below that of any key
        self.keys = torch.full(shape, -1, device=self.lse.device)  # [b, h, t, k]

    def take(self, tile: Tile) -> None:
        best, keys = self.best[:, :, tile.rows], self.keys[:, :, tile.rows]  # views, [b, h, r, k]
        # The further along a row, the rarer a tile has anything better than the k-th so far.
        # (Not `tops > last`: NaN must enter.)
        rows = ~(tile.tops <= best[..., -1])  # [b, h, r]
        logs = tile.logs[rows]  # [n, c]
        if not logs.numel():
            return
        if tile.seen is not None:
            logs = logs.masked_fill(~tile.seen.expand(tile.logs.shape)[rows], -math.inf)
        better = ~(logs <= best[rows][:, -1:])
        widest = int(better.sum(-1).max())
        found, where = _packed(logs, better, widest) if widest <= 16 else _largest(logs, self.k)  # [n, …]
        where = torch.where(found == -math.inf, -1, where + tile.cols.start)
        # Earlier keys stand first, and a stable sort leaves them there among equals.
        merged = torch.cat((best[rows], found), -1).sort(dim=-1, descending=True, stable=True)
        chosen = merged.indices[:, : self.k]
        best[rows] = merged.values[:, : self.k]
        keys[rows] = torch.cat((keys[rows], where), -1).gather(-1, chosen)

    def ask(self, look: Look) -> bool:
        look.top = max(look.top, self.k if self.k <= DEEPEST else 0)
        return self.k <= DEEPEST

    def read(self, look: Look) -> None:
        self.keys = look.found["keys"][..., : self.k].contiguous()
        self.best = look.found["scores"][..., : self.k] - self.lse[..., None]
        self.best.masked_fill_(self.keys < 0, -math.inf)

    def end(self) -> TopKeys:
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
    """Column sums, of all queries or of the last ones; by "age" divided by how many could see the key."""

    def __init__(self, last: int | None = None, normalize: str | None = None) -> None:
        self.last = None if last is None else whole(last, "last, the number of queries that vote,", least=1)
        if normalize not in (None, "age"):
            raise ValueError(
                f'Expected normalize to be None or "age" (by how many could see the key), got {normalize!r}.'
            )
        self.normalize = normalize

    def begin(self, problem: Problem, lse: Tensor) -> None:
        super().begin(problem, lse)
        self.start = 0 if self.last is None else max(problem.shape.t - self.last, 0)

    def room(self) -> None:
        n = self.problem.shape
        self.total, self.could = self.lse.new_zeros(2, n.b, n.h, n.s)

    def take(self, tile: Tile) -> None:
        weights, seen = tile.weights, tile.seen
        if tile.rows.start < self.start:
            weights = weights[..., self.start - tile.rows.start :, :]
            seen = None if seen is None else seen[..., self.start - tile.rows.start :, :]
        self.total[:, :, tile.cols] += weights.sum(-2)
        if self.normalize:
            self.could[:, :, tile.cols] += weights.shape[-2] if seen is None else seen.sum(-2)

    def ask(self, look: Look) -> bool:
        if self.normalize:
            counted = _seen_by(self.problem, self.start)
            if counted is None:
                return False
            self.counted = counted
        look.received = True
        return True

    def read(self, look: Look) -> None:
        self.total = look.found["received"]
        if self.normalize:
            self.could = self.counted.to(self.lse)

    def end(self) -> Tensor:
        return self.total / self.could.clamp(min=1) if self.normalize else self.total


def _seen_by(problem: Problem, start: int) -> Tensor | None:
    """How many of the queries from row `start` on may see each key, `[b or 1, 1, s]`.

    None if only a look at all pairs can tell.
    """
    n, ends = problem.shape, (Full() if problem.mask is None else problem.mask).normal()
    if ends.segments or ends.rest or (problem.bias is not None and problem.bias.can_mask):
        return None
    b, h, i, j = problem.at(slice(start, start + 1), slice(None))
    low, high = (far if end is None else end for end, far in zip(ends.band, (-FAR, FAR), strict=True))
    last = torch.minimum(i + n.t - start - 1, j - low)  # [b or 1, 1, 1, s]
    counted = (last - torch.maximum(i, j - high) + 1).clamp(min=0)
    for real in ends.lengths:
        counted = counted * torch.as_tensor(real.keep(b, h, i, j))
    return counted[:, :, 0]


class ValueNorms(Received):
    """Column sums of w·‖v W_o‖: what is received, counted by the size of what it carries."""

    def __init__(self, v: Tensor, w_o: Tensor) -> None:
        super().__init__()
        for name, x in (("v", v), ("w_o", w_o)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise TypeError(f"Expected {name} to be a tensor of floats, got {kind(x)}.")
        self.v, self.w_o = v, w_o

    def begin(self, problem: Problem, lse: Tensor) -> None:
        super().begin(problem, lse)
        n, v = problem.shape, self.v.detach().to(lse.device, lse.dtype)
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
        w_o = self.w_o.detach().to(lse.device, lse.dtype)
        w_o = w_o.reshape(w_o.shape[0], n.h, v.shape[3]).movedim(1, 0)  # [h, e, w]
        # ‖v W‖² = v (WᵀW) vᵀ would be cheaper where e > w, and lose half the digits.
        self.norms = lse.new_empty(n.b, n.h, n.s)
        for head in range(n.h):
            for start in range(0, n.s, 4096):
                keys = slice(start, start + 4096)
                self.norms[:, head, keys] = (v[:, head * n.g // n.h, keys] @ w_o[head].mT).norm(dim=-1)

    def end(self) -> Tensor:
        return torch.where(self.total == 0, 0.0, self.total * self.norms)  # a hidden NaN gives nothing


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

    def begin(self, problem: Problem, lse: Tensor) -> None:
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
        super().begin(problem, lse)

    def room(self) -> None:
        self.cell = self.lse.new_zeros(*self.lse.shape[:2], *self.cells)

    def take(self, tile: Tile) -> None:
        down, across = Bins(self.down, tile.rows), Bins(self.across, tile.cols)
        part = self.cell[:, :, down.cells, across.cells]  # a view
        if self.mean:
            along = tile.totals[..., None] if across.single else across.sum(tile.weights)  # [b, h, r, C]
            part += down.sum(along.mT).mT
        else:
            along = tile.tops.exp()[..., None] if across.single else across.max(tile.weights)
            torch.maximum(part, down.max(along.mT).mT, out=part)

    def ask(self, look: Look) -> bool:
        look.cells.add((*self.cells, self.how))
        return True

    def read(self, look: Look) -> None:
        self.cell = look.found[*self.cells, self.how]

    def end(self) -> Tensor:
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
    """The largest score of each head, `[b, h]`; −inf where no query sees a key."""

    def room(self) -> None:
        self.top = self.lse.new_full(self.lse.shape[:2], -math.inf)  # [b, h]

    def take(self, tile: Tile) -> None:
        torch.maximum(self.top, tile.scores.amax((-2, -1)), out=self.top)

    def ask(self, look: Look) -> bool:
        look.rows = True
        return True

    def read(self, look: Look) -> None:
        self.top = look.found["best"].amax(-1)

    def end(self) -> Tensor:
        return self.top


class Divergence(Reduction):
    """½ Σ p·ln(p/m) + ½ Σ q·ln(q/m), m = ½ (p + q), averaged over queries, between heads: `[b, h, h]`."""

    def room(self) -> None:
        n = self.problem.shape
        self.total = torch.zeros(n.b, n.h, n.h, dtype=torch.float64, device=self.lse.device)

    def take(self, tile: Tile) -> None:
        w = tile.weights
        for head in range(w.shape[1] - 1):
            apart = jensen_shannon(w[:, head : head + 1], w[:, head + 1 :])  # [b, h − head − 1, r, c]
            self.total[:, head, head + 1 :] += apart.sum((-2, -1))

    def end(self) -> Tensor:
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
        for rows, columns in chunked.blocks(one[0].under(None)):
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
            part = share[:, :, tile.rows]  # a row with no share says nothing, not even NaN
            made[:, :, tile.cols] += scores.mix(part, part != 0, tile.weights.mean(1).to(share))
    return made


# -- what a mask shares with a map -----------------------------------------------------------------


def masses(problem: Problem, lse: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the weight of each row inside a mask, and whether the row sees any of it: both `[b, h, t]`."""
    if mask is None:
        raise TypeError("Expected a mask for mass, got None: Full() asks for all the weight of a row.")
    both = replace(problem.within(mask), sink=None)
    # The log-sum-exp belongs to the kernel that reads the problem itself.
    fast = native.looks(problem) and native.looks(both) and not native.tensor_bytes(both)
    if fast and bool(lse.amax() < math.inf):
        native.look(both, lse, look := Look(rows=True))
        return look.found["total"].clamp_(max=1.0), look.found["best"] != -math.inf
    found = _by_token(problem, both, lse)
    if found is not None:
        return found
    inside = problem.under(mask)
    total = torch.zeros_like(lse)  # [b, h, t]
    could = torch.zeros_like(lse, dtype=torch.bool)
    with torch.no_grad(), scores.exactly(lse.device):
        for tile in tiles(problem, lse):
            left, right = inside.span(tile.rows.start, tile.rows.stop)[0]
            if tile.cols.start < right and left < tile.cols.stop:  # else nothing to compute here
                kept = scores.visible(inside, tile.rows, tile.cols)  # [b or 1, h or 1, r, c]
                total[:, :, tile.rows] += torch.where(kept, tile.weights, 0.0).sum(-1)
                could[:, :, tile.rows] |= (kept if tile.seen is None else kept & tile.seen).any(-1)
    return total, could


def _by_token(problem: Problem, both: Problem, lse: Tensor) -> tuple[Tensor, Tensor] | None:
    """`masses` at other places with the query's token, or behind them; None where no short way is known.

    Sorted by token, places with the same one are a document, in the order of the text. The native kernel
    reads documents in place and skips the rest: of 32,768 tokens some hundredth is left to compute.
    """
    assert both.mask is not None
    n, normal = problem.shape, both.mask.normal()
    ids = [part for part in normal.rest if isinstance(part, SameToken | AfterSameToken)]
    others = [part for part in normal.rest if part not in ids]
    plain = normal.band in ((None, None), (None, 0)) and not normal.segments and not normal.lengths
    square = n.t == n.s and isinstance(problem.offset, int) and problem.offset == 0
    if len(ids) != 1 or not plain or not square or problem.bias is not None or n.t < 2:
        return None
    if not native.looks(problem):  # then the log-sum-exp isn't the kernel's
        return None
    (token,) = ids
    after = isinstance(token, AfterSameToken)  # the keys one behind, all of them earlier than the query's
    itself = [part for part in others if isinstance(part, Not) and _is_own(part.mask)]
    if token.ids.shape != (n.s,) or token.queries is not None or others != itself or after == bool(itself):
        return None
    order = token.ids.argsort(stable=True)  # [t]
    total, could = torch.zeros_like(lse), torch.zeros_like(lse, dtype=torch.bool)  # [b, h, t]
    for way in [order] if after or normal.band[1] == 0 else [order, order.flip(0)]:  # earlier places, later
        queries, keys = way[1:], way[:-1]  # a query's row stands beside the place before its own
        documents = Documents(token.ids[keys], queries=token.ids[queries])
        k = problem.k[:, :, (keys + 1).clamp(max=n.s - 1) if after else keys]  # [b, g, t - 1, d]
        sorted_ = Problem.of(
            problem.q[:, :, queries], k, k, mask=Causal() & documents, scale=problem.scale,
            softcap=problem.softcap, offset=0,
        )  # fmt: skip
        if not native.looks(sorted_) or bool(lse.amax() == math.inf):
            return None
        native.look(sorted_, lse[:, :, queries], look := Look(rows=True))
        total[:, :, queries] += look.found["total"]
        could[:, :, queries] |= look.found["best"] != -math.inf
    return total.clamp_(max=1.0), could


def _is_own(mask: Mask) -> bool:
    """Is this the query's own key?"""
    return isinstance(mask, Diagonal) and mask.k == 0


def mass(problem: Problem, lse: Tensor, mask: Mask, mean: bool) -> Tensor:
    """Return the weight of each row inside a mask `[b, h, t]`, or its mean over rows that could, `[b, h]`."""
    if not isinstance(mean, bool):
        raise TypeError(f"Expected mean to be True or False, got {mean!r}.")
    total, could = masses(problem, lse, mask)
    if not mean:
        return total
    return torch.where(could, total, 0.0).sum(-1) / could.sum(-1).clamp(min=1)


def first_keys(problem: Problem) -> Tensor:
    """Return the first key that each query may see, `[b, h, t]`; s if it sees none. Computes no score."""
    n = problem.shape
    first = torch.full((n.b, n.h, n.t), n.s, device=problem.q.device)
    for rows, columns in chunked.blocks(problem):
        found = first[:, :, rows]  # a view
        for cols in columns:
            seen = scores.visible(problem, rows, cols)  # [b or 1, h or 1, r, c]
            here = torch.where(seen.any(-1), cols.start + seen.to(torch.uint8).argmax(-1), n.s)
            torch.minimum(found, here, out=found)
            if bool((found < n.s).all()):
                break
    return first


# -- by name ---------------------------------------------------------------------------------------


class Mass(Reduction):
    """`mass` as one of several statistics: it walks its own tiles."""

    def __init__(self, mask: Mask, mean: bool = False) -> None:
        self.mask, self.mean = mask, mean

    def begin(self, problem: Problem, lse: Tensor) -> None:
        super().begin(problem, lse)
        self.start = problem.shape.t

    def end(self) -> Tensor:
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


def named(asked: Mapping[str, Any]) -> dict[str, list[Reduction]]:
    """Reductions by their names, several of a list of arguments; ValueError for a name that isn't known."""
    for name in asked:
        if name not in BY_NAME:
            raise ValueError(f"there is no statistic {name!r}: {', '.join(BY_NAME)} can be asked for.")
    return {
        name: [make(name, one) for one in (given if isinstance(given, list) else [given])]
        for name, given in asked.items()
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
        raise TypeError(f"the statistic {name} takes {takes}, and it can't be had so: {error}.") from None
    bound.apply_defaults()
    return bound.arguments


def _below(scores: Tensor, lse: Tensor) -> Tensor:
    """Return score − lse, but at least `LEAST`."""
    return (scores - torch.where(lse == -math.inf, 0.0, lse)).clamp_(min=LEAST)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ x·y along the last dimension."""
    return (x * y).sum(-1)
