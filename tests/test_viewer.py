"""What a viewer answers: every number is the map's, and nobody is answered who shouldn't be."""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from waiting import HANG, wait_until

import manyheads as mh
from manyheads import cli, scores
from manyheads.observe import Seen
from manyheads.viewer import View, tiles
from manyheads.viewer.desk import LATER, NOW, Desk, Kept
from manyheads.viewer.export import planned
from manyheads.viewer.gallery import Gallery, Gone, Run, measures
from manyheads.viewer.tiles import SCALE, Head

pytestmark = pytest.mark.usefixtures("one_thread")


def a_map(t: int, s: int, mask: mh.Mask | None = None, heads: int = 1, **parts: Any) -> mh.AttentionMap:
    q, k = torch.randn(1, heads, t, 8) * 2, torch.randn(1, heads, s, 8)
    return mh.attention_with_map(q, k, k, mask=mask, **parts)[1]


MASKS = (
    lambda t, s: None,
    lambda t, s: mh.Causal(),
    lambda t, s: mh.Window(left=9, right=4),
    lambda t, s: mh.Diagonal(-2),
    lambda t, s: mh.Causal() & mh.Lengths(max(s - 5, 1)),
    lambda t, s: mh.Lengths(max(s - 7, 1), left=True),
    lambda t, s: mh.Documents(torch.arange(s) // 23, queries=torch.arange(t) // 19),
    lambda t, s: mh.Rule(lambda b, h, i, j: (i + 2 * j) % 7 != 0),
    lambda t, s: mh.Keep(torch.arange(t)[:, None] % 50 < torch.arange(s) % 60),
    lambda t, s: mh.Causal() & ~mh.Window(left=3, right=3),
)


def expected(amap: mh.AttentionMap, rows: range, cols: range, level: int) -> np.ndarray:
    """Weights, or means and maxima of cells, NaN where nothing may be seen: cell by cell."""
    down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
    weights = amap[0, 0, down, across].double().numpy()
    seen = scores.visible(amap.problem, down, across)[0, 0].expand(len(rows), len(cols)).numpy()
    weights = np.where(seen, weights, 0.0)
    if not level:
        return np.where(seen, weights, np.nan)[None]
    side = 1 << level
    starts = [np.arange(0, len(run), side) for run in (rows, cols)]

    def over(ufunc: np.ufunc, x: np.ndarray) -> np.ndarray:
        return ufunc.reduceat(ufunc.reduceat(x, starts[0], axis=0), starts[1], axis=1)

    area = over(np.add, np.ones_like(weights))
    found = np.stack((over(np.add, weights) / area, over(np.maximum, weights)))
    return np.where(over(np.logical_or, seen), found, np.nan)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.sampled_from(MASKS), st.booleans(), st.integers(0, 2**31))
