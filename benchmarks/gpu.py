"""Time attention on a GPU, compared with PyTorch's attention, and measure the memory of maps.

    python benchmarks/gpu.py [--length 1024 --length 4096] [--rounds 20]

8 heads of 64 and of 128 in bfloat16. Runs are interleaved and timed by CUDA events, and medians are printed.
PyTorch's function gets the mask as it needs it: a triangle by is_causal, a window as a tensor. The share is
that of the rate of a large matrix product, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import manyheads as mh

HEADS = 8
WINDOW = 1024


def time_on_gpu(run: Callable[[], object]) -> float:
    """Return the seconds of a run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def compare(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each run, after three that compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + 3):
        for name, run in runs.items():
            seconds = time_on_gpu(run)
            if n >= 3:
                times[name].append(seconds)
    return {name: statistics.median(spent) for name, spent in times.items()}


def peak(run: Callable[[], object]) -> float:
    """Return the MiB that a run allocates at most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def matrix_rate() -> float:
    """Return the operations per second of a large product in bfloat16."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / compare({"product": lambda: a @ a}, 10)["product"]


def trained(run: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(run().sum(), inputs)


def main(
    length: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    rounds: int = 20,
) -> None:
    rate = matrix_rate()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, product {rate / 1e12:.0f} TFLOP/s")
    for tokens in length or [1024, 4096, 16384]:
        for size in (64, 128):
            given = {"dtype": torch.bfloat16, "device": "cuda"}
            q, k, v = (torch.randn(1, HEADS, tokens, size, **given) for _ in range(3))
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            near = mh.Causal() & mh.Window(left=WINDOW)
            distance = torch.arange(tokens, device="cuda")[:, None] - torch.arange(tokens, device="cuda")
            dense = (distance >= 0) & (distance <= WINDOW)
            pairs = {"full": tokens**2, "causal": tokens**2 / 2}
            pairs["window"] = sum(min(i + 1, WINDOW + 1) for i in range(tokens))
            theirs: dict[str, Callable[..., Tensor]] = {
                "full": F.scaled_dot_product_attention,
                "causal": lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
                "window": lambda *x: F.scaled_dot_product_attention(*x, attn_mask=dense),  # noqa: B023
            }
            masks = {"full": None, "causal": mh.Causal(), "window": near}
            for kind, mask in masks.items():
                for training in (False, True):
                    x = leaves if training else [q, k, v]
                    ours = lambda: mh.attention(*x, mask=mask)  # noqa: B023, E731
                    pytorch = lambda: theirs[kind](*x)  # noqa: B023, E731
                    runs = {"PyTorch": pytorch, "manyheads": ours}
                    if training:
                        runs = {name: trained(run, x) for name, run in runs.items()}
                    found = compare(runs, rounds)
                    flops = (14 if training else 4) * pairs[kind] * size * HEADS
                    print(
                        f"{tokens:>7} {size:>4} {kind:<7}{'training' if training else 'forward':<9}"
                        + "".join(f"  {name} {seconds * 1e3:8.3f} ms" for name, seconds in found.items())
                        + f"  {found['manyheads'] / found['PyTorch']:5.2f} × PyTorch"
                        + f"  {flops / found['manyheads'] / rate:6.1%}"
                    )
            causal = mh.Causal()
            maps: dict[str, Callable[[], object]] = {
                "attention": lambda: mh.attention(q, k, v, mask=causal),  # noqa: B023
                "with map": lambda: mh.attention_with_map(q, k, v, mask=causal)[1].lse,  # noqa: B023
                "statistics": lambda: mh.attention_with_map(q, k, v, mask=causal)[1].statistics(  # noqa: B023
                    "entropy", "received"
                ),
            }
            found, memory = compare(maps, 3), {name: peak(run) for name, run in maps.items()}
            print(
                f"{tokens:>7} {size:>4} maps   "
                + "".join(f"  {name} {found[name] * 1e3:.2f} ms, {memory[name]:.0f} MiB" for name in maps)
                + f"  (weights: {HEADS * tokens**2 * 4 / 2**20:,.0f} MiB)"
            )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
