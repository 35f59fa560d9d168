"""The known bugs, by name, and the oracles that have them."""

from __future__ import annotations

from manyheads.checker.bugs import encodings, heads, masks, parts, projections, returned, scores, softmax
from manyheads.checker.encodings import Interleaved, Rotary
from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import Bug, compose, overridden_steps, override

__all__ = ["CONVENTIONS", "FAMILY", "Bug", "compose", "family_of", "overridden_steps", "override"]

# By name, in the order of the published table.
FAMILY: dict[str, Bug] = {
    bug.name: bug
    for module in (scores, masks, softmax, heads, projections, returned, encodings)
    for bug in module.BUGS
}
FAMILY |= {bug.name: bug for bug in parts.BUGS if bug.name not in FAMILY}

# Equally correct ways to do a step. They give other results only together with a bug, except that rotary
# encodings pair other entries.
UNMASKED = override(mask_weights=masks.same)
LOWEST = masks.filled(masks.set_to_lowest)
CONVENTIONS: dict[type[Oracle], list[tuple[type[Oracle], ...]]] = {
    Attention: [(), (UNMASKED,), (LOWEST,), (LOWEST, UNMASKED)],
    Rotary: [(), (Interleaved,)],
}


def family_of(oracle: type[Oracle]) -> list[Bug]:
    """Return the bugs of one kind of oracle."""
    return [bug for bug in FAMILY.values() if bug.variants and issubclass(bug.variants[0], oracle)]
