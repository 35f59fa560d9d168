"""Pictures of positional encodings: curves of a few dimensions, and all of them as an image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from manyheads.figures.cells import DPI
from manyheads.figures.heatmaps import WEIGHT, Picture, text
from manyheads.shapes import kind, sizes

VALUE = "PuOr"  # diverging around zero, and legible without colour vision


def curves(encoding: Tensor, dimensions: Sequence[int], *, counted_from: int = 0) -> Figure:
    """A positional encoding `[positions, d]` as curves over position, a panel for each of `dimensions`.

    Positions and dimensions are counted from 0, or from `counted_from`: textbooks that speak of the
    first sine and cosine as dimensions 1 and 2 want 1. Raises ValueError for a dimension outside d,
    TypeError for what is no tensor.
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
    figure = Picture(figsize=(4.2 * across, 1.9 * down + 0.4), dpi=DPI, layout="constrained")
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
    """A positional encoding `[positions, d]` as an image: positions across, dimensions down.

    Both are counted from 0, or from `counted_from`; `title` stands above. Raises TypeError for what is no
    tensor, ValueError for another shape.
    """
    values = _encoding(encoding)
    length, d = values.shape
    reach = max(float(np.abs(values).max()), 1e-6)
    width, height = np.clip(0.06 * length, 3.5, 9), np.clip(0.06 * d, 2.0, 6)
    figure = Picture(figsize=(width + 1.5, height + 0.9), dpi=DPI, layout="constrained")
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
    text(axes.set_title, title, 11)
    bar = figure.colorbar(drawn, ax=axes, pad=0.02)
    bar.set_label("encoding", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


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
