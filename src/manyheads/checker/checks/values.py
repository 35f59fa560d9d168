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
from manyheads.checker.checks.evidence import smallest_failure, with_and_without_weights
from manyheads.checker.checks.registry import Check, check, failed, judge, passed
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Attention, Inputs, largest_difference

DRAWS = 20  # inputs for which values are compared
REPEATED = 15  # calls that must return the same bits as the first
NAMES = {  # the names of the checks by scenario
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
def check_shapes(adapter: Adapter) -> Check:
    """Run several sizes. `run` raises for an output of another shape."""
    if adapter.width_error:
        return failed(adapter.width_error)
    generator = torch.Generator().manual_seed(3)
    for sizes in ((3, 5, 7), (2, 7, 7), (1, 9, 3)):
        inputs = adapter.draw(generator, *sizes)
        for variant in with_and_without_weights(adapter, inputs):
            adapter.run(variant)
        if (
            "weights" in adapter.features
            and isinstance(adapter, AttentionAdapter)
            and "average" in adapter.arguments
        ):
            adapter.run(inputs.but(need_weights=True, average_weights=True))
    return passed()


@check("determinism", Attention, Encoding)
def check_determinism(adapter: Adapter) -> Check:
    """Repeat a call with the same seed."""
    inputs = adapter.draw(torch.Generator().manual_seed(22), 2, 5)
    first = adapter.run(inputs, seed=1).out
    difference = max(largest_difference(adapter.run(inputs, seed=1).out, first) for _ in range(REPEATED))
    if difference:
        reason = f"{REPEATED + 1} equal calls with one seed don't all give the same output."
        return failed(reason, difference, 0.0)
    if not bool(first.isfinite().any()):
        return failed("its output isn't finite anywhere, so nothing else can be compared.", math.inf)
    return passed("the same seed gives the same bits", 0.0, 0.0)


class Result(NamedTuple):
    """The comparison of the outputs for one input; `problem` says why there are no outputs."""

    scenario: str
    inputs: Inputs
    error: float = math.inf
    allowed: float = 0.0
    problem: str = ""

    @property
    def is_wrong(self) -> bool:
        """Return True if the error is too large."""
        return not self.error <= self.allowed


@check("values", Attention, Encoding)
def check_values(adapter: Adapter) -> Iterator[Check]:
    """Compare outputs and weights with the oracle, in each scenario."""
    groups: dict[str, list[Result]] = {}
    is_first = True
    for seed in range(100, 100 + DRAWS):
        for scenario, inputs in adapter.scenarios(seed, 2 + seed % 7, 1 + seed % 6, 1 + seed % 3).items():
            if scenario in ("plain", "causal") or seed < 106:
                result = compare_values(adapter, scenario, inputs, is_first)
                is_first &= bool(result.problem)
                groups.setdefault(scenario.partition(",")[0], []).append(result)
    for scenario, name in NAMES.items():
        if scenario in groups:
            yield replace(summarize(adapter, groups[scenario]), name=name)


def compare_values(adapter: Adapter, scenario: str, inputs: Inputs, is_first: bool) -> Result:
    """Compare the outputs for one input, and note the mask arguments on which they depend."""
    try:
        outputs = adapter.run(inputs)
    except (UnexpectedOutput, CodeError) as raised:
        result = Result(scenario, inputs, problem=str(raised).rstrip("."))
    else:
        if is_first:
            adapter.adopt_convention(inputs, outputs)
        error, allowed, _ = adapter.compare(inputs, outputs, adapter.exact(inputs))
        result = Result(scenario, inputs, error, allowed)
    if isinstance(adapter, AttentionAdapter):
        for argument, unmasked in adapter.without_masks(inputs).items():
            is_judged = argument in adapter.judged or result.is_wrong
            if is_judged or adapter.depends_on_mask(inputs, unmasked, result.allowed):
                adapter.judged.add(argument)
    return result


def summarize(adapter: Adapter, results: list[Result]) -> Check:
    """Return the check of one group: the largest error, or the smallest input with a wrong output."""
    wrong = [result for result in results if result.is_wrong]
    if not wrong:
        worst = max(results, key=lambda result: result.error / max(result.allowed, 1e-300))
        return passed(f"{len(results)} inputs", worst.error, worst.allowed)
    first = min(wrong, key=lambda result: result.inputs.query.numel() + result.inputs.key.numel())
    if first.problem:
        return failed(f"{first.problem}.", first.error, first.allowed)
    smallest = smallest_failure(adapter, first.inputs)
    error, allowed, compared = adapter.compare(smallest, adapter.run(smallest), adapter.exact(smallest))
    reason = (
        f"the {compared} differ{'s' * (compared == 'output')} in {len(wrong)} of {len(results)} inputs "
        f"({first.scenario}); the smallest has b = {smallest.b}, t = {smallest.t}, s = {smallest.s}."
    )
    return failed(reason, error, allowed)


@check("gradients", depends_on=("values", "causal mask"))
def check_gradients(adapter: AttentionAdapter) -> Check:
    """Compare the gradients of queries, keys and values with the oracle's."""
    scenarios = adapter.scenarios(7)
    inputs = scenarios.get("causal", scenarios["plain"])
    call = adapter.call(inputs)
    paths = adapter.sequence_paths(call)
    exact, cotangent = oracle_gradients(adapter, inputs, torch.float64)
    plain, _ = oracle_gradients(adapter, inputs, torch.float32)
    out = top_tensors(adapter.candidate.call(call).output)[0]
    cotangent = adapter.to_layout(cotangent)
    if adapter.kind == "hf" and out.shape != cotangent.shape:
        cotangent = cotangent.transpose(1, 2)
    answer = adapter.answer(inputs, grads=tuple(paths), cotangent=cotangent.to(torch.float32).contiguous())
    worst = (0.0, 1.0, "")
    for path, roles in paths.items():
        grad, names = answer.grads.get(path), " and ".join(roles)
        if grad is None:
            return failed(f"no gradient reaches {names}.")
        expected, rounded = (torch.stack([grads[role] for role in roles]).sum(0) for grads in (exact, plain))
        error = largest_difference(adapter.from_layout(grad), expected)
        rounding = 256 * torch.finfo(torch.float32).eps * (1 + float(expected.abs().max()))
        allowed = 8 * largest_difference(rounded, expected) + rounding
        worst = max(worst, (error, allowed, names), key=lambda result: result[0] / result[1])
    weights = {} if adapter.weights is None else adapter.projections.weight
    used = {part.path for parts in weights.values() for part in parts}
    missing = [path for path, grad in answer.weight_grads.items() if grad is None and path in used]
    if missing:
        return failed(f"no gradient reaches {', '.join(missing)}.")
    error, allowed, names = worst
    return judge(error, allowed, "", f"the gradient of {names} differs.")


def oracle_gradients(
    adapter: AttentionAdapter, inputs: Inputs, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the oracle's gradients by role in this dtype, and the gradient of its output."""
    oracle = Attention(None if adapter.weights is None else adapter.weights.to(dtype), inputs.query.dtype)
    rounded = inputs.to(dtype)
    roles = ("query", "key", "value")
    leaves = {role: getattr(rounded, role).detach().clone().requires_grad_() for role in roles}
    out = oracle(rounded.but(**leaves)).out
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return dict(zip(leaves, grads, strict=True)), cotangent
