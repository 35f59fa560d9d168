"""The speed of attention on this machine: kernels of manyheads, other libraries, and the hardware's limits.

Runs are interleaved (A B C A B C …), so that disturbances affect all contestants. Medians and quartiles are
reported. The hardware's limits (multiply-adds per second on registers, bytes read per second) are measured
before and after the contestants.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.functional import attention, attention_with_map
from manyheads.kernels import load, processor
from manyheads.kernels.native import library
from manyheads.layers import MultiHeadAttention
from manyheads.masks import Causal, Mask
from manyheads.problem import Problem as AttentionProblem
from manyheads.shapes import amount, whole
from manyheads.storage import replacing

HEADS = 8
LENGTHS = (64, 256, 1024, 2048, 4096, 8192, 16384)
KINDS = ("forward", "causal", "training", "statistics", "decode", "layer")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKAGES = ("torch", "manyheads", "x-transformers", "transformers")
MAX_WEIGHT_BYTES = 4e9  # a contestant that would store larger weights is left out
SAMPLE = 0.02  # the shortest measurement in seconds: short runs are repeated
LIMITS = Path(__file__).with_name("limits.cpp")
ROUNDS = 10_000_000  # the rounds of `LIMITS` in a measurement, about 20 ms in float32
SAVE_INTERVAL = 10.0  # the shortest time between two writes of a report, in seconds
MAX_SHARE = 1.05  # a contestant with a larger share of the peak shows that the peak is wrong

Contestant = Callable[[], object]
Forward = Callable[[], Tensor]
Track = Callable[..., Iterable[Any]]  # `rich.progress.Progress.track`, which shows the progress of a loop


@dataclass(frozen=True)
class Problem:
    """An attention problem to measure, of batch 1 and 8 heads.

    Attributes:
        kind: "forward"; "causal"; "training" (causal, forward and backward); "statistics" (forward and
            statistics of all weights); "decode" (one query); or "layer" (with its projections).
        dtype: The name of the dtype.
        tokens: The number of tokens, or of keys for "decode".
        size: The head size.
    """

    kind: str
    dtype: str
    tokens: int
    size: int

    @property
    def work(self) -> float:
        """Return the amount of work that limits the speed.

        For "decode" it is the number of bytes of keys and values, for others the number of multiplications
        and additions in all products, with the projections of a layer.
        """
        if self.kind == "decode":
            return 2 * HEADS * self.tokens * self.size * DTYPES[self.dtype].itemsize
        pairs = self.tokens**2 / (2 if self.kind in ("causal", "training") else 1)
        products = 7 if self.kind == "training" else 2
        projections = 8 * self.tokens * (HEADS * self.size) ** 2 if self.kind == "layer" else 0
        return 2 * products * HEADS * pairs * self.size + projections


@dataclass(frozen=True)
class Timing:
    """The median and the quartiles of a contestant's runs, in seconds."""

    name: str
    median: float
    low: float
    high: float
    rounds: int


@dataclass
class Result:
    """The timings of a problem, and the reasons why contestants were left out."""

    problem: Problem
    timings: list[Timing] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class BaseReport:
    """The measurements of a benchmark, with the machine.

    Attributes:
        machine: What `describe_machine` returns.
    """

    machine: dict[str, Any]
    name: ClassVar[str]  # the name of the files, without a suffix

    def __post_init__(self) -> None:
        self.saved = -math.inf  # the time of the last write, by time.monotonic()

    def text(self) -> str:
        """Return the result as text: Markdown, unless a subclass has a shorter form."""
        return self.markdown()

    def markdown(self) -> str:
        """Return the machine and the result as Markdown."""
        raise NotImplementedError

    def keep(self, folder: Path) -> None:
        """Write the results so far, in case the process is killed; at most every `SAVE_INTERVAL` seconds."""
        if time.monotonic() > self.saved + SAVE_INTERVAL:
            BaseReport.save(self, folder)

    def save(self, folder: Path) -> list[Path]:
        """Write the results as JSON and Markdown, and return the files."""
        contents = {"json": json.dumps(asdict(self), indent=1), "md": self.markdown()}
        for suffix, content in contents.items():
            with replacing(folder / f"{self.name}.{suffix}") as file:
                file.write(content.encode())
        self.saved = time.monotonic()
        return [folder / f"{self.name}.{suffix}" for suffix in contents]


