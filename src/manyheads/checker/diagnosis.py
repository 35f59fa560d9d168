"""Find the known bug that explains the outputs of a candidate, or describe where they are wrong.

A bug is reported if the oracle with that bug returns the same outputs and weights as the candidate, for
every kind of input that the candidate supports, and again for fresh inputs. Bugs that no input can tell
apart are all reported. If no single bug explains everything, pairs of bugs are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.checker.bugs import FAMILY, Bug, compose, family_of, overridden_steps, override
from manyheads.checker.bugs.calls import BUGS
from manyheads.checker.bugs.parts import part_bugs
from manyheads.checker.candidates.adapter import Adapter, D
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.documentation import has_default, mask_polarity
from manyheads.checker.checks.conventions import REPLACED_BIAS
from manyheads.checker.checks.evidence import Evidence, gather, long_call, smallest_failure
from manyheads.checker.checks.numerics import with_large_scores, with_low_scores
from manyheads.checker.checks.registry import Check
from manyheads.checker.encodings import Encoding
from manyheads.checker.oracle import Attention, Oracle, Outputs, Weights, exact, largest_difference
from manyheads.checker.overrides import transform
from manyheads.checker.parts import Part, Window
from manyheads.shapes import sizes

# The names of the checks whose failure a known bug may explain.
EXPLAINED = {"values", "causal mask", "mask", "mask of keys", "padding", "added bias", "scale", "shapes",
             "one query", "large scores", "training and evaluation", "rows sum to one", "cache",
             "grouped heads", "segments", "position vectors", "earlier tokens"}  # fmt: skip
OVERFLOWS = ("no-max-subtracted", "masked-low", "masked-and-divided")  # bugs that need large scores
SCALES = ("scale", "unscaled", "multiplied")  # with which names of bugs of the scale begin
KEPT = ("context-kept", "mask-kept", "cache-unasked", "cache-not-emptied")  # bugs that use what a call kept
LARGE_TOLERANCE = 1e-3  # of outputs at large scores
ORACLE_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, ZeroDivisionError, TypeError)
REPEATS = 256  # calls over which dropout is averaged
WEIGHT_AXES = ("batch entry", "head", "query", "key")

Bugs = tuple[type[Oracle], ...]
Parts = tuple[Part, ...]
Pair = tuple[Tensor, Tensor, str]  # the expected and the given map, and "weights" or "output"


class Trial(NamedTuple):
    """Attention with some parts and bugs, which may explain the evidence, with its weights once it does."""

    names: tuple[str, ...]
    bugs: Bugs
    parts: Parts = ()  # one of these may have a bug too
    weights: Weights | None = None

    @property
    def steps(self) -> Bugs:
        """The oracles of the parts and the bugs."""
        return steps_of(self.parts) + self.bugs


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


def diagnose(adapter: Adapter, takes_pairs: bool = True) -> list[Diagnosis]:
    """Return the bugs of a candidate, or an empty list if all outputs are correct.

    Args:
        adapter: The adapter of the candidate.
        takes_pairs: Whether to try pairs of bugs, which takes longest.

    Returns:
        The bugs, or a description of the difference if none fits.
    """
    if (dropout := find_dropout(adapter)) is not None:
        return [dropout]
    evidence = gather(adapter, range(200, 203))
    if not evidence:
        return []
    parts = steps_of(adapter.parts)
    rights = [(weights, parts + steps) for weights in adapter.readings for steps in adapter.conventions]
    if any(explains(adapter, *right, evidence) for right in rights):
        return find_rare_bugs(adapter, [parts])
    sets = [adapter.parts] if adapter.parts else adapter.plausible
    searches = [(plausible, search) for plausible in sets]
    if takes_pairs:  # last of all if something is unexplained, which a plausible part may explain
        place = len(sets) if adapter.unknown else 1 + sets.index(adapter.parts)
        searches.insert(place, (adapter.parts, search_pairs))
    for plausible, find in searches:
        if fits := find(adapter, evidence, plausible):
            if plausible != adapter.parts:  # what it has besides a bug
                adapter.parts = plausible
                adapter.notes += [str(part) for part in plausible]
            found = [describe_fit(adapter, fit.names, error) for fit, error in fits]
            return found + find_rare_bugs(adapter, [fit.steps for fit, _ in fits])
    # A bug that mixes tokens does so within each step.
    uncached = [call for call in evidence if not is_cached(call)]
    for plausible in sets if adapter.unknown and len(uncached) < len(evidence) else ():
        if fits := search(adapter, uncached, plausible):
            adapter.parts = plausible
            named = [describe_fit(adapter, fit.names, error) for fit, error in fits]
            return [replace(each, description=f"without a cache, {each.description}") for each in named]
    for plausible in sets if adapter.unknown else [adapter.parts]:
        if by_scenario := search_scenarios(adapter, evidence, plausible):
            return by_scenario
    if (cancelled := find_cancelled_mask(adapter, evidence)) is not None:
        return [cancelled]
    description = "; ".join(("no known bug explains it", *describe_differences(adapter, evidence)))
    return [Diagnosis("", description, verified=False)]


def find_cancelled_mask(adapter: Adapter, evidence: list[Evidence]) -> Diagnosis | None:
    """Return the bug of a mask of keys that changes the rows of padded queries alone, and these by rounding.

    The same number, such as −10000, is then added to all keys of a query, which the softmax cancels. No
    oracle gives these numbers: they depend on how the candidate rounds each score.
    """
    wrong = [call for call in evidence if is_wrong(adapter, call)]
    rounding, changes = adapter.oracle.tolerance, []
    for call in wrong:
        x, padding = call.inputs, call.inputs.padding
        without = None if padding is None else adapter.attempt(x.but(padding=None, form=None))
        if padding is None or without is None or padding.shape[-1] != x.t or call.outputs.out.dim() != 3:
            return None
        size = 1 + without.out.abs().max()
        change = ((call.outputs.out - without.out).abs() / size).amax(-1)  # [b, t]
        if not bool((change[padding] <= rounding).all()):
            return None
        changes.append(change[~padding])
    change = torch.cat(changes) if changes else torch.zeros(0)
    if not bool((change > rounding).any()) or not bool((change < 500 * rounding).all()):
        return None
    bug = FAMILY["mask-transposed"]
    reason = "which adds the same number to all keys of a query, so that the softmax cancels it"
    return Diagnosis(bug.name, f"it is attention {bug.description}, {reason}", bug.fix)


def is_cached(call: Evidence) -> bool:
    """Return True if the call is a step with a cache."""
    return call.scenario.startswith("cache")


def steps_of(parts: Parts) -> Bugs:
    """Return the oracles of parts."""
    return tuple(part.oracle for part in parts)


# -- search ----------------------------------------------------------------------------------------


def search(adapter: Adapter, evidence: list[Evidence], parts: Parts) -> list[tuple[Trial, float]]:
    """Return the single bugs beside these parts that explain everything, and their errors."""
    singles = list(single_bugs(adapter, parts))
    conventions = adapter.conventions
    fits = list(find_fits(adapter, evidence, singles, conventions))
    for note, steps in possible_conventions(adapter):
        if not fits and (fits := list(find_fits(adapter, evidence, singles, [(*conventions[0], steps)]))):
            adapter.notes.append(note)
    return confirm(adapter, fits, evidence)


def search_pairs(adapter: Adapter, evidence: list[Evidence], parts: Parts) -> list[tuple[Trial, float]]:
    """Return the pairs of bugs beside these parts that explain everything, and their errors."""
    if adapter.unknown and not (isinstance(adapter, AttentionAdapter) and adapter.is_order_unknown):
        return []  # no pair of bugs explains a parameter without a known part
    # A bug that changes none of these outputs can't be part of a pair that explains them.
    # Nor can one that changes calls which are right.
    right = [call for call in evidence if adapter.is_right(call.inputs, call.outputs)]
    relevant = [
        trial
        for trial in single_bugs(adapter, parts)
        if has_effect(adapter, trial.steps, evidence) and not has_effect(adapter, trial.steps, right)
    ]
    first = relevant
    if isinstance(adapter, AttentionAdapter) and adapter.is_order_unknown:
        # The order of tokens matters, so it does with one of the two bugs.
        first = [trial for trial in relevant if depends_on_order(adapter, trial.steps)]
    extremes = list(dict.fromkeys((adapter.conventions[0], adapter.conventions[-1])))
    fits = find_fits(adapter, evidence, pairs(first, relevant, adapter.oracle), extremes)
    return confirm(adapter, fits, evidence)


def confirm(adapter: Adapter, fits: Iterable[Trial], evidence: list[Evidence]) -> list[tuple[Trial, float]]:
    """Return those that explain fresh inputs too, with their errors, in one order of their names."""
    if not (fits := list(fits)):
        return []
    uses_cache = any(map(is_cached, evidence))
    fresh = [call for call in gather(adapter, range(300, 302)) if uses_cache or not is_cached(call)]
    fresh += long_call(adapter, {part for fit in fits for part in fit.parts})
    results: dict[frozenset[str], tuple[Trial, float]] = {}
    for fit in fits:
        error = max((difference(adapter, fit.weights, fit.steps, call) for call in fresh), default=math.inf)
        if error <= adapter.oracle.tolerance:
            results.setdefault(frozenset(fit.names), (fit, error))
    return list(results.values())


def possible_conventions(adapter: Adapter) -> Iterator[tuple[str, type[Oracle]]]:
    """Yield conventions that nothing rules out: bugs only where they alone explain everything."""
    if not isinstance(adapter, AttentionAdapter):
        return
    if has_default(adapter.description.source, adapter.arguments.get("bias", "")):
        yield "a bias that is given replaces its own, as its code says", REPLACED_BIAS
    if not adapter.masks:
        return
    if adapter.always_causal:
        yield "perhaps a mask replaces the causal mask", FAMILY["mask-in-place-of-causal"].variants[0]
    certain = [mask_polarity(*each, adapter.kind, adapter.text)[2] for each in adapter.masks.items()]
    if not all(certain):
        note = "perhaps masks have the other polarity, which nothing states"
        yield from ((note, variant) for variant in FAMILY["polarity-swapped"].variants[:3])


def single_bugs(adapter: Adapter, parts: Parts) -> Iterator[Trial]:
    """Yield each variant of each bug beside these parts, and of each bug of one of the parts."""
    for bug in eligible_bugs(adapter):
        yield from (Trial((bug.name,), (variant,), parts) for variant in bug.variants)
    found: dict[str, dict[int, list[Parts]]] = {}
    for n, part in enumerate(parts):
        for name, variants in part_bugs(part, parts):
            found.setdefault(name, {})[n] = variants
            yield from (Trial((name,), (), (*parts[:n], *variant, *parts[n + 1 :])) for variant in variants)
    yield from (Trial(("scaled-by-setting",), (steps,), parts) for steps in scaled_by_settings(adapter))
    for name, by_part in found.items():  # the norms of q and k have the same bug
        sets = (chosen for size in range(2, len(by_part) + 1) for chosen in combinations(by_part, size))
        for places in sets:
            for chosen in zip(*(by_part[n] for n in places), strict=False):
                together = {n: (part,) for n, part in enumerate(parts)} | dict(
                    zip(places, chosen, strict=True)
                )
                yield Trial((name,), (), tuple(part for each in together.values() for part in each))


def scaled_by_settings(adapter: Adapter) -> Iterator[type[Oracle]]:
    """Yield oracles whose scores are multiplied or divided by a number that the constructor takes."""
    if not isinstance(adapter, AttentionAdapter):
        return
    x, weights = adapter.draw(torch.Generator().manual_seed(35)), adapter.weights
    usual = {each.shape[-1] for each in (x.query, x.key, x.value)}
    usual |= set() if weights is None else {weights.heads, weights.key_heads, weights.head_size}
    values = {arg.name: arg.default for arg in adapter.description.init or ()} | adapter.init
    numbers = {n for n in values.values() if type(n) in (int, float)} - usual
    for n in sorted(n for n in numbers if n > 1):
        for factor in (1 / n, n, n**-0.5, n**0.5):
            yield transform(scale=lambda o, scale, factor=factor: scale * factor)


def search_scenarios(adapter: Adapter, evidence: list[Evidence], parts: Parts) -> list[Diagnosis]:
    """Return the bugs that explain each wrong scenario beside these parts, if there are any for each.

    Parts that are only plausible must explain a scenario without a bug.
    """
    before, adapter.parts = adapter.parts, parts
    if not (diagnoses := explain_scenarios(adapter, evidence)):
        adapter.parts = before
    return diagnoses


def explain_scenarios(adapter: Adapter, evidence: list[Evidence]) -> list[Diagnosis]:
    """Return the bugs that explain each wrong scenario, if there are any for each."""
    groups: dict[str, list[Evidence]] = {}
    if adapter.unknown and all(is_wrong(adapter, call) for call in evidence):
        return []
    for call in evidence + gather(adapter, range(300, 302)):
        # A bug of a cache has to explain all steps: those of one token fit too many.
        groups.setdefault("a cache" if is_cached(call) else call.scenario, []).append(call)
    wrong = [name for name, calls in groups.items() if any(is_wrong(adapter, call) for call in calls)]
    if adapter.unknown and not set(groups) - {*wrong, "one query"}:
        return []
    trials = list(single_bugs(adapter, adapter.parts))
    errors: dict[str, dict[str, float]] = {}  # by scenario and bug
    for scenario in wrong:
        errors[scenario] = {}
        for fit in find_fits(adapter, groups[scenario], trials, adapter.conventions):
            error = max(difference(adapter, fit.weights, fit.steps, call) for call in groups[scenario])
            errors[scenario].setdefault(fit.names[0], error)
    unexplained = [scenario for scenario, found in errors.items() if not found]
    if unexplained not in ([], ["a cache"]) or unexplained == wrong:
        return []  # steps alone may be wrong in another way, beside what other calls are
    errors = {scenario: found for scenario, found in errors.items() if found}
    names = dict.fromkeys(name for found in errors.values() for name in found)
    common = [name for name in names if all(name in found for found in errors.values())]
    right = sorted(set(groups) - set(wrong))
    others = f"; right with {list_scenarios(right)}" if right else ""
    others += "; with a cache, wrong in another way" * bool(unexplained)
    diagnoses = []
    for name in common or names:
        scenarios = [scenario for scenario, found in errors.items() if name in found]
        named = describe_fit(adapter, (name,), max(errors[scenario][name] for scenario in scenarios))
        description = f"with {list_scenarios(scenarios)}: {named.description}{others}"
        diagnoses.append(replace(named, description=description))
    return diagnoses


def list_scenarios(names: Iterable[str]) -> str:
    """Return the names of scenarios as a list: "plain", "causal", "mask + causal + weights"."""
    return ", ".join(name.replace(", ", " + ") for name in names)


def eligible_bugs(adapter: Adapter) -> Iterator[Bug]:
    """Yield the bugs that the candidate can have."""
    # Outputs with this bug are wrong for large scores only, or the same as without the sink.
    excluded = {"masked-and-divided"}
    if isinstance(adapter, AttentionAdapter):
        excluded |= {"mask-dropped-with-weights"} if adapter.always_weights else set()
        # Of one head, these are the same as unscaled and batch-reshaped.
        excluded |= {"scaled-by-heads", "merge-across-batch"} if adapter.heads == 1 else set()
        excluded |= {"average-inverted"} if "average-weights" not in adapter.arguments else set()
    yield from (bug for bug in family_of(adapter.oracle) if bug.name not in excluded)


def pairs(first: list[Trial], trials: list[Trial], oracle: type[Oracle]) -> Iterator[Trial]:
    """Yield all pairs of two different bugs, one of them of `first`, a part of `trials`.

    If both override the same step, they are tried in both orders.
    """
    steps = [overridden_steps(trial.bugs, oracle) for trial in trials]
    for (m, a), (n, b) in combinations(enumerate(trials), 2):
        if a not in first and b not in first:
            continue
        if a.names != b.names and (a.bugs or b.bugs):  # two bugs of parts would both replace the parts
            parts = b.parts if a.bugs else a.parts
            yield Trial(a.names + b.names, a.bugs + b.bugs, parts)
            if steps[m] & steps[n]:
                yield Trial(b.names + a.names, b.bugs + a.bugs, parts)


def find_fits(
    adapter: Adapter, evidence: list[Evidence], trials: Iterable[Trial], conventions: list[Bugs]
) -> Iterator[Trial]:
    """Yield each trial that explains all evidence, with the first convention and weights that do."""
    has_plain = adapter.oracle is Attention and any(call.scenario == "plain" for call in evidence)
    unmasked = draw_unmasked(adapter) if has_plain else None
    worst_first = sorted(
        evidence, key=lambda call: -largest_difference(call.outputs.out, adapter.exact(call.inputs).out)
    )
    for trial in trials:
        parts = steps_of(trial.parts)
        fits = (
            trial._replace(bugs=convention + trial.bugs, weights=weights)
            for weights in adapter.readings
            if unmasked is None or explains_last_query(adapter, weights, parts + trial.bugs, unmasked)
            for convention in conventions
            if explains(adapter, weights, parts + convention + trial.bugs, worst_first)
        )
        yield from islice(fits, 1)


def name_bugs(checks: Iterable[Check], found: list[Diagnosis]) -> list[Diagnosis]:
    """Return the bugs that failed checks found by themselves, without those that are found already."""
    known = {name for diagnosis in found for name in diagnosis.bug.split(" + ")}
    bugs = {check.bug.name: check.bug for check in checks if check.status == "failed" and check.bug}
    if {*bugs} & {*KEPT}:  # gradients don't reach what isn't computed again
        bugs.pop("gradient-stopped", None)
    return [name_bug(bug) for name, bug in bugs.items() if name not in known]


def name_bug(bug: Bug) -> Diagnosis:
    """Return the diagnosis of a bug that a check found."""
    return Diagnosis(bug.name, f"it is attention {bug.description}", bug.fix)


def draw_unmasked(adapter: Adapter) -> Evidence | None:
    """Return a call in which the last query attends to all keys.

    Conventions of attention differ only under a mask, so this query excludes most bugs in any convention.
    """
    t = min([4, *(part.size for part in adapter.parts if isinstance(part, Window))])
    inputs = adapter.draw(torch.Generator().manual_seed(33), 2, t)
    outputs = adapter.attempt(inputs)
    return None if outputs is None else Evidence("plain", inputs.but(need_weights=True), outputs)


def explains_last_query(adapter: Adapter, weights: Weights | None, bugs: Bugs, call: Evidence) -> bool:
    """Return True if the oracle with these bugs returns the same output of the last query.

    If the bugs mask all its keys, return True too, because the convention for empty rows decides then.
    """
    expected = run_oracle(adapter, weights, bugs, call)
    if expected is None or expected.out.shape != call.outputs.out.shape:
        return False
    if expected.weights is not None and bool((expected.weights[..., -1, :].nan_to_num() == 0).all(-1).any()):
        return True
    last = (out[..., -1:, :] for out in (call.outputs.out, expected.out))
    return adapter.oracle.difference(*last) <= adapter.oracle.tolerance


def describe_fit(adapter: Adapter, names: tuple[str, ...], error: float) -> Diagnosis:
    """Return the diagnosis that reports bugs which explain all evidence."""
    size = ""
    if adapter.oracle is Attention and any(name.startswith(SCALES) for name in names):
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
    except ORACLE_ERRORS:
        return None


def compare_outputs(adapter: Adapter, call: Evidence, outputs: Outputs, expected: Outputs) -> float:
    """Return the largest difference between two outputs for one call, weights included."""
    if expected.out.shape != outputs.out.shape:
        return math.inf
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


def depends_on_order(adapter: AttentionAdapter, bugs: Bugs) -> bool:
    """Return True if with these bugs another order of the other tokens changes the last query's output."""
    x = adapter.draw(torch.Generator().manual_seed(34), 2, 6)
    calls = [Evidence("plain", inputs, adapter.exact(inputs)) for inputs in (x, adapter.reorder(x))]
    found = [run_oracle(adapter, adapter.readings[0], bugs, call) for call in calls]
    outs = [outputs.out[..., -1:, :] for outputs in found if outputs is not None]
    return len(outs) < 2 or adapter.oracle.difference(*outs) > adapter.oracle.tolerance


