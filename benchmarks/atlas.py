"""Time an atlas of the shipped model, compared with its plain forward passes; measure its memory.

    python benchmarks/atlas.py time TEXT...
    python benchmarks/atlas.py memory TEXT

`time` records an atlas with one thread, from the files to the tables. Beside each batch that is measured, it
runs the plain forward pass of the model on the same tokens, and this pass without the logits, which an atlas
doesn't need: in random order, so that other processes, which share the caches, slow down all three. It prints
CPU times and their ratios.

`memory` simulates corpora of 1, 10 and 100 million tokens, each in its own process: the text is repeated to
that size and surveyed, one shard is read, of which 20 batches are measured, and the result is merged as often
as there are shards.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer

from manyheads import atlas
from manyheads.atlas import corpus, recording
from manyheads.atlas.measuring import Meter, find_layers
from manyheads.atlas.summaries import Summary
from manyheads.text import models

app = typer.Typer()


@app.command(name="time")
def measure_time(text: list[Path]) -> None:
    torch.set_num_threads(1)
    model = models.load()
    assert model.hidden is not None
    seconds = dict.fromkeys(("plain", "layers", "measured"), 0.0)
    tokens = batches = 0
    add = Meter.add

    def add_timed(meter: Meter, windows: Sequence[corpus.Window], names: Sequence[str]) -> None:
        nonlocal tokens, batches
        ids = torch.tensor([window.ids for window in windows])  # [b, t]
        tokens, batches = tokens + ids.numel(), batches + 1
        forward = {"plain": model.module, "layers": model.hidden}
        runs = {name: partial(run, ids) for name, run in forward.items()}
        runs["measured"] = partial(add, meter, windows, names)
        for name in random.sample(sorted(runs), 3):  # the first one finds cold caches
            start = time.process_time()
            with torch.no_grad():
                runs[name]()
            seconds[name] += time.process_time() - start

    with tempfile.TemporaryDirectory() as folder, patch.object(Meter, "add", add_timed):
        start = time.process_time()
        atlas.record(model, text, Path(folder) / "atlas")
        whole = time.process_time() - start - seconds["plain"] - seconds["layers"]
    plain, layers, measured = seconds.values()
    print(f"torch {torch.__version__}, 1 thread, {tokens:,} tokens in {batches} batches")
    print(
        f"plain forward passes: {plain:.2f} s, {tokens / plain:,.0f} tokens/s; without logits {layers:.2f} s"
    )
    print(
        f"atlas: {whole:.2f} s, {tokens / whole:,.0f} tokens/s; without its batches {whole - measured:.2f} s"
    )
    print(f"atlas / plain: {whole / plain:.2f}; atlas / without logits: {whole / layers:.2f}")


def peak() -> float:
    """Return the peak of this process's memory in MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


@app.command()
def memory(text: Path, tokens: Annotated[int, typer.Option(hidden=True)] = 0) -> None:
    if not tokens:
        for million in (1, 10, 100):
            command = [sys.executable, __file__, "memory", str(text), "--tokens", str(million * 10**6)]
            subprocess.run(command, check=True)
        return
    torch.set_num_threads(1)
    model = models.load()
    length = model.context or 512
    passage = text.read_text("utf-8")
    count = len(model.encode(passage, None)[0])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with open(folder / "text.txt", "w", encoding="utf-8") as file:
            for _ in range(round(tokens / count)):
                file.write(passage)
        found = corpus.survey([folder / "text.txt"])
        meter = Meter(model, find_layers(model, model.encode(passage, 64)[0]), length)
        windows = (w for part in found.shards[0] for w in corpus.windows(found, part, model.encode, length))
        for n, (batch, names) in enumerate(recording.batches(windows, 0, length, 4096 // length)):
            if n < 20:  # the others would only take time: `corpus.windows` reads a part at once
                meter.add(batch, names)
        (folder / "shard").write_bytes(meter.summary.to_bytes(""))
        total = meter.empty()
        for _ in found.shards:
            total.merge(Summary.read(folder / "shard", "", meter.empty()))
        largest = max(map(found.shard_size, range(len(found.shards)))) / 1e6
        print(
            f"{tokens:,} tokens, {found.size / 1e6:,.0f} MB of text, {len(found.shards)} shards of up to "
            f"{largest:.2f} MB: peak {peak():,.0f} MB"
        )


if __name__ == "__main__":
    app()
