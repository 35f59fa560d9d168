"""Fused statistics as the library reads them: what to compute, and the memory for the results."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from manyheads.kernels.fused import ROW_STATISTICS, FusedStatistics, Spec
from manyheads.kernels.native import library
from manyheads.problem import Problem

CHUNKS = 16  # of the queries, over all heads: the number of threads that have work


def pack_spec(spec: Spec, problem: Problem, lse: Tensor, known: bool) -> tuple[bytes, Any, FusedStatistics]:
    """Return the bytes of a spec, the memory that they point to, and the tensors for its results.

    The caller must keep that memory alive until the library has returned.

    known: True if lse `[b, h, t]` is given, False if it is computed in the same pass.
    """
    shape = problem.shape
    fused: FusedStatistics = {}
    if spec.rows:
        fused |= {name: lse.new_zeros(lse.shape) for name in ROW_STATISTICS}
    if spec.received:
        fused["received"] = lse.new_zeros(shape.b, shape.h, shape.s)
    if spec.top:
        fused["top_scores"] = lse.new_zeros(*lse.shape, spec.top)
        fused["top_keys"] = lse.new_full((*lse.shape, spec.top), -1, dtype=torch.int64)
    for rows, cols, how in spec.cells:
        fused[rows, cols, how] = lse.new_zeros(shape.b, shape.h, rows, cols)

    def address(name: Any) -> int:
        return fused[name].data_ptr() if name in fused else 0

    grids = b"".join(
        library.POOLED_MAP.pack(*size, address((*size, "sum")), address((*size, "max")))
        for size in sorted({cell[:2] for cell in spec.cells})
    )
    memory = ctypes.create_string_buffer(grids, len(grids) or 1)
    data = library.STATISTICS.pack(
        known, spec.first,
        *(address(name) for name in (*ROW_STATISTICS, "received")),
        spec.top, address("top_scores"), address("top_keys"),
        len(grids) // library.POOLED_MAP.size, ctypes.addressof(memory), CHUNKS,
    )  # fmt: skip
    return data, memory, fused
