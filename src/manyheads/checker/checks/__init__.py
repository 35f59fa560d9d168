"""What is asked of a candidate: one function a question, in the order of the report.

A question returns `Check`s. Values are compared with the recipe in float64 on the candidate's own weights;
what can be asked without knowing the right values (who reaches whom, what repeats) is asked by moving
inputs. Nothing here knows of mistakes: `diagnosis` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import Candidate, Odd
from manyheads.checker.isolation.candidate import Trouble
from manyheads.checker.isolation.process import Process
from manyheads.checker.oracle import Found, Inputs, Recipe, allowed, distance, exact

DRAWS = 20  # inputs that values are compared on
GROWTH = (256, 512, 1024, 2048)  # tokens that memory is measured at
AGAIN = 15  # like calls that must give the same bits
FOLLOWING = {  # questions that say nothing where these have failed
    "gradients": ("values", "causal mask"),
    "large scores": ("values", "causal mask", "mask", "mask of keys", "padding"),
    "float16": ("values", "mask"),
    "bfloat16": ("values", "mask"),
    "sizes of one": ("values",),
    "torch.compile": ("values",),
}
BROKEN = (
    "AttributeError",
    "NameError",
    "UnboundLocalError",
    "ImportError",
    "ModuleNotFoundError",
    "KeyError",
)
LOST = ("timeout", "memory", "crash", "protocol")  # troubles after which the candidate's process is gone


@dataclass(frozen=True)
class Check:
    """One question's answer. `status`: "passed", "failed", "not applicable", "could not be checked" (which
    leaves the verdict as it is), or "not judged" (without which nothing can be said to have passed).

    `name` is the question's; `reason` says why it isn't passed; `error` is how far the numbers are apart,
    and `allowed` how far they may be.
    """

    name: str
    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What a candidate answered, and what was right."""

    scenario: str
    x: Inputs
    found: Found

    @cached_property
    def wide(self) -> Inputs:
        """The same numbers in float64."""
        return self.x.to(torch.float64)


def passed(name: str, reason: str = "", error: float | None = None, most: float | None = None) -> Check:
    return Check(name, "passed", reason, error, most)


def failed(name: str, reason: str, error: float | None = None, most: float | None = None) -> Check:
    return Check(name, "failed", reason, error, most)


def skipped(name: str, reason: str) -> Check:
    return Check(name, "not applicable", reason)


Question = Callable[[Candidate], Iterator[Check]]
QUESTIONS: list[tuple[str, Question]] = []


def question(name: str) -> Callable[[Question], Question]:
    def add(ask: Question) -> Question:
        QUESTIONS.append((name, ask))
        return ask

    return add


def ask_all(c: Candidate, progress: Callable[[str], None] = lambda name: None) -> list[Check]:
    """All answers; a call that raises fails its question, and one that ends the process ends the asking."""
    checks: list[Check] = []
    gone = ""
    for name, ask in QUESTIONS:
        progress(name)
        if gone:
            checks.append(Check(name, "could not be checked", f"its process had ended: {gone}"))
            continue
        if unlike(checks):
            reason = "like calls give unlike outputs, or none that is finite"
            checks.append(Check(name, "could not be checked", reason))
            continue
        wrong = [one.name for one in checks if one.status == "failed" and one.name in FOLLOWING.get(name, ())]
        if wrong:
            what = "values" if "values" in wrong else f"values with a {wrong[0]}"
            checks.append(Check(name, "could not be checked", f"{what} are wrong already, without it"))
            continue
        try:
            checks += ask(c)
        except Odd as error:
            if any(one.name == "shapes" and one.status == "failed" for one in checks):
                checks.append(Check(name, "could not be checked", "what comes back has another shape"))
            else:
                checks.append(failed(name, f"{error}."))
        except Trouble as trouble:
            checks.append(failed(name, str(trouble)))
            if trouble.kind in LOST:
                gone = f"{trouble}".rstrip(".") + "."
    return checks


def unlike(checks: list[Check]) -> bool:
    """Were like calls found to give unlike outputs, or none that is finite? (Not: did they raise.)"""
    return any(c.name == "determinism" and c.status == "failed" and c.error is not None for c in checks)


# -- scenarios -------------------------------------------------------------------------------------


def some_keys(g: torch.Generator, b: int, t: int, s: int) -> Tensor:
    """A mask `[b, 1, t, s]`, every row with a key to see, and not the same for each query."""
    keep = torch.rand(b, 1, t, s, generator=g) < 0.6
    keep[..., 0] |= ~keep.any(-1)
    return keep


def some_padding(c: Candidate, g: torch.Generator, b: int, s: int) -> Tensor:
    """Padding `[b, s]`, the first token always there: on the right, and with holes where that can be said."""
    lengths = torch.randint(1, s + 1, (b,), generator=g)
    lengths[0] = max(1, s - 2)
    padding = torch.arange(s) < lengths[:, None]
    if any(form.letters == "lengths" for _, form in c.forms.values()):
        return padding
    holes = torch.rand(b, s, generator=g) < 0.3
    holes[:, 0] = False
    return padding & ~holes


