"""Errors of functions and layers for invalid arguments, with the caller's values in them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import manyheads as mh
from manyheads import figures
from manyheads.problem import Problem
from manyheads.shapes import kind
from tests.errors import raises

FUNCTIONS = (mh.attention, mh.attention_with_map, mh.explain)


def good() -> dict[str, Any]:
    return {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 7, 8), "v": torch.randn(2, 2, 7, 8)}


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def nested(*size: int, lengths: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own, once
        return torch.nested.nested_tensor([x(n, *size) for n in lengths])


MAP = mh.attention_with_map(*good().values())[1]
BAD: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    # shapes that don't go together, named with their letters and sizes
    ("three dimensions", {"q": x(4, 5, 8)}, ValueError, ["q", "[b, h, t, d]", "[4, 5, 8]"]),
    ("five dimensions", {"v": x(1, 2, 2, 7, 8)}, ValueError, ["v", "[b, g, s, w]", "[1, 2, 2, 7, 8]"]),
    ("a scalar", {"k": x()}, ValueError, ["k", "[b, g, s, d]", "[]"]),
    ("batches", {"k": x(3, 2, 7, 8), "v": x(3, 2, 7, 8)}, ValueError, ["batch b", "2", "3"]),
    ("batch of v", {"v": x(3, 2, 7, 8)}, ValueError, ["v", "[3, 2, 7, 8]", "[2, 2, 7, 8]"]),
    ("head sizes", {"k": x(2, 2, 7, 6)}, ValueError, ["head size d", "8", "6"]),
    ("keys and values", {"v": x(2, 2, 6, 8)}, ValueError, ["k", "v", "[2, 2, 7, 8]", "[2, 2, 6, 8]", "s"]),
    ("heads of v", {"v": x(2, 1, 7, 8)}, ValueError, ["k", "v", "g", "[2, 1, 7, 8]"]),
    # a head count that doesn't divide
    ("3 into 4", {"k": x(2, 3, 7, 8), "v": x(2, 3, 7, 8)}, ValueError, ["g = 3", "h = 4", "divide"]),
    ("more key heads", {"k": x(2, 8, 7, 8), "v": x(2, 8, 7, 8)}, ValueError, ["g = 8", "h = 4", "divide"]),
    ("no key heads", {"k": x(2, 0, 7, 8), "v": x(2, 0, 7, 8)}, ValueError, ["g = 0", "h = 4", "divide"]),
    # what isn't a tensor of floats
    ("a list", {"q": [[1.0]]}, TypeError, ["q", "tensor", "list"]),
    ("a map", {"q": MAP}, TypeError, ["q", "got an AttentionMap"]),
    ("None", {"v": None}, TypeError, ["v", "NoneType"]),
    ("integers", {"k": x(2, 2, 7, 8, dtype=torch.int64)}, TypeError, ["k", "int64"]),
    ("complex", {"q": x(2, 4, 5, 8, dtype=torch.complex64)}, TypeError, ["q", "complex64"]),
    ("float8", {"q": x(2, 4, 5, 8).to(torch.float8_e5m2)}, TypeError, ["q", "float8"]),
    # devices or dtypes that differ
    ("dtypes", {"k": x(2, 2, 7, 8, dtype=torch.float64)}, ValueError, ["q", "k", "float32", "float64"]),
    ("dtype of v", {"v": x(2, 2, 7, 8, dtype=torch.bfloat16)}, ValueError, ["v", "float32", "bfloat16"]),
    ("devices", {"k": torch.zeros(2, 2, 7, 8, device="meta")}, ValueError, ["k", "cpu", "meta"]),
    ("device of v", {"v": torch.zeros(2, 2, 7, 8, device="meta")}, ValueError, ["v", "cpu", "meta"]),
    ("mask elsewhere", {"mask": mh.Keep(x(5, 7) > 0).to("meta")}, ValueError, ["mask", "cpu", "meta"]),
    ("bias elsewhere", {"bias": mh.ALiBi(4).to("meta")}, ValueError, ["bias", "cpu", "meta"]),
    ("sink elsewhere", {"sink": torch.zeros(4, device="meta")}, ValueError, ["sink", "cpu", "meta"]),
    ("offset elsewhere", {"offset": x(2).long().to("meta")}, ValueError, ["offset", "cpu", "meta"]),
    # a naked tensor as mask or bias
    ("naked mask", {"mask": x(5, 7) > 0}, TypeError, ["mask", "Tensor", "Keep", "Drop", "True = may attend"]),
    ("float mask", {"mask": x(5, 7)}, TypeError, ["mask", "float32", "bias=Dense(t)", "Keep(t != 0)"]),
    ("a string mask", {"mask": "causal"}, TypeError, ["mask", "str", "mask=Causal()"]),
    ("a class", {"mask": mh.Causal}, TypeError, ["mask", "the class Causal. Write Causal()."]),
    ("a class with arguments", {"mask": mh.Keep}, TypeError, ["the class Keep. Write Keep(…)."]),
    ("a bias as mask", {"mask": mh.ALiBi(4)}, TypeError, ["mask", "ALiBi"]),
    ("naked bias", {"bias": x(5, 7)}, TypeError, ["bias", "Tensor", "Dense"]),
    ("a mask as bias", {"bias": mh.Causal()}, TypeError, ["bias", "Causal"]),
    # numbers
    ("scale", {"scale": math.nan}, ValueError, ["scale", "nan"]),
    ("scale", {"scale": math.inf}, ValueError, ["scale", "inf"]),
    ("scale", {"scale": "0.1"}, TypeError, ["scale", "'0.1'"]),
    ("scale", {"scale": torch.tensor(1.0)}, (TypeError, ValueError), ["scale"]),
    ("softcap", {"softcap": 0.0}, ValueError, ["softcap", "0.0"]),
    ("softcap", {"softcap": -3.0}, ValueError, ["softcap", "-3.0"]),
    ("softcap", {"softcap": math.nan}, ValueError, ["softcap", "nan"]),
    ("softcap", {"softcap": "30"}, TypeError, ["softcap", "'30'"]),
    ("dropout", {"dropout_p": 1.5}, ValueError, ["dropout_p", "1.5"]),
    ("dropout", {"dropout_p": -0.1}, ValueError, ["dropout_p", "-0.1"]),
    ("dropout", {"dropout_p": math.nan}, ValueError, ["dropout_p", "nan"]),
    ("dropout", {"dropout_p": None}, TypeError, ["dropout_p", "None"]),
    ("offset", {"offset": 1.5}, TypeError, ["offset", "1.5"]),
    ("offset", {"offset": True}, TypeError, ["offset", "True"]),
    ("offset", {"offset": torch.zeros(3).long()}, ValueError, ["offset", "[2]", "[3]"]),
    ("offset", {"offset": torch.zeros(2)}, (TypeError, ValueError), ["offset", "float32"]),
    ("offset", {"offset": [1, 2]}, TypeError, ["offset", "[1, 2]"]),
    ("offset", {"offset": torch.zeros(2, dtype=torch.bool)}, ValueError, ["offset", "bool"]),
    ("far offset", {"offset": 2**62, "mask": mh.Causal()}, ValueError, ["offset", "2**58", str(2**62)]),
    ("far offset", {"offset": -(2**62)}, ValueError, ["offset", "-2**58", str(-(2**62))]),
    ("far offset", {"offset": torch.tensor([0, 2**62])}, ValueError, ["offset", str(2**62)]),
    ("sink", {"sink": 1.0}, TypeError, ["sink", "[h]", "float"]),
    ("sink", {"sink": x(2)}, ValueError, ["sink", "[h]", "[4]", "[2]"]),
    ("sink", {"sink": x(1, 4)}, ValueError, ["sink", "[1, 4]"]),
    ("sink", {"sink": x(4).long()}, TypeError, ["sink", "int64"]),
    ("sink", {"sink": torch.tensor([0.0, 1.0, math.nan, 0.0])}, ValueError, ["sink", "nan"]),
    ("sink", {"sink": torch.tensor([0.0, 1.0, math.inf, 0.0])}, ValueError, ["sink", "inf"]),
    # kernels
    ("no kernel", {"kernel": "flash"}, ValueError, ["auto", "sdpa", "chunked", "reference", "'flash'"]),
    ("no kernel", {"kernel": None}, ValueError, ["kernel", "None"]),
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("bad", "error", "words"), [row[1:] for row in BAD], ids=[f"{n} {row[0]}" for n, row in enumerate(BAD)]
)
def test_invalid_arguments_raise(function: Any, bad: dict[str, Any], error: Any, words: list[str]) -> None:
    arguments = good() | bad
    with raises(error, *words):
        function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_a_gradient_that_a_kernel_cannot_give_is_refused() -> None:
    q, k, v = good().values()
    bias = mh.Relative(torch.zeros(4, 3, requires_grad=True))
    with pytest.raises(ValueError, match="gradient"):
        mh.attention(q, k, v, bias=bias, kernel="sdpa")
    with torch.no_grad():
        mh.attention(q, k, v, bias=bias, kernel="sdpa")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mh.MultiHeadAttention(10, 3), ValueError, ["heads", "3", "10"]),
        (lambda: mh.MultiHeadAttention(12, 4, kv_heads=3), ValueError, ["kv_heads", "3", "4"]),
        (lambda: mh.MultiHeadAttention(12, 0), ValueError, ["heads", "0"]),
        (lambda: mh.MultiHeadAttention(0, 1), ValueError, ["embed", "0"]),
        (lambda: mh.MultiHeadAttention(12, 2.0), TypeError, ["heads", "2.0"]),
        (lambda: mh.MultiHeadAttention(12, 2, kv_heads=0), ValueError, ["kv_heads", "0"]),
        (lambda: mh.MultiHeadAttention(12, 2, head_dim=-1), ValueError, ["head_dim", "-1"]),
        (lambda: mh.MultiHeadAttention(12, 2, dropout=2.0), ValueError, ["dropout", "2.0"]),
        (lambda: mh.MultiHeadAttention(12, 2, dropout="x"), TypeError, ["dropout", "'x'"]),
        (lambda: mh.MultiHeadAttention(12, 2, position=mh.Sinusoidal(12)), TypeError, ["Sinusoidal"]),
        (lambda: mh.MultiHeadAttention(12, 2, position=mh.Rotary(8)), ValueError, ["8", "6"]),
        (lambda: mh.MultiHeadAttention(12, 2, bias=torch.zeros(2)), TypeError, ["bias", "Tensor"]),
        (lambda: mh.MultiHeadAttention(12, 2, bias=False), TypeError, ["projection_bias=False", "ALiBi"]),
        (lambda: mh.MultiHeadAttention(12, 2, projection_bias=None), TypeError, ["projection_bias", "None"]),
        (lambda: mh.SelfAttention(8, projection_bias=mh.ALiBi(1)), TypeError, ["projection_bias", "ALiBi"]),
        (lambda: mh.MultiHeadAttention(12, 2, kernel="flash"), ValueError, ["kernel", "auto", "'flash'"]),
        (lambda: mh.CrossAttention(8, kernel=None), ValueError, ["kernel", "auto", "None"]),
        (lambda: mh.MultiHeadAttention(12, 2)(nested(12)), TypeError, ["x", "nested", "pad"]),
        (lambda: mh.MultiHeadAttention(12, 2)(nested(12, lengths=())), TypeError, ["got a nested tensor"]),
        (lambda: mh.SelfAttention(12)(nested(12)), TypeError, ["x", "nested", "pad"]),
        (lambda: mh.attention(*[nested(2, 12)] * 3), TypeError, ["q", "nested", "pad"]),
        (lambda: mh.MultiHeadAttention(12, 2, qk_norm=3), TypeError, ["qk_norm", "int"]),
        (lambda: mh.MultiHeadAttention(12, 2)(x(3, 12)), ValueError, ["[b, t, 12]", "[3, 12]", "first"]),
        (lambda: mh.MultiHeadAttention(12, 2)(x(1, 3, 10)), ValueError, ["x", "12", "[1, 3, 10]"]),
        (lambda: mh.MultiHeadAttention(12, 2)([1]), TypeError, ["x", "list"]),
        (lambda: mh.MultiHeadAttention(12, 2)(x(1, 3, 12), x(1, 3, 8)), ValueError, ["context", "[1, 3, 8]"]),
        (lambda: mh.MultiHeadAttention(12, 2)(x(1, 3, 12), x(2, 3, 12)), ValueError, ["batch", "1", "2"]),
        (lambda: mh.MultiHeadAttention(12, 2, context_dim=8)(x(1, 3, 12)), ValueError, ["context", "8"]),
        (lambda: mh.MultiHeadAttention(12, 2)(x(1, 3, 12), mask=x(3, 3) > 0), TypeError, ["mask", "Keep"]),
        (
            lambda: mh.MultiHeadAttention(12, 2)(x(1, 3, 12), x(1, 3, 12), cache=mh.Cache()),
            ValueError,
            ["cache", "context"],
        ),
        (lambda: mh.SelfAttention(0), ValueError, ["embed", "0"]),
        (lambda: mh.SelfAttention(8)(x(2, 8)), ValueError, ["[2, 8]"]),
        (lambda: mh.CrossAttention(8, 4)(x(1, 2, 8), x(1, 2, 8)), ValueError, ["context", "4", "[1, 2, 8]"]),
        (lambda: mh.Cache(0), ValueError, ["length", "0"]),
        (lambda: mh.Cache(2.5), TypeError, ["length", "2.5"]),
    ],
)  # fmt: skip
def test_invalid_arguments_of_layers_raise(make: Any, error: type[Exception], words: list[str]) -> None:
    with raises(error, *words), torch.no_grad():
        make()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "an int"),
        (True, "a bool"),
        ((1,), "a tuple"),
        (None, "a NoneType"),
        (mh.ALiBi(4), "an ALiBi"),
        (x(2), "a Tensor of torch.float32"),
    ],
)
def test_names_of_types_have_an_article(value: object, words: str) -> None:
    assert kind(value) == words
    with pytest.raises(TypeError, match=f"got {words} for layer 0"):
        figures.entropy([value])  # type: ignore[list-item]


def test_a_problem_is_checked_before_anything_is_computed() -> None:
    """Checks pass on meta tensors, which have no numbers."""
    q = torch.zeros(2, 4, 5, 8, device="meta")
    problem = Problem.of(q, q, q, mask=mh.Causal() & mh.Documents(torch.zeros(5).long()).to("meta"))
    assert problem.shape == (2, 4, 4, 5, 5, 8, 8)
    with pytest.raises(ValueError, match="divide"):
        Problem.of(q, q[:, :3], q[:, :3])
