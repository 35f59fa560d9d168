"""`patches`: the places of patches among tokens, found for models with random weights.

A model's table entry is true if changing one patch of the picture changes the key of one token of the first
layer, the one that `Patches.token` names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import manyheads
from manyheads import Patches, find_patches, measures, patches
from manyheads.viewer import looking
from manyheads.viewer.runs import ViewedRun
from tests.errors import raises

transformers = pytest.importorskip("transformers")

VISION = {"image_size": 24, "patch_size": 6, "hidden_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 32}  # fmt: skip
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 32, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0}  # fmt: skip
IMAGE = 50  # the id of image tokens


def changed_keys(model: nn.Module, inputs: dict[str, Any], pixels: Tensor, layer: str) -> list[int]:
    """Return the keys of the first layer of this name that other pixels change."""
    keys = []
    for values in (inputs["pixel_values"], pixels):
        with torch.no_grad(), manyheads.observe(model) as recording:
            model(**{**inputs, "pixel_values": values})
        name = next(name for name in recording if layer in name)
        keys.append(recording[name].problem.k)
    return ((keys[0] - keys[1]).abs().amax((0, 1, 3)) > 1e-6).nonzero().flatten().tolist()


def change_patch(pixels: Tensor, row: int, col: int, side: int) -> Tensor:
    changed = pixels.clone()
    changed[..., row * side : (row + 1) * side, col * side : (col + 1) * side] += 1
    return changed


# -- vision transformers -----------------------------------------------------------------------------

CLASS = ("class token",)
REGISTERS = (*CLASS, "register 1", "register 2", "register 3")
VISIBLE = {"initializer_range": 0.02}  # the default of BLIP-2, 1e-10, has no visible effect
RESIZED = {"interpolate_pos_encoding": True}
# The model, options of its configuration and of its call, and the tokens before the patches.
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "ViT": ("ViTModel", {}, RESIZED, CLASS),
    "DeiT": ("DeiTModel", {}, RESIZED, (*CLASS, "distillation token")),
    "ViTMSN": ("ViTMSNModel", {}, RESIZED, CLASS),
    "Dinov2": ("Dinov2Model", {}, {}, CLASS),
    "Dinov2WithRegisters": ("Dinov2WithRegistersModel", {"num_register_tokens": 3}, {}, REGISTERS),
    "DINOv3ViT": ("DINOv3ViTModel", {"num_register_tokens": 3}, {}, REGISTERS),
    "CLIPVision": ("CLIPVisionModel", {}, RESIZED, CLASS),
    "ChineseCLIPVision": ("ChineseCLIPVisionModel", {}, RESIZED, CLASS),
    "AltCLIPVision": ("AltCLIPVisionModel", {}, RESIZED, CLASS),
    "MetaClip2Vision": ("MetaClip2VisionModel", {}, RESIZED, CLASS),
    "OwlViTVision": ("OwlViTVisionModel", {}, RESIZED, CLASS),
    "SiglipVision": ("SiglipVisionModel", {}, RESIZED, ()),
    "IJepa": ("IJepaModel", {}, RESIZED, ()),
    "Beit": ("BeitModel", {}, {}, CLASS),
    "Data2VecVision": ("Data2VecVisionModel", {}, {}, CLASS),
    "MLCDVision": ("MLCDVisionModel", {}, {}, CLASS),
    "Blip2Vision": ("Blip2VisionModel", VISIBLE, RESIZED, CLASS),
    "InstructBlipVision": ("InstructBlipVisionModel", VISIBLE, RESIZED, CLASS),
    "Aimv2Vision": ("Aimv2VisionModel", {}, {}, ()),
    "Yolos": ("YolosModel", {"image_size": [24, 24]}, {}, CLASS),
    "InternVLVision": ("InternVLVisionModel", {"image_size": [24, 24], "patch_size": [6, 6]}, {}, CLASS),
}
SQUARE = ("Beit", "Data2VecVision", "MLCDVision", "Aimv2Vision", "Yolos", "InternVLVision")
COMMON = ("ViT", "Dinov2WithRegisters", "SiglipVision")  # in the default tests


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in COMMON else pytest.mark.full) for n in TOWERS]
)
def test_the_patches_of_a_vision_transformer_are_found(name: str) -> None:
    kind, options, call, special = TOWERS[name]
    config = getattr(transformers, f"{name}Config")(**{**VISION, **options})
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    pixels = torch.randn(1, 3, 24, 24 if name in SQUARE else 36)
    found = find_patches(model, pixels)
    assert (found.grid, found.special) == ((4, pixels.shape[-1] // 6), special)
    assert find_patches(model).grid == (4, 4)  # of the configuration
    inputs = {"pixel_values": pixels, **call}
    assert changed_keys(model, inputs, change_patch(pixels, 3, 1, 6), "") == [found.token(3, 1)]
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    assert recording.patches() == found
    assert recording[0].patches() == found


def test_siglip2_reads_the_sizes_of_its_pictures() -> None:
    config = transformers.Siglip2VisionConfig(**{**VISION, "num_patches": 16})
    model = transformers.Siglip2VisionModel(config).eval()
    shapes = torch.tensor([[2, 5], [3, 4]])
    pixels = torch.randn(2, 12, 108)
    mask = torch.arange(12) < shapes.prod(1)[:, None]
    inputs = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    assert [find_patches(model, inputs, batch=n).grid for n in range(2)] == [(2, 5), (3, 4)]
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    assert recording.patches(batch=1).grid == (3, 4)
    assert recording[0].only(batch=1).patches().grid == (3, 4)
    with raises(ValueError, "different places", "amap.only"):
        recording[0].image(0)


def test_clip_has_patches_in_its_picture_tower_only() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.CLIPModel(transformers.CLIPConfig(vision_config=VISION, text_config=text)).eval()
    pixels = torch.randn(1, 3, 24, 24)
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(input_ids=torch.randint(50, (1, 20)), pixel_values=pixels)
    assert recording.patches() == find_patches(model) == Patches((4, 4), 1, special=CLASS)
    with raises(ValueError, "Patches(grid=(rows, cols)"):
        recording.patches("text_model")


@pytest.mark.full
def test_timms_vision_transformers() -> None:
    timm = pytest.importorskip("timm")
    for name, options, special in (
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}, CLASS),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True, "reg_tokens": 3}, REGISTERS),
        ("vit_base_patch16_siglip_224", {"dynamic_img_size": True, "embed_dim": 48, "num_heads": 3}, ()),
        ("vit_base_patch16_dinov3", {"embed_dim": 48, "num_heads": 3}, (*REGISTERS, "register 4")),
        ("deit_tiny_distilled_patch16_224", {"dynamic_img_size": True}, (*CLASS, "distillation token")),
    ):
        torch.manual_seed(0)
        model = timm.create_model(name, depth=1, num_classes=0, **options).eval()
        pixels = torch.randn(1, 3, 64, 96)
        found = find_patches(model, pixels)
        assert (found.grid, found.special) == ((4, 6), special)
        keys = []
        for values in (pixels, change_patch(pixels, 3, 1, 16)):
            with torch.no_grad(), manyheads.observe(model) as recording:
                model(values)
            keys.append(recording[0].problem.k)
            assert recording.patches() == found
        different = (keys[0] - keys[1]).abs().amax((0, 1, 3)) > 1e-6
        assert different.nonzero().flatten().tolist() == [found.token(3, 1)]
    torchvision = pytest.importorskip("torchvision")
    other = torchvision.models.VisionTransformer(24, 6, 1, 2, 32, 32).eval()
    assert find_patches(other) == Patches((4, 4), 1, special=CLASS)
    pixels = torch.randn(1, 3, 24, 24)
    with torch.no_grad(), manyheads.observe(other) as recording:
        other(pixels)
    assert recording.patches() == find_patches(other)
    with raises(ValueError, "within windows"):
        find_patches(timm.create_model("swin_tiny_patch4_window7_224"))


# -- vision-language models --------------------------------------------------------------------------


def tower(kind: str, **options: Any) -> dict[str, Any]:
    return {"model_type": kind, **VISION, **options}


def text(kind: str, **options: Any) -> dict[str, Any]:
    return {"model_type": kind, **TEXT, **options}


def tokens(*counts: int, row_end: int | None = None) -> Tensor:
    """Return three tokens, rows of image tokens, and four tokens."""
    rows = [[IMAGE] * n + ([] if row_end is None else [row_end]) for n in counts]
    return torch.tensor([[3, 5, 6, *sum(rows, []), 4, 7, 8, 9]])


Case = tuple[nn.Module, dict[str, Any], Tensor, Patches, tuple[int, int]]


def llava(strategy: str, kind: str, count: int, first: int) -> Case:
    config = transformers.LlavaConfig(
        vision_config=tower(kind), text_config=text("llama"), image_token_index=IMAGE,
        vision_feature_layer=-1, vision_feature_select_strategy=strategy,
    )  # fmt: skip
    pixels = torch.randn(1, 3, 24, 24)
    inputs = {"input_ids": tokens(count), "pixel_values": pixels}
    changed = change_patch(pixels, 2, 1, 6)
    return transformers.LlavaForConditionalGeneration(config), inputs, changed, Patches((4, 4), first), (2, 1)


def tiles(name: str, kind: str, language: str) -> Case:
    """LLaVA-NeXT and LLaVA-OneVision: the whole picture, then its tiles with a token after each row."""
    config = getattr(transformers, f"{name}Config")(
        vision_config=tower(kind), text_config=text(language), image_token_index=IMAGE,
        vision_feature_layer=-1, image_grid_pinpoints=[[24, 48], [48, 24]],
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    pixels = torch.randn(1, 3, 3, 24, 24)
    changed = pixels.clone()
    changed[:, 0] = change_patch(pixels[:, 0], 2, 1, 6)
    inputs = {"input_ids": tokens(16 + 36), "pixel_values": pixels, "image_sizes": torch.tensor([[24, 48]])}
    return model, inputs, changed, Patches((4, 4), 3), (2, 1)


def paligemma() -> Case:
    config = transformers.PaliGemmaConfig(
        vision_config=tower("siglip_vision_model"), text_config=text("gemma", head_dim=16),
        image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    pixels = torch.randn(1, 3, 24, 24)
    inputs = {"input_ids": tokens(16), "pixel_values": pixels}
    model = transformers.PaliGemmaForConditionalGeneration(config)
    return model, inputs, change_patch(pixels, 2, 1, 6), Patches((4, 4), 3), (2, 1)


def gemma3() -> Case:
    config = transformers.Gemma3Config(
        vision_config=tower("siglip_vision_model"), text_config=text("gemma3_text", head_dim=16),
        image_token_index=IMAGE, boi_token_index=48, eoi_token_index=49, mm_tokens_per_image=4,
    )  # fmt: skip
    pixels, ids = torch.randn(1, 3, 24, 24), tokens(4)
    inputs = {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}
    model = transformers.Gemma3ForConditionalGeneration(config)
    return model, inputs, change_patch(pixels, 2, 1, 6), Patches((2, 2), 3), (1, 0)


def qwen(name: str, **vision: Any) -> Case:
    vision = {"depth": 1, "num_heads": 2, "patch_size": 6, "spatial_merge_size": 2, "hidden_size": 32,
              **vision}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config={**TEXT, "head_dim": 16, "rope_parameters": rope},
        image_token_id=IMAGE, video_token_id=51, vision_start_token_id=52, vision_end_token_id=53,
    )  # fmt: skip
    pixels, ids = torch.randn(32, 3 * 2 * 36), tokens(8)  # 4 × 8 patches, in blocks of 2 × 2
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]]),
              "mm_token_type_ids": (ids == IMAGE).long()}  # fmt: skip
    changed = pixels.clone()
    changed[(1 * 4 + 2) * 4 + 1] += 1  # a patch of the block in row 1, column 2
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, inputs, changed, Patches((2, 4), 3), (1, 2)


def pixtral(name: str, merge: int) -> Case:
    config = getattr(transformers, f"{name}Config")(
        vision_config=tower("pixtral", image_size=48), text_config=text("mistral", head_dim=16),
        image_token_index=IMAGE, vision_feature_layer=-1,
        **({"spatial_merge_size": 2} if merge == 2 else {"vision_feature_select_strategy": "full"}),
    )  # fmt: skip
    height, width = 12 * merge, 24 * merge
    pixels = torch.randn(1, 3, height, width)
    inputs = {"input_ids": tokens(4, 4, row_end=49), "pixel_values": pixels}
    inputs["image_sizes"] = torch.tensor([[height, width]])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, inputs, change_patch(pixels, merge, 2 * merge, 6), Patches((2, 4), 3, 5), (1, 2)


def internvl() -> Case:
    vision = {**VISION, "image_size": [24, 24], "patch_size": [6, 6]}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text("qwen2"), image_token_id=IMAGE, image_seq_length=4,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 24, 24)  # two tiles
    changed = pixels.clone()
    changed[0] = change_patch(pixels[0], 3, 0, 6)
    inputs = {"input_ids": tokens(4, 4), "pixel_values": pixels}
    model = transformers.InternVLForConditionalGeneration(config)
    return model, inputs, changed, Patches((2, 2), 3), (1, 0)


def idefics3(name: str) -> Case:
    config = getattr(transformers, f"{name}Config")(
        vision_config=VISION, text_config=text("llama"), image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )
    pixels = torch.randn(1, 2, 3, 24, 24)  # two tiles
    changed = pixels.clone()
    changed[0, 0] = change_patch(pixels[0, 0], 3, 0, 6)
    inputs = {"input_ids": tokens(4, 4, row_end=49), "pixel_values": pixels}
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, inputs, changed, Patches((2, 2), 3), (1, 0)


WIDE = {"out_hidden_size": 32, "intermediate_size": 32}
LANGUAGE: dict[str, Callable[[], Case]] = {
    "LLaVA": lambda: llava("default", "clip_vision_model", 16, 3),
    "LLaVA with its class token": lambda: llava("full", "clip_vision_model", 17, 4),
    "LLaVA with SigLIP": lambda: llava("full", "siglip_vision_model", 16, 3),
    "LLaVA with DINOv2": lambda: llava("default", "dinov2", 16, 3),
    "LLaVA-NeXT": lambda: tiles("LlavaNext", "clip_vision_model", "llama"),
    "LLaVA-OneVision": lambda: tiles("LlavaOnevision", "siglip_vision_model", "qwen2"),
    "PaliGemma": paligemma,
    "Gemma 3": gemma3,
    "Qwen2-VL": lambda: qwen("Qwen2VL", embed_dim=32, mlp_ratio=1),
    "Qwen2.5-VL": lambda: qwen("Qwen2_5_VL", window_size=24, fullatt_block_indexes=[0], **WIDE),
    "Qwen3-VL": lambda: qwen("Qwen3VL", deepstack_visual_indexes=[], num_position_embeddings=64, **WIDE),
    "Pixtral": lambda: pixtral("Llava", 1),
    "Mistral 3": lambda: pixtral("Mistral3", 2),
    "InternVL": internvl,
    "Idefics 3": lambda: idefics3("Idefics3"),
    "SmolVLM": lambda: idefics3("SmolVLM"),
}


MIXING = ("out_proj.weight", "o_proj.weight", "attn.proj.weight", "output.dense.weight",
          "projection_layer.weight")  # fmt: skip


def build(case: Callable[[], Case]) -> Case:
    """Return a case whose vision transformer passes on each patch without mixing patches."""
    torch.manual_seed(0)
    model, *others = case()
    for name, parameter in model.eval().named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
        mixes = name.endswith(MIXING)
        if mixes and ("vision" in name or "visual" in name):
            nn.init.zeros_(parameter)
    return (model, *others)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("LLaVA", "Qwen2.5-VL") else pytest.mark.full) for n in LANGUAGE],
)
def test_the_patches_in_the_sequence_of_a_language_model_are_found(name: str) -> None:
    model, inputs, changed, expected, at = build(LANGUAGE[name])
    language = "text_model" if name in ("Idefics 3", "SmolVLM") else "language_model"
    assert find_patches(model, inputs) == expected
    assert changed_keys(model, inputs, changed, language) == [expected.token(*at)]
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    assert recording.patches() == recording.patches(language) == expected
    vision = next(n for n in recording if "vis" in n)
    if name == "Qwen2.5-VL":
        with raises(ValueError, "windows"):
            recording.patches(vision)
    else:
        found = recording.patches(vision)
        assert found == find_patches(
            model.get_submodule(
                vision.partition(".layers")[0]
                .partition(".blocks")[0]
                .partition(".encoder")[0]
                .partition(".transformer")[0]
            ),
            inputs,
        )
        assert found.stop == recording[vision].shape[3]


QFORMER = {**VISION, "encoder_hidden_size": 32, "vocab_size": 60, "num_hidden_layers": 2}
OPT = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
       "ffn_dim": 32, "vocab_size": 60, "word_embed_proj_dim": 32, "pad_token_id": 0}  # fmt: skip


def blip(name: str, **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = getattr(transformers, f"{name}Config")(
        vision_config={**VISION, **VISIBLE}, qformer_config=QFORMER, text_config=OPT, num_query_tokens=20,
        image_token_index=IMAGE,
    )  # fmt: skip
    pixels = torch.randn(1, 3, 24, 24)
    inputs = {"pixel_values": pixels, "input_ids": torch.tensor([[*[IMAGE] * 20, 4, 5]]), **more}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval(), inputs


def idefics2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Idefics2Config(
        vision_config=VISION, text_config=text("mistral"), image_token_id=IMAGE,
        perceiver_config={"hidden_size": 32, "resampler_n_latents": 5, "resampler_depth": 1,
                          "resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 2},
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(1, 1, 3, 24, 24), "input_ids": tokens(5)}
    return transformers.Idefics2ForConditionalGeneration(config).eval(), inputs


RESAMPLED: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], str, int]] = {
    "BLIP-2": (lambda: blip("Blip2"), "crossattention", 20),
    "InstructBLIP": (
        lambda: blip("InstructBlip", qformer_input_ids=torch.tensor([[4, 5]])), "crossattention", 20
    ),
    "Idefics 2": (idefics2, "perceiver_resampler", 5),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", RESAMPLED)
def test_the_patches_that_a_resampler_reads_are_found(name: str) -> None:
    """Its language model has none; the error says where they are."""
    case, part, count = RESAMPLED[name]
    torch.manual_seed(0)
    model, inputs = case()
    vision = next(module for path, module in model.named_modules() if path.endswith("vision_model"))
    for path, parameter in vision.named_parameters():
        if path.endswith(("self_attn.projection.weight", "self_attn.out_proj.weight")):
            nn.init.zeros_(parameter)  # so that patches aren't mixed
    with raises(ValueError, part, "Patches(grid"):
        find_patches(model, inputs)
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    found = recording.patches()
    assert (found.grid, found.special) == ((4, 4), ())
    layer = next(n for n in recording if part in n)
    assert recording.patches(layer) == found
    changed = change_patch(inputs["pixel_values"], 2, 1, 6)
    assert changed_keys(model, inputs, changed, part) == [found.token(2, 1)]
    with raises(ValueError, part):
        recording.patches(-1)  # the language model
    figure = recording.overlay(torch.rand(3, 24, 24), count - 1)
    assert layer in figure.get_suptitle()
    with raises(ValueError, f"{count} queries of its own", f"0 to {count - 1}"):
        recording.overlay(torch.rand(3, 24, 24), (0, 0))
    with raises(ValueError, "class token"):
        recording.overlay(torch.rand(3, 24, 24))
    given = recording.overlay(torch.rand(3, 24, 24), -1, layer=-1, patches=Patches((1, 3)))
    assert len(given.axes) >= 2
    with raises(TypeError, "patches to be Patches, got"):
        recording.overlay(torch.rand(3, 24, 24), -1, layer=-1, patches=(1, 3))


@pytest.mark.full
def test_pixtral_joins_pictures_to_a_sequence() -> None:
    torch.manual_seed(0)
    vision = transformers.PixtralVisionConfig(**{**VISION, "image_size": 48, "head_dim": 16})
    model = transformers.PixtralVisionModel(vision).eval()
    pixels, sizes = torch.randn(2, 3, 24, 24), torch.tensor([[12, 24], [24, 18]])
    inputs = {"pixel_values": pixels, "image_sizes": sizes}
    places = [Patches((2, 4)), Patches((4, 3), 8)]
    assert [find_patches(model, inputs, picture=n) for n in range(2)] == places
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    assert [recording.patches(picture=n) for n in range(2)] == places
    changed = pixels.clone()
    changed[1] = change_patch(pixels[1], 3, 1, 6)
    assert changed_keys(model, inputs, changed, "") == [places[1].token(3, 1)]


@pytest.mark.full
def test_qwens_vision_transformer_has_a_call_for_each_picture(tmp_path: Path) -> None:
    """A number selects the call of a picture or frame in the last run, also after saving."""
    model, inputs, _, _, _ = build(LANGUAGE["Qwen2-VL"])
    visual, pixels = model.model.visual, inputs["pixel_values"]
    grids = torch.tensor([[1, 4, 4], [1, 2, 8]])
    with torch.no_grad(), manyheads.observe(visual) as recording:
        visual(pixels, grid_thw=grids)
    [layer] = recording
    recording.save(tmp_path / "run.safetensors")
    for each in (recording, manyheads.open_run(tmp_path / "run.safetensors")):
        assert [each.patches(picture=n) for n in (0, 1, -1)] == [
            Patches((4, 4), merge=2), *[Patches((2, 8), merge=2)] * 2
        ]  # fmt: skip
        for n, call in enumerate(each.calls(layer)):
            share = measures.rollout_mean([call], slice(None))[:, each.patches(picture=n).keys]
            assert torch.equal(each.rollout_image(number=n).flatten(1), share)
        viewed = ViewedRun.of(each)
        looking.set_picture([viewed], torch.rand(3, 8, 32))
        shown = [looking.describe_patches(viewed, one.map, 0, 0) for one in viewed.layers]
        assert [one and bool(one["src"]) for one in shown] == [True, False]  # only beside its own patches
        with raises(IndexError, "has read 2 pictures. Use 0 to 1."):
            each.overlay(torch.rand(3, 8, 32), 3, number=2)
    figure = recording.overlay(torch.rand(3, 8, 32), (1, 5), number=1)
    second = recording.calls(layer)[1].image(Patches((2, 8), merge=2).token(1, 5))[0, 0]
    drawn = np.asarray(figure.axes[1].get_images()[-1].get_array())
    np.testing.assert_allclose(drawn, second.numpy(), atol=1e-7)
    with torch.no_grad(), manyheads.observe(visual) as several:
        visual(pixels[:16], grid_thw=grids[:1])
        visual(pixels, grid_thw=torch.tensor([[2, 4, 4]]))  # two frames of a video
        visual(pixels, grid_thw=grids)
    assert several.patches(picture=1).grid == (2, 8)
    assert len(several.calls(layer)) == 5
    calls = recording.calls(layer)
    assert [call.shape[2:] for call in calls] == [(16, 16), (16, 16)]
    second = Patches((2, 8), merge=2)
    changed = pixels.clone()
    changed[16 + 2] += 1  # the third patch of the first block: row 1, column 0
    with torch.no_grad(), manyheads.observe(visual) as other:
        visual(changed, grid_thw=grids)
    difference = (calls[1].problem.k - other.calls(layer)[1].problem.k).abs().amax((0, 1, 3))
    assert (difference > 1e-6).nonzero().flatten().tolist() == [second.token(1, 0)]
    assert calls[1].image(0, second).shape == (1, 2, 2, 8)


@pytest.mark.full
def test_the_frames_of_llava_onevisions_videos_are_pictures() -> None:
    model, inputs, _, _, _ = build(LANGUAGE["LLaVA-OneVision"])
    video = model.config.video_token_id = 51
    ids = torch.tensor([[3, *[video] * (3 * 4 + 1), 7, *[IMAGE] * (16 + 36), 4]])  # 3 frames of 2 × 2
    clip = torch.randn(1, 3, 3, 24, 24)
    inputs = {**inputs, "input_ids": ids, "pixel_values_videos": clip}
    places = [*(Patches((2, 2), 1 + 4 * n) for n in range(3)), Patches((4, 4), 15)]
    assert [find_patches(model, inputs, picture=n) for n in range(4)] == places
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    assert [recording.patches("language_model", picture=n) for n in range(4)] == places
    changed = clip.clone()
    changed[0, 2, :, 12:18, 0:6] += 1  # a patch of row 1, column 0 of the third frame, after pooling
    with torch.no_grad(), manyheads.observe(model) as other:
        model(**{**inputs, "pixel_values_videos": changed})
    layer = next(name for name in recording if "language_model" in name)
    difference = (recording[layer].problem.k - other[layer].problem.k).abs().amax((0, 1, 3))
    assert (difference > 1e-6).nonzero().flatten().tolist() == [places[2].token(1, 0)]
    only = {key: value for key, value in inputs.items() if key not in ("pixel_values", "image_sizes")}
    only["input_ids"] = ids[:, :15]
    assert find_patches(model, only, picture=1) == places[1]


def test_the_vision_transformer_of_qwen3_has_blocks_of_patches() -> None:
    """The processor's order of pixels, in which the tokens are too."""
    model, inputs, _, _, _ = build(LANGUAGE["Qwen3-VL"])
    found = find_patches(model.model.visual, inputs)
    assert found == Patches((4, 8), merge=2)
    # Row 3, column 6: the second row of block (1, 3), its first column.
    assert found.token(3, 6) == (1 * 4 + 3) * 4 + 2
    frames = {**inputs, "image_grid_thw": torch.tensor([[1, 4, 4], [2, 2, 4]])}
    found = [find_patches(model.model.visual, frames, picture=n).grid for n in range(3)]
    assert found == [(4, 4), (2, 4), (2, 4)]


