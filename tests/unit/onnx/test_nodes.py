"""Attention nodes of ONNX: the standard's own cases, its reference implementation, and errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyheads as mh
from tests.errors import raises

onnx = pytest.importorskip("onnx")
close = torch.testing.assert_close

pytestmark = pytest.mark.full

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]


def node(*inputs: str, outputs: tuple[str, ...] = ("Y",), **attributes: Any) -> Any:
    return onnx.helper.make_node("Attention", [*("Q", "K", "V"), *inputs], outputs, **attributes)


def tensor(array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def standard_cases() -> Iterator[Any]:
    """Yield the standard's cases that are an Attention node. The others are the same cases as functions."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(action="ignore"):  # NumPy's own, about cases of other operators
        cases = collect_testcases("Attention")
    for case in cases:
        if [part.op_type for part in case.model.graph.node] == ["Attention"]:
            yield case


def assert_closer_to_float64(attend: Any, given: Any, found: list[Tensor], known: list[Tensor]) -> None:
    """Assert that outputs have smaller errors than the expected ones, computed in bfloat16 by steps."""
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    exact = [output for output in attend(*wide) if output is not None]
    for output, other, number in zip(found, known, exact, strict=True):
        error, largest = (output.double() - number).abs().max(), number.abs().max()
        assert error <= (other.double() - number).abs().max()
        assert error <= 2.0**-8 * largest  # the unit roundoff
        close(output, other, rtol=0, atol=float(2.0**-6 * largest))


def test_the_cases_of_the_standard() -> None:
    """All of them, within their own tolerance, and in the docs."""
    page = (ROOT / "docs" / "reference" / "onnx.md").read_text(encoding="utf-8")
    names = []
    for case in standard_cases():
        [part] = case.model.graph.node
        attend = mh.from_onnx_attention(part)
        for arrays, expected in case.data_sets:
            left = iter(arrays)
            given = [tensor(next(left)) if name else None for name in part.input]
            found = [output for output in attend(*given) if output is not None]
            known = [tensor(array) for array in expected]
            if known[0].dtype == torch.bfloat16:
                assert_closer_to_float64(attend, given, found, known)
                continue
            message = partial("{}: {}".format, case.name)
            close(found, known, rtol=case.rtol, atol=case.atol, msg=message)
        names.append(case.name)
    assert [name for name in names if f"`{name.removeprefix('test_attention_')}`" not in page] == []
    assert f"all {len(names)} cases" in page


def draw(random: Random) -> tuple[Any, dict[str, Any]]:
    """Return a random node, and random inputs for it as float64 arrays."""
    numbers = np.random.default_rng(random.randrange(1 << 30))
    b, g, t, s, d, w = (random.randint(1, 4) for _ in range(6))
    h = g * random.choice([1, 2, 3])
    flat, cache = random.random() < 0.3, random.choice(["none", "past", "nonpad"])
    past = random.randint(0, 3) if cache == "past" else 0
    given: dict[str, Any] = {
        "Q": numbers.standard_normal((b, t, h * d) if flat else (b, h, t, d)),
        "K": numbers.standard_normal((b, s, g * d) if flat else (b, g, s, d)),
        "V": numbers.standard_normal((b, s, g * w) if flat else (b, g, s, w)),
    }
    is_causal, rank = random.choice([0, 1]), random.choice([0, 0, 2, 3, 4])
    if rank:
        # With a causal mask, the reference (ONNX 1.23.2) counts the rows of attn_mask, not those of Q.
        rows = t if is_causal else random.choice([1, t])
        shape = [random.choice([1, b]), random.choice([1, h]), rows, past + s][4 - rank :]
        mask = numbers.random(shape) < 0.6
        given["attn_mask"] = mask
        if random.random() < 0.5:
            given["attn_mask"] = np.where(mask, numbers.standard_normal(shape), -np.inf)
    if cache == "past":
        given["past_key"] = numbers.standard_normal((b, g, past, d))
        given["past_value"] = numbers.standard_normal((b, g, past, w))
    if cache == "nonpad":
        given["nonpad_kv_seqlen"] = numbers.integers(0, s + 1, b)
    attributes: dict[str, Any] = {"is_causal": is_causal}
    attributes["qk_matmul_output_mode"] = random.choice([0, 1, 2, 3])
    if flat:
        attributes |= {"q_num_heads": h, "kv_num_heads": g}
    if random.random() < 0.5:
        attributes["scale"] = random.choice([0.25, 1.5])
    # In mode 0 the reference (ONNX 1.23.2) returns scores with softcap, against the text of the standard.
    if random.random() < 0.5 and attributes["qk_matmul_output_mode"]:
        attributes["softcap"] = random.choice([0.5, 2.0])
    if random.random() < 0.4:
        attributes |= {"left_window_size": random.randint(-1, 2), "right_window_size": random.randint(-1, 2)}
    names = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
    outputs = ["Y", "present_key", "present_value", "qk_matmul_output"]
    inputs = [name if name in given else "" for name in names]
    return onnx.helper.make_node("Attention", inputs, outputs, **attributes), given


