"""The library's passes over a problem: forward, with statistics of the weights, and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads import scores
from manyheads.biases import ALiBi, Bias, Dense
from manyheads.kernels import chunked
from manyheads.kernels.fused import FusedStatistics, Spec
from manyheads.kernels.native import library, rules
from manyheads.kernels.native.packing import pack
from manyheads.kernels.native.statistics import pack_spec
from manyheads.problem import Problem, Rows
from manyheads.shapes import Shape, amount

FEW_KEYS = 64  # `DecodeGradient::STEP` in decode_gradient.h
CHUNKS = 16  # about this many chunks of keys, over all heads, are computed in parallel in a backward pass


def forward(problem: Problem, spec: Spec | None = None) -> tuple[Tensor, Tensor, FusedStatistics]:
    """Return the output `[b, h, t, w]`, the log-sum-exp `[b, h, t]`, and the fused statistics of a spec."""
    b, h, _, t, _, _, w = problem.shape
    out = problem.q.new_empty(b, h, t, w)
    lse = problem.q.new_empty(b, h, t, dtype=problem.dtype)
    return out, lse, attend(problem, out, lse, spec)


def attend(
    problem: Problem, out: Tensor, lse: Tensor | None, spec: Spec | None = None, known: bool = False
) -> FusedStatistics:
    """Write the output and the log-sum-exp; return the fused statistics of a spec.

    lse: The tensor to write, or to read if `known`; None if no later pass recomputes the scores.
    """
    data, _held = pack(problem, out, lse)  # tensors that must live until the call has returned
    fused: FusedStatistics = {}
    statistics = None
    if spec is not None and lse is not None:
        statistics, _held_statistics, fused = pack_spec(spec, problem, lse, known)
    assert library.attend is not None
    if library.attend(data, statistics, library.width):
        raise no_memory(problem.shape, problem.q.element_size())
    return fused


def no_memory(shape: Shape, size: int) -> MemoryError:
    """Return the error for a forward pass without enough memory; size: the bytes of one element."""
    needed = amount(shape.b * shape.g * shape.s * (shape.d + shape.w) * size)
    return MemoryError(f"Not enough memory to pack keys and values, which needs {needed}. Free some memory.")


def logits(problem: Problem, *part: Rows) -> Tensor:
    """Return `scores.logits` as computed by the library: scale · q·k with softcap, `[b, h, r, c]`."""
    q, k = (x.detach().resolve_neg() for x in scores.operands(problem, *part))
    result = q.new_empty(*q.shape[:3], k.shape[2], dtype=problem.dtype)
    if result.numel() == 0:
        return result
    tile = Problem.of(q, k, k[..., :0], scale=problem.scale, softcap=problem.softcap, offset=0)
    data, _held = pack(tile, q[..., :0], None)
    assert library.scores is not None
    if library.scores(data, result.data_ptr(), library.width):
        raise MemoryError("Not enough memory to pack a block of keys. Free some memory.")
    return result


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v, sink and the bias's tensor; None or an empty tensor if not needed.

    `chunked` computes them if a number isn't finite, or if the bias needs a gradient and is neither ALiBi nor
    a dense bias with a column for each key.
    """
    shape = problem.shape
    bias = problem.bias if needs[4] else None
    supported = (
        bias is None
        or isinstance(bias, ALiBi)
        or (isinstance(bias, Dense) and bias.values.shape[-1:] == (shape.s,))
    )
    # With the gradient of a bias or of the log-sum-exp, the library needs the latter.
    again = bias is None and d_lse is None and not needs_output(problem)
    grads = differentiate(problem, out, lse, d_out, d_lse, bias, again) if supported else None
    if grads is not None:
        return grads
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    # `chunked` sums scores in a different order, so it needs its own output and log-sum-exp.
    with torch.no_grad(), scores.disable_autocast(problem.q.device):
        out, lse = chunked.forward(problem)
        return chunked.backward(problem, out, lse, d_out, d_lse, list(needs))


