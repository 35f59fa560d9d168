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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.status import Status
from rich.style import Style
from rich.table import Table
from rich.text import Text

from manyheads import figures, lm
from manyheads.findings import (
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
from manyheads.tokens import Token, tokens

FORMATS = ("png", "svg", "pdf")
WHAT_IF = "what if nothing were masked"
HEADINGS = {
    "previous_token": "previous token",
    "first_token": "first token",
    "same_token": "same token",
    "after_same_token": "after the same token",
    "itself": "itself",
    "entropy": "spread",
}
SHADES, ASCII = "·░▒▓█", ".-+*#"  # a weight of about 0, ¼, ½, ¾, 1


@dataclass(frozen=True)
class Reading:
    """A text, and what the heads of a model make of it."""

    tokens: list[Token]
    left_out: int  # how many tokens were cut off at the end
    maps: list[AttentionMap]  # causal, one per layer
    candidates: list[Finding]  # of every head, the most telling one first

    @property
    def findings(self) -> list[Finding]:
        """A handful of findings, the strongest first."""
        return findings(self.candidates)

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

    def habits(self, *, masked: bool = True) -> list[list[Habits]]:
        """The habits of every head, layer by layer; or what they would be without the mask."""
        ids = torch.tensor(self.ids)
        return [habits(amap if masked else amap.under(None), ids) for amap in self.maps]

    def marks(self) -> list[list[str]]:
        """The habit that is most characteristic of every head, layer by layer."""
        return [characteristic(amap, torch.tensor(self.ids)) for amap in self.maps]

    def even(self, *, masked: bool = True) -> Habits:
        """The habits of a head that attends evenly: what those of the others compare with."""
        amap = self.maps[0] if masked else self.maps[0].under(None)
        return habits(even(amap), torch.tensor(self.ids))[0]


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


def read(text: str, folder: Path | None = None, *, truncate: bool = False) -> Reading:
    """Let a model (the shipped one, or the checkpoint in a folder) read a text.

    A text that begins with a word gets a space before it, as within a longer text: so its first
    "the" is the same token as its second.

    Raises ValueError where the text is longer than the model's context, unless `truncate` cuts it;
    and what `lm.load` raises.
    """
    model, tokenizer = lm.load(folder)
    ids = tokenizer.encode(text if text[0].isspace() else f" {text}").ids
    context = model.config.context
    most = min(context, figures.MOST)
    if len(ids) > most and not truncate:
        raise ValueError(
            f"the text has {len(ids)} tokens, and at most {most} can be shown (the model's context is "
            f"{context}): shorten it, or keep its first {most} tokens with --truncate."
        )
    kept = ids[:most]
    with torch.no_grad():
        _, maps = model.attend(torch.tensor([kept]))
    return Reading(tokens(tokenizer, kept), len(ids) - len(kept), maps, candidates(maps, kept))


def pick(reading: Reading, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
    """The layer and head to show in full; what is left open goes to the most telling one.

    Raises ValueError for a layer or head that the model doesn't have.
    """
    counts = (len(reading.maps), reading.maps[0].shape[1])
    for option, index, count in zip(("layer", "head"), (layer, head), counts, strict=True):
        if index is not None and not 0 <= index < count:
            raise ValueError(
                f"--{option} must be between 0 and {count - 1}, and {index} came: "
                f"the model has {count} {option}s" + (" in each layer." if option == "head" else ".")
            )
    fits = (one for one in reading.candidates if layer in (None, one.layer) and head in (None, one.head))
    best = next(fits)
    return best.layer, best.head


# -- pictures --------------------------------------------------------------------------------------


def pictures(reading: Reading, layer: int, head: int, *, masked: bool = True) -> dict[str, Figure]:
    """The figures by the names of their files: every head, and one in full.

    With `masked=False` the one in full stands beside what the same q and k give without the mask.
    """
    amap, labels = reading.maps[layer], reading.labels
    title = reading.title(layer, head)
    if masked:
        one = figures.head(amap, labels, head=head, title=title)
    else:
        one = figures.beside(
            amap,
            amap.under(None),
            labels,
            head=head,
            titles=("causal, as the model computes it", WHAT_IF),
            title=title,
        )
    every = figures.grid(reading.maps, labels, title="what each head attends to")
    return {"overview": every, f"layer{layer}-head{head}": one}


def folder_for(pictures: Path) -> Path:
    """Make the folder for pictures, and be sure that it can be written; OSError where it can't."""
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=pictures):
            return pictures
    except FileExistsError:
        raise FileExistsError(f"--out must be a folder, and {pictures} is a file.") from None
    except OSError as error:
        raise OSError(f"--out {pictures} can't be written: {error.strerror}.") from None


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


def busy(doing: str) -> Status:
    """A sign of life on standard error, where that is a terminal, for as long as the block runs."""
    return Console(stderr=True).status(f"{doing} …")


def words(reading: Reading, layer: int, head: int, *, masked: bool = True) -> None:
    """Print findings, the table, and a small heat map of one head."""
    paper = page()
    told = [reading.say(one) for one in reading.findings]
    for line in told or [nothing(reading)]:
        paper.print(Text(line), soft_wrap=True)
    if reading.left_out:
        count = len(reading.tokens)
        paper.print(f"(--truncate: the first {count} tokens of {count + reading.left_out} are read)")
    paper.print()
    paper.print(table(reading))
    amap = reading.maps[layer]
    sides = {reading.title(layer, head): amap}
    if not masked:
        sides[f"layer {layer} head {head}: {WHAT_IF}"] = amap.under(None)
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


def table(reading: Reading) -> Table:
    """The habits of every head, what is most characteristic of each marked."""
    made = Table(
        title="what each head attends to: mean weight over the tokens that could",
        caption="spread: entropy in nats; even: attends to all alike; *: what stands out",
        box=box.SIMPLE_HEAD,
    )
    made.add_column("layer", justify="right")
    made.add_column("head", justify="right")
    for heading in HEADINGS.values():
        made.add_column(heading, justify="right")
    for layer, (heads, marks) in enumerate(zip(reading.habits(), reading.marks(), strict=True)):
        for head, (one, marked) in enumerate(zip(heads, marks, strict=True)):
            cells = [
                Text(f"{number(value)}*", style="bold") if name == marked else Text(f"{number(value)} ")
                for name, value in zip(HEADINGS, one, strict=True)
            ]
            last = head == len(heads) - 1
            made.add_row(str(layer), str(head), *cells, end_section=last)
    made.add_row("even", "", *(f"{number(value)} " for value in reading.even()), style="dim")
    return made


def number(value: float | None) -> str:
    """Two digits; a dash where there is nothing to measure."""
    return "-" if value is None else f"{value:.2f}"


def heat(amap: AttentionMap, head: int, labels: list[str], paper: Console) -> Text:
    """One head as a small heat map for a terminal: colours, or shades where there are none.

    What doesn't fit is pooled: a cell is the largest weight of its tokens.
    """
    weights = amap[0, head].masked_fill(~figures.visible(amap, 0, head), -1)  # [t, s]
    names = [Text(f"{label} {n}") for n, label in enumerate(labels)]
    width = min(20, max(name.cell_len for name in names))
    step = -(-len(labels) // max(4, min(32, (paper.width - width - 1) // 3)))
    if step > 1:
        weights = F.max_pool2d(weights[None], step, ceil_mode=True)[0]
    coloured = paper.color_system is not None and not paper.no_color
    shades = None if coloured else ASCII if paper.options.ascii_only else SHADES
    picture = Text()
    for name, row in zip(names[::step], weights.tolist(), strict=True):
        name.align("right", width)
        picture.append_text(name).append(" ")
        for weight in row:
            picture.append_text(cell(weight, shades)).append(" ")
        picture.append("\n")
    apart = 1 if len(labels) <= 100 else 2  # cells from one position to the next: they take 3 places
    positions = "".join(f"{n:<{3 * apart}}" for n in range(0, len(labels), step * apart))
    picture.append(" " * (width + 1) + positions + "\n0 ")
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        picture.append_text(cell(weight, shades))
    picture.append(" 1; rows: queries, columns: keys; blank: may not attend")
    if step > 1:
        picture.append(f"\neach cell is the largest weight of {step} × {step} tokens")
    return picture


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
    for row, mark in zip(plain["measures"], sum(reading.marks(), []), strict=True):
        row["characteristic"] = mark
    found: dict[str, Any] = {
        "tokens": [{"position": n, **asdict(token)} for n, token in enumerate(reading.tokens)],
        "tokens_left_out": reading.left_out,
        "findings": [
            {**asdict(one), "surprise": one.surprise, "sentence": reading.say(one)}
            for one in reading.findings
        ],
        "shown": {"layer": layer, "head": head},
        **plain,
        "files": [str(file) for file in files],
    }
    if not masked:
        found["what_if_nothing_were_masked"] = numbers(reading, masked=False)
    print(json.dumps(found, indent=2, allow_nan=False))


def numbers(reading: Reading, *, masked: bool = True) -> dict[str, Any]:
    """The habits of every head, and of one that attends evenly, as plain data."""
    rows = [
        {"layer": layer, "head": head, **one._asdict()}
        for layer, heads in enumerate(reading.habits(masked=masked))
        for head, one in enumerate(heads)
    ]
    return {"measures": rows, "even": reading.even(masked=masked)._asdict()}


def named(files: list[Path]) -> None:
    """Print which files were written."""
    page().print(Text("wrote " + " and ".join(map(str, files))), soft_wrap=True)
