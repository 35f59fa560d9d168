"""Find which parameter is the weight or bias of which projection, by names, then by shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates.construct import HEADS, KEY_HEADS
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.candidates.forms import rearrange
from manyheads.checker.isolation.describe import Description
from manyheads.checker.oracle import ROLES, Weights
from manyheads.shapes import sizes

Shapes = Mapping[str, tuple[int, ...]]
PACKED = ("qkv", "kv")
NAME_WEIGHTS = "Name the weights with --weights q=...,k=...,v=...,o=...."


@dataclass(frozen=True)
class ParameterView:
    """A weight or a bias, which is a parameter or some rows of one.

    Attributes:
        path: the parameter's name.
        transposed: whether a weight is stored as `[in, out]`.
        axes: the letters h, d and e of a weight with an axis of heads, in their order.
        rows: the rows of a packed parameter, from the first to before the second.
        place: 0, 1 or 2 for q, k or v of a packed parameter, which may store each head's q, k and v together.
    """

    path: str
    transposed: bool = False
    axes: str = ""
    rows: tuple[int, int] | None = None
    place: int | None = None

    def read(self, tensors: Mapping[str, Tensor], role: str, heads: int, by_head: bool) -> Tensor:
        """Return the weight as `[out, in]`, or the bias as `[out]`."""
        values = tensors[self.path]
        if self.axes and role == "o":
            return rearrange(values, self.axes, "ehd").flatten(1)
        if self.axes:
            return rearrange(values, self.axes, "hde").flatten(0, 1)
        values = values.mT if self.transposed else values
        if self.place is not None and by_head:
            return values.unflatten(0, (heads, 3, -1))[:, self.place].flatten(0, 1)
        return values if self.rows is None else values[slice(*self.rows)]


@dataclass
class Projections:
    """The weights and biases by role; a role has several views if each head has its own parameter.

    `heads_known` says whether the number of heads was found, rather than assumed to be 1.
    """

    weight: dict[str, list[ParameterView]] = field(default_factory=dict)
    bias: dict[str, list[ParameterView]] = field(default_factory=dict)
    heads: int = 1
    key_heads: int = 1
    heads_known: bool = True
    sink: str | None = None
    unused: list[str] = field(default_factory=list)

    def read(self, tensors: Mapping[str, Tensor]) -> list[Weights]:
        """Return the weights for the oracle, in each order in which they may be packed.

        A packed parameter contains all of q, then k, then v; or q, k and v of each head in turn.
        """

        def read_order(by_head: bool) -> Weights:
            def read(role: str, views: list[ParameterView]) -> list[Tensor]:
                return [view.read(tensors, role, self.heads, by_head) for view in views]

            weight = {
                role: torch.cat(read(role, views), int(role == "o")) for role, views in self.weight.items()
            }
            bias = {
                role: torch.cat([x.flatten() for x in read(role, views if role != "o" else views[:1])])
                for role, views in self.bias.items()
            }
            sink = None if self.sink is None else tensors[self.sink].flatten()
            return Weights(self.heads, self.key_heads, weight, bias, sink)

        is_packed = any(view.place is not None for views in self.weight.values() for view in views)
        orders = [False, True] if is_packed and self.heads == self.key_heads else [False]
        return [read_order(by_head) for by_head in orders]

    def count_inputs(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of inputs of each parameter with a role, by which random values are scaled."""
        counts = {
            view.path: view.read(tensors, role, self.heads, False).shape[-1]
            for role, views in self.weight.items()
            for view in views
        }
        biases = [view.path for views in self.bias.values() for view in views]
        return counts | dict.fromkeys(biases, 4) | ({} if self.sink is None else {self.sink: 1})


