"""Attention, maps and training over several processes, by `torch.distributed`."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as in `manyheads`: torch is imported when a name is first used
if TYPE_CHECKING:
    from typing import Any

    from manyheads.distributed.communication import Traffic as Traffic
    from manyheads.distributed.communication import count_traffic as count_traffic
    from manyheads.distributed.functional import attention as attention
    from manyheads.distributed.functional import attention_with_map as attention_with_map
    from manyheads.distributed.positions import balanced_positions as balanced_positions

# The module of each public name, which is imported when the name is first used (PEP 562).
_MODULES = {
    "attention": "functional",
    "attention_with_map": "functional",
    "balanced_positions": "positions",
    "count_traffic": "communication",
    "Traffic": "communication",
}

__all__ = [*_MODULES]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    """Return all public names, including those that aren't imported yet."""
    return sorted({*globals(), *__all__})
