"""`manyheads check`: finds bugs in attention implementations, by name.

    from manyheads import checker

    report = checker.check("attention.py:MyAttention")  # in a separate process
    report = checker.check(MyAttention)                 # in this process
    checker.assert_attention(MyAttention, like="self")  # in a test

A candidate, the code under test, is described and called (`isolation`), understood (`candidates`: its kind,
its arguments, its weights), compared with an oracle on its own weights (`oracle`, `encodings`, `checks`), and
if values differ, with oracles that have a known bug (`bugs`, `diagnosis`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manyheads.checker.candidates.adapter import Adapter, Options
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.construct import KINDS, find_kind
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.candidates.probe import doubt_layout, open_adapter, open_attention, open_with_context
from manyheads.checker.candidates.settings import (
    CACHE_FLAG,
    MOST,
    MOST_FLAGS,
    MOST_PLAUSIBLE,
    Setting,
    find_places,
    find_settings,
    widen,
)
from manyheads.checker.checks import Check, apply_strict, is_random, run_checks
from manyheads.checker.checks.behavior import check_context
from manyheads.checker.checks.cache import find_refusal
from manyheads.checker.diagnosis import EXPLAINED, Diagnosis, Pair, diagnose, find_pair, name_bugs
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.errors import CandidateError, ProcessEnded
from manyheads.checker.isolation.process import CandidateProcess, open_candidate
from manyheads.checker.kinds import compare_with_classic, find_classic
from manyheads.checker.oracle import Inputs, Outputs
from manyheads.checker.report import Report
from manyheads.checker.setup import Setup, read_setup

__all__ = ["KINDS", "Check", "Diagnosis", "Report", "Unclear", "assert_attention", "check"]

WITH_CONTEXT = ("shapes", "values", "gradients", "hidden keys", "permutation", "batch entries", "empty rows")
WITH_SETTING = ("shapes", "determinism", "values", "gradients", "hidden keys", "batch entries", "cache")


def check(
    obj: Any,
    like: str | None = None,
    *,
    init: dict[str, Any] | str | None = None,
    weights: dict[str, str] | str | None = None,
    args: dict[str, str] | None = None,
    heads: int | None = None,
    layout: str | None = None,
    setup: str | Path | None = None,
    strict: list[str] | str | None = None,
    timeout: float = 60.0,
    memory: int = 4 * 2**30,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check attention: values, gradients, masks, and what is wrong if something is.

    An object is restored afterwards: parameters, buffers, caches, hooks, modes, and global state.

    Args:
        obj: "module:name" or "path/to/file.py:name", run in a separate process; or a class, an instance
            or a function, run in this process (without limits on time and memory).
        like: one of KINDS, or "classic.MODULE.CLASS"; guessed from names and arguments if None.
        init: constructor arguments, a dict or 'hidden=16, num_heads=4'.
        weights: names of the projection layers where they can't be guessed, such as {"q": "a", "k": "b"}
            or "q=a,k=b".
        args: the roles of arguments of the call where they can't be guessed, such as {"segments": "keep"};
            docs/checker.md lists them.
        heads: the number of heads; by default that of the object, and 4 where it is built here.
        layout: "batch" for `[b, t, e]`, "sequence" for `[t, b, e]`; detected if None.
        setup: a TOML file with any of `like`, `init`, `args`, `heads`, `weights`, `layout` and `strict`, for
            those that aren't given here.
        strict: names of conventions that count as failures, such as "empty-rows", or "all".
        timeout: the time limit of each call, in seconds.
        memory: the memory limit of its process, in bytes.
        progress: called with the name of each check before it runs.

    Returns:
        A `Report` to print. `report.verdict` is "passed", "failed", or "not judged" if nothing failed, but a
        mask argument was never used or every call with it raised. `report.passed` is True for "passed" only.

    Raises:
        Unclear: if it can't be imported, built or understood; the message says why.
    """
    given = Setup(like, init, args, heads, weights, layout, strict)
    given = given if setup is None else given.over(read_setup(setup))
    target = str(obj if isinstance(obj, str) else getattr(obj, "__name__", type(obj).__name__))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the oracle is small: more threads only wait
    try:
        opened = open_candidate(obj, timeout=timeout, memory=memory)
        # The caller may be in a mode without gradients, which the checks need.
        with torch.inference_mode(False), torch.enable_grad(), opened as candidate:
            return check_candidate(candidate, target, given, progress)
    except CandidateError as error:
        if error.kind in ("import", "init"):
            raise Unclear(str(error)) from None
        failure = Check("a call", "failed", str(error))
        return Report(target, given.like or "unknown", given.like is None, [failure])
    finally:
        torch.set_num_threads(threads)


