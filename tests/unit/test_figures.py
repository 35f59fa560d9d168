"""Figures, read back from the matplotlib objects that draw them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.ttLib.tables._g_l_y_f import Glyph
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

from manyheads import (
    AttentionMap,
    Causal,
    Dense,
    Documents,
    Keys,
    Lengths,
    Rule,
    Sinusoidal,
    TokenizedText,
    Window,
    attention_with_map,
    figures,
    policies,
    statistics,
)
from manyheads.classic.components import PositionalEncoder
from manyheads.classic.modeling_attention import MultiHeadSelfAttention
from manyheads.figures import cells, fonts, heatmaps
from manyheads.kernels import chunked
from tests.cases import CASES, Case, bias_numbers, make, oracle
from tests.errors import raises

SENTENCE = ["the", "train", "left", "the", "station", "on", "time"]


def made_map(b: int = 1, h: int = 2, t: int = 7, sharp: float = 2.0, **rest: Any) -> AttentionMap:
    torch.manual_seed(0)
    q, k = sharp * torch.randn(b, h, t, 8), torch.randn(b, h, t, 8)
    return attention_with_map(q, k, k, **({"mask": Causal()} | rest))[1]


def drawn(figure: Figure, n: int = 0) -> Any:
    """Return what panel n shows, as a masked array."""
    return figure.axes[n].get_images()[0].get_array()


def words(figure: Figure) -> str:
    """Return all text of a figure."""
    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def labelled(axis: Any) -> bool:
    return axis.get_visible() and bool(ticks(axis))


# -- one head --------------------------------------------------------------------------------------


def test_a_head_shows_its_weights_with_labels() -> None:
    amap = made_map()
    figure = figures.head(amap, SENTENCE, head=1, title="layer 3 head 1")
    axes, bar = figure.axes
    shown = drawn(figure)
    keep = np.tril(np.ones((7, 7), bool))
    assert np.array_equal(~shown.mask, keep)
    assert np.allclose(shown.data[keep], amap.dense()[0, 1].numpy()[keep], atol=1e-7)
    assert ticks(axes.xaxis) == ticks(axes.yaxis) == SENTENCE
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert axes.get_title() == "layer 3 head 1"
    assert bar.get_ylabel() == "attention weight"
    # Query 0 is at the top.
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_zero_and_masked_weights_look_different() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keep = torch.tensor([[True, False], [True, True]])
    assert "masked" not in words(figures.head(weights))
    figure = figures.head(weights, keep=keep)
    assert drawn(figure).mask.tolist() == [[False, True], [False, False]]
    assert "masked" in words(figure)
    assert figure.axes[0].patch.get_hatch()


def test_a_small_weight_is_not_written_as_zero() -> None:
    weights = torch.tensor([[0.0, 0.004, 0.006, 0.99]])
    assert [text.get_text() for text in figures.head(weights).axes[0].texts] == ["0", "<.01", "0.01", "0.99"]


def test_a_bias_of_minus_infinity_is_drawn_as_masked() -> None:
    forbid = torch.zeros(7, 7)
    forbid[:, 3] = -torch.inf
    shown = drawn(figures.head(made_map(mask=None, bias=Dense(forbid))))
    assert np.array_equal(np.nonzero(shown.mask.all(0))[0], [3])


def test_a_query_with_a_single_key_does_not_set_the_scale() -> None:
    even = made_map(sharp=0.0, t=11)  # 1, then ½ ½, then ⅓ ⅓ ⅓, …
    assert figures.head(even).axes[0].get_images()[0].get_clim() == (0.0, 0.5)
    spread = torch.full((4, 4), 0.25)
    assert figures.head(spread).axes[0].get_images()[0].get_clim() == (0.0, 0.25)


def test_a_weight_rounded_above_one_does_not_set_the_scale() -> None:
    # Float32 scores of hundreds are rounded by some 1e-5, and so is a weight.
    assert figures.head(torch.eye(3) * 1.00002).axes[0].get_images()[0].get_clim() == (0.0, 1.0)


def test_few_tokens_get_numbers() -> None:
    weights = made_map().dense()[0, 0]
    assert f"{weights[6, 2]:.2f}" in words(figures.head(weights))


@pytest.mark.every(2)
@pytest.mark.parametrize("tokens", [1, 7, 64, 900])
def test_weights_have_the_viewers_colours_on_a_scale_of_square_roots(tokens: int) -> None:
    amap = made_map(t=tokens)
    for figure in (figures.head(amap), figures.grid([amap]), figures.beside(amap, amap.under(None))):
        image = figure.axes[0].get_images()[0]
        assert isinstance(image.norm, PowerNorm)
        assert (image.norm.gamma, image.norm.vmin, image.cmap.name) == (0.5, 0, "viridis")


def test_the_ticks_of_a_colour_bar_are_round_numbers() -> None:
    def bar(largest: float) -> list[str]:
        figure = figures.head(torch.full((7, 7), largest, dtype=torch.float64))
        return ticks(figure.axes[-1].yaxis)

    assert bar(1.0) == ["0", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]
    assert bar(0.3) == ["0", "0.005", "0.02", "0.05", "0.1", "0.2", "0.3"]
    assert bar(0.0037) == ["0", "0.00005", "0.0002", "0.0005", "0.001", "0.002", "0.0037"]
    assert bar(3e-7)[-2:] == ["2e-07", "3e-07"]


def test_queries_and_keys_may_differ() -> None:
    amap = made_map(mask=None)
    tile = amap[0, 0, 5:]
    axes = figures.head(tile, SENTENCE[5:], keys=SENTENCE).axes[0]
    assert ticks(axes.yaxis) == ["on", "time"]
    assert ticks(axes.xaxis) == SENTENCE


# -- many heads ------------------------------------------------------------------------------------


def test_a_grid_has_a_row_per_layer_one_scale_and_labels_on_its_edge() -> None:
    maps = [made_map(h=3), made_map(h=3, sharp=0.1)]
    figure = figures.grid(maps, SENTENCE)
    *panels, bar = figure.axes
    assert len(panels) == 6
    assert len({axes.get_images()[0].get_clim() for axes in panels}) == 1
    for n, axes in enumerate(panels):
        r, c = divmod(n, 3)
        assert np.allclose(drawn(figure, n).filled(0), maps[r].dense()[0, c], atol=1e-7)
        assert labelled(axes.yaxis) is (c == 0)
        assert labelled(axes.xaxis) is (r == 1)
    assert [axes.get_title() for axes in panels[:3]] == ["head 0", "head 1", "head 2"]
    assert [axes.get_ylabel() for axes in panels[::3]] == ["layer 0", "layer 1"]
    assert bar.get_ylabel() == "attention weight"


def test_a_grid_of_layers_with_different_heads() -> None:
    figure = figures.grid([made_map(h=1), made_map(h=2)], SENTENCE)
    assert sum(bool(axes.get_images()) for axes in figure.axes) == 3


def test_beside_draws_two_masks_on_one_scale() -> None:
    amap = made_map()
    figure = figures.beside(amap, amap.under(None), SENTENCE, head=1)
    left, right, _ = figure.axes
    assert (left.get_title(), right.get_title()) == ("causal", "without the mask")
    assert left.get_images()[0].get_clim() == right.get_images()[0].get_clim()
    assert drawn(figure, 0).mask.any()
    assert not np.ma.is_masked(drawn(figure, 1))
    assert np.allclose(drawn(figure, 1).sum(1), 1)


def test_beside_takes_a_mask_for_a_tensor() -> None:
    amap, keep = made_map(), torch.ones(7, 7, dtype=torch.bool).tril()
    figure = figures.beside(amap.dense()[0, 0], amap.under(None), keep=(keep, None))
    assert np.array_equal(~drawn(figure, 0).mask, keep)
    assert not np.ma.is_masked(drawn(figure, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_the_heat_maps_of_the_first_presentation(causal: bool) -> None:
    """Three sequences of 3, 4 and 7 tokens, padded to 7, three heads; padding is masked."""
    torch.manual_seed(1)
    lengths = torch.tensor([3, 4, 7])
    padding = torch.arange(7) >= lengths[:, None]  # [b, s]
    mask = Lengths(lengths) & Documents(padding.long())  # padding neither attends nor is attended to
    model = MultiHeadSelfAttention(input_size=11, hidden=15, num_heads=3, causal=causal)
    _, amap = model.attend(torch.randn(3, 7, 11), mask=mask)
    figure = figures.grid(amap, rows=[f"{n} tokens" for n in lengths.tolist()])
    for n in range(9):
        shown, length = drawn(figure, n), int(lengths[n // 3])
        inside = np.outer(np.arange(7) < length, np.arange(7) < length)
        assert np.array_equal(~shown.mask, np.tril(inside) if causal else inside)
        assert np.allclose(shown.sum(1)[:length], 1, atol=1e-6)  # probabilities, softmaxed once
    assert figure.axes[0].get_ylabel() == "3 tokens"


def test_a_tensor_of_weights_makes_the_same_grid() -> None:
    amap = made_map(b=2)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    ours, theirs = figures.grid(amap), figures.grid(amap.dense(), keep=keep)
    for n in range(4):
        assert np.array_equal(drawn(ours, n).mask, drawn(theirs, n).mask)
        assert np.allclose(drawn(ours, n).filled(0), drawn(theirs, n).filled(0), atol=1e-7)


def test_each_row_of_a_grid_may_have_its_own_tokens() -> None:
    figure = figures.grid(made_map(b=2, t=2), [["a", "b"], ["c", "d"]])
    assert [ticks(axes.xaxis) for axes in figure.axes[:4:2]] == [["a", "b"], ["c", "d"]]
    assert labelled(figure.axes[0].xaxis)


def test_layers_by_name_may_differ_in_shape_and_heads() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 9, 8)
    maps = {
        "encoder": made_map(h=3, t=9, mask=None),
        "decoder": made_map(h=3, t=5),
        "cross": attention_with_map(q, k, k)[1],
        "some": made_map(h=3, t=5).only(heads=[0, 2]),
    }
    figure = figures.grid(maps)
    *panels, _ = figure.axes
    assert [axes.get_images()[0].get_array().shape for axes in panels[::3]] == [
        (9, 9),
        (5, 5),
        (5, 9),
        (5, 5),
    ]
    for n, name in enumerate(["encoder", "decoder", "cross"]):
        assert panels[3 * n].get_ylabel() == name
        assert np.allclose(drawn(figure, 3 * n + 1).filled(0), maps[name].dense()[0, 1], atol=1e-7)
        assert labelled(panels[3 * n].xaxis)  # the row below has other keys
    assert np.allclose(drawn(figure, 10).filled(0), maps["some"].dense()[0, 1], atol=1e-7)
    titles = [axes.get_title() for axes in panels]
    assert titles == ["head 0", "head 1", "head 2", *[""] * 6, "head 0", "head 2"]


def test_a_map_is_labelled_with_its_own_tokens() -> None:
    amap = made_map(b=2, t=2).labelled([["a", "b"], ["c", "d"]])
    for figure in (
        figures.head(amap, batch=1),
        figures.grid([amap], batch=1),
        figures.received(amap, batch=1),
    ):
        assert ticks(figure.axes[0].xaxis) == ["c", "d"]
    assert ticks(figures.head(amap, ["x", "y"], batch=1).axes[0].yaxis) == ["x", "y"]
    assert ticks(figures.grid(amap).axes[0].yaxis) == ["a", "b"]


@pytest.mark.full
def test_a_figure_of_many_heads_fits_a_page_and_names_what_fits() -> None:
    wide = figures.grid(made_map(b=1, h=70, t=3))
    named = [axes.get_title() for axes in wide.axes if axes.get_title()]
    assert wide.get_figwidth() < 30
    assert named[:2] == ["head 0", "head 2"]
    amap = made_map(h=1, t=30)
    tall = figures.grid({f"model.layers.{n}.self_attention": amap for n in range(25)})
    assert tall.get_figheight() < 25
    assert [axes.get_ylabel() for axes in tall.axes[:-1]] == [f"layer {n}" for n in range(25)]
    names = [f"{part}.layers.{n}.self_attention" for part in ("encoder", "decoder") for n in range(12)]
    tall = figures.grid(dict.fromkeys(names, amap))
    assert tall.axes[0].yaxis.label.get_rotation() == 0  # a long name beside a small panel
    assert [axes.get_ylabel() for axes in tall.axes[:-1]] == names
    assert [axes.get_ylabel() for axes in figures.grid({"a.0.b.1": amap}).axes[:-1]] == ["a.0.b.1"]


# -- any length ------------------------------------------------------------------------------------


def binned(x: np.ndarray, rows: int, cols: int, how: Callable[[np.ndarray], Any]) -> np.ndarray:
    """Pool by the definition: bin r covers ⌊rT/R⌋ to ⌊(r + 1)T/R⌋."""
    t, s = x.shape
    return np.array(
        [
            [
                how(x[r * t // rows : (r + 1) * t // rows, c * s // cols : (c + 1) * s // cols])
                for c in range(cols)
            ]
            for r in range(rows)
        ]
    )


DRAWABLE = [
    case for case in CASES if case.dtype == torch.float64 and min(case.sizes[:2]) and min(case.sizes[3:5])
]


@pytest.mark.sampled
@pytest.mark.parametrize("case", DRAWABLE, ids=str)
def test_cells_equal_the_pooled_matrix(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without pooling, under every mask and bias of the table of cases."""
    monkeypatch.setattr(chunked, "BLOCK", 1)
    inputs = make(case)
    weights = oracle(inputs).values["weights"].astype(float)  # [b, h, t, s]
    visible = np.broadcast_to(inputs.keep & (bias_numbers(inputs) != -np.inf), weights.shape)
    _, amap = attention_with_map(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    line, inches = cells.select_head(amap, amap.shape[0] - 1, amap.shape[1] - 1, None), 0.08
    (largest,), (mean,) = cells.pool_heads(line, (inches, inches), ["max", "mean"])
    rows, cols = largest.cells.shape
    assert (rows, cols) == tuple(
        cells.count_cells(n, inches) for n in weights.shape[2:]
    )  # up to 6 are not pooled
    assert np.array_equal(largest.cells.mask, ~binned(visible[-1, -1], rows, cols, np.any))
    assert np.array_equal(mean.cells.mask, largest.cells.mask)
    assert np.allclose(largest.cells.filled(0), binned(weights[-1, -1], rows, cols, np.max), atol=1e-12)
    assert np.allclose(mean.cells.filled(0), binned(weights[-1, -1], rows, cols, np.mean), atol=1e-12)


@given(st.integers(1, 400), st.floats(0.02, 6.0))
def test_cells_are_as_many_as_are_legible(size: int, inches: float) -> None:
    found = cells.count_cells(size, inches)
    if size <= inches * cells.SHARP:
        assert found == size
    elif found < size:
        assert found <= max(1, inches * cells.POOLED)
        widths = np.diff([n * size // found for n in range(found + 1)])
        assert widths.max() - widths.min() <= 1


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.02, 0.5), st.integers(0, 2**31))
def test_a_tensor_is_pooled_as_a_map_is(t: int, s: int, inches: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, keep = torch.tensor(rng.random((t, s))), torch.tensor(rng.random((t, s)) < 0.5)
    line = cells.select_head(weights, 0, 0, keep)
    (largest,), (mean,) = cells.pool_heads(line, (inches, inches), ["max", "mean"])
    rows, cols = largest.cells.shape
    kept = np.where(keep, weights, 0)
    assert np.array_equal(largest.cells.mask, ~binned(keep.numpy(), rows, cols, np.any))
    assert np.array_equal(largest.cells.filled(0), binned(kept, rows, cols, np.max))
    assert np.allclose(mean.cells.filled(0), binned(kept, rows, cols, np.mean), atol=1e-12)


def test_a_long_text_is_pooled_by_maximum_and_by_mean() -> None:
    amap = made_map(t=figures.MOST + 1)
    figure = figures.head(amap, [str(n) for n in range(figures.MOST + 1)], head=1)
    largest, mean, *_ = figure.axes
    size = figure.axes[0].get_images()[0].get_array().shape[0]
    assert size <= 7 * cells.POOLED
    assert [axes.get_title() for axes in (largest, mean)] == [
        "largest weight of each cell",
        "mean weight of each cell",
    ]
    for n, how in enumerate(("max", "mean")):
        assert np.allclose(drawn(figure, n).filled(0), amap.pooled(size, size, how)[0, 1], atol=1e-7)
    assert np.array_equal(~drawn(figure).mask, np.tril(np.ones((size, size), bool)))
    assert largest.get_xlabel() == "key, up to 3 in a cell"
    assert largest.get_ylabel() == "query, up to 3 in a cell"
    assert ticks(largest.xaxis)[:2] == ["0", "50"]  # a cell of three tokens has no name
    assert largest.get_images()[0].norm is not mean.get_images()[0].norm
    assert "head 1" in words(figure)


def test_a_text_that_fits_is_shown_token_by_token() -> None:
    figure = figures.head(made_map(t=figures.MOST, h=1))
    assert drawn(figure).shape == (figures.MOST, figures.MOST)
    assert figure.axes[0].get_xlabel() == "key"


@pytest.mark.every(2)
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_the_colour_bar_tells_how_cells_are_pooled(reduce: str) -> None:
    amap = made_map(t=900)
    word = {"max": "largest", "mean": "mean"}[reduce]
    for figure in (
        figures.grid([amap], reduce=reduce),
        figures.beside(amap, amap.under(None), reduce=reduce),
    ):
        bar = figure.axes[-1]
        rows, cols = drawn(figure).shape
        assert np.allclose(drawn(figure).filled(0), amap.pooled(rows, cols, reduce)[0, 0], atol=1e-7)
        assert f"{word} attention weight of each cell" in bar.get_ylabel().replace("\n", " ")
        assert f"key, up to {-(-900 // cols)} in a cell" in words(figure)


def test_drawing_one_head_reads_one_head_and_never_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    computed = statistics.Pass

    def spy(problem: Any, reductions: Any) -> Any:
        shapes.append(problem.shape)
        return computed(problem, reductions)

    monkeypatch.setattr(statistics, "Pass", spy)
    monkeypatch.setattr(AttentionMap, "__getitem__", None)
    monkeypatch.setattr(AttentionMap, "dense", None)
    amap = made_map(b=2, h=4, t=900, mask=Causal() & Window(left=50))
    figures.head(amap, batch=1, head=2)
    assert [(n.b, n.h) for n in shapes] == [(1, 1)]  # and one pass for the largest and the mean
    figures.grid([amap, amap])
    assert [(n.b, n.h) for n in shapes[1:]] == [(1, 4)] * 2


def test_a_weight_that_underflows_is_zero_and_not_masked() -> None:
    amap = made_map(t=5, sharp=1e4, mask=Rule(lambda b, h, i, j: (j <= i) & (j != 2)))
    shown = drawn(figures.head(amap))
    assert (shown.compressed() == 0).any()
    keep = np.tril(np.ones((5, 5), bool))
    keep[:, 2] = False
    assert np.array_equal(~shown.mask, keep)


def test_the_first_queries_of_a_long_text_do_not_set_the_scale() -> None:
    even = made_map(sharp=0.0, t=400, h=1)
    for figure in (figures.head(even), figures.grid(even)):
        _, top = figure.axes[0].get_images()[0].get_clim()
        assert 8 / 400 <= top < 8 / 400 * 1.3  # a query that sees an eighth of the text
        assert figure.axes[-1].get_ylabel()


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [None, "age"])
def test_received_attention_is_the_sum_of_columns(normalize: str | None) -> None:
    mask = Causal() & Lengths(torch.tensor([5, 9]))
    maps = {"first": made_map(b=2, h=2, t=9, mask=mask), "second": made_map(b=2, h=3, t=9).only(heads=[0, 2])}
    figure = figures.received(maps, batch=0, normalize=normalize)
    first, second, bar = figure.axes
    weights = maps["first"].dense()[0].double().numpy()  # [h, t, s]
    could = np.tril(np.ones((9, 9), bool))
    could[:, 5:] = False
    expected = weights.sum(1) / (could.sum(0).clip(1) if normalize else 1)
    assert np.array_equal(drawn(figure).mask, [[False] * 5 + [True] * 4] * 2)
    assert np.allclose(drawn(figure).filled(0), expected, atol=1e-6)
    assert (first.get_ylabel(), second.get_ylabel()) == ("first", "second")
    assert ticks(first.yaxis) == ["0", "1"]
    assert ticks(second.yaxis) == ["0", "2"]  # the numbers of these heads in the model
    assert isinstance(first.get_images()[0].norm, LogNorm)
    assert {None: "summed over queries", "age": "mean weight received"}[
        normalize
    ] in bar.get_ylabel().replace("\n", " ")
    assert "masked" in words(figure)


@pytest.mark.full
def test_received_attention_of_a_long_text_is_the_largest_of_each_cell() -> None:
    amap = made_map(t=1000, h=2)
    figure = figures.received([amap], title="what keys receive")
    shown = drawn(figure)
    total = amap.dense()[0].sum(1).numpy()  # [h, s]
    assert shown.shape[1] < 1000
    assert np.allclose(shown, binned(total, 2, shown.shape[1], np.max), rtol=1e-5)
    assert "key, up to 3 in a cell" in words(figure)
    assert "what keys receive" in words(figure)


def test_a_sink_does_not_set_the_scale_of_the_other_keys() -> None:
    """The scale begins at a hundredth of what a key receives on average, which is 1, at any length."""
    for t in (20, 2000):
        amap = made_map(t=t, h=1, mask=Causal() & (Window(left=0) | Keys([0])), sharp=0.0)
        assert np.isclose(figures.received(amap).axes[0].get_images()[0].norm.vmin, 0.01)


def test_a_key_that_receives_nothing_is_the_darkest_colour() -> None:
    """The scale is logarithmic, and matplotlib draws nothing for log 0."""
    amap = made_map(t=6, sharp=1e4, h=1)
    figure = figures.received(amap)
    shown, image = drawn(figure), figure.axes[0].get_images()[0]
    assert (shown == 0).any()
    assert not np.ma.is_masked(shown)
    assert to_hex(image.to_rgba(shown)[shown == 0][0]) == to_hex(image.cmap(0.0))


def test_entropy_by_layer_equals_that_of_the_full_matrix() -> None:
    hidden = Causal() & Documents(torch.tensor([0] * 6 + [1] * 5), queries=torch.tensor([0] * 6 + [2] * 5))
    maps = {"all": made_map(t=11), "six": made_map(t=11, mask=hidden)}
    figure = figures.entropy(maps, title="spread")
    (axes,) = figure.axes
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    lines = [c.get_segments() for c in axes.collections]
    bars = [segments[0] for segments in lines if segments[0][0][1] == segments[0][1][1]]
    spans = [segments[0] for segments in lines if segments[0][0][0] == segments[0][1][0]]
    for x, (amap, queries) in enumerate(zip(maps.values(), (11, 6), strict=True)):
        weights = amap.dense()[0, :, :queries].double().numpy()
        exact = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)  # [h, queries]
        for h in range(2):
            assert np.isclose(dots[2 * x + h].get_ydata()[0], exact[h].mean(), atol=1e-6)
            assert np.allclose(spans[2 * x + h][:, 1], np.quantile(exact[h], (0.25, 0.75)), atol=1e-6)
        assert np.isclose(bars[x][0][1], np.mean([math.log(n + 1) for n in range(queries)]))
    assert ticks(axes.xaxis) == ["all", "six"]
    assert [label.get_text() for label in axes.xaxis.get_ticklabels(minor=True)] == ["0", "1"] * 2
    assert axes.get_ylabel() == "entropy (nats)"
    assert "mean ln(visible keys)" in words(figure)


