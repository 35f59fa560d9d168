"""Caches of earlier keys and values: how a candidate takes, returns or keeps them, found by trial.

A `Cache` turns sequences of tokens that are given in steps into calls, and reads their outputs. The only
reference is the candidate's output without a cache, so that this works for any layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.checker.bugs.caches import BUGS
from manyheads.checker.candidates import names
from manyheads.checker.candidates.adapter import D
from manyheads.checker.candidates.attention import PLACES, SEQUENCES, AttentionAdapter
from manyheads.checker.candidates.construct import has_implementations
from manyheads.checker.candidates.documentation import lines_about, says_mask_replaces
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.candidates.roles import CACHED, CACHES
from manyheads.checker.isolation.candidate import Call, Kept
from manyheads.checker.isolation.describe import Argument
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.isolation.trees import Foreign, iterate_tensors
from manyheads.checker.oracle import Inputs, largest_difference

Functions = Mapping[str, tuple[Argument, ...]]
Make = Callable[[int], tuple[Call, ...]]  # the calls that make a cache for a batch of this size

LENGTH = 32  # tokens for which a cache of a fixed size is made
ATTRIBUTES = Call(("__dict__",), function=".__getattribute__")
TRIAL = (5, 1, 1)  # the lengths of the steps in which each way to use a cache is tried
RESET = re.compile(r"(?:reset|clear|empty|flush|free|forget|drop)(?:_\w*(?:cache|kv|state|past|mem)\w*)?")
SET_UP = re.compile(r"(?:set_?up|init|enable|alloc\w*|make|create|build|new|empty)_\w*(?:cache|kv)\w*")
METHOD = re.compile(rf"{SET_UP.pattern}|(?:reset|clear|empty)_\w*(?:cache|kv|past)\w*")
STORED = re.compile(r"\w*(?:cache\w*_[kv]|[kv]_cache|kv_?cache|cached?_(?:kv|key|value)|past_?[kv])\w*|past")

SIZES = {  # other names of the sizes of a cache, such as `max_seq`
    "the batch": re.compile(r"b|bs|B|(?:\w+_)?(?:batch|bsz|batch_?size|sequences)"),
    "the longest text": re.compile(
        r"capacity|slots|(?:max_?|n_|num_|cache_)(?:\w+_)?(?:seq|len|length|seqlen|tokens|positions|ctx|context|slots|size)"
    ),
}


class Sequence(NamedTuple):
    """Tokens, and the lengths of the steps that use a cache; without lengths, one call without it."""

    inputs: Inputs
    lengths: tuple[int, ...] = ()
    training: bool = False


class Answers(NamedTuple):
    """The outputs of calls, until an error occurred."""

    outputs: list[Any]
    error: CodeError | None = None


class Run(NamedTuple):
    """The outputs of each step of each sequence, until an error occurred."""

    outs: list[list[Tensor]]
    error: CodeError | UnexpectedOutput | None = None


@dataclass(frozen=True)
class Cache:
    """How a cache is used: inside of the candidate, passed from step to step, or made once and passed to all.

    Attributes:
        adapter: The candidate.
        make: The calls that make it, for a batch of some size.
        reset: The call that empties it, if there is any.
        remakes: Whether this call turns it off, so that it is made again for the next sequence.
        passed: The arguments that take it, and of each the number of the call in `make` that returns it.
        returned: The arguments that take it, and of each the part of the output of the step before.
        passes_positions: Whether steps pass their positions.
        shares_positions: Whether these have no axis of batch entries.
        mask_length: The number of keys of the causal mask that steps pass; 0 for the tokens so far, None
            for no mask.
        masks_all: Whether masks of keys have the cached tokens too, and not those of the step alone.
        omits_masks: Whether steps without padding pass no mask of it.
        is_causal: Whether steps are causal although calls without the cache aren't.
    """

    adapter: AttentionAdapter
    make: Make = lambda b: ()
    reset: tuple[Call, ...] = ()
    passed: Mapping[str, int] = field(default_factory=dict)
    returned: Mapping[str, str] = field(default_factory=dict)
    passes_positions: bool = True
    shares_positions: bool = False
    mask_length: int | None = None
    masks_all: bool = True
    omits_masks: bool = False
    is_causal: bool = False
    remakes: bool = False

    @property
    def description(self) -> str:
        """How it is used, for the report."""
        if self.returned:
            parts = (f"output {path} as {name}" for name, path in self.returned.items())
            return f"cache: each call returns it, and the next takes {' and '.join(parts)}"
        if self.passed:
            made = self.make(1)[-1].function.rpartition(":")[2]
            return f"cache: {' and '.join(self.passed)} takes {made}(…), which every step changes"
        begun = self.begin(True, 1)
        calls = "".join(f"{call.function.lstrip('.')}(), " for call in begun)
        return f"cache: inside of it ({calls}{', '.join(self.step_arguments) or 'always in use'})"

    @property
    def is_outside(self) -> bool:
        """Return True if calls pass it: without it or with another, a new sequence begins."""
        return bool(self.passed or self.returned)

    @property
    def step_arguments(self) -> list[str]:
        """The names of arguments that tell steps with a cache from other calls."""
        roles = ("return-cache", "start", "positions") if self.passes_positions else ("return-cache",)
        return [self.adapter.arguments[role] for role in roles if role in self.adapter.arguments]

    @property
    def is_filled_by_position(self) -> bool:
        """Return True if calls with positions fill the candidate: those that skip slots attend to zeros."""
        return not self.is_outside and self.passes_positions and bool(PLACES & set(self.adapter.arguments))

    @property
    def can_restart(self) -> bool:
        """Return True if another sequence can follow."""
        return self.is_outside or bool(self.reset or PLACES & set(self.adapter.arguments))

    @property
    def is_optional(self) -> bool:
        """Return True if calls without the cache are possible."""
        return self.is_outside or bool(self.step_arguments and not self.make(1))

    @property
    def is_requested(self) -> bool:
        """Return True if something asks for the cache; without, what is stored may not be meant for it."""
        return self.is_outside or bool(self.step_arguments or self.make(1) or self.reset)

    def begin(self, first: bool, b: int) -> tuple[Call, ...]:
        """Return the calls before the first step of a sequence."""
        if self.remakes:
            return self.reset + self.make(b)
        return (self.make(b) if first or self.passed else ()) + self.reset

    def pass_on(self, begun: int, last: int | None) -> dict[str, Any]:
        """Return the arguments that pass the cache.

        Args:
            begun: The number of the call after those of `begin`.
            last: The number of the step before, None for the first.

        Returns:
            The arguments by name.
        """
        first = begun - len(self.make(1))
        passed = {name: Kept(first + number) for name, number in self.passed.items()}
        return passed | (
            {} if last is None else {name: Kept(last, path) for name, path in self.returned.items()}
        )

    def has_stored(self, x: Inputs) -> bool:
        """Return True if a step stored something in the candidate or the passed object, or returned it."""
        if self.returned:
            return True
        content = ATTRIBUTES
        if self.passed:
            is_builtin = self.make(1)[0].function.startswith(("builtins:", "torch:"))
            made = Kept(len(self.make(1)) - 1)
            content = Call((made,), function="copy:copy" if is_builtin else "builtins:vars")
        return any(self._has_stored(Sequence(x, lengths), content) for lengths in (TRIAL[:1], (1,)))

    def _has_stored(self, sequence: Sequence, content: Call) -> bool:
        """Return True if these steps change what the call returns, or a buffer."""
        steps, _ = self.calls([sequence])
        try:
            before = self.adapter.candidate.call_sequence((*self.begin(True, sequence.inputs.b), content))
            *_, step, after = self.adapter.candidate.call_sequence((*steps, content))
        except CodeError:
            return False
        has_buffer = any(change.kind == "buffer" for change in step.changed)
        return has_buffer or not equal_trees(before[-1].output, after.output)

    # -- calls -------------------------------------------------------------------------------------

    def calls(self, sequences: list[Sequence]) -> tuple[list[Call], list[tuple[int, int, Inputs]]]:
        """Return the calls, and of each step the numbers of its sequence and its call, and its inputs."""
        calls: list[Call] = []
        steps: list[tuple[int, int, Inputs]] = []
        roles = self.adapter.arguments
        for n, (x, lengths, training) in enumerate(sequences):
            if not lengths:
                steps.append((n, len(calls), x))
                calls.append(self.adapter.call(x, training=training))
                continue
            calls += self.begin(not any(lengths for _, lengths, _ in sequences[:n]), x.b)
            begun, last, start = len(calls), None, 0
            for length in lengths:
                tokens = self._step(x, start, start + length)
                options = self.pass_on(begun, last)
                if "return-cache" in roles:
                    options[roles["return-cache"]] = True
                call = self.adapter.call(tokens, keys=start + length if self.masks_all else None)
                last, start = len(calls), start + length
                steps.append((n, last, tokens))
                named = dict(zip(self.adapter.positional, call.args, strict=False)) | call.kwargs | options
                if self.shares_positions and isinstance(named.get(roles["positions"]), Tensor):
                    named[roles["positions"]] = torch.arange(start - length, start)
                if self.adapter.kind == "cross" and not self.has_context:
                    del named[roles["context"]]  # without it, the layer attends to x itself
                calls.append(Call(kwargs=named))
        return calls, steps

    def _step(self, x: Inputs, start: int, end: int) -> Inputs:
        """Return the inputs of the step that adds tokens."""
        # Slices are copied: code that views them in another shape is judged by another check.
        step, fields = self.replace_tokens(x, x.query[..., start:end, :].contiguous()), dict[str, Any]()
        if self.mask_length is not None:
            keys = torch.arange(self.mask_length or end)
            fields["keep"] = (keys <= torch.arange(start, end)[:, None]).expand(x.b, 1, -1, -1)
        if x.padding is not None:
            padding = x.padding[:, 0 if self.masks_all else start : end]
            fields["padding"] = None if self.omits_masks and bool(padding.all()) else padding
        tokens = self.adapter.place(step.but(**fields), torch.arange(start, end).expand(x.b, -1))
        return tokens if self.passes_positions else tokens.but(positions=None)

    def run(self, *sequences: Sequence) -> Run:
        """Call the candidate for sequences, one after the other, and read the outputs."""
        calls, steps = self.calls([*sequences])
        answers, error = self.answer(tuple(calls))
        outs: list[list[Tensor]] = [[] for _ in sequences]
        for n, number, tokens in steps:
            if number >= len(answers):
                break
            try:
                outs[n].append(self.adapter.read(answers[number], tokens, strict=False).out)
            except UnexpectedOutput as unexpected:
                return Run(outs, unexpected)
        return Run(outs, error)

    def answer(self, calls: tuple[Call, ...]) -> Answers:
        """Return the outputs of a sequence of calls, until one raises an error."""
        if not calls:
            return Answers([])
        try:
            return Answers([answer.output for answer in self.adapter.candidate.call_sequence(calls)])
        except CodeError as error:
            earlier = self.answer(calls[:-1])
            return earlier._replace(error=earlier.error or error)

    @property
    def has_context(self) -> bool:
        """Return True for attention to another sequence, of which each step gets all tokens."""
        call, name = self.adapter.description.call, self.adapter.arguments.get("context")
        return self.adapter.kind == "cross" and any(arg.name == name and arg.required for arg in call)

    def draw(self, seed: int, b: int, t: int) -> Inputs:
        """Return random tokens."""
        x = self.adapter.draw(torch.Generator().manual_seed(seed), b, t)
        is_switch = "causal" in self.adapter.features and not self.adapter.always_causal
        return self.replace_tokens(x.but(causal=True, offset=0) if is_switch else x, x.query)

    def replace_tokens(self, x: Inputs, tokens: Tensor) -> Inputs:
        """Return x with other tokens as queries, keys and values, or with a context, as queries."""
        return x.but(**dict.fromkeys(SEQUENCES[:1] if self.has_context else SEQUENCES, tokens))

    def change(self, x: Inputs, token: int) -> Inputs:
        """Return x with one token changed."""
        changed = x.query.clone()
        changed[..., token, :] += torch.linspace(-2, 3, changed.shape[-1])
        return self.replace_tokens(x, changed)

    def first_output(self, x: Inputs) -> Any:
        """Return the output of the first step of a trial, or None if it raises."""
        calls, _ = self.calls([Sequence(x, TRIAL[:1])])
        outputs, error = self.answer(tuple(calls))
        return outputs[-1] if error is None else None

    def expect(self, x: Inputs, start: int, end: int) -> Tensor:
        """Return the outputs of tokens in a call without a cache for all tokens so far."""
        if self.is_causal and end - start > 1:
            return torch.cat([self.expect(x, i, i + 1) for i in range(start, end)], -2)
        so_far = self.replace_tokens(x, x.query[..., :end, :].contiguous())
        if x.padding is not None:
            so_far = so_far.but(padding=x.padding[:, :end])
        if self.mask_length is not None:
            so_far = so_far.but(keep=torch.ones(end, end).tril().bool().expand(x.b, 1, -1, -1))
        try:
            return self.adapter.run(so_far, strict=False).out[..., start:end, :]
        except CodeError as error:  # a limit on the tokens of a call: steps of one token are right then
            single = self.run(Sequence(so_far, (1,) * end))
            if not error.is_refusal or single.error is not None:
                raise
            return torch.cat(single.outs[0], -2)[..., start:end, :]

    def errors(self, sequence: Sequence, outs: list[Tensor]) -> list[float]:
        """Return the largest difference of each token from a call without a cache."""
        errors: list[float] = []
        plain = replace(self, mask_length=None, is_causal=False)
        for out in outs:
            start = len(errors)
            expected = (self if sequence.lengths else plain).expect(
                sequence.inputs, start, start + out.shape[-2]
            )
            errors += (largest_difference(out[..., i, :], expected[..., i, :]) for i in range(out.shape[-2]))
        return errors


def read_attributes(adapter: AttentionAdapter) -> dict[str, Any]:
    """Return the candidate's attributes as trees."""
    if adapter.description.type == "function":
        return {}
    attributes = adapter.candidate.call(ATTRIBUTES).output
    return attributes if isinstance(attributes, dict) else {}


