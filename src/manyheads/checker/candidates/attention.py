"""The adapter for attention: calls a layer or a function with the oracle's inputs, in any layout."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates.adapter import Adapter, B, D, Options, S, T
from manyheads.checker.candidates.construct import PROJECTED
from manyheads.checker.candidates.documentation import counts_from_start, says_one_role
from manyheads.checker.candidates.errors import ALONE, Unclear, UnexpectedOutput
from manyheads.checker.candidates.forms import (
    HEAD_MASKS,
    SEGMENTS,
    WEIGHT_LAYOUTS,
    AngleForm,
    MaskForm,
    rearrange,
)
from manyheads.checker.candidates.parameters import NAME_WEIGHTS, find_projections, input_widths, randomize
from manyheads.checker.candidates.roles import (
    MASKS,
    ROLES,
    SIZES,
    VECTORS,
    Role,
    may_be_tensor,
    read_roles,
)
from manyheads.checker.isolation.candidate import Call, Candidate, Kept
from manyheads.checker.isolation.describe import Argument
from manyheads.checker.isolation.errors import CandidateError, CodeError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.isolation.trees import iterate_tensors, top_tensors
from manyheads.checker.oracle import (
    Attention,
    Inputs,
    Oracle,
    Outputs,
    Weights,
    allowed_error,
    exact,
    largest_difference,
)
from manyheads.checker.parts import NoWindow, Window, divide_grid
from manyheads.shapes import sizes

if TYPE_CHECKING:
    from manyheads.checker.candidates.caches import Cache, Make

UNKNOWN_ERROR = 1e-4  # relative, of candidates that the oracle doesn't describe
SPREAD = 1.5  # scale of the random projection weights, so that scores differ by several units
SEQUENCES = ("query", "key", "value")
TRIED = "trial calls"
ANGLES = {"cos-sin", "cos", "sin", "angles"}  # roles of a rotary encoding's cosines and sines
PLACES = {"positions", "start"}  # roles of arguments that say where the tokens are
POSITIONS = PLACES | ANGLES
GRIDS = {"grid", "rows", "columns"}  # roles of arguments that say how many rows and columns tokens have
EXTRA = 7.0  # entries of tokens that don't attend


class AttentionAdapter(Adapter):
    """A candidate for attention.

    Features are "mask", "keys" (a mask of keys alone), "padding", "causal", "weights", "cross" (keys of
    another sequence), "scale", "sink", "softcap", "bias", "head mask" and "grouped".
    """

    oracle = Attention

    def __init__(
        self, candidate: Candidate | CandidateProcess, options: Options, same_width: bool = False
    ) -> None:
        super().__init__(candidate, options, same_width)
        self.layout_reason = ""
        self.head_layout = "[b, h, t, d]"  # of the inputs of a candidate without projections
        # The name and form of a mask argument by feature, further ones as "mask (name)".
        self.forms: dict[str, tuple[str, MaskForm]] = {}
        self.always_causal = self.always_weights = self.always_averaged = False
        self.magnitude = 1.0  # of inputs, so that scores reach a cap
        self.ignores_padded_queries = False  # outputs of padded queries aren't compared
        self.weight_layouts: dict[bool, str] = {}  # layout of returned weights, by whether they are averaged
        self.returns_weights_alone = False  # without the output, if they are requested
        self.weight_place = 0  # their place after the output; T5 returns its bias [1, h, t, s] before them
        self.rejected_masks: dict[str, CandidateError | None] = {}  # arguments that accept no form of mask
        self.rejected_shapes: dict[str, str] = {}  # documented shapes of masks that no call accepts
        self.position_letters = "bs"  # the axes of positions
        self.angle_form: AngleForm | None = None  # how cosines and sines are passed
        self.filled: dict[str, MaskForm] = {}  # required masks, passed where there is no mask
        self.prepare: Make = lambda b: ()  # the calls before each call, for a batch of this size
        self.grid = ""  # the layout of x if it is one sequence, an image or a video, such as "[b, e, h, w]"
        self.context_grid = ""  # the layout of a context that is an image, "[b, e, h, w]" or "[b, h, w, e]"
        self.batch: int | None = None  # the number of batch entries, if a cache of fixed sizes takes no other
        self.count: int | None = None  # the number of tokens, if its constructor fixes it
        self.images: list[tuple[int, int]] = []  # the rows and columns of images that calls take
        self.prefix = 0  # how many tokens are before those of a grid whose size is passed
        self.extra = 0  # how many tokens follow those that attend, if their number is passed
        self.angle_order = ("cos", "sin")  # of a tuple of both
        self.counts_tokens = False  # whether positions are counted without padding
        self.has_positions = False  # whether its outputs depend on the order of tokens
        self.is_order_unknown = False  # whether that is all that no known parts explain
        self.cache: Cache | None = None  # how its cache of earlier keys is used
        self.cache_problem = ""  # why that isn't known, if it seems to have one
        self.vectors: dict[str, str] = {}  # "q", "k" or "qk" by the role of each argument for such vectors
        self.asks_first = False  # whether only the first token attends: calls have each token first in turn
        self.without_context: list[str] = []  # arguments that have an effect only in calls without a context
        self.head_mask_letters = "h"  # the axes of a head mask
        self.window_size = 1  # how many keys a window has besides those before the query
        self.mechanism = ""  # other than softmax attention, in the words of its documentation
        self.window_right: bool | None = None  # whether it limits later keys too; None if it isn't exercised
        self.counts_from_start = counts_from_start(self.kind, self.text)
        self._assign_arguments()
        if options.kind in PROJECTED:
            self._find_weights(options.weights)

    # -- arguments and weights ---------------------------------------------------------------------

    def _assign_arguments(self) -> None:
        """Find the argument for each role, such as query or scale, and all masks."""
        chosen = {**self.options.tried, **self.options.arguments}
        roles = read_roles(self.description, self.text, chosen, self.options.init)
        roles |= {name: (role, TRIED) for name, role in self.options.tried.items()}
        self.arguments: dict[str, str] = {}
        self.masks: dict[str, str] = {}  # the role of each mask argument
        self.reasons = {name: reason for name, (_, reason) in roles.items()}
        self.copies: list[str] = []  # further arguments for x
        self.unassigned: list[str] = []  # optional arguments without a role
        self.defaults: list[str] = []  # arguments that are left at their defaults
        self.unknown_arguments: list[str] = []  # optional arguments whose role nothing gives
        required: list[str] = []  # required arguments without a role
        for arg in (arg for arg in self.description.call if arg.is_named):
            role, reason = roles[arg.name]
            is_known = role is not None or names.argument_role(arg.name) in SIZES
            if not arg.required and not is_known:
                self.unknown_arguments.append(arg.name)
            if role == "ignore" or (role == "causal" and self.kind == "torch-mha"):
                self.defaults.append(arg.name)  # is_causal of PyTorch's layer only hints at what the mask is
            elif role in MASKS:
                self.masks[arg.name] = role
            elif role is not None and role not in ("residual", *self.arguments):
                self.arguments[role] = arg.name
            elif role == "residual" or (role == "x" and reason.startswith("--arg")):
                self.copies.append(arg.name)
            elif arg.required:
                required.append(arg.name)
            elif arg.default is None and role is None and may_be_tensor(arg.annotation):
                self.unassigned.append(arg.name)
            else:
                self.defaults.append(arg.name)
        self._assign_sequences(required)

    def _assign_sequences(self, unknown: list[str]) -> None:
        """Find the arguments for queries, keys and values, or x and a context."""
        roles = self.arguments
        if "x" in roles and {"key", "value"} <= set(roles):
            roles["query"] = roles.pop("x")
        if self.kind == "cross" and "context" not in roles and {"query", "x"} <= set(roles):
            roles["context"] = roles.pop("x")  # forward(x, latents)
        if self.kind == "cross" and "context" not in roles and {"query", "key"} <= set(roles):
            roles["context"] = roles.pop("key")
        if "query" in roles and "value" not in roles and ("context" in roles or "key" not in roles):
            roles["x"] = roles.pop("query")
        inputs = {"self": ("x",), "cross": ("x", "context")}.get(self.kind, SEQUENCES)
        free = [role for role in inputs if role not in roles]
        if len(unknown) == len(free) == 1:
            roles[free[0]] = unknown.pop()
            self.reasons[roles[free[0]]] = "the only argument that it can be"
        name = self.description.name
        if unknown:
            given = " ".join(f"--arg {name}=ROLE" for name in unknown)
            raise Unclear(
                f"{name} needs {', '.join(unknown)}, and nothing says what that is. Give {given}, "
                f"where ROLE is {', '.join(list(ROLES)[:6])} or another role in docs/checker.md."
            )
        if self.kind == "self" and set(SEQUENCES) <= set(roles):
            self.kind, inputs = "multihead", SEQUENCES
        if self.kind == "multihead" and "x" in roles:
            inputs = ("x",)
        if any(role not in roles for role in inputs):
            taken = ", ".join(arg.name for arg in self.description.call) or "nothing"
            raise Unclear(
                f"Expected {name} to take {', '.join(inputs)}, as {self.kind} does, but it takes "
                f"{taken}. Set its kind with --like, or the role of an argument with --arg NAME=ROLE."
            )
        if self.kind == "cross" or {"query", "key"} <= set(roles):
            self.features.add("cross")

    def _find_weights(self, layers: Mapping[str, str]) -> None:
        """Find the projections, load random values into them, and count the heads."""
        projections = find_projections(self.description, self.init, layers, self.options.heads)
        self.projections = projections
        self.parameters, generator = self.candidate.weights(), torch.Generator().manual_seed(1)
        random = {
            path: torch.randn(self.parameters[path].shape, generator=generator) * (SPREAD / inputs**0.5)
            for path, inputs in projections.count_inputs(self.parameters).items()
        }
        random |= randomize(self.parameters, projections.unused)
        for path, first in self.description.shared.items():
            if path in random:
                random[path] = random.setdefault(first, random[path])
        self.candidate.load(random)
        self.parameters |= random
        weights = self.read_weights()
        if not projections.heads_reason:
            weights = self._count_heads(weights)
        if not projections.heads_reason and (numbers := self._possible_heads(weights)):
            raise Unclear(
                f"Nothing says how many heads {self.description.name} has (perhaps {', '.join(numbers)}). "
                "Give their number with --heads N."
            )
        try:
            exact(weights, self.draw(torch.Generator().manual_seed(4)))
        except RuntimeError as error:
            shapes = "; ".join(f"{role} {sizes(x)}" for role, x in weights.weight.items())
            reason = str(error).splitlines()[0].rstrip(".")
            raise Unclear(
                f"The weights of {self.description.name} ({shapes}, {weights.heads} heads) don't fit "
                f"together ({reason}). Give --heads N. {NAME_WEIGHTS}. Perhaps it has projections of "
                f"several sequences. {ALONE}."
            ) from None

    def read_weights(self) -> Weights:
        """Read the projections from the parameters, in each order in which they may be packed."""
        packings = self.projections.read(self.parameters)
        self.packings = [*packings]
        self.widths = input_widths(packings[0])
        return packings[0]

    def _possible_heads(self, weights: Weights) -> list[str]:
        """Return the numbers that may be those of heads, among those whose names say nothing."""
        width, values = weights.weight["q"].shape[0], {**self.init, **self.description.attributes}
        other = r"window|size|len|dim|width|layer|max|min|seed|bucket|kernel|stride|rank|group|drop|pad|id"
        unknown = {x: n for x, n in values.items() if not names.constructor_value(x)[0] and type(n) is int}
        divisors = {x: n for x, n in unknown.items() if 1 < n < width and width % n == 0}
        return [f"{x} = {n}" for x, n in divisors.items() if not re.search(other, x, re.I)]

    def _count_heads(self, weights: Weights) -> Weights:
        """Count the heads in returned weights, for candidates whose parameters don't give the number."""
        x = self.draw(torch.Generator().manual_seed(4), s=S).but(need_weights=True)
        try:
            output = self.answer(x).output
        except CodeError:
            return weights
        shapes = [tuple(y.shape) for _, y in iterate_tensors(output) if y.dim() == 4]
        counts = {h for b, h, *rest in shapes if b == B and rest == [x.t, x.s]}
        if len(counts) != 1 or weights.weight["q"].shape[0] % (h := counts.pop()):
            return weights
        self.projections.heads = self.projections.key_heads = h
        self.projections.heads_reason = "the shape of its returned weights"
        return self.read_weights()

    @property
    def roles(self) -> list[Role]:
        """What each argument, parameter and setting is taken for."""
        taken = {name: role for role, name in self.arguments.items()} | self.masks
        taken |= dict.fromkeys(self.copies, "x") | dict.fromkeys(self.defaults, "ignore")
        rows = []
        for name, default in ((arg.name, arg.default) for arg in self.description.call if arg.is_named):
            role = taken.get(name, "unknown")
            reason = self.reasons.get(name, "")
            if role == "ignore":
                reason = f"{default!r}, so it isn't checked{f'; {reason}' * bool(reason)}"
            forms = dict.fromkeys(str(form) for other, form in self.forms.values() if other == name)
            rows.append(Role(name, f"{role}: {' or '.join(forms)}" if forms else role, reason))
        layout = self.layouts[1].replace("i", "1").replace("j", "1")
        if (weights := self.weights) is not None:
            rows += self.projections.roles(self.parts)
            if self.context_grid:
                rows.append(Role("layout of the context", self.context_grid, TRIED, "setting"))
            rows.append(Role("heads", str(weights.heads), self.projections.heads_reason, "setting"))
            rows.append(Role("head size", str(weights.head_size), "", "setting"))
            if weights.key_heads != weights.heads:
                rows.append(Role("key heads", str(weights.key_heads), "", "setting"))
        return [*rows, Role("layout", layout, self.layout_reason, "setting")]

    @property
    def heads(self) -> int:
        """The number of query heads."""
        if self.weights is not None:
            return self.weights.heads
        return (self.options.heads or names.HEADS) if "h" in self.head_layout else 1

    @property
    def conventions(self) -> list[tuple[type[Oracle], ...]]:
        """Return the equally right ways in which the candidate may compute, in its own convention."""
        return [(*steps, *self.convention) for steps in super().conventions]

    def adopt_convention(self, x: Inputs, got: Outputs) -> None:
        """If these outputs are right only for the other order of packed weights, use that order."""
        if len(self.packings) > 1 and not self.is_right(x, got):
            self.packings.reverse()
            if self.is_right(x, got):
                self.notes.append("packed weights are ordered [head, (q, k, v), d]")
            else:
                self.packings.reverse()

    def allowed_error(self, x: Inputs) -> float:
        """Return the largest error that rounding explains, or of unknown computations, a small one."""
        if self.unknown:
            return UNKNOWN_ERROR * (1 + float(self.run(x).out.abs().max()))
        return allowed_error(self.weights, x, self.right)

    # -- inputs ------------------------------------------------------------------------------------

    def draw(
        self,
        generator: torch.Generator,
        b: int = B,
        t: int = T,
        s: int | None = None,
        *,
        key_heads: int | None = None,
        count: int | None = None,
    ) -> Inputs:
        """Return random inputs without masks. In self-attention, `s` is ignored and equals `t`.

        A fixed number of tokens takes the place of both, or another such number, `count`; a fixed number of
        batch entries that of `b`.
        """
        count = count or self.count
        crosses = "cross" in self.features
        b = 1 if self.is_single else self.batch or b
        t, s = (count, count) if count else (max(t, self.prefix + 1), s)
        s = s if crosses and s is not None else t
        if self.context_grid and s > 3 and divide_grid(s)[0] == 1:
            s += 1  # an image of one row takes masks that others don't
        if self.always_causal and (self.weights is None or not self.counts_from_start):
            s = max(s, t)  # fewer keys would leave queries without any

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * self.magnitude

        if self.weights is None:
            h = self.heads
            g = key_heads or h
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
            x = x.but(causal=True, offset=0 if self.counts_from_start else x.s - x.t)
        if ANGLES & set(self.arguments) or self.is_required("positions"):
            x = self.place(x, torch.arange(x.s).expand(b, -1))
        if self.vectors and any(map(self.is_required, self.vectors)):
            x = self.draw_vectors(x, generator)
        return x.but(need_weights=self.always_weights, average_weights=self.always_averaged)

    def place(self, x: Inputs, positions: Tensor) -> Inputs:
        """Return x with other positions, `[b, s]`, and the angles of a rotary encoding there (base 10000)."""
        d = D if self.weights is None else self.weights.head_size
        frequencies = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = positions[..., None] * frequencies if ANGLES & set(self.arguments) else None
        return x.but(positions=positions, angles=angles)

    def draw_vectors(self, x: Inputs, generator: torch.Generator) -> Inputs:
        """Return x with random vectors of positions for each argument that takes them."""
        drawn: dict[str, Tensor] = {}
        for to in self.vectors.values():
            like = x.key if to == "k" else x.query
            vectors = torch.randn(like.shape, generator=generator)
            drawn |= {{"q": "query_vectors", "k": "key_vectors"}[role]: vectors for role in to}
        return x.but(**drawn)

    def possible_vectors(self) -> list[dict[str, str]]:
        """Return what the vectors of each argument may be added to: "q", "k", or "qk" in self-attention.

        Trial calls decide where neither names nor documentation do.
        """
        roles = [role for role in VECTORS if role in self.arguments]
        said = {role: says_one_role(self.arguments[role], self.text) for role in roles}
        usual = {"query-vectors": "q", "key-vectors": "k"}
        if "cross" not in self.features:
            alone = not set(usual) <= set(roles)
            return [{role: said[role] or ("qk" if alone else usual.get(role, "qk")) for role in roles}]
        usual["vectors"] = "k" if "query-vectors" in roles else "q" if "key-vectors" in roles else ""
        found = {role: said[role] or usual[role] for role in roles}
        return [
            {role: to or other for role, to in found.items()}
            for other in ("qk" if "" in found.values() else "q")
        ]

    def replace_sequences(self, x: Inputs, **fields: Tensor) -> Inputs:
        """Return x with new queries, keys or values; those that share one argument stay equal."""
        if "cross" not in self.features:
            fields = dict.fromkeys(SEQUENCES, fields["query"])
        elif self.kind == "cross" and "key" in fields:
            fields["value"] = fields["key"]
        return x.but(**fields)

    def reorder(self, x: Inputs) -> Inputs:
        """Return x with all tokens but the last in another order."""
        order = torch.cat((torch.arange(x.t - 1).roll(1), torch.tensor([x.t - 1])))
        names = SEQUENCES[1:] if "cross" in self.features else SEQUENCES
        fields = {name: getattr(x, name)[..., order, :] for name in names}
        vectors = {"key_vectors": x.key_vectors, "query_vectors": x.query_vectors}
        moved = {name: y for name, y in vectors.items() if y is not None and name.partition("_")[0] in names}
        x = x.but(**{name: y[..., order, :] for name, y in moved.items()})
        return self.replace_sequences(x, **fields)

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

    def first_shared(self, keep: Tensor, feature: str | None = None) -> Tensor:
        """Return the mask; if its form has one mask for the batch, repeat that of the first entry."""
        form = self.used_form(feature)
        return keep[:1].expand_as(keep).clone() if form is not None and form.is_shared else keep

    def used_form(self, feature: str | None = None) -> MaskForm | None:
        """Return the form of a mask, by default of the first one that may differ between queries."""
        general = (name for name in ("mask", "segments", *self.forms) if name in self.forms)
        feature = feature or next(general, "")
        return self.forms[feature][1] if feature in self.forms else None

    def random_mask(self, x: Inputs, g: torch.Generator, first_key: bool = False) -> Inputs:
        """Return x with a random mask; if `first_key`, all queries may attend to the first key."""
        form = self.used_form(x.form)
        heads = self.heads if form is not None and form.letters in HEAD_MASKS else 1
        keep = torch.rand(x.b, heads, x.t, x.s, generator=g) < 0.6
        keep[..., 0] |= ~keep.any(-1)
        keep = self.first_shared(keep, x.form)
        if self.always_causal or first_key:
            keep[..., 0] = True
        if windows := self.window_sizes():  # which the first key may not be in
            keep |= torch.eye(x.t, x.s, dtype=torch.bool)
            if x.padding is not None:  # which may mask the query's own key
                keep[..., :: max(2, min(windows) - 1)] = True
        return x.but(keep=keep)

    def window_sizes(self) -> list[int]:
        """Return the sizes of the windows that the candidate has or may have."""
        sets = [self.parts] if self.parts else self.plausible
        parts = [part.window if isinstance(part, NoWindow) else part for each in sets for part in each]
        return [part.size for part in parts if isinstance(part, Window)]

    def random_segments(self, x: Inputs, g: torch.Generator, _: bool = False) -> Inputs:
        """Return x with a mask of neighboring segments, the first token's by itself in some batch entries."""
        starts = torch.rand(x.b, x.s, generator=g) < 0.4
        starts[0, 1:2] = True
        segments = starts.cumsum(1)
        keep = (segments[:, :, None] == segments[:, None])[:, None]
        return x.but(keep=self.first_shared(keep, x.form))

    def random_padding(self, x: Inputs, g: torch.Generator, _: bool = False) -> Inputs:
        """Return x with padding at the end and, unless given as lengths, elsewhere except the first token.

        A candidate may count positions without padding. There, padding has no gaps: it is at the end, and in
        every other entry at the start unless this masks all keys of a causal query. No window is all padding,
        because correct code differs in the output of a query without visible keys.
        """
        lengths = torch.randint(1, x.s + 1, (x.b,), generator=g)
        lengths[0] = max(1, x.s - 2)
        windows = self.window_sizes()
        is_prefix = self.counts_tokens or any(form.letters == "lengths" for _, form in self.forms.values())
        if windows and is_prefix:
            lengths = lengths.clamp_min(max(1, x.s - min(windows) + 1))
        padding = torch.arange(x.s) < lengths[:, None]
        if any(form.letters == "lengths" for _, form in self.forms.values()):
            return x.but(padding=padding)
        if self.counts_tokens:
            padding[1::2] = padding[1::2] if "causal" in self.features else padding[1::2].flip(1)
        else:
            gaps = torch.rand(x.b, x.s, generator=g) < 0.3
            gaps[:, 0] = False
            gaps[0, 1:2] = x.s > 4  # before a token that isn't padding
            padding = padding & ~gaps
            if windows:  # a key of each window, also of one that is too short by one
                padding[:, :: max(2, min(windows) - 1)] = True
        return x.but(padding=padding)

    def scenarios(self, seed: int, s: int = S, t: int = T, b: int = B) -> dict[str, Inputs]:
        """Return named inputs, one for each way to call the candidate ("plain", "causal", "mask", …)."""
        g = torch.Generator().manual_seed(seed)
        features, arguments = self.features, set(self.arguments)
        is_optional = "causal" in features and not self.always_causal
        calls = {"plain": self.draw(g, b, t, s)}
        if is_optional:
            calls["causal"] = self.draw(g, b, t).but(causal=True)
            if self.kind in ("sdpa", "attention") and "cross" in features:
                for name, queries in (("causal, longer keys", t), ("causal, one query", 1)):
                    keys = max(s, queries)  # fewer keys would leave queries without any
                    offset = 0 if self.counts_from_start else keys - queries
                    calls[name] = self.draw(g, b, queries, keys).but(causal=True, offset=offset)
        if self.always_causal and "cross" in features:
            calls["one query"] = self.draw(g, b, 1, s)
        for feature, (_, form) in self.forms.items():
            write = self.random_mask if form.is_general else self.random_padding
            write = self.random_segments if form.letters in SEGMENTS else write
            calls[feature] = write(self.draw(g, b, t, s).but(form=feature), g)
            if is_optional and self.kind != "sdpa" and feature != "padding":
                x = write(self.draw(g, b, t).but(form=feature), g, True)
                calls[f"{feature}, causal"] = x.but(causal=True)
        if {"mask", "padding"} <= features:
            x = self.random_padding(self.draw(g, b, t, s), g)
            calls["mask, padding"] = self.random_mask(x, g, True)
        if "weights" in features and not self.always_weights:
            calls |= {f"{name}, weights": x.but(need_weights=True) for name, x in calls.items()}
        if "weights" in features and "average-weights" in arguments:
            with_weights = {name: x for name, x in calls.items() if x.need_weights}
            calls |= {f"{name}, averaged": x.but(average_weights=True) for name, x in with_weights.items()}
        if "bias" in features:
            x = self.draw(g, b, t, s)
            calls["added"] = x.but(bias=torch.randn(x.t, x.s, generator=g))
        fills = self.cache is not None and self.cache.is_filled_by_position
        if {"positions", *ANGLES} & arguments and not fills:
            x = self.draw(g, b, t, s)
            steps = torch.randint(1, 4, (x.b, x.s), generator=g)
            letters = [self.position_letters if "positions" in arguments else "bs"]
            letters += [self.angle_form.letters] if self.angle_form else []
            is_shared = not all("b" in each for each in letters)
            calls["positions"] = self.place(x, (steps[:1] if is_shared else steps).cumsum(1).expand(x.b, -1))
        if GRIDS & arguments:  # two rows
            calls["grid"] = self.draw(g, b, self.prefix + 6)
        for rows, columns in self.images[1:]:
            calls[f"grid ({rows} × {columns})"] = self.draw(g, b, count=rows * columns)
        if "earlier" in arguments and self.cache is None and "cross" not in features:
            x, earlier = self.draw(g, b, t), self.draw(g, b, 3)
            tokens = torch.cat((earlier.query, x.query), 1)
            calls["earlier"] = x.but(key=tokens, value=tokens, offset=3, steps=(3, x.t))
        if self.vectors:
            calls["vectors"] = self.draw_vectors(self.draw(g, b, t, s), g)
        if "scale" in features:
            calls["scale"] = self.draw(g, b, t, s).but(scale=0.3)
        if "softcap" in features:
            calls["softcap"] = self.draw(g, b, t, s).but(softcap=1.5)
        if self.window_right is not None:
            calls["window"] = self.draw(g, b, t).but(window=(2, 2 if self.window_right else None))
            calls |= {"window, causal": calls["window"].but(causal=True)} if is_optional else {}
        if "head mask" in features:
            calls["head mask"] = self.draw(g, b, t, s).but(head_mask=self.head_mask(), need_weights=False)
        if "grouped" in features:
            calls["grouped"] = self.draw(g, b, t, s, key_heads=2)
        return calls

    def head_mask(self) -> Tensor:
        """Return factors of the weights of each head, `[h]`, some of which are 0."""
        return (torch.arange(self.heads) % 3 != 1).to(torch.float32)

    # -- calls -------------------------------------------------------------------------------------

    def call(self, x: Inputs, keys: int | None = None, **options: Any) -> Call:
        """Return the call for these inputs. Arguments are positional where possible.

        Args:
            x: The inputs.
            keys: The number of keys of a mask that is always passed, where there are cached ones too.
            **options: The options of the call.

        Returns:
            The call.
        """
        x = self.put_first(x)
        roles, dtype = self.arguments, x.query.dtype
        groups, default_scale = x.query.shape[1] // x.key.shape[1], x.query.shape[-1] ** -0.5
        rows, columns = divide_grid(x.t - self.prefix)
        module = {"training": False, "layer_idx": 0, "is_causal": False, "sinks": None}
        module |= {"num_key_value_groups": groups, "scaling": default_scale}
        queries = self.to_layout(self.add_extra(x.query))
        values = {
            "query": queries,
            "x": queries,
            "key": self.to_layout(x.key),
            "value": self.to_layout(x.value),
            "earlier": self.to_layout(x.key[:, : x.s - x.t]) if self._takes_earlier(x) else None,
            **self._vectors(x),
            "bias": x.bias,
            "causal": x.causal,
            "average-weights": x.average_weights,
            "weights": x.need_weights,
            "scale": default_scale if x.scale is None and self.is_required("scale") else x.scale,
            "sink": x.sink,
            "softcap": x.softcap,
            "rows": rows,
            "columns": columns,
            "grid": (rows, columns),
            "length": x.t,
            "query-length": x.t,
            "batch": x.b,
            "layer": 0,
            "window": None if x.window is None else x.window[0] + self.window_size,
            "grouped": x.query.shape[1] != x.key.shape[1] or None,
            "module": {"__namespace__": module},
            **self._positions(x),
        }
        if self.kind == "cross":
            values["context"] = self.to_context(x.key)
        if x.head_mask is not None:
            mask = rearrange(x.head_mask, "h", self.head_mask_letters)
            values["head-mask"] = mask.expand(x.b, *mask.shape[1:]).clone() if mask.dim() == 4 else mask
        kwargs = {roles[role]: y for role, y in values.items() if role in roles and y is not None}
        kwargs |= dict.fromkeys(self.copies, values["x"])
        kwargs |= {
            name: form.write(torch.ones(x.b, 1, x.t, keys or x.s, dtype=torch.bool), dtype)
            for name, form in self.filled.items()
        }
        padding = None if x.padding is None else x.padding[:, None, None]
        for feature, keep in (("mask", x.keep), ("padding", padding)):
            if keep is not None:
                name, form = self.mask_form(x.form or feature)
                kwargs[name] = form.write(keep.expand(-1, -1, x.t, -1) if form.is_general else keep, dtype)
        before = self.prepare(x.b)
        required = [arg.name for arg in self.description.call if arg.required and arg.name in self.masks]
        absent: dict[str, Any] = dict.fromkeys(required)
        defaults = {"dropout": 0.0, "return-cache": False, "cache": Kept(-1) if before else None}
        for role in (*defaults, "cached-keys", "cached-values"):
            if self.is_required(role):
                absent[roles[role]] = defaults.get(role)
        kwargs = absent | kwargs
        args = tuple(kwargs.pop(name) for name in takewhile(kwargs.__contains__, self.positional))
        options.setdefault("dtype", dtype if dtype != torch.float32 else None)
        return Call(args=args, kwargs=kwargs, before=before, **options)

    def put_first(self, x: Inputs) -> Inputs:
        """Return x, or for class attention `b·t` sequences: those of x with each of their tokens first."""
        if not self.asks_first:
            return x

        def roll(tensor: Tensor | None) -> Tensor | None:
            """Return a tensor with an entry for each token, `[b, t, …]`, in each order."""
            rolled = [] if tensor is None else [tensor.roll(-i, 1) for i in range(x.t)]
            return torch.stack(rolled, 1).flatten(0, 1) if rolled else None

        keep = None
        if x.keep is not None:  # of each query, by itself
            rows = x.keep.expand(-1, -1, x.t, -1).unbind(2)
            keep = torch.stack([row.roll(-i, -1)[:, :, None] for i, row in enumerate(rows)], 1).flatten(0, 1)
        return x.but(**dict.fromkeys(SEQUENCES, roll(x.query)), padding=roll(x.padding), keep=keep)

    def join_first(self, tensors: list[Tensor], x: Inputs) -> list[Tensor]:
        """Return the outputs `[b, t, e]` and weights `[b, h, t, s]` of sequences with each token first."""
        if not self.asks_first:
            return tensors
        first, *others = tensors
        n, h = x.b * x.t, self.heads
        if first.shape[:-1] in ((n,), (n, 1)):
            first = first.reshape(x.b, x.t, -1)
        weights = [y.reshape(x.b, x.t, h, x.t) for y in others if y.shape in ((n, h, 1, x.t), (n, h, x.t))]
        return [first, *(torch.stack([y[:, i].roll(i, -1) for i in range(x.t)], 2) for y in weights)]

    def join_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a sequence in the oracle's layout."""
        gradient = self.from_layout(gradient)
        if not self.asks_first:
            return gradient
        rolled = gradient.unflatten(0, (-1, gradient.shape[1])).unbind(1)
        return torch.stack([each.roll(i, 1) for i, each in enumerate(rolled)]).sum(0)

    def add_extra(self, queries: Tensor, value: float = EXTRA) -> Tensor:
        """Return queries `[b, t, e]`, followed by the tokens that don't attend, with this value."""
        return torch.nn.functional.pad(queries, (0, 0, 0, self.extra), value=value) if self.extra else queries

    def remove_extra(self, out: Tensor, x: Inputs) -> Tensor:
        """Return outputs without those of tokens that don't attend, which may be left out, too."""
        if not self.extra or out.dim() != 3 or out.shape[1] <= x.t:
            return out
        rest = out[:, x.t :]
        if not torch.equal(rest, torch.full_like(rest, EXTRA)):
            raise UnexpectedOutput(
                f"Expected the tokens after the first {x.t}, which {self.arguments['query-length']} counts, "
                "to be returned as they are"
            )
        return out[:, : x.t]

    def _takes_earlier(self, x: Inputs) -> bool:
        """Return True if the first keys are those of an argument for earlier tokens."""
        return "earlier" in self.arguments and len(x.steps) == 2 and x.s > x.t

    def _vectors(self, x: Inputs) -> dict[str, Tensor | None]:
        """Return the vectors of positions of a call, by role."""
        given = {
            role: (x.key_vectors, self.to_context if self.kind == "cross" else self.to_layout)
            if to == "k"
            else (x.query_vectors, self.to_layout)
            for role, to in self.vectors.items()
        }
        return {role: None if y is None else convert(y) for role, (y, convert) in given.items()}

    def _positions(self, x: Inputs) -> dict[str, Any]:
        """Return the values of a call, by role, that say where its tokens are."""
        values: dict[str, Any] = {"start": 0} if self.is_required("start") else {}
        first = x.s - x.t if x.offset else 0
        if x.positions is not None:
            positions = x.positions[:, first : first + x.t]
            values["start"] = values["positions"] = int(positions[0, 0])
            if self._argument("positions").annotation != "int":
                values["positions"] = rearrange(positions, "bs", self.position_letters).clone()
        if x.angles is not None and self.angle_form is not None:
            angles = self.angle_form.write(x.angles[:, first : first + x.t])
            values |= {"cos": angles.cos().to(x.query.dtype), "sin": angles.sin().to(x.query.dtype)}
            values["cos-sin"] = tuple(values[name] for name in self.angle_order)
            values["angles"] = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        return values

    def _argument(self, role: str) -> Argument:
        """Return the argument with a role, or an optional one if there is none."""
        name = self.arguments.get(role)
        found = (arg for arg in self.description.call if arg.name == name)
        return next(found, Argument("", "keyword", False, None, ""))

    def is_required(self, role: str) -> bool:
        """Return True if calls must pass the argument: without a default, or to turn off the cache."""
        argument = self._argument(role)
        return argument.required or (role == "return-cache" and argument.default is True)

    def mask_form(self, feature: str) -> tuple[str, MaskForm]:
        """Return the name of the argument for a mask or padding, and the form that it takes."""
        return self.forms[feature if feature in self.forms else "keys"]

    def without_masks(self, x: Inputs) -> dict[str, Inputs]:
        """Return x without one of its masks, for each mask, by the name of its argument."""
        calls = {}
        if x.keep is not None:
            calls[self.mask_form(x.form or "mask")[0]] = x.but(keep=None)
        if x.padding is not None:
            calls[self.mask_form(x.form or "padding")[0]] = x.but(padding=None)
        if x.causal and "causal" in self.arguments:
            calls[self.arguments["causal"]] = x.but(causal=False)
        return calls

    @property
    def is_single(self) -> bool:
        """Return True if a call takes one sequence, without an axis of batch entries."""
        return "b" not in self.layouts[1]

    @property
    def layouts(self) -> tuple[str, str]:
        """The layouts of inputs and outputs: the oracle's, and the candidate's."""
        if self.weights is None:
            return "[b, h, t, d]", self.head_layout
        return "[b, t, e]", self.grid or ("[t, b, e]" if self.layout == "sequence" else "[b, t, e]")

    def to_layout(self, x: Tensor) -> Tensor:
        """Convert `[b, t, e]` or `[b, h, t, d]` to the candidate's layout, contiguous."""
        oracle_layout, layout = self.layouts
        if self.grid:
            x = x.unflatten(1, self.grid_sizes(x.shape[1]))
        return rearrange(x, self.grid_layout or oracle_layout, layout).contiguous()

    def to_context(self, x: Tensor) -> Tensor:
        """Convert the tokens of a context `[b, s, e]` to the layout that calls take."""
        if self.context_grid:
            return rearrange(x.unflatten(1, divide_grid(x.shape[1])), "bhwe", self.context_grid).contiguous()
        return x.contiguous() if self.grid and not self.is_single else self.to_layout(x)

    def from_layout(self, x: Tensor) -> Tensor:
        """Convert from the candidate's layout; return x unchanged if it has another number of dimensions."""
        oracle_layout, layout = self.layouts
        if self.context_grid and x.dim() == 4:  # the gradient of a context
            return rearrange(x, self.context_grid, "bhwe").flatten(1, 2)
        if x.dim() != layout.count(",") + 1:
            return x
        x = rearrange(x, layout, self.grid_layout or oracle_layout)
        return x.flatten(1, -2) if self.grid else x

    @property
    def grid_layout(self) -> str:
        """The layout of an image or a video with its tokens' axes before its channels, or ""."""
        return f"[b, {', '.join(self.grid_axes)}, e]" if self.grid else ""

    @property
    def grid_axes(self) -> list[str]:
        """The axes of the tokens of an image or a video."""
        return [axis for axis in self.grid.strip("[]").split(", ") if axis not in "be"]

    def grid_sizes(self, t: int) -> list[int]:
        """Return the sizes of these axes for t tokens."""
        h, w = next((each for each in self.images if math.prod(each) == t), divide_grid(t))
        return [{"h": h, "w": w, "t": t}.get(axis, 1) for axis in self.grid_axes]

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

    def run(self, x: Inputs, strict: bool = True, **options: Any) -> Outputs:
        """Call the candidate, and convert its output."""
        if not (x.need_weights and self.returns_weights_alone):
            return super().run(x, strict, **options)
        outputs = super().run(x.but(need_weights=False), strict, **options)
        weights = self._find_returned_weights(top_tensors(self.answer(x, **options).output), x)
        if weights is None:
            raise UnexpectedOutput("Expected the weights that the call requests, got another tensor")
        return Outputs(outputs.out, weights)

    def read(self, output: Any, x: Inputs, strict: bool = True) -> Outputs:
        """Return the output `[b, t, e]` or `[b, h, t, d]`, and weights `[b, h, t, s]` if there are any."""
        tensors = top_tensors(output)
        if not tensors:
            raise UnexpectedOutput(f"Expected a tensor as output, got {type(output).__name__}")
        first, *others = self.join_first(tensors, x)
        out, h, width = self.remove_extra(self.from_layout(first), x), self.heads, x.value.shape[-1]
        expected = (x.b, h, x.t, width) if self.weights is None else (x.b, x.t, self.weights.out_width)
        if self.kind == "hf" and tuple(out.shape) == (x.b, x.t, h, width):
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
        if self.context_grid:  # weights of rows and columns
            others = [y.flatten(-2) if y.dim() == 5 else y for y in others]
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
            if layout == "b 1 t s" and self.kind == "torch-mha" and "average-weights" in self.arguments:
                continue  # PyTorch's averaged weights have no axis of heads
            shape = tuple(size[letter] for letter in layout.split())
            fitting = [n for n, y in enumerate(tensors) if y.shape == shape and y.is_floating_point()]
            if not fitting:
                continue
            if x.b > 1 and len(fitting) == 1:
                self.weight_place = fitting[0]
            if len({x.b, x.t, x.s}) == 3 and (h == 1 or h not in (x.b, x.t, x.s)):
                self.weight_layouts[x.average_weights] = layout
            tensor = tensors[self.weight_place if self.weight_place in fitting else fitting[0]]
            if "bh" in layout and re.search(r"head\w* ?[*·] ?b(?:atch\w*)?\b", self.text, re.I):
                tensor = tensor.unflatten(0, (h, x.b)).transpose(0, 1)  # as documented
            elif "bh" in layout:
                tensor = tensor.unflatten(0, (x.b, h))
            return rearrange(tensor, layout, "bhts")
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

    def changed_queries(self, before: Inputs, after: Inputs, strict: bool = False) -> Tensor | None:
        """Return which queries' outputs differ between two calls, `[t]`, or None if one isn't accepted."""
        outputs = [self.attempt(x, strict) for x in (before, after)]
        outs = [each.out.nan_to_num() for each in outputs if each is not None]
        if len(outs) < 2 or outs[0].shape != outs[1].shape:
            return None
        return (outs[0] != outs[1]).flatten(0, -3).any(0).any(-1)

    def visible_keys(self, x: Inputs) -> Tensor | None:
        """Return which keys change which queries' outputs, `[t, s]`, or None if a call isn't accepted."""
        columns = [self.changed_queries(x, self.change_key(x, j)) for j in range(x.s)]
        accepted = [column for column in columns if column is not None]
        return torch.stack(accepted, 1) if len(accepted) == x.s else None

    def depends_on_mask(self, x: Inputs, without: Inputs, allowed: float) -> bool:
        """Return True if the right outputs with and without a mask differ."""
        outs = [self.ignore_padding(x, self.exact(y)).out for y in (x, without)]
        return largest_difference(*outs) > 2 * allowed
