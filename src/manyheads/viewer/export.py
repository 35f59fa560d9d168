"""The viewer as a file to send: a page with all weights, which opens from a disk.

A page with many weights has a folder of tiles beside it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from manyheads.shapes import amount
from manyheads.storage import replacing
from manyheads.viewer import assets
from manyheads.viewer.api import Api, ViewedRun, pack_marginals, pack_tile
from manyheads.viewer.pyramid import SIDE, Pyramid

PAGE_BYTES = 40e6  # of weights in the page itself; if there are more, tiles are written beside it
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Export:
    """A page to write.

    Attributes:
        api: The API that computes the page's answers.
        path: The file of the page.
        weight_bytes: The bytes of all weights, as text.
        has_folder: True if tiles are written into a folder beside the page.
    """

    api: Api
    path: Path
    weight_bytes: int
    has_folder: bool

    @property
    def folder(self) -> Path:
        """The folder of tiles."""
        return self.path.with_name(f"{self.path.stem}-tiles")

    @property
    def description(self) -> str:
        """The files, and their size."""
        size = amount(self.weight_bytes + len(assets.script()) + 30_000)
        beside = f" and the folder {self.folder.name} beside it" if self.has_folder else ""
        return f"{self.path}{beside} will take about {size}"

    def write(self, progress: Progress = lambda share: None) -> list[Path]:
        """Write all files or none, and return their paths; raise OSError if the folder exists already."""
        if not self.has_folder:
            with replacing(self.path) as file:
                file.write(self.page(progress=progress).encode())
            return [self.path]
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} exists. Remove it, or export under another name.")
        answers: dict[str, str] = {}
        with TemporaryDirectory(dir=self.path.parent, prefix=".") as temporary:
            tiles = Path(temporary) / self.folder.name
            tiles.mkdir()
            for address, answer in self._answers(progress):
                if address.startswith("tiles/"):
                    script = f"manyheadsLoaded({json.dumps(address)},{json.dumps(answer)})"
                    (tiles / f"{address.replace('/', '-')}.js").write_text(script, encoding="ascii")
                else:
                    answers[address] = answer
            with replacing(self.path) as file:
                file.write(build_page(answers, self.folder.name).encode())
                tiles.rename(self.folder)
        return [self.path, self.folder]

    def page(self, picture: bytes | None = None, progress: Progress = lambda share: None) -> str:
        """Return a single page; `picture` is a PNG that is displayed where scripts don't run."""
        return build_page(dict(self._answers(progress)), None, picture)

    def _answers(self, progress: Progress) -> Iterator[tuple[str, str]]:
        """Yield every address of a page with its answer as base64."""

        def answer(address: str) -> tuple[str, str]:
            content = self.api.request(address).result()
            return address, _base64(content.encode() if isinstance(content, str) else content)

        yield answer("runs")
        layers = [(r, n, layer) for r, run in enumerate(self.api.runs) for n, layer in enumerate(run.layers)]
        count = sum(layer.call.shape[0] * layer.call.shape[1] for *_, layer in layers)
        done = 0
        for run, n, layer in layers:
            b, h, *_ = layer.call.shape
            for batch in range(b):
                yield answer(f"tokens/{run}/{n}/{batch}")
                yield answer(f"scores/{run}/{n}/{batch}")
                for head in range(h if layer.has_weights else 0):
                    place, pyramid = f"{run}/{n}/{head}", Pyramid(layer.map.only(batch, head))
                    for _ in pyramid.scan():
                        pass
                    yield f"marginals/{place}/{batch}", _base64(pack_marginals(pyramid))
                    yield f"scan/{place}/{batch}", _base64(b'{"progress": 1, "complete": true}')
                    tiles = _tiles(pyramid)
                    for m, (level, x, y) in enumerate(tiles):
                        packed = pack_tile(pyramid.tile(level, x, y), exact=not (level or self.has_folder))
                        yield f"tiles/{place}/{level}/{x}/{y}/{batch}", _base64(packed)
                        progress((done + (m + 1) / len(tiles)) / count)
                    done += 1


