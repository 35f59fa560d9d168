"""The report: as a table in a terminal, as JSON, as JUnit XML, and as a picture."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
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
MARKS = {
    "passed": ("✓", "green"),
    "failed": ("✗", "red"),
    "not applicable": ("·", "dim"),
    "could not be checked": ("?", "yellow"),
    "not judged": ("?", "yellow"),
}
WARNING = "The code under check ran with your files, your network and your permissions: it was not sandboxed."


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the state of Python's random numbers, from which rich draws the ids of its styles."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


@dataclass
class Report:
    """The results for one candidate.

    Attributes:
        target: what was checked.
        like: its kind.
        guessed: whether its kind was guessed.
        checks: the results of all checks.
        diagnosis: what is wrong.
        notes: what was assumed.
        pair: the expected and the given map of a small failing input, for a picture: two tensors `[t, s]`
            (weights) or `[t, e]` (outputs), and which they are.
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
        """Return "failed", or "not judged" if a mask argument wasn't, or "passed".

        Checks that could not be run don't count.
        """
        statuses = {one.status for one in self.checks}
        return next((status for status in ("failed", "not judged") if status in statuses), "passed")

    @property
    def passed(self) -> bool:
        """Return True if no check failed and every mask argument was judged."""
        return self.verdict == "passed"

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; an error that isn't finite is null."""
        checks = [asdict(one) for one in self.checks]
        diagnosis = [asdict(one) | {"mistake": one.mistake or None} for one in self.diagnosis]
        for one in checks + diagnosis:
            for key in ("error", "allowed"):
                if one.get(key) is not None and not math.isfinite(one[key]):
                    one[key] = None
        return {
            "format": FORMAT,
            "target": self.target,
            "like": self.like,
            "guessed": self.guessed,
            "verdict": self.verdict,
            "notes": self.notes,
            "checks": checks,
            "diagnosis": diagnosis,
        }

    def as_junit(self) -> str:
        """Return JUnit XML, with a test case for each check."""
        status = [one.status for one in self.checks]
        suite = ElementTree.Element(
            "testsuite",
            name=f"manyheads check {self.target}",
            tests=str(len(status)),
            failures=str(status.count("failed")),
            errors=str(status.count("not judged")),
            skipped=str(sum(one not in ("passed", "failed", "not judged") for one in status)),
        )
        for one in self.checks:
            case = ElementTree.SubElement(
                suite, "testcase", classname=without_controls(self.target), name=one.name
            )
            if one.status == "passed":
                continue
            tag = {"failed": "failure", "not judged": "error"}.get(one.status, "skipped")
            message = one.reason if one.status == "failed" else f"{one.status}: {one.reason}"
            element = ElementTree.SubElement(case, tag, message=without_controls(message))
            if one.status == "failed":
                element.text = without_controls("\n".join(self.words()))
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")

    def words(self) -> list[str]:
        """Return the diagnosis in sentences."""
        lines = []
        failed = [one.name for one in self.checks if one.status == "failed"]
        if failed and not self.diagnosis:
            are_values_right = not {"values", "shapes", "a call"} & set(failed)
            lines.append(
                "The values are right. " * are_values_right + f"What failed is: {', '.join(failed)}."
            )
        if sum(bool(one.mistake) for one in self.diagnosis) > 1:
            lines.append("No input distinguishes these, or they occur together:")
        for one in self.diagnosis:
            says = one.says[:1].upper() + one.says[1:]
            lines.append(f"{one.mistake}: {says}." if one.mistake else f"{says}.")
            if one.mend:
                lines.append(f"  To fix it: {one.mend}.")
        unjudged = [one for one in self.checks if one.status == "not judged"]
        lines += [f"Not judged: {one.name}: {one.reason}" for one in unjudged]
        if unjudged:
            lines.append("  To judge it, check an adapter that takes its mask as docs/checker.md describes.")
        return lines

    @keep_random_state()
    def print(self, console: Console | None = None) -> None:
        """Print the table, then the diagnosis.

        Args:
            console: where to print; the default is standard output.
        """
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        page = console or Console()
        guessed = " (guessed)" if self.guessed else ""
        page.print(
            f"[bold]{escape(self.target)}[/bold], checked as {escape(self.like)}{guessed}", highlight=False
        )
        for note in self.notes:
            page.print(f"  {escape(note)}", highlight=False)
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("", "check", "error", "allowed", ""):
            justify = "right" if column in ("error", "allowed") else "left"
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for one in self.checks:
            mark, style = MARKS[one.status]
            reason = one.reason if one.status in ("passed", "failed") else f"{one.status}: {one.reason}"
            numbers = ("" if x is None else f"{x:.1e}" if x else "0" for x in (one.error, one.allowed))
            table.add_row(f"[{style}]{mark}[/{style}]", one.name, *numbers, escape(reason))
        page.print(table)
        counts = {status: sum(one.status == status for one in self.checks) for status in MARKS}
        counted = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        page.print(f"[bold]{self.verdict}[/bold]: {counted}", highlight=False)
        lines = self.words()
        if self.pair is not None and not self.passed:
            lines.append(self._numbers(*self.pair))
        for line in lines:
            page.print(escape(line), highlight=False, soft_wrap=True)
        page.print(WARNING, style="dim", highlight=False)

    def _numbers(self, expected: Tensor, got: Tensor, what: str) -> str:
        """Return the expected and the given number where they differ most."""
        if expected.shape != got.shape:
            return f"Expected {what} {list(expected.shape)}, got {list(got.shape)}."
        difference = (expected - got).abs().nan_to_num(math.inf)
        i, j = divmod(int(difference.argmax()), difference.shape[1])
        at = f"query {i}, {'key' if what == 'weights' else 'column'} {j}"
        numbers = f"expected {float(expected[i, j]):.6g}, got {float(got[i, j]):.6g}"
        return f"In a small failing input, {what} at {at}: {numbers}."

    @keep_random_state()
    def __repr__(self) -> str:
        from rich.console import Console

        text = StringIO()
        self.print(Console(file=text, width=120, color_system=None))
        return text.getvalue().rstrip()

    # -- files -------------------------------------------------------------------------------------

    def save_json(self, path: Path | str) -> None:
        """Write `as_json` to a file, in a folder that is made if needed; OSError from the disk."""
        write(Path(path), json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")

    def save_junit(self, path: Path | str) -> None:
        """Write `as_junit` to a file, in a folder that is made if needed; OSError from the disk."""
        write(Path(path), self.as_junit() + "\n")

    def save_picture(self, folder: Path | str) -> Path | None:
        """Draw expected and given maps and their difference; OSError from the disk.

        Args:
            folder: the folder of check.png, made if needed.

        Returns:
            The file, or None if there is no pair of maps of one shape.
        """
        if self.pair is None or self.pair[0].shape != self.pair[1].shape:
            return None
        from manyheads import figures

        expected, got, what = self.pair
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{Path(self.target).name}: a small failing input"
        figure = figures.difference(expected, got, what=what, title=title)
        path = folder / "check.png"
        with replacing(path) as file:
            figure.savefig(file, dpi=110, format="png")
        return path


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


def without_controls(text: str) -> str:
    """Return the text without the control characters that XML can't contain."""
    return "".join(letter for letter in text if letter in "\t\n" or ord(letter) >= 32)
