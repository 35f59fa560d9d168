"""Head scores of a layer in steps, so that other requests can run: exact, or estimated from some queries."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from manyheads import kernels, scores
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.measures import SCORES
from manyheads.observe.summaries import HEAD_SCORES
from manyheads.observe.table import MEANS, TOKEN_SCORES, score_heads
from manyheads.problem import Problem

EXACT_WEIGHTS = 2**27  # head scores of a layer with more weights are estimated from some queries
SAMPLES = 128  # the number of these queries
STEP_WEIGHTS = 2**18  # the number of weights that a step computes, each with several factors
Columns = dict[str, Tensor]


def head_scores(amap: AttentionMap, ids: Tensor | None) -> Generator[None, None, tuple[Columns, int]]:
    """Compute the scores of every head of one sequence in steps: `[h]` by name, and a stride n.

    `ids` are the tokens `[s]`, on which some scores depend. In a large layer, the scores are estimated from
    every n-th query; otherwise n is 1.
    """
    _, h, t, s = amap.shape
    if h * t * s <= (EXACT_WEIGHTS if kernels.fuses(amap.problem) else EXACT_WEIGHTS // 16):
        return {name: x[0] for name, x in score_heads(amap, ids).items()}, 1
    stride = -(-t // SAMPLES)
    names = HEAD_SCORES if ids is None else (*HEAD_SCORES, *TOKEN_SCORES)
    bound = {name: amap.problem.under(SCORES[name].mask(amap, ids)).mask for name in names}
    masks = {name: mask for name, mask in bound.items() if mask is not None}
    sums, counts = ({name: torch.zeros(h) for name in (*masks, *MEANS)} for _ in range(2))
    for rows in torch.arange(stride // 2, t, stride).split(max(1, STEP_WEIGHTS // s)):
        low, high = amap.problem.span(int(rows[0]), int(rows[-1]) + 1)[0]
        cols = slice(low, max(high, low + 1))
        factors, found = _compute_factors(amap.problem, masks, rows, cols)
        for name, count in zip(sums, found, strict=True):
            counts[name] += count
        for head in range(h):
            weights = amap[0, head, rows, cols].float()  # [r, c]
            inside = factors[:, min(head, factors.shape[1] - 1)] @ weights.flatten()
            for name, total in zip((*masks, "distance"), inside, strict=True):
                sums[name][head] += total
            sums["entropy"][head] -= torch.special.xlogy(weights, weights).sum()
            yield
    return {name: sums[name] / counts[name].clamp(min=1) for name in sums}, stride


def _compute_factors(
    problem: Problem, masks: dict[str, Mask], rows: Tensor, cols: slice
) -> tuple[Tensor, list[Tensor]]:
    """Return what weights are multiplied with, to be summed, and how many queries have each score.

    Args:
        problem: The problem.
        masks: The mask of each score.
        rows: The queries.
        cols: The keys.

    Returns:
        The factors `[n, h or 1, r·c]`: 1 inside each mask, and the distance from query to key. The number of
        queries with a visible key, `[h or 1]`: in each mask, and twice among all keys, for the two means.
    """
    visible = scores.visible(problem, rows, cols)[0]  # [h or 1, r, c]
    inside = [problem.keep(mask, rows, cols)[0] & visible for mask in masks.values()]
    distance = problem.distances(rows, cols)[0]  # [h or 1, r, c]
    counts = [keep.any(-1).sum(-1) for keep in (*inside, *[visible] * len(MEANS))]
    # Not `torch.broadcast_shapes`, which imports sympy: 30 MB.
    factors = torch.stack([x.flatten(1).float() for x in torch.broadcast_tensors(*inside, distance)])
    return factors, counts
