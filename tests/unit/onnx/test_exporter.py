"""Export to ONNX: outputs of onnxruntime for many lengths, which calls are operators, and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import manyheads as mh
from manyheads import lm
from manyheads.kernels import exported
from manyheads.kernels.exported import Target
from manyheads.problem import Problem
from tests.errors import raises

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # of PyTorch's exporter and of onnxscript, about themselves
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """PyTorch's exporter logs that torchvision isn't installed."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def heads(t: int, s: int, dtype: torch.dtype = torch.float32, w: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.randn(shape).to(dtype) for shape in ((2, 4, t, 8), (2, 2, s, 8), (2, 2, s, w))
    )


T, S = Dim("t", min=1, max=4096), Dim("s", min=1, max=4096)
LENGTHS = {"dynamic_shapes": ({2: T}, {2: S}, {2: S})}


class Attend(nn.Module):
    """A call of attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, **self.options)


# The options, and the mask of the operator or a part of the reason why there is none.
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"scale": 0.3}, "none"),
    "softcap": ({"softcap": 2.0}, "none"),
    "causal": ({"mask": mh.Causal()}, "a boolean mask"),
    "empty rows": ({"mask": mh.Causal() & mh.Window(left=2), "offset": -2}, "a boolean mask"),
    "no keys at all": ({"mask": mh.Lengths(torch.tensor([0, 3]))}, "a boolean mask"),
    "a rule": ({"mask": mh.Rule(lambda b, h, i, j: (i + j + h) % 3 == 0)}, "a boolean mask"),
    "each offset": ({"mask": mh.Causal(), "offset": torch.tensor([0, 4])}, "a boolean mask"),
    "alibi": ({"bias": mh.ALiBi(4)}, "an additive mask"),
    "relative": (
        {"bias": mh.Relative(torch.randn(4, 5)), "mask": mh.Causal() | mh.Prefix(2)}, "an additive mask",
    ),
    "a sink": ({"sink": torch.randn(4), "mask": mh.Causal()}, "no sinks"),
    "softcap and a mask": ({"softcap": 2.0, "mask": mh.Causal()}, "softcap and a mask"),
    "a negative scale": ({"scale": -0.3, "mask": mh.Causal()}, "square root of the scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_onnxruntime_computes_the_same_for_all_lengths(name: str) -> None:
    """With more queries than keys, a single query, and queries without visible keys, which get zeros."""
    options, expected = PROBLEMS[name]
    model = Attend(**options).eval()
    report = mh.onnx.export(model, heads(6, 9), **LENGTHS)
    [call] = report.calls
    assert expected in (call.mask if call.operator else call.reasons[0])
    assert ("Attention" in {part.op_type for part in report.program.model.graph}) == call.operator
    for t, s in ((3, 11), (9, 4), (1, 7), (300, 301)):
        given = heads(t, s)
        report.compare(*given)
        empty = (model(*given) == 0).all(-1)
        assert torch.equal((report.program(*given)[0] == 0).all(-1), empty)


@pytest.mark.parametrize("opset", [None, 23])
@pytest.mark.parametrize("name", ["causal", "empty rows", "relative", "softcap and a mask"])
def test_pytorchs_own_export_works_without_ours(name: str, opset: int | None) -> None:
    model = Attend(**PROBLEMS[name][0]).eval()
    version = {} if opset is None else {"opset_version": opset}
    program = torch.onnx.export(model, heads(6, 9), dynamo=True, verbose=False, **LENGTHS, **version)
    for t, s in ((6, 9), (9, 4), (1, 7)):
        given = heads(t, s)
        torch.testing.assert_close(program(*given)[0], model(*given), rtol=1e-4, atol=1e-5)


def test_masked_nan_has_no_effect() -> None:
    model = Attend(mask=mh.Lengths(torch.tensor([4, 4]))).eval()
    report = mh.onnx.export(model, heads(5, 7))
    q, k, v = heads(5, 7)
    expected = model(q, k, v)
    k[:, :, 4:], v[:, :, 4:] = torch.nan, torch.inf
    torch.testing.assert_close(report.program(q, k, v)[0], expected, rtol=1e-4, atol=1e-5)


def test_half_precision_and_values_of_another_width() -> None:
    report = mh.onnx.export(Attend(mask=mh.Causal()).eval(), heads(6, 6, torch.float16, w=3))
    assert [call.mask for call in report.calls] == ["is_causal"]
    report = mh.onnx.export(Attend(mask=mh.Causal()).eval(), heads(6, 6, torch.float64, w=3))
    assert "float64" in report.calls[0].reasons[0]
    assert report.difference is not None
    assert report.difference < 1e-12


@pytest.mark.parametrize("attention", ["operator", "plain"])
def test_the_operator_or_plain_operators_on_request(attention: str) -> None:
    model = Attend(mask=mh.Causal(), softcap=2.0).eval()
    report = mh.onnx.export(model, heads(6, 9), attention=attention, **LENGTHS)
    assert [call.operator for call in report.calls] == [attention == "operator"]
    report.compare(*heads(9, 4))


@pytest.mark.parametrize("opset", [18, 24])
def test_the_first_and_the_last_version_of_the_standard(opset: int) -> None:
    model = Attend(mask=mh.Causal() & mh.Window(left=2), bias=mh.ALiBi(4)).eval()
    report = mh.onnx.export(model, heads(6, 9), opset_version=opset, **LENGTHS)
    assert [call.operator for call in report.calls] == [opset == 24]
    assert report.program.model.opset_imports[""] == opset
    report.compare(*heads(9, 4))


def test_layers_and_their_names(tmp_path: Path) -> None:
    """A model with self-attention and cross-attention, in a file that onnxruntime reads."""
    import onnxruntime

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = mh.MultiHeadAttention(16, 4, kv_heads=2, position=mh.Rotary(4), qk_norm=nn.RMSNorm)
            self.cross = mh.MultiHeadAttention(16, 4, context_dim=8, bias=mh.Relative.learned(4, 3))

        def forward(self, x: Tensor, context: Tensor, n: Tensor) -> Tensor:
            x = x + self.own(x, mask=mh.Causal())
            return self.cross(x, context, mask=mh.Lengths(n))

    model, n = Model().eval(), torch.tensor([5, 0])
    shapes = ({1: Dim("t", max=64)}, {1: Dim("s", max=64)}, None)
    report = mh.onnx.export(
        model,
        (torch.randn(2, 6, 16), torch.randn(2, 5, 8), n),
        tmp_path / "model.onnx",
        dynamic_shapes=shapes,
        input_names=["x", "context", "n"],
    )
    assert [(call.module, call.mask) for call in report.calls] == [
        ("own", "is_causal"),
        ("cross", "an additive mask"),
    ]
    assert str(report).splitlines()[1:3] == [
        "  own: Attention, is_causal",
        "  cross: Attention, an additive mask",
    ]
    given = (torch.randn(2, 11, 16), torch.randn(2, 7, 8), torch.tensor([2, 7]))
    assert report.compare(*given) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    named = dict(zip(("x", "context", "n"), (x.numpy() for x in given), strict=True))
    [out] = session.run(None, named)
    torch.testing.assert_close(torch.from_numpy(out), model(*given), rtol=1e-4, atol=1e-5)


def test_the_language_model() -> None:
    """Its logits for texts of other lengths, and every layer as an operator."""
    model, _ = lm.load()
    shapes = ({0: Dim("b", max=64), 1: Dim("t", max=512)},)
    report = mh.onnx.export(model.eval(), (torch.randint(0, 500, (1, 12)),), dynamic_shapes=shapes)
    assert [str(call) for call in report.calls] == [
        f"blocks.{n}.attention: Attention, is_causal" for n in range(len(model.blocks))
    ]
    for b, t in ((1, 2), (3, 77), (1, 512)):
        report.compare(torch.randint(0, 500, (b, t)))


@pytest.mark.parametrize("kernel", ["native", "chunked", "reference"])
def test_a_program_of_torch_export(kernel: str) -> None:
    """Also a saved one, whose graph has this library's operators."""
    model = Attend(mask=mh.Causal(), bias=mh.ALiBi(4), kernel=kernel).eval()
    t, s = Dim("t", max=4096), Dim("s", max=4096)  # PyTorch can't prove a guard of "reference" from 1 on
    program = torch.export.export(model, heads(6, 9), dynamic_shapes=({2: t}, {2: s}, {2: s}), strict=True)
    report = mh.onnx.export(program)
    assert len(report.calls) == (kernel != "reference")  # whose graph has plain operators already
    report.compare(*heads(9, 4))
    with raises(ValueError, "dynamic_shapes", "torch.export.export"):
        mh.onnx.export(program, dynamic_shapes=({},))


