"""Fused statistics: statistics that a kernel computes in the same pass as the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

MAX_TOP = 64  # the most weights of a query that a kernel keeps in order; sorting is faster for more
ROW_STATISTICS = ("row_sum", "entropy", "distance", "max_score")  # each [b, h, t]

FusedStatistics = dict[Any, Tensor]
"""Fused statistics by name.

    "row_sum", "entropy", "distance", "max_score"   of each row of weights, `[b, h, t]`
    "received"                                      column sums, `[b, h, s]`
    "top_scores", "top_keys"                        the largest scores of each query, `[b, h, t, top]`
    (rows, cols, "sum" or "max")                    a pooled map, `[b, h, rows, cols]`
"""


@dataclass(frozen=True)
class Spec:
    """The fused statistics to compute; `spec | other` has those of both.

    Attributes:
        rows: Whether to compute the row statistics.
        received: Whether to compute the column sums, over the queries from row `first` on.
        first: The first row that is summed for `received`.
        top: The number of largest scores of each query.
        cells: The pooled maps, as (rows, cols, "sum" or "max").
    """

    rows: bool = False
    received: bool = False
    first: int = 0
    top: int = 0
    cells: frozenset[tuple[int, int, str]] = frozenset()

    def __or__(self, other: Spec) -> Spec:
        return Spec(
            self.rows or other.rows,
            self.received or other.received,
            max(self.first, other.first),
            max(self.top, other.top),
            self.cells | other.cells,
        )
