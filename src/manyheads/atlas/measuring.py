"""Measure the heads of a model on a batch of windows, and add the results to a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.atlas.corpus import Window
from manyheads.atlas.plans import Layer
from manyheads.atlas.summaries import BINS, MEASURES, POSITIONAL, SINK, Summary, position_edges, scale_of
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
TOKEN_SCORES = ("same_token", "duplicate_token", "induction")
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
        with observe(self.model.module) as recording:
            self.read(ids)
        maps = [recording.calls(layer.path)[0] for layer in self.layers]
        for layer, amap in zip(self.layers, maps, strict=True):
            if not bool(amap.lse.isfinite().all()):
                raise ValueError(
                    f"{self.model.name} computes NaN or infinity in {layer.path}. Load its weights again."
                )
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
        """
        self.summary.add("tokens", ids.numel())
        self.summary.add("windows", len(ids))
        first = 0
        for layer, amap in zip(self.layers, maps, strict=True):
            self._add_layer(slice(first, first + layer.heads), ids, amap, windows, names)
            first += layer.heads
        self._add_overlap(maps)

    # -- one layer ---------------------------------------------------------------------------------

    def _add_layer(
        self, heads: slice, ids: Tensor, amap: AttentionMap, windows: Sequence[Window], names: Sequence[str]
    ) -> None:
        found = amap.statistics("entropy", "distance", "row_max", "received", top=1)
        visible = scores.visible(amap.problem)  # [b or 1, h or 1, t, s]
        by_query = visible.sum(-1)  # the number of keys that it sees, [b or 1, h or 1, t]
        masses = compute_masses(amap, ids)
        everywhere = by_query > 0
        for name in ("row_max", "entropy", "distance"):
            masses[name] = found[name], everywhere
        for n, name in enumerate(MEASURES):
            if name in masses:
                self._add_measure(n, heads, *masses[name])
        for n, name in enumerate(POSITIONAL):
            values, counted = masses[name]
            self._add_positions("position", (n, heads), values, counted.expand_as(values))
        by_key = visible.sum(-2)  # the number of queries that see it, [b or 1, h or 1, s]
        received = found["received"] / by_key.clamp(min=1)  # the mean weight, [b, h, s]
        self._add_positions("received", heads, received, (by_key > 0).expand_as(received))
        self._add_sinks(heads, masses["first_token"][0], received, by_key, by_query, windows, names)
        telling = surprise(
            found["top"].weights[..., 0], found["top"].keys[..., 0], found["received"], by_query, by_key
        )
        self._add_examples(heads, amap, telling, windows, names)

    def _add_measure(self, n: int, heads: slice, values: Tensor, counted: Tensor) -> None:
        """Add values `[b, h, t]` of a measure where they are counted."""
        counted = counted.expand_as(values)
        values = torch.where(counted, values, 0.0)
        count = counted.sum((0, 2))  # [h]
        exact = values.double()
        self.summary.add("count", count.numpy(), (n, heads))
        self.summary.add("sum", exact.sum((0, 2)).numpy(), (n, heads))
        self.summary.add("squares", exact.square().sum((0, 2)).numpy(), (n, heads))
        least = torch.where(counted, values, torch.inf).amin((0, 2))
        largest = torch.where(counted, values, -torch.inf).amax((0, 2))
        self.summary.bound(least.double().numpy(), largest.double().numpy(), (n, heads))
        h = values.shape[1]
        bins = self.scales[n].apply(values).to(torch.int64).clamp_(0, BINS - 1)
        bins.masked_fill_(~counted, BINS)  # which is left out
        bins += torch.arange(h)[:, None] * (BINS + 1)
        histogram = torch.bincount(bins.flatten(), minlength=h * (BINS + 1)).view(h, BINS + 1)
        self.summary.add("histogram", histogram[:, :BINS].numpy(), (n, heads))

    def _add_positions(self, name: str, index: Any, values: Tensor, counted: Tensor) -> None:
        """Add values `[b, h, t]` by their positions."""
        t, h = values.shape[2], values.shape[1]
        bins = self.bin_of_position[:t]
        sums = torch.zeros(h, self.bins_of_positions, dtype=torch.float64)
        sums.index_add_(1, bins, torch.where(counted, values, 0.0).double().sum(0))  # [h, t]
        counts = torch.zeros(h, self.bins_of_positions, dtype=torch.int64)
        counts.index_add_(1, bins, counted.sum(0))
        self.summary.add(f"{name}_sum", sums.numpy(), index)
        self.summary.add(f"{name}_count", counts.numpy(), index)

    def _add_sinks(
        self,
        heads: slice,
        first: Tensor,
        received: Tensor,
        by_key: Tensor,
        by_query: Tensor,
        windows: Sequence[Window],
        names: Sequence[str],
    ) -> None:
        """Add sinks, from weights on the first key `[b, h, t]` and mean weights of keys `[b, h, s]`."""
        several = (by_query > 1).expand_as(first)  # a query with a single key has no choice
        self.summary.add("sink_rows", several.sum((0, 2)).numpy(), heads)
        self.summary.add("sink_queries", ((first > SINK) & several).sum((0, 2)).numpy(), heads)
        enough = min(OLDEST, max(1, received.shape[2] // 2))
        strongest = torch.where(by_key >= enough, received, -1.0).max(-1)  # [b, h]
        self.summary.add("sink_first", (strongest.indices == 0).sum(0).numpy(), heads)
        best = strongest.values.max(0)  # [h]
        for n, (value, b) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            top = self.summary.sinks[heads.start + n]
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
        self,
        heads: slice,
        amap: AttentionMap,
        telling: Tensor,
        windows: Sequence[Window],
        names: Sequence[str],
    ) -> None:
        """Add the most surprising query of each window and head, if it is among the best so far."""
        best = telling.max(-1)  # [b, h]
        values, queries = best.values.tolist(), best.indices.tolist()
        for b, window in enumerate(windows):
            for n in range(amap.shape[1]):
                value, query = values[b][n], queries[b][n]
                top = self.summary.examples[heads.start + n]
                if value <= 0.0 or not top.accepts(value):
                    continue
                weights, keys = torch.sort(amap[b, n, query], descending=True, stable=True)
                chosen = [
                    key
                    for key, weight in zip(keys[:KEYS].tolist(), weights.tolist(), strict=False)
                    if weight > 0
                ]
                top.add(
                    {
                        "value": value,
                        "order": [*map(int, names[b].split("/")), query],
                        "kind": f"{label_of(window, query)}→{label_of(window, chosen[0])}",
                        "passage": names[b],
                        "query": query,
                        "keys": chosen,
                        "weights": weights[: len(chosen)].tolist(),
                    }
                )
                if names[b] not in self.summary.passages:
                    self.summary.passages[names[b]] = {
                        "file": window.part.file,
                        "byte": window.byte,
                        "ids": window.ids,
                        "pieces": list(window.tokens.pieces),
                        "special": list(window.tokens.special),
                    }

    # -- all layers --------------------------------------------------------------------------------

    def _add_overlap(self, maps: Sequence[AttentionMap]) -> None:
        """Add the overlap of each two heads, Σ √(p·q) over the keys, for some queries of each window."""
        t = maps[0].shape[2]
        r = max(1, min(ROWS, t, WEIGHTS // (self.h * t)))
        rows = torch.arange(1, 2 * r, 2) * t // (2 * r)  # evenly spaced
        for b in range(maps[0].shape[0]):
            roots = torch.cat([amap[b : b + 1, :, rows][0].sqrt_() for amap in maps])  # [h, r, s]
            roots = roots.flatten(1).double()
            self.summary.add("overlap", (roots @ roots.mT).numpy())
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


def compute_masses(amap: AttentionMap, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
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
    masses: dict[str, tuple[Tensor, Tensor]] = {}
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


def surprise(weights: Tensor, keys: Tensor, received: Tensor, by_query: Tensor, by_key: Tensor) -> Tensor:
    """Return how surprising the largest weight of each query is, w · ln(w / usual), in nats.

    This is the surprise of `highlights.Finding`. The usual weight is the largest of three: that of uniform
    attention, the mean weight of the key for other queries, and, if the key is near, the mean weight of other
    queries at the same distance. The last one counts the largest weight of each query only.

    Args:
        weights: The largest weight of each query, `[b, h, t]`.
        keys: Its key, −1 if there is none, `[b, h, t]`.
        received: The sums of the weights of each key, `[b, h, s]`.
        by_query: The number of keys that a query sees, `[b or 1, h or 1, t]`.
        by_key: The number of queries that see a key, `[b or 1, h or 1, s]`.

    Returns:
        The surprise `[b, h, t]`; 0 for a query that sees a single key or none.
    """
    b, h, t = weights.shape
    by_query, by_key = by_query.expand(b, h, t), by_key.expand(b, h, -1)
    counted = by_query > 1
    at = keys.clamp(min=0)
    same_key = (received.gather(-1, at) - weights).clamp(min=0.0) / (by_key.gather(-1, at) - 1).clamp(min=1)
    offset = torch.arange(t) - at  # [b, h, t]
    is_near = (offset.abs() < NEAR) & counted
    place = torch.where(is_near, offset + NEAR - 1, 2 * NEAR - 1)  # the last place isn't used
    # Each query counts at every near distance, with a weight of 0 at all but that of its key.
    sums = weights.new_zeros(b, h, 2 * NEAR).scatter_add_(-1, place, weights)
    others = (counted.sum(-1, keepdim=True) - 1).clamp(min=1)
    same_distance = torch.where(is_near, (sums.gather(-1, place) - weights).clamp(min=0.0) / others, 0.0)
    uniform = 1 / by_query.clamp(min=1).to(weights)
    usual = torch.stack((uniform, same_key, same_distance)).amax(0)
    found = weights * (weights / usual).log()
    return torch.where(counted & (weights > usual), found, 0.0)


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
