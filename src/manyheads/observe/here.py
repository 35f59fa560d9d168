"""Which observed module is running here, on this thread; and `attend`, where every route comes together.

Modules of an observed model say when they begin and end. The innermost one is where an attention call
belongs. Between the first and the last, a mode stands in the way of PyTorch's functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from manyheads.scores import Problem

if TYPE_CHECKING:
    from manyheads.observe.watch import Watch


class _Here(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[Watch, str]] = []  # observed modules, the innermost last
        self.mode: TorchFunctionMode | None = None
        self.quiet = False


_here = _Here()


def enter(watch: Watch, path: str) -> None:
    """A module of an observed model begins."""
    if _here.mode is None:
        from manyheads.observe.routes import Stand

        _here.mode = Stand()
        _here.mode.__enter__()
    _here.running.append((watch, path))


def leave(watch: Watch, path: str) -> None:
    """It ends, whether well or not."""
    if (watch, path) not in _here.running:
        return
    while _here.running.pop() != (watch, path):
        pass
    if not _here.running and _here.mode is not None:
        mode, _here.mode = _here.mode, None
        mode.__exit__(None, None, None)


@contextmanager
def unseen() -> Iterator[None]:
    """A time in which nothing is recorded and nothing stands in the way."""
    before, _here.quiet = _here.quiet, True
    try:
        with torch.compiler.set_stance("default"):
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
    ones can be zeroed; None if there is none. lse: the log-sum-exp, if `own` found it.

    A recomputation within backward (checkpointing) isn't a call. Where nobody observes, `own()`.
    """
    if _here.quiet or not _here.running:
        return own()
    watching = dict(_here.running)  # of several modules of one watch, the innermost
    with unseen():
        out = own()
        again = torch._C._current_graph_task_id() != -1
        for watch, path in watching.items():
            if not again:
                watch.record(path, problem, lse())
            gone = watch.removed(path, problem.shape.h)
            if gone and heads is not None:
                index = torch.tensor(gone, device=out.device)
                out = out.index_fill(heads, index, 0.0)
    return out


def removing() -> bool:
    """Does anybody remove a head of the module that runs here?"""
    return any(watch.removes(path) for watch, path in dict(_here.running).items()) and not _here.quiet
