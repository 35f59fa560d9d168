"""`WordMaps`: where in a picture each word of its prompt is used, summed while a diffusion model runs.

A call of cross-attention has a query for each place of the picture and a key for each token of the prompt.
Its weights are averaged over the heads, and added to a sum for its layer, `[b, s, rows, cols]`, so that the
memory doesn't grow with the steps. Tang et al. 2022 (arXiv:2210.04885) add up the layers and steps of a U-Net
in this way.

The grid of a layer follows from the size of the picture that the model denoises: a U-Net halves it, and a
diffusion transformer divides it into patches. Models whose layers attend to text and picture together, in one
sequence, are supported where the order of the two is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.maps import AttentionMap
from manyheads.observe.crossattention import read_name
from manyheads.shapes import kind, whole
from manyheads.tokens import TokenizedText

ROWS = 1024  # the queries whose weights are computed at once
# Attention processors of diffusers with one sequence of picture and text, and whether the text comes first.
JOINT = {"JointAttnProcessor2_0": False, "FluxAttnProcessor": True}
ADDED = ("AttnAddedKVProcessor", "AttnAddedKVProcessor2_0")  # keys of the text, then those of the picture
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")

Parts = tuple[slice, slice]  # queries of the picture, keys of the text


class WordImages(NamedTuple):
    """The mean weight on each word at each place of a picture, `[n, rows, cols]`, and the n words."""

    images: Tensor
    words: list[str]


class WordMaps:
    """Sums of cross-attention weights by layer, over the steps of a diffusion model.

    Args:
        grid: The rows and columns of the picture that the model denoises, if its inputs don't tell.

    Attributes:
        sums: For each layer the sum over the steps of the mean weights of the heads, `[b, s, rows, cols]`.
        steps: For each layer the number of steps.
    """

    def __init__(self, grid: tuple[int, int] | None = None) -> None:
        self.grid = grid
        self.sums: dict[str, Tensor] = {}
        self.steps: dict[str, int] = {}
        self._owner: str | None = None  # the outermost running module that has a picture as its input
        self._size: tuple[int, int] | None = None
        self._patch = 1

    # -- while the model runs ----------------------------------------------------------------------

    def enter(self, path: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the size of the picture that a module gets, if it is the outermost that gets one."""
        if self._owner is not None:
            return
        named = (kwargs.get("sample"), kwargs.get("hidden_states"))  # in diffusers; other inputs may be masks
        inputs = (x for x in (*named, *args, *kwargs.values()) if isinstance(x, Tensor))
        picture = next((x for x in inputs if x.dim() == 4 and x.is_floating_point()), None)
        if picture is not None:
            patch = getattr(getattr(module, "config", None), "patch_size", None)
            self._owner, self._size = path, (int(picture.shape[2]), int(picture.shape[3]))
            self._patch = patch if isinstance(patch, int) else 1

    def leave(self, path: str) -> None:
        """Forget the size of the picture when the module ends."""
        if path == self._owner:
            self._owner = self._size = None

    def add(self, path: str, module: nn.Module, amap: AttentionMap) -> None:
        """Add the weights of a call if it is cross-attention.

        Args:
            path: The path of the module.
            module: The module.
            amap: The map of the call `[b, h, t, s]`.

        Raises:
            ValueError: If the queries aren't places of the picture, or the prompt changed between steps.
        """
        parts = self._parts(path, module, amap)
        if parts is None:
            return
        b = amap.shape[0]
        queries, keys = (range(n)[part] for n, part in zip(amap.shape[2:], parts, strict=True))
        rows, cols = self._locate(path, len(queries))
        mean = amap.problem.q.new_zeros(b, len(keys), rows * cols, dtype=torch.float32)
        for start in range(0, len(queries), ROWS):
            part = slice(start, min(start + ROWS, len(queries)))
            tile = slice(queries[part.start], queries[part.stop - 1] + 1)
            mean[:, :, part] = amap[:, :, tile, keys.start : keys.stop].mean(1).mT  # [b, s, r]
        mean = mean.unflatten(-1, (rows, cols))
        total = self.sums.get(path)
        if total is not None and total.shape != mean.shape:
            raise ValueError(
                f"{path} had weights [b, s, rows, cols] = {list(total.shape)} in earlier steps, got "
                f"{list(mean.shape)}. Observe one picture, or batch of pictures, at a time."
            )
        self.sums[path] = mean if total is None else total + mean
        self.steps[path] = self.steps.get(path, 0) + 1

    def _parts(self, path: str, module: nn.Module, amap: AttentionMap) -> Parts | None:
        """Return the queries of the picture and the keys of the text; None if there are no keys of a text."""
        t, s = amap.shape[2:]
        everything = slice(0, t), slice(0, s)
        processor = type(getattr(module, "processor", None)).__name__
        if processor in ADDED and not getattr(module, "only_cross_attention", False):
            return (slice(0, t), slice(0, s - t)) if s > t else None
        is_cross = getattr(module, "is_cross_attention", None)
        if is_cross is None and t != s:
            is_cross = True
        if is_cross or (is_cross is None and read_name(path)):
            return everything
        size = self.grid or self._size
        if t != s or size is None:
            return None
        if processor in JOINT:
            patch = 1 if self.grid else self._patch
            places = (size[0] // patch) * (size[1] // patch)
            if places >= t:  # of the picture alone
                return None
            if JOINT[processor]:
                return slice(t - places, t), slice(0, t - places)
            return slice(0, places), slice(places, t)
        is_other = is_cross is False and processor == "NoneType"  # not of diffusers
        if is_other or read_name(path) is False or _find_grid(size, t):
            return None
        raise ValueError(
            f"{path} has {t} queries and as many keys, which aren't the places of a picture of {size[0]} × "
            f"{size[1]}. If text and picture are one sequence there, their order isn't known for "
            f"{processor}: name other layers=."
        )

    def _locate(self, path: str, t: int) -> tuple[int, int]:
        """Return the rows and columns of t queries."""
        size = self.grid or self._size
        if size is None:
            raise ValueError(
                f"The size of the picture isn't known when {path} is called: no module has an input "
                '[b, channels, height, width]. Pass it: observe(..., keep={"words": (rows, cols)}).'
            )
        grid = _find_grid(size, t)
        if grid is None:
            raise ValueError(
                f"{path} has {t} queries, which aren't the places of a picture of {size[0]} × {size[1]} or a "
                'coarser one. Name layers=, or pass the size: observe(..., keep={"words": (rows, cols)}).'
            )
        return grid

    # -- after the run -----------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of the sums."""
        return sum(x.nbytes for x in self.sums.values())

    def images(
        self,
        tokens: Sequence[str] | None,
        names: Sequence[str],
        batch: int | None,
        grid: tuple[int, int] | None,
        interpolation: str,
    ) -> WordImages:
        """Return the mean over some layers and all steps; see `Recording.word_images`.

        Args:
            tokens: The labels of the keys.
            names: The paths of the layers.
            batch: The batch entry.
            grid: The rows and columns of the result.
            interpolation: How coarser grids are interpolated.

        Returns:
            The images of the words.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument doesn't fit, or the layers have different keys.
        """
        if interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"Expected interpolation to be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}."
            )
        shapes = {self.sums[name].shape[:2] for name in names}
        if len(shapes) > 1:
            lengths = ", ".join(f"{name} {self.sums[name].shape[1]}" for name in list(names)[:4])
            raise ValueError(f"Expected layers with the keys of one text, got numbers of keys: {lengths}.")
        ((b, s),) = shapes
        if batch is None and b > 1:
            raise ValueError(
                f"Expected batch= to name one of {b} batch entries. With classifier-free guidance, diffusers "
                "runs the negative prompt first, and batch=-1 is the prompt of a single picture."
            )
        entry = 0 if batch is None else whole(batch, "batch", -b, b - 1)
        grids = [tuple(self.sums[name].shape[2:]) for name in names]
        if grid is None:
            rows, cols = max(grids, key=lambda grid: grid[0] * grid[1])
        else:
            rows, cols = check_grid(grid)
        mean = torch.zeros(s, rows, cols)
        for name in names:
            layer = self.sums[name][entry].cpu() / self.steps[name]  # [s, rows, cols] of the layer
            if layer.shape[1:] != (rows, cols):
                options = {} if interpolation == "nearest" else {"align_corners": False}
                layer = F.interpolate(layer[None], size=(rows, cols), mode=interpolation, **options)[0]
            mean += layer / len(names)
        words = list(_words(tokens, s))
        images = torch.stack([mean[list(positions)].sum(0) for _, positions in words])
        return WordImages(images.clamp_(0.0, 1.0), [word for word, _ in words])


