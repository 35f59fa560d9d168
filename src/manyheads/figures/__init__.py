"""Figures of attention, as matplotlib figures that the caller can change and save.

    figure = figures.head(amap, tokens, head=1)      # one head in full
    figure = figures.grid(maps, tokens)              # every layer and head, small multiples
    figure = figures.beside(amap, amap.under(None))  # one head under two masks
    figure = figures.received(maps, tokens)          # the weight that each key receives, along the text
    figure = figures.entropy(maps)                   # the entropy of each head, layer by layer
    figure = figures.measures(rows, by="induction")  # head scores as a sorted table
    figure = figures.difference(want, got)           # two maps that should be equal
    figure = figures.overlay(picture, image)         # what heads attend to in a picture
    figure = figures.curves(pe, [0, 1, 6, 7])        # positional encodings
    figure = figures.cache_costs(costs)              # what policies of a cache drop and cost
    figure = figures.alignment(recording.align())    # when each token of a transcript is spoken

Texts of any length can be drawn. Long texts are pooled into cells of several tokens, in one pass over the map
and without building the matrix, and a label of the figure says so. A weight of 0 has the darkest colour;
masked weights are grey and hatched. Panels that can be compared share one colour scale. The functions don't
use pyplot, so they need no display and change no global state, and a notebook displays the figures that they
return. Tokens are drawn literally: `$` starts no formula. Fonts that have the characters of the text are
chosen from those that are installed, and a figure says if none has some. Text in SVG and PDF files is text.
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
from manyheads.figures.alignments import alignment
from manyheads.figures.caches import cache_costs
from manyheads.figures.cells import AxisLabels, Labels, Layers, Panel, Visible, Weights
from manyheads.figures.difference import difference
from manyheads.figures.fonts import legible
from manyheads.figures.heatmaps import MOST, WEIGHT, Picture, Strip
from manyheads.figures.overlays import overlay
from manyheads.figures.positions import curves, image
from manyheads.maps import AttentionMap
from manyheads.measures import UNITS
from manyheads.shapes import kind, whole
from manyheads.statistics import Entropy, Received

__all__ = [
    "MOST",
    "WEIGHT",
    "alignment",
    "beside",
    "cache_costs",
    "curves",
    "difference",
    "entropy",
    "grid",
    "head",
    "image",
    "measures",
    "overlay",
    "received",
    "visible",
]

RECEIVED = {
    None: "weight received, summed over queries",
    "age": "mean weight received from the queries that may attend to the key",
}
HEAD, UNIFORM = "#3b528b", "#5ec962"  # two colours of the colour map for weights


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
    """Draw one head in full: a row per query, a column per key, and numbers if they fit.

    If there are more than `MOST` queries or keys, they are pooled into cells. Two panels are then drawn side
    by side, each on its own scale: the largest and the mean weight of each cell (masked weights are 0).

    Args:
        weights: An AttentionMap or a tensor `[t, s]`.
        tokens: Labels of the queries (or a `TokenizedText`), and of the keys if `keys` is None. Default: the
            map's, or positions.
        keys: Labels of the keys.
        keep: Mask `[t, s]` of a tensor (True = may attend). A map has its own mask.
        batch: The map's batch entry.
        head: The map's head.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If labels or mask don't fit the weights.
        TypeError: If the weights are neither a map nor a tensor.
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

    `beside(amap, amap.under(None))` compares a map with the weights of the same q and k without a mask.

    Args:
        left: An AttentionMap or a tensor of weights `[t, s]`.
        right: A map or tensor of the same shape.
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
        ValueError: If the sides differ in shape, or labels or masks don't fit.
        TypeError: If the weights are neither maps nor tensors.
    """
    if not isinstance(keep, tuple) or len(keep) != 2:
        raise TypeError(f"Expected keep to be a pair of masks (None for a map), got {kind(keep)}.")
    sides = [
        cells.select_head(weights, batch, head, mask)
        for weights, mask in zip((left, right), keep, strict=True)
    ]
    sizes = [cells.size(heads) for heads in sides]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"Expected sides of one shape, got {list(sizes[0])} and {list(sizes[1])}. Draw each with head()."
        )
    box = heatmaps.panel_size(*sizes[0])
    panels = [panel for heads in sides for panel in cells.pool_heads(heads, box, [reduce])[0]]
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
    captions: Sequence[Sequence[str]] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw all layers and heads as small multiples on one colour scale.

    Args:
        weights: An AttentionMap or tensor `[b, h, t, s]` (a row per sequence), or AttentionMaps in a dict by
            name or in a list (a row per layer; layers may differ in shape).
        tokens: A list of labels for all rows, or a list per row. Default: the maps' tokens, or positions.
        keep: Mask of a tensor, broadcasts to `[b, h, t, s]` (True = may attend). Maps have their own masks.
        batch: The batch entry of layers.
        reduce: "max" or "mean" of the weights of a cell, for long texts.
        rows: Names of the rows.
        columns: Names of the columns.
        captions: A short text for each head of each row, such as what it attends to; "" for none.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If names, labels or mask don't fit the weights.
        TypeError: If the weights are neither maps nor a tensor.
    """
    selected = cells.select_rows(weights, batch, keep)
    numbers = [cells.head_numbers(heads) for heads in selected.values()]
    row_count, column_count = len(selected), max(map(len, numbers))
    unit = "sequence" if isinstance(weights, AttentionMap | Tensor) else "layer"
    rows = cells.short_names(list(selected)) if rows is None else cells.check_names(rows, row_count, unit)
    columns = None if columns is None else cells.check_names(columns, column_count, "head")
    if captions is not None and len(captions) != row_count:
        raise ValueError(f"Expected captions for each of {row_count} {unit}s, got {len(captions)}.")
    row_tokens = cells.labels_of_rows(tokens, row_count)
    labels = [cells.axis_labels(*pair) for pair in zip(selected.values(), row_tokens, strict=True)]
    t, s = (max(sides) for sides in zip(*map(cells.size, selected.values()), strict=True))
    box = heatmaps.small_panel_size(t, s, row_count, column_count)
    strips = []
    for n, (name, heads, shown, names) in enumerate(
        zip(rows, selected.values(), numbers, labels, strict=True)
    ):
        titles = (columns or [f"head {head}" for head in shown])[: len(shown)]
        panels = cells.pool_heads(heads, box, [reduce])[0]
        written = None if captions is None else cells.check_names(captions[n], len(shown), "head")
        strips.append(Strip(name, titles, panels, names, box[0], written))
    panels = [panel for strip in strips for panel in strip.panels]
    norm, bar_label = heatmaps.weight_scale(panels), heatmaps.weight_label(reduce, panels)
    return heatmaps.draw_sheet(strips, box[1], norm, bar_label, "query", title)


