"""The flex kernel: what it refuses, and what PyTorch computes from its arguments.

FlexAttention is fused on CUDA only. On other machines `flex._attend`, the function that is compiled for CUDA,
is traced by the same compiler and computed by PyTorch's unfused steps, forward and backward: so masks, biases
and gradients are tested on any machine. Tests that need a GPU are at the end.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import manyheads as mh
from manyheads import kernels
from manyheads.kernels import flex, native, reference
from manyheads.problem import Problem
from tests.cases import BIASES, CASES, MASKS, Case, Inputs, gradients, make, over
from tests.unit.kernels.test_kernels import answer_for, check

HALF = (torch.float16, torch.bfloat16)

# Dynamo raises these warnings while it traces; it hides the last of them, but not where warnings are errors.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore:.*_maybe_guard_rel.*",
        "ignore:The .grad attribute of a Tensor that is not a leaf",
    ),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget the graphs of earlier tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def heads(
    t: int = 6, s: int = 9, d: int = 16, dtype: torch.dtype = torch.float32, b: int = 2
) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in ((b, 4, t, d), (b, 2, s, d), (b, 2, s, d))]


# -- what it refuses ---------------------------------------------------------------------------------


def test_it_refuses_the_cpu_with_every_reason() -> None:
    q, k, v = heads(d=8)
    rest = {"mask": mh.Window(left=1 << 40), "dropout_p": 0.5, "offset": -(1 << 31)}
    reasons = flex.why_unsupported(Problem.of(q, k, v[..., :3], **rest))
    for word in ("CUDA, and q is on cpu", "torch.float32", "dropout", "head size 8", "width of values 3",
                 "Window(left=1099511627776, right=None)", "-2147483648"):  # fmt: skip
        assert sum(word in reason for reason in reasons) == 1, word
    assert len(reasons) == 7
    with pytest.raises(ValueError, match='kernel="flex" doesn\'t support this') as caught:
        mh.attention(q, k, v[..., :3], **rest, kernel="flex")
    assert all(reason in str(caught.value) for reason in reasons)


def test_it_refuses_forward_mode() -> None:
    reasons: list[str] = []

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reasons.extend(flex.why_unsupported(Problem.of(q, k, v)))
        return q

    torch.func.jvp(ask, tuple(heads()), tuple(heads()))
    assert any("forward-mode" in reason for reason in reasons)


def test_it_refuses_what_it_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "FAR", 1 << 5)
    q, k, v = heads()
    cells = torch.zeros(8, 8, dtype=torch.bool)
    for far in (mh.Causal() & ~mh.Keep(cells), mh.Dense(torch.zeros(64)), mh.Diagonal(-32), mh.Prefix(32)):
        assert flex._is_far(far)
    for near in (mh.Keep(cells[1:]), mh.Lengths(torch.tensor([99])), mh.Keys([99]), mh.Window(left=31)):
        assert not flex._is_far(near)
    assert any("Window(left=None, right=40) needs more" in reason
               for reason in flex.why_unsupported(Problem.of(q, k, v, mask=mh.Window(right=40))))  # fmt: skip


def test_it_refuses_a_machine_without_cuda_triton_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(flex, "TRITON", True)
    for capability, refused in (((7, 5), True), ((8, 0), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, which=capability: which)
        assert bool(flex._why_machine_unsupported(cuda)) == refused
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert flex._why_machine_unsupported(cuda) == [
        "it needs a GPU of compute capability 8.0, and cuda:0 has 7.5"
    ]
    monkeypatch.setattr(flex, "TRITON", False)
    assert flex._why_machine_unsupported(cuda) == ["it needs Triton, which isn't installed"]
    assert "q is on meta" in flex._why_machine_unsupported(torch.device("meta"))[0]


def test_auto_prefers_sdpa_to_flex_and_flex_to_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_why_machine_unsupported", lambda device: [])
    monkeypatch.setattr(native.library, "load_error", "it isn't for the CPU")
    for dtype in HALF:
        q, k, v = heads(dtype=dtype)
        assert flex.why_unsupported(Problem.of(q, k, v)) == []
        assert kernels.choose(Problem.of(q, k, v, mask=mh.Causal())).NAME == "sdpa"
        for rest in ({"softcap": 30.0}, {"sink": torch.zeros(4), "mask": mh.Causal() & mh.Window(left=3)}):
            assert kernels.choose(Problem.of(q, k, v, **rest)) is flex
    assert kernels.choose(Problem.of(*heads(), softcap=30.0)).NAME == "chunked"


def test_the_table_says_what_leaks_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked about tensors on a GPU that isn't there: shapes, dtypes and devices without numbers."""
    monkeypatch.setattr(flex, "_why_machine_unsupported", lambda device: [])
    with FakeTensorMode():
        q = torch.empty(2, 4, 6, 16, dtype=torch.bfloat16, device="cuda")
        lines = kernels.table(Problem.of(q, q, q, softcap=2.0)).splitlines()
    assert [line.split()[0] for line in lines[1:] if line[2] != " "] == list(kernels.ORDER)
    (line,) = (line for line in lines if line.startswith("  flex"))
    for words in ("yes: a map costs one more pass", "unless the key is masked for all queries", "← auto"):
        assert words in line


