"""Attention and training on several processes, on `torch.distributed`.

    processes       start, join and leave a group of processes
    communication   agreement of ranks on arguments, exchange of tensors, counts of bytes
    positions       which tokens each rank has
    blocks          the attention of some queries of one rank to some keys of another
    route           how far keys travel around a ring
    rules           errors of functions in masks
    ring            keys travel from rank to rank
    ulysses         each rank computes some heads
    functional      attention, attention_with_map
    costs           how much ranks compute, send and keep

A public name is imported when it is first used, because importing torch takes seconds.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own constant takes 10 ms to import
if TYPE_CHECKING:
    from typing import Any

    from manyheads.distributed.communication import Traffic as Traffic
    from manyheads.distributed.communication import count_traffic as count_traffic
    from manyheads.distributed.costs import Cost as Cost
    from manyheads.distributed.costs import cost as cost
    from manyheads.distributed.functional import attention as attention
    from manyheads.distributed.functional import attention_with_map as attention_with_map
    from manyheads.distributed.positions import balanced_positions as balanced_positions
    from manyheads.distributed.sharded_map import ShardedMap as ShardedMap

_MODULES: dict[str, str] = {  # the module of each public name
    "attention": "functional",
    "attention_with_map": "functional",
    "balanced_positions": "positions",
    "Cost": "costs",
    "cost": "costs",
    "count_traffic": "communication",
    "ShardedMap": "sharded_map",
    "Traffic": "communication",
}

__all__: list[str] = [*_MODULES]

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
