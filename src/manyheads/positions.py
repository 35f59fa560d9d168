"""Where a token stands: the sinusoidal encoder, added to embeddings, and rotary, which turns q and k."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from manyheads.shapes import kind, sizes, whole
from manyheads.values import Value


def _angles(positions: Tensor, width: int, base: float) -> Tensor:
    """position · base^(−2n/width) for pair n: `[…, width/2]`, float64 (far away float32 is coarse)."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor of token positions, and {kind(positions)} came.")
    wide = torch.float32 if positions.device.type == "mps" else torch.float64  # which knows no float64
    pair = torch.arange(0, width, 2, dtype=wide, device=positions.device)  # [width/2]
    return positions[..., None].to(wide) * base ** (-pair / max(width, 1))


def _positive(value: float, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, and {value!r} came.")


@dataclass(frozen=True, eq=False)
class Sinusoidal(Value):
    """The encoding of the transformer paper (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    PE(pos, 2i) = sin(pos / base^(2i/width)), PE(pos, 2i + 1) = cos(the same angle). `width` is the
    model size e, an even number; positions are tokens, counted from 0. TypeError or ValueError for
    another width, ValueError for a base that isn't positive.
    """

    width: int
    base: float = 10000.0

    def __post_init__(self) -> None:
        whole(self.width, "the width of Sinusoidal")
        if self.width % 2:
            raise ValueError(
                f"the width of Sinusoidal must be even (sine and cosine in pairs): {self.width} came."
            )
        _positive(self.base, "the base of Sinusoidal")

    def encode(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The encoding of positions `[...]`: `[..., e]`, the angles in float64 until the end, then in dtype.

        TypeError where positions are no tensor.
        """
        angle = _angles(positions, self.width, self.base)  # [..., e/2]
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(dtype)  # [..., e]

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        """x `[b, t, e]` plus the encoding of positions offset, offset + 1, …; ValueError for another e."""
        if x.shape[-1] != self.width:
            raise ValueError(f"Sinusoidal({self.width}) encodes [b, t, {self.width}], and {sizes(x)} came.")
        positions = torch.arange(x.shape[-2], device=x.device) + offset  # [t]
        return x + self.encode(positions, x.dtype)  # [b, t, e]


@dataclass(frozen=True, eq=False)
class Rotary(Value):
    """Turns pairs of q and k by position · frequency (rotary: Su et al. 2021, arXiv:2104.09864).

    dim: how many of a head's d entries turn, the first ones; the others stay (partial rotary).
    base: pair n turns by base^(−2n/dim) radians per position.
    layout: which entries are a pair: "half" (n and n + dim/2, as in Llama and GPT-NeoX) or
        "interleaved" (2n and 2n + 1, as in the paper and GPT-J).
    factor: frequencies are divided by it, so that positions are squeezed into the trained range
        (position interpolation, Chen et al. 2023, arXiv:2306.15595).

    TypeError or ValueError for a dim that isn't even, ValueError for the rest.
    """

    dim: int
    base: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    factor: float = 1.0

    def __post_init__(self) -> None:
        whole(self.dim, "the dim of Rotary")
        if self.dim % 2:
            raise ValueError(f"the dim of Rotary must be even (it turns pairs), and {self.dim} came.")
        _positive(self.base, "the base of Rotary")
        _positive(self.factor, "the factor of Rotary")
        if self.layout not in ("half", "interleaved"):
            raise ValueError(
                f'the layout of Rotary must be "half" or "interleaved", and {self.layout!r} came.'
            )

    def scaled(self, times: float) -> Rotary:
        """For texts `[t]` so many times as long as those of training: its base · times^(dim / (dim − 2)).

        The slowest pair turns so many times slower, and meets no angle that training didn't; the fastest
        turns as it did, and still tells neighbours apart ("NTK-aware" scaling: Peng et al. 2023,
        arXiv:2309.00071, section 3.1). One pair alone is the fastest, and stays. ValueError for less than 1
        and for no number.
        """
        _positive(times, "how many times as long texts are")
        if times < 1:
            raise ValueError(f"Rotary is scaled for longer texts, at least 1 times, and {times!r} came.")
        return self if self.dim < 4 else replace(self, base=self.base * times ** (self.dim / (self.dim - 2)))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x `[b, h, t, d]` at integer positions `[t]` or `[b, t]`; the same shape and dtype.

        ValueError for fewer than dim entries, or another number of positions.
        """
        d = x.shape[-1]
        if d < self.dim:
            raise ValueError(
                f"Rotary({self.dim}) turns {self.dim} entries of a head, and d = {d} came {sizes(x)}."
            )
        t = x.shape[-2]
        if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.shape[-1] != t:
            came = (
                f"{kind(positions)} {sizes(positions)}" if isinstance(positions, Tensor) else kind(positions)
            )
            raise ValueError(
                f"Rotary turns x {sizes(x)} at positions [t] = [{t}] or [b, t], and {came} came."
            )
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        angle = _angles(positions, self.dim, self.base) / self.factor  # [t, dim/2] or [b, t, dim/2]
        if angle.dim() == 3:
            angle = angle[:, None]  # [b, 1, t, dim/2]
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        turning = x[..., : self.dim].to(wide)
        if self.layout == "half":
            even, odd = turning.chunk(2, -1)
        else:
            even, odd = turning[..., 0::2], turning[..., 1::2]
        turned = (even * cos - odd * sin, odd * cos + even * sin)
        joined = torch.cat(turned, -1) if self.layout == "half" else torch.stack(turned, -1).flatten(-2)
        return torch.cat((joined.to(x.dtype), x[..., self.dim :]), -1)  # [b, h, t, d]