def equal_trees(a: Any, b: Any) -> bool:
    """Return True if two trees have the same tensors and plain values."""
    x, y = (dict(iterate_tensors(tree)) for tree in (a, b))
    is_equal = x.keys() == y.keys() and all(largest_difference(x[path], y[path]) == 0 for path in x)
    return is_equal and repr(a) == repr(b)


# -- search ----------------------------------------------------------------------------------------


def prepare_calls(adapter: AttentionAdapter) -> None:
    """Find the calls before each call: they make a required cache, or reset one that is always in use."""
    roles, x = adapter.arguments, Cache(adapter).draw(26, 2, 4)
    functions = adapter.candidate.functions()
    set_ups = find_set_ups(adapter, functions)
    if set_ups and adapter.attempt(x) is None:  # something is missing until a method sets it up
        for make in (made_by(adapter, name, functions[name]) for name in set_ups):
            adapter.prepare = make
            if adapter.attempt(x) is not None:
                adapter.notes.append(f"{make(1)[0].function[1:]}() is called before each call")
                return
        adapter.prepare = lambda b: ()
    if any(arg.required and arg.name == roles.get("cache") for arg in adapter.description.call):
        makes = [adapter.prepare, *(each.make for each, _ in passed_caches(adapter, functions))]
        for make in makes:
            adapter.prepare = make
            if adapter.attempt(x) is not None:
                return
        adapter.prepare = makes[0]
    elif not {*CACHES, *PLACES} & set(roles):
        reset = find_reset(adapter, functions)
        sequences = ((*reset, *calls) for calls in ([adapter.call(x)], [adapter.call(x)] * 2))
        once, twice = (Cache(adapter).answer(calls) for calls in sequences)
        if once.error is not None or (twice.error is None and equal_trees(*twice.outputs[-2:])):
            return
        if reset:
            adapter.prepare = lambda b: reset
            adapter.notes.append(f"{reset[0].function[1:]}() is called before each call")
        elif has_storage(adapter):
            adapter.cache_bug = BUGS["cache-unasked"]


