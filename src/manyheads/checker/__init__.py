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

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import Adapter, Options
from manyheads.checker.candidates.construct import KINDS, find_kind, parse_arguments
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.candidates.probe import open_adapter
from manyheads.checker.checks import Check, is_random, run_checks
from manyheads.checker.checks.evidence import gather, smallest_failure
from manyheads.checker.diagnosis import EXPLAINED, Diagnosis, diagnose
from manyheads.checker.isolation.errors import CandidateError, ProcessEnded
from manyheads.checker.isolation.process import open_candidate
from manyheads.checker.kinds import compare_with_classic, find_classic
from manyheads.checker.oracle import largest_difference
from manyheads.checker.report import Report

__all__ = ["KINDS", "Check", "Diagnosis", "Report", "Unclear", "assert_attention", "check"]

Pair = tuple[Tensor, Tensor, str]  # the expected and the given map, and "weights" or "output"


def check(
    obj: Any,
    like: str | None = None,
    *,
    init: Mapping[str, Any] | str | None = None,
    weights: Mapping[str, str] | None = None,
    layout: str | None = None,
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
        init: constructor arguments, a mapping or 'hidden=16, num_heads=4'.
        weights: names of the projection layers where they can't be guessed, such as {"q": "a", "k": "b"}.
        layout: "batch" for `[b, t, e]`, "sequence" for `[t, b, e]`; detected if None.
        timeout: the time limit of each call, in seconds.
        memory: the memory limit of its process, in bytes.
        progress: called with the name of each check before it runs.

    Returns:
        A `Report` to print. `report.verdict` is "passed", "failed", or "not judged" if nothing failed, but a
        mask argument was never used or every call with it raised. `report.passed` is True for "passed" only.

    Raises:
        Unclear: if it can't be imported, built or understood; the message says why.
    """
    if layout not in (None, "batch", "sequence"):
        raise Unclear(f'Expected layout "batch" for [b, t, e] or "sequence" for [t, b, e], got {layout!r}.')
    arguments = parse_arguments(init) if isinstance(init, str) else dict(init or {})
    target = str(obj if isinstance(obj, str) else getattr(obj, "__name__", type(obj).__name__))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the oracle is small: more threads only wait
    try:
        opened = open_candidate(obj, timeout=timeout, memory=memory)
        # The caller may be in a mode without gradients, which the checks need.
        with torch.inference_mode(False), torch.enable_grad(), opened as candidate:
            try:
                candidate.describe()
            except CandidateError as error:
                raise Unclear(str(error)) from None
            classic = find_classic(like) if like is not None and like.startswith("classic.") else None
            kind, guessed = find_kind(classic.kind if classic else like, candidate.describe())
            layout = layout or (classic.layout if classic else None)
            progress("reading")
            adapter = open_adapter(candidate, Options(kind, guessed, arguments, weights or {}, layout))
            checks = run_checks(adapter, progress)
            diagnosis, pair = explain(adapter, checks, progress)
            if classic is not None and adapter.ended is None:
                checks.append(replace(compare_with_classic(adapter, classic), name=f"like {classic.name}"))
            return Report(target, like or kind, guessed, checks, diagnosis, adapter.notes, pair)
    except CandidateError as error:
        if error.kind in ("import", "init"):
            raise Unclear(str(error)) from None
        return Report(target, like or "unknown", like is None, [Check("a call", "failed", str(error))])
    finally:
        torch.set_num_threads(threads)


def explain(
    adapter: Adapter, checks: list[Check], progress: Callable[[str], None]
) -> tuple[list[Diagnosis], Pair | None]:
    """Return the diagnosis of failed checks, and a pair of maps that differ."""
    is_explained = any(result.status == "failed" and result.name in EXPLAINED for result in checks)
    if not is_explained or is_random(checks) or adapter.ended is not None:
        return [], None
    progress("diagnosis")
    try:
        return diagnose(adapter), find_pair(adapter)
    except ProcessEnded as error:
        return [Diagnosis("", f"its process ended before a diagnosis: {error.reason}", verified=False)], None


def find_pair(adapter: Adapter) -> Pair | None:
    """Return the expected and the given map of a small failing input: weights if they differ, or outputs."""
    for call in gather(adapter, range(100, 103)):
        has_shape = call.outputs.out.shape == adapter.exact(call.inputs).out.shape
        if not has_shape or adapter.is_right(call.inputs, call.outputs):
            continue
        inputs = smallest_failure(adapter, call.inputs)
        inputs = call.inputs if inputs.t * inputs.s < 4 else inputs
        if "weights" in adapter.features:
            inputs = inputs.but(need_weights=True)
        if (outputs := adapter.attempt(inputs)) is None:
            continue
        expected = adapter.exact(inputs)
        if outputs.weights is not None and expected.weights is not None:
            if outputs.weights.shape != expected.weights.shape:  # a map for each head, or one
                return expected.weights, outputs.weights, "weights"
            if largest_difference(outputs.weights, expected.weights) > 1e-4:
                return *worst_matrix(expected.weights, outputs.weights), "weights"
        return *worst_matrix(expected.out, outputs.out), "output"
    return None


def worst_matrix(expected: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix of two tensors `[..., t, s]` in which they differ most."""
    expected, got = (x.to(torch.float64).flatten(0, -3) for x in (expected, got))
    worst = int((expected - got).abs().nan_to_num(torch.inf).amax((1, 2)).argmax())
    return expected[worst], got[worst]


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
    report = check(obj, like, **options)
    if not report.passed:
        raise AssertionError(
            f'Expected {report.target} to pass, got the verdict "{report.verdict}".\n{report!r}'
        )
