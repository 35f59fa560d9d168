"""Find the kind of a candidate, and the constructor arguments to build it with."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from manyheads.checker.candidates import names
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.isolation.describe import Description

KINDS = ("attention", "self", "cross", "multihead", "torch-mha", "sdpa", "hf", "positional", "rotary")
PROJECTED = ("self", "cross", "multihead", "torch-mha")  # kinds with weights
# Meanings of constructor arguments, as in `names.CONSTRUCTOR`.
MODEL_WIDTH, HEAD_WIDTH = "the model width", "the width of a head"
HEADS, KEY_HEADS = "the number of heads", "the number of key heads"


def find_kind(kind: str | None, description: Description) -> tuple[str, bool]:
    """Return (kind, guessed): the kind that the user gave, or the kind that names and arguments suggest."""
    if kind is not None:
        if kind not in KINDS:
            raise Unclear(f"Expected --like {', '.join(KINDS)} or classic.MODULE.CLASS, got {kind!r}.")
        return kind, False
    name = description.name.lower()
    arguments = [arg for arg in description.call if arg.is_named]
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
    if is_qkv or (not description.torch_module and len(required) == 3):
        if not description.torch_module or not (description.parameters or description.init):
            return ("sdpa" if len({"dropout", "causal", "mask"} & roles) >= 2 else "attention"), True
        if description.type == "module" and not description.parameters:
            return "attention", True
        is_torch = {"padding", "weights"} <= roles or "average" in roles
        return ("torch-mha" if is_torch else "multihead"), True
    if "context" in roles or len(required) == 2:
        return "cross", True
    if required:
        return "self", True
    signature = f"{description.name}({', '.join(arg.name for arg in description.call)})"
    raise Unclear(f"{signature} doesn't look like attention or positions. Give --like ({', '.join(KINDS)}).")


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the constructor arguments in a text.

    Args:
        text: Names and plain values, such as "hidden=16, num_heads=4".

    Returns:
        The values by name.

    Raises:
        Unclear: If the text has another form.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise Unclear(
        f"Expected names and plain values for --init, such as 'hidden=16, num_heads=4', got {text!r}."
    )


def fill_arguments(
    description: Description, init: Mapping[str, Any], same_width: bool = False
) -> dict[str, Any]:
    """Return the user's constructor arguments, with values from the table for required ones.

    Args:
        description: The class.
        init: The user's arguments.
        same_width: Whether all widths of the model are equal, and the width of a head is its share.

    Returns:
        The arguments by name.

    Raises:
        Unclear: If the class has no such argument, or requires one that the table doesn't contain.
    """
    known = [arg.name for arg in description.init or ()]
    unknown = [name for name in init if name not in known]
    if unknown and not any(arg.kind == "var_keyword" for arg in description.init or ()):
        listed = ", ".join(known) or "none"
        raise Unclear(f"{description.name} has no constructor argument {unknown[0]!r}, only {listed}.")
    arguments = [arg for arg in description.init or () if arg.is_named]
    meanings = {arg.name: names.constructor_value(arg.name) for arg in arguments}
    if any(meaning == MODEL_WIDTH for name, (meaning, _) in meanings.items() if name != "d"):
        meanings["d"] = names.constructor_value("d_k")  # next to another width it is a head's
    has_heads = any(meaning == HEADS for meaning, _ in meanings.values())
    filled = dict(init)
    for arg in arguments:
        if arg.name in init:
            continue
        meaning, value = meanings[arg.name]
        is_flag = arg.name in names.CONSTRUCTOR["causal"][1]
        replaces_default = meaning in names.REPLACED and isinstance(arg.default, bool) == is_flag
        if meaning and (arg.required or replaces_default):
            if same_width and "width" in meaning:
                value = names.WIDTH // names.HEADS if has_heads and meaning == HEAD_WIDTH else names.WIDTH
            filled[arg.name] = value
        elif arg.required and arg.name in names.CONFIGURATION:
            attributes = {name: value for value, each in names.CONSTRUCTOR.values() for name in each}
            filled[arg.name] = {"__namespace__": attributes}
        elif arg.required:
            raise Unclear(
                f"{description.name} needs {arg.name!r}, a name that the table doesn't have. "
                f"Give it with --init '{arg.name}=...'."
            )
    return filled
