"""The adapter for attention: calls a layer or a function with the oracle's inputs, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates.adapter import Adapter, B, D, Options, S, T
from manyheads.checker.candidates.construct import PROJECTED
from manyheads.checker.candidates.documentation import is_mask
from manyheads.checker.candidates.errors import Unclear, UnexpectedOutput
from manyheads.checker.candidates.forms import WEIGHT_LAYOUTS, MaskForm, rearrange
from manyheads.checker.candidates.parameters import NAME_WEIGHTS, find_projections, input_widths
from manyheads.checker.isolation.candidate import Call, Candidate
from manyheads.checker.isolation.errors import CandidateError, CodeError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.isolation.trees import iterate_tensors, top_tensors
from manyheads.checker.oracle import (
    Attention,
    Inputs,
    Outputs,
    Weights,
    allowed_error,
    exact,
    largest_difference,
)
from manyheads.shapes import sizes

SPREAD = 1.5  # scale of the random projection weights, so that scores differ by several units
SEQUENCES = ("query", "key", "value")


class AttentionAdapter(Adapter):
    """A candidate for attention.

    Features are "mask", "keys" (a mask of keys alone), "padding", "causal", "weights", "cross" (keys of
    another sequence), "scale", "sink", "bias", "past" and "grouped".
    """

    oracle = Attention

    def __init__(
        self, candidate: Candidate | CandidateProcess, options: Options, same_width: bool = False
    ) -> None:
        super().__init__(candidate, options, same_width)
        self.head_layout = "[b, h, t, d]"  # of the inputs of a candidate without projections
        self.forms: dict[str, tuple[str, MaskForm]] = {}  # the mask's role and form, by feature
        self.always_causal = self.always_weights = self.always_averaged = False
        self.ignores_padded_queries = False  # outputs of padded queries aren't compared
        self.weight_layouts: dict[bool, str] = {}  # layout of returned weights, by whether they are averaged
        self.rejected_masks: dict[str, CandidateError | None] = {}  # arguments that accept no form of mask
        self._assign_arguments()
        if options.kind in PROJECTED:
            self._find_weights(options.weights)

    # -- arguments and weights ---------------------------------------------------------------------

    def _assign_arguments(self) -> None:
        """Find the argument for each role, such as query, mask or scale."""
        self.arguments: dict[str, str] = {}
        unknown: list[str] = []
        named = [arg for arg in self.description.call if arg.is_named]
        for arg in named:
            role = names.argument_role(arg.name) or names.guess_mask_role(arg.name)
            if role == "mask" and isinstance(arg.default, bool):
                role = "causal"  # the argument enables the causal mask
            if role is not None and role not in self.arguments:
                self.arguments[role] = arg.name
            elif arg.required:
                unknown.append(arg.name)
        hint = self.arguments.pop("causal", None) if self.kind == "torch-mha" else None
        self.mask_arguments = [
            arg.name for arg in named if is_mask(arg, self.text) and arg.name not in unknown
        ]
        if hint == "is_causal" and "mask" in self.arguments:
            self.mask_arguments.remove(hint)  # in nn.MultiheadAttention, only a hint that the mask is causal
        used = {*self.arguments.values(), *unknown}
        if unused := [arg.name for arg in named if arg.name not in used]:
            self.notes.append(f"arguments left at their defaults: {', '.join(unused)}")
        self._assign_sequences(unknown)

    def _assign_sequences(self, unknown: list[str]) -> None:
        """Find the arguments for queries, keys and values, or x and a context."""
        roles = self.arguments
        if "x" in roles and {"key", "value"} <= set(roles):
            roles["query"] = roles.pop("x")
        if self.kind == "cross" and "context" not in roles and {"query", "key"} <= set(roles):
            roles["context"] = roles.pop("key")
        if "query" in roles and "value" not in roles and ("context" in roles or "key" not in roles):
            roles["x"] = roles.pop("query")
        inputs = {"self": ("x",), "cross": ("x", "context")}.get(self.kind, SEQUENCES)
        assigned = [role for role in (*SEQUENCES, "x", "context") if role in roles]
        if unknown and len(unknown) + len(assigned) == len(inputs):
            free = [role for role in inputs if role not in roles]
            roles |= dict(zip(free, unknown, strict=False))
            unknown = unknown[len(free) :]
        name = self.description.name
        if unknown:
            raise Unclear(
                f"{name} needs the argument {unknown[0]!r}, which the checker doesn't know. Write a "
                f"function that takes q, k, v or x and calls {name} (see docs/checker.md), and check that."
            )
        if self.kind == "self" and set(SEQUENCES) <= set(roles):
            self.kind, inputs = "multihead", SEQUENCES
        if self.kind == "multihead" and "x" in roles:
            inputs = ("x",)
        if any(role not in roles for role in inputs):
            taken = ", ".join(arg.name for arg in self.description.call) or "nothing"
            raise Unclear(
                f"Expected {name} to take {', '.join(inputs)}, as {self.kind} does, but it takes "
                f"{taken}. Set its kind with --like."
            )
        if self.kind == "cross" or {"query", "key"} <= set(roles):
            self.features.add("cross")

    def _find_weights(self, layers: Mapping[str, str]) -> None:
        """Find the projections, load random values into them, and count the heads."""
        projections = self.projections = find_projections(self.description, self.init, layers)
        self.parameters, generator = self.candidate.weights(), torch.Generator().manual_seed(1)
        random = {
            path: torch.randn(self.parameters[path].shape, generator=generator) * (SPREAD / inputs**0.5)
            for path, inputs in projections.count_inputs(self.parameters).items()
        }
        self.candidate.load(random)
        self.parameters |= random
        weights = self._read_weights()
        paths = {
            role: dict.fromkeys(view.path for view in views) for role, views in projections.weight.items()
        }
        roles = "; ".join(f"{role} = {', '.join(each)}" for role, each in paths.items())
        heads = f"{weights.heads} head{'s' * (weights.heads > 1)}"
        heads += f", {weights.key_heads} key heads" * (weights.key_heads != weights.heads)
        self.notes.append(f"weights: {roles}; {heads}")
        if projections.unused:
            self.notes.append(f"not part of attention: {', '.join(projections.unused)}")
        if not projections.heads_known:
            weights = self._count_heads(weights)
        try:
            exact(weights, self.draw(torch.Generator().manual_seed(4)))
        except RuntimeError as error:
            shapes = "; ".join(f"{role} {sizes(x)}" for role, x in weights.weight.items())
            reason = str(error).splitlines()[0].rstrip(".")
            name = f"{self.description.name} ({shapes}, {weights.heads} heads)"
            raise Unclear(f"The weights of {name} don't fit together ({reason}). {NAME_WEIGHTS}") from None

    def _read_weights(self) -> Weights:
        packings = self.projections.read(self.parameters)
        self.packings = [*packings]
        self.widths = input_widths(packings[0])
        return packings[0]

    def _count_heads(self, weights: Weights) -> Weights:
        """Count the heads in returned weights, for candidates whose parameters don't give the number."""
        x = self.draw(torch.Generator().manual_seed(4), s=S).but(need_weights=True)
        try:
            output = self.answer(x).output
        except CodeError:
            return weights
        shapes = [tuple(y.shape) for _, y in iterate_tensors(output) if y.dim() == 4]
        counts = {h for b, h, *rest in shapes if b == B and rest == [x.t, x.s]}
        if len(counts) == 1 and weights.weight["q"].shape[0] % (h := counts.pop()) == 0:
            self.projections.heads = self.projections.key_heads = h
            self.notes.append(f"{h} heads, according to the shape of its returned weights")
            return self._read_weights()
        return weights

    @property
    def heads(self) -> int:
        """The number of query heads."""
        if self.weights is not None:
            return self.weights.heads
        return 4 if "h" in self.head_layout else 1

    def adopt_convention(self, x: Inputs, got: Outputs) -> None:
        """If these outputs are right only for the other order of packed weights, use that order."""
        if len(self.packings) > 1 and not self.is_right(x, got):
            self.packings.reverse()
            if self.is_right(x, got):
                self.notes.append("packed weights are ordered [head, (q, k, v), d]")
            else:
                self.packings.reverse()

    def allowed_error(self, x: Inputs) -> float:
        """Return the largest error that rounding explains."""
        return allowed_error(self.weights, x)

    # -- inputs ------------------------------------------------------------------------------------

    def draw(
        self,
        generator: torch.Generator,
        b: int = B,
        t: int = T,
        s: int | None = None,
        *,
        key_heads: int | None = None,
    ) -> Inputs:
        """Return random inputs without masks. In self-attention, `s` is ignored and equals `t`."""
        crosses = "cross" in self.features
        s = s if crosses and s is not None else t

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        if self.weights is None:
            h = self.heads
            g = key_heads or h
            s = max(s, t) if self.always_causal else s
            x = Inputs(randn(b, h, t, D), randn(b, g, s, D), randn(b, g, s, D))
            if "sink" in self.arguments:
                x = x.but(sink=randn(h))
        else:
            q_width, k_width, v_width = self.widths
            query = randn(b, t, q_width)
            key = randn(b, s, k_width) if crosses else query
            value = randn(b, s, v_width) if crosses and self.kind != "cross" else key
            x = Inputs(query, key, value)
        if self.always_causal:
            x = x.but(causal=True, offset=0 if self.kind == "sdpa" else x.s - x.t)
        return x.but(need_weights=self.always_weights, average_weights=self.always_averaged)

    def replace_sequences(self, x: Inputs, **fields: Tensor) -> Inputs:
        """Return x with new queries, keys or values; those that share one argument stay equal."""
        if "cross" not in self.features:
            fields = dict.fromkeys(SEQUENCES, fields["query"])
        elif self.kind == "cross":
            fields["value"] = fields["key"]
        return x.but(**fields)

    def change_key(self, x: Inputs, position: int, by: float | None = None) -> Inputs:
        """Return x with one key and value changed, by a different amount in each channel, or by `by` in all.

        In self-attention, the query at this position changes too.
        """
        fields = {}
        for name in SEQUENCES[1:] if "cross" in self.features else SEQUENCES:
            changed = getattr(x, name).clone()
            changed[..., position, :] += torch.linspace(-2, 3, changed.shape[-1]) if by is None else by
            fields[name] = changed
        return self.replace_sequences(x, **fields)

    def unchanged_queries(self, x: Inputs, position: int) -> list[int]:
        """Return the queries that `change_key` doesn't change."""
        return [i for i in range(x.t) if "cross" in self.features or i != position]

    def first_shared(self, keep: Tensor) -> Tensor:
        """Return the mask; if the candidate takes one mask for the batch, repeat that of the first entry."""
        return keep[:1].expand_as(keep).clone() if self.forms["mask"][1].is_shared else keep

    def random_mask(self, x: Inputs, g: torch.Generator, first_key: bool = False) -> Inputs:
        """Return x with a random mask; if `first_key`, all queries may attend to the first key."""
        keep = torch.rand(x.b, 1, x.t, x.s, generator=g) < 0.6
        keep[..., 0] |= ~keep.any(-1)
        keep = self.first_shared(keep)
        if self.always_causal or first_key:
            keep[..., 0] = True
        return x.but(keep=keep)

    def random_padding(self, x: Inputs, g: torch.Generator) -> Inputs:
        """Return x with padding at the end and, unless given as lengths, elsewhere except the first token."""
        lengths = torch.randint(1, x.s + 1, (x.b,), generator=g)
        lengths[0] = max(1, x.s - 2)
        padding = torch.arange(x.s) < lengths[:, None]
        if not any(form.letters == "lengths" for _, form in self.forms.values()):
            gaps = torch.rand(x.b, x.s, generator=g) < 0.3
            gaps[:, 0] = False
            padding = padding & ~gaps
        return x.but(padding=padding)

    def scenarios(self, seed: int, s: int = S, t: int = T, b: int = B) -> dict[str, Inputs]:
        """Return named inputs, one for each way to call the candidate ("plain", "causal", "mask", …)."""
        g = torch.Generator().manual_seed(seed)
        features = self.features
        from_start = self.kind == "sdpa"  # SDPA's causal mask aligns the first query with the first key
        is_optional = "causal" in features and not self.always_causal
        calls = {"plain": self.draw(g, b, t, s)}
        if is_optional:
            calls["causal"] = self.draw(g, b, t).but(causal=True)
            if self.kind in ("sdpa", "attention") and "cross" in features:
                for name, queries in (("causal, longer keys", t), ("causal, one query", 1)):
                    offset = 0 if from_start else s - queries
                    calls[name] = self.draw(g, b, queries, s).but(causal=True, offset=offset)
        if self.always_causal and "cross" in features:
            calls["one query"] = self.draw(g, b, 1, s)
        if "mask" in features:
            calls["mask"] = self.random_mask(self.draw(g, b, t, s), g)
            if is_optional and not from_start:
                calls["mask, causal"] = self.random_mask(self.draw(g, b, t), g, True).but(causal=True)
        if "keys" in features:
            calls["keys"] = self.random_padding(self.draw(g, b, t, s), g)
            if is_optional and not from_start:
                calls["keys, causal"] = self.random_padding(self.draw(g, b, t), g).but(causal=True)
        if "padding" in features:
            calls["padding"] = self.random_padding(self.draw(g, b, t, s), g)
            if "mask" in features:
                x = self.random_padding(self.draw(g, b, t, s), g)
                calls["mask, padding"] = self.random_mask(x, g, True)
        if "weights" in features and not self.always_weights:
            calls |= {f"{name}, weights": x.but(need_weights=True) for name, x in calls.items()}
        if "weights" in features and "average" in self.arguments:
            with_weights = {name: x for name, x in calls.items() if x.need_weights}
            calls |= {f"{name}, averaged": x.but(average_weights=True) for name, x in with_weights.items()}
        if "bias" in features:
            x = self.draw(g, b, t, s)
            calls["added"] = x.but(bias=torch.randn(x.t, x.s, generator=g))
        if "scale" in features:
            calls["scale"] = self.draw(g, b, t, s).but(scale=0.3)
        if "grouped" in features:
            calls["grouped"] = self.draw(g, b, t, s, key_heads=2)
        return calls

    # -- calls -------------------------------------------------------------------------------------

    def call(self, x: Inputs, **options: Any) -> Call:
        """Return the call for these inputs. Arguments are positional where possible."""
        roles, dtype = self.arguments, x.query.dtype
        sequences = {"query": x.query, "x": x.query, "key": x.key, "value": x.value}
        if self.kind == "cross":
            sequences["context"] = x.key
        kwargs: dict[str, Any] = {
            roles[role]: self.to_layout(y) for role, y in sequences.items() if role in roles
        }
        padding = None if x.padding is None else x.padding[:, None, None]
        for feature, keep in (("mask", x.keep), ("padding", padding)):
            if keep is not None:
                name, form = self.mask_form(feature)
                kwargs[name] = form.write(keep.expand(-1, -1, x.t, -1) if form.is_general else keep, dtype)
        default_scale = x.query.shape[-1] ** -0.5
        groups = x.query.shape[1] // x.key.shape[1]
        module = {"training": False, "layer_idx": 0, "is_causal": False, "sinks": None}
        values = {
            "mask": x.bias,
            "causal": x.causal,
            "average": x.average_weights,
            "weights": x.need_weights,
            "scale": default_scale if x.scale is None and self._is_required("scale") else x.scale,
            "sink": x.sink,
            "grouped": x.query.shape[1] != x.key.shape[1] or None,
            "module": {"__namespace__": {"num_key_value_groups": groups, "scaling": default_scale, **module}},
        }
        kwargs |= {
            roles[role]: value for role, value in values.items() if role in roles and value is not None
        }
        for role, default in (("mask", None), ("padding", None), ("dropout", 0.0)):
            if self._is_required(role):
                kwargs.setdefault(roles[role], default)
        args = tuple(kwargs.pop(name) for name in takewhile(kwargs.__contains__, self.positional))
        options.setdefault("dtype", dtype if dtype != torch.float32 else None)
        return Call(args=args, kwargs=kwargs, **options)

    def _is_required(self, role: str) -> bool:
        return any(arg.name == self.arguments.get(role) and arg.required for arg in self.description.call)

    def mask_form(self, feature: str) -> tuple[str, MaskForm]:
        """Return the name of the argument for a mask or padding, and the form that it takes."""
        role, form = self.forms[feature if feature in self.forms else "keys"]
        return self.arguments[role], form

    def without_masks(self, x: Inputs) -> dict[str, Inputs]:
        """Return x without one of its masks, for each mask, by the name of its argument."""
        calls = {}
        if x.keep is not None:
            calls[self.mask_form("mask")[0]] = x.but(keep=None)
        if x.padding is not None:
            calls[self.mask_form("padding")[0]] = x.but(padding=None)
        if x.causal and "causal" in self.arguments:
            calls[self.arguments["causal"]] = x.but(causal=False)
        return calls

    @property
    def layouts(self) -> tuple[str, str]:
        """The layouts of inputs and outputs: the oracle's, and the candidate's."""
        if self.weights is None:
            return "[b, h, t, d]", self.head_layout
        return "[b, t, e]", "[t, b, e]" if self.layout == "sequence" else "[b, t, e]"

    def to_layout(self, x: Tensor) -> Tensor:
        """Convert `[b, t, e]` or `[b, h, t, d]` to the candidate's layout."""
        return rearrange(x, *self.layouts)

    def from_layout(self, x: Tensor) -> Tensor:
        """Convert from the candidate's layout; return x unchanged if it has another number of dimensions."""
        oracle_layout, layout = self.layouts
        return rearrange(x, layout, oracle_layout) if x.dim() == layout.count(",") + 1 else x

    def sequence_paths(self, call: Call) -> dict[str, tuple[str, ...]]:
        """Return the roles of each sequence by its path in a call: the tensors to differentiate."""
        paths = {name: str(n) for n, name in enumerate(self.positional[: len(call.args)])}
        paths |= {name: name for name in call.kwargs}
        roles = {"x": SEQUENCES[:1] if "cross" in self.features else SEQUENCES, "context": SEQUENCES[1:]}
        roles |= {role: (role,) for role in SEQUENCES}
        return {
            paths[self.arguments[role]]: input_roles
            for role, input_roles in roles.items()
            if self.arguments.get(role) in paths
        }

    # -- outputs -----------------------------------------------------------------------------------

    def read(self, output: Any, x: Inputs, strict: bool = True) -> Outputs:
        """Return the output `[b, t, e]` or `[b, h, t, d]`, and weights `[b, h, t, s]` if there are any."""
        tensors = top_tensors(output)
        if not tensors:
            raise UnexpectedOutput(f"Expected a tensor as output, got {type(output).__name__}")
        first, *others = tensors
        out, h = self.from_layout(first), self.heads
        if self.weights is not None:
            expected: tuple[int, ...] = (x.b, x.t, self.weights.out_width)
        else:
            expected = (x.b, h, x.t, x.value.shape[-1])
            if self.kind == "hf" and tuple(out.shape) == (x.b, x.t, h, x.value.shape[-1]):
                out = out.transpose(1, 2)
        if not strict and out.dim() == len(expected):
            expected = (*expected[:-1], out.shape[-1])
        if tuple(out.shape) != expected:
            shape = list(self.to_layout(torch.empty(expected)).shape)
            is_swapped = list(first.shape) == [shape[1], shape[0], *shape[2:]]
            hint = ", with the first two axes swapped" * is_swapped
            raise UnexpectedOutput(
                f"Expected an output {self.layouts[1]} = {shape}, got {sizes(first)}{hint}"
            )
        if not out.is_floating_point():
            raise UnexpectedOutput(f"Expected an output of floats, got {out.dtype}")
        weights = self._find_returned_weights(others, x)
        if strict and x.need_weights:
            if not others:
                raise UnexpectedOutput("Expected the weights that the call requests, got none")
            if weights is None or weights.shape[:2] != (x.b, 1 if x.average_weights else h):
                by_head = f"weights of {h} heads, [b, h, t, s] = {[x.b, h, x.t, x.s]}"
                average = f"average weights of {h} heads, [b, t, s] = {[x.b, x.t, x.s]}"
                raise UnexpectedOutput(
                    f"Expected the {average if x.average_weights else by_head}, got {sizes(others[0])}"
                )
        return Outputs(out, weights)

    def _find_returned_weights(self, tensors: list[Tensor], x: Inputs) -> Tensor | None:
        """Return weights `[b, h, t, s]` or `[b, 1, t, s]`, or None if no tensor has their shape.

        The first call whose sizes all differ determines their layout, which is expected from then on.
        """
        h = self.heads
        size = {"b": x.b, "h": h, "t": x.t, "s": x.s, "1": 1, "bh": x.b * h}
        known = self.weight_layouts.get(x.average_weights)
        for layout in WEIGHT_LAYOUTS if known is None else (known,):
            if layout == "b 1 t s" and self.kind == "torch-mha" and "average" in self.arguments:
                continue  # PyTorch's averaged weights have no axis of heads
            shape = tuple(size[letter] for letter in layout.split())
            for tensor in tensors:
                if tuple(tensor.shape) == shape and tensor.is_floating_point():
                    if len({x.b, h, x.t, x.s}) == 4 or (len({x.b, x.t, x.s}) == 3 and h == 1):
                        self.weight_layouts[x.average_weights] = layout
                    by_head = tensor.unflatten(0, (x.b, h)) if "bh" in layout else tensor
                    return rearrange(by_head, layout, "bhts")
        return None

    def ignore_padding(self, x: Inputs, outputs: Outputs) -> Outputs:
        """Return the outputs, set to 0 for padded queries if those aren't compared."""
        if x.padding is None or not self.ignores_padded_queries:
            return outputs
        padded = ~x.padding[:, :, None]  # [b, t, 1]
        out, weights = outputs.out, outputs.weights
        if weights is not None:
            weights = weights.masked_fill(padded[:, None], 0.0)
        return Outputs(out.masked_fill(padded if out.dim() == 3 else padded[:, None], 0.0), weights)

    def depends_on_mask(self, x: Inputs, without: Inputs, allowed: float) -> bool:
        """Return True if the right outputs with and without a mask differ."""
        outs = [self.ignore_padding(x, self.exact(y)).out for y in (x, without)]
        return largest_difference(*outs) > 2 * allowed
