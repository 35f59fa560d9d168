"""Biases that are added to scores: ALiBi, learned relative biases, and any tensor.

A bias defines `add(b, h, i, j)`, the numbers to add for queries at positions i and keys j, and `collect`,
which adds the gradient of a tile's scores to the gradient of the bias's tensor. An entry of −inf in `Dense`
masks the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads.masks import (
    check_indices,
    check_positions,
    look_up_positions,
    scatter_positions,
    select_positions,
)
from manyheads.shapes import Shape, can_read, kind, real, sizes, whole
from manyheads.trees import Value, bound

Index = Any


class Bias(Value):
    """A bias that is added to the scores. Each subclass has one tensor, which can require a gradient."""

    @property
    def can_mask(self) -> bool:
        """Whether the bias can contain −inf, which masks."""
        return False

    def add(self, b: Index, h: Index, i: Index, j: Index, dtype: torch.dtype) -> Tensor:
        """Return the bias of a tile of scores.

        Args:
            b: The batch entries.
            h: The heads.
            i: The positions of the queries.
            j: The keys.
            dtype: The dtype of the scores.

        Returns:
            The bias, which broadcasts to `[b, h, t, s]`.
        """
        raise NotImplementedError

    def collect(self, into: Tensor, grad: Tensor, b: Index, h: Index, i: Index, j: Index) -> None:
        """Add the gradient of a tile of scores to the gradient of the bias's tensor.

        Args:
            into: The gradient of the tensor, in the shape of the tensor, which is changed in place.
            grad: The gradient of the tile's scores `[b, h, t, s]`.
            b: The batch entries.
            h: The heads.
            i: The positions of the queries.
            j: The keys.
        """
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """Return the tensor: `[h]`, `[h, 2n + 1]`, or one that broadcasts to `[b, h, t, s]`."""
        return self.tensors()[0]

    def check(self, shape: Shape) -> None:
        """Raise ValueError if the bias doesn't fit a problem of this shape."""

    def bind(self, first: int | Tensor) -> Bias:
        """Return the bias for queries whose row 0 has the position `first` (an int or `[b]`)."""
        return self

    def cut(self) -> Bias | None:
        """Return the bias of any range of rows and columns, which are renumbered from 0.

        Returns:
            The bias itself if it depends on j − i only, else None (not supported).
        """
        return None

    def only(self, batch: Tensor, heads: Tensor) -> Bias:
        """Return the bias of some batch entries `[b]` and heads `[h]`, which are renumbered from 0."""
        return OnlyBias(self, batch, heads)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({sizes(self.tensor())})"


class OnlyBias(Bias):
    """A bound bias for some batch entries `[b]` and heads `[h]`, which are renumbered from 0."""

    bias: Bias
    batch: Tensor
    heads: Tensor

    @property
    def can_mask(self) -> bool:
        return self.bias.can_mask

    def add(self, b: Index, h: Index, i: Index, j: Index, dtype: torch.dtype) -> Tensor:
        return self.bias.add(self.batch[b], self.heads[h], i, j, dtype)

    def check(self, shape: Shape) -> None:
        check_indices(self.batch, self.heads, shape)

    def bind(self, first: int | Tensor) -> Bias:
        return self.but(bias=self.bias.bind(scatter_positions(first, self.batch)))


class BiasAtPositions(Bias):
    """A bias whose keys aren't at the positions 0, 1, …, as `masks.AtPositions` is for masks.

    Attributes:
        bias: The bias.
        positions: The positions of the keys, ascending int64 `[b or 1, g or 1, s]`.
        tokens: The number of tokens, including the dropped ones.
        group: The number of query heads that share a key head, h / g.
    """

    bias: Bias
    positions: Tensor
    tokens: int
    group: int = 1

    @property
    def can_mask(self) -> bool:
        return self.bias.can_mask

    def add(self, b: Index, h: Index, i: Index, j: Index, dtype: torch.dtype) -> Tensor:
        return self.bias.add(b, h, i, look_up_positions(self.positions, self.group, b, h, j), dtype)

    def check(self, shape: Shape) -> None:
        check_positions(self.positions, self.group, shape)
        self.bias.check(Shape(shape.b, shape.h, shape.g, shape.t, self.tokens, shape.d, shape.w))

    def bind(self, first: int | Tensor) -> Bias:
        return self.but(bias=self.bias.bind(first))

    def only(self, batch: Tensor, heads: Tensor) -> Bias:
        positions = select_positions(self.positions, self.group, batch, heads)
        return BiasAtPositions(self.bias.only(batch, heads), positions, self.tokens)