# -- rules -------------------------------------------------------------------------------------------

TABLE = torch.rand(2, 4, 6, 9) > 0.5

VALID_RULES: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda b, h, i, j: (i + j + h) % 3 != b,
    "look-up": lambda b, h, i, j: TABLE[b, h, i - 3, j],
    "flat look-up": lambda b, h, i, j: TABLE.view(-1)[(i - 3) * 9 + j],
    "one entry": lambda b, h, i, j: TABLE[0, 0, 0, 0],
    "where": lambda b, h, i, j: torch.where(i > 3, j > 2, j <= i),
    "floats": lambda b, h, i, j: (i.to(torch.float64) / 3).floor() > j,
    "made": lambda b, h, i, j: torch.zeros_like(i) + torch.full((), 3) > j,
    "a bool": lambda b, h, i, j: True,
}
INVALID_RULES: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (lambda b, h, i, j: j > 2 if i > 3 else j > 3, "data-dependent control flow"),
    "item": (lambda b, h, i, j: j > i.max().item(), r"\.item\(\)"),
    "length": (lambda b, h, i, j: j < len(i), "0-d tensor"),
    "dimensions": (lambda b, h, i, j: j[0, 0] >= 0, "too many indices"),
    "answer of another shape": (lambda b, h, i, j: TABLE[0, 0], r"returns \[6, 9\]"),
    "answer of another kind": (lambda b, h, i, j: j, "boolean tensor"),
    "sum": (lambda b, h, i, j: TABLE[b, h, i].sum(-1) > j, "calls sum"),
    "isin": (lambda b, h, i, j: torch.isin(j, torch.tensor([0, 3])), "calls isin"),
    "own error": (lambda b, h, i, j: {}[0], r"\(0\)"),
}


@pytest.mark.parametrize("name", VALID_RULES)
def test_rules_that_can_be_evaluated_for_one_pair(name: str) -> None:
    assert flex._why_rule_unsupported(mh.Rule(VALID_RULES[name]), torch.device("cpu")) == []


@pytest.mark.parametrize("name", INVALID_RULES)
def test_rules_that_cannot_are_refused_by_name(name: str) -> None:
    function, why = INVALID_RULES[name]
    (reason,) = flex._why_rule_unsupported(mh.Rule(function), torch.device("cpu"))
    assert reason.startswith("Rule(<lambda>) can't be evaluated for one pair (")
    assert re.search(why, reason), reason
    assert "\n" not in reason


