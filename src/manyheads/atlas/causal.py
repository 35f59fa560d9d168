"""Weights of maps under a causal mask, by faster methods than those for any mask.

Under a causal mask every query sees the first key, the previous one and its own, and the keys with its token
are those before it. So these weights are computed from a small part of the scores. All scores come from the
kernel that computed the log-sum-exp, so that their rounding errors cancel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import kernels, scores
from manyheads.kernels.fused import Spec
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Documents
from manyheads.problem import Problem

BLOCK = 14  # queries whose near keys are multiplied at once: these are 16 keys, a vector of AVX-512


def is_causal(amap: AttentionMap) -> bool:
    """Return True if every query of a map sees all keys up to its own, and the functions below support it."""
    problem = amap.problem
    if problem.mask is None or problem.bias is not None or problem.positions is not None:
        return False
    shape, normal = problem.shape, problem.mask.normal()
    is_square = shape.t == shape.s and isinstance(problem.offset, int) and problem.offset == 0
    is_plain = normal.band == (None, 0) and normal[1:] == ((), (), ())
    return is_square and is_plain and kernels.fuses(problem) and bool(amap.lse.isfinite().all())


def near_weights(amap: AttentionMap) -> tuple[Tensor, Tensor, Tensor]:
    """Return each query's weights on the first key, on the previous one and on its own.

    Args:
        amap: A map `[b, h, t, t]` for which `is_causal` returns True.

    Returns:
        The weights, `[b, h, t]` each. That of query 0 on its previous key is 0.
    """
    problem = amap.problem
    b, h, g, t, _, d, _ = problem.shape
    n = -(-t // BLOCK)  # blocks of queries
    q = F.pad(problem.q, (0, 0, 0, n * BLOCK - t)).view(b, g, h // g, n, BLOCK, d)
    # The keys of a block: the first one, and those from the one before the block to the last of the block.
    near = F.pad(problem.k, (0, 0, 1, n * BLOCK - t)).unfold(2, BLOCK + 1, BLOCK)  # [b, g, n, d, BLOCK + 1]
    first = problem.k[:, :, :1, None].expand(b, g, n, 1, d)
    k = torch.cat((first, near.mT), 3).flatten(1, 2)  # [b, g·n, BLOCK + 2, d]
    q = q.transpose(2, 3).flatten(1, 3)  # [b, g·n·h/g, BLOCK, d]
    score = _scores(problem, q, k)  # [b, g·n·h/g, BLOCK, BLOCK + 2]
    diagonals = torch.stack(
        (score[..., 0], score.diagonal(1, -2, -1)[..., :BLOCK], score.diagonal(2, -2, -1)[..., :BLOCK])
    )  # [3, b, g·n·h/g, BLOCK]
    blocks = diagonals.view(3, b, g, n, h // g, BLOCK).transpose(3, 4)
    weights = (blocks.reshape(3, b, h, n * BLOCK)[..., :t] - amap.lse).exp_().clamp_(max=1.0)
    weights[1, :, :, 0] = 0.0
    return weights[0], weights[1], weights[2]


def token_weights(amap: AttentionMap, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each query's weights on earlier keys of its token, and on the keys that follow these.

    After a stable sort by tokens, the keys of each token are adjacent and in order, so they are treated as a
    document. The kernel skips all others.

    Args:
        amap: A map `[b, h, t, t]` for which `is_causal` returns True.
        ids: The tokens `[b, t]`.

    Returns:
        Both weights, `[b, h, t]`, and whether there are such keys, `[b, 1, t]`.
    """
    problem = amap.problem
    b, h, _, t, *_ = problem.shape
    # The sequences become one, in which equal tokens of two sequences are different.
    ids = ids - ids.min()
    tokens = (ids + torch.arange(b)[:, None] * (ids.max() + 1)).flatten()  # [b·t]
    order = tokens.argsort(stable=True)
    is_repeated = tokens[order[1:]] == tokens[order[:-1]]
    queries, keys = order[1:][is_repeated], order[:-1][is_repeated]  # a query sees the keys up to its place
    n = len(queries)
    weights = amap.lse.new_zeros(2, h, b * t)
    if n:
        q, k, lse = (x.transpose(1, 2).flatten(0, 1) for x in (problem.q, problem.k, amap.lse))
        q, lse = (x[queries].transpose(0, 1).expand(2, h, n, *x.shape[2:]) for x in (q, lse))
        k = k[torch.stack((keys, keys + 1))].transpose(1, 2)  # [2, g, n, d]
        mask = Causal() & Documents(tokens[keys], queries=tokens[queries])
        part = Problem.of(q, k, k[..., :0], mask=mask, scale=problem.scale, softcap=problem.softcap, offset=0)
        sums = kernels.statistics(part, Spec(rows=True), lse).fused["row_sum"]  # [2, h, n]
        weights[:, :, queries] = sums.clamp_(max=1.0)
    has_keys = torch.zeros(b * t, dtype=torch.bool)
    has_keys[queries] = True
    same, after = weights.view(2, h, b, t).transpose(1, 2)  # [b, h, t] each
    return same, after, has_keys.view(b, 1, t)


def read_rows(amap: AttentionMap, batch: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of weights.

    Args:
        amap: A map `[b, h, t, t]` for which `is_causal` returns True.
        batch: The batch entry of each row, `[n]`.
        heads: Its head, `[n]`.
        rows: Its query, `[n]`.

    Returns:
        The weights `[n, t]`.
    """
    problem = amap.problem
    group = problem.shape.h // problem.shape.g
    q, k = problem.q[batch, heads, rows][:, None, None], problem.k[batch, heads // group][:, None]
    score = _scores(problem, q, k)[:, 0, 0]  # [n, t]
    score.masked_fill_(torch.arange(problem.shape.t) > rows[:, None], -torch.inf)
    return scores.weights(score[:, None], amap.lse[batch, heads, rows][:, None])[:, 0]


def _scores(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
    """Return the scores of other queries `[b, h, r, d]` and keys `[b, g, c, d]`, with those of a problem."""
    part = Problem.of(q, k, k[..., :0], scale=problem.scale, softcap=problem.softcap, offset=0)
    return kernels.tile(part)