def needs_output(problem: Problem) -> bool:
    """Return True if the gradient of a problem needs its output and log-sum-exp.

    A gradient of few queries of few keys computes them again, which is faster than saving them.
    """
    return rules.many_queries(problem) or problem.shape.s > FEW_KEYS or problem.sink is not None


def differentiate(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    bias: Bias | None,
    again: bool = False,
) -> list[Tensor | None] | None:
    """Return the gradients as computed by the library, or None if a number isn't finite.

    Output and log-sum-exp may be those of more keys than the problem's, unless they are computed again.
    """
    shape = problem.shape
    for name, x, sizes, dtype in (
        ("output", out, (shape.b, shape.h, shape.t, shape.w), problem.q.dtype),
        ("log-sum-exp", lse, (shape.b, shape.h, shape.t), problem.dtype),
        ("gradient of the output", d_out, (shape.b, shape.h, shape.t, shape.w), problem.q.dtype),
    ):
        if tuple(x.shape) != sizes or x.dtype != dtype or not x.is_cpu or not problem.q.is_cpu:
            raise RuntimeError(
                f"Expected the {name} to have shape {list(sizes)} and dtype {dtype} on the CPU, got shape "
                f"{list(x.shape)} and dtype {x.dtype} on {x.device}. Saved-tensor hooks must restore what "
                "they pack."
            )
    lse = lse.contiguous()  # a saved-tensor hook may have changed its strides
    dq = problem.q.new_empty(shape.b, shape.h, shape.t, shape.d)  # faster than passing a torch.Size
    dk = problem.q.new_empty(shape.b, shape.g, shape.s, shape.d)
    dv = problem.q.new_empty(shape.b, shape.g, shape.s, shape.w)
    delta = None if problem.sink is None else torch.empty_like(lse)
    d_bias: tuple[int, ...] = (0,) * 5
    table, slopes, shared = None, None, False
    chunks = max(CHUNKS // (shape.b * shape.g), 1)
    if isinstance(bias, Dense):
        table = bias.values.new_zeros(bias.values.shape, dtype=problem.dtype)
        view = table.expand(shape.b, shape.h, shape.t, shape.s)
        shared = (view.stride(0) == 0 and shape.b > 1) or (view.stride(1) == 0 and shape.h > 1)
        d_bias = (table.data_ptr(), *view.stride())
        chunks = CHUNKS if shared else chunks
    elif isinstance(bias, ALiBi):
        slopes = problem.q.new_zeros(shape.b, shape.h, chunks, dtype=problem.dtype)
    if d_lse is not None:
        d_lse = d_lse.to(problem.dtype).contiguous()
    if d_out.is_neg() or d_out._is_zerotensor():
        d_out = d_out.resolve_neg() + 0.0  # the library reads memory, so make a real copy
    data, _held = pack(problem, out, None if again else lse)
    assert library.differentiate is not None
    failed = library.differentiate(
        data,
        library.GRADIENT.pack(
            d_out.data_ptr(), *d_out.stride(), 0 if d_lse is None else d_lse.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0 if delta is None else delta.data_ptr(),
            *d_bias, 0 if slopes is None else slopes.data_ptr(), shared, chunks,
        ),
        library.width,
    )  # fmt: skip
    if failed == 2:
        return None
    if failed:
        raise MemoryError(
            "Not enough memory for a gradient: it packs the queries and sums gradients, which needs several "
            "times their size. Free some memory."
        )
    d_sink = None if delta is None else chunked.sink_gradient(problem, lse, delta)
    d_table = None
    if table is not None and bias is not None:
        d_table = table.to(bias.tensor().dtype).reshape(bias.tensor().shape)
    elif slopes is not None and bias is not None:
        d_table = slopes.sum((0, 2)).sum_to_size(bias.tensor().shape)
    return [dq, dk, dv, d_sink, d_table]
