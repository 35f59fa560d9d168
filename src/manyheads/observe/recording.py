"""`Recording`: the result of `observe`, an ordered mapping from layers to their attention maps."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads import extras, storage
from manyheads.maps import AttentionMap
from manyheads.observe.generation import checksums, join, reached_keys
from manyheads.observe.summaries import Call, Reduced
from manyheads.observe.table import Table
from manyheads.shapes import amount, kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoSuchLayer(KeyError):
    """A layer that wasn't recorded; the message names similar ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class Recording(Mapping[Any, Any]):
    """The attention of a model, layer by layer, in order of first call.

    Keys are the paths of attention modules, as in `named_modules`. A layer can also be given by a unique part
    of its path, or by its number. `recording[name]` is the layer's last call, and `recording.calls(name)`
    lists all calls: an `AttentionMap` each, or its statistics (`Reduced`) with keep="statistics". Decoding
    steps are joined into one call if the keys of each step extend those of the step before.

    `missed` maps modules that computed a softmax outside of any attention call to the shape of its input. It
    may be hand-written attention, which isn't recorded. `provenance` describes the origin: the model, and
    entries that you add.
    """

    def __init__(self, provenance: Mapping[str, Any] | None = None) -> None:
        self.provenance = dict(provenance or {})
        self.missed: dict[str, tuple[int, ...]] = {}
        self._calls: dict[str, list[Call]] = {}
        self._checksums: dict[str, Tensor] = {}  # the keys of each layer's last call

    # -- the mapping -------------------------------------------------------------------------------

    def __getitem__(self, name: str | int) -> Any:
        """Return the last call of a layer.

        Args:
            name: The path of the layer, a unique part of it, or its number.

        Returns:
            The map, or its statistics.

        Raises:
            NoSuchLayer: If no layer, or more than one, has this name.
            TypeError: If the name is neither a str nor an int.
        """
        return self._calls[self._find(name)][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, name: object) -> bool:
        try:
            self._find(name)  # type: ignore[arg-type]
        except (NoSuchLayer, TypeError):
            return False
        return True

    def calls(self, name: str | int) -> list[Any]:
        """Return all calls of a layer, in order; the name as in `recording[name]`."""
        return list(self._calls[self._find(name)])

    @property
    def nbytes(self) -> int:
        """The bytes of all recorded tensors; shared memory counts once."""
        tensors = [x for calls in self._calls.values() for call in calls for x in call.tensors()]
        return sum({(x.data_ptr(), x.nbytes): x.nbytes for x in tensors}.values())

    def _find(self, name: str | int) -> str:
        names = list(self._calls)
        if isinstance(name, bool) or not isinstance(name, str | int):
            pair: Any = name
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            hint = f" For one of its calls, use recording.calls({pair[0]!r})[{pair[1]!r}]." if is_pair else ""
            raise TypeError(f"Expected a layer's path or number, got {kind(name)}.{hint}")
        if isinstance(name, int):
            if not -len(names) <= name < len(names):
                raise NoSuchLayer(
                    f"There is no layer {name}: {len(names)} layers were recorded. "
                    f"Use 0 to {len(names) - 1}, or a name."
                )
            return names[name]
        matches = [name] if name in names else paths_within(name, names)
        if len(matches) == 1:
            return matches[0]
        if matches:
            examples = ", ".join(matches[:4]) + (", …" if len(matches) > 4 else "")
            raise NoSuchLayer(
                f"{name!r} matches {len(matches)} of the recorded layers: {examples}. Give more of the path."
            )
        raise NoSuchLayer(f"No layer {name!r} was recorded{close_matches(name, names)}.")

    def add(self, name: str, call: Call, k: Tensor) -> None:
        """Add a call with keys k `[b, g, s, d]`, or join it to the last call if k extends its keys."""
        calls = self._calls.setdefault(name, [])
        previous = self._checksums.get(name)
        joined = None
        if previous is not None and (n := previous.shape[2]) and torch.equal(checksums(k, n), previous):
            joined = join(calls[-1], call)
        if joined is None:
            calls.append(call)
        else:
            calls[-1] = joined
        self._checksums[name] = checksums(k, reached_keys(call, k.shape[2]))

    # -- labels and table --------------------------------------------------------------------------

    def label(self, tokens: Sequence[str] | Sequence[Sequence[str]]) -> None:
        """Label the keys of every layer that has as many keys as there are tokens.

        Args:
            tokens: s strings or a `TokenizedText`, or b of them.

        Raises:
            ValueError: If no layer has as many keys as there are tokens.
            TypeError: If tokens isn't a list of strings.
        """
        if isinstance(tokens, str) or not isinstance(tokens, Sequence):
            raise TypeError(f"Expected tokens to be a list of strings, got {kind(tokens)}.")
        several = len(tokens) > 0 and not isinstance(tokens[0], str) and isinstance(tokens[0], Sequence)
        n = len(tokens[0] if several else tokens)
        lengths = sorted({call.shape[3] for calls in self._calls.values() for call in calls})
        if n not in lengths:
            raise ValueError(
                f"Expected as many tokens as a layer has keys, which is {' or '.join(map(str, lengths))}, "
                f"got {n}."
            )
        for calls in self._calls.values():
            calls[:] = [call.labelled(tokens) if call.shape[3] == n else call for call in calls]

    def table(self, ids: Tensor | None = None) -> Table:
        """Return a table of the scores of every head, averaged over the batch.

        For layers that were recorded with keep="statistics", columns are the statistics that have one number
        for each head or query. Weights lie between 0 and 1; entropy is in nats, distance in positions.

        Args:
            ids: The tokens, integers `[s]` or `[b, s]`; with them, duplicate-token and induction heads are
                scored.

        Returns:
            A table of named tuples (layer, head, scores), to print, sort or convert to pandas.

        Raises:
            TypeError, ValueError: If ids aren't integers, one for each key.
        """
        return Table.of({name: calls[-1] for name, calls in self._calls.items()}, ids)

    # -- figures, viewer, files --------------------------------------------------------------------

    def plot(self, **options: Any) -> Figure:
        """Draw all layers and heads as a grid of heatmaps.

        Args:
            **options: The options of `figures.grid`.

        Returns:
            The figure.

        Raises:
            ValueError: If nothing was recorded, or only statistics.
        """
        from manyheads import figures  # this imports matplotlib

        if not self._calls:
            raise ValueError(
                "Nothing was recorded, so there is nothing to draw. Call the model inside observe(...)."
            )
        maps: dict[str, AttentionMap] = {}
        for name, (*_, call) in self._calls.items():
            if isinstance(call, Reduced):
                raise ValueError(
                    f'{name} was observed with keep="statistics", which keeps no weights to draw. Observe '
                    'with keep="maps", or draw the statistics.'
                )
            maps[name] = call
        return figures.grid(maps, **options)

    def view(self, *others: Any, port: int = 0, browser: bool = True) -> Any:
        """Show every layer and head in a browser, or in this notebook, down to single weights.

        In a script, use `recording.view().wait()`, which keeps the server running until you interrupt it.

        Args:
            *others: More recordings, maps or files, to compare side by side.
            port: Port to listen on (0 picks a free one).
            browser: If True, open a browser.

        Returns:
            The running server, or in a notebook its widget.

        Raises:
            TypeError, ValueError: If `others` can't be shown, or nothing was recorded.
            OSError: If the port is in use.
        """
        return extras.view(self, *others, port=port, browser=browser)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the recording in a safetensors file that `manyheads.open_run` reads (docs/format.md).

        Args:
            path: The file.

        Raises:
            ValueError: If a mask can't be saved, such as a `Rule`.
            OSError: If the file can't be written.
        """
        entries = [
            storage.Entry(name, n, call.stored())
            for name, calls in self._calls.items()
            for n, call in enumerate(calls)
        ]
        storage.write(path, entries, provenance=self.provenance)

    def __repr__(self) -> str:
        lines = [
            f"{n:>4}  {name}: [b, h, t, s] = {list(calls[-1].shape)}"
            + (f", the last of {len(calls)} calls; all: .calls({n})" if len(calls) > 1 else "")
            for n, (name, calls) in enumerate(self._calls.items())
        ]
        missed = [f"   -  {name}: not recorded, a softmax of {list(x)}" for name, x in self.missed.items()]
        size = f"layers: {len(lines)}, {amount(self.nbytes)}" if lines else "nothing recorded yet"
        return "\n".join([f"Recording({size})", *lines, *missed])


def open_run(path: str | os.PathLike[str]) -> Recording:
    """Open a file that `Recording.save` wrote. It is memory-mapped: tensors are read when they are needed.

    Args:
        path: The file.

    Returns:
        The recording.

    Raises:
        ValueError: If it isn't such a file, or is damaged.
        OSError: If it can't be read.
    """
    run = storage.read(path)
    recording = Recording(run.provenance)
    for name, _, stored in run.entries:
        call = AttentionMap.of(*stored) if isinstance(stored, storage.StoredMap) else Reduced.restored(stored)
        recording._calls.setdefault(name, []).append(call)
    return recording


# -- paths -----------------------------------------------------------------------------------------


def paths_within(name: str, paths: Iterable[str]) -> list[str]:
    """Return the paths of which a name is one or more whole components, or else a substring."""
    paths = list(paths)
    whole_parts = [path for path in paths if name == path or f".{name}." in f".{path}."]
    return whole_parts or [path for path in paths if name in path]


def close_matches(name: str, paths: Iterable[str]) -> str:
    """Return text to append to an error: the most similar paths, or the first ones if none is similar."""
    paths = [path for path in paths if path]
    similar = difflib.get_close_matches(name, paths, n=4, cutoff=0.5)
    if similar:
        return f". Choose a similar one: {', '.join(similar)}"
    return f". Choose one of {', '.join(paths[:6])}{', …' if len(paths) > 6 else ''}" if paths else ""
