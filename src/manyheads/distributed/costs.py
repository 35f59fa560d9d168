"""How much each rank computes, sends and keeps: a model of attention over ranks.

docs/explanation/distributed.md derives the formulas, and compares them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from manyheads.distributed.positions import Part
from manyheads.distributed.route import Route
from manyheads.masks import FAR, Mask
from manyheads.shapes import real, whole

LAYOUTS = ("contiguous", "balanced")


@dataclass(frozen=True)
class Cost:
    """The cost of one call, for one rank.

    Attributes:
        flops: The floating-point operations of the busiest rank, counting only visible scores.
        bytes: The bytes that a rank sends, on average.
        busiest: The bytes that the busiest rank sends.
        minimum: The fewest bytes that a rank could send, on average.
        messages: The messages that a rank sends, on average.
        steps: The rounds of communication, each of which waits for the one before.
        hidden: Whether communication runs while a rank computes.
        kept: The bytes of queries, keys, values, output, gradients and what is received, at the peak. What a
            kernel needs while it computes isn't included.
    """

    flops: float
    bytes: float
    busiest: float
    minimum: float
    messages: float
    steps: int
    hidden: bool
    kept: float

    def seconds(self, flops_per_second: float, bytes_per_second: float, latency: float = 0.0) -> float:
        """Return the time of a call if computation and communication take no other time.

        Args:
            flops_per_second: The operations that a rank computes in a second.
            bytes_per_second: The bytes that a rank sends in a second.
            latency: The seconds that a message takes in addition.

        Returns:
            The seconds: of the slower of both for the ring, which overlaps them, else the sum.

        Raises:
            TypeError: If an argument isn't a number.
            ValueError: If an argument is negative, or a rate is 0.
        """
        computing = self.flops / real(
            flops_per_second, "flops_per_second", lambda x: x > 0, "a positive number"
        )
        rate = real(bytes_per_second, "bytes_per_second", lambda x: x > 0, "a positive number")
        wait = real(latency, "latency", lambda x: x >= 0, "a number of seconds")
        sending = self.busiest / rate + self.messages * wait
        if not self.hidden:
            return computing + sending
        # The keys of the next step arrive during a step; the first step needs none.
        steps = self.steps + 1
        first = computing / steps
        return first + max(computing - first, sending)


def cost(
    tokens: int,
    ranks: int,
    *,
    method: str = "ring",
    mask: Mask | None = None,
    layout: str = "contiguous",
    batch: int = 1,
    heads: int = 8,
    key_heads: int | None = None,
    size: int = 64,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    gradient: bool = False,
) -> Cost:
    """Return what a rank computes, sends and keeps in one call of `attention`.

    Args:
        tokens: The number of tokens of the sequence, a multiple of the ranks.
        ranks: The number of ranks.
        method: "ring" or "ulysses".
        mask: A mask that is a band, such as `Causal()` or `Window(left=255, right=0)`; None for none.
        layout: "contiguous", or "balanced" (see `balanced_positions`).
        batch: The batch size b.
        heads: The number of query heads h.
        key_heads: The number of key heads g, h if None.
        size: The head size d.
        width: The width w of values, d if None.
        dtype: The dtype of queries, keys and values.
        gradient: Whether the backward pass is included.

    Returns:
        The cost.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument isn't supported.
    """
    n, rest = divmod(whole(tokens, "tokens", least=1), whole(ranks, "ranks", least=1))
    key_heads, width = key_heads or heads, width or size
    if layout not in LAYOUTS:
        raise ValueError(f"Expected layout to be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    if rest or (layout == "balanced" and n % 2):
        least = ranks * (2 if layout == "balanced" else 1)
        raise ValueError(f"Expected the number of tokens to be a multiple of {least}, got {tokens}.")
    low, high = _band(mask)
    parts = [_parts(layout, rank, ranks, n) for rank in range(ranks)]
    # A score takes 2d operations, and its weight times a value 2w. The backward pass has three products of
    # d and two of w, of which one is the score again.
    per_score = 2.0 * (size + width) + gradient * 2.0 * (3 * size + 2 * width)
    scores = max(sum(_visible(part, low, high, tokens) for part in own) for own in parts)
    keys, queries = key_heads * (size + width), heads * size  # numbers of a token
    outputs = heads * width
    itemsize, wide = dtype.itemsize, max(dtype.itemsize, 4)
    if method == "ring":
        route = Route(parts, mask, tokens)
        sent, back = route.keys_sent(), route.gradients_sent()
        per_token = batch * keys * (itemsize + gradient * (itemsize + wide))
        # Two sets of keys (the present and the next), a partial output beside the sum, and for a gradient the
        # sums of queries' and keys' gradients (home, present, next, previous) and those of a block.
        kept = (
            itemsize * (queries + keys + 2 * outputs) + wide * outputs + (1 + (ranks > 1)) * itemsize * keys
        )
        if gradient:
            kept = (
                itemsize * (queries + keys + 2 * outputs)
                + wide * queries
                + (1 + (ranks > 1)) * itemsize * keys
            )
            kept += (2 if ranks == 1 else 3 if ranks == 2 else 4) * wide * keys + itemsize * (queries + keys)
        return Cost(
            flops=batch * heads * scores * per_score,
            bytes=sent.tokens * per_token,
            busiest=route.most_keys_sent() * per_token,
            minimum=route.minimum() * per_token,
            messages=sent.messages + gradient * (sent.messages + back.messages),
            steps=(1 + gradient) * max(max(steps, default=0) for steps in route.steps),
            hidden=True,
            kept=batch * n * kept,
        )
    if method != "ulysses":
        raise ValueError(f"Expected method to be ring or ulysses, got {method!r}.")
    if heads % ranks or key_heads % ranks:
        raise ValueError(
            f'Expected numbers of heads that {ranks} ranks divide for method="ulysses", got h = {heads} and '
            f'g = {key_heads}. Use method="ring".'
        )
    every = sum(sum(_visible(part, low, high, tokens) for part in own) for own in parts) / ranks
    numbers = batch * n * (queries + keys + outputs)
    sent_bytes = numbers * itemsize * (ranks - 1) / ranks * (1 + gradient)
    return Cost(
        flops=batch * heads * every * per_score,
        bytes=sent_bytes,
        busiest=sent_bytes,
        minimum=sent_bytes,
        messages=4.0 * (ranks - 1) * (1 + gradient),
        steps=(4 if ranks > 1 else 0) * (1 + gradient),
        hidden=False,
        kept=numbers * itemsize * (2 + 2 * gradient),
    )


def _band(mask: Mask | None) -> tuple[int, int]:
    """Return the bounds low ≤ j − i ≤ high of a mask that is a band."""
    if mask is None:
        return -FAR, FAR
    if not isinstance(mask, Mask):
        raise TypeError(f"Expected mask to be a Mask or None, got {type(mask).__name__}.")
    normal = mask.normal()
    if normal.segments or normal.lengths or normal.rest:
        raise ValueError(f"Expected a mask that is a band, such as Causal() or Window(…), got {mask}.")
    low, high = normal.band
    return (-FAR if low is None else low), (FAR if high is None else high)


def _parts(layout: str, rank: int, ranks: int, n: int) -> list[Part]:
    """Return the parts of a rank that has n tokens."""
    if layout == "contiguous":
        return [Part(0, range(rank * n, (rank + 1) * n))]
    half, late = n // 2, 2 * ranks - 1 - rank
    return [
        Part(0, range(rank * half, (rank + 1) * half)),
        Part(half, range(late * half, (late + 1) * half)),
    ]


def _visible(part: Part, low: int, high: int, tokens: int) -> float:
    """Return the number of visible pairs of a part's queries and all keys."""
    i = np.arange(part.hull.start, part.hull.stop, dtype=np.int64)  # [t]
    first, last = np.maximum(i + low, 0), np.minimum(i + high, tokens - 1)
    return float(np.maximum(last - first + 1, 0).sum())
