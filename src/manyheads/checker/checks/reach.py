"""Checks that an output depends on no other inputs than it should."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from manyheads.checker.bugs.calls import BUGS
from manyheads.checker.candidates.attention import POSITIONS, AttentionAdapter
from manyheads.checker.candidates.documentation import is_always_called, read_mask
from manyheads.checker.candidates.forms import NUMBERS, SEGMENTS
from manyheads.checker.candidates.parts import QUERY_KEY_NORM
from manyheads.checker.checks.evidence import with_and_without_weights
from manyheads.checker.checks.registry import Check, check, convention, failed, judge, passed, skipped
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Inputs, Weights, largest_difference
from manyheads.checker.parts import POSITIONAL, Activation, HeadMixing, Norm

MIXING = ("width", "merged", "output")  # places of norms that mix heads
# Code that raises one of these errors is wrong for a mask of any shape and type.
ROTARY, ALIBI = r"\b(?:rotary|rope)\b", r"\balibi\b"  # words of documentation that promises a part
NORM, RELATIVE = r"\b(?:norm\w*|\w*norm)\b", r"\b(?:relative|bias)\b"
UNDEFINED = ("AttributeError", "NameError", "UnboundLocalError", "ImportError", "NotFoundError", "KeyError")


@check("causality")
def check_causality(adapter: AttentionAdapter) -> Check:
    """Change each key, and compare the outputs of the queries before it."""
    if "causal" not in adapter.features:
        return skipped("it isn't causal, and has no argument for it")
    plain = adapter.draw(torch.Generator().manual_seed(11), 2, 6).but(causal=True, offset=0)
    for inputs in with_and_without_weights(adapter, plain):
        before = adapter.run(inputs).out
        for j in range(1, 6):
            after = adapter.run(adapter.change_key(inputs, j)).out
            for i in range(j):
                error = largest_difference(before[..., i, :], after[..., i, :])
                if error > 1e-6 * (1 + float(before[..., i, :].abs().max())):
                    when = " when weights are requested" if inputs is not plain else ""
                    return failed(f"query {i} depends on key {j}, which is its future{when}.", error, 0.0)
    return passed("a change of key j affects no query before it", 0.0, 0.0)


@check("hidden keys")
def check_masked_keys(adapter: AttentionAdapter) -> Iterator[Check]:
    """Change a masked key, and compare the outputs of all queries."""
    yield from check_mask_arguments(adapter)
    if not adapter.forms:
        yield skipped("it takes no mask")
        return
    generator, leaks_nan, rejects_nan = torch.Generator().manual_seed(12), False, False
    for feature, (_, form) in adapter.forms.items():
        inputs = adapter.draw(generator, 2, 5, 7)
        # Later queries show an effect of a causal layer's key, but lengths mask the last keys only.
        j = 1 if adapter.always_causal and form.letters not in NUMBERS else inputs.s - 1
        is_visible = torch.arange(inputs.s) != j
        keep, padding = is_visible.expand(2, 1, inputs.t, -1).clone(), is_visible.expand(2, -1)
        if form.letters in SEGMENTS:
            keep[..., j, :] = ~is_visible  # a segment of its own
        inputs = inputs.but(**({"keep": keep} if form.is_general else {"padding": padding}), form=feature)
        queries = adapter.unchanged_queries(inputs, j)
        out = adapter.run(inputs).out[..., queries, :]
        before = out.nan_to_num().double()
        after = adapter.run(adapter.change_key(inputs, j)).out[..., queries, :].nan_to_num()
        change = (after - before).abs()
        if float(change.max()) > 1e-6 * (1 + float(before.abs().max())):
            i = queries[int(change.movedim(-2, 0).flatten(1).any(1).nonzero()[0])]
            masked = "padding" if feature.startswith("padding") else "masked"
            yield failed(f"query {i} depends on key {j}, which is {masked}.", float(change.max()), 0.0)
            return
        try:
            with_nan = adapter.run(adapter.change_key(inputs, j, math.nan)).out[..., queries, :]
            leaks_nan |= bool(with_nan.isnan().any() and not out.isnan().any())
        except CodeError:
            rejects_nan = True
    yield passed("the content of a masked key affects no query", 0.0, 0.0)
    if leaks_nan or rejects_nan:
        effect = "reaches the output, as in plain PyTorch (0 · NaN)" if leaks_nan else "raises an error"
        yield convention(f"a NaN in a masked key or value {effect}.", name="masked NaN")


def check_mask_arguments(adapter: AttentionAdapter) -> Iterator[Check]:
    """Yield a check for each argument that can't be judged, or on which no compared output depends."""
    x = adapter.draw(torch.Generator().manual_seed(12), 2, max(5, adapter.length))
    is_right = (outputs := adapter.attempt(x)) is not None and adapter.is_right(x, outputs)
    for name, shapes in adapter.rejected_shapes.items():
        reason = f"no call accepts it with the shape {shapes}, which its documentation states. If that isn't"
        reason = f"{reason} meant, change its documentation, or give --arg {name}=ignore."
        yield Check(f"argument {name}", "not judged", reason)
    for name in dict.fromkeys([*adapter.unjudged, *adapter.masks]):
        if name in adapter.judged:
            continue
        status, reason = "not judged", "no compared output depends on it."
        if (error := adapter.rejected_masks.get(name)) is not None:
            reason = f"every call with it raised an error: {error.reason}."
            documented = read_mask(name, adapter.text)
            status = (
                "failed"
                if documented.shapes or documented.is_boolean or error.error.endswith(UNDEFINED)
                else status
            )
        elif name in adapter.rejected_masks:
            reason = "with every form of mask, the call returned no attention output."
        if status == "not judged":
            advice = f"Give its role with --arg {name}=ROLE, or --arg {name}=ignore."
            advice = f"If no role fits, its code is wrong. {advice}" if error is not None else advice
            reason = adapter.unjudged.get(name, f"{reason} {advice}")
        kind = "layer" if name in adapter.description.layers else "method"
        kind = "parameter" if name in adapter.description.parameters else kind
        kind = "argument" if name in {arg.name for arg in adapter.description.call} else kind
        idle = None
        if not is_right:  # what has no effect may be hidden by another bug, such as NaN
            pass
        elif kind == "layer" and (
            promises(adapter, ROTARY, "rot|rope|pos") or is_always_called(name, adapter.description.source)
        ):
            idle = BUGS["rotary-idle"]
        elif kind == "parameter":
            is_norm = QUERY_KEY_NORM.search(name) is not None
            is_promised = promises(adapter, *(NORM, "norm") if is_norm else (RELATIVE, "bias|rel|pos"))
            idle = BUGS["norm-idle" if is_norm else "bias-idle"] if is_promised else None
        if idle is not None:
            yield Check(f"{kind} {name}", "failed", f"it is attention {idle.description}.", bug=idle)
        else:
            yield Check(f"{kind} {name}", status, reason)
    if is_right and not adapter.parts and "cross" not in adapter.features:
        # Code that computes what documentation promises, and outputs that are those without it.
        for words, flags, code, name in (
            (ROTARY, "rot|rope|pos", r"\bcos\(|\bpolar\(", "rotary-idle"),
            (ALIBI, "alibi|slope|pos", r"\bslopes?\b", "bias-idle"),
        ):
            arguments = POSITIONS & set(adapter.arguments)
            if (
                promises(adapter, words, flags)
                and re.search(code, adapter.description.source)
                and not arguments
            ):
                yield failed(f"it is attention {BUGS[name].description}.", bug=BUGS[name])


