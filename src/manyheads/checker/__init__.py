"""`manyheads check`: what is wrong with somebody's attention, by name.

    from manyheads import checker

    report = checker.check("attention.py:MyAttention")  # in a process of its own
    report = checker.check(MyAttention)                 # in this one
    checker.assert_attention(MyAttention, like="self")  # in a test

A candidate is described and called (`subject`, `process`), read (`reading`, `candidate`: its kind, its
arguments, whose each weight is), compared with attention in small steps on its own weights (`recipe`,
`questions`), and where values differ, with a family of known mistakes (`mistakes`, `diagnosis`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.checker import kinds as likeness
from manyheads.checker.candidates.adapter import Candidate, Odd
from manyheads.checker.candidates.parameters import KINDS, Unclear, arguments, kind_of
from manyheads.checker.checks import LOST, Check, apart, ask_all, gather, smallest, unlike
from manyheads.checker.diagnosis import Diagnosis, diagnose
from manyheads.checker.encodings import check_positions
from manyheads.checker.isolation.candidate import Trouble
from manyheads.checker.isolation.process import open_subject
from manyheads.checker.oracle import exact
from manyheads.checker.report import Report

__all__ = ["KINDS", "Check", "Diagnosis", "Report", "Unclear", "assert_attention", "check"]

DURING = (
    "values",
    "causal mask",
    "mask",
    "mask of keys",
    "padding",
    "added bias",
    "scale",
    "grouped heads",
    "one query",
    "empty rows",
    "large scores",
    "training and evaluation",
    "rows sum to one",
    "shapes",
    "cache",
)


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
    """Check attention: values, gradients, masks, and what is wrong where something is.

    An object is restored afterwards: parameters, buffers, caches, hooks, modes, and global state.

    Args:
        obj: "module:name" or "path/to/file.py:name", run in a process of its own; or a class, an instance
            or a function, run in this process (where time and memory aren't limited).
        like: one of KINDS, or "classic.MODULE.CLASS"; guessed from names and arguments if None.
        init: constructor arguments, a mapping or 'hidden=16, num_heads=4'.
        weights: whose each layer is where names don't say: {"q": "a", "k": "b", "v": "c", "o": "d"}.
        layout: "batch" for `[b, t, e]`, "sequence" for `[t, b, e]`; found out if None.
        timeout: seconds that a call may take; memory: bytes that its process may hold.
    progress: called with the name of each question before it is asked.

    Returns:
        A `Report`; print it. `report.verdict` is "passed", "failed", or "not judged" if nothing failed, but a
        mask argument was never used or every call with it raised. `report.passed` is True for "passed" only.

    Raises:
        Unclear: what can't be imported, built or understood, in one sentence.
    """
    if layout not in (None, "batch", "sequence"):
        raise Unclear(f'layout is "batch" for [b, t, e] or "sequence" for [t, b, e], and {layout!r} came.')
    given = arguments(init) if isinstance(init, str) else dict(init or {})
    target = obj if isinstance(obj, str) else getattr(obj, "__name__", type(obj).__name__)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the recipe is small: more threads only wait
    try:
        opened = open_subject(obj, timeout=timeout, memory=memory)
        # The caller may be in a mode without gradients, which the checks need.
        with torch.inference_mode(False), torch.enable_grad(), opened as subject:
            try:
                subject.describe()
            except Trouble as error:
                raise Unclear(str(error)) from None
            return _check(subject, str(target), like, given, weights, layout, progress)
    except Trouble as error:
        if error.kind in ("import", "init"):
            raise Unclear(str(error)) from None
        at = Check("a call", "failed", str(error))
        return Report(str(target), like or "unknown", like is None, [at])
    finally:
        torch.set_num_threads(threads)


def _check(
    subject: Any,
    target: str,
    like: str | None,
    init: dict[str, Any],
    weights: Mapping[str, str] | None,
    layout: str | None,
    progress: Callable[[str], None],
) -> Report:
    progress("reading")
    classic = likeness.of(like) if like is not None and like.startswith("classic.") else None
    kind, guessed = kind_of(classic.kind if classic else like, subject.describe())
    if kind in ("positional", "rotary"):
        notes, checks, named = check_positions(subject, kind, guessed, init, layout)
        return Report(target, like or kind, guessed, checks, named, notes)
    layout = layout or (classic.layout if classic else None)
    c = Candidate(subject, kind, guessed, init, weights or {}, layout)
    checks = ask_all(c, progress)
    found: list[Diagnosis] = []
    pair = None
    gone = any(one.status == "could not be checked" and "process had ended" in one.reason for one in checks)
    failing = any(one.status == "failed" and one.name in DURING for one in checks)
    if failing and not unlike(checks) and not gone:
        progress("diagnosis")
        try:
            found = diagnose(c)
            pair = _pair(c)
        except Trouble as error:
            if error.kind not in LOST:
                raise
            found = [Diagnosis("", f"its process ended before a diagnosis: {error}".rstrip("."), "", False)]
    if classic is not None and not gone:
        checks.append(likeness.compare(c, classic))
    return Report(target, like or kind, guessed, checks, found, c.notes, pair)


def _pair(c: Candidate) -> tuple[Tensor, Tensor, str] | None:
    """The right map and the given one for a small failing input: weights if they came, else outputs,
    of head 0.
    """
    for one in gather(c, range(100, 103)):
        right = exact(c.weights, one.x)
        error, most, _ = apart(c, one.x, one.found, right)
        if error <= most or one.found.out.shape != right.out.shape:
            continue
        x = smallest(c, one.x)
        x = one.x if x.t * x.s < 4 else x
        if "weights" in c.can:
            x = replace(x, weights=True)
        try:
            got, right = c.run(x, strict=False), exact(c.weights, x)
        except (Odd, Trouble):
            continue
        if got.weights is not None and right.weights is not None:
            if got.weights.shape != right.weights.shape:  # as many maps as heads, or one
                return right.weights, got.weights, "weights"
            if float((right.weights - got.weights).abs().nan_to_num(1.0).max()) > 1e-4:
                return *_worst(right.weights, got.weights), "weights"
        return *_worst(right.out, got.out), "output"
    return None


def _worst(want: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Of `[b, h, t, s]` or `[b, t, e]` the matrix that differs most."""
    a, b = (x.to(torch.float64).flatten(0, -3) for x in (want, got))
    n = int((a - b).abs().nan_to_num(torch.inf).amax((1, 2)).argmax())
    return a[n], b[n]


def assert_attention(obj: Any, like: str | None = None, **options: Any) -> None:
    """Raise AssertionError, with the report, unless a check of `obj` passes; for tests.

    `like` and the options are arguments as `check` has them, and Unclear is raised as there.
    """
    report = check(obj, like, **options)
    if not report.passed:
        raise AssertionError(
            f'Expected {report.target} to pass, got the verdict "{report.verdict}".\n{report!r}'
        )
