"""Measure the viewer against its bars: the first picture, zooming, head scores, memory and many requests.

    python benchmarks/viewer.py [--length 100000] [--notches 100] [--browser /usr/bin/chromium]

`manyheads view` serves two causal heads of random queries and keys, d = 64, in a process of its own, to a
browser that Playwright drives at 1280 × 800. A zoom notch is one turn of the wheel over the matrix: "drawn"
is the time from the event to the end of the frame that shows it, "sharp" until all of its tiles are loaded.
The scan is compared with one `statistics()` call on the same head in this process. Memory is the server's
peak, less the size of the run's file. Head scores are those of 24 heads over 30,000 tokens. All times depend
on what else runs: the load average is printed first.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.request import HTTPCookieProcessor, build_opener

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
LOADED = ".note[data-missing='0'][data-complete='true']"
# Turn the wheel by one notch; return the milliseconds until it is drawn and until its tiles are loaded.
NOTCH = """async ([down, selector]) => {
    const canvas = document.querySelector("canvas.map");
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const place = { clientX: left + 0.4 * width, clientY: top + 0.7 * height };
    const at = { ...place, deltaY: down ? 100 : -100, bubbles: true, cancelable: true };
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const start = performance.now();
    canvas.dispatchEvent(new WheelEvent("wheel", at));
    await frame();
    const drawn = performance.now() - start;
    while (!document.querySelector(selector)) await frame();
    return [drawn, performance.now() - start];
}"""


def memory(pid: int, name: str) -> float:
    """Return megabytes of a process: VmRSS in use now, VmHWM at the peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


def random_map(heads: int, length: int) -> manyheads.AttentionMap:
    """Return a causal map of random queries and keys."""
    q, k = (torch.randn(1, heads, length, 64) for _ in range(2))
    return manyheads.attention_with_map(q, k, k, mask=Causal())[1]


@contextmanager
def serving(path: Path) -> Iterator[tuple[str, int]]:
    """Serve a file with the command in a process of its own; yield the link and the process id."""
    command = [sys.executable, "-m", "manyheads", "view", str(path), "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1], server.pid
    finally:
        server.terminate()
        server.wait()


def percentiles(times: list[float]) -> str:
    """Return the median, the 95th percentile and the largest of some times in milliseconds."""
    ordered = sorted(times)
    last = ordered[int(0.95 * len(ordered))]
    return f"median {statistics.median(ordered):.0f} ms, 95 % {last:.0f} ms, most {ordered[-1]:.0f} ms"


def measure_scan(amap: manyheads.AttentionMap) -> None:
    """Print the processor time of a scan and of one `statistics()` call."""
    head, calls, scans = amap.only(heads=0), [], []
    for _ in range(3):  # interleaved, because other processes may use the cores
        start = time.process_time()
        head.statistics("entropy", "received", "row_max", pooled=[(512, 512), (512, 512, "max")])
        calls.append(time.process_time() - start)
        start = time.process_time()
        for _ in Pyramid(head).scan():
            pass
        scans.append(time.process_time() - start)
    ratio = min(scans) / min(calls)
    print(f"scan {min(scans):.1f} s of processor time, {ratio:.2f} × one statistics() call (best of 3)")


def measure_page(page: Page, link: str, notches: int) -> None:
    """Print the times of the first picture, of the complete scan, and of zoom notches."""
    start = time.perf_counter()
    page.goto(f"{link}#page=head")
    page.wait_for_selector(".note[data-missing='0']")
    print(f"first picture {time.perf_counter() - start:.2f} s after opening (bar: 3 s)")
    page.wait_for_selector(LOADED, timeout=300_000)
    print(f"scan complete {time.perf_counter() - start:.1f} s after opening")
    drawn, sharp = [], []
    down = False
    for n in range(notches):
        down = n // 25 % 2 == 1  # 25 notches in, 25 out
        times = page.evaluate(NOTCH, [down, LOADED])
        drawn.append(times[0]), sharp.append(times[1])
    print(f"a zoom notch, drawn: {percentiles(drawn)} (bar: 150 ms at 95 %)")
    print(f"a zoom notch, sharp: {percentiles(sharp)}")


def measure_requests(link: str, length: int, count: int = 200) -> None:
    """Print the time and the errors of many tiles that are requested at once."""
    opener = build_opener(HTTPCookieProcessor())
    opener.open(link).read()
    base, tiles = link.partition("?")[0], set()
    while len(tiles) < count:
        level = random.randrange(max(1, (length - 1).bit_length() - 7))
        y = random.randrange(-(-length // (256 << level)))
        tiles.add(f"{base}data/tiles/0/0/0/{level}/{random.randint(0, y)}/{y}/0")

    def get(address: str) -> bool:
        try:
            return len(opener.open(address, timeout=300).read()) < 16
        except OSError:
            return True

    start = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        errors = sum(pool.map(get, tiles))
    print(f"{count} tiles at once: {time.perf_counter() - start:.1f} s, {errors} errors (bar: 0)")


def measure_scores(folder: Path, heads: int, length: int) -> None:
    """Print the time of all head scores of a layer."""
    path = folder / "scores.safetensors"
    random_map(heads, length).save(path)
    with serving(path) as (link, pid):
        opener = build_opener(HTTPCookieProcessor())
        opener.open(link).read()
        start = time.perf_counter()
        opener.open(f"{link.partition('?')[0]}data/scores/0/0/0").read()
        spent = time.perf_counter() - start
        extra = memory(pid, "VmHWM") - path.stat().st_size / 1e6
        print(f"scores of {heads} heads over {length:,} tokens: {spent:.1f} s (bar: 15 s), {extra:.0f} MB")


def main(
    length: Annotated[int, typer.Option(help="Length in tokens.")] = 100_000,
    notches: Annotated[int, typer.Option(help="Number of zoom notches.")] = 100,
    browser: Annotated[str, typer.Option(help="Path of Chromium.")] = "/usr/bin/chromium",
) -> None:
    torch.manual_seed(0)
    random.seed(0)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; {length:,} tokens")
    amap = random_map(2, length)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        amap.save(path)
        size = path.stat().st_size / 1e6
        measure_scan(amap)
        del amap
        with serving(path) as (link, pid), sync_playwright() as playwright:
            opened = memory(pid, "VmRSS")
            chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
            page = chromium.new_page(viewport={"width": 1280, "height": 800})
            measure_page(page, link, notches)
            page.goto(f"{link.partition('?')[0]}#page=head&head=1")
            page.wait_for_selector(LOADED, timeout=300_000)
            page.close()
            measure_requests(link, length)
            most = memory(pid, "VmHWM")
            print(
                f"memory: {most - size:.0f} MB at the peak above the run of {size:.0f} MB (bar: 400 MB); "
                f"{opened:.0f} MB after opening"
            )
        measure_scores(Path(folder), 24, 30_000)


if __name__ == "__main__":
    typer.run(main)
