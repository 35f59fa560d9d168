"""Checks of values: shapes, determinism, outputs and gradients against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.checker.bugs.calls import BUGS
from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.documentation import is_for_inference, says
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.candidates.parameters import ParameterView
from manyheads.checker.checks.evidence import run_sequence, smallest_failure, with_and_without_weights
from manyheads.checker.checks.registry import Check, check, convention, failed, judge, passed, skipped
from manyheads.checker.encodings import Encoding
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Attention, Inputs, Oracle, largest_difference
from manyheads.checker.overrides import compose, override
from manyheads.checker.parts import TableBias

DRAWS = 20  # inputs for which values are compared
REPEATED = 15  # calls that must return the same bits as the first
# The names of the checks by scenario.
NAMES = {"plain": "values", "causal": "causal mask", "mask": "mask", "keys": "mask of keys",
         "padding": "padding", "positions": "positions", "added": "added bias", "scale": "scale",
         "softcap": "softcap", "window": "window", "head mask": "head mask", "grouped": "grouped heads",
         "segments": "segments", "vectors": "position vectors", "earlier": "earlier tokens",
         "one query": "one query", "grid": "grid"}  # fmt: skip


def divide_by_constant(exp: Tensor) -> Tensor:
    """Return exponentials divided by their sum, through which no gradient passes."""
    return exp / exp.sum(-1, keepdim=True).detach()


# Values are right and gradients wrong if none reaches the sum by which the softmax divides.
STOPPED = [
    override(normalize=lambda o, scores: (scores - scores.logsumexp(-1, keepdim=True).detach()).exp()),
    override(normalize=lambda o, scores: divide_by_constant((scores - scores.amax(-1, keepdim=True)).exp())),
]
NOT_TRAINED = r"\b(?:not|never|isn't|aren't) (?:be )?(?:trained|learned|updated)\b|\buntrained\b|\bfrozen\b"


@check("shapes", Attention, Encoding)
def check_shapes(adapter: Adapter) -> Check:
    """Run several sizes. `run` raises for an output of another shape."""
    if adapter.width_error:
        return failed(adapter.width_error)
    generator = torch.Generator().manual_seed(3)
    for sizes in ((3, 5, 7), (2, 7, 7), (1, 9, 3)):
        inputs = adapter.draw(generator, *sizes)
        try:
            for variant in with_and_without_weights(adapter, inputs):
                adapter.run(variant)
        except CodeError as error:
            if inputs.t < 9 or not error.is_refusal:
                raise
            return passed(f"9 tokens are refused: {error.reason}")
        takes_average = isinstance(adapter, AttentionAdapter) and "average-weights" in adapter.arguments
        if takes_average and "weights" in adapter.features:
            adapter.run(inputs.but(need_weights=True, average_weights=True))
    return passed()


@check("determinism", Attention, Encoding)
def check_determinism(adapter: Adapter) -> Check:
    """Repeat a call with the same seed."""
    inputs = adapter.draw(torch.Generator().manual_seed(22), 2, 5)
    first = adapter.run(inputs, seed=1).out
    difference = max(largest_difference(adapter.run(inputs, seed=1).out, first) for _ in range(REPEATED))
    if difference:
        new = [run_sequence(adapter, [adapter.call(inputs, seed=1)])[0] for _ in range(2)]  # of new instances
        random = f"{REPEATED + 1} equal calls with one seed don't all give the same output."
        stateful = "its output depends on earlier calls: equal calls of a new instance give the same output."
        reason = random if largest_difference(*new) else stateful
        return failed(reason, difference, 0.0, adapter.cache_bug)
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
    is_refusal: bool = False

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
        for scenario, inputs in adapter.scenarios(
            seed, 2 + seed % 7, 1 + seed % (adapter.length + 1), 1 + seed % 3
        ).items():
            if scenario in ("plain", "causal") or seed < 106:
                result = compare_values(adapter, scenario, inputs, is_first)
                is_first &= bool(result.problem)
                groups.setdefault(scenario.partition(",")[0], []).append(result)
    for part in adapter.parts:
        if isinstance(part, TableBias) and part.kind == "buckets":  # which short inputs don't distinguish
            inputs = adapter.draw(torch.Generator().manual_seed(10), 1, part.max_distance + 5)
            groups["plain"].append(compare_values(adapter, "plain", inputs, False))
    order = [*NAMES, *groups]
    for scenario in sorted(groups, key=order.index):
        first, _, argument = scenario.partition(" (")
        name = NAMES[first] + f" ({argument}" * bool(argument)
        yield replace(summarize(adapter, groups[scenario]), name=name)


def compare_values(adapter: Adapter, scenario: str, inputs: Inputs, is_first: bool) -> Result:
    """Compare the outputs for one input, and note the mask arguments on which they depend."""
    try:
        outputs = adapter.run(inputs)
    except (UnexpectedOutput, CodeError) as raised:
        is_refusal = isinstance(raised, CodeError) and raised.is_refusal
        result = Result(scenario, inputs, problem=str(raised).rstrip("."), is_refusal=is_refusal)
    else:
        if is_first:
            adapter.adopt_convention(inputs, outputs)
        result = Result(scenario, inputs, 0.0)
        if not adapter.unknown:
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
    if not wrong and adapter.unknown:
        return Check("", "not judged", adapter.unknown)
    if not wrong:
        worst = max(results, key=lambda result: result.error / max(result.allowed, 1e-300))
        return passed(f"{len(results)} inputs", worst.error, worst.allowed)
    if wrong[0].scenario == "positions" and all(result.is_refusal for result in results):
        return skipped(f"it refuses positions that don't begin at 0: {wrong[0].problem}")
    first = min(wrong, key=lambda result: result.inputs.query.numel() + result.inputs.key.numel())
    if first.problem:
        return failed(f"{first.problem}.", first.error, first.allowed)
    smallest = smallest_failure(adapter, first.inputs)
    error, allowed, compared = adapter.compare(smallest, adapter.run(smallest), adapter.exact(smallest))
    scenario = first.scenario.replace(", ", " + ")
    reason = (
        f"the {compared} differ{'s' * (compared == 'output')} in {len(wrong)} of {len(results)} inputs "
        f"({scenario}); the smallest has b = {smallest.b}, t = {smallest.t}, s = {smallest.s}."
    )
    return failed(reason, error, allowed)


@check("gradients", needs_oracle=True, depends_on=("values", "causal mask"))
def check_gradients(adapter: AttentionAdapter) -> Check:
    """Compare the gradients of queries, keys and values with the oracle's."""
    scenarios = adapter.scenarios(7)
    inputs = scenarios.get("causal", scenarios["plain"])
    call = adapter.call(inputs)
    paths = adapter.sequence_paths(call)
    cotangent = draw_cotangent(adapter.exact(inputs).out)
    out = top_tensors(adapter.candidate.call(call).output)[0]
    if len(out) and out.numel() > cotangent.numel():  # tokens that don't attend are returned too
        cotangent = adapter.add_extra(cotangent, 0.0)
    cotangent = cotangent.reshape(out.shape) if adapter.asks_first else adapter.to_layout(cotangent)
    if adapter.kind == "hf" and out.shape != cotangent.shape:
        cotangent = cotangent.transpose(1, 2)
    answer = adapter.answer(inputs, grads=tuple(paths), cotangent=cotangent.to(torch.float32).contiguous())
    gradients = (*answer.grads.values(), *answer.weight_grads.values())
    is_meant = is_for_inference(adapter.description.source, adapter.text)
    if is_meant and all(grad is None for grad in gradients):
        return convention("no gradient reaches its inputs: its code is for inference.")
    for path, roles in paths.items():
        if answer.grads.get(path) is None:
            return failed(f"no gradient reaches {' and '.join(roles)}.", bug=BUGS["gradient-stopped"])
    weights = {} if adapter.weights is None else adapter.projections.weight
    used = {part.path for parts in weights.values() for part in parts} | trained_parts(adapter, inputs)
    missing = [path for path, grad in answer.weight_grads.items() if grad is None and path in used]
    if missing:
        return failed(f"no gradient reaches {', '.join(missing)}.", bug=BUGS["gradient-stopped"])
    error, allowed, names = compare_gradients(adapter, inputs, paths, answer.grads)
    is_stopped = error > allowed and any(
        found <= most
        for stopped in STOPPED
        for found, most, _ in [compare_gradients(adapter, inputs, paths, answer.grads, stopped)]
    )
    bug = BUGS["gradient-stopped"] if is_stopped else None
    reason = ": none reaches the sum by which the softmax divides" if is_stopped else ""
    return judge(error, allowed, "", f"the gradient of {names} differs{reason}.", bug)


