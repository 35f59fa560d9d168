"""The kernel's gradients: a custom operator, faster autograd functions, and plans for repeated calls."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from manyheads.kernels import batched, operator
from manyheads.kernels.native import library
from manyheads.kernels.native.packing import pack
from manyheads.kernels.native.passes import CHUNKS, backward, forward, needs_output, no_memory
from manyheads.masks import And, Lengths
from manyheads.problem import Problem

# -- the operator, which torch.compile and tensor subclasses need ----------------------------------

operator.register(
    "native",
    lambda problem, _: forward(problem)[:2],
    lambda problem, *given: backward(problem, *given[:-1]),  # without a seed
    key="CPU",
)

# -- autograd functions, used if the operator isn't needed: its call takes longer than a small problem


class Attention(torch.autograd.Function):
    """Attention with a gradient, of a problem and each of its tensors that may need one.

    The problem is kept for the gradient, and its tensors are saved tensors: PyTorch then raises an error if
    one was changed in place, and hooks on saved tensors (activation checkpointing) apply to all of them.
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
        """Return the gradients, with None for each that isn't needed."""
        out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        problem = ctx.problem.map(lambda _: next(tensors))
        d_out = torch.zeros_like(out) if d_out is None else d_out
        return _gradients(problem, out, lse, d_out, d_lse, ctx.needs_input_grad, saved)


_SAVED = torch.empty(0)  # replaces each tensor of a problem whose tensors are stored separately


