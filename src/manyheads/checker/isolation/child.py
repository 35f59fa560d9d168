"""The other side of `process.py`: reads requests, asks the subject, answers."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from . import protocol as wire
from .candidate import Kind, Subject, Trouble, find, trouble
from .process import TOKEN, end_tree

SLACK = 2 * 2**30  # bytes of address space that threads and libraries map and never touch
HIGH = 200  # file descriptors from here on are ours
_KINDS: dict[str, Kind] = {"import": "import", "make": "init"}


def main() -> None:
    import fcntl  # absent on Windows, where no such process is started

    theirs = [int(descriptor) for descriptor in sys.argv[1:3]]
    requests, answers = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in theirs)
    for each in theirs:
        os.close(each)
    faulthandler.enable()  # a segmentation fault then says on which line
    me = os.getpid()
    watched = (os.getppid(), os.environ[TOKEN], Path.cwd().parent)
    threading.Thread(target=_end_with, args=watched, daemon=True).start()
    if sys.platform == "linux":
        # What the subject orphans becomes this process's child, so that it is found and ended.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def put(data: memoryview) -> None:
        if os.getpid() != me:
            os._exit(0)  # a fork of the subject's that came back here: it has nothing to answer
        while data:
            data = data[os.write(answers, data[: 2**20]) :]

    def take(count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            chunk = os.read(requests, min(count - len(data), 2**20))
            if not chunk:
                os._exit(0)
            data += chunk
        return data

    wire.write(put, "ready")
    subject: Subject | None = None
    while True:
        number, request, *given = wire.read(take, 2**62)
        try:
            if request == "import":
                subject = _imported(*given)
                value = None
            else:
                value = getattr(subject, request)(*given)
            wire.write(put, (number, "answer", value))
        except BaseException as error:  # a KeyboardInterrupt is the subject's own: nobody else sends one here
            kind = _KINDS.get(request, "call")
            told = error if isinstance(error, Trouble) else trouble(kind, f"{request} of the subject", error)
            wire.write(put, (number, "trouble", told.kind, str(told), told.details, told.error))


def _imported(target: str, folder: str, folders: list[str], memory: int) -> Subject:
    """The target as its caller would find it, from the caller's folder and path; then this process's own."""
    _limit(memory)
    own = os.getcwd()
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders and entry != own)]
    place, colon, name = target.rpartition(":")
    if colon and place.endswith(".py"):
        target = f"{Path(folder, place)}:{name}"
    return Subject(find(target))


def _limit(memory: int) -> None:
    """Linux: an address-space limit above what torch has mapped already."""
    with contextlib.suppress(OSError, ImportError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + memory + SLACK
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with(parent: int, token: str, folder: Path) -> None:
    """When the checker is gone, end this process and its descendants, however busy the subject is."""
    while os.getppid() == parent:
        time.sleep(0.2)
    end_tree(os.getpid(), token)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
