"""Print where the native kernel's forward pass spends its time, on one thread.

    python benchmarks/parts.py [--dtype bfloat16] [--size 128] [--length 4096] [--rounds 9]

It builds a library that reads a clock around each part (in a minute or two), and prints each part's share of
the time; for the two products also the share of the peak of multiply-adds, which is measured in the same run.
Figures are medians of the rounds.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).parents[1]
PARTS = ("packing", "products with keys", "softmax", "products with values")  # `Part` in problem.h
HEADS = 8
PAIRS = ("avx512bf16", "amx")  # builds that multiply bfloat16 without converting it


def build(folder: Path) -> Path:
    """Return the library with clocks."""
    os.environ["MANYHEADS_CXXFLAGS"] = "-DTIMED"
    os.chdir(ROOT)
    runpy.run_path("setup.py")["compile_to"](folder / "native.so", folder / "objects")
    return folder / "native.so"


def measure(length: int, size: int, dtype: str, rounds: int) -> None:
    """Print the shares for one problem; the library with clocks is loaded."""
    from manyheads import attention
    from manyheads.bench import limits
    from manyheads.kernels import processor
    from manyheads.kernels.native import library

    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    clocks = ctypes.CDLL(str(library.FILE)).manyheads_parts
    seconds = (ctypes.c_double * len(PARTS))()
    q, k, v = (torch.randn(1, HEADS, length, size, dtype=kind) for _ in range(3))
    spent: list[list[float]] = []
    for n in range(rounds + 1):
        attention(q, k, v, kernel="native")
        clocks(seconds)
        if n:  # the first round warms up
            spent.append([*seconds])
    whole = statistics.median(map(sum, spent))
    if not whole:
        raise typer.BadParameter(f"Expected a length above 32, got {length}: few queries have no clocks.")
    peak = limits()[0]["bfloat16" if kind == torch.bfloat16 and width() in PAIRS else "float32"]
    product = 2.0 * HEADS * length**2 * size
    print(
        f"{processor()}, {width()}, {dtype}, {HEADS} heads of {size}, {length:,} tokens: "
        f"{whole * 1e3:.1f} ms, {2 * product / whole / peak:.0%} of {peak / 1e9:.0f} GFLOP/s"
    )
    for part, times in zip(PARTS, zip(*spent, strict=True), strict=True):
        median = statistics.median(times)
        of_peak = f", {product / median / peak:4.0%} of the peak" if part.startswith("products") else ""
        print(f"  {part:<20} {median / whole:4.0%} of the time{of_peak}")


def width() -> str:
    """Return the name of the build that runs."""
    from manyheads.kernels.native import library

    return library.WIDTHS[library.width or 0]


def main(
    length: Annotated[list[int] | None, typer.Option(help="Number of tokens. Repeatable.")] = None,
    size: int = 64,
    dtype: str = "float32",
    rounds: int = 9,
) -> None:
    if os.environ.get("MANYHEADS_LIBRARY"):
        for tokens in length or [1024, 4096]:
            measure(tokens, size, dtype, rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        again = [sys.executable, __file__, *sys.argv[1:]]
        subprocess.run(again, env={**os.environ, "MANYHEADS_LIBRARY": str(library)}, check=True)


if __name__ == "__main__":
    typer.run(main)
