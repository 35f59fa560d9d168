"""`accelerate`: PyTorch's scaled_dot_product_attention on this library's CPU kernel, where that is faster.

    with manyheads.accelerate() as report:
        model(inputs)
    print(report)

A call goes to the native kernel if `kernel="auto"` would choose it, and if it differs from PyTorch's in
nothing but rounding and time. Other calls are PyTorch's, with the same arguments. What was decided is
remembered for the layout of a call: its sizes, strides, dtypes and options.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic
from torch.utils._device import DeviceContext

from manyheads import sdpa_hooks
from manyheads.biases import Dense
from manyheads.functional import autocast
from manyheads.kernels import native, plans
from manyheads.kernels.native.autograd import Attention, Plan
from manyheads.kernels.native.passes import attend
from manyheads.masks import Causal, Keep, Mask
from manyheads.problem import Problem
from manyheads.scores import disable_autocast
from manyheads.shapes import PLAIN, sizes

# The fewest multiply-adds b·h·t·s·(d + w) for which the native kernel is faster, by whether a gradient is
# recorded and by the mask tensor: finding the plan or packing the mask of a call takes 10 to 100 µs. Measured
# on a Zen 4 processor with two threads, 8 heads of 64; the second number is for half precision.
LEAST = {
    (False, None): (1 << 20, 1 << 15),
    (False, "bool"): (1 << 23, 1 << 20),
    (False, "float"): (1 << 25, 1 << 22),
    (True, None): (1 << 23, 1 << 16),
    (True, "bool"): (1 << 26, 1 << 18),
    (True, "float"): (1 << 27, 1 << 22),
}

NATIVE = "native"
TORCH = "torch"


class Row(NamedTuple):
    """Calls that were computed by the same kernel for the same reason.

    Attributes:
        kernel: "native" or "torch".
        reason: Why PyTorch computed them; empty for "native".
        calls: The number of calls.
        example: The shapes and the dtype of the first of them.
    """

    kernel: str
    reason: str
    calls: int
    example: str


class Acceleration:
    """Computes calls of scaled_dot_product_attention by the native kernel while it is on, and reports them.

    It is a context manager; `enable` and `disable` turn it on and off without a block. It can be nested, and
    used again: the report goes on.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Row] = {}
        self._depth = 0

    # -- on and off --------------------------------------------------------------------------------

    def enable(self) -> Acceleration:
        """Accelerate calls until `disable` is called, on all threads.

        Returns:
            This object, which is also the report.
        """
        with _lock:
            self._depth += 1
            if self not in _active:
                _active.append(self)
            sdpa_hooks.set_compute(_compute)
        return self

    def disable(self) -> None:
        """End the last `enable` or block; PyTorch computes all calls again if there is no other.

        Raises:
            RuntimeError: If it isn't on.
        """
        with _lock:
            if not self._depth:
                raise RuntimeError("Expected disable after enable, got an acceleration that isn't on.")
            self._depth -= 1
            if not self._depth:
                _active[:] = [each for each in _active if each is not self]
            if not _active:
                sdpa_hooks.set_compute(None)

    def __enter__(self) -> Acceleration:
        return self.enable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    # -- the report --------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """The calls by kernel and reason, the native kernel's first, then the most frequent."""
        with _lock:
            rows = list(self._found.values())
        return sorted(rows, key=lambda row: (row.kernel != NATIVE, -row.calls))

    @property
    def accelerated(self) -> int:
        """The number of calls that the native kernel computed."""
        return sum(row.calls for row in self.rows if row.kernel == NATIVE)

    @property
    def total(self) -> int:
        """The number of calls of scaled_dot_product_attention while it was on."""
        return sum(row.calls for row in self.rows)

    def explain(self) -> dict[str, dict[str, int]]:
        """Print what computed the calls, and why the native kernel didn't compute the others.

        Returns:
            The number of calls by kernel and reason: `{"native": {"": 24}, "torch": {"dropout": 2}}`.
        """
        print(self)
        found: dict[str, dict[str, int]] = {NATIVE: {}, TORCH: {}}
        for row in self.rows:
            found[row.kernel][row.reason] = row.calls
        return found

    def __str__(self) -> str:
        lines = [f"{self.accelerated} of {self.total} calls of scaled_dot_product_attention were accelerated"]
        for row in self.rows:
            reason = f": {row.reason}" if row.reason else ""
            lines.append(f"  {row.kernel:<7}{row.calls:>7}{reason}  (such as {row.example})")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self}>"

    def _note(self, kernel: str, reason: str, example: Callable[[], str]) -> None:
        with _lock:
            row = self._found.get((kernel, reason))
            if row is None:
                row = Row(kernel, reason, 0, example())
            self._found[kernel, reason] = row._replace(calls=row.calls + 1)


