"""`Table`: a row of scores for each head, to print, sort and convert."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manyheads import measures
from manyheads.observe.summaries import Call, Reduced, mean_where
from manyheads.shapes import sizes
from manyheads.statistics import first_keys

if TYPE_CHECKING:
    import pandas
    import rich.table


def score_heads(call: Call, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Return the scores of the heads of one call, each `[b, h]`; with the tokens `[s]` or `[b, s]`, more."""
    if isinstance(call, Reduced):
        return call.columns()
    columns = {name: getattr(measures, name)(call) for name in measures.MAP_MASKS}
    if ids is not None:
        if ids.shape[-1] != call.shape[3]:
            raise ValueError(f"Expected one id for each of s = {call.shape[3]} keys, got {sizes(ids)}.")
        ids = ids.to(call.problem.q.device)
        columns |= {name: getattr(measures, name)(call, ids) for name in measures.TOKEN_MASKS}
    has_keys = first_keys(call.problem) < call.shape[3]  # [b, h, t]
    statistics = call.statistics("entropy", "distance")
    return columns | {name: mean_where(x, has_keys) for name, x in statistics.items()}


class Table(Sequence[Any]):
    """The heads of a recording as rows (layer, head, scores), which are named tuples.

    `print` shows a table, `to_pandas` converts it, `columns` are the names in a row.
    """

    def __init__(self, rows: Sequence[Any], columns: Sequence[str]) -> None:
        self.rows, self.columns = tuple(rows), tuple(columns)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, Mapping[str, Any]]]) -> Table:
        """Return a table of (layer, head, scores by name), with None for a score that a layer lacks."""
        rows = list(rows)
        names = list(dict.fromkeys(name for *_, scores in rows for name in scores))
        row = namedtuple("Row", ["layer", "head", *names])  # type: ignore[misc]
        values = [row._make([layer, head, *map(scores.get, names)]) for layer, head, scores in rows]
        return cls(values, row._fields)

    def __getitem__(self, index: Any) -> Any:
        """Return the row of an index, or a table of the rows of a slice."""
        return Table(self.rows[index], self.columns) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def sorted(self, by: str) -> Table:
        """Return the same rows sorted by a column, largest first; ValueError for an unknown column."""
        if by not in self.columns:
            raise ValueError(f"Expected one of the columns {', '.join(self.columns)}, got {by!r}.")
        present = [row for row in self.rows if getattr(row, by) is not None]
        absent = [row for row in self.rows if getattr(row, by) is None]
        return Table([*sorted(present, key=lambda row: -getattr(row, by)), *absent], self.columns)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame; ImportError if pandas isn't installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas, which isn't installed: pip install pandas.") from None
        return pandas.DataFrame(list(self.rows), columns=list(self.columns))

    def __rich__(self) -> rich.table.Table:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(
            box=box.SIMPLE_HEAD,
            caption="means over queries and batch: weights, 0 to 1; "
            + ", ".join(f"{name} in {unit}" for name, unit in measures.UNITS.items()),
        )
        for column in self.columns:
            is_layer = column == "layer"
            table.add_column(
                column.replace("_", " "),
                justify="left" if is_layer else "right",
                no_wrap=is_layer,
                min_width=max(map(len, column.split("_"))),
            )
        for layer, head, *values in self.rows:
            table.add_row(layer, str(head), *("-" if x is None else f"{x:.2f}" for x in values))
        return table

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=110, color_system=None)
        console.print(self)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]
