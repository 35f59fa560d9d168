"""Online softmax in plain PyTorch: O(L) memory, any device, any mask and bias, gradients too.

Rows and columns are walked in blocks; a running maximum and sum per row make the softmax exact
(Milakov & Gimelshein 2018, arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682), and the gradient
recomputes each block from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135). Blocks that the mask
leaves empty are skipped.

It is one opaque operator, `manyheads::chunked`, on tensors and numbers: `torch.compile` doesn't
unroll its loop. Masks and biases go through it as text beside their tensors (`trees.write`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from manyheads import scores, trees
from manyheads.kernels import reference
from manyheads.kernels.batched import one_by_one, refuse_twice
from manyheads.scores import ALL, Problem, Rows, fold, unfold
from manyheads.shapes import transforms

NAME = "chunked"
GIVES_LSE = True
SHIELDS = True  # what is masked can't leak

BLOCK = 1 << 19  # scores in a block, over all heads: 2 MiB in float32, so that a core keeps it near


def refuse(problem: Problem) -> list[str]:
    """Return what the operator doesn't support: forward mode, torch.func's transforms, torch.jit.trace."""
    if torch.compiler.is_compiling():
        return []
    if torch._C._get_tracing_state() is not None:
        return ["torch.jit.trace doesn't record it: use torch.export or torch.compile"]
    if problem.forward_mode():
        return ["it has no forward-mode derivative"]
    if transforms():
        return ["torch.func's transforms (grad, vmap, …) don't see through it"]
    return []


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    return _attend(*arguments(problem))


def lse(problem: Problem) -> Tensor:
    """Return the log-sum-exp alone, `[b, h, t]`, in one pass over the keys; no gradient."""
    problem = problem.detach().without_values()
    if torch.compiler.is_compiling():
        return run(problem)[1]
    if "vmap" in transforms():
        return reference.weights(problem)[1]
    with torch.no_grad(), scores.exactly(problem.q.device):  # an operator's first call is slow
        return _forward(problem, None)[1]


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, as `lse` sums them; −inf where masked.

    A run of rows and columns is read in the blocks of `lse`: a product of another shape may round otherwise,
    which shows where scores go into the thousands.
    """
    down, across = _run(rows, problem.shape.t), _run(cols, problem.shape.s)
    if down is None or across is None or min(len(down), len(across)) < 32:
        return scores.tile(problem, rows, cols, batch, heads)
    (top, bottom), (left, right) = (down.start, down.stop), (across.start, across.stop)
    heads = ALL if isinstance(heads, slice) and heads == ALL else heads  # read in one piece, as by `lse`
    b, h = problem.q[:, :, 0, :0][batch][:, heads].shape[:2]
    found = problem.q.new_full((b, h, bottom - top, right - left), -math.inf, dtype=problem.dtype)
    for block_rows, columns in blocks(problem, top, bottom):
        for block_cols in columns:
            if block_cols.start < right and left < block_cols.stop:
                block = scores.tile(problem, block_rows, block_cols, batch, heads)
                (i, r), (j, c) = _shared(block_rows, top, bottom), _shared(block_cols, left, right)
                found[:, :, r, c] = block[:, :, i, j]
    return found


def _run(part: Rows, size: int) -> range | None:
    """Return the rows or columns of a plain slice; None for an index tensor and for steps."""
    if isinstance(part, Tensor) or part.step not in (None, 1):
        return None
    return range(*part.indices(size))


def _shared(block: slice, low: int, high: int) -> tuple[slice, slice]:
    """Return what a block shares with a run from low until before high, as a slice of each."""
    start, stop = max(block.start, low), min(block.stop, high)
    return slice(start - block.start, stop - block.start), slice(start - low, stop - low)


# -- the loops -------------------------------------------------------------------------------------


