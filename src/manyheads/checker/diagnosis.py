"""Find the known bug that explains what a candidate returns, or describe where it differs.

A bug is reported if the oracle with that bug returns the same outputs and weights as the candidate, for
every kind of input that the candidate supports, and again for fresh inputs. Bugs that no input can tell
apart are all reported. If no single bug explains everything, pairs of bugs are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from manyheads.checker.bugs import CONVENTIONS, FAMILY, Bug, compose, family_of, overridden_steps, override
from manyheads.checker.candidates.adapter import Adapter, D
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import Evidence, gather
from manyheads.checker.checks.numerics import with_large_scores, with_low_scores
from manyheads.checker.checks.weights import with_empty_row
from manyheads.checker.encodings import Encoding
from manyheads.checker.oracle import Attention, Oracle, Outputs, Weights, largest_difference
from manyheads.shapes import sizes

# The names of the checks whose failure a known bug may explain.
EXPLAINED = {"values", "causal mask", "mask", "mask of keys", "padding", "added bias", "scale", "shapes",
             "one query", "empty rows", "large scores", "training and evaluation", "rows sum to one", "cache",
             "grouped heads"}  # fmt: skip
OVERFLOWS = ("no-max-subtracted", "masked-low", "masked-and-divided")  # bugs that only large scores reveal
EMPTY_ROWS = ("empty-rows-nan", "empty-rows-uniform", "empty-rows-spoil-others")
REPEATS = 256  # calls that dropout is averaged over
UNKNOWN = "no known bug explains it; "
WEIGHT_AXES = ("batch entry", "head", "query", "key")

Bugs = tuple[type[Oracle], ...]


@dataclass(frozen=True)
class Diagnosis:
    """A bug that was found, or a difference that no known bug explains.

    Attributes:
        mistake: the bug's name, or "" if none fits.
        says: the description of the bug or of the difference, in a sentence.
        mend: how to fix it.
        verified: whether the oracle with this bug returns the candidate's numbers.
        error: the largest difference between the two.
    """

    mistake: str
    says: str
    mend: str = ""
    verified: bool = True
    error: float | None = None


def unexplained(*sentences: str) -> list[Diagnosis]:
    """Return the diagnosis for a difference that no known bug explains."""
    return [Diagnosis("", UNKNOWN + "; ".join(sentences), "", False)]


def diagnose(c: Adapter) -> list[Diagnosis]:
    """Return the bugs of a candidate; an empty list if all outputs are right."""
    if (dropout := find_dropout(c)) is not None:
        return [dropout]
    evidence = gather(c, range(200, 203))
    if not evidence:
        return []
    if any(explains(c, weights, steps, evidence) for weights in c.readings for steps in c.conventions):
        return find_rare_bugs(c, [()])
    found = search(c, evidence)
    if not found:
        return locate(c, evidence)
    return [diagnosis for diagnosis, _ in found] + find_rare_bugs(c, [bugs for _, bugs in found])


# -- the search ------------------------------------------------------------------------------------


def search(c: Adapter, evidence: list[Evidence]) -> list[tuple[Diagnosis, Bugs]]:
    """Return the single bugs that explain everything, or else the pairs that do."""
    singles = [((bug.name,), (variant,)) for bug in eligible_bugs(c) for variant in bug.variants]
    conventions = CONVENTIONS.get(c.oracle, [()])
    fits = list(find_fits(c, evidence, singles, conventions))
    if not fits:
        # A bug that changes none of these outputs can't be part of a pair that explains them.
        relevant = [
            (name, bugs, overridden_steps(bugs, c.oracle))
            for name, bugs in singles
            if matters(c, bugs, evidence)
        ]
        pairs = []
        for (a, first, steps), (b, second, other_steps) in combinations(relevant, 2):
            if a != b:
                pairs.append((a + b, first + second))
                if steps & other_steps:  # both override the same step, so their order matters
                    pairs.append((b + a, second + first))
        fits = list(find_fits(c, evidence, pairs, list(dict.fromkeys((conventions[0], conventions[-1])))))
    fresh = gather(c, range(300, 302))
    found: dict[frozenset[str], tuple[Diagnosis, Bugs]] = {}
    for names, bugs, weights in fits:
        error = max((difference(c, weights, bugs, call) for call in fresh), default=math.inf)
        if error <= c.oracle.tolerance and frozenset(names) not in found:
            description = " and ".join(FAMILY[name].description for name in names)
            fix = "; ".join(dict.fromkeys(FAMILY[name].fix for name in names))
            found[frozenset(names)] = (describe_fit(c, names, description, fix, error), bugs)
    return list(found.values())


def eligible_bugs(c: Adapter) -> Iterator[Bug]:
    """Yield the bugs that the candidate can have."""
    # Outputs with this bug are wrong for large scores only, or the same as without the sink.
    excluded = {"masked-and-divided"}
    if isinstance(c, AttentionAdapter):
        excluded |= {"mask-dropped-with-weights"} if c.always_weights else set()
        excluded |= {"scaled-by-heads"} if c.heads == 1 else set()  # the same as unscaled
        excluded |= {"average-inverted"} if "average" not in c.arguments else set()
    yield from (bug for bug in family_of(c.oracle) if bug.name not in excluded)


def describe_fit(c: Adapter, names: tuple[str, ...], description: str, fix: str, error: float) -> Diagnosis:
    """Return the diagnosis that reports bugs which explain all evidence."""
    size = ""
    if c.oracle is Attention and any("scale" in name or name == "multiplied" for name in names):
        size = f" (d = {D if c.weights is None else c.weights.head_size})"
    power = "the last bit" if error == 0 else f"1e{math.ceil(math.log10(error))}"
    says = f"it agrees to {power} with {c.oracle.noun} {description}{size}"
    return Diagnosis(" + ".join(names), says, fix, True, error)


def find_fits(
    c: Adapter,
    evidence: list[Evidence],
    trials: Iterable[tuple[tuple[str, ...], Bugs]],
    conventions: list[Bugs],
) -> Iterator[tuple[tuple[str, ...], Bugs, Weights | None]]:
    """Yield (names, bugs with the convention, weights) of the trials that explain all evidence."""
    readings = c.readings
    # Conventions of attention differ only under a mask. So bugs that don't fit a call without a mask fit with
    # no convention, and are skipped early.
    plain = next((call for call in evidence if call.scenario.startswith("plain")), None)
    if c.oracle is not Attention or (isinstance(c, AttentionAdapter) and c.always_causal):
        plain = None
    worst_first = sorted(
        evidence, key=lambda call: -largest_difference(call.outputs.out, c.exact(call.x).out)
    )
    for names, bugs in trials:
        for weights in readings:
            if plain is not None and difference(c, weights, bugs, plain) > c.oracle.tolerance:
                continue
            with_conventions = (steps + bugs for steps in conventions)
            fitting = (both for both in with_conventions if explains(c, weights, both, worst_first))
            if (fit := next(fitting, None)) is not None:
                yield names, fit, weights
                break


def explains(c: Adapter, weights: Weights | None, bugs: Bugs, evidence: list[Evidence]) -> bool:
    """Return True if the oracle with these bugs returns what the candidate returned, in all calls."""
    return all(difference(c, weights, bugs, call) <= c.oracle.tolerance for call in evidence)


def difference(c: Adapter, weights: Weights | None, bugs: Bugs, call: Evidence) -> float:
    """Return the largest difference between the oracle with these bugs and what the candidate returned."""
    expected = run_oracle(c, weights, bugs, call)
    if expected is None or expected.out.shape != call.outputs.out.shape:
        return math.inf
    got = call.outputs
    if call.scenario != "empty":
        expected, got = c.ignore_padding(call.x, expected), c.ignore_padding(call.x, got)
    error = c.oracle.difference(got.out, expected.out)
    if got.weights is not None and call.x.need_weights and error <= c.oracle.tolerance:
        if expected.weights is None:
            return math.inf
        # Returned scores may be masked by the lowest finite number, or by -inf where two masks are added.
        lowest = torch.finfo(got.weights.dtype).min
        a, b = (w.masked_fill(w <= lowest, -math.inf) for w in (got.weights, expected.weights))
        error = max(error, c.oracle.difference(a, b))
    return error


def run_oracle(c: Adapter, weights: Weights | None, bugs: Bugs, call: Evidence) -> Outputs | None:
    """Return what the oracle with these bugs returns, or None if these inputs make it fail."""
    try:
        return compose(c.oracle, *bugs)(weights, call.x.query.dtype)(call.exact_x)
    except (RuntimeError, ValueError, IndexError, KeyError, ZeroDivisionError, TypeError):
        return None


def matters(c: Adapter, bugs: Bugs, evidence: list[Evidence]) -> bool:
    """Return True if these bugs change what the oracle returns in some call."""
    weights = c.readings[0]
    for call in evidence:
        got, right = run_oracle(c, weights, bugs, call), c.exact(call.x)
        if got is None or (issubclass(c.oracle, Encoding) and bool(got.out.isnan().any())):
            continue  # NaN in an encoding matches anything, so a pair with this bug would fit by accident
        if c.oracle.difference(got.out, right.out) > c.oracle.tolerance:
            return True
        pair = [outputs.weights for outputs in (got, right) if outputs.weights is not None]
        if len(pair) == 2 and c.oracle.difference(pair[0], pair[1]) > c.oracle.tolerance:
            return True
    return False


# -- bugs that ordinary inputs don't reveal --------------------------------------------------------


def find_dropout(c: Adapter) -> Diagnosis | None:
    """Return a diagnosis if outputs in evaluation mode depend on the seed, else None.

    It is dropout if the average over many seeds is right.
    """
    x = c.draw(torch.Generator().manual_seed(31), 1, 4)
    outs: list[Tensor] = []
    for seed in range(REPEATS):
        got = c.attempt(x, strict=True, seed=seed)
        if got is None:
            return None
        outs.append(got.out.to(torch.float64))
        if len(outs) == 3 and not any(largest_difference(out, outs[0]) for out in outs):
            return None
    drawn = torch.stack(outs)
    errors = (drawn.mean(0) - c.exact(x).out).abs()
    fix = "drop in training only: F.dropout(x, p, training=self.training), or a module nn.Dropout"
    if float((errors / (drawn.std(0) / REPEATS**0.5).clamp_min(1e-9)).max()) < 6:  # standard errors
        says = f"it drops out in evaluation: the outputs of {REPEATS} seeds differ, with the right average"
        return Diagnosis("dropout-left-on", says, fix, True, float(errors.max()))
    says = (
        "in evaluation its output depends on the random seed, and doesn't average to the right one: "
        "something random is left on, and something else is wrong too"
    )
    return Diagnosis("", says, fix, False)


def find_rare_bugs(c: Adapter, before: list[Bugs]) -> list[Diagnosis]:
    """Return the bugs that only empty rows or large scores reveal, in addition to the bugs `before`."""
    if not isinstance(c, AttentionAdapter):
        return []
    seeds = (41, 42, 43)
    empty = [x for seed in seeds if (x := with_empty_row(c, seed)) is not None]
    if "weights" in c.features:
        empty += [x.but(need_weights=True) for x in empty if not x.need_weights]
    large = [with_large_scores(c, seed) for seed in seeds]
    masked = [x for seed in seeds for x in with_low_scores(c, seed)]
    weights = c.readings[0]
    found: list[Diagnosis] = []
    for scenario, names, inputs, tolerance in (
        ("empty", EMPTY_ROWS, empty, c.oracle.tolerance),
        ("large", OVERFLOWS, large, 1e-3),
        ("large, masked", OVERFLOWS, masked, 1e-3),
    ):
        answers = [(x, c.attempt(x, strict=True)) for x in inputs]
        evidence = [Evidence(scenario, x, got) for x, got in answers if got is not None]
        if len(evidence) < len(inputs):
            continue
        # A candidate may take another code path when it returns weights, so some of its calls may be right.
        # A bug has to explain the wrong ones only.
        evidence = [
            e for e in evidence if min(difference(c, weights, bugs, e) for bugs in before) > tolerance
        ]
        for name in names if evidence else ():
            bug = FAMILY[name]
            trials = [(*bugs, variant) for bugs in before for variant in bug.variants]
            error = min(max(difference(c, weights, bugs, e) for e in evidence) for bugs in trials)
            if error <= tolerance:
                found.append(describe_fit(c, (name,), bug.description, bug.fix, error))
                break
        if scenario == "large" and evidence:
            break  # large scores under a mask would only show the same bug again
    return found


# -- differences that no known bug explains --------------------------------------------------------


def is_wrong(c: Adapter, call: Evidence) -> bool:
    """Return True if what the candidate returned isn't right."""
    return difference(c, c.readings[0], c.convention, call) > c.oracle.tolerance


