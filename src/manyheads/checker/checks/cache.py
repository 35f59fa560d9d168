"""The check of caches: steps must give the outputs of one call without a cache for all tokens so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.checker.bugs import Bug
from manyheads.checker.bugs.caches import BUGS
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.caches import Cache, Run, Sequence
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.candidates.roles import CACHED
from manyheads.checker.checks.evidence import LONGEST_WINDOW
from manyheads.checker.checks.registry import Check, check, failed, passed, skipped
from manyheads.checker.checks.reordering import MIXED, find_wrong_order
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Inputs, largest_difference
from manyheads.checker.parts import Bias, RotaryPositions, Window

LONG_PREFILL = "a prefill longer than the window, then one token at a time"
SINGLE = re.compile(  # a step is one token, as in "takes only one token"
    r"(?<!not )\b(?:only|exactly|just|must|takes|expects|x is|(?:each|a|every) (?:call|step))\b[^.;]{0,40}"
    r"\b(?:one|single|1)[- ](?:new )?token\b",
    re.I,
)
REFUSED = "refused"  # in place of a bug's name
ADAPTER = """Check an adapter that makes and returns it:
class Adapter({name}):
    def forward(self, {x}, cache=None):
        cache = MyCache() if cache is None else cache
        return super().forward({x}, {argument}=cache), cache"""


@check("cache")
def check_cache(adapter: AttentionAdapter) -> Check:
    """Compare steps that use a cache with calls without a cache."""
    cache = adapter.cache
    if adapter.cache_problem:
        argument, x = (adapter.arguments.get(role, name) for role, name in (("cache", "cache"), ("x", "x")))
        text = ADAPTER.format(name=adapter.description.name, x=x, argument=argument)
        return Check("", "not judged", f"{adapter.cache_problem}. {text}")
    if adapter.cache_bug is not None:
        return failed("every call uses it, and nothing empties it.", bug=adapter.cache_bug)
    if cache is None:
        return skipped("it takes no cache of the keys of its own sequence")
    if (refusal := find_refusal(cache)) is not None:
        argument = next((adapter.arguments[role] for role in CACHED if role in adapter.arguments), "")
        reason = f"as it was built, it refuses steps after the first: {refusal}. If another setting of its "
        reason += "constructor allows them, give it with --init."
        if argument:
            reason += f" If none does, give --arg {argument}=ignore."
        return Check("", "not judged", reason)
    allowed, notes, worst = 4 * adapter.allowed_error(cache.draw(41, 2, 6)), [], 0.0
    steps: tuple[int, ...] = (4, 1)
    for trial, lengths in step_lengths(adapter).items():
        sequence = Sequence(cache.draw(41, 2, sum(lengths)), lengths)
        run = cache.run(sequence)
        errors = cache.errors(sequence, run.outs[0])
        wrong = next((i for i, error in enumerate(errors) if not error <= allowed), None)
        if wrong is None and run.error is not None:
            # Cached slots may be too few for a long prefill.
            if not (isinstance(run.error, CodeError) and run.error.is_refusal) and trial != LONG_PREFILL:
                step = f"the step after a cache of {len(errors)} tokens"
                bug = BUGS["chunk-raises"] if errors and lengths[len(run.outs[0])] > 1 else None
                return failed(f"{trial}: {step} raised an error: {str(run.error).rstrip('.')}.", bug=bug)
            notes.append(f"{trial} is refused")
            steps = steps if errors else (1,) * 5
        elif wrong is not None and max(lengths[1:]) > 1 and SINGLE.search(adapter.text):
            notes.append(f"{trial} differs, but its documentation says that a step is one token")
            continue
        elif wrong is not None:
            reason, bug = explain_step(cache, sequence, wrong, allowed)
            # The parts that encode positions may have a bug that explains more.
            adapter.cache_bug = None if bug == BUGS["order-lost-in-steps"] else bug
            return failed(f"{trial}: {reason}.", max(errors), allowed, bug)
        worst = max([worst, *errors])
    if (difference := compare_padded(cache, steps)) > allowed:
        reason = "with padding before the first token of a sequence, steps differ from one call."
        return failed(reason, difference, allowed, BUGS["padding-in-steps"])
    for reason, name, error in compare_sequences(cache, steps, allowed):
        if name == REFUSED:
            notes.append(reason)
            continue
        adapter.cache_bug = BUGS.get(name)
        return failed(f"{reason}.", error, allowed, adapter.cache_bug)
    for method, problem, error in find_wrong_order(cache, steps, allowed):
        if error is None:
            notes.append(f"{method} isn't checked: no call of it is known that works")
            continue
        bug = BUGS["cache-reordered-in-part"] if problem == MIXED else None
        return failed(f"after {method} with the order [1, 0], {problem}.", error, allowed, bug)
    if not cache.can_restart:
        notes.append("no method resets it, so one sequence was checked")
    return passed("; ".join(("steps give the same as one call", *notes)), worst, allowed)


def find_refusal(cache: Cache) -> str | None:
    """Return why the candidate's own code raises an error in every step after the first, or None."""
    reason = None
    for lengths in ((4, 1), (1, 1), (4, 3)):
        run = cache.run(Sequence(cache.draw(41, 2, sum(lengths)), lengths))
        if not isinstance(run.error, CodeError) or not run.error.is_refusal or len(run.outs[0]) > 1:
            return None
        reason = run.error.reason if run.outs[0] else reason
    return reason


