"""Time attention on small problems, where the call costs more than the computation, and PyTorch's own.

    python benchmarks/small.py [--tokens 1 --tokens 64] [--dtype float32] [--rounds 200] [--threads 1]

Batch 1, 8 heads of 64. Runs are interleaved (A B A B …), so that disturbances affect both, and medians are
printed. Ratios are PyTorch's time / ours: above 1 ours is faster. "forward" is without gradients, "recorded"
is the forward pass that autograd records, "training" includes the backward pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from manyheads import Causal, attention
from manyheads.bench import measure_seconds

HEADS, SIZE = 8, 64
SAMPLE = 3e-4  # the least seconds of a measurement


def measure(tokens: int, dtype: torch.dtype, causal: bool, kind: str, rounds: int) -> tuple[float, float]:
    """Return the seconds of PyTorch's attention and of ours."""
    q, k, v = (
        torch.randn(1, HEADS, tokens, SIZE, dtype=dtype, requires_grad=kind != "forward") for _ in range(3)
    )
    upstream, mask = torch.ones(1, HEADS, tokens, SIZE, dtype=dtype), Causal() if causal else None

    def through(output: Callable[[], Tensor]) -> Callable[[], object]:
        return (lambda: output().backward(upstream)) if kind == "training" else output

    runs = (
        through(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)),
        through(lambda: attention(q, k, v, mask=mask)),
    )
    times: tuple[list[float], list[float]] = ([], [])
    calls = [max(1, round(SAMPLE / min(measure_seconds(run) for _ in range(5)))) for run in runs]
    for _ in range(rounds):
        for run, spent, number in zip(runs, times, calls, strict=True):
            run()  # refills the caches after the other run
            spent.append(measure_seconds(run, number))
    return statistics.median(times[0]), statistics.median(times[1])


def main(
    tokens: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtype. Repeatable.")] = None,
    rounds: int = 200,
    threads: Annotated[int, typer.Option(help="Number of threads (0: PyTorch's default).")] = 0,
) -> None:
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {HEADS} heads of {SIZE}")
    for length in tokens or [1, 8, 64]:
        for name in dtype or ["float32", "bfloat16", "float16"]:
            for kind in ("forward", "recorded", "training"):
                for causal in (False, True):
                    theirs, ours = measure(length, getattr(torch, name), causal, kind, rounds)
                    print(
                        f"{length:>7} {name:<9} {kind:<9}{'causal' if causal else 'full':<7}"
                        f"PyTorch {theirs * 1e6:8.1f} µs  ours {ours * 1e6:8.1f} µs  {theirs / ours:5.2f} ×"
                    )


if __name__ == "__main__":
    typer.run(main)