def locate(c: Adapter, evidence: list[Evidence]) -> list[Diagnosis]:
    """Describe a difference that no known bug explains: its size, and which calls, heads and entries."""
    wrong = [call for call in evidence if is_wrong(c, call)]
    if not wrong:
        return []
    first = min(wrong, key=lambda call: (call.scenario != "plain", call.x.query.numel()))
    out, right = first.outputs.out, c.exact(first.x)
    if out.shape != right.out.shape:
        return unexplained(f"its output is {sizes(out)}, expected {sizes(right.out)}")
    parts = []
    wrong_names = {call.scenario for call in wrong}
    if right_names := sorted({call.scenario for call in evidence} - wrong_names):
        parts.append(f"wrong with {', '.join(sorted(wrong_names))}, and right with {', '.join(right_names)}")
    if not any(is_wrong(c, replace(call, outputs=Outputs(call.outputs.out))) for call in wrong):
        where = describe_weights(c, first.outputs, right)
        return unexplained(*parts, f"the output is right, and the returned weights are wrong{where}")
    parts += find_simple_relation(c, wrong)
    got, expected = first.outputs.weights, right.weights
    if got is not None and expected is not None and got.shape == expected.shape:
        if c.oracle.difference(got, expected) <= c.oracle.tolerance:
            parts.append("its weights are right, so the bug is in mixing, merging heads or the output")
        else:
            where = locate_entries(got, expected, WEIGHT_AXES)
            parts.append(f"its weights are wrong already, so the bug is in scores, mask or softmax{where}")
    if is_right_alone(c, wrong):
        parts.append("one sequence alone is right, several together are wrong, so batch entries are mixed up")
    parts += find_wrong_heads(c, wrong)
    where = locate_entries(out, right.out, c.oracle.axes[right.out.dim()])
    return unexplained(*parts, f"the output is wrong{where}")