def test_sequences_with_padding_and_several_pictures() -> None:
    model, inputs, _, _, _ = build(LANGUAGE["LLaVA"])
    picture, end = [IMAGE] * 16, [4, 4]
    ids = torch.tensor([[0] * 17 + [3, *picture, *end], [3, *picture, 7, *picture, *end]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 24, 24), "attention_mask": (ids > 0).long()}
    places = [(0, 0, 18), (1, 0, 1), (1, 1, 18)]
    for batch, picture_number, first in places:
        assert find_patches(model, inputs, batch=batch, picture=picture_number).first == first
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    for batch, picture_number, first in places:
        assert recording.patches(batch=batch, picture=picture_number).first == first
    with raises(IndexError, "There is no picture 1: sequence 0 has 1"):
        recording.patches(picture=1)
    with raises(IndexError, "There is no batch entry 2"):
        recording.patches(batch=2)
    torch.testing.assert_close(
        recording[-1].only(batch=1).image(-1), recording[-1][1:, :, -1, 1:17].unflatten(-1, (4, 4))
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL"])
def test_pictures_and_frames_of_a_video_in_one_sequence(name: str) -> None:
    """A changed patch of the second picture, or of the second frame, changes the key of its token."""
    model, inputs, _, _, _ = build(LANGUAGE[name])
    video = [51] * 4
    frames = [52, *video, 53, 4, 52, *video, 53] if name == "Qwen3-VL" else [52, *video, *video, 53]
    ids = torch.tensor([[3, 52, *[IMAGE] * 4, 53, 4, *frames, 52, *[IMAGE] * 8, 53, 7, 9]])
    pictures, clip = torch.randn(16 + 32, 216), torch.randn(2 * 16, 216)
    inputs = {
        "input_ids": ids, "pixel_values": pictures, "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        "pixel_values_videos": clip, "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == 51).long(),
    }  # fmt: skip
    second = 13 if name == "Qwen2-VL" else 16  # the first token of the second frame
    last = ids.shape[1] - 11
    places = [Patches((2, 2), 2), Patches((2, 2), 9), Patches((2, 2), second), Patches((2, 4), last)]
    assert [find_patches(model, inputs, picture=n) for n in range(4)] == places
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    assert [recording.patches("language_model", picture=n) for n in range(4)] == places
    changed = pictures.clone()
    changed[16 + (1 * 4 + 2) * 4 + 1] += 1  # of the block in row 1, column 2 of the second picture
    assert changed_keys(model, inputs, changed, "language_model") == [places[3].token(1, 2)]
    with torch.no_grad(), manyheads.observe(model) as other:
        clip[16 + 2 * 4 + 3] += 1  # of the block in row 1, column 0 of the second frame
        model(**inputs)
    layer = next(name for name in recording if "language_model" in name)
    difference = (recording[layer].problem.k - other[layer].problem.k).abs().amax((0, 1, 3))
    assert (difference > 1e-6).nonzero().flatten().tolist() == [places[2].token(1, 0)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["LLaVA-NeXT", "LLaVA-OneVision"])