def promises(adapter: AttentionAdapter, words: str, flags: str) -> bool:
    """Return True if the documentation says that there is such a part, and no setting turns it off."""
    values = {**adapter.init, **adapter.description.attributes}
    is_off = any(x is False and re.search(flags, name, re.I) for name, x in values.items())
    text = adapter.description.doc
    is_negated = re.search(rf"\b(?:no|not|without|optional\w*|if)\b[^.]*{words}", text, re.I)
    return re.search(words, text, re.I) is not None and not is_negated and not is_off


@check("permutation", needs_oracle=True)
def check_permutation(adapter: AttentionAdapter) -> Check:
    """Permute keys, or all tokens."""
    if adapter.always_causal:
        return skipped("it is causal, so order matters")
    if any(isinstance(part, POSITIONAL) for part in adapter.parts):
        return skipped("it encodes positions, so order matters")
    generator = torch.Generator().manual_seed(13)
    inputs = adapter.draw(generator, 2, 5, 7)
    if inputs.query_vectors is not None or inputs.key_vectors is not None:
        return skipped("calls need vectors of positions, so order matters")
    order = torch.randperm(inputs.s, generator=generator)
    permuted = inputs.but(key=inputs.key[..., order, :], value=inputs.value[..., order, :])
    expected = adapter.run(inputs).out
    reason, failure = "the order of keys doesn't matter", "another order of keys changes the output"
    if "cross" not in adapter.features:
        permuted = permuted.but(query=inputs.query[..., order, :])
        expected = expected[..., order, :]
        reason = "permuted tokens give permuted outputs"
        failure = "permuted tokens don't give permuted outputs"
    error = largest_difference(adapter.run(permuted).out, expected)
    return judge(error, 2 * adapter.allowed_error(inputs), reason, f"without a mask or positions, {failure}.")