def describe_weights(c: Adapter, outputs: Outputs, right: Outputs) -> str:
    """Describe how returned weights differ: in their shape, by a factor, or in which entries."""
    got, expected = outputs.weights, right.weights
    if got is None or expected is None:
        return ""
    if got.shape != expected.shape:
        return f": of {got.shape[1]} heads, expected {expected.shape[1]}"
    factor = float((got.to(torch.float64) * expected).sum() / (expected * expected).sum())
    if abs(factor - 1) > 1e-3 and c.oracle.difference(got, expected * factor) <= c.oracle.tolerance:
        return f": {factor:.6g} times the right ones"
    return locate_entries(got, expected, WEIGHT_AXES)


def locate_entries(got: Tensor, expected: Tensor, axes: tuple[str, ...]) -> str:
    """Describe at which indices of which axes two tensors differ, or "throughout"."""
    tolerance = 1e-5 * max(1.0, float(expected.abs().nan_to_num().max()))
    same = torch.isclose(got.to(torch.float64), expected, rtol=1e-4, atol=tolerance, equal_nan=True)
    parts = []
    for axis, name in enumerate(axes):
        entries = (~same.movedim(axis, 0).flatten(1).all(1)).nonzero().flatten().tolist()
        if 0 < len(entries) <= same.shape[axis] // 2:
            parts.append(f"{name} {', '.join(map(str, entries[:6]))}{', …' if len(entries) > 6 else ''}")
    return f" in {' and '.join(parts)} only" if parts else " throughout"


