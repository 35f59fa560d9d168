"""The viewer's API and server: numbers equal those of the map, and only the viewer's page receives them."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import manyheads as mh
from manyheads import scores
from manyheads.observe import Recording
from manyheads.viewer import api as api_module
from manyheads.viewer import assets, pyramid
from manyheads.viewer.api import Api
from manyheads.viewer.pyramid import SCALE, Pyramid
from manyheads.viewer.runs import FileChanged, Layer, ViewedRun
from manyheads.viewer.server import Server
from manyheads.viewer.worker import BACKGROUND, URGENT, Worker
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


def a_map(t: int, s: int, mask: mh.Mask | None = None, heads: int = 1, **parts: Any) -> mh.AttentionMap:
    q, k = torch.randn(1, heads, t, 8) * 2, torch.randn(1, heads, s, 8)
    return mh.attention_with_map(q, k, k, mask=mask, **parts)[1]


# Limits with which 150 tokens are many.
SMALL = {"SIDE": 16, "MAX_WEIGHTS": 2**12, "STEP": 2**12, "BLOCK": 2**10}
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


def expected(amap: mh.AttentionMap, rows: range, cols: range, cell: tuple[int, int]) -> np.ndarray:
    """Return the weights or the means and maxima of cells, NaN where all is masked, cell by cell."""
    down, across = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
    weights = amap[0, 0, down, across].double().numpy()
    visible = scores.visible(amap.problem, down, across)[0, 0].expand(len(rows), len(cols)).numpy()
    weights = np.where(visible, weights, 0.0)
    if cell == (1, 1):
        return np.where(visible, weights, np.nan)[None]
    starts = [np.arange(0, len(run), size) for run, size in zip((rows, cols), cell, strict=True)]

    def over(ufunc: np.ufunc, x: np.ndarray) -> np.ndarray:
        return ufunc.reduceat(ufunc.reduceat(x, starts[0], axis=0), starts[1], axis=1)

    area = over(np.add, np.ones_like(weights))
    found = np.stack((over(np.add, weights) / area, over(np.maximum, weights)))
    return np.where(over(np.logical_or, visible), found, np.nan)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.sampled_from(MASKS), st.booleans(), st.integers(0, 2**31))
def test_tiles_of_every_level_equal_the_map(t: int, s: int, mask: Any, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    bias = mh.ALiBi(torch.tensor([0.1])) if biased else None
    amap = a_map(t, s, mask(t, s), bias=bias)
    with patch.multiple(pyramid, **SMALL):
        head = Pyramid(amap)
        for scanned in (False, True):
            for level in range(head.top + 3):
                down, across = head.grid(level)
                for y in range(down):
                    for x in range(across):
                        tile = head.tile(level, x, y)
                        if tile.sampled > 1:
                            assert not scanned
                            continue
                        wanted = expected(amap, *head.span(level, x, y), head.cell(level))
                        # The results of a scan are stored in float16.
                        np.testing.assert_allclose(
                            tile.cells, wanted, rtol=1e-3 if scanned else 1e-5, atol=2e-7
                        )
            for _ in head.scan():
                pass
    assert head.marginals is not None
    for name in ("received", "entropy", "row_max"):
        found, wanted = getattr(head.marginals, name), getattr(amap, name)()[0, 0]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 16), st.integers(600, 1_500), st.booleans(), st.sampled_from([0, 1, 2, 6]))
def test_the_short_axis_of_an_elongated_head_is_not_pooled(
    few: int, many: int, has_few_queries: bool, mask: int
) -> None:
    t, s = (few, many) if has_few_queries else (many, few)
    amap = a_map(t, s, MASKS[mask](t, s))
    with patch.multiple(pyramid, **SMALL | {"MAX_WEIGHTS": 2**11}):
        head = Pyramid(amap)
        for _ in head.scan():
            pass
        assert SMALL["SIDE"] << head.top >= many  # one tile
        for level in range(head.top + 1):
            cell = head.cell(level)
            assert cell == ((1, 1 << level) if has_few_queries else (1 << level, 1))
            down, across = head.grid(level)
            for y, x in itertools.product(range(down), range(across)):
                tile = head.tile(level, x, y)
                assert tile.sampled == 1
                wanted = expected(amap, *head.span(level, x, y), cell)
                np.testing.assert_allclose(tile.cells, wanted, rtol=1e-3, atol=2e-7)


def test_a_sampled_tile_holds_the_middle_query_of_each_row_of_cells() -> None:
    with patch.multiple(pyramid, **SMALL):
        amap = a_map(128, 128, mh.Causal())
        tile = Pyramid(amap).tile(3, 0, 0)
        assert tile.sampled == 8
        row = amap[0, 0, 5 * 8 + 4].view(16, 8)
        torch.testing.assert_close(tile.cells[0, 5, :6], row.mean(1)[:6])
        torch.testing.assert_close(tile.cells[1, 5, :6], row.amax(1)[:6])
        assert tile.cells[:, 5, 6:].isnan().all()


def test_weights_are_sent_as_float16_times_32768() -> None:
    amap = a_map(7, 9, mh.Causal())
    answer = Api(amap).request("tiles/0/0/0/0/0/0/0").result()
    assert isinstance(answer, bytes)
    assert struct.unpack("<4I", answer[:16]) == (1, 1, 7, 9)
    numbers = np.frombuffer(answer[16:], "<f2").astype(np.float64).reshape(7, 9) / SCALE
    masked = ~scores.visible(amap.problem)[0, 0].numpy()
    assert (np.isnan(numbers) == masked).all()
    np.testing.assert_allclose(numbers[~masked], amap[0, 0].numpy()[~masked], rtol=2**-11, atol=1e-12)


def test_small_weights_keep_their_digits() -> None:
    tile = pyramid.Tile(torch.tensor([[[1e-5, 1e-8]]]))
    np.testing.assert_allclose(
        np.frombuffer(tile.to_float16(), "<f2").astype(float) / SCALE, [1e-5, 1e-8], rtol=1e-3
    )


# -- answers ---------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[Api]:
    amap = a_map(12, 12, mh.Causal(), heads=3).labelled([*"abcabc", "<script>", "a\nb", *"abcd"])
    api = Api(amap)
    yield api
    api.close()


def fetch(api: Api, address: str) -> Any:
    answer = api.request(address).result()
    return json.loads(answer) if isinstance(answer, str) else answer


def test_single_weights_rows_and_columns_equal_the_map(api: Api) -> None:
    amap = api.runs[0].layers[0].map
    assert fetch(api, "weight/0/0/2/7/3/0") == {"weight": float(amap[0, 2, 7, 3])}
    assert fetch(api, "weight/0/0/2/3/7/0") == {"weight": None}
    row = fetch(api, "row/0/0/0,2/7/0")
    torch.testing.assert_close(torch.tensor(row["weights"]), amap[0, [0, 2], 7].mean(0))
    best = amap[0, [0, 2], 7].mean(0).topk(8)
    assert [n for n, _ in row["top"]] == best.indices.tolist()
    column = fetch(api, "column/0/0/all/3/0")
    torch.testing.assert_close(torch.tensor(column["weights"]), amap[0, :, :, 3].mean(0))


def test_a_block_equals_the_map(api: Api) -> None:
    amap = api.runs[0].layers[0].map
    answer = api.request("block/0/0/2,0/3/9/1/8/0").result()
    assert isinstance(answer, bytes)
    assert struct.unpack("<4I", answer[:16]) == (1, 2, 6, 7)
    block = np.frombuffer(answer[16:], "<f4").reshape(2, 6, 7)
    masked = ~scores.visible(amap.problem)[0, 0, 3:9, 1:8].numpy()
    assert (np.isnan(block) == masked).all()
    assert (np.nan_to_num(block) == amap[0, [2, 0], 3:9, 1:8].numpy()).all()


def test_the_heads_of_a_pair_are_those_of_layers_with_the_same_tokens() -> None:
    """Layers over other tokens, or with other sizes, have none."""
    text, mask = [*"abcdefg"], mh.Causal()
    maps = [a_map(7, 7, mask, heads=n).labelled(text) for n in (2, 3)]
    other = a_map(7, 7, mask).labelled([*"abcdefh"]), a_map(3, 7).labelled(text)
    api = Api(ViewedRun("run", [Layer("", x, n) for n, x in enumerate((*maps, *other))], {}))
    layers = fetch(api, "heads/0/0/5/2/0")["layers"]
    assert layers == [maps[0][0, :, 5, 2].tolist(), maps[1][0, :, 5, 2].tolist(), None, None]
    assert fetch(api, "heads/0/0/2/5/0")["layers"] == [[None] * 2, [None] * 3, None, None]
    assert fetch(api, "heads/0/3/2/5/0")["layers"][3] == [float(other[1][0, 0, 2, 5])]
    api.close()


def test_findings_are_those_of_show_and_name_the_words_of_the_text() -> None:
    """A head that attends to the token after an earlier occurrence of the same token."""
    pieces = (" the", " st", "ation", " was", " far", " and", " the", " st", "ation", " old")
    text = mh.TokenizedText(pieces)
    maps = [a_map(10, 10, mh.Causal(), heads=2).labelled(text)]
    scores_of_pairs = torch.zeros(1, 2, 10, 10)
    scores_of_pairs[0, 1, 8, 3] = 20.0  # the second "ation" to "was"
    q, k = torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 10, 8)
    clear = mh.attention_with_map(q, k, k, mask=mh.Causal(), bias=mh.Dense(scores_of_pairs))[1].labelled(text)
    layers = [Layer("a", maps[0], 4), Layer("b", clear, 7), Layer("c", a_map(3, 10), 8)]
    api = Api(ViewedRun("run", layers, {}))
    found = fetch(api, "findings/0/0")
    assert (found["searched"], found["tokens"]) == (10, 10)
    (finding,) = [x for x in found["findings"] if x["layer"] == 1]
    assert (finding["head"], finding["query"], finding["key"]) == (1, 8, 3)
    assert finding["weight"] == pytest.approx(float(clear[0, 1, 8, 3]), rel=1e-6)
    assert finding["sentence"] == (
        'Layer 7, head 1 — induction: "ation" of the second "station" attends to "was" (1.00), the token '
        'that followed "ation" of the first "station".'
    )
    api.close()
    unlabeled = Api(a_map(10, 10, mh.Causal()))
    assert fetch(unlabeled, "findings/0/0") == {"findings": [], "searched": 0, "tokens": 0}
    unlabeled.close()


def test_labels_and_head_scores_equal_the_map(api: Api) -> None:
    amap = api.runs[0].layers[0].map
    names = list(amap.tokens or ())
    assert fetch(api, "tokens/0/0/0") == {"queries": names, "keys": names, "first": 0, "text": None}
    found = fetch(api, "scores/0/0/0")
    assert found["sampled"] == 1
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5])
    for name, measured in (
        ("previous_token", mh.measures.previous_token(amap)),
        ("first_token", mh.measures.first_token(amap)),
        ("induction", mh.measures.induction(amap, ids)),
        ("entropy", amap.entropy().mean(-1)),
    ):
        torch.testing.assert_close(torch.tensor(found["scores"][name]), measured[0])


@pytest.mark.parametrize(("t", "s"), [(2_000, 3), (7, 23)])
def test_cross_attention_has_no_scores_of_positions(t: int, s: int) -> None:
    """Weights on the key with the number before the query's aren't attention to the previous token."""
    rows, bias = torch.arange(t), torch.full((1, 2, t, s), -9.0)
    bias[..., rows, (rows + s - t - 1).clamp(0, s - 1)] = 9.0
    q, k = torch.zeros(1, 2, t, 8), torch.zeros(1, 2, s, 8)

    def scores_of(mask: mh.Mask | None) -> tuple[mh.AttentionMap, Any]:
        amap = mh.attention_with_map(q, k, k, mask=mask, bias=mh.Dense(bias))[1]
        return amap, fetch(Api(amap.labelled([f"w{n % 5}" for n in range(s)])), "scores/0/0/0")

    cross, found = scores_of(None)
    assert list(found["scores"]) == ["entropy"]
    assert found["scores"]["entropy"] == pytest.approx(cross.entropy()[0].mean(-1).tolist(), abs=1e-6)
    assert found["patterns"] == [None, None]
    if t < s:  # the last queries of a text
        _, found = scores_of(mh.Causal())
        assert found["scores"]["previous_token"][0] > 0.9
        assert found["patterns"][0].startswith("attends to the previous token")


def test_cross_attention_has_the_labels_of_the_decoders_self_attention() -> None:
    cross = a_map(3, 7).labelled([*"abcdefg"])
    alone = {"queries": None, "keys": [*"abcdefg"], "first": None, "text": None, "query_text": None}
    api = Api(cross)
    assert fetch(api, "tokens/0/0/0") == alone
    api.close()
    text = mh.TokenizedText((" la", " sta", "tion"))
    decoder, other = (a_map(3, 3, mh.Causal()).labelled(x) for x in (text, [*"xyz"]))
    encoder = a_map(7, 7).labelled([*"abcdefg"])
    layers = (encoder, decoder, cross, other)
    api = Api(ViewedRun("run", [Layer(str(n), x, n) for n, x in enumerate(layers)], {}))
    pieces = {"pieces": list(text.pieces), "special": [], "shared": [], "joined": [2]}
    assert fetch(api, "tokens/0/2/0") == alone | {"queries": ["la", "sta", "tion"], "query_text": pieces}
    api.close()
    api = Api(ViewedRun("run", [Layer("a", encoder, 0), Layer("b", cross, 1), Layer("c", other, 2)], {}))
    assert fetch(api, "tokens/0/1/0") == alone | {"queries": [*"xyz"]}
    api.close()


def test_queries_after_a_cache_have_the_labels_of_their_positions() -> None:
    step = Api(a_map(2, 7, mh.Causal(), offset=torch.tensor([5])).labelled([*"abcdefg"]))
    found = fetch(step, "tokens/0/0/0")
    assert found == {"queries": ["f", "g"], "keys": [*"abcdefg"], "first": 5, "text": None}
    step.close()


def test_a_text_has_pieces_words_and_characters() -> None:
    pieces = ("[CLS]", "The", " sta", "tion", " 机", "", ".")
    api = Api(a_map(7, 7).labelled(mh.TokenizedText(pieces, (0,))))
    found = fetch(api, "tokens/0/0/0")
    assert found["keys"] == found["queries"] == ["[CLS]", "The", "sta", "tion", "机", "机", "."]
    assert found["text"] == {"pieces": list(pieces), "special": [0], "shared": [5], "joined": [3]}
    api.close()


@pytest.mark.parametrize(
    "address",
    [
        *("", "nothing", "runs/0", "row/0/0/0,9/1/0", "row/0/0//1/0", "weight/0/0/0/12/0/0"),
        *("tokens/../../etc/passwd", "tokens/0/0/٣", "tiles/0/0/0/0/0/0", "tiles/0/0/0/0/0/0/1"),
        *("tiles/0/0/3/0/0/0/0", "tiles/0/0/-1/0/0/0/0", "tiles/0/0/0/99/0/0/0", "tiles/0/0/0/0/5/0/0"),
        *("tiles/1/0/0/0/0/0/0", "tiles/0/0/0/0/0/0/99999999999999999999"),
        *("block/0/0/all/3/3/0/4/0", "block/0/0/all/0/13/0/4/0", "block/0/0/5/0/2/0/4/0"),
        *("heads/0/0/12/0/0", "heads/0/1/0/0/0", "findings/1/0", "findings/0/1"),
    ],
)
def test_an_unknown_address_raises_one_sentence(api: Api, address: str) -> None:
    with pytest.raises(LookupError) as caught:
        api.request(address).result()
    assert str(caught.value.args[0]).endswith(".")


def test_a_block_has_a_largest_size(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "BLOCK_WEIGHTS", 3 * 12 * 12 - 1)
    assert fetch(api, "block/0/0/all/0/12/0/11/0")
    with pytest.raises(LookupError, match=r"at most 431 weights, got 432\."):
        fetch(api, "block/0/0/all/0/12/0/12/0")


def test_a_changed_or_removed_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    a_map(40, 40, mh.Causal()).save(path)
    api = Api(path)
    assert fetch(api, "tiles/0/0/0/0/0/0/0")
    with open(path, "r+b") as file:
        file.truncate(200)
    with pytest.raises(FileChanged, match=r"run\.safetensors was removed or changed since it was opened"):
        fetch(api, "tiles/0/0/0/0/0/0/0")
    path.unlink()
    with pytest.raises(FileChanged):
        fetch(api, "weight/0/0/0/3/3/0")
    api.close()


def test_wrong_sources_raise_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="AttentionMap or a path to a file of either, got an int"):
        ViewedRun.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected an attention call with a query and a key, got none"):
        ViewedRun.of(Recording())
    with pytest.raises(ValueError, match="got nothing to show"):
        Api()
    with pytest.raises(ValueError, match="Expected an attention call with a query and a key"):
        Api(a_map(0, 9))
    with pytest.raises(FileNotFoundError, match="Expected a file"):
        Api(tmp_path / "nothing.safetensors")


def test_recorded_statistics_have_scores_but_no_weights() -> None:
    layer = mh.SelfAttention(16)
    with mh.observe(layer, keep=["entropy", "previous_token"]) as recording, torch.no_grad():
        layer(torch.randn(1, 9, 16))
    api = Api(recording)
    assert fetch(api, "runs")["runs"][0]["layers"][0]["has_weights"] is False
    assert set(fetch(api, "scores/0/0/0")["scores"]) == {"entropy", "previous_token"}
    with pytest.raises(LookupError, match="has only statistics"):
        fetch(api, "tiles/0/0/0/0/0/0/0")


def test_a_scan_stops_without_requests_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyramid, "STEP", 2**10)
    monkeypatch.setattr(api_module, "SCAN_TIMEOUT", 0.0)
    api = Api(a_map(600, 600, mh.Causal()))
    assert fetch(api, "scan/0/0/0/0") == {"progress": 0.0, "complete": False}
    time.sleep(0.2)
    assert fetch(api, "scan/0/0/0/0")["complete"] is False  # it stopped before its first step
    monkeypatch.setattr(api_module, "SCAN_TIMEOUT", 60.0)
    wait_until(lambda: fetch(api, "scan/0/0/0/0")["complete"])
    ready, planes, t, s = struct.unpack("<4I", fetch(api, "marginals/0/0/0/0")[:16])
    assert (ready, planes, t, s) == (1, 1, 600, 600)
    api.close()


# -- the worker ------------------------------------------------------------------------------------


def test_the_most_urgent_work_is_done_first_and_cancelled_work_never() -> None:
    worker, started, go, done = Worker(), threading.Event(), threading.Event(), []

    def block() -> None:
        started.set()
        go.wait()

    worker.submit(block)
    started.wait()
    later = worker.submit(lambda: done.append("later"), BACKGROUND)
    cancelled = worker.submit(lambda: done.append("cancelled"))
    urgent = worker.submit(lambda: done.append("urgent"), URGENT)
    assert cancelled.cancel()
    go.set()
    later.result(), urgent.result()
    assert done == ["urgent", "later"]
    failing = worker.submit(lambda: 1 / 0)
    assert isinstance(failing.exception(), ZeroDivisionError)
    worker.close()
    assert worker.submit(lambda: None).cancelled()


def test_urgent_work_runs_between_the_steps_of_long_work() -> None:
    worker, done = Worker(), []

    def steps() -> Generator[None, None, str]:
        worker.submit(lambda: done.append("other"), URGENT)
        for n in range(3):
            done.append(str(n))
            yield
        return "result"

    def failing() -> Iterator[None]:
        yield
        raise LookupError("nothing")

    assert worker.submit(steps).result() == "result"
    assert done == ["0", "other", "1", "2"]
    with pytest.raises(LookupError, match="nothing"):
        worker.submit(failing).result()
    started, go = threading.Event(), threading.Event()
    worker.submit(lambda: (started.set(), go.wait()))
    started.wait()
    pending = worker.submit(steps)
    threading.Timer(0.2, go.set).start()
    worker.close()
    assert pending.cancelled()


def test_work_that_is_cancelled_between_its_steps_ends() -> None:
    worker, done, cancelled = Worker(), [], threading.Event()

    def steps() -> Iterator[None]:
        for n in range(100):
            done.append(n)
            yield
            cancelled.wait()

    future = worker.submit(steps)
    wait_until(lambda: done == [0])
    assert future.cancel()
    cancelled.set()
    worker.submit(lambda: None, BACKGROUND).result()
    assert len(done) <= 2  # the step that waited may end
    worker.close()


def test_the_caches_keep_the_last_used_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 16 + 2 * 9 * 9  # of a tile, with its header
    monkeypatch.setattr(api_module, "TILE_BYTES", 2 * size)
    monkeypatch.setattr(api_module, "PYRAMID_BYTES", 1)  # less than a head takes; two are cached nevertheless
    created = []
    monkeypatch.setattr(api_module, "Pyramid", lambda amap: created.append(amap.heads[0]) or Pyramid(amap))
    api = Api(a_map(9, 9, heads=3))
    for head in (0, 1, 0, 2, 0, 1):
        assert len(fetch(api, f"tiles/0/0/{head}/0/0/0/0")) == size
    assert created == [0, 1, 2]  # the tile of 1 was evicted by that of 2, the pyramid of 1 wasn't
    for head in (1, 0, 1, 2, 1, 0):
        fetch(api, f"weight/0/0/{head}/3/3/0")
    assert created[3:] == [0, 2, 0]
    api.close()


def test_two_heads_that_exceed_the_cache_are_scanned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that compares them requests both scans until both are complete."""
    monkeypatch.setattr(api_module, "PYRAMID_BYTES", 1)
    scans, scan = [], Pyramid.scan
    monkeypatch.setattr(Pyramid, "scan", lambda pyramid: scans.append(pyramid.amap.heads[0]) or scan(pyramid))
    api = Api(a_map(9, 9, heads=3))

    def are_complete(*heads: int) -> bool:
        return all(fetch(api, f"scan/0/0/{head}/0")["complete"] for head in heads)

    wait_until(lambda: are_complete(0, 1))
    assert scans == [0, 1]
    wait_until(lambda: are_complete(2))  # evicts 0
    nothing = {"query": None, "key": None, "weight": None, "complete": False}
    assert fetch(api, "largest/0/0/0/0/0") == nothing
    wait_until(lambda: are_complete(0))
    assert scans == [0, 1, 2, 0]
    assert fetch(api, "largest/0/0/0/0/0")["complete"]
    api.close()


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def server(api: Api) -> Iterator[Server]:
    found = Server(api)
    yield found
    found.close()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    port = server.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{port}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.text = response.read().decode(errors="replace")  # type: ignore[attr-defined]
    connection.close()
    return response


