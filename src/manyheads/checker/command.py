"""What `manyheads check` does beside checking: reads its options, shows progress, delivers the report."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.checker import check
from manyheads.checker.candidates.parameters import Unclear
from manyheads.checker.report import Report

EXIT_CODES = {"passed": 0, "failed": 1, "not judged": 2}  # by verdict
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LEAST = 256 * 2**20  # bytes that Python and torch take by themselves


def amount(text: str) -> int:
    """`4G` as bytes; ValueError for what is no size, or less than a process needs to start."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"--memory takes a size such as 500M or 4G, and {text!r} came.")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < LEAST:
        raise ValueError(f"--memory must be at least 256M, which Python and torch need, and {text!r} came.")
    return size


def roles(text: str) -> dict[str, str]:
    """`q=a,k=b,v=c,o=d` as a mapping; ValueError for anything else."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not pairs or any(not role or not equals or not layer for role, equals, layer in pairs):
        raise ValueError(f"--weights takes roles and layers, q=a,k=b,v=c,o=d, and {text!r} came.")
    return {role.strip(): layer.strip() for role, _, layer in pairs}


def run(
    target: str,
    like: str | None,
    init: str | None,
    weights: str | None,
    layout: str | None,
    timeout: float,
    memory: str,
) -> Report:
    """The report on a target, with a line that says what is asked at the moment; ValueError for bad
    options.
    """
    from rich.console import Console

    if not timeout > 0:
        raise ValueError(f"--timeout must be a positive number of seconds, and {timeout} came.")
    size, named = amount(memory), roles(weights) if weights else None
    if ":" not in target:
        raise ValueError(f"a target must be module:name or path/to/file.py:name, and {target!r} came.")
    try:
        with Console(stderr=True).status(f"checking {target}") as status:
            return check(
                target,
                like,
                init=init,
                weights=named,
                layout=layout,
                timeout=timeout,
                memory=size,
                progress=lambda name: status.update(f"checking {target}: {name}"),
            )
    except Unclear as error:
        raise ValueError(str(error)) from None


def deliver(report: Report, out: Path | None, json: Path | None, junit: Path | None) -> None:
    """Print the report, and write the files that were asked for."""
    report.print()
    if out is not None:
        picture = report.save_picture(out)
        print(picture if picture else "no picture: there is no pair of maps that differ")
    if json is not None:
        report.save_json(json)
    if junit is not None:
        report.save_junit(junit)