def visible(amap: AttentionMap, batch: int, head: int) -> Tensor:
    """Return the mask of one head.

    Args:
        amap: The map.
        batch: The batch entry.
        head: The head.

    Returns:
        The mask, a boolean tensor `[t, s]` (True = may attend).

    Raises:
        TypeError: If amap isn't an AttentionMap.
        IndexError: If there is no such batch entry or head.
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

    A key's colour is the weight that it receives, the sum of its column: 1 is the average if there are as
    many queries as keys. In long texts a cell has the colour of the key in it with the largest sum.

    Args:
        maps: An AttentionMap, a list of them or a dict by name.
        tokens: Labels of the keys. Default: the maps' tokens, or positions.
        batch: The batch entry.
        normalize: "age" for the mean over the queries that may attend to the key, as in `AttentionMap`.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If labels don't fit.
        TypeError: If maps aren't AttentionMaps.
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
        columns = cells.count_cells(s, width)
        is_pooled = is_pooled or columns < s
        strips.append(Strip(name, [""], [cells.pool(strip, (h, columns), "max")], labels, h * height))
    norm = heatmaps.log_scale([strip.panels[0] for strip in strips], total / max(keys, 1))
    bar_label = RECEIVED[normalize] + (", the largest of a cell's keys" if is_pooled else "")
    return heatmaps.draw_sheet(strips, width, norm, bar_label, "head", title)


def entropy(maps: Layers, *, batch: int = 0, title: str | None = None) -> Figure:
    """Draw the entropy of each head's weights, layer by layer, in nats.

    A dot is a head's mean over the queries, in the order of the heads; the line through it spans the middle
    half of the queries. The bar across a layer is the entropy of uniform attention to all visible keys, the
    mean of ln(keys). Queries without a visible key are excluded.

    Args:
        maps: An AttentionMap, a list of them or a dict by name.
        batch: The batch entry.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no map, or no such batch entry.
        TypeError: If maps aren't AttentionMaps.
    """
    layers = cells.select_layers(maps, batch)
    inches = float(np.clip(heatmaps.PAGE / len(layers), 0.4, 1.6))  # the width of a layer
    names = list(layers) if isinstance(maps, Mapping) else None
    ticks = heatmaps.make_ticks(names, len(layers), len(layers) * inches)
    size = max(4.5, len(layers) * inches + 1), 4.5 + ticks.height
    figure = Picture(figsize=size, dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    numbers: dict[float, int] = {}  # the numbers of the heads by their position
    for x, amap in enumerate(layers.values()):
        _, h, t, _ = amap.shape
        all_entropies, counts = amap.reduce([Entropy(), Visible(t, 1)])
        keys = counts[0, ..., 0]  # [h, t]
        entropies = cells.masked_array(all_entropies[0], keys > 0)
        if entropies.count():
            uniform = np.log(cells.masked_array(keys, keys > 0).compressed()).mean()
            axes.hlines(uniform, x - 0.42, x + 0.42, color=UNIFORM, linewidth=2.5)
        positions = x + (np.arange(h) - (h - 1) / 2) * 0.8 / h
        numbers |= dict(zip(positions.tolist(), amap.heads, strict=True))
        dot = float(np.clip(40 * inches / h, 2, 5))
        for center, values in zip(positions, (row.compressed() for row in entropies), strict=True):
            if len(values):
                axes.vlines(center, *np.quantile(values, (0.25, 0.75)), color=HEAD, linewidth=0.7, alpha=0.6)
                axes.plot(center, values.mean(), "o", color=HEAD, markersize=dot, clip_on=False)
    heatmaps.set_ticks(axes.xaxis, ticks)
    axes.tick_params(labelsize=8)
    if 0.8 * inches * len(layers) / len(numbers) >= heatmaps.LINE:  # a number fits under each dot
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
        heatmaps.set_text(axes.set_title, title, heatmaps.TITLE, figure.get_figwidth() - 1.3)
    return figure


def measures(
    rows: Sequence[Any], by: str | None = None, *, most: int = 30, title: str | None = None
) -> Figure:
    """Draw head scores as a table, sorted by one of them, the largest first.

    The colours of a column go from 0 (or its smallest number, if negative) to its largest among all rows.

    Args:
        rows: Named tuples or mappings as in `Recording.table()`: `layer`, `head` and scores by name. A score
            is a weight, an entropy in nats, a distance in positions, or None if it doesn't exist.
        by: The score to sort by. Default: the first one.
        most: The largest number of heads to show.
        title: Title of the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If the rows have different scores, or no score of this name.
        TypeError: If a score isn't a number.
    """
    table = _table(rows)
    names = [name for name in table[0] if name not in ("layer", "head")]
    by = names[0] if by is None else by
    if by not in names:
        raise ValueError(f"Expected by to be one of {', '.join(names)}, got {by!r}.")
    values = np.array([[_number(name, row[name]) for name in names] for row in table])
    numbers = np.ma.masked_invalid(values)  # [heads, scores]
    sorted_by = numbers[:, names.index(by)].filled(-np.inf)
    order = np.argsort(-sorted_by, kind="stable")[: whole(most, "most", least=1)]
    low, high = np.minimum(numbers.min(axis=0).filled(0), 0), numbers.max(axis=0).filled(1)
    shares = (numbers[order] - low) / np.where(high > low, high - low, 1)  # [shown, scores]
    digits = [0 if top >= 100 else 1 if top >= 10 else 2 for top in np.maximum(-low, high)]

    labels = [legible(f"{table[n]['layer']}   head {table[n]['head']}") for n in order]
    units = {name: f", {unit}" for name, unit in UNITS.items()}
    columns = [legible(name.replace("_", " ") + units.get(name, "")) for name in names]
    width = 0.7 * len(names) + max(heatmaps.measure(label, 8) for label in labels) + 0.6
    figure = Picture(figsize=(width, 0.22 * len(order) + 1.4), dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    image = heatmaps.draw_heatmap(axes, Panel(shares, *shares.shape), Normalize(0, 1), (0, 0))
    texts = {(i, j): f"{x:,.{digits[j]}f}" for (i, j), x in np.ma.ndenumerate(numbers[order])}
    heatmaps.write_numbers(image, texts)
    axes.set_yticks(range(len(order)), labels, parse_math=False)
    axes.set_xticks(range(len(names)), columns, parse_math=False, rotation=40, ha="left")
    axes.tick_params(labelsize=8, length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    heatmaps.set_families([*axes.get_xticklabels(), *axes.get_yticklabels()])
    axes.get_xticklabels()[names.index(by)].set_fontweight("bold")
    count = f"{len(order):,} of {len(table):,} heads" if len(order) < len(table) else f"{len(order):,} heads"
    note = f"{count}, by {by.replace('_', ' ')}; colours: 0 to the column's largest"
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