def test_a_fully_masked_layer_has_no_entropy() -> None:
    masked = made_map(mask=Rule(lambda b, h, i, j: (i + j) * 0 == 1))
    assert not figures.entropy([masked]).axes[0].get_lines()
    assert drawn(figures.received(masked)).mask.all()


ROWS = [
    {"layer": "a", "head": 0, "induction": 0.25, "distance": 1234.5},
    {"layer": "a", "head": 1, "induction": None, "distance": 0.0},
    {"layer": "b", "head": 0, "induction": 0.75, "distance": 10.0},
    {"layer": "b", "head": 1, "induction": 0.25, "distance": 500.0},
]


def test_head_scores_are_a_sorted_table() -> None:
    figure = figures.measures(ROWS, by="induction", title="Heads")
    (axes,) = figure.axes
    assert ticks(axes.yaxis) == ["b   head 0", "a   head 0", "b   head 1", "a   head 1"]
    assert ticks(axes.xaxis) == ["induction", "distance, positions"]
    assert [text.get_text() for text in axes.texts] == ["0.75", "10", "0.25", "1,234", "0.25", "500", "0"]
    assert drawn(figure).mask.tolist() == [[False] * 2] * 3 + [[True, False]]
    assert np.allclose(drawn(figure)[:3, 0], [1, 1 / 3, 1 / 3])
    assert "4 heads, by induction" in words(figure)


