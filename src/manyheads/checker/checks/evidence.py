"""The outputs of a candidate in many scenarios, and the smallest input for which they are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.caches import Sequence
from manyheads.checker.candidates.errors import UnexpectedOutput
from manyheads.checker.isolation.candidate import Call
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Inputs, Outputs
from manyheads.checker.parts import Part, TableBias, Window

LONGEST_WINDOW = 64  # tokens of a window that steps exceed


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
        t = adapter.length + seed % 2
        s = t if seed % 3 == 0 else t + 2 + seed % 2
        for scenario, inputs in adapter.scenarios(seed, s=s, t=t).items():
            if (outputs := adapter.attempt(inputs)) is not None:
                calls.append(Evidence(scenario, inputs, outputs))
        if isinstance(adapter, AttentionAdapter):
            calls += cached_steps(adapter, seed)
    return calls


def long_call(adapter: Adapter, parts: Iterable[Part]) -> list[Evidence]:
    """Return a call of more tokens than the largest distance of T5's buckets, which short ones don't show."""
    distances = [
        part.max_distance for part in parts if isinstance(part, TableBias) and part.kind == "buckets"
    ]
    if not distances:
        return []
    inputs = adapter.draw(torch.Generator().manual_seed(10), 1, max(distances) + 5)
    outputs = adapter.attempt(inputs)
    return [] if outputs is None else [Evidence("plain", inputs, outputs)]


def accepted_scenarios(adapter: Adapter, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yield the scenarios in which the candidate doesn't raise; the check of values reports the others."""
    for scenario, inputs in adapter.scenarios(seed).items():
        if adapter.attempt(inputs) is not None:
            yield scenario, inputs


def run_sequence(adapter: Adapter, calls: list[Call]) -> list[Tensor]:
    """Return the first tensor of the output of each call, in order, from the state before the first call."""
    tensors = [top_tensors(answer.output)[:1] for answer in adapter.candidate.call_sequence(tuple(calls))]
    if not all(tensors):
        raise UnexpectedOutput("Expected a tensor as output of each call")
    return [tensor for [tensor] in tensors]


def with_and_without_weights(adapter: Adapter, inputs: Inputs) -> list[Inputs]:
    """Return the inputs, and those of a call that requests weights if the candidate can return them."""
    can_request = "weights" in adapter.features and not inputs.need_weights
    return [inputs, inputs.but(need_weights=True)] if can_request else [inputs]


def cached_steps(adapter: AttentionAdapter, seed: int) -> Iterator[Evidence]:
    """Yield the last step of sequences that use the candidate's cache, unless a step raises."""
    windows = [part.size for part in adapter.parts if isinstance(part, Window)]
    cache, t = adapter.cache, max([5, *windows]) + seed % 2
    if cache is None or adapter.cache_bug is not None:
        return
    first, x = cache.draw(seed + 1, 2, 4), cache.draw(seed, 2, t)
    scenarios = {
        "cache, one token": [Sequence(x, (t - 2, 1, 1))],
        "cache, chunk": [Sequence(x, (t - 4, 1, 3))],
        "cache, after a reset": [Sequence(first, (3, 1)), Sequence(x, (t - 1, 1))],
    }
    if windows and max(windows) <= LONGEST_WINDOW:  # a cache that is cut to the window loses tokens only then
        x_long = cache.draw(seed, 2, max(windows) + 5)
        scenarios["cache, beyond a window"] = [Sequence(x_long, (max(windows) + 1, 1, 1, 1, 1))]
    for scenario, sequences in scenarios.items():
        run, x = cache.run(*sequences), sequences[-1].inputs
        if run.error is None and (len(sequences) == 1 or cache.can_restart):
            *_, length = lengths = sequences[-1].lengths
            is_causal = x.causal or cache.is_causal or cache.mask_length is not None
            step = x.but(query=x.query[..., -length:, :], causal=is_causal, offset=x.s - length)
            step = step.but(steps=lengths)
            yield Evidence(scenario, step, Outputs(run.outs[-1][-1]))


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
    positions, angles = inputs.positions, inputs.angles
    of_queries, of_keys = inputs.query_vectors, inputs.key_vectors
    counts_from_end = inputs.causal and not adapter.counts_from_start and inputs.offset == inputs.s - inputs.t
    smaller = inputs.but(
        query=inputs.query[:b, ..., :t, :],
        key=inputs.key[:b, ..., :s, :],
        value=inputs.value[:b, ..., :s, :],
        keep=None if keep is None else keep[:b, ..., :t, :s],
        padding=None if padding is None else padding[:b, :s],
        bias=None if bias is None else bias[..., :t, :s],
        positions=None if positions is None else positions[:b, :s],
        angles=None if angles is None else angles[:b, :s],
        query_vectors=None if of_queries is None else of_queries[:b, ..., :t, :],
        key_vectors=None if of_keys is None else of_keys[:b, ..., :s, :],
        offset=s - t if counts_from_end else inputs.offset,
    )
    masks = (smaller.keep, smaller.padding)
    has_empty_rows = any(mask is not None and not bool(mask.any(-1).all()) for mask in masks)
    return None if has_empty_rows else smaller
