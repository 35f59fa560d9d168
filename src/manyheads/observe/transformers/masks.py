"""Translate masks of transformers into values, from the arguments of the functions that made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps
from inspect import getclosurevars, signature
from itertools import chain
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from manyheads.masks import Causal, Documents, Full, Mask, Window, band_mask
from manyheads.masks.recognize import recognize_mask

_origins: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a mask → its Origin


def remember_origins(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function so that its arguments are stored as long as the mask that it made exists."""

    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        mask = function(*args, **kwargs)
        if mask is not None:
            bound = signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            row = arguments["q_offset"]
            _origins[mask] = Origin(
                arguments["mask_function"],
                arguments["attention_mask"],
                arguments["q_length"],
                arguments["kv_length"],
                row.clone() if isinstance(row, Tensor) else row,  # a static cache increments it in place
                arguments["kv_offset"],
            )
        return mask

    return make


def find_origin(mask: Any, t: int, s: int) -> Origin | None:
    """Return the origin of a mask of t queries and s keys, if transformers made it."""
    origin = _origins.get(mask)
    return origin if origin is not None and (origin.t, origin.s) == (t, s) else None


@dataclass
class Origin:
    """A function of transformers that made a mask, and the positions of the mask's rows and columns."""

    function: Callable[..., Any]
    padding: Tensor | None  # [b, n], boolean
    t: int
    s: int
    row: int | Tensor  # the position of row 0, as transformers counts
    column: int  # the position of column 0
    value: Mask | None = None
    version: int | None = None  # the version of the mask tensor when it was compared

    @property
    def offset(self) -> int:
        """The position of row 0 if that of column 0 is 0."""
        return int(self.row) - self.column

    def mask(self, made: Any) -> Mask | None:
        """Return the mask as a value; None if there is none that equals the mask that was made."""
        version = made._version if isinstance(made, Tensor) and not made.is_inference() else 0
        if self.version != version:
            self.version, mask = version, self.translate()
            self.value = mask if mask is not None and self._equals(mask, made) else None
        return self.value

    def translate(self) -> Mask | None:
        """Return the function and the padding as a value; None if the function is unknown."""
        mask = self._translate(self.function)
        if mask is not None and self.padding is not None:
            mask = mask & padding_mask(self.columns(self.padding), self.s)
        return mask

    def columns(self, x: Tensor, pad: bool = False) -> Tensor:
        """Return the entries of the mask's columns from a tensor `[b, n]` that is indexed by position.

        pad: Add zeros for the columns beyond n.
        """
        x = x[:, self.column : self.column + self.s]
        return nn.functional.pad(x, (0, self.s - x.shape[1])) if pad else x

    def _translate(self, function: Callable[..., Any]) -> Mask | None:
        """Return a mask function as a value, from its name and its closure; None for an unknown function."""
        if getattr(function, "__module__", "") != "transformers.masking_utils":
            return None
        name, closure = function.__qualname__.partition(".")[0], getclosurevars(function).nonlocals
        match name:
            case "causal_mask_function":
                return Causal()
            case "bidirectional_mask_function":
                return Full()
            case "sliding_window_overlay":
                return Window(left=closure["sliding_window"] - 1)
            case "sliding_window_bidirectional_overlay":
                return Window(left=closure["sliding_window"], right=closure["sliding_window"])
            case "padding_mask_function":
                return padding_mask(self.columns(closure["padding_mask"]), self.s)
            case "packed_sequence_mask_function":
                return Documents(self.columns(closure["packed_sequence_mask"]))
            case "remap_positions_for_packed_sequence":  # within a sequence, differences stay the same
                return self._translate(closure["mask_function"])
            case "chunked_overlay":
                left_padding = closure["left_padding"]
                position = self.column + torch.arange(self.s, device=left_padding.device)  # [s]
                return Documents((position - left_padding[:, None]) // closure["chunk_size"])  # [b, s]
            case "blockwise_overlay":
                ids, first = closure["block_sequence_ids"], int(self.row)
                queries = ids[:, first : first + self.t]  # [b, t]
                # A negative id belongs to no block, and equals no other id.
                return Documents(self.columns(ids).clamp(min=-1), queries=queries.where(queries >= 0, -2))
            case "and_masks" | "or_masks":
                masks = [self._translate(each) for each in closure["mask_functions"]]
                known = [mask for mask in masks if mask is not None]
                if known and len(known) == len(masks):
                    return reduce(and_ if name == "and_masks" else or_, known)
        return None

    def _equals(self, mask: Mask, made: Any) -> bool:
        """Return True if every entry of a mask equals that of the mask that was made, compared in blocks."""
        is_tensor = isinstance(made, Tensor)  # if not, it is a BlockMask, which has a function
        b, device = made.shape[0], made.device if is_tensor else made.kv_indices.device
        mask = mask.bind(self.offset, self.s)
        batch = torch.arange(b, device=device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        j = torch.arange(self.s, device=device)[None, None, None, :]
        for rows in torch.arange(self.t, device=device).split(max(1, 2**22 // max(1, b * self.s))):
            row = rows[None, None, :, None]
            keep = mask.keep(batch, head, row + self.offset, j).expand(b, 1, len(rows), self.s)
            theirs = made[:, :, rows] if is_tensor else made.mask_mod(batch, head, row, j).expand_as(keep)
            if theirs.is_floating_point():  # 0 is visible, the lowest number is masked
                lowest = theirs.new_full((), torch.finfo(theirs.dtype).min)
                keep = torch.where(keep, torch.zeros_like(lowest), lowest)
            if not torch.equal(keep, theirs):
                return False
        return True


class LazyMask(Tensor):
    """A boolean mask tensor `[b, 1, t, s]` (True = attend) whose entries are computed when they are needed.

    Models pass masks from the function that makes them to the attention function. Ours needs the value only,
    and an operation of PyTorch on this tensor gets its entries.

    Attributes:
        value: The mask; None if everything is visible.
        offset: The position of row 0.
    """

    value: Mask | None
    offset: int
    _make: Callable[[], Tensor]
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls, value: Mask | None, offset: int, shape: tuple[int, ...], make: Callable[[], Tensor], device: Any
    ) -> LazyMask:
        """Return a mask whose entries `make` computes."""
        mask: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.value, mask.offset, mask._make, mask._dense = value, offset, make, None
        return mask

    @property
    def is_dense(self) -> bool:
        """True if the entries were read, and may have been changed since."""
        return self._dense is not None

    def dense(self) -> Tensor:
        """Return the entries as a plain tensor; a change in place of that tensor changes this mask."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operation with the entries in place of the mask."""
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyMask({self.value}, offset={self.offset}, shape={list(self.shape)})"


def lazy_mask(origin: Origin, b: int, make: Callable[[], Tensor], device: Any) -> LazyMask | None:
    """Return the mask of b sequences that `make` computes, as a lazy tensor; None if it isn't recognized.

    A few rows are compared with the function of transformers that defines it.
    """
    value = origin.translate()
    if value is None:
        return None
    rows = torch.linspace(0, origin.t - 1, min(origin.t, 5), device=device).round().long().unique()
    batch = torch.arange(b, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    row, j = rows[None, None, :, None], torch.arange(origin.s, device=device)[None, None, None, :]
    theirs = origin.function(batch, head, row + origin.row, j + origin.column)
    if origin.padding is not None:
        theirs = theirs & origin.columns(origin.padding, pad=True)[:, None, None]
    ours = value.bind(origin.offset, origin.s).keep(batch, head, row + origin.offset, j)
    shape = (b, 1, len(rows), origin.s)
    if not torch.equal(ours.expand(shape), theirs.expand(shape)):
        return None
    return LazyMask(combine(value), origin.offset, (b, 1, origin.t, origin.s), make, device)


def padding_mask(real: Tensor, s: int) -> Mask:
    """Return padding `[b, n]` (True = not padding) as a mask of s keys. Keys beyond n are padding."""
    keys = nn.functional.pad(real, (0, s - real.shape[1]))[:, None, None, :]  # [b, 1, 1, s]
    # In inference mode changes in place aren't counted, so the mask needs its own copy.
    mask = recognize_mask(keys.clone() if keys.is_inference() else keys)
    return Full() if mask is None else mask


def combine(*masks: Mask | None) -> Mask | None:
    """Return the intersection of masks, with their bands joined into one; None if it keeps everything."""
    present = (mask for mask in masks if mask is not None)
    (low, high), *others = reduce(and_, present, Full()).normal()
    bands = [] if (low, high) == (None, None) else [band_mask(low, high)]
    parts = [*bands, *chain.from_iterable(others)]
    return reduce(and_, parts) if parts else None
