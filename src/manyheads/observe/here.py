"""Which observed module is running here, on this thread; and `attend`, where every route comes together.

Modules of an observed model say when they begin and end. The innermost one is where an attention call
belongs. Between the first and the last, a mode stands in the way of PyTorch's functions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from manyheads.scores import Problem
from manyheads.shapes import kind, sizes

if TYPE_CHECKING:
    from manyheads.observe.recorder import Watch


KERNEL, COMPILE = F.scaled_dot_product_attention, torch.compile
_open: list[Watch] = []  # observations whose block runs, on whatever thread
_stance: Any = None  # what makes compiled code run as it was written, set while something is observed
_lock = threading.Lock()


class _Here(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[Watch, str]] = []  # observed modules, the innermost last
        self.mode: TorchFunctionMode | None = None
        self.quiet = False


_here = _Here()


def enter(watch: Watch, path: str) -> None:
    """A module of an observed model begins."""
    with _lock:
        watch.active += 1
    if _here.mode is None:
        from manyheads.observe.intercept import Stand

        _here.mode = Stand()
        _here.mode.__enter__()
    _here.running.append((watch, path))


def leave(watch: Watch, path: str) -> None:
    """It ends, whether well or not."""
    if (watch, path) not in _here.running:
        return
    while (ended := _here.running.pop()) != (watch, path):
        _count_down(ended[0])
    _count_down(watch)
    _step_aside()


def runs(watch: Watch, path: str) -> bool:
    """Does this module run on this thread?"""
    return (watch, path) in _here.running


def forget(watch: Watch) -> None:
    """Whatever of this watch runs on this thread was interrupted: its modules won't say that they end."""
    for one, _ in _here.running:
        if one is watch:
            _count_down(watch)
    _here.running = [(one, path) for one, path in _here.running if one is not watch]
    _step_aside()


def _count_down(watch: Watch) -> None:
    with _lock:
        watch.active -= 1


def _step_aside() -> None:
    if not _here.running and _here.mode is not None:
        mode, _here.mode = _here.mode, None
        mode.__exit__(None, None, None)


@contextmanager
def overheard(watch: Watch) -> Iterator[None]:
    """While the block runs, attention on threads where no observed module runs is counted, not missed."""
    with _lock:
        if not _open:
            F.scaled_dot_product_attention, torch.compile = _overhear, _compile
            if "torch._dynamo" in sys.modules:  # else nothing is compiled yet, and the import takes a second
                _run_eagerly()
        _open.append(watch)
    try:
        yield
    finally:
        with _lock:
            _open.remove(watch)
            if not _open:
                F.scaled_dot_product_attention, torch.compile = KERNEL, COMPILE
                _run_compiled()


def _run_eagerly() -> None:
    """Run compiled models and functions as they were written, because compiled code runs no hooks."""
    global _stance
    if _stance is None:
        _stance = torch.compiler.set_stance("force_eager")


def _run_compiled() -> None:
    """Run them compiled again."""
    global _stance
    if _stance is not None:
        _stance.__exit__(None, None, None)
        _stance = None


@contextmanager
def _compiled() -> Iterator[None]:
    """Run compiled code compiled for a while: on a GPU, FlexAttention has to be."""
    with _lock:
        _run_eagerly()  # so that what is compiled meanwhile doesn't set it
    with torch.compiler.set_stance("default"):
        yield


def _compile(*args: Any, **kwargs: Any) -> Any:
    """Compile as `torch.compile` does; while something is observed, the result runs as it was written."""
    compiled = COMPILE(*args, **kwargs)
    with _lock:
        if _open:
            _run_eagerly()
    return compiled


def _in_a_module() -> bool:
    """Is this called by a module, which then is another model's?"""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame is not None


def _overhear(*args: Any, **kwargs: Any) -> Tensor:
    # The name may have been bound for good by who imported it meanwhile.
    if not _open or torch.compiler.is_compiling():
        return KERNEL(*args, **kwargs)
    if not _here.running and not _here.quiet and not _in_a_module():
        for watch in list(_open):
            watch.strays += watch.active > 0
    return KERNEL(*args, **kwargs)


@contextmanager
def unseen() -> Iterator[None]:
    """A time in which nothing is recorded and nothing stands in the way."""
    before, _here.quiet = _here.quiet, True
    try:
        if _here.mode is not None and _get_current_function_mode() is _here.mode:
            with _pop_mode_temporarily():
                yield
        else:
            yield
    finally:
        _here.quiet = before


def attend(
    problem: Problem,
    own: Callable[[], Tensor],
    heads: int | None = 1,
    lse: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """Record an attention call for all who observe the module that runs here; what `own` computes.

    problem: what is computed, with masks as values. own: lets the model's own kernel compute; what it
    calls isn't recorded again. heads: the axis of its output that counts query heads, so that removed
    ones can be zeroed; None if there is none. lse: the log-sum-exp `[b, h, t]`, if `own` found it.

    A recomputation within backward (checkpointing) isn't a call. Where nobody observes, `own()`. The output
    comes back as `own` shapes it, `[...]`. Raises ValueError for q or k that hold no numbers, and
    MemoryError where maps would exceed max_bytes.
    """
    if _here.quiet or not _here.running:
        return own()
    for x in (problem.q, problem.k):
        check(x, "an attention call's input")
    watching = dict(_here.running)  # of several modules of one watch, the innermost
    on_cpu = problem.q.device.type == "cpu"
    with unseen():
        with nullcontext() if on_cpu else _compiled():
            out = own()
        again = torch._C._current_graph_task_id() != -1
        for watch, path in watching.items():
            if not again and not watch.closed:
                watch.record(path, problem, lse())
    return out if heads is None else without(out, heads)


def without(x: Tensor, heads: int = 1) -> Tensor:
    """x with zeros for the heads that somebody removes from the module that runs here."""
    if _here.quiet:
        return x
    for watch, path in dict(_here.running).items():
        gone = watch.removed(path, x.shape[heads])
        if gone:
            x = x.index_fill(heads, torch.tensor(gone, device=x.device), 0.0)
    return x


def by_hand(scores: Any) -> None:
    """Note a softmax that no attention call made, for all who observe the module that runs here."""
    if isinstance(scores, Tensor) and not _here.quiet:
        for watch, path in dict(_here.running).items():
            watch.note(path, scores)


def check(x: Any, what: str) -> None:
    """A tensor whose numbers a map can keep, or a sentence."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor, and {kind(x)} came.")
    why = None
    if x.is_nested:
        why = "is a nested tensor, whose sequences have no common length: pad it and give a mask"
    elif torch._C._functorch.is_functorch_wrapped_tensor(x):
        why = "is inside a torch.func transform: call the model plainly"
    elif x.is_meta or isinstance(x, FakeTensor):
        why = "has a shape but no numbers: observe a model that computes"
    if why:
        raise ValueError(f"{what} can't be observed, as it {why}.")
    if x.dim() < 2:
        raise ValueError(f"{what} must be [..., length, width], and {sizes(x)} came.")


def removing() -> bool:
    """Does anybody remove a head of the module that runs here?"""
    return any(watch.removes(path) for watch, path in dict(_here.running).items()) and not _here.quiet