def test_pictures_with_tiles_in_one_sequence(name: str) -> None:
    model, inputs, _, _, _ = build(LANGUAGE[name])
    count = 16 + 36
    ids = torch.tensor([[3, *[IMAGE] * count, 4, *[IMAGE] * count, 7]])
    pixels = torch.randn(2, 3, 3, 24, 24)
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[24, 48], [24, 48]])}
    changed = pixels.clone()
    changed[1, 0] = change_patch(pixels[1, 0], 2, 1, 6)
    second = Patches((4, 4), 2 + count)
    assert [find_patches(model, inputs, picture=n) for n in range(2)] == [Patches((4, 4), 1), second]
    assert changed_keys(model, inputs, changed, "language_model") == [second.token(2, 1)]
    joined = torch.tensor([[3, *[IMAGE] * count, *[IMAGE] * count, 4, 7]])
    with raises(ValueError, "text between the pictures", "2 pictures and 1 sequences", "Patches(grid"):
        find_patches(model, {**inputs, "input_ids": joined})


def test_a_generation_keeps_the_patches_of_its_prompt_and_a_new_text_has_none() -> None:
    model, inputs, _, expected, _ = build(LANGUAGE["LLaVA"])
    with torch.no_grad(), manyheads.observe(model) as recording:
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert recording[-1].shape[2] == recording[-1].shape[3] == 25
    assert recording.patches() == expected
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
        model(input_ids=torch.full((1, 30), 4))
    with raises(ValueError, "aren't known"):
        recording.patches(-1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pixel_values": None}, ()),
        ({"input_ids": None}, ("input_ids",)),
        ({"input_ids": tokens(15)}, ("Expected 16 image tokens (id 50)", "got 15", "processor")),
        ({"input_ids": tokens(1)}, ("got 1",)),
    ],
)
def test_inputs_that_are_missing_or_do_not_fit_are_named(change: dict, words: tuple[str, ...]) -> None:
    model, inputs, _, expected, _ = build(LANGUAGE["LLaVA"])
    if not words:  # the size of the configuration
        assert find_patches(model, {**inputs, **change}) == expected
        return
    with raises(ValueError, *words):
        find_patches(model, {**inputs, **change})


