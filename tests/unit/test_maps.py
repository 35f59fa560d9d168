"""The map: any tile is the dense matrix's tile, statistics against brute force, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manyheads as mh
from manyheads import measures
from manyheads.kernels import reference
from manyheads.problem import Problem
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("one_thread", "small_blocks")

B, H, G, T, S, D = 2, 4, 2, 6, 9, 8


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
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, m, D, dtype=torch.float64).to(dtype) for n, m in ((H, T), (G, S), (G, S)))
    amap = mh.attention_with_map(q, k, v, **everything(kind), kernel=kernel)[1]
    weights, _ = reference.weights(Problem.of(q, k, v, **everything(kind)))
    return amap, weights


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_index_tensors_pick_rows_times_columns() -> None:
    amap, weights = one()
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


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_tile_is_the_matrixs_tile(data: st.DataObject, kind: str) -> None:
    amap, weights = one(kind)
    picks, expected = [], weights
    axis = 0
    for size in (B, H, T, S):
        how = data.draw(st.sampled_from(["int", "slice", "tensor"]))
        if how == "int":
            n = data.draw(st.integers(-size, size - 1))
            picks.append(n)
            expected = expected.select(axis, n)
            continue
        if how == "slice":
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
    "index",
    [(), (...,), (0,), (-1, 2), (slice(None), -4), (0, 3, slice(100), slice(-100, 100)), (..., 4),
     (..., slice(2, 4)), (1, ..., 0), (1, ..., slice(None, None, -1), -1), (..., 1, 2, 3, 4)],
    ids=str,
)  # fmt: skip
def test_an_index_may_be_short_or_have_an_ellipsis(index: Any) -> None:
    amap, weights = one()
    expected = np.array(weights.numpy()[index])  # NumPy's negative steps
    assert amap[index].shape == expected.shape
    close(amap[index], torch.from_numpy(expected))


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
def test_an_invalid_index_raises(index: Any, words: list[str]) -> None:
    amap, _ = one("bare")
    with raises(IndexError, *words):
        amap[index]


def test_numpy_is_told_how_to_get_weights() -> None:
    _, amap = mh.attention_with_map(*(torch.randn(1, 2, 3, 4) for _ in range(3)))
    for convert in (np.asarray, np.array, lambda x: np.asarray(x, dtype=np.float32)):
        with pytest.raises(TypeError, match=r"map of \[1, 2, 3, 3\] weights, .* amap\[0, 0\]"):
            convert(amap)
    assert np.asarray(amap[0, 0]).shape == (3, 3)


def test_dense_refuses_what_is_too_large() -> None:
    q, k = torch.zeros(1, 1, 1, 4).expand(8, 8, 5000, 4), torch.zeros(1, 1, 1, 4).expand(8, 8, 7000, 4)
    amap = mh.AttentionMap.of(Problem.of(q, k, k), torch.zeros(8, 8, 5000))
    with raises(ValueError, "8.96 GB", "max_bytes is 2.15 GB", "[8, 8, 5000, 7000]"):
        amap.dense()
    small, weights = one("all")
    with pytest.raises(ValueError, match="max_bytes"):
        small.dense(max_bytes=B * H * T * S * 8 - 1)
    close(small.dense(max_bytes=B * H * T * S * 8), weights)


@pytest.mark.parametrize("kernel", ["reference", "chunked", "auto", None])
def test_a_map_holds_no_graph_and_no_values(kernel: str | None) -> None:
    """Also where its log-sum-exp is computed when it is first used."""
    q, k, v, table, sink, w_o = (
        torch.zeros(n, requires_grad=True) for n in [(1, 2, 5, 4)] * 3 + [(2, 3), (2,), (3, 8)]
    )
    rest = {"bias": mh.Relative(table), "sink": sink}
    if kernel is None:
        amap = mh.AttentionMap.of(Problem.of(q, k, v, **rest))
    else:
        amap = mh.attention_with_map(q, k, v, **rest, kernel=kernel)[1]
    other = mh.AttentionMap.of(Problem.of(q, k, k))
    results = [amap.lse, amap.dense(), amap[0, 0], amap.mass(mh.Causal()), amap.divergence(other)]
    results += amap.statistics("entropy", "received", "sink_weight", top=2)["top"]
    results += [measures.rollout([amap, other], 0), amap.to(torch.float16).lse, amap.value_norms(k, w_o)]
    problem = amap.problem
    for x in (*results, problem.q, problem.k, problem.sink, *problem.bias.tensors()):  # type: ignore[union-attr]
        assert not x.requires_grad
        assert x.grad_fn is None
    assert problem.v.numel() == 0


def test_changing_v_or_the_output_does_not_matter() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    out, amap = mh.attention_with_map(q, k, v)
    before = amap.dense()
    v.zero_()
    out.zero_()
    assert torch.equal(amap.dense(), before)


def test_maps_of_inference_mode_are_read_outside_it() -> None:
    with torch.inference_mode():
        q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
        _, amap = mh.attention_with_map(q, k, v, mask=mh.Causal())
    torch.testing.assert_close(amap.dense().sum(-1), torch.ones(1, 2, 5))
    assert amap.mass(mh.Diagonal(0)).shape == (1, 2, 5)


def test_mass_counts_a_key_whose_weight_underflows_as_visible() -> None:
    """Visible is what the mask says, not what is above zero."""
    q = torch.tensor([[[[1.0]], [[0.0]]]])  # one query a head
    k = torch.tensor([[[[-2000.0], [0.0]]]])
    _, amap = mh.attention_with_map(q, k, k, scale=1.0)
    assert amap[0, 0, 0].tolist() == [0.0, 1.0]
    assert amap.mass(mh.Keys([0]), mean=True).tolist() == [[0.0, 0.5]]


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


@pytest.mark.every(5)
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


def test_some_heads_keep_their_tokens_and_numbers() -> None:
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
def test_an_invalid_pick_raises(pick: dict[str, Any], words: list[str]) -> None:
    with raises(IndexError, *words):
        some("keep").only(**pick)


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
def test_an_invalid_device_or_dtype_raises(place: Any, kind: type[Exception], words: list[str]) -> None:
    amap, _ = one("bare")
    with raises(kind, *words):
        amap.to(place)


def test_numbers_beyond_float16_raise() -> None:
    q, k = torch.full((1, 1, 3, 2), 1e5), torch.zeros(1, 1, 3, 2)
    amap = mh.AttentionMap.of(Problem.of(q, k, k))
    with pytest.raises(ValueError, match="float16"):
        amap.to(torch.float16)
    assert amap.to(torch.bfloat16).entropy().isfinite().all()
    # What was no number before is none afterwards, and that is no fault of the dtype.
    lost = mh.AttentionMap.of(Problem.of(q * math.nan, k, k))
    assert lost.to(torch.float16).entropy().isnan().all()


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
def test_labels_that_do_not_fit_raise(tokens: Any, kind: type[Exception], words: list[str]) -> None:
    amap, _ = one("bare")
    for label in (amap.labelled, lambda tokens: mh.AttentionMap.of(amap.problem, tokens=tokens)):
        with raises(kind, *words):
            label(tokens)


@pytest.mark.parametrize("known", [True, False], ids=["lse known", "lse unknown"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda amap: pickle.loads(pickle.dumps(amap))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_independent(kind: str, copied: Any, known: bool) -> None:
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
@pytest.mark.parametrize("what", ["q", "a slice of q", "k", "sink", "offset", "bias", "mask", "queries"])
def test_no_statistic_is_read_after_a_change_in_place(what: str, known: bool) -> None:
    """Nor is a log-sum-exp computed from changed tensors."""
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
    if what == "a slice of q":
        q[:, :, 2].zero_()
    else:
        parts[what].add_(1) if what in ("sink", "bias", "queries") else parts[what].zero_()
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


def test_the_repr_and_size_of_a_map() -> None:
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


def test_related_maps_have_the_norms_of_the_values() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    norm = torch.rand(2, 2, 7)
    amap = mh.AttentionMap.of(Problem.of(q, k, k), value_norm=norm.clone().requires_grad_())
    bare = mh.AttentionMap.of(amap.problem)
    assert amap.nbytes == bare.nbytes + norm.nbytes
    related = (
        amap,
        amap.under(mh.Causal()),
        amap.compact(always=True),
        amap.to("cpu"),
        amap.to(torch.float16),
        amap.labelled(list("abcdefg")),
        copy.deepcopy(amap),
        pickle.loads(pickle.dumps(amap)),
    )
    for other in related:
        assert other.value_norm is not None
        assert not other.value_norm.requires_grad
        assert torch.equal(other.value_norm, norm)
    some = amap.only([1], [3, 0, 1]).value_norm
    assert some is not None
    assert torch.equal(some, norm[[1]][:, [1, 0, 0]])  # heads 0 and 1 use key head 0
    assert bare.only([1], [3]).value_norm is None
    fewer = Problem.of(q[:1], k[:1], k[:1])
    assert amap.again(fewer).value_norm is None


def test_norms_of_values_are_checked() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    problem = Problem.of(q, k, k)
    with pytest.raises(ValueError, match=r"value_norm to be \[b, g, s\] = \[2, 2, 7\], got \[2, 4, 7\]"):
        mh.AttentionMap.of(problem, value_norm=torch.rand(2, 4, 7))
    with pytest.raises(TypeError, match="value_norm to be a tensor of floats"):
        mh.AttentionMap.of(problem, value_norm=torch.ones(2, 2, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="move them together"):
        mh.AttentionMap.of(problem, value_norm=torch.rand(2, 2, 7, device="meta"))


@pytest.mark.parametrize("max_bytes", [1e9 + 0.5, "2 GB", None, True])
def test_max_bytes_is_a_number_of_bytes(max_bytes: Any) -> None:
    amap, _ = one("bare")
    with raises(TypeError, "max_bytes", repr(max_bytes)):
        amap.dense(max_bytes=max_bytes)


def test_a_map_is_made_of_a_problem() -> None:
    amap, _ = one("bare")
    for make, words in (
        (lambda: mh.AttentionMap.of(3), ["Problem", "int"]),
        (lambda: mh.AttentionMap.of(amap.problem, torch.zeros(2, 3)), ["[2, 4, 6]", "[2, 3]"]),
        (lambda: mh.AttentionMap.of(amap.problem, [0.0]), ["lse", "list"]),
        (lambda: mh.AttentionMap.of(amap.problem, provenance=["x"]), ["provenance", "list"]),
    ):
        with raises((TypeError, ValueError), *words):
            make()


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
    """No tensor is made that is as large as q, k, or the square of the ids."""
    n = 100_000
    q, k = torch.zeros(1, 8, 1, 64).expand(1, 8, n, 64), torch.zeros(1, 2, 1, 64).expand(1, 2, n, 64)
    mask, bias = None, None
    if kind == "masked":
        mask = mh.Causal() & mh.Window(left=200_000) & mh.Documents(torch.zeros(n).long())
        bias = mh.ALiBi(8)
    amap = mh.AttentionMap.of(Problem.of(q, k, k, mask=mask, bias=bias), torch.zeros(1, 8, n))
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


# -- other tools -----------------------------------------------------------------------------------


def labelled_map(tokens: object = None, t: int = 5, s: int = 5, **options: object) -> mh.AttentionMap:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, t, 8), torch.randn(2, 2, s, 8)
    return mh.attention_with_map(q, k, k, **options)[1].labelled(tokens)  # type: ignore[arg-type]


def test_a_tile_as_xarray_has_names() -> None:
    pytest.importorskip("xarray")
    amap = labelled_map(["a", "b", "c", "d", "e"], mask=mh.Causal())
    whole = amap.to_xarray()
    assert whole.dims == ("batch", "head", "query", "key")
    assert (whole.name, whole.attrs) == ("weight", {"mask": "Causal()"})
    np.testing.assert_array_equal(whole.values, amap.dense().numpy())
    assert whole.key_token.values.tolist() == whole.query_token.values.tolist() == list("abcde")
    tile = amap.to_xarray(1, 3, slice(-2, None), [4, 0])
    assert tile.dims == ("query", "key")
    assert (tile["batch"].item(), tile["head"].item()) == (1, 3)
    assert (tile["query"].values.tolist(), tile.key.values.tolist()) == ([3, 4], [4, 0])
    assert (tile.query_token.values.tolist(), tile.key_token.values.tolist()) == (["d", "e"], ["e", "a"])
    assert tile.sel(query=4, key=0).item() == amap[1, 3, 4, 0].item()
    one = amap.to_xarray(0, 0, 1, 1)
    assert (one.dims, one.key_token.item()) == ((), "b")
    selected = amap.only(heads=[2, 3]).to_xarray(0, -1)
    assert selected["head"].item() == 3
    np.testing.assert_array_equal(selected.values, amap[0, 3].numpy())


def test_tokens_of_an_xarray_belong_to_their_text_and_to_queries_of_self_attention() -> None:
    pytest.importorskip("xarray")
    texts = [list("abcde"), list("vwxyz")]
    both = labelled_map(texts, mask=mh.Causal()).to_xarray()
    assert both.key_token.dims == ("batch", "key")
    assert both.key_token.values.tolist() == texts
    assert labelled_map(texts).to_xarray(1).key_token.values.tolist() == texts[1]
    cross = labelled_map(list("abcde"), t=3).to_xarray(0)
    assert "query_token" not in cross.coords
    steps = labelled_map(list("abcde"), t=2, mask=mh.Causal()).to_xarray(0)
    assert steps.query_token.values.tolist() == ["d", "e"]
    assert "key_token" not in labelled_map().to_xarray().coords
    text = mh.TokenizedText(tuple("abcde"))
    assert labelled_map(text).to_xarray(0).key_token.values.tolist() == list("abcde")


def test_invalid_exports_of_a_map_raise() -> None:
    amap = labelled_map()
    for ask, kind, words in [
        (lambda: amap.to_circuitsvis(2), IndexError, "batch entry"),
        (
            lambda: amap.to_circuitsvis(max_bytes=100),
            ValueError,
            "2 kB for 100 weights, and max_bytes is 100",
        ),
        (lambda: labelled_map(t=3).to_circuitsvis(), ValueError, "got t = 3 and s = 5"),
        (lambda: amap.to_circuitsvis(max_bytes="1"), TypeError, "max_bytes"),
    ]:
        with raises(kind, match=words):
            ask()
    with patch.dict(sys.modules, xarray=None), raises(ImportError, match="needs xarray"):
        amap.to_xarray()
    pytest.importorskip("xarray")
    for ask, kind, words in [
        (lambda: amap.to_xarray(9), IndexError, "batch entry 9"),
        (lambda: amap.to_xarray(0, 0, 0, 0, 0), IndexError, "four indices"),
        (lambda: amap.to_xarray(max_bytes=100), ValueError, r"tile \[2, 4, 5, 5\] would take 800 bytes"),
    ]:
        with raises(kind, match=words):
            ask()


def test_circuitsvis_gets_heads_and_tokens() -> None:
    amap = labelled_map([list("abcde"), list("vwxyz")])
    given = amap.to_circuitsvis(1)
    assert torch.equal(given["attention"], amap[1])
    assert given["tokens"] == list("vwxyz")
    assert labelled_map().to_circuitsvis()["tokens"] == ["0", "1", "2", "3", "4"]
    library = pytest.importorskip("circuitsvis")
    assert "vwxyz"[2] in str(library.attention.attention_heads(**given))


def test_weights_larger_than_the_memory_raise_before_they_are_allocated() -> None:
    q = torch.zeros(1, 1, 1, 4).expand(1, 1, 3_000_000, 4)  # 36 TB of weights
    amap = mh.AttentionMap.of(Problem.of(q, q, q), torch.zeros(1, 1, 1).expand(1, 1, 3_000_000))
    for index in (..., (0, 0), (0, slice(None), slice(0, None, 2)), (0, 0, torch.arange(3_000_000))):
        with raises(MemoryError, match="36 TB|18 TB"):
            amap[index]
    assert amap[0, 0, 5, :3].shape == (3,)
    assert amap[0, 0, :0].shape == (0, 3_000_000)
