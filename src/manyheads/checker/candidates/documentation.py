"""What a candidate's documentation and code say about its masks, layout and weights."""

from __future__ import annotations

import ast
import re
import textwrap

from manyheads.checker.candidates import names
from manyheads.checker.isolation.describe import Argument, Description

# Matches text that says that True masks a key.
TRUE_MASKS = re.compile(
    r"(?:true|1|ones?|nonzero)\b[^.;\n]{0,24}\b(?:hid|hides|hidden|mask(?:ed|s)? out|masked|ignor|not "
    r"attend|pad|blocked|exclud|cannot|can't|disallow)|"
    r"(?:false|0|zeros?)\b[^.;\n]{0,24}\b(?:keep|kept|keeps|visible|attend|allowed|real|valid)",
    re.I,
)
# Matches text that says that True keeps a key visible.
TRUE_KEEPS = re.compile(
    r"(?:true|1|ones?|nonzero)\b[^.;\n]{0,28}\b(?:keep|kept|keeps|may attend|attend|allowed|visible|real|"
    r"valid|a token|tokens|see)|"
    r"(?:false|0|zeros?)\b[^.;\n]{0,24}\b(?:hid|hides|hidden|mask|ignor|pad|blocked|exclud)",
    re.I,
)
LETTERS = {  # the letters of shapes, by the names of axes in documentation
    **dict.fromkeys(("b", "n", "batch", "batch_size", "bs"), "b"),
    **dict.fromkeys(("t", "q", "l", "tgt_len", "query_len", "length", "seq_len"), "t"),
    **dict.fromkeys(("s", "k", "src_len", "key_len"), "s"),
    "1": "1",
}


def read_documentation(description: Description) -> str:
    """Return the docstrings of the class, its methods and its file, without links."""
    nodes = ast.walk(parse(description.source))
    documented = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    docstrings = [ast.get_docstring(node) or "" for node in documented]
    texts = [description.doc, description.module_doc, *docstrings]
    return re.sub(r"\]\(\S+\)|\w+://\S+", "", "\n".join(texts))


def parse(source: str) -> ast.AST:
    """Return the syntax tree of Python code; if it can't be parsed, an empty tree."""
    try:
        return ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def lines_about(name: str, text: str) -> str:
    """Return the lines of a text that mention an argument, joined by spaces."""
    return " ".join(line for line in text.splitlines() if re.search(rf"\b{re.escape(name)}\b", line))


# -- masks -----------------------------------------------------------------------------------------


def is_mask(arg: Argument, text: str) -> bool:
    """Return True if the name or the documentation of an argument says that it is a mask or enables one."""
    role = names.argument_role(arg.name) or names.guess_mask_role(arg.name)
    if role is not None or isinstance(arg.default, bool):
        return role in ("mask", "padding", "lengths", "causal")
    name, lines = re.escape(arg.name), lines_about(arg.name, text)
    shape, words = r"(?:[\[(][^\])]*[\])]\W*)?", r"(?:(?!before|after)\w+ ){0,3}"
    is_called_mask = re.search(rf"\b{name}\b\W{{1,3}}{shape}{words}mask\b", text, re.I)
    says_true = re.search(rf"\b{name}\b[^.;]{{0,24}}\bTrue\b", lines)
    return bool(is_called_mask or (says_true and (TRUE_MASKS.search(lines) or TRUE_KEEPS.search(lines))))


def documented_polarity(name: str, text: str) -> bool | None:
    """Return True if documentation says that True means visible, False if masked, None if unclear."""
    lines = lines_about(name, text)
    masks, keeps = bool(TRUE_MASKS.search(lines)), bool(TRUE_KEEPS.search(lines))
    return keeps if masks != keeps else None


def mask_polarity(name: str, role: str, kind: str, text: str) -> tuple[bool, str]:
    """Return whether True keeps a key, and why: the documentation, the mask's name, or a convention."""
    documented = documented_polarity(name, text)
    if documented is not None:
        return documented, "as its documentation says"
    if kind == "torch-mha":
        return False, "as in PyTorch's layer"
    if role == "padding" and kind != "sdpa":
        return "pad" not in name, "as usual for this name"
    if "hidden" in name or "ignore" in name:
        return False, "as its name says"
    return True, "as in PyTorch's function and most code"


