"""What modern attention is made of besides attention: norms, positions, windows, gates and residuals.

A part is a value that says what it is (`str`) and overrides steps of the oracle (`oracle`). Parts are
composed in their order: if two override the same step, the later part takes the result of the earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.checker.encodings import Interleaved, Rotary
from manyheads.checker.oracle import Attention, Inputs, Oracle, Outputs
from manyheads.checker.overrides import wrap

Wrappers = Mapping[str, Callable[..., Any]]
NAMES = {"q": "q", "k": "k", "v": "v", "qk": "q and k", "qkv": "q, k and v", "kv": "k and v"}


@dataclass(frozen=True)
class Part:
    """The base class of parts."""

    def wrappers(self) -> Wrappers:
        """Return a wrapper for each step that the part changes, as `overrides.wrap` takes them."""
        raise NotImplementedError

    @cached_property
    def oracle(self) -> type[Oracle]:
        """Attention with this part."""
        return wrap(Attention, **self.wrappers())

    @property
    def paths(self) -> list[str]:
        """The parameters that the part reads."""
        fields = ("path", "values", "weight", "scale", "bias")
        return [vars(self)[name] for name in fields if vars(self).get(name)]


def read(oracle: Attention, path: str) -> Tensor:
    """Return a parameter of a part."""
    assert oracle.weights is not None
    return oracle.weights.other[path]


def divide_grid(t: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a grid of t tokens that is as square as possible."""
    rows = max((n for n in range(1, math.isqrt(max(t, 0)) + 1) if t % n == 0), default=1)
    return rows, max(t, 0) // rows


# -- norms and scales of vectors -------------------------------------------------------------------


