"""What a viewer shows: runs, their layers and heads; and an answer for every address that a page asks for.

    runs                                   what there is to see, JSON
    tokens/RUN/LAYER/BATCH                 labels, JSON: "queries" and "keys", lists or null; and the key
                                           where the "first" query stands, null if they are of another text
    measures/RUN/LAYER/BATCH               of every head, JSON
    tiles/RUN/LAYER/HEAD/LEVEL/X/Y/BATCH   numbers (`tiles.Tile`)
    edges/RUN/LAYER/HEAD/BATCH             what keys receive [s] and entropies [t], when a pass has found them
    pass/RUN/LAYER/HEAD/BATCH              begin or go on with that pass, JSON: how far it is
    value/RUN/LAYER/HEAD/I/J/BATCH         one weight, JSON
    row/RUN/LAYER/HEADS/I/BATCH            where a query looks, averaged over heads ("0,3" or "all"), JSON
    column/RUN/LAYER/HEADS/J/BATCH         who looks at a key

Over HTTP they lie below `data/`. RUN, LAYER, HEAD and BATCH are counted from 0. Numbers come as four
little-endian uint32 (sampled, planes, rows, columns) and then float16 times 2^15, or float32 as they are in
`edges` and in a page that was exported; nothing follows where all of a tile is masked. An address is numbers
and one of these words, never a path.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from os import PathLike, fspath, stat, stat_result
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.kernels import native
from manyheads.maps import AttentionMap
from manyheads.masks import AfterSameToken, Diagonal, Mask
from manyheads.observe import Recording, open_run
from manyheads.observe.summaries import Reduced, mean_where
from manyheads.observe.table import score_heads
from manyheads.shapes import kind
from manyheads.viewer.desk import LATER, NOW, SOON, Desk, Kept
from manyheads.viewer.tiles import MOST, SIDE, Head, Tile

HEADS = 192 * 2**20  # bytes of heads that are kept, with what passes found
TILES = 24 * 2**20  # bytes of tiles
EXACT = 2**27  # weights of a layer that are all measured; of more, some queries
SOME = 128  # of them
WAITS = 3.0  # seconds without a question after which a pass rests
BESIDE = 4096  # weights that go with a token
TOP = 12  # the largest weights of a token, and whose they are

Answer = bytes | str  # numbers, or JSON


class Gone(Exception):
    """The file of a run is gone or was changed: what is mapped into memory isn't there any more."""


@dataclass(frozen=True)
class Layer:
    """A call of a layer: a map, or the statistics that were kept of it; number: its place among all calls."""

    name: str
    call: AttentionMap | Reduced
    number: int = 0

    @property
    def map(self) -> AttentionMap:
        """Its map; LookupError where none was kept."""
        if isinstance(self.call, Reduced):
            raise LookupError(
                f'of {self.name} only statistics were kept: observe with keep="maps" to see weights.'
            )
        return self.call


class Run:
    """What one file or object holds, layer by layer."""

    def __init__(
        self, title: str, layers: Sequence[Layer], provenance: Mapping[str, Any], path: Path | None
    ) -> None:
        self.title, self.layers, self.provenance, self.path = title, list(layers), provenance, path
        self._stamp = None if path is None else _stamp(stat(path))

    @classmethod
    def of(cls, shown: Recording | AttentionMap | str | PathLike[str]) -> Run:
        """A run of what `observe` saw, of one map, or of a file of either.

        TypeError for anything else, ValueError where there is nothing to see or the file is broken, OSError
        where it can't be read.
        """
        path = None
        title = "attention"
        if isinstance(shown, str | PathLike):
            path = Path(fspath(shown))
            title, shown = path.stem, open_run(path)
        if isinstance(shown, AttentionMap):
            if not all(shown.shape):
                raise ValueError(f"a map of shape {tuple(shown.shape)} has no weight to look at.")
            return cls(title, [Layer("attention", _here(shown))], shown.provenance, path)
        if not isinstance(shown, Recording):
            raise TypeError(
                f"a viewer shows a Recording, an AttentionMap or a file of them, and {kind(shown)} came."
            )
        layers: list[Layer] = []
        for name in shown:
            calls = shown.calls(name)
            for n, call in enumerate(calls):
                label = name or "attention"
                label = label if len(calls) == 1 else f"{label}, call {n}"
                if all(call.shape):
                    layers.append(Layer(label, _here(call), len(layers)))
        if not layers:
            raise ValueError("nothing was seen, so there is nothing to look at.")
        return cls(str(shown.provenance.get("model", title)), layers, shown.provenance, path)

    def check(self) -> None:
        """Raise Gone unless the file is what it was when it was opened."""
        if self.path is None:
            return
        try:
            same = _stamp(stat(self.path)) == self._stamp
        except OSError:
            same = False
        if not same:
            raise Gone(f"{self.path.name} is gone or was changed since it was opened: open the viewer again.")

    def ids(self, amap: AttentionMap) -> Tensor | None:
        """The tokens of one sequence as numbers, `[s]`: as they were, or by their labels; None if unknown."""
        ids, s = self.provenance.get("ids"), amap.shape[3]
        if isinstance(ids, list | tuple) and len(ids) == s and all(isinstance(n, int) for n in ids):
            return torch.tensor(ids)
        keys = labels(amap, 0)
        if keys is None:
            return None
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(label, len(numbers)) for label in keys])


