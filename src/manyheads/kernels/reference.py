"""The textbook formula: all scores, a softmax, a product. Tests compare the other kernels with it.

It computes all weights `[b, h, t, s]` in float32 (float64 for float64), and autograd differentiates it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads import scores
from manyheads.problem import ALL, Problem
from manyheads.shapes import can_read

NAME = "reference"
GIVES_LSE = False  # for the same reason as in `flex`
SHIELDS = True  # masked NaN and Inf can't affect results


def why_unsupported(problem: Problem) -> list[str]:
    """Return no reason: every problem is supported."""
    return []


def weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return differentiable weights `[b, h, t, s]` (before dropout) and the log-sum-exp `[b, h, t]`."""
    weight, lse, _ = _softmax(problem)
    return weight, lse


def run(problem: Problem) -> tuple[Tensor, None]:
    """Return the output `[b, h, t, w]`; no log-sum-exp."""
    if problem.mask is not None and not can_read(problem.q):  # then numbers can't be checked for NaN and Inf
        problem = problem.without_masked_keys(problem.keep(problem.mask, ALL, ALL))
    weight, _, keep = _softmax(problem)
    if problem.dropout_p:
        weight = torch.nn.functional.dropout(weight, problem.dropout_p)
    v = problem.v.to(problem.dtype)  # [b, g, s, w]
    weight, keep = scores.fold(weight, problem.shape.g), scores.fold(keep, problem.shape.g)
    out = weight @ v if scores.finite(v) else scores.mix(weight, keep, v)  # [b, g, (h/g)·t, w]
    return scores.unfold(out, problem.shape.h).to(problem.q.dtype), None


def _softmax(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights `[b, h, t, s]`, the log-sum-exp `[b, h, t]`, and which keys are visible."""
    score = scores.tile(problem)  # [b, h, t, s]
    keep = score != -math.inf
    logits = score
    if problem.sink is not None:
        sink = problem.sink.to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
        logits = torch.cat((score, sink), -1)  # [b, h, t, s + 1]
    # The softmax of a row of −inf is NaN: such rows become zeros before it and after it.
    empty = (logits == -math.inf).all(-1, keepdim=True)  # [b, h, t, 1]
    logits = torch.where(empty, 0.0, logits)
    weight = logits.softmax(-1)[..., : score.shape[-1]]  # [b, h, t, s]
    lse = logits.logsumexp(-1) if logits.shape[-1] else logits.sum(-1)  # [b, h, t]
    return torch.where(keep, weight, 0.0), torch.where(empty[..., 0], -math.inf, lse), keep
