"""The formula as a textbook writes it: all scores, a softmax, a product. The oracle of every test.

It builds the `[b, h, t, s]` weights, in float32 (float64 for float64), and autograd does the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads import scores
from manyheads.scores import Problem

NAME = "reference"
GIVES_LSE = True
SHIELDS = True  # what is masked can't leak


def refuse(problem: Problem) -> list[str]:
    """Nothing."""
    return []


def weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """Differentiable weights `[b, h, t, s]` (before dropout) and log-sum-exp `[b, h, t]`."""
    score = scores.tile(problem)  # [b, h, t, s]
    logits = score
    if problem.sink is not None:
        sink = problem.sink.to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
        logits = torch.cat((score, sink), -1)  # [b, h, t, s + 1]
    # A row of −inf has no softmax: it is let through as zeros, then emptied, so that no NaN is born.
    empty = (logits == -math.inf).all(-1)  # [b, h, t]
    lse = torch.where(empty[..., None], 0.0, logits).logsumexp(-1) if logits.shape[-1] else logits.sum(-1)
    weight = torch.where(score == -math.inf, 0.0, scores.weights(score, lse))
    return weight, torch.where(empty, -math.inf, lse)


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    weight, lse = weights(problem)
    if problem.dropout_p:
        weight = torch.nn.functional.dropout(weight, problem.dropout_p)
    v = problem.v.to(problem.dtype)  # [b, g, s, w]
    folded = scores.fold(weight, problem.shape.g)  # [b, g, (h/g)·t, s]
    out = scores.unfold(_mixed(folded, v), problem.shape.h)  # [b, h, t, w]
    return out.to(problem.q.dtype), lse


def _mixed(weight: Tensor, v: Tensor) -> Tensor:
    """weight · v; a value that isn't finite reaches the rows that weigh it, forward and backward."""
    if torch.compiler.is_compiling() or bool(v.isfinite().all()):
        return weight @ v
    clean = weight @ torch.where(v.isfinite(), v, 0.0)
    dirty = scores.mix(weight, weight != 0, v).detach()
    return torch.where(dirty.isfinite(), clean, clean * dirty)