def _stamp(found: stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _here(call: Any) -> Any:
    """The call with its numbers on the CPU."""
    return call.to("cpu") if isinstance(call, AttentionMap) and call.problem.q.device.type != "cpu" else call


def labels(call: AttentionMap | Reduced, batch: int) -> list[str] | None:
    """The labels of the keys of one sequence."""
    tokens = call.tokens
    if tokens is None or (tokens and isinstance(tokens[0], str)):
        return None if tokens is None else [str(label) for label in tokens]
    return list(tokens[batch])


def beginning(amap: AttentionMap, batch: int) -> int | None:
    """Which key the first query of a sequence stands at; None where queries are of another text."""
    *_, t, s = amap.shape
    mask, offset = amap.problem.mask, amap.problem.offset
    if t != s and (mask is None or mask.normal().band[1] != 0):
        return None
    return offset if isinstance(offset, int) else int(offset[batch])


class Gallery:
    """Runs, and the answers to what a page asks of them; everything is computed by one worker.

    shown: what `Run.of` takes, one or several of them; ValueError for none.
    """

    def __init__(self, *shown: Any) -> None:
        if not shown:
            raise ValueError(
                "nothing was given to look at: give a Recording, AttentionMap or a file of them."
            )
        self.runs = [one if isinstance(one, Run) else Run.of(one) for one in shown]
        titles = [run.title for run in self.runs]
        for n, run in enumerate(self.runs):
            if titles.count(run.title) > 1:
                file = "" if run.path is None or run.path.stem == run.title else f": {run.path.stem}"
                run.title = f"{run.title}{file} ({n})"
        self.desk = Desk()
        self._heads, self._tiles = Kept(HEADS), Kept(TILES)
        self._passes: dict[tuple[int, ...], float] = {}  # by head: when it was last asked for
        self._words: dict[str, tuple[Callable[..., Any], int, int]] = {  # by word: how many parts, how urgent
            "runs": (self._runs, 0, NOW),
            "tokens": (self._tokens, 3, NOW),
            "value": (self._value, 6, NOW),
            "row": (self._row, 5, NOW),
            "column": (self._column, 5, NOW),
            "pass": (self._pass, 4, NOW),
            "edges": (self._edges, 4, NOW),
            "tiles": (self._tile, 7, SOON),
            "measures": (self._measures, 3, LATER),
        }

    def ask(self, address: str) -> Future[Answer]:
        """The answer to an address, when it is there: bytes, or JSON as text.

        Raises LookupError for an address that leads nowhere; the future raises LookupError for a run, layer,
        head, … that isn't there, and Gone where a file is.
        """
        word, *parts = address.split("/")
        answer, count, urgency = self._words.get(word, (None, 0, 0))
        if answer is None or len(parts) != count:
            raise LookupError(f"there is nothing at {address[:80]!r}.")
        if word == "measures":
            return self.desk.ask_in_steps(self._measures(*parts), urgency)
        return self.desk.ask(lambda: answer(*parts), urgency)

    def close(self) -> None:
        """Compute nothing more."""
        self.desk.close()

    # -- what there is -----------------------------------------------------------------------------

    def _run(self, run: str) -> Run:
        found = self.runs[number(run, len(self.runs), "run")]
        found.check()
        return found

    def _layer(self, run: str, layer: str) -> Layer:
        layers = self._run(run).layers
        return layers[number(layer, len(layers), "layer")]

    def _head(self, run: str, layer: str, head: str, batch: str) -> Head:
        amap = self._layer(run, layer).map
        h, b = number(head, amap.shape[1], "head"), number(batch, amap.shape[0], "batch entry")
        key = int(run), int(layer), h, b
        found = self._heads.get(key)
        if found is None:
            found = Head(amap.only(b, h))
        self._heads.put(key, found, lambda one: one.nbytes)  # it may have grown
        return found

    def _runs(self) -> str:
        runs = []
        for run in self.runs:
            layers = []
            for layer in run.layers:
                call, (b, h, t, s) = layer.call, layer.call.shape
                problem = None if isinstance(call, Reduced) else call.problem
                layers.append(
                    {
                        "name": layer.name,
                        "number": layer.number,
                        "heads": list(call.heads),
                        "shape": [b, h, t, s],
                        "mask": "no mask" if problem is None or problem.mask is None else str(problem.mask),
                        "weights": problem is not None,
                        "labelled": call.tokens is not None,
                    }
                )
            beyond = run.provenance.get("extrapolated_from")
            runs.append(
                {
                    "title": run.title,
                    "layers": layers,
                    "extrapolated_from": beyond if isinstance(beyond, int) else None,
                }
            )
        return json.dumps({"runs": runs, "side": SIDE, "most": MOST, "ramp": _ramp()})

    def _tokens(self, run: str, layer: str, batch: str) -> str:
        call = self._layer(run, layer).call
        b = number(batch, call.shape[0], "batch entry")
        keys, queries, first = labels(call, b), None, None
        if isinstance(call, AttentionMap):
            first = beginning(call, b)
        if keys is not None and first is not None:
            places = range(first, first + call.shape[2])
            queries = [keys[n] if 0 <= n < len(keys) else "" for n in places]
        return json.dumps({"queries": queries, "keys": keys, "first": first})

    def _measures(self, run: str, layer: str, batch: str) -> Iterator[str | None]:
        call = self._layer(run, layer).call
        b = number(batch, call.shape[0], "batch entry")
        if isinstance(call, Reduced):
            columns, sampled = {name: x[b] for name, x in call.columns().items()}, 1
        else:
            amap = call if call.shape[0] == 1 else call.only(batch=b)
            for found in measures(amap, self.runs[int(run)].ids(amap)):
                if found is None:
                    yield None
                else:
                    columns, sampled = found
        plain = {name: [None if x != x else x for x in column.tolist()] for name, column in columns.items()}
        yield json.dumps({"measures": plain, "sampled": sampled})

    # -- numbers -----------------------------------------------------------------------------------

    def _tile(self, run: str, layer: str, head: str, level: str, x: str, y: str, batch: str) -> bytes:
        key = run, layer, head, level, x, y, batch
        self._run(run)
        found = self._tiles.get(key)
        if found is None:
            place = (number(part, 2**31, "place") for part in (level, x, y))
            tile = self._head(run, layer, head, batch).tile(*place)
            found = packed(tile)
            if tile.sampled == 1:
                self._tiles.put(key, found)
        return found

    def _edges(self, run: str, layer: str, head: str, batch: str) -> bytes:
        return edges(self._head(run, layer, head, batch))

    def _pass(self, run: str, layer: str, head: str, batch: str) -> str:
        found = self._head(run, layer, head, batch)
        key = int(run), int(layer), int(head), int(batch)
        if not found.whole:
            begun = key in self._passes
            self._passes[key] = time.monotonic()
            if not begun:
                self.desk.ask_in_steps(self._passing(key, found))
        return json.dumps({"progress": found.progress, "whole": found.whole})

    def _passing(self, key: tuple[int, ...], head: Head) -> Iterator[bool | None]:
        """A pass over a head, in steps, while somebody asks for it."""
        steps = head.passing()
        while time.monotonic() - self._passes[key] <= WAITS:
            self.runs[key[0]].check()
            if next(steps, None) is None:
                break
            yield None
        else:
            head.progress = 0.0  # it begins again when it is asked for again
        self._passes.pop(key)
        yield True

    def _value(self, run: str, layer: str, head: str, i: str, j: str, batch: str) -> str:
        found = self._head(run, layer, head, batch)
        weight = found.value(number(i, found.t, "query"), number(j, found.s, "key"))
        return json.dumps({"weight": None if math.isnan(weight) else weight})

    def _row(self, run: str, layer: str, heads: str, i: str, batch: str) -> str:
        return self._line(run, layer, heads, i, batch, row=True)

    def _column(self, run: str, layer: str, heads: str, j: str, batch: str) -> str:
        return self._line(run, layer, heads, j, batch, row=False)

    def _line(self, run: str, layer: str, heads: str, place: str, batch: str, *, row: bool) -> str:
        """A row or column of weights, averaged over heads: those beside it, and the largest of all."""
        amap = self._layer(run, layer).map
        _, h, t, s = amap.shape
        b = number(batch, amap.shape[0], "batch entry")
        chosen = range(h) if heads == "all" else [number(one, h, "head") for one in heads.split(",")]
        at = number(place, t if row else s, "query" if row else "key")
        weights = torch.zeros(s if row else t)
        for one in chosen:  # each by itself, as all of them may take much memory
            weights += (amap[b, one, at] if row else amap[b, one, :, at]) / len(chosen)
        first, begins = 0, beginning(amap, b)
        if begins is not None:
            at += begins if row else -begins  # as a place among the others
        if len(weights) > BESIDE:
            first = max(0, min(at - BESIDE // 2, len(weights) - BESIDE))
        largest = weights.topk(min(TOP, len(weights)))
        return json.dumps(
            {
                "first": first,
                "weights": weights[first : first + BESIDE].tolist(),
                "top": [
                    [j, w]
                    for j, w in zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
                    if w
                ],
            }
        )


def packed(tile: Tile, exact: bool = False) -> bytes:
    """A tile as it is sent, exact in float32; without numbers where all of it is masked."""
    planes, r, c = tile.numbers.shape
    head = struct.pack("<4I", tile.sampled, planes, r, c)
    if bool(tile.numbers.isnan().all()):
        return head
    return head + (tile.numbers.contiguous().numpy().tobytes() if exact else tile.packed())


def edges(head: Head) -> bytes:
    """What keys receive [s] and entropies [t], as they are sent; without numbers until a pass ended."""
    if head.received is None or head.entropy is None:
        return struct.pack("<4I", 0, 0, head.t, head.s)
    numbers = torch.cat((head.received, head.entropy)).float().numpy()
    return struct.pack("<4I", 1, 1, head.t, head.s) + numbers.tobytes()


def number(text: str, size: int, what: str) -> int:
    """One of so many, counted from 0; LookupError for another one."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not int(text) < size:
        raise LookupError(f"{what} must lie between 0 and {size - 1}, and {text[:20]!r} was asked for.")
    return int(text)


def measures(amap: AttentionMap, ids: Tensor | None) -> Iterator[tuple[dict[str, Tensor], int] | None]:
    """The measures of every head of one sequence, `[h]` each, and of how many queries one was looked at.

    They come last; None before them says that others may have their turn.
    """
    _, h, t, s = amap.shape
    if h * t * s <= (EXACT if native.looks(amap.problem) else EXACT // 16):  # about as long
        yield {name: x[0] for name, x in score_heads(amap, ids).items()}, 1
        return
    step = -(-t // SOME)
    problem = amap.problem
    masks: dict[str, Mask] = {"previous_token": Diagonal(-1), "current_token": Diagonal(0)}
    masks["first_token"] = amap.first_key()
    if ids is not None:
        masks["induction"] = AfterSameToken(ids)
    bound = {name: mask.bind(problem.offset, s) for name, mask in masks.items()}
    names = (*masks, "entropy")
    mass, could = ({name: torch.zeros(h, -(-t // step)) for name in names} for _ in range(2))
    for column, row in enumerate(range(step // 2, t, step)):
        index = torch.tensor([row])
        weights = torch.stack([amap[0, n, row] for n in range(h)])  # [h, s]
        seen = scores.visible(problem, index)[0, :, 0]  # [h or 1, s]
        for name, mask in bound.items():
            keep = problem.keep(mask, index, slice(None))[0, :, 0] & seen
            mass[name][:, column] = (weights * keep).sum(-1)
            could[name][:, column] = keep.any(-1)
        mass["entropy"][:, column] = -torch.special.xlogy(weights, weights).sum(-1)
        could["entropy"][:, column] = seen.any(-1)
        yield None
    yield {name: mean_where(mass[name], could[name] > 0) for name in names}, step


def _ramp() -> str:
    """The colours from 0 to 1, as 256 × rrggbb: viridis, legible without colour vision."""
    from matplotlib import colormaps

    return "".join(f"{part:02x}" for n in range(256) for part in colormaps["viridis"](n, bytes=True)[:3])
