"""Where the patches of a picture are among the tokens of a model.

A vision transformer reads a class token and registers, then the patches of the picture, row by row. A
vision-language model reads the picture within its text, where the processor put a token for each patch or for
each block of patches that the model merges. `Patches` describes both; `find_patches` reads it from a model's
configuration and inputs.

To add a model of transformers, add it to `SPECIAL` (vision transformers) or to `_language_grids`, and to the
table of models in `tests/unit/test_patches.py`, which changes a patch of the picture and compares keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.shapes import can_read, kind, whole

GIVE = "Give the place of the patches: Patches(grid=(rows, cols), first=number of tokens before them)."
CLASS, DISTILLATION = "class token", "distillation token"


@dataclass(frozen=True)
class Patches:
    """The patches of one picture among the tokens of a sequence.

    Attributes:
        grid: The numbers of rows and columns of patches.
        first: The token of the patch in the upper left corner.
        stride: The number of tokens from the start of a row to that of the next, cols if None. It is larger
            if a token ends each row, as in Pixtral and LLaVA-NeXT.
        merge: The side of the blocks of patches that follow each other, 1 if patches are in rows. The vision
            transformer of Qwen2-VL and Qwen3-VL has blocks of 2 × 2.
        special: The names of the tokens before the first patch of a vision transformer, from token 0, such as
            "class token" and "register 1". Empty in a language model.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If numbers are out of range or don't fit each other.
    """

    grid: tuple[int, int]
    first: int = 0
    stride: int | None = None
    merge: int = 1
    special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", check_grid(self.grid))
        whole(self.first, "first, the token of the first patch,")
        whole(self.merge, "merge", least=1)
        rows, cols = self.grid
        if self.stride is not None:
            whole(self.stride, "stride, the tokens from one row to the next,", least=cols)
        if self.merge > 1 and (rows % self.merge or cols % self.merge or self.stride is not None):
            raise ValueError(
                f"Expected a grid of whole blocks of {self.merge} × {self.merge} patches, no stride, got "
                f"grid={self.grid}, stride={self.stride}."
            )
        if isinstance(self.special, str) or not all(isinstance(name, str) for name in self.special):
            raise TypeError(f"Expected special to be names of tokens, got {self.special!r}.")
        object.__setattr__(self, "special", tuple(self.special))
        if len(self.special) > self.first:
            raise ValueError(
                f"Expected at most first={self.first} special tokens before the patches, got "
                f"{len(self.special)}: {', '.join(self.special)}."
            )

    @property
    def keys(self) -> Tensor:
        """The token of each patch, row by row, `[rows · cols]`."""
        (rows, cols), m = self.grid, self.merge
        if m == 1:
            places = torch.arange(rows)[:, None] * (self.stride or cols) + torch.arange(cols)
        else:
            blocks = torch.arange(rows * cols).view(rows // m, cols // m, m, m)
            places = blocks.transpose(1, 2).reshape(rows, cols)
        return self.first + places.flatten()

    @property
    def class_token(self) -> int | None:
        """The class token, None if the model has none."""
        return self.special.index(CLASS) if CLASS in self.special else None

    @property
    def registers(self) -> tuple[int, ...]:
        """The register tokens (Darcet et al. 2024, arXiv:2309.16588)."""
        return tuple(n for n, name in enumerate(self.special) if name.startswith("register"))

    @property
    def stop(self) -> int:
        """The token after the last patch."""
        return int(self.keys[-1]) + 1

    def token(self, row: int, col: int) -> int:
        """Return the token of a patch, to use as a query or key.

        Args:
            row: The row of the patch; negative numbers count from below.
            col: The column; negative numbers count from the right.

        Returns:
            The token.

        Raises:
            TypeError: If a number isn't an int.
            IndexError: If there is no such patch.
        """
        rows, cols = self.grid
        for name, n, size in (("row", row, rows), ("col", col, cols)):
            if not -size <= whole(n, name, least=-(1 << 60)) < size:
                raise IndexError(
                    f"There is no patch ({row}, {col}): the picture has {rows} × {cols} patches."
                )
        return int(self.keys[row % rows * cols + col % cols])

    def place(self, token: int) -> tuple[int, int] | None:
        """Return the row and the column of the patch of a token, None if it isn't a patch.

        Args:
            token: The token.

        Returns:
            The place, or None.
        """
        found = (self.keys == token).nonzero().flatten().tolist()
        return divmod(found[0], self.grid[1]) if found else None

    def labels(self, tokens: Sequence[str] | int) -> list[str]:
        """Return labels for a model's tokens, in which patches have the name `row,column`.

        Args:
            tokens: The labels of all tokens, or their number.

        Returns:
            The labels.

        Raises:
            ValueError: If there are fewer tokens than the patches need.
        """
        labels = [str(n) for n in range(tokens)] if isinstance(tokens, int) else list(tokens)
        if len(labels) < self.stop:
            raise ValueError(
                f"Expected at least {self.stop} tokens, the last of them a patch, got {len(labels)}."
            )
        labels[: len(self.special)] = self.special
        for n, token in enumerate(self.keys.tolist()):
            labels[token] = "{},{}".format(*divmod(n, self.grid[1]))
        return labels


def check_grid(grid: object) -> tuple[int, int]:
    """Return a grid as (rows, cols); raise TypeError or ValueError if it isn't two positive ints."""
    if isinstance(grid, str) or not isinstance(grid, Sequence) or len(grid) != 2:
        raise TypeError(f"Expected grid to be (rows, cols), the numbers of patches, got {grid!r}.")
    return whole(grid[0], "the rows of grid", least=1), whole(grid[1], "the columns of grid", least=1)


