"""`Patches`: the places of patches among tokens, also as JSON data in the provenance of a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from manyheads.shapes import whole

GIVE = "Give the place of the patches: Patches(grid=(rows, cols), first=number of tokens before them)."
CLASS = "class token"


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
        (rows, cols), stride = self.grid, self.stride
        return self.first + (rows * cols if stride is None else (rows - 1) * stride + cols)

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
                    f"There is no patch ({row}, {col}): the picture has {rows} × {cols} patches. Use rows "
                    f"0 to {rows - 1} and columns 0 to {cols - 1}."
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
        raise ValueError(f"The recorded patches can't be read: {error}. {GIVE}") from None


def select(located: Located, batch: int, picture: int) -> Patches:
    """Return the patches of a picture; raise IndexError if there is none of this number."""
    if not located:
        raise IndexError("There is no picture: the batch has no sequences. Run the model on a picture.")
    whole(batch, "batch", least=-(1 << 60))
    if len(located) > 1 and not -len(located) <= batch < len(located):
        raise IndexError(
            f"There is no batch entry {batch}: the model read {len(located)} sequences. Use 0 to "
            f"{len(located) - 1}."
        )
    pictures = located[batch if len(located) > 1 else 0]
    if not -len(pictures) <= whole(picture, "picture", least=-(1 << 60)) < len(pictures):
        raise IndexError(
            f"There is no picture {picture}: sequence {batch} has {len(pictures)} "
            f"picture{'' if len(pictures) == 1 else 's'}. "
            + (f"Use 0 to {len(pictures) - 1}." if pictures else "Run the model on a picture.")
        )
    return pictures[picture]


def common(located: Located, picture: int = 0) -> Patches:
    """Return a picture's patches; raise ValueError if they differ between sequences of the batch."""
    found = select(located, 0, picture)
    if any(select(located, batch, picture) != found for batch in range(len(located))):
        raise ValueError(
            "Expected the picture at the same place in all sequences of the batch, got different places. "
            "Select one: amap.only(batch=n).image(...), or give recording.patches(batch=n) as the patches."
        )
    return found
