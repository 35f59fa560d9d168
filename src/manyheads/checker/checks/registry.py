"""What a check is, and how all of them are run on a candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        error: how far the numbers are apart.
        allowed: how far they may be apart.
    """

    name: str
    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None

    @property
    def explanation(self) -> str:
        """The reason, after the status unless that is plain."""
        is_plain = self.status in ("passed", "failed")
        return self.reason if is_plain else f"{self.status}: {self.reason}"


def passed(reason: str = "", error: float | None = None, allowed: float | None = None) -> Check:
    """Return a check that passed; `run_checks` adds its name, as to the others."""
    return Check("", "passed", reason, error, allowed)


def failed(reason: str, error: float | None = None, allowed: float | None = None) -> Check:
    """Return a check that failed."""
    return Check("", "failed", reason, error, allowed)


def skipped(reason: str) -> Check:
    """Return a check that doesn't apply."""
    return Check("", "not applicable", reason)


def unchecked(reason: str) -> Check:
    """Return a check that could not be run."""
    return Check("", "could not be checked", reason)


def judge(error: float, allowed: float, reason: str, failure: str) -> Check:
    """Return a check that passes if the error is allowed."""
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
    """Register a check, of attention by default; it isn't run if one that it depends on has failed."""

    def add(function: Function) -> Function:
        CHECKS.append(Entry(name, function, oracles or (Attention,), depends_on))
        return function

    return add


def run_checks(c: Any, progress: Callable[[str], None] = lambda name: None) -> list[Check]:
    """Run all checks on an adapter: a call that raises fails its check, a lost process ends all."""
    results: list[Check] = []
    for entry in CHECKS:
        if issubclass(c.oracle, entry.oracles):
            progress(entry.name)
            for result in run_check(c, entry, results):
                results.append(result if result.name else replace(result, name=entry.name))
    return results


def run_check(c: Any, entry: Entry, before: list[Check]) -> Iterator[Check]:
    """Yield the results of one check, given those of the checks before it."""
    failures = [result.name for result in before if result.status == "failed"]
    wrong = [name for name in failures if name in entry.depends_on]
    if c.ended is not None:
        yield unchecked(f"its process had ended: {c.ended.reason}.")
    elif is_random(before):
        yield unchecked("equal calls return different outputs, or none that is finite")
    elif wrong:
        what = "values" if "values" in wrong else f"values with a {wrong[0]}"
        yield unchecked(f"{what} are wrong already, without it")
    else:
        try:
            found = entry.run(c)
            yield from [found] if isinstance(found, Check) else found
        except UnexpectedOutput as error:
            is_reported = "shapes" in failures
            yield unchecked("the output has another shape") if is_reported else failed(f"{error}.")
        except CandidateError as error:
            c.ended = error if isinstance(error, ProcessEnded) else None
            yield failed(str(error))


def is_random(results: list[Check]) -> bool:
    """Return True if equal calls returned different outputs, or none that is finite (not: if they raised)."""
    return any(
        result.name == "determinism" and result.status == "failed" and result.error is not None
        for result in results
    )
