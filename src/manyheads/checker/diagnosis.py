"""Which known mistake explains what a candidate answers; and where none does, where the difference lives.

A mistake is named when the recipe with that step changed gives the candidate's answers, outputs and
weights, in every way that it can be called, and gives them again on fresh inputs. Mistakes that no input
tells apart are named together. Two mistakes at once are looked for where one doesn't do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from manyheads.checker.bugs import FAMILY, HABITS, Change, Mistake
from manyheads.checker.candidates.adapter import Candidate
from manyheads.checker.checks import Evidence, counted, emptied, gather, large, large_masked
from manyheads.checker.oracle import Found, Recipe, Weights, distance, exact
from manyheads.shapes import sizes

CLOSE = 2e-5  # relative to the largest number: float32 with the steps in another order
OVERFLOWS = ("no-max-subtracted", "masked-low", "masked-and-divided")  # which large scores show
REPEATS = 256  # calls that dropout is averaged over


@dataclass(frozen=True)
class Diagnosis:
    """A finding. `mistake` is a name of the family, or "" where none fits; `error` how closely it agrees.

    `says` is what is wrong, in a sentence, and `mend` what to write instead; `verified` is whether the
    mistake gives the candidate's own numbers.
    """

    mistake: str
    says: str
    mend: str = ""
    verified: bool = True
    error: float | None = None


def diagnose(c: Candidate) -> list[Diagnosis]:
    """What is wrong with a candidate, if anything is; empty where all that was asked is right."""
    dropped = _dropout(c)
    if dropped is not None:
        return [dropped]
    evidence = gather(c, range(200, 203))
    if not evidence:
        return []
    if not any(_explains(c, _packed(c, p), habit, evidence) for p in c.packings for habit in HABITS):
        found = _search(c, evidence)
        if not found:
            return nearest(c, evidence)
        changes = [one for _, one in found]
        return [one for one, _ in found] + _special(c, changes)
    return _special(c, [()])


def _packed(c: Candidate, packing: str) -> Weights | None:
    """The candidate's weights in float64, packed ones read in this order."""
    if c.weights is None:
        return None
    weights = c.weights if packing == c.packing else c.projections.read(c.held, packing)
    return weights.to(torch.float64)


# -- the search ------------------------------------------------------------------------------------


def _search(c: Candidate, evidence: list[Evidence]) -> list[tuple[Diagnosis, tuple[Change, ...]]]:
    """The single mistakes that explain everything, with their changes; else the pairs that do."""
    out = {"mask-dropped-with-weights"} if c.always_weights else set()  # it is always asked for weights
    out |= {"scaled-by-heads"} if c.heads == 1 else set()  # where that is not to scale
    out |= {"average-inverted"} if "average" not in c.role else set()  # nobody can ask for the other
    out |= {"masked-and-divided"}  # it is right but for large scores, or is a sink left out
    family = [m for m in FAMILY.values() if m.name not in out]
    singles = [((m.name,), (v,)) for m in family for v in m.variants]
    fits = list(_fitting(c, evidence, singles, HABITS))
    if not fits:
        # A mistake that changes nothing here can't be one of two.
        apart = [
            (name, change, _steps(change[0])) for name, change in singles if _matters(c, change, evidence)
        ]
        pairs = []
        for (a, x, steps), (b, y, others) in combinations(apart, 2):
            if a != b:
                pairs.append((a + b, x + y))
                if steps & others:  # the order in which one step is changed twice matters
                    pairs.append((b + a, y + x))
        fits = list(_fitting(c, evidence, pairs, (HABITS[0], HABITS[-1])))
    fresh = gather(c, range(300, 302))
    kept: dict[frozenset[str], tuple[Diagnosis, tuple[Change, ...]]] = {}
    for names, changes, packing, habit in fits:
        error = _error(c, _packed(c, packing), (*habit, *changes), fresh)
        if error <= CLOSE and frozenset(names) not in kept:
            is_ = " and ".join(FAMILY[n].is_ for n in names)
            kept[frozenset(names)] = (
                Diagnosis(
                    " + ".join(names),
                    f"it agrees to {_power(error)} with attention {is_}{_sizes(c, names)}",
                    "; ".join(dict.fromkeys(FAMILY[n].mend for n in names)),
                    True,
                    error,
                ),
                (*habit, *changes),
            )
    return list(kept.values())


Fit = tuple[tuple[str, ...], tuple[Change, ...], str, tuple[Change, ...]]


def _steps(change: Change) -> frozenset[str]:
    """The steps of the recipe that a change replaces."""
    recipe = Recipe()
    before = set(vars(recipe))
    change(recipe)
    return frozenset(set(vars(recipe)) - before)


