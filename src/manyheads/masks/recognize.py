"""Recognize the mask in a tensor: causal, padding, or neither.

Models pass masks as boolean tensors, or as floats that are added to the scores. A recognized mask becomes a
value such as `Causal() & Lengths(…)`, which takes no memory, has a readable name, can be saved, and can be
extended by the next step of a generation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manyheads.masks.algebra import Mask
from manyheads.masks.leaves import Causal, Keep, Lengths


def split_masks(
    tensors: Mapping[str, Tensor], offset: int = 0, t: int | None = None, detach: bool = True
) -> tuple[Mask | None, Tensor | None]:
    """Split mask tensors into a mask and a bias.

    Args:
        tensors: Tensors by name that broadcast to `[b, h, t, s]`: booleans (True = attend), or floats that
            are added to scores. −inf masks, and so does the lowest number of the dtype, which models use
            for −inf.
        offset: The position of the first query.
        t: The number of queries, if a mask may have fewer rows.
        detach: If False, the tensor to add has the gradient of those that were given.

    Returns:
        A mask, and a tensor to add that broadcasts to `[b, h, t, s]`; None if nothing is masked or added.

    Raises:
        TypeError: If a tensor has integers.
        ValueError: If a tensor has NaN or +inf.
    """
    mask: Mask | None = None
    bias: Tensor | None = None
    for name, tensor in tensors.items():
        tensor = collapse(tensor.detach() if detach else tensor)
        keep = visible(tensor.detach(), name)
        if tensor.is_floating_point():
            if not bool((tensor.detach() < torch.inf).all()):
                raise ValueError(f"Expected finite numbers or -inf (masked) in {name}, got NaN or +inf.")
            added = torch.where(keep, tensor, 0.0)
            # A constant that is added to a whole row, such as -1e9 on padding, doesn't change its softmax,
            # but the sum of such a number and a score would lose the digits of the score.
            constant = torch.where(keep, tensor.detach(), -torch.inf).amax(-1, keepdim=True)
            added = torch.where(keep & (constant.abs() > 1000), tensor - constant, added)
            if added.requires_grad or bool((added != 0).any()):
                bias = added if bias is None else bias + added
        # In inference mode changes in place aren't counted, so the mask needs its own copy.
        recognized = recognize_mask(keep.clone() if keep.is_inference() else keep, offset, t)
        if recognized is not None:
            mask = recognized if mask is None else mask & recognized
    return mask, bias


def visible(tensor: Tensor, name: str = "attn_mask") -> Tensor:
    """Return a boolean or additive mask tensor as booleans (True = attend)."""
    if tensor.dtype == torch.bool:
        return tensor
    if not tensor.is_floating_point():
        raise TypeError(f"Expected {name} to be boolean or of floats, got {tensor.dtype}.")
    return tensor > torch.finfo(tensor.dtype).min / 2  # a bias may have been added to the lowest number


def collapse(mask: Tensor) -> Tensor:
    """Return a mask tensor with four axes, of which the first three have size 1 if they were expanded."""
    mask = mask[(None,) * (4 - mask.dim())]
    for axis in range(3):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, min(mask.shape[axis], 1))
    return mask


def first_position(keep: Tensor, t: int, default: int) -> int:
    """Return the position of the first of t queries if their mask `[…, t, s]` is a triangle."""
    n = int(keep.flatten(0, -2)[0].sum()) if keep.numel() else 0
    is_triangle = n > 0 and keep.shape[-2] == t and torch.equal(keep, torch.ones_like(keep).tril(n - 1))
    return n - 1 if is_triangle else default


def recognize_mask(keep: Tensor, offset: int = 0, t: int | None = None) -> Mask | None:
    """Return a boolean tensor as a mask.

    Args:
        keep: The tensor `[b or 1, h or 1, t or 1, s]` (True = attend).
        offset: The position of the first query.
        t: The number of queries.

    Returns:
        `Causal` and `Lengths` if the tensor equals them, else `Keep`; None if nothing is masked.
    """
    if bool(keep.all()):
        return None
    b, h, rows, s = keep.shape
    # A single row is a row of a triangle only if there is one query, else it is the mask of all queries.
    if (rows > 1 or t == 1) and torch.equal(keep, torch.ones_like(keep).tril(offset)):
        return Causal()
    if h == 1 and rows > 1 and offset + rows >= s:  # it may be a triangle and padding, which the last row has
        keys = keep[:, :, -1:]
        if torch.equal(keep, torch.ones_like(keep).tril(offset) & keys):
            padding = recognize_mask(keys)
            return Causal() if padding is None else Causal() & padding
    if h == rows == 1:  # the same keys are visible to all queries: it may be padding on the right or left
        n = keep.sum(-1).reshape(b)
        j = torch.arange(s, device=keep.device)
        if torch.equal(keep.reshape(b, s), j < n[:, None]):
            return Lengths(n)
        if torch.equal(keep.reshape(b, s), j >= s - n[:, None]):
            return Lengths(n, left=True)
    return Keep(keep)
