"""Time the viewer: the first picture, tiles at every zoom, the scan of a head, and memory.

    python benchmarks/viewer.py --length 100000 [--tiles 2000] [--rounds 3] [--browser /usr/bin/chromium]

A causal head of random queries and keys, served by `manyheads view` in a process of its own to a browser that
Playwright drives. The browser times tiles from the request to the last byte, one after the other at random
places of random levels. The scan is compared with one `statistics()` call on the same head in this process.
Memory is the server's peak.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from playwright.sync_api import Page, sync_playwright

import manyheads
from manyheads.masks import Causal
from manyheads.viewer.pyramid import Pyramid

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
TIMED = """async (addresses) => {
    const times = [];
    for (const address of addresses) {
        const start = performance.now();
        await (await fetch(address)).arrayBuffer();
        times.push(performance.now() - start);
    }
    return times;
}"""


def memory(pid: int, name: str) -> float:
    """Return megabytes of a process: VmRSS in use now, VmHWM at the peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


def random_tiles(length: int, count: int) -> list[tuple[int, int, int]]:
    """Return random tiles on or below the diagonal: level, x and y."""
    found = []
    levels = max(1, (length - 1).bit_length() - 7)
    for _ in range(count):
        level = random.randrange(levels)
        y = random.randrange(-(-length // (256 << level)))
        found.append((level, random.randint(0, y), y))
    return found


def time_tiles(page: Page, length: int, count: int) -> dict[int, list[float]]:
    """Return the milliseconds of random tiles, by level."""
    times: dict[int, list[float]] = {}
    chosen = random_tiles(length, count)
    for start in range(0, count, 100):
        part = chosen[start : start + 100]
        addresses = [f"data/tiles/0/0/0/{level}/{x}/{y}/0" for level, x, y in part]
        for (level, *_), spent in zip(part, page.evaluate(TIMED, addresses), strict=True):
            times.setdefault(level, []).append(spent)
    return times


def main(
    length: Annotated[int, typer.Option(help="Length in tokens.")] = 100_000,
    tiles: Annotated[int, typer.Option(help="Number of random tiles.")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Repetitions of the scan.")] = 3,
    browser: Annotated[str, typer.Option(help="Path of Chromium.")] = "/usr/bin/chromium",
) -> None:
    torch.manual_seed(0)
    random.seed(0)
    q, k = (torch.randn(1, 2, length, 64) for _ in range(2))
    amap = manyheads.attention_with_map(q, k, k, mask=Causal())[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        amap.save(path)
        head, calls, scans = amap.only(heads=0), [], []
        for _ in range(rounds):
            start = time.perf_counter()
            head.statistics("entropy", "received", pooled=[(512, 512), (512, 512, "max")])
            calls.append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in Pyramid(head).scan():
                pass
            scans.append(time.perf_counter() - start)
        command = [sys.executable, "-m", "manyheads", "view", str(path), "--no-open"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            link = server.stdout.readline().split()[-1]
            opened = memory(server.pid, "VmRSS")
            with sync_playwright() as playwright:
                page = playwright.chromium.launch(executable_path=browser, args=FLAGS).new_page()
                start = time.perf_counter()
                page.goto(f"{link}#page=head")
                page.wait_for_selector(".note[data-missing='0']")
                first = time.perf_counter() - start
                page.wait_for_selector(".note[data-complete='true']", timeout=300_000)
                complete = time.perf_counter() - start
                page.goto("about:blank")  # which requests nothing else
                page.goto(f"{link.partition('?')[0]}")
                times = time_tiles(page, length, tiles)
            every = sorted(spent for spent in sum(times.values(), []))
            print(f"a head over {length:,} tokens: first picture {first:.2f} s after opening")
            call, scan = statistics.median(calls), statistics.median(scans)
            print(f"statistics() {call:.1f} s, the scan {scan:.1f} s: {scan / call:.2f}×")
            print(f"in the browser the scan was complete {complete:.1f} s after opening")
            for level, spent in sorted(times.items()):
                print(f"level {level}: median {statistics.median(spent):.1f} ms, most {max(spent):.0f} ms")
            middle, late = every[len(every) // 2], every[int(0.95 * len(every))]
            print(f"{len(every):,} tiles: median {middle:.1f} ms, 95th percentile {late:.1f} ms")
            most = memory(server.pid, "VmHWM")
            data = path.stat().st_size / 1e6
            print(f"memory: {most:.0f} MB at the peak, {opened:.0f} MB after opening; the run: {data:.0f} MB")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    typer.run(main)