@dataclass
class Report(BaseReport):
    """The results of the problems, the machine, and its limits."""

    results: list[Result] = field(default_factory=list)
    name: ClassVar[str] = "bench"

    def measure(self, problem: Problem, rounds: int) -> None:
        """Measure a problem, and add its result."""
        self.results.append(measure(problem, rounds))

    def finish(self, rounds: int, track: Track) -> bool:
        """Measure the limits again and keep the larger ones, because disturbances can only lower them."""
        peak, read = limits()
        self.machine["peak"] = {name: max(rate, self.machine["peak"][name]) for name, rate in peak.items()}
        self.machine["read"] = max(read, self.machine["read"])
        return True

    def keep(self, folder: Path) -> None:
        """Write the results so far, and remove the plot of an earlier run."""
        (folder / "bench.png").unlink(missing_ok=True)
        super().keep(folder)

    def save(self, folder: Path) -> list[Path]:
        """Write bench.json, bench.md and bench.png, and return the files."""
        files = super().save(folder)
        with replacing(folder / "bench.png") as file:
            self.plot().savefig(file, format="png", dpi=110)
        return [*files, folder / "bench.png"]

    def _groups(self) -> dict[tuple[str, str, int], list[Result]]:
        """Return the results by kind, dtype and head size."""
        groups: dict[tuple[str, str, int], list[Result]] = {}
        for result in self.results:
            problem = result.problem
            groups.setdefault((problem.kind, problem.dtype, problem.size), []).append(result)
        return groups

    def markdown(self) -> str:
        """Return the machine, and a table for each kind, dtype and head size, as Markdown."""
        machine = self.machine
        lines = [
            describe_versions(machine),
            "",
            f"Peak {limit(machine, 'float32')} in float32, {limit(machine, 'bfloat16')} in bfloat16; "
            f"memory is read at {machine['read'] / 1e9:.0f} GB/s.",
        ]
        lines += [f"\nThe peak in {dtype} isn't known: {why}." for dtype, why in self._unknown().items()]
        for (kind, dtype, size), results in self._groups().items():
            names = _names(results)
            title = f"**{kind}, {dtype}, {HEADS} heads of {size}**"
            limit_of = "memory's rate" if kind == "decode" else "the peak"
            share = f"; % of {limit_of}" if self._limit(kind, dtype) else ""
            if names:
                lines += ["", f"{title}, median time (times as fast as {names[0]}{share})", ""]
                lines += [f"| tokens | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
            else:
                lines += ["", f"{title}: no contestant supports it"]
            for result in results:
                if result.timings:
                    cells = " | ".join(self._cells(result, names))
                    lines.append(f"| {result.problem.tokens:,} | {cells} |")
            left_out = {name: why for result in results for name, why in result.left_out.items()}
            lines += [f"\n{name} is left out: {why}." for name, why in left_out.items()]
        return "\n".join(lines) + "\n"

    def _unknown(self) -> dict[str, str]:
        """Return why the peak of a dtype isn't known: it can't be measured, or a contestant exceeds it."""
        reasons: dict[str, str] = dict(self.machine.get("unknown", {}))
        for result in self.results:
            dtype = result.problem.dtype
            peak = self.machine["peak"].get(dtype)
            if result.problem.kind == "decode" or not peak:  # decoding may read from a cache
                continue
            if any(result.problem.work / timing.median > MAX_SHARE * peak for timing in result.timings):
                reasons[dtype] = (
                    f"a contestant is faster than {limit(self.machine, dtype)}, which was measured while the "
                    "machine was disturbed, or without its matrix units. Run again on a quiet machine"
                )
        return reasons

    def _limit(self, kind: str, dtype: str) -> float:
        """Return the machine's operations (for decoding, bytes) per second, or 0 if they aren't known."""
        if kind == "decode":
            return float(self.machine["read"])
        return 0.0 if dtype in self._unknown() else float(self.machine["peak"].get(dtype, 0))

    def _cells(self, result: Result, names: list[str]) -> Iterator[str]:
        times = {timing.name: timing.median for timing in result.timings}
        problem = result.problem
        limit = self._limit(problem.kind, problem.dtype)
        for name in names:
            if name not in times:
                yield ""
                continue
            parts = [f"{times[names[0]] / times[name]:.2f}×"] if names[0] in times else []
            parts += [f"{problem.work / times[name] / limit:.0%}"] if limit else []
            yield describe_time(times[name]) + (f" ({', '.join(parts)})" if parts else "")

    def plot(self) -> Any:
        """Plot rates against lengths, with a panel for each kind, dtype and head size."""
        from matplotlib.figure import Figure

        panels, names = self._groups(), _names(self.results)
        columns = math.ceil(math.sqrt(len(panels)))
        rows = math.ceil(len(panels) / columns)
        legend_columns = min(2 * columns, 5)  # so that the legend is no wider than the panels
        legend_rows = math.ceil(len(names) / legend_columns)
        figure = Figure(figsize=(4.8 * columns, 3.3 * rows + 0.2 * legend_rows), layout="constrained")
        lines = {}
        for n, ((kind, dtype, size), results) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, n + 1)
            highest = self._limit(kind, dtype) / 1e9
            if highest:
                axes.axhline(highest, color="#555555", linestyle=":", linewidth=1.2)
                axes.text(1.01, highest, "memory" if kind == "decode" else "peak", va="center", fontsize=9,
                          color="#555555", transform=axes.get_yaxis_transform())  # fmt: skip
            for number, name in enumerate(names):
                rates = {
                    result.problem.tokens: result.problem.work / timing.median / 1e9
                    for result in results
                    for timing in result.timings
                    if timing.name == name
                }
                if not rates:
                    continue
                highest = max(highest, *rates.values())
                cycle, colour = divmod(number, len(COLOURS))
                style: Any = {"linestyle": "--" if cycle else "-", "color": COLOURS[colour]}
                (lines[name],) = axes.plot(
                    list(rates), list(rates.values()), marker="o", markersize=4, label=name, **style
                )
            lengths = [result.problem.tokens for result in results]
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths], rotation=45)
            axes.set_ylim(0, 1.08 * highest or None)  # None: the panel is empty
            axes.set_title(f"{kind}, {dtype}, {HEADS} heads of {size}", fontsize=11)
            axes.set_xlabel("tokens")
            axes.set_ylabel("GB read / s" if kind == "decode" else "billion operations / s")
        place: Any = {"loc": "outside lower center", "ncols": legend_columns, "columnspacing": 1.5}
        figure.legend(handles=list(lines.values()), fontsize=9, frameon=False, **place)
        return figure


