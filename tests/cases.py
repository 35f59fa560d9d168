"""One table of cases for every kernel, and oracles that share no code with the library.

Masks and biases are written as specs, nested tuples such as `("and", ("causal",), ("window", 3, None))`.
`build` makes the library's mask of a spec; `sees` computes the same in plain Python, for one query and one
key; `specs` draws specs. `oracle` computes attention and its gradients in numpy's longdouble (wider than
float64 where the machine has it, so that float64 is tested too), and beside each number the error that
rounding may make; `over` compares.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

import manyheads as mh
from manyheads import kernels

KERNELS = (*(name for name in kernels.ORDER if name != "flex"), "auto")  # test_flex.py has flex's cases
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = np.longdouble

Spec = tuple[Any, ...]


# -- masks -------------------------------------------------------------------------------------------

RULES = {
    "odd": lambda b, h, i, j: (i + j) % 2 == 1,
    "batch and head": lambda b, h, i, j: (i - j + b + 2 * h) % 3 != 0,
    "nothing": lambda b, h, i, j: (i + j) * 0 == 1,
}


NODES: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "not": operator.invert}
LEAVES: dict[str, Callable[..., Any]] = {
    "full": mh.Full, "causal": mh.Causal, "window": mh.Window, "prefix": mh.Prefix, "diagonal": mh.Diagonal,
    "lengths": lambda n, left: mh.Lengths(n, left=left), "keys": lambda keys: mh.Keys(keys.tolist()),
    "documents": lambda ids, queries: mh.Documents(ids, queries=queries),
    "same": lambda ids, queries: mh.SameToken(ids, queries=queries),
    "after": lambda ids, queries: mh.AfterSameToken(ids, queries=queries),
    "keep": mh.Keep, "drop": mh.Drop, "rule": lambda name: mh.Rule(RULES[name]),
}  # fmt: skip


def build(spec: Spec) -> Any:
    """The library's mask of a spec."""
    kind, *rest = spec
    if kind in NODES:
        return NODES[kind](*map(build, rest))
    return LEAVES[kind](*(torch.tensor(x, dtype=torch.int64) if isinstance(x, tuple) else x for x in rest))


def sees(spec: Spec, b: int, h: int, i: int, j: int, row: int, s: int) -> bool:
    """May the query of this row, at position i, see key j? In plain Python, one pair at a time."""
    kind, *rest = spec
    match kind:
        case "and":
            return all(sees(part, b, h, i, j, row, s) for part in rest)
        case "or":
            return any(sees(part, b, h, i, j, row, s) for part in rest)
        case "not":
            return not sees(rest[0], b, h, i, j, row, s)
        case "full":
            return True
        case "causal":
            return j <= i
        case "window":
            left, right = rest
            return (left is None or i - j <= left) and (right is None or j - i <= right)
        case "prefix":
            return j < _entry(rest[0], b)
        case "lengths":
            n, left = rest
            return j >= s - _entry(n, b) if left else j < _entry(n, b)
        case "diagonal":
            return j == i + rest[0]
        case "keys":
            return j in rest[0]
        case "documents" | "same":
            mine, theirs = _query(rest, b, i, row), _at(_line(rest[0], b), j)
            return mine is not None and theirs is not None and mine == theirs
        case "after":
            mine, before = _query(rest, b, i, row), _at(_line(rest[0], b), j - 1)
            return mine is not None and before is not None and mine == before and 1 <= j <= i
        case "keep" | "drop":
            entry = _cell(rest[0], b, h, row, j)
            return entry is not None and entry is (kind == "keep")
        case "rule":
            return bool(RULES[rest[0]](b, h, i, j))
    raise AssertionError(spec)


def _entry(n: int | tuple[int, ...], b: int) -> int:
    if isinstance(n, int):
        return n
    return n[0] if len(n) == 1 else n[b]


def _line(ids: Any, b: int) -> Any:
    """The ids of one sequence, out of `[s]` or `[b, s]`."""
    if len(ids) == 0 or isinstance(ids[0], int):
        return ids
    return ids[0] if len(ids) == 1 else ids[b]


def _at(ids: Any, place: int) -> int | None:
    return ids[place] if 0 <= place < len(ids) else None


def _query(rest: list[Any], b: int, i: int, row: int) -> int | None:
    ids, queries = rest
    return _at(_line(ids, b), i) if queries is None else _at(_line(queries, b), row)