def find_simple_relation(c: Adapter, wrong: list[Evidence]) -> list[str]:
    """Describe a factor, a constant, or a scale of the scores that fully explains the outputs."""
    outs = [(call.outputs.out.to(torch.float64), c.exact(call.x).out) for call in wrong]
    outs = [(got, right) for got, right in outs if got.shape == right.shape]
    if not all(bool(x.isfinite().all()) for pair in outs for x in pair):
        return ["some outputs are not finite"]
    got, right = (torch.cat([pair[n].flatten() for pair in outs]) for n in (0, 1))
    factor = float((got @ right) / (right @ right))
    if c.oracle.difference(got, right * factor) <= c.oracle.tolerance:
        return [f"the output is {factor:.6g} times the right one"]
    rows = torch.cat([(a - b).flatten(0, -2) for a, b in outs])
    if len(rows) > 1 and Attention.difference(rows, rows[:1].expand_as(rows)) <= 1e-4:
        return ["the output differs by the same vector for every query, as a bias would"]
    if c.oracle is not Attention or (number := find_temperature(c, wrong)) is None:
        return []
    d = c.weights.head_size if c.weights is not None else wrong[0].x.query.shape[-1]
    multiplied = f"scores multiplied by {number:.5g}, where 1/√d = {d**-0.5:.5g} (d = {d})"
    return [f"it agrees to 1e-4 with {multiplied}"]