# Colour-blind people can distinguish these colours of Okabe and Ito (jfly.uni-koeln.de/color).
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A00")


def _names(results: Iterable[Result]) -> list[str]:
    """Return the names of all contestants that were measured, in order."""
    return list(dict.fromkeys(timing.name for result in results for timing in result.timings))


def limit(machine: dict[str, Any], dtype: str) -> str:
    """Return the peak of a dtype in GFLOP/s."""
    peak = machine["peak"].get(dtype)
    return f"{peak / 1e9:.0f} GFLOP/s" if peak else "not measured"


def describe_versions(machine: dict[str, Any]) -> str:
    """Return the processor, its threads, the date and the versions of libraries, in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['processor']}, {machine['threads']} threads, {machine['date']}; {versions}"


def describe_time(seconds: float) -> str:
    """Return a time as 1.2 s, 340 ms or 15 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def measure_seconds(run: Contestant, times: int = 1) -> float:
    """Run a function several times, and return the mean time in seconds."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


# -- the machine -------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return the entries of `describe_machine` and the limits of the hardware."""
    peak, read = limits()
    return describe_machine() | {"peak": peak, "unknown": unknown(), "read": read}


def describe_machine() -> dict[str, Any]:
    """Return the processor, its threads, the build of the native library, and the versions of libraries."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "width": None if library.width is None else library.WIDTHS[library.width],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
    }


@cache
def multiplications() -> dict[str, Callable[[int], float] | str]:
    """Compile limits.cpp for this processor.

    Returns:
        By dtype, a function that multiplies and adds for a number of rounds on registers or tiles and returns
        the number of operations; or the reason why there is no such function.
    """
    compiler = os.environ.get("CXX") or "c++"
    native = ["-march=native"] if platform.machine().lower() in ("x86_64", "amd64") else []
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "limits.so"))
        flags = ["-O3", "-std=c++17", "-shared", "-fPIC", *native]
        try:
            subprocess.run(
                [*shlex.split(compiler), *flags, str(LIMITS), "-o", file], check=True, capture_output=True
            )
            library = ctypes.CDLL(file)
        except (OSError, ValueError, subprocess.CalledProcessError):
            return dict.fromkeys(
                DTYPES, f"the C++ compiler {compiler} can't compile {LIMITS.name}, which measures it"
            )
    for function in (library.float32, library.bfloat16):
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_double
    without_tiles = "this processor has AMX tiles, and the compiler or the system doesn't support them"
    return {
        "float32": library.float32,
        "bfloat16": without_tiles if library.bfloat16(0) < 0 else library.bfloat16,
    }


def unknown() -> dict[str, str]:
    """Return the dtypes whose peak can't be measured, with the reasons.

    AMX tiles multiply bfloat16 many times as fast as vector registers. So if the processor has tiles but they
    can't be used, the rate of the registers isn't reported as the peak.
    """
    return {name: why for name, why in multiplications().items() if isinstance(why, str)}


def limits() -> tuple[dict[str, float], float]:
    """Measure operations per second by dtype, on registers or tiles, and bytes read per second.

    Returns:
        The best of several measurements. A dtype is left out if the processor has no instructions for it, or
        its peak is unknown. The peak in bfloat16 is at least that in float32, because converting it is fast.
    """
    threads = torch.get_num_threads()
    peak = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, multiply in multiplications().items():
            if isinstance(multiply, str):
                continue
            rates = []
            for _ in range(7):
                start = time.perf_counter()
                operations = sum(pool.map(multiply, [ROUNDS] * threads))
                rates.append(operations / (time.perf_counter() - start))
            if max(rates):
                peak[name] = max(rates)
    if (
        "bfloat16" in peak
    ):  # Intel's processors without tiles multiply pairs of bfloat16 at half the rate of float32
        peak["bfloat16"] = max(peak.values())
    numbers = torch.ones(1 << 26)
    return peak, max(numbers.nbytes / measure_seconds(numbers.sum) for _ in range(5))


# -- the contestants ---------------------------------------------------------------------------------


def contestants(problem: Problem) -> dict[str, Contestant | str]:
    """Return the contestants of a problem, PyTorch's attention first; a text is a reason to leave one out."""
    dtype = DTYPES[problem.dtype]
    if problem.kind == "layer":
        return layers(problem, torch.randn(1, problem.tokens, HEADS * problem.size, dtype=dtype))
    try:
        q, k, v = (torch.randn(1, HEADS, problem.tokens, problem.size, dtype=dtype) for _ in range(3))
    except RuntimeError:
        size = amount(3 * HEADS * problem.tokens * problem.size * dtype.itemsize)
        raise ValueError(
            f"Expected fewer than {problem.tokens:,} tokens, whose q, k and v take {size}. "
            "Choose a shorter --length or fewer --heads."
        ) from None
    if problem.kind == "statistics":
        return with_statistics(q, k, v)
    q = q[:, :, -1:] if problem.kind == "decode" else q
    causal = problem.kind in ("causal", "training")
    mask = Causal() if causal else None

    forwards: dict[str, Forward | str] = {
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        **{kernel: run_kernel(kernel, q, k, v, mask) for kernel in ("native", "chunked")},
        "FlexAttention": _flex(q, k, v, causal),
        "x-transformers": _x_transformers(q, k, v, causal),
        "Hugging Face eager": _eager(q, k, v, causal),
    }
    if problem.kind == "decode":
        del forwards["FlexAttention"], forwards["x-transformers"]  # neither supports single queries well
    return with_backward(forwards, q, k, v) if problem.kind == "training" else dict(forwards)


