"""The main function of a candidate's process, which runs the checker's requests."""

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
from typing import NoReturn

import psutil

from manyheads.checker.isolation import protocol
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.errors import CandidateError, Kind, describe_exception
from manyheads.checker.isolation.process import TOKEN, end_tree
from manyheads.checker.isolation.target import find

SLACK = 2 * 2**30  # bytes of address space that threads and libraries map and never use
HIGH = 200  # the lowest number of the pipes' file descriptors, so that candidates rarely close them
KINDS: dict[str, Kind] = {"import": "import", "build": "init"}


def main() -> None:
    """Answer requests until the checker closes the pipe."""
    import fcntl  # Windows has no such module, and CandidateProcess raises an error there

    pipes = [int(descriptor) for descriptor in sys.argv[1:3]]
    requests, answers = (fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, HIGH) for pipe in pipes)
    for pipe in pipes:
        os.close(pipe)
    faulthandler.enable()  # to report the line of a segmentation fault
    own_pid = os.getpid()
    checker, token, folder = int(sys.argv[3]), os.environ[TOKEN], Path.cwd().parent

    def end() -> NoReturn:
        """End this process and its descendants, and remove its folder: the checker has ended."""
        end_tree(own_pid, token)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    def watch() -> None:
        """Wait until the checker has ended, also during a call."""
        while os.getppid() == checker:
            time.sleep(0.2)
        end()

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        # Orphaned descendants become children of this process, so that they are found and ended.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def send(data: memoryview) -> int:
        if os.getpid() != own_pid:
            os._exit(0)  # the candidate forked, and both processes returned from the call
        try:
            return os.write(answers, data)
        except BrokenPipeError:
            end()

    def receive(count: int) -> bytes:
        return os.read(requests, count) or end()

    protocol.write(send, "ready")
    candidate: Candidate | None = None
    while True:
        number, request, *args = protocol.read(receive, 2**62)
        try:
            if request == "import":
                candidate, value = import_candidate(*args), None
            else:
                value = getattr(candidate, request)(*args)
            protocol.write(send, (number, "answer", value))
        except BaseException as error:  # the candidate raised it: this session gets no KeyboardInterrupt
            if not isinstance(error, CandidateError):
                kind = KINDS.get(request, "call")
                error = describe_exception(kind, f"{request} of the candidate", error)
            protocol.write(send, (number, "error", error.kind, str(error), error.details, error.error))


def import_candidate(target: str, folder: str, folders: list[str], memory: int) -> Candidate:
    """Import the target as its caller would, from the caller's folder and path."""
    with contextlib.suppress(OSError, ImportError, ValueError):
        import resource

        # torch has mapped much address space already, so the limit is above that.
        limit = psutil.Process().memory_info().vms + memory + SLACK
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    own = os.getcwd()
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders and entry != own)]
    place, colon, name = target.rpartition(":")
    if colon and place.endswith(".py"):
        target = f"{Path(folder, place)}:{name}"
    return Candidate(find(target))


if __name__ == "__main__":
    main()
