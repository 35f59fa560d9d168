"""Checks of numerics: large scores and half precision."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

import torch
from torch import Tensor

from manyheads.checker.bugs import Bug, compose, override
from manyheads.checker.bugs.calls import BUGS
from manyheads.checker.candidates.attention import SPREAD, AttentionAdapter
from manyheads.checker.checks.registry import Check, check, convention, failed, judge, passed, unchecked
from manyheads.checker.checks.weights import MASKED
from manyheads.checker.encodings import Rotary
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Attention, Inputs, Outputs, Weights, exact
from manyheads.checker.parts import Norm, RotaryPositions

LONG = 600  # tokens at which half precision is compared where positions matter
LARGE = 300.0  # e^300 overflows float32
DTYPE_NAMES = {torch.float16: r"float16|fp16|half[ -]?precision|\.half\b", torch.bfloat16: "bfloat16|bf16"}
FILL_OVERFLOW = Bug(
    "fill-overflow",
    "that uses a number that float16 doesn't have, such as −1e9 for masked scores",
    "fill with float('-inf'), or with torch.finfo(scores.dtype).min",
)


@check("large scores", needs_oracle=True, depends_on=MASKED)
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
    oracle = adapter.right(adapter.weights)
    assert isinstance(oracle, Attention)
    oracle(inputs)
    return oracle.raw_scores[..., -inputs.s :] * oracle.scale()  # without those of learned keys


def enlarge(adapter: AttentionAdapter, inputs: Inputs) -> Inputs:
    """Multiply the inputs so that the largest score is LARGE, if norms don't keep scores small."""
    factor = (LARGE / float(compute_scores(adapter, inputs).abs().max())) ** 0.5
    if any(isinstance(part, Norm) and part.place != "output" for part in adapter.parts):
        return inputs
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
    # The lowest score may be in the future, where it is masked.
    first = (torch.arange(inputs.s) == 0) & adapter.always_causal
    if "mask" in adapter.features:
        is_shared = adapter.forms["mask"][1].is_shared
        rows = means.mean(0, keepdim=True).expand_as(means) if is_shared else means
        keep = torch.zeros_like(means, dtype=torch.bool).scatter(-1, rows.argmin(-1, True), True)
        cases.append(inputs.but(keep=keep | first))
    for feature in ("keys", "padding"):
        if feature in adapter.features and adapter.forms[feature][1].letters != "lengths":
            lowest = means.mean(2)[:, 0].argmin(-1, keepdim=True)  # [b, 1]
            padding = torch.zeros(inputs.b, inputs.s, dtype=torch.bool).scatter(-1, lowest, True) | first
            if adapter.counts_tokens:  # padding has no gaps
                padding = (torch.arange(inputs.s) == 0).expand(inputs.b, -1)
            cases.append(inputs.but(padding=padding))
    if "causal" in adapter.features and not adapter.always_causal:
        square = adapter.draw(torch.Generator().manual_seed(seed), 2, inputs.t)
        cases.append(enlarge(adapter, square).but(causal=True))
    return cases


# -- half precision --------------------------------------------------------------------------------


def check_half(adapter: AttentionAdapter, dtype: torch.dtype) -> Check:
    """Compare outputs with the candidate's own in float32, on the same rounded inputs and parameters.

    The root mean square of the errors is compared, which hardly depends on the order of the operations.
    """
    draws = [adapter.scenarios(seed) for seed in (20, 21)]
    long_scenario = f"{LONG} tokens"
    cases = {
        scenario: [draw[scenario] for draw in draws]
        for scenario, first in draws[0].items()
        if not first.need_weights or adapter.always_weights
    }
    # bfloat16 has no odd integers above 256, so angles that are computed in it are wrong from there on.
    if any(isinstance(part, RotaryPositions) for part in adapter.parts):
        long = adapter.draw(torch.Generator().manual_seed(20), 1, LONG)
        cases |= {long_scenario: [long]} if adapter.attempt(long) is not None else {}
    worst, cast_buffers, cast_error, cast_allowed = (0.0, 1.0, 0.0, ""), "", 0.0, 0.0
    for scenario, floats in cases.items():
        condition = "" if scenario == "plain" else f" ({scenario})"
        inputs = [x.to(dtype) for x in floats]
        try:
            half = [adapter.run(x, dtype=dtype) for x in inputs]
        except CodeError as raised:
            if adapter.attempt(inputs[0].to(torch.float32), rounding=dtype) is None:
                return unchecked(f"{raised.reason}.")
            return judge_rejection(raised, dtype, condition, adapter.description.doc)
        error, allowed, loss = compare_half(adapter, inputs, half)
        if math.isinf(error):
            names = ", ".join(overflown_buffers(adapter, dtype))
            is_explained = bool(names) and is_finite_with_buffers(adapter, inputs)
            cause = f"{names} becomes infinite in {name_dtype(dtype)}: " if is_explained else ""
            reason = f"{cause}NaN or infinity{condition}, where float32 gives numbers."
            return failed(reason, error, 0.0, FILL_OVERFLOW if is_explained else None)
        if scenario == long_scenario and error > allowed and (helps := describe_cast(adapter, inputs, error)):
            cast_buffers = (
                f"at {scenario} it loses {error:.2g}, because its buffers are cast, such as frequencies."
            )
            cast_buffers, cast_error, cast_allowed = f"{cast_buffers} {helps}", error, allowed
            continue
        worst = max(worst, (error, allowed, loss, condition), key=lambda each: each[0] / each[1])
    error, allowed, loss, condition = worst
    if cast_buffers and error <= allowed:
        if not promises_dtype(dtype, adapter.description.doc):
            return convention(cast_buffers)
        # The same numbers in float32 are right: what is lost is precision of positions or angles.
        bug = BUGS["rotary-rounded"] if explains_rounding(adapter, long.to(dtype), cast_error) else None
        reason = f"its documentation says {name_dtype(dtype)}, but {cast_buffers}"
        return failed(reason, cast_error, cast_allowed, bug)
    reason = f"plain PyTorch loses {loss:.2g}"
    surplus = f"it loses far more than rounding explains{condition}; {reason}."
    if error > allowed and condition == f" ({long_scenario})":  # shorter sequences are right
        bug = BUGS["rotary-rounded"] if explains_rounding(adapter, long.to(dtype), error) else None
        return failed(surplus, error, allowed, bug)
    return judge(error, allowed, reason, surplus)


