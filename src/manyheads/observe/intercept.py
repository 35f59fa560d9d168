"""Intercept attention calls while modules of an observed model run.

The recorder's hooks call `enter` before and `leave` after the forward of each observed module, so that the
modules that run on each thread are known. An attention call belongs to the innermost of them. From the first
`enter` to the last `leave` on a thread, a `TorchFunctionMode` is active, to which PyTorch passes every call.
It intercepts

    scaled_dot_product_attention        also as an operator of an exported program
    multi_head_attention_forward        nn.MultiheadAttention and everything built on it
    flex_attention                      with a mask_mod, without a score_mod
    attention, attention_with_map       and the other functions of manyheads that compute weights

A handler translates its call into a `Problem`, lets the model's own kernel compute the output, records the
call and zeroes the output of ablated heads. A fused kernel that a model calls directly raises an error,
because the weights can't be derived from its arguments. A softmax outside of these functions is reported to
the observer: it may be part of attention that a module computes by itself, which can't be recorded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from inspect import signature
from traceback import walk_stack
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from manyheads import kernels, sdpa_hooks
from manyheads.biases import Dense
from manyheads.classic import common
from manyheads.functional import attention, attention_with_map, autocast, make_fusible
from manyheads.layouts import project_inputs, reshape_masks
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Rule
from manyheads.masks.recognize import collapse, first_position, split_masks, visible
from manyheads.problem import Problem
from manyheads.shapes import kind, sizes
from manyheads.statistics import Pass, Reduction

INTERCEPTED = (
    "torch.nn.functional.scaled_dot_product_attention, torch.nn.MultiheadAttention and what is built on it, "
    "flex_attention, Hugging Face's attention interface, and manyheads' own attention"
)

COMPILE = torch.compile


class Observer(Protocol):
    """The part of a `Recorder` that this module uses."""

    active: int  # the number of its modules that are running, on all threads
    strays: int  # the number of attention calls on threads on which no observed module was running
    closed: bool  # True if it no longer records
    statistics: Mapping[str, Any] | None  # the statistics to compute together with the output

    def record(
        self, path: str, problem: Problem, lse: Tensor | None, computed: Mapping[Any, Any] | None = None
    ) -> None:
        """Record an attention call of a module."""

    def note_softmax(self, path: str, scores: Tensor) -> None:
        """Note a softmax outside of attention calls."""

    def ablated(self, path: str, h: int) -> list[int]:
        """Return the ablated heads of a module that has h heads."""
        ...


# -- running modules -------------------------------------------------------------------------------

# (observer, path) of each running module, the innermost last. `dict(running)` therefore maps each observer to
# the path of its innermost module.
Running = tuple[tuple[Observer, str], ...]


class _Thread(threading.local):
    running: Running = ()
    mode: TorchFunctionMode | None = None
    paused = False


_thread = _Thread()
_lock = threading.Lock()


def enter(observer: Observer, path: str) -> None:
    """Add a module of an observed model to the running modules of this thread."""
    with _lock:
        observer.active += 1
    if _thread.mode is None:
        _thread.mode = Intercept()
        _thread.mode.__enter__()
    _thread.running += ((observer, path),)


def leave(observer: Observer, path: str) -> None:
    """Remove a module from the running modules, together with inner modules that an exception interrupted."""
    running = _thread.running
    if (observer, path) in running:
        last = max(n for n, pair in enumerate(running) if pair == (observer, path))
        _end(running[last:], running[:last])


def is_running(observer: Observer, path: str) -> bool:
    """Return True if this module runs on this thread."""
    return (observer, path) in _thread.running


def forget(observer: Observer) -> None:
    """Remove all modules of an observer on this thread, if an exception kept their hooks from running."""
    ended = tuple(pair for pair in _thread.running if pair[0] is observer)
    _end(ended, tuple(pair for pair in _thread.running if pair[0] is not observer))


def _end(ended: Running, running: Running) -> None:
    with _lock:
        for observer, _ in ended:
            observer.active -= 1
    _thread.running = running
    if not running and _thread.mode is not None:
        mode, _thread.mode = _thread.mode, None
        mode.__exit__(None, None, None)


def is_recording() -> bool:
    """Return True if an attention call on this thread would be recorded."""
    return bool(_thread.running) and not _thread.paused


@contextmanager
def paused(device: torch.device | None = None) -> Iterator[None]:
    """Don't intercept calls on this thread in the block, in which a kernel computes on `device`."""
    before, _thread.paused = _thread.paused, True
    on_top = _thread.mode is not None and _get_current_function_mode() is _thread.mode
    compiles = device is not None and device.type != "cpu"
    try:
        with _pop_mode_temporarily() if on_top else nullcontext(), _compiled() if compiles else nullcontext():
            yield
    finally:
        _thread.paused = before


