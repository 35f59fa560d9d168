"""Positional encodings under check: the sinusoidal table and rotary turns, and the mistakes made in them.

    PE(p, 2i) = sin(p / 10000^(2i/e)), PE(p, 2i + 1) = cos(the same)   (Vaswani et al. 2017, section 3.5)
    pair n of a head turns by p · 10000^(−2n/d)                        (Su et al. 2021, arXiv:2104.09864)

Both conventions for pairs are right (neighbours, or n and n + d/2) if frequencies and pairs agree; where
a name says which it is, the other one is a mistake.
"""

# ruff: noqa: E501 (tables of sentences)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import parameters as reading
from manyheads.checker.candidates.adapter import CUTS
from manyheads.checker.candidates.names import WIDTH
from manyheads.checker.candidates.parameters import Unclear
from manyheads.checker.checks import LOST, Check, failed, passed
from manyheads.checker.diagnosis import Diagnosis
from manyheads.checker.isolation.candidate import Answer, Call, Trouble
from manyheads.checker.oracle import distance
from manyheads.shapes import sizes

BASE = 10000.0
ROOM = 2e-4  # float32 angles of some hundred radians are this coarse

Table = Callable[[Tensor, int], Tensor]  # positions [t], width e → [t, e]
Turn = Callable[[Tensor, Tensor], Tensor]  # x [b, h, t, d], positions [t] → [b, h, t, d]


# -- the sinusoidal table, and how it goes wrong ---------------------------------------------------


def angles(positions: Tensor, width: int, base: float = BASE, power: float = 1.0) -> Tensor:
    """position · base^(−power · 2n/width) for pair n: `[t, width/2]`, float64."""
    pair = torch.arange(0, width, 2, dtype=torch.float64)
    return positions.to(torch.float64)[:, None] * base ** (-power * pair / width)