@check("batch entries")
def check_batch_entries(adapter: AttentionAdapter) -> Check:
    """Change one batch entry, and compare the outputs of the others."""
    if adapter.is_single or adapter.batch == 1:
        return skipped("it takes one sequence")
    generator = torch.Generator().manual_seed(14)
    inputs, others = adapter.draw(generator, 3, 5, 7), adapter.draw(generator, 3, 5, 7)
    before = adapter.run(inputs).out
    names = ("query", "key", "value")
    mixed = {name: torch.cat((getattr(others, name)[:1], getattr(inputs, name)[1:])) for name in names}
    after = adapter.run(adapter.replace_sequences(inputs, **mixed)).out
    error = largest_difference(before[1:], after[1:])
    if error > (allowed := adapter.allowed_error(inputs)):
        return failed("a change in batch entry 0 changes the others.", error, allowed)
    spoilt = {name: torch.cat((x[:1] * math.nan, x[1:])) for name, x in mixed.items()}
    with_nan = adapter.attempt(adapter.replace_sequences(inputs, **spoilt))
    if with_nan is not None and bool(with_nan.out[1:].isnan().any()):
        return failed("NaN in batch entry 0 makes the outputs of others NaN.", math.inf, 0.0)
    return passed("entries are independent", error, allowed)


@check("heads", needs_oracle=True)
def check_heads(adapter: AttentionAdapter) -> Check:
    """Change head 0, and compare the outputs of the others."""
    if adapter.heads == 1:
        return skipped("it has one head")
    inputs = adapter.draw(torch.Generator().manual_seed(15), 2, 5, 7)
    if adapter.weights is not None:
        return check_projected_heads(adapter, adapter.weights, inputs)
    changed = inputs.but(query=torch.cat((inputs.query[:, :1] + 1, inputs.query[:, 1:]), 1))
    error = largest_difference(adapter.run(inputs).out[:, 1:], adapter.run(changed).out[:, 1:])
    failure = "a change of head 0's queries changes other heads."
    return judge(error, adapter.allowed_error(inputs), "heads are independent", failure)


def check_projected_heads(adapter: AttentionAdapter, weights: Weights, inputs: Inputs) -> Check:
    """Change the query weights of head 0: the output may change only by what o projects from head 0."""
    part, *others = adapter.projections.weight["q"]
    o = weights.weight.get("o")
    value_size = weights.weight["v"].shape[0] // weights.key_heads
    shared, projections = adapter.description.shared, adapter.projections.weight
    paths = {view.path for role in "vo" for view in projections.get(role, ())}
    is_shared = shared.get(part.path, part.path) in {shared.get(path, path) for path in paths}
    mixes = any(
        isinstance(part, HeadMixing | Activation) or (isinstance(part, Norm) and part.place in MIXING)
        for part in adapter.parts
    )
    if (
        o is None
        or mixes
        or value_size >= o.shape[0]
        or part.axes
        or part.rows
        or part.piece
        or part.transposed
        or others
        or is_shared
    ):
        return skipped("its heads can't be distinguished in its output")
    before = adapter.run(inputs).out
    parameter, head_size = adapter.parameters[part.path], weights.head_size
    head, other_heads = parameter[:head_size], parameter[head_size:]
    adapter.candidate.load({part.path: torch.cat((head.flip(0) * 1.5, other_heads))})
    try:
        after = adapter.run(inputs).out
    finally:
        adapter.candidate.load({part.path: parameter})
    change: Tensor = (after - before).to(torch.float64).flatten(0, -2).mT  # [e, n]
    basis = torch.linalg.qr(o[:, :value_size].to(torch.float64)).Q
    error = float((change - basis @ (basis.mT @ change)).abs().max())  # of what isn't from head 0
    failure = "other query weights in head 0 change the outputs of other heads."
    return judge(error, 4 * adapter.allowed_error(inputs), "heads are independent", failure)