# -- bugs that need special inputs -----------------------------------------------------------------


def find_dropout(adapter: Adapter) -> Diagnosis | None:
    """Return a diagnosis if dropout is left on in evaluation, else None.

    It is left on if outputs in evaluation depend on the seed and their average over many seeds is correct.
    """
    inputs = adapter.draw(torch.Generator().manual_seed(31), 1, 4)
    outs: list[Tensor] = []
    for seed in range(REPEATS):
        outputs = adapter.attempt(inputs, strict=True, seed=seed)
        outs += [] if outputs is None else [outputs.out.to(torch.float64)]
        if outputs is None or (seed == 2 and not any(largest_difference(out, outs[0]) for out in outs)):
            return None
    drawn = torch.stack(outs)
    right = compose(adapter.oracle, *steps_of(adapter.parts or adapter.plausible[0]))
    errors = (drawn.mean(0) - exact(adapter.weights, inputs, right).out).abs()
    if float((errors / (drawn.std(0) / REPEATS**0.5).clamp_min(1e-9)).max()) < 6:  # standard errors
        named = name_bug(BUGS["dropout-left-on"])
        description = f"{named.description}: the average over {REPEATS} seeds is right"
        return replace(named, description=description, error=float(errors.max()))
    description = "in evaluation its output depends on the random seed: something is left on, such as dropout"
    return Diagnosis("", f"{description}. Nothing else can be judged before it is off", verified=False)


