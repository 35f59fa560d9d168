"""Join the steps of a generation: calls whose keys continue each other's become one call."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.biases import ALiBi, Bias, Relative
from manyheads.maps import AttentionMap
from manyheads.masks import Drop, Full, Keep, Keys, Lengths, Mask, Only, band_mask
from manyheads.observe.summaries import Call, Reduced
from manyheads.problem import Problem

Band = tuple[int | None, int | None]  # low ≤ j − i ≤ high; None: no bound


def checksums(k: Tensor, end: int) -> Tensor:
    """Return a checksum of each key up to `end`, `[b, g, end]`, to detect if a later call has the same keys.

    It is the sum of the key's bits, read as integers, times random odd numbers, modulo 2^64.
    """
    k = k.detach()[:, :, :end]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[k.element_size()]
    factors = torch.randint(1 << 62, (k.shape[3],), generator=torch.Generator().manual_seed(0))
    return (k.contiguous().view(integers).long() * (factors | 1).to(k.device)).sum(-1)


def reached_keys(call: Call, s: int) -> int:
    """Return the number of keys, out of s, up to the last query; 0 if sequences have different offsets."""
    offset = call.offset if isinstance(call, Reduced) else call.problem.offset
    return max(min(offset + call.shape[2], s), 0) if isinstance(offset, int) else 0


def join(old: Call, new: Call) -> Call | None:
    """Join two calls into one if the keys of the second continue those of the first; else return None."""
    if isinstance(old, Reduced) and isinstance(new, Reduced):
        return old.followed_by(new) if _continues(old.shape, old.offset, new.shape, new.offset) else None
    if isinstance(old, AttentionMap) and isinstance(new, AttentionMap):
        return _join_maps(old, new)
    return None


def _continues(old: tuple[int, ...], first: int | Tensor, new: tuple[int, ...], second: int | Tensor) -> bool:
    """Return True if the new queries directly follow the old ones, and the keys reach as far."""
    if not isinstance(first, int) or not isinstance(second, int):
        return False
    return old[:2] == new[:2] and second == first + old[2] and new[3] >= max(second + new[2], old[3])


def _join_maps(old: AttentionMap, new: AttentionMap) -> AttentionMap | None:
    before, after = old.problem, new.problem
    same = (
        _continues(old.shape, before.offset, new.shape, after.offset)
        and (before.scale, before.softcap, old.heads) == (after.scale, after.softcap, new.heads)
        and (before.q.dtype, before.shape.d) == (after.q.dtype, after.shape.d)
        and _equal(before.sink, after.sink)
        and _equal_biases(before.bias, after.bias)
    )
    mask = _join_masks(before, after) if same else None
    if mask is None:
        return None
    q = torch.cat((before.q, after.q), 2)
    problem = Problem.of(q, after.k, after.v, mask=mask, bias=after.bias, scale=after.scale,
                         softcap=after.softcap, sink=after.sink, offset=before.offset)  # fmt: skip
    lse = torch.cat((old.lse, new.lse), 2) if old.knows_lse and new.knows_lse else None
    return new.again(problem, lse)


def _join_masks(before: Problem, after: Problem) -> Mask | None:
    """Return the mask of the queries of both steps; None if it isn't a band combined with visible keys."""
    (old_band, old_keys), (new_band, new_keys) = band_and_keys(before), band_and_keys(after)
    if old_keys is None or new_keys is None or not isinstance(before.offset, int):
        return None
    # For a single query at the last key, no band and a causal band are the same mask.
    causal: Band = (None, 0)
    old_is_last, new_is_last = _is_last_key(before, old_band), _is_last_key(after, new_band)
    if old_is_last and (new_is_last or new_band == causal):
        old_band = causal
    if new_is_last and old_band == causal:
        new_band = causal
    low, high = old_band
    last = before.offset + before.shape.t - 1
    if old_band != new_band or high is None or last + high >= before.shape.s:
        return None  # the old queries would attend to later keys
    reach = last + high + 1  # the number of keys that the band keeps for the old queries
    if not torch.equal(old_keys[:, :reach], new_keys[:, :reach].expand(old_keys[:, :reach].shape)):
        return None
    band = band_mask(low, high)
    return band if bool(new_keys.all()) else band & Keep(new_keys[:, None, None])


def _is_last_key(problem: Problem, band: Band) -> bool:
    """Return True for a single query at the position of the last key, without a band."""
    return problem.shape.t == 1 and band == (None, None) and bool(problem.offset == problem.shape.s - 1)


def band_and_keys(problem: Problem) -> tuple[Band, Tensor | None]:
    """Return a mask as a band and visible keys `[b, s]`; None for keys that differ between queries."""
    shape = problem.shape
    keys = torch.ones(shape.b, shape.s, dtype=torch.bool, device=problem.q.device)
    band, segments, lengths, others = (Full() if problem.mask is None else problem.mask).normal()
    if segments or not all(map(_same_for_all_queries, others)):
        return band, None
    for mask in (*lengths, *others):
        keys = keys & problem.keep(mask, slice(0, 1), slice(None))[:, 0, 0]  # [b, s]
    return band, keys


def _same_for_all_queries(mask: Mask) -> bool:
    """Return True if a mask keeps the same keys for all queries of all heads."""
    if isinstance(mask, Only):
        return _same_for_all_queries(mask.mask)
    if isinstance(mask, Keep | Drop):
        return mask.tensor.shape[1:3] == (1, 1)
    return isinstance(mask, Keys | Full | Lengths)


def _equal(x: Tensor | None, y: Tensor | None) -> bool:
    return x is y or (x is not None and y is not None and torch.equal(x, y))


def _equal_biases(x: Bias | None, y: Bias | None) -> bool:
    """Return True for equal biases that depend on positions only (a dense one lacks columns for new keys)."""
    if x is None or y is None:
        return x is y
    return type(x) is type(y) and isinstance(x, ALiBi | Relative) and _equal(x.tensor(), y.tensor())
