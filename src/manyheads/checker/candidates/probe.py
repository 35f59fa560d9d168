"""Builds the adapter of a candidate, trying what names leave open: layouts, forms of masks, causality.

Only what a candidate accepts, and which input reaches which output, is tried, never which choice makes its
values right.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.checker.candidates import documentation, names
from manyheads.checker.candidates.adapter import Adapter, B, Options, S, T
from manyheads.checker.candidates.attention import AttentionAdapter
from manyheads.checker.candidates.construct import fill_arguments
from manyheads.checker.candidates.encoding import RotaryAdapter, TableAdapter
from manyheads.checker.candidates.errors import Unclear, UnexpectedOutput
from manyheads.checker.candidates.forms import GENERAL_MASKS, HEAD_LAYOUTS, KEY_MASKS, MaskForm
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.errors import CandidateError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.oracle import Inputs, Outputs


def open_adapter(candidate: Candidate | CandidateProcess, options: Options) -> Adapter:
    """Return the adapter of a candidate; Unclear if it can't be built or called."""
    if options.kind in ("positional", "rotary"):
        return (TableAdapter if options.kind == "positional" else RotaryAdapter)(candidate, options)
    try:
        return fit(AttentionAdapter(candidate, options))
    except Unclear as error:
        d = candidate.describe()
        if d.type != "class" or fill_arguments(d, options.init) == fill_arguments(d, options.init, True):
            raise
        try:
            adapter = fit(AttentionAdapter(candidate, options, same_width=True))
        except Unclear:
            raise error from None
        adapter.width_error = str(error)
        adapter.notes.append("built with one width for all, because different widths raise an error")
        return adapter


def fit(c: AttentionAdapter) -> AttentionAdapter:
    """Find out how the candidate is called, and which inputs and outputs it supports."""
    g = torch.Generator().manual_seed(2)
    if c.weights is None:
        find_head_layout(c, g)
    else:
        find_layout(c, g)
    x = c.draw(g)
    plain: Outputs | None = None
    try:
        plain = c.run(x, strict=False)
    except CandidateError as error:
        raise c.reject_call(error, x) from None
    except UnexpectedOutput:
        pass  # the check of shapes reports it
    find_returned_weights(c, x, plain)
    has_heads = c.weights is None and "h" in c.head_layout
    if has_heads and ("grouped" in c.arguments or c.attempt(c.draw(g, key_heads=2)) is not None):
        c.features.add("grouped")
    c.features |= {role for role in ("scale", "sink", "causal", "past") if role in c.arguments}
    find_causality(c, g)
    find_masks(c, g)
    find_padded_queries(c, g)
    return c


def find_returned_weights(c: AttentionAdapter, x: Inputs, plain: Outputs | None) -> None:
    """Find out if weights are returned, always or on request, and if they are always averaged."""
    got = plain
    if "weights" in c.arguments:  # the check of weights reports those that are missing
        got = None if plain is None else c.attempt(x.but(need_weights=True))
        c.features.add("weights")
    elif plain is not None and plain.weights is not None:
        c.always_weights = True
        c.features.add("weights")
    if "average" in c.arguments or c.heads == 1 or got is None or got.weights is None:
        return
    says_so = documentation.says_averaged(c.text)
    is_open = c.kind == "torch-mha" or re.search(r"\b(averag|mean)", c.text, re.I)
    c.always_averaged = says_so or (bool(is_open) and got.weights.shape[1] == 1)
    if c.always_averaged:
        why = " (its documentation)" if says_so else ", as in PyTorch's layer" * (c.kind == "torch-mha")
        c.notes.append(f"its weights are averaged over the heads{why}")


def find_head_layout(c: AttentionAdapter, g: torch.Generator) -> None:
    """Take the documented layout of heads, or the first that is accepted where no two sizes are the same."""
    text = c.text.replace("s, h", "t, h").replace("s, b", "t, b")
    documented = [layout for layout in HEAD_LAYOUTS[1:3] if layout[:-1] in text]
    for layout in dict.fromkeys([*documented, *HEAD_LAYOUTS]):
        c.head_layout = layout
        if c.attempt(c.draw(g, b=1 if layout == "[t, d]" else B, s=S)) is not None:
            if layout != "[b, h, t, d]":
                c.notes.append(f"takes {layout}" if "h" in layout else f"takes one head, {layout}")
            return
    c.head_layout = "[b, h, t, d]"