def find_rare_bugs(adapter: Adapter, before: list[Bugs]) -> list[Diagnosis]:
    """Return the bugs that only large scores reveal, in addition to the bugs `before`."""
    if not isinstance(adapter, AttentionAdapter):
        return []
    seeds, weights = (41, 42, 43), adapter.readings[0]
    large = [with_large_scores(adapter, seed) for seed in seeds]
    masked = [inputs for seed in seeds for inputs in with_low_scores(adapter, seed)]
    diagnoses: list[Diagnosis] = []
    for scenario, cases in (("large", large), ("large, masked", masked)):
        answers = [(inputs, adapter.attempt(inputs, strict=True)) for inputs in cases]
        calls = [Evidence(scenario, inputs, outputs) for inputs, outputs in answers if outputs is not None]
        if len(calls) < len(cases):
            continue
        # A candidate may take another code path when it returns weights, so some of its calls may be correct.
        # A bug has to explain the wrong calls only.
        wrong = [
            call
            for call in calls
            if min(difference(adapter, weights, bugs, call) for bugs in before) > LARGE_TOLERANCE
        ]
        for name in OVERFLOWS if wrong else ():
            trials = [(*bugs, variant) for bugs in before for variant in FAMILY[name].variants]
            error = min(max(difference(adapter, weights, bugs, call) for call in wrong) for bugs in trials)
            if error <= LARGE_TOLERANCE:
                diagnoses.append(describe_fit(adapter, (name,), error))
                break
        if scenario == "large" and wrong:
            break  # large scores under a mask would only show the same bug again
    return diagnoses