def test_head_scores_may_be_named_tuples_and_are_cut() -> None:
    row = namedtuple("row", ["layer", "head", "a_measure"])
    rows = [row("x", n, n - 50.0) for n in range(100)]
    figure = figures.measures(rows, most=7)
    assert ticks(figure.axes[0].yaxis) == [f"x   head {n}" for n in range(99, 92, -1)]
    assert "7 of 100 heads, by a measure" in words(figure)
    assert np.isclose(drawn(figure)[0, 0], 1)
    assert drawn(figure).min() > 0.9  # the scale is that of all rows


# -- positions -------------------------------------------------------------------------------------


def test_the_four_panels_of_the_third_presentation() -> None:
    figure = figures.curves(PositionalEncoder(64).pe[:, :16], [1, 2, 7, 8], counted_from=1)
    assert [axes.get_title() for axes in figure.axes] == [f"dimension {n}" for n in (1, 2, 7, 8)]
    for axes, wave, pair in zip(figure.axes, (np.sin, np.cos) * 2, (0, 0, 3, 3), strict=True):
        (line,) = axes.get_lines()
        assert line.get_xdata().tolist() == list(range(1, 17))
        assert np.allclose(line.get_ydata(), wave(np.arange(16) / 10000 ** (2 * pair / 64)), atol=1e-6)


