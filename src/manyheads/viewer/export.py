"""A viewer as a file to send: one page that opens from a disk, with all weights in it.

Where they are many, the page has a folder of tiles beside it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from manyheads.files import replacing
from manyheads.observe.summaries import Reduced
from manyheads.shapes import amount
from manyheads.viewer import page
from manyheads.viewer.gallery import Gallery, Layer, Run, edges, packed
from manyheads.viewer.tiles import SIDE, Head

PAGE = 40e6  # bytes of weights, up to which they go into the page itself
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Export:
    """What is to be written: `told` says how much, `write` writes it."""

    gallery: Gallery
    path: Path
    weights: int  # bytes, as text
    beside: bool  # in a folder?

    @property
    def folder(self) -> Path:
        """Where tiles go that don't go into the page."""
        return self.path.with_name(f"{self.path.stem}-tiles")

    @property
    def told(self) -> str:
        """What will be written, and how large it is, before it is."""
        size = amount(self.weights + len(page.script()) + 30_000)
        where = f"{self.path} and the folder {self.folder.name} beside it" if self.beside else str(self.path)
        return f"{where} will take about {size}"

    def write(self, progress: Progress = lambda share: None) -> list[Path]:
        """Write it, whole or not at all; OSError from the disk, also where the folder is there already."""
        if not self.beside:
            with replacing(self.path) as file:
                file.write(self.page(progress=progress).encode())
            return [self.path]
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} is there already: remove it, or export under another name.")
        part = self.folder.with_name(f".{token_hex(8)}.part")
        answers: dict[str, str] = {}
        try:
            part.mkdir()
            for address, answer in self._answers(progress):
                if address.startswith("tiles/"):
                    script = f"manyheadsTake({json.dumps(address)},{json.dumps(_text(answer))})"
                    (part / f"{address.replace('/', '-')}.js").write_text(script, encoding="ascii")
                else:
                    answers[address] = _text(answer)
            with replacing(self.path) as file:
                file.write(document(answers, self.folder.name).encode())
                part.replace(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return [self.path, self.folder]

    def page(self, picture: bytes | None = None, progress: Progress = lambda share: None) -> str:
        """All of it as one page; a picture (PNG) stands in for it where scripts don't run."""
        answers = {address: _text(answer) for address, answer in self._answers(progress)}
        return document(answers, None, picture)

    def _answers(self, progress: Progress) -> Iterator[tuple[str, bytes]]:
        def plain(address: str) -> tuple[str, bytes]:
            answer = self.gallery.ask(address).result()
            return address, answer.encode() if isinstance(answer, str) else answer

        yield plain("runs")
        every = [
            (r, n, layer) for r, run in enumerate(self.gallery.runs) for n, layer in enumerate(run.layers)
        ]
        heads = sum(layer.call.shape[0] * layer.call.shape[1] for *_, layer in every)
        done = 0
        for run, n, layer in every:
            b, h, *_ = layer.call.shape
            for batch in range(b):
                yield plain(f"tokens/{run}/{n}/{batch}")
                yield plain(f"measures/{run}/{n}/{batch}")
                for head in range(h if not isinstance(layer.call, Reduced) else 0):
                    where, one = f"{run}/{n}/{head}", Head(layer.map.only(batch, head))
                    for _ in one.passing():
                        pass
                    yield f"edges/{where}/{batch}", edges(one)
                    yield f"pass/{where}/{batch}", json.dumps({"progress": 1, "whole": True}).encode()
                    for share, (level, x, y) in _places(one.t, one.s):
                        tile = one.tile(level, x, y)
                        exact = not (level or self.beside)
                        yield f"tiles/{where}/{level}/{x}/{y}/{batch}", packed(tile, exact)
                        progress((done + share) / heads)
                    done += 1


def planned(
    gallery: Gallery, path: Path, layer: int | None = None, heads: Sequence[int] | None = None
) -> Export:
    """What writing some layers and heads into a page would take; None is all of them.

    ValueError where weights of all heads are too many for a page and none were chosen, or for a layer or
    head that isn't there.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--export writes a page, and {path} doesn't end in .html: name one that does.")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to export {path.name} into: make it first.")
    runs = [_chosen(run, layer, heads) for run in gallery.runs]
    layers = [one for run in runs for one in run.layers if not isinstance(one.call, Reduced)]

    def sizes(single: int) -> list[tuple[int, int]]:
        """Of each layer, how many heads, and the bytes of one in all sequences."""
        return [
            (one.call.shape[1], one.call.shape[0] * _bytes(Head(one.map.only(0, 0)), single))
            for one in layers
        ]

    whole = sum(h * size for h, size in sizes(4))
    if whole > PAGE and layer is None and heads is None:
        raise ValueError(
            f"all {sum(h for h, _ in sizes(4))} heads would take {amount(whole)}: choose some with --layer "
            f"and --head, a head takes {amount(max(size for _, size in sizes(4)))}."
        )
    beside = whole > PAGE
    if beside:
        whole = sum(h * size for h, size in sizes(2))
    return Export(Gallery(*runs), path, whole, beside)


def _chosen(run: Run, layer: int | None, heads: Sequence[int] | None) -> Run:
    """A run of some of its layers and heads."""
    layers = run.layers
    if layer is not None:
        if not 0 <= layer < len(layers):
            raise ValueError(
                f"--layer must be between 0 and {len(layers) - 1}, and {layer} came, for {run.title}."
            )
        layers = [layers[layer]]
    if heads is not None:
        most = min(one.call.shape[1] for one in layers)
        for head in heads:
            if not 0 <= head < most:
                raise ValueError(f"--head must be between 0 and {most - 1}, and {head} came.")
        layers = [Layer(one.name, one.map.only(heads=list(heads)), one.number) for one in layers]
    return Run(run.title, layers, run.provenance, None)


def _places(t: int, s: int) -> Iterator[tuple[float, tuple[int, int, int]]]:
    """All tiles of a head, and how much is done with each: levels down to one tile, and a small picture."""
    places = []
    level = 0
    while True:
        side = SIDE << level
        down, across = -(-t // side), -(-s // side)
        places += [(level, x, y) for y in range(down) for x in range(across)]
        if down * across == 1:
            break
        level += 1
    small = max(t, s)
    if small > SIDE:
        places.append(((-(-small // 64) - 1).bit_length(), 0, 0))
    return (((n + 1) / len(places), place) for n, place in enumerate(places))


def _text(answer: bytes) -> str:
    return base64.b64encode(answer).decode()


def _bytes(head: Head, single: int) -> int:
    """Of a head as base64: so many bytes a weight on level 0, two numbers of two on others; and its edges."""
    size = 4 * (head.t + head.s) + sum(len(label) + 4 for label in head.amap.tokens or ())
    for level in range(head.top + 1):
        side = SIDE << level
        for start in range(0, head.t, side):
            rows = min(side, head.t - start)
            low, high = head.amap.problem.span(start, start + rows)[0]
            cols = min(-(-high // side) * side, head.s) - low // side * side
            size += (4 if level else single) * -(-rows // (1 << level)) * max(0, -(-cols // (1 << level)))
    return size * 4 // 3


def document(answers: dict[str, str], folder: str | None = None, picture: bytes | None = None) -> str:
    """A page with its answers, base64 by address, and a picture (PNG) for where scripts don't run."""
    script = page.script() + (
        "const answers = JSON.parse(document.getElementById('answers').textContent);\n"
        f"const source = new Written(answers, {json.dumps(folder)});\n"
        "const app = show(document.body, source, location.protocol !== 'about:');\n"
        "addEventListener('message', ({ source, data }) => source === parent && app.follow(data?.ink));\n"
    )
    style = page.read("viewer.css")
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (script, style)
    ]
    assert not re.search("</script|<!--", script, re.IGNORECASE)  # either would end it
    still = ""
    if picture is not None:
        still = f'<img alt="every head" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    loads = " 'self' file:" if folder else ""
    policy = f"default-src 'none'; script-src {hashes[0]}{loads}; style-src {hashes[1]}; img-src data: blob:"
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>manyheads</title>\n'
        f"<style>{style}</style>\n<body><noscript>{still or 'This page draws with JavaScript.'}</noscript>\n"
        f'<script type="application/json" id="answers">{json.dumps(answers)}</script>\n'
        f'<script type="module">{script}</script>\n</html>\n'
    )
