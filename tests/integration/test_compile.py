"""torch.compile: the whole graph, forward and backward, dynamic lengths, masks made inside and outside.

The backend is "aot_eager" (tracing, autograd and fake tensors as in production, without a C++ compiler).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import manyheads as mh
from manyheads import lm
from manyheads.kernels import operator
from manyheads.masks import Not  # what ~ makes: Dynamo can't trace ~ on a class of ours
from manyheads.problem import Problem
from tests.cases import KERNELS

T, S = 6, 9
close = torch.testing.assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget the graphs of earlier tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def heads(t: int = T, s: int = S, b: int = 2) -> list[Tensor]:
    shapes = ((b, 4, t, 8), (b, 2, s, 8), (b, 2, s, 8))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def compiled(function: Any, dynamic: bool | None = None) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def assert_same(out: Tensor, expected: Tensor, leaves: Any, others: Any = None) -> None:
    """Assert equal values and equal gradients, those of `expected` with respect to `others` if given."""
    close(out, expected)
    upstream = torch.randn_like(expected)
    slopes = torch.autograd.grad(expected, leaves if others is None else others, upstream)
    close(torch.autograd.grad(out, leaves, upstream), slopes)


def same(function: Any, quick: Any, leaves: list[Tensor]) -> None:
    """Output and gradients, compiled and not."""
    assert_same(quick(*leaves), function(*leaves), leaves)


def same_output(function: Any, quick: Any, leaves: list[Tensor]) -> None:
    close(quick(*leaves), function(*leaves))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "lengths": torch.tensor([4, 7]),
        "ids": torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]).expand(2, S).contiguous(),
        "keep": torch.rand(T, S) < 0.7,
        "values": torch.randn(4, T, S, dtype=torch.float64),
        "table": torch.randn(4, 5, dtype=torch.float64, requires_grad=True),
        "slopes": torch.rand(4, dtype=torch.float64, requires_grad=True),
    }


MASKS: dict[str, Any] = {
    "causal": lambda x: {"mask": mh.Causal()},
    "causal top left": lambda x: {"mask": mh.Causal(), "offset": 0},
    "window": lambda x: {"mask": mh.Causal() & mh.Window(left=3)},
    "lengths": lambda x: {"mask": mh.Lengths(x["lengths"])},
    "left lengths": lambda x: {"mask": mh.Lengths(x["lengths"], left=True) | mh.Prefix(1)},
    "documents": lambda x: {"mask": mh.Documents(x["ids"]) & mh.Causal()},
    "tokens": lambda x: {"mask": mh.AfterSameToken(x["ids"]) | Not(mh.SameToken(x["ids"]))},
    "keep": lambda x: {"mask": mh.Keep(x["keep"])},
    "drop": lambda x: {"mask": mh.Drop(x["keep"]) | mh.Keys([0, 3])},
    "dense": lambda x: {"bias": mh.Dense(x["values"])},
    "each offset": lambda x: {"mask": mh.Causal(), "offset": x["lengths"]},
}


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_made_inside(mask: str, kernel: str, tensors: dict[str, Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, **MASKS[mask](tensors), kernel=kernel)

    quick, _ = compiled(run)
    same(run, quick, heads())


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", ["chunked", "native", "auto"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_made_outside(mask: str, kernel: str, tensors: dict[str, Tensor]) -> None:
    """And made anew for every call: the structure is compiled, not the object."""

    def run(q: Tensor, k: Tensor, v: Tensor, rest: dict[str, Any]) -> Tensor:
        return mh.attention(q, k, v, **rest, kernel=kernel)

    quick, counter = compiled(run)
    for _ in range(3):
        for x in tensors.values():  # other numbers each time: none may be baked in
            with torch.no_grad():
                x.copy_(x.flip(0))
        rest = MASKS[mask]({n: x.detach().clone() for n, x in tensors.items()})
        same(partial(run, rest=rest), partial(quick, rest=rest), heads())
    assert counter.frame_count == 1


@pytest.mark.sampled(kernel="auto")
@pytest.mark.parametrize("kernel", ["reference", "chunked", "native", "auto"])
def test_gradients_of_biases_and_sinks(kernel: str, tensors: dict[str, Tensor]) -> None:
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for make in (mh.Relative, mh.ALiBi, mh.Dense):
        leaf = {mh.Relative: tensors["table"], mh.ALiBi: tensors["slopes"], mh.Dense: tensors["values"]}[make]
        leaf.requires_grad_()

        def run(q: Tensor, k: Tensor, v: Tensor, leaf: Tensor, sink: Tensor, make: Any = make) -> Tensor:
            return mh.attention(
                q, k, v, bias=make(leaf), sink=sink, softcap=2.0, mask=mh.Causal(), kernel=kernel
            )

        quick, _ = compiled(run)
        same(run, quick, [*heads(), leaf, sink])


@pytest.mark.sampled(kernel="auto")
@pytest.mark.parametrize("kernel", ["reference", "chunked", "native", "auto"])
def test_a_bias_made_outside_gets_its_gradient(kernel: str) -> None:
    bias = mh.Relative.learned(4, 2)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q.float(), k.float(), v.float(), bias=bias, kernel=kernel)

    quick, _ = compiled(run)
    leaves = heads()
    run(*leaves).square().sum().backward()
    expected, bias.table.grad = bias.table.grad, None
    quick(*leaves).square().sum().backward()
    close(bias.table.grad, expected)


@pytest.mark.sampled(kernel="auto", dynamic=None)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_at_most_two_graphs_for_twenty_lengths(kernel: str, dynamic: bool | None) -> None:
    """One for the first length, one for all others; or each size, also the batch, a symbol from the start."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, mask=mh.Causal() & mh.Window(left=5), kernel=kernel)

    quick, counter = compiled(run, dynamic)
    for n in range(6 if dynamic else 20):
        check = same if n % 7 == 3 else same_output
        # No two sizes of a call are equal: Dynamo would take them for the same symbol.
        check(run, quick, heads(t=11 + n, s=17 + 2 * n, b=(3, 5, 6)[n % 3] if dynamic else 2))
    assert counter.frame_count <= 2


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
def test_at_most_two_graphs_for_twenty_lengths_of_ids_and_padding(kernel: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = mh.Documents(ids) & mh.Lengths(lengths) & mh.Causal()
        return mh.attention(q, k, v, mask=mask, kernel=kernel)

    quick, counter = compiled(run)
    for n in range(20):
        more = {"ids": torch.arange(6 + n)[None].expand(2, -1) // 4, "lengths": torch.tensor([3 + n, 2])}
        check = same if n % 7 == 0 else same_output
        check(partial(run, **more), partial(quick, **more), heads(t=6 + n, s=6 + n))
    assert counter.frame_count <= 2


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["reference", "chunked", "native", "auto"])
def test_a_mask_may_be_as_wide_as_a_length(kernel: str) -> None:
    """Numbers inside masks that come from a size; each makes a graph, and the right one."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        mask = mh.Window(left=n // 2) & (mh.Causal() | mh.Prefix(n // 3))
        return mh.attention(q, k, v, mask=mask, kernel=kernel)

    quick, _ = compiled(run)
    for n in (4, 5, 9, 12):
        same_output(run, quick, heads(t=n, s=n))


def test_chunked_is_one_opaque_operator() -> None:
    """Its loop isn't unrolled: the graph of 3,000 tokens is no longer than that of 30."""
    sizes = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        sizes.append((len(nodes), sum("manyheads" in str(n.target) for n in nodes)))
        return graph.forward

    attend = partial(mh.attention, mask=mh.Causal(), kernel="chunked")
    for n in (30, 3000):
        torch._dynamo.reset()
        x = torch.randn(1, 1, n, 8)
        torch.compile(lambda x: attend(x, x, x), backend=count, fullgraph=True, dynamic=False)(x)
    assert sizes[0] == sizes[1]
    assert sizes[0][1] == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("kernel", ["reference", "chunked", "auto"])
def test_dropout_is_drawn_anew_in_a_compiled_function(kernel: str) -> None:
    q = torch.zeros(1, 1, 30, 4)
    v = torch.eye(30)[None, None]
    quick, _ = compiled(lambda q, v: mh.attention(q, q, v, dropout_p=0.5, kernel=kernel))
    one, two = quick(q, v), quick(q, v)
    assert not torch.equal(one, two)
    drawn = one * 30
    close(drawn[drawn > 0], torch.full_like(drawn[drawn > 0], 2.0))
    assert abs((drawn > 0).double().mean() - 0.5) < 5 * 0.5 / 30


@pytest.mark.every(3)
@pytest.mark.parametrize("kernel", ["reference", "chunked", "auto"])
def test_dropouts_gradient_in_a_compiled_function(kernel: str) -> None:
    """The backward of the compiled graph uses the mask that its forward drew."""
    q, k, _ = heads(b=1)
    v = torch.eye(S, dtype=torch.float64).expand(1, 2, S, S).clone().requires_grad_()
    quick, _ = compiled(lambda q, k, v: mh.attention(q, k, v, dropout_p=0.5, kernel=kernel))
    out = quick(q, k, v)
    weights = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)).softmax(-1)
    drop = (out.detach() / weights.detach() > 1).double() * 2
    assert_same(out, weights * drop @ v.repeat_interleave(2, 1), (q, k, v))


