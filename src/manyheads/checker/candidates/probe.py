"""Build the adapter of a candidate, and probe its layout, causality and outputs with trial calls.

The calls show which arguments a candidate accepts, and which inputs affect which outputs. Except for padded
queries, outputs aren't compared with the expected ones: an option that is chosen because it makes them match
could hide a bug.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from manyheads.checker.candidates import documentation, forms, names
from manyheads.checker.candidates.adapter import Adapter, B, Options, S, T
from manyheads.checker.candidates.attention import (
    ANGLES,
    GRIDS,
    POSITIONS,
    SEQUENCES,
    TRIED,
    AttentionAdapter,
)
from manyheads.checker.candidates.caches import STORED, find_cache, prepare_calls
from manyheads.checker.candidates.construct import fill_arguments, has_implementations
from manyheads.checker.candidates.encoding import RotaryAdapter, TableAdapter
from manyheads.checker.candidates.errors import ALONE, Unclear, UnexpectedOutput
from manyheads.checker.candidates.masks import fill_required_masks, find_masks
from manyheads.checker.candidates.parts import WINDOWS, Numbers, find_parts
from manyheads.checker.candidates.roles import (
    CACHES,
    MASKS,
    VECTORS,
    is_of_context,
    possible_roles,
    read_roles,
    required_sequences,
)
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.describe import Description
from manyheads.checker.isolation.errors import CandidateError, CodeError
from manyheads.checker.isolation.process import CandidateProcess
from manyheads.checker.isolation.trees import top_tensors
from manyheads.checker.oracle import Inputs, Outputs, largest_difference
from manyheads.checker.parts import Window

LAYOUTS = {"batch": "sequence", "sequence": "batch"}  # and the other one
DECODER = re.compile(r"(?:is_|as_)?decoder|unidirectional")  # flags without which nothing may be causal
LARGEST_BATCH = 8  # of trial calls
SQUARES = (16, 64, 49, 196)  # numbers of tokens to try where no constructor argument gives one


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
        try:
            return (TableAdapter if options.kind == "positional" else RotaryAdapter)(candidate, options)
        except Unclear as error:
            if not options.guessed:
                raise
            taken = f"Its name was taken for that of a {options.kind} encoding"
            raise Unclear(f"{error} {taken}: if it is attention, give --like self, or cross.") from None
    description = candidate.describe()
    text = documentation.read_documentation(description)
    roles = read_roles(description, text, options.arguments, options.init)
    resolved = resolve_roles(candidate, options, roles)
    of_context = [name for name, (role, _) in roles.items() if is_of_context(name, role)]
    takes_context = any(roles[name][0] == "context" for name in of_context)
    if not takes_context or resolved.tried or not options.guessed or options.kind != "self":
        return open_attention(candidate, resolved)

    def leave_out(unused: list[str], kind: str) -> Options:
        ignored = dict.fromkeys(unused, "ignore")
        return replace(options, kind=kind, arguments={**ignored, **options.arguments})

    # An optional context: self-attention first, or cross-attention if it can't be called without a context.
    masks_of_context = [name for name in of_context if roles[name][0] in MASKS]
    found = {role: name for name, (role, _) in roles.items() if role is not None}
    of_keys = ("vectors", "key-vectors") if "query-vectors" in found else ("key-vectors",)
    vectors_of_context = [found[role] for role in of_keys if role in found]
    try:
        adapter = open_attention(candidate, leave_out([*masks_of_context, *vectors_of_context], "self"))
    except Unclear:
        return open_attention(candidate, replace(options, kind="cross"))
    of_x = [name for name, (role, _) in roles.items() if role in CACHES]
    if masks_of_context:
        of_x += [name for name, (role, _) in roles.items() if role in MASKS and name not in masks_of_context]
    adapter.with_context = replace(leave_out(of_x, "cross"), guessed=False)
    return adapter


def resolve_roles(
    candidate: Candidate | CandidateProcess, options: Options, roles: Mapping[str, tuple[str | None, str]]
) -> Options:
    """Return options with the roles of arguments whose names are ambiguous, as trial calls accept them."""
    description, kind = candidate.describe(), None if options.guessed else options.kind
    guesses = [
        replace(options, kind=kind, tried=tried) for kind, tried in possible_roles(description, roles, kind)
    ]
    accepted = guesses if len(guesses) < 2 else [each for each in guesses if is_accepted(candidate, each)]
    named = [each for each in accepted if names_context(each.tried)]
    accepted = named if len(named) == 1 else accepted
    if guesses and len(accepted) != 1:
        taken = " and ".join(required_sequences(description, roles))
        given = [" ".join(f"--arg {name}={role}" for name, role in each.tried.items()) for each in guesses]
        hint = "" if accepted else f" Perhaps one is something else, such as a bias of pairs. {ALONE}."
        raise Unclear(
            f"Nothing says for certain what {taken} of {description.name} are, and trial calls accept "
            f"{'several ways' if accepted else 'no way'} to pass them. Give {' or '.join(given)}.{hint}"
        )
    return accepted[0] if accepted else options


def open_with_context(adapter: Adapter) -> AttentionAdapter | str:
    """Return the adapter for calls with the context that a candidate may take, or why it can't be judged."""
    assert adapter.with_context is not None
    options, flags = adapter.with_context, names.CONSTRUCTOR["causal"][1]
    arguments = adapter.candidate.describe().init or ()
    # Layers that are causal on request attend to a context without a causal mask.
    off = {arg.name: False for arg in arguments if arg.name in flags and arg.default is False}
    unused = unused_with_context(adapter)
    ignored = {**dict.fromkeys(unused, "ignore"), **options.arguments}
    try:
        crossing = open_attention(
            adapter.candidate, replace(options, init={**off, **options.init}, arguments=ignored)
        )
    except Unclear as error:
        return f"with a context: {error}"
    if crossing.arguments["context"] in crossing.unjudged:
        return crossing.unjudged[crossing.arguments["context"]]
    crossing.unjudged |= {name: reason for name, reason in unused.items() if reason}
    return crossing