def has_storage(adapter: AttentionAdapter) -> bool:
    """Return True if the names of attributes or buffers are those of a cache of keys."""
    assigned = re.findall(r"\bself\.(\w+)", adapter.description.source)
    stored = (*read_attributes(adapter), *adapter.description.buffers, *assigned)
    return any(map(STORED.fullmatch, stored))


def find_cache(adapter: AttentionAdapter) -> None:
    """Find how the candidate's cache is used, or why that isn't known."""
    taken = [adapter.arguments[role] for role in CACHES if role in adapter.arguments]
    functions = adapter.candidate.functions()
    methods = [name for name in functions if METHOD.fullmatch(name.rpartition(".")[2])]
    if adapter.weights is not None and len(set(adapter.widths)) > 1 and not Cache(adapter).has_context:
        return
    x = Cache(adapter).draw(27, 2, sum(TRIAL))
    stores = "start" in adapter.arguments and Cache(adapter).has_stored(x)
    if not (taken or stores or has_storage(adapter) or methods or adapter.prepare(1)):
        return
    best, best_rank = None, (3, 0.0)
    for cache in (cache for each in propose(adapter, functions, x) for cache in vary(each)):
        rank = try_cache(cache, x)
        # A step without its position is only expected to be right if it is right.
        if rank < best_rank and (rank[0] == 0 or cache.passes_positions):
            best, best_rank = cache, rank
        if rank[0] == 0:
            break
    adapter.cache = best
    if best is not None:
        adapter.notes.append(best.description)
    elif taken or methods:
        subject = f"its argument {taken[0]} takes" if taken else "its methods for a cache do"
        adapter.cache_problem = f"it isn't known what {subject}"
    elif stores:
        name = adapter.arguments["start"]
        adapter.cache_problem = f"it stores something, and no trial call with {name} shows what it does"


