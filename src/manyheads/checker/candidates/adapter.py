"""The base class of adapters, which build a candidate, call it and compare it with an oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.bugs import CONVENTIONS, Bug, compose
from manyheads.checker.candidates.construct import fill_arguments, show_argument
from manyheads.checker.candidates.documentation import read_documentation
from manyheads.checker.candidates.errors import Unclear, UnexpectedOutput
from manyheads.checker.candidates.roles import Role
from manyheads.checker.isolation.candidate import Answer, Call, Candidate
from manyheads.checker.isolation.describe import Description
from manyheads.checker.isolation.errors import CandidateError, CodeError, ProcessEnded
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.oracle import Inputs, Oracle, Outputs, Weights, exact, largest_difference
from manyheads.checker.parts import Part
from manyheads.shapes import sizes

B, T, S, D = 3, 5, 7, 6  # sizes of test inputs; no two dimensions of an input are equal


@dataclass(frozen=True)
class Options:
    """The kind of a candidate, whether it was guessed, and the user's other options."""

    kind: str
    guessed: bool
    init: Mapping[str, Any]
    weights: Mapping[str, str]
    layout: str | None
    arguments: Mapping[str, str] = field(default_factory=dict)  # roles by argument
    heads: int | None = None
    tried: Mapping[str, str] = field(default_factory=dict)  # roles that trial calls showed, by argument


