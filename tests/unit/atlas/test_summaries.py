"""Summaries of an atlas: merging, quantiles, top lists and files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.atlas import summaries
from manyheads.atlas.summaries import BINS, MEASURES, Summary, TopList, position_edges, quantiles, scale_of

ITEMS = st.lists(
    st.builds(
        lambda value, order, kind: {"value": float(value), "order": [0, order], "kind": str(kind)},
        st.integers(0, 5), st.integers(0, 50), st.integers(0, 6),
    ),
    max_size=30,
    unique_by=lambda item: item["order"][1],
)  # fmt: skip


@given(ITEMS, st.randoms(), st.integers(0, 30))
def test_a_top_list_does_not_depend_on_order_or_on_how_it_is_merged(items: list, random, cut: int) -> None:
    best: dict[str, dict] = {}
    for item in sorted(items, key=lambda item: (-item["value"], item["order"])):
        best.setdefault(item["kind"], item)
    want = [*best.values()][:4]
    random.shuffle(items)
    parts = [TopList(4), TopList(4)]
    for n, item in enumerate(items):
        parts[n < cut].add(item)
    for item in parts[1].items:
        parts[0].add(item)
    assert parts[0].items == want


@pytest.mark.parametrize("measure", ["induction", "entropy", "distance"])
@given(seed=st.integers(0, 10**6))
def test_quantiles_are_within_a_bin(measure: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale = scale_of(measure, 512)
    values = scale.largest * rng.beta(*rng.uniform(0.2, 3, 2), int(rng.integers(1, 300)))
    places = scale.apply(torch.from_numpy(values))
    histogram = np.bincount(places.long().clamp(0, BINS - 1).numpy(), minlength=BINS)
    shares = np.array([0.0, 0.01, 0.25, 0.5, 0.9, 1.0])
    found = quantiles(histogram, scale, shares, values.min(), values.max())
    # A quantile lies between two neighbouring values; it may be anywhere in the bins of both.
    low = np.quantile(values, shares, method="lower")
    high = np.quantile(values, shares, method="higher")
    at = scale.apply(torch.from_numpy(found)).numpy()
    low, high = (scale.apply(torch.from_numpy(x)).numpy() for x in (low, high))
    assert (at >= low - 1.001).all()
    assert (at <= high + 1.001).all()
    assert (np.diff(found) >= 0).all()


def test_scales_are_inverted() -> None:
    for measure in MEASURES:
        scale = scale_of(measure, 100)
        values = np.linspace(0, scale.largest, 50)
        np.testing.assert_allclose(
            scale.invert(scale.apply(torch.from_numpy(values)).numpy()), values, atol=1e-12
        )


def test_bins_of_positions_cover_every_position_once() -> None:
    for length in (1, 2, 7, 512, 100_000):
        edges = position_edges(length)
        assert (edges[0], edges[-1]) == (0, length)
        assert edges == sorted({*edges})
        assert len(edges) <= 2 + 8 + math.ceil(math.log(max(length, 2), 1.15))


def filled(seed: int, passages: int = 3) -> Summary:
    rng = np.random.default_rng(seed)
    summary = Summary.empty(2, 16, ablate=False)
    for array in summary.arrays.values():
        array[...] = rng.integers(0, 100, array.shape)
    for n in range(passages):
        name = f"{seed}/{n}"
        item = {
            "value": float(rng.random()),
            "order": [seed, n, 0],
            "kind": str(rng.integers(50)),
            "passage": name,
        }
        summary.examples[n % 2].add(item)
        summary.passages[name] = {"ids": [1, n]}
    return summary


def test_a_summary_is_read_back_from_its_bytes(tmp_path: Path) -> None:
    summary = filled(1)
    content = summary.to_bytes("this")
    (tmp_path / "0.npz").write_bytes(content)
    again = Summary.read(tmp_path / "0.npz", "this", Summary.empty(2, 16, ablate=False))
    assert again.to_bytes("this") == content
    assert all(np.array_equal(again.arrays[name], array) for name, array in summary.arrays.items())
    assert again.passages == summary.passages


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-30], lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"x" * 99]
)
def test_a_damaged_file_is_an_error(damage, tmp_path: Path) -> None:
    (tmp_path / "0.npz").write_bytes(damage(filled(1).to_bytes("this")))
    with pytest.raises(ValueError, match="cut short or damaged"):
        Summary.read(tmp_path / "0.npz", "this", Summary.empty(2, 16, ablate=False))


def test_a_file_of_another_atlas_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0.npz").write_bytes(filled(1).to_bytes("this"))
    for identity, h in (("that", 2), ("this", 3)):
        with pytest.raises(ValueError, match="another atlas"):
            Summary.read(tmp_path / "0.npz", identity, Summary.empty(h, 16, ablate=False))


def test_memory_does_not_grow_with_the_number_of_summaries() -> None:
    """100 shards and 2,000 shards take the same memory, also in their lists."""
    sizes = []
    for count in (100, 2000):
        total = Summary.empty(2, 16, ablate=False)
        for seed in range(count):
            total.merge(filled(seed))
        assert all(len(top.items) <= summaries.EXAMPLES for top in total.examples)
        sizes.append((sum(array.nbytes for array in total.arrays.values()), len(total.passages)))
    assert sizes[0] == sizes[1]
