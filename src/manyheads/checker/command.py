"""What `manyheads check` does around a check: reads options, shows progress, writes the report."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.checker import check
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.report import Report

EXIT_CODES = {"passed": 0, "failed": 1, "not judged": 2}  # by verdict
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LEAST_MEMORY = 256 * 2**20  # bytes that Python and torch take by themselves


def parse_size(text: str) -> int:
    """Return `4G` in bytes; ValueError for another form, or less than a process needs to start."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"Expected a size such as 500M or 4G for --memory, got {text!r}.")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < LEAST_MEMORY:
        raise ValueError(f"Expected --memory of at least 256M, which Python and torch need, got {text!r}.")
    return size


def parse_weights(text: str) -> dict[str, str]:
    """Return `q=a,k=b,v=c,o=d` as a mapping; ValueError for another form."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not pairs or any(not role or not layer for role, _, layer in pairs):
        raise ValueError(f"Expected roles and layers for --weights, such as q=a,k=b,v=c,o=d, got {text!r}.")
    return {role.strip(): layer.strip() for role, _, layer in pairs}


def run(target: str, weights: str | None, timeout: float, memory: str, **options: str | None) -> Report:
    """Check a target, with a line that shows the current check; ValueError for invalid options."""
    from rich.console import Console

    if not timeout > 0:
        raise ValueError(f"Expected a positive number of seconds for --timeout, got {timeout}.")
    size, layers = parse_size(memory), parse_weights(weights) if weights else None
    if ":" not in target:
        raise ValueError(f"Expected a target module:name or path/to/file.py:name, got {target!r}.")
    try:
        with Console(stderr=True).status(f"checking {target}") as status:

            def show(name: str) -> None:
                status.update(f"checking {target}: {name}")

            return check(target, weights=layers, timeout=timeout, memory=size, progress=show, **options)
    except Unclear as error:
        raise ValueError(str(error)) from None


def deliver(report: Report, out: Path | None, json: Path | None, junit: Path | None) -> None:
    """Print the report, and write it to the files that are given."""
    report.print()
    if out is not None:
        picture = report.save_picture(out)
        print(picture if picture else "no picture: there is no pair of maps that differ")
    if json is not None:
        report.save_json(json)
    if junit is not None:
        report.save_junit(junit)