def run_kernel(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Forward | str:
    """Return a function that runs a kernel, or the reasons why the kernel doesn't support the problem."""
    reasons = load(kernel).why_unsupported(AttentionProblem.of(q, k, v, mask=mask))
    return "; ".join(reasons) or (lambda: attention(q, k, v, mask=mask, kernel=kernel))


def with_backward(forwards: Mapping[str, Forward | str], *leaves: Tensor) -> dict[str, Contestant | str]:
    """Return contestants that also compute the gradients of the leaves."""
    for leaf in leaves:
        leaf.requires_grad_()

    def step(run: Forward) -> tuple[Tensor, ...]:
        out = run()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return {name: run if isinstance(run, str) else partial(step, run) for name, run in forwards.items()}


def with_statistics(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Contestant | str]:
    """Return contestants that compute attention with statistics of every head.

    The statistics are entropy, distance, largest weight, received attention, and pooled maps of 512 × 512
    cells, of means and of largest weights.

    Args:
        q: The queries `[1, h, t, d]`.
        k: The keys `[1, h, t, d]`.
        v: The values `[1, h, t, d]`.

    Returns:
        The contestants by name; a text is a reason to leave one out.
    """
    cells = min(512, q.shape[2])
    requested: dict[str, Any] = dict.fromkeys(("entropy", "distance", "row_max", "received"), ())
    requested["pooled"] = [(cells, cells), (cells, cells, "max")]

    def fused(**more: int) -> Contestant:
        return lambda: attention_with_map(q, k, v, kernel="native", statistics=requested | more)

    def after() -> object:
        return attention_with_map(q, k, v, kernel="native")[1].statistics(**requested)

    def dense() -> object:
        weights = torch.softmax((q @ k.mT).float() * q.shape[3] ** -0.5, -1)  # [1, h, t, t]
        position = torch.arange(q.shape[2])
        rows = -torch.special.xlogy(weights, weights).sum(-1), weights.amax(-1), weights.sum(-2)
        distance = (weights * (position[:, None] - position).abs()).sum(-1)
        pooled = F.adaptive_avg_pool2d(weights, cells), F.adaptive_max_pool2d(weights, cells)
        return weights.to(v.dtype) @ v, rows, distance, pooled

    native = run_kernel("native", q, k, v, None)
    ours = {
        "native": native,
        "native with statistics": fused(),
        "and top-8": fused(top=8),
        "statistics afterwards": after,
    }
    return {
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v),
        **{name: native if isinstance(native, str) else run for name, run in ours.items()},
        "all weights, by PyTorch": _too_large(q.shape[2], torch.float32) or dense,
    }


