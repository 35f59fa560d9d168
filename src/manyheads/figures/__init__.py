"""Pictures of attention, as matplotlib figures that the caller can go on editing.

    figure = figures.head(amap, tokens, head=1)      # one head in full
    figure = figures.grid(maps, tokens)              # every layer and head, small multiples
    figure = figures.beside(amap, amap.under(None))  # one head under two masks
    figure = figures.received(maps, tokens)          # what each key gets, along the text
    figure = figures.entropy(maps)                   # how spread the heads are, layer by layer
    figure = figures.measures(rows, by="induction")  # heads and their measures as a sorted table
    figure = figures.difference(want, got)           # two maps that should be one
    figure = figures.curves(pe, [0, 1, 6, 7])        # positional encodings

A text of any length will do. What is too long to be shown token by token is pooled into cells, by the
map itself and never from the matrix, and the picture says so. A weight of 0 and a key that may not be
attended are two things and look like two: 0 is the darkest colour, what is masked is grey and
hatched. Panels that can be compared share one colour scale. Nothing here touches pyplot, so the
functions need no display, leave no global state, and a notebook shows what they return. Tokens are
drawn as they are: `$` starts no formula, and a character that the font lacks is written as its escape.
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
from manyheads.figures.cells import Labels, Layers, Names, Panel, Visible, Weights
from manyheads.figures.difference import difference
from manyheads.figures.heatmaps import MOST, WEIGHT, Picture, Strip
from manyheads.figures.positions import curves, image
from manyheads.maps import AttentionMap
from manyheads.reductions import Entropy, Received
from manyheads.shapes import kind, whole

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
    "age": "mean weight received from the queries that may see the key",
}
UNITS = {"entropy": ", nats", "distance": ", positions"}
HEAD, EVEN = "#3b528b", "#5ec962"  # two of the colours of weights


# -- attention -------------------------------------------------------------------------------------


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
    """One head in full: a row per query, a column per key, a colour bar, the numbers where they fit.

    `weights` is an AttentionMap, of which `batch` and `head` choose one head, or a tensor `[t, s]`.
    `tokens` names the queries, and the keys too unless `keys` does; without them the map's own tokens
    stand on the axes, or positions. `keep` `[t, s]` (True = may attend) says what a tensor cannot:
    which of its zeros are masked; a map knows its own. Above `MOST` queries or keys the largest weight of
    each cell stands beside the mean one (what is masked counts as 0), each on its own scale. `title` stands
    above all. Raises ValueError for labels or masks that don't fit the weights, TypeError for what are no
    weights.
    """
    line = cells.one_head(weights, batch, head, keep)
    if title is None:
        title = f"head {cells.heads(line)[0]}" if isinstance(weights, AttentionMap) else ""
    labels, box = cells.labels(line, tokens, keys), heatmaps.box(*cells.size(line))
    if max(cells.size(line)) <= MOST:
        return heatmaps.row(cells.panels(line, box, ["max"]), ["attention weight"], labels, [title], None)
    titles = [f"{how} weight of each cell" for how in cells.WAYS.values()]
    groups = cells.panels(line, box, list(cells.WAYS))
    return heatmaps.row(groups, ["attention weight"] * 2, labels, titles, title)


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
    """One head twice on one colour scale, e.g. causal beside non-causal.

    Each side, `left` and `right`, is an AttentionMap, of which `batch` and `head` choose one head, or a
    tensor `[t, s]`; `beside(amap, amap.under(None))` asks what the same q and k would give without the mask.
    `keep` `[t, s]` says of each side that is a tensor what it says to `head`; `tokens` and `keys` are as
    there. A cell of a long text shows the "max" or the "mean" of its weights, as `reduce` says. `titles`
    stand above the sides, `title` above both. Raises ValueError where the two sides differ in shape or masks
    don't fit them, TypeError for what are no weights.
    """
    if not isinstance(keep, tuple) or len(keep) != 2:
        raise TypeError(f"keep must be a pair of masks, one for each side or None, and {kind(keep)} came.")
    sides = zip((left, right), keep, strict=True)
    lines = [cells.one_head(side, batch, head, own) for side, own in sides]
    sizes = [cells.size(line) for line in lines]
    if sizes[0] != sizes[1]:
        shapes = " and ".join(str(list(size)) for size in sizes)
        raise ValueError(f"both sides must have one shape, and {shapes} came: draw them with head().")
    box, ways = heatmaps.box(*sizes[0]), [cells.way(reduce)]
    panels = [panel for line in lines for panel in cells.panels(line, box, ways)[0]]
    labels = cells.labels(lines[0], tokens, keys)
    return heatmaps.row([panels], [heatmaps.weight(reduce, panels)], labels, titles, title)


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
    """All layers and heads as small multiples on one colour scale, their labels on the outer edge.

    `weights` is one AttentionMap or tensor `[b, h, t, s]` (a row per sequence), or a mapping of names to
    AttentionMaps or a list of them, one per layer (a row each, `batch` chooses the sequence; layers may
    differ in shape). `tokens` is one list of labels, or one list per row; without it the maps' own tokens are
    used, or positions. `keep` (True = may attend) broadcasts to a tensor's `[b, h, t, s]`. `rows` and
    `columns` name the rows and columns, `title` stands above all. A cell of a long text shows the "max" or
    the "mean" of its weights, as `reduce` says. Raises ValueError for names, labels or masks that don't fit
    the weights, TypeError for what are no weights.
    """
    lines = cells.all_heads(weights, batch, keep)
    heads, ways = [cells.heads(line) for line in lines.values()], [cells.way(reduce)]
    down, across = len(lines), max(map(len, heads))
    what = "sequence" if isinstance(weights, AttentionMap | Tensor) else "layer"
    rows = list(lines) if rows is None else cells.named(rows, down, what)
    columns = None if columns is None else cells.named(columns, across, "head")
    each = cells.each(tokens, down)
    labels = [cells.labels(line, own) for line, own in zip(lines.values(), each, strict=True)]
    t, s = (max(sides) for sides in zip(*map(cells.size, lines.values()), strict=True))
    box = heatmaps.small(t, s, down, across)
    strips = []
    for name, line, numbers, names in zip(rows, lines.values(), heads, labels, strict=True):
        titles = (columns or [f"head {n}" for n in numbers])[: len(numbers)]
        strips.append(Strip(name, titles, cells.panels(line, box, ways)[0], names, box[0]))
    panels = [panel for strip in strips for panel in strip.panels]
    return heatmaps.sheet(
        strips, box[1], heatmaps.scale(panels), heatmaps.weight(reduce, panels), "query", title
    )


def visible(amap: AttentionMap, batch: int, head: int) -> Tensor:
    """Which keys the queries of a map, `amap`, may see in one `head` of entry `batch`: `[t, s]`.

    Raises TypeError for what is no map, IndexError for a head that isn't there.
    """
    if not isinstance(amap, AttentionMap):
        raise TypeError(f"visible takes an AttentionMap, and {kind(amap)} came.")
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
    """What each key gets along the text: a strip for each layer, with a row for each of its heads.

    `maps` is a mapping of names to AttentionMaps, a list of them, or one of them; `batch` chooses the
    sequence. A key's colour is the weight it gets, the sum of its column, so that 1 is the average where
    there are as many queries as keys, or with `normalize="age"` the mean over those queries that may see
    it: see `AttentionMap.received`. `tokens` names the keys; without it the maps' own tokens do, or
    positions. Of a long text a cell shows the largest of its keys. `title` stands above all. Raises
    ValueError for labels that don't fit, TypeError for what are no maps.
    """
    layers = cells.layers(maps, batch)
    height = float(np.clip(heatmaps.PAGE / sum(amap.shape[1] for amap in layers.values()), 0.02, 0.25))
    _, width = heatmaps.box(1, max(amap.shape[3] for amap in layers.values()))
    strips, total, keys, pooled = [], 0.0, 0, False
    for name, amap in layers.items():
        _, h, _, s = amap.shape
        picked = None if amap.heads == tuple(range(h)) else list(map(str, amap.heads))
        labels: Names = (picked, cells.labels(amap, None, tokens)[1])
        found, seen = cells.reduced(amap, Received(normalize=normalize), Visible(1, s))
        strip = cells.masked(found[0], seen[0, :, 0] > 0)  # [h, s]
        total, keys = total + float(strip.filled(0).sum()), keys + int(strip.count())
        shown = cells.count(s, width)
        pooled = pooled or shown < s
        panel = cells.pool(strip, (h, shown), "max")
        strips.append(Strip(name, [""], [panel], labels, h * height))
    norm = heatmaps.decades([strip.panels[0] for strip in strips], total / max(keys, 1))
    means = RECEIVED[normalize] + (", the largest of a cell's keys" if pooled else "")
    return heatmaps.sheet(strips, width, norm, means, "head", title)


def entropy(maps: Layers, *, batch: int = 0, title: str | None = None) -> Figure:
    """How spread the weights of each head are, layer by layer: their entropy, in nats.

    A dot is a head's mean over the queries, heads in their order; the line through it spans the middle
    half of the queries. The bar over a layer is what a head would have that attends evenly to all it
    may see: the mean of ln(keys). Queries that may see nothing don't count. `maps`, `batch` and `title` are
    as in `received`. Raises ValueError without maps or that sequence, TypeError for what are no maps.
    """
    layers = cells.layers(maps, batch)
    inches = float(np.clip(heatmaps.PAGE / len(layers), 0.4, 1.6))  # of one layer
    names = list(layers) if isinstance(maps, Mapping) else None
    marks = heatmaps.marks(names, len(layers), len(layers) * inches)
    size = max(4.5, len(layers) * inches + 1), 4.5 + marks.height
    figure = Picture(figsize=size, dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    numbers: dict[float, int] = {}  # of the heads, by where they stand
    for x, amap in enumerate(layers.values()):
        _, h, t, _ = amap.shape
        found, seen = cells.reduced(amap, Entropy(), Visible(t, 1))
        keys = seen[0, ..., 0]  # [h, t]
        spread = cells.masked(found[0], keys > 0)
        if spread.count():
            even = np.log(cells.masked(keys, keys > 0).compressed()).mean()
            axes.hlines(even, x - 0.42, x + 0.42, color=EVEN, linewidth=2.5)
        at = x + (np.arange(h) - (h - 1) / 2) * 0.8 / h
        numbers |= dict(zip(at.tolist(), amap.heads, strict=True))
        dot = float(np.clip(40 * inches / h, 2, 5))
        for place, values in zip(at, (one.compressed() for one in spread), strict=True):
            if len(values):
                axes.vlines(place, *np.quantile(values, (0.25, 0.75)), color=HEAD, linewidth=0.7, alpha=0.6)
                axes.plot(place, values.mean(), "o", color=HEAD, markersize=dot, clip_on=False)
    heatmaps.ticks(axes.xaxis, marks)
    axes.tick_params(labelsize=8)
    if 0.8 * inches * len(layers) / len(numbers) >= heatmaps.LINE:  # room for a number under each dot
        axes.xaxis.remove_overlapping_locs = False
        axes.set_xticks(list(numbers), [str(n) for n in numbers.values()], minor=True)
        axes.tick_params(axis="x", which="minor", labelsize=6, length=0, pad=4)
        axes.tick_params(axis="x", which="major", pad=13)
    axes.set(xlim=(-0.6, len(layers) - 0.4), ylim=(0, None))
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    axes.set_xlabel("layer, and its heads", fontsize=9)
    axes.set_ylabel("entropy (nats)", fontsize=9)
    marked = Line2D([], [], color=HEAD, marker="o", linewidth=0.7)
    figure.legend(
        handles=[marked, Line2D([], [], color=EVEN, linewidth=2.5)],
        labels=["a head: mean and middle half of its queries", "even attention: mean ln(visible keys)"],
        loc="outside upper center",
        ncols=2 if len(layers) * inches > 6 else 1,
        fontsize=8,
        frameon=False,
    )
    if title:
        heatmaps.text(axes.set_title, title, 11, figure.get_figwidth())
    return figure


def measures(
    rows: Sequence[Any], by: str | None = None, *, most: int = 30, title: str | None = None
) -> Figure:
    """Heads and what was measured of them as a table, sorted by one measure, the largest first.

    `rows` are named tuples or mappings, such as `seen.table()` has: `layer`, `head`, and measures by
    name, numbers (entropy in nats, distance in positions, weights) or None where there was nothing to
    measure. `by` is the measure to sort by, the first
    one if None; `most` bounds how many heads are shown, `title` stands above. Colours go from 0, or from the
    least where that is negative, to the largest number of the measure among all rows. Raises ValueError for
    rows that differ in their measures, or lack the one asked for, TypeError for what is no number.
    """
    table = _table(rows)
    names = [name for name in table[0] if name not in ("layer", "head")]
    by = names[0] if by is None else by
    if by not in names:
        raise ValueError(f"the rows can be sorted by {', '.join(names)}, and {by!r} came.")
    values = np.array([[_number(name, row[name]) for name in names] for row in table])
    numbers = np.ma.masked_invalid(values)  # [heads, measures]
    first = numbers[:, names.index(by)].filled(-np.inf)
    order = np.argsort(-first, kind="stable")[: whole(most, "most", least=1)]
    low, high = np.minimum(numbers.min(axis=0).filled(0), 0), numbers.max(axis=0).filled(1)
    shares = (numbers[order] - low) / np.where(high > low, high - low, 1)  # [shown, measures]
    digits = [0 if top >= 100 else 1 if top >= 10 else 2 for top in np.maximum(-low, high)]

    labels = [heatmaps.legible(f"{table[n]['layer']}   head {table[n]['head']}") for n in order]
    columns = [heatmaps.legible(name.replace("_", " ") + UNITS.get(name, "")) for name in names]
    size = 0.7 * len(names) + heatmaps.LETTER * max(map(len, labels)) + 0.5, 0.22 * len(order) + 1.4
    figure = Picture(figsize=size, dpi=cells.DPI, layout="constrained")
    axes = figure.subplots()
    drawn = heatmaps.heat(axes, Panel(shares, *shares.shape), Normalize(0, 1), (0, 0))
    for (i, j), share in np.ma.ndenumerate(shares):
        heatmaps.write(axes, i, j, f"{numbers[order[i], j]:,.{digits[j]}f}", drawn.cmap(share))
    axes.set_yticks(range(len(order)), labels, parse_math=False)
    axes.set_xticks(range(len(names)), columns, parse_math=False, rotation=40, ha="left")
    axes.tick_params(labelsize=8, length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.get_xticklabels()[names.index(by)].set_fontweight("bold")
    shown = f"{len(order):,} of {len(table):,} heads" if len(order) < len(table) else f"{len(order):,} heads"
    said = f"{shown}, by {by.replace('_', ' ')}; colours: 0 to the column's largest"
    heatmaps.text(figure.supxlabel, said, 8)
    if title:
        heatmaps.text(figure.suptitle, title, 11, figure.get_figwidth())
    return figure


def _table(rows: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Rows as mappings, all with the same entries."""
    table = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    for row in table:
        if not isinstance(row, Mapping):
            raise TypeError(f"a table's rows must be named tuples or mappings, and {kind(row)} came.")
    found = {tuple(row) for row in table}
    if len(found) != 1 or not {"layer", "head"} < set(*found):
        came = " and ".join(f"({', '.join(map(str, names))})" for names in sorted(found)) or "no row"
        raise ValueError(f"a table needs rows of a layer, a head and the same measures, and {came} came.")
    return table


def _number(name: str, value: Any) -> float:
    """A measure as a float, NaN for None."""
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or None, and {value!r} came.") from None
