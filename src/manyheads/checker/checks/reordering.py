"""Methods that reorder the batch entries of a cache for beam search: all that is cached must move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.checker.candidates.caches import Cache, Functions, Sequence
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.isolation.candidate import REORDER, Call, Kept
from manyheads.checker.isolation.describe import Argument
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Inputs, largest_difference

ORDER = re.compile(
    r"(?:(?:new|beam|batch|sequence)_?)?(?:order|idx|ids?|index|indices|indexes|beams?|rows|perm\w*)"
)
CACHE = re.compile(r"\w*(?:past|cache|state|kv)\w*")
MIXED = "a cached token of one sequence affects both"
SWAP = [1, 0]  # its own inverse: what the order says is a convention


class Reordering(NamedTuple):
    """Calls that reorder the cache, and the parts of what they return that the next step's arguments take."""

    calls: tuple[Call, ...] = ()
    returned: Mapping[str, str] = {}
    wraps: bool = False  # in a tuple with the caches of all layers

    @property
    def takes_cache(self) -> bool:
        """Return True if a call takes the cache as an argument."""
        return any(isinstance(value, Kept) for call in self.calls for value in call.kwargs.values())


def find_wrong_order(
    cache: Cache, lengths: tuple[int, ...], allowed: float
) -> Iterator[tuple[str, str, float | None]]:
    """Yield (method, what is wrong, error) of each method that doesn't reorder all of the cache.

    Without an error, no call of the method is known that works.
    """
    functions = cache.adapter.candidate.functions()
    made = cache.make(1)[-1].function if cache.passed else ""  # the class of the cache
    methods = {
        name: arguments
        for name, arguments in functions.items()
        if REORDER.fullmatch(name.rpartition(".")[2]) and (name[0] == "." or name.partition(".")[0] == made)
    }
    if not methods or cache.has_context or cache.adapter.prepare(1):
        return
    x = cache.draw(50, 2, sum(lengths))
    expected = cache.expect(cache.replace_tokens(x, x.query[SWAP]), x.t - 1, x.t)
    for place, method in dict.fromkeys((name[0] == ".", name.rpartition(".")[2]) for name in methods):
        # Parts of the layer may have a cache each: the order of all of them changes.
        paths = [name for name in methods if (name[0] == ".", name.rpartition(".")[2]) == (place, method)]
        depth = min(path.count(".") for path in paths)
        called = {path: methods[path] for path in paths if path.count(".") == depth}
        outs = [(each, step_after(cache, each, x, lengths)) for each in propose(cache, called, lengths)]
        ran = [(each, out) for each, out in outs if out is not None]
        errors = [largest_difference(out, expected) for _, out in ran]
        if errors and min(errors) <= allowed:
            continue
        if any(is_mixed(cache, each, x, lengths) for each, _ in ran):
            yield method, MIXED, min(errors)
            continue
        before = step_after(cache, Reordering(), x, lengths)
        # A method without the cache among its arguments may be for another one, inside of the layer.
        direct = [out for each, out in outs if not each.wraps and each.takes_cache == cache.is_outside]
        is_unchanged = before is not None and all(
            out is not None and torch.equal(out, before) for out in direct
        )
        # Another method may reorder heads, or tokens.
        if direct and is_unchanged and re.search(r"reorder_\w", method):
            yield method, "the cache is as before", min(errors)
        else:
            yield method, "", None


def propose(cache: Cache, methods: Functions, lengths: tuple[int, ...]) -> Iterator[Reordering]:
    """Yield the ways to call methods of one name, the likely ones first."""
    paths = [*methods]
    calls, _ = cache.calls([Sequence(cache.draw(50, 2, sum(lengths)), lengths)])
    taken = {name: value for name, value in calls[-1].kwargs.items() if isinstance(value, Kept)}
    filled = [fill(methods[path], path, taken) for path in paths]
    if None in filled:
        return
    made = tuple(Call(kwargs=each or {}, function=path) for path, each in zip(paths, filled, strict=True))
    answers = cache.answer((*calls[:-1], *made))
    returns = answers.error is not None or answers.outputs[-1] is not None
    if returns and len(made) == 1 and Reordering(made).takes_cache:
        names = [*taken]
        yield Reordering(
            made, {names[0]: ""} if len(names) == 1 else {n: str(i) for i, n in enumerate(names)}
        )
        if len(names) == 1:  # of a model: a tuple with a cache for each layer
            argument = next(name for name, value in made[0].kwargs.items() if isinstance(value, Kept))
            layers = (
                Call((taken[names[0]], 1), function="itertools:repeat"),
                Call((Kept(-1),), function="builtins:tuple"),
                Call(kwargs=made[0].kwargs | {argument: Kept(-1)}, function=paths[0]),
            )
            yield Reordering(layers, {names[0]: "0"}, wraps=True)
    yield Reordering(made)


def fill(arguments: tuple[Argument, ...], path: str, taken: Mapping[str, Kept]) -> dict[str, Any] | None:
    """Return the arguments of a method that reorders the cache, or None if one of them isn't known."""
    filled: dict[str, Any] = {}
    if path[0] != ".":  # a method of the class of the cache
        if len(taken) != 1:
            return None
        filled["self"] = next(iter(taken.values()))
    for argument in arguments:
        if ORDER.fullmatch(argument.name):
            filled[argument.name] = torch.tensor(SWAP)
        elif argument.name in taken:
            filled[argument.name] = taken[argument.name]
        elif CACHE.fullmatch(argument.name) and len(taken) == 1:
            filled[argument.name] = next(iter(taken.values()))
        elif argument.required:
            return None
    return filled if sum(isinstance(value, Tensor) for value in filled.values()) == 1 else None


def step_after(cache: Cache, reordering: Reordering, x: Inputs, lengths: tuple[int, ...]) -> Tensor | None:
    """Return the output of the last step after the batch entries are swapped, or None if a call fails."""
    tokens = torch.cat((x.query[..., : x.t - 1, :], x.query[SWAP][..., x.t - 1 :, :]), -2)
    calls, steps = cache.calls([Sequence(cache.replace_tokens(x, tokens), lengths)])
    *before, last = [*calls[:-1], *reordering.calls, calls[-1]]
    returned = {name: Kept(len(before) - 1, path) for name, path in reordering.returned.items()}
    last = Call(last.args, last.kwargs | returned)
    try:
        *_, answer = cache.adapter.candidate.call_sequence((*before, last))
        return cache.adapter.read(answer.output, steps[-1][-1], strict=False).out
    except (CodeError, UnexpectedOutput):
        return None


def is_mixed(cache: Cache, reordering: Reordering, x: Inputs, lengths: tuple[int, ...]) -> bool:
    """Return True if a cached token of one batch entry affects the last outputs of both."""
    changed = x.query.clone()
    changed[0, 0] += torch.linspace(-2, 3, changed.shape[-1])
    outs = [step_after(cache, reordering, each, lengths) for each in (x, cache.replace_tokens(x, changed))]
    if outs[0] is None or outs[1] is None:
        return False
    return bool((outs[0] != outs[1]).flatten(1).any(1).all())