def try_cache(cache: Cache, x: Inputs) -> tuple[int, float]:
    """Return (0, error) if the outputs are right, (1, …) if they depend on it, (2, …) if it is filled."""
    sequence, run = Sequence(x, TRIAL), cache.run(Sequence(x, TRIAL))
    if not run.outs[0] and isinstance(run.error, CodeError) and run.error.is_refusal:
        sequence = Sequence(x, (1,) * x.t)  # perhaps each step takes one token
        run = cache.run(sequence)
    [outs] = run.outs
    if not outs:
        return 3, 0.0
    error = max(cache.errors(sequence, outs))
    if run.error is None:
        if error <= 4 * cache.adapter.allowed_error(x):
            return 0, error
        if depends_on(cache, x, sequence.lengths, 0, outs):
            return 1, error
    return (2 if cache.is_requested and cache.has_stored(x) else 3), error


def depends_on(cache: Cache, x: Inputs, lengths: tuple[int, ...], token: int, outs: list[Tensor]) -> bool:
    """Return True if a change of a token changes the last output."""
    run = cache.run(Sequence(cache.change(x, token), lengths))
    [after] = run.outs
    return len(after) == len(outs) and not torch.equal(after[-1][..., -1, :], outs[-1][..., -1, :])


def vary(cache: Cache) -> Iterator[Cache]:
    """Yield the cache with and without positions and a causal mask in each step, and as causal by itself."""
    adapter = cache.adapter
    replaces = has_implementations(adapter.description) or says_mask_replaces(adapter.text)
    masks: list[tuple[int | None, bool]] = [(None, False)]
    if "causal" not in adapter.features or replaces:
        stored = [shape for name, shape in adapter.description.buffers.items() if STORED.search(name)]
        lengths = dict.fromkeys((0, LENGTH, *map(max, stored))) if "mask" in adapter.features else ()
        given: list[tuple[int | None, bool]] = [(length, False) for length in lengths]
        # Where a mask replaces the causal mask, steps of several tokens need one.
        masks = given + masks if replaces else [*masks, (None, True), *given]
    forms = [(True, False), (True, True)] if "positions" in adapter.arguments else [(True, False)]
    forms += [(False, False)] if PLACES & set(adapter.arguments) else []
    fills = (True, False) if adapter.filled else (True,)
    for (passes, shares), (mask_length, is_causal), masks_all in product(forms, masks, fills):
        varied = replace(cache, mask_length=mask_length, is_causal=is_causal, masks_all=masks_all)
        yield replace(varied, passes_positions=passes, shares_positions=shares)


