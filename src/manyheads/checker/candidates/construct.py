"""Find the kind of a candidate, and the constructor arguments to build it with."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from manyheads.checker.candidates import names
from manyheads.checker.candidates.documentation import read_documentation
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.candidates.roles import read_roles, required_sequences
from manyheads.checker.isolation.describe import Configuration, Description

KINDS = ("attention", "self", "cross", "multihead", "torch-mha", "sdpa", "hf", "positional", "rotary")
PROJECTED = ("self", "cross", "multihead", "torch-mha")  # kinds with weights
PYTORCH = {"attn_mask", "is_causal", "dropout_p", "enable_gqa"}  # arguments of PyTorch's function


def find_kind(
    kind: str | None, description: Description, chosen: Mapping[str, str], init: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return (kind, guessed): the kind that the user gave, or the kind that names and arguments suggest.

    `chosen` and `init` are the roles and the constructor arguments that the user gave.
    """
    if kind is not None:
        if kind not in KINDS:
            raise Unclear(f"Expected --like {', '.join(KINDS)} or classic.MODULE.CLASS, got {kind!r}.")
        return kind, False
    name = description.name.lower()
    read = read_roles(description, read_documentation(description), chosen, init)
    roles = {role for role, _ in read.values()} - {None}
    required = required_sequences(description, read)
    is_qkv = {"query", "key", "value"} <= roles
    is_attention = (
        "atten" in name or "attn" in name or (description.torch_module and "Linear(" in description.source)
    )
    if any(word in name for word in ("rotary", "rope", "rotate")) and not is_attention:
        return "rotary", True
    is_positional = any(word in name for word in ("position", "sinusoid", "encod")) and not is_attention
    if is_positional and not {"key", "value"} & roles:
        return "positional", True
    if "module" in roles and is_qkv:
        return "hf", True
    if is_qkv or (not description.torch_module and len(required) == 3):
        if not description.torch_module or not (description.parameters or description.init):
            is_named = any(word in name for word in ("sdpa", "scaled_dot"))
            is_torch = len(PYTORCH.intersection(read)) >= 2 or (is_named and {"causal", "mask"} <= roles)
            return ("sdpa" if is_torch else "attention"), True
        if description.type == "module" and not description.parameters:
            return "attention", True
        is_torch = {"mask-of-keys", "weights"} <= roles or "average-weights" in roles
        return ("torch-mha" if is_torch else "multihead"), True
    # With an optional context, it is self-attention, and checked with the context too.
    is_optional = len(required) == 1 and read[required[0]][0] != "context" and "cross" not in name
    if ("context" in roles and not is_optional) or len(required) == 2:
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
    description: Description, init: Mapping[str, Any], same_width: bool = False, heads: int | None = None
) -> dict[str, Any]:
    """Return the user's constructor arguments, with values from the table for required ones.

    Args:
        description: The class.
        init: The user's arguments.
        same_width: Whether all widths of the model are equal, and the width of a head is its share.
        heads: The number of heads that the user gave.

    Returns:
        The arguments by name.

    Raises:
        Unclear: If the class has no such argument, or requires one that the table doesn't contain.
    """
    known = [arg.name for arg in description.init or ()]
    unknown = [name for name in init if name not in known]
    if unknown and not any(arg.kind == "var_keyword" for arg in description.init or ()):
        listed = ", ".join(known) or "none"
        raise Unclear(
            f"Expected constructor arguments of {description.name} for --init ({listed}), got {unknown[0]!r}."
        )
    arguments = [arg for arg in description.init or () if arg.is_named]
    meanings = {arg.name: names.constructor_value(arg.name) for arg in arguments}
    if any(meaning == names.MODEL_WIDTH for name, (meaning, _) in meanings.items() if name != "d"):
        meanings["d"] = names.constructor_value("d_k")  # next to another width it is a head's
    has_heads = any(meaning == names.NUMBER_OF_HEADS for meaning, _ in meanings.values())
    filled = dict(init)
    for arg in arguments:
        given = init.get(arg.name, {})
        if arg.name in description.configurations and isinstance(given, Mapping):
            configuration = description.configurations[arg.name]
            filled[arg.name] = fill_configuration(arg.name, configuration, given, heads)
        if arg.name in filled:
            continue
        meaning, value = meanings[arg.name]
        is_flag = arg.name in names.CONSTRUCTOR["causal"][1]
        replaces_default = meaning in names.REPLACED and isinstance(arg.default, bool) == is_flag
        if meaning == names.NUMBER_OF_HEADS:
            # One head hides bugs of heads, and the width isn't divisible by every other default.
            is_unfit = type(arg.default) is int and (arg.default < 2 or names.WIDTH % arg.default > 0)
            value, replaces_default = heads or value, heads is not None or is_unfit
        elif same_width and "width" in meaning:
            value = names.WIDTH // names.HEADS if has_heads and meaning == names.HEAD_WIDTH else names.WIDTH
        elif is_flag and has_implementations(description):
            replaces_default = False
        if meaning and (arg.required or replaces_default):
            filled[arg.name] = value
        elif arg.required and arg.name in names.CONFIGURATION:
            attributes = {name: value for value, each in names.CONSTRUCTOR.values() for name in each}
            filled[arg.name] = {"__namespace__": attributes}
        elif arg.required and re.search(
            rf"(?:Linear|Conv[123]d)\(\s*(?:\w+=)?{arg.name}\b", description.source
        ):
            filled[arg.name] = names.WIDTH  # the inputs of a layer
        elif arg.required and names.WINDOW.fullmatch(arg.name) and "tuple" not in arg.annotation.lower():
            filled[arg.name] = names.WINDOW_SIZE
        elif arg.required:
            raise Unclear(
                f"{description.name} needs {arg.name!r}, a name that the table doesn't have. "
                f"Give it with --init '{arg.name}=...'."
            )
    return filled


