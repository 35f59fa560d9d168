"""Draw how the cost of attention over ranks grows, for docs/explanation/distributed.md, and print its table.

python scripts/make_scaling_picture.py --out docs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from manyheads import Causal
from manyheads.distributed import Cost, cost

TOKENS, HEADS, KEY_HEADS, SIZE = 1 << 20, 32, 8, 128
FLOPS, BANDWIDTH, LATENCY = 400e12, 50e9, 10e-6  # assumed for each rank
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def cost_of(method: str, ranks: int) -> Cost:
    """Return the cost of the example's forward pass."""
    return cost(
        TOKENS, ranks, method=method, mask=Causal(), layout="balanced", heads=HEADS, key_heads=KEY_HEADS,
        size=SIZE, dtype=torch.bfloat16,
    )  # fmt: skip


def sending(found: Cost) -> float:
    """Return the seconds that the busiest rank sends."""
    return found.busiest / BANDWIDTH + found.messages * LATENCY


def print_table() -> None:
    """Print the table of the page."""
    for method, ranks in [
        *(("ring", ranks) for ranks in RANKS),
        ("ulysses", 2),
        ("ulysses", 4),
        ("ulysses", 8),
    ]:
        found = cost_of(method, ranks)
        computing, total = found.flops / FLOPS, found.seconds(FLOPS, BANDWIDTH, LATENCY)
        n = TOKENS // ranks  # tokens of a rank
        cells = [
            f"{method}, {ranks:,}", f"{n:,}", f"{found.flops / n / 1e9:.1f}", f"{found.bytes / n / 1e3:,.0f}",
            f"{found.messages / n:.1g}", f"{found.bytes / 1e9:.2f}", f"{found.kept / 1e9:.2g}",
            f"{1e3 * computing:,.0f}", f"{1e3 * sending(found):,.0f}", f"{1e3 * total:,.0f}",
            f"{computing / total:.0%}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def draw(out: Path) -> None:
    """Draw times against the number of ranks."""
    blue, orange, green = (mpl.colormaps["viridis"](x) for x in (0.15, 0.55, 0.85))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    found = [cost_of("ring", ranks) for ranks in RANKS]
    axes.loglog(RANKS, [each.flops / FLOPS for each in found], "o-", color=blue, label="computation")
    axes.loglog(
        RANKS,
        [sending(each) for each in found],
        "s--",
        color=orange,
        label="ring: sending, while it computes",
    )
    heads = cost_of("ulysses", 8)
    axes.loglog(
        [8], [sending(heads)], "^", color=green, markersize=9,
        label="Ulysses: sending (8 key heads, so at most 8 ranks)",
    )  # fmt: skip
    axes.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    axes.minorticks_off()
    axes.set_yticks([0.01, 0.1, 1, 10], ["10 ms", "100 ms", "1 s", "10 s"])
    axes.set_ylim(0.008, 12)
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds of one layer, forward")
    axes.set_title(
        "1,048,576 tokens, causal: up to 256 ranks, computation hides the ring's messages", fontsize=10
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(out / "ring-scaling.png", dpi=150)


def main() -> None:
    """Draw the picture and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    print_table()
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
