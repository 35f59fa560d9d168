"""The view of a head as an SVG or PDF file for papers, drawn by matplotlib; text is text."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from manyheads.maps import sequence_labels
from manyheads.tokens import TokenizedText
from manyheads.viewer.pyramid import SIDE, Pyramid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.figures.cells import AxisLabels
    from manyheads.figures.strips import Strips

Labels = TokenizedText | tuple[str, ...]  # of tokens

FORMATS = ("svg", "pdf")
SCALES = ("sqrt", "linear", "log")
POOLINGS = ("mean", "max")  # in the order of a tile's planes
MOST = 800  # the largest number of cells along each axis
DIFFERENCES = "RdBu_r"  # the colours of differences, as in the viewer's light theme
NOT_XML = re.compile(
    "[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)  # characters that no XML file can have
DECADES = 4  # the length of a logarithmic scale, in powers of ten
# Weights to label on a square-root scale, by the first digit of its end, in units of the end's power of ten.
SQRT_TICKS = {1: (0.01, 0.1, 0.25, 0.5), 2: (0.02, 0.2, 0.5, 1), 5: (0.05, 0.5, 1, 2)}


def draw_view(
    pyramid: Pyramid,
    rows: range,
    cols: range,
    *,
    pooling: str = "max",
    scale: str = "sqrt",
    first: int | None = 0,
    read: Labels | None = None,
    title: str = "",
    source: str = "",
    format: str = "svg",
) -> Generator[None, None, bytes]:
    """Draw some queries and keys of a head, and yield between the steps.

    Args:
        pyramid: The head.
        rows: The queries.
        cols: The keys.
        pooling: "max" or "mean" of the weights of a cell, if there are too many for a cell each.
        scale: The scale of the colours: "sqrt", "linear" or "log".
        first: The position of query 0 among the keys; None in cross-attention.
        read: The labels of all queries in cross-attention; None if they aren't known.
        title: The title.
        source: What the head belongs to: model, layer and text, for the lines below the title.
        format: "svg" or "pdf".

    Returns:
        The file.
    """
    if not pyramid.is_complete:  # for the strips
        for _ in pyramid.scan():
            yield
    assert pyramid.marginals is not None
    level = find_level(pyramid, rows, cols)
    cell = pyramid.cell(level)
    rows, cols = _align(rows, cell.rows, pyramid.t), _align(cols, cell.cols, pyramid.s)
    cells = yield from _collect(pyramid, level, rows, cols)
    plane = POOLINGS.index(pooling) if len(cells) == 2 else 0
    from manyheads.figures.strips import Strips

    received, entropy = pyramid.marginals.received, pyramid.marginals.entropy
    strips = Strips(received[cols.start : cols.stop].numpy(), entropy[rows.start : rows.stop].numpy())
    return _render(
        [cells[plane]],
        rows,
        cols,
        _name_tokens(pyramid, rows, cols, first, read),
        strips,
        pooling,
        scale,
        (title,),
        ["\n".join([*([source] if source else []), *_name_part(pyramid, rows, cols)])],
        format,
        _read_text(pyramid),
    )


def draw_difference(
    pyramids: tuple[Pyramid, Pyramid],
    rows: range,
    cols: range,
    *,
    pooling: str = "max",
    scale: str = "sqrt",
    first: int | None = 0,
    read: Labels | None = None,
    title: str = "",
    sources: Sequence[str] = (),
    format: str = "svg",
) -> Generator[None, None, bytes]:
    """Draw the weights of a head minus those of another, and yield between the steps.

    Args:
        pyramids: The two heads, of the same size.
        rows: The queries.
        cols: The keys.
        pooling: "max" or "mean" of the weights of a cell, which are then subtracted.
        scale: The scale of the colours. There is no logarithmic scale of signed numbers; "log" is "sqrt".
        first: The position of query 0 among the keys; None in cross-attention.
        read: The labels of all queries in cross-attention; None if they aren't known.
        title: The title.
        sources: What each head belongs to, for the lines below the title.
        format: "svg" or "pdf".

    Returns:
        The file.

    Raises:
        ValueError: If the heads have different sizes.
    """
    head, other = pyramids
    if (head.t, head.s) != (other.t, other.s):
        raise ValueError(
            f"Expected two heads of the same size for a difference, got {head.t:,} queries × {head.s:,} keys "
            f"and {other.t:,} × {other.s:,}."
        )
    planes, rows, cols = yield from _collect_both(pyramids, rows, cols, pooling)
    difference = planes[0].nan_to_num(nan=0.0) - planes[1].nan_to_num(nan=0.0)  # a masked weight is 0
    difference[planes[0].isnan() & planes[1].isnan()] = torch.nan
    subtitle = "\n".join([*sources, *_name_part(head, rows, cols)])
    return _render_difference(
        difference,
        rows,
        cols,
        _name_tokens(head, rows, cols, first, read),
        pooling,
        scale,
        (title, subtitle),
        format,
        _read_text(head),
    )


def draw_comparison(
    pyramids: tuple[Pyramid, Pyramid],
    rows: range,
    cols: range,
    *,
    pooling: str = "max",
    scale: str = "sqrt",
    first: int | None = 0,
    read: Labels | None = None,
    titles: tuple[str, str] = ("", ""),
    sources: tuple[str, str] = ("", ""),
    format: str = "svg",
) -> Generator[None, None, bytes]:
    """Draw the weights of two heads beside each other, in the same colours, and yield between the steps.

    Args:
        pyramids: The two heads, of the same size.
        rows: The queries.
        cols: The keys.
        pooling: "max" or "mean" of the weights of a cell.
        scale: The scale of the colours: "sqrt", "linear" or "log".
        first: The position of query 0 among the keys; None in cross-attention.
        read: The labels of all queries in cross-attention; None if they aren't known.
        titles: The title of each head.
        sources: What each head belongs to, for the lines below its title.
        format: "svg" or "pdf".

    Returns:
        The file. If the heads have different texts, queries and keys have their numbers as labels.

    Raises:
        ValueError: If the heads have different sizes.
    """
    head, other = pyramids
    if (head.t, head.s) != (other.t, other.s):
        raise ValueError(
            f"Expected two heads of the same size in an SVG or PDF file, got {head.t:,} queries × "
            f"{head.s:,} keys and {other.t:,} × {other.s:,}. Save them as a PNG."
        )
    planes, rows, cols = yield from _collect_both(pyramids, rows, cols, pooling)
    labels = [_name_tokens(pyramid, rows, cols, first, read) for pyramid in pyramids]
    return _render(
        planes,
        rows,
        cols,
        labels[0] if labels[0] == labels[1] else (None, None),
        None,
        pooling,
        scale,
        titles,
        ["\n".join([source, *_name_part(head, rows, cols)]) for source in sources],
        format,
        _read_text(head),
    )


def _collect_both(
    pyramids: tuple[Pyramid, Pyramid], rows: range, cols: range, pooling: str
) -> Generator[None, None, tuple[list[Tensor], range, range]]:
    """Return the cells `[r, c]` of a part of two heads, and the queries and keys of these whole cells."""
    for pyramid in pyramids:
        if not pyramid.is_complete:  # otherwise its coarse cells would be estimated
            for _ in pyramid.scan():
                yield
    head = pyramids[0]
    level = find_level(head, rows, cols)
    cell = head.cell(level)
    rows, cols = _align(rows, cell.rows, head.t), _align(cols, cell.cols, head.s)
    planes = []
    for pyramid in pyramids:
        cells = yield from _collect(pyramid, level, rows, cols)
        planes.append(cells[POOLINGS.index(pooling) if len(cells) == 2 else 0])
    return planes, rows, cols


def _name_tokens(
    pyramid: Pyramid, rows: range, cols: range, first: int | None, read: Labels | None
) -> AxisLabels:
    """Return the labels of some queries and keys; None for those without."""
    keys = sequence_labels(pyramid.amap.tokens)
    labels, shift = (read, 0) if first is None else (keys, first)
    queries = range(rows.start + shift, rows.stop + shift)
    return None if labels is None else _part(labels, queries), None if keys is None else _part(keys, cols)


def _name_part(pyramid: Pyramid, rows: range, cols: range) -> list[str]:
    """Return a line that names the queries and keys of a figure, none if it has all of them."""
    if (len(rows), len(cols)) == (pyramid.t, pyramid.s):
        return []
    return [f"queries {rows.start:,} to {rows[-1]:,}, keys {cols.start:,} to {cols[-1]:,}"]


def find_level(pyramid: Pyramid, rows: range, cols: range) -> int:
    """Return the finest level at which a part of a head has at most `MOST` cells along each axis."""
    for level in range(pyramid.highest):
        cell = pyramid.cell(level)
        if max(len(rows) / cell.rows, len(cols) / cell.cols) <= MOST:
            return level
    return pyramid.highest


def _align(indices: range, side: int, size: int) -> range:
    """Return the range of whole cells that covers some indices."""
    return range(size)[indices.start // side * side : -(-indices.stop // side) * side]


def _collect(pyramid: Pyramid, level: int, rows: range, cols: range) -> Generator[None, None, Tensor]:
    """Return the cells of a part of a head, `[1 or 2, r, c]`, and yield between tiles."""
    cell = pyramid.cell(level)
    down = range(rows.start // cell.rows, -(-rows.stop // cell.rows))
    across = range(cols.start // cell.cols, -(-cols.stop // cell.cols))
    lines = []
    for y in range(down.start // SIDE, -(-down.stop // SIDE)):
        tiles = []
        for x in range(across.start // SIDE, -(-across.stop // SIDE)):
            tiles.append(pyramid.tile(level, x, y).cells)
            yield
        lines.append(torch.cat(tiles, 2))
    cells = torch.cat(lines, 1)
    top, left = down.start // SIDE * SIDE, across.start // SIDE * SIDE
    return cells[:, down.start - top : down.stop - top, across.start - left : across.stop - left]


def _part(labels: Labels, indices: range) -> TokenizedText | list[str]:
    """Return the labels of some tokens; those outside of the text are empty."""
    if isinstance(labels, TokenizedText) and indices.start >= 0 and indices.stop <= len(labels):
        return labels[indices.start : indices.stop]
    names = labels.names if isinstance(labels, TokenizedText) else labels
    return [names[n] if 0 <= n < len(names) else "" for n in indices]


def _render(
    planes: list[Tensor],
    rows: range,
    cols: range,
    labels: AxisLabels,
    strips: Strips | None,
    pooling: str,
    scale: str,
    titles: tuple[str, ...],
    subtitles: Sequence[str],
    format: str,
    text: str | None,
) -> bytes:
    """Return a figure of one or several planes of cells `[r, c]`, where NaN is masked, as a file."""
    from matplotlib.colors import LogNorm, Normalize, PowerNorm

    from manyheads.figures import heatmaps
    from manyheads.figures.cells import Panel

    panels = [Panel(np.ma.masked_invalid(cells.double().numpy()), len(rows), len(cols)) for cells in planes]
    top = _round_up(max((float(panel.cells.max()) for panel in panels if panel.cells.count()), default=1.0))
    norm = {
        "sqrt": PowerNorm(0.5, 0.0, top),
        "linear": Normalize(0.0, top),
        "log": LogNorm(top * 10.0**-DECADES, top, clip=True),
    }[scale]
    figure = heatmaps.draw_row(
        [panels],
        [heatmaps.weight_label(pooling, panels)],
        labels,
        titles,
        None,
        norm=norm,
        first=(rows.start, cols.start),
        subtitles=subtitles,
        strips=strips,
        bar_ticks=color_ticks(top, scale),
    )
    return _save(figure, format, " and ".join(titles), text)


def _render_difference(
    cells: Tensor,
    rows: range,
    cols: range,
    labels: AxisLabels,
    pooling: str,
    scale: str,
    titles: tuple[str, str],
    format: str,
    text: str | None,
) -> bytes:
    """Return a figure of differences `[r, c]`, where NaN is masked, as a file."""
    from matplotlib.colors import FuncNorm, Normalize

    from manyheads.figures import heatmaps
    from manyheads.figures.cells import POOLING, Panel

    panel = Panel(np.ma.masked_invalid(cells.double().numpy()), len(rows), len(cols))
    top = _round_up(float(abs(panel.cells).max()) if panel.cells.count() else 1.0)
    root = (lambda x: np.sign(x) * np.sqrt(abs(x)), lambda x: np.sign(x) * x**2)  # and its inverse
    norm = Normalize(-top, top) if scale == "linear" else FuncNorm(root, -top, top)
    what = "weight" if panel.cells.shape == (len(rows), len(cols)) else f"{POOLING[pooling]} weight"
    ticks = [(share * top, f"{share * top:+.3g}" if share else "0") for share in (-1, -0.25, 0, 0.25, 1)]
    figure = heatmaps.draw_row(
        [[panel]],
        [f"difference of the {what}s"],
        labels,
        titles[:1],
        None,
        norm=norm,
        first=(rows.start, cols.start),
        subtitles=titles[1:],
        bar_ticks=[(value, name.replace("-", "−")) for value, name in ticks],
        colors=DIFFERENCES,
    )
    return _save(figure, format, titles[0], text)


def _save(figure: Figure, format: str, title: str, text: str | None) -> bytes:
    """Return a figure as a file, with the text of the keys in its metadata."""
    name = {"svg": "Description", "pdf": "Subject"}[format]
    metadata = {"Title": title} | ({} if text is None else {name: text})
    file = BytesIO()
    written = {key: NOT_XML.sub("\ufffd", value) for key, value in metadata.items()}
    figure.savefig(file, format=format, bbox_inches="tight", metadata=written)
    return file.getvalue()


def _read_text(pyramid: Pyramid) -> str | None:
    """Return the text of the keys as it was written; None if only labels of its tokens are known."""
    keys = sequence_labels(pyramid.amap.tokens)
    return keys.text if isinstance(keys, TokenizedText) else None


def color_ticks(top: float, scale: str) -> list[tuple[float, str]]:
    """Return the ticks of a scale that ends at `top`, as (weight, label): the same as in colorbar.js."""
    end = top, _format(top, 2)
    if scale == "log":
        decades = [top / 10**n for n in range(DECADES, 0, -1)]
        (least, name), *others = [(weight, _format(weight, 1)) for weight in decades]
        return [(least, f"≤ {name}"), *others, end]
    if scale == "linear":
        return [*((share * top, _format(share * top, 3)) for share in (0, 0.25, 0.5, 0.75)), end]
    ten = 10.0 ** np.floor(np.log10(top) + 1e-9)
    inner = [weight * ten for weight in SQRT_TICKS[round(top / ten)]]
    return [*((weight, _format(weight, 2)) for weight in (0, *inner)), end]


def _format(weight: float, digits: int) -> str:
    """Return a weight with at most this many significant digits, as the page does."""
    rounded = float(f"{weight:.{digits}g}")
    if rounded and rounded < 0.001:
        number, exponent = f"{rounded:.{digits - 1}e}".split("e")
        return f"{float(number):g}e{int(exponent)}"
    return f"{rounded:g}"


def _round_up(x: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten, at most 1, as the page does."""
    if x <= 0:
        return 1.0
    ten = 10.0 ** np.floor(np.log10(x) + 1e-9)
    return min(1.0, ten * next(n for n in (1, 2, 5, 10) if n * ten >= x * (1 - 1e-6)))
