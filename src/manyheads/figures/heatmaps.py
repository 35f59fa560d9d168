"""From panels to figures: heat maps, their colour scales and bars, and labels that fit and are legible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from io import BytesIO
from itertools import count
from textwrap import fill
from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from manyheads.figures.cells import DPI, POOLING, SHARP, AxisLabels, Panel

WEIGHT = "viridis"  # sequential, and legible without colour vision
MASKED: dict[str, Any] = {"facecolor": "#e8e8e8", "edgecolor": "#cccccc", "hatch": "////", "linewidth": 0.0}

# Lengths are in inches.
FULL, HALF = 11.0, 7.0  # the longest side of a panel with a cell for each token, and of a pooled panel
PAGE = 20.0  # the largest width and height of all small multiples together
GAP = 0.1  # the distance between small multiples
LINE = 0.125  # the height of a line of tick labels
LETTER = 0.07  # the width of a character of a label
# Numbers of tokens.
MOST = int(FULL * SHARP)  # the most queries or keys with a cell each; more are pooled
FEW = 12  # the most queries or keys with a number in each cell
LONG = 40  # above it the colour scale is that of square roots, because many weights are small
SPARSE = 5  # the most tokens per label; positions are shown if labels would be rarer
LONGEST = 20  # the most characters of a tick label


class Picture(Figure):
    """A matplotlib Figure that a notebook displays even if pyplot isn't used."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


class Strip(NamedTuple):
    """A row of panels: its name, the titles and axis labels of the panels, and their height in inches."""

    name: str
    titles: list[str]
    panels: list[Panel]
    labels: AxisLabels
    height: float


class Ticks(NamedTuple):
    """The positions of an axis's ticks, their labels, and the distance between two of them in inches."""

    positions: range
    labels: list[str]
    distance: float

    @property
    def width(self) -> float:
        """Return the width of the longest label in inches."""
        return LETTER * max(map(len, self.labels)) + 0.1

    @property
    def are_vertical(self) -> bool:
        """Return True if the labels must be vertical below a panel."""
        return self.width - 0.1 > 0.9 * self.distance

    @property
    def height(self) -> float:
        """Return the height of the labels below a panel in inches."""
        return self.width if self.are_vertical else 0.25


# -- figures ---------------------------------------------------------------------------------------


def draw_row(
    groups: list[list[Panel]],
    bar_labels: list[str],
    labels: AxisLabels,
    titles: Sequence[str],
    title: str | None,
) -> Figure:
    """Draw panels of one shape side by side, with a colour scale and bar for each group of them."""
    panels = sum(groups, [])
    height, width = inches = panel_size(panels[0].t, panels[0].s)
    y_ticks, x_ticks = make_ticks(labels[0], panels[0].t, height), make_ticks(labels[1], panels[0].s, width)
    size = len(panels) * (width + 0.15) + 1.7 * len(groups) + y_ticks.width, height + 1.3 + x_ticks.height
    figure = Picture(figsize=size, dpi=DPI, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0].tolist()
    remaining = iter(all_axes)
    for group, bar_label in zip(groups, bar_labels, strict=True):
        norm, group_axes = weight_scale(group), [next(remaining) for _ in group]
        for axes, panel in zip(group_axes, group, strict=True):
            image = draw_heatmap(axes, panel, norm, inches)
        _add_weight_bar(image, group, height, bar_label, ax=group_axes, pad=0.02, aspect=height / 0.16)
    for axes, name in zip(all_axes, titles, strict=True):
        axes.yaxis.set_visible(axes is all_axes[0])
        set_ticks(axes.yaxis, y_ticks)
        set_ticks(axes.xaxis, x_ticks)
        set_text(axes.set_title, name, 11, width if len(panels) > 1 else max(width, 3.6))
        axes.set_xlabel(_axis_label("key", 1, panels), fontsize=10)
    all_axes[0].set_ylabel(_axis_label("query", 0, panels), fontsize=10)
    set_title(figure, title, 12)
    return figure