def layers(problem: Problem, x: Tensor) -> dict[str, Contestant | str]:
    """Return contestants that run self-attention modules, with their projections, on x `[1, t, e]`."""
    width = HEADS * problem.size
    of_torch = torch.nn.MultiheadAttention(width, HEADS, batch_first=True, dtype=x.dtype).eval()
    ours = MultiHeadAttention(width, HEADS).to(x.dtype).eval()
    return {
        "nn.MultiheadAttention": lambda: of_torch(x, x, x, need_weights=False),
        "MultiHeadAttention": lambda: ours(x),
        "nn.MultiheadAttention with weights": _too_large(problem.tokens, x.dtype)
        or (lambda: of_torch(x, x, x, average_attn_weights=False)),
        "MultiHeadAttention with its map": lambda: ours.attend(x),
    }


def _too_large(tokens: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the weights of this number of tokens aren't computed, or None."""
    size = HEADS * tokens**2 * dtype.itemsize
    return f"at {tokens:,} tokens its weights would take {amount(size)}" if size > MAX_WEIGHT_BYTES else None


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward | str:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    t = q.shape[2]
    if t < 128:
        return "it is compiled for lengths from 128"
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, t, t, device="cpu") if causal else None
    torch.compiler.reset()  # PyTorch compiles a function for at most eight shapes, and runs others uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks)