def find_projections(
    description: Description, init: Mapping[str, Any], layers: Mapping[str, str]
) -> Projections:
    """Find the parameters of each role.

    Args:
        description: The module.
        init: Its constructor arguments.
        layers: The names of layers that the user gave, by role.

    Returns:
        The weights and biases by role, and the numbers of heads.

    Raises:
        Unclear: If a role has no weight, or the number of heads isn't known.
    """
    shapes, projections = description.parameters, Projections()
    weight, bias = assign_roles(shapes, layers, projections)
    if "qkv" in weight and "q" in weight:
        projections.unused += weight.pop("qkv")
    heads = count_heads(description, HEADS, init)
    per_head = max((len(paths) for role, paths in weight.items() if role in "qkv"), default=1)
    if per_head > 1:
        heads = per_head
    cubes = [shapes[path] for paths in weight.values() for path in paths if len(shapes[path]) == 3]
    if cubes and heads is None:
        heads = common_size(cubes)
    if heads is None and re.search(r"multi", description.name, re.I):
        raise Unclear(
            f"{description.name} has several heads by its name, and none of its attributes says how many "
            f"({', '.join(description.attributes) or 'it has none'}). Store the number as self.num_heads."
        )
    projections.heads, projections.heads_known = heads or 1, heads is not None
    key_heads = count_heads(description, KEY_HEADS, init)
    is_grouped = key_heads and projections.heads % key_heads == 0
    projections.key_heads = key_heads if key_heads and is_grouped else projections.heads
    for role, paths in weight.items():
        views = [view_weight(path, shapes[path], description, role, projections, init) for path in paths]
        projections.weight |= split_packed(role, views, projections, shapes)
    for role, paths in bias.items():
        projections.bias |= split_packed(role, [ParameterView(path) for path in paths], projections, shapes)
    missing = " and ".join(role for role in "qkv" if role not in projections.weight)
    if missing and not shapes:
        raise Unclear(
            f"{description.name} has no parameters, so it isn't a layer with projections. "
            "Give its kind with --like (attention, positional, rotary, …)."
        )
    if missing:
        listed = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
        raise Unclear(
            f"Found no weights for {missing} among the parameters of {description.name} ({listed}). "
            f"{NAME_WEIGHTS}"
        )
    if key_heads is None and not any(view.axes for view in projections.weight["q"]):
        empty = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
        q, k = (projections.read(empty)[0].weight[role].shape[0] for role in "qk")
        if k < q and q % projections.heads == 0 and k % (q // projections.heads) == 0:
            projections.key_heads = k // (q // projections.heads)
    return projections


def assign_roles(
    shapes: Shapes, layers: Mapping[str, str], projections: Projections
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the paths of weights by role, and those of biases, heads in order."""
    chosen = {path: role for role, layer in layers.items() for path in find_layer(layer, shapes, role)}
    listed = find_listed(shapes)
    paths: dict[str, dict[str, list[tuple[int, str]]]] = {"weight": {}, "bias": {}}
    for n, (path, shape) in enumerate(shapes.items()):
        if path in chosen:
            role, part, head = chosen[path], "bias" if len(shape) == 1 else "weight", None
        elif names.SINK.search(path):
            projections.sink = path
            continue
        else:
            meaning = listed.get(path) or names.parameter_role(path)
            is_vector = meaning is not None and meaning[1] == "weight" and len(shape) == 1
            if meaning is None or is_vector or meaning[0] in layers:
                projections.unused.append(path)
                continue
            role, part, head = meaning
        paths[part].setdefault(role, []).append((n if head is None else head * 1000 + n, path))
    weight, bias = (
        {role: [path for _, path in sorted(entries)] for role, entries in paths[part].items()}
        for part in ("weight", "bias")
    )
    return weight, bias


def find_layer(layer: str, shapes: Shapes, role: str) -> list[str]:
    """Return the parameters of a layer that the user named."""
    if role not in (*ROLES, *PACKED):
        raise Unclear(f"Expected the roles q, k, v, o, qkv and kv in --weights, got {role!r}.")
    paths = [path for path in shapes if path == layer or path.startswith(f"{layer}.")]
    if not paths:
        raise Unclear(f"--weights names {layer!r} for {role}, but the parameters are {', '.join(shapes)}.")
    return paths


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


def count_heads(description: Description, meaning: str, init: Mapping[str, Any]) -> int | None:
    """Return a number of heads that an attribute or a constructor argument gives, or None.

    `meaning` is HEADS or KEY_HEADS, an entry of the table of constructor arguments.
    """
    defaults = {arg.name: arg.default for arg in description.init or () if not arg.required}
    values = {**defaults, **init, **description.attributes}
    counts = {name: n for name, n in values.items() if type(n) is int and n > 0}
    known = [name for name in names.CONSTRUCTOR[meaning][1] if name in counts]
    if meaning == HEADS:
        other = r"dim|size|width|kv|group|key|per"
        known += [
            name for name in counts if re.search("head", name, re.I) and not re.search(other, name, re.I)
        ]
    return counts[known[0]] if known else None


def common_size(shapes: list[tuple[int, ...]]) -> int | None:
    """Return the size that weights `[h, e, d]` share: of the first axis, or the smallest."""
    shared = set(shapes[0]).intersection(*map(set, shapes[1:]))
    return shapes[0][0] if shapes[0][0] in shared else min(shared, default=None)


def view_weight(
    path: str,
    shape: tuple[int, ...],
    description: Description,
    role: str,
    projections: Projections,
    init: Mapping[str, Any],
) -> ParameterView:
    """Return a weight with the order of its axes."""
    if len(shape) == 3:
        if role in PACKED:
            raise Unclear(
                f"{path} {list(shape)} packs several projections in three dimensions, which isn't supported. "
                "Write an adapter with separate projections."
            )
        h = shape.index(projections.heads) if projections.heads in shape else 0
        first, second = (axis for axis in range(3) if axis != h)
        # Such weights are usually stored as they are multiplied: x [.., e] @ [e, d], or [d, e] for o.
        e, other = (second, first) if role == "o" else (first, second)
        is_width = names.WIDTH in init.values() and shape.count(names.WIDTH) == 1
        if is_width and shape[other] == names.WIDTH:
            e, other = other, e
        letters = {h: "h", e: "e", other: "d"}
        return ParameterView(path, axes="".join(letters[axis] for axis in range(3)))
    owner = description.layers.get(path.rpartition(".")[0], "")
    is_raw = owner not in ("Linear", "NonDynamicallyQuantizableLinear", "LazyLinear")
    is_named_weight = path.endswith(("_weight", ".weight"))
    return ParameterView(path, transposed=owner == "Conv1D" or (is_raw and not is_named_weight))


def split_packed(
    role: str, views: list[ParameterView], projections: Projections, shapes: Shapes
) -> dict[str, list[ParameterView]]:
    """Return the views by role; a packed parameter is split in proportion to the numbers of heads."""
    if role not in PACKED:
        return {role: views}
    path, transposed = views[0].path, views[0].transposed
    h, g = projections.heads, projections.key_heads
    counts = [h, g, g] if role == "qkv" else [1, 1]
    rows = shapes[path][1 if transposed and len(shapes[path]) == 2 else 0] // sum(counts)
    bounds = pairwise(rows * count for count in accumulate(counts, initial=0))
    return {
        letter: [ParameterView(path, transposed, "", each, n if role == "qkv" else None)]
        for n, (letter, each) in enumerate(zip(role, bounds, strict=True))
    }


def input_widths(weights: Weights) -> tuple[int, int, int]:
    """Return the input widths of q, k and v, after a check that the weights can be split into heads."""
    for role, heads in (("q", weights.heads), ("k", weights.key_heads)):
        if weights.weight[role].shape[0] % heads:
            size = sizes(weights.weight[role])
            raise Unclear(f"The {role} weights {size} can't be split into {heads} heads. {NAME_WEIGHTS}")
    q, k, v = (weights.weight[role].shape[1] for role in "qkv")
    return q, k, v
