"""`ShardedMap`: the map of a sequence whose queries and keys are spread over ranks.

Each rank keeps q, k and the log-sum-exp of its own tokens. For a tile, what it needs is fetched; for
statistics, keys travel around the ring as they do for the output (`ring`), and no rank has all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from reprlib import repr as brief
from secrets import token_hex
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyheads import kernels, scores, statistics
from manyheads.biases import Bias
from manyheads.distributed.blocks import block
from manyheads.distributed.communication import (
    Described,
    Pending,
    agree,
    all_reduce,
    count,
    describe,
    explained,
)
from manyheads.distributed.positions import (
    Part,
    check_mesh,
    check_partition,
    check_positions,
    cut_into_parts,
)
from manyheads.distributed.ring import Packed, Ring, pass_on
from manyheads.distributed.rules import guard, raise_errors
from manyheads.distributed.shard_files import locate, write_shards
from manyheads.distributed.totals import Total, add_block, columns, make_total
from manyheads.maps import (
    AXES,
    AttentionMap,
    BaseMap,
    are_views,
    check_dense,
    check_fits,
    convert_dtype,
    expand_index,
    index_length,
    mask_of_first_keys,
    move,
    resolve_index,
)
from manyheads.masks import Full, Mask
from manyheads.problem import Problem
from manyheads.shapes import amount, kind, sizes
from manyheads.statistics import Mass, Reduction, TopKeys
from manyheads.storage import Labels, StoredMap, Tokens, check_path, encode_index, labels_of
from manyheads.trees import Value

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMap(BaseMap):
    """The weights of one attention call over a sequence that is sharded over ranks.

    Methods are collective: every rank of the mesh calls them, with the same arguments, in the same order.

    `smap[b, h, rows, cols]` is a tile of the exact weights, the same on every rank: rows and columns are
    positions in the whole sequence. `image` and `to_xarray` read tiles too. Statistics of queries (`entropy`,
    `distance`, `row_max`, `top`, `mass`, `sink_weight`) are those of this rank's rows, in the order of its
    tokens; `gather` joins the rows of all ranks. All other results (`received`, `pooled`, `logits_max`,
    `divergence`, means, head scores of `manyheads.measures`) are those of the whole map, the same on every
    rank. They equal those of an `AttentionMap` of the whole sequence.

    `save` writes a shard for each rank. `AttentionMap.open` opens them as one map, on one process.

    Attributes:
        problem: The problem of the whole sequence, with the mask, the bias and the sink. Its q and k have
            no numbers: all tokens share the memory of one.
        mesh: The one-dimensional mesh of the sequence.
        positions: The positions of this rank's tokens, int64 `[n]`.
        tokens: The labels of all keys: one list, or one for each batch entry.
        provenance: JSON data about the origin of the map.
        shape: `(b, h, t, s)` of the whole sequence.
        lse: The log-sum-exp of this rank's rows, `[b, h, n]`, natural log, sinks included.
    """

    problem: Problem
    mesh: DeviceMesh
    positions: Tensor
    tokens: Tokens | None
    provenance: Mapping[str, Any]
    _q: Tensor  # [b, h, n, d], in the order of positions, as _k, _lse and the parts
    _k: Tensor  # [b, g, n, d]
    _lse: Tensor  # [b, h, n]
    _parts: tuple[tuple[Part, ...], ...]  # of each rank
    _order: Tensor | None  # positions[_order] is ascending; None if positions are
    _versions: tuple[int, ...] = field(default=())

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None = None,
        *,
        mesh: DeviceMesh,
        positions: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> ShardedMap:
        """Return the map of a sequence, of which each rank gives its own tokens.

        Args:
            q: This rank's queries `[b, h, n, d]`.
            k: This rank's keys `[b, g, n, d]`. g divides h.
            lse: The log-sum-exp of this rank's rows over all keys, `[b, h, n]`; computed if None.
            mesh: The one-dimensional mesh of the ranks.
            positions: The positions of this rank's tokens in the sequence, integers `[n]`; None if the
                tokens are in the order of the ranks.
            lengths: The number of tokens of each rank, None to ask the ranks.
            mask: The mask of the whole sequence (True = may attend).
            bias: The bias of the whole sequence.
            scale: The factor by which q·k is multiplied, 1/√d if None.
            softcap: If given, scores become softcap · tanh(score / softcap).
            sink: A logit per head, `[h]`.
            tokens: The labels of all keys of the sequence: strings or a `TokenizedText`, or b of them.
            provenance: JSON data about the origin of the map.

        Returns:
            The map.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If arguments don't fit each other, or differ between ranks. Every rank raises then.
        """
        check_mesh(mesh)
        group, rank = mesh.get_group(), mesh.get_local_rank()
        if lengths is None:
            given = agree(group, lambda: {"n": _check_tensors(q, k, lse)}, ())
            lengths = [theirs["n"] for theirs in given]
        found: dict[str, Any] = {}

        def compute() -> dict[str, Any]:
            n = _check_tensors(q, k, lse)
            if len(lengths) != mesh.size() or lengths[rank] != n:
                raise ValueError(
                    f"Expected lengths of {mesh.size()} ranks, {n} for rank {rank}, got {list(lengths)}. "
                    "Pass the number of tokens of each rank."
                )
            problem = _whole(
                q, k, sum(lengths), mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink
            )
            if positions is None:
                first = sum(lengths[:rank])
                own = torch.arange(first, first + n)
            else:
                own = check_positions(positions, n, rank)
            b, _, _, _, s, _, _ = problem.shape
            labels = None if tokens is None else labels_of(tokens, b, s)
            found.update(problem=problem.detach(), positions=own, labels=labels)
            return {
                "shape of q": [*q.shape[:2], q.shape[3]],
                "shape of k": [*k.shape[:2], k.shape[3]],
                "dtype": str(q.dtype),
                "mask": describe(problem.mask),
                "bias": describe(found["problem"].bias),
                "scale": problem.scale,
                "softcap": problem.softcap,
                "sink": describe(found["problem"].sink),
                "number of log-sum-exps": int(lse is not None),
                "parts": cut_into_parts(own.sort().values),
            }

        same = ("shape of q", "shape of k", "dtype", "mask", "bias", "scale", "softcap", "sink",
                "number of log-sum-exps")  # fmt: skip
        given = agree(group, compute, same)
        parts = tuple(theirs["parts"] for theirs in given)
        check_partition(parts)
        own = found["positions"]
        order = None if bool((own.diff() > 0).all()) else own.argsort()
        q, k = q.detach(), k.detach()
        versions = _versions(q, k)
        if order is not None:
            at = order.to(q.device)
            q, k = q.index_select(2, at), k.index_select(2, at)
            lse = None if lse is None else lse.index_select(2, at)
            versions = ()  # copies
        rows = torch.empty(0) if lse is None else lse.detach().to(found["problem"].dtype)
        amap = cls(
            found["problem"], mesh, own, found["labels"], dict(provenance or {}), q, k, rows, parts, order,
            versions,
        )  # fmt: skip
        return amap if lse is not None else replace(amap, _lse=amap._compute_lse())

    # -- what a rank has ---------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this rank in the mesh."""
        return self.mesh.get_local_rank()

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of this rank's rows, `[b, h, n]`, natural log, the sink included."""
        return self._in_own_order(self._lse)

    @property
    def knows_lse(self) -> bool:
        """Whether the log-sum-exp is known, which it always is."""
        return True

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's tensors, with those of the mask and the bias."""
        return sum(x.nbytes for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return this rank's q `[b, h, n, d]`, k `[b, g, n, d]`, lse `[b, h, n]`, and those of the mask."""
        parts = [part for part in (self.problem.mask, self.problem.bias) if part is not None]
        sink = [] if self.problem.sink is None else [self.problem.sink]
        return [self._q, self._k, self._lse, *sink, *chain.from_iterable(part.tensors() for part in parts)]

    @property
    def _group(self) -> Any:
        return self.mesh.get_group()

    def _in_own_order(self, x: Tensor) -> Tensor:
        """Return rows `[b, h, n, …]` in the order of this rank's tokens."""
        return x if self._order is None else x[:, :, self._order.argsort().to(x.device)]

    def _in_order(self, x: Tensor) -> Tensor:
        """Return rows `[b, h, n, …]` of this rank's tokens in the order of positions."""
        return x if self._order is None else x[:, :, self._order.to(x.device)]

    # -- related maps ------------------------------------------------------------------------------

    def under(self, mask: Mask | None) -> ShardedMap:
        """Return the map of the same q and k under a different mask: a counterfactual.

        Its log-sum-exp is computed at once, while the keys travel around the ring.

        Args:
            mask: The mask of the whole sequence, or None for no mask.

        Returns:
            The map.

        Raises:
            TypeError: If it isn't a mask.
            ValueError: If the mask has the wrong shape, or differs between ranks.
        """
        problem: list[Problem] = []

        def compute() -> dict[str, Any]:
            self._check_unchanged()
            problem.append(self.problem.under(mask))
            return {"mask": describe(mask)}

        agree(self._group, compute, ("mask",))
        amap = replace(self, problem=problem[0].detach())
        return replace(amap, _lse=amap._compute_lse())

    def only(
        self, batch: int | Sequence[int] | None = None, heads: int | Sequence[int] | None = None
    ) -> ShardedMap:
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
        n = self._q.shape[2]
        b, h = (
            torch.arange(size)[resolve_index([index] if isinstance(index, int) else index, size, axis)]
            if index is not None
            else torch.arange(size)
            for index, size, axis in zip((batch, heads), self.shape, AXES, strict=False)
        )
        local = AttentionMap.of(_problem_of(self._q, self._k), self._lse).only(b.tolist(), h.tolist())
        tokens = self.tokens
        if tokens and not isinstance(tokens[0], str):
            tokens = tuple(cast(Labels, tokens[entry]) for entry in b.tolist())
        problem = self.problem
        whole = replace(
            _whole(local.problem.q, local.problem.k, problem.shape.s, scale=problem.scale),
            softcap=problem.softcap,
            mask=None if problem.mask is None else problem.mask.only(b, h),
            bias=None if problem.bias is None else problem.bias.only(b, h),
            sink=None if problem.sink is None else problem.sink[h],
        )
        assert local.problem.q.shape[2] == n
        provenance = {**self.provenance, "heads": [self.heads[number] for number in h.tolist()]}
        return replace(
            self, problem=whole, tokens=tokens, provenance=provenance, _q=local.problem.q,
            _k=local.problem.k, _lse=local.lse, _versions=_versions(local.problem.q, local.problem.k),
        )  # fmt: skip

    def compact(self, always: bool = False) -> ShardedMap:
        """Return the map with copies of this rank's q and k. It needs no other rank.

        Args:
            always: If False, copy them only if they are views of larger tensors.

        Returns:
            The map; this map itself if nothing is copied.
        """
        self._check_unchanged()
        if not always and not are_views(self._q, self._k):
            return self
        q, k = self._q.clone(), self._k.clone()
        return replace(self, _q=q, _k=k, _versions=_versions(q, k))

    def to(self, place: torch.device | str | torch.dtype) -> ShardedMap:
        """Return the map with q and k on another device, or stored in another floating-point dtype.

        The log-sum-exp is computed again, from the rounded q and k, while the keys travel around the ring.

        Args:
            place: The dtype; or the device, of a kind that the mesh's process group supports.

        Returns:
            The map.

        Raises:
            TypeError: If the dtype isn't a floating-point dtype.
            ValueError: If there is no such device, numbers are too large for the dtype, or ranks differ.
        """
        moved: list[ShardedMap] = []

        def compute() -> dict[str, Any]:
            self._check_unchanged()
            moved.append(self._placed(place))
            return {"place": str(place if isinstance(place, torch.dtype) else torch.device(place).type)}

        agree(self._group, compute, ("place",))
        return moved[0] if moved[0] is self else replace(moved[0], _lse=moved[0]._compute_lse())

    def _placed(self, place: torch.device | str | torch.dtype) -> ShardedMap:
        """Return the map in a dtype or on a device, with the old log-sum-exp; this map if it is there."""
        whole = self.problem
        local = replace(whole, q=self._q, k=self._k, v=self._k[..., :0])  # the mask is of the whole sequence
        if isinstance(place, torch.dtype):
            if place == self._q.dtype:
                return self
            local = convert_dtype(local, place)
        else:
            local = move(local, place)
            if local.q.device == self._q.device:
                return self
            supported = dist.get_backend_config(self._group)
            if f"{local.q.device.type}:" not in supported:
                raise ValueError(
                    f"Expected a device that the process group of the mesh supports ({supported}), got "
                    f"{place!r}. Initialize it with a backend for both, such as cpu:gloo,cuda:nccl."
                )
        empty = [
            x.new_zeros(1).expand(*x.shape[:2], whole.shape.s, x.shape[3])
            for x in (local.q, local.k, local.v)
        ]
        problem = replace(local, q=empty[0], k=empty[1], v=empty[2])
        return replace(self, problem=problem, _q=local.q, _k=local.k, _versions=_versions(local.q, local.k))

    def labelled(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> ShardedMap:
        """Return the map with labels of its keys.

        Args:
            tokens: The s labels of the whole sequence or a `TokenizedText`, b of them, or None for none.

        Returns:
            The map.

        Raises:
            TypeError: If a label isn't a string.
            ValueError: If the number of labels is wrong.
        """
        b, _, _, s = self.shape
        return replace(self, tokens=None if tokens is None else labels_of(tokens, b, s))

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "Expected a map of one process to pickle or copy, got a ShardedMap, whose numbers are on several "
            "ranks. Save it on all ranks, and open it with AttentionMap.open(path)."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "view":
            raise AttributeError(
                "Expected a map of one process to view, got a ShardedMap. Save it on all ranks, "
                'smap.save("map.safetensors"), and run manyheads view map.safetensors.'
            )
        if name == "value_norm":
            raise AttributeError(
                "ShardedMap has no value_norm, because values aren't kept. "
                "Pass them: smap.value_norms(v, w_o)."
            )
        if not name.startswith("_") and hasattr(AttentionMap, name):
            raise AttributeError(
                f"ShardedMap has no {name}, because its numbers are on several ranks. Save it, and use "
                f"AttentionMap.open(path).{name}, or read a tile: smap[b, h, rows, cols]."
            )
        raise AttributeError(f"ShardedMap has no attribute {name!r}. Use one that dir(smap) lists.")

    # -- the matrix --------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weights of a tile, `[b, h, rows, cols]`, on every rank.

        Of rows and keys, what takes the fewest bytes is sent: keys to the ranks that have the rows, rows to
        the ranks that have the keys, or both to all.

        Args:
            index: Up to four indices, for b, h, t and s, or an ellipsis, as for an `AttentionMap`. Rows and
                columns are positions in the whole sequence.

        Returns:
            The weights.

        Raises:
            IndexError: If an index is out of range or has the wrong type.
            MemoryError: If the weights are larger than the memory of the machine.
            ValueError: If the index differs between ranks.
        """
        resolved: list[Any] = []
        numbers: list[Tensor] = []

        def compute() -> dict[str, Any]:
            self._check_unchanged()
            resolved.extend(
                resolve_index(each, size, axis)
                for each, size, axis in zip(expand_index(index), self.shape, AXES, strict=True)
            )
            lengths = [index_length(n, size) for n, size in zip(resolved, self.shape, strict=True)]
            check_fits(lengths, self.problem.dtype, self._q.device)
            numbers.extend(
                torch.tensor([n]) if isinstance(n, int) else torch.arange(size)[n]
                for n, size in zip(resolved, self.shape, strict=True)
            )
            content = " ".join(describe(each).content for each in numbers)
            return {"index": Described(brief(index), content)}

        agree(self._group, compute, ("index",))
        b, h, rows, cols = numbers
        (rows, row_of), (cols, col_of) = (each.unique(return_inverse=True) for each in (rows, cols))
        device = self._q.device
        tile = self._tile(b.to(device), h.to(device), rows, cols)  # [b, h, r, c]
        for axis, back in ((2, row_of), (3, col_of)):
            if not torch.equal(back, torch.arange(tile.shape[axis])):
                tile = tile.index_select(axis, back.to(device))
        return tile[tuple(0 if isinstance(n, int) else slice(None) for n in resolved)]

    def dense(self, max_bytes: float = 2**31) -> Tensor:
        """Return all weights, on every rank.

        Args:
            max_bytes: The largest allowed size.

        Returns:
            The weights `[b, h, t, s]`.

        Raises:
            TypeError: If max_bytes isn't a number of bytes.
            ValueError: If the weights would take more bytes.
        """
        self._agree(lambda: check_dense(self.shape, self.problem.dtype, max_bytes))
        return self[...]

    def gather(self, rows: Tensor) -> Tensor:
        """Return a statistic of all queries on every rank, in the order of positions.

        Args:
            rows: The numbers of this rank's rows, `[b, h, n]` or `[b, h, n, …]`, such as `smap.entropy()`.

        Returns:
            The numbers of all rows, `[b, h, t]` or `[b, h, t, …]`.

        Raises:
            TypeError: If rows isn't a tensor.
            ValueError: If it doesn't have a number for each of this rank's rows, or differs between ranks.
        """

        def compute() -> dict[str, Any]:
            if not isinstance(rows, Tensor):
                raise TypeError(f"Expected rows to be a tensor [b, h, n], got {kind(rows)}.")
            n = self._q.shape[2]
            if rows.dim() < 3 or rows.shape[2] != n:
                raise ValueError(
                    f"Expected rows to be [b, h, n, …] with n = {n} rows of this rank, got {sizes(rows)}."
                )
            return {"shape of rows": [*rows.shape[:2], *rows.shape[3:]], "dtype": str(rows.dtype)}

        agree(self._group, compute, ("shape of rows", "dtype"))
        mine = self._in_order(rows)
        shape = [*rows.shape]
        shape[2] = self.shape[2]
        return self._collect(2, torch.arange(self.shape[2]), shape, rows.dtype, lambda own: mine[:, :, own])

    def _tile(self, b: Tensor, h: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the weights of batch entries and heads, at ascending positions, `[b, h, r, c]`."""
        whole = self.problem
        n, m, r, c, d = len(b), len(h), len(rows), len(cols), whole.shape.d
        group = whole.shape.h // max(whole.shape.g, 1)
        key_heads, key_head_of = (h // max(group, 1)).unique(return_inverse=True)
        costs = {
            "both": n * m * r * d + n * len(key_heads) * c * d,
            "rows": n * m * r * d + n * m * r * c,
            "cols": n * len(key_heads) * c * d + n * m * r * c,
        }
        fetched = min(costs, key=lambda name: costs[name])  # the same on every rank
        own = self._parts[self.rank]
        own_rows = rows[locate(own, rows)[0]] if fetched == "cols" else rows
        own_cols = cols[locate(own, cols)[0]] if fetched == "rows" else cols

        def read(x: Tensor, heads: Tensor, positions: Tensor, is_fetched: bool) -> Tensor:
            """Return the rows or keys at some positions, from all ranks or from this one."""

            def pick(tokens: Tensor) -> Tensor:
                # The longest axis first, so that no more is copied.
                return x[:, :, _index(tokens)][_index(b)][:, _index(heads)]

            if not is_fetched:
                return pick(locate(own, positions)[1].to(x.device))
            shape = [n, len(heads), len(positions), *x.shape[3:]]
            return self._collect(2, positions, shape, x.dtype, pick)

        q, lse = (read(x, h, own_rows, fetched != "cols") for x in (self._q, self._lse))
        k = read(self._k, key_heads, own_cols, fetched != "rows")  # [b, g, c, d]
        all_heads = torch.equal(h, torch.arange(whole.shape.h, device=h.device))
        if not all_heads:
            k = k[:, key_head_of]  # [b, h, c, d]
        if not all_heads or not torch.equal(b, torch.arange(whole.shape.b, device=b.device)):
            whole = replace(
                whole,
                mask=None if whole.mask is None else whole.mask.only(b, h),
                bias=None if whole.bias is None else whole.bias.only(b, h),
            )
        tile = q.new_zeros(n, m, len(own_rows), len(own_cols), dtype=whole.dtype)
        if tile.numel():
            problem = block(whole, q, k, k[..., :0], _part(own_rows), _part(own_cols))
            tile = scores.weights(kernels.tile(problem), lse)
        if fetched == "both":
            return tile
        axis, positions = (2, rows) if fetched == "cols" else (3, cols)
        return self._collect(axis, positions, [n, m, r, c], tile.dtype, lambda tokens: tile)

    def _collect(
        self,
        axis: int,
        positions: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        piece_of: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return a tensor of all ranks' pieces along an axis, on every rank.

        Args:
            axis: The axis of positions.
            positions: The positions, ascending `[m]`.
            shape: The shape of the result.
            dtype: Its dtype.
            piece_of: A function of the indices of tokens that returns this rank's piece.

        Returns:
            The tensor.
        """
        device = self._q.device
        result = torch.empty(*shape, dtype=dtype, device=device)
        works = []
        for rank, parts in enumerate(self._parts):
            where, tokens = locate(parts, positions)
            if not len(where) or not result.numel():
                continue
            size = [*shape]
            size[axis] = len(where)
            if rank == self.rank:
                piece = piece_of(tokens.to(device)).contiguous()
                count(piece.nbytes * (len(self._parts) - 1), len(self._parts) - 1)
            else:
                piece = torch.empty(size, dtype=dtype, device=device)
            # As bytes, because not every backend sends every dtype.
            data = piece.view(-1).view(torch.uint8)
            with explained():
                work = dist.broadcast(data, group=self._group, group_src=rank, async_op=True)
            works.append((where.to(device), piece, work))
        for where, piece, work in works:
            with explained():
                work.wait()
            result.index_copy_(axis, where, piece)
        return result

    # -- statistics --------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """Return the entropy of each of this rank's queries, in nats: `[b, h, n]`."""
        return self._compute(statistics.Entropy())

    def distance(self) -> Tensor:
        """Return the mean distance that this rank's queries attend over, in positions: `[b, h, n]`."""
        return self._compute(statistics.Distance())

    def row_max(self) -> Tensor:
        """Return the largest weight of each of this rank's queries, `[b, h, n]`."""
        return self._compute(statistics.RowMax())

    def top(self, k: int) -> TopKeys:
        """Return the k largest weights of each of this rank's queries, and their keys.

        Args:
            k: The number of weights.

        Returns:
            `(weights, keys)`, both `[b, h, n, k]`, the largest weight first. Keys are positions in the whole
            sequence. If fewer than k keys are visible to a query, the missing weights are 0, the keys −1.
        """
        return self._compute(statistics.Top(k))

    def sink_weight(self) -> Tensor:
        """Return the weight of the sink for each of this rank's queries, `[b, h, n]`."""
        return self._compute(statistics.SinkWeight())

    def received(self, last: int | None = None, normalize: str | None = None) -> Tensor:
        """Return the attention that each key of the whole sequence receives, on every rank.

        Args:
            last: The number of last queries of the sequence to sum, None for all.
            normalize: "age" to divide each sum by the number of these queries that see the key.

        Returns:
            The sums over the queries of all ranks, `[b, h, s]`.
        """
        return self._compute(statistics.Received(last, normalize))

    def pooled(self, rows: int, cols: int, reduce: str = "mean") -> Tensor:
        """Return a pooled map of every head, on every rank: the mean or the largest weight of each cell.

        Args:
            rows: The number of cells down, at most t.
            cols: The number of cells across, at most s.
            reduce: "mean" or "max".

        Returns:
            The pooled maps `[b, h, rows, cols]`.
        """
        return self._compute(statistics.Pooled(rows, cols, reduce))

    def value_norms(self, v: Tensor, w_o: Tensor) -> Tensor:
        """Return what each key contributes to the output, on every rank: the column sums of w·‖v W_o‖.

        Args:
            v: The values of this rank's tokens, `[b, g, n, w]`.
            w_o: The weight of the output projection `[e, h·w]`, the same on every rank.

        Returns:
            The sums `[b, h, s]`, in the unit of v W_o.
        """
        return self._compute(statistics.ValueNorms(v, w_o))

    def logits_max(self) -> Tensor:
        """Return the largest score that enters each head's softmax, `[b, h]`, on every rank."""
        return self._compute(statistics.LogitsMax())

    def divergence(self, other: ShardedMap | None = None) -> Tensor:
        """Return the Jensen–Shannon divergence of rows of weights, averaged over all queries, on every rank.

        Args:
            other: A map of the same shape, whose tokens are on the same ranks, to compare each head with the
                same head of that map. Its keys travel with those of this map. None compares the heads of
                this map with each other.

        Returns:
            The divergences in nats, `[b, h]`, or `[b, h, h]` without other.

        Raises:
            TypeError: If other isn't a ShardedMap.
            ValueError: If other has the wrong shape, or its tokens are on other ranks.
        """
        if other is None:
            return self._compute(statistics.Divergence())
        self._agree(lambda: self._check_other(other))
        return self._compare(other)

    def _compare(self, other: ShardedMap) -> Tensor:
        """Return the divergences `[b, h]` between the same heads of two maps."""
        maps = self, other
        keys = [each._k for each in maps]  # [b, g, n, d] of each
        if keys[0].shape[1] != keys[1].shape[1]:
            keys = [x.repeat_interleave(self.shape[1] // x.shape[1], 1) for x in keys]  # [b, h, n, d]
        # The keys of the other map travel as the values of this one, and those that either of them needs.
        common = torch.promote_types(keys[0].dtype, keys[1].dtype)
        first, second = (x.to(common) for x in keys)
        masks = [each.problem.mask for each in maps]
        union = None if masks[0] is None or masks[1] is None else masks[0] | masks[1]
        shape = self.problem.shape._replace(g=first.shape[1], d=first.shape[3], w=second.shape[3])
        ring = self._ring(replace(self.problem, mask=union, shape=shape))
        total = torch.zeros(*self.shape[:2], dtype=torch.float64, device=self._q.device)
        for rows, cols, packed in self._rounds(ring, first, second):
            pairs = []
            for each, k in zip(maps, packed, strict=True):
                k = k.to(each._k.dtype)
                q = each._q[:, :, rows.rows]
                part = block(each.problem, q, k, k[..., :0], rows, cols)
                pairs.append((part, each._lse[:, :, rows.rows]))
            total += statistics.sum_divergences(pairs[0], pairs[1])
        all_reduce(total, self._group)
        return (total.clamp_(min=0.0) / max(self.shape[2], 1)).to(self._lse.dtype)

    def _check_other(self, other: Any) -> None:
        """Raise an error unless another map has the same shape, and its tokens on the same ranks."""
        if not isinstance(other, ShardedMap):
            raise TypeError(
                f"Expected a ShardedMap for divergence, got {kind(other)}. Save both maps, and compare what "
                "AttentionMap.open(path) returns, on one process."
            )
        self._check_unchanged()
        other._check_unchanged()
        if self.shape != other.shape:
            raise ValueError(
                f"Expected maps of one shape for divergence, got {list(self.shape)} and {list(other.shape)}."
            )
        if not torch.equal(self.positions.sort().values, other.positions.sort().values):
            raise ValueError(
                "Expected maps whose tokens are on the same ranks for divergence, got different positions. "
                "Pass the same positions to both calls, or save both maps and open them on one process."
            )
        if other._q.device != self._q.device:
            raise ValueError(
                f"Expected maps on one device for divergence, got {self._q.device} and {other._q.device}. "
                "Move one by smap.to(device)."
            )

    def mass(self, mask: Mask, mean: bool = False) -> Tensor:
        """Return the sum of each query's weights inside a mask.

        Args:
            mask: The mask of the whole sequence.
            mean: Whether to average over the queries of all ranks that have a visible key in the mask.

        Returns:
            The sums of this rank's queries, `[b, h, n]`, or the means `[b, h]`, which are the same on every
            rank.

        Raises:
            TypeError: If it isn't a mask, or mean isn't a bool.
            ValueError: If the mask has the wrong shape, or differs between ranks.
        """
        return self._compute(Mass(mask, mean))

    def masses(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return each of this rank's queries' sum of weights inside a mask, and whether it sees a key there.

        Args:
            mask: The mask of the whole sequence.

        Returns:
            The sums and booleans, both `[b, h, n]`.

        Raises:
            TypeError: If it isn't a mask.
            ValueError: If the mask has the wrong shape, or differs between ranks.
        """
        agree(self._group, lambda: {"mask": describe(self._check_mask(mask))}, ("mask",))
        total, has_keys = self._masses(mask)
        return self._in_own_order(total), self._in_own_order(has_keys)

    def first_key(self) -> Mask:
        """Return a mask of the first visible key of each query of the whole sequence."""
        whole = self.problem
        first = torch.full(self._lse.shape, whole.shape.s, device=self._q.device)  # [b, h, n]
        for rows in self._parts[self.rank]:
            for cols in chain.from_iterable(self._parts):
                keys = whole.k[:, :, : len(cols)]  # masks need no keys
                problem = block(whole, self._q[:, :, rows.rows], keys, keys[..., :0], rows, cols)
                found = statistics.first_keys(problem)  # [b, h, r]
                positions = torch.cat((cols.tensor(), torch.tensor([whole.shape.s]))).to(found.device)
                into = first[:, :, rows.rows]
                torch.minimum(into, positions[found], out=into)
        shape = [*first.shape[:2], whole.shape.t]
        every = torch.arange(whole.shape.t)
        first = self._collect(2, every, shape, first.dtype, lambda own: first[:, :, own])
        return mask_of_first_keys(first, whole.shape.s, whole.offset)

    def statistics(self, *names: str, **arguments: Any) -> dict[str, Any]:
        """Return several statistics by name, computed while the keys travel around the ring once.

            smap.statistics("entropy", "received", top=8, pooled=[(64, 64), (64, 64, "max")])

        `mass` needs a round of its own.

        Args:
            *names: The names of statistics without arguments.
            **arguments: For statistics with arguments: one argument, or a tuple or dict of arguments, or a
                list of these for a list of results.

        Returns:
            The results by name, as the methods return them.

        Raises:
            TypeError: If arguments don't match the statistic.
            ValueError: If a name is unknown, or an argument has an invalid value or differs between ranks.
        """
        reductions: dict[str, list[Reduction]] = {}
        requested: dict[str, Any] = {}

        def compute() -> list[Reduction]:
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"Expected names of statistics, got {kind(name)}.")
            requested.update(dict.fromkeys(names, ()) | arguments)
            reductions.update(statistics.make_reductions(requested))
            return list(chain.from_iterable(reductions.values()))

        results = iter(self._reduce(compute))
        return {
            name: [next(results) for _ in several] if isinstance(requested[name], list) else next(results)
            for name, several in reductions.items()
        }

    def reduce(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Return the results of reductions, computed while the keys travel around the ring once."""
        return self._reduce(lambda: list(reductions))

    def _compute(self, reduction: Reduction) -> Any:
        return self.reduce([reduction])[0]

    def _reduce(self, make: Callable[[], list[Reduction]]) -> list[Any]:
        """Return the results of reductions, which are checked on all ranks before keys are sent."""
        ring = self._ring(self.problem)
        results: list[Any] = []  # totals, and reductions that need rounds of their own

        def compute() -> dict[str, Any]:
            self._check_unchanged()
            made = make()
            described = _describe(made)  # before `begin` adds to them
            for reduction in made:
                if isinstance(reduction, Mass):
                    self._check_mask(reduction.mask)
                    if not isinstance(reduction.mean, bool):
                        raise TypeError(f"Expected mean to be True or False, got {reduction.mean!r}.")
                    results.append(reduction)
                    continue
                if isinstance(reduction, statistics.ValueNorms):
                    reduction.v = self._check_values(reduction.v)
                results.append(make_total(reduction, ring, self._lse))
            return {"statistics": described}

        agree(self._group, compute, ("statistics",))
        totals = [each for each in results if isinstance(each, Total)]
        if totals:
            for rows, cols, problem in self._blocks(ring):
                add_block(problem, self._lse[:, :, rows.rows], totals, rows, cols)
        return [self._finish(each) for each in results]

    def _finish(self, each: Total | Mass) -> Any:
        """Return a result, with rows in the order of this rank's tokens."""
        if isinstance(each, Total):
            result = each.result()
            if not each.per_query:
                return result
            if isinstance(result, TopKeys):
                return TopKeys(*map(self._in_own_order, result))
            return self._in_own_order(result)
        total, has_keys = self._masses(each.mask)
        if not each.mean:
            return self._in_own_order(total)
        sums = torch.stack(
            (torch.where(has_keys, total, 0.0).sum(-1), has_keys.sum(-1).to(total))
        )  # [2, b, h]
        all_reduce(sums, self._group)
        return sums[0] / sums[1].clamp(min=1)

    def _masses(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return `masses` in the order of positions."""
        whole = self.problem
        inside = guard(whole.under(mask))
        both = whole.within(mask)
        total = torch.zeros_like(self._lse)
        has_keys = torch.zeros_like(self._lse, dtype=torch.bool)
        for rows, cols, part in self._blocks(self._ring(both)):
            problem = block(whole, part.q, part.k, part.v, rows, cols)
            kept = block(inside, part.q, part.k, part.v, rows, cols).mask
            kept = Full() if kept is None else kept
            sums, found = statistics.masses(problem, self._lse[:, :, rows.rows], kept)
            total[:, :, rows.rows] += sums
            has_keys[:, :, rows.rows] |= found
        raise_errors(inside, self._group)
        return total.clamp_(max=1.0), has_keys

    # -- files -------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a shard for each rank, and an index. `AttentionMap.open` opens the index as one map.

        The index is written at `path`, last, and the shards beside it, as NAME.SAVE.1-of-N.safetensors. Shard
        r has the r-th part of the sequence in the order of positions: in other layouts, tokens are exchanged
        first. A save at the same path replaces the one before when it is complete. All machines have to see
        the folder at the same path.

        Args:
            path: The index.

        Raises:
            ValueError: If the mask has a `Rule`, whose function can't be saved, or the path differs.
            OSError: If a rank can't write. Every rank raises, and the files before stay.
        """
        path = Path(os.fspath(path))
        problem = self.problem
        lse = self._lse.new_zeros(1).expand(*self._lse.shape[:2], problem.shape.t)
        stored = StoredMap(problem, lse, self.tokens, self.provenance)

        def compute() -> dict[str, Any]:
            self._check_unchanged()
            check_path(path)
            encode_index(stored, "{}")  # raises an error for what can't be saved
            return {"path": str(path), "save": token_hex(4)}

        save = agree(self._group, compute, ("path",))[0]["save"]
        tensors = {"q": self._q, "k": self._k, "lse": self._lse}
        first = {name: x.movedim(2, 0) for name, x in tensors.items()}  # [n, b, h, …]
        write_shards(path, stored, first, self._parts, self.rank, self._group, save)

    # -- rounds ------------------------------------------------------------------------------------

    def _ring(self, whole: Problem) -> Ring:
        """Return the ring of a problem of the whole sequence."""
        return Ring(self._group, self.rank, self._parts, guard(whole))

    def _blocks(self, ring: Ring) -> Iterator[tuple[Part, Part, Problem]]:
        """Yield the parts of queries and keys of each block of this rank, and its problem, in one round."""
        for rows, cols, packed in self._rounds(ring, self._k, self._k[..., :0]):
            yield rows, cols, block(ring.whole, self._q[:, :, rows.rows], *packed, rows, cols)

    def _rounds(self, ring: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[Part, Part, tuple[Tensor, Tensor]]]:
        """Yield the parts of queries and keys of each block of this rank, with its keys and values.

        Args:
            ring: The ranks, and the problem that says how far keys travel.
            k: This rank's keys `[b, g, n, d]`, in the order of positions.
            v: Values `[b, g, n, w]` that travel with them.

        Yields:
            The parts, and k `[b, g, s, d]` and v `[b, g, s, w]` of the second one.
        """
        packed: Packed | None = Packed.of(ring, k, v)
        for step in range(ring.last_step + 1):
            assert packed is not None
            received, transfers = pass_on(ring, step, packed, k)
            pending = Pending(transfers, ring.group)
            try:
                owner = ring.owner(step)
                for rows, n in ring.blocks(owner, step):
                    yield rows, ring.parts[owner][n], packed.parts[n]
            finally:  # also after an error: the next call must not receive this message
                pending.wait()
            packed = received
        raise_errors(ring.whole, ring.group)

    def _mix_heads(self, share: Tensor) -> Tensor:
        """Return the product `[b, r, s]` of shares `[b, r, t]` and the mean of the heads' weights."""

        def compute() -> dict[str, Any]:
            self._check_unchanged()
            return {"rows": describe(share)}

        agree(self._group, compute, ("rows",))
        product = share.new_zeros(*share.shape[:2], self.shape[3])
        for rows, cols, problem in self._blocks(self._ring(self.problem)):
            part = share[:, :, columns(rows, share.device)]
            mixed = statistics.mix_heads(problem, self._lse[:, :, rows.rows], part)
            product[:, :, columns(cols, share.device)] += mixed
        all_reduce(product, self._group)
        return product

    def _compute_lse(self) -> Tensor:
        """Return the log-sum-exp `[b, h, n]`, in the order of positions."""
        problem = self.problem
        lse = self._q.new_full(self._q.shape[:3], -math.inf, dtype=torch.float64)
        if problem.sink is not None:
            lse[:] = problem.sink.to(lse)[:, None]
        for rows, _, part in self._blocks(self._ring(problem)):
            into = lse[:, :, rows.rows]
            torch.logaddexp(into, kernels.statistics(part).lse.to(lse), out=into)
        return lse.to(problem.dtype)

    # -- checks ------------------------------------------------------------------------------------

    def _agree(self, compute: Callable[[], T]) -> T:
        """Return what a function of checks returns. All ranks call it, and an error is raised on all."""
        results: list[T] = []

        def check() -> dict[str, Any]:
            results.append(compute())
            return {}

        agree(self._group, check, ())
        return results[0]

    def _check_mask(self, mask: Mask) -> Mask:
        """Raise an error unless a mask fits the whole sequence."""
        if mask is None:
            raise TypeError("Expected a mask for mass, got None. Use Full() for the sum of all weights.")
        self._check_unchanged()
        self.problem.within(mask)
        return mask

    def _check_values(self, v: Tensor) -> Tensor:
        """Return the values of this rank's tokens in the order of positions; raise ValueError for others."""
        expected = self._k.shape[:3]
        if v.dim() != 4 or v.shape[:3] != expected:
            b, g, n = expected
            raise ValueError(
                f"Expected v to be [b, g, n, w] = [{b}, {g}, {n}, w], the values of this rank's tokens, got "
                f"{sizes(v)}."
            )
        return self._in_order(v)

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if q or k was changed in place."""
        if self._versions and self._versions != _versions(self._q, self._k):
            raise RuntimeError(
                "q or k was changed in place since this map was made, so its weights are lost. Read the map "
                "before the change, or pass a copy to attention_with_map (q.clone())."
            )

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        return (
            f"ShardedMap([b={b}, h={h}, t={t}, s={s}], mask={self.problem.mask!s}, rank {self.rank} of "
            f"{self.mesh.size()} with {self._q.shape[2]} tokens, "
            f"{str(self._q.dtype).removeprefix('torch.')} on {self._q.device}, {amount(self.nbytes)})"
        )


def _check_tensors(q: Any, k: Any, lse: Any) -> int:
    """Check this rank's tensors, and return the number of its tokens."""
    problem = _problem_of(q, k)
    b, h, _, t, s, _, _ = problem.shape
    if t != s:
        raise ValueError(
            f"Expected as many queries as keys on a rank, got q {sizes(q)} and k {sizes(k)}. Distributed "
            "attention is self-attention."
        )
    if lse is not None and (not isinstance(lse, Tensor) or tuple(lse.shape) != (b, h, t)):
        got = sizes(lse) if isinstance(lse, Tensor) else kind(lse)
        raise ValueError(f"Expected lse to be [b, h, n] = [{b}, {h}, {t}], got {got}.")
    return t


def _problem_of(q: Any, k: Any) -> Problem:
    """Return the problem of this rank's queries and keys alone, without a mask."""
    return Problem.of(q, k, k[..., :0] if isinstance(k, Tensor) and k.dim() else k)


def _whole(q: Tensor, k: Tensor, tokens: int, **options: Any) -> Problem:
    """Return the problem of the whole sequence, without its queries and keys."""
    empty = [x.detach().new_zeros(1).expand(*x.shape[:2], tokens, x.shape[3]) for x in (q, k, k[..., :0])]
    return Problem.of(*empty, offset=0, **options)


def _index(numbers: Tensor) -> slice | Tensor:
    """Return numbers `[n]` as a slice, which copies nothing, if they are consecutive."""
    if (
        not len(numbers)
        or int(numbers[-1] - numbers[0]) != len(numbers) - 1
        or bool((numbers.diff() != 1).any())
    ):
        return numbers
    return slice(int(numbers[0]), int(numbers[-1]) + 1)


def _part(positions: Tensor) -> Part:
    """Return ascending positions `[n]` as a part."""
    first, last = int(positions[0]), int(positions[-1])
    is_run = last - first + 1 == len(positions)
    return Part(0, range(first, last + 1) if is_run else positions)


def _describe(reductions: Sequence[Reduction]) -> Described:
    """Return statistics and their arguments, which have to be the same on every rank, as text."""
    texts, contents = [], []
    for reduction in reductions:
        # Each rank has its own values.
        given = {name: value for name, value in vars(reduction).items() if name != "v"}
        described = {
            name: describe(value) if isinstance(value, Tensor | Value) else Described(repr(value), "")
            for name, value in given.items()
        }
        arguments = ", ".join(f"{name}={each.text}" for name, each in described.items())
        texts.append(f"{type(reduction).__name__}({arguments})")
        contents += [each.content for each in described.values()]
    return Described(", ".join(texts), " ".join([*texts, *contents]))


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    """Return how often each tensor was changed in place; 0 in inference mode."""
    return tuple(0 if x.is_inference() else x._version for x in tensors)
