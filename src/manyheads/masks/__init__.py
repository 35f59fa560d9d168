"""Which keys a query may attend to: frozen values, composed with `&`, `|` and `~`. True = may attend.

    mask = Causal() & Window(left=255) & Documents(ids)

To add a mask, write a subclass of `Mask` in `leaves.py` with `keep` and `__str__`, and `span`, `check`,
`bind`, `only`, `cut`, `extent` or `normal` where the defaults are too weak. A mask that depends on j − i
only returns itself from `only` and `cut`; without `cut` the viewer is slower. What `normal` leaves in
`rest` becomes a tensor in `native` and `sdpa`; above 64 MB `chunked` computes it. Then name the mask
here, in `manyheads.__init__`, in `storage.PARTS` and docs/format.md, and in the tests: `PUBLIC` in
test_imports.py, `build`, `sees` and `MASKS` in tests/cases.py, `leaves` and `EVERY` in test_masks.py; and
in the lists of README and docs/architecture.md.
"""

from manyheads.masks.algebra import (
    FAR,
    And,
    Index,
    Mask,
    Normal,
    Not,
    Only,
    Or,
    Span,
    extremes,
    opaque,
    picked,
    spread,
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
)  # fmt: skip

__all__ = [
    "FAR", "AfterSameToken", "And", "Band", "Causal", "Diagonal", "Documents", "Drop", "Full", "Ids", "Index",
    "Keep", "Keys", "Lengths", "Mask", "Normal", "Not", "Only", "Or", "Prefix", "Rule", "SameToken", "Span",
    "Window", "extremes", "opaque", "picked", "spread",
]  # fmt: skip
