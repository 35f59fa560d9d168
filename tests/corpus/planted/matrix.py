"""Which bugs are planted in which styles.

`styles/NAME.py` is an ordinary module without a bug. `styles/NAME.toml` names the class or function that is
checked, the kind that a user would give with `--like` (mostly none) and, for each bug, the pieces of text to
replace. Each piece occurs once in the module, and all are found before any is replaced.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

STYLES = Path(__file__).parent / "styles"
TABLES: dict[str, Any] = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(STYLES.glob("*.toml"))
}


def source(style: str, bug: str | None = None) -> str:
    """Return the text of a style, correct or with a bug planted in it."""
    text = (STYLES / f"{style}.py").read_text(encoding="utf-8")
    edits = []
    for old, new in TABLES[style]["bugs"][bug].items() if bug else ():
        if text.count(old) != 1:
            raise ValueError(f"{style}, {bug}: expected {old!r} once, found it {text.count(old)} times.")
        edits.append((text.index(old), old, new))
    for start, old, new in sorted(edits, reverse=True):  # from the end, so that earlier positions stay valid
        text = text[:start] + new + text[start + len(old) :]
    return text


def write(folder: Path, style: str, bug: str | None = None) -> str:
    """Write a style to a file and return `path.py:name`, as the command takes it."""
    path = folder / f"{style}_{(bug or 'correct').replace('-', '_')}.py"
    path.write_text(source(style, bug), encoding="utf-8")
    return f"{path}:{TABLES[style]['target']}"
