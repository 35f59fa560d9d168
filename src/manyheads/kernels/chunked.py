"""Online softmax in plain PyTorch: linear memory, any device, mask and bias, with gradients.

Scores are computed in blocks. A running maximum and sum per row make the softmax exact (Milakov & Gimelshein
2018, arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682), and the gradient computes each block again from
the log-sum-exp (Dao et al. 2022, arXiv:2205.14135). Fully masked blocks are skipped.

The kernel is a custom operator, `manyheads::chunked`, so that `torch.compile` doesn't unroll its loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from manyheads import scores
from manyheads.kernels import operator, reference
from manyheads.kernels.fused import FusedStatistics, Spec
from manyheads.masks import Rule
from manyheads.problem import ALL, Problem, Rows
from manyheads.scores import fold, unfold
from manyheads.shapes import transforms

NAME = "chunked"
GIVES_LSE = True
SHIELDS = True  # masked NaN and Inf can't affect results

BLOCK = 1 << 19  # scores in a block, over all heads: 2 MiB in float32, which fit a core's caches


def why_unsupported(problem: Problem) -> list[str]:
    """Return why the operator doesn't support a problem: forward mode, torch.func, tracing of functions."""
    if torch.compiler.is_exporting() and any(isinstance(mask, Rule) for mask in problem.masks()):
        # The operator's text has a number for the function, which another process doesn't know.
        return ["it would export the function of Rule as a number, not as operators"]
    if torch.compiler.is_compiling():
        return []
    if torch._C._get_tracing_state() is not None:
        return ["torch.jit.trace doesn't record it: use torch.export or torch.compile"]
    if problem.forward_mode():
        return ["it has no forward-mode derivative"]
    if transforms():
        return ["it doesn't support torch.func's transforms (grad, vmap, …)"]
    return []


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    return torch.ops.manyheads.chunked(*operator.arguments(problem))


def statistics(problem: Problem, spec: Spec | None, lse: Tensor | None) -> tuple[Tensor, FusedStatistics]:
    """Return the log-sum-exp `[b, h, t]`, computed in one pass over the keys, and no fused statistics."""
    problem = problem.detach().without_values()
    if lse is not None:
        return lse, {}
    if torch.compiler.is_compiling():
        return run(problem)[1], {}
    if "vmap" in transforms():
        return reference.weights(problem)[1], {}
    # The operator isn't used, because its first call is slow.
    with torch.no_grad(), scores.disable_autocast(problem.q.device):
        return forward(problem)[1], {}


def tile(
    problem: Problem, rows: Rows = ALL, cols: Rows = ALL, batch: Rows = ALL, heads: Rows = ALL
) -> Tensor:
    """Return the scores of a tile, `[b, h, r, c]`, as `statistics` sums them; −inf where masked.

    Slices of rows and columns are computed in the blocks of `forward`: a product of another shape may be
    rounded differently, by 0.1 for scores of 10^6.
    """
    tile_rows, tile_cols = _consecutive(rows, problem.shape.t), _consecutive(cols, problem.shape.s)
    if tile_rows is None or tile_cols is None or min(len(tile_rows), len(tile_cols)) < 32:
        return scores.tile(problem, rows, cols, batch, heads)
    # All heads are computed in one product, as in `forward`.
    heads = ALL if isinstance(heads, slice) and heads == ALL else heads
    b, h = problem.q[:, :, 0, :0][batch][:, heads].shape[:2]
    score = problem.q.new_full((b, h, len(tile_rows), len(tile_cols)), -math.inf, dtype=problem.dtype)
    for block_rows, columns in blocks(problem, tile_rows.start, tile_rows.stop):
        for block_cols in columns:
            if block_cols.start < tile_cols.stop and tile_cols.start < block_cols.stop:
                block = scores.tile(problem, block_rows, block_cols, batch, heads)
                (i, r), (j, c) = _overlap(block_rows, tile_rows), _overlap(block_cols, tile_cols)
                score[:, :, r, c] = block[:, :, i, j]
    return score