def blocks(problem: Problem, first: int = 0, last: int | None = None) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows, each with the blocks of columns that some of its rows may see.

    Those that hold a row from `first` until before `last` (t if None).
    """
    n = problem.shape
    budget = BLOCK if problem.q.device.type == "cpu" else 16 * BLOCK
    per_head = max(budget // max(n.b * n.h, 1), 1024)
    rows = min(max(math.isqrt(per_head) // 32 * 32, 32), max(n.t, 1))
    columns = max(per_head // rows // 32 * 32, 32)
    for start in range(first // rows * rows, n.t if last is None else last, rows):
        stop = min(start + rows, n.t)
        (left, right), _ = problem.span(start, stop)
        yield (
            slice(start, stop),
            [slice(c, min(c + columns, right)) for c in range(left, right, columns)],
        )


def _forward(p: Problem, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    b, h, g, t, _, _, w = p.shape
    out = p.q.new_empty(b, h, t, w)
    lse = p.q.new_empty(b, h, t, dtype=p.dtype)
    fine = scores.finite(p.v)
    for rows, columns in blocks(p):
        r = rows.stop - rows.start
        top, total = _start(p, r)  # [b, h, r]: the running maximum, and the sum of exp(score − top)
        acc = p.q.new_zeros(b, h, r, w, dtype=p.dtype)
        for cols in columns:
            score = scores.tile(p, rows, cols)  # [b, h, r, c]
            higher = torch.maximum(top, score.amax(-1))
            ground = torch.where(higher == -math.inf, 0.0, higher)  # −inf − −inf is NaN
            weight = torch.exp(score - ground[..., None])
            decay = torch.exp(top - ground)
            top, total = higher, total * decay + weight.sum(-1)
            if seed is not None:
                weight = weight * _dropout(p, seed, rows, cols)
            v = p.v[:, :, cols].to(p.dtype)  # [b, g, c, w]
            weight = fold(weight, g)
            mixed = weight @ v if fine else scores.mix(weight, fold(score != -math.inf, g), v)
            acc = acc * decay[..., None] + unfold(mixed, h)
        empty = total == 0
        out[:, :, rows] = (acc / torch.where(empty, 1.0, total)[..., None]).to(out.dtype)
        lse[:, :, rows] = torch.where(empty, -math.inf, top + total.log())
    return out, lse


def _backward(
    p: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    seed: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """Return the gradients of q, k, v, sink and the bias's tensor; those not needed are empty tensors."""
    h, g = p.shape.h, p.shape.g
    d_out = d_out.to(p.dtype)  # [b, h, t, w]
    dq, dk, dv = (torch.zeros(x.shape, dtype=p.dtype, device=x.device) for x in (p.q, p.k, p.v))
    table = p.bias.tensor() if p.bias is not None and needs[4] else None
    d_bias = p.q.new_empty(0) if table is None else p.q.new_zeros(table.shape, dtype=p.dtype)
    # d score = weight · (d weight − Σ weight · d weight); the sum is d out · out. lse adds its own part.
    delta = (d_out * out).sum(-1) - d_lse  # [b, h, t]
    fine = all(scores.finite(x) for x in (p.q, p.k, p.v, d_out))

    def mix(weight: Tensor, keep: Tensor, x: Tensor) -> Tensor:
        return weight @ x if fine else scores.mix(weight, keep, x)

    for rows, columns in blocks(p):
        q = fold(p.q[:, :, rows].to(p.dtype), g)  # [b, g, r', d], r' = (h/g)·r
        do = fold(d_out[:, :, rows], g)  # [b, g, r', w]
        for cols in columns:
            score = scores.tile(p, rows, cols)  # [b, h, r, c]
            keep = score != -math.inf
            weight = scores.weights(score, lse[:, :, rows])
            k, v = (
                p.k[:, :, cols].to(p.dtype),
                p.v[:, :, cols].to(p.dtype),
            )  # [b, g, c, d], [b, g, c, w]
            d_weight = unfold(do @ v.mT, h)  # [b, h, r, c]
            used = weight
            if seed is not None:
                drop = _dropout(p, seed, rows, cols)
                used, d_weight = weight * drop, d_weight * drop
            folded = fold(keep, g)  # [b, g, r', c]
            dv[:, :, cols] += mix(fold(used, g).mT, folded.mT, do)
            d_score = torch.where(keep, weight * (d_weight - delta[:, :, rows, None]), 0.0)
            if table is not None and p.bias is not None:
                p.bias.collect(d_bias, d_score, *p.at(rows, cols))
            if p.softcap is not None:
                bent = torch.tanh(scores.products(p, rows, cols) / p.softcap)
                d_score = torch.where(keep, d_score * (1 - bent * bent), 0.0)
            d_score = fold(d_score * p.scale, g)
            dq[:, :, rows] += unfold(mix(d_score, folded, k), h)
            dk[:, :, cols] += mix(d_score.mT, folded.mT, q)
    like = (p.q, p.k, p.v, p.sink, table)
    return [
        x if y is None else x.to(y.dtype)
        for x, y in zip((dq, dk, dv, sink_gradient(p, lse, delta), d_bias), like, strict=True)
    ]


def sink_gradient(p: Problem, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sink `[h]`, whose value is 0; empty without one.

    lse, and delta, the mean of a row's gradients of weights: both `[b, h, t]`.
    """
    if p.sink is None:
        return p.q.new_empty(0)
    weight = scores.weights(p.sink.to(p.dtype)[:, None, None], lse)[..., 0]  # [b, h, t]
    return -(weight * delta).sum((0, 2)).to(p.sink.dtype)


def _start(p: Problem, r: int) -> tuple[Tensor, Tensor]:
    """Return the running maximum and sum before any key: nothing, or the sink alone. Both `[b, h, r]`."""
    b, h = p.shape.b, p.shape.h
    if p.sink is None:
        return p.q.new_full((b, h, r), -math.inf, dtype=p.dtype), p.q.new_zeros(b, h, r, dtype=p.dtype)
    sink = p.sink.to(p.dtype)[None, :, None].expand(b, h, r)
    return sink, (sink != -math.inf).to(p.dtype)


def _dropout(p: Problem, seed: Tensor, rows: slice, cols: slice) -> Tensor:
    """Return what dropout multiplies a block's weights by, 0 or 1/(1 − p): the same in every call."""
    if p.dropout_p == 1:
        return p.q.new_zeros((), dtype=p.dtype)
    place = (int(seed) + rows.start * p.shape.s + cols.start) % (1 << 63)
    generator = torch.Generator(p.q.device).manual_seed(place)
    size = (p.shape.b, p.shape.h, rows.stop - rows.start, cols.stop - cols.start)
    kept = torch.rand(size, generator=generator, device=p.q.device) >= p.dropout_p
    return kept.to(p.dtype) / (1 - p.dropout_p)


# -- the operator ----------------------------------------------------------------------------------

ARGUMENTS = (  # of an operator that takes a whole problem
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] masks, Tensor[] biases, Tensor? offsets, "
    "Tensor? seed, str text, SymInt offset, float scale, float softcap, float dropout_p"
)


