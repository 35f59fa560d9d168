"""The lessons: notebooks to learn attention by running it, with exercises that the checker grades.

They are `docs/lessons` in a clone, and are installed beside the package.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from manyheads.files import replacing

SHARE = Path("share", "manyheads", "lessons")
HERE = (
    Path(__file__).parents[2] / "docs" / "lessons",  # a clone
    Path(sysconfig.get_path("data")) / SHARE,
    Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))) / SHARE,  # pip install --user
    Path(__file__).parents[1] / SHARE,  # pip install --target
)


def source() -> Path:
    """The folder that holds them; FileNotFoundError where the installation lacks it."""
    for folder in HERE:
        if any(folder.glob("*.ipynb")):
            return folder
    raise FileNotFoundError(
        f"the lessons should be in {HERE[1]}, and aren't there: install manyheads again, or open "
        f"docs/lessons of a clone."
    )


def copy(folder: Path) -> list[Path]:
    """Copy what isn't there yet, so that nothing of a learner's work is lost; the files that were copied.

    Raises NotADirectoryError where `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"the lessons go into a folder, and {folder} is a file: name another one.")
    made = []
    for path in sorted(source().rglob("*")):
        to = folder / path.relative_to(source())
        if path.suffix not in (".ipynb", ".py") or to.exists():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as file:
            file.write(path.read_bytes())
        made.append(to)
    return made


def start(folder: Path) -> int | None:
    """Open the folder in JupyterLab until that is closed, and its exit code; None where it isn't
    installed.
    """
    if find_spec("jupyterlab") is None:
        return None
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(folder)], check=False).returncode