def is_additive(name: str, text: str) -> bool:
    """Return True if documentation says that a mask is added to the scores."""
    word = re.escape(name)
    pattern = rf"\b{word}\b[^.]{{0,60}}\b(?:added|additive)\b|\badditive {word}\b"
    return bool(re.search(pattern, lines_about(name, text), re.I))


def documented_shapes(name: str, text: str) -> set[str]:
    """Return the shapes of a mask in letters: {"bs", "bts"} for `mask [b, s] or [b, t, s]`."""
    shapes = set()
    for following in re.findall(rf"^.*?\b{re.escape(name)}\b([^;\n]*)", text, re.M):
        for inside in re.findall(r"[\[(]([\w, ]+)[\])]", following):
            axes = [axis.strip().lower() for axis in inside.split(",")]
            if len(axes) > 1 and all(axis in LETTERS for axis in axes):
                # In self-attention, [t, t] means [queries, keys].
                shapes.add(re.sub("tt$", "ts", "".join(LETTERS[axis] for axis in axes)))
    return shapes


# -- weights, layout, causality --------------------------------------------------------------------


def says_averaged(text: str) -> bool:
    """Return True if documentation says that the returned weights are averaged over the heads."""
    over = r"(?:over|of|across) (?:all |the |its )*heads"
    pattern = rf"(?<!not )\baveraged?(?: attention)?(?: weights)? {over}|\bmean {over}|\bheads?[- ]averaged"
    text = re.sub(r"\s+", " ", text)
    is_each_head = re.search(r"\b(?:each|every|per)[- ]head\b", text, re.I)
    return bool(re.search(pattern, text, re.I)) and not is_each_head


def documented_layout(description: Description, text: str) -> str | None:
    """Return "batch" or "sequence", the first axis as documented or as code unpacks shapes, or None."""
    batch, tokens = r"(?:b|n|batch\w*|bsz|bs)", r"(?:t|l|s|seq\w*|tgt\w*|length|len|tokens|n_tokens)"
    for layout, first, second in (("sequence", tokens, batch), ("batch", batch, tokens)):
        if re.search(rf"[\[(]\s*{first}\s*,\s*{second}\s*,\s*[\w ]+[\])]", text, re.I):
            return layout
    if re.search(r"batch_first\s*=\s*True|batch[- ]first", text, re.I):
        return "batch"
    first, second = r"\b(?:seq\w*|t|T|L|tgt_len|length|n_tokens)", r"(?:b|B|N|batch\w*|bsz|bs)\b"
    unpacking = first + r"\s*,\s*" + second + r"[^=\n]*=\s*\w+\.(?:shape|size)"
    return "sequence" if re.search(unpacking, description.source) else None


def causal_reason(description: Description, text: str) -> str | None:
    """Return why a candidate without a causal argument is considered causal, or None.

    Documentation counts only if the candidate takes no mask, because it may mention masks that callers pass.
    """
    if re.search(r"causal|masked_?(self|multi|attention)|autoregress|decoder", description.name, re.I):
        return "its name"
    for name in description.buffers:
        if re.search(r"tril|causal|triangle|(^|\.)(bias|mask|attn_mask)$", name):
            return f"its buffer {name}"
    roles = {names.argument_role(arg.name) for arg in description.call}
    if not {"mask", "padding"} & roles:
        mentions = r"(?<!not )(?<!non-)\bcausal|autoregressive|can't see the future|no look-?ahead"
        if re.search(mentions, text, re.I):
            return "its documentation"
        if "past" in roles:
            return "its cache of earlier keys"
    return "the triangle in its code" if makes_triangle(parse(description.source)) else None


def makes_triangle(node: ast.AST) -> bool:
    """Return True if code calls tril or triu outside of an `if`."""
    if isinstance(node, ast.If | ast.IfExp):
        return False
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in ("tril", "triu", "tril_", "triu_", "tril_indices", "triu_indices"):
            return True
    return any(map(makes_triangle, ast.iter_child_nodes(node)))