def accelerate() -> Acceleration:
    """Compute PyTorch's scaled_dot_product_attention by the native kernel on the CPU, where it is faster.

    For example::

        with manyheads.accelerate() as report:
            model(inputs)
        print(report)

    `manyheads.accelerate().enable()` accelerates the rest of the process, or until `disable`.

    A call is accelerated on any thread, whether a model makes it or code that a model uses, such as
    `torch.nn.MultiheadAttention` and transformers with `sdpa`, if it reads the function from
    `torch.nn.functional`. Outputs and gradients are within the error budget. These calls stay PyTorch's:
    other devices; dropout; a choice by `torch.nn.attention.sdpa_kernel`; `torch.compile`, `torch.func` and
    other transforms; tensor subclasses and nested tensors; gradients that PyTorch can differentiate twice or
    that reach a mask; and those that are small, or for which another kernel is faster.

    Returns:
        The `Acceleration`: a context manager, and the report.
    """
    return Acceleration()


_lock = threading.RLock()
_active: list[Acceleration] = []


# -- calls -----------------------------------------------------------------------------------------


class _Thread(threading.local):
    noted = 0  # the number of calls that were reported


_thread = _Thread()
_CAUSAL = Causal()
_decisions: dict[
    Any, plans.Call | str
] = {}  # by layout: a function of q, k and v, or why PyTorch computes it


