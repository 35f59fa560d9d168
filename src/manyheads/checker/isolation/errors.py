"""The errors of a candidate, in this process or in a separate one."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["import", "init", "call", "timeout", "memory", "crash", "protocol"]
OUR_FILES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen")


class CandidateError(Exception):
    """An error of a candidate, in one sentence.

    Args:
        kind: "import", "init" (the constructor raised), "call", "timeout", "memory", "crash" (the process
            ended) or "protocol" (its message can't be read).
        sentence: The message.
        details: The last lines of the traceback in the user's files, or of the process's output.
        error: The full name of the exception's type, such as `torch._dynamo.exc.Unsupported`, or "".
    """

    def __init__(self, kind: Kind, sentence: str, details: str = "", error: str = "") -> None:
        super().__init__(sentence)
        self.kind, self.details, self.error = kind, details, error

    @property
    def reason(self) -> str:
        """The sentence without its period."""
        return str(self).rstrip(".")

    @property
    def is_exit(self) -> bool:
        """Return True if the candidate called sys.exit or raised KeyboardInterrupt."""
        return self.error.endswith(("SystemExit", "KeyboardInterrupt"))

    @property
    def is_refusal(self) -> bool:
        """Return True if the candidate's code raises the error itself, by raise or assert."""
        return re.search(r": (?:raise|assert)\b", self.details.rpartition("\n")[2]) is not None

    @property
    def is_unwritten(self) -> bool:
        """Return True if the candidate's code raises NotImplementedError: it isn't written yet."""
        return self.is_refusal and self.error.endswith("NotImplementedError")


class CodeError(CandidateError):
    """An error of kind "import", "init" or "call": the candidate's code raised; it can be called again."""


class ProcessEnded(CandidateError):
    """An error of another kind, after which the candidate's process has ended."""


def candidate_error(kind: Kind, sentence: str, details: str = "", error: str = "") -> CandidateError:
    """Return the error of a kind."""
    error_class = CodeError if kind in ("import", "init", "call") else ProcessEnded
    return error_class(kind, sentence, details, error)


def candidate_exception(kind: Kind, action: str, error: BaseException) -> BaseException:
    """Return the error for an exception that `action` raised, or the exception of a signal handler itself."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(x, "__func__", x if hasattr(x, "__code__") else type(x).__call__) for x in handlers]
    codes = [getattr(function, "__code__", None) for function in functions]
    is_signal = any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
    return error if is_signal else describe_exception(kind, action, error)


def describe_exception(kind: Kind, action: str, error: BaseException) -> CandidateError:
    """Return the error for an exception that `action` raised, with the lines of the user's files."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(OUR_FILES)
    ]
    lines = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-4:]]
    place = (frames[-1].filename, frames[-1].lineno) if frames else None
    message = print_safely(str, error, 2000)
    if isinstance(error, SyntaxError):
        message = error.msg
        if error.filename:
            place = error.filename, error.lineno
            lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    first = print_safely(str, next((line.strip() for line in message.splitlines() if line.strip()), ""), 300)
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        kind = "memory"
    at = f" ({Path(place[0]).name}:{place[1]})" if place else ""
    sentence = f"{action} raised {type(error).__name__}{': ' if first else ''}{first.rstrip('.')}{at}."
    full_name = f"{type(error).__module__}.{type(error).__qualname__}"
    return candidate_error(kind, sentence, "\n".join(lines), full_name)


def print_safely(function: Callable[[Any], str], value: Any, limit: int = 200) -> str:
    """Return str or repr of an object, shortened; its method may raise."""
    try:
        text = str.__str__(function(value))  # not an instance of a subclass
    except Exception as error:
        return f"a {type(value).__name__} whose {function.__name__} raises {type(error).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