def arguments(problem: Problem) -> tuple[Any, ...]:
    """Return a problem as an operator takes it."""
    masks: list[Tensor] = []
    biases: list[Tensor] = []
    text = f"({trees.write(problem.mask, masks)}, {trees.write(problem.bias, biases)})"
    per_sequence = isinstance(problem.offset, Tensor)
    return (
        problem.q,
        problem.k,
        problem.v,
        problem.sink,
        masks,
        biases,
        problem.offset if per_sequence else None,
        torch.randint(1 << 62, (1,)) if problem.dropout_p else None,
        text,
        0 if per_sequence else problem.offset,
        problem.scale,
        problem.softcap or 0.0,
        problem.dropout_p,
    )


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    masks: list[Tensor],
    biases: list[Tensor],
    offsets: Tensor | None,
    seed: Tensor | None,
    text: str,
    offset: int,
    scale: float,
    softcap: float,
    dropout_p: float,
) -> Problem:
    """Return the problem that an operator was given."""
    mask, bias = trees.read(text, masks, biases)
    return Problem.of(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap or None,
        sink=sink,
        dropout_p=dropout_p,
        offset=offset if offsets is None else offsets,
    )


@torch.library.custom_op(
    "manyheads::chunked", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor out, Tensor lse)"
)
def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = problem_of(*arguments)
    with scores.exactly(problem.q.device):
        return _forward(problem, arguments[7])


GIVEN = f"Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, bool[] needs, {ARGUMENTS}"  # to its gradient


@torch.library.custom_op("manyheads::chunked_backward", mutates_args=(), schema=f"({GIVEN}) -> Tensor[]")
def _attend_backward(
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: list[bool], *arguments: Any
) -> list[Tensor]:
    problem = problem_of(*arguments)
    with scores.exactly(problem.q.device):
        return _backward(problem, out, lse, d_out, d_lse, arguments[7], needs)


@_attend.register_fake
def shaped(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp without their numbers."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=wide)


@_attend_backward.register_fake
def gradients_shaped(
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needs: list[bool], *arguments: Any
) -> list[Tensor]:
    """Return the gradients of q, k, v, sink and the bias's tensor without their numbers."""
    q, k, v, sink, _, biases = arguments[:6]
    like = (q, k, v, sink, biases[0] if biases and needs[4] else None)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like]


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the gradient needs."""
    q, k, v, sink, masks, biases, offsets, seed, *ctx.numbers = inputs
    ctx.masks = len(masks)
    ctx.held = trees.functions(ctx.numbers[0])
    ctx.save_for_backward(*output, q, k, v, sink, offsets, seed, *masks, *biases)


def remembered(ctx: Any) -> tuple[Any, ...]:
    """Return what `remember` kept: the output, the log-sum-exp, and the operator's arguments."""
    out, lse, q, k, v, sink, offsets, seed, *rest = ctx.saved_tensors
    masks, biases = rest[: ctx.masks], rest[ctx.masks :]
    return (out, lse, q, k, v, sink, masks, biases, offsets, seed, *ctx.numbers)


def differentiated_by(backward: Callable[..., list[Tensor]]) -> Callable[..., tuple[Any, ...]]:
    """Return how an operator's arguments get their gradients by `backward`, from what `remember` kept."""

    def differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        out, lse, *arguments = remembered(ctx)
        sink, masks, biases = arguments[3:6]
        needs = [True, True, True, sink is not None, any(x.requires_grad for x in biases)]
        dq, dk, dv, d_sink, d_bias = one_by_one(
            lambda d_out, d_lse: backward(out, lse, d_out, d_lse, needs, *arguments), d_out, d_lse
        )
        d_biases = [d_bias if needs[4] else None for _ in biases]
        nothing = [None] * (2 + len(ctx.numbers))
        return (dq, dk, dv, None if sink is None else d_sink, [None] * len(masks), d_biases, *nothing)

    return differentiate


_attend.register_autograd(differentiated_by(lambda *given: _attend_backward(*given)), setup_context=remember)
_attend_backward.register_autograd(refuse_twice)
