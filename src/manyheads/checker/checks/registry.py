"""What a check is, and how all of them are run on a candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.isolation.errors import CandidateError
from manyheads.checker.oracle import Attention, Oracle


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: the name of the check.
        status: "passed", "failed", "not applicable", "could not be checked" (which doesn't change the
            verdict), or "not judged" (without which nothing can be said to have passed).
        reason: why it isn't passed.
        error: how far the numbers are apart.
        allowed: how far they may be apart.
    """

    name: str
    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


def passed(name: str, reason: str = "", error: float | None = None, allowed: float | None = None) -> Check:
    """Return a check that passed."""
    return Check(name, "passed", reason, error, allowed)


def failed(name: str, reason: str, error: float | None = None, allowed: float | None = None) -> Check:
    """Return a check that failed."""
    return Check(name, "failed", reason, error, allowed)


def skipped(name: str, reason: str) -> Check:
    """Return a check that doesn't apply."""
    return Check(name, "not applicable", reason)


def unchecked(name: str, reason: str) -> Check:
    """Return a check that could not be run."""
    return Check(name, "could not be checked", reason)


def judge(name: str, error: float, allowed: float, reason: str, failure: str) -> Check:
    """Return a check that passes if the error is allowed."""
    return passed(name, reason, error, allowed) if error <= allowed else failed(name, failure, error, allowed)


Function = Callable[[Any], Check | Iterator[Check]]


class Entry(NamedTuple):
    """A check: its name, its function, the oracles it applies to, and the checks it depends on."""

    name: str
    run: Function
    oracles: tuple[type[Oracle], ...]
    depends_on: tuple[str, ...]


CHECKS: list[Entry] = []


def check(
    name: str, *oracles: type[Oracle], depends_on: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Register a check; for attention by default. It says nothing where one that it depends on has failed."""

    def add(function: Function) -> Function:
        CHECKS.append(Entry(name, function, oracles or (Attention,), depends_on))
        return function

    return add


def run_checks(c: Any, progress: Callable[[str], None] = lambda name: None) -> list[Check]:
    """Run all checks on an adapter: a call that raises fails its check, a lost process ends all."""
    results: list[Check] = []
    ended = ""
    for name, run, oracles, depends_on in CHECKS:
        if not issubclass(c.oracle, oracles):
            continue
        progress(name)
        failures = [one.name for one in results if one.status == "failed"]
        wrong = [one for one in failures if one in depends_on]
        if ended:
            results.append(unchecked(name, f"its process had ended: {ended}"))
        elif is_random(results):
            results.append(unchecked(name, "equal calls return different outputs, or none that is finite"))
        elif wrong:
            what = "values" if "values" in wrong else f"values with a {wrong[0]}"
            results.append(unchecked(name, f"{what} are wrong already, without it"))
        else:
            try:
                found = run(c)
                results += [found] if isinstance(found, Check) else found
            except UnexpectedOutput as error:
                is_reported = "shapes" in failures
                results.append(
                    unchecked(name, "the output has another shape")
                    if is_reported
                    else failed(name, f"{error}.")
                )
            except CandidateError as error:
                results.append(failed(name, str(error)))
                ended = f"{error}".rstrip(".") + "." if error.ends_process else ""
    return results


def is_random(results: list[Check]) -> bool:
    """Return True if equal calls returned different outputs, or none that is finite (not: if they raised)."""
    return any(
        one.name == "determinism" and one.status == "failed" and one.error is not None for one in results
    )


def has_ended(results: list[Check]) -> bool:
    """Return True if the candidate's process is gone."""
    return any(one.status == "could not be checked" and "process had ended" in one.reason for one in results)
