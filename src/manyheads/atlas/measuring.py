"""Measure the heads of a model on a batch of windows, and add the results to a summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.atlas import causal
from manyheads.atlas.corpus import Window
from manyheads.atlas.plans import Layer
from manyheads.atlas.summaries import (
    BINS,
    MEASURES,
    POSITIONAL,
    SINK,
    Scale,
    Summary,
    position_edges,
    scale_of,
)
from manyheads.highlights import NEAR
from manyheads.maps import AttentionMap
from manyheads.masks import Full
from manyheads.measures import SCORES
from manyheads.observe import observe
from manyheads.text.models import Model
from manyheads.tokens import printable

ROWS = 8  # queries of a window over which two heads are compared
WEIGHTS = 2**24  # the most weights that are computed at once to compare heads
KEYS = 4  # keys of an example
STATISTICS: dict[str, Any] = {"entropy": (), "distance": (), "row_max": (), "received": (), "top": 1}
OLDEST = 64  # queries that have to see a key before its mean weight says something


class Meter:
    """Measures batches of windows and adds the results to a summary.

    Args:
        model: The model.
        layers: Its layers with self-attention.
        length: The largest number of tokens in a window.
        ablate: Whether to measure what the removal of each head costs.

    Attributes:
        summary: What was measured so far. It may be replaced by an empty one.
    """

    def __init__(self, model: Model, layers: Sequence[Layer], length: int, ablate: bool = False) -> None:
        self.model, self.layers, self.length, self.ablate = model, layers, length, ablate
        self.read = model.hidden or model.reader
        self.h = sum(layer.heads for layer in layers)
        self.scales = [scale_of(name, length) for name in MEASURES]
        edges = position_edges(length)
        self.bin_of_position = torch.bucketize(torch.arange(length), torch.tensor(edges), right=True) - 1
        self.bins_of_positions = len(edges) - 1
        self.summary = self.empty()

    def empty(self) -> Summary:
        """Return an empty summary."""
        return Summary.empty(self.h, self.length, self.ablate)

    @torch.no_grad()
    def add(self, windows: Sequence[Window], names: Sequence[str]) -> None:
        """Measure windows of the same number of tokens.

        Args:
            windows: The windows.
            names: Their names, "shard/window".

        Raises:
            ValueError: If the model computes NaN or infinity.
        """
        ids = torch.tensor([window.ids for window in windows])  # [b, t]
        with observe(self.model.module, statistics=STATISTICS) as recording:
            self.read(ids)
        maps = [recording.calls(layer.path)[0] for layer in self.layers]
        self.add_maps(ids, maps, windows, names)
        if self.ablate:
            self._add_costs(ids)

    def add_maps(
        self, ids: Tensor, maps: Sequence[AttentionMap], windows: Sequence[Window], names: Sequence[str]
    ) -> None:
        """Add the maps of a batch.

        Args:
            ids: The tokens `[b, t]`.
            maps: The map of each layer, `[b, h, t, t]`.
            windows: The windows.
            names: Their names.

        Raises:
            ValueError: If a map has NaN or infinity.
        """
        parts = []
        for layer, amap in zip(self.layers, maps, strict=True):
            parts.append(measure(amap, ids))
            if not bool(amap.lse.isfinite().all()):
                raise ValueError(
                    f"{self.model.name} computes NaN or infinity in {layer.path}. Load its weights again."
                )
        found = join(parts, [layer.heads for layer in self.layers])
        self.summary.add("tokens", ids.numel())
        self.summary.add("windows", len(ids))
        self._add_measures(found.masses)
        for n, name in enumerate(POSITIONAL):
            values, counted = found.masses[name]
            self._add_positions("position", n, values, counted)
        received = found.received / found.by_key.clamp(min=1)  # the mean weight, [b, h, s]
        self._add_positions("received", ..., received, found.by_key > 0)
        self._add_sinks(found.masses["first_token"][0], received, found, windows, names)
        self._add_examples(maps, surprise(found), windows, names)
        self._add_overlap(maps)

    # -- measures ----------------------------------------------------------------------------------

    def _add_measures(self, masses: Mapping[str, Masses]) -> None:
        """Add the values `[b, h, t]` of all measures where they are counted."""
        added: dict[tuple[Any, ...], Any] = {}  # several measures may have the same values
        for n, name in enumerate(MEASURES):
            if name not in masses:
                continue
            key = *map(id, masses[name]), self.scales[n]
            if key not in added:
                added[key] = self._sums_of(*masses[name], self.scales[n])
            count, total, squares, least, largest, histogram = added[key]
            for array, value in (
                ("count", count), ("sum", total), ("squares", squares), ("histogram", histogram),
            ):  # fmt: skip
                self.summary.add(array, value, n)
            self.summary.bound(least, largest, n)

    def _sums_of(self, values: Tensor, counted: Tensor, scale: Scale) -> list[Any]:
        """Return count, sum, sum of squares, least and largest `[h]`, and the histogram `[h, BINS]`."""
        h, counted = values.shape[1], counted.expand_as(values)
        count = counted.sum((0, 2))  # [h]
        exact = torch.where(counted, values, 0.0).double()
        least = torch.where(counted, values, torch.inf).amin((0, 2))
        largest = torch.where(counted, values, -torch.inf).amax((0, 2))
        bins = scale.apply(values).to(torch.int64).clamp_(0, BINS - 1)
        bins.masked_fill_(~counted, BINS)  # which is left out
        bins += torch.arange(h)[:, None] * (BINS + 1)
        histogram = torch.bincount(bins.flatten(), minlength=h * (BINS + 1)).view(h, BINS + 1)[:, :BINS]
        sums = exact.sum((0, 2)), exact.square().sum((0, 2)), least.double(), largest.double()
        return [x.numpy() for x in (count, *sums, histogram)]

    def _add_positions(self, name: str, index: Any, values: Tensor, counted: Tensor) -> None:
        """Add values `[b, h, t]` by their positions."""
        t, h, counted = values.shape[2], values.shape[1], counted.expand_as(values)
        bins = self.bin_of_position[:t]
        sums = torch.zeros(h, self.bins_of_positions, dtype=torch.float64)
        sums.index_add_(1, bins, torch.where(counted, values, 0.0).sum(0, dtype=torch.float64))  # [h, t]
        counts = torch.zeros(h, self.bins_of_positions, dtype=torch.int64)
        counts.index_add_(1, bins, counted.sum(0))
        self.summary.add(f"{name}_sum", sums.numpy(), index)
        self.summary.add(f"{name}_count", counts.numpy(), index)

    # -- sinks and examples ------------------------------------------------------------------------

    def _add_sinks(
        self,
        first: Tensor,
        received: Tensor,
        found: Measured,
        windows: Sequence[Window],
        names: Sequence[str],
    ) -> None:
        """Add sinks, from weights on the first key `[b, h, t]` and mean weights of keys `[b, h, s]`."""
        several = (found.by_query > 1).expand_as(first)  # a query with a single key has no choice
        self.summary.add("sink_rows", several.sum((0, 2)).numpy())
        self.summary.add("sink_queries", ((first > SINK) & several).sum((0, 2)).numpy())
        enough = min(OLDEST, max(1, received.shape[2] // 2))
        strongest = torch.where(found.by_key >= enough, received, -1.0).max(-1)  # [b, h]
        self.summary.add("sink_first", (strongest.indices == 0).sum(0).numpy())
        best = strongest.values.max(0)  # [h]
        for n, (value, b) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            top = self.summary.sinks[n]
            if value <= 0.0 or not top.accepts(value):
                continue
            key = int(strongest.indices[b, n])
            label = label_of(windows[b], key)
            top.add(
                {
                    "value": value,
                    "order": [*map(int, names[b].split("/")), key],
                    "kind": "first" if key == 0 else label,
                    "token": label,
                    "position": key,
                    "file": windows[b].part.file,
                    "byte": windows[b].byte,
                }
            )

    def _add_examples(
        self, maps: Sequence[AttentionMap], telling: Tensor, windows: Sequence[Window], names: Sequence[str]
    ) -> None:
        """Add the most surprising query of each window and head, if it is among the best so far."""
        best = telling.max(-1)  # [b, h]
        values, queries = best.values.tolist(), best.indices.tolist()
        first = 0
        for amap in maps:
            chosen = [
                (b, head, queries[b][first + head])
                for b in range(len(windows))
                for head in range(amap.shape[1])
                if (value := values[b][first + head]) > 0.0
                and self.summary.examples[first + head].accepts(value)
            ]
            for (b, head, query), keys, weights in zip(chosen, *largest_weights(amap, chosen), strict=True):
                self._add_example(
                    first + head, values[b][first + head], query, keys, weights, windows[b], names[b]
                )
            first += amap.shape[1]

    def _add_example(
        self,
        n: int,
        value: float,
        query: int,
        keys: list[int],
        weights: list[float],
        window: Window,
        name: str,
    ) -> None:
        """Add a query to the examples of a head, and its window to the passages, if it is among the best."""
        top = self.summary.examples[n]
        if not top.accepts(value):
            return
        top.add(
            {
                "value": value,
                "order": [*map(int, name.split("/")), query],
                "kind": f"{label_of(window, query)}→{label_of(window, keys[0])}",
                "passage": name,
                "query": query,
                "keys": keys,
                "weights": weights,
            }
        )
        if name not in self.summary.passages:
            self.summary.passages[name] = {
                "file": window.part.file,
                "byte": window.byte,
                "ids": window.ids,
                "pieces": list(window.tokens.pieces),
                "special": list(window.tokens.special),
            }

    # -- comparisons of heads ----------------------------------------------------------------------

    def _add_overlap(self, maps: Sequence[AttentionMap]) -> None:
        """Add the overlap of each two heads, Σ √(p·q) over the keys, for some queries of each window."""
        b, _, t, _ = maps[0].shape
        r = max(1, min(ROWS, t, WEIGHTS // (self.h * t)))
        rows = torch.arange(1, 2 * r, 2) * t // (2 * r)  # evenly spaced
        for batch in torch.arange(b).split(max(1, WEIGHTS // (self.h * r * t))):
            part = slice(int(batch[0]), int(batch[-1]) + 1)
            roots = torch.cat([amap[part, :, rows].sqrt_() for amap in maps], 1)  # [b, h, r, s]
            roots = roots.flatten(2).double()
            for overlap in roots @ roots.mT:
                self.summary.add("overlap", overlap.numpy())
                self.summary.add("overlap_rows", r)

    def _add_costs(self, ids: Tensor) -> None:
        """Add the loss of the model, and what the removal of each head adds to it."""
        plain = self.model.losses(ids).double()  # [b, t - 1]
        self.summary.add("loss_tokens", plain.numel())
        self.summary.add("loss_windows", len(plain))
        self.summary.add("loss", float(plain.sum()))
        first = 0
        for layer in self.layers:
            for head in range(layer.heads):
                with observe(
                    self.model.module,
                    keep=["row_max"],
                    layers=[layer.path],
                    heads=[head],
                    ablate=[(layer.path, head)],
                ):
                    cost = self.model.losses(ids).double() - plain
                of_windows = cost.mean(-1)  # [b]
                self.summary.add("cost", float(cost.sum()), first + head)
                self.summary.add("cost_of_windows", float(of_windows.sum()), first + head)
                self.summary.add("cost_squares", float(of_windows.square().sum()), first + head)
            first += layer.heads


def label_of(window: Window, n: int) -> str:
    """Return the label of a token, without those of its neighbours that `TokenizedText.labels` reads."""
    return printable(window.tokens.pieces[n]) or "␣"


Masses = tuple[Tensor, Tensor]  # values `[b, h, t]` of queries, and where they count, `[b or 1, h or 1, t]`


@dataclass(frozen=True)
class Measured:
    """What is measured of the heads of one layer, or of all layers together.

    Attributes:
        masses: The values of each measure. Measures without keys are left out.
        received: The sums of the weights of each key, `[b, h, s]`.
        top: The largest weight of each query, and its key, −1 if there is none: `[b, h, t]` each.
        by_query: The number of keys that a query sees, `[b or 1, h or 1, t]`.
        by_key: The number of queries that see a key, `[b or 1, h or 1, s]`.
    """

    masses: Mapping[str, Masses]
    received: Tensor
    top: tuple[Tensor, Tensor]
    by_query: Tensor
    by_key: Tensor


def measure(amap: AttentionMap, ids: Tensor) -> Measured:
    """Measure the heads of a map `[b, h, t, t]` of these tokens `[b, t]`."""
    found = amap.statistics(**STATISTICS)
    if causal.is_causal(amap):
        masses = compute_causal_masses(amap, ids)
        by_query = torch.arange(1, amap.shape[2] + 1)[None, None]
        by_key = by_query.flip(-1)
    else:
        masses = compute_masses(amap, ids)
        visible = scores.visible(amap.problem)  # [b or 1, h or 1, t, s]
        by_query, by_key = visible.sum(-1), visible.sum(-2)
    for name in ("row_max", "entropy", "distance"):
        masses[name] = found[name], by_query > 0
    top = found["top"].weights[..., 0], found["top"].keys[..., 0]
    return Measured(masses, found["received"], top, by_query, by_key)


def join(parts: Sequence[Measured], heads: Sequence[int]) -> Measured:
    """Join what was measured of several layers along the heads; heads: the number of each layer's."""
    joined: dict[tuple[int, ...], Masses] = {}  # measures with the same values are joined once

    def along_heads(tensors: Sequence[Tensor]) -> Tensor:
        # A tensor that is the same for all heads of all layers stays one; others are expanded.
        if tensors[0].shape[1] == 1 and all(torch.equal(x, tensors[0]) for x in tensors):
            return tensors[0]
        b = max(len(x) for x in tensors)
        return torch.cat([x.expand(b, h, -1) for x, h in zip(tensors, heads, strict=True)], 1)

    def join_masses(name: str) -> Masses:
        found = [part.masses.get(name) for part in parts]
        key = tuple(0 if each is None else id(each[0]) for each in found)
        if key not in joined:
            like = next(each[0] for each in found if each is not None)
            nothing = torch.zeros(1, 1, like.shape[2], dtype=like.dtype)
            pairs = [(nothing, nothing.bool()) if each is None else each for each in found]
            values = [x.expand(len(like), h, -1) for (x, _), h in zip(pairs, heads, strict=True)]
            joined[key] = torch.cat(values, 1), along_heads([counted for _, counted in pairs])
        return joined[key]

    return Measured(
        {name: join_masses(name) for name in MEASURES if any(name in part.masses for part in parts)},
        torch.cat([part.received for part in parts], 1),
        (torch.cat([part.top[0] for part in parts], 1), torch.cat([part.top[1] for part in parts], 1)),
        along_heads([part.by_query for part in parts]),
        along_heads([part.by_key for part in parts]),
    )


