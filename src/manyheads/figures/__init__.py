"""Figures of attention, as matplotlib figures that you can go on editing.

    figure = figures.head(amap, tokens, head=1)      # one head in full
    figure = figures.grid(maps, tokens)              # every layer and head, small multiples
    figure = figures.beside(amap, amap.under(None))  # one head under two masks
    figure = figures.received(maps, tokens)          # the weight that each key receives, along the text
    figure = figures.entropy(maps)                   # the entropy of each head, layer by layer
    figure = figures.measures(rows, by="induction")  # head scores as a sorted table
    figure = figures.difference(want, got)           # two maps that should be equal
    figure = figures.curves(pe, [0, 1, 6, 7])        # positional encodings

Texts of any length can be drawn. Long texts are pooled into cells of several tokens, in one pass over the map
and without building the matrix, and the figure says so. A weight of 0 has the darkest colour; masked weights
are grey and hatched. Panels that can be compared share one colour scale. Nothing uses pyplot, so the
functions need no display and change no global state, and a notebook displays the figures that they return.
Tokens are drawn literally: `$` starts no formula, and a character that the font lacks is written as its
escape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from manyheads import scores
from manyheads.figures import cells, heatmaps
from manyheads.figures.cells import AxisLabels, Labels, Layers, Panel, Visible, Weights
from manyheads.figures.difference import difference
from manyheads.figures.heatmaps import MOST, WEIGHT, Picture, Strip
from manyheads.figures.positions import curves, image
from manyheads.maps import AttentionMap
from manyheads.measures import UNITS
from manyheads.shapes import kind, whole
from manyheads.statistics import Entropy, Received

__all__ = [
    "MOST",
    "WEIGHT",
    "beside",
    "curves",
    "difference",
    "entropy",
    "grid",
    "head",
    "image",
    "measures",
    "received",
    "visible",
]

RECEIVED = {
    None: "weight received, summed over queries",
    "age": "mean weight received from the queries that may attend to the key",
}
HEAD, UNIFORM = "#3b528b", "#5ec962"  # two of the colours of weights


# -- weights ---------------------------------------------------------------------------------------


def head(
    weights: Weights,
    tokens: Labels | None = None,
    *,
    keys: Labels | None = None,
    keep: Tensor | None = None,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
) -> Figure:
    """Draw one head in full: a row per query, a column per key, and numbers where they fit.

    Above `MOST` queries or keys, the largest weight of each cell is shown beside the mean one (masked
    weights count as 0), each on its own scale.

    Args:
        weights: An AttentionMap or a tensor `[t, s]`.
        tokens: Labels of the queries, and of the keys if `keys` is None. Default: the map's, or positions.
        keys: Labels of the keys.
        keep: Mask `[t, s]` of a tensor (True = may attend). A map knows its own.
        batch: The map's batch entry.
        head: The map's head.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: Labels or mask don't fit the weights.
        TypeError: The weights are neither a map nor a tensor.
    """
    heads = cells.select_head(weights, batch, head, keep)
    if title is None:
        title = f"head {cells.head_numbers(heads)[0]}" if isinstance(weights, AttentionMap) else ""
    labels, box = cells.axis_labels(heads, tokens, keys), heatmaps.panel_size(*cells.size(heads))
    if max(cells.size(heads)) <= MOST:
        panels = cells.pool_heads(heads, box, ["max"])
        return heatmaps.draw_row(panels, ["attention weight"], labels, [title], None)
    titles = [f"{name} weight of each cell" for name in cells.POOLING.values()]
    groups = cells.pool_heads(heads, box, list(cells.POOLING))
    return heatmaps.draw_row(groups, ["attention weight"] * 2, labels, titles, title)


def beside(
    left: Weights,
    right: Weights,
    tokens: Labels | None = None,
    *,
    keys: Labels | None = None,
    keep: tuple[Tensor | None, Tensor | None] = (None, None),
    batch: int = 0,
    head: int = 0,
    reduce: str = "max",
    titles: tuple[str, str] = ("causal", "without the mask"),
    title: str | None = None,
) -> Figure:
    """Draw two heads side by side on one colour scale, e.g. causal and non-causal.

    `beside(amap, amap.under(None))` compares a map with the weights that its q and k give without the mask.

    Args:
        left: An AttentionMap or a tensor of weights `[t, s]`.
        right: Another one of the same shape.
        tokens: Labels, as in `head`.
        keys: Labels of the keys.
        keep: Masks `[t, s]` of the two sides (True = may attend), None for a map.
        batch: The maps' batch entry.
        head: The maps' head.
        reduce: "max" or "mean" of the weights of a cell, for long texts.
        titles: Titles of the two sides.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: The sides differ in shape, or labels or masks don't fit.
        TypeError: The weights are neither maps nor tensors.
    """
    if not isinstance(keep, tuple) or len(keep) != 2:
        raise TypeError(f"Expected keep to be a pair of masks (None for a map), got {kind(keep)}.")
    sides = [cells.select_head(side, batch, head, own) for side, own in zip((left, right), keep, strict=True)]
    sizes = [cells.size(heads) for heads in sides]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"Expected sides of one shape, got {list(sizes[0])} and {list(sizes[1])}. Draw each with head()."
        )
    box, reduces = heatmaps.panel_size(*sizes[0]), [cells.check_pooling(reduce)]
    panels = [panel for heads in sides for panel in cells.pool_heads(heads, box, reduces)[0]]
    labels = cells.axis_labels(sides[0], tokens, keys)
    return heatmaps.draw_row([panels], [heatmaps.weight_label(reduce, panels)], labels, titles, title)


def grid(
    weights: Tensor | Layers,
    tokens: Labels | Sequence[Labels] | None = None,
    *,
    keep: Tensor | None = None,
    batch: int = 0,
    reduce: str = "max",
    rows: Labels | None = None,
    columns: Labels | None = None,
    title: str | None = None,
) -> Figure:
    """Draw all layers and heads as small multiples on one colour scale.

    Args:
        weights: One AttentionMap or tensor `[b, h, t, s]` (a row per sequence), or a dict by name or a list
            of AttentionMaps (a row per layer; layers may differ in shape).
        tokens: One list of labels, or one per row. Default: the maps' tokens, or positions.
        keep: Mask of a tensor, broadcasts to `[b, h, t, s]` (True = may attend). Maps know theirs.
        batch: The batch entry of layers.
        reduce: "max" or "mean" of the weights of a cell, for long texts.
        rows: Names of the rows.
        columns: Names of the columns.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: Names, labels or mask don't fit the weights.
        TypeError: The weights are neither maps nor a tensor.
    """
    selected = cells.select_rows(weights, batch, keep)
    numbers = [cells.head_numbers(heads) for heads in selected.values()]
    reduces = [cells.check_pooling(reduce)]
    down, across = len(selected), max(map(len, numbers))
    what = "sequence" if isinstance(weights, AttentionMap | Tensor) else "layer"
    rows = list(selected) if rows is None else cells.check_names(rows, down, what)
    columns = None if columns is None else cells.check_names(columns, across, "head")
    row_tokens = cells.labels_of_rows(tokens, down)
    labels = [cells.axis_labels(*pair) for pair in zip(selected.values(), row_tokens, strict=True)]
    t, s = (max(sides) for sides in zip(*map(cells.size, selected.values()), strict=True))
    box = heatmaps.small_panel_size(t, s, down, across)
    strips = []
    for name, heads, own, names in zip(rows, selected.values(), numbers, labels, strict=True):
        titles = (columns or [f"head {n}" for n in own])[: len(own)]
        strips.append(Strip(name, titles, cells.pool_heads(heads, box, reduces)[0], names, box[0]))
    panels = [panel for strip in strips for panel in strip.panels]
    norm, bar_label = heatmaps.weight_scale(panels), heatmaps.weight_label(reduce, panels)
    return heatmaps.draw_sheet(strips, box[1], norm, bar_label, "query", title)


def visible(amap: AttentionMap, batch: int, head: int) -> Tensor:
    """Return which keys the queries of one head may attend to.

    Args:
        amap: The map.
        batch: The batch entry.
        head: The head.

    Returns:
        A boolean mask `[t, s]` (True = may attend).

    Raises:
        TypeError: amap is not an AttentionMap.
        IndexError: There is no such batch entry or head.
    """
    if not isinstance(amap, AttentionMap):
        raise TypeError(f"Expected amap to be an AttentionMap, got {kind(amap)}.")
    t, s = amap.shape[2:]
    return scores.visible(amap.only(batch, head).problem)[0, 0].expand(t, s)


# -- statistics ------------------------------------------------------------------------------------


def received(
    maps: Layers,
    tokens: Labels | None = None,
    *,
    batch: int = 0,
    normalize: str | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the weight that each key receives along the text: a strip per layer, with a row per head.

    A key's colour is the weight that it receives, the sum of its column: 1 is the average where there are as
    many queries as keys. In long texts a cell shows the largest of its keys.

    Args:
        maps: One AttentionMap, a list of them or a dict by name.
        tokens: Labels of the keys. Default: the maps' tokens, or positions.
        batch: The batch entry.
        normalize: "age" for the mean over the queries that may attend to the key, as in `AttentionMap`.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: Labels don't fit.
        TypeError: These are not maps.
    """
    layers = cells.select_layers(maps, batch)
    height = float(np.clip(heatmaps.PAGE / sum(amap.shape[1] for amap in layers.values()), 0.02, 0.25))
    _, width = heatmaps.panel_size(1, max(amap.shape[3] for amap in layers.values()))
    strips, total, keys, is_pooled = [], 0.0, 0, False
    for name, amap in layers.items():
        _, h, _, s = amap.shape
        heads = None if amap.heads == tuple(range(h)) else list(map(str, amap.heads))
        labels: AxisLabels = (heads, cells.axis_labels(amap, None, tokens)[1])
        sums, counts = amap.reduce([Received(normalize=normalize), Visible(1, s)])
        strip = cells.masked_array(sums[0], counts[0, :, 0] > 0)  # [h, s]
        total, keys = total + float(strip.filled(0).sum()), keys + int(strip.count())
        shown = cells.count_cells(s, width)
        is_pooled = is_pooled or shown < s
        strips.append(Strip(name, [""], [cells.pool(strip, (h, shown), "max")], labels, h * height))
    norm = heatmaps.log_scale([strip.panels[0] for strip in strips], total / max(keys, 1))
    bar_label = RECEIVED[normalize] + (", the largest of a cell's keys" if is_pooled else "")
    return heatmaps.draw_sheet(strips, width, norm, bar_label, "head", title)


