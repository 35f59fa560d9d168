"""Checks of values: shapes, determinism, outputs and gradients against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.checks.evidence import smallest_failure
from manyheads.checker.checks.registry import Check, check, failed, judge, passed
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CodeError
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
        return failed(c.width_error)
    g = torch.Generator().manual_seed(3)
    for b, t, s in ((3, 5, 7), (2, 7, 7), (1, 9, 3)):
        x = c.draw(g, b, t, s)
        c.run(x)
        if "weights" in c.features:
            c.run(x.but(need_weights=True))
            if isinstance(c, AttentionAdapter) and "average" in c.arguments:
                c.run(x.but(need_weights=True, average_weights=True))
    return passed()


@check("determinism", Attention, Encoding)
def check_determinism(c: Adapter) -> Check:
    """Repeat a call with one seed."""
    x = c.draw(torch.Generator().manual_seed(22), 2, 5)
    first = c.run(x, seed=1).out
    difference = max(largest_difference(c.run(x, seed=1).out, first) for _ in range(REPEATED))
    if difference:
        reason = f"{REPEATED + 1} equal calls with one seed don't all give the same output."
        return failed(reason, difference, 0.0)
    if not bool(first.isfinite().any()):
        return failed("its output isn't finite anywhere, so nothing else can be compared.", math.inf)
    return passed("the same seed gives the same bits", 0.0, 0.0)


class Result(NamedTuple):
    """The comparison of one input: what differs by how much, or the problem why there is no output."""

    scenario: str
    x: Inputs
    error: float = math.inf
    allowed: float = 0.0
    problem: str = ""


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
            yield replace(summarize(c, groups[scenario]), name=name)


def compare_values(c: Adapter, scenario: str, x: Inputs, is_first: bool) -> Result:
    """Compare one input, and note the mask arguments on which the output depends."""
    masks = c.without_masks(x) if isinstance(c, AttentionAdapter) else {}
    masks = {argument: y for argument, y in masks.items() if argument not in c.judged}
    try:
        got = c.run(x)
    except (UnexpectedOutput, CodeError) as raised:
        c.judged.update(masks)
        return Result(scenario, x, problem=str(raised).rstrip("."))
    if is_first:
        c.adopt_convention(x, got)
    error, allowed, _ = c.compare(x, got, c.exact(x))
    if isinstance(c, AttentionAdapter):
        c.judged.update(
            argument for argument, y in masks.items() if error > allowed or c.depends_on_mask(x, y, allowed)
        )
    return Result(scenario, x, error, allowed)


def summarize(c: Adapter, results: list[Result]) -> Check:
    """Return the check of one group: the largest error, or the smallest input that fails."""
    wrong = [result for result in results if not result.error <= result.allowed]
    if not wrong:
        worst = max(results, key=lambda result: result.error / max(result.allowed, 1e-300))
        return passed(f"{len(results)} inputs", worst.error, worst.allowed)
    first = min(wrong, key=lambda result: result.x.query.numel() + result.x.key.numel())
    if first.problem:
        return failed(f"{first.problem}.", first.error, first.allowed)
    x = smallest_failure(c, first.x)
    error, allowed, what = c.compare(x, c.run(x), c.exact(x))
    reason = (
        f"the {what} differ{'s' * (what == 'output')} in {len(wrong)} of {len(results)} inputs "
        f"({first.scenario}); the smallest has b = {x.b}, t = {x.t}, s = {x.s}."
    )
    return failed(reason, error, allowed)


@check("gradients", depends_on=("values", "causal mask"))
def check_gradients(c: AttentionAdapter) -> Check:
    """Compare the gradients of queries, keys and values with the oracle's."""
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
    answer = c.answer(x, grads=tuple(paths), cotangent=cotangent)
    worst = (0.0, 1.0, "")
    for path, roles in paths.items():
        got, what = answer.grads.get(path), " and ".join(roles)
        if got is None:
            return failed(f"no gradient reaches {what}.")
        expected, low = (torch.stack([grads[role] for role in roles]).sum(0) for grads in (exact, plain))
        error = largest_difference(c.from_layout(got), expected)
        eps = torch.finfo(torch.float32).eps
        allowed = 8 * largest_difference(low, expected) + 256 * eps * (1 + float(expected.abs().max()))
        worst = max(worst, (error, allowed, what), key=lambda result: result[0] / result[1])
    weights = {} if c.weights is None else c.projections.weight
    used = {part.path for parts in weights.values() for part in parts}
    missing = [path for path, grad in answer.weight_grads.items() if grad is None and path in used]
    if missing:
        return failed(f"no gradient reaches {', '.join(missing)}.")
    error, allowed, what = worst
    return judge(error, allowed, "", f"the gradient of {what} differs.")


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