def unused_with_context(adapter: Adapter) -> dict[str, str]:
    """Return the arguments that aren't used with a context, and why each can't be judged, "" if it is right.

    If documentation says nothing, a causal flag, a window, or a mask of pairs that the batch shares and that
    code drops, is usually for self-attention alone. A mask that may be one of the context's keys isn't.
    """
    if not isinstance(adapter, AttentionAdapter):
        return {}
    description = adapter.description
    context = next(role.name for role in adapter.roles if role.role == "context")
    unused = {}
    of_pairs = {name for name, form in adapter.forms.values() if form.is_general and form.is_shared}
    flags = [adapter.arguments[role] for role in ("causal", "window") if role in adapter.arguments]
    for name in (*adapter.masks, *flags):
        if documentation.says_without_context(name, context, adapter.text):
            unused[name] = ""
            adapter.notes.append(f"{name} isn't used with {context}, as documented")
        elif documentation.says_with_context(name, context, adapter.text):
            continue
        is_dropped = documentation.is_dropped_with_context(name, context, description.source, adapter.text)
        is_usual = name in flags or (name in of_pairs and is_dropped)
        if is_usual and has_no_effect_with(adapter, context, name):
            unused[name] = ""
            adapter.without_context.append(name)
        elif is_dropped:
            unused[name] = (
                f"its code uses it only without {context}, and nothing says that this is meant. If it is, "
                f"say so in its documentation, or give --arg {context}=ignore."
            )
    return unused


def has_no_effect_with(adapter: AttentionAdapter, context: str, name: str) -> bool:
    """Return True if a call with a context gives the same output with and without a mask, a flag or a window.

    The mask has the sizes of one without a context or those of one with it; both are tried.
    """
    g = torch.Generator().manual_seed(6)
    x, other = adapter.draw(g), adapter.draw(g, t=S)
    call = adapter.call(x)
    named = dict(zip(adapter.positional, call.args, strict=False)) | call.kwargs
    named[context] = adapter.to_context(other.key)
    of_flags: dict[str, list[Any]] = {"causal": [False, True], "window": [None, 1, 2]}
    values = next((each for role, each in of_flags.items() if adapter.arguments.get(role) == name), [None])
    for form in [form for argument, form in adapter.forms.values() if argument == name]:
        keeps = (torch.ones(x.b, 1, x.t, keys).tril().bool() for keys in (x.s, other.s))
        values = [*values, *(form.write(keep, x.query.dtype) for keep in keeps)]
    outs = []
    for value in values:
        with suppress(CodeError, UnexpectedOutput):  # a mask of other sizes may not be accepted
            output = adapter.candidate.call(replace(call, args=(), kwargs={**named, name: value})).output
            outs.append(adapter.read(output, x, strict=False).out)
    return len(outs) > 1 and all(torch.equal(out, outs[0]) for out in outs)


def names_context(tried: Mapping[str, str]) -> bool:
    """Return True if there is a context, and its name says so, as `enc_src` does."""
    contexts = [name for name, role in tried.items() if role == "context"]
    return bool(contexts) and all(is_of_context(name, "mask") for name in contexts)


def is_accepted(candidate: Candidate | CandidateProcess, options: Options) -> bool:
    """Return True if a candidate can be called with the roles that are tried.

    The output has a row for each token of x, whatever the length of a context, and a mask masks keys.
    """
    try:
        adapter = open_attention(candidate, options)
    except Unclear:
        return False
    masks = {name for name, role in options.tried.items() if role == "mask"}
    is_called = adapter.attempt(adapter.draw(torch.Generator().manual_seed(5), s=S), strict=True) is not None
    return is_called and masks <= {name for name, _ in adapter.forms.values()}


