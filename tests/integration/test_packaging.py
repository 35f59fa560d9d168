"""The files of the sdist and of the wheel that is built from it, and uninstalling."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.waiting import HANG

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "docs" / "lessons"


def run(*command: str | Path) -> None:
    """Run a command; no compiler is needed, since the native kernel is left out."""
    done = subprocess.run(
        command, env={**os.environ, "CXX": "false"}, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    pytest.importorskip("build")
    to = tmp_path_factory.mktemp("packaging")
    ignore = shutil.ignore_patterns("native.so", "native.log", "*.egg-info", "__pycache__", ".*", "build")
    shutil.copytree(ROOT, to / "source", ignore=ignore)
    run(sys.executable, "-m", "build", "--outdir", to / "dist", to / "source")
    [sdist], [wheel] = (list((to / "dist").glob(f"*{end}")) for end in (".tar.gz", ".whl"))
    return sdist, wheel


def test_the_sdist_has_no_tests(built: tuple[Path, Path]) -> None:
    """They would need most of the repository beside them."""
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"setup.py", "pyproject.toml", "src/manyheads/kernels/native/problem.h"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_has_the_package_and_the_lessons_only(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"manyheads"}
    assert not [name for name in names if ".data/" in name]
    lessons = {f"manyheads/notebooks/{path.relative_to(LESSONS)}" for path in LESSONS.rglob("*.*")}
    assert {one for one in lessons if one.endswith((".ipynb", ".py"))} <= set(names)


def test_uninstalling_leaves_nothing(built: tuple[Path, Path], tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    before = sorted(home.rglob("*"))
    pip = sys.executable, "-m", "pip", "--python", python
    run(*pip, "install", "--no-deps", built[1])
    run(python, "-m", "compileall", "-q", home)
    assert sorted(home.rglob("*")) != before
    run(*pip, "uninstall", "-y", "manyheads")
    assert sorted(home.rglob("*")) == before
