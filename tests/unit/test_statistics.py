"""Every statistic of a map, against the same one of the full matrix; and what might break one.

The matrix is the table's own oracle, in longdouble; each statistic is written out below in numpy, over
whole rows and columns, and shares no code with the library. Each number comes with how far rounding may
move it: the error of the weights that the oracle gives ("The error budget" in docs/explanation/numerics.md),
carried through the statistic, and that of the statistic's own sums.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import manyheads as mh
from manyheads import measures, statistics
from manyheads.kernels import chunked, native
from manyheads.maps import AttentionMap
from manyheads.problem import Problem
from tests.cases import (
    BIASES,
    CASES,
    DTYPES,
    LAYOUTS,
    MASKS,
    WIDE,
    Case,
    Inputs,
    Spec,
    bias_numbers,
    build,
    make,
    oracle,
    over,
    pairwise,
    positions,
    visible,
    wide,
)
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("one_thread", "small_blocks")


@pytest.fixture(params=["kernel", "tiles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics by the native kernel where it supports them, and by tiles."""
    if request.param == "tiles":
        monkeypatch.setattr(native, "fuses", lambda *_: False)
    elif native.library.load_error is not None:
        pytest.skip(native.library.load_error)


both_ways = pytest.mark.usefixtures("way")


# -- the statistics of a full matrix -----------------------------------------------------------------


@dataclass
class Matrix:
    """All weights, and what else a statistic is read off."""

    weights: np.ndarray  # [b, h, t, s]
    seen: np.ndarray  # where the key is visible, [b, h, t, s]
    scores: np.ndarray  # [b, h, t, s], −inf where it is masked
    into_sink: np.ndarray  # [b, h, t]
    inputs: Inputs
    errors: np.ndarray  # of the weights
    score_errors: np.ndarray
    sink_errors: np.ndarray

    @property
    def rounding(self) -> float:
        """The error of sums over rows and columns, relative to the sum of their absolute values."""
        _, _, _, t, s, _, _ = self.inputs.case.sizes
        return (t + s + 4) * torch.finfo(computed(self.inputs.case.dtype)).eps / 2

    @property
    def apart(self) -> np.ndarray:
        """|i − j| of every pair, `[b, 1, t, s]`."""
        _, _, _, t, s, _, _ = self.inputs.case.sizes
        i = np.array(self.first, dtype=int).reshape(-1, 1, 1) + np.arange(t)[:, None]
        return abs(i - np.arange(s))[:, None]

    @property
    def first(self) -> list[int]:
        """The position of row 0 of each sequence."""
        b, _, _, t, s, _, _ = self.inputs.case.sizes
        return positions(self.inputs.offset, b, t, s)


Exact = tuple[np.ndarray, np.ndarray]  # a statistic, and the error that rounding may make


def linear(m: Matrix, read: Callable[[np.ndarray], np.ndarray]) -> Exact:
    """A sum of weights, each times something that is at least 0."""
    value = read(m.weights)
    return value, read(m.errors) + m.rounding * value


def logarithm(x: np.ndarray) -> np.ndarray:
    """ln x, and 0 where x is 0, as what it is multiplied by."""
    return np.log(np.where(x > 0, x, 1))


def entropy(m: Matrix) -> Exact:
    """The slope of −w·ln w is at most 1 + |ln w|."""
    logs = logarithm(m.weights)
    error = (m.errors + m.rounding * m.weights) * (1 + abs(logs))
    return -(m.weights * logs).sum(-1), error.sum(-1)


def distance(m: Matrix) -> Exact:
    return linear(m, lambda x: (x * m.apart).sum(-1))


def row_max(m: Matrix) -> Exact:
    return m.weights.max(-1, initial=0), m.errors.max(-1, initial=0)


def received(m: Matrix, last: int | None = None, normalize: str | None = None) -> Exact:
    rows = slice(max(m.weights.shape[2] - last, 0) if last else 0, None)
    could = m.seen[:, :, rows].sum(2)

    def read(x: np.ndarray) -> np.ndarray:
        total = x[:, :, rows].sum(2)
        return np.where(could > 0, total / np.maximum(could, 1), 0) if normalize else total

    return linear(m, read)


def mass(m: Matrix, inside: np.ndarray, mean: bool = False) -> Exact:
    """The weight inside a boolean `[b, h, t, s]`, or its mean over the rows that see something there."""
    could = (inside & m.seen).any(-1)

    def read(x: np.ndarray) -> np.ndarray:
        total = (x * inside).sum(-1)
        return (total * could).sum(-1) / np.maximum(could.sum(-1), 1) if mean else total

    return linear(m, read)


