"""How fast attention is here: our kernels beside others', in one run, against what the machine can do.

Runs are interleaved (A B C A B C …), so that a noisy machine is noisy for all; medians and quartiles stay.
The machine's limits are measured in the same run: multiply-adds on registers alone, and reading memory once.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.files import replacing
from manyheads.functional import attention
from manyheads.kernels import processor
from manyheads.kernels.native import library
from manyheads.layers import MultiHeadAttention
from manyheads.masks import Causal
from manyheads.shapes import amount

HEADS = 8
LENGTHS = (64, 256, 1024, 2048, 4096, 8192, 16384)
KINDS = ("forward", "causal", "layer")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKAGES = ("torch", "manyheads", "x-transformers", "transformers")
ROOM = 4e9  # bytes: what builds more weights than this is left out
SAMPLE = 0.02  # seconds that one measurement takes at least

Run = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """One thing to compute: batch 1, 8 heads of `size`, so many tokens, without gradients."""

    kind: str
    dtype: str
    tokens: int
    size: int

    @property
    def operations(self) -> float:
        """Multiplications and additions of the two products (and of a layer's four projections)."""
        pairs = self.tokens**2 * (0.5 if self.kind == "causal" else 1)
        projections = 8 * self.tokens * (HEADS * self.size) ** 2 if self.kind == "layer" else 0
        return 4 * HEADS * pairs * self.size + projections


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant on one problem: the median and the quartiles of its runs."""

    name: str
    median: float
    low: float
    high: float
    rounds: int


@dataclass
class Result:
    """A problem, what each contestant took, and who was left out, with the reason."""

    problem: Problem
    timings: list[Timing] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """All results of a run, with the machine that it ran on."""

    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def save(self, folder: Path) -> list[Path]:
        """Write bench.json, bench.md and bench.png into a folder, created; the files."""
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "bench.json") as file:
            file.write(json.dumps(asdict(self), indent=1).encode())
        with replacing(folder / "bench.md") as file:
            file.write(self.markdown().encode())
        with replacing(folder / "bench.png") as file:
            self.plot().savefig(file, format="png", dpi=110)
        return [folder / f"bench.{end}" for end in ("json", "md", "png")]

    def _groups(self) -> list[tuple[str, str, int]]:
        """The kinds, dtypes and head sizes that were measured."""
        return list(dict.fromkeys((r.problem.kind, r.problem.dtype, r.problem.size) for r in self.results))

    def _of(self, *group: object) -> list[Result]:
        return [r for r in self.results if (r.problem.kind, r.problem.dtype, r.problem.size) == group]

    def markdown(self) -> str:
        """The machine, and a table for each kind, dtype and head size: times, and ratios to PyTorch's."""
        one = self.machine
        lines = [
            f"{one['processor']}, {one['threads']} threads, {one['date']}; "
            + ", ".join(f"{name} {number}" for name, number in one["versions"].items()),
            "",
            f"Peak {limit(one, 'float32')} in float32, {limit(one, 'bfloat16')} in bfloat16; "
            f"memory is read at {one['read'] / 1e9:.0f} GB/s.",
        ]
        for kind, dtype, size in self._groups():
            own = self._of(kind, dtype, size)
            names = list(dict.fromkeys(t.name for r in own for t in r.timings))
            what = f"**{kind}, {dtype}, {HEADS} heads of {size}**"
            lines += ["", f"{what}, median time (times as fast as {names[0]}; % of the peak)", ""]
            lines += [f"| tokens | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
            for result in own:
                lines.append(f"| {result.problem.tokens:,} | {' | '.join(self._cells(result, names))} |")
            left = {name: why for r in own for name, why in r.left_out.items()}
            lines += [f"\n{name} is left out: {why}." for name, why in left.items()]
        return "\n".join(lines) + "\n"

    def _cells(self, result: Result, names: list[str]) -> Iterator[str]:
        times = {timing.name: timing.median for timing in result.timings}
        base = result.timings[0].median
        peak = self.machine["peak"].get(result.problem.dtype, 0)
        for name in names:
            if name not in times:
                yield ""
                continue
            part = f", {result.problem.operations / times[name] / peak:.0%}" if peak else ""
            yield f"{_time(times[name])} ({base / times[name]:.2f}×{part})"

    def plot(self) -> Any:
        """Rates against lengths, one panel for each kind and dtype, as a matplotlib figure."""
        from matplotlib.figure import Figure

        panels = self._groups()
        across = min(len(panels), 3)
        down = math.ceil(len(panels) / max(across, 1))
        figure = Figure(figsize=(4.2 * across, 3.2 * down + 0.9), layout="constrained")
        names: dict[str, str] = {}
        for n, (kind, dtype, size) in enumerate(panels):
            axes = figure.add_subplot(down, across, n + 1)
            own = self._of(kind, dtype, size)
            peak = self.machine["peak"].get(dtype, 0)
            if peak:
                axes.axhline(peak / 1e9, color="#888888", linestyle="--", linewidth=1)
                axes.text(0.02, peak / 1e9, " peak", va="bottom", fontsize=8, color="#555555",
                          transform=axes.get_yaxis_transform())  # fmt: skip
            for name in dict.fromkeys(t.name for r in own for t in r.timings):
                names.setdefault(name, COLOURS[len(names) % len(COLOURS)])
                rates = {
                    r.problem.tokens: r.problem.operations / t.median / 1e9
                    for r in own
                    for t in r.timings
                    if t.name == name
                }
                again = list(names).index(name) >= len(COLOURS)
                axes.plot(list(rates), list(rates.values()), "--" if again else "-", marker="o", markersize=4,
                          color=names[name], label=name)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xticks(
                [r.problem.tokens for r in own], [f"{r.problem.tokens:,}" for r in own], rotation=45
            )
            axes.set_ylim(0, peak / 1e9 * 1.12 if peak else None)
            axes.set_title(f"{kind}, {dtype}, heads of {size}", fontsize=10)
            axes.set_xlabel("tokens")
            axes.set_ylabel("billion operations / s")
        handles = {
            h.get_label(): h for axes in figure.axes for h in axes.get_lines() if h.get_label() in names
        }
        place: Any = {"loc": "outside lower center", "ncols": 4, "fontsize": 8, "frameon": False}
        figure.legend(handles=list(handles.values()), **place)
        return figure


# Okabe and Ito's colours, which colour-blind people tell apart (jfly.uni-koeln.de/color).
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A00")


def limit(machine: dict[str, Any], dtype: str) -> str:
    """A dtype's peak as people say it."""
    peak = machine["peak"].get(dtype)
    return f"{peak / 1e9:.0f} GFLOP/s" if peak else "not measured"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def timed(run: Run, times: int = 1) -> float:
    """Seconds of one run, the mean of so many in a row."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


# -- the machine -------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """This machine and what it can do: operations per second by dtype, and bytes read per second.

    The best of several tries; without the native library nothing is measured, and 0 stands there.
    """
    threads = torch.get_num_threads()
    peak, read = {}, 0.0
    spin, reader, width = library.spin, library.read, library.width
    if spin is not None and reader is not None:
        for name, pairs in (("float32", 0), ("bfloat16", 1)):
            rates = []
            for _ in range(7):
                start = time.perf_counter()
                done = spin(width, 3_000_000, pairs, threads)
                rates.append(done / (time.perf_counter() - start))
            if max(rates):
                peak[name] = max(rates)
        numbers = torch.ones(1 << 26)
        read = max(
            numbers.nbytes / timed(lambda: reader(width, numbers.data_ptr(), numbers.numel(), threads))
            for _ in range(5)
        )
    return {
        "processor": processor(),
        "threads": threads,
        "width": None if width is None else library.WIDTHS[width],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: number for name in PACKAGES if (number := _version(name))},
        "peak": peak,
        "read": read,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# -- the contestants ---------------------------------------------------------------------------------


def contestants(problem: Problem) -> dict[str, Run | str]:
    """What computes a problem, PyTorch's fused attention first; a string says why one is left out."""
    dtype = DTYPES[problem.dtype]
    if problem.kind == "layer":
        return layers(problem, torch.randn(1, problem.tokens, HEADS * problem.size, dtype=dtype))
    q, k, v = (torch.randn(1, HEADS, problem.tokens, problem.size, dtype=dtype) for _ in range(3))
    causal = problem.kind == "causal"
    mask = Causal() if causal else None

    def ours(kernel: str) -> Run:
        return lambda: attention(q, k, v, mask=mask, kernel=kernel)

    return {
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "native": library.missing or ours("native"),
        "chunked": ours("chunked"),
        "FlexAttention": _flex(q, k, v, causal),
        "x-transformers": _x_transformers(q, k, v, causal),
        "Hugging Face eager": _eager(q, k, v, causal),
    }


def layers(problem: Problem, x: Tensor) -> dict[str, Run | str]:
    """Self-attention with its projections, x `[1, t, e]`."""
    width = HEADS * problem.size
    theirs = torch.nn.MultiheadAttention(width, HEADS, batch_first=True, dtype=x.dtype).eval()
    own = MultiHeadAttention(width, HEADS).to(x.dtype).eval()
    return {
        "nn.MultiheadAttention": lambda: theirs(x, x, x, need_weights=False),
        "MultiHeadAttention": lambda: own(x),
        "nn.MultiheadAttention with weights": _too_large(problem.tokens, x.dtype)
        or (lambda: theirs(x, x, x, average_attn_weights=False)),
        "MultiHeadAttention with its map": lambda: own.attend(x),
    }


def _too_large(tokens: int, dtype: torch.dtype) -> str | None:
    """Why nobody builds weights of so many tokens here; None if it can be done."""
    size = HEADS * tokens**2 * dtype.itemsize
    return f"at {tokens:,} tokens its weights would take {amount(size)}" if size > ROOM else None


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Run | str:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    t = q.shape[2]
    if t < 128:
        return "it is compiled for lengths from 128"
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, t, t, device="cpu") if causal else None
    torch.compiler.reset()  # a function may be compiled for eight shapes, and runs uncompiled for a ninth
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks)


