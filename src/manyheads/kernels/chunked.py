"""Online softmax in plain PyTorch: O(L) memory, any device, any mask and bias, gradients too.

Rows and columns are walked in blocks; a running maximum and sum per row make the softmax exact
(Milakov & Gimelshein 2018, arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682), and the gradient
recomputes each block from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135). Blocks that the mask
leaves empty are skipped.

It is one custom operator, `manyheads::chunked`, so that `torch.compile` doesn't unroll its loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from manyheads import scores
from manyheads.kernels import operator, reference
from manyheads.kernels.fused import Found, Spec
from manyheads.problem import ALL, Problem, Rows
from manyheads.scores import fold, unfold
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
    return torch.ops.manyheads.chunked(*operator.arguments(problem))


def statistics(problem: Problem, spec: Spec | None, lse: Tensor | None = None) -> tuple[Tensor, Found]:
    """Return the log-sum-exp `[b, h, t]` in one pass over the keys, and no fused statistics; no gradient."""
    problem = problem.detach().without_values()
    if lse is not None:
        return lse, {}
    if torch.compiler.is_compiling():
        return run(problem)[1], {}
    if "vmap" in transforms():
        return reference.weights(problem)[1], {}
    with torch.no_grad(), scores.exactly(problem.q.device):  # an operator's first call is slow
        return forward(problem)[1], {}


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, as `statistics` sums them; −inf where masked.

    A run of rows and columns is read in the blocks of `forward`: a product of another shape may round
    otherwise, which shows where scores go into the thousands.
    """
    down, across = _run(rows, problem.shape.t), _run(cols, problem.shape.s)
    if down is None or across is None or min(len(down), len(across)) < 32:
        return scores.tile(problem, rows, cols, batch, heads)
    (top, bottom), (left, right) = (down.start, down.stop), (across.start, across.stop)
    heads = ALL if isinstance(heads, slice) and heads == ALL else heads  # read in one piece, as by `forward`
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


def forward(p: Problem, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
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


def backward(
    p: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    needs: list[bool],
    seed: Tensor | None = None,
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


operator.register(NAME, forward, backward)
