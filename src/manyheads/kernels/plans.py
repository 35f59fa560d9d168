"""Plans: cached options and kernels for repeated calls of `attention`.

For a single query, checking the arguments and choosing a kernel take longer than the kernel. Without a bias
or sink, and with a mask that is a band, lengths or both, they depend only on sizes, strides, dtypes and
options: the layout of the call. The second call of a layout makes its plan: the options and the kernel. Later
calls use the plan; they differ only in q, k, v and a tensor of lengths.
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

MAX_LAYOUTS = 1024  # cached layouts, at most; in generation, each token has a new layout

_plans: dict[Layout, Call | None] = {}  # None after the first call of a layout


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
    """Return the layout of a call; None if its checks or its kernel depend on more than the layout."""
    if (
        torch.compiler.is_compiling()
        or not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor)
        or not (q.device == k.device == v.device)
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return None
    # The types are checked because True == 1.0: True must raise an error, and not use the plan for 1.0.
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
    mask_layout = None if mask is None else _describe(mask)
    if mask is not None and mask_layout is None:
        return None
    try:
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.is_neg(), k.is_neg(), v.is_neg(), mask_layout, scale, softcap, dropout_p, offset, kernel, grad,
            torch.get_num_threads(), q.device,
        )  # fmt: skip
    except RuntimeError:  # nested and sparse tensors have no sizes or strides
        return None


def _describe(mask: Any) -> Layout | None:
    """Return the part of a layout for a mask, without the values of lengths; None if it isn't supported."""
    if isinstance(mask, Band):
        return mask.band()
    if type(mask) is Lengths:
        n, side = mask.n, "left" if mask.left else "right"
        if type(n) is Tensor:
            return (side, n.shape, n.device)
        return (side, n) if type(n) is int else None
    if type(mask) is And and isinstance(mask.left, Band | Lengths) and isinstance(mask.right, Band | Lengths):
        parts = _describe(mask.left), _describe(mask.right)
        are_bands = isinstance(mask.left, Band), isinstance(mask.right, Band)
        return None if None in parts or are_bands == (False, False) else (*are_bands, *parts)
    return None


def find(layout: Layout | None) -> Call | None:
    """Return the plan for a layout; None if there is none yet."""
    return _plans.get(layout)  # type: ignore[arg-type]


def remember(layout: Layout, problem: Problem, kernel: str) -> None:
    """Record a call of this layout, and make its plan at the second call."""
    if layout in _plans:
        _plans[layout] = _plan(problem, kernel)
        return
    if len(_plans) >= MAX_LAYOUTS:
        _plans.clear()
    _plans[layout] = None


def forget() -> None:
    """Delete all plans, for tests that change which problems kernels support."""
    _plans.clear()


def _plan(problem: Problem, kernel: str) -> Call:
    """Return a function that computes every problem of this layout."""
    chosen = kernels.choose(problem, kernel)
    call = chosen.plan(problem) if hasattr(chosen, "plan") else None
    if call is not None:
        return call
    # `compute` must not refer to the problem, because that would keep its tensors in memory.
    _, *options = problem.options
    offset, s = problem.offset, problem.shape.s

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        bound = None if mask is None else mask.bind(offset, s)
        return kernels.compute(Problem(q, k, v, bound, *options), chosen, kernel).out

    return compute
