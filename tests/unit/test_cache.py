"""The cache: its offset and length, and decoding compared with the full pass."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import manyheads as mh
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("one_thread")

E = 16


def layer(**parts: Any) -> mh.MultiHeadAttention:
    torch.manual_seed(0)
    return mh.MultiHeadAttention(E, 4, **parts).double().eval()


def kv(n: int, b: int = 2, g: int = 3, d: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(b, g, n, d), torch.randn(b, g, n, d + 1)


@given(steps=st.lists(st.integers(0, 5), max_size=6), room=st.integers(0, 3), seed=st.integers(0, 99))
def test_append_returns_everything_so_far(steps: list[int], room: int, seed: int) -> None:
    """In a preallocated cache and in a growing one, whatever the steps."""
    torch.manual_seed(seed)
    total = sum(steps)
    for cache in (mh.Cache(), mh.Cache(max(total + room, 1))):
        parts = [kv(n) for n in steps]
        for n, (k, v) in enumerate(parts):
            held_k, held_v = cache.append(k, v)
            assert torch.equal(held_k, torch.cat([k for k, _ in parts[: n + 1]], 2))
            assert torch.equal(held_v, torch.cat([v for _, v in parts[: n + 1]], 2))
            assert cache.offset == len(cache) == sum(steps[: n + 1])


def test_a_full_cache_raises_and_is_unchanged() -> None:
    cache = mh.Cache(5)
    held, _ = cache.append(*kv(4))
    with raises(ValueError, match=r"4 of 5 tokens, got 2 more"):
        cache.append(*kv(2))
    assert cache.offset == 4
    again, _ = cache.append(*kv(1))
    assert torch.equal(again[:, :, :4], held)
    with raises(ValueError, match=r"5 of 5 tokens, got 1 more"):
        cache.append(*kv(1))


def test_a_growing_cache_does_not_copy_every_time() -> None:
    """It doubles: 200 tokens, one by one, move the buffer less than ten times."""
    cache = mh.Cache()
    places = {cache.append(*kv(1))[0].untyped_storage().data_ptr() for _ in range(200)}
    assert len(places) < 10
    preallocated = mh.Cache(200)
    places = {preallocated.append(*kv(1))[0].untyped_storage().data_ptr() for _ in range(200)}
    assert len(places) == 1


def test_another_batch_width_dtype_or_head_count_raises() -> None:
    cache = mh.Cache()
    cache.append(*kv(2))
    for bad in (kv(1, b=3), kv(1, g=2), kv(1, d=5), tuple(x.double() for x in kv(1))):
        with raises(ValueError, match="Use one Cache for each layer and batch"):
            cache.append(*bad)
    with raises(ValueError, match=r"\[b, g, n, d\]"):
        cache.append(torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    with raises(ValueError, match=r"\[2, 3, 1, 4\] and \[2, 3, 2, 5\]"):
        cache.append(kv(1)[0], kv(2)[1])
    assert cache.offset == 2


def test_keys_that_require_gradients_raise() -> None:
    cache = mh.Cache()
    with raises(ValueError, match="no gradients"):
        cache.append(*(x.requires_grad_() for x in kv(1)))
    assert cache.offset == 0
    with raises(ValueError, match="no gradients"):
        layer()(torch.randn(1, 2, E, dtype=torch.float64), cache=cache)
    assert cache.offset == 0


def test_clear_removes_all_tokens() -> None:
    cache = mh.Cache(4)
    cache.append(*kv(4))
    cache.clear()
    assert cache.offset == 0
    new = kv(3, b=5)  # another batch is welcome
    assert torch.equal(cache.append(*new)[0], new[0])
    assert "3 tokens" in repr(cache)


def test_appended_tensors_are_copied() -> None:
    cache = mh.Cache()
    k, v = kv(2)
    held, _ = cache.append(k, v)
    k.zero_()
    assert held.any()


@pytest.mark.parametrize("first", ["no_grad", "inference"])
@pytest.mark.parametrize("second", ["no_grad", "inference"])
def test_modes_may_change_between_steps(first: str, second: str) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    for cache in (mh.Cache(8), mh.Cache()):
        one, two = kv(3), kv(2)
        with modes[first]():
            cache.append(*one)
        with modes[second]():
            held, _ = cache.append(*two)
        assert torch.equal(held, torch.cat((one[0], two[0]), 2))


ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2]])
PARTS: dict[str, dict[str, Any]] = {
    "bare": {},
    "rotary": {"position": mh.Rotary(4)},
    "partial rotary": {"position": mh.Rotary(2, layout="interleaved", factor=2.0)},
    "alibi": {"bias": mh.ALiBi(4)},
    "grouped": {"kv_heads": 2, "position": mh.Rotary(4)},
    "one key head": {"kv_heads": 1},
    "norm": {"qk_norm": torch.nn.RMSNorm, "head_dim": 6},
}
MASKS: dict[str, Any] = {
    "none": None,
    "window": mh.Window(left=2),
    "documents": mh.Documents(ids),
    "prefix": mh.Prefix(torch.tensor([2, 4])),
    "keys": ~mh.Keys([1]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 1, 3], [9], [5, 4]], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("part", PARTS)
def test_decoding_is_the_full_pass(part: str, mask: str, steps: list[int]) -> None:
    """Step by step, outputs and maps, with preallocated and with growing caches."""
    model = layer(**PARTS[part])
    x = torch.randn(2, 9, E, dtype=torch.float64)
    both = mh.Causal() if MASKS[mask] is None else mh.Causal() & MASKS[mask]
    with torch.no_grad():
        whole, amap = model.attend(x, mask=both)
        for cache in (mh.Cache(), mh.Cache(9)):
            done = 0
            for n in steps:
                out, step = model.attend(x[:, done : done + n], mask=MASKS[mask], cache=cache)
                torch.testing.assert_close(out, whole[:, done : done + n])
                assert step.shape == (2, 4, n, done + n)
                expected = amap.dense()[:, :, done : done + n, : done + n]
                torch.testing.assert_close(step.dense(), expected)
                done += n
                assert cache.offset == done


def test_maps_of_earlier_steps_stay_readable() -> None:
    """After later appends, after growing, after clear and reuse: what the step attended to."""
    model, x = layer(), torch.randn(1, 40, E, dtype=torch.float64)
    for cache in (mh.Cache(), mh.Cache(40)):
        with torch.no_grad():
            maps = []
            for n in range(40):
                _, amap = model.attend(x[:, n : n + 1], cache=cache)
                maps.append((amap, amap.dense().clone()))
            cache.clear()
            model(-x[:, :7], cache=cache)
            for amap, before in maps:
                assert torch.equal(amap.dense(), before)


def test_the_mask_of_a_cache() -> None:
    """It need not be causal: a prefix that is read in one step attends to all of itself."""
    model, x = layer(), torch.randn(1, 5, E, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        out = model(x, cache=mh.Cache(mask=mh.Full()))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "bad",
    [
        {"mask": mh.Keep(torch.ones(3, 3) > 0)},
        {"mask": torch.ones(1, 4) > 0},
        {"mask": mh.Lengths(torch.tensor([1, 2, 3]))},
    ],
    ids=["keep", "naked", "lengths"],
)
@pytest.mark.parametrize("call", ["forward", "attend"])
def test_a_call_that_fails_leaves_the_cache_unchanged(bad: dict[str, Any], call: str) -> None:
    model, x = layer(), torch.randn(1, 4, E, dtype=torch.float64)
    cache = mh.Cache()
    with torch.no_grad():
        expected = model(x, mask=mh.Causal())
        model(x[:, :3], cache=cache)
        with pytest.raises((ValueError, TypeError)):
            getattr(model, call)(x[:, 3:], cache=cache, **bad)
        assert cache.offset == 3
        torch.testing.assert_close(model(x[:, 3:], cache=cache), expected[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [None, 40])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_votes_equal_those_of_the_whole_map(kv_heads: int, length: int | None, dtype: torch.dtype) -> None:
    model, x = layer(kv_heads=kv_heads).to(dtype), torch.randn(2, 40, E, dtype=dtype)
    cache = mh.Cache(length, votes=6)
    with torch.no_grad():
        expected, amap = model.attend(x, mask=mh.Causal())
        done = 0
        for n in (4, 1, 1, 9, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 5, 9):  # fewer than vote, one by one, and more
            new = x[:, done : done + n]
            out = model(new, cache=cache) if n % 2 else model.attend(new, cache=cache)[0]
            torch.testing.assert_close(out, expected[:, done : done + n])
            done += n
            for last in (1, 5, 6):
                so_far = amap.only()[:, :, max(done - last, 0) : done, :done].sum(2)
                torch.testing.assert_close(cache.received(last), so_far)
    assert torch.equal(cache.received(), cache.received(6))
    torch.testing.assert_close(cache.received(), amap.received(last=6))
    cache.clear()
    with raises(ValueError, match="No votes in the Cache yet"):
        cache.received()


def test_invalid_votes_raise() -> None:
    cache, amap = mh.Cache(votes=3), mh.attention_with_map(*(torch.randn(1, 1, 5, 4) for _ in range(3)))[1]
    for ask, kind, words in [
        (lambda: mh.Cache(votes=0), ValueError, "votes.* at least 1, .*0"),
        (lambda: mh.Cache(votes=2.0), TypeError, "votes.*2.0"),
        (lambda: mh.Cache().received(), ValueError, r"Cache\(votes=w\)"),
        (lambda: mh.Cache().vote(amap), ValueError, "map of the 0 keys of the Cache, got one of 5 keys"),
        (lambda: cache.received(4), ValueError, "at most votes = 3, got 4"),
        (lambda: cache.received(0), ValueError, "last.*at least 1"),
        (lambda: cache.received(), ValueError, "No votes in the Cache yet"),
        (lambda: cache.vote(3), TypeError, "Expected an AttentionMap, got an int"),
    ]:
        with raises(kind, match=words):
            ask()


def test_votes_are_kept_in_any_mode_and_of_one_layer() -> None:
    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(2, 6, 16)
    cache = mh.Cache(10, votes=4)
    with torch.inference_mode():
        layer(x, cache=cache)
    with torch.no_grad():
        layer(x[:, :1], cache=cache)
        assert cache.received().shape == (2, 2, 7)
        for other, given in (
            (layer, x[:1]),
            (mh.MultiHeadAttention(16, 4), x),
            (mh.MultiHeadAttention(16, 1), x),
        ):
            amap = other.attend(torch.cat((given, given[:, :1]), 1))[1]
            with pytest.raises(
                ValueError, match=r"map of 2 sequences and 2 heads, as in the Cache, got b = "
            ):
                cache.vote(amap)
    assert len(cache) == 7


def test_queries_without_votes_are_not_counted() -> None:
    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(1, 6, 16)
    cache = mh.Cache(votes=10**9)  # as many as there are
    with torch.no_grad():
        layer(x, cache=cache)
        k = torch.randn(1, 2, 3, 8)
        cache.append(k, k)
        with raises(
            ValueError, match="Of the last 2 queries 2 have no votes in the Cache, the first at position 7"
        ):
            cache.received(2)
        layer(x[:, :1], cache=cache)
        assert cache.received(1).sum(-1).sub(1).abs().max() < 1e-6
        with raises(ValueError, match="Of the last 10 queries 3 have no votes"):
            cache.received()


def test_a_vote_that_fails_leaves_the_cache_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = mh.MultiHeadAttention(16, 2), torch.randn(1, 6, 16)
    cache = mh.Cache(votes=4)

    def fails(self: mh.Cache, amap: mh.AttentionMap) -> None:
        raise MemoryError

    with torch.no_grad():
        layer(x, cache=cache)
        monkeypatch.setattr(mh.Cache, "vote", fails)
        with pytest.raises(MemoryError):
            layer(x[:, :1], cache=cache)
    assert len(cache) == 6
