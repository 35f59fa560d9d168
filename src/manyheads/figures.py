"""Pictures of attention, as matplotlib figures that the caller can go on editing.

    figure = figures.head(amap, tokens, head=1)      # one head in full
    figure = figures.grid(maps, tokens)              # every layer and head, small multiples
    figure = figures.beside(amap, amap.under(None))  # one head under two masks
    figure = figures.curves(pe, [0, 1, 6, 7])        # positional encodings

A weight of 0 and a key that may not be attended are two things and look like two: 0 is the darkest
colour, what is masked is grey and hatched. Panels of one figure share one colour scale. Nothing here
touches pyplot, so the functions need no display, leave no global state, and a notebook shows what
they return. Tokens are drawn as they are: `$` starts no formula, and a character that the font lacks
is written as its escape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from io import BytesIO
from textwrap import fill
from typing import Any, cast

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from manyheads import scores
from manyheads.maps import AttentionMap
from manyheads.shapes import kind, sizes

Weights = AttentionMap | Tensor
Labels = Sequence[str]
Names = tuple[list[str] | None, list[str] | None]  # of queries, of keys
Panel = Any  # a numpy masked array [t, s]; masked = may not attend

WEIGHT = "viridis"  # sequential, and legible without colour vision
VALUE = "PuOr"  # diverging around zero, likewise
MASKED: dict[str, Any] = {"facecolor": "#e8e8e8", "edgecolor": "#cccccc", "hatch": "////", "linewidth": 0.0}

MOST = 4096  # tokens a side that a picture accepts
CELLS = 160  # cells a side that a small multiple draws; more tokens are pooled
LONG = 40  # tokens from which small weights would be lost on a linear scale
LONGEST = 20  # characters of a tick label
LINE = 0.125  # inches that a line of tick labels needs


class Picture(Figure):
    """A matplotlib Figure that a notebook shows by itself, with pyplot or without."""

    def _repr_png_(self) -> bytes:
        page = BytesIO()
        self.savefig(page, format="png", bbox_inches="tight")
        return page.getvalue()


# -- attention -------------------------------------------------------------------------------------


def head(
    weights: Weights,
    tokens: Labels | None = None,
    *,
    keys: Labels | None = None,
    keep: Tensor | None = None,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
) -> Figure:
    """One head in full: a row per query, a column per key, a colour bar, the numbers where they fit.

    `weights` is an AttentionMap, of which `batch` and `head` choose one head, or a tensor `[t, s]`.
    `tokens` names the queries, and the keys too unless `keys` does; without them positions stand on
    the axes. `keep` `[t, s]` (True = may attend) says what a tensor cannot: which of its zeros are
    masked; a map knows. Raises ValueError for labels or masks that don't fit the weights.
    """
    panel = _panel(weights, batch, head, keep)
    if title is None:
        title = f"head {head}" if isinstance(weights, AttentionMap) else ""
    return _row([panel], _labels(panel, tokens, keys), [title], None)


def beside(
    left: Weights,
    right: Weights,
    tokens: Labels | None = None,
    *,
    keys: Labels | None = None,
    batch: int = 0,
    head: int = 0,
    titles: tuple[str, str] = ("causal", "without the mask"),
    title: str | None = None,
) -> Figure:
    """One head twice on one colour scale, e.g. causal beside non-causal.

    Each side is an AttentionMap, of which `batch` and `head` choose one head, or a tensor `[t, s]`;
    `beside(amap, amap.under(None))` asks what the same q and k would give without the mask. Raises
    ValueError where the two sides differ in shape.
    """
    panels = [_panel(side, batch, head, None) for side in (left, right)]
    if panels[0].shape != panels[1].shape:
        shapes = " and ".join(str(list(panel.shape)) for panel in panels)
        raise ValueError(f"both sides must have one shape, and {shapes} came: draw them with head().")
    return _row(panels, _labels(panels[0], tokens, keys), titles, title)


def grid(
    weights: Weights | Sequence[AttentionMap],
    tokens: Labels | Sequence[Labels] | None = None,
    *,
    keep: Tensor | None = None,
    batch: int = 0,
    rows: Labels | None = None,
    columns: Labels | None = None,
    title: str | None = None,
) -> Figure:
    """Many heads as small multiples on one colour scale, their labels on the outer edge.

    `weights` is a list of AttentionMaps, one per layer (a row each, `batch` chooses the sequence), or
    one AttentionMap or tensor `[b, h, t, s]` (a row per sequence). `tokens` is one list of labels, or
    one list per row. `keep` (True = may attend) broadcasts to a tensor's `[b, h, t, s]`. `rows` and
    `columns` name the rows and columns. Long texts are pooled: a cell is the largest weight of its
    tokens. Raises ValueError for names, labels or masks that don't fit the weights.
    """
    panels = _panels(weights, keep, batch)
    down, across = len(panels), max(map(len, panels))
    what = "layer" if isinstance(weights, Sequence) else "sequence"
    rows = _named(rows, down, what)
    columns = _named(columns, across, "head")
    each = _each(tokens, down)
    labels = [_labels(line[0], each[r], None) for r, line in enumerate(panels)]
    apart = any(pair[1] != labels[0][1] for pair in labels)  # every row has keys of its own

    t, s = (max(panel.shape[axis] for line in panels for panel in line) for axis in (0, 1))
    side = float(np.clip(1.1 * LINE * max(t, s), 1.15, 2.75))
    height, width = (max(0.4, side * n / max(t, s)) for n in (t, s))
    margin = _margin([name for pair in labels for names in pair for name in names or ()])
    figure = Picture(
        figsize=(
            across * (width + 0.1) + margin + 1.5,
            down * (height + 0.1) + margin * (down if apart else 1) + 1.1,
        ),
        dpi=150,
        layout="constrained",
    )
    every = figure.subplots(down, across, squeeze=False)
    norm = _scale(sum(panels, []))
    for r, line in enumerate(panels):
        for c, axes in enumerate(every[r]):
            if c >= len(line):
                axes.set_axis_off()
                continue
            drawn = _heat(axes, line[c], norm, CELLS)
            below = apart or r == down - 1 or c >= len(panels[r + 1])
            _ticks(axes.yaxis, labels[r][0], height, shown=c == 0)
            _ticks(axes.xaxis, labels[r][1], width, shown=below)
            if r == 0:
                _text(axes.set_title, columns[c], 9)
            if c == 0:
                _text(axes.set_ylabel, rows[r], 9)
    _finish(figure, every.ravel().tolist(), drawn, sum(panels, []), down * height)
    figure.align_ylabels()
    figure.supylabel("query", fontsize=9)
    figure.supxlabel("key", fontsize=9)
    if title:
        _text(figure.suptitle, title, 11, figure.get_figwidth())
    return figure


def visible(amap: AttentionMap, batch: int, head: int) -> Tensor:
    """Which keys the queries of one head may see, `[t, s]`: those whose score isn't -inf."""
    one = scores.tile(amap.problem, batch=slice(batch, batch + 1), heads=slice(head, head + 1))
    return one[0, 0] > -torch.inf