def test_keys_of_earlier_tokens_as_inputs() -> None:
    """A step of generation: a new token, and the keys and values of those before it."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        return mh.attention(q, k, v, mask=mh.Causal()), k, v

    past = Dim("past", max=4096)
    given = (*heads(1, 1), *heads(1, 5)[1:])
    report = mh.onnx.export(step, given, dynamic_shapes=({}, {}, {}, {2: past}, {2: past}))
    assert [call.mask for call in report.calls] == ["none"]  # the last query sees every key
    report.compare(*heads(1, 1), *heads(1, 40)[1:])


def problem(dtype: torch.dtype = torch.float32, **options: Any) -> Problem:
    return Problem.of(*heads(5, 7, dtype), **options)


REASONS: dict[str, tuple[Callable[[], Problem], Target | None, str]] = {
    "opset": (problem, Target(20), "opset 20 has no Attention operator (opset 23 has)"),
    "plain": (problem, Target(23, "plain"), "they were requested"),
    "softcap": (lambda: problem(softcap=1.0), None, "PyTorch's exporter has no softcap"),
    "bias": (lambda: problem(torch.float16, bias=mh.ALiBi(4)), Target(23), "round the bias to torch.float16"),
    "empty": (lambda: Problem.of(*heads(5, 0)), Target(23), "a size is 0 (s)"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons_for_plain_operators(name: str) -> None:
    make, target, expected = REASONS[name]
    [reason] = exported.why_plain(make(), target)
    assert expected in reason


def test_a_bias_in_the_dtype_of_the_queries_is_an_operator() -> None:
    bias = mh.Dense(torch.zeros(5, 7, dtype=torch.float16))
    assert exported.why_plain(problem(torch.float16, bias=bias), Target(23)) == []
    assert exported.why_plain(problem(softcap=1.0, mask=mh.Causal()), Target(23, "operator")) == []


def test_other_threads_compute_while_a_model_is_exported() -> None:
    """A tensor with numbers isn't part of the graph."""
    with exported.exporting(Target(23)):
        assert not exported.is_active(problem())
        assert mh.attention(*heads(5, 7)).abs().sum() > 0