def compare_gradients(
    adapter: AttentionAdapter,
    inputs: Inputs,
    paths: Mapping[str, tuple[str, ...]],
    grads: Mapping[str, Tensor | None],
    *bugs: type[Oracle],
) -> tuple[float, float, str]:
    """Return (error, allowed error, roles) of the gradient farthest from the oracle's with these bugs."""
    exact, plain = (
        oracle_gradients(adapter, inputs, dtype, *bugs) for dtype in (torch.float64, torch.float32)
    )
    worst = (0.0, 1.0, "")
    for path, roles in paths.items():
        grad = grads[path]
        assert grad is not None
        expected, rounded = (torch.stack([each[role] for role in roles]).sum(0) for each in (exact, plain))
        error = largest_difference(adapter.join_gradient(grad)[:, : expected.shape[1]], expected)
        rounding = 256 * torch.finfo(torch.float32).eps * (1 + float(expected.abs().max()))
        allowed = 8 * largest_difference(rounded, expected) + rounding
        worst = max(worst, (error, allowed, " and ".join(roles)), key=lambda result: result[0] / result[1])
    return worst


def trained_parts(adapter: AttentionAdapter, inputs: Inputs) -> set[str]:
    """Return the parameters of parts on which this output depends, unless some aren't trained."""
    if adapter.weights is None or says(adapter.text, NOT_TRAINED):
        return set()
    weights, leaves = adapter.weights.to(torch.float64), dict(adapter.weights.other)
    if adapter.projections.sink is not None and weights.sink is not None:
        leaves[adapter.projections.sink] = weights.sink
    leaves = {
        path: x.detach().to(torch.float64).requires_grad_()
        for path, x in leaves.items()
        if x.is_floating_point()
    }
    sink = weights.sink if weights.sink is None else leaves.get(str(adapter.projections.sink), weights.sink)
    oracle = adapter.right(replace(weights, other={**weights.other, **leaves}, sink=sink), inputs.query.dtype)
    out = oracle(inputs.to(torch.float64)).out
    if not out.requires_grad:
        return set()
    grads = torch.autograd.grad(out, list(leaves.values()), draw_cotangent(out), allow_unused=True)
    return {path for path, grad in zip(leaves, grads, strict=True) if grad is not None and bool(grad.any())}