def alibi_slopes(heads: int) -> Tensor:
    """Return the slopes of the ALiBi paper (Press et al. 2022, arXiv:2108.12409).

    If the number n of heads is a power of two, they are 2^(−8/n), 2^(−16/n), …, 2^(−8). If not, they are the
    slopes for the next lower power of two, followed by every other slope for the next higher one, as in the
    authors' code.

    Args:
        heads: The number of heads h.

    Returns:
        The slopes `[h]`.

    Raises:
        TypeError: If heads isn't an integer.
        ValueError: If heads is less than 1.
    """
    whole(heads, "the number of heads in ALiBi", least=1)
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    between = [2 ** (-4 * n / power) for n in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes + between[: heads - power], dtype=torch.float32)


class ALiBi(Bias):
    """A penalty that is linear in the distance, `−slope · |i − j|` (Press et al. 2022, arXiv:2108.12409).

    Args:
        slopes: The slopes `[h]` or `[1]`, as a tensor or list, in units of the scores per position; or the
            number of heads, for the slopes of the paper.

    Raises:
        TypeError: If the slopes aren't floats.
        ValueError: If a slope isn't finite.
    """

    slopes: Tensor

    def __init__(self, slopes: int | Sequence[float] | Tensor) -> None:
        if isinstance(slopes, int):
            slopes = alibi_slopes(slopes)
        elif isinstance(slopes, list | tuple):
            slopes = torch.tensor(
                [real(slope, "a slope in ALiBi", math.isfinite, "a finite number") for slope in slopes]
            )
        if not isinstance(slopes, Tensor) or slopes.dim() != 1 or not slopes.is_floating_point():
            size = f" {sizes(slopes)}" if isinstance(slopes, Tensor) else ""
            raise TypeError(f"Expected a number of heads or slopes [h] for ALiBi, got {kind(slopes)}{size}.")
        _check_finite(slopes, "ALiBi's slopes")
        object.__setattr__(self, "slopes", slopes)

    def cut(self) -> Bias:
        return self

    def add(self, b: Index, h: Index, i: Index, j: Index, dtype: torch.dtype) -> Tensor:
        slopes = self.slopes[0 if self.slopes.shape[0] == 1 else h]
        return -slopes.to(dtype) * (i - j).abs()

    def collect(self, into: Tensor, grad: Tensor, b: Index, h: Index, i: Index, j: Index) -> None:
        per_head = (grad * -(i - j).abs()).sum((0, 2, 3))  # [h]
        into += per_head.sum(0, keepdim=True) if into.shape[0] == 1 else per_head

    def check(self, shape: Shape) -> None:
        _check_heads(self.slopes, shape, "ALiBi")


class Relative(Bias):
    """A learned bias per head and clipped distance: table[h, clip(j − i, −n, n) + n].

    The distance is clipped as in Shaw et al. 2018 (arXiv:1803.02155). The bias is a number per head, as in
    Raffel et al. 2020 (arXiv:1910.10683), without buckets.

    Attributes:
        table: The biases `[h, 2n + 1]`, or `[1, 2n + 1]` for all heads.

    Raises:
        TypeError: If the table isn't a tensor of floats.
        ValueError: If it has the wrong shape, or a number isn't finite.
    """

    table: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or not self.table.is_floating_point():
            raise TypeError(f"Expected a table [h, 2n + 1] of floats for Relative, got {kind(self.table)}.")
        if self.table.dim() != 2 or self.table.shape[1] % 2 == 0:
            raise ValueError(f"Expected a table [h, 2n + 1] for Relative, got {sizes(self.table)}.")
        _check_finite(self.table, "Relative's table")

    @classmethod
    def learned(cls, heads: int, distance: int) -> Relative:
        """Return a table of zeros to be learned.

        Args:
            heads: The number of heads h.
            distance: The largest distance n, on both sides. Longer distances are clipped.

        Returns:
            The bias, whose table is a parameter.

        Raises:
            TypeError: If heads or distance isn't an integer.
            ValueError: If heads is less than 1, or distance is negative.
        """
        whole(heads, "the number of heads in Relative", least=1)
        whole(distance, "the distance in Relative")
        return cls(torch.nn.Parameter(torch.zeros(heads, 2 * distance + 1)))

    def _column(self, i: Index, j: Index) -> Tensor:
        n = self.table.shape[1] // 2
        return (j - i).clamp(-n, n) + n

    def add(self, b: Index, h: Index, i: Index, j: Index, dtype: torch.dtype) -> Tensor:
        return self.table[0 if self.table.shape[0] == 1 else h, self._column(i, j)].to(dtype)

    def collect(self, into: Tensor, grad: Tensor, b: Index, h: Index, i: Index, j: Index) -> None:
        # With an offset for each sequence the column depends on b, so the batch is flattened, not summed.
        column = self._column(i, j).expand(grad.shape[0], 1, *grad.shape[2:])  # [b, 1, t, s]
        per_head = grad.transpose(0, 1).flatten(1)  # [h, b*t*s]
        if into.shape[0] == 1:
            per_head = per_head.sum(0, keepdim=True)
        into.index_add_(1, column.reshape(-1), per_head)

    def check(self, shape: Shape) -> None:
        _check_heads(self.table, shape, "Relative")