def test_an_encoding_as_an_image() -> None:
    encoding = Sinusoidal(6).encode(torch.arange(9))
    figure = figures.image(encoding[None])
    axes, bar = figure.axes
    assert np.allclose(drawn(figure), encoding.T)
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("position", "dimension", "encoding")
    low, high = axes.get_images()[0].get_clim()
    assert low == -high  # zero is the middle of the colours


# -- legible ---------------------------------------------------------------------------------------

UNUSUAL = ["$x$", "a_b^c", "漢字", "🙂", "é", "\x1b[31m", "\u202e", "\\frac{", "", "⏎", "…ing", "x" * 60]


@pytest.mark.every(3)
@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
def test_any_token_can_be_drawn(format: str) -> None:
    """matplotlib warns about a glyph that no font has, and warnings are errors."""
    amap = made_map(t=len(UNUSUAL))
    for figure in (figures.head(amap, UNUSUAL, title=" ".join(UNUSUAL)), figures.grid([amap], UNUSUAL)):
        figure.savefig(BytesIO(), format=format)
        shown = ticks(figure.axes[0].xaxis)
        assert shown[:5] == UNUSUAL[:5]
        assert shown[5:7] == [r"\x1b[31m", r"\u202e"]
        assert shown[-1].startswith("xxxxxxxxxxxxxxxx")
        assert shown[-1].endswith("x…")
        assert not any(label.get_parse_math() for label in figure.axes[0].get_xticklabels())