def test_a_rule_within_a_mask_is_found_and_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_why_machine_unsupported", lambda device: [])
    q, k, v = heads(dtype=torch.bfloat16)
    calls = []
    rule = mh.Rule(lambda b, h, i, j: calls.append(1) or j <= i)
    for _ in range(3):
        assert flex.why_unsupported(Problem.of(q, k, v, mask=mh.Causal() & ~(mh.Full() | rule))) == []
    assert len(calls) == 1
    both = mh.Rule(INVALID_RULES["sum"][0]) | mh.Rule(INVALID_RULES["isin"][0])
    assert len(flex.why_unsupported(Problem.of(q, k, v, mask=mh.Causal() & ~(both | rule)))) == 2


# -- lists of keys, which become comparisons ---------------------------------------------------------


def test_keys_are_compared_run_by_run() -> None:
    assert flex._runs(mh.Keys([])) == []
    assert flex._runs(mh.Keys([7, 0, 1, 2, 4])) == [(0, 3), (4, 5), (7, 8)]
    for keys in ([], [0], [3, 4, 5], [0, 2, 8, 9, 1 << 40], range(0, 99, 2)):
        for mask in (mh.Keys(keys), mh.Causal() | ~mh.Keys(keys) & mh.Full()):
            assert torch.equal(flex._without_lists(mask, 9).table(9, 9), mask.table(9, 9))


def test_many_runs_of_keys_are_refused() -> None:
    q, k, v = heads()
    for keys, refused in ((range(128), False), (range(0, 128, 2), False), (range(0, 130, 2), True)):
        reasons = flex.why_unsupported(Problem.of(q, k, v, mask=mh.Causal() & ~mh.Keys(keys)))
        assert any("Keys has 65 (at most 64)" in reason for reason in reasons) == refused


# -- results of PyTorch's unfused steps ----------------------------------------------------------------


def problem_of(inputs: Inputs, device: str = "cpu") -> tuple[Problem, dict[str, Tensor]]:
    """The library's problem on a device, and the leaves that get gradients."""
    leaves, given = inputs.on(device)
    return Problem.of(leaves["q"], leaves["k"], leaves["v"], **given), leaves


