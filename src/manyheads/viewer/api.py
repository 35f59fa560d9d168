"""The viewer's data: the runs, and an answer to every address that a page requests.

    runs                                     the runs, their layers, and the names of head scores, JSON
    tokens/RUN/LAYER/BATCH                   labels of "queries" and "keys", lists or null, and the key at the
                                             "first" query's position, null in cross-attention; JSON
    scores/RUN/LAYER/BATCH                   head scores of every head, JSON
    tiles/RUN/LAYER/HEAD/LEVEL/X/Y/BATCH     cells of weights (`pyramid.Tile`), binary
    marginals/RUN/LAYER/HEAD/BATCH           the weight that each key receives [s], and the entropy of each
                                             query [t], binary
    scan/RUN/LAYER/HEAD/BATCH                start or continue the scan that computes both, JSON: its progress
    weight/RUN/LAYER/HEAD/I/J/BATCH          a single weight, JSON
    row/RUN/LAYER/HEADS/I/BATCH              a query's weights, averaged over heads ("0,3" or "all"), JSON
    column/RUN/LAYER/HEADS/J/BATCH           a key's weights, likewise

Over HTTP they are below `data/`. RUN, LAYER, HEAD and BATCH count from 0. Binary answers are four
little-endian uint32 (sampled, planes, rows, columns), then float16 times 2^15, or plain float32 in
`marginals` and in exported pages; nothing follows where a tile is masked entirely, or a scan isn't complete.
An address consists of one of these words and numbers, and is never a path.
"""

from __future__ import annotations

import inspect
import json
import math
import struct
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from manyheads import kernels, scores
from manyheads.maps import AttentionMap, sequence_labels
from manyheads.measures import SCORES, UNITS
from manyheads.observe import Recording, open_run
from manyheads.observe.summaries import HEAD_SCORES, Reduced
from manyheads.observe.table import COLUMNS, score_heads
from manyheads.shapes import kind
from manyheads.viewer.pyramid import MAX_WEIGHTS, SIDE, Pyramid, Tile
from manyheads.viewer.worker import BACKGROUND, NORMAL, URGENT, Worker

PYRAMID_BYTES = 192 * 2**20  # the size of the cache of heads, with the results of their scans
TILE_BYTES = 24 * 2**20  # the size of the cache of tiles
EXACT_WEIGHTS = 2**27  # head scores of a layer with more are estimated from some queries
SAMPLES = 128  # the number of these queries
SCAN_TIMEOUT = 3.0  # seconds after the last request for a scan until it stops
LINE = 4096  # weights around a token in the answer for a row or column
LARGEST = 12  # the largest weights of a row or column
BARS = ("previous_token", "first_token", "induction", "entropy")  # the head scores on a card of the overview

Answer = bytes | str  # binary, or JSON
Steps = Generator[None, None, Any]  # yields where other requests may be served, and returns an answer


class FileChanged(Exception):
    """The file of a run, which is mapped into memory, was removed or changed."""


@dataclass(frozen=True)
class Layer:
    """One attention call: its map or the statistics kept of it, and its number among all calls."""

    name: str
    call: AttentionMap | Reduced
    number: int = 0

    @property
    def has_weights(self) -> bool:
        """Return True unless only statistics were kept."""
        return isinstance(self.call, AttentionMap)

    @property
    def map(self) -> AttentionMap:
        """The map.

        Raises:
            LookupError: If only statistics were kept.
        """
        if isinstance(self.call, AttentionMap):
            return self.call
        raise LookupError(f'{self.name} has only statistics. Use observe(..., keep="maps") to see weights.')


