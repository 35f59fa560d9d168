"""Which tokens of the sequence each rank has.

The tokens of a rank, sorted by position, are cut into parts: arithmetic progressions of positions, such as
a run of consecutive tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyheads.shapes import kind, sizes, whole

PARTS = 16  # a rank whose positions need more progressions than this has one part with a list of positions


@dataclass(frozen=True, eq=False)
class Part:
    """Some consecutive tokens of a rank, in the order of positions.

    Attributes:
        start: The index of the first token among the rank's tokens.
        positions: The positions, ascending: a range, or int64 `[n]`.
    """

    start: int
    positions: range | Tensor

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def rows(self) -> slice:
        """The indices of the tokens among the rank's tokens."""
        return slice(self.start, self.start + len(self))

    @property
    def hull(self) -> range:
        """The range from the first to the last position."""
        return range(int(self.positions[0]), int(self.positions[-1]) + 1)

    @property
    def is_run(self) -> bool:
        """Whether the positions are consecutive."""
        return isinstance(self.positions, range) and self.positions.step == 1

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions, int64 `[n]`."""
        if isinstance(self.positions, Tensor):
            return self.positions.to(device)
        return torch.arange(*_bounds(self.positions), device=device)


def _bounds(positions: range) -> tuple[int, int, int]:
    return positions.start, positions.stop, positions.step


def cut_into_parts(positions: Tensor) -> tuple[Part, ...]:
    """Return the parts of ascending positions, int64 `[n]`."""
    n = len(positions)
    if n == 0:
        return ()
    parts: list[Part] = []
    start = 0
    steps = positions.diff()
    if bool((steps == 0).any()):  # an error, which `check_partition` raises
        return (Part(0, positions.clone()),)
    changes = (steps.diff() != 0).nonzero().flatten().add(2).tolist()  # where a new step begins
    listed = positions.tolist()
    while start < n:
        if len(parts) == PARTS:
            return (Part(0, positions.clone()),)
        stop = next((change for change in changes if change >= start + 2), n)
        step = listed[start + 1] - listed[start] if stop > start + 1 else 1
        parts.append(Part(start, range(listed[start], listed[stop - 1] + 1, step)))
        start = stop
    return tuple(parts)


def balanced_positions(tokens: int, mesh: DeviceMesh) -> Tensor:
    """Return the positions of this rank's tokens in a layout that balances the work of a causal mask.

    Of 2N chunks of the sequence, rank r of N has the chunks r and 2N − 1 − r, an early one and a late one, so
    that every rank computes the same number of visible scores, as in PyTorch's `context_parallel`.

    Args:
        tokens: The number of tokens of the sequence, a multiple of 2N.
        mesh: The one-dimensional mesh over whose ranks the sequence is sharded.

    Returns:
        The positions, int64 `[tokens / N]`: `x[:, :, positions]` is this rank's shard of `[b, h, s, d]`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the tokens don't divide into 2N chunks, or the mesh isn't one-dimensional.
    """
    check_mesh(mesh)
    ranks, rank = mesh.size(), mesh.get_local_rank()
    n, rest = divmod(whole(tokens, "tokens", least=1), 2 * ranks)
    if rest:
        raise ValueError(
            f"Expected the number of tokens to be a multiple of {2 * ranks} (two chunks for each of {ranks} "
            f"ranks), got {tokens}. Pad the sequence to {(n + 1) * 2 * ranks}, and mask the padding with "
            "Lengths."
        )
    late = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(chunk * n, (chunk + 1) * n) for chunk in (rank, late)])


def check_mesh(mesh: Any) -> DeviceMesh:
    """Return the mesh; raise an error unless it is a one-dimensional DeviceMesh that has this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"Expected mesh to be a DeviceMesh, got {kind(mesh)}. Create one with "
            'torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,)).'
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("sequence",)
        raise ValueError(
            f"Expected a mesh of one dimension, got one of shape {list(mesh.shape)}. Select the dimension of "
            f"the sequence, such as mesh[{names[-1]!r}]."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Expected a mesh that has this rank, got one of the ranks {mesh.mesh.tolist()}. Call attention "
            "on the ranks of the mesh only."
        )
    return mesh


def check_positions(positions: Any, tokens: int, rank: int) -> Tensor:
    """Return this rank's positions as int64 `[tokens]` on the CPU; if None, shards in rank order."""
    if positions is None:
        return torch.arange(rank * tokens, (rank + 1) * tokens)
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"Expected positions to be a tensor of integers [{tokens}], got {kind(positions)}.")
    if tuple(positions.shape) != (tokens,):
        raise ValueError(
            f"Expected a position for each of this rank's {tokens} tokens, got positions {sizes(positions)}."
        )
    return positions.detach().to("cpu", torch.int64)


def check_partition(parts: Sequence[Sequence[Part]]) -> None:
    """Raise ValueError unless the parts of all ranks have the positions 0, 1, …, each of them once."""
    owned = [(part, rank) for rank, each in enumerate(parts) for part in each]
    tokens = sum(len(part) for part, _ in owned)
    if tokens == 0:
        return
    if all(part.is_run for part, _ in owned):
        owned.sort(key=lambda pair: pair[0].hull.start)
        if all(part.hull.start == stop for (part, _), stop in zip(owned, _stops(owned), strict=False)):
            return
    positions = torch.cat([part.tensor() for part, _ in owned])
    ranks = torch.cat([torch.full((len(part),), rank) for part, rank in owned])
    outside = ((positions < 0) | (positions >= tokens)).nonzero().flatten()
    if len(outside):
        raise ValueError(
            f"Expected the positions 0 to {tokens - 1} of {tokens} tokens, got position "
            f"{int(positions[outside[0]])} on rank {int(ranks[outside[0]])}. Count positions from 0, and "
            "pass each rank the positions of its own tokens."
        )
    counts = torch.bincount(positions, minlength=tokens)
    twice = (counts > 1).nonzero().flatten()
    if len(twice):
        position, missing = int(twice[0]), int((counts == 0).nonzero()[0])
        where = sorted({int(rank) for rank in ranks[positions == position]})
        on = f"rank {where[0]}" if len(where) == 1 else "ranks " + " and ".join(map(str, where))
        raise ValueError(
            f"Expected each position once, got position {position} twice (on {on}) and position {missing} "
            "on no rank. Pass each rank the positions of its own tokens."
        )


def _stops(owned: Sequence[tuple[Part, int]]) -> list[int]:
    """Return where each run has to start: at 0, or where the run before it ends."""
    return [0, *(part.hull.stop for part, _ in owned)]