def _x_transformers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward | str:
    if find_spec("x_transformers") is None:
        return "x-transformers isn't installed"
    from x_transformers.attend import Attend

    attend = Attend(flash=True, causal=causal).eval()
    return lambda: attend(q, k, v)[0]


def _eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward | str:
    if why := _too_large(q.shape[2], q.dtype):
        return why
    if find_spec("transformers") is None:
        return "transformers isn't installed"
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=1, training=False)
    mask = torch.full((1, 1, q.shape[2], q.shape[2]), -math.inf, dtype=q.dtype).triu(1) if causal else None
    # [b, t, h, d]
    return lambda: eager_attention_forward(module, q, k, v, mask, scaling=q.shape[3] ** -0.5)[0]


# -- running -----------------------------------------------------------------------------------------


def measure(problem: Problem, rounds: int) -> Result:
    """Measure the contestants of a problem, interleaved, after a warm-up.

    Args:
        problem: The problem.
        rounds: The number of measurements of each contestant. Short runs are repeated for `SAMPLE` seconds.

    Returns:
        The timings. Contestants that don't support the problem or fail in the warm-up are left out.
    """
    with torch.set_grad_enabled(problem.kind == "training"):
        running, left_out = split(contestants(problem))
        result = Result(problem, left_out=left_out)
        for name, run in list(running.items()):
            try:
                run()
            except (ValueError, RuntimeError) as error:  # for example without a compiler, or out of memory
                result.left_out[name] = shorten(str(error), 200, placeholder=" …").rstrip(".")
                del running[name]
        seconds = {name: measure_seconds(run) for name, run in running.items()}
        for name, times in interleave(running, seconds, SAMPLE, rounds).items():
            low, _, high = statistics.quantiles(times, n=4, method="inclusive") if rounds > 1 else times * 3
            result.timings.append(Timing(name, statistics.median(times), low, high, rounds))
    return result


def split(runs: dict[str, Contestant | str]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the contestants that run, and the reasons why others are left out."""
    running = {name: run for name, run in runs.items() if not isinstance(run, str)}
    return running, {name: why for name, why in runs.items() if isinstance(why, str)}


def interleave(
    running: Mapping[str, Contestant], seconds: Mapping[str, float], sample: float, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round.

    Args:
        running: The contestants.
        seconds: By the name of each contestant to measure, the approximate duration of a run.
        sample: The shortest measurement in seconds: short runs are repeated.
        rounds: The number of rounds.

    Returns:
        The seconds by name.
    """
    repeats = {name: math.ceil(sample / max(time, sample / 1000)) for name, time in seconds.items()}
    times: dict[str, list[float]] = {name: [] for name in seconds}
    # Each round has another order, because a run that follows a large one finds its caches taken.
    order, generator = list(seconds), random.Random(0)
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            times[name].append(measure_seconds(running[name], repeats[name]))
    return times


def problems(
    kinds: tuple[str, ...], dtypes: tuple[str, ...], sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> list[Problem]:
    """Return all combinations, or raise ValueError for an unknown kind or dtype, or a size below 1."""
    check("kind", kinds, (*KINDS, "choice"))
    check("dtype", dtypes, DTYPES, " (float16 only with --kind choice)" if "float16" in dtypes else "")
    check_numbers(sizes, lengths)
    combinations = itertools.product(kinds, dtypes, sizes, lengths)
    return [Problem(kind, dtype, tokens, size) for kind, dtype, size, tokens in combinations]


def check(name: str, values: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Raise ValueError for an unknown value of an option."""
    for value in values:
        if value not in known:
            raise ValueError(f"Expected {name} to be one of {', '.join(known)}{hint}, got {value!r}.")


def check_numbers(sizes: Iterable[int], lengths: Iterable[int]) -> None:
    """Raise ValueError for a head size or length below 1."""
    for name, numbers in (("size", sizes), ("length", lengths)):
        for number in numbers:
            whole(number, name, 1)
