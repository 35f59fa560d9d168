"""Where the processes that tests start find modules."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(folder: Path) -> str:
    """Return a PYTHONPATH of a folder and of this process's own, also where its paths are relative."""
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([str(folder), *inherited])
