"""Compute the viewer's responses in a background thread, in order of priority.

Work is split into short steps (a tile, a row of weights, a part of a scan), so that no request waits long for
another. A request that is cancelled before its turn is never computed.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

URGENT, NORMAL, BACKGROUND = range(3)  # the weight under the pointer; tiles in view; scans and head scores


class Worker:
    """A daemon thread with a priority queue, which ends with the process or when closed."""

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Future[Any], Generator[None, None, Any]]] = (
            queue.PriorityQueue()
        )
        self._numbers = itertools.count()  # steps of equal priority run in the order of their numbers
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="manyheads viewer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a kernel that is still running at exit would crash the process

    def submit(self, work: Callable[[], Any], priority: int = NORMAL) -> Future[Any]:
        """Queue work.

        Args:
            work: A function that returns the result, or a generator that yields between its steps, so that
                other requests can run, and returns the result.
            priority: `URGENT`, `NORMAL` or `BACKGROUND`.

        Returns:
            A future of the result, which is cancelled if the worker is closed.
        """

        def steps() -> Generator[None, None, Any]:
            result = work()
            return (yield from result) if inspect.isgenerator(result) else result

        future: Future[Any] = Future()
        self._put(priority, future, steps())
        if not self._thread.is_alive():
            self._cancel_all()
        return future

    def close(self) -> None:
        """Finish the current step, cancel all other work and end the thread."""
        self._is_open = False
        self.submit(lambda: None, URGENT - 1)  # wakes the thread
        self._thread.join()
        self._cancel_all()
        atexit.unregister(self.close)

    def _put(self, priority: int, future: Future[Any], steps: Generator[None, None, Any]) -> None:
        self._queue.put((priority, next(self._numbers), future, steps))

    def _cancel_all(self) -> None:
        while not self._queue.empty():
            self._queue.get()[2].cancel()

    def _run(self) -> None:
        while self._is_open:
            priority, _, future, steps = self._queue.get()
            if not self._is_open or future.cancelled():
                future.cancel()
                continue
            try:
                next(steps)
            except StopIteration as end:
                if future.set_running_or_notify_cancel():
                    future.set_result(end.value)
            except BaseException as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            else:
                self._put(priority, future, steps)
            _release_memory()


def _release_memory() -> None:
    """Return freed memory to the system, because glibc would keep much of it."""
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
