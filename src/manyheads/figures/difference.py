"""Two maps that should be one: the expected, the given, and their difference."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from manyheads.figures import heatmaps
from manyheads.shapes import sizes

DIGITS = 12  # rows and columns up to which numbers fit into cells


def difference(want: Tensor, got: Tensor, *, what: str = "weights", title: str | None = None) -> Figure:
    """The expected map want `[t, s]`, the given got `[t, s]` on its scale, got − want on a scale of its own.

    `what` is "weights" of queries and keys, or "output" of queries and columns. Red is too much and blue
    too little; what isn't a number is black. `title` stands above all. Raises ValueError where the two differ
    in shape.
    """
    if want.shape != got.shape or want.dim() != 2:
        raise ValueError(
            f"two maps of one shape [t, s] were expected, and {sizes(want)} and {sizes(got)} came."
        )
    a, b = (x.detach().cpu().double().numpy() for x in (want, got))
    apart = b - a
    t, s = a.shape
    size = float(np.clip(3.6 * max(1.0, s / max(t, 1)), 3.0, 6.5)), 3.4
    figure = Figure(figsize=(3 * size[0] + 2.4, size[1] + 1.1), dpi=heatmaps.DPI, layout="constrained")
    every = figure.subplots(1, 3, squeeze=False)[0].tolist()
    finite = np.concatenate([x[np.isfinite(x)] for x in (a, b)])
    most = float(np.abs(finite).max()) if finite.size else 1.0
    weights = what == "weights" and finite.size > 0 and finite.min() >= 0
    both = (Normalize(0, most), "viridis") if weights else (Normalize(-most, most), "PuOr")
    far = float(np.abs(apart[np.isfinite(apart)]).max()) if np.isfinite(apart).any() else 1.0
    own = (Normalize(-far or -1.0, far or 1.0), "RdBu_r")
    names = ("expected", "given", "given − expected")
    for axes, x, name, (norm, colours) in zip(every, (a, b, apart), names, (both, both, own), strict=True):
        axes.set_facecolor("black")
        drawn = axes.imshow(
            np.ma.masked_invalid(x), norm=norm, cmap=colours, aspect="auto", interpolation="nearest"
        )
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("key" if what == "weights" else "column of the output", fontsize=10)
        axes.set_xticks(range(0, s, max(1, -(-s // 10))))
        axes.set_yticks(range(0, t, max(1, -(-t // 10))))
        axes.tick_params(labelsize=8)
        if max(t, s) <= DIGITS:
            for i, j in np.ndindex(t, s):
                ground = drawn.cmap(norm(x[i, j])) if np.isfinite(x[i, j]) else (0.0, 0.0, 0.0, 1.0)
                heatmaps.write(axes, i, j, f"{round(float(x[i, j]), 2) + 0.0:.2f}", ground)
        if name != "expected":
            bar = figure.colorbar(drawn, ax=every[:2] if name == "given" else axes, pad=0.02)
            bar.ax.tick_params(labelsize=8)
            bar.set_label(
                "weight" if weights and name == "given" else what if name == "given" else "difference",
                fontsize=9,
            )
    every[0].set_ylabel("query", fontsize=10)
    if title:
        heatmaps.text(figure.suptitle, title, 12, figure.get_figwidth())
    return figure