def draw_sheet(
    strips: list[Strip], width: float, norm: Normalize, bar_label: str, rows: str, title: str | None
) -> Figure:
    """Draw strips of panels on one colour scale, each panel `width` inches wide.

    Positions are computed without matplotlib's layout, which takes minutes for a thousand panels. Ticks and
    titles that neighbouring strips have in common are drawn once.
    """
    panels = [panel for strip in strips for panel in strip.panels]
    keys = [(strip.panels[0].s, strip.labels[1]) for strip in strips]
    has_x_ticks = [this != below for this, below in zip(keys, [*keys[1:], None], strict=True)]
    titles = [strip.titles for strip in strips]
    has_titles = [this != above[: len(this)] for this, above in zip(titles, [[], *titles[:-1]], strict=True)]
    y_ticks = [make_ticks(strip.labels[0], strip.panels[0].t, strip.height) for strip in strips]
    x_ticks = [make_ticks(names, s, width) for s, names in keys]

    # The size of the figure in inches, and the upper edge of each strip.
    name_width = LETTER * max(len(strip.name) for strip in strips)
    are_horizontal = name_width > min(strip.height for strip in strips) + GAP  # too long for vertical names
    ticks_width = max(ticks.width for ticks in y_ticks)
    left = 0.25 + (name_width if are_horizontal else 0.2) + ticks_width
    panels_width = max(map(len, titles)) * (width + GAP)
    title = _wrap(title or "", 11, left + panels_width + 1)
    y = 0.2 * (title.count("\n") + 1) if title else 0.0
    tops = []
    for strip, titled, ticked, ticks in zip(strips, has_titles, has_x_ticks, x_ticks, strict=True):
        tops.append(y + (0.25 if titled and any(strip.titles) else 0.05))
        y = tops[-1] + strip.height + GAP + (ticks.height if ticked else 0)
    w, h = left + panels_width + 1.4, y + 0.35
    figure = Picture(figsize=(w, h), dpi=DPI)

    def place(x: float, y: float, width: float, height: float) -> Axes:
        """Add axes at a distance in inches from the upper left corner."""
        return figure.add_axes((x / w, 1 - (y + height) / h, width / w, height / h))

    for r, (strip, y) in enumerate(zip(strips, tops, strict=True)):
        step = int(np.ceil(LETTER * max(map(len, strip.titles)) / (width + GAP))) or 1
        for c, panel in enumerate(strip.panels):
            axes = place(left + c * (width + GAP), y, width, strip.height)
            image = draw_heatmap(axes, panel, norm, (strip.height, width))
            axes.yaxis.set_visible(c == 0)
            axes.xaxis.set_visible(has_x_ticks[r] or c >= len(titles[r + 1]))
            if axes.xaxis.get_visible():
                set_ticks(axes.xaxis, x_ticks[r])
            if c == 0:
                set_ticks(axes.yaxis, y_ticks[r])
                set_text(axes.set_ylabel, strip.name, 9)
                axes.yaxis.set_label_coords(-(ticks_width + 0.05) / width, 0.5)
                if are_horizontal:
                    axes.yaxis.label.set(rotation=0, ha="right", va="center")
            if has_titles[r] and c % step == 0:  # if not all titles fit, every second or third, …
                set_text(axes.set_title, strip.titles[c], 9)
    bottom = tops[-1] + strips[-1].height
    height = bottom - tops[0]
    bar_axes = place(left + panels_width + 0.05, tops[0], 0.16, height)
    _add_weight_bar(image, panels, height, bar_label, cax=bar_axes)
    figure.supylabel(_axis_label(rows, 0, panels), x=0.05 / w, y=1 - (tops[0] + height / 2) / h, fontsize=9)
    x, y = (left + panels_width / 2) / w, 1 - (bottom + x_ticks[-1].height + 0.1) / h
    figure.supxlabel(_axis_label("key", 1, panels), x=x, y=y, va="top", fontsize=9)
    if title:
        set_text(partial(figure.suptitle, x=x, y=1 - 0.05 / h, va="top"), title, 11)
    return figure


def panel_size(t: int, s: int) -> tuple[float, float]:
    """Return the height and width of a single panel in inches. Few cells are large, so that numbers fit."""
    n = max(t, s)
    side = FULL if n <= MOST else HALF
    cell = 0.55 if n <= FEW else float(np.clip(9 / n, 0.14, 0.3)) if n <= 78 else side / n
    return max(1.8, t * cell), max(1.8, s * cell)


def small_panel_size(t: int, s: int, down: int, across: int) -> tuple[float, float]:
    """Return the height and width of a small multiple in inches, so that labels fit and all fit the page."""
    side = min(float(np.clip(1.1 * LINE * max(t, s), 1.15, 2.75)), PAGE / across, PAGE / down)
    height, width = (max(0.35, n / max(t, s)) * side for n in (t, s))
    return height, width


