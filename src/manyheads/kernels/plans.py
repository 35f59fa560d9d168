"""Plans: what was decided about a call of `attention`, for the next calls of the same layout.

At one query, checks and the choice of a kernel take longer than the kernel. Unless a mask, bias or sink holds
tensors, they depend on nothing but sizes, strides, dtypes and options: the layout of a call. Its problem, but
for q, k and v, and its kernel are kept when the layout is met for the second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from manyheads import kernels
from manyheads.masks import Band
from manyheads.problem import Problem

Layout = tuple[Any, ...]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → the output

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
        and (mask is None or isinstance(mask, Band))
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and type(dropout_p) is float
        and (offset is None or type(offset) is int)
        and type(kernel) is str
    ):
        return None
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    band = None if mask is None else mask.band()
    try:
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.is_neg(), k.is_neg(), v.is_neg(), band, scale, softcap, dropout_p, offset, kernel, grad,
            torch.get_num_threads(),
        )  # fmt: skip
    except RuntimeError:  # nested and sparse tensors have no sizes or strides
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
    """Return a function of q, k and v that computes every problem of this layout."""
    chosen = kernels.choose(problem, kernel)
    call = chosen.plan(problem) if hasattr(chosen, "plan") else None
    if call is not None:
        return call
    options = problem.options  # and not the problem, whose tensors would stay in memory

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.compute(Problem(q, k, v, *options), chosen, kernel).out

    return compute
