"""Bugs in positional encodings."""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.checker.bugs.family import bug, override, transform
from manyheads.checker.encodings import Interleaved, Rotary, Sinusoidal, interleave
from manyheads.checker.oracle import Oracle

EXPONENT = "the exponent is 2i/e, where i counts pairs"
EVEN_ODD = "even dimensions are sines, odd ones cosines: pe[:, 0::2], pe[:, 1::2]"
FIRST = "the first position is 0: torch.arange(length)"
PAIR = "(x1 cos − x2 sin, x1 sin + x2 cos)"
ANGLE = "angle = position · base^(−2n/d)"
COUNT = "base^(−2n/d), where n counts pairs"
ALIKE = "rotate queries and keys alike"


def scaled(step: str, factor: float, base: type[Oracle] = Sinusoidal) -> type[Oracle]:
    """Return an oracle with the result of a step multiplied."""
    return transform(base, **{step: lambda o, x: x * factor})


def own_cosines(o: Sinusoidal, factor: int = 1) -> Tensor:
    """Return cosines of dimension 2i + 1 with an exponent of their own, (2i + 1)/e."""
    exponents = factor * torch.arange(1, o.width, 2, dtype=torch.float64) / o.width
    return (o.positions()[:, None] * o.base**-exponents).cos()


def known(o: Sinusoidal, angles: Tensor) -> Tensor:
    """Return NaN, which matches anything, where float32 says nothing of an angle's sine."""
    return torch.where(angles.abs() < 200, angles, math.nan)


class WrongPairs(Rotary):
    """Rotates x · cos + rotated(x) · sin with tables laid out for the other kind of pairs."""

    def rotate(self, x: Tensor) -> Tensor:
        angles, (x1, x2) = self.angles(), self.split_pairs(x)
        half = isinstance(self, Interleaved)
        table = torch.cat((angles, angles), -1) if half else interleave(angles, angles)
        return x * table.cos() + self.join_pairs(-x2, x1) * table.sin()


class OtherPairs(Rotary):
    """Rotates the other kind of pairs, consistently."""

    def rotate(self, x: Tensor) -> Tensor:
        other = Rotary() if isinstance(self, Interleaved) else Interleaved()
        angles = self.angles()
        return other.join_pairs(*other.rotate_pair(*other.split_pairs(x), angles.cos(), angles.sin()))


class FirstHalf(Rotary):
    """Rotates the first half of a head by the angles of the whole."""

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((super().rotate(x)[..., :half], x[..., half:]), -1)


class FirstHalfAlone(Rotary):
    """Rotates the first half of a head as if it were a head."""

    def rotate(self, x: Tensor) -> Tensor:
        self.width = x.shape[-1] // 2
        return torch.cat((super().rotate(x[..., : self.width]), x[..., self.width :]), -1)


