"""Biases: their values, invalid inputs, devices and dtypes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import manyheads as mh
from manyheads.biases import Bias
from tests.errors import raises

OWN = ("reference", "chunked", "native", "auto")


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2**-n for n in range(1, 9)]),
        (16, [2 ** (-n / 2) for n in range(1, 17)]),
        # Between powers: the slopes of the power below, then every other one of the power above.
        (3, [2**-4, 2**-8, 2**-2]),
        (5, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-n for n in range(1, 9)] + [2 ** (-n / 2) for n in (1, 3, 5, 7)]),
    ],
)
def test_the_papers_slopes(heads: int, slopes: list[float]) -> None:
    torch.testing.assert_close(mh.ALiBi(heads).slopes, torch.tensor(slopes), rtol=1e-7, atol=0)


@pytest.mark.parametrize("heads", range(1, 70))
def test_slopes_of_any_head_count(heads: int) -> None:
    """One for each head, between 2⁻⁸ and 1; those of the power of two below come first."""
    slopes = mh.ALiBi(heads).slopes
    below = 2 ** (heads.bit_length() - 1)
    assert slopes.shape == (heads,)
    assert len(set(slopes.tolist())) == heads
    assert slopes.min() >= 2**-8
    assert slopes.max() < 1
    assert torch.equal(slopes[:below], mh.ALiBi(below).slopes)


def test_a_learned_table_starts_at_zero_and_learns() -> None:
    bias = mh.Relative.learned(3, 4)
    assert bias.table.shape == (3, 9)
    assert not bias.table.any()
    assert isinstance(bias.table, torch.nn.Parameter)
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    mh.attention(q, k, v, bias=bias).sum().backward()
    assert bias.table.grad is not None
    assert bias.table.grad.any()


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (3, 4, 5), (4, 5), (5,), (1,), (), (2, 1, 1, 5), (3, 1, 1), (4, 1)]
)
def test_dense_broadcasts_as_tensors_do(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (4, 5, 5))
    values = torch.randn(shape, dtype=torch.float64)
    weights = (q @ k.mT / math.sqrt(8) + values).softmax(-1)
    for kernel in OWN:
        out, amap = mh.attention_with_map(q, k, v, bias=mh.Dense(values), kernel=kernel)
        torch.testing.assert_close(out, weights @ v)
        torch.testing.assert_close(amap.dense(), weights)
    each = mh.attention(q, k, v, bias=mh.Dense(values), offset=torch.tensor([5, -3]), kernel="chunked")
    torch.testing.assert_close(each, weights @ v)  # by row, whatever the position


def test_a_bias_is_not_rounded_to_the_queries_dtype() -> None:
    """A float32 bias beside bfloat16 queries: 100.25 isn't a bfloat16."""
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    v = torch.eye(2, 8, dtype=torch.bfloat16)[None, None]
    bias = mh.Dense(torch.tensor([[100.25, 100.0]]))
    for kernel in OWN:
        out, amap = mh.attention_with_map(q, k, v, bias=bias, kernel=kernel)
        expected = torch.tensor([0.25, 0.0]).softmax(-1)
        torch.testing.assert_close(amap[0, 0, 0], expected)
        torch.testing.assert_close(out[0, 0, 0, :2].float(), expected, rtol=4e-3, atol=0)


@pytest.mark.parametrize("kernel", OWN)
def test_a_float32_bias_of_float64_queries_is_used_in_float64(kernel: str) -> None:
    q, k, v = (torch.randn(1, 3, n, 8, dtype=torch.float64) for n in (9, 9, 9))
    slopes = torch.rand(3)
    for low, high in (
        (mh.ALiBi(slopes), mh.ALiBi(slopes.double())),
        (mh.Relative(slopes[:, None]), mh.Relative(slopes.double()[:, None])),
    ):
        one, two = (mh.attention(q, k, v, bias=bias, kernel=kernel) for bias in (low, high))
        torch.testing.assert_close(one, two, rtol=1e-14, atol=1e-14)