def _cell(table: Tensor, b: int, h: int, row: int, j: int) -> bool | None:
    """One entry of a `[t, s]` or broadcasting four-dimensional table; None outside it."""
    place = (b, h, row, j)[-table.dim() :]
    if table.dim() == 4:
        place = tuple(0 if n == 1 else p for p, n in zip(place, table.shape, strict=True))
    if any(not 0 <= p < n for p, n in zip(place, table.shape, strict=True)):
        return None
    return bool(table[place])


def positions(offset: Any, b: int, t: int, s: int) -> list[int]:
    """The position of row 0 of each sequence, from what `attention` takes as offset."""
    if offset is None:
        return [s - t] * b
    return [offset] * b if isinstance(offset, int) else [int(n) for n in offset]


def visible(spec: Spec | None, b: int, h: int, t: int, s: int, offset: Any) -> np.ndarray:
    """The mask as a boolean `[b, h, t, s]`, by a loop over every pair."""
    keep = np.ones((b, h, t, s), dtype=bool)
    if spec is None:
        return keep
    first = positions(offset, b, t, s)
    heads = h if _by_head(spec) else min(h, 1)
    for n, m, row, j in itertools.product(range(b), range(heads), range(t), range(s)):
        keep[n, m, row, j] = sees(spec, n, m, row + first[n], j, row, s)
    keep[:, heads:] = keep[:, :1]
    return keep


def _by_head(spec: Spec) -> bool:
    """Do the heads of this mask differ? (Only to spare the loop.)"""
    return spec[0] in ("keep", "drop", "rule") or any(isinstance(x, tuple) and x and isinstance(x[0], str)
                                                      and _by_head(x) for x in spec[1:])  # fmt: skip


def drawn_ids(b: int, n: int) -> st.SearchStrategy[Any]:
    """Draw ids of few values, `[n]`, `[1, n]` or `[b, n]`."""
    line = st.tuples(*[st.integers(-1, 2)] * n)
    return st.one_of(line, st.tuples(line), st.tuples(*[line] * b))


def drawn_tables(*shape: int) -> st.SearchStrategy[Tensor]:
    count = math.prod(shape)
    bits = st.lists(st.booleans(), min_size=count, max_size=count)
    return bits.map(lambda x: torch.tensor(x, dtype=torch.bool).reshape(shape))


def leaves(b: int, h: int, t: int, s: int, rules: bool = True) -> st.SearchStrategy[Spec]:
    """Draw a spec without `and`, `or` and `not`; its ids may be more than the keys."""
    counts = st.one_of(
        st.integers(0, s + 2), st.tuples(*[st.integers(0, s + 2)] * b), st.tuples(st.integers(0, s))
    )
    side = st.one_of(st.none(), st.integers(0, 3))
    four = [(b, h, t, s), (1, 1, t, s), (b, 1, 1, s), (1, h, t, 1), (1, 1, 1, 1), (b, h, 1, 1)]
    tables = st.one_of(drawn_tables(t, s), st.sampled_from(four).flatmap(lambda shape: drawn_tables(*shape)))
    queries = st.one_of(st.none(), drawn_ids(b, t)) if t else st.none()
    ids = st.integers(max(s, 1), s + 2).flatmap(lambda n: drawn_ids(b, n))
    return st.one_of(
        st.sampled_from([("full",), ("causal",)]),
        st.tuples(st.just("window"), side, side),
        st.tuples(st.just("prefix"), counts),
        st.tuples(st.just("lengths"), counts, st.booleans()),
        st.tuples(st.just("diagonal"), st.integers(-3, 3)),
        st.tuples(st.just("keys"), st.lists(st.integers(0, s + 1), max_size=3).map(tuple)),
        st.tuples(st.sampled_from(["documents", "same", "after"]), ids, queries),
        st.tuples(st.sampled_from(["keep", "drop"]), tables),
        *([st.tuples(st.just("rule"), st.sampled_from(sorted(RULES)))] if rules else []),
    )


def specs(b: int, h: int, t: int, s: int, rules: bool = True) -> st.SearchStrategy[Spec]:
    """Draw any spec of a mask that fits these sizes."""
    return st.recursive(
        leaves(b, h, t, s, rules),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)
        ),
        max_leaves=4,
    )


