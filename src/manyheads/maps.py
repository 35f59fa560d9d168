"""`AttentionMap`: every weight of every head, computed when it is read.

It keeps q, k, mask, bias and the log-sum-exp, O(L) memory; a weight is exp(score − lse), and scores come from
`scores.tile`. It is indexed like the matrix `[b, h, t, s]`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads import extras, kernels, scores, statistics
from manyheads.masks import Lengths, Mask, Rule
from manyheads.problem import Problem, Rows
from manyheads.shapes import DTYPES, amount, kind, most_bytes, sizes
from manyheads.statistics import Reduction, TopKeys

if TYPE_CHECKING:
    from manyheads import storage

Tokens = tuple[str, ...] | tuple[tuple[str, ...], ...]

LETTERS = (("batch entry", "b"), ("head", "h"), ("query", "t"), ("key", "s"))


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap:
    """The weights of one attention call, per head and before dropout, without the matrix.

    shape: `(b, h, t, s)`; `amap[b, h, rows, cols]` is that tile, exactly, with ints (also negative),
    slices, index tensors (rows × columns) and an ellipsis; `dense()` is all of it. `lse` is the
    log-sum-exp `[b, h, t]`, natural log, sinks included. Numbers are float32, float64 for float64.

    Statistics cover all heads at once and are streamed: O(L) memory, one pass over the scores each, or
    one for several with `statistics`. None is renormalized: where a sink takes its share, a row's
    weights sum to 1 − `sink_weight()`. A query without visible keys has weights of 0.

    `problem` has q, k and everything else that scores are computed from; `tokens` are labels of the keys, one
    list or one for each batch entry; `provenance` says where the map is from. A map keeps detached tensors;
    reading it raises RuntimeError if q or k was changed in place since. Weights are computed from the
    log-sum-exp as in Dao et al. 2022 (arXiv:2205.14135), which is summed tile by tile as in Milakov &
    Gimelshein 2018 (arXiv:1805.02867).
    """

    problem: Problem
    tokens: Tokens | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    _versions: tuple[int, ...] | None = None
    _lse: Tensor | None = None
    _kept: Mapping[tuple[Any, ...], Any] = field(
        default_factory=dict
    )  # statistics that were computed with the output

    @classmethod
    def of(
        cls,
        problem: Problem,
        lse: Tensor | None = None,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> AttentionMap:
        """Return the map of a problem; without a log-sum-exp `[b, h, t]`, it is computed when needed.

        A given log-sum-exp should be computed by `kernels.reader(problem)`: else rows of huge scores don't
        sum to 1.

        TypeError or ValueError for parts of another kind or shape.
        """
        if not isinstance(problem, Problem):
            raise TypeError(
                f"Expected a Problem for a map, got {kind(problem)}: attention_with_map makes one."
            )
        if not isinstance(provenance or {}, Mapping):
            raise TypeError(f"Expected provenance to be a dict, got {kind(provenance)}.")
        n = problem.shape
        if lse is not None and not isinstance(lse, Tensor):
            raise TypeError(f"Expected lse to be a tensor [b, h, t], got {kind(lse)}.")
        if lse is not None and lse.device != problem.q.device:
            raise ValueError(f"q is on {problem.q.device} and lse is on {lse.device}: move them together.")
        if lse is not None and tuple(lse.shape) != (n.b, n.h, n.t):
            raise ValueError(f"Expected lse to be [b, h, t] = [{n.b}, {n.h}, {n.t}], got {sizes(lse)}.")
        problem = problem.detach().without_values()
        labels = None if tokens is None else labels_of(tokens, n.b, n.s)
        if lse is None and torch.compiler.is_compiling():  # what a graph gives is complete
            lse = kernels.statistics(problem).lse
        lse = None if lse is None else lse.detach().to(problem.dtype)
        return cls(problem, labels, dict(provenance or {}), _versions(problem), lse)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, `[b, h, t]`, natural log, the sink included."""
        if self._lse is None:
            self._fresh()
            object.__setattr__(self, "_lse", kernels.statistics(self.problem).lse)
        assert self._lse is not None
        return self._lse

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(b, h, t, s)`."""
        n = self.problem.shape
        return n.b, n.h, n.t, n.s

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of its heads in the model: 0 to h − 1, unless some were selected."""
        return tuple(self.provenance.get("heads", range(self.shape[1])))

    @property
    def knows_lse(self) -> bool:
        """True if the log-sum-exp is known; computing it takes a pass over the keys."""
        return self._lse is not None

    @property
    def nbytes(self) -> int:
        """The bytes of the map: q, k, mask, bias, and the log-sum-exp once it is known."""
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all its tensors: q `[b, h, t, d]`, k `[b, g, s, d]`, lse `[b, h, t]` if known."""
        kept = [x for kept in self._kept.values() for x in ([kept] if isinstance(kept, Tensor) else kept)]
        return [*_read(self.problem), *([self.lse] if self.knows_lse else []), *kept]

    # -- related maps ------------------------------------------------------------------------------

    def under(self, mask: Mask | None) -> AttentionMap:
        """Return the map of the same q and k under another mask (None: no mask): a counterfactual.

        TypeError for what isn't a mask, ValueError for one of another shape.
        """
        self._fresh()
        return self.again(self.problem.under(mask))

    def only(
        self, batch: int | Sequence[int] | None = None, heads: int | Sequence[int] | None = None
    ) -> AttentionMap:
        """Return the map of some batch entries and heads (None: all), renumbered from 0.

        IndexError for those that don't exist.
        """
        self._fresh()
        b = _chosen(batch, self.shape[0], LETTERS[0])
        h = _chosen(heads, self.shape[1], LETTERS[1])
        tokens = self.tokens
        if tokens and not isinstance(tokens[0], str):
            tokens = tuple(tokens[n] for n in b)
        problem = self.problem.only(b, h)
        lse = self.lse[b][:, h] if self._keeps_lse(problem) else None
        where = {**self.provenance, "heads": [self.heads[n] for n in h]}
        return AttentionMap.of(problem, lse, tokens, where)

    def compact(self, always: bool = False) -> AttentionMap:
        """Return the map with q and k in their own memory, always or if they are views of larger tensors."""
        p = self.problem
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (p.q, p.k)}
        if not always and sum(storages.values()) <= p.q.nbytes + p.k.nbytes:
            return self
        return self.again(replace(p, q=p.q.clone(), k=p.k.clone()), self.lse if self.knows_lse else None)

    def to(self, place: torch.device | str | torch.dtype) -> AttentionMap:
        """Return the map with q and k on another device, or stored in another floating-point dtype.

        In another dtype the log-sum-exp is computed from the stored numbers when needed, so that rows still
        sum to one. ValueError for another place, or numbers that are too large for the
        dtype; TypeError for a dtype that isn't of floating point.
        """
        self._fresh()
        if isinstance(place, torch.dtype):
            return self if place == self.problem.q.dtype else self.again(_cast(self.problem, place))
        try:
            device = torch.device(place)
            problem = self.problem.to(device)
        except (RuntimeError, TypeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"Expected a device or a floating-point dtype, got {place!r}: {reason}."
            ) from None
        if device.type == "meta":
            raise ValueError("Expected a device with memory, got meta.")
        return self.again(problem, self.lse.to(device) if self._keeps_lse(problem) else None)

    def labelled(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> AttentionMap:
        """Return the map with labels of its keys: s strings, or b lists of them.

        ValueError for another number of them, TypeError for what aren't strings.
        """
        self._fresh()
        lse = self.lse if self.knows_lse else None
        return replace(AttentionMap.of(self.problem, lse, tokens, self.provenance), _kept=self._kept)

    def again(self, problem: Problem, lse: Tensor | None = None) -> AttentionMap:
        """Return the map of another problem, with this one's tokens (if they are as many) and provenance.

        TypeError or ValueError unless lse is `[b, h, t]`.
        """
        tokens = self.tokens if problem.shape.s == self.shape[3] else None
        return AttentionMap.of(problem, lse, tokens, self.provenance)

    def __reduce__(self) -> tuple[Any, ...]:
        self._fresh()
        lse = self.lse if self.knows_lse else None
        return AttentionMap.of, (self.problem, lse, self.tokens, dict(self.provenance))

    # -- the matrix --------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weights of a tile, `[b, h, rows, cols]`, by an index of up to four parts or an ellipsis.

        A part is an int, which drops its dimension, a slice, or a list or tensor of integers or booleans; a
        missing part selects all. Raises IndexError for other parts and indices out of range.
        """
        self._fresh()
        expanded = _expand(index if isinstance(index, tuple) else (index,))
        chosen = [
            _pick(part, size, what) for part, size, what in zip(expanded, self.shape, LETTERS, strict=True)
        ]
        b, h, rows, cols = (slice(c, c + 1) if isinstance(c, int) else c for c in chosen)
        lse = self.lse[:, :, rows][b][:, h]  # [b, h, r]
        score = kernels.tile(self.problem, rows, cols, b, h)
        tile = scores.weights(score, lse)  # [b, h, r, c]
        return tile[tuple(0 if isinstance(c, int) else slice(None) for c in chosen)]

    def dense(self, max_bytes: float = 2**31) -> Tensor:
        """All weights, `[b, h, t, s]`.

        Raises ValueError if they would take more than max_bytes, TypeError if that isn't a number of bytes.
        """
        size = math.prod(self.shape) * self.problem.dtype.itemsize
        if size > most_bytes(max_bytes):
            raise ValueError(
                f"the weights {list(self.shape)} would take {size / 1e9:.3g} GB, and max_bytes is "
                f"{max_bytes / 1e9:.3g} GB. Read a tile, amap[b, h, rows, cols], or raise max_bytes."
            )
        return self[...]

    # -- statistics --------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """Return how spread each query's weights are: −Σ w·ln w over the keys, in nats, `[b, h, t]`.

        Shannon 1948; 0 is one key, ln n is n keys alike. Not renormalised under a sink.
        """
        return self._reduce(statistics.Entropy())

    def distance(self) -> Tensor:
        """Return how far each query attends: Σ w·|i − j|, in positions, `[b, h, t]`.

        The mean attention distance of Dosovitskiy et al. 2021 (arXiv:2010.11929), over positions of
        a sequence. Under a sink, which has no position, divide by 1 − `sink_weight()` for a mean.
        """
        return self._reduce(statistics.Distance())

    def row_max(self) -> Tensor:
        """Return the largest weight of each query, between 0 and 1: `[b, h, t]`.

        A head's confidence (Voita et al. 2019, arXiv:1905.09418) is its mean.
        """
        return self._reduce(statistics.RowMax())

    def received(self, last: int | None = None, normalize: str | None = None) -> Tensor:
        """Return what each key gets: the column sums of the weights, between 0 and t, `[b, h, s]`.

        last: of so many last queries only, as cache eviction votes (Li et al. 2024, arXiv:2404.14469;
        all queries: Zhang et al. 2023, arXiv:2306.14048). normalize="age": divided by how many of
        these queries may see the key, as early keys are seen by more; 0 where none may. TypeError or
        ValueError for another argument.
        """
        return self._reduce(statistics.Received(last, normalize))

    def top(self, k: int) -> TopKeys:
        """Return the k largest weights of each query and their keys, `(weights, keys)`, both `[b, h, t, k]`.

        Weights between 0 and 1, in falling order, among equals the first keys: equal as they were computed,
        as the scores of two keys that are alike may differ in the last bit. Where a query sees fewer than k
        keys, the weight is 0 and the key −1. TypeError or ValueError for another k.
        """
        return self._reduce(statistics.Top(k))

    def mass(self, mask: Mask, mean: bool = False) -> Tensor:
        """Return the weight that each query puts inside a mask: `[b, h, t]`, between 0 and 1.

        With `mean=True`, `[b, h]`: its average over those queries that share at least one visible
        key with the mask; where there is none, 0. Clark et al. 2019 (arXiv:1906.04341) tell heads apart by
        such means. TypeError for what isn't a mask, ValueError for one of another shape.
        """
        self._fresh()
        return statistics.mass(self.problem, self.lse, mask, mean)

    def masses(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return `mass` of each query, between 0 and 1, and whether it shares a visible key with the mask.

        Both are `[b, h, t]`. TypeError or ValueError, as `mass`.
        """
        self._fresh()
        return statistics.masses(self.problem, self.lse, mask)

    def pooled(self, rows: int, cols: int, reduce: str = "mean") -> Tensor:
        """Return a picture of every head, `[b, h, rows, cols]`: the "mean" or the "max" weight of each cell.

        rows and cols are numbers of cells, at most t and s. Cell r covers the queries from ⌊r·t/rows⌋
        to ⌊(r + 1)·t/rows⌋, and likewise for keys; a masked weight counts as 0. The way to reduce a
        cell matters: a mean fades what is one key wide, such as a diagonal; a maximum doesn't. Both lie
        between 0 and 1. TypeError or ValueError for other numbers of cells or another way.
        """
        return self._reduce(statistics.Pooled(rows, cols, reduce))

    def value_norms(self, v: Tensor, w_o: Tensor) -> Tensor:
        """Return what each key really gives: the column sums of w·‖v W_o‖ (Euclidean), `[b, h, s]`.

        ‖w·f(x)‖ is the norm-based weight of Kobayashi et al. 2020 (arXiv:2004.10102), f(x) being the
        value after the head's share of the output projection: a key may receive much attention and
        carry nothing. A tile of that matrix is `amap[b, h, rows, cols]` times the norms.

        v: the values `[b, g, s, w]`; w_o: the output projection's weight `[e, h·w]`, as of `nn.Linear`.
        The sums are in the unit of v W_o. TypeError or ValueError for other tensors.
        """
        return self._reduce(statistics.ValueNorms(v, w_o))

    def logits_max(self) -> Tensor:
        """Return the largest score that enters a head's softmax, `[b, h]`; −inf where nothing is visible.

        What grows before training diverges (Dehghani et al. 2023, arXiv:2302.05442). Scaled, softcapped
        and biased, over visible pairs; the sink isn't counted. A score is the natural log of a weight, but
        for a constant of its row.
        """
        return self._reduce(statistics.LogitsMax())

    def sink_weight(self) -> Tensor:
        """Return what the sink takes of each query: 1 − Σ w, between 0 and 1, `[b, h, t]`; 0 without a sink.

        1 where a query may see nothing but the sink (Xiao et al. 2024, arXiv:2309.17453).
        """
        return self._reduce(statistics.SinkWeight())

    def divergence(self, other: AttentionMap | None = None) -> Tensor:
        """Return the Jensen–Shannon divergence (Lin 1991) of rows of weights, in nats, averaged over queries.

        Without `other` between this map's heads, `[b, h, h]`; else head by head between two maps of one
        shape, `[b, h]`: 0 is the same, ln 2 nothing in common. It is taken over keys: of two rows of
        which sinks take their share, at most ln 2 times what is left. TypeError or ValueError for what is
        no map of this shape.
        """
        if other is None:
            return self._reduce(statistics.Divergence())
        if not isinstance(other, AttentionMap):
            raise TypeError(f"Expected another AttentionMap for divergence, got {kind(other)}.")
        self._fresh()
        other._fresh()
        if self.shape != other.shape:
            raise ValueError(
                f"Expected maps of one shape for divergence, got {list(self.shape)} and {list(other.shape)}."
            )
        return statistics.between((self.problem, self.lse), (other.problem, other.lse))

    def statistics(self, *names: str, **arguments: Any) -> dict[str, Any]:
        """Return several statistics by name, computed in one pass over the scores.

            amap.statistics("entropy", "received", top=8, pooled=(512, 512))

        A name alone takes no arguments; `name=` takes one argument, a tuple or a dict of them, or a
        list of these for a list of results: `pooled=[(64, 64), (64, 64, "max")]`. `mass` reads only what
        its mask keeps, in a pass of its own.

        Raises ValueError for a name that isn't a statistic, TypeError for arguments that it doesn't take,
        and what the statistics raise.
        """
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"Expected names of statistics, got {kind(name)}.")
        requested: dict[str, Any] = dict.fromkeys(names, ()) | arguments
        made = statistics.named(requested)
        results = iter(self._reduce(*chain.from_iterable(made.values()), each=True))
        return {
            name: [next(results) for _ in several] if isinstance(requested[name], list) else next(results)
            for name, several in made.items()
        }

    def _reduce(self, *reductions: Reduction, each: bool = False) -> Any:
        self._fresh()
        keys = [reduction.key() for reduction in reductions]
        new = {
            key: reduction for key, reduction in zip(keys, reductions, strict=True) if key not in self._kept
        }
        found = dict(zip(new, self.reduce(list(new.values())), strict=True)) if new else {}
        results = [_copy(self._kept[key]) if key in self._kept else found[key] for key in keys]
        return results if each else results[0]

    def reduce(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Return the results of reductions, computed in one pass over the scores."""
        self._fresh()
        together = statistics.Pass(self.problem, reductions)
        if self.knows_lse:
            return together.results(self.lse, {})
        lse, found = kernels.statistics(self.problem, together.spec)
        object.__setattr__(self, "_lse", lse)
        return together.results(lse, found)

    def first_key(self) -> Mask:
        """Return a mask of the first key that each query may see: column 0 unless padded or packed."""
        self._fresh()
        first, s = statistics.first_keys(self.problem), self.shape[3]  # [b, h, t]
        least = first.amin((1, 2), keepdim=True) if first.numel() else first  # [b, 1, 1]
        if first.numel() and bool((first == least).all()):
            one = least.flatten()
            return Lengths(s - one, left=True) & Lengths((one + 1).clamp(max=s))
        offset = self.problem.offset

        def is_first(b: Any, h: Any, i: Any, j: Any) -> Any:
            row = i - (offset if isinstance(offset, int) else offset[b])
            return first[b, h, row] == j

        return Rule(is_first)

    # -- files and pages ---------------------------------------------------------------------------

    def view(self, *others: Any, port: int = 0, browser: bool = True) -> Any:
        """Show the map in a browser, or in this notebook: from the whole of a head to single weights.

        others: more maps, runs or files, to see side by side; port: of this machine, 0 being any free one.
        A script that would end goes on with `view().wait()`. TypeError or ValueError for what can't be shown,
        OSError for a port that is taken.
        """
        self._fresh()
        return extras.view(self, *others, port=port, browser=browser)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map, its tokens and provenance into a safetensors file at path: see docs/format.md.

        Raises ValueError for a mask with a `Rule`, whose function can't be saved; OSError from the disk.
        """
        from manyheads import storage

        storage.write(path, [storage.Entry("", 0, self.stored())])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> AttentionMap:
        """Return the map that `save` wrote to path, memory-mapped: nothing is read before it is needed.

        Raises ValueError for another kind of file, a broken one, or one of several maps
        (`manyheads.open_run` opens that); OSError where it can't be read.
        """
        from manyheads import storage

        run = storage.read(path)
        maps = [entry.content for entry in run.entries]
        if len(maps) != 1 or not isinstance(maps[0], storage.Stored):
            raise ValueError(
                f"Expected a file of one map, got {len(maps)} maps or statistics in {path}. "
                "Open it with manyheads.open_run."
            )
        return cls.of(*maps[0])

    def stored(self) -> storage.Stored:
        """Return what `save` writes of the map."""
        from manyheads import storage

        self._fresh()
        return storage.Stored(self.problem, self.lse, self.tokens, self.provenance)

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        whole_matrix = math.prod(self.shape) * self.problem.dtype.itemsize
        named = "" if self.tokens is None else ", with tokens"
        return (
            f"AttentionMap([b={b}, h={h}, t={t}, s={s}], mask={self.problem.mask!s}, "
            f"{str(self.problem.q.dtype).removeprefix('torch.')} on {self.problem.q.device}{named}, "
            f"{amount(self.nbytes)} for weights of {amount(whole_matrix)})"
        )

    def _keeps_lse(self, problem: Problem) -> bool:
        """Return True if the log-sum-exp is known and belongs to the kernel that reads another problem."""
        return self.knows_lse and kernels.reader(problem) is kernels.reader(self.problem)

    def _fresh(self) -> None:
        now = _versions(self.problem)  # None while compiling: versions aren't counted there
        if self._versions is not None and now is not None and self._versions != now:
            raise RuntimeError(
                "q, k, mask or bias was changed in place since this map was made, so its weights are lost. "
                "Read the map before, or pass a copy to attention (q.clone())."
            )


def _copy(statistic: Any) -> Any:
    """Return a copy of a statistic, which the caller may change."""
    return statistic.clone() if isinstance(statistic, Tensor) else type(statistic)(*map(_copy, statistic))


def labels_of(tokens: Any, b: int, s: int) -> Tokens:
    """Return labels of the keys, s strings or b lists of them, checked."""
    takes = f"Expected tokens to be a list of s = {s} strings, or b = {b} such lists"
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise TypeError(f"{takes}, got {kind(tokens)}.")
    several = bool(tokens) and isinstance(tokens[0], Sequence) and not isinstance(tokens[0], str | bytes)
    if several and len(tokens) != b:
        raise ValueError(f"{takes}, got {len(tokens)} lists.")
    for labels in tokens if several else [tokens]:
        if isinstance(labels, str | bytes):
            raise TypeError(f"{takes}, got {labels!r} among the lists.")
        for label in labels:
            if not isinstance(label, str):
                raise TypeError(f"{takes}, got {label!r} among them.")
        if len(labels) != s:
            raise ValueError(f"{takes}, one for each key, got {len(labels)}.")
    return tuple(tuple(labels) for labels in tokens) if several else tuple(tokens)


def sequence_labels(tokens: Tokens | None, batch: int = 0) -> list[str] | None:
    """Return the labels of the keys of one sequence; None without labels."""
    if not tokens or isinstance(tokens[0], str):
        return None if tokens is None else [str(label) for label in tokens]
    return list(tokens[batch])


def _cast(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem in another dtype; ValueError if a number would overflow in it."""
    if dtype not in DTYPES:
        raise TypeError(f"Expected one of {', '.join(map(str, DTYPES))} to store a map in, got {dtype}.")
    cast = problem.cast(dtype)
    for name, before, after in (("q", problem.q, cast.q), ("k", problem.k, cast.k)):
        if scores.finite(before) and not scores.finite(after):
            most = float(before.abs().max())
            raise ValueError(
                f"Expected numbers up to {torch.finfo(dtype).max:.3g} in {name} for {dtype}, got {most:.3g}. "
                "Store the map in bfloat16 or float32."
            )
    return cast


def picked_rows(rows: int | Sequence[int] | slice | Tensor, t: int) -> list[int]:
    """Return an index of rows as a list, with negative ones resolved."""
    return _chosen(rows, t, LETTERS[2])


def _chosen(
    index: int | Sequence[int] | slice | Tensor | None, size: int, what: tuple[str, str]
) -> list[int]:
    """Return some of a dimension's entries as a list, with negative ones resolved; None is all."""
    if index is None:
        return list(range(size))
    if isinstance(index, Sequence) and any(isinstance(n, bool) for n in index):
        raise IndexError(f"Expected an index for {what[1]} to be integers, got {index!r}.")
    picked = _pick([index] if isinstance(index, int) else index, size, what)
    return torch.arange(size)[picked].flatten().tolist()


def _versions(problem: Problem) -> tuple[int, ...] | None:
    """Return how often each tensor was changed in place; 0 in inference mode, None while compiling."""
    if torch.compiler.is_compiling():
        return None
    return tuple(0 if x.is_inference() else x._version for x in _read(problem))


def _read(problem: Problem) -> list[Tensor]:
    """Return the tensors that weights are computed from."""
    parts = [part for part in (problem.mask, problem.bias) if part is not None]
    more = [x for x in (problem.sink, problem.offset) if isinstance(x, Tensor)]
    return [problem.q, problem.k, *more, *(x for part in parts for x in part.tensors())]


def _expand(index: tuple[Any, ...]) -> list[Any]:
    """Return an index of four parts, one per dimension, from one with an ellipsis or fewer parts."""
    dots = [n for n, part in enumerate(index) if part is Ellipsis]
    if len(dots) > 1 or len(index) - len(dots) > 4:
        raise IndexError(f"Expected at most four indices [b, h, t, s], got {len(index)} indices.")
    at = dots[0] if dots else len(index)
    before, after = list(index[:at]), list(index[at + 1 :])
    return before + [slice(None)] * (4 - len(before) - len(after)) + after


def _pick(part: Any, size: int, what: tuple[str, str]) -> int | Rows:
    """Return one dimension's index without negative numbers: an int, a slice, or an index tensor."""
    name, letter = what
    if isinstance(part, slice):
        if part.step == 0:
            raise IndexError(f"Expected a slice of {letter} with a step other than 0, got {part}.")
        if part.step is not None and part.step < 0:  # which tensors don't slice by
            return torch.tensor(range(*part.indices(size)), dtype=torch.int64)
        return part
    if isinstance(part, Tensor) and part.dtype == torch.bool:
        if tuple(part.shape) != (size,):
            raise IndexError(f"Expected a boolean index for {letter} to be [{size}], got {list(part.shape)}.")
        part = part.nonzero().flatten()
    single = isinstance(part, int) and not isinstance(part, bool)
    try:
        chosen = torch.as_tensor(part, dtype=torch.int64 if isinstance(part, list) and not part else None)
    except (TypeError, ValueError, RuntimeError):
        chosen = torch.empty(0, 0)
    if isinstance(part, bool) or chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.dim() > 1:
        raise IndexError(
            f"Expected an int, a slice, or integers of one dimension as an index for {letter}, got "
            f"{f'{kind(part)} {sizes(part)}' if isinstance(part, Tensor) else repr(part)}."
        )
    if chosen.numel() and (int(chosen.min()) < -size or int(chosen.max()) >= size):
        raise IndexError(
            f"{name} {part} doesn't exist: {letter} = {size}, so 0 to {size - 1} or -{size} to -1."
        )
    chosen = torch.where(chosen < 0, chosen + size, chosen)
    return int(chosen) if single or chosen.dim() == 0 else chosen.to(torch.int64)
