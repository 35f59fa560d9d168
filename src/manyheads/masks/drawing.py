"""Masks as tables and pictures."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.shapes import whole

if TYPE_CHECKING:
    from manyheads.masks.algebra import Mask

MAX_SIDE = 32  # queries and keys of a mask that has a size of its own
SIDE = 12  # of one that doesn't


def table(mask: Mask, t: int | None, s: int | None, offset: int | None, b: int, h: int) -> Tensor:
    """Return `mask.table(…)`: the mask of batch entry b and head h as a boolean `[t, s]`."""
    rows, columns = mask.extent() or (SIDE, SIDE)
    if offset is None and t is None and s is None:
        offset = columns - rows
    t = min(rows, MAX_SIDE) if t is None else whole(t, "t")
    s = min(columns, MAX_SIDE) if s is None else whole(s, "s")
    offset = s - t if offset is None else whole(offset, "offset", least=-(1 << 60))
    bound = mask.to("cpu").bind(offset, s if mask.extent() is None else max(s, columns))
    i = torch.arange(t)[:, None] + offset  # [t, 1]
    j = torch.arange(s)[None, :]  # [1, s]
    return torch.as_tensor(bound.keep(b, h, i, j)).expand(t, s)


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