def cookie(server: Server) -> str:
    answer = get(server, "/" + server.url.partition("/?")[2].join(("?", "")))
    assert answer.status == 303
    given = answer.headers["Set-Cookie"]
    assert "HttpOnly" in given
    assert "samesite=strict" in given.lower()
    return given.partition(";")[0]


def test_only_requests_with_the_token_s_cookie_are_answered(server: Server) -> None:
    for path in ("/", "/data/runs", "/viewer.js", "/?token=wrong", "/data/runs?token=wrong"):
        assert get(server, path).status == 403
        assert get(server, path, Cookie="manyheads-1=x").status == 403
    key = cookie(server)
    assert get(server, "/data/runs").status == 403
    for path in ("/", "/viewer.js", "/viewer.css", "/icon.svg", "/data/runs", "/data/tiles/0/0/0/0/0/0/0"):
        answer = get(server, path, Cookie=key)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:{}", "evil.example:{}", ""])
def test_other_host_names_are_refused(server: Server, host: str) -> None:
    port = server.port
    assert get(server, "/data/runs", Host=host.format(port), Cookie=cookie(server)).status in (400, 403)


def test_paths_never_touch_the_disk(server: Server) -> None:
    key = cookie(server)
    for path in (
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/data/../viewer.js", "/data//etc/passwd",
        "/vendor/LICENSES.txt", "/data/tokens/..%2f..%2fetc/0/0", "/index.html%00", "/data/" + "9" * 5000,
    ):  # fmt: skip
        answer = get(server, path, Cookie=key)
        assert answer.status == 404, path
        assert "root:" not in answer.text  # type: ignore[attr-defined]
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(server, "/data/runs", method, Cookie=key).status == 405


