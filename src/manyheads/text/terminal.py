"""Print findings, a table of head scores, and a heat map of one head, for `manyheads show`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress
from rich.status import Status
from rich.style import Style
from rich.table import Table
from rich.text import Text

from manyheads import figures
from manyheads.highlights import HeadScores, format_score, name_head
from manyheads.maps import AttentionMap
from manyheads.statistics import Pooled, edges
from manyheads.text.report import COUNTERFACTUAL, Reading, has_masked_keys
from manyheads.tokens import TokenizedText

SHADES, ASCII = "·░▒▓█", ".-+*#"  # for weights of about 0, ¼, ½, ¾ and 1


def open_console() -> Console:
    """Return a console on standard output. Characters that it can't encode are escaped."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False)


def progress() -> Progress:
    """Return a progress bar on standard error, disabled unless that is a terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def show_spinner(activity: str) -> Status:
    """Return a context manager that shows a spinner on standard error if it is a terminal."""
    return Console(stderr=True).status(f"{activity} …")


def show(reading: Reading) -> None:
    """Print findings, a sentence about all heads, and notes.

    Args:
        reading: The maps.
    """
    console = open_console()
    sentences = [reading.describe(finding) for finding in reading.findings] or [explain_no_findings(reading)]
    if reading.summary is not None:
        sentences.append(reading.summary)
    for sentence in sentences:
        _print_sentence(console, Text(sentence))
    for note in reading.notes:
        _print_sentence(console, Text(f"({note})", style="dim"))
    console.print()


def show_scores(reading: Reading) -> None:
    """Print the table of the scores of every head.

    Args:
        reading: The maps.
    """
    console = open_console()
    for table in make_tables(reading, console):
        console.print(table)
    console.print()


def show_head(reading: Reading, layer: int, head: int, *, masked: bool = True) -> None:
    """Print a heat map of one head.

    Args:
        reading: The maps.
        layer: The layer.
        head: The head.
        masked: If False, print a second heat map, without the mask.
    """
    console, amap = open_console(), reading.maps[layer]
    heat_maps = {reading.title(layer, head): amap}
    if not masked and has_masked_keys(amap):
        heat_maps[f"{name_head(layer, head)}: {COUNTERFACTUAL}"] = amap.under(None)
    elif not masked:
        console.print(f"(--no-mask has no effect: layer {layer} masks no keys)\n", soft_wrap=True)
    for title, heat_map in heat_maps.items():
        _print_sentence(console, Text(title, style="bold"))
        console.print(draw_heat_map(heat_map, head, reading.tokens, console), soft_wrap=True)
        console.print()


def _print_sentence(console: Console, sentence: Text) -> None:
    """Print a sentence: in lines of the terminal, with the name of its head in bold, or else as one line."""
    if not console.is_terminal:
        console.print(sentence, soft_wrap=True)
        return
    sentence.highlight_regex(r"^Layer \d+, head \d+", "bold")
    lines = sentence.wrap(console, max(20, console.width - 2))
    for n, line in enumerate(lines):
        console.print(Text("  " if n else "").append_text(line))


def explain_no_findings(reading: Reading) -> str:
    """Return the sentence that is printed if there are no findings."""
    if len(reading.tokens) == 1:
        return "The text has a single token, which is all that a head can attend to."
    return "No weight stands out: each is close to what its head gives for other queries."


def list_files(files: list[Path]) -> None:
    """Print the files that were written."""
    *names, last = map(str, files)
    written = f"{', '.join(names)} and {last}" if names else last
    open_console().print(Text(f"wrote {written}"), soft_wrap=True)


def suggest_more(layer: int, head: int) -> None:
    """Print which options show more."""
    more = f"More: --layer {layer} --head {head} (one head), --all (every score and picture), --open (viewer)"
    open_console().print(Text(more, style="dim"), soft_wrap=True)


# -- the table -------------------------------------------------------------------------------------


def make_tables(reading: Reading, console: Console) -> list[Table]:
    """Return the table of head scores, split into several with fewer columns for a narrow terminal."""
    unlimited = console.options.update(max_width=1000)
    parts: list[list[str]] = [[]]
    for name in reading.columns:
        wider = make_table(reading, [*parts[-1], name])
        if parts[-1] and Measurement.get(console, unlimited, wider).minimum > console.width:
            parts.append([])
        parts[-1].append(name)
    tables = [make_table(reading, columns) for columns in parts]
    tables[0].title = "what each head attends to: mean weights"
    tables[-1].caption = "entropy in nats; uniform: equal weights; *: the score that stands out most"
    return tables


def make_table(reading: Reading, columns: Sequence[str]) -> Table:
    """Return a table of some scores of every head. A star marks the score of a head that stands out most."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    table.add_column("head", justify="right", no_wrap=True)
    for heading in (name.replace("_", " ") for name in columns):
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())), overflow="fold")

    def format_cells(scores: HeadScores, marked: str | None = None) -> list[Text]:
        found = {name: scores[name] for name in columns}
        numbers = {name: "-" if score is None else format_score(score) for name, score in found.items()}
        return [
            Text(f"{number}*", style="bold") if name == marked else Text(f"{number} ")
            for name, number in numbers.items()
        ]

    uniform = [format_cells(heads[0]) for heads in reading.uniform]
    has_one_mask = all(row == uniform[0] for row in uniform)  # all layers have the same mask
    for layer, (heads, names) in enumerate(zip(reading.scores, reading.characteristic, strict=True)):
        for head, (scores, name) in enumerate(zip(heads, names, strict=True)):
            end = has_one_mask and head == len(heads) - 1
            table.add_row(str(layer), str(head), *format_cells(scores, name), end_section=end)
        if not has_one_mask:
            table.add_row(str(layer), "uniform", *uniform[layer], style="dim", end_section=True)
    if has_one_mask:
        table.add_row("", "uniform", *uniform[0], style="dim")
    return table


