"""The key/value cache of an attention layer, with its offset and its mask."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Mask
from manyheads.shapes import kind, sizes, whole


class Cache:
    """Keys and values of one attention layer during generation (Shazeer 2019, arXiv:1911.02150).

    Args:
        length: The largest number of tokens. Memory for all of them is allocated at the first use. If None,
            the cache grows.
        mask: The mask between new queries and all keys, `Causal()` if None. A mask that is given to the layer
            is combined with it by `&`.
        votes: The number of last queries whose weights are kept too. From these, `received` computes the
            attention that each key received, for deciding which keys to evict (Li et al. 2024,
            arXiv:2404.14469).

    Attributes:
        offset: The number of tokens in the cache, which is the position of the next query.

    Raises:
        TypeError: If the mask isn't a `Mask`, or length or votes isn't an integer.
        ValueError: If length or votes is less than 1.
    """

    def __init__(
        self, length: int | None = None, *, mask: Mask | None = None, votes: int | None = None
    ) -> None:
        self.length = None if length is None else whole(length, "the length of a Cache", least=1)
        self.votes = None if votes is None else whole(votes, "votes", least=1)
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"Expected the mask of a Cache to be a Mask, got {kind(mask)}.")
        self.mask: Mask = Causal() if mask is None else mask
        self.clear()

    def clear(self) -> None:
        """Remove all tokens. Maps of earlier steps can still be read."""
        self.offset = 0
        self._k: Tensor | None = None  # [b, g, capacity, d]
        self._v: Tensor | None = None  # [b, g, capacity, w]
        self._rows: Tensor | None = None  # [b, h, n, capacity]: the query at position i has row i % n
        self._voters: dict[int, int] = {}  # by row, the position of the query whose weights it has

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values.

        Args:
            k: New keys `[b, g, n, d]`.
            v: New values `[b, g, n, w]`.

        Returns:
            All keys `[b, g, offset, d]` and values `[b, g, offset, w]`.

        Raises:
            TypeError: If k or v isn't a tensor.
            ValueError: If they exceed the length, don't fit those in the cache, or require gradients.
        """
        k, v = self.write(k, v)
        self.offset = k.shape[2]
        return k, v

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values without advancing `offset`. The caller advances it if the step succeeds.

        Args:
            k: New keys `[b, g, n, d]`.
            v: New values `[b, g, n, w]`.

        Returns:
            All keys `[b, g, offset + n, d]` and values `[b, g, offset + n, w]`.

        Raises:
            TypeError: If k or v isn't a tensor.
            ValueError: If they exceed the length, don't fit those in the cache, or require gradients.
        """
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise TypeError(f"Expected {name} to be a tensor [b, g, n, …], got {kind(x)}.")
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(f"Expected k [b, g, n, d] and v [b, g, n, w], got {sizes(k)} and {sizes(v)}.")
        n = k.shape[2]
        if self.length is not None and self.offset + n > self.length:
            raise ValueError(
                f"The Cache has {self.offset} of {self.length} tokens, got {n} more. Increase its length, or "
                "use Cache(), which grows."
            )
        for name, new, old in (("k", k, self._k), ("v", v, self._v)):
            if old is None:
                continue
            same_shape = new.shape[:2] == old.shape[:2] and new.shape[3] == old.shape[3]
            if not same_shape or new.dtype != old.dtype:
                raise ValueError(
                    f"Expected {name} to match {sizes(old)} of {old.dtype} in the Cache, got {sizes(new)} of "
                    f"{new.dtype}. Use one Cache for each layer and batch."
                )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "A Cache keeps no gradients, got keys or values that require them. Generate under "
                "torch.no_grad() or torch.inference_mode()."
            )
        end = self.offset + n
        if self._k is None or self._v is None or self._k.shape[2] < end:
            capacity = self.length or max(end, 0 if self._k is None else 2 * self._k.shape[2])
            self._k = _enlarge(self._k, (*k.shape[:2], capacity, k.shape[3]), k)
            self._v = _enlarge(self._v, (*v.shape[:2], capacity, v.shape[3]), v)
        # Writing to .data doesn't increase the version counter, by which maps detect changes. Maps of earlier
        # steps share this memory, but only read keys before `offset`, which never change.
        self._k.data[:, :, self.offset : end] = k
        self._v.data[:, :, self.offset : end] = v
        return self._k[:, :, :end], self._v[:, :, :end]

    def vote(self, amap: AttentionMap) -> None:
        """Keep the weights of the last queries of a map. A layer calls it for each map.

        Args:
            amap: The map `[b, h, t, s]` over all keys of the cache.

        Raises:
            TypeError: If it isn't a map.
            ValueError: If the map doesn't fit the cache's keys, sequences or heads, or it keeps no votes.
        """
        if not isinstance(amap, AttentionMap):
            raise TypeError(f"Expected an AttentionMap, got {kind(amap)}.")
        b, h, t, s = amap.shape
        if s != self.offset:
            raise ValueError(f"Expected a map of the {self.offset} keys of the Cache, got one of {s} keys.")
        votes = self._last_queries()
        b_cached, g, capacity = (0, 0, 0) if self._k is None else self._k.shape[:3]
        earlier = self._rows
        matches = g and b == b_cached and h % g == 0 and (earlier is None or h == earlier.shape[1])
        if not matches:
            heads = g if earlier is None else earlier.shape[1]
            raise ValueError(
                f"Expected a map of {b_cached} sequences and {heads} heads, as in the Cache, got b = {b} and "
                f"h = {h}."
            )
        count = min(t, votes)
        # With a single query, the column sums are its weights. The kernel may have computed them already.
        rows = amap.received()[:, :, None] if t == 1 else amap[:, :, t - count :]  # [b, h, count, s]
        if earlier is None or earlier.shape[3] < s:
            self._rows = _enlarge(earlier, (b, h, min(votes, capacity), capacity), rows)
        buffer = self._rows
        assert buffer is not None
        indices = [i % buffer.shape[2] for i in range(s - count, s)]
        buffer.data[:, :, indices, :s] = rows.detach()
        self._voters |= zip(indices, range(s - count, s), strict=True)

    def received(self, last: int | None = None) -> Tensor:
        """Return the attention that each key received from the last queries.

        It equals `AttentionMap.received(last=…)` of the map of the whole generation.

        Args:
            last: The number of queries, `votes` if None.

        Returns:
            The sums of weights `[b, h, offset]`.

        Raises:
            TypeError: If last isn't an integer.
            ValueError: If last exceeds `votes`, or the weights of some of these queries weren't kept.
        """
        votes = self._last_queries()
        last = votes if last is None else whole(last, "last", least=1)
        if last > votes:
            raise ValueError(f"Expected last to be at most votes = {votes}, got {last}.")
        if self._rows is None:
            raise ValueError("No votes in the Cache yet. Call received() after a layer has used it.")
        rows, size = range(max(self.offset - last, 0), self.offset), self._rows.shape[2]
        missing = [i for i in rows if self._voters.get(i % size) != i]
        if missing:
            raise ValueError(
                f"Of the last {len(rows)} queries {len(missing)} have no votes in the Cache, the first at "
                f"position {missing[0]}. Reduce `last`, or append keys with a layer, which records votes."
            )
        return self._rows[:, :, [i % size for i in rows], : self.offset].sum(2)

    def _last_queries(self) -> int:
        if self.votes is None:
            raise ValueError(
                "The Cache keeps no votes. Create it with Cache(votes=w), for the last w queries."
            )
        return self.votes

    def __len__(self) -> int:
        """Return the number of tokens in the cache."""
        return self.offset

    def __repr__(self) -> str:
        """Describe the cache."""
        length = "growing" if self.length is None else f"of {self.length}"
        return f"Cache({self.offset} tokens, {length}, {self.mask})"


def _enlarge(old: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor of zeros that begins with the content of `old`, with the dtype and device of `like`."""
    with torch.inference_mode(False):  # an inference tensor couldn't be written in other modes
        larger = torch.zeros(shape, dtype=like.dtype, device=like.device)
    if old is not None:
        larger[tuple(map(slice, old.shape))] = old
    return larger
