"""The subject in a process of its own: limited in time and memory, ended with all its descendants.

This is no sandbox: the subject has its user's files, network and rights. What is promised: a process
spawned anew, with empty standard input and a temporary working folder; a time limit for each request;
a memory limit on what its process tree holds resident (looked at every 50 ms), and on Linux on its
address space; that it doesn't outlive the checker; and that it answers with data that are checked as
they are read, so that no print, exit or patched function of its own can turn into a verdict. It sees
no GPU: neither limit holds there.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from ...shapes import amount
from . import protocol as wire
from .candidate import Answer, BorrowedSubject, Call, Description, Subject, Trouble

POLL = 0.05  # seconds between two looks at the process
START = 120.0  # seconds for Python and torch to load, which aren't the subject's
KEPT = 4000  # characters of its output that are read back
WRITTEN = 64 * 2**20  # bytes of its output that are on the disk at any time, about
TOKEN = "MANYHEADS_SUBJECT"  # the environment variable that marks its descendants


class Process:
    """A subject in a process of its own; the methods are those of `Subject`.

    `target` is what `find` takes, `timeout` the seconds that each request may take (the import is
    the first one), `memory` the bytes that the process tree may hold. Beside what `Subject` raises,
    a request raises Trouble("timeout"), ("memory"), ("crash") or ("protocol"). After one of these
    the process is ended: open another.
    """

    def __init__(self, target: str, timeout: float = 60.0, memory: int = 4 * 2**30) -> None:
        if os.name != "posix":
            raise Trouble(
                "import",
                f"a process of its own needs pipes that {sys.platform} lacks, and {target!r} came: "
                "import the object, and check it in this process.",
            )
        self.target, self.timeout, self.memory = target, timeout, memory
        self._number = 0
        self._request = "start"
        self._look = 0.0
        token = uuid.uuid4().hex
        folder = Path(tempfile.mkdtemp(prefix="manyheads-"))
        self._output = folder / "output"
        (folder / "work").mkdir()
        theirs, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        try:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "manyheads.checker.isolation.child", str(theirs), str(theirs_out)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=folder / "work",
                    env=_environment(token),
                    pass_fds=(theirs, theirs_out),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
            os.close(theirs_out)
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        # Called when this object goes, and when Python ends, if nobody closed it.
        self._finish = weakref.finalize(self, _end, self._process, token, folder, (self._in, self._out))
        self._deadline = time.monotonic() + max(START, timeout)
        self._exchange(None)
        folders = [os.getcwd(), *(entry for entry in sys.path if entry)]
        try:
            self._ask("import", target, os.getcwd(), folders, memory)
        except Trouble:
            self.close()
            raise

    def describe(self) -> Description:
        return self._expect(Description, self._ask("describe"))

    def make(self, init: dict[str, Any]) -> Description:
        return self._expect(Description, self._ask("make", init))

    def weights(self) -> dict[str, Tensor]:
        return self._expect(dict[str, Tensor], self._ask("weights"))

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._ask("load", tensors)

    def call(self, call: Call) -> Answer:
        return self._expect(Answer, self._ask("call", call))

    def close(self) -> None:
        """End the process and its descendants, remove its folder; once more does nothing."""
        self._finish()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------ one request

    def _ask(self, request: str, *given: Any) -> Any:
        """Send a request, and its answer's value; what the subject raised is raised here."""
        if not self._finish.alive:
            raise Trouble(
                "crash", f"the process of {self.target} is ended, and a {request} came: open another."
            )
        self._request = request
        self._deadline = time.monotonic() + self.timeout
        self._number += 1
        reply = self._exchange((self._number, request, *given))
        match reply:
            case (self._number, "answer", value):
                return value
            case (self._number, "trouble", str(kind), str(sentence), str(details), str(error)):
                if kind == "memory":
                    limit = f"{amount(self.memory)}: make less, or raise the memory limit."
                    raise Trouble(
                        "memory", f"{sentence.rstrip('.')}, and the limit is {limit}", details, error
                    )
                if kind in ("import", "init", "call"):
                    raise Trouble(kind, sentence, details, error)  # type: ignore[arg-type]
        self.close()
        wire.refuse(f"another reply to {request}")

    def _exchange(self, message: Any) -> Any:
        """Write a message (none to begin with) and read one; whatever goes wrong ends the process."""
        try:
            if message is not None:
                wire.write(self._put, message)
            return wire.read(self._take, self.memory)
        except BaseException:
            self.close()
            raise

    def _expect(self, hint: Any, value: Any) -> Any:
        if not wire.fits(value, hint):
            self.close()
            wire.refuse(f"a {type(value).__name__} in answer to {self._request}")
        return value

    def _put(self, data: memoryview) -> None:
        while data:
            self._wait(write=True)
            try:
                data = data[os.write(self._out, data[: 2**20]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._ended()

    def _take(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            self._wait(write=False)
            try:
                chunk = os.read(self._in, min(count - len(data), 2**20))
            except BlockingIOError:
                continue
            if not chunk:
                self._ended()
            data += chunk
        return data

    def _wait(self, write: bool) -> None:
        """Until the pipe is ready; meanwhile, that the process lives and keeps to its limits."""
        while True:
            pipes: tuple[list[int], list[int]] = ([], [self._out]) if write else ([self._in], [])
            ready = any(select.select(*pipes, [], POLL))
            now = time.monotonic()
            if now >= self._look:
                self._look = now + POLL
                self._check_limits(now)
            if ready:
                return
            # Not by the pipe's end alone: a forked child may hold the other side of it.
            if self._process.poll() is not None and not any(select.select(*pipes, [], 0)):
                self._ended()

    def _check_limits(self, now: float) -> None:
        if now > self._deadline:
            limit = self.timeout if self._request != "start" else max(START, self.timeout)
            raise Trouble(
                "timeout",
                f"{self._request} of {self.target} must end within {limit:g} s, and it didn't: "
                "look for a loop that never ends, or raise the time limit.",
                self._tail(),
            )
        used = sum(resident for _, resident in _tree(self._process.pid))
        if used > self.memory:
            raise Trouble(
                "memory",
                f"{self._request} of {self.target} must stay within {amount(self.memory)} of memory, and its "
                f"processes held {amount(used)}: make less, or raise the memory limit.",
                self._tail(),
            )
        with contextlib.suppress(OSError):
            if self._output.stat().st_size > WRITTEN:
                os.truncate(self._output, 0)

    def _ended(self) -> None:
        """The other side is closed: say how the process ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            how = "closed the pipe that it answers through"
        else:
            how = f"exited with code {code}" if code >= 0 else f"was ended by {_signal(-code)}"
        raise Trouble(
            "crash",
            f"the process of {self.target} must answer {self._request}, and it {how} in the middle of it: "
            "call the object by itself to see why.",
            self._tail(),
        )

    def _tail(self) -> str:
        """The last of what the process wrote to its standard output and error."""
        with contextlib.suppress(OSError), self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - 4 * KEPT))
            return file.read(4 * KEPT).decode(errors="replace")[-KEPT:].strip()
        return ""


def open_subject(target: Any, timeout: float = 60.0, memory: int = 4 * 2**30) -> Subject | Process:
    """A target's name is opened in a process of its own; an object in this one, without limits, and restored
    when the subject is closed.
    """
    return Process(target, timeout, memory) if isinstance(target, str) else BorrowedSubject(target)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment(token: str) -> dict[str, str]:
    """The caller's, as it is from another folder; no GPU; marked; and one compiler at a time."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    home = str(Path(__file__).parents[3])  # for a manyheads that isn't installed
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([] if home.endswith("-packages") else [home])]),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        TOKEN: token,
    }


