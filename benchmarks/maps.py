"""Time a tile and statistics of every head, compared with PyTorch's attention without weights.

    python benchmarks/maps.py --length 16384 [--length 131072 --no-peer] [--dtype bfloat16] [--rounds 3]

Causal, batch 1, 8 heads of 64. Runs are interleaved, medians are printed, and ratios are time / time of
F.scaled_dot_product_attention alone. "All statistics" are entropy, received, distance, row_max, top-8 and
512 × 512 pooled mean and max. Memory is the peak of this process, on Linux only.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from manyheads import AttentionMap, Causal
from manyheads.bench import measure_seconds
from manyheads.problem import Problem

HEADS, SIZE = 8, 64
PER_ROW = ("entropy", "received", "distance", "row_max")
MORE: dict[str, Any] = {"top": 8, "pooled": [(512, 512), (512, 512, "max")]}


def resident(what: str) -> int:
    """Return the bytes of this process's memory: VmRSS in use, VmHWM at the peak; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def reset_peak() -> None:
    if sys.platform == "linux":
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")


def measure(tokens: int, kind: torch.dtype, rounds: int, peer: bool) -> None:
    q, k, v = (torch.randn(1, HEADS, tokens, SIZE, dtype=kind) for _ in range(3))
    amap = AttentionMap.of(Problem.of(q, k, v, mask=Causal()))
    print(f"{tokens:>7} {'log-sum-exp, computed for the map':<38}{measure_seconds(lambda: amap.lse):9.2f} s")
    at = tokens // 2
    rows, cols = slice(at, at + 256), slice(at - 256, at)
    for what, tile in (("one head", lambda: amap[0, 3, rows, cols]), ("all", lambda: amap[0, :, rows, cols])):
        tile()
        median = statistics.median(measure_seconds(tile) for _ in range(101))
        print(f"{tokens:>7} {f'a 256 × 256 tile, {what}':<38}{median * 1e3:9.2f} ms")
    before = resident("VmRSS")
    results: list[Any] = []
    runs: dict[str, Callable[[], object]] = {
        "all statistics": lambda: results.append(amap.statistics(*PER_ROW, **MORE)),
        "entropy and received": lambda: amap.statistics("entropy", "received"),
    }
    if peer:
        runs = {"PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)} | runs
    times: dict[str, list[float]] = {name: [] for name in runs}
    peak = 0
    for _ in range(rounds):
        for name, run in runs.items():
            results.clear()
            reset_peak()
            times[name].append(measure_seconds(run))
            if name == "all statistics":
                found = [results[0][name] for name in PER_ROW] + [*results[0]["top"], *results[0]["pooled"]]
                peak = max(peak, resident("VmHWM") - before - sum(x.nbytes for x in found))
    base = statistics.median(times["PyTorch"]) if peer else None
    for name, spent in times.items():
        median = statistics.median(spent)
        ratio = "" if base is None else f"{median / base:6.2f} × PyTorch"
        print(f"{tokens:>7} {name:<38}{median:9.2f} s  {ratio}")
    print(f"{tokens:>7} {'memory of all statistics':<38}{peak / 1e6:9.0f} MB beyond q, k and the results")


def main(
    length: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    dtype: str = "float32",
    rounds: int = 3,
    peer: bool = True,
) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, causal, 8 heads of 64")
    for tokens in length or [16384]:
        measure(tokens, getattr(torch, dtype), rounds, peer)


if __name__ == "__main__":
    typer.run(main)