class Dense(Bias):
    """Any bias, as a tensor that broadcasts to `[b, h, t, s]`; −inf masks.

    It has the effect of a float mask in `torch.nn.functional.scaled_dot_product_attention`.

    Attributes:
        values: The bias.
        first: The position of row 0, an int or `[b]`, which the library sets.

    Raises:
        TypeError: If the bias isn't a tensor of floats.
        ValueError: If it has more than four dimensions, NaN or +inf.
    """

    values: Tensor
    first: int | Tensor = bound(default=0)

    @property
    def can_mask(self) -> bool:
        return True

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            raise TypeError(
                f"Expected a tensor of floats for Dense, got {kind(self.values)}. Pass a boolean mask as "
                "mask=Keep(t) or mask=Drop(t)."
            )
        if self.values.dim() > 4:
            raise ValueError(f"Expected Dense to broadcast to [b, h, t, s], got {sizes(self.values)}.")
        if can_read(self.values) and not bool((self.values < torch.inf).all()):
            got = "NaN" if bool(self.values.isnan().any()) else "+inf"
            raise ValueError(f"Expected finite numbers or -inf (masked) in Dense, got {got}.")

    def _indices(self, b: Index, h: Index, i: Index, j: Index) -> tuple[Any, ...]:
        """Return the indices of a tile in the tensor, whose axes of size 1 are broadcast."""
        # Positions may differ between sequences, but rows are the same in all.
        row = (i - self.first[b])[:1] if isinstance(self.first, Tensor) else i - self.first
        shape = _with_four_axes(self.values).shape
        return tuple(0 if n == 1 else index for n, index in zip(shape, (b, h, row, j), strict=True))

    def add(self, b: Index, h: Index, i: Index, j: Index, dtype: torch.dtype) -> Tensor:
        values = _with_four_axes(self.values)[self._indices(b, h, i, j)]
        return _with_four_axes(values).to(dtype)

    def collect(self, into: Tensor, grad: Tensor, b: Index, h: Index, i: Index, j: Index) -> None:
        into = _with_four_axes(into)  # a view, as `into` is contiguous
        summed = tuple(axis for axis, n in enumerate(into.shape) if n == 1 and grad.shape[axis] != 1)
        grad = grad.sum(summed, keepdim=True) if summed else grad
        indices = [torch.as_tensor(index, device=into.device) for index in self._indices(b, h, i, j)]
        grad = grad.reshape(torch.broadcast_shapes(*(index.shape for index in indices)))
        into.index_put_(tuple(indices), grad, accumulate=True)

    def check(self, shape: Shape) -> None:
        expected = (shape.b, shape.h, shape.t, shape.s)
        got = _with_four_axes(self.values).shape
        if any(n not in (1, size) for n, size in zip(got, expected, strict=True)):
            raise ValueError(
                f"Expected Dense to broadcast to [b, h, t, s] = {list(expected)}, got {sizes(self.values)}."
            )

    def bind(self, first: int | Tensor) -> Dense:
        return self.but(first=first)


def _with_four_axes(tensor: Tensor) -> Tensor:
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def _check_heads(tensor: Tensor, shape: Shape, name: str) -> None:
    if tensor.shape[0] not in (1, shape.h):
        raise ValueError(f"Expected {name} for h = {shape.h} heads or for 1, got {sizes(tensor)}.")


def _check_finite(tensor: Tensor, name: str) -> None:
    if can_read(tensor) and not bool(tensor.isfinite().all()):
        raise ValueError(f"Expected {name} to be finite, got {tensor.flatten().tolist()[:8]}.")
