"""The report of a check: as a table in a terminal, as JSON, as JUnit XML, and as a picture."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from torch import Tensor

from manyheads.checker.checks.registry import Check
from manyheads.checker.diagnosis import Diagnosis
from manyheads.storage import replacing

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
STATUSES = {  # the mark, the style and the element of JUnit XML of each status
    "passed": ("✓", "green", ""),
    "failed": ("✗", "red", "failure"),
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
    """

    target: str
    like: str
    guessed: bool
    checks: list[Check]
    diagnosis: list[Diagnosis] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pair: tuple[Tensor, Tensor, str] | None = None

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
            "checks": [
                vars(check) | {"error": finite(check.error), "allowed": finite(check.allowed)}
                for check in self.checks
            ],
            "diagnosis": [
                {
                    "mistake": diagnosis.bug or None,
                    "says": diagnosis.description,
                    "mend": diagnosis.fix,
                    "verified": diagnosis.verified,
                    "error": finite(diagnosis.error),
                }
                for diagnosis in self.diagnosis
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

    def words(self) -> list[str]:
        """Return the diagnosis in sentences."""
        lines = []
        failed = [check.name for check in self.checks if check.status == "failed"]
        if failed and not self.diagnosis:
            start = "" if {"values", "shapes", "a call"} & set(failed) else "The values are right. "
            lines.append(f"{start}What failed is: {', '.join(failed)}.")
        if sum(bool(diagnosis.bug) for diagnosis in self.diagnosis) > 1:
            lines.append("No input distinguishes these, or they occur together:")
        for diagnosis in self.diagnosis:
            name = f"{diagnosis.bug}: " if diagnosis.bug else ""
            lines.append(f"{name}{diagnosis.description[:1].upper()}{diagnosis.description[1:]}.")
            if diagnosis.fix:
                lines.append(f"  To fix it: {diagnosis.fix}.")
        unjudged = [check for check in self.checks if check.status == "not judged"]
        lines += [f"Not judged: {check.name}: {check.reason}" for check in unjudged]
        if unjudged:
            lines.append("  To judge it, check an adapter that takes its mask as docs/checker.md describes.")
        return lines

    def print(self, console: Console | None = None) -> None:
        """Print the table, then the diagnosis.

        Args:
            console: the console to print on, by default standard output.
        """
        import_rich()
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = console or Console()
        guessed = " (guessed)" if self.guessed else ""
        title = f"[bold]{escape(self.target)}[/bold], checked as {escape(self.like)}{guessed}"
        console.print(title, highlight=False)
        for note in self.notes:
            console.print(f"  {escape(note)}", highlight=False)
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("", "check", "error", "allowed", ""):
            justify = "right" if column in ("error", "allowed") else "left"
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for check in self.checks:
            mark, style, _ = STATUSES[check.status]
            numbers = ("" if x is None else f"{x:.1e}" if x else "0" for x in (check.error, check.allowed))
            table.add_row(f"[{style}]{mark}[/{style}]", check.name, *numbers, escape(check.explanation))
        console.print(table)
        counts = Counter(check.status for check in self.checks)
        counted = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        console.print(f"[bold]{self.verdict}[/bold]: {counted}", highlight=False)
        lines = self.words()
        if self.pair is not None and not self.passed:
            lines.append(describe_pair(*self.pair))
        for line in lines:
            console.print(escape(line), highlight=False, soft_wrap=True)
        console.print(WARNING, style="dim", highlight=False)

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


def finite(number: float | None) -> float | None:
    """Return the number, or None if it isn't finite."""
    return number if number is not None and math.isfinite(number) else None


def describe_pair(expected: Tensor, got: Tensor, quantity: str) -> str:
    """Describe the entry in which two maps of weights or outputs differ most."""
    if expected.shape != got.shape:
        return f"Expected {quantity} {list(expected.shape)}, got {list(got.shape)}."
    difference = (expected - got).abs().nan_to_num(math.inf)
    i, j = divmod(int(difference.argmax()), difference.shape[1])
    place = f"query {i}, {'key' if quantity == 'weights' else 'column'} {j}"
    numbers = f"expected {float(expected[i, j]):.6g}, got {float(got[i, j]):.6g}"
    return f"In a small failing input, {quantity} at {place}: {numbers}."
