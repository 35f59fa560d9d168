"""A check that `kernel="auto"` chooses the fastest kernel, on a grid of cases and on random ones.

In each case, runs of `attention(kernel="auto")`, of PyTorch's own call and of every kernel that supports the
case are interleaved. The cases in which `auto` seems slower are measured again after all others, several
times, and the smallest median of each contestant counts: other processes can only slow a run down.

`auto` isn't compared with the kernel that it chose: both run the same code, so that a difference is noise.
The JSON file has the times of all contestants.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import bench
from manyheads.bench import MAX_WEIGHT_BYTES, Contestant, Forward, describe_time, measure_seconds
from manyheads.functional import attention
from manyheads.kernels import ORDER, choose
from manyheads.masks import Causal, Lengths, Mask, Window
from manyheads.problem import Problem
from manyheads.shapes import amount

DTYPES = bench.DTYPES | {"float16": torch.float16}
SIZES = (64, 32, 80, 128)  # head sizes; some cases have only the first
LENGTHS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MASKS = ("full", "causal", "window", "padding")
QUERIES = (1, 4, 16)  # the numbers of queries when decoding
RANDOM = 200  # the number of random cases
LARGEST = 1 << 26  # the most scores of a random case: 4 heads of 4,096 tokens

# `auto` counts as slower if it takes more than `MIN_RATIO` times the fastest time, and `MIN_DELAY` s longer.
MIN_RATIO, MIN_DELAY = 1.05, 15e-6
SAMPLE = 1e-3  # the shortest measurement in seconds, less than the time slice of a process
LONG_CASE = 5.0  # cases that take longer than this many seconds are measured in two rounds
MAX_RATIO = 3.0  # a contestant whose first run takes more than this times the fastest isn't run again
REPEATS = 5  # how often the cases in which `auto` seems slower are measured again
ROUNDS_FACTOR = 3  # each of these measurements has this many times as many rounds
WEIGHT_COPIES = 5  # the number of tensors of the size of all weights that the reference kernel needs at once
AUTO = "auto"


@dataclass(frozen=True)
class Case:
    """An attention problem.

    Attributes:
        dtype: The name of the dtype.
        mask: "full"; "causal" (the last query has the position of the last key); "window" (causal with
            `visible` keys); or "padding" (lengths fall from `keys` in the first sequence to `visible` in the
            last).
        training: Whether to measure forward and backward, not forward alone.
        batch: The number of sequences.
        heads: The number of query heads.
        groups: The number of key/value heads.
        queries: The number of queries.
        keys: The number of keys.
        size: The head size.
        visible: The number of keys of a window, or of the shortest sequence.
    """

    dtype: str
    mask: str
    training: bool
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int
    visible: int

    def __str__(self) -> str:
        mask = {"window": f"window of {self.visible:,}", "padding": f"padding to {self.visible:,}"}
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        shared = f" ({self.groups} of keys)" if self.groups < self.heads else ""
        tokens = "1 token" if self.keys == 1 else f"{self.keys:,} tokens"
        if self.queries < self.keys:
            tokens = f"{self.queries:,} of {self.keys:,} tokens"
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        parts = (self.dtype, mask.get(self.mask, self.mask), *["training"] * self.training)
        return f"{', '.join(parts)}, {batch}{heads} of {self.size}{shared}, {tokens}"

    @property
    def scores(self) -> int:
        """Return the number of scores."""
        return self.batch * self.heads * self.queries * self.keys

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return random q `[b, h, t, d]`, k and v `[b, g, s, d]`."""
        dtype = DTYPES[self.dtype]
        q = torch.randn(self.batch, self.heads, self.queries, self.size).to(dtype)
        k, v = (torch.randn(self.batch, self.groups, self.keys, self.size).to(dtype) for _ in range(2))
        return q, k, v

    def mask_value(self) -> Mask | None:
        """Return the mask as `attention` takes it."""
        if self.mask == "causal":
            return Causal()
        if self.mask == "window":
            return Window(left=self.visible - 1, right=0)
        return Lengths(self._lengths()) if self.mask == "padding" else None

    def options(self) -> dict[str, Any]:
        """Return the mask and the groups as PyTorch's function takes them."""
        options: dict[str, Any] = {"enable_gqa": True} if self.groups < self.heads else {}
        if self.mask == "padding":
            keep = torch.arange(self.keys) < self._lengths()[:, None]  # [b, s]
            return options | {"attn_mask": keep[:, None, None, :]}
        if self.mask == "full" or (self.mask == "causal" and self.queries == 1):
            return options
        if self.mask == "causal" and self.queries == self.keys:
            return options | {"is_causal": True}
        keep = torch.ones(self.queries, self.keys, dtype=torch.bool).tril(self.keys - self.queries)
        if self.mask == "window":
            keep &= ~keep.tril(self.keys - self.queries - self.visible)
        return options | {"attn_mask": keep}

    def _lengths(self) -> Tensor:
        """Return the number of visible keys of each sequence, `[b]`."""
        if self.batch == 1:
            return torch.tensor([self.visible])
        return torch.linspace(self.keys, self.visible, self.batch).round().to(torch.int64)


