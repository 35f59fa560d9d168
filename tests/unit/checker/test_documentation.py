"""What documentation says about masks."""

from __future__ import annotations

import pytest

from manyheads.checker.candidates.documentation import read_mask


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("mask: (batch, 1, keys) for padding, or (batch or 1, queries, keys); 0 = blocked", True),
        ("mask: (B, 1, 1, S) bool tensor, True for padding tokens.", False),
        ("mask (Tensor, optional): shape (N, S). Positions with True are not allowed to attend.", False),
        ("mask (Tensor): [batch, seq] with 1 for tokens to attend to and 0 for padding tokens.", True),
        ("mask: (b, t, s) where True indicates that the element should take part in attention.", True),
        ("mask: bool (B, 1, T, past + T), True = blocked, on top of causality.", False),
        ("mask: padding mask (batch, keys); nonzero entries are masked out", False),
        ("mask: tensor of size (1, 1, q, k), False where attention is prohibited.", True),
        ("mask: (batch, seq_len), 1 = real token, 0 = pad.", True),
        ("mask: bool, True at positions that must not be seen", False),
        ("mask: (b, s), zeros are masked, ones are kept", True),
        ("mask: (b, s), valid positions are True", True),
        ("mask: bool mask, where masked positions are False", True),
        ("mask: (b, s), positions equal to 0 are filled with -inf", True),
        ("mask: True means do not attend", False),
        ("no token sees later ones; mask (b, s), True where\nattention is allowed, restricts it", True),
        ("mask: shape (b, 1, s) for padding masks or (1, t, s) for causal masks", None),
    ],
)
def test_documentation_says_which_keys_a_mask_keeps(text: str, keeps: bool | None) -> None:
    assert read_mask("mask", text).polarity is keeps


def test_the_last_axis_of_a_documented_shape_is_that_of_the_keys() -> None:
    assert read_mask("mask", "mask: (b, n), (B, T, T) or (t, b)").shapes == {"bs", "bts", "sb"}


@pytest.mark.parametrize("size", ["very", "large", "big", "huge"])
def test_a_mask_of_zeros_and_large_negative_numbers_is_added(size: str) -> None:
    text = f"mask: added to the scores: 0 where a token may look and a {size} negative number where not"
    assert read_mask("mask", text).is_additive
