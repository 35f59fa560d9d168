"""Exported pages: their size is announced, their tiles equal the map, and interruptions leave nothing."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyheads as mh
from manyheads.viewer import export
from manyheads.viewer.api import Api
from manyheads.viewer.export import Export, plan_export
from manyheads.viewer.pyramid import SCALE
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


def a_map(t: int, mask: mh.Mask | None = None, heads: int = 1, labels: bool = False) -> mh.AttentionMap:
    q, k = (torch.randn(1, heads, t, 8) for _ in range(2))
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal() if mask is None else mask)[1]
    return amap.labelled([f"word {n}" for n in range(t)]) if labels else amap


def stored(page: Path) -> dict[str, bytes]:
    """Return the responses of a page by address, with those in its folder."""
    text = page.read_text()
    found = json.loads(re.search(r'id="answers">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    responses = {
        address: base64.b64decode(found[data[1:]] if data.startswith("=") else data)
        for address, data in found.items()
    }
    for file in page.parent.glob(f"{page.stem}-tiles/*.js"):
        address, data = json.loads(f"[{file.read_text().removeprefix('manyheadsLoaded(')[:-1]}]")
        responses[address] = base64.b64decode(data)
    return responses


def cells_of(tile: bytes, exact: bool) -> np.ndarray:
    _, planes, rows, cols = struct.unpack("<4I", tile[:16])
    if len(tile) == 16:
        return np.full((planes, rows, cols), np.nan)
    numbers = np.frombuffer(tile[16:], "<f4" if exact else "<f2").reshape(planes, rows, cols)
    return numbers if exact else numbers.astype(np.float64) / SCALE


def size_of(files: list[Path]) -> int:
    every = [file for path in files for file in ([path] if path.is_file() else path.iterdir())]
    return sum(file.stat().st_size for file in every)


CASES: dict[str, tuple[mh.AttentionMap, dict[str, Any]]] = {
    "a sentence": (a_map(7, labels=True), {}),
    "two heads": (a_map(500, heads=2), {"heads": [1]}),
    "a window": (a_map(600, mh.Window(left=20, right=0)), {}),
    "documents": (a_map(900, mh.Documents(torch.arange(900) // 100) & mh.Causal()), {}),
    "pooled": (a_map(2_000, labels=True), {"budget": 2e6}),
    "full": (a_map(1_500, heads=2), {"budget": 2e6, "full": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_announced_size(tmp_path: Path, case: str) -> None:
    amap, options = CASES[case]
    plan = plan_export(Api(amap), tmp_path / "page.html", **options)
    assert plan.has_folder == (case == "full")
    assert (plan.finest > 0) == (case == "pooled")
    files = plan.write()
    assert files == [tmp_path / "page.html"] + [tmp_path / "page-tiles"] * plan.has_folder
    assert plan.size == pytest.approx(size_of(files), rel=0.02)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert plan.size <= options.get("budget", export.PAGE_BYTES) or plan.has_folder


@pytest.mark.every(2)
@pytest.mark.parametrize("case", CASES)
def test_an_export_has_every_tile_of_its_levels(tmp_path: Path, case: str) -> None:
    amap, options = CASES[case]
    plan = plan_export(Api(amap), tmp_path / "page.html", **options)
    plan.write()
    responses, served = stored(tmp_path / "page.html"), plan.api
    assert json.loads(responses["runs"])["runs"][0]["layers"][0]["finest"] == plan.finest
    tiles = [address for address in responses if address.startswith("tiles/")]
    assert {int(address.split("/")[4]) for address in tiles} >= {plan.finest}
    assert min(int(address.split("/")[4]) for address in tiles) == plan.finest
    for address in tiles:
        level = int(address.split("/")[4])
        wanted = served.request(address).result()
        assert isinstance(wanted, bytes)
        found = cells_of(responses[address], exact=plan.is_exact and level == 0)
        np.testing.assert_allclose(found, cells_of(wanted, exact=False), rtol=2e-3, atol=1e-9)
        if not level:
            _, _, _, h, _, x, y, _ = address.split("/")
            weights = served.runs[0].layers[0].map[0, int(h)].numpy()
            part = weights[int(y) * 256 : (int(y) + 1) * 256, int(x) * 256 : (int(x) + 1) * 256]
            exact = 1e-7 if plan.is_exact else 2**-11
            np.testing.assert_allclose(np.nan_to_num(found[0]), part, rtol=exact, atol=1e-11)


def test_small_layers_stay_exact_beside_large_ones(tmp_path: Path) -> None:
    plan = plan_export(Api(a_map(2_000), a_map(30)), tmp_path / "page.html", budget=2e6)
    assert [run.layers[0].finest for run in plan.api.runs] == [2, 0]
    assert "with cells of at least 4 × 4 weights (--full keeps single weights)" in plan.description


def test_equal_responses_are_stored_once(tmp_path: Path) -> None:
    maps = [a_map(40, labels=True) for _ in range(3)]
    plan = plan_export(Api(*maps), tmp_path / "page.html")
    plan.write()
    assert plan.size == pytest.approx(size_of([tmp_path / "page.html"]), rel=0.02)
    text = (tmp_path / "page.html").read_text()
    words = base64.b64encode(stored(tmp_path / "page.html")["tokens/0/0/0"]).decode()
    assert text.count(words) == 1
    assert stored(tmp_path / "page.html")["tokens/2/0/0"] == base64.b64decode(words)


def test_too_many_heads_need_a_choice(tmp_path: Path) -> None:
    api = Api(a_map(3_000, heads=4))
    with pytest.raises(ValueError, match=r"^4 heads with few cells would take .*Choose some with --layer"):
        plan_export(api, tmp_path / "page.html", budget=200_000)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "page-tiles").mkdir()
    plan = plan_export(Api(a_map(400)), tmp_path / "page.html", budget=1e5, full=True)
    with pytest.raises(FileExistsError, match="page-tiles exists"):
        plan.write()
    assert os.listdir(tmp_path) == ["page-tiles"]


def test_a_full_disk_is_noticed_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_export(Api(a_map(400)), tmp_path / "page.html", budget=1e5, full=True)
    with monkeypatch.context() as patched:
        patched.setattr(export.shutil, "disk_usage", lambda path: type("usage", (), {"free": 1000}))
        with pytest.raises(OSError, match=r"page.html would take about .*, but only 1 kB is free"):
            plan.write()
    written = Path.write_text

    def fail(path: Path, *args: Any, **options: Any) -> int:
        if len(list(path.parent.iterdir())) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return written(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match=r"page.html can't be written: No space left on device. Nothing"):
        plan.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("full", [False, True])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, full: bool) -> None:
    plan = plan_export(Api(a_map(600)), tmp_path / "page.html", budget=7e5, full=full)
    shares: list[float] = []

    def interrupt(share: float) -> None:
        shares.append(share)
        if share > 0.7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan.write(interrupt)
    assert shares == sorted(shares)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    path, out = tmp_path / "run.safetensors", tmp_path / "out"
    a_map(20_000).save(path)
    out.mkdir()
    command = ["manyheads", "view", str(path), "--export", str(out / "page.html"), "--full", "--yes"]
    running = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(list(out.glob(".*/page-tiles/*.js"))) > 3)
    running.send_signal(number)
    _, error = running.communicate(timeout=HANG)
    assert running.returncode == 128 + number
    assert "Traceback" not in error
    assert not list(out.iterdir())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_large_export_is_confirmed(
    tmp_path: Path, run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, page = tmp_path / "run.safetensors", tmp_path / "page.html"
    a_map(30).save(path)
    monkeypatch.setattr(export, "CONFIRM_BYTES", 1e4)
    code, out, error = run_command("view", path, "--export", page)
    assert code == 2
    assert "page.html will take about" in out
    assert "Expected --yes for an export of more than 200 MB without a terminal, got none. Add it." in error
    assert not page.exists()
    assert run_command("view", path, "--export", page, "--yes")[0] == 0
    assert page.exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_question_can_be_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    from manyheads import cli

    monkeypatch.setattr(export, "CONFIRM_BYTES", 1e4)
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    plan: Export = plan_export(Api(a_map(30)), tmp_path / "page.html")
    if answer == "n":
        with pytest.raises(cli.typer.Exit):
            cli.write_page(plan, yes=False)
    else:
        cli.write_page(plan, yes=False)
    assert (tmp_path / "page.html").exists() == (answer == "y")


def test_an_exported_page_runs_no_script_but_its_own(tmp_path: Path) -> None:
    amap = a_map(5).labelled(["</script>", "<img src=x>", "&", '"', "'"])
    plan_export(Api(amap), tmp_path / "page.html").write()
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == 2
    assert "<img" not in text.split("<noscript>")[0]
    assert "unsafe" not in text.split("</title>")[0]
    assert len(text) < 1e6