def woven(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack((even, odd), -1).flatten(-2)


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    a = angles(positions, width)
    return woven(a.sin(), a.cos())


def _by_index(p: Tensor, e: int, twice: bool = True) -> Tensor:
    """Twice the index in the exponent, sines and cosines each with an angle of its own."""
    index = torch.arange(e, dtype=torch.float64)
    a = p.to(torch.float64)[:, None] / BASE ** ((2 if twice else 1) * index / e)
    return torch.where(index.long() % 2 == 0, a.sin(), a.cos())


def _known(a: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
    """NaN, for anything, where angles are too large for float32 to say anything of their sine."""
    return how(torch.where(a.abs() < 200, a, math.nan))


def _half(p: Tensor, e: int, how: Callable[[Tensor], Tensor]) -> Tensor:
    return how(angles(p, e))


def _woven(a: Tensor) -> Tensor:
    return woven(a.sin(), a.cos())


def _shifted(p: Tensor, e: int, by: int) -> Tensor:
    """Exponents (2i + by)/e."""
    return _woven(angles(p, e) * BASE ** (-by / e))


def _quotient(p: Tensor, e: int) -> Tensor:
    """position / (10000 · 2i/e): infinite for the first pair, 0/0 at the first position."""
    return p.to(torch.float64)[:, None] / (BASE * torch.arange(0, e, 2, dtype=torch.float64) / e)


SINES: dict[str, tuple[str, str, list[Table]]] = {
    "exponent-doubled": (
        "whose exponent is doubled: 10000^(4i/e) rather than 10000^(2i/e)",
        "i counts pairs: dimensions 2i and 2i + 1 share 10000^(2i/e); in a loop over range(0, e, 2) the loop's i is 2i already",
        [lambda p, e: _half(p, e, lambda a: woven(*(f(angles(p, e, power=2.0)) for f in (torch.sin, torch.cos)))),
         lambda p, e: _by_index(p, e),
         lambda p, e: woven(angles(p, e, power=2.0).sin(),
                            (p.to(torch.float64)[:, None] / BASE ** (2 * torch.arange(1, e, 2, dtype=torch.float64) / e)).cos())],
    ),
    "exponent-halved": (
        "whose exponent is half of what it should be", "10000^(2i/e), where i counts pairs",
        [lambda p, e: woven(*(f(angles(p, e, power=0.5)) for f in (torch.sin, torch.cos)))],
    ),
    "angle-of-its-own": (
        "whose cosines have angles of their own", "sine and cosine of a pair share an angle: the exponent is 2i/e for both",
        [lambda p, e: _by_index(p, e, twice=False)],
    ),
    "sin-cos-swapped": (
        "whose sines and cosines are swapped", "even dimensions are sines, odd ones cosines",
        [lambda p, e: _half(p, e, lambda a: woven(a.cos(), a.sin()))],
    ),
    "sin-cos-halves": (
        "whose sines all come first, then the cosines", "even dimensions are sines, odd ones cosines: pe[:, 0::2], pe[:, 1::2]",
        [lambda p, e: _half(p, e, lambda a: torch.cat((a.sin(), a.cos()), -1))],
    ),
    "cos-sin-halves": (
        "whose cosines all come first, then the sines", "even dimensions are sines, odd ones cosines: pe[:, 0::2], pe[:, 1::2]",
        [lambda p, e: _half(p, e, lambda a: torch.cat((a.cos(), a.sin()), -1))],
    ),
    "sines-only": ("of sines only", "odd dimensions are cosines", [lambda p, e: _half(p, e, lambda a: woven(a.sin(), a.sin()))]),
    "cosines-only": ("of cosines only", "even dimensions are sines", [lambda p, e: _half(p, e, lambda a: woven(a.cos(), a.cos()))]),
    "positions-from-one": (
        "whose positions are counted from 1", "the first position is 0: torch.arange(length)",
        [lambda p, e: sinusoidal(p + 1, e)],
    ),
    "positions-reversed": (
        "whose positions are counted from the end", "the first position is 0: torch.arange(length)",
        [lambda p, e: sinusoidal(p.flip(0), e)],
    ),
    "base-thousand": ("of base 1000 rather than 10000", "the base is 10000",
                      [lambda p, e: woven(*(f(angles(p, e, 1000.0)) for f in (torch.sin, torch.cos)))]),
    "base-other": ("of base 100000 rather than 10000", "the base is 10000",
                   [lambda p, e: woven(*(f(angles(p, e, 100000.0)) for f in (torch.sin, torch.cos)))]),
    "even-only": ("whose odd dimensions are left at 0", "odd dimensions are cosines: pe[:, 1::2] = cos(angle)",
                  [lambda p, e: _half(p, e, lambda a: woven(a.sin(), torch.zeros_like(a)))]),
    "odd-only": ("whose even dimensions are left at 0", "even dimensions are sines: pe[:, 0::2] = sin(angle)",
                 [lambda p, e: _half(p, e, lambda a: woven(torch.zeros_like(a), a.cos()))]),
    "added-twice": ("that is added twice", "add it once", [lambda p, e: 2 * sinusoidal(p, e)]),
    "not-added": ("that isn't added", "x + encoding", [lambda p, e: 0 * sinusoidal(p, e)]),
    "angles-inverted": (
        "whose positions are multiplied by 10000^(2i/e) rather than divided", "angle = position / 10000^(2i/e)",
        [lambda p, e: _known(angles(p, e, power=-1.0), lambda a: woven(a.sin(), a.cos()))],
    ),
    "pairs-from-one": (
        "whose pairs are counted from 1", "the first pair turns by the position itself: i counts from 0, torch.arange(0, e, 2)",
        [lambda p, e: _shifted(p, e, 2)],
    ),
    "exponent-of-odd": (
        "whose exponents are those of the odd dimensions, (2i + 1)/e", "a pair's exponent is 2i/e: torch.arange(0, e, 2) / e",
        [lambda p, e: _shifted(p, e, 1)],
    ),
    "exponent-over-narrower-width": (
        "whose exponent is divided by e − 2, so that the last pair has the whole base", "10000^(2i/e): divide by the width",
        [lambda p, e: _half(p, e, lambda a: woven(*(f(angles(p, e, power=e / (e - 2))) for f in (torch.sin, torch.cos))))],
    ),
    "power-of-the-quotient": (
        "that raises position / 10000 to the power 2i/e, rather than 10000 alone", "only the base has an exponent: position / (10000 ** (2i/e))",
        [lambda p, e: _woven((p.to(torch.float64)[:, None] / BASE) ** (torch.arange(0, e, 2, dtype=torch.float64) / e))],
    ),
    "exponent-as-factor": (
        "whose positions are divided by 10000 · 2i/e rather than by its power", "10000 ** (2i/e), a power",
        [lambda p, e: _woven(_quotient(p, e))],
    ),
    "angles-in-turns": ("whose angles are multiplied by 2π", "angle = position / 10000^(2i/e), in radians as it stands",
                        [lambda p, e: _woven(angles(p, e) * 2 * math.pi)]),
    "angles-in-degrees": ("whose angles are taken as degrees", "sin and cos take radians",
                          [lambda p, e: woven(*(f(angles(p, e) * math.pi / 180) for f in (torch.sin, torch.cos)))]),
    "sine-negated": ("whose sines have the wrong sign", "sin(angle), not its negative",
                     [lambda p, e: _half(p, e, lambda a: woven(-a.sin(), a.cos()))]),
    "first-position-for-all": ("that gives every token the first position", "encode position i for token i",
                               [lambda p, e: sinusoidal(0 * p, e)]),
}  # fmt: skip


# -- rotary turns, and how they go wrong -----------------------------------------------------------


def turn(x: Tensor, a: Tensor, pairs: str = "half") -> Tensor:
    """Pairs of x `[b, h, t, d]` turned by angles `[t, d/2]`."""
    x1, x2 = x.chunk(2, -1) if pairs == "half" else (x[..., 0::2], x[..., 1::2])
    y1, y2 = x1 * a.cos() - x2 * a.sin(), x1 * a.sin() + x2 * a.cos()
    return torch.cat((y1, y2), -1) if pairs == "half" else woven(y1, y2)


def _tables(x: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """x · cos + rotated(x) · sin, with tables `[t, d]`."""
    if pairs == "half":
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin
    return x * cos + woven(-x[..., 1::2], x[..., 0::2]) * sin


def _mixed(x: Tensor, a: Tensor, pairs: str) -> Tensor:
    """Frequencies laid out for one kind of pairs, and the other kind turned."""
    layout = torch.cat((a, a), -1) if pairs == "interleaved" else woven(a, a)
    return _tables(x, layout.cos(), layout.sin(), pairs)


def turns(pairs: str) -> dict[str, tuple[str, str, list[Turn]]]:
    """Rotary mistakes in one convention for pairs."""

    def by(change: Callable[[Tensor, int], Tensor]) -> list[Turn]:
        return [lambda x, p: turn(x, change(p, x.shape[-1]), pairs)]

    other = "interleaved" if pairs == "half" else "half"
    return {
        "rotary-halves": (
            "that turns other pairs than its frequencies are laid out for",
            "neighbours (0, 1), (2, 3) need frequencies repeated side by side, (n, n + d/2) need the list of them twice",
            [lambda x, p: _mixed(x, angles(p, x.shape[-1]), pairs), lambda x, p: _mixed(x, angles(p, x.shape[-1]), other)],
        ),
        "rotary-sign": ("that turns the other way", "(x1 cos − x2 sin, x1 sin + x2 cos)", by(lambda p, d: -angles(p, d))),
        "rotary-base": ("of another base than 10000", "the base is 10000, if nobody says otherwise",
                        [_based(base, pairs) for base in (100.0, 1000.0, 5000.0, 20000.0, 50000.0, 100000.0, 500000.0, 1000000.0)]),
        "rotary-positions-from-one": ("whose positions are counted from 1", "the first position is 0", by(lambda p, d: angles(p + 1, d))),
        "rotary-doubled": ("whose angles are doubled", "angle = position · base^(−2n/d)", by(lambda p, d: 2 * angles(p, d))),
        "rotary-halved": ("whose angles are halved", "angle = position · base^(−2n/d)", by(lambda p, d: angles(p, d) / 2)),
        "rotary-exponent-doubled": ("whose exponent is doubled", "base^(−2n/d), where n counts pairs", by(lambda p, d: angles(p, d, power=2.0))),
        "rotary-exponent-halved": ("whose exponent is halved", "base^(−2n/d), where n counts pairs", by(lambda p, d: angles(p, d, power=0.5))),
        "rotary-inverted": ("whose positions are divided by its frequencies", "angle = position · base^(−2n/d)", by(lambda p, d: angles(p, d, power=-1.0))),
        "rotary-half-of-head": (
            "that turns the first half of a head only", "turn all d entries",
            [lambda x, p: torch.cat((turn(x, angles(p, x.shape[-1]), pairs)[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]), -1),
             lambda x, p: turn(x, angles(p, x.shape[-1]) * (torch.arange(x.shape[-1] // 2) < x.shape[-1] // 4), pairs),
             lambda x, p: torch.cat((turn(x[..., : x.shape[-1] // 2], angles(p, x.shape[-1] // 2), pairs), x[..., x.shape[-1] // 2 :]), -1)],
        ),
        "rotary-missing": ("that doesn't turn at all", "turn each pair by its position's angle", by(lambda p, d: 0 * angles(p, d))),
        "rotary-reflected": ("that adds where a turn subtracts, or the reverse", "(x1 cos − x2 sin, x1 sin + x2 cos)",
                             [lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * c + x2 * s, x1 * s + x2 * c)),
                              lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * c - x2 * s, x2 * c - x1 * s))]),
        "rotary-one-of-pair-swapped": (
            "that exchanges sine and cosine in one entry of each pair", "(x1 cos − x2 sin, x1 sin + x2 cos)",
            [lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * c - x2 * s, x1 * c + x2 * s)),
             lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * s - x2 * c, x1 * s + x2 * c))],
        ),
        "rotary-pair-exchanged": (
            "whose turned pairs come back with their entries exchanged", "(x1 cos − x2 sin, x1 sin + x2 cos), in that order",
            [lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * s + x2 * c, x1 * c - x2 * s))],
        ),
        "rotary-entries-apart": (
            "whose entries are multiplied by cosine and sine and not mixed", "each turned entry has a part of both: (x1 cos − x2 sin, x1 sin + x2 cos)",
            [lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * c, x2 * s)),
             lambda x, p: _pair(x, p, pairs, lambda x1, x2, c, s: (x1 * c, x2 * c))],
        ),
        "rotary-sin-cos-swapped": ("whose sine and cosine are swapped", "(x1 cos − x2 sin, x1 sin + x2 cos)",
                                   by(lambda p, d: math.pi / 2 - angles(p, d))),
        "rotary-one-position": ("that gives every token the first position", "turn token i by position i", by(lambda p, d: angles(0 * p, d))),
    }  # fmt: skip