# -- cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of the table. Sizes are (b, h, g, t, s, d, w); the rest are names of what's below."""

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    bias: str = "none"
    softcap: float | None = None
    sink: str = "none"
    offset: str = "default"
    layout: str = "contiguous"
    scale: float | None = None
    size: str = "ordinary"
    seed: int = 0

    def __str__(self) -> str:
        b, h, g, t, s, d, w = self.sizes
        parts = [f"b{b}h{h}g{g}t{t}s{s}d{d}w{w}", str(self.dtype).removeprefix("torch.")]
        parts += [x for x in (self.mask, self.bias) if x != "none"]
        parts += [f"cap{self.softcap}"] if self.softcap else []
        parts += [f"sink-{self.sink}"] if self.sink != "none" else []
        parts += [f"offset-{self.offset}"] if self.offset != "default" else []
        parts += [x for x in (self.layout, self.size) if x not in ("contiguous", "ordinary")]
        parts += [f"scale{self.scale}"] if self.scale is not None else []
        return " ".join(parts).replace(" ", "-")

    def settings(self) -> set[Any]:
        """What a sample of cases must cover: every value, of each family of cases (see `conftest`)."""
        return {(self.seed, f.name, getattr(self, f.name)) for f in fields(self)}


@dataclass
class Inputs:
    """The tensors of a case, its mask and its bias."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor  # the gradient that comes to the output
    mask: Spec | None
    bias: tuple[str, Tensor] | None
    sink: Tensor | None
    offset: Any
    keep: np.ndarray = field(repr=False)

    @property
    def scale(self) -> float:
        d = self.q.shape[-1]
        return self.case.scale if self.case.scale is not None else 1 / math.sqrt(d) if d else 1.0

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that require gradients, by name."""
        bias = None if self.bias is None else self.bias[1]
        tensors = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink, "bias": bias}
        return {name: x for name, x in tensors.items() if x is not None and x.requires_grad}

    def arguments(self) -> dict[str, Any]:
        """What `attention` takes beside q, k and v, made anew."""
        return {
            "mask": None if self.mask is None else build(self.mask),
            "bias": None if self.bias is None else library_bias(self.bias),
            "softcap": self.case.softcap,
            "sink": self.sink,
            "offset": self.offset,
            "scale": self.case.scale,
        }

    def on(self, device: torch.device | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of the leaves on a device, and what `attention` takes beside q, k and v there."""
        leaves = {name: x.detach().to(device).requires_grad_() for name, x in self.leaves().items()}
        given = self.arguments() | {"sink": leaves.get("sink")}
        if self.mask is not None:
            given["mask"] = given["mask"].to(device)
        if self.bias is not None:
            given["bias"] = library_bias((self.bias[0], leaves["bias"]))
        if isinstance(self.offset, Tensor):
            given["offset"] = self.offset.to(device)
        return leaves, given


def gradients(out: Tensor, leaves: dict[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The gradient of every leaf; zeros if the output doesn't depend on it."""
    grads = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def library_bias(bias: tuple[str, Tensor]) -> Any:
    kind, tensor = bias
    return {"alibi": mh.ALiBi, "relative": mh.Relative, "dense": mh.Dense}[kind](tensor)


_VISIBLE: dict[Case, np.ndarray] = {}  # the loop over every pair, walked once for each case


def make(case: Case) -> Inputs:
    """The tensors of a case, the same ones every time."""
    b, h, g, t, s, d, w = case.sizes
    gen = torch.Generator().manual_seed(case.seed * 7919 + sum(map(ord, str(case))))
    spread = (case.scale or 1 / math.sqrt(max(d, 1))) * math.sqrt(max(d, 1))  # of ordinary scores
    size = math.sqrt(1500 / abs(spread)) if case.size == "thousands" else 1.0

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    def leaf(shape: tuple[int, ...], times: float) -> Tensor:
        return _lay_out((normal(*shape) * times).to(case.dtype), case.layout).requires_grad_()

    q, k, v = leaf((b, h, t, d), size), leaf((b, g, s, d), size), leaf((b, g, s, w), 1.0)
    upstream = _lay_out(normal(b, h, t, w).to(case.dtype), case.layout)
    offset: Any = {"default": None, "zero": 0, "negative": -2, "ahead": 3}.get(case.offset)
    if case.offset == "each":
        offset = torch.tensor([(3 * n) % 5 - 1 for n in range(b)], dtype=torch.int64)
    mask = _mask(case.mask, b, h, t, s, random.Random(case.seed + 1))
    bias = _bias(case, normal)
    sink = None
    if case.sink != "none":
        sink = normal(h).to(torch.float32 if case.sink == "float32" else case.dtype)
        if case.sink == "some are -inf" and h:
            sink[0] = -math.inf
        sink.requires_grad_()
    if case not in _VISIBLE:
        _VISIBLE[case] = visible(mask, b, h, t, s, offset)
    keep = _VISIBLE[case]
    return Inputs(case, q, k, v, upstream, mask, bias, sink, offset, keep)


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, elsewhere in memory."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "batch first":  # [b, t, h, d] in memory, as projections leave it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other":  # the last dimension strides over a gap
        return torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0]
    if layout == "columns":  # d before t
        return x.mT.contiguous().mT
    if layout == "one head":  # all heads are the first one, with stride 0
        return x[:, :1].contiguous().expand(x.shape)
    raise AssertionError(layout)