@check("projections")
def check_shared_projections(adapter: AttentionAdapter) -> Iterator[Check]:
    """Report projections of q, k and v that are one layer, unless documentation says that they are shared."""
    shared, weight = adapter.description.shared, adapter.projections.weight if adapter.weights else {}
    if not shared or not {*"qkv"} <= {*weight}:
        return

    def read(role: str) -> list[ParameterView]:
        return [replace(view, path=shared.get(view.path, view.path)) for view in weight[role]]

    roles = [role for role in weight if read(role) == read("q")]
    is_meant = says(
        adapter.text, r"(?<!not )\b(?:share[sd]?|sharing|tied)\b", r"\b(?:proj|weight|layer|matri|linear)"
    )
    if {*"qkv"} <= {*roles} and not is_meant:
        reason = f"one layer, {read('q')[0].path.rpartition('.')[0]}, projects {', '.join(roles)}."
        yield replace(failed(reason, bug=BUGS["projections-shared"]), name="projections")


def oracle_gradients(
    adapter: AttentionAdapter, inputs: Inputs, dtype: torch.dtype, *bugs: type[Oracle]
) -> dict[str, Tensor]:
    """Return the gradients by role of the oracle with these bugs in this dtype."""
    weights = None if adapter.weights is None else adapter.weights.to(dtype)
    oracle = compose(adapter.right, *bugs)(weights, inputs.query.dtype)
    rounded = inputs.to(dtype)
    roles = ("query", "key", "value")
    leaves = {role: getattr(rounded, role).detach().clone().requires_grad_() for role in roles}
    out = oracle(rounded.but(**leaves)).out
    grads = torch.autograd.grad(out, list(leaves.values()), draw_cotangent(out))
    return dict(zip(leaves, grads, strict=True))


def draw_cotangent(out: Tensor) -> Tensor:
    """Return the gradient of an output that all comparisons use, of its shape and dtype."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out)