# -- positions -------------------------------------------------------------------------------------


def curves(encoding: Tensor, dimensions: Sequence[int], *, counted_from: int = 0) -> Figure:
    """A positional encoding `[positions, d]` as curves over position, a panel for each of `dimensions`.

    Positions and dimensions are counted from 0, or from `counted_from`: textbooks that speak of the
    first sine and cosine as dimensions 1 and 2 want 1. Raises ValueError for a dimension outside d.
    """
    values = _encoding(encoding)
    positions = np.arange(len(values)) + counted_from
    last = values.shape[1] - 1 + counted_from
    for dimension in dimensions:
        if not counted_from <= dimension <= last:
            raise ValueError(f"dimensions must lie between {counted_from} and {last}, and {dimension} came.")
    across = min(2, len(dimensions))
    down = -(-len(dimensions) // across) if across else 0
    if not down:
        raise ValueError("curves needs at least one dimension, and none came.")
    figure = Picture(figsize=(4.2 * across, 1.9 * down + 0.4), dpi=150, layout="constrained")
    every = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    colours = colormaps[WEIGHT](np.linspace(0.1, 0.75, len(dimensions)))
    for axes, dimension, colour in zip(every, dimensions, colours, strict=False):
        column = values[:, dimension - counted_from]
        axes.plot(positions, column, color=colour, marker="o", markersize=3.5, linewidth=1.3)
        axes.set_title(f"dimension {dimension}", fontsize=9)
        axes.grid(color="#e0e0e0", linewidth=0.6)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in every[len(dimensions) :]:
        axes.set_axis_off()
    every[0].set_xlim(positions[0] - 0.5, positions[-1] + 0.5)
    reach = 1.1 * max(float(np.abs(values).max()), 1e-6)
    every[0].set_ylim(-reach, reach)
    figure.supxlabel("position", fontsize=9)
    figure.supylabel("encoding", fontsize=9)
    return figure


def image(encoding: Tensor, *, counted_from: int = 0, title: str = "positional encoding") -> Figure:
    """A positional encoding `[positions, d]` as an image: positions across, dimensions down."""
    values = _encoding(encoding)
    length, d = values.shape
    reach = max(float(np.abs(values).max()), 1e-6)
    width, height = np.clip(0.06 * length, 3.5, 9), np.clip(0.06 * d, 2.0, 6)
    figure = Picture(figsize=(width + 1.5, height + 0.9), dpi=150, layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(
        values.T,
        cmap=VALUE,
        vmin=-reach,
        vmax=reach,
        aspect="auto",
        interpolation="nearest",
        extent=(
            counted_from - 0.5,
            counted_from + length - 0.5,
            counted_from + d - 0.5,
            counted_from - 0.5,
        ),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.set_xlabel("position", fontsize=9)
    axes.set_ylabel("dimension", fontsize=9)
    axes.set_title(_legible(title), fontsize=11, parse_math=False)
    bar = figure.colorbar(drawn, ax=axes, pad=0.02)
    bar.set_label("encoding", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


# -- weights to panels -----------------------------------------------------------------------------


def _panel(weights: Weights, batch: int, head: int, keep: Tensor | None) -> Panel:
    """One head's weights `[t, s]` as a masked array; masked = may not attend."""
    if isinstance(weights, AttentionMap):
        b, h, t, s = weights.shape
        for name, index, size in (("batch", batch, b), ("head", head, h)):
            if not 0 <= index < size:
                raise ValueError(f"{name} must lie between 0 and {size - 1}, and {index} came.")
        _drawable(t, s)
        tile, seen = weights[batch, head], visible(weights, batch, head)
    elif isinstance(weights, Tensor):
        if weights.dim() != 2 or not weights.is_floating_point():
            raise ValueError(
                "weights must be an AttentionMap or a floating-point tensor [t, s], and "
                f"{sizes(weights)} of {weights.dtype} came."
            )
        _drawable(*weights.shape)
        tile, seen = weights, torch.ones(weights.shape, dtype=torch.bool)
    else:
        raise TypeError(f"weights must be an AttentionMap or a tensor, and {kind(weights)} came.")
    values = tile.detach().to("cpu", torch.float64)  # [t, s]
    seen = seen.cpu()
    if keep is not None:
        seen = seen & _spread(keep, values)
    if not bool(values[seen].isfinite().all()):
        raise ValueError("weights must be finite, and NaN or infinity came among them.")
    return np.ma.array(values.numpy(), mask=~seen.numpy())


def _panels(weights: Weights | Sequence[AttentionMap], keep: Tensor | None, batch: int) -> list[list[Panel]]:
    """The panels of a grid, a list for each row."""
    if isinstance(weights, Tensor):
        if weights.dim() != 4:
            raise ValueError(
                f"a grid's tensor must be [b, h, t, s], four dimensions, and {sizes(weights)} came: "
                "head() draws [t, s]."
            )
        b, h = weights.shape[:2]
        seen = None if keep is None else _spread(keep, weights)  # [b, h, t, s]
        panels = [
            [_panel(weights[i, j], 0, 0, None if seen is None else seen[i, j]) for j in range(h)]
            for i in range(b)
        ]
    elif keep is not None:
        raise ValueError("keep goes with a tensor; a map knows its own mask: see AttentionMap.under.")
    elif isinstance(weights, AttentionMap):
        b, h = weights.shape[:2]
        panels = [[_panel(weights, i, j, None) for j in range(h)] for i in range(b)]
    else:
        if not isinstance(weights, Sequence) or not all(isinstance(one, AttentionMap) for one in weights):
            raise TypeError(
                "a grid's weights must be a list of AttentionMaps, an AttentionMap or a tensor, and "
                f"{kind(weights)} came."
            )
        panels = [[_panel(layer, batch, j, None) for j in range(layer.shape[1])] for layer in weights]
    if not panels or not all(panels):
        raise ValueError("a grid needs at least one head in every row, and a row without one came.")
    return panels


def _spread(keep: Tensor, weights: Tensor) -> Tensor:
    """A boolean mask broadcast to the weights' shape."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"keep must be a boolean tensor, True = may attend, and {kind(keep)} came.")
    try:
        return keep.detach().cpu().expand(weights.shape)
    except RuntimeError:
        raise ValueError(
            f"keep must broadcast to the weights {sizes(weights)}, and {sizes(keep)} came."
        ) from None


def _drawable(t: int, s: int) -> None:
    if not 0 < t <= MOST or not 0 < s <= MOST:
        raise ValueError(
            f"a picture holds 1 to {MOST} queries and keys, and [{t}, {s}] came: draw a tile of the map, "
            "e.g. figures.head(amap[0, 0, :512, :512])."
        )


def _scale(panels: list[Panel]) -> Normalize:
    """One colour scale for all: from 0 to the largest weight of a query that had a choice of keys.

    The weights of long texts are small and many: there the scale is that of their square roots.
    """
    free = [panel[panel.count(axis=1) > 1] for panel in panels]
    top = max((float(rows.max()) for rows in free if rows.count()), default=1.0) or 1.0
    step = 0.1 if top > 0.5 else 10.0 ** (np.floor(np.log10(top)) - 1)
    top = float(np.ceil(top / step - 1e-9) * step)  # a round number, upwards
    long = max(max(panel.shape) for panel in panels) > LONG
    return PowerNorm(0.5, 0.0, top) if long else Normalize(0.0, top)


# -- panels to pictures ----------------------------------------------------------------------------


def _row(panels: list[Panel], labels: Names, titles: Sequence[str], title: str | None) -> Figure:
    """Panels of one shape side by side, in full."""
    t, s = panels[0].shape
    cell = _cell(max(t, s))
    height, width = max(1.8, t * cell), max(1.8, s * cell)
    margin = _margin([name for names in labels for name in names or ()])
    figure = Picture(
        figsize=(len(panels) * (width + 0.15) + margin + 1.7, height + margin + 1.2),
        dpi=150,
        layout="constrained",
    )
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    norm = _scale(panels)
    for axes, panel, name in zip(every, panels, titles, strict=True):
        drawn = _heat(axes, panel, norm, MOST)
        _ticks(axes.yaxis, labels[0], height, shown=axes is every[0])
        _ticks(axes.xaxis, labels[1], width)
        if cell >= 0.5:
            _numbers(axes, panel, drawn)
        _text(axes.set_title, name, 11, width if len(panels) > 1 else max(width, 3.6))
        axes.set_xlabel("key", fontsize=10)
    every[0].set_ylabel("query", fontsize=10)
    _finish(figure, list(every), drawn, panels, height)
    if title:
        _text(figure.suptitle, title, 12, figure.get_figwidth())
    return figure


def _cell(n: int) -> float:
    """Inches a side for each of n tokens: room for a number while they are few, 11 in all at most."""
    return 0.55 if n <= 12 else float(np.clip(9 / n, 0.14, 0.3)) if n <= 78 else 11 / n


def _margin(names: Sequence[str]) -> float:
    """Inches that the longest tick label takes."""
    return 0.35 + 0.075 * max((len(_short(name)) for name in names), default=2)


def _heat(axes: Axes, panel: Panel, norm: Normalize, most: int) -> AxesImage:
    """The heat map itself, in coordinates of tokens; at most `most` cells a side."""
    t, s = panel.shape
    step = -(-max(t, s) // most)
    pooled = _pool(panel, step)
    right, bottom = (step * n - 0.5 for n in (pooled.shape[1], pooled.shape[0]))
    axes.patch.set(**MASKED)
    drawn = axes.imshow(
        pooled,
        cmap=WEIGHT,
        norm=norm,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, right, bottom, -0.5),
    )
    axes.set(xlim=(-0.5, s - 0.5), ylim=(t - 0.5, -0.5))  # the last cells may cover less
    return drawn


def _pool(panel: Panel, step: int) -> Panel:
    """A cell for every step × step weights, the largest of them: a mean erases diagonals."""
    if step == 1:
        return panel
    down, across = (np.arange(0, n, step) for n in panel.shape)
    low = panel.filled(-1.0)
    pooled = np.maximum.reduceat(np.maximum.reduceat(low, down, axis=0), across, axis=1)
    return np.ma.array(pooled, mask=pooled < 0)


def _numbers(axes: Axes, panel: Panel, drawn: AxesImage) -> None:
    """Each weight written into its cell."""
    for (i, j), weight in np.ma.ndenumerate(panel):
        red, green, blue, _ = drawn.cmap(drawn.norm(weight))
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        digits = f"{weight:.2f}" if weight >= 0.005 else "0"
        axes.text(j, i, digits, ha="center", va="center", fontsize=8, color=ink)


def _ticks(axis: XAxis | YAxis, names: list[str] | None, inches: float, shown: bool = True) -> None:
    """Token labels, thinned to what fits; positions where there are none."""
    if names is None:
        axis.set_major_locator(MaxNLocator(nbins=max(2, int(inches / 0.2)), integer=True))
    else:
        crowd = len(names) * LINE / inches
        step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n >= crowd)
        at = range(0, len(names), step)
        # Where not every token is named, positions say which ones are.
        text = [_short(names[i]) + (f"  {i}" if step > 1 else "") for i in at]
        wide = max(map(len, text)) * 0.07 > 0.9 * step * inches / len(names)
        turn = "vertical" if wide and isinstance(axis, XAxis) else "horizontal"
        axis.set_ticks(at, text, parse_math=False, rotation=turn)
    axis.set_tick_params(labelsize=8, length=2, labelbottom=shown, labelleft=shown)


def _finish(figure: Figure, every: list[Axes], drawn: AxesImage, panels: list[Panel], inches: float) -> None:
    """One colour bar, `inches` long, for all panels; below it what grey means, where there is any."""
    top = drawn.get_clim()[1] or 1.0
    over = any(panel.max() > top * (1 + 1e-6) for panel in panels if panel.count())
    bar = figure.colorbar(
        drawn, ax=every, pad=0.02, aspect=inches / 0.16, extend="max" if over else "neither"
    )
    root = isinstance(drawn.norm, PowerNorm)
    bar.set_label("attention weight" + (", square-root scale" if root else ""), fontsize=9)
    if root:
        bar.set_ticks([top * n * n / 25 for n in range(6)], minor=False)
        bar.ax.yaxis.set_major_formatter("{x:.2g}")
    bar.ax.tick_params(labelsize=8)
    if any(np.ma.is_masked(panel) for panel in panels):
        bar.ax.legend(
            handles=[Patch(**MASKED)],
            labels=["may not\nattend"],
            loc="upper left",
            bbox_to_anchor=(0, -0.1 / inches),
            borderaxespad=0,
            borderpad=0,
            handlelength=1.4,
            fontsize=8,
            frameon=False,
        )


# -- words -----------------------------------------------------------------------------------------


def _labels(panel: Panel, tokens: Labels | None, keys: Labels | None) -> Names:
    """The names of queries and keys, checked against the panel."""
    t, s = panel.shape
    if keys is None and t == s:
        keys = tokens
    for what, names, size in (("tokens", tokens, t), ("keys", keys, s)):
        if names is not None and len(names) != size:
            raise ValueError(f"{what} must be {size} labels, one for each, and {len(names)} came.")
    return (None if tokens is None else list(tokens), None if keys is None else list(keys))


def _each(tokens: Labels | Sequence[Labels] | None, down: int) -> list[Labels | None]:
    """The labels of each row of a grid."""
    if tokens is None:
        return [None] * down
    if all(isinstance(name, str) for name in tokens):
        return [cast(Labels, tokens)] * down
    if len(tokens) != down:
        raise ValueError(f"tokens must be one list, or one for each of {down} rows, and {len(tokens)} came.")
    return list(tokens)


def _named(names: Labels | None, size: int, what: str) -> list[str]:
    """The names of a grid's rows or columns."""
    if names is None:
        return [f"{what} {i}" for i in range(size)]
    if len(names) != size:
        raise ValueError(f"the grid has {size} {what}s and wants a name for each, and {len(names)} came.")
    return list(names)


def _text(put: Callable[..., object], words: str, size: float, inches: float | None = None) -> None:
    """A title or label: legible, no formula, wrapped to so many inches."""
    lines = [_legible(line) for line in words.split("\n")]
    if inches is not None:
        lines = [fill(line, max(12, int(inches / (size * 0.0085)))) for line in lines]
    put("\n".join(lines), fontsize=size, parse_math=False)


def _short(name: str) -> str:
    """A tick label: legible, and cut where it is longer than a label should be."""
    name = _legible(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _legible(words: str) -> str:
    """Words as the font can draw them: a character that it lacks becomes its escape."""
    drawable = _characters(tuple(FontProperties().get_family()))
    return "".join(
        c if ord(c) in drawable and c.isprintable() else c.encode("unicode_escape").decode() for c in words
    )


@lru_cache(maxsize=8)
def _characters(families: tuple[str, ...]) -> frozenset[int]:
    """The characters that these font families hold between them."""
    held: set[int] = set()
    for family in families:
        held |= get_font(findfont(FontProperties(family=[family]))).get_charmap().keys()
    return frozenset(held)


def _encoding(encoding: Tensor) -> np.ndarray:
    """A positional encoding `[positions, d]` as numbers; `[1, positions, d]` will do."""
    if not isinstance(encoding, Tensor):
        raise TypeError(f"an encoding must be a tensor [positions, d], and {kind(encoding)} came.")
    values = encoding.detach().cpu().double()
    if values.dim() == 3 and values.shape[0] == 1:
        values = values[0]
    if values.dim() != 2 or not values.numel():
        raise ValueError(f"an encoding must be [positions, d], and {sizes(encoding)} came.")
    return values.numpy()
