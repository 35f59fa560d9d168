"""Figures of alignments: the path of the tokens over the mean weights of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke

from manyheads.alignment import Alignment
from manyheads.figures import cells, heatmaps
from manyheads.figures.cells import Panel
from manyheads.figures.fonts import lacking
from manyheads.shapes import kind

MARKS = ("path", "largest", None)
OUTLINED: Any = {"path_effects": [Stroke(linewidth=2.8, foreground="black"), Normal()]}
ROW = 0.17  # the height of a token in inches, so that each has a label
TALLEST, WIDEST = 9.0, 9.0  # inches
SECONDS_GAP = 0.5  # the least distance between ticks of the time axis, in inches


def alignment(
    alignment: Alignment,
    *,
    keys: Sequence[str] | None = None,
    mark: str | None = "path",
    title: str | None = None,
) -> Figure:
    """Draw an alignment: the path over the mean weights of its heads, a row per token.

    The axis of the keys shows seconds if the alignment has the duration of a key, and otherwise labels, such
    as the words of a text that is translated.

    Args:
        alignment: The result of `Recording.align`.
        keys: The labels of the aligned keys. Default: the map's tokens, or positions.
        mark: "path" draws the path. "largest" marks the key with the largest weight of each token, for
            translations, which change the order of words. None draws the weights alone.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        TypeError: If alignment isn't an Alignment.
        ValueError: If there aren't as many labels as keys, or mark is something else.
    """
    if not isinstance(alignment, Alignment):
        raise TypeError(f"Expected the Alignment of recording.align(…), got {kind(alignment)}.")
    if mark not in MARKS:
        raise ValueError(f'Expected mark to be "path", "largest" or None, got {mark!r}.')
    t, s = len(alignment.queries), len(alignment.keys)
    labels = alignment.key_tokens if keys is None else list(keys)
    if labels is not None and len(labels) != s:
        raise ValueError(f"Expected keys to be {s} labels, one for each aligned key, got {len(labels)}.")
    height = float(np.clip(t * ROW, 1.8, TALLEST))
    width = float(np.clip(s * ROW, 3.0, WIDEST))
    shape = cells.count_cells(t, height), cells.count_cells(s, width)
    panel = Panel(np.ma.array(alignment.pooled(*shape).double().numpy()), t, s)

    positions = alignment.keys.tolist()
    first = positions[0] if positions[-1] - positions[0] == s - 1 else None  # None: keys are left out
    y_ticks = heatmaps.make_ticks(alignment.tokens, t, height, int(alignment.queries[0]))
    if labels is None and first is None:
        labels = [f"{n:,}" for n in positions]
    x_ticks = heatmaps.make_ticks(labels, s, width, first or 0)
    is_timed = keys is None and alignment.seconds is not None and first is not None
    below = 0.25 if is_timed else x_ticks.height
    size = width + y_ticks.width + 1.7, height + below + (1.1 if title else 0.8)
    figure = heatmaps.Picture(figsize=size, dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    image = heatmaps.draw_heatmap(axes, panel, heatmaps.weight_scale([panel]), (0, 0))
    heatmaps.set_ticks(axes.yaxis, y_ticks)
    axes.set_ylabel("token", fontsize=10)
    if is_timed:
        assert alignment.seconds is not None
        _set_seconds(axes, alignment.seconds, positions[0], s, width)
        axes.set_xlabel("time (s)", fontsize=10)
    else:
        heatmaps.set_ticks(axes.xaxis, x_ticks)
        axes.set_xlabel("key", fontsize=10)
    column = {key: n for n, key in enumerate(positions)}
    row = {query: n for n, query in enumerate(alignment.queries.tolist())}
    if mark == "path":
        path = [(column[j], row[i]) for i, j in alignment.path.tolist()]
        axes.plot(*zip(*path, strict=True), color="white", linewidth=1.3, **OUTLINED)
    elif mark == "largest":
        x = [column[j] for j in alignment.largest().tolist()]
        style: Any = {"facecolor": "none", "edgecolor": "white", "linewidth": 1.3}
        axes.scatter(x, range(t), s=40, **style, **OUTLINED)
    axes.set(xlim=(-0.5, s - 0.5), ylim=(t - 0.5, -0.5))
    heads = len(alignment.heads)
    bar_label = f"mean weight of {heads} heads" if heads > 1 else "attention weight"
    bar_label += ", in each cell" if panel.cells.shape != (t, s) else ""
    heatmaps.add_weight_bar(image, [panel], height, bar_label, ax=axes, pad=0.02, aspect=height / 0.16)
    if title:
        heatmaps.set_text(partial(axes.set_title, pad=10), title, heatmaps.TITLE, size[0] - 0.4)
    shown = [*y_ticks.labels, *([] if is_timed else x_ticks.labels), title or ""]
    if note := lacking("".join(shown)):
        heatmaps.set_text(figure.supxlabel, note, 8, size[0])
    return figure


def _set_seconds(axes: heatmaps.Axes, seconds: float, first: int, s: int, width: float) -> None:
    """Put ticks in seconds on the axis of s keys, each of this duration, from the first key on."""
    least = SECONDS_GAP * s * seconds / width  # seconds between ticks
    step = next(n * 10.0**k for k in range(-9, 12) for n in (1, 2, 5) if n * 10.0**k >= least * (1 - 1e-9))
    start, stop = first * seconds, (first + s) * seconds
    times = np.arange(np.ceil(start / step - 1e-9), np.floor(stop / step + 1e-9) + 1) * step + 0.0  # not -0.0
    digits = max(0, -int(np.floor(np.log10(step) + 1e-9)))
    # A key starts at its left edge, half a key before its center.
    axes.set_xticks(times / seconds - first - 0.5, [f"{time:,.{digits}f}" for time in times])
    axes.tick_params(axis="x", labelsize=8, length=2)
