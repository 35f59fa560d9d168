"""Draw panels as figures: heat maps, colour scales and bars, and labels that fit and are legible."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from io import BytesIO
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, cast
from warnings import catch_warnings, filterwarnings

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation

from manyheads.figures.cells import DPI, POOLING, SHARP, AxisLabels, Labels, Panel
from manyheads.figures.fonts import families, isolate, isolate_quotes, lacking, legible
from manyheads.figures.strips import GAP as STRIP_GAP
from manyheads.figures.strips import SIZE as STRIP_SIZE
from manyheads.figures.strips import Strips, draw_strips
from manyheads.highlights import format_score
from manyheads.tokens import TokenizedText, is_boundary

BarTicks = Sequence[tuple[float, str]]  # weights of a colour bar, with labels

WEIGHT = "viridis"  # sequential, and legible without colour vision
MASKED: dict[str, Any] = {  # quiet, but not a weight in print without colours
    "facecolor": "#f1f1f1",
    "edgecolor": "#dedede",
    "hatch": "///",
    "hatch_linewidth": 0.6,
    "linewidth": 0.0,
}

# Lengths are in inches.
FULL, HALF = 11.0, 7.0  # the longest side of a panel with a cell for each token, and of a pooled panel
PAGE = 16.0  # the largest width and height of all small multiples together
GAP = 0.1  # the distance between small multiples
LINE = 0.125  # the height of a line of tick labels
TICK = 0.1  # the distance of a tick label from its panel, and room after it
TICK_GAP = 0.3  # the least distance between two ticks of a colour bar
# Numbers of tokens.
MOST = int(FULL * SHARP)  # the most queries or keys with a cell each; more are pooled
FEW = 12  # the most queries or keys with a number in each cell
SPARSE = 5  # the most tokens per label; if fewer labels fit, positions are shown instead
# Lengths of text in inches.
LONGEST = 1.5  # the width of a tick label
CAPTION = 0.16  # the height of a caption of a panel
TICK_LENGTH, TICK_PAD = 2, 3.5  # points: of a tick, and between it and its label
# Sizes of text in points.
TICKS, TITLES, TITLE = 8, 9, 11  # of tick labels, of titles of panels and axes, of the title of a figure
CAPTIONS = 7.5  # of captions of panels
SUBTITLES, LEADING = 8.5, 1.3  # of the line below a title, and the height of its lines as a multiple
CAPTION_STYLE: Any = {"fontsize": CAPTIONS, "color": "#555555", "ha": "center", "va": "bottom"}

RULER = Lock()  # held while a text is measured

# In files for papers, text is text: it can be searched and edited.
TEXT: Any = {"svg.fonttype": "none", "pdf.fonttype": 42}


class Picture(Figure):
    """A matplotlib Figure that a notebook displays even if pyplot isn't used.

    It says itself which characters no font has, so that matplotlib's warnings aren't needed.
    """

    def draw(self, renderer: Any) -> None:
        """Draw the figure."""
        with _no_warnings_of_glyphs():
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure. Text in SVG and PDF files is text, not outlines."""
        with _no_warnings_of_glyphs(), rc_context(TEXT):
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


@contextmanager
def _no_warnings_of_glyphs() -> Iterator[None]:
    with catch_warnings():
        filterwarnings("ignore", "Glyph .* missing from")
        yield


class Strip(NamedTuple):
    """A row of panels: its name, the titles and axis labels of the panels, and their height in inches.

    Captions are drawn above the panels, each next to its own; None for a strip without them.
    """

    name: str
    titles: list[str]
    panels: list[Panel]
    labels: AxisLabels
    height: float
    captions: Sequence[str] | None = None