def _fitting(
    c: Candidate,
    evidence: list[Evidence],
    tries: Iterable[tuple[tuple[str, ...], tuple[Change, ...]]],
    habits: Sequence[tuple[Change, ...]],
) -> Iterable[Fit]:
    # Habits show under a mask only: what doesn't fit without one is done with at the first look.
    plain = next((one for one in evidence if one.scenario.startswith("plain")), None)
    by_packing = [(packing, _packed(c, packing)) for packing in c.packings]
    order = sorted(
        evidence, key=lambda e: -distance(e.found.out, exact(c.weights, e.x).out)
    )  # the worst first
    for names, changes in tries:
        for packing, weights in by_packing:
            if plain is not None and not c.causal and _off(c, weights, changes, plain) > CLOSE:
                continue
            fit = next((habit for habit in habits if _explains(c, weights, (*habit, *changes), order)), None)
            if fit is not None:
                yield names, changes, packing, fit
                break


def _explains(
    c: Candidate, weights: Weights | None, changes: tuple[Change, ...], evidence: list[Evidence]
) -> bool:
    return all(_off(c, weights, changes, one) <= CLOSE for one in evidence)


def _error(
    c: Candidate, weights: Weights | None, changes: tuple[Change, ...], evidence: list[Evidence]
) -> float:
    return max((_off(c, weights, changes, one) for one in evidence), default=math.inf)


def _off(c: Candidate, weights: Weights | None, changes: tuple[Change, ...], one: Evidence) -> float:
    """How far a changed recipe is from what was answered, relative to the largest number of it."""
    made_so = made(weights, changes, one)
    if made_so is None or made_so.out.shape != one.found.out.shape:
        return math.inf
    whole = one.scenario == "empty"
    got, told = (f if whole else counted(c, one.x, f) for f in (made_so, one.found))
    off = _relative(told.out, got.out)
    if told.weights is not None and one.x.weights and off <= CLOSE:
        if got.weights is None:
            return math.inf
        low = torch.finfo(told.weights.dtype).min  # whose sum over heads is -inf
        shown, want = (w.masked_fill(w <= low, -math.inf) for w in (told.weights, got.weights))
        off = max(off, _relative(shown, want))
    return off


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    largest = float(b.abs().max()) if b.numel() else 1.0
    if not math.isfinite(largest):
        largest = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 1.0
    elif b.numel():
        return float((a - b).abs().max().nan_to_num(math.inf)) / max(largest, 1e-3)
    return distance(a, b) / max(largest, 1e-3)


def made(weights: Weights | None, changes: tuple[Change, ...], one: Evidence) -> Found | None:
    """What the recipe gives with these changes; None where shapes forbid them."""
    recipe = Recipe(None if weights is None else weights.to(torch.float64), one.x.query.dtype)
    for change in changes:
        change(recipe)
    try:
        return recipe(one.wide)
    except (RuntimeError, ValueError, IndexError, KeyError, ZeroDivisionError, TypeError):
        return None  # sizes that this mistake can't be made with


def _matters(c: Candidate, changes: tuple[Change, ...], evidence: list[Evidence]) -> bool:
    return any(
        (got := made(c.weights, changes, one)) is not None and _differs(got, exact(c.weights, one.x))
        for one in evidence
    )


def _differs(a: Found, b: Found) -> bool:
    if _relative(a.out, b.out) > CLOSE:
        return True
    return a.weights is not None and b.weights is not None and _relative(a.weights, b.weights) > CLOSE


def _power(error: float) -> str:
    return "the last bit" if error == 0 else f"1e{math.ceil(math.log10(error))}"


def _sizes(c: Candidate, names: tuple[str, ...]) -> str:
    if not any("scale" in n or n == "multiplied" for n in names):
        return ""
    d = c.weights.weight["q"].shape[0] // c.weights.heads if c.weights is not None else 6
    return f" (d = {d})"


# -- what shows only in some situations ------------------------------------------------------------


def _dropout(c: Candidate) -> Diagnosis | None:
    """Is dropout left on in evaluation: do outputs change with the seed, and average to the right one?"""
    x = c.draw(torch.Generator().manual_seed(31), 1, 4)
    found = (c.attempt(x, strict=True, seed=seed) for seed in range(REPEATS))
    outs: list[Tensor] = []
    for got in found:
        if got is None:
            return None
        outs.append(got.out.to(torch.float64))
        if len(outs) == 3 and not any(distance(out, outs[0]) for out in outs):
            return None
    drawn = torch.stack(outs)
    right = exact(c.weights, x).out
    spread = drawn.std(0) / REPEATS**0.5
    off = float(((drawn.mean(0) - right).abs() / spread.clamp_min(1e-9)).max())
    is_ = "it drops weights in evaluation too: "
    mend = "drop in training only: F.dropout(weights, p, training=self.training), or a module nn.Dropout"
    if off < 6:
        return Diagnosis(
            "dropout-left-on",
            f"{is_}over {REPEATS} seeds its outputs differ, and average to the right ones",
            mend,
            True,
            float((drawn.mean(0) - right).abs().max()),
        )
    return Diagnosis(
        "",
        "in evaluation its output depends on the random seed, and doesn't average to the right one: "
        "something random is left on, and something else is wrong beside it",
        mend,
        False,
    )


