"""The outputs of a candidate in many scenarios, and the smallest input for which they are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Inputs, Outputs


@dataclass(frozen=True)
class Evidence:
    """One call of a candidate: the scenario, the inputs and the outputs."""

    scenario: str
    inputs: Inputs
    outputs: Outputs

    @cached_property
    def exact_inputs(self) -> Inputs:
        """The inputs in float64."""
        return self.inputs.to(torch.float64)


def gather(adapter: Adapter, seeds: range) -> list[Evidence]:
    """Call the candidate in each scenario, and return the calls that don't raise."""
    calls = []
    for seed in seeds:
        t = 5 + seed % 2
        s = t if seed % 3 == 0 else t + 2 + seed % 2
        for scenario, inputs in adapter.scenarios(seed, s=s, t=t).items():
            if (outputs := adapter.attempt(inputs)) is not None:
                calls.append(Evidence(scenario, inputs, outputs))
        if isinstance(adapter, AttentionAdapter) and "past" in adapter.features and "x" in adapter.arguments:
            calls += decode(adapter, seed)
    return calls


def accepted_scenarios(adapter: Adapter, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yield the scenarios in which the candidate doesn't raise; the check of values reports the others."""
    for scenario, inputs in adapter.scenarios(seed).items():
        if adapter.attempt(inputs) is not None:
            yield scenario, inputs


def with_and_without_weights(adapter: Adapter, inputs: Inputs) -> list[Inputs]:
    """Return the inputs, and those of a call that requests weights if the candidate can return them."""
    can_request = "weights" in adapter.features and not inputs.need_weights
    return [inputs, inputs.but(need_weights=True)] if can_request else [inputs]


def decode(adapter: AttentionAdapter, seed: int) -> list[Evidence]:
    """Call the candidate for the last token with a cache of the others; return no call if it has no cache."""
    inputs = adapter.draw(torch.Generator().manual_seed(seed), 2, 5 + seed % 2)
    try:
        outputs, has_cache = run_steps(adapter, inputs, [inputs.t - 1, 1])
    except (UnexpectedOutput, CodeError):
        return []
    last = inputs.but(query=inputs.query[:, -1:], causal=True, offset=inputs.s - 1, need_weights=False)
    return [Evidence("decoding", last, Outputs(outputs[-1]))] if has_cache else []


def run_steps(adapter: AttentionAdapter, inputs: Inputs, lengths: list[int]) -> tuple[list[Tensor], bool]:
    """Return the outputs of steps that each use the cache of the step before, and if there was a cache."""
    cache: Any = None
    outputs, start = [], 0
    for length in lengths:
        sequences = {name: getattr(inputs, name) for name in ("query", "key", "value")}
        tokens = inputs.but(**{name: x[..., start : start + length, :] for name, x in sequences.items()})
        start += length
        call = adapter.call(tokens)
        options = {adapter.arguments["past"]: cache}
        if "use_cache" in adapter.arguments:
            options[adapter.arguments["use_cache"]] = True
        output = adapter.candidate.call(replace(call, kwargs=call.kwargs | options)).output
        outputs.append(adapter.read(output, tokens, strict=False).out)
        if not isinstance(output, tuple | list) or len(output) < 2:
            return outputs, False
        # The cache is the first part that isn't a tensor, such as weights, or else the second part.
        cache = next((x for x in output[1:] if not isinstance(x, Tensor | None)), output[1])
    return outputs, True


def smallest_failure(adapter: Adapter, inputs: Inputs) -> Inputs:
    """Cut batch entries, queries and keys off the inputs while the candidate is still wrong for them."""
    for axis in ("batch", "tokens", "queries", "keys"):
        if (smaller := cut(adapter, inputs, axis)) is not None:
            outputs = adapter.attempt(smaller, strict=True)
            if outputs is not None and not adapter.is_right(smaller, outputs):
                return smallest_failure(adapter, smaller)
    return inputs


def cut(adapter: Adapter, inputs: Inputs, axis: str) -> Inputs | None:
    """Cut off the last batch entry, token, query or key; return None if there is only one or no such axis."""
    b = inputs.b - (axis == "batch")
    t = inputs.t - (axis in ("tokens", "queries"))
    s = inputs.s - (axis in ("tokens", "keys"))
    has_axis = axis == "batch" or (axis == "tokens") != ("cross" in adapter.features)
    if not has_axis or 0 in (b, t, s):
        return None
    keep, padding, bias = inputs.keep, inputs.padding, inputs.bias
    counts_from_end = inputs.causal and adapter.kind != "sdpa" and inputs.offset == inputs.s - inputs.t
    smaller = inputs.but(
        query=inputs.query[:b, ..., :t, :],
        key=inputs.key[:b, ..., :s, :],
        value=inputs.value[:b, ..., :s, :],
        keep=None if keep is None else keep[:b, ..., :t, :s],
        padding=None if padding is None else padding[:b, :s],
        bias=None if bias is None else bias[..., :t, :s],
        offset=s - t if counts_from_end else inputs.offset,
    )
    masks = (smaller.keep, smaller.padding)
    has_empty_rows = any(mask is not None and not bool(mask.any(-1).all()) for mask in masks)
    return None if has_empty_rows else smaller
