"""Time observing a model, compared with the plain forward and with eager attention.

    python benchmarks/observe.py --length 4096 [--length 32768 --no-eager] [--rounds 3]

A Llama with random weights (4 layers, hidden 512, 8 heads), batch 1, float32. Each way runs in its own
process, in turns. Medians are printed, as ratios to the plain forward, and the peak of memory beyond the
model. "statistics" keeps entropy and received attention of every head.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Annotated

import torch
import typer

import manyheads

WAYS = ("plain", "maps", "statistics", "eager")


def measure(way: str, length: int) -> tuple[float, float]:
    """Return the seconds and megabytes of a forward pass."""
    from transformers import LlamaConfig, LlamaModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        max_position_embeddings=131072,
        attn_implementation="eager" if way == "eager" else "sdpa",
    )
    model = LlamaModel(config).eval()
    ids = torch.randint(0, 1000, (1, length))
    with torch.no_grad():
        model(ids[:, :64], use_cache=False)  # a warm-up, which loads everything
        before = peak()
        start = time.perf_counter()
        observing = {
            "maps": lambda: manyheads.observe(model),
            "statistics": lambda: manyheads.observe(model, keep=["entropy", "received"]),
        }.get(way, nullcontext)
        with observing():
            model(ids, use_cache=False, output_attentions=way == "eager")
        return time.perf_counter() - start, (peak() - before) / 1e6


def peak() -> int:
    """Return the peak of this process's memory, in bytes."""
    if sys.platform == "linux":  # ru_maxrss starts with the peak of the parent process
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(
    length: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    rounds: int = 3,
    eager: bool = True,
    way: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if way:
        print(*measure(way, (length or [4096])[0]))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, 4 layers × 8 heads of 64")
    for tokens in length or [4096]:
        ways = WAYS if eager else WAYS[:-1]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in ways:
                command = [sys.executable, __file__, "--way", name, "--length", str(tokens)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seconds, megabytes = map(float, done.stdout.split())
                found[name].append((seconds, megabytes))
        plain = statistics.median(seconds for seconds, _ in found["plain"])
        for name, runs in found.items():
            seconds, megabytes = (statistics.median(column) for column in zip(*runs, strict=True))
            print(
                f"{tokens:>7} {name:<11}{seconds:8.2f} s  {seconds / plain:6.2f} × plain  {megabytes:8.0f} MB"
            )
        if not eager:
            weights = 4 * 8 * tokens**2 * 4 / 1e9
            print(f"{tokens:>7} eager attention would need {weights:,.0f} GB for its weights")


if __name__ == "__main__":
    typer.run(main)
