"""The tables of an atlas, in Parquet files, and `Atlas`, which reads them.

docs/reference/atlas.md describes the folder and the columns. Tables have one row for each head, or several,
in the order of layers and heads; counts and sums of a corpus are in no table, only what follows from them.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads import extras
from manyheads.atlas.plans import Plan, load_model, write
from manyheads.atlas.summaries import (
    MEASURES,
    POSITIONAL,
    SHARES,
    Summary,
    mean_overlap,
    position_edges,
    quantiles,
    scale_of,
)
from manyheads.highlights import find_pattern
from manyheads.measures import UNITS
from manyheads.shapes import kind, whole
from manyheads.tokens import TokenizedText

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

    from manyheads.observe import Recording

FACTS = "atlas.json"  # written last: the atlas is complete
NAMES = (
    "heads",
    "scores",
    "positions",
    "received",
    "sinks",
    "examples",
    "passages",
    "similarity",
    "ablation",
)
JOINED = 0.5  # the least mean overlap of the heads of a cluster


def require() -> None:
    """Raise ImportError if a library that an atlas needs isn't installed."""
    for package in ("pyarrow", "scipy"):
        try:
            __import__(package)
        except ImportError:
            raise extras.missing("An atlas", package, "atlas") from None


def is_complete(folder: Path) -> bool:
    """Return True if a folder has the tables of an atlas."""
    return (folder / FACTS).exists()


# -- writing ---------------------------------------------------------------------------------------


def save(folder: Path, plan: Plan, summary: Summary) -> None:
    """Write the tables of a summary, and last the file that says that they are complete.

    Args:
        folder: The folder.
        plan: The plan of the atlas.
        summary: What was counted in the whole corpus.

    Raises:
        OSError: If a file can't be written.
    """
    import pyarrow.parquet as pq

    for name, table in build(plan, summary).items():
        content = io.BytesIO()
        pq.write_table(table, content, compression="zstd")
        write(folder / f"{name}.parquet", content.getvalue())
    facts = {
        "format": plan.pack()["format"],
        "model": plan.model,
        "layers": [[layer.path, layer.heads] for layer in plan.layers],
        "files": len(plan.text.files),
        "bytes": plan.text.size,
        "windows": int(summary.arrays["windows"]),
        "tokens": int(summary.arrays["tokens"]),
        "length": plan.length,
        "tables": [name for name in NAMES if name != "ablation" or plan.ablate],
    }
    if plan.ablate:
        facts["loss"] = float(summary.arrays["loss"] / summary.arrays["loss_tokens"])
    write(folder / FACTS, json.dumps(facts, indent=1).encode())


def build(plan: Plan, summary: Summary) -> dict[str, pa.Table]:
    """Return the tables of a summary by name."""
    heads = [(n, head, layer.path) for n, layer in enumerate(plan.layers) for head in range(layer.heads)]
    overlap = mean_overlap(summary)
    clusters = cluster(overlap)
    ablation = list(_ablation(heads, summary)) if plan.ablate else None
    rows: dict[str, list[dict[str, Any]]] = {
        "scores": list(_scores(heads, plan, summary)),
        "positions": list(_positions(heads, plan, summary)),
        "received": list(_received(heads, plan, summary)),
        "sinks": list(_sinks(heads, plan, summary)),
        "examples": list(_examples(heads, summary)),
        "passages": list(_passages(plan, summary)),
        "similarity": [
            {"layer": a[0], "head": a[1], "other_layer": b[0], "other_head": b[1], "overlap": overlap[n, m]}
            for n, a in enumerate(heads)
            for m, b in enumerate(heads)
            if n < m
        ],
    }
    rows["heads"] = list(_heads(heads, summary, clusters, ablation))
    if ablation is not None:
        rows["ablation"] = ablation
    schemas = make_schemas()
    return {name: _table(rows[name], schemas[name]) for name in NAMES if name in rows}


