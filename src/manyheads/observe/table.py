"""`Table`: a row of scores for each head, to print, sort and convert."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manyheads.highlights import format_score
from manyheads.measures import SCORES, UNITS
from manyheads.observe.summaries import HEAD_SCORES, Call, Reduced

if TYPE_CHECKING:
    import pandas
    import rich.table


TOKEN_SCORES = ("duplicate_token", "induction")  # of `measures.SCORES`
MEANS = ("entropy", "distance")  # statistics of queries
COLUMNS = (*HEAD_SCORES, *TOKEN_SCORES, *MEANS)  # of the table of maps


def score_heads(call: Call, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Return the columns of the table of one call, each `[b, h]`.

    Args:
        call: A map, or the statistics that were kept of it.
        ids: The tokens `[s]` or `[b, s]`, on which some scores of a map depend.

    Returns:
        The columns by name.
    """
    if isinstance(call, Reduced):
        return call.columns()
    columns = Reduced.of(call, dict.fromkeys((*HEAD_SCORES, *MEANS), ())).columns()
    if ids is not None:
        columns |= {name: SCORES[name].mean_weight(call, ids) for name in TOKEN_SCORES}
    return {name: columns[name] for name in COLUMNS if name in columns}


class Table(Sequence[Any]):
    """The heads of a recording as rows (layer, head, scores), which are named tuples.

    Args:
        rows: The rows.
        columns: The names of the values in a row.
    """

    def __init__(self, rows: Sequence[Any], columns: Sequence[str]) -> None:
        self.rows, self.columns = tuple(rows), tuple(columns)

    @classmethod
    def of(cls, calls: Mapping[str, Call], ids: Tensor | None = None) -> Table:
        """Return the table of one call of each layer, with None for a score that a layer lacks."""
        scores = {
            layer: {name: x.mean(0).tolist() for name, x in score_heads(call, ids).items()}
            for layer, call in calls.items()
        }
        names = list(dict.fromkeys(name for columns in scores.values() for name in columns))
        row = namedtuple("Row", ["layer", "head", *names])  # type: ignore[misc]
        rows = [
            row._make([layer, head, *(columns[name][n] if name in columns else None for name in names)])
            for layer, columns in scores.items()
            for n, head in enumerate(calls[layer].heads)
        ]
        return cls(rows, row._fields)

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or for a slice a table of its rows."""
        return Table(self.rows[index], self.columns) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def sorted(self, by: str) -> Table:
        """Return the table sorted by a column, largest first; raise ValueError for an unknown column."""
        if by not in self.columns:
            hint = (
                f' {by} needs the token ids and the maps: recording.table(ids), observed with keep="maps".'
                if by in TOKEN_SCORES
                else ""
            )
            raise ValueError(f"Expected one of the columns {', '.join(self.columns)}, got {by!r}.{hint}")

        def rank(row: Any) -> tuple[bool, float]:
            value = getattr(row, by)
            return value is None, -(value or 0.0)

        return Table(sorted(self.rows, key=rank), self.columns)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame; raise ImportError if pandas isn't installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "to_pandas needs pandas, which isn't installed. Run pip install pandas."
            ) from None
        return pandas.DataFrame(list(self.rows), columns=list(self.columns))

    def __rich__(self) -> rich.table.Table:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(
            box=box.SIMPLE_HEAD,
            caption="means over queries and batch: weights, 0 to 1; "
            + ", ".join(f"{name} in {unit}" for name, unit in UNITS.items())
            + "; logits_max: the largest score" * ("logits_max" in self.columns),
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
            table.add_row(layer, str(head), *("-" if x is None else format_score(x) for x in values))
        return table

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=110, color_system=None)
        console.print(self)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]
