"""The map: any tile is the dense matrix's tile, statistics against brute force, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manyheads as mh
from manyheads import measures
from manyheads.kernels import chunked
from manyheads.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")

B, H, G, T, S, D = 2, 4, 2, 6, 9, 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "BLOCK", 1)


def everything(kind: str) -> dict[str, Any]:
    """Arguments with one part or all of them, in float64."""
    gen = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=gen)

    parts: dict[str, dict[str, Any]] = {
        "bare": {},
        "mask": {"mask": mh.Causal() & mh.Lengths(torch.tensor([9, 5]))},
        "keep": {"mask": mh.Keep(torch.rand(B, 1, T, S, generator=gen) < 0.6)},
        "offsets": {"mask": mh.Causal(), "offset": torch.tensor([-2, 4]), "bias": mh.ALiBi(4)},
        "relative": {"bias": mh.Relative(normal(4, 5))},
        "dense": {"bias": mh.Dense(normal(B, 1, T, S)), "softcap": 0.7},
        "sink": {"sink": normal(4), "scale": -0.4},
        "all": {
            "mask": mh.Window(left=3) & mh.Documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])),
            "bias": mh.Dense(normal(4, T, 1)),
            "softcap": 2.0,
            "sink": normal(4),
            "offset": torch.tensor([1, 3]),
        },
    }
    return parts[kind]


KINDS = ("bare", "mask", "keep", "offsets", "relative", "dense", "sink", "all")


def one(
    kind: str = "all", kernel: str = "chunked", dtype: torch.dtype = torch.float64
) -> tuple[mh.AttentionMap, Tensor]:
    """A map, and the same weights from the reference kernel."""
    from manyheads.kernels import reference
    from manyheads.problem import Problem

    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, m, D, dtype=torch.float64).to(dtype) for n, m in ((H, T), (G, S), (G, S)))
    amap = mh.attention_with_map(q, k, v, **everything(kind), kernel=kernel)[1]
    weights, _ = reference.weights(Problem.of(q, k, v, **everything(kind)))
    return amap, weights


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


# -- tiles -------------------------------------------------------------------------------------------

INDICES: list[Any] = [
    (),
    (...,),
    (0,),
    (-1, 2),
    (slice(None), -4),
    (0, 1, 2, 3),
    (-2, -1, -6, -9),
    (1, slice(1, 3), 2),
    (0, 0, slice(None, None, 2), slice(1, 8, 3)),
    (0, 0, slice(None, None, -1), slice(7, 2, -2)),
    (0, 3, slice(-3, None), slice(None, -5)),
    (0, 3, slice(4, 2), slice(None)),
    (0, 3, slice(100), slice(-100, 100)),
    (..., 4),
    (..., slice(2, 4)),
    (1, ..., 0),
    (1, ..., slice(None, None, -1), -1),
    (..., 1, 2, 3, 4),
    (slice(None, None, -1), slice(None, None, -2)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_is_the_matrixs_tile(kind: str, index: Any) -> None:
    amap, weights = one(kind)
    expected = weights.numpy()[tuple(part for part in index)]  # numpy knows negative steps
    got = amap[index]
    assert got.shape == expected.shape
    close(got, torch.from_numpy(np.array(expected)))


@pytest.mark.parametrize("kind", KINDS)
def test_index_tensors_pick_rows_times_columns(kind: str) -> None:
    amap, weights = one(kind)
    rows, cols = torch.tensor([5, 0, -1, 0]), torch.tensor([8, 2, -9])
    close(amap[0, 1, rows, cols], weights[0, 1][rows][:, cols])
    close(amap[:, 1, rows, cols], weights[:, 1][:, rows][..., cols])
    close(
        amap[torch.tensor([1, 0, 1]), torch.tensor([2]), rows, 3],
        weights[[1, 0, 1]][:, [2]][:, :, rows][..., 3],
    )
    close(amap[0, 1, [5, 0], range(3)], weights[0, 1][[5, 0]][:, :3])
    close(amap[0, 1, np.array([5, 0]), np.int64(2)], weights[0, 1][[5, 0], 2])
    close(amap[torch.tensor(1), torch.tensor(-1)], weights[1, -1])
    assert amap[0, 0, torch.tensor([], dtype=torch.int64)].shape == (0, S)
    assert amap[0, 0, []].shape == (0, S)
    some = torch.tensor([True, False, True, False, False, True])
    close(amap[0, 0, some], weights[0, 0][some])
    close(amap[0, 0, rows.to(torch.int32)], weights[0, 0][rows])


@given(data=st.data())
def test_any_index(data: st.DataObject) -> None:
    amap, weights = one("all")
    picks, expected = [], weights
    axis = 0
    for size in (B, H, T, S):
        kind = data.draw(st.sampled_from(["int", "slice", "tensor"]))
        if kind == "int":
            n = data.draw(st.integers(-size, size - 1))
            picks.append(n)
            expected = expected.select(axis, n)
            continue
        if kind == "slice":
            pick = data.draw(st.slices(size))
            chosen = list(range(size))[pick]
        else:
            chosen = data.draw(st.lists(st.integers(-size, size - 1), max_size=4))
            pick = torch.tensor(chosen, dtype=torch.int64)
        picks.append(pick)
        expected = expected.index_select(axis, torch.tensor([n % size for n in chosen], dtype=torch.int64))
        axis += 1
    close(amap[tuple(picks)], expected)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ((2,), ["batch entry", "2", "b = 2"]),
        ((0, 4), ["head", "4", "h = 4"]),
        ((0, -5), ["head", "-5", "h = 4"]),
        ((0, 0, 6), ["query", "6", "t = 6"]),
        ((0, 0, 0, 9), ["key", "9", "s = 9"]),
        ((0, 0, torch.tensor([0, 6])), ["query", "t = 6"]),
        ((0, 0, 0, 0, 0), ["four", "5"]),
        ((..., 0, ...), ["four"]),
        ((0, 0, torch.zeros(2, 2).long()), ["t"]),
        ((0, 0, 0.5), ["t", "0.5"]),
        ((0, 0, None), ["t", "None"]),
        ((0, 0, "a"), ["t", "'a'"]),
        ((True,), ["b", "True"]),
        ((0, 0, torch.tensor([True, False])), ["t", "[6]", "[2]"]),
    ],
)
def test_a_bad_index_says_what_came(index: Any, words: list[str]) -> None:
    amap, _ = one("bare")
    with pytest.raises(IndexError) as caught:
        amap[index]
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shape_and_the_matrix() -> None:
    amap, weights = one("all")
    assert amap.shape == (B, H, T, S) == tuple(weights.shape)
    close(amap.dense(), weights)
    assert not amap.dense().requires_grad
    assert repr(amap).startswith("AttentionMap([b=2, h=4, t=6, s=9]")


@pytest.mark.parametrize("kernel", ["reference", "chunked", "sdpa", "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_sum_to_one_in_every_dtype(dtype: torch.dtype, kernel: str) -> None:
    amap, _ = one("mask", kernel, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert amap.dense().dtype == amap.lse.dtype == wide
    total = amap.dense().sum(-1)
    seen = amap.lse > -math.inf
    assert ((total[seen] - 1).abs() < 8 * torch.finfo(wide).eps).all()
    assert not total[~seen].any()


def test_dense_refuses_what_is_too_large() -> None:
    q, k = torch.zeros(1, 1, 1, 4).expand(8, 8, 5000, 4), torch.zeros(1, 1, 1, 4).expand(8, 8, 7000, 4)
    from manyheads.maps import AttentionMap
    from manyheads.problem import Problem

    amap = AttentionMap.of(Problem.of(q, k, k), torch.zeros(8, 8, 5000))
    with pytest.raises(ValueError, match=r"8\.96 GB.*max_bytes is 2\.15 GB") as caught:
        amap.dense()
    assert "[8, 8, 5000, 7000]" in str(caught.value)
    small, weights = one("all")
    with pytest.raises(ValueError, match="max_bytes"):
        small.dense(max_bytes=B * H * T * S * 8 - 1)
    close(small.dense(max_bytes=B * H * T * S * 8), weights)


# -- what the map holds ------------------------------------------------------------------------------


def test_a_map_holds_no_graph_and_no_values() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    table = torch.zeros(2, 3, requires_grad=True)
    sink = torch.zeros(2, requires_grad=True)
    for kernel in ("reference", "chunked", "auto"):
        _, amap = mh.attention_with_map(q, k, v, bias=mh.Relative(table), sink=sink, kernel=kernel)
        for x in (amap.dense(), amap.lse, amap[0, 0], amap.mass(mh.Causal()), amap.entropy()):
            assert not x.requires_grad
            assert x.grad_fn is None
        held = [amap.problem.q, amap.problem.k, amap.problem.sink, *amap.problem.bias.tensors()]  # type: ignore[union-attr]
        assert not any(x.requires_grad for x in held)
        assert (
            amap.problem.v.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
            or amap.problem.v.numel() == 0
        )


@pytest.mark.parametrize("what", ["q", "k", "slice of q", "bias", "mask"])
@pytest.mark.parametrize("read", ["tile", "dense", "mass", "entropy", "under"])
def test_a_map_is_not_read_after_a_change_in_place(what: str, read: str) -> None:
    """Never another quantity in their place: weights that aren't those of the call are an error."""
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    table, keep = torch.zeros(2, 3), torch.ones(5, 5).tril() > 0
    _, amap = mh.attention_with_map(q, k, v, bias=mh.Relative(table), mask=mh.Keep(keep))
    reads = {
        "tile": lambda: amap[0, 0, :2, :3],
        "dense": amap.dense,
        "mass": lambda: amap.mass(mh.Causal()),
        "entropy": amap.entropy,
        "under": lambda: amap.under(None),
    }
    reads[read]()
    changes = {
        "q": lambda: q.add_(1),
        "k": lambda: k.mul_(2),
        "slice of q": lambda: q[:, :, 2].zero_(),
        "bias": lambda: table.add_(1),
        "mask": lambda: keep.fill_(True),
    }
    changes[what]()
    with pytest.raises(RuntimeError, match="in place"):
        reads[read]()