def test_the_sizes_of_qwens_pictures_are_needed() -> None:
    model, inputs, _, _, _ = build(LANGUAGE["Qwen2.5-VL"])
    with raises(ValueError, "image_grid_thw"):
        find_patches(model, {**inputs, "image_grid_thw": None})
    with raises(ValueError, "got none for the last 8", "Patches(grid"):
        find_patches(model, {**inputs, "input_ids": tokens(16)})


def test_models_without_a_grid_say_why() -> None:
    config = transformers.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1],
                                     num_heads=[2, 2], window_size=4)  # fmt: skip
    model = transformers.SwinModel(config).eval()
    with raises(ValueError, "SwinModel", "windows", "grid="):
        find_patches(model)
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(torch.randn(1, 3, 32, 32))
    with raises(ValueError, "windows"):
        recording.patches()
    assert recording[0].image(0, grid=(4, 4)).shape == (16, 2, 4, 4)  # a window for each batch entry
    with raises(ValueError, "isn't a known model", "Patches(grid=(rows, cols), first="):
        find_patches(nn.Linear(2, 2))
    bert = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with raises(ValueError, "BertModel isn't a known model"):
        find_patches(transformers.BertModel(bert))
    with raises(TypeError, "a str"):
        find_patches("vit")  # type: ignore[arg-type]
    with raises(TypeError, "a list"):
        find_patches(model, [1])


