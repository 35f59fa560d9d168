"""Checks of attention weights: rows that sum to one, and rows without a visible key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import accepted_scenarios, with_and_without_weights
from manyheads.checker.checks.registry import Check, check, failed, passed, skipped
from manyheads.checker.oracle import Attention, Inputs, largest_difference


@check("rows sum to one")
def check_row_sums(adapter: AttentionAdapter) -> Check:
    """Check that the returned weights of each query are nonnegative and sum to one."""
    if "weights" not in adapter.features:
        return skipped("it returns no weights")
    worst = 0.0
    has_sink = "sink" in adapter.arguments or (
        adapter.weights is not None and adapter.weights.sink is not None
    )
    for scenario, inputs in accepted_scenarios(adapter, 17):
        weights = adapter.run(inputs.but(need_weights=True)).weights
        assert weights is not None
        if bool((weights < -1e-6).any()):
            return failed(f"a weight is negative ({scenario}).", float(-weights.min()), 0.0)
        sums = weights.sum(-1)
        worst = max(worst, largest_difference(sums, torch.ones_like(sums)))
        if worst > 1e-4 and not has_sink:
            total = float(sums.flatten()[(sums - 1).abs().nan_to_num(math.inf).argmax()])
            return failed(f"the weights of a query sum to {total:.4g} ({scenario}).", worst, 1e-4)
    return passed("with a sink, to less than one" if "sink" in adapter.arguments else "", worst, 1e-4)


@check("empty rows")
def check_empty_rows(adapter: AttentionAdapter) -> Check:
    """Check a query whose keys are all masked: its weights are 0, and other outputs are correct."""
    inputs = with_empty_row(adapter, 18)
    if inputs is None:
        return skipped("it takes no mask that can mask all keys of a query")
    conditions = ("", " when weights are requested")
    cases = list(zip(with_and_without_weights(adapter, inputs), conditions, strict=False))
    if (left_padded := with_row_emptied_by_two_masks(adapter, 18)) is not None:
        cases.append((left_padded, " under a causal mask and another mask together"))
    worst, tolerance, query = 0.0, adapter.allowed_error(inputs), "a query without visible keys"
    for masked, condition in cases:
        outputs, expected = adapter.run(masked), adapter.exact(masked)
        rows, expected_rows = (empty_rows(out, masked) for out in (outputs.out, expected.out))
        if bool(rows.isnan().any()):
            return failed(f"{query} gives NaN{condition}: its weights should be 0.")
        worst = max(worst, largest_difference(rows, expected_rows))
        if worst > tolerance:
            reason = f"{query} attends to masked keys{condition}: its weights should be 0."
            return failed(reason, worst, tolerance)
        error, allowed, compared = adapter.compare(masked, outputs, expected)
        masks = {name: x for name, x in masked.tensors().items() if name in ("keep", "padding")}
        visible = masked.but(**{name: torch.ones_like(mask) for name, mask in masks.items()})
        if error > allowed and adapter.is_right(visible, adapter.run(visible)):
            wrong = "output of other queries is" if compared == "output" else "returned weights are"
            return failed(f"if a query has no visible keys{condition}, the {wrong} wrong.", error, allowed)
    return passed("weights of 0", worst, tolerance)


def empty_rows(out: Tensor, inputs: Inputs) -> Tensor:
    """Return the output of the first sequence's queries that have no visible keys."""
    oracle = Attention()
    oracle.x = inputs
    visible = oracle.combine_masks()
    assert visible is not None
    has_key = visible.expand(inputs.b, 1, inputs.t, inputs.s)[0, 0].any(-1)  # [t]
    return out[0][..., ~has_key, :]


def with_empty_row(adapter: AttentionAdapter, seed: int) -> Inputs | None:
    """Return inputs that mask all keys of the first sequence, or of its second query; None if unsupported."""
    inputs = adapter.draw(torch.Generator().manual_seed(seed), 2, 5, 7)
    if "mask" in adapter.features:
        keep = torch.ones(2, 1, inputs.t, inputs.s, dtype=torch.bool)
        keep[0, :, 1] = False
        return inputs.but(keep=adapter.first_shared(keep))
    if takes_mask_of_keys(adapter):
        return inputs.but(padding=torch.tensor([[False], [True]]).expand(2, inputs.s))
    return None


def with_row_emptied_by_two_masks(adapter: AttentionAdapter, seed: int) -> Inputs | None:
    """Return causal inputs whose first key is also masked, as by left padding; None if unsupported."""
    if "causal" not in adapter.features or adapter.kind == "sdpa":
        return None
    inputs = adapter.draw(torch.Generator().manual_seed(seed), 2, 5)
    inputs = inputs.but(causal=True, offset=inputs.s - inputs.t)
    if takes_mask_of_keys(adapter):
        padding = torch.ones(2, inputs.s, dtype=torch.bool)
        padding[0, 0] = False
        return inputs.but(padding=padding)
    if "mask" in adapter.features:
        return inputs.but(keep=(torch.arange(inputs.s) > 0).expand(2, 1, inputs.t, -1))
    return None


def takes_mask_of_keys(adapter: AttentionAdapter) -> bool:
    """Return True if the candidate takes a mask with one entry for each key, such as padding."""
    return bool({"padding", "keys"} & adapter.features)