def _x_transformers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Run | str:
    if find_spec("x_transformers") is None:
        return "x-transformers isn't installed"
    from x_transformers.attend import Attend

    attend = Attend(flash=True, causal=causal).eval()
    return lambda: attend(q, k, v)


def _eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Run | str:
    if why := _too_large(q.shape[2], q.dtype):
        return why
    if find_spec("transformers") is None:
        return "transformers isn't installed"
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=1, training=False)
    hidden = torch.full((1, 1, q.shape[2], q.shape[2]), -math.inf, dtype=q.dtype).triu(1) if causal else None
    return lambda: eager_attention_forward(module, q, k, v, hidden, scaling=q.shape[3] ** -0.5)


# -- running -----------------------------------------------------------------------------------------


@torch.no_grad()
def measure(problem: Problem, rounds: int) -> Result:
    """Every contestant on a problem, interleaved; a first round warms up and isn't counted.

    What is short is run again and again in each round, until `SAMPLE` is over: a clock tells milliseconds.
    """
    result = Result(problem)
    running: dict[str, Run] = {}
    for name, run in contestants(problem).items():
        if isinstance(run, str):
            result.left_out[name] = run
        else:
            running[name] = run
    times: dict[str, list[float]] = {name: [] for name in running}
    for run in running.values():
        run()
    again = {name: math.ceil(SAMPLE / max(timed(run), SAMPLE / 1000)) for name, run in running.items()}
    for _ in range(rounds):
        for name, run in running.items():
            times[name].append(timed(run, again[name]))
    for name, spent in times.items():
        low, _, high = statistics.quantiles(spent, n=4, method="inclusive") if len(spent) > 1 else spent * 3
        result.timings.append(Timing(name, statistics.median(spent), low, high, rounds))
    return result


def problems(
    kinds: tuple[str, ...], dtypes: tuple[str, ...], sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> list[Problem]:
    """All combinations; ValueError for a kind or dtype that isn't known, a size or length below 1."""
    for name, given, known in (("kind", kinds, KINDS), ("dtype", dtypes, tuple(DTYPES))):
        for one in given:
            if one not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, and {one!r} came.")
    for name, numbers in (("size", sizes), ("length", lengths)):
        for number in numbers:
            if number < 1:
                raise ValueError(f"{name} must be at least 1, and {number} came.")
    every = itertools.product(kinds, dtypes, sizes, lengths)
    return [Problem(kind, dtype, tokens, size) for kind, dtype, size, tokens in every]
