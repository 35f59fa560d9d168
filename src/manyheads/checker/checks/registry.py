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
        name: the name of the check.
        status: "passed", "failed", "not applicable", "could not be checked" (which doesn't change the
            verdict), or "not judged" (then the candidate hasn't passed).
        reason: why it has this status.
        error: the largest difference that was measured.
        allowed: the largest difference that passes.
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
    """Return the result of a check that passed. `run_checks` adds the name to this and other results."""
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
    """Return the result of a check that passes if the error is allowed."""
    return passed(reason, error, allowed) if error <= allowed else failed(failure, error, allowed)


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
    """Register a function as a check, by default of attention.

    Args:
        name: the name of the check in reports.
        *oracles: the oracles of the candidates that it applies to.
        depends_on: the checks without which it isn't run, if they have failed.

    Returns:
        A decorator.
    """

    def add(function: Function) -> Function:
        CHECKS.append(Entry(name, function, oracles or (Attention,), depends_on))
        return function

    return add


def run_checks(adapter: Any, progress: Callable[[str], None]) -> list[Check]:
    """Run all checks on a candidate. A check fails if its call raises."""
    results: list[Check] = []
    for entry in CHECKS:
        if issubclass(adapter.oracle, entry.oracles):
            progress(entry.name)
            new = run_check(adapter, entry, tuple(results))
            results += [result if result.name else replace(result, name=entry.name) for result in new]
    return results


def run_check(adapter: Any, entry: Entry, before: tuple[Check, ...]) -> Iterator[Check]:
    """Yield the results of one check, given the results of the checks before it."""
    failures = [result.name for result in before if result.status == "failed"]
    wrong = [name for name in failures if name in entry.depends_on]
    if adapter.ended is not None:
        yield unchecked(f"its process had ended: {adapter.ended.reason}.")
    elif is_random(before):
        yield unchecked("equal calls return different outputs, or none that is finite")
    elif wrong:
        values = "values" if "values" in wrong else f"values with a {wrong[0]}"
        yield unchecked(f"{values} are wrong already, without it")
    else:
        try:
            result = entry.run(adapter)
            yield from [result] if isinstance(result, Check) else result
        except UnexpectedOutput as error:
            is_reported = "shapes" in failures
            yield unchecked("the output has another shape") if is_reported else failed(f"{error}.")
        except CandidateError as error:
            adapter.ended = error if isinstance(error, ProcessEnded) else None
            yield failed(str(error))


def is_random(results: Iterable[Check]) -> bool:
    """Return True if equal calls returned different outputs or only non-finite ones, False if they raised."""
    return any(
        result.name == "determinism" and result.status == "failed" and result.error is not None
        for result in results
    )
