"""The viewer as an HTML file, which needs no server.

A page has the weights of its heads as tiles. If all of them would exceed a budget, it has pooled levels only,
the finest that fit, and says so. With `full`, single weights are kept at any size: as tiles in a folder
beside the page.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

from manyheads.observe.table import COLUMNS
from manyheads.shapes import amount
from manyheads.storage import replacing
from manyheads.viewer.api import Api, pack_marginals, pack_tile
from manyheads.viewer.page import build_page, encode, encoded_size
from manyheads.viewer.pyramid import SIDE, Pyramid
from manyheads.viewer.runs import Layer, ViewedRun

PAGE_BYTES = 50e6  # the largest size of a page; more weights are pooled, or written beside it
CONFIRM_BYTES = 200e6  # the command asks before it writes more
SCANNED = b'{"progress": 1, "complete": true}'
MASKED_SIZE = encoded_size(16)  # of a tile that is masked entirely: a header without cells
SCORE_SIZE, FINDINGS_SIZE = 30, 1_500  # the estimated sizes of a head score and of a text's findings
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Export:
    """A page to write.

    Attributes:
        api: The API that computes the page's data.
        path: The file of the page.
        size: The estimated bytes of all files.
        has_folder: True if tiles are written into a folder beside the page.
        is_exact: True if single weights are in float32; they are in float16 in a folder.
    """

    api: Api
    path: Path
    size: int
    has_folder: bool
    is_exact: bool

    @property
    def folder(self) -> Path:
        """The folder of tiles."""
        return self.path.with_name(f"{self.path.stem}-tiles")

    @property
    def finest(self) -> int:
        """The finest level of the layer with the largest cells: 0 if all single weights are in the page."""
        return max(layer.finest for run in self.api.runs for layer in run.layers)

    @property
    def description(self) -> str:
        """The files and their size, in words."""
        beside = f" and the folder {self.folder.name} beside it" if self.has_folder else ""
        text = f"{self.path}{beside} will take about {amount(self.size)}"
        if self.finest:
            side = f"{1 << self.finest:,}"
            text += f", with cells of at least {side} × {side} weights (--full keeps single weights)"
            if any(layer.finest for run in self.api.runs if run.pictures for layer in run.layers):
                text += "; layers with such cells show the picture without weights"
        return text

    def check_space(self) -> None:
        """Raise OSError if the disk has too little free space, or the folder exists already."""
        if self.has_folder and self.folder.exists():
            raise FileExistsError(f"{self.folder} exists. Remove it, or choose a different --export.")
        free = shutil.disk_usage(self.path.parent).free
        if free < self.size:
            raise OSError(
                f"{self.path} would take about {amount(self.size)}, but only {amount(free)} is free on its "
                "disk. Free some space, or choose fewer heads with --layer and --head."
            )

    def write(self, progress: Progress = lambda share: None) -> list[Path]:
        """Write all files, or none after an error or an interruption.

        Args:
            progress: A function that is called with the share that is done, from 0 to 1.

        Returns:
            The paths of the page and of its folder, if it has one.

        Raises:
            OSError: If a file can't be written, or the folder exists already.
        """
        self.check_space()
        try:
            return self._write_folder(progress) if self.has_folder else self._write_page(progress)
        except OSError as error:
            raise OSError(f"{self.path} can't be written: {error.strerror}. Nothing was kept.") from error

    def _write_page(self, progress: Progress) -> list[Path]:
        with replacing(self.path) as file:
            file.write(self.page(progress=progress).encode())
        return [self.path]

    def _write_folder(self, progress: Progress) -> list[Path]:
        responses: dict[str, str] = {}
        with _temporary_folder(self.path.parent) as temporary:
            tiles = temporary / self.folder.name
            tiles.mkdir()
            for address, response in self._responses(progress):
                if is_in_folder(address, len(response)):
                    script = f"manyheadsLoaded({json.dumps(address)},{json.dumps(response)})"
                    (tiles / f"{address.replace('/', '-')}.js").write_text(script, encoding="ascii")
                else:
                    responses[address] = response
            with replacing(self.path) as file:
                file.write(build_page(responses, self.folder.name).encode())
                tiles.rename(self.folder)
        return [self.path, self.folder]

    def page(self, picture: bytes | None = None, progress: Progress = lambda share: None) -> str:
        """Return a single page; `picture` is a PNG that is displayed if scripts don't run."""
        return build_page(dict(self._responses(progress)), None, picture)

    def _responses(self, progress: Progress) -> Iterator[tuple[str, str]]:
        """Yield every address that a page may request, with the response as base64."""
        yield "runs", self._respond("runs")
        layers = [(r, n, layer) for r, run in enumerate(self.api.runs) for n, layer in enumerate(run.layers)]
        count = sum(layer.call.shape[0] * layer.call.shape[1] for *_, layer in layers)
        done = 0
        for r, viewed in enumerate(self.api.runs):
            for batch in range(max(layer.call.shape[0] for layer in viewed.layers)):
                yield f"findings/{r}/{batch}", self._respond(f"findings/{r}/{batch}")
        for run, n, layer in layers:
            b, h, *_ = layer.call.shape
            words = ("tokens", "scores", *(["patches"] if layer.has_patches else []))
            for batch in range(b):
                for word in words:
                    address = f"{word}/{run}/{n}/{batch}"
                    yield address, self._respond(address)
                for head in range(h):
                    if layer.has_weights:
                        place = f"{run}/{n}/{head}"
                        for address, packed, share in self._head(layer, place, batch, head):
                            yield address, encode(packed)
                            progress((done + share) / count)
                    done += 1
        progress(1.0)

    def _respond(self, address: str) -> str:
        content = self.api.request(address).result()
        return encode(content.encode() if isinstance(content, str) else content)

    def _head(self, layer: Layer, place: str, batch: int, head: int) -> Iterator[tuple[str, bytes, float]]:
        """Yield the addresses and responses of one head, and the share of it that is done."""
        pyramid = Pyramid(layer.map.only(batch, head))
        for share in pyramid.scan():
            yield f"scan/{place}/{batch}", SCANNED, share / 2
        yield f"marginals/{place}/{batch}", pack_marginals(pyramid), 0.5
        tiles = list(_tiles(pyramid, layer.finest))
        for m, (level, x, y) in enumerate(tiles):
            packed = pack_tile(pyramid.tile(level, x, y), exact=self.is_exact and not level)
            yield f"tiles/{place}/{level}/{x}/{y}/{batch}", packed, (1 + (m + 1) / len(tiles)) / 2


