"""Drawings of masks, for a terminal and for a notebook."""

from __future__ import annotations

from html import escape

from torch import Tensor


def text(cells: Tensor) -> str:
    """Return a boolean `[t, s]` as text: ■ where a query may attend."""
    return "\n".join(" ".join("■" if kept else "·" for kept in row) for row in cells.tolist())


def html(name: str, cells: Tensor) -> str:
    """Return a boolean `[t, s]` as an SVG figure with a caption."""
    t, s = cells.shape
    squares = "".join(
        f'<rect x="{10 * j}" y="{10 * i}" width="9" height="9" fill="{"#0072B2" if kept else "#E4E4E4"}"/>'
        for i, row in enumerate(cells.tolist())
        for j, kept in enumerate(row)
    )
    return (
        f"<figure><figcaption><code>{escape(name)}</code> "
        "(a row per query, a column per key, blue: may attend)</figcaption>"
        f'<svg width="{10 * s}" height="{10 * t}" role="img">{squares}</svg></figure>'
    )