@dataclass(frozen=True)
class Norm(Part):
    """A norm of q, k or v, of the input, of the merged heads or of the output.

    Attributes:
        kind: "RMS", "layer", "L2", "group" (of all tokens, by groups of columns) or "none" (only multiplied
            by a learned scale).
        place: "heads" (each head of q, k or v), "width" (q, k or v before they are split into heads),
            "input", "mixed" (each head's weighted sum of values), "merged" or "output".
        roles: Those of q, k and v that are normalized, or whose input is.
        scale: The parameter that multiplies, "" for none.
        bias: The parameter that is added, "" for none.
        eps: The number that is added to the variance; the smallest length for "L2".
        plus_one: Whether the factor is 1 + scale.
        axis: The axis or axes that are normalized.
        groups: The number of groups of columns.
        is_repeated: Whether each step normalizes all cached keys again, which is a bug.
        is_first_only: Whether steps after the first one don't normalize, which is a bug.
    """

    kind: str
    place: str = "heads"
    roles: str = "qk"
    scale: str = ""
    bias: str = ""
    eps: float = 1e-6
    plus_one: bool = False
    axis: int | tuple[int, ...] = -1
    groups: int = 1
    is_repeated: bool = False
    is_first_only: bool = False

    BY_ROLE: ClassVar[dict[str, str]] = {"heads": "encode_heads", "width": "project", "input": "source"}
    LATER: ClassVar[dict[str, str]] = {"mixed": "mix", "merged": "gate", "output": "finish"}

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the step whose result is normalized."""
        if self.place in self.LATER:
            return {self.LATER[self.place]: lambda o, step, x: self.normalize(o, step(x))}
        return {
            self.BY_ROLE[self.place]: lambda o, step, role, *x: (
                self.normalize_role(o, role, step(role, *x)) if role in self.roles else step(role, *x)
            )
        }

    def normalize_role(self, oracle: Attention, role: str, x: Tensor) -> Tensor:
        """Return the normalized vectors of q, k or v."""
        raw, x, steps = x, self.normalize(oracle, x), oracle.x.steps
        if self.is_first_only and len(steps) > 1:
            is_first = torch.arange(x.shape[-2]) < (0 if role == "q" else steps[0])
            return torch.where(is_first[:, None], x, raw)
        for n in range(len(steps) - 1, 0, -1) if self.is_repeated and role == "k" else ():
            is_cached = (torch.arange(x.shape[-2]) < sum(steps[:n]))[:, None]
            x = torch.where(is_cached, self.normalize(oracle, x), x)
        return x

    def normalize(self, oracle: Attention, x: Tensor) -> Tensor:
        """Return the normalized vectors."""
        y = x
        if self.kind == "L2":
            y = y / y.norm(dim=self.axis, keepdim=True).clamp_min(self.eps)
        elif self.kind == "group":
            y = torch.nn.functional.group_norm(y.mT, self.groups, eps=self.eps).mT
        elif self.kind != "none":
            y = y - y.mean(self.axis, keepdim=True) if self.kind == "layer" else y
            y = y * (y.square().mean(self.axis, keepdim=True) + self.eps).rsqrt()
        if self.scale:
            scale = fit_heads(read(oracle, self.scale), x)
            y = y * (1 + scale if self.plus_one else scale)
        return y + fit_heads(read(oracle, self.bias), x) if self.bias else y

    def __str__(self) -> str:
        roles = NAMES.get(self.roles, self.roles)
        subject = {
            "heads": f"{roles} per head",
            "width": f"{roles} before the split into heads",
            "input": "the input" if self.roles == "qkv" else f"the input of {roles}",
            "mixed": "each head's output",
            "merged": "the merged heads",
            "output": "the output",
        }[self.place]
        if self.kind == "none":
            return f"{subject} times `{self.scale}`"
        scale = f" times {'1 + ' * self.plus_one}`{self.scale}`" if self.scale else ""
        bias = f" plus `{self.bias}`" if self.bias else ""
        return f"{self.kind} norm of {subject}{scale}{bias}, eps {self.eps:.3g}"


def fit_heads(parameter: Tensor, x: Tensor) -> Tensor:
    """Return a parameter in a shape that broadcasts to x, `[b, h, t, d]` or `[b, t, e]`."""
    d = x.shape[-1]
    if parameter.numel() == x.shape[1] * d and x.dim() == 4:
        return parameter.reshape(x.shape[1], 1, d)
    return parameter.flatten() if parameter.numel() in (1, d) else parameter.reshape(-1, d)


# -- positions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RotaryPositions(Part):
    """A rotary encoding of q and k.

    Attributes:
        encoding: The oracle of the encoding, with its kind of pairs.
        size: The number of dimensions that are rotated, the first of each head.
        head_size: The number of dimensions of a head.
        base: The base of the frequencies.
        factor: The factor of the positions (linear scaling, for contexts longer than in training).
        direction: 1, or −1 for code that rotates q and k the other way, which is equally right.
        roles: Those of q, k and v that are rotated.
        place: "heads", "width" (before the heads are split) or "along heads" (by the number of the head
            instead of the token's, which is a bug).
        begin: A function that returns the first position of a step with a cache, from the oracle and the
            lengths of the steps up to this one. None for the sum of the earlier lengths, which is correct;
            all others are bugs.
        moved: Those of q and k whose positions begin there.
        rotates_again: Whether each step rotates all cached keys again, which is a bug.
        is_given: Whether the call gives the angles, as cosines and sines.
        axes: How the pairs of an image's tokens turn with their rows and columns: "first" (the first half of
            the pairs with the rows), "halves" (pairs are within each half of the entries), "alternating", or
            "" for positions in a sequence.
        columns_first: Whether columns take the place of rows.
        prefix: The number of tokens before those of the image, which aren't rotated.
        is_centered: Whether coordinates are those of centers, −π to π, rather than numbers.
        mistake: "transposed" (tokens are numbered column by column), "rows twice",
            "columns twice" or "prefix last"; "" is correct.
    """

    encoding: type[Rotary]
    size: int
    head_size: int
    base: float = 10000.0
    factor: float = 1.0
    direction: int = 1
    roles: str = "qk"
    place: str = "heads"
    begin: Callable[[Attention, tuple[int, ...]], int] | None = None
    moved: str = "qk"
    rotates_again: bool = False
    is_given: bool = False
    axes: str = ""
    columns_first: bool = False
    prefix: int = 0
    is_centered: bool = False
    mistake: str = ""

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the step whose result is rotated."""

        def rotate(oracle: Attention, step: Callable[..., Tensor], role: str, x: Tensor) -> Tensor:
            x = step(role, x)
            return self.rotate(oracle, role, x) if role in self.roles else x

        return {"project" if self.place == "width" else "encode_heads": rotate}

    def rotate(self, oracle: Attention, role: str, x: Tensor) -> Tensor:
        """Rotate q, k or v, `[b, h, t, d]`."""
        if self.place == "width":
            return self.rotate_vectors(oracle, role, x[:, None], x.shape[-1])[:, 0]
        if self.place == "along heads":
            by_token = x.transpose(1, 2)
            return self.rotate_vectors(oracle, "k", by_token, x.shape[-1], False).transpose(1, 2)
        return self.rotate_vectors(oracle, role, x, self.size)

    def select_tokens(self, x: Inputs, role: str, oracle: Attention) -> Tensor:
        """Return the numbers of the queries' tokens, or of the keys', by which they are rotated."""
        if self.rotates_again and role == "k" and x.steps and x.positions is None:
            times = range(len(x.steps), 0, -1)  # how often the keys of each step are rotated
            return torch.arange(x.s) * torch.cat(
                [torch.full((n,), k) for n, k in zip(x.steps, times, strict=True)]
            )
        if self.begin is None or role not in self.moved or not x.steps or x.positions is not None:
            return torch.arange(x.offset, x.offset + x.t) if role == "q" else torch.arange(x.s)
        lengths = [x.steps[: n + 1] for n in range(len(x.steps))]
        first = [self.begin(oracle, each) for each in lengths]
        tokens = [torch.arange(start, start + n) for start, n in zip(first, x.steps, strict=True)]
        return torch.cat(tokens) if role == "k" else tokens[-1]

    def rotate_vectors(
        self, oracle: Attention, role: str, x: Tensor, size: int, has_positions: bool = True
    ) -> Tensor:
        """Rotate the first `size` entries of vectors `[b, h, t, d]`."""
        first, rest = x[..., :size], x[..., size:]
        inputs = Inputs(first, first, first)
        if has_positions:
            call, dtype = oracle.x, torch.float64 if x.dtype == torch.float64 else torch.float32
            tokens = self.select_tokens(call, role, oracle)
            positions = (tokens[None] if call.positions is None else call.positions[:, tokens])[:, None]
            inputs = inputs.but(positions=positions.to(dtype) * (self.factor * self.direction))
            if self.is_given and call.angles is not None:
                inputs = inputs.but(angles=call.angles[:, None, tokens].to(dtype) * self.direction)
            if self.axes:
                angles = self.grid_angles(call.s, size)[tokens] * (self.factor * self.direction)
                inputs = inputs.but(angles=angles[None, None].to(dtype))
                first = swap_quarters(first) if self.axes == "halves" else first
                inputs = inputs.but(query=first, key=first)
        encoding = self.encoding()
        encoding.x, encoding.width, encoding.base = inputs, size, self.base
        rotated = encoding.rotate_key() if role == "k" else encoding.rotate_query()
        rotated = swap_quarters(rotated) if self.axes == "halves" else rotated
        return torch.cat((rotated.to(x.dtype), rest), -1)

    def grid_angles(self, s: int, size: int) -> Tensor:
        """Return the angles of s tokens, all but the prefix those of an image, `[s, size / 2]`."""
        prefix = min(self.prefix, s)
        rows, columns = divide_grid(s - prefix)
        at = torch.arange(s - prefix)
        is_transposed = self.mistake == "transposed"
        row, column = (
            (at % rows, at // rows) if is_transposed else (at // max(columns, 1), at % max(columns, 1))
        )
        places = {"rows": (row, rows), "columns": (column, columns)}
        named = ["columns", "rows"] if self.columns_first else ["rows", "columns"]
        named = [self.mistake.removesuffix(" twice")] * 2 if self.mistake.endswith("twice") else named
        frequencies = self.base ** -(torch.arange(0, size // 2, 2, dtype=torch.float64) / (size // 2))
        angles = []
        for place, n in (places[name] for name in named):
            centers = ((place + 0.5) / max(n, 1) * 2 - 1) * 2 * math.pi
            coordinates = centers if self.is_centered else place.to(torch.float64)
            angles.append(coordinates[:, None] * frequencies)
        both = torch.stack(angles, -1).flatten(-2) if self.axes == "alternating" else torch.cat(angles, -1)
        return torch.nn.functional.pad(
            both, (0, 0, *((0, prefix) if self.mistake == "prefix last" else (prefix, 0)))
        )

    def __str__(self) -> str:
        pairs = "neighboring pairs" if issubclass(self.encoding, Interleaved) else "half-split pairs"
        base = "angles of the call" if self.is_given else f"base {self.base:g}"
        factor = f", positions times {self.factor:g}" if self.factor != 1 else ""
        part = f", of the first {self.size} of {self.head_size} dimensions" * (self.size < self.head_size)
        direction = ", rotating the other way (weights of other models don't fit)" * (self.direction < 0)
        return f"rotary encoding, {pairs}, {base}{factor}{part}{direction}{self.describe_grid()}"

    def describe_grid(self) -> str:
        """Return how pairs turn with rows and columns, or "" for positions in a sequence."""
        if not self.axes:
            return ""
        axes = "columns and rows" if self.columns_first else "rows and columns"
        shares = {
            "first": f"halves of the pairs turn with {axes}",
            "halves": f"halves of the entries turn with {axes}",
            "alternating": f"pairs turn alternately with {axes}",
        }
        centered = ", by centers from −π to π" * self.is_centered
        prefix = f", except for the first {self.prefix} tokens" if self.prefix else ""
        return f", {shares[self.axes]}{centered}{prefix}"


def swap_quarters(x: Tensor) -> Tensor:
    """Return vectors whose second and third quarters are exchanged, so that pairs of halves are pairs."""
    return x.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)


@dataclass(frozen=True)
class Window(Part):
    """Visible keys: the last `size` tokens, `size` tokens on each side, or those of the same chunk.

    A chunk may see the one before it too, or both neighbors (local attention).

    Attributes:
        size: The number of tokens, the query's own included.
        kind: "sliding", "both sides", "chunks", "chunks, the one before" or "chunks, both neighbors".
        first: The number of first tokens that are always visible.
    """

    size: int
    kind: str = "sliding"
    first: int = 0

    def wrappers(self) -> Wrappers:
        """Return the wrapper that adds the window to the masks."""
        return {"masks": lambda o, step: [*step(), self.visible(*o.positions())]}

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """Return True where the query at position i may attend to the key at position j."""
        if self.kind.startswith("chunks"):
            back = i // self.size - j // self.size  # in chunks
            inside = (back >= -("both" in self.kind)) & (back <= ("," in self.kind))
        else:
            inside = i - j < self.size
            inside = inside & (j - i < self.size) if self.kind == "both sides" else inside
        return inside | (j < self.first)

    @property
    def span(self) -> int:
        """The number of tokens of which the last doesn't see the first."""
        return self.size * (1 + ("," in self.kind))

    def __str__(self) -> str:
        chunks = f"chunks of {self.size} tokens"
        kind = {"sliding": f"sliding window of {self.size} keys", "chunks": chunks,
                "chunks, the one before": f"{chunks}, which see the chunk before too",
                "chunks, both neighbors": f"{chunks}, which see both neighboring chunks too",
                "both sides": f"window of {self.size - 1} tokens on both sides"}[self.kind]  # fmt: skip
        return kind + f" and the first {self.first}" * bool(self.first)


@dataclass(frozen=True)
class NoWindow(Part):
    """No window: a flag says so, although the candidate's outputs are those of a window."""

    flag: str
    window: Window

    def wrappers(self) -> Wrappers:
        """Return no wrapper: all keys are visible."""
        return {}

    def __str__(self) -> str:
        return f"no window, because {self.flag} is False"


@dataclass(frozen=True)
class Bias(Part):
    """The base class of biases that are added to the scores.

    Attributes:
        is_scaled: Whether the bias is added before the scores are scaled.
        ends_together: Whether the last query has the position of the last key of a context.
    """

    is_scaled: bool = field(default=False, kw_only=True)
    ends_together: bool = field(default=False, kw_only=True)

    def positions(self, oracle: Attention) -> tuple[Tensor, Tensor]:
        """Return the positions of queries `[t, 1]` and keys `[1, s]`."""
        (i, j), x = oracle.positions(), oracle.x
        return (i + x.s - x.t if self.ends_together and not x.offset else i), j

    def compute(self, oracle: Attention) -> Tensor:
        """Return the bias, `[h, t, s]` or `[b, h, t, s]`."""
        raise NotImplementedError

    def wrappers(self) -> Wrappers:
        """Return the wrapper that adds the bias."""

        def add(oracle: Attention, step: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
            return step(scores) + self.compute(oracle) * (oracle.scale() if self.is_scaled else 1)

        return {"add_bias": add}


@dataclass(frozen=True)
class TableBias(Bias):
    """A learned bias of the scores, from a table that distances or positions select.

    Attributes:
        path: The table: `[n, h]` or `[h, n]` by distance, or `[h, n, n]` by positions.
        kind: "buckets" (T5), "distances" (a row for each distance up to the largest), "positions" or "window"
            (by the distances between the rows and the columns of two tokens of a window, as in Swin).
        max_distance: The distance from which all distances share a bucket.
        is_bidirectional: Whether future keys have buckets of their own.
        sign: 1 for distances j − i, −1 for i − j.
        window: The numbers of tokens of a window by axis, such as those of rows and columns.
        shift: The number of rows and columns by which the tokens are rolled before.
        within: The windows of an image, if the tokens are those of all windows.
        strides: The factor of the distance on each axis, by default those of a table of all distances.
        factor: The number by which its entries are multiplied.
        is_overlapping: Whether buckets of large distances begin at 0, as those of small ones, which is a bug.
        first: The number of tokens before those of the window, 0 or 1. A class token has the last three
            entries: from it to others, from others to it, and to itself.
    """

    path: str
    kind: str = "buckets"
    max_distance: int = 128
    is_bidirectional: bool = False
    sign: int = 1
    window: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    shift: int = 0
    within: ShiftedWindow | None = None
    first: int = 0
    factor: float = 1.0
    is_overlapping: bool = False

    @property
    def natural_strides(self) -> list[int]:
        """The factors of the distances with which each distance has an entry of its own."""
        return [math.prod(2 * n - 1 for n in self.window[axis + 1 :]) for axis in range(len(self.window))]

    def compute(self, oracle: Attention) -> Tensor:
        """Return the bias, `[h, t, s]`."""
        table, (i, j) = read(oracle, self.path), self.positions(oracle)
        h = oracle.q.shape[1]
        if self.kind == "positions":
            table = table.reshape(-1, *table.shape[-2:])
            return table[:, i.clamp_max(table.shape[-2] - 1), j.clamp_max(table.shape[-1] - 1)]
        table = table.flatten(0, -2) if table.shape[-1] == h else table.reshape(h, -1).mT
        if self.kind == "window":
            is_class = (i < self.first).long() + 2 * (j < self.first)  # 1: the query's, 2: the key's, 3: both
            i, j = i - self.first, j - self.first
            index = torch.zeros_like(i - j)
            for axis, stride in enumerate(self.strides or self.natural_strides):
                n, inner = self.window[axis], math.prod(self.window[axis + 1 :])
                if self.within is not None:
                    query, key = (self.within.coordinates(oracle, each)[axis] % n for each in (i, j))
                else:
                    query, key = ((each // inner - self.shift) % n for each in (i, j))
                index = index + (query - key + n - 1) * stride
            return table[torch.where(is_class > 0, table.shape[0] - 4 + is_class, index)].movedim(-1, 0)
        distances = self.sign * (j - i)
        n = table.shape[0]
        if self.kind == "buckets":
            index = select_buckets(
                distances, n, self.max_distance, self.is_bidirectional, self.is_overlapping
            )
        else:
            index = (distances + n // 2).clamp(0, n - 1) if n % 2 else (-distances).clamp(0, n - 1)
        return table[index].movedim(-1, 0) * self.factor

    def __str__(self) -> str:
        if self.kind == "buckets":
            direction = "both directions" if self.is_bidirectional else "the past"
            buckets = f"T5's buckets of {direction}, distances up to {self.max_distance}"
            factor = f", times {self.factor:g}" * (self.factor != 1)
            return f"relative bias `{self.path}` by {buckets}{factor}"
        if self.kind == "window":
            window = " × ".join(map(str, self.window))
            beside = " and a class token" * self.first
            return f"learned bias `{self.path}` by distances in a window of {window} tokens{beside}"
        return f"learned bias `{self.path}` by {self.kind}"


@dataclass(frozen=True)
class ShiftedWindow(Bias):
    """A mask of the windows of an image that is rolled before (Liu et al. 2021, arXiv:2103.14030).

    Tokens of a window that the roll moved from the other side of the image see each other only.

    Attributes:
        images: The numbers of rows and columns of the images that calls have.
        size: The numbers of rows and of columns of a window.
        shift: The numbers of rows and of columns by which the image is rolled.
        fill: What is added to the scores of tokens from the other side.
        separated: The axes on which tokens from the other side are masked; all but (0, 1) are bugs.
        masks_padding: Whether zeros that fill up the last windows are masked; otherwise they are tokens.
        rolls_always: Whether an axis that one window fills is rolled too.
    """

    images: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    shift: tuple[int, int]
    fill: float = -math.inf
    separated: tuple[int, ...] = (0, 1)
    masks_padding: bool = False
    rolls_always: bool = True

    def wrappers(self) -> Wrappers:
        """Return the wrappers that add the mask, and fill up the windows before a call."""
        return {**super().wrappers(), "__call__": self.fill_up}

    def fill_up(self, oracle: Attention, call: Callable[[Inputs], Outputs], x: Inputs) -> Outputs:
        """Return the outputs for an image whose last windows are filled up with zeros."""
        rows, columns = self.sides(x.t)
        below, right = -rows % self.size[0], -columns % self.size[1]
        is_token = torch.zeros(rows + below, columns + right, dtype=torch.bool)
        is_token[:rows, :columns] = True
        oracle.is_token = is_token
        if not below + right:
            return call(x)

        def pad(tokens: Tensor) -> Tensor:
            image = tokens.unflatten(1, (rows, columns))
            return torch.nn.functional.pad(image, (0, 0, 0, right, 0, below)).flatten(1, 2)

        outputs = call(x.but(query=pad(x.query), key=pad(x.key), value=pad(x.value)))
        found, weights = is_token.flatten(), outputs.weights
        return Outputs(outputs.out[:, found], None if weights is None else weights[..., found, :][..., found])

    def sides(self, t: int) -> tuple[int, int]:
        """Return the rows and columns of the image of `t` tokens."""
        return next((each for each in self.images if math.prod(each) == t), divide_grid(t))

    def tokens(self, oracle: Attention) -> Tensor:
        """Return where the image of this call has tokens, `[rows, columns]`."""
        sides = self.sides(oracle.q.shape[-2])
        return torch.ones(sides, dtype=torch.bool) if oracle.is_token is None else oracle.is_token

    def coordinates(self, oracle: Attention, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of tokens in the rolled image."""
        rows, columns = self.tokens(oracle).shape
        first, second = self.rolls(oracle)
        return (tokens // columns - first) % rows, (tokens % columns - second) % columns

    def rolls(self, oracle: Attention) -> list[int]:
        """Return by how many rows and columns the image of this call is rolled."""
        sides = zip(self.tokens(oracle).shape, self.size, self.shift, strict=True)
        return [shift if self.rolls_always or n > size else 0 for n, size, shift in sides]

    def compute(self, oracle: Attention) -> Tensor:
        """Return the bias, `[1, t, s]`."""
        (i, j), is_token = oracle.positions(), self.tokens(oracle)
        inside, visible = torch.ones_like(i == j), torch.ones_like(i == j)
        each_axis = zip(self.coordinates(oracle, i), self.coordinates(oracle, j), strict=True)
        for axis, (query, key) in enumerate(each_axis):
            inside = inside & (query // self.size[axis] == key // self.size[axis])
            last = is_token.shape[axis] - self.rolls(oracle)[axis]
            if axis in self.separated:
                visible = visible & ((query >= last) == (key >= last))
        if self.masks_padding:  # which sees itself, so that no output is NaN
            inside = inside & (is_token.flatten() | (i == j))
        bias = torch.zeros(1, oracle.x.t, oracle.x.s).to(oracle.q).masked_fill(~visible, self.fill)
        return bias.masked_fill(~inside, -math.inf)

    def __str__(self) -> str:
        shift = f", shifted by {' and '.join(map(str, dict.fromkeys(self.shift)))}" * any(self.shift)
        images = " and ".join(f"{rows} × {columns}" for rows, columns in self.images)
        return f"windows of {self.size[0]} × {self.size[1]} tokens{shift}, in images of {images}"


def select_buckets(
    distances: Tensor, n: int, max_distance: int, is_bidirectional: bool, is_overlapping: bool = False
) -> Tensor:
    """Return T5's bucket for each distance j − i (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    If `is_overlapping`, those of large distances aren't after those of small ones.
    """
    start = torch.zeros_like(distances)
    if is_bidirectional:
        n //= 2
        start, distances = (distances > 0) * n, distances.abs()
    else:
        distances = (-distances).clamp_min(0)
    exact = n // 2
    # In float32 as in T5, because a logarithm that is a whole number may be rounded down.
    logarithms = torch.log(distances.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    far = exact * (not is_overlapping) + (logarithms * (n - exact)).long()
    return start + torch.where(distances < exact, distances, far.clamp_max(n - 1))


@dataclass(frozen=True)
class Alibi(Bias):
    """A bias that falls with the distance, with a slope for each head (Press et al. 2022, arXiv:2108.12409).

    Attributes:
        path: The parameter with the slopes, or "" for powers of two.
        is_symmetric: Whether distances to future keys count too.
        sign: −1, so that far keys get lower scores.
        exponent: The exponent of the last slope: slope n of h is 2^(−exponent · n / h).
        start: The number of the first slope.
    """

    path: str = ""
    is_symmetric: bool = False
    sign: int = -1
    exponent: float = 8.0
    start: int = 1

    def compute(self, oracle: Attention) -> Tensor:
        """Return the bias, `[h, t, s]`."""
        i, j = oracle.positions()
        distances = (i - j).abs() if self.is_symmetric else i - j
        h = oracle.q.shape[1]
        slopes = read(oracle, self.path).flatten() if self.path else self.powers(h).to(oracle.q)
        return self.sign * slopes[:, None, None] * distances.to(oracle.q)

    def powers(self, h: int) -> Tensor:
        """Return the slopes of h heads, as in the paper if h isn't a power of two."""
        if h & (h - 1) == 0:
            return 2.0 ** (-self.exponent / h * torch.arange(self.start, self.start + h, dtype=torch.float64))
        power = 1 << (h.bit_length() - 1)
        return torch.cat((self.powers(power), self.powers(2 * power)[::2][: h - power]))

    def __str__(self) -> str:
        slopes = f"the slopes `{self.path}`" if self.path else "slopes that are powers of two"
        return f"ALiBi with {slopes}{', added before the scale' * self.is_scaled}"


@dataclass(frozen=True)
class RelativeKeys(Bias):
    """Learned vectors of distances, multiplied by queries as keys are (Shaw et al. 2018, arXiv:1803.02155).

    They are added before the scale.

    Attributes:
        path: The table of the vectors, `[n, d]`, or for each head `[h, n, d]`, `[n, h, d]` or `[n, h · d]`.
        sign: 1 for distances j − i, −1 for i − j.
        roles: "q", or "qk" if keys are multiplied by them too.
        rows: "both sides" (n = 2 m + 1 rows, for distances up to m on both sides), or of a causal layer
            "last" (the last row is that of distance 0, the row before it that of 1, Huang et al. 2019,
            arXiv:1809.04281) or "first" (the first row is that of distance 0).
        skew: How products by rows are shifted to distances, instead of the right way, which is "". A bug.
        is_unscaled: Whether the products are added after the scale, which is a bug.
    """

    path: str
    sign: int = 1
    roles: str = "q"
    rows: str = "both sides"
    skew: tuple[str, bool, bool] | tuple[()] = ()
    is_unscaled: bool = False

    def table(self, oracle: Attention) -> Tensor:
        """Return the vectors, `[h, n, d]` or `[1, n, d]`."""
        table, (h, d) = read(oracle, self.path), (oracle.q.shape[1], oracle.q.shape[-1])
        if table.dim() == 2:
            return table[None] if table.shape[-1] == d else table.unflatten(-1, (h, d)).transpose(0, 1)
        return table if table.shape[0] == h else table.transpose(0, 1)

    def compute(self, oracle: Attention) -> Tensor:
        """Return the products, scaled, `[b, h, t, s]`."""
        table, (i, j) = self.table(oracle), self.positions(oracle)
        scale = 1.0 if self.is_unscaled else oracle.scale()
        if self.skew and oracle.x.t == oracle.x.s:
            return self.shift(oracle.q @ table[:, table.shape[1] - oracle.x.t :].mT, *self.skew) * scale
        n = table.shape[1] if self.rows != "both sides" else table.shape[1] // 2
        index = {
            "both sides": (self.sign * (j - i)).clamp(-n, n) + n,
            "first": i - j,
            "last": n - 1 - (i - j),
            "last of the call": oracle.x.s - 1 - (i - j),
        }[self.rows]
        vectors = table[:, index.clamp(0, table.shape[1] - 1)]
        bias = torch.einsum("bhtd,htsd->bhts", oracle.q, vectors.expand(oracle.q.shape[1], -1, -1, -1))
        if "k" in self.roles:
            bias = bias + torch.einsum("bhsd,htsd->bhts", oracle.k, vectors.expand(bias.shape[1], -1, -1, -1))
        return bias * scale

    @staticmethod
    def shift(products: Tensor, padded: str, drops_last: bool, is_masked: bool) -> Tensor:
        """Return products `[b, h, t, s]` of queries and rows, shifted by a reshape of `[t, s + 1]`."""
        t, s = products.shape[-2:]
        if is_masked:  # rows of distances beyond the first token
            products = products * products.new_ones(t, s).triu().flip(-2)
        products = torch.nn.functional.pad(products, (1, 0) if padded == "left" else (0, 1))
        reshaped = products.reshape(*products.shape[:2], s + 1, t)
        return (reshaped[:, :, :-1] if drops_last else reshaped[:, :, 1:]).reshape(*products.shape[:2], t, s)

    def __str__(self) -> str:
        zero = f", the {self.rows} row for distance 0" * (self.rows != "both sides")
        return f"{NAMES[self.roles]} times learned vectors `{self.path}` by distances{zero}"


@dataclass(frozen=True)
class ProjectedDistances(Bias):
    """Projected vectors of distances, and biases of queries (Dai et al. 2019, arXiv:1901.02860).

    The score is (q + u) · k + (q + v) · W r, with the sinusoidal vector r of the distance i − j.

    Attributes:
        weight: The parameter with the projection W, `[h · d, e]`.
        path: The parameter with u, `[h, d]`.
        values: The parameter with v, `[h, d]`.
        skew: How products by rows are shifted to distances, as in `RelativeKeys`. A bug unless ().
    """

    weight: str
    path: str
    values: str
    skew: tuple[str, bool, bool] | tuple[()] = ()

    def compute(self, oracle: Attention) -> Tensor:
        """Return all that is added to the products of queries and keys, scaled, `[b, h, t, s]`."""
        weight, (i, j) = read(oracle, self.weight), self.positions(oracle)
        h, d, e = oracle.q.shape[1], oracle.q.shape[-1], weight.shape[-1]
        content, position = (read(oracle, path).reshape(h, 1, d) for path in (self.path, self.values))
        s, t = oracle.x.s, oracle.x.t
        frequencies = 10000.0 ** (-torch.arange(0, e, 2, dtype=torch.float64) / e)
        is_skewed = bool(self.skew) and s >= t
        distances = torch.arange(s - 1, -1, -1)[None] if is_skewed else i - j
        angles = distances[..., None] * frequencies
        vectors = torch.cat((angles.sin(), angles.cos()), -1).to(weight) @ weight.mT  # [t or 1, s, h · d]
        products = torch.einsum(
            "bhtd,tshd->bhts", oracle.q + position, vectors.unflatten(-1, (h, d)).expand(t, -1, -1, -1)
        )
        if is_skewed:
            products = RelativeKeys.shift(products, *self.skew)
        return (products + content @ oracle.k.mT) * oracle.scale()

    def __str__(self) -> str:
        return (
            f"distances projected by `{self.weight}`, and biases `{self.path}` and `{self.values}` of queries"
        )


# -- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Softcap(Part):
    """Scores capped smoothly: cap · tanh(score / cap)."""

    cap: float

    def wrappers(self) -> Wrappers:
        """Return the wrapper that caps the scores."""
        return {"cap_scores": lambda o, step, scores: self.cap * (step(scores) / self.cap).tanh()}

    def __str__(self) -> str:
        return f"scores capped at {self.cap:g} by tanh"


@dataclass(frozen=True)
class Scale(Part):
    """A scale of the scores other than 1/√d, and where it is documented."""

    value: float
    reason: str

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the scale."""
        return {"default_scale": lambda o, step: self.value}

    def __str__(self) -> str:
        return f"scores multiplied by {self.value:.6g} ({self.reason})"


@dataclass(frozen=True)
class Temperature(Part):
    """A learned factor of the scores, for each head or for all.

    Attributes:
        path: The parameter.
        form: "factor", "exponential" or "divisor".
    """

    path: str
    form: str = "factor"

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the scaled scores."""

        def multiply(oracle: Attention, step: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
            x = read(oracle, self.path).reshape(-1, 1, 1)
            factor = {"factor": x, "exponential": x.exp(), "divisor": 1 / x}[self.form]
            return step(scores) * factor

        return {"cap_scores": multiply}

    def __str__(self) -> str:
        forms = {"factor": "times", "exponential": "times the exponential of", "divisor": "divided by"}
        return f"scores {forms[self.form]} `{self.path}`"


@dataclass(frozen=True)
class HeadMixing(Part):
    """Scores or weights of heads, mixed by a matrix (talking heads, Shazeer et al. 2020, arXiv:2003.02436).

    Attributes:
        path: The parameter, `[h, h]`.
        place: "scores" or "weights".
        is_transposed: Whether its rows are the heads that are mixed, rather than the results.
    """

    path: str
    place: str
    is_transposed: bool = False

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the scaled scores or of the weights."""

        def mix(oracle: Attention, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            matrix = read(oracle, self.path).reshape(x.shape[1], x.shape[1])
            return torch.einsum("gh,bhts->bgts", matrix.mT if self.is_transposed else matrix, step(x))

        return {"cap_scores" if self.place == "scores" else "mask_weights": mix}

    def __str__(self) -> str:
        return f"{self.place} of heads mixed by `{self.path}` (talking heads)"


@dataclass(frozen=True)
class NullKeys(Part):
    """Learned keys and values besides those of the tokens, visible to every query.

    Attributes:
        path: The parameter with both, `[2, …]`, or with the keys.
        values: The parameter with the values, or "" if `path` has both.
    """

    path: str
    values: str = ""

    def vectors(self, oracle: Attention, role: str, x: Tensor) -> Tensor:
        """Return the learned keys or values `[b, g, n, d]` for keys or values x `[b, g, s, d]`."""
        table = read(oracle, self.values if role == "v" and self.values else self.path)
        table = table if self.values else table.reshape(2, -1)[int(role == "v")]
        if table.numel() % (x.shape[1] * x.shape[-1]):  # shared by the heads
            return table.reshape(-1, x.shape[-1]).expand(*x.shape[:2], -1, -1)
        return table.reshape(x.shape[1], -1, x.shape[-1]).expand(x.shape[0], -1, -1, -1)

    def wrappers(self) -> Wrappers:
        """Return the wrappers that add keys and values, and leave them out of masks and biases."""

        def add(oracle: Attention, step: Callable[..., Tensor], role: str, x: Tensor) -> Tensor:
            x = step(role, x)
            return x if role == "q" else torch.cat((self.vectors(oracle, role, x), x), -2)

        def bias(oracle: Attention, step: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
            n = scores.shape[-1] - oracle.x.s
            return torch.cat((scores[..., :n], step(scores[..., n:])), -1)

        def show(oracle: Attention, step: Callable[[], Tensor | None]) -> Tensor | None:
            visible, n = step(), oracle.raw_scores.shape[-1]
            if visible is None:
                return None
            return torch.nn.functional.pad(visible, (n - visible.shape[-1], 0), value=True)

        return {
            "encode_heads": add,
            "add_bias": bias,
            "combine_masks": show,
            "returned_weights": lambda o, step: step()[..., -o.x.s :],
        }

    def __str__(self) -> str:
        return f"learned keys and values `{'` and `'.join(self.paths)}`, always visible"


@dataclass(frozen=True)
class OwnKeys(Part):
    """The queries' tokens are keys too, after the context's (Alayrac et al. 2022, arXiv:2204.14198)."""

    def wrappers(self) -> Wrappers:
        """Return the wrappers that add keys and values, and leave them out of masks."""

        def add(oracle: Attention, step: Callable[[str], Tensor], role: str) -> Tensor:
            return step(role) if role == "q" else torch.cat((step(role), oracle.source("q")), -2)

        def show(oracle: Attention, step: Callable[[], Tensor | None]) -> Tensor | None:
            visible = step()
            return None if visible is None else torch.nn.functional.pad(visible, (0, oracle.x.t), value=True)

        return {"source": add, "combine_masks": show}

    def __str__(self) -> str:
        return "keys of the context and of the queries' own tokens"


# -- around attention ------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "SiLU": torch.nn.functional.silu,
    "2 · sigmoid": lambda x: 2 * x.sigmoid(),
    "tanh": torch.tanh,
    "ReLU": torch.relu,
    "ELU": torch.nn.functional.elu,
    "GELU": torch.nn.functional.gelu,
    "identity": lambda x: x,
}
GATE_FUNCTIONS = ("sigmoid", "SiLU", "2 · sigmoid")  # activations of gates; others are bugs


@dataclass(frozen=True)
class Gate(Part):
    """A gate that is computed from the queries' input and multiplies the merged heads or the output.

    Attributes:
        weight: The parameter with its weight, `[out, in]`, with an output for each column or for each head.
        bias: The parameter with its bias, or "".
        function: The activation, one of ACTIVATIONS.
        place: "merged" or "output".
        is_reshaped: Whether gates [b, t, h, d] become [b, h, t, d] without a transpose, which is a bug.
    """

    weight: str
    bias: str = ""
    function: str = "sigmoid"
    place: str = "merged"
    is_reshaped: bool = False

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the gated step."""

        def apply(oracle: Attention, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            gate = oracle.source("q") @ read(oracle, self.weight).mT
            gate = ACTIVATIONS[self.function](gate + read(oracle, self.bias) if self.bias else gate)
            if self.is_reshaped:
                b, h, t, _ = oracle.q.shape
                gate = gate.reshape(b, h, t, -1).transpose(1, 2).flatten(2)
            return step(x) * gate.repeat_interleave(x.shape[-1] // gate.shape[-1], -1)

        return {"gate" if self.place == "merged" else "finish": apply}

    def __str__(self) -> str:
        subject = "the merged heads" if self.place == "merged" else "the output"
        return f"{subject} times the {self.function} of `{self.weight}` (a gate)"


@dataclass(frozen=True)
class Residual(Part):
    """The input of the queries, added to the output, perhaps projected.

    Attributes:
        weight: The parameter with the weight of its projection, `[out, in]`, or "".
        bias: The parameter with its bias, or "".
    """

    weight: str = ""
    bias: str = ""

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the output."""

        def add(oracle: Attention, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            residual = oracle.x.query
            residual = residual @ read(oracle, self.weight).mT if self.weight else residual
            return step(x) + (residual + read(oracle, self.bias) if self.bias else residual)

        return {"finish": add}

    def __str__(self) -> str:
        return "residual connection around it" + f", projected by `{self.weight}`" * bool(self.weight)


@dataclass(frozen=True)
class Activation(Part):
    """The activation at the end of a block, after its residual connection.

    Attributes:
        function: One of ACTIVATIONS.
    """

    function: str

    def wrappers(self) -> Wrappers:
        """Return the wrapper of the output."""
        return {"finish": lambda o, step, x: ACTIVATIONS[self.function](step(x))}

    def __str__(self) -> str:
        return f"{self.function} of the output"


POSITIONAL = (RotaryPositions, Window, Bias)  # parts by which the order of tokens matters