LAYOUTS = ("contiguous", "batch first", "every other", "columns", "one head")


def _ids(b: int, n: int, rng: random.Random, kinds: int = 3, each: bool = True) -> Any:
    """Ids `[b, n]` in runs, or `[n]`."""

    def line() -> tuple[int, ...]:
        return tuple(sorted(rng.randrange(kinds) for _ in range(n)))

    return tuple(line() for _ in range(b)) if each and b else line()


def _cells(shape: tuple[int, ...], rng: random.Random, share: float = 0.6) -> Tensor:
    count = math.prod(shape)
    return torch.tensor([rng.random() < share for _ in range(count)], dtype=torch.bool).reshape(shape)


def _mask(name: str, b: int, h: int, t: int, s: int, rng: random.Random) -> Spec | None:
    causal = ("causal",)
    some = tuple(rng.randrange(s + 1) for _ in range(b))
    specs: dict[str, Callable[[], Spec | None]] = {
        "none": lambda: None,
        "full": lambda: ("full",),
        "causal": lambda: causal,
        "window": lambda: ("window", 2, 1),
        "causal window": lambda: ("and", causal, ("window", 1, None)),
        "prefix": lambda: ("or", causal, ("prefix", some)),
        "lengths": lambda: ("lengths", some, False),
        "left lengths": lambda: ("and", causal, ("lengths", some, True)),
        "documents": lambda: ("and", causal, ("documents", _ids(b, s, rng), None)),
        "cross documents": lambda: ("documents", _ids(b, s, rng, each=False), _ids(b, t, rng)),
        "after": lambda: ("after", tuple(rng.randrange(3) for _ in range(s)), None),
        "holes": lambda: ("not", ("or", ("diagonal", -1), ("keys", (0, 3)))),
        "keep": lambda: ("keep", _cells((t, s), rng)),
        "keep four": lambda: ("keep", _cells((b, 1, t, s), rng)),
        "keep padding": lambda: ("keep", _cells((b, 1, 1, s), rng)),
        "drop heads": lambda: ("drop", _cells((1, h, t, 1), rng, 0.3)),
        "rule": lambda: ("rule", "batch and head"),
        "nothing": lambda: ("keys", ()),
    }
    return specs[name]()


MASKS = ("none", "full", "causal", "window", "causal window", "prefix", "lengths", "left lengths",
         "documents", "cross documents", "after", "holes", "keep", "keep four", "keep padding", "drop heads",
         "rule", "nothing")  # fmt: skip


def _bias(case: Case, normal: Any) -> tuple[str, Tensor] | None:
    b, h, _, t, s, _, _ = case.sizes
    if case.bias == "none":
        return None
    kind, _, what = case.bias.partition(" ")
    dtype = torch.float32 if what == "float32" else case.dtype
    if kind == "alibi":
        tensor = normal(1 if what == "one" else h).abs() / 3
    elif kind == "relative":
        tensor = normal(1 if what == "one" else h, 1 if what == "short" else 7)
    else:
        shape = {"": (b, h, t, s), "heads": (h, 1, 1), "pairs": (t, s), "keys": (b, 1, 1, s),
                 "queries": (h, t, 1), "one": (), "hiding": (1, h, t, s)}[what]  # fmt: skip
        tensor = normal(*shape)
        if what == "hiding":
            tensor = tensor.masked_fill(tensor > 0.4, -math.inf)
    return kind, tensor.to(dtype).requires_grad_()


BIASES = ("none", "alibi", "alibi float32", "alibi one", "relative", "relative one", "relative short",
          "dense", "dense heads", "dense pairs", "dense keys", "dense queries", "dense one",
          "dense hiding")  # fmt: skip

SIZES = (  # b, h, g, t, s, d, w
    (2, 4, 4, 6, 6, 8, 8),
    (2, 4, 2, 5, 9, 8, 8),
    (1, 6, 1, 9, 4, 5, 5),  # more queries than keys: causal leaves rows empty
    (3, 2, 1, 1, 7, 16, 16),
    (2, 2, 2, 7, 1, 3, 3),
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 5, 6, 7, 3),  # values of another width
    (1, 2, 1, 70, 75, 12, 12),  # several blocks of rows and columns
    (1, 2, 2, 100, 40, 33, 33),
)