def test_changing_v_or_the_output_does_not_matter() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    out, amap = mh.attention_with_map(q, k, v)
    before = amap.dense()
    v.zero_()
    out.zero_()
    assert torch.equal(amap.dense(), before)


def test_a_deep_copy_is_read_on_its_own() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    q.add_(1)
    _, amap = mh.attention_with_map(q, k, v)
    other, before = copy.deepcopy(amap), amap.dense()
    q.add_(1)
    assert torch.equal(other.dense(), before)


def test_maps_of_inference_mode_are_read_outside_it() -> None:
    with torch.inference_mode():
        q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
        _, amap = mh.attention_with_map(q, k, v, mask=mh.Causal())
    torch.testing.assert_close(amap.dense().sum(-1), torch.ones(1, 2, 5))
    assert amap.mass(mh.Diagonal(0)).shape == (1, 2, 5)


# -- mass --------------------------------------------------------------------------------------------

INSIDE: dict[str, Any] = {
    "full": mh.Full(),
    "previous": mh.Diagonal(-1),
    "window": mh.Window(left=1, right=1),
    "keys": mh.Keys([0, 4]),
    "nothing": mh.Keys([]),
    "same": mh.SameToken(torch.tensor([0, 1, 0, 1, 2, 2, 0, 1, 1])) & mh.Causal() & ~mh.Diagonal(0),
    "heads": mh.Keep(torch.arange(H * T * S).reshape(1, H, T, S) % 3 == 0),
    "lengths": mh.Lengths(torch.tensor([2, 8])),
    "left": mh.Lengths(3, left=True),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_mass_is_the_weight_inside(kind: str, inside: str) -> None:
    amap, weights = one(kind)
    mask = INSIDE[inside]
    place = everything(kind).get("offset", S - T)
    n = amap.problem.shape
    bound = mask.bind(place, S)
    keep = torch.as_tensor(bound.keep(*amap.problem.at(slice(None), slice(None)))).expand(B, H, T, S)
    assert (n.b, n.h, n.t, n.s) == (B, H, T, S)
    mass = amap.mass(mask)
    close(mass, torch.where(keep, weights, 0).sum(-1))
    visible = weights > 0
    mean = amap.mass(mask, mean=True)
    for b, h in itertools.product(range(B), range(H)):
        could = [row for row in range(T) if (keep[b, h, row] & visible[b, h, row]).any()]
        expected = sum(float(mass[b, h, row]) for row in could) / len(could) if could else 0.0
        assert float(mean[b, h]) == pytest.approx(expected, abs=1e-12)


def test_mass_counts_a_key_whose_weight_underflows_as_visible() -> None:
    """Visible is what the mask says, not what is above zero."""
    q = torch.tensor([[[[1.0]], [[0.0]]]])  # one query a head
    k = torch.tensor([[[[-2000.0], [0.0]]]])
    _, amap = mh.attention_with_map(q, k, k, scale=1.0)
    assert amap[0, 0, 0].tolist() == [0.0, 1.0]
    assert amap.mass(mh.Keys([0]), mean=True).tolist() == [[0.0, 0.5]]


def test_mass_takes_masks_only() -> None:
    amap, _ = one("bare")
    with pytest.raises(TypeError, match="Full"):
        amap.mass(None)
    with pytest.raises(TypeError, match="Keep"):
        amap.mass(torch.ones(T, S) > 0)
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        amap.mass(mh.Keep(torch.ones(3, 3) > 0))


# -- what if -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_under_another_mask(kind: str) -> None:
    amap, _ = one(kind)
    q, k = amap.problem.q, amap.problem.k
    v = torch.zeros(B, G, S, 1, dtype=torch.float64)
    for mask in (None, mh.Causal(), mh.Keys([])):
        _, expected = mh.attention_with_map(
            q, k, v, **(everything(kind) | {"mask": mask}), kernel="reference"
        )
        other = amap.under(mask)
        close(other.dense(), expected.dense())
        close(other.lse, expected.lse)
        close(other.under(everything(kind).get("mask")).dense(), amap.dense())


# -- entropy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_in_nats(kind: str) -> None:
    amap, weights = one(kind)
    close(amap.entropy(), -torch.where(weights > 0, weights * weights.clamp(min=1e-300).log(), 0).sum(-1))


def test_entropy_of_a_uniform_row() -> None:
    q = torch.zeros(1, 1, 4, 2)
    _, amap = mh.attention_with_map(q, q, q, mask=mh.Causal())
    torch.testing.assert_close(amap.entropy()[0, 0], torch.arange(1.0, 5.0).log())


# -- measures ----------------------------------------------------------------------------------------


def test_measures_are_the_papers_definitions() -> None:
    """Each measure from the dense weights, in plain loops."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor([[5, 6, 5, 6, 7, 5, 5], [1, 1, 2, 3, 2, 1, 3]])
    _, amap = mh.attention_with_map(q, k, v, mask=mh.Causal())
    w = amap.dense()

    def mean(seen: Any) -> Tensor:
        found = torch.zeros(2, 3, dtype=torch.float64)
        for b in range(2):
            rows = [(i, [j for j in range(i + 1) if seen(b, i, j)]) for i in range(7)]
            rows = [(i, js) for i, js in rows if js]
            for i, js in rows:
                found[b] += w[b, :, i, js].sum(-1) / len(rows)
        return found

    close(measures.previous_token(amap), mean(lambda b, i, j: j == i - 1))
    close(measures.current_token(amap), mean(lambda b, i, j: j == i))
    close(measures.first_token(amap), mean(lambda b, i, j: j == 0))
    close(measures.duplicate_token(amap, ids), mean(lambda b, i, j: j < i and ids[b, j] == ids[b, i]))
    close(measures.induction(amap, ids), mean(lambda b, i, j: j >= 1 and ids[b, j - 1] == ids[b, i]))
    close(measures.local(amap, 2), mean(lambda b, i, j: abs(i - j) <= 2))
    assert measures.induction(amap, ids).shape == (2, 3)


def test_the_first_token_is_the_first_that_is_visible() -> None:
    """Padded on the left, or packed: the sink isn't column 0."""
    q, k, v = (torch.randn(2, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    mask = mh.Causal() & mh.Lengths(torch.tensor([4, 6]), left=True)
    _, amap = mh.attention_with_map(q, k, v, mask=mask)
    w = amap.dense()
    close(measures.first_token(amap)[0], w[0, :, 2:, 2].mean(-1))
    close(measures.first_token(amap)[1], w[1, :, :, 0].mean(-1))
    packed = mh.Causal() & mh.Documents(torch.tensor([0, 0, 1, 1, 1, 2]))
    _, amap = mh.attention_with_map(q, k, v, mask=packed)
    w = amap.dense()
    first = torch.tensor([0, 0, 2, 2, 2, 5])
    close(measures.first_token(amap), w[:, :, torch.arange(6), first].mean(-1))
    offset = torch.tensor([2, -1])
    _, amap = mh.attention_with_map(q, k, v, mask=mh.Window(left=1, right=0), offset=offset)
    w = amap.dense()
    close(measures.first_token(amap)[0], w[0, :, torch.arange(5), torch.arange(1, 6)].mean(-1))
    rows = w[1, :, 1:, :][:, torch.arange(5), [0, 0, 1, 2, 3]]
    close(measures.first_token(amap)[1], rows.mean(-1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 2, 3, 40, 257])
def test_the_same_tokens_are_found_by_sorting_them(causal: bool, t: int) -> None:
    ids = torch.randint(0, 5, (t,))
    q, k = 2 * torch.randn(2, 4, t, 8), torch.randn(2, 2, t, 8)
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal() if causal else None)[1]
    weights, (i, j) = amap.dense().double(), (torch.arange(t)[:, None], torch.arange(t))
    same, after = (ids[:, None] == ids) & (i != j), (ids[:, None] == ids.roll(1)) & (j >= 1) & (j <= i)
    seen = (j <= i) | torch.tensor(not causal)
    masks = {
        mh.SameToken(ids) & ~mh.Diagonal(0): same & seen,
        mh.SameToken(ids) & mh.Causal() & ~mh.Diagonal(0): same & (j <= i),
        mh.AfterSameToken(ids): after,
        mh.SameToken(ids): (same | (i == j)) & seen,  # which goes by tiles
    }
    for mask, inside in masks.items():
        total, could = amap.masses(mask)
        torch.testing.assert_close(total.double(), (weights * inside).sum(-1), atol=1e-5, rtol=0)
        assert torch.equal(could, inside.any(-1).expand_as(could))


def test_an_ideal_induction_head_scores_one() -> None:
    """Weights put by hand where the definition looks, by a Dense bias of −inf elsewhere."""
    ids = torch.randperm(50)[:12].repeat(2)
    seen = torch.zeros(24, 24, dtype=torch.bool)
    seen[torch.arange(12, 24), torch.arange(1, 13)] = True
    seen[:12, 0] = True
    q = torch.zeros(1, 1, 24, 4)
    _, amap = mh.attention_with_map(q, q, q, mask=mh.Keep(seen))
    torch.testing.assert_close(measures.induction(amap, ids), torch.ones(1, 1))


# -- the same map, otherwise -------------------------------------------------------------------------


def hiding(kind: str) -> dict[str, Any]:
    """What differs between batch entries or heads, in every way that a mask, a bias or an offset can."""
    gen = torch.Generator().manual_seed(2)
    cells = torch.rand(B, H, T, S, generator=gen)
    table = torch.randn(B, H, T, S, generator=gen, dtype=torch.float64)
    ids = torch.randint(3, (B, S), generator=gen)
    rule = mh.Rule(lambda b, h, i, j: (i - j + b + 2 * h) % 3 != 0)
    each = torch.tensor([2, -3])
    parts: dict[str, dict[str, Any]] = {
        "bias that hides": {"bias": mh.Dense(table.masked_fill(cells < 0.3, -math.inf))},
        "bias of rows, each": {"bias": mh.Dense(table[:, :, :, :1]), "offset": each},
        "relative, each": {"bias": mh.Relative(table[0, :, 0, :5]), "offset": each},
        "keep": {"mask": mh.Keep(cells < 0.6), "offset": each},
        "drop of heads": {"mask": ~mh.Drop(cells[:1, :, :, :1] < 0.6)},
        "rule": {"mask": rule | mh.Diagonal(0), "offset": each},
        "lengths": {
            "mask": mh.Lengths(torch.tensor([9, 5]), left=True) & ~mh.Prefix(torch.tensor([1, 6])),
            "offset": 0,
        },
        "ids": {"mask": mh.Documents(ids, queries=ids[:, :T]) | mh.AfterSameToken(ids), "offset": each},
        "sink": {"sink": table[0, :, 0, 0], "mask": mh.Causal(), "offset": each},
    }
    return parts[kind]


HIDING = ("bias that hides", "bias of rows, each", "relative, each", "keep", "drop of heads", "rule",
          "lengths", "ids", "sink")  # fmt: skip
PICKS: list[tuple[Any, Any]] = [
    (None, None),
    (1, 2),
    ([1], [3, 0]),
    (-1, slice(None, None, 2)),
    ([1, 0, 1], [2, 2, 1]),
    (None, torch.tensor([False, True, True, False])),
    ([], [0]),
    (0, []),
]


def chosen(index: Any, size: int) -> list[int]:
    """What an index picks, as a list."""
    if index is None:
        return list(range(size))
    return np.atleast_1d(np.arange(size)[index.numpy() if isinstance(index, Tensor) else index]).tolist()


def some(kind: str) -> mh.AttentionMap:
    gen = torch.Generator().manual_seed(4)
    q, k = (torch.randn(B, n, m, D, dtype=torch.float64, generator=gen) for n, m in ((H, T), (G, S)))
    return mh.AttentionMap.of(Problem.of(q, k, k, **hiding(kind)))


@pytest.mark.parametrize("known", [True, False], ids=["lse known", "lse unknown"])
@pytest.mark.parametrize("pick", PICKS, ids=str)
@pytest.mark.parametrize("kind", HIDING)
def test_only_some_is_a_slice_of_the_matrix(kind: str, pick: tuple[Any, Any], known: bool) -> None:
    """Also under another mask, and when some are picked from those again."""
    amap = some(kind)
    if known:
        assert amap.lse.shape == (B, H, T)
    part = amap.only(*pick)
    b, h = (np.array(chosen(index, size), dtype=int) for index, size in zip(pick, (B, H), strict=True))
    assert part.shape == (len(b), len(h), T, S)

    def sliced(x: Tensor) -> Tensor:
        return x[b][:, h]

    close(part.dense(), sliced(amap.dense()))
    mask = mh.Causal() & mh.Keys([1, 2, 5, 8])
    close(part.under(mask).dense(), sliced(amap.under(mask).dense()))
    close(part.mass(mask, mean=True), sliced(amap.mass(mask, mean=True)))
    close(part.received(2, "age"), sliced(amap.received(2, "age")))
    for name in ("entropy", "distance", "row_max", "logits_max", "sink_weight"):
        close(getattr(part, name)(), sliced(getattr(amap, name)()))
    close(part.mass(part.first_key()), sliced(amap.mass(amap.first_key())))
    if len(b) and len(h):
        again = part.only(len(b) - 1, [0, -1])
        close(again.dense(), sliced(amap.dense())[[len(b) - 1]][:, [0, -1]])


def test_only_remembers_what_it_is() -> None:
    amap = some("keep").labelled([list("abcdefghi"), list("ABCDEFGHI")])
    part = amap.only([1, 0, 1], [3, 1])
    assert part.tokens == (tuple("ABCDEFGHI"), tuple("abcdefghi"), tuple("ABCDEFGHI"))
    assert part.heads == (3, 1)
    assert part.only(0, 1).heads == (1,)
    assert amap.heads == (0, 1, 2, 3)
    assert amap.labelled(list("abcdefghi")).only(1).tokens == tuple("abcdefghi")


@pytest.mark.parametrize(
    ("pick", "words"),
    [
        ({"heads": 4}, ["head", "4", "h = 4"]),
        ({"batch": [0, -3]}, ["batch entry", "b = 2"]),
        ({"heads": 0.5}, ["h", "0.5"]),
        ({"heads": "01"}, ["h", "'01'"]),
        ({"heads": True}, ["h", "True"]),
        ({"heads": [0, True]}, ["h", "True"]),
        ({"heads": [[0]]}, ["h", "[[0]]"]),
        ({"batch": torch.tensor([True])}, ["b", "[2]", "[1]"]),
    ],
    ids=str,
)
def test_only_says_what_it_can_not_pick(pick: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(IndexError) as caught:
        some("keep").only(**pick)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_stored_in_another_dtype(kind: str, dtype: torch.dtype) -> None:
    """It is the map of what is stored: rows still sum to one, and nothing remains of the old lse."""
    amap, _ = one(kind)
    stored = amap.to(dtype)
    assert stored.problem.q.dtype == stored.problem.k.dtype == dtype
    assert stored.shape == amap.shape
    weights = stored.dense()
    assert weights.dtype == stored.entropy().dtype == torch.float32
    full = weights.sum(-1) + stored.sink_weight()
    assert ((full - (stored.lse > -math.inf).float()).abs() < 1e-5).all()
    p = amap.problem
    rest = everything(kind)
    fresh = mh.AttentionMap.of(Problem.of(p.q.to(dtype), p.k.to(dtype), p.k.to(dtype), **rest))
    torch.testing.assert_close(weights, fresh.dense(), rtol=0, atol=0)
    torch.testing.assert_close(weights.double(), amap.dense(), rtol=0, atol=0.05)
    back = stored.to(torch.float64)
    assert back.lse.dtype == torch.float64
    torch.testing.assert_close(back.dense().float(), weights, rtol=1e-5, atol=1e-6)
    assert amap.to(torch.float64) is amap


def test_on_a_device() -> None:
    amap = some("ids").labelled(list("abcdefghi"))
    before = amap.dense()
    for place in ("cpu", torch.device("cpu")):
        moved = amap.to(place)
        assert torch.equal(moved.lse, amap.lse)
        assert torch.equal(moved.dense(), before)
        assert moved.tokens == amap.tokens


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        ("meta", ValueError, ["meta", "with memory"]),
        ("float16", ValueError, ["float16", "device"]),
        ("nowhere", ValueError, ["nowhere", "device"]),
        (None, ValueError, ["None", "device"]),
        (torch.int64, TypeError, ["float32", "int64"]),
        (torch.float8_e5m2, TypeError, ["float32", "float8"]),
        (torch.complex64, TypeError, ["float32", "complex64"]),
    ],
    ids=str,
)
def test_where_a_map_can_not_go(place: Any, kind: type[Exception], words: list[str]) -> None:
    amap, _ = one("bare")
    with pytest.raises(kind) as caught:
        amap.to(place)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_half_precision_can_not_hold_is_refused() -> None:
    q, k = torch.full((1, 1, 3, 2), 1e5), torch.zeros(1, 1, 3, 2)
    amap = mh.AttentionMap.of(Problem.of(q, k, k))
    with pytest.raises(ValueError, match="float16"):
        amap.to(torch.float16)
    assert amap.to(torch.bfloat16).entropy().isfinite().all()
    # What was no number before is none afterwards, and that is no fault of the dtype.
    lost = mh.AttentionMap.of(Problem.of(q * math.nan, k, k))
    assert lost.to(torch.float16).entropy().isnan().all()


# -- labels ------------------------------------------------------------------------------------------


def test_labels_of_the_keys() -> None:
    amap, weights = one("bare")
    assert amap.tokens is None
    shared = amap.labelled(list("abcdefghi"))
    assert shared.tokens == tuple("abcdefghi")
    each = shared.labelled([list("abcdefghi"), tuple("ABCDEFGHI")])
    assert each.tokens == (tuple("abcdefghi"), tuple("ABCDEFGHI"))
    assert each.labelled(None).tokens is None
    for labelled in (shared, each):
        close(labelled.dense(), weights)
        for other in (labelled.under(mh.Causal()), labelled.to(torch.float32), copy.deepcopy(labelled)):
            assert other.tokens == labelled.tokens


@pytest.mark.parametrize(
    ("tokens", "kind", "words"),
    [
        ("abcdefghi", TypeError, ["s = 9", "str"]),
        (b"abcdefghi", TypeError, ["strings", "bytes"]),
        (9, TypeError, ["s = 9", "int"]),
        (torch.arange(9), TypeError, ["s = 9", "Tensor"]),
        (np.array(list("abcdefghi")), TypeError, ["s = 9", "ndarray"]),
        ({"a": 1}, TypeError, ["s = 9", "dict"]),
        (list(range(9)), TypeError, ["strings", "0"]),
        ([1, 2], TypeError, ["strings", "1"]),
        ([None, None], TypeError, ["strings", "None"]),
        (["a", "b", 3, *"defghi"], TypeError, ["strings", "3"]),
        (["abcdefghi", "abcdefghi"], ValueError, ["9", "2"]),
        ([list("abcdefghi"), "abcdefghi"], TypeError, ["str"]),
        (list("abcdefgh"), ValueError, ["s = 9", "8"]),
        ([], ValueError, ["s = 9", "0"]),
        ([list("abcdefghi")], ValueError, ["b = 2", "1"]),
        ([list("abcdefghi")] * 3, ValueError, ["b = 2", "3"]),
        ([list("abcdefghi"), list("abc")], ValueError, ["s = 9", "3"]),
        ([list("abcdefghi"), [*"abcdefgh", 0]], TypeError, ["strings", "0"]),
    ],
    ids=str,
)
def test_labels_that_do_not_fit(tokens: Any, kind: type[Exception], words: list[str]) -> None:
    amap, _ = one("bare")
    for label in (amap.labelled, lambda tokens: mh.AttentionMap.of(amap.problem, tokens=tokens)):
        with pytest.raises(kind) as caught:
            label(tokens)
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)