def find_patches(model: nn.Module, inputs: Any = None, *, batch: int = 0, picture: int = 0) -> Patches:
    """Return where the patches of a picture are among a model's tokens, from its configuration.

    Vision transformers of transformers (ViT, DeiT, BEiT, DINOv2 with or without registers, DINOv3, CLIP,
    SigLIP, I-JEPA, …) and of timm, and vision-language models of transformers (LLaVA, Qwen-VL, PaliGemma,
    Gemma 3, Pixtral, …), for which it returns the patches in the sequence of the language model. For their
    vision part, pass that part, such as `model.vision_tower`. A recording of `observe` finds the patches of
    each layer itself: `recording.patches()`.

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


# -- patches in the provenance of a map, as JSON data ------------------------------------------------

Located = list[list[Patches]]  # the pictures of each batch entry; a single list stands for all entries


def pack(located: Located | str) -> Any:
    """Return patches, or the reason why there are none, as JSON data."""
    return located if isinstance(located, str) else [list(map(asdict, pictures)) for pictures in located]


def unpack(packed: Any) -> Located:
    """Return patches from JSON data; raise ValueError with the reason why there are none."""
    if packed is None:
        raise ValueError(f"The patches of the picture aren't known. {GIVE}")
    if isinstance(packed, str):
        raise ValueError(packed)
    try:
        return [[Patches(**fields) for fields in pictures] for pictures in packed]
    except (TypeError, ValueError) as error:
        raise ValueError(f"The recorded patches can't be read: {error}") from None


def select(located: Located, batch: int, picture: int) -> Patches:
    """Return the patches of a picture; raise IndexError if there is none of this number."""
    if len(located) > 1 and not -len(located) <= whole(batch, "batch", least=-(1 << 60)) < len(located):
        raise IndexError(f"There is no batch entry {batch}: the model read {len(located)} sequences.")
    pictures = located[batch if len(located) > 1 else 0]
    if not -len(pictures) <= whole(picture, "picture", least=-(1 << 60)) < len(pictures):
        raise IndexError(f"There is no picture {picture}: sequence {batch} has {len(pictures)} pictures.")
    return pictures[picture]


def common(located: Located) -> Patches:
    """Return the first picture's patches; raise ValueError if they differ between sequences of the batch."""
    found = select(located, 0, 0)
    if any(pictures[:1] != [found] for pictures in located):
        raise ValueError(
            "Expected the picture at the same place in all sequences of the batch, got different places. "
            "Select one: amap.only(batch=n).image(...), or give recording.patches(batch=n) as the patches."
        )
    return found


# -- finding them ------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What the places of patches depend on, of a model's inputs."""

    pixels: tuple[int, ...] | None = None  # the shape of the pixels, [b, 3, h, w]
    ids: Tensor | None = None  # the tokens, [b, s]
    grids: list[list[int]] | None = None  # (frames, rows, columns) of each picture (Qwen-VL), before merging
    heights: list[list[int]] | None = None  # (height, width) of each picture (Pixtral, LLaVA-NeXT)
    earlier: int = 0  # the number of tokens in the cache of keys
    has_video: bool = False

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Inputs:
        """Return the sizes of a model's inputs, which are given by name."""

        def read(*names: str) -> Any:
            return next((inputs[name] for name in names if inputs.get(name) is not None), None)

        pixels, ids = read("pixel_values", "x", "pixels"), read("input_ids")
        grids, heights = read("image_grid_thw", "grid_thw"), read("image_sizes", "spatial_shapes")
        cache = read("past_key_values")
        earlier = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        return cls(
            tuple(pixels.shape) if isinstance(pixels, Tensor) else None,
            ids if isinstance(ids, Tensor) and ids.dim() == 2 else None,
            _to_list(grids),
            _to_list(heights),
            int(earlier),
            read("pixel_values_videos", "video_grid_thw") is not None,
        )


