"""Attention over a sequence that is sharded over processes: checks, and the choice of the method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import has_torch_function_variadic

from manyheads import kernels, scores
from manyheads.biases import ALiBi, Bias, Dense, Relative
from manyheads.distributed import ulysses
from manyheads.distributed.blocks import block, whole_problem
from manyheads.distributed.communication import agree, describe
from manyheads.distributed.positions import (
    Part,
    check_mesh,
    check_partition,
    check_positions,
    cut_into_parts,
)
from manyheads.distributed.ring import Ring, RingAttention
from manyheads.distributed.rules import guard
from manyheads.functional import autocast
from manyheads.kernels import partial
from manyheads.masks import AtPositions, Mask, Only
from manyheads.problem import Problem
from manyheads.shapes import kind, sizes, transforms

if TYPE_CHECKING:
    from manyheads.distributed.sharded_map import ShardedMap

METHODS = ("ring", "ulysses")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    positions: Tensor | None = None,
    method: str = "ring",
    kernel: str = "auto",
) -> Tensor:
    """Compute attention over a sequence that is sharded over the ranks of a mesh.

    Every rank calls it with its own tokens, and gets their outputs: those that `manyheads.attention` gives on
    one process. Mask and bias are those of the whole sequence, the same on every rank; they are applied by
    position. With `method="ring"` keys travel from rank to rank, and no rank has all of them (Liu et al.
    2023, arXiv:2310.01889); with `method="ulysses"` each rank computes some of the heads for the whole
    sequence (Jacobs et al. 2023, arXiv:2309.14509).

    All ranks must call it, and all must call backward. The gradients of q, k and v are this rank's. The
    gradients of a bias and of a sink are sums over the ranks, the same on every rank: don't sum them again.

    Args:
        q: This rank's queries `[b, h, n, d]`.
        k: This rank's keys `[b, g, n, d]`. g divides h.
        v: This rank's values `[b, g, n, w]`.
        mesh: The one-dimensional mesh of the N ranks, each of which has n of the N·n tokens.
        mask: The mask of the whole sequence (True = may attend): `Causal()`, `Documents(ids)`, …
        bias: The bias of the whole sequence: `ALiBi`, `Relative`, or `Dense` of N·n queries and keys.
        scale: The factor by which q·k is multiplied, 1/√d if None.
        softcap: If given, scores become softcap · tanh(score / softcap).
        sink: A logit per head, `[h]`: its exponential is added only to the softmax's denominator.
        positions: The positions of this rank's tokens in the sequence, integers `[n]`; None if rank r has the
            tokens r·n to (r + 1)·n − 1. See `balanced_positions` for causal masks.
        method: "ring" or "ulysses", which needs numbers of heads h and g that N divides.
        kernel: "auto" or the name of a kernel: for the ring, "native" or "chunked".

    Returns:
        The output `[b, h, n, w]` of this rank's queries, in the dtype of q.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is wrong on this rank or another one, differs between ranks, or isn't
            supported. Every rank raises an error then.
    """
    call = _prepare(q, k, v, mesh, mask, bias, scale, softcap, sink, positions, method, kernel)
    return call.run(with_lse=False)[0]


def attention_with_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    positions: Tensor | None = None,
    method: str = "ring",
    kernel: str = "auto",
) -> tuple[Tensor, ShardedMap]:
    """Compute attention as `attention` does, and return the output with the map of the whole sequence.

    Args:
        q: This rank's queries `[b, h, n, d]`.
        k: This rank's keys `[b, g, n, d]`. g divides h.
        v: This rank's values `[b, g, n, w]`.
        mesh: The one-dimensional mesh of the N ranks, each of which has n of the N·n tokens.
        mask: The mask of the whole sequence (True = may attend): `Causal()`, `Documents(ids)`, …
        bias: The bias of the whole sequence: `ALiBi`, `Relative`, or `Dense` of N·n queries and keys.
        scale: The factor by which q·k is multiplied, 1/√d if None.
        softcap: If given, scores become softcap · tanh(score / softcap).
        sink: A logit per head, `[h]`: its exponential is added only to the softmax's denominator.
        positions: The positions of this rank's tokens in the sequence, integers `[n]`; None if rank r has the
            tokens r·n to (r + 1)·n − 1. See `balanced_positions` for causal masks.
        method: "ring" or "ulysses", which needs numbers of heads h and g that N divides.
        kernel: "auto" or the name of a kernel: for the ring, "native" or "chunked".

    Returns:
        The output `[b, h, n, w]` of this rank's queries, and the map, whose tensors stay on their ranks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is wrong on this rank or another one, differs between ranks, or isn't
            supported. Every rank raises an error then.
    """
    from manyheads.distributed.sharded_map import ShardedMap

    call = _prepare(q, k, v, mesh, mask, bias, scale, softcap, sink, positions, method, kernel)
    out, lse = call.run(with_lse=True)
    amap = ShardedMap.of(
        call.q.detach(), call.k.detach(), lse, mesh=mesh, positions=call.positions, lengths=call.lengths,
        mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
    )  # fmt: skip
    return out, amap


class _Call(NamedTuple):
    """The checked arguments of a call."""

    q: Tensor  # [b, h, n, d]
    k: Tensor  # [b, g, n, d]
    v: Tensor  # [b, g, n, w]
    positions: Tensor  # [n], this rank's
    parts: tuple[tuple[Part, ...], ...]  # of each rank, in ascending order
    whole: Problem
    group: Any
    rank: int
    method: str
    kernel: str
    finite: bool

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each rank."""
        return [sum(len(part) for part in own) for own in self.parts]

    def run(self, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output `[b, h, n, w]` and the log-sum-exp `[b, h, n]` (or None if unwanted)."""
        order = None
        q, k, v = self.q, self.k, self.v
        if not bool((self.positions.diff() > 0).all()):
            order = self.positions.argsort().to(q.device)
            q, k, v = (x.index_select(2, order) for x in (q, k, v))
        out, lse = self._run_in_order(q, k, v, with_lse)
        if order is not None:
            back = order.argsort()
            out = out.index_select(2, back)
            lse = None if lse is None else lse.index_select(2, back)
        return out, lse

    def _run_in_order(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Run on tokens in the order of positions."""
        whole, table = self.whole, None if self.whole.bias is None else self.whole.bias.tensor()
        if self.method == "ulysses":
            positions = torch.cat([part.tensor() for own in self.parts for part in own])
            order = None if bool((positions.diff() > 0).all()) else positions.argsort().to(q.device)
            return ulysses.attend(whole, q, k, v, self.group, order, self.kernel, with_lse)
        grad = torch.is_grad_enabled()
        learns_bias = grad and table is not None and table.requires_grad
        whole = guard(whole.detach())
        if learns_bias and whole.bias is not None:
            # The gradients of blocks have the dtype of the bias: in a higher one, only their sum is rounded.
            whole = replace(whole, bias=whole.bias.map(lambda x: x.to(whole.dtype)))
        ring = Ring(
            self.group, self.rank, self.parts, whole, self.kernel, self.finite,
            keys_gradient=grad and (k.requires_grad or v.requires_grad), bias_gradient=learns_bias,
        )  # fmt: skip
        out, lse = RingAttention.apply(ring, q, k, v, self.whole.sink, table)
        return out, lse


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    mask: Mask | None,
    bias: Bias | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    positions: Tensor | None,
    method: str,
    kernel: str,
) -> _Call:
    """Check the arguments on this rank and between ranks."""
    check_mesh(mesh)
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    tensors: list[Tensor] = []
    found: dict[str, Any] = {}

    def compute() -> dict[str, Any]:
        """Return the facts about this rank's arguments that the other ranks need."""
        tensors[:] = autocast(q, k, v)
        whole = whole_problem(ranks, *tensors, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)
        _check(tensors, whole, method, kernel, ranks)
        n = tensors[0].shape[2]
        found["whole"], found["positions"] = whole, check_positions(positions, n, rank)
        table = None if bias is None else bias.tensor()
        if method == "ring" and kernel != "auto":
            # Raise before anything is sent, because messages without a receiver would hang the next call.
            learns = table is not None and table.requires_grad and torch.is_grad_enabled()
            for part in cut_into_parts(torch.arange(n)):
                partial.choose(
                    block(whole, tensors[0], tensors[1], tensors[2], part, part), kernel, bias_gradient=learns
                )
        learned = (*tensors, sink, table)
        wants = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in learned]
        return {
            "number of tokens": n,
            "shape of q": [*tensors[0].shape[:2], tensors[0].shape[3]],
            "shape of k": [*tensors[1].shape[:2], tensors[1].shape[3]],
            "width of v": tensors[2].shape[3],
            "dtype": str(tensors[0].dtype),
            "mask": describe(whole.mask),
            "bias": describe(None if whole.bias is None else whole.bias.detach()),
            "scale": whole.scale,
            "softcap": whole.softcap,
            "sink": describe(None if sink is None else sink.detach()),
            "method": method,
            "kernel": kernel,
            "requires_grad of q, k, v, sink and bias": wants,
            "parts": cut_into_parts(found["positions"].sort().values),
            "finite": not any(wants) or all(scores.finite(x) for x in tensors),
        }

    same = ("shape of q", "shape of k", "width of v", "dtype", "method", "kernel", "mask", "bias", "scale",
            "softcap", "sink", "requires_grad of q, k, v, sink and bias")  # fmt: skip
    given = agree(group, compute, same)
    counts = [theirs["number of tokens"] for theirs in given]
    if len({*counts}) > 1:
        least = sum(counts)
        padded = -(-least // ranks) * ranks
        raise ValueError(
            f"Expected the same number of tokens on every rank, got {', '.join(map(str, counts))}. Pad the "
            f"sequence to {padded} tokens, a multiple of {ranks}, and mask the padding by Lengths({least})."
        )
    parts = tuple(theirs["parts"] for theirs in given)
    check_partition(parts)
    q, k, v = tensors
    finite = all(theirs["finite"] for theirs in given)
    return _Call(q, k, v, found["positions"], parts, found["whole"], group, rank, method, kernel, finite)


def _check(tensors: list[Tensor], whole: Problem, method: str, kernel: str, ranks: int) -> None:
    """Check what only attention over ranks requires."""
    q, k, _ = tensors
    if method not in METHODS:
        raise ValueError(f"Expected method to be one of {', '.join(METHODS)}, got {method!r}.")
    kernels.check(kernel)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"Expected as many queries as keys on a rank, got q {sizes(q)} and k {sizes(k)}. Distributed "
            "attention is self-attention."
        )
    for part in whole.masks():
        if isinstance(part, AtPositions | Only):
            raise ValueError(
                f"Expected a mask of the whole sequence, got {part}, which was placed by a cache or selects "
                "heads. Pass the mask that it was made from."
            )
    if whole.bias is not None and not isinstance(whole.bias, ALiBi | Relative | Dense):
        raise TypeError(f"Expected bias to be ALiBi, Relative, Dense or None, got {kind(whole.bias)}.")
    if transforms() or forward_ad._current_level >= 0 or has_torch_function_variadic(*tensors):
        raise ValueError(
            "Expected plain tensors outside of torch.func and forward-mode derivatives, which distributed "
            "attention doesn't support. Use manyheads.attention on one process."
        )
    if method == "ring" and kernel not in ("auto", *partial.NAMES):
        raise ValueError(
            f'Expected kernel to be auto, {" or ".join(partial.NAMES)} for method="ring", got {kernel!r}, '
            'which gives no log-sum-exp by which partial outputs could be merged. Use kernel="auto".'
        )
    if method == "ulysses" and (whole.shape.h % ranks or whole.shape.g % ranks):
        raise ValueError(
            f'Expected numbers of heads that {ranks} ranks divide for method="ulysses", got h = '
            f'{whole.shape.h} query heads and g = {whole.shape.g} key heads. Use method="ring".'
        )
