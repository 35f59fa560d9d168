"""Time attention over several processes, compared with one process that has as many threads.

    python benchmarks/distributed.py times [--length 16384] [--ranks 2] [--threads 2] [--method ulysses]
    python benchmarks/distributed.py memory [--length 16384] [--ranks 1 --ranks 2 --ranks 4]

Batch 1, 8 heads of 64, gloo on the loopback address, one thread for each process. Runs are interleaved
(A B A B …): the first process alone with as many threads, then all processes together. Medians are printed.
The efficiency is the time of the one process / the time of the processes. A causal mask uses balanced
positions. "sent" is what a rank sends, on average, and its minimum. "model" is the time of `cost`, whose
rates are measured: operations per second are those of the one process, bytes per second those of all
processes that send 16 MB to the next one at once, and the latency is that of the smallest such message.

`memory` prints, for each number of processes, the peak of a process's memory beyond its queries, keys and
values (Linux). Blocks of more than 1 MB are mapped, so that memory that was freed doesn't count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import typer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import manyheads
from manyheads import Causal
from manyheads.distributed import attention, balanced_positions, cost, count_traffic

HEADS, SIZE = 8, 64
app = typer.Typer(add_completion=False, help=__doc__)


def on_ranks(ranks: int, run: Callable[..., None], *arguments: Any) -> None:
    """Call a function with a mesh in several processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_start, (ranks, f"{folder}/store", run, arguments), nprocs=ranks)


def _start(rank: int, ranks: int, path: str, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    address = f"file://{path}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(minutes=10)
    )
    try:
        run(init_device_mesh("cpu", (ranks,)), *arguments)
    finally:
        dist.destroy_process_group()


def draw(tokens: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return random queries, keys, values and a gradient of the output, `[1, h, tokens, d]` each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, tokens, SIZE, generator=generator).to(dtype) for _ in range(4)]


def once(attend: Callable[..., Tensor], tensors: list[Tensor], gradient: bool) -> None:
    """Run a forward pass and, if wanted, a backward pass."""
    *leaves, upstream = tensors
    for leaf in leaves:
        leaf.requires_grad_(gradient).grad = None
    out = attend(*leaves)
    if gradient:
        out.backward(upstream)