def compute_causal_masses(amap: AttentionMap, ids: Tensor) -> dict[str, Masses]:
    """Return what `compute_masses` returns, of a map for which `causal.is_causal` returns True."""
    first, previous, current = causal.near_weights(amap)
    same, after, has_same = causal.token_weights(amap, ids)
    every = torch.ones(1, 1, amap.shape[2], dtype=torch.bool)
    later = every.clone()
    later[..., 0] = False
    return {
        "previous_token": (previous, later),
        "current_token": (current, every),
        "first_token": (first, every),
        "first_position": (first, every),
        "same_token": (same, has_same),
        "duplicate_token": (same, has_same),
        "induction": (after, has_same),
    }


def compute_masses(amap: AttentionMap, ids: Tensor) -> dict[str, Masses]:
    """Return the weight of each query in the mask of each score, and whether it has visible keys there.

    Scores that are equal by the mask of the map, or have no keys, aren't computed.

    Args:
        amap: The map `[b, h, t, t]`.
        ids: The tokens `[b, t]`.

    Returns:
        The weights and booleans by name, both `[b, h, t]`. Scores without keys are left out.
    """
    mask = Full() if amap.problem.mask is None else amap.problem.mask
    normal = mask.normal()
    is_causal = normal.band[1] is not None and normal.band[1] <= 0
    # Every query sees the first key.
    is_plain = normal.band in ((None, None), (None, 0)) and normal[1:] == ((), (), ())
    is_plain &= amap.problem.bias is None or not amap.problem.bias.can_mask
    masses: dict[str, Masses] = {}
    for name, score in SCORES.items():
        if is_causal and name in ("next_token", "last_position"):
            continue
        if is_plain and name == "first_token":
            first = amap[:, :, :, :1][..., 0]  # [b, h, t]
            masses[name] = first, torch.ones_like(first, dtype=torch.bool)
        elif is_plain and name == "first_position":
            masses[name] = masses["first_token"]
        elif name == "duplicate_token" and is_causal:
            masses[name] = masses["same_token"]
        else:
            if name == "same_token" and is_causal:  # its later keys are masked: the causal score is faster
                score = SCORES["duplicate_token"]
            masses[name] = amap.masses(score.mask(amap, ids if score.needs_tokens else None))
    return masses