class ViewedRun:
    """The layers of a recording, of a single map, or of a file of either."""

    def __init__(
        self, title: str, layers: list[Layer], provenance: Mapping[str, Any], path: Path | None = None
    ) -> None:
        self.title, self.layers, self.provenance, self.path = title, layers, provenance, path
        self._stamp = _stamp(path)

    @classmethod
    def of(cls, source: Recording | AttentionMap | str | PathLike[str]) -> ViewedRun:
        """Return a run.

        Args:
            source: Recorded attention, one map, or the path of a file of either.

        Returns:
            The run, with all numbers on the CPU.

        Raises:
            TypeError: If the source is something else.
            ValueError: If it has nothing to show, or the file is broken.
            OSError: If the file can't be read.
        """
        path, title = None, "attention"
        if isinstance(source, str | PathLike):
            path = Path(fspath(source))
            title, source = path.stem, open_run(path)
        if isinstance(source, AttentionMap):
            calls: dict[str, list[Any]] = {"": [source]}
        elif isinstance(source, Recording):
            calls = {name: source.calls(name) for name in source}
            title = str(source.provenance.get("model", title))
        else:
            raise TypeError(
                f"Expected Recording, AttentionMap or a path to a file of either, got {kind(source)}."
            )
        layers: list[Layer] = []
        for name, several in calls.items():
            for n, call in enumerate(several):
                if all(call.shape):
                    label = (name or "attention") + (f", call {n}" if len(several) > 1 else "")
                    if isinstance(call, AttentionMap) and call.problem.q.device.type != "cpu":
                        call = call.to("cpu")
                    layers.append(Layer(label, call, len(layers)))
        if not layers:
            raise ValueError("Nothing to show: expected an attention call with a query and a key, got none.")
        return cls(title, layers, source.provenance, path)

    def check_file(self) -> None:
        """Raise FileChanged unless the file is as it was when it was opened."""
        if self.path is not None and _stamp(self.path) != self._stamp:
            raise FileChanged(f"{self.path.name} was removed or changed since it was opened. Open it again.")

    def ids(self, amap: AttentionMap) -> Tensor | None:
        """Return the token ids of one sequence, `[s]`: as recorded, else from labels; None if unknown."""
        ids, s = self.provenance.get("ids"), amap.shape[3]
        if isinstance(ids, list | tuple) and len(ids) == s and all(isinstance(n, int) for n in ids):
            return torch.tensor(ids)
        keys = sequence_labels(amap.tokens)
        if keys is None:
            return None
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(label, len(numbers)) for label in keys])


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Return numbers that change with a file; None if there is no file."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def first_position(amap: AttentionMap, batch: int) -> int | None:
    """Return the key at the first query's position; None in cross-attention."""
    *_, t, s = amap.shape
    mask, offset = amap.problem.mask, amap.problem.offset
    if t != s and (mask is None or mask.normal().band[1] != 0):
        return None
    return offset if isinstance(offset, int) else int(offset[batch])