# -- the heat map ----------------------------------------------------------------------------------


def draw_heat_map(amap: AttentionMap, head: int, tokens: TokenizedText, console: Console) -> Text:
    """Draw one head as a heat map, in colours, or in shading characters if the terminal has no colours.

    Args:
        amap: The map of the layer.
        head: The head.
        tokens: The tokens.
        console: The terminal. If it is too narrow, each cell shows the largest weight of several tokens.

    Returns:
        The lines of the heat map.
    """
    # If not every token has a row, a piece of a word is named by its word.
    for names in (tokens.names, [tokens.word(n) or label for n, label in enumerate(tokens)]):
        width = min(20, max(Text(f"{name} {n}").cell_len for n, name in enumerate(names)))
        step = -(-len(tokens) // max(4, min(32, (console.width - width - 1) // 3)))
        if step == 1:
            break
    starts = edges(len(tokens), -(-len(tokens) // step))[:-1].tolist()  # the first token of each cell
    cells = len(starts), len(starts)
    reductions = [figures.cells.Visible(*cells), Pooled(*cells, "max")]
    visible, largest = amap.only(batch=0, heads=head).reduce(reductions)  # [1, 1, r, c]
    weights = largest.masked_fill(visible == 0, -1)[0, 0].tolist()  # -1 where everything is masked
    coloured = console.color_system is not None and not console.no_color
    shades = None if coloured else ASCII if console.options.ascii_only else SHADES
    drawing = Text()
    for start, row in zip(starts, weights, strict=True):
        name, number = Text(names[start]), f" {start}"
        name.truncate(width - len(number), overflow="ellipsis")
        name.append(number if name else number.lstrip())
        name.align("right", width)
        drawing.append_text(name).append(" ")
        for weight in row:
            drawing.append_text(draw_cell(weight, shades)).append(" ")
        drawing.append("\n")
    # A cell is 3 characters wide, so only every n-th cell has its position below it.
    label_every = -(-(len(str(len(tokens) - 1)) + 1) // 3)
    positions = "".join(f"{n:<{3 * label_every}}" for n in starts[::label_every])
    drawing.append(" " * (width + 1) + positions + "\n0 ")
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.append_text(draw_cell(weight, shades))
    blank = any(weight < 0 for row in weights for weight in row)
    drawing.append(" 1; rows: queries, columns: keys" + ("; blank: masked" if blank else ""))
    if step > 1:
        drawing.append(f"\neach cell shows the largest of up to {step} × {step} weights")
    return drawing


def draw_cell(weight: float, shades: str | None) -> Text:
    """Return a weight as two characters: coloured if `shades` is None, blank if the weight is -1."""
    if weight < 0:
        return Text("  ")
    if shades:
        return Text(shades[min(4, round(4 * weight))] * 2)
    red, green, blue, _ = colormaps[figures.WEIGHT](weight, bytes=True)
    return Text("  ", Style(bgcolor=f"rgb({red},{green},{blue})"))