def make_schemas() -> dict[str, pa.Schema]:
    """Return the schema of each table."""
    import pyarrow as pa

    i32, i64, f64, text = pa.int32(), pa.int64(), pa.float64(), pa.string()
    head = [("layer", i32), ("head", i32)]
    place = [("file", text), ("byte", i64)]
    return {
        name: pa.schema([pa.field(*column) for column in columns])
        for name, columns in {
            "heads": [
                *head,
                ("path", text),
                ("pattern", text),
                ("cluster", i32),
                *((name, f64) for name in MEASURES),
                ("sink_rate", f64),
                ("sink_first", f64),
                ("ablation_cost", f64),
            ],
            "scores": [
                *head,
                ("score", text),
                ("unit", text),
                ("queries", i64),
                *((name, f64) for name in ("mean", "std", "min", *SHARES, "max")),
            ],
            "positions": [
                *head, ("first", i32), ("last", i32), ("queries", i64), *((name, f64) for name in POSITIONAL),
            ],
            "received": [*head, ("first", i32), ("last", i32), ("keys", i64), ("received", f64)],
            "sinks": [*head, ("rank", i32), ("received", f64), ("token", text), ("position", i32), *place],
            "examples": [
                *head,
                ("rank", i32),
                ("surprise", f64),
                ("passage", i32),
                ("query", i32),
                ("keys", pa.list_(i32)),
                ("weights", pa.list_(f64)),
                ("query_token", text),
                ("key_tokens", pa.list_(text)),
            ],
            "passages": [
                ("passage", i32),
                *place,
                ("text", text),
                ("ids", pa.list_(i32)),
                ("pieces", pa.list_(text)),
                ("special", pa.list_(i32)),
            ],
            "similarity": [*head, ("other_layer", i32), ("other_head", i32), ("overlap", f64)],
            "ablation": [
                *head, ("tokens", i64), ("loss", f64), ("ablated_loss", f64), ("cost", f64), ("error", f64),
            ],
        }.items()
    }  # fmt: skip


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = {name: [row[name] for row in rows] for name in schema.names}
    return pa.table({name: pa.array(column, schema.field(name).type) for name, column in columns.items()})


Heads = list[tuple[int, int, str]]  # layer, head and path