def _special(c: Candidate, before: list[tuple[Change, ...]]) -> list[Diagnosis]:
    """Mistakes of empty rows and of large scores, which no ordinary input shows, beside those found
    before.
    """
    found = []
    seeds = (41, 42, 43)
    empty = [x for seed in seeds if (x := emptied(c, seed)) is not None]
    if "weights" in c.can:
        empty += [replace(x, weights=True) for x in empty if not x.weights]
    high = [large(c, seed) for seed in seeds]
    low = [x for seed in seeds for x in large_masked(c, seed)]
    wrong: dict[str, bool] = {}
    for scenario, names, inputs, room in (
        ("empty", ("empty-rows-nan", "empty-rows-uniform", "empty-rows-spoil-others"), empty, CLOSE),
        ("large", OVERFLOWS, high, 1e-3),
        ("large, masked", OVERFLOWS, low, 1e-3),
    ):
        if wrong.get("large"):  # which is then wrong under a mask as well
            break
        answers = [(x, c.attempt(x, strict=True)) for x in inputs]
        evidence = [Evidence(scenario, x, got) for x, got in answers if got is not None]
        if len(evidence) < len(inputs):
            continue
        # Asked for weights it may take another way: what is right already isn't looked at.
        evidence = [e for e in evidence if min(_off(c, c.weights, one, e) for one in before) > room]
        wrong[scenario] = bool(evidence)
        for name in names if evidence else ():
            m = FAMILY[name]
            errors = [_error(c, c.weights, (*changes, v), evidence) for changes in before for v in m.variants]
            if min(errors) <= room:
                says = f"it agrees to {_power(min(errors))} with attention {m.is_}"
                found.append(Diagnosis(name, says, m.mend, True, min(errors)))
                break
    return found


# -- no mistake fits -------------------------------------------------------------------------------


def nearest(c: Candidate, evidence: list[Evidence]) -> list[Diagnosis]:
    """What can be said of a difference that no mistake of the family explains: all of it measured."""
    said: list[str] = []
    wrong = [one for one in evidence if _off(c, c.weights, (), one) > CLOSE]
    right = sorted({one.scenario for one in evidence} - {one.scenario for one in wrong})
    if not wrong:
        return []
    one = min(wrong, key=lambda e: (e.scenario != "plain", e.x.query.numel()))
    truth = exact(c.weights, one.x)
    if one.found.out.shape != truth.out.shape:
        says = f"its output is {sizes(one.found.out)} where {sizes(truth.out)} was expected"
        return [Diagnosis("", f"no known mistake explains it; {says}", "", False)]
    if right:
        said.append(
            f"wrong with {', '.join(sorted({e.scenario for e in wrong}))}, and right with {', '.join(right)}"
        )
    if not any(_off(c, c.weights, (), replace(e, found=Found(e.found.out))) > CLOSE for e in wrong):
        said.append("the output is right, and the weights that come back are wrong" + _shown(one, truth))
        return [Diagnosis("", "no known mistake explains it; " + "; ".join(said), "", False)]
    said += _simple(c, wrong)
    got, want = one.found.weights, truth.weights
    if got is not None and want is not None and got.shape == want.shape:
        if _relative(got, want) <= CLOSE:
            after = "mixing, merging heads or the output"
            said.append(f"its weights are right, so what comes after them is wrong: {after}")
        else:
            said.append("its weights are wrong already: scores, mask or softmax" + _where(got, want, "key"))
    said += _batch(c, wrong)
    said += _heads(c, wrong)
    said.append("the output is wrong" + _where(one.found.out, truth.out, "column"))
    return [Diagnosis("", "no known mistake explains it; " + "; ".join(said), "", False)]


def _shown(one: Evidence, truth: Found) -> str:
    """How returned weights differ: in their shape, by a factor, or where."""
    got, want = one.found.weights, truth.weights
    if got is None or want is None:
        return ""
    if got.shape != want.shape:
        return f": of {got.shape[1]} heads, where {want.shape[1]} were expected"
    factor = float((got.to(torch.float64) * want).sum() / (want * want).sum())
    if abs(factor - 1) > 1e-3 and _relative(got, want * factor) <= CLOSE:
        return f": {factor:.6g} times the right ones"
    return _where(got, want, "key")


