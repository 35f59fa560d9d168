"""Find the parts of a candidate besides attention, by its values.

One token isolates what surrounds attention, because its only weight is 1: norms of the input and the output,
gates and residual connections. Changed keys show which keys a query can attend to. If permuted earlier tokens
change the last query's output, positions matter. What is left, norms of queries and keys, encodings, biases
and caps, is searched for together, the likely sets first. Every parameter that changes the output must belong
to a part.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, permutations, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyheads.checker.candidates.adapter import D, S
from manyheads.checker.candidates.attention import GRIDS, POSITIONS, SEQUENCES, AttentionAdapter
from manyheads.checker.candidates.documentation import documented_mechanism, parse, read_mask
from manyheads.checker.candidates.errors import ALONE, UnexpectedOutput
from manyheads.checker.candidates.forms import KEY_MASKS, NUMBERS
from manyheads.checker.candidates.parameters import GATES, GATES_BIAS
from manyheads.checker.encodings import Interleaved, Rotary
from manyheads.checker.isolation.describe import Description
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import Attention, Inputs, Weights, largest_difference
from manyheads.checker.overrides import compose
from manyheads.checker.parts import (
    ACTIVATIONS,
    GATE_FUNCTIONS,
    Activation,
    Alibi,
    Gate,
    HeadMixing,
    Norm,
    NoWindow,
    NullKeys,
    OwnKeys,
    Part,
    ProjectedDistances,
    RelativeKeys,
    Residual,
    RotaryPositions,
    Scale,
    ShiftedWindow,
    Softcap,
    TableBias,
    Temperature,
    Window,
)
from manyheads.shapes import sizes

Parts = tuple[Part, ...]
Choice = TypeVar("Choice")
Kind = TypeVar("Kind", bound=Part)

LOOSE = 1e-3  # relative error before eps is known
EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps, 0.0)
BASES = (10000.0, 500000.0, 1000000.0)
AXES = ("first", "halves", "alternating")  # of rotary encodings of images
KINDS = [("RMS", False), ("layer", False), ("RMS", True), ("L2", False), ("layer", True), ("L2", True),
         ("none", False)]  # of norms, and whether their factor is 1 plus a parameter  # fmt: skip
SEED = 71
MOST_SETS = 50_000
MOST_SURROUNDINGS = 2_000
MOST_PLAUSIBLE = 12
MOST_OPTIONS = 6
MOST_WITH_NULL_KEYS = 4_000
# Documentation of a window that counts the query's own position.
COUNTS_ITSELF = (
    r"window(?:_size)?\W*[-−]\s*1|last `?window|includ\w+ (?:itself|the current|its own)|"
    r"(?:itself|own) included|window\W*(?:keys|tokens|positions) (?:in all|in total|altogether)"
)
UNSCALED = "as usual with a learned bias or factor"
NO_SINK = -1e4
CHUNKS = r"\blook|prev|chunk|block|bucket|\bwindows\b|before"  # in code or documentation of local attention
MOST_CHUNK = 16  # tokens of a chunk whose neighbors are looked for
WINDOWS = r"window|\bws\b"  # names of the sizes of windows of images
COSINES = r"(?i:cosine|l2)|F\.normalize"  # in code or documentation of scores that are cosines
QUERY_KEY_NORM = re.compile(r"(^|[._])(qk?|k|query|key)_?(norm|scale|gamma|ln|layernorm)", re.I)
NAMED_QUERY_KEY_NORM = re.compile(  # in code or documentation
    rf"{COSINES}|(?i:\bq_?k_?norm|\b(?:q|k|query|key)_?norm|"
    r"norm\w*\((?:q|k|query|key)\b|norm\w* of (?:the )?quer)"
)
POSITION_TABLE = re.compile(r"rel|pos|bias_table|slope", re.I)


def find_parts(adapter: AttentionAdapter) -> None:
    """Find the parts of a candidate that explain it, and note them, or what is unexplained."""
    with contextlib.suppress(CodeError, UnexpectedOutput):  # which the check of values reports
        Search(adapter).find()
    adapter.notes += map(str, adapter.parts)
    name_mechanism(adapter)
    reach_caps(adapter)
    found = [part for parts in (adapter.parts, *adapter.plausible) for part in parts]
    windows = select(found, Window) + [part.window for part in select(found, NoWindow)]
    sizes_of_windows = [window.span for window in windows]
    # The keys of a loop over chunks must fill more than one chunk.
    chunks = Numbers(adapter).named_like(r"(?:^|_)(?:chunk|block|tile)(?:s|_?size|_?len|$)").values()
    sizes_of_windows += [int(n) for n in chunks if n == int(n) and 2 <= n <= 64]
    longer = max([adapter.length, *(size + 3 for size in sizes_of_windows)])
    if adapter.attempt(adapter.draw(torch.Generator().manual_seed(SEED), t=longer, s=longer)) is not None:
        adapter.length = longer  # a block may be the longest text
    add_idle_scales(adapter)
    if adapter.unknown:
        return
    used = {path for part in adapter.parts for path in part.paths}
    has_positions = bool(select(adapter.parts, RotaryPositions)) or bool(POSITIONS & set(adapter.arguments))
    for path, values in ({} if adapter.weights is None else adapter.weights.other).items():
        is_table = adapter.kind == "self" and adapter.heads in values.shape and values.dim() > 1
        is_table = is_table and not has_positions
        if path not in used and (QUERY_KEY_NORM.search(path) or (is_table and POSITION_TABLE.search(path))):
            adapter.unjudged[path] = (
                f"`{path}` {sizes(values)} has no effect: other values of it give the same outputs. "
                "If it isn't used, delete it in a subclass and check that."
            )
    for path, name in () if has_positions else adapter.description.layers.items():
        if path and re.search(r"rotary|rope", name, re.I):
            adapter.unjudged[path] = (
                f"`{path}` ({name}) has no effect: the output is that of attention without rotary encoding. "
                "If it isn't used, delete it in a subclass and check that."
            )


def add_idle_scales(adapter: AttentionAdapter) -> None:
    """Give the norm of q and k the learned scales that change no output.

    The oracle then applies them, so that a candidate that forgets to apply them fails.
    """
    norms = [norm for norm in select(adapter.parts, Norm) if norm.roles == "qk" and not norm.scale]
    if adapter.weights is None or not norms:
        return
    used = {path for part in adapter.parts for path in part.paths}
    numbers = (adapter.weights.head_size, adapter.weights.heads * adapter.weights.head_size)
    idle = [path for path, x in adapter.weights.other.items() if path not in used and x.numel() in numbers]
    if not 1 <= len(idle) <= 2:
        return
    named = ["".join(Search.names_query_or_key(path.replace("qk", ""))) for path in idle]
    roles = named if sorted(named) == ["k", "q"] else ["qk", "q k"][len(idle) - 1].split()
    scaled = [replace(norms[0], roles=role, scale=path) for role, path in zip(roles, idle, strict=True)]
    n = adapter.parts.index(norms[0])
    adapter.parts = (*adapter.parts[:n], *scaled, *adapter.parts[n + 1 :])


def name_mechanism(adapter: AttentionAdapter) -> None:
    """Note the mechanism that documentation names, if the outputs aren't those of softmax attention."""
    mechanism = documented_mechanism(adapter.description, adapter.text)
    x = adapter.draw(torch.Generator().manual_seed(SEED), s=S)
    if not mechanism or ((got := adapter.attempt(x)) and not adapter.unknown and adapter.is_right(x, got)):
        return
    adapter.mechanism = mechanism
    adapter.unknown = (
        f"something besides attention is in it: {mechanism}, as its name or documentation says. What doesn't "
        "depend on it was checked. If it is softmax attention, check a copy that doesn't say otherwise"
    )


