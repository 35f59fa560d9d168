"""Build the adapter of a candidate, and probe its layout, masks and causality with trial calls.

The calls show which arguments a candidate accepts, and which inputs affect which outputs. Except for padded
queries, outputs aren't compared with the expected ones: an option that is chosen because it makes them match
could hide a bug.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import torch

from manyheads.checker.candidates import documentation, names
from manyheads.checker.candidates.adapter import Adapter, B, Options, S, T
from manyheads.checker.candidates.attention import SEQUENCES, AttentionAdapter
from manyheads.checker.candidates.construct import fill_arguments
from manyheads.checker.candidates.encoding import RotaryAdapter, TableAdapter
from manyheads.checker.candidates.errors import Unclear, UnexpectedOutput
from manyheads.checker.candidates.forms import GENERAL_MASKS, HEAD_LAYOUTS, KEY_MASKS, MaskForm
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.errors import CandidateError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.oracle import Inputs, Outputs


def open_adapter(candidate: Candidate | CandidateProcess, options: Options) -> Adapter:
    """Return the adapter of a candidate.

    Args:
        candidate: The code under test.
        options: Its kind, and the user's options.

    Returns:
        The adapter, with the features that the candidate supports.

    Raises:
        Unclear: If the candidate can't be built or called.
    """
    if options.kind in ("positional", "rotary"):
        return (TableAdapter if options.kind == "positional" else RotaryAdapter)(candidate, options)
    try:
        return fit(AttentionAdapter(candidate, options))
    except Unclear as error:
        description, init = candidate.describe(), options.init
        is_class = description.type == "class"
        if not is_class or fill_arguments(description, init) == fill_arguments(description, init, True):
            raise
        try:
            adapter = fit(AttentionAdapter(candidate, options, same_width=True))
        except Unclear:
            raise error from None
        adapter.width_error = str(error)
        adapter.notes.append("built with the same width everywhere, because different widths raise an error")
        return adapter


def fit(adapter: AttentionAdapter) -> AttentionAdapter:
    """Find how the candidate is called, and which inputs and outputs it supports."""
    g = torch.Generator().manual_seed(2)
    if adapter.weights is None:
        find_head_layout(adapter, g)
    else:
        find_layout(adapter, g)
    x = adapter.draw(g)
    plain: Outputs | None = None
    try:
        plain = adapter.run(x, strict=False)
    except CandidateError as error:
        raise adapter.reject_call(error, x) from None
    except UnexpectedOutput:
        pass  # reported later, by the check of shapes
    find_returned_weights(adapter, x, plain)
    has_heads = adapter.weights is None and "h" in adapter.head_layout
    if has_heads and ("grouped" in adapter.arguments or adapter.attempt(adapter.draw(g, key_heads=2))):
        adapter.features.add("grouped")
    adapter.features |= {"scale", "sink", "causal", "past"} & set(adapter.arguments)
    find_causality(adapter, g)
    find_masks(adapter, g)
    find_padded_queries(adapter, g)
    return adapter


def find_returned_weights(adapter: AttentionAdapter, x: Inputs, plain: Outputs | None) -> None:
    """Find whether weights are returned, always or on request, and whether they are always averaged."""
    returned = plain
    if "weights" in adapter.arguments:  # if weights are missing, the check of weights reports it
        returned = None if plain is None else adapter.attempt(x.but(need_weights=True))
        adapter.features.add("weights")
    elif plain is not None and plain.weights is not None:
        adapter.always_weights = True
        adapter.features.add("weights")
    if "average" in adapter.arguments or adapter.heads == 1 or returned is None or returned.weights is None:
        return
    is_documented = documentation.says_averaged(adapter.text)
    may_average = adapter.kind == "torch-mha" or re.search(r"\b(averag|mean)", adapter.text, re.I)
    adapter.always_averaged = is_documented or (bool(may_average) and returned.weights.shape[1] == 1)
    if adapter.always_averaged:
        convention = ", as in PyTorch's layer" * (adapter.kind == "torch-mha")
        reason = " (as its documentation says)" if is_documented else convention
        adapter.notes.append(f"its returned weights are averaged over the heads{reason}")


def find_head_layout(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Choose the first head layout that is accepted; documented ones are tried first."""
    # No two sizes of the trial inputs are equal, so most wrong layouts raise an error.
    text = adapter.text.replace("s, h", "t, h").replace("s, b", "t, b")
    documented = [layout for layout in HEAD_LAYOUTS[1:3] if layout[:-1] in text]
    for layout in dict.fromkeys([*documented, *HEAD_LAYOUTS]):
        adapter.head_layout = layout
        if adapter.attempt(adapter.draw(g, b=1 if layout == "[t, d]" else B, s=S)) is not None:
            if layout != "[b, h, t, d]":
                adapter.notes.append(f"takes {layout}" if "h" in layout else f"takes one head, {layout}")
            return
    adapter.head_layout = "[b, h, t, d]"


