"""Communication of ranks: agreement on arguments, exchange of tensors, counts of bytes, and its faults."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads.trees import Value

SAMPLE = 1 << 18  # of larger tensors, about this many numbers are compared between ranks

# -- faults ----------------------------------------------------------------------------------------


@contextmanager
def explained(timeout: float | None = None) -> Iterator[None]:
    """Raise ConnectionError, in a sentence, for the errors of PyTorch's backends.

    Args:
        timeout: The time-out in seconds; None to read it from the error.

    Yields:
        Nothing.

    Raises:
        ConnectionError: If another process doesn't respond in time, or the connection to it is lost.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (isinstance(error, dist.DistError) or "gloo" in text or "onnection closed by peer" in text):
            raise
        if "timed out" in text.lower() or "timeout" in text.lower():
            found = re.search(r"(\d+) ?ms", text)
            if timeout is None and found is not None:
                timeout = int(found[1]) / 1000
            limit = "the time-out" if timeout is None else f"{timeout:g} s"
            raise ConnectionError(
                f"Another process didn't respond within {limit}. Look for the cause there, such as an error "
                "on one rank alone or a call that not all ranks make, or raise the time-out, and start again."
            ) from None
        raise ConnectionError(describe_loss()) from None


def describe_loss() -> str:
    """Return the sentence for a lost connection."""
    return (
        "The connection to another process was lost: it has ended, or the network has failed. Start all "
        "processes again."
    )


def all_reduce(tensor: Tensor, group: Any, how: Any = dist.ReduceOp.SUM) -> None:
    """Replace the ranks' tensors by their sum, or their maximum, on every rank."""
    with explained():
        dist.all_reduce(tensor, how, group=group)


# -- counting --------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What this rank sent while traffic was counted.

    Attributes:
        bytes: The bytes of queries, keys, values, outputs and gradients that it sent.
        messages: The number of messages.
        minimum: The fewest bytes that all ranks together could send, divided by the number of ranks: each
            key and value goes once to each rank whose queries see it (`ring`), each number to the rank that
            computes its head (`ulysses`), and each gradient of a key once back from each rank.
    """

    bytes: int = 0
    messages: int = 0
    minimum: float = 0.0


_counted: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this rank sends in the calls of `attention` inside the context, gradients included.

    Yields:
        The counts, which grow with each call.
    """
    traffic = Traffic()
    _counted.append(traffic)
    try:
        yield traffic
    finally:
        _counted.remove(traffic)


def count(sent: int = 0, messages: int = 0, minimum: float = 0.0) -> None:
    """Add to the counts."""
    for traffic in _counted:
        traffic.bytes += sent
        traffic.messages += messages
        traffic.minimum += minimum


# -- point to point --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A tensor to send to a rank or to receive from it; both are numbers within the group."""

    tensor: Tensor  # contiguous
    rank: int
    is_send: bool
    tag: int = 0


class Pending:
    """Transfers that are under way, except empty ones. Their tensors must not change before `wait`."""

    def __init__(self, transfers: Sequence[Transfer], group: Any) -> None:
        self.transfers = [each for each in transfers if each.tensor.numel()]
        for each in self.transfers:
            if each.is_send:
                count(each.tensor.nbytes, 1)
        operations = [
            dist.P2POp(
                dist.isend if each.is_send else dist.irecv,
                each.tensor,
                group=group,
                tag=each.tag,
                group_peer=each.rank,
            )
            for each in self.transfers
        ]
        with explained():
            self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait until everything has been sent and received."""
        with explained():
            for work in self.works:
                work.wait()
        self.works, self.transfers = [], []


# -- agreement -------------------------------------------------------------------------------------


def agree(group: Any, compute: Callable[[], dict[str, Any]], same: Sequence[str]) -> list[dict[str, Any]]:
    """Return what every rank computed, after a check that arguments are the same on every rank.

    An error on one rank is raised on every rank, so that no rank waits for another.

    Args:
        group: The process group.
        compute: A function that checks this rank's arguments, and returns them by name as plain data.
        same: The names of the arguments that have to be the same on every rank.

    Returns:
        The arguments of each rank.

    Raises:
        ValueError: If they differ, or there is an error on another rank.
        ConnectionError: If another rank doesn't respond in time.
    """
    error: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        mine = compute()
    except Exception as caught:  # whatever it is, the other ranks have to learn of it
        error = caught
        mine = {"error": f"{type(caught).__name__}: {caught}"}
    ranks: list[Any] = [None] * dist.get_world_size(group)
    if len(ranks) == 1:
        ranks = [mine]
    else:
        with explained():
            dist.all_gather_object(ranks, mine, group)
    if error is not None:
        raise error
    for rank, theirs in enumerate(ranks):
        if "error" in theirs:
            raise ValueError(f"Expected valid arguments on every rank, got on rank {rank} {theirs['error']}")
    for rank, theirs in enumerate(ranks):
        if theirs.keys() != ranks[0].keys():
            first, second = (", ".join(ranks[n]) or "nothing" for n in (0, rank))
            raise ValueError(
                f"Expected the same call on every rank, got one that compares {first} on rank 0 and one that "
                f"compares {second} on rank {rank}. Make the same calls in the same order on all ranks."
            )
    for name in same:
        values = [theirs[name] for theirs in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            first, second = (_show(values[rank]) for rank in (0, other))
            if first == second:
                first, second = "one", "another one, whose numbers differ,"
            raise ValueError(
                f"Expected the same {name} on every rank, got {first} on rank 0 and {second} on rank "
                f"{other}. Pass the same {name} to all ranks."
            )
    return ranks


@dataclass(frozen=True)
class Described:
    """An argument as text, with a checksum of its content."""

    text: str
    content: str


def _show(value: Any) -> str:
    return value.text if isinstance(value, Described) else str(value)


def describe(value: Value | Tensor | None) -> Described:
    """Return a mask, a bias or a tensor as text with a checksum, to be compared between ranks."""
    digest = hashlib.blake2b(digest_size=16)
    _hash(value, digest)
    text = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else str(value)
    return Described(text, digest.hexdigest())


def _hash(value: Any, digest: Any) -> None:
    """Add a value's content to a checksum; of large tensors, evenly spaced numbers."""
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {list(value.shape)}".encode())
        flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()
        flat = flat[:: max(flat.numel() // SAMPLE, 1)].contiguous().cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Value):
        digest.update(value.record.encode())
        for name in value.names:
            if name not in value.unbound and name != "number":  # a Rule's number differs between processes
                _hash(getattr(value, name), digest)
    elif callable(value):
        code = getattr(value, "__code__", None)
        closed = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        digest.update(repr(getattr(value, "__qualname__", type(value).__name__)).encode())
        digest.update(b"" if code is None else code.co_code)
        for part in (*getattr(code, "co_consts", ()), *closed):
            if isinstance(part, int | float | Tensor):  # others may have addresses, which differ
                _hash(part, digest)
    else:
        digest.update(repr(value).encode())
