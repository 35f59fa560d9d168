"""What the checker found: as a table in a terminal, as JSON, as JUnit's XML, and as a picture."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from torch import Tensor

from manyheads.checker.checks import Check
from manyheads.checker.diagnosis import Diagnosis
from manyheads.files import replacing

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
WARNING = (
    "The code under check ran as you: with your files, your network and your rights. This is no sandbox."
)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Keep the state of Python's random numbers, from which rich draws the ids of its styles."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


@dataclass
class Report:
    """The answers to all questions about one candidate.

    `target` is what was checked, `like` is its kind and `guessed` says that nobody named it; `verdict` is
    "passed", "failed" or "not judged"; `checks` are the answers, `diagnosis` is what is wrong and `notes`
    are what was assumed. `pair` holds the expected and the given map of the smallest failing input, for
    a picture: two tensors `[t, s]` (weights) or `[t, e]` (outputs), and which they are.
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
        """Return "failed", else "not judged" if a mask argument wasn't, else "passed".

        What couldn't be checked doesn't count.
        """
        found = {one.status for one in self.checks}
        return next((status for status in ("failed", "not judged") if status in found), "passed")

    @property
    def passed(self) -> bool:
        """Return True if no check failed and every mask argument was judged."""
        return self.verdict == "passed"

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; an error that is no number is null."""
        return {
            "format": FORMAT,
            "target": self.target,
            "like": self.like,
            "guessed": self.guessed,
            "verdict": self.verdict,
            "notes": self.notes,
            "checks": [
                {
                    "name": c.name,
                    "status": c.status,
                    "reason": c.reason,
                    "error": _finite(c.error),
                    "allowed": _finite(c.allowed),
                }
                for c in self.checks
            ],
            "diagnosis": [
                {
                    "mistake": d.mistake or None,
                    "verified": d.verified,
                    "error": _finite(d.error),
                    "says": d.says,
                    "mend": d.mend,
                }
                for d in self.diagnosis
            ],
        }

    def as_junit(self) -> str:
        """JUnit's XML: a test case for each check."""
        status = [one.status for one in self.checks]
        suite = ElementTree.Element(
            "testsuite",
            name=f"manyheads check {self.target}",
            tests=str(len(status)),
            failures=str(status.count("failed")),
            errors=str(status.count("not judged")),
            skipped=str(sum(one not in ("passed", "failed", "not judged") for one in status)),
        )
        said = "\n".join(self.words())
        for one in self.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=_clean(self.target), name=one.name)
            if one.status == "failed":
                ElementTree.SubElement(case, "failure", message=_clean(one.reason)).text = _clean(said)
            elif one.status == "not judged":
                ElementTree.SubElement(case, "error", message=_clean(f"not judged: {one.reason}"))
            elif one.status != "passed":
                ElementTree.SubElement(case, "skipped", message=_clean(f"{one.status}: {one.reason}"))
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")

    def words(self) -> list[str]:
        """The diagnosis in sentences."""
        named = [one for one in self.diagnosis if one.mistake]
        lines = []
        failed = [one.name for one in self.checks if one.status == "failed"]
        if failed and not self.diagnosis:
            only = ", ".join(failed)
            right = "" if {"values", "shapes", "a call"} & set(failed) else "The values are right. "
            lines.append(f"{right}What failed is: {only}.")
        if len(named) > 1 and len({one.mend for one in named}) >= 1:
            lines.append("These can't be told apart by any input, or are there together:")
        for one in self.diagnosis:
            says = one.says[:1].upper() + one.says[1:]
            lines.append(f"{one.mistake}: {says}." if one.mistake else f"{says}.")
            if one.mend:
                lines.append(f"  To mend it: {one.mend}.")
        unjudged = [one for one in self.checks if one.status == "not judged"]
        lines += [f"Not judged: {one.name}: {one.reason}" for one in unjudged]
        if unjudged:
            lines.append("  To judge it, check an adapter that takes its mask as docs/checker.md describes.")
        return lines

    @_random_state_kept()
    def print(self, console: Console | None = None) -> None:
        """The table, then the diagnosis, on the console given, or on one of its own."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        page = console or Console()
        page.print(
            f"[bold]{escape(self.target)}[/bold], checked like {escape(self.like)}"
            + (" (guessed)" if self.guessed else ""),
            highlight=False,
        )
        for note in self.notes:
            page.print(f"  {escape(note)}", highlight=False)
        table = Table(box=box.SIMPLE_HEAD)
        for column, justify in (
            ("", "left"),
            ("check", "left"),
            ("error", "right"),
            ("allowed", "right"),
            ("", "left"),
        ):
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for one in self.checks:
            mark, style = MARKS[one.status]
            reason = one.reason if one.status in ("passed", "failed") else f"{one.status}: {one.reason}"
            table.add_row(
                f"[{style}]{mark}[/{style}]", one.name, _short(one.error), _short(one.allowed), escape(reason)
            )
        page.print(table)
        count = {status: sum(one.status == status for one in self.checks) for status in MARKS}
        page.print(
            f"[bold]{self.verdict}[/bold]: " + ", ".join(f"{n} {status}" for status, n in count.items() if n),
            highlight=False,
        )
        for line in self.words():
            page.print(escape(line), highlight=False, soft_wrap=True)
        if self.pair is not None and not self.passed:
            page.print(escape(self._numbers()), highlight=False, soft_wrap=True)
        page.print(WARNING, style="dim", highlight=False)

    def _numbers(self) -> str:
        """Expected and got, where they differ most."""
        assert self.pair is not None
        want, got, what = self.pair
        if want.shape != got.shape:
            return f"Expected {what} {list(want.shape)}, got {list(got.shape)}."
        apart = (want - got).abs().nan_to_num(math.inf)
        i, j = divmod(int(apart.argmax()), apart.shape[1])
        at = f"query {i}, key {j}" if what == "weights" else f"query {i}, column {j}"
        numbers = f"expected {float(want[i, j]):.6g}, got {float(got[i, j]):.6g}"
        return f"In a small failing input, {what} at {at}: {numbers}."

    @_random_state_kept()
    def __repr__(self) -> str:
        from rich.console import Console

        page = Console(file=StringIO(), width=120, color_system=None)
        self.print(page)
        return page.file.getvalue().rstrip()  # type: ignore[attr-defined]

    # -- files -------------------------------------------------------------------------------------

    def save_json(self, path: Path | str) -> None:
        """Write `as_json` to path, in a folder made where there is none; OSError from the disk."""
        _write(Path(path), json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")

    def save_junit(self, path: Path | str) -> None:
        """Write `as_junit` to path, in a folder made where there is none; OSError from the disk."""
        _write(Path(path), self.as_junit() + "\n")

    def save_picture(self, folder: Path | str) -> Path | None:
        """Expected and given maps side by side, and their difference, into folder/check.png; None
        without a pair. OSError from the disk.
        """
        if self.pair is None:
            return None
        from manyheads import figures

        want, got, what = self.pair
        if want.shape != got.shape:
            return None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        figure = figures.difference(
            want, got, what=what, title=f"{Path(self.target).name}: a small failing input"
        )
        path = folder / "check.png"
        with replacing(path) as file:
            figure.savefig(file, dpi=110, format="png")
        return path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


def _finite(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else x


def _short(x: float | None) -> str:
    return "" if x is None else "0" if x == 0 else f"{x:.1e}"


def _clean(text: str) -> str:
    """Without the control characters that XML has no way to write."""
    return "".join(letter for letter in text if letter in "\t\n" or ord(letter) >= 32)
