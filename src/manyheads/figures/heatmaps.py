"""From panels to pictures: heat maps, their scales and colour bars, and words that fit and can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from io import BytesIO
from itertools import count
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colors import LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from manyheads.figures.cells import DPI, SHARP, WAYS, Names, Panel

WEIGHT = "viridis"  # sequential, and legible without colour vision
MASKED: dict[str, Any] = {"facecolor": "#e8e8e8", "edgecolor": "#cccccc", "hatch": "////", "linewidth": 0.0}

FULL, HALF = 11.0, 7.0  # inches a side of a panel that shows every token, or is pooled
PAGE = 20.0  # inches that small multiples fill at most, down and across
MOST = int(FULL * SHARP)  # tokens a side that are shown one by one; more are pooled
FEW = 12  # tokens, up to which each weight is written into its cell
LONG = 40  # tokens from which small weights would be lost on a linear scale
SPARSE = 5  # tokens, of which one is named at least
LONGEST = 20  # characters of a tick label
GAP = 0.1  # inches between small multiples
LINE = 0.125  # inches that a line of tick labels needs
LETTER = 0.07  # inches that a character of a label needs


class Picture(Figure):
    """A matplotlib Figure that a notebook shows by itself, with pyplot or without."""

    def _repr_png_(self) -> bytes:
        page = BytesIO()
        self.savefig(page, format="png", bbox_inches="tight")
        return page.getvalue()


class Strip(NamedTuple):
    """A row of panels: its name, those of its heads, the names of queries and keys, inches high."""

    name: str
    heads: list[str]
    panels: list[Panel]
    labels: Names
    height: float


class Marks(NamedTuple):
    """What stands along an axis: where, what, and how far apart in inches."""

    at: range
    texts: list[str]
    apart: float

    @property
    def width(self) -> float:
        """Inches of the longest."""
        return LETTER * max(map(len, self.texts)) + 0.1

    @property
    def upright(self) -> bool:
        """Must they stand upright below a picture?"""
        return self.width - 0.1 > 0.9 * self.apart

    @property
    def height(self) -> float:
        """Inches that they take below a picture."""
        return self.width if self.upright else 0.25


# -- pages -----------------------------------------------------------------------------------------


def row(
    groups: list[list[Panel]], bars: list[str], labels: Names, titles: Sequence[str], title: str | None
) -> Figure:
    """Panels of one shape in full, side by side: a scale and a bar for each group of them."""
    panels = sum(groups, [])
    height, width = inches = box(panels[0].t, panels[0].s)
    y_marks, x_marks = marks(labels[0], panels[0].t, height), marks(labels[1], panels[0].s, width)
    size = len(panels) * (width + 0.15) + 1.7 * len(groups) + y_marks.width, height + 1.3 + x_marks.height
    figure = Picture(figsize=size, dpi=DPI, layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0].tolist()
    rest = iter(every)
    for group, means in zip(groups, bars, strict=True):
        norm, own = scale(group), [next(rest) for _ in group]
        for axes, panel in zip(own, group, strict=True):
            drawn = heat(axes, panel, norm, inches)
        _finish(figure, drawn, group, height, means, ax=own, pad=0.02, aspect=height / 0.16)
    for axes, name in zip(every, titles, strict=True):
        axes.yaxis.set_visible(axes is every[0])
        ticks(axes.yaxis, y_marks)
        ticks(axes.xaxis, x_marks)
        text(axes.set_title, name, 11, width if len(panels) > 1 else max(width, 3.6))
        axes.set_xlabel(_along("key", 1, panels), fontsize=10)
    every[0].set_ylabel(_along("query", 0, panels), fontsize=10)
    if title:
        text(figure.suptitle, title, 12, figure.get_figwidth())
    return figure


def sheet(
    strips: list[Strip], width: float, norm: Normalize, means: str, down: str, title: str | None
) -> Figure:
    """Strips of panels on one colour scale, each panel so many inches wide; `down` runs along them.

    Laid out by hand: matplotlib's own layout takes minutes for a thousand panels.
    """
    each = [panel for strip in strips for panel in strip.panels]
    keys = [(strip.panels[0].s, strip.labels[1]) for strip in strips]
    edge = [own != below for own, below in zip(keys, [*keys[1:], None], strict=True)]
    heads = [strip.heads for strip in strips]
    news = [own != above[: len(own)] for own, above in zip(heads, [[], *heads[:-1]], strict=True)]
    y_marks = [marks(strip.labels[0], strip.panels[0].t, strip.height) for strip in strips]
    x_marks = [marks(names, s, width) for s, names in keys]

    # How large the page is, in inches, and where each strip begins on it, from the upper edge.
    longest = LETTER * max(len(strip.name) for strip in strips)
    flat = longest > min(strip.height for strip in strips) + GAP  # names that only fit lying down
    beside = max(found.width for found in y_marks)
    left = 0.25 + (longest if flat else 0.2) + beside
    inside = max(map(len, heads)) * (width + GAP)
    title = _wrapped(title or "", 11, left + inside + 1)
    y = 0.2 * (title.count("\n") + 1) if title else 0.0
    tops = []
    for strip, new, last, below in zip(strips, news, edge, x_marks, strict=True):
        tops.append(y + (0.25 if new and any(strip.heads) else 0.05))
        y = tops[-1] + strip.height + GAP + (below.height if last else 0)
    w, h = left + inside + 1.4, y + 0.35
    figure = Picture(figsize=(w, h), dpi=DPI)

    def place(x: float, y: float, width: float, height: float) -> Axes:
        """Axes by inches from the upper left corner."""
        return figure.add_axes((x / w, 1 - (y + height) / h, width / w, height / h))

    for r, (strip, y) in enumerate(zip(strips, tops, strict=True)):
        sparse = int(np.ceil(LETTER * max(map(len, strip.heads)) / (width + GAP))) or 1
        for c, panel in enumerate(strip.panels):
            axes = place(left + c * (width + GAP), y, width, strip.height)
            drawn = heat(axes, panel, norm, (strip.height, width))
            axes.yaxis.set_visible(c == 0)
            axes.xaxis.set_visible(edge[r] or c >= len(heads[r + 1]))
            if axes.xaxis.get_visible():
                ticks(axes.xaxis, x_marks[r])
            if c == 0:
                ticks(axes.yaxis, y_marks[r])
                text(axes.set_ylabel, strip.name, 9)
                axes.yaxis.set_label_coords(-(beside + 0.05) / width, 0.5)
                if flat:
                    axes.yaxis.label.set(rotation=0, ha="right", va="center")
            if news[r] and c % sparse == 0:  # where all would not fit, every few
                text(axes.set_title, strip.heads[c], 9)
    bottom = tops[-1] + strips[-1].height
    tall = bottom - tops[0]
    _finish(figure, drawn, each, tall, means, cax=place(left + inside + 0.05, tops[0], 0.16, tall))
    figure.supylabel(_along(down, 0, each), x=0.05 / w, y=1 - (tops[0] + tall / 2) / h, fontsize=9)
    x, y = (left + inside / 2) / w, 1 - (bottom + x_marks[-1].height + 0.1) / h
    figure.supxlabel(_along("key", 1, each), x=x, y=y, va="top", fontsize=9)
    if title:
        text(partial(figure.suptitle, x=x, y=1 - 0.05 / h, va="top"), title, 11)
    return figure


def box(t: int, s: int) -> tuple[float, float]:
    """Inches of a picture in full: room for a number in each cell while they are few."""
    n = max(t, s)
    side = FULL if n <= MOST else HALF
    cell = 0.55 if n <= FEW else float(np.clip(9 / n, 0.14, 0.3)) if n <= 78 else side / n
    return max(1.8, t * cell), max(1.8, s * cell)


def small(t: int, s: int, down: int, across: int) -> tuple[float, float]:
    """Inches of a small multiple: room for a label at each token, until the page is full."""
    side = min(float(np.clip(1.1 * LINE * max(t, s), 1.15, 2.75)), PAGE / across, PAGE / down)
    height, width = (max(0.35, n / max(t, s)) * side for n in (t, s))
    return height, width


def _along(name: str, axis: int, panels: list[Panel]) -> str:
    """What stands along an axis, and how many of them go into a cell."""
    most = max(-(-panel[1 + axis] // panel.cells.shape[axis]) for panel in panels)
    return name if most == 1 else f"{name}, up to {most:,} in a cell"


# -- panels ---------------------------------------------------------------------------------------


def weight(way: str, panels: list[Panel]) -> str:
    """What a colour stands for, by the way that panels are pooled, if they are."""
    pooled = any(panel.cells.shape != (panel.t, panel.s) for panel in panels)
    return f"{WAYS[way]} attention weight of each cell" if pooled else "attention weight"


def heat(axes: Axes, panel: Panel, norm: Normalize, box: tuple[float, float]) -> AxesImage:
    """The heat map itself, in coordinates of tokens; with the numbers, where a box of inches has room."""
    axes.patch.set(**MASKED)
    axes.spines[:].set_visible(False)  # they would cover half of a first key, where sinks are
    drawn = axes.imshow(
        panel.cells,
        cmap=WEIGHT,
        norm=norm,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, panel.s - 0.5, panel.t - 0.5, -0.5),
    )
    if box[0] / panel.t >= 0.2 and box[1] / panel.s >= 0.5:
        for (i, j), weight in np.ma.ndenumerate(panel.cells):
            digits = f"{weight:.2f}" if weight >= 0.005 else "<.01" if weight else "0"
            write(axes, i, j, digits, drawn.cmap(drawn.norm(weight)))
    return drawn


def write(axes: Axes, i: int, j: int, digits: str, ground: Any) -> None:
    """A number in row i and column j, in the ink that its ground needs."""
    red, green, blue, _ = ground
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
    axes.text(j, i, digits, ha="center", va="center", fontsize=8, color=ink)


# -- colours ---------------------------------------------------------------------------------------


def scale(panels: list[Panel]) -> Normalize:
    """One colour scale for all: from 0 to the largest weight of a query that had some choice of keys.

    The first queries of a causal text share their weight among few keys, and would set the scale for
    all others: to count, a query sees more than one, and an eighth of what any sees. The weights of
    long texts are small and many: there the scale is that of their square roots.
    """
    choice = [panel.cells.count(axis=1) for panel in panels]
    free = [panel.cells[n > max(1, n.max() / 8)] for panel, n in zip(panels, choice, strict=True)]
    top = max((float(rows.max()) for rows in free if rows.count()), default=1.0) or 1.0
    step = 0.1 if top > 0.5 else 10.0 ** (np.floor(np.log10(top)) - 1)
    top = float(np.ceil(top / step - 1e-3) * step)  # a round number, upwards; 1 and a rounding is 1
    long = max(max(panel.t, panel.s) for panel in panels) > LONG
    return PowerNorm(0.5, 0.0, top) if long else Normalize(0.0, top)


def decades(panels: list[Panel], usual: float) -> Normalize:
    """One logarithmic scale for all: from about a hundredth of what is usual to the largest."""
    top = max((float(panel.cells.max()) for panel in panels if panel.cells.count()), default=0.0)
    if not top:
        return Normalize(0.0, 1.0)
    return LogNorm(10.0 ** round(np.log10(usual / 100)), top, clip=True)


def _finish(
    figure: Figure, drawn: AxesImage, panels: list[Panel], inches: float, means: str, **where: Any
) -> None:
    """One colour bar, `inches` long, for all panels; below it what grey means, where there is any."""
    low, top = drawn.get_clim()
    values = [panel.cells for panel in panels if panel.cells.count()]
    under = any(cells.min() < low for cells in values)
    over = any(cells.max() > top * (1 + 1e-6) for cells in values)
    beyond = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((under, over), "neither")
    bar = figure.colorbar(drawn, extend=beyond, extendfrac=0.1 / inches, **where)
    if isinstance(drawn.norm, PowerNorm):
        means += ", square-root scale"
        bar.set_ticks([top * n * n / 25 for n in range(6)], minor=False)
        bar.ax.yaxis.set_major_formatter("{x:.2g}")
    if isinstance(drawn.norm, LogNorm):
        means += ", logarithmic scale"
        first, last = round(np.log10(low)), int(np.floor(np.log10(top) + 1e-9))
        step = _step((last - first) * 0.2 / inches)
        bar.set_ticks([10.0**n for n in range(first, last + 1, step)])
        bar.ax.yaxis.set_major_formatter("{x:,g}")
        bar.ax.yaxis.set_minor_locator(NullLocator())
    text(bar.set_label, means, 9, inches)
    bar.ax.tick_params(labelsize=8)
    if any(np.ma.is_masked(panel.cells) for panel in panels):
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


# -- along the axes --------------------------------------------------------------------------------


def ticks(axis: XAxis | YAxis, marks: Marks) -> None:
    """Marks put on an axis."""
    turn = "vertical" if marks.upright and isinstance(axis, XAxis) else "horizontal"
    axis.set_ticks(marks.at, marks.texts, parse_math=False, rotation=turn)
    axis.set_tick_params(labelsize=8, length=2)


def marks(names: list[str] | None, size: int, inches: float) -> Marks:
    """Token labels, or every few where not all fit; round positions where hardly any would."""
    step = _step(LINE * size / inches)
    named = names is not None and step <= SPARSE
    if not named:
        step = _step(max(0.25, 0.15 + 0.075 * len(f"{size:,}")) * size / inches - 1e-6)
    at = range(0, size, step)
    if names is None or not named:
        texts = [f"{i:,}" for i in at]
    else:  # where not every token is named, positions say which ones are
        texts = [_short(names[i]) + (f"  {i}" if step > 1 else "") for i in at]
    return Marks(at, texts, step * inches / size)


def _step(least: float) -> int:
    """The first of 1, 2, 5, 10, 20, 50, … that is at least so much."""
    return next(n * 10**k for k in count() for n in (1, 2, 5) if n * 10**k >= least)


# -- words -----------------------------------------------------------------------------------------


def text(put: Callable[..., object], words: str, size: float, inches: float | None = None) -> None:
    """A title or label: legible, no formula, wrapped to so many inches."""
    put(_wrapped(words, size, inches), fontsize=size, parse_math=False)


def _wrapped(words: str, size: float, inches: float | None) -> str:
    """Legible words, in lines of so many inches."""
    if not isinstance(words, str):
        raise TypeError(f"a title must be a string, and {words!r} came.")
    lines = [legible(line) for line in words.split("\n")]
    if inches is not None:
        lines = [fill(line, max(12, int(inches / (size * 0.0085)))) for line in lines]
    return "\n".join(lines)


def _short(name: str) -> str:
    """A tick label: legible, and cut where it is longer than a label should be."""
    name = legible(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def legible(words: str) -> str:
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