def rotated(rule: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> type[Oracle]:
    """Return an oracle with another rule for a pair x1, x2 and its angle's cosine c and sine s."""
    return override(Rotary, rotate_pair=lambda o, x1, x2, c, s: rule(x1, x2, c, s))


DOUBLED = scaled("exponents", 2)

# fmt: off
SINUSOIDAL = [
    bug("exponent-doubled", "whose exponent is doubled: 10000^(4i/e) rather than 10000^(2i/e)",
        "i counts pairs: dimensions 2i and 2i + 1 share 10000^(2i/e); in a loop over range(0, e, 2) the loop's i is 2i already",
        DOUBLED, override(DOUBLED, cosines=lambda o: own_cosines(o, 2))),
    bug("exponent-halved", "whose exponent is half of what it should be", EXPONENT, scaled("exponents", 0.5)),
    bug("angle-of-its-own", "whose cosines have their own angles", "sine and cosine of a pair share an angle: the exponent is 2i/e for both",
        override(Sinusoidal, cosines=own_cosines)),
    bug("sin-cos-swapped", "whose sines and cosines are swapped", "even dimensions are sines, odd ones cosines",
        override(Sinusoidal, arrange=lambda o, sines, cosines: interleave(cosines, sines))),
    bug("sin-cos-halves", "whose sines all come first, then the cosines", EVEN_ODD,
        override(Sinusoidal, arrange=lambda o, sines, cosines: torch.cat((sines, cosines), -1))),
    bug("cos-sin-halves", "whose cosines all come first, then the sines", EVEN_ODD,
        override(Sinusoidal, arrange=lambda o, sines, cosines: torch.cat((cosines, sines), -1))),
    bug("sines-only", "of sines only", "odd dimensions are cosines", override(Sinusoidal, cosines=lambda o: o.angles().sin())),
    bug("cosines-only", "of cosines only", "even dimensions are sines", override(Sinusoidal, sines=lambda o: o.angles().cos())),
    bug("positions-from-one", "whose positions are counted from 1", FIRST, transform(Sinusoidal, positions=lambda o, p: p + 1)),
    bug("positions-reversed", "whose positions are counted from the end", FIRST, transform(Sinusoidal, positions=lambda o, p: p.flip(0))),
    bug("base-thousand", "of base 1000 rather than 10000", "the base is 10000", override(Sinusoidal, base=1000.0)),
    bug("base-other", "of base 100000 rather than 10000", "the base is 10000", override(Sinusoidal, base=100000.0)),
    bug("even-only", "whose odd dimensions are left at 0", "odd dimensions are cosines: pe[:, 1::2] = cos(angle)", scaled("cosines", 0)),
    bug("odd-only", "whose even dimensions are left at 0", "even dimensions are sines: pe[:, 0::2] = sin(angle)", scaled("sines", 0)),
    bug("added-twice", "that is added twice", "add it once", scaled("table", 2)),
    bug("not-added", "that isn't added", "x + encoding", scaled("table", 0)),
    bug("angles-inverted", "whose positions are multiplied by 10000^(2i/e) rather than divided", "angle = position / 10000^(2i/e)",
        transform(scaled("exponents", -1), angles=known)),
    bug("pairs-from-one", "whose pairs are counted from 1",
        "the angle of the first pair is the position itself: i counts from 0, torch.arange(0, e, 2)",
        transform(Sinusoidal, exponents=lambda o, x: x + 2 / o.width)),
    bug("exponent-of-odd", "whose exponents are those of the odd dimensions, (2i + 1)/e", "a pair's exponent is 2i/e: torch.arange(0, e, 2) / e",
        transform(Sinusoidal, exponents=lambda o, x: x + 1 / o.width)),
    bug("exponent-over-narrower-width", "whose exponent is divided by e − 2, so that the last pair has the whole base",
        "10000^(2i/e): divide by the width", transform(Sinusoidal, exponents=lambda o, x: x * o.width / (o.width - 2))),
    bug("power-of-the-quotient", "that raises position / 10000 to the power 2i/e, rather than 10000 alone",
        "only the base has an exponent: position / (10000 ** (2i/e))",
        override(Sinusoidal, angles=lambda o: (o.positions()[:, None] / o.base) ** o.exponents())),
    bug("exponent-as-factor", "whose positions are divided by 10000 · 2i/e rather than by its power", "10000 ** (2i/e), a power",
        override(Sinusoidal, angles=lambda o: o.positions()[:, None] / (o.base * o.exponents()))),
    bug("angles-in-turns", "whose angles are multiplied by 2π", "angle = position / 10000^(2i/e), in radians already",
        scaled("angles", 2 * math.pi)),
    bug("angles-in-degrees", "whose angles are taken as degrees", "sin and cos take radians", scaled("angles", math.pi / 180)),
    bug("sine-negated", "whose sines have the wrong sign", "sin(angle), not its negative", scaled("sines", -1)),
    bug("first-position-for-all", "that gives every token the first position", "encode position i for token i", scaled("positions", 0)),
]

ROTARY = [
    bug("rotary-halves", "that rotates other pairs than its frequencies are laid out for, or than its documentation says",
        "neighbours (0, 1), (2, 3) need frequencies repeated side by side, (n, n + d/2) need the list of them twice", WrongPairs, OtherPairs),
    bug("rotary-sign", "that rotates the other way", PAIR, scaled("angles", -1, Rotary)),
    bug("rotary-base", "of another base than 10000", "the base is 10000, unless documented otherwise",
        *(override(Rotary, base=base) for base in (100.0, 1000.0, 5000.0, 20000.0, 50000.0, 100000.0, 500000.0, 1000000.0))),
    bug("rotary-positions-from-one", "whose positions are counted from 1", "the first position is 0",
        transform(Rotary, positions=lambda o, p: p + 1)),
    bug("rotary-doubled", "whose angles are doubled", ANGLE, scaled("angles", 2, Rotary)),
    bug("rotary-halved", "whose angles are halved", ANGLE, scaled("angles", 0.5, Rotary)),
    bug("rotary-exponent-doubled", "whose exponent is doubled", COUNT, scaled("exponents", 2, Rotary)),
    bug("rotary-exponent-halved", "whose exponent is halved", COUNT, scaled("exponents", 0.5, Rotary)),
    bug("rotary-inverted", "whose positions are divided by its frequencies", ANGLE, scaled("exponents", -1, Rotary)),
    bug("rotary-half-of-head", "that rotates the first half of a head only", "rotate all d entries", FirstHalf,
        transform(Rotary, angles=lambda o, x: x * (torch.arange(x.shape[-1]) < x.shape[-1] // 2)), FirstHalfAlone),
    bug("rotary-missing", "that doesn't rotate at all", "rotate each pair by its position's angle", override(Rotary, rotate=lambda o, x: x)),
    bug("rotary-reflected", "that adds where a rotation subtracts, or the reverse", PAIR,
        rotated(lambda x1, x2, c, s: (x1 * c + x2 * s, x1 * s + x2 * c)), rotated(lambda x1, x2, c, s: (x1 * c - x2 * s, x2 * c - x1 * s))),
    bug("rotary-one-of-pair-swapped", "that exchanges sine and cosine in one entry of each pair", PAIR,
        rotated(lambda x1, x2, c, s: (x1 * c - x2 * s, x1 * c + x2 * s)), rotated(lambda x1, x2, c, s: (x1 * s - x2 * c, x1 * s + x2 * c))),
    bug("rotary-pair-exchanged", "whose rotated pairs are returned with their entries exchanged", f"{PAIR}, in that order",
        rotated(lambda x1, x2, c, s: (x1 * s + x2 * c, x1 * c - x2 * s))),
    bug("rotary-entries-apart", "whose entries are multiplied by cosine and sine and not mixed", f"each rotated entry has a part of both: {PAIR}",
        rotated(lambda x1, x2, c, s: (x1 * c, x2 * s)), rotated(lambda x1, x2, c, s: (x1 * c, x2 * c))),
    bug("rotary-sin-cos-swapped", "whose sine and cosine are swapped", PAIR, transform(Rotary, angles=lambda o, x: math.pi / 2 - x)),
    bug("rotary-one-position", "that gives every token the first position", "rotate token i by position i", scaled("positions", 0, Rotary)),
    bug("rotary-queries-only", "that rotates queries and leaves keys", ALIKE, override(Rotary, rotate_key=lambda o: o.x.key)),
    bug("rotary-keys-only", "that rotates keys and leaves queries", ALIKE, override(Rotary, rotate_query=lambda o: o.x.query)),
]
# fmt: on

BUGS = SINUSOIDAL + ROTARY
