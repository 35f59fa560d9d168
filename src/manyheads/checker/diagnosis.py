"""Find the known bug that explains the outputs of a candidate, or describe where they are wrong.

A bug is reported if the oracle with that bug returns the same outputs and weights as the candidate, for
every kind of input that the candidate supports, and again for fresh inputs. Bugs that no input can tell
apart are all reported. If no single bug explains everything, pairs of bugs are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.checker.bugs import CONVENTIONS, FAMILY, Bug, compose, family_of, overridden_steps, override
from manyheads.checker.candidates.adapter import Adapter, D
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import Evidence, gather, with_and_without_weights
from manyheads.checker.checks.numerics import with_large_scores, with_low_scores
from manyheads.checker.checks.weights import with_empty_row
from manyheads.checker.encodings import Encoding
from manyheads.checker.oracle import Attention, Oracle, Outputs, Weights, largest_difference
from manyheads.shapes import sizes

# The names of the checks whose failure a known bug may explain.
EXPLAINED = {"values", "causal mask", "mask", "mask of keys", "padding", "added bias", "scale", "shapes",
             "one query", "empty rows", "large scores", "training and evaluation", "rows sum to one", "cache",
             "grouped heads"}  # fmt: skip
OVERFLOWS = ("no-max-subtracted", "masked-low", "masked-and-divided")  # bugs that need large scores
EMPTY_ROWS = ("empty-rows-nan", "empty-rows-uniform", "empty-rows-spoil-others")
REPEATS = 256  # calls over which dropout is averaged
WEIGHT_AXES = ("batch entry", "head", "query", "key")

Bugs = tuple[type[Oracle], ...]


class Trial(NamedTuple):
    """The names of bugs, and one variant of each."""

    names: tuple[str, ...]
    bugs: Bugs


@dataclass(frozen=True)
class Diagnosis:
    """A bug that was found, or a difference that no known bug explains.

    Attributes:
        bug: the names of the bug, or of two bugs joined by " + ", or "" if no known bug fits.
        description: a description of the bug or of the difference.
        fix: how to fix it.
        verified: whether the oracle with this bug returns the candidate's numbers.
        error: the largest difference between the two.
    """

    bug: str
    description: str
    fix: str = ""
    verified: bool = True
    error: float | None = None


def diagnose(adapter: Adapter) -> list[Diagnosis]:
    """Return the bugs of a candidate, or an empty list if all outputs are correct."""
    if (dropout := find_dropout(adapter)) is not None:
        return [dropout]
    evidence = gather(adapter, range(200, 203))
    if not evidence:
        return []
    readings, conventions = adapter.readings, adapter.conventions
    if any(explains(adapter, weights, steps, evidence) for weights in readings for steps in conventions):
        return find_rare_bugs(adapter, [()])
    if fits := search(adapter, evidence):
        return [diagnosis for diagnosis, _ in fits] + find_rare_bugs(adapter, [bugs for _, bugs in fits])
    description = "; ".join(("no known bug explains it", *describe_differences(adapter, evidence)))
    return [Diagnosis("", description, verified=False)]


# -- search ----------------------------------------------------------------------------------------


def search(adapter: Adapter, evidence: list[Evidence]) -> list[tuple[Diagnosis, Bugs]]:
    """Return the single bugs that explain everything, or else the pairs that do."""
    singles = [Trial((bug.name,), (variant,)) for bug in eligible_bugs(adapter) for variant in bug.variants]
    conventions = CONVENTIONS.get(adapter.oracle, [()])
    fits = list(find_fits(adapter, evidence, singles, conventions))
    if not fits:
        # A bug that changes none of these outputs can't be part of a pair that explains them.
        relevant = [trial for trial in singles if has_effect(adapter, trial.bugs, evidence)]
        extremes = list(dict.fromkeys((conventions[0], conventions[-1])))
        fits = list(find_fits(adapter, evidence, pairs(relevant, adapter.oracle), extremes))
    fresh = gather(adapter, range(300, 302))
    results: dict[frozenset[str], tuple[Diagnosis, Bugs]] = {}
    for names, bugs, weights in fits:
        error = max((difference(adapter, weights, bugs, call) for call in fresh), default=math.inf)
        if error <= adapter.oracle.tolerance:
            results.setdefault(frozenset(names), (describe_fit(adapter, names, error), bugs))
    return list(results.values())


def eligible_bugs(adapter: Adapter) -> Iterator[Bug]:
    """Yield the bugs that the candidate can have."""
    # Outputs with this bug are wrong for large scores only, or the same as without the sink.
    excluded = {"masked-and-divided"}
    if isinstance(adapter, AttentionAdapter):
        excluded |= {"mask-dropped-with-weights"} if adapter.always_weights else set()
        excluded |= {"scaled-by-heads"} if adapter.heads == 1 else set()  # the same as unscaled
        excluded |= {"average-inverted"} if "average" not in adapter.arguments else set()
    yield from (bug for bug in family_of(adapter.oracle) if bug.name not in excluded)


def pairs(trials: list[Trial], oracle: type[Oracle]) -> Iterator[Trial]:
    """Yield all pairs of two different bugs, in both orders if both override the same step."""
    steps = {trial: overridden_steps(trial.bugs, oracle) for trial in trials}
    for a, b in combinations(trials, 2):
        if a.names != b.names:
            yield Trial(a.names + b.names, a.bugs + b.bugs)
            if steps[a] & steps[b]:
                yield Trial(b.names + a.names, b.bugs + a.bugs)


def find_fits(
    adapter: Adapter, evidence: list[Evidence], trials: Iterable[Trial], conventions: list[Bugs]
) -> Iterator[tuple[tuple[str, ...], Bugs, Weights | None]]:
    """Yield (names, bugs with the convention, weights) of the trials that explain all evidence."""
    readings = adapter.readings
    # Conventions of attention differ only under a mask. So one call without a mask excludes most bugs early.
    unmasked = [call for call in evidence if call.scenario.startswith("plain") and not call.inputs.causal]
    quick = unmasked[:1] if adapter.oracle is Attention else []
    worst_first = sorted(
        evidence, key=lambda call: -largest_difference(call.outputs.out, adapter.exact(call.inputs).out)
    )
    for names, bugs in trials:
        fits = (
            (names, convention + bugs, weights)
            for weights in readings
            if explains(adapter, weights, bugs, quick)
            for convention in conventions
            if explains(adapter, weights, convention + bugs, worst_first)
        )
        if (fit := next(fits, None)) is not None:
            yield fit


def describe_fit(adapter: Adapter, names: tuple[str, ...], error: float) -> Diagnosis:
    """Return the diagnosis that reports bugs which explain all evidence."""
    size = ""
    if adapter.oracle is Attention and any("scale" in name or name == "multiplied" for name in names):
        size = f" (d = {D if adapter.weights is None else adapter.weights.head_size})"
    description = " and ".join(FAMILY[name].description for name in names)
    fix = "; ".join(dict.fromkeys(FAMILY[name].fix for name in names))
    power = "the last bit" if error == 0 else f"1e{math.ceil(math.log10(error))}"
    description = f"it agrees to {power} with {adapter.oracle.noun} {description}{size}"
    return Diagnosis(" + ".join(names), description, fix, True, error)


def explains(adapter: Adapter, weights: Weights | None, bugs: Bugs, evidence: list[Evidence]) -> bool:
    """Return True if the oracle with these bugs returns the same as the candidate, in all calls."""
    tolerance = adapter.oracle.tolerance
    return all(difference(adapter, weights, bugs, call) <= tolerance for call in evidence)


def difference(adapter: Adapter, weights: Weights | None, bugs: Bugs, call: Evidence) -> float:
    """Return the largest difference between the candidate and the oracle with these bugs."""
    expected = run_oracle(adapter, weights, bugs, call)
    return math.inf if expected is None else compare_outputs(adapter, call, call.outputs, expected)


def run_oracle(adapter: Adapter, weights: Weights | None, bugs: Bugs, call: Evidence) -> Outputs | None:
    """Return the outputs of the oracle with these bugs, or None if these inputs make it fail."""
    try:
        return compose(adapter.oracle, *bugs)(weights, call.inputs.query.dtype)(call.exact_inputs)
    except (RuntimeError, ValueError, IndexError, KeyError, ZeroDivisionError, TypeError):
        return None


def compare_outputs(adapter: Adapter, call: Evidence, outputs: Outputs, expected: Outputs) -> float:
    """Return the largest difference between two outputs for one call, weights included."""
    if expected.out.shape != outputs.out.shape:
        return math.inf
    if call.scenario != "empty":
        outputs, expected = (adapter.ignore_padding(call.inputs, each) for each in (outputs, expected))
    error = adapter.oracle.difference(outputs.out, expected.out)
    if outputs.weights is not None and call.inputs.need_weights and error <= adapter.oracle.tolerance:
        if expected.weights is None:
            return math.inf
        # Returned scores may be masked by the lowest finite number, or by -inf where two masks are added.
        lowest = torch.finfo(outputs.weights.dtype).min
        pair = (w.masked_fill(w <= lowest, -math.inf) for w in (outputs.weights, expected.weights))
        error = max(error, adapter.oracle.difference(*pair))
    return error


def has_effect(adapter: Adapter, bugs: Bugs, evidence: list[Evidence]) -> bool:
    """Return True if these bugs change the outputs of the oracle in some call."""
    weights = adapter.readings[0]
    for call in evidence:
        outputs = run_oracle(adapter, weights, bugs, call)
        if outputs is None or (issubclass(adapter.oracle, Encoding) and bool(outputs.out.isnan().any())):
            continue  # NaN in an encoding matches anything, so a pair with this bug would fit by accident
        if compare_outputs(adapter, call, outputs, adapter.exact(call.inputs)) > adapter.oracle.tolerance:
            return True
    return False


# -- bugs that need special inputs -----------------------------------------------------------------


def find_dropout(adapter: Adapter) -> Diagnosis | None:
    """Return a diagnosis if outputs in evaluation mode depend on the seed, else None.

    It is dropout if the average over many seeds is correct.
    """
    inputs = adapter.draw(torch.Generator().manual_seed(31), 1, 4)
    outs: list[Tensor] = []
    for seed in range(REPEATS):
        outputs = adapter.attempt(inputs, strict=True, seed=seed)
        if outputs is None:
            return None
        outs.append(outputs.out.to(torch.float64))
        if len(outs) == 3 and not any(largest_difference(out, outs[0]) for out in outs):
            return None
    drawn = torch.stack(outs)
    errors = (drawn.mean(0) - adapter.exact(inputs).out).abs()
    fix = "drop in training only: F.dropout(x, p, training=self.training), or a module nn.Dropout"
    if float((errors / (drawn.std(0) / REPEATS**0.5).clamp_min(1e-9)).max()) < 6:  # standard errors
        description = f"it applies dropout in evaluation: the average over {REPEATS} seeds is right"
        return Diagnosis("dropout-left-on", description, fix, True, float(errors.max()))
    description = (
        "in evaluation its output depends on the random seed, and doesn't average to the right one: "
        "something random is left on, and something else is wrong too"
    )
    return Diagnosis("", description, fix, False)


def find_rare_bugs(adapter: Adapter, before: list[Bugs]) -> list[Diagnosis]:
    """Return the bugs that only empty rows or large scores reveal, in addition to the bugs `before`."""
    if not isinstance(adapter, AttentionAdapter):
        return []
    seeds, weights = (41, 42, 43), adapter.readings[0]
    empty = [inputs for seed in seeds if (inputs := with_empty_row(adapter, seed)) is not None]
    empty = [variant for inputs in empty for variant in with_and_without_weights(adapter, inputs)]
    large = [with_large_scores(adapter, seed) for seed in seeds]
    masked = [inputs for seed in seeds for inputs in with_low_scores(adapter, seed)]
    diagnoses: list[Diagnosis] = []
    for scenario, names, cases, tolerance in (
        ("empty", EMPTY_ROWS, empty, adapter.oracle.tolerance),
        ("large", OVERFLOWS, large, 1e-3),
        ("large, masked", OVERFLOWS, masked, 1e-3),
    ):
        calls = [
            Evidence(scenario, inputs, outputs)
            for inputs in cases
            if (outputs := adapter.attempt(inputs, strict=True)) is not None
        ]
        if len(calls) < len(cases):
            continue
        # A candidate may take another code path when it returns weights, so some of its calls may be correct.
        # A bug has to explain the wrong calls only.
        wrong = [
            call
            for call in calls
            if min(difference(adapter, weights, bugs, call) for bugs in before) > tolerance
        ]
        for name in names if wrong else ():
            trials = [(*bugs, variant) for bugs in before for variant in FAMILY[name].variants]
            error = min(max(difference(adapter, weights, bugs, call) for call in wrong) for bugs in trials)
            if error <= tolerance:
                diagnoses.append(describe_fit(adapter, (name,), error))
                break
        if scenario == "large" and wrong:
            break  # large scores under a mask would only show the same bug again
    return diagnoses


# -- unexplained differences -----------------------------------------------------------------------


def is_wrong(adapter: Adapter, call: Evidence) -> bool:
    """Return True if the outputs of the candidate are wrong."""
    return not explains(adapter, adapter.readings[0], adapter.convention, [call])


def describe_differences(adapter: Adapter, evidence: list[Evidence]) -> Iterator[str]:
    """Describe a difference that no known bug explains: its size, and which calls, heads and entries."""
    wrong = [call for call in evidence if is_wrong(adapter, call)]
    first = min(wrong, key=lambda call: (call.scenario != "plain", call.inputs.query.numel()))
    outputs, expected = first.outputs, adapter.exact(first.inputs)
    if outputs.out.shape != expected.out.shape:
        yield f"its output is {sizes(outputs.out)}, expected {sizes(expected.out)}"
        return
    wrong_names = {call.scenario for call in wrong}
    if correct_names := sorted({call.scenario for call in evidence} - wrong_names):
        yield f"wrong with {', '.join(sorted(wrong_names))}, and right with {', '.join(correct_names)}"
    got, right = outputs.weights, expected.weights
    outs_alone = [replace(call, outputs=Outputs(call.outputs.out)) for call in wrong]
    if got is not None and right is not None and not any(is_wrong(adapter, call) for call in outs_alone):
        details = describe_weights(adapter, got, right)
        yield f"the output is right, and the returned weights are wrong{details}"
        return
    yield from describe_relation(adapter, wrong)
    if got is not None and right is not None and got.shape == right.shape:
        if adapter.oracle.difference(got, right) <= adapter.oracle.tolerance:
            yield "its weights are right, so the bug is in mixing, merging heads or the output"
        else:
            entries = locate_entries(got, right, WEIGHT_AXES)
            yield f"its weights are wrong already, so the bug is in scores, mask or softmax{entries}"
    if is_right_alone(adapter, wrong):
        yield "one sequence alone is right, several together are wrong, so batch entries are mixed up"
    yield from describe_wrong_heads(adapter, wrong)
    entries = locate_entries(outputs.out, expected.out, adapter.oracle.axes[expected.out.dim()])
    yield f"the output is wrong{entries}"


def describe_weights(adapter: Adapter, got: Tensor, expected: Tensor) -> str:
    """Describe how returned weights differ: in their shape, by a factor, or in which entries."""
    if got.shape != expected.shape:
        return f": of {got.shape[1]} heads, expected {expected.shape[1]}"
    factor = float((got.to(torch.float64) * expected).sum() / (expected * expected).sum())
    error = adapter.oracle.difference(got, expected * factor)
    if abs(factor - 1) > 1e-3 and error <= adapter.oracle.tolerance:
        return f": {factor:.6g} times the right ones"
    return locate_entries(got, expected, WEIGHT_AXES)


def locate_entries(got: Tensor, expected: Tensor, axes: tuple[str, ...]) -> str:
    """Describe at which indices of which axes two tensors differ, or "throughout"."""
    tolerance = 1e-5 * max(1.0, float(expected.abs().nan_to_num().max()))
    is_equal = torch.isclose(got.to(torch.float64), expected, rtol=1e-4, atol=tolerance, equal_nan=True)
    places = []
    for axis, name in enumerate(axes):
        indices = (~is_equal.movedim(axis, 0).flatten(1).all(1)).nonzero().flatten().tolist()
        if 0 < len(indices) <= is_equal.shape[axis] // 2:
            places.append(f"{name} {', '.join(map(str, indices[:6]))}{', …' if len(indices) > 6 else ''}")
    return f" in {' and '.join(places)} only" if places else " throughout"


def describe_relation(adapter: Adapter, wrong: list[Evidence]) -> Iterator[str]:
    """Describe a factor, a constant, or a scale of the scores that fully explains the outputs."""
    outs = [(call.outputs.out.to(torch.float64), adapter.exact(call.inputs).out) for call in wrong]
    outs = [(got, expected) for got, expected in outs if got.shape == expected.shape]
    if not all(bool(out.isfinite().all()) for pair in outs for out in pair):
        yield "some outputs are not finite"
        return
    got, expected = (torch.cat([pair[n].flatten() for pair in outs]) for n in (0, 1))
    factor = float((got @ expected) / (expected @ expected))
    rows = torch.cat([(got - expected).flatten(0, -2) for got, expected in outs])
    if adapter.oracle.difference(got, expected * factor) <= adapter.oracle.tolerance:
        yield f"the output is {factor:.6g} times the right one"
    elif len(rows) > 1 and Attention.difference(rows, rows[:1].expand_as(rows)) <= 1e-4:
        yield "the output differs by the same vector for every query, as a bias would"
    elif adapter.oracle is Attention and (scale := find_scale(adapter, wrong)) is not None:
        d = adapter.weights.head_size if adapter.weights is not None else wrong[0].inputs.query.shape[-1]
        yield f"it agrees to 1e-4 with scores multiplied by {scale:.5g}, where 1/√d = {d**-0.5:.5g} (d = {d})"


def find_scale(adapter: Adapter, wrong: list[Evidence]) -> float | None:
    """Return a scale of the scores that explains the outputs, found on ever finer grids, or None."""

    def error(logarithm: float) -> float:
        scaled = override(scale=lambda _: math.exp(logarithm))
        return max(difference(adapter, adapter.readings[0], (scaled,), call) for call in wrong[:4])

    best, step = -1.0, 0.1
    for reach in (50, *[10] * 7):
        best = min((best + step * n for n in range(-reach, reach + 1)), key=error)
        step /= 10
    return math.exp(best) if error(best) <= 1e-4 else None


def is_right_alone(adapter: Adapter, wrong: list[Evidence]) -> bool:
    """Return True if the first sequence of each batch has the correct output when it is computed alone."""
    for call in wrong[:2]:
        tensors = call.inputs.tensors().items()
        alone = call.inputs.but(**{name: x[:1] for name, x in tensors if name not in ("sink", "bias")})
        outputs = adapter.attempt(alone)
        if outputs is None or is_wrong(adapter, Evidence(call.scenario, alone, outputs)):
            return False
    return True


def describe_wrong_heads(adapter: Adapter, wrong: list[Evidence]) -> Iterator[str]:
    """Describe which heads are wrong, if only some are and the output projection can be inverted."""
    weights = adapter.weights
    if weights is None or "o" not in weights.weight or weights.heads < 2:
        return
    o = weights.weight["o"].to(torch.float64)
    if o.shape[0] < o.shape[1]:
        return
    inverse, differs = torch.linalg.pinv(o), torch.zeros(weights.heads, dtype=torch.bool)
    for call in wrong:
        outs = call.outputs.out.to(torch.float64), adapter.exact(call.inputs).out
        if outs[0].shape != outs[1].shape or not bool(outs[0].isfinite().all()):
            return
        got, expected = ((out @ inverse.mT).unflatten(-1, (weights.heads, -1)) for out in outs)
        differs |= ((got - expected).abs() > 1e-3 * expected.abs().max()).any(-1).flatten(0, -2).any(0)
    heads = differs.nonzero().flatten().tolist()
    if 0 < len(heads) < weights.heads:
        subject, verb = ("heads", "are") if len(heads) > 1 else ("head", "is")
        yield f"only {subject} {', '.join(map(str, heads))} of {weights.heads} {verb} wrong"