# -- copies, changes, and what is held ---------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["lse known", "lse unknown"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda amap: pickle.loads(pickle.dumps(amap))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_stands_on_its_own(kind: str, copied: Any, known: bool) -> None:
    q, k = torch.randn(B, H, T, D, dtype=torch.float64), torch.randn(B, G, S, D, dtype=torch.float64)
    q.mul_(2)  # tensors that were changed before the map was made
    k.mul_(2)
    amap = mh.AttentionMap.of(Problem.of(q, k, k, **everything(kind)), provenance={"layer": "a"})
    amap = amap.labelled(list("abcdefghi"))
    expected = mh.AttentionMap.of(amap.problem).dense()
    if known:
        assert amap.entropy().shape == (B, H, T)
    other = copied(amap)
    assert other.knows_lse == known
    assert other.tokens == amap.tokens
    assert other.provenance == {"layer": "a"}
    q.zero_()
    assert torch.equal(other.dense(), expected)
    with pytest.raises(RuntimeError, match="in place"):
        amap.dense()
    with pytest.raises(RuntimeError, match="in place"):
        copied(amap)


@pytest.mark.parametrize("known", [True, False], ids=["lse known", "lse unknown"])
@pytest.mark.parametrize("what", ["q", "k", "sink", "offset", "bias", "mask", "queries"])
def test_no_statistic_is_read_after_a_change_in_place(what: str, known: bool) -> None:
    """Nor is a log-sum-exp that wasn't known yet computed of what was changed."""
    parts = {
        "q": torch.randn(2, 2, 5, 4),
        "k": torch.randn(2, 2, 5, 4),
        "sink": torch.zeros(2),
        "offset": torch.tensor([0, 1]),
        "bias": torch.zeros(2, 3),
        "mask": torch.ones(5, 5).tril() > 0,
        "queries": torch.zeros(5, dtype=torch.int64),
    }
    mask = mh.Keep(parts["mask"]) & mh.Documents(torch.zeros(5).long(), queries=parts["queries"])
    q, k, v = parts["q"], parts["k"], torch.randn(2, 2, 5, 3)
    rest = {"bias": mh.Relative(parts["bias"]), "sink": parts["sink"], "offset": parts["offset"]}
    amap = mh.AttentionMap.of(Problem.of(q, k, v, mask=mask, **rest))
    other = mh.AttentionMap.of(Problem.of(q.clone(), k.clone(), v))
    if known:
        assert amap.lse.shape == (2, 2, 5)
    parts[what].zero_() if what not in ("sink", "bias", "queries") else parts[what].add_(1)
    reads: dict[str, Any] = {
        "tile": lambda: amap[0, 0],
        "dense": amap.dense,
        "entropy": amap.entropy,
        "distance": amap.distance,
        "row_max": amap.row_max,
        "received": amap.received,
        "top": lambda: amap.top(2),
        "mass": lambda: amap.mass(mh.Full()),
        "pooled": lambda: amap.pooled(2, 2),
        "value_norms": lambda: amap.value_norms(v, torch.randn(4, 6)),
        "logits_max": amap.logits_max,
        "sink_weight": amap.sink_weight,
        "divergence": amap.divergence,
        "divergence of": lambda: amap.divergence(other),
        "divergence to": lambda: other.divergence(amap),
        "statistics": lambda: amap.statistics("entropy"),
        "first_key": amap.first_key,
        "previous_token": lambda: measures.previous_token(amap),
        "rollout": lambda: measures.rollout([other, amap], 0),
        "only": lambda: amap.only(0),
        "under": lambda: amap.under(None),
        "to": lambda: amap.to(torch.float16),
        "labelled": lambda: amap.labelled(list("abcde")),
    }
    if not known:
        reads["lse"] = lambda: amap.lse
    for read in reads.values():
        with pytest.raises(RuntimeError, match="in place"):
            read()
    assert other.entropy().isfinite().all()


