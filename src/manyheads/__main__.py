"""The entry point of `manyheads` (or `python -m manyheads`): handling of Ctrl-C, pipes and encodings.

Ctrl-C ends the command quietly with exit code 130, whenever it is pressed, and SIGTERM with 143; temporary
files are removed. The handler is installed before any slow import, so this module imports nothing heavy.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading

TYPE_CHECKING = False  # importing this constant from typing takes 10 ms, in which Ctrl-C isn't handled
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130  # a shell's exit code for a process that SIGINT ended


def main() -> None:
    """Run the command line."""
    handle_interrupts()
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # escape characters that the encoding lacks
        if not sys.stdout.isatty():
            sys.stdout = outlive_reader(sys.stdout)
    try:
        from manyheads import cli

        cli.main()
    except KeyboardInterrupt:
        leave()
    except SystemExit as end:
        if isinstance(end.code, int):
            finish(end.code)
        raise
    finish(0)


def finish(code: int) -> NoReturn:
    """End the process as Python does, but without the last step, in which SIGINT changes the exit code."""
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, leave)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    if signal.getsignal(signal.SIGTERM) is terminate:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python prints the SystemExit of an exit function
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        if output is not None and not output.closed:
            output.flush()
    os._exit(code)


def handle_interrupts() -> None:
    """End the process quietly on Ctrl-C and SIGTERM, unless it was started with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = leave_if_interrupted
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, so that files and processes are cleaned up; a second Ctrl-C doesn't wait.

    While a command imports its modules there is nothing to clean up, and the process ends at once: C
    extensions print a traceback or drop the exception if it is raised during their initialization.
    """
    signal.signal(signal.SIGINT, leave)
    if is_importing(frame):
        leave()
    raise KeyboardInterrupt


def is_importing(frame: FrameType | None) -> bool:
    """Return True if a frame runs within an import of this module or of `manyheads.cli`."""
    importing = False  # True if the function that `frame` called belongs to the import system
    while frame is not None:
        if importing and frame.f_globals.get("__name__") in (__name__, "manyheads.cli"):
            return True
        importing = frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return False


def terminate(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, so that files and processes are cleaned up; a second signal doesn't wait.

    While a command imports its modules, the process ends at once, as on Ctrl-C.
    """
    signal.signal(number, signal.SIG_DFL)
    if is_importing(frame):
        os._exit(128 + number)
    raise SystemExit(128 + number)


def leave(*_: object) -> NoReturn:
    """End the process now, without any output."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h")  # show the cursor, which a progress bar hides
    os._exit(INTERRUPTED)


def leave_if_interrupted(error: Any) -> None:
    """End the process after a signal in a destructor, whose exceptions Python doesn't propagate."""
    if error.exc_type is KeyboardInterrupt:
        leave()
    if error.exc_type is SystemExit and isinstance(error.exc_value.code, int):
        os._exit(error.exc_value.code)
    sys.__unraisablehook__(error)


class Pipe(io.FileIO):
    """A file that discards all output after its reader has closed the pipe, as `| head` does."""

    def write(self, data: Any) -> int:
        """Write bytes and return their number, even if the pipe is closed."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def outlive_reader(output: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a file that writes to `output`, and discards all output after its reader has closed the pipe."""
    pipe = Pipe(output.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        pipe if output.write_through else io.BufferedWriter(pipe),  # unbuffered by `python -u`
        output.encoding,
        output.errors,
        line_buffering=output.line_buffering,
        write_through=output.write_through,
    )


if __name__ == "__main__":
    main()
