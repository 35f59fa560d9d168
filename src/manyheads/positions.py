"""Positional encodings: sinusoidal, which is added to embeddings, and rotary, which rotates q and k."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from manyheads.shapes import kind, sizes, whole
from manyheads.trees import Value


def _angles(positions: Tensor, width: int, base: float) -> Tensor:
    """Return position · base^(−2n/width) for each pair n, `[…, width/2]`."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"Expected positions to be a tensor, got {kind(positions)}.")
    # float32 isn't precise enough for large positions, but MPS doesn't support float64.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, width, 2, dtype=dtype, device=positions.device)  # [width/2]
    return positions[..., None].to(dtype) * base ** (-pair / max(width, 1))


def _check_even(value: int, name: str) -> None:
    if whole(value, name) % 2:
        raise ValueError(f"Expected {name} to be even, as its entries form pairs, got {value}.")


def _check_positive(value: float, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"Expected {name} to be a positive number, got {value!r}.")


class Sinusoidal(Value):
    """The sinusoidal encoding of Vaswani et al. 2017 (arXiv:1706.03762, section 3.5).

    PE(pos, 2i) = sin(pos / base^(2i/width)), PE(pos, 2i + 1) = cos(the same angle).

    Attributes:
        width: The model size e, an even number.
        base: The base of the wavelengths.

    Raises:
        TypeError: If the width isn't an integer.
        ValueError: If the width is odd or negative, or the base isn't positive.
    """

    width: int
    base: float = 10000.0

    def __post_init__(self) -> None:
        _check_even(self.width, "the width of Sinusoidal")
        _check_positive(self.base, "the base of Sinusoidal")

    def encode(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the encoding of some positions.

        Args:
            positions: The positions `[...]`, counted from 0.
            dtype: The dtype of the encoding. Angles are computed in float64.

        Returns:
            The encoding `[..., e]`.

        Raises:
            TypeError: If the positions aren't a tensor.
        """
        angle = _angles(positions, self.width, self.base)  # [..., e/2]
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(dtype)  # [..., e]

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        """Add the encoding of the positions offset, offset + 1, … to embeddings.

        Args:
            x: The embeddings `[b, t, e]`.
            offset: The position of the first row.

        Returns:
            The sum `[b, t, e]`, in the dtype of x.

        Raises:
            ValueError: If x has the wrong width.
        """
        if x.shape[-1] != self.width:
            raise ValueError(f"Expected x to be [b, t, {self.width}], got {sizes(x)}.")
        positions = torch.arange(x.shape[-2], device=x.device) + offset  # [t]
        return x + self.encode(positions, x.dtype)  # [b, t, e]


class Rotary(Value):
    """Rotary encoding (RoPE, Su et al. 2021, arXiv:2104.09864): pairs of q and k rotate with the position.

    Attributes:
        dim: The number of entries of a head that are rotated: the first dim of d. The others don't change
            (partial rotary).
        base: Pair n rotates by base^(−2n/dim) radians per position.
        layout: The entries that form a pair: "half" (n and n + dim/2, as in Llama and GPT-NeoX) or
            "interleaved" (2n and 2n + 1, as in the paper and GPT-J).
        factor: The divisor of all angles, which maps longer texts to the trained range (position
            interpolation, Chen et al. 2023, arXiv:2306.15595).

    Raises:
        TypeError: If dim isn't an integer.
        ValueError: If dim is odd or negative, base or factor isn't positive, or the layout is unknown.
    """

    dim: int
    base: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_even(self.dim, "the dim of Rotary")
        _check_positive(self.base, "the base of Rotary")
        _check_positive(self.factor, "the factor of Rotary")
        if self.layout not in ("half", "interleaved"):
            raise ValueError(
                f'Expected the layout of Rotary to be "half" or "interleaved", got {self.layout!r}.'
            )

    def scaled(self, times: float) -> Rotary:
        """Return the encoding for longer texts, with the base multiplied by times^(dim / (dim − 2)).

        This is "NTK-aware" RoPE scaling (Peng et al. 2023, arXiv:2309.00071, section 3.1). The slowest pair
        rotates `times` times slower, so that its angles stay in the trained range. The fastest pair rotates
        as before, and still distinguishes neighbouring positions. With dim 2, its only pair stays as it is.

        Args:
            times: The length of the texts as a multiple of the trained length, at least 1.

        Returns:
            The scaled encoding.

        Raises:
            ValueError: If `times` is less than 1 or isn't a number.
        """
        _check_positive(times, "times")
        if times < 1:
            raise ValueError(f"Expected times to be at least 1, for longer texts, got {times!r}.")
        return self if self.dim < 4 else replace(self, base=self.base * times ** (self.dim / (self.dim - 2)))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: The queries or keys `[b, h, t, d]`.
            positions: Their integer positions, `[t]` or `[b, t]`.

        Returns:
            The rotated tensor `[b, h, t, d]`, in the dtype of x.

        Raises:
            ValueError: If d is less than dim, or the number of positions isn't t.
        """
        d, t = x.shape[-1], x.shape[-2]
        if d < self.dim:
            raise ValueError(f"Expected a head size d of at least dim = {self.dim}, got x {sizes(x)}.")
        if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.shape[-1] != t:
            got = f"a tensor {sizes(positions)}" if isinstance(positions, Tensor) else kind(positions)
            raise ValueError(f"Expected positions [t] = [{t}] or [b, t] for x {sizes(x)}, got {got}.")
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        angle = _angles(positions, self.dim, self.base) / self.factor  # [t, dim/2] or [b, t, dim/2]
        if angle.dim() == 3:
            angle = angle[:, None]  # [b, 1, t, dim/2]
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        rotated = x[..., : self.dim].to(dtype)
        if self.layout == "half":
            first, second = rotated.chunk(2, -1)
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(pairs, -1) if self.layout == "half" else torch.stack(pairs, -1).flatten(-2)
        return torch.cat((joined.to(x.dtype), x[..., self.dim :]), -1)  # [b, h, t, d]