def find_temperature(c: Adapter, wrong: list[Evidence]) -> float | None:
    """Find, by ternary search, a scale of the scores that explains the outputs; None if there is none."""

    def error(log: float) -> float:
        scaled = override(scale=lambda _: math.exp(log))
        return max(difference(c, c.readings[0], (scaled,), call) for call in wrong[:4])

    best = min((-6 + 0.1 * n for n in range(100)), key=error)
    low, high = best - 0.1, best + 0.1
    for _ in range(60):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if error(a) < error(b) else (a, high)
    middle = (low + high) / 2
    return math.exp(middle) if error(middle) <= 1e-4 else None


def is_right_alone(c: Adapter, wrong: list[Evidence]) -> bool:
    """Return True if the first sequence of each batch is right when it is computed alone."""
    for call in wrong[:2]:
        fields = {n: y[:1] for n, y in call.x.tensors().items() if n not in ("sink", "bias")}
        alone = call.x.but(**fields)
        got = c.attempt(alone)
        if got is None or is_wrong(c, Evidence(call.scenario, alone, got)):
            return False
    return True


def find_wrong_heads(c: Adapter, wrong: list[Evidence]) -> list[str]:
    """Describe which heads are wrong, if only some are and the output projection can be inverted."""
    weights = c.weights
    if weights is None or "o" not in weights.weight or weights.heads < 2:
        return []
    o = weights.weight["o"].to(torch.float64)
    if o.shape[0] < o.shape[1]:
        return []
    inverse, is_wrong = torch.linalg.pinv(o), torch.zeros(weights.heads, dtype=torch.bool)
    for call in wrong:
        right = c.exact(call.x).out
        if call.outputs.out.shape != right.shape or not bool(call.outputs.out.isfinite().all()):
            return []
        got, expected = (
            (y.to(torch.float64) @ inverse.mT).unflatten(-1, (weights.heads, -1))
            for y in (call.outputs.out, right)
        )
        is_wrong |= ((got - expected).abs() > 1e-3 * expected.abs().max()).any(-1).flatten(0, -2).any(0)
    heads = is_wrong.nonzero().flatten().tolist()
    if not 0 < len(heads) < weights.heads:
        return []
    subject, verb = ("heads", "are") if len(heads) > 1 else ("head", "is")
    return [f"only {subject} {', '.join(map(str, heads))} of {weights.heads} {verb} wrong"]
