"""Checks of attention weights: rows that sum to one, and rows without a visible key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import answered
from manyheads.checker.checks.registry import Check, check, failed, passed, skipped
from manyheads.checker.oracle import Inputs, largest_difference


@check("rows sum to one")
def check_row_sums(c: AttentionAdapter) -> Check:
    """Sum the returned weights of each query."""
    if "weights" not in c.features:
        return skipped("it returns no weights")
    worst = 0.0
    has_sink = "sink" in c.arguments or (c.weights is not None and c.weights.sink is not None)
    for scenario, x in answered(c, 17):
        weights = c.run(x.but(need_weights=True)).weights
        assert weights is not None
        if bool((weights < -1e-6).any()):
            return failed(f"a weight is negative ({scenario}).", float(-weights.min()), 0.0)
        sums = weights.sum(-1)
        worst = max(worst, largest_difference(sums, torch.ones_like(sums)))
        if worst > 1e-4 and not has_sink:
            total = float(sums.flatten()[(sums - 1).abs().nan_to_num(math.inf).argmax()])
            return failed(f"the weights of a query sum to {total:.4g} ({scenario}).", worst, 1e-4)
    return passed("with a sink, less than one" if "sink" in c.arguments else "", worst, 1e-4)


@check("empty rows")
def check_empty_rows(c: AttentionAdapter) -> Check:
    """Mask all keys of a query: it gets zeros, and other queries are right."""
    x = with_empty_row(c, 18)
    if x is None:
        return skipped("it takes no mask that could mask every key of a query")
    inputs = [(x, "")]
    if "weights" in c.features and not x.need_weights:
        inputs.append((x.but(need_weights=True), " when weights are requested"))
    if (both := with_row_emptied_by_two(c, 18)) is not None:
        inputs.append((both, ", masked by the causal mask and another one together"))
    worst, tolerance, nothing = 0.0, c.allowed_error(x), "a query that may attend to nothing"
    for y, when in inputs:
        got, right = c.run(y), c.exact(y)
        row, expected = (empty_rows(outputs.out, y) for outputs in (got, right))
        if bool(row.isnan().any()):
            return failed(f"{nothing} gives NaN{when}: its weights should be 0.")
        worst = max(worst, largest_difference(row, expected))
        if worst > tolerance:
            reason = f"{nothing} attends to masked keys{when}: its weights should be 0."
            return failed(reason, worst, tolerance)
        error, allowed, what = c.compare(y, got, right)
        visible = {n: torch.ones_like(z) for n, z in y.tensors().items() if n in ("keep", "padding")}
        if not error <= allowed and c.is_right(z := y.but(**visible), c.run(z)):
            other = "the output of other queries differs"
            other = other if what == "output" else "the returned weights differ"
            return failed(f"where a query may attend to nothing{when}, {other}.", error, allowed)
    return passed("weights of 0", worst, tolerance)


def empty_rows(out: Tensor, x: Inputs) -> Tensor:
    """Return the first sequence's output for the queries that may attend to nothing."""
    visible = torch.ones(1, x.t, x.s, dtype=torch.bool)
    if x.padding is not None:
        visible = visible & x.padding[0]
    if x.keep is not None:
        visible = visible & x.keep[0]
    if x.causal:
        visible = visible.tril(x.offset)
    return out[0][..., (~visible[0].any(-1)).nonzero().flatten(), :]


def with_empty_row(c: AttentionAdapter, seed: int) -> Inputs | None:
    """Return inputs whose first sequence, or its second query, may attend to nothing."""
    x = c.draw(torch.Generator().manual_seed(seed), 2, 5, 7)
    if "mask" in c.features:
        keep = torch.ones(2, 1, x.t, x.s, dtype=torch.bool)
        keep[0, :, 1] = False
        return x.but(keep=c.first_shared(keep))
    return x.but(padding=torch.tensor([[False], [True]]).expand(2, x.s)) if masks_keys(c) else None


def with_row_emptied_by_two(c: AttentionAdapter, seed: int) -> Inputs | None:
    """Return causal inputs whose first key is masked too, as by padding on the left."""
    if "causal" not in c.features or c.kind == "sdpa":
        return None
    x = c.draw(torch.Generator().manual_seed(seed), 2, 5)
    x = x.but(causal=True, offset=x.s - x.t)
    if masks_keys(c):
        padding = torch.ones(2, x.s, dtype=torch.bool)
        padding[0, 0] = False
        return x.but(padding=padding)
    if "mask" in c.features:
        return x.but(keep=(torch.arange(x.s) > 0).expand(2, 1, x.t, -1))
    return None


def masks_keys(c: AttentionAdapter) -> bool:
    """Return True if it takes a mask of keys or padding."""
    return bool({"padding", "keys"} & c.features)