def test_it_listens_on_the_loopback_address_alone(server: Server) -> None:
    port = server.port
    for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), port, type=socket.SOCK_STREAM):
        if not address[0].startswith(("127.", "::1")):
            with socket.socket(family, socket.SOCK_STREAM) as other:
                other.settimeout(2)
                assert other.connect_ex(address) != 0


def test_an_unavailable_port_raises_one_sentence(server: Server, api: Api) -> None:
    port = server.port
    for taken in (port, 70_000):
        with pytest.raises(OSError, match=f"Can't listen on port {taken}: .*Pass a different port, or 0"):
            Server(api, taken)
    for wrong in ("8000", True, 1.5):
        with pytest.raises(TypeError, match=f"an int between 0 and 65535, got {wrong!r}"):
            Server(api, wrong)  # type: ignore[arg-type]


def test_runs_of_the_same_title_have_their_folder_or_a_number(tmp_path: Path) -> None:
    names = ("a/run", "b/run", "other", "c/a/run")
    paths = [tmp_path / f"{name}.safetensors" for name in names]
    for path in paths:
        path.parent.mkdir(exist_ok=True, parents=True)
        a_map(9, 9).save(path)
    api = Api(*paths)
    assert [run.title for run in api.runs] == ["a/run (0)", "b/run", "other", "a/run (3)"]
    api.close()


