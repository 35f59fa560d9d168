"""Which parameter is the weight or bias of which projection, by names, then by shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates.construct import HEADS
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.isolation.describe import Description
from manyheads.checker.oracle import ROLES, Weights
from manyheads.shapes import sizes

Shapes = Mapping[str, tuple[int, ...]]
PACKED = ("qkv", "kv")
NAME_THEM = "Name the weights with --weights q=...,k=...,v=...,o=...."


@dataclass(frozen=True)
class Part:
    """Where a weight or bias is: a parameter, how it is laid out, and which rows of it."""

    path: str
    transposed: bool = False  # [in, out]
    axes: str = ""  # of a weight with a head dimension, letters h, d and e
    rows: tuple[int, int] | None = None
    packed: int | None = None  # the place among q, k and v, where a head's may be side by side

    def read(self, tensors: Mapping[str, Tensor], role: str, heads: int, side_by_side: bool) -> Tensor:
        """Return the weight as `[out, in]`, or the bias as `[out]`."""
        x = tensors[self.path]
        if self.axes:
            order = "ehd" if role == "o" else "hde"
            x = x.permute(*map(self.axes.index, order))
            return x.flatten(1) if role == "o" else x.flatten(0, 1)
        x = x.mT if self.transposed else x
        if self.rows is not None and side_by_side and self.packed is not None:
            size = (self.rows[1] - self.rows[0]) // heads
            return x.unflatten(0, (heads, 3, size))[:, self.packed].flatten(0, 1)
        return x if self.rows is None else x[slice(*self.rows)]

    def fan_in(self, role: str, shape: tuple[int, ...]) -> int:
        """Return the number of inputs of a weight."""
        if self.axes:
            size = dict(zip(self.axes, shape, strict=True))
            return size["h"] * size["d"] if role == "o" else size["e"]
        return shape[0] if self.transposed else shape[-1]


@dataclass
class Projections:
    """The parameters by role; a role has several parts if each head has its own.

    `heads_known` says whether the number of heads was found, rather than assumed to be 1.
    """

    weight: dict[str, list[Part]] = field(default_factory=dict)
    bias: dict[str, list[Part]] = field(default_factory=dict)
    heads: int = 1
    key_heads: int = 1
    heads_known: bool = True
    sink: str | None = None
    unused: list[str] = field(default_factory=list)

    def read(self, tensors: Mapping[str, Tensor], side_by_side: bool = False) -> Weights:
        """Return the weights for the oracle.

        Packed weights are ordered with q, k and v of a head side by side, or all of q, then k, then v.
        """

        def read(role: str, parts: list[Part]) -> list[Tensor]:
            return [part.read(tensors, role, self.heads, side_by_side) for part in parts]

        return Weights(
            self.heads,
            self.key_heads,
            {role: torch.cat(read(role, parts), int(role == "o")) for role, parts in self.weight.items()},
            {
                role: torch.cat([x.flatten() for x in read(role, parts if role != "o" else parts[:1])])
                for role, parts in self.bias.items()
            },
            None if self.sink is None else tensors[self.sink].flatten(),
        )

    def paths(self) -> list[str]:
        """Return all parameters that have a role."""
        parts = [p for table in (self.weight, self.bias) for every in table.values() for p in every]
        return list(dict.fromkeys([*(p.path for p in parts), *([self.sink] if self.sink else [])]))

    def fan_in(self, path: str, shape: tuple[int, ...]) -> int:
        """Return the number of inputs of the weight at a path; random values are scaled by its root."""
        if path == self.sink:
            return 1
        every = [(role, p) for role, parts in self.weight.items() for p in parts if p.path == path]
        return every[0][1].fan_in(every[0][0], shape) if every else 4  # a bias

    @property
    def can_be_side_by_side(self) -> bool:
        """Return True if q, k and v are packed in one weight, in an order that isn't known."""
        packed = any(p.packed is not None for parts in self.weight.values() for p in parts)
        return packed and self.heads == self.key_heads


