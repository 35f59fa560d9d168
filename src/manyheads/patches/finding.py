"""Find the patches of a picture from a model's configuration and inputs.

To add a model of transformers, add it to `SPECIAL` (vision transformers) or to `_language_grids`, and to the
table of models in `tests/unit/test_patches.py`, which changes a patch of the picture and compares keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.patches.places import CLASS, GIVE, Located, Patches, select
from manyheads.shapes import can_read, kind

DISTILLATION = "distillation token"


def find_patches(model: nn.Module, inputs: Any = None, *, batch: int = 0, picture: int = 0) -> Patches:
    """Return where the patches of a picture are among a model's tokens, from its configuration.

    Vision transformers of transformers (ViT, DeiT, BEiT, DINOv2 with or without registers, DINOv3, CLIP,
    SigLIP, I-JEPA, …), of timm and of torchvision, and vision-language models of transformers (LLaVA,
    Qwen-VL, InternVL, SmolVLM, PaliGemma, Gemma 3, Pixtral, …), for which it returns the patches in the
    sequence of the language model. A frame of a video (Qwen-VL, LLaVA-OneVision), and a tile of InternVL,
    Idefics 3 or SmolVLM, counts as a picture. For their vision part, pass that part, such as
    `model.vision_tower`. A recording of `observe` finds the patches of each layer itself:
    `recording.patches()`.

    Args:
        model: The model.
        inputs: The model's inputs, as the processor returns them, or the tensor of pixels `[b, 3, h, w]`. A
            vision transformer needs them only for pictures of another size than the configuration's.
        batch: The batch entry.
        picture: The number of the picture in the sequence.

    Returns:
        The patches.

    Raises:
        TypeError: If the model isn't a module.
        ValueError: If the model isn't known, its tokens aren't patches of a grid, or inputs are missing. The
            message says what to give.
        IndexError: If there is no such batch entry or picture.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a model, a torch.nn.Module, got {kind(model)}.")
    if isinstance(inputs, Tensor):
        inputs = {"pixel_values": inputs}
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"Expected inputs to be the model's inputs by name, or pixels, got {kind(inputs)}.")
    found = locate(model, Inputs.of(inputs or {}))
    if found is None:
        raise ValueError(f"{_name(model)} isn't a known model of pictures. {GIVE}")
    return select(found, batch, picture)


class Inputs(NamedTuple):
    """What the places of patches depend on, of a model's inputs."""

    pixels: tuple[int, ...] | None = None  # the shape of the pixels, [b, 3, h, w]
    ids: Tensor | None = None  # the tokens, [b, s]
    grids: list[list[int]] | None = None  # (frames, rows, columns) of each picture (Qwen-VL), before merging
    heights: list[list[int]] | None = None  # (height, width) of each picture (Pixtral, LLaVA-NeXT)
    earlier: int = 0  # the number of tokens in the cache of keys
    has_video: bool = False
    frames: list[list[int]] | None = None  # the same of each video
    clips: tuple[int, ...] | None = None  # the shape of the pixels of videos, [b, frames, 3, h, w]

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Inputs:
        """Return the sizes of a model's inputs, which are given by name."""

        def read(*names: str) -> Any:
            return next((inputs[name] for name in names if inputs.get(name) is not None), None)

        pixels, ids = read("pixel_values", "x", "pixels"), read("input_ids")
        grids, heights = read("image_grid_thw", "grid_thw"), read("image_sizes", "spatial_shapes")
        cache, clips = read("past_key_values"), read("pixel_values_videos")
        earlier = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        return cls(
            tuple(pixels.shape) if isinstance(pixels, Tensor) else None,
            ids if isinstance(ids, Tensor) and ids.dim() == 2 else None,
            _to_list(grids),
            _to_list(heights),
            int(earlier),
            read("pixel_values_videos", "video_grid_thw") is not None,
            _to_list(read("video_grid_thw")),
            tuple(clips.shape) if isinstance(clips, Tensor) else None,
        )


