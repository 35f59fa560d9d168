"""Figures of positional encodings: curves of some dimensions, and an image of all dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from manyheads.figures.cells import DPI
from manyheads.figures.heatmaps import WEIGHT, Picture, add_colorbar, draw_matrix, set_text
from manyheads.shapes import kind, sizes

VALUE = "PuOr"  # a diverging colour map that is safe for colour-blind readers


def curves(encoding: Tensor, dimensions: Sequence[int], *, counted_from: int = 0) -> Figure:
    """Draw a positional encoding as curves over position, a panel for each dimension.

    Args:
        encoding: The encoding `[positions, d]`.
        dimensions: The dimensions to draw, counted from `counted_from`.
        counted_from: The number of the first position and of the first dimension: 0 as in code, or 1 as in
            some textbooks.

    Returns:
        The figure.

    Raises:
        ValueError: If a dimension is out of range, there are none, or the encoding has the wrong shape.
        TypeError: If the encoding isn't a tensor.
    """
    values = _as_array(encoding)
    positions = np.arange(len(values)) + counted_from
    last = values.shape[1] - 1 + counted_from
    if not len(dimensions):
        raise ValueError("Expected at least one dimension, got none.")
    for dimension in dimensions:
        if not counted_from <= dimension <= last:
            raise ValueError(f"Expected dimensions between {counted_from} and {last}, got {dimension}.")
    columns = min(2, len(dimensions))
    rows = -(-len(dimensions) // columns)
    figure = Picture(figsize=(4.2 * columns, 1.9 * rows + 0.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    colors = colormaps[WEIGHT](np.linspace(0.1, 0.75, len(dimensions)))
    for axes, dimension, color in zip(panels, dimensions, colors, strict=False):
        column = values[:, dimension - counted_from]
        axes.plot(positions, column, color=color, marker="o", markersize=3.5, linewidth=1.3)
        axes.set_title(f"dimension {dimension}", fontsize=9)
        axes.grid(color="#e0e0e0", linewidth=0.6)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[len(dimensions) :]:
        axes.set_axis_off()
    panels[0].set_xlim(positions[0] - 0.5, positions[-1] + 0.5)
    largest = 1.1 * max(float(np.abs(values).max()), 1e-6)
    panels[0].set_ylim(-largest, largest)
    figure.supxlabel("position", fontsize=9)
    figure.supylabel("encoding", fontsize=9)
    return figure


def image(encoding: Tensor, *, counted_from: int = 0, title: str = "positional encoding") -> Figure:
    """Draw a positional encoding as an image, positions across and dimensions down.

    Args:
        encoding: The encoding `[positions, d]`.
        counted_from: The number of the first position and of the first dimension.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        TypeError: If the encoding isn't a tensor.
        ValueError: If the encoding has the wrong shape.
    """
    values = _as_array(encoding)
    length, d = values.shape
    largest = max(float(np.abs(values).max()), 1e-6)
    width, height = np.clip(0.06 * length, 3.5, 9), np.clip(0.06 * d, 2.0, 6)
    figure = Picture(figsize=(width + 1.5, height + 0.9), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    first = counted_from - 0.5
    extent = first, first + length, first + d, first
    drawn = draw_matrix(axes, values.T, Normalize(-largest, largest), VALUE, extent)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.set_xlabel("position", fontsize=9)
    axes.set_ylabel("dimension", fontsize=9)
    set_text(axes.set_title, title, 11)
    add_colorbar(drawn, "encoding", ax=axes, pad=0.02)
    return figure


def _as_array(encoding: Tensor) -> np.ndarray:
    """Return an encoding `[positions, d]` or `[1, positions, d]` as an array `[positions, d]`."""
    if not isinstance(encoding, Tensor):
        raise TypeError(f"Expected an encoding tensor [positions, d], got {kind(encoding)}.")
    values = encoding.detach().cpu().double()
    if values.dim() == 3 and values.shape[0] == 1:
        values = values[0]
    if values.dim() != 2 or not values.numel():
        raise ValueError(f"Expected an encoding [positions, d], got {sizes(encoding)}.")
    return values.numpy()
