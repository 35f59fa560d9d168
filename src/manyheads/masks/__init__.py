"""Which keys a query may attend to: frozen values, composed with `&`, `|` and `~`. True = may attend.

    mask = Causal() & Window(left=255) & Documents(ids)

To add a mask, write a subclass of `Mask` in `leaves.py` with `keep` and `__str__`, and `span`, `check`,
`bind`, `only` or `normal` where the defaults are too weak; then name it here, in `manyheads.__init__` and in
`storage.PARTS`.
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
