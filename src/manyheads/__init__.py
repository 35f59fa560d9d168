"""Multi-head attention you can see through: exact, fast, and every head's weights at any length."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import_module(f"{__name__}.startup")  # it records facts about the process before torch is imported

TYPE_CHECKING = False  # typing's own constant takes 10 ms to import
if TYPE_CHECKING:
    from typing import Any

    from manyheads import measures
    from manyheads.biases import ALiBi, Dense, Relative
    from manyheads.cache import Cache
    from manyheads.functional import attention, attention_with_map, explain
    from manyheads.layers import CrossAttention, MultiHeadAttention, SelfAttention
    from manyheads.maps import AttentionMap
    from manyheads.masks import (
        AfterSameToken,
        Causal,
        Diagonal,
        Documents,
        Drop,
        Full,
        Keep,
        Keys,
        Lengths,
        Mask,
        Prefix,
        Rule,
        SameToken,
        Window,
    )
    from manyheads.observe import observe, open_run
    from manyheads.positions import Rotary, Sinusoidal

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AfterSameToken",
    "AttentionMap",
    "Cache",
    "Causal",
    "CrossAttention",
    "Dense",
    "Diagonal",
    "Documents",
    "Drop",
    "Full",
    "Keep",
    "Keys",
    "Lengths",
    "Mask",
    "MultiHeadAttention",
    "Prefix",
    "Relative",
    "Rotary",
    "Rule",
    "SameToken",
    "SelfAttention",
    "Sinusoidal",
    "Window",
    "attention",
    "attention_with_map",
    "explain",
    "measures",
    "observe",
    "open_run",
]

# The module of each public name. It is imported when the name is first used (PEP 562), because importing
# torch takes seconds and `manyheads --help` doesn't need it.
_MODULES = {
    name: module
    for module, names in {
        "biases": ["ALiBi", "Dense", "Relative"],
        "cache": ["Cache"],
        "functional": ["attention", "attention_with_map", "explain"],
        "layers": ["CrossAttention", "MultiHeadAttention", "SelfAttention"],
        "maps": ["AttentionMap"],
        "masks": ["AfterSameToken", "Causal", "Diagonal", "Documents", "Drop", "Full", "Keep", "Keys",
                  "Lengths", "Mask", "Prefix", "Rule", "SameToken", "Window"],
        "observe": ["observe", "open_run"],
        "positions": ["Rotary", "Sinusoidal"],
    }.items()
    for name in names
}  # fmt: skip

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name or a submodule at its first use."""
        path = f"{__name__}.{_MODULES.get(name, name)}"
        try:
            found = import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        if name in _MODULES:
            found = globals()[name] = getattr(found, name)
        return found


def __dir__() -> list[str]:
    """Return all public names, also those that aren't imported yet."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The type of this module, which keeps `manyheads.observe` the function.

    The import system binds a submodule to its package under its name whenever it is first imported, and
    there is a subpackage `observe`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "observe" and isinstance(value, ModuleType):
            value = value.observe
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