# -- shared by all handlers ------------------------------------------------------------------------


def record_attention(problem: Problem, compute: Callable[[], Tensor], head_axis: int | None = 1) -> Tensor:
    """Compute attention, and record the call under the innermost running observed module of this thread.

    If no observed module is running, nothing is recorded. Attention calls inside `compute` aren't recorded,
    and neither are calls that activation checkpointing repeats during backward.

    Args:
        problem: The inputs of the call: q `[b, h, t, d]`, k `[b, g, s, d]`, the mask and the other options.
        compute: A function that computes the output `[...]` with the model's own kernel.
        head_axis: The axis of query heads in the output, along which ablated heads are zeroed; None if the
            output has no such axis.

    Returns:
        The output `[...]` of `compute`, with zeros for ablated heads.

    Raises:
        ValueError: If q or k has no numbers, as on the meta device.
        MemoryError: If the recording would exceed its max_bytes.
    """
    if not is_recording():
        return compute()
    check_readable("attention", q=problem.q, k=problem.k)
    with paused(problem.q.device):
        out = compute()
    record(problem)
    return out if head_axis is None else ablate(out, head_axis)


def record(problem: Problem, lse: Tensor | None = None, computed: Mapping[Any, Any] | None = None) -> None:
    """Record a finished call.

    Args:
        problem: The problem.
        lse: The log-sum-exp `[b, h, t]` if the kernel returned it.
        computed: Statistics by the keys of their reductions, if the kernel computed any.
    """
    if torch._C._current_graph_task_id() != -1:
        return  # backward is running: activation checkpointing repeats the call
    for observer, path in dict(_thread.running).items():
        if not observer.closed:
            observer.record(path, problem, lse, computed)


def ablate(x: Tensor, head_axis: int = 1) -> Tensor:
    """Return x with zeros for the ablated heads of the innermost running module of this thread."""
    for observer, path in dict(_thread.running).items():
        heads = observer.ablated(path, x.shape[head_axis])
        if heads:
            x = x.index_fill(head_axis, torch.tensor(heads, device=x.device), 0.0)
    return x


def check_readable(owner: str, **inputs: Any) -> None:
    """Check that the inputs of a call are tensors `[..., length, width]` whose numbers can be recorded."""
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"Expected {owner}'s {name} to be a tensor, got {kind(x)}.")
        reason = None
        if x.is_nested:
            reason = "is a nested tensor, whose sequences have no common length: pad it and pass a mask"
        elif torch._C._functorch.is_functorch_wrapped_tensor(x):
            reason = "is inside a torch.func transform: call the model without one"
        elif x.is_meta or isinstance(x, FakeTensor):
            reason = "has a shape but no numbers: observe a model on a real device"
        if reason:
            raise ValueError(f"{owner}'s {name} can't be observed, because it {reason}.")
        if x.dim() < 2:
            raise ValueError(f"Expected {owner}'s {name} to be [..., length, width], got {sizes(x)}.")


