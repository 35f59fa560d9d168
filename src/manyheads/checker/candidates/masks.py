"""Find by trial calls which forms each mask argument takes, and which optional arguments are masks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch

from manyheads.checker.candidates import documentation, names
from manyheads.checker.candidates.adapter import S, T
from manyheads.checker.candidates.attention import TRIED, AttentionAdapter
from manyheads.checker.candidates.forms import (
    GENERAL_MASKS,
    HEAD_MASKS,
    IMAGE_MASKS,
    KEY_MASKS,
    NUMBERS,
    SEGMENTS,
    MaskForm,
)
from manyheads.checker.candidates.roles import is_of_context
from manyheads.checker.oracle import Inputs

# Matches names of optional arguments that the candidate can't be judged without.
INPUT_NAMES = re.compile(r"mask|pos|cache|past|kv|rope|rotary|freq|angle|bias|keep|visible|pad|causal|hid")

INPUT_WORDS = re.compile(r"\b(?:cumulative|segments?|packed|boundar\w+)\b", re.I)  # in their documentation


def fill_required_masks(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find a form for each required mask argument that can't be None; it is then passed in all calls."""
    required = [arg.name for arg in adapter.description.call if arg.required and arg.name in adapter.masks]
    x = adapter.draw(g, s=S)
    if not required or adapter.attempt(x) is not None:
        return
    forms = [mask_forms(adapter, name)[0] for name in required]
    layouts = ("batch", "sequence") if adapter.options.layout is None else (adapter.layout,)
    for layout, filled in product(layouts, product(*forms)):
        adapter.layout, adapter.filled = layout, dict(zip(required, filled, strict=True))
        if adapter.attempt(x) is not None:
            return
    adapter.filled, adapter.layout = {}, adapter.options.layout or "batch"


