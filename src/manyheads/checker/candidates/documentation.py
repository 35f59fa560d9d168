"""What a candidate's documentation and code say about its masks, layout and weights."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from manyheads.checker.candidates import names
from manyheads.checker.isolation.describe import Description

# Match an entry of a mask, and words that say what it does, perhaps after a negation.
ENTRY = re.compile(r"\b(?:(?P<true>true|1|ones?|nonzero)|false|0|zeros?)\b(?!-)", re.I)
MASKED = (
    r"hid(?:e|es|den)|invisible|masked|masks|masking|(?<!the )(?<!this )(?<!in )(?<!a )(?<!attention )mask|"
    r"ignor\w+|pad\w*|block\w*|exclud\w+|cannot|disallow\w*|prohibit\w*|forbid\w*|drop\w*|filled|remove\w*|"
    r"discard\w*|disregard\w*"
)
VISIBLE = (
    r"keep|keeps|kept|attend\w*|allow\w*|visible|unmasked|real|valid|sees?|seen|takes? part|includ\w+|"
    r"participat\w+|present|looks?|looked"
)
EFFECT = re.compile(
    rf"(?:(?P<negated>\bnot|n't|\bnever|\bnon|\bno)\b[^,]{{0,12}}?)?\b(?:(?P<masked>{MASKED})|{VISIBLE})\b",
    re.I,
)
# Matches "token" in "True = token"; in "True for tokens that are masked" it doesn't decide.
TOKEN = re.compile(r"\btokens?\b", re.I)
# Matches another argument's value, as in "with is_decoder=True, the causal mask is part of mask".
SWITCH = re.compile(rf"\b(?!(?:{MASKED}|{VISIBLE}|\w*mask)\b)[a-z_]\w*=(?:True|False)\b", re.I)
SIZE = r"[\w.+*/-]+(?: ?(?:or|\+|\*|-) ?\w+)?"
# Matches a shape such as "(batch, 1, keys)", whose 1 says nothing about the entries of a mask.
SHAPE = re.compile(rf"[\[(] ?{SIZE}(?:, ?{SIZE})+,? ?[\])]|[\[(]\w[\])]|\b\w+(?: x \w+)+\b")
LETTERS = {  # the letters of shapes, by the names of axes in documentation
    **dict.fromkeys(("b", "n", "batch", "batch_size", "bs", "bsz", "batch_sz", "nbatches"), "b"),
    **dict.fromkeys(("t", "q", "l", "tgt_len", "query_len", "length", "seq_len"), "t"),
    **dict.fromkeys(("query_length", "q_len", "queries", "tokens", "seq", "sequence_length", "n_ctx"), "t"),
    **dict.fromkeys(("seq_q", "len_q", "n_q", "tq", "t_q", "lq", "l_q", "target_length"), "t"),
    **dict.fromkeys(("s", "k", "src_len", "key_len", "key_length", "kv_len", "keys"), "s"),
    **dict.fromkeys(("seq_k", "len_k", "n_k", "tk", "t_k", "lk", "l_k", "seq_kv", "source_length"), "s"),
    **dict.fromkeys(("h", "heads", "num_heads", "n_heads", "n_head", "nhead", "nheads", "num_head"), "h"),
    "b*h": "n",  # one axis of batch entries times heads
    "h*b": "m",
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
    """Return what a text says about an argument, joined by spaces: the parts of lines that mention it.

    A part ends where a sentence about another argument begins, as in "mask [b, s]: … pad_mask [b, s]: …",
    or "`mask` is [t, s], `pad_mask` is [b, s]".
    Lines that are indented below "mask: …" belong to it.
    """
    begins = (
        r"(?<=[.;])\s+(?!(?:True|False|Shape|Default)\b)(?=[a-z_]\w*(?:\s*[\[(:=]|\s+is\b))|"
        r"(?<=[.;,])\s+(?=``?[a-z_]\w*``?\s*(?:[\[(:=]|is\b))"
    )
    parts, indent = [], None
    # A line without a stop goes on in the next one, if that is a sentence.
    for line in re.sub(r"(?<=[a-z,])\n[ \t]*(?=(?:[a-z]+|[01]) [a-z]+\b)", " ", text).splitlines():
        depth = len(line) - len(line.lstrip())
        indent = None if indent is not None and depth <= indent else indent
        found = [part for part in re.split(begins, line) if re.search(rf"\b{re.escape(name)}\b", part)]
        parts += found or [line] * (indent is not None)
        if re.match(rf"\s*{re.escape(name)}\b\W", line):
            indent = depth
    return " ".join(parts)


# -- masks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskDocumentation:
    """What documentation says of a mask.

    Attributes:
        polarity: True if True means visible, False if masked, None if unclear.
        shapes: Its shapes in letters: {"bs", "bts"} for `mask [b, s] or [b, t, s]`.
        is_boolean: Whether it may be boolean.
        is_additive: Whether it is added, and may not be boolean.
        is_of_floats: Whether it may have floats, which are added to the scores.
        has_queries: Whether it is documented as [b, t] where another shape has keys, [b, s].
    """

    polarity: bool | None
    shapes: set[str]
    is_boolean: bool
    is_additive: bool
    is_of_floats: bool
    has_queries: bool


def read_mask(name: str, text: str) -> MaskDocumentation:
    """Return what documentation says of a mask, of an empty name nothing."""
    lines = SWITCH.sub(" ", lines_about(name, text)) if name else ""
    polarity, is_boolean = read_polarity(lines), re.search(r"\bbool", lines, re.I) is not None
    is_of_floats = re.search(r"\bfloat\w*\b[^.;]*\badded\b|\badded\b[^.;]*\bfloat", lines, re.I)
    return MaskDocumentation(
        polarity,
        read_shapes(name, lines, text),
        is_boolean,
        not is_boolean and is_added(name, lines, polarity),
        is_of_floats is not None,
        has_queries(lines, text),
    )


def is_called_mask(name: str, text: str) -> bool:
    """Return True if documentation says that an argument is a mask."""
    lines, word = lines_about(name, text), re.escape(name)
    shape, words = r"(?:[\[(][^\])]*[\])][^\w\n]*)?", r"(?:(?!before|after)\w+ ){0,3}"
    is_called_mask = re.search(rf"\b{word}\b[^\w\n]{{1,3}}{shape}{words}mask\b", text, re.I)
    says_true = re.search(rf"\b{word}\b[^.;]{{0,24}}\bTrue\b", lines)
    return bool(is_called_mask or (says_true and read_polarity(lines) is not None))


def read_polarity(lines: str) -> bool | None:
    """Return True if documentation says that True means visible, False if masked, None if unclear."""
    found = set()
    for sentence in re.split(r"[.;]\s|[.;]$|\n", SHAPE.sub(" ", lines)):
        entries = [*ENTRY.finditer(sentence)]
        starts, ends = [0, *(entry.end() for entry in entries)], [entry.start() for entry in entries[1:]]
        for entry, start, end in zip(entries, starts, [*ends, len(sentence)], strict=False):
            before, after = sentence[start : entry.start()], sentence[entry.end() : end][:45]
            effect = EFFECT.search(after)
            if effect is None and re.search(r"\b(?:is|are|be|being|with|as|(?<!able )to)\W*$|=\W*$", before):
                effect = [None, *EFFECT.finditer(before[-40:])][-1]
            if effect is not None:
                keeps = (effect["masked"] is None) != (effect["negated"] is not None)
                found.add(keeps == (entry["true"] is not None))
            elif TOKEN.search(after):
                found.add(entry["true"] is not None)
    return found.pop() if len(found) == 1 else None


def mask_polarity(name: str, role: str, kind: str, text: str) -> tuple[bool, str, bool]:
    """Return whether True keeps a key, why, and whether that is certain.

    The reason is an option, the documentation, the kind, the mask's name, or else what most code does.
    """
    if role.startswith(("keep", "drop")):
        return role.startswith("keep"), "as --arg says", True
    documented = read_mask(name, text).polarity
    if documented is not None:
        return documented, "as its documentation says", True
    if kind == "torch-mha":
        return False, "as in PyTorch's layer", True
    if role == "mask-of-keys" and kind != "sdpa":
        return "pad" not in name, "as usual for this name", "key_padding" in name
    if "hidden" in name or "ignore" in name:
        return False, "as its name says", True
    return True, "as in PyTorch's function and most code", kind == "sdpa"


def is_added(name: str, lines: str, polarity: bool | None) -> bool:
    """Return True if documentation says that a mask is added to the scores."""
    word, infinity = re.escape(name), r"(?:-\s?(?:inf|∞|1e\d|100(?:00)?\b)|negative infinity|finfo|"
    infinity += (
        r"(?:the )?(?:lowest|smallest|most negative) (?:number|value|float)|(?:large|very|big|huge) negative)"
    )
    if re.search(rf"\b{word}\b[^.]{{0,60}}\badditive\b|\badditive {word}\b", lines, re.I):
        return True
    if not re.search(infinity, lines) and polarity is not None:
        return False
    pattern = (
        rf"\b{word}\b[^.]{{0,60}}\badded\b|"
        rf"\b{word}\b[^.;]*\badded to (?:the |its )?(?:\w+ )?(?:scores|logits|weights)\b|"
        rf"\b{word}\b.{{0,60}}\b0(?:\.0?)?\b[^;\n]{{0,40}}{infinity}"
    )
    return bool(re.search(pattern, lines, re.I))


def read_shapes(name: str, lines: str, text: str) -> set[str]:
    """Return the shapes of a mask in letters, without those of groups of tokens, such as K of 3 * K."""
    shapes = set()
    for following in re.findall(rf"\b{re.escape(name)}\b([^;]*)", lines):
        for before, inside in re.findall(r"(\w*)\W*[\[(]([\w, >=≥*·×]+)[\])]", following):
            axes = [axis.strip(" >=≥").lower().replace(" ", "_") for axis in inside.split(",")]
            last = inside.rpartition(",")[2].strip()
            if len(axes) == 2 and axes[0] == axes[1] and not axes[0].isdigit():  # [n_ctx, n_ctx]
                shapes.add("ts")
                continue
            axes = [read_axis(axis) for axis in axes]
            is_of_scores = re.fullmatch(r"to|scores|logits|weights|probabilities|attention", before, re.I)
            if is_of_scores and any(LETTERS.get(axis) == "h" for axis in axes):
                continue
            is_of_groups = re.search(rf"\b[2-9] ?\*? ?{re.escape(last)}\b", text)
            if len(axes) > 1 and all(axis in LETTERS for axis in axes) and not is_of_groups:
                shape = "".join(LETTERS[axis] for axis in axes)
                if shape[0] == "b" and axes[-1] == "n":  # [b, n] are tokens
                    shape = "b" + shape[1:].replace("b", "t")
                # The last axis is that of the keys: [t, t] means [queries, keys].
                shapes.add(re.sub("t(?=b?$)", "s", shape))
    return shapes


def read_axis(axis: str) -> str:
    """Return an axis's name, with letters if it is a product, such as that of batch entries and heads."""
    factors = re.split(r"_?[*·×]_?", axis)
    return axis if len(factors) < 2 else "*".join(LETTERS.get(factor, factor) for factor in factors)