def test_every_tile_of_every_level_is_the_map_s(t: int, s: int, mask: Any, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    bias = mh.ALiBi(torch.tensor([0.1])) if biased else None
    amap = a_map(t, s, mask(t, s), bias=bias)
    with pytest.MonkeyPatch.context() as patch:  # as if 150 tokens were many
        for name, value in {"SIDE": 16, "MOST": 2**12, "COARSE": 3, "STEP": 2**12, "BLOCK": 2**10}.items():
            patch.setattr(tiles, name, value)
        head = Head(amap)
        for passed in (False, True):
            for level in range(head.top + 3):
                side = 16 << level
                for y in range(-(-t // side)):
                    for x in range(-(-s // side)):
                        tile = head.tile(level, x, y)
                        if tile.sampled > 1:
                            assert not passed
                            continue
                        wanted = expected(amap, *head.span(level, x, y), level)
                        # What a pass has found is kept in float16.
                        np.testing.assert_allclose(
                            tile.numbers, wanted, rtol=1e-3 if passed else 1e-5, atol=2e-7
                        )
            for _ in head.passing():
                pass
    assert head.received is not None
    assert head.entropy is not None
    np.testing.assert_allclose(head.received, amap.received()[0, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(head.entropy, amap.entropy()[0, 0], rtol=1e-5, atol=1e-5)


def test_a_tile_of_one_query_in_so_many_says_so_and_is_that_query_s() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SIDE": 16, "MOST": 2**12, "COARSE": 3}.items():
            patch.setattr(tiles, name, value)
        amap = a_map(128, 128, mh.Causal())
        tile = Head(amap).tile(3, 0, 0)
        assert tile.sampled == 8
        row = amap[0, 0, 5 * 8 + 4].view(16, 8)
        torch.testing.assert_close(tile.numbers[0, 5, :6], row.mean(1)[:6])
        torch.testing.assert_close(tile.numbers[1, 5, :6], row.amax(1)[:6])
        assert tile.numbers[:, 5, 6:].isnan().all()


def test_numbers_are_sent_as_float16_times_32768() -> None:
    amap = a_map(7, 9, mh.Causal())
    answer = Gallery(amap).ask("tiles/0/0/0/0/0/0/0").result()
    assert isinstance(answer, bytes)
    assert struct.unpack("<4I", answer[:16]) == (1, 1, 7, 9)
    numbers = np.frombuffer(answer[16:], "<f2").astype(np.float64).reshape(7, 9) / SCALE
    hidden = ~scores.visible(amap.problem)[0, 0].numpy()
    assert (np.isnan(numbers) == hidden).all()
    np.testing.assert_allclose(numbers[~hidden], amap[0, 0].numpy()[~hidden], rtol=2**-11, atol=1e-12)


def test_a_weight_of_a_hundred_thousand_keeps_its_digits() -> None:
    tile = tiles.Tile(torch.tensor([[[1e-5, 1e-8]]]))
    np.testing.assert_allclose(
        np.frombuffer(tile.packed(), "<f2").astype(float) / SCALE, [1e-5, 1e-8], rtol=1e-3
    )


# -- what is asked for -----------------------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[Gallery]:
    amap = a_map(12, 12, mh.Causal(), heads=3).labelled([*"abcabc", "<script>", "a\nb", *"abcd"])
    gallery = Gallery(amap)
    yield gallery
    gallery.close()


def asked(gallery: Gallery, address: str) -> Any:
    answer = gallery.ask(address).result()
    return json.loads(answer) if isinstance(answer, str) else answer


def test_single_weights_rows_and_columns_are_the_map_s(seen: Gallery) -> None:
    amap = seen.runs[0].layers[0].map
    assert asked(seen, "value/0/0/2/7/3/0") == {"weight": float(amap[0, 2, 7, 3])}
    assert asked(seen, "value/0/0/2/3/7/0") == {"weight": None}
    row = asked(seen, "row/0/0/0,2/7/0")
    torch.testing.assert_close(torch.tensor(row["weights"]), amap[0, [0, 2], 7].mean(0))
    best = amap[0, [0, 2], 7].mean(0).topk(8)
    assert [n for n, _ in row["top"]] == best.indices.tolist()
    column = asked(seen, "column/0/0/all/3/0")
    torch.testing.assert_close(torch.tensor(column["weights"]), amap[0, :, :, 3].mean(0))


def test_labels_and_measures_are_the_map_s(seen: Gallery) -> None:
    amap = seen.runs[0].layers[0].map
    names = list(amap.tokens or ())
    assert asked(seen, "tokens/0/0/0") == {"queries": names, "keys": names, "first": 0}
    found = asked(seen, "measures/0/0/0")
    assert found["sampled"] == 1
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5])
    for name, measured in (
        ("previous_token", mh.measures.previous_token(amap)),
        ("first_token", mh.measures.first_token(amap)),
        ("induction", mh.measures.induction(amap, ids)),
        ("entropy", amap.entropy().mean(-1)),
    ):
        torch.testing.assert_close(torch.tensor(found["measures"][name]), measured[0])


def test_queries_of_another_text_have_no_names_of_keys() -> None:
    cross = Gallery(a_map(3, 7).labelled([*"abcdefg"]))
    assert asked(cross, "tokens/0/0/0") == {"queries": None, "keys": [*"abcdefg"], "first": None}
    step = Gallery(a_map(2, 7, mh.Causal(), offset=torch.tensor([5])).labelled([*"abcdefg"]))
    assert asked(step, "tokens/0/0/0") == {"queries": ["f", "g"], "keys": [*"abcdefg"], "first": 5}
    cross.close(), step.close()


def test_measures_of_some_queries_are_near_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyheads.viewer import gallery

    amap, ids = a_map(300, 300, mh.Causal(), heads=2), torch.arange(300) % 7
    *_, (every, one) = measures(amap, ids)
    monkeypatch.setattr(gallery, "EXACT", 0)
    *_, (some, step) = measures(amap, ids)
    assert (one, step) == (1, 3)
    for name in ("previous_token", "first_token", "induction", "entropy"):
        torch.testing.assert_close(some[name], every[name], rtol=0.2, atol=0.05)
    monkeypatch.setattr(gallery, "SOME", 300)
    *_, (whole, step) = measures(amap, ids)
    assert step == 1
    for name in ("previous_token", "first_token", "induction", "entropy"):
        torch.testing.assert_close(whole[name], every[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nothing",
        "runs/0",
        "tiles/0/0/0/0/0/0",
        "tiles/0/0/0/0/0/0/1",
        "tiles/0/0/3/0/0/0/0",
        "tiles/0/0/-1/0/0/0/0",
        "tiles/0/0/0/99/0/0/0",
        "tiles/0/0/0/0/5/0/0",
        "tiles/1/0/0/0/0/0/0",
        "value/0/0/0/12/0/0",
        "row/0/0/0,9/1/0",
        "row/0/0//1/0",
        "tokens/../../etc/passwd",
        "tokens/0/0/٣",
        "tiles/0/0/0/0/0/0/99999999999999999999",
    ],
)
def test_an_address_that_leads_nowhere_is_one_sentence(seen: Gallery, address: str) -> None:
    with pytest.raises(LookupError) as told:
        seen.ask(address).result()
    assert str(told.value.args[0]).endswith((".", "for."))


def test_a_file_that_goes_or_changes_is_not_read_any_more(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    a_map(40, 40, mh.Causal()).save(path)
    gallery = Gallery(path)
    assert asked(gallery, "tiles/0/0/0/0/0/0/0")
    with open(path, "r+b") as file:
        file.truncate(200)
    with pytest.raises(Gone, match=r"run\.safetensors is gone or was changed since it was opened"):
        asked(gallery, "tiles/0/0/0/0/0/0/0")
    path.unlink()
    with pytest.raises(Gone):
        asked(gallery, "value/0/0/0/3/3/0")
    gallery.close()


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match="a viewer shows a Seen, an AttentionMap or a file of them, and an int"
    ):
        Run.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing was seen"):
        Run.of(Seen())
    with pytest.raises(ValueError, match="nothing was given to look at"):
        Gallery()
    with pytest.raises(ValueError, match=r"a map of shape \(1, 1, 0, 9\) has no weight to look at"):
        Gallery(a_map(0, 9))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Gallery(tmp_path / "nothing.safetensors")


def test_statistics_alone_have_measures_and_no_weights() -> None:
    layer = mh.SelfAttention(16)
    with mh.observe(layer, keep=["entropy", "previous_token"]) as seen, torch.no_grad():
        layer(torch.randn(1, 9, 16))
    gallery = Gallery(seen)
    assert asked(gallery, "runs")["runs"][0]["layers"][0]["weights"] is False
    assert set(asked(gallery, "measures/0/0/0")["measures"]) == {"entropy", "previous_token"}
    with pytest.raises(LookupError, match="only statistics were kept"):
        asked(gallery, "tiles/0/0/0/0/0/0/0")


def test_a_pass_rests_when_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyheads.viewer import gallery as module

    monkeypatch.setattr(tiles, "STEP", 2**10)
    monkeypatch.setattr(module, "WAITS", 0.0)
    gallery = Gallery(a_map(600, 600, mh.Causal()))
    assert asked(gallery, "pass/0/0/0/0") == {"progress": 0.0, "whole": False}
    time.sleep(0.2)
    assert asked(gallery, "pass/0/0/0/0")["whole"] is False  # not even begun
    monkeypatch.setattr(module, "WAITS", 60.0)
    wait_until(lambda: asked(gallery, "pass/0/0/0/0")["whole"])
    ready, planes, t, s = struct.unpack("<4I", asked(gallery, "edges/0/0/0/0")[:16])
    assert (ready, planes, t, s) == (1, 1, 600, 600)
    gallery.close()


# -- the worker ------------------------------------------------------------------------------------


def test_the_most_urgent_is_done_first_and_what_nobody_wants_never() -> None:
    desk, begun, go, done = Desk(), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go.wait()

    desk.ask(first)
    begun.wait()
    later = desk.ask(lambda: done.append("later"), LATER)
    dropped = desk.ask(lambda: done.append("dropped"))
    now = desk.ask(lambda: done.append("now"), NOW)
    assert dropped.cancel()
    go.set()
    later.result(), now.result()
    assert done == ["now", "later"]
    failing = desk.ask(lambda: 1 / 0)
    assert isinstance(failing.exception(), ZeroDivisionError)
    desk.close()
    assert desk.ask(lambda: None).cancelled()


def test_what_takes_long_is_done_in_steps_between_which_others_have_their_turn() -> None:
    desk, done = Desk(), []

    def steps() -> Iterator[str | None]:
        desk.ask(lambda: done.append("other"))
        for n in range(3):
            done.append(str(n))
            yield None
        yield "found"

    def failing() -> Iterator[None]:
        yield None
        raise LookupError("nothing")

    assert desk.ask_in_steps(steps()).result() == "found"
    assert done == ["0", "other", "1", "2"]
    with pytest.raises(LookupError, match="nothing"):
        desk.ask_in_steps(failing()).result()
    begun, go = threading.Event(), threading.Event()
    desk.ask(lambda: (begun.set(), go.wait()))
    begun.wait()
    left = desk.ask_in_steps(steps())
    threading.Timer(0.2, go.set).start()
    desk.close()
    assert left.cancelled()


def test_what_was_used_last_is_kept_up_to_so_many_bytes() -> None:
    kept = Kept(10)
    kept.put("a", b"1234"), kept.put("b", b"1234")
    assert kept.get("a") == b"1234"
    kept.put("c", b"1234")
    assert kept.get("b") is None
    assert kept.get("a") == b"1234"
    kept.put("d", b"x" * 99)
    assert kept.get("a") is None
    assert kept.get("d") is not None


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def view(seen: Gallery) -> Iterator[View]:
    found = View.served(seen)
    yield found
    found.close()


def get(view: View, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    port = int(view.url.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{port}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.text = response.read().decode(errors="replace")  # type: ignore[attr-defined]
    connection.close()
    return response


def cookie(view: View) -> str:
    answer = get(view, "/" + view.url.partition("/?")[2].join(("?", "")))
    assert answer.status == 303
    given = answer.headers["Set-Cookie"]
    assert "HttpOnly" in given
    assert "samesite=strict" in given.lower()
    return given.partition(";")[0]


def test_a_link_with_its_token_gives_a_cookie_and_nothing_else_is_answered(view: View) -> None:
    for path in ("/", "/data/runs", "/viewer.js", "/?token=wrong", "/data/runs?token=wrong"):
        assert get(view, path).status == 403
        assert get(view, path, Cookie="manyheads-1=x").status == 403
    key = cookie(view)
    assert get(view, "/data/runs").status == 403
    for path in ("/", "/viewer.js", "/viewer.css", "/icon.svg", "/data/runs", "/data/tiles/0/0/0/0/0/0/0"):
        answer = get(view, path, Cookie=key)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:{}", "evil.example:{}", "127.0.0.1", ""]
)
def test_another_host_s_name_is_refused(view: View, host: str) -> None:
    port = view.url.split(":")[2].split("/")[0]
    assert get(view, "/data/runs", Host=host.format(port), Cookie=cookie(view)).status in (400, 403)


def test_paths_never_touch_the_disk(view: View) -> None:
    key = cookie(view)
    for path in (
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/data/../viewer.js", "/data//etc/passwd",
        "/vendor/LICENSES.txt", "/data/tokens/..%2f..%2fetc/0/0", "/index.html%00", "/data/" + "9" * 5000,
    ):  # fmt: skip
        answer = get(view, path, Cookie=key)
        assert answer.status == 404, path
        assert "root:" not in answer.text  # type: ignore[attr-defined]
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(view, "/data/runs", method, Cookie=key).status == 405


def test_it_listens_on_the_loopback_address_alone(view: View) -> None:
    port = int(view.url.split(":")[2].split("/")[0])
    for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), port, type=socket.SOCK_STREAM):
        if not address[0].startswith(("127.", "::1")):
            with socket.socket(family, socket.SOCK_STREAM) as other:
                other.settimeout(2)
                assert other.connect_ex(address) != 0


def test_a_port_that_is_taken_is_one_sentence(view: View, seen: Gallery) -> None:
    port = int(view.url.split(":")[2].split("/")[0])
    for taken in (port, 70_000):
        with pytest.raises(OSError, match=f"port {taken} can't be had, .*: take another one, or 0"):
            View.served(seen, taken)
    for odd in ("8000", True, 1.5):
        with pytest.raises(TypeError, match=f"a whole number from 0 to 65535, and {odd!r} came"):
            View.served(seen, odd)  # type: ignore[arg-type]


def test_runs_of_one_model_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "run.safetensors" for name in ("a", "b")] + [tmp_path / "other.safetensors"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        a_map(9, 9).save(path)
    gallery = Gallery(*paths)
    assert [run.title for run in gallery.runs] == ["run (0)", "run (1)", "other"]
    gallery.close()


def test_a_token_is_data_and_never_markup(view: View) -> None:
    answer = get(view, "/data/tokens/0/0/0", Cookie=cookie(view))
    assert answer.headers["Content-Type"] == "application/json"
    assert "<script>" in json.loads(answer.text)["keys"]  # type: ignore[attr-defined]


# -- commands --------------------------------------------------------------------------------------


def test_the_command_serves_until_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    a_map(9, 9).save(path)
    running = subprocess.Popen(
        [sys.executable, "-m", "manyheads", "view", str(path), "--no-open"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    line = running.stdout.readline()
    assert line.startswith("open this link in a browser: http://127.0.0.1:")
    running.send_signal(2)
    out, err = running.communicate(timeout=HANG)
    assert running.returncode == 130
    assert "Traceback" not in out + err


def test_wrong_input_to_the_command_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, good = tmp_path / "broken.safetensors", tmp_path / "run.safetensors"
    folder = tmp_path / "folder.html"
    folder.mkdir()
    a_map(9, 9).save(good)
    broken.write_bytes(good.read_bytes()[:-40])
    for arguments, words in (
        ((tmp_path / "none.safetensors",), "there is no file"),
        ((broken,), "broken.safetensors"),
        ((good, "--layer", "0"), "Expected --layer and --head with --export only"),
        ((good, "--export", tmp_path / "x.png"), "doesn't end in .html"),
        ((good, "--export", tmp_path / "no" / "x.html"), "there is no folder"),
        ((good, "--export", folder), f"--export {folder} can't be written: Is a directory."),
        (
            (good, "--export", tmp_path / "x.html", "--layer", "3"),
            "--layer must be between 0 and 0, and 3 came",
        ),
        (
            (good, "--export", tmp_path / "x.html", "--head", "3"),
            "--head must be between 0 and 0, and 3 came",
        ),
        ((good, "--port", "70000"), "port 70000 can't be had"),
    ):
        monkeypatch.setattr(sys, "argv", ["manyheads", "view", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2, arguments
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1


# -- files -----------------------------------------------------------------------------------------


def test_an_export_says_its_size_first_and_is_about_that(tmp_path: Path) -> None:
    amap = a_map(500, 500, mh.Causal(), heads=2)
    plan = planned(Gallery(amap), tmp_path / "page.html", heads=[1])
    assert "page.html will take about" in plan.told
    assert plan.write() == [tmp_path / "page.html"]
    size = (tmp_path / "page.html").stat().st_size
    assert 0.8 < size / (plan.weights + 130_000) < 1.2
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_is_too_large_for_a_page_wants_heads_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyheads.viewer import export

    monkeypatch.setattr(export, "PAGE", 100_000.0)
    gallery = Gallery(a_map(400, 400, mh.Causal(), heads=2))
    with pytest.raises(ValueError, match=r"all 2 heads would take .* choose some with --layer and --head"):
        planned(gallery, tmp_path / "page.html")
    plan = planned(gallery, tmp_path / "page.html", heads=[0])
    made = plan.write()
    assert made == [tmp_path / "page.html", tmp_path / "page-tiles"]
    assert len(list((tmp_path / "page-tiles").iterdir())) == 4 + 1 + 1  # level 0, all of it, and a small one
    with pytest.raises(FileExistsError, match="page-tiles is there already"):
        plan.write()
    assert not list(tmp_path.glob(".*"))


def test_a_page_holds_no_script_but_its_own(tmp_path: Path) -> None:
    amap = a_map(5, 5).labelled(["</script>", "<img src=x>", "&", '"', "'"])
    planned(Gallery(amap), tmp_path / "page.html").write()
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == 2
    assert "<img" not in text.split("<noscript>")[0]
    assert "unsafe" not in text.split("</title>")[0]
    assert len(text) < 1e6


def test_the_page_is_under_a_megabyte() -> None:
    from manyheads.viewer import page

    assert sum(len(page.read(name)) for name in page.ASSETS) < 1e6


def test_nan_is_masked_and_nothing_else_is() -> None:
    head = Head(a_map(20, 20, mh.Causal()))
    assert math.isnan(head.value(3, 9))
    assert head.value(9, 3) == float(head.amap[0, 0, 9, 3])
