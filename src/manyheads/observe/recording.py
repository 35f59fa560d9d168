"""What was seen: an ordered mapping from layers to maps, with a table, a picture and a file."""

from __future__ import annotations

import difflib
import os
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manyheads import files, measures, reductions
from manyheads.maps import AttentionMap
from manyheads.observe.generation import Print, joined
from manyheads.observe.summaries import BY_MASK, Reduced, mean
from manyheads.shapes import amount, kind, sizes

if TYPE_CHECKING:
    import pandas
    import rich.table
    from matplotlib.figure import Figure

Call = AttentionMap | Reduced


class NoSuchLayer(KeyError):
    """A layer that wasn't seen; its message names the near ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class Seen(Mapping[Any, Any]):
    """The attention of a model, layer by layer, in order of first call.

    Keys are the paths of the attention modules, as in `named_modules`; a unique part of one finds it
    too, and so does a number. `seen[name]` is the layer's last call, `seen.calls(name)` are all of
    them: an `AttentionMap` each, or what was kept of it (`Reduced`) under keep="statistics". Steps of a
    generation whose keys continue each other's are one call. `missed` are modules that took a softmax of
    their own, with its shape: attention written out by hand, perhaps, of which there is no map. `provenance`
    says where all comes from.
    """

    def __init__(self, provenance: Mapping[str, Any] | None = None) -> None:
        self.provenance = dict(provenance or {})
        self.missed: dict[str, tuple[int, ...]] = {}
        self._calls: dict[str, list[Call]] = {}
        self._prints: dict[str, Print] = {}

    # -- the mapping -------------------------------------------------------------------------------

    def __getitem__(self, name: str | int) -> Any:
        """The last call of a layer by name, part of one or number; NoSuchLayer or TypeError for others."""
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
        """All calls of a layer, in order; NoSuchLayer, TypeError for what is no path and no number."""
        return list(self._calls[self._find(name)])

    @property
    def nbytes(self) -> int:
        """The bytes that everything kept holds."""
        every = [x for calls in self._calls.values() for call in calls for x in call.tensors()]
        return sum({(x.data_ptr(), x.nbytes): x.nbytes for x in every}.values())  # what is shared counts once

    def _find(self, name: str | int) -> str:
        names = list(self._calls)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise TypeError(f"a layer is asked for by its path or its number, and {kind(name)} came.")
        if isinstance(name, int):
            if not -len(names) <= name < len(names):
                raise NoSuchLayer(f"there is no layer {name}: {len(names)} were seen.")
            return names[name]
        found = matching(name, names)
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
            raise NoSuchLayer(
                f"{name!r} may be {len(found)} of the layers seen: {some}. Say more of its path."
            )
        raise NoSuchLayer(f"no layer {name!r} was seen{near(name, names)}.")

    def add(self, name: str, call: Call, k: Tensor) -> None:
        """Take in a call of keys k `[b, g, s, d]`; one that goes on where the last one ended joins it."""
        calls = self._calls.setdefault(name, [])
        before = self._prints.get(name)
        longer = joined(calls[-1], call, before, k) if calls and before is not None else None
        if longer is not None:
            calls[-1] = longer
        else:
            calls.append(call)
        self._prints[name] = Print.of(k, call)

    # -- labels ------------------------------------------------------------------------------------

    def label(self, tokens: Sequence[str] | Sequence[Sequence[str]]) -> None:
        """Name the keys of every layer that has as many: s strings, or b lists of them.

        Raises ValueError if no layer has: then these are not the tokens that the model saw; TypeError for
        what aren't strings.
        """
        if isinstance(tokens, str) or not isinstance(tokens, Sequence):
            raise TypeError(f"tokens must be a list of strings, and {kind(tokens)} came.")
        first = tokens[0] if tokens and isinstance(tokens[0], list | tuple) else tokens
        fits = 0
        for calls in self._calls.values():
            for n, call in enumerate(calls):
                if call.shape[3] == len(first):
                    calls[n] = call.labelled(tokens)
                    fits += 1
        if not fits:
            lengths = sorted({call.shape[3] for calls in self._calls.values() for call in calls})
            raise ValueError(
                f"tokens must be as many as a layer's keys, {' or '.join(map(str, lengths))} here, and "
                f"{len(first)} came."
            )

    # -- the table ---------------------------------------------------------------------------------

    def table(self, ids: Tensor | None = None) -> Table:
        """The measures of every head, a row each: (layer, head, measures), averaged over the batch.

        Weights lie between 0 and 1, entropy is in nats, distance in positions. ids: the tokens `[s]` or
        `[b, s]`; with them, duplicate-token and induction heads are measured. Raises TypeError or
        ValueError for other ids.
        """
        if ids is not None and not isinstance(ids, Tensor):
            raise TypeError(f"ids must be the tokens, integers [s] or [b, s], and {kind(ids)} came.")
        rows: list[tuple[str, int, dict[str, Tensor]]] = []
        for name, calls in self._calls.items():
            columns = {column: x.mean(0).tolist() for column, x in measured(calls[-1], ids).items()}
            rows += [
                (name, head, {column: values[n] for column, values in columns.items()})
                for n, head in enumerate(calls[-1].heads)
            ]
        return Table.of(rows)

    # -- pictures and files ------------------------------------------------------------------------

    def plot(self, **options: Any) -> Figure:
        """All layers and heads as a grid of small pictures: `figures.grid`, with its options.

        Raises ValueError where there is nothing to draw, and what `figures.grid` raises.
        """
        from manyheads import figures

        if not self._calls:
            raise ValueError("nothing was seen, so there is nothing to draw.")
        maps: dict[str, AttentionMap] = {}
        for name, calls in self._calls.items():
            if isinstance(calls[-1], AttentionMap):
                maps[name] = calls[-1]
            else:
                raise ValueError(
                    f'{name} was observed with keep="statistics", which leaves no weights to draw: observe '
                    'with keep="maps", or draw what was kept.'
                )
        return figures.grid(maps, **options)

    def view(self, *others: Any, port: int = 0, browser: bool = True) -> Any:
        """Show every layer and head in a browser, or in this notebook, down to single weights.

        others: more runs, maps or files, to see side by side; port: of this machine, 0 being any free one.
        A script that would end goes on with `view().wait()`. TypeError or ValueError for what can't be shown,
        OSError for a port that is taken.
        """
        from manyheads import viewer

        return viewer.view(self, *others, port=port, browser=browser)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into a safetensors file at path, which `manyheads.open_run` reads: docs/format.md.

        Raises ValueError for what can't be written down, such as a `Rule`, OSError from the disk.
        """
        entries = [
            files.Entry(name, n, call.stored())
            for name, calls in self._calls.items()
            for n, call in enumerate(calls)
        ]
        files.write(path, entries, provenance=self.provenance)

    def __repr__(self) -> str:
        lines = [
            f"{n:>4}  {name}: [b, h, t, s] = {list(calls[-1].shape)}"
            + (f", the last of {len(calls)} calls" if len(calls) > 1 else "")
            for n, (name, calls) in enumerate(self._calls.items())
        ]
        missed = [f"   -  {name}: not seen, a softmax of {list(x)}" for name, x in self.missed.items()]
        what = f"layers: {len(lines)}, holding {amount(self.nbytes)}" if lines else "nothing seen yet"
        return "\n".join([f"Seen({what})", *lines, *missed])


