"""What every test shares: one seed, and properties without a clock."""

from __future__ import annotations

import gc
import heapq
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator
from io import BytesIO, TextIOWrapper
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from filelock import FileLock

# Threads that wait for others must not occupy the cores, which all processes share. Torch reads it on import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# With workers that compile, a process can wait five minutes for them when it ends (pytorch/pytorch#162199).
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from manyheads import checker, cli
from manyheads.checker.checks import registry
from manyheads.kernels import chunked, plans

# Several processes share the cores (pytest-xdist); threads that wait for each other would slow all of them.
threads = max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
torch.set_num_threads(threads)
os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that tests start

# On a busy machine examples take long to draw; that says nothing about the code.
hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


# Processes that tests start and interrupt inherit it, also where the tests run in the background with
# SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def settings_of(item: Any) -> set[Any]:
    """Return what a sample must cover: the values of a test's parameters, or a value's own settings."""
    params, found = item.callspec.params, set()
    each = tuple(params[name] for name in item.get_closest_marker("sampled").args)
    for name, value in params.items():
        plain = value if isinstance(value, Hashable) else repr(value)  # a list, or a dict
        found |= {(each, name, x) for x in (value.settings() if hasattr(value, "settings") else [plain])}
    return found


def cover(settings: dict[Any, set[Any]]) -> Iterator[Any]:
    """Yield few keys that together have every setting, chosen greedily: the same ones in every run."""
    left = set().union(*settings.values())
    queue = [(-len(found), n, key) for n, (key, found) in enumerate(settings.items())]
    heapq.heapify(queue)
    while left:
        _, n, key = heapq.heappop(queue)  # the one with most settings, the first among equals
        gain = len(settings[key] & left)
        if queue and (-gain, n) > queue[0][:2]:  # others have become fewer too, but never more
            heapq.heappush(queue, (-gain, n, key))
        else:
            left -= settings[key]
            yield key


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark as `full` or `exhaustive` what the everyday tier leaves out of a test marked `sampled` or `every`.

    Tests that need what `build_once` builds come first: later, the other process might wait for a build.

    Of a test marked `every(n)`, each n-th set of parameters runs every day, the first included, and the
    others are `full`; of one marked `every(n, "full")`, each n-th is `full`, and the others `exhaustive`.

    A test marked `sampled` runs with few of the parameters, in which every value of each occurs.
    `sampled("kernel")` does so for each kernel, `sampled(kernel="auto")` for that one alone. Of the others,
    `full` are few in which every pair of values of two parameters occurs; all of a test with one parameter.
    """
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        settings = {}
        for n, item in enumerate(group):
            if marker := item.get_closest_marker("every"):
                step, tier = (*marker.args, "everyday")[:2]
                if n % step:
                    item.add_marker("full" if tier == "everyday" else "exhaustive")
                elif tier == "full":
                    item.add_marker("full")
            if marker := item.get_closest_marker("sampled"):
                if all(item.callspec.params[name] == value for name, value in marker.kwargs.items()):
                    settings[item] = settings_of(item)
                else:
                    item.add_marker("full")
        for item in list(cover(settings)):
            del settings[item]
        pairs = {
            item: {pair for pair in combinations(sorted(found, key=repr), 2) if pair[0][1] != pair[1][1]}
            for item, found in settings.items()
        }
        paired = set(cover(pairs))
        for item, found in pairs.items():
            item.add_marker("full" if item in paired or not found else "exhaustive")
    items.sort(key=lambda item: "build_once" not in item.fixturenames)


def pytest_collection_finish() -> None:
    """Leave the thousands of tests out of every garbage collection, also those that tests start."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same random numbers in every test; the random state and the number of threads are restored."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _unplanned() -> None:
    """No plans of earlier tests, which may have changed what kernels support."""
    plans.forget()


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """The smallest blocks (32 × 32), so that short problems have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "BLOCK", 1)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Many small operations go faster without threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of texts that a language model is trained on in a second."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"The {i}th file says: one two three four.\n" * 20)
    return folder


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return a folder that a function fills, in the first process of pytest-xdist that needs it, for all."""
    root = tmp_path_factory.getbasetemp().resolve()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def build(name: str, fill: Callable[[Path], None]) -> Path:
        folder = root / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = Path(tempfile.mkdtemp(dir=root))
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return build


class Ran(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ran]:
    """Run `manyheads` as the command line does, in an empty folder and a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object, stdin: bytes = b"") -> Ran:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["manyheads", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin)))
        try:
            cli.main()
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker without its slow checks, which have tests of their own."""
    slow = ("torch.compile", "memory growth")
    monkeypatch.setattr(registry, "CHECKS", [one for one in registry.CHECKS if one.name not in slow])


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker without the search for the bug behind a failure, for tests of a single check's result."""
    monkeypatch.setattr(checker, "diagnose", lambda *arguments: [])