def find_projections(d: Description, init: Mapping[str, Any], given: Mapping[str, str]) -> Projections:
    """Find the parameters of each role; `given` maps roles to names of layers.

    Unclear is raised if a role has no weight, or the number of heads isn't known.
    """
    shapes, found = d.parameters, Projections()
    weight, bias = assign_roles(shapes, given, found)
    if "qkv" in weight and "q" in weight:
        found.unused += weight.pop("qkv")
    heads = count_heads(d, HEADS, init)
    per_head = max((len(every) for role, every in weight.items() if role in "qkv"), default=1)
    if per_head > 1:
        heads = per_head
    raw = [shapes[path] for every in weight.values() for path in every if len(shapes[path]) == 3]
    if raw and heads is None:
        heads = common_size(raw)
    if heads is None and re.search(r"multi", d.name, re.I):
        raise Unclear(
            f"{d.name} has several heads by its name, and none of its attributes says how many "
            f"({', '.join(d.attributes) or 'it has none'}). Store the number as self.num_heads."
        )
    found.heads, found.heads_known = heads or 1, heads is not None
    groups = count_heads(d, "the number of key heads", init)
    found.key_heads = groups if groups and found.heads % groups == 0 else found.heads
    for role, every in weight.items():
        parts = [weight_part(path, shapes[path], d, role, found, init) for path in every]
        found.weight |= unpack_rows(role, parts, found, shapes)
    for role, every in bias.items():
        found.bias |= unpack_rows(role, [Part(path) for path in every], found, shapes)
    missing = " and ".join(role for role in "qkv" if role not in found.weight)
    if missing and not shapes:
        raise Unclear(
            f"{d.name} has no parameters, so it isn't a layer with projections. "
            "Give its kind with --like (attention, positional, rotary, …)."
        )
    if missing:
        listed = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
        raise Unclear(
            f"Found no weights for {missing} among the parameters of {d.name} ({listed}). {NAME_THEM}"
        )
    if groups is None and not any(p.axes for p in found.weight["q"]):
        weights = found.read({path: torch.empty(shape, device="meta") for path, shape in shapes.items()})
        q, k = (weights.weight[role].shape[0] for role in "qk")
        if k < q and q % found.heads == 0 and k % (q // found.heads) == 0:  # fewer key heads
            found.key_heads = k // (q // found.heads)
    return found


def assign_roles(
    shapes: Shapes, given: Mapping[str, str], found: Projections
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the paths of weights by role, and those of biases, heads in order."""
    given_roles = {path: role for role, layer in given.items() for path in paths_of(layer, shapes, role)}
    listed = find_listed(shapes)
    paths: dict[str, dict[str, list[tuple[int, str]]]] = {"weight": {}, "bias": {}}
    for n, (path, shape) in enumerate(shapes.items()):
        if path in given_roles:
            role, part, head = given_roles[path], "bias" if len(shape) == 1 else "weight", None
        elif names.SINK.search(path):
            found.sink = path
            continue
        else:
            meaning = listed.get(path) or names.parameter_role(path)
            is_vector = meaning is not None and meaning[1] == "weight" and len(shape) == 1
            if meaning is None or is_vector or meaning[0] in given_roles.values():
                found.unused.append(path)
                continue
            role, part, head = meaning
        paths[part].setdefault(role, []).append((n if head is None else head * 1000 + n, path))
    weight, bias = (
        {role: [path for _, path in sorted(every)] for role, every in of.items()} for of in paths.values()
    )
    return weight, bias


def paths_of(layer: str, shapes: Shapes, role: str) -> list[str]:
    """Return the parameters of a layer that --weights names."""
    if role not in (*ROLES, *PACKED):
        raise Unclear(f"Expected the roles q, k, v, o, qkv and kv in --weights, got {role!r}.")
    found = [path for path in shapes if path == layer or path.startswith(f"{layer}.")]
    if not found:
        raise Unclear(f"--weights names {layer!r} for {role}, but the parameters are {', '.join(shapes)}.")
    return found


def find_listed(shapes: Shapes) -> dict[str, tuple[str, str, None]]:
    """Return the roles of three or four layers in a list: q, k, v, o in this order."""
    lists: dict[str, set[int]] = {}
    for path in shapes:
        match = re.fullmatch(r"(\w+)\.(\d+)\.(weight|bias)", path)
        if match and names.parameter_role(match[1]) in (None, ("o", "weight", None)):
            lists.setdefault(match[1], set()).add(int(match[2]))
    return {
        f"{name}.{n}.{part}": ("qkvo"[n], part, None)
        for name, numbers in lists.items()
        if numbers in ({0, 1, 2, 3}, {0, 1, 2})
        for n in numbers
        for part in ("weight", "bias")
    }


def count_heads(d: Description, what: str, init: Mapping[str, Any]) -> int | None:
    """Return a number of heads, from attributes or constructor arguments, None if neither says."""
    defaults = {arg.name: arg.default for arg in d.init or () if not arg.required}
    values = {**defaults, **init, **d.attributes}
    counts = {name: n for name, n in values.items() if type(n) is int and n > 0}
    candidates = [counts[name] for name in names.CONSTRUCTOR[what][1] if name in counts]
    if what == HEADS:
        other = r"dim|size|width|kv|group|key|per"
        candidates += [
            n for name, n in counts.items() if "head" in name.lower() and not re.search(other, name.lower())
        ]
    return next(iter(candidates), None)


def common_size(shapes: list[tuple[int, ...]]) -> int | None:
    """Return the size that raw weights `[h, e, d]` share: of the first axis, or the smallest."""
    shared = set(shapes[0]).intersection(*map(set, shapes[1:]))
    return shapes[0][0] if shapes[0][0] in shared else min(shared, default=None)


def weight_part(
    path: str, shape: tuple[int, ...], d: Description, role: str, found: Projections, init: Mapping[str, Any]
) -> Part:
    """Return how a weight is laid out."""
    if len(shape) == 3:
        if role in PACKED:
            raise Unclear(
                f"{path} {list(shape)} packs several projections in three dimensions, which isn't supported. "
                "Write an adapter with separate projections."
            )
        at = shape.index(found.heads) if found.heads in shape else 0
        first, second = (axis for axis in range(3) if axis != at)
        # Raw weights are written as they multiply: x [.., e] @ [e, d]; for o [d, e].
        e, other = (second, first) if role == "o" else (first, second)
        is_width = names.WIDTH in init.values() and shape.count(names.WIDTH) == 1
        if is_width and shape[other] == names.WIDTH:
            e, other = other, e
        letters = {at: "h", e: "e", other: "d"}
        return Part(path, axes="".join(letters[axis] for axis in range(3)))
    owner = d.layers.get(path.rpartition(".")[0], "")
    is_raw = owner not in ("Linear", "NonDynamicallyQuantizableLinear", "LazyLinear")
    is_named_weight = path.endswith(("_weight", ".weight"))
    return Part(path, transposed=owner == "Conv1D" or (is_raw and not is_named_weight))


def unpack_rows(role: str, parts: list[Part], found: Projections, shapes: Shapes) -> dict[str, list[Part]]:
    """Return parts by role; packed ones are cut into equal rows, or by the number of key heads."""
    if role not in PACKED:
        return {role: parts}
    part = parts[0]
    shape = shapes[part.path]
    rows = shape[1] if part.transposed and len(shape) == 2 else shape[0]
    heads = [found.heads, found.key_heads, found.key_heads] if role == "qkv" else [1, 1]
    starts = [rows // sum(heads) * sum(heads[:n]) for n in range(len(heads) + 1)]
    return {
        letter: [Part(part.path, part.transposed, rows=(a, b), packed=n if role == "qkv" else None)]
        for n, (letter, a, b) in enumerate(zip(role, starts, starts[1:], strict=False))
    }


def input_widths(weights: Weights) -> tuple[int, int, int]:
    """Return the widths of the inputs of q, k and v; Unclear if heads don't divide the weights."""
    for role, heads in (("q", weights.heads), ("k", weights.key_heads)):
        if weights.weight[role].shape[0] % heads:
            size = sizes(weights.weight[role])
            raise Unclear(f"The {role} weights {size} can't be split into {heads} heads. {NAME_THEM}")
    q, k, v = (weights.weight[role].shape[1] for role in "qkv")
    return q, k, v
