"""A figure of attention over a picture: what a query attends to, a panel for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from manyheads.figures import heatmaps
from manyheads.figures.cells import DPI
from manyheads.shapes import kind, whole

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
SIDE, ACROSS = 2.1, 6  # the longest side of a panel in inches, and the most panels in a row
RING = 9  # the diameter of the mark of a small patch, in points
MOST_HEADS = 64
HINT = (
    "Pass mean= and std= of the processor (image_mean and image_std) to undo it, or pass the picture that "
    "the processor was given."
)


def overlay(
    picture: Any,
    image: Tensor | np.ndarray,
    *,
    query: tuple[int, int] | None = None,
    interpolation: str = "nearest",
    scale: str = "shared",
    alpha: float = 0.65,
    batch: int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    titles: Sequence[str] | None = None,
    label: str = "attention weight",
    title: str | None = None,
) -> Figure:
    """Draw a map of patches over a picture, for one head or several side by side.

    The first panel is the picture. In the others it is grey, so that hue and brightness of the map's colours
    can be read; colours are on a scale of square roots, because most weights are small. The map is stretched
    over the whole picture: if the processor crops, pass the picture that the model saw, `pixel_values` with
    `mean` and `std`. A line below the panels says how many patches there are and how they are interpolated.

    Args:
        picture: A picture: a tensor or array `[3, h, w]` or `[h, w, 3]` (also 1 or 4 channels, or `[h, w]`),
            of uint8 or of floats from 0 to 1, or a PIL image.
        image: The map: `[rows, cols]`, `[h, rows, cols]`, or `[b, h, rows, cols]` as `AttentionMap.image`
            returns it.
        query: The row and column of the patch whose weights these are, to mark it.
        interpolation: "nearest" draws each patch as a square, "bilinear" and "bicubic" as smooth colours,
            whose details between the patches' centres aren't the model's.
        scale: "shared" for one colour scale, so that heads can be compared, or "each" for one per head, from
            0 to its largest weight.
        alpha: The opacity of the map, from 0 to 1 (1 hides the picture, as in the figures of DINO).
        batch: The batch entry of a map `[b, h, rows, cols]`. It may be left out if b is 1.
        mean: The processor's image_mean, if the picture is normalized: it becomes picture · std + mean.
        std: The processor's image_std.
        titles: The titles of the heads.
        label: The label of the colour bar.
        title: The title of the figure.

    Returns:
        The figure.

    Raises:
        TypeError: If the picture or the map has the wrong type.
        ValueError: If the picture is normalized and mean and std aren't given, or an argument has a wrong
            shape or value.
    """
    pixels = read_picture(picture, mean, std)  # [h, w, 3]
    maps = _read_maps(image, batch)  # [h, rows, cols]
    if interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"Expected interpolation to be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}."
        )
    if scale not in ("shared", "each"):
        raise ValueError(f'Expected scale to be "shared" or "each", got {scale!r}.')
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ValueError(f"Expected alpha to be from 0 to 1, got {alpha!r}.")
    if not isinstance(label, str):
        raise TypeError(f"Expected label to be a string, got {label!r}.")
    count, rows, cols = maps.shape
    if query is not None:
        query = _check_query(query, rows, cols)
    if titles is not None and (isinstance(titles, str) or not isinstance(titles, Sequence)):
        raise TypeError(f"Expected titles to be a list of strings, got {titles!r}.")
    names = [f"head {n}" for n in range(count)] if titles is None else [*titles]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"Expected titles to be strings, got {names}.")
    if len(names) != count:
        raise ValueError(f"Expected a title for each of {count} heads, got {len(names)}.")

    panels = count + 1
    down = -(-panels // ACROSS)
    across = -(-panels // down)
    height, width = (SIDE * n / max(pixels.shape[:2]) for n in pixels.shape[:2])
    width, height = max(width, 0.7), max(height, 0.5)
    size = across * (width + 0.1) + 1.3, down * (height + 0.35) + 0.55 + (0.3 if title else 0)
    size = max(size[0], 4.2), size[1]
    figure = heatmaps.Picture(figsize=size, dpi=DPI, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    axes = grid.flatten().tolist()
    for unused in axes[panels:]:
        unused.set_axis_off()
    # In coordinates of patches, of which (0, 0) begins in the upper left corner.
    aspect = pixels.shape[0] * cols / (pixels.shape[1] * rows)
    options: dict[str, Any] = {"extent": (0, cols, rows, 0), "aspect": aspect}
    grey = pixels @ np.array([0.299, 0.587, 0.114])  # luma (ITU-R BT.601)
    axes[0].imshow(pixels, **options)
    patch = min(width / cols, height / rows)  # inches
    _finish(axes[0], "picture", width, query, patch)
    tops = maps.reshape(count, -1).max(1)  # [h]
    if scale == "each":
        names = [f"{name}, to {top:.2g}" for name, top in zip(names, tops, strict=True)]
        maps, label = maps / np.where(tops > 0, tops, 1.0)[:, None, None], f"{label} / largest of the head"
    norm = PowerNorm(0.5, 0.0, _round_up(float(maps.max()) or 1.0))
    for panel, weights, name in zip(axes[1:panels], maps, names, strict=True):
        panel.imshow(grey, cmap="gray", vmin=0, vmax=1, **options)
        drawn = panel.imshow(
            weights, cmap=heatmaps.WEIGHT, norm=norm, alpha=alpha, interpolation=interpolation, **options
        )
        _finish(panel, name, width, query, patch)
    inches = down * (height + 0.3)
    heatmaps.add_weight_bar(
        drawn, [], inches, label, ax=grid.ravel().tolist(), pad=0.01, aspect=inches / 0.14
    )
    note = f"{rows} × {cols} patches, {interpolation} interpolation"
    if query is not None:
        note += f"; marked: the query, patch {query[0]}, {query[1]}"
    heatmaps.set_text(figure.supxlabel, note, 8, size[0])
    heatmaps.set_title(figure, title, heatmaps.TITLE)
    return figure


def _finish(axes: Axes, name: str, width: float, query: tuple[int, int] | None, patch: float) -> None:
    """Give a panel its title, and mark the query's patch: by a square, or a ring if it is small."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    heatmaps.set_text(axes.set_title, name, heatmaps.TITLES, width + 0.05)
    if query is None:
        return
    row, col = query
    for color, line in (("black", 2.6), ("white", 1.2)):  # visible on any picture
        if patch > RING / 72:
            axes.add_patch(Rectangle((col, row), 1, 1, fill=False, edgecolor=color, lw=line, clip_on=False))
        else:
            style: dict[str, Any] = {"markersize": RING, "fillstyle": "none", "markeredgewidth": line}
            axes.plot(col + 0.5, row + 0.5, "o", color=color, clip_on=False, **style)


