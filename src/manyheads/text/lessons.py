"""The lessons: notebooks to learn attention by running it, with exercises that the checker grades.

They are `docs/lessons` in a clone, and are installed in the package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from manyheads.files import replacing

CLONE = Path(__file__).parents[3] / "docs" / "lessons"
INSTALLED = Path(__file__).parents[1] / "notebooks"


def source() -> Path:
    """Return the folder that holds them; FileNotFoundError where the installation lacks it."""
    for folder in (INSTALLED, CLONE):
        if any(folder.glob("*.ipynb")):
            return folder
    raise FileNotFoundError(
        f"Expected the lessons in {INSTALLED}, got no notebooks. Install manyheads again."
    )


def copy(folder: Path) -> list[Path]:
    """Copy what isn't there yet, so that nothing of a learner's work is lost; the files that were copied.

    Raises NotADirectoryError where `folder`, or what should be a folder on the way, is none; nothing is
    copied then.
    """
    paths = [path for path in sorted(source().rglob("*")) if path.suffix in (".ipynb", ".py")]
    for parent in sorted({(folder / path.relative_to(source())).parent for path in paths}):
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise NotADirectoryError(
                f"the lessons go into a folder, and {parent} can't be one, as a file stands there or "
                f"above it: name another one."
            ) from None
    made = []
    for path in paths:
        to = folder / path.relative_to(source())
        if to.exists():
            continue
        with replacing(to) as file:
            file.write(path.read_bytes())
        made.append(to)
    return made


def command(folder: Path) -> list[str]:
    """What opens the folder in JupyterLab, to be typed; root must be allowed by name."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return ["jupyter", "lab", str(folder), *(["--allow-root"] if root else [])]


def start(folder: Path) -> int:
    """Open the folder in JupyterLab until that is closed, and its exit code.

    Its terminals and cells find the command `manyheads`, whether the environment is activated or not.
    """
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    words = [sys.executable, "-m", "jupyterlab", *command(folder)[2:]]
    return subprocess.run(words, env={**os.environ, "PATH": path}, check=False).returncode


def startable() -> bool:
    """Is JupyterLab installed?"""
    return find_spec("jupyterlab") is not None
