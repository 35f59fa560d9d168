"""Our own kernel for the CPU, in C++: output, log-sum-exp, statistics and gradients.

It computes blocks of queries and keys that fit the registers and caches, with an online softmax (Dao et al.
2022, arXiv:2205.14135). It is compiled for several vector widths; `library` selects the best that the
processor supports. Masks are passed in their normal form, and what that leaves as a boolean tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.kernels import chunked, operator, sdpa
from manyheads.kernels.fused import Found, Spec
from manyheads.kernels.native import library, passes, rules
from manyheads.kernels.native.autograd import Attention, Plan
from manyheads.kernels.native.packing import DTYPES, tensor_bytes
from manyheads.problem import ALL, Problem, Rows
from manyheads.shapes import PLAIN

NAME = "native"
GIVES_LSE = True
SHIELDS = True
FUSES = True  # computes statistics together with the output

WIDEST = 256
LIMIT = sdpa.LIMIT
MAX_KEYS = 1 << 15  # of statistics beside the output, which keep whole rows of weights in the caches


def why_unsupported(problem: Problem, values: bool = True) -> list[str]:
    """Return why the kernel doesn't support a problem; empty if it does.

    values: True if an output is needed, False for scores only.
    """
    p, n = problem, problem.shape
    if not p.q.is_cpu:
        return [f"it runs on the CPU, and q is on {p.q.device}"]
    reasons = []
    if library.missing is not None:
        reasons.append(library.missing)
    reasons += chunked.why_unsupported(p)
    if p.q.dtype not in DTYPES:
        reasons.append(f"it computes in {', '.join(map(str, DTYPES))}, and q is {p.q.dtype}")
    if p.dropout_p and values:
        reasons.append("it has no dropout")
    if 0 in (n if values else n[:-1]):
        reasons.append("a size is 0")
    if n.d > WIDEST or (n.w > WIDEST and values):
        reasons.append(f"it supports heads of at most {WIDEST} numbers, and these have {n.d} and {n.w}")
    size = tensor_bytes(p)
    if size > LIMIT:
        reasons.append(
            "parts of the mask and bias would have to become tensors of "
            f"{size / 2**20:,.0f} MB (at most {LIMIT // 2**20})"
        )
    return reasons


def why_slower(problem: Problem) -> list[str]:
    """Return why another kernel is faster for a problem; empty if none is."""
    return rules.why_slower(problem)


def built() -> str:
    """Return the build that this processor runs and whose threads it uses, or why there is none."""
    if library.width is None:
        return f"not available: {library.missing}"
    left_out = "; ".join(f"{build} wasn't built: {why}" for build, why in library.left_out.items())
    return (
        f"{library.WIDTHS[library.width]} of {', '.join(library.runs)}{left_out and f' ({left_out})'}, on "
        f"{'the threads of PyTorch' if library.shares_threads else 'threads of its own'}"
    )


def run(problem: Problem, spec: Spec | None = None) -> tuple[Tensor, Tensor | None, Found]:
    """Return the output `[b, h, t, w]`, the log-sum-exp `[b, h, t]`, and fused statistics if faster now.

    A few queries read keys as they lie where neither a gradient nor statistics would compute their scores
    again: it takes half as long, but sums them in another order than `tile`. There is no log-sum-exp then,
    and a map that is read computes its own.
    """
    if not _direct(problem):
        return *torch.ops.manyheads.native(*operator.arguments(problem)), {}
    if problem.wants_gradient():
        p, table = problem, None if problem.bias is None else problem.bias.tensor()
        return *Attention.apply(problem, p.q, p.k, p.v, p.sink, table), {}
    if spec is not None or _many(problem):
        return passes.forward(problem, spec if problem.shape.s <= MAX_KEYS else None)
    out = problem.q.new_empty(*problem.shape[:2], problem.shape.t, problem.shape.w)
    passes.attend(problem, out, None)
    return out, None, {}


def plan(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None:
    """Return a function from q, k, v and mask to the output `[b, h, t, w]`, for every problem of this layout.

    None for tensors that the library can't read as they are.
    """
    plan = Plan(problem)
    if not plan.only_addresses_differ:
        return None
    return plan.attend_with_gradient if problem.wants_gradient() else plan.attend


def gives_lse(problem: Problem) -> bool:
    """Return True if `run` gives the log-sum-exp when no statistics are computed with it."""
    return _many(problem) or problem.wants_gradient() or not _direct(problem)


_many = rules.many_queries


def reads(problem: Problem) -> bool:
    """Return True if maps of a problem read its scores by this kernel."""
    return problem.q.dtype != torch.float64 and not why_unsupported(problem, values=False)


def fuses(problem: Problem, in_place: bool = False) -> bool:
    """Return True if this kernel computes statistics of a problem's weights, faster than from tiles.

    in_place: True to return True only if no tensor is made of the mask and the bias.
    """
    return _direct(problem) and reads(problem) and not (in_place and tensor_bytes(problem))


def statistics(problem: Problem, spec: Spec | None, lse: Tensor | None = None) -> tuple[Tensor, Found]:
    """Return the log-sum-exp `[b, h, t]`, computed unless it is given, and the fused statistics of a spec."""
    p = problem.detach().without_values()
    found: Found = {}
    if lse is None:
        if not _direct(p):
            return torch.ops.manyheads.native(*operator.arguments(p))[1], {}
        _, lse, found = passes.forward(p, spec if p.shape.s <= MAX_KEYS else None)
    if spec is not None and not found:
        out = p.q.new_empty(*lse.shape, 0)
        found = passes.attend(p, out, lse.contiguous(), spec, known=True)
    return lse, found


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, as the kernel sums them; −inf where masked."""
    compute = passes.logits if _direct(problem) else scores.logits  # fake tensors have no numbers to read
    return scores.tile(problem, rows, cols, batch, heads, compute)


def _direct(p: Problem) -> bool:
    """Return True if the custom operator can be skipped: calling it takes longer than a small problem."""
    return not (
        torch.compiler.is_compiling()
        or not (type(p.q) in PLAIN and type(p.k) in PLAIN and type(p.v) in PLAIN)
        or torch._C._len_torch_dispatch_stack()
    )
