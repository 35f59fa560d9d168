"""How masks are written and how heads are laid out: forms to convert to and from the oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# From a mask `[b, 1, t, s]`; those of keys alone from `[b, 1, t, s]` or `[b, 1, 1, s]`.
GENERAL_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "b1ts": lambda keep: keep,
    "bts": lambda keep: keep[:, 0],
    "tsb": lambda keep: keep[:, 0].permute(1, 2, 0),
    "1ts": lambda keep: keep[:1, 0],
    "ts": lambda keep: keep[0, 0],
}
KEY_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "b11s": lambda keep: keep[:, :, :1],
    "b1s": lambda keep: keep[:, 0, :1],
    "1sb": lambda keep: keep[:, 0, :1].permute(1, 2, 0),
    "bs": lambda keep: keep[:, 0, 0],
    "sb": lambda keep: keep[:, 0, 0].mT,
    "lengths": lambda keep: keep[:, 0, 0].sum(-1),
}

# From heads `[b, h, t, d]` or tokens `[b, t, e]`, and back.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "[b, h, t, d]": (lambda x: x, lambda x: x),
    "[b, t, h, d]": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "[t, b, h, d]": (lambda x: x.permute(2, 0, 1, 3), lambda x: x.permute(1, 2, 0, 3)),
    "[b, t, d]": (lambda x: x[:, 0], lambda x: x[:, None]),
    "[t, d]": (lambda x: x[0, 0], lambda x: x[None, None]),
    "[b, t, e]": (lambda x: x, lambda x: x),
    "[t, b, e]": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
}
HEAD_LAYOUTS = list(LAYOUTS)[:5]

# From returned weights, in letters of their shape, to `[b, h, t, s]` or, averaged, `[b, 1, t, s]`.
WEIGHT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "b h t s": lambda w: w,
    "b 1 t s": lambda w: w,
    "b t s": lambda w: w[:, None],
    "t s": lambda w: w[None, None],
    "t s b h": lambda w: w.permute(2, 3, 0, 1),
    "h b t s": lambda w: w.transpose(0, 1),
    "bh t s": lambda w: w,
    "t s b": lambda w: w.permute(2, 0, 1)[:, None],
    "h t s": lambda w: w[None],  # averaged over the batch
}


@dataclass(frozen=True)
class MaskForm:
    """How a mask is written: its letters, whether True keeps, and its type.

    `type` is "bool", "01" (ones and zeros), "added" (0 or -inf) or "Keep" (a mask of this library).
    """

    letters: str
    keeps: bool = True
    type: str = "bool"

    @property
    def is_general(self) -> bool:
        """Return True if the mask may differ between queries."""
        return self.letters in GENERAL_MASKS

    @property
    def is_shared(self) -> bool:
        """Return True if the batch shares one mask."""
        return self.letters in ("ts", "1ts")

    def write(self, keep: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Write keep `[b, 1, t, s]` or `[b, 1, 1, s]`, True = visible, in this form."""
        if self.type == "Keep":
            return {"__keep__": keep}
        x = (GENERAL_MASKS | KEY_MASKS)[self.letters](keep)
        if self.letters == "lengths":
            return x
        if self.type == "added":
            return torch.zeros(x.shape, dtype=dtype).masked_fill(~x, -math.inf)
        x = x if self.keeps else ~x
        return x.clone() if self.type == "bool" else x.to(dtype)

    def __str__(self) -> str:
        if self.type == "Keep":
            return "manyheads.Keep of [b, 1, t, s]"
        if self.letters == "lengths":
            return "[b] lengths"
        shape = f"[{', '.join(self.letters)}]"
        if self.type == "added":
            return f"{shape} added to the scores, 0 or -inf"
        kind = "boolean" if self.type == "bool" else "of ones and zeros"
        return f"{shape} {kind}, True {'keeps' if self.keeps else 'masks'}"