@dataclass
class Outcome:
    """The measurement of a case.

    Attributes:
        case: The case.
        kernel: The kernel that `auto` chose.
        times: The median of each contestant, in seconds.
        left_out: The reasons why contestants were left out.
    """

    case: Case
    kernel: str
    times: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        """Return the name of the fastest contestant, `auto` included, but not the kernel that it chose."""
        return min((name for name in self.times if name != self.kernel), key=lambda name: self.times[name])

    @property
    def is_slower(self) -> bool:
        """Return True if `auto` is slower than the fastest by more than `MIN_RATIO` and `MIN_DELAY`."""
        best = self.times[self.fastest]
        return self.times[AUTO] > MIN_RATIO * best and self.times[AUTO] > best + MIN_DELAY

    def improve(self, other: Outcome) -> None:
        """Keep the smaller time of each contestant, from this outcome or a repeated measurement."""
        for name, seconds in other.times.items():
            self.times[name] = min(self.times.get(name, seconds), seconds)
            self.left_out.pop(name, None)

    def __str__(self) -> str:
        auto, best = self.times[AUTO], self.times[self.fastest]
        return (
            f"{self.case}: auto ({self.kernel}) {describe_time(auto)}, "
            f"{self.fastest} {describe_time(best)} ({auto / best:.2f}×)"
        )


