"""Time kernel="auto" beside PyTorch's own attention on the CPU; each case is printed at once.

    python benchmarks/kernels.py [--dtype bfloat16] [--size 128] [--length 4096] [--kind training]

Runs are interleaved (A B A B …), so that disturbances affect both, and medians are printed. Ratios are
PyTorch's time / ours: above 1 is faster. "statistics" is attention with entropy, distance, largest weight,
received attention and pooled maps of 512 × 512, beside PyTorch's attention alone.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

import manyheads as mh
from manyheads.bench import measure_seconds, with_backward, with_statistics
from manyheads.kernels import machine

HEADS = 8
KINDS = ("forward", "causal", "training", "statistics")


def contestants(kind: str, length: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return PyTorch's call and ours, with the same inputs."""
    q, k, v = (torch.randn(1, HEADS, length, size, dtype=dtype) for _ in range(3))
    if kind == "statistics":
        found = with_statistics(q, k, v)
        return {"PyTorch": found["PyTorch"], "ours": found["native with statistics"]}
    causal = kind in ("causal", "training")
    mask = mh.Causal() if causal else None
    forwards = {
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "ours": lambda: mh.attention(q, k, v, mask=mask),
    }
    return with_backward(forwards, q, k, v) if kind == "training" else forwards


def main(
    length: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    size: Annotated[list[int] | None, typer.Option(help="Head size. Repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Number format. Repeatable.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"What to time: {', '.join(KINDS)}.")] = None,
    rounds: int = 7,
) -> None:
    print(machine())
    print(f"{HEADS} heads, {torch.get_num_threads()} threads")
    for name in dtype or ["float32", "bfloat16"]:
        for each in size or [64, 128]:
            for tokens in length or [1024, 4096]:
                for what in kind or KINDS:
                    runs = contestants(what, tokens, each, getattr(torch, name))
                    times: dict[str, list[float]] = {who: [] for who in runs}
                    for n in range(rounds + 1):
                        for who, run in runs.items():
                            seconds = measure_seconds(run)
                            if n:  # the first round warms up
                                times[who].append(seconds)
                    theirs, ours = (statistics.median(spent) for spent in times.values())
                    print(
                        f"{name:<9}{each:>4}{tokens:>7} {what:<11}PyTorch {theirs * 1e3:8.2f} ms"
                        f"  ours {ours * 1e3:8.2f} ms  {theirs / ours:5.2f} × as fast",
                        flush=True,
                    )


if __name__ == "__main__":
    typer.run(main)
