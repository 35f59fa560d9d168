"""The lessons: notebooks about attention, with exercises that the checker grades.

They are `docs/lessons` in a clone, and are installed in the package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from manyheads.storage import replacing

CLONE = Path(__file__).parents[3] / "docs" / "lessons"
INSTALLED = Path(__file__).parents[1] / "notebooks"


def source() -> Path:
    """Return the folder of the lessons, or raise FileNotFoundError if the installation lacks it."""
    for folder in (INSTALLED, CLONE):
        if any(folder.glob("*.ipynb")):
            return folder
    raise FileNotFoundError(
        f"Expected the lessons in {INSTALLED}, got no notebooks. Install manyheads again."
    )


def copy(folder: Path) -> list[Path]:
    """Copy those files of the lessons that a folder doesn't have yet.

    Args:
        folder: The folder, which is created if necessary. Existing files are kept.

    Returns:
        The files that were copied.

    Raises:
        NotADirectoryError: If `folder`, or a folder in its path, is a file. Nothing is copied then.
    """
    paths = [path for path in sorted(source().rglob("*")) if path.suffix in (".ipynb", ".py")]
    for parent in sorted({(folder / path.relative_to(source())).parent for path in paths}):
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise NotADirectoryError(
                f"Expected a folder for the lessons, got {parent}, whose path contains a file. Choose a "
                "different folder."
            ) from None
    copied = []
    for path in paths:
        target = folder / path.relative_to(source())
        if target.exists():
            continue
        with replacing(target) as file:
            file.write(path.read_bytes())
        copied.append(target)
    return copied


def command(folder: Path) -> list[str]:
    """Return the command that opens a folder in JupyterLab, with the option that root needs."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return ["jupyter", "lab", str(folder), *(["--allow-root"] if root else [])]


def start(folder: Path) -> int:
    """Open a folder in JupyterLab, wait until JupyterLab is closed, and return its exit code."""
    # With this PATH, notebooks and terminals find `manyheads` even if the environment isn't activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    words = [sys.executable, "-m", "jupyterlab", *command(folder)[2:]]
    return subprocess.run(words, env={**os.environ, "PATH": path}, check=False).returncode


def can_start() -> bool:
    """Return True if JupyterLab is installed."""
    return find_spec("jupyterlab") is not None