def reach_caps(adapter: AttentionAdapter) -> None:
    """Choose the magnitude of inputs so that scores exceed the cap that they may have."""
    sets = [adapter.parts] if adapter.parts else adapter.plausible
    caps = [part.cap for parts in sets for part in select(parts, Softcap)]
    if caps:
        oracle = Attention(adapter.weights)
        oracle(adapter.draw(torch.Generator().manual_seed(4)))
        largest = float(oracle.raw_scores.abs().max()) * oracle.default_scale()
        adapter.magnitude = max(1.0, (1.5 * caps[0] / largest) ** 0.5)


class Numbers:
    """The numbers that a candidate's constructor, attributes, documentation and code contain."""

    def __init__(self, adapter: AttentionAdapter) -> None:
        description = adapter.description
        arguments = {arg.name: arg.default for arg in description.init or ()} | adapter.init
        arguments |= {arg.name: arg.default for arg in description.call}
        named = {**arguments, **description.settings, **description.attributes}
        self.named = {name: x for name, x in named.items() if type(x) in (int, float)}
        self.pairs = {
            name: (x[0], x[1])
            for name, x in named.items()
            if isinstance(x, tuple | list) and [*map(type, x)] == [int, int]
        }
        self.given = {name for name in (*arguments, *description.settings) if name in self.named}
        nodes = [node for node in ast.walk(parse(description.source)) if isinstance(node, ast.Constant)]
        constants = [float(node.value) for node in nodes if isinstance(node.value, int | float)]
        documented = map(float, re.findall(r"\b\d+(?:\.\d+)?\b", adapter.text))
        self.unnamed = dict.fromkeys([*constants, *documented])

    def named_like(self, pattern: str, given: bool = False) -> dict[str, float]:
        """Return the numbers whose names match, only those that a caller sets if `given`."""
        names = self.given if given else self.named
        return {name: x for name, x in self.named.items() if name in names and re.search(pattern, name, re.I)}

    def pairs_like(self, pattern: str) -> list[tuple[int, int]]:
        """Return the pairs of numbers whose names match; one number stands for two equal ones."""
        found = [x for name, x in self.pairs.items() if re.search(pattern, name, re.I)]
        return found + [(int(x), int(x)) for x in self.named_like(pattern).values() if x == int(x)]

    def all(self) -> set[float]:
        """Return all numbers."""
        return {*self.named.values(), *self.unnamed}


