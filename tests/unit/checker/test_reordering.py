"""Methods that reorder the batch entries of a cache, as beam search does."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.unit.checker.test_caches import InnerFlag, Layer, extend, judge

pytestmark = pytest.mark.usefixtures("one_thread")


class ChangedState(Layer):
    parts: tuple[str, ...] = ("k", "v")

    def forward(self, x, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = extend((cache["k"], cache["v"]) if "k" in cache else None, k, v)
            cache["k"], cache["v"] = k, v
        return self.attend(q, k, v)

    def reorder_incremental_state(self, cache: dict[str, Tensor], new_order: Tensor) -> None:
        for name in self.parts:
            cache[name] = cache[name].index_select(0, new_order)


class ChangedStatePart(ChangedState):
    parts: tuple[str, ...] = ("v",)


class UnchangedState(ChangedState):
    def reorder_incremental_state(self, cache: dict[str, Tensor], new_order: Tensor) -> None:
        for name in self.parts:
            cache[name].index_select(0, new_order)


class Returned(Layer):
    def forward(self, x, layer_past=None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        k, v = extend(layer_past, k, v)
        return self.attend(q, k, v), (k, v)


class OfAllLayers(Returned):
    @staticmethod
    def _reorder_cache(past_key_values: Any, beam_idx: Tensor) -> Any:
        return tuple(tuple(x.index_select(0, beam_idx) for x in layer) for layer in past_key_values)


class OfAllLayersPart(Returned):
    @staticmethod
    def _reorder_cache(past_key_values: Any, beam_idx: Tensor) -> Any:
        return tuple((layer[0].index_select(0, beam_idx), layer[1]) for layer in past_key_values)


class OfOneLayer(Returned):
    def reorder_cache(self, past: Any, order: Tensor) -> Any:
        return tuple(x[order] for x in past)


class OfOneLayerPart(Returned):
    def reorder_cache(self, past: Any, order: Tensor) -> Any:
        return past[0], past[1][order]


class Inner(InnerFlag):
    parts: tuple[str, ...] = ("cache_k", "cache_v")

    def reorder(self, idx: Tensor) -> None:
        for name in self.parts:
            setattr(self, name, getattr(self, name)[idx])


class InnerPart(Inner):
    parts: tuple[str, ...] = ("cache_k",)


class Slots:
    """Keys and values so far."""

    def __init__(self) -> None:
        self.kv: tuple[Tensor, Tensor] | None = None

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all."""
        self.kv = extend(self.kv, k, v)
        return self.kv

    def index_select(self, indices: Tensor) -> None:
        """Take batch entries."""
        assert self.kv is not None
        self.kv = self.kv[0][indices], self.kv[1][indices]


class PartSlots(Slots):
    def index_select(self, indices: Tensor) -> None:
        """Take batch entries."""
        assert self.kv is not None
        self.kv = self.kv[0][indices], self.kv[1]


class OwnClass(Layer):
    def forward(self, x, past: Slots | None = None):  # type: ignore[no-untyped-def]
        q, k, v = self.heads(x)
        return self.attend(q, *((k, v) if past is None else past.add(k, v)))


class OwnClassPart(OwnClass):
    def forward(self, x, past: PartSlots | None = None):  # type: ignore[no-untyped-def,override]
        return super().forward(x, past)


class OfHeads(Returned):
    """Its method reorders something else."""

    def reorder(self, order: Tensor) -> None:
        self.q.weight.data = self.q.weight.data.unflatten(0, (self.h, -1))[order].flatten(0, 1)


class Unknown(Returned):
    def reorder_cache(self, past: Any, order: Tensor, lengths: Tensor) -> Any:
        return tuple(x[order, :, :lengths] for x in past)


RIGHT = [ChangedState, OfAllLayers, OfOneLayer, Inner, OwnClass]
WRONG = [ChangedStatePart, OfAllLayersPart, OfOneLayerPart, InnerPart, OwnClassPart]


@pytest.mark.every(3)
@pytest.mark.parametrize("style", RIGHT, ids=lambda style: style.__name__)
def test_a_method_that_reorders_the_cache_passes(style: Any) -> None:
    result, _ = judge(style)
    assert result.status == "passed", result
    assert "isn't checked" not in result.reason


@pytest.mark.every(3)
@pytest.mark.parametrize("style", WRONG, ids=lambda style: style.__name__)
def test_a_method_that_reorders_a_part_of_the_cache(style: Any) -> None:
    result, _ = judge(style)
    assert result.status == "failed", result
    assert result.bug is not None
    assert result.bug.name == "cache-reordered-in-part"


def test_a_method_that_reorders_nothing() -> None:
    result, _ = judge(UnchangedState)
    assert result.status == "failed", result
    assert "the cache is as before" in result.reason


def test_a_method_that_no_known_call_fits_is_noted() -> None:
    for style in (OfHeads, Unknown):
        result, _ = judge(style)
        assert result.status == "passed", result
        assert "isn't checked" in result.reason
