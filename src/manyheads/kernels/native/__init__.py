"""This library's own kernel for the CPU, in C++: output, log-sum-exp, statistics and gradients.

It computes blocks of queries and keys that fit the registers and caches, with an online softmax (Dao et al.
2022, arXiv:2205.14135). It is compiled for several vector widths; `library` selects the best that the
processor supports. Masks are passed as a band, lengths and documents; other parts of their normal form are
passed as a boolean tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.kernels import chunked, operator, sdpa
from manyheads.kernels.fused import FusedStatistics, Spec
from manyheads.kernels.native import library, passes, rules
from manyheads.kernels.native.autograd import Attention, Plan
from manyheads.kernels.native.packing import DTYPES, tensor_bytes
from manyheads.problem import ALL, Problem, Rows
from manyheads.shapes import PLAIN

NAME = "native"
GIVES_LSE = True
SHIELDS = True
FUSES = True  # computes statistics together with the output

WIDEST = 256  # the largest head size d and value width w
LIMIT = sdpa.LIMIT
MAX_KEYS = 1 << 15  # one pass computes output and statistics up to this s: it keeps rows of weights in caches


def why_unsupported(problem: Problem, values: bool = True) -> list[str]:
    """Return why the kernel doesn't support a problem; empty if it does.

    values: Whether an output is needed. If False, only scores are.
    """
    shape = problem.shape
    if not problem.q.is_cpu:
        return [f"it runs on the CPU, and q is on {problem.q.device}"]
    reasons = []
    if library.load_error is not None:
        reasons.append(library.load_error)
    reasons += chunked.why_unsupported(problem)
    if problem.q.dtype not in DTYPES:
        reasons.append(f"it computes in {', '.join(map(str, DTYPES))}, and q is {problem.q.dtype}")
    if problem.dropout_p and values:
        reasons.append("it has no dropout")
    if 0 in (shape if values else shape[:-1]):
        reasons.append("a size is 0")
    if shape.d > WIDEST or (shape.w > WIDEST and values):
        reasons.append(f"it supports d and w up to {WIDEST}, and these are {shape.d} and {shape.w}")
    size = tensor_bytes(problem)
    if size > LIMIT:
        reasons.append(
            "parts of the mask and bias would have to be stored as tensors of "
            f"{size / 2**20:,.0f} MiB (at most {LIMIT // 2**20})"
        )
    return reasons


why_slower = rules.why_slower


def built() -> str:
    """Describe the build in use and its threads, or why no build is available."""
    if library.width is None:
        return f"not available: {library.load_error}"
    others = "".join(f"; {build} isn't available: {why}" for build, why in library.unavailable.items())
    if library.has_slow_pairs and library.PAIRS in library.supported:
        why = "this processor multiplies pairs of bfloat16 at half the rate of float32"
        others += f"; {library.PAIRS} isn't the default: {why}"
    return (
        f"{library.WIDTHS[library.width]} (available builds: {', '.join(library.supported)}{others}), using "
        f"{'the threads of PyTorch' if library.shares_threads else 'its own threads'}"
    )


def run(problem: Problem, spec: Spec | None = None) -> tuple[Tensor, Tensor | None, FusedStatistics]:
    """Return the output `[b, h, t, w]`, the log-sum-exp `[b, h, t]` or None, and fused statistics.

    Statistics are computed only if that is faster than computing them later. For few queries without a
    gradient or statistics, the kernel may read keys without packing them, which is faster but sums scores in
    a different order from `tile`. Then it returns no log-sum-exp, and an attention map computes one when it
    is read.
    """
    if not _direct(problem):
        return *torch.ops.manyheads.native(*operator.arguments(problem)), {}
    if problem.wants_gradient():
        table = None if problem.bias is None else problem.bias.tensor()
        return *Attention.apply(problem, problem.q, problem.k, problem.v, problem.sink, table), {}
    if spec is not None or _many(problem):
        return passes.forward(problem, spec if problem.shape.s <= MAX_KEYS else None)
    out = problem.q.new_empty(*problem.shape[:2], problem.shape.t, problem.shape.w)
    passes.attend(problem, out, None)
    return out, None, {}


def plan(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None:
    """Return a function that computes the output `[b, h, t, w]` from q, k, v and mask, for this layout.

    Return None if the problem needs tensors other than q, k, v and the lengths of its mask.
    """
    plan = Plan(problem)
    if not plan.only_addresses_differ:
        return None
    return plan.attend_with_gradient if problem.wants_gradient() else plan.attend


def gives_lse(problem: Problem) -> bool:
    """Return True if `run` returns the log-sum-exp when it is called without a spec."""
    return _many(problem) or problem.wants_gradient() or not _direct(problem)


_many = rules.many_queries


def reads(problem: Problem) -> bool:
    """Return True if attention maps of a problem compute its scores with this kernel."""
    return problem.q.dtype != torch.float64 and not why_unsupported(problem, values=False)


def fuses(problem: Problem, in_place: bool = False) -> bool:
    """Return True if this kernel computes statistics of a problem's weights, faster than from tiles.

    in_place: Also require that no tensor has to be made of the mask and the bias.
    """
    return _direct(problem) and reads(problem) and not (in_place and tensor_bytes(problem))


def statistics(problem: Problem, spec: Spec | None, lse: Tensor | None) -> tuple[Tensor, FusedStatistics]:
    """Return the log-sum-exp `[b, h, t]`, computed if it isn't given, and a spec's fused statistics."""
    problem = problem.detach().without_values()
    fused: FusedStatistics = {}
    if lse is None:
        if not _direct(problem):
            return torch.ops.manyheads.native(*operator.arguments(problem))[1], {}
        _, lse, fused = passes.forward(problem, spec if problem.shape.s <= MAX_KEYS else None)
    if spec is not None and not fused:
        out = problem.q.new_empty(*lse.shape, 0)
        fused = passes.attend(problem, out, lse.contiguous(), spec, known=True)
    return lse, fused


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, summed in the kernel's order; −inf where masked."""
    compute = passes.logits if _direct(problem) else scores.logits  # e.g. of fake tensors
    return scores.tile(problem, rows, cols, batch, heads, compute)


def _direct(problem: Problem) -> bool:
    """Return True if the custom operator can be skipped (no tracing, tensor subclass or dispatch mode).

    Calling the operator takes longer than a small problem.
    """
    return not (
        torch.compiler.is_compiling()
        or not (type(problem.q) in PLAIN and type(problem.k) in PLAIN and type(problem.v) in PLAIN)
        or torch._C._len_torch_dispatch_stack()
    )
