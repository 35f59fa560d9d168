"""Adapters for candidates that compute positional encodings: sinusoidal tables and rotary encodings."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates import names
from manyheads.checker.candidates.adapter import Adapter, B, Options, S, T
from manyheads.checker.candidates.errors import Unclear, UnexpectedOutput
from manyheads.checker.candidates.forms import HEAD_LAYOUTS, rearrange
from manyheads.checker.candidates.roles import Role, validate_roles
from manyheads.checker.encodings import Encoding, Interleaved, Rotary, Sinusoidal
from manyheads.checker.isolation.candidate import Call, Candidate
from manyheads.checker.isolation.errors import CandidateError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Inputs, Oracle, Outputs, largest_difference
from manyheads.shapes import sizes

SEEDS = range(64)  # of the calls whose outputs are averaged, because dropout may be on
LENGTHS = (1, 7, 33, 2, 9, 21)  # sequence lengths of the scenarios, chosen by their seeds
# The names of arguments that are positions, a length, or vectors.
POSITIONS = (*names.CALL["positions"], "offsets", "indices")
LENGTH_NAMES = (*names.CONSTRUCTOR["the longest text"][1], "n", "L", "t", "size", "num_positions")
VECTORS = ("t", "tensor", *names.CALL["x"], *names.CALL["query"], *names.CALL["key"])


class EncodingAdapter(Adapter):
    """The base class of both adapters. `width` is the width of the table, or of a head."""

    oracle: type[Encoding]

    def __init__(self, candidate: Candidate | CandidateProcess, options: Options) -> None:
        super().__init__(candidate, options, same_width=True)
        values = {**self.description.attributes, **self.init}
        known = (*names.CONSTRUCTOR[names.HEAD_WIDTH][1], *names.CONSTRUCTOR[names.MODEL_WIDTH][1])
        widths = (values[name] for name in known if type(values.get(name)) is int)
        self.width = next(widths, names.WIDTH)
        validate_roles(options.arguments, self.description)
        required = [arg.name for arg in self.description.call if arg.is_named and arg.required]
        # A role that the user gave stands for the name of an argument.
        self.names = {name: options.arguments.get(name, name) for name in required}
        self.required = [*self.names.values()]
        self.find_arguments()

    def reject(self, expected: str, advice: str) -> Unclear:
        """Return the error for a candidate whose arguments have other names."""
        taken = ", ".join(self.required) or "nothing"
        return Unclear(f"Expected {self.description.name} to take {expected}, but it takes {taken}. {advice}")

    def find_arguments(self) -> None:
        """Find the meaning of each argument, and the layout."""
        raise NotImplementedError

    def arguments(self, x: Inputs) -> list[Any]:
        """Return the positional arguments of a call."""
        raise NotImplementedError

    @property
    def roles(self) -> list[Role]:
        """What each argument is taken for."""
        return [
            Role(name, role, f"--arg {name}={role}" if name in self.options.arguments else "its name")
            for name, role in self.names.items()
        ]

    def call(self, x: Inputs, **options: Any) -> Call:
        """Return the call for these inputs."""
        return Call(args=tuple(self.arguments(x)), **options)

    def scenarios(self, seed: int, s: int = S, t: int = T, b: int = B) -> dict[str, Inputs]:
        """Return inputs of one length, which the seed selects."""
        generator = torch.Generator().manual_seed(seed)
        return {"plain": self.draw(generator, b, LENGTHS[seed % len(LENGTHS)])}

    def allowed_error(self, x: Inputs) -> float:
        """Return the largest error that rounding the angles to float32 can cause."""
        return self.oracle.tolerance


class TableAdapter(EncodingAdapter):
    """Adapter for a table of sines and cosines.

    The candidate is a function of a length and a width, of a length, or of positions; or a module that adds
    its table to x.
    """

    oracle = Sinusoidal

    def find_arguments(self) -> None:
        """Find which arguments are the length, the width or x, and whether the table is added to x."""
        self.x_factor = 0.0  # the output is the table plus this factor times x
        is_length = [name in (*LENGTH_NAMES, *POSITIONS) for name in self.required]
        if len(is_length) == 1:
            self.meanings = ["length" if is_length[0] else "x"]
        elif len(is_length) == 2 and not self.description.torch_module and not self.description.parameters:
            self.meanings = ["width", "length"] if is_length == [False, True] else ["length", "width"]
        else:
            expected = "a length and a width, or x, as a positional encoding does"
            raise self.reject(expected, "Give its kind with --like.")
        self.takes_x = "x" in self.meanings
        x = self.draw(torch.Generator().manual_seed(1), 2, 5)
        try:
            if self.takes_x:
                self._find_layout()
                self._find_sum(x.query)
            self.answer(x)
        except CandidateError as error:
            raise self.reject_call(error, x) from None

    def _find_layout(self) -> None:
        """Choose the layout [t, b, e] if it is documented, or if the output varies along axis 0 only."""
        is_documented = re.search(r"\[(t|seq\w*|l|s)\s*,\s*(b|n|batch\w*)\s*,", self.text, re.I)
        zeros = torch.zeros(2, 5, self.width)
        tensors = top_tensors(self.candidate.call(Call(args=(zeros,))).output)
        out = tensors[0] if tensors and tensors[0].dim() == 3 else zeros
        varies = [largest_difference(out.select(axis, 0), out.select(axis, 1)) > 1e-6 for axis in (0, 1)]
        if is_documented or varies == [True, False]:
            self.layout = "sequence"
            self.notes.append("sequence first, [t, b, e]")

    def _find_sum(self, x: Tensor) -> None:
        """Find whether the candidate adds its table to x or to a multiple of x, or returns it alone."""
        output, table = self._mean_output(x), self._mean_output(x * 0)
        if output.shape != x.shape or largest_difference(output, table) <= 1e-6:
            self.notes.append("returns its encoding alone")
            return
        factor = float(((output - table) * x).sum() / (x * x).sum())  # by least squares
        self.x_factor = 1.0 if abs(factor - 1) < 0.02 else factor  # with dropout, it isn't exact
        shown = "" if self.x_factor == 1 else f"{self.x_factor:.4g} · "
        self.notes.append(f"adds its encoding to {shown}x")

    def _mean_output(self, x: Tensor) -> Tensor:
        """Return the output for x `[b, t, e]`, averaged over several seeds because dropout may be on."""
        x = self._to_layout(x)
        outputs = [self.candidate.call(Call(args=(x,), seed=seed)).output for seed in SEEDS]
        tensors = [tensor for output in outputs for tensor in top_tensors(output)[:1]]
        if not tensors or not self._is_table(tensors[0]):
            got = sizes(tensors[0]) if tensors else "no tensor"
            raise Unclear(
                f"Expected an encoding, or x plus an encoding, of shape {sizes(x)}, got {got}. "
                "Give its kind with --like."
            )
        return self._to_layout(torch.stack(tensors).mean(0))

    def _is_table(self, out: Tensor) -> bool:
        """Return True for `[t, e]` and for `[b, t, e]`."""
        return out.dim() in (2, 3) and out.shape[-1] == self.width

    def _to_layout(self, x: Tensor) -> Tensor:
        """Convert `[b, t, e]` to the candidate's layout, or back, which is the same operation."""
        return x.transpose(0, 1).contiguous() if self.layout == "sequence" and x.dim() == 3 else x

    def draw(self, generator: torch.Generator, b: int = B, t: int = T, s: int | None = None) -> Inputs:
        """Return random embeddings."""
        x = torch.randn(b, t, self.width, generator=generator)
        return Inputs(x, x, x)

    def arguments(self, x: Inputs) -> list[Any]:
        """Return the positional arguments: x, or a length or positions, possibly with the width."""
        takes_positions = any(name in POSITIONS for name in self.required)
        length = torch.arange(x.t) if takes_positions else x.t
        values = {"length": length, "width": self.width, "x": self._to_layout(x.query)}
        return [values[meaning] for meaning in self.meanings]

    def read(self, output: Any, x: Inputs, strict: bool = True) -> Outputs:
        """Return the table `[b, t, e]`."""
        tensors = top_tensors(output)
        expected = self._to_layout(x.query) if self.takes_x else x.query[0]
        try:
            out = tensors[0] if self.takes_x else tensors[0].reshape(x.t, self.width)
            if self._is_table(out):
                out = (
                    self._to_layout(out) - self.x_factor * x.query if self.x_factor else self._to_layout(out)
                )
                return Outputs(out.to(torch.float64).expand(x.query.shape))
        except (IndexError, RuntimeError):  # no tensor, or another shape
            pass
        got = sizes(tensors[0]) if tensors else "no tensor"
        raise UnexpectedOutput(f"Expected an encoding {sizes(expected)}, got {got}")


