"""Where another kernel is faster than this one: the rules of `kernel="auto"` for each family of processors.

A family is named by the library's build that runs on it. A rule gets a problem that this kernel supports and
returns why `auto` passes over it, or None. `manyheads bench --kind choice` measures whether they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from manyheads.kernels import sdpa
from manyheads.kernels.native import library
from manyheads.scores import Problem

Rule = Callable[[Problem], str | None]

FEW_QUERIES = 12  # of a head of keys, for which packing keys isn't paid back (`attend.cpp`)
NARROW = 8  # queries, at most, of gradients whose blocks of scores are mostly padding
MANY_KEYS = 512  # over all heads, from which that costs more than PyTorch's calls
TILES = "amx"  # the build that multiplies bfloat16 in tiles


def many_queries(problem: Problem) -> bool:
    """Return True if more than a few queries share a head of keys."""
    n = problem.shape
    return n.h // n.g * n.t > FEW_QUERIES


def float64(problem: Problem) -> str | None:
    """Pass over float64, for which the library has only its portable build."""
    if problem.q.dtype == torch.float64:
        return "in float64 it is there to be compared with, and slower than PyTorch's products"
    return None


def narrow_gradients(problem: Problem) -> str | None:
    """Pass over float32 gradients of a few queries and many keys, which PyTorch computes in half the time.

    Measured with AVX2: 0.42 to 1.03 of the time, for 1 to 8 queries. In bfloat16 PyTorch is slower, and where
    it needs a mask tensor, building that takes longer.
    """
    if problem.q.dtype != torch.float32 or not problem.wants_gradient() or torch.compiler.is_exporting():
        return None  # an exported graph has one kernel: a choice by size would restrict its lengths
    n = problem.shape
    if n.t > NARROW or n.b * n.h * n.s < MANY_KEYS or sdpa.needs_tensor(problem) or sdpa.refuse(problem):
        return None
    return (
        f"PyTorch's backward is faster for at most {NARROW} queries of at least {MANY_KEYS} keys in all heads"
    )


def unused_tiles(problem: Problem) -> str | None:
    """Pass over bfloat16 where PyTorch multiplies it in tiles and this build doesn't."""
    if problem.q.dtype != torch.bfloat16:
        return None
    # A few queries wait for memory, and not for products. An exported graph has one kernel for all lengths.
    if not (torch.compiler.is_exporting() or many_queries(problem)) or sdpa.refuse(problem):
        return None
    return f"PyTorch multiplies bfloat16 in this processor's AMX tiles, and this kernel doesn't: {_unused()}"


# By the build in use; `UNUSED` for one that leaves the processor's tiles unused.
UNUSED = "tiles unused"
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "portable": (float64, narrow_gradients),
    "avx2": (float64, narrow_gradients),
    "avx512": (float64, narrow_gradients),
    "avx512bf16": (float64, narrow_gradients),
    TILES: (float64, narrow_gradients),
    UNUSED: (float64, narrow_gradients, unused_tiles),
}


def defers(problem: Problem) -> list[str]:
    """Return why `auto` passes over this kernel, though it supports the problem; empty if it doesn't."""
    for rule in FAMILIES[_family()]:
        reason = rule(problem)
        if reason is not None:
            return [reason]
    return []


def missing_tiles() -> str | None:
    """Return why the library can't multiply in the processor's tiles; None if it can, or there are none."""
    if not library.has_tiles or TILES in library.runs:
        return None
    reason = library.left_out.get(TILES, "this processor lacks other instructions that it needs")
    return f"its {TILES} build isn't available ({reason})"


def _family() -> str:
    """Return the key in FAMILIES of this processor and the build in use."""
    build = "portable" if library.width is None else library.WIDTHS[library.width]
    return UNUSED if library.has_tiles and build != TILES else build


def _unused() -> str:
    """Return why the build in use isn't the one with tiles."""
    return missing_tiles() or f"MANYHEADS_WIDTH chooses {library.WIDTHS[library.width or 0]}"