def _to_list(numbers: Any) -> list[list[int]] | None:
    if isinstance(numbers, Tensor):
        return numbers.tolist() if can_read(numbers) and numbers.dim() == 2 else None
    return None if numbers is None else [list(map(int, each)) for each in numbers]


def read_parameters(module: nn.Module) -> list[str] | None:
    """Return the names of a module's inputs, None if it doesn't read pictures as far as these say."""
    if _is_timm(module) or _is_torchvision(module):
        return ["x"]
    if not isinstance(getattr(getattr(module, "config", None), "model_type", None), str):
        return None
    try:
        names = list(signature(module.forward).parameters)
    except (TypeError, ValueError):  # it isn't written in Python
        return None
    return names if {"pixel_values", "grid_thw"} & {*names} else None


def find_readers(vision: str, model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the attention modules that read the patches of a vision transformer as keys.

    Args:
        vision: The path of the vision transformer in a larger model.
        model: The vision transformer.
        names: The paths of all modules.

    Returns:
        The paths of the resampler's attention modules, empty for models without one.
    """
    part = RESAMPLERS.get(getattr(getattr(model, "config", None), "model_type", ""))
    if part is None:
        return []
    parent = vision.rpartition(".")[0]
    return [
        name
        for name in names
        if name.startswith(parent)
        and part in name.split(".")
        and name.endswith((".crossattention", ".self_attn"))
    ]


def locate(model: nn.Module, inputs: Inputs, towers: bool = True) -> Located | None:
    """Return the patches of each picture of each batch entry.

    Args:
        model: The model.
        inputs: Its inputs.
        towers: Whether to return the patches of a model's picture tower if it has one tower for pictures and
            one for texts, as CLIP.

    Returns:
        The patches, None if the module isn't a known model of pictures.

    Raises:
        ValueError: If it is one, but its tokens aren't patches of a grid, or inputs are missing.
    """
    try:
        return _locate(model, inputs, towers)
    except (AttributeError, KeyError, TypeError, IndexError) as error:  # an unusual configuration or input
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"The configuration of {_name(model)} can't be read ({reason}). {GIVE}") from error


def _locate(model: nn.Module, inputs: Inputs, towers: bool) -> Located | None:
    if _is_timm(model):
        return [[_timm_patches(model, inputs)]]
    if _is_torchvision(model):
        patch, picture = _pair(model.patch_size), _pair(model.image_size)
        grid = picture[0] // patch[0], picture[1] // patch[1]
        return [[_whole_grid(grid, (CLASS,), picture, patch)]]
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if config is None or not isinstance(family, str):
        return None
    if family == "timm_wrapper":
        return [[_timm_patches(model.timm_model, inputs)]] if hasattr(model, "timm_model") else None
    if family in WITHOUT_GRID:
        reason = WITHOUT_GRID[family].removesuffix(".")
        raise ValueError(f"The patches of {_name(model)} aren't known: {reason}. {GIVE}")
    if family in BLOCKS:
        return [_frame_patches(model, config, inputs)]
    if family == "pixtral":
        return [_pixtral_patches(model, config, inputs)]
    if family == "siglip2_vision_model":
        if inputs.heights is None:
            raise ValueError(
                "The sizes of the pictures are in spatial_shapes: give all inputs of the processor, "
                "find_patches(model, inputs)."
            )
        return [[Patches((rows, cols))] for rows, cols in inputs.heights]
    if family in SPECIAL:
        return _vision_patches(config, inputs)
    if _image_token(config) is not None and getattr(config, "vision_config", None) is not None:
        return _language_patches(model, config, inputs)
    if getattr(config, "vision_config", None) is not None and towers:
        vision = config.vision_config
        return _vision_patches(vision, inputs) if getattr(vision, "model_type", None) in SPECIAL else None
    return None


def _name(model: nn.Module) -> str:
    return type(model).__name__


# -- vision transformers -----------------------------------------------------------------------------


def _class(config: Any) -> tuple[str, ...]:
    return (CLASS,)


def _class_if_configured(config: Any) -> tuple[str, ...]:
    return (CLASS,) if getattr(config, "use_cls_token", True) else ()


def _registers(config: Any) -> tuple[str, ...]:
    return (CLASS, *(f"register {n + 1}" for n in range(config.num_register_tokens)))


def _none(config: Any) -> tuple[str, ...]:
    return ()


# The tokens before the patches, by the model_type of the configuration.
SPECIAL: dict[str, Callable[[Any], tuple[str, ...]]] = {
    **dict.fromkeys(
        ("vit", "vit_msn", "beit", "data2vec-vision", "dinov2", "yolos", "clip_vision_model",
         "chinese_clip_vision_model", "altclip_vision_model", "metaclip_2_vision_model", "mlcd_vision_model",
         "owlvit_vision_model", "owlv2_vision_model", "internvl_vision",
         "blip_vision_model", "blip_2_vision_model", "instructblip_vision_model"),
        _class,
    ),
    "deit": lambda config: (CLASS, DISTILLATION),
    "dinov2_with_registers": _registers,
    "dinov3_vit": _registers,
    **dict.fromkeys(
        ("siglip_vision_model", "ijepa", "aimv2_vision_model", "idefics2_vision", "idefics3_vision",
         "smolvlm_vision"), _none
    ),
}  # fmt: skip

_WINDOWS = (
    "it attends within windows that are entries of the batch, and shifted in every second layer, so there is "
    "no map of the whole picture. Read a window by amap.only(batch=n).image(query, grid=(7, 7))."
)
_FEWER_KEYS = "its keys are merged patches, fewer in the first stages, and it has no class token."
_QUERIES = (
    "its language model reads queries of a resampler, which have no place in the picture. What these queries "
    "look at is in the resampler's layers ({}), whose patches a recording has."
)
# The parts that read a vision transformer's patches as keys, by the model_type of the transformer's
# configuration, and the name of their attention.
RESAMPLERS = {
    "blip_2_vision_model": "crossattention",
    "instructblip_vision_model": "crossattention",
    "idefics2_vision": "perceiver_resampler",
}
BLOCKS = ("qwen2_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision")  # patches are in blocks
# Why the tokens of a model aren't a grid of patches, by its model_type.
WITHOUT_GRID = {
    **dict.fromkeys(
        ("swin", "swinv2", "swin2sr", "donut-swin", "maskformer-swin", "clap_audio_model"), _WINDOWS
    ),
    **dict.fromkeys(("segformer", "pvt", "pvt_v2", "glpn"), _FEWER_KEYS),
    **dict.fromkeys(("blip-2", "instructblip"), _QUERIES.format('"crossattention"')),
    "idefics2": _QUERIES.format('"perceiver_resampler"'),
    "vit_mae": "it drops a random part of the patches (mask_ratio), and shuffles the others.",
    "qwen2_5_vl_vision": "its vision transformer attends within windows and reorders the patches for them.",
    "mllama": "its language model reads the picture by cross-attention to tiles.",
}


def _vision_patches(config: Any, inputs: Inputs) -> Located:
    """Return the patches of a vision transformer of transformers."""
    shape, patch = inputs.pixels, _pair(config.patch_size)
    if shape is not None and len(shape) < 4:
        raise ValueError(
            f"Expected pixels [b, 3, h, w], got {list(shape)}. Pass pixels[None] for one picture."
        )
    if shape is None and getattr(config, "image_size", None) is None:
        raise ValueError(
            "The configuration has no image_size: give the model's inputs, find_patches(model, inputs)."
        )
    height, width = _pair(config.image_size) if shape is None else shape[-2:]
    special = SPECIAL[config.model_type](config)
    return [[_whole_grid((height // patch[0], width // patch[1]), special, (height, width), patch)]]


def calls_for_each(model: nn.Module) -> bool:
    """Return True for a vision transformer whose layers call attention for each picture of a batch."""
    return getattr(getattr(model, "config", None), "model_type", None) in BLOCKS


def _frame_patches(model: nn.Module, config: Any, inputs: Inputs) -> list[Patches]:
    """Return the patches of each picture, or frame of a video, of Qwen-VL's vision transformer."""
    if inputs.grids is None:
        raise _no_sizes(model, "image_grid_thw")
    merge = config.spatial_merge_size
    return [Patches((rows, cols), merge=merge) for t, rows, cols in inputs.grids for _ in range(t)]


def _pixtral_patches(model: nn.Module, config: Any, inputs: Inputs) -> list[Patches]:
    """Return the patches of each picture of Pixtral's vision transformer, which joins them to a sequence."""
    sizes = inputs.heights
    if sizes is None and inputs.pixels is not None and inputs.pixels[0] == 1:
        sizes = [list(inputs.pixels[-2:])]
    if sizes is None:
        raise _no_sizes(model, "image_sizes")
    found: list[Patches] = []
    for height, width in sizes:
        first = found[-1].stop if found else 0
        found.append(Patches((height // config.patch_size, width // config.patch_size), first))
    return found


def _no_sizes(model: nn.Module, name: str) -> ValueError:
    return ValueError(
        f"The sizes of the pictures of {_name(model)} are in {name}: give all inputs of the processor, "
        "find_patches(model, inputs)."
    )


def _whole_grid(
    grid: tuple[int, int], special: tuple[str, ...], picture: Sequence[int], patch: Sequence[int]
) -> Patches:
    if min(grid) < 1:
        raise ValueError(
            f"Expected a picture of at least one patch of {list(patch)} pixels, got {list(picture)}. "
            "Resize it."
        )
    return Patches(grid, len(special), special=special)


def _pair(size: Any) -> tuple[int, int]:
    """Return (height, width) for a number or a pair."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _is_timm(module: nn.Module) -> bool:
    """Return True for a model of timm, which has patches and no configuration of transformers."""
    return type(module).__module__.startswith("timm.models") and hasattr(module, "patch_embed")


def _is_torchvision(module: nn.Module) -> bool:
    """Return True for torchvision's VisionTransformer, which reads pictures of one size."""
    return type(module).__module__ == "torchvision.models.vision_transformer" and hasattr(
        module, "patch_size"
    )


def _timm_patches(model: Any, inputs: Inputs) -> Patches:
    """Return the patches of timm's VisionTransformer, Eva and others with its attributes."""
    count = getattr(model, "num_prefix_tokens", None)
    if count is None or not hasattr(model.patch_embed, "patch_size"):
        raise ValueError(
            f"{_name(model)}: {_WINDOWS if 'Swin' in _name(model) else 'its tokens are not known.'} {GIVE}"
        )
    patch, shape = _pair(model.patch_embed.patch_size), inputs.pixels
    picture = shape[-2:] if shape is not None and len(shape) == 4 else model.patch_embed.img_size
    if picture is None:
        raise ValueError("The model has no image size: give the model's inputs, find_patches(model, inputs).")
    picture = _pair(picture)
    pad = getattr(model.patch_embed, "dynamic_img_pad", False)
    grid = [-(-n // p) if pad else n // p for n, p in zip(picture, patch, strict=True)]
    has_class = getattr(model, "cls_token", None) is not None
    names = [CLASS] if has_class else []
    if has_class and getattr(model, "dist_token", None) is not None:
        names.append(DISTILLATION)
    names += [f"register {n + 1}" for n in range(count - len(names))]
    return _whole_grid((grid[0], grid[1]), tuple(names), picture, patch)


# -- vision-language models --------------------------------------------------------------------------


def _image_token(config: Any) -> int | None:
    """Return the id of the tokens of pictures."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    return None


def _language_patches(model: nn.Module, config: Any, inputs: Inputs) -> Located:
    """Return the patches in the sequences of a language model, in order of its image tokens."""
    if inputs.ids is None:
        raise ValueError(
            f"The pictures of {_name(model)} are where the image tokens are: give its inputs with input_ids, "
            "find_patches(model, inputs)."
        )
    if not can_read(inputs.ids):
        raise ValueError(
            f"The numbers of input_ids can't be read while a model is compiled or traced. {GIVE}"
        )
    grids = _language_grids(model, config, inputs)  # by the id of their tokens
    located: Located = []
    for ids in inputs.ids:
        places = torch.isin(ids.cpu(), torch.tensor([*grids])).nonzero().flatten().tolist()
        pictures, done = [], 0
        while done < len(places):
            token = int(ids[places[done]])
            size = next(grids[token], None)
            if size is None:
                raise ValueError(
                    f"Expected a picture for each of the image tokens (id {token}), got none for the last "
                    f"{len(places) - done}. Give all inputs of the processor, or: {GIVE}"
                )
            rows, cols = size.grid
            taken = places[done : done + (size.tokens or _run(places[done:]))]
            if len(taken) < size.skipped + rows * cols or len(taken) < (size.tokens or 0):
                raise ValueError(
                    f"Expected {size.tokens or rows * cols} image tokens (id {token}) for a picture of "
                    f"{rows} × {cols} patches, got {len(taken)}. Prepare text and picture with the model's "
                    "processor, without truncation."
                )
            pictures.append(_in_sequence(taken[size.skipped :], size.grid, inputs.earlier))
            done += len(taken)
        located.append(pictures)
    return located


class Size(NamedTuple):
    """The grid of a picture in a language model's sequence, and how many image tokens it takes."""

    grid: tuple[int, int]
    tokens: int | None = None  # None: those up to a token of text, of which those of the grid come first
    skipped: int = 0  # image tokens before the first patch, such as a class token


def _in_sequence(places: list[int], grid: tuple[int, int], earlier: int) -> Patches:
    """Return a grid whose tokens are at these places of a sequence."""
    rows, cols = grid
    stride = places[cols] - places[0] if rows > 1 else cols
    found = Patches(grid, places[0] + earlier, None if stride == cols else stride)
    if (found.keys - earlier).tolist() != places[: rows * cols]:
        raise ValueError(f"The image tokens aren't {rows} rows of {cols} patches at equal distances. {GIVE}")
    return found


def _run(places: list[int]) -> int:
    """Return how many of the first places follow each other."""
    return next((n for n, place in enumerate(places) if place != places[0] + n), len(places))


def _language_grids(model: nn.Module, config: Any, inputs: Inputs) -> dict[int, Iterator[Size]]:
    """Return the sizes of a batch's pictures by the id of their tokens, in the order of the tokens."""
    token, family = _image_token(config), config.model_type
    assert token is not None
    merge = getattr(config.vision_config, "spatial_merge_size", None)
    if merge and family.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")):
        if inputs.grids is None and inputs.frames is None:
            raise ValueError(
                f"The sizes of the pictures of {_name(model)} are in image_grid_thw, and of its videos in "
                "video_grid_thw: give all inputs of the processor, find_patches(model, inputs)."
            )
        # A frame of a video is a picture of its own.
        return {
            of_kind: iter(
                [_exact((rows // merge, cols // merge)) for t, rows, cols in grids for _ in range(t)]
            )
            for of_kind, grids in ((token, inputs.grids or []), (config.video_token_id, inputs.frames or []))
        }
    if inputs.has_video and family == "llava_onevision" and inputs.clips is not None:
        clips = iter(_clip_frames(config, inputs.clips))
        video = getattr(config, "video_token_id", None)
        video = config.video_token_index if video is None else video
        if not bool((inputs.ids == token).any() if inputs.ids is not None else False):
            return {video: clips}
        return {token: _picture_grids(model, config, inputs), video: clips}
    if inputs.has_video:
        raise ValueError(f"The patches of videos of {_name(model)} aren't found. {GIVE}")
    return {token: _picture_grids(model, config, inputs)}


def _picture_grids(model: nn.Module, config: Any, inputs: Inputs) -> Iterator[Size]:
    """Return the sizes of a batch's pictures, in the order of their tokens."""
    family, vision = config.model_type, config.vision_config
    if getattr(vision, "model_type", "") == "pixtral":  # also in Mistral 3, which merges patches
        if inputs.heights is None:
            raise ValueError(
                f"The sizes of the pictures of {_name(model)} are in image_sizes: give all inputs of the "
                "processor, find_patches(model, inputs)."
            )
        side = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        return (_exact((height // side, width // side)) for height, width in inputs.heights)
    if family in ("internvl", "idefics3", "smolvlm"):  # each tile is a picture of its own
        size = vision.image_size if inputs.pixels is None else inputs.pixels[-2:]
        (height, width), patch = _pair(size), _pair(vision.patch_size)
        merge = config.scale_factor if hasattr(config, "scale_factor") else round(1 / config.downsample_ratio)
        return _forever(_exact((height // patch[0] // merge, width // patch[1] // merge)))
    if family == "gemma3":
        side = math.isqrt(config.mm_tokens_per_image)
        return _forever(_exact((side, side)))
    if family in ("llava", "vipllava", "paligemma", "llava_next", "llava_onevision"):
        [[tower]] = _tower_patches(model, vision, inputs, family)
        skipped = len(tower.special)
        if getattr(config, "vision_feature_select_strategy", "full") == "default":
            skipped = max(skipped - 1, 0)
        if family in ("llava_next", "llava_onevision"):  # the whole picture comes first, then its tiles
            _check_runs(model, _image_token(config), inputs)
            return _forever(Size(tower.grid, None, skipped))
        rows, cols = tower.grid
        return _forever(Size(tower.grid, skipped + rows * cols, skipped))
    raise ValueError(
        f"The image tokens of {_name(model)} ({family}) aren't known to be patches in rows. {GIVE}"
    )


def _clip_frames(config: Any, clips: tuple[int, ...]) -> list[Size]:
    """Return the sizes of the frames of LLaVA-OneVision's videos, whose patches are pooled 2 × 2."""
    if len(clips) != 5:
        raise ValueError(f"Expected pixel_values_videos [b, frames, 3, h, w], got {list(clips)}. {GIVE}")
    videos, count, _, height, width = clips
    patch = _pair(config.vision_config.patch_size)
    rows, cols = (-(-(n // p) // 2) for n, p in zip((height, width), patch, strict=True))
    frame, last = _exact((rows, cols)), Size((rows, cols), rows * cols + 1)  # a token ends each video
    return [*[frame] * (count - 1), last] * videos


def _check_runs(model: nn.Module, token: int | None, inputs: Inputs) -> None:
    """Raise ValueError unless text is between the pictures, whose tiles have unknown numbers of tokens."""
    count, ids = None if inputs.heights is None else len(inputs.heights), inputs.ids
    if count is None and inputs.pixels is not None and len(inputs.pixels) == 5:
        count = inputs.pixels[0]
    assert ids is not None
    is_image = torch.nn.functional.pad(torch.eq(ids, -1 if token is None else token), (1, 0))
    runs = (is_image[:, 1:] & ~is_image[:, :-1]).sum(1)  # [b], the runs of image tokens
    is_unknown = int(runs.max()) > 1 if count is None else int(runs.sum()) not in (0, count)
    if is_unknown:
        given = "an unknown number of" if count is None else count
        raise ValueError(
            f"Expected text between the pictures of {_name(model)}, which have tokens of their tiles too, "
            f"got {given} pictures and {int(runs.sum())} sequences of image tokens. Give all inputs of the "
            f"processor, or: {GIVE}"
        )


def _exact(grid: tuple[int, int]) -> Size:
    return Size(grid, grid[0] * grid[1])


def _forever(size: Size) -> Iterator[Size]:
    while True:
        yield size


def _tower_patches(model: nn.Module, vision: Any, inputs: Inputs, family: str) -> Located:
    """Return the patches in the vision transformer of a vision-language model."""
    if getattr(vision, "model_type", None) not in SPECIAL:
        unknown = getattr(vision, "model_type", None)
        raise ValueError(f"The vision transformer of {_name(model)} ({unknown}) isn't known. {GIVE}")
    return _vision_patches(vision, inputs)