# -- a picture -------------------------------------------------------------------------------------


def find_pair(adapter: Adapter) -> Pair | None:
    """Return the expected and the given map of a small failing input: weights if they differ, or outputs."""
    for call in gather(adapter, range(100, 103)):
        inputs, outputs, expected = call.inputs, call.outputs, adapter.exact(call.inputs)
        if outputs.out.shape != expected.out.shape or adapter.is_right(inputs, outputs):
            continue
        if not call.scenario.startswith("cache"):
            smallest = smallest_failure(adapter, inputs)
            inputs = inputs if smallest.t * smallest.s < 4 else smallest
            inputs = inputs.but(need_weights=True) if "weights" in adapter.features else inputs
            if (again := adapter.attempt(inputs)) is None:
                continue
            outputs, expected = again, adapter.exact(inputs)
        got, right = outputs.weights, expected.weights
        if got is not None and right is not None:
            if got.shape != right.shape:  # a map for each head, or one
                return right, got, "weights"
            if largest_difference(got, right) > 1e-4:
                return *worst_matrix(right, got), "weights"
        return *worst_matrix(expected.out, outputs.out), "output"
    return None


def worst_matrix(expected: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix of two tensors `[..., t, s]` in which they differ most."""
    expected, got = (x.to(torch.float64).flatten(0, -3) for x in (expected, got))
    worst = int((expected - got).abs().nan_to_num(torch.inf).amax((1, 2)).argmax())
    return expected[worst], got[worst]


# -- unexplained differences -----------------------------------------------------------------------


def is_wrong(adapter: Adapter, call: Evidence) -> bool:
    """Return True if the outputs of the candidate are wrong."""
    return not explains(adapter, adapter.readings[0], steps_of(adapter.parts) + adapter.convention, [call])


def describe_differences(adapter: Adapter, evidence: list[Evidence]) -> Iterator[str]:
    """Describe a difference that no known bug explains: in which calls, in weights or output, and where."""
    wrong = [call for call in evidence if is_wrong(adapter, call)]
    wrong.sort(key=lambda call: (call.scenario != "plain", call.inputs.query.numel()))
    names = {call.scenario for call in wrong}
    if right_names := sorted({call.scenario for call in evidence} - names):
        yield f"wrong with {list_scenarios(sorted(names))}, and right with {list_scenarios(right_names)}"
    expected = [adapter.exact(call.inputs) for call in wrong]
    outs = [(call.outputs.out, right.out) for call, right in zip(wrong, expected, strict=True)]
    got, right = wrong[0].outputs.weights, expected[0].weights
    weights = [] if got is None or right is None else [(got, right)]

    def agree(pairs: list[tuple[Tensor, Tensor]]) -> bool:
        return all(adapter.oracle.difference(*pair) <= adapter.oracle.tolerance for pair in pairs)

    if weights and agree(outs):
        yield "the output is right"
        yield describe_tensors("the returned weights are", weights, WEIGHT_AXES, agree)
        return
    if weights and agree(weights):
        yield "its weights are right, so the bug is in mixing, merging heads or the output"
    elif weights:
        yield "its weights are wrong already, so the bug is in scores, mask or softmax"
    if adapter.oracle is Attention and (scale := find_scale(adapter, wrong)) is not None:
        x = wrong[0].inputs.query
        d = x.shape[-1] if adapter.weights is None else adapter.weights.head_size
        yield f"it agrees to 1e-4 with scores multiplied by {scale:.5g}, where 1/√d = {d**-0.5:.5g} (d = {d})"
    else:
        yield describe_tensors("the output is", outs, adapter.oracle.axes[outs[0][1].dim()], agree)


def describe_tensors(
    subject: str,
    pairs: list[tuple[Tensor, Tensor]],
    axes: tuple[str, ...],
    agree: Callable[[list[tuple[Tensor, Tensor]]], bool],
) -> str:
    """Describe how tensors differ from the expected ones: by shape, factor, vector, or at some indices."""
    first, expected_first = pairs[0]
    if first.shape != expected_first.shape:
        return f"{subject} {sizes(first)}, expected {sizes(expected_first)}"
    got, expected = (
        torch.cat([x.to(torch.float64).flatten(0, -2) for x in each]) for each in zip(*pairs, strict=True)
    )
    is_finite = bool(got.isfinite().all() and expected.isfinite().all())
    factor = float((got * expected).sum() / expected.square().sum())
    if is_finite and agree([(got, expected * factor)]):
        return f"{subject} {factor:.6g} times what is right"
    vectors = got - expected
    if (
        is_finite
        and len(vectors) > 1
        and Attention.difference(vectors, vectors[:1].expand_as(vectors)) <= 1e-4
    ):
        return f"{subject} wrong by the same vector for every query, as by a bias"
    tolerance = 1e-5 * max(1.0, float(expected_first.abs().nan_to_num().max()))
    is_equal = torch.isclose(first.double(), expected_first, rtol=1e-4, atol=tolerance, equal_nan=True)
    places = []
    for axis, name in enumerate(axes):
        indices = (~is_equal.movedim(axis, 0).flatten(1).all(1)).nonzero().flatten().tolist()
        if 0 < len(indices) <= is_equal.shape[axis] // 2:
            places.append(f"{name} {', '.join(map(str, indices[:6]))}{', …' if len(indices) > 6 else ''}")
    where = f"in {' and '.join(places)} only" if places else "throughout"
    return f"{subject} {'wrong' if is_finite else 'not finite'} {where}"


def find_scale(adapter: Adapter, wrong: list[Evidence]) -> float | None:
    """Return a scale of the scores that explains the outputs, found on ever finer grids, or None."""

    def error(logarithm: float) -> float:
        scaled = override(scale=lambda _: math.exp(logarithm))
        steps = (*steps_of(adapter.parts), scaled)
        return max(difference(adapter, adapter.readings[0], steps, call) for call in wrong[:4])

    best, step = -1.0, 0.1
    for reach in (50, *[10] * 7):
        best = min((best + step * n for n in range(-reach, reach + 1)), key=error)
        step /= 10
    return math.exp(best) if error(best) <= 1e-4 else None
