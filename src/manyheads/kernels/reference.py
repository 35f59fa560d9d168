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
GIVES_LSE = False  # it has one, computed in one piece; a map reads scores in blocks, which round otherwise
SHIELDS = True  # what is masked can't leak


def refuse(problem: Problem) -> list[str]:
    """Nothing."""
    return []


def weights(problem: Problem) -> tuple[Tensor, Tensor]:
    """Differentiable weights `[b, h, t, s]` (before dropout) and log-sum-exp `[b, h, t]`."""
    weight, lse, _ = _softmax(problem)
    return weight, lse


def run(problem: Problem) -> tuple[Tensor, None]:
    """The output `[b, h, t, w]`; no log-sum-exp."""
    compiling = torch.compiler.is_compiling()
    if compiling and problem.mask is not None:  # nobody can look at what is computed
        problem = problem.without_unseen(problem.keep(problem.mask, scores.ALL, scores.ALL))
    weight, _, keep = _softmax(problem)
    if problem.dropout_p:
        weight = torch.nn.functional.dropout(weight, problem.dropout_p)
    v = problem.v.to(problem.dtype)  # [b, g, s, w]
    weight, keep = scores.fold(weight, problem.shape.g), scores.fold(keep, problem.shape.g)
    fine = compiling or scores.finite(v)
    out = weight @ v if fine else scores.mix(weight, keep, v)  # [b, g, (h/g)·t, w]
    return scores.unfold(out, problem.shape.h).to(problem.q.dtype), None


def _softmax(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[b, h, t, s]`, log-sum-exp `[b, h, t]`, and which keys are kept."""
    score = scores.tile(problem)  # [b, h, t, s]
    keep = score != -math.inf
    logits = score
    if problem.sink is not None:
        sink = problem.sink.to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
        logits = torch.cat((score, sink), -1)  # [b, h, t, s + 1]
    # A row of −inf has no softmax: it is let through as zeros, then emptied, so that no NaN is born.
    empty = (logits == -math.inf).all(-1)  # [b, h, t]
    lse = torch.where(empty[..., None], 0.0, logits).logsumexp(-1) if logits.shape[-1] else logits.sum(-1)
    return scores.weights(score, lse), torch.where(empty, -math.inf, lse), keep