def find_layout(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find which axis is the batch, unless the user gave the layout."""
    if adapter.options.layout is not None:
        return
    batch_first = adapter.description.attributes.get("batch_first", adapter.init.get("batch_first"))
    if isinstance(batch_first, bool):
        adapter.layout, reason = ("batch" if batch_first else "sequence"), f"batch_first={batch_first}"
    elif documented := documentation.documented_layout(adapter.description, adapter.text):
        adapter.layout, reason = documented, "its documentation or code"
    else:
        has_independent_entries = {}
        for layout in ("batch", "sequence"):
            adapter.layout = layout
            x = adapter.draw(g, s=S)
            sequences = {name: getattr(x, name) for name in SEQUENCES}
            changed = {name: torch.cat((y[:1] + 1, y[1:])) for name, y in sequences.items()}
            before, after = adapter.attempt(x), adapter.attempt(x.but(**changed))
            has_independent_entries[layout] = (
                before is not None and after is not None and torch.equal(before.out[1:], after.out[1:])
            )
        # If they are independent in neither layout, torch-mha is sequence first, other kinds are batch first.
        is_sequence = adapter.kind == "torch-mha" or has_independent_entries["sequence"]
        adapter.layout = "sequence" if is_sequence and not has_independent_entries["batch"] else "batch"
        if has_independent_entries["sequence"]:
            reason = "batch entries are independent only in this layout; pass --layout batch for [b, t, e]"
        else:
            reason = "the default of PyTorch's layer; pass --layout batch for [b, t, e]"
    if adapter.layout == "sequence":
        adapter.notes.append(f"sequence first, [t, b, e] ({reason})")


def find_causality(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find whether the candidate is always causal, from its constructor, documentation or outputs."""
    if "causal" in adapter.arguments:
        return
    values = {**adapter.description.attributes, **adapter.init}
    flags = [name for name in values if values[name] is True and name in names.CONSTRUCTOR["causal"][1]]
    if adapter.kind in ("sdpa", "torch-mha", "hf") and not flags:
        return
    documented = documentation.causal_reason(adapter.description, adapter.text)
    reason = f"built with {flags[0]}=True" if flags else documented
    if reason is None:
        x = adapter.draw(g, t=T, s=None)
        if x.t == x.s and ignores_future(adapter, x):
            reason = "no later token affects an earlier one"
    if reason is not None:
        adapter.always_causal = True
        adapter.notes.append(f"assumed to be causal ({reason})")
        adapter.features.add("causal")


def ignores_future(adapter: AttentionAdapter, x: Inputs) -> bool:
    """Return True if changing a token never affects earlier tokens, but at least once a later one."""
    before, affects_later = adapter.attempt(x), False
    for j in range(x.t):
        after = adapter.attempt(adapter.change_key(x, j))
        if before is None or after is None or not torch.equal(before.out[..., :j, :], after.out[..., :j, :]):
            return False
        affects_later |= not torch.equal(before.out[..., j + 1 :, :], after.out[..., j + 1 :, :])
    return affects_later


# -- masks -----------------------------------------------------------------------------------------


def find_masks(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find the form of each mask argument."""
    for role in ("mask", "padding"):
        if role in adapter.arguments:
            find_mask(adapter, g, role)
    if "lengths" in adapter.arguments:
        adapter.forms.setdefault("keys", ("lengths", MaskForm("lengths")))
        adapter.features.add("keys")
    if adapter.kind in ("sdpa", "torch-mha") and "mask" in adapter.forms:
        x = adapter.draw(g, s=S)
        polarity = documentation.documented_polarity(adapter.arguments["mask"], adapter.text)
        if polarity is None and adapter.attempt(x.but(bias=torch.zeros(x.t, x.s))) is not None:
            adapter.features.add("bias")


def find_mask(adapter: AttentionAdapter, g: torch.Generator, role: str) -> None:
    """Find the forms that an argument accepts: one for general masks, one for key masks, or both."""
    name = adapter.arguments[role]
    keeps, reason = documentation.mask_polarity(name, role, adapter.kind, adapter.text)
    shapes = [*GENERAL_MASKS, *KEY_MASKS]
    documented = documentation.documented_shapes(name, adapter.text).intersection(shapes)
    if documented:
        shapes = [shape for shape in shapes if shape in documented]
    elif role == "padding":
        shapes = sorted(KEY_MASKS, key=lambda shape: shape != "bs")
    elif adapter.layout == "sequence":
        shapes.sort(key=lambda shape: not shape.endswith("b"))
    types = mask_types(adapter, role)
    accepted: list[tuple[str, MaskForm, bool]] = []
    for is_general in (True, False):
        forms = [
            MaskForm(shape, keeps, type)
            for shape, type in product(shapes, types)
            if (shape in GENERAL_MASKS) == is_general
        ]
        feature = "padding" if role == "padding" else "mask" if is_general else "keys"
        if feature not in adapter.forms and (found := find_form(adapter, g, role, forms)):
            accepted.append((feature, *found))
    if not documented and any(masks for *_, masks in accepted):
        # A form that is accepted without masking anything only happens to broadcast.
        accepted = [entry for entry in accepted if entry[2]]
    for feature, form, _ in accepted:
        adapter.forms[feature] = (role, form)
        adapter.features.add(feature)
    if not accepted:
        adapter.rejected_masks[name] = adapter.last_error
        return
    has_polarity = accepted[0][1].type in ("bool", "01")
    description = " or ".join(dict.fromkeys(str(form) for _, form, _ in accepted))
    adapter.notes.append(f"{name}: {description}" + f" ({reason})" * has_polarity)


def mask_types(adapter: AttentionAdapter, role: str) -> tuple[str, ...]:
    """Return the types of mask to try, in order."""
    name = adapter.arguments[role]
    if adapter.kind in ("sdpa", "torch-mha"):
        types: tuple[str, ...] = ("bool",)
    elif documentation.is_additive(name, adapter.text):
        types = ("added",)
    elif adapter.kind == "hf" or name == "attn_bias":
        types = ("added", "bool", "01")
    elif documentation.documented_polarity(name, adapter.text) is not None:
        types = ("bool", "01")
    else:
        types = ("bool", "01", "added")
    arguments = adapter.description.call
    is_mask_class = any(arg.name == name and re.search(r"\bMask\b", arg.annotation) for arg in arguments)
    return ("Keep", *types) if is_mask_class else types


def find_form(
    adapter: AttentionAdapter, g: torch.Generator, role: str, forms: list[MaskForm]
) -> tuple[MaskForm, bool] | None:
    """Return an accepted form and whether it masks keys, or None if no form is accepted.

    It has the first shape that is accepted, with the first type that masks keys (in either polarity), or the
    first accepted type if none does.
    """
    shapes = list(dict.fromkeys(form.letters for form in forms))
    for s, shape in product((S, T), shapes):
        x = adapter.draw(g, s=s)
        masks = {form: masks_key(adapter, x, form, role) for form in forms if form.letters == shape}
        accepted = [form for form in masks if masks[form] is not None]
        for form in accepted:
            inverted = replace(form, keeps=not form.keeps)
            if masks[form] or (form.type != "added" and masks_key(adapter, x, inverted, role)):
                return form, True
        if accepted:
            return accepted[0], False
    return None


def masks_key(adapter: AttentionAdapter, x: Inputs, form: MaskForm, role: str) -> bool | None:
    """Return True if changing a masked key changes no output, None if the form isn't accepted."""
    is_visible = torch.arange(x.s) != 2
    feature, field = "padding", {"padding": is_visible.expand(x.b, -1)}
    if role == "mask":
        t = x.t if form.is_general else 1
        feature, field = "mask", {"keep": is_visible.expand(x.b, 1, t, -1).clone()}
    forms, adapter.forms = adapter.forms, adapter.forms | {feature: (role, form)}
    try:
        before = adapter.attempt(x.but(**field))
        after = adapter.attempt(adapter.change_key(x, 2).but(**field))
    finally:
        adapter.forms = forms
    if before is None or after is None:
        return None
    rows = adapter.unchanged_queries(x, 2)
    return torch.equal(before.out[..., rows, :].nan_to_num(), after.out[..., rows, :].nan_to_num())


def find_padded_queries(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find whether only the outputs of padded queries differ from attention's; they aren't compared then."""
    if "cross" in adapter.features or not {"keys", "padding"} & adapter.features:
        return
    x = adapter.draw(g)
    padding = torch.ones(B, x.s, dtype=torch.bool)
    # Padding before other tokens, which attend to it unless it is masked, and at the end.
    padding[0, 1] = padding[2, 2] = padding[2, -1] = False
    form = adapter.forms.get("padding", adapter.forms.get("keys"))
    if form is not None and form[1].letters == "lengths":
        padding = torch.arange(x.s) < torch.tensor([x.s - 2, x.s, x.s - 1])[:, None]
    x = x.but(padding=padding)
    got, expected = adapter.attempt(x), adapter.exact(x).out
    if got is None or got.out.shape != expected.shape:
        return
    tolerance = 1e-4 * float(expected.abs().max())
    is_correct = torch.isclose(got.out.to(expected.dtype), expected, rtol=1e-4, atol=tolerance).all(-1)
    adapter.ignores_padded_queries = bool(is_correct[padding].all()) and not bool(is_correct[~padding].all())
    if adapter.ignores_padded_queries:
        adapter.notes.append(
            "outputs of padded queries aren't compared, because only they differ from attention's"
        )