def _axis_label(name: str, axis: int, panels: list[Panel]) -> str:
    """Return the label of an axis, with the largest number of tokens in a cell."""
    tokens = max(-(-panel[1 + axis] // panel.cells.shape[axis]) for panel in panels)
    return name if tokens == 1 else f"{name}, up to {tokens:,} in a cell"


# -- panels ----------------------------------------------------------------------------------------


def weight_label(reduce: str, panels: list[Panel]) -> str:
    """Return the label of a colour bar of weights."""
    is_pooled = any(panel.cells.shape != (panel.t, panel.s) for panel in panels)
    return f"{POOLING[reduce]} attention weight of each cell" if is_pooled else "attention weight"


def draw_heatmap(axes: Axes, panel: Panel, norm: Normalize, box: tuple[float, float]) -> AxesImage:
    """Draw a panel in coordinates of tokens, with its numbers if they fit a box of inches."""
    axes.patch.set(**MASKED)
    axes.spines[:].set_visible(False)  # spines would cover half of the first key, which is often a sink
    image = draw_matrix(axes, panel.cells, norm, WEIGHT, (-0.5, panel.s - 0.5, panel.t - 0.5, -0.5))
    if box[0] / panel.t >= 0.2 and box[1] / panel.s >= 0.5:
        weights = np.ma.ndenumerate(panel.cells)
        write_numbers(image, {at: f"{w:.2f}" if w >= 0.005 else "<.01" if w else "0" for at, w in weights})
    return image


def draw_matrix(
    axes: Axes, values: Any, norm: Normalize, colors: str, extent: tuple[float, ...] | None = None
) -> AxesImage:
    """Draw numbers `[rows, cols]` as colours. The default extent has cell (i, j) at x = j and y = i."""
    return axes.imshow(values, cmap=colors, norm=norm, interpolation="nearest", aspect="auto", extent=extent)  # type: ignore[arg-type]


def write_numbers(image: AxesImage, numbers: Mapping[Any, str]) -> None:
    """Write numbers, by (row, column), into cells: in white if the cell is dark, else in black."""
    colors = image.to_rgba(np.ma.asarray(image.get_array()))  # [rows, cols, 4]; a masked cell is black
    for (i, j), digits in numbers.items():
        red, green, blue, _ = colors[i, j]
        color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        image.axes.text(j, i, digits, ha="center", va="center", fontsize=8, color=color)


# -- colours ---------------------------------------------------------------------------------------


def weight_scale(panels: list[Panel]) -> Normalize:
    """Return a colour scale from 0 to the largest weight of a query with some choice of keys.

    The first queries of a causal text share their weight among few keys, and would set the scale for all
    others. So a query counts only if it has more than one visible key, and more than an eighth of the largest
    number of visible keys. Long texts have many small weights, for which the scale is that of square roots.
    """
    visible = [panel.cells.count(axis=1) for panel in panels]
    counted = [panel.cells[n > max(1, n.max() / 8)] for panel, n in zip(panels, visible, strict=True)]
    top = max((float(rows.max()) for rows in counted if rows.count()), default=1.0) or 1.0
    step = 0.1 if top > 0.5 else 10.0 ** (np.floor(np.log10(top)) - 1)
    top = float(np.ceil(top / step - 1e-3) * step)  # rounded up, except for a rounding error
    is_long = max(max(panel.t, panel.s) for panel in panels) > LONG
    return PowerNorm(0.5, 0.0, top) if is_long else Normalize(0.0, top)


def log_scale(panels: list[Panel], mean: float) -> Normalize:
    """Return a logarithmic colour scale from about a hundredth of the mean to the largest number."""
    top = max((float(panel.cells.max()) for panel in panels if panel.cells.count()), default=0.0)
    if not top:
        return Normalize(0.0, 1.0)
    return LogNorm(10.0 ** round(np.log10(mean / 100)), top, clip=True)


def add_colorbar(image: AxesImage, label: str, **options: Any) -> Colorbar:
    """Add a colour bar with a label."""
    bar = cast(Figure, image.figure).colorbar(image, **options)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=9)
    return bar


def _add_weight_bar(image: AxesImage, panels: list[Panel], inches: float, label: str, **options: Any) -> None:
    """Add a colour bar for panels, `inches` long, and a legend for masked cells if there are any."""
    low, top = image.get_clim()
    values = [panel.cells for panel in panels if panel.cells.count()]
    under = any(cells.min() < low for cells in values)
    over = any(cells.max() > top * (1 + 1e-6) for cells in values)
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((under, over), "neither")
    scale = {PowerNorm: ", square-root scale", LogNorm: ", logarithmic scale"}.get(type(image.norm), "")
    label = _wrap(label + scale, 9, inches)
    bar = add_colorbar(image, label, extend=extend, extendfrac=0.1 / inches, **options)
    if isinstance(image.norm, PowerNorm):
        bar.set_ticks([top * n * n / 25 for n in range(6)], minor=False)
        bar.ax.yaxis.set_major_formatter("{x:.2g}")
    if isinstance(image.norm, LogNorm):
        first, last = round(np.log10(low)), int(np.floor(np.log10(top) + 1e-9))
        step = _round_up((last - first) * 0.2 / inches)
        bar.set_ticks([10.0**n for n in range(first, last + 1, step)])
        bar.ax.yaxis.set_major_formatter("{x:,g}")
        bar.ax.yaxis.set_minor_locator(NullLocator())
    if any(np.ma.is_masked(panel.cells) for panel in panels):
        bar.ax.legend(
            handles=[Patch(**MASKED)],
            labels=["masked"],
            loc="upper left",
            bbox_to_anchor=(0, -0.1 / inches),
            borderaxespad=0,
            borderpad=0,
            handlelength=1.4,
            fontsize=8,
            frameon=False,
        )


# -- ticks -----------------------------------------------------------------------------------------


def set_ticks(axis: XAxis | YAxis, ticks: Ticks) -> None:
    """Put ticks on an axis."""
    rotation = "vertical" if ticks.are_vertical and isinstance(axis, XAxis) else "horizontal"
    axis.set_ticks(ticks.positions, ticks.labels, parse_math=False, rotation=rotation)
    axis.set_tick_params(labelsize=8, length=2)


def make_ticks(names: list[str] | None, size: int, inches: float) -> Ticks:
    """Label as many tokens as fit, at equal distances, or round positions if few labels of tokens fit."""
    step = _round_up(LINE * size / inches)
    if names is None or step > SPARSE:
        step = _round_up(max(0.25, 0.15 + 0.075 * len(f"{size:,}")) * size / inches - 1e-6)
        labels = [f"{i:,}" for i in range(0, size, step)]
    else:  # if not every token has a label, a label also has its position
        labels = [_shorten(names[i]) + (f"  {i}" if step > 1 else "") for i in range(0, size, step)]
    return Ticks(range(0, size, step), labels, step * inches / size)


def _round_up(least: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, 50, … that is at least `least`."""
    return next(n * 10**k for k in count() for n in (1, 2, 5) if n * 10**k >= least)


# -- text ------------------------------------------------------------------------------------------


def set_title(figure: Figure, title: str | None, size: float) -> None:
    """Set the title of a figure, if there is a title."""
    if title:
        set_text(figure.suptitle, title, size, figure.get_figwidth())


def set_text(setter: Callable[..., object], text: str, size: float, inches: float | None = None) -> None:
    """Call `setter` with a title or label that is legible, has no formulas, and is at most `inches` wide."""
    setter(_wrap(text, size, inches), fontsize=size, parse_math=False)


def _wrap(text: str, size: float, inches: float | None) -> str:
    """Return a legible text, in lines of at most `inches`."""
    if not isinstance(text, str):
        raise TypeError(f"Expected title to be a string, got {text!r}.")
    lines = [legible(line) for line in text.split("\n")]
    if inches is not None:
        lines = [fill(line, max(12, int(inches / (size * 0.0085)))) for line in lines]
    return "\n".join(lines)


def _shorten(name: str) -> str:
    """Return a legible tick label, cut to `LONGEST` characters."""
    name = legible(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def legible(text: str) -> str:
    """Replace each character that the font lacks by its escape."""
    drawable = _characters(tuple(FontProperties().get_family()))
    return "".join(
        c if ord(c) in drawable and c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


@lru_cache(maxsize=8)
def _characters(families: tuple[str, ...]) -> frozenset[int]:
    """Return the characters that the fonts of these families have."""
    fonts = (get_font(findfont(FontProperties(family=[family]))) for family in families)
    return frozenset[int]().union(*(font.get_charmap() for font in fonts))