@pytest.fixture
def only_default_font(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away all fonts but those that matplotlib brings."""
    own = [entry for entry in fontManager.ttflist if "matplotlib" in str(entry.fname)]
    monkeypatch.setattr(fontManager, "ttflist", own)
    fonts._choose.cache_clear()
    yield
    fonts._choose.cache_clear()


@pytest.mark.full
@pytest.mark.usefixtures("only_default_font")
def test_a_figure_says_that_no_font_has_a_character() -> None:
    note = "has the characters drawn as boxes, such as U+6F22 (cjk unified ideograph-6f22); Noto's"
    amap, names = made_map(t=2), ["漢字", "a"]
    for figure in (
        figures.head(amap, names),
        figures.grid([amap], names),
        figures.grid([amap], title="漢字"),
    ):
        assert note in words(figure).replace("\n", " ")
        figure.savefig(BytesIO(), format="png")  # without a warning
    for names in (["é", "السلام"], ["a\u200db", "❤\ufe0f"]):  # in matplotlib's own font
        assert "No installed" not in words(figures.head(amap, names))


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, glyphs: dict[str, str]) -> None:
    """Install fonts by their names, each with some characters, in place of the others."""
    own = [entry for entry in fontManager.ttflist if "matplotlib" in str(entry.fname)]
    monkeypatch.setattr(fontManager, "ttflist", own)
    for name, characters in glyphs.items():
        names = [".notdef", *(f"uni{ord(c):04X}" for c in characters)]
        font = FontBuilder(1000)
        font.setupGlyphOrder(names)
        font.setupCharacterMap({ord(c): f"uni{ord(c):04X}" for c in characters})
        font.setupGlyf(dict.fromkeys(names, Glyph()))
        font.setupHorizontalMetrics(dict.fromkeys(names, (900, 0)))
        font.setupHorizontalHeader(ascent=800, descent=-200)
        font.setupNameTable({"familyName": name, "styleName": "Regular"})
        font.setupOS2()
        font.setupPost()
        font.save(folder / f"{name}.ttf")
        fontManager.addfont(folder / f"{name}.ttf")


@pytest.mark.usefixtures("only_default_font")
def test_fonts_are_chosen_by_their_characters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = fonts.families("a")
    assert fonts.families("é b") == default
    names = ["Some Serif", "Kanji Sans JP", "Kanji Sans SC", "Some Sans", "Last Resort", "All Mono"]
    glyphs = dict.fromkeys(names, "ल") | dict.fromkeys(names[1:3], "漢字か") | {"All Mono": "漢字かल"}
    install(monkeypatch, tmp_path, glyphs)
    chosen = {
        "漢字": ["Kanji Sans SC"],
        "漢字か": ["Kanji Sans JP"],
        "ल": ["Some Sans"],
        "漢ल": ["All Mono"],
        "漢🙂": ["Kanji Sans SC"],
    }
    assert {text: fonts.families(text)[len(default) :] for text in chosen} == chosen
    assert fonts.lacking("漢字ल") is None
    assert "U+1F642 (slightly smiling face)" in (fonts.lacking("漢🙂") or "")
    # A label has those fonts of all labels that it needs.
    context = {"漢字": ["Kanji Sans JP"], "か": ["Kanji Sans JP"], "a": [], "漢a": ["Kanji Sans JP"]}
    assert {text: fonts.families(text, "".join(context))[len(default) :] for text in context} == context


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
@pytest.mark.usefixtures("only_default_font")
def test_pictures_keep_few_files_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """matplotlib keeps the last 64 lists of fonts open, with a file for every font of each."""
    letters = [chr(0x4E00 + n) for n in range(10)]  # a font for each
    install(monkeypatch, tmp_path, {f"Font {n}": letter for n, letter in enumerate(letters)})
    amap, before = made_map(t=6), len(os.listdir("/proc/self/fd"))
    for n, chosen in zip(range(30), combinations(letters, 5), strict=False):
        figure = figures.head(amap, ["a", *chosen], title=f"{n} {chosen[0]}")
        figure.savefig(BytesIO(), format="png", dpi=20)
    lists = 1 + len(letters)  # of the default font, and each with another; matplotlib appends one for boxes
    assert len(os.listdir("/proc/self/fd")) - before <= 3 * lists


def test_text_in_files_is_text() -> None:
    title, names = "Why “naïve” 漢 > $x$?", ["naïve", "السلام", "<b>", "&", "é"]
    figure = figures.head(made_map(t=5), names, title=title)
    svg, pdf = BytesIO(), BytesIO()
    figure.savefig(svg, format="svg")
    root = ElementTree.fromstring(svg.getvalue())
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert shown[:5] == names
    assert title in shown
    figure.savefig(pdf, format="pdf")
    assert b"/Type3" not in pdf.getvalue()
    assert b"/FontFile2" in pdf.getvalue()  # TrueType
    assert rcParams["svg.fonttype"] == "path"  # matplotlib's own setting isn't changed


def test_quotations_from_right_to_left_dont_reorder_the_words_around_them() -> None:
    """They are in Unicode's isolates (U+2068 to U+2069), which have no width."""
    sentence = '"{0}" attends to the first "{0}" (0.99), the text is “{0}”.'
    isolated = (
        '"\u2068{0}\u2069" attends to the first "\u2068{0}\u2069" (0.99), the text is “\u2068{0}\u2069”.'
    )
    for name, expected in (("عليكم", isolated), ("שלום", isolated), ("station", sentence)):
        for figure in (
            figures.head(made_map(t=3), title=sentence.format(name)),
            figures.grid([made_map(t=3)], title=sentence.format(name)),
        ):
            assert expected.format(name) in words(figure).replace("\n", " ")
    assert heatmaps.measure(isolated.format("عليكم"), 9) == pytest.approx(
        heatmaps.measure(sentence.format("عليكم"), 9), rel=0.02
    )
    labels = ticks(figures.grid([made_map(t=40, h=1)], ["عليكم", "station"] * 20).axes[0].xaxis)
    assert labels[0] == "\u2068عليكم\u2069  0"


def test_tokens_of_one_character_have_one_label() -> None:
    text = TokenizedText(("n", "é", "", " 漢字漢字漢字漢字漢字漢字", "", " tail", "or"))
    axes = figures.head(made_map(t=7).labelled(text)).axes[0]
    assert ticks(axes.xaxis) == ["né", "漢字漢字漢字漢字漢字…", "tailor"]
    assert axes.xaxis.get_ticklocs().tolist() == [1, 3.5, 5.5]  # the middle of the tokens
    assert axes.xaxis.get_minorticklocs().tolist() == [*range(7)]
    axes = figures.grid([made_map(t=40, h=1)], TokenizedText((" tail", "or") * 20)).axes[0]
    assert ticks(axes.xaxis)[1] == "tailor  2"  # where not all pieces have labels, words do
    figure = figures.head(made_map(t=60), TokenizedText((" tail", "or") * 30))
    assert ticks(figure.axes[0].xaxis)[:3] == ["tailor"] * 3
    axes = figures.grid([made_map(t=40, h=1)], TokenizedText((" ne", "ph", "ew", "s") * 10)).axes[0]
    assert ticks(axes.xaxis)[:4] == ["nephews  0", "2", "nephews  4", "6"]  # a word is written once


@pytest.mark.full
def test_labels_that_say_where_they_are_have_no_positions() -> None:
    def labels(names: list[str]) -> list[str]:
        return ticks(figures.grid([made_map(t=40, h=1)], names).axes[0].xaxis)

    assert labels([f"{20 * n} ms" for n in range(40)])[:3] == ["0 ms", "40 ms", "80 ms"]
    assert labels([f"frame {n}" for n in range(40)])[1] == "frame 2"
    assert labels([str(n // 4) for n in range(40)])[:3] == ["0", "0", "1"]
    assert labels(["a", "b", "c", "a"] * 10)[:2] == ["a  0", "c  2"]


SCRIPTS = {
    "english": ("the", "station", "internationally", "."),
    "long": ("donaudampfschifffahrtsgesellschaft", "a" * 60, "x"),
    "chinese": ("機械学習", "を", "愛する", "。"),
    "arabic": ("السلام", "عليكم", "يا", "عالم"),
    "mixed": ("the", "機械学習", "السلام", "नमस्ते", "🙂", "👩\u200d👧", "W" * 20, "i"),
}
SENTENCES = 'The second "the" attends to "t" of "train" (0.97), the token that followed the first "the".'


@cache
def page(kind: str, t: int, s: int, script: str = "english") -> Figure:
    """Return a figure of a number of queries and keys, laid out."""
    names = [SCRIPTS[script][n % len(SCRIPTS[script])] for n in range(max(t, s))]
    torch.manual_seed(0)
    q, k = 2 * torch.randn(1, 3, t, 8), torch.randn(1, 3, s, 8)
    mask = Causal() & Window(left=50) if t == s else None
    amap = attention_with_map(q, k, k, mask=mask)[1].labelled(names[:s])
    other = amap.under(Window(left=3, right=3))
    layers = {f"layers.{n}.attention": amap for n in range(min(t, 60))}
    labels: dict[str, Any] = {"tokens": names[:t], "keys": names[:s], "title": SENTENCES}
    captions = [["previous token 1.00", "", "induction 0.81"]] * 2
    draw: dict[str, Callable[[], Figure]] = {
        "head": lambda: figures.head(amap, **labels),
        "beside": lambda: figures.beside(amap, other, **labels),
        "grid": lambda: figures.grid([amap, other], title=SENTENCES),
        "captions": lambda: figures.grid([amap, other], captions=captions),
        "named": lambda: figures.grid({"encoder.attention": amap, names[0]: amap}),
        "wide": lambda: figures.grid([amap.only(heads=[0, 1, 2] * 4)] * 3, title=SENTENCES),
        "received": lambda: figures.received({"blocks.0.attention": amap, "b": amap}, title=SENTENCES),
        "entropy": lambda: figures.entropy(layers, title=SENTENCES),
        "difference": lambda: figures.difference(amap[0, 0], other[0, 0], title=SENTENCES),
    }
    figure = draw[kind]()
    FigureCanvasAgg(figure).draw()
    return figure


def drawn_texts(figure: Figure) -> dict[str, Any]:
    """Return the box of every text that a figure shows, by a name."""
    found = [*figure.texts]
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        legend = axes.get_legend()
        found += [axes.title, *axes.texts, *(legend.get_texts() if legend else [])]
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_visible():
                found.append(axis.label)
                found += [label for tick in axis._update_ticks() for label in (tick.label1, tick.label2)]
    shown = [text for text in found if text.get_visible() and text.get_text()]
    return {f"{n}: {text.get_text()}": text.get_window_extent() for n, text in enumerate(shown)}


SHAPES = [(1, 1), (1, 7), (7, 1), (7, 7), (26, 26), (60, 60), (5, 300), (300, 5), (300, 300), (2000, 2000)]


@pytest.mark.sampled
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "kind",
    ["head", "beside", "grid", "captions", "named", "wide", "received", "entropy", "difference"],
)
def test_no_two_texts_overlap_and_none_is_cut(kind: str, shape: tuple[int, int], script: str) -> None:
    figure = page(kind, *shape, script)
    paper, boxes = figure.bbox, drawn_texts(figure)
    for name, box in boxes.items():
        assert paper.x0 - 1 <= box.x0 <= box.x1 <= paper.x1 + 1, name
        assert paper.y0 - 1 <= box.y0 <= box.y1 <= paper.y1 + 1, name
    for (name, box), (other, its) in combinations(boxes.items(), 2):
        assert not box.padded(-0.5).overlaps(its.padded(-0.5)), (name, other)
    for axes in figure.axes:
        panel = axes.get_window_extent()
        assert min(panel.width, panel.height) > 20  # nothing is squeezed away


@pytest.mark.full
def test_labels_of_a_very_long_text() -> None:
    """As above, for a text that is drawn in a second or two."""
    test_no_two_texts_overlap_and_none_is_cut("grid", (30_000, 30_000), "mixed")


@pytest.mark.every(6)
@pytest.mark.parametrize("tokens", [1, 7, 60, 300, 2000])
@pytest.mark.parametrize("kind", ["head", "beside", "grid", "received"])
def test_every_cell_has_two_pixels(kind: str, tokens: int) -> None:
    *panels, _ = page(kind, tokens, tokens).axes
    for axes in panels:
        for image in axes.get_images():
            rows, cols = image.get_array().shape
            box = axes.get_window_extent()
            assert box.width >= 1.9 * cols  # slightly less than two where matplotlib does the layout
            assert box.height >= 1.9 * rows
            left, right, bottom, top = image.get_extent()
            assert (left, top) == (-0.5, -0.5)
            assert (right, bottom) == (tokens - 0.5, (3 if kind == "received" else tokens) - 0.5)


# -- errors and global state -----------------------------------------------------------------------


@pytest.mark.full
def test_figures_do_not_import_pyplot() -> None:
    script = (
        "import sys, torch\n"
        "from manyheads import figures\n"
        "figures.head(torch.eye(3)).savefig('/dev/null', format='png')\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_map_changed_in_place_is_not_drawn() -> None:
    q = torch.randn(1, 2, 5, 8)
    _, amap = attention_with_map(q, q, q)
    q.zero_()
    for draw in (figures.head, figures.grid, figures.received, figures.entropy):
        with pytest.raises(RuntimeError, match="changed in place"):
            draw(amap)


def test_a_notebook_displays_a_figure_and_rcparams_are_unchanged() -> None:
    before = dict(rcParams)
    figure = figures.head(torch.eye(3))
    figure.axes[0].set_title("edited")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert dict(rcParams) == before


def test_bfloat16_weights_that_require_gradients_can_be_drawn() -> None:
    weights = torch.eye(3, dtype=torch.bfloat16, requires_grad=True)
    assert np.array_equal(drawn(figures.head(weights)), np.eye(3))


EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.head(EYE, ["a"]), "Expected tokens to be 3 labels, got 1"),
        (lambda: figures.head(EYE, keys=["a"]), "Expected keys to be 3 labels"),
        (lambda: figures.head(EYE[None]), r"\[t, s\].*\[1, 3, 3\]"),
        (lambda: figures.head(EYE.long()), "torch.int64"),
        (lambda: figures.head([[1.0]]), "an AttentionMap or a tensor, got a list"),  # type: ignore[arg-type]
        (lambda: figures.head(EYE / 0), "finite"),
        (lambda: figures.head(EYE, keep=EYE), "boolean"),
        (lambda: figures.head(EYE, keep=torch.ones(2, 2).bool()), r"\[3, 3\].*\[2, 2\]"),
        (lambda: figures.head(torch.zeros(0, 3)), r"got \[t, s\] = \[0, 3\]"),
        (lambda: figures.received([]), "at least one row of heads, got none"),
        (lambda: figures.received(made_map(), ["a"]), "Expected keys to be 7 labels"),
        (lambda: figures.received(made_map(), normalize="yes"), "'yes'"),
        (lambda: figures.entropy(made_map(), batch=1), "batch to be at most 0, got 1"),
        (lambda: figures.grid(made_map(h=0)), "got a row with none"),
        (lambda: figures.grid([made_map()], reduce="sum"), '"mean" or "max", got \'sum\''),
        (lambda: figures.measures([]), "got no row"),
        (lambda: figures.measures([3]), "named tuples or mappings, got an int"),
        (lambda: figures.measures([{"layer": 0, "head": 0}]), r"got \(layer, head\)"),
        (lambda: figures.measures([*ROWS, {"layer": 0, "head": 0, "x": 1}]), r"and \(layer, head, x\)"),
        (lambda: figures.measures(ROWS, by="x"), "induction, distance, got 'x'"),
        (
            lambda: figures.measures([{"layer": 0, "head": 0, "x": "much"}]),
            "x to be a number or None, got 'much'",
        ),
        (lambda: figures.measures(ROWS, most=0), "most .*at least 1"),
        (lambda: figures.head(made_map(), head=2), "head to be at most 1, got 2"),
        (lambda: figures.head(made_map(), batch=-1), "batch to be at least 0, got -1"),
        (lambda: figures.grid([made_map()], batch=1.5), "batch to be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: figures.head(made_map(), head=True), "head to be a whole number, got True"),
        (lambda: figures.grid(-EYE[None, None]), "weights of at least 0, got -1"),
        (lambda: figures.head(EYE - 0.5), "weights of at least 0, got -0.5"),
        (lambda: figures.grid(made_map(), title=3), "title to be a string, got 3"),  # type: ignore[arg-type]
        (lambda: figures.beside(EYE, torch.eye(2)), r"\[3, 3\] and \[2, 2\]"),
        (lambda: figures.beside(EYE, EYE, keep=EYE.bool()), "a pair of masks.*got a Tensor"),  # type: ignore[arg-type]
        (lambda: figures.beside(EYE, EYE, keep=(None, EYE)), "boolean"),
        (lambda: figures.head(made_map(), keep=EYE.bool()), "no keep for a map"),
        (lambda: figures.grid(EYE), r"\[b, h, t, s\]"),
        (lambda: figures.grid([EYE]), "only AttentionMaps, got a Tensor of torch.float32"),  # type: ignore[list-item]
        (lambda: figures.grid(None), "got a NoneType"),  # type: ignore[arg-type]
        (lambda: figures.grid(made_map(), keep=EYE.bool()), "no keep for a map"),
        (lambda: figures.grid(made_map(), rows=["a", "b"]), "1 sequences, got 2"),
        (lambda: figures.grid(made_map(), captions=[]), "captions for each of 1 sequences, got 0"),
        (lambda: figures.grid(made_map(), captions=[["a"]]), "each of 2 heads, got 1"),
        (lambda: figures.grid(made_map(), [["a"], ["b"]]), "one per row, got 2"),
        (lambda: figures.curves(EYE, [3]), "between 0 and 2, got 3"),
        (lambda: figures.curves(EYE, [0], counted_from=1), "between 1 and 3, got 0"),
        (lambda: figures.curves(EYE, []), "got none"),
        (lambda: figures.image(torch.zeros(3)), r"\[positions, d\], got \[3\]"),
    ],
)
def test_invalid_arguments_of_figures_raise(call: Callable[[], Figure], message: str) -> None:
    with raises((ValueError, TypeError), match=message):
        call()


# -- what policies of a cache cost -----------------------------------------------------------------


def cache_costs() -> dict[str, dict[int, policies.Cost]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 4) for _ in range(3))
    return {
        "recency": {n: policies.measure(policies.Recency(n), q, k, v, prompt=30) for n in (4, 8, 16)},
        "H$_2$O 重": {n: policies.measure(policies.H2O(n), q, k, v, prompt=30) for n in (8, 16)},
    }


def test_costs_of_a_cache_are_drawn_by_budget() -> None:
    costs = cache_costs()
    figure = figures.cache_costs(costs, title="costs $x$")
    figure.draw_without_rendering()
    kept, _, dropped, error = figure.axes
    shares = kept.get_images()[0].get_array()
    assert shares is not None
    assert shares.shape == (2, 30)
    assert shares[0].tolist() == [0] * 22 + [1] * 8  # recency, with a budget of 8
    counts = costs["H$_2$O 重"][8].kept.flatten().bincount(minlength=30) / 2
    assert shares[1].tolist() == counts.tolist()
    for axes, name in ((dropped, "dropped"), (error, "error")):
        lines = axes.get_lines()
        assert [list(line.get_xdata()) for line in lines] == [[4, 8, 16], [8, 16]]
        for line, by_budget in zip(lines, costs.values(), strict=True):
            means = [float(getattr(cost, name).mean()) for cost in by_budget.values()]
            np.testing.assert_allclose(line.get_ydata(), means, rtol=1e-5)
        assert len({line.get_marker() for line in lines}) == 2
    assert "budget of 16" in figures.cache_costs(costs, budget=16).axes[0].get_xlabel()
    assert "重" in [text.get_text()[-1] for text in kept.get_yticklabels()]


def test_invalid_costs_raise() -> None:
    costs = cache_costs()
    model = policies.ModelCost(*(torch.zeros(1, 1, 1, 1, dtype=torch.int64) for _ in range(4)))
    for bad, kind, words in [
        (3, TypeError, "costs by policy and budget.*got an int"),
        ({"a": 3}, TypeError, "costs by policy and budget"),
        ({}, ValueError, "got none"),
        ({"a": {}}, ValueError, "got none"),
        ({"a": {4: 0.5}}, TypeError, "got a float"),
        ({**costs, "model": {4: model}}, TypeError, "measure_model"),
    ]:
        with raises(kind, match=words):
            figures.cache_costs(bad)  # type: ignore[arg-type]
    with raises(ValueError, match="budget to be one of 4, 8, 16, got 5"):
        figures.cache_costs(costs, budget=5)
