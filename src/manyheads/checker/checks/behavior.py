"""Checks of behavior: modes, strides, state, caches, memory, compilation."""

from __future__ import annotations

import math

import torch

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import answered, run_steps
from manyheads.checker.checks.registry import Check, check, failed, judge, passed, skipped, unchecked
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.oracle import Attention, largest_difference

TOKENS = (256, 512, 1024, 2048)  # at which memory is measured
MEGABYTE = 2**20


@check("training and evaluation", Attention, Encoding)
def check_training(c: Adapter) -> Check:
    """Compare seeds in evaluation, and run in training."""
    x = c.draw(torch.Generator().manual_seed(23), 2, 6, 8)
    first, *others = (c.run(x, seed=seed).out for seed in (1, 2, 3))
    difference = max(largest_difference(first, other) for other in others)
    if difference:
        reason = "in evaluation its output depends on the random seed: dropout is left on."
        return failed(reason, difference, 0.0)
    trained = c.run(x, seed=1, training=True)
    if not bool(trained.out.isfinite().all()):
        return failed("in training its output isn't finite.")
    is_random = largest_difference(trained.out, first) > 0
    reason = "evaluation isn't random" + ", nor is training" * (not is_random)
    if "weights" in c.features:
        y = x.but(need_weights=True)
        kept, dropped = c.run(y, seed=1).weights, c.run(y, seed=1, training=True).weights
        if kept is not None and dropped is not None and largest_difference(kept, dropped) > 1e-5:
            reason += "; in training its weights are those after dropout, as in PyTorch"
    return passed(reason, 0.0, 0.0)


@check("non-contiguous inputs")
def check_strides(c: AttentionAdapter) -> Check:
    """Pass the same numbers with other strides."""
    x = c.draw(torch.Generator().manual_seed(24), 2, 5, 7)
    before, worst = c.run(x).out, 0.0
    for change in (
        lambda y: y.mT.contiguous().mT,
        lambda y: torch.stack((y, y), -1).flatten(-2)[..., ::2],
    ):
        strided = {n: change(getattr(x, n)) for n in ("query", "key", "value")}
        worst = max(worst, largest_difference(c.run(c.replace_sequences(x, **strided)).out, before))
    return judge(worst, c.allowed_error(x), "", "the same numbers with other strides give another output.")


@check("sizes of one", depends_on=("values",))
def check_ones(c: AttentionAdapter) -> Check:
    """Compare at sizes of one."""
    for b, t, s in ((1, 1, 1), (1, 4, 1), (3, 1, 6), (1, 6, 6)):
        x = c.draw(torch.Generator().manual_seed(25), b, t, s)
        error, allowed = largest_difference(c.run(x).out, c.exact(x).out), c.allowed_error(x)
        if not error <= allowed:
            return failed(f"with b = {b}, t = {x.t}, s = {x.s} the output differs.", error, allowed)
    return passed()


@check("state", Attention, Encoding)
def check_state(c: Adapter) -> Check:
    """Compare arguments, parameters and global state before and after calls."""
    changed: dict[str, None] = {}
    for _, x in answered(c, 26):
        for change in c.answer(x).changed:
            name = c.argument_name(change.name) if change.kind == "argument" else change.name
            changed[name if change.kind == "state" else f"the {change.kind} {name} in place"] = None
    if changed:
        return failed(f"a call changed {', '.join(changed)}.")
    return passed("a call changes no argument, seed, default dtype, thread count or grad mode")


@check("cache")
def check_cache(c: AttentionAdapter) -> Check:
    """Compare token by token with one pass."""
    if "past" not in c.features or "x" not in c.arguments:
        return skipped("it takes no cache of earlier keys that a call returns")
    x = c.draw(torch.Generator().manual_seed(27), 2, 6)
    whole = c.run(x).out
    outs, has_cache = run_steps(c, x, [1] * 6)
    if not has_cache:
        return unchecked("a call returns nothing that could be passed on as its cache")
    error, allowed = largest_difference(torch.cat(outs, -2), whole), 4 * c.allowed_error(x)
    differences = [largest_difference(out, whole[..., i : i + 1, :]) for i, out in enumerate(outs)]
    first = next((i for i, difference in enumerate(differences) if difference > allowed), 0)
    failure = f"token by token differs from one pass, from token {first} on."
    return judge(error, allowed, "token by token gives the same as one pass", failure)


@check("memory growth")
def check_memory(c: AttentionAdapter) -> Check:
    """Measure the peak at several lengths."""
    if not isinstance(c.candidate, CandidateProcess):
        return skipped("it runs in this process, where its memory can't be measured separately")
    peaks: dict[int, int] = {}
    for n in TOKENS:
        try:
            peak = c.answer(c.draw(torch.Generator().manual_seed(28), 1, n), memory=True).peak
        except CodeError:
            break
        if peak is None:
            return skipped("this system doesn't report the peak of a call")
        peaks[n] = peak
    lengths = [n for n in peaks if peaks[n] > MEGABYTE]
    if len(lengths) < 2:
        longest = max(peaks, default=0)
        return skipped(f"it takes less than a megabyte at {longest:,} tokens, or accepts no more")
    a, b = lengths[-2:]
    power = math.log(peaks[b] / peaks[a]) / math.log(b / a)
    kind = "linear" if power < 1.4 else "quadratic" if power < 2.5 else "more than quadratic"
    size = f"{peaks[b] / 1e6:.0f} MB at {b:,} tokens"
    return passed(f"{kind}: {size}, growing with the number of tokens to the power of {power:.1f}")


@check("torch.compile", Attention, Encoding, depends_on=("values",))
def check_compile(c: Adapter) -> Check:
    """Compare with the compiled candidate."""
    x = c.draw(torch.Generator().manual_seed(29), 2, 5, 7)
    before = c.run(x).out
    try:
        after = c.run(x, compiled=True).out
    except CodeError as raised:
        return unchecked(f"{raised.reason}.")
    error, allowed = largest_difference(after, before), 2 * c.allowed_error(x)
    return judge(error, allowed, "", "compiled, it gives another output.")
