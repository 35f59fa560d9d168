"""The problems for which another kernel is faster: rules of `kernel="auto"` for each family of processors.

A family is named by the library's build that runs on it. A rule takes a problem that this kernel supports and
returns why another kernel is faster, or None. `manyheads bench --kind choice` measures whether they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from manyheads.kernels import sdpa
from manyheads.kernels.native import library
from manyheads.problem import Problem

Rule = Callable[[Problem], str | None]

FEW_QUERIES = 12  # of a head of keys, as in `few.h`
TILES = "amx"  # the build that multiplies bfloat16 in tiles


def many_queries(problem: Problem) -> bool:
    """Return True if more than a few queries share a head of keys."""
    shape = problem.shape
    return shape.h // shape.g * shape.t > FEW_QUERIES


def float64(problem: Problem) -> str | None:
    """Return a reason for float64, for which the library has only its portable build."""
    if problem.q.dtype == torch.float64:
        return "in float64 it is slower than PyTorch's products, and meant for comparisons"
    return None


def unused_tiles(problem: Problem) -> str | None:
    """Return a reason for bfloat16 if PyTorch multiplies it in tiles and this build doesn't."""
    if problem.q.dtype != torch.bfloat16:
        return None
    # Few queries are limited by memory, not by products. An exported graph has one kernel for all lengths.
    if not (torch.compiler.is_exporting() or many_queries(problem)) or sdpa.why_unsupported(problem):
        return None
    return f"PyTorch multiplies bfloat16 in this processor's AMX tiles, and this kernel doesn't: {_unused()}"


# By the build in use; `UNUSED` for one that leaves the processor's tiles unused.
UNUSED = "tiles unused"
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "portable": (float64,),
    "avx2": (float64,),
    "avx512": (float64,),
    "avx512bf16": (float64,),
    TILES: (float64,),
    UNUSED: (float64, unused_tiles),
}


def why_slower(problem: Problem) -> list[str]:
    """Return why another kernel is faster for a problem; empty if none is."""
    for rule in FAMILIES[_family()]:
        reason = rule(problem)
        if reason is not None:
            return [reason]
    return []


def _family() -> str:
    """Return the key in FAMILIES of this processor and the build in use."""
    build = "portable" if library.width is None else library.WIDTHS[library.width]
    return UNUSED if library.has_tiles and build != TILES else build


def _unused() -> str:
    """Return why the build in use isn't the one with tiles."""
    if TILES in library.supported:
        return f"MANYHEADS_WIDTH chooses {library.WIDTHS[library.width or 0]}"
    reason = library.unavailable.get(TILES, "this processor lacks other instructions that it needs")
    return f"its {TILES} build isn't available ({reason})"
