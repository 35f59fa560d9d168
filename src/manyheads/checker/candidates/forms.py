"""How masks are written and how axes are ordered, and the conversion to and from the oracle's conventions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.checker.parts import divide_grid

# Layouts, by the letters of the axes; "1" is an axis of size one.
GENERAL_MASKS = ("b1ts", "bts", "tsb", "1ts", "ts")
# With an axis of heads; "n" is one axis of batch entries and heads, "m" of heads and batch entries.
HEAD_MASKS = ("bhts", "hts", "nts", "mts")
KEY_MASKS = ("b11s", "b1s", "1sb", "bs", "sb")
IMAGE_MASKS = ("bhw", "b1hw")  # of the rows and columns of a context that is an image
SEGMENTS = {
    "segments": "[b, t] numbers of segments",
    "cumulative-lengths": "[n + 1] ends of segments after 0",
}
NUMBERS = {"lengths": "[b] lengths", **SEGMENTS}
ANGLES = ("bsd", "sd", "11sd", "b1sd", "1s1d", "bs1d", "1sd", "s1d")  # of cosines and sines
HEAD_LAYOUTS = ("[b, h, t, d]", "[b, t, h, d]", "[t, b, h, d]", "[b, t, d]", "[t, d]")
# Of one sequence, and of images and videos whose pixels or frames are tokens; axes i and j have one entry.
GRIDS = ("[t, e]", "[b, e, h, w]", "[b, h, w, e]", "[b, e, t, i, j]", "[b, e, i, h, w]", "[b, t, i, j, e]",
         "[b, i, h, w, e]", "[b, e, t]")  # fmt: skip
# Of returned weights, "b 1 t s" is averaged over the heads, "h t s" over the batch; "bh" is one axis.
WEIGHT_LAYOUTS = (
    "b h t s",
    "b 1 t s",
    "b t s",
    "t s",
    "t s b h",
    "h b t s",
    "bh t s",
    "t s b",
    "h t s",
    "b t h s",
)


def rearrange(tensor: Tensor, source: str, target: str) -> Tensor:
    """Return a tensor with its axes in another order.

    Args:
        tensor: A tensor with the axes `source`.
        source: The letters of its axes, such as "bhts" or "[b, h, t, s]".
        target: The letters of the result. If it lacks an axis, the first entry along that axis is returned;
            an axis that `source` lacks has size one.

    Returns:
        A view with the axes `target`.
    """
    axes, wanted = ([letter for letter in layout if letter.isalnum()] for layout in (source, target))
    first = tensor[tuple(slice(None) if letter in wanted else 0 for letter in axes)]
    shared = [letter for letter in axes if letter in wanted]
    permuted = first.permute([shared.index(letter) for letter in wanted if letter in shared])
    return permuted[tuple(slice(None) if letter in shared else None for letter in wanted)]


@dataclass(frozen=True)
class MaskForm:
    """How a candidate's mask is written.

    Attributes:
        letters: the axes, one of GENERAL_MASKS, HEAD_MASKS or KEY_MASKS; or "lengths", the number of tokens
            of each sequence; or "segments", the number of each token's segment, `[b, t]`; or
            "cumulative-lengths", where the segments of one sequence end, after a 0.
        keeps: whether True marks a visible key.
        type: "bool", "01" (ones and zeros), "added" (0 or -inf) or "Keep" (a mask of this library).
        heads: the number of heads, if the mask has an axis of them.
    """

    letters: str
    keeps: bool = True
    type: str = "bool"
    heads: int = 1

    @property
    def is_general(self) -> bool:
        """Return True if the mask may differ between queries."""
        return self.letters in (*GENERAL_MASKS, *HEAD_MASKS, *SEGMENTS)

    @property
    def is_shared(self) -> bool:
        """Return True if the batch shares one mask."""
        return self.letters in ("ts", "1ts", "hts", "cumulative-lengths")

    def write(self, keep: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Write keep `[b, 1, t, s]`, `[b, h, t, s]` or `[b, 1, 1, s]`, True = visible, in this form."""
        if self.type == "Keep":
            return {"__keep__": keep}
        if self.letters == "lengths":
            return rearrange(keep, "bhts", "bs").sum(-1)
        if self.letters in SEGMENTS:  # those of neighboring tokens, counted from 1
            first = rearrange(keep, "bhts", "bts").to(torch.uint8).argmax(-1)
            if self.letters == "cumulative-lengths":
                return torch.cat((first[0].unique(), torch.tensor([keep.shape[-1]])))
            return torch.nn.functional.pad((first.diff() != 0).cumsum(1), (1, 0)) + 1
        if self.letters in HEAD_MASKS:
            keep = keep.expand(-1, self.heads, -1, -1)
        if self.letters in ("nts", "mts"):
            mask = (keep if self.letters == "nts" else keep.transpose(0, 1)).flatten(0, 1)
        elif self.letters in IMAGE_MASKS:
            image = rearrange(keep, "bhts", "bs").unflatten(1, divide_grid(keep.shape[-1]))
            mask = rearrange(image, "bhw", self.letters)
        else:
            mask = rearrange(keep, "bhts", self.letters)
        if self.type == "added":
            return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
        mask = mask if self.keeps else ~mask
        return mask.clone() if self.type == "bool" else mask.to(dtype)

    def __str__(self) -> str:
        if self.type == "Keep":
            return "manyheads.Keep of [b, 1, t, s]"
        if self.letters in NUMBERS:
            return NUMBERS[self.letters]
        axes = {"n": "b·h", "m": "h·b"}
        shape = f"[{', '.join(axes.get(letter, letter) for letter in self.letters)}]"
        if self.type == "added":
            return f"{shape} added to the scores, 0 or -inf"
        kind = "boolean" if self.type == "bool" else "of ones and zeros"
        return f"{shape} {kind}, True {'keeps' if self.keeps else 'masks'}"


@dataclass(frozen=True)
class AngleForm:
    """How a call takes the cosines and sines of a rotary encoding, or complex numbers.

    Attributes:
        letters: The axes, one of ANGLES.
        width: "half" for one entry for each pair of entries of a head, "halves" if all are then repeated,
            "pairs" if each is repeated beside itself.
    """

    letters: str
    width: str

    def write(self, angles: Tensor) -> Tensor:
        """Return the angles `[b, s, n]` in this form."""
        if self.width == "halves":
            angles = torch.cat((angles, angles), -1)
        elif self.width == "pairs":
            angles = angles.repeat_interleave(2, -1)
        return rearrange(angles, "bsd", self.letters).clone()
