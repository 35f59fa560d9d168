"""Checks of values: shapes, determinism, outputs and gradients against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.checks.evidence import smallest_failure
from manyheads.checker.checks.registry import Check, check, failed, judge, passed
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CandidateError
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Attention, Inputs, largest_difference

DRAWS = 20  # inputs on which values are compared
REPEATED = 15  # calls that must give the same bits
NAMES = {  # of the checks, by scenario
    "plain": "values",
    "causal": "causal mask",
    "mask": "mask",
    "keys": "mask of keys",
    "padding": "padding",
    "added": "added bias",
    "scale": "scale",
    "grouped": "grouped heads",
    "one query": "one query",
}


@check("shapes", Attention, Encoding)
def check_shapes(c: Adapter) -> Check:
    """Run several sizes; `run` raises for an output of another shape."""
    if c.width_error:
        return failed("shapes", c.width_error)
    g = torch.Generator().manual_seed(3)
    for b, t, s in ((3, 5, 7), (2, 7, 7), (1, 9, 3)):
        x = c.draw(g, b, t, s)
        c.run(x)
        if "weights" in c.features:
            c.run(x.but(need_weights=True))
            if isinstance(c, AttentionAdapter) and "average" in c.arguments:
                c.run(x.but(need_weights=True, average_weights=True))
    return passed("shapes")


@check("determinism", Attention, Encoding)
def check_determinism(c: Adapter) -> Check:
    """Repeat a call with one seed."""
    name = "determinism"
    x = c.draw(torch.Generator().manual_seed(22), 2, 5)
    first = c.run(x, seed=1).out
    difference = max(largest_difference(c.run(x, seed=1).out, first) for _ in range(REPEATED))
    if difference:
        reason = f"{REPEATED + 1} equal calls with one seed don't all give the same output."
        return failed(name, reason, difference, 0.0)
    elif not bool(first.isfinite().any()):
        return failed(name, "its output isn't finite anywhere, so nothing else can be compared.", math.inf)
    else:
        return passed(name, "the same seed gives the same bits", 0.0, 0.0)


class Result(NamedTuple):
    """The comparison of one input; `what` differs, or `problem` says why there is no output."""

    error: float
    allowed: float
    what: str
    problem: str
    scenario: str
    x: Inputs


@check("values", Attention, Encoding)
def check_values(c: Adapter) -> Iterator[Check]:
    """Compare outputs and weights with the oracle, in each scenario."""
    groups: dict[str, list[Result]] = {}
    is_first = True
    for seed in range(100, 100 + DRAWS):
        for name, x in c.scenarios(seed, 2 + seed % 7, 1 + seed % 6, 1 + seed % 3).items():
            if name not in ("plain", "causal") and seed >= 106:
                continue
            result = compare_values(c, name, x, is_first)
            is_first &= bool(result.problem)
            groups.setdefault(name.partition(",")[0], []).append(result)
    for scenario, name in NAMES.items():
        if scenario in groups:
            yield summarize(c, name, groups[scenario])


def compare_values(c: Adapter, scenario: str, x: Inputs, is_first: bool) -> Result:
    """Compare one input, and note the mask arguments on which the output depends."""
    masks = c.without_masks(x) if isinstance(c, AttentionAdapter) else {}
    masks = {argument: y for argument, y in masks.items() if argument not in c.judged}
    problem = ""
    try:
        got = c.run(x)
    except UnexpectedOutput as raised:
        problem = str(raised)
    except CandidateError as raised:
        if raised.ends_process:
            raise
        problem = str(raised).rstrip(".")
    if problem:
        c.judged.update(masks)
        return Result(math.inf, 0.0, "", problem, scenario, x)
    if is_first:
        c.adopt_convention(x, got)
    error, allowed, what = c.compare(x, got, c.exact(x))
    if isinstance(c, AttentionAdapter):
        c.judged.update(
            argument for argument, y in masks.items() if error > allowed or c.depends_on_mask(x, y, allowed)
        )
    return Result(error, allowed, what, "", scenario, x)


def summarize(c: Adapter, name: str, results: list[Result]) -> Check:
    """Return the check of one group: the largest error, or the smallest input that fails."""
    wrong = [one for one in results if not one.error <= one.allowed]
    if not wrong:
        worst = max(results, key=lambda one: one.error / max(one.allowed, 1e-300))
        return passed(name, f"{len(results)} inputs", worst.error, worst.allowed)
    one = min(wrong, key=lambda one: one.x.query.numel() + one.x.key.numel())
    if one.problem:
        return failed(name, f"{one.problem}.", one.error, one.allowed)
    x = smallest_failure(c, one.x)
    error, allowed, what = c.compare(x, c.run(x), c.exact(x))
    reason = (
        f"the {what} differ{'s' * (what == 'output')} in {len(wrong)} of {len(results)} inputs "
        f"({one.scenario}); the smallest has b = {x.b}, t = {x.t}, s = {x.s}."
    )
    return failed(name, reason, error, allowed)


@check("gradients", depends_on=("values", "causal mask"))
def check_gradients(c: AttentionAdapter) -> Check:
    """Compare the gradients of queries, keys and values with the oracle's."""
    name = "gradients"
    x = c.scenarios(7)["causal" if "causal" in c.features and not c.always_causal else "plain"]
    call = c.call(x)
    paths = c.sequence_paths(call)
    exact, cotangent = oracle_gradients(c, x, torch.float64)
    plain, _ = oracle_gradients(c, x, torch.float32)
    out = top_tensors(c.candidate.call(call).output)[0]
    cotangent = c.to_layout(cotangent)
    if c.kind == "hf" and out.shape != cotangent.shape:
        cotangent = cotangent.transpose(1, 2)
    cotangent = cotangent.to(torch.float32).contiguous()
    answer = c.answer(x, grads=tuple(dict.fromkeys(paths.values())), cotangent=cotangent)
    roles_of: dict[str, list[str]] = {}
    for role, path in paths.items():
        roles_of.setdefault(path, []).append(role)
    if "cross" not in c.features and len(roles_of) == 1:
        roles_of = {path: ["query", "key", "value"] for path in roles_of}
    elif c.kind == "cross":
        roles_of = {path: ["key", "value"] if roles == ["key"] else roles for path, roles in roles_of.items()}
    worst = (0.0, 1.0, "")
    for path, roles in roles_of.items():
        got, what = answer.grads.get(path), " and ".join(roles)
        if got is None:
            return failed(name, f"no gradient reaches {what}.")
        expected, low = (torch.stack([grads[role] for role in roles]).sum(0) for grads in (exact, plain))
        error = largest_difference(c.from_layout(got), expected)
        eps = torch.finfo(torch.float32).eps
        allowed = 8 * largest_difference(low, expected) + 256 * eps * (1 + float(expected.abs().max()))
        worst = max(worst, (error, allowed, what), key=lambda one: one[0] / one[1])
    weights = {} if c.weights is None else c.projections.weight
    used = {part.path for parts in weights.values() for part in parts}
    missing = [path for path, grad in answer.weight_grads.items() if grad is None and path in used]
    if missing:
        return failed(name, f"no gradient reaches {', '.join(missing)}.")
    else:
        return judge(name, worst[0], worst[1], "", f"the gradient of {worst[2]} differs.")


def oracle_gradients(c: AttentionAdapter, x: Inputs, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Return the oracle's gradients in this dtype, and the gradient of its output."""
    oracle = Attention(None if c.weights is None else c.weights.to(dtype), x.query.dtype)
    names = ("query", "key", "value")
    y = x.to(dtype)
    leaves = {name: getattr(y, name).detach().clone().requires_grad_() for name in names}
    out = oracle(y.but(**leaves)).out
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return dict(zip(names, grads, strict=True)), cotangent
