"""Time every kernel, compared with PyTorch's own attention.

    python benchmarks/kernels.py --length 1024 --length 4096 [--backward] [--dtype bfloat16] [--rounds 7]

Runs are interleaved (A B C A B C …), so that disturbances affect all of them, and medians are printed. Ratios
are time / time of F.scaled_dot_product_attention: below 1 is faster. The last column is the share of this
machine's matrix-product rate, measured in the same run, that the kernel's own products reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from manyheads import Causal, attention
from manyheads.bench import measure_seconds

HEADS, SIZE = 8, 64


def main(
    length: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    dtype: str = "float32",
    rounds: int = 7,
    backward: bool = False,
) -> None:
    kind = getattr(torch, dtype)
    a = torch.randn(2048, 2048, dtype=kind)
    peak = 2 * 2048**3 / min(measure_seconds(lambda: a @ a) for _ in range(9))
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, causal, "
        f"{HEADS} heads of {SIZE}; matrix product {peak / 1e9:.0f} GFLOP/s"
    )
    for tokens in length or [1024, 2048, 4096]:
        q, k, v = (torch.randn(1, HEADS, tokens, SIZE, dtype=kind, requires_grad=backward) for _ in range(3))

        def through(output: Callable[[], torch.Tensor]) -> Callable[[], object]:
            return (lambda: output().sum().backward()) if backward else output

        def ours(name: str) -> Callable[[], torch.Tensor]:
            return lambda: attention(q, k, v, mask=Causal(), kernel=name)  # noqa: B023

        runs = {
            "PyTorch": through(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),  # noqa: B023
            **{name: through(ours(name)) for name in ("sdpa", "chunked", "reference")},
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for n in range(rounds + 1):
            for name, run in runs.items():
                spent = measure_seconds(run)
                if n:  # the first round warms up
                    times[name].append(spent)
        # Two products over half the square; backward has five more.
        flops = (7 if backward else 2) * tokens**2 * SIZE * HEADS
        base = statistics.median(times["PyTorch"])
        for name, spent in times.items():
            median = statistics.median(spent)
            print(
                f"{tokens:>7} {name:<10} {median * 1e3:9.1f} ms  {median / base:6.2f} × PyTorch"
                f"  {flops / median / peak:6.1%} of the product rate"
            )


if __name__ == "__main__":
    typer.run(main)
