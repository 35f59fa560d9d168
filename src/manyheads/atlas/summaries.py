"""What an atlas counts: sums, histograms and lists of fixed size, which are merged by addition.

A summary of any corpus takes the same memory. Summaries of parts of a corpus are merged to the summary of
the whole; if they are merged in the same order, with the same bits. Sums are float64.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.atlas.corpus import readable
from manyheads.measures import SCORES, UNITS

Array = np.ndarray[Any, np.dtype[Any]]

MEASURES = (*SCORES, "row_max", "entropy", "distance")  # of each query
POSITIONAL = ("entropy", "distance", "row_max", "first_token")  # recorded by position, too
SHARES = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
BINS = 256  # of the histogram of a measure
EXAMPLES = 8  # examples of a head
SINK_KEYS = 4  # keys of a head that receive much attention
SINK = 0.3  # the weight on the first key above which a query counts as one with a sink


@dataclass(frozen=True)
class Scale:
    """The scale of a measure: equal bins of a function of its values.

    Attributes:
        name: "angle" for weights: arcsin √w, on which bins are narrow near 0 and near 1. "linear" for
            entropies, and "log" for distances: ln(1 + x).
        largest: The largest value.
    """

    name: str
    largest: float

    def apply(self, values: Any) -> Any:
        """Return values as numbers of bins, floats from 0 to `BINS`; a PyTorch tensor of any shape."""
        if self.name == "angle":
            return values.clamp(0.0, 1.0).sqrt().asin() * (BINS / (math.pi / 2))
        if self.name == "log":
            return values.clamp(min=0.0).log1p() * (BINS / math.log1p(self.largest))
        return values.clamp(min=0.0) * (BINS / self.largest)

    def invert(self, bins: Array) -> Array:
        """Return the values of numbers of bins `[...]`, floats from 0 to `BINS`."""
        share = np.asarray(bins, np.float64) / BINS
        if self.name == "angle":
            return np.asarray(np.sin(share * (math.pi / 2)) ** 2)
        if self.name == "log":
            return np.asarray(np.expm1(share * math.log1p(self.largest)))
        return np.asarray(share * self.largest)


def scale_of(measure: str, length: int) -> Scale:
    """Return the scale of a measure over windows of so many tokens."""
    if UNITS.get(measure) == "nats":
        return Scale("linear", max(math.log(length), 1e-3))
    return Scale("log", float(length)) if UNITS.get(measure) == "positions" else Scale("angle", 1.0)


def position_edges(length: int) -> list[int]:
    """Return the edges of the bins of positions: single positions at first, then wider by a fifth each."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(edges[-1] + 1, round(edges[-1] * 1.2))))
    return edges


Item = dict[
    str, Any
]  # JSON data: "value", "order" (numbers that break ties) and "kind" (of which one is kept)


class TopList:
    """The items of the largest values, at most one of each kind.

    The result doesn't depend on the order in which items are added.

    Args:
        size: The largest number of items.
        items: The first items.
    """

    def __init__(self, size: int, items: Iterable[Item] = ()) -> None:
        self.size, self.items = size, list(items)

    def accepts(self, value: float) -> bool:
        """Return False if an item of this value can't enter the list."""
        return len(self.items) < self.size or value >= self.items[-1]["value"]

    def add(self, item: Item) -> None:
        """Add an item, and drop the last one if the list is full."""
        same = next((n for n, other in enumerate(self.items) if other["kind"] == item["kind"]), None)
        if same is not None:
            if _rank(self.items[same]) <= _rank(item):
                return
            del self.items[same]
        self.items.append(item)
        self.items.sort(key=_rank)
        del self.items[self.size :]


def _rank(item: Item) -> tuple[float, list[int]]:
    return -item["value"], item["order"]