X = torch.randn(1, 2, 3, 4)
ERRORS: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "training": (nn.Linear(2, 2), {}, ValueError, ["training mode", "model.eval()"]),
    "no model": (3, {}, TypeError, ["a module, a function", "an int"]),
    "a class": (nn.Linear, {}, TypeError, ["a module"]),
    "attention": (mh.attention, {"attention": "fast"}, ValueError, ["auto, operator, plain", "'fast'"]),
    "opset": (mh.attention, {"opset_version": 17}, ValueError, ["opset_version", "at least 18", "17"]),
    "next opset": (mh.attention, {"opset_version": 25}, ValueError, ["opset_version", "at most 24", "25"]),
    "a tensor": (mh.attention, {"args": X}, TypeError, ["(x,)", "float32"]),
    "a cache": (
        mh.attention,
        {"kwargs": {"c": mh.Cache()}},
        TypeError,
        ["a Cache", "torch.cat((past_k, k)"],
    ),
    "no arguments": (mh.attention, {"args": ()}, TypeError, ["example arguments", "got 0 args", "'q'"]),
    "a list of kwargs": (mh.attention, {"kwargs": [X]}, TypeError, ["by name", "a list"]),
    "a number as path": (mh.attention, {"path": 3}, TypeError, ["the file to write", "3"]),
    "a name as dynamic_shapes": (mh.attention, {"dynamic_shapes": "t"}, TypeError, ["a tuple", "a str"]),
    "an unknown name": (mh.attention, {"dynamic_shapes": {"x": {2: T}}}, ValueError, ["q, k, v", "'x'"]),
    "a missing part": (mh.attention, {"dynamic_shapes": {"q": {2: T}}}, ValueError, ["none for k, v", "{}"]),
    "too many parts": (mh.attention, {"dynamic_shapes": ({},) * 4}, ValueError, ["3 arguments", "got 4"]),
    "an axis too far": (mh.attention, {"dynamic_shapes": ({4: T}, {}, {})}, ValueError, ["0 to 3", "got 4"]),
    "a negative axis": (mh.attention, {"dynamic_shapes": ({}, {-2: T}, {})}, ValueError, ["of k", "got -2"]),
    "a size without axis": (mh.attention, {"dynamic_shapes": (T, {}, {})}, TypeError, ["dict by axis"]),
    "too few axes": (mh.attention, {"dynamic_shapes": ((T,), {}, {})}, ValueError, ["4 axes of q", "got 1"]),
    "a wrong size": (mh.attention, {"dynamic_shapes": ({2: 0.5}, {}, {})}, TypeError, ["axis 2 of q", "0.5"]),
    "another constant": (mh.attention, {"dynamic_shapes": ({2: 9}, {}, {})}, ValueError, ["got 9"]),
    "the older exporter": (mh.attention, {"dynamo": False}, ValueError, ["dynamo=True"]),
}


