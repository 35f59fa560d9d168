"""`manyheads show`: from a text to findings in words, a table, and pictures of every head.

    text → tokens → maps, one per layer → habits and findings → words or JSON, pictures

Each step can be called from Python; the command in `cli` only strings them together. What can be
wrong with the input is found before the first word is printed.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress
from rich.status import Status
from rich.style import Style
from rich.table import Table
from rich.text import Text

from manyheads import figures, models, scores
from manyheads.findings import (
    SOUGHT,
    Finding,
    Habits,
    candidates,
    characteristic,
    even,
    findings,
    habits,
    sentence,
)
from manyheads.maps import AttentionMap
from manyheads.observe import Recording
from manyheads.reductions import Pooled, edges
from manyheads.tokens import Token

FORMATS = ("png", "svg", "pdf")
WHAT_IF = "what if nothing were masked"
HEADINGS = {
    "previous_token": "previous token",
    "next_token": "next token",
    "first_token": "first token",
    "last_token": "last token",
    "same_token": "same token",
    "after_same_token": "after the same token",
    "itself": "itself",
    "entropy": "spread",
}
LONGEST = 32_768  # tokens that --long reads at most
CELLS = 128  # about as many as a small picture has on a side
AHEAD = {"next_token", "last_token"}  # what only models see that look ahead
SHADES, ASCII = "·░▒▓█", ".-+*#"  # a weight of about 0, ¼, ½, ¾, 1


@dataclass(frozen=True)
class Reading:
    """A text, and what the heads of a model make of it."""

    model: str
    tokens: list[Token]
    left_out: int  # how many tokens were cut off at the end
    seen: Recording  # all attention of the model, with labels
    layers: list[str]  # those with self-attention, by their paths in the model
    maps: list[AttentionMap]  # one for each of them
    candidates: list[Finding]  # of every head, the most telling one first
    notes: list[str]  # what to know about what is shown

    @property
    def findings(self) -> list[Finding]:
        """A handful of findings, the strongest first."""
        return findings(self.candidates)

    @property
    def extrapolated(self) -> int | None:
        """The first token beyond what the model was trained to read, if there is one."""
        return self.seen.provenance.get("extrapolated_from")

    @property
    def ids(self) -> list[int]:
        """The tokens as the model knows them."""
        return [token.id for token in self.tokens]

    @property
    def labels(self) -> list[str]:
        """The tokens as they are shown."""
        return [token.label for token in self.tokens]

    def say(self, finding: Finding) -> str:
        """A finding in words."""
        return sentence(finding, self.tokens)

    def title(self, layer: int, head: int) -> str:
        """What to write over one head: what is most telling of it, or only its name."""
        best = next(one for one in self.candidates if (one.layer, one.head) == (layer, head))
        return self.say(best) if findings([best]) else f"layer {layer} head {head}"

    @cached_property
    def habits(self) -> list[list[Habits]]:
        """The habits of every head, layer by layer."""
        return [habits(amap, torch.tensor(self.ids)) for amap in self.maps]

    @cached_property
    def even(self) -> list[list[Habits]]:
        """What those would be of heads that attend evenly: what they compare with."""
        return [habits(even(amap), torch.tensor(self.ids)) for amap in self.maps]

    @property
    def marks(self) -> list[list[str]]:
        """The habit that is most characteristic of every head, layer by layer."""
        ids = torch.tensor(self.ids)
        layers = zip(self.maps, self.habits, self.even, strict=True)
        return [characteristic(amap, ids, own, level) for amap, own, level in layers]

    @property
    def columns(self) -> list[str]:
        """The habits that these heads can have, some of which take looking ahead."""
        ahead = any(one.next_token is not None for heads in self.even for one in heads)
        return [name for name in HEADINGS if ahead or name not in AHEAD]

    def unmasked(self) -> Reading:
        """The same q and k as if nothing were masked."""
        return replace(self, maps=[amap.under(None) for amap in self.maps])


# -- reading ---------------------------------------------------------------------------------------


def text_of(text: str | None, file: str | None) -> str:
    """The text that was given, or what a file holds (`-` is standard input).

    The line end that closes a file is not part of the text. Raises ValueError for no text, for two,
    for a blank one and for bytes that aren't UTF-8, OSError where the file can't be read.
    """
    if (text is None) == (file is None):
        came = "neither" if text is None else "both"
        raise ValueError(f"show reads a TEXT or a --text-file, and {came} came: give one of them.")
    where = "TEXT" if file is None else "standard input" if file == "-" else file
    try:
        if text is not None:
            data = os.fsencode(text)
        else:
            data = standard_input() if file == "-" else Path(str(file)).read_bytes()
        found = data.decode("utf-8-sig")
    except OSError as error:
        raise OSError(f"--text-file {where} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} must be UTF-8 text, and its byte {error.start} is not: convert it."
        ) from None
    if file is not None:
        found = found.replace("\r\n", "\n").removesuffix("\n")
    if not found.strip():
        raise ValueError(f"{where} is empty, and show needs some words to look at.")
    return found


def standard_input() -> bytes:
    """All of standard input; OSError where it is closed."""
    if sys.stdin is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return sys.stdin.buffer.read()


def read(
    text: str,
    model: str | os.PathLike[str] | None = None,
    *,
    truncate: bool = False,
    long: bool = False,
    bar: Progress | None = None,
) -> Reading:
    """Let a model (None: the shipped one; else see `models.load`) read a text.

    With `long` a model of ours reads up to `LONGEST` tokens: beyond its context its rotary frequencies are
    scaled, as much as the text needs (`lm.LanguageModel.stretched`), and the time that takes is told first.
    bar: where it is printed, and layers are counted.

    Raises ValueError where the text is longer than can be read, unless `truncate` cuts it, where `long` is
    asked of a model of others, and where the model has no self-attention over the text; and what
    `models.load` raises.
    """
    reader = models.load(model)
    if long and reader.stretched is None:
        raise ValueError(
            f"--long scales the rotary frequencies of a model of ours, and {reader.name} is one of Hugging "
            "Face: leave --long out."
        )
    notes = list(reader.notes)
    found = kept = reader.encode(text, None)
    if not found:
        raise ValueError(f"the tokenizer of {reader.name} makes no token of the text: give it other words.")
    most = reader.context if not long or reader.context is None else max(LONGEST, reader.context)
    if most is not None and len(found) > most:
        if not truncate:
            raise ValueError(too_long(len(found), reader, long))
        kept = reader.encode(text, most)
        notes.append(f"--truncate: the first {len(kept)} tokens of {len(found)} are read")
    trained = reader.context
    beyond = trained is not None and len(kept) > trained
    if beyond:
        assert reader.stretched is not None
        reader = reader.stretched(len(kept))
        notes.append(
            f"tokens from {trained} on lie beyond the model's trained context of {trained}: what heads do "
            "there is extrapolated"
        )
    if len(kept) > SOUGHT:
        notes.append(f"findings are sought among the first {SOUGHT} tokens of {len(kept)}")
    ids, t = [token.id for token in kept], len(kept)
    if beyond and bar is not None:
        bar.console.print(
            f"reading {t:,} tokens, {about(expected(reader, ids))}", highlight=False, soft_wrap=True
        )
    seen = reader.read(ids, _counted(bar, len(reader.layers)))
    shapes = [amap.shape[2:] for _, amap in _calls(seen)]
    others = [shape for shape in shapes if shape != (t, t)]
    if len(others) == len(shapes):
        raise ValueError(
            f"show draws self-attention over the {t} tokens of the text, and {reader.name} has none: its "
            f"first layer is of {shapes[0][0]} queries and {shapes[0][1]} keys."
        )
    if others:
        notes.append(f"{len(others)} of {len(shapes)} layers aren't shown: no self-attention over the text")
    seen.label([token.label for token in kept])
    seen.provenance.update(model=reader.name, ids=ids)
    if beyond:
        seen.provenance["extrapolated_from"] = trained
    layers, maps = zip(*(one for one in _calls(seen) if one[1].shape[2:] == (t, t)), strict=True)
    odd = next((n for n, layer in enumerate(layers) if str(n) not in layer.split(".")), None)
    if odd is not None:  # where not every layer has attention, or several are one module
        notes.append(f"layers are counted as their attention runs: layer {odd} is {layers[odd]}")
    special = {n for n, token in enumerate(kept) if not token.text}
    return Reading(
        reader.name,
        kept,
        len(found) - t,
        seen,
        list(layers),
        list(maps),
        candidates(maps, ids, special),
        notes,
    )


def too_long(tokens: int, reader: models.Model, long: bool) -> str:
    """The sentence about a text that a model doesn't read."""
    if long:
        most = max(LONGEST, reader.context or 0)
        return (
            f"the text has {tokens} tokens, and --long reads {most} at most: shorten it, or keep its first "
            f"{most} tokens with --truncate."
        )
    further = "" if reader.stretched is None else f"read up to {LONGEST} tokens with --long, "
    return (
        f"the text has {tokens} tokens, and the model's context is {reader.context}: {further}shorten it, or "
        f"keep its first {reader.context} tokens with --truncate."
    )


