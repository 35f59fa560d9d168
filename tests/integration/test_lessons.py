"""The lessons run, have no outputs, and their exercises are graded as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from manyheads import checker
from manyheads.checker.isolation.target import find
from manyheads.text import lessons
from tests.waiting import HANG

FOLDER = Path(__file__).parents[2] / "docs" / "lessons"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXERCISES = sorted(path.stem for path in (FOLDER / "exercises").glob("*.py"))


def test_there_are_four_lessons() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]
    assert lessons.source() == FOLDER


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_is_stored_without_outputs(path: Path) -> None:
    import nbformat  # slow: jsonschema builds the grammars of internet addresses

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.full
@pytest.mark.skipif(find_spec("sphinx") is not None, reason="test_site.py runs them as pages of the site")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_runs(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    waits = {"timeout": HANG, "startup_timeout": HANG}
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(book, kernel_name="python3", resources=resources, **waits).execute()


def commands_of(stem: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments of check) as the notebooks' command lines have them."""
    import nbformat

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


# The report of each unfilled file: the name of its bug, or words of what is still to be written.
LEADS = {
    "decoder_attention": "masked-after-softmax",
    "many_heads": "split-without-transpose",
    "mask_and_weights": "polarity-swapped + weights-averaged",
    "masked_attention": "masked-zero",
    "one_head": "Write three lines",
    "overridden": "softmax-over-queries",
    "packed_heads": "Write split",
    "positions": "Write the_angles",
    "rotary": "Write turn",
    "sequence_first": "Write split",
}


@pytest.mark.full
@pytest.mark.usefixtures("quick", "one_thread")
@pytest.mark.parametrize("stem", EXERCISES)
def test_an_exercise_fails_and_leads_on_and_its_solution_passes(stem: str) -> None:
    every = commands_of(stem)
    assert every, f"no notebook says how {stem}.py is checked"
    for name, given in every:
        solution = checker.check(find(f"{FOLDER / 'solutions' / stem}.py:{name}"), **given)
        assert solution.passed, solution
        try:
            report = checker.check(find(f"{FOLDER / 'exercises' / stem}.py:{name}"), **given)
            assert not report.passed
            lines = [diagnosis.bug for diagnosis in report.diagnosis]
            lines += [check.reason for check in report.checks if check.status == "failed"]
        except checker.Unclear as error:  # exit code 2
            lines = [str(error)]
        assert any(LEADS[stem] in line for line in lines), lines


def test_the_command_copies_files_and_keeps_existing_ones(run_command: Any) -> None:
    assert "files copied" in run_command("lessons", "--no-start").out
    assert len(list(Path("manyheads-lessons").glob("*.ipynb"))) == 4  # the folder that the README names
    first = Path("manyheads-lessons", NOTEBOOKS[0].name)
    assert first.read_bytes() == NOTEBOOKS[0].read_bytes()
    first.write_text("a learner's work")
    assert "which are kept" in run_command("lessons", "--no-start").out
    assert first.read_text() == "a learner's work"


@pytest.mark.parametrize(
    ("user", "says"), [(0, "jupyter lab 'my lessons' --allow-root"), (1000, "jupyter lab 'my lessons'")]
)
@pytest.mark.parametrize("installed", [True, False])
def test_the_command_starts_jupyter_or_prints_how(
    user: int, says: str, installed: bool, run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], str]] = []

    def run(words: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append((words, env["PATH"]))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(os, "geteuid", lambda: user, raising=False)
    monkeypatch.setattr(lessons, "can_start", lambda: installed)
    monkeypatch.setattr(subprocess, "run", run)
    unstarted = run_command("lessons", "my lessons", "--no-start")
    assert (unstarted.code, ran) == (0, [])
    last = unstarted.out.splitlines()[-1]
    assert last.endswith(says)
    assert ("pip install" in last) is not installed
    started = run_command("lessons", "my lessons")
    if not installed:
        assert (started.code, ran) == (0, [])
        return
    [(words, path)] = ran
    assert started.code == 3  # Jupyter's own
    options = [] if user else ["--allow-root"]
    assert words == [sys.executable, "-m", "jupyterlab", "my lessons", *options]
    assert path.split(os.pathsep)[0] == sysconfig.get_path("scripts")  # where the command manyheads is


@pytest.mark.parametrize("blocked", ["mine", "above/mine", "mine/solutions"])
def test_a_file_in_the_way_is_named_and_nothing_is_copied(blocked: str, tmp_path: Path) -> None:
    file = tmp_path / blocked.removesuffix("/mine")
    file.parent.mkdir(exist_ok=True)
    file.write_text("something")
    with pytest.raises(NotADirectoryError, match="whose path contains a file"):
        lessons.copy(tmp_path / ("above/mine" if blocked.startswith("above") else "mine"))
    assert not list(tmp_path.rglob("*.ipynb"))
    assert file.read_text() == "something"