def test_a_map_tells_what_it_holds() -> None:
    q, k = torch.randn(2, 4, 100, 8), torch.randn(2, 2, 200, 8)
    amap = mh.AttentionMap.of(Problem.of(q, k, k, mask=mh.Causal()))
    assert amap.nbytes == q.nbytes + k.nbytes
    said = repr(amap)
    assert said.startswith("AttentionMap([b=2, h=4, t=100, s=200], mask=Causal()")
    assert "float32 on cpu" in said
    assert "51.2 kB" in said  # q and k
    assert "640 kB" in said  # the weights
    assert not amap.knows_lse, "looking at it costs nothing"
    amap.entropy()
    assert amap.nbytes == q.nbytes + k.nbytes + amap.lse.nbytes
    assert "tokens" not in said
    assert "tokens" in repr(amap.labelled(["x"] * 200))
    assert "\n" not in said
    half = amap.to(torch.float16)
    assert half.nbytes == (q.nbytes + k.nbytes) // 2
    assert "640 kB" in repr(half), "weights are float32 still"


@pytest.mark.parametrize("max_bytes", [1e9 + 0.5, "2 GB", None, True])
def test_max_bytes_is_a_number_of_bytes(max_bytes: Any) -> None:
    amap, _ = one("bare")
    with pytest.raises(TypeError, match="max_bytes") as caught:
        amap.dense(max_bytes=max_bytes)
    assert repr(max_bytes) in str(caught.value)