def test_runs_are_told_apart_by_the_part_where_their_texts_differ() -> None:
    start = " The station master, whose nephew was late, watched the"
    texts = [
        f"{start} evening train leave.",
        f"{start} even",
        start,
        "Rain.",
        f"{start} evening train leave.",
    ]
    maps = [a_map(9, 9).labelled(mh.TokenizedText((text, *[""] * 8))) for text in texts]
    api = Api(*maps)
    parts = [run["parts"] for run in fetch(api, "runs")["runs"]]
    assert parts == [["…evening train leave."], ["…even"], ["…the"], ["Rain."], ["…evening train leave."]]
    api.close()


def test_tokens_are_sent_as_json(server: Server) -> None:
    answer = get(server, "/data/tokens/0/0/0", Cookie=cookie(server))
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


def test_wrong_input_to_the_command_raises_one_sentence(tmp_path: Path, run_command: Any) -> None:
    broken, good = tmp_path / "broken.safetensors", tmp_path / "run.safetensors"
    folder = tmp_path / "folder.html"
    folder.mkdir()
    a_map(9, 9).save(good)
    broken.write_bytes(good.read_bytes()[:-40])
    for arguments, words in (
        ((tmp_path / "none.safetensors",), "Expected a file"),
        ((folder,), f"Expected files of saved maps, or the folder of one atlas, got the folder {folder}."),
        ((broken,), "broken.safetensors"),
        ((good, "--layer", "0"), "--full and --yes with --export only, got no --export. Leave them out"),
        ((good, "--export", tmp_path / "x.png"), "Expected --export to end in .html"),
        ((good, "--export", tmp_path / "no" / "x.html"), "doesn't exist. Create it first."),
        ((good, "--export", folder), f"--export {folder} can't be written: Is a directory."),
        ((good, "--export", tmp_path / "x.html", "--layer", "3"), "Expected --layer between 0 and 0"),
        ((good, "--export", tmp_path / "x.html", "--head", "3"), "Expected --head between 0 and 0, got 3"),
        ((good, "--port", "70000"), "Can't listen on port 70000"),
    ):
        code, _, error = run_command("view", *arguments)
        assert code == 2, arguments
        assert words in error
        assert error.count("\n") == 1


