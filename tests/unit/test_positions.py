"""Positions: the sinusoidal encoder and rotary, against their formulas and their properties."""

from __future__ import annotations

import cmath
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import manyheads as mh
from tests.errors import raises


def test_sinusoidal_is_the_papers_formula() -> None:
    encoded = mh.Sinusoidal(6).encode(torch.arange(50), torch.float64)
    for pos in range(50):
        for i in range(3):
            angle = pos / 10000 ** (2 * i / 6)
            assert encoded[pos, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert encoded[pos, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)


def test_sinusoidal_is_added_from_an_offset() -> None:
    x = torch.randn(2, 7, 8)
    position = mh.Sinusoidal(8, base=100.0)
    whole = position(x)
    torch.testing.assert_close(whole - x, position.encode(torch.arange(7)).expand(2, 7, 8))
    torch.testing.assert_close(position(x[:, 3:], offset=3), whole[:, 3:], rtol=0, atol=0)
    assert position(x.bfloat16()).dtype == torch.bfloat16
    assert position(torch.zeros(1, 3, 8), offset=10**7).isfinite().all()


def test_sinusoidal_is_exact_at_large_positions() -> None:
    """The angle is computed in float64: at a million tokens float32 would be wrong by 0.06."""
    encoded = mh.Sinusoidal(2).encode(torch.tensor([1_000_003]))
    assert encoded[0, 0] == pytest.approx(math.sin(1_000_003), abs=1e-7)


def test_sinusoidal_of_any_shape_of_positions() -> None:
    position = mh.Sinusoidal(4)
    places = torch.tensor([[0, 5], [9, 2]])
    encoded = position.encode(places)
    assert encoded.shape == (2, 2, 4)
    assert torch.equal(encoded[1, 0], position.encode(torch.tensor(9)))


def turned(x: list[float], position: float, dim: int, base: float, layout: str, factor: float) -> list[float]:
    """One head's entries, turned as complex numbers, one pair at a time."""
    out = list(x)
    for n in range(dim // 2):
        one, two = (n, n + dim // 2) if layout == "half" else (2 * n, 2 * n + 1)
        z = complex(x[one], x[two]) * cmath.exp(1j * position * base ** (-2 * n / dim) / factor)
        out[one], out[two] = z.real, z.imag
    return out


@pytest.mark.parametrize("times", [1, 2.0, 8, 64])
@pytest.mark.parametrize(("dim", "base"), [(16, 1000.0), (4, 10000.0), (128, 500.0)])
def test_scaled_rotary_slows_the_slowest_pair_most_and_the_fastest_not_at_all(
    dim: int, base: float, times: float
) -> None:
    """Pair n turns by base^(−2n/dim) · times^(−2n/(dim − 2)): the second formula of the same thing."""
    rotary = mh.Rotary(dim, base=base).scaled(times)
    for n in range(dim // 2):
        x = torch.zeros(1, 1, 1, dim, dtype=torch.float64)
        x[..., n] = 1.0
        y = rotary(x, torch.tensor([1]))[0, 0, 0]
        angle = base ** (-2 * n / dim) * times ** (-2 * n / (dim - 2))
        assert y[n] == pytest.approx(math.cos(angle), abs=1e-12)
        assert y[n + dim // 2] == pytest.approx(math.sin(angle), abs=1e-12)
    assert mh.Rotary(2).scaled(times).base == 10000.0  # one pair is the fastest and the slowest


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "d"), [(8, 8), (4, 8), (2, 5), (0, 3)])
@pytest.mark.parametrize(("base", "factor"), [(10000.0, 1.0), (500.0, 4.0)])
def test_rotary_rotates_pairs(layout: Any, dim: int, d: int, base: float, factor: float) -> None:
    x = torch.randn(2, 3, 6, d, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 100, 3, 50])
    out = mh.Rotary(dim, base=base, layout=layout, factor=factor)(x, positions)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    for b in range(2):
        for h in range(3):
            for row, place in enumerate(positions.tolist()):
                expected = turned(x[b, h, row].tolist(), place, dim, base, layout, factor)
                assert out[b, h, row].tolist() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@given(shift=st.integers(-50, 1000), seed=st.integers(0, 99))
def test_scores_depend_on_distances_alone(layout: Any, shift: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, 5, 8, dtype=torch.float64, generator=gen) for _ in range(2))
    rotary, places = mh.Rotary(6, layout=layout), torch.arange(5)
    here = rotary(q, places) @ rotary(k, places).mT
    there = rotary(q, places + shift) @ rotary(k, places + shift).mT
    torch.testing.assert_close(here, there)
    assert torch.allclose(rotary(q, places).norm(dim=-1), q.norm(dim=-1))


def test_positions_of_each_sequence() -> None:
    x = torch.randn(2, 3, 4, 8)
    places = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    both = mh.Rotary(8)(x, places)
    for b in range(2):
        torch.testing.assert_close(both[b : b + 1], mh.Rotary(8)(x[b : b + 1], places[b]), rtol=0, atol=0)


def test_rotary_in_low_precision_rounds_once() -> None:
    """Computed in float32, then rounded: the nearest bfloat16 to the exact number, nearly always."""
    x = torch.randn(1, 4, 64, 32).bfloat16()
    places = torch.arange(64) + 100_000
    exact = mh.Rotary(32)(x.double(), places)
    out = mh.Rotary(32)(x, places)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 2e-2).all()