def propose(adapter: AttentionAdapter, functions: Functions, x: Inputs) -> Iterator[Cache]:
    """Yield the ways in which a cache may be used, the likely ones first."""
    taken = [adapter.arguments[role] for role in CACHED if role in adapter.arguments]
    if not taken:
        yield from inner_caches(adapter, functions)
    passed = [*passed_caches(adapter, functions)]
    yield from (cache for cache, is_documented in passed if is_documented)
    yield from returned_caches(adapter, x)
    yield from (cache for cache, is_documented in passed if not is_documented)
    if taken and PLACES & set(adapter.arguments):
        yield from filled_caches(adapter, taken)


def passed_caches(adapter: AttentionAdapter, functions: Functions) -> Iterator[tuple[Cache, bool]]:
    """Yield objects that the argument for a cache may take, and whether documentation names their class."""
    if (name := adapter.arguments.get("cache")) is None:
        return
    argument = next(arg for arg in adapter.description.call if arg.name == name)
    text = f"{argument.annotation} {argument.default} {lines_about(name, adapter.text)}"
    source = adapter.description.source
    for cls in (each for each in functions if "." not in each):
        is_documented = re.search(rf"\b{cls}\b", text) is not None
        may_be = is_documented or re.search("cache|kv", cls, re.I)
        if may_be and fill(adapter, functions[cls], 1) is not None:
            yield Cache(adapter, made_by(adapter, cls, functions[cls]), passed={name: 0}), is_documented
    makes = [made_by(adapter, path, functions[path]) for path in find_set_ups(adapter, functions)]
    if f"{name}.update(" in source or name.startswith("past_key_value") or re.search(r"\bCache\b", text):
        makes += [calls_of("transformers:DynamicCache"), make_static]
    keys = re.findall(rf"\b{name}\[['\"](\w+)['\"]\]", source)
    makes += [calls_of("builtins:dict"), calls_of("builtins:dict", **dict.fromkeys(keys))]
    makes += [calls_of("builtins:list", []), calls_of("builtins:list", [None, None])]
    yield from ((Cache(adapter, make, passed={name: len(make(1)) - 1}), False) for make in makes)