def test_a_map_is_made_of_a_problem() -> None:
    amap, _ = one("bare")
    for make, words in (
        (lambda: mh.AttentionMap.of(3), ["Problem", "int"]),
        (lambda: mh.AttentionMap.of(amap.problem, torch.zeros(2, 3)), ["[2, 4, 6]", "[2, 3]"]),
        (lambda: mh.AttentionMap.of(amap.problem, [0.0]), ["lse", "list"]),
        (lambda: mh.AttentionMap.of(amap.problem, provenance=["x"]), ["provenance", "list"]),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            make()
        for word in words:
            assert word in str(caught.value)


def test_a_map_keeps_no_graph_of_a_lazy_log_sum_exp() -> None:
    q, k = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 5, 4, requires_grad=True)
    sink, slopes = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    amap = mh.AttentionMap.of(Problem.of(q, k, k, sink=sink, bias=mh.ALiBi(slopes)))
    other = mh.AttentionMap.of(Problem.of(q, k, k))
    found = [amap.lse, *amap.statistics("entropy", "received", "sink_weight", top=2)["top"]]
    found += [amap.divergence(other), measures.rollout([amap, other], 0), amap.to(torch.float16).lse]
    found += [amap.value_norms(k, torch.randn(3, 8, requires_grad=True))]
    for x in found:
        assert not x.requires_grad
        assert x.grad_fn is None


