"""Oracles of positional encodings: the sinusoidal table and rotary encodings.

PE(p, 2i) = sin(p / 10000^(2i/e)), PE(p, 2i + 1) = cos(p / 10000^(2i/e))   (Vaswani et al. 2017, section 3.5)
pair n of a head is rotated by p · 10000^(−2n/d)                           (Su et al. 2021, arXiv:2104.09864)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.checker.oracle import Inputs, Oracle, Outputs, largest_difference


class Encoding(Oracle):
    """The steps that both encodings share. `width` is the width e of a table, or d of a head."""

    tolerance = 2e-4  # absolute: the error of float32 for angles of some hundred radians
    base = 10000.0

    x: Inputs
    width: int

    def __call__(self, x: Inputs) -> Outputs:
        """Run all steps."""
        self.x, self.width = x, x.query.shape[-1]
        return Outputs(self.encode())

    def encode(self) -> Tensor:
        """Return the right output."""
        raise NotImplementedError

    def positions(self) -> Tensor:
        """Return the positions, 0, 1, … unless the call gives others: `[..., t]`."""
        if self.x.positions is not None:
            return self.x.positions
        return torch.arange(self.x.t, dtype=torch.float64)

    def exponents(self) -> Tensor:
        """Return the exponent 2i/e of each pair's wavelength, `[e/2]`."""
        return torch.arange(0, self.width, 2, dtype=torch.float64) / self.width

    def angles(self) -> Tensor:
        """Return the angle of each pair at each position, `[..., t, e/2]`, unless the call gives them."""
        if self.x.angles is not None:
            return self.x.angles
        positions = self.positions()[..., None]
        return positions * (self.base ** -self.exponents()).to(positions.dtype)

    @staticmethod
    def difference(got: Tensor, expected: Tensor) -> float:
        """Return the largest absolute difference; an expected NaN matches anything."""
        if got.shape != expected.shape:
            return largest_difference(got, expected)
        return largest_difference(torch.where(expected.isnan(), expected, got.to(expected.dtype)), expected)


class Sinusoidal(Encoding):
    """The table `[b, t, e]` that is added to embeddings."""

    noun = "a sinusoidal encoding"
    axes: ClassVar[Mapping[int, tuple[str, ...]]] = {3: ("batch entry", "position", "dimension")}

    def sines(self) -> Tensor:
        """Return the sines, `[t, e/2]`."""
        return self.angles().sin()

    def cosines(self) -> Tensor:
        """Return the cosines, `[t, e/2]`."""
        return self.angles().cos()

    def arrange(self, sines: Tensor, cosines: Tensor) -> Tensor:
        """Put sines at even and cosines at odd dimensions: `[t, e]`."""
        return interleave(sines, cosines)

    def table(self) -> Tensor:
        """Return the encoding of each position, `[t, e]`."""
        return self.arrange(self.sines(), self.cosines())

    def encode(self) -> Tensor:
        """Return the table for each batch entry."""
        return self.table().expand(self.x.b, -1, -1)


class Rotary(Encoding):
    """Rotated queries and keys, `[2, b, h, t, d]`. A pair is entries n and n + d/2."""

    noun = "a rotary encoding"
    axes: ClassVar[Mapping[int, tuple[str, ...]]] = {
        5: ("query (0) or key (1)", "batch entry", "head", "position", "entry")
    }

    def split_pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second entries of all pairs."""
        first, second = x.chunk(2, -1)
        return first, second

    def join_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Undo `split_pairs`."""
        return torch.cat((first, second), -1)

    def rotate_pair(self, x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate pairs by the angle with this cosine and sine."""
        return x1 * cos - x2 * sin, x1 * sin + x2 * cos

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys `[b, h, t, d]`."""
        angles = self.angles()
        return self.join_pairs(*self.rotate_pair(*self.split_pairs(x), angles.cos(), angles.sin()))

    def rotate_query(self) -> Tensor:
        """Return the rotated queries."""
        return self.rotate(self.x.query)

    def rotate_key(self) -> Tensor:
        """Return the rotated keys."""
        return self.rotate(self.x.key)

    def encode(self) -> Tensor:
        """Return rotated queries and keys."""
        return torch.stack((self.rotate_query(), self.rotate_key()))


class Interleaved(Rotary):
    """Rotary encodings in the other convention, which is equally right: a pair is entries 2n and 2n + 1."""

    def split_pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries with even and with odd numbers."""
        return x[..., 0::2], x[..., 1::2]

    def join_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Alternate first and second entries."""
        return interleave(first, second)


def interleave(even: Tensor, odd: Tensor) -> Tensor:
    """Return `[..., 2n]`, in which entries of `even` and `odd` alternate."""
    return torch.stack((even, odd), -1).flatten(-2)