def check_candidate(
    candidate: Candidate | CandidateProcess, target: str, given: Setup, progress: Callable[[str], None]
) -> Report:
    """Check a candidate, first without the context that it may take, then with it."""
    try:
        description = candidate.describe()
    except CandidateError as error:
        raise Unclear(str(error)) from None
    classic = find_classic(given.like) if given.like and given.like.startswith("classic.") else None
    like, roles, init = classic.kind if classic else given.like, given.args or {}, given.arguments
    kind, guessed = find_kind(like, description, roles, init)
    layout = given.layout or (classic.layout if classic else None)
    progress("reading")
    options = Options(kind, guessed, init, given.projections, layout, roles, given.heads)
    adapter = open_adapter(candidate, options)
    checks, diagnosis, pair = judge(adapter, given.conventions, progress)
    found_roles = adapter.roles
    is_doubtful = given.layout is not None and any(check.status == "failed" for check in checks)
    if is_doubtful and adapter.ended is None and isinstance(adapter, AttentionAdapter):
        diagnosis = [Diagnosis("", doubt, verified=False) for doubt in doubt_layout(adapter)] + diagnosis
    if adapter.with_context is not None and adapter.ended is None:
        further, found, other = judge_context(adapter, given.conventions, progress)
        known = {each.bug for each in diagnosis}
        diagnosis += [each for each in found if each.bug not in known]
        conventions = [check.name for check in checks if check.status == "convention"]
        checks += [check for check in further if check.name not in conventions]
        pair = pair or other
    if classic is not None and adapter.ended is None:
        checks.append(replace(compare_with_classic(adapter, classic), name=f"like {classic.name}"))
    is_right = not any(check.status == "failed" for check in checks) and not adapter.unknown
    if is_right and isinstance(adapter, AttentionAdapter):
        unjudged = [check for check in checks if (check.name, check.status) == ("cache", "not judged")]
        flag = find_cache_flag(adapter) if unjudged else None
        further, found = judge_settings(adapter, given.conventions, progress, flag)
        if any((check.name, check.status) == (f"with {flag}", "passed") for check in further):
            needed = replace(unjudged[0], status="not applicable", reason=f"it needs {flag}")
            checks[checks.index(unjudged[0])] = needed
        n = len(checks) - (classic is not None)  # the comparison stays last
        checks[n:n], diagnosis = further, diagnosis + found
    return Report(
        target, given.like or adapter.kind, guessed, checks, diagnosis, adapter.notes, pair, found_roles
    )


def judge(
    adapter: Adapter,
    strict: Collection[str],
    progress: Callable[[str], None],
    only: Collection[str] = (),
    takes_pairs: bool = True,
) -> tuple[list[Check], list[Diagnosis], Pair | None]:
    """Run checks, all or some, and return them, the diagnosis of failures, and a pair of maps that differ."""
    found: list[Diagnosis] = []
    try:
        is_other = isinstance(adapter, AttentionAdapter) and bool(adapter.mechanism)
        # No parts explain the outputs. Parts with a bug may, and then the checks can judge.
        if adapter.unknown and not is_other:
            progress("diagnosis")
            found = diagnose(adapter, takes_pairs)
            adapter.unknown = "" if any(each.bug for each in found) else adapter.unknown
    except ProcessEnded as error:
        adapter.ended = error
    checks = apply_strict(run_checks(adapter, progress, only), strict)
    is_explained = any(result.status == "failed" and result.name in EXPLAINED for result in checks)
    if not is_explained or is_random(checks) or adapter.ended is not None or adapter.unknown:
        return checks, name_bugs(checks, []), None
    try:
        if not found:
            progress("diagnosis")
            found = diagnose(adapter, takes_pairs)
        # Steps with a cache repeat a bug that other calls have too, so only other checks name more bugs then.
        others = [check for check in checks if check.name != "cache" or not any(each.bug for each in found)]
        named = name_bugs(others, found)
        # These spoil calls with other contexts and masks, or say what is known of steps.
        if any(
            each.bug in ("context-kept", "mask-kept", "order-lost-in-steps", "input-changed")
            for each in named
        ):
            found = [each for each in found if each.bug]
        pair = find_pair(adapter)
        return checks, separate(adapter, found) + named, pair
    except ProcessEnded as error:
        reason = f"its process ended before a diagnosis: {error.reason}"
        return checks, [Diagnosis("", reason, verified=False)], None


