"""Diffusion models of diffusers, built from configurations with random weights: words over the picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyheads import observe
from tests.observed import raises

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.full


def unet() -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=16,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 4, 16, 12), "encoder_hidden_states": torch.randn(2, 7, 16)}


def added() -> tuple[Any, dict[str, Any]]:
    """A U-Net as DeepFloyd's, whose keys are those of the text and then those of the picture."""
    model = diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"), attention_head_dim=8,
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", cross_attention_dim=16,
        up_block_types=("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 4, 16, 12), "encoder_hidden_states": torch.randn(2, 7, 16)}


def pixart() -> tuple[Any, dict[str, Any]]:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, out_channels=8, num_layers=2, cross_attention_dim=32,
        sample_size=16, patch_size=2, caption_channels=24,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 12),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sd3() -> tuple[Any, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=64, out_channels=4,
        pos_embed_max_size=16, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 12),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 64),
    }


def flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 48, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "img_ids": torch.randn(48, 3),
        "txt_ids": torch.randn(7, 3),
    }


# The names of the layers that attend to text, the queries and keys of picture and text, and the grids.
ALL = slice(None)
MODELS: dict[Any, Any] = {
    unet: (("attn2",), ALL, ALL, {192: (16, 12), 48: (8, 6)}),
    added: (("0", "1"), ALL, slice(0, 7), {192: (16, 12), 48: (8, 6)}),
    pixart: (("attn2",), ALL, ALL, {48: (8, 6)}),
    sd3: (("attn",), slice(0, 48), slice(48, None), {55: (8, 6)}),
    flux: (("attn",), slice(7, None), slice(0, 7), {55: (8, 6)}),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_images_are_means_of_the_maps(make: Any) -> None:
    """Of all layers and three steps; a U-Net's coarser layers are interpolated."""
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    names, queries, keys, grids = MODELS[make]
    keep = {"words": (8, 6)} if make is flux else "words"
    with torch.no_grad(), observe(model) as maps, observe(model, keep=keep) as recording:
        for step in (900, 500, 100):
            model(**inputs, timestep=torch.tensor([step, step], dtype=torch.float32))
    rows, cols = max(grids.values())
    layers = []
    for name in maps:
        if name.split(".")[-1] not in names:
            continue
        calls = maps.calls(name)
        assert len(calls) == 3
        weights = torch.stack([amap[1].mean(0) for amap in calls]).mean(0)[queries, keys]
        image = weights.mT.unflatten(1, grids[calls[0].shape[2]])[None]
        layers.append(
            torch.nn.functional.interpolate(image, size=(rows, cols), mode="bilinear", align_corners=False)[0]
        )
    images = recording.word_images(batch=1).images
    assert len(recording.words.sums) == len(layers) > 0
    torch.testing.assert_close(images, torch.stack(layers).mean(0), atol=1e-6, rtol=1e-4)
    if make is pixart:
        assert float(images[5:].abs().max()) == 0.0  # padding


def test_packed_pictures_need_their_size() -> None:
    model, inputs = flux()
    with torch.no_grad(), observe(model.eval(), keep="words") as recording:
        model(**inputs, timestep=torch.tensor([1.0, 1.0]))
    with raises(ValueError, "picture's size isn't known … keep={\"words\": (rows, cols)}"):
        recording.word_images()