def pooled(m: Matrix, rows: int, cols: int, reduce: str = "mean") -> Exact:
    t, s = m.weights.shape[2:]
    down = [r * t // rows for r in range(rows + 1)]
    across = [c * s // cols for c in range(cols + 1)]
    fold = np.add if reduce == "mean" else np.maximum

    def read(x: np.ndarray) -> np.ndarray:
        cells = fold.reduceat(fold.reduceat(x, down[:-1], axis=2), across[:-1], axis=3)
        return cells / np.outer(np.diff(down), np.diff(across)) if reduce == "mean" else cells

    return linear(m, read)


def value_norms(m: Matrix, v: Tensor, w_o: Tensor) -> Exact:
    """The error of a norm is relative to that of |v| |W_o|."""
    b, h, g, _, s, _, w = m.inputs.case.sizes
    norms, absolute = np.zeros((b, h, s), dtype=WIDE), np.zeros((b, h, s), dtype=WIDE)
    for head in range(h):
        value = wide(v)[:, head // (h // g)]  # [b, s, w]
        out = wide(w_o)[:, head * w : (head + 1) * w].T  # [w, e]
        norms[:, head] = np.sqrt(((value @ out) ** 2).sum(-1))
        absolute[:, head] = np.sqrt(((abs(value) @ abs(out)) ** 2).sum(-1))
    total, error = linear(m, lambda x: x.sum(2))
    rounding = (w + w_o.shape[0] + 4) * torch.finfo(computed(m.inputs.case.dtype)).eps / 2
    return total * norms, error * norms + (total + error) * rounding * absolute


def logits_max(m: Matrix) -> Exact:
    error = np.where(m.seen, m.score_errors, 0)
    return m.scores.max((2, 3), initial=-np.inf), error.max((2, 3), initial=0)


def sink_weight(m: Matrix) -> Exact:
    return m.into_sink, m.sink_errors


def jensen_shannon(p: Exact, q: Exact, rounding: float) -> Exact:
    """½ Σ p·ln(p/m) + ½ Σ q·ln(q/m), averaged over rows; the slopes are at most 1 + |ln(p/m)|."""
    middle = np.where(p[0] + q[0] > 0, (p[0] + q[0]) / 2, 1)
    value, error = np.zeros(middle.shape), np.zeros(middle.shape)
    for x, e in (p, q):
        log = logarithm(x / middle)
        value, error = value + x * log / 2, error + (e + rounding * x) * (1 + abs(log)) / 2
    rows = max(value.shape[-2], 1)
    return value.sum((-2, -1)) / rows, error.sum((-2, -1)) / rows


def divergence(m: Matrix) -> Exact:
    one, other = ((x[:, :, None], x[:, None]) for x in (m.weights, m.errors))
    return jensen_shannon((one[0], other[0]), (one[1], other[1]), m.rounding)  # [b, h, h]


EXACT: dict[str, Callable[..., Exact]] = {
    "entropy": entropy,
    "distance": distance,
    "row_max": row_max,
    "received": received,
    "mass": mass,
    "pooled": pooled,
    "value_norms": value_norms,
    "logits_max": logits_max,
    "sink_weight": sink_weight,
    "divergence": divergence,
}


# -- what is compared --------------------------------------------------------------------------------


def read(case: Case) -> Matrix:
    """The exact matrix of a case."""
    return matrix(make(case))


truth = cache(read)


def matrix(inputs: Inputs) -> Matrix:
    """The exact matrix of some inputs."""
    answer = oracle(inputs)
    seen = inputs.keep & (bias_numbers(inputs) != -np.inf)
    return Matrix(
        answer.values["weights"], seen, answer.scores, answer.into_sink, inputs,
        answer.errors["weights"], answer.score_errors, answer.sink_errors,
    )  # fmt: skip


def computed(dtype: torch.dtype) -> torch.dtype:
    """What a map computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def map_of(inputs: Inputs) -> AttentionMap:
    return AttentionMap.of(Problem.of(inputs.q, inputs.k, inputs.v, **inputs.arguments()))


@dataclass
class Statistic:
    """A statistic, with what the library and the oracle are given for it."""

    name: str
    given: tuple[Any, ...] = ()
    exactly: tuple[Any, ...] | None = None  # where the oracle takes something else

    def of(self, matrix: Matrix) -> Exact:
        return EXACT[self.name](matrix, *(self.given if self.exactly is None else self.exactly))


def inside(case: Case) -> Spec:
    """A mask to measure with: another one for every case."""
    _, _, _, t, s, _, _ = case.sizes
    rng = random.Random(str(case))
    gen = torch.Generator().manual_seed(rng.randrange(1000))
    specs: list[Spec] = [
        ("diagonal", -1),
        ("window", 1, 1),
        ("and", ("causal",), ("keys", (0, 3))),
        ("not", ("causal",)),
        ("lengths", 2, False),
        ("keep", torch.rand(t, s, generator=gen) < 0.5),
        ("rule", "batch and head"),
        ("same", tuple(rng.randrange(3) for _ in range(s)), None),
        ("keys", ()),
    ]
    return rng.choice(specs)


def statistics_of(inputs: Inputs) -> list[Statistic]:
    """Every statistic of a case, with all kinds of arguments; `top` has a check of its own."""
    case = inputs.case
    b, h, _, t, s, _, w = case.sizes
    gen = torch.Generator().manual_seed(5)
    w_o = torch.randn(6, h * w, generator=gen, dtype=torch.float64).to(case.dtype)
    spec = inside(case)
    within = visible(spec, b, h, t, s, inputs.offset)
    requested = [
        Statistic("entropy"),
        Statistic("distance"),
        Statistic("row_max"),
        Statistic("received"),
        Statistic("received", (1 + t // 2,)),
        Statistic("received", (None, "age")),
        Statistic("received", (t + 3, "age")),
        Statistic("received", (2, "age")),
        Statistic("mass", (build(spec),), (within,)),
        Statistic("mass", (build(spec), True), (within, True)),
        Statistic("value_norms", (inputs.v, w_o)),
        Statistic("logits_max"),
        Statistic("sink_weight"),
        Statistic("divergence"),
    ]
    if t and s:
        shapes = {(1, 1), (t, s), (min(t, 3), min(s, 4)), (1 + t // 2, 1 + s // 3)}
        requested += [
            Statistic("pooled", (*shape, reduce)) for shape in sorted(shapes) for reduce in ("mean", "max")
        ]
    return requested


def compute_together(amap: AttentionMap, requested: list[Statistic], **more: Any) -> list[Any]:
    """The answers to all statistics_of from one call of `statistics`."""
    lists: dict[str, list[Any]] = {}
    for statistic in requested:
        lists.setdefault(statistic.name, []).append(statistic.given)
    found = amap.statistics(**lists, **more)
    answers = {name: iter(results) for name, results in found.items() if name in lists}
    return [next(answers[statistic.name]) for statistic in requested] + [found[name] for name in more]


TINY = torch.finfo(torch.float32).smallest_normal  # what is smaller may become 0


def check(statistic: Statistic, got: Tensor, exact: Matrix) -> None:
    """A statistic within its budget."""
    value, may = statistic.of(exact)
    dtype = exact.inputs.case.dtype
    assert got.dtype == computed(dtype)
    assert not got.requires_grad
    assert statistic.name == "logits_max" or not (got < 0).any()
    wrong = over(got, value, may + TINY)
    assert not wrong, f"{statistic.name}{statistic.given[:3]}: {wrong}"


def check_top(top: Any, k: int, exact: Matrix) -> None:
    """The k largest weights, in falling order; at every place the weight is that of the key there."""
    weights, keys = top
    b, h, t, s = exact.weights.shape
    assert weights.shape == keys.shape == (b, h, t, k)
    assert keys.dtype == torch.int64
    known = min(k, s)
    ranked = -np.sort(-exact.weights, -1)[..., :known]  # what isn't seen weighs 0, and is last
    value = np.concatenate((ranked, np.zeros((b, h, t, k - known), dtype=WIDE)), -1)
    may = np.broadcast_to(exact.errors.max(-1, initial=0)[..., None] + TINY, value.shape)
    assert not over(weights, value, may)
    assert (weights.diff(dim=-1) <= 0).all()
    at = keys.numpy()
    absent = at == -1
    assert (absent == (np.arange(k) >= exact.seen.sum(-1)[..., None])).all(), "−1 past the keys that are seen"
    assert not weights.numpy()[absent].any()
    assert ((at >= -1) & (at < s)).all()
    if s:
        place = np.maximum(at, 0)
        assert np.take_along_axis(exact.seen, place, -1)[~absent].all(), "a visible key"
        theirs = np.where(absent, 0, np.take_along_axis(exact.weights, place, -1))
        assert not over(weights, theirs, may)
    for row in at.reshape(-1, k):
        chosen = row[row >= 0]
        assert len(set(chosen)) == len(chosen), "no key twice"


def check_all(inputs: Inputs, exact: Matrix) -> None:
    """Every statistic of a case, requested for in one call."""
    amap, requested = map_of(inputs), statistics_of(inputs)
    s = inputs.case.sizes[4]
    tops = [1, 3, s + 2]
    *answers, several = compute_together(amap, requested, top=tops)
    for statistic, got in zip(requested, answers, strict=True):
        check(statistic, got, exact)
    for k, top in zip(tops, several, strict=True):
        check_top(top, k, exact)


@pytest.mark.sampled
@both_ways
@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case: Case) -> None:
    check_all(make(case), truth(case))


# Lengths of several blocks with something left over, more queries than keys, one key block, one row block.
LONG = {
    "sizes": ((1, 1, 1, 97, 131, 4, 3), (2, 2, 2, 33, 65, 3, 3), (1, 2, 2, 131, 33, 3, 3),
              (1, 2, 1, 64, 64, 4, 4)),
    "dtype": (torch.float64, torch.float64, torch.float32, torch.bfloat16),
    "mask": MASKS,
    "bias": ("none", "none", "alibi", "dense hiding"),
    "sink": ("none", "none", "own"),
    "offset": ("default", "zero", "negative", "ahead", "each"),
}  # fmt: skip


@pytest.mark.sampled
@both_ways
@pytest.mark.parametrize("case", pairwise(LONG), ids=str)
def test_across_blocks(case: Case) -> None:
    check_all(make(case), read(case))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case: sizes from 0 up to two blocks, and everything else that the table combines."""
    g, times = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    length = st.one_of(st.integers(0, 7), st.integers(30, 34))
    t, s = draw(length), draw(length)
    sizes = (draw(st.integers(1, 2)), g * times, g, t, s, draw(st.integers(0, 5)), draw(st.integers(0, 3)))
    return Case(
        sizes,
        draw(st.sampled_from(DTYPES)),
        mask=draw(st.sampled_from(MASKS)),
        bias=draw(st.sampled_from(BIASES)),
        softcap=draw(st.sampled_from([None, 0.7, 30.0])),
        sink=draw(st.sampled_from(["none", "own", "some are -inf"])),
        offset=draw(st.sampled_from(["default", "zero", "negative", "ahead", "each"])),
        layout=draw(st.sampled_from(LAYOUTS)),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        size=draw(st.sampled_from(["ordinary", "thousands"])),
        seed=draw(st.integers(0, 99)),
    )


@given(case=cases())
def test_any_case(case: Case) -> None:
    check_all(make(case), read(case))


@pytest.mark.sampled
@pytest.mark.parametrize("offset", [-40, 50, 200, torch.tensor([-33, 64]), torch.tensor([70, -70])], ids=str)
@pytest.mark.parametrize("mask", [("causal",), ("window", 1, 3), ("and", ("causal",), ("lengths", 40, True))])
def test_offsets_that_empty_whole_blocks(mask: Spec, offset: Any) -> None:
    inputs = make(Case((2, 2, 1, 65, 97, 3, 2), torch.float64, bias="alibi"))
    keep = visible(mask, 2, 2, 65, 97, offset)
    inputs = replace(inputs, mask=mask, offset=offset, keep=keep)
    check_all(inputs, matrix(inputs))


# -- several at once ---------------------------------------------------------------------------------


def flat(found: dict[str, Any]) -> dict[str, Tensor]:
    """Results by name, lists and pairs opened."""
    opened: dict[str, Tensor] = {}
    for name, result in found.items():
        if isinstance(result, Tensor):
            opened[name] = result
        else:
            opened |= flat({f"{name} {n}": part for n, part in enumerate(result)})
    return opened


def compute_all(amap: AttentionMap, v: Tensor | None = None) -> dict[str, Tensor]:
    """Every statistic of a map, in one call."""
    t, s = amap.shape[2:]
    more: dict[str, Any] = {}
    if v is not None:
        gen = torch.Generator().manual_seed(5)
        more["value_norms"] = v, torch.randn(3, amap.shape[1] * v.shape[3], generator=gen).to(v)
    return flat(
        amap.statistics(
            "entropy", "distance", "row_max", "logits_max", "sink_weight", "divergence",
            received=[(), (None, "age"), (min(40, t), "age")],
            top=[1, 6],
            mass=[(mh.Window(left=1, right=1),), (mh.Diagonal(-1), True)],
            pooled=[(min(t, 5), min(s, 7)), (min(t, 40), min(s, 33), "max")],
            **more,
        )
    )  # fmt: skip


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same numbers to the last bit, NaN and all."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert torch.equal(x.nan_to_num(nan=-7.0), expected[name].nan_to_num(nan=-7.0)), name


def close(found: dict[str, Tensor], expected: dict[str, Tensor], but: tuple[str, ...] = ()) -> None:
    """The same numbers in float64, as far as the order of sums allows."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        if name not in but:
            torch.testing.assert_close(x, expected[name], rtol=1e-11, atol=1e-13, equal_nan=True)


def drawn(
    t: int = 70, s: int = 75, dtype: torch.dtype = torch.float64, seed: int = 0, **arguments: Any
) -> tuple[AttentionMap, Tensor, Tensor, Tensor]:
    """A map of two sequences, four heads in two groups, several blocks long; and its q, k and v."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, heads, n, 4, generator=gen, dtype=torch.float64).to(dtype)
        for heads, n in ((4, t), (2, s), (2, s))
    )
    return AttentionMap.of(Problem.of(q, k, v, **arguments)), q, k, v


@pytest.mark.sampled
@both_ways
@pytest.mark.parametrize("case", CASES[::11], ids=str)
def test_together_as_one_by_one(case: Case) -> None:
    """One pass for all gives what a pass for each gives, to the last bit."""
    inputs = make(case)
    amap, requested = map_of(inputs), statistics_of(inputs)
    assert amap.lse is not None  # else the first pass would find it on its way
    together = compute_together(amap, requested, top=(2,))
    one_by_one = [getattr(amap, statistic.name)(*statistic.given) for statistic in requested] + [amap.top(2)]
    same(flat({"": together}), flat({"": one_by_one}))


@both_ways
def test_statistics_by_name_and_argument() -> None:
    amap, *_ = drawn(mask=mh.Causal())
    found = amap.statistics("row_max", "entropy", top=2, pooled=(3, 4), received={"normalize": "age"})
    assert list(found) == ["row_max", "entropy", "top", "pooled", "received"]
    assert isinstance(found["pooled"], Tensor)
    assert found["top"].weights.shape == found["top"].keys.shape == (2, 4, 70, 2)
    assert torch.equal(found["received"], amap.received(normalize="age"))
    several = amap.statistics(pooled=[(3, 4), {"rows": 3, "cols": 4, "reduce": "max"}], top=[1])
    assert torch.equal(several["pooled"][0], found["pooled"])
    assert torch.equal(several["pooled"][1], amap.pooled(3, 4, "max"))
    assert len(several["top"]) == 1
    assert amap.statistics() == {}


@pytest.mark.sampled
@pytest.mark.parametrize("block", [1, 1 << 13, 1 << 15, 1 << 19])
def test_the_size_of_a_block_does_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {
        "mask": mh.Causal() & mh.Window(left=50),
        "bias": mh.ALiBi(4),
        "offset": torch.tensor([5, -9]),
    }
    expected = compute_all(drawn(t=131, s=140, **arguments)[0])
    monkeypatch.setattr(chunked, "BLOCK", block)
    close(compute_all(drawn(t=131, s=140, **arguments)[0]), expected)


# -- top: the order of equals ------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("k", [1, 2, 5, 31, 33, 64, 140])
@pytest.mark.parametrize("mask", [None, mh.Causal(), ~mh.Keys(list(range(0, 131, 3))), mh.Keys([7, 40, 99])])
def test_top_takes_the_first_among_equals(mask: mh.Mask | None, k: int) -> None:
    """Scores of 0, 1 and 2, exactly: dozens of ties in every block."""
    q, keys = torch.ones(1, 1, 70, 1), torch.randint(3, (1, 1, 131, 1)).float()
    amap = AttentionMap.of(Problem.of(q, keys, keys, mask=mask, scale=1.0))
    found = amap.top(k)
    scores = keys.flatten().tolist()
    for row, seen in enumerate((amap.dense()[0, 0] > 0).tolist()):
        visible = [j for j in range(131) if seen[j]]
        ranked = sorted(visible, key=lambda j: (-scores[j], j))[:k]
        assert found.keys[0, 0, row].tolist() == ranked + [-1] * (k - len(ranked))
        assert not found.weights[0, 0, row, len(ranked) :].any()
        assert (found.weights[0, 0, row, : len(ranked)] > 0).all()


@both_ways
def test_top_of_weights_that_underflow() -> None:
    """A weight of 0 that may be seen is a key, and no absent one."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([-2000.0, 0.0, -1000.0]).reshape(1, 1, 3, 1)
    top = AttentionMap.of(Problem.of(q, k, k, scale=1.0, mask=mh.Keys([0, 1, 2]))).top(4)
    assert top.weights.flatten().tolist() == [1, 0, 0, 0]
    assert top.keys[0, 0, 0, 0] == 1
    assert sorted(top.keys.flatten().tolist()) == [-1, 0, 1, 2]


# -- between two maps --------------------------------------------------------------------------------


def other_inputs(inputs: Inputs, what: str) -> Inputs:
    """The same inputs with something else in one place."""
    b, h, _, t, s, _, _ = inputs.case.sizes
    match what:
        case "queries":
            return replace(inputs, q=(-0.5 * inputs.q).detach())
        case "no mask":
            return replace(inputs, mask=None, keep=np.ones((b, h, t, s), dtype=bool))
        case "offset":
            return replace(inputs, offset=2, keep=visible(inputs.mask, b, h, t, s, 2))
        case "nothing":
            return replace(inputs, mask=("keys", ()), keep=np.zeros((b, h, t, s), dtype=bool))
    raise AssertionError(what)


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["queries", "no mask", "offset", "nothing"])
@pytest.mark.parametrize("case", CASES[::31], ids=str)
def test_divergence_between_two_maps(case: Case, what: str) -> None:
    ours, theirs = make(case), other_inputs(make(case), what)
    exact = matrix(ours), matrix(theirs)
    value, may = jensen_shannon(*((m.weights, m.errors) for m in exact), exact[0].rounding)
    one, other = map_of(ours), map_of(theirs)
    for found in (one.divergence(other), other.divergence(one)):
        assert found.dtype == computed(case.dtype)
        assert not over(found, value, may + TINY)


def test_divergence_is_a_distance_of_rows() -> None:
    amap, *_ = drawn(mask=mh.Causal())
    between = amap.divergence()
    assert torch.equal(between, between.mT)
    assert not between.diagonal(dim1=1, dim2=2).any()
    assert not amap.divergence(amap).any()
    left, right = amap.under(mh.Keys([0])), amap.under(mh.Keys([74]))
    torch.testing.assert_close(left.divergence(right), torch.full((2, 4), math.log(2), dtype=torch.float64))
    # Of rows that are nearly the same, rounding makes nothing less than 0, whose root would be NaN.
    q, k = torch.randn(200, 1, 3, 8).repeat(1, 2, 1, 1), torch.randn(200, 1, 9, 8)
    q[:, 1] += 1e-4 * torch.randn(200, 3, 8)
    alike = AttentionMap.of(Problem.of(q, k, k))
    assert (alike.divergence() >= 0).all()
    assert (alike.divergence(alike.only(heads=[1, 0])) >= 0).all()
    # Of maps in two dtypes, one's own is what comes back.
    half, *_ = drawn(dtype=torch.bfloat16, mask=mh.Causal())
    assert half.divergence(amap).dtype == torch.float32
    torch.testing.assert_close(half.divergence(amap).double(), amap.divergence(half), rtol=1e-4, atol=1e-6)


# -- rollout and measures ----------------------------------------------------------------------------

ROWS: list[Any] = [
    -1,
    5,
    [0, 5, -2],
    slice(None, None, 7),
    torch.tensor([36, 3]),
    torch.arange(37) % 9 == 2,
    [],
]
DEEP = [
    Case((2, 4, 2, 37, 37, 4, 4), torch.float64, mask="causal"),
    Case((2, 4, 4, 37, 37, 4, 4), torch.float64, mask="keep four", sink="own", offset="each"),
    Case((1, 2, 1, 37, 37, 4, 4), torch.float32, mask="causal window", bias="dense hiding"),
    Case((1, 2, 1, 37, 37, 4, 4), torch.bfloat16, mask="nothing"),
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("case", DEEP, ids=str)
def test_rollout_is_the_product_of_matrices(case: Case, rows: Any) -> None:
    """Three layers, one of them with another number of heads."""
    wider = replace(case, sizes=(case.sizes[0], 6, 3, *case.sizes[3:]), seed=2)
    layers = [case, wider, replace(case, seed=3)]
    whole, error = np.eye(37, dtype=WIDE), np.zeros((37, 37), dtype=WIDE)
    for m in map(read, layers):
        step, e_step = m.weights.mean(1) / 2 + np.eye(37) / 2, m.errors.mean(1) / 2
        error = (e_step + m.rounding * step) @ (whole + error) + step @ error  # [b, t, t]
        whole = step @ whole
    chosen = rows.numpy() if isinstance(rows, Tensor) else rows
    value, may = whole[:, chosen], error[:, chosen]
    found = measures.rollout([map_of(make(layer)) for layer in layers], rows)
    assert found.dtype == computed(case.dtype)
    assert not over(found, value, may + TINY)


@pytest.mark.sampled
@both_ways
@pytest.mark.parametrize("case", CASES[::11], ids=str)
def test_measures(case: Case) -> None:
    """Each one is the mean mass of what the papers look at, pair by pair."""
    exact = truth(case)
    b, h, _, t, s, _, _ = case.sizes
    rng = random.Random(3)
    ids = np.array([rng.randrange(3) for _ in range(s)], dtype=int)
    first = np.array(exact.first, dtype=int).reshape(-1, 1, 1, 1)
    i, j = first + np.arange(t)[:, None], np.arange(s)  # [b, 1, t, 1], [s]
    known = (i >= 0) & (i < s)
    token = ids[np.clip(i, 0, s - 1)] if s else i
    before = np.concatenate(([-1], ids))[:s]  # the token before each key
    earliest = exact.seen & (np.cumsum(exact.seen, -1) == 1)
    amap, tokens = map_of(exact.inputs), torch.from_numpy(ids)
    for found, inside in (
        (measures.previous_token(amap), j == i - 1),
        (measures.current_token(amap), j == i),
        (measures.first_token(amap), earliest),
        (measures.duplicate_token(amap, tokens), known & (token == ids) & (j < i)),
        (measures.induction(amap, tokens), known & (token == before) & (j >= 1) & (j <= i)),
        (measures.local(amap, 2), abs(i - j) <= 2),
    ):
        where = np.broadcast_to(inside, (b, h, t, s))
        value, may = mass(exact, where, True)
        assert not over(found, value, may + TINY)


# -- NaN and Inf -------------------------------------------------------------------------------------

POISONS = [math.nan, math.inf, -math.inf]


def hiding(kind: str) -> tuple[dict[str, Any], Tensor]:
    """Arguments that mask some keys for all queries, and these keys, boolean `[b, s]`."""
    hidden = torch.zeros(2, 75, dtype=torch.bool)
    match kind:
        case "lengths":
            hidden[0, 40:], hidden[1, 70:] = True, True
            return {"mask": mh.Causal() & mh.Lengths(torch.tensor([40, 70]))}, hidden
        case "left":
            hidden[0, :35], hidden[1, :5] = True, True
            return {"mask": mh.Lengths(torch.tensor([40, 70]), left=True)}, hidden
        case "keep":
            hidden = torch.rand(2, 75) < 0.3
            return {"mask": mh.Keep(~hidden[:, None, None])}, hidden
        case "bias":
            hidden[:, 10:45] = True
            bias = torch.zeros(75, dtype=torch.float64).masked_fill(hidden[0], -math.inf)
            return {"bias": mh.Dense(bias), "sink": torch.zeros(4, dtype=torch.float64)}, hidden
        case "rule":
            hidden[:, 1::2] = True
            return {"mask": mh.Rule(lambda b, h, i, j: (j % 2 == 0) & (i >= 0))}, hidden
    raise AssertionError(kind)


@both_ways
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("kind", ["lengths", "left", "keep", "bias", "rule"])
def test_masked_keys_do_not_change_statistics(kind: str, poison: float) -> None:
    """No statistic changes by a bit, whatever fully masked keys and values are."""
    arguments, hidden = hiding(kind)
    clean, q, k, v = drawn(**arguments)
    bad = torch.where(hidden[:, None, :, None], poison, 0.0)
    dirty = AttentionMap.of(Problem.of(q, k + bad, v, **arguments))
    same(compute_all(dirty, v + bad), compute_all(clean, v))
    same({"": dirty.divergence(clean)}, {"": torch.zeros(2, 4, dtype=torch.float64)})


@both_ways
@pytest.mark.parametrize("poison", POISONS)
def test_fully_masked_queries_do_not_change_statistics(poison: float) -> None:
    keep = torch.ones(70, 75, dtype=torch.bool)
    keep[30:50] = False
    clean, q, k, v = drawn(mask=mh.Keep(keep))
    q = q.index_fill(2, torch.arange(30, 50), poison)
    dirty = AttentionMap.of(Problem.of(q, k, v, mask=mh.Keep(keep)))
    same(compute_all(dirty, v), compute_all(clean, v))
    assert not dirty.entropy()[:, :, 30:50].any()


@both_ways
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_visible_nan_changes_its_rows_and_heads_only(poison: float) -> None:
    """A NaN key of one sequence and group: NaN for those who see it, and the others' own numbers.

    (Infinities give NaN where q·k is ∞ − ∞, and a weight of 0 where it is −∞.)
    """
    clean, q, k, v = drawn(mask=mh.Causal(), offset=0)
    k = k.clone()
    k[1, 0, 35] = poison  # seen by heads 0 and 1 of sequence 1, from query 35 on
    dirty = AttentionMap.of(Problem.of(q, k, v, mask=mh.Causal(), offset=0))
    found, expected = compute_all(dirty, v), compute_all(clean, v)
    touched = torch.zeros(2, 4, 70, dtype=torch.bool)
    touched[1, :2, 35:] = True
    for name, x in found.items():
        y = expected[name]
        if x.shape[:3] == touched.shape:  # a number per query
            torch.testing.assert_close(x[~touched], y[~touched], rtol=0, atol=0)
        elif name == "divergence":
            torch.testing.assert_close(x[0], y[0], rtol=0, atol=0)
            torch.testing.assert_close(x[1, 2:, 2:], y[1, 2:, 2:], rtol=0, atol=0)
        else:  # a number per key, cell or head
            torch.testing.assert_close(x[0], y[0], rtol=0, atol=0)
            torch.testing.assert_close(x[1, 2:], y[1, 2:], rtol=0, atol=0)
    upper, lower = found["pooled 1"][1, :2, :20], found["pooled 1"][1, :2, 20:]  # 40 cells of rows
    assert torch.equal(upper, expected["pooled 1"][1, :2, :20])
    if math.isnan(poison):
        for name in ("entropy", "distance", "row_max"):
            assert found[name][touched].isnan().all()
        assert found["top 1 0"][touched][:, 0].isnan().all(), "the largest of a row of NaN is NaN"
        assert lower[:, :, 0].isnan().all()
        assert found["divergence"][1, :2, 2:].isnan().all()


@both_ways
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_query_of_nan_changes_its_visible_keys_only(poison: float) -> None:
    """One bad query under a causal mask: keys, cells and rows beyond it keep their numbers."""
    clean, q, k, v = drawn(mask=mh.Causal(), offset=0)
    q = q.clone()
    q[1, 0, 35] = poison
    dirty = AttentionMap.of(Problem.of(q, k, v, mask=mh.Causal(), offset=0))
    assert dirty.received()[1, 0, :36].isnan().any()
    for normalize in (None, "age"):
        x, y = dirty.received(normalize=normalize), clean.received(normalize=normalize)
        assert torch.equal(x[1, 0, 36:], y[1, 0, 36:])
        assert torch.equal(x[:, 1:], y[:, 1:])
    for reduce in ("mean", "max"):
        x, y = dirty.pooled(35, 25, reduce)[1, 0], clean.pooled(35, 25, reduce)[1, 0]
        assert torch.equal(x[:, 12:], y[:, 12:]), "keys from 36 on"
        others = [row for row in range(35) if row != 17]
        assert torch.equal(x[others], y[others])
    assert dirty.mass(mh.Window(left=0, right=5))[1, 0, 35].isnan()
    assert dirty.mass(~mh.Causal())[1, 0, 35] == 0, "no weight where keys are masked"
    assert torch.equal(dirty.mass(mh.Diagonal(1), mean=True), clean.mass(mh.Diagonal(1), mean=True))


@both_ways
@pytest.mark.parametrize("mask", [None, mh.Keys([0, 1, 2]), mh.Causal() | mh.Full()], ids=str)
def test_a_score_of_minus_infinity_weighs_nothing(mask: mh.Mask | None) -> None:
    """It may be seen, and is as if it weren't: e^−∞ = 0, and 0·ln 0 = 0."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, -math.inf, 2.0]).reshape(1, 1, 3, 1)
    with_it = AttentionMap.of(Problem.of(q, k, k, mask=mask))
    without = AttentionMap.of(Problem.of(q, k[:, :, ::2], k[:, :, ::2]))
    assert with_it.top(3).weights.flatten().tolist() == [*without.top(2).weights.flatten().tolist(), 0.0]
    for name in ("entropy", "row_max", "logits_max", "sink_weight"):
        torch.testing.assert_close(getattr(with_it, name)(), getattr(without, name)())
    torch.testing.assert_close(with_it.received()[..., ::2], without.received())


def test_rollout_computes_only_the_requested_rows() -> None:
    """Under a causal mask, padding at the end has no effect on the rows before it."""
    _, q, k, v = drawn(40, 40)
    clean = AttentionMap.of(Problem.of(q, k, v, mask=mh.Causal()))
    bad = torch.where(torch.arange(40)[:, None] > 34, math.nan, 0.0)
    dirty = AttentionMap.of(Problem.of(q + bad, k + bad, v, mask=mh.Causal()))
    expected = measures.rollout([clean] * 3, [0, 33, 34])
    found = measures.rollout([dirty] * 3, [0, 33, 34])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert measures.rollout([dirty] * 3, 36).isnan().any()


# -- modes -------------------------------------------------------------------------------------------


@pytest.fixture
def everything() -> dict[str, Any]:
    """A mask, a bias and a sink for four heads."""
    return {
        "mask": mh.Causal() & mh.Lengths(torch.tensor([75, 60])),
        "bias": mh.ALiBi(4),
        "sink": torch.linspace(-1, 1, 4, dtype=torch.float64),
        "softcap": 5.0,
    }


def test_inference_mode(everything: dict[str, Any]) -> None:
    expected = compute_all(drawn(**everything)[0])
    outside, *_ = drawn(**everything)
    with torch.inference_mode():
        inside, *_ = drawn(**everything)
        same(compute_all(inside), expected)
        same(compute_all(outside), expected)
    same(compute_all(inside), expected)
    same(compute_all(outside), expected)


def test_autocast_rounds_nothing(everything: dict[str, Any]) -> None:
    everything["sink"] = everything["sink"].float()
    expected = compute_all(drawn(dtype=torch.float32, **everything)[0])
    amap, _, _, v = drawn(dtype=torch.float32, **everything)
    with torch.autocast("cpu", torch.bfloat16):
        same(compute_all(amap), expected)
        rolled = measures.rollout([drawn(40, 40, torch.float32)[0]], [3])
        norms = amap.value_norms(v, torch.eye(4).repeat(1, 4))
        between = amap.divergence(amap.under(None))
    assert torch.equal(rolled, measures.rollout([drawn(40, 40, torch.float32)[0]], [3]))
    assert torch.equal(norms, amap.value_norms(v, torch.eye(4).repeat(1, 4)))
    assert torch.equal(between, amap.divergence(amap.under(None)))


@pytest.fixture
def default_of_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_of_float64")
def test_another_default_dtype(everything: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = compute_all(drawn(dtype=dtype, **everything)[0])
        assert {x.dtype for x in found.values() if x.dtype != torch.int64} == {torch.float32}
        torch.set_default_dtype(torch.float32)
        same(found, compute_all(drawn(dtype=dtype, **everything)[0]))
        torch.set_default_dtype(torch.float64)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_inside_a_compiled_function() -> None:
    """Dynamo leaves the walk over tiles to Python, and the numbers are the same but for rounding."""

    def read(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        _, amap = mh.attention_with_map(q, k, k, mask=mh.Causal(), kernel="chunked")
        return amap.entropy(), amap.top(2).keys

    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    torch._dynamo.reset()
    try:
        found = torch.compile(read, backend="aot_eager")(q, k)
    finally:
        torch._dynamo.reset()
    for x, y in zip(found, read(q, k), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


# -- sizes of 0 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", "bhts")
def test_pooling_and_rollout_of_sizes_of_0(letter: str) -> None:
    """The other statistics are in the table of cases, with all sizes of 0."""
    b, h, t, s = (dict(zip("bhts", (2, 4, 5, 6), strict=True)) | {letter: 0}).values()
    q, k = torch.randn(b, h, t, 4), torch.randn(b, h // 2, s, 4)
    amap = AttentionMap.of(Problem.of(q, k, k, mask=mh.Causal()))
    assert not measures.first_token(amap).any()
    if t and s:
        assert amap.pooled(2, 3).shape == (b, h, 2, 3)
    else:
        with raises(ValueError, f"{letter} = 0"):
            amap.pooled(1, 1)
    square = AttentionMap.of(Problem.of(q, q, q))
    if letter == "h":
        with raises(ValueError, "heads"):
            measures.rollout([square], 0)
    else:
        rolled = measures.rollout([square], [0, 1] if t else [])
        assert rolled.shape == (b, 2 if t else 0, t)
        assert not rolled.isnan().any()


# -- errors ------------------------------------------------------------------------------------------


def small(t: int = 5, s: int = 7) -> AttentionMap:
    q, k = torch.randn(2, 4, t, 4), torch.randn(2, 2, s, 4)
    return AttentionMap.of(Problem.of(q, k, k))


V, W_O = torch.randn(2, 2, 7, 3), torch.randn(6, 12)

INVALID: list[tuple[Callable[[AttentionMap], Any], type[Exception], list[str]]] = [
    (lambda a: a.top(0), ValueError, ["k", "at least 1", "0"]),
    (lambda a: a.top(10**7), ValueError, ["top(10000000)", "7 keys", "Use top(7)"]),
    (lambda a: a.top(True), TypeError, ["k", "True"]),
    (lambda a: a.top("x"), TypeError, ["k", "'x'"]),
    (lambda a: a.received(last=0), ValueError, ["last", "at least 1", "0"]),
    (lambda a: a.received(last=True), TypeError, ["last", "True"]),
    (lambda a: a.received(normalize="Age"), ValueError, ["normalize", '"age"', "'Age'"]),
    (lambda a: a.received(normalize=True), ValueError, ["normalize", "True"]),
    (lambda a: a.pooled(6, 2), ValueError, ["t = 5", "6", "rows"]),
    (lambda a: a.pooled(2, 8), ValueError, ["s = 7", "8", "cols"]),
    (lambda a: a.pooled(0, 2), ValueError, ["rows", "at least 1", "0"]),
    (lambda a: a.pooled(2, 2.0), TypeError, ["cols", "2.0"]),
    (lambda a: a.pooled(2, 2, reduce="sum"), ValueError, ["reduce", '"mean"', '"max"', "'sum'"]),
    (lambda a: a.mass(None), TypeError, ["mask", "None", "Full()"]),
    (lambda a: a.mass(torch.ones(5, 7) > 0), TypeError, ["mask", "Tensor", "Keep"]),
    (lambda a: a.mass(mh.Full(), mean="yes"), TypeError, ["mean", "'yes'"]),
    (lambda a: a.mass(mh.Keep(torch.ones(5, 6) > 0)), ValueError, ["[5, 6]", "[5, 7]"]),
    (lambda a: a.value_norms(V[:, :, :6], W_O), ValueError, ["v", "[2, 2, 7, w]", "[2, 2, 6, 3]"]),
    (lambda a: a.value_norms(V.repeat(1, 2, 1, 1), W_O), ValueError, ["v", "[2, 2, 7, w]", "[2, 4, 7, 3]"]),
    (lambda a: a.value_norms(V, W_O.T), ValueError, ["w_o", "[e, 12]", "nn.Linear", "[12, 6]"]),
    (lambda a: a.value_norms(V.long(), W_O), TypeError, ["v", "int64"]),
    (lambda a: a.value_norms(V, torch.nn.Linear(12, 6)), TypeError, ["w_o", "Linear"]),
    (lambda a: a.value_norms(None, W_O), TypeError, ["v", "NoneType"]),
    (lambda a: a.divergence(3), TypeError, ["AttentionMap", "int"]),
    (lambda a: a.divergence(a.dense()), TypeError, ["AttentionMap", "Tensor"]),
    (lambda a: a.divergence(small(t=6)), ValueError, ["[2, 4, 5, 7]", "[2, 4, 6, 7]"]),
    (lambda a: a.statistics("entropi"), ValueError, ["'entropi'", "entropy", "received"]),
    (lambda a: a.statistics("_reduce"), ValueError, ["'_reduce'"]),
    (lambda a: a.statistics(entropi=()), ValueError, ["'entropi'"]),
    (lambda a: a.statistics(["entropy"]), TypeError, ["name", "list"]),
    (lambda a: a.statistics("top"), TypeError, ["top", "k"]),
    (lambda a: a.statistics("pooled"), TypeError, ["pooled", "rows"]),
    (lambda a: a.statistics(pooled=4), TypeError, ["pooled", "cols"]),
    (lambda a: a.statistics(pooled=(2, 2, "max", 4)), TypeError, ["pooled", "reduce"]),
    (lambda a: a.statistics(pooled=(2, 2, "min")), ValueError, ["reduce", "'min'"]),
    (lambda a: a.statistics(entropy=True), TypeError, ["entropy", "no arguments"]),
    (lambda a: a.statistics(mass=[mh.Causal(), 3]), TypeError, ["mask", "int"]),
    (lambda a: a.statistics(mass=(mh.Causal(), True, 3)), TypeError, ["mass", "mask"]),
    (lambda a: a.statistics("entropy", top=[2, True]), TypeError, ["k", "True"]),
    (lambda a: a.statistics(top={"k": "x"}), TypeError, ["k", "whole number", "'x'"]),
    (lambda a: a.statistics(received={"normalise": "age"}), TypeError, ["received", "normalise"]),
    (lambda a: measures.rollout([a], 1), ValueError, ["[b, h, t, t]", "[2, 4, 5, 7]"]),
    (lambda a: measures.rollout([small(5, 5), small(6, 6)], 1), ValueError, ["t = 5", "[2, 4, 6, 6]"]),
    (lambda a: measures.rollout([small(5, 5), a.only(0)], 1), ValueError, ["b = 2", "[1, 4, 5, 7]"]),
    (lambda a: measures.rollout([small(5, 5)]), ValueError, ["rows", "dense 5 × 5 matrix"]),
    (lambda a: measures.rollout([small(5, 5)], 5), IndexError, ["query", "5", "t = 5"]),
    (lambda a: measures.rollout([small(5, 5)], 0.5), TypeError, ["rows", "0.5"]),
    (lambda a: measures.rollout([small(5, 5)], True), TypeError, ["rows", "True"]),
    (lambda a: measures.rollout([], 1), ValueError, ["empty"]),
    (lambda a: measures.rollout(small(5, 5), 1), TypeError, ["list", "AttentionMap"]),
    (lambda a: measures.rollout([small(5, 5), 3], 1), TypeError, ["AttentionMap", "int"]),
    (lambda a: measures.rollout([small(5, 5).dense()], 1), TypeError, ["AttentionMap", "Tensor"]),
    (lambda a: measures.local(a, -1), ValueError, ["-1"]),
    (lambda a: measures.induction(a, [1, 2, 3]), TypeError, ["integer", "list"]),
    (lambda a: measures.duplicate_token(a, torch.zeros(3, 7).long()), ValueError, ["[3, 7]", "b", "2"]),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "kind", "words"), INVALID)
def test_invalid_arguments_of_statistics_raise(
    ask: Callable[[AttentionMap], Any], kind: type[Exception], words: list[str]
) -> None:
    amap = small()
    with raises(kind, *words):
        ask(amap)


# -- beside the output -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "native", "sdpa", "chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_statistics_beside_the_output(kernel: str, dtype: torch.dtype, gradients: bool) -> None:
    """The same output and statistics as one after the other, and nothing is computed when they are read."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, n, 8, generator=gen).to(dtype) for n in (70, 90, 90))
    v.requires_grad_(gradients)
    arguments: dict[str, Any] = {"mask": mh.Causal(), "kernel": kernel}
    requested = {"entropy": (), "received": [(), (5,)], "top": 3, "pooled": (7, 9, "max"), "sink_weight": ()}
    requested |= {"logits_max": (), "divergence": ()}
    out, amap = mh.attention_with_map(q, k, v, **arguments, statistics=requested)
    alone, other = mh.attention_with_map(q, k, v, **arguments)
    assert out.requires_grad == gradients
    torch.testing.assert_close(out, alone)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-12}
    for name, x in compute_some(amap).items():
        torch.testing.assert_close(x, compute_some(other)[name], **near)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("manyheads.statistics.Pass", None)
        amap.statistics(**requested)
        assert torch.equal(amap.received(5), amap.statistics(received=(5,))["received"])
        with pytest.raises(TypeError):
            amap.received(6)


def compute_some(amap: AttentionMap) -> dict[str, Tensor]:
    return flat(amap.statistics("entropy", "sink_weight", received=[(), (5,)], top=3, pooled=(7, 9, "max")))


def test_other_maps_have_no_statistics_of_this_one() -> None:
    """Neither its heads nor the same map under another mask, in inference mode too."""
    q = torch.randn(1, 2, 30, 8)
    with torch.inference_mode():
        _, amap = mh.attention_with_map(q, q, q, mask=mh.Causal(), statistics={"entropy": (), "received": ()})
    assert amap.under(None).entropy().shape == (1, 2, 30)
    assert not torch.allclose(amap.under(None).entropy(), amap.entropy())
    torch.testing.assert_close(amap.only(heads=1).received(), amap.received()[:, 1:])
    amap.entropy().zero_()  # a copy
    assert amap.entropy().any()
    p = torch.randn(1, 2, 30, 8)
    _, amap = mh.attention_with_map(p, p, p, statistics={"entropy": ()})
    p.add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        amap.entropy()


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("entropy", TypeError, "Expected statistics to be a dict.*, got a str"),
        (["entropy"], TypeError, "Expected statistics to be a dict.*, got a list"),
        ({"entropi": ()}, ValueError, "Expected statistics among entropy, .*, got 'entropi'"),
        ({"top": "x"}, TypeError, "'x'"),
        ({"pooled": (3,)}, TypeError, "arguments of pooled to be rows, cols, reduce"),
        ({"pooled": (3, 99)}, ValueError, "at most 30 cols"),
        ({"mass": (mh.Full(),)}, ValueError, "mass takes a mask or tensor, which may change later"),
        ({"value_norms": ()}, ValueError, "value_norms takes a mask or tensor"),
    ],
    ids=str,
)
def test_invalid_statistics_beside_the_output_raise(spec: Any, kind: type[Exception], words: str) -> None:
    q = torch.randn(1, 2, 30, 8)
    with pytest.raises(kind, match=words):
        mh.attention_with_map(q, q, q, statistics=spec)


# -- memory ------------------------------------------------------------------------------------------

MEMORY = """
import sys, torch, manyheads as mh
length, heads, size = map(int, sys.argv[1:4])
torch.set_num_threads(1)

def compute_all(n, cells):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, size) for _ in range(3))
    amap = mh.AttentionMap.of(mh.problem.Problem.of(q, k, v[..., :0], mask=mh.Causal()))
    found = amap.statistics(
        "entropy", "received", "distance", "row_max", top=8, pooled=[(cells, cells), (cells, cells, "max")]
    )
    results = [x for y in found.values() for x in (y if isinstance(y, (list, tuple)) else [y])]
    return q, k, v, results

def peak():
    # Not ru_maxrss on Linux: it begins with the peak of the process that started this one.
    if sys.platform == "linux":
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

compute_all(512, 64)
before = peak()
q, k, v, results = compute_all(length, min(512, length))
held = sum(x.numel() * x.element_size() for x in (q, k, v, *results))
print((peak() - before - held) / 1e6)
"""


def beyond(length: int, heads: int, size: int) -> float:
    """MB of peak resident memory of a whole look, beyond q, k, v and the results."""
    command = [sys.executable, "-c", MEMORY, str(length), str(heads), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.full
def test_statistics_of_16k_tokens_take_little_memory() -> None:
    """Where the weights of the two heads would take 2.1 GB, and one row of blocks 67 MB."""
    assert beyond(16_384, 2, 16) < 60


@pytest.mark.parametrize(
    ("heads", "size", "limit"),
    [
        pytest.param(1, 8, 70, marks=pytest.mark.full),
        pytest.param(8, 64, 500, marks=pytest.mark.exhaustive),
    ],
)
def test_statistics_of_128k_tokens_take_little_memory(heads: int, size: int, limit: float) -> None:
    """Where the weights of each head would take 69 GB."""
    assert beyond(131_072, heads, size) < limit


@pytest.mark.parametrize("name", [name for name, made in statistics.BY_NAME.items() if made.per_query])
def test_statistics_of_each_query(name: str) -> None:
    amap = drawn()[0]
    assert amap.statistics(name)[name].shape == amap.shape[:3]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("b", "h", "g", "t"), [(1, 2, 2, 40), (3, 4, 2, 70), (2, 2, 1, 2)])
def test_repeated_tokens_of_a_batch_of_texts(causal: bool, b: int, h: int, g: int, t: int) -> None:
    """Different texts are sorted by token together; no weight crosses from one to another."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(b, n, t, 16, generator=generator, dtype=torch.float64) for n in (h, g))
    ids = torch.randint(-3, 9, (b, t), generator=generator)
    mask = mh.Causal() if causal else None
    _, amap = mh.attention_with_map(q, k, k, mask=mask)
    same = ids[:, :, None] == ids[:, None, :]  # [b, t, t]
    earlier = torch.ones(t, t).tril(-1).bool()
    after = torch.zeros_like(same)
    after[:, :, 1:] = (same & earlier)[:, :, :-1]
    expected = {
        mh.SameToken(ids) & ~mh.Diagonal(0): same & ~torch.eye(t).bool(),
        mh.SameToken(ids) & mh.Causal() & ~mh.Diagonal(0): same & earlier,
        mh.AfterSameToken(ids): after,
    }
    for inside, keep in expected.items():
        keep = keep & (earlier | torch.eye(t).bool()) if causal else keep
        total, has_keys = amap.masses(inside)
        wanted = (amap.dense() * keep[:, None]).sum(-1)
        torch.testing.assert_close(total, wanted, rtol=0, atol=1e-14)
        assert torch.equal(has_keys, keep.any(-1)[:, None].expand(b, h, t))