def find_layout(c: AttentionAdapter, g: torch.Generator) -> None:
    """Find out which axis is the batch, if it isn't given."""
    if c.options.layout is not None:
        return
    batch_first = c.d.attributes.get("batch_first", c.init.get("batch_first"))
    if isinstance(batch_first, bool):
        c.layout, why = ("batch" if batch_first else "sequence"), f"batch_first={batch_first}"
    elif (documented := documentation.documented_layout(c.d, c.text)) is not None:
        c.layout, why = documented, "its documentation or code"
    else:
        is_apart = {}
        for layout in ("batch", "sequence"):
            c.layout = layout
            x = c.draw(g, s=S)
            sequences = {n: getattr(x, n) for n in ("query", "key", "value")}
            changed = {n: torch.cat((y[:1] + 1, y[1:])) for n, y in sequences.items()}
            a, b = c.attempt(x), c.attempt(x.but(**changed))
            is_apart[layout] = a is not None and b is not None and torch.equal(a.out[1:], b.out[1:])
        # If neither works, as PyTorch's layer by default.
        is_sequence = not is_apart["batch"] and (c.kind == "torch-mha" or is_apart["sequence"])
        c.layout = "sequence" if is_sequence else "batch"
        why = "only then are batch entries independent; give --layout batch if [b, t, e] is meant"
    if c.layout == "sequence":
        c.notes.append(f"sequence first, [t, b, e] ({why})")


def find_causality(c: AttentionAdapter, g: torch.Generator) -> None:
    """Find out if it is always causal, by its constructor, its documentation, or its outputs."""
    if "causal" in c.arguments:
        return
    values = {**c.d.attributes, **c.init}
    flag = next((n for n, v in values.items() if v is True and n in names.CONSTRUCTOR["causal"][1]), None)
    if c.kind in ("sdpa", "torch-mha", "hf") and not flag:
        return
    why = f"built with {flag}=True" if flag else documentation.causal_reason(c.d, c.text)
    if why is None:
        x = c.draw(g, t=T, s=None)
        if x.t == x.s and ignores_future(c, x):
            why = "no later token affects an earlier one"
    if why is not None:
        c.always_causal = True
        c.notes.append(f"taken as causal ({why})")
        c.features.add("causal")


def ignores_future(c: AttentionAdapter, x: Inputs) -> bool:
    """Return True if a change of any token affects none before it, and some change affects a later one."""
    before, affects_later = c.attempt(x), False
    for j in range(x.t):
        after = c.attempt(c.change_key(x, j))
        if before is None or after is None or not torch.equal(before.out[..., :j, :], after.out[..., :j, :]):
            return False
        affects_later |= not torch.equal(before.out[..., j + 1 :, :], after.out[..., j + 1 :, :])
    return affects_later


# -- masks -----------------------------------------------------------------------------------------


def find_masks(c: AttentionAdapter, g: torch.Generator) -> None:
    """Find the form of each mask that the candidate takes."""
    for role in ("mask", "padding"):
        if role in c.arguments:
            find_mask(c, g, role)
    if "lengths" in c.arguments:
        c.forms.setdefault("keys", ("lengths", MaskForm("lengths")))
        c.features.add("keys")
    if c.kind in ("sdpa", "torch-mha") and "mask" in c.forms:
        x = c.draw(g, s=S)
        is_documented = documentation.documented_polarity(c.arguments["mask"], c.text) is not None
        if not is_documented and c.attempt(x.but(bias=torch.zeros(x.t, x.s))) is not None:
            c.features.add("bias")


def find_mask(c: AttentionAdapter, g: torch.Generator, role: str) -> None:
    """Find the forms of one argument: a mask, a mask of keys alone, or both."""
    name = c.arguments[role]
    keeps, why = documentation.mask_polarity(name, role, c.kind, c.text)
    keys = [letters for letters in KEY_MASKS if letters != "lengths"]
    letters = [*GENERAL_MASKS, *keys]
    documented = documentation.documented_shapes(name, c.text).intersection(letters)
    if documented:
        letters = [shape for shape in letters if shape in documented]
    elif role == "padding":
        letters = sorted(keys, key=lambda shape: shape != "bs")
    elif c.layout == "sequence":
        letters.sort(key=lambda shape: not shape.endswith("b"))
    types = mask_types(c, role)
    found: list[tuple[str, MaskForm, bool]] = []
    for general in (True, False):
        shapes = [shape for shape in letters if (shape in GENERAL_MASKS) == general]
        feature = "padding" if role == "padding" else "mask" if general else "keys"
        if feature not in c.forms and shapes:
            form, works = find_form(
                c, g, role, [MaskForm(shape, keeps, kind) for shape in shapes for kind in types]
            )
            if form is not None:
                found.append((feature, form, works))
    if not documented and any(works for *_, works in found):
        found = [
            entry for entry in found if entry[2]
        ]  # what is accepted and masks nothing broadcasts by chance
    for feature, form, _ in found:
        c.forms[feature] = (role, form)
        c.features.add(feature)
    if not found:
        c.rejected_masks[name] = c.last_error
        return
    has_polarity = found[0][1].type in ("bool", "01")
    taken = " or ".join(dict.fromkeys(str(form) for _, form, _ in found))
    c.notes.append(f"{name}: {taken}" + f" ({why})" * has_polarity)


