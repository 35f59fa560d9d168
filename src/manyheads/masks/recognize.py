"""Recognize the mask in a tensor: causal, padding, or neither.

Models pass masks as boolean tensors, or as floats that are added to the scores. A mask that is recognized
becomes a value such as `Causal() & Lengths(…)`, which takes no memory, prints what it is, can be saved, and
can be continued by the next step of a generation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manyheads.masks.algebra import Mask
from manyheads.masks.leaves import Causal, Keep, Lengths


def split_masks(
    tensors: Mapping[str, Tensor], offset: int = 0, t: int | None = None
) -> tuple[Mask | None, Tensor | None]:
    """Return what mask tensors keep, and what they add to the scores.

    Args:
        tensors: Tensors by name, each broadcasting to `[b, h, t, s]`: booleans (True = attend), or floats,
            which are added; −inf masks, and so does the lowest number of the dtype, which models use for it.
        offset: The position of the first query.
        t: The number of queries, where a mask may have fewer rows.

    Returns:
        A mask, and a tensor to add that broadcasts to `[b, h, t, s]`; None if nothing is masked or added.

    Raises:
        TypeError: For a tensor of integers.
        ValueError: For NaN and +inf.
    """
    mask: Mask | None = None
    bias: Tensor | None = None
    for name, tensor in tensors.items():
        tensor = collapse(tensor.detach())
        kept = visible(tensor, name)
        if tensor.is_floating_point():
            if not bool((tensor < torch.inf).all()):
                raise ValueError(f"Expected {name} to hold numbers and -inf (masked), got NaN or +inf.")
            added = torch.where(kept, tensor, 0.0)
            # A constant that is added to a whole row, such as -1e9 on padding, doesn't change its softmax,
            # but beside a number of that size the scores would be rounded away.
            constant = torch.where(kept, tensor, -torch.inf).amax(-1, keepdim=True)
            added = torch.where(kept & (constant.abs() > 1000), tensor - constant, added)
            if bool((added != 0).any()):
                bias = added if bias is None else bias + added
        # In inference mode changes in place aren't counted, so the mask needs its own copy.
        part = recognize_mask(kept.clone() if kept.is_inference() else kept, offset, t)
        if part is not None:
            mask = part if mask is None else mask & part
    return mask, bias


def visible(tensor: Tensor, name: str = "attn_mask") -> Tensor:
    """Return where a boolean or additive mask tensor lets a query attend."""
    if tensor.dtype == torch.bool:
        return tensor
    if not tensor.is_floating_point():
        raise TypeError(f"Expected {name} to be boolean or of floats, got {tensor.dtype}.")
    return tensor > torch.finfo(tensor.dtype).min / 2  # sums of a mask and a bias are near the lowest number


def collapse(mask: Tensor) -> Tensor:
    """Return a mask with four axes, the first three of size 1 where an expanded tensor repeats itself."""
    mask = mask[(None,) * (4 - mask.dim())]
    for axis in range(3):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, min(mask.shape[axis], 1))
    return mask


def first_position(kept: Tensor, t: int, default: int) -> int:
    """Return the position of the first of t queries if their mask `[…, t, s]` is a triangle."""
    n = int(kept.flatten(0, -2)[0].sum()) if kept.numel() else 0
    is_triangle = n > 0 and kept.shape[-2] == t and torch.equal(kept, torch.ones_like(kept).tril(n - 1))
    return n - 1 if is_triangle else default


def recognize_mask(kept: Tensor, offset: int = 0, t: int | None = None) -> Mask | None:
    """Return a boolean tensor `[b or 1, h or 1, t or 1, s]` (True = attend) as a mask.

    Args:
        kept: The tensor.
        offset: The position of the first query.
        t: The number of queries.

    Returns:
        None if everything is kept; `Causal` and `Lengths` where the tensor equals them, else `Keep`.
    """
    if bool(kept.all()):
        return None
    b, h, rows, s = kept.shape
    # One row is a row of a triangle only if there is one query; else it holds for all queries.
    if (rows > 1 or t == 1) and torch.equal(kept, torch.ones_like(kept).tril(offset)):
        return Causal()
    if h == 1 and rows > 1 and offset + rows >= s:  # a triangle and padding, which its last row shows?
        keys = kept[:, :, -1:]
        if torch.equal(kept, torch.ones_like(kept).tril(offset) & keys):
            padding = recognize_mask(keys)
            return Causal() if padding is None else Causal() & padding
    if h == rows == 1:  # the same keys for all queries: padding on the right or on the left?
        n = kept.sum(-1).reshape(b)
        j = torch.arange(s, device=kept.device)
        if torch.equal(kept.reshape(b, s), j < n[:, None]):
            return Lengths(n)
        if torch.equal(kept.reshape(b, s), j >= s - n[:, None]):
            return Lengths(n, left=True)
    return Keep(kept)