def make_static(b: int) -> tuple[Call, ...]:
    """Return the calls that make a cache of transformers with a fixed length."""
    config = Call(kwargs={"num_hidden_layers": 1}, function="transformers:LlamaConfig")
    cache = {"config": Kept(-1), "max_cache_len": LENGTH}
    return config, Call(kwargs=cache, function="transformers:StaticCache")


def calls_of(function: str, *args: Any, **kwargs: Any) -> Make:
    """Return a function that returns one call, for any batch size."""
    return lambda b: (Call(args, kwargs, function=function),)


def assign(name: str, make: Make) -> Make:
    """Return a function that returns the calls that make an object, and set it as an attribute."""
    return lambda b: (*make(b), Call((name, Kept(-1)), function=".__setattr__"))


def made_by(adapter: AttentionAdapter, function: str, arguments: tuple[Argument, ...]) -> Make:
    """Return a function that returns the call of a class or a method, with the sizes of a cache."""
    return lambda b: (Call(kwargs=fill(adapter, arguments, b) or {}, function=function),)


def cache_sizes(adapter: AttentionAdapter) -> tuple[int, int]:
    """Return the number and the width of the key heads."""
    weights = adapter.weights
    return (adapter.heads, D) if weights is None else (weights.key_heads, weights.head_size)


def fill(adapter: AttentionAdapter, arguments: tuple[Argument, ...], b: int) -> dict[str, Any] | None:
    """Return the required arguments of a cache for b sequences, or None if one of them isn't known.

    Those that aren't sizes of a cache have the values that the candidate itself was built with.
    """
    heads, head_size = cache_sizes(adapter)
    sizes = {
        "the batch": b,
        "the longest text": LENGTH,
        "the number of heads": heads,
        "the number of key heads": heads,
        "the width of a head": head_size,
        "the model width": heads * head_size,
    }
    filled: dict[str, Any] = {}
    for argument in (each for each in arguments if each.required):
        meaning, _ = names.constructor_value(argument.name)
        meaning = meaning or next((each for each, name in SIZES.items() if name.fullmatch(argument.name)), "")
        others = {"dtype": torch.float32, "device": "cpu", "num_layers": 1, "n_layers": 1}
        filled[argument.name] = sizes.get(meaning, others.get(argument.name))
        if filled[argument.name] is None:
            filled[argument.name] = find_setting(adapter, argument.name)
    return None if None in filled.values() else filled


def find_setting(adapter: AttentionAdapter, name: str) -> Any:
    """Return the candidate's setting of this name, also if both are other names of a window; None without."""
    description = adapter.description
    settings = {arg.name: arg.default for arg in description.init or ()} | adapter.init
    settings |= {path.rpartition(".")[2]: value for path, value in description.settings.items()}
    settings |= description.attributes
    windows = [key for key in settings if names.WINDOW.fullmatch(key)] if names.WINDOW.fullmatch(name) else []
    values = (settings.get(key) for key in (name, *windows))
    return next((value for value in values if value is not None), None)


