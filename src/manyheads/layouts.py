"""Layouts: heads in a tensor, weights in a state dict, and the arguments of torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.shapes import sizes

WEIGHTS = frozenset(f"{part}.weight" for part in "qkvo")  # the names in "separate"
REQUIREMENTS = {  # by layout: the layers that it supports
    "packed": "one input for q, k and v (context_dim = embed)",
    "torch": "kv_heads = heads and head_dim = embed / heads",
    "heads": "kv_heads = heads",
}


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return x `[b, t, h · d]` as heads `[b, h, t, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Return heads x `[b, h, t, d]` concatenated, `[b, t, h · d]`."""
    return x.transpose(1, 2).flatten(2)


# -- weights in a state dict -------------------------------------------------------------------------


class LayerSizes(NamedTuple):
    """The sizes of a multi-head attention layer, as `MultiHeadAttention` has them."""

    heads: int
    kv_heads: int
    head_dim: int
    embed: int
    context_dim: int


def read_weights(tensors: Mapping[str, Tensor], layout: str, layer: LayerSizes) -> dict[str, Tensor]:
    """Convert weights of a layout to "separate".

    Args:
        tensors: The weights `[out, in]` and biases `[out]` by their names in the layout.
        layout: The layout's name, "separate", "packed", "torch" or "heads".
        layer: The sizes of the layer.

    Returns:
        The weights by their names in "separate". Biases can be absent.

    Raises:
        ValueError: If the layout doesn't support the layer, or a name is unknown or missing.
    """
    names = _names(layout, layer, packed="q_proj_weight" not in tensors)
    present = {name: parts for name, parts in names.items() if name in tensors}  # in the order of the heads
    required = WEIGHTS.union(*present.values())  # if a part of a bias is present, all parts are required
    unknown = sorted(tensors.keys() - names.keys())
    missing = [name for name, parts in names.items() if name not in tensors and required & {*parts}]
    if unknown or missing:
        problem = f"got {', '.join(unknown)}" if unknown else f"{', '.join(missing)} is missing"
        raise ValueError(
            f"Expected the names of layout {layout!r}, such as {next(iter(names))}, {problem}. "
            "Choose the layout that the tensors have, or rename them."
        )
    h, g, d = layer.heads, layer.kv_heads, layer.head_dim
    pieces: dict[str, list[Tensor]] = {}
    for name, parts in present.items():
        rows = [h * d, g * d, g * d] if len(parts) == 3 else [len(tensors[name])]
        if len(tensors[name]) != sum(rows):
            raise ValueError(
                f"Expected {name} to have {sum(rows)} rows, those of q, k and v, got {sizes(tensors[name])}."
            )
        for part, piece in zip(parts, tensors[name].split(rows), strict=True):
            pieces.setdefault(part, []).append(piece)
    return {part: torch.cat(chunks) for part, chunks in pieces.items()}


def write_weights(separate: Mapping[str, Tensor], layout: str, layer: LayerSizes) -> dict[str, Tensor]:
    """Convert weights from "separate".

    Args:
        separate: The weights `[out, in]` and biases `[out]` by their names in "separate".
        layout: The layout's name.
        layer: The sizes of the layer.

    Returns:
        Copies of the weights by their names in the layout.

    Raises:
        ValueError: If the layout doesn't support the layer.
    """
    names = _names(layout, layer, packed=layer.context_dim == layer.embed)
    counts = Counter(part for parts in names.values() for part in parts)
    pieces = {part: iter(tensor.chunk(counts[part])) for part, tensor in separate.items()}
    return {
        name: torch.cat([next(pieces[part]) for part in parts])
        for name, parts in names.items()
        if parts[0] in separate
    }


def _names(layout: str, layer: LayerSizes, packed: bool) -> dict[str, list[str]]:
    """Return the names of a layout's tensors, each with the names of the corresponding tensors of "separate".

    A tensor of the layout concatenates the rows of several tensors of "separate", or contains an equal share
    of the rows of one. `packed` selects the form of "torch" with `in_proj_weight`, not three weights.
    """
    ungrouped = layer.kv_heads == layer.heads
    supported = {
        "separate": True,
        "packed": layer.context_dim == layer.embed,
        "torch": ungrouped and layer.head_dim * layer.heads == layer.embed,
        "heads": ungrouped,
    }
    if layout not in supported:
        raise ValueError(f"Expected layout to be one of {', '.join(supported)}, got {layout!r}.")
    if not supported[layout]:
        got = ", ".join(f"{name}={size}" for name, size in layer._asdict().items())
        raise ValueError(f'Layout {layout!r} needs {REQUIREMENTS[layout]}, got {got}. Use layout="separate".')
    names: dict[str, list[str]] = {}
    for suffix in ("weight", "bias"):
        q, k, v, o = (f"{part}.{suffix}" for part in "qkvo")
        if layout == "separate":
            names |= {part: [part] for part in (q, k, v, o)}
        elif layout == "packed":
            names |= {f"qkv.{suffix}": [q, k, v], o: [o]}
        elif layout == "heads":
            names |= {f"heads.{n}.{part}": [part] for part in (q, k, v) for n in range(layer.heads)}
            names[o] = [o]
        elif packed or suffix == "bias":
            names |= {f"in_proj_{suffix}": [q, k, v], f"out_proj.{suffix}": [o]}
        else:
            names |= {f"{part[0]}_proj_weight": [part] for part in (q, k, v)}
            names["out_proj.weight"] = [o]
    return names


# -- the arguments of torch.nn.MultiheadAttention ----------------------------------------------------


def project_inputs(
    inputs: Iterable[Tensor], weights: Sequence[Tensor], packed_bias: Tensor | None
) -> list[Tensor]:
    """Project query, key and value `[…, e]` by their weights `[e, …]` and a packed bias `[3 · e]`."""
    biases = (None,) * 3 if packed_bias is None else packed_bias.chunk(3)
    return [F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True)]


def reshape_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, heads: int, b: int, t: int, s: int
) -> dict[str, Tensor]:
    """Reshape the masks that aren't None, so that they broadcast to `[b, h, t, s]`.

    Args:
        key_padding_mask: The mask `[b, s]`, or `[s]` if b is 1.
        attn_mask: The mask `[t, s]` or `[b · heads, t, s]`.
        heads: The number of heads.
        b: The number of sequences.
        t: The number of queries.
        s: The number of keys.

    Returns:
        The masks by name.
    """
    masks = {}
    if key_padding_mask is not None:
        masks["key_padding_mask"] = key_padding_mask.reshape(b, 1, 1, s)
    if attn_mask is not None:
        masks["attn_mask"] = attn_mask.reshape((1, 1, t, s) if attn_mask.dim() == 2 else (b, heads, t, s))
    return masks
