"""Policies of caches: the keys that they choose and what they cost, compared with dense weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import manyheads as mh
from manyheads import lm, policies
from manyheads.policies import H2O, AttentionSinks, Recency, SnapKV
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("one_thread")


def filled(t: int = 20, g: int = 2, votes: Any = "all") -> tuple[mh.Cache, Tensor]:
    """Return a cache that a layer of four heads has filled, and the weights of the layer `[b, h, t, t]`."""
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(16, 4, kv_heads=g).double(), torch.randn(2, t, 16, dtype=torch.float64)
    cache = mh.Cache(votes=votes)
    with torch.no_grad():
        _, amap = layer.attend(x, cache=cache)
    return cache, amap.dense()


@pytest.mark.parametrize("budget", [5, 8, 19, 20, 99])
def test_recency_and_sinks(budget: int) -> None:
    cache, _ = filled()
    assert Recency(budget)(cache).tolist() == list(range(20))[-budget:]
    expected = sorted({0, 1, 2, 3} | set(range(max(20 - budget + 4, 4), 20)))
    assert AttentionSinks(budget)(cache).tolist() == expected


@pytest.mark.parametrize(("budget", "recent"), [(6, None), (7, 0), (7, 7), (1, None), (20, 3), (50, None)])
def test_heavy_hitters_are_the_keys_with_the_largest_sums(budget: int, recent: int | None) -> None:
    cache, weights = filled()
    last = budget // 2 if recent is None else recent
    chosen = H2O(budget, recent)(cache)
    for b in range(2):
        for g in range(2):
            sums = weights[b, 2 * g : 2 * g + 2].sum((0, 1))
            older = sorted(range(20 - min(last, 20)), key=lambda key: -float(sums[key]))
            expected = {*range(20 - min(last, 20), 20), *older[: max(budget - last, 0)]}
            assert set(chosen[b, g].tolist()) == expected


@pytest.mark.parametrize(("budget", "window", "pool"), [(8, 3, 5), (8, None, 1), (6, 6, 3), (40, None, 7)])
def test_snapkv_pools_the_votes_of_its_window(budget: int, window: int | None, pool: int) -> None:
    cache, weights = filled(votes=32)
    last = min(32, budget // 2) if window is None else window
    chosen = SnapKV(budget, window, pool)(cache)
    for b in range(2):
        for g in range(2):
            end = max(20 - last, 0)
            sums = weights[b, 2 * g : 2 * g + 2, -last:, :end].sum((0, 1)).tolist()
            largest = [max(sums[max(n - pool // 2, 0) : n + pool // 2 + 1]) for n in range(end)]
            got = set(chosen[b, g].tolist())
            assert got >= set(range(end, 20))
            older = sorted(largest, reverse=True)[: budget - last]
            kept = sorted((largest[key] for key in got if key < end), reverse=True)
            torch.testing.assert_close(kept, older)  # neighbours have equal votes


def test_policies_are_used_again_and_again() -> None:
    """With a budget that is reached, the cache keeps its size, and its votes follow."""
    for policy in (Recency(6), AttentionSinks(6), H2O(6), SnapKV(6)):
        torch.manual_seed(0)
        layer, x = mh.MultiHeadAttention(16, 4, kv_heads=2), torch.randn(1, 30, 16)
        cache = mh.Cache(7, votes=getattr(policy, "votes", None))
        with torch.no_grad():
            for n in range(30):
                layer(x[:, n : n + 1], cache=cache)
                assert cache.keep(policy).shape == (1, 2, min(n + 1, 6))
        assert cache.positions[0, 0, -1] == 29


def test_votes_of_nan_raise() -> None:
    layer, x = mh.MultiHeadAttention(16, 4), torch.randn(1, 8, 16)
    x[0, 2] = torch.nan
    for policy in (H2O(4), SnapKV(4)):
        cache = mh.Cache(votes=policy.votes)
        with torch.no_grad():
            layer(x, cache=cache)
        with raises(ValueError, match=r"got NaN for .* of batch entry 0, head 0.*Recency"):
            cache.keep(policy)
        assert len(cache) == 8
        assert cache.keep(Recency(4))[0, 0].tolist() == [4, 5, 6, 7]


def test_what_cannot_be_measured_raises() -> None:
    x = torch.randn(1, 2, 6, 8)
    nan = x.clone()
    nan[0, 0, 3] = torch.nan
    for n, name in enumerate("qkv"):
        with raises(ValueError, match=f"Expected {name} to be finite"):
            policies.measure(Recency(3), *[nan if n == m else x for m in range(3)], prompt=4)
    with raises(TypeError, match=r"attend\(ids\), got a Linear.*policies.measure"):
        policies.measure_model(
            Recency(3), torch.nn.Linear(2, 2), torch.ones(1, 6, dtype=torch.long), prompt=4
        )


def test_invalid_policies_raise() -> None:
    cache, _ = filled(votes=4)
    for ask, kind, words in [
        (lambda: Recency(0), ValueError, "budget of Recency to be at least 1, got 0"),
        (lambda: Recency(2.5), TypeError, "got 2.5"),
        (lambda: AttentionSinks(4), ValueError, "with 4 sinks, to be at least 5, got 4"),
        (lambda: AttentionSinks(8, 0), ValueError, "sinks to be at least 1"),
        (lambda: H2O(-1), ValueError, "budget of H2O"),
        (lambda: H2O(4, 5), ValueError, "recent, with a budget of 4, to be at most 4, got 5"),
        (lambda: SnapKV(0), ValueError, "budget of SnapKV"),
        (lambda: SnapKV(8, 9), ValueError, "window, with a budget of 8, to be at most 8, got 9"),
        (lambda: SnapKV(8, pool=4), ValueError, "pool to be odd.*got 4"),
        (lambda: cache.keep(H2O), TypeError, r"Create it first: H2O\(…\)"),
        (lambda: cache.keep(SnapKV(16)), ValueError, "last to be at most votes = 4, got 8"),
        (lambda: mh.Cache().keep(H2O(4)), ValueError, "no keys yet"),
        (lambda: filled(votes=None)[0].keep(H2O(4)), ValueError, r'keeps no votes.*votes="all"'),
        (lambda: filled()[0].keep(SnapKV(8)), ValueError, "Create the Cache with votes=4"),
    ]:
        with raises(kind, match=words):
            ask()


# -- costs -----------------------------------------------------------------------------------------


def qkv(b: int = 2, h: int = 4, g: int = 2, t: int = 24, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(b, h, t, d, dtype=torch.float64),
        torch.randn(b, g, t, d, dtype=torch.float64),
        torch.randn(b, g, t, 3, dtype=torch.float64),
    )


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and outputs of attention with ALiBi, in plain PyTorch; visible is `[b, h, t, s]`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * (i - j).abs()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights, weights @ v


@pytest.mark.parametrize("every", [None, 1, 5])
@pytest.mark.parametrize("policy", [Recency(5), AttentionSinks(6), H2O(6), SnapKV(6, 2, 3)], ids=str)
def test_the_cost_is_that_of_dense_attention(policy: Any, every: int | None) -> None:
    """Dropped weight and error, against a loop that masks the keys that the policy has dropped."""
    q, k, v = qkv()
    prompt, (b, h, t, _), g = 10, q.shape, k.shape[1]
    chosen: list[Tensor] = []

    def recorded(cache: mh.Cache) -> Tensor:
        columns = policy(cache).expand(b, g, -1)
        chosen.append(cache.positions.gather(2, columns))
        return policy(cache)

    votes = getattr(policy, "votes", None)
    slopes = mh.ALiBi(h).slopes.double()
    cost = policies.measure(
        recorded, q, k, v, prompt=prompt, every=every, votes=votes, bias=mh.ALiBi(h)
    )  # fmt: skip
    causal = torch.ones(t, t, dtype=torch.bool).tril()
    visible = causal.expand(b, h, t, t).clone()
    step = t if every is None else every
    for n, kept in enumerate(chosen):
        start = prompt + n * step
        held = torch.zeros(b, g, t, dtype=torch.bool).scatter_(2, kept, True)
        held[..., start:] = True
        visible[:, :, start:] &= held.repeat_interleave(h // g, 1)[:, :, None]
    weights, all_out = dense(q, k, v, causal.expand(b, h, t, t), slopes)
    _, out = dense(q, k, v, visible, slopes)
    dropped = (weights * ~visible).sum(-1)[:, :, prompt:]
    error = ((out - all_out).norm(dim=-1) / all_out.norm(dim=-1))[:, :, prompt:]
    torch.testing.assert_close(cost.dropped, dropped)
    torch.testing.assert_close(cost.error, error.float())
    assert torch.equal(cost.kept, chosen[0].sort().values)
    assert len(chosen) == (1 if every is None else len(range(prompt, t, every)))


def test_keeping_everything_costs_nothing() -> None:
    q, k, v = qkv()
    for policy in (Recency(24), H2O(24), lambda cache: torch.arange(len(cache))):
        cost = policies.measure(policy, q, k, v, prompt=20, sink=torch.zeros(4, dtype=torch.float64))
        assert cost.dropped.max() == 0
        assert cost.error.max() < 1e-12


def test_a_custom_policy_is_measured_with_a_mask() -> None:
    """It may read keys; keys that the mask hides have no weight to lose."""
    q, k, v = qkv()
    window = mh.Causal() & mh.Window(left=2)

    def smallest(cache: mh.Cache) -> Tensor:
        return cache.keys.norm(dim=-1).topk(4, largest=False).indices

    cost = policies.measure(smallest, q, k, v, prompt=12, mask=window)
    assert cost.kept.shape == (2, 2, 4)
    assert cost.dropped[:, :, :2].max() > 0
    assert cost.dropped[:, :, 2:].max() == 0
    assert cost.error[:, :, 2:].max() < 1e-12


def test_invalid_measurements_raise() -> None:
    q, k, v = qkv()
    ids = torch.zeros(1, 9, dtype=torch.int64)
    model = lm.LanguageModel(lm.Config(vocab=16, embed=16, heads=2, layers=1, hidden=8, context=16))
    for ask, kind, words in [
        (lambda: policies.measure(Recency(4), q, k, v, prompt=24), ValueError, "prompt.*at most 23, got 24"),
        (lambda: policies.measure(Recency(4), q, k, v, prompt=0), ValueError, "at least 1, got 0"),
        (lambda: policies.measure(Recency(4), q, k, v, prompt=4, every=0), ValueError, "every"),
        (lambda: policies.measure(Recency(4), q[:, :, :3], k, v, prompt=2), ValueError, "key for each query"),
        (lambda: policies.measure(3, q, k, v, prompt=4), TypeError, "function of the Cache"),  # type: ignore[arg-type]
        (lambda: policies.measure(lambda c: [0], q, k, v, prompt=4), TypeError, "got a list"),  # type: ignore[arg-type,return-value]
        (lambda: policies.measure_model(Recency(4), model, [0], prompt=1), TypeError, "ids"),  # type: ignore[arg-type]
        (lambda: policies.measure_model(Recency(4), model, ids[0], prompt=1), ValueError, r"got \[9\]"),
        (lambda: policies.measure_model(Recency(4), model, ids, prompt=9), ValueError, "at most 8, got 9"),
    ]:
        with raises(kind, match=words):
            ask()


@pytest.mark.parametrize("every", [None, 3])
def test_the_cost_in_a_model_is_that_of_masking_the_dropped_keys(every: int | None) -> None:
    """Divergence and loss, against the model that reads the whole text with a mask in each layer."""
    torch.manual_seed(0)
    config = lm.Config(vocab=24, embed=32, heads=4, layers=2, hidden=16, context=40)
    model = lm.LanguageModel(config).double().eval()
    ids, prompt = torch.randint(24, (2, 20)), 12
    chosen: list[Tensor] = []

    def recorded(cache: mh.Cache) -> Tensor:
        columns = H2O(5)(cache)
        chosen.append(cache.positions.gather(2, columns))
        return columns

    cost = policies.measure_model(recorded, model, ids, prompt=prompt, every=every)
    layers = len(model.blocks)
    masks = [torch.ones(20, 20, dtype=torch.bool).tril().expand(2, 4, 20, 20).clone() for _ in range(layers)]
    for n, kept in enumerate(chosen):
        start = prompt + n // layers * (every or 20)
        held = torch.zeros(2, 4, 20, dtype=torch.bool).scatter_(2, kept, True)
        held[..., start:] = True
        masks[n % layers][:, :, start:] &= held[:, :, None]
    with torch.no_grad():
        full, maps = model.attend(ids)
        x = model.embed(ids)
        for block, mask in zip(model.blocks, masks, strict=True):
            x = block._finish(x, block.attention(block.attention_norm(x), mask=mh.Keep(mask)))
        given = model.logits(x)
    dropped = [(amap.dense() * ~mask).sum(-1)[:, :, prompt:] for amap, mask in zip(maps, masks, strict=True)]
    torch.testing.assert_close(cost.dropped, torch.stack(dropped))
    p, q = (each[:, prompt:].float().log_softmax(-1) for each in (full, given))
    torch.testing.assert_close(cost.divergence, (p.exp() * (p - q)).sum(-1), atol=1e-6, rtol=1e-4)
    loss = [
        torch.nn.functional.cross_entropy(each[:, prompt:-1].mT, ids[:, prompt + 1 :], reduction="none")
        for each in (given, full)
    ]
    torch.testing.assert_close(cost.loss, (loss[0] - loss[1]).float(), atol=1e-5, rtol=1e-4)
    assert cost.kept.shape == (2, 2, 4, 5)


def test_the_shipped_model_loses_less_with_a_larger_budget() -> None:
    model, tokenizer = lm.load()
    text = "the file you want to read is not the file you need to read. " * 4
    ids = torch.tensor([tokenizer.encode(text).ids])
    small, large = (
        policies.measure_model(H2O(budget), model, ids, prompt=ids.shape[1] // 2) for budget in (4, 24)
    )
    assert small.dropped.mean() > large.dropped.mean() > 0
    assert small.divergence.mean() > large.divergence.mean()
