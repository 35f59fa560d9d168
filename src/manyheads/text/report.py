"""The steps of `manyheads show`, from a text to findings, pictures and JSON.

    text → tokens → maps, one per layer → head scores and findings → pictures, JSON, or `terminal`

Each step can be called from Python. `read_text`, `read`, `choose_head` and `check_format` raise errors for
invalid inputs, before anything is printed.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from manyheads import figures, highlights, scores
from manyheads.highlights import Finding, HeadScores, Pattern
from manyheads.maps import AttentionMap
from manyheads.observe import Recording
from manyheads.text import models
from manyheads.tokens import TokenizedText, is_boundary, is_within_word

if TYPE_CHECKING:
    from rich.progress import Progress

FORMATS = ("png", "svg", "pdf")
COUNTERFACTUAL = "what if nothing were masked"
AHEAD = {"next_token", "last_token"}  # scores on later keys, which are masked by a causal mask
LONGEST = 32_768  # the largest number of tokens that --long reads
SHORT = 128  # tokens; in longer texts, scores of uniform heads are near 0, and findings have no outline
OUTLINE = "#ff5a36"  # of a finding's weight in a picture, and of the end of the trained context
EXCERPT = 60  # characters of the text in the title of a picture
CELLS = 128  # approximate number of cells along each side of a small picture


@dataclass(frozen=True)
class Reading:
    """A text and the attention of a model that read it.

    Attributes:
        model: The name of the model.
        tokens: The text with the tokens that it read.
        ids: The ids of the tokens.
        left_out: The number of tokens that were cut off at the end.
        recording: All recorded attention, with labels.
        layers: The paths of the layers with self-attention.
        maps: The attention map of each of these layers.
        candidates: All findings of all heads, the most interesting first.
        notes: Sentences to show with the maps.
    """

    model: str
    tokens: TokenizedText
    ids: list[int]
    left_out: int
    recording: Recording
    layers: list[str]
    maps: list[AttentionMap]
    candidates: list[Finding]
    notes: list[str]

    @property
    def findings(self) -> list[Finding]:
        """Return the few findings to show, the largest weight first."""
        return highlights.select_findings(self.candidates)

    @property
    def trained(self) -> int | None:
        """Return the trained context if the text is longer (the rest is extrapolated), else None."""
        return self.recording.provenance.get("extrapolated_from")

    def describe(self, finding: Finding) -> str:
        """Return a finding as a sentence."""
        return highlights.describe(finding, self.tokens)

    def title(self, layer: int, head: int) -> str:
        """Return a title for a head: its most interesting finding, else what it attends to, else its name."""
        best = next(finding for finding in self.candidates if (finding.layer, finding.head) == (layer, head))
        if highlights.select_findings([best]):
            return self.describe(best)
        name, pattern = highlights.name_head(layer, head), self.patterns[layer][head]
        return name if pattern is None else f"{name} {pattern.phrase}"

    @cached_property
    def patterns(self) -> list[list[Pattern | None]]:
        """Return what every head attends to, layer by layer; None for heads without a clear pattern."""
        repeats = len(self.ids) - len(set(self.ids))
        is_short = len(self.ids) <= SHORT
        return [
            [
                highlights.find_pattern(
                    _rename(head), _rename(self.uniform[layer][n]) if is_short else None, repeats
                )
                for n, head in enumerate(heads)
            ]
            for layer, heads in enumerate(self.scores)
        ]

    @property
    def summary(self) -> str | None:
        """Return a sentence about what all heads attend to, if any has a clear pattern."""
        return highlights.summarize([pattern for heads in self.patterns for pattern in heads])

    @cached_property
    def scores(self) -> list[list[HeadScores]]:
        """Return the scores of every head, layer by layer."""
        return [highlights.score_heads(amap, torch.tensor(self.ids)) for amap in self.maps]

    @cached_property
    def uniform(self) -> list[list[HeadScores]]:
        """Return the scores of heads with uniform weights and the same masks, layer by layer."""
        return [
            highlights.score_heads(highlights.uniform(amap), torch.tensor(self.ids)) for amap in self.maps
        ]

    @property
    def characteristic(self) -> list[list[str]]:
        """Return, for every head, the name of the score that stands out most, layer by layer."""
        ids = torch.tensor(self.ids)
        layers = zip(self.maps, self.scores, self.uniform, strict=True)
        return [highlights.most_characteristic(amap, ids, heads, base) for amap, heads, base in layers]

    @property
    def columns(self) -> list[str]:
        """Return the names of the scores to show: those that are possible with these masks."""
        has_later_keys = any(scores["next_token"] is not None for heads in self.uniform for scores in heads)
        return [name for name in (*highlights.SCORES, "entropy") if has_later_keys or name not in AHEAD]

    def unmasked(self) -> Reading:
        """Return a copy whose weights are computed from the same q and k without a mask."""
        return replace(self, maps=[amap.under(None) for amap in self.maps])


# -- reading ---------------------------------------------------------------------------------------


def read_text(text: str | None, file: str | None) -> str:
    """Return the text given on the command line or in a file.

    Args:
        text: The text, or None.
        file: The path of a file, - for standard input, or None. A newline at its end is removed.

    Returns:
        The text.

    Raises:
        ValueError: If both or neither are given, or the text is blank or isn't UTF-8.
        OSError: If the file can't be read.
    """
    if (text is None) == (file is None):
        got = "neither" if text is None else "both"
        raise ValueError(f"Expected a TEXT or a --text-file, got {got}.")
    source = "TEXT" if file is None else "standard input" if file == "-" else file
    try:
        if text is not None:
            data = os.fsencode(text)
        elif file != "-":
            data = Path(str(file)).read_bytes()
        elif sys.stdin is None:  # Python was started with standard input closed
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        else:
            data = sys.stdin.buffer.read()
        decoded = data.decode("utf-8-sig")
    except OSError as error:
        raise OSError(
            f"--text-file {source} can't be read: {error.strerror}. Choose a different file."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Expected UTF-8 text, got an invalid byte at {error.start} of {source}. Convert it to UTF-8."
        ) from None
    if file is not None:
        decoded = decoded.replace("\r\n", "\n").removesuffix("\n")
    if not decoded.strip():
        raise ValueError(f"Expected a text with some words, got a blank {source}.")
    return decoded


def read(
    text: str,
    model: str | os.PathLike[str] | None = None,
    *,
    truncate: bool = False,
    long: bool = False,
    progress: Progress | None = None,
) -> Reading:
    """Run a model on a text and record its attention.

    Args:
        text: The text.
        model: The model, see `models.load`. None loads the model that ships with manyheads.
        truncate: If True, cut off the end of a text that is too long. If False, raise an error.
        long: If True, read up to `LONGEST` tokens with a manyheads model. If the text is longer than the
            model's context, rotary frequencies are scaled for its length (`lm.LanguageModel.scaled`).
        progress: A progress bar that counts the layers. If the text is longer than the context, the expected
            time is printed above it.

    Returns:
        The attention maps and the findings.

    Raises:
        ValueError: If the text is too long, the model has no self-attention over it, or `long` is set for a
            Hugging Face model. `models.load` and `Model.read` raise further errors.
    """
    reader = models.load(model)
    if long and reader.scaled is None:
        raise ValueError(
            f"Expected a manyheads model for --long, which scales rotary frequencies, got the Hugging Face "
            f"model {reader.name}. Remove --long."
        )
    notes = list(reader.notes)
    ids, tokens = reader.encode(text, None)
    if not ids:
        raise ValueError(f"Expected a text with tokens, got one without any for {reader.name}.")
    trained = reader.context
    total = len(ids)
    limit = max(LONGEST, trained) if long and trained is not None else trained
    if limit is not None and total > limit:
        if not truncate:
            can_scale = not long and reader.scaled is not None
            longer = f"Read up to {LONGEST} tokens with --long, shorten it," if can_scale else "Shorten it,"
            raise ValueError(
                f"Expected a text of at most {limit} tokens, got {total}. {longer} or keep the "
                f"first {limit} tokens with --truncate."
            )
        ids, tokens = reader.encode(text, limit)
        notes.append(f"--truncate: only the first {len(ids)} of {total} tokens are read")
    t = len(ids)
    extrapolated = trained is not None and t > trained
    if extrapolated:
        assert reader.scaled is not None
        reader = reader.scaled(t)
        notes.append(f"tokens from {trained} on are beyond the trained context of {trained} (extrapolated)")
        if progress is not None:
            expected = round_duration(estimate_time(reader, ids))
            progress.console.print(f"reading {t:,} tokens, {expected}", highlight=False, soft_wrap=True)
    if t > highlights.SEARCHED:
        notes.append(f"findings are searched among the first {highlights.SEARCHED} of {t} tokens")
    if progress is None:
        recording = reader.read(ids)
    else:
        task = progress.add_task("reading", total=len(reader.layers) or None)
        recording = reader.read(ids, lambda: progress.advance(task))
    calls = _list_calls(recording)
    if not any(amap.shape[2:] == (t, t) for _, amap in calls):
        queries, keys = calls[0][1].shape[2:]
        raise ValueError(
            f"Expected self-attention over the {t} tokens of the text, got {queries} queries and {keys} keys "
            f"in the first layer of {reader.name}."
        )
    recording.label(tokens)
    square = [(layer, amap) for layer, amap in _list_calls(recording) if amap.shape[2:] == (t, t)]
    if len(square) < len(calls):
        notes.append(
            f"{len(calls) - len(square)} of {len(calls)} layers have no self-attention over the text and "
            "aren't shown"
        )
    recording.provenance.update(model=reader.name, ids=ids)
    if extrapolated:
        recording.provenance["extrapolated_from"] = trained
    layers, maps = [layer for layer, _ in square], [amap for _, amap in square]
    renumbered = next((n for n, layer in enumerate(layers) if str(n) not in layer.split(".")), None)
    if renumbered is not None:  # some layers have no attention, or several layers share a module
        notes.append(f"layers are numbered by their calls: layer {renumbered} is {layers[renumbered]}")
    candidates = highlights.find_candidates(maps, ids, highlights.left_out(tokens))
    return Reading(reader.name, tokens, ids, total - t, recording, layers, maps, candidates, notes)


def estimate_time(reader: models.Model, ids: Sequence[int]) -> float:
    """Estimate how many seconds a text will take, by timing three short prefixes of it.

    Args:
        reader: The model.
        ids: The token ids. The time is modelled as a quadratic function of their number.

    Returns:
        The seconds that reading, head scores and a small picture take together.
    """

    def seconds(t: int) -> float:
        start = perf_counter()
        prefix = torch.tensor(ids[:t])
        for _, amap in _list_calls(reader.read(ids[:t])):
            highlights.score_heads(amap, prefix)
            highlights.score_heads(highlights.uniform(amap), prefix)
            amap.pooled(min(t, CELLS), min(t, CELLS), "max")  # as for a picture
        return perf_counter() - start

    last = max(3, len(ids) // 4)
    middle = max(2, last // 4)
    first = max(1, middle // 4)
    seconds(first)  # a warm-up: the first run takes longer
    low, mid, high = seconds(first), seconds(middle), seconds(last)
    slope, before = (high - mid) / (last - middle), (mid - low) / (middle - first)
    curvature = (slope - before) / (last - first)  # Newton's divided differences
    return high + (len(ids) - last) * (max(0.0, slope) + max(0.0, curvature) * (len(ids) - middle))


def round_duration(seconds: float) -> str:
    """Return an estimated duration in words, rounded."""
    if seconds < 1.5:
        return "about a second"
    if seconds < 90:
        return f"about {seconds if seconds < 10 else 5 * round(seconds / 5):.0f} seconds"
    return f"about {seconds / 60:.0f} minutes"


def _list_calls(recording: Recording) -> list[tuple[str, AttentionMap]]:
    """Return (layer, map) of every attention call. A module that is called twice counts as two layers."""
    return [(layer, amap) for layer in recording for amap in recording.calls(layer)]


def choose_head(reading: Reading, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
    """Return the layer and the head to show in detail.

    Args:
        reading: The text and its maps.
        layer: The layer, or None for the layer of the most interesting finding.
        head: The head, or None for the head of the most interesting finding.

    Returns:
        The layer and the head, counted from 0.

    Raises:
        ValueError: If the model has no such layer or head.
    """
    layers = len(reading.maps)
    if layer is not None and not 0 <= layer < layers:
        raise ValueError(f"Expected --layer to be between 0 and {layers - 1}, got {layer}.")
    heads = max(amap.shape[1] for n, amap in enumerate(reading.maps) if layer in (None, n))
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"Expected --head to be between 0 and {heads - 1}, got {head}.")
    in_layer = (finding for finding in reading.candidates if layer in (None, finding.layer))
    best = next(finding for finding in in_layer if head in (None, finding.head))
    return best.layer, best.head


# -- pictures --------------------------------------------------------------------------------------


def draw(reading: Reading, layer: int, head: int, *, masked: bool = True) -> dict[str, Figure]:
    """Draw an overview of all heads, and one head in detail.

    Args:
        reading: The text and its maps.
        layer: The layer to show in detail.
        head: The head to show in detail.
        masked: If False, also draw the head as it would be without a mask.

    Returns:
        The figures, keyed by the names of their files.
    """
    return draw_overview(reading) | draw_head(reading, layer, head, masked=masked)


def draw_overview(reading: Reading) -> dict[str, Figure]:
    """Draw all heads, with what each of them attends to, and outlines around the weights of the findings.

    The title is the first finding.

    Args:
        reading: The text and its maps.

    Returns:
        The figure, keyed by the name of its file.
    """
    captions = [["" if pattern is None else pattern.label for pattern in heads] for heads in reading.patterns]
    sentences = [reading.describe(finding) for finding in reading.findings[:1]]
    title = next(filter(None, (*sentences, reading.summary)), "What each head attends to")
    is_outlined = bool(reading.findings) and len(reading.ids) <= SHORT
    title += _source(reading, "the weights that stand out most" if is_outlined else None)
    figure = figures.grid(reading.maps, reading.tokens, captions=captions, title=title)
    if is_outlined:
        panels = iter(figure.axes)
        by_head = {
            (layer, head): next(panels)
            for layer, amap in enumerate(reading.maps)
            for head in range(amap.shape[1])
        }
        for finding in reading.findings:
            _outline(by_head[finding.layer, finding.head], finding)
    return {"overview": _with_context(figure, reading)}


def draw_head(reading: Reading, layer: int, head: int, *, masked: bool = True) -> dict[str, Figure]:
    """Draw one head in detail.

    Args:
        reading: The text and its maps.
        layer: The layer.
        head: The head.
        masked: If False, also draw the head as it would be without a mask.

    Returns:
        The figure, keyed by the name of its file.
    """
    amap, tokens = reading.maps[layer], reading.tokens
    found = [] if len(reading.ids) > SHORT else reading.findings
    outlined = [finding for finding in found if (finding.layer, finding.head) == (layer, head)]
    title = reading.title(layer, head) + _source(reading, "this weight" if outlined else None)
    if masked or not has_masked_keys(amap):
        figure = figures.head(amap, tokens, head=head, title=title)
    else:
        causal = amap.problem.mask is not None and amap.problem.mask.normal().band[1] == 0
        figure = figures.beside(
            amap,
            amap.under(None),
            tokens,
            head=head,
            titles=(f"{'causal, ' * causal}as the model computes it", COUNTERFACTUAL),
            title=title,
        )
    for finding in outlined:
        _outline(figure.axes[0], finding)
    return {f"layer{layer}-head{head}": _with_context(figure, reading)}


def _rename(scores: HeadScores) -> HeadScores:
    """Return scores by their names in `measures.SCORES`."""
    return {highlights.SCORES.get(name, name): value for name, value in scores.items()}


def _source(reading: Reading, outlined: str | None) -> str:
    """Return the lines below a title: the model and its text, what is outlined, and the trained context."""
    text = " ".join(reading.tokens.text.split())
    if len(text) > EXCERPT:
        ends = (n for n in range(EXCERPT, 0, -1) if is_boundary(text, n) and not is_within_word(text, n))
        text = f"{text[: next(ends, EXCERPT)].rstrip()}…"
    lines = [f"model: {reading.model} · text: {highlights.quote(text)}"]
    if outlined is not None:
        lines[0] += f" · outlined in red: {outlined}"
    if reading.trained is not None:
        lines.append(
            f"below the line, tokens from {reading.trained} on are beyond the trained context (extrapolated)"
        )
    return "".join(f"\n{line}" for line in lines)


def _outline(axes: Axes, finding: Finding) -> None:
    """Draw an outline around the weight of a finding."""
    corner = finding.key - 0.5, finding.query - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=OUTLINE, linewidth=1.5, clip_on=False))


def _with_context(figure: Figure, reading: Reading) -> Figure:
    """Draw a line where the trained context ends into the heat maps of a figure; return the figure."""
    if reading.trained is not None:
        for axes in figure.axes:
            if axes.images:
                axes.axhline(reading.trained - 0.5, color=OUTLINE, linewidth=0.8)
    return figure


def has_masked_keys(amap: AttentionMap) -> bool:
    """Return True if any key is masked for any query."""
    return not scores.is_fully_visible(replace(amap.problem, bias=None), slice(None), slice(None))


def check_format(name: str) -> str:
    """Return the name of a picture format, or raise ValueError if it is unknown."""
    if name not in FORMATS:
        raise ValueError(f"Expected --format to be one of {', '.join(FORMATS)}, got {name!r}.")
    return name


def write(figures: Mapping[str, Figure], folder: Path, format: str = "png") -> list[Path]:
    """Write figures into a folder. Existing files are replaced only after all figures have been drawn.

    Args:
        figures: The figures, keyed by the names of their files.
        folder: The folder.
        format: One of `FORMATS`.

    Returns:
        The paths of the files.

    Raises:
        OSError: If a file can't be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".drawing-") as temporary:
            drawn = [Path(temporary) / f"{name}.{format}" for name in figures]
            for path, figure in zip(drawn, figures.values(), strict=True):
                figure.savefig(path, format=format, bbox_inches="tight")
            return [path.replace(folder / path.name) for path in drawn]
    except OSError as error:
        raise OSError(
            f"--out {folder}: a picture can't be written: {error.strerror}. Choose a different folder."
        ) from None


