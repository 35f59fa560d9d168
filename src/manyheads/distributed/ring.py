"""Ring attention: keys and values travel from rank to rank, and no rank has all of them.

In step k, rank r computes the attention of its queries to the keys of rank r − k, while it receives the keys
of the next step and passes on the present ones (Liu et al. 2023, arXiv:2310.01889). Partial outputs are
merged by their log-sum-exps. The gradient repeats the round: the gradients of keys and values travel with
them, each rank adds its own, and the last rank sends them home.

Keys travel no farther than to the last rank that needs them, and in the direction in which fewer bytes are
sent: keys that are masked for all queries of the ranks ahead aren't sent. So a window sends to its
neighbours only, and a causal mask sends half as much in contiguous shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads.distributed.blocks import add_gradient, block
from manyheads.distributed.communication import Pending, Transfer, count
from manyheads.distributed.positions import Part
from manyheads.kernels import chunked, partial
from manyheads.problem import Problem

KEYS, GRADIENTS, HOME = range(3)  # tags of messages


@dataclass(eq=False)
class Ring:
    """One call: the ranks' parts, the problem of the whole sequence, and the route of each part's keys.

    Attributes:
        group: The process group.
        rank: This rank's number in the group.
        parts: The parts of each rank.
        whole: The problem of the whole sequence, without its queries, keys and values.
        kernel: "auto", or the kernel's name.
        finite: Whether no gradient is needed, or q, k and v are finite on all ranks.
        keys_gradient: Whether k or v needs a gradient.
        bias_gradient: Whether the bias needs a gradient.
    """

    group: Any
    rank: int
    parts: Sequence[Sequence[Part]]
    whole: Problem
    kernel: str = "auto"
    finite: bool = True
    keys_gradient: bool = False
    bias_gradient: bool = False

    def kernel_of(self, problem: Problem) -> str:
        """Return the name of the kernel for a block."""
        return partial.choose(problem, self.kernel, self.bias_gradient, self.finite)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.parts)

    @cached_property
    def needed(self) -> list[list[list[bool]]]:
        """`needed[r][s][n]`: whether some queries of rank r see keys of part n of rank s."""
        mask = self.whole.mask
        everything = [[(0, self.whole.shape.s)] for _ in self.parts]
        intervals = (
            everything if mask is None else [[mask.span(p.hull).some for p in own] for own in self.parts]
        )
        return [
            [[any(part.overlaps(each) for each in own) for part in theirs] for theirs in self.parts]
            for own in intervals
        ]

    @cached_property
    def route(self) -> tuple[int, list[list[int]]]:
        """The direction, 1 or −1, and how many steps each part of each rank travels."""
        routes = []
        for direction in (1, -1):
            steps = [
                [
                    max(
                        (direction * (r - s)) % self.ranks if self.needed[r][s][n] else 0
                        for r in range(self.ranks)
                    )
                    for n in range(len(self.parts[s]))
                ]
                for s in range(self.ranks)
            ]
            sent = sum(
                len(part) * far
                for own, distances in zip(self.parts, steps, strict=True)
                for part, far in zip(own, distances, strict=True)
            )
            routes.append((sent, direction, steps))
        _, direction, steps = min(routes, key=lambda route: route[0])
        return direction, steps

    def order(self, s: int) -> list[int]:
        """Return the parts of rank s in packed order: those that travel farthest come first."""
        steps = self.route[1][s]
        return sorted(range(len(steps)), key=lambda n: -steps[n])

    def travellers(self, s: int, step: int) -> list[int]:
        """Return the parts of rank s that travel at least this many steps, in packed order."""
        return [n for n in self.order(s) if self.route[1][s][n] >= step]

    def tokens(self, s: int, step: int) -> int:
        """Return the number of tokens of these parts."""
        return sum(len(self.parts[s][n]) for n in self.travellers(s, step))

    def owner(self, step: int) -> int:
        """Return the rank whose keys this rank has in a step."""
        return (self.rank - self.route[0] * step) % self.ranks

    @property
    def following(self) -> int:
        """The rank to which keys are sent."""
        return (self.rank + self.route[0]) % self.ranks

    @property
    def preceding(self) -> int:
        """The rank from which keys are received."""
        return (self.rank - self.route[0]) % self.ranks

    @cached_property
    def last_step(self) -> int:
        """The last step in which this rank computes or passes on something."""
        return max(step for step in range(self.ranks) if step == 0 or self.travellers(self.owner(step), step))

    def minimum(self) -> float:
        """Return the fewest tokens that a rank sends on average, each to each rank that needs it once."""
        return sum(
            len(part)
            for r in range(self.ranks)
            for s in range(self.ranks)
            for part, needed in zip(self.parts[s], self.needed[r][s], strict=True)
            if r != s and needed
        ) / max(self.ranks, 1)

    def blocks(self, s: int) -> Iterator[tuple[Part, int]]:
        """Yield this rank's parts, each with the number of each part of rank s that it sees some keys of."""
        mask = self.whole.mask
        for rows in self.parts[self.rank]:
            interval = (0, self.whole.shape.s) if mask is None else mask.span(rows.hull).some
            for n, cols in enumerate(self.parts[s]):
                if cols.overlaps(interval):
                    yield rows, n


