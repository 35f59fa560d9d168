"""Time an atlas of the shipped model, compared with its plain forward passes; measure its memory.

    python benchmarks/atlas.py time TEXT... [--rounds 3]
    python benchmarks/atlas.py memory TEXT

`time` reads the same windows, in the same batches, with the same kernel and one thread, in three ways, in
turns: the plain forward passes of the model, these without the logits, which an atlas doesn't need, and the
whole command, from the files to the tables. It prints medians, their ratios and what 10 million tokens take
at that speed.

`memory` simulates corpora of 1, 10 and 100 million tokens, each in its own process: the text is repeated to
that size and surveyed, one shard is read, of which 20 batches are measured, and the result is merged as often
as there are shards.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer

from manyheads import atlas
from manyheads.atlas import corpus, recording
from manyheads.atlas.measuring import Meter, find_layers
from manyheads.atlas.summaries import Summary
from manyheads.text import models

app = typer.Typer()


def batches(found: corpus.Corpus, model: models.Model, length: int, size: int) -> list[torch.Tensor]:
    """Return the tokens of all batches, `[b, t]` each."""
    return [
        torch.tensor([window.ids for window in windows])
        for shard, parts in enumerate(found.shards)
        for windows, _ in recording.batches(
            (w for part in parts for w in corpus.windows(found, part, model.encode, length)),
            shard,
            length,
            size,
        )
    ]


@app.command(name="time")
def measure_time(text: list[Path], rounds: int = 3) -> None:
    torch.set_num_threads(1)
    model = models.load()
    length = model.context or 512
    ids = batches(corpus.survey(text), model, length, 4096 // length)
    tokens = sum(each.numel() for each in ids)
    assert model.hidden is not None
    plain, layers, whole = [], [], []
    for n in range(rounds + 1):
        start = time.perf_counter()
        with torch.no_grad():
            for each in ids:
                model.module(each)
            without = time.perf_counter()
            for each in ids:
                model.hidden(each)
        middle = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            atlas.record(model, text, Path(folder) / "atlas")
        if n:  # the first round is a warm-up
            plain.append(without - start)
            layers.append(middle - without)
            whole.append(time.perf_counter() - middle)
    a, b, c = (statistics.median(each) for each in (plain, whole, layers))
    print(f"torch {torch.__version__}, 1 thread, {tokens:,} tokens in {len(ids)} batches, {rounds} rounds")
    print(
        f"plain forward {a:.2f} s ({tokens / a:,.0f} tokens/s), atlas {b:.2f} s ({tokens / b:,.0f} tokens/s)"
    )
    print(f"without logits {c:.2f} s; atlas / without logits: {b / c:.2f}")
    print(f"atlas / plain: {b / a:.2f}; 10 million tokens at this speed: {1e7 / tokens * b / 60:.0f} minutes")


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
