"""Report in what a candidate differs from this library by its documentation or design, and isn't wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from manyheads.checker.bugs import FAMILY
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.construct import has_implementations
from manyheads.checker.candidates.documentation import (
    has_default,
    is_causal_without,
    says_mask_replaces,
    says_masks_dropped,
)
from manyheads.checker.checks.registry import Check, check, convention
from manyheads.checker.oracle import Attention, Oracle
from manyheads.checker.overrides import transform, wrap


@check("conventions")
def report_conventions(adapter: AttentionAdapter) -> Iterator[Check]:
    """Report conventions that the documentation, the arguments or trial calls showed."""
    forms = []
    for name, form in dict.fromkeys(adapter.forms.values()):
        if form.type == "added":
            forms.append(f"{name} is added to the scores")
        elif not form.keeps:
            forms.append(f"{name} masks where True")
    if forms:
        yield convention(f"{', '.join(dict.fromkeys(forms))}.", name="mask form")
    if adapter.ignores_padded_queries:
        reason = "outputs of padded queries differ from attention's, and aren't compared."
        yield convention(reason, name="padded queries")
    if adapter.always_averaged:
        yield convention("returned weights are averaged over the heads.", name="averaged weights")
    is_transformers = has_implementations(adapter.description)
    if says_masks_dropped(adapter.text) and adopt(adapter, MASKED, *DROPPED):
        reason = "masks are dropped depending on whether weights are requested, as documented."
        yield convention(reason, name="masks with weights")
    source, bias = adapter.description.source, adapter.arguments.get("bias", "")
    general = {name for name, form in adapter.forms.values() if form.is_general}
    replaces = is_transformers or says_mask_replaces(adapter.text)
    replaces |= any(has_default(source, name) or is_causal_without(source, name) for name in general)
    if replaces and adopt(adapter, MASKED, REPLACED_TRIANGLE):
        reason = "a mask replaces the causal mask, as its documentation or code says."
        yield convention(reason, name="mask in place of causal")
    if (is_transformers or has_default(source, bias)) and adopt(adapter, ("added",), REPLACED_BIAS):
        yield convention("a bias that is given replaces its own, as in T5.", name="given bias")


def adopt(adapter: AttentionAdapter, scenarios: tuple[str, ...], *steps: type[Oracle]) -> bool:
    """Adopt the first of these steps with which these scenarios are right, if they are wrong without."""
    inputs = [x for name, x in adapter.scenarios(16).items() if name.startswith(scenarios)]
    answers = [(x, outputs) for x in inputs if (outputs := adapter.attempt(x)) is not None]
    if all(adapter.is_right(x, outputs) for x, outputs in answers):
        return False
    before = adapter.convention
    for step in steps:
        adapter.convention = (*before, step)
        if all(adapter.is_right(x, outputs) for x, outputs in answers):
            return True
    adapter.convention = before
    return False


def drop_masks(if_requested: bool) -> type[Oracle]:
    """Return an oracle without masks if weights are, or aren't, requested."""

    def drop(oracle: Attention, visible: Tensor) -> Tensor | None:
        return None if oracle.x.need_weights == if_requested else visible

    return transform(given_mask=drop, padding_mask=drop)


def replace_bias(oracle: Attention, step: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """Add the bias of the call only, if there is one."""
    return step(scores) if oracle.x.bias is None else Attention.add_bias(oracle, scores)


MASKED = ("mask", "keys", "padding")  # scenarios
DROPPED = tuple(map(drop_masks, (True, False)))
REPLACED_TRIANGLE = FAMILY["mask-in-place-of-causal"].variants[0]
REPLACED_BIAS = wrap(add_bias=replace_bias)