def _based(base: float, pairs: str) -> Turn:
    return lambda x, p: turn(x, angles(p, x.shape[-1], base), pairs)


def _pair(
    x: Tensor,
    p: Tensor,
    pairs: str,
    how: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """What is made of each pair x1, x2 and of its angle's cosine and sine."""
    a = angles(p, x.shape[-1])
    x1, x2 = x.chunk(2, -1) if pairs == "half" else (x[..., 0::2], x[..., 1::2])
    y1, y2 = how(x1, x2, a.cos(), a.sin())
    return torch.cat((y1, y2), -1) if pairs == "half" else woven(y1, y2)


# -- asking ----------------------------------------------------------------------------------------


class Encoder:
    """A candidate for positions: how it is called, what was assumed, and what it answers."""

    cut: str  # how a turn's x `[b, h, t, d]` lies
    arguments: Callable[[Tensor], list[Any]]  # of a turn, for that x
    order: Callable[[int], list[Any]]  # of a function that makes a table, for a number of positions

    def __init__(
        self, subject: Any, like: str, guessed: bool, init: dict[str, Any], layout: str | None
    ) -> None:
        self.subject, self.like, self.guessed, self.layout = subject, like, guessed, layout or "batch"
        self.notes: list[str] = []
        d = subject.describe()
        if d.what == "class":
            given = reading.filled(d, init)
            if like == "rotary":
                given |= {n: 8 for n in ("dim", "d", "head_dim", "d_model", "d_head", "dim_head", "embed_dim", "hidden_size")
                          if n in given and n not in init}  # fmt: skip
            if "dropout" in given and "dropout" not in init:
                given["dropout"] = 0.1
            shown = ", ".join(f"{n}={v!r}" for n, v in given.items())
            try:
                d = subject.make(given)
            except Trouble as error:
                if error.kind != "init":
                    raise
                raise Unclear(
                    f"{str(error).rstrip('.')}: it was built with {shown}; say others with --init."
                ) from None
            self.notes.append(f"built as {d.name}({shown})")
            self.width = next((v for n, v in given.items() if v in (WIDTH, 8) and isinstance(v, int)), WIDTH)
        else:
            self.width = int(d.attributes.get("d_model", d.attributes.get("dim", WIDTH)))
        self.d = d
        if guessed:
            self.notes.insert(0, reading.guess(like))

    def call(self, *args: Any, **options: Any) -> Answer:
        answer: Answer = self.subject.call(Call(args=tuple(args), **options))
        return answer


def first_tensors(output: Any) -> list[Tensor]:
    parts = list(output.values()) if isinstance(output, dict) else output
    return [p for p in (parts if isinstance(parts, list | tuple) else [parts]) if isinstance(p, Tensor)]


def check_positions(
    subject: Any, like: str, guessed: bool, init: dict[str, Any], layout: str | None
) -> tuple[list[str], list[Check], list[Diagnosis]]:
    """Notes, answers and diagnosis of a positional encoding or a rotary turn."""
    encoder = Encoder(subject, like, guessed, init, layout)
    ask = _ask_table if like == "positional" else _ask_turn
    return ask(encoder)


def _named(
    names: dict[str, tuple[str, str, list[Any]]], off: Callable[[Any], float], what: str
) -> list[Diagnosis]:
    found = []
    for name, (is_, mend, variants) in names.items():
        error = min(off(one) for one in variants)
        if error <= ROOM:
            found.append(Diagnosis(name, f"it agrees to {error:.0e} with {what} {is_}", mend, True, error))
    return found


def _ask_table(c: Encoder) -> tuple[list[str], list[Check], list[Diagnosis]]:
    table, added = _table_of(c)
    right = distance(table(7), sinusoidal(torch.arange(7), c.width))
    lengths = (1, 2, 7, 33)
    error = max(distance(table(n), sinusoidal(torch.arange(n), c.width)) for n in lengths)
    checks = [passed("shapes")]
    checks.append(
        passed("values", f"lengths {', '.join(map(str, lengths))}", error, ROOM) if error <= ROOM else
        failed("values", "the encoding differs.", error, ROOM)
    )  # fmt: skip
    checks += _behaviour(c, lambda **options: _answered(c, added, **options))
    found: list[Diagnosis] = []
    if any(one.name == "determinism" and one.status == "failed" for one in checks):
        outs = torch.stack([first_tensors(_answered(c, added, seed=n).output)[0] for n in range(256)]).to(
            torch.float64
        )
        mean = distance(outs.mean(0), _shown(c, sinusoidal(torch.arange(7), c.width), added))
        if mean < 6 * float(outs.std(0).max()) / 16:
            says = "it drops numbers in evaluation too: over 256 seeds its outputs average to the right ones"
            mend = "drop in training only: nn.Dropout, or F.dropout(x, p, training=self.training)"
            found = [Diagnosis("dropout-left-on", says, mend, True, mean)]
    if not found and (error > ROOM or right > ROOM):

        def off(one: Table) -> float:
            return max(_near(table(n), one(torch.arange(n), c.width)) for n in (9, 21))

        found = _named(SINES, off, "the sinusoidal encoding")
        if not found:
            got, want = table(9), sinusoidal(torch.arange(9), c.width)
            wrong = (got - want).abs() > ROOM
            cols = wrong.any(0).nonzero().flatten().tolist()
            rows = wrong.any(1).nonzero().flatten().tolist()
            found = [Diagnosis("", "no known mistake explains it; wrong are positions "
                               f"{_few(rows)} and dimensions {_few(cols)}: position {rows[0]}, dimension {cols[0]} is "
                               f"{float(got[rows[0], cols[0]]):.4f} and should be {float(want[rows[0], cols[0]]):.4f}", "", False)]  # fmt: skip
    return c.notes, checks, found


def _near(got: Tensor, want: Tensor) -> float:
    """The distance where the expected numbers are known."""
    return distance(torch.where(want.isnan(), want, got), want)


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")


def _answered(c: Encoder, added: float, **options: Any) -> Answer:
    if not c.d.torch_module:
        return c.call(*c.order(7), **options)
    b, t = (2, 7) if c.layout == "batch" else (7, 2)
    return c.call(torch.ones(b, t, c.width), **options)


def _shown(c: Encoder, table: Tensor, added: float) -> Tensor:
    """What `_answered` should answer, for an encoding of 7 positions."""
    if not c.d.torch_module:
        return table
    table = table + added
    return table.expand(2, 7, c.width) if c.layout == "batch" else table[:, None].expand(7, 2, c.width)


LENGTHS = ("length", "max_len", "seq_len", "n", "T", "L", "t", "max_length", "seq_length", "n_positions", "num_positions",
           "max_seq_len", "sequence_length", "context_length", "block_size", "positions", "position", "pos", "size")  # fmt: skip


def _table_of(c: Encoder) -> tuple[Callable[[int], Tensor], float]:
    """A function that gives the candidate's `[n, e]` for n positions; to how many times x is it added?"""
    wanted = [one for one in c.d.call if one.kind in ("positional", "keyword") and one.required]
    if not c.d.torch_module and len(wanted) == 2 and not c.d.parameters:
        first_is_length = wanted[0].name in LENGTHS or wanted[1].name not in LENGTHS
        by_positions = wanted[0 if first_is_length else 1].name in ("positions", "position", "pos")

        def order(n: int) -> list[Any]:
            length: Any = torch.arange(n) if by_positions else n
            return [length, c.width] if first_is_length else [c.width, length]

        c.order = order

        def function(n: int) -> Tensor:
            return _flat(first_tensors(c.call(*order(n)).output), n, c.width)

        function(3)
        return function, 0.0
    if len(wanted) != 1:
        raise Unclear(
            f"{c.d.name} takes {', '.join(one.name for one in wanted) or 'nothing'}, and a positional encoding is a "
            "function of a length and a width, or a module of x: say what it is with --like."
        )
    if wanted[0].name in LENGTHS:

        def by_length(n: int) -> Tensor:
            given = torch.arange(n) if wanted[0].name in ("positions", "position", "pos") else n
            return _flat(first_tensors(c.call(given).output), n, c.width)

        c.order = lambda n: [torch.arange(n) if wanted[0].name in ("positions", "position", "pos") else n]
        by_length(3)
        return by_length, 0.0
    if c.layout == "batch" and re.search(
        r"\[(t|seq\w*|l|s)\s*,\s*(b|n|batch\w*)\s*,", reading.doc_lines(c.d), re.I
    ):
        c.layout = "sequence"
    if c.layout == "batch":
        tries = {n: c.call(torch.zeros(2, 5, c.width)).output for n in (0,)}
        out = first_tensors(tries[0])
        if (
            out
            and out[0].dim() == 3
            and distance(out[0][0], out[0][1]) > 1e-6
            and distance(out[0][:, 0], out[0][:, 1]) < 1e-6
        ):
            c.layout = "sequence"
    if c.layout == "sequence":
        c.notes.append("sequence first, [t, b, e]")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, c.width, generator=g)

    def shown(x: Tensor) -> Tensor:
        y = x.transpose(0, 1) if c.layout == "sequence" else x
        out = first_tensors(c.call(y.contiguous()).output)
        if not out or out[0].dim() not in (2, 3) or out[0].shape[-1] != c.width:
            came = sizes(out[0]) if out else "no tensor"
            raise Unclear(
                f"an encoding of {sizes(y)} was expected, x with positions added or positions alone, and {came} came."
            )
        return out[0].transpose(0, 1) if c.layout == "sequence" and out[0].dim() == 3 else out[0]

    a, b = shown(x), shown(x * 0)
    added = a.shape == x.shape and distance(a, b) > 1e-6
    times = float(((a - b) * x).sum() / (x * x).sum()) if added else 0.0
    scaled = f"x, multiplied by {times:.4g}" if abs(times - 1) > 1e-4 else "x"
    c.notes.append(f"adds its encoding to {scaled}" if added else "gives its encoding alone")

    def module(n: int) -> Tensor:
        y = torch.randn(2, n, c.width, generator=torch.Generator().manual_seed(n))
        out = shown(y)
        return (out - times * y if added else out.expand(2, n, c.width))[0].to(torch.float64)

    return module, times


