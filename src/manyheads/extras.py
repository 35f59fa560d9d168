"""Functions that need optional extras, and the error that says what to install.

A subpackage that needs an optional extra is imported when it is called. Such an import is from a higher layer
of the code; `tests/unit/test_imports.py` lists each of them.
"""

from __future__ import annotations

from typing import Any


def view(*sources: Any, picture: Any = None, port: int = 0, browser: bool = True) -> Any:
    """Show recordings or maps in the interactive viewer, as `manyheads.viewer.view` describes."""
    from manyheads import viewer

    return viewer.view(*sources, picture=picture, port=port, browser=browser)


def missing(use: str, package: str | None, extra: str) -> ImportError:
    """Return the error for a feature whose package isn't installed."""
    return ImportError(
        f"{use} needs {package}, which isn't installed. Run pip install '.[{extra}]' in a clone of manyheads."
    )