def open_attention(candidate: Candidate | CandidateProcess, options: Options) -> AttentionAdapter:
    """Return the adapter of a candidate for attention."""
    try:
        return probe(AttentionAdapter(candidate, options))
    except Unclear as error:
        description, init = candidate.describe(), options.init
        if description.type != "class":
            raise
        with suppress(Unclear):
            if (widened := widen_heads(description, options)) is not None:
                adapter = probe(AttentionAdapter(candidate, widened))
                adapter.notes.append("has heads of 8 entries, because a call with others raises an error")
                return adapter
        if fill_arguments(description, init) == fill_arguments(description, init, True):
            raise
        try:
            adapter = probe(AttentionAdapter(candidate, options, same_width=True))
        except Unclear:
            raise error from None
        adapter.width_error = str(error)
        adapter.notes.append("built with the same width everywhere, because different widths raise an error")
        return adapter


def widen_heads(description: Description, options: Options) -> Options | None:
    """Return options with heads of 8 entries, half of which form pairs; None if the user gives the width."""
    filled = fill_arguments(description, options.init, heads=options.heads)
    meanings = {name: names.constructor_value(name)[0] for name in filled}
    heads = next((filled[name] for name in filled if meanings[name] == names.NUMBER_OF_HEADS), names.HEADS)
    widths = [name for name in filled if meanings[name] == names.MODEL_WIDTH]
    if len(widths) != 1 or widths[0] in options.init or not isinstance(heads, int):
        return None
    return replace(options, init={**options.init, widths[0]: 8 * heads})


def probe(adapter: AttentionAdapter) -> AttentionAdapter:
    """Find how the candidate is called, and which inputs and outputs it supports."""
    g = torch.Generator().manual_seed(2)
    prepare_calls(adapter)
    if is_required := any(map(adapter.is_required, VECTORS)):
        find_vectors(adapter, g)
    find_counts(adapter, g)
    find_first_token(adapter, g)
    if adapter.weights is not None and adapter.options.layout is None:
        find_tokens(adapter, g)
        find_images(adapter, g)
        if adapter.count and not (adapter.images and adapter.grid):
            adapter.notes.append(f"takes {adapter.count} tokens, as trial calls show")
    find_position_forms(adapter, g)
    fill_required_masks(adapter, g)
    if adapter.weights is None:
        find_head_layout(adapter, g)
    elif adapter.options.layout is None:
        find_layout(adapter, g)
    x = adapter.draw(g)
    plain: Outputs | None = None
    try:
        plain = adapter.run(x, strict=False)
    except CandidateError as error:
        raise adapter.reject_call(error, x) from None
    except UnexpectedOutput:
        reject_learned_queries(adapter, g)  # others are reported later, by the check of shapes
    if adapter.weights is not None and plain is not None:
        find_returned_bias(adapter, x)
    find_returned_weights(adapter, x, plain)
    has_heads = adapter.weights is None and "h" in adapter.head_layout
    if has_heads and ("grouped" in adapter.arguments or adapter.attempt(adapter.draw(g, key_heads=2))):
        adapter.features.add("grouped")
    adapter.features |= {"scale", "sink", "softcap", "causal", "bias"} & set(adapter.arguments)
    find_causality(adapter, g)
    outs = [outputs.out for n in range(3) if (outputs := adapter.attempt(x, seed=n)) is not None]
    adapter.is_seeded = any(not torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs)
    if not adapter.is_seeded:
        find_parts(adapter)
    if not is_required and not adapter.vectors:
        find_vectors(adapter, g)
    find_masks(adapter, g)
    find_head_mask(adapter, g)
    find_window(adapter, g)
    find_padded_queries(adapter, g)
    find_cache(adapter)
    find_unknown_arguments(adapter, g)
    for name, count in documentation.uncalled_methods(adapter.description).items():
        adapter.unjudged[name] = (
            "forward doesn't call this method. Check it too, in an adapter that calls it:\n"
            f"class Adapter({adapter.description.name}):\n{describe_call(name, count)}"
        )
    return adapter


def describe_call(method: str, count: int) -> str:
    """Return the forward of an adapter that calls a method with this number of arguments."""
    if count != 1:
        return f"    def forward(self, x, cache=None):\n        return self.{method}(x, cache)"
    is_step = re.search(r"step|decode|incremental", method)
    result = (
        f"torch.cat([self.{method}(token) for token in x.split(1, 1)], 1)" if is_step else f"self.{method}(x)"
    )
    return f"    def forward(self, x):\n        ...  # empty its cache\n        return {result}"


# -- inputs ----------------------------------------------------------------------------------------


