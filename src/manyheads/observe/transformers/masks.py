"""The masks of transformers as values of ours: from what their functions were asked for, and from tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce, wraps
from inspect import getclosurevars, signature
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from manyheads.masks import Causal, Documents, Full, Mask, Window
from manyheads.observe.intercept import known

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a mask → what it was made from


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same mask function; what it was asked for is kept beside what it made, as long as that lives."""

    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        mask = function(*args, **kwargs)
        if mask is not None:
            bound = signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            _made[mask] = Made.of(bound.arguments)
        return mask

    return make


def origin(mask: Any, t: int, s: int) -> Made | None:
    """What a mask of t queries and s keys was made from, if a mask function of transformers made it."""
    made = _made.get(mask)
    return made if made is not None and (made.t, made.s) == (t, s) else None


@dataclass
class Made:
    """What a mask was made from: a mask function of transformers, and where its rows and columns stand."""

    function: Callable[..., Any]
    padding: Tensor | None  # [b, n], boolean
    t: int
    s: int
    row: int | Tensor  # the position of row 0, as transformers counts
    column: int  # the position of column 0
    value: Mask | None = None
    read: int | None = None  # how often the tensor had been changed in place when the value was read

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Made:
        row = asked["q_offset"]
        row = (
            row.clone() if isinstance(row, Tensor) else row
        )  # a static cache gives the tensor that it counts in
        sizes = asked["q_length"], asked["kv_length"]
        return cls(asked["mask_function"], asked["attention_mask"], *sizes, row, asked["kv_offset"])

    @property
    def offset(self) -> int:
        """The position of row 0, where that of column 0 is 0."""
        return int(self.row) - self.column

    def mask(self, made: Any) -> Mask | None:
        """The mask as a value; None where it can't be said as one, or would differ from what was made."""
        version = made._version if isinstance(made, Tensor) and not made.is_inference() else 0
        if self.read != version:
            self.read, mask = version, self._translate(self.function)
            if mask is not None and self.padding is not None:
                mask = mask & padding(self._columns(self.padding), self.s)
            self.value = mask if mask is not None and self._is(mask, made) else None
        return self.value

    def _columns(self, x: Tensor) -> Tensor:
        """What stands at the columns, out of `[b, n]` by position."""
        return x[:, self.column : self.column + self.s]

    def _translate(self, function: Callable[..., Any]) -> Mask | None:
        """A mask function as a value, by its name and what it closes over; None where it isn't known."""
        if getattr(function, "__module__", "") != "transformers.masking_utils":
            return None
        name, held = function.__qualname__.partition(".")[0], getclosurevars(function).nonlocals
        match name:
            case "causal_mask_function":
                return Causal()
            case "bidirectional_mask_function":
                return Full()
            case "sliding_window_overlay":
                return Window(left=held["sliding_window"] - 1)
            case "sliding_window_bidirectional_overlay":
                return Window(left=held["sliding_window"], right=held["sliding_window"])
            case "padding_mask_function":
                return padding(self._columns(held["padding_mask"]), self.s)
            case "packed_sequence_mask_function":
                return Documents(self._columns(held["packed_sequence_mask"]))
            case "remap_positions_for_packed_sequence":  # within a sequence, differences stay what they were
                return self._translate(held["mask_function"])
            case "chunked_overlay":
                position = self.column + torch.arange(self.s, device=held["left_padding"].device)  # [s]
                return Documents((position - held["left_padding"][:, None]) // held["chunk_size"])  # [b, s]
            case "blockwise_overlay":
                ids, first = held["block_sequence_ids"], int(self.row)
                queries = ids[:, first : first + self.t]  # [b, t]
                # A negative id is no block: it matches nothing, itself included.
                return Documents(self._columns(ids).clamp(min=-1), queries=queries.where(queries >= 0, -2))
            case "and_masks" | "or_masks":
                parts = [self._translate(part) for part in held["mask_functions"]]
                told = [part for part in parts if part is not None]
                whole = reduce(and_ if name == "and_masks" else or_, told) if told else None
                return whole if len(told) == len(parts) else None
        return None

    def _is(self, mask: Mask, made: Any) -> bool:
        """Does the mask keep what was made, entry by entry? In blocks of rows, to build no second one."""
        dense = isinstance(made, Tensor)  # else a BlockMask, which has a function in place of entries
        b, device = made.shape[0], made.device if dense else made.kv_indices.device
        mask = mask.bind(self.offset, self.s)
        batch = torch.arange(b, device=device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        j = torch.arange(self.s, device=device)[None, None, None, :]
        for rows in torch.arange(self.t, device=device).split(max(1, 2**22 // max(1, b * self.s))):
            row = rows[None, None, :, None]
            keep = mask.keep(batch, head, row + self.offset, j).expand(b, 1, len(rows), self.s)
            theirs = made[:, :, rows] if dense else made.mask_mod(batch, head, row, j).expand_as(keep)
            if theirs.is_floating_point():  # 0 for what is kept, the lowest number for what isn't
                lowest = theirs.new_full((), torch.finfo(theirs.dtype).min)
                keep = torch.where(keep, torch.zeros_like(lowest), lowest)
            if not torch.equal(keep, theirs):
                return False
        return True


def split(given: Tensor, offset: int, t: int) -> tuple[Mask | None, Tensor | None]:
    """What a mask tensor, which broadcasts to `[b, h, t, s]`, hides, and what it adds; None: nothing.

    offset is the position of the first of t queries.
    """
    given = given.detach().reshape((1,) * (4 - given.dim()) + tuple(given.shape))
    for axis in range(given.dim()):
        if given.stride(axis) == 0:  # expanded: hold it once
            given = given.narrow(axis, 0, min(given.shape[axis], 1))
    given = _held(given)
    if given.dtype == torch.bool:
        return known(given, offset, t), None
    # −inf, or about the lowest number of the dtype, with which models write it
    hidden = given <= torch.finfo(given.dtype).min / 2
    if hidden.any():
        given = given.masked_fill(hidden, 0.0)
    return known(~hidden, offset, t), given if given.any() else None


def padding(real: Tensor, s: int) -> Mask:
    """Padding `[b, n]`, True = real, as a mask of s keys; those beyond n are padding."""
    mask = known(_held(nn.functional.pad(real, (0, s - real.shape[1]))[:, None, None, :]))
    return Full() if mask is None else mask


def _held(x: Tensor) -> Tensor:
    """What may be kept: a copy where nobody counts how often a tensor is changed in place."""
    return x.clone() if x.is_inference() else x


def together(*masks: Mask | None) -> Mask | None:
    """What every one of these keeps, their bands joined into one; None where that is everything."""
    whole = reduce(and_, (mask for mask in masks if mask is not None), Full())
    (low, high), *others = whole.normal()
    band: Mask = Causal() if (low, high) == (None, 0) else Window(None if low is None else -low, high)
    told = [] if (low, high) == (None, None) else [band]
    for parts in others:
        told += parts
    return reduce(and_, told) if told else None