@dataclass
class Summary:
    """What was counted in a part of a corpus, for h heads of all layers together.

    Attributes:
        arrays: Counts and sums by name (docs/reference/atlas.md has their meaning).
        examples, sinks: The top lists of each head.
        passages: The passages of the examples: JSON data by "shard/window".
    """

    arrays: dict[str, Array]
    examples: list[TopList] = field(default_factory=list)
    sinks: list[TopList] = field(default_factory=list)
    passages: dict[str, Item] = field(default_factory=dict)

    @classmethod
    def empty(cls, h: int, length: int, ablate: bool) -> Summary:
        """Return the summary of nothing, for h heads and windows of `length` tokens."""
        m, p = len(MEASURES), len(position_edges(length)) - 1
        arrays: dict[str, Array] = {
            "tokens": np.zeros((), np.int64),
            "windows": np.zeros((), np.int64),
            "count": np.zeros((m, h), np.int64),
            "sum": np.zeros((m, h)),
            "squares": np.zeros((m, h)),
            "least": np.full((m, h), np.inf),
            "largest": np.full((m, h), -np.inf),
            "histogram": np.zeros((m, h, BINS), np.int64),
            "position_count": np.zeros((len(POSITIONAL), h, p), np.int64),
            "position_sum": np.zeros((len(POSITIONAL), h, p)),
            "received_count": np.zeros((h, p), np.int64),
            "received_sum": np.zeros((h, p)),
            "sink_queries": np.zeros(h, np.int64),
            "sink_rows": np.zeros(h, np.int64),
            "sink_first": np.zeros(h, np.int64),
            "overlap_rows": np.zeros((), np.int64),
            "overlap": np.zeros((h, h)),
        }
        if ablate:
            arrays |= {
                "loss_tokens": np.zeros((), np.int64),
                "loss_windows": np.zeros((), np.int64),
                "loss": np.zeros(()),
                "cost": np.zeros(h),
                "cost_of_windows": np.zeros(h),
                "cost_squares": np.zeros(h),
            }
        examples, sinks = ([TopList(size) for _ in range(h)] for size in (EXAMPLES, SINK_KEYS))
        return cls(arrays, examples, sinks)

    def add(self, name: str, value: Any, index: Any = ...) -> None:
        """Add counts or sums to an array, or to a part of it."""
        self.arrays[name][index] += value

    def bound(self, least: Any, largest: Any, index: Any) -> None:
        """Extend the ranges of measures."""
        for name, function, value in (("least", np.minimum, least), ("largest", np.maximum, largest)):
            self.arrays[name][index] = function(self.arrays[name][index], value)

    def merge(self, other: Summary) -> None:
        """Add the summary of another part."""
        for name, value in other.arrays.items():
            if name not in ("least", "largest"):
                self.add(name, value)
        self.bound(other.arrays["least"], other.arrays["largest"], ...)
        for mine, theirs in ((self.examples, other.examples), (self.sinks, other.sinks)):
            for top, added in zip(mine, theirs, strict=True):
                for item in added.items:
                    top.add(item)
        self.passages |= other.passages
        self.drop_passages()

    def drop_passages(self) -> None:
        """Forget the passages that no example is in."""
        used = {item["passage"] for top in self.examples for item in top.items}
        self.passages = {key: passage for key, passage in self.passages.items() if key in used}

    def to_bytes(self, identity: str) -> bytes:
        """Return the content of a file, for the atlas with this identity."""
        self.drop_passages()
        lists = {
            "identity": identity,
            "examples": [top.items for top in self.examples],
            "sinks": [top.items for top in self.sinks],
            "passages": self.passages,
        }
        content = io.BytesIO()
        text = np.frombuffer(json.dumps(lists, ensure_ascii=False).encode("utf-8", "surrogatepass"), np.uint8)
        np.savez_compressed(content, allow_pickle=False, lists=text, **self.arrays)
        return content.getvalue()

    @classmethod
    def read(cls, path: Path, identity: str, like: Summary) -> Summary:
        """Read the summary in a file.

        Args:
            path: The file.
            identity: The identity of its atlas.
            like: A summary of the same sizes.

        Returns:
            The summary.

        Raises:
            ValueError: If the content is damaged, or belongs to another atlas.
            OSError: If the file can't be read.
        """
        again = "Remove it and start again; only its shard is measured again."
        with readable(path):
            content = path.read_bytes()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            text = arrays.pop("lists").tobytes().decode("utf-8", "surrogatepass")
            lists: Mapping[str, Any] = json.loads(text)
            examples, sinks = (
                [TopList(size, items) for items in lists[name]]
                for name, size in (("examples", EXAMPLES), ("sinks", SINK_KEYS))
            )
            found, passages = lists["identity"], dict(lists["passages"])
        # NumPy and zipfile raise these for files that are cut short or aren't archives.
        except (KeyError, TypeError, ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error):
            raise ValueError(
                f"Expected the result of a shard in {path}, got a file that is cut short or damaged. {again}"
            ) from None
        shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if found != identity or shapes != {name: (x.shape, x.dtype) for name, x in like.arrays.items()}:
            raise ValueError(f"Expected the result of a shard in {path}, got that of another atlas. {again}")
        return cls(arrays, examples, sinks, passages)


def mean_overlap(summary: Summary) -> Array:
    """Return the mean overlap of each two heads, `[h, h]`, between 0 and 1."""
    arrays = summary.arrays
    return np.asarray((arrays["overlap"] / max(int(arrays["overlap_rows"]), 1)).clip(0.0, 1.0))


def quantiles(histogram: Array, scale: Scale, shares: Array, least: float, largest: float) -> Array:
    """Return quantiles of the values in a histogram, interpolated within their bins.

    Args:
        histogram: The counts of the bins `[BINS]`, at least one of them positive.
        scale: The scale of the bins.
        shares: The shares of values below the quantiles `[n]`, between 0 and 1.
        least: The smallest value.
        largest: The largest value.

    Returns:
        The quantiles `[n]`. They differ from those of the values by at most the width of a bin.
    """
    edges = np.concatenate(([0], np.cumsum(histogram))) / histogram.sum()  # [BINS + 1]
    # Of several equal edges, around empty bins, the last one below a share and the first one above it count.
    bins = np.searchsorted(edges, shares, side="left").clip(1, BINS) - 1
    inside = (shares - edges[bins]) / np.maximum(edges[bins + 1] - edges[bins], 1e-300)
    return np.asarray(scale.invert(bins + inside.clip(0.0, 1.0)).clip(least, largest))
