"""The largest weights of a head in order, found row by row."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from torch import Tensor

from manyheads import scores
from manyheads.maps import AttentionMap

FIRST = 16  # the number of weights that are sorted when a row is read; it doubles whenever they run out
ROUNDING = 1e-6  # a row's maximum in `row_max` and in `amap` may differ by this factor


class Weight(NamedTuple):
    """A weight and its place.

    Attributes:
        query: The query.
        key: The key.
        weight: The weight.
    """

    query: int
    key: int
    weight: float


class LargestWeights:
    """The weights of one head in descending order.

    The largest weight of each row bounds the others, so finding the n largest weights of a head reads at most
    n rows. Weights that are equal within float32's rounding may be in either order. Queries with a single
    visible key are skipped, because that weight is always 1, unless a sink takes a part of it.

    Args:
        amap: The map of one sequence and one head, `[1, 1, t, s]`.
        row_max: The largest weight of each query, `[t]`.
    """

    def __init__(self, amap: AttentionMap, row_max: Tensor) -> None:
        self._amap, self._row_max = amap, row_max
        self._order = row_max.argsort(descending=True, stable=True)  # the queries
        self._opened = 0  # the number of rows that have been read
        self._sorted: dict[int, tuple[list[float], list[int]]] = {}  # by query: its largest weights, and keys
        self._heap: list[tuple[float, int, int]] = []  # −weight, query, and the rank in its row
        self._found: list[Weight] = []

    def find(self, rank: int) -> Weight | None:
        """Return the weight with `rank` larger ones; None if there are no more weights above 0."""
        while len(self._found) <= rank:
            weight = self._next()
            if weight is None:
                return None
            self._found.append(weight)
        return self._found[rank]

    def _next(self) -> Weight | None:
        while self._opened < len(self._order):
            query = int(self._order[self._opened])
            if self._heap and float(self._row_max[query]) <= -self._heap[0][0] * (1 + ROUNDING):
                break
            self._opened += 1
            if self._has_choice(query):
                self._push(query, 0)
        if not self._heap:
            return None
        negative, query, rank = heapq.heappop(self._heap)
        key = self._sorted[query][1][rank]
        self._push(query, rank + 1)
        return Weight(query, key, -negative)

    def _has_choice(self, query: int) -> bool:
        """Return True if the weights of a query aren't determined by the mask."""
        problem = self._amap.problem
        visible = scores.visible(problem, slice(query, query + 1), slice(None))
        return problem.sink is not None or int(visible.expand(1, 1, 1, problem.shape.s).sum()) > 1

    def _push(self, query: int, rank: int) -> None:
        """Add the weight of a rank in its row to the heap, unless it is 0 or the row has no more."""
        weights, _ = self._sorted.get(query, ([], []))
        if rank >= len(weights):
            size = max(FIRST, 2 * len(weights))
            # `topk` may return equal weights in another order when it is called again.
            values, keys = self._amap[0, 0, query].sort(descending=True, stable=True)
            weights = values[:size].tolist()
            self._sorted[query] = weights, keys[:size].tolist()
        if rank < len(weights) and weights[rank] > 0:
            heapq.heappush(self._heap, (-weights[rank], query, rank))
