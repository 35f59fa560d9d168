"""Checks of behavior: strides, state, memory, compilation."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from manyheads.checker.bugs import FAMILY
from manyheads.checker.bugs.calls import BUGS
from manyheads.checker.candidates import names
from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.documentation import is_read, lines_about, says_unused
from manyheads.checker.checks.evidence import accepted_scenarios, run_sequence
from manyheads.checker.checks.registry import (
    Check,
    check,
    convention,
    failed,
    judge,
    passed,
    skipped,
    unchecked,
)
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Attention, Inputs, largest_difference

LENGTHS = (256, 512, 1024, 2048)  # numbers of tokens at which memory is measured
SLOW = 2.0  # seconds of a call, after which no longer one is tried
MEGABYTE = 2**20
LONGEST = 600  # tokens of a call that exceeds the length that a candidate is made for


@check("non-contiguous inputs")
def check_strides(adapter: AttentionAdapter) -> Check:
    """Pass the same numbers with other strides."""
    inputs = adapter.draw(torch.Generator().manual_seed(24), 2, 5, 7)
    before, worst, call = adapter.run(inputs).out, 0.0, adapter.call(inputs)
    paths = adapter.sequence_paths(call)
    for change in (lambda x: x.mT.contiguous().mT, lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2]):
        args = tuple(change(x) if str(n) in paths else x for n, x in enumerate(call.args))
        kwargs = {name: change(x) if name in paths else x for name, x in call.kwargs.items()}
        try:
            output = adapter.candidate.call(replace(call, args=args, kwargs=kwargs)).output
        except CodeError as raised:
            return convention(f"a call with other strides raises an error: {raised.reason}.")
        worst = max(worst, largest_difference(adapter.read(output, inputs).out, before))
    failure = "the same numbers with other strides give another output."
    return judge(worst, adapter.allowed_error(inputs), "", failure)


@check("sizes of one", needs_oracle=True, depends_on=("values",))
def check_ones(adapter: AttentionAdapter) -> Check:
    """Compare outputs for a single query, key, token or batch entry."""
    for b, t, s in ((1, 1, 1), (1, 4, 1), (3, 1, 6), (1, 6, 6)):
        inputs = adapter.draw(torch.Generator().manual_seed(25), b, t, s)
        error = largest_difference(adapter.run(inputs).out, adapter.exact(inputs).out)
        if error > (allowed := adapter.allowed_error(inputs)):
            return failed(f"with b = {b}, t = {inputs.t}, s = {inputs.s} the output differs.", error, allowed)
    return passed()


@check("state", Attention, Encoding)
def check_state(adapter: Adapter) -> Check:
    """Look for changes of arguments, parameters and global state, and for outputs that depend on them."""
    changed: dict[str, None] = {}  # a set in the order of insertion
    for _, inputs in chain(accepted_scenarios(adapter, 26), with_masks_of_floats(adapter, 26)):
        answers = [adapter.answer(inputs, seed=1)]
        try:  # with gradients
            cotangent = torch.zeros_like(top_tensors(answers[0].output)[0])
            answers.append(adapter.answer(inputs, seed=2, cotangent=cotangent))
        except CodeError:
            answers.append(adapter.answer(inputs, seed=2))
        for change in answers[0].changed + answers[1].changed:
            name = adapter.argument_name(change.name) if change.kind == "argument" else change.name
            changed[name if change.kind == "state" else f"the {change.kind} {name} in place"] = None
        # Two seeds lead to two states, unless the call sets a seed itself.
        first, second = (answer.generators for answer in answers)
        changed |= {f"the random seed ({name})": None for name in first if first[name] == second[name]}
    buffers = [name for name in changed if name.startswith("the buffer")]
    if others := [name for name in changed if name not in buffers]:
        is_input = any(name.startswith("the argument") for name in others)
        return failed(f"a call changed {', '.join(others)}.", bug=BUGS["input-changed"] if is_input else None)
    if dependence := find_dependence(adapter):
        bug = BUGS["context-kept"] if keeps_context(adapter) else None
        bug = BUGS["mask-kept"] if bug is None and keeps_mask(adapter) else bug
        bug = BUGS["longer-call-kept"] if bug is None and keeps_longer(adapter) else bug
        is_changed = buffers and bug is None and adapter.cache_bug is None
        bug = BUGS["buffer-changed"] if is_changed else bug
        return failed(f"its output depends on earlier calls: {dependence}.", bug=bug)
    reason = "a call changes no argument, seed, default dtype, thread count or grad mode"
    return passed(reason + f"; it changes {', '.join(buffers)}, without effect on outputs" * bool(buffers))


def with_masks_of_floats(adapter: Adapter, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yield the scenarios whose boolean masks can be given as floats, which code may change in place."""
    if not isinstance(adapter, AttentionAdapter):
        return
    forms = adapter.forms
    try:
        adapter.forms = {
            feature: (name, replace(form, type="01") if form.type == "bool" else form)
            for feature, (name, form) in forms.items()
        }
        changed = {feature for feature in forms if forms[feature] != adapter.forms[feature]}
        yield from (each for each in accepted_scenarios(adapter, seed) if each[0] in changed)
    finally:
        adapter.forms = forms


