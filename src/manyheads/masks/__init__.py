"""Masks: the keys that a query may attend to, as frozen values composed with `&`, `|` and `~`.

    mask = Causal() & Window(left=255) & Documents(ids)

To add a mask, write a subclass of `Mask` in `leaves.py` with `keep` and the fields of a dataclass. The other
methods (`span`, `check`, `bind`, `only`, `cut`, `extent`, `normal`, `__str__`) have defaults. Override those
that the mask can answer better; for example, a mask that depends on j − i alone returns itself from `only`
and `cut`. Without `cut` the viewer is slower. A mask in the `rest` of `normal`, the default, becomes a tensor
in `native` and `sdpa`; if that tensor would exceed 64 MB, `chunked` computes the mask instead. Then add the
name here, to `manyheads.__init__`, to `storage.PARTS` and docs/format.md, to the tests (`PUBLIC` in
test_imports.py; `build`, `sees` and `MASKS` in tests/cases.py; `leaves` and `EVERY` in test_masks.py), and to
the lists in docs/reference/index.md and docs/architecture.md.
"""

from manyheads.masks.algebra import (
    FAR,
    And,
    AtPositions,
    Mask,
    Normal,
    Not,
    Only,
    Or,
    Span,
    can_read_cheaply,
    check_indices,
    check_positions,
    look_up_positions,
    min_max,
    scatter_positions,
    select_positions,
)  # fmt: skip
from manyheads.masks.leaves import (
    AfterSameToken,
    Band,
    Causal,
    Diagonal,
    Documents,
    Drop,
    Full,
    Ids,
    Keep,
    Keys,
    Lengths,
    Prefix,
    Rule,
    SameToken,
    Window,
    band_mask,
)  # fmt: skip

__all__ = [
    "FAR", "AfterSameToken", "And", "AtPositions", "Band", "Causal", "Diagonal", "Documents", "Drop", "Full",
    "Ids", "Keep", "Keys", "Lengths", "Mask", "Normal", "Not", "Only", "Or", "Prefix", "Rule", "SameToken",
    "Span", "Window", "band_mask", "can_read_cheaply", "check_indices", "check_positions",
    "look_up_positions", "min_max", "scatter_positions", "select_positions",
]  # fmt: skip
