"""Checks of attention weights: rows that sum to one, and rows without a visible key."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from manyheads.checker.bugs import FAMILY, Bug, compose
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.evidence import accepted_scenarios, with_and_without_weights
from manyheads.checker.checks.registry import Check, check, convention, failed, passed, skipped
from manyheads.checker.oracle import Attention, Inputs, Outputs, exact, largest_difference

MASKED = ("values", "causal mask", "mask", "mask of keys", "padding")  # checks of values with masks


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
        # A head mask scales the weights.
        weights = adapter.run(inputs.but(need_weights=True, head_mask=None)).weights
        assert weights is not None
        if bool((weights < -1e-6).any()):
            return failed(f"a weight is negative ({scenario}).", float(-weights.min()), 0.0)
        sums = weights.sum(-1)
        worst = max(worst, largest_difference(sums, torch.ones_like(sums)))
        if worst > 1e-4 and not has_sink:
            total = float(sums.flatten()[(sums - 1).abs().nan_to_num(math.inf).argmax()])
            return failed(f"the weights of a query sum to {total:.4g} ({scenario}).", worst, 1e-4)
    return passed("with a sink, to less than one" if "sink" in adapter.arguments else "", worst, 1e-4)


@check("empty rows", depends_on=MASKED)
def check_empty_rows(adapter: AttentionAdapter) -> Check:
    """Report what a query whose keys are all masked gives, and check that other outputs are correct."""
    cases = list(with_empty_rows(adapter, 18))
    if not cases:
        return skipped("it takes no mask that can mask all keys of a query")
    found: Check | None = None
    for masked, condition in cases:
        outputs, empty = adapter.run(masked), find_empty_rows(adapter, masked)
        expected = adapter.run(fill_empty_rows(masked, empty)) if adapter.unknown else adapter.exact(masked)
        others, right = (drop_rows(adapter.ignore_padding(masked, x), empty) for x in (outputs, expected))
        error, allowed, compared = adapter.compare(masked, others, right)
        if error > allowed:
            wrong = "output of other queries is" if compared == "output" else "returned weights are"
            bug = find_bug(adapter, masked, outputs, ["empty-rows-spoil-others"])
            return failed(
                f"if a query has no visible keys{condition}, the {wrong} wrong.", error, allowed, bug
            )
        rows = outputs.out[empty_entries(outputs.out, empty)]
        expected_rows = expected.out[empty_entries(expected.out, empty)]
        is_nan = bool(rows.isnan().any())
        is_other = not adapter.unknown and not largest_difference(rows, expected_rows) <= allowed
        if found is None and (is_nan or is_other):
            bug = find_bug(adapter, masked, outputs, ["empty-rows-nan", "empty-rows-uniform"])
            name = "" if bug is None else f"{bug.name}: "
            gives = "NaN" if is_nan else "an average of masked values"
            found = convention(f"{name}a query without visible keys gives {gives}{condition}.", bug)
    return found or passed("a query without visible keys has weights of 0" * (not adapter.unknown))


def fill_empty_rows(inputs: Inputs, empty: Tensor) -> Inputs:
    """Return the inputs with all keys visible to the queries that have none."""
    rows = {"keep": empty[:, None, :, None], "padding": empty.all(-1, keepdim=True)}
    return inputs.but(**{name: x | rows[name] for name, x in inputs.tensors().items() if name in rows})


def find_empty_rows(adapter: AttentionAdapter, inputs: Inputs) -> Tensor:
    """Return `[b, t]`, True for queries without visible keys."""
    oracle = adapter.right(adapter.weights)
    assert isinstance(oracle, Attention)
    oracle(inputs)
    assert oracle.visible is not None
    return ~oracle.visible.any(-1).expand(inputs.b, 1, inputs.t)[:, 0]


def empty_entries(out: Tensor, empty: Tensor) -> Tensor:
    """Return the entries of an output `[b, t, e]` or `[b, h, t, d]` that belong to empty rows."""
    return (empty[..., None] if out.dim() == 3 else empty[:, None, :, None]).expand(out.shape)


def drop_rows(outputs: Outputs, empty: Tensor) -> Outputs:
    """Return the outputs with the empty rows set to 0."""
    weights = outputs.weights
    if weights is not None:
        weights = weights.masked_fill(empty_entries(weights, empty), 0.0)
    return Outputs(outputs.out.masked_fill(empty_entries(outputs.out, empty), 0.0), weights)


def find_bug(adapter: AttentionAdapter, inputs: Inputs, outputs: Outputs, names: list[str]) -> Bug | None:
    """Return the first of these bugs that explains the outputs."""
    if adapter.unknown:
        return None
    for bug in (FAMILY[name] for name in names):
        for variant in bug.variants:
            wrong = exact(adapter.weights, inputs, compose(adapter.right, *adapter.convention, variant))
            error, allowed, _ = adapter.compare(inputs, outputs, wrong)
            if error <= allowed:
                return bug
    return None


def with_empty_rows(adapter: AttentionAdapter, seed: int) -> Iterator[tuple[Inputs, str]]:
    """Yield inputs with queries that have no visible keys, and in which condition."""
    inputs = adapter.draw(torch.Generator().manual_seed(seed), 2, 5, 7)
    keep = torch.ones(2, 1, inputs.t, inputs.s, dtype=torch.bool)
    keep[0, :, 1] = False  # of one query, or of the first sequence
    if "mask" in adapter.features:
        inputs = inputs.but(keep=adapter.first_shared(keep))
    elif takes_mask_of_keys(adapter):
        inputs = inputs.but(padding=torch.tensor([[False], [True]]).expand(2, inputs.s))
    else:
        return
    yield from zip(
        with_and_without_weights(adapter, inputs), ("", " when weights are requested"), strict=False
    )
    if "causal" not in adapter.features or adapter.kind == "sdpa" or adapter.unknown:
        return
    # The first key is masked too, as by left padding. This would change other rows of an unknown candidate.
    inputs = adapter.draw(torch.Generator().manual_seed(seed), 2, 5)
    inputs = inputs.but(causal=True, offset=inputs.s - inputs.t)
    is_masked = torch.arange(inputs.s) == 0
    condition = " under a causal mask and another mask together"
    if not takes_mask_of_keys(adapter):
        yield inputs.but(keep=(~is_masked).expand(2, 1, inputs.t, -1)), condition
    elif not any(form.letters == "lengths" for _, form in adapter.forms.values()):
        padding = ~(is_masked & torch.tensor([[True], [False]]))  # of the first sequence only
        yield inputs.but(padding=padding), condition


def takes_mask_of_keys(adapter: AttentionAdapter) -> bool:
    """Return True if the candidate takes a mask with one entry for each key, such as padding."""
    return bool({"padding", "keys"} & adapter.features)