@pytest.mark.every(2)
@pytest.mark.parametrize("kernel", ["reference", "chunked", "native", "auto"])
def test_fully_masked_rows_of_a_compiled_function(kernel: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, mask=mh.Causal(), offset=-3, kernel=kernel)

    quick, _ = compiled(run)
    leaves = heads()
    same(run, quick, leaves)
    assert not quick(*leaves)[:, :, :3].any()


@pytest.mark.every(2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_keys_do_not_leak_into_a_compiled_function(kernel: str) -> None:
    """Padding of NaN, forward and backward, in a graph that looks at no data."""
    q, k, v = heads()
    with torch.no_grad():
        k[:, :, 6:] = math.nan
        v[:, :, 6:] = math.nan
    zeroed = (torch.cat((x[:, :, :6], torch.zeros_like(x[:, :, 6:])), 2) for x in (k, v))
    clean = [q, *(x.detach().requires_grad_() for x in zeroed)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, mask=mh.Lengths(6), kernel=kernel)

    quick, _ = compiled(run)
    assert_same(quick(q, k, v), run(*clean), (q, k, v), clean)


def test_errors_of_a_compiled_function_are_the_same_sentence() -> None:
    quick = torch.compile(lambda q, k, v: mh.attention(q, k, v, mask=mh.Causal()), backend="aot_eager")
    q, k, v = heads()
    with pytest.raises(Exception, match="to divide the query heads h"):
        quick(q[:, :3].detach(), k, v)


# -- maps --------------------------------------------------------------------------------------------


@pytest.mark.sampled(kernel="auto")
@pytest.mark.parametrize("kernel", ["reference", "chunked", "native", "auto"])
def test_maps_of_a_compiled_function(kernel: str) -> None:
    """Statistics inside the graph, and the map itself brought out of it."""

    def inside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal(), kernel=kernel)
        return out, amap.lse

    def outside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, mh.AttentionMap]:
        return mh.attention_with_map(q, k, v, mask=mh.Causal(), kernel=kernel)

    q, k, v = heads()
    expected, amap = mh.attention_with_map(q, k, v, mask=mh.Causal(), kernel=kernel)
    out, lse = compiled(inside)[0](q, k, v)
    close(out, expected)
    close(lse, amap.lse)
    torch._dynamo.reset()
    _, brought = compiled(outside)[0](q, k, v)
    close(brought.dense(), amap.dense())
    close(brought.mass(mh.Diagonal(0)), amap.mass(mh.Diagonal(0)))