def compare_half(
    adapter: AttentionAdapter, inputs: list[Inputs], half: list[Outputs], buffers: torch.dtype | None = None
) -> tuple[float, float, float]:
    """Return the mean error of half precision, infinity for NaN, the allowed error, and plain PyTorch's."""
    dtype = inputs[0].query.dtype
    whole = [adapter.run(x.to(torch.float32), rounding=dtype, buffers=buffers) for x in inputs]
    got, expected = (flatten_outputs(adapter, inputs, outputs) for outputs in (half, whole))
    is_finite = expected.isfinite()
    if buffers is None and not bool(is_finite.all()):
        # Rounded buffers may be infinite, which is no excuse: with float32 buffers, there are numbers.
        kept = [adapter.run(x.to(torch.float32), rounding=dtype, buffers=torch.float32) for x in inputs]
        is_finite = is_finite | flatten_outputs(adapter, inputs, kept).isfinite()
    if not bool(got[is_finite].isfinite().all()):
        return math.inf, 0.0, 0.0
    size = mean_size(expected)
    loss = relative_loss(adapter, inputs) * size
    return mean_size(got - expected), 4 * loss + torch.finfo(dtype).eps * size, loss


def overflown_buffers(adapter: AttentionAdapter, dtype: torch.dtype) -> list[str]:
    """Return the buffers with numbers that a dtype doesn't have."""
    values = adapter.candidate.weights()
    finite = {name: values[name] for name in adapter.description.buffers if values[name].is_floating_point()}
    return [name for name, x in finite.items() if bool((x.isfinite() & ~x.to(dtype).isfinite()).any())]


def is_finite_with_buffers(adapter: AttentionAdapter, inputs: list[Inputs]) -> bool:
    """Return True if outputs in half precision are finite if buffers stay in float32."""
    dtype = inputs[0].query.dtype
    try:
        outputs = [adapter.run(x, dtype=dtype, buffers=torch.float32) for x in inputs]
    except CodeError:  # float32 buffers don't fit tensors in half precision: the same in float32, then
        outputs = [adapter.run(x.to(torch.float32), buffers=torch.float32) for x in inputs]
    return bool(flatten_outputs(adapter, inputs, outputs).isfinite().all())


def explains_rounding(adapter: AttentionAdapter, x: Inputs, error: float) -> bool:
    """Return True if most of the error is explained by rounded rotary positions, frequencies or angles."""
    dtype = x.query.dtype
    weights = None if adapter.weights is None else adapter.weights.to(dtype)
    got = flatten_outputs(adapter, [x], [adapter.run(x, dtype=dtype)])

    def rounded(y: Tensor, is_rounded: bool) -> Tensor:
        return y.to(dtype).to(y.dtype) if is_rounded else y

    for places in product((False, True), repeat=3):

        def angles(oracle: Rotary, places: tuple[bool, ...] = places) -> Tensor:
            positions = rounded(oracle.positions()[..., None], places[0])
            frequencies = rounded(oracle.base ** -oracle.exponents(), places[1]).to(positions.dtype)
            return rounded(positions * frequencies, places[2])

        parts = [
            replace(
                part, encoding=cast(type[Rotary], compose(part.encoding, override(Rotary, angles=angles)))
            )
            if isinstance(part, RotaryPositions)
            else part
            for part in adapter.parts
        ]
        oracle = compose(adapter.oracle, *(part.oracle for part in parts), *adapter.convention)
        if any(places):
            expected = flatten_outputs(adapter, [x], [exact(weights, x, oracle)])
            if mean_size(got - expected) < error / 3:
                return True
    return False


