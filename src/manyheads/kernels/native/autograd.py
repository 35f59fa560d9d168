"""The kernel for autograd: custom operators, functions that need none, and plans of short calls."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from manyheads.kernels import batched, operator
from manyheads.kernels.native import library
from manyheads.kernels.native.packing import pack
from manyheads.kernels.native.passes import CHUNKS, backward, forward, no_memory
from manyheads.problem import Problem

# -- the operator: torch.compile and tensor subclasses see it --------------------------------------

operator.register(
    "native",
    lambda problem, _: forward(problem)[:2],
    lambda problem, *given: backward(problem, *given[:-1]),  # without a seed
    key="CPU",
)

# -- functions: without an operator, whose call takes longer than a small problem ------------------


class Attention(torch.autograd.Function):
    """Attention with a gradient, of a problem and each of its tensors that may need one.

    The problem is kept for the gradient, and its tensors are saved tensors: PyTorch then raises where one was
    changed in place, and hooks on saved tensors (activation checkpointing) apply to all of them.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
        out, lse = forward(problem)[:2]
        saved = [out, lse]

        def save(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return _SAVED

        ctx.set_materialize_grads(False)
        ctx.problem = problem.map(save)
        ctx.save_for_backward(*saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients, None where none is needed."""
        out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        problem = ctx.problem.map(lambda _: next(tensors))
        d_out = torch.zeros_like(out) if d_out is None else d_out
        return _gradients(problem, out, lse, d_out, d_lse, ctx.needs_input_grad, saved)


_SAVED = torch.empty(0)  # stands for each tensor of a problem whose tensors are saved beside it


class Plan:
    """What all problems of a layout have in common; q, k and v are their only tensors."""

    def __init__(self, problem: Problem) -> None:
        p = problem
        self.shape, self.dtype = p.shape, p.dtype
        self.options = p.options
        data, held = pack(p, self.new_out(p.q), None)
        self.only_addresses_differ = not held
        # The struct of problem.h: 8 sizes, 3 addresses, 16 strides, 2 addresses, …, again, threads.
        self.sizes, self.strides, self.rest = data[:64], data[88:216], data[232:-16]
        self.threads = torch.get_num_threads()
        self.fill = struct.Struct(f"=64s3Q128s2Q{len(self.rest)}s2q").pack
        n, out = p.shape, self.new_out(p.q)
        self.saved = _layout(p.q, p.k, p.v, out, p.q.new_empty(n.b, n.h, n.t, dtype=p.dtype))
        self.chunks = max(CHUNKS // (p.shape.b * p.shape.g), 1)

    def new_out(self, q: Tensor) -> Tensor:
        """Return an empty output `[b, h, t, w]`."""
        n = self.shape
        return q.new_empty(n.b, n.h, n.t, n.w)

    def problem(self, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        """Return the problem of this layout with these tensors, without any check."""
        return Problem(q, k, v, *self.options)

    def pack(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> bytes:
        """Return the bytes of the problem with these tensors, as `packing.pack` does."""
        return self.fill(
            self.sizes, q.data_ptr(), k.data_ptr(), v.data_ptr(), self.strides,
            out.data_ptr(), 0 if lse is None else lse.data_ptr(), self.rest, lse is not None, self.threads,
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        """Return the output `[b, h, t, w]`, and fill lse `[b, h, t]`."""
        out = self.new_out(q)
        assert library.attend is not None
        if library.attend(self.pack(q, k, v, out, lse), None, library.width):
            raise no_memory(self.shape, q.element_size())
        return out

    def attend_with_gradient(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output `[b, h, t, w]`, recorded by autograd."""
        return PlannedAttention.apply(self, q, k, v)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of q, k and v; None where they have to be computed without the plan.

        That is for saved tensors that a hook has changed, for gradients that are no plain tensors, where
        gradients are recorded in turn, and where a number isn't finite or memory is short.
        """
        if (
            type(d_out) is not Tensor
            or torch.is_grad_enabled()
            or _functorch.is_legacy_batchedtensor(d_out)
            or _functorch.peek_interpreter_stack() is not None
            or d_out.is_neg()
            or d_out._is_zerotensor()
            or _layout(q, k, v, out, lse) != self.saved
        ):
            return None
        n = self.shape
        dq, dk = q.new_empty(n.b, n.h, n.t, n.d), k.new_empty(n.b, n.g, n.s, n.d)
        dv = v.new_empty(n.b, n.g, n.s, n.w)
        gradient = library.GRADIENT.pack(
            d_out.data_ptr(), *d_out.stride(), 0, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0,
            0, 0, 0, 0, 0, 0, False, self.chunks,
        )  # fmt: skip
        assert library.differentiate is not None
        failed = library.differentiate(self.pack(q, k, v, out, lse), gradient, library.width)
        return None if failed else (dq, dk, dv)


def _layout(*tensors: Tensor) -> list[Any]:
    """Return what the addresses of tensors mean: sizes, strides, dtypes, and whether they are in memory."""
    return [(x.shape, x.stride(), x.dtype, x.is_cpu) for x in tensors]


class PlannedAttention(torch.autograd.Function):
    """`Attention` by a plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output `[b, h, t, w]`."""
        n = plan.shape
        lse = q.new_empty(n.b, n.h, n.t, dtype=plan.dtype)
        out = plan.attend(q, k, v, lse)
        ctx.plan = plan
        ctx.save_for_backward(out, lse, q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        """Return the gradients, None where none is needed."""
        out, lse, *saved = ctx.saved_tensors
        found = ctx.plan.gradients(*saved, out, lse, d_out)
        if found is not None:
            return (None, *found)
        needs = (*ctx.needs_input_grad, False, False)
        return _gradients(ctx.plan.problem(*saved), out, lse, d_out, None, needs, saved)[:4]


def _gradients(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    needs: Sequence[bool],
    saved: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a function's arguments: of the problem (none), q, k, v, sink and bias.

    needs: of which arguments one is needed; saved: the problem's tensors.
    """
    needs = needs[1:]

    def gradients(d_out: Tensor, d_lse: Tensor | None, *_: Tensor) -> list[Any]:
        grads = backward(problem, out, lse, d_out, d_lse, needs)
        return [grad for grad, need in zip(grads, needs, strict=True) if need]

    def gradients_in_graph(d_out: Tensor, d_lse: Tensor | None) -> Sequence[Tensor]:
        return batched.Once.apply(gradients, d_out, d_lse, out, lse, *saved)

    # With create_graph=True a gradient of this gradient may be asked for, which `Once` refuses.
    compute = gradients_in_graph if torch.is_grad_enabled() else gradients
    grads = iter(batched.one_by_one(compute, d_out, d_lse))
    return (None, *(next(grads) if need else None for need in needs))