def _round_up(top: float) -> float:
    """Return a number rounded up to two digits, unless the excess is a rounding error."""
    step = 10.0 ** (np.floor(np.log10(top)) - 1)
    return float(np.ceil(top / step - 1e-3) * step)


def _check_query(query: Any, rows: int, cols: int) -> tuple[int, int]:
    if not isinstance(query, tuple) or len(query) != 2:
        raise TypeError(f"Expected query to be a patch (row, column), got {query!r}.")
    row, col = whole(query[0], "the row of query"), whole(query[1], "the column of query")
    if row >= rows or col >= cols:
        raise ValueError(f"Expected query to be one of {rows} × {cols} patches, got {query}.")
    return row, col


def _read_maps(image: Any, batch: int | None) -> np.ndarray:
    """Return maps of patches as an array `[h, rows, cols]`, checked."""
    if isinstance(image, Tensor) and not image.is_complex():
        image = image.detach().to("cpu").double().numpy()
    if not isinstance(image, np.ndarray) or image.dtype.kind not in "fiub":
        raise TypeError(f"Expected image to be a tensor of AttentionMap.image, got {kind(image)}.")
    if image.ndim == 5:
        raise ValueError(
            f"Expected the map of one query, [h, rows, cols], got {list(image.shape)}. Select one of the "
            "queries, image[:, :, n], or average over them, image.mean(2)."
        )
    if image.ndim == 4:
        if batch is None and len(image) != 1:
            raise ValueError(
                f"Expected batch, which of the {len(image)} maps {list(image.shape)} to draw, got None."
            )
        image = image[whole(batch or 0, "batch", 0, len(image) - 1)]
    elif batch is not None:
        raise ValueError(f"Expected batch only for a map [b, h, rows, cols], got {list(image.shape)}.")
    image = image[None] if image.ndim == 2 else image
    if image.ndim != 3 or not image.size:
        raise ValueError(
            "Expected image to be [rows, cols], [h, rows, cols] or [b, h, rows, cols], got "
            f"{list(image.shape)}."
        )
    if len(image) > MOST_HEADS:
        raise ValueError(
            f"Expected at most {MOST_HEADS} heads in a figure, got {len(image)}. Select some, image[:, :8]."
        )
    if not np.isfinite(image).all() or image.min() < 0:
        raise ValueError("Expected weights of at least 0, got negative numbers, NaN or infinity.")
    return image.astype(float)


