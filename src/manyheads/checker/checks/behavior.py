"""Checks of behavior: modes, strides, state, caches, memory, compilation."""

from __future__ import annotations

import math

import torch

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import accepted_scenarios, run_steps
from manyheads.checker.checks.registry import Check, check, failed, judge, passed, skipped, unchecked
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.oracle import Attention, largest_difference

LENGTHS = (256, 512, 1024, 2048)  # numbers of tokens at which memory is measured
MEGABYTE = 2**20


@check("training and evaluation", Attention, Encoding)
def check_training(adapter: Adapter) -> Check:
    """Compare the outputs of several seeds in evaluation, and run the candidate in training."""
    inputs = adapter.draw(torch.Generator().manual_seed(23), 2, 6, 8)
    first, *others = (adapter.run(inputs, seed=seed).out for seed in (1, 2, 3))
    difference = max(largest_difference(first, other) for other in others)
    if difference:
        reason = "in evaluation its output depends on the random seed: dropout is left on."
        return failed(reason, difference, 0.0)
    trained = adapter.run(inputs, seed=1, training=True).out
    if not bool(trained.isfinite().all()):
        return failed("in training its output isn't finite.")
    is_random = largest_difference(trained, first) > 0
    reason = "evaluation isn't random" + ", nor is training" * (not is_random)
    if "weights" in adapter.features:
        inputs = inputs.but(need_weights=True)
        kept, dropped = (adapter.run(inputs, seed=1, training=training).weights for training in (False, True))
        if kept is not None and dropped is not None and largest_difference(kept, dropped) > 1e-5:
            reason += "; in training its weights are those after dropout, as in PyTorch"
    return passed(reason, 0.0, 0.0)


@check("non-contiguous inputs")
def check_strides(adapter: AttentionAdapter) -> Check:
    """Pass the same numbers with other strides."""
    inputs = adapter.draw(torch.Generator().manual_seed(24), 2, 5, 7)
    before, worst = adapter.run(inputs).out, 0.0
    for change in (
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    ):
        sequences = {name: change(getattr(inputs, name)) for name in ("query", "key", "value")}
        after = adapter.run(adapter.replace_sequences(inputs, **sequences)).out
        worst = max(worst, largest_difference(after, before))
    failure = "the same numbers with other strides give another output."
    return judge(worst, adapter.allowed_error(inputs), "", failure)


@check("sizes of one", depends_on=("values",))
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
    """Compare arguments, parameters and global state before and after calls."""
    changed: dict[str, None] = {}  # a set in the order of insertion
    for _, inputs in accepted_scenarios(adapter, 26):
        for change in adapter.answer(inputs).changed:
            name = adapter.argument_name(change.name) if change.kind == "argument" else change.name
            changed[name if change.kind == "state" else f"the {change.kind} {name} in place"] = None
    if changed:
        return failed(f"a call changed {', '.join(changed)}.")
    return passed("a call changes no argument, seed, default dtype, thread count or grad mode")


@check("cache")
def check_cache(adapter: AttentionAdapter) -> Check:
    """Compare the outputs token by token with those of one call."""
    if "past" not in adapter.features or "x" not in adapter.arguments:
        return skipped("it takes no cache of earlier keys that a call returns")
    inputs = adapter.draw(torch.Generator().manual_seed(27), 2, 6)
    whole = adapter.run(inputs).out
    outputs, has_cache = run_steps(adapter, inputs, [1] * 6)
    if not has_cache:
        return unchecked("a call returns nothing that could be passed on as its cache")
    allowed = 4 * adapter.allowed_error(inputs)
    errors = [largest_difference(out, whole[..., i : i + 1, :]) for i, out in enumerate(outputs)]
    first = next((i for i, error in enumerate(errors) if error > allowed), 0)
    failure = f"token by token differs from one pass, from token {first} on."
    return judge(max(errors), allowed, "token by token gives the same as one pass", failure)


@check("memory growth")
def check_memory(adapter: AttentionAdapter) -> Check:
    """Measure the peak of a call's memory at several lengths."""
    if not isinstance(adapter.candidate, CandidateProcess):
        return skipped("it runs in this process, where its memory can't be measured separately")
    peaks: dict[int, int] = {}
    for length in LENGTHS:
        try:
            inputs = adapter.draw(torch.Generator().manual_seed(28), 1, length)
            peak = adapter.answer(inputs, memory=True).peak
        except CodeError:
            break
        if peak is None:
            return skipped("this system doesn't report the peak of a call")
        peaks[length] = peak
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
    try:
        after = adapter.run(inputs, compiled=True).out
    except CodeError as raised:
        return unchecked(f"{raised.reason}.")
    error, allowed = largest_difference(after, before), 2 * adapter.allowed_error(inputs)
    return judge(error, allowed, "", "compiled, it gives another output.")