def is_in_folder(address: str, size: int) -> bool:
    """Return True for responses that are files of a page's folder: tiles, except those fully masked."""
    return address.startswith("tiles/") and size > MASKED_SIZE


def plan_export(
    api: Api,
    path: Path,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    *,
    full: bool = False,
    budget: float | None = None,
) -> Export:
    """Plan the export of some layers and heads as a page.

    Args:
        api: The runs to export.
        path: The page, in an existing folder.
        layer: A layer of each run, counted from 0. Default: all.
        heads: Heads of each layer, counted from 0. Default: all.
        full: Keep single weights, however many there are.
        budget: The largest size of a page in bytes. Default: `PAGE_BYTES`.

    Returns:
        The export, with a new API.

    Raises:
        ValueError: If the path isn't a page in an existing folder, a layer or head doesn't exist, or there
            are too many heads for a page.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"Expected --export to end in .html, got {path}.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} of --export doesn't exist. Create it first.")
    budget = PAGE_BYTES if budget is None else budget
    exact = Api(*(_select(run, layer, heads) for run in api.runs))
    sizes = _Sizes(exact)
    for is_exact in (True, False):
        size = sizes.total(exact.runs, is_exact, has_folder=False)
        if size <= budget:
            return Export(exact, path, size, has_folder=False, is_exact=is_exact)
    if full:
        return Export(exact, path, sizes.total(exact.runs, False, has_folder=True), True, is_exact=False)
    longest = max(max(shown.call.shape[2:]) for run in exact.runs for shown in run.layers)
    for cut in range(1, (longest // SIDE).bit_length() + 1):
        runs = [_coarsen(run, -(-longest >> cut)) for run in exact.runs]
        size = sizes.total(runs, False, has_folder=False)
        if size <= budget:
            exact.close()
            return Export(Api(*runs), path, size, has_folder=False, is_exact=False)
    exact.close()
    count = sum(shown.call.shape[0] * shown.call.shape[1] for run in exact.runs for shown in run.layers)
    raise ValueError(
        f"{count:,} heads with few cells would take {amount(size)}, more than {amount(budget)}. Choose some "
        "with --layer and --head, or pass --full."
    )


def _select(run: ViewedRun, layer: int | None, heads: Sequence[int] | None) -> ViewedRun:
    """Return a run restricted to some of its layers and heads."""
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
    return run.with_layers(layers)


def _coarsen(run: ViewedRun, cells: int) -> ViewedRun:
    """Return a run whose finest levels have at most this many cells along each side."""
    layers = []
    for layer in run.layers:
        longest = max(layer.call.shape[2:])
        layers.append(replace(layer, finest=max(0, (-(-longest // cells) - 1).bit_length())))
    return run.with_layers(layers)


def _tiles(pyramid: Pyramid, finest: int) -> Iterator[tuple[int, int, int]]:
    """Yield level, x and y of a head's tiles, from a level to that of a single cell."""
    for level in range(finest, pyramid.highest + 1):
        down, across = pyramid.grid(level)
        yield from ((level, x, y) for y in range(down) for x in range(across))