def save(reading: Reading, path: Path) -> Path:
    """Save all recorded attention in a file that `manyheads.open_run` reads.

    Args:
        reading: The text and its recording.
        path: The file.

    Returns:
        The path.

    Raises:
        OSError: If the file can't be written.
    """
    try:
        reading.recording.save(path)
    except OSError as error:
        raise OSError(f"--save {path} can't be written: {error.strerror}. Choose a different path.") from None
    return path


# -- JSON ------------------------------------------------------------------------------------------


def to_json(reading: Reading, layer: int, head: int, files: list[Path], *, masked: bool = True) -> str:
    """Return findings, head scores, tokens and files as JSON.

    Args:
        reading: The text and its maps.
        layer: The layer that was shown in detail.
        head: The head that was shown in detail.
        files: The files that were written.
        masked: If False, add the head scores without a mask.

    Returns:
        The JSON text.
    """
    columns, plain = reading.columns, _head_rows(reading)
    names = [name for layer_names in reading.characteristic for name in layer_names]
    patterns = [pattern for heads in reading.patterns for pattern in heads]
    for row, name, pattern in zip(plain["measures"], names, patterns, strict=True):
        row["characteristic"] = name
        row["description"] = None if pattern is None else pattern.phrase
    content: dict[str, Any] = {
        "model": reading.model,
        "notes": reading.notes,
        "text": reading.tokens.text,
        "tokens": _token_rows(reading),
        "tokens_left_out": reading.left_out,
        "layers": [
            {"name": name, "heads": len(heads), "even": _select_columns(heads[0], columns)}
            for name, heads in zip(reading.layers, reading.uniform, strict=True)
        ],
        "summary": reading.summary,
        "findings": [
            {**asdict(finding), "surprise": finding.surprise, "sentence": reading.describe(finding)}
            for finding in reading.findings
        ],
        "shown": {"layer": layer, "head": head},
        **plain,
        "files": [str(file) for file in files],
    }
    if not masked:
        content["what_if_nothing_were_masked"] = _head_rows(reading.unmasked())
    return json.dumps(content, indent=2, allow_nan=False)


def _token_rows(reading: Reading) -> list[dict[str, Any]]:
    """Return every token as in the JSON output. The texts of the tokens, joined, are the text."""
    tokens = reading.tokens
    return [
        {
            "position": n,
            "id": reading.ids[n],
            "text": tokens.piece(n),
            "label": tokens[n],
            "word": tokens.word(n),
            "special": n in tokens.special,
        }
        for n in range(len(tokens))
    ]


def _head_rows(reading: Reading) -> dict[str, Any]:
    """Return the scores of every head, and of a uniform head of layer 0, as in the JSON output."""
    columns = reading.columns
    rows = [
        {"layer": layer, "head": head, **_select_columns(scores, columns)}
        for layer, heads in enumerate(reading.scores)
        for head, scores in enumerate(heads)
    ]
    return {"measures": rows, "even": _select_columns(reading.uniform[0][0], columns)}


def _select_columns(scores: HeadScores, columns: Sequence[str]) -> HeadScores:
    return {name: scores[name] for name in columns}
