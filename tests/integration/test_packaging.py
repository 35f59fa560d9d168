"""The files of the sdist and of the wheel that is built from it, and uninstalling."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import python_path
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
def built(build_once: Callable[..., Path]) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    pytest.importorskip("build")

    def build(folder: Path) -> None:
        ignore = shutil.ignore_patterns("native.so", "native.log", "*.egg-info", "__pycache__", ".*", "build")
        shutil.copytree(ROOT, folder / "source", ignore=ignore)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source")

    built = build_once("packaging", build) / "dist"
    [sdist], [wheel] = (list(built.glob(f"*{end}")) for end in (".tar.gz", ".whl"))
    return sdist, wheel


def files(folder: Path) -> set[str]:
    """Return the files below a folder of the sources that aren't hidden or built, relative to the root."""
    built = ("native.so", "native.log")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in built]
    names = {str(path.relative_to(ROOT)) for path in paths}
    return {name for name in names if "__pycache__" not in name and "/." not in name}


def test_the_files_of_the_sdist(built: tuple[Path, Path]) -> None:
    """The package, its native sources and the lessons; no tests, which need most of the repository."""
    with tarfile.open(built[0]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    top = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    package = {name for name in names if ".egg-info/" not in name}
    assert package == top | files(ROOT / "src" / "manyheads") | files(LESSONS)


def test_the_files_of_the_wheel(built: tuple[Path, Path]) -> None:
    """The package without its native sources, the lessons, and why there is no native library."""
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if not name.endswith("/")}
    native = "manyheads/kernels/native/"
    package = {name.removeprefix("src/") for name in files(ROOT / "src" / "manyheads")}
    sources = {name for name in package if name.startswith(native) and name.endswith((".cpp", ".h"))}
    lessons = {name.replace("docs/lessons", "manyheads/notebooks") for name in files(LESSONS)}
    information = {name for name in names if name.partition("/")[0] == "manyheads-0.1.0.dist-info"}
    assert sources
    assert len(lessons) == 24
    assert names - information == (package - sources) | lessons | {f"{native}native.log"}


def test_an_installed_wheel_has_the_lessons_and_says_why_the_native_kernel_is_missing(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    installed, folder = tmp_path / "installed", tmp_path / "elsewhere"
    folder.mkdir()
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed, built[1])
    words = [sys.executable, "-m", "manyheads"]
    options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": python_path(installed)}, "timeout": HANG}
    for command, printed in (
        (["lessons", "--no-start"], "manyheads-lessons: 24 files copied"),
        (
            ["kernels"],
            "not available: its library is missing: the C++ compiler false failed with exit code 1",
        ),
        (["show", "the file is open and the file is read"], "induction"),
    ):
        done = subprocess.run([*words, *command], **options, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout
    notebooks = sorted((folder / "manyheads-lessons").glob("*.ipynb"))
    assert [path.read_bytes() for path in notebooks] == [
        path.read_bytes() for path in sorted(LESSONS.glob("*.ipynb"))
    ]


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