# -- changes to PyTorch while a model is observed --------------------------------------------------

_open: list[Observer] = []  # the observers, on all threads, whose `with` block is open
# The stance of torch.compiler while a model is observed. Compiled code runs no hooks, so it is run eagerly.
_stance: Any = None


@contextmanager
def intercepting(observer: Observer) -> Iterator[None]:
    """Run compiled code eagerly, and count attention calls on threads without a running observed module."""
    global _stance
    with _lock:
        if not _open:
            torch.compile = _compile
            sdpa_hooks.set_notify(_count_strays)
            # Before torch._dynamo is imported there is no compiled code, and importing it takes a second.
            if "torch._dynamo" in sys.modules:
                _run_eagerly()
        _open.append(observer)
    try:
        yield
    finally:
        with _lock:
            _open.remove(observer)
            if not _open:
                torch.compile = COMPILE
                sdpa_hooks.set_notify(None)
                if _stance is not None:
                    _stance.__exit__(None, None, None)
                    _stance = None


def _run_eagerly() -> None:
    global _stance
    if _stance is None:
        _stance = torch.compiler.set_stance("force_eager")


@contextmanager
def _compiled() -> Iterator[None]:
    """Run compiled code normally in this block, because FlexAttention needs to be compiled on a GPU."""
    with _lock:
        _run_eagerly()  # if not done here, the first torch.compile in the block does it, and undoes "default"
    with torch.compiler.set_stance("default"):
        yield


def _compile(*args: Any, **kwargs: Any) -> Any:
    """Compile as `torch.compile` does, but make compiled code run eagerly while a model is observed."""
    compiled = COMPILE(*args, **kwargs)
    with _lock:
        if _open:
            _run_eagerly()
    return compiled


def _count_strays() -> None:
    """Count an attention call if this thread has no running observed module."""
    if _thread.running or _thread.paused:
        return
    # If a module is on the call stack, the call belongs to a model that isn't observed.
    if not any(frame.f_code is nn.Module._call_impl.__code__ for frame, _ in walk_stack(sys._getframe())):
        for observer in list(_open):
            observer.strays += observer.active > 0


# -- the mode that intercepts calls ----------------------------------------------------------------


class Intercept(TorchFunctionMode):
    """Call the handler in place of an intercepted function, and any other function itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = None if _thread.paused else _handler(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, *args, **(kwargs or {}))


@lru_cache(maxsize=4096)
def _handler(func: Any) -> Callable[..., Any] | None:
    """Return the handler of a function, found by identity or by its name without the overload."""
    if func in HANDLERS:
        return HANDLERS[func]
    name = getattr(func, "__name__", "").partition(".")[0]
    if name == "scaled_dot_product_attention":
        return _scaled_dot_product_attention
    if name == "flex_attention":
        return _flex_attention
    return _fused_kernel if name.startswith(FUSED) else None


def _softmax(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Report the input of a softmax to the observers, then compute it."""
    scores = args[0] if args else kwargs.get("input")
    if isinstance(scores, Tensor):
        for observer, path in dict(_thread.running).items():
            observer.note_softmax(path, scores)
    return func(*args, **kwargs)


# The names of fused kernels begin with these words.
FUSED = (
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_native_multi_head_attention",
    "_triton_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)


def _fused_kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"The model calls the kernel {getattr(func, '__name__', func)} directly, which can't be observed. "
        "Call torch.nn.functional.scaled_dot_product_attention, which chooses a kernel."
    )


# -- manyheads -------------------------------------------------------------------------------------


def _attention(
    func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto", **options: Any
) -> Tensor:
    problem = Problem.of(*autocast(q, k, v), **options)
    check_readable("attention", q=q, k=k)
    with paused(problem.q.device):
        wanted = _wanted_statistics(problem)
        together = Pass(problem.detach().without_values(), list(wanted.values())) if wanted else None
        # Unlike `func`, this returns the log-sum-exp too.
        result = kernels.run(problem, kernel, None if together is None else together.spec)
        lse, computed = result.lse_of_map(problem), None
        if together is not None and result.fused and lse is not None:
            computed = dict(zip(wanted, together.results(lse, result.fused), strict=True))
    record(problem, lse, computed)
    return ablate(result.out)