# ------------------------------------------------------------------------------- the process tree


def _processes() -> list[tuple[int, int, int, int]]:
    """Every living process: its id, its parent's, its session's (its group's, off Linux), resident bytes."""
    found = []
    if Path("/proc/self/stat").exists():
        page = os.sysconf("SC_PAGE_SIZE")
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError, ValueError):  # ended meanwhile
                    stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
                    fields = stat.rpartition(")")[2].split()
                    if fields[0] != "Z":
                        found.append((int(entry), int(fields[1]), int(fields[3]), int(fields[21]) * page))
        return found
    listed = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,pgid=,rss="], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        pid, parent, session, resident = line.split()
        found.append((int(pid), int(parent), int(session), int(resident) * 1024))
    return found


def _tree(root: int, token: str = "") -> list[tuple[int, int]]:
    """The processes of root's session, their descendants, and those that carry the token: (id, bytes)."""
    everyone = _processes()
    inside = {pid for pid, _, session, _ in everyone if session == root}
    if token:
        mark = f"{TOKEN}={token}".encode()
        for pid, *_ in everyone:
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    inside.add(pid)
    grown = True
    while grown:
        more = {pid for pid, parent, _, _ in everyone if parent in inside} - inside
        inside |= more
        grown = bool(more)
    return [(pid, resident) for pid, _, _, resident in everyone if pid in inside]


def end_tree(root: int, token: str) -> None:
    """Kill root and all that it started; more than once over, for what was started meanwhile."""
    for _ in range(100):
        others = [pid for pid, _ in _tree(root, token) if pid != os.getpid()]
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not others:
            return
        time.sleep(0.01)


def _end(process: subprocess.Popen[bytes], token: str, folder: Path, pipes: tuple[int, int]) -> None:
    end_tree(process.pid, token)
    process.wait()
    for pipe in pipes:
        os.close(pipe)
    shutil.rmtree(folder, ignore_errors=True)
