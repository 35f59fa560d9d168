"""Strips at the edges of a heat map: the weight that each key receives, and the entropy of each query."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

SIZE, GAP = 0.3, 0.04  # inches: of a strip, and between it and the heat map
BARS, NAMES = "#9aa5b1", "#555555"  # colours
FONT = 7.5  # points


class Strips(NamedTuple):
    """The numbers of the strips.

    Attributes:
        received: The weight that each key receives, `[s]`.
        entropy: The entropy of each query in nats, `[t]`.
    """

    received: np.ndarray
    entropy: np.ndarray


def draw_strips(axes: Axes, strips: Strips, shape: tuple[int, int]) -> None:
    """Draw the strips above and to the left of a heat map, each scaled to its largest number.

    Args:
        axes: The heat map, with room above it and to its left.
        strips: The numbers.
        shape: The numbers of cells, down and across. A cell of several tokens shows the largest number.
    """
    rows, cols = shape
    above, left = _add_axes(axes, is_above=True), _add_axes(axes, is_above=False)
    above.stairs(*_bars(strips.received, cols), fill=True, color=BARS)
    above.set(xlim=axes.get_xlim(), ylim=(0, strips.received.max() or 1.0))
    left.stairs(*_bars(strips.entropy, rows), fill=True, color=BARS, orientation="horizontal")
    left.set(ylim=axes.get_ylim(), xlim=(strips.entropy.max() or 1.0, 0))
    axes.tick_params(axis="y", which="both", length=0, pad=72 * (SIZE + 2 * GAP))
    received = f"received,\nup to {strips.received.max():.3g}"
    entropy = f"entropy,\nup to {strips.entropy.max():.3g} nats"
    for name, x, side, points in ((received, 1, "left", 4), (entropy, 0, "right", -3)):
        place: Any = (x, 1), (points, 72 * (GAP + SIZE / 2)), "axes fraction", "offset points"
        text = axes.annotate(name, *place, ha=side, va="center", fontsize=FONT, color=NAMES)
        text.set_in_layout(x == 0)  # the other one is above the colour bar


def _add_axes(axes: Axes, is_above: bool) -> Axes:
    """Add axes for a strip of a fixed size beside a heat map, whose size the layout changes."""

    def locate(*_: object) -> Bbox:
        map_box, (width, height) = axes.get_position(), cast(Figure, axes.figure).get_size_inches()
        if is_above:
            return Bbox.from_bounds(map_box.x0, map_box.y1 + GAP / height, map_box.width, SIZE / height)
        return Bbox.from_bounds(map_box.x0 - (GAP + SIZE) / width, map_box.y0, SIZE / width, map_box.height)

    strip = axes.inset_axes((0, 0, 1, 1))
    strip.set_axes_locator(locate)
    strip.set_axis_off()
    return strip


def _bars(values: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest number of each cell, and the edges of the cells in coordinates of tokens."""
    step = -(-len(values) // cells)
    starts = np.arange(0, len(values), step)
    return np.maximum.reduceat(values, starts), np.append(starts, len(values)) - 0.5