def test_what_a_graph_cannot_have_raises(tmp_path: Path) -> None:
    def entropy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention_with_map(q, k, v)[1].entropy()  # in blocks, whose number depends on the length

    with raises(ValueError, "Expected 3 sizes of the inputs to be dynamic, got 0"):
        mh.onnx.export(entropy, heads(6, 9), **LENGTHS)
    with raises(ValueError, "PyTorch's exporter supports, got its error: Could not guard"):
        mh.onnx.export(lambda x: x[: int(x.sum())], (torch.ones(3),))  # a size that depends on numbers
    with raises(ValueError, "onnxruntime", "check=False"):
        mh.onnx.export(mh.attention, heads(5, 5, torch.bfloat16))
    with raises(ValueError, "existing folder", "model.onnx"):
        mh.onnx.export(mh.attention, (X, X, X), tmp_path / "none" / "model.onnx")
    with pytest.raises(ValueError, match="dynamo=True"):
        torch.onnx.export(Attend(mask=mh.Causal()).eval(), heads(5, 5), tmp_path / "old.onnx", dynamo=False)


def test_weights_are_exported() -> None:
    """The map's, and its log-sum-exp, of other lengths."""

    def weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal(), softcap=2.0)
        return out, amap.dense(), amap.lse

    mh.onnx.export(weights, heads(6, 9), **LENGTHS).compare(*heads(3, 12))


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_raise(name: str) -> None:
    model, options, error, words = ERRORS[name]
    with raises(error, *words):
        mh.onnx.export(model, **{"args": (X, X, X), **options})


def test_errors_of_attention_are_raised_as_they_are() -> None:
    with raises(ValueError, "dropout_p=0.3", "model.eval()"):
        mh.onnx.export(lambda q: mh.attention(q, q, q, dropout_p=0.3), (X,))
    with raises(ValueError, "no sinks", 'attention="auto"'):
        mh.onnx.export(lambda q: mh.attention(q, q, q, sink=torch.ones(2)), (X,), attention="operator")
    with raises(ValueError, "four dimensions", "[2, 3, 4]"):
        mh.onnx.export(lambda q: mh.attention(q, q[0], q), (X,))


def test_a_wrong_output_raises() -> None:
    def wrong(*_: Tensor) -> list[Tensor]:
        return [torch.zeros(1, 2, 3, 4)]

    report = mh.onnx.Report(wrong, [], 23, None, lambda x: x)
    with raises(ValueError, "within 0.0001", "difference of 1"):
        report.compare(X)
    assert mh.onnx.Report(lambda x: [x], [], 23, None, lambda x: x).compare(X) == 0
    with raises(ValueError, "[1, 2, 3]", "[1, 2, 3, 4]"):
        mh.onnx.Report(wrong, [], 23, None, lambda x: x[..., 0]).compare(X)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.onnx.exporter.find_spec", lambda name: None)
    with raises(ImportError, "manyheads.onnx.export needs onnx", "[onnx]"):
        mh.onnx.export(mh.attention, (X, X, X))