def scenarios(c: Candidate, seed: int, s: int = 7, t: int = 5, b: int = 3) -> dict[str, Inputs]:
    """One input for each way in which the candidate can be called."""
    g = torch.Generator().manual_seed(seed)
    x = c.draw(g, b, t, s)
    found = {"plain": x}
    if "causal" in c.can and not c.causal:
        found["causal"] = replace(c.draw(g, b, t), causal=True)
        if c.like in ("sdpa", "attention") and "cross" in c.can:
            y = c.draw(g, b, t, s)
            found["causal, longer keys"] = replace(y, causal=True, offset=0 if c.like == "sdpa" else s - t)
            one = c.draw(g, b, 1, s)
            found["causal, one query"] = replace(one, causal=True, offset=0 if c.like == "sdpa" else s - 1)
    if c.causal and "cross" in c.can:
        found["one query"] = c.draw(g, b, 1, s)
    if "mask" in c.can:
        found["mask"] = masked(c, c.draw(g, b, t, s), g)
        if "causal" in c.can and not c.causal and c.like != "sdpa":
            found["mask, causal"] = replace(masked(c, c.draw(g, b, t), g, first=True), causal=True)
    if "keys" in c.can:
        x = c.draw(g, b, t, s)
        found["keys"] = replace(x, padding=some_padding(c, g, b, x.s))
        if "causal" in c.can and not c.causal and c.like != "sdpa":
            x = c.draw(g, b, t)
            found["keys, causal"] = replace(x, padding=some_padding(c, g, b, x.s), causal=True)
    if "padding" in c.can:
        x = c.draw(g, b, t, s)
        found["padding"] = replace(x, padding=some_padding(c, g, b, x.s))
        if "mask" in c.can:
            x = c.draw(g, b, t, s)
            found["mask, padding"] = masked(c, replace(x, padding=some_padding(c, g, b, x.s)), g, first=True)
    if "weights" in c.can and not c.always_weights:
        found |= {f"{name}, weights": replace(x, weights=True) for name, x in list(found.items())}
    if "weights" in c.can and "average" in c.role:
        found |= {f"{name}, averaged": replace(x, average=True) for name, x in found.items() if x.weights}
    if "bias" in c.can:
        x = c.draw(g, b, t, s)
        found["added"] = replace(x, bias=torch.randn(x.t, x.s, generator=g))
    if "scale" in c.can:
        found["scale"] = replace(c.draw(g, b, t, s), scale=0.3)
    if "grouped" in c.can:
        found["grouped"] = c.draw(g, b, t, s, groups=2)
    return found


def masked(c: Candidate, x: Inputs, g: torch.Generator, first: bool = False) -> Inputs:
    """x with a mask; `first` shows every query the first key, so that no other mask leaves a row empty."""
    keep = some_keys(g, x.query.shape[0], x.t, x.s)
    if c.forms["mask"][1].letters in ("ts", "1ts"):
        keep = keep[:1].expand_as(keep).clone()
    if c.causal or first:
        keep[..., 0] = True
    return replace(x, keep=keep)


def answering(c: Candidate, seed: int) -> Iterator[tuple[str, Inputs]]:
    """The scenarios that a candidate answers in; those that it raises in, `values` tells."""
    for name, x in scenarios(c, seed).items():
        if c.attempt(x) is not None:
            yield name, x


def gather(c: Candidate, seeds: range) -> list[Evidence]:
    """What the candidate answers in each scenario, where it answers at all."""
    found = []
    for seed in seeds:
        t = 5 + seed % 2
        for name, x in scenarios(c, seed, s=t if seed % 3 == 0 else t + 2 + seed % 2, t=t).items():
            if (got := c.attempt(x)) is not None:
                found.append(Evidence(name, x, got))
        if "past" in c.can and "x" in c.role:
            found += decoded(c, seed)
    return found


def decoded(c: Candidate, seed: int) -> list[Evidence]:
    """The last token of a text after a cache of the others; and what the recipe is asked for the same."""
    x = c.draw(torch.Generator().manual_seed(seed), 2, 5 + seed % 2)
    try:
        out, kept = steps(c, x, [x.t - 1, 1])
    except Odd:
        return []
    except Trouble as trouble:
        if trouble.kind in LOST:
            raise
        return []
    if not kept:
        return []
    last = replace(x, query=x.query[:, -1:], causal=True, offset=x.s - 1, weights=False)
    return [Evidence("decoding", last, Found(out[-1]))]


def steps(c: Candidate, x: Inputs, lengths: list[int]) -> tuple[list[Tensor], bool]:
    """The outputs of a text cut into steps, each with what the one before returned as its cache; did one?"""
    past: Any = None
    outs, start = [], 0
    for n in lengths:
        y = x.but(**{f: getattr(x, f)[..., start : start + n, :] for f in ("query", "key", "value")})
        start += n
        call = c.call(y)
        kwargs = {**call.kwargs, c.role["past"]: past} | (
            {c.role["use_cache"]: True} if "use_cache" in c.role else {}
        )
        output = c.subject.call(replace(call, kwargs=kwargs)).output
        outs.append(c.read(output, y, strict=False).out)
        if not isinstance(output, tuple | list) or len(output) < 2:
            return outs, False
        past = next(
            (part for part in output[1:] if not isinstance(part, Tensor) and part is not None), output[1]
        )
    return outs, True


def counted(c: Candidate, x: Inputs, found: Found) -> Found:
    """Without what a padded token's own query gives, where the candidate gives something of its own there."""
    if x.padding is None or not c.blank:
        return found
    gone = ~x.padding[:, :, None]  # [b, t, 1]
    weights = found.weights
    if weights is not None:
        weights = weights.masked_fill(gone[:, None], 0.0)
    return Found(found.out.masked_fill(gone if found.out.dim() == 3 else gone[:, None], 0.0), weights)


