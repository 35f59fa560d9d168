"""Masks: the keys that a query may attend to, as frozen values composed with `&`, `|` and `~`.

    mask = Causal() & Window(left=255) & Documents(ids)

To add a mask, write a subclass of `Mask` in `leaves.py` with `keep` and the fields of a dataclass. Override
`span`, `check`, `bind`, `only`, `cut`, `extent`, `normal` and `__str__` if the defaults are too weak: a mask
of j − i alone returns itself from `only` and `cut`. Without `cut` the viewer is slower. Masks in the `rest`
of `normal` become a tensor in `native` and `sdpa`, or are computed by `chunked` if the tensor would exceed
64 MB. Then name the mask here, in `manyheads.__init__`, in `storage.PARTS` and docs/format.md, in the tests
(`PUBLIC` in test_imports.py; `build`, `sees` and `MASKS` in tests/cases.py; `leaves` and `EVERY` in
test_masks.py), and in the lists of README and docs/architecture.md.
"""

from manyheads.masks.algebra import (
    FAR,
    And,
    Mask,
    Normal,
    Not,
    Only,
    Or,
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
    "FAR", "AfterSameToken", "And", "Band", "Causal", "Diagonal", "Documents", "Drop", "Full", "Ids", "Keep",
    "Keys", "Lengths", "Mask", "Normal", "Not", "Only", "Or", "Prefix", "Rule", "SameToken", "Window",
    "extremes", "opaque", "picked", "spread",
]  # fmt: skip
