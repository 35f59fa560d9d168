"""What kind of candidate this is, and the constructor arguments that it is built with."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from manyheads.checker.candidates import names
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.isolation.describe import Description

KINDS = ("attention", "self", "cross", "multihead", "torch-mha", "sdpa", "hf", "positional", "rotary")
PROJECTED = ("self", "cross", "multihead", "torch-mha")  # kinds with weights
MODEL_WIDTH, HEAD_WIDTH, HEADS = "the model width", "the width of a head", "the number of heads"


def find_kind(kind: str | None, d: Description) -> tuple[str, bool]:
    """Return (kind, guessed): the given one, or the one that names and arguments suggest."""
    if kind is not None:
        if kind not in KINDS:
            raise Unclear(f"Expected --like {', '.join(KINDS)} or classic.MODULE.CLASS, got {kind!r}.")
        return kind, False
    name = d.name.lower()
    arguments = [arg for arg in d.call if arg.is_named]
    roles = {names.argument_role(arg.name) for arg in arguments} - {None}
    required = [arg for arg in arguments if arg.required]
    is_qkv = {"query", "key", "value"} <= roles
    if any(word in name for word in ("rotary", "rope", "rotate")):
        return "rotary", True
    is_positional = any(word in name for word in ("position", "sinusoid", "encod")) and "atten" not in name
    if is_positional and not {"key", "value"} & roles:
        return "positional", True
    if "module" in roles and is_qkv:
        return "hf", True
    if is_qkv or (not d.torch_module and len(required) == 3):
        if not d.torch_module or not (d.parameters or d.init):
            return ("sdpa" if len({"dropout", "causal", "mask"} & roles) >= 2 else "attention"), True
        if d.type == "module" and not d.parameters:
            return "attention", True
        is_torch = {"padding", "weights"} <= roles or "average" in roles
        return ("torch-mha" if is_torch else "multihead"), True
    if "context" in roles or len(required) == 2:
        return "cross", True
    if required:
        return "self", True
    signature = f"{d.name}({', '.join(one.name for one in d.call)})"
    raise Unclear(f"{signature} doesn't look like attention or positions. Give --like ({', '.join(KINDS)}).")


def parse_arguments(text: str) -> dict[str, Any]:
    """Return `hidden=16, num_heads=4` as a dict; Unclear for anything but names and plain values."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise Unclear(
        f"Expected names and plain values for --init, such as 'hidden=16, num_heads=4', got {text!r}."
    )


def fill_arguments(d: Description, given: Mapping[str, Any], same_width: bool = False) -> dict[str, Any]:
    """Return the given constructor arguments, and values of the table for those without a default.

    `same_width` gives all widths of the model one value, and a head its share of it.
    """
    arguments = [arg for arg in d.init or () if arg.is_named]
    known = {arg.name for arg in d.init or ()}
    takes_any = any(arg.kind == "var_keyword" for arg in d.init or ())
    for name in given:
        if name not in known and not takes_any:
            known_names = ", ".join(arg.name for arg in d.init or ()) or "none"
            raise Unclear(f"{d.name} has no constructor argument {name!r}, only {known_names}.")
    meanings = {arg.name: names.constructor_value(arg.name) for arg in arguments}
    if any(meaning and meaning[0] == MODEL_WIDTH for name, meaning in meanings.items() if name != "d"):
        meanings["d"] = names.constructor_value("d_k")  # beside another width it is a head's
    has_heads = any(meaning and meaning[0] == HEADS for meaning in meanings.values())
    filled = dict(given)
    for arg in arguments:
        if arg.name in given:
            continue
        what, value = meanings[arg.name] or ("", None)
        is_flag = arg.name in names.CONSTRUCTOR["causal"][1]
        replaces_default = what in names.GIVEN_ANYWAY and isinstance(arg.default, bool) == is_flag
        if what and (arg.required or replaces_default):
            if same_width and "width" in what:
                value = names.WIDTH // names.HEADS if has_heads and what == HEAD_WIDTH else names.WIDTH
            filled[arg.name] = value
        elif arg.required and arg.name in names.CONFIGURATION:
            filled[arg.name] = {"__namespace__": configuration()}
        elif arg.required:
            raise Unclear(
                f"{d.name} needs {arg.name!r}, a name that the table doesn't have. "
                f"Give it with --init '{arg.name}=...'."
            )
    return filled


def configuration() -> dict[str, Any]:
    """Return the attributes of a configuration object: every name of the table."""
    return {name: value for value, every in names.CONSTRUCTOR.values() for name in every}
