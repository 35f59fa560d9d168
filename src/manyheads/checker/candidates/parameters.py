"""Find which parameter is the weight or bias of which projection, by names, then by shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.candidates.forms import rearrange
from manyheads.checker.candidates.roles import Role
from manyheads.checker.isolation.describe import Description
from manyheads.checker.oracle import ROLES, Weights
from manyheads.checker.parts import Part
from manyheads.shapes import sizes

Shapes = Mapping[str, tuple[int, ...]]
PACKED = ("qkv", "kv")
GATES, GATES_BIAS = (
    "gate weight",
    "gate bias",
)  # of gates in the projection of q, among a candidate's parameters
NAME_WEIGHTS = "Name the weights with --weights q=...,k=...,v=...,o=... (or qkv=..., kv=...)"


@dataclass(frozen=True)
class ParameterView:
    """A weight or a bias, which is a parameter or some rows of one.

    Attributes:
        path: the parameter's name.
        transposed: whether a weight is stored as `[in, out]`.
        axes: the letters h, d and e of a weight with an axis of heads, in their order.
        rows: the rows of a packed parameter, from the first to before the second.
        piece: the axis along which a parameter is cut into pieces, the number of the piece and of all pieces.
        place: The number of q, k or v in a packed parameter, which may store each head's q, k and v together,
            and the number of all.
    """

    path: str
    transposed: bool = False
    axes: str = ""
    rows: tuple[int, int] | None = None
    piece: tuple[int, int, int] | None = None
    place: tuple[int, int] | None = None

    def read(self, tensors: Mapping[str, Tensor], role: str, heads: tuple[int, int], by_head: bool) -> Tensor:
        """Return the weight as `[out, in]`, or the bias as `[out]`, for numbers of heads and of key heads."""
        values = tensors[self.path]
        if self.piece is not None:
            axis, n, count = self.piece
            values = values.chunk(count, axis)[n].squeeze(axis)
        if values.dim() > 3 or (values.dim() == 3 and values.shape[-1] == 1 and not self.axes):
            values = values.flatten(1)  # of a convolution with a kernel of one pixel
        if self.axes and role == "o":
            return rearrange(values, self.axes, "ehd").flatten(1)
        if self.axes:
            return rearrange(values, self.axes, "hde").flatten(0, 1)
        values = values.mT if self.transposed else values
        if self.place is not None and by_head:
            n, count = self.place
            rows = [heads[0] // heads[1], 1, 1][-count:]  # of the head size, for each key head
            start = sum(rows[:n])
            return values.unflatten(0, (heads[1], sum(rows), -1))[:, start : start + rows[n]].flatten(0, 2)
        return values if self.rows is None else values[slice(*self.rows)]


@dataclass
class Projections:
    """The weights and biases by role; a role has several views if each head has its own parameter.

    `heads_reason` says where the number of heads comes from, "" if it is assumed to be 1; `reasons` says
    why each parameter has its role.
    """

    weight: dict[str, list[ParameterView]] = field(default_factory=dict)
    bias: dict[str, list[ParameterView]] = field(default_factory=dict)
    heads: int = 1
    key_heads: int = 1
    heads_reason: str = ""
    sink: str | None = None
    unused: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def roles(self, parts: Iterable[Part]) -> list[Role]:
        """Return the role of each parameter, in attention or in other parts of the candidate."""
        roles: dict[str, str] = {}
        for part, parameters in (("weight", self.weight), ("bias", self.bias)):
            for role, views in parameters.items():
                for path in dict.fromkeys(view.path for view in views):
                    before = roles[path].removesuffix(part).rstrip() + ", " if path in roles else ""
                    roles[path] = f"{before}{role} {part}"
        if self.sink is not None:
            roles[self.sink] = "sink"
        roles |= dict.fromkeys(self.unused, "not part of attention")
        roles |= {path: str(part) for part in parts for path in part.paths}
        return [Role(path, role, self.reasons.get(path, ""), "parameter") for path, role in roles.items()]

    def read(self, tensors: Mapping[str, Tensor]) -> list[Weights]:
        """Return the weights for the oracle, in each order in which they may be packed.

        A packed parameter contains all of q, then k, then v; or q, k and v of each head in turn. A projection
        of q with twice the head size has gates too, after each head's q, or after all of q.
        """

        def read_order(by_head: bool, gate_by_head: bool = True) -> Weights:
            def read(role: str, views: list[ParameterView]) -> list[Tensor]:
                return [view.read(tensors, role, (self.heads, self.key_heads), by_head) for view in views]

            weight = {role: torch.cat(read(role, x), int(role == "o")) for role, x in self.weight.items()}
            bias = {role: torch.cat([*map(Tensor.flatten, read(role, x))]) for role, x in self.bias.items()}
            sink = None if self.sink is None else tensors[self.sink].flatten()
            other = {path: tensors[path] for path in self.unused}
            q, k, o = (
                weight[role].shape[n] if role in weight else 0 for n, role in ((0, "q"), (0, "k"), (1, "o"))
            )
            if q * self.key_heads == 2 * k * self.heads and q == 2 * o:
                for x, path in ((weight, GATES), (bias, GATES_BIAS)):
                    if "q" in x:
                        x["q"], other[path] = split_gates(x["q"], self.heads, gate_by_head)
            return Weights(self.heads, self.key_heads, weight, bias, sink, other)

        packed = {view.path: view.place[1] for views in self.weight.values() for view in views if view.place}
        pieces = {2: 2 * self.key_heads, 3: self.heads + 2 * self.key_heads}
        is_divided = all(max(tensors[path].shape) % pieces[n] == 0 for path, n in packed.items())
        orders = [False, True] if packed and is_divided else [False]
        found = [read_order(by_head) for by_head in orders]
        return found + [read_order(by_head, False) for by_head in orders if GATES in found[0].other]

    def count_inputs(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of inputs of each parameter with a role, by which random values are scaled."""
        counts = {
            view.path: view.read(tensors, role, (self.heads, self.key_heads), False).shape[-1]
            for role, views in self.weight.items()
            for view in views
        }
        biases = [view.path for views in self.bias.values() for view in views]
        return counts | dict.fromkeys(biases, 4) | ({} if self.sink is None else {self.sink: 1})