def mask_types(c: AttentionAdapter, role: str) -> tuple[str, ...]:
    """Return the types of mask to try, in order."""
    name = c.arguments[role]
    if c.kind in ("sdpa", "torch-mha"):
        types: tuple[str, ...] = ("bool",)
    elif documentation.is_additive(name, c.text):
        types = ("added",)
    elif c.kind == "hf" or name == "attn_bias":
        types = ("added", "bool", "01")
    elif documentation.documented_polarity(name, c.text) is not None:
        types = ("bool", "01")
    else:
        types = ("bool", "01", "added")
    is_ours = any(arg.name == name and re.search(r"\bMask\b", arg.annotation) for arg in c.d.call)
    return ("Keep", *types) if is_ours else types


def find_form(
    c: AttentionAdapter, g: torch.Generator, role: str, forms: list[MaskForm]
) -> tuple[MaskForm | None, bool]:
    """Return the first shape that is accepted, in the first type that masks, and whether any type masks."""

    def masking(s: int, letters: str) -> tuple[Inputs, Tensor]:
        x = c.draw(g, s=s)
        keep = torch.ones(B, 1, x.t if letters in GENERAL_MASKS else 1, x.s, dtype=torch.bool)
        keep[..., 2] = False
        return x, keep

    accepted: list[MaskForm] = []
    shapes = list(dict.fromkeys(form.letters for form in forms))
    for s, letters in [(S, shape) for shape in shapes] + [(T, shape) for shape in shapes]:
        x, keep = masking(s, letters)
        accepted = [
            form
            for form in forms
            if form.letters == letters and masks_key(c, x, keep, form, role) is not None
        ]
        if accepted:
            break
    if not accepted:
        return None, False
    g.manual_seed(5)
    x, keep = masking(s, letters)
    for form in accepted:
        inverted = replace(form, keeps=not form.keeps)
        if masks_key(c, x, keep, form, role) or (
            form.type != "added" and masks_key(c, x, keep, inverted, role)
        ):
            return form, True
    return accepted[0], False


def masks_key(c: AttentionAdapter, x: Inputs, keep: Tensor, form: MaskForm, role: str) -> bool | None:
    """Return True if key 2 affects nothing with this mask, None if the form isn't accepted."""
    feature = "mask" if role == "mask" else "padding"
    forms, c.forms = c.forms, c.forms | {feature: (role, form)}
    try:
        field = {"keep": keep} if feature == "mask" else {"padding": keep[:, 0, 0]}
        a, b = c.attempt(x.but(**field)), c.attempt(c.change_key(x, 2).but(**field))
    finally:
        c.forms = forms
    if a is None or b is None:
        return None
    rows = c.unchanged_queries(x, 2)
    return bool(torch.equal(a.out[..., rows, :].nan_to_num(), b.out[..., rows, :].nan_to_num()))


def find_padded_queries(c: AttentionAdapter, g: torch.Generator) -> None:
    """Find out if its outputs for padded queries, which nothing reads, aren't those of attention."""
    if "cross" in c.features or not {"keys", "padding"} & c.features:
        return
    x = c.draw(g)
    padding = torch.ones(B, x.s, dtype=torch.bool)
    # Before queries that attend to it, causal or not.
    padding[0, 1] = padding[2, 2] = padding[2, -1] = False
    form = c.forms.get("padding", c.forms.get("keys"))
    if form is not None and form[1].letters == "lengths":
        padding = torch.arange(x.s) < torch.tensor([x.s - 2, x.s, x.s - 1])[:, None]
    x = x.but(padding=padding)
    got, expected = c.attempt(x), c.exact(x).out
    if got is None or got.out.shape != expected.shape:
        return
    tolerance = 1e-4 * float(expected.abs().max())
    right = torch.isclose(got.out.to(expected.dtype), expected, rtol=1e-4, atol=tolerance).all(-1)
    c.ignores_padded_queries = bool(right[padding].all()) and not bool(right[~padding].all())
    if c.ignores_padded_queries:
        c.notes.append("outputs of padded queries aren't compared: it computes something else for them")