@pytest.mark.parametrize("seed", range(12))
def test_nodes_compute_what_the_reference_of_the_standard_computes(seed: int) -> None:
    """Random attributes, masks, caches and sizes in float64."""
    from onnx.reference import ReferenceEvaluator

    random = Random(seed)
    for _ in range(10):
        part, given = draw(random)
        kinds = {"attn_mask": onnx.TensorProto.BOOL, "nonpad_kv_seqlen": onnx.TensorProto.INT64}
        infos = [
            onnx.helper.make_tensor_value_info(
                name,
                kinds.get(name, 11) if x.dtype != np.float64 else onnx.TensorProto.DOUBLE,
                x.shape,
            )
            for name, x in given.items()
        ]
        results = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None) for name in part.output
        ]
        graph = onnx.helper.make_graph([part], "one", infos, results)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 25)])
        with np.errstate(invalid="ignore"):
            expected = ReferenceEvaluator(model).run(None, given)
        got = mh.from_onnx_attention(part)(**{name: torch.from_numpy(x) for name, x in given.items()})
        for output, array in zip(got, expected, strict=True):
            assert output is not None
            # The reference rounds √scale twice.
            close(output, torch.from_numpy(np.asarray(array)), rtol=1e-6, atol=1e-6)


def test_scores_without_softcap_and_a_causal_mask_with_one_row_of_a_mask() -> None:
    """The text of the standard where its reference implementation differs from it."""
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    attend = mh.from_onnx_attention(
        node("m", outputs=("Y", "", "", "S"), softcap=0.5, is_causal=1, scale=0.3)
    )
    keep = torch.tensor([True, True, False, True, True])
    out = attend(q, k, v, keep[None])
    close(out.qk_matmul_output, 0.3 * q @ k.mT)
    scores = 0.5 * torch.tanh(0.3 * q @ k.mT / 0.5)
    visible = keep & torch.ones(5, 5).tril().bool()
    close(out.Y, scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v)


def test_the_arguments_give_the_map_of_a_node() -> None:
    """Its weights are those of the node's own fourth output."""
    attend = mh.from_onnx_attention(
        node("attn_mask", outputs=("Y", "", "", "W"), is_causal=1, softcap=2.0, qk_matmul_output_mode=3)
    )
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(5, 5) < 0.5
    out = attend(q, k, v, mask)
    same, amap = mh.attention_with_map(**attend.arguments(q, k, v, mask))
    assert out.present_key is None
    close(out.Y, same)
    assert out.qk_matmul_output is not None
    close(out.qk_matmul_output, amap.dense())
    assert not out.Y[:, :, ~(mask & torch.ones(5, 5).tril().bool()).any(-1)].any()


def test_a_node_has_gradients() -> None:
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    attend = mh.from_onnx_attention(node(is_causal=1, softcap=1.0))
    assert torch.autograd.gradcheck(lambda q: attend(q, q, q).Y, q)


def test_a_softmax_in_float64_is_computed_in_float64() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8) * 8
    exact = mh.attention(q.double(), k.double(), v.double())
    got = mh.from_onnx_attention(node(softmax_precision=11))(q, k, v).Y
    assert got.dtype == torch.float32
    assert torch.equal(got, exact.float())


def test_values_in_another_dtype() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    got = mh.from_onnx_attention(node())(q, k, v.half()).Y
    close(got, mh.attention(q, k, v.half().float()))


def edited(change: Any) -> Any:
    part = node(scale=0.5)
    change(part)
    return part


