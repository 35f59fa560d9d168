"""Checks of numerics: large scores and half precision."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.checks.registry import Check, check, failed, judge, passed, unchecked
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Attention, Inputs, allowed_error, exact, largest_difference

LARGE = 300.0  # e^300 overflows float32


@check("large scores", depends_on=("values", "causal mask", "mask", "mask of keys", "padding"))
def check_large_scores(adapter: AttentionAdapter) -> Check:
    """Compare outputs at scores of some hundreds, with and without masks."""
    cases = [(with_large_scores(adapter, 19), "scores of some hundreds")]
    cases += [(x, "scores of some hundreds and a mask") for x in with_low_scores(adapter, 19)]
    worst = (0.0, 1.0)
    for inputs, name in cases:
        outputs = adapter.run(inputs)
        if not bool(adapter.ignore_padding(inputs, outputs).out.isfinite().all()):
            return failed(f"{name} give NaN or infinity.", math.inf, 0.0)
        error, allowed, compared = adapter.compare(inputs, outputs, adapter.exact(inputs))
        if error > 4 * allowed:
            reason = f"with {name} the {compared} differ{'s' * (compared == 'output')}."
            return failed(reason, error, 4 * allowed)
        worst = max(worst, (error, 4 * allowed), key=lambda result: result[0] / result[1])
    return passed("scores of some hundreds", *worst)


def compute_scores(adapter: AttentionAdapter, inputs: Inputs) -> Tensor:
    """Return the scaled scores without masks, `[b, h, t, s]`."""
    oracle = Attention(adapter.weights)
    oracle(inputs)
    return oracle.raw_scores * oracle.scale()


def enlarge(adapter: AttentionAdapter, inputs: Inputs) -> Inputs:
    """Multiply the inputs so that the largest score is LARGE."""
    factor = (LARGE / float(compute_scores(adapter, inputs).abs().max())) ** 0.5
    names = ("query", "key") if adapter.weights is None else ("query", "key", "value")
    return adapter.replace_sequences(inputs, **{name: getattr(inputs, name) * factor for name in names})


def with_large_scores(adapter: AttentionAdapter, seed: int) -> Inputs:
    """Return inputs with large scores."""
    return enlarge(adapter, adapter.draw(torch.Generator().manual_seed(seed), 2, 5, 7))


def with_low_scores(adapter: AttentionAdapter, seed: int) -> list[Inputs]:
    """Return inputs with large scores whose masks leave only the lowest scores visible."""
    cases = []
    inputs = with_large_scores(adapter, seed)
    means = compute_scores(adapter, inputs).mean(1, keepdim=True)  # [b, 1, t, s]
    if "mask" in adapter.features:
        is_shared = adapter.forms["mask"][1].is_shared
        lowest = (means.mean(0, keepdim=True).expand_as(means) if is_shared else means).argmin(-1, True)
        keep = torch.zeros(inputs.b, 1, inputs.t, inputs.s, dtype=torch.bool).scatter(-1, lowest, True)
        if adapter.always_causal:  # the lowest score may be in the future
            keep[..., 0] = True
        cases.append(inputs.but(keep=keep))
    for feature in ("keys", "padding"):
        if feature in adapter.features and adapter.forms[feature][1].letters != "lengths":
            lowest = means.mean(2)[:, 0].argmin(-1, keepdim=True)  # [b, 1]
            padding = torch.zeros(inputs.b, inputs.s, dtype=torch.bool).scatter(-1, lowest, True)
            padding[:, 0] |= adapter.always_causal
            cases.append(inputs.but(padding=padding))
    if "causal" in adapter.features and not adapter.always_causal:
        square = adapter.draw(torch.Generator().manual_seed(seed), 2, inputs.t)
        cases.append(enlarge(adapter, square).but(causal=True))
    return cases


def check_half(adapter: AttentionAdapter, dtype: torch.dtype) -> Check:
    """Compare the error in half precision with that of plain PyTorch."""
    inputs = adapter.draw(torch.Generator().manual_seed(20), 2, 5, 7).to(dtype)
    if "mask" in adapter.features:
        inputs = adapter.random_mask(inputs, torch.Generator().manual_seed(21))
    weights = None if adapter.weights is None else adapter.weights.to(dtype)
    expected, plain = exact(weights, inputs).out, Attention(weights, dtype)(inputs).out
    try:
        out = adapter.run(inputs, dtype=dtype).out
    except CodeError as raised:
        return unchecked(f"{raised.reason}.")
    error, plain_error = largest_difference(out, expected), largest_difference(plain, expected)
    reason = f"plain PyTorch loses {plain_error:.2g}"
    failure = f"it loses far more than rounding explains; {reason}."
    return judge(error, 4 * plain_error + allowed_error(weights, inputs), reason, failure)


for name in ("float16", "bfloat16"):
    check(name, depends_on=("values", "mask"))(partial(check_half, dtype=getattr(torch, name)))