def code_dimensions(name: str, source: str) -> set[int]:
    """Return the numbers of dimensions of an argument that code tells apart, as in `mask.dim() == 3`."""
    word = re.escape(name)
    dims = rf"(?:\b{word}\.(?:dim\(\)|ndim|ndimension\(\))|\blen\({word}\.(?:shape|size\(\))\))"
    listed = re.findall(rf"{dims} *(?:==|in) *([(\[{{]?[\d, ]+[)\]}}]?)", source)
    return {int(number) for each in listed for number in re.findall(r"\d", each)}


def has_queries(lines: str, text: str) -> bool:
    """Return True if a mask is documented as [b, t] where another shape has keys, [b, s]."""
    last = {letter: "|".join(axis for axis in LETTERS if LETTERS[axis] == letter) for letter in "ts"}
    queries, keys = (rf"[\[(]\s*(?:b|n|batch\w*)\s*,\s*(?:{last[letter]})\s*[\])]" for letter in "ts")
    return bool(re.search(queries, lines, re.I) and re.search(keys, text, re.I))


def says_vectors(name: str, text: str) -> bool:
    """Return True if documentation says that an argument has a vector for each token."""
    # Not those of another argument: "without pos, x [b, t, e] is a whole sequence".
    words = r"(?:(?:an?|the|is|of|shape|floats?|tensor|optional|with|has|vectors?|embeddings?) ){0,5}"
    shape = rf"\b{re.escape(name)}\b(?:=None)?[`: ]*{words}`*[\[(][\w* ]+,[\w* ]+,[\w* ]+[\])]"
    noun = (
        rf"\b{re.escape(name)}\b\W{{1,4}}(?:(?!of|for|in|to)\w+[ -]){{0,3}}(?:embedding|vector|encoding)s?\b"
    )
    return bool(re.search(shape, text) or re.search(noun, text, re.I))


