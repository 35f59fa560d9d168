"""What the tests of distributed attention run on each rank. Other processes import it, so it isn't a test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyheads import distributed
from tests.cases import FACTORS, Case, gradients, make, pairwise

TOKENS = 24  # which 2, 3 and 4 ranks divide into two chunks each
SIZES = (
    (2, 4, 2, 24, 24, 8, 8),
    (1, 6, 1, 24, 24, 5, 3),
    (1, 12, 12, 24, 24, 4, 4),
    (1, 2, 2, 24, 24, 33, 16),
)
CASES = pairwise(FACTORS | {"sizes": SIZES, "offset": ("default",)}, seed=3)
LAYOUTS = ("contiguous", "balanced", "striped", "scattered")


def positions_of(layout: str, rank: int, ranks: int) -> Tensor:
    """The positions of a rank's tokens."""
    n = TOKENS // ranks
    if layout == "contiguous":
        return torch.arange(rank * n, (rank + 1) * n)
    if layout == "balanced":
        chunks = torch.arange(TOKENS).chunk(2 * ranks)
        return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))
    if layout == "striped":
        return torch.arange(rank, TOKENS, ranks)
    return torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))[rank * n : (rank + 1) * n]


def layout_of(case: Case) -> str:
    return LAYOUTS[CASES.index(case) % len(LAYOUTS)]


def run_cases(mesh: DeviceMesh, cases: Sequence[Case], method: str, kernel: str) -> list[dict[str, Tensor]]:
    """This rank's output and gradients of each case."""
    results = []
    for case in cases:
        inputs, layout = make(case), layout_of(case)
        positions = positions_of(layout, mesh.get_local_rank(), mesh.size())
        leaves = inputs.leaves()
        for name in ("q", "k", "v"):  # this rank's tokens, with the strides of the case
            leaves[name] = leaves[name].detach()[:, :, positions].requires_grad_()
        arguments = inputs.arguments()
        arguments.pop("offset")
        out = distributed.attention(
            leaves["q"], leaves["k"], leaves["v"], mesh=mesh, method=method, kernel=kernel,
            positions=None if layout == "contiguous" else positions, **arguments,
        )  # fmt: skip
        upstream = inputs.upstream[:, :, positions]
        results.append({"out": out.detach()} | gradients(out, leaves, upstream))
    return results
