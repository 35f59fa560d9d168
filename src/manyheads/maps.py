"""`AttentionMap`: every weight of every head, computed when it is read.

A map keeps q, k, mask, bias and the log-sum-exp, which takes O(L) memory. A weight is exp(score − lse), and
scores come from `scores.tile`. A map is indexed like the matrix `[b, h, t, s]`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from manyheads import extras, kernels, patches, scores, statistics, storage
from manyheads.masks import AtPositions, Lengths, Mask, Rule, look_up_positions
from manyheads.patches import Patches
from manyheads.problem import Problem, Rows
from manyheads.shapes import DTYPES, amount, kind, most_bytes, sizes
from manyheads.statistics import Reduction, TopKeys
from manyheads.storage import Labels, Tokens, labels_of

if TYPE_CHECKING:
    import xarray

AXES = (("batch entry", "b"), ("head", "h"), ("query", "t"), ("key", "s"))
STEP = 1 << 24  # the most weights that `image` computes at a time
T = TypeVar("T")


class BaseMap:
    """The methods that maps of one process (`AttentionMap`) and of several (`ShardedMap`) share.

    They read weights by `amap[b, h, rows, cols]`, and check their arguments inside `_agree`.
    """

    problem: Problem
    tokens: Tokens | None
    provenance: Mapping[str, Any]

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of rows, natural log, the sink included."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(b, h, t, s)`."""
        shape = self.problem.shape
        return shape.b, shape.h, shape.t, shape.s

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of the heads in the model: 0 to h − 1, unless some were selected."""
        return tuple(self.provenance.get("heads", range(self.shape[1])))

    def only(
        self, batch: int | Sequence[int] | None = None, heads: int | Sequence[int] | None = None
    ) -> BaseMap:
        """Return the map of some batch entries and heads."""
        raise NotImplementedError

    def mass(self, mask: Mask, mean: bool = False) -> Tensor:
        """Return the sum of each query's weights inside a mask, or the mean of these sums."""
        raise NotImplementedError

    def first_key(self) -> Mask:
        """Return a mask of the first visible key of each query."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Tensor:
        raise NotImplementedError

    def _check_unchanged(self) -> None:
        raise NotImplementedError

    def _agree(self, compute: Callable[[], T]) -> T:
        """Return what a function of checks returns; on several processes, an error is raised on all."""
        raise NotImplementedError

    def _mix_heads(self, share: Tensor) -> Tensor:
        """Return the product `[b, r, s]` of shares `[b, r, t]` and the mean of the heads' weights."""
        raise NotImplementedError

    def to_xarray(self, *index: Any, max_bytes: float = 2**31) -> xarray.DataArray:
        """Return a tile of weights as an xarray, with named dimensions.

        The dimensions are batch, head, query and key, without those that are indexed by an int. Their
        coordinates are the numbers of the batch entry, the head in the model, the row and the column. If the
        map has tokens, `key_token` are the tokens of the keys, and in self-attention `query_token` those of
        the queries; in a batch of several texts these have the dimension batch too.

            amap.to_xarray(0, 3).sel(key=5)
            amap.to_xarray(0).mean("head").plot()

        Args:
            *index: Up to four indices for b, h, t and s, as of the map itself.
            max_bytes: The largest allowed size.

        Returns:
            The weights, an `xarray.DataArray`.

        Raises:
            ImportError: If xarray isn't installed.
            IndexError: If an index is out of range or has the wrong type.
            TypeError: If max_bytes isn't a number of bytes.
            ValueError: If the tile would take more bytes.
        """
        indices, numbers = self._agree(lambda: self._check_xarray(index, max_bytes))
        import xarray

        batch, heads, rows, cols = (each.numpy() for each in numbers)
        names = ("batch", "head", "query", "key")
        coords: dict[str, Any] = {
            "batch": batch,
            "head": np.array(self.heads)[heads],
            "query": rows,
            "key": cols,
        }
        coords = {name: (name, x) if x.ndim else x for name, x in coords.items()}
        for name, positions in (("key", cols), ("query", self._positions_of_queries(rows))):
            if not self.tokens or positions is None:
                continue
            by_text = not isinstance(self.tokens[0], str)
            texts = [sequence_labels(self.tokens, int(n)) for n in (np.atleast_1d(batch) if by_text else [0])]
            labels = np.array(
                [np.array([*(text or ())], dtype=object)[positions] for text in texts], dtype=str
            )
            dims = [*(["batch"] if by_text and batch.ndim else []), *([name] if positions.ndim else [])]
            coords[f"{name}_token"] = (dims, labels if by_text and batch.ndim else labels[0])
        dims = [name for name, each in zip(names, numbers, strict=True) if each.dim()]
        tile = self[tuple(indices)].detach().cpu().numpy()
        return xarray.DataArray(tile, coords, dims, name="weight", attrs={"mask": str(self.problem.mask)})

    def _check_xarray(self, index: Any, max_bytes: float) -> tuple[list[Any], list[Tensor]]:
        """Return the resolved indices of `to_xarray` and the numbers that they select of each axis."""
        try:
            import xarray  # noqa: F401
        except ImportError:
            raise extras.missing("to_xarray", "xarray", "xarray") from None
        self._check_unchanged()
        indices = [
            resolve_index(part, size, axis)
            for part, size, axis in zip(expand_index(index), self.shape, AXES, strict=True)
        ]
        numbers = [torch.arange(n)[i] for n, i in zip(self.shape, indices, strict=True)]
        size = math.prod(each.numel() for each in numbers) * self.problem.dtype.itemsize
        if size > most_bytes(max_bytes):
            raise ValueError(
                f"The tile {[each.numel() for each in numbers]} would take {amount(size)}, and max_bytes is "
                f"{amount(max_bytes)}. Read fewer heads, queries or keys, or raise max_bytes."
            )
        return indices, numbers

    def _positions_of_queries(self, rows: Any) -> Any:
        """Return the keys at the positions of these rows in self-attention; None in cross-attention."""
        problem, (*_, t, s) = self.problem, self.shape
        offset = problem.offset
        is_causal = problem.mask is not None and problem.mask.normal().band[1] == 0
        if not isinstance(offset, int) or not (is_causal or t == s) or problem.positions is not None:
            return None
        return rows + offset if 0 <= offset <= s - t else None

    def to_circuitsvis(self, batch: int = 0, max_bytes: float = 2**29) -> dict[str, Any]:
        """Return the weights of a short text as keyword arguments of CircuitsVis's `attention_heads`.

        Args:
            batch: The batch entry.
            max_bytes: The largest allowed size of the page, in which a weight takes about 20 bytes of text.

        Returns:
            A dict of `attention`, a tensor `[h, t, t]`, and `tokens`, a list of t strings.

        Raises:
            IndexError: If there is no such batch entry.
            TypeError: If max_bytes isn't a number of bytes.
            ValueError: If it isn't self-attention over one text, or the page would take more bytes.
        """

        def select() -> BaseMap:
            amap = self.only(batch)
            _, h, t, s = amap.shape
            if t != s:
                raise ValueError(
                    "Expected self-attention, as many queries as keys, for CircuitsVis, got "
                    f"t = {t} and s = {s}."
                )
            check_page("CircuitsVis", h * t * s, max_bytes)
            return amap

        amap = self._agree(select)
        return {"attention": amap[0].cpu(), "tokens": text_labels(amap.tokens, amap.shape[2])}

    def image(
        self,
        queries: int | Sequence[int] | slice | Tensor,
        keys: Sequence[int] | slice | Tensor | Patches = slice(None),
        grid: tuple[int, int] | None = None,
        *,
        max_bytes: float = 2**31,
    ) -> Tensor:
        """Return what queries attend to in a picture: their weights on its patches, in rows and columns.

            amap.image(0, keys=slice(1, None), grid=(14, 14))  # the class token of a ViT-B/16
            amap.image(0)  # the same, of a recorded model whose patches are known

        Only these weights are computed, so a query takes O(L) memory. They are as in `amap[...]`: those on
        patches sum to less than 1 if the query attends to other tokens too.

        Args:
            queries: A query as an int; several as a list, a slice or a tensor of integers.
            keys: The keys of the patches, row by row; or `Patches`, which have the grid too. Default: the
                patches that `observe` found (see `patches`) if grid is None, else all keys.
            grid: The numbers of rows and columns of patches, None if keys are `Patches`.
            max_bytes: The largest allowed size of the result.

        Returns:
            The weights `[b, h, rows, cols]`, or `[b, h, n, rows, cols]` for several queries.

        Raises:
            IndexError: If a query or key doesn't exist, or isn't a number.
            TypeError: If another argument has the wrong type.
            ValueError: If the keys aren't rows × cols, the patches aren't known, or the result would take
                more than max_bytes.
        """
        chosen, index, (rows, cols) = self._agree(lambda: self._check_image(queries, keys, grid, max_bytes))
        b, h, t, _ = self.shape
        if isinstance(chosen, int):
            return self[:, :, chosen, index].unflatten(-1, (rows, cols))  # [b, h, rows, cols]
        numbers = torch.arange(t)[chosen]  # [n]
        images = self.problem.q.new_empty(b, h, len(numbers), rows * cols, dtype=self.problem.dtype)
        step = max(1, STEP // max(1, b * h * rows * cols))
        for start in range(0, len(numbers), step):
            images[:, :, start : start + step] = self[:, :, numbers[start : start + step], index]
        return images.unflatten(-1, (rows, cols))  # [b, h, n, rows, cols]

    def _check_image(
        self, queries: Any, keys: Any, grid: Any, max_bytes: float
    ) -> tuple[int | Rows, Rows, tuple[int, int]]:
        """Return the resolved queries, the resolved keys and the grid of the arguments of `image`."""
        self._check_unchanged()
        b, h, t, s = self.shape
        selected, (rows, cols) = self._picture_keys(keys, grid)
        index = resolve_index(selected, s, AXES[3])
        if isinstance(index, int):
            raise TypeError(
                f"Expected keys to be those of {rows} × {cols} patches, got the key {selected!r}."
            )
        count = index_length(index, s)
        if count != rows * cols:
            surplus = count - rows * cols
            hint = (
                f" If the patches are the last keys, use keys=slice({surplus}, None)." if surplus > 0 else ""
            )
            raise ValueError(
                f"Expected {rows * cols} keys for grid=({rows}, {cols}), got {count} of s = {s} keys.{hint}"
            )
        chosen = resolve_index(queries, t, AXES[2])
        length = index_length(chosen, t)
        size = b * h * length * count * self.problem.dtype.itemsize
        if size > most_bytes(max_bytes):
            what = "image of a query" if length == 1 else f"images of {length} queries"
            raise ValueError(
                f"The {what} would take {amount(size)}, and max_bytes is {amount(max_bytes)}. Select fewer "
                "queries or heads (amap.only), or raise max_bytes."
            )
        return chosen, index, (rows, cols)

    def _picture_keys(self, keys: Any, grid: Any) -> tuple[Any, tuple[int, int]]:
        """Return the keys and the grid of the arguments of `image`."""
        if isinstance(keys, Patches):
            if grid is not None:
                raise ValueError(
                    f"Expected either grid or Patches, which have one, got grid={grid!r} and {keys}."
                )
            if keys.stop > self.shape[3]:
                raise ValueError(f"Expected {keys} to be among the keys, got s = {self.shape[3]} keys.")
            return keys.keys, keys.grid
        if grid is not None:
            return keys, patches.check_grid(grid)
        if not isinstance(keys, slice) or keys != slice(None):
            given = repr(keys) if isinstance(keys, slice) else kind(keys)
            raise ValueError(
                f"Expected grid=(rows, cols), the numbers of patches, beside keys, got {given} only."
            )
        return self._picture_keys(patches.common(patches.unpack(self.provenance.get("patches"))), None)

    def patches(self, batch: int = 0, picture: int = 0) -> Patches:
        """Return where the patches of a picture are among the keys, as `observe` found them.

        Args:
            batch: The batch entry.
            picture: The number of the picture in the sequence.

        Returns:
            The patches.

        Raises:
            ValueError: If they aren't known; the message says why, and what to give to `image` instead.
            IndexError: If there is no such batch entry or picture.
        """
        resolve_index(batch, self.shape[0], AXES[0])  # raises IndexError
        return patches.select(patches.unpack(self.provenance.get("patches")), batch, picture)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap(BaseMap):
    """The weights of one attention call, per head and before dropout, without the matrix.

    `amap[b, h, rows, cols]` computes a tile of the exact weights: indices are ints (also negative), slices,
    index tensors (rows × columns) and an ellipsis. `dense()` returns the whole matrix. Weights are float32,
    or float64 if q is.

    Statistics cover all heads. Each takes O(L) memory and one pass over the scores; `statistics` computes
    several in one pass. Nothing is renormalized: with a sink, the weights of a row sum to
    1 − `sink_weight()`. A query without visible keys has weights of 0.

    A map keeps detached tensors. If q or k is changed in place, reading the map raises RuntimeError. Weights
    are computed from the log-sum-exp as in Dao et al. 2022 (arXiv:2205.14135), and the log-sum-exp is
    computed tile by tile as in Milakov & Gimelshein 2018 (arXiv:1805.02867).

    Attributes:
        problem: q, k and everything else that scores are computed from.
        tokens: The labels of the keys: one list, or one for each batch entry.
        provenance: JSON data about the origin of the map, such as the name of the model.
        value_norm: The Euclidean norms ‖v‖ of the values, `[b, g, s]` float32. `observe` records them; maps
            of `attention_with_map` have None.
        shape: `(b, h, t, s)`.
        lse: The log-sum-exp `[b, h, t]`, natural log, sinks included.
    """

    problem: Problem
    tokens: Tokens | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    value_norm: Tensor | None = None
    _versions: tuple[int, ...] | None = None  # versions of the tensors when the map was made
    _lse: Tensor | None = None
    _kept: Mapping[tuple[Any, ...], Any] = field(default_factory=dict)  # statistics computed with the output

    @classmethod
    def of(
        cls,
        problem: Problem,
        lse: Tensor | None = None,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        provenance: Mapping[str, Any] | None = None,
        value_norm: Tensor | None = None,
    ) -> AttentionMap:
        """Return the map of a problem.

        Args:
            problem: The problem. Its values aren't used.
            lse: The log-sum-exp `[b, h, t]`, computed when needed if None. Take it from `kernels.statistics`
                or `Result.lse_of_map`. With a log-sum-exp that was rounded differently, the weights of a row
                with huge scores don't sum to 1.
            tokens: The labels of the keys: s strings or a `TokenizedText`, or b of them.
            provenance: JSON data about the origin of the map.
            value_norm: The Euclidean norms of the values, floats `[b, g, s]`, None if unknown.

        Returns:
            The map, with detached tensors.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the device or shape of lse or value_norm, or the number of labels, is wrong.
        """
        if not isinstance(problem, Problem):
            raise TypeError(f"Expected a Problem for a map, got {kind(problem)}. Use attention_with_map.")
        if not isinstance(provenance or {}, Mapping):
            raise TypeError(f"Expected provenance to be a dict, got {kind(provenance)}.")
        b, h, _, t, s, _, _ = problem.shape
        if lse is not None and not isinstance(lse, Tensor):
            raise TypeError(f"Expected lse to be a tensor [b, h, t], got {kind(lse)}.")
        if lse is not None and lse.device != problem.q.device:
            raise ValueError(f"q is on {problem.q.device} and lse is on {lse.device}: move them together.")
        if lse is not None and tuple(lse.shape) != (b, h, t):
            raise ValueError(f"Expected lse to be [b, h, t] = [{b}, {h}, {t}], got {sizes(lse)}.")
        if value_norm is not None:
            value_norm = _check_value_norm(value_norm, problem)
        problem = problem.detach().without_values()
        labels = None if tokens is None else labels_of(tokens, b, s)
        if lse is None and torch.compiler.is_compiling():  # it can't be computed after the graph has run
            lse = kernels.statistics(problem).lse
        lse = None if lse is None else lse.detach().to(problem.dtype)
        return cls(problem, labels, dict(provenance or {}), value_norm, _versions(problem), lse)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, `[b, h, t]`, natural log, the sink included."""
        if self._lse is None:
            self._check_unchanged()
            object.__setattr__(self, "_lse", kernels.statistics(self.problem).lse)
        assert self._lse is not None
        return self._lse

    @property
    def knows_lse(self) -> bool:
        """Whether the log-sum-exp is known. If not, it is computed in a pass over the keys when needed."""
        return self._lse is not None

    @property
    def nbytes(self) -> int:
        """The bytes of the map: q, k, mask, bias, norms of values, and the log-sum-exp once it is known."""
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors: q `[b, h, t, d]`, k `[b, g, s, d]`, …, and lse `[b, h, t]` if it is known."""
        kept = chain.from_iterable([x] if isinstance(x, Tensor) else x for x in self._kept.values())
        known = [x for x in (self._lse, self.value_norm) if x is not None]
        return [*_tensors(self.problem), *known, *kept]

    # -- related maps ------------------------------------------------------------------------------

    def under(self, mask: Mask | None) -> AttentionMap:
        """Return the map of the same q and k under a different mask: a counterfactual.

        Args:
            mask: The mask, or None for no mask.

        Returns:
            The map.

        Raises:
            TypeError: If it isn't a mask.
            ValueError: If the mask has the wrong shape.
        """
        self._check_unchanged()
        return self.again(self.problem.under(mask))

    def only(
        self, batch: int | Sequence[int] | None = None, heads: int | Sequence[int] | None = None
    ) -> AttentionMap:
        """Return the map of some batch entries and heads, which are renumbered from 0.

        Args:
            batch: The batch entries, None for all.
            heads: The heads, None for all.

        Returns:
            The map. Its `heads` are the numbers of the heads in the model.

        Raises:
            IndexError: If a batch entry or head doesn't exist.
        """
        self._check_unchanged()
        b = _indices(batch, self.shape[0], AXES[0])
        h = _indices(heads, self.shape[1], AXES[1])
        tokens = self.tokens
        if tokens and not isinstance(tokens[0], str):
            tokens = tuple(cast(Labels, tokens[n]) for n in b)
        problem = self.problem.only(b, h)
        lse = self.lse[b][:, h] if self._keeps_lse(problem) else None
        provenance = {**self.provenance, "heads": [self.heads[n] for n in h]}
        located = provenance.get("patches")
        if isinstance(located, list) and len(located) > 1:  # a list for each batch entry
            provenance["patches"] = [located[n] for n in b]
        shape, value_norm = self.problem.shape, self.value_norm
        if value_norm is not None:
            value_norm = value_norm[b][:, [n // (shape.h // shape.g) for n in h]]  # the key head of each head
        return AttentionMap.of(problem, lse, tokens, provenance, value_norm)

    def compact(self, always: bool = False) -> AttentionMap:
        """Return the map with copies of q and k.

        Args:
            always: If False, copy them only if they are views of larger tensors.

        Returns:
            The map; this map itself if nothing is copied.
        """
        q, k = self.problem.q, self.problem.k
        if not always and not are_views(q, k):
            return self
        return self.again(replace(self.problem, q=q.clone(), k=k.clone()), self._lse)

    def to(self, place: torch.device | str | torch.dtype) -> AttentionMap:
        """Return the map with q and k on another device, or stored in another floating-point dtype.

        After a change of dtype, the log-sum-exp is computed again from the rounded q and k, so that the
        weights of a row still sum to 1.

        Args:
            place: The device or dtype.

        Returns:
            The map.

        Raises:
            TypeError: If the dtype isn't a floating-point dtype.
            ValueError: If there is no such device, or numbers are too large for the dtype.
        """
        self._check_unchanged()
        if isinstance(place, torch.dtype):
            return self if place == self.problem.q.dtype else self.again(convert_dtype(self.problem, place))
        problem = move(self.problem, place)
        return self.again(problem, self.lse.to(problem.q.device) if self._keeps_lse(problem) else None)

    def labelled(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> AttentionMap:
        """Return the map with labels of its keys.

        Args:
            tokens: s strings or a `TokenizedText`, b of them, or None for no labels.

        Returns:
            The map.

        Raises:
            TypeError: If a label isn't a string.
            ValueError: If the number of labels is wrong.
        """
        self._check_unchanged()
        amap = AttentionMap.of(self.problem, self._lse, tokens, self.provenance, self.value_norm)
        return replace(amap, _kept=self._kept)

    def keeping(self, computed: Mapping[tuple[Any, ...], Any]) -> AttentionMap:
        """Return the map with statistics that were computed together with the output.

        Args:
            computed: The results by the keys of their reductions.

        Returns:
            The map, which returns copies of them.
        """
        return replace(self, _kept={**self._kept, **computed})

    def again(self, problem: Problem, lse: Tensor | None = None) -> AttentionMap:
        """Return the map of the given problem, with the provenance of this map.

        It has the tokens of this map if the number of keys is the same, and its norms of values if the
        batch size and the number of key heads are the same too.

        Args:
            problem: The problem.
            lse: Its log-sum-exp `[b, h, t]`, computed when needed if None.

        Returns:
            The map.

        Raises:
            TypeError: If lse isn't a tensor.
            ValueError: If lse has the wrong shape.
        """
        tokens = self.tokens if problem.shape.s == self.shape[3] else None
        value_norm = self.value_norm
        if value_norm is not None:
            has_same_keys = problem.k.shape[:3] == value_norm.shape
            value_norm = value_norm.to(problem.q.device) if has_same_keys else None
        return AttentionMap.of(problem, lse, tokens, self.provenance, value_norm)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_unchanged()
        fields = self.problem, self._lse, self.tokens, dict(self.provenance), self.value_norm
        return AttentionMap.of, fields

    # -- the matrix --------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weights of a tile, `[b, h, rows, cols]`.

        Args:
            index: Up to four indices, for b, h, t and s, or an ellipsis. Each is an int, which drops its
                dimension, a slice, or a list or tensor of integers or booleans. A missing index selects all.

        Returns:
            The weights.

        Raises:
            IndexError: If an index is out of range or has the wrong type.
            MemoryError: If the weights are larger than the memory of the machine.
        """
        self._check_unchanged()
        indices = [
            resolve_index(index, size, axis)
            for index, size, axis in zip(expand_index(index), self.shape, AXES, strict=True)
        ]
        if not (torch.compiler.is_compiling() or torch.compiler.is_exporting()):  # sizes may be symbols
            lengths = [index_length(n, size) for n, size in zip(indices, self.shape, strict=True)]
            check_fits(lengths, self.problem.dtype, self.problem.q.device)
        b, h, rows, cols = (slice(n, n + 1) if isinstance(n, int) else n for n in indices)
        lse = self.lse[:, :, rows][b][:, h]  # [b, h, r]
        score = kernels.tile(self.problem, rows, cols, b, h)
        tile = scores.weights(score, lse)  # [b, h, r, c]
        return tile[tuple(0 if isinstance(n, int) else slice(None) for n in indices)]

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raise TypeError; without this method, NumPy would make an array of one object."""
        raise TypeError(
            f"Expected an array, got a map of {list(self.shape)} weights, which aren't stored. Use a part, "
            "such as amap[0, 0], or amap.dense() for all weights."
        )

    def dense(self, max_bytes: float = 2**31) -> Tensor:
        """Return all weights.

        Args:
            max_bytes: The largest allowed size.

        Returns:
            The weights `[b, h, t, s]`.

        Raises:
            TypeError: If max_bytes isn't a number of bytes.
            ValueError: If the weights would take more bytes.
        """
        check_dense(self.shape, self.problem.dtype, max_bytes)
        return self[...]

    # -- statistics --------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """Return the entropy of each query's weights: −Σ w·ln w over the keys (Shannon 1948).

        It is 0 if one key has all the weight, and ln n if n keys have equal weights. With a sink it isn't
        renormalized.

        Returns:
            The entropy in nats, `[b, h, t]`.
        """
        return self._compute(statistics.Entropy())

    def distance(self) -> Tensor:
        """Return the mean distance that each query attends over, `Σ w·|i − j|`.

        This is the mean attention distance of Dosovitskiy et al. 2021 (arXiv:2010.11929), over the positions
        of a sequence. A sink has no position: divide by 1 − `sink_weight()` for the mean over keys.

        Returns:
            The distance in positions, `[b, h, t]`.
        """
        return self._compute(statistics.Distance())

    def row_max(self) -> Tensor:
        """Return the largest weight of each query.

        Its mean is the confidence of a head (Voita et al. 2019, arXiv:1905.09418).

        Returns:
            The weights `[b, h, t]`, between 0 and 1.
        """
        return self._compute(statistics.RowMax())

    def received(self, last: int | None = None, normalize: str | None = None) -> Tensor:
        """Return the attention that each key receives: the column sums of the weights.

        Zhang et al. 2023 (arXiv:2306.14048) evict keys from caches by these sums over all queries, Li et al.
        2024 (arXiv:2404.14469) by those over the last queries.

        Args:
            last: The number of last queries to sum, None for all.
            normalize: "age" to divide each sum by the number of these queries to which the key is visible,
                because early keys are visible to more queries; 0 if it is visible to none.

        Returns:
            The sums `[b, h, s]`, between 0 and t.

        Raises:
            TypeError: If last isn't an integer.
            ValueError: If last is less than 1, or normalize is neither None nor "age".
        """
        return self._compute(statistics.Received(last, normalize))

    def top(self, k: int) -> TopKeys:
        """Return the k largest weights of each query and their keys.

        Among equal weights, the first keys are returned. Weights of identical keys may differ by rounding.

        Args:
            k: The number of weights.

        Returns:
            `(weights, keys)`, both `[b, h, t, k]`, the largest weight first. If fewer than k keys are visible
            to a query, the missing weights are 0 and the missing keys −1.

        Raises:
            TypeError: If k isn't an integer.
            ValueError: If k is less than 1, or the result would be very large.
        """
        return self._compute(statistics.Top(k))

    def mass(self, mask: Mask, mean: bool = False) -> Tensor:
        """Return the sum of each query's weights inside a mask.

        Clark et al. 2019 (arXiv:1906.04341) distinguish heads by the means of such sums.

        Args:
            mask: The mask.
            mean: Whether to average over the queries that have a visible key in the mask; 0 if none has.

        Returns:
            The sums `[b, h, t]`, or their means `[b, h]`, between 0 and 1.

        Raises:
            TypeError: If it isn't a mask, or mean isn't a bool.
            ValueError: If the mask has the wrong shape.
        """
        self._check_unchanged()
        return statistics.mass(self.problem, self.lse, mask, mean)

    def masses(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return each query's sum of weights inside a mask, and whether it has a visible key there.

        Args:
            mask: The mask.

        Returns:
            The sums, between 0 and 1, and booleans, both `[b, h, t]`.

        Raises:
            TypeError: If it isn't a mask.
            ValueError: If the mask has the wrong shape.
        """
        self._check_unchanged()
        return statistics.masses(self.problem, self.lse, mask)

    def pooled(self, rows: int, cols: int, reduce: str = "mean") -> Tensor:
        """Return a pooled map of every head: the mean or the largest weight of each cell.

        Cell r covers the queries from ⌊r·t/rows⌋ to ⌊(r + 1)·t/rows⌋, and likewise for keys. A masked weight
        counts as 0. In a mean, patterns that are one key wide, such as a diagonal, become faint; in a maximum
        they don't.

        Args:
            rows: The number of cells down, at most t.
            cols: The number of cells across, at most s.
            reduce: "mean" or "max".

        Returns:
            The pooled maps `[b, h, rows, cols]`, between 0 and 1.

        Raises:
            TypeError: If a number of cells isn't an integer.
            ValueError: If a number of cells is out of range, or reduce is neither "mean" nor "max".
        """
        return self._compute(statistics.Pooled(rows, cols, reduce))

    def value_norms(self, v: Tensor, w_o: Tensor) -> Tensor:
        """Return what each key contributes to the output: the column sums of w·‖v W_o‖ (Euclidean).

        ‖w·f(x)‖ is the norm-based weight of Kobayashi et al. 2020 (arXiv:2004.10102), where f(x) is the value
        after the head's part of the output projection. A key may receive much attention and contribute
        nothing. A tile of that matrix is `amap[b, h, rows, cols]` times the norms.

        Args:
            v: The values `[b, g, s, w]`.
            w_o: The weight of the output projection `[e, h·w]`, as in `nn.Linear`.

        Returns:
            The sums `[b, h, s]`, in the unit of v W_o.

        Raises:
            TypeError: If an argument isn't a tensor of floats.
            ValueError: If a tensor has the wrong shape.
        """
        return self._compute(statistics.ValueNorms(v, w_o))

    def logits_max(self) -> Tensor:
        """Return the largest score that enters a head's softmax.

        It grows before training diverges (Dehghani et al. 2023, arXiv:2302.05442). The scores include scale,
        softcap and bias. Masked scores and the sink don't count.

        Returns:
            The scores `[b, h]`; −inf if no key is visible.
        """
        return self._compute(statistics.LogitsMax())

    def sink_weight(self) -> Tensor:
        """Return the weight of the sink: 1 − Σ w (Xiao et al. 2024, arXiv:2309.17453).

        Returns:
            The weights `[b, h, t]`, between 0 and 1: 0 without a sink, 1 for a query without visible keys.
        """
        return self._compute(statistics.SinkWeight())

    def divergence(self, other: AttentionMap | None = None) -> Tensor:
        """Return the Jensen–Shannon divergence (Lin 1991) of rows of weights, averaged over queries.

        It is 0 for equal weights and ln 2 for weights on different keys. The sink isn't counted as a key: for
        rows with sinks it is at most ln 2 times the weight of the keys.

        Args:
            other: A map of the same shape, to compare each head with the same head of that map. None compares
                the heads of this map with each other.

        Returns:
            The divergences in nats, `[b, h]`, or `[b, h, h]` without other.

        Raises:
            TypeError: If other isn't a map.
            ValueError: If other has the wrong shape.
        """
        if other is None:
            return self._compute(statistics.Divergence())
        if not isinstance(other, AttentionMap):
            raise TypeError(f"Expected an AttentionMap for divergence, got {kind(other)}.")
        self._check_unchanged()
        other._check_unchanged()
        if self.shape != other.shape:
            raise ValueError(
                f"Expected maps of one shape for divergence, got {list(self.shape)} and {list(other.shape)}."
            )
        return statistics.divergence_between((self.problem, self.lse), (other.problem, other.lse))

    def statistics(self, *names: str, **arguments: Any) -> dict[str, Any]:
        """Return several statistics by name, computed in one pass over the scores.

            amap.statistics("entropy", "received", top=8, pooled=[(64, 64), (64, 64, "max")])

        `mass` needs a pass of its own, over the keys inside its mask.

        Args:
            *names: The names of statistics without arguments.
            **arguments: For statistics with arguments: one argument, or a tuple or dict of arguments, or a
                list of these for a list of results.

        Returns:
            The results by name.

        Raises:
            TypeError: If arguments don't match the statistic.
            ValueError: If a name is unknown, or an argument has an invalid value.
        """
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"Expected names of statistics, got {kind(name)}.")
        requested: dict[str, Any] = dict.fromkeys(names, ()) | arguments
        reductions = statistics.make_reductions(requested)
        results = iter(self.reduce(list(chain.from_iterable(reductions.values()))))
        return {
            name: [next(results) for _ in several] if isinstance(requested[name], list) else next(results)
            for name, several in reductions.items()
        }

    def reduce(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Return the results of reductions, computed in one pass over the scores."""
        self._check_unchanged()
        keys = [reduction.key() for reduction in reductions]
        missing = {
            key: reduction for key, reduction in zip(keys, reductions, strict=True) if key not in self._kept
        }
        computed: dict[Any, Any] = {}
        if missing:
            together = statistics.Pass(self.problem, list(missing.values()))
            if self._lse is None:
                lse, fused = kernels.statistics(self.problem, together.spec)
                object.__setattr__(self, "_lse", lse)
            else:
                lse, fused = self._lse, {}
            computed = dict(zip(missing, together.results(lse, fused), strict=True))
        return [computed[key] if key in computed else _copy(self._kept[key]) for key in keys]

    def _compute(self, reduction: Reduction) -> Any:
        return self.reduce([reduction])[0]

    def first_key(self) -> Mask:
        """Return a mask of the first visible key of each query: column 0 unless keys are padded or packed."""
        self._check_unchanged()
        first = statistics.first_keys(self.problem)  # [b, h, t]
        if isinstance(self.problem.mask, AtPositions):
            return _first_position(self.problem, self.problem.mask, first)
        return mask_of_first_keys(first, self.shape[3], self.problem.offset)

    # -- viewer and files --------------------------------------------------------------------------

    def view(self, *others: Any, picture: Any = None, port: int = 0, browser: bool = True) -> Any:
        """Show the map in a browser, or in this notebook: from whole heads to single weights.

        In a script, `view().wait()` keeps the viewer running until it is interrupted.

        Args:
            *others: More maps, recordings or files, to compare side by side.
            picture: The picture that the model read, as in `figures.overlay`, to show what a query attends to
                in it; a list has one for each batch entry.
            port: The port to listen on (0 picks a free one).
            browser: Whether to open a browser.

        Returns:
            The running viewer.

        Raises:
            TypeError: If an object can't be shown.
            ValueError: If a file can't be shown.
            OSError: If the port is in use.
        """
        self._check_unchanged()
        return extras.view(self, *others, picture=picture, port=port, browser=browser)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map, its tokens and provenance into a safetensors file (see docs/format.md).

        Args:
            path: The file.

        Raises:
            ValueError: If the mask has a `Rule`, whose function can't be saved.
            OSError: If the file can't be written.
        """
        storage.write(path, [storage.Entry("", 0, self.stored())])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> AttentionMap:
        """Return the map in a file of `save`, memory-mapped: q, k and lse are read when they are needed.

        Args:
            path: The file.

        Returns:
            The map.

        Raises:
            ValueError: If it isn't a file of one map. `manyheads.open_run` opens files of several.
            OSError: If the file can't be read.
        """
        contents = [entry.content for entry in storage.read(path).entries]
        if len(contents) != 1 or not isinstance(contents[0], storage.StoredMap):
            raise ValueError(
                f"Expected a file of one map, got {len(contents)} maps or statistics in {path}. "
                "Open it with manyheads.open_run."
            )
        return cls.of(*contents[0])

    def stored(self) -> storage.StoredMap:
        """Return the content of the map in a file."""
        self._check_unchanged()
        return storage.StoredMap(self.problem, self.lse, self.tokens, self.provenance, self.value_norm)

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        dense = math.prod(self.shape) * self.problem.dtype.itemsize
        tokens = "" if self.tokens is None else ", with tokens"
        return (
            f"AttentionMap([b={b}, h={h}, t={t}, s={s}], mask={self.problem.mask!s}, "
            f"{str(self.problem.q.dtype).removeprefix('torch.')} on {self.problem.q.device}{tokens}, "
            f"{amount(self.nbytes)} for weights of {amount(dense)})"
        )

    def _keeps_lse(self, problem: Problem) -> bool:
        """Return True if the log-sum-exp is known, and the same kernel computes the scores of a problem."""
        return self.knows_lse and kernels.reader(problem) is kernels.reader(self.problem)

    def _agree(self, compute: Callable[[], T]) -> T:
        """Return what a function of checks returns."""
        return compute()

    def _mix_heads(self, share: Tensor) -> Tensor:
        """Return the product `[b, r, s]` of shares `[b, r, t]` and the mean of the heads' weights."""
        self._check_unchanged()
        return statistics.mix_heads(self.problem, self.lse, share)

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if a tensor was changed in place."""
        versions = _versions(self.problem)
        if self._versions is not None and versions is not None and self._versions != versions:
            raise RuntimeError(
                "q, k, mask or bias was changed in place since this map was made, so its weights are lost. "
                "Read the map before the change, or pass a copy to attention (q.clone())."
            )


def mask_of_first_keys(first: Tensor, s: int, offset: int | Tensor) -> Mask:
    """Return the mask of each query's first visible key, `[b, h, t]`; s if it sees none."""
    least = first.amin((1, 2), keepdim=True) if first.numel() else first  # [b, 1, 1]
    if first.numel() and bool((first == least).all()):
        column = least.flatten()
        return Lengths(s - column, left=True) & Lengths((column + 1).clamp(max=s))

    def is_first(b: Any, h: Any, i: Any, j: Any) -> Any:
        row = i - (offset if isinstance(offset, int) else offset[b])
        return first[b, h, row] == j

    return Rule(is_first)


def _first_position(problem: Problem, mask: AtPositions, first: Tensor) -> Mask:
    """Return the mask of each query's first visible key, given as the column `[b, h, t]`, by its position."""
    b, h, _, _ = problem.at(slice(0, 1), slice(0, 1))
    positions = look_up_positions(mask.positions, mask.group, b[..., 0], h[..., 0], first)  # [b, h, t]
    positions = torch.where(first < problem.shape.s, positions, -1)

    def is_first(b: Any, h: Any, i: Any, j: Any) -> Any:
        offset = problem.offset if isinstance(problem.offset, int) else problem.offset[b]
        return positions[b, h, i - offset] == j

    return Rule(is_first)


def _copy(statistic: Any) -> Any:
    """Return a copy of a statistic, so that the caller can change it."""
    return statistic.clone() if isinstance(statistic, Tensor) else type(statistic)(*map(_copy, statistic))


def _check_value_norm(value_norm: Any, problem: Problem) -> Tensor:
    """Check the norms of the values of a problem, and return them as detached float32."""
    if not isinstance(value_norm, Tensor) or not value_norm.is_floating_point():
        raise TypeError(f"Expected value_norm to be a tensor of floats [b, g, s], got {kind(value_norm)}.")
    if value_norm.device != problem.q.device:
        raise ValueError(
            f"q is on {problem.q.device} and value_norm is on {value_norm.device}: move them together."
        )
    if value_norm.shape != problem.k.shape[:3]:
        expected = list(problem.k.shape[:3])
        raise ValueError(f"Expected value_norm to be [b, g, s] = {expected}, got {sizes(value_norm)}.")
    return value_norm.detach().float()


def sequence_labels(tokens: Tokens | None, batch: int = 0) -> Labels | None:
    """Return the labels of the keys of one sequence; None without labels."""
    if not tokens or isinstance(tokens[0], str):
        return cast("Labels | None", tokens)
    return cast(Labels, tokens[batch])


IN_PAGES = {"BertViz": 40, "CircuitsVis": 20}  # bytes of a weight, as text, in a page of each library


def check_page(library: str, weights: int, max_bytes: float) -> None:
    """Raise ValueError if a page with this number of weights would take more than max_bytes."""
    size = weights * IN_PAGES[library]
    if size > most_bytes(max_bytes):
        raise ValueError(
            f"The page of {library} would take {amount(size)} for {weights:,} weights, and max_bytes is "
            f"{amount(max_bytes)}. Choose fewer layers or a shorter text, use view(), or raise max_bytes."
        )


def text_labels(tokens: Tokens | None, count: int) -> list[str]:
    """Return the labels of one text as a list; the numbers of the tokens if it has none."""
    labels = sequence_labels(tokens)
    return [str(n) for n in range(count)] if labels is None else [*labels]


def are_views(*tensors: Tensor) -> bool:
    """Return True if the memory that tensors keep is larger than they are."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()) > sum(x.nbytes for x in tensors)


def move(problem: Problem, place: torch.device | str) -> Problem:
    """Return the problem on another device; raise ValueError if there is none."""
    try:
        device = torch.device(place)
        moved = problem.map(lambda tensor: tensor.to(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Expected a device or a floating-point dtype, got {place!r}: {reason}.") from None
    if device.type == "meta":
        raise ValueError("Expected a device with memory, got meta.")
    return moved


def convert_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem in another dtype; raise ValueError if a number would overflow."""
    if dtype not in DTYPES:
        raise TypeError(f"Expected one of {', '.join(map(str, DTYPES))} to store a map in, got {dtype}.")
    q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
    for name, before, after in (("q", problem.q, q), ("k", problem.k, k)):
        if scores.finite(before) and not scores.finite(after):
            largest = float(before.abs().max())
            raise ValueError(
                f"Expected numbers up to {torch.finfo(dtype).max:.3g} in {name} for {dtype}, got "
                f"{largest:.3g}. Store the map in bfloat16 or float32."
            )
    return replace(problem, q=q, k=k, v=v)


def resolve_rows(rows: int | Sequence[int] | slice | Tensor, t: int) -> list[int]:
    """Return an index of rows as a list, with negative numbers resolved."""
    return _indices(rows, t, AXES[2])


def _indices(
    index: int | Sequence[int] | slice | Tensor | None, size: int, axis: tuple[str, str]
) -> list[int]:
    """Return some entries of an axis as a list, with negative indices resolved; None is all."""
    if index is None:
        return list(range(size))
    if isinstance(index, Sequence) and any(isinstance(n, bool) for n in index):
        raise IndexError(f"Expected an index for {axis[1]} to be integers, got {index!r}.")
    resolved = resolve_index([index] if isinstance(index, int) else index, size, axis)
    return torch.arange(size)[resolved].flatten().tolist()


def check_fits(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise MemoryError if a tile of these sizes is larger than the memory of the device."""
    size, memory = math.prod(lengths) * dtype.itemsize, memory_size(device)
    if memory is not None and size > memory:
        raise MemoryError(
            f"Expected weights that fit into {amount(memory)} of memory, got {list(lengths)}, which take "
            f"{amount(size)}. Read fewer queries and keys, such as amap[0, 0, :1000, :1000], or use "
            "statistics such as amap.pooled(512, 512), which don't need the matrix."
        )


def check_dense(shape: Sequence[int], dtype: torch.dtype, max_bytes: float) -> None:
    """Raise ValueError if all weights of a map `[b, h, t, s]` would take more than max_bytes."""
    size = math.prod(shape) * dtype.itemsize
    if size > most_bytes(max_bytes):
        raise ValueError(
            f"The weights {list(shape)} would take {size / 1e9:.3g} GB, and max_bytes is "
            f"{max_bytes / 1e9:.3g} GB. Read a tile, amap[b, h, rows, cols], or raise max_bytes."
        )


def index_length(index: int | Rows, size: int) -> int:
    """Return the number of entries that a resolved index selects of an axis."""
    if isinstance(index, int):
        return 1
    return index.numel() if isinstance(index, Tensor) else len(range(size)[index])


def memory_size(device: torch.device) -> int | None:
    """Return the bytes of memory of a device, of a machine for its CPU; None if the system doesn't say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= {*getattr(os, "sysconf_names", ())}:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _versions(problem: Problem) -> tuple[int, ...] | None:
    """Return how often each tensor was changed in place (0 in inference mode); None while compiling."""
    if torch.compiler.is_compiling():
        return None
    return tuple(0 if x.is_inference() else x._version for x in _tensors(problem))


def _tensors(problem: Problem) -> list[Tensor]:
    """Return the tensors that the weights are computed from."""
    mask, bias = ([] if part is None else part.tensors() for part in (problem.mask, problem.bias))
    others = [x for x in (problem.sink, problem.offset) if isinstance(x, Tensor)]
    return [problem.q, problem.k, *others, *mask, *bias]


def expand_index(index: Any) -> list[Any]:
    """Return four indices, one per dimension, for an index with an ellipsis or fewer indices."""
    index = index if isinstance(index, tuple) else (index,)
    ellipses = [n for n, part in enumerate(index) if part is Ellipsis]
    if len(ellipses) > 1 or len(index) - len(ellipses) > 4:
        raise IndexError(f"Expected at most four indices [b, h, t, s], got {len(index)} indices.")
    middle = ellipses[0] if ellipses else len(index)
    before, after = list(index[:middle]), list(index[middle + 1 :])
    return before + [slice(None)] * (4 - len(before) - len(after)) + after


def resolve_index(index: Any, size: int, axis: tuple[str, str]) -> int | Rows:
    """Return the index of one dimension without negative numbers: an int, a slice, or an index tensor."""
    name, letter = axis
    if isinstance(index, slice):
        if index.step == 0:
            raise IndexError(f"Expected a slice of {letter} with a step other than 0, got {index}.")
        if index.step is not None and index.step < 0:  # tensors have no slices with negative steps
            return torch.tensor(range(*index.indices(size)), dtype=torch.int64)
        return index
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if tuple(index.shape) != (size,):
            raise IndexError(
                f"Expected a boolean index for {letter} to be [{size}], got {list(index.shape)}."
            )
        index = index.nonzero().flatten()
    is_bool = isinstance(index, bool)
    try:
        numbers = torch.as_tensor(index, dtype=torch.int64 if isinstance(index, list) and not index else None)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, 0)
    if is_bool or numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.dim() > 1:
        raise IndexError(
            f"Expected an int, a slice, or integers of one dimension as an index for {letter}, got "
            f"{f'{kind(index)} {sizes(index)}' if isinstance(index, Tensor) else repr(index)}."
        )
    if numbers.numel() and (int(numbers.min()) < -size or int(numbers.max()) >= size):
        raise IndexError(
            f"{name} {index} doesn't exist: {letter} = {size}. Use 0 to {size - 1} or -{size} to -1."
        )
    numbers = torch.where(numbers < 0, numbers + size, numbers)
    return int(numbers) if numbers.dim() == 0 else numbers.to(torch.int64)
