"""What it costs to look: a tile, and statistics of every head, beside PyTorch's attention without weights.

    python benchmarks/look.py --length 16384 [--length 131072 --no-peer] [--dtype bfloat16] [--rounds 3]

Causal, batch 1, 8 heads of 64. Runs are interleaved, medians printed, ratios are time / time of
F.scaled_dot_product_attention alone. The whole look is entropy, received, distance, row_max, top-8 and
512 × 512 pooled mean and max. Memory is the peak of this process, where Linux tells it.
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
from manyheads.bench import timed
from manyheads.problem import Problem

HEADS, SIZE = 8, 64
CHEAP = ("entropy", "received", "distance", "row_max")
WHOLE: dict[str, Any] = {"top": 8, "pooled": [(512, 512), (512, 512, "max")]}


def resident(what: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its peak; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def forget_peak() -> None:
    if sys.platform == "linux":
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")


def measure(tokens: int, kind: torch.dtype, rounds: int, peer: bool) -> None:
    q, k, v = (torch.randn(1, HEADS, tokens, SIZE, dtype=kind) for _ in range(3))
    amap = AttentionMap.of(Problem.of(q, k, v, mask=Causal()))
    print(f"{tokens:>7} {'log-sum-exp, where no kernel gave it':<38}{timed(lambda: amap.lse):9.2f} s")
    at = tokens // 2
    rows, cols = slice(at, at + 256), slice(at - 256, at)
    for what, tile in (("one head", lambda: amap[0, 3, rows, cols]), ("all", lambda: amap[0, :, rows, cols])):
        tile()
        median = statistics.median(timed(tile) for _ in range(101))
        print(f"{tokens:>7} {f'a 256 × 256 tile, {what}':<38}{median * 1e3:9.2f} ms")
    held = resident("VmRSS")
    results: list[Any] = []
    runs: dict[str, Callable[[], object]] = {
        "the whole look": lambda: results.append(amap.statistics(*CHEAP, **WHOLE)),
        "entropy and received": lambda: amap.statistics("entropy", "received"),
    }
    if peer:
        runs = {"PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)} | runs
    times: dict[str, list[float]] = {name: [] for name in runs}
    peak = 0
    for _ in range(rounds):
        for name, run in runs.items():
            results.clear()
            forget_peak()
            times[name].append(timed(run))
            if name == "the whole look":
                found = [results[0][one] for one in CHEAP] + [*results[0]["top"], *results[0]["pooled"]]
                peak = max(peak, resident("VmHWM") - held - sum(x.nbytes for x in found))
    base = statistics.median(times["PyTorch"]) if peer else None
    for name, spent in times.items():
        median = statistics.median(spent)
        ratio = "" if base is None else f"{median / base:6.2f} × PyTorch"
        print(f"{tokens:>7} {name:<38}{median:9.2f} s  {ratio}")
    print(f"{tokens:>7} {'memory of the whole look':<38}{peak / 1e6:9.0f} MB beyond q, k and the results")


def main(
    length: Annotated[list[int] | None, typer.Option(help="Tokens; may be given several times.")] = None,
    dtype: str = "float32",
    rounds: int = 3,
    peer: bool = True,
) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, causal, 8 heads of 64")
    for tokens in length or [16384]:
        measure(tokens, getattr(torch, dtype), rounds, peer)


if __name__ == "__main__":
    typer.run(main)
