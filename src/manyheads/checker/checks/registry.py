"""The result of a check, the list of all checks, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from manyheads.checker.bugs import Bug
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.isolation.errors import CandidateError, ProcessEnded
from manyheads.checker.oracle import Attention, Oracle

# The names for `--strict` of the conventions that checks report.
CONVENTIONS = ("empty-rows", "masked-nan", "mask-form", "masks-with-weights", "mask-in-place-of-causal",
               "given-bias", "padded-queries", "averaged-weights", "weights-after-dropout", "unused-dropout",
               "self-attention-alone", "non-contiguous-inputs", "gradients", "float16",
               "bfloat16")  # fmt: skip
# The checks that say something of a candidate whose outputs in evaluation depend on the random seed.
SEEDED = ("shapes", "determinism", "training and evaluation")


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: The name of the check.
        status: "passed", "failed", "convention" (it differs from this library, but isn't wrong), "not
            applicable", "could not be checked" (which doesn't change the verdict), or "not judged" (then the
            candidate doesn't pass).
        reason: Why the check has this status.
        error: The largest difference that was measured.
        allowed: The largest difference that passes.
        bug: The known bug that the check found.
    """

    name: str
    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None
    bug: Bug | None = None

    @property
    def option(self) -> str:
        """The name of the check for `--strict`."""
        return self.name.lower().replace(" ", "-")

    @property
    def explanation(self) -> str:
        """The reason, preceded by the status unless the check passed or failed."""
        return self.reason if self.status in ("passed", "failed") else f"{self.status}: {self.reason}"


def passed(reason: str = "", error: float | None = None, allowed: float | None = None) -> Check:
    """Return the result of a check that passed. `run_checks` adds the name of the check."""
    return Check("", "passed", reason, error, allowed)


def failed(
    reason: str, error: float | None = None, allowed: float | None = None, bug: Bug | None = None
) -> Check:
    """Return the result of a check that failed."""
    return Check("", "failed", reason, error, allowed, bug)


def convention(reason: str, bug: Bug | None = None, name: str = "") -> Check:
    """Return the result of a check that found another convention than this library's."""
    return Check(name, "convention", reason, bug=bug)


def skipped(reason: str) -> Check:
    """Return the result of a check that doesn't apply."""
    return Check("", "not applicable", reason)


def unchecked(reason: str) -> Check:
    """Return the result of a check that could not be run."""
    return Check("", "could not be checked", reason)


def judge(error: float, allowed: float, reason: str, failure: str, bug: Bug | None = None) -> Check:
    """Return the result of a check that passes if the error is at most `allowed`."""
    return passed(reason, error, allowed) if error <= allowed else failed(failure, error, allowed, bug)


Function = Callable[[Any], Check | Iterator[Check]]


class Entry(NamedTuple):
    """A registered check: its name and function, and the other arguments of `check`."""

    name: str
    run: Function
    oracles: tuple[type[Oracle], ...]
    depends_on: tuple[str, ...]
    needs_oracle: bool


CHECKS: list[Entry] = []


def check(
    name: str, *oracles: type[Oracle], depends_on: tuple[str, ...] = (), needs_oracle: bool = False
) -> Callable[[Function], Function]:
    """Register a function as a check.

    Args:
        name: The name of the check in reports.
        *oracles: The check runs on candidates with one of these oracles (`Attention` if none is given).
        depends_on: The check doesn't run if one of these checks has failed.
        needs_oracle: The check doesn't run if something besides known parts is in the candidate.

    Returns:
        A decorator.
    """

    def add(function: Function) -> Function:
        CHECKS.append(Entry(name, function, oracles or (Attention,), depends_on, needs_oracle))
        return function

    return add


def run_checks(adapter: Any, progress: Callable[[str], None], only: Collection[str] = ()) -> list[Check]:
    """Run checks on a candidate, all or some. A check fails if the candidate raises an error."""
    results: list[Check] = []
    for entry in CHECKS:
        if issubclass(adapter.oracle, entry.oracles) and (not only or entry.name in only):
            progress(entry.name)
            new_results = run_check(adapter, entry, tuple(results))
            results += [result if result.name else replace(result, name=entry.name) for result in new_results]
    return results


def run_check(adapter: Any, entry: Entry, previous: tuple[Check, ...]) -> Iterator[Check]:
    """Yield the results of one check, given the results of the previous checks."""
    failures = [result.name for result in previous if result.status == "failed"]
    failed_dependencies = [name for name in failures if name.partition(" (")[0] in entry.depends_on]
    if adapter.ended is not None:
        yield unchecked(f"its process had ended: {adapter.ended.reason}.")
    elif adapter.is_seeded and entry.name not in SEEDED:
        yield unchecked("its output in evaluation depends on the random seed")
    elif is_random(previous):
        yield unchecked("equal calls return different outputs or only non-finite ones")
    elif entry.needs_oracle and adapter.unknown:
        yield unchecked("without knowing what else is in it, the right output isn't known")
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


def apply_strict(results: Iterable[Check], strict: Collection[str]) -> list[Check]:
    """Return the results; conventions whose option is in `strict`, or all of them for "all", fail."""
    return [
        replace(result, status="failed")
        if result.status == "convention" and {"all", result.option} & {*strict}
        else result
        for result in results
    ]


def is_random(results: Iterable[Check]) -> bool:
    """Return True if equal calls returned different or only non-finite outputs, False if they raised."""
    return any(
        result.name == "determinism" and result.status == "failed" and result.error is not None
        for result in results
    )