def _heads(
    heads: Heads, summary: Summary, clusters: list[int], ablation: list[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    arrays = summary.arrays
    windows = max(int(arrays["windows"]), 1)
    for n, (layer, head, path) in enumerate(heads):
        means = {name: _mean(arrays["sum"][m, n], arrays["count"][m, n]) for m, name in enumerate(MEASURES)}
        pattern = find_pattern(means)
        yield {
            "layer": layer,
            "head": head,
            "path": path,
            "pattern": None if pattern is None else pattern.label,
            "cluster": clusters[n],
            **means,
            "sink_rate": _mean(arrays["sink_queries"][n], arrays["sink_rows"][n]),
            "sink_first": float(arrays["sink_first"][n] / windows),
            "ablation_cost": None if ablation is None else ablation[n]["cost"],
        }


def _mean(total: Any, count: Any) -> float | None:
    return float(total / count) if count else None


def _scores(heads: Heads, plan: Plan, summary: Summary) -> Iterator[dict[str, Any]]:
    arrays, shares = summary.arrays, np.array([*SHARES.values()])
    for n, (layer, head, _) in enumerate(heads):
        for m, name in enumerate(MEASURES):
            count = int(arrays["count"][m, n])
            row: dict[str, Any] = dict.fromkeys(("mean", "std", "min", *SHARES, "max"))
            if count:
                mean = float(arrays["sum"][m, n] / count)
                least, largest = float(arrays["least"][m, n]), float(arrays["largest"][m, n])
                variance = max(float(arrays["squares"][m, n]) / count - mean * mean, 0.0)
                found = quantiles(
                    arrays["histogram"][m, n], scale_of(name, plan.length), shares, least, largest
                )
                row |= {"mean": mean, "std": math.sqrt(variance), "min": least, "max": largest}
                row |= dict(zip(SHARES, found.tolist(), strict=True))
            unit = UNITS.get(name, "weight")
            yield {"layer": layer, "head": head, "score": name, "unit": unit, "queries": count, **row}


def _bins(length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each bin of positions with its first and last position."""
    edges = position_edges(length)
    yield from ((n, start, stop - 1) for n, (start, stop) in enumerate(pairwise(edges)))


def _positions(heads: Heads, plan: Plan, summary: Summary) -> Iterator[dict[str, Any]]:
    counts, sums = summary.arrays["position_count"], summary.arrays["position_sum"]
    for n, (layer, head, _) in enumerate(heads):
        for p, first, last in _bins(plan.length):
            means = {name: _mean(sums[m, n, p], counts[m, n, p]) for m, name in enumerate(POSITIONAL)}
            queries = int(counts[:, n, p].max())
            if queries:
                yield {
                    "layer": layer,
                    "head": head,
                    "first": first,
                    "last": last,
                    "queries": queries,
                    **means,
                }


def _received(heads: Heads, plan: Plan, summary: Summary) -> Iterator[dict[str, Any]]:
    counts, sums = summary.arrays["received_count"], summary.arrays["received_sum"]
    for n, (layer, head, _) in enumerate(heads):
        for p, first, last in _bins(plan.length):
            if counts[n, p]:
                yield {
                    "layer": layer,
                    "head": head,
                    "first": first,
                    "last": last,
                    "keys": int(counts[n, p]),
                    "received": _mean(sums[n, p], counts[n, p]),
                }


def _sinks(heads: Heads, plan: Plan, summary: Summary) -> Iterator[dict[str, Any]]:
    for (layer, head, _), top in zip(heads, summary.sinks, strict=True):
        for rank, item in enumerate(top.items):
            yield {
                "layer": layer,
                "head": head,
                "rank": rank,
                "received": item["value"],
                "token": item["token"],
                "position": item["position"],
                "file": plan.text.files[item["file"]].path,
                "byte": item["byte"],
            }


def _numbered(summary: Summary) -> dict[str, int]:
    """Return the number of each passage, in the order of the text."""
    names = sorted(summary.passages, key=lambda name: [*map(int, name.split("/"))])
    return {name: n for n, name in enumerate(names)}


def _examples(heads: Heads, summary: Summary) -> Iterator[dict[str, Any]]:
    numbers = _numbered(summary)
    every = {name: _tokens(passage).labels for name, passage in summary.passages.items()}
    for (layer, head, _), top in zip(heads, summary.examples, strict=True):
        for rank, item in enumerate(top.items):
            labels = every[item["passage"]]
            yield {
                "layer": layer,
                "head": head,
                "rank": rank,
                "surprise": item["value"],
                "passage": numbers[item["passage"]],
                "query": item["query"],
                "keys": item["keys"],
                "weights": item["weights"],
                "query_token": labels[item["query"]],
                "key_tokens": [labels[key] for key in item["keys"]],
            }


def _tokens(passage: Mapping[str, Any]) -> TokenizedText:
    return TokenizedText(tuple(passage["pieces"]), tuple(passage["special"]))


def _passages(plan: Plan, summary: Summary) -> Iterator[dict[str, Any]]:
    for name, n in _numbered(summary).items():
        passage = summary.passages[name]
        yield {
            "passage": n,
            "file": plan.text.files[passage["file"]].path,
            "byte": passage["byte"],
            "text": _tokens(passage).text,
            **{name: passage[name] for name in ("ids", "pieces", "special")},
        }


def _ablation(heads: Heads, summary: Summary) -> Iterator[dict[str, Any]]:
    arrays = summary.arrays
    tokens, windows = int(arrays["loss_tokens"]), int(arrays["loss_windows"])
    loss = float(arrays["loss"]) / tokens
    for n, (layer, head, _) in enumerate(heads):
        mean = float(arrays["cost_of_windows"][n]) / windows
        variance = max(float(arrays["cost_squares"][n]) / windows - mean * mean, 0.0)
        cost = float(arrays["cost"][n]) / tokens
        yield {
            "layer": layer,
            "head": head,
            "tokens": tokens,
            "loss": loss,
            "ablated_loss": loss + cost,
            "cost": cost,
            "error": math.sqrt(variance / (windows - 1)) if windows > 1 else None,
        }


def cluster(overlap: np.ndarray[Any, np.dtype[Any]]) -> list[int]:
    """Return the cluster of each head, numbered from 0, the largest first.

    Clusters are joined by average linkage (Sokal & Michener 1958) as long as the mean overlap between their
    heads is at least `JOINED`.

    Args:
        overlap: The mean overlap of each two heads, `[h, h]`.

    Returns:
        The numbers `[h]`.
    """
    if len(overlap) == 1:
        return [0]
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distance = 1.0 - overlap
    np.fill_diagonal(distance, 0.0)
    labels = fcluster(
        linkage(squareform(distance, checks=False), "average"), 1.0 - JOINED, "distance"
    ).tolist()
    sizes = {label: (-labels.count(label), labels.index(label)) for label in labels}
    order = {label: n for n, label in enumerate(sorted(sizes, key=sizes.__getitem__))}
    return [order[label] for label in labels]


# -- reading ---------------------------------------------------------------------------------------


class Atlas:
    """An atlas in a folder. `open` returns it.

    Attributes:
        folder: The folder.
        facts: The model, its layers, and the sizes of the corpus, as in `atlas.json`.

    Args:
        folder: The folder.
        facts: The content of `atlas.json`.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder, self.facts = folder, facts
        self._tables: dict[str, Any] = {}

    def __getitem__(self, name: str) -> pa.Table:
        """Return a table by name, a `pyarrow.Table`."""
        names = self.facts["tables"]
        if name not in names:
            raise ValueError(f"Expected a table of the atlas, {', '.join(names)}, got {name!r}.")
        if name not in self._tables:
            import pyarrow as pa
            import pyarrow.parquet as pq

            path = self.folder / f"{name}.parquet"
            try:
                self._tables[name] = pq.read_table(path, memory_map=True).cast(make_schemas()[name])
            except (pa.ArrowException, OSError, ValueError) as error:
                reason = str(error).partition("\n")[0].rstrip(".")
                raise ValueError(
                    f"{path} can't be read as a table of an atlas: {reason}. Restore it from a copy, or "
                    "record the atlas again."
                ) from None
        return self._tables[name]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table, each a dict by column."""
        rows: list[dict[str, Any]] = self[name].to_pylist()
        return rows

    def to_pandas(self, name: str = "heads") -> pandas.DataFrame:
        """Return a table as a pandas DataFrame; raise ImportError if pandas isn't installed."""
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise ImportError(
                "to_pandas needs pandas, which isn't installed. Run pip install pandas."
            ) from None
        return self[name].to_pandas()

    @property
    def plan(self) -> Plan:
        """The model, the options and the text, as in `manifest.json`."""
        return Plan.read(self.folder)

    @cached_property
    def _passages(self) -> list[dict[str, Any]]:
        return self.rows("passages")

    def passage(self, number: int) -> TokenizedText:
        """Return the text and the tokens of a passage.

        Args:
            number: The number of the passage, as in the table `examples`.

        Returns:
            The text with its tokens.

        Raises:
            ValueError: If there is no such passage.
        """
        return _tokens(self._find(number))

    def _find(self, number: int) -> dict[str, Any]:
        count = len(self._passages)
        whole(number, "the number of a passage", 0, max(count - 1, 0))
        return self._passages[number]

    def read_passage(self, number: int, model: Any = None) -> Recording:
        """Run the model on a passage again, and record all heads.

        Args:
            number: The number of the passage.
            model: The model, of `text.models.load`, or its name. Default: that of the atlas.

        Returns:
            The recording, with labels, to view or to read weights of.

        Raises:
            FileNotFoundError: If the model is missing.
            ValueError: If it isn't the model of the atlas, or there is no such passage.
        """
        passage = self._find(number)
        model = load_model(self.plan if model is None else model)
        self.plan.check_model(model)
        recording = model.read(passage["ids"])
        recording.label(_tokens(passage))
        recording.provenance["model"] = model.name
        return recording

    def view(self, *, port: int = 0, browser: bool = True) -> Any:
        """Open the atlas in a browser.

        Args:
            port: Port to listen on (0 picks a free one).
            browser: Whether to open a browser. If not, the link is printed.

        Returns:
            A server with `url`, `wait()` and `close()`.

        Raises:
            OSError: If the port is in use.
            ImportError: If a package that the viewer needs isn't installed.
        """
        from manyheads.atlas import page

        server = page.serve(self, port)
        if not (browser and server.open_browser()):
            print(f"open this link in a browser: {server.url}")
        return server

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the atlas as one HTML page, which opens without manyheads.

        Args:
            path: The page, which ends in .html.

        Returns:
            The path.

        Raises:
            ValueError: If the path doesn't end in .html.
            OSError: If it can't be written.
        """
        from manyheads.atlas import page

        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"Expected --export to end in .html, got {path}.")
        write(path, page.build(self).encode())
        return path

    def __repr__(self) -> str:
        facts = self.facts
        heads = sum(count for _, count in facts["layers"])
        layers, tokens = len(facts["layers"]), facts["tokens"]
        return f"Atlas({facts['model']}, {heads} heads in {layers} layers, {tokens:,} tokens)"


def open(folder: str | os.PathLike[str]) -> Atlas:
    """Open an atlas.

    Args:
        folder: Its folder.

    Returns:
        The atlas.

    Raises:
        FileNotFoundError: If the folder has no atlas, or one that isn't complete.
        ValueError: If its files are damaged.
        TypeError: If the folder isn't a path.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"Expected the folder of an atlas, got {kind(folder)}.")
    require()
    path = Path(folder)
    Plan.read(path)
    if not is_complete(path):
        raise FileNotFoundError(
            f"The atlas in {path} isn't complete. Start manyheads atlas again with the same options to "
            "finish it."
        )
    try:
        facts = json.loads((path / FACTS).read_text("utf-8"))
        _ = facts["tables"], facts["layers"], facts["tokens"], facts["model"], facts["length"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path / FACTS} is damaged. Restore it from a copy, or remove it and record the atlas again."
        ) from None
    return Atlas(path, facts)