def find_masks(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find the forms of each mask argument, and whether an argument without a role is a mask."""
    for name, role in adapter.masks.items():
        if role == "lengths":
            add_form(adapter, "keys", name, MaskForm(role))
        elif role in SEGMENTS:
            find_segments(adapter, g, name)
        elif role not in ("mask", "mask-of-queries") or not find_mask_of_queries(adapter, g, name):
            find_mask(adapter, g, name)
    for name in adapter.unassigned:
        adapter.masks[name], adapter.reasons[name] = "mask", TRIED
        find_mask(adapter, g, name)
        if all(name != other for other, _ in adapter.forms.values()):
            del adapter.masks[name], adapter.reasons[name]
        else:
            reject_other_effects(adapter, g, name)
    name, form = adapter.forms.get("mask", ("", MaskForm("ts", type="added")))
    is_torch = adapter.kind in ("sdpa", "torch-mha")
    documented = documentation.read_mask(name, adapter.text)
    may_be_added = documented.is_of_floats
    if (is_torch or may_be_added) and form.type == "bool" and "bias" not in adapter.arguments:
        x = adapter.draw(g, s=S)
        adapter.arguments["bias"] = name
        may_be_added |= documented.polarity is None
        if may_be_added and adapter.attempt(x.but(bias=torch.zeros(x.t, x.s))) is not None:
            adapter.features.add("bias")


def find_segments(adapter: AttentionAdapter, g: torch.Generator, name: str) -> None:
    """Find whether an argument takes numbers of segments, `[b, t]`, or where they end."""
    x, form = adapter.draw(g), MaskForm(adapter.masks[name])
    adapter.last_error = None
    with trial(adapter, name, form):
        masked = adapter.attempt(x.but(keep=torch.ones(x.b, 1, x.t, x.s, dtype=torch.bool), form="trial"))
    if masked is None:
        adapter.rejected_masks[name] = adapter.last_error
    else:
        add_form(adapter, "segments", name, form)


def reject_other_effects(adapter: AttentionAdapter, g: torch.Generator, name: str) -> None:
    """Leave out an argument that only trial calls took for a mask, if outputs with it aren't those of one."""
    x = adapter.draw(g, s=S)
    if adapter.unknown or (plain := adapter.attempt(x)) is None or not adapter.is_right(x, plain):
        return  # what differs may not be the mask
    for feature, form in [
        (feature, form) for feature, (other, form) in adapter.forms.items() if other == name
    ]:
        masked = adapter.random_mask(x, g, True) if form.is_general else adapter.random_padding(x, g)
        masked = masked.but(form=feature)
        got = adapter.attempt(masked)
        if got is not None and adapter.is_right(masked, got):
            continue
        adapter.forms = {key: each for key, each in adapter.forms.items() if each[0] != name}
        adapter.features -= {"mask", "keys", "padding"} - set(adapter.forms)
        del adapter.masks[name]
        adapter.unjudged[name] = (
            "trial calls show that it masks keys, but outputs with it aren't those of a mask, and nothing "
            f"says what it is. Give its role with --arg {name}=ROLE, such as {name}=mask, or {name}=ignore."
        )
        return


def add_form(adapter: AttentionAdapter, feature: str, name: str, form: MaskForm) -> None:
    """Add a form of a mask argument under its feature, or if that is taken with its name or axes added."""
    if feature in adapter.forms:
        axes = f"{len(form.letters)}-dimensional"
        is_same = adapter.forms[feature][0] == name
        taken = f"{feature} ({axes if is_same else name})"
        feature = f"{feature} ({name} {form})" if taken in adapter.forms else taken
    adapter.forms[feature] = (name, form)
    adapter.features.add(feature)


def find_mask_of_queries(adapter: AttentionAdapter, g: torch.Generator, name: str) -> bool:
    """Find whether an argument masks queries, if it may, and return True if nothing else is to be found."""
    is_given = adapter.masks[name] == "mask-of-queries"
    documented = documentation.read_mask(name, adapter.text)
    is_stated = bool(documented.shapes) and not documented.has_queries
    if not is_given and (is_stated or "cross" not in adapter.features):
        return False
    option, has_effect = f"--arg {name}=mask-of-queries", masks_queries(adapter, g, name)
    if is_given and not has_effect:
        adapter.unjudged[name] = f"with {option}, a mask [b, t] of one query doesn't change its output alone."
    elif not has_effect:
        return False
    elif not is_given and "mask-of-keys" not in adapter.masks.values():  # which may be applied wrongly
        adapter.unjudged[name] = f"trial calls show that it masks queries. If that is meant, give {option}."
    else:
        adapter.masks[name] = "mask-of-queries"
        adapter.reasons[name] += f"; {TRIED}" * (not is_given)
        adapter.judged.add(name)
    return True


def find_mask(adapter: AttentionAdapter, g: torch.Generator, name: str) -> None:
    """Find the forms that a mask argument accepts."""
    role = adapter.masks[name]
    forms, is_documented = mask_forms(adapter, name)
    # Each documented shape is used; of the others, one for general masks and one for key masks.
    groups: dict[object, list[MaskForm]] = {}
    for form in sorted(forms, key=lambda form: not form.is_general):
        is_single = is_documented or form.letters in HEAD_MASKS
        groups.setdefault(form.letters if is_single else form.is_general, []).append(form)
    found = [find_form(adapter, g, name, group) for group in groups.values()]
    documented = documentation.read_mask(name, adapter.text).shapes
    rejected = [
        str(group[0]).partition("]")[0] + "]"
        for group, form in zip(groups.values(), found, strict=True)
        if form is None and group[0].letters in documented and any(found)
    ]
    adapter.rejected_shapes |= {name: " and ".join(rejected)} if rejected else {}
    accepted = [each for each in found if each is not None]
    has_effect = any(effect for _, effect in accepted)
    if has_effect and not is_documented:
        # A form that is accepted without masking anything only happens to broadcast.
        accepted = [each for each in accepted if each[1]]
    with_heads = [each for each in accepted if each[0].letters in HEAD_MASKS]
    accepted = [each for each in accepted if each not in with_heads]
    if not is_documented and len(accepted) > 1:  # the wrong shape may broadcast to another one
        x = adapter.draw(g, s=S)
        keep = torch.ones(x.b, 1, x.t, x.s, dtype=torch.bool)
        everything = x.but(keep=keep, form="trial")
        # A mask that masks nothing changes nothing.
        changed = {form: changed_by_mask(adapter, name, form, [x, everything]) for form, _ in accepted}
        accepted = [each for each in accepted if changed[each[0]] == [False] * x.t] or accepted
        if any(form.letters == "bs" for form, _ in accepted):
            # Such a mask gets axes before its last one, which turns [t, s] or [b, t, s] into something else.
            short = [form for form, _ in accepted if form.is_general and len(form.letters) < 4]
            # A key that is masked for the last query alone changes that query alone.
            keep = keep.clone()
            keep[..., -1, x.s - 2] = False
            calls = [everything, everything.but(keep=keep)]
            last = [False] * (x.t - 1) + [True]
            wrong = [form for form in short if changed_by_mask(adapter, name, form, calls) != last]
            accepted = [each for each in accepted if each[0] not in wrong]
    accepted += [each for each in with_heads if each[1]] + find_by_dimensions(adapter, g, name, accepted)
    _, reason, is_certain = documentation.mask_polarity(name, role, adapter.kind, adapter.text)
    option = f"--arg {name}="
    is_given = adapter.reasons[name].startswith(option)
    is_known = is_given or names.argument_role(name) is not None
    lines = documentation.lines_about(name, adapter.text)
    is_input = INPUT_NAMES.search(name) or INPUT_WORDS.search(lines)
    if not has_effect and name in adapter.unassigned and not is_input:
        adapter.defaults.append(name)
    elif not has_effect and not is_known and not is_documented:
        adapter.unjudged[name] = (
            "nothing says what it is, and no trial call shows that it is a mask of keys. Give its role with "
            f"{option}ROLE, or {option}ignore."
        )
    elif not accepted:
        x = adapter.draw(g, s=S)
        adapter.last_error = None
        with trial(adapter, name, forms[0]):
            adapter.attempt(x.but(keep=torch.ones(x.b, 1, x.t, x.s, dtype=torch.bool), form="trial"))
        adapter.rejected_masks[name] = adapter.last_error
    elif not is_certain and {effect for _, effect in accepted} == {"inverted"}:
        effect, meant, other = (
            ("masks", "drop", "keep") if accepted[0][0].keeps else ("keeps", "keep", "drop")
        )
        adapter.unjudged[name] = (
            f"nothing says whether True keeps or masks a key, and here True {effect} one. If that is meant, "
            f"give {option}{meant}, otherwise {option}{other}."
        )
    elif (
        has_effect
        and all(form.type == "added" and form.letters in ("bs", "sb") for form, _ in accepted)
        and not (is_given or is_documented_as_added(adapter, name))
    ):
        adapter.unjudged[name] = (
            "ones and zeros for keys mask none here, and nothing says that it is added to the scores. "
            f"If that is meant, give {option}additive-mask-of-keys, otherwise {option}keep-of-keys."
        )
    elif has_effect and not is_given and is_beside_mask_of_context(adapter, name, accepted):
        adapter.unjudged[name] = (
            "it masks keys of the context, for which there is another mask. If that is meant, give "
            f"{option}mask-of-keys. If it is a mask of x, the code is wrong."
        )
    else:
        for form, _ in accepted:
            feature = "padding" if role.endswith("of-keys") else "mask" if form.is_general else "keys"
            add_form(adapter, feature, name, form)
            if name in adapter.filled:
                adapter.filled[name] = form
        if accepted[0][0].type in ("bool", "01"):
            adapter.reasons[name] += f"; polarity {reason}"


def find_by_dimensions(
    adapter: AttentionAdapter, g: torch.Generator, name: str, accepted: list[tuple[MaskForm, str]]
) -> list[tuple[MaskForm, str]]:
    """Return forms, and their effects, with further numbers of dimensions that code tells apart."""
    role = adapter.masks[name]
    if role in NUMBERS:
        return []
    keeps, *_ = documentation.mask_polarity(name, role, adapter.kind, adapter.text)
    shapes = [*KEY_MASKS] if role.endswith("of-keys") else [*GENERAL_MASKS, *HEAD_MASKS, *KEY_MASKS]
    known, found = {len(form.letters) for form, _ in accepted}, []
    for n in sorted(documentation.code_dimensions(name, adapter.description.source) - known):
        for shape in (shape for shape in shapes if len(shape) == n and "1" not in shape[:1]):
            types = mask_types(adapter, name, role)
            forms = [MaskForm(shape, keeps, type, adapter.heads) for type in types]
            if (form := find_form(adapter, g, name, forms)) is not None and form[1]:
                found.append(form)
                break
    return found


def is_documented_as_added(adapter: AttentionAdapter, name: str) -> bool:
    """Return True if documentation says that a mask is added, or that it has an entry for each query too."""
    documented = documentation.read_mask(name, adapter.text)
    return documented.is_additive or documented.is_of_floats or "ts" in documented.shapes


def changed_by_mask(adapter: AttentionAdapter, name: str, form: MaskForm, calls: list[Inputs]) -> list[bool]:
    """Return for each query whether its output differs between two calls, [] if one isn't accepted."""
    with trial(adapter, name, form):
        outputs = [adapter.attempt(x) for x in calls]
    outs = [each.out for each in outputs if each is not None]
    if len(outs) < 2:
        return []
    return (~torch.isclose(outs[0], outs[1], atol=1e-5)).any(-1).flatten(0, -2).any(0).tolist()


def is_beside_mask_of_context(
    adapter: AttentionAdapter, name: str, accepted: list[tuple[MaskForm, str]]
) -> bool:
    """Return True if this masks only keys, and another mask is by its name that of the context."""
    masks = {other for other, role in adapter.masks.items() if is_of_context(other, role)}
    is_general = any(form.is_general for form, _ in accepted)
    return adapter.kind == "cross" and bool(masks) and name not in masks and not is_general


def mask_forms(adapter: AttentionAdapter, name: str) -> tuple[list[MaskForm], bool]:
    """Return the forms of mask to try for an argument, and whether its documentation states the shape."""
    role = adapter.masks[name]
    if role in NUMBERS:
        return [MaskForm(role)], True
    keeps, *_ = documentation.mask_polarity(name, role, adapter.kind, adapter.text)
    shapes = [*GENERAL_MASKS, *KEY_MASKS]
    if adapter.context_grid:
        return [
            MaskForm(shape, keeps, type)
            for shape, type in product((*IMAGE_MASKS, *shapes), mask_types(adapter, name, role))
        ], False
    documented = documentation.read_mask(name, adapter.text).shapes.intersection(shapes)
    if documented:
        shapes = [shape for shape in shapes if shape in documented]
    elif role.endswith("of-keys"):
        shapes = sorted(KEY_MASKS, key=lambda shape: shape != "bs")
    elif adapter.layout == "sequence":
        shapes.sort(key=lambda shape: not shape.endswith("b"))
    shapes += documentation.read_mask(name, adapter.text).shapes.intersection(HEAD_MASKS)
    types = mask_types(adapter, name, role)
    forms = [MaskForm(shape, keeps, type, adapter.heads) for shape, type in product(shapes, types)]
    return forms, bool(documented)


def mask_types(adapter: AttentionAdapter, name: str, role: str) -> tuple[str, ...]:
    """Return the types of mask to try, in order."""
    documented = documentation.read_mask(name, adapter.text)
    types: tuple[str, ...] = ("bool", "01", "added")
    if role.startswith(("keep", "drop")):
        types = ("bool", "01")
    elif role.startswith("additive") or documented.is_additive:
        types = ("added",)
    elif adapter.kind in ("sdpa", "torch-mha"):
        types = ("bool",)
    elif adapter.kind == "hf" or name == "attn_bias":
        types = ("added", "bool", "01")
    elif documented.is_boolean:
        types = ("bool",)
    elif documented.polarity is not None:
        types = ("bool", "01")
    annotation = next(arg.annotation for arg in adapter.description.call if arg.name == name)
    return ("Keep", *types) if re.search(r"\bMask\b", annotation) else types


def find_form(
    adapter: AttentionAdapter, g: torch.Generator, name: str, forms: list[MaskForm]
) -> tuple[MaskForm, str] | None:
    """Return an accepted form and its effect, or None if no form is accepted.

    It has the first shape that is accepted, with the first type that masks keys (in either polarity), or the
    first accepted type if none does. The effect is "masks", "inverted" if only the other polarity masks, or
    "" for no effect.
    """
    for s, shape in product((S, T), dict.fromkeys(form.letters for form in forms)):
        x = adapter.draw(g, s=s)
        effects = {form: masks_key(adapter, x, name, form) for form in forms if form.letters == shape}
        accepted = [form for form in effects if effects[form] is not None]
        for form in accepted:
            if effects[form]:
                return form, "masks"
            if form.type != "added" and masks_key(adapter, x, name, replace(form, keeps=not form.keeps)):
                return form, "inverted"
        if accepted:
            return accepted[0], ""
    return None


@contextmanager
def trial(adapter: AttentionAdapter, name: str, form: MaskForm) -> Iterator[None]:
    """Let inputs of the form "trial" pass their mask as an argument in some form."""
    adapter.forms["trial"] = (name, form)
    try:
        yield
    finally:
        del adapter.forms["trial"]


def masks_key(adapter: AttentionAdapter, x: Inputs, name: str, form: MaskForm) -> bool | None:
    """Return True if changing a masked key changes no output, None if the form isn't accepted."""
    keep = (torch.arange(x.s) != 2).expand(x.b, 1, x.t if form.is_general else 1, -1).clone()
    masked = x.but(keep=keep, form="trial")
    with trial(adapter, name, form):
        changed = adapter.changed_queries(masked, adapter.change_key(masked, 2))
    return None if changed is None else not changed[adapter.unchanged_queries(x, 2)].any()


def masks_queries(adapter: AttentionAdapter, g: torch.Generator, name: str) -> bool:
    """Return True if an argument takes a mask [b, t] of queries, which changes no other query's output."""
    x = adapter.draw(g, s=S)
    is_visible = torch.arange(x.t) != 2
    masked = x.but(keep=is_visible.expand(x.b, 1, 1, -1).clone(), form="trial")
    for keeps in (True, False):
        with trial(adapter, name, MaskForm("bs", keeps)):
            changed = adapter.changed_queries(x, masked)
        if changed is None:
            return False
        if torch.equal(changed, ~is_visible):
            return True
    return False
