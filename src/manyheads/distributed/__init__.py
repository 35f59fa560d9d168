"""Attention and training on several processes, on `torch.distributed`.

    processes     start, join and leave a group of processes

A public name is imported when it is first used, because importing torch takes seconds.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own constant takes 10 ms to import
if TYPE_CHECKING:
    from typing import Any

_MODULES: dict[str, str] = {}  # the module of each public name

__all__: list[str] = []

if not TYPE_CHECKING:  # with a `__getattr__`, type checkers accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    """Return all public names, including those that aren't imported yet."""
    return sorted({*globals(), *__all__})