def find_projections(
    description: Description,
    init: Mapping[str, Any],
    layers: Mapping[str, str],
    given_heads: int | None = None,
) -> Projections:
    """Find the parameters of each role.

    Args:
        description: The module.
        init: Its constructor arguments.
        layers: The names of layers that the user gave, by role.
        given_heads: The number of heads that the user gave.

    Returns:
        The weights and biases by role, and the numbers of heads.

    Raises:
        Unclear: If a role has no weight, or the number of heads isn't known.
    """
    layers_of = description.layers
    shapes = {  # of a convolution with a kernel of one pixel, those of a linear layer
        path: shape[:2]
        if set(shape[2:]) == {1} and "Conv" in layers_of.get(path[: -len(".weight")], "")
        else shape
        for path, shape in description.parameters.items()
    }
    description, projections = replace(description, parameters=shapes), Projections()
    h, g = (count_heads(description, each, init) for each in (names.NUMBER_OF_HEADS, names.KEY_HEADS))
    paths = assign_roles(description, layers, projections, 1 + 2 * g / h if g and h else 3)
    weight = paths["weight"]
    per_head = max((len(weight[role]) for role in "qkv" if role in weight), default=1)
    cubes = [shapes[path] for role in ROLES for path in weight.get(role, ()) if len(shapes[path]) == 3]
    heads, reason = given_heads, "--heads"
    if per_head > 1:
        heads, reason = per_head, "one parameter for each head"
    elif heads is None:
        heads, reason = count_heads(description, names.NUMBER_OF_HEADS, init), "its attributes or constructor"
    if cubes and heads is None:
        heads, reason = common_size(cubes), "the shapes of its parameters"
    if heads is None and re.search(r"multi", description.name, re.I):
        raise Unclear(
            f"{description.name} has several heads by its name, and none of its attributes says how many "
            f"({', '.join(description.attributes) or 'it has none'}). Give the number with --heads N."
        )
    projections.heads, projections.heads_reason = heads or 1, reason if heads else ""
    key_heads = count_heads(description, names.KEY_HEADS, init)
    is_grouped = key_heads and projections.heads % key_heads == 0
    projections.key_heads = key_heads if key_heads and is_grouped else projections.heads
    views = {
        role: [view_weight(path, description, role, projections, init) for path in each]
        for role, each in weight.items()
    }
    packed = [view for role in ("qkv", "o") for view in views.get(role, [])[:1]]
    if key_heads is None and per_head == 1 and [len(shapes[view.path]) for view in packed] == [2, 2]:
        # The input of o has the width of q; what is left of a packed weight are k and v.
        qkv, o = packed
        width = shapes[o.path][not o.transposed]
        rows, d = shapes[qkv.path][qkv.transposed] - width, width // projections.heads
        if 0 < rows < 2 * width and rows % (2 * d) == 0 and projections.heads % (rows // (2 * d)) == 0:
            projections.key_heads = rows // (2 * d)
    for role, found in views.items():
        projections.weight |= split_packed(role, found, projections, shapes)
    for role, each in paths["bias"].items():
        biases = [ParameterView(path) for path in (each[:1] if role == "o" else each)]
        projections.bias |= split_packed(role, biases, projections, shapes)
    missing = " and ".join(role for role in "qkv" if role not in projections.weight)
    if missing and not shapes:
        raise Unclear(
            f"{description.name} has no parameters, so it isn't a layer with projections. "
            "Give --like attention if it takes queries, keys and values of heads, or another kind."
        )
    if missing:
        listed = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
        name = description.name
        raise Unclear(
            f"Found no weights for {missing} among the parameters of {name} ({listed}). {NAME_WEIGHTS}."
        )
    packed_views = {role: found for role, found in views.items() if role in PACKED}
    for role, found in (projections.weight | packed_views).items():
        widths = {shapes[view.path][-1] for view in found if not view.axes}
        if len(widths) > 1 and role != "o":
            listed = ", ".join(f"{view.path} {list(shapes[view.path])}" for view in found)
            raise Unclear(
                f"The names of {listed} say that they are weights of {role}, but they take inputs of "
                "different widths, as in a projection of low rank, which the checker doesn't know. To check "
                "the attention in it, move it to a function of the queries, keys and values of all heads, "
                "f(q, k, v), and check that with --like attention."
            )
    if key_heads is None and not any(view.axes for view in projections.weight["q"]):
        empty = {path: torch.empty(shape) for path, shape in shapes.items()}
        q, k = (projections.read(empty)[0].weight[role].shape[0] for role in "qk")
        if k < q and q % projections.heads == 0 and k % (q // projections.heads) == 0:
            projections.key_heads = k // (q // projections.heads)
    return projections


def assign_roles(
    description: Description, layers: Mapping[str, str], projections: Projections, parts: float
) -> dict[str, dict[str, list[str]]]:
    """Return the paths of parameters by "weight" or "bias" and by role, heads in order.

    A packed projection has `parts` times as many outputs as there are queries.
    """
    shapes = description.parameters
    chosen = {path: role for role, layer in layers.items() for path in find_layer(layer, shapes, role)}
    listed = find_listed(shapes)
    found: dict[str, tuple[str, str, int | None]] = {}
    for path, shape in shapes.items():
        if path in chosen:
            found[path] = chosen[path], "bias" if len(shape) == 1 else "weight", None
            projections.reasons[path] = "--weights"
        elif names.SINK.search(path):
            projections.sink = path
        else:
            meaning = listed.get(path) or names.parameter_role(path)
            weight = shapes.get(f"{path[:-4]}weight", (0, 0)) if path.endswith(".bias") else (0, 0)
            is_norm = len(weight) == 1 or (meaning and meaning[1] == "weight" and len(shape) == 1)
            if meaning and not is_norm and meaning[0] not in layers:
                found[path] = meaning
                projections.reasons[path] = "its place in a list" if path in listed else "its name"
    for path, first in description.shared.items():  # another name of a layer with the same role
        if path not in chosen and found.get(path, ("",))[0] == found.get(first, ("",))[0]:
            found.pop(path, None)
    roles = {role for role, part, _ in found.values() if part == "weight"}
    if not {"q", "k", "v", *PACKED} & roles and (layer := find_packed(description, parts)):
        found |= {f"{layer}.{part}": ("qkv", part, None) for part in ("weight", "bias")}
        projections.reasons |= dict.fromkeys((f"{layer}.weight", f"{layer}.bias"), "its shape")
    if "q" in roles and not {"k", "v", "kv"} & roles:  # c_attn beside q_attn projects keys and values
        found |= {path: ("kv", part, n) for path, (role, part, n) in found.items() if role == "qkv"}
        roles = {"kv" if role == "qkv" else role for role in roles}
    cubes = [path for path, shape in shapes.items() if len(shape) == 3 and path not in found]
    queries = [shapes[path] for path, each in found.items() if each[:2] == ("q", "weight")]
    if "o" not in roles and len(cubes) == len(queries) == 1 and len(queries[0]) == 3:
        h, e, d = queries[0]
        if shapes[cubes[0]] == (h, d, e) != queries[0]:  # the only one with these axes
            found[cubes[0]] = "o", "weight", None
            projections.reasons[cubes[0]] = "its shape"
    named = [path.removesuffix(".weight") for path, shape in shapes.items() if path.endswith(".weight")
             and len(shape) == 2 and path not in found and re.search(r"proj|out", path)]  # fmt: skip
    if "o" not in roles and not named:
        inner = {shapes[path][0] // len(role) for path, (role, part, _) in found.items() if part == "weight"}
        left = [path for path, shape in shapes.items() if len(shape) > 1 and path not in found]
        layers_left = [path.removesuffix(".weight") for path in left if shapes[path][-1] in inner]
        is_generic = len(left) == 1 and [*map(names.is_generic, layers_left)] == [True]
        named = [x for x in layers_left if is_generic and description.layers.get(x) == "Linear"]
    if "o" not in roles and len(named) == 1 and not names.OTHER.search(named[0]):
        for part in ("weight", "bias"):
            found[f"{named[0]}.{part}"] = "o", part, None
            projections.reasons[f"{named[0]}.{part}"] = "the only projection besides q, k and v"
    paths: dict[str, dict[str, list[str]]] = {"weight": {}, "bias": {}}
    order = {path: (found[path][2] or 0, n) for n, path in enumerate(shapes) if path in found}
    for path in sorted(order, key=order.__getitem__):
        role, part, _ = found[path]
        if (role, part) != ("qkv", "weight") or "q" not in roles:
            paths[part].setdefault(role, []).append(path)
    for part, each in paths.items():
        for role, listed_paths in each.items():
            each[role] = select_paths(listed_paths, part)
    used = {path for each in paths.values() for listed_paths in each.values() for path in listed_paths}
    others = {*used, projections.sink, *description.shared}
    projections.unused = [path for path in shapes if path not in others]
    return paths


def select_paths(paths: list[str], part: str) -> list[str]:
    """Return the parameters of a role without those of a second attention layer, or beside a layer's own."""
    layers = {path: path.removesuffix(f".{part}") for path in paths if path.endswith(f".{part}")}
    if any(path.startswith(f"{layer}.") for layer in layers.values() for path in paths if path not in layers):
        return paths  # such as an update of low rank in the layer
    owners = [path.removesuffix(f".{part}").rpartition(".")[0] for path in paths]
    if len({*owners}) > 1 and not any(re.search(r"\d", owner) for owner in owners):
        paths = [path for path, owner in zip(paths, owners, strict=True) if owner == owners[0]]
    return [path for path in paths if path in layers] or paths


def find_packed(description: Description, parts: float) -> str | None:
    """Return the only linear layer with `parts` times as many outputs as its or another's inputs, or None.

    There are 3 parts, or fewer where queries share keys.
    """
    layers = [path for path, name in description.layers.items() if name == "Linear"]
    shapes = {path: description.parameters[f"{path}.weight"] for path in layers}
    widths = {path: {e, *(d for other, (n, d) in shapes.items() if other != path and n == e)}
              for path, (_, e) in shapes.items()}  # fmt: skip
    packed = [path for path, (rows, _) in shapes.items() if rows in {parts * width for width in widths[path]}]
    return packed[0] if len(packed) == 1 else None


def find_layer(layer: str, shapes: Shapes, role: str) -> list[str]:
    """Return the parameters of a layer that the user named."""
    if role not in (*ROLES, *PACKED):
        raise Unclear(f"Expected the roles q, k, v, o, qkv and kv in --weights, got {role!r}.")
    paths = [path for path in shapes if path == layer or path.startswith(f"{layer}.")]
    if not paths:
        raise Unclear(
            f"Expected --weights to name parameters ({', '.join(shapes)}), got {layer!r} for {role}. "
            "Correct the name."
        )
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

    `meaning` is names.NUMBER_OF_HEADS or names.KEY_HEADS, an entry of the table of constructor arguments.
    """
    defaults = {arg.name: arg.default for arg in description.init or () if not arg.required}
    configured = [x["values"] for x in init.values() if isinstance(x, dict) and "__configuration__" in x]
    layers = {path: description.layers.get(path.rpartition(".")[0], "") for path in description.settings}
    settings = {
        path.rpartition(".")[2]: value
        for path, value in description.settings.items()
        if not layers[path].startswith(("Conv", "GroupNorm"))  # whose groups aren't heads
    }
    values = {k: v for each in configured for k, v in each.items()} | settings
    values |= {**defaults, **init, **description.attributes}
    counts = {name: n for name, n in values.items() if type(n) is int and n > 0}
    known = [name for name in names.CONSTRUCTOR[meaning][1] if name in counts]
    if "GroupNorm" in description.layers.values():  # whose number of groups the constructor may take
        known = [name for name in known if meaning != names.KEY_HEADS or "group" not in name]
    if meaning == names.NUMBER_OF_HEADS:
        other = r"dim|size|width|kv|group|key|per"
        heads = [name for name in counts if re.search("head", name, re.I)]
        known += [name for name in heads if not re.search(other, name, re.I)]
    return counts[known[0]] if known else None


def common_size(shapes: list[tuple[int, ...]]) -> int | None:
    """Return the size that weights `[h, e, d]` share: of the first axis, or the smallest."""
    shared = set(shapes[0]).intersection(*map(set, shapes[1:]))
    return shapes[0][0] if shapes[0][0] in shared else min(shared, default=None)


def view_weight(
    path: str, description: Description, role: str, projections: Projections, init: Mapping[str, Any]
) -> ParameterView:
    """Return a weight with the order of its axes."""
    shape = description.parameters[path]
    if len(shape) == 3 and role in PACKED and len(role) in shape:
        return ParameterView(path, transposed=not path.endswith("_weight"))
    if len(shape) == 4 and role in PACKED and shape[0] == len(role):  # [2, h, e, d]
        shape = shape[1:]
    if len(shape) == 3:
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
    view, n = views[0], len(role)
    shape = shapes[view.path]
    # [3, e, d] or [3, h, e, d], or [h, e, 3 · d]
    if len(shape) == 3 or (len(shape) in (2, 4) and shape[0] == n):
        axis = shape.index(n) if n in shape else 2
        return {letter: [replace(view, piece=(axis, i, n))] for i, letter in enumerate(role)}
    h, g = projections.heads, projections.key_heads
    counts = [h, g, g] if role == "qkv" else [1, 1]
    rows = shape[1 if view.transposed and len(shape) == 2 else 0] // sum(counts)
    bounds = pairwise(rows * count for count in accumulate(counts, initial=0))
    return {
        letter: [replace(view, rows=each, place=(i, n))]
        for i, (letter, each) in enumerate(zip(role, bounds, strict=True))
    }


def split_gates(x: Tensor, heads: int, by_head: bool) -> list[Tensor]:
    """Return q and the gates in the rows of a weight or a bias: by head, or all of q first."""
    x = x.unflatten(0, (heads, 2, -1)) if by_head else x.unflatten(0, (2, heads, -1)).transpose(0, 1)
    return [part.flatten(0, 1) for part in x.unbind(1)]


def input_widths(weights: Weights) -> tuple[int, int, int]:
    """Return the input widths of q, k and v, after a check that the weights can be split into heads."""
    for role, heads in (("q", weights.heads), ("k", weights.key_heads)):
        if weights.weight[role].shape[0] % heads:
            raise Unclear(
                f"The {role} weights {sizes(weights.weight[role])} can't be split into {heads} heads. "
                f"Give --heads N. {NAME_WEIGHTS}."
            )
    q, k, v = (weights.weight[role].shape[1] for role in "qkv")
    return q, k, v


def randomize(parameters: Mapping[str, Tensor], paths: Iterable[str]) -> dict[str, Tensor]:
    """Return random values of parameters that aren't projections: vectors near their initial values."""
    generator, values = torch.Generator().manual_seed(3), {}
    for path in paths:
        initial = parameters[path]
        noise = torch.randn(initial.shape, generator=generator)
        is_matrix = initial.dim() > 1 and min(initial.shape) > 1
        # Code may clamp a small temperature to positive numbers.
        is_small = bool(((initial > 0) & (initial < 0.5)).all())
        vector = initial * (0.3 * noise).exp() if is_small else initial + 0.3 * noise
        values[path] = noise / initial.shape[-1] ** 0.5 if is_matrix else vector
    return values