# -- sizes -----------------------------------------------------------------------------------------


class _Sizes:
    """Estimates of the size of an export: exact, except for head scores and tiles that a mask empties."""

    def __init__(self, api: Api) -> None:
        self.fixed = len(build_page({})) + len(api.request("runs").result()) * 4 // 3
        stored = set()  # a page has equal responses once
        self.layers: list[tuple[int, list[_LevelSize]]] = []  # heads in all sequences, and their sizes
        for r, run in enumerate(api.runs):
            self.fixed += FINDINGS_SIZE * max(layer.call.shape[0] for layer in run.layers)
            for n, layer in enumerate(run.layers):
                b, h, t, s = layer.call.shape
                for batch in range(b):
                    for word in ("tokens", *(["patches"] if layer.has_patches else [])):
                        text = api.request(f"{word}/{r}/{n}/{batch}").result()
                        if text not in stored:
                            stored.add(text)
                            self.fixed += encoded_size(len(text))
                    self.fixed += encoded_size(SCORE_SIZE * h * len(COLUMNS)) + 60
                levels: list[_LevelSize] = []
                if layer.has_weights:
                    self.fixed += b * h * (encoded_size(16 + 4 * (t + s)) + len(SCANNED) + 80)
                    pyramid = Pyramid(layer.map.only(0, 0))
                    levels = [_LevelSize.of(pyramid, level) for level in range(pyramid.highest + 1)]
                self.layers.append((b * h, levels))

    def total(self, runs: Sequence[ViewedRun], is_exact: bool, has_folder: bool) -> int:
        """Return the bytes of all files.

        Args:
            runs: The runs, with the finest level of each layer.
            is_exact: True for single weights in float32.
            has_folder: True if tiles are files in a folder.

        Returns:
            The estimated size.
        """
        wrapper = len('manyheadsLoaded("","")') if has_folder else len('"": "", ')
        total = self.fixed
        layers = (layer for run in runs for layer in run.layers)
        for layer, (heads, levels) in zip(layers, self.layers, strict=True):
            for level in levels[layer.finest :]:
                total += heads * level.size(wrapper, is_exact)
        return total


@dataclass(frozen=True)
class _LevelSize:
    """What determines the size of a head's tiles of one level: their cells, and the masked ones."""

    level: int
    cells: tuple[int, ...]  # the number of cells of each tile that isn't masked
    masked: int  # the number of the other tiles

    @classmethod
    def of(cls, pyramid: Pyramid, level: int) -> _LevelSize:
        """Count the cells of a head's tiles."""
        cells, masked, cell = [], 0, pyramid.cell(level)
        down, across = pyramid.grid(level)
        columns = [pyramid.span(level, x, 0)[1] for x in range(across)]
        for y in range(down):
            rows = pyramid.span(level, 0, y)[0]
            low, high = pyramid.problem.span(rows.start, rows.stop)[0]
            visible = [cols for cols in columns if cols.start < high and low < cols.stop]
            cells += [-(-len(rows) // cell.rows) * -(-len(cols) // cell.cols) for cols in visible]
            masked += across - len(visible)
        return cls(level, tuple(cells), masked)

    def size(self, wrapper: int, is_exact: bool) -> int:
        """Return the bytes of the level in a page or a folder, with the text around each tile."""
        bytes_per_cell = 4 if self.level or is_exact else 2  # two planes of float16, else one
        address = len("tiles/0/0/0/0/00/00/0")
        tiles = sum(wrapper + address + encoded_size(16 + bytes_per_cell * n) for n in self.cells)
        return tiles + self.masked * (MASKED_SIZE + wrapper + address)


# -- files -----------------------------------------------------------------------------------------


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a hidden folder, and remove it at the end; a second Ctrl-C doesn't interrupt the removal."""
    temporary = Path(mkdtemp(dir=parent, prefix="."))
    try:
        yield temporary
    finally:
        with _without_interrupts():
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
