"""`AttentionMap`: every weight of every head, computed when asked for.

It keeps q, k, mask, bias and the log-sum-exp, O(L) of memory; a weight is exp(score − lse), and
scores come from `scores.tile`. It behaves like the matrix `[b, h, t, s]` that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.kernels import chunked
from manyheads.masks import Mask, Rule
from manyheads.scores import Problem, Rows
from manyheads.shapes import kind, sizes

LETTERS = (("batch entry", "b"), ("head", "h"), ("query", "t"), ("key", "s"))


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap:
    """The weights of one attention call, per head and before dropout, without the matrix.

    shape: `(b, h, t, s)`; `amap[b, h, rows, cols]` is that tile, exactly, with ints (also negative),
    slices, index tensors (rows × columns) and an ellipsis; `dense()` is all of it. `lse` is the
    log-sum-exp `[b, h, t]`, natural log, sinks included. Numbers are float32, float64 for float64.
    A map holds detached tensors; reading it raises if q or k was changed in place since.
    """

    problem: Problem
    lse: Tensor
    _versions: tuple[int, ...] | None = field(default=None)

    @classmethod
    def of(cls, problem: Problem, lse: Tensor | None = None) -> AttentionMap:
        """The map of a problem; without a log-sum-exp, one pass over the keys computes it."""
        problem = problem.detach().without_values()
        lse = chunked.lse(problem) if lse is None else lse.detach()
        return cls(problem, lse, _versions(problem))

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionMap:
        self._fresh()
        problem = deepcopy(self.problem, memo)
        return AttentionMap(problem, deepcopy(self.lse, memo), _versions(problem))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(b, h, t, s)`."""
        n = self.problem.shape
        return n.b, n.h, n.t, n.s

    def under(self, mask: Mask | None) -> AttentionMap:
        """The map of the same q and k under another mask (None: no mask): a what-if."""
        self._fresh()
        return AttentionMap.of(self.problem.under(mask))

    def __getitem__(self, index: Any) -> Tensor:
        self._fresh()
        picked = _expand(index if isinstance(index, tuple) else (index,))
        chosen = [
            _pick(part, size, what) for part, size, what in zip(picked, self.shape, LETTERS, strict=True)
        ]
        b, h, rows, cols = (slice(c, c + 1) if isinstance(c, int) else c for c in chosen)
        lse = self.lse[:, :, rows][b][:, h]  # [b, h, r]
        tile = scores.weights(scores.tile(self.problem, rows, cols, b, h), lse)  # [b, h, r, c]
        return tile[tuple(0 if isinstance(c, int) else slice(None) for c in chosen)]

    def dense(self, max_bytes: int = 2**31) -> Tensor:
        """All weights, `[b, h, t, s]`. Raises ValueError where they would take more than max_bytes."""
        size = math.prod(self.shape) * self.lse.element_size()
        if size > max_bytes:
            raise ValueError(
                f"the weights {list(self.shape)} would take {size / 1e9:.3g} GB, and max_bytes is "
                f"{max_bytes / 1e9:.3g} GB: ask for a tile, amap[b, h, rows, cols], or raise max_bytes."
            )
        return self[...]

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Rows, columns and scores `[b, h, r, c]` of every tile that isn't empty under the mask."""
        self._fresh()
        for rows, columns in chunked.blocks(self.problem):
            for cols in columns:
                yield rows, cols, scores.tile(self.problem, rows, cols)

    def mass(self, mask: Mask, mean: bool = False) -> Tensor:
        """The weight that each query puts inside a mask: `[b, h, t]`, between 0 and 1.

        With `mean=True`, `[b, h]`: its average over those queries that share at least one visible
        key with the mask; where there is none, 0.
        """
        if mask is None:
            raise TypeError("mass takes a mask, and None came: Full() asks for all the weight of a row.")
        self._fresh()
        both = self.problem.within(mask)  # tiles that no pair of the two shares are never walked
        total = torch.zeros_like(self.lse)  # [b, h, t]
        could = torch.zeros_like(self.lse, dtype=torch.bool)
        for rows, columns in chunked.blocks(both):
            for cols in columns:
                score = scores.tile(both, rows, cols)  # [b, h, r, c]
                total[:, :, rows] += scores.weights(score, self.lse[:, :, rows]).sum(-1)
                could[:, :, rows] |= (score != -math.inf).any(-1)
        if not mean:
            return total
        return torch.where(could, total, 0.0).sum(-1) / could.sum(-1).clamp(min=1)

    def entropy(self) -> Tensor:
        """−Σ w·log w over the keys, in nats, never renormalised under a sink: `[b, h, t]`."""
        total = torch.zeros_like(self.lse)
        for rows, _, score in self.tiles():
            lse = self.lse[:, :, rows]
            seen = score != -math.inf
            spread = scores.weights(score, lse) * (lse[..., None] - score)  # w · −log w
            total[:, :, rows] += torch.where(seen, spread, 0.0).sum(-1)
        return total

    def first_key(self) -> Mask:
        """A mask of the first key that each query may see: column 0 unless padded or packed."""
        n = self.problem.shape
        first = torch.full(self.lse.shape, n.s, device=self.lse.device)  # [b, h, t]
        for rows, cols, score in self.tiles():
            seen = score != -math.inf
            columns = torch.arange(cols.start, cols.stop, device=score.device)
            found = torch.where(seen, columns, n.s).amin(-1)
            first[:, :, rows] = torch.minimum(first[:, :, rows], found)
        offset = self.problem.offset

        def is_first(b: Any, h: Any, i: Any, j: Any) -> Any:
            row = i - (offset if isinstance(offset, int) else offset[b])
            return first[b, h, row] == j

        return Rule(is_first)

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        held = sum(x.numel() * x.element_size() for x in (self.problem.q, self.problem.k, self.lse))
        whole = math.prod(self.shape) * self.lse.element_size()
        return (
            f"AttentionMap([b={b}, h={h}, t={t}, s={s}], mask={self.problem.mask!s}, "
            f"holding {held / 1e6:,.1f} MB for weights of {whole / 1e6:,.1f} MB)"
        )

    def _fresh(self) -> None:
        if self._versions is not None and self._versions != _versions(self.problem):
            raise RuntimeError(
                "q, k, mask or bias was changed in place since this map was made, so its weights are gone: "
                "read the map before, or give attention a copy (q.clone())."
            )


