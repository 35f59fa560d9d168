"""What the tests of distributed attention run on each rank. Other processes import it, so it isn't a test."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import manyheads as mh
from manyheads import distributed
from manyheads.distributed import ring
from manyheads.masks import AtPositions
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


# -- faults ------------------------------------------------------------------------------------------


def faults(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Arguments of attention with a fault, by the name of the fault: those of this rank."""
    n = 6
    odd = rank == 1
    x = torch.zeros(1, 4, n, 8)
    run = torch.arange(rank * n, (rank + 1) * n)
    return {
        "a length that doesn't divide": {"x": x[:, :, : n - odd]},
        "another batch": {"x": x.repeat(1 + odd, 1, 1, 1)},
        "another dtype": {"x": x.double() if odd else x},
        "another mask": {"mask": mh.Window(left=2, right=0) if odd else mh.Causal()},
        "another mask of the same form": {"mask": mh.Documents(torch.arange(n * ranks) // (2 + odd))},
        "another function": {"mask": mh.Rule(RULES[odd])},
        "a function that raises": {"mask": mh.Causal() & mh.Rule(raise_on_rank_1)},
        "a function that raises in Ulysses": {
            "mask": ~mh.Rule(raise_on_rank_1),
            "x": x[:, :3],
            "method": "ulysses",
        },
        "another scale": {"scale": 2.0 if odd else 1.0},
        "another sink": {"sink": torch.full((4,), float(rank))},
        "another bias": {"bias": mh.ALiBi([1.0 + rank] * 4)},
        "another method": {"x": x[:, :3], "method": "ulysses" if odd else "ring"},
        "a gradient on one rank": {"x": x.clone().requires_grad_(odd)},
        "positions twice": {"positions": run - n * odd},
        "positions outside": {"positions": run + 1},
        "a position for each token": {"positions": run[: n - odd]},
        "positions of floats": {"positions": run.float() if odd else run},
        "an error on one rank": {"softcap": -1.0 if odd else 1.0},
        "an error on all ranks": {"mask": "causal"},
        "a mask of another size": {"mask": mh.Keep(torch.ones(n, n, dtype=torch.bool))},
        "ids of one rank": {"mask": mh.Documents(torch.zeros(n, dtype=torch.int64))},
        "three dimensions": {"x": x[0]},
        "heads that don't divide": {"x": x[:, :3], "method": "ulysses"},
        "an unknown method": {"method": "star"},
        "a kernel without a log-sum-exp": {"kernel": "sdpa"},
        "a mask of a cache": {
            "mask": AtPositions(mh.Causal(), torch.arange(n * ranks)[None, None], n * ranks)
        },
        "a kernel that doesn't support it": {"x": torch.zeros(1, 4, n, 300), "kernel": "native"},
    }


def raise_on_rank_1(b: Any, h: Any, i: Any, j: Any) -> Any:
    if dist.get_rank() == 1:
        raise RuntimeError("a failure in a rule")
    return j <= i


RULES = (lambda b, h, i, j: j <= i, lambda b, h, i, j: j < i + 2)


def try_faults(mesh: DeviceMesh) -> dict[str, str]:
    """This rank's error for each fault; and a call without a fault after each of them works."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    errors = {}
    for name, arguments in faults(rank, ranks).items():
        x = arguments.pop("x", torch.zeros(1, 4, 6, 8))
        try:
            distributed.attention(x, x, x, mesh=mesh, **arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            errors[name] = str(error)
        good = torch.ones(1, 4, 6, 8)
        assert bool((distributed.attention(good, good, good, mesh=mesh) == 1).all()), name
    return errors


def try_second_gradient(mesh: DeviceMesh) -> str:
    x = torch.ones(1, 2, 6, 8, requires_grad=True)
    out = distributed.attention(x, x, x, mesh=mesh)
    try:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


# -- traffic and keys --------------------------------------------------------------------------------

ROUTES = {  # masks and layouts, and whether the ring sends the minimum
    "full": (None, "contiguous", True),
    "causal": (mh.Causal(), "contiguous", True),
    "balanced": (mh.Causal(), "balanced", True),
    "window": (mh.Window(3, 0), "contiguous", True),
    "striped": (mh.Causal(), "striped", True),
    "documents": (mh.Documents(torch.arange(TOKENS) // 5), "contiguous", False),
    "first key": (mh.Keys([0]), "contiguous", True),
}


def measure_routes(mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    """What this rank sends for each mask and layout, and the most tokens whose keys and values it holds."""
    found: dict[str, dict[str, Any]] = {}
    packed: list[int] = []  # tokens in each piece of memory that exists
    create = ring.Packed.__init__

    def count(self: Any, ring: Any, s: int, step: int, memory: Tensor) -> None:
        create(self, ring, s, step, memory)
        tokens = len(memory) // ring.size
        packed.append(tokens)
        weakref.finalize(self, packed.remove, tokens)
        held.append(sum(packed))

    held: list[int] = []
    ring.Packed.__init__ = count  # type: ignore[method-assign]
    for name, (mask, layout, _) in ROUTES.items():
        positions = positions_of(layout, mesh.get_local_rank(), mesh.size())
        x = torch.ones(2, 4, len(positions), 8, requires_grad=True)
        k = torch.ones(2, 2, len(positions), 8, requires_grad=True)
        with distributed.count_traffic() as forward:
            out = distributed.attention(x, k, k, mesh=mesh, mask=mask, positions=positions)
        found[name] = {"held": max(held)}
        held.clear()
        with distributed.count_traffic() as backward:
            out.sum().backward()
        found[name] |= {"forward": vars(forward), "backward": vars(backward), "held with gradient": max(held)}
        held.clear()
    ring.Packed.__init__ = create  # type: ignore[method-assign]
    check_one_dimension()
    return found


def check_one_dimension() -> None:
    """Attention over one dimension of a mesh of 2 × 2 ranks, whose other dimension has other sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    whole = [torch.randn(1, 2, 8, 4, generator=generator, requires_grad=True) for _ in range(3)]
    rank = mesh.get_local_rank("sequence")
    mine = [x.detach()[:, :, 4 * rank : 4 * rank + 4].requires_grad_() for x in whole]
    out = distributed.attention(*mine, mesh=mesh["sequence"], mask=mh.Causal())
    expected = mh.attention(*whole, mask=mh.Causal())
    torch.testing.assert_close(out, expected[:, :, 4 * rank : 4 * rank + 4])
    grads = torch.autograd.grad(expected.square().sum(), whole)
    for x, y in zip(torch.autograd.grad(out.square().sum(), mine), grads, strict=True):
        torch.testing.assert_close(x, y[:, :, 4 * rank : 4 * rank + 4])


def attend_with_map(mesh: DeviceMesh) -> dict[str, Any]:
    """The output, and statistics of the map, by both methods."""
    found: dict[str, Any] = {}
    for method in ("ring", "ulysses"):
        positions = positions_of("balanced", mesh.get_local_rank(), mesh.size())
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 4, TOKENS, 8, generator=generator)[:, :, positions] for _ in range(3))
        arguments = {"mask": mh.Causal(), "positions": positions, "method": method, "sink": torch.ones(4)}
        out, amap = distributed.attention_with_map(q, k, v, mesh=mesh, **arguments)
        found[method] = {"out": out, "entropy": amap.entropy(), "received": amap.received()}
    return found