# -- layers ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"kv_heads": 2, "position": mh.Rotary(4), "qk_norm": torch.nn.RMSNorm},
        {"bias": mh.ALiBi(4)},
        {"bias": mh.Relative.learned(4, 3), "position": mh.Rotary(4, layout="interleaved")},
        {"projection_bias": False, "kernel": "reference"},
    ],
    ids=["bare", "rotary", "alibi", "relative", "no bias"],
)
def test_a_layer(parts: dict[str, Any]) -> None:
    """Twenty lengths in at most two graphs, every parameter's gradient."""
    m = mh.MultiHeadAttention(16, 4, **parts).double()
    quick, counter = compiled(lambda x: m(x, mask=mh.Causal()))
    for n in range(20):
        x = torch.randn(2, 4 + n, 16, dtype=torch.float64)
        expected, out = m(x, mask=mh.Causal()), quick(x)
        close(out, expected)
        if n % 7 == 0:
            assert_same(out, expected, list(m.parameters()))
    assert counter.frame_count <= 2


def test_a_layer_compiled_in_place_with_a_context() -> None:
    m = mh.MultiHeadAttention(16, 4, context_dim=8).double()
    x, context = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    expected = m(x, context, mask=mh.Lengths(torch.tensor([3, 7])))
    m.compile(backend="aot_eager", fullgraph=True)
    close(m(x, context, mask=mh.Lengths(torch.tensor([3, 7]))), expected)


