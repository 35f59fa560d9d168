"""The process of a candidate: reads requests, runs them, answers."""

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

import psutil

from manyheads.checker.isolation import protocol
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.errors import CandidateError, Kind, describe_exception
from manyheads.checker.isolation.process import TOKEN, end_tree
from manyheads.checker.isolation.target import find

SLACK = 2 * 2**30  # bytes of address space that threads and libraries map and never touch
HIGH = 200  # our file descriptors start here
KINDS: dict[str, Kind] = {"import": "import", "build": "init"}


def main() -> None:
    """Answer requests until the checker closes the pipe."""
    import fcntl  # not on Windows, where no such process is started

    given = [int(descriptor) for descriptor in sys.argv[1:3]]
    requests, answers = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in given)
    for each in given:
        os.close(each)
    faulthandler.enable()  # to report the line of a segmentation fault
    own_pid = os.getpid()
    watched = (os.getppid(), os.environ[TOKEN], Path.cwd().parent)
    threading.Thread(target=end_with_checker, args=watched, daemon=True).start()
    if sys.platform == "linux":
        # The candidate's orphans become children of this process, so that they are found and ended.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def put(data: memoryview) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a fork of the candidate's that returned here, and has no request to answer
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

    protocol.write(put, "ready")
    candidate: Candidate | None = None
    while True:
        number, request, *args = protocol.read(take, 2**62)
        try:
            if request == "import":
                candidate, value = import_candidate(*args), None
            else:
                value = getattr(candidate, request)(*args)
            protocol.write(put, (number, "answer", value))
        except BaseException as error:  # a KeyboardInterrupt is the candidate's own: this session gets none
            if not isinstance(error, CandidateError):
                kind = KINDS.get(request, "call")
                error = describe_exception(kind, f"{request} of the candidate", error)
            protocol.write(put, (number, "error", error.kind, str(error), error.details, error.error))


def import_candidate(target: str, folder: str, folders: list[str], memory: int) -> Candidate:
    """Import the target as its caller would, from the caller's folder and path."""
    with contextlib.suppress(OSError, ImportError, ValueError):  # a limit above what torch has mapped already
        import resource

        limit = psutil.Process().memory_info().vms + memory + SLACK
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    own = os.getcwd()
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders and entry != own)]
    place, colon, name = target.rpartition(":")
    if colon and place.endswith(".py"):
        target = f"{Path(folder, place)}:{name}"
    return Candidate(find(target))


def end_with_checker(parent: int, token: str, folder: Path) -> None:
    """When the checker is gone, end this process and its descendants, however busy the candidate is."""
    while os.getppid() == parent:
        time.sleep(0.2)
    end_tree(os.getpid(), token)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