def _to_list(numbers: Any) -> list[list[int]] | None:
    if isinstance(numbers, Tensor):
        return numbers.tolist() if can_read(numbers) and numbers.dim() == 2 else None
    return None if numbers is None else [list(map(int, each)) for each in numbers]


def read_parameters(module: nn.Module) -> list[str] | None:
    """Return the names of a module's inputs, None if it doesn't read pictures as far as these say."""
    if _is_timm(module):
        return ["x"]
    if not getattr(getattr(module, "config", None), "model_type", ""):
        return None
    names = list(signature(module.forward).parameters)
    return names if {"pixel_values", "grid_thw"} & {*names} else None


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
    if _is_timm(model):
        return [[_timm_patches(model, inputs)]]
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if config is None or family is None:
        return None
    if family == "timm_wrapper":
        return [[_timm_patches(model.timm_model, inputs)]] if hasattr(model, "timm_model") else None
    if family in WITHOUT_GRID:
        raise ValueError(f"{_name(model)}: {WITHOUT_GRID[family]} {GIVE}")
    if family in BLOCKS or family == "pixtral":
        return [[_only_patches(model, config, inputs)]]
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
         "owlvit_vision_model", "owlv2_vision_model", "internvl_vision"),
        _class,
    ),
    "deit": lambda config: (CLASS, DISTILLATION),
    "dinov2_with_registers": _registers,
    "dinov3_vit": _registers,
    **dict.fromkeys(("siglip_vision_model", "ijepa", "aimv2_vision_model"), _none),
}  # fmt: skip

_WINDOWS = (
    "it attends within windows that are entries of the batch, and shifted in every second layer, so there is "
    "no map of the whole picture. Read a window by amap.only(batch=n).image(query, grid=(7, 7))."
)
_FEWER_KEYS = "its keys are merged patches, fewer in the first stages, and its class token is none."
_QUERIES = "its language model reads queries of a resampler, which have no place in the picture."
BLOCKS = ("qwen2_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision")  # patches are in blocks
# Why the tokens of a model aren't a grid of patches, by its model_type.
WITHOUT_GRID = {
    **dict.fromkeys(
        ("swin", "swinv2", "swin2sr", "donut-swin", "maskformer-swin", "clap_audio_model"), _WINDOWS
    ),
    **dict.fromkeys(("segformer", "pvt", "pvt_v2", "glpn"), _FEWER_KEYS),
    **dict.fromkeys(("blip-2", "instructblip", "idefics2"), _QUERIES),
    "vit_mae": "it drops a random part of the patches (mask_ratio), and shuffles the others.",
    "qwen2_5_vl_vision": "its vision transformer attends within windows and reorders the patches for them.",
    "mllama": "its language model reads the picture by cross-attention to tiles.",
}


