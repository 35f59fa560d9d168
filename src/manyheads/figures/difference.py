"""A figure of an expected map, a given map and their difference."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from manyheads.figures import heatmaps
from manyheads.shapes import sizes

DIGITS = 12  # the most rows and columns with a number in each cell


def difference(want: Tensor, got: Tensor, *, what: str = "weights", title: str | None = None) -> Figure:
    """Draw the expected map, the given map on the same scale, and given − expected on its own scale.

    Differences above 0 are red, those below 0 blue; NaN and infinity are black.

    Args:
        want: The expected map `[t, s]`.
        got: The given map `[t, s]`.
        what: "weights" of queries and keys, or "output" of queries and columns.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If the two differ in shape.
    """
    if want.shape != got.shape or want.dim() != 2:
        raise ValueError(f"Expected two maps of one shape [t, s], got {sizes(want)} and {sizes(got)}.")
    expected, given = (x.detach().cpu().double().numpy() for x in (want, got))
    error = given - expected
    t, s = expected.shape
    is_weights = what == "weights"
    width = float(np.clip(3.6 * max(1.0, s / max(t, 1)), 3.0, 6.5))
    figure = heatmaps.Picture(figsize=(3 * width + 2.4, 4.5), dpi=heatmaps.DPI, layout="constrained")
    panels = figure.subplots(1, 3, squeeze=False)[0].tolist()
    finite = np.concatenate([x[np.isfinite(x)] for x in (expected, given)])
    largest = float(np.abs(finite).max()) if finite.size else 1.0
    is_share = is_weights and finite.size > 0 and finite.min() >= 0
    shared = (Normalize(0, largest), "viridis") if is_share else (Normalize(-largest, largest), "PuOr")
    worst = float(np.abs(error[np.isfinite(error)]).max()) if np.isfinite(error).any() else 1.0
    diverging = (Normalize(-worst or -1.0, worst or 1.0), "RdBu_r")
    rows = (("expected", expected, shared), ("given", given, shared), ("given − expected", error, diverging))
    for axes, (name, values, (norm, colors)) in zip(panels, rows, strict=True):
        axes.set_facecolor("black")
        image = heatmaps.draw_matrix(axes, np.ma.masked_invalid(values), norm, colors)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("key" if is_weights else "column of the output", fontsize=10)
        axes.set_xticks(range(0, s, max(1, -(-s // 10))))
        axes.set_yticks(range(0, t, max(1, -(-t // 10))))
        axes.tick_params(labelsize=8)
        if max(t, s) <= DIGITS:
            # + 0.0 makes -0.0 positive.
            numbers = {at: f"{round(float(number), 2) + 0.0:.2f}" for at, number in np.ndenumerate(values)}
            heatmaps.write_numbers(image, numbers)
    for group, label in ((panels[:2], "weight" if is_share else what), (panels[2:], "difference")):
        heatmaps.add_colorbar(group[-1].get_images()[0], label, ax=group, pad=0.02)
    panels[0].set_ylabel("query", fontsize=10)
    heatmaps.set_title(figure, title, 12)
    return figure