class Packed:
    """Keys and values of some parts of a rank in one piece of memory, or their gradients.

    The first parts are at the beginning, so that a message is the beginning of the piece.
    """

    def __init__(self, ring: Ring, s: int, step: int, memory: Tensor) -> None:
        # The memory `[tokens · b·g·(d + w)]` has the parts of rank s that travel `step` steps.
        self.memory, shape = memory, ring.whole.shape
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}
        at = 0
        for n in ring.travellers(s, step):
            pair = []
            for width in (shape.d, shape.w):
                size = shape.b * shape.g * len(ring.parts[s][n]) * width
                pair.append(memory[at : at + size].view(shape.b, shape.g, len(ring.parts[s][n]), width))
                at += size
            self.parts[n] = (pair[0], pair[1])

    @classmethod
    def empty(cls, ring: Ring, s: int, step: int, like: Tensor, dtype: torch.dtype) -> Packed:
        """Allocate memory for the parts of rank s that travel this many steps."""
        shape = ring.whole.shape
        size = ring.tokens(s, step) * shape.b * shape.g * (shape.d + shape.w)
        return cls(ring, s, step, like.new_empty(size, dtype=dtype))

    @classmethod
    def of(cls, ring: Ring, k: Tensor, v: Tensor) -> Packed:
        """Pack this rank's own keys and values."""
        packed = cls.empty(ring, ring.rank, 0, k, k.dtype)
        for n, pair in packed.parts.items():
            rows = ring.parts[ring.rank][n].rows
            for to, x in zip(pair, (k, v), strict=True):
                to.copy_(x[:, :, rows])
        return packed

    def beginning(self, ring: Ring, s: int, step: int) -> Tensor:
        """Return the memory of the parts that travel at least this many steps."""
        shape = ring.whole.shape
        return self.memory[: ring.tokens(s, step) * shape.b * shape.g * (shape.d + shape.w)]


def _pass_on(ring: Ring, step: int, packed: Packed, like: Tensor) -> tuple[Packed | None, list[Transfer]]:
    """Return memory for the next step's keys, and the transfers that fill it and pass on this step's."""
    mine, theirs = ring.owner(step), ring.owner(step + 1)
    transfers = [Transfer(packed.beginning(ring, mine, step + 1), ring.following, True, KEYS)]
    if step + 1 > ring.last_step:
        return None, transfers
    received = Packed.empty(ring, theirs, step + 1, like, like.dtype)
    return received, [*transfers, Transfer(received.memory, ring.preceding, False, KEYS)]


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's output `[b, h, t, w]` and log-sum-exp `[b, h, t]`."""
    whole = ring.whole
    _count_minimum(ring, k.element_size())
    merged = partial.Merged(q, whole.shape.w, whole.dtype, whole.sink)
    packed: Packed | None = Packed.of(ring, k, v)
    for step in range(ring.last_step + 1):
        assert packed is not None
        received, transfers = _pass_on(ring, step, packed, k)
        pending = Pending(transfers, ring.group)
        for rows, n in ring.blocks(ring.owner(step)):
            problem = block(
                whole, q[:, :, rows.rows], *packed.parts[n], rows, ring.parts[ring.owner(step)][n]
            )
            merged.add(rows.rows, *partial.forward(problem, ring.kernel_of(problem)))
        pending.wait()
        packed = received
    return merged.finish(q.dtype)