def separate(adapter: Adapter, found: list[Diagnosis]) -> list[Diagnosis]:
    """Return the bugs that also explain a build of another width, if several explain the default build."""
    if len(found) < 2 or not isinstance(adapter, AttentionAdapter) or (init := widen(adapter)) is None:
        return found
    try:
        wider = {
            each.bug
            for each in diagnose(open_attention(adapter.candidate, replace(adapter.options, init=init)))
        }
    except Unclear:
        wider = set()
    rebuild(adapter)
    return [each for each in found if each.bug in wider] or found


def rebuild(adapter: Adapter) -> None:
    """Build the candidate as its adapter did, after another adapter used it."""
    if isinstance(adapter, AttentionAdapter) and adapter.description.type == "class":
        adapter.candidate.build(adapter.init)
        adapter.candidate.load(adapter.parameters)


def judge_context(
    adapter: Adapter, strict: Collection[str], progress: Callable[[str], None]
) -> tuple[list[Check], list[Diagnosis], Pair | None]:
    """Check the candidate with the context that it may take, after the checks without one."""
    name = next(role.name for role in adapter.roles if role.role == "context")
    crossing = open_with_context(adapter)
    if isinstance(crossing, str):
        advice = f"{crossing} If it isn't used, give --arg {name}=ignore."
        return [Check(f"argument {name}", "not judged", advice)], [], None
    if (result := check_context(crossing, name)) is not None:
        result = replace(result, name=f"argument {name}")
        return [result], name_bugs([result], []), None
    crossing.convention = adapter.convention
    adapter.notes.append(f"checked without and with {name}")
    uses = [
        Check("self-attention alone", "convention", f"{argument} has an effect only without {name}.")
        for argument in (adapter.without_context if isinstance(adapter, AttentionAdapter) else ())
    ]
    adapter.notes += [f"with {name}: {note}" for note in crossing.notes if note not in adapter.notes]
    checks, diagnosis, pair = judge(crossing, strict, progress, WITH_CONTEXT)
    checks += apply_strict(uses, strict)
    if crossing.ended is None:
        rebuild(adapter)
    run = [check for check in checks if check.status != "not applicable"]
    suffix = {check.name: f" (with {name})" for check in run if check.status != "convention"}
    return [replace(check, name=check.name + suffix.get(check.name, "")) for check in run], diagnosis, pair


def judge_settings(
    adapter: AttentionAdapter,
    strict: Collection[str],
    progress: Callable[[str], None],
    flag: Setting | None = None,
) -> tuple[list[Check], list[Diagnosis]]:
    """Check the candidate again with each option of its constructor that is off by default, a flag first."""
    settings = [setting for setting in find_settings(adapter) if flag is None or setting.name != flag.name]
    settings = ([] if flag is None else [flag]) + settings
    known = {setting.name for setting in settings}
    places = find_places(adapter) if adapter.description.type == "class" else ()
    off = [place.argument.name for place in places if place.value is None or place.value is False]
    if others := ", ".join(name for name in off if name not in known):
        adapter.notes.append(f"left at their defaults, so not judged: {others}")
    beyond = f"only {MOST} settings are judged. Turn it on with --init."
    checks = [Check(f"with {setting}", "could not be checked", beyond) for setting in settings[MOST:]]
    diagnosis: list[Diagnosis] = []
    x = adapter.draw(torch.Generator().manual_seed(8), 2, max(16, adapter.length))  # more than four windows
    plain = adapter.attempt(x)
    for setting in settings[:MOST]:
        progress(f"with {setting}")
        try:
            result, found = judge_setting(adapter, setting, strict, x, plain)
        except ProcessEnded as error:
            return [*checks, Check(f"with {setting}", "failed", str(error))], diagnosis
        checks.append(replace(result, name=f"with {setting}"))
        diagnosis += [
            replace(each, description=f"with {setting}, {each.description}") for each in found if each.bug
        ]
    return checks, diagnosis


