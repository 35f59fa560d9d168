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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from manyheads.distributed.blocks import add_gradient, block
from manyheads.distributed.communication import Pending, Transfer, all_reduce, count
from manyheads.distributed.positions import Part
from manyheads.distributed.route import Route
from manyheads.distributed.rules import raise_errors
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

    @cached_property
    def route(self) -> Route:
        """How far the keys of each part travel."""
        return Route(self.parts, self.whole.mask, self.whole.shape.s)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.parts)

    def owner(self, step: int) -> int:
        """Return the rank whose keys this rank has in a step."""
        return self.route.owner(self.rank, step)

    @property
    def size(self) -> int:
        """The numbers of the key and the value of a token, over the batch and all heads: b·g·(d + w)."""
        shape = self.whole.shape
        return shape.b * shape.g * (shape.d + shape.w)

    @cached_property
    def last_step(self) -> int:
        """The last step in which this rank receives keys."""
        return self.route.last_step(self.rank)

    def blocks(self, s: int, step: int) -> Iterator[tuple[Part, int]]:
        """Yield this rank's parts, each with the number of each part of rank s that it sees some keys of."""
        for rows in self.parts[self.rank]:
            first, stop = self.route.span(rows.hull)
            for n in self.route.travellers(s, step):
                hull = self.parts[s][n].hull
                if hull.start < stop and first < hull.stop:
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
        for n in ring.route.travellers(s, step):
            pair = []
            for width in (shape.d, shape.w):
                size = shape.b * shape.g * len(ring.parts[s][n]) * width
                pair.append(memory[at : at + size].view(shape.b, shape.g, len(ring.parts[s][n]), width))
                at += size
            self.parts[n] = (pair[0], pair[1])

    @classmethod
    def empty(cls, ring: Ring, s: int, step: int, like: Tensor, dtype: torch.dtype) -> Packed:
        """Allocate memory for the parts of rank s that travel this many steps."""
        size = ring.route.travelling_tokens(s, step) * ring.size
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

    @classmethod
    def zeros(cls, ring: Ring, s: int, step: int, like: Tensor) -> Packed:
        """Allocate sums of gradients."""
        packed = cls.empty(ring, s, step, like, ring.whole.dtype)
        packed.memory.zero_()
        return packed

    def beginning(self, ring: Ring, s: int, step: int) -> Tensor:
        """Return the memory of the parts that travel at least this many steps."""
        return self.memory[: ring.route.travelling_tokens(s, step) * ring.size]

    def last(self, ring: Ring, step: int) -> Tensor:
        """Return the memory of this rank's parts that travel exactly this many steps."""
        begin, end = (len(self.beginning(ring, ring.rank, far)) for far in (step + 1, step))
        return self.memory[begin:end]

    def add(self, other: Packed) -> Packed:
        """Add the numbers of the same parts."""
        self.memory += other.memory
        return self

    def add_part(self, ring: Ring, step: int, arrived: Tensor) -> None:
        """Add gradients of this rank's parts that travel exactly this many steps."""
        self.last(ring, step).add_(arrived)

    def unpack(self, ring: Ring, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return this rank's keys and values, or their gradients, in the order of tokens."""
        shape = ring.whole.shape
        if len(self.parts) == 1:
            keys, values = next(iter(self.parts.values()))
            return keys.to(dtype), values.to(dtype)
        n = sum(len(part) for part in ring.parts[ring.rank])
        keys, values = (
            self.memory.new_empty(shape.b, shape.g, n, x, dtype=dtype) for x in (shape.d, shape.w)
        )
        for part, pair in self.parts.items():
            for into, x in zip((keys, values), pair, strict=True):
                into[:, :, ring.parts[ring.rank][part].rows] = x
        return keys, values


def pass_on(ring: Ring, step: int, packed: Packed, like: Tensor) -> tuple[Packed | None, list[Transfer]]:
    """Return memory for the next step's keys, and the transfers that fill it and pass on this step's."""
    mine, theirs = ring.owner(step), ring.owner(step + 1)
    transfers = [Transfer(packed.beginning(ring, mine, step + 1), ring.route.next(ring.rank), True, KEYS)]
    if step + 1 > ring.last_step:
        return None, transfers
    received = Packed.empty(ring, theirs, step + 1, like, like.dtype)
    return received, [*transfers, Transfer(received.memory, ring.route.next(ring.rank, -1), False, KEYS)]


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's output `[b, h, t, w]` and log-sum-exp `[b, h, t]`."""
    whole = ring.whole
    _count_minimum(ring, k.element_size())
    merged = partial.Merged(q, whole.shape.w, whole.dtype, whole.sink)
    packed: Packed | None = Packed.of(ring, k, v)
    for step in range(ring.last_step + 1):
        assert packed is not None
        received, transfers = pass_on(ring, step, packed, k)
        pending = Pending(transfers, ring.group)
        try:
            for rows, n in ring.blocks(ring.owner(step), step):
                problem = block(
                    whole, q[:, :, rows.rows], *packed.parts[n], rows, ring.parts[ring.owner(step)][n]
                )
                merged.add(rows.rows, *partial.forward(problem, ring.kernel_of(problem)))
        finally:  # also after an error: the next call must not receive this message
            pending.wait()
        packed = received
    raise_errors(whole, ring.group)
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
    whole, dtype = ring.whole, ring.whole.dtype
    travel = ring.keys_gradient
    _count_minimum(ring, k.element_size() + travel * dtype.itemsize)
    dq = torch.zeros_like(q, dtype=dtype)
    table = whole.bias.tensor() if whole.bias is not None and ring.bias_gradient else None
    d_table = None if table is None else torch.zeros_like(table)
    home = Packed.zeros(ring, ring.rank, 0, k)  # the gradients of this rank's keys
    packed: Packed | None = Packed.of(ring, k, v)
    previous: Packed | None = None  # the gradients of the step before
    for step in range(ring.ranks):
        s = ring.owner(step)
        received, transfers = (None, []) if packed is None else pass_on(ring, step, packed, k)
        incoming = arrived = None
        if travel and step > 1:
            arrived, more = _send_gradients(ring, step - 1, previous, home)
            transfers += more
            if step <= ring.last_step:
                incoming = Packed.empty(ring, s, step, k, dtype)
                transfers.append(Transfer(incoming.memory, ring.route.next(ring.rank, -1), False, GRADIENTS))
        pending = Pending(transfers, ring.group)
        current = None if step else home
        keys = {} if packed is None else packed.parts
        for rows, n in ring.blocks(s, step):
            at, cols = rows.rows, ring.parts[s][n]
            problem = block(whole, q[:, :, at], *keys[n], rows, cols)
            grads = partial.backward(
                problem, ring.kernel_of(problem), out[:, :, at], lse[:, :, at], d_out[:, :, at],
                ring.bias_gradient,
            )  # fmt: skip
            dq[:, :, at] += grads.q
            if current is None:  # not before the kernel has freed its memory
                current = Packed.zeros(ring, s, step, k)
            current.parts[n][0].add_(grads.k)
            current.parts[n][1].add_(grads.v)
            if d_table is not None and whole.bias is not None and grads.bias is not None:
                add_gradient(d_table, grads.bias, whole.bias, rows, cols)
            del grads  # it would take memory during the next block
        pending.wait()
        if incoming is not None:
            current = incoming if current is None else current.add(incoming)
        if arrived is not None:
            home.add_part(ring, step - 1, arrived)
        packed, previous = received, current
    del packed, received, incoming, keys
    if travel and ring.ranks > 1:
        arrived, transfers = _send_gradients(ring, ring.ranks - 1, previous, home)
        Pending(transfers, ring.group).wait()
        home.add_part(ring, ring.ranks - 1, arrived)
    raise_errors(whole, ring.group)
    dk, dv = home.unpack(ring, k.dtype)
    return dq.to(q.dtype), dk, dv, d_table


def _send_gradients(
    ring: Ring, step: int, grads: Packed | None, home: Packed
) -> tuple[Tensor, list[Transfer]]:
    """Return memory for gradients of this rank's keys, and the transfers of a step's gradients.

    Gradients are sent to the next rank or, in the last step of their keys, home to the rank of the keys.
    Those of this rank's keys come from the rank that is `step` steps ahead.
    """
    transfers = []
    s = ring.owner(step)
    if step <= ring.last_step:
        grads = Packed.zeros(ring, s, step, home.memory) if grads is None else grads
        onward = grads.beginning(ring, s, step + 1)
        transfers.append(Transfer(onward, ring.route.next(ring.rank), True, GRADIENTS))
        transfers.append(Transfer(grads.memory[len(onward) :], s, True, HOME))
    arrived = torch.empty_like(home.last(ring, step))
    return arrived, [*transfers, Transfer(arrived, ring.route.next(ring.rank, step), False, HOME)]


def _count_minimum(ring: Ring, size: int) -> None:
    """Count the fewest bytes, of `size` for each number of keys and values."""
    count(minimum=ring.route.minimum() * ring.size * size)


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
            # In the dtype of sums, because the ranks' shares are rounded only after they are added.
            d_sink = chunked.sink_gradient(replace(ring.whole, sink=sink.to(lse.dtype)), lse, delta)
        for grad in (d_sink, d_table):
            if grad is not None:
                all_reduce(grad, ring.group)
        d_sink = None if d_sink is None or sink is None else d_sink.to(sink.dtype)
        d_table = None if d_table is None or table is None else d_table.to(table.dtype)
        return None, dq, dk, dv, d_sink, d_table
