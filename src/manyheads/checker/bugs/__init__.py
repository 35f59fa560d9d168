"""The family of known bugs: oracles that override a step, by name."""

from __future__ import annotations

# Imported in the order of the published table.
from manyheads.checker.bugs import scores  # isort: skip
from manyheads.checker.bugs import masks  # isort: skip
from manyheads.checker.bugs import softmax  # isort: skip
from manyheads.checker.bugs import heads  # isort: skip
from manyheads.checker.bugs import projections  # isort: skip
from manyheads.checker.bugs import returned  # isort: skip
from manyheads.checker.bugs import encodings  # isort: skip
from manyheads.checker.bugs.family import FAMILY, Bug, compose, overridden_steps, override
from manyheads.checker.encodings import Interleaved, Rotary
from manyheads.checker.oracle import Attention, Oracle

__all__ = [
    "CONVENTIONS",
    "FAMILY",
    "Bug",
    "compose",
    "encodings",
    "family_of",
    "heads",
    "masks",
    "overridden_steps",
    "projections",
    "returned",
    "scores",
    "softmax",
]

# Equally right ways to do a step, which differ only together with a bug, or in which entries they pair.
UNMASKED = override(mask_weights=masks.same)
LOWEST = override(mask_scores=masks.Lowest.mask_scores)
CONVENTIONS: dict[type[Oracle], list[tuple[type[Oracle], ...]]] = {
    Attention: [(), (UNMASKED,), (LOWEST,), (LOWEST, UNMASKED)],
    Rotary: [(), (Interleaved,)],
}


def family_of(oracle: type[Oracle]) -> list[Bug]:
    """Return the bugs of one kind of oracle."""
    return [bug for bug in FAMILY.values() if issubclass(bug.variants[0], oracle)]
