"""Plans: what was decided about a call of `attention`, for the next calls of the same layout.

At one query, checks and the choice of a kernel take longer than the kernel. Without bias and sink, and with a
mask that is a band, lengths or both, they depend only on sizes, strides, dtypes and options: the layout of a
call. When a layout is met for the second time, its options and its kernel are kept for the next calls, which
differ in q, k, v and the numbers of the lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from manyheads import kernels
from manyheads.masks import And, Band, Lengths
from manyheads.problem import Problem

Layout = tuple[Any, ...]
Call = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # q, k, v, mask → the output

MOST = 1024  # layouts that are remembered; generation meets a new one with every token

_plans: dict[Layout, Call | None] = {}  # None for a layout that was met once


def layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    bias: Any,
    scale: Any,
    softcap: Any,
    sink: Any,
    dropout_p: Any,
    offset: Any,
    kernel: Any,
) -> Layout | None:
    """Return what decides the checks and the kernel of a call; None where more than this does."""
    if (
        torch.compiler.is_compiling()
        or not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor)
        or not (q.is_cpu and k.is_cpu and v.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return None
    # Numbers of other types equal these (True == 1.0), but are errors.
    if not (
        bias is None
        and sink is None
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and type(dropout_p) is float
        and (offset is None or type(offset) is int)
        and type(kernel) is str
    ):
        return None
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    described = None if mask is None else _describe(mask)
    if mask is not None and described is None:
        return None
    try:
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.is_neg(), k.is_neg(), v.is_neg(), described, scale, softcap, dropout_p, offset, kernel, grad,
            torch.get_num_threads(),
        )  # fmt: skip
    except RuntimeError:  # nested and sparse tensors have no sizes or strides
        return None


def _describe(mask: Any) -> Layout | None:
    """Return what a layout has of a mask: all but a tensor of lengths. None for masks without plans."""
    if isinstance(mask, Band):
        return mask.band()
    if type(mask) is Lengths:
        n, side = mask.n, "left" if mask.left else "right"
        if type(n) is Tensor:
            return (side, n.shape) if n.is_cpu else None
        return (side, n) if type(n) is int else None
    if type(mask) is And and isinstance(mask.left, Band | Lengths) and isinstance(mask.right, Band | Lengths):
        parts = _describe(mask.left), _describe(mask.right)
        kinds = isinstance(mask.left, Band), isinstance(mask.right, Band)
        return None if None in parts or kinds == (False, False) else (*kinds, *parts)
    return None


def find(layout: Layout | None) -> Call | None:
    """Return the plan for a layout; None if there is none yet."""
    return _plans.get(layout)  # type: ignore[arg-type]


def remember(layout: Layout, problem: Problem, kernel: str) -> None:
    """Note that a problem of this layout is computed, and make its plan the second time."""
    if layout in _plans:
        _plans[layout] = _plan(problem, kernel)
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[layout] = None


def forget() -> None:
    """Drop all plans: where a test changes what kernels support, they are wrong."""
    _plans.clear()


def _plan(problem: Problem, kernel: str) -> Call:
    """Return a function that computes every problem of this layout."""
    chosen = kernels.choose(problem, kernel)
    call = chosen.plan(problem) if hasattr(chosen, "plan") else None
    if call is not None:
        return call
    _, *options = problem.options  # and not the problem, whose tensors would stay in memory
    offset, s = problem.offset, problem.shape.s

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        bound = None if mask is None else mask.bind(offset, s)
        return kernels.compute(Problem(q, k, v, bound, *options), chosen, kernel).out

    return compute
