"""What is read off the weights in one call of the library: asked for first, found after."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyheads.kernels.native import library
from manyheads.problem import Problem

CHUNKS = 16  # of the queries, over all heads at hand: as many threads have something to do
ROWS = ("total", "entropy", "distance", "best")
DEEPEST = 64  # weights of a query that are kept in order; more are sooner sorted


@dataclass
class Look:
    """What is asked for, and the tensors that it is found in.

    rows: of each query the sum of weights, entropy, distance and largest score; received: what keys get of
    the queries from `first` on; top: so many of each query's largest weights; cells: pictures of so many rows
    and columns, the "sum" or the "max" of each cell.
    """

    rows: bool = False
    received: bool = False
    first: int = 0
    top: int = 0
    cells: set[tuple[int, int, str]] = field(default_factory=set)
    found: dict[Any, Tensor] = field(default_factory=dict)

    def packed(self, p: Problem, lse: Tensor, known: bool) -> tuple[bytes, list[Any]]:
        """As the library reads it, with new tensors in `found`, and what its addresses point into.

        known: is lse `[b, h, t]` given? Else it is computed, and the output with it.
        """
        n, found = p.shape, self.found
        if self.rows:
            found |= {name: lse.new_zeros(lse.shape) for name in ROWS}  # [b, h, t]
        if self.received:
            found["received"] = lse.new_zeros(n.b, n.h, n.s)
        if self.top:
            found["scores"] = lse.new_zeros(*lse.shape, self.top)
            found["keys"] = lse.new_full((*lse.shape, self.top), -1, dtype=torch.int64)
        grids: dict[tuple[int, int], dict[str, Tensor]] = {}
        for rows, cols, how in sorted(self.cells):
            cell = found[rows, cols, how] = lse.new_zeros(n.b, n.h, rows, cols)
            grids.setdefault((rows, cols), {})[how] = cell

        def at(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        grid = b"".join(
            library.GRID.pack(*size, at(made.get("sum")), at(made.get("max"))) for size, made in grids.items()
        )
        held = ctypes.create_string_buffer(grid, len(grid) or 1)
        data = library.LOOK.pack(
            known, self.first,
            *(at(found.get(name)) for name in (*ROWS, "received")),
            self.top, at(found.get("scores")), at(found.get("keys")),
            len(grids), ctypes.addressof(held), CHUNKS,
        )  # fmt: skip
        return data, [held, *found.values()]