class Search:
    """The search for the parts of one candidate."""

    def __init__(self, adapter: AttentionAdapter) -> None:
        self.adapter, self.numbers = adapter, Numbers(adapter)
        self.generator = torch.Generator().manual_seed(SEED)
        self.only_named = False  # whether to try only encodings and norms that code or documentation name
        self.size = adapter.weights.head_size if adapter.weights is not None else D
        self.windows: list[ShiftedWindow] = []  # of an image, in all variants
        self.groups: dict[str, list[str]] = {}
        for path in () if adapter.weights is None else adapter.projections.unused:
            self.groups.setdefault(group_of(path), []).append(path)

    # -- measurements ------------------------------------------------------------------------------

    def run(self, x: Inputs) -> Tensor:
        """Return the candidate's output in float64."""
        return self.adapter.run(x).out.to(torch.float64)

    def draw(self, t: int, b: int = 2, s: int | None = None) -> tuple[Inputs, Tensor]:
        """Return random inputs without masks, and the candidate's output."""
        x = self.adapter.draw(self.generator, b, t, s)
        return x, self.run(x)

    def shape(self, group: str) -> tuple[int, ...]:
        """Return the shape of the first parameter of a group."""
        return tuple(self.adapter.parameters[self.groups[group][0]].shape)

    def find_effective(self, x: Inputs, out: Tensor) -> list[str]:
        """Return the groups of parameters that change this output."""
        found = []
        for group, paths in self.groups.items():
            values = {path: self.adapter.parameters[path] for path in paths}
            self.adapter.candidate.load({path: y * 1.5 + 0.3 for path, y in values.items()})
            try:
                least = 1e-5 * (1 + float(out.abs().max()))
                found += [group] if largest_difference(self.run(x), out) > least else []
            finally:
                self.adapter.candidate.load(values)
        return found

    def find_window(self, visible: Tensor) -> Window | None:
        """Return the window with which exactly these keys are visible, or None."""
        t = visible.shape[0]
        i, j = torch.arange(t)[:, None], torch.arange(t)[None]
        causal = i >= j if self.adapter.always_causal else torch.ones_like(visible)
        known = {int(x) for x in self.numbers.all() if x == int(x)}
        kinds = ["sliding", "both sides", "chunks"]
        if re.search(CHUNKS, self.adapter.description.source + self.adapter.text, re.I):
            kinds += ["chunks, the one before", "chunks, both neighbors"]
        for kind, size in product(kinds, range(2, t)):
            for first in (0, 1, 2, 4):
                window = Window(size, kind, first)
                legal = window.visible(i, j) & causal
                is_known = {size, size - 1, 2 * size - 1} & known
                if is_known and torch.equal(legal, visible) and not torch.equal(legal, causal):
                    is_cut = kind == "sliding" and not self.adapter.always_causal and self.masks_keys_only
                    return replace(window, kind="both sides") if is_cut else window  # the future is a bug
        return None

    def positions_matter(self, t: int) -> bool:
        """Return True if another order of the other tokens changes the last query's output."""
        if t < 3:
            return False
        x, out = self.draw(t, 2, t)
        moved = self.run(self.adapter.reorder(x))
        error = largest_difference(moved[..., -1, :], out[..., -1, :])
        return error > 1e-4 * float(out.abs().max())

    # -- search ------------------------------------------------------------------------------------

    def find(self) -> None:
        """Find the parts, or what is unexplained."""
        adapter = self.adapter
        windows = [
            int(x) for x in self.numbers.named_like(r"window|local|chunk|band").values() if 2 <= x <= 128
        ]
        t = max([6, *(size + 3 for size in windows)])
        calls = [self.draw(t, 2, t + 2), self.draw(5, 2, 5)]
        if calls[0][1].shape != adapter.exact(calls[0][0]).out.shape:
            return
        if not self.window_sizes() and any(self.confirm((), n) for n in range(len(adapter.packings))):
            self.add_stated_parts()
            return
        visible = None
        if "cross" not in adapter.features or adapter.weights is None:
            # Chunks that see the ones beside them show it in the third.
            n = max([t, 8, *(2 * size + 2 for size in windows if size <= MOST_CHUNK)])
            visible = adapter.visible_keys(adapter.draw(self.generator, 1, n, n))
            visible = (
                adapter.visible_keys(adapter.draw(self.generator, 1, t, t)) if visible is None else visible
            )
        window = None if visible is None else self.find_window(visible)
        adapter.has_positions = self.positions_matter(min(t, 6) if window is None else min(6, window.size))
        effective = self.find_effective(*calls[0])
        insides = (self.shifted_windows() or [()]) if window is None else [(window,)]
        inside: Parts = insides[0]
        outer, found_around = self.find_surroundings()
        rest = [group for group in effective if group not in outer]
        surroundings: list[tuple[int, Parts]] = []

        def candidates() -> Iterator[tuple[int, Parts]]:
            for n, around in islice(found_around, 12):
                surroundings.append((n, around))
                yield from (
                    (n, around + parts + each)
                    for parts in self.score_parts(rest)
                    for each in insides
                    if fits_windows(parts, each)
                )
            yield from ((0, parts) for parts in self.with_more_keys(effective, inside))

        readings = adapter.readings
        for n, found in candidates():
            if Residual() in found and not (has_outer_norm(found) or self.says_residual):
                continue  # of a layer without a norm, a residual connection is a bug
            if self.has_idle_norm(found, effective) or self.error(found, readings[n], calls) > LOOSE:
                continue
            refined = self.refine(found, readings[n])
            if any(self.confirm(each, n) for each in self.window_variants(refined)):
                self.add_stated_parts()
                return
        self.describe_unknown(effective, outer, surroundings, inside or self.stated_window())

    def window_sizes(self) -> list[int]:
        """Return the sizes of windows that a caller sets, if the candidate masks by itself.

        It does if no mask of its callers can have a window.
        """
        adapter = self.adapter
        if adapter.count is not None:  # all of them are a window
            return []
        names = {*adapter.init, *self.numbers.given, *adapter.description.attributes}
        names = names if self.masks_keys_only and not self.flags_off() else set()
        given = self.numbers.named_like(r"window").items()
        return [int(x) for name, x in given if name in names and 1 <= x <= 128]

    @property
    def masks_keys_only(self) -> bool:
        """Return True if no mask of the callers can be causal or have a window."""
        return all(
            role.endswith("of-keys") or role in NUMBERS or is_documented_for_keys(name, self.adapter.text)
            for name, role in self.adapter.masks.items()
        )

    def stated_window(self) -> Parts:
        """Return the window that a caller sets, if there is one."""
        return tuple(Window(size, first=self.count_first()) for size in self.window_sizes()[:1])

    def shifted_windows(self) -> list[Parts]:
        """Return the windows, perhaps shifted, that a caller sets, if tokens are the pixels of images."""
        if not self.adapter.images:
            return []
        [size, *_] = self.numbers.pairs_like(WINDOWS)
        shifts = self.numbers.pairs_like(r"shift")
        shifts = [pair for pair in dict.fromkeys([*shifts, (0, 0)]) if max(pair) < max(size)]
        fills = re.findall(r"(?<![\w.])-(?:100(?:\.0?)?|1e\d)\b", self.adapter.description.source)
        fill, images = min(map(float, fills), default=-math.inf), tuple(self.adapter.images)
        # Which of these variants it is, only images show that windows don't divide.
        turns_off = re.search(r"shift\w*(?:\[\w+\])? *= *\(?0", self.adapter.description.source)
        rolls = (False, True) if turns_off else (True, False)
        padded = ((False, True), rolls) if len(images) > 1 else ((False,), (True,))
        variants = product(shifts, *padded)
        found = [ShiftedWindow(images, size, shift, fill, (0, 1), *each) for shift, *each in variants]
        firsts: dict[tuple[int, int], Parts] = {each.shift: (each,) for each in reversed(found)}
        self.windows = found
        return [firsts[shift] for shift in shifts]

    def window_variants(self, parts: Parts) -> Iterator[Parts]:
        """Yield the parts with each variant of the windows of an image that has the same shift."""
        if not (windows := select(parts, ShiftedWindow)):
            yield parts
        for window in (each for each in self.windows if windows and each.shift == windows[0].shift):
            tables = (
                replace(x, within=window) if isinstance(x, TableBias) and x.within else x for x in parts
            )
            yield tuple(window if isinstance(x, ShiftedWindow) else x for x in tables)

    def count_first(self) -> int:
        """Return the number of first tokens that a window always shows, as a caller sets it."""
        named = self.numbers.named_like(r"(?:sink|first|global|prefix)_?(?:token|size|len|num|$)", given=True)
        return next((int(x) for x in named.values() if type(x) is int and 1 <= x <= 16), 0)

    def flags_off(self) -> list[str]:
        """Return the flags of a window that are off."""
        description = self.adapter.description
        arguments = {arg.name: arg.default for arg in description.init or ()}
        values = {**arguments, **description.settings, **description.attributes, **self.adapter.init}
        flag = r"(?:use|enable|apply|with)_(?:\w+_)?window(?:_attention)?"
        return [name for name, x in values.items() if x is False and re.fullmatch(flag, name)]

    def add_stated_parts(self) -> None:
        """Add the parts that a caller sets by a number and that the outputs lack, so that checks fail."""
        adapter = self.adapter
        for flag in self.flags_off()[:1]:
            adapter.parts = tuple(
                NoWindow(flag, part) if isinstance(part, Window) else part for part in adapter.parts
            )
        is_exact = re.search(COUNTS_ITSELF, adapter.text, re.I)
        for size in self.window_sizes():
            legal = {"sliding": {size} if is_exact else {size, size + 1}}
            legal["both sides"] = {size, size + 1, size // 2 + 1}
            windows = select(adapter.parts, Window)
            if not any(part.size in legal.get(part.kind, {part.size}) for part in windows):
                rest = tuple(part for part in adapter.parts if part not in windows)
                adapter.parts = (*rest, Window(size, first=self.count_first()))
        for cap in self.stated_caps():
            if not select(adapter.parts, Softcap):
                adapter.parts = (*adapter.parts, Softcap(float(cap)))

    def has_idle_norm(self, parts: Parts, effective: list[str]) -> bool:
        """Return True if a group of parameters has no effect although a norm like it has, which is a bug."""
        other = {} if self.adapter.weights is None else self.adapter.weights.other
        used = {other[norm.scale].shape for norm in select(parts, Norm) if norm.scale}
        idle = [path for group, paths in self.groups.items() if group not in effective for path in paths]
        return any(other[path].shape in used for path in idle)

    def find_surroundings(self) -> tuple[list[str], Iterator[tuple[int, Parts]]]:
        """Return the parameters that change one token, and the orders of weights and parts that fit it."""
        adapter, sink = self.adapter, None
        readings = adapter.readings
        if adapter.weights is None:
            return [], iter([(0, ())])
        if adapter.weights.sink is not None:  # which takes a part of the weight of one token
            path, sink = str(adapter.projections.sink), adapter.weights.sink
            adapter.candidate.load({path: torch.full_like(adapter.parameters[path], NO_SINK)})
            readings = [replace(w, sink=torch.full_like(sink, NO_SINK)) for w in readings if w is not None]
        try:
            x = adapter.draw(self.generator, 3, 1, 1)
            if adapter.count or adapter.prefix:  # equal tokens instead of one
                x = adapter.replace_sequences(x, query=x.query[:, :1].expand_as(x.query))
            calls = [(x, self.run(x))]
            outer = self.find_effective(*calls[0])
            tried = product(islice(self.surroundings(outer), MOST_SURROUNDINGS), enumerate(readings))
            found = ((n, parts) for parts, (n, each) in tried if self.error(parts, each, calls) < LOOSE)
            return outer, found
        finally:
            if sink is not None:
                adapter.candidate.load({path: adapter.parameters[path]})

    def refine(self, parts: Parts, weights: Weights | None) -> Parts:
        """Return the parts with the eps of each norm that fits best, also for small inputs."""
        x, out = self.draw(5, 2, 7)
        small = self.adapter.replace_sequences(x, **{name: getattr(x, name) * 0.02 for name in SEQUENCES})
        calls = [(x, out), (small, self.run(small))]
        values = dict.fromkeys([*EPS, *(float(x) for x in self.numbers.all() if 0 < x < 0.01)])
        for n, part in enumerate(parts):
            if isinstance(part, Norm) and part.kind != "none":
                tried = [(*parts[:n], replace(part, eps=eps), *parts[n + 1 :]) for eps in values]
                parts = min(tried, key=lambda each: self.error(each, weights, calls))
        return parts

    def confirm(self, parts: Parts, n: int) -> bool:
        """Adopt these parts, with the n-th order of packed weights, if they explain fresh inputs."""
        adapter, before = self.adapter, self.adapter.packings
        adapter.parts, adapter.packings = parts, before[n:] + before[:n]
        lengths = [7, 4, 9]
        if GRIDS & set(adapter.arguments):  # several rows and columns
            lengths += [adapter.prefix + 6, adapter.prefix + 12]
        counts = {n: math.prod(image) for n, image in enumerate(adapter.images)}
        for table in select(parts, TableBias):
            lengths += [table.max_distance + 5] if table.kind == "buckets" else []
            lengths += [max(adapter.parameters[table.path].shape) + 5] if table.kind == "distances" else []
        for n, t in enumerate(lengths):
            x = adapter.draw(self.generator, 2, t, t + 1, count=counts.get(n))
            outputs = adapter.attempt(x) if t > 9 else adapter.run(x)
            if outputs is None:  # longer than its table
                continue
            if not largest_difference(outputs.out, adapter.exact(x).out) <= adapter.allowed_error(x):
                adapter.parts, adapter.packings = (), before
                return False
        return True

    def describe_unknown(
        self, effective: list[str], outer: list[str], surroundings: list[tuple[int, Parts]], inside: Parts
    ) -> None:
        """Note what is unexplained, and the sets of parts that the candidate may have besides a bug."""
        adapter = self.adapter
        paths = [path for group in effective for path in self.groups[group]]
        adapter.is_order_unknown = adapter.has_positions and not paths
        reasons = [f"the parameter `{path}` {sizes(adapter.parameters[path])}" for path in paths]
        reasons += ["the order of earlier tokens"] if adapter.has_positions else []
        if reasons:
            mixed = "heads and tokens are mixed (e.g. by a reshape without a transpose)"
            mixed = f", {'and perhaps' if paths else 'or'} {mixed}"
            mixed = mixed if adapter.has_positions and adapter.heads != 1 else ""
            change = "change" if len(reasons) > 1 else "changes"
            adapter.unknown = (
                f"something besides attention is in it{mixed}: {', '.join(reasons)} {change} the output, "
                "and no known part or bug explains how"
            )
        if paths:
            adapter.unknown += f". {remove_parameters(adapter.description, adapter.init, paths)}"
        around = [parts for _, parts in surroundings]
        inner = {self.shape(group) for group in self.groups if group not in outer}
        if not around or any(self.shape(group) in inner for group in outer):
            # Something is wrong with one token. Leave norms of queries and keys to the scores.
            outer = [group for group in outer if self.shape(group) not in inner]
            # One token shows no part if it has no weight, as beside a sink whose column is kept.
            hidden = [
                group for group in self.groups if group not in ([] if not around else effective) + outer
            ]
            hidden = [group for group in hidden if not self.names_query_or_key(group)]
            outer += [group for group in hidden if self.shape(group) == (adapter.widths[0],)]
            around = list(islice(self.surroundings(outer), MOST_PLAUSIBLE // 2)) or [()]
        rest = [group for group in self.groups if group not in outer]
        self.only_named = True
        scores = list(islice(self.score_parts(rest), MOST_PLAUSIBLE)) or [()]
        pairs = islice(ranked([scores, [*dict.fromkeys(around)]]), MOST_PLAUSIBLE)
        sets = [outside + parts + inside for parts, outside in pairs]
        sets = [x for x in sets if Residual() not in x or has_outer_norm(x) or self.says_residual]
        # A bug can look like a window, so the surroundings are tried without one, too.
        others = [around[0] + parts + inside for parts in self.each_option(rest)]
        adapter.plausible = [*dict.fromkeys([*sets, *others, *around[:2], ()])]
        orders = dict.fromkeys(n for n, _ in surroundings)
        adapter.packings = [adapter.packings[n] for n in orders] or adapter.packings

    # -- what surrounds attention ------------------------------------------------------------------

    @property
    def says_residual(self) -> bool:
        """Return True if documentation or an argument names a residual connection."""
        arguments = (*(self.adapter.description.init or ()), *self.adapter.description.call)
        said = " ".join((self.adapter.text, *(arg.name for arg in arguments)))
        return re.search(r"residual|skip connection", said, re.I) is not None

    @property
    def has_query_norm(self) -> bool:
        """Return True if a norm may be that of the queries' input alone, which one token doesn't show."""
        widths, layers = self.adapter.widths, self.adapter.description.layers
        norms = [group for group in self.groups if "Norm" in layers.get(group, "")]
        return "cross" in self.adapter.features and any(self.shape(x) == widths[:1] for x in norms)

    def surroundings(self, groups: list[str]) -> Iterator[Parts]:
        """Yield sets of parts that surround attention and use these groups, the likely ones first."""
        options = [list(self.outer_options(group)) for group in groups]
        other = {} if self.adapter.weights is None else self.adapter.weights.other
        if GATES in other:
            bias = GATES_BIAS if GATES_BIAS in other else ""
            options.insert(0, [Gate(GATES, bias, function) for function in GATE_FUNCTIONS])
        for chosen in ranked(options):
            has_norm = self.has_query_norm or has_outer_norm(chosen)
            yield from arrange(chosen)
            if select(chosen, Residual):  # projected, as in a block that ends in an activation
                for function in ACTIVATIONS:
                    if re.search(rf"\b{function}\b", self.adapter.description.source, re.I):
                        yield from arrange((*chosen, Activation(function)))
            if has_norm or self.says_residual:
                yield from arrange((*chosen, Residual()))

    def outer_options(self, group: str) -> Iterator[Part]:
        """Yield the parts around attention, or norms of values, that a group of parameters may be."""
        weights, paths = self.adapter.weights, self.groups[group]
        assert weights is not None
        h, dv = weights.heads, weights.weight["v"].shape[0] // weights.key_heads
        q, k, v = self.adapter.widths
        shapes = {path: weights.other[path].shape for path in paths}
        matrices = [path for path in paths if len(shapes[path]) == 2 and min(shapes[path]) > 1]
        for path in matrices:
            bias = next((other for other in paths if other != path), "")
            out, width = shapes[path]
            for function in GATE_FUNCTIONS:
                if width == q and out in (h * dv, h):
                    yield Gate(path, bias, function)
                if width == q and out == weights.out_width:
                    yield Gate(path, bias, function, "output")
            if width == q and out == weights.out_width:
                yield Residual(path, bias)
            if out == width == h:
                yield from (HeadMixing(path, "weights", is_transposed) for is_transposed in (False, True))
        if matrices:
            return
        n = weights.other[paths[0]].numel()
        places = [("input", "qkv")] * (n == q)
        places += [("input", "kv")] * (n in (k, v) and "cross" in self.adapter.features)
        places += [("input", "q")] * (n == q and "cross" in self.adapter.features)
        places += [("output", "")] * (n in (1, weights.out_width))
        places += [("merged", ""), ("width", "v")] * (n == h * dv)
        places += [("heads", "v"), ("mixed", "")] * (n in (dv, h * dv))
        yield from self.norms(paths, places)

    def norms(self, paths: list[str], places: list[tuple[str, str]]) -> Iterator[Norm]:
        """Yield the norms at these places, of these roles, that one or two vectors may belong to."""
        scale, bias = paths[0], ""
        if len(paths) == 2:
            bias = next((path for path in paths if re.search(r"bias|beta|shift|\bb$", path)), paths[1])
            scale = next(path for path in paths if path != bias)
        group = group_of(scale)
        owner = self.adapter.description.layers.get(group, "")
        named = (self.numbers.named.get(f"{group}.{name}") for name in ("eps", "epsilon", "variance_epsilon"))
        eps = next((float(x) for x in named if x is not None), EPS[0])
        if owner == "GroupNorm":
            groups = int(self.numbers.named[f"{group}.num_groups"])
            inputs = (place for place in places if place[0] == "input")
            yield from (Norm("group", *place, scale, bias, groups=groups) for place in inputs)
            return
        likely = "RMS" if re.search("rms", owner, re.I) else "layer" if bias or "LayerNorm" in owner else ""
        if not owner:
            code = re.sub(
                r"\b(?:RMS|Layer)Norm\b", "", self.adapter.description.source
            )  # of other parameters
            words = {
                "L2": r"normalize\(|l2|cosine",
                "RMS": r"rms|rsqrt",
                "layer": r"layer_norm|\.(?:var|std)\(",
            }
            likely = next((kind for kind, word in words.items() if re.search(word, code, re.I)), "none")
        adds_one = float(self.adapter.parameters[scale].mean()) < 0.5  # a scale that begins at 0
        kinds = sorted(KINDS, key=lambda each: (each[0] != likely, each[1] != adds_one))
        for (kind, plus_one), (place, roles) in product(kinds, places):
            if not (bias and kind in ("L2", "none")):
                yield Norm(kind, place, roles, scale, bias, eps, plus_one)

    # -- learned keys and values -------------------------------------------------------------------

    def null_keys(self) -> Iterator[NullKeys]:
        """Yield the parameters that may be learned keys and values."""
        shapes = {path: self.shape(group) for group, paths in self.groups.items() for path in paths[:1]}
        for path, shape in shapes.items():
            if shape[0] == 2 and len(shape) > 1 and shape[-1] == self.size:
                yield NullKeys(path)
            values = re.sub(r"k(?=$|_|\.)", "v", path).replace("key", "value")
            if values != path and shapes.get(values) == shape and shape[-1] % self.size == 0:
                yield NullKeys(path, values)

    def sees_queries(self) -> bool:
        """Return True if a query changes the outputs of others, although the keys are those of a context."""
        if self.adapter.weights is None or "cross" not in self.adapter.features:
            return False
        if self.adapter.widths[0] != self.adapter.widths[1]:
            return False
        x = self.adapter.draw(self.generator, 2, 3, 4)
        query = x.query.clone()
        query[:, 0] += torch.linspace(-2, 3, query.shape[-1])
        changed = self.adapter.changed_queries(x, self.adapter.replace_sequences(x, query=query))
        return changed is not None and bool(changed[1:].all())

    def with_more_keys(self, effective: list[str], inside: Parts) -> Iterator[Parts]:
        """Yield sets of parts with further keys, which leave no weight of 1 to a token that is alone."""
        learned: list[Parts] = [(null,) for null in self.null_keys()]
        if self.sees_queries():
            learned = [(OwnKeys(), *null) for null in [(), *learned]]
        for more in learned:
            used = {path for part in more for path in part.paths}
            rest = [group for group in effective if not {*self.groups[group]} & used]
            inner = [x for x in rest if self.names_query_or_key(x) or not any(self.outer_options(x))]
            around = list(islice(self.surroundings([x for x in rest if x not in inner]), MOST_SURROUNDINGS))
            scores = list(islice(self.score_parts(inner), MOST_SURROUNDINGS))
            for outside, parts in islice(ranked([around, scores]), MOST_WITH_NULL_KEYS):
                yield (*outside, *more, *parts, *inside)
                yield (*outside, *parts, *more, *inside)

    # -- scores ------------------------------------------------------------------------------------

    def score_parts(self, groups: list[str]) -> Iterator[Parts]:
        """Yield sets of parts of the scores that use these groups of parameters, the likely ones first."""
        distances, groups = self.projected_distances(groups)
        slots: list[list[Parts]] = [[(part,) for part in self.score_options(group)] for group in groups]
        slots += [distances] if distances else []
        slots += [[(), *self.plain_norms()], self.encodings(), self.cap_options()]
        scales = self.scales()
        is_stated = self.only_named and any(x.reason in ("as documented", "as in T5") for x in scales)
        slots += [[*([] if is_stated else [()]), *((scale,) for scale in scales)]]
        for chosen in ranked(slots):
            parts = tuple(part for each in chosen for part in each)
            if not is_plausible(parts):
                continue
            norms = tuple(norm for norm in select(parts, Norm) if norm.place != "input")
            rotary = tuple(select(parts, RotaryPositions))
            rest = tuple(part for part in parts if part not in norms + rotary)
            yield norms + rotary + rest
            if norms and rotary:
                yield rotary + norms + rest

    def each_option(self, groups: list[str]) -> Iterator[Parts]:
        """Yield each part of the scores that these groups may be, with cosines too if the code has them."""
        is_cosine = re.search(COSINES, self.adapter.description.source + self.adapter.text)
        around: list[tuple[Parts, Parts]] = [((Norm("L2"),), (Scale(1.0, UNSCALED),))] if is_cosine else []
        options = [list(self.score_options(group)) for group in groups]
        for chosen in islice(product(*options), MOST_OPTIONS) if groups else ():
            for first, last in [*around, ((), ())]:
                if is_plausible(parts := (*first, *chosen, *last)):
                    yield parts

    def score_options(self, group: str) -> Iterator[Part]:
        """Yield the parts of the scores that a group of parameters may be."""
        weights, paths = self.adapter.weights, self.groups[group]
        assert weights is not None
        h, g, d = weights.heads, weights.key_heads, self.size
        shape, path = weights.other[paths[0]].shape, paths[0]
        n = weights.other[path].numel()
        named = self.names_query_or_key(group)
        roles = named if len(named) == 1 else ["qk", "q", "k"]
        wide = [role for role in roles if n == (g if role == "k" else h) * d > d]
        sides = [size for size in shape if size > 1]
        if len(sides) > 1 and sides[-1] != d:  # of as many rows as a head has entries, such as a table
            wide = []
        places = [("heads", role) for role in roles if n in (1, d)]
        if n in self.adapter.widths[:2] and "cross" in self.adapter.features:
            places += [("input", role) for role in roles if role != "qk"]
        order = ("width", "heads") if len(shape) == 1 else ("heads", "width")
        places += [(place, role) for place in order for role in wide]
        yield from self.norms(paths, places)
        if n in (1, h) and len(paths) == 1:
            has_exponential = re.search(r"\bexp\(", self.adapter.description.source)
            forms = ["factor", "exponential", "divisor"]
            forms.sort(key=lambda form: has_exponential is not None and form != "exponential")
            if re.search(rf"/=? *(?:self\.)?{re.escape(paths[0])}\b", self.adapter.description.source):
                forms.sort(key=lambda form: form != "divisor")
            yield from (Temperature(path, form) for form in forms)
            yield Alibi(path, is_symmetric=not self.adapter.always_causal)
        yield from self.vectors_of_distances(path, shape)
        if n == h * h and len(shape) >= 2 and shape[0] == h:
            yield from (HeadMixing(path, "scores", is_transposed) for is_transposed in (False, True))
        if len(shape) >= 2 and h in shape and len(paths) == 1:
            for within in (each for [each] in self.shifted_windows() if isinstance(each, ShiftedWindow)):
                if math.prod(2 * size - 1 for size in within.size) * h == n:
                    yield TableBias(path, "window", window=within.size, within=within)
            shifts = [int(x) for x in self.numbers.named_like(r"shift").values()]
            for first, shift in product((0, 1), [*shifts[:1], 0]):  # a class token may be first
                for window in factorize(max(0, (self.adapter.count or 0) - first)):
                    if (math.prod(2 * size - 1 for size in window) + 3 * first) * h == n:
                        yield TableBias(path, "window", window=window, shift=shift, first=first)
            if len(shape) > 2 and shape[-1] == shape[-2]:
                yield TableBias(path, "positions")
            elif len(shape) == 2:
                ends = (False, True) if self.adapter.kind == "cross" else (False,)
                is_decoder = self.adapter.description.attributes.get("is_decoder") is True
                both = (False, True) if self.adapter.always_causal or is_decoder else (True,)
                distances = {128, *(int(x) for x in self.numbers.named_like(r"dist").values())}
                factors = (1.0, d**0.5)  # as in x-transformers
                buckets = product(factors, ends, sorted(distances), both)
                for factor, at_end, max_distance, is_bidirectional in buckets:
                    yield TableBias(
                        path, "buckets", max_distance, is_bidirectional, ends_together=at_end, factor=factor
                    )
                yield TableBias(path, "distances")
                yield TableBias(path, "distances", sign=-1)

    def projected_distances(self, groups: list[str]) -> tuple[list[Parts], list[str]]:
        """Return Transformer-XL's parts of the scores, if parameters have their shapes, and the rest."""
        weights = self.adapter.weights
        if weights is None or not self.adapter.always_causal:
            return [], groups
        h, d = weights.heads, self.size
        biases = [group for group in groups if self.shape(group) == (h, d) and len(self.groups[group]) == 1]
        matrices = [group for group in groups if len(self.shape(group)) == 2 and len(self.groups[group]) == 1]
        projections = [group for group in matrices if self.shape(group)[0] == h * d]
        if len(biases) != 2 or len(projections) != 1:
            return [], groups
        [path] = self.groups[projections[0]]
        orders = permutations(self.groups[group][0] for group in biases)
        found: list[Parts] = [(ProjectedDistances(weight=path, path=u, values=v),) for u, v in orders]
        return found, [group for group in groups if group not in (*biases, *projections)]

    def vectors_of_distances(self, path: str, shape: tuple[int, ...]) -> Iterator[RelativeKeys]:
        """Yield the vectors of distances that a table may have, for all heads or for each."""
        assert self.adapter.weights is not None
        h, d = self.adapter.weights.heads, self.size
        rows = {(d,): shape[0], (h * d,): shape[0], (h, d): shape[0]}.get(shape[1:], 0)
        rows = shape[1] if shape[::2] == (h, d) else rows
        if rows > 1 and rows % 2:
            yield from (RelativeKeys(path, *each) for each in product((-1, 1), ("q", "qk")))
        if rows > 1 and self.adapter.always_causal:
            yield from (RelativeKeys(path, rows=each) for each in ("last", "first"))

    @staticmethod
    def names_query_or_key(group: str) -> list[str]:
        """Return "q" or "k" if the name of a group of parameters has it."""
        return [x for x in "qk" if re.search(rf"(^|[._]){x}|{x}([._]|$)", group.lower())]

    def plain_norms(self) -> Iterator[Parts]:
        """Yield norms of q and k without parameters, if the code has a norm."""
        text = self.adapter.description.source + self.adapter.text
        if re.search(r"norm", text, re.I) and (not self.only_named or NAMED_QUERY_KEY_NORM.search(text)):
            if re.search(f"{COSINES}|qk_?norm", text, re.I):
                yield (Norm("L2"),)
            yield (Norm("RMS"),)
            yield (Norm("layer"),)

    def encodings(self) -> list[Parts]:
        """Return the encodings of positions without parameters, the likely ones first."""
        text = self.adapter.description.source + self.adapter.text
        has_angles = re.search(r"rotary|rope\b|cos\b|polar", text, re.I)
        has_slopes = re.search(r"alibi|slope", text, re.I)
        is_named = has_angles or re.search(r"alibi", text, re.I)
        if not (is_named or (self.adapter.has_positions and not self.only_named)):
            return [()]
        partial = [
            int(x if type(x) is int else x * self.size)
            for x in self.numbers.named_like(r"rot|rope|partial|pct|percent").values()
        ]
        sizes = [n for n in dict.fromkeys([*partial, self.size]) if 2 <= n <= self.size and n % 2 == 0]
        pairs: list[type[Rotary]] = [Rotary, Interleaved]
        if re.search(r"::2|complex|interleav", text):
            pairs.reverse()
        if self.adapter.draw(self.generator, 1, 2).angles is not None:
            given = product(sizes, pairs)
            return [(RotaryPositions(pair, n, self.size, is_given=True),) for n, pair in given]
        bases = [float(x) for x in self.numbers.named_like(r"base|theta", given=True).values() if x > 1]
        if re.search(r"\bntk", text, re.I):  # its base is multiplied by a power of a factor
            alphas = [x for x in self.numbers.named_like(r"ntk|alpha", given=True).values() if x > 1]
            d = sizes[0]
            scaled = [
                base * alpha ** (d / (d - 2)) for base, alpha in product(bases or BASES, alphas) if d > 2
            ]
            bases = scaled + bases * (not scaled or "dynamic" in text.lower())
        scaling = self.numbers.named_like(r"factor|scaling", given=True).values()
        factors = [1.0, *(y for x in scaling if x not in (0, 1) for y in (1 / x, x))]
        bases = bases or sorted(BASES, key=lambda base: base not in self.numbers.unnamed)
        computed = product((1, -1), bases, factors, sizes, pairs)
        rotary: list[Parts] = [
            (RotaryPositions(pair, n, self.size, base, factor, direction),)
            for direction, base, factor, n, pair in computed
        ]
        before_scale = (
            r"(?:alibi|slope|bias)[^.;]*\b(?:before (?:the )?(?:scores are )?scal(?:e|ed|ing)|"
            r"(?:scaled|divided) (?:by|like|with|along))\b"
        )
        is_scaled = re.search(before_scale, text, re.I) is not None
        if has_angles:
            rotary = [*self.grid_encodings(bases or BASES, factors, sizes, pairs), *rotary]
        alibi: list[Parts] = [(Alibi(is_symmetric=not self.adapter.always_causal, is_scaled=is_scaled),)]
        if self.only_named:
            return [*(alibi if has_slopes else []), *(rotary if has_angles else []), ()]
        found = alibi + rotary if has_slopes else rotary + alibi
        return [*found, ()] if self.adapter.has_positions and has_angles else [(), *found]

    def grid_encodings(
        self, bases: Iterable[float], factors: list[float], sizes: list[int], pairs: list[type[Rotary]]
    ) -> Iterator[Parts]:
        """Yield the rotary encodings of the tokens of an image, by their rows and columns."""
        text = self.adapter.description.source + self.adapter.text
        is_image = GRIDS & set(self.adapter.arguments) or self.adapter.grid_axes == ["h", "w"]
        if not (is_image or re.search(r"axial|\b2-?d\b", text, re.I)):
            return
        centered = (True, False) if re.search(r"math\.pi|torch\.pi|np\.pi", text) else (False,)
        orders = product((1, -1), bases, factors, sizes, (False, True), centered, AXES, pairs)
        for direction, base, factor, n, columns_first, is_centered, axes, pair in orders:
            if n % 4 == 0 and not (axes == "halves" and pair is Interleaved):
                yield (
                    RotaryPositions(pair, n, self.size, base, factor, direction, axes=axes,
                                    columns_first=columns_first, prefix=self.adapter.prefix,
                                    is_centered=is_centered),
                )  # fmt: skip

    def cap_options(self) -> list[Parts]:
        """Return the caps that scores may have, and none: last if a caller sets one."""
        stated, found = self.stated_caps(), [*self.numbers.named_like(r"cap|clip").values()]
        if stated:
            found = stated
        elif "tanh" in self.adapter.description.source:
            found += [x for x in self.numbers.unnamed if x > 1]
        caps: list[Parts] = [(Softcap(float(x)),) for x in dict.fromkeys(found) if x > 0]
        return [*caps, ()] if stated else [(), *caps]

    def stated_caps(self) -> list[float]:
        """Return the caps of the scores that a caller sets."""
        return [x for x in self.numbers.named_like(r"soft_?cap|logit_?cap").values() if x > 0]

    def scales(self) -> list[Scale]:
        """Return the scales of the scores other than 1/√d that are documented or usual."""
        found = [
            Scale(float(value), f"{name} = {x:g}")
            for name, x in self.numbers.named_like(r"scal|temperature|\btau", given=True).items()
            for value in scale_values(name, x, self.adapter.description.source)
        ]
        unscaled_words = r"\b(?:unscaled|no scal|without scal)|(?:\bnot|n't) (?:scaled|divided)"
        if re.search(unscaled_words, self.adapter.text, re.I):
            found.append(Scale(1.0, "as documented"))
        if "relative_attention_num_buckets" in self.numbers.named:
            found.append(Scale(1.0, "as in T5"))
        if self.adapter.grid and self.adapter.heads == 1 and any(self.shape(x) == (1,) for x in self.groups):
            found.append(Scale(1.0, "as in SAGAN, whose output has a learned factor"))
        unscaled = [Scale(1.0, UNSCALED)]
        return unscaled + found if re.search(COSINES, self.adapter.description.source) else found + unscaled

    # -- comparison --------------------------------------------------------------------------------

    def error(self, parts: Parts, weights: Weights | None, calls: list[tuple[Inputs, Tensor]]) -> float:
        """Return the largest relative error of the oracle with these parts."""
        oracle = compose(Attention, *(part.oracle for part in parts))(weights)
        worst = 0.0
        for x, out in calls:
            try:
                worst = max(worst, Attention.difference(oracle(x.to(torch.float64)).out, out))
            except (RuntimeError, IndexError, ZeroDivisionError):
                return float("inf")
        return worst


def scale_values(name: str, x: float, source: str) -> tuple[float, ...]:
    """Return the factors of the scores that a setting stands for, by what code does with it.

    A factor that code doesn't compute from the setting would be a bug, such as a scale that is applied twice.
    """
    if x in (0, 1):
        return (x,) * bool(x)
    read = rf"(?:\w+\.)*{re.escape(name)}\b"
    number = rf"(?:float\()?{read}\)?"
    # query_pre_attn_scalar is the number whose root divides the scores, as the head size usually is.
    is_root = rf"{number} ?\*\* ?\(?-? ?(?:0?\.5|1 ?/ ?2)|sqrt\({number}|{number}\.r?sqrt\("
    if name.endswith("scalar") or re.search(is_root, source):
        return (abs(x) ** -0.5,)
    is_divisor = re.search(rf"(?<!/)/=? ?{number}|\bdiv_?\({number}", source)
    is_factor = re.search(rf"\*=? ?{number}|\b{read} ?\*(?!\*)|\bmul_?\({number}|scale ?= ?{number}", source)
    if is_divisor or is_factor:
        return (x,) * bool(is_factor) + (1 / x,) * bool(is_divisor)
    return (x, 1 / x)


def factorize(n: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of windows of n tokens: of two axes, and of three that have more than one token."""
    pairs = [(k, n // k) for k in range(1, n + 1) if n % k == 0]
    yield from pairs
    yield from ((a, b, k // b) for a, k in pairs for b in range(2, k) if a > 1 and k % b == 0)


def is_documented_for_keys(name: str, text: str) -> bool:
    """Return True if documentation states shapes of a mask, and all are of keys alone."""
    documented = read_mask(name, text)
    return bool(documented.shapes) and not documented.has_queries and documented.shapes <= {*KEY_MASKS}


def select(parts: Iterable[Part], kind: type[Kind]) -> list[Kind]:
    """Return the parts of a kind."""
    return [part for part in parts if isinstance(part, kind)]


def ranked(slots: list[list[Choice]]) -> Iterator[tuple[Choice, ...]]:
    """Yield a choice from each slot, those with early choices first."""

    def with_sum(slots: list[list[Choice]], total: int) -> Iterator[tuple[Choice, ...]]:
        if not slots:
            yield from [()] if total == 0 else []
            return
        largest = sum(len(slot) - 1 for slot in slots[1:])
        for n in range(max(0, total - largest), min(total, len(slots[0]) - 1) + 1):
            yield from ((slots[0][n], *rest) for rest in with_sum(slots[1:], total - n))

    totals = range(sum(len(slot) - 1 for slot in slots) + 1) if all(slots) else range(0)
    yield from islice((chosen for total in totals for chosen in with_sum(slots, total)), MOST_SETS)


def fits_windows(parts: Parts, inside: Parts) -> bool:
    """Return True unless a table of distances in windows is that of other windows."""
    return all(table.within in (None, *inside) for table in select(parts, TableBias))


def has_outer_norm(parts: Parts) -> bool:
    """Return True if one of the parts is a norm of the input or the output, as in a block."""
    return any(norm.place in ("input", "output") for norm in select(parts, Norm))


def group_of(path: str) -> str:
    """Return the module that a parameter belongs to, or the parameter if it is the candidate's own."""
    return path.rpartition(".")[0] or path


def arrange(parts: Parts) -> Iterator[Parts]:
    """Yield these parts in each order in which those that change the output may be applied."""
    last = [part for part in parts if "finish" in part.wrappers()]
    rest = tuple(part for part in parts if part not in last)
    yield from (rest + order for order in permutations(last))


def is_plausible(parts: Parts) -> bool:
    """Return True unless two parts exclude each other, or one requires another that isn't there."""
    norms = [norm for norm in select(parts, Norm) if norm.place in ("heads", "width")]
    roles = "".join(norm.roles for norm in norms)
    kinds = {(norm.kind, norm.place, norm.plus_one) for norm in norms}
    biases = [part for part in parts if isinstance(part, TableBias | Alibi)]
    is_learned = any(isinstance(part, Temperature | TableBias) for part in parts)
    is_cosine = any(norm.kind == "L2" and not norm.scale for norm in norms)
    if is_cosine and not any(isinstance(part, Scale | Temperature) for part in parts):
        return False  # cosines divided by √d are a bug
    if not is_learned and any(scale.reason == UNSCALED for scale in select(parts, Scale)):
        return False
    is_one_sided = ("q" in roles) != ("k" in roles)  # a bug too
    return len(kinds) <= 1 and len(set(roles)) == len(roles) and len(biases) <= 1 and not is_one_sided


def remove_parameters(description: Description, init: Mapping[str, Any], paths: Iterable[str]) -> str:
    """Return advice for a candidate that has these parameters besides attention."""
    owners = list(dict.fromkeys(path.rpartition(".")[0] for path in paths))
    is_name = all(part.isidentifier() for owner in owners for part in owner.split("."))  # "" is the class
    if not is_name or not all("Norm" in description.layers.get(owner, "") for owner in owners):
        return ALONE
    statements = [f"self.{owner} = torch.nn.Identity()" for owner in owners]
    if description.type != "class":
        code = "; ".join(statements).replace("self.", "module.")
        return f"To judge the attention alone, check a copy without it: {code}"
    arguments = [arg.name for arg in description.init or () if arg.required or arg.name in init]
    passed = ", ".join(f"{name}={name}" for name in arguments)
    return (
        f"To judge the attention alone, check this class:\nclass Adapter({description.name}):\n"
        f"    def __init__({', '.join(['self', *arguments])}):\n"
        f"        {'; '.join([f'super().__init__({passed})', *statements])}"
    )
