"""Bugs in positional encodings.

In the table, `o` is the oracle whose step is overridden.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from manyheads.checker.encodings import Interleaved, Rotary, Sinusoidal, interleave
from manyheads.checker.oracle import Oracle
from manyheads.checker.overrides import Bug, override, transform, wrap

EXPONENT = "the exponent is 2i/e, where i counts pairs"
EVEN_ODD = "even dimensions are sines, odd ones cosines: pe[:, 0::2], pe[:, 1::2]"
FIRST = "the first position is 0: torch.arange(length)"
PAIR = "(x1 cos − x2 sin, x1 sin + x2 cos)"
ANGLE = "angle = position · base^(−2n/d)"
COUNT = "base^(−2n/d), where n counts pairs"
BASES = (100.0, 1000.0, 5000.0, 20000.0, 50000.0, 100000.0, 500000.0, 1000000.0)  # of other models
ALIKE = "rotate queries and keys alike"


def scaled(step: str, factor: float, base: type[Oracle] = Sinusoidal) -> type[Oracle]:
    """Return an oracle with the result of a step multiplied."""
    return transform(base, **{step: lambda o, x: x * factor})


def cosines_of_odd(oracle: Sinusoidal, factor: int = 1) -> Tensor:
    """Return cosines whose exponent is that of dimension 2i + 1, (2i + 1)/e."""
    exponents = factor * torch.arange(1, oracle.width, 2, dtype=torch.float64) / oracle.width
    return (oracle.positions()[:, None] * oracle.base**-exponents).cos()


def drop_large_angles(_: Sinusoidal, angles: Tensor) -> Tensor:
    """Set angles to NaN, which matches anything, if they are too large for a correct sine in float32."""
    return torch.where(angles.abs() < 200, angles, math.nan)


def rotate_by_wrong_tables(oracle: Rotary, x: Tensor) -> Tensor:
    """Compute x · cos + rotated(x) · sin with tables for the other kind of pairs."""
    angles, (x1, x2) = oracle.angles(), oracle.split_pairs(x)
    is_interleaved = isinstance(oracle, Interleaved)
    table = torch.cat((angles, angles), -1) if is_interleaved else interleave(angles, angles)
    return x * table.cos() + oracle.join_pairs(-x2, x1) * table.sin()


def rotate_other_pairs(oracle: Rotary, x: Tensor) -> Tensor:
    """Rotate the other kind of pairs, consistently."""
    other = Rotary() if isinstance(oracle, Interleaved) else Interleaved()
    angles = oracle.angles()
    return other.join_pairs(*other.rotate_pair(*other.split_pairs(x), angles.cos(), angles.sin()))


def rotate_shifted(oracle: Rotary, shift: int) -> Tensor:
    """Rotate queries by the positions of tokens after or before them."""
    positions = type(oracle).positions
    shifted = override(type(oracle), positions=lambda o: positions(o) + shift)(oracle.weights, oracle.dtype)
    shifted.__dict__.update(oracle.__dict__)
    return cast(Rotary, shifted).rotate(oracle.x.query)


def rotate_first_half(oracle: Rotary, rotate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Rotate the first half of a head as if it were a head."""
    oracle.width = x.shape[-1] // 2
    return torch.cat((rotate(x[..., : oracle.width]), x[..., oracle.width :]), -1)