def _compute(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute a call of scaled_dot_product_attention by the native kernel or by the original function."""
    try:
        found = _find(*args, **kwargs)
    except (TypeError, ValueError):  # PyTorch computes it, or raises its own error
        found = "its arguments aren't supported"
    if isinstance(found, str):
        before = _thread.noted
        kernel, reason, out = TORCH, found, original(*args, **kwargs)
        if _thread.noted != before:  # the mode of `observe` passes the call on to this function
            return out
    else:
        kernel, reason, out = NATIVE, "", found()
    _thread.noted += 1
    for acceleration in tuple(_active):
        acceleration._note(kernel, reason, lambda: _describe(*args, **kwargs))
    return out


def _describe(query: Tensor, key: Tensor, *_: Any, **__: Any) -> str:
    """Return the shapes and the dtype of a call as the report prints them."""
    with torch._C.DisableTorchFunction():  # which a caller's TorchFunctionMode would see
        if query.is_nested:
            return "nested tensors"
        if torch.jit.is_tracing():  # sizes are tensors then, and PyTorch warns if their numbers are read
            return f"a traced call, {str(query.dtype).removeprefix('torch.')}"
        return f"q {sizes(query)}, k {sizes(key)}, {str(query.dtype).removeprefix('torch.')}"


def _find(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Callable[[], Tensor] | str:
    """Return a function that computes a call, or why PyTorch computes it."""
    if has_torch_function_variadic(query, key, value) and not _only_default_device(query, key, value):
        return "a tensor subclass or a TorchFunctionMode is in use"
    if not all(type(x) in PLAIN for x in (query, key, value)):
        return "a tensor subclass or a TorchFunctionMode is in use"
    if type(is_causal) is not bool or type(enable_gqa) is not bool or type(dropout_p) not in (float, int):
        raise TypeError("PyTorch raises its own error")
    if dropout_p != 0:
        return "it has dropout"
    if not (torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled()):
        return "torch.nn.attention.sdpa_kernel or torch.backends.cuda selects PyTorch's kernel"
    if attn_mask is not None or query.dim() != 4 or not query.is_cpu or torch._C._is_any_autocast_enabled():
        return _find_general(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    # The kernel and its arguments are remembered for the layout.
    mask = _CAUSAL if is_causal else None
    kind = "grouped" if enable_gqa else "heads"
    layout = plans.layout(query, key, value, mask, None, scale, None, None, 0.0, 0, kind)
    if layout is None:
        return _find_general(query, key, value, None, is_causal, scale, enable_gqa)
    run = _decisions.get(layout)
    if run is None:
        problem = _problem(query, key, value, None, is_causal, scale, enable_gqa)
        run = _why_torch(problem)
        if not run:
            plan = _Plan(problem)
            if not plan.only_addresses_differ:
                return _find_general(query, key, value, None, is_causal, scale, enable_gqa)
            run = plan.attend_with_gradient if problem.wants_gradient() else plan.attend
        if len(_decisions) >= plans.MAX_LAYOUTS:
            _decisions.clear()
        _decisions[layout] = run
    if isinstance(run, str):
        return run
    found = run
    return lambda: found(query, key, value, mask)


class _Plan(Plan):
    """A plan whose output has the strides of PyTorch's."""

    @staticmethod
    def output_allocator(q: Tensor, sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return a function that allocates an output `[b, h, t, w]`, given q."""
        return partial(_new_out, w=sizes[-1])


def _new_out(q: Tensor, w: int) -> Tensor:
    """Return an empty output `[b, h, t, w]`, whose axes have the order of those of q in memory."""
    return torch.empty_like(q) if w == q.shape[-1] else q.new_empty(*q.shape[:-1], w)


def _find_general(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Callable[[], Tensor] | str:
    """Find the same for calls that aren't remembered: with a mask tensor, other dimensions, or autocast."""
    for x in (query, key, value) if attn_mask is None else (query, key, value, attn_mask):
        reason = _why_not_plain(x)
        if reason:
            return reason
    if torch.is_grad_enabled() and attn_mask is not None and attn_mask.requires_grad:
        return "its mask needs a gradient"
    dims = query.dim()
    problem = _problem(*autocast(query, key, value), attn_mask, is_causal, scale, enable_gqa)
    reason = _why_torch(problem)
    if reason:
        return reason
    if dims != 4 and problem.wants_gradient():
        return "it needs a gradient, and hasn't four dimensions: PyTorch can differentiate it twice"

    def run() -> Tensor:
        with disable_autocast(query.device):
            q, w = problem.q, problem.shape.w
            if problem.wants_gradient():
                out = Attention.apply(problem, q, problem.k, problem.v, None, None)[0]
                return out if q.is_contiguous() else torch.empty_like(q).copy_(out)
            out = _new_out(q, w)
            attend(problem, out, None)
            return out if dims == 4 else out.reshape(*query.shape[:-1], w)

    return run


def _why_not_plain(x: Tensor) -> str | None:
    """Return why a tensor's memory can't be read here, or None."""
    if not x.is_cpu:
        return f"it runs on {x.device.type}"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "a graph is being traced"
    if peek_interpreter_stack() is not None or torch._C._functorch.is_legacy_batchedtensor(x):
        return "torch.func or torch.vmap transforms it"
    if forward_ad._current_level >= 0:
        return "it may have forward-mode derivatives"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is in use"
    if type(x) not in PLAIN:
        return "a tensor subclass or a TorchFunctionMode is in use"
    if x.is_nested or x.layout != torch.strided:
        return "a tensor is nested or sparse"
    return None


def _only_default_device(*tensors: Tensor) -> bool:
    """Return True if only `torch.set_default_device` intercepts functions, which doesn't concern these."""
    stack = _get_current_function_mode_stack()
    return all(type(x) in PLAIN for x in tensors) and all(type(mode) is DeviceContext for mode in stack)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Problem:
    """Return a call as a problem; raise TypeError or ValueError if it isn't one."""
    if attn_mask is not None and (is_causal or attn_mask.dim() < 2):
        raise ValueError("PyTorch raises its own error")
    if min(x.dim() for x in (q, k, v)) < 2:
        raise ValueError("PyTorch raises its own error")
    batch = q.shape[:-3]
    q, k, v = (_four_axes(x, batch) for x in (q, k, v))
    h = q.shape[1]
    if not enable_gqa and (k.shape[1] != h or v.shape[1] != h):
        raise ValueError("PyTorch may broadcast the heads")
    mask: Mask | None = _CAUSAL if is_causal else None
    bias = None
    if attn_mask is not None:
        tensor = _four_axes(attn_mask, batch)
        if tensor.dtype == torch.bool:
            mask = Keep(tensor)
        elif tensor.dtype in (torch.float32, q.dtype):
            bias = Dense(tensor)
        else:
            raise TypeError("PyTorch may not support it")
    return Problem.of(q, k, v, mask=mask, bias=bias, scale=scale, offset=0)


def _four_axes(x: Tensor, batch: torch.Size) -> Tensor:
    """Return x `[…, t, d]` with four axes, of which the first has all axes of the batch `[…]`."""
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    return x if len(batch) < 2 else x.expand(*batch, *x.shape[-3:]).flatten(0, -4)


def _why_torch(problem: Problem) -> str:
    """Return why PyTorch computes a problem; empty if the native kernel does."""
    shape = problem.shape
    reasons = native.why_unsupported(problem) or native.why_slower(problem)
    if reasons:
        return reasons[0]
    tensor = "float" if problem.bias is not None else "bool" if isinstance(problem.mask, Keep) else None
    least = LEAST[problem.wants_gradient(), tensor][problem.q.element_size() < 4]
    if shape.b * shape.h * shape.t * shape.s * (shape.d + shape.w) < least:
        return "it is so small that PyTorch's function is faster"
    if problem.wants_gradient():
        if shape.w != shape.d:
            return "it needs a gradient, and values of another width: PyTorch can differentiate it twice"
        if any(x.stride(-1) != 1 for x in (problem.q, problem.k, problem.v)):
            return "it needs a gradient, and a strided last dimension: PyTorch can differentiate it twice"
    return ""