def _consecutive(index: Rows, size: int) -> range | None:
    """Return the rows or columns of a slice; None for an index tensor and for steps."""
    if isinstance(index, Tensor) or index.step not in (None, 1):
        return None
    return range(*index.indices(size))


def _overlap(block: slice, indices: range) -> tuple[slice, slice]:
    """Return the overlap of a block and the given rows or columns, as a slice of each."""
    start, stop = max(block.start, indices.start), min(block.stop, indices.stop)
    return slice(start - block.start, stop - block.start), slice(start - indices.start, stop - indices.start)


# -- the loops -------------------------------------------------------------------------------------


def blocks(problem: Problem, first: int = 0, last: int | None = None) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows, each with the blocks of columns that are visible to some of its rows.

    Args:
        problem: The problem.
        first: The first row that is included.
        last: The row after the last that is included, t if None.

    Yields:
        A slice of rows, and slices of columns.
    """
    shape = problem.shape
    budget = BLOCK if problem.q.device.type == "cpu" else 16 * BLOCK
    per_head = max(budget // max(shape.b * shape.h, 1), 1024)
    rows = min(max(math.isqrt(per_head) // 32 * 32, 32), max(shape.t, 1))
    columns = max(per_head // rows // 32 * 32, 32)
    for start in range(first // rows * rows, shape.t if last is None else last, rows):
        stop = min(start + rows, shape.t)
        (left, right), _ = problem.span(start, stop)
        yield slice(start, stop), [slice(c, min(c + columns, right)) for c in range(left, right, columns)]


def forward(problem: Problem, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    (b, h, g, t, _, _, w), dtype = problem.shape, problem.dtype
    out = problem.q.new_empty(b, h, t, w)
    lse = problem.q.new_empty(b, h, t, dtype=dtype)
    is_finite = scores.finite(problem.v)
    for rows, columns in blocks(problem):
        r = rows.stop - rows.start
        top, total = _start(problem, r)  # [b, h, r]: the running maximum, and the sum of exp(score − top)
        acc = problem.q.new_zeros(b, h, r, w, dtype=dtype)
        for cols in columns:
            score = scores.tile(problem, rows, cols)  # [b, h, r, c]
            higher = torch.maximum(top, score.amax(-1))
            shift = torch.where(higher == -math.inf, 0.0, higher)  # −inf − −inf is NaN
            weight = torch.exp(score - shift[..., None])
            decay = torch.exp(top - shift)
            top, total = higher, total * decay + weight.sum(-1)
            if seed is not None:
                weight = weight * _dropout(problem, seed, rows, cols)
            v = problem.v[:, :, cols].to(dtype)  # [b, g, c, w]
            weight = fold(weight, g)
            mixed = weight @ v if is_finite else scores.mix(weight, fold(score != -math.inf, g), v)
            acc = acc * decay[..., None] + unfold(mixed, h)
        empty = total == 0
        out[:, :, rows] = (acc / torch.where(empty, 1.0, total)[..., None]).to(out.dtype)
        lse[:, :, rows] = torch.where(empty, -math.inf, top + total.log())
    return out, lse


def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    needs: list[bool],
    seed: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of q, k, v, sink and the bias's tensor; an empty one if it isn't needed."""
    h, g, dtype, softcap = problem.shape.h, problem.shape.g, problem.dtype, problem.softcap
    inputs = problem.q, problem.k, problem.v
    d_out = d_out.to(dtype)  # [b, h, t, w]
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in inputs)
    bias = problem.bias if needs[4] else None
    table = None if bias is None else bias.tensor()
    d_table = problem.q.new_empty(0) if table is None else problem.q.new_zeros(table.shape, dtype=dtype)
    # d score = weight · (d weight − Σ weight · d weight + d lse), where the sum is d out · out.
    delta = (d_out * out).sum(-1) - d_lse  # [b, h, t]
    is_finite = all(scores.finite(x) for x in (*inputs, d_out))

    def mix(weight: Tensor, keep: Tensor, x: Tensor) -> Tensor:
        return weight @ x if is_finite else scores.mix(weight, keep, x)

    for rows, columns in blocks(problem):
        q = fold(problem.q[:, :, rows].to(dtype), g)  # [b, g, r', d], r' = (h/g)·r
        do = fold(d_out[:, :, rows], g)  # [b, g, r', w]
        for cols in columns:
            score = scores.tile(problem, rows, cols)  # [b, h, r, c]
            keep = score != -math.inf
            weight = scores.weights(score, lse[:, :, rows])
            k = problem.k[:, :, cols].to(dtype)  # [b, g, c, d]
            v = problem.v[:, :, cols].to(dtype)  # [b, g, c, w]
            d_weight = unfold(do @ v.mT, h)  # [b, h, r, c]
            dropped = weight
            if seed is not None:
                factor = _dropout(problem, seed, rows, cols)
                dropped, d_weight = weight * factor, d_weight * factor
            folded = fold(keep, g)  # [b, g, r', c]
            dv[:, :, cols] += mix(fold(dropped, g).mT, folded.mT, do)
            d_score = torch.where(keep, weight * (d_weight - delta[:, :, rows, None]), 0.0)
            if bias is not None:
                bias.collect(d_table, d_score, *problem.at(rows, cols))
            if softcap is not None:
                tanh = torch.tanh(scores.products(problem, rows, cols) / softcap)
                d_score = torch.where(keep, d_score * (1 - tanh * tanh), 0.0)
            d_score = fold(d_score * problem.scale, g)
            dq[:, :, rows] += unfold(mix(d_score, folded, k), h)
            dk[:, :, cols] += mix(d_score.mT, folded.mT, q)
    grads = (dq, dk, dv, sink_gradient(problem, lse, delta), d_table)
    return [
        grad if x is None else grad.to(x.dtype)
        for grad, x in zip(grads, (*inputs, problem.sink, table), strict=True)
    ]