def says_numbers(name: str, text: str) -> bool:
    """Return True if documentation says that an argument has at most one number for each token."""
    shape = rf"\b{re.escape(name)}\b(?:=None)?[`: ]*(?:\w+ ){{0,3}}`*[\[(][\w* ]+(?:,[\w* ]+)?,?[\])]"
    return re.search(shape, text) is not None


def adds_to_tokens(name: str, sequences: Iterable[str], source: str) -> bool:
    """Return True if code adds an argument to one of the sequences, before they are projected."""
    tokens = "|".join(map(re.escape, sequences)) or "$^"
    sums = rf"\b(?:{tokens}) \+ {name}\b(?!\.)|\b{name} \+ (?:{tokens})\b(?!\.)"
    helper = rf"(?<!def )\bwith_pos(?:_?embed\w*)?\([^,()]*(?:\([^()]*\))?, *{name}\)"  # as in DETR
    return re.search(rf"{sums}|{helper}", source) is not None


def precedes_tokens(name: str, sequences: Iterable[str], source: str) -> bool:
    """Return True if code puts an argument before one of the sequences: `cat((mem, x), 1)`."""
    tokens = "|".join(map(re.escape, sequences)) or "$^"
    return re.search(rf"\bcat\([\[(]{name}, (?:{tokens})[\])]", source) is not None