class Ticks(NamedTuple):
    """The labels of an axis.

    Attributes:
        positions: The position of each label.
        labels: The labels.
        distance: The least distance between two of them in inches.
        joined: The words, and the characters, of several tokens, if each has a label.
    """

    positions: Sequence[float]
    labels: list[str]
    distance: float
    joined: Sequence[range] = ()

    @property
    def width(self) -> float:
        """Return the width of the longest label in inches."""
        return max(measure(label, TICKS) for label in self.labels) + TICK

    @property
    def are_vertical(self) -> bool:
        """Return True if the labels must be vertical below a panel."""
        return self.width - TICK > 0.9 * self.distance

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
    *,
    norm: Normalize | None = None,
    first: tuple[int, int] = (0, 0),
    subtitles: Sequence[str] = (),
    strips: Strips | None = None,
    bar_ticks: BarTicks | None = None,
    colors: str | None = None,
) -> Figure:
    """Draw panels of one shape side by side, with a colour scale and bar for each group of them.

    Args:
        groups: The panels.
        bar_labels: The label of each group's colour bar.
        labels: The labels of queries and keys.
        titles: The title of each panel.
        title: The title of the figure.
        norm: The scale of all groups. Default: `weight_scale` of each.
        first: The positions of the first query and of the first key.
        subtitles: Lines below each title, in a smaller size. Default: none.
        strips: The numbers at the edges of a single panel.
        bar_ticks: The ticks of the colour bars. Default: a few round weights.
        colors: The name of a colour map. Default: that of weights.

    Returns:
        The figure.
    """
    panels = sum(groups, [])
    height, width = inches = panel_size(panels[0].t, panels[0].s)
    y_ticks = make_ticks(labels[0], panels[0].t, height, first[0])
    x_ticks = make_ticks(labels[1], panels[0].s, width, first[1])
    room = width if len(panels) > 1 else max(width + 0.6, 3.6)
    subtitles = [_wrap(subtitle, SUBTITLES, room) for subtitle in subtitles or [""] * len(panels)]
    lines = max(subtitle.count("\n") + 1 if subtitle else 0 for subtitle in subtitles)
    above = 0.0 if strips is None else STRIP_SIZE + STRIP_GAP  # inches between panels and titles
    below = above + lines * SUBTITLES * LEADING / 72
    size = len(panels) * (width + 0.15) + 1.7 * len(groups) + y_ticks.width, height + 1.3 + x_ticks.height
    size = size[0] + above, size[1] + below
    figure = Picture(figsize=size, dpi=DPI, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0].tolist()
    remaining = iter(all_axes)
    for group, bar_label in zip(groups, bar_labels, strict=True):
        scale, group_axes = norm or weight_scale(group), [next(remaining) for _ in group]
        for axes, panel in zip(group_axes, group, strict=True):
            image = draw_heatmap(axes, panel, scale, inches, colors or WEIGHT)
        bar = {"ax": group_axes, "pad": 0.02, "aspect": height / 0.16}
        add_weight_bar(image, group, height, bar_label, bar_ticks, **bar)
    for axes, name, subtitle in zip(all_axes, titles, subtitles, strict=True):
        axes.yaxis.set_visible(axes is all_axes[0])
        set_ticks(axes.yaxis, y_ticks)
        set_ticks(axes.xaxis, x_ticks)
        pad = 10 + 72 * below  # above the label of the bar's end
        set_text(partial(axes.set_title, pad=pad), name, TITLE, room)
        if strips is not None:
            draw_strips(axes, strips, panels[0].cells.shape)
        if subtitle:
            place: Any = ((0.5, 1), (0, 7 + 72 * above), "axes fraction", "offset points")
            style = CAPTION_STYLE | {"fontsize": SUBTITLES, "family": families(subtitle)}
            axes.annotate(isolate_quotes(subtitle), *place, **style, parse_math=False)
        axes.set_xlabel(_axis_label("key", 1, panels), fontsize=10)
    all_axes[0].set_ylabel(_axis_label("query", 0, panels), fontsize=10)
    set_title(figure, title, 12)
    if note := lacking("".join([*y_ticks.labels, *x_ticks.labels, *titles, *subtitles, title or ""])):
        set_text(figure.supxlabel, note, 8, size[0])
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
    name_width = max(measure(legible(strip.name), TITLES) for strip in strips)
    are_horizontal = name_width > min(strip.height for strip in strips) + GAP  # too long for vertical names
    ticks_width = max(ticks.width for ticks in y_ticks)
    left = 0.3 + (name_width if are_horizontal else 0.2) + ticks_width
    panels_width = max(map(len, titles)) * (width + GAP)
    center, w = left + panels_width / 2, left + panels_width + 1.4
    room = 2 * min(center, w - center) - 0.1  # for centered text
    title = _wrap(title or "", TITLE, room)
    y = 0.2 * (title.count("\n") + 1) + 0.05 if title else 0.0
    tops = []
    for strip, titled, ticked, ticks in zip(strips, has_titles, has_x_ticks, x_ticks, strict=True):
        tops.append(y + (0.25 if titled and any(strip.titles) else 0.1) + (CAPTION if strip.captions else 0))
        y = tops[-1] + strip.height + (ticks.height if ticked else 0)
    shown = [label for ticks in (*y_ticks, *x_ticks) for label in ticks.labels]
    note = _wrap(lacking("".join([*shown, *(strip.name for strip in strips), title])) or "", TICKS, room)
    h = y + 0.4 + (0.15 * (note.count("\n") + 1) if note else 0)
    figure = Picture(figsize=(w, h), dpi=DPI)

    def place(x: float, y: float, width: float, height: float) -> Axes:
        """Add axes at a distance in inches from the upper left corner."""
        return figure.add_axes((x / w, 1 - (y + height) / h, width / w, height / h))

    for r, (strip, y) in enumerate(zip(strips, tops, strict=True)):
        longest = max(measure(legible(name), TITLES) for name in strip.titles)
        step = int(np.ceil((longest + 0.05) / (width + GAP))) or 1
        for c, panel in enumerate(strip.panels):
            axes = place(left + c * (width + GAP), y, width, strip.height)
            image = draw_heatmap(axes, panel, norm, (strip.height, width))
            axes.yaxis.set_visible(c == 0)
            axes.xaxis.set_visible(has_x_ticks[r] or c >= len(titles[r + 1]))
            if axes.xaxis.get_visible():
                set_ticks(axes.xaxis, x_ticks[r])
            if c == 0:
                set_ticks(axes.yaxis, y_ticks[r])
                set_text(axes.set_ylabel, strip.name, TITLES)
                axes.yaxis.set_label_coords(-(ticks_width + 0.05) / width, 0.5)
                if are_horizontal:
                    axes.yaxis.label.set(rotation=0, ha="right", va="center")
            if has_titles[r] and c % step == 0:  # if not all titles fit, every second or third, …
                pad = 6 + (72 * CAPTION if strip.captions else 0)
                set_text(partial(axes.set_title, pad=pad), strip.titles[c], TITLES)
            if strip.captions and strip.captions[c]:
                caption = _shorten(strip.captions[c], CAPTIONS, width + GAP / 2)
                axes.annotate(caption, (0.5, 1), (0, 3), "axes fraction", "offset points", **CAPTION_STYLE)
    bottom = tops[-1] + strips[-1].height
    height = bottom - tops[0]
    bar_axes = place(left + panels_width + 0.05, tops[0], 0.16, height)
    add_weight_bar(image, panels, height, bar_label, cax=bar_axes)
    middle = 1 - (tops[0] + height / 2) / h
    figure.supylabel(_axis_label(rows, 0, panels), x=0.05 / w, y=middle, fontsize=TITLES)
    x, y = center / w, 1 - (bottom + x_ticks[-1].height + 0.1) / h
    figure.supxlabel(_axis_label("key", 1, panels), x=x, y=y, va="top", fontsize=TITLES)
    if note:
        figure.text(x, 0.05 / h, note, ha="center", va="bottom", fontsize=TICKS)
    if title:
        set_text(partial(figure.suptitle, x=x, y=1 - 0.05 / h, va="top"), title, TITLE)
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