def measure_links(mesh: Any, size: int = 16_000_000) -> tuple[float, float]:
    """Return the bytes per second that a rank sends while all do, and the seconds of an empty message."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    times = []
    for number in (1, size):
        send, receive = torch.zeros(number, dtype=torch.uint8), torch.empty(number, dtype=torch.uint8)
        spent = []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            work = dist.isend(send, (rank + 1) % ranks)
            dist.recv(receive, (rank - 1) % ranks)
            work.wait()
            spent.append(time.perf_counter() - start)
        most = torch.tensor([statistics.median(spent)])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        times.append(float(most))
    return size / max(times[1] - times[0], 1e-9), times[0]


def measure_times(
    mesh: Any, tokens: int, dtype: torch.dtype, rounds: int, methods: list[str], threads: int
) -> None:
    """Print times of all processes and of the first alone."""
    ranks, first = mesh.size(), mesh.get_local_rank() == 0
    rate, latency = measure_links(mesh)
    if first:
        print(f"a rank sends {rate / 1e9:.2f} GB/s, latency {latency * 1e6:.0f} µs", flush=True)
    whole = draw(tokens, dtype, 0) if first else []
    for causal in (False, True):
        mask = Causal() if causal else None
        positions = balanced_positions(tokens, mesh) if causal else None
        for gradient in (False, True):
            local = draw(tokens // ranks, dtype, 1)
            times: dict[str, list[float]] = {name: [] for name in ("alone", *methods)}
            traffic: dict[str, Any] = {}
            for _ in range(rounds):
                for name in times:
                    dist.barrier()
                    start = time.perf_counter()
                    if name != "alone":
                        run = partial(attention, mesh=mesh, mask=mask, positions=positions, method=name)
                        with count_traffic() as traffic[name]:
                            once(run, local, gradient)
                        dist.barrier()
                    elif first:
                        torch.set_num_threads(threads)
                        once(partial(manyheads.attention, mask=mask), whole, gradient)
                        torch.set_num_threads(1)
                    times[name].append(time.perf_counter() - start)
            sent = {name: torch.tensor([float(traffic[name].bytes)]) for name in methods}
            for name in methods:
                dist.all_reduce(sent[name])
            if not first:
                continue
            alone = statistics.median(times["alone"])
            sizes = {"mask": mask, "heads": HEADS, "size": SIZE, "dtype": dtype, "gradient": gradient}
            flops = cost(tokens, 1, **sizes).flops
            what = (
                f"{'causal' if causal else 'full':<7} {'forward and backward' if gradient else 'forward':<21}"
            )
            print(f"{what} one process {alone:6.2f} s", end="")
            for name in methods:
                spent = statistics.median(times[name])
                bytes_sent, least = float(sent[name]) / ranks / 1e6, traffic[name].minimum / 1e6
                print(f"   {name} {spent:6.2f} s, efficiency {alone / spent:4.0%}", end="")
                print(f", sent {bytes_sent:.1f} MB, minimum {least:.1f} MB", end="")
                layout = "balanced" if causal else "contiguous"
                model = cost(tokens, ranks, method=name, layout=layout, **sizes)
                seconds = model.seconds(flops / alone / ranks, rate, latency)
                print(f", model {seconds:.2f} s, {model.bytes / 1e6:.1f} MB", end="")
            print(flush=True)


@app.command()
def times(
    length: Annotated[int, typer.Option(help="Number of tokens of the sequence.")] = 16384,
    ranks: Annotated[int, typer.Option(help="Number of processes.")] = 2,
    dtype: Annotated[str, typer.Option(help="Dtype.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 3,
    threads: Annotated[int | None, typer.Option(help="Threads of the one process.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="ring or ulysses. Repeatable.")] = None,
) -> None:
    """Time the processes, and one process that has as many threads."""
    threads = threads or ranks
    print(
        f"torch {torch.__version__}, {dtype}, {length:,} tokens, {HEADS} heads of {SIZE}, {ranks} processes, "
        f"one process with {threads} threads"
    )
    methods = method or ["ring", "ulysses"]
    on_ranks(ranks, measure_times, length, getattr(torch, dtype), rounds, methods, threads)


def peak() -> int:
    """Return the peak of this process's memory in bytes since the last reset."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def measure_memory(mesh: Any, tokens: int, dtype: torch.dtype, gradient: bool, method: str) -> None:
    """Print the largest peak of all processes."""
    run = partial(attention, mesh=mesh, method=method)
    tensors = draw(tokens // mesh.size(), dtype, 1)
    once(run, [x[:, :, :16].clone() for x in tensors], gradient)  # loads everything
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak()
    once(run, tensors, gradient)
    most = torch.tensor([peak() - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if mesh.get_local_rank() == 0:
        what = "forward and backward" if gradient else "forward"
        size = sum(x.nbytes for x in tensors[:3]) / 1e6
        print(f"{mesh.size()} processes, {method:<7} {what:<20}  q, k, v {size:6.1f} MB", end="")
        print(f", beyond them {int(most) / 1e6:6.1f} MB", flush=True)


@app.command()
def memory(
    length: Annotated[int, typer.Option(help="Number of tokens of the sequence.")] = 16384,
    ranks: Annotated[list[int] | None, typer.Option(help="Number of processes. Repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype.")] = "float32",
    method: Annotated[list[str] | None, typer.Option(help="ring or ulysses. Repeatable.")] = None,
) -> None:
    """Measure the memory of a process."""
    print(f"torch {torch.__version__}, {dtype}, {length:,} tokens, {HEADS} heads of {SIZE}")
    for name in method or ["ring", "ulysses"]:
        for gradient in (False, True):
            for number in ranks or [1, 2, 4]:
                on_ranks(number, measure_memory, length, getattr(torch, dtype), gradient, name)


if __name__ == "__main__":
    app()