def find_counts(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find how many tokens are before those of a grid, or after those that attend, if calls pass numbers.

    The first number with which calls of two lengths are accepted: that of a grid or of queries alone, those
    that settings name, and one, as for the token of a class.
    """
    if GRIDS & set(adapter.arguments):
        numbers = (
            Numbers(adapter).named_like(r"prefix|regist|cls|class|special|extra|global|storage").values()
        )
        likely = {0: None, **dict.fromkeys(int(n) for n in numbers if 0 < n < 64)}
        likely |= dict.fromkeys([*(n + 1 for n in likely), sum(likely) + 1])
        for adapter.prefix in likely:
            if all(adapter.attempt(adapter.draw(g, t=n + adapter.prefix)) for n in (6, 10)):
                return
        adapter.prefix = 0
    if (name := adapter.arguments.get("query-length")) is None:
        return
    x, adapter.extra = adapter.draw(g), 2
    try:
        adapter.run(x, strict=False)
    except CandidateError:
        adapter.extra = 0
    except UnexpectedOutput as error:
        if re.search(r"unchanged|untouched|as they are|pass(?:es|ed)? through", adapter.text, re.I):
            return  # the check of shapes fails
        adapter.extra = 0
        adapter.unjudged[name] = (
            f"{error}, and nothing says what becomes of them. If {name} is the number of all tokens, give "
            f"--arg {name}=length."
        )


def find_first_token(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find whether only the first token attends, as in CaiT's class attention: the output has one row.

    The other tokens can then have any order. If the output is random, the code shows it.
    """
    if adapter.kind != "self" or adapter.weights is None:
        return
    name, source = re.escape(adapter.arguments["x"]), adapter.description.source

    def output(x: Inputs, seed: int = 0) -> torch.Tensor | None:
        """Return the only row of the output of each sequence, `[b, e]`."""
        with suppress(CodeError):
            tensors = top_tensors(adapter.answer(x, seed=seed).output)
            rows = [y.flatten(0, -2) for y in tensors[:1] if y.shape[:-1] in ((x.b,), (x.b, 1))]
            return rows[0] if rows and rows[0].is_floating_point() else None
        return None

    x, other = adapter.draw(g, t=S), adapter.draw(g, t=T)
    orders = ([0, *range(S - 1, 0, -1)], [*range(S - 1, -1, -1)])
    outs = [output(x.but(query=x.query[:, order])) for order in (range(S), *orders)]
    if output(other) is None or outs[0] is None or outs[1] is None or outs[2] is None:
        return
    others_moved, all_moved = (largest_difference(out, outs[0]) for out in (outs[1], outs[2]))
    adapter.asks_first = others_moved < 1e-4 * float(outs[0].abs().max()) < all_moved
    is_random = (again := output(x, 1)) is None or not torch.equal(again, outs[0])
    code, words = rf"\b{name}\[:, ?(?:0|:1|0:1)\b", r"\b(?:first|class|cls)[- ]token\b"
    is_shown = re.search(code, source) or re.search(words, adapter.text, re.I)
    adapter.asks_first |= is_random and is_shown is not None
    if adapter.asks_first:
        adapter.notes.append("only the first token attends, so calls have each token first in turn")
    elif re.search(r"\bcls\b|class[- ]token|\bpool|\.mean\(", f"{adapter.text} {source}", re.I):
        raise Unclear(
            f"{adapter.description.name} returns one row for all tokens, and it isn't that of the first "
            "token: perhaps its query is a mean, or it has positions, which isn't supported. To check the "
            "attention in it, move it to a module that takes the queries, forward(x, context)."
        )


def find_tokens(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find whether tokens are one sequence or the pixels of an image, and whether their number is fixed.

    This is tried if no call with tokens `[b, t, e]` is accepted. If several grids are, it is the first in
    which a token affects others.
    """
    x = adapter.draw(g, s=S)
    if adapter.attempt(x) is not None:
        return
    for grid in ("[b, e, h, w]", "[b, h, w, e]") if adapter.kind == "cross" else ():
        adapter.context_grid = grid
        if adapter.attempt(x) is not None:
            return
    adapter.context_grid = ""
    if adapter.masks and adapter.kind != "self":
        return
    squares = [shape[0] for shape in adapter.description.buffers.values() if shape == shape[:1] * 2]
    values = {arg.name: arg.default for arg in adapter.description.init or ()} | adapter.init
    sizes = [x for name, x in values.items() if re.search(r"window|size|resolution|patch|tokens|len", name)]
    pairs = [math.prod(x) for x in sizes if isinstance(x, tuple | list) and all(type(n) is int for n in x)]
    widths = [n for x in sizes if type(x) is int for n in (x * x, x) if 1 < n <= 256]  # of a square or a line
    tuples = [
        math.prod(x) for x in values.values() if isinstance(x, tuple | list) and {*map(type, x)} == {int}
    ]
    rows = [shape[0] for shape in adapter.description.buffers.values() if len(shape) > 1]
    # "The size of tensor a (5) must match the size of tensor b (24)": a was the number of tokens.
    stated = [*map(int, re.findall(rf"\({S}\) must match \D*\((\d+)\)", str(adapter.last_error)))]
    likely = (*squares, *pairs, *tuples, *stated, *rows, *widths, *SQUARES)
    counts = dict.fromkeys([None, *(n for n in likely if 2 < n <= 1024)])
    accepted: dict[tuple[str, int | None], bool] = {}
    for grid, count in [*product(("", *forms.GRIDS), counts)][1:]:  # any number of tokens was tried above
        adapter.grid, adapter.count = grid, count
        x = adapter.draw(g, t=6)
        changed = adapter.changed_queries(x, adapter.change_key(x, 2), strict=True)
        if changed is not None:
            accepted[grid, count] = bool(changed[0])
            if changed[0]:
                break
    adapter.grid, adapter.count = max(accepted, key=accepted.__getitem__, default=("", None))


def find_images(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find the numbers of rows and columns of images that have several windows, if a caller sets windows."""
    numbers, is_image = Numbers(adapter), adapter.grid_axes == ["h", "w"]
    sizes = [size for size in numbers.pairs_like(WINDOWS) if min(size) > 1 and max(size) <= 16]
    if not sizes or (adapter.grid and not is_image):
        return
    (rows, columns), fixed = sizes[0], adapter.count
    # Windows divide the first; the second has to be filled up, and one window has all rows of the third.
    across = 3 if rows * columns <= 16 else 2  # windows
    tried = [(2 * rows, across * columns), (rows + 1, columns + 2), (rows - 1, columns + 2)]
    for image in tried if is_image else ():  # also if trial calls found a number: that of a single window
        adapter.images.append(image)
        if adapter.attempt(adapter.draw(g, count=math.prod(image)), strict=True) is None:
            adapter.images.pop()
    if adapter.images:
        adapter.count = math.prod(adapter.images[0])
    elif fixed is not None:
        found = [x for x in numbers.pairs.values() if math.prod(x) == fixed and x != sizes[0]]
        square = math.isqrt(fixed)
        found += [(square, square)] * (is_image and square * square == fixed)
        adapter.images = [x for x in found if x[0] % rows == x[1] % columns == 0][:1]


def reject_learned_queries(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Raise an error if the output has as many rows as a parameter, whatever the number of tokens."""
    rows = set()
    for t in (T, S):
        output = adapter.answer(adapter.draw(g, t=t)).output
        rows |= {adapter.from_layout(x).shape[1] for x in top_tensors(output)[:1] if x.dim() == 3}
    for path, shape in adapter.description.parameters.items() if len(rows) == 1 else ():
        if rows & {*shape[:-1]}:
            raise Unclear(
                f"The output of {adapter.description.name} has {rows.pop()} rows for {T} and for {S} tokens, "
                f"as many as `{path}` {list(shape)}: its queries are learned, which isn't supported. To "
                "check the attention in it, move it to a module that takes the queries, forward(x, context)."
            )


def find_position_forms(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find how positions, cosines and sines are passed: in the first shape that is accepted.

    Cosines repeated in halves and in pairs have the same shape. With those that fit the rotation, only
    distances matter, so that later positions give the same outputs. If none is accepted, the code may have a
    cache for a fixed number of batch entries.
    """
    if not POSITIONS & set(adapter.arguments):
        return
    angles: list[forms.AngleForm | None] = [None]
    if ANGLES & set(adapter.arguments):
        widths = ("half",) if "angles" in adapter.arguments else ("halves", "pairs", "half")
        angles = [forms.AngleForm(letters, width) for letters, width in product(forms.ANGLES, widths)]
    if documentation.is_sine_first(
        adapter.arguments.get("cos-sin", ""), adapter.text, adapter.description.source
    ):
        adapter.angle_order = ("sin", "cos")
    accepted: dict[tuple[str, forms.AngleForm | None], float] = {}
    axes = ("bs", "s") if "positions" in adapter.arguments else ("bs",)
    for batch, letters, form in product((None, *fixed_batches(adapter)), axes, angles):
        if accepted and batch != adapter.batch:
            break
        adapter.batch, adapter.position_letters, adapter.angle_form = batch, letters, form
        x = adapter.draw(g)
        later = adapter.place(x, torch.arange(3, x.s + 3).expand(x.b, -1))
        before, after = adapter.attempt(x), adapter.attempt(later)
        if before is not None and after is not None and bool(before.out.isfinite().all()):
            accepted[letters, form] = largest_difference(before.out, after.out)
    if not accepted:
        adapter.batch = None
        if not find_vectors_for_positions(adapter, g):
            leave_out_angles(adapter)
    elif adapter.batch is not None:
        adapter.notes.append(f"takes batches of {adapter.batch}, as trial calls show")
    first = next(iter(accepted), ("bs", angles[0]))
    same_shape = [each for each in accepted if each[1] and first[1] and each[1].letters == first[1].letters]
    fitting = (each for each in same_shape if accepted[each] < 1e-3)
    adapter.position_letters, adapter.angle_form = next(fitting, first)


def fixed_batches(adapter: AttentionAdapter) -> list[int]:
    """Return the numbers of batch entries that settings name, or that a cache among the buffers has."""
    values = {arg.name: arg.default for arg in adapter.description.init or ()}
    values |= {**adapter.description.attributes, **adapter.init}
    sizes = [n for name, n in values.items() if names.constructor_value(name)[1] == names.BATCH]
    stored = {name: shape for name, shape in adapter.description.buffers.items() if STORED.search(name)}
    sizes += [shape[0] for shape in stored.values() if len(shape) == 4]
    return [n for n in dict.fromkeys(sizes) if type(n) is int and 0 < n <= LARGEST_BATCH and n != B]


def find_vectors_for_positions(adapter: AttentionAdapter, g: torch.Generator) -> bool:
    """Find whether an argument that no call accepts numbers of positions for takes vectors of them."""
    if "positions" not in adapter.arguments or "vectors" in adapter.arguments:
        return False
    name = adapter.arguments["vectors"] = adapter.arguments.pop("positions")
    find_vectors(adapter, g)
    if adapter.vectors:
        adapter.reasons[name] = TRIED
    else:
        adapter.arguments["positions"] = adapter.arguments.pop("vectors")
        del adapter.unjudged[name]
    return bool(adapter.vectors)


def leave_out_angles(adapter: AttentionAdapter) -> None:
    """Leave out optional cosines and sines, which no call accepts."""
    optional = {arg.name for arg in adapter.description.call if not arg.required}
    for role in ANGLES & set(adapter.arguments):
        if (name := adapter.arguments[role]) in optional:
            del adapter.arguments[role]
            adapter.unjudged[name] = (
                "no trial call with cosines and sines gives finite outputs, so it was left out. "
                f"If it isn't used, give --arg {name}=ignore."
            )


def find_head_layout(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Choose the first head layout that is accepted; documented ones are tried first."""
    # No two sizes of the trial inputs are equal, so most wrong layouts raise an error.
    text = adapter.text.replace("s, h", "t, h").replace("s, b", "t, b")
    documented = [layout for layout in forms.HEAD_LAYOUTS[1:3] if layout[:-1] in text]
    for layout in dict.fromkeys([*documented, *forms.HEAD_LAYOUTS]):
        adapter.head_layout = layout
        if adapter.attempt(adapter.draw(g, s=S)) is not None:
            adapter.layout_reason = "trial calls"
            return
    adapter.head_layout = "[b, h, t, d]"


def find_layout(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find which axis is the batch."""
    batch_first = adapter.description.attributes.get("batch_first", adapter.init.get("batch_first"))
    documented = documentation.documented_layout(adapter.description, adapter.text)
    if isinstance(batch_first, bool):
        adapter.layout = "batch" if batch_first else "sequence"
        adapter.layout_reason = f"batch_first={batch_first}"
    elif documented is not None:
        adapter.layout, adapter.layout_reason = documented, "its documentation or code"
    else:
        is_independent = {layout: has_independent_entries(adapter, g, layout) for layout in LAYOUTS}
        # If they are independent in neither layout, torch-mha is sequence first, other kinds are batch first.
        is_sequence = is_independent["sequence"] or adapter.kind == "torch-mha"
        adapter.layout = "sequence" if is_sequence and not is_independent["batch"] else "batch"
        if adapter.layout == "sequence":
            shown, default = (
                "batch entries are independent only in this layout",
                "the default of PyTorch's layer",
            )
            reason = shown if is_independent["sequence"] else default
            adapter.layout_reason = f"{reason}; pass --layout batch for [b, t, e]"


def has_independent_entries(adapter: AttentionAdapter, g: torch.Generator, layout: str) -> bool:
    """Return True if another first batch entry changes no other entry's output, and use the layout."""
    adapter.layout = layout
    x = adapter.draw(g, s=S)
    sequences = {name: getattr(x, name) for name in SEQUENCES}
    changed = x.but(**{name: torch.cat((y[:1] + 1, y[1:])) for name, y in sequences.items()})
    before, after = adapter.attempt(x), adapter.attempt(changed)
    return before is not None and after is not None and torch.equal(before.out[1:], after.out[1:])


def doubt_layout(adapter: AttentionAdapter) -> list[str]:
    """Return why the user's layout may be wrong: batch entries are independent only in the other one."""
    given, g = adapter.layout, torch.Generator().manual_seed(9)
    if documentation.documented_layout(adapter.description, adapter.text) == given:
        return []
    other = LAYOUTS[given]
    is_doubtful = has_independent_entries(adapter, g, other) and not has_independent_entries(
        adapter, g, given
    )
    adapter.layout = given
    reason = f"with --layout {given}, batch entries affect each other, and with --layout {other} they don't"
    return [f"{reason}: perhaps the option is wrong"] if is_doubtful else []


def find_causality(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find whether the candidate is always causal, from its constructor, documentation or outputs."""
    if "causal" in adapter.arguments:
        return
    flags = names.CONSTRUCTOR["causal"][1]
    settings = {path.rpartition(".")[2]: value for path, value in adapter.description.settings.items()}
    values = {**settings, **adapter.description.attributes, **adapter.init}
    on = [name for name in values if values[name] is True and name in flags]
    defaults = {arg.name: arg.default for arg in adapter.description.init or ()}
    off = any(value is False and DECODER.fullmatch(name) for name, value in {**defaults, **values}.items())
    if adapter.kind in ("sdpa", "torch-mha", "hf") and not on:
        return
    required = {arg.name for arg in adapter.description.call if arg.required}
    is_crossing = adapter.kind == "cross" and adapter.arguments["context"] not in required
    reason = None
    if not has_implementations(adapter.description):  # of transformers, where it isn't a mask
        if on and not is_crossing:
            reason = f"built with {on[0]}=True"
        elif not is_crossing and not any(adapter.init.get(name) is False for name in flags) and not off:
            reason = documentation.causal_reason(adapter.description, adapter.text, adapter.kind)
    if reason is None:
        x = adapter.draw(g, t=T, s=None)
        visible = adapter.visible_keys(x) if x.t == x.s else None
        if visible is not None and not visible.triu(1).any() and visible.tril(-1).any():
            reason = "no later token affects an earlier one"
    if reason is not None and is_crossing and on:
        # A layer that masks the future of its own tokens usually attends to all of a context.
        context = adapter.arguments["context"]
        if documentation.says_context_is_visible(context, adapter.text):
            return
        adapter.unjudged[context] = (
            f"built with {on[0]}=True, it masks later keys of {context} too, and nothing says whether that "
            "is meant."
        )
    if reason is not None:
        adapter.always_causal = True
        adapter.notes.append(f"assumed to be causal ({reason})")
        adapter.features.add("causal")


def find_vectors(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find which tokens vectors of positions belong to, and leave out those that no call accepts."""
    adapter.last_error = None
    for possible in adapter.possible_vectors() if {*VECTORS} & set(adapter.arguments) else ():
        adapter.vectors = possible
        if adapter.attempt(adapter.draw_vectors(adapter.draw(g, s=S), g)) is not None:
            return
    for role in adapter.vectors:
        name, error = adapter.arguments[role], adapter.last_error
        adapter.unjudged[name] = (
            "every call with vectors of the tokens' shape "
            f"{'returned no attention output' if error is None else f'raised an error: {error.reason}'}. "
            f"Give its role with --arg {name}=ROLE, or --arg {name}=ignore."
        )
    adapter.vectors = {}


def find_head_mask(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find the shape of a head mask: the first that is accepted and has an effect."""
    if (name := adapter.arguments.get("head-mask")) is None:
        return
    x = adapter.draw(g, s=S).but(need_weights=False)
    masked = x.but(head_mask=(torch.arange(adapter.heads) % 3 != 1).to(torch.float32))
    for letters in ("h", "1h11", "h11", "bh11"):
        adapter.head_mask_letters = letters
        changed = adapter.changed_queries(x, masked)
        if changed is not None and changed.any():
            adapter.features.add("head mask")
            return
    adapter.unjudged[name] = (
        "no trial call shows that it scales the weights of heads. "
        f"If that isn't meant, give --arg {name}=ignore."
    )


def find_window(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find by changes of keys whether a window counts the query's own token, and limits later keys too."""
    if (name := adapter.arguments.get("window")) is None:
        return
    x = adapter.draw(g)
    i, j = torch.arange(x.t)[:, None], torch.arange(x.s)
    for size, right in product((1, 0), (False, True)):
        adapter.window_size, adapter.window_right = size, right
        visible = adapter.visible_keys(x.but(window=(2, None)))
        if visible is None:
            adapter.window_right = None
            option = f"If it isn't used, give --arg {name}=ignore."
            adapter.unjudged[name] = f"every call with it raised an error. {option}"
            return
        inside = (i - j <= 2) & ((j - i <= 2) if right else (j <= i) | (not x.causal))
        if torch.equal(visible | (i == j), inside | (i == j)):
            counted = "its own token included" if size else "besides its own token"
            adapter.notes.append(f"{name}: keys that a query sees, {counted}" + " on both sides" * right)
            return
    adapter.window_size, adapter.window_right = 1, not adapter.always_causal  # the check of values fails


def find_unknown_arguments(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find which arguments of unknown roles have no effect; the others can't be left at their defaults."""
    source, x = adapter.description.source, adapter.draw(g, s=S)
    call, defaults = adapter.call(x), {arg.name: arg.default for arg in adapter.description.call}
    found = {*adapter.masks, *adapter.arguments.values(), *adapter.unjudged}
    plain = adapter.attempt(x)

    def has_no_effect(name: str) -> bool:
        """Return True if another value of a flag or a number gives the same output."""
        value = defaults[name]
        if type(value) not in (bool, int, float) or plain is None:
            return False
        changed = not value if isinstance(value, bool) else value + 1
        try:
            answer = adapter.candidate.call(replace(call, kwargs={**call.kwargs, name: changed}))
            out = adapter.read(answer.output, x, strict=False).out
        except (CodeError, UnexpectedOutput):
            return False
        return largest_difference(out, plain.out) <= adapter.allowed_error(x)

    for name in (name for name in adapter.unknown_arguments if name not in found):
        if not documentation.is_read(name, source) or has_no_effect(name):
            adapter.defaults += [name] * (name not in adapter.defaults)
            continue
        adapter.unjudged[name] = (
            f"nothing says what it is, and calls leave it at {defaults[name]!r}. Give its role with "
            f"--arg {name}=ROLE, or --arg {name}=ignore if calls don't use it."
        )


def find_padded_queries(adapter: AttentionAdapter, g: torch.Generator) -> None:
    """Find whether only the outputs of padded queries differ from attention's; they aren't compared then."""
    if "cross" in adapter.features or not {"keys", "padding"} & adapter.features:
        return
    adapter.counts_tokens = adapter.has_positions and counts_without_padding(adapter, g)
    x = adapter.draw(g)
    padding = torch.ones(x.b, x.s, dtype=torch.bool)
    # Padding before other tokens, which attend to it unless it is masked, and at the end.
    padding[0, 1] = padding[-1, 2] = padding[-1, -1] = False
    has_window = any(isinstance(part, Window) for part in adapter.parts)
    padding[x.b // 2, 1:] = not has_window  # or an empty window
    _, form = adapter.mask_form("padding")
    if adapter.counts_tokens or form.letters == "lengths":
        lengths = torch.tensor([x.s - 2, 1 if has_window else x.s, x.s - 1])[: x.b]
        padding = torch.arange(x.s) < lengths[:, None]
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


def counts_without_padding(adapter: AttentionAdapter, g: torch.Generator) -> bool:
    """Return True if outputs with padding before or after tokens are right, and not with padding between."""
    x = adapter.draw(g)
    at, right = torch.arange(x.s), []
    for padding in (at >= 2, at < x.s - 2, at != 1):
        padded = x.but(padding=padding.expand(x.b, -1).clone())
        got, expected = adapter.attempt(padded), adapter.exact(padded).out
        if got is None or got.out.shape != expected.shape:
            return False
        rows = padding.nonzero().flatten()  # of other queries, outputs don't matter
        error = largest_difference(got.out[..., rows, :], expected[..., rows, :])
        right.append(error <= adapter.allowed_error(padded))
    if right != [True, True, False]:
        return False
    adapter.judged.add(adapter.mask_form("padding")[0])  # by padding before tokens, which later draws lack
    return True


# -- outputs ---------------------------------------------------------------------------------------


def find_returned_bias(adapter: AttentionAdapter, x: Inputs) -> None:
    """Leave out the output projection's bias if a call returns it beside the output, as in Megatron."""
    returned = [tensor for tensor in top_tensors(adapter.answer(x).output)[1:] if tensor.dim() == 1]
    views = adapter.projections.bias.get("o", [])
    if any(y.shape == (bias := adapter.parameters[view.path]).shape and torch.equal(y, bias)
           for y in returned for view in views):  # fmt: skip
        del adapter.projections.bias["o"]
        adapter.read_weights()
        adapter.notes.append(f"it returns {views[0].path} beside the output, which lacks it")


def find_returned_weights(adapter: AttentionAdapter, x: Inputs, plain: Outputs | None) -> None:
    """Find whether weights are returned, always or on request, and whether they are always averaged."""
    is_optional = "weights" in adapter.arguments
    returned = adapter.attempt(x.but(need_weights=True)) if is_optional and plain is not None else plain
    if is_optional and returned is None and plain is not None:
        adapter.returns_weights_alone = True
        returned = adapter.attempt(x.but(need_weights=True))
        adapter.returns_weights_alone = returned is not None
    if reason := why_unchecked(adapter, returned, is_optional):
        adapter.notes.append(reason)
        return
    weights = None if returned is None else returned.weights
    adapter.always_weights = weights is not None and not is_optional
    if is_optional or weights is not None:  # if they are missing, the check of weights reports it
        adapter.features.add("weights")
    if "average-weights" in adapter.arguments or adapter.heads == 1 or weights is None:
        return
    is_documented, is_torch = documentation.says_averaged(adapter.text), adapter.kind == "torch-mha"
    # Other layers with PyTorch's arguments may average, too.
    may_average = is_torch or {"need_weights", "key_padding_mask"} <= {
        *adapter.arguments.values(),
        *adapter.masks,
    }
    may_average |= re.search(r"\b(averag|mean)", adapter.text, re.I) is not None
    adapter.always_averaged = is_documented or (may_average and weights.shape[1] == 1)
    if adapter.always_averaged:
        reason = " (as its documentation says)" if is_documented else ", as in PyTorch's layer" * is_torch
        adapter.notes.append(f"its returned weights are averaged over the heads{reason}")


def why_unchecked(adapter: AttentionAdapter, returned: Outputs | None, is_optional: bool) -> str:
    """Return why the second output isn't checked as weights, or "" if it is."""
    if returned is None or (returned.weights is None and not is_optional):
        return ""
    if returned.weights is None or is_optional:
        has_none = returned.weights is None and has_implementations(adapter.description)
        return "its implementation of attention returns no weights" * has_none
    if documentation.says_scores(adapter.text):
        return "its second output isn't checked: scores, as its documentation says"
    sums = returned.weights.sum(-1)
    code = " ".join([*re.findall(r"\breturn\b.*", adapter.description.source), adapter.text])
    is_named = re.search(r"weight|attn|prob|\batt\b|attention_map", code, re.I)
    if is_named or torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        return ""
    return "its second output isn't checked: nothing says that these are weights"