def describe_cast(adapter: AttentionAdapter, inputs: list[Inputs], error: float) -> str:
    """Return what helps if half precision has this error because buffers are cast, else an empty string."""
    dtype, kept = inputs[0].query.dtype, torch.float32
    try:
        half = [adapter.run(x, dtype=dtype, buffers=kept) for x in inputs]
        found, allowed, _ = compare_half(adapter, inputs, half, buffers=kept)
        return "With buffers in float32 it is right." if found <= allowed else ""
    except CodeError:  # its float32 angles don't fit tensors in half precision
        try:
            alone = [adapter.run(x.to(kept), rounding=dtype, buffers=dtype) for x in inputs]
        except CodeError:
            return ""
        found, _, _ = compare_half(adapter, inputs, alone)
        helps = "Keep buffers in float32, and cast the cosines and sines to the dtype of the queries."
        return helps if 2 * found >= error else ""


def flatten_outputs(adapter: AttentionAdapter, inputs: list[Inputs], outputs: list[Outputs]) -> Tensor:
    """Return all numbers of some outputs, in float64."""
    pairs = zip(inputs, outputs, strict=True)
    return torch.cat([adapter.ignore_padding(x, each).out.to(torch.float64).flatten() for x, each in pairs])


def mean_size(x: Tensor) -> float:
    """Return the root mean square of the finite numbers."""
    return float(x[x.isfinite()].square().mean().sqrt())


FLOAT32_ONLY = re.compile(
    r"\b(?:used?|runs?|works?|only) (?:in|for|with) (?:float32|fp32|single precision)\b|"
    r"\b(?:float32|fp32)[ -]only\b|\bonly (?:float32|fp32)\b",
    re.I,
)


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float16"."""
    return str(dtype).removeprefix("torch.")


def judge_rejection(raised: CodeError, dtype: torch.dtype, condition: str, text: str) -> Check:
    """Return the result for a candidate that raises in half precision, which documentation may promise."""
    name = name_dtype(dtype)
    says_half = any(re.search(names, text, re.I) for names in DTYPE_NAMES.values())
    if FLOAT32_ONLY.search(text) and not says_half:
        return convention(f"{raised.reason}{condition}; its documentation says float32.")
    if "without overflow" in raised.reason:  # PyTorch has no class for this error
        return failed(f"{raised.reason}{condition}.", bug=FILL_OVERFLOW)
    if "not implemented for" in raised.reason:  # by PyTorch, on this device
        return unchecked(f"{raised.reason}.")
    reason = f"it doesn't run in {name}{condition}: {raised.reason}."
    return failed(reason) if promises_dtype(dtype, text) else convention(reason)


def promises_dtype(dtype: torch.dtype, text: str) -> bool:
    """Return True if documentation says that the whole module works in half precision, not under autocast."""
    others = r"\bnot?\b|n't\b|\bonly\b|\bautocast|\bmixed[ -]precision|\bamp\b"
    promise = rf"^(?!.*(?:{others})).*(?:\b|(?=\.))(?:{DTYPE_NAMES[dtype]})\b"
    return any(re.search(promise, sentence, re.I | re.S) for sentence in re.split(r"[.;]\s", text))


def relative_loss(adapter: AttentionAdapter, inputs: list[Inputs]) -> float:
    """Return the error of the oracle in the inputs' dtype, relative to the size of its outputs.

    If the oracle doesn't know the candidate, this is the error of plain attention on the same inputs.
    """
    oracle, weights = compose(adapter.right, *adapter.convention), adapter.weights
    if adapter.unknown:
        oracle, weights = Attention, random_weights(inputs[0])
        inputs = [x.but(head_mask=None) for x in inputs]  # these weights have one head
    dtype = inputs[0].query.dtype
    weights = None if weights is None else weights.to(dtype)
    plain = flatten_outputs(adapter, inputs, [oracle(weights, dtype)(x) for x in inputs])
    right = flatten_outputs(adapter, inputs, [exact(weights, x, oracle) for x in inputs])
    return mean_size(plain - right) / mean_size(right)


def random_weights(x: Inputs) -> Weights | None:
    """Return weights of one head for inputs `[b, t, e]`, None for those of a function."""
    if x.query.dim() == 4:
        return None
    e, generator = x.query.shape[-1], torch.Generator().manual_seed(22)
    widths = {"q": e, "k": x.key.shape[-1], "v": x.value.shape[-1], "o": e}
    weight = {n: torch.randn(e, w, generator=generator) * (SPREAD / w**0.5) for n, w in widths.items()}
    return Weights(1, 1, weight)


for name in ("float16", "bfloat16"):
    check(name, depends_on=MASKED)(partial(check_half, dtype=getattr(torch, name)))
