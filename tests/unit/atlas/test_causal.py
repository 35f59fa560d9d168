"""Weights under causal masks, compared with those of the matrix, and layers that are joined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads import Causal, Window, attention_with_map
from manyheads.atlas import causal
from manyheads.atlas.measuring import compute_causal_masses, compute_masses, join, measure
from manyheads.kernels.native import library
from manyheads.maps import AttentionMap
from manyheads.masks import Lengths

CAUSAL = Causal()
BOUND = 64 * 2.0**-24  # the relative error of a weight: exp of a float32 score between −64 and 64


def make_map(seed: int, b: int, h: int, g: int, t: int, size: float = 1.0, mask=CAUSAL, **options):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, n, t, 8, generator=generator) for n in (h, g, g))
    amap = attention_with_map(size * q, k, v, mask=mask, **options)[1]
    return amap, torch.randint(5, (b, t), generator=generator)


fused = pytest.mark.skipif(library.width is None, reason="the native library isn't available")


@fused
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.integers(1, 61),
    st.sampled_from([0.0, 1.0, 1000.0]), st.sampled_from([{}, {"softcap": 3.0}, {"scale": 0.3}]),
)  # fmt: skip
def test_weights_are_those_of_the_matrix(seed: int, b: int, heads, t: int, size: float, options) -> None:
    h, g = heads
    amap, ids = make_map(seed, b, h, g, t, size, **options)
    assert causal.is_causal(amap)
    dense = amap.dense()
    first, previous, current = causal.near_weights(amap)
    assert torch.equal(first, dense[..., 0].clamp(max=1))
    assert torch.equal(current, dense.diagonal(0, -2, -1).clamp(max=1))
    assert torch.equal(previous[..., 1:], dense.diagonal(-1, -2, -1).clamp(max=1))
    assert not previous[..., 0].any()
    same, after, has_keys = causal.token_weights(amap, ids)
    earlier = (ids[:, :, None] == ids[:, None]).tril(-1)[:, None]  # [b, 1, t, t]
    assert torch.equal(has_keys, earlier.any(-1))
    following = earlier.roll(1, -1)  # no query has the last key before it
    for found, mask in ((same, earlier), (after, following)):
        torch.testing.assert_close(found, (dense * mask).sum(-1).clamp(max=1), rtol=BOUND, atol=BOUND)
    places = [torch.randint(n, (7,)) for n in (b, h, t)]
    assert torch.equal(causal.read_rows(amap, *places), dense[tuple(places)])


@fused
def test_scores_are_those_of_the_general_method() -> None:
    amap, ids = make_map(0, 3, 4, 2, 50)
    fast, slow = compute_causal_masses(amap, ids), compute_masses(amap, ids)
    assert fast.keys() == slow.keys()
    for name, (values, counted) in slow.items():
        torch.testing.assert_close(fast[name][0], values, rtol=BOUND, atol=BOUND)
        assert torch.equal(fast[name][1].expand_as(counted), counted)


def test_other_masks_are_not_causal() -> None:
    for mask in (None, Window(3), Causal() & Window(3), Causal() & Lengths(torch.tensor([4]))):
        assert not causal.is_causal(make_map(0, 1, 2, 2, 9, mask=mask)[0])
    q = torch.randn(1, 2, 9, 8)
    assert not causal.is_causal(attention_with_map(q[:, :, :4], q, q, mask=Causal())[1])
    assert not causal.is_causal(attention_with_map(q, q, q, mask=Causal(), offset=1)[1])


@pytest.mark.parametrize("masks", [(Causal(), Causal()), (Causal(), None), (None, Causal() & Window(3))])
def test_joined_layers_are_those_of_each_layer(masks) -> None:
    """Layers may have other numbers of heads, and other scores with keys."""
    maps: list[AttentionMap] = [
        make_map(n, 2, h, h, 20, mask=mask)[0] for n, (h, mask) in enumerate(zip((2, 3), masks, strict=True))
    ]
    ids = make_map(0, 2, 1, 1, 20)[1]
    parts = [measure(amap, ids) for amap in maps]
    whole = join(parts, [2, 3])
    for heads, part in zip((slice(0, 2), slice(2, 5)), parts, strict=True):
        for name, (values, counted) in whole.masses.items():
            counted = counted.expand_as(values)[:, heads]
            if name in part.masses:
                assert torch.equal(values[:, heads], part.masses[name][0])
                assert torch.equal(counted, part.masses[name][1].expand_as(counted))
            else:
                assert not counted.any()
        assert torch.equal(whole.received[:, heads], part.received)
        for all_heads, of_layer in ((whole.top[0], part.top[0]), (whole.top[1], part.top[1])):
            assert torch.equal(all_heads[:, heads], of_layer)
        for all_heads, of_layer in ((whole.by_query, part.by_query), (whole.by_key, part.by_key)):
            each = all_heads.expand(2, 5, -1)[:, heads]
            assert torch.equal(each, of_layer.expand_as(each))