FACTORS: dict[str, tuple[Any, ...]] = {
    "sizes": SIZES,
    "dtype": DTYPES,
    "mask": MASKS,
    "bias": BIASES,
    "softcap": (None, None, 0.7, 30.0),
    "sink": ("none", "none", "own", "float32", "some are -inf"),
    "offset": ("default", "default", "zero", "negative", "ahead", "each"),
    "layout": LAYOUTS,
    "scale": (None, None, 0.3, -1.0),
    "size": ("ordinary", "ordinary", "thousands"),
}


# What PyTorch's fused kernels can say, so that they meet all masks too.
FUSED = FACTORS | {
    "sizes": tuple(sizes for sizes in SIZES if sizes[5] == sizes[6]),
    "bias": ("none", "none", "dense pairs", "dense hiding", "alibi float32"),
    "softcap": (None,),
    "sink": ("none",),
    "layout": ("contiguous", "batch first", "one head"),
}


def pairwise(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[Case]:
    """Cases in which every two levels of any two factors meet, chosen greedily."""
    rng = random.Random(seed)
    names = list(factors)
    levels = [len(factors[name]) for name in names]
    left = {
        (m, x, n, y)
        for m, n in itertools.combinations(range(len(names)), 2)
        for x in range(levels[m])
        for y in range(levels[n])
    }
    cases = []
    while left:
        must = min(left) if rng.random() < 0.5 else rng.choice(sorted(left))
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(12):
            row = [rng.randrange(n) for n in levels]
            row[must[0]], row[must[2]] = must[1], must[3]
            met = sum((m, row[m], n, row[n]) in left for m, n in itertools.combinations(range(len(row)), 2))
            best = max(best, (met, row))
        row = best[1]
        left -= {(m, row[m], n, row[n]) for m, n in itertools.combinations(range(len(row)), 2)}
        cases.append(Case(**{name: factors[name][x] for name, x in zip(names, row, strict=True)}, seed=seed))
    return cases


def _corners() -> list[Case]:
    """Sizes of 0 and 1 in every letter, bare and with everything at once; and a few plain problems."""
    base = (2, 4, 2, 5, 6, 8, 8)
    cases = []
    for place, letter in enumerate("bhgtsdw"):
        for n in (0, 1):
            sizes = list(base)
            sizes[place] = n
            if letter == "h":
                sizes[2] = n  # g divides h
            elif letter == "g" and n == 0:
                sizes[1] = 0
            for more in ({}, {"mask": "causal", "bias": "dense", "sink": "own", "softcap": 2.0}):
                cases.append(Case(tuple(sizes), **more))
            if letter == "d":
                cases.append(Case((2, 4, 2, 5, 6, n, n)))
    for dtype in DTYPES:  # what sdpa computes, at lengths with several blocks, and what most people ask for
        for mask, offset in (
            ("none", "default"),
            ("causal", "default"),
            ("causal", "zero"),
            ("keep four", "zero"),
        ):
            for sizes in ((2, 4, 4, 67, 67, 32, 32), (1, 4, 2, 40, 90, 24, 24), (1, 4, 1, 90, 40, 7, 7)):
                cases.append(Case(sizes, dtype, mask=mask, offset=offset, layout="batch first"))
    return cases


CASES = _corners() + pairwise(FACTORS) + pairwise(FUSED, seed=1)


# -- oracles -----------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Output, log-sum-exp, weights and gradients, and how far rounding may move each of their numbers."""

    values: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]
    scores: np.ndarray  # [b, h, t, s]; −inf where the query may not see the key
    into_sink: np.ndarray  # [b, h, t]: what the sink takes of each row
    score_errors: np.ndarray
    sink_errors: np.ndarray


