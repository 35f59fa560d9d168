"""What a candidate is, read off its names and shapes: its kind, its arguments, and whose each weight is.

Everything assumed is a note, which the report prints. What can't be read is `Unclear`, one sentence.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.isolation.candidate import Argument, Description
from manyheads.checker.oracle import PROJECTIONS, Weights
from manyheads.shapes import sizes

KINDS = ("attention", "self", "cross", "multihead", "torch-mha", "sdpa", "hf", "positional", "rotary")
PROJECTED = ("self", "cross", "multihead", "torch-mha")


class Unclear(Exception):
    """A candidate that can't be imported, built or understood: why, and what to say."""


def kind_of(like: str | None, d: Description) -> tuple[str, bool]:
    """(kind, guessed): as it was given, or as names and arguments have it."""
    if like is not None:
        if like not in KINDS:
            raise Unclear(f"--like takes {', '.join(KINDS)} or classic.MODULE.CLASS, and {like!r} came.")
        return like, False
    name = d.name.lower()
    every = [one for one in d.call if one.kind in ("positional", "keyword")]
    found = {names.argument(one.name) for one in every} - {None}
    asked = [one for one in every if one.required]
    if any(word in name for word in ("rotary", "rope", "rotate")):
        return "rotary", True
    if (
        any(word in name for word in ("position", "sinusoid", "encod"))
        and "atten" not in name
        and not {"key", "value"} & found
    ):
        return "positional", True
    if "module" in found and {"query", "key", "value"} <= found:
        return "hf", True
    if {"query", "key", "value"} <= found or (not d.torch_module and len(asked) == 3):
        if not d.torch_module or not (d.parameters or d.init):
            return ("sdpa" if len({"dropout", "causal", "mask"} & found) >= 2 else "attention"), True
        if d.parameters or not _without_weights(d):
            mha = {"padding", "weights"} <= found or "average" in found
            return ("torch-mha" if mha else "multihead"), True
        return "attention", True
    if "context" in found or len(asked) == 2:
        return "cross", True
    if asked:
        return "self", True
    raise Unclear(
        f"{d.name}({', '.join(one.name for one in d.call)}) doesn't look like attention or positions: "
        f"say what "
        f"it is with --like ({', '.join(KINDS)})."
    )


def _without_weights(d: Description) -> bool:
    return d.what == "module" and not d.parameters


def guess(kind: str) -> str:
    """The note on a kind that nobody named."""
    return f"taken as {kind} by its name and arguments (--like says otherwise)"


# -- the constructor -------------------------------------------------------------------------------


def arguments(text: str) -> dict[str, Any]:
    """`hidden=16, num_heads=4` as a dict; Unclear for anything but names and plain values."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(one.arg is None for one in call.keywords):
            raise ValueError
        return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise Unclear(
            f"--init takes names and plain values, 'hidden=16, num_heads=4', and {text!r} came."
        ) from None


def filled(d: Description, given: Mapping[str, Any], alike: bool = False) -> dict[str, Any]:
    """Constructor arguments: what was given, and the table's values for what has no default.

    `alike` gives all widths of the model the same value, and heads that of one head.
    """
    wanted = d.init or ()
    known = {one.name for one in wanted}
    anything = any(one.kind == "var_keyword" for one in wanted)
    for name in given:
        if name not in known and not anything:
            raise Unclear(f"{d.name} has no constructor argument {name!r}, but {', '.join(known) or 'none'}.")
    found = dict(given)
    several = any((names.constructed(one.name) or [""])[0] == "the number of heads" for one in wanted)
    wide = any((names.constructed(one.name) or [""])[0] == WIDE for one in wanted if one.name != "d")
    for one in wanted:
        if one.kind not in ("positional", "keyword") or one.name in given:
            continue
        meant = names.constructed(one.name)
        if one.name == "d" and wide:  # beside e or dim it is a head's
            meant = names.constructed("d_k")
        if meant is None and one.required and one.name in CONFIGURATION:
            found[one.name] = {"__namespace__": everything()}
        elif meant and (one.required or (meant[0] in names.GIVEN_ANYWAY and _is_free(one))):
            found[one.name] = meant[1]
            if alike and "width" in meant[0]:
                head = several and meant[0] == "the width of a head"
                found[one.name] = names.WIDTH // names.HEADS if head else names.WIDTH
        elif one.required:
            raise Unclear(
                f"{d.name} needs {one.name!r}, which no name of the table fills: give it with "
                f"--init '{one.name}=...'."
            )
    return found


WIDE = "the model width"
CONFIGURATION = ("config", "cfg", "args", "conf", "params")


def _is_free(one: Argument) -> bool:
    """Is its default of the kind that the table gives: a rate for dropout, a flag for causal?"""
    return isinstance(one.default, bool) == (one.name in names.CONSTRUCTOR["causal"][1])


def everything() -> dict[str, Any]:
    """A configuration object's attributes: every name of the table."""
    return {name: value for value, every in names.CONSTRUCTOR.values() for name in every}


