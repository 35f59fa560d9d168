"""Pictures, read back from the matplotlib objects that draw them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.text import Text

from manyheads import (
    AttentionMap,
    Causal,
    Dense,
    Documents,
    Lengths,
    Sinusoidal,
    attention_with_map,
    figures,
)
from manyheads.classic.components import PositionalEncoder
from manyheads.classic.modeling_attention import MultiHeadSelfAttention

SENTENCE = ["the", "train", "left", "the", "station", "on", "time"]


def made_map(b: int = 1, h: int = 2, t: int = 7, sharp: float = 2.0, **rest: Any) -> AttentionMap:
    torch.manual_seed(0)
    q, k = sharp * torch.randn(b, h, t, 8), torch.randn(b, h, t, 8)
    return attention_with_map(q, k, k, **({"mask": Causal()} | rest))[1]


def drawn(figure: Figure, n: int = 0) -> Any:
    """What panel n shows, as a masked array."""
    return figure.axes[n].get_images()[0].get_array()


def words(figure: Figure) -> str:
    """Everything written in a figure."""
    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def labelled(axis: Any) -> bool:
    return axis.get_major_ticks()[0].label1.get_visible()


# -- one head --------------------------------------------------------------------------------------


def test_a_head_shows_the_weights_themselves_and_says_what_they_are() -> None:
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
    # Rows run downwards: query 0 stands at the top.
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_zero_and_masked_are_told_apart() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keep = torch.tensor([[True, False], [True, True]])
    assert "may not" not in words(figures.head(weights))
    figure = figures.head(weights, keep=keep)
    assert drawn(figure).mask.tolist() == [[False, True], [False, False]]
    assert "may not\nattend" in words(figure)
    assert figure.axes[0].patch.get_hatch()


def test_what_a_bias_forbids_is_masked_too() -> None:
    forbid = torch.zeros(7, 7)
    forbid[:, 3] = -torch.inf
    shown = drawn(figures.head(made_map(mask=None, bias=Dense(forbid))))
    assert np.array_equal(np.nonzero(shown.mask.all(0))[0], [3])


def test_a_weight_that_had_no_choice_does_not_set_the_scale() -> None:
    even = made_map(sharp=0.0, t=11)  # 1, then ½ ½, then ⅓ ⅓ ⅓, …
    assert figures.head(even).axes[0].get_images()[0].get_clim() == (0.0, 0.5)
    spread = torch.full((4, 4), 0.25)
    assert figures.head(spread).axes[0].get_images()[0].get_clim() == (0.0, 0.25)


def test_few_tokens_get_numbers_and_many_a_square_root_scale() -> None:
    weights = made_map().dense()[0, 0]
    assert f"{weights[6, 2]:.2f}" in words(figures.head(weights))
    figure = figures.head(made_map(t=64), [str(n) for n in range(64)])
    assert isinstance(figure.axes[0].get_images()[0].norm, PowerNorm)
    assert "square-root" in figure.axes[-1].get_ylabel()


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


def test_beside_puts_two_masks_on_one_scale() -> None:
    amap = made_map()
    figure = figures.beside(amap, amap.under(None), SENTENCE, head=1)
    left, right, _ = figure.axes
    assert (left.get_title(), right.get_title()) == ("causal", "without the mask")
    assert left.get_images()[0].get_clim() == right.get_images()[0].get_clim()
    assert drawn(figure, 0).mask.any()
    assert not np.ma.is_masked(drawn(figure, 1))
    assert np.allclose(drawn(figure, 1).sum(1), 1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_heat_maps_of_the_first_presentation(causal: bool) -> None:
    """Three sequences of 3, 4 and 7 tokens, padded to 7, three heads; padding is masked."""
    torch.manual_seed(1)
    lengths = torch.tensor([3, 4, 7])
    padding = torch.arange(7) >= lengths[:, None]  # [b, s]
    mask = Lengths(lengths) & Documents(padding.long())  # padding sees nothing and is not seen
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


def test_each_row_of_a_grid_may_have_tokens_of_its_own() -> None:
    figure = figures.grid(made_map(b=2, t=2), [["a", "b"], ["c", "d"]])
    assert [ticks(axes.xaxis) for axes in figure.axes[:4:2]] == [["a", "b"], ["c", "d"]]
    assert labelled(figure.axes[0].xaxis)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_pooling_keeps_the_largest_weight_of_every_block(t: int, s: int, step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    panel = np.ma.array(rng.random((t, s)), mask=rng.random((t, s)) < 0.5)
    pooled = figures._pool(panel, step)
    assert pooled.shape == (-(-t // step), -(-s // step))
    for i, j in np.ndindex(pooled.shape):
        block = panel[i * step : (i + 1) * step, j * step : (j + 1) * step]
        assert block.mask.all() if pooled.mask[i, j] else pooled[i, j] == block.max()


def test_a_long_text_is_pooled_in_small_and_whole_in_full() -> None:
    amap = made_map(t=figures.CELLS + 1)
    small, full = figures.grid([amap]).axes[0], figures.head(amap).axes[0]
    for axes, cells, step in ((small, figures.CELLS // 2 + 1, 2), (full, figures.CELLS + 1, 1)):
        image = axes.get_images()[0]
        assert image.get_array().shape == (cells, cells)
        assert tuple(image.get_extent()) == (-0.5, step * cells - 0.5, step * cells - 0.5, -0.5)
        assert axes.get_xlim() == (-0.5, figures.CELLS + 0.5)
        assert axes.get_ylim() == (figures.CELLS + 0.5, -0.5)


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

ODD = ["$x$", "a_b^c", "漢字", "🙂", "é", "\x1b[31m", "\u202e", "\\frac{", "", "⏎", "…ing", "x" * 60]


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
def test_any_token_can_be_drawn(format: str) -> None:
    """Warnings are errors here: a glyph that the font lacks would be one."""
    amap = made_map(t=len(ODD))
    for figure in (figures.head(amap, ODD, title=" ".join(ODD)), figures.grid([amap], ODD)):
        figure.savefig(BytesIO(), format=format)
        shown = ticks(figure.axes[0].xaxis)
        assert shown[:3] == ["$x$", "a_b^c", r"\u6f22\u5b57"]
        assert shown[5] == r"\x1b[31m"
        assert shown[-1] == "x" * 19 + "…"
        assert not any(label.get_parse_math() for label in figure.axes[0].get_xticklabels())


@pytest.mark.parametrize("tokens", [1, 2, 7, 26, 60, 300])
@pytest.mark.parametrize("kind", ["head", "beside", "grid"])
def test_labels_never_overlap_nor_leave_the_page(kind: str, tokens: int) -> None:
    amap = made_map(t=tokens)
    names = [("the", "station", "internationally", ".")[n % 4] for n in range(tokens)]
    title = 'layer 0 head 1: the second "the" looks at "station" (0.71), the token after it'
    draw: dict[str, Callable[[], Figure]] = {
        "head": lambda: figures.head(amap, names, title=title),
        "beside": lambda: figures.beside(amap, amap.under(None), names, title=title),
        "grid": lambda: figures.grid([amap, amap], names, title=title),
    }
    figure = draw[kind]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page = figure.bbox.padded(2)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]
            boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
            for one, other in pairwise(boxes):
                assert not one.padded(-0.5).overlaps(other.padded(-0.5)), (kind, tokens)
            for box in boxes:
                assert page.x0 <= box.x0
                assert box.x1 <= page.x1
                assert page.y0 <= box.y0
                assert box.y1 <= page.y1
        panel = axes.get_window_extent()
        assert min(panel.width, panel.height) > 20  # nothing is squeezed away


# -- manners ---------------------------------------------------------------------------------------


def test_figures_stay_away_from_pyplot() -> None:
    script = (
        "import sys, torch\n"
        "from manyheads import figures\n"
        "figures.head(torch.eye(3)).savefig('/dev/null', format='png')\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_notebook_shows_what_comes_back_and_nothing_global_changes() -> None:
    before = dict(rcParams)
    figure = figures.head(torch.eye(3))
    figure.axes[0].set_title("edited")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert dict(rcParams) == before


def test_half_precision_and_graphs_are_no_obstacle() -> None:
    weights = torch.eye(3, dtype=torch.bfloat16, requires_grad=True)
    assert np.array_equal(drawn(figures.head(weights)), np.eye(3))


EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: figures.head(EYE, ["a"]), "tokens must be 3 labels, one for each, and 1 came"),
        (lambda: figures.head(EYE, keys=["a"]), "keys must be 3 labels"),
        (lambda: figures.head(EYE[None]), r"\[t, s\].*\[1, 3, 3\]"),
        (lambda: figures.head(EYE.long()), "torch.int64"),
        (lambda: figures.head([[1.0]]), "an AttentionMap or a tensor.*a list came"),  # type: ignore[arg-type]
        (lambda: figures.head(EYE / 0), "finite"),
        (lambda: figures.head(EYE, keep=EYE), "boolean"),
        (lambda: figures.head(EYE, keep=torch.ones(2, 2).bool()), r"\[3, 3\].*\[2, 2\]"),
        (lambda: figures.head(torch.zeros(0, 3)), r"\[0, 3\] came"),
        (lambda: figures.head(torch.zeros(5000, 1)), "a tile of the map"),
        (lambda: figures.head(made_map(), head=2), "head must lie between 0 and 1, and 2 came"),
        (lambda: figures.head(made_map(), batch=-1), "batch must lie between 0 and 0, and -1 came"),
        (lambda: figures.beside(EYE, torch.eye(2)), r"\[3, 3\] and \[2, 2\]"),
        (lambda: figures.grid(EYE), r"\[b, h, t, s\]"),
        (lambda: figures.grid([]), "at least one head"),
        (lambda: figures.grid([EYE]), "a list of AttentionMaps.*a list came"),  # type: ignore[list-item]
        (lambda: figures.grid(None), "a NoneType came"),  # type: ignore[arg-type]
        (lambda: figures.grid(made_map(), keep=EYE.bool()), "a map knows its own mask"),
        (lambda: figures.grid(made_map(), rows=["a", "b"]), "1 sequences.*and 2 came"),
        (lambda: figures.grid(made_map(), [["a"], ["b"]]), "one for each of 1 rows, and 2 came"),
        (lambda: figures.curves(EYE, [3]), "between 0 and 2, and 3 came"),
        (lambda: figures.curves(EYE, [0], counted_from=1), "between 1 and 3, and 0 came"),
        (lambda: figures.curves(EYE, []), "none came"),
        (lambda: figures.image(torch.zeros(3)), r"\[positions, d\].*\[3\] came"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(call: Callable[[], Figure], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
