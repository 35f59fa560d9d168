"""Run `manyheads check`: parse its options, show its progress and write its report."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from manyheads.checker import check
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.report import Report
from manyheads.checker.setup import parse_pairs

EXIT_CODES = {"passed": 0, "failed": 1, "not judged": 2}  # by verdict
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MIN_MEMORY = 256 * 2**20  # bytes; Python and torch need this much to start


def parse_size(text: str) -> int:
    """Convert a size such as `4G` to bytes.

    Args:
        text: the size.

    Returns:
        The number of bytes.

    Raises:
        ValueError: if the text isn't a size, or if it is less than 256M.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"Expected a size such as 500M or 4G for --memory, got {text!r}.")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < MIN_MEMORY:
        raise ValueError(f"Expected --memory to be at least 256M, to start Python and torch, got {text!r}.")
    return size


def run(target: str, arg: list[str], timeout: float, memory: str, **options: Any) -> Report:
    """Check a target, and show the name of the current check on a line of standard error.

    Args:
        target: the target, "module:name" or "path/to/file.py:name".
        arg: the roles of arguments, such as "segments=keep".
        timeout: the time limit of each call, in seconds.
        memory: the memory limit, as for `parse_size`.
        **options: the other arguments of `check`.

    Returns:
        The report.

    Raises:
        ValueError: if an option is invalid, or if the target can't be imported, built or understood.
    """
    from rich.console import Console

    if not timeout > 0:
        raise ValueError(f"Expected a positive number of seconds for --timeout, got {timeout}.")
    options["memory"] = parse_size(memory)
    if ":" not in target:
        raise ValueError(f"Expected a target module:name or path/to/file.py:name, got {target!r}.")
    try:
        if arg:
            options["args"] = parse_pairs(arg, "--arg NAME=ROLE, such as --arg segments=keep")
        with terminable(), Console(stderr=True).status(f"checking {target}") as status:

            def show_check(name: str) -> None:
                status.update(f"checking {target}: {name}")

            return check(target, timeout=timeout, progress=show_check, **options)
    except Unclear as error:
        raise ValueError(str(error)) from None


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Exit with an exception at SIGTERM and SIGHUP, so that the candidate's processes are ended first."""

    def exit_on(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [(number, signal.signal(number, exit_on)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def write_report(report: Report, out: Path | None, json: Path | None, junit: Path | None) -> None:
    """Print the report, and write it to the given files."""
    report.print()
    if out is not None:
        print(report.save_picture(out) or "no picture: there are no two maps of the same shape to compare")
    if json is not None:
        report.save_json(json)
    if junit is not None:
        report.save_junit(junit)
