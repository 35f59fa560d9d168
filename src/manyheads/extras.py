"""The optional extras: calls from lower layers up to the packages that need them, and what to install.

A package that needs more than the library does is imported when it is called. Such an import points upward,
and `tests/unit/test_imports.py` lists each of them.
"""

from __future__ import annotations

from typing import Any


def view(*sources: Any, port: int = 0, browser: bool = True) -> Any:
    """Show recorded attention or maps in the interactive viewer, see `manyheads.viewer.view`."""
    from manyheads import viewer

    return viewer.view(*sources, port=port, browser=browser)


def missing(use: str, package: str | None, extra: str) -> ImportError:
    """Return the error for a use of an extra whose package isn't installed."""
    return ImportError(
        f"{use} needs {package}, which isn't installed. Run pip install '.[{extra}]' in a clone of manyheads."
    )
