"""The cache: its offset and length, and decoding compared with the full pass."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import manyheads as mh
from manyheads import kernels
from manyheads.kernels.native import packing
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


# -- dropping keys ---------------------------------------------------------------------------------


def chooser(columns: Any) -> Any:
    """A policy that returns these columns."""

    def choose(cache: mh.Cache) -> Any:
        return columns

    return choose


def random_columns(b: int, g: int, s: int, n: int, seed: int = 0) -> Tensor:
    return torch.rand(b, g, s, generator=torch.Generator().manual_seed(seed)).topk(n, -1).indices


SHAPES = {"one for all": (1, 1), "per head": (1, None), "per sequence and head": (2, None)}


def expand_columns(shape: str, g: int, s: int, n: int, seed: int = 0) -> Tensor:
    """Return a policy's columns as it may return them, [n], [g, n] or [b, g, n]."""
    b, heads = SHAPES[shape]
    columns = random_columns(b, heads or g, s, n, seed)
    return columns[0, 0] if shape == "one for all" else columns[0] if shape == "per head" else columns


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [[1] * 5, [5], [2, 3]], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("part", PARTS)
def test_decoding_after_keep_is_the_full_pass_without_the_dropped_keys(
    part: str, mask: str, shape: str, steps: list[int]
) -> None:
    """Outputs and maps, with positions, biases and masks of the whole text, and after a second drop."""
    model = layer(**PARTS[part])
    t, prompt, g = 9, 4, model.kv_heads
    x = torch.randn(2, t, E, dtype=torch.float64)
    visible = torch.ones(2, g, t, t, dtype=torch.bool)
    for cache in (mh.Cache(), mh.Cache(9)):
        visible.fill_(True)
        with torch.no_grad():
            model(x[:, :prompt], mask=MASKS[mask], cache=cache)
            done = prompt
            for seed, n in enumerate(steps):
                if seed < 2:
                    s = len(cache)
                    before = cache.positions
                    columns = expand_columns(shape, g, s, s - 1, seed)
                    kept = cache.keep(chooser(columns))
                    columns = columns.expand(2, g, -1) if columns.dim() < 3 else columns
                    assert torch.equal(kept, before.gather(2, columns).sort().values)
                    assert torch.equal(kept, cache.positions)
                    assert (len(cache), cache.offset) == (s - 1, done)
                    gone = torch.ones(2, g, done, dtype=torch.bool).scatter_(2, kept, False)
                    visible[:, :, done:, :done] = ~gone[:, :, None]
                out, step = model.attend(x[:, done : done + n], mask=MASKS[mask], cache=cache)
                keep = mh.Keep(visible.repeat_interleave(4 // g, 1))
                both = mh.Causal() & keep if MASKS[mask] is None else mh.Causal() & keep & MASKS[mask]
                expected, amap = model.attend(x, mask=both)
                torch.testing.assert_close(out, expected[:, done : done + n])
                positions = cache.positions.repeat_interleave(4 // g, 1)[:, :, None].expand(-1, -1, n, -1)
                weights = amap.dense()[:, :, done : done + n].gather(3, positions)
                torch.testing.assert_close(step.dense(), weights)
                done += n


def dropped_map(part: str = "grouped") -> tuple[mh.AttentionMap, mh.AttentionMap, Tensor]:
    """Return a map of four queries after a drop, that of the full pass under the same keys, and positions."""
    model, x = layer(**PARTS[part]), torch.randn(2, 16, E, dtype=torch.float64)
    g, cache = model.kv_heads, mh.Cache()
    with torch.no_grad():
        model(x[:, :12], cache=cache)
        kept = cache.keep(chooser(random_columns(2, g, 12, 5)))
        _, amap = model.attend(x[:, 12:], cache=cache)
        visible = torch.zeros(2, g, 16, dtype=torch.bool).scatter_(2, kept, True)
        visible[..., 12:] = True
        keep = mh.Keep(visible.repeat_interleave(4 // g, 1)[:, :, None])
        full = model.attend(x, mask=mh.Causal() & keep)[1]
    return amap, full, cache.positions.repeat_interleave(4 // g, 1)


@pytest.mark.parametrize("part", ["bare", "grouped", "one key head", "alibi"])
def test_statistics_of_a_map_after_keep_use_positions(part: str) -> None:
    """Those of the full pass under the same keys, for the same queries."""
    amap, full, positions = dropped_map(part)
    ids16 = torch.randint(3, (2, 16), generator=torch.Generator().manual_seed(1))
    last = slice(12, 16)
    torch.testing.assert_close(amap.distance(), full.distance()[:, :, last])
    torch.testing.assert_close(amap.entropy(), full.entropy()[:, :, last])
    for mask in (mh.Diagonal(-1), mh.Window(left=3), mh.Keys([2, 13]), mh.SameToken(ids16), ~mh.Prefix(4)):
        torch.testing.assert_close(amap.mass(mask), full.mass(mask)[:, :, last])
    # Head scores are means over queries, so those of the full pass see only the queries after the drop.
    after_drop = torch.zeros(16, 16, dtype=torch.bool)
    after_drop[last] = True
    restricted = full.under(full.problem.mask & mh.Keep(after_drop))
    for score in ("previous_token", "first_token"):
        mine, theirs = (getattr(mh.measures, score)(each) for each in (amap, restricted))
        torch.testing.assert_close(mine, theirs)
    for score in ("induction", "duplicate_token"):
        mine, theirs = (getattr(mh.measures, score)(each, ids16) for each in (amap, restricted))
        torch.testing.assert_close(mine, theirs)
    with raises(ValueError, match="one for each of s = 16 keys"):
        mh.measures.induction(amap, ids16[:, :9])
    received = full.dense()[:, :, last].sum(2).gather(2, positions)
    torch.testing.assert_close(amap.received(), received)
    # A counterfactual mask, one head, one sequence.
    under = full.dense()[:, :, last].gather(3, positions[:, :, None].expand(-1, -1, 4, -1))
    torch.testing.assert_close(amap.under(mh.Causal()).dense(), under)
    torch.testing.assert_close(amap.only(1, [3, 0]).dense(), under[1:, [3, 0]])
    torch.testing.assert_close(amap.only(1, [3, 0]).distance(), amap.distance()[1:, [3, 0]])
    torch.testing.assert_close(amap.only(0).only(0, 2).dense(), under[:1, 2:3])
    window = mh.Causal() & mh.Window(left=5)
    expected = full.under(full.problem.mask & window).dense()[:, :, last]
    torch.testing.assert_close(
        amap.under(window).dense(), expected.gather(3, positions[:, :, None].expand(-1, -1, 4, -1))
    )
    with raises(TypeError, match="Expected mask to be a Mask"):
        amap.under("causal")


def test_every_kernel_attends_to_the_kept_keys() -> None:
    amap, _, _ = dropped_map("alibi")
    problem = amap.problem
    cache, g = mh.Cache(), 4
    k, v = torch.randn(2, g, 12, 4), torch.randn(2, g, 12, 4)
    cache.append(k, v)
    cache.keep(chooser(random_columns(2, g, 12, 5)))
    q, new = torch.randn(2, 8, 4, 4), torch.randn(2, g, 4, 4)
    keys, values = cache.append(new, new)
    mask, bias = cache.place(cache.mask, 8), cache.place(mh.ALiBi(8), 8)
    outs = [
        mh.attention(q, keys, values, mask=mask, bias=bias, offset=12, kernel=kernel)
        for kernel in ("reference", "chunked", "native", "sdpa", "auto")
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
    assert "at 9 of 16 keys" in str(mask)
    assert repr(mask)
    assert problem.tokens == 16
    # The default offset is the position of the first new query, and masks combine by position.
    default = mh.attention(q, keys, values, mask=mask, bias=bias)
    torch.testing.assert_close(default, outs[0])
    only_bias = mh.attention_with_map(q, keys, values, bias=bias)[1]
    assert only_bias.problem.offset == 12
    window = mh.Window(left=6)
    expected = mh.attention(q, keys, values, mask=cache.place(mh.Causal() & window, 8))
    for both in (mask & window, window & mask, ~(~mask | ~window), mask & cache.place(window, 8)):
        assert both.tokens == 16  # type: ignore[attr-defined]
        torch.testing.assert_close(mh.attention(q, keys, values, mask=both), expected)
    torch.testing.assert_close(
        mh.attention(q, keys, values, mask=window | mask), mh.attention(q, keys, values, mask=mask | window)
    )
    with raises(ValueError, match="masks that two caches have placed"):
        mask & cache.place(window, 4)
    with raises(TypeError, match="operand of & or"):
        mask & 3
    with raises(ValueError, match=r"positions for \[b, g, s\]"):
        mh.attention(q, keys[:, :, :3], values[:, :, :3], mask=mask)


def test_keys_that_were_dropped_free_memory_and_leave_room() -> None:
    """A cache of fixed length reads any number of tokens."""
    model, x = layer(position=mh.Rotary(4)), torch.randn(1, 50, E, dtype=torch.float64)
    for cache in (mh.Cache(8), mh.Cache()):
        with torch.no_grad():
            for n in range(50):
                model(x[:, n : n + 1], cache=cache)
                cache.keep(lambda cache: torch.arange(len(cache))[-6:])
        assert (len(cache), cache.offset) == (6, 50)
        assert cache.positions[0, 0].tolist() == [44, 45, 46, 47, 48, 49]
        assert cache._k is not None
        assert cache._k.shape[2] <= 12
    assert "6 of 50 tokens, growing" in repr(cache)
    fixed = mh.Cache(8)
    fixed.append(*kv(8))
    fixed.keep(chooser(torch.arange(6)))
    with raises(ValueError, match="Cache has 6 of 8 tokens, got 3 more.*cache.keep"):
        fixed.append(*kv(3))


def test_maps_from_before_keep_stay_readable() -> None:
    model, x = layer(), torch.randn(1, 12, E, dtype=torch.float64)
    for cache in (mh.Cache(), mh.Cache(12)):
        with torch.no_grad():
            _, first = model.attend(x[:, :6], cache=cache)
            before = first.dense().clone()
            cache.keep(chooser(torch.tensor([1, 5])))
            _, second = model.attend(x[:, 6:9], cache=cache)
            then = second.dense().clone()
            cache.keep(chooser(torch.tensor([0])))
            model(x[:, 9:], cache=cache)
            cache.clear()
            model(-x, cache=cache)
        assert torch.equal(first.dense(), before)
        assert torch.equal(second.dense(), then)


@pytest.mark.parametrize("votes", [4, 30, "all"])
def test_votes_follow_the_kept_keys(votes: Any) -> None:
    """They are the sums of the weights that queries gave to these keys when they were read."""
    model, x = layer(kv_heads=2), torch.randn(2, 30, E, dtype=torch.float64)
    for cache in (mh.Cache(votes=votes), mh.Cache(20, votes=votes)):
        total = torch.zeros(2, 4, 30, dtype=torch.float64)
        weights: list[Tensor] = []
        done = 0
        with torch.no_grad():
            for n, keep in ((9, 5), (1, 4), (1, 0), (6, 8), (1, 0), (3, 2), (1, 1), (8, 0)):
                _, amap = model.attend(x[:, done : done + n], cache=cache)
                done += n
                by_position = torch.zeros(2, 4, n, 30, dtype=torch.float64)
                positions = cache.positions.repeat_interleave(2, 1)
                by_position.scatter_(3, positions[:, :, None].expand(-1, -1, n, -1), amap.dense())
                weights += by_position.unbind(2)
                if keep:
                    cache.keep(chooser(random_columns(2, 2, len(cache), keep, n)))
                    positions = cache.positions.repeat_interleave(2, 1)
                recent = weights if votes == "all" else weights[-votes:]
                total = torch.stack(recent).sum(0)
                torch.testing.assert_close(cache.received(), total.gather(2, positions))
    if votes == "all":
        assert torch.equal(cache.received(), cache.received(10**6))
        with raises(ValueError, match=r'votes="all" keeps only sums.*votes=4'):
            cache.received(4)


def test_votes_of_all_queries_are_those_of_the_whole_map() -> None:
    model, x = layer(), torch.randn(2, 20, E, dtype=torch.float64)
    cache = mh.Cache(votes="all")
    with torch.no_grad():
        amap = model.attend(x, mask=mh.Causal())[1]
        for n in range(0, 20, 4):
            model(x[:, n : n + 4], cache=cache)
        torch.testing.assert_close(cache.received(), amap.received())
        cache.received().zero_()  # a copy
        torch.testing.assert_close(cache.received(), amap.received())
        k = torch.randn(2, 4, 1, 4, dtype=torch.float64)
        cache.append(k, k)
        with raises(ValueError, match="votes of all 21 queries, got 20"):
            cache.received()
    with raises(ValueError, match="No votes in the Cache yet"):
        mh.Cache(votes="all").received()


INVALID_CHOICES: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "policy choose to return the keys to keep.*got a NoneType"),
    ([0, 1], TypeError, r"got a list. Wrap it as torch.tensor\(keys\)"),
    (torch.tensor([0.0, 1.0]), TypeError, "got a Tensor of torch.float32"),
    (torch.tensor([]), TypeError, "got a Tensor of torch.float32"),
    (torch.ones(6) > 0, TypeError, "got a Tensor of torch.bool.*nonzero"),
    (torch.tensor(3), ValueError, r"for b = 2 and g = 4 key heads, got \[\]"),
    (torch.zeros(3, 2, dtype=torch.int64), ValueError, r"got \[3, 2\]"),
    (torch.zeros(3, 4, 2, dtype=torch.int64), ValueError, r"got \[3, 4, 2\]"),
    (torch.zeros(1, 2, 4, 2, dtype=torch.int64), ValueError, r"got \[1, 2, 4, 2\]"),
    (torch.tensor([0, 6]), ValueError, r"between 0 and len\(cache\) − 1 = 5, got 6"),
    (torch.tensor([-1, 2]), ValueError, "got -1"),
    (torch.tensor([3, 1, 3]), ValueError, "each at most once, got 3 twice"),
]


@pytest.mark.parametrize(("chosen", "kind", "words"), INVALID_CHOICES)
def test_an_invalid_choice_raises_and_leaves_the_cache_unchanged(
    chosen: Any, kind: type[Exception], words: str
) -> None:
    model, x = layer(), torch.randn(2, 7, E, dtype=torch.float64)
    cache = mh.Cache()
    with torch.no_grad():
        expected = model(x, mask=mh.Causal())
        model(x[:, :6], cache=cache)
        with raises(kind, match=words):
            cache.keep(chooser(chosen))
        torch.testing.assert_close(model(x[:, 6:], cache=cache), expected[:, 6:])


def test_a_policy_is_a_function_that_changes_nothing() -> None:
    cache, (k, v) = mh.Cache(), kv(4, g=4)
    with raises(ValueError, match="no keys yet"):
        cache.keep(chooser(torch.tensor([0])))
    cache.append(k[:, :, :0], v[:, :, :0])
    with raises(ValueError, match="no keys to choose from"):
        cache.keep(chooser(torch.tensor([0])))
    cache.append(k, v)
    for bad, words in (
        (3, "function of the Cache, got the policy 3"),
        (mh.Cache, r"Create it first: Cache\(…\)"),
    ):
        with raises(TypeError, match=words):
            cache.keep(bad)

    def appends(cache: mh.Cache) -> Tensor:
        cache.append(k, v)
        return torch.tensor([0])

    with raises(ValueError, match="policy appends to leave the Cache unchanged"):
        cache.keep(appends)
    with pytest.raises(ZeroDivisionError):
        cache.keep(lambda cache: 1 / 0)
    assert torch.equal(cache.keys[:, :, :4], k)


def test_all_keys_or_none_may_be_kept() -> None:
    model, x = layer(), torch.randn(1, 6, E, dtype=torch.float64)
    cache = mh.Cache(votes="all")
    with torch.no_grad():
        full = model(x, mask=mh.Causal())
        model(x[:, :4], cache=cache)
        keys = cache.keys
        assert cache.keep(chooser(torch.tensor([3, 0, 2, 1]))).tolist() == [[[0, 1, 2, 3]] * 4]
        assert torch.equal(cache.keys, keys)
        assert cache.keep(chooser(torch.tensor([], dtype=torch.int64))).shape == (1, 4, 0)
        assert (len(cache), cache.offset) == (0, 4)
        alone = model(x[:, 4:], mask=mh.Causal(), cache=cache)
        expected = model(x, mask=mh.Causal() & ~mh.Keys([0, 1, 2, 3]))
        torch.testing.assert_close(alone, expected[:, 4:])
        assert not torch.allclose(alone, full[:, 4:])


def test_place_returns_masks_by_position() -> None:
    cache = mh.Cache()
    with raises(ValueError, match="no keys yet"):
        cache.place(mh.Causal())
    cache.append(*kv(5))
    mask = mh.Causal()
    assert cache.place(mask) is mask
    cache.keep(chooser(torch.tensor([0, 3])))
    assert cache.place(mask).table(1, 2, 2).tolist() == [[True, False]]
    assert cache.place(mask, 6, 2).table(2, 4, 5).tolist() == [[True, True, True, False], [True] * 4]
    with raises(TypeError, match="Mask or a Bias to place, got a Tensor"):
        cache.place(torch.ones(1))
    with raises(ValueError, match="multiple of the Cache's 3 key heads, got 4"):
        cache.place(mask, 4)
    learned = mh.Relative.learned(3, 4)
    with raises(ValueError, match="got a bias that requires one"):
        cache.place(learned)
    with torch.no_grad():
        assert cache.place(learned).bias is learned


@pytest.mark.parametrize("part", ["bare", "grouped", "one key head", "alibi"])
def test_a_map_after_keep_is_saved_with_the_positions_of_its_keys(part: str, tmp_path: Any) -> None:
    amap, full, _ = dropped_map(part)
    amap.save(tmp_path / "map.safetensors")
    opened = mh.AttentionMap.open(tmp_path / "map.safetensors")
    assert torch.equal(opened.dense(), amap.dense())
    assert torch.equal(opened.distance(), amap.distance())
    assert opened.problem.tokens == 16
    torch.testing.assert_close(opened.received().sum(-1), full.received(last=4).sum(-1))
    amap.only(batch=[1], heads=[3, 0]).save(tmp_path / "some.safetensors")
    some = mh.AttentionMap.open(tmp_path / "some.safetensors")
    assert torch.equal(some.dense(), amap.dense()[1:, [3, 0]])


@pytest.mark.parametrize("position", [-1, 16, 0])
def test_a_file_with_wrong_positions_of_keys_is_not_opened(position: int, tmp_path: Any) -> None:
    amap, _, _ = dropped_map()
    mask: Any = amap.problem.mask
    mask.positions.data[0, 0, 3] = position
    amap.save(tmp_path / "map.safetensors")
    with raises(ValueError, match="Expected ascending positions below 16"):
        mh.AttentionMap.open(tmp_path / "map.safetensors")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("seen", [None, 6], ids=["all", "a window"])
def test_a_query_that_sees_all_kept_keys_needs_no_mask_tensor(steps: int, seen: int | None) -> None:
    """The native kernel makes one only if some key is masked for some query."""
    model, x = layer(), torch.randn(2, 15, E, dtype=torch.float64)
    cache = mh.Cache(mask=mh.Causal() if seen is None else mh.Window(seen, 0))
    with torch.no_grad():
        model(x[:, :12], cache=cache)
        cache.keep(chooser(torch.tensor([1, 4, 7])))
        out, amap = model.attend(x[:, 12 : 12 + steps], cache=cache)
    if kernels.load("native").built().startswith("not available"):
        pytest.skip("the native kernel isn't built")
    needs = packing.tensor_bytes(amap.problem)
    assert bool(needs) == (steps > 1 or seen is not None)
    v = cache.values.repeat_interleave(4 // model.kv_heads, 1)
    torch.testing.assert_close(out, model.o((amap.dense() @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("first", ["no_grad", "inference"])
@pytest.mark.parametrize("second", ["no_grad", "inference"])
def test_keep_in_any_mode(first: str, second: str) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    model, x = layer(), torch.randn(1, 8, E, dtype=torch.float64)
    cache = mh.Cache(votes=2)
    with modes[first]():
        model(x[:, :5], cache=cache)
        cache.keep(lambda cache: cache.received().mean((0, 1)).topk(3).indices)
    with modes[second]():
        out = model(x[:, 5:], cache=cache)
        cache.keep(lambda cache: cache.received().mean((0, 1)).topk(3).indices)
    assert out.isfinite().all()
    assert len(cache) == 3


def test_a_rollback_after_keep() -> None:
    """Speculative decoding sets `offset` back, also into the keys that were kept."""
    model, x = layer(), torch.randn(1, 9, E, dtype=torch.float64)
    cache = mh.Cache(votes=3)
    with torch.no_grad():
        model(x[:, :6], cache=cache)
        cache.keep(chooser(torch.tensor([1, 2, 5])))
        expected = model(x[:, 6:8], cache=cache)
        cache.offset = 6
        model(-x[:, 6:9], cache=cache)
        cache.offset = 6
        torch.testing.assert_close(model(x[:, 6:8], cache=cache), expected)
        assert cache.positions[0, 0].tolist() == [1, 2, 5, 6, 7]
        assert cache.received(2).shape == (1, 4, 5)