def plan_export(api: Api, path: Path, layer: int | None = None, heads: Sequence[int] | None = None) -> Export:
    """Return the page to write for some layers and heads.

    Args:
        api: What to export.
        path: The page, in an existing folder.
        layer: A layer of each run, counted from 0. Default: all.
        heads: Heads of each layer, counted from 0. Default: all.

    Returns:
        The export, with an API of its own.

    Raises:
        ValueError: If the path isn't a page in an existing folder, a layer or head doesn't exist, or all
            heads have too many weights for a page.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"Expected --export to end in .html, got {path}.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} of --export doesn't exist. Create it first.")
    runs = [_select(run, layer, heads) for run in api.runs]
    maps = [shown.map for run in runs for shown in run.layers if shown.has_weights]

    def sizes(weight_bytes: int) -> list[tuple[int, int]]:
        """Return each layer's number of heads, and the bytes of a head in all sequences."""
        return [
            (amap.shape[1], amap.shape[0] * _estimate(Pyramid(amap.only(0, 0)), weight_bytes))
            for amap in maps
        ]

    total = sum(h * size for h, size in sizes(4))
    has_folder = total > PAGE_BYTES
    if has_folder and layer is None and heads is None:
        raise ValueError(
            f"All {sum(h for h, _ in sizes(4))} heads would take {amount(total)}. Choose some with --layer "
            f"and --head; a head takes {amount(max(size for _, size in sizes(4)))}."
        )
    if has_folder:
        total = sum(h * size for h, size in sizes(2))
    return Export(Api(*runs), path, total, has_folder)


def _select(run: ViewedRun, layer: int | None, heads: Sequence[int] | None) -> ViewedRun:
    """Return a run of some of its layers and heads."""
    layers = run.layers
    if layer is not None:
        if not 0 <= layer < len(layers):
            raise ValueError(
                f"Expected --layer between 0 and {len(layers) - 1} for {run.title}, got {layer}."
            )
        layers = [layers[layer]]
    if heads is not None:
        last = min(shown.call.shape[1] for shown in layers) - 1
        for head in heads:
            if not 0 <= head <= last:
                raise ValueError(f"Expected --head between 0 and {last}, got {head}.")
        layers = [replace(shown, call=shown.map.only(heads=list(heads))) for shown in layers]
    return ViewedRun(run.title, layers, run.provenance)


def _tiles(pyramid: Pyramid) -> list[tuple[int, int, int]]:
    """Return level, x and y of all tiles of a head up to a single one, and of its thumbnail."""
    tiles = []
    for level in range(pyramid.top + 1):
        down, across = -(-pyramid.t // (SIDE << level)), -(-pyramid.s // (SIDE << level))
        tiles += [(level, x, y) for y in range(down) for x in range(across)]
    if pyramid.top:
        tiles.append(((-(-max(pyramid.t, pyramid.s) // 64) - 1).bit_length(), 0, 0))
    return tiles


def _estimate(pyramid: Pyramid, weight_bytes: int) -> int:
    """Return the bytes of a head as base64: a number per weight, and two float16 per pooled cell."""
    size = 4 * (pyramid.t + pyramid.s) + sum(len(label) + 4 for label in pyramid.amap.tokens or ())
    for level in range(pyramid.top + 1):
        side = SIDE << level
        for start in range(0, pyramid.t, side):
            rows = min(side, pyramid.t - start)
            low, high = pyramid.problem.span(start, start + rows)[0]
            cols = max(0, min(-(-high // side) * side, pyramid.s) - low // side * side)
            size += (4 if level else weight_bytes) * (-(-rows >> level)) * (-(-cols >> level))
    return size * 4 // 3


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def build_page(answers: dict[str, str], folder: str | None = None, picture: bytes | None = None) -> str:
    """Return a page that contains its answers.

    Args:
        answers: Base64 by address.
        folder: The folder of tiles beside the page.
        picture: A PNG that is displayed where scripts don't run.

    Returns:
        The page as HTML.
    """
    script = assets.script() + (
        "const answers = JSON.parse(document.getElementById('answers').textContent);\n"
        f"const client = new PageClient(answers, {json.dumps(folder)});\n"
        "const app = show(document.body, client, location.protocol !== 'about:');\n"
        "addEventListener('message', ({ source, data }) => source === parent && app.adaptTo(data?.color));\n"
    )
    style = assets.read("viewer.css")
    script_hash, style_hash = (
        f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for text in (script, style)
    )
    assert not re.search("</script|<!--", script, re.IGNORECASE)  # either would end the script
    fallback = "This page needs JavaScript."
    if picture is not None:
        fallback = f'<img alt="every head" src="data:image/png;base64,{_base64(picture)}">'
    tile_sources = " 'self' file:" if folder else ""
    policy = (
        f"default-src 'none'; script-src {script_hash}{tile_sources}; style-src {style_hash}; "
        "img-src data: blob:"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>manyheads</title>\n'
        f"<style>{style}</style>\n<body><noscript>{fallback}</noscript>\n"
        f'<script type="application/json" id="answers">{json.dumps(answers)}</script>\n'
        f'<script type="module">{script}</script>\n</html>\n'
    )