@dataclass
class Report(bench.BaseReport):
    """The outcomes of the cases, with the machine and the seed of the random cases."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    name: ClassVar[str] = "choice"

    @property
    def slower(self) -> list[Outcome]:
        """Return the outcomes in which `auto` is slower than the fastest."""
        return [outcome for outcome in self.outcomes if outcome.is_slower]

    def measure(self, case: Case, rounds: int) -> None:
        """Measure a case, and add its outcome."""
        self.outcomes.append(measure(case, rounds))

    def finish(self, rounds: int, track: bench.Track) -> bool:
        """Measure the slower cases again; return True if none stays slower."""
        for _ in range(REPEATS):
            for outcome in track(self.slower, description="measuring slower ones again"):
                outcome.improve(measure(outcome.case, rounds * ROUNDS_FACTOR))
        return not self.slower

    def text(self) -> str:
        """Return a line for each case in which `auto` is slower, and a sentence about all cases."""
        threshold = f"{MIN_RATIO - 1:.0%} and {MIN_DELAY * 1e6:.0f} µs"
        count = f"In {len(self.slower):,}" if self.slower else "In none"
        lines = [str(outcome) for outcome in self.slower] + [""] * bool(self.slower)
        lines.append(
            f"{count} of {len(self.outcomes):,} cases (random ones of seed {self.seed}), "
            f'kernel="auto" is more than {threshold} slower than the fastest.'
        )
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """Return the machine and the text."""
        text = self.text().replace("\n", "\n\n").rstrip()
        return f"{bench.describe_versions(self.machine)}\n\n{text}\n"


# -- the cases ---------------------------------------------------------------------------------------


def cases(dtypes: tuple[str, ...], sizes: tuple[int, ...], lengths: tuple[int, ...], seed: int) -> list[Case]:
    """Return the cases of the grid and the random cases.

    Args:
        dtypes: The names of the dtypes, all if empty.
        sizes: The head sizes. If empty, `SIZES` in the grid and any in random cases.
        lengths: The numbers of tokens. If empty, `LENGTHS` in the grid and any in random cases.
        seed: The random seed.

    Returns:
        The cases.

    Raises:
        ValueError: If a dtype is unknown, or a size or length is less than 1.
    """
    bench.check("dtype", dtypes, DTYPES)
    bench.check_numbers(sizes, lengths)
    random_cases = draw(random.Random(seed), dtypes or tuple(DTYPES), sizes, lengths)
    grid_cases = grid(dtypes or tuple(DTYPES), sizes or SIZES, lengths or LENGTHS)
    return list(dict.fromkeys(grid_cases)) + list(itertools.islice(random_cases, RANDOM))


def grid(dtypes: tuple[str, ...], sizes: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Case]:
    """Yield all combinations with short lengths, and those with long lengths that take at most minutes."""
    for tokens, mask, training, dtype in itertools.product(lengths, MASKS, (False, True), dtypes):
        common = (dtype, mask, training, tokens)
        for size in sizes if tokens <= 512 else sizes[:1]:
            yield _case(*common, heads=1, groups=1, size=size)
            if tokens <= 1024 or (mask == "causal" and tokens <= (2048 if training else 8192)):
                yield _case(*common, heads=8, groups=8, size=size)
        if tokens <= 1024:
            yield _case(*common, heads=8, groups=2, size=sizes[0])
        for queries in QUERIES:
            if queries >= tokens or training or mask == "window":
                continue
            for size in sizes if mask == "full" else sizes[:1]:
                yield _case(*common, heads=8, groups=8, size=size, queries=queries)
            yield _case(*common, heads=1, groups=1, size=sizes[0], queries=queries)
            yield _case(*common, heads=8, groups=2, size=sizes[0], queries=queries)


def _case(
    dtype: str,
    mask: str,
    training: bool,
    tokens: int,
    *,
    heads: int,
    groups: int,
    size: int,
    queries: int | None = None,
) -> Case:
    """Return a case of the grid. A window has 1/4 of the keys, the shortest padded sequence 3/4."""
    visible = max({"window": tokens // 4, "padding": 3 * tokens // 4}.get(mask, tokens), 1)
    batch = 2 if mask == "padding" else 1
    return Case(dtype, mask, training, batch, heads, groups, queries or tokens, tokens, size, visible)


def draw(
    random: random.Random, dtypes: tuple[str, ...], sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[Case]:
    """Yield random cases forever, with head sizes and lengths from those given, or any if none are."""
    while True:
        keys = random.choice(lengths) if lengths else _log_uniform(random, 8192)
        queries = keys if random.random() < 0.7 else min(_log_uniform(random, 64), keys)
        groups = random.randint(1, 8)
        mask = random.choice(MASKS)
        case = Case(
            dtype=random.choice(dtypes),
            mask=mask,
            training=random.random() < 0.4,
            batch=_log_uniform(random, 8),
            heads=groups * random.choice((1, 1, 1, 2, 4)),
            groups=groups,
            queries=queries,
            keys=keys,
            size=random.choice(sizes) if sizes else random.randint(8, 256),
            visible=random.randint(1, keys) if mask in ("window", "padding") else keys,
        )
        if case.scores <= LARGEST or lengths:
            yield case


def _log_uniform(random: random.Random, largest: int) -> int:
    """Return a random number from 1 to `largest`, whose logarithm is uniform."""
    return round(math.exp(random.uniform(0, math.log(largest))))


# -- running -----------------------------------------------------------------------------------------


def contestants(case: Case) -> dict[str, Contestant | str]:
    """Return the contestants: `auto`, PyTorch and each kernel; a text is a reason to leave one out."""
    q, k, v = case.tensors()
    mask, options = case.mask_value(), case.options()
    forwards: dict[str, Forward | str] = {
        AUTO: lambda: attention(q, k, v, mask=mask),
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, **options),
        **{kernel: bench.run_kernel(kernel, q, k, v, mask) for kernel in ORDER},
    }
    size = WEIGHT_COPIES * case.scores * torch.float32.itemsize
    if size > MAX_WEIGHT_BYTES:
        forwards["reference"] = f"its weights would take {amount(size)}"
    return bench.with_backward(forwards, q, k, v) if case.training else dict(forwards)


def measure(case: Case, rounds: int) -> Outcome:
    """Run the contestants of a case, interleaved, and return their medians."""
    with torch.set_grad_enabled(case.training):
        running, left_out = bench.split(contestants(case))
        outcome = Outcome(case, _chosen(case), left_out=left_out)
        first: dict[str, float] = {}
        for name, run in running.items():
            try:
                first[name] = _first(run)
            except RuntimeError as error:  # for example out of memory
                if name == AUTO:
                    raise
                outcome.left_out[name] = str(error).partition("\n")[0]
        for name, seconds in list(first.items()):
            if name != AUTO and seconds > MAX_RATIO * min(first.values()):
                outcome.left_out[name] = f"its first run took {describe_time(seconds)}"
                del first[name]
        affordable = int(LONG_CASE / max(sum(first.values()), SAMPLE))  # rounds
        times = bench.interleave(running, first, SAMPLE, min(rounds, max(affordable, 2)))
    outcome.times = {name: statistics.median(seconds) for name, seconds in times.items()}
    return outcome


def _chosen(case: Case) -> str:
    """Return the name of the kernel that `auto` chooses."""
    q, k, v = (x.requires_grad_(case.training) for x in case.tensors())
    name: str = choose(Problem.of(q, k, v, mask=case.mask_value())).NAME
    return name


def _first(run: Contestant) -> float:
    """Warm up, and return the approximate seconds of a run."""
    seconds = measure_seconds(run)
    if seconds < 10 * SAMPLE:  # the first run may include loading or allocation
        seconds = min(measure_seconds(run) for _ in range(3))
    return seconds