def says_one_role(name: str, text: str) -> str:
    """Return "q" or "k" if documentation says that an argument is for queries or for keys only, or ""."""
    only = r"\b(quer|key)(?:y|ies|s)? (?:only|alone)\b|\bonly (?:added )?(?:to |for )?(?:the )?(quer|key)"
    found = re.search(only, lines_about(name, text), re.I)
    return "" if found is None else "q" if "quer" in found[0].lower() else "k"


def counts_from_start(kind: str, text: str) -> bool:
    """Return True if the first query and key are aligned in a causal mask, as documented or in PyTorch."""
    first = re.search(r"first (?:query|token)\b[^.;]*\bfirst key|top[- ]left|upper[- ]left", text, re.I)
    last = re.search(r"last (?:query|token)\b[^.;]*\blast key|bottom[- ]right|lower[- ]right", text, re.I)
    return bool(first) if bool(first) != bool(last) else kind == "sdpa"


# -- other mechanisms ------------------------------------------------------------------------------

NOT_SOFTMAX = (
    r"linear(?:i[sz]ed)? (?:(?:causal|self|cross|multi-?head)\W)*attention|efficient attention|sparsemax|"
    r"kernel(?:i[sz]ed)? attention|(?:elu|kernel|positive|random|phi|φ)\W+features?|softmax1|softmax[- ]one|"
    r"performer|favor\+|linformer|nystr\w+ ?former|nystr\w+ attention|retnet|retentive \w+|"
    r"(?:multi-scale )?retention|fnet|fourier mixing|hyena|state[- ]space|(?:no|without(?: an?)?) softmax|"
    r"entmax|softmax[- ]free|(?:sigmoid|relu|squared relu|lsh|bahdanau|talking[- ]heads|top-?k) attention"
)
MECHANISM = re.compile(rf"(?<!unlike )(?<!than )(?<!not )(?<! of )\b(?P<name>{NOT_SOFTMAX})", re.I)