def find_dependence(adapter: Adapter) -> str:
    """Return a description of an output that depends on earlier calls with other values and sizes, or ""."""
    scenarios_used = [name for name, inputs in accepted_scenarios(adapter, 26) if not inputs.need_weights]
    calls, outputs = [], []
    for seed, (b, t) in enumerate(((2, 5), (2, 5), (3, 7), (2, 5), (1, 3)), 32):
        scenarios = adapter.scenarios(seed, t + 2, t, b)
        for name in scenarios_used or ["plain"]:
            with contextlib.suppress(CodeError):  # the candidate may limit the length
                outputs.append(run_sequence(adapter, [adapter.call(scenarios[name])])[0])
                calls.append((name, scenarios[name]))
    try:
        repeated = run_sequence(adapter, [adapter.call(inputs) for _, inputs in calls])
    except CodeError as error:
        return f"after other calls, {error.reason}"
    for (name, inputs), first, later in zip(calls, outputs, repeated, strict=True):
        difference = largest_difference(first, later)
        if difference and not difference <= adapter.allowed_error(inputs):
            sizes = f"b = {inputs.b}, t = {inputs.t}" + f" ({name})" * (name != "plain")
            return f"with {sizes}, after other calls, it isn't that of a new instance"
    return find_dependence_on_one(adapter)


def find_dependence_on_one(adapter: Adapter) -> str:
    """Return a description of an output that depends on one unusual earlier call, or ""."""
    short = adapter.draw(torch.Generator().manual_seed(36), 2, 5)
    earlier = {"in bfloat16": adapter.call(short, dtype=torch.bfloat16)}
    for n in long_lengths(adapter):
        earlier[f"of {n} tokens"] = adapter.call(adapter.draw(torch.Generator().manual_seed(36), 1, n))
    [expected] = run_sequence(adapter, [adapter.call(short)])
    for kind, call in earlier.items():
        with contextlib.suppress(CodeError):  # the candidate may not accept such a call
            later = run_sequence(adapter, [call, adapter.call(short)])[1]
            if not largest_difference(expected, later) <= adapter.allowed_error(short):
                return f"after a call {kind}, it isn't that of a new instance"
    return ""


def long_lengths(adapter: Adapter) -> list[int]:
    """Return numbers of tokens that exceed the length for which a candidate is made."""
    values = {arg.name: arg.default for arg in adapter.description.init or ()}
    values |= {**adapter.description.attributes, **adapter.init}
    sizes = [n for name, n in values.items() if names.constructor_value(name)[1] == names.LENGTH]
    return [n + 1 for n in sizes if type(n) is int and n < LONGEST]


def keeps_longer(adapter: Adapter) -> bool:
    """Return True if a longer call, whatever its values, changes later outputs, and another doesn't."""
    short, other = (adapter.draw(torch.Generator().manual_seed(seed), 2, 5) for seed in (36, 39))

    def after(*calls: Inputs) -> Tensor:
        return run_sequence(adapter, [adapter.call(x) for x in (*calls, short)])[-1]

    for n in long_lengths(adapter):
        long = [adapter.draw(torch.Generator().manual_seed(seed), 1, n) for seed in (36, 39)]
        with contextlib.suppress(CodeError):  # the candidate may not accept such a call
            first, again = after(long[0]), after(*long)
            if (
                torch.equal(first, again)
                and torch.equal(after(other), after())
                and not torch.equal(first, after())
            ):
                return True
    return False


def keeps_context(adapter: Adapter) -> bool:
    """Return True if a second call's output is that of its queries with the first call's context."""
    if "cross" not in adapter.features:
        return False
    first, second = (adapter.draw(torch.Generator().manual_seed(n), 2, 5, 7) for n in (37, 38))
    _, got = run_sequence(adapter, [adapter.call(first), adapter.call(second)])
    [expected] = run_sequence(adapter, [adapter.call(second.but(key=first.key, value=first.value))])
    return torch.equal(got, expected)