class Plan:
    """What all problems of a layout have in common: they differ in q, k, v and the mask's lengths n."""

    def __init__(self, problem: Problem) -> None:
        q, shape = problem.q, problem.shape
        self.shape = shape
        mask, *self.options = problem.options
        self.mask = None if mask is None else mask.map(lambda _: _SAVED)
        b, h, g, t, n_keys, d, w = shape
        self.rows = (b, h, t)  # the shape of the log-sum-exp
        # Functions that allocate the output and the gradients of q, k and v.
        self.new_out = self.output_allocator(q, (b, h, t, w))
        self.new_dq = _allocator(q, (b, h, t, d))
        self.new_dk = _allocator(problem.k, (b, g, n_keys, d))
        self.new_dv = _allocator(problem.v, (b, g, n_keys, w))
        data, tensors = pack(problem, self.new_out(q), None)
        # The two tensors of a mask with lengths are each sequence's first key, and the key after the last,
        # `[b]` each. They are the same for all problems of the layout unless they depend on n.
        has_lengths = mask is not None and len(tensors) == 2
        self.first: Tensor | None = tensors[0] if has_lengths else None
        self.last: Tensor | None = tensors[1] if has_lengths else None
        self.only_addresses_differ = has_lengths or not tensors
        self.get_n: Callable[[Any], Tensor | None] = lambda _: None
        parts = {"n": mask, **({"left.n": mask.left, "right.n": mask.right} if isinstance(mask, And) else {})}
        for name, part in parts.items():
            if isinstance(part, Lengths) and isinstance(part.n, Tensor):
                self.get_n, self.left = attrgetter(name), part.left
        # The struct of problem.h: 8 sizes, 3 addresses, 16 strides, 2 addresses, …, 2 addresses, …
        self.sizes, self.strides, self.numbers, rest = data[:64], data[88:216], data[232:288], data[304:-16]
        # … and whether scores will be computed again, and the number of threads
        self.rest = rest + struct.pack("=2q", problem.wants_gradient(), torch.get_num_threads())
        self.fill = struct.Struct(f"=64s3Q128s2Q56s2Q{len(rest) + 16}s").pack
        # A tensor like the log-sum-exp, without its memory.
        self.like_lse = q.new_empty(1, dtype=problem.dtype).expand(self.rows)
        self.needs_output = needs_output(problem)  # does the gradient?
        self.inputs = _layout(q, problem.k, problem.v)
        self.outputs = _layout(self.new_out(q), torch.empty_like(self.like_lse), q)
        # The struct `Gradient`: an address, 4 strides, an address, 3 addresses, …
        gradient = library.GRADIENT.pack(*[0] * 17, max(CHUNKS // (shape.b * shape.g), 1))
        self.fill_gradient = struct.Struct(f"=Q4qQ3Q{len(gradient) - 72}s").pack
        self.rest_of_gradient = gradient[72:]

    @staticmethod
    def output_allocator(q: Tensor, sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return a function that allocates an output of these sizes, given q."""
        return _allocator(q, sizes)

    def problem(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor | None) -> Problem:
        """Return the problem of this layout with these tensors, without any check."""
        mask = self.mask if n is None or self.mask is None else self.mask.map(lambda _: n)
        return Problem(q, k, v, mask, *self.options)

    def ends(self, n: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return each sequence's first key that isn't padding, and the key after the last, `[b]` each."""
        if not (n.dtype is torch.int64 and n.shape == self.rows[:1] and n.is_contiguous()):
            n = n.to(torch.int64).expand(self.shape.b).contiguous()
        return (self.shape.s - n, self.last) if self.left else (self.first, n)

    def pack(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> bytes:
        """Return the bytes of the problem with these tensors, as `packing.pack` does."""
        return self.fill(
            self.sizes, q.data_ptr(), k.data_ptr(), v.data_ptr(), self.strides,
            0 if out is None else out.data_ptr(), 0 if lse is None else lse.data_ptr(), self.numbers,
            0 if first is None else first.data_ptr(), 0 if last is None else last.data_ptr(), self.rest,
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Return the output `[b, h, t, w]`."""
        return self.run(q, k, v, self.get_n(mask), None)

    def run(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor | None, lse: Tensor | None) -> Tensor:
        """Return the output `[b, h, t, w]`, and fill lse `[b, h, t]` if it is given."""
        out = self.new_out(q)
        first, last = (self.first, self.last) if n is None else self.ends(n)
        assert library.attend is not None
        if library.attend(self.pack(q, k, v, first, last, out, lse), None, library.width):
            raise no_memory(self.shape, q.element_size())
        return out

    def attend_with_gradient(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Return the output `[b, h, t, w]`, recorded by autograd."""
        return _record(self, q, k, v, self.get_n(mask))

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        n: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        d_out: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of q, k and v; None if they have to be computed without the plan.

        This is the case if a hook has changed the layout of a saved tensor, if the gradient of the output
        isn't a plain tensor, if the graph of gradients is needed (`create_graph=True`), if a number isn't
        finite, or if there isn't enough memory.
        """
        if (
            type(d_out) is not Tensor
            or torch.is_grad_enabled()
            or _functorch.is_legacy_batchedtensor(d_out)
            or _functorch.peek_interpreter_stack() is not None
            or d_out.is_neg()
            or d_out._is_zerotensor()
            or _layout(q, k, v) != self.inputs
            or (out is not None and lse is not None and _layout(out, lse, q) != self.outputs)
            or (n is not None and not (n.is_cpu and n.shape in ((1,), self.rows[:1])))
        ):
            return None
        dq, dk, dv = self.new_dq(q), self.new_dk(k), self.new_dv(v)
        first, last = (self.first, self.last) if n is None else self.ends(n)
        gradient = self.fill_gradient(
            d_out.data_ptr(), *d_out.stride(), 0, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
            self.rest_of_gradient,
        )  # fmt: skip
        assert library.differentiate is not None
        failed = library.differentiate(self.pack(q, k, v, first, last, out, lse), gradient, library.width)
        return None if failed else (dq, dk, dv)


def _allocator(like: Tensor, sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return a function that allocates a contiguous tensor of these sizes, given a tensor such as `like`."""
    if like.shape == sizes and like.is_contiguous():
        return torch.empty_like  # takes 2/3 of the time of new_empty
    return lambda x: x.new_empty(*sizes)


def _layout(x: Tensor, y: Tensor, z: Tensor) -> tuple[Any, ...]:
    """Return the shapes, strides and dtypes of tensors, and whether they are on the CPU."""
    # Without a loop, which would take longer than all else.
    return (
        x.shape, y.shape, z.shape, x.stride(), y.stride(), z.stride(), x.dtype, y.dtype, z.dtype,
        x.is_cpu, y.is_cpu, z.is_cpu,
    )  # fmt: skip


class PlannedAttention(torch.autograd.Function):
    """`Attention` for a problem with a plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, n: Tensor | None) -> Tensor:
        """Return the output `[b, h, t, w]`."""
        lse = torch.empty_like(plan.like_lse) if plan.needs_output else None
        out = plan.run(q, k, v, n, lse)
        ctx.plan = plan
        if lse is None:
            ctx.save_for_backward(q, k, v, n)
        else:
            ctx.save_for_backward(q, k, v, n, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        """Return the gradients, with None for each that isn't needed."""
        q, k, v, n, *outputs = ctx.saved_tensors
        out, lse = outputs or (None, None)
        grads = ctx.plan.gradients(q, k, v, n, out, lse, d_out)
        if grads is not None:
            return (None, *grads, None)
        problem = ctx.plan.problem(q, k, v, n)
        if out is None or lse is None:
            out, lse, _ = forward(problem.detach())
        needs = (*ctx.needs_input_grad[:4], False, False)
        tensors = [x for x in (q, k, v, n) if x is not None]
        return (*_gradients(problem, out, lse, d_out, None, needs, tensors)[:4], None)


# `PlannedAttention.apply` without its check for the transforms of torch.func: the check takes 2 of 18 µs, and
# calls under these transforms have no plan.
_record = super(torch.autograd.Function, PlannedAttention).apply


def _gradients(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    needs: Sequence[bool],
    saved: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of a function: the problem (None), q, k, v, sink and bias.

    needs: For each argument, whether its gradient is needed.
    saved: The tensors of the problem.
    """
    needs = needs[1:]

    def gradients(d_out: Tensor, d_lse: Tensor | None, *_: Tensor) -> list[Any]:
        grads = backward(problem, out, lse, d_out, d_lse, needs)
        return [grad for grad, need in zip(grads, needs, strict=True) if need]

    def differentiable_gradients(d_out: Tensor, d_lse: Tensor | None) -> Sequence[Tensor]:
        return batched.OnceDifferentiable.apply(gradients, d_out, d_lse, out, lse, *saved)

    # With create_graph=True, a gradient of this gradient may be computed, which raises our error.
    compute = differentiable_gradients if torch.is_grad_enabled() else gradients
    grads = iter(batched.differentiate_unbatched(compute, d_out, d_lse))
    return (None, *(next(grads) if need else None for need in needs))