def documented_mechanism(description: Description, text: str) -> str:
    """Return the words with which a name or documentation says that it isn't softmax attention, or ""."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", description.name)
    found = MECHANISM.search(f"{name}. {text}")
    return re.sub(r"\s+", " ", found["name"]) if found else ""


# -- weights, layout, causality --------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, each in one line."""
    return re.split(r"[.;]", re.sub(r"\s+", " ", text))


def says(text: str, *patterns: str) -> bool:
    """Return True if all patterns match in one sentence of a text."""
    return any(all(re.search(each, sentence, re.I) for each in patterns) for sentence in sentences(text))


def says_unused(name: str, text: str) -> bool:
    """Return True if documentation says that an argument has no effect on the output."""
    no_effect = (
        r"\b(?:unused|ignored|no effect|deprecated|for compatibility|placeholder)\b|"
        r"\b(?:not|isn't|aren't|never) used\b|\b(?:doesn't|does not|don't|never) (?:change|affect)"
    )
    return bool(name) and says(lines_about(name, text), no_effect)


def is_read(name: str, source: str) -> bool:
    """Return True if code reads a name other than by `_ = name`; also if there is no code to read."""
    nodes = [*ast.walk(parse(source))]
    taken = any(isinstance(node, ast.arg) and node.arg == name for node in nodes)
    loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    dropped = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node) == f"_ = {name}"]
    return not taken or sum(node.id == name for node in loads) > len(dropped)


