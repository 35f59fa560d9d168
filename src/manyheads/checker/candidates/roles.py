"""Roles: what the checker takes each argument of a call, each parameter and each setting for, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.checker.candidates import documentation, names
from manyheads.checker.candidates.errors import Unclear
from manyheads.checker.isolation.describe import Argument, Description

# The roles that --arg accepts, as docs/checker.md lists them.
MASKS: dict[str, str] = {
    "mask": "a mask; its documentation, name or kind says whether True keeps",
    "keep": "a mask, True = may attend",
    "drop": "a mask, True = masked",
    "additive-mask": "a mask that is added to the scores, 0 or -inf",
    "mask-of-keys": "a mask with an entry for each key, such as padding",
    "keep-of-keys": "such a mask, True = may attend",
    "drop-of-keys": "such a mask, True = masked",
    "additive-mask-of-keys": "such a mask that is added to the scores",
    "mask-of-queries": "a mask with an entry for each query, [b, t], whose outputs aren't compared",
    "lengths": "the number of tokens of each sequence, [b]",
    "segments": "the number of each token's segment, [b, t]; tokens attend within their segment",
    "cumulative-lengths": "where the segments of one sequence end, after a 0, [n + 1]",
}
ROLES: dict[str, str] = {
    "x": "tokens, from which queries, keys and values are projected",
    "query": "queries",
    "key": "keys",
    "value": "values",
    "context": "the other sequence, from which keys and values are projected",
    "earlier": "tokens before those of x, which are keys too, as in Transformer-XL",
    "residual": "what is added to the output; calls pass x",
    **MASKS,
    "causal": "whether to apply a causal mask",
    "bias": "numbers that are added to the scores",
    "positions": "the positions of the tokens, [b, t] or [t]",
    "vectors": "vectors of positions that are added to the input of queries and keys, not of values; of x's "
    "tokens, or of the context's",
    "query-vectors": "such vectors of the queries, in self-attention of the keys too if those have none",
    "key-vectors": "such vectors of the keys",
    "start": "the position of the first token",
    "cos-sin": "the cosines and sines of a rotary encoding, a tuple",
    "cos": "its cosines",
    "sin": "its sines",
    "angles": "its cosines and sines as complex numbers",
    "cache": "keys and values of earlier tokens",
    "cached-keys": "keys of earlier tokens",
    "cached-values": "values of earlier tokens",
    "return-cache": "whether to return a cache",
    "weights": "whether to return the attention weights",
    "average-weights": "whether to average them over the heads",
    "scale": "the factor of the scores",
    "sink": "the logits of a sink, [h]",
    "softcap": "the cap of the scores, cap · tanh(score / cap)",
    "window": "the number of keys that each query sees",
    "head-mask": "factors of the weights of each head, [h] or [b, h, 1, 1]",
    "dropout": "the probability of dropout",
    "rows": "the number of rows of an image whose pixels are the tokens",
    "columns": "the number of its columns",
    "grid": "the numbers of its rows and columns, a tuple",
    "length": "the number of tokens",
    "query-length": "the number of first tokens, which attend; others are returned unchanged, or left out",
    "batch": "the number of sequences",
    "layer": "the number of the layer",
    "grouped": "whether there are fewer key heads than query heads",
    "module": "the module that transformers passes to an attention function",
    "ignore": "left at its default",
}
OTHERS = "*"  # in --arg '*=ignore', the optional arguments whose role nothing says
CACHED = ("cache", "cached-keys", "cached-values")
CACHES = (*CACHED, "return-cache")
VECTORS = ("vectors", "query-vectors", "key-vectors")
OFF_BY_DEFAULT = ("softcap", "window", "head-mask")  # roles that calls set in inputs of their own
SIZES = ("length", "query-length", "batch", "layer")  # roles of numbers that are passed only if required
SEQUENCES = ("x", "query", "key", "value", "context")
# Names in the table of calls that may as well be the other sequence; trial calls decide.
AMBIGUOUS = ("tokens", "src", "seq", "sequence", "source", "other", "z", "features", "inp", "input", "inputs",
         "hidden")  # fmt: skip
INTEGER = re.compile(r"int|int \| None|(?:typing\.)?Optional\[int\]|None \| int")  # annotations
INTEGERS = re.compile(r"\b(?:tuple|list|sequence|size|iterable)\[int(?:, ?(?:int|\.\.\.))?\]", re.I)
GRID = re.compile(r"[(\[] ?(?:\w+_)?(?:h|height|rows?) ?, ?(?:\w+_)?(?:w|width|col(?:umn)?s?) ?[)\]]", re.I)
GRID_WORDS = re.compile(r"grid|size|shape|hw|res|patch|spatial|image|img", re.I)  # in names
COUNT = r"(?:number|count|length) of (?:\w+ ){0,2}"  # in documentation of numbers of tokens


@dataclass(frozen=True)
class Role:
    """What an argument, a parameter or a setting of a candidate is taken for.

    Attributes:
        name: The name of the argument or the parameter, or "heads", "head size" or "layout".
        role: Its role in words, or the value of the setting.
        reason: Why: its name, its documentation, its shape, trial calls, or an option.
        kind: "argument", "parameter" or "setting".
    """

    name: str
    role: str
    reason: str
    kind: str = "argument"


def may_be_tensor(annotation: str) -> bool:
    """Return True if an annotation allows a tensor, or says nothing."""
    return not annotation or "Tensor" in annotation or annotation in ("Any", "object")


def validate_roles(chosen: Mapping[str, str], description: Description) -> None:
    """Raise Unclear unless all names are arguments of the call, and all roles exist."""
    known = [argument.name for argument in description.call if argument.is_named]
    takes_more = any(argument.kind == "var_keyword" for argument in description.call)
    for name, role in chosen.items():
        if name == OTHERS and role == "ignore":
            continue
        if name not in known and not takes_more:
            listed = ", ".join(known) or "none"
            raise Unclear(f"Expected an argument of {description.name} for --arg ({listed}), got {name!r}.")
        if role not in ROLES:
            raise Unclear(f"Expected a role for --arg {name}=ROLE ({', '.join(ROLES)}), got {role!r}.")
    required = [arg.name for arg in description.call if arg.required and chosen.get(arg.name) == "ignore"]
    if required:
        raise Unclear(
            f"Expected a role other than ignore for {required[0]!r}, which has no default. "
            "Give it another role with --arg NAME=ROLE."
        )


def read_roles(
    description: Description, text: str, chosen: Mapping[str, str], init: Mapping[str, Any]
) -> dict[str, tuple[str | None, str]]:
    """Return (role, reason) of each argument of a call; the role is None if nothing gives it.

    A context isn't passed if the constructor has a switch for cross-attention, and it is off.
    """
    validate_roles(chosen, description)
    arguments = [argument for argument in description.call if argument.is_named]
    roles = {argument.name: read_role(argument, text) for argument in arguments}
    for argument in (each for each in arguments if not each.required and roles[each.name][0] is None):
        if documentation.says_unused(argument.name, text):
            roles[argument.name] = ("ignore", "its documentation")
        elif is_index(argument, description.source) and not {"positions", "start"} & {
            role for role, _ in roles.values()
        }:
            roles[argument.name] = ("positions", "its code, which indexes tables by it")
    found = {role for role, _ in roles.values()}
    if (
        description.torch_module
        and "query" in found
        and "key" in found
        and not found & {"value", *SEQUENCES[:1]}
    ):
        pair = {"query": "x", "key": "context"}  # from which the values are projected too
        roles |= {
            name: (pair[role], "its name, without a value")
            for name, (role, _) in roles.items()
            if role in pair
        }
    sequences = [name for name, (role, _) in roles.items() if role in SEQUENCES]
    for name, (role, _) in roles.items():
        is_open = role in (None, "positions", "cos-sin")
        if is_open and documentation.adds_to_tokens(name, sequences, description.source):
            roles[name] = ("vectors", "its code, which adds it to tokens")
    optional = {argument.name for argument in arguments if not argument.required}
    sequences = [name for name in sequences if roles[name][0] in ("x", "query")]
    required = [argument.name for argument in arguments if argument.required]
    sequences = sequences or required * (len(required) == 1)  # the only argument that x can be
    has_mask = any(role in MASKS and is_of_context(name, role) for name, (role, _) in roles.items())
    for name in [name for name in optional if roles[name][0] in ("context", None) and not has_mask]:
        if documentation.precedes_tokens(name, sequences, description.source):
            roles[name] = ("earlier", "its code, which puts it before x")
    vectors = [name for name, (role, _) in roles.items() if role in ("query-vectors", "key-vectors")]
    for name in [name for name, (role, _) in roles.items() if role in ("positions", "cos-sin") and vectors]:
        if not documentation.says_numbers(name, text):
            roles[name] = ("vectors", f"{vectors[0]} beside it")
    for argument in arguments:
        is_open = roles[argument.name][0] in ("context", None) and not set(CACHED) & found
        if is_open and (reason := find_cache_reason(argument, description.source, text)):
            roles[argument.name] = ("cache", reason)
            found.add("cache")
    defaults = {argument.name: argument.default for argument in description.init or ()}
    switches = {**defaults, **init, **description.attributes}
    if off := [name for name, value in switches.items() if "cross_att" in name and value is False]:
        with_default = [argument.name for argument in arguments if not argument.required]
        unused = [name for name in with_default if is_of_context(name, roles[name][0])]
        roles |= dict.fromkeys(unused, ("ignore", f"built with {off[0]}=False"))
    if OTHERS in chosen:
        others = [arg.name for arg in arguments if not arg.required and roles[arg.name][0] is None]
        roles |= dict.fromkeys(others, ("ignore", f"--arg '{OTHERS}=ignore'"))
    return roles | {name: (role, f"--arg {name}={role}") for name, role in chosen.items() if name != OTHERS}


def read_role(argument: Argument, text: str) -> tuple[str | None, str]:
    """Return (role, reason) of an argument by its name, annotation and documentation."""
    role = names.argument_role(argument.name)
    is_switch = isinstance(argument.default, bool) or re.fullmatch(r"bool( \| None)?", argument.annotation)
    if role in (None, *SIZES) and (number := read_number(argument, text, role)) is not None:
        return number
    if role in SIZES:
        return None, ""  # left at its default
    if role is None and (role := names.guess_mask_role(argument.name)) is None:
        if is_switch or not documentation.is_called_mask(argument.name, text):
            return None, ""
        return "mask", "its documentation"
    if role in MASKS and is_switch:
        return "causal", "its name and type"
    if role in OFF_BY_DEFAULT and not argument.required and argument.default not in (None, 0, -1):
        return "ignore", f"its default, {argument.default}"
    if role == "grid" and INTEGER.fullmatch(argument.annotation):
        return None, ""
    if role == "positions" and INTEGER.fullmatch(argument.annotation):
        return "start", "its name and type"
    if role == "positions" and documentation.says_vectors(argument.name, text):
        return "vectors", "its documentation"
    if role in VECTORS and documentation.says_numbers(argument.name, text):
        return None, ""
    if role == "causal" and "mask" in argument.name and not is_switch:
        return "mask", "its name"
    return role, "its name"


def read_number(argument: Argument, text: str, role: str | None) -> tuple[str, str] | None:
    """Return (role, reason) of an argument that is a number of tokens, or of rows and columns."""
    lines = documentation.lines_about(argument.name, text)
    is_pair = isinstance(argument.default, tuple | list) and len(argument.default) == 2
    if INTEGERS.search(argument.annotation) and GRID_WORDS.search(argument.name):
        return "grid", "its name and type"
    if (is_pair or not argument.annotation or INTEGERS.search(argument.annotation)) and GRID.search(lines):
        return "grid", "its documentation"
    if role is not None:
        return (role, "its name") if argument.required else None
    if not (argument.required and (INTEGER.fullmatch(argument.annotation) or not argument.annotation)):
        return None
    of_queries = rf"\b{COUNT}quer(?:y|ies)\b"
    of_tokens = rf"\b{COUNT}(?:tokens|the sequence)\b|\bsequence length\b"
    for found, words in (("query-length", of_queries), ("length", of_tokens)):
        if re.search(words, lines, re.I) and not documentation.read_mask(argument.name, text).shapes:
            return found, "its documentation"
    return None


def is_index(argument: Argument, source: str) -> bool:
    """Return True if code indexes cosines, a causal mask or a cache of the module by an argument."""
    table = r"\bself\.[\w.]*(?:rope|rotary|cos|sin|freqs|angles|causal|tril|[kv]_cache|cache_[kv])\w*"
    index = rf"{table}\[(?:[^\]\n]*,)?\s*{re.escape(argument.name)}\s*(?:,[^\]\n]*)?\]"
    return argument.default is None and re.search(index, source) is not None


def find_cache_reason(argument: Argument, source: str, text: str) -> str:
    """Return why an argument is a cache although its name doesn't say so, or "" if it isn't one."""
    name = argument.name
    if re.search(r"cache|kv", argument.annotation, re.I):
        return "its annotation"
    pair = re.search(rf"\b(\w*k\w*), *(\w*v\w*)\)? *= *{name}\b(?![.,(\[])", source)  # pk, pv = state
    if pair and not argument.required and names.argument_role(name) is None:
        is_first = [re.search(rf"\bcat\(\s*[(\[]\s*{part}\b", source) for part in pair.groups()]
        if all(is_first):  # torch.cat((pk, k), 2)
            return "its code, which puts keys and values from it before the new ones"
    if re.search(rf"\b\w+, \w+ = {name}\b(?![.,(\[])|\b{name}\[[01]\]", source):  # k, v = kv
        return "its code, which takes a pair apart" * (names.argument_role(name) == "context")
    part = r"(?:keys?|values?|[kv])(?:_cache|_states?)?"
    attribute = rf"\b{name}(?:\.{part}\b|\[[\'\"]{part}[\'\"]\])(?! *\()"  # past.k, or past["k"]
    method = rf"\bk\w*, *v\w* *= *{name}\.\w+\("
    if not argument.required and re.search(f"{attribute}|{method}", source):
        return "its code, which takes keys and values from it"
    lines = documentation.lines_about(name, text)
    of_earlier = r"\bcache\b|\bkeys and values of (?:the )?(?:earlier|previous|past)\b"
    is_other = argument.required or isinstance(argument.default, bool) or "bool" in argument.annotation
    is_other |= names.argument_role(name) is not None or names.guess_mask_role(name) is not None
    is_described = not is_other and re.search(of_earlier, lines, re.I)
    return "its documentation" if is_described else ""


def is_of_context(name: str, role: str | None) -> bool:
    """Return True if an argument is a context, or by its name a mask of one."""
    return role == "context" or (role in MASKS and bool(re.search(r"enc|mem|context|ctx|cross", name)))


def is_ambiguous(name: str, roles: Mapping[str, tuple[str | None, str]]) -> bool:
    """Return True if nothing says for certain which sequence an argument is."""
    role, reason = roles[name]
    return role is None or (name in AMBIGUOUS and reason == "its name")


def required_sequences(description: Description, roles: Mapping[str, tuple[str | None, str]]) -> list[str]:
    """Return the required arguments that are sequences, or may be."""
    return [arg.name for arg in description.call if arg.required and roles[arg.name][0] in (*SEQUENCES, None)]


def possible_roles(
    description: Description, roles: Mapping[str, tuple[str | None, str]], kind: str | None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a kind and roles for each meaning that required arguments with ambiguous names can have.

    Nothing is yielded if names decide. `kind` is the user's.
    """
    sequences = required_sequences(description, roles)
    ambiguous = [name for name in sequences if is_ambiguous(name, roles)]
    if not ambiguous or len(sequences) != 2 or kind not in (None, "self", "cross"):
        return
    for first, second in (sequences, sequences[::-1]):
        stated = {name: roles[name][0] for name in sequences if name not in ambiguous}
        for other, kinds in (("context", "cross"), ("mask", "self")):
            guess = {first: "x", second: other}
            if kind in (None, kinds) and stated.items() <= guess.items():
                yield kinds, guess