def _flat(out: list[Tensor], n: int, width: int) -> Tensor:
    if not out or out[0].numel() != n * width:
        came = sizes(out[0]) if out else "no tensor"
        raise Unclear(f"an encoding [{n}, {width}] was expected, and {came} came.")
    return out[0].reshape(n, width).to(torch.float64)


def _behaviour(c: Encoder, call: Callable[..., Answer]) -> Iterator[Check]:
    outs = [first_tensors(call(seed=seed).output)[0] for seed in (1, 2)]
    spread = distance(*outs)
    yield passed("determinism", "", 0.0, 0.0) if not spread else failed(
        "determinism", "in evaluation its output depends on the random seed: dropout is left on.", spread, 0.0)  # fmt: skip
    changed = call().changed
    yield (
        passed("state", "a call changes nothing")
        if not changed
        else failed("state", f"a call changed {', '.join(changed)}.")
    )
    try:
        compiled = first_tensors(call(compiled=True).output)[0]
        off = distance(compiled, outs[0])
        yield passed("torch.compile", "", off, ROOM) if off <= ROOM else failed(
            "torch.compile", "compiled, it gives another output.", off, ROOM)  # fmt: skip
    except Trouble as error:
        if error.kind in LOST:
            raise
        yield Check("torch.compile", "could not be checked", str(error))