# -- the value ---------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_tokens_and_places_are_inverse(rows: int, cols: int, first: int, more: int, blocks: bool) -> None:
    grid = (2 * rows, 2 * cols) if blocks else (rows, cols)
    found = Patches(grid, first, None if blocks else cols + more, 2 if blocks else 1)
    keys = found.keys.tolist()
    assert len({*keys}) == len(keys) == grid[0] * grid[1]
    assert min(keys) == first
    assert found.stop == max(keys) + 1
    for n, key in enumerate(keys):
        place = divmod(n, grid[1])
        assert found.token(*place) == key
        assert found.place(key) == place
    assert found.place(first - 1) is None
    assert patches.unpack(patches.pack([[found]])) == [[found]]


def test_the_labels_of_tokens() -> None:
    found = Patches((2, 2), 2, special=("class token", "register 1"))
    assert found.labels(7) == ["class token", "register 1", "0,0", "0,1", "1,0", "1,1", "6"]
    assert (found.class_token, found.registers) == (0, (1,))
    assert Patches((1, 1)).class_token is None
    assert Patches((1, 2), 1).labels(["a", "x", "x", "b"]) == ["a", "0,0", "0,1", "b"]
    with raises(ValueError, "at least 6 tokens", "got 3"):
        found.labels(3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"grid": 4}, TypeError, ("(rows, cols)", "got 4")),
        ({"grid": (2, 0)}, ValueError, ("columns", "got 0")),
        ({"grid": (2.0, 2)}, TypeError, ("2.0",)),
        ({"grid": (2, 2), "first": -1}, ValueError, ("first", "-1")),
        ({"grid": (2, 3), "stride": 2}, ValueError, ("stride", "at least 3")),
        ({"grid": (3, 2), "merge": 2}, ValueError, ("2 × 2", "(3, 2)")),
        ({"grid": (2, 2), "special": "class token"}, TypeError, ("names",)),
        ({"grid": (2, 2), "special": ("class token",)}, ValueError, ("first=0",)),
    ],
)
def test_patches_that_do_not_exist_raise(arguments: dict, error: Any, words: tuple[str, ...]) -> None:
    with raises(error, *words):
        Patches(**arguments)


def test_a_patch_that_does_not_exist_raises() -> None:
    assert Patches((2, 3)).token(-1, -1) == 5
    for place in ((2, 0), (0, 3), (-3, 0)):
        with raises(IndexError, "2 × 3 patches"):
            Patches((2, 3)).token(*place)
    with raises(TypeError, "row"):
        Patches((2, 3)).token(True, 0)