def judge_setting(
    adapter: AttentionAdapter, setting: Setting, strict: Collection[str], x: Inputs, plain: Outputs | None
) -> tuple[Check, list[Diagnosis]]:
    """Return one result for all checks of a build with another setting, and its bugs.

    Args:
        adapter: The adapter of the default build, whose output for `x` is `plain`.
        setting: The setting.
        strict: The names of conventions that count as failures.
        x: Inputs.
        plain: The output for them.

    Returns:
        The result, without a name, and the bugs.
    """
    option = setting.option
    try:
        other = open_attention(adapter.candidate, replace(adapter.options, init=setting.init))
    except Unclear as unclear:
        error = unclear.error
        is_failure = error is not None and option.is_complete and not error.is_refusal
        return Check("", "failed" if is_failure else "could not be checked", str(error or unclear)), []
    changed = other.attempt(x)
    if plain and changed and option.has_effect and torch.equal(plain.out, changed.out):
        if not (flag := find_condition(adapter, setting, x)):
            if option.is_complete:
                return Check("", "failed", f"{setting} changes no output: it is ignored."), []
            default = f"--init '{setting.name}={setting.default!r}'"
            advice = f"If that is meant, as for a mask that callers make, give {default}."
            return Check("", "not judged", f"{setting} changes no output. {advice}"), []
        together = {**setting.init, flag: True}
        other = open_attention(adapter.candidate, replace(adapter.options, init=together))
    # Fewest parts first: an option adds few.
    other.convention, other.plausible = adapter.convention, sorted(other.plausible, key=len)[:MOST_PLAUSIBLE]
    checks, found, _ = judge(other, strict, lambda name: None, WITH_SETTING, takes_pairs=False)
    failed = [check for check in checks if check.status == "failed"]
    reasons = "; ".join(f"{check.name}: {check.reason.rstrip('.')}" for check in failed)
    if any(each.bug for each in found):
        return Check("", "failed", f"{reasons}.", failed[0].error, failed[0].allowed), found
    if failed and option.is_complete and not other.unknown:
        advice = f"No known bug explains it. To judge one value of {setting.name} alone, give it with --init."
        return Check("", "not judged", f"{reasons}. {advice}"), []
    if unjudged := failed + [check for check in checks if check.status == "not judged"]:
        return Check("", "could not be checked", unjudged[0].reason), []
    return Check("", "passed", ", ".join(check.name for check in checks if check.status == "passed")), []


def find_cache_flag(adapter: AttentionAdapter) -> Setting | None:
    """Return the first flag of the constructor that is off and with which steps with a cache are accepted."""
    for place in [each for each in find_places(adapter) if each.value is False][:MOST_FLAGS]:
        setting = Setting(place.argument.name, True, False, CACHE_FLAG, place.set(adapter, True))
        with contextlib.suppress(Unclear):
            other = open_attention(adapter.candidate, replace(adapter.options, init=setting.init))
            if other.cache is not None and find_refusal(other.cache) is None:
                return setting
    return None


def find_condition(adapter: AttentionAdapter, setting: Setting, x: Inputs) -> str:
    """Return the flag of the constructor with which a setting changes outputs, or ""."""
    places = [place for place in find_places(adapter) if place.value is False and not place.owner]
    flags = [place.argument.name for place in places if place.argument.name != setting.name]
    for name in flags[:MOST_FLAGS]:
        flag = {name: True}
        with contextlib.suppress(Unclear):
            outputs = [
                open_attention(adapter.candidate, replace(adapter.options, init={**init, **flag})).attempt(x)
                for init in (adapter.options.init, setting.init)
            ]
            outs = [each.out for each in outputs if each is not None]
            if len(outs) == 2 and not torch.equal(outs[0], outs[1]):
                return name
    return ""


def assert_attention(obj: Any, like: str | None = None, **options: Any) -> None:
    """Raise AssertionError, with the report, unless a check of `obj` passes; for tests.

    Args:
        obj: the code to check, as for `check`.
        like: its kind, as for `check`.
        **options: the other arguments of `check`.

    Raises:
        AssertionError: if it doesn't pass.
        Unclear: if it can't be imported, built or understood.
    """
    __tracebackhide__ = True  # pytest shows the caller's line, and the report once
    try:
        report = check(obj, like, **options)
    except Unclear as error:
        raise Unclear(str(error)) from None  # without the checker's own lines
    if not report.passed:
        raise AssertionError(report.summary()) from None
