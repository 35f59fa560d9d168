"""Record an atlas: plan its shards, measure them on one process or several, and merge the results.

The folder of an atlas that isn't complete has

    manifest.json      the model, the options and the text with its shards, written first
    shards/00012.npz   the result of a shard, written when the shard is finished

Every shard is measured by one process, and shards are merged in order, so that the tables have the same bits
on any number of processes, also if processes are killed and the command is started again: shards that have a
result aren't measured again. Each process uses a fixed number of threads, because sums of more threads may
be rounded differently.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from manyheads import __version__
from manyheads.atlas import corpus, tables
from manyheads.atlas.corpus import Window
from manyheads.atlas.measuring import Meter, find_layers
from manyheads.atlas.plans import MANIFEST, Plan, checksum, load_model, write
from manyheads.atlas.summaries import Summary
from manyheads.distributed import processes
from manyheads.lm.checkpoint import disk_errors
from manyheads.shapes import whole
from manyheads.storage import folder_for
from manyheads.text.models import Model

if TYPE_CHECKING:
    from rich.progress import Progress

SHARDS, LOCK = "shards", ".lock"
LONGEST = 1024  # the default length of a window, if the context is longer
TOKENS = 4096  # the default number of tokens in a batch
PROBE = 64  # tokens with which the layers of a model are found
POLL = 0.2  # seconds between looks for the results of other processes


def record(
    model: str | os.PathLike[str] | Model | None,
    text: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    length: int | None = None,
    batch_size: int | None = None,
    threads: int = 1,
    ablate: bool = False,
    timeout: float = processes.TIMEOUT,
    progress: Progress | None = None,
) -> tables.Atlas:
    """Record what the heads of a model do over a corpus, or continue an atlas that isn't complete.

    In processes that torchrun has started, all of them call this function with the same arguments, and share
    the work.

    Args:
        model: The model: None or "shipped" for the one that ships with manyheads, a folder, a name in the
            local cache of Hugging Face, or a model of `text.models.load`.
        text: Text files, or folders of them.
        out: The folder of the atlas. If it has an atlas of the same model, text and options, that is
            continued.
        length: The largest number of tokens in a window. Default: the context of the model, at most 1,024.
        batch_size: The number of windows that are read at once. Default: as many as have 4,096 tokens.
        threads: The number of threads of each process.
        ablate: Whether to measure what the removal of each head adds to the loss. It takes a forward pass for
            each head.
        timeout: Seconds to wait for another process.
        progress: A progress bar.

    Returns:
        The atlas.

    Raises:
        FileNotFoundError: If the model or a file is missing.
        ValueError: If the text, an option or the model is invalid, or the folder has another atlas.
        OSError: If a file can't be read or written.
        ImportError: If pyarrow or SciPy isn't installed.
    """
    tables.require()
    out = Path(out)
    whole(threads, "threads", 1, 1024)
    model = load_model(model, with_logits=ablate)
    if ablate and model.logits is None:
        model.losses(torch.zeros(1, 2, dtype=torch.int64))  # raises the error
    if length is None:
        length = min(model.context or LONGEST, LONGEST)
    whole(length, "length", 2, model.context)
    if batch_size is None:
        batch_size = max(1, TOKENS // length)
    whole(batch_size, "batch_size", 1)
    weights = checksum(model)
    facts = {
        "the weights of the model": weights,
        "--length": length,
        "--batch-size": batch_size,
        "--threads": threads,
        "--ablate": ablate,
    }
    with _threads(threads), processes.join(timeout=timeout, arguments=facts) as group:
        run = _Run(group, model, out, progress)
        with run.locked() if group.is_first else nullcontext():
            group.first_does(lambda: run.begin(text, weights, length, batch_size, threads, ablate))
            run.measure()
            group.first_does(run.finish)
    return tables.open(out)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """The part of a process in recording an atlas."""

    def __init__(self, group: processes.Group, model: Model, out: Path, progress: Progress | None) -> None:
        self.group, self.model, self.out = group, model, out
        self.progress = progress if group.is_first else None
        self.task: Any = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, or raise BlockingIOError if another process records an atlas in it."""
        folder_for(self.out, "--out")
        try:
            with FileLock(self.out / LOCK, timeout=0):
                yield
        except Timeout:
            raise BlockingIOError(
                f"Another process records an atlas in {self.out}. Wait until it ends, or choose a different "
                "--out."
            ) from None

    # -- the first process -------------------------------------------------------------------------

    def begin(
        self, text: Sequence[Any], weights: str, length: int, batch_size: int, threads: int, ablate: bool
    ) -> None:
        """Read the text once, and write the manifest or compare it with that of an earlier start."""
        paths = [text] if isinstance(text, str | os.PathLike) else list(text)
        self._show(
            "reading the text",
            sum(path.stat().st_size for path in map(Path, paths) if path.is_file()) or None,
        )
        found = corpus.survey(paths, self._advance)
        sample = next(
            (
                w
                for parts in found.shards
                for part in parts
                for w in corpus.windows(found, part, self.model.encode, min(length, PROBE))
            ),
            None,
        )
        if sample is None:
            raise ValueError(
                f"Expected a text of at least two tokens for {self.model.name}, got a shorter one."
            )
        layers = tuple(find_layers(self.model, sample.ids, self._say))
        versions = (__version__, torch.__version__)
        plan = Plan(self.model.name, weights, layers, length, batch_size, threads, ablate, versions, found)
        if (self.out / MANIFEST).exists():
            plan.check_continues(Plan.read(self.out), self.out)
            if tables.is_complete(self.out):
                return  # and the manifest keeps the names that the tables were made with
        elif others := [path.name for path in self.out.iterdir() if path.name != LOCK]:
            raise ValueError(
                f"Expected an empty folder or one with an atlas for --out, got {self.out}, which has "
                f"{sorted(others)[0]}. Choose a different one."
            )
        write(self.out / MANIFEST, json.dumps(plan.pack(), indent=1).encode())

    def finish(self) -> None:
        """Wait for the results of all shards, merge them in order, and write the tables."""
        if tables.is_complete(self.out):
            self._remove_shards()
            return
        while len(self._finished()) < len(self.plan.text.shards):
            time.sleep(POLL)
            self._update()
        self._show("merging", len(self.plan.text.shards))
        total = self.meter.empty()
        for shard in range(len(self.plan.text.shards)):
            total.merge(Summary.read(self.path(shard), self.plan.identity, self.meter.empty()))
            self._advance(1)
        tables.save(self.out, self.plan, total)
        self._remove_shards()

    def _remove_shards(self) -> None:
        folder = self.out / SHARDS
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    # -- every process -----------------------------------------------------------------------------

    def measure(self) -> None:
        """Measure this process's part of the shards that have no result."""
        self.plan = plan = Plan.read(self.out)
        self.meter = Meter(self.model, plan.layers, plan.length, plan.ablate)
        if tables.is_complete(self.out):
            return
        if self.group.is_first:
            with disk_errors(self.out):
                (self.out / SHARDS).mkdir(exist_ok=True)
                for path in (self.out / SHARDS).glob(".*.part"):  # of a process that was killed
                    path.unlink()
        finished = self.group.gather(sorted(self._finished()))[0]
        missing = sorted({*range(len(plan.text.shards))} - {*finished})
        self._show("recording", plan.text.size)
        self._update()
        for shard in missing[self.group.rank :: self.group.size]:
            write(self.path(shard), self.measure_shard(shard).to_bytes(self.plan.identity))
            self._update()

    def measure_shard(self, shard: int) -> Summary:
        """Return the summary of a shard."""
        self.meter.summary = self.meter.empty()
        done = 0
        for windows, names in batches(self.windows(shard), shard, self.plan.length, self.plan.batch_size):
            self.meter.add(windows, names)
            if processes.is_orphan():
                raise KeyboardInterrupt  # the launcher was killed, and a new start needs the folder
            done += sum(len(window.tokens.text.encode()) for window in windows)
            self._update(done)
        return self.meter.summary

    def windows(self, shard: int) -> Iterator[Window]:
        """Yield the windows of a shard."""
        for part in self.plan.text.shards[shard]:
            yield from corpus.windows(self.plan.text, part, self.model.encode, self.plan.length)

    def path(self, shard: int) -> Path:
        """Return the file of a shard's result."""
        return self.out / SHARDS / f"{shard:05d}.npz"

    def _finished(self) -> set[int]:
        return {int(path.stem) for path in (self.out / SHARDS).glob("*.npz") if path.stem.isdecimal()}

    # -- progress ----------------------------------------------------------------------------------

    def _show(self, activity: str, total: float | None) -> None:
        if self.progress is not None:
            if self.task is None:
                self.task = self.progress.add_task(activity, total=total)
            else:
                self.progress.reset(self.task, total=total, description=activity)

    def _advance(self, amount: float) -> None:
        if self.progress is not None:
            self.progress.advance(self.task, amount)

    def _update(self, more: float = 0) -> None:
        """Show the bytes that all processes have finished, and `more` of the shard that this one measures."""
        if self.progress is not None:
            done = sum(self.plan.text.shard_size(shard) for shard in self._finished())
            self.progress.update(self.task, completed=min(done + more, self.plan.text.size))

    def _say(self, note: str) -> None:
        if self.progress is not None:
            self.progress.console.print(note, highlight=False, soft_wrap=True, markup=False)


def batches(
    windows: Iterator[Window], shard: int, length: int, size: int
) -> Iterator[tuple[list[Window], list[str]]]:
    """Yield batches of windows of the same number of tokens, with their names.

    Windows that aren't full are few, and wait for others of their number of tokens until the shard ends.
    """
    waiting: dict[int, tuple[list[Window], list[str]]] = {}
    for n, window in enumerate(windows):
        batch, names = waiting.setdefault(len(window.ids), ([], []))
        batch.append(window)
        names.append(f"{shard}/{n}")
        if len(batch) == size:
            yield waiting.pop(len(window.ids))
    yield from (waiting[count] for count in sorted(waiting, reverse=True))