# -- rotary ----------------------------------------------------------------------------------------


def _ask_turn(c: Encoder) -> tuple[list[str], list[Check], list[Diagnosis]]:
    turned = _turner(c)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 6, c.width, generator=g)
    p = torch.arange(6)
    got = turned(x)
    wide = x.to(torch.float64)
    fits = {
        pairs: max(distance(y, turn(wide, angles(p, c.width), pairs)) for y in got)
        for pairs in ("half", "interleaved")
    }
    text = reading.doc_lines(c.d) + c.d.name + " ".join(re.findall(r"rotate_\w+", c.d.source))
    words = {
        "interleaved": r"every_two|interleav|neighbo|adjacent|\(0, 1\)",
        "half": r"rotate_half|halves|half of|d/2|d / 2",
    }
    told = [one for one, pattern in words.items() if re.search(pattern, text)]
    said = told[0] if len(told) == 1 else None
    pairs = min(fits, key=lambda one: fits[one])
    error = fits[pairs]
    checks = [passed("shapes")]
    if error <= ROOM and (said in (None, pairs)):
        checks.append(passed("values", "", error, ROOM))
    elif error <= ROOM:
        checks.append(
            failed(
                "values",
                f"by its words it turns {_pairs(str(said))}, and it turns {_pairs(pairs)}.",
                fits[str(said)],
                ROOM,
            )
        )
    else:
        checks.append(failed("values", "the turned vectors differ.", error, ROOM))
        pairs = said or pairs
    if error <= ROOM:
        c.notes.append(f"turns {_pairs(pairs)}")
    norm = max(distance(y.norm(dim=-1), wide.norm(dim=-1)) for y in got)
    checks.append(passed("lengths kept", "a turn keeps a vector's length", norm, ROOM) if norm <= ROOM else
                  failed("lengths kept", "a turn must keep a vector's length.", norm, ROOM))  # fmt: skip
    checks.append(_relative(c, turned))
    checks += _behaviour(c, lambda **options: c.call(*c.arguments(x), **options))
    if checks[1].status == "passed":
        return c.notes, checks, []
    found: list[Diagnosis] = []
    if error <= ROOM:
        found = [Diagnosis("rotary-halves", f"it turns {_pairs(pairs)}, where its words say {_pairs(str(said))}",
                           "pair entries as the frequencies are laid out", True, error)]  # fmt: skip
    for one in dict.fromkeys((pairs, "half", "interleaved")):
        if found:
            break

        def off(change: Turn) -> float:
            worst = 0.0
            for seed in (3, 4):
                y = torch.randn(2, 3, 6, c.width, generator=torch.Generator().manual_seed(seed))
                worst = max(worst, *(distance(z, change(y.to(torch.float64), p)) for z in turned(y)))
            return worst

        found = _named(turns(one), off, "a rotary turn")
    if not found and len(got) == 2:
        singly = [
            min(distance(y, turn(wide, angles(p, c.width), one)) for one in ("half", "interleaved"))
            for y in got
        ]
        plain = [distance(y, wide) for y in got]
        for n, other in ((0, 1), (1, 0)):
            if singly[n] <= ROOM and plain[other] <= ROOM:
                name = ("rotary-queries-only", "rotary-keys-only")[n]
                which = ("queries", "keys")
                found = [Diagnosis(name, f"it agrees to {singly[n]:.0e} with a rotary turn of {which[n]} that leaves {which[other]} as they are",
                                   "turn queries and keys alike", True, singly[n])]  # fmt: skip
    if not found:
        rows = sorted(
            {
                i
                for y in got
                for i in ((y - turn(wide, angles(p, c.width), pairs)).abs().amax((0, 1, 3)) > ROOM)
                .nonzero()
                .flatten()
                .tolist()
            }
        )
        cols = sorted(
            {
                i
                for y in got
                for i in ((y - turn(wide, angles(p, c.width), pairs)).abs().amax((0, 1, 2)) > ROOM)
                .nonzero()
                .flatten()
                .tolist()
            }
        )
        found = [
            Diagnosis(
                "",
                f"no known mistake explains it; wrong are positions {_few(rows)} and entries {_few(cols)}",
                "",
                False,
            )
        ]
    return c.notes, checks, found


