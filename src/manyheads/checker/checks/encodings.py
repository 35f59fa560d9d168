"""Checks of rotary encodings alone."""

from __future__ import annotations

import torch

from manyheads.checker.candidates.encoding import RotaryAdapter
from manyheads.checker.checks.registry import Check, check, judge
from manyheads.checker.encodings import Rotary
from manyheads.checker.oracle import Inputs, largest_difference


@check("lengths kept", Rotary)
def check_lengths(adapter: RotaryAdapter) -> Check:
    """Compare the norms of vectors before and after the rotation."""
    inputs = adapter.draw(torch.Generator().manual_seed(2), 2, 6)
    norms = torch.stack((inputs.query, inputs.key)).to(torch.float64).norm(dim=-1)
    error = largest_difference(adapter.run(inputs).out.norm(dim=-1), norms)
    reason = "a rotation keeps a vector's length"
    return judge(error, adapter.allowed_error(inputs), reason, f"{reason}, and this doesn't.")


@check("relative", Rotary)
def check_relative(adapter: RotaryAdapter) -> Check:
    """Rotate one query and one key to all positions: their products may depend on the distance only."""
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(adapter.width, generator=generator).expand(2, 3, 6, -1) for _ in range(2))
    queries, keys = adapter.run(Inputs(query, key, key)).out[:, 0, 0]
    scores = queries @ keys.mT  # [6, 6]
    spread = max(float(scores.diagonal(n).max() - scores.diagonal(n).min()) for n in range(-5, 6))
    reason = "products of queries and keys depend only on their distance"
    failure = "products of queries and keys must depend only on their distance."
    return judge(spread, 10 * Rotary.tolerance, reason, failure)