def rotate_by(formula: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> type[Oracle]:
    """Return an oracle with another formula for a pair x1, x2 and the cosine c and sine s of its angle."""
    return override(Rotary, rotate_pair=lambda o, x1, x2, c, s: formula(x1, x2, c, s))


# fmt: off
BUGS = [
    Bug("exponent-doubled", "whose exponent is doubled: 10000^(4i/e) rather than 10000^(2i/e)",
        "i counts pairs: dimensions 2i and 2i + 1 share 10000^(2i/e); in a loop over range(0, e, 2) the loop's i is 2i already",
        scaled("exponents", 2), override(scaled("exponents", 2), cosines=lambda o: cosines_of_odd(o, 2))),
    Bug("exponent-halved", "whose exponent is half of what it should be", EXPONENT, scaled("exponents", 0.5)),
    Bug("angle-of-its-own", "whose cosines have their own angles", "sine and cosine of a pair share an angle: the exponent is 2i/e for both",
        override(Sinusoidal, cosines=cosines_of_odd)),
    Bug("sin-cos-swapped", "whose sines and cosines are swapped", "even dimensions are sines, odd ones cosines",
        override(Sinusoidal, arrange=lambda o, sines, cosines: interleave(cosines, sines))),
    Bug("sin-cos-halves", "whose sines all come first, then the cosines", EVEN_ODD,
        override(Sinusoidal, arrange=lambda o, sines, cosines: torch.cat((sines, cosines), -1))),
    Bug("cos-sin-halves", "whose cosines all come first, then the sines", EVEN_ODD,
        override(Sinusoidal, arrange=lambda o, sines, cosines: torch.cat((cosines, sines), -1))),
    Bug("sines-only", "of sines only", "odd dimensions are cosines", override(Sinusoidal, cosines=lambda o: o.angles().sin())),
    Bug("cosines-only", "of cosines only", "even dimensions are sines", override(Sinusoidal, sines=lambda o: o.angles().cos())),
    Bug("positions-from-one", "whose positions are counted from 1", FIRST, transform(Sinusoidal, positions=lambda o, p: p + 1)),
    Bug("positions-reversed", "whose positions are counted from the end", FIRST, transform(Sinusoidal, positions=lambda o, p: p.flip(0))),
    Bug("base-thousand", "of base 1000 rather than 10000", "the base is 10000", override(Sinusoidal, base=1000.0)),
    Bug("base-other", "of base 100000 rather than 10000", "the base is 10000", override(Sinusoidal, base=100000.0)),
    Bug("even-only", "whose odd dimensions are left at 0", "odd dimensions are cosines: pe[:, 1::2] = cos(angle)", scaled("cosines", 0)),
    Bug("odd-only", "whose even dimensions are left at 0", "even dimensions are sines: pe[:, 0::2] = sin(angle)", scaled("sines", 0)),
    Bug("added-twice", "that is added twice", "add it once", scaled("table", 2)),
    Bug("not-added", "that isn't added", "x + encoding", scaled("table", 0)),
    Bug("angles-inverted", "whose positions are multiplied by 10000^(2i/e) rather than divided", "angle = position / 10000^(2i/e)",
        transform(scaled("exponents", -1), angles=drop_large_angles)),
    Bug("pairs-from-one", "whose pairs are counted from 1",
        "the angle of the first pair is the position itself: i counts from 0, torch.arange(0, e, 2)",
        transform(Sinusoidal, exponents=lambda o, x: x + 2 / o.width)),
    Bug("exponent-of-odd", "whose exponents are those of the odd dimensions, (2i + 1)/e", "a pair's exponent is 2i/e: torch.arange(0, e, 2) / e",
        transform(Sinusoidal, exponents=lambda o, x: x + 1 / o.width)),
    Bug("exponent-over-narrower-width", "whose exponent is divided by e − 2, so that the last pair has the whole base",
        "10000^(2i/e): divide by the width", transform(Sinusoidal, exponents=lambda o, x: x * o.width / (o.width - 2))),
    Bug("power-of-the-quotient", "that raises position / 10000 to the power 2i/e, rather than 10000 alone",
        "only the base has an exponent: position / (10000 ** (2i/e))",
        override(Sinusoidal, angles=lambda o: (o.positions()[:, None] / o.base) ** o.exponents())),
    Bug("exponent-as-factor", "whose positions are divided by 10000 · 2i/e rather than by its power", "10000 ** (2i/e), a power",
        override(Sinusoidal, angles=lambda o: o.positions()[:, None] / (o.base * o.exponents()))),
    Bug("angles-in-turns", "whose angles are multiplied by 2π", "angle = position / 10000^(2i/e), in radians already",
        scaled("angles", 2 * math.pi)),
    Bug("angles-in-degrees", "whose angles are taken as degrees", "sin and cos take radians", scaled("angles", math.pi / 180)),
    Bug("sine-negated", "whose sines have the wrong sign", "sin(angle), not its negative", scaled("sines", -1)),
    Bug("first-position-for-all", "that gives every token the first position", "encode position i for token i", scaled("positions", 0)),

    Bug("rotary-halves", "that rotates other pairs than its frequencies are laid out for, or than its documentation says",
        "neighbours (0, 1), (2, 3) need frequencies repeated side by side, (n, n + d/2) need the list of them twice",
        override(Rotary, rotate=rotate_by_wrong_tables), override(Rotary, rotate=rotate_other_pairs)),
    Bug("rotary-sign", "that rotates the other way", PAIR, scaled("angles", -1, Rotary)),
    Bug("rotary-base", "of another base than 10000", "the base is 10000, unless documented otherwise",
        *(override(Rotary, base=base) for base in BASES)),
    Bug("rotary-positions-from-one", "whose positions are counted from 1", "the first position is 0",
        transform(Rotary, positions=lambda o, p: p + 1)),
    Bug("rotary-doubled", "whose angles are doubled", ANGLE, scaled("angles", 2, Rotary)),
    Bug("rotary-halved", "whose angles are halved", ANGLE, scaled("angles", 0.5, Rotary)),
    Bug("rotary-exponent-doubled", "whose exponent is doubled", COUNT, scaled("exponents", 2, Rotary)),
    Bug("rotary-exponent-halved", "whose exponent is halved", COUNT, scaled("exponents", 0.5, Rotary)),
    Bug("rotary-inverted", "whose positions are divided by its frequencies", ANGLE, scaled("exponents", -1, Rotary)),
    Bug("rotary-half-of-head", "that rotates the first half of a head only", "rotate all d entries",
        wrap(Rotary, rotate=lambda o, rotate, x: torch.cat((rotate(x).chunk(2, -1)[0], x.chunk(2, -1)[1]), -1)),
        transform(Rotary, angles=lambda o, x: x * (torch.arange(x.shape[-1]) < x.shape[-1] // 2)), wrap(Rotary, rotate=rotate_first_half)),
    Bug("rotary-missing", "that doesn't rotate at all", "rotate each pair by its position's angle", override(Rotary, rotate=lambda o, x: x)),
    Bug("rotary-reflected", "that adds where a rotation subtracts, or the reverse", PAIR,
        rotate_by(lambda x1, x2, c, s: (x1 * c + x2 * s, x1 * s + x2 * c)), rotate_by(lambda x1, x2, c, s: (x1 * c - x2 * s, x2 * c - x1 * s))),
    Bug("rotary-one-of-pair-swapped", "that exchanges sine and cosine in one entry of each pair", PAIR,
        rotate_by(lambda x1, x2, c, s: (x1 * c - x2 * s, x1 * c + x2 * s)), rotate_by(lambda x1, x2, c, s: (x1 * s - x2 * c, x1 * s + x2 * c))),
    Bug("rotary-pair-exchanged", "whose rotated pairs are returned with their entries exchanged", f"{PAIR}, in that order",
        rotate_by(lambda x1, x2, c, s: (x1 * s + x2 * c, x1 * c - x2 * s))),
    Bug("rotary-entries-apart", "whose entries are multiplied by cosine and sine and not mixed", f"each rotated entry has a part of both: {PAIR}",
        rotate_by(lambda x1, x2, c, s: (x1 * c, x2 * s)), rotate_by(lambda x1, x2, c, s: (x1 * c, x2 * c))),
    Bug("rotary-sin-cos-swapped", "whose sine and cosine are swapped", PAIR, transform(Rotary, angles=lambda o, x: math.pi / 2 - x)),
    Bug("rotary-one-position", "that gives every token the first position", "rotate token i by position i", scaled("positions", 0, Rotary)),
    Bug("rotary-queries-only", "that rotates queries and leaves keys", ALIKE, override(Rotary, rotate_key=lambda o: o.x.key)),
    Bug("rotary-shifted", "that rotates queries as if they were a token later or earlier than keys", "a token's query and key have the same position",
        *(override(Rotary, rotate_query=lambda o, shift=shift: rotate_shifted(o, shift)) for shift in (1, -1))),
    Bug("rotary-keys-only", "that rotates keys and leaves queries", ALIKE, override(Rotary, rotate_query=lambda o: o.x.query)),
]
# fmt: on