def _pairs(pairs: str) -> str:
    return "entries n and n + d/2" if pairs == "half" else "neighbours, 2n and 2n + 1"


def _relative(c: Encoder, turned: Callable[[Tensor], list[Tensor]]) -> Check:
    """Products of turned queries and keys may depend on how far apart they are, and on nothing else."""
    g = torch.Generator().manual_seed(5)
    q, k = torch.randn(c.width, generator=g), torch.randn(c.width, generator=g)
    ones = torch.ones(2, 3, 6, 1)
    queries, keys = turned(ones * q), turned(ones * k)
    scores = queries[0][0, 0] @ keys[-1][0, 0].mT  # [6, 6]
    worst = max(float(scores.diagonal(n).max() - scores.diagonal(n).min()) for n in range(-5, 6))
    if worst <= ROOM * 10:
        return passed("relative", "products depend on the distance of positions only", worst, ROOM * 10)
    return failed(
        "relative", "products of queries and keys must depend on their distance only.", worst, ROOM * 10
    )


def _turner(c: Encoder) -> Callable[[Tensor], list[Tensor]]:
    """A function that gives what the candidate makes of x `[b, h, t, d]`, as queries and as keys."""
    wanted = [one for one in c.d.call if one.kind in ("positional", "keyword") and one.required]
    tensors = [one for one in wanted if one.name in ("x", "q", "k", "query", "key", "xq", "xk", "queries", "keys", "t", "input",
               "inputs", "x_q", "x_k", "tensor", "hidden_states")]  # fmt: skip
    places = [
        one
        for one in wanted
        if one.name in ("positions", "position", "pos", "position_ids", "offsets", "indices")
    ]
    tables = {one.name: one for one in wanted if one.name in ("cos", "sin")}
    lengths = [one for one in wanted if one.name in ("seq_len", "length", "max_len")]
    if not tensors and wanted:
        tensors = [wanted[0]]
    known = {one.name for one in (*tensors, *places, *tables.values(), *lengths)}
    unknown = [one.name for one in wanted if one.name not in known]
    if unknown or not tensors or len(tables) == 1:
        raise Unclear(
            f"{c.d.name} needs {', '.join(unknown) or 'arguments'} which the checker doesn't know: a rotary turn takes x, "
            "or q and k, and positions or cos and sin; write an adapter that does."
        )

    def arguments(x: Tensor) -> list[Any]:
        moved = CUTS[c.cut][0](x)
        a = angles(torch.arange(x.shape[2]), c.width)
        layout = torch.cat((a, a), -1).to(torch.float32)
        found: list[Any] = []
        for one in wanted:
            if one in tensors:
                found.append(moved.contiguous())
            elif one in places:
                found.append(torch.arange(x.shape[2]))
            elif one.name in ("cos", "sin"):
                found.append(layout.cos() if one.name == "cos" else layout.sin())
            else:
                found.append(x.shape[2])
        return found

    c.arguments = arguments
    same = torch.randn(c.width, generator=torch.Generator().manual_seed(6)).expand(2, 3, 5, -1)
    problem: Trouble | None = None
    taken: list[tuple[bool, bool, int, str]] = []
    for cut in ("[b, h, t, d]", "[b, t, h, d]", "[t, b, h, d]"):
        c.cut = cut
        lay, back = CUTS[cut]
        try:
            out = first_tensors(c.call(*arguments(same)).output)
        except Trouble as error:
            if error.kind != "call":
                raise
            problem = error
            continue
        if not out or out[0].dim() != 4 or tuple(out[0].shape) != tuple(lay(same).shape):
            continue
        y = back(out[0])
        alike = float((y - y[:1, :1]).abs().max()) < 1e-5  # all heads of all sequences are turned alike
        turning = float((y - y[:, :, :1]).abs().max()) > 1e-3
        taken.append((not (alike and turning), not alike, len(taken), cut))
    if taken:
        c.cut = min(taken)[-1]
    else:
        if problem is not None and problem.unwritten:
            raise Unclear(f"{str(problem).rstrip('.')}: write it, and check again.")
        if problem is not None:
            raise Unclear(
                f"{str(problem).rstrip('.')}: it was called with x [2, 3, 5, {c.width}]; write an adapter."
            )
        raise Unclear(
            f"turned vectors [2, 3, 5, {c.width}] were expected of {c.d.name}, and none came: say what it is with --like."
        )
    c.notes.append(f"takes {c.cut}")

    def turned(x: Tensor) -> list[Tensor]:
        out = first_tensors(c.call(*arguments(x)).output)[: len(tensors)]
        return [CUTS[c.cut][1](y).to(torch.float64) for y in out]

    return turned
