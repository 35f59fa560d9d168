"""Why a weight is what it is: the steps of the attention formula for one query and one key, and its row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manyheads import scores
from manyheads.maps import AttentionMap

BINS = 512  # the largest number of points of a row's profile
LARGEST = 12  # the number of largest weights of a row


def explain_weight(amap: AttentionMap, b: int, h: int, i: int, j: int) -> dict[str, Any]:
    """Return every step from q·k to the weight of query i and key j.

    The steps are those of `scores.tile`, and `lse` is the log-sum-exp of the query's scores, so that
    weight = exp(score − lse).

    Args:
        amap: The map.
        b: The batch entry.
        h: The head.
        i: The query.
        j: The key.

    Returns:
        JSON data. `products` are q·k by dimension, before the scale, and `dot` is their sum. `scaled` is
        scale · q·k, `capped` the same after the softcap. `softcap`, `capped`, `bias`, `sink` and
        `sink_weight` are None if the problem has none of these, and `value_norm` (the Euclidean norm of the
        key's value) and `contribution` (weight × value norm) if the map has no norms of values. `is_masked`
        is True if the mask or a bias of −inf masks the key; then `score` is None. Numbers that aren't finite
        are None.
    """
    problem = amap.problem
    place = slice(i, i + 1), slice(j, j + 1), slice(b, b + 1), slice(h, h + 1)
    q, k = (x.flatten().to(problem.dtype) for x in scores.operands(problem, *place))
    products = q * k
    capped = None if problem.softcap is None else _number(scores.logits(problem, *place))
    bias = None if problem.bias is None else problem.bias.add(*problem.at(*place), problem.dtype)
    weight, lse = float(amap[b, h, i, j]), amap.lse[b, h, i]
    sink = None if problem.sink is None else problem.sink[h]
    value_norm = _value_norm(amap, b, h, j)
    steps = {
        "products": [_number(x) for x in products],
        "dot": _number(products.double().sum()),
        "scale": problem.scale,
        "scaled": _number(scores.products(problem, *place)),
        "softcap": problem.softcap,
        "capped": capped,
        "bias": None if bias is None else _number(bias),
        "mask": None if problem.mask is None else str(problem.mask),
        "is_masked": not bool(scores.visible(problem, *place).all()),
        "score": _number(scores.tile(problem, *place)),
        "lse": _number(lse),
        "sink": None if sink is None else _number(sink),
        "sink_weight": None if sink is None else _number((sink - lse).exp()),
        "weight": weight if math.isfinite(weight) else None,
        "value_norm": value_norm,
        "contribution": None if value_norm is None else _number(torch.tensor(weight * value_norm)),
    }
    return steps


def profile_row(amap: AttentionMap, b: int, h: int, i: int) -> dict[str, Any]:
    """Return the weights of a query over all keys, pooled to a chart, and the largest of them.

    Args:
        amap: The map.
        b: The batch entry.
        h: The head.
        i: The query.

    Returns:
        JSON data: `width`, the number of keys per point of the chart; `weights`, the largest weight of each
        point, None where all keys are masked; `top`, up to 12 pairs of a key and its weight, the largest
        weight first; and `sink_weight`, None without a sink.
    """
    row = slice(i, i + 1), slice(None), slice(b, b + 1), slice(h, h + 1)
    weights = amap[b, h, i]  # [s]
    visible = scores.visible(amap.problem, *row).expand(1, 1, 1, len(weights)).flatten()
    width = -(-len(weights) // BINS)
    largest = weights.masked_fill(~visible, -1.0).split(width)
    top = weights.topk(min(LARGEST, len(weights)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    sink = amap.problem.sink
    return {
        "width": width,
        "weights": [_visible_max(part) for part in largest],
        "top": [[key, weight] for key, weight in pairs if weight > 0],
        "sink_weight": None if sink is None else _number((sink[h] - amap.lse[b, h, i]).exp()),
    }


def _visible_max(weights: Tensor) -> float | None:
    """Return the largest weight; None if all are −1, which marks masked keys."""
    largest = float(weights.max())
    return largest if largest >= 0 else None


def _value_norm(amap: AttentionMap, b: int, h: int, j: int) -> float | None:
    """Return the norm of a key's value; None if the map has no norms of values."""
    if amap.value_norm is None:
        return None
    shape = amap.problem.shape
    return _number(amap.value_norm[b, h // (shape.h // shape.g), j])  # of the key head that the head uses


def _number(x: Tensor) -> float | None:
    """Return the only number of a tensor; None if it isn't finite, because JSON has no such numbers."""
    number = float(x)
    return number if math.isfinite(number) else None
