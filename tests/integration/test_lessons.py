"""The lessons run, hold no outputs, and their exercises are graded as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from typer.testing import CliRunner

from manyheads import checker
from manyheads.checker.isolation.target import find
from manyheads.cli import app
from manyheads.text import lessons
from tests.waiting import HANG

FOLDER = Path(__file__).parents[2] / "docs" / "lessons"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXERCISES = sorted(path.stem for path in (FOLDER / "exercises").glob("*.py"))


def test_there_are_four() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]
    assert lessons.source() == FOLDER


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_is_stored_without_outputs_and_runs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    NotebookClient(
        book,
        timeout=HANG,
        startup_timeout=HANG,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()


def asked(stem: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments of check) as the notebooks' command lines have them."""
    found = []
    for path in NOTEBOOKS:
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        for line in re.findall(rf"manyheads check (\S*{stem}\.py:.*)", text):
            words = re.findall(r"'[^']*'|\"[^\"]*\"|[^\s`]+", line)
            options = {
                a[2:]: b.strip("'\"") for a, b in zip(words[1::2], words[2::2], strict=False) if a[:2] == "--"
            }
            given = {k: v for k, v in options.items() if k in ("like", "init", "layout")}
            if "weights" in options:
                given["weights"] = dict(pair.split("=") for pair in options["weights"].split(","))
            found.append((words[0].rpartition(":")[2].strip("`"), given))
    return found


# What each unfilled file is told: the name of its mistake, or words of what is still to be written.
LEADS = {
    "decoder_attention": "masked-after-softmax",
    "many_heads": "split-without-transpose",
    "mask_and_weights": "polarity-swapped + weights-averaged",
    "masked_attention": "masked-zero",
    "one_head": "write three lines",
    "overridden": "softmax-over-queries",
    "packed_heads": "split is yours to write",
    "positions": "the_angles is yours to write",
    "rotary": "turn is yours to write",
    "sequence_first": "the sequence comes first here",
}


@pytest.mark.full
@pytest.mark.usefixtures("quick", "one_thread")
@pytest.mark.parametrize("stem", EXERCISES)
def test_an_exercise_fails_and_leads_on_and_its_solution_passes(stem: str) -> None:
    every = asked(stem)
    assert every, f"no notebook says how {stem}.py is checked"
    for name, given in every:
        solution = checker.check(find(f"{FOLDER / 'solutions' / stem}.py:{name}"), **given)
        assert solution.passed, solution
        try:
            report = checker.check(find(f"{FOLDER / 'exercises' / stem}.py:{name}"), **given)
            assert not report.passed
            told = [diagnosis.bug for diagnosis in report.diagnosis]
            told += [check.reason for check in report.checks if check.status == "failed"]
        except checker.Unclear as error:  # exit code 2
            told = [str(error)]
        assert any(LEADS[stem] in words for words in told), told


def test_the_command_copies_files_and_keeps_existing_ones(tmp_path: Path) -> None:
    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "manyheads", "lessons", "mine", "--no-start"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
        return done.stdout

    assert "files copied" in run()
    first = tmp_path / "mine" / NOTEBOOKS[0].name
    assert first.read_bytes() == NOTEBOOKS[0].read_bytes()
    first.write_text("a learner's work")
    assert "which are kept" in run()
    assert first.read_text() == "a learner's work"


@pytest.mark.parametrize(
    ("user", "says"), [(0, "jupyter lab 'my lessons' --allow-root"), (1000, "jupyter lab 'my lessons'")]
)
@pytest.mark.parametrize("installed", [True, False])
def test_the_command_starts_jupyter_or_prints_how(
    user: int, says: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], str]] = []

    def run(words: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append((words, env["PATH"]))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: user, raising=False)
    monkeypatch.setattr(lessons, "can_start", lambda: installed)
    monkeypatch.setattr(subprocess, "run", run)
    unstarted = CliRunner().invoke(app, ["lessons", "my lessons", "--no-start"])
    assert (unstarted.exit_code, ran) == (0, [])
    last = unstarted.stdout.splitlines()[-1]
    assert last.endswith(says)
    assert ("pip install" in last) is not installed
    started = CliRunner().invoke(app, ["lessons", "my lessons"])
    if not installed:
        assert (started.exit_code, ran) == (0, [])
        return
    [(words, path)] = ran
    assert started.exit_code == 3  # Jupyter's own
    assert words == [
        sys.executable,
        "-m",
        "jupyterlab",
        "my lessons",
        *(["--allow-root"] if not user else []),
    ]
    assert path.split(os.pathsep)[0] == sysconfig.get_path("scripts")  # where the command manyheads is


@pytest.mark.parametrize("blocked", ["mine", "above/mine", "mine/solutions"])
def test_a_file_in_the_way_is_named_and_nothing_is_copied(blocked: str, tmp_path: Path) -> None:
    file = tmp_path / blocked.removesuffix("/mine")
    file.parent.mkdir(exist_ok=True)
    file.write_text("something")
    with pytest.raises(NotADirectoryError, match="where a file is in its path"):
        lessons.copy(tmp_path / ("above/mine" if blocked.startswith("above") else "mine"))
    assert not list(tmp_path.rglob("*.ipynb"))
    assert file.read_text() == "something"