def entropy(maps: Layers, *, batch: int = 0, title: str | None = None) -> Figure:
    """Draw the entropy of each head's weights, layer by layer, in nats.

    A dot is a head's mean over the queries, in the order of the heads; the line through it spans the middle
    half of the queries. The bar over a layer is the entropy of uniform attention to all visible keys, the
    mean of ln(keys). Queries without a visible key don't count.

    Args:
        maps: One AttentionMap, a list of them or a dict by name.
        batch: The batch entry.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: There is no map, or no such batch entry.
        TypeError: These are not maps.
    """
    layers = cells.select_layers(maps, batch)
    inches = float(np.clip(heatmaps.PAGE / len(layers), 0.4, 1.6))  # of one layer
    names = list(layers) if isinstance(maps, Mapping) else None
    ticks = heatmaps.make_ticks(names, len(layers), len(layers) * inches)
    size = max(4.5, len(layers) * inches + 1), 4.5 + ticks.height
    figure = Picture(figsize=size, dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    numbers: dict[float, int] = {}  # of the heads, by their position
    for x, amap in enumerate(layers.values()):
        _, h, t, _ = amap.shape
        found, counts = amap.reduce([Entropy(), Visible(t, 1)])
        keys = counts[0, ..., 0]  # [h, t]
        entropies = cells.masked_array(found[0], keys > 0)
        if entropies.count():
            uniform = np.log(cells.masked_array(keys, keys > 0).compressed()).mean()
            axes.hlines(uniform, x - 0.42, x + 0.42, color=UNIFORM, linewidth=2.5)
        places = x + (np.arange(h) - (h - 1) / 2) * 0.8 / h
        numbers |= dict(zip(places.tolist(), amap.heads, strict=True))
        dot = float(np.clip(40 * inches / h, 2, 5))
        for place, values in zip(places, (row.compressed() for row in entropies), strict=True):
            if len(values):
                axes.vlines(place, *np.quantile(values, (0.25, 0.75)), color=HEAD, linewidth=0.7, alpha=0.6)
                axes.plot(place, values.mean(), "o", color=HEAD, markersize=dot, clip_on=False)
    heatmaps.set_ticks(axes.xaxis, ticks)
    axes.tick_params(labelsize=8)
    if 0.8 * inches * len(layers) / len(numbers) >= heatmaps.LINE:  # room for a number under each dot
        axes.xaxis.remove_overlapping_locs = False
        axes.set_xticks(list(numbers), [str(n) for n in numbers.values()], minor=True)
        axes.tick_params(axis="x", which="minor", labelsize=6, length=0, pad=4)
        axes.tick_params(axis="x", which="major", pad=13)
    axes.set(xlim=(-0.6, len(layers) - 0.4), ylim=(0, None))
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    axes.set_xlabel("layer and head", fontsize=9)
    axes.set_ylabel("entropy (nats)", fontsize=9)
    dots = Line2D([], [], color=HEAD, marker="o", linewidth=0.7)
    figure.legend(
        handles=[dots, Line2D([], [], color=UNIFORM, linewidth=2.5)],
        labels=["head: mean and middle half of its queries", "uniform attention: mean ln(visible keys)"],
        loc="outside upper center",
        ncols=2 if len(layers) * inches > 6 else 1,
        fontsize=8,
        frameon=False,
    )
    if title:
        heatmaps.set_text(axes.set_title, title, 11, figure.get_figwidth())
    return figure


def measures(
    rows: Sequence[Any], by: str | None = None, *, most: int = 30, title: str | None = None
) -> Figure:
    """Draw head scores as a table, sorted by one of them, the largest first.

    The colours of a column go from 0 (or its smallest number, if negative) to its largest among all rows.

    Args:
        rows: Named tuples or mappings as in `Recording.table()`: `layer`, `head` and scores by name. Scores
            are weights, entropy in nats or distance in positions, None where there is nothing to measure.
        by: The score to sort by. Default: the first one.
        most: The largest number of heads to show.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: The rows have different scores, or none of this name.
        TypeError: A score is not a number.
    """
    table = _table(rows)
    names = [name for name in table[0] if name not in ("layer", "head")]
    by = names[0] if by is None else by
    if by not in names:
        raise ValueError(f"Expected by to be one of {', '.join(names)}, got {by!r}.")
    values = np.array([[_number(name, row[name]) for name in names] for row in table])
    numbers = np.ma.masked_invalid(values)  # [heads, scores]
    first = numbers[:, names.index(by)].filled(-np.inf)
    order = np.argsort(-first, kind="stable")[: whole(most, "most", least=1)]
    low, high = np.minimum(numbers.min(axis=0).filled(0), 0), numbers.max(axis=0).filled(1)
    shares = (numbers[order] - low) / np.where(high > low, high - low, 1)  # [shown, scores]
    digits = [0 if top >= 100 else 1 if top >= 10 else 2 for top in np.maximum(-low, high)]

    labels = [heatmaps.legible(f"{table[n]['layer']}   head {table[n]['head']}") for n in order]
    units = {name: f", {unit}" for name, unit in UNITS.items()}
    columns = [heatmaps.legible(name.replace("_", " ") + units.get(name, "")) for name in names]
    width = 0.7 * len(names) + heatmaps.LETTER * max(map(len, labels)) + 0.5
    figure = Picture(figsize=(width, 0.22 * len(order) + 1.4), dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    drawn = heatmaps.draw_heatmap(axes, Panel(shares, *shares.shape), Normalize(0, 1), (0, 0))
    texts = {(i, j): f"{x:,.{digits[j]}f}" for (i, j), x in np.ma.ndenumerate(numbers[order])}
    heatmaps.write_numbers(drawn, texts)
    axes.set_yticks(range(len(order)), labels, parse_math=False)
    axes.set_xticks(range(len(names)), columns, parse_math=False, rotation=40, ha="left")
    axes.tick_params(labelsize=8, length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.get_xticklabels()[names.index(by)].set_fontweight("bold")
    shown = f"{len(order):,} of {len(table):,} heads" if len(order) < len(table) else f"{len(order):,} heads"
    note = f"{shown}, by {by.replace('_', ' ')}; colours: 0 to the column's largest"
    heatmaps.set_text(figure.supxlabel, note, 8)
    heatmaps.set_title(figure, title, 11)
    return figure


def _table(rows: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return rows as mappings, checked to have the same entries."""
    table = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    for row in table:
        if not isinstance(row, Mapping):
            raise TypeError(f"Expected rows to be named tuples or mappings, got {kind(row)}.")
    entries = {tuple(row) for row in table}
    if len(entries) != 1 or not {"layer", "head"} < set(*entries):
        got = " and ".join(f"({', '.join(map(str, names))})" for names in sorted(entries)) or "no row"
        raise ValueError(f"Expected rows with a layer, a head and the same scores, got {got}.")
    return table


def _number(name: str, value: Any) -> float:
    """Return a score as a float, NaN for None."""
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"Expected {name} to be a number or None, got {value!r}.") from None
