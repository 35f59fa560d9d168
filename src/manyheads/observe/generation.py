"""Generation, step by step: calls whose keys continue each other's, joined into one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.biases import Bias
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Drop, Full, Keep, Keys, Lengths, Mask, Only, Window
from manyheads.observe.summaries import Reduced
from manyheads.scores import Problem

Edges = tuple[int | None, int | None]  # of a band, low ≤ j − i ≤ high; None: no bound


class Print(NamedTuple):
    """A sum of the bits of each key, by which the keys are known again when the next step comes."""

    sums: Tensor  # [b, g, s so far]

    @classmethod
    def of(cls, k: Tensor, call: AttentionMap | Reduced) -> Print:
        """The print of keys k `[b, g, s, d]`, as far as the call's queries reach."""
        offset = call.offset if isinstance(call, Reduced) else call.problem.offset
        end = min(offset + call.shape[2], k.shape[2]) if isinstance(offset, int) else 0
        return cls(_bits(k.detach()[:, :, : max(end, 0)]))

    def in_front_of(self, k: Tensor) -> bool:
        """Do these keys begin with those of the print?"""
        end = self.sums.shape[2]
        return end > 0 and torch.equal(_bits(k.detach()[:, :, :end]), self.sums)


def _bits(k: Tensor) -> Tensor:
    """The bits of each key as integers, times drawn odd numbers, added up past all overflow: `[b, g, s]`."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[k.element_size()]
    drawn = torch.randint(1 << 62, (k.shape[3],), generator=torch.Generator().manual_seed(0))
    return (k.contiguous().view(whole).long() * (drawn | 1).to(k.device)).sum(-1)


def joined(
    old: AttentionMap | Reduced, new: AttentionMap | Reduced, before: Print, k: Tensor
) -> AttentionMap | Reduced | None:
    """One call of two, if the new one's keys k are the old one's and then its own; else None."""
    together: AttentionMap | Reduced | None = None
    if before.in_front_of(k):
        if isinstance(old, Reduced) and isinstance(new, Reduced):
            together = (
                old.followed_by(new) if _follows(old.shape, old.offset, new.shape, new.offset) else None
            )
        elif isinstance(old, AttentionMap) and isinstance(new, AttentionMap):
            together = _together(old, new)
    return together


def _follows(old: tuple[int, ...], first: int | Tensor, new: tuple[int, ...], second: int | Tensor) -> bool:
    """Do the new queries stand just behind the old ones, with keys that reach as far?"""
    if not isinstance(first, int) or not isinstance(second, int):
        return False
    return old[:2] == new[:2] and second == first + old[2] and new[3] >= max(second + new[2], old[3])


def _together(old: AttentionMap, new: AttentionMap) -> AttentionMap | None:
    p, n = old.problem, new.problem
    if not _follows(old.shape, p.offset, new.shape, n.offset) or (p.scale, p.softcap) != (n.scale, n.softcap):
        return None
    if old.heads != new.heads or not _same(p.sink, n.sink) or not _same_bias(p.bias, n.bias):
        return None
    if p.q.dtype != n.q.dtype or p.shape.d != n.shape.d:
        return None
    mask = _mask(p, n)
    if mask is None:
        return None
    problem = Problem.of(
        torch.cat((p.q, n.q), 2),
        n.k,
        n.v,
        mask=mask,
        bias=n.bias,
        scale=n.scale,
        softcap=n.softcap,
        sink=n.sink,
        offset=p.offset,
    )
    lse = torch.cat((old.lse, new.lse), 2) if old.knows_lse and new.knows_lse else None
    return new.again(problem, lse)


def _mask(p: Problem, n: Problem) -> Mask | None:
    """The mask of both steps' queries over the later keys, if it can be said: a band and some keys."""
    (old_band, old_keys), (new_band, new_keys) = _band_and_keys(p), _band_and_keys(n)
    if old_keys is None or new_keys is None or not isinstance(p.offset, int):
        return None
    if old_band != new_band:  # a last query that sees all up to its own is causal, whatever it was called
        causal = (None, 0)
        old_band = causal if _sees_all_before(p, old_band) and new_band == causal else old_band
        new_band = causal if _sees_all_before(n, new_band) and old_band == causal else new_band
    elif _sees_all_before(p, old_band) and _sees_all_before(n, new_band):
        old_band = new_band = (None, 0)
    low, high = old_band
    last = p.offset + p.shape.t - 1
    if old_band != new_band or high is None or last + high >= p.shape.s:
        return None  # the old queries would see the later keys
    reach = last + high + 1  # what lies beyond it the old queries don't see, whatever their mask says of it
    if not torch.equal(old_keys[:, :reach], new_keys[:, :reach].expand(old_keys[:, :reach].shape)):
        return None
    band: Mask = Causal() if (low, high) == (None, 0) else Window(None if low is None else -low, high)
    return band if bool(new_keys.all()) else band & Keep(new_keys[:, None, None])


def _sees_all_before(p: Problem, band: Edges) -> bool:
    """Is it a single query at the last key, under no band?"""
    return p.shape.t == 1 and band == (None, None) and isinstance(p.offset, int) and p.offset == p.shape.s - 1


def _band_and_keys(p: Problem) -> tuple[Edges, Tensor | None]:
    """A mask as a band, and the keys `[b, s]` that all queries may see; None where it is more than that."""
    everything = torch.ones(p.shape.b, p.shape.s, dtype=torch.bool, device=p.q.device)
    if p.mask is None:
        return (None, None), everything
    band, segments, lengths, rest = p.mask.normal()
    if segments or not all(map(_for_all, rest)):
        return band, None
    keys = everything
    for part in (*lengths, *rest):
        keys = keys & p.keep(part, slice(0, 1), slice(None))[:, 0, 0]  # [b, s]
    return band, keys


def _for_all(mask: Mask) -> bool:
    """Does a mask show all queries of all heads the same keys?"""
    if isinstance(mask, Only):
        return _for_all(mask.mask)
    if isinstance(mask, Keep | Drop):
        return mask.tensor.shape[1:3] == (1, 1)
    return isinstance(mask, Keys | Full | Lengths)


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))


def _same_bias(x: Bias | None, y: Bias | None) -> bool:
    """Biases that depend on positions alone go on as they are; a dense one has no further columns."""
    if x is None or y is None:
        return x is y
    return type(x) is type(y) and type(x).__name__ in ("ALiBi", "Relative") and _same(x.tensor(), y.tensor())
