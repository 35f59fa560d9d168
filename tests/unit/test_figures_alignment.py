"""Figures of alignments: the path over the weights, axes in seconds or labels, long sequences, errors."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from manyheads import figures
from manyheads.alignment import Alignment
from tests.unit.test_alignment import planted, recording_of

STARTS = [0, 10, 30]


def aligned(s: int = 50, tokens: Any = ("the", "train", "left"), **options: Any) -> Alignment:
    scores = planted(STARTS, s, noise=0.5, h=2)
    return recording_of(scores).align([(0, 0), (0, 1)], tokens=tokens, **options)


def drawn(figure: Figure) -> Any:
    """Draw a figure, and return its first axes."""
    figure.savefig(BytesIO(), format="png")
    return figure.axes[0]


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_majorticklabels()]


def test_the_path_is_drawn_over_the_mean_weights_with_seconds() -> None:
    alignment = aligned(seconds=0.02)
    axes = drawn(figures.alignment(alignment, title="Words"))
    image = axes.get_images()[0]
    np.testing.assert_allclose(image.get_array(), alignment.pooled(3, 50).numpy(), rtol=1e-6)
    [line] = axes.get_lines()
    assert np.array_equal(np.stack(line.get_data(), 1), alignment.path.flip(1).numpy())
    assert labels(axes.yaxis) == ["the", "train", "left"]
    assert labels(axes.xaxis)[0] == "0.0"
    # Key n starts at n · 0.02 s, half a key left of its center.
    for position, label in zip(axes.get_xticks(), labels(axes.xaxis), strict=True):
        assert float(label) == pytest.approx((position + 0.5) * 0.02)
    assert axes.get_xlabel() == "time (s)"
    assert axes.get_title() == "Words"
    assert "mean weight of 2 heads" in axes.figure.axes[1].get_ylabel()


def test_seconds_count_from_the_first_aligned_key() -> None:
    axes = drawn(figures.alignment(aligned(keys=slice(10, 50), seconds=0.1)))
    for position, label in zip(axes.get_xticks(), labels(axes.xaxis), strict=True):
        assert float(label) == pytest.approx((position + 10.5) * 0.1)


@pytest.mark.parametrize("keys", [None, [f"word{n}" for n in range(50)]])
def test_the_largest_weights_are_marked_on_labelled_keys(keys: list[str] | None) -> None:
    alignment = aligned()
    axes = drawn(figures.alignment(alignment, keys=keys, mark="largest"))
    [dots] = axes.collections
    assert dots.get_offsets()[:, 0].tolist() == alignment.largest().tolist()
    assert not axes.get_lines()
    assert ("word0" in " ".join(labels(axes.xaxis))) == (keys is not None)


def test_left_out_keys_have_their_positions() -> None:
    chosen = [0, 1, 2, 12, 13, 35, 36]
    axes = drawn(figures.alignment(aligned(keys=chosen, median_filter=1), mark=None))
    assert labels(axes.xaxis) == [str(n) for n in chosen]
    assert not axes.get_lines()


def test_long_sequences_are_pooled() -> None:
    figure = figures.alignment(aligned(s=5000, seconds=0.02))
    axes = drawn(figure)
    assert axes.get_images()[0].get_array().shape[1] < 1000
    assert axes.get_xlim() == (-0.5, 4999.5)
    assert "in each cell" in figure.axes[1].get_ylabel().replace("\n", " ")


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="Expected the Alignment of"):
        figures.alignment(torch.zeros(3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keys to be 50 labels, one for each aligned key, got 2"):
        figures.alignment(aligned(), keys=["a", "b"])
    with pytest.raises(ValueError, match='mark to be "path", "largest" or None'):
        figures.alignment(aligned(), mark="dots")