def backward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return this rank's gradients of q, k and v, and its share of the gradient of the bias's tensor.

    Args:
        ring: The call.
        q: The queries `[b, h, n, d]`.
        k: The keys `[b, g, n, d]`.
        v: The values `[b, g, n, w]`.
        out: The output `[b, h, n, w]`.
        lse: The log-sum-exp over all keys, `[b, h, n]`.
        d_out: The gradient of the output, `[b, h, n, w]`.

    Returns:
        The gradients; the last is None if the bias needs none.
    """
    whole, rank, dtype = ring.whole, ring.rank, ring.whole.dtype
    travel = ring.keys_gradient
    _count_minimum(ring, k.element_size() + travel * dtype.itemsize)
    dq = torch.zeros_like(q, dtype=dtype)
    table = whole.bias.tensor() if whole.bias is not None and ring.bias_gradient else None
    d_table = None if table is None else torch.zeros_like(table, dtype=dtype)
    home = Packed.empty(ring, rank, 0, k, dtype)  # the gradients of this rank's keys
    home.memory.zero_()
    arrived = torch.zeros_like(home.beginning(ring, rank, 1))  # what other ranks have added up for them
    packed: Packed | None = Packed.of(ring, k, v)
    previous: Packed | None = None  # the gradients of the step before
    for step in range(ring.ranks):
        s = ring.owner(step)
        received, transfers = (None, []) if packed is None else _pass_on(ring, step, packed, k)
        incoming = None
        if travel and step > 1:
            transfers += _send_gradients(ring, step - 1, previous, arrived)
            if step <= ring.last_step:
                incoming = Packed.empty(ring, s, step, k, dtype)
                transfers.append(Transfer(incoming.memory, ring.preceding, False, GRADIENTS))
        pending = Pending(transfers, ring.group)
        current = home
        if step:
            current = Packed.empty(ring, s, step, k, dtype)
            current.memory.zero_()
        if packed is not None:
            for rows, n in ring.blocks(s):
                at, cols = rows.rows, ring.parts[s][n]
                problem = block(whole, q[:, :, at], *packed.parts[n], rows, cols)
                grads = partial.backward(
                    problem, ring.kernel_of(problem), out[:, :, at], lse[:, :, at], d_out[:, :, at],
                    ring.bias_gradient,
                )  # fmt: skip
                dq[:, :, at] += grads.q
                current.parts[n][0].add_(grads.k)
                current.parts[n][1].add_(grads.v)
                if d_table is not None and whole.bias is not None and grads.bias is not None:
                    add_gradient(d_table, grads.bias, whole.bias, rows, cols)
        pending.wait()
        if incoming is not None:
            current.memory += incoming.memory
        packed, previous = received, current
    if travel and ring.ranks > 1:
        Pending(_send_gradients(ring, ring.ranks - 1, previous, arrived), ring.group).wait()
    home.memory[: len(arrived)] += arrived
    dk, dv = torch.empty_like(k, dtype=k.dtype), torch.empty_like(v, dtype=v.dtype)
    for n, pair in home.parts.items():
        for into, grad in zip((dk, dv), pair, strict=True):
            into[:, :, ring.parts[rank][n].rows] = grad.to(into.dtype)
    return dq.to(q.dtype), dk, dv, d_table


def _send_gradients(ring: Ring, step: int, grads: Packed | None, arrived: Tensor) -> list[Transfer]:
    """Return the transfers of a step's gradients: to the next rank, or home if it was the last one."""
    transfers = []
    s = ring.owner(step)
    if grads is not None and step <= ring.last_step:
        onward = grads.beginning(ring, s, step + 1)
        transfers.append(Transfer(onward, ring.following, True, GRADIENTS))
        transfers.append(Transfer(grads.memory[len(onward) :], s, True, HOME))
    size = len(arrived) // max(ring.tokens(ring.rank, 1), 1)  # the numbers of a token
    begin, end = (size * ring.tokens(ring.rank, far) for far in (step + 1, step))
    last = (ring.rank + ring.route[0] * step) % ring.ranks
    return [*transfers, Transfer(arrived[begin:end], last, False, HOME)]


def _count_minimum(ring: Ring, size: int) -> None:
    shape = ring.whole.shape
    count(minimum=ring.minimum() * shape.b * shape.g * (shape.d + shape.w) * size)


class RingAttention(torch.autograd.Function):
    """Ring attention with a gradient: returns the output and the log-sum-exp, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, table: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's output `[b, h, t, w]` and log-sum-exp `[b, h, t]`."""
        out, lse = forward(ring, q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, sink, table)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        """Return the gradients, with None for each that isn't needed."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected a first gradient of distributed attention, got create_graph=True, which needs a "
                'second one. Use manyheads.attention with kernel="reference" on one process.'
            )
        ring: Ring = ctx.ring
        q, k, v, out, lse, sink, table = ctx.saved_tensors
        dq, dk, dv, d_table = backward(ring, q, k, v, out, lse, d_out)
        d_sink = None
        if sink is not None and ctx.needs_input_grad[4]:
            delta = (d_out.to(lse.dtype) * out).sum(-1)  # [b, h, t]
            d_sink = chunked.sink_gradient(ring.whole, lse, delta)
        for grad in (d_sink, d_table):
            if grad is not None:
                dist.all_reduce(grad, group=ring.group)
        return (
            None,
            dq,
            dk,
            dv,
            d_sink,
            None if d_table is None or table is None else d_table.to(table.dtype),
        )
