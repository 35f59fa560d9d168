"""The files of a map over ranks: every rank writes a shard, and the first one the index that names them.

Shards are written under temporary names and renamed, and the index last, so that an index only names shards
that are complete. Their names have the name of the save, so that the files of an earlier save stay until the
index is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads import shards, storage
from manyheads.distributed.communication import Pending, Transfer, explained
from manyheads.distributed.positions import Part
from manyheads.shards import Shard

TOKENS = 4  # the tag of messages


def locate(parts: Sequence[Part], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of some positions a rank has.

    Args:
        parts: The parts of the rank.
        positions: Ascending positions, int64 `[m]`.

    Returns:
        The indices of those positions that it has, and of their tokens among its tokens, both `[n]`.
    """
    where, tokens = [], []
    for part in parts:
        if isinstance(part.positions, range):
            ahead, step = positions - part.positions.start, part.positions.step
            inside = (ahead >= 0) & (ahead < len(part) * step) & (ahead % step == 0)
            index = ahead // step
        else:
            index = torch.searchsorted(part.positions, positions).clamp(max=len(part) - 1)
            inside = part.positions[index] == positions
        where.append(inside.nonzero().flatten())
        tokens.append(part.start + index[inside])
    if not where:
        return positions[:0], positions[:0]
    return torch.cat(where), torch.cat(tokens)


def write_shards(
    path: Path,
    stored: storage.StoredMap,
    tensors: Mapping[str, Tensor],
    parts: Sequence[Sequence[Part]],
    rank: int,
    group: Any,
    save: str,
) -> None:
    """Write the shards and the index of a map. All ranks call it.

    Args:
        path: The index.
        stored: The map, in whose q, k and lse only the sizes are used.
        tensors: This rank's tensors `[n, …]` by name, the tokens first, in the order of positions.
        parts: The parts of each rank.
        rank: This rank.
        group: The process group.
        save: The name of this save, the same on every rank.

    Raises:
        OSError: If a file can't be written, on every rank.
    """
    ranks, tokens = len(parts), sum(len(part) for own in parts for part in own)
    edges = [number * tokens // ranks for number in range(ranks + 1)]
    names = [f"{path.stem}.{save}.{number + 1}-of-{ranks}.safetensors" for number in range(ranks)]
    own = path.parent / names[rank]
    consecutive = {name: _exchange(x, parts, edges, rank, group) for name, x in tensors.items()}
    size = shards.file_size(consecutive, edges[rank], save)
    previous: list[str] = []

    def write_shard() -> str:
        with storage.replacing(own) as file:
            shards.write_shard(file, consecutive, edges[rank], save)
        return ""

    def write_index() -> str:
        if rank:
            return ""
        written = [
            Shard(name, stop - start, int(size))
            for name, start, stop, size in zip(names, edges, edges[1:], found, strict=False)
        ]
        for shard in written:
            at = path.parent / shard.name
            if not at.is_file() or at.stat().st_size != shard.bytes:
                return f"it doesn't have {at}, which another rank has written"
        previous.extend(_names_in(path))
        storage.write_encoded(path, *storage.encode_index(stored, shards.describe_shards(written, save)))
        return ""

    def remove() -> None:
        own.unlink(missing_ok=True)

    given = _together(write_shard, remove, f"its shard {own}", {"bytes": size}, group)
    found = [theirs["bytes"] for theirs in given]
    _together(write_index, remove, f"the index {path}", {}, group)
    for name in {*previous} - {*names}:
        (path.parent / name).unlink(missing_ok=True)
    with explained():
        dist.barrier(group)


def _together(
    write: Callable[[], str], remove: Callable[[], None], what: str, given: dict[str, Any], group: Any
) -> list[dict[str, Any]]:
    """Call `write`, which returns what is wrong, on all ranks, and return what each has given.

    If it fails on a rank, all ranks call `remove` and raise OSError.
    """
    try:
        error = write()
    except OSError as caught:
        error = caught.strerror or str(caught)
    results: list[Any] = [None] * dist.get_world_size(group)
    with explained():
        dist.all_gather_object(results, {**given, "what": what, "error": error}, group)
    for rank, theirs in enumerate(results):
        if theirs["error"]:
            remove()
            raise OSError(
                f"Rank {rank} can't write {theirs['what']}: {theirs['error']}. Choose a folder with enough "
                "space that all ranks can write."
            )
    return results


def _names_in(path: Path) -> list[str]:
    """Return the names of the shards of an earlier save at a path; none for other files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != storage.FORMAT:
            return []
        names = shards.names_of(metadata.get("shards", ""))
    except (OSError, ValueError, SafetensorError):
        return []
    return [name for name in names if name.startswith(f"{path.stem}.") and name.endswith(".safetensors")]


def _exchange(
    x: Tensor, parts: Sequence[Sequence[Part]], edges: Sequence[int], rank: int, group: Any
) -> Tensor:
    """Return the tokens at this rank's consecutive positions, `[m, …]`, of tensors `[n, …]` on all ranks.

    Args:
        x: This rank's tensor.
        parts: The parts of each rank.
        edges: The first position of each shard, and the number of tokens.
        rank: This rank.
        group: The process group.

    Returns:
        The tensor of this rank's shard.
    """
    shard = torch.arange(edges[rank], edges[rank + 1])
    result = x.new_empty(len(shard), *x.shape[1:])
    transfers, places = [], []
    for other in range(len(parts)):
        _, mine = locate(parts[rank], torch.arange(edges[other], edges[other + 1]))
        where, _ = locate(parts[other], shard)
        mine, where = mine.to(x.device), where.to(x.device)
        if other == rank:
            result[where] = x[mine]
            continue
        if len(mine):
            transfers.append(Transfer(x[mine].contiguous(), other, True, TOKENS))
        if len(where):
            received = x.new_empty(len(where), *x.shape[1:])
            transfers.append(Transfer(received, other, False, TOKENS))
            places.append((where, received))
    Pending(transfers, group).wait()
    for where, received in places:
        result[where] = received
    return result
