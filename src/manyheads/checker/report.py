"""The report of a check: as a table in a terminal, as JSON, as JUnit XML, and as a picture."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from torch import Tensor

from manyheads.checker.candidates.roles import ROLES, Role
from manyheads.checker.checks.registry import Check
from manyheads.checker.checks.values import NAMES
from manyheads.checker.diagnosis import Diagnosis
from manyheads.storage import replacing

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
STATUSES = {  # the mark, the style and the element of JUnit XML of each status
    "passed": ("✓", "green", ""),
    "failed": ("✗", "red", "failure"),
    "convention": ("~", "cyan", ""),
    "not applicable": ("·", "dim", "skipped"),
    "could not be checked": ("?", "yellow", "skipped"),
    "not judged": ("?", "yellow", "error"),
}
WARNING = "The code under check ran with your files, your network and your permissions: it was not sandboxed."


def import_rich() -> None:
    """Import rich, which draws a random number then, and restore the state of Python's random numbers."""
    before = random.getstate()
    import rich.style  # noqa: F401

    random.setstate(before)


@dataclass
class Report:
    """The results for one candidate.

    Attributes:
        target: the name of the code that was checked.
        like: its kind.
        guessed: whether its kind was guessed.
        checks: the results of all checks.
        diagnosis: the bugs, or the differences that no known bug explains.
        notes: the assumptions of the checker.
        pair: the expected and the given map of a small failing input, for a picture: two tensors `[t, s]`
            (weights) or `[t, e]` (outputs), and "weights" or "output".
        roles: what each argument, parameter and setting was taken for, and why.
    """

    target: str
    like: str
    guessed: bool
    checks: list[Check]
    diagnosis: list[Diagnosis] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pair: tuple[Tensor, Tensor, str] | None = None
    roles: list[Role] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Return "passed", "not judged" or "failed".

        "not judged" means that no check failed, but a mask argument was not judged. Checks that could not be
        run don't count.
        """
        statuses = {check.status for check in self.checks}
        return next((status for status in ("failed", "not judged") if status in statuses), "passed")

    @property
    def passed(self) -> bool:
        """Return True if no check failed and every mask argument was judged."""
        return self.verdict == "passed"

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; an error that isn't finite is null."""
        return {
            "format": FORMAT,
            "target": self.target,
            "like": self.like,
            "guessed": self.guessed,
            "verdict": self.verdict,
            "notes": self.notes,
            "roles": [vars(role) for role in self.roles],
            "checks": [
                {"name": each.name, "status": each.status, "reason": each.reason}
                | {"error": finite(each.error), "allowed": finite(each.allowed)}
                for each in self.checks
            ],
            "diagnosis": [
                {"mistake": each.bug or None, "says": each.description, "mend": each.fix}
                | {"verified": each.verified, "error": finite(each.error)}
                for each in self.diagnosis
            ],
        }

    def as_junit(self) -> str:
        """Return JUnit XML, with a test case for each check."""
        counts = Counter(STATUSES[check.status][2] for check in self.checks)
        suite = ElementTree.Element(
            "testsuite",
            name=f"manyheads check {self.target}",
            tests=str(len(self.checks)),
            failures=str(counts["failure"]),
            errors=str(counts["error"]),
            skipped=str(counts["skipped"]),
        )
        for check in self.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=self.target, name=check.name)
            if element := STATUSES[check.status][2]:
                result = ElementTree.SubElement(case, element, message=check.explanation)
                result.text = "\n".join(self.words()) if element == "failure" else None
        text = '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")
        return re.sub(r"[^\t\n -\U0010ffff]", "", text)  # XML can't contain other control characters

    @property
    def headline(self) -> str:
        """The verdict in one line, with the names of the bugs."""
        names = ", ".join(dict.fromkeys(diagnosis.bug for diagnosis in self.diagnosis if diagnosis.bug))
        guessed = " (guessed)" if self.guessed else ""
        return f"{self.verdict}: {self.target} as {self.like}{guessed}{': ' * bool(names)}{names}"

    def select(self, status: str) -> list[Check]:
        """Return the checks with this status."""
        return [check for check in self.checks if check.status == status]

    def by_reason(self, status: str) -> dict[str, str]:
        """Return the names of the checks with this status by their reason."""
        return join_by_key((check.reason, check.name) for check in self.select(status))

    def words(self) -> list[str]:
        """Return what is wrong or not judged, and how to fix it, in sentences."""
        lines = []
        failed = self.select("failed")
        if failed and not self.diagnosis:
            compared = {each.status for each in self.checks if each.name.partition(" (")[0] in NAMES.values()}
            start = "The values are right. " if compared == {"passed"} else ""
            lines.append(f"{start}What failed is: {', '.join(check.name for check in failed)}.")
            lines += [f"  {check.name}: {check.reason}" for check in failed]
        if sum(bool(diagnosis.bug) for diagnosis in self.diagnosis) > 1:
            lines.append("No input distinguishes these, or they occur together:")
        for diagnosis in self.diagnosis:
            name = f"{diagnosis.bug}: " if diagnosis.bug else ""
            lines.append(f"{name}{diagnosis.description[:1].upper()}{diagnosis.description[1:]}.")
            lines += [f"  To fix it: {diagnosis.fix}."] if diagnosis.fix else []
        for reason, names in self.by_reason("not judged").items():
            lines.append(f"Not judged: {names}: {reason}")
        if self.pair is not None and not self.passed:
            lines.append(describe_pair(*self.pair))
        return lines

    def summary(self) -> str:
        """Return the verdict and what to fix as text, for a failing test."""
        return "\n".join([self.headline, *self.words()])

    def print(self, console: Console | None = None) -> None:
        """Print the verdict and what to fix, then what was understood, the checks and the conventions.

        Args:
            console: the console to print on, by default standard output.
        """
        import_rich()
        from rich.console import Console
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        console = console or Console()
        mark, style, _ = STATUSES[self.verdict]
        console.print(Text(f"{mark} {self.headline}", f"bold {style}"), highlight=False)
        for line in self.words():
            text = line.lstrip()
            console.print(Padding(Text(text), (0, 0, 0, 2 + len(line) - len(text))), highlight=False)
        for title, rows in self.sections():
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
            table = Table.grid(padding=(0, 1), pad_edge=False)
            for row in rows:
                table.add_row("", *(Text(cell, overflow="fold") for cell in row))
            console.print(table, highlight=False)
        console.print(f"\n{WARNING}", style="dim", highlight=False)

    def sections(self) -> Iterator[tuple[str, Sequence[tuple[str, ...]]]]:
        """Yield the title and the rows of each section of the printed report, without empty ones."""
        understood = [
            (role.name, ROLES["ignore"] if role.role == "ignore" else role.role, role.reason)
            for role in self.roles
            if role.kind != "parameter"
        ]
        parameters = [role for role in self.roles if role.kind == "parameter"]
        joined = join_by_key((role.reason, f"{role.name} = {role.role}") for role in parameters)
        understood += [("parameters", listed, reason) for reason, listed in joined.items()]
        names = {status: ", ".join(check.name for check in self.select(status)) for status in STATUSES}
        rows = [("✗", check.name, describe_result(check)) for check in self.select("failed")]
        settings = {each.name: each.reason for each in self.select("passed") if each.name.startswith("with ")}
        others = (each.name for each in self.select("passed") if each.name not in settings)
        names["passed"] = ", ".join(others)
        rows += [(STATUSES[x][0], x, names[x]) for x in ("not judged", "passed") if names[x]]
        rows += [("✓", name, reason) for name, reason in settings.items()]
        for reason, listed in self.by_reason("could not be checked").items():
            rows.append(("?", "could not be checked", f"{listed}: {reason}"))
        rows += [("·", "not applicable", names["not applicable"])] if names["not applicable"] else []
        counts = ", ".join(f"{n} {status}" for status in STATUSES if (n := len(self.select(status))))
        conventions = [(check.option, check.reason) for check in self.select("convention")]
        sections: dict[str, Sequence[tuple[str, ...]]] = {
            "Understood": [(name, role + f" ({reason})" * bool(reason)) for name, role, reason in understood],
            "Assumed": [(note,) for note in self.notes],
            f"Checks: {counts}": rows,
            "Conventions, not failures (--strict NAME or --strict all counts them)": conventions,
        }
        yield from ((title, rows) for title, rows in sections.items() if rows)

    def __repr__(self) -> str:
        import_rich()
        from rich.console import Console

        text = StringIO()
        self.print(Console(file=text, width=120, color_system=None))
        return text.getvalue().rstrip()

    # -- files -------------------------------------------------------------------------------------

    def save_json(self, path: Path | str) -> None:
        """Write `as_json` to a file, in a folder that is created if needed.

        Args:
            path: the file.

        Raises:
            OSError: if the file can't be written.
        """
        write(Path(path), json.dumps(self.as_json(), indent=1, ensure_ascii=False))

    def save_junit(self, path: Path | str) -> None:
        """Write `as_junit` to a file, in a folder that is created if needed.

        Args:
            path: the file.

        Raises:
            OSError: if the file can't be written.
        """
        write(Path(path), self.as_junit())

    def save_picture(self, folder: Path | str) -> Path | None:
        """Draw the expected and the given map and their difference.

        Args:
            folder: the folder of check.png, which is created if needed.

        Returns:
            The file, or None if there is no pair of maps of the same shape.

        Raises:
            OSError: if the file can't be written.
        """
        if self.pair is None or self.pair[0].shape != self.pair[1].shape:
            return None
        from manyheads import figures

        expected, got, quantity = self.pair
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{Path(self.target).name}: a small failing input"
        figure = figures.difference(expected, got, what=quantity, title=title)
        path = folder / "check.png"
        with replacing(path) as file:
            figure.savefig(file, dpi=110, format="png")
        return path