def open_run(path: str | os.PathLike[str]) -> Seen:
    """What `Seen.save` wrote to path, memory-mapped: nothing is read before it is needed.

    Raises ValueError for a file of something else or a broken one, OSError where it can't be read.
    """
    run = files.read(path)
    seen = Seen(run.provenance)
    for entry in run.entries:
        kept = entry.content
        call = Reduced.restored(kept) if isinstance(kept, files.Kept) else AttentionMap.of(*kept)
        seen._calls.setdefault(entry.name, []).append(call)
    return seen


def measured(call: Call, ids: Tensor | None) -> dict[str, Tensor]:
    """The table's columns for one call, each `[b, h]`."""
    if isinstance(call, Reduced):
        return call.columns()
    columns = {name: getattr(measures, name)(call) for name in BY_MASK}
    if ids is not None:
        if ids.shape[-1] != call.shape[3]:
            raise ValueError(f"ids must be one for each of s = {call.shape[3]} keys, and {sizes(ids)} came.")
        ids = ids.to(call.problem.q.device)
        columns["duplicate_token"] = measures.duplicate_token(call, ids)
        columns["induction"] = measures.induction(call, ids)
    sees = reductions.first_keys(call.problem) < call.shape[3]  # [b, h, t]: a key at all
    spread = call.statistics("entropy", "distance")
    return columns | {name: mean(x, sees) for name, x in spread.items()}


