"""Run a test's function on several processes that are joined by gloo on the loopback address."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

LIMIT = 300  # seconds after which a start has hung


def on_ranks(
    ranks: int, folder: Path, run: Callable[..., Any], *arguments: Any, timeout: float = 60
) -> list[Any]:
    """Return what `run(mesh, *arguments)` returns on each rank. Trees of tensors and plain data are returned.

    The function must be importable: a function of a module, not of another function. An error on a rank is
    raised here.

    timeout: Seconds after which a collective raises an error.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.set_forkserver_preload(["manyheads.distributed.functional"])  # and torch, once
    context = torch.multiprocessing.start_processes(
        _start, (ranks, str(folder), run, arguments, timeout), ranks, join=False, start_method="forkserver"
    )
    assert context is not None
    try:
        end = time.monotonic() + LIMIT
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"Expected {ranks} processes to end within {LIMIT} s.")
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]


def _start(
    rank: int, ranks: int, folder: str, run: Callable[..., Any], arguments: Any, timeout: float
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        mesh: DeviceMesh = init_device_mesh("cpu", (ranks,))
        torch.save(run(mesh, *arguments), f"{folder}/result-{rank}.pt")
    finally:
        dist.destroy_process_group()