def check_context(adapter: AttentionAdapter, name: str) -> Check | None:
    """Return the result for a context, this argument, that has no effect, or only in the first call.

    Each sequence of calls begins in the state of a new instance.
    """
    first, second = (adapter.draw(torch.Generator().manual_seed(n), 2, 5, 7) for n in (37, 38))
    call, other = adapter.call(second), adapter.call(second.but(key=first.key, value=first.value))
    named = dict(zip(adapter.positional, call.args, strict=False)) | call.kwargs
    try:
        [fresh], [changed] = (run_sequence(adapter, [each]) for each in (call, other))
        if not torch.equal(fresh, changed):
            reason = "in a new instance it changes the output, and after a call with another one it doesn't."
            return failed(reason, bug=BUGS["context-kept"]) if keeps_context(adapter) else None
        [without] = run_sequence(adapter, [replace(call, args=(), kwargs={**named, name: None})])
    except CodeError:
        return None
    text, source = adapter.text, adapter.description.source
    is_meant = not says_unused(name, text) and (lines_about(name, text) != "" or is_read(name, source))
    if is_meant and torch.equal(fresh, without):
        return failed("the output with a context is that without one.", bug=FAMILY["context-ignored"])
    return Check(
        "", "not judged", f"a context changes no output. If it isn't used, give --arg {name}=ignore."
    )


def keeps_mask(adapter: Adapter) -> bool:
    """Return True if a second call's output is that of its inputs with the first call's mask."""
    others = adapter.scenarios(38)
    for name, first in accepted_scenarios(adapter, 37):
        second = others[name]
        if (first.keep is None and first.padding is None) or first.query.shape != second.query.shape:
            continue
        mixed = second.but(keep=first.keep, padding=first.padding)
        calls = ([first, second], [mixed], [second])
        got, expected, right = (run_sequence(adapter, [*map(adapter.call, each)])[-1] for each in calls)
        if torch.equal(got, expected) and not torch.equal(got, right):
            return True
    return False


@check("memory growth")
def check_memory(adapter: AttentionAdapter) -> Check:
    """Measure the peak of a call's memory at several lengths."""
    if not isinstance(adapter.candidate, CandidateProcess):
        return skipped("it runs in this process, where its memory can't be measured separately")
    if adapter.asks_first:
        return skipped("only its first token attends")
    peaks: dict[int, int] = {}
    with contextlib.suppress(CodeError):  # the candidate may limit the length
        for length in LENGTHS:
            begun = time.monotonic()
            inputs = adapter.draw(torch.Generator().manual_seed(28), 1, length)
            if (peak := adapter.answer(inputs, memory=True).peak) is None:
                return skipped("this system doesn't report the peak of a call")
            peaks[length] = peak
            # A loop over blocks: a longer call could reach the time limit.
            if time.monotonic() - begun > SLOW:
                break
    lengths = [length for length in peaks if peaks[length] > MEGABYTE]
    if len(lengths) < 2:
        longest = max(peaks, default=0)
        return skipped(f"it takes less than a megabyte at {longest:,} tokens, or accepts no more")
    shorter, longer = lengths[-2:]
    power = math.log(peaks[longer] / peaks[shorter]) / math.log(longer / shorter)
    growth = "linear" if power < 1.4 else "quadratic" if power < 2.5 else "more than quadratic"
    size = f"{peaks[longer] / 1e6:.0f} MB at {longer:,} tokens"
    return passed(f"{growth}: {size}, growing with the number of tokens to the power of {power:.1f}")


@check("torch.compile", Attention, Encoding, depends_on=("values",))
def check_compile(adapter: Adapter) -> Check:
    """Compare the output with that of the compiled candidate."""
    inputs = adapter.draw(torch.Generator().manual_seed(29), 2, 5, 7)
    before = adapter.run(inputs).out
    level = logging.root.manager.disable
    logging.disable(logging.INFO)  # the compiler logs its graphs, which pytest would show
    try:
        after = adapter.run(inputs, compiled=True).out
    except CodeError as raised:
        return unchecked(f"{raised.reason}.")
    finally:
        logging.disable(level)
    error, allowed = largest_difference(after, before), 2 * adapter.allowed_error(inputs)
    return judge(error, allowed, "", "compiled, it gives another output.")