class Api:
    """Answers the addresses that pages request; one worker computes all answers.

    Args:
        *sources: Recordings, maps or paths of files, at least one.

    Raises:
        ValueError: If there is no source.
    """

    def __init__(self, *sources: Any) -> None:
        if not sources:
            raise ValueError("Expected a Recording, an AttentionMap or a path, got nothing to show.")
        self.runs = [x if isinstance(x, ViewedRun) else ViewedRun.of(x) for x in sources]
        titles = [run.title for run in self.runs]
        for n, run in enumerate(self.runs):
            if titles.count(run.title) > 1:
                file = "" if run.path is None or run.path.stem == run.title else f": {run.path.stem}"
                run.title = f"{run.title}{file} ({n})"
        self.worker = Worker()
        # `min` allows an entry that is larger than its cache, as the only one.
        self._pyramids: LRUCache[tuple[int, ...], Pyramid] = LRUCache(
            PYRAMID_BYTES, lambda pyramid: min(pyramid.nbytes, PYRAMID_BYTES)
        )
        self._tiles: LRUCache[tuple[str, ...], bytes] = LRUCache(TILE_BYTES, len)
        self._scans: dict[tuple[int, ...], float] = {}  # by head: time of the last request
        self._handlers: dict[str, tuple[Callable[..., Answer | Steps], int]] = {
            "runs": (self._runs, URGENT),
            "tokens": (self._tokens, URGENT),
            "weight": (self._weight, URGENT),
            "row": (partial(self._line, "query"), URGENT),
            "column": (partial(self._line, "key"), URGENT),
            "scan": (self._scan, URGENT),
            "marginals": (self._marginals, URGENT),
            "tiles": (self._tile, NORMAL),
            "scores": (self._scores, BACKGROUND),
        }

    def request(self, address: str) -> Future[Answer]:
        """Request the answer to an address.

        Args:
            address: One of those listed above.

        Returns:
            A future, which may be cancelled. Its result raises LookupError if the address is unknown or an
            index is out of range, and FileChanged if the file of the run changed.
        """
        word, *parts = address.split("/")
        handler, priority = self._handlers.get(word, (None, URGENT))

        def answer() -> Answer | Steps:
            if handler is None or len(parts) != len(inspect.signature(handler).parameters):
                raise LookupError(f"Unknown address {address[:80]!r}.")
            return handler(*parts)

        return self.worker.submit(answer, priority)

    def close(self) -> None:
        """Stop computing."""
        self.worker.close()

    # -- runs, layers and heads --------------------------------------------------------------------

    def _run(self, run: str) -> ViewedRun:
        viewed = self.runs[parse_index(run, len(self.runs), "run")]
        viewed.check_file()
        return viewed

    def _layer(self, run: str, number: str, batch: str) -> tuple[Layer, int]:
        """Return a layer and the index of a sequence."""
        layers = self._run(run).layers
        layer = layers[parse_index(number, len(layers), "layer")]
        return layer, parse_index(batch, layer.call.shape[0], "batch entry")

    def _pyramid(self, run: str, number: str, head: str, batch: str) -> Pyramid:
        layer, b = self._layer(run, number, batch)
        key = int(run), int(number), parse_index(head, layer.map.shape[1], "head"), b
        pyramid = self._pyramids.get(key) or Pyramid(layer.map.only(b, key[2]))
        self._pyramids[key] = pyramid  # stored again, because its size may have changed
        return pyramid

    def _runs(self) -> str:
        from matplotlib import colormaps

        runs = []
        for run in self.runs:
            trained = run.provenance.get("extrapolated_from")
            runs.append(
                {
                    "title": run.title,
                    "layers": [_describe(layer) for layer in run.layers],
                    "extrapolated_from": trained if isinstance(trained, int) else None,
                }
            )
        viridis = colormaps["viridis"](range(256), bytes=True)[:, :3]  # legible without colour vision
        info = {
            "runs": runs,
            "side": SIDE,
            "max_weights": MAX_WEIGHTS,
            "colors": bytes(viridis).hex(),
            "scores": {name: UNITS.get(name, "") for name in COLUMNS},
            "bars": BARS,
        }
        return json.dumps(info)

    def _tokens(self, run: str, number: str, batch: str) -> str:
        layer, b = self._layer(run, number, batch)
        call = layer.call
        keys, queries = sequence_labels(call.tokens, b), None
        first = first_position(call, b) if isinstance(call, AttentionMap) else None
        if keys is not None and first is not None:
            positions = range(first, first + call.shape[2])
            queries = [keys[n] if 0 <= n < len(keys) else "" for n in positions]
        return json.dumps({"queries": queries, "keys": keys, "first": first})

    def _scores(self, run: str, number: str, batch: str) -> Steps:
        layer, b = self._layer(run, number, batch)
        call = layer.call
        if isinstance(call, AttentionMap):
            amap = call if call.shape[0] == 1 else call.only(batch=b)
            columns, sampled = yield from head_scores(amap, self.runs[int(run)].ids(amap))
        else:
            columns, sampled = {name: x[b] for name, x in call.columns().items() if name in COLUMNS}, 1
        plain = {name: [None if x != x else x for x in column.tolist()] for name, column in columns.items()}
        return json.dumps({"scores": plain, "sampled": sampled})

    # -- weights -----------------------------------------------------------------------------------

    def _tile(self, run: str, layer: str, head: str, level: str, x: str, y: str, batch: str) -> bytes:
        self._run(run)
        key = run, layer, head, level, x, y, batch
        if key in self._tiles:
            return self._tiles[key]
        indices = (parse_index(text, 2**31, "tile") for text in (level, x, y))
        tile = self._pyramid(run, layer, head, batch).tile(*indices)
        packed = pack_tile(tile)
        if tile.sampled == 1:
            self._tiles[key] = packed
        return packed

    def _marginals(self, run: str, layer: str, head: str, batch: str) -> bytes:
        return pack_marginals(self._pyramid(run, layer, head, batch))

    def _scan(self, run: str, layer: str, head: str, batch: str) -> str:
        pyramid = self._pyramid(run, layer, head, batch)
        key = int(run), int(layer), int(head), int(batch)
        if not pyramid.is_complete:
            is_running = key in self._scans
            self._scans[key] = time.monotonic()
            if not is_running:
                self.worker.submit(lambda: self._scan_steps(key, pyramid), BACKGROUND)
        return json.dumps({"progress": pyramid.progress, "complete": pyramid.is_complete})

    def _scan_steps(self, key: tuple[int, ...], pyramid: Pyramid) -> Steps:
        """Scan a head for as long as pages request its progress."""
        steps = pyramid.scan()
        while time.monotonic() - self._scans[key] <= SCAN_TIMEOUT:
            self.runs[key[0]].check_file()
            if next(steps, None) is None:
                break
            yield
        else:
            pyramid.progress = 0.0  # the next scan starts over
        del self._scans[key]

    def _weight(self, run: str, layer: str, head: str, i: str, j: str, batch: str) -> str:
        pyramid = self._pyramid(run, layer, head, batch)
        weight = pyramid.weight(parse_index(i, pyramid.t, "query"), parse_index(j, pyramid.s, "key"))
        return json.dumps({"weight": None if math.isnan(weight) else weight})

    def _line(self, axis: str, run: str, number: str, heads: str, index: str, batch: str) -> str:
        """Return the weights of a query or key, averaged over heads: those around it, and the largest."""
        layer, b = self._layer(run, number, batch)
        amap, is_row = layer.map, axis == "query"
        _, h, t, s = amap.shape
        chosen = range(h) if heads == "all" else [parse_index(text, h, "head") for text in heads.split(",")]
        n = parse_index(index, t if is_row else s, axis)
        weights = torch.zeros(s if is_row else t)
        for head in chosen:  # all at once may take much memory
            weights += (amap[b, head, n] if is_row else amap[b, head, :, n]) / len(chosen)
        start, first = 0, first_position(amap, b)
        if first is not None:
            n += first if is_row else -first  # the same position along the other axis
        if len(weights) > LINE:
            start = max(0, min(n - LINE // 2, len(weights) - LINE))
        top = weights.topk(min(LARGEST, len(weights)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        largest = [[n, weight] for n, weight in pairs if weight]
        return json.dumps({"first": start, "weights": weights[start : start + LINE].tolist(), "top": largest})


def _describe(layer: Layer) -> dict[str, Any]:
    """Return the description of a layer for a page."""
    call = layer.call
    mask = call.problem.mask if isinstance(call, AttentionMap) else None
    return {
        "name": layer.name,
        "number": layer.number,
        "heads": list(call.heads),
        "shape": list(call.shape),
        "mask": "no mask" if mask is None else str(mask),
        "has_weights": layer.has_weights,
    }


def pack_tile(tile: Tile, exact: bool = False) -> bytes:
    """Return a tile as it is sent, in float32 if exact; without cells if all of them are masked."""
    header = struct.pack("<4I", tile.sampled, *tile.cells.shape)
    if bool(tile.cells.isnan().all()):
        return header
    return header + (tile.cells.contiguous().numpy().tobytes() if exact else tile.to_float16())


def pack_marginals(pyramid: Pyramid) -> bytes:
    """Return the weights that keys receive [s], and entropies [t], as they are sent; none before a scan."""
    if pyramid.received is None or pyramid.entropy is None:
        return struct.pack("<4I", 0, 0, pyramid.t, pyramid.s)
    numbers = torch.cat((pyramid.received, pyramid.entropy)).float().numpy()
    return struct.pack("<4I", 1, 1, pyramid.t, pyramid.s) + numbers.tobytes()


def parse_index(text: str, size: int, name: str) -> int:
    """Return an index below a size; raise LookupError if the text isn't one."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not int(text) < size:
        raise LookupError(f"Expected {name} between 0 and {size - 1}, got {text[:20]!r}.")
    return int(text)


def head_scores(
    amap: AttentionMap, ids: Tensor | None
) -> Generator[None, None, tuple[dict[str, Tensor], int]]:
    """Compute the scores of every head of one sequence in steps: `[h]` by name, and a number n.

    In a large layer, the scores are computed from 1 query in n; else n is 1.
    """
    _, h, t, s = amap.shape
    problem = amap.problem
    if h * t * s <= (EXACT_WEIGHTS if kernels.fuses(problem) else EXACT_WEIGHTS // 16):
        return {name: x[0] for name, x in score_heads(amap, ids).items()}, 1
    stride = -(-t // SAMPLES)
    chosen = HEAD_SCORES if ids is None else (*HEAD_SCORES, "induction")
    masks = {name: SCORES[name].mask(amap, ids).bind(problem.offset, s) for name in chosen}
    names = (*masks, "entropy")
    total, count = ({name: torch.zeros(h) for name in names} for _ in range(2))
    for row in range(stride // 2, t, stride):
        index = torch.tensor([row])
        weights = torch.stack([amap[0, head, row] for head in range(h)])  # [h, s]
        visible = scores.visible(problem, index)[0, :, 0]  # [h or 1, s]
        for name, mask in masks.items():
            keep = problem.keep(mask, index, slice(None))[0, :, 0] & visible
            total[name] += (weights * keep).sum(-1)
            count[name] += keep.any(-1)
        total["entropy"] -= torch.special.xlogy(weights, weights).sum(-1)
        count["entropy"] += visible.any(-1)
        yield
    return {name: total[name] / count[name].clamp(min=1) for name in names}, stride