def _where(got: Tensor, want: Tensor, last: str) -> str:
    """In which entries of which dimensions the two differ, where that is not in all."""
    off = ~torch.isclose(
        got.to(torch.float64),
        want,
        rtol=1e-4,
        atol=1e-5 * max(1.0, float(want.abs().nan_to_num().max())),
        equal_nan=True,
    )
    names = ["batch entry", "head", "query", last] if got.dim() == 4 else ["batch entry", "query", last]
    said = []
    for axis, name in enumerate(names):
        others = [a for a in range(off.dim()) if a != axis]
        hit = off.any(dim=tuple(others)) if others else off
        where = hit.nonzero().flatten().tolist()
        if 0 < len(where) <= off.shape[axis] // 2:
            said.append(f"{name} {', '.join(map(str, where[:6]))}{', …' if len(where) > 6 else ''}")
    return f" in {' and '.join(said)} only" if said else " throughout"


def _simple(c: Candidate, wrong: list[Evidence]) -> list[str]:
    """A scale of the scores, a factor or a constant that would explain it, to the digit."""
    said: list[str] = []
    outs = [(one.found.out.to(torch.float64), exact(c.weights, one.x).out) for one in wrong]
    outs = [(got, want) for got, want in outs if got.shape == want.shape]
    if not outs:
        return said
    if not all(bool(a.isfinite().all()) and bool(b.isfinite().all()) for a, b in outs):
        said.append("some outputs are not finite")
        return said
    a, b = torch.cat([x.flatten() for x, _ in outs]), torch.cat([y.flatten() for _, y in outs])
    factor = float((a @ b) / (b @ b))
    if _relative(a, b * factor) <= CLOSE:
        return [f"the output is {factor:.6g} times the right one"]
    rows = torch.cat([(x - y).flatten(0, -2) for x, y in outs])
    if _relative(rows, rows[:1].expand_as(rows)) <= 1e-4 and len(rows) > 1:
        return ["the output differs by the same vector for every query, as a bias would"]
    number = _temperature(c, wrong)
    if number is not None:
        d = (
            c.weights.weight["q"].shape[0] // c.weights.heads
            if c.weights is not None
            else wrong[0].x.query.shape[-1]
        )
        said.append(
            f"it agrees to 1e-4 with scores multiplied by {number:.5g}, where 1/√d = {d**-0.5:.5g} (d = {d})"
        )
    return said


def _temperature(c: Candidate, wrong: list[Evidence]) -> float | None:
    """The scale of the scores that explains the outputs, if one does: found by halving intervals."""

    def off(log: float) -> float:
        def change(r: Recipe) -> None:
            r.put(scale=lambda: math.exp(log))

        return max(_off(c, c.weights, (change,), one) for one in wrong[:4])

    grid = [-6 + 0.1 * n for n in range(100)]
    best = min(grid, key=off)
    low, high = best - 0.1, best + 0.1
    for _ in range(60):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if off(a) < off(b) else (a, high)
    return math.exp((low + high) / 2) if off((low + high) / 2) <= 1e-4 else None


def _batch(c: Candidate, wrong: list[Evidence]) -> list[str]:
    """Is each sequence right where it is alone?"""
    for one in wrong[:2]:
        alone = one.x.but(**{n: y[:1] for n, y in one.x.tensors().items() if n not in ("sink", "bias")})
        got = c.attempt(alone)
        if got is None or _off(c, c.weights, (), Evidence(one.scenario, alone, got)) > CLOSE:
            return []
    return ["one sequence alone is right, several together are wrong, so entries of the batch are mixed up"]


def _heads(c: Candidate, wrong: list[Evidence]) -> list[str]:
    """Which heads are wrong in all that is, where the output projection can be taken back."""
    if c.weights is None or "o" not in c.weights.weight or c.heads < 2:
        return []
    o = c.weights.weight["o"].to(torch.float64)
    if o.shape[0] < o.shape[1]:
        return []
    back, off = torch.linalg.pinv(o), torch.zeros(c.heads, dtype=torch.bool)
    for one in wrong:
        want = exact(c.weights, one.x).out
        if one.found.out.shape != want.shape or not bool(one.found.out.isfinite().all()):
            return []
        got, told = (
            (y.to(torch.float64) @ back.mT).unflatten(-1, (c.heads, -1)) for y in (one.found.out, want)
        )
        off |= ((got - told).abs() > 1e-3 * told.abs().max()).any(-1).flatten(0, -2).any(0)
    heads = off.nonzero().flatten().tolist()
    if 0 < len(heads) < c.heads:
        many = len(heads) > 1
        return [
            f"only head{'s' * many} {', '.join(map(str, heads))} of {c.heads} {'are' if many else 'is'} wrong"
        ]
    return []


__all__ = ["Diagnosis", "Mistake", "diagnose"]