def draw_heatmap(
    axes: Axes, panel: Panel, norm: Normalize, box: tuple[float, float], colors: str = WEIGHT
) -> AxesImage:
    """Draw a panel in coordinates of tokens, with its numbers if they fit a box of inches."""
    axes.patch.set(**MASKED)
    axes.spines[:].set_visible(False)  # spines would cover half of the first key, which is often a sink
    image = draw_matrix(axes, panel.cells, norm, colors, (-0.5, panel.s - 0.5, panel.t - 0.5, -0.5))
    if box[0] / panel.t >= 0.2 and box[1] / panel.s >= 0.5:
        weights = np.ma.ndenumerate(panel.cells)
        write_numbers(image, {at: _write_weight(w) for at, w in weights})
    return image


def _write_weight(weight: float) -> str:
    """Return a weight, or a difference of weights, with two decimals or more; one near 0 is "<.01"."""
    if abs(weight) >= 0.005:
        return format_score(weight).replace("-", "−")
    return "<.01" if weight > 0 else ">−.01" if weight else "0"


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
    """Return a colour scale from 0 to the largest weight of the queries with many visible keys.

    The scale is that of square roots, as in the viewer: most weights are small. The first queries of a causal
    text have large weights, because few keys are visible to them. These would determine the scale. So a query
    counts only if it has more than one visible key, and more than an eighth of the largest number of visible
    keys.
    """
    visible = [panel.cells.count(axis=1) for panel in panels]
    counted = [panel.cells[n > max(1, n.max() / 8)] for panel, n in zip(panels, visible, strict=True)]
    top = max((float(rows.max()) for rows in counted if rows.count()), default=1.0) or 1.0
    step = 0.1 if top > 0.5 else 10.0 ** (np.floor(np.log10(top)) - 1)
    # Rounded up, unless the excess is a rounding error.
    return PowerNorm(0.5, 0.0, float(np.ceil(top / step - 1e-3) * step))


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