def sink_gradient(problem: Problem, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sink, which has a weight but no value.

    Args:
        problem: The problem.
        lse: The log-sum-exp `[b, h, t]`.
        delta: The mean of the gradients of each row's weights, `[b, h, t]`.

    Returns:
        The gradient `[h]`, or an empty tensor without a sink.
    """
    if problem.sink is None:
        return problem.q.new_empty(0)
    weight = scores.weights(problem.sink.to(problem.dtype)[:, None, None], lse)[..., 0]  # [b, h, t]
    return -(weight * delta).sum((0, 2)).to(problem.sink.dtype)


def _start(problem: Problem, r: int) -> tuple[Tensor, Tensor]:
    """Return the running maximum and sum before the first key, with the sink: both `[b, h, r]`."""
    shape, dtype = problem.shape, problem.dtype
    if problem.sink is None:
        top = problem.q.new_full((shape.b, shape.h, r), -math.inf, dtype=dtype)
    else:
        top = problem.sink.to(dtype)[None, :, None].expand(shape.b, shape.h, r)
    return top, (top != -math.inf).to(dtype)


def _dropout(problem: Problem, seed: Tensor, rows: slice, cols: slice) -> Tensor:
    """Return the dropout factors of a block's weights, 0 or 1/(1 − p). Every call returns the same ones."""
    shape, p, device = problem.shape, problem.dropout_p, problem.q.device
    if p == 1:
        return problem.q.new_zeros((), dtype=problem.dtype)
    seed_of_block = (int(seed) + rows.start * shape.s + cols.start) % (1 << 63)
    generator = torch.Generator(device).manual_seed(seed_of_block)
    size = (shape.b, shape.h, rows.stop - rows.start, cols.stop - cols.start)
    kept = torch.rand(size, generator=generator, device=device) >= p
    return kept.to(problem.dtype) / (1 - p)


operator.register(NAME, forward, backward)
