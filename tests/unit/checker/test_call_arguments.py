"""Arguments of a call that are neither tokens nor masks: objects for a cache, grids, numbers of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads import checker
from tests.unit.checker.test_round_8 import Layer, past

pytestmark = pytest.mark.usefixtures("quick", "one_thread")


# -- objects for a cache ---------------------------------------------------------------------------


class Rolling:
    """The keys and values that the next tokens may still need, of a window of this size."""

    def __init__(self, window: int) -> None:
        self.window, self.length = window, 0
        self.k: Any = None
        self.v: Any = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length += k.shape[2]
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        first = max(0, k.shape[2] - self.window + 1)
        self.k, self.v = k[:, :, first:], v[:, :, first:]
        return k, v


class TooShort(Rolling):
    """The same, less one key."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().append(k, v)
        self.k, self.v = self.k[:, :, 1:], self.v[:, :, 1:]
        return k, v


class WindowLayer(Layer):
    """Attention of each token to the last `sliding_window` tokens, itself included.

    cache: Rolling(sliding_window), which each call updates.
    """

    def __init__(self, dim: int = 24, sliding_window: int = 4) -> None:
        super().__init__(dim)
        self.sliding_window = sliding_window

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = cache.append(k, v)
        visible = past(q.shape[2], k.shape[2], self.sliding_window)
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


class ShortWindowLayer(WindowLayer):
    """Attention of each token to the last `sliding_window` tokens, itself included.

    cache: TooShort(sliding_window), which each call updates.
    """


class Slots(NamedTuple):
    """Keys and values of earlier tokens, [b, h, n, d], and their number."""

    keys: Tensor
    values: Tensor
    count: int = 0


class NamedCache(Layer):
    """Causal attention, which returns its output and the next cache."""

    start = 0

    def forward(self, x: Tensor, cache: Slots | None = None) -> tuple[Tensor, Slots]:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = torch.cat((cache.keys, k), 2), torch.cat((cache.values, v), 2)
        visible = past(q.shape[2] - self.start, k.shape[2])
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v), Slots(k, v, k.shape[2])


class NamedCacheMasked(NamedCache):
    """Causal attention, which returns its output and the next cache."""

    def forward(self, x: Tensor, cache: Slots | None = None) -> tuple[Tensor, Slots]:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = torch.cat((cache.keys, k), 2), torch.cat((cache.values, v), 2)
        visible = past(q.shape[2], q.shape[2])
        visible = F.pad(visible, (0, k.shape[2] - q.shape[2]), value=False)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1), v), Slots(k, v, k.shape[2])


class Store:
    """The keys and values of one layer."""

    def __init__(self) -> None:
        self.k: Any = None
        self.v: Any = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v = k, v
        return k, v


class Stateful(Layer):
    """Causal attention. state: a Store that each call extends."""

    def forward(self, x: Tensor, state: Store | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if state is not None:
            k, v = state.extend(k, v)
        visible = past(q.shape[2], k.shape[2])
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


class StatefulUnmasked(Layer):
    """Causal attention. state: a Store that each call extends."""

    def forward(self, x: Tensor, state: Store | None = None) -> Tensor:
        q, k, v = self.heads(x)
        visible = past(q.shape[2], k.shape[2])
        if state is not None:
            k, v = state.extend(k, v)
            visible = torch.ones_like(visible[:, :1])
        return self.merge((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("layer", "verdict"),
    [
        (Stateful, "passed"),
        (StatefulUnmasked, "failed"),
        (WindowLayer, "passed"),
        (ShortWindowLayer, "failed"),
        (NamedCache, "passed"),
        (NamedCacheMasked, "failed"),
    ],
)
def test_a_cache_of_a_class_of_the_file_is_used(layer: type, verdict: str) -> None:
    report = checker.check(layer)
    assert report.verdict == verdict, str(report)
    assert verdict in [check.status for check in report.checks if check.name == "cache"]