# -- configurations, such as a `GPTConfig` or transformers' `LlamaConfig` -------------------------------


def fill_configuration(
    argument: str, configuration: Configuration, given: Mapping[str, Any], heads: int | None
) -> dict[str, Any]:
    """Return a configuration as a constructor argument.

    A default is replaced too, because it is usually the size of a large model.

    Args:
        argument: The name of the constructor's argument.
        configuration: The class.
        given: The user's values of its fields.
        heads: The number of heads, if the user gave it.

    Returns:
        The class and its values, as `isolation.candidate.to_argument` reads them.

    Raises:
        Unclear: If a required field isn't in the table.
    """
    values: dict[str, Any] = {}
    for field in configuration.fields:
        meaning, value = names.constructor_value(field.name)
        if meaning and (field.default is None or isinstance(field.default, bool) == isinstance(value, bool)):
            values[field.name] = heads if heads and meaning == names.NUMBER_OF_HEADS else value
        elif field.required and field.name not in given:
            raise Unclear(
                f"{configuration.name} needs {field.name!r}, a name that the table doesn't have. Give it "
                f"with --init '{argument}={{\"{field.name}\": ...}}'."
            )
    return {"__configuration__": configuration.name, "values": values | dict(given)}


def has_implementations(description: Description) -> bool:
    """Return True if a configuration chooses an attention function by name, as those of transformers do.

    An `is_causal` of such a class then tells a kernel that it may replace a causal mask; it masks nothing.
    """
    fields = [field.name for each in description.configurations.values() for field in each.fields]
    return "_attn_implementation" in fields


def show_argument(value: Any) -> str:
    """Return a constructor argument as text."""
    if isinstance(value, dict) and "__configuration__" in value:
        values = ", ".join(f"{name}={each!r}" for name, each in value["values"].items())
        return f"{value['__configuration__']}({values})"
    return "Namespace(...)" if isinstance(value, dict) and "__namespace__" in value else repr(value)
