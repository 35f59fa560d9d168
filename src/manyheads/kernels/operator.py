"""Kernels as custom operators of PyTorch: their schema, shapes and gradients.

`torch.compile` puts an operator into a graph as one node, and tensor subclasses and dispatch modes can
intercept it. An operator only takes tensors, numbers and strings, so a mask and a bias are packed into a list
of tensors and a string (`trees.pack`), from which the operator rebuilds them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manyheads import trees
from manyheads.kernels.batched import differentiate_unbatched, raise_second_gradient
from manyheads.problem import Problem
from manyheads.scores import disable_autocast

PROBLEM = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] tensors, Tensor? offsets, Tensor? seed, str text, "
    "SymInt offset, float scale, float softcap, float dropout_p"
)
SEED = 6  # the index of the seed in the arguments

Forward = Callable[[Problem, Tensor | None], tuple[Tensor, Tensor]]
Backward = Callable[..., Sequence[Tensor | None]]

_library = torch.library.Library("manyheads", "FRAGMENT")


def register(name: str, forward: Forward, backward: Backward, key: str = "CompositeExplicitAutograd") -> None:
    """Register `manyheads::name` and its gradient `manyheads::name_backward`.

    Args:
        name: Name of the operator. It is called as `torch.ops.manyheads.name(*arguments(problem))`.
        forward: Takes a problem and its dropout seed; returns the output `[b, h, t, w]` and log-sum-exp
            `[b, h, t]`.
        backward: Takes a problem, the results of forward, their gradients, five bools (whether q, k, v, sink
            and bias need a gradient) and the seed; returns the five gradients, None for those not needed.
        key: PyTorch's dispatch key, for the devices that the operator supports.
    """

    def attend(*args: Any) -> tuple[Tensor, Tensor]:
        with disable_autocast(args[0].device):
            return forward(problem_of(*args), args[SEED])

    def attend_backward(
        out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: list[bool], *args: Any
    ) -> list[Tensor]:
        with disable_autocast(out.device):
            grads = backward(problem_of(*args), out, lse, d_out, d_lse, needs, args[SEED])
        return [out.new_empty(0) if grad is None else grad for grad in grads]

    def differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        out, lse, q, k, v, sink, offsets, seed, *tensors = ctx.saved_tensors
        args = (q, k, v, sink, tensors, offsets, seed, *ctx.numbers)
        needs_bias = [x.requires_grad for x in tensors]  # only the tensor of a bias can require a gradient
        needs = [True, True, True, sink is not None, any(needs_bias)]
        operator = getattr(torch.ops.manyheads, f"{name}_backward")
        dq, dk, dv, d_sink, d_bias = differentiate_unbatched(
            lambda d_out, d_lse: operator(out, lse, d_out, d_lse, needs, *args), d_out, d_lse
        )
        d_tensors = [d_bias if needed else None for needed in needs_bias]
        no_grads = [None] * (2 + len(ctx.numbers))  # for offsets, seed and all arguments after it
        return (dq, dk, dv, None if sink is None else d_sink, d_tensors, *no_grads)

    _library.define(f"{name}({PROBLEM}) -> (Tensor out, Tensor lse)")
    _library.define(
        f"{name}_backward(Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, bool[] needs, {PROBLEM}) "
        "-> Tensor[]"
    )
    for operator, implementation, fake, gradient, setup in (
        (name, attend, _fake, differentiate, _save),
        (f"{name}_backward", attend_backward, _fake_backward, raise_second_gradient, None),
    ):
        _library.impl(operator, implementation, key)
        operator = f"manyheads::{operator}"
        torch.library.register_fake(operator, fake, lib=_library)
        torch.library.register_autograd(operator, gradient, setup_context=setup, lib=_library)


def arguments(problem: Problem) -> tuple[Any, ...]:
    """Return a problem as the arguments of an operator."""
    tensors: list[Tensor] = []

    def add(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    text = _write(trees.pack([problem.mask, problem.bias], add))
    offset, offsets = (0, problem.offset) if isinstance(problem.offset, Tensor) else (problem.offset, None)
    seed = torch.randint(1 << 62, (1,)) if problem.dropout_p else None
    return (
        problem.q, problem.k, problem.v, problem.sink, tensors, offsets, seed, text,
        offset, problem.scale, problem.softcap or 0.0, problem.dropout_p,
    )  # fmt: skip


def _write(node: Any) -> str:
    """Return plain data as a Python literal. `repr` would fail for symbolic sizes under torch.compile."""
    if isinstance(node, dict):
        return "{" + ", ".join([f"{key!r}: {_write(part)}" for key, part in node.items()]) + "}"
    if isinstance(node, list):
        return "[" + ", ".join([_write(part) for part in node]) + "]"
    return repr(node) if isinstance(node, str) else f"{node}"


@lru_cache(256)
def _parse(text: str) -> Any:
    """Parse a literal. Results are cached, because training repeats the same few literals."""
    return ast.literal_eval(text)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, tensors: list[Tensor], offsets: Tensor | None,
    seed: Tensor | None, text: str, offset: int, scale: float, softcap: float, dropout_p: float,
) -> Problem:  # fmt: skip
    """Rebuild the problem from the arguments of an operator."""
    mask, bias = trees.unpack(_parse(text), tensors)
    return Problem.of(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap or None, sink=sink, dropout_p=dropout_p,
        offset=offset if offsets is None else offsets,
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs and outputs that the gradient needs."""
    q, k, v, sink, tensors, offsets, seed, *ctx.numbers = inputs
    # The text refers to functions by number, so they must be kept alive.
    ctx.functions = trees.functions(_parse(ctx.numbers[0]))
    ctx.save_for_backward(*output, q, k, v, sink, offsets, seed, *tensors)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return an uninitialized output and log-sum-exp of the right shapes and dtypes, for tracing."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_backward(
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: list[bool], *args: Any
) -> list[Tensor]:
    """Return uninitialized gradients of q, k, v, sink and the bias's tensor, for tracing."""
    q, k, v, sink, tensors = args[:5]
    bias = next(x for x in tensors if x.is_floating_point()) if needs[4] else None
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, sink, bias)]
