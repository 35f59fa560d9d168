"""`Alignment`: when each token is spoken, or which part of the source it translates.

A monotone path through the cross-attention weights of some heads, found by dynamic time warping (`warping`),
as in Whisper (Radford et al. 2022, arXiv:2212.04356). The steps and their defaults are those of OpenAI's and
transformers' implementations, so that word times are equal. Weights are read tile by tile, so that long
recordings need little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyheads import scores
from manyheads.maps import AttentionMap, sequence_labels
from manyheads.shapes import kind, whole
from manyheads.statistics import Bins, edges
from manyheads.tokens import TokenizedText
from manyheads.warping import median, warp

TILE = 2**17  # the most weights that are filtered at once, so that they fit a processor's cache
KEPT = 2**23  # the most weights that are kept between two passes; more are computed again
BLOCK = 2**21  # the most cells of a block of keys, some 20 bytes each
NARROWEST = 64  # the least number of keys in a block
CHUNK = 256  # rows whose visible keys are read at once

Rows = slice | Tensor


class AlignmentHead(NamedTuple):
    """A head, and how well its weights follow a monotone path, a number up to 1."""

    layer: str
    head: int
    score: float


class Word(NamedTuple):
    """A word with the time at which it starts and ends, and its tokens.

    Times are in seconds if the alignment has seconds, else in keys. The end is exclusive.
    """

    text: str
    start: float
    end: float
    tokens: range


@dataclass(frozen=True, eq=False, repr=False)
class Alignment:
    """Which keys each token of a sequence is aligned with; `figures.alignment` draws it.

    Attributes:
        path: The pairs (query, key) of the path, integers `[n, 2]`: rows and columns of the map.
        queries: The aligned queries, rows of the map, integers `[t]`.
        keys: The aligned keys, columns of the map, integers `[s]`.
        tokens: The labels of the aligned queries, or None.
        seconds: The duration of a key in seconds, or None.
        heads: The heads whose weights were averaged: pairs of a layer's path and a head.
        maps: The maps of these heads, layer by layer.
    """

    path: Tensor
    queries: Tensor
    keys: Tensor
    tokens: Sequence[str] | None
    seconds: float | None
    heads: tuple[tuple[str, int], ...]
    maps: tuple[AttentionMap, ...]

    @cached_property
    def starts(self) -> Tensor:
        """The first key of each token, integers `[t]`."""
        first = torch.cat((torch.ones(1, dtype=torch.bool), self.path[1:, 0] != self.path[:-1, 0]))
        return self.path[first, 1]

    @cached_property
    def ends(self) -> Tensor:
        """The key at which each token ends, exclusive, `[t]`: the start of the next token.

        The last token ends after the last key. A token whose successor starts at the same key has no length.
        """
        return torch.cat((self.starts[1:], self.path[-1:, 1] + 1))

    @property
    def times(self) -> Tensor:
        """The start and end of each token in seconds, `[t, 2]` float64; ValueError without seconds."""
        if self.seconds is None:
            raise ValueError(
                "The alignment has no seconds. Pass the duration of a key, such as "
                "recording.align(seconds=0.02) for Whisper."
            )
        return torch.stack((self.starts, self.ends), -1).double() * self.seconds

    @cached_property
    def words(self) -> list[Word]:
        """The words, with their times: tokens of a word are joined, and so is the punctuation after it.

        Special tokens are left out. ValueError if tokens isn't a `TokenizedText`.
        """
        text = self.tokens
        if not isinstance(text, TokenizedText):
            got = "an alignment without tokens" if text is None else f"labels of tokens, {kind(text)}"
            raise ValueError(
                f"Expected a TokenizedText, which knows words, got {got}. Pass "
                "recording.align(tokens=TokenizedText.from_ids(ids, tokenizer))."
            )
        unit = 1 if self.seconds is None else self.seconds
        starts, ends = (x.tolist() for x in (self.starts, self.ends))
        return [
            Word(
                "".join(text.pieces[n] for n in word).strip(),
                round(starts[word.start] * unit, 9),
                round(ends[word.stop - 1] * unit, 9),
                word,
            )
            for word in _join_words(text)
        ]

    def pooled(self, rows: int, cols: int) -> Tensor:
        """Return the mean weight of the heads in each cell of aligned queries and keys.

        Args:
            rows: The number of cells down, at most as many as queries.
            cols: The number of cells across, at most as many as keys.

        Returns:
            The pooled weights `[rows, cols]`, between 0 and 1.

        Raises:
            TypeError: If a number of cells isn't an integer.
            ValueError: If a number of cells is out of range.
        """
        t, s = len(self.queries), len(self.keys)
        whole(rows, "rows, the number of cells down,", least=1, most=t)
        whole(cols, "cols, the number of cells across,", least=1, most=s)
        down, across = edges(t, rows), edges(s, cols)
        total = torch.zeros(rows, cols, dtype=torch.float64)
        for amap in self.maps:
            for part, w in _tiles(amap, self.queries, self.keys):
                bins = Bins(down, part)
                cells = Bins(across, slice(0, s)).sum(w.double().cpu().sum(0))  # [r, cols]
                total[bins.cells] += bins.sum(cells.mT).mT
        area = down.diff()[:, None] * across.diff()  # [rows, cols]
        return (total / (area * len(self.heads))).clamp_(max=1.0).float()

    def largest(self) -> Tensor:
        """Return the key with the largest mean weight of each token, `[t]`, without regard to the path."""
        best = [self.keys[w.argmax(-1)] for _, w in _mean_tiles(self.maps, self.queries, self.keys)]
        return torch.cat(best)

    @property
    def key_tokens(self) -> Sequence[str] | None:
        """The labels of the aligned keys, or None."""
        labels = sequence_labels(self.maps[0].tokens)
        return None if labels is None else _take(labels, self.keys)

    def __repr__(self) -> str:
        unit = "" if self.seconds is None else f", {self.seconds:g} s each"
        return (
            f"Alignment(tokens: {len(self.queries)}, keys: {len(self.keys)}{unit}, heads: {len(self.heads)})"
        )


def _join_words(text: TokenizedText) -> list[range]:
    """Return the tokens of each word, with the punctuation around it; special tokens are left out."""
    special = set(text.special)
    joined: list[range] = []
    opening = None  # the first token of punctuation before the next word, such as a quotation mark
    for group in dict.fromkeys(map(_as_pair, text.words)):
        tokens = range(*group)
        if tokens[0] in special:
            opening = None
            continue
        piece = "".join(text.pieces[n] for n in tokens)
        is_adjacent = bool(joined) and joined[-1].stop == tokens.start and not piece[:1].isspace()
        if not any(character.isalnum() for character in piece):
            if is_adjacent and opening is None:
                joined[-1] = range(joined[-1].start, tokens.stop)
            elif piece.strip():
                opening = tokens if opening is None else range(opening.start, tokens.stop)
            continue
        if opening is not None and (opening.stop != tokens.start or piece[:1].isspace()):
            joined.append(opening)  # punctuation between spaces, such as a dash
            opening = None
        joined.append(tokens if opening is None else range(opening.start, tokens.stop))
        opening = None
    return joined if opening is None else [*joined, opening]


def _as_pair(tokens: range) -> tuple[int, int]:
    return tokens.start, tokens.stop


# -- aligning --------------------------------------------------------------------------------------


def align(
    maps: Sequence[AttentionMap],
    heads: Sequence[tuple[str, int]],
    *,
    queries: Any = None,
    keys: Any = None,
    tokens: Sequence[str] | None = None,
    seconds: float | None = None,
    median_filter: int = 7,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Alignment:
    """Align the queries of one sequence with its keys; see `Recording.align`.

    Args:
        maps: The maps of the chosen heads, each `[1, h, t, s]`.
        heads: The names of these heads, for the result.
        queries: The queries to align, an index. Default: all.
        keys: The keys to align, an index. Default: those that are visible.
        tokens: The labels of all t queries.
        seconds: The duration of a key in seconds.
        median_filter: The width of the median filter in keys.
        normalize: Whether to standardize the weights of each key.
        dtype: The precision of accumulated costs.

    Returns:
        The alignment.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument doesn't fit the maps.
    """
    settings = Settings.of(median_filter, normalize, dtype)
    duration = None if seconds is None else _check_seconds(seconds)
    rows, cols = select(maps, queries, keys)
    t = maps[0].shape[2]
    if tokens is not None:
        if isinstance(tokens, str) or not isinstance(tokens, Sequence):
            raise TypeError(f"Expected tokens to be a list of strings, got {kind(tokens)}.")
        if len(tokens) != t:
            raise ValueError(
                f"Expected tokens to be labels of all {t} queries, got {len(tokens)}. Label each "
                "query with the token that it predicts, ids[1:]."
            )
        if not isinstance(tokens, TokenizedText) and not all(isinstance(token, str) for token in tokens):
            wrong = next(token for token in tokens if not isinstance(token, str))
            raise TypeError(
                f"Expected tokens to be strings, got {wrong!r}. Convert ids with "
                "tokenizer.convert_ids_to_tokens."
            )
        tokens = _take(tokens, rows)
    (path,) = Warp(maps, rows, cols, settings, pooled=True).paths()
    path = torch.stack((rows[path[:, 0]], cols[path[:, 1]]), -1)
    return Alignment(path, rows, cols, tokens, duration, tuple(heads), tuple(maps))


def score_heads(
    amap: AttentionMap,
    *,
    queries: Any = None,
    keys: Any = None,
    median_filter: int = 7,
    normalize: bool = True,
) -> list[float]:
    """Return the alignment score of every head of a map `[1, h, t, s]`; see `find_alignment_heads`.

    Args:
        amap: The map.
        queries: The queries to align, an index. Default: all.
        keys: The keys to align, an index. Default: those that are visible.
        median_filter: The width of the median filter in keys.
        normalize: Whether to standardize the weights of each key.

    Returns:
        The scores, numbers up to 1.
    """
    rows, cols = select([amap], queries, keys)
    warp = Warp([amap], rows, cols, Settings.of(median_filter, normalize, torch.float64), pooled=False)
    paths = warp.paths()
    mean = warp.column_means().double()  # [h, s]
    totals = [0.0] * len(paths)
    for part, w in _tiles(amap, rows, cols):
        for head, path in enumerate(paths):
            inside = path[(path[:, 0] >= part.start) & (path[:, 0] < part.stop)]
            i, j = inside[:, 0] - part.start, inside[:, 1]
            totals[head] += float((w[head, i, j].double() - mean[head, j]).sum())
    return [total / len(rows) for total in totals]


def select(maps: Sequence[AttentionMap], queries: Any, keys: Any) -> tuple[Tensor, Tensor]:
    """Return the aligned queries `[t]` and keys `[s]` of maps of one sequence, in order.

    Keys that are masked for every query, such as padding, are left out, unless they are named: then a masked
    key raises ValueError.
    """
    shape = maps[0].shape
    visible = torch.ones(shape[3], dtype=torch.bool)
    for amap in maps:
        visible &= _visible_keys(amap)
    rows = _resolve(queries, shape[2], "queries")
    if keys is None:
        cols = visible.nonzero()[:, 0]
        if not len(cols):
            raise ValueError("Expected keys to align with, got a sequence whose keys are all masked.")
        return rows, cols
    cols = _resolve(keys, shape[3], "keys")
    if not visible[cols].all():
        masked = cols[~visible[cols]].tolist()
        raise ValueError(
            f"Expected keys to be visible, got {len(masked)} that are masked, such as {masked[0]}. Leave "
            "keys= out to align with all visible keys."
        )
    return rows, cols


def _resolve(index: Any, size: int, name: str) -> Tensor:
    """Return an index of queries or keys as increasing positions."""
    if index is None:
        index = slice(None)
    if not isinstance(index, slice):
        given = index
        try:
            index = torch.as_tensor(index)
        except (TypeError, ValueError, RuntimeError):
            index = torch.zeros(1, 1)
        if index.dim() == 1 and not len(index):
            index = index.long()  # an empty list becomes a tensor of floats
        if index.dim() != 1 or index.dtype.is_floating_point or index.dtype.is_complex:
            hint = f" For one of them, use {name}=[{given}]." if isinstance(given, int) else ""
            raise TypeError(
                f"Expected {name} to be a slice or a list of positions, such as slice(4, None), got "
                f"{kind(given)}.{hint}"
            )
        if index.dtype == torch.bool:
            if len(index) != size:
                raise ValueError(f"Expected {name} to be {size} booleans, got {len(index)}.")
            index = index.nonzero()[:, 0]
        if len(index) and (int(index.min()) < -size or int(index.max()) >= size):
            raise ValueError(f"Expected {name} between 0 and {size - 1}, got {index.tolist()}.")
        index = torch.where(index < 0, index + size, index).long()
        chosen = index
    else:
        try:
            chosen = torch.tensor(range(*index.indices(size)), dtype=torch.int64)
        except (TypeError, ValueError):
            raise TypeError(f"Expected {name} to be a slice of integers, got {index}.") from None
    if not len(chosen):
        raise ValueError(f"Expected at least one of {size} {name} to align, got {index}, which selects none.")
    if len(chosen) > 1 and not bool((chosen.diff() > 0).all()):
        raise ValueError(f"Expected {name} in increasing order, got {index}.")
    return chosen


def _check_seconds(seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, float | int):
        raise TypeError(f"Expected seconds to be the duration of a key, got {seconds!r}.")
    if not (0 < seconds < math.inf):
        raise ValueError(f"Expected seconds to be a positive number, got {seconds!r}.")
    return float(seconds)


def _take(labels: Sequence[str], chosen: Tensor) -> Sequence[str]:
    """Return the labels of some positions, a `TokenizedText` if the labels are one."""
    if not isinstance(labels, TokenizedText):
        return [labels[n] for n in chosen.tolist()]
    special = {*labels.special}
    numbers = chosen.tolist()
    pieces = tuple(labels.pieces[n] for n in numbers)
    return TokenizedText(pieces, tuple(m for m, n in enumerate(numbers) if n in special))


def _visible_keys(amap: AttentionMap) -> Tensor:
    """Return which keys are visible to any query of any head, booleans `[s]`."""
    t, s = amap.shape[2:]
    seen = torch.zeros(s, dtype=torch.bool)
    for start in range(0, t, CHUNK):
        rows = slice(start, min(start + CHUNK, t))
        if scores.is_fully_visible(amap.problem, rows, slice(0, s)):
            return torch.ones(s, dtype=torch.bool)
        visible = scores.visible(amap.problem, rows, slice(0, s))  # [1, h or 1, r, s]
        seen |= visible.flatten(0, -2).any(0).cpu().expand(s)
        if bool(seen.all()):
            break
    return seen


# -- weights, tile by tile -------------------------------------------------------------------------


def _index(positions: Tensor) -> Rows:
    """Return positions as a slice if they are adjacent, which kernels read faster."""
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


def _tiles(amap: AttentionMap, rows: Tensor, cols: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weights of some rows and columns of all heads, `[h, r, c]`, with the part of the rows."""
    step = max(1, TILE // max(1, amap.shape[1] * len(cols)))
    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        yield part, amap[0, :, _index(rows[part]), _index(cols)]


def _mean_tiles(maps: Sequence[AttentionMap], rows: Tensor, cols: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the mean weights of all heads of some maps, `[r, c]`, with the part of the rows."""
    count = sum(amap.shape[1] for amap in maps)
    step = max(1, TILE // max(1, max(amap.shape[1] for amap in maps) * len(cols)))
    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        tiles = (amap[0, :, _index(rows[part]), _index(cols)].sum(0) for amap in maps)
        yield part, sum(tiles).cpu() / count  # type: ignore[union-attr]


@dataclass(frozen=True)
class Settings:
    """How weights become costs."""

    width: int  # of the median filter
    normalize: bool
    dtype: type[np.floating[Any]]

    @classmethod
    def of(cls, median_filter: Any, normalize: Any, dtype: Any) -> Settings:
        """Return the settings, checked."""
        width = whole(median_filter, "median_filter, its width in keys,", least=1)
        if width % 2 == 0:
            raise ValueError(
                f"Expected median_filter, its width in keys, to be odd, got {width}. Use 1 for no filter."
            )
        if not isinstance(normalize, bool):
            raise TypeError(f"Expected normalize to be True or False, got {normalize!r}.")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"Expected dtype to be torch.float32 or torch.float64, got {dtype!r}.")
        return cls(width, normalize, np.float32 if dtype == torch.float32 else np.float64)


class Warp:
    """Dynamic time warping of the heads of some maps: one path of their mean, or one path for each.

    The weights of a head are standardized over the queries, key by key, then filtered along the keys by a
    median, then averaged. A key whose weights are equal for all queries becomes 0, because it says nothing.
    """

    def __init__(
        self, maps: Sequence[AttentionMap], rows: Tensor, cols: Tensor, settings: Settings, pooled: bool
    ) -> None:
        self.maps, self.rows, self.cols, self.settings, self.pooled = maps, rows, cols, settings, pooled
        self.t, self.s = len(rows), len(cols)
        self.n = 1 if pooled else sum(amap.shape[1] for amap in maps)
        self.pad = settings.width // 2
        if self.s <= self.pad:  # too short to be filtered, as in transformers
            self.pad = 0
        # Columns of all blocks are kept, and the cells of one: both are small if there are √s blocks.
        least = max(NARROWEST, self.pad + 1, math.isqrt(self.s))
        self.width = min(self.s, max(least, BLOCK // (self.t * self.n)))
        self._statistics: list[tuple[Tensor, Tensor]] | None = None
        self._kept: dict[tuple[int, int, int], Tensor] = {}
        self._room = KEPT

    def paths(self) -> list[Tensor]:
        """Return the path of each head, or of their mean: numbers of a row and a column, `[n, 2]`."""
        paths = warp(self._costs, (self.n, self.t, self.s), self.width, self.settings.dtype)
        return [torch.from_numpy(path) for path in paths]

    def column_means(self) -> Tensor:
        """Return the mean weight of each key, `[h, s]`, over the queries."""
        return torch.cat([mean for mean, _ in self._standardization()])

    def _standardization(self) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and the standard deviation of each key's weights over the queries, `[h, s]`."""
        if self._statistics is None:
            self._statistics = [self._moments(amap) for amap in self.maps]
        return self._statistics

    def _moments(self, amap: AttentionMap) -> tuple[Tensor, Tensor]:
        first = None
        for _, w in _tiles(amap, self.rows, self.cols):
            if first is None:  # differences from the first row, so that few digits cancel
                first = w[:, :1].double()  # [h, 1, s]
                total = squares = torch.zeros_like(first[:, 0])  # [h, s]
            d = w.double() - first
            total, squares = total + d.sum(1), squares + d.square().sum(1)
        assert first is not None
        mean = total / self.t
        variance = (squares / self.t - mean.square()).clamp(min=0.0)
        mean = mean + first[:, 0]
        std = variance.sqrt()
        # Weights that differ only by rounding say nothing.
        std[std <= 16 * torch.finfo(amap.problem.dtype).eps * mean] = torch.inf
        return mean.to(w.dtype), std.to(w.dtype)

    def _costs(self, start: int, stop: int) -> np.ndarray:
        """Return the costs of a block of keys, `[n, t, stop − start]`: the negative filtered weights."""
        left, right = max(0, start - self.pad), min(self.s, stop + self.pad)
        # The filter reflects the weights at the first and the last key.
        at = torch.arange(start - self.pad, stop + self.pad).abs()
        at = torch.where(at >= self.s, 2 * (self.s - 1) - at, at) - left
        costs = np.empty((self.n, self.t, stop - start))
        heads = [amap.shape[1] for amap in self.maps]
        step = max(1, TILE // (max(heads) * (right - left)))
        for first in range(0, self.t, step):
            part = slice(first, min(first + step, self.t))
            filtered = [
                self._filtered(number, part, slice(left, right), at) for number in range(len(self.maps))
            ]  # each [h, r, c]
            if self.pooled:
                mean = sum(w.sum(0, keepdim=True) for w in filtered) / sum(heads)
                filtered = [mean]  # type: ignore[list-item]
            np.negative(torch.cat(filtered).double().numpy(), out=costs[:, part])
        if not np.isfinite(costs).all():
            raise ValueError(
                "Expected finite weights to align, got NaN: q or k has NaN or infinite numbers, as after an "
                "overflow."
            )
        return costs

    def _filtered(self, number: int, part: slice, keys: slice, at: Tensor) -> Tensor:
        """Return the filtered weights `[h, r, c]` of one map."""
        amap = self.maps[number]
        name = number, part.start, keys.start
        w = self._kept.get(name)
        if w is None:
            w = amap[0, :, _index(self.rows[part]), _index(self.cols[keys])]
            if self._room >= w.numel():
                self._kept[name] = w
                self._room -= w.numel()
        if self.settings.normalize:
            mean, std = (x[:, None, keys] for x in self._standardization()[number])  # [h, 1, c]
            w = (w - mean) / std
        w = w.cpu()
        return median(w[..., at], 2 * self.pad + 1) if self.pad else w