def check_grid(grid: Any) -> tuple[int, int]:
    """Return a pair (rows, cols), checked."""
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise TypeError(f"Expected the grid of a picture to be (rows, cols), got {grid!r}.")
    rows, cols = (whole(n, "a side of the grid", least=1) for n in grid)
    return rows, cols


def read_keep(keep: Any) -> WordMaps | None:
    """Return the sums for keep="words", or keep={"words": (rows, cols)}; None for other values."""
    names = [keep] if isinstance(keep, str) else list(keep) if isinstance(keep, Sequence | Mapping) else []
    if "words" not in names:
        return None
    if len(names) > 1:
        others = ", ".join(str(name) for name in names if name != "words")
        raise ValueError(f'Expected keep to be "words" alone, got {others} beside it.')
    grid = keep["words"] if isinstance(keep, Mapping) else ()
    return WordMaps(None if grid == () else check_grid(grid))


def _find_grid(size: tuple[int, int], t: int) -> tuple[int, int] | None:
    """Return the rows and columns of t places of a picture, divided by 1, 2, 4, …, or another number."""
    powers = [2**n for n in range(max(size).bit_length() + 1)]
    for factor in (*powers, *range(3, max(size) + 1)):
        rows, cols = (-(-side // factor) for side in size)
        if rows * cols == t:
            return rows, cols
    return None


def _words(tokens: Sequence[str] | None, s: int) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield each word with the positions of its tokens; without labels, each key with its position."""
    if tokens is None:
        yield from ((str(n), (n,)) for n in range(s))
        return
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"Expected tokens to be a list of strings, got {kind(tokens)}.")
    if not 0 < len(tokens) <= s:
        raise ValueError(
            f"Expected tokens to be labels of the {s} keys, or of the first of them, got {len(tokens)}."
        )
    if not isinstance(tokens, TokenizedText):
        yield from ((token, (n,)) for n, token in enumerate(tokens))
        return
    found = False
    for group in dict.fromkeys((word.start, word.stop) for word in tokens.words):
        text = "".join(tokens.piece(n) for n in range(*group)).strip()
        if any(character.isalnum() for character in text):
            found = True
            yield text, range(*group)
    if not found:
        raise ValueError("Expected tokens with at least one word, got special tokens and punctuation only.")