def filled_caches(adapter: AttentionAdapter, arguments: list[str]) -> Iterator[Cache]:
    """Yield tensors of zeros, which steps fill from their position on."""
    heads, width = cache_sizes(adapter)
    for sequence_first in (True, False):

        def make(b: int, sequence_first: bool = sequence_first) -> tuple[Call, ...]:
            shape = [b, LENGTH, heads, width] if sequence_first else [b, heads, LENGTH, width]
            shape = shape if len(arguments) > 1 else [2, *shape]
            return (Call((shape,), function="torch:zeros"),) * len(arguments)

        yield Cache(adapter, make, passed={name: n for n, name in enumerate(arguments)})


def returned_caches(adapter: AttentionAdapter, x: Inputs) -> Iterator[Cache]:
    """Yield the parts of a first step's output that may be a cache."""
    names_of = [adapter.arguments[role] for role in CACHED if role in adapter.arguments]
    output = Cache(adapter).first_output(x) if names_of else None
    output = dict(enumerate(output)) if isinstance(output, tuple | list) else output
    parts = {str(key): part for key, part in output.items()} if isinstance(output, dict) else {}
    found = [path for path in list(parts)[1:] if is_cache(parts[path])]
    if not isinstance(parts.get("0"), Tensor):  # the output may be the second part, after the cache
        found = [
            path for path in found if getattr(parts[path], "shape", None) != x.query[:, : TRIAL[0]].shape
        ]
    found.sort(key=lambda path: isinstance(parts[path], Tensor))
    if "cache" in adapter.arguments and len(names_of) == 1:
        yield from (Cache(adapter, returned={names_of[0]: path}) for path in found)
    elif names_of:
        pairs = [(f"{path}.0", f"{path}.1") for path in found if not isinstance(parts[path], Tensor)]
        for pair in [*pairs, tuple(found[:2])]:
            yield Cache(adapter, returned=dict(zip(names_of, pair, strict=False)))


def is_cache(part: Any) -> bool:
    """Return True if a part of a step's output may be a cache: it has no axis of queries."""
    tensors = [tensor for _, tensor in iterate_tensors(part)]
    if isinstance(part, Tensor):
        return list(part.shape).count(TRIAL[0]) == 1
    return isinstance(part, Foreign) or any(list(x.shape).count(TRIAL[0]) < 2 for x in tensors)


def inner_caches(adapter: AttentionAdapter, functions: Functions) -> Iterator[Cache]:
    """Yield caches inside of the candidate: with each method or attribute that may turn it on."""
    fillable = {name: each for name, each in functions.items() if fill(adapter, each, 1) is not None}
    set_ups = find_set_ups(adapter, functions)
    makes: list[Make] = [lambda b: (), *(made_by(adapter, name, fillable[name]) for name in set_ups)]
    named = {name: value for name, value in read_attributes(adapter).items() if "cache" in name}
    makes += [calls_of(".__setattr__", name, True) for name, value in named.items() if value is False]
    for name in (name for name, value in named.items() if value is None):
        for cls in (cls for cls in fillable if re.fullmatch(r"\w*(?:cache|kv)\w*", cls, re.I)):
            makes.append(assign(name, made_by(adapter, cls, fillable[cls])))
    reset = find_reset(adapter, functions)
    yield from (Cache(adapter, make, reset) for make in makes)
    if reset:
        yield from (Cache(adapter, make, reset, remakes=True) for make in makes[1:])


def find_set_ups(adapter: AttentionAdapter, functions: Functions) -> list[str]:
    """Return the methods that set up a cache, or return a new one, and whose arguments are known."""
    named = [name for name in functions if SET_UP.fullmatch(name.rpartition(".")[2])]
    return [name for name in named if name[0] == "." and fill(adapter, functions[name], 1) is not None]


def find_reset(adapter: AttentionAdapter, functions: Functions) -> tuple[Call, ...]:
    """Return the call of the method that empties the cache, if there is one."""
    methods = {name: fill(adapter, each, 1) for name, each in functions.items() if name.startswith(".")}
    resets = [name for name in methods if RESET.fullmatch(name.rpartition(".")[2]) and methods[name] == {}]
    first = min(resets, key=lambda name: name.count("."), default=None)
    return () if first is None else (Call(function=first),)
