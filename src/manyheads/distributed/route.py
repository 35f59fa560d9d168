"""How far keys travel around a ring: to the last rank whose queries see them, in the cheaper direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from manyheads.distributed.positions import Part
from manyheads.masks import Mask


class Sent(NamedTuple):
    """What a rank sends on average: tokens (their keys and values, or gradients), and messages."""

    tokens: float
    messages: float


@dataclass(eq=False)
class Route:
    """The route of each part's keys; the same on every rank.

    Keys go from rank to rank in one direction. Those that no rank ahead needs aren't passed on.

    Attributes:
        parts: The parts of each rank.
        mask: The bound mask of the whole sequence, or None.
        tokens: The number of tokens of the sequence.
    """

    parts: Sequence[Sequence[Part]]
    mask: Mask | None
    tokens: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.parts)

    @cached_property
    def owners(self) -> np.ndarray:
        """The rank of each part, `[p]`, for all parts of all ranks in order."""
        return np.repeat(np.arange(self.ranks), [len(own) for own in self.parts])

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each part, `[p]`."""
        return np.array([len(part) for own in self.parts for part in own], dtype=np.int64)

    @cached_property
    def needed(self) -> np.ndarray:
        """Whether some queries of each rank may see keys of each part, `[ranks, p]`."""
        hulls = [part.hull for own in self.parts for part in own]
        start = np.array([hull.start for hull in hulls], dtype=np.int64)  # [p]
        stop = np.array([hull.stop for hull in hulls], dtype=np.int64)  # [p]
        seen = np.array([self.span(hull) for hull in hulls], dtype=np.int64).reshape(-1, 2)  # [p, 2]
        pairs = (start < seen[:, 1:]) & (stop > seen[:, :1])  # [p, p]: queries, keys
        needed = np.zeros((self.ranks, len(hulls)), dtype=bool)
        np.logical_or.at(needed, self.owners, pairs)
        return needed

    def span(self, positions: range) -> tuple[int, int]:
        """Return an interval with all keys that are visible to some of these positions."""
        return (0, self.tokens) if self.mask is None else self.mask.span(positions).some

    @cached_property
    def _distances(self) -> tuple[int, np.ndarray]:
        """The direction, and the number of steps that each part travels, `[p]`."""
        routes = []
        for direction in (1, -1):
            steps = (
                direction * (np.arange(self.ranks)[:, None] - self.owners) % max(self.ranks, 1)
            )  # [ranks, p]
            far = np.where(self.needed, steps, 0).max(0, initial=0)
            routes.append((int((far * self.lengths).sum()), direction, far))
        _, direction, far = min(routes, key=lambda route: route[0])
        return direction, far

    @property
    def direction(self) -> int:
        """1 if keys travel from rank r to rank r + 1, −1 if to rank r − 1."""
        return self._distances[0]

    @cached_property
    def steps(self) -> list[list[int]]:
        """How many steps each part of each rank travels."""
        return [self._distances[1][self.owners == rank].tolist() for rank in range(self.ranks)]

    def travellers(self, rank: int, step: int) -> list[int]:
        """Return the parts of a rank that travel at least this many steps, the farthest first."""
        steps = self.steps[rank]
        return [n for n in sorted(range(len(steps)), key=lambda n: -steps[n]) if steps[n] >= step]

    def travelling_tokens(self, rank: int, step: int) -> int:
        """Return the number of tokens of these parts."""
        return sum(len(self.parts[rank][n]) for n in self.travellers(rank, step))

    def owner(self, rank: int, step: int) -> int:
        """Return the rank whose keys a rank has in a step."""
        return (rank - self.direction * step) % self.ranks

    def next(self, rank: int, steps: int = 1) -> int:
        """Return the rank that is a number of steps ahead."""
        return (rank + self.direction * steps) % self.ranks

    def last_step(self, rank: int) -> int:
        """Return the last step in which a rank receives keys; 0 if it receives none."""
        return max(
            step for step in range(self.ranks) if step == 0 or self.travellers(self.owner(rank, step), step)
        )

    def minimum(self) -> float:
        """Return the fewest tokens that a rank can send on average: each once to each rank that needs it."""
        others = self.owners[None, :] != np.arange(self.ranks)[:, None]
        return float(((self.needed & others) @ self.lengths).sum()) / max(self.ranks, 1)

    def keys_sent(self) -> Sent:
        """Return the keys that a rank sends in one round."""
        tokens = (self._distances[1] * self.lengths).sum()
        messages = sum(max(steps, default=0) for steps in self.steps)
        return Sent(float(tokens) / self.ranks, messages / self.ranks)

    def most_keys_sent(self) -> float:
        """Return the tokens that the busiest rank sends in one round."""
        direction, far = self._distances
        ahead = direction * (np.arange(self.ranks)[:, None] - self.owners) % max(self.ranks, 1)  # [ranks, p]
        return float(((ahead < far) * self.lengths).sum(1).max(initial=0))

    def gradients_sent(self) -> Sent:
        """Return the gradients that a rank sends in one round: to the next rank, and home at the end."""
        onward = sum(max(max(steps, default=0) - 1, 0) for steps in self.steps)
        home = sum(len({far for far in steps if far}) for steps in self.steps)
        return Sent(self.keys_sent().tokens, (onward + home) / self.ranks)