@pytest.mark.full
def test_a_compiled_layer_under_autocast() -> None:
    m = mh.MultiHeadAttention(16, 4, position=mh.Rotary(4))
    x = torch.randn(2, 5, 16)
    quick, _ = compiled(lambda x: m(x, mask=mh.Causal()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, out = m(x, mask=mh.Causal()), quick(x)
    assert out.dtype == torch.bfloat16
    close(out, expected)


@pytest.mark.full
def test_decoding_with_a_compiled_layer() -> None:
    """A cache goes into the compiled layer; forty steps make no forty graphs."""
    m = mh.MultiHeadAttention(16, 4, position=mh.Rotary(4)).double().eval()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    quick = torch.compile(m, backend=counter)
    cache = mh.Cache(40)
    with torch.no_grad():
        expected = m(x, mask=mh.Causal())
        steps = torch.cat([quick(x[:, n : n + 1], cache=cache) for n in range(40)], 1)
    close(steps, expected)
    assert counter.frame_count <= 10


@pytest.mark.full
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_with_inductor() -> None:
    """Once with the compiler that people use, forward and backward of a layer that trains on chunked."""
    m = mh.MultiHeadAttention(16, 4, bias=mh.Relative.learned(4, 2)).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    quick = torch.compile(m, fullgraph=True)
    assert_same(quick(x, mask=mh.Causal()), m(x, mask=mh.Causal()), list(m.parameters()))


@pytest.mark.full
def test_export() -> None:
    """torch.export of a layer, with a dynamic length."""
    m = mh.MultiHeadAttention(16, 4, position=mh.Rotary(4)).double().eval()

    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = m

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, mask=mh.Causal())

    example = torch.randn(1, 6, 16, dtype=torch.float64)
    exported = torch.export.export(
        Causal(), (example,), dynamic_shapes={"x": {1: torch.export.Dim("t", min=2, max=64)}}, strict=True
    )
    for n in (6, 13):
        x = torch.randn(1, n, 16, dtype=torch.float64)
        close(exported.module()(x), m(x, mask=mh.Causal()))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of PyTorch 2.11
def test_export_of_the_native_operator(tmp_path: Path) -> None:
    """Masks and biases pass as text and tensors: the graph can be saved."""

    class Padded(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
            return mh.attention(q, k, v, mask=mh.Causal() & mh.Lengths(n), bias=mh.ALiBi(4), kernel="native")

    n = torch.tensor([5, 7])
    example = (*torch.randn(3, 2, 4, 7, 16), n)
    length = torch.export.Dim("t", min=2, max=64)
    exported = torch.export.export(Padded(), example, dynamic_shapes=(*({2: length},) * 3, None))
    assert "manyheads.native" in str(exported.graph)
    torch.export.save(exported, tmp_path / "padded.pt2")
    loaded = torch.export.load(tmp_path / "padded.pt2").module()
    for t in (7, 33):
        given = (*torch.randn(3, 2, 4, t, 16), n)
        close(loaded(*given), Padded()(*given))


class Attend(torch.nn.Module):
    """A call of attention with fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, **self.options)


def saved(module: torch.nn.Module, given: tuple[Tensor, ...], path: Path, **options: Any) -> Any:
    """Return a module that was exported, saved and loaded."""
    torch.export.save(torch.export.export(module, given, **options), path)
    return torch.export.load(path).module()


EXPORTED: dict[str, Any] = {
    "causal": lambda x: {"mask": mh.Causal()},
    "window and sdpa": lambda x: {"mask": mh.Causal() & mh.Window(left=3), "kernel": "sdpa"},
    "causal and sdpa": lambda x: {"mask": mh.Causal(), "kernel": "sdpa"},
    "left lengths": lambda x: {"mask": mh.Lengths(x["lengths"], left=True) | mh.Prefix(1)},
    "rule": lambda x: {"mask": mh.Causal() & mh.Rule(lambda b, h, i, j: (i + j) % 3 > 0)},
    "relative": lambda x: {"bias": mh.Relative(x["table"]), "kernel": "chunked"},
    "each offset": lambda x: {"mask": mh.Causal(), "offset": x["lengths"], "softcap": 2.0},
}


@pytest.mark.every(3, "full")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of PyTorch 2.11
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_attention_is_exported_saved_and_loaded(
    name: str, strict: bool, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    """For all lengths: more queries than keys, as many, and a single query."""
    module = Attend(**EXPORTED[name]({n: x.detach() for n, x in tensors.items()}))
    t, s = (torch.export.Dim(letter, min=1, max=512) for letter in "ts")
    shapes = ({2: t}, {2: s}, {2: s})
    with torch.no_grad():
        loaded = saved(module, tuple(heads()), tmp_path / "a.pt2", dynamic_shapes=shapes, strict=strict)
        for t, s in ((6, 9), (9, 4), (8, 8), (1, 7), (70, 90)):
            given = heads(t, s)
            close(loaded(*given), module(*given))


def test_a_rule_is_exported_as_operators() -> None:
    """Another process doesn't know a function by its number, or knows another one by it."""
    module = Attend(mask=mh.Rule(lambda b, h, i, j: j <= i))
    assert "manyheads" not in str(torch.export.export(module, tuple(heads())).graph)
    with pytest.raises(ValueError, match="the function of Rule as a number"):
        torch.export.export(Attend(mask=~module.options["mask"], kernel="native"), tuple(heads()))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of PyTorch 2.11
@pytest.mark.parametrize("strict", [False, True])
def test_layers_and_the_language_model_are_exported_saved_and_loaded(strict: bool, tmp_path: Path) -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = mh.MultiHeadAttention(
                16, 4, kv_heads=2, position=mh.Rotary(4), qk_norm=torch.nn.RMSNorm, bias=mh.ALiBi(4)
            )
            self.cross = mh.CrossAttention(16, 8)

        def forward(self, x: Tensor, context: Tensor, n: Tensor) -> Tensor:
            return self.cross(self.own(x, mask=mh.Causal()), context, mask=mh.Lengths(n))

    b, t, s = (torch.export.Dim(letter, min=2, max=512) for letter in "bts")
    layers, n = Layers().eval(), torch.tensor([3, 0])
    with torch.no_grad():
        given = (torch.randn(2, 6, 16), torch.randn(2, 9, 8), n)
        shapes = ({0: b, 1: t}, {0: b, 1: s}, {0: b})
        loaded = saved(layers, given, tmp_path / "a.pt2", dynamic_shapes=shapes, strict=strict)
        for rows, columns in ((13, 4), (2, 30)):
            given = (torch.randn(3, rows, 16), torch.randn(3, columns, 8), torch.tensor([4, 0, 1]))
            close(loaded(*given), layers(*given))
        model, _ = lm.load()
        shapes = ({0: b, 1: t},)
        ids = torch.randint(0, 500, (3, 12))
        loaded = saved(model.eval(), (ids,), tmp_path / "b.pt2", dynamic_shapes=shapes, strict=strict)
        for size in ((2, 3), (4, 512)):
            ids = torch.randint(0, 500, size)
            close(loaded(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("bias", [None, "Relative"], ids=str)
def test_the_operator_passes_pytorchs_own_checks(bias: str | None) -> None:
    """Schema, shapes and strides under tracing, gradients.

    The inputs are transposed, as a layer's projections leave them.
    """
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in heads()
    )  # fmt: skip
    table = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    problem = Problem.of(q, k, v, mask=mh.Causal(), bias=None if bias is None else mh.Relative(table))
    given = operator.arguments(problem)
    forward, backward = torch.ops.manyheads.chunked, torch.ops.manyheads.chunked_backward
    out, lse = (x.detach() for x in forward(*given))
    torch.library.opcheck(forward.default, given)
    d_out, d_lse, needs = torch.randn_like(out), torch.randn_like(lse), [True, True, True, False, bool(bias)]
    torch.library.opcheck(
        backward.default,
        (out, lse, d_out, d_lse, needs, *given),
        test_utils=("test_schema", "test_faketensor"),
    )