def test_rotary_is_exact_at_large_positions() -> None:
    """At a million tokens the first pair's angle in float32 is still a number of radians, not noise."""
    x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    out = mh.Rotary(2)(x, torch.tensor([1_000_003]))
    assert out.flatten().tolist() == pytest.approx([math.cos(1_000_003), math.sin(1_000_003)], abs=1e-5)
    x = torch.randn(1, 1, 1, 64)
    exact = mh.Rotary(64)(x.double(), torch.tensor([1_000_003]))
    out = mh.Rotary(64)(x, torch.tensor([1_000_003]))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)


def test_rotary_has_a_gradient() -> None:
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    for layout in ("half", "interleaved"):
        rotary = mh.Rotary(4, layout=layout)
        assert torch.autograd.gradcheck(lambda x, rotary=rotary: rotary(x, torch.arange(3)), (x,))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mh.Rotary(5), ValueError, ["Rotary", "even", "5"]),
        (lambda: mh.Rotary(-2), ValueError, ["Rotary", "-2"]),
        (lambda: mh.Rotary(4.0), TypeError, ["Rotary", "4.0"]),
        (lambda: mh.Rotary(4, base=0), ValueError, ["base", "0"]),
        (lambda: mh.Rotary(4, base=math.nan), ValueError, ["base", "nan"]),
        (lambda: mh.Rotary(4, factor=-1.0), ValueError, ["factor", "-1"]),
        (lambda: mh.Rotary(4, layout="other"), ValueError, ["half", "interleaved", "other"]),
        (
            lambda: mh.Rotary(8)(torch.randn(1, 1, 3, 4), torch.arange(3)),
            ValueError,
            ["dim = 8", "[1, 1, 3, 4]"],
        ),
        (lambda: mh.Sinusoidal(5), ValueError, ["Sinusoidal", "even", "5"]),
        (lambda: mh.Sinusoidal("4"), TypeError, ["Sinusoidal", "'4'"]),
        (lambda: mh.Sinusoidal(4, base=-1), ValueError, ["base", "-1"]),
        (lambda: mh.Sinusoidal(4)(torch.randn(1, 3, 6)), ValueError, ["[b, t, 4]", "[1, 3, 6]"]),
    ],
)
def test_invalid_positions_raise(make: Any, error: type[Exception], words: list[str]) -> None:
    with raises(error, *words):
        make()


@pytest.mark.parametrize(
    "positions", [torch.arange(4), torch.arange(10).view(2, 5)[:, :4], torch.arange(5)[None, None]]
)
def test_rotary_names_the_number_of_positions(positions: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"Expected positions \[t\] = \[5\] or \[b, t\] for x .*, got a"):
        mh.Rotary(8)(torch.randn(2, 1, 5, 8), positions)