EVERY: list[Bias] = [mh.ALiBi(3), mh.Relative(torch.zeros(3, 5)), mh.Dense(torch.zeros(4, 5))]


@pytest.mark.parametrize("bias", EVERY, ids=str)
def test_biases_are_frozen_compare_by_identity_and_move(bias: Bias) -> None:
    assert bias == bias
    assert bias != bias.but()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(bias, dataclasses.fields(bias)[0].name, None)  # type: ignore[arg-type]
    assert bias.to("meta").tensor().device.type == "meta"
    assert bias.tensor().device.type == "cpu"
    assert type(bias).__name__ in repr(bias)


BAD: list[tuple[Any, type[Exception], list[str]]] = [
    (lambda: mh.ALiBi(0), ValueError, ["ALiBi", "0"]),
    (lambda: mh.ALiBi(-2), ValueError, ["ALiBi", "-2"]),
    (lambda: mh.ALiBi(True), TypeError, ["True"]),
    (lambda: mh.ALiBi([1.0, math.nan]), ValueError, ["ALiBi", "nan"]),
    (lambda: mh.ALiBi(torch.ones(2, 2)), TypeError, ["ALiBi", "[2, 2]"]),
    (lambda: mh.ALiBi(torch.ones(2).long()), TypeError, ["ALiBi", "int64"]),
    (lambda: mh.ALiBi("x"), TypeError, ["ALiBi"]),
    (lambda: mh.ALiBi(None), TypeError, ["ALiBi"]),
    (lambda: mh.ALiBi(2.5), TypeError, ["ALiBi"]),
    (lambda: mh.Relative(torch.zeros(3, 4)), ValueError, ["Relative", "2n + 1", "[3, 4]"]),
    (lambda: mh.Relative(torch.zeros(3)), ValueError, ["Relative", "[3]"]),
    (lambda: mh.Relative(torch.zeros(3, 5).long()), TypeError, ["Relative", "int64"]),
    (lambda: mh.Relative([[0.0]]), TypeError, ["Relative", "list"]),
    (lambda: mh.Relative(torch.full((1, 3), math.inf)), ValueError, ["Relative", "inf"]),
    (lambda: mh.Relative.learned(0, 3), ValueError, ["heads", "0"]),
    (lambda: mh.Relative.learned(2, -1), ValueError, ["distance", "-1"]),
    (lambda: mh.Dense(torch.tensor([1.0, math.nan])), ValueError, ["Dense", "NaN"]),
    (lambda: mh.Dense(torch.tensor([1.0, math.inf])), ValueError, ["Dense", "+inf"]),
    (lambda: mh.Dense(torch.ones(2, 2) > 0), TypeError, ["Dense", "bool", "Keep"]),
    (lambda: mh.Dense(torch.ones(2).long()), TypeError, ["Dense", "int64"]),
    (lambda: mh.Dense([[0.0]]), TypeError, ["Dense", "list"]),
    (lambda: mh.Dense(torch.zeros(1, 1, 1, 1, 1)), ValueError, ["Dense", "[1, 1, 1, 1, 1]"]),
]


@pytest.mark.parametrize(("make", "error", "words"), BAD)
def test_invalid_biases_raise(make: Any, error: type[Exception], words: list[str]) -> None:
    with raises(error, *words):
        make()


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (mh.ALiBi(4), ["ALiBi", "4", "h = 3"]),
        (mh.Relative(torch.zeros(2, 3)), ["Relative", "2", "h = 3"]),
        (mh.Dense(torch.zeros(4, 4)), ["Dense", "[4, 4]", "[2, 3, 4, 5]"]),
        (mh.Dense(torch.zeros(3, 1, 4, 5)), ["Dense", "[3, 1, 4, 5]", "[2, 3, 4, 5]"]),
    ],
    ids=str,
)
def test_biases_that_do_not_fit_raise(bias: Bias, words: list[str]) -> None:
    q, k, v = (torch.randn(2, 3, n, 8) for n in (4, 5, 5))
    with raises(ValueError, *words):
        mh.attention(q, k, v, bias=bias)
