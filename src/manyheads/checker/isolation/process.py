"""A candidate in a separate process, with limits on time and memory, that is ended with all its descendants.

This is not a sandbox: the candidate has the user's files, network and permissions. But:

- The process is new, with empty standard input and a temporary working folder, and ends with the checker.
- Each request has a time limit.
- A memory limit applies to the resident memory of its process tree (measured every 50 ms; the search for new
  descendants takes at most 5 % of the time), and on Linux to its address space. The process can't use GPUs,
  because neither limit applies to their memory.
- Its answers are data that are validated as they are read, so that no print, exit or patched function of the
  candidate can change a verdict.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch import Tensor

from manyheads.checker.isolation import protocol
from manyheads.checker.isolation.candidate import Answer, BorrowedCandidate, Call, Candidate
from manyheads.checker.isolation.describe import Argument, Description
from manyheads.checker.isolation.errors import CandidateError, CodeError, ProcessEnded, candidate_error
from manyheads.shapes import amount
from manyheads.trees import fits

POLL = 0.05  # seconds between two checks of the limits
SEARCH = 20  # a search for its descendants is followed by a pause of this many times its duration
START = 120.0  # seconds in which Python and torch are loaded, before the candidate's time limit applies
TAIL = 4000  # characters of its output to report
OUTPUT_LIMIT = 64 * 2**20  # approximate size in bytes at which the file of its output is emptied
CHILD = "manyheads.checker.isolation.child"
TOKEN = "MANYHEADS_CANDIDATE"  # the environment variable that marks its descendants


class CandidateProcess(contextlib.AbstractContextManager["CandidateProcess"]):
    """A candidate in a separate process, with the methods of `Candidate`.

    A request may also raise ProcessEnded. Then the process has been ended, and can't be used any more.

    Args:
        target: The name of the target, as for `find`.
        timeout: The time limit of each call and of each other request, in seconds.
        memory: The memory limit of the process tree, in bytes.
    """

    def __init__(self, target: str, timeout: float = 60.0, memory: int = 4 * 2**30) -> None:
        if os.name != "posix":
            reason = f"{target!r} can't be checked in a separate process, because {sys.platform} lacks pipes"
            raise CodeError("import", f"{reason}. Import the object, and check it in this process.")
        self.target, self.timeout, self.memory = target, timeout, memory
        self._count = 0
        self._next_check = self._next_search = 0.0
        self._tree: list[psutil.Process] = []
        token = uuid.uuid4().hex
        folder = Path(tempfile.mkdtemp(prefix="manyheads-"))
        self._output = folder / "output"
        (folder / "work").mkdir()
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        pipes = (self._in, self._out)
        try:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", CHILD, str(child_in), str(child_out), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=folder / "work",
                    env=child_environment(token),
                    pass_fds=(child_in, child_out),
                    start_new_session=True,
                )
            # Also called when this object is deleted without close, and at Python's exit.
            self._finish = weakref.finalize(self, end_process, self._process, token, folder, pipes)
        except BaseException:  # such as Ctrl-C while the process starts; it ends when its pipe is closed
            end_process(None, token, folder, pipes)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        self._exchange("start", max(START, timeout))
        folders = [os.getcwd(), *(entry for entry in sys.path if entry)]
        try:
            self._request("import", None, target, os.getcwd(), folders, memory)
        except CandidateError:
            self.close()
            raise

    def describe(self) -> Description:
        """Describe the candidate."""
        return self._request("describe", Description)

    def build(self, init: dict[str, Any]) -> Description:
        """Build the class."""
        return self._request("build", Description, init)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers."""
        return self._request("weights", dict[str, Tensor])

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy values into the parameters and buffers with these names."""
        self._request("load", None, tensors)

    def call(self, call: Call) -> Answer:
        """Call the candidate."""
        return self._request("call", Answer, call)

    def call_sequence(self, calls: tuple[Call, ...]) -> tuple[Answer, ...]:
        """Make several calls from the state before the first; each sees the changes of those before it."""
        limit = self.timeout * max(1, len(calls))
        return self._request("call_sequence", tuple[Answer, ...], calls, limit=limit)

    def functions(self) -> dict[str, tuple[Argument, ...]]:
        """Return the arguments of what `Call.function` can name."""
        return self._request("functions", dict[str, tuple[Argument, ...]])

    def close(self) -> None:
        """End the process and its descendants, and remove its folder."""
        self._finish()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ----------------------------------------------------------------------------------

    def _request(self, request: str, hint: Any, *args: Any, limit: float | None = None) -> Any:
        """Send a request and return its answer, of the type `hint`; raise the error of the candidate."""
        if not self._finish.alive:
            message = f"The process of {self.target} is ended, and can't {request}. Open another."
            raise ProcessEnded("crash", message)
        self._count += 1
        match self._exchange(request, limit or self.timeout, self._count, request, *args):
            case (self._count, "answer", value) if fits(value, hint):
                return value
            case (self._count, "error", str(kind), str(sentence), str(details), str(error)):
                if kind == "memory":
                    most = f"{amount(self.memory)}: allocate less, or raise the memory limit."
                    sentence = f"{sentence.rstrip('.')}, and the limit is {most}"
                if kind in ("import", "init", "call", "memory"):
                    raise candidate_error(kind, sentence, details, error)  # type: ignore[arg-type]
        self.close()
        protocol.reject(f"another reply to {request}")

    def _exchange(self, request: str, limit: float, *message: Any) -> Any:
        """Write a message, unless it is empty, and read the answer; end the process after any error."""
        self._current = "a call" if request == "call_sequence" else request
        self._limit, self._deadline = limit, time.monotonic() + limit
        try:
            if message:
                protocol.write(self._send, message)
            return protocol.read(self._receive, self.memory)
        except BaseException:
            self.close()
            raise

    def _send(self, data: memoryview) -> int:
        """Write some of these bytes to the process, and return how many."""
        self._wait(self._out, selectors.EVENT_WRITE)
        try:
            return os.write(self._out, data[: select.PIPE_BUF])  # more could block
        except BrokenPipeError:
            self._raise_crash()

    def _receive(self, count: int) -> bytes:
        """Read at least one and at most `count` bytes from the process."""
        self._wait(self._in, selectors.EVENT_READ)
        return os.read(self._in, count) or self._raise_crash()

    def _wait(self, pipe: int, event: int) -> None:
        """Wait until a pipe is readable or writable, and check the limits of the process meanwhile."""
        # `select.select` would raise for descriptors from 1,024 on, and an application may have as many.
        with selectors.PollSelector() as selector:
            selector.register(pipe, event)
            while True:
                is_ready = bool(selector.select(POLL))
                now = time.monotonic()
                if now >= self._next_check:
                    self._next_check = now + POLL
                    self._check_limits(now)
                if is_ready:
                    return
                # The pipe may still be open after the process ended, in a process that the candidate forked.
                if self._process.poll() is not None and not selector.select(0):
                    self._raise_crash()

    def _check_limits(self, now: float) -> None:
        subject = f"{self._current} of {self.target}"
        if now > self._deadline:
            advice = "It may have an endless loop; if not, raise the time limit."
            message = f"{subject} didn't end within {self._limit:g} s. {advice}"
            raise ProcessEnded("timeout", message, self._tail())
        if now >= self._next_search:
            self._tree = process_tree(self._process.pid)
            end = time.monotonic()
            self._next_search = end + SEARCH * (end - now)
        used = 0
        for process in self._tree:
            with contextlib.suppress(psutil.Error):
                used += process.memory_info().rss
        if used > self.memory:
            limit = f"the limit is {amount(self.memory)}. Allocate less, or raise the memory limit."
            message = f"{subject} used {amount(used)} of memory, and {limit}"
            raise ProcessEnded("memory", message, self._tail())
        with contextlib.suppress(OSError):
            if self._output.stat().st_size > OUTPUT_LIMIT:
                os.truncate(self._output, 0)

    def _raise_crash(self) -> NoReturn:
        """Raise the error of a process that ended or closed its pipe."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            how = "closed its answer pipe"
        else:
            names = {-number: number.name for number in signal.Signals}
            how = f"exited with code {code}" if code >= 0 else f"was ended by {names.get(code, code)}"
        message = f"The process of {self.target} {how} during {self._current}. Call it by itself to see why."
        raise ProcessEnded("crash", message, self._tail())

    def _tail(self) -> str:
        """Return the end of the process's standard output and error."""
        # The process may still be writing, so a read until the end of the file might not end.
        with contextlib.suppress(OSError), self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - 4 * TAIL))
            return file.read(4 * TAIL).decode(errors="replace")[-TAIL:].strip()
        return ""