def step_lengths(adapter: AttentionAdapter) -> dict[str, tuple[int, ...]]:
    """Return the lengths of steps by the name of the trial, which go on for longer than a window."""
    window = max((size for size in adapter.window_sizes() if size <= LONGEST_WINDOW), default=0)
    # Not a multiple of the window: rolling slots wouldn't begin with the first of the kept tokens.
    long_prefill = {LONG_PREFILL: (window + 1 + window // 2, 1, 1)} if window > 1 else {}
    return {
        "one token at a time": (1,) * 6,
        "a prefill, then one token at a time": (4, *(1,) * max(2, window)),
        "several tokens at once": (4, max(3, window), 2),
        **long_prefill,
    }


# -- one sequence ----------------------------------------------------------------------------------


def explain_step(cache: Cache, sequence: Sequence, wrong: int, allowed: float) -> tuple[str, Bug | None]:
    """Return why a token's output is wrong, and the bug if one fits exactly."""
    start, lengths = 0, []
    for length in sequence.lengths:
        lengths.append(length)
        if start + length > wrong:
            break
        start += length
    end = start + lengths[-1]
    x = cache.replace_tokens(sequence.inputs, sequence.inputs.query[..., :end, :].contiguous())
    cached = affected(cache, x, lambda inputs: last_rows(cache.run(Sequence(inputs, tuple(lengths))), start))
    plain = affected(cache, x, lambda inputs: cache.expect(inputs, start, end))
    step = f"token {start}" if lengths[-1] == 1 else f"tokens {start} to {end - 1}"
    after = f"{step} after a cache of {start}"
    if not start:
        return f"the first step differs from a call without a cache, from token {wrong} on", None
    if torch.equal(cached_effects(cache, (4, 3)), torch.ones(4, 3).triu().bool()):
        return f"{after}: the causal mask counts from the first key", BUGS["first-key-only"]
    if bool((cached & ~plain)[start:].any()):
        bug = None if bool((plain & ~cached).any()) else BUGS["chunk-not-causal"]
        others = "" if bug else ", and not to all earlier ones"
        return f"{after}: each attends to later tokens of its chunk{others}", bug
    missing = (plain & ~cached)[:start, -1]
    if bool(missing.all()):
        reason = f"{after}: the cached tokens have no effect"
        if longer := kept_tokens(cache, (4, 3)):
            numbers = ", ".join(map(str, longer))
            return f"{reason}, but on the first token of three after four, {numbers} have", None
        return reason, BUGS["cache-ignored"]
    if bool(missing.any()):
        kept = missing.logical_not().nonzero().flatten().tolist()
        is_last = kept == list(range(start - lengths[-2], start))
        if is_last and all(kept_tokens(cache, (2, n, 1)) == [*range(2, 2 + n)] for n in (1, 3)):
            return f"{after}: only the step before has an effect", BUGS["cache-overwritten"]
    missing = (plain & ~cached)[:, -1]
    if bool(missing.any()):
        for size in cache.adapter.window_sizes():  # tokens of the earlier round of a rolling cache
            steps = (*sequence.lengths[:1], *(1,) * size)
            if start == size and kept_tokens(cache, steps) == [*range(size, sum(steps) - 1)]:
                return f"{after}: cached tokens of its window have no effect", BUGS["window-slots-hidden"]
        tokens = ", ".join(map(str, missing.nonzero().flatten().tolist()))
        return f"{after}: token {tokens} has no effect", None
    windows = [part for part in cache.adapter.parts if isinstance(part, Window)]
    is_chunk_right = is_right(cache, (4, 3), allowed)
    if windows and lengths[-1] == 1 and is_chunk_right and bool((cached & ~plain)[:start].any()):
        return f"{after}: it attends to tokens outside of its window", BUGS["window-lost-in-steps"]
    oldest = [
        torch.arange(end)[:, None] < n for n in range(1, start + 1)
    ]  # which are cut off, or overwritten
    is_trimmed = any(torch.equal(plain & ~is_cut, cached) for is_cut in oldest)
    if windows and is_trimmed and not torch.equal(plain, cached):
        reason = f"{after}: its first tokens don't attend to all cached tokens of their windows"
        return reason, BUGS["window-trimmed"]
    if is_right(cache, (3, 1, 2), allowed) and not is_right(cache, (2, 2, 2), allowed):
        reason = f"{after}: wrong only if an earlier step had the same length, whose positions are reused"
        return reason, BUGS["positions-by-length"]
    has_positions = not windows or any(
        isinstance(part, RotaryPositions | Bias) for part in cache.adapter.parts
    )
    if has_positions and depends_on_order(cache, ()) and not depends_on_order(cache, (1,) * 5):
        return f"{after}: the order of cached tokens has no effect", BUGS["order-lost-in-steps"]
    return f"{after} differs from one call, from token {wrong} on", None


def affected(cache: Cache, x: Inputs, compute: Callable[[Inputs], Tensor]) -> Tensor:
    """Return `[tokens, rows]`: whether a change of a token changes a row of the outputs."""
    before = compute(x)
    changes = [compute(cache.change(x, token)) != before for token in range(x.t)]
    return torch.stack([change.flatten(0, -3).any(0).any(-1) for change in changes])


def cached_effects(cache: Cache, lengths: tuple[int, ...]) -> Tensor:
    """Return `[cached tokens, rows]`: which affect which rows of the last step; none if a step is refused."""
    start, end = sum(lengths[:-1]), sum(lengths)
    x = cache.draw(48, 2, end)
    if cache.run(Sequence(x, lengths)).error is not None:
        return torch.zeros(start, end - start, dtype=torch.bool)
    return affected(cache, x, lambda inputs: last_rows(cache.run(Sequence(inputs, lengths)), start))[:start]


def kept_tokens(cache: Cache, lengths: tuple[int, ...]) -> list[int]:
    """Return the cached tokens that affect the first token of the last step."""
    return cached_effects(cache, lengths)[:, 0].nonzero().flatten().tolist()


def last_rows(run: Run, start: int) -> Tensor:
    """Return the outputs of the first sequence from token `start` on."""
    return torch.cat(run.outs[0], -2)[..., start:, :]


def depends_on_order(cache: Cache, lengths: tuple[int, ...]) -> bool:
    """Return True if the order of earlier tokens affects the last one of five."""
    x = cache.draw(42, 2, 5)
    reordered = cache.replace_tokens(x, x.query[..., [3, 2, 0, 1, 4], :])
    steps = [Sequence(inputs, lengths) for inputs in (x, reordered)]
    outs = [last_rows(cache.run(each), 4) if lengths else cache.expect(each.inputs, 4, 5) for each in steps]
    return largest_difference(*outs) > 1e-5 * float(outs[0].abs().max())


def is_right(cache: Cache, lengths: tuple[int, ...], allowed: float) -> bool:
    """Return True if steps of these lengths give the outputs of a call without a cache."""
    sequence = Sequence(cache.draw(43, 2, sum(lengths)), lengths)
    run = cache.run(sequence)
    return run.error is None and max(cache.errors(sequence, run.outs[0])) <= allowed


def compare_padded(cache: Cache, lengths: tuple[int, ...]) -> float:
    """Return the largest difference of steps from one call if a token is padding, 0 if a call is refused."""
    x = cache.draw(49, 2, sum(lengths))
    forms = [cache.adapter.forms[name][1] for name in ("padding", "keys") if name in cache.adapter.forms]
    # A convention is, for example, a mask in place of the causal one.
    if cache.has_context or cache.adapter.convention or not forms or forms[0].letters == "lengths":
        return 0.0
    is_padding = (torch.arange(x.t) == 0) & torch.tensor([[True], [False]])
    sequence = Sequence(x.but(padding=~is_padding), lengths)
    for masks_all in (cache.masks_all, not cache.masks_all):  # masks of steps may leave out the cached tokens
        errors = []
        for omits_masks in (False, True)[: 1 if masks_all else 2]:
            used = replace(cache, masks_all=masks_all, omits_masks=omits_masks)
            with suppress(CodeError, UnexpectedOutput):  # a step or a call may refuse padding
                run = used.run(sequence)
                errors += used.errors(sequence, run.outs[0])[1:] if run.error is None else []
        if errors:
            return max(errors)
    return 0.0


# -- several sequences -----------------------------------------------------------------------------


def compare_sequences(
    cache: Cache, steps: tuple[int, ...], allowed: float
) -> Iterator[tuple[str, str, float | None]]:
    """Yield (reason, bug, error) if a sequence in steps of these lengths depends on the calls before."""
    x, y, single = (cache.draw(seed, b, 5) for seed, b in ((44, 2), (45, 2), (46, 1)))
    first, second, plain = Sequence(x, steps), Sequence(y, steps), Sequence(x)
    trials: list[tuple[str, str, Cache, list[Sequence]]] = []
    if cache.can_restart:
        reset = "after a reset" if cache.reset else "after another"
        trials.append((f"a second sequence {reset} differs", "cache-not-emptied", cache, [first, second]))
        if cache.passed or cache.remakes or not cache.make(1):
            reason = f"a sequence of another batch size {reset} differs"
            trials.append((reason, "", cache, [first, Sequence(single, steps), second]))
    if cache.is_optional and not cache.adapter.prepare(1):
        without, unasked = "a call without the cache", replace(cache, reset=())
        for reason, sequences in (
            (f"{without} differs after another", [plain, Sequence(y)]),
            (f"{without} differs after steps with it", [first, Sequence(y)]),
            (f"a sequence differs after {without}", [plain, second]),
            (f"a sequence differs after {without} in training", [Sequence(x, training=True), second]),
        ):
            trials.append((reason, "cache-unasked", unasked, sequences))
    for reason, bug, used, sequences in trials:
        run = used.run(*sequences)
        if run.error is not None:
            is_refused = isinstance(run.error, CodeError) and run.error.is_refusal
            # A new cache, or one after a reset, has to take a sequence of the same sizes.
            if is_refused and (bug != "cache-not-emptied" or not (used.is_outside or used.reset)):
                yield f"{reason.partition(' differs')[0]} is refused", REFUSED, None
                continue
            yield f"{reason}: it raised an error: {str(run.error).rstrip('.')}", "", None
            return
        for sequence, outs in zip(sequences[1:], run.outs[1:], strict=True):
            if (error := max(used.errors(sequence, outs))) > allowed:
                yield reason, bug, error
                return