# -- weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Where a projection's weight or bias lies: a parameter, its turn, and which rows of it."""

    path: str
    turned: bool = False  # [in, out] rather than [out, in]
    axes: str = ""  # of a weight with a head dimension, letters h, d and e
    rows: tuple[int, int] | None = None
    perm: str = ""  # "h3d": queries, keys and values of a head beside each other


@dataclass
class Projections:
    """The parameters of each role; a list where each head has its own."""

    weight: dict[str, list[Part]] = field(default_factory=dict)
    bias: dict[str, list[Part]] = field(default_factory=dict)
    heads: int = 1
    groups: int = 1
    counted: bool = True  # does anything say how many heads there are?
    sink: str | None = None
    unused: list[str] = field(default_factory=list)

    def read(self, tensors: Mapping[str, Tensor], packing: str = "3hd") -> Weights:
        """Weights as `[out, in]` and `[out]`, heads one after the other."""
        return Weights(
            self.heads,
            self.groups,
            {role: self._join(role, parts, tensors, packing) for role, parts in self.weight.items()},
            {
                role: torch.cat([self._one(p, tensors, packing) for p in parts])
                if role != "o"
                else self._one(parts[0], tensors, packing)
                for role, parts in self.bias.items()
            },
            None if self.sink is None else tensors[self.sink].flatten(),
        )

    def paths(self) -> list[str]:
        """All parameters that a role was found for."""
        parts = [p for every in (self.weight, self.bias) for one in every.values() for p in one]
        return list(dict.fromkeys([*(p.path for p in parts), *([self.sink] if self.sink else [])]))

    def _join(self, role: str, parts: list[Part], tensors: Mapping[str, Tensor], packing: str) -> Tensor:
        return torch.cat([self._one(part, tensors, packing, role) for part in parts], 1 if role == "o" else 0)

    def _one(self, part: Part, tensors: Mapping[str, Tensor], packing: str, role: str = "") -> Tensor:
        x = tensors[part.path]
        if part.axes:  # [h, e, d] in some order
            order = "edh" if role == "o" else "hde"
            x = x.permute(*(part.axes.index(letter) for letter in (order if role != "o" else "ehd")))
            return x.flatten(1) if role == "o" else x.flatten(0, 1)
        if part.turned:
            x = x.mT
        if part.rows is not None:
            start, stop = part.rows
            if packing == "h3d" and part.perm:
                which, n = int(part.perm), stop - start
                x = x.unflatten(0, (self.heads, 3, n // self.heads))[:, which].flatten(0, 1)
            else:
                x = x[start:stop]
        return x.flatten() if x.dim() > 1 and part.path.endswith("bias") and not role else x


NUMBER_OF = {
    "heads": (
        "num_heads",
        "n_heads",
        "heads",
        "n_head",
        "h",
        "nhead",
        "num_attention_heads",
        "nheads",
        "n_h",
        "H",
        "head_count",
        "num_head",
        "attention_heads",
    ),
    "groups": (
        "n_kv_heads",
        "num_kv_heads",
        "num_key_value_heads",
        "kv_heads",
        "n_groups",
        "num_groups",
        "groups",
        "n_kv_head",
        "num_query_groups",
        "g",
    ),
}


def number(d: Description, what: str, init: Mapping[str, Any]) -> int | None:
    """A number of heads, from the attributes of what was built or the arguments it was built with."""
    defaults = {one.name: one.default for one in d.init or () if not one.required}
    init = {**defaults, **init}
    for name in NUMBER_OF[what]:
        value = d.attributes.get(name, init.get(name))
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if what == "heads":
        other = r"dim|size|width|kv|group|key|per"
        for name, value in {**init, **d.attributes}.items():
            if (
                "head" in name.lower()
                and not re.search(other, name.lower())
                and type(value) is int
                and value > 0
            ):
                return value
    return None


def projections(d: Description, init: Mapping[str, Any], said: Mapping[str, str]) -> Projections:
    """Whose each parameter is: from names, then from shapes; `said` maps roles to names of layers."""
    shapes = d.parameters
    found = Projections()
    heads = number(d, "heads", init)
    by_role: dict[tuple[str, str], list[tuple[int, str]]] = {}
    roles_said = {path: role for role, layer in said.items() for path in _below(layer, shapes, role)}
    listed = _listed(shapes)
    for n, (path, shape) in enumerate(shapes.items()):
        if path in roles_said:
            part = "bias" if len(shape) == 1 else "weight"
            by_role.setdefault((roles_said[path], part), []).append((n, path))
            continue
        if re.search(r"(^|\.)(sinks?|attn_sinks?|sink_logits?|attention_sinks?)$", path):
            found.sink = path
            continue
        meant = listed.get(path) or names.parameter(path)
        if meant is None or (meant[1] == "weight" and len(shape) == 1):
            found.unused.append(path)
            continue
        role, part, head = meant
        if role in roles_said.values() and said:
            found.unused.append(path)
            continue
        by_role.setdefault((role, part), []).append((n if head is None else head * 1000 + n, path))
    single = {role: sorted(paths) for (role, part), paths in by_role.items() if part == "weight"}
    biases = {role: sorted(paths) for (role, part), paths in by_role.items() if part == "bias"}
    if "qkv" in single and "q" in single:
        found.unused += [path for _, path in single.pop("qkv")]
    lists = {role: len(paths) for role, paths in single.items() if role in "qkv"}
    if lists and max(lists.values()) > 1:
        heads = max(lists.values())
    dims = [shapes[path] for paths in single.values() for _, path in paths if len(shapes[path]) == 3]
    if dims and heads is None:
        heads = _common(dims)
    if heads is None and re.search(r"multi", d.name, re.I):
        raise Unclear(
            f"{d.name} says that it has several heads, and how many isn't found among its attributes "
            f"({', '.join(d.attributes) or 'none'}): hold it as self.num_heads."
        )
    found.heads, found.counted = heads or 1, heads is not None
    groups = number(d, "groups", init)
    found.groups = groups if groups and found.heads % groups == 0 else found.heads
    for role, paths in single.items():
        parts = [_weight(path, shapes[path], d, role, found, init) for _, path in paths]
        _place(found.weight, role, parts, found, shapes)
    for role, paths in biases.items():
        _place(found.bias, role, [Part(path) for _, path in paths], found, shapes)
    missing = [role for role in "qkv" if role not in found.weight]
    if missing and not shapes:
        raise Unclear(
            f"{d.name} has no parameters, so it is no layer that projects: say what it is with --like "
            "(attention, positional, rotary, …)."
        )
    if missing:
        there = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items()) or "none"
        raise Unclear(
            f"no weights for {' and '.join(missing)} are found among the parameters of {d.name} ({there}): "
            "name them with --weights q=...,k=...,v=...,o=...."
        )
    _match_groups(found, shapes, groups)
    return found


def _below(layer: str, shapes: Mapping[str, Any], role: str) -> list[str]:
    every = [path for path in shapes if path == layer or path.startswith(f"{layer}.")]
    if role not in (*PROJECTIONS, "qkv", "kv"):
        raise Unclear(f"--weights takes the roles q, k, v, o, qkv and kv, and {role!r} came.")
    if not every:
        raise Unclear(f"--weights names {layer!r} for {role}, and the parameters are {', '.join(shapes)}.")
    return every


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, str, None]]:
    """Four layers in a list, of the annotated transformer: q, k, v, o in this order; or three."""
    lists: dict[str, set[int]] = {}
    for path in shapes:
        match = re.fullmatch(r"(\w+)\.(\d+)\.(weight|bias)", path)
        if match and names.parameter(match[1]) in (None, ("o", "weight", None)):
            lists.setdefault(match[1], set()).add(int(match[2]))
    found: dict[str, tuple[str, str, None]] = {}
    for name, numbers in lists.items():
        if numbers in ({0, 1, 2, 3}, {0, 1, 2}):
            for n in numbers:
                for part in ("weight", "bias"):
                    if f"{name}.{n}.{part}" in shapes:
                        found[f"{name}.{n}.{part}"] = ("qkvo"[n], part, None)
    return found


def _common(shapes: list[tuple[int, ...]]) -> int | None:
    """The number of heads that raw weights `[h, e, d]` share: the first axis, or the one all have."""
    shared = set(shapes[0]).intersection(*map(set, shapes[1:]))
    first = shapes[0][0]
    return first if first in shared else min(shared, default=None)


def _weight(
    path: str, shape: tuple[int, ...], d: Description, role: str, found: Projections, init: Mapping[str, Any]
) -> Part:
    owner = d.layers.get(path.rpartition(".")[0], "")
    if len(shape) == 3:
        h = found.heads
        if role in ("qkv", "kv"):
            raise Unclear(
                f"{path} {list(shape)} packs several projections in three dimensions, which isn't read: "
                "write an adapter that holds them apart."
            )
        at = shape.index(h) if h in shape else 0
        rest = [axis for axis in range(3) if axis != at]
        # Raw weights are written as they multiply: x [.., e] @ [e, d]; for o [d, e].
        letters = {at: "h", rest[0]: "d" if role == "o" else "e", rest[1]: "e" if role == "o" else "d"}
        width = next(
            (
                n
                for n in map(_as_int, init.values())
                if n and shape.count(n) == 1 and n in [shape[a] for a in rest] and n == names.WIDTH
            ),
            None,
        )
        if width is not None:
            e = next(a for a in rest if shape[a] == width)
            letters = {at: "h", e: "e", next(a for a in rest if a != e): "d"}
        return Part(path, axes="".join(letters[a] for a in range(3)))
    raw = owner not in ("Linear", "NonDynamicallyQuantizableLinear", "LazyLinear")
    turned = owner == "Conv1D" or (raw and not path.endswith(("_weight", ".weight")))
    return Part(path, turned=turned)


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _place(
    table: dict[str, list[Part]],
    role: str,
    parts: list[Part],
    found: Projections,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Write parts under their roles; packed ones are cut into equal rows, or by the number of key heads."""
    if role not in ("qkv", "kv"):
        table[role] = parts
        return
    part = parts[0]
    shape = shapes[part.path]
    rows = shape[1] if part.turned and len(shape) == 2 else shape[0]
    if role == "kv":
        cuts = [rows // 2] * 2
    else:
        head = rows // (found.heads + 2 * found.groups)
        cuts = [head * found.heads, head * found.groups, head * found.groups]
    start = 0
    for n, (one, size) in enumerate(zip(role, cuts, strict=True)):
        table[one] = [
            Part(part.path, part.turned, rows=(start, start + size), perm=str(n) if role == "qkv" else "")
        ]
        start += size


def _match_groups(found: Projections, shapes: Mapping[str, tuple[int, ...]], said: int | None) -> None:
    """Fewer key heads than query heads, as the widths of q and k tell."""
    if said is not None or any(p.axes for p in found.weight["q"]):
        return
    out = {}
    for role in "qk":
        part = found.weight[role][0]
        shape = shapes[part.path]
        rows = part.rows[1] - part.rows[0] if part.rows else shape[1 if part.turned else 0]
        out[role] = rows * len(found.weight[role])
    if out["k"] < out["q"] and out["q"] % found.heads == 0 and out["k"] % (out["q"] // found.heads) == 0:
        found.groups = out["k"] // (out["q"] // found.heads)


def widths(found: Projections, tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """The widths of what is projected to q, k and v."""
    weights = found.read(tensors)
    for role in "qk":
        out = weights.weight[role].shape[0]
        n = found.heads if role == "q" else found.groups
        if out % n:
            raise Unclear(
                f"the {role} weights {sizes(weights.weight[role])} can't be split into {n} heads: "
                "name the weights with --weights q=...,k=...,v=...,o=...."
            )
    e_q, e_k, e_v = (weights.weight[role].shape[1] for role in "qkv")
    return e_q, e_k, e_v


# -- what documentation says of a mask -------------------------------------------------------------

_HIDES = re.compile(
    r"(?:true|1|ones?|nonzero)\b[^.;\n]{0,24}\b(?:hid|hides|hidden|mask(?:ed|s)? out|masked|ignor|not "
    r"attend|pad|blocked|exclud|"
    r"cannot|can't|disallow)|(?:false|0|zeros?)\b[^.;\n]{0,24}\b(?:keep|kept|keeps|visible|attend|allowed|real|valid)",
    re.I,
)
_KEEPS = re.compile(
    r"(?:true|1|ones?|nonzero)\b[^.;\n]{0,28}\b(?:keep|kept|keeps|may "
    r"attend|attend|allowed|visible|real|valid|a token|tokens|see)|"
    r"(?:false|0|zeros?)\b[^.;\n]{0,24}\b(?:hid|hides|hidden|mask|ignor|pad|blocked|exclud)",
    re.I,
)


def polarity(name: str, role: str, kind: str, text: str) -> tuple[bool, str]:
    """(does True keep?, why): from documentation, else the kind's convention, else the name's."""
    joined = near_name(name, text)
    hides, keeps = bool(_HIDES.search(joined)), bool(_KEEPS.search(joined))
    if hides != keeps:
        return keeps, "as its documentation says"
    if kind == "torch-mha":
        return False, "as PyTorch's layer has it"
    if role == "padding" and kind not in ("sdpa",):
        return "pad" not in name, "as names like this have it"
    if "hidden" in name or "ignore" in name:
        return False, "as its name says"
    return True, "as PyTorch's function and most code have it"


def near_name(name: str, text: str) -> str:
    """The lines of a documentation that speak of an argument."""
    return " ".join(line for line in text.splitlines() if re.search(rf"\b{re.escape(name)}\b", line))


def is_mask(one: Argument, text: str) -> bool:
    """Return True if an argument is a mask, or a switch for one, by its name or its documentation."""
    if one.kind not in ("positional", "keyword"):
        return False
    meant = names.argument(one.name) or names.sounds_like_mask(one.name)
    if meant is not None or isinstance(one.default, bool):
        return meant in ("mask", "padding", "lengths", "causal")
    name = re.escape(one.name)
    shape, words = r"(?:[\[(][^\])]*[\])]\W*)?", r"(?:(?!before|after)\w+ ){0,3}"
    called = re.search(rf"\b{name}\b\W{{1,3}}{shape}{words}mask\b", text, re.I)
    lines = near_name(one.name, text)
    described = re.search(rf"\b{name}\b[^.;]{{0,24}}\bTrue\b", lines) and (
        _HIDES.search(lines) or _KEEPS.search(lines)
    )
    return bool(called or described)


def added(name: str, text: str) -> bool:
    """Does documentation say that a mask holds numbers to be added?"""
    word = re.escape(name)
    said = rf"\b{word}\b[^.]{{0,60}}\b(?:added|additive)\b|\badditive {word}\b"
    return bool(re.search(said, near_name(name, text), re.I))


def averaged(text: str) -> bool:
    """Does documentation say that the weights which come back are averaged over the heads?"""
    over = r"(?:over|of|across) (?:all |the |its )*heads"
    said = rf"(?<!not )\baveraged?(?: attention)?(?: weights)? {over}|\bmean {over}|\bheads?[- ]averaged"
    each = r"\b(?:each|every|per)[- ]head\b"
    text = re.sub(r"\s+", " ", text)
    return bool(re.search(said, text, re.I)) and not re.search(each, text, re.I)


_LETTERS = {
    "b": "b",
    "n": "b",
    "batch": "b",
    "batch_size": "b",
    "bs": "b",
    "t": "t",
    "q": "t",
    "l": "t",
    "tgt_len": "t",
    "query_len": "t",
    "length": "t",
    "seq_len": "t",
    "s": "s",
    "k": "s",
    "src_len": "s",
    "key_len": "s",
    "1": "1",
}


def shapes_said(name: str, text: str) -> set[str]:
    """The shapes that documentation gives a mask, as letters: `mask [b, s] or [b, t, s]` is {"bs", "bts"}."""
    found = set()
    for line in text.splitlines():
        after = re.search(rf"\b{re.escape(name)}\b(.*)", line)
        for inside in re.findall(r"[\[(]([\w, ]+)[\])]", after[1].partition(";")[0]) if after else ():
            parts = [part.strip().lower() for part in inside.split(",")]
            if len(parts) > 1 and all(part in _LETTERS for part in parts):
                letters = "".join(_LETTERS[part] for part in parts)
                found.add(re.sub("tt$", "ts", letters))
    return found


def doc_lines(d: Description) -> str:
    """The documentation of class and forward, not its code: what is said, not what is done."""
    try:
        tree = ast.parse(textwrap.dedent(d.source))
    except (SyntaxError, ValueError):
        return f"{d.doc}\n{d.about}"
    texts = [d.doc, d.about]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            texts.append(ast.get_docstring(node) or "")
    return re.sub(r"\]\(\S+\)|\w+://\S+", "", "\n".join(texts))  # without links


def said_causal(d: Description, words: str) -> str | None:
    """Why a candidate without a causal argument is taken as causal, or None.

    One that is given masks may speak of causal ones, and be given one beside a cache.
    """
    if re.search(r"causal|masked_?(self|multi|attention)|autoregress|decoder", d.name, re.I):
        return "its name"
    for name in d.buffers:
        if re.search(r"tril|causal|triangle|(^|\.)(bias|mask|attn_mask)$", name):
            return f"its buffer {name}"
    told = {names.argument(one.name) for one in d.call}
    masked = bool({"mask", "padding"} & told)
    speaks = r"(?<!not )(?<!non-)\bcausal|autoregressive|can't see the future|no look-?ahead"
    if not masked and re.search(speaks, words, re.I):
        return "its documentation"
    if not masked and "past" in told:
        return "its cache of earlier keys"
    if _makes_triangle(d.source):
        return "the triangle in its code"
    return None


def layout_said(d: Description, words: str) -> str | None:
    """The layout that its documentation or its own unpacking of a shape tells."""
    batch, tokens = r"(?:b|n|batch\w*|bsz|bs)", r"(?:t|l|s|seq\w*|tgt\w*|length|len|tokens|n_tokens)"
    inside = r"[\[(]\s*{}\s*,\s*{}\s*,\s*[\w ]+[\])]"
    for layout, first, second in (("sequence", tokens, batch), ("batch", batch, tokens)):
        if re.search(inside.format(first, second), words, re.I):
            return layout
    if re.search(r"batch_first\s*=\s*True|batch[- ]first", words, re.I):
        return "batch"
    first, second = r"\b(?:seq\w*|t|T|L|tgt_len|length|n_tokens)", r"(?:b|B|N|batch\w*|bsz|bs)\b"
    unpacked = first + r"\s*,\s*" + second + r"[^=\n]*=\s*\w+\.(?:shape|size)"
    return "sequence" if re.search(unpacked, d.source) else None


def _makes_triangle(source: str) -> bool:
    """Does its code call tril or triu, and not under a condition?"""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return False

    def found(node: ast.AST) -> bool:
        if isinstance(node, ast.If | ast.IfExp):
            return False
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("tril", "triu", "tril_", "triu_", "tril_indices", "triu_indices"):
                return True
        return any(found(child) for child in ast.iter_child_nodes(node))

    return found(tree)