# -- at length ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return made


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        ((0, 3, 99_999), 100_000),  # one row of weights
        ((0, 3, slice(50_000, 50_010), slice(40_000, 40_100)), 10_000),
        ((0, -1, -1, -1), 1000),
        ((0, slice(None), slice(7, 9), slice(0, 50)), 10_000),
        ((0, 3, torch.tensor([5, 99_000]), torch.tensor([1, 2])), 1000),
    ],
    ids=["row", "tile", "pair", "all heads", "tensors"],
)
@pytest.mark.parametrize("kind", ["bare", "masked"])
def test_a_tile_of_100_000_tokens_costs_a_tile(index: Any, numbers: int, kind: str) -> None:
    """No tensor is made that is as large as q, k, or the ids' square: a few times what is asked for."""
    from manyheads.maps import AttentionMap
    from manyheads.problem import Problem

    n = 100_000
    q, k = torch.zeros(1, 8, 1, 64).expand(1, 8, n, 64), torch.zeros(1, 2, 1, 64).expand(1, 2, n, 64)
    mask = (
        None
        if kind == "bare"
        else mh.Causal() & mh.Window(left=200_000) & mh.Documents(torch.zeros(n).long())
    )
    bias = None if kind == "bare" else mh.ALiBi(8)
    amap = AttentionMap.of(Problem.of(q, k, k, mask=mask, bias=bias), torch.zeros(1, 8, n))
    with Largest() as largest:
        amap[index]
    # A row needs its keys (25.6 MB); nothing needs all heads' queries (205 MB) or keys (51 MB).
    assert largest.bytes <= max(64 * 4 * numbers, 8 * 2 * n) + 10_000


@pytest.mark.full
def test_a_long_map_is_made_and_read_in_little_memory() -> None:
    """End to end in a fresh process: 40,000 tokens, whose weights would be 12.8 GB a head pair."""
    code = """
import resource, torch, manyheads as mh
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 2, 40_000, 16) for _ in range(3))
mh.attention_with_map(q[:, :, :300], k[:, :, :300], v[:, :, :300], mask=mh.Causal())[1][0, 0, 5]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
out, amap = mh.attention_with_map(q, k, v, mask=mh.Causal() & mh.Window(left=100), kernel="chunked")
tile = amap[0, 1, 39_990:, 39_000:]
assert torch.allclose(amap[0, 1, -1].sum(), torch.tensor(1.0))
assert amap.mass(mh.Diagonal(-1), mean=True).shape == (1, 2)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 80


def test_in_inference_mode_a_map_holds_numbers_of_its_own() -> None:
    """Nobody counts changes in place there, so a map that shared q could show what never was."""
    with torch.inference_mode():
        q = torch.randn(1, 2, 5, 4)
        _, amap = mh.attention_with_map(q, q.clone(), q, mask=mh.Causal())
        before = amap.dense()
        q.mul_(3)
        assert torch.equal(amap.dense(), before)