def open_candidate(
    target: Any, timeout: float = 60.0, memory: int = 4 * 2**30
) -> Candidate | CandidateProcess:
    """Open a target by its name in a separate process, or an object in this process, restored by `close`."""
    return CandidateProcess(target, timeout, memory) if isinstance(target, str) else BorrowedCandidate(target)


def child_environment(token: str) -> dict[str, str]:
    """Return the environment of a candidate's process: no GPUs, absolute import paths, and the token."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    home = str(Path(__file__).parents[3])  # for a manyheads that isn't installed
    return {
        "OMP_NUM_THREADS": "1",  # as in `check`: the tensors are small, and more threads only wait
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([] if home.endswith("-packages") else [home])]),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        TOKEN: token,
    }


# -- the process tree ------------------------------------------------------------------------------


def process_tree(root: int, token: str = "") -> list[psutil.Process]:
    """Return the running processes of root's session or with the token, and their descendants."""
    parents: dict[int, int] = {}
    alive: dict[int, psutil.Process] = {}
    inside: set[int] = set()
    for process in psutil.process_iter():
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(psutil.Error, OSError), process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process.pid] = process.ppid()
            alive[process.pid] = process
            if os.getsid(process.pid) == root or (token and process.environ().get(TOKEN) == token):
                inside.add(process.pid)
    while more := {pid for pid in alive if parents[pid] in inside} - inside:
        inside |= more
    return [alive[pid] for pid in inside]


def end_tree(root: int, token: str) -> None:
    """Kill a process and its descendants, and again those that they have started meanwhile."""
    for _ in range(100):
        others = [process for process in process_tree(root, token) if process.pid != os.getpid()]
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not others:
            return
        time.sleep(0.01)


def end_process(
    process: subprocess.Popen[bytes] | None, token: str, folder: Path, pipes: tuple[int, int]
) -> None:
    """End a process and its descendants, close its pipes and remove its folder."""
    end_tree(-1 if process is None else process.pid, token)
    if process is not None:
        process.wait()
    for pipe in pipes:
        os.close(pipe)
    shutil.rmtree(folder, ignore_errors=True)