def plainly(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the formula."""
    return reference.run(problem)[0], reference.weights(problem)[1]


def check_all(inputs: Inputs, got: dict[str, Tensor]) -> None:
    """The error budget, which for gradients is that of PyTorch's fused attention."""
    lse, answer = got.pop("lse"), answer_for(inputs.case, "flex")
    check(inputs.case, "flex", got)
    assert not over(lse, answer.values["lse"], answer.errors["lse"])


@pytest.fixture
def trainable(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients on the CPU, where its fused kernel has none; its unfused steps have."""
    monkeypatch.setattr(theirs, "_validate_device", lambda q, k, v: None)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's unfused steps as they are: ten times faster than traced, and right but for gradients."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def taken(problem: Problem) -> bool:
    """Would CUDA compute this, but for its dtype and its small heads?"""
    reasons = flex.why_unsupported(problem)
    return all(any(word in reason for word in ("q is", "between 16 and 256")) for reason in reasons)


TAKEN = [case for case in CASES if 0 not in case.sizes]


def test_of_the_table_it_refuses_sizes_of_0_alone() -> None:
    for case in CASES:
        if 0 in case.sizes:
            inputs = make(case)
            assert not taken(Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments()))
    assert ({case.mask for case in TAKEN[::3]}, {case.bias for case in TAKEN[::3]}) == (
        set(MASKS),
        set(BIASES),
    )


@pytest.mark.sampled
@pytest.mark.usefixtures("trainable", "untraced")
@pytest.mark.parametrize("case", TAKEN[::3], ids=str)
def test_table(case: Case) -> None:
    inputs = make(case)
    problem, _ = problem_of(inputs)
    assert taken(problem)
    with torch.no_grad():
        out, lse = flex._attend(flex._per_pair(problem))
    assert (out.dtype, lse.dtype) == (case.dtype, problem.dtype)
    check_all(inputs, {"out": out, "lse": lse})


@pytest.mark.every(2, "full")
@pytest.mark.usefixtures("trainable")
@pytest.mark.parametrize("case", TAKEN[1::20], ids=str)
def test_table_with_gradients(case: Case) -> None:
    inputs = make(case)
    problem, leaves = problem_of(inputs)
    out, lse = torch.compile(flex._attend, backend="eager", fullgraph=True)(flex._per_pair(problem))
    got = {"out": out, "lse": lse} | gradients(out, leaves, inputs.upstream)
    check_all(inputs, got)


@pytest.mark.usefixtures("trainable")
def test_the_log_sum_exp_has_its_gradient() -> None:
    """With a sink that is there, one that isn't (−inf), and a row that sees nothing beside the sink."""
    leaves = [x.double().requires_grad_() for x in (*heads(), torch.tensor([0.3, -math.inf, 2.0, -1.0]))]
    found = []
    for run in (plainly, torch.compile(flex._attend, backend="eager", fullgraph=True)):
        rest = {"mask": mh.Causal(), "offset": -1, "softcap": 2.0, "sink": leaves[3]}
        out, lse = run(Problem.of(*leaves[:3], **rest))
        assert (lse[:, :, 0] == leaves[3]).all()
        found.append(torch.autograd.grad(out.square().sum() + lse[:, [0, 2, 3]].square().sum(), leaves))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("how", ["mask", "per head", "bias"])
def test_keys_masked_for_all_queries_have_no_effect(how: str, poison: float) -> None:
    q, k, v = heads()
    hidden = torch.zeros(2, 4, 1, 9, dtype=torch.bool)
    hidden[0, :2, :, 4] = True  # the two query heads of one key head
    hidden[1, 2:, :, 7:] = True
    rest: dict[str, Any] = {"mask": mh.Drop(hidden)}
    if how == "mask":
        hidden[:] = hidden.any(1, keepdim=True)
        rest = {"mask": mh.Drop(hidden[:, :1]) & mh.Full()}
    elif how == "bias":
        rest = {"bias": mh.Dense(torch.zeros(hidden.shape).masked_fill(hidden, -math.inf))}
    behind = hidden[:, ::2, 0, :, None].expand_as(k)
    clean = flex._attend(Problem.of(q, k, v, **rest))
    dirty = flex._attend(Problem.of(q, k.masked_fill(behind, poison), v.masked_fill(behind, poison), **rest))
    for one, two in zip(clean, dirty, strict=True):
        assert torch.equal(one, two)
        assert two.isfinite().all()


# -- what is compiled --------------------------------------------------------------------------------


def compiled() -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("eager")
    return torch.compile(flex._attend, backend=counter, fullgraph=True), counter


def same(problem: Problem, quick: Any) -> None:
    for one, two in zip(quick(flex._per_pair(problem)), plainly(problem), strict=True):
        torch.testing.assert_close(one, two)


VARYING: dict[str, Callable[[int], Problem]] = {
    "padding": lambda n: Problem.of(
        *heads(n, n),
        mask=mh.Causal() & mh.Window(left=n // 3) & mh.Lengths(torch.tensor([n, n // 2]), left=True),
        sink=torch.randn(4),
    ),
    "documents": lambda n: Problem.of(
        *heads(n, n),
        mask=mh.Documents(torch.randint(3, (2, n))),
        bias=mh.ALiBi(4),
        offset=torch.tensor([0, n]),
    ),
    "decoding": lambda n: Problem.of(*heads(1, n), mask=mh.Causal() & mh.Window(left=40)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", VARYING)
def test_lengths_and_numbers_are_not_compiled_anew(name: str) -> None:
    """At most three graphs: the first length alone, lengths of one block, longer ones."""
    quick, counter = compiled()
    for n in (20, 33, 127, 128, 129, 200, 256, 257, 300):
        same(VARYING[name](n), quick)
    assert counter.frame_count <= 3


def test_scale_and_softcap_are_written_into_the_kernel() -> None:
    """Triton wants them as numbers; a second one would make PyTorch pass them in."""
    quick, counter = compiled()
    for scale, softcap in ((0.3, 2.0), (-0.4, 2.0), (0.5, 3.0), (0.5, 30.0)):
        same(Problem.of(*heads(), scale=scale, softcap=softcap), quick)
    assert counter.frame_count == 4
    for graph in counter.graphs:
        (call,) = (node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention)
        assert isinstance(call.args[5], float)


@pytest.mark.full
def test_more_layouts_than_pytorch_compiles_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's attention stops, or turns into another, on the ninth kind of mask."""
    quick, counter = compiled()
    monkeypatch.setattr(flex, "_compiled", lambda: quick)
    for n in range(1, 11):
        problem = Problem.of(*heads(), scale=1 / n)
        torch.testing.assert_close(flex.run(problem)[0], reference.run(problem)[0])
    assert counter.frame_count == 10


def test_what_cannot_be_compiled_says_so() -> None:
    """As on the CPU, where PyTorch's fused kernel has no log-sum-exp."""
    with pytest.raises(
        RuntimeError, match=r"couldn't compile FlexAttention.*use kernel=\"chunked\""
    ) as caught:
        flex.run(Problem.of(*heads()))
    assert str(caught.value).count("\n") == 0


def test_an_error_of_the_callers_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(flex, "_compiled", lambda: fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        flex.run(Problem.of(*heads()))


def test_inside_a_compiled_function_it_is_a_part_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_why_machine_unsupported", lambda device: [])
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def quick(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, amap = mh.attention_with_map(
            q, k, v, mask=mh.Causal() & mh.Keys([0, 2, 3]), bias=mh.Dense(bias), softcap=2.0, kernel="flex"
        )
        return out * 2, amap.lse

    q, k, v = heads(dtype=torch.bfloat16)
    bias = torch.randn(6, 9)
    out, lse = quick(q, k, v)
    expected, amap = mh.attention_with_map(
        q, k, v, mask=mh.Causal() & mh.Keys([0, 2, 3]), bias=mh.Dense(bias), softcap=2.0, kernel="reference"
    )
    torch.testing.assert_close(out, expected * 2, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, amap.lse)
    assert counter.frame_count == 1


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)


@pytest.mark.every(4, "full")
@needs_compiler
@pytest.mark.parametrize("mask", [*MASKS, *VALID_RULES])
def test_masks_are_written_into_a_kernel(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor's own compiler for the CPU: like the one for CUDA it reads masks one pair at a time."""
    into_a_kernel(Case((2, 4, 2, 6, 9, 16, 16), mask=mask if mask in MASKS else "none"), mask, monkeypatch)


@pytest.mark.every(4, "full")
@needs_compiler
@pytest.mark.parametrize("bias", BIASES)
def test_biases_are_written_into_a_kernel(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An offset per sequence, a tensor of int64, becomes C++ that doesn't compile for AVX2 (PyTorch 2.13).
    offset = "ahead" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "each"
    case = Case((2, 4, 2, 6, 9, 16, 16), mask="causal", bias=bias, softcap=3.0, offset=offset)
    into_a_kernel(case, "causal", monkeypatch)


def into_a_kernel(case: Case, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_lse(*args: Any, return_aux: Any, **rest: Any) -> Any:  # which the CPU's kernel doesn't give
        out = theirs.flex_attention(*args, **rest)
        return out, theirs.AuxOutput(lse=out[..., 0])

    monkeypatch.setattr(flex, "flex_attention", without_lse)
    problem, _ = problem_of(make(case))
    problem = replace(problem, **{name: getattr(problem, name).detach() for name in "qkv"})
    if mask in VALID_RULES:
        problem = replace(problem, mask=mh.Rule(VALID_RULES[mask]))
    try:
        with torch.no_grad():
            out, _ = torch.compile(flex._attend, fullgraph=True)(flex._per_pair(problem))
    except torch._inductor.exc.InductorError as error:
        # PyTorch 2.13 mixes vectors of integers and floats in what it writes for AVX2 from such masks.
        if "C++ compile error" not in str(error) or "VecMask" not in str(error):
            raise
        pytest.skip("PyTorch's C++ for this mask doesn't compile on this processor")
    torch.testing.assert_close(out, reference.run(problem)[0])


# -- on a GPU ----------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="FlexAttention is fused on CUDA, and there is no GPU"
)

LONG = [
    Case((2, 4, 2, 200, 300, 64, 64), HALF[n % 2], mask=mask, bias=bias, **rest)
    for n, (mask, bias, rest) in enumerate(
        [(mask, "none", {}) for mask in MASKS]
        + [("causal", bias, {"sink": "float32", "offset": "each"}) for bias in BIASES]
        + [("holes", "alibi", {"softcap": 30.0, "sink": "some are -inf", "scale": -0.3})]
    )
]
SHORT = [case for case in TAKEN if case.dtype in HALF and min(case.sizes[5:]) >= 16]
WIDER = [Case((1, 4, 1, 130, 257, d, w), torch.bfloat16, mask="causal", bias="relative float32")
         for d, w in ((16, 24), (40, 128), (128, 128), (256, 256))]  # fmt: skip


@gpu
@pytest.mark.parametrize("case", [*LONG, *WIDER, *SHORT], ids=str)
def test_on_cuda(case: Case) -> None:
    inputs = make(case)
    problem, leaves = problem_of(inputs, "cuda")
    out, lse = kernels.run(problem, "flex")
    assert lse is not None
    got = {"out": out, "lse": lse} | gradients(out, leaves, inputs.upstream.to(out.device))
    check_all(inputs, {name: x.cpu() for name, x in got.items()})


def on_gpu(t: int = 300, s: int = 300) -> tuple[list[Tensor], dict[str, Any]]:
    """A problem with something of everything, its tensors leaves."""
    leaves = [x.cuda().requires_grad_() for x in heads(t, s, 64, torch.bfloat16)]
    sink, table = (torch.randn(n, device="cuda", requires_grad=True) for n in ((4,), (4, 9)))
    ids = torch.arange(s, device="cuda") // 70
    mask = mh.Causal() & mh.Documents(ids) & ~mh.Keys([3, 5]) & mh.Lengths(torch.tensor([s, s - 9]).cuda())
    rest = {"mask": mask, "bias": mh.Relative(table), "sink": sink, "softcap": 20.0, "kernel": "flex"}
    return [*leaves, sink, table], rest


@gpu
def test_the_device_is_never_waited_for() -> None:
    leaves, rest = on_gpu()

    def train() -> None:
        out, _ = mh.attention_with_map(*leaves[:3], **rest)
        torch.autograd.grad(out.float().square().mean(), leaves)

    train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_inside_a_compiled_function_on_cuda() -> None:
    leaves, rest = on_gpu()
    quick = torch.compile(lambda q, k, v: mh.attention(q, k, v, **rest), fullgraph=True)
    expected, out = mh.attention(*leaves[:3], **rest), quick(*leaves[:3])
    torch.testing.assert_close(out, expected)
    for one, two in zip(
        *(torch.autograd.grad(x.float().sum(), leaves) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


@gpu
def test_no_weights_are_built_on_cuda() -> None:
    """At 8,192 tokens they would be a gigabyte, and the mask 64 MB."""
    q, k, v = (x.cuda().requires_grad_() for x in heads(8192, 8192, 64, torch.bfloat16, b=1))
    rest = {"mask": mh.Causal() & mh.Window(left=1000), "softcap": 30.0, "kernel": "flex"}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = mh.attention(q, k, v, **rest)
        torch.autograd.grad(out.float().sum(), (q, k, v))
        del out
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


@gpu
def test_keys_masked_for_all_queries_have_no_effect_on_cuda() -> None:
    q, k, v = (x.cuda() for x in heads(200, 300, 64, torch.float16))
    rest = {"mask": mh.Lengths(250) & mh.Window(left=40), "kernel": "flex"}
    clean = mh.attention(q, k, v, **rest)
    k[:, :, 250:], v[:, :, 250:] = math.nan, math.inf
    assert torch.equal(mh.attention(q, k, v, **rest), clean)