class Table(Sequence[Any]):
    """The rows (layer, head, measures), as named tuples; `print` shows them, `to_pandas` converts them.

    `columns` are the names in a row.
    """

    def __init__(self, rows: Sequence[Any], columns: Sequence[str]) -> None:
        self.rows, self.columns = tuple(rows), tuple(columns)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, Mapping[str, Any]]]) -> Table:
        """A table of rows (layer, head, measures by name); a measure that a layer lacks is None there."""
        rows = list(rows)
        columns = list(dict.fromkeys(column for *_, measured in rows for column in measured))
        row = namedtuple("Row", ["layer", "head", *columns])  # type: ignore[misc]
        return cls(
            [row._make([layer, head, *map(measured.get, columns)]) for layer, head, measured in rows],
            ("layer", "head", *columns),
        )

    def __getitem__(self, index: Any) -> Any:
        """The row of an index, or a table of the rows of a slice."""
        return Table(self.rows[index], self.columns) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def sorted(self, by: str) -> Table:
        """The same rows, sorted by a measure, the largest first; ValueError for one that isn't there."""
        if by not in self.columns:
            raise ValueError(f"the table has the columns {', '.join(self.columns)}, and {by!r} came.")
        lowest = -float("inf")
        order = sorted(self.rows, key=lambda row: -(lowest if getattr(row, by) is None else getattr(row, by)))
        return Table(order, self.columns)

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas DataFrame; ImportError where pandas isn't installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas, which isn't installed: pip install pandas.") from None
        return pandas.DataFrame(list(self.rows), columns=list(self.columns))

    def __rich__(self) -> rich.table.Table:
        from rich import box
        from rich.table import Table as Drawn

        drawn = Drawn(
            box=box.SIMPLE_HEAD,
            caption="means over queries and batch: weight (0 to 1), entropy in nats, distance in positions",
        )
        for column in self.columns:
            words = column == "layer"
            drawn.add_column(
                column.replace("_", " "),
                justify="left" if words else "right",
                no_wrap=words,
                min_width=max(map(len, column.split("_"))),
            )
        for layer, head, *values in self.rows:
            drawn.add_row(layer, str(head), *("-" if x is None else f"{x:.2f}" for x in values))
        return drawn

    def __repr__(self) -> str:
        from rich.console import Console

        page = Console(file=StringIO(), width=110, color_system=None)
        page.print(self)
        return page.file.getvalue().rstrip()  # type: ignore[attr-defined]


# -- names -----------------------------------------------------------------------------------------


def matching(name: str, names: Iterable[str]) -> list[str]:
    """The paths that a name may mean: itself; else those that hold it as whole parts; else as text."""
    names = list(names)
    return [name] if name in names else within(name, names)


def within(name: str, names: Iterable[str]) -> list[str]:
    """The paths that lie in what a name may mean: those that hold it as whole parts; else as text."""
    names = list(names)
    whole_parts = [one for one in names if name == one or f".{name}." in f".{one}."]
    return whole_parts or [one for one in names if name in one]


def near(name: str, names: Iterable[str]) -> str:
    """`; near it are …`, or what there is, for the end of a sentence."""
    names = [one for one in names if one]
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    if close:
        return f"; near it: {', '.join(close)}"
    return f"; there are {', '.join(names[:6])}{', …' if len(names) > 6 else ''}" if names else ""