def largest_weights(
    amap: AttentionMap, rows: Sequence[tuple[int, int, int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the keys of the largest weights of some rows, and these weights, the largest first.

    Args:
        amap: The map.
        rows: The batch entry, the head and the query of each row.

    Returns:
        At most `KEYS` keys of each row, and their weights, which are positive.
    """
    if not rows:
        return [], []
    if causal.is_causal(amap):
        read = causal.read_rows(amap, *torch.tensor(rows).T)
    else:
        read = torch.stack([amap[row] for row in rows])
    weights, keys = torch.sort(read, dim=-1, descending=True, stable=True)  # [n, s]
    counts = (weights[:, :KEYS] > 0).sum(-1).tolist()
    return (
        [row[:count] for row, count in zip(keys[:, :KEYS].tolist(), counts, strict=True)],
        [row[:count] for row, count in zip(weights[:, :KEYS].tolist(), counts, strict=True)],
    )


def surprise(found: Measured) -> Tensor:
    """Return how surprising the largest weight of each query is, w · ln(w / usual), in nats.

    This is the surprise of `highlights.Finding`. The usual weight is the largest of three: that of uniform
    attention, the mean weight of the key for other queries, and, if the key is near, the mean weight of other
    queries at the same distance. The last one counts the largest weight of each query only.

    Args:
        found: What was measured of the heads.

    Returns:
        The surprise `[b, h, t]`; 0 for a query that sees a single key or none.
    """
    weights, keys = found.top
    b, h, t = weights.shape
    by_query, by_key = found.by_query.expand(b, h, t), found.by_key.expand(b, h, -1)
    counted = by_query > 1
    at = keys.clamp(min=0)
    same_key = (found.received.gather(-1, at) - weights).clamp(min=0.0) / (by_key.gather(-1, at) - 1).clamp(
        min=1
    )
    offset = torch.arange(t) - at  # [b, h, t]
    is_near = (offset.abs() < NEAR) & counted
    place = torch.where(is_near, offset + NEAR - 1, 2 * NEAR - 1)  # the last place isn't used
    # Each query counts at every near distance, with a weight of 0 at all but that of its key.
    sums = weights.new_zeros(b, h, 2 * NEAR).scatter_add_(-1, place, weights)
    others = (counted.sum(-1, keepdim=True) - 1).clamp(min=1)
    same_distance = torch.where(is_near, (sums.gather(-1, place) - weights).clamp(min=0.0) / others, 0.0)
    uniform = 1 / by_query.clamp(min=1).to(weights)
    usual = torch.stack((uniform, same_key, same_distance)).amax(0)
    surprises = weights * (weights / usual).log()
    return torch.where(counted & (weights > usual), surprises, 0.0)


def find_layers(
    model: Model, ids: Sequence[int], say: Callable[[str], object] = lambda note: None
) -> list[Layer]:
    """Return the layers of a model with self-attention over its text.

    Args:
        model: The model.
        ids: The tokens of a short text.
        say: A function that is called with a sentence about layers that are left out.

    Returns:
        The layers.

    Raises:
        ValueError: If there are none, or the model can't read the text.
    """
    recording = model.read(ids)
    layers, left_out = [], []
    for path in recording:
        calls = recording.calls(path)
        if (
            len(calls) == 1
            and isinstance(calls[0], AttentionMap)
            and calls[0].shape[2:] == (len(ids), len(ids))
        ):
            layers.append(Layer(path, calls[0].shape[1]))
        else:
            left_out.append(path)
    if not layers:
        raise ValueError(
            f"Expected self-attention over the text in {model.name}, got none. Choose a model of text."
        )
    if left_out:
        say(f"{', '.join(left_out)}: no self-attention over the text, left out")
    return layers