NODES: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "a dict": (lambda: {"op_type": "Attention"}, TypeError, ["NodeProto", "a dict"]),
    "a model": (lambda: onnx.ModelProto(), TypeError, ["NodeProto", "a ModelProto", "graph.node"]),
    "another operator": (lambda: onnx.helper.make_node("Softmax", ["X"], ["Y"]), ValueError, ["Softmax"]),
    "another domain": (
        lambda: onnx.helper.make_node("Attention", ["X"], ["Y"], domain="com.microsoft"),
        ValueError,
        ["com.microsoft.Attention", "onnxruntime's own operator", "attention_with_map(q, k, v)"],
    ),
    "plain operators": (
        lambda: onnx.helper.make_node("MatMul", ["X", "Y"], ["Z"]),
        ValueError,
        ["opset_version=23"],
    ),
    "unknown attribute": (lambda: node(dropout=0.1), ValueError, ["dropout", "isn't supported"]),
    "a type": (lambda: node(is_causal=1.0), ValueError, ["is_causal", "an int"]),
    "a reference": (
        lambda: edited(lambda part: setattr(part.attribute[0], "ref_attr_name", "s")),
        ValueError,
        ["scale", "Inline"],
    ),
    "causal": (lambda: node(is_causal=2), ValueError, ["is_causal", "0 or 1", "2"]),
    "scale": (lambda: node(scale=-1.0), ValueError, ["scale", "-1.0"]),
    "nan": (lambda: node(scale=float("nan")), ValueError, ["scale", "nan"]),
    "softcap": (lambda: node(softcap=-3.0), ValueError, ["softcap", "-3.0"]),
    "mode": (lambda: node(qk_matmul_output_mode=4), ValueError, ["qk_matmul_output_mode", "4"]),
    "precision": (lambda: node(softmax_precision=7), ValueError, ["softmax_precision", "7"]),
    "window": (lambda: node(left_window_size=-2), ValueError, ["left_window_size", "-2"]),
    "no heads": (lambda: node(q_num_heads=0), ValueError, ["q_num_heads", "at least 1"]),
    "heads": (lambda: node(q_num_heads=4, kv_num_heads=3), ValueError, ["divide", "3", "4"]),
    "inputs": (lambda: onnx.helper.make_node("Attention", ["Q"], ["Y"]), ValueError, ["required", "['Q']"]),
    "one past": (lambda: node("", "past_key"), ValueError, ["both past_key and past_value"]),
    "two caches": (lambda: node("", "k", "v", "n"), ValueError, ["past_key or nonpad_kv_seqlen", "both"]),
}


@pytest.mark.parametrize("name", NODES)
def test_a_node_that_is_not_supported_raises(name: str) -> None:
    make, error, words = NODES[name]
    with raises(error, *words):
        mh.from_onnx_attention(make())


X = torch.randn(2, 4, 5, 8)
CALLS: dict[str, tuple[Any, tuple[Any, ...], type[Exception], list[str]]] = {
    "a missing mask": (node("m"), (X, X, X), ValueError, ["attn_mask", "got None"]),
    "a mask too many": (node(), (X, X, X, X[0, 0] > 0), ValueError, ["no attn_mask"]),
    "an array": (node(), (X.numpy(), X, X), TypeError, ["Q", "from_numpy"]),
    "integers": (node(), (X.long(), X, X), TypeError, ["Q", "int64"]),
    "two dimensions": (node(), (X[0, 0], X[0, 0], X[0, 0]), ValueError, ["Q", "three or four"]),
    "three and four": (node(), (X, X[0], X), ValueError, ["K", "same number of dimensions"]),
    "without heads": (node(), (X[0], X[0], X[0]), ValueError, ["q_num_heads", "got none"]),
    "heads that don't divide": (
        node(q_num_heads=3, kv_num_heads=3), (X[0], X[0], X[0]), ValueError, ["q_num_heads = 3", "divide"],
    ),
    "other heads": (node(q_num_heads=2), (X, X, X), ValueError, ["q_num_heads = 2", "[2, 4, 5, 8]"]),
    "a mask of integers": (node("m"), (X, X, X, torch.ones(5, 5).long()), TypeError, ["attn_mask", "int64"]),
    "a mask of another dtype": (node("m"), (X, X, X, torch.ones(5, 5).double()), TypeError, ["float64"]),
    "a mask of another size": (node("m"), (X, X, X, torch.ones(4, 5) > 0), ValueError, ["[4, 5]"]),
    "a mask of too many keys": (node("m"), (X, X, X, torch.ones(5, 6) > 0), ValueError, ["[5, 6]"]),
    "a mask of one key": (node("m"), (X, X, X, torch.ones(5, 1) > 0), ValueError, ["Expand it"]),
    "NaN": (node("m"), (X, X, X, torch.full((5, 5), torch.nan)), ValueError, ["NaN"]),
    "past keys": (node("", "k", "v"), (X, X, X, None, X[:1], X), ValueError, ["past_key", "[1, 4, 5, 8]"]),
    "past of another dtype": (
        node("", "k", "v"), (X, X, X, None, X.half(), X), ValueError, ["past_key", "float16"],
    ),
    "lengths": (
        node("", "", "", "n"), (X, X, X, None, None, None, torch.tensor([1, 6])), ValueError, ["[1, 6]"],
    ),
    "too few lengths": (
        node("", "", "", "n"), (X, X, X, None, None, None, torch.tensor([1])), ValueError, ["[b] = [2]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_inputs_that_do_not_fit_raise(name: str) -> None:
    part, given, error, words = CALLS[name]
    with raises(error, *words):
        mh.from_onnx_attention(part)(*given)


def test_a_shorter_mask_masks_the_other_keys() -> None:
    mask = torch.rand(5, 3) < 0.7
    got = mh.from_onnx_attention(node("m"))(X, X, X, mask).Y
    close(got, mh.attention(X, X[:, :, :3], X[:, :, :3], mask=mh.Keep(mask)))
