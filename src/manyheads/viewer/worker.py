"""One worker that does what is asked for, the most urgent first, so that nobody who asks is kept waiting.

Work is short: a tile, a row of weights, a step of a pass. What nobody waits for any more is dropped before it
begins.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any

NOW, SOON, LATER = range(3)  # what is under the pointer; what is in view; passes and measures


class Desk:
    """A thread and its queue; a daemon, which ends with the process or when closed."""

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any]]] = (
            queue.PriorityQueue()
        )
        self._number = itertools.count()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="manyheads viewer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a kernel that runs while the process ends takes it down

    def ask(self, work: Callable[[], Any], urgency: int = SOON) -> Future[Any]:
        """A future of what the work gives; one that is cancelled before its turn is never begun.

        Once the desk is closed it is cancelled already.
        """
        future: Future[Any] = Future()
        self._queue.put((urgency, next(self._number), future, work))
        if not self._thread.is_alive():
            self._drop()
        return future

    def ask_in_steps(self, steps: Iterator[Any], urgency: int = LATER) -> Future[Any]:
        """A future of the first thing that the steps yield but None; between them others have their turn."""
        found: Future[Any] = Future()

        def step() -> None:
            if found.cancelled():
                return
            try:
                answer = next(steps)
            except Exception as error:
                found.set_exception(error)
                return
            if answer is not None:
                found.set_result(answer)
            else:
                on()

        def on() -> None:
            self.ask(step, urgency).add_done_callback(lambda one: one.cancelled() and found.cancel())

        on()
        return found

    def close(self) -> None:
        """Do nothing more; returns when what is being done is done."""
        self._open = False
        self.ask(lambda: None, NOW - 1)
        self._thread.join()
        self._drop()
        atexit.unregister(self.close)

    def _drop(self) -> None:
        """Cancel what nobody will do."""
        while not self._queue.empty():
            self._queue.get()[2].cancel()

    def _work(self) -> None:
        while self._open:
            *_, future, work = self._queue.get()
            if self._open and future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # whoever waits for it is told
                    future.set_exception(error)
                give_back()


def give_back() -> None:
    """Hand freed memory back to the system, which glibc keeps: soon that is more than is in use."""
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Kept:
    """What was used last, up to so many bytes, but always the very last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._items: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """What is kept under a key, or None."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def put(self, key: Hashable, item: Any, size: Callable[[Any], int] = len) -> None:
        """Keep an item, and forget the oldest ones for it."""
        self._items[key] = item
        self._items.move_to_end(key)
        while len(self._items) > 1 and sum(map(size, self._items.values())) > self.most:
            self._items.popitem(last=False)