def apart(c: Candidate, x: Inputs, got: Found, right: Found) -> tuple[float, float, str]:
    """(error, what rounding allows, of what): of the output, or of the weights if these are further off."""
    most = allowed(c.weights, x)
    got, right = counted(c, x, got), counted(c, x, right)
    error = distance(got.out, right.out)
    if right.weights is not None and got.weights is not None:
        off = distance(got.weights, right.weights)
        room = 1e-5 + 40 * torch.finfo(x.query.dtype).eps * (1 + float(x.query.abs().max()) ** 2)
        if off > room and not error > most:
            return off, room, "weights"
    return error, most, "output"


# -- values ----------------------------------------------------------------------------------------


@question("shapes")
def shapes(c: Candidate) -> Iterator[Check]:
    if c.refused:
        yield failed("shapes", c.refused)
        return
    g = torch.Generator().manual_seed(3)
    for b, t, s in ((3, 5, 7), (2, 7, 7), (1, 9, 3)):
        x = c.draw(g, b, t, s)
        c.run(x)
        if "weights" in c.can:
            c.run(replace(x, weights=True))
            if "average" in c.role:
                c.run(replace(x, weights=True, average=True))
    yield passed("shapes")


@question("determinism")
def determinism(c: Candidate) -> Iterator[Check]:
    name = "determinism"
    x = c.draw(torch.Generator().manual_seed(22), 2, 5)
    first = c.run(x, seed=1).out
    apart = max(distance(c.run(x, seed=1).out, first) for _ in range(AGAIN))
    if apart:
        yield failed(name, f"of {AGAIN + 1} like calls with one seed some give another output.", apart, 0.0)
    elif not bool(first.isfinite().any()):
        yield failed(name, "its output isn't finite anywhere, so nothing else can be compared.", math.inf)
    else:
        yield passed(name, "the same seed gives the same bits", 0.0, 0.0)