def add_weight_bar(
    image: AxesImage,
    panels: list[Panel],
    inches: float,
    label: str,
    ticks: BarTicks | None = None,
    **options: Any,
) -> None:
    """Add a colour bar for panels, `inches` long, and a legend for masked cells if there are any."""
    low, top = image.get_clim()
    values = [panel.cells for panel in panels if panel.cells.count()]
    under = any(cells.min() < low for cells in values)
    over = any(cells.max() > top * (1 + 1e-6) for cells in values)
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((under, over), "neither")
    label += ", logarithmic scale" if isinstance(image.norm, LogNorm) else ""
    label = _wrap(label, TITLES, inches)
    bar = add_colorbar(image, label, extend=extend, extendfrac=0.1 / inches, **options)
    if ticks is not None:
        bar.set_ticks([value for value, _ in ticks], labels=[name for _, name in ticks], minor=False)
    elif isinstance(image.norm, PowerNorm):
        values = _weight_ticks(top, inches)
        bar.set_ticks(values, labels=[_format_weight(value) for value in values], minor=False)
    elif isinstance(image.norm, LogNorm):
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


def _weight_ticks(top: float, inches: float) -> list[float]:
    """Return the ticks of a bar of weights on a scale of square roots: 0, …, 0.1, 0.2, 0.5 and the top."""
    ticks, place = [top], inches
    digits = int(np.floor(np.log10(top)))
    for value in (n * 10.0**k for k in range(digits, digits - 5, -1) for n in (5, 2, 1)):
        at = inches * np.sqrt(value / top)
        if value < top and place - at >= TICK_GAP <= at:
            ticks, place = [value, *ticks], at
    return [0.0, *ticks]


def _format_weight(value: float) -> str:
    """Return a weight without rounding: `0.05`, and `2e-07` if it has many zeros."""
    return np.format_float_positional(value, 6, trim="-", fractional=False) if value > 1e-6 else f"{value:g}"


# -- ticks -----------------------------------------------------------------------------------------


def set_ticks(axis: XAxis | YAxis, ticks: Ticks) -> None:
    """Put ticks on an axis; the ticks of a word's tokens are joined by a hairline."""
    rotation = "vertical" if ticks.are_vertical and isinstance(axis, XAxis) else "horizontal"
    axis.set_ticks(ticks.positions, ticks.labels, parse_math=False, rotation=rotation)
    axis.set_tick_params(labelsize=8, length=TICK_LENGTH)
    set_families(axis.get_majorticklabels())
    if ticks.joined:
        _join_pieces(axis, ticks.joined)


def _join_pieces(axis: XAxis | YAxis, words: Sequence[range]) -> None:
    """Give every token a tick, without a label, and join those of each word by a hairline."""
    axes, place = axis.axes, -TICK_LENGTH / 72  # inches from the edge of the panel
    axis.set_tick_params(length=0, pad=TICK_PAD + TICK_LENGTH)
    axis.remove_overlapping_locs = False  # otherwise a token with a label would have no tick
    axis.set_ticks([n for word in words for n in word], minor=True)
    axis.set_tick_params(which="minor", length=TICK_LENGTH)
    is_x = isinstance(axis, XAxis)
    right, up = (0.0, place) if is_x else (place, 0.0)
    shift = ScaledTranslation(right, up, axes.figure.dpi_scale_trans)
    edge = axes.get_xaxis_transform() if is_x else axes.get_yaxis_transform()
    spans = [[(word[0], 0.0), (word[-1], 0.0)] for word in words if len(word) > 1]
    lines = LineCollection(
        spans if is_x else [[(y, x) for x, y in span] for span in spans],
        colors="#555555",
        linewidths=0.6,
        transform=edge + shift,
        clip_on=False,
        gid="joined",
    )
    axes.add_collection(lines, autolim=False)


