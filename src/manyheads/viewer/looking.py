"""The picture beside the matrix: where its patches are, and what a query attends to in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch

from manyheads.maps import AttentionMap
from manyheads.patches import select, unpack

if TYPE_CHECKING:
    from manyheads.viewer.runs import ViewedRun

LONGEST = 1024  # pixels: the longest side of a picture that is sent


def encode_picture(picture: Any) -> str:
    """Return a picture as the URL of a PNG.

    Args:
        picture: A picture, as in `figures.overlay`, or the path of a file.

    Returns:
        The URL, which contains the data.

    Raises:
        TypeError: If it has the wrong type.
        ValueError: If it isn't a picture, or is normalized.
        OSError: If the file can't be read.
    """
    from matplotlib import image

    from manyheads.figures import overlays

    if isinstance(picture, str | PathLike):
        try:
            picture = image.imread(fspath(picture))
        except (OSError, SyntaxError, ValueError) as error:  # PIL raises SyntaxError for a damaged file
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{fspath(picture)} isn't a picture that can be read: {error}. Choose a PNG or JPEG file."
            ) from None
    pixels = torch.from_numpy(overlays.read_picture(picture)).permute(2, 0, 1)  # [3, h, w]
    if max(pixels.shape) > LONGEST:
        scale = LONGEST / max(pixels.shape)
        size = [max(1, round(n * scale)) for n in pixels.shape[1:]]
        pixels = torch.nn.functional.interpolate(pixels[None], size, mode="area")[0]
    file = BytesIO()
    image.imsave(file, pixels.permute(1, 2, 0).clamp(0, 1).numpy(), format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def set_picture(runs: Sequence[ViewedRun], picture: Any) -> None:
    """Show a picture beside the maps of runs, of which one at least has a layer with patches.

    Args:
        runs: The runs.
        picture: The picture of the first batch entry, or a list with one for each.

    Raises:
        TypeError: If a picture has the wrong type.
        ValueError: If it isn't a picture, or the patches of all layers are unknown.
        OSError: If a file can't be read.
    """
    several = picture if isinstance(picture, list | tuple) else [picture]
    urls = [encode_picture(each) for each in several]
    located = [layer.call.provenance.get("patches") for run in runs for layer in run.layers]
    if not any(isinstance(each, list) for each in located):
        unpack(next((each for each in located if each is not None), None))  # raises ValueError
    for run in runs:
        run.pictures = urls


def describe_patches(
    run: ViewedRun, amap: AttentionMap, first: int | None, batch: int
) -> dict[str, Any] | None:
    """Return the patches of a map's first picture for a page; None if they aren't known.

    Args:
        run: The run.
        amap: The map.
        first: The position of its first query as a key, None in cross-attention.
        batch: The batch entry.

    Returns:
        The "grid", the "keys" of the patches, "first", the names of the "special" tokens, and the picture as
        the URL "src", None without one or for a map of another picture than the first.
    """
    located = amap.provenance.get("patches")
    pictures = unpack(located)[batch if len(located) > 1 else 0] if isinstance(located, list) else []
    if not pictures:
        return None
    patches = select([pictures], 0, 0)
    if patches.stop > amap.shape[3]:
        return None
    is_first = amap.provenance.get("picture_number", 0) == 0
    return {
        "grid": patches.grid,
        "keys": patches.keys.tolist(),
        "first": first,
        "special": patches.special,
        "src": run.pictures[batch] if batch < len(run.pictures) and is_first else None,
    }
