"""The viewer's data: the runs, and the response to every address that a page requests.

    runs                                     the runs, their layers, and the names of head scores, JSON
    tokens/RUN/LAYER/BATCH                   labels of "queries" and "keys" (lists or null), as "first" the
                                             position of the first query, null in cross-attention, and as
                                             "text" how the keys are pieces of a text, or null; likewise
                                             "query_text" in cross-attention; JSON
    scores/RUN/LAYER/BATCH                   head scores of every head, and as "patterns" what each attends to
                                             in words, or null; JSON
    tiles/RUN/LAYER/HEAD/LEVEL/X/Y/BATCH     cells of weights (`pyramid.Tile`), binary
    marginals/RUN/LAYER/HEAD/BATCH           the weight that each key receives [s], and the entropy of each
                                             query [t], binary
    scan/RUN/LAYER/HEAD/BATCH                start or continue the scan that computes both, JSON: its progress
    weight/RUN/LAYER/HEAD/I/J/BATCH          a single weight, JSON
    row/RUN/LAYER/HEADS/I/BATCH              a query's weights, averaged over heads ("0,3" or "all"), JSON
    column/RUN/LAYER/HEADS/J/BATCH           a key's weights, likewise
    profile/RUN/LAYER/HEAD/I/BATCH           a query's weights pooled to a chart, and the largest, JSON
    patches/RUN/LAYER/BATCH                  where the patches of a picture are among the keys, and the
                                             picture (`looking.describe_patches`), or null; JSON
    image/RUN/LAYER/HEAD/I/BATCH             a query's weights on the patches, row by row, JSON
    explain/RUN/LAYER/HEAD/I/J/BATCH         the steps from q·k to a weight, JSON (see explain.py)
    largest/RUN/LAYER/HEAD/RANK/BATCH        the weight with RANK larger ones in its head: "query", "key" and
                                             "weight", null if there is none or before a "complete" scan; JSON
    block/RUN/LAYER/HEADS/I0/I1/J0/J1/BATCH  the weights of heads ("0,3" or "all") from query I0 to before I1
                                             and from key J0 to before J1, at most `BLOCK_WEIGHTS`, binary
    heads/RUN/LAYER/I/J/BATCH                the weight of every head from query I to key J, in all layers
                                             with the queries and keys of LAYER, JSON
    findings/RUN/BATCH                       weights that stand out, as sentences, JSON
    figure/RUN/LAYER/HEAD/I0/I1/J0/J1/POOLING/SCALE/FORMAT/BATCH
                                             queries I0 to before I1 and keys J0 to before J1 as a file for
                                             papers; "max" or "mean" of cells, "sqrt", "linear" or "log"
                                             colours, "svg" or "pdf"
    difference/PLACE/PLACE/I0/I1/J0/J1/POOLING/SCALE/FORMAT
                                             likewise the weights of a head minus those of another, each with
                                             its "RUN,LAYER,HEAD,BATCH" as PLACE
    comparison/…                             likewise two heads beside each other

Over HTTP they are below `data/`. RUN, LAYER, HEAD and BATCH count from 0. Binary responses are four
little-endian uint32 (sampled, planes, rows, columns), then float16 times 2^15, or plain float32 in
`marginals`, `block` (a plane for each head) and exported pages. Masked weights are NaN. If a tile is fully
masked, or a scan isn't complete, no numbers follow.
An address consists of one of these words and numbers, and is never a path.
"""

from __future__ import annotations

import inspect
import json
import math
import struct
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cachetools import LRUCache

from manyheads import scores
from manyheads.highlights import describe_head
from manyheads.maps import AttentionMap, sequence_labels
from manyheads.measures import UNITS
from manyheads.observe.summaries import Call
from manyheads.observe.table import COLUMNS
from manyheads.tokens import TokenizedText
from manyheads.viewer import assets, findings, looking, pictures
from manyheads.viewer.addresses import (
    parse_drawing,
    parse_heads,
    parse_index,
    parse_place,
    parse_range,
)
from manyheads.viewer.descriptions import (
    describe_layer,
    describe_text,
    have_same_tokens,
    name_head,
    name_source,
    read_queries,
    read_text,
    shorten,
    tell_apart,
)
from manyheads.viewer.explain import explain_weight, profile_row
from manyheads.viewer.head_scores import head_scores
from manyheads.viewer.largest import Weight
from manyheads.viewer.pyramid import MAX_WEIGHTS, SIDE, Pyramid, Tile
from manyheads.viewer.runs import FileChanged, Layer, ViewedRun, distinguish, first_position
from manyheads.viewer.worker import BACKGROUND, NORMAL, URGENT, Worker

PYRAMID_BYTES = 96 * 2**20  # the size of the cache of heads, with the results of their scans
TILE_BYTES = 4 * 2**20  # the size of the cache of tiles
SCAN_TIMEOUT = 3.0  # a scan stops if it wasn't requested for this many seconds
LINE = 4096  # the number of weights around a token in the response for a row or column
LARGEST = 12  # the number of largest weights of a row or column
RANKS = 10_000  # a page can step through this many of the largest weights of a head
POSITIONAL_SCORES = set(COLUMNS) - {"entropy"}  # they compare positions of queries with positions of keys
BLOCK_WEIGHTS = 2**21  # the largest number of weights in the response for a block, 8 MB

Response = bytes | str  # binary, or JSON
NAN_PATTERN = "has weights that aren't numbers (NaN)"  # of a head whose entropy is NaN
Steps = Generator[None, None, Any]  # yields when more urgent requests may run first; returns a response


def describe_error(error: BaseException) -> str:
    """Return the message of an error for a page: one sentence or two, never empty."""
    if isinstance(error, MemoryError) and not str(error):
        return "Not enough memory for this response. Free some memory and try again."
    text = str(error.args[0] if isinstance(error, LookupError) and error.args else error).strip()
    if isinstance(error, LookupError | FileChanged | RuntimeError | ValueError | MemoryError) and text:
        return text
    return f"The viewer couldn't compute this response: {type(error).__name__}{text and f', {text}'}."


@dataclass
class _Scan:
    """A scan that runs.

    Attributes:
        pyramid: The head. It is kept here, because the cache may evict it meanwhile.
        requested: The time of the last request for its progress.
    """

    pyramid: Pyramid
    requested: float


class Api:
    """Respond to the addresses that pages request. One worker computes all responses.

    Args:
        *sources: Recordings, maps or paths of files, at least one.
        picture: The picture that the models read, or a list of one for each batch entry.

    Raises:
        ValueError: If there is no source, or the patches of a picture aren't known.
    """

    def __init__(self, *sources: Any, picture: Any = None) -> None:
        if not sources:
            raise ValueError("Expected a Recording, an AttentionMap or a path, got nothing to show.")
        self.runs = [x if isinstance(x, ViewedRun) else ViewedRun.of(x) for x in sources]
        distinguish(self.runs)
        if picture is not None:
            looking.set_picture(self.runs, picture)
        self.worker = Worker()
        # With `min`, the two heads that a page compares are cached however large they are. Otherwise the scan
        # of each would evict the other.
        self._pyramids: LRUCache[tuple[int, ...], Pyramid] = LRUCache(
            PYRAMID_BYTES, lambda pyramid: min(pyramid.nbytes, PYRAMID_BYTES / 2)
        )
        self._tiles: LRUCache[tuple[str, ...], bytes] = LRUCache(TILE_BYTES, len)
        self._scores_by_layer: dict[tuple[int, ...], str] = {}  # by run, layer and sequence
        self._scans: dict[tuple[int, ...], _Scan] = {}  # those that run, by head
        self._handlers: dict[str, tuple[Callable[..., Response | Steps], int]] = {
            "runs": (self._runs, URGENT),
            "tokens": (self._tokens, URGENT),
            "weight": (self._weight, URGENT),
            "row": (partial(self._line, "query"), URGENT),
            "column": (partial(self._line, "key"), URGENT),
            "profile": (self._profile, URGENT),
            "explain": (self._explain, URGENT),
            "patches": (self._patches, URGENT),
            "image": (self._image, URGENT),
            "largest": (self._largest, URGENT),
            "block": (self._block, NORMAL),
            "heads": (self._heads, URGENT),
            "scan": (self._scan, URGENT),
            "marginals": (self._marginals, URGENT),
            "tiles": (self._tile, NORMAL),
            "scores": (self._scores, BACKGROUND),
            "findings": (self._findings, BACKGROUND),
            "figure": (self._figure, NORMAL),
            "difference": (partial(self._two_heads, "difference"), NORMAL),
            "comparison": (partial(self._two_heads, "comparison"), NORMAL),
        }

    def request(self, address: str) -> Future[Response]:
        """Request the response to an address.

        Args:
            address: One of those listed above.

        Returns:
            A future, which may be cancelled. Its result raises LookupError if the address is unknown or an
            index is out of range, and FileChanged if the file of the run changed.
        """
        word, *parts = address.split("/")
        handler, priority = self._handlers.get(word, (None, URGENT))

        def respond() -> Response | Steps:
            if handler is None or len(parts) != len(inspect.signature(handler).parameters):
                raise LookupError(f"Unknown address {address[:80]!r}.")
            return handler(*parts)

        return self.worker.submit(respond, priority)

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
        scan = self._scans.get(key)
        pyramid = scan.pyramid if scan else self._pyramids.get(key) or Pyramid(layer.map.only(b, key[2]))
        self._pyramids[key] = pyramid  # stored again, because its size may have changed
        return pyramid

    def _runs(self) -> str:
        most = max(run.layers[0].call.shape[0] for run in self.runs)
        texts = [[read_text(run, b) for run in self.runs] for b in range(most)]  # by sequence and run
        parts = [tell_apart(each) for each in texts]
        runs = []
        for n, run in enumerate(self.runs):
            sequences = range(run.layers[0].call.shape[0])
            trained = run.provenance.get("extrapolated_from")
            runs.append(
                {
                    "title": run.title,
                    "texts": [shorten(texts[b][n]) for b in sequences],
                    "parts": [parts[b][n] for b in sequences],  # where the texts of the runs differ
                    "layers": [describe_layer(layer) for layer in run.layers],
                    "extrapolated_from": trained if isinstance(trained, int) else None,
                }
            )

        # matplotlib's colour maps as a file: importing it would take 15 MB.
        colors = json.loads(assets.read("colors.json"))
        info = {
            "runs": runs,
            "side": SIDE,
            "max_weights": MAX_WEIGHTS,
            "block_weights": BLOCK_WEIGHTS,
            # These maps are legible without colour vision.
            "colors": colors["viridis"],
            "differences": {"light": colors[pictures.DIFFERENCES], "dark": colors["berlin"]},
            "scores": {name: UNITS.get(name, "") for name in COLUMNS},
        }
        return json.dumps(info)

    def _tokens(self, run: str, number: str, batch: str) -> str:
        layer, b = self._layer(run, number, batch)
        call = layer.call
        keys, queries = sequence_labels(call.tokens, b), None
        labels = None if keys is None else list(keys)
        first = first_position(call, b) if isinstance(call, AttentionMap) else None
        if labels is not None and first is not None:
            positions = range(first, first + call.shape[2])
            queries = [labels[n] if 0 <= n < len(labels) else "" for n in positions]
        text = describe_text(keys) if isinstance(keys, TokenizedText) else None
        described = {"queries": queries, "keys": labels, "first": first, "text": text}
        if first is None and isinstance(call, AttentionMap):
            read = read_queries(self._run(run), layer, b)
            described["queries"] = None if read is None else list(read)
            described["query_text"] = describe_text(read) if isinstance(read, TokenizedText) else None
        return json.dumps(described)

    def _scores(self, run: str, number: str, batch: str) -> Steps:
        layer, b = self._layer(run, number, batch)
        key = int(run), int(number), b
        if key not in self._scores_by_layer:
            self._scores_by_layer[key] = yield from self._compute_scores(layer.call, int(run), b)
        return self._scores_by_layer[key]

    def _compute_scores(self, call: Call, run: int, b: int) -> Generator[None, None, str]:
        repeats, is_map = None, isinstance(call, AttentionMap)
        if isinstance(call, AttentionMap):
            amap = call if call.shape[0] == 1 else call.only(batch=b)
            ids = self.runs[run].ids(amap)
            columns, sampled = yield from head_scores(amap, ids)
            repeats = None if ids is None else len(ids) - len(ids.unique())
        else:
            columns, sampled = {name: x[b] for name, x in call.columns().items() if name in COLUMNS}, 1
        if first_position(call, b) is None:  # a query and a key with the same number aren't the same token
            columns = {name: x for name, x in columns.items() if name not in POSITIONAL_SCORES}
        plain = {name: [None if x != x else x for x in column.tolist()] for name, column in columns.items()}
        if is_map:  # sums over the weights of some keys only may be 0 where others are NaN
            entropies = plain["entropy"]
            plain = {
                name: [None if entropy is None else x for x, entropy in zip(column, entropies, strict=True)]
                for name, column in plain.items()
            }
        heads = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
        patterns = [
            NAN_PATTERN if is_map and head["entropy"] is None else describe_head(head, repeats=repeats)
            for head in heads
        ]
        return json.dumps({"scores": plain, "sampled": sampled, "patterns": patterns})

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
        if key in self._scans:
            self._scans[key].requested = time.monotonic()
        elif not pyramid.is_complete:
            self._scans[key] = _Scan(pyramid, time.monotonic())
            self.worker.submit(lambda: self._scan_steps(key), BACKGROUND)
        return json.dumps({"progress": pyramid.progress, "complete": pyramid.is_complete})

    def _scan_steps(self, key: tuple[int, ...]) -> Steps:
        """Scan a head while pages request its progress."""
        scan = self._scans[key]
        steps = scan.pyramid.scan()
        try:
            while time.monotonic() - scan.requested <= SCAN_TIMEOUT:
                self.runs[key[0]].check_file()
                if next(steps, None) is None:
                    return
                yield
            scan.pyramid.progress = 0.0  # the next scan starts over
        finally:
            del self._scans[key]

    def _weight(self, run: str, layer: str, head: str, i: str, j: str, batch: str) -> str:
        pyramid = self._pyramid(run, layer, head, batch)
        weight = pyramid.weight(parse_index(i, pyramid.t, "query"), parse_index(j, pyramid.s, "key"))
        return json.dumps({"weight": None if math.isnan(weight) else weight})

    def _profile(self, run: str, number: str, head: str, i: str, batch: str) -> str:
        layer, b = self._layer(run, number, batch)
        _, h, t, _ = layer.map.shape
        return json.dumps(profile_row(layer.map, b, parse_index(head, h, "head"), parse_index(i, t, "query")))

    def _explain(self, run: str, number: str, head: str, i: str, j: str, batch: str) -> str:
        layer, b = self._layer(run, number, batch)
        sizes = zip((head, i, j), layer.map.shape[1:], ("head", "query", "key"), strict=True)
        return json.dumps(explain_weight(layer.map, b, *(parse_index(*size) for size in sizes)))

    def _largest(self, run: str, layer: str, head: str, rank: str, batch: str) -> str:
        pyramid = self._pyramid(run, layer, head, batch)
        found = pyramid.largest(parse_index(rank, RANKS, "rank"))
        weight = dict.fromkeys(Weight._fields) if found is None else found._asdict()
        return json.dumps({**weight, "complete": pyramid.is_complete})

    def _line(self, axis: str, run: str, number: str, heads: str, index: str, batch: str) -> str:
        """Return the weights of a query or key, averaged over heads: those around it, and the largest."""
        layer, b = self._layer(run, number, batch)
        amap, is_row = layer.map, axis == "query"
        _, h, t, s = amap.shape
        chosen = parse_heads(heads, h)
        n = parse_index(index, t if is_row else s, axis)
        weights = torch.zeros(s if is_row else t)
        for head in chosen:  # one at a time, to save memory
            weights += (amap[b, head, n] if is_row else amap[b, head, :, n]) / len(chosen)
        start, first = 0, first_position(amap, b)
        if first is not None:
            n += first if is_row else -first  # the index of the same position on the other axis
        if len(weights) > LINE:
            start = max(0, min(n - LINE // 2, len(weights) - LINE))
        top = weights.nan_to_num(nan=0.0).topk(min(LARGEST, len(weights)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        largest = [[n, weight] for n, weight in pairs if weight]
        shown = _without_nan(weights[start : start + LINE])
        return json.dumps({"first": start, "weights": shown, "top": largest})

    def _patches(self, run: str, number: str, batch: str) -> str:
        layer, b = self._layer(run, number, batch)
        return json.dumps(
            looking.describe_patches(self._run(run), layer.map, first_position(layer.call, b), b)
        )

    def _image(self, run: str, number: str, head: str, index: str, batch: str) -> str:
        layer, b = self._layer(run, number, batch)
        amap = layer.map.only(b, parse_index(head, layer.map.shape[1], "head"))
        return json.dumps(_without_nan(amap.image(parse_index(index, amap.shape[2], "query")).flatten()))

    def _block(
        self, run: str, number: str, heads: str, i0: str, i1: str, j0: str, j1: str, batch: str
    ) -> Steps:
        layer, _ = self._layer(run, number, batch)
        _, h, t, s = layer.map.shape
        chosen, rows, cols = (
            parse_heads(heads, h),
            parse_range(i0, i1, t, "query"),
            parse_range(j0, j1, s, "key"),
        )
        size = len(chosen) * len(rows) * len(cols)
        if size > BLOCK_WEIGHTS:
            raise LookupError(f"Expected a block of at most {BLOCK_WEIGHTS:,} weights, got {size:,}.")
        planes = []
        for head in chosen:
            planes.append(self._pyramid(run, number, str(head), batch).weights(rows, cols))
            yield
        header = struct.pack("<4I", 1, len(chosen), len(rows), len(cols))
        return header + torch.stack(planes).numpy().tobytes()

    def _heads(self, run: str, number: str, i: str, j: str, batch: str) -> Steps:
        """Return the weights of one query and key in every layer, null if masked or over other tokens."""
        reference, b = self._layer(run, number, batch)
        *_, t, s = reference.map.shape
        query, key = parse_index(i, t, "query"), parse_index(j, s, "key")
        layers: list[list[float | None] | None] = []
        for layer in self._run(run).layers:
            if not have_same_tokens(layer, reference, b):
                layers.append(None)
                continue
            place = slice(query, query + 1), slice(key, key + 1), slice(b, b + 1)
            visible = scores.visible(layer.map.problem, *place)[0, :, 0, 0]  # [h or 1]
            weights = layer.map[b, :, query, key].masked_fill(~visible, math.nan).tolist()
            layers.append([None if math.isnan(weight) else weight for weight in weights])
            yield
        return json.dumps({"layers": layers})

    def _figure(
        self,
        run: str,
        number: str,
        head: str,
        i0: str,
        i1: str,
        j0: str,
        j1: str,
        pooling: str,
        scale: str,
        format: str,
        batch: str,
    ) -> Steps:
        pyramid = self._pyramid(run, number, head, batch)
        layer, b = self._layer(run, number, batch)
        found = json.loads((yield from self._scores(run, number, batch)))
        title, pattern = name_head(layer, head), found["patterns"][int(head)]
        return (
            yield from pictures.draw_view(
                pyramid,
                parse_range(i0, i1, pyramid.t, "query"),
                parse_range(j0, j1, pyramid.s, "key"),
                **parse_drawing(pooling, scale, format),
                first=first_position(layer.map, b),
                read=read_queries(self._run(run), layer, b),
                title=f"{title} — {pattern}" if pattern else title,
                source=name_source(self._run(run), layer, b),
            )
        )

    def _two_heads(
        self,
        kind: str,
        place: str,
        second: str,
        i0: str,
        i1: str,
        j0: str,
        j1: str,
        pooling: str,
        scale: str,
        format: str,
    ) -> Steps:
        places = [parse_place(place), parse_place(second)]
        head, other = (self._pyramid(*each) for each in places)
        names, sources = [], []
        for run, number, index, batch in places:
            layer, b = self._layer(run, number, batch)
            names.append(name_head(layer, index))
            sources.append(name_source(self._run(run), layer, b))
        run, number, _, batch = places[0]
        layer, b = self._layer(run, number, batch)
        part = parse_range(i0, i1, head.t, "query"), parse_range(j0, j1, head.s, "key")
        drawing: dict[str, Any] = {
            **parse_drawing(pooling, scale, format),
            "first": first_position(layer.map, b),
            "read": read_queries(self._run(run), layer, b),
        }
        if kind == "comparison":
            drawing |= {"titles": (names[0], names[1]), "sources": (sources[0], sources[1])}
            return (yield from pictures.draw_comparison((head, other), *part, **drawing))
        lines = [f"{name}: {source}" for name, source in zip(names, sources, strict=True)]
        drawing["sources"] = sources[:1] if sources[0] == sources[1] else lines
        title = f"difference: {' − '.join(names)}"
        return (yield from pictures.draw_difference((head, other), *part, **drawing, title=title))

    def _findings(self, run: str, batch: str) -> Steps:
        viewed = self._run(run)
        most = max(layer.call.shape[0] for layer in viewed.layers)
        found = yield from findings.find(viewed, parse_index(batch, most, "batch entry"))
        return json.dumps(found)


def _without_nan(weights: torch.Tensor) -> list[float | None]:
    """Return weights as numbers for JSON, None in place of NaN."""
    return [None if math.isnan(weight) else weight for weight in weights.tolist()]


def pack_tile(tile: Tile, exact: bool = False) -> bytes:
    """Return a tile as bytes, in float32 if exact; without cells if all of them are masked."""
    header = struct.pack("<4I", tile.sampled, *tile.cells.shape)
    if bool(tile.cells.isnan().all()):
        return header
    return header + (tile.cells.contiguous().numpy().tobytes() if exact else tile.to_float16())


def pack_marginals(pyramid: Pyramid) -> bytes:
    """Return the weights that keys receive [s] and the entropies [t] as bytes; no numbers before a scan."""
    if pyramid.marginals is None:
        return struct.pack("<4I", 0, 0, pyramid.t, pyramid.s)
    numbers = torch.cat((pyramid.marginals.received, pyramid.marginals.entropy)).float().numpy()
    return struct.pack("<4I", 1, 1, pyramid.t, pyramid.s) + numbers.tobytes()