def _wanted_statistics(problem: Problem) -> dict[Any, Reduction]:
    """Return the statistics to compute together with the output, by their keys.

    There are none if the kernel would compute the output in a different order with them.
    """
    wanted: dict[Any, Reduction] = {}
    for observer, _ in _thread.running:
        if observer.statistics and not observer.closed:
            wanted |= make_fusible(observer.statistics)
    is_same = bool(wanted) and kernels.fuses(problem) and kernels.load("native").gives_lse(problem)
    return wanted if is_same else {}


def _attention_with_map(
    func: Callable[..., tuple[Tensor, AttentionMap]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str = "auto",
    statistics: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, AttentionMap]:
    problem = Problem.of(*autocast(q, k, v), **options)
    check_readable("attention", q=q, k=k)
    with paused(problem.q.device):
        out, amap = func(q, k, v, kernel=kernel, statistics=statistics, **options)
    record(problem, amap.lse if amap.knows_lse else None)
    return ablate(out), amap


def _weigh(func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    # Ablated heads keep their weights; `mix` zeroes their output.
    problem = Problem.of(q, k, v, **options)
    return record_attention(problem, lambda: func(q, k, v, **options), head_axis=None)


def _mix(func: Callable[..., Tensor], weights: Tensor, v: Tensor) -> Tensor:
    return ablate(func(weights, v))


# -- PyTorch ---------------------------------------------------------------------------------------


def _scaled_dot_product_attention(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,  # scale, enable_gqa
) -> Tensor:
    check_readable("scaled_dot_product_attention", query=query, key=key, value=value)
    dims = max(x.dim() for x in (query, key, value))
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    q, k, v = (_four_axes(x, batch, dims) for x in autocast(query, key, value))
    h = max(q.shape[1], k.shape[1], v.shape[1])
    q = q.expand(-1, h, -1, -1)
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(h // max(x.shape[1], 1), 1) for x in (k, v))
    masks = {}
    # PyTorch's is_causal gives the first query the position of the first key. Without is_causal, more keys
    # than queries are assumed to be a cache: the position of the first query follows from a triangular mask;
    # without such a mask the last query has the position of the last key. (In cross-attention, positions have
    # no effect.)
    offset = 0 if is_causal else max(k.shape[2] - q.shape[2], 0)
    if attn_mask is not None:
        entries = collapse(_four_axes(attn_mask, batch, dims))
        masks["attn_mask"] = entries = entries.expand(*entries.shape[:3], k.shape[2])
        if offset:
            offset = first_position(visible(entries), q.shape[2], offset)
    mask, bias = split_masks(masks, offset, q.shape[2])
    if is_causal:
        mask = Causal() if mask is None else Causal() & mask
    problem = Problem.of(
        q,
        k,
        v,
        mask=mask,
        bias=None if bias is None else Dense(bias),
        scale=options.get("scale"),
        dropout_p=dropout_p,
        offset=offset,
    )

    attend = sdpa_hooks.compute if func is sdpa_hooks.SDPA else func  # `accelerate` may compute it

    def compute() -> Tensor:
        out = attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return out if dims > 3 else out.unsqueeze(-3)

    out = record_attention(problem, compute, head_axis=-3)
    return out if dims > 3 else out.squeeze(-3)


def _four_axes(x: Tensor, batch: torch.Size, dims: int) -> Tensor:
    """Return x `[..., h, t, d]` as `[b, h, t, d]` with the axes of `batch` flattened; h = 1 if dims < 4."""
    if dims < 4:
        return x[(None,) * (3 - x.dim())][:, None]
    x = x[(None,) * (4 - x.dim())]
    return x.expand(*batch, *x.shape[-3:]).flatten(0, -4)


_PARAMETERS = signature(F.multi_head_attention_forward)


def _multi_head(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    bound = _PARAMETERS.bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    problem = _multi_head_problem(options)
    # `func` concatenates the heads, so they are ablated by zeroing columns of the output projection.
    columns = options["out_proj_weight"].unflatten(1, (problem.shape.h, -1))  # [e, h, d]
    options["out_proj_weight"] = ablate(columns).flatten(1)
    results: tuple[Tensor, Tensor | None] = func(**options)
    record(problem)
    return results


def _multi_head_problem(options: dict[str, Any]) -> Problem:
    """Return the problem that F.multi_head_attention_forward computes with these arguments."""
    query, key, value = options["query"], options["key"], options["value"]
    check_readable("nn.MultiheadAttention", query=query, key=key, value=value)
    if options["static_k"] is not None or options["static_v"] is not None:
        raise ValueError(
            "multi_head_attention_forward with static_k or static_v can't be observed. Pass key and value."
        )
    if query.dim() == 2:
        query, key, value = (x[:, None] for x in (query, key, value))  # [t, 1, e]
    if options["use_separate_proj_weight"]:
        weights = [options[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        weights = options["in_proj_weight"].chunk(3)
    q, k, v = project_inputs((query, key, value), weights, options["in_proj_bias"])
    (t, b, _), s, h = q.shape, k.shape[0], options["num_heads"]  # q [t, b, e]
    padding, attn_mask = options["key_padding_mask"], options["attn_mask"]
    # With is_causal, PyTorch ignores attn_mask, unless padding or returned weights require a mask tensor.
    uses_is_causal = options["is_causal"] and padding is None and not options["need_weights"]
    masks = reshape_masks(padding, None if uses_is_causal else attn_mask, h, b, t, s)
    if options["bias_k"] is not None:
        k = torch.cat((k, options["bias_k"].expand(1, b, -1)))  # [s + 1, b, e]
        v = torch.cat((v, options["bias_v"].expand(1, b, -1)))
    if options["add_zero_attn"]:
        k, v = (torch.cat((x, x.new_zeros(1, b, x.shape[2]))) for x in (k, v))
    masks = {name: F.pad(x, (0, k.shape[0] - s)) for name, x in masks.items()}  # appended keys are visible
    mask, bias = split_masks({name: ~x if x.dtype == torch.bool else x for name, x in masks.items()})
    q, k, v = (x.unflatten(-1, (h, -1)).permute(1, 2, 0, 3) for x in (q, k, v))  # [b, h, t, d]
    dropout_p = options["dropout_p"] if options["training"] else 0.0
    return Problem.of(
        q,
        k,
        v,
        mask=Causal() if uses_is_causal else mask,
        bias=None if bias is None else Dense(bias),
        dropout_p=dropout_p,
        offset=0,
    )


def _flex_attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    query, key, value, score_mod, block_mask, scale, *_ = args
    check_readable("flex_attention", query=query, key=key, value=value)
    if getattr(score_mod, "__name__", "") != "_identity":
        raise ValueError(
            "flex_attention with a score_mod can't be observed, because a score_mod may be any function. Use "
            "a bias or softcap of manyheads.attention."
        )
    problem = Problem.of(query, key, value, mask=Rule(block_mask[-1]), scale=scale, offset=0)
    with paused(query.device):
        out, *rest = func(*args, **kwargs)
    record(problem)
    return ablate(out), *rest


HANDLERS: dict[Any, Callable[..., Any]] = {
    attention: _attention,
    attention_with_map: _attention_with_map,
    common.weigh: _weigh,
    common.mix: _mix,
    F.multi_head_attention_forward: _multi_head,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), _softmax),
}