def wide(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy().astype(WIDE)


def bias_numbers(inputs: Inputs) -> np.ndarray:
    """What the bias adds, `[b, h, t, s]`, written out."""
    b, h, _, t, s, _, _ = inputs.case.sizes
    if inputs.bias is None:
        return np.zeros((b, h, t, s), dtype=WIDE)
    kind, tensor = inputs.bias
    numbers = wide(tensor)
    if kind == "dense":
        return np.broadcast_to(numbers, (b, h, t, s)).astype(WIDE)
    rows = np.array(positions(inputs.offset, b, t, s), dtype=int).reshape(b, 1) + np.arange(t)
    ahead = np.arange(s) - rows[..., None]  # [b, t, s], j − i
    per_head = np.broadcast_to(numbers, (h, *numbers.shape[1:]))
    if kind == "alibi":
        return -per_head[None, :, None, None] * np.abs(ahead)[:, None]
    n = numbers.shape[1] // 2
    place = np.clip(ahead, -n, n) + n
    return np.moveaxis(per_head[:, place], 0, 1)  # [b, h, t, s]


def reduce_bias(inputs: Inputs, grad: np.ndarray, absolute: bool = False) -> np.ndarray:
    """The gradient of the bias's own tensor from that of the scores `[b, h, t, s]`."""
    assert inputs.bias is not None
    kind, tensor = inputs.bias
    b, h, _, t, s, _, _ = inputs.case.sizes
    if kind == "dense":
        padded = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
        axes = tuple(n for n, size in enumerate(padded) if size == 1)
        return grad.sum(axes, keepdims=True).reshape(tuple(tensor.shape))
    rows = np.array(positions(inputs.offset, b, t, s), dtype=int).reshape(b, 1) + np.arange(t)
    ahead = np.arange(s) - rows[..., None]  # [b, t, s]
    if kind == "alibi":
        sign = 1 if absolute else -1
        summed = (grad * (sign * np.abs(ahead))[:, None]).sum((0, 2, 3))  # [h]
    else:
        n = tensor.shape[1] // 2
        place = np.clip(ahead, -n, n) + n
        summed = np.zeros((h, 2 * n + 1), dtype=WIDE)
        for m in range(h):
            np.add.at(summed[m], place, grad[:, m])
    return summed.sum(0, keepdims=True) if tensor.shape[0] == 1 else summed


def oracle(inputs: Inputs, fused: bool = False, partial: bool = False) -> Answer:
    """Return the formula and its gradient in longdouble, each step with its rounding.

    "The error budget" in docs/explanation/numerics.md derives them. The error of `x` is named `e_x`. u is the
    unit roundoff that scores and sums are computed with, `low` that of the case's dtype, in which outputs are
    stored, and weights and their gradients may be.

    fused: by PyTorch's fused attention on the CPU, which takes exponentials that are right to 20 units in the
    last place, sums scores in another order for the gradient, and adds gradients in the case's own dtype.

    partial: by several processes, whose partial outputs and gradients are rounded to the case's dtype before
    they are added.
    """
    case = inputs.case
    b, h, g, t, s, d, width = case.sizes
    times = h // g if g else 1
    q, k, v = wide(inputs.q), wide(inputs.k).repeat(times, 1), wide(inputs.v).repeat(times, 1)
    do, cap, scale = wide(inputs.upstream), case.softcap, WIDE(inputs.scale)
    computed = torch.float64 if case.dtype == torch.float64 else torch.float32
    u, low = torch.finfo(computed).eps / 2, torch.finfo(case.dtype).eps / 2
    exp, additions = (40, t // BLOCK) if fused else (4, 0)
    of_parts = low if partial else 0  # relative to the sum of absolute values

    def summed(n: int) -> float:
        """The error of a sum of n products, relative to the sum of their absolute values."""
        return (n + 2) * u

    with np.errstate(all="ignore"):
        # Scores: a sum of d products, of numbers that carry a scale. Each step after it rounds once more.
        raw = scale * (q @ k.swapaxes(-1, -2))  # [b, h, t, s]
        e_raw = abs(scale) * (abs(q) @ abs(k).swapaxes(-1, -2)) * summed(d + 1)
        bias = bias_numbers(inputs)
        seen = inputs.keep & (bias != -np.inf)
        added = np.where(seen, bias, 0)
        score, e_score, slope, e_slope = raw, e_raw, np.ones_like(raw), np.zeros_like(raw)
        if cap is not None:
            bent = np.tanh(raw / cap)
            slope = 1 - bent**2
            e_bent = slope * (e_raw + 2 * u * abs(raw)) / cap + TANH * u * abs(bent)
            score, e_score = cap * bent, cap * e_bent + u * cap * abs(bent)
            e_slope = 2 * abs(bent) * e_bent + 2 * u
        score, e_score = score + added, e_score + 2 * u * abs(added)
        if inputs.bias is not None:
            e_score = e_score + u * abs(score)
        score = np.where(seen, score, -np.inf)

        # Weights: exp(score − lse).
        sink = np.full(h, -np.inf, dtype=WIDE) if inputs.sink is None else wide(inputs.sink)
        sink = np.broadcast_to(sink[None, :, None], (b, h, t))
        top = np.maximum(score.max(-1), sink) if s else sink.copy()
        ground = np.where(top == -np.inf, 0, top)
        total = np.exp(score - ground[..., None]).sum(-1) + np.exp(sink - ground)
        lse = np.where(total == 0, -np.inf, ground + np.log(total))
        fine = np.where(total == 0, 0, lse)
        weight, into_sink = np.exp(score - fine[..., None]), np.exp(sink - fine)

        terms = seen.sum(-1) + (sink != -np.inf)  # [b, h, t]: of the sum in lse
        e_shift = (weight * np.where(seen, e_score, 0)).sum(-1)  # what the errors of its scores move lse by
        e_log = summed(0) * (terms > 1) + np.maximum(terms - 1, 0) * u + exp * u * (terms > 1)
        e_lse = np.minimum(u * abs(fine), np.where(total == 0, 0, fine - ground)) + e_log

        def exponential(x: np.ndarray) -> np.ndarray:
            """The relative error of exp(x), x ≤ 0, and of a running maximum's corrections."""
            return np.where(np.isfinite(x), 3 * abs(x), 0) * u + (2 + s // BLOCK) * exp * u

        own = np.where(seen, e_score, 0)
        relative = own * (1 - weight) + (e_shift[..., None] - weight * own) + e_lse[..., None]
        e_weight = weight * np.expm1(relative + exponential(score - fine[..., None])) + UNDERFLOW * seen
        e_into = into_sink * np.expm1(e_shift + e_lse + exponential(sink - fine))
        if fused:  # what the gradient takes for weights
            relative = own + e_shift[..., None] + e_log[..., None] + u * abs(fine)[..., None]
        e_again = weight * np.expm1(relative + exponential(score - fine[..., None])) + UNDERFLOW * seen
        rounding = low * weight + tiny(case.dtype) * seen  # as a factor of values, a weight may be rounded
        e_used, e_weighed = e_weight + rounding, e_again + rounding

        out, most = weight @ v, weight @ abs(v)
        e_out = e_used @ abs(v) + (summed(s + s // BLOCK) + of_parts) * most
        stored_twice = fused and inputs.sink is not None  # flex joins the sink to an output that is rounded
        e_out = e_out + (1 + stored_twice) * low * (abs(out) + e_out) + tiny(case.dtype)

        # Gradients.
        d_weight, d_most = do @ v.swapaxes(-1, -2), abs(do) @ abs(v).swapaxes(-1, -2)  # [b, h, t, s]
        delta = (weight * d_weight).sum(-1)  # [b, h, t]
        e_delta = (abs(do) * e_out).sum(-1) + summed(width + s) * (weight * d_most).sum(-1)
        apart = d_weight - delta[..., None]
        e_apart = summed(width) * d_most + e_delta[..., None] + 2 * u * abs(apart)
        d_score = np.where(seen, weight * apart, 0)
        e_d_score = e_again * abs(apart) + (weight + e_again) * e_apart + u * abs(d_score)
        e_d_score = np.where(seen, e_d_score, 0)
        d_raw = d_score * slope
        e_d_raw = e_d_score * slope + (abs(d_score) + e_d_score) * e_slope
        e_d_raw = e_d_raw + low * (abs(d_raw) + e_d_raw) + tiny(case.dtype) * seen

        def gradient(factor: np.ndarray, e_factor: np.ndarray, x: np.ndarray, by: Any) -> Any:
            """factor · x, a sum over n, times a number; and its error before it is rounded."""
            most = abs(factor) @ abs(x)
            relative = summed(1 + factor.shape[-1]) + of_parts
            return by * (factor @ x), abs(by) * (e_factor @ abs(x) + relative * most)

        def rounded(value: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Sum the heads that share a key, `[b, h, …]` → `[b, g, …]`, perhaps in the case's own dtype."""
            sizes = _group(abs(value) + error, g)
            return _group(value, g), _group(error, g) + (max(times, 1) + additions) * low * sizes + tiny(
                case.dtype
            )

        q_grad, e_q = gradient(d_raw, e_d_raw, k, scale)
        found = {
            "q": (q_grad, e_q + low * (abs(q_grad) + e_q) + tiny(case.dtype)),
            "k": rounded(*gradient(d_raw.swapaxes(-1, -2), e_d_raw.swapaxes(-1, -2), q, scale)),
            "v": rounded(*gradient(weight.swapaxes(-1, -2), e_weighed.swapaxes(-1, -2), do, WIDE(1))),
        }
        if inputs.sink is not None:
            pulled = into_sink * delta
            e_pulled = e_into * abs(delta) + (into_sink + e_into) * e_delta
            e_sink = (e_pulled + summed(b * t) * abs(pulled)).sum((0, 2))
            found["sink"] = -pulled.sum((0, 2)), stored(e_sink, pulled.sum((0, 2)), inputs.sink.dtype)
        if inputs.bias is not None:
            grad = reduce_bias(inputs, d_score)
            terms_of = summed(d_score.size // max(grad.size, 1) + 1)
            e_bias = reduce_bias(inputs, e_d_score + terms_of * abs(d_score), absolute=True)
            found["bias"] = grad, stored(e_bias, grad, inputs.bias[1].dtype)

    values = {"out": out, "lse": lse, "weights": weight} | {name: x for name, (x, _) in found.items()}
    e_lse = np.where(total == 0, 0, e_shift + e_log + u * abs(fine))
    errors = {"out": e_out, "lse": e_lse, "weights": e_weight} | {name: e for name, (_, e) in found.items()}
    return Answer(values, errors, score, into_sink, e_score, e_into)


TANH = 8  # the error of tanh, in units of roundoff
BLOCK = 32  # keys between two corrections of a running maximum, at least
UNDERFLOW = float(torch.finfo(torch.float32).smallest_normal)  # a smaller weight may be 0


def tiny(dtype: torch.dtype) -> float:
    """What is smaller than this may become 0 in a dtype."""
    return float(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)


def stored(error: np.ndarray, value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """An error after its value is rounded to a dtype."""
    return error + torch.finfo(dtype).eps / 2 * (abs(value) + error) + tiny(dtype)


def _group(x: np.ndarray, g: int) -> np.ndarray:
    """Sum over the query heads that share a key head: `[b, h, …]` → `[b, g, …]`."""
    b, h = x.shape[:2]
    return x.reshape(b, g, h // g if g else 0, *x.shape[2:]).sum(2)


def plain(inputs: Inputs) -> dict[str, Tensor]:
    """Return the output, weights and gradients by matmul, softmax and autograd, in the case's own dtype."""
    case, dtype = inputs.case, inputs.case.dtype
    h, g = case.sizes[1:3]
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.leaves().items()}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    k, v = (x.repeat_interleave(h // g if g else 1, 1) for x in (k, v))
    score = (q * inputs.scale) @ k.mT
    if case.softcap is not None:
        score = case.softcap * torch.tanh(score / case.softcap)
    seen = torch.from_numpy(inputs.keep)
    if inputs.bias is not None:
        added = _plain_bias(inputs, leaves["bias"])
        seen = seen & (added != -math.inf)
        score = score + torch.where(added == -math.inf, 0, added)
    low = torch.finfo(dtype).min
    score = score.masked_fill(~seen, low)
    b, _, t, _ = score.shape
    sink = leaves["sink"] if inputs.sink is not None else score.new_full((h,), -math.inf)
    joined = torch.cat((score, sink.clamp(min=low)[None, :, None, None].expand(b, h, t, 1)), -1)
    weight = joined.softmax(-1)[..., :-1].masked_fill(~seen, 0)
    out = weight @ v
    out.backward(inputs.upstream)
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {"out": out.detach(), "weights": weight.detach()} | grads


def _plain_bias(inputs: Inputs, tensor: Tensor) -> Tensor:
    b, h, _, t, s, _, _ = inputs.case.sizes
    kind = inputs.bias[0] if inputs.bias else ""
    if kind == "dense":
        return tensor.expand(b, h, t, s)
    first = torch.tensor(positions(inputs.offset, b, t, s), dtype=torch.int64)
    ahead = torch.arange(s) - (first[:, None] + torch.arange(t))[..., None]  # [b, t, s]
    each = tensor.expand(h, *tensor.shape[1:])
    if kind == "alibi":
        return -each[None, :, None, None] * ahead.abs()[:, None].to(tensor.dtype)
    n = tensor.shape[1] // 2
    return each[:, ahead.clamp(-n, n) + n].transpose(0, 1)


def over(x: Tensor | np.ndarray, true: np.ndarray, may: np.ndarray) -> str:
    """Describe the largest error above what is allowed; empty if there is none.

    Equal infinities don't differ, and NaN differs from everything.
    """
    x = wide(x) if isinstance(x, Tensor) else x
    assert x.shape == true.shape == may.shape, (x.shape, true.shape, may.shape)
    with np.errstate(all="ignore"):
        difference = np.where(x == true, 0, abs(x - true))
        wrong = ~(difference <= may)
    if not wrong.any():
        return ""
    worst = np.unravel_index(np.where(wrong, difference / np.maximum(may, 1e-300), 0).argmax(), x.shape)
    return (
        f"{x[worst]:.6g} at {[int(n) for n in worst]}: {difference[worst]:.3g} off, {may[worst]:.3g} allowed"
    )
