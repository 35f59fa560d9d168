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

LARGE = 300.0  # e^300 is beyond float32


@check("large scores", depends_on=("values", "causal mask", "mask", "mask of keys", "padding"))
def check_large_scores(c: AttentionAdapter) -> Check:
    """Compare with scores of some hundreds, with and without masks."""
    worst = (0.0, 1.0)
    for masked, x in (("", with_large_scores(c, 19)), *((" and a mask", x) for x in with_low_scores(c, 19))):
        got = c.run(x)
        if not bool(c.ignore_padding(x, got).out.isfinite().all()):
            return failed(f"scores of some hundreds{masked} give NaN or infinity.", math.inf, 0.0)
        error, allowed, what = c.compare(x, got, c.exact(x))
        if not error <= 4 * allowed:
            reason = f"with scores of some hundreds{masked} the {what} differ{'s' * (what == 'output')}."
            return failed(reason, error, 4 * allowed)
        worst = max(worst, (error, 4 * allowed), key=lambda result: result[0] / result[1])
    return passed("scores of some hundreds", *worst)


def scores(c: AttentionAdapter, x: Inputs) -> Tensor:
    """Return the scaled scores without masks, `[b, h, t, s]`."""
    oracle = Attention(c.weights)
    oracle(x)
    return oracle.raw_scores * oracle.scale()


def enlarge(c: AttentionAdapter, x: Inputs) -> Inputs:
    """Return x multiplied, so that its largest score is LARGE."""
    factor = (LARGE / float(scores(c, x).abs().max())) ** 0.5
    names = ("query", "key") if c.weights is None else ("query", "key", "value")
    return c.replace_sequences(x, **{n: getattr(x, n) * factor for n in names})


def with_large_scores(c: AttentionAdapter, seed: int) -> Inputs:
    """Return inputs with large scores."""
    return enlarge(c, c.draw(torch.Generator().manual_seed(seed), 2, 5, 7))


def with_low_scores(c: AttentionAdapter, seed: int) -> list[Inputs]:
    """Return such inputs with only the lowest scores visible: masked scores must be lower still."""
    found = []
    x = with_large_scores(c, seed)
    means = scores(c, x).mean(1, keepdim=True)  # [b, 1, t, s]
    if "mask" in c.features:
        shared = c.forms["mask"][1].is_shared
        lowest = (means.mean(0, keepdim=True).expand_as(means) if shared else means).argmin(-1, keepdim=True)
        keep = torch.zeros(x.b, 1, x.t, x.s, dtype=torch.bool).scatter(-1, lowest, True)
        if c.always_causal:  # the lowest score may be in the future
            keep[..., 0] = True
        found.append(x.but(keep=keep))
    for feature in ("keys", "padding"):
        if feature in c.features and c.forms[feature][1].letters != "lengths":
            lowest = means.mean(2)[:, 0].argmin(-1, keepdim=True)  # [b, 1]
            padding = torch.zeros(x.b, x.s, dtype=torch.bool).scatter(-1, lowest, True)
            padding[:, 0] |= c.always_causal
            found.append(x.but(padding=padding))
    if "causal" in c.features and not c.always_causal:
        y = c.draw(torch.Generator().manual_seed(seed), 2, x.t)
        found.append(enlarge(c, y).but(causal=True))
    return found


def check_half(c: AttentionAdapter, dtype: torch.dtype) -> Check:
    """Compare the error in half precision with that of plain PyTorch."""
    x = c.draw(torch.Generator().manual_seed(20), 2, 5, 7).to(dtype)
    if "mask" in c.features:
        x = c.random_mask(x, torch.Generator().manual_seed(21))
    weights = None if c.weights is None else c.weights.to(dtype)
    right, plain = exact(weights, x), Attention(weights, dtype)(x)
    try:
        got = c.run(x, dtype=dtype)
    except CodeError as raised:
        return unchecked(f"{raised.reason}.")
    error, loss = largest_difference(got.out, right.out), largest_difference(plain.out, right.out)
    reason = f"plain PyTorch loses {loss:.2g}"
    failure = f"it loses far more than rounding explains; {reason}."
    return judge(error, 4 * loss + allowed_error(weights, x), reason, failure)


for name in ("float16", "bfloat16"):
    check(name, depends_on=("values", "mask"))(partial(check_half, dtype=getattr(torch, name)))