def _versions(problem: Problem) -> tuple[int, ...] | None:
    """How often what a map reads was changed in place. Tensors of inference mode and graphs don't count."""
    if torch.compiler.is_compiling():
        return None
    parts = [part for part in (problem.mask, problem.bias) if part is not None]
    read = [problem.q, problem.k, *(x for part in parts for x in part.tensors())]
    return tuple(0 if x.is_inference() else x._version for x in read)


def _expand(index: tuple[Any, ...]) -> list[Any]:
    """Four entries, one per dimension, out of an index with an ellipsis or with fewer."""
    dots = [n for n, part in enumerate(index) if part is Ellipsis]
    if len(dots) > 1 or len(index) - len(dots) > 4:
        raise IndexError(f"a map has four dimensions [b, h, t, s], and {len(index)} indices came.")
    at = dots[0] if dots else len(index)
    before, after = list(index[:at]), list(index[at + 1 :])
    return before + [slice(None)] * (4 - len(before) - len(after)) + after


def _pick(part: Any, size: int, what: tuple[str, str]) -> int | Rows:
    """One dimension's index, with negative ones resolved: an int, a slice, or an index tensor."""
    name, letter = what
    if isinstance(part, slice):
        if part.step == 0:
            raise IndexError(f"a slice of {letter} can't step by 0: {part} came.")
        if part.step is not None and part.step < 0:  # which tensors don't slice by
            return torch.tensor(range(*part.indices(size)), dtype=torch.int64)
        return part
    if isinstance(part, Tensor) and part.dtype == torch.bool:
        if tuple(part.shape) != (size,):
            raise IndexError(f"a boolean index for {letter} must be [{size}], and {list(part.shape)} came.")
        part = part.nonzero().flatten()
    single = isinstance(part, int) and not isinstance(part, bool)
    try:
        chosen = torch.as_tensor(part, dtype=torch.int64 if isinstance(part, list) and not part else None)
    except (TypeError, ValueError, RuntimeError):
        chosen = torch.empty(0, 0)
    if isinstance(part, bool) or chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.dim() > 1:
        raise IndexError(
            f"an index for {letter} must be an int, a slice, or integers of one dimension, and "
            f"{f'{kind(part)} {sizes(part)}' if isinstance(part, Tensor) else repr(part)} came."
        )
    if chosen.numel() and (int(chosen.min()) < -size or int(chosen.max()) >= size):
        raise IndexError(
            f"{name} {part} doesn't exist: {letter} = {size}, so 0 to {size - 1} or -{size} to -1."
        )
    chosen = torch.where(chosen < 0, chosen + size, chosen)
    return int(chosen) if single or chosen.dim() == 0 else chosen.to(torch.int64)