def _vision_patches(config: Any, inputs: Inputs) -> Located:
    """Return the patches of a vision transformer of transformers."""
    shape, patch = inputs.pixels, _pair(config.patch_size)
    if shape is not None and len(shape) < 4:
        raise ValueError(f"Expected pixels [b, 3, h, w], got {list(shape)}. {GIVE}")
    if shape is None and getattr(config, "image_size", None) is None:
        raise ValueError(
            "The configuration has no image_size: give the model's inputs, find_patches(model, inputs)."
        )
    height, width = _pair(config.image_size) if shape is None else shape[-2:]
    special = SPECIAL[config.model_type](config)
    return [[_whole_grid((height // patch[0], width // patch[1]), special, (height, width), patch)]]


def _only_patches(model: nn.Module, config: Any, inputs: Inputs) -> Patches:
    """Return the patches of a vision transformer that reads all pictures of a batch as one sequence."""
    is_pixtral = config.model_type == "pixtral"
    found = inputs.heights if is_pixtral else inputs.grids
    if found is None and is_pixtral and inputs.pixels is not None and inputs.pixels[0] == 1:
        found = [list(inputs.pixels[-2:])]
    if found is None:
        name = "image_sizes" if is_pixtral else "image_grid_thw"
        raise ValueError(
            f"The sizes of the pictures of {_name(model)} are in {name}: give all inputs of the processor, "
            "find_patches(model, inputs)."
        )
    if len(found) != 1 or (not is_pixtral and found[0][0] != 1):
        raise ValueError(
            f"{_name(model)} reads several pictures or frames as one sequence, whose patches aren't found. "
            "Give it one picture at a time."
        )
    if is_pixtral:
        return Patches((found[0][0] // config.patch_size, found[0][1] // config.patch_size))
    return Patches((found[0][1], found[0][2]), merge=config.spatial_merge_size)


def _whole_grid(
    grid: tuple[int, int], special: tuple[str, ...], picture: Sequence[int], patch: Sequence[int]
) -> Patches:
    if min(grid) < 1:
        raise ValueError(f"A picture of {list(picture)} pixels has no patch of {list(patch)}.")
    return Patches(grid, len(special), special=special)


def _pair(size: Any) -> tuple[int, int]:
    """Return (height, width) for a number or a pair."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _is_timm(module: nn.Module) -> bool:
    """Return True for a model of timm, which has patches and no configuration of transformers."""
    return type(module).__module__.startswith("timm.models") and hasattr(module, "patch_embed")


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
    token = _image_token(config)
    grids = _language_grids(model, config, inputs)
    located: Located = []
    for ids in inputs.ids:
        places = (ids == token).nonzero().flatten().tolist()
        pictures, done = [], 0
        while done < len(places):
            size = next(grids, None)
            if size is None:
                raise ValueError(
                    f"Expected a picture for each of the image tokens (id {token}), got none for the last "
                    f"{len(places) - done}. Give all inputs of the processor, or: {GIVE}"
                )
            rows, cols = size.grid
            taken = places[done : done + (size.tokens or len(places))]
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
    tokens: int | None = None  # None: all of the sequence, of which those of the grid come first
    skipped: int = 0  # image tokens before the first patch, such as a class token


def _in_sequence(places: list[int], grid: tuple[int, int], earlier: int) -> Patches:
    """Return a grid whose tokens are at these places of a sequence."""
    rows, cols = grid
    stride = places[cols] - places[0] if rows > 1 else cols
    found = Patches(grid, places[0] + earlier, None if stride == cols else stride)
    if (found.keys - earlier).tolist() != places[: rows * cols]:
        raise ValueError(f"The image tokens aren't {rows} rows of {cols} patches at equal distances. {GIVE}")
    return found


def _language_grids(model: nn.Module, config: Any, inputs: Inputs) -> Iterator[Size]:
    """Return the sizes of a batch's pictures, in the order of their tokens."""
    family, vision = config.model_type, config.vision_config
    if inputs.has_video:
        raise ValueError(f"The patches of videos aren't found. {GIVE}")
    merge = getattr(vision, "spatial_merge_size", None)
    if merge and family.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")):
        if inputs.grids is None:
            raise ValueError(
                f"The sizes of the pictures of {_name(model)} are in image_grid_thw: give all inputs of the "
                "processor, find_patches(model, inputs)."
            )
        return (_exact((rows // merge, cols // merge)) for _, rows, cols in inputs.grids)
    if getattr(vision, "model_type", "") == "pixtral":  # also in Mistral 3, which merges patches
        if inputs.heights is None:
            raise ValueError(
                f"The sizes of the pictures of {_name(model)} are in image_sizes: give all inputs of the "
                "processor, find_patches(model, inputs)."
            )
        side = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        return (_exact((height // side, width // side)) for height, width in inputs.heights)
    if family == "gemma3":
        side = math.isqrt(config.mm_tokens_per_image)
        return _forever(_exact((side, side)))
    if family in ("llava", "vipllava", "paligemma", "llava_next", "llava_onevision"):
        [[tower]] = _tower_patches(model, vision, inputs, family)
        skipped = len(tower.special)
        if getattr(config, "vision_feature_select_strategy", "full") == "default":
            skipped = max(skipped - 1, 0)
        if family in ("llava_next", "llava_onevision"):  # the whole picture comes first, then its tiles
            _check_one_picture(model, _image_token(config), inputs)
            return _forever(Size(tower.grid, None, skipped))
        rows, cols = tower.grid
        return _forever(Size(tower.grid, skipped + rows * cols, skipped))
    raise ValueError(
        f"The image tokens of {_name(model)} ({family}) aren't known to be patches in rows. {GIVE}"
    )


def _check_one_picture(model: nn.Module, token: int | None, inputs: Inputs) -> None:
    """Raise ValueError if a sequence has several pictures, whose tiles have unknown numbers of tokens."""
    count, ids = None if inputs.heights is None else len(inputs.heights), inputs.ids
    if count is None and inputs.pixels is not None and len(inputs.pixels) == 5:
        count = inputs.pixels[0]
    assert ids is not None
    is_image = torch.nn.functional.pad(ids == token, (1, 0))
    runs = (is_image[:, 1:] & ~is_image[:, :-1]).sum(1)  # [b], the runs of image tokens
    if (count is not None and count > len(ids)) or int(runs.max()) > 1:
        raise ValueError(
            f"{_name(model)} reads tiles after each picture, so several pictures in a sequence aren't "
            f"found. {GIVE}"
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


__all__ = ["Patches", "find_patches"]
