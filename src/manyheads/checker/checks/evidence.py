"""Collects what a candidate returns in many situations, and finds the smallest input on which it is wrong."""

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
    """One call: the situation, its inputs, and what the candidate returned."""

    scenario: str
    x: Inputs
    outputs: Outputs

    @cached_property
    def exact_x(self) -> Inputs:
        """The inputs in float64."""
        return self.x.to(torch.float64)


def gather(c: Adapter, seeds: range) -> list[Evidence]:
    """Return what the candidate returns in each scenario, without calls that raise."""
    found = []
    for seed in seeds:
        t = 5 + seed % 2
        s = t if seed % 3 == 0 else t + 2 + seed % 2
        for name, x in c.scenarios(seed, s=s, t=t).items():
            if (got := c.attempt(x)) is not None:
                found.append(Evidence(name, x, got))
        if isinstance(c, AttentionAdapter) and "past" in c.features and "x" in c.arguments:
            found += decode(c, seed)
    return found


def answered(c: Adapter, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yield the scenarios in which the candidate doesn't raise; the check of values reports the others."""
    for name, x in c.scenarios(seed).items():
        if c.attempt(x) is not None:
            yield name, x


def decode(c: AttentionAdapter, seed: int) -> list[Evidence]:
    """Return the call of the last token with a cache of the others, and the oracle's inputs for the same."""
    x = c.draw(torch.Generator().manual_seed(seed), 2, 5 + seed % 2)
    try:
        outs, has_cache = run_steps(c, x, [x.t - 1, 1])
    except (UnexpectedOutput, CodeError):
        return []
    last = x.but(query=x.query[:, -1:], causal=True, offset=x.s - 1, need_weights=False)
    return [Evidence("decoding", last, Outputs(outs[-1]))] if has_cache else []


def run_steps(c: AttentionAdapter, x: Inputs, lengths: list[int]) -> tuple[list[Tensor], bool]:
    """Return the outputs of a text in steps, each with the last one's cache, and whether there was one."""
    cache: Any = None
    outs, start = [], 0
    for n in lengths:
        parts = {name: getattr(x, name)[..., start : start + n, :] for name in ("query", "key", "value")}
        y, start = x.but(**parts), start + n
        call = c.call(y)
        options = {c.arguments["past"]: cache}
        if "use_cache" in c.arguments:
            options[c.arguments["use_cache"]] = True
        output = c.candidate.call(replace(call, kwargs=call.kwargs | options)).output
        outs.append(c.read(output, y, strict=False).out)
        if not isinstance(output, tuple | list) or len(output) < 2:
            return outs, False
        others = [part for part in output[1:] if not isinstance(part, Tensor) and part is not None]
        cache = others[0] if others else output[1]
    return outs, True


def smallest_failure(c: Adapter, x: Inputs) -> Inputs:
    """Cut batch entries, queries and keys off the input while the candidate still fails on it."""

    def fails(y: Inputs) -> bool:
        got = c.attempt(y, strict=True)
        return got is not None and not c.is_right(y, got)

    is_cut = True
    while is_cut:
        is_cut = False
        for axis in ("batch", "tokens", "queries", "keys"):
            while (y := cut(c, x, axis)) is not None and fails(y):
                x, is_cut = y, True
    return x


def cut(c: Adapter, x: Inputs, axis: str) -> Inputs | None:
    """Return x without its last batch entry, query or key, or None if it has only one or no such axis."""
    if axis == "batch":
        batched = {n: y for n, y in x.tensors().items() if n not in ("sink", "bias") and y.shape[0] > 1}
        return x.but(**{n: y[:-1] for n, y in batched.items()}) if x.b > 1 else None
    queries, keys = int(axis != "keys"), int(axis != "queries")
    if (axis == "tokens") == ("cross" in c.features) or (queries and x.t == 1) or (keys and x.s == 1):
        return None
    t, s = x.t - queries, x.s - keys
    fields: dict[str, Tensor] = {
        "query": x.query[..., :t, :],
        "key": x.key[..., :s, :],
        "value": x.value[..., :s, :],
    }
    if x.padding is not None:
        fields["padding"] = x.padding[..., :s]
    for name in ("keep", "bias"):
        if (z := getattr(x, name)) is not None:
            fields[name] = z[..., : z.shape[-2] - queries, : z.shape[-1] - keys]
    is_from_end = x.causal and c.kind != "sdpa" and x.offset == x.s - x.t
    y = x.but(**fields, offset=s - t if is_from_end else x.offset)
    has_empty_rows = any(mask is not None and not bool(mask.any(-1).all()) for mask in (y.keep, y.padding))
    return None if has_empty_rows else y
