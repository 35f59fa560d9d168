"""The result of a check, the list of all checks, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.isolation.errors import CandidateError, ProcessEnded
from manyheads.checker.oracle import Attention, Oracle


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: The name of the check.
        status: "passed", "failed", "not applicable", "could not be checked" (which doesn't change the
            verdict), or "not judged" (then the candidate doesn't pass).
        reason: Why the check has this status.
        error: The largest difference that was measured.
        allowed: The largest difference that passes.
    """

    name: str
    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None

    @property
    def explanation(self) -> str:
        """The reason, preceded by the status unless the check passed or failed."""
        return self.reason if self.status in ("passed", "failed") else f"{self.status}: {self.reason}"


def passed(reason: str = "", error: float | None = None, allowed: float | None = None) -> Check:
    """Return the result of a check that passed. `run_checks` adds the name of the check."""
    return Check("", "passed", reason, error, allowed)


def failed(reason: str, error: float | None = None, allowed: float | None = None) -> Check:
    """Return the result of a check that failed."""
    return Check("", "failed", reason, error, allowed)


def skipped(reason: str) -> Check:
    """Return the result of a check that doesn't apply."""
    return Check("", "not applicable", reason)


def unchecked(reason: str) -> Check:
    """Return the result of a check that could not be run."""
    return Check("", "could not be checked", reason)


def judge(error: float, allowed: float, reason: str, failure: str) -> Check:
    """Return the result of a check that passes if the error is at most `allowed`."""
    return passed(reason, error, allowed) if error <= allowed else failed(failure, error, allowed)


Function = Callable[[Any], Check | Iterator[Check]]


class Entry(NamedTuple):
    """A registered check: its name and function, the oracles it applies to, and the checks it depends on."""

    name: str
    run: Function
    oracles: tuple[type[Oracle], ...]
    depends_on: tuple[str, ...]


CHECKS: list[Entry] = []


def check(
    name: str, *oracles: type[Oracle], depends_on: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Register a function as a check.

    Args:
        name: The name of the check in reports.
        *oracles: The check runs on candidates with one of these oracles (`Attention` if none is given).
        depends_on: The check doesn't run if one of these checks has failed.

    Returns:
        A decorator.
    """

    def add(function: Function) -> Function:
        CHECKS.append(Entry(name, function, oracles or (Attention,), depends_on))
        return function

    return add


def run_checks(adapter: Any, progress: Callable[[str], None]) -> list[Check]:
    """Run all checks on a candidate. A check fails if the candidate raises an error."""
    results: list[Check] = []
    for entry in CHECKS:
        if issubclass(adapter.oracle, entry.oracles):
            progress(entry.name)
            new_results = run_check(adapter, entry, tuple(results))
            results += [result if result.name else replace(result, name=entry.name) for result in new_results]
    return results


def run_check(adapter: Any, entry: Entry, previous: tuple[Check, ...]) -> Iterator[Check]:
    """Yield the results of one check, given the results of the previous checks."""
    failures = [result.name for result in previous if result.status == "failed"]
    failed_dependencies = [name for name in failures if name in entry.depends_on]
    if adapter.ended is not None:
        yield unchecked(f"its process had ended: {adapter.ended.reason}.")
    elif is_random(previous):
        yield unchecked("equal calls return different outputs or only non-finite ones")
    elif failed_dependencies:
        name = failed_dependencies[0]
        values = "values" if "values" in failed_dependencies else f"values with a {name}"
        yield unchecked(f"{values} are already wrong")
    else:
        try:
            result = entry.run(adapter)
            yield from [result] if isinstance(result, Check) else result
        except UnexpectedOutput as error:
            is_reported = "shapes" in failures
            yield unchecked("the output has the wrong shape") if is_reported else failed(f"{error}.")
        except CandidateError as error:
            adapter.ended = error if isinstance(error, ProcessEnded) else None
            yield failed(str(error))


def is_random(results: Iterable[Check]) -> bool:
    """Return True if equal calls returned different or only non-finite outputs, False if they raised."""
    return any(
        result.name == "determinism" and result.status == "failed" and result.error is not None
        for result in results
    )
