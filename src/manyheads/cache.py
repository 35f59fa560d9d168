"""The keys and values of what was already read: one layer's cache. It owns its offset and its mask."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Mask
from manyheads.shapes import kind, sizes, whole


class Cache:
    """Keys and values of one attention layer while a model generates.

    `Cache(length)` is preallocated for `length` tokens at its first use, and refuses more;
    `Cache()` grows. `offset` is the number of tokens held: the position of the next query. `mask` is
    what holds between new queries and all keys, causal unless said otherwise; a mask given to the
    layer is added to it with `&`. Incremental decoding: Shazeer 2019 (arXiv:1911.02150).

    `Cache(votes=w)` keeps the weights of the last w queries too, from which `received` tells how much each
    key is looked at: what decides which keys may be dropped (Li et al. 2024, arXiv:2404.14469).

    TypeError or ValueError for another length or number of votes, TypeError for what is no mask.
    """

    def __init__(
        self, length: int | None = None, *, mask: Mask | None = None, votes: int | None = None
    ) -> None:
        self.votes = (
            None if votes is None else whole(votes, "votes, the number of queries that vote,", least=1)
        )
        self._rows: Tensor | None = None  # [b, h, n, room]: of the query at position i in row i % n
        self._voters: dict[int, int] = {}  # by row: the position of the query whose weights it holds
        self.length = None if length is None else whole(length, "the length of a Cache", least=1)
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"the mask of a Cache must be a mask of manyheads, and {kind(mask)} came.")
        self.mask: Mask = Causal() if mask is None else mask
        self.offset = 0
        self._k: Tensor | None = None  # [b, g, room, d]
        self._v: Tensor | None = None  # [b, g, room, w]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys k `[b, g, n, d]` and values v `[b, g, n, w]`; all of them so far, `[b, g, offset, …]`.

        Raises ValueError if they don't fit the length, or the batch, heads, width or dtype so far, or ask
        for gradients; TypeError for what are no tensors.
        """
        k, v = self.write(k, v)
        self.offset = k.shape[2]
        return k, v

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`append` without moving the offset, which is left to whoever makes sure that all went well.

        Arguments as `append`, k `[b, g, n, d]` and v `[b, g, n, w]`, and same errors, TypeError and
        ValueError.
        """
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise TypeError(f"a Cache takes tensors [b, g, n, …], and {kind(x)} came as {name}.")
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"a Cache takes k [b, g, n, d] and v [b, g, n, w], and {sizes(k)} and {sizes(v)} came."
            )
        n = k.shape[2]
        if self.length is not None and self.offset + n > self.length:
            raise ValueError(
                f"the Cache holds {self.offset} of {self.length} tokens, and {n} more came: "
                "make it longer, or use Cache(), which grows."
            )
        if self._k is not None and self._v is not None:
            for name, new, old in (("k", k, self._k), ("v", v, self._v)):
                if (new.shape[:2], new.shape[3:]) != (
                    old.shape[:2],
                    old.shape[3:],
                ) or new.dtype != old.dtype:
                    raise ValueError(
                        f"the Cache holds {name} {sizes(old)} of {old.dtype}, and {sizes(new)} of "
                        f"{new.dtype} came: one cache serves one layer and one batch."
                    )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "a Cache keeps no gradients, and keys that ask for one came: wrap generation in "
                "torch.no_grad() or torch.inference_mode()."
            )
        end = self.offset + n
        self._k, self._v = self._room(self._k, k, end), self._room(self._v, v, end)
        # Written through .data, past the version counter: maps of earlier steps look at what comes
        # before `offset`, which never changes.
        self._k.data[:, :, self.offset : end] = k
        self._v.data[:, :, self.offset : end] = v
        return self._k[:, :, :end], self._v[:, :, :end]

    def vote(self, amap: AttentionMap) -> None:
        """Keep the weights of the last queries of amap, `[b, h, t, s]`, which looked at all that is held.

        A layer does so by itself. TypeError for what is no map, ValueError for one of another number of
        sequences, heads or keys, or where no votes are kept.
        """
        if not isinstance(amap, AttentionMap):
            raise TypeError(f"a Cache takes votes from an AttentionMap, and {kind(amap)} came.")
        b, h, t, s = amap.shape
        if s != self.offset:
            raise ValueError(f"the Cache holds {self.offset} keys, and a map of s = {s} keys came to vote.")
        count, held = min(t, self._votes()), self._k
        before = None if self._rows is None else self._rows.shape[1]
        if held is None or b != held.shape[0] or h % held.shape[1] or before not in (None, h):
            what = (
                "no keys"
                if held is None
                else f"{held.shape[0]} sequences and {before or held.shape[1]} heads"
            )
            raise ValueError(f"the Cache holds {what}, and a map of b = {b} and h = {h} came to vote.")
        # One query's weights are what it gives, which the kernel may have found beside the output.
        rows = amap.received()[:, :, None] if t == 1 else amap[:, :, t - count :]  # [b, h, count, s]
        room = self._rows
        if room is None or room.shape[3] < s:
            size = held.shape[2]
            with torch.inference_mode(False):  # so that it can be written in any mode
                room = torch.zeros(b, h, min(self._votes(), size), size, dtype=rows.dtype, device=rows.device)
            if self._rows is not None:
                room[:, :, : self._rows.shape[2], : self._rows.shape[3]] = self._rows
            self._rows = room
        places = [i % room.shape[2] for i in range(s - count, s)]
        room.data[:, :, places, :s] = rows.detach()
        self._voters |= zip(places, range(s - count, s), strict=True)

    def received(self, last: int | None = None) -> Tensor:
        """What each key got from the last queries, all that vote or so many of them: `[b, h, offset]`.

        It is `AttentionMap.received(last=…)` of everything so far. ValueError where some of these queries
        didn't vote, or for more of them than votes are kept of; TypeError for what is no number.
        """
        last = (
            self._votes() if last is None else whole(last, "last, the number of queries that vote,", least=1)
        )
        if last > self._votes():
            raise ValueError(f"the Cache keeps votes of {self._votes()} queries, and last={last} came.")
        if self._rows is None:
            raise ValueError("no query has voted in this Cache yet: received comes after a layer used it.")
        rows, size = range(max(self.offset - last, 0), self.offset), self._rows.shape[2]
        missing = [i for i in rows if self._voters.get(i % size) != i]
        if missing:
            raise ValueError(
                f"of the last {len(rows)} queries {len(missing)} didn't vote, first the one at position "
                f"{missing[0]}: ask for fewer, or let a layer use the Cache, which votes."
            )
        return self._rows[:, :, [i % size for i in rows], : self.offset].sum(2)

    def _votes(self) -> int:
        if self.votes is None:
            raise ValueError(
                "this Cache keeps no votes: make it with Cache(votes=w), for the last w queries."
            )
        return self.votes

    def _room(self, held: Tensor | None, new: Tensor, end: int) -> Tensor:
        """A buffer with room for `end` tokens: the same one, or a larger copy (it doubles)."""
        if held is not None and held.shape[2] >= end:
            return held
        room = self.length or max(end, 2 * held.shape[2] if held is not None else 0)
        with torch.inference_mode(False):  # so that it can be written in any mode
            larger = torch.empty(*new.shape[:2], room, new.shape[3], dtype=new.dtype, device=new.device)
        if held is not None:
            larger[:, :, : self.offset] = held[:, :, : self.offset]
        return larger

    def clear(self) -> None:
        """Forget everything; earlier maps keep what they look at."""
        self.offset, self._k, self._v, self._rows = 0, None, None, None
        self._voters = {}

    def __len__(self) -> int:
        return self.offset

    def __repr__(self) -> str:
        room = "growing" if self.length is None else f"of {self.length}"
        return f"Cache({self.offset} tokens, {room}, {self.mask})"