class Adapter:
    """A candidate and how to call it.

    Args:
        candidate: The code under test.
        options: Its kind, and the user's options.
        same_width: Build it with the same width for queries, keys and values.

    Attributes:
        oracle: The class of oracles to compare the candidate with.
        kind: Its kind.
        notes: The checker's assumptions, for the report.
        features: The supported inputs and outputs, such as "mask" or "weights".
        convention: The steps that the candidate computes in another, equally right way.
        parts: The parts besides attention that explain its outputs.
        plausible: If none do, sets of parts that it may have besides a bug.
        length: The number of tokens of inputs that show all of its parts.
        is_seeded: Whether outputs in evaluation depend on the random seed.
        unknown: What suggests that something else is in it, a sentence, or "".
    """

    oracle: type[Oracle]

    def __init__(
        self, candidate: Candidate | CandidateProcess, options: Options, same_width: bool = False
    ) -> None:
        self.candidate, self.options, self.kind = candidate, options, options.kind
        guess = f"taken as {options.kind} by its name and arguments (--like changes that)"
        self.notes = [guess] if options.guessed else []
        self.init: dict[str, Any] = {}
        self.packings: list[Weights | None] = [None]  # the weights in each order in which they may be packed
        self.features: set[str] = set()
        self.convention: tuple[type[Oracle], ...] = ()
        self.parts: tuple[Part, ...] = ()
        self.plausible: list[tuple[Part, ...]] = [()]
        self.length = T
        self.unknown = ""
        self.with_context: Options | None = None  # for calls with a context, if it may take one
        self.counts_from_start = False  # a causal mask aligns the first query with the first key
        self.is_seeded = False
        self.judged: set[str] = set()  # mask arguments that a compared output depends on
        self.unjudged: dict[str, str] = {}  # why an argument can't be judged
        self.last_error: CandidateError | None = None  # of `attempt`
        self.ended: ProcessEnded | None = None  # the error after which the process can't be called any more
        self.cache_bug: Bug | None = None  # the bug of its cache, if one fits exactly
        self.width_error = ""  # the error with different widths for queries, keys and values
        self.description: Description = self._build(options.init, same_width)
        self.text = read_documentation(self.description)
        self.layout = options.layout or "batch"

    def _build(self, init: Mapping[str, Any], same_width: bool) -> Description:
        description = self.candidate.describe()
        if description.type != "class":
            if init:
                raise Unclear(f"{description.name} is built already. Leave out --init {', '.join(init)}.")
            return description
        self.init = fill_arguments(description, init, same_width, self.options.heads)
        arguments = ", ".join(f"{name}={show_argument(value)}" for name, value in self.init.items())
        try:
            description = self.candidate.build(self.init)
        except CandidateError as error:
            if error.kind != "init":
                advice = "Change --timeout or --memory, or give other arguments with --init."
                raise Unclear(f"building {description.name}({arguments}): {error} {advice}") from None
            built = f"it was built with {arguments or 'no arguments'}. Give others with --init."
            raise Unclear(f"{error.reason}: {built}") from None
        if self.init:
            self.notes.append(f"built as {description.name}({arguments})")
        return description

    # -- defined by subclasses ---------------------------------------------------------------------

    def draw(self, generator: torch.Generator, b: int = B, t: int = T, s: int | None = None) -> Inputs:
        """Return random inputs without masks."""
        raise NotImplementedError

    def scenarios(self, seed: int, s: int = S, t: int = T, b: int = B) -> dict[str, Inputs]:
        """Return an input for each way in which the candidate can be called, by the name of the way."""
        raise NotImplementedError

    def call(self, x: Inputs, **options: Any) -> Call:
        """Return the call for these inputs."""
        raise NotImplementedError

    def read(self, output: Any, x: Inputs, strict: bool = True) -> Outputs:
        """Convert a candidate's output to the oracle's layout.

        Args:
            output: The value that the call returned.
            x: The inputs of the call.
            strict: Check the last width and the shape of returned weights too.

        Returns:
            The output, and the weights if there are any.

        Raises:
            UnexpectedOutput: If the output has another type, shape or dtype than expected.
        """
        raise NotImplementedError

    def allowed_error(self, x: Inputs) -> float:
        """Return the largest error that rounding explains."""
        raise NotImplementedError

    # -- calls -------------------------------------------------------------------------------------

    def answer(self, x: Inputs, **options: Any) -> Answer:
        """Call the candidate."""
        return self.candidate.call(self.call(x, **options))

    def run(self, x: Inputs, strict: bool = True, **options: Any) -> Outputs:
        """Call the candidate, and convert its output."""
        return self.read(self.answer(x, **options).output, x, strict)

    def attempt(self, x: Inputs, strict: bool = False, **options: Any) -> Outputs | None:
        """Run the candidate, or return None if its code raises or its output is unexpected.

        If its process ends, that error is still raised.
        """
        try:
            return self.run(x, strict, **options)
        except UnexpectedOutput:
            return None
        except CodeError as error:
            self.last_error = error
            return None

    def reject_call(self, error: CandidateError, x: Inputs) -> Unclear:
        """Return the error for a candidate whose first call failed; raise errors with another cause."""
        if error.kind != "call" or error.is_exit:
            raise error
        if error.is_unwritten:
            return Unclear(f"{error.reason}. Write it, and check again.")
        unclear = Unclear(
            f"{error.reason}: it was called with {self.show_call(x)}. If it is called otherwise, give its "
            "kind with --like, or the role of an argument with --arg NAME=ROLE."
        )
        unclear.error = error
        return unclear

    def show_call(self, x: Inputs) -> str:
        """Return the arguments of a call as text, tensors by their shapes."""
        call = self.call(x)
        named = dict(zip(self.positional, call.args, strict=False)) | call.kwargs

        def show(value: Any) -> str:
            if isinstance(value, tuple):
                return f"({', '.join(map(show, value))})"
            return sizes(value) if isinstance(value, Tensor) else str(value)

        return ", ".join(f"{name} {show(value)}" for name, value in named.items())

    @property
    def positional(self) -> list[str]:
        """The names of the arguments that are passed by position."""
        return [arg.name for arg in self.description.call if arg.kind == "positional"]

    def argument_name(self, path: str) -> str:
        """Return the name of the argument at a path such as "0" or "mask"."""
        return {str(n): name for n, name in enumerate(self.positional)}.get(path, path)

    @property
    def roles(self) -> list[Role]:
        """What each argument, parameter and setting is taken for."""
        raise NotImplementedError

    # -- comparison with the oracle ----------------------------------------------------------------

    @property
    def conventions(self) -> list[tuple[type[Oracle], ...]]:
        """Return the equally right ways in which the candidate may compute."""
        return CONVENTIONS.get(self.oracle, [()])

    @property
    def weights(self) -> Weights | None:
        """The candidate's parameters as the oracle takes them, None for a function."""
        return self.packings[0]

    @property
    def readings(self) -> list[Weights | None]:
        """The weights in float64, in each order in which they may be packed."""
        return [None if weights is None else weights.to(torch.float64) for weights in self.packings]

    @property
    def right(self) -> type[Oracle]:
        """The oracle with the candidate's parts."""
        return compose(self.oracle, *(part.oracle for part in self.parts))

    def exact(self, x: Inputs) -> Outputs:
        """Return the right outputs, in float64."""
        return exact(self.weights, x, compose(self.right, *self.convention))

    def ignore_padding(self, x: Inputs, outputs: Outputs) -> Outputs:
        """Return the outputs, set to 0 for padded queries if those aren't compared."""
        return outputs

    def compare(self, x: Inputs, got: Outputs, expected: Outputs) -> tuple[float, float, str]:
        """Return (error, allowed error, "output"), or with "weights" if only the weights differ."""
        allowed = self.allowed_error(x)
        got, expected = self.ignore_padding(x, got), self.ignore_padding(x, expected)
        error = largest_difference(got.out, expected.out)
        if expected.weights is not None and got.weights is not None and error <= allowed:
            difference = largest_difference(got.weights, expected.weights)
            rounding = 1e-5 + 40 * torch.finfo(x.query.dtype).eps * (1 + float(x.query.abs().max()) ** 2)
            if difference > rounding:
                return difference, rounding, "weights"
        return error, allowed, "output"

    def is_right(self, x: Inputs, got: Outputs) -> bool:
        """Return True if these outputs of the candidate are right, weights included."""
        error, allowed, _ = self.compare(x, got, self.exact(x))
        return error <= allowed

    def adopt_convention(self, x: Inputs, got: Outputs) -> None:
        """If these outputs are wrong, adopt the convention with which they are right, if there is one."""