class RotaryAdapter(EncodingAdapter):
    """Adapter for a rotary encoding.

    The candidate is a function or module that takes x, or q and k, and possibly positions, a length, or
    cosines and sines.
    """

    oracle = Rotary

    def find_arguments(self) -> None:
        """Find the meaning of each argument, the layout of heads, and which entries are rotated as pairs.

        Pairs are the entries 2n and 2n + 1, or n and n + d/2. The documentation may say which.
        """
        text = self.text + self.description.name
        text += " ".join(re.findall(r"rotate_\w+", self.description.source))
        patterns: dict[tuple[type[Oracle], ...], str] = {
            (): r"rotate_half|halves|half of|d/2|d / 2",
            (Interleaved,): r"every_two|interleav|neighbo|adjacent|\(0, 1\)",
        }
        documented = [convention for convention, pattern in patterns.items() if re.search(pattern, text)]
        self.documented = documented if len(documented) == 1 else []
        self.convention = self.documented[0] if self.documented else ()
        required = self.required
        self.vectors = [name for name in required if name in VECTORS] or required[:1]
        others = [name for name in required if name not in self.vectors]
        unknown = [name for name in others if name not in (*POSITIONS, *LENGTH_NAMES, "cos", "sin")]
        if unknown or not self.vectors or len({"cos", "sin"} & set(others)) == 1:
            raise self.reject(
                "x, or q and k, and possibly positions, a length, or cos and sin, as a rotary encoding does",
                "Give a role with --arg NAME=ROLE, where ROLE is x, query, key, positions, cos or sin.",
            )
        self._find_head_layout()
        self.notes.append(f"takes {self.head_layout}")

    def _find_head_layout(self) -> None:
        """Choose the layout in which the rotation of a vector depends on the token, but not on the head."""
        vector = torch.randn(self.width, generator=torch.Generator().manual_seed(6))
        vectors = vector.expand(2, 3, 5, -1)
        x = Inputs(vectors, vectors, vectors)
        accepted: dict[str, tuple[bool, bool]] = {}
        for layout in HEAD_LAYOUTS[:3]:
            self.head_layout = layout
            if (got := self.attempt(x)) is not None:
                out = got.out[0]
                heads_agree = float((out - out[:1, :1]).abs().max()) < 1e-5
                tokens_differ = float((out - out[:, :, :1]).abs().max()) > 1e-3
                accepted[layout] = (heads_agree and tokens_differ, heads_agree)
        self.head_layout = max(accepted, key=accepted.__getitem__, default=HEAD_LAYOUTS[0])
        if not accepted and self.last_error is not None:
            raise self.reject_call(self.last_error, x)
        if not accepted:
            raise Unclear(
                f"Expected {self.description.name} to return rotated vectors {sizes(x.query)}. "
                "Give its kind with --like."
            )

    @property
    def conventions(self) -> list[tuple[type[Oracle], ...]]:
        """Return the documented convention for pairs of entries, or both if none is documented."""
        return self.documented or super().conventions

    def draw(self, generator: torch.Generator, b: int = B, t: int = T, s: int | None = None) -> Inputs:
        """Return random queries and keys of three heads."""
        query, key = (torch.randn(b, 3, t, self.width, generator=generator) for _ in range(2))
        return Inputs(query, key, key)

    def arguments(self, x: Inputs, *vectors: Tensor) -> list[Any]:
        """Return the arguments of a call with these vectors, by default with queries and keys."""
        oracle = Rotary()
        oracle.x, oracle.width = x, self.width
        table = oracle.angles().repeat(1, 2).to(torch.float32)
        values: dict[str, Any] = dict.fromkeys(LENGTH_NAMES, x.t) | {"cos": table.cos(), "sin": table.sin()}
        values |= dict.fromkeys(POSITIONS, torch.arange(x.t))
        for name, vector in zip(self.vectors, vectors or (x.query, x.key), strict=False):
            values[name] = rearrange(vector, HEAD_LAYOUTS[0], self.head_layout).contiguous()
        return [values[name] for name in self.required]

    def run(self, x: Inputs, strict: bool = True, **options: Any) -> Outputs:
        """Rotate queries and keys, in two calls if the candidate takes only x."""
        if len(self.vectors) > 1:
            return super().run(x, strict, **options)
        calls = [Call(args=tuple(self.arguments(x, vector)), **options) for vector in (x.query, x.key)]
        outputs = [self.candidate.call(call).output for call in calls]
        return Outputs(torch.cat([self.read_vectors(output, x, 1) for output in outputs]))

    def read(self, output: Any, x: Inputs, strict: bool = True) -> Outputs:
        """Return rotated queries and keys, `[2, b, h, t, d]`."""
        return Outputs(self.read_vectors(output, x, 2))

    def read_vectors(self, output: Any, x: Inputs, count: int) -> Tensor:
        """Return rotated vectors, `[count, b, h, t, d]`."""
        shape = rearrange(x.query, HEAD_LAYOUTS[0], self.head_layout).shape
        tensors = top_tensors(output)[:count]
        if len(tensors) < count or any(tensor.shape != shape for tensor in tensors):
            got = ", ".join(map(sizes, tensors)) or "no tensor"
            raise UnexpectedOutput(f"Expected rotated vectors {self.head_layout} = {list(shape)}, got {got}")
        rotated = [rearrange(tensor, self.head_layout, HEAD_LAYOUTS[0]) for tensor in tensors]
        return torch.stack(rotated).to(torch.float64)

    def adopt_convention(self, x: Inputs, got: Outputs) -> None:
        """Adopt the first convention for pairs that makes these outputs right, if there is one."""
        for convention in self.conventions:
            previous, self.convention = self.convention, convention
            if self.is_right(x, got):
                pairs = "entries 2n and 2n + 1" if convention else "entries n and n + d/2"
                self.notes.append(f"rotates {pairs}")
                return
            self.convention = previous