def is_always_called(layer: str, source: str) -> bool:
    """Return True if `forward` calls a layer without a condition, and can't return before."""

    def is_call(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{layer}"

    def is_conditional(node: ast.AST) -> bool:
        return isinstance(node, ast.If | ast.IfExp | ast.Try) and any(
            is_call(each) or isinstance(each, ast.Return) for each in ast.walk(node)
        )

    functions = (node for node in ast.walk(parse(source)) if isinstance(node, ast.FunctionDef))
    steps = [[*ast.walk(node)] for node in functions if node.name == "forward"]
    return any(any(map(is_call, nodes)) and not any(map(is_conditional, nodes)) for nodes in steps)


def says_averaged(text: str) -> bool:
    """Return True if documentation says that the returned weights are averaged over the heads."""
    over = r"(?:over|of|across) (?:all |the |its )*heads"
    averaged = rf"(?<!not )\baveraged?(?: attention)?(?: weights)? {over}|\bmean {over}|\bheads?[- ]averaged"
    return says(text, averaged) and not says(text, r"\b(?:each|every|per)[- ]head\b")


def says_scores(text: str) -> bool:
    """Return True if documentation says that scores are returned beside the output, and not weights."""
    return says(text, r"\breturn.*\b(?:scores|logits)\b") and not says(text, r"\breturn.*weights")


def says_masks_dropped(text: str) -> bool:
    """Return True if documentation says that masks are ignored if weights are, or aren't, requested."""
    return says(
        text, r"\bmasks?\b", r"\b(?:ignore[sd]?|drop(?:s|ped)?|not (?:applied|used))\b", r"\bweights\b"
    )


def says_mask_replaces(text: str) -> bool:
    """Return True if documentation says that a mask that is given replaces the causal mask."""
    without = (
        r"\b(?:no|without an?) mask\b|\bmask (?:is|was)(?: not|n't) \w+|\bmask is None\b|\bmask replaces\b|"
        r"\bNone (?:means|is|gives|for)\b|\bwithout (?:it|one)\b|\bdefault(?:s to|:| is|,)?(?: an?)? causal|"
        r"\bwhole mask\b|\bcausal (?:part|mask) (?:is )?included\b|\bincludes? the causal\b"
    )
    return says(text, without, r"\bcausal")


def says_without_context(name: str, context: str, text: str) -> bool:
    """Return True if documentation says that a mask isn't used with a context."""
    lines, other = lines_about(name, text), rf"\b(?:cross|{re.escape(context)})\b"
    no = r"\b(?:none|not|isn't|never|ignored|unused)\b"
    is_excluded = says(lines, rf"{no}.{{0,30}}{other}|{other}.{{0,30}}{no}")
    is_of_self = r"\b(?:used|applied|only)\b[\w ]{0,12}\bself[- ]attention\b"
    return is_excluded or (says(lines, is_of_self) and not re.search(other, lines, re.I))


def says_with_context(name: str, context: str, text: str) -> bool:
    """Return True if documentation of a mask or a flag speaks of the context, or of attention to it."""
    other = re.escape(context)
    signature = rf"\b{other}(?: ?: ?[\w\[\]. |]+)? ?= ?None"
    lines = re.sub(signature, "", lines_about(name, text))
    return re.search(rf"\b(?:cross|{other})\b", lines, re.I) is not None


def is_dropped_with_context(name: str, context: str, source: str, text: str) -> bool:
    """Return True if code uses a mask only without a context, and documentation mentions both nowhere."""
    mask, other = re.escape(name), re.escape(context)
    patterns = (
        rf"\b{mask} if {other} is None else None\b",
        rf"\bNone if {other} is not None else {mask}\b",
        rf"\b{mask} is not None and {other} is None\b",
        rf"\b{other} is None and {mask} is not None\b",
    )
    is_dropped = any(re.search(pattern, source) for pattern in patterns)
    return is_dropped and not re.search(rf"\b{other}\b", lines_about(name, text))


def is_for_inference(source: str, text: str) -> bool:
    """Return True if code or documentation says that no gradients are meant."""
    is_decorated = re.search(r"@torch\.(?:no_grad|inference_mode)", source)
    return bool(is_decorated) or says(text, r"\binference[- ]only\b|\bfor inference\b")


def has_default(source: str, name: str) -> bool:
    """Return True if code gives an argument that is None a value: `if mask is None: mask = …`."""
    return any(
        re.search(rf"\b{name} is None", ast.unparse(node.test)) is not None
        and any(
            isinstance(each, ast.Assign) and name in map(ast.unparse, each.targets)
            for part in node.body
            for each in ast.walk(part)
        )
        for node in ast.walk(parse(source))
        if isinstance(node, ast.If)
    )


def is_causal_without(source: str, name: str) -> bool:
    """Return True if code is causal only without a mask, such as `is_causal=mask is None`."""
    if re.search(rf"is_causal\s*=[^,\n]*\b{name} is None", source):
        return True
    for node in ast.walk(parse(source)):
        test = (
            re.fullmatch(rf"{name} is (not )?None", ast.unparse(node.test))
            if isinstance(node, ast.If)
            else None
        )
        if isinstance(node, ast.If) and test is not None:
            branches = [node.orelse, node.body] if test[1] else [node.body, node.orelse]
            without, given = ("\n".join(map(ast.unparse, branch)) for branch in branches)
            if re.search(r"tril|triu|causal|future", without) and re.search(rf"\b{name}\b", given):
                return True
    return False


def is_sine_first(name: str, text: str, source: str) -> bool:
    """Return True if a tuple of cosines and sines begins with sines, as documentation or else code says."""
    order = re.search(
        r"\b(sin|cos)\w*\s*,\s*(?:sin|cos)", f"{lines_about(name, text) if name else ''} {source}"
    )
    return order is not None and order[1] == "sin"


def documented_layout(description: Description, text: str) -> str | None:
    """Return "batch" or "sequence", the first axis as documented or as code unpacks shapes, or None."""
    batch, tokens = r"(?:b|n|batch\w*|bsz|bs)", r"(?:t|l|s|seq\w*|tgt\w*|length|len|time|tokens|n_tokens)"
    keys = r"s|m|src\w*|key\w*|kv\w*|k|length|tokens"
    for layout, first, second in (("sequence", tokens, batch), ("batch", batch, tokens)):
        inputs = rf"[\[(]\s*{first}\s*,\s*{second}\s*,(?!\s*(?:{keys})\b)[\w ]+[\])]"  # not weights [b, t, s]
        if re.search(rf"{inputs}|\b{first} x {second} x \w+", text, re.I):
            return layout
    if re.search(r"batch_first\s*=\s*True|batch[- ]first", text, re.I):
        return "batch"
    first, second = r"\b(?:seq\w*|t|T|L|tgt_len|length|n_tokens)", r"(?:b|B|N|batch\w*|bsz|bs)\b"
    unpacking = first + r"\s*,\s*" + second + r"[^=\n]*=\s*\w+\.(?:shape|size)"
    return "sequence" if re.search(unpacking, description.source) else None


def causal_reason(description: Description, text: str, kind: str) -> str | None:
    """Return why a candidate without a causal argument is considered causal, or None.

    Documentation counts only if the candidate takes no mask, because it may mention masks that callers pass.
    A decoder's attention to a context, whose keys may be cached, isn't causal.
    """
    names_it = r"(?<!non)(?<!non_)causal|masked_?(self|multi|attention)|autoregress"
    if re.search(names_it if kind == "cross" else f"{names_it}|decoder", description.name, re.I):
        return "its name"
    for name in description.buffers:
        if re.search(r"tril|causal|triangle|(^|\.)(bias|mask|attn_mask)$", name):
            return f"its buffer {name}"
    roles = {names.argument_role(arg.name) for arg in description.call}
    if says_mask_replaces(text):
        return "its documentation"
    if not {"mask", "mask-of-keys"} & roles:
        mentions = r"(?<!not )(?<!non-)\bcausal|autoregressive|can't see the future|no look-?ahead"
        if re.search(mentions, text, re.I):
            return "its documentation"
        if "cache" in roles and kind != "cross":
            return "its cache of earlier keys"
    return "the triangle in its code" if makes_triangle(parse(description.source)) else None


def says_context_is_visible(context: str, text: str) -> bool:
    """Return True if documentation says that all of a context is visible, or causal masks are for others."""
    own = r"\bself[- _]?attention\b"
    of_self = rf"\b(?:causal|future)\b[^.;]{{0,60}}{own}|{own}[^.;]{{0,60}}\bcausal"
    of_context = (
        rf"\b(?:{re.escape(context)}|cross[- _]?attention)\b[^.;]{{0,100}}\b(?:all|every|not causal)\b"
    )
    return re.search(f"{of_self}|{of_context}", text, re.I) is not None


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


def uncalled_methods(description: Description) -> dict[str, int]:
    """Return the methods for steps of decoding that no method calls, and how many arguments each has.

    They compute attention, by a helper perhaps, but not by forward.
    """
    nodes = [*ast.walk(parse(description.source))]
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == description.name]
    methods = {node.name: node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}

    def attends(name: str, *callers: str) -> bool:
        if re.search(r"softmax|scaled_dot_product", ast.unparse(methods[name])):
            return True
        used = {node.attr for node in ast.walk(methods[name]) if isinstance(node, ast.Attribute)}
        return any(
            attends(helper, name, *callers) for helper in used & {*methods} - {"forward", name, *callers}
        )

    return {
        name: len(method.args.args) - 1
        for name, method in methods.items()
        if not name.startswith("_") and name not in ("forward", *called)
        if re.search(r"step|decode|incremental|forward|prefill|infer", name) and attends(name)
    }
