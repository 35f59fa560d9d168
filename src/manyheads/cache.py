"""The key/value cache of an attention layer, with its offset, its mask, and the keys that it has kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from manyheads.biases import Bias, BiasAtPositions
from manyheads.maps import AttentionMap
from manyheads.masks import AtPositions, Causal, Mask
from manyheads.shapes import kind, sizes, whole

Part = TypeVar("Part", Mask, Bias)


class Cache:
    """Keys and values of one attention layer during generation (Shazeer 2019, arXiv:1911.02150).

    Args:
        length: The largest number of keys. Memory for all of them is allocated at the first use. If None,
            the cache grows.
        mask: The mask between new queries and all keys, `Causal()` if None. A mask that is given to the layer
            is combined with it by `&`.
        votes: The number of last queries whose weights are kept too, or "all" for the sums of the weights of
            all queries. From these, `received` computes the attention that each key received, by which the
            policies of `keep` choose (Zhang et al. 2023, arXiv:2306.14048; Li et al. 2024, arXiv:2404.14469).

    Attributes:
        offset: The number of tokens that were appended, which is the position of the next query. It counts
            tokens whose keys were dropped, unlike `len(cache)`.

    Raises:
        TypeError: If the mask isn't a `Mask`, or length or votes isn't an integer.
        ValueError: If length or votes is less than 1.
    """

    def __init__(
        self,
        length: int | None = None,
        *,
        mask: Mask | None = None,
        votes: int | Literal["all"] | None = None,
    ) -> None:
        self.length = None if length is None else whole(length, "the length of a Cache", least=1)
        self.votes = votes if votes is None or votes == "all" else whole(votes, "votes", least=1)
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"Expected the mask of a Cache to be a Mask, got {kind(mask)}.")
        self.mask: Mask = Causal() if mask is None else mask
        self.clear()

    def clear(self) -> None:
        """Remove all tokens. Maps of earlier steps can still be read."""
        self.offset = 0
        self._dropped = 0  # the number of keys that each head has dropped
        self._kept: Tensor | None = None  # [b or 1, g or 1, n]: the positions of the keys of the last `keep`
        self._k: Tensor | None = None  # [b, g, capacity, d]
        self._v: Tensor | None = None  # [b, g, capacity, w]
        # [b, h, n, capacity]. With votes=w, there are n ≤ w rows, and row i % n has the weights of the query
        # at position i. With votes="all", the only row has the sums over all queries.
        self._rows: Tensor | None = None
        self._voters: dict[int, int] = {}  # by row, the position of the query whose weights it has
        self._voted = 0  # with votes="all", the number of queries in the sums

    # -- appending -----------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values.

        If keys were dropped, call attention with `mask=cache.place(cache.mask, h)`, as a layer does.

        Args:
            k: New keys `[b, g, n, d]`.
            v: New values `[b, g, n, w]`.

        Returns:
            All keys `[b, g, len(cache), d]` and values `[b, g, len(cache), w]`.

        Raises:
            TypeError: If k or v isn't a tensor.
            ValueError: If they exceed the length, don't fit those in the cache, or require gradients.
        """
        n = k.shape[2] if isinstance(k, Tensor) and k.dim() == 4 else 0
        k, v = self.write(k, v)
        self.offset += n
        return k, v

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values without advancing `offset`. The caller advances it if the step succeeds.

        Args:
            k: New keys `[b, g, n, d]`.
            v: New values `[b, g, n, w]`.

        Returns:
            All keys `[b, g, len(cache) + n, d]` and values `[b, g, len(cache) + n, w]`.

        Raises:
            TypeError: If k or v isn't a tensor.
            ValueError: If they exceed the length, don't fit those in the cache, or require gradients.
        """
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise TypeError(f"Expected {name} to be a tensor [b, g, n, …], got {kind(x)}.")
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(f"Expected k [b, g, n, d] and v [b, g, n, w], got {sizes(k)} and {sizes(v)}.")
        n, held = k.shape[2], len(self)
        if self.length is not None and held + n > self.length:
            raise ValueError(
                f"The Cache has {held} of {self.length} tokens, got {n} more. Increase its length, drop keys "
                "with cache.keep(policy), or use Cache(), which grows."
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
        end = held + n
        if self._k is None or self._v is None or self._k.shape[2] < end:
            capacity = self.length or max(end, 0 if self._k is None else 2 * self._k.shape[2])
            self._k = _enlarge(self._k, (*k.shape[:2], capacity, k.shape[3]), k)
            self._v = _enlarge(self._v, (*v.shape[:2], capacity, v.shape[3]), v)
        # Writing to .data doesn't increase the version counter, by which maps detect changes. Maps of earlier
        # steps share this memory, but only read keys before these columns, which never change.
        self._k.data[:, :, held:end] = k
        self._v.data[:, :, held:end] = v
        return self._k[:, :, :end], self._v[:, :, :end]

    # -- the keys in the cache -------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor:
        """The keys in the cache, `[b, g, len(cache), d]`; a view that mustn't be changed."""
        return self._contents(self._k)

    @property
    def values(self) -> Tensor:
        """The values in the cache, `[b, g, len(cache), w]`; a view that mustn't be changed."""
        return self._contents(self._v)

    @property
    def positions(self) -> Tensor:
        """The positions of the keys in the text, int64 `[b, g, len(cache)]`, ascending."""
        b, g, n, _ = self.keys.shape
        return self._positions(n).expand(b, g, n)

    def place(self, part: Part, heads: int | None = None, new: int = 0) -> Part:
        """Return a mask or bias whose column j is for the key that is in column j of the cache.

        Masks and biases use the positions of the whole text, and after `keep` the columns of the cache have
        other positions. If nothing was dropped, the part is returned as it is.

        Args:
            part: The mask or bias, written for all tokens of the text, as if none were dropped.
            heads: The number h of query heads, that of the key heads if None.
            new: The number of keys that were written but aren't counted in `offset` yet.

        Returns:
            The mask or bias.

        Raises:
            TypeError: If it is neither a mask nor a bias.
            ValueError: If the heads aren't a multiple of the key heads, or a bias requires a gradient.
        """
        if not isinstance(part, Mask | Bias):
            raise TypeError(f"Expected a Mask or a Bias to place, got {kind(part)}.")
        g = self.keys.shape[1]
        h = g if heads is None else whole(heads, "heads", least=1)
        if h % g:
            raise ValueError(f"Expected heads to be a multiple of the Cache's {g} key heads, got {h}.")
        if self._kept is None:
            return part
        positions, tokens = self._positions(len(self) + new), self.offset + new
        if isinstance(part, Mask):
            return AtPositions(part, positions, tokens, h // g)
        if torch.is_grad_enabled() and part.tensor().requires_grad:
            raise ValueError(
                "A Cache keeps no gradients, got a bias that requires one. Generate under torch.no_grad()."
            )
        return BiasAtPositions(part, positions, tokens, h // g)

    def _contents(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise ValueError("The Cache has no keys yet. Append some first, or run its layer.")
        return buffer[:, :, : len(self)]

    def _positions(self, n: int) -> Tensor:
        """Return the positions of the first n columns, `[b or 1, g or 1, n]`."""
        assert self._k is not None
        kept = torch.arange(0)[None, None] if self._kept is None else self._kept[:, :, :n]
        later = torch.arange(kept.shape[2], n, device=self._k.device) + self._dropped
        return torch.cat((kept.to(self._k.device), later.expand(*kept.shape[:2], -1)), 2)

    # -- dropping keys ---------------------------------------------------------------------------------

    def keep(self, policy: Callable[[Cache], Tensor]) -> Tensor:
        """Drop all keys but those that a policy chooses, and free their memory.

        The kept keys stay in order and keep their positions: rotations, masks, biases and `offset` are those
        of the whole text. Maps of earlier steps stay readable; they hold the memory of the keys that they
        attend to. `manyheads.policies` has policies and measures what they cost.

        Args:
            policy: A function of this cache that returns which of its keys to keep: integers `[n]` between 0
                and len(cache) − 1 for all heads, or `[g, n]`, or `[b, g, n]`, in any order. It can read
                `cache.received()` `[b, h, s]`, `cache.keys` and `cache.values` `[b, g, s, …]`, and
                `cache.positions` `[b, g, s]`, where s = len(cache).

        Returns:
            The positions of the keys that are kept, `[b, g, n]`.

        Raises:
            TypeError: If the policy isn't a function, or doesn't return a tensor of integers.
            ValueError: If the cache is empty, or the policy's result has the wrong shape, contains a number
                out of range or the same key twice, or the policy has changed the cache.
        """
        if isinstance(policy, type) or not callable(policy):
            hint = f" Create it first: {policy.__name__}(…)." if isinstance(policy, type) else ""
            raise TypeError(f"Expected the policy to be a function of the Cache, got {_name(policy)}.{hint}")
        b, g, s, _ = self.keys.shape
        if s == 0:
            raise ValueError("The Cache has no keys to choose from. Append some first, or run its layer.")
        state = self._k, self._v, self.offset, self._dropped
        chosen = policy(self)
        if any(now is not before for now, before in zip((self._k, self._v), state, strict=False)) or (
            (self.offset, self._dropped) != state[2:]
        ):
            raise ValueError(f"Expected {_name(policy)} to leave the Cache unchanged, but it was changed.")
        columns = _check_chosen(chosen, _name(policy), b, g, s)  # [b or 1, g or 1, n], ascending
        assert self._k is not None
        assert self._v is not None
        columns = columns.to(self._k.device)
        n = columns.shape[2]
        if n < s:
            positions = self._positions(s)
            sizes_of_both = [max(x, y) for x, y in zip(columns.shape[:2], positions.shape[:2], strict=True)]
            kept = positions.expand(*sizes_of_both, s).gather(2, columns.expand(*sizes_of_both, n))
            capacity = self.length or max(n, min(2 * n, self._k.shape[2]))  # room for the next tokens
            rows = self._rows
            if rows is not None:
                heads = rows.shape[1] // g  # query heads per key head
                by_row = columns.repeat_interleave(heads, 1) if columns.shape[1] > 1 else columns
                rows = _select(rows.mT, by_row, capacity).mT
            # Each new buffer exists before the first is assigned: a failure leaves the cache unchanged.
            k, v = _select(self._k, columns, capacity), _select(self._v, columns, capacity)
            self._k, self._v, self._rows = k, v, rows
            self._kept = kept
            self._dropped += s - n
        return self.positions

    # -- votes -----------------------------------------------------------------------------------------

    def vote(self, amap: AttentionMap) -> None:
        """Keep the weights of a map's last queries. A layer calls this for the map of each step.

        Args:
            amap: The map `[b, h, t, s]` over all keys of the cache.

        Raises:
            TypeError: If it isn't a map.
            ValueError: If the map doesn't fit the cache's keys, sequences or heads, or it keeps no votes.
        """
        if not isinstance(amap, AttentionMap):
            raise TypeError(f"Expected an AttentionMap, got {kind(amap)}.")
        b, h, t, s = amap.shape
        if s != len(self):
            raise ValueError(f"Expected a map of the {len(self)} keys of the Cache, got one of {s} keys.")
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
        if votes == "all":
            sums = amap.received()[:, :, None].detach()  # [b, h, 1, s]
            if earlier is None or earlier.shape[3] < s:
                self._rows = _enlarge(earlier, (b, h, 1, capacity), sums)
            assert self._rows is not None
            self._rows.data[:, :, :, :s] += sums
            self._voted += t
            return
        count = min(t, votes)
        # With a single query, the column sums are its weights. The kernel may have computed them already.
        rows = amap.received()[:, :, None] if t == 1 else amap[:, :, t - count :]  # [b, h, count, s]
        # Until there are as many rows as votes, row i has the query at position i, so rows can be added.
        size = 0 if earlier is None else earlier.shape[2]
        if size < min(votes, self.offset):
            size = min(votes, max(self.offset, capacity, 2 * size))
        if earlier is None or earlier.shape[2] < size or earlier.shape[3] < s:
            self._rows = _enlarge(earlier, (b, h, size, capacity), rows)
        buffer = self._rows
        assert buffer is not None
        positions = range(self.offset - count, self.offset)
        indices = [i % size for i in positions]
        buffer.data[:, :, indices, :s] = rows.detach()
        buffer.data[:, :, indices, s:] = 0.0
        self._voters |= zip(indices, positions, strict=True)

    def received(self, last: int | None = None) -> Tensor:
        """Return the attention that each key received from the last queries, or from all with votes="all".

        If no keys were dropped, it equals `AttentionMap.received(last=…)` of the map of the whole generation.

        Args:
            last: The number of queries, `votes` if None.

        Returns:
            The sums of weights `[b, h, len(cache)]`.

        Raises:
            TypeError: If last isn't an integer.
            ValueError: If last exceeds `votes`, or the weights of some of these queries weren't kept.
        """
        votes = self._last_queries()
        if votes == "all":
            if last is not None and whole(last, "last", least=1) < self.offset:
                raise ValueError(
                    f'Expected last to be None, as votes="all" keeps only sums over all queries, got {last}. '
                    f"Create the Cache with votes={last}."
                )
            if self._rows is None:
                raise ValueError("No votes in the Cache yet. Call received() after a layer has used it.")
            if self._voted != self.offset:
                raise ValueError(
                    f"Expected votes of all {self.offset} queries, got {self._voted}. Append keys with a "
                    "layer, which records votes."
                )
            return self._rows[:, :, 0, : len(self)].clone()
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
        return self._rows[:, :, [i % size for i in rows], : len(self)].sum(2)

    def _last_queries(self) -> Any:
        if self.votes is None:
            raise ValueError(
                "The Cache keeps no votes. Create it with Cache(votes=w), for the last w queries, or with "
                'votes="all".'
            )
        return self.votes

    def __len__(self) -> int:
        """Return the number of keys in the cache, without those that were dropped."""
        return self.offset - self._dropped

    def __repr__(self) -> str:
        """Describe the cache."""
        length = "growing" if self.length is None else f"of {self.length}"
        tokens = f"{len(self)} tokens" if self._kept is None else f"{len(self)} of {self.offset} tokens"
        return f"Cache({tokens}, {length}, {self.mask})"


def _check_chosen(chosen: Any, name: str, b: int, g: int, s: int) -> Tensor:
    """Check the result of a policy, and return it as ascending int64 `[b or 1, g or 1, n]`."""
    expected = f"Expected {name} to return the keys to keep, integers [n], [g, n] or [b, g, n]"
    if not isinstance(chosen, Tensor):
        hint = " Wrap it as torch.tensor(keys)." if isinstance(chosen, list | tuple | range) else ""
        raise TypeError(f"{expected}, got {kind(chosen)}.{hint}")
    if chosen.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        hint = " Return mask.nonzero() of a mask [s], or scores.topk(n).indices."
        hint = hint if chosen.dtype == torch.bool else " Convert it, e.g. with .long()."
        raise TypeError(f"{expected}, got {kind(chosen)}.{hint}")
    shape = (1,) * (3 - chosen.dim()) + tuple(chosen.shape)
    if not 1 <= chosen.dim() <= 3 or shape[0] not in (1, b) or shape[1] not in (1, g):
        raise ValueError(f"{expected}, for b = {b} and g = {g} key heads, got {sizes(chosen)}.")
    columns = chosen.detach().to(torch.int64).reshape(shape).sort(-1).values
    if columns.numel():
        low, high = int(columns.min()), int(columns.max())
        if low < 0 or high >= s:
            raise ValueError(
                f"{expected}, between 0 and len(cache) − 1 = {s - 1}, got {low if low < 0 else high}."
            )
        twice = columns[..., 1:] == columns[..., :-1]
        if bool(twice.any()):
            raise ValueError(f"{expected}, each at most once, got {int(columns[..., 1:][twice][0])} twice.")
    return columns


def _name(policy: object) -> str:
    """Return how errors name a policy."""
    return f"the policy {getattr(policy, '__name__', None) or repr(policy)}"


def _select(buffer: Tensor, columns: Tensor, capacity: int) -> Tensor:
    """Return a buffer of this capacity with some columns `[b or 1, h or 1, n]` of `[b, h, s, d]`."""
    b, h, _, d = buffer.shape
    n = columns.shape[2]
    chosen = buffer.detach().gather(2, columns[..., None].expand(b, h, n, d))
    return _enlarge(chosen, (b, h, capacity, d), buffer)


def _enlarge(old: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor of zeros that begins with the content of `old`, with the dtype and device of `like`."""
    with torch.inference_mode(False):  # an inference tensor couldn't be written in other modes
        larger = torch.zeros(shape, dtype=like.dtype, device=like.device)
    if old is not None:
        larger[tuple(map(slice, old.shape))] = old
    return larger