def test_the_page_is_under_a_megabyte() -> None:
    assert sum(len(assets.read(name)) for name in assets.MEDIA_TYPES) < 1e6


def test_only_masked_weights_are_nan() -> None:
    head = Pyramid(a_map(20, 20, mh.Causal()))
    assert math.isnan(head.weight(3, 9))
    assert head.weight(9, 3) == float(head.amap[0, 0, 9, 3])


def test_weights_that_are_nan_are_null_in_json() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 12, 8)
    q[0, 1, 5] = math.nan
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal())[1].labelled([f"w{n}" for n in range(12)])
    api = Api(amap)

    def read(address: str) -> Any:
        data = api.request(address).result()
        return json.loads(data, parse_constant=lambda name: pytest.fail(f"{address} has {name}"))

    for address in (
        "row/0/0/1/5/0",
        "row/0/0/all/5/0",
        "column/0/0/1/3/0",
        "profile/0/0/1/5/0",
        "explain/0/0/1/5/3/0",
    ):
        read(address)
    row, column = read("row/0/0/1/5/0"), read("column/0/0/1/3/0")
    assert row["weights"][:6] == [None] * 6
    assert row["top"] == []
    assert column["weights"][5] is None
    assert len(column["top"]) == 8  # of queries 3 to 11 without 5
    scores = read("scores/0/0/0")
    assert scores["patterns"][1] == "has weights that aren't numbers (NaN)"
    assert {column[1] for column in scores["scores"].values()} == {None}
    assert None not in {
        column[0] for name, column in scores["scores"].items() if name in ("entropy", "previous_token")
    }
