"""Trees of tensors and plain values: the arguments and outputs of a call.

A tree is a Tensor, None, bool, int, float or str, or a list, tuple or dict (with str keys) of trees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Imported by name before the candidate is: one that patches torch doesn't patch these.
from torch import Tensor, empty_strided, equal

from manyheads.checker.isolation.errors import print_safely
from manyheads.trees import DTYPES

DEPTH = 32  # of a tree


@dataclass(frozen=True)
class Foreign:
    """Replaces an object in an output that is neither a tensor nor a plain value, with its shortened repr."""

    type: str
    text: str


def to_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's values, in order of their indices, as uint8 `[bytes]` on the CPU."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and bits, also of NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and equal(to_bytes(a), to_bytes(b))


def with_strides(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `values` with these strides; an expanded dimension (stride 0) stays expanded."""
    if not values.numel():
        return values.detach().clone()
    shape = tuple(values.shape)
    once = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    copied = empty_strided(once, stride, dtype=values.dtype, device=values.device)
    for axis, size in enumerate(once):
        values = values.narrow(axis, 0, size)
    return copied.copy_(values.detach()).expand(shape)


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree with each tensor changed; a tensor that occurs twice is changed once."""
    change_once = functools.cache(change)  # tensors are equal as keys only if they are one object

    def walk(node: Any) -> Any:
        if isinstance(node, Tensor):
            return change_once(node)
        if isinstance(node, list | tuple):
            return type(node)(walk(child) for child in node)
        return {key: walk(child) for key, child in node.items()} if isinstance(node, dict) else node

    return walk(tree)


def iterate_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree with their paths, such as "0.key", in order."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, list | tuple | dict):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from iterate_tensors(child, f"{path}.{key}" if path else str(key))


def top_tensors(output: Any) -> list[Tensor]:
    """Return a tensor, or the tensors in a tuple, list, mapping or dataclass, as a list."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    values = [*output.values()] if isinstance(output, Mapping) else output
    return [x for x in (values if isinstance(values, list | tuple) else [values]) if isinstance(x, Tensor)]


def to_tree(value: Any, depth: int = 0) -> Any:
    """Return an output as a tree: tensors are copied to the CPU, other objects become Foreign."""
    if value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < 2**63):
        return value
    if isinstance(value, np.ndarray | np.generic):
        with contextlib.suppress(TypeError):  # an array of objects or of strings
            is_array = isinstance(value, np.ndarray)
            return torch.from_numpy(np.array(value)) if is_array else to_tree(value.item())
    if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in DTYPES.values():
        copied = value.detach().cpu().resolve_conj().resolve_neg()
        return copied.clone(memory_format=torch.contiguous_format).as_subclass(Tensor)
    if depth < DEPTH:
        if isinstance(value, list | tuple):
            children = [to_tree(child, depth + 1) for child in value]
            return tuple(children) if isinstance(value, tuple) else children
        if isinstance(value, Mapping) and all(type(key) is str for key in value):
            return {key: to_tree(child, depth + 1) for key, child in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: to_tree(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    return Foreign(type(value).__name__, print_safely(repr, value))