def make_ticks(names: Labels | None, size: int, inches: float, first: int = 0) -> Ticks:
    """Return ticks with as many token labels as fit, at equal distances, or with positions if few fit.

    Args:
        names: The labels of the tokens, or None.
        size: The number of tokens.
        inches: The length of the axis.
        first: The position of the first token.

    Returns:
        The ticks.
    """
    step = _round_up(LINE * size / inches)
    if step == 1 and isinstance(names, TokenizedText):
        words = list(dict.fromkeys(names.words))
        labels = [_shorten(names.word(word[0]) or names[word[0]]) for word in words]
        return Ticks([(word[0] + word[-1]) / 2 for word in words], labels, inches / size, words)
    if names is None or step > SPARSE:
        step = _round_up(max(0.25, 0.15 + 0.075 * len(f"{first + size:,}")) * size / inches - 1e-6)
        positions = range(-first % step, size, step)
        labels = [f"{first + i:,}" for i in positions]
    else:  # if not every token has a label, repeated ones also have positions, and pieces of words the words
        positions = range(-first % step, size, step)
        words = names.words if isinstance(names, TokenizedText) else [range(i, i + 1) for i in range(size)]
        if isinstance(names, TokenizedText):
            names = [names.word(i) or names[i] for i in range(size)]
        is_numbered = step > 1 and not _are_places(names)
        labels = ["" if i - step in words[i] else _shorten(names[i]) for i in positions]  # a word once
        if is_numbered:
            labels = [
                f"{isolate(label)}  {first + i}" if label else f"{first + i}"
                for i, label in zip(positions, labels, strict=True)
            ]
    return Ticks(positions, labels, step * inches / size)


def _are_places(names: Labels) -> bool:
    """Return True if labels need no positions: no two are equal, or all are numbers, such as `20 ms`."""
    return len(set(names)) == len(names) or all(re.match(r"[-+−]?\.?\d", name) for name in names)


def _round_up(least: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, 50, … that is at least `least`."""
    return next(n * 10**k for k in count() for n in (1, 2, 5) if n * 10**k >= least)


# -- text ------------------------------------------------------------------------------------------


def set_families(texts: Sequence[Text]) -> None:
    """Give each of these texts the fonts that it needs, chosen for all of them together."""
    context = "".join(text.get_text() for text in texts)
    for text in texts:
        text.set_fontfamily(families(text.get_text(), context))


def set_title(figure: Figure, title: str | None, size: float) -> None:
    """Set the title of a figure, if there is a title."""
    if title:
        set_text(figure.suptitle, title, size, figure.get_figwidth())


def set_text(setter: Callable[..., object], text: str, size: float, inches: float | None = None) -> None:
    """Call `setter` with a title or label that is legible, has no formulas, and is at most `inches` wide."""
    written = isolate_quotes(_wrap(text, size, inches))
    setter(written, fontsize=size, parse_math=False, fontfamily=families(text))


def _wrap(text: str, size: float, inches: float | None) -> str:
    """Return a legible text, in lines of at most `inches`."""
    if not isinstance(text, str):
        raise TypeError(f"Expected title to be a string, got {text!r}.")
    lines = [legible(line) for line in text.split("\n")]
    if inches is not None:
        lines = [part for line in lines for part in _break_line(line, size, inches)]
    return "\n".join(lines)


def _break_line(line: str, size: float, inches: float) -> list[str]:
    """Return a line as lines of at most `inches`, broken at spaces, or within words that are longer."""
    lines, start = [], 0
    while measure(line[start:], size) > inches:
        stops = [n for n in range(start + 1, len(line)) if is_boundary(line, n)]
        fitting = bisect_right(stops, inches, key=lambda stop: measure(line[start:stop], size))
        stop = stops[max(0, fitting - 1)] if stops else len(line)
        space = line.rfind(" ", start + 1, stop + 1)
        stop = stop if space < 0 else space
        lines.append(line[start:stop])
        start = stop + (line[stop : stop + 1] == " ")
    return [*lines, line[start:]]


def _shorten(name: str, size: float = TICKS, inches: float = LONGEST) -> str:
    """Return a legible label, cut to a width between two characters."""
    name = legible(name)
    if measure(name, size) <= inches:
        return name
    cuts = [n for n in range(len(name)) if is_boundary(name, n)]
    fitting = bisect_right(cuts, inches, key=lambda cut: measure(name[:cut] + "…", size))
    return name[: cuts[max(0, fitting - 1)]] + "…"


@lru_cache(maxsize=4096)
def measure(text: str, size: float) -> float:
    """Return the width of a line of text in inches, in its fonts, at a size in points."""
    drawn, canvas = _ruler()
    with RULER, _no_warnings_of_glyphs():
        drawn.set(text=text, fontsize=size, fontfamily=families(text))
        return drawn.get_window_extent(canvas.get_renderer()).width / DPI


@cache
def _ruler() -> tuple[Text, FigureCanvasAgg]:
    """Return a text that is drawn nowhere, and a canvas to measure it."""
    canvas = FigureCanvasAgg(Figure(dpi=DPI))
    return canvas.figure.text(0, 0, "", parse_math=False), canvas
