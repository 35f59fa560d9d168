"""What the viewer shows: the layers of a recording, of a single map, or of a file of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.maps import AttentionMap, sequence_labels
from manyheads.observe import Recording, open_run
from manyheads.observe.summaries import Call, Reduced
from manyheads.shapes import kind


class FileChanged(Exception):
    """The file of a run, which is mapped into memory, was removed or changed."""


@dataclass(frozen=True)
class Layer:
    """One attention call.

    Attributes:
        name: The name of the layer.
        call: The map, or the statistics that were kept.
        number: The number among all calls.
        finest: The finest level of tiles; 0 except in exported pages, which may lack single weights.
    """

    name: str
    call: AttentionMap | Reduced
    number: int = 0
    finest: int = 0

    @property
    def has_weights(self) -> bool:
        """Return True unless only statistics were kept."""
        return isinstance(self.call, AttentionMap)

    @property
    def has_patches(self) -> bool:
        """Return True if the places of a picture's patches among the keys are known."""
        return self.has_weights and isinstance(self.call.provenance.get("patches"), list)

    @property
    def map(self) -> AttentionMap:
        """The map.

        Raises:
            LookupError: If only statistics were kept.
        """
        if isinstance(self.call, AttentionMap):
            return self.call
        raise LookupError(f'{self.name} has only statistics. Use observe(..., keep="maps") to see weights.')


class ViewedRun:
    """The layers of a recording, of a single map, or of a file of either."""

    def __init__(
        self, title: str, layers: list[Layer], provenance: Mapping[str, Any], path: Path | None = None
    ) -> None:
        self.title, self.layers, self.provenance, self.path = title, layers, provenance, path
        self.pictures: list[str] = []  # the URL of the picture of each batch entry
        self._stamp = _stamp(path)

    @classmethod
    def of(cls, source: Recording | AttentionMap | str | PathLike[str]) -> ViewedRun:
        """Return a run.

        Args:
            source: Recorded attention, one map, or the path of a file of either.

        Returns:
            The run, with all numbers on the CPU.

        Raises:
            TypeError: If the source has the wrong type.
            ValueError: If there is nothing to show, or the file is damaged.
            OSError: If the file can't be read.
        """
        path, title = None, "attention"
        if isinstance(source, str | PathLike):
            path = Path(fspath(source))
            title, source = path.stem, open_run(path)
        if isinstance(source, AttentionMap):
            calls: dict[str, list[Any]] = {"": [source]}
        elif isinstance(source, Recording):
            calls = {name: source.calls(name) for name in source}
            title = str(source.provenance.get("model", title))
        else:
            raise TypeError(
                f"Expected Recording, AttentionMap or a path to a file of either, got {kind(source)}."
            )
        layers: list[Layer] = []
        for name, several in calls.items():
            for n, call in enumerate(several):
                if all(call.shape):
                    label = (name or "attention") + (f", call {n}" if len(several) > 1 else "")
                    if isinstance(call, AttentionMap) and call.problem.q.device.type != "cpu":
                        call = call.to("cpu")
                    layers.append(Layer(label, call, len(layers)))
        if not layers:
            raise ValueError(
                "Expected an attention call with a query and a key, got none. "
                "Record a text of at least one token."
            )
        return cls(title, layers, source.provenance, path)

    def with_layers(self, layers: list[Layer]) -> ViewedRun:
        """Return the run with other layers, such as some of its own."""
        run = ViewedRun(self.title, layers, self.provenance)
        run.pictures = self.pictures
        return run

    def check_file(self) -> None:
        """Raise FileChanged if the file was changed or removed since it was opened."""
        if self.path is not None and _stamp(self.path) != self._stamp:
            raise FileChanged(f"{self.path.name} was removed or changed since it was opened. Open it again.")

    def ids(self, amap: AttentionMap) -> Tensor | None:
        """Return the token ids `[s]` of one sequence: recorded ones, or numbers of labels; None without."""
        ids, s = self.provenance.get("ids"), amap.shape[3]
        if isinstance(ids, list | tuple) and len(ids) == s and all(isinstance(n, int) for n in ids):
            return torch.tensor(ids)
        keys = sequence_labels(amap.tokens)
        if keys is None:
            return None
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(label, len(numbers)) for label in keys])


def distinguish(runs: Sequence[ViewedRun]) -> None:
    """Add to each title that several runs have the name of its file, then its folder, and else a number."""
    for name in (_file_name, _folder_and_file_name):
        titles = [run.title for run in runs]
        for run in runs:
            if titles.count(run.title) > 1 and run.path is not None and name(run.path) != run.title:
                model = run.title.partition(": ")[0]
                run.title = name(run.path) if model == run.path.stem else f"{model}: {name(run.path)}"
    titles = [run.title for run in runs]
    for n, run in enumerate(runs):
        if titles.count(run.title) > 1:
            run.title = f"{run.title} ({n})"


def _file_name(path: Path) -> str:
    return path.stem


def _folder_and_file_name(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.stem}"


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Return numbers that change if a file is changed or replaced; None if there is no file."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def first_position(call: Call, batch: int) -> int | None:
    """Return the position of the first query, as a key; None in cross-attention.

    The mask of statistics wasn't recorded, so that they count as cross-attention unless t = s.
    """
    *_, t, s = call.shape
    mask, offset = (call.problem.mask, call.problem.offset) if isinstance(call, AttentionMap) else (None, 0)
    if t != s and (mask is None or mask.normal().band[1] != 0):
        return None
    return offset if isinstance(offset, int) else int(offset[batch])
