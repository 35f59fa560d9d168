"""Checks of which inputs affect which outputs: a change of other inputs must have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.registry import Check, check, failed, judge, passed, skipped
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Inputs, largest_difference

# Code that raises one of these is wrong for a mask of any shape and type.
UNDEFINED = {
    "AttributeError",
    "NameError",
    "UnboundLocalError",
    "ImportError",
    "ModuleNotFoundError",
    "KeyError",
}


@check("causality")
def check_causality(c: AttentionAdapter) -> Check:
    """Change each key, and compare the queries before it."""
    if "causal" not in c.features:
        return skipped("it isn't causal, and has no argument for it")
    x = c.draw(torch.Generator().manual_seed(11), 2, 6).but(causal=True, offset=0)
    for y in [x, x.but(need_weights=True)] if "weights" in c.features else [x]:
        before = c.run(y)
        for j in range(1, 6):
            after = c.run(c.change_key(y, j))
            for i in range(j):
                error = largest_difference(before.out[..., i, :], after.out[..., i, :])
                if error > 1e-6 * (1 + float(before.out[..., i, :].abs().max())):
                    when = " when weights are requested" if y.need_weights and not x.need_weights else ""
                    return failed(f"query {i} depends on key {j}, which is its future{when}.", error, 0.0)
    return passed("a change of key j affects no query before it", 0.0, 0.0)


@check("hidden keys")
def check_masked_keys(c: AttentionAdapter) -> Iterator[Check]:
    """Change a masked key, and compare all queries."""
    yield from check_mask_arguments(c)
    features = [feature for feature in ("padding", "keys", "mask") if feature in c.features]
    if not features:
        yield skipped("it takes no mask")
        return
    g = torch.Generator().manual_seed(12)
    leaks_nan = rejects_nan = False
    for feature in features:
        x = c.draw(g, 2, 5, 7)
        j = x.s - 1
        is_visible = torch.arange(x.s) < j
        if feature == "mask":
            x = x.but(keep=is_visible.expand(2, 1, x.t, -1).clone())
        else:
            x = x.but(padding=is_visible.expand(2, -1))
        rows = c.unchanged_queries(x, j)
        before = c.run(x).out[..., rows, :]
        after = c.run(c.change_key(x, j)).out[..., rows, :]
        a, b = before.nan_to_num(), after.nan_to_num()
        error = largest_difference(a, b)
        if error > 1e-6 * (1 + float(a.abs().max())):
            n = next(n for n in range(len(rows)) if largest_difference(a[..., n, :], b[..., n, :]) > 0)
            what = "padding" if feature == "padding" else "masked"
            yield failed(f"query {rows[n]} depends on key {j}, which is {what}.", error, 0.0)
            return
        try:
            poisoned = c.run(c.change_key(x, j, math.nan)).out[..., rows, :]
            leaks_nan |= bool(poisoned.isnan().any() and not before.isnan().any())
        except CodeError:
            rejects_nan = True
    reason = "the content of a masked key affects no query"
    reason += "; a NaN there raises an error" * rejects_nan
    reason += "; a NaN there does, as in plain PyTorch (0 · NaN)" * leaks_nan
    yield passed(reason, 0.0, 0.0)


def check_mask_arguments(c: AttentionAdapter) -> Iterator[Check]:
    """Yield a check for each mask argument on which no compared output depends."""
    for name in c.mask_arguments:
        if name in c.judged:
            continue
        error, status = c.rejected_masks.get(name), "not judged"
        if error is not None:
            why = f"every call with it raised an error: {error.reason}."
            if error.error.rpartition(".")[2] in UNDEFINED:
                status = "failed"
        elif name in c.rejected_masks:
            why = "with every form of mask, the call returned no attention output."
        else:
            why = "no check passed it, so it was never used."
        yield Check(f"argument {name}", status, why)


@check("permutation")
def check_permutation(c: AttentionAdapter) -> Check:
    """Permute keys, or all tokens."""
    if c.always_causal:
        return skipped("it is causal, so order matters")
    g = torch.Generator().manual_seed(13)
    x = c.draw(g, 2, 5, 7)
    order = torch.randperm(x.s, generator=g)
    y = x.but(key=x.key[..., order, :], value=x.value[..., order, :])
    expected = c.run(x).out
    reason, failure = "the order of keys doesn't matter", "another order of keys changes the output"
    if "cross" not in c.features:
        y = y.but(query=x.query[..., order, :])
        expected = expected[..., order, :]
        reason = "permuted tokens give permuted outputs"
        failure = "permuted tokens don't give permuted outputs"
    error, allowed = largest_difference(c.run(y).out, expected), 2 * c.allowed_error(x)
    return judge(error, allowed, reason, f"without a mask or positions, {failure}.")


@check("batch entries")
def check_batch_entries(c: AttentionAdapter) -> Check:
    """Change one batch entry, and compare the others."""
    if c.head_layout == "[t, d]":
        return skipped("it takes one sequence")
    g = torch.Generator().manual_seed(14)
    x, other = c.draw(g, 3, 5, 7), c.draw(g, 3, 5, 7)
    before = c.run(x)
    mixed = {n: torch.cat((getattr(other, n)[:1], getattr(x, n)[1:])) for n in ("query", "key", "value")}
    after = c.run(c.replace_sequences(x, **mixed))
    error = largest_difference(before.out[1:], after.out[1:])
    reason, failure = "entries are independent", "a change in batch entry 0 changes the others."
    return judge(error, c.allowed_error(x), reason, failure)


@check("heads")
def check_heads(c: AttentionAdapter) -> Check:
    """Change head 0, and compare the others."""
    if c.heads == 1:
        return skipped("it has one head")
    x = c.draw(torch.Generator().manual_seed(15), 2, 5, 7)
    if c.weights is not None:
        return check_projected_heads(c, x)
    y = x.but(query=torch.cat((x.query[:, :1] + 1, x.query[:, 1:]), 1))
    error = largest_difference(c.run(x).out[:, 1:], c.run(y).out[:, 1:])
    failure = "a change of head 0's queries changes other heads."
    return judge(error, c.allowed_error(x), "heads are independent", failure)


def check_projected_heads(c: AttentionAdapter, x: Inputs) -> Check:
    """Change the query weights of head 0: the output may move only along what o takes from head 0."""
    assert c.weights is not None
    weights, (part, *others) = c.weights, c.projections.weight["q"]
    o = weights.weight.get("o")
    value_size = weights.weight["v"].shape[0] // weights.key_heads
    if o is None or value_size >= o.shape[0] or part.axes or part.rows or part.transposed or others:
        return skipped("its heads can't be distinguished in its output")
    before = c.run(x)
    held, rows = c.parameters[part.path], weights.head_size
    c.candidate.load({part.path: torch.cat((held[:rows].flip(0) * 1.5, held[rows:]))})
    try:
        after = c.run(x)
    finally:
        c.candidate.load({part.path: held})
    change: Tensor = (after.out - before.out).to(torch.float64).flatten(0, -2).mT  # [e, n]
    basis = torch.linalg.qr(o[:, :value_size].to(torch.float64)).Q
    rest = float((change - basis @ (basis.mT @ change)).abs().max())  # what isn't from head 0
    failure = "other query weights in head 0 change the outputs of other heads."
    return judge(rest, 4 * c.allowed_error(x), "heads are independent", failure)