def write(path: Path, text: str) -> None:
    """Write a text and a newline to a file atomically, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(f"{text}\n".encode())


def join_by_key(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the values of each key, joined by commas."""
    joined: dict[str, list[str]] = {}
    for key, value in pairs:
        joined.setdefault(key, []).append(value)
    return {key: ", ".join(values) for key, values in joined.items()}


def finite(number: float | None) -> float | None:
    """Return the number, or None if it isn't finite."""
    return number if number is not None and math.isfinite(number) else None


def describe_result(check: Check) -> str:
    """Return the reason of a check, with the error that was measured and the error that is allowed."""
    if check.error is None or check.allowed is None:
        return check.reason
    return f"error {check.error:.1e} (allowed {check.allowed:.1e}): {check.reason}"


def describe_pair(expected: Tensor, got: Tensor, quantity: str) -> str:
    """Describe the entry in which two maps of weights or outputs differ most."""
    if expected.shape != got.shape:
        return f"Expected {quantity} {list(expected.shape)}, got {list(got.shape)}."
    difference = (expected - got).abs().nan_to_num(math.inf)
    i, j = divmod(int(difference.argmax()), difference.shape[1])
    place = f"query {i}, {'key' if quantity == 'weights' else 'column'} {j}"
    numbers = f"expected {float(expected[i, j]):.6g}, got {float(got[i, j]):.6g}"
    return f"In a small failing input, {quantity} at {place}: {numbers}."