def expected(reader: models.Model, ids: Sequence[int]) -> float:
    """About how many seconds a text will take to be read and measured, by what three short beginnings take.

    The cost is quadratic in the tokens, and so is known from three of them: calls, projections, and the
    weights of attention.
    """

    def seconds(t: int) -> float:
        start = perf_counter()
        said = torch.tensor(ids[:t])
        for _, amap in _calls(reader.read(ids[:t])):
            habits(amap, said)
            habits(even(amap), said)
            amap.pooled(min(t, CELLS), min(t, CELLS), "max")  # what a picture asks for
        return perf_counter() - start

    last = max(3, len(ids) // 4)
    middle = max(2, last // 4)
    first = max(1, middle // 4)
    seconds(first)  # all takes longer when it is done for the first time
    low, mid, high = seconds(first), seconds(middle), seconds(last)
    slope, before = (high - mid) / (last - middle), (mid - low) / (middle - first)
    bend = (slope - before) / (last - first)  # Newton's divided differences
    return high + (len(ids) - last) * (max(0.0, slope) + max(0.0, bend) * (len(ids) - middle))


def about(seconds: float) -> str:
    """A time in words, no more exact than it is known."""
    if seconds < 1.5:
        return "about a second"
    if seconds < 90:
        return f"about {seconds if seconds < 10 else 5 * round(seconds / 5):.0f} seconds"
    return f"about {seconds / 60:.0f} minutes"


def _counted(bar: Progress | None, layers: int) -> Callable[[], object]:
    """What to call after each layer, so that a bar counts them."""
    if bar is None:
        return lambda: None
    task = bar.add_task("reading", total=layers or None)
    return lambda: bar.advance(task)


def _calls(seen: Recording) -> list[tuple[str, AttentionMap]]:
    """All calls, with their layers. A layer that is called again and again, as all of ALBERT's are, counts
    each time."""
    return [(layer, amap) for layer in seen for amap in seen.calls(layer)]


def measure(reading: Reading) -> None:
    """Find the habits of every head ahead, so that nobody waits for them within the words."""
    assert reading.habits
    assert reading.even


def pick(reading: Reading, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
    """The layer and head to show in full; what is left open goes to the most telling one.

    Raises ValueError for a layer or head that the model doesn't have.
    """
    layers = len(reading.maps)
    if layer is not None and not 0 <= layer < layers:
        raise ValueError(
            f"--layer must be between 0 and {layers - 1}, and {layer} came: the model has {layers} layers."
        )
    heads = max(amap.shape[1] for n, amap in enumerate(reading.maps) if layer in (None, n))
    if head is not None and not 0 <= head < heads:
        where = "in each layer" if layer is None else f"in layer {layer}"
        raise ValueError(
            f"--head must be between 0 and {heads - 1}, and {head} came: the model has {heads} heads {where}."
        )
    fits = (one for one in reading.candidates if layer in (None, one.layer) and head in (None, one.head))
    best = next(fits)
    return best.layer, best.head


# -- pictures --------------------------------------------------------------------------------------


def pictures(reading: Reading, layer: int, head: int, *, masked: bool = True) -> dict[str, Figure]:
    """The figures by the names of their files: every head, and one in full.

    With `masked=False` the one in full stands beside what the same q and k give without the mask, if
    there is a mask.
    """
    amap, labels = reading.maps[layer], reading.labels
    trained, below = reading.extrapolated, ""
    if trained is not None:
        below = f"\nbelow the line, from token {trained} on, beyond the trained context: extrapolated"
    title = reading.title(layer, head) + below
    if masked or not hides(amap):
        one = figures.head(amap, labels, head=head, title=title)
    else:
        causal = amap.problem.mask is not None and amap.problem.mask.normal().band[1] == 0
        one = figures.beside(
            amap,
            amap.under(None),
            labels,
            head=head,
            titles=("causal, as the model computes it" if causal else "as the model computes it", WHAT_IF),
            title=title,
        )
    every = figures.grid(reading.maps, labels, title=f"what each head attends to{below}")
    if trained is not None:
        for figure in (one, every):
            ruled(figure, trained)
    return {"overview": every, f"layer{layer}-head{head}": one}


def ruled(figure: Figure, trained: int) -> None:
    """A line in every heat map above the first query that lies beyond the trained context."""
    for axes in figure.axes:
        if axes.images:
            axes.axhline(trained - 0.5, color="#ff5a36", linewidth=0.8)


def hides(amap: AttentionMap) -> bool:
    """Does the mask hide anything?"""
    return not scores.sees_all(replace(amap.problem, bias=None), slice(None), slice(None))


def save(reading: Reading, path: Path) -> Path:
    """Write all attention that was seen into a file, which `manyheads.open_run` reads."""
    try:
        reading.seen.save(path)
    except OSError as error:
        raise OSError(f"--save {path} can't be written: {error.strerror}.") from None
    return path


def format_of(name: str) -> str:
    """A picture format, checked."""
    if name not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, and {name!r} came.")
    return name


def write(pictures: Mapping[str, Figure], folder: Path, format: str = "png") -> list[Path]:
    """Write figures into a folder; their paths. All are drawn before the first one takes its name."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".drawing-") as drawing:
            drawn = [Path(drawing) / f"{name}.{format}" for name in pictures]
            for path, figure in zip(drawn, pictures.values(), strict=True):
                figure.savefig(path, format=format, bbox_inches="tight")
            return [path.replace(folder / path.name) for path in drawn]
    except OSError as error:
        raise OSError(f"--out {folder}: a picture can't be written: {error.strerror}.") from None


# -- words and numbers -----------------------------------------------------------------------------


def page() -> Console:
    """Standard output as a page for words: no escape codes where it is no terminal."""
    if hasattr(sys.stdout, "reconfigure"):  # where ⏎ can't be written, \u23ce is
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False)


def progress() -> Progress:
    """A bar on standard error, where that is a terminal; what is printed on its console comes anyway."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def busy(doing: str) -> Status:
    """A sign of life on standard error, where that is a terminal, for as long as the block runs."""
    return Console(stderr=True).status(f"{doing} …")


def words(reading: Reading, layer: int, head: int, *, masked: bool = True) -> None:
    """Print findings, the table, and a small heat map of one head."""
    paper = page()
    told = [reading.say(one) for one in reading.findings]
    for line in told or [nothing(reading)]:
        paper.print(Text(line), soft_wrap=True)
    amap = reading.maps[layer]
    notes = list(reading.notes)
    sides = {reading.title(layer, head): amap}
    if not masked and hides(amap):
        sides[f"layer {layer} head {head}: {WHAT_IF}"] = amap.under(None)
    elif not masked:
        notes.append(f"--no-mask: layer {layer} masks nothing here")
    for note in notes:
        paper.print(Text(f"({note})"), soft_wrap=True)
    paper.print()
    for part in tables(reading, paper):
        paper.print(part)
    for title, side in sides.items():
        paper.print()
        paper.print(Text(title, style="bold"), soft_wrap=True)
        paper.print(heat(side, head, reading.labels, paper), soft_wrap=True)
    paper.print()


def nothing(reading: Reading) -> str:
    """What to say where there is no finding."""
    if len(reading.tokens) == 1:
        return "the text is one token, and every head can only look at that"
    return "no weight stands out: each head gives every token about what it usually gives there"


def tables(reading: Reading, paper: Console) -> list[Table]:
    """Return the table of head scores, as several with some of the columns each on a narrow terminal."""
    unlimited = paper.options.update(max_width=1000)  # to measure in
    parts: list[list[str]] = [[]]
    for name in reading.columns:
        wider = table(reading, [*parts[-1], name])
        if parts[-1] and Measurement.get(paper, unlimited, wider).minimum > paper.width:
            parts.append([])
        parts[-1].append(name)
    made = [table(reading, columns) for columns in parts]
    made[0].title = "what each head attends to: mean weight over the tokens that could"
    made[-1].caption = "spread: entropy in nats; even: attends to all alike; *: what stands out"
    return made


def table(reading: Reading, columns: Sequence[str]) -> Table:
    """Return some head scores of every head as a table, with the most characteristic one of each marked."""
    made = Table(box=box.SIMPLE_HEAD)
    for heading in ("layer", "head", *(HEADINGS[name] for name in columns)):
        made.add_column(heading, justify="right", width=max(map(len, heading.split())), overflow="fold")

    def cells(one: Habits, marked: str | None = None) -> list[Text]:
        shown = {name: number(getattr(one, name)) for name in columns}
        return [
            Text(f"{text}*", style="bold") if name == marked else Text(f"{text} ")
            for name, text in shown.items()
        ]

    even = [cells(heads[0]) for heads in reading.even]
    alike = all(one == even[0] for one in even)  # in all layers the same may be seen
    for layer, (heads, marks) in enumerate(zip(reading.habits, reading.marks, strict=True)):
        for head, (one, marked) in enumerate(zip(heads, marks, strict=True)):
            last = alike and head == len(heads) - 1
            made.add_row(str(layer), str(head), *cells(one, marked), end_section=last)
        if not alike:
            made.add_row(str(layer), "even", *even[layer], style="dim", end_section=True)
    if alike:
        made.add_row("even", "", *even[0], style="dim")
    return made


def number(value: float | None) -> str:
    """Two digits; a dash where there is nothing to measure."""
    return "-" if value is None else f"{value:.2f}"


def heat(amap: AttentionMap, head: int, labels: list[str], paper: Console) -> Text:
    """One head as a small heat map for a terminal: colours, or shades where there are none.

    What doesn't fit is pooled: a cell is the largest weight of its tokens.
    """
    names = [Text(f"{label} {n}") for n, label in enumerate(labels)]
    width = min(20, max(name.cell_len for name in names))
    step = -(-len(labels) // max(4, min(32, (paper.width - width - 1) // 3)))
    starts = edges(len(labels), -(-len(labels) // step))[:-1].tolist()  # of the cells
    weights = cells(amap, head, len(starts))
    coloured = paper.color_system is not None and not paper.no_color
    shades = None if coloured else ASCII if paper.options.ascii_only else SHADES
    picture = Text()
    for start, row in zip(starts, weights, strict=True):
        name = names[start]
        name.align("right", width)
        picture.append_text(name).append(" ")
        for weight in row:
            picture.append_text(cell(weight, shades)).append(" ")
        picture.append("\n")
    apart = -(
        -(len(str(len(labels) - 1)) + 1) // 3
    )  # cells from one position to the next: each takes 3 places
    positions = "".join(f"{n:<{3 * apart}}" for n in starts[::apart])
    picture.append(" " * (width + 1) + positions + "\n0 ")
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        picture.append_text(cell(weight, shades))
    blank = any(weight < 0 for row in weights for weight in row)
    picture.append(" 1; rows: queries, columns: keys" + ("; blank: may not attend" if blank else ""))
    if step > 1:
        picture.append(f"\neach cell is the largest weight of {step} × {step} tokens")
    return picture


def cells(amap: AttentionMap, head: int, count: int) -> list[list[float]]:
    """The largest weight of each of count × count cells of one head; -1 where nothing may be attended."""
    asked = figures.cells.Visible(count, count), Pooled(count, count, "max")
    seen, largest = figures.cells.reduced(amap.only(batch=0, heads=head), *asked)  # [1, 1, count, count]
    return largest.masked_fill(seen == 0, -1)[0, 0].tolist()


def cell(weight: float, shades: str | None) -> Text:
    """A weight as two characters, in colour without `shades`; blank for -1, what may not be attended."""
    if weight < 0:
        return Text("  ")
    if shades:
        return Text(shades[min(4, round(4 * weight))] * 2)
    red, green, blue, _ = colormaps[figures.WEIGHT](weight, bytes=True)
    return Text("  ", Style(bgcolor=f"rgb({red},{green},{blue})"))


def machine(reading: Reading, layer: int, head: int, files: list[Path], *, masked: bool = True) -> None:
    """Print what the words say, the tokens and the files as JSON."""
    plain = numbers(reading)
    for row, mark in zip(plain["measures"], sum(reading.marks, []), strict=True):
        row["characteristic"] = mark
    found: dict[str, Any] = {
        "model": reading.model,
        "notes": reading.notes,
        "tokens": [{"position": n, **asdict(token)} for n, token in enumerate(reading.tokens)],
        "tokens_left_out": reading.left_out,
        "layers": [
            {"name": name, "heads": len(heads), "even": plainly(heads[0], reading.columns)}
            for name, heads in zip(reading.layers, reading.even, strict=True)
        ],
        "findings": [
            {**asdict(one), "surprise": one.surprise, "sentence": reading.say(one)}
            for one in reading.findings
        ],
        "shown": {"layer": layer, "head": head},
        **plain,
        "files": [str(file) for file in files],
    }
    if not masked:
        found["what_if_nothing_were_masked"] = numbers(reading.unmasked())
    print(json.dumps(found, indent=2, allow_nan=False))


def numbers(reading: Reading) -> dict[str, Any]:
    """The habits of every head, and of one of layer 0 that attends evenly, as plain data."""
    rows = [
        {"layer": layer, "head": head, **plainly(one, reading.columns)}
        for layer, heads in enumerate(reading.habits)
        for head, one in enumerate(heads)
    ]
    return {"measures": rows, "even": plainly(reading.even[0][0], reading.columns)}


def plainly(one: Habits, columns: Sequence[str]) -> dict[str, float | None]:
    """The habits of one head by name."""
    return {name: getattr(one, name) for name in columns}


def named(files: list[Path]) -> None:
    """Print which files were written."""
    *names, last = map(str, files)
    page().print(Text(f"wrote {', '.join(names)} and {last}"), soft_wrap=True)