# -- pictures --------------------------------------------------------------------------------------


def read_picture(picture: Any, mean: Any = None, std: Any = None) -> np.ndarray:
    """Return a picture as an array `[h, w, 3]` of floats from 0 to 1.

    Args:
        picture: The picture, as in `overlay`.
        mean: The mean that was subtracted, a number or one per channel, if it is normalized.
        std: The standard deviation that it was divided by.

    Returns:
        The pixels.

    Raises:
        TypeError: If the picture has the wrong type.
        ValueError: If it has the wrong shape, or is normalized and mean and std aren't given.
    """
    if (mean is None) != (std is None):
        raise ValueError(f"Expected both mean and std, or neither, got mean={mean!r}, std={std!r}.")
    if hasattr(picture, "convert") and hasattr(picture, "mode"):  # PIL
        if picture.mode[:1] in "IF":
            raise ValueError(
                f"Expected a picture of 8 bits per channel, got a PIL image of mode {picture.mode}. Convert "
                "it to an array of floats from 0 to 1."
            )
        array = np.asarray(picture.convert("RGB"))
    elif isinstance(picture, Tensor):
        is_half = picture.is_floating_point() and picture.dtype.itemsize < 4  # numpy has no bfloat16
        array = (picture.float() if is_half else picture).detach().cpu().numpy()
    elif isinstance(picture, np.ndarray):
        array = picture
    else:
        raise TypeError(f"Expected picture to be a tensor, an array or a PIL image, got {kind(picture)}.")
    pixels = _channels_last(array, isinstance(picture, Tensor))  # [h, w, c]
    if mean is None and pixels.dtype == np.uint8:
        return np.ascontiguousarray(_to_rgb(pixels / 255.0))
    if pixels.dtype.kind != "f":
        expected = (
            "floats, to which mean and std apply" if mean is not None else "uint8, or floats from 0 to 1"
        )
        raise TypeError(f"Expected a picture of {expected}, got {pixels.dtype}. Convert it.")
    if not np.isfinite(pixels).all():
        raise ValueError("Expected a picture of finite numbers, got NaN or infinity.")
    if mean is not None:
        pixels = pixels * _per_channel(std, "std", pixels) + _per_channel(mean, "mean", pixels)
    low, high = float(pixels.min()), float(pixels.max())
    if low < -0.01 or high > 1.01:
        if mean is not None:
            hint = "mean and std aren't those of the processor."
        elif low >= 0 and high <= 255:
            hint = "Divide it by 255."
        else:
            hint = f"It may be normalized, as the inputs of models are. {HINT}"
        raise ValueError(f"Expected floats from 0 to 1 in the picture, got {low:.3g} to {high:.3g}. {hint}")
    return np.ascontiguousarray(_to_rgb(np.clip(pixels, 0.0, 1.0)))


def _channels_last(array: np.ndarray, is_tensor: bool) -> np.ndarray:
    """Return a picture as `[h, w, c]`. If both ends could be channels, those of a tensor come first."""
    shape = list(array.shape)
    if array.ndim == 4 and shape[0] == 1:
        array = array[0]
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or not array.size:
        hint = " Select one of them, pictures[0]." if array.ndim == 4 else ""
        raise ValueError(f"Expected picture to be [3, h, w] or [h, w, 3], got {shape}.{hint}")
    begins, ends = array.shape[0] in (1, 3, 4), array.shape[2] in (1, 3, 4)
    if not begins and not ends:
        raise ValueError(f"Expected picture to be [3, h, w] or [h, w, 3], got {shape}.")
    return np.moveaxis(array, 0, 2) if begins and (is_tensor or not ends) else array


def _per_channel(numbers: Any, name: str, pixels: np.ndarray) -> np.ndarray:
    try:
        plain = numbers.cpu() if isinstance(numbers, Tensor) else numbers
        values = np.asarray(plain, dtype=float).reshape(-1)
    except (TypeError, ValueError):
        raise TypeError(f"Expected {name} to be a number or one per channel, got {numbers!r}.") from None
    if len(values) not in (1, pixels.shape[2]) or not np.isfinite(values).all():
        raise ValueError(f"Expected {name} to be a number or {pixels.shape[2]} numbers, got {numbers!r}.")
    if name == "std" and (values <= 0).any():
        raise ValueError(f"Expected std to be positive, the processor's image_std, got {numbers!r}.")
    return values


def _to_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return three channels: grey is repeated, and a transparent picture is put on white."""
    if pixels.shape[2] == 4:
        return pixels[..., :3] * pixels[..., 3:] + 1 - pixels[..., 3:]
    return np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels
