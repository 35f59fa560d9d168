"""A candidate: somebody's attention, called in the recipe's terms, whatever its layout and its arguments.

How it wants to be called is read off its names; where names leave it open, it is tried: which shape of
mask it takes, whether it takes numbers or booleans, which axis is the batch. Tried is only what it accepts
and what reaches what, never which choice makes its values right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates import parameters as reading
from manyheads.checker.candidates.parameters import PROJECTED, Unclear
from manyheads.checker.isolation.candidate import Answer, Call, Description, Trouble, tensors
from manyheads.checker.oracle import Found, Inputs, Weights, exact
from manyheads.shapes import sizes

B, T, S, D = 3, 5, 7, 6  # sizes of the tries; no two dimensions of a try are alike
SPREAD = 1.5  # of the random weights: scores then differ by several units


class Odd(Exception):
    """An output that is no attention output: what was expected and what came."""


@dataclass(frozen=True)
class Form:
    """How a mask is written: its letters, whether True keeps, and of what it is made."""

    letters: str  # of b, 1, t, s: "b1ts", "ts", "bs", …
    keeps: bool = True
    made: str = "bool"  # "bool", "01", "added" or "Keep", a mask of this library

    def write(self, keep: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """keep `[b, 1, t, s]` or `[b, 1, 1, s]` as this form has it."""
        if self.made == "Keep":
            return {"__keep__": keep}
        x = {
            "b1ts": lambda: keep,
            "bts": lambda: keep[:, 0],
            "ts": lambda: keep[0, 0],
            "tsb": lambda: keep[:, 0].permute(1, 2, 0),
            "1ts": lambda: keep[:1, 0],
            "b11s": lambda: keep[:, :, :1],
            "b1s": lambda: keep[:, 0, :1],
            "bs": lambda: keep[:, 0, 0],
            "1sb": lambda: keep[:, 0, :1].permute(1, 2, 0),
            "sb": lambda: keep[:, 0, 0].mT,
            "lengths": lambda: keep[:, 0, 0].sum(-1),
        }[self.letters]()
        if self.letters == "lengths":
            return x
        if self.made == "added":
            return torch.zeros(x.shape, dtype=dtype).masked_fill(~x, -math.inf)
        x = x if self.keeps else ~x
        return x.clone() if self.made == "bool" else x.to(dtype)

    def __str__(self) -> str:
        if self.made == "Keep":
            return "manyheads.Keep of [b, 1, t, s]"
        said = {"bool": "boolean", "01": "of ones and zeros", "added": "added to the scores, 0 or -inf"}[
            self.made
        ]
        shape = "[b]" if self.letters == "lengths" else "[" + ", ".join(self.letters) + "]"
        what = (
            ""
            if self.made == "added" or self.letters == "lengths"
            else f", {'True keeps' if self.keeps else 'True hides'}"
        )
        return f"{shape} {said}{what}"


GENERAL = ("b1ts", "bts", "tsb", "1ts", "ts")
KEYWISE = ("b11s", "b1s", "1sb", "bs", "sb")


# How heads may lie where they aren't projected: from `[b, h, t, d]`, and back.
CUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "[b, h, t, d]": (lambda x: x, lambda x: x),
    "[b, t, h, d]": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "[t, b, h, d]": (lambda x: x.permute(2, 0, 1, 3), lambda x: x.permute(1, 2, 0, 3)),
    "[b, t, d]": (lambda x: x[:, 0], lambda x: x[:, None]),
    "[t, d]": (lambda x: x[0, 0], lambda x: x[None, None]),
}


class Candidate:
    """A subject, and how to call it.

    `like` is its kind, `notes` what was assumed, `weights` what it holds as the recipe has it (None for a
    function of heads), `can` what can be asked of it: "mask", "keys" (a mask over keys alone), "padding",
    "causal", "weights", "cross", "scale", "sink", "bias", "past". `causal` says that it always is.
    """

    def __init__(
        self,
        subject: Any,
        like: str,
        guessed: bool,
        init: Mapping[str, Any],
        weights: Mapping[str, str],
        layout: str | None,
    ) -> None:
        self.subject, self.guessed = subject, guessed
        self.refused = ""  # why other widths for keys and values than for the model weren't taken
        said = (like, init, weights, layout)
        try:
            self._build(*said)
        except Unclear as error:
            d = subject.describe()
            if d.what != "class" or reading.filled(d, init, alike=True) == self.init:
                raise
            try:
                self._build(*said, alike=True)
            except Unclear:
                raise error from None
            self.refused = str(error)
            self.notes.append("its widths are all alike, as others raise")

    def _build(
        self,
        like: str,
        init: Mapping[str, Any],
        weights: Mapping[str, str],
        layout: str | None,
        alike: bool = False,
    ) -> None:
        subject = self.subject
        self.notes = [reading.guess(like)] if self.guessed else []
        d = subject.describe()
        self.init: dict[str, Any] = {}
        if d.what == "class":
            self.init = reading.filled(d, init, alike)
            shown = ", ".join(f"{name}={_short(value)}" for name, value in self.init.items())
            try:
                d = subject.make(self.init)
            except Trouble as error:
                if error.kind != "init":
                    raise Unclear(f"building {d.name}({shown}): {error}") from None
                raise Unclear(
                    f"{str(error).rstrip('.')}: it was built with {shown or 'no arguments'}; say others "
                    "with --init."
                ) from None
            if self.init:
                self.notes.append(f"built as {d.name}({shown})")
        elif init:
            raise Unclear(f"{d.name} is built already, and --init gives {', '.join(init)}: leave it out.")
        self.d: Description = d
        self.like = like
        self.words = reading.doc_lines(d)
        self.projected = self.like in PROJECTED
        self.layout = layout or "batch"
        self.weights: Weights | None = None
        self.can: set[str] = set()
        self.forms: dict[str, tuple[str, Form]] = {}
        self.causal = self.always_weights = self.blank = False
        self.orders: dict[bool, str] = {}  # of weights that it returns, averaged or not, once it is known
        self.averaged = False  # are its weights always an average over the heads?
        self.untaken: dict[str, Trouble | None] = {}  # masks that it has an argument for and takes in no form
        self.judged: set[str] = set()  # mask arguments on which an answer was compared that depends on them
        self.complaint: Trouble | None = None
        self.packing = "3hd"
        self.cut = "[b, h, t, d]"  # how heads come and go, where they aren't projected
        self._roles()
        if self.projected:
            self._find_weights(weights)
            self._count_heads()
            self._put_together()
        self._try(layout)

    # -- reading ---------------------------------------------------------------------------------

    def _roles(self) -> None:
        self.role: dict[str, str] = {}  # what an argument means → its name
        unknown: list[str] = []
        for one in self.d.call:
            if one.kind not in ("positional", "keyword"):
                continue
            meant = names.argument(one.name) or names.sounds_like_mask(one.name)
            if meant == "mask" and isinstance(one.default, bool):
                meant = "causal"  # a switch
            if meant is not None and meant not in self.role:
                self.role[meant] = one.name
            elif one.required:
                unknown.append(one.name)
        hint = self.role.pop("causal", None) if self.like == "torch-mha" else None
        self.masks = [
            one.name for one in self.d.call if reading.is_mask(one, self.words) and one.name not in unknown
        ]
        if hint == "is_causal" and "mask" in self.role:
            self.masks.remove(hint)  # PyTorch's hint about the mask, which says the same
        used = {*self.role.values(), *unknown}
        left = [
            one.name for one in self.d.call if one.kind in ("positional", "keyword") and one.name not in used
        ]
        if left:
            self.notes.append(f"left at what they are: {', '.join(left)}")
        if "x" in self.role and {"key", "value"} <= set(self.role):
            self.role["query"] = self.role.pop("x")
        if self.like == "cross" and "context" not in self.role and {"query", "key"} <= set(self.role):
            self.role["context"] = self.role.pop("key")
        if "query" in self.role and "context" in self.role and "value" not in self.role:
            self.role["x"] = self.role.pop("query")
        if "query" in self.role and not {"key", "value"} & set(self.role):
            self.role["x"] = self.role.pop("query")
        tensors = [r for r in ("query", "key", "value", "x", "context") if r in self.role]
        slots = {"self": ["x"], "cross": ["x", "context"]}.get(self.like, ["query", "key", "value"])
        if unknown and len(unknown) + len(tensors) == len(slots):
            free = iter(slot for slot in slots if slot not in self.role)
            for name in list(unknown):
                self.role[next(free)] = name
                unknown.remove(name)
        if unknown:
            raise Unclear(
                f"{self.d.name} needs the argument {unknown[0]!r}, which the checker doesn't know: write an "
                "adapter that takes q, k, v or x and calls it (docs/checker.md shows one), and check that."
            )
        if self.like == "self" and {"query", "key", "value"} <= set(self.role):
            self.like = "multihead" if self.projected else self.like
        wanted = {"self": ["x"], "cross": ["x", "context"]}.get(self.like, ["query", "key", "value"])
        if self.like == "multihead" and "x" in self.role:
            wanted = ["x"]
        missing = [slot for slot in wanted if slot not in self.role]
        if missing:
            raise Unclear(
                f"{self.like} is called with {', '.join(wanted)}, and {self.d.name} takes "
                f"{', '.join(one.name for one in self.d.call) or 'nothing'}: say what it is with --like."
            )
        if self.like == "cross" or {"query", "key"} <= set(self.role):
            self.can.add("cross")

    def _find_weights(self, said: Mapping[str, str]) -> None:
        d = self.d
        self.projections = reading.projections(d, self.init, said)
        found = self.subject.weights()
        generator = torch.Generator().manual_seed(1)
        fresh: dict[str, Tensor] = {}
        used = self.projections.paths()
        for path in used:
            x = found[path]
            every = [(r, p) for r, parts in self.projections.weight.items() for p in parts if p.path == path]
            if path == self.projections.sink:
                wide = 1
            elif not every:  # a bias
                wide = 4
            elif every[0][1].axes:
                role, part = every[0]
                n = dict(zip(part.axes, x.shape, strict=True))
                wide = n["h"] * n["d"] if role == "o" else n["e"]
            else:
                wide = x.shape[0] if every[0][1].turned else x.shape[-1]
            fresh[path] = torch.randn(x.shape, generator=generator) * (SPREAD / wide**0.5)
        self.subject.load(fresh)
        self.held = {**found, **fresh}
        self.weights = self.projections.read(self.held)
        self.widths = reading.widths(self.projections, self.held)
        roles = {
            role: ", ".join(dict.fromkeys(p.path for p in parts))
            for role, parts in self.projections.weight.items()
        }
        self.notes.append(
            "weights: "
            + "; ".join(f"{role} = {path}" for role, path in roles.items())
            + f"; {self.weights.heads} head{'s' * (self.weights.heads > 1)}"
            + (f", {self.weights.groups} key heads" if self.weights.groups != self.weights.heads else "")
        )
        if self.projections.unused:
            self.notes.append(f"not part of attention: {', '.join(self.projections.unused)}")

    def _count_heads(self) -> None:
        """Where no name says how many heads there are, weights that come back do."""
        if self.projections.counted or self.weights is None:
            return
        x = self.draw(torch.Generator().manual_seed(4), s=S)
        try:
            output = self.subject.call(self.call(replace(x, weights=True))).output
        except Trouble as error:
            if error.kind != "call":
                raise
            return
        shapes = [tuple(y.shape) for _, y in tensors(output)]
        counts = {
            shape[1] for shape in shapes if len(shape) == 4 and shape[0] == B and shape[2:] == (x.t, x.s)
        }
        if len(counts) == 1 and self.weights.weight["q"].shape[0] % (n := counts.pop()) == 0:
            self.projections.heads = self.projections.groups = n
            self.weights = self.projections.read(self.held)
            self.notes.append(f"{n} heads, as its weights show")

    def _put_together(self) -> None:
        """Do the weights, as they were read, make an attention?"""
        try:
            exact(self.weights, self.draw(torch.Generator().manual_seed(4)))
        except RuntimeError as error:
            shapes = (
                "; ".join(f"{role} {sizes(x)}" for role, x in self.weights.weight.items())
                if self.weights
                else ""
            )
            raise Unclear(
                f"the weights of {self.d.name}, as they were read ({shapes}, {self.heads} heads), don't fit "
                f"together ({str(error).splitlines()[0].rstrip('.')}): name them with --weights."
            ) from None

    @property
    def packings(self) -> list[str]:
        """How packed weights may lie: q, k, v one after the other, or those of a head side by side."""
        if self.weights is None or self.weights.groups != self.weights.heads:
            return ["3hd"]
        packed = any(part.perm for parts in self.projections.weight.values() for part in parts)
        return ["3hd", "h3d"] if packed else ["3hd"]

    def repack(self) -> bool:
        """Read packed weights the other way; can they be?"""
        if len(self.packings) == 1:
            return False
        self.packing = "h3d" if self.packing == "3hd" else "3hd"
        self.weights = self.projections.read(self.held, self.packing)
        return True

    # -- drawing inputs ----------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        return self.weights.heads if self.weights is not None else (4 if "h" in self.cut else 1)

    def draw(
        self,
        generator: torch.Generator,
        b: int = B,
        t: int = T,
        s: int | None = None,
        *,
        groups: int | None = None,
    ) -> Inputs:
        """Random inputs, without masks; `s` is `t` where the candidate attends to its own sequence."""
        s = t if s is None or "cross" not in self.can else s

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        if self.weights is not None:
            e_q, e_k, e_v = self.widths
            query = randn(b, t, e_q)
            if "cross" not in self.can:
                return self._marked(Inputs(query, query, query))
            key = randn(b, s, e_k)
            value = key if self.like == "cross" else randn(b, s, e_v)
            return self._marked(Inputs(query, key, value))
        h = self.heads
        g = groups or h
        s = max(s, t) if self.causal else s
        x = Inputs(randn(b, h, t, D), randn(b, g, s, D), randn(b, g, s, D))
        if "sink" in self.role:
            x = replace(x, sink=randn(h))
        return self._marked(x)

    def given(self, x: Inputs, **fields: Tensor) -> Inputs:
        """x with another query, key or value, which stay one tensor where the candidate takes them as one."""
        if "cross" not in self.can:
            fields = dict.fromkeys(("query", "key", "value"), fields["query"])
        elif self.like == "cross":
            fields["value"] = fields["key"]
        return x.but(**fields)

    def moved(self, x: Inputs, position: int, by: float | None = None) -> Inputs:
        """x with what one key holds changed, by another amount in each channel or `by` in all.

        Where queries are the same tokens, that query changes too.
        """
        fields = {}
        for name in ("key", "value") if "cross" in self.can else ("query", "key", "value"):
            y = getattr(x, name).clone()
            y[..., position, :] += torch.linspace(-2, 3, y.shape[-1]) if by is None else by
            fields[name] = y
        return self.given(x, **fields)

    def _marked(self, x: Inputs) -> Inputs:
        if self.causal:
            x = replace(x, causal=True, offset=0 if self.like == "sdpa" else x.s - x.t)
        return replace(x, weights=self.always_weights, average=self.averaged)

    # -- calling -----------------------------------------------------------------------------------

    def call(self, x: Inputs, **options: Any) -> Call:
        """The call that these inputs are."""
        kwargs: dict[str, Any] = {}
        for slot, tensor in (
            ("query", x.query),
            ("x", x.query),
            ("key", x.key),
            ("context", x.key),
            ("value", x.value),
        ):
            if slot in self.role and not (slot == "context" and self.like not in ("cross",)):
                kwargs[self.role[slot]] = self.turn(tensor)
        dtype = x.query.dtype
        for what, keep in (
            ("mask", x.keep),
            ("padding", None if x.padding is None else x.padding[:, None, None]),
        ):
            if keep is None:
                continue
            name, form = self._mask_slot(what)
            if form.letters in GENERAL:
                keep = keep.expand(-1, -1, x.t, -1)
            kwargs[name] = form.write(keep, dtype)
        if x.bias is not None:
            kwargs[self.role["mask"]] = x.bias
        if "causal" in self.role:
            kwargs[self.role["causal"]] = x.causal
        if "average" in self.role:
            kwargs[self.role["average"]] = x.average
        if "weights" in self.role:
            kwargs[self.role["weights"]] = x.weights
        if x.scale is not None or ("scale" in self.role and self._required("scale")):
            kwargs[self.role["scale"]] = x.query.shape[-1] ** -0.5 if x.scale is None else x.scale
        if x.sink is not None:
            kwargs[self.role["sink"]] = x.sink
        if "grouped" in self.role and x.query.shape[1] != x.key.shape[1]:
            kwargs[self.role["grouped"]] = True
        if "module" in self.role:
            kwargs[self.role["module"]] = {
                "__namespace__": {
                    "num_key_value_groups": x.query.shape[1] // x.key.shape[1],
                    "training": False,
                    "layer_idx": 0,
                    "is_causal": False,
                    "sinks": None,
                    "scaling": x.query.shape[-1] ** -0.5,
                }
            }
        for slot in ("mask", "padding", "dropout"):
            if slot in self.role and self.role[slot] not in kwargs and self._required(slot):
                kwargs[self.role[slot]] = 0.0 if slot == "dropout" else None
        args: list[Any] = []
        for one in self.d.call:  # what can be positional is, as people call it
            if one.kind != "positional" or one.name not in kwargs:
                break
            args.append(kwargs.pop(one.name))
        options.setdefault("dtype", dtype if dtype != torch.float32 else None)
        return Call(args=tuple(args), kwargs=kwargs, **options)

    def _mask_slot(self, what: str) -> tuple[str, Form]:
        """The argument that a mask or padding goes to, and how it is written there."""
        role, form = self.forms[what if what in self.forms else "keys"]
        return self.role[role], form

    def masked_by(self, x: Inputs) -> dict[str, Inputs]:
        """The arguments that the masks of a call go to, each with the call without that mask."""
        found = {}
        if x.keep is not None:
            found[self._mask_slot("mask")[0]] = replace(x, keep=None)
        if x.padding is not None:
            found[self._mask_slot("padding")[0]] = replace(x, padding=None)
        if x.causal and "causal" in self.role:
            found[self.role["causal"]] = replace(x, causal=False)
        return found

    def turn(self, x: Tensor) -> Tensor:
        """`[b, t, e]` or `[b, h, t, d]` in the candidate's own layout."""
        if self.weights is not None:
            return x.transpose(0, 1) if self.layout == "sequence" else x
        return CUTS[self.cut][0](x)

    def back(self, x: Tensor) -> Tensor:
        """What lies as the candidate has it, as `[b, t, e]` or `[b, h, t, d]`; else as it is."""
        if self.weights is not None:
            return x.transpose(0, 1) if self.layout == "sequence" and x.dim() == 3 else x
        dims, _, change = self.cut.count(",") + 1, *CUTS[self.cut]
        return change(x) if x.dim() == dims else x

    def _required(self, slot: str) -> bool:
        return any(one.name == self.role.get(slot) and one.required for one in self.d.call)

    def slots(self, call: Call) -> dict[str, str]:
        """Where query, key and value lie in a call, for gradients: role → path."""
        names_of = [one.name for one in self.d.call if one.kind == "positional"]
        found = {}
        for slot in ("query", "x", "key", "context", "value"):
            name = self.role.get(slot)
            if name in call.kwargs:
                found[slot] = str(name)
            elif name in names_of[: len(call.args)]:
                found[slot] = str(names_of.index(str(name)))
        return found

    def named(self, path: str) -> str:
        """An argument by its name, where a path such as "0" or "mask" leads to it."""
        names_of = [one.name for one in self.d.call if one.kind == "positional"]
        return names_of[int(path)] if path.isdigit() and int(path) < len(names_of) else path

    def run(self, x: Inputs, strict: bool = True, **options: Any) -> Found:
        """Call it, and bring what it returns into the recipe's layout; an odd width is Odd if `strict`, and
        so are weights of another shape than was asked for.
        """
        return self.read(self.subject.call(self.call(x, **options)).output, x, strict)

    def answer(self, x: Inputs, **options: Any) -> Answer:
        answer: Answer = self.subject.call(self.call(x, **options))
        return answer

    def read(self, output: Any, x: Inputs, strict: bool = True) -> Found:
        """An output `[b, t, e]` or `[b, h, t, d]`, and weights `[b, h, t, s]` where they came."""
        parts = list(output.values()) if isinstance(output, dict) else output
        parts = list(parts) if isinstance(parts, list | tuple) else [parts]
        first = next((part for part in parts if isinstance(part, Tensor)), None)
        b, t, s = x.query.shape[0], x.t, x.s
        h = self.heads if self.weights is not None else x.query.shape[1]
        if first is None:
            raise Odd(f"a tensor was expected as output, and {_kind(output)} came")
        if self.weights is not None:
            out = self.back(first)
            last = (
                self.weights.weight["o"].shape[0]
                if "o" in self.weights.weight
                else (self.weights.weight["v"].shape[0] // self.weights.groups * self.weights.heads)
            )
            want: tuple[int, ...] = (b, t, last)
            letters = "[t, b, e]" if self.layout == "sequence" else "[b, t, e]"
        else:
            w = x.value.shape[-1]
            out = self.back(first)
            if self.like == "hf" and out.dim() == 4 and tuple(out.shape) == (b, t, h, w):
                out = out.transpose(1, 2)
            want, letters = (b, h, t, w), self.cut
        if not strict and out.dim() == len(want) and tuple(out.shape[:-1]) == want[:-1]:
            want = tuple(out.shape)
        if tuple(out.shape) != want:
            expected = list(want if self.layout == "batch" else (want[1], want[0], *want[2:]))
            turned = tuple(first.shape) == (expected[1], expected[0], *expected[2:]) != tuple(expected)
            hint = ", with its first two axes the other way round" if turned else ""
            raise Odd(f"an output {letters} = {expected} was expected, and {sizes(first)} came{hint}")
        if not out.is_floating_point():
            raise Odd(f"an output of floats was expected, and {out.dtype} came")
        rest = [part for part in parts if isinstance(part, Tensor) and part is not first]
        weights = self._weights_in(rest, x.average, b, h, t, s)
        if strict and x.weights:
            self._check_weights(weights, rest, x.average, b, h, t, s)
        return Found(out, weights)

    def _check_weights(
        self, weights: Tensor | None, rest: list[Tensor], average: bool, b: int, h: int, t: int, s: int
    ) -> None:
        """Are weights there, and of the shape that was asked for? Odd if not."""
        if not rest:
            raise Odd("its weights were asked for, and none came back")
        if weights is None or weights.shape[:2] != (b, 1 if average else h):
            asked = f"an average over {h} heads was" if average else f"weights of {h} heads were"
            letters, expected = ("[b, t, s]", [b, t, s]) if average else ("[b, h, t, s]", [b, h, t, s])
            raise Odd(f"{asked} asked for, {letters} = {expected}, and {sizes(rest[0])} came back")

    def _weights_in(self, rest: list[Tensor], average: bool, b: int, h: int, t: int, s: int) -> Tensor | None:
        """Returned weights as `[b, h, t, s]`, or `[b, 1, t, s]` where one map for all heads came; how they
        lie is found once, at sizes that differ.
        """
        orders: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
            "b h t s": ((b, h, t, s), lambda w: w),
            "b 1 t s": ((b, 1, t, s), lambda w: w),
            "b t s": ((b, t, s), lambda w: w[:, None]),
            "t s": ((t, s), lambda w: w[None, None]),
            "t s b h": ((t, s, b, h), lambda w: w.permute(2, 3, 0, 1)),
            "h b t s": ((h, b, t, s), lambda w: w.transpose(0, 1)),
            "(b h) t s": ((b * h, t, s), lambda w: w.unflatten(0, (b, h))),
            "t s b": ((t, s, b), lambda w: w.permute(2, 0, 1)[:, None]),
            "h t s": ((h, t, s), lambda w: w[None]),  # which is averaged over the batch
        }
        if self.like == "torch-mha" and "average" in self.role:  # as PyTorch's own lie
            orders.pop("b 1 t s")
        for name in [self.orders[average]] if average in self.orders else list(orders):
            shape, change = orders[name]
            for part in rest:
                if tuple(part.shape) == shape and part.is_floating_point():
                    if len({b, h, t, s}) == 4 or (len({b, t, s}) == 3 and h == 1):
                        self.orders[average] = name
                    return change(part)
        return None

    # -- trying ------------------------------------------------------------------------------------

    def _try(self, layout: str | None) -> None:
        generator = torch.Generator().manual_seed(2)
        if self.weights is None:
            self._try_cut(generator)
        else:
            self._try_layout(generator, layout)
        x = self.draw(generator)
        try:
            plain = self.run(x, strict=False)
        except Trouble as error:
            if error.kind != "call" or error.error.endswith(("SystemExit", "KeyboardInterrupt")):
                raise
            if error.unwritten:
                raise Unclear(f"{str(error).rstrip('.')}: write it, and check again.") from None
            call = "say its kind with --like" if self.guessed else f"mend that, if it is {self.like}"
            raise Unclear(
                f"{str(error).rstrip('.')}: it was called with {self._shown(x)}; {call}, or write an adapter."
            ) from None
        except Odd:
            plain = None  # the check of shapes says it
        asked = None
        if plain is not None and "weights" not in self.role:
            self.always_weights = plain.weights is not None
        elif plain is not None:
            asked = self.attempt(replace(x, weights=True))
            self.always_weights = False
        if self.always_weights or (asked is not None and asked.weights is not None):
            self.can.add("weights")
            self._average(plain if self.always_weights else asked)
        if "weights" in self.role and "weights" not in self.can:
            self.can.add("weights")  # asked for, and they don't come: the check of weights says it
        if (
            self.weights is None
            and "h" in self.cut
            and ("grouped" in self.role or self.attempt(self.draw(generator, groups=2)) is not None)
        ):
            self.can.add("grouped")
        for slot in ("scale", "sink", "causal", "past"):
            if slot in self.role:
                self.can.add(slot)
        self._try_causal(generator)
        self._try_masks(generator)

    def _average(self, got: Found | None) -> None:
        """Are its weights always averaged? Its words say, or PyTorch's example, which leaves both open."""
        if "average" in self.role or self.heads == 1 or got is None or got.weights is None:
            return
        told = reading.averaged(self.words)
        either = self.like == "torch-mha" or re.search(r"\b(averag|mean)", self.words, re.I)
        self.averaged = told or (bool(either) and got.weights.shape[1] == 1)
        if self.averaged:
            self.notes.append(
                "its weights are averaged over the heads"
                + (
                    " (its own words)"
                    if told
                    else ", as those of PyTorch's layer"
                    if self.like == "torch-mha"
                    else ""
                )
            )

    def _shown(self, x: Inputs) -> str:
        call = self.call(x)
        shown = [
            f"{one.name} {sizes(v)}"
            for one, v in zip(self.d.call, call.args, strict=False)
            if isinstance(v, Tensor)
        ]
        return ", ".join(
            shown + [f"{n} {sizes(v) if isinstance(v, Tensor) else v}" for n, v in call.kwargs.items()]
        )

    def attempt(self, x: Inputs, strict: bool = False, **options: Any) -> Found | None:
        """What a call gives, or None where it raises or gives something else; a lost process still raises."""
        try:
            return self.run(x, strict, **options)
        except Odd:
            return None
        except Trouble as error:
            if error.kind != "call":
                raise
            self.complaint = error
            return None

    def _try_cut(self, generator: torch.Generator) -> None:
        """How do heads come? As its words have it, else as is taken where no two sizes are alike."""
        cuts = list(CUTS)
        text = self.words.replace("s, h", "t, h").replace("s, b", "t, b")
        told = [cut for cut in cuts[1:3] if re.search(re.escape(cut[:-1]), text)]
        for cut in told + [cut for cut in cuts if cut not in told]:
            self.cut = cut
            x = self.draw(generator, b=1 if cut == "[t, d]" else B, s=S)
            if self.attempt(x) is not None:
                if cut != "[b, h, t, d]":
                    self.notes.append(f"takes {cut}" if "h" in cut else f"takes one head, {cut}")
                return
        self.cut = "[b, h, t, d]"

    def _try_layout(self, generator: torch.Generator, layout: str | None) -> None:
        if layout is not None:
            self.layout = layout
            return
        first = self.d.attributes.get("batch_first", self.init.get("batch_first"))
        why = ""
        if isinstance(first, bool):
            self.layout, why = ("batch" if first else "sequence"), f"batch_first={first}"
        elif (told := reading.layout_said(self.d, self.words)) is not None:
            self.layout, why = told, "its own words"
        else:
            apart = {}
            for one in ("batch", "sequence"):
                self.layout = one
                x = self.draw(generator, s=S)
                moved = x.but(**{n: _moved(getattr(x, n), 0) for n in ("query", "key", "value")})
                a, b = self.attempt(x), self.attempt(moved)
                apart[one] = a is not None and b is not None and torch.equal(a.out[1:], b.out[1:])
            usual = self.like == "torch-mha" and not apart["batch"]  # PyTorch's own default
            self.layout = "sequence" if usual or (apart["sequence"] and not apart["batch"]) else "batch"
            why = "its batch entries don't reach each other so; if [b, t, e] is meant, say --layout batch"
        if self.layout == "sequence":
            self.notes.append(f"sequence first, [t, b, e] ({why})")

    def _try_causal(self, generator: torch.Generator) -> None:
        if "causal" in self.role:
            return
        built = next(
            (
                n
                for n, v in {**self.d.attributes, **self.init}.items()
                if v is True and n in names.CONSTRUCTOR["causal"][1]
            ),
            None,
        )
        why = f"built with {built}=True" if built else reading.said_causal(self.d, self.words)
        if self.like in ("sdpa", "torch-mha", "hf") and not built:
            return
        if why is None:
            x = self.draw(generator, t=T, s=None)
            if x.t == x.s and self._sees_no_future(x):
                self.causal, why = True, "no later token reaches an earlier one"
        else:
            self.causal = True
        if self.causal:
            self.notes.append(f"taken as causal ({why})")
            self.can.add("causal")

    def _sees_no_future(self, x: Inputs) -> bool:
        """Does a change of each token reach none before it, and some change one that comes after?"""
        before = self.attempt(x)
        reaches = False
        for j in range(x.t):
            after = self.attempt(self.moved(x, j))
            if before is None or after is None:
                return False
            if not torch.equal(before.out[..., :j, :], after.out[..., :j, :]):
                return False
            reaches |= not torch.equal(before.out[..., j + 1 :, :], after.out[..., j + 1 :, :])
        return reaches

    def _try_masks(self, generator: torch.Generator) -> None:
        for role in ("mask", "padding", "lengths"):
            if role not in self.role:
                continue
            name = self.role[role]
            keeps, why = reading.polarity(name, role, self.like, self.words)
            if role == "lengths":
                self.forms.setdefault("keys", ("lengths", Form("lengths")))
                self.can.add("keys")
                continue
            letters = [*GENERAL, *KEYWISE]
            documented = reading.shapes_said(name, self.words).intersection(letters)
            if documented:
                letters = [one for one in letters if one in documented]
            elif role == "padding":
                letters = sorted(KEYWISE, key=lambda one: one != "bs")
            elif self.layout == "sequence":  # the batch last comes first
                letters.sort(key=lambda one: not one.endswith("b"))
            said: list[str] = []
            tried: list[tuple[str, Form, bool]] = []
            for feature, shapes in (
                ("mask", [x for x in letters if x in GENERAL]),
                ("keys", [x for x in letters if x in KEYWISE]),
            ):
                if role == "padding":
                    feature = "padding"
                if feature in self.forms or not shapes:
                    continue
                form, works = self._form(generator, role, shapes, keeps, why)
                if form is not None:
                    tried.append((feature, form, works))
            if not documented and any(
                works for *_, works in tried
            ):  # what is taken and hides nothing was broadcast by chance
                tried = [one for one in tried if one[2]]
            for feature, form, _ in tried:
                self.forms[feature] = (role, form)
                self.can.add(feature)
                said.append(str(form))
            if not said:
                self.untaken[name] = self.complaint
            else:
                plain = any(word in said[0] for word in ("added", "Keep"))  # which True doesn't keep or hide
                forms = " or ".join(dict.fromkeys(said))
                self.notes.append(f"{name}: {forms}" + ("" if plain else f" ({why})"))
        if self.like in ("sdpa", "torch-mha") and "mask" in self.forms:
            x = self.draw(generator, s=S)
            told = "documentation" in reading.polarity(self.role["mask"], "mask", self.like, self.words)[1]
            if not told and self.attempt(replace(x, bias=torch.zeros(x.t, x.s))) is not None:
                self.can.add("bias")
        self._try_padded_queries(generator)

    def _try_padded_queries(self, generator: torch.Generator) -> None:
        """Does it give something of its own for the queries of padding, which nobody reads?"""
        if "cross" in self.can or not {"keys", "padding"} & self.can:
            return
        x = self.draw(generator)
        padding = torch.ones(B, x.s, dtype=torch.bool)
        padding[0, 1] = padding[2, 2] = padding[2, -1] = (
            False  # in front of queries that see it, causal or not
        )
        form = self.forms.get("padding", self.forms.get("keys"))
        if form is not None and form[1].letters == "lengths":
            padding = torch.arange(x.s) < torch.tensor([x.s - 2, x.s, x.s - 1])[:, None]
        x = replace(x, padding=padding)
        got = self.attempt(x)
        want = exact(self.weights, x).out
        if got is None or got.out.shape != want.shape:
            return
        room = 1e-4 * float(want.abs().max())
        right = torch.isclose(got.out.to(want.dtype), want, rtol=1e-4, atol=room).all(-1)
        self.blank = bool(right[padding].all()) and not bool(right[~padding].all())
        if self.blank:
            self.notes.append("what the queries of padding give isn't compared: it gives its own there")

    def _form(
        self, generator: torch.Generator, role: str, shapes: list[str], keeps: bool, why: str
    ) -> tuple[Form | None, bool]:
        """The first shape that is taken, as booleans, ones and zeros, or numbers to add; does it hide
        at all?
        """
        makes: tuple[str, ...] = ("bool", "01", "added")
        if self.like in ("sdpa", "torch-mha"):
            makes = ("bool",)
        elif reading.added(self.role[role], self.words):
            makes = ("added",)
        elif self.like == "hf" or self.role[role] == "attn_bias":
            makes = ("added", "bool", "01")
        elif "documentation" in why:  # as a mask that is true or false
            makes = ("bool", "01")
        if any(one.name == self.role[role] and re.search(r"\bMask\b", one.annotation) for one in self.d.call):
            makes = ("Keep", *makes)
        taken: list[Form] = []
        for letters, s in [(one, S) for one in shapes] + [(one, T) for one in shapes]:
            x = self.draw(generator, s=s)
            keep = torch.ones(B, 1, x.t if letters in GENERAL else 1, x.s, dtype=torch.bool)
            keep[..., 2] = False
            for made in makes:
                form = Form(letters, keeps, made)
                if self._hides(x, keep, form, role) is not None:
                    taken.append(form)
            if taken:
                break
        if not taken:
            return None, False
        generator.manual_seed(5)
        x = self.draw(generator, s=s)
        keep = torch.ones(B, 1, x.t if taken[0].letters in GENERAL else 1, x.s, dtype=torch.bool)
        keep[..., 2] = False
        for form in taken:
            turned = replace(form, keeps=not form.keeps)
            if self._hides(x, keep, form, role) or (
                form.made != "added" and self._hides(x, keep, turned, role)
            ):
                return form, True
        return taken[0], False

    def _hides(self, x: Inputs, keep: Tensor, form: Form, role: str) -> bool | None:
        """Does this form, hiding key 2 or all others, take its reach away? None where it isn't taken."""
        feature = "mask" if role == "mask" else "padding"
        before = self.forms.get(feature)
        self.forms[feature] = (role, form)
        try:
            field = {"keep": keep} if feature == "mask" else {"padding": keep[:, 0, 0]}
            a, b = self.attempt(x.but(**field)), self.attempt(self.moved(x, 2).but(**field))
        finally:
            self.forms.pop(feature)
            if before is not None:
                self.forms[feature] = before
        if a is None or b is None:
            return None
        rows = [i for i in range(x.t) if "cross" in self.can or i != 2]
        return bool(torch.equal(a.out[..., rows, :].nan_to_num(), b.out[..., rows, :].nan_to_num()))


def _moved(x: Tensor, entry: int) -> Tensor:
    """The tensor with one batch entry changed."""
    x = x.clone()
    x[entry] += 1.0
    return x


def _short(value: Any) -> str:
    return "Namespace(...)" if isinstance(value, dict) and "__namespace__" in value else repr(value)


def _kind(value: Any) -> str:
    return type(value).__name__
