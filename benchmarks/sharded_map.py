"""Compare the map of a long sequence over several processes with the map of one process.

    python benchmarks/sharded_map.py [--tokens 262144] [--processes 4] [--size 64] [--folder DIR]

One head, float32, a causal mask with balanced positions, gloo on the loopback address, one thread for each
process. The processes compute attention with its map, then entropy, received attention and the largest
weight of each query in one round, read a tile, and save the map. One process with two threads computes the
same. Printed are the largest differences, times, what a process sends, the peak of its memory beyond its
queries, keys and values (Linux), and what opening the saved map and reading a tile of it take.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import typer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from manyheads import AttentionMap, Causal
from manyheads import attention_with_map as attention_on_one_process
from manyheads.distributed import attention_with_map, balanced_positions, count_traffic

NAMES = ("entropy", "received", "row_max")
TILE = 0, 0, slice(-1000, None), slice(0, 1000)


def draw(tokens: int, size: int) -> list[Tensor]:
    """Return random queries, keys and values, `[1, 1, tokens, size]` each; some keys attract weight."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, size, generator=generator) for _ in range(3))
    k[:, :, ::97] *= 2
    return [q, k, v]


def memory(name: str) -> int:
    """Return a number of bytes of /proc/self/status: the memory (VmRSS) or its peak (VmHWM)."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def reset_peak() -> int:
    """Start a new peak, and return the memory now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory("VmRSS")


class Clock:
    """Prints how long each step took, on one process."""

    def __init__(self, prints: bool) -> None:
        self.prints, self.start = prints, time.perf_counter()

    def __call__(self, what: str) -> None:
        """Print the time since the last call."""
        now = time.perf_counter()
        if self.prints:
            print(f"  {what:<55} {now - self.start:8.2f} s", flush=True)
        self.start = now


def on_rank(rank: int, processes: int, folder: str, tokens: int, size: int) -> None:
    """Compute this rank's part, and save what rank 0 has for the comparison."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes,
        timeout=timedelta(minutes=30),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (processes,))
    positions = balanced_positions(tokens, mesh)
    q, k, v = (x[:, :, positions] for x in draw(tokens, size))
    dist.barrier()
    before, clock = reset_peak(), Clock(rank == 0)
    with count_traffic() as traffic:
        _, smap = attention_with_map(q, k, v, mesh=mesh, mask=Causal(), positions=positions)
        clock("attention with its map")
        sent = traffic.bytes
        found = smap.statistics(*NAMES)
        clock("entropy, received and row_max")
        sent_by_statistics, sent = traffic.bytes - sent, traffic.bytes
        tile = smap[TILE]
        clock("a tile of 1,000 × 1,000")
        sent_by_tile = traffic.bytes - sent
    peak = torch.tensor([memory("VmHWM") - before, sent_by_statistics, sent_by_tile])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    smap.save(Path(folder) / "map.safetensors")
    clock("save")
    found = {name: x if name == "received" else smap.gather(x) for name, x in found.items()}
    if rank == 0:
        own = sum(x.nbytes for x in (q, k, v)) / 1e6
        print(f"  a process has q, k, v of {own:.1f} MB, and beyond them at most {peak[0] / 1e6:.1f} MB")
        print(f"  it sends {peak[1] / 1e6:.1f} MB for the statistics, {peak[2] / 1e3:.1f} kB for the tile")
        torch.save({"tile": tile, **found}, Path(folder) / "found.pt")
    dist.destroy_process_group()


def compare(folder: Path, tokens: int, size: int) -> None:
    """Compute the same on this process, and print the differences; then open the saved map."""
    torch.set_num_threads(2)
    q, k, v = draw(tokens, size)
    print("one process with two threads:")
    clock = Clock(True)
    _, amap = attention_on_one_process(q, k, v, mask=Causal())
    clock("attention with its map")
    expected: dict[str, Any] = amap.statistics(*NAMES)
    clock("entropy, received and row_max")
    expected["tile"] = amap[TILE]
    found = torch.load(folder / "found.pt")
    print("largest differences:")
    for name, x in expected.items():
        print(f"  {name:<10} {float((x - found[name]).abs().max()):.2e}, largest {float(x.abs().max()):.6g}")
    del q, k, v, amap
    before, clock = reset_peak(), Clock(True)
    opened = AttentionMap.open(folder / "map.safetensors")
    clock("open the saved map")
    tile = opened[TILE]
    clock("a tile of it")
    print(f"  at most {(memory('VmHWM') - before) / 1e6:.1f} MB for both, of {opened.nbytes / 1e6:.1f} MB")
    print(f"  the tile differs by {float((tile - expected['tile']).abs().max()):.2e}")


def main(
    tokens: Annotated[int, typer.Option(help="Number of tokens of the sequence.")] = 262144,
    processes: Annotated[int, typer.Option(help="Number of processes.")] = 4,
    size: Annotated[int, typer.Option(help="Size of the head.")] = 64,
    folder: Annotated[Path | None, typer.Option(help="Folder of the saved map.")] = None,
) -> None:
    """Compare the map of several processes with that of one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        print(f"{tokens:,} tokens, one head of {size}, {processes} processes of one thread:", flush=True)
        torch.multiprocessing.spawn(on_rank, (processes, inside, tokens, size), nprocs=processes)
        compare(Path(inside), tokens, size)


if __name__ == "__main__":
    typer.run(main)