@question("values")
def values(c: Candidate) -> Iterator[Check]:
    groups: dict[str, list[tuple[float, float, str, str, Inputs]]] = {}
    packed = False
    for seed in range(100, 100 + DRAWS):
        t, s, b = 1 + seed % 6, 2 + seed % 7, 1 + seed % 3
        for name, x in scenarios(c, seed, s, t, b).items():
            if name not in ("plain", "causal") and seed >= 106:
                continue
            first = name.partition(",")[0]
            masks = {n: y for n, y in c.masked_by(x).items() if n not in c.judged}
            try:
                got = c.run(x)
            except Odd as odd:
                c.judged.update(masks)
                groups.setdefault(first, []).append((math.inf, 0.0, f"{odd}", name, x))
                continue
            except Trouble as trouble:
                if trouble.kind in LOST:
                    raise
                c.judged.update(masks)
                groups.setdefault(first, []).append((math.inf, 0.0, str(trouble).rstrip("."), name, x))
                continue
            error, most, of = apart(c, x, got, exact(c.weights, x))
            if error > most and not packed and c.repack():
                again = apart(c, x, got, exact(c.weights, x))
                if again[0] > again[1]:
                    c.repack()
                else:
                    error, most, of = again
                    c.notes.append("packed weights lie as [head, (q, k, v), d]")
            packed = True
            c.judged.update(n for n, y in masks.items() if error > most or matters(c, x, y, most))
            groups.setdefault(first, []).append((error, most, of, name, x))
    called = {
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
    for first, name in called.items():
        if first not in groups:
            continue
        wrong = [one for one in groups[first] if not one[0] <= one[1]]
        if not wrong:
            error, most, *_ = max(groups[first], key=lambda one: one[0] / max(one[1], 1e-300))
            yield passed(name, f"{len(groups[first])} inputs", error, most)
            continue
        error, most, of, scenario, x = min(wrong, key=lambda one: one[4].query.numel() + one[4].key.numel())
        if of in ("output", "weights"):
            x = smallest(c, x)
            error, most, of = apart(c, x, c.run(x), exact(c.weights, x))
            reason = (
                f"the {of} differ{'s' if of == 'output' else ''} in {len(wrong)} of "
                f"{len(groups[first])} inputs "
                f"({scenario}); the smallest has b = {x.query.shape[0]}, t = {x.t}, s = {x.s}."
            )
        else:
            reason = f"{of}."
        yield failed(name, reason, error, most)


def matters(c: Candidate, x: Inputs, without: Inputs, most: float) -> bool:
    """Would an output that is right for one of two calls be wrong for the other?"""
    outs = [counted(c, x, exact(c.weights, y)).out for y in (x, without)]
    return distance(*outs) > 2 * most


def smallest(c: Candidate, x: Inputs) -> Inputs:
    """The input cut down, batch entries, queries and keys one after the other, while it still fails."""

    def fails(y: Inputs) -> bool:
        got = c.attempt(y, strict=True)
        if got is None:
            return False
        error, most, _ = apart(c, y, got, exact(c.weights, y))
        return not error <= most

    again = True
    while again:
        again = False
        for axis in ("batch", "tokens", "queries", "keys"):
            while (y := cut(c, x, axis)) is not None and fails(y):
                x, again = y, True
    return x


def cut(c: Candidate, x: Inputs, axis: str) -> Inputs | None:
    """One batch entry, query or key less, the last; None where there is only one, or it has no such axis."""
    crossed = "cross" in c.can
    if axis == "batch":
        if x.query.shape[0] == 1:
            return None
        batched = {n: y for n, y in x.tensors().items() if n not in ("sink", "bias") and y.shape[0] > 1}
        return x.but(**{n: y[:-1] for n, y in batched.items()})
    queries, keys = (axis in ("tokens", "queries"), axis in ("tokens", "keys"))
    if (axis == "tokens" and crossed) or (axis != "tokens" and not crossed):
        return None
    if (queries and x.t == 1) or (keys and x.s == 1):
        return None
    y = replace(x)
    if queries:
        y = replace(y, query=y.query[..., :-1, :])
    if keys:
        y = replace(y, key=y.key[..., :-1, :], value=y.value[..., :-1, :])
        y = replace(y, padding=None if y.padding is None else y.padding[..., :-1])
    for name in ("keep", "bias"):
        z = getattr(y, name)
        if z is not None:
            y = y.but(**{name: z[..., : z.shape[-2] - queries, : z.shape[-1] - keys]})
    if x.causal and c.like != "sdpa" and x.offset == x.s - x.t:
        y = replace(y, offset=y.s - y.t)
    if (y.keep is not None and not bool(y.keep.any(-1).all())) or (
        y.padding is not None and not bool(y.padding.any(-1).all())
    ):
        return None
    return y


@question("gradients")
def gradients(c: Candidate) -> Iterator[Check]:
    name = "gradients"
    x = scenarios(c, 7)["causal" if "causal" in c.can and not c.causal else "plain"]
    call = c.call(x)
    slots = c.slots(call)
    right, plain = _gradients(c, x, torch.float64), _gradients(c, x, torch.float32)
    cotangent = right.pop("cotangent")
    plain.pop("cotangent")
    shaped = c.subject.call(call).output
    parts = list(shaped.values()) if isinstance(shaped, dict) else shaped
    first = next(p for p in (parts if isinstance(parts, list | tuple) else [parts]) if isinstance(p, Tensor))
    seed = c.turn(cotangent)
    if c.like == "hf" and first.shape != seed.shape:
        seed = seed.transpose(1, 2)
    answer = c.answer(
        x, grads=tuple(dict.fromkeys(slots.values())), cotangent=seed.to(torch.float32).contiguous()
    )
    paths = {
        "query": slots.get("query", slots.get("x")),
        "key": slots.get("key", slots.get("context")),
        "value": slots.get("value"),
    }
    worst = (0.0, 1.0, "")
    shared: dict[str, list[str]] = {}
    for role, path in paths.items():
        if path is not None:
            shared.setdefault(path, []).append(role)
    if "cross" not in c.can and len(shared) == 1:
        shared = {path: ["query", "key", "value"] for path in shared}
    elif c.like == "cross":
        shared = {path: (["key", "value"] if roles == ["key"] else roles) for path, roles in shared.items()}
    for path, roles in shared.items():
        got = answer.grads.get(path)
        want = sum(right[role] for role in roles)
        low = sum(plain[role] for role in roles)
        assert isinstance(want, Tensor)
        assert isinstance(low, Tensor)
        if got is None:
            yield failed(name, f"no gradient reaches {' and '.join(roles)}.")
            return
        got = c.back(got)
        error = distance(got, want)
        most = (
            8 * distance(low, want) + 64 * torch.finfo(torch.float32).eps * (1 + float(want.abs().max())) * 4
        )
        if error / most > worst[0] / worst[1]:
            worst = (error, most, " and ".join(roles))
    missing = [
        path
        for path, grad in answer.weight_grads.items()
        if grad is None
        and c.weights is not None
        and path in {p.path for parts in c.projections.weight.values() for p in parts}
    ]
    if missing:
        yield failed(name, f"no gradient reaches {', '.join(missing)}.")
    elif worst[0] > worst[1]:
        yield failed(name, f"the gradient of {worst[2]} differs.", worst[0], worst[1])
    else:
        yield passed(name, "", worst[0], worst[1])


def _gradients(c: Candidate, x: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    recipe = Recipe(None if c.weights is None else c.weights.to(dtype), x.query.dtype)
    y = x.to(dtype)
    leaves = [z.detach().clone().requires_grad_() for z in (y.query, y.key, y.value)]
    out = recipe(replace(y, query=leaves[0], key=leaves[1], value=leaves[2])).out
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    grads = torch.autograd.grad(out, leaves, cotangent)
    return dict(zip(("query", "key", "value"), grads, strict=True)) | {"cotangent": cotangent}


# -- who reaches whom ------------------------------------------------------------------------------


@question("causality")
def causality(c: Candidate) -> Iterator[Check]:
    name = "causality"
    if "causal" not in c.can:
        yield skipped(name, "it isn't causal, and can't be asked to be")
        return
    g = torch.Generator().manual_seed(11)
    x = c.draw(g, 2, 6)
    x = replace(x, causal=True, offset=0)
    asked = [x, replace(x, weights=True)] if "weights" in c.can else [x]
    for y in asked:
        before = c.run(y)
        for j in range(1, 6):
            after = c.run(c.moved(y, j))
            for i in range(j):
                row, other = before.out[..., i, :], after.out[..., i, :]
                if not torch.equal(row.nan_to_num(), other.nan_to_num()):
                    error = distance(row, other)
                    if error <= 1e-6 * (1 + float(row.abs().max())):
                        continue
                    when = " when weights are asked for" if y.weights and not x.weights else ""
                    yield failed(name, f"query {i} sees key {j}, which is its future{when}.", error, 0.0)
                    return
    yield passed(name, "a change of key j moves no query before it", 0.0, 0.0)


@question("hidden keys")
def hidden_keys(c: Candidate) -> Iterator[Check]:
    name = "hidden keys"
    yield from mask_arguments(c)
    which = [one for one in ("padding", "keys", "mask") if one in c.can]
    if not which:
        yield skipped(name, "it takes no mask")
        return
    g = torch.Generator().manual_seed(12)
    leaks_nan = refused = False
    for one in which:
        x = c.draw(g, 2, 5, 7)
        j = x.s - 1
        if one == "mask":
            keep = torch.ones(2, 1, x.t, x.s, dtype=torch.bool)
            keep[..., j] = False
            x = replace(x, keep=keep)
        else:
            x = replace(x, padding=torch.arange(x.s).expand(2, -1) < j)
        before = c.run(x)
        rows = [i for i in range(x.t) if "cross" in c.can or i != j]
        after = c.run(c.moved(x, j))
        a, b = before.out[..., rows, :], after.out[..., rows, :]
        error = distance(a.nan_to_num(), b.nan_to_num())
        if error > 1e-6 * (1 + float(a.nan_to_num().abs().max())):
            i = next(
                i
                for i in rows
                if distance(before.out[..., i, :].nan_to_num(), after.out[..., i, :].nan_to_num()) > 0
            )
            what = {"padding": "padding", "keys": "the mask", "mask": "the mask"}[one]
            yield failed(name, f"query {i} sees key {j}, which {what} hides.", error, 0.0)
            return
        try:
            poisoned = c.run(c.moved(x, j, math.nan)).out[..., rows, :]
            leaks_nan |= bool(poisoned.isnan().any() and not a.isnan().any())
        except Trouble as trouble:
            if trouble.kind in LOST:
                raise
            refused = True
    said = "what a hidden key holds moves no query"
    if refused:
        said += "; a NaN there is refused"
    if leaks_nan:
        said += "; a NaN there does, as in plain PyTorch (0 · NaN)"
    yield passed(name, said, 0.0, 0.0)


def mask_arguments(c: Candidate) -> Iterator[Check]:
    """A check for each mask argument on which no answer was compared."""
    for name in c.masks:
        if name in c.judged:
            continue
        complaint = c.untaken.get(name)
        status = "not judged"
        if complaint is not None:
            why = f"every call with it raised an error: {str(complaint).rstrip('.')}."
            if complaint.error.rpartition(".")[2] in BROKEN:
                status = "failed"  # a name that isn't defined is wrong for a mask of any shape and type
        elif name in c.untaken:
            why = "with every form of mask, the call returned no attention output."
        else:
            why = "no check passed it, so it was never used."
        yield Check(f"argument {name}", status, why)


@question("permutation")
def permutation(c: Candidate) -> Iterator[Check]:
    name = "permutation"
    if c.causal:
        yield skipped(name, "it is causal, so order matters")
        return
    g = torch.Generator().manual_seed(13)
    x = c.draw(g, 2, 5, 7)
    order = torch.randperm(x.s, generator=g)
    if "cross" in c.can:
        y = replace(x, key=x.key[..., order, :], value=x.value[..., order, :])
        want = c.run(x).out
        said = "the order of keys doesn't matter"
    else:
        y = replace(x, query=x.query[..., order, :], key=x.key[..., order, :], value=x.value[..., order, :])
        want = c.run(x).out[..., order, :]
        said = "permuted tokens give permuted outputs"
    error, most = distance(c.run(y).out, want), 2 * allowed(c.weights, x)
    if error <= most:
        yield passed(name, said, error, most)
    else:
        yield failed(
            name,
            "without a mask or positions, "
            + (
                "another order of keys changes the output."
                if "cross" in c.can
                else "permuted tokens must give permuted outputs, and don't."
            ),
            error,
            most,
        )


@question("batch entries")
def batch_entries(c: Candidate) -> Iterator[Check]:
    name = "batch entries"
    if c.cut == "[t, d]":
        yield skipped(name, "it takes one sequence")
        return
    g = torch.Generator().manual_seed(14)
    x = c.draw(g, 3, 5, 7)
    before = c.run(x)
    other = c.draw(g, 3, 5, 7)
    mixed = {}
    for field in ("query", "key", "value"):
        y = getattr(x, field).clone()
        y[0] = getattr(other, field)[0]
        mixed[field] = y
    after = c.run(c.given(x, **mixed))
    error, most = distance(before.out[1:], after.out[1:]), allowed(c.weights, x)
    if error <= most:
        yield passed(name, "entries don't reach each other", error, most)
    else:
        yield failed(name, "a change in batch entry 0 changes the others.", error, most)


@question("heads")
def heads(c: Candidate) -> Iterator[Check]:
    name = "heads"
    if c.heads == 1:
        yield skipped(name, "it has one head")
        return
    g = torch.Generator().manual_seed(15)
    x = c.draw(g, 2, 5, 7)
    if c.weights is None:
        y = replace(x, query=torch.cat((x.query[:, :1] + 1, x.query[:, 1:]), 1))
        error, most = distance(c.run(x).out[:, 1:], c.run(y).out[:, 1:]), allowed(None, x)
        said = "a change of head 0's queries"
    else:
        yield from _heads_by_weights(c, x)
        return
    yield (
        passed(name, "heads don't reach each other", error, most)
        if error <= most
        else failed(name, f"{said} changes other heads.", error, most)
    )


def _heads_by_weights(c: Candidate, x: Inputs) -> Iterator[Check]:
    """Other query weights for head 0 may move the output only along what the output weights take from
    head 0.
    """
    name = "heads"
    assert c.weights is not None
    o = c.weights.weight.get("o")
    n = c.weights.weight["v"].shape[0] // c.weights.groups  # width of a head's values
    rows = c.weights.weight["q"].shape[0] // c.weights.heads
    path = c.projections.weight["q"][0]
    if (
        o is None
        or n >= o.shape[0]
        or path.axes
        or path.rows
        or path.turned
        or len(c.projections.weight["q"]) > 1
    ):
        yield skipped(name, "its heads can't be told apart in its output")
        return
    before = c.run(x)
    held = c.held[path.path]
    other = held.clone()
    other[:rows] = held[:rows].flip(0) * 1.5
    c.subject.load({path.path: other})
    try:
        after = c.run(x)
    finally:
        c.subject.load({path.path: held})
    change = (after.out - before.out).to(torch.float64).flatten(0, -2).mT  # [e, n]
    basis = torch.linalg.qr(o[:, :n].to(torch.float64)).Q
    rest = float((change - basis @ (basis.mT @ change)).abs().max())
    most = 4 * allowed(c.weights, x)
    if rest <= most:
        yield passed(name, "heads don't reach each other", rest, most)
    else:
        yield failed(name, "other query weights in head 0 change what other heads give.", rest, most)


# -- weights ---------------------------------------------------------------------------------------


@question("rows sum to one")
def rows_sum(c: Candidate) -> Iterator[Check]:
    name = "rows sum to one"
    if "weights" not in c.can:
        yield skipped(name, "it returns no weights")
        return
    worst = 0.0
    for scenario, x in answering(c, 17):
        got = c.run(replace(x, weights=True))
        assert got.weights is not None
        if bool((got.weights < -1e-6).any()):
            yield failed(name, f"a weight is negative ({scenario}).", float(-got.weights.min()), 0.0)
            return
        sums = got.weights.sum(-1)
        worst = max(worst, distance(sums, torch.ones_like(sums)))
        sinks = x.sink is not None or (c.weights is not None and c.weights.sink is not None)
        if worst > 1e-4 and not sinks:
            total = float(sums.flatten()[(sums - 1).abs().nan_to_num(math.inf).argmax()])
            yield failed(name, f"the weights of a query sum to {total:.4g} ({scenario}).", worst, 1e-4)
            return
    yield passed(name, "with a sink, less than one" if "sink" in c.role else "", worst, 1e-4)


@question("empty rows")
def empty_rows(c: Candidate) -> Iterator[Check]:
    name = "empty rows"
    x = emptied(c, 18)
    if x is None:
        yield skipped(name, "it takes no mask that could hide every key of a query")
        return
    worst = 0.0
    tries = [(x, "")]
    if "weights" in c.can and not x.weights:
        tries.append((replace(x, weights=True), " when weights are asked for"))
    if (both := emptied_by_both(c, 18)) is not None:
        tries.append((both, ", hidden by the causal mask and another one together"))
    for y, when in tries:
        got, right = c.run(y), exact(c.weights, y)
        row, want = (blind(one.out, y) for one in (got, right))
        if bool(row.isnan().any()):
            yield failed(
                name, f"a query that may attend to nothing gives NaN{when}: its weights should be 0."
            )
            return
        worst = max(worst, distance(row, want))
        if worst > allowed(c.weights, x):
            reason = f"a query that may attend to nothing attends to what is hidden{when}: it should weigh 0."
            yield failed(name, reason, worst, allowed(c.weights, x))
            return
        error, most, of = apart(c, y, got, right)
        if not error <= most and correct(c, seeing_all(y)):
            others = (
                "other queries' output differs" if of == "output" else "the weights that come back differ"
            )
            yield failed(name, f"where a query may attend to nothing{when}, {others}.", error, most)
            return
    yield passed(name, "weights of 0", worst, allowed(c.weights, x))


def seeing_all(x: Inputs) -> Inputs:
    """The same inputs, masked in the same ways, with nothing hidden but the future."""
    return x.but(**{n: torch.ones_like(y) for n, y in x.tensors().items() if n in ("keep", "padding")})


def correct(c: Candidate, x: Inputs) -> bool:
    error, most, _ = apart(c, x, c.run(x), exact(c.weights, x))
    return error <= most


def blind(out: Tensor, x: Inputs) -> Tensor:
    """Of the first sequence's output, what belongs to the queries that may attend to nothing."""
    seen = torch.ones(1, x.t, x.s, dtype=torch.bool)
    if x.padding is not None:
        seen = seen & x.padding[0]
    if x.keep is not None:
        seen = seen & x.keep[0]
    if x.causal:
        seen = seen.tril(x.offset)
    return out[0][..., (~seen[0].any(-1)).nonzero().flatten(), :]


def emptied_by_both(c: Candidate, seed: int) -> Inputs | None:
    """Causal inputs whose first key is hidden too, as padding on the left has it."""
    if "causal" not in c.can or c.like == "sdpa":
        return None
    x = c.draw(torch.Generator().manual_seed(seed), 2, 5)
    x = replace(x, causal=True, offset=x.s - x.t)
    if "padding" in c.can or "keys" in c.can:
        padding = torch.ones(2, x.s, dtype=torch.bool)
        padding[0, 0] = False
        return replace(x, padding=padding)
    if "mask" in c.can:
        keep = torch.ones(2, 1, x.t, x.s, dtype=torch.bool)
        keep[..., 0] = False
        return replace(x, keep=keep)
    return None


def emptied(c: Candidate, seed: int) -> Inputs | None:
    """Inputs whose first sequence, or its second query, may attend to nothing."""
    g = torch.Generator().manual_seed(seed)
    x = c.draw(g, 2, 5, 7)
    if "mask" in c.can:
        keep = torch.ones(2, 1, x.t, x.s, dtype=torch.bool)
        one = c.forms["mask"][1].letters in ("ts", "1ts")
        keep[slice(None) if one else 0, :, 1] = False
        return replace(x, keep=keep)
    if "padding" in c.can or "keys" in c.can:
        padding = torch.ones(2, x.s, dtype=torch.bool)
        padding[0] = False
        return replace(x, padding=padding)
    return None


# -- numbers ---------------------------------------------------------------------------------------


@question("large scores")
def large_scores(c: Candidate) -> Iterator[Check]:
    name = "large scores"
    worst = (0.0, 1.0)
    for said, x in (("", large(c, 19)), *((" and a mask", x) for x in large_masked(c, 19))):
        got, right = c.run(x), exact(c.weights, x)
        if not bool(counted(c, x, got).out.isfinite().all()):
            yield failed(name, f"scores of some hundreds{said} give NaN or infinity.", math.inf, 0.0)
            return
        error, most, of = apart(c, x, got, right)
        if not error <= 4 * most:
            yield failed(
                name,
                f"with scores of some hundreds{said} the {of} differ{'s' if of == 'output' else ''}.",
                error,
                4 * most,
            )
            return
        worst = max(worst, (error, 4 * most), key=lambda one: one[0] / one[1])
    yield passed(name, "scores of some hundreds", *worst)


def large(c: Candidate, seed: int) -> Inputs:
    """Inputs whose largest score is about 300: e^300 is beyond float32."""
    return _grown(c, c.draw(torch.Generator().manual_seed(seed), 2, 5, 7))


def _grown(c: Candidate, x: Inputs) -> Inputs:
    """x times a number, so that its largest score is about 300."""
    by = (300 / float(_scores(c, x).abs().max())) ** 0.5
    fields = {
        n: getattr(x, n) * by for n in (("query", "key") if c.weights is None else ("query", "key", "value"))
    }
    return c.given(x, **fields)


def large_masked(c: Candidate, seed: int) -> list[Inputs]:
    """Such inputs that show only what has the least scores, so that a hidden score must be less than any."""
    found = []
    x = large(c, seed)
    scores = _scores(c, x).mean(1, keepdim=True)  # [b, 1, t, s]
    if "mask" in c.can:
        one = c.forms["mask"][1].letters in ("ts", "1ts")  # one mask for the whole batch
        least = (scores.mean(0, keepdim=True).expand_as(scores) if one else scores).argmin(-1, keepdim=True)
        keep = torch.zeros(x.query.shape[0], 1, x.t, x.s, dtype=torch.bool).scatter(-1, least, True)
        if c.causal:  # where the least score may be of the future
            keep[..., 0] = True
        found.append(replace(x, keep=keep))
    for feature in ("keys", "padding"):
        if feature in c.can and c.forms[feature][1].letters != "lengths":
            least = scores.mean(2)[:, 0].argmin(-1, keepdim=True)  # [b, 1]
            padding = torch.zeros(x.query.shape[0], x.s, dtype=torch.bool).scatter(-1, least, True)
            padding[:, 0] |= c.causal
            found.append(replace(x, padding=padding))
    if "causal" in c.can and not c.causal:
        y = c.draw(torch.Generator().manual_seed(seed), 2, x.t)
        found.append(replace(_grown(c, y), causal=True))
    return found


def _scores(c: Candidate, x: Inputs) -> Tensor:
    """The scores of these inputs, scaled and not masked: `[b, h, t, s]`."""
    recipe = Recipe(c.weights)
    recipe(x)
    return recipe.raw * recipe.scale()


def _half(c: Candidate, dtype: torch.dtype) -> Iterator[Check]:
    name = str(dtype).removeprefix("torch.")
    x = c.draw(torch.Generator().manual_seed(20), 2, 5, 7).to(dtype)
    if "mask" in c.can:
        x = masked(c, x, torch.Generator().manual_seed(21))
    weights = None if c.weights is None else c.weights.to(dtype)
    right = exact(weights, x)
    plain = Recipe(weights, dtype)(x)
    try:
        got = c.run(x, dtype=dtype)
    except Trouble as trouble:
        if trouble.kind in LOST:
            raise
        yield Check(name, "could not be checked", f"{trouble}".rstrip(".") + ".")
        return
    error, loss = distance(got.out, right.out), distance(plain.out, right.out)
    most = 4 * loss + allowed(weights, x)
    said = f"plain PyTorch loses {loss:.2g}"
    if error <= most:
        yield passed(name, said, error, most)
    else:
        yield failed(name, f"it loses far more than rounding explains; {said}.", error, most)


@question("float16")
def float16(c: Candidate) -> Iterator[Check]:
    yield from _half(c, torch.float16)


@question("bfloat16")
def bfloat16(c: Candidate) -> Iterator[Check]:
    yield from _half(c, torch.bfloat16)


# -- how it behaves --------------------------------------------------------------------------------


@question("training and evaluation")
def training(c: Candidate) -> Iterator[Check]:
    name = "training and evaluation"
    x = c.draw(torch.Generator().manual_seed(23), 2, 6, 8)
    outs = [c.run(x, seed=seed).out for seed in (1, 2, 3)]
    spread = max(distance(outs[0], one) for one in outs)
    if spread:
        yield failed(
            name, "in evaluation its output depends on the random seed: dropout is left on.", spread, 0.0
        )
        return
    trained = c.run(x, seed=1, training=True)
    if not bool(trained.out.isfinite().all()):
        yield failed(name, "in training its output isn't finite.")
        return
    said = "evaluation draws nothing" + ("" if distance(trained.out, outs[0]) else ", nor does training")
    if "weights" in c.can:
        asked = replace(x, weights=True)
        kept, drawn = c.run(asked, seed=1).weights, c.run(asked, seed=1, training=True).weights
        if kept is not None and drawn is not None and distance(kept, drawn) > 1e-5:
            said += "; in training its weights come after dropout, as PyTorch's own do"
    yield passed(name, said, 0.0, 0.0)


@question("non-contiguous inputs")
def strided(c: Candidate) -> Iterator[Check]:
    name = "non-contiguous inputs"
    x = c.draw(torch.Generator().manual_seed(24), 2, 5, 7)

    def turned(y: Tensor) -> Tensor:
        return y.mT.contiguous().mT

    def spread(y: Tensor) -> Tensor:
        return torch.stack((y, y), -1).flatten(-2)[..., ::2]

    before = c.run(x).out
    worst = 0.0
    for change in (turned, spread):
        y = {n: change(getattr(x, n)) for n in ("query", "key", "value")}
        worst = max(worst, distance(c.run(c.given(x, **y)).out, before))
    most = allowed(c.weights, x)
    yield (
        passed(name, "", worst, most)
        if worst <= most
        else failed(name, "the same numbers with other strides give another output.", worst, most)
    )


@question("sizes of one")
def ones(c: Candidate) -> Iterator[Check]:
    name = "sizes of one"
    worst = (0.0, 1.0)
    for b, t, s in ((1, 1, 1), (1, 4, 1), (3, 1, 6), (1, 6, 6)):
        x = c.draw(torch.Generator().manual_seed(25), b, t, s)
        got = c.run(x)
        error, most = distance(got.out, exact(c.weights, x).out), allowed(c.weights, x)
        if not error <= most and error / most > worst[0] / worst[1]:
            worst = (error, most)
            yield failed(name, f"with b = {b}, t = {x.t}, s = {x.s} the output differs.", error, most)
            return
    yield passed(name)


@question("state")
def state(c: Candidate) -> Iterator[Check]:
    name = "state"
    changed: dict[str, None] = {}
    for _, x in answering(c, 26):
        answer = c.answer(x)
        for what in answer.changed:
            kind, place, path = what.partition(" in place: ")
            changed[f"{kind}{place}{c.named(path)}" if "argument" in kind else what] = None
    if changed:
        yield failed(name, f"a call changed {', '.join(changed)}.")
    else:
        yield passed(name, "a call changes no argument, seed, default dtype, thread count or grad mode")


@question("cache")
def cached(c: Candidate) -> Iterator[Check]:
    name = "cache"
    if "past" not in c.can or "x" not in c.role:
        yield skipped(name, "it takes no cache of earlier keys that comes back from a call")
        return
    x = c.draw(torch.Generator().manual_seed(27), 2, 6)
    whole = c.run(x).out
    outs, kept = steps(c, x, [1] * 6)
    if not kept:
        yield Check(
            name, "could not be checked", "a call returns nothing that could be passed on as its cache"
        )
        return
    error, most = distance(torch.cat(outs, -2), whole), 4 * allowed(c.weights, x)
    if error <= most:
        yield passed(name, "token by token gives what one pass gives", error, most)
        return
    off = next(i for i in range(6) if distance(outs[i], whole[..., i : i + 1, :]) > most)
    yield failed(name, f"token by token differs from one pass, from token {off} on.", error, most)


@question("memory growth")
def growth(c: Candidate) -> Iterator[Check]:
    name = "memory growth"
    if not isinstance(c.subject, Process):
        yield skipped(name, "it runs in this process, where its memory can't be told apart")
        return
    peaks: dict[int, int] = {}
    for n in GROWTH:
        x = c.draw(torch.Generator().manual_seed(28), 1, n)
        try:
            peak = c.answer(x, memory=True).peak
        except Trouble as trouble:
            if trouble.kind in LOST:
                raise
            break
        if peak is None:
            yield skipped(name, "this machine doesn't tell the peak of a call")
            return
        peaks[n] = peak
    sizes = [n for n in peaks if peaks[n] > 2**20]
    if len(sizes) < 2:
        yield skipped(
            name, f"it takes no more than a megabyte at {max(peaks, default=0):,} tokens, or no longer text"
        )
        return
    a, b = sizes[-2], sizes[-1]
    power = math.log(max(peaks[b], 1) / peaks[a]) / math.log(b / a)
    kind = "linear" if power < 1.4 else "quadratic" if power < 2.5 else "more than quadratic"
    yield passed(
        name, f"{kind}: {peaks[b] / 1e6:.0f} MB at {b:,} tokens, growing as their number to the {power:.1f}"
    )


@question("torch.compile")
def compiled(c: Candidate) -> Iterator[Check]:
    name = "torch.compile"
    x = c.draw(torch.Generator().manual_seed(29), 2, 5, 7)
    before = c.run(x).out
    try:
        after = c.run(x, compiled=True).out
    except Trouble as trouble:
        if trouble.kind in LOST:
            raise
        yield Check(name, "could not be checked", f"{trouble}".rstrip(".") + ".")
        return
    error, most = distance(after, before), 2 * allowed(c.weights, x)
    if error <= most:
        yield passed(name, "", error, most)
    else:
        yield failed(name, "compiled, it gives another output.", error, most)
