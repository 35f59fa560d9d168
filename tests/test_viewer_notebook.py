"""The viewer in a notebook: a page of its own for small maps, a widget for larger ones, in JupyterLab."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook, new_output

import manyheads as mh
from manyheads.viewer import notebook
from manyheads.viewer.gallery import Gallery

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # of jupyter_client and nbconvert, and of ipywidgets where there is no kernel
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
WORDS = ["The", "cat", "sat", "on", "the", "mat", ",", "because", "it", "was", "warm", "."]


def a_map(tokens: int = 12, heads: int = 3) -> mh.AttentionMap:
    q, k, v = torch.randn(3, 1, heads, tokens, 8).unbind()
    return mh.attention_with_map(q, k, v, mask=mh.Causal())[1]


def workers() -> int:
    return sum(thread.name == "manyheads viewer" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    before = workers()
    yield
    assert workers() == before


class Sent(list[tuple[dict[str, Any], list[bytes]]]):
    """What a widget sends, which comes from its worker."""

    def of(self, view: str, number: int) -> tuple[dict[str, Any], list[bytes]]:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for message, buffers in list(self):
                if (message["view"], message["number"]) == (view, number):
                    return message, buffers
            time.sleep(0.01)
        raise AssertionError(f"nothing came for {view} {number}")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, mh.AttentionMap, Sent]]:
    """A widget, its map, and what it sends."""
    monkeypatch.setattr(notebook, "SMALL", 0)
    amap, sent = a_map(), Sent()
    widget = notebook.shown(Gallery(amap))
    monkeypatch.setattr(widget, "send", lambda message, buffers=(): sent.append((message, list(buffers))))
    yield widget, amap, sent
    widget.close()


def test_a_small_map_is_a_page_in_a_frame_with_a_picture_behind_it() -> None:
    bundle = notebook.shown(Gallery(a_map().labelled(WORDS)))._repr_mimebundle_()

    assert set(bundle) == {"text/html", "text/plain", "image/png"}
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == "a viewer of attention"
    text = bundle["text/html"]
    assert text.count("<iframe") == 1
    assert 'sandbox="allow-scripts allow-downloads"' in text
    drawn = base64.b64encode(bundle["image/png"]).decode()
    assert f"base64,{drawn}" in text.split("<iframe")[0]  # where frames are taken out
    assert (
        f"&lt;noscript&gt;&lt;img alt=&quot;every head&quot; src=&quot;data:image/png;base64,{drawn}" in text
    )


def test_a_large_one_is_a_widget_with_a_picture_beside_it(large: tuple[Any, mh.AttentionMap, Sent]) -> None:
    widget, *_ = large

    bundle = widget._repr_mimebundle_()

    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == "a viewer of attention"


def test_what_would_take_long_to_draw_has_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "DRAWN", 10)

    bundle = notebook.shown(Gallery(a_map()))._repr_mimebundle_()

    assert set(bundle) == {"text/html", "text/plain"}
    assert "<img" not in bundle["text/html"]


def test_a_message_is_answered_to_the_view_that_asked(large: tuple[Any, mh.AttentionMap, Sent]) -> None:
    widget, amap, sent = large

    for view, place in (("a", "5/2"), ("b", "7/3")):
        widget._heard(widget, {"view": view, "number": 0, "address": f"value/0/0/1/{place}/0"}, [])

    for view, i, j in (("a", 5, 2), ("b", 7, 3)):
        message, (answer,) = sent.of(view, 0)
        assert "error" not in message
        assert json.loads(answer)["weight"] == float(amap[0, 1, i, j])


@pytest.mark.parametrize(
    ("address", "words"), [("nowhere", "nothing at"), ("value/0/0/9/0/0/0", "head must lie")]
)
def test_a_wrong_address_is_answered_with_a_sentence(
    large: tuple[Any, mh.AttentionMap, Sent], address: str, words: str
) -> None:
    widget, _, sent = large

    widget._heard(widget, {"view": "a", "number": 3, "address": address}, [])

    message, buffers = sent.of("a", 3)
    assert words in message["error"]
    assert not buffers


def test_what_is_dropped_is_not_answered(large: tuple[Any, mh.AttentionMap, Sent]) -> None:
    widget, _, sent = large
    widget._heard(widget, {"view": "a", "number": 0, "address": "runs"}, [])
    sent.of("a", 0)
    begin = threading.Event()
    widget._gallery.desk.ask(begin.wait, -1)
    widget._heard(widget, {"view": "a", "number": 1, "address": "runs"}, [])

    widget._heard(widget, {"view": "a", "number": 1, "dropped": True}, [])
    widget._heard(widget, {"view": "a", "number": 2, "dropped": True}, [])  # never asked
    begin.set()
    widget._heard(widget, {"view": "a", "number": 3, "address": "runs"}, [])

    sent.of("a", 3)
    assert [message["number"] for message, _ in sent] == [0, 3]


def test_its_worker_is_there_while_somebody_looks(large: tuple[Any, mh.AttentionMap, Sent]) -> None:
    widget, _, sent = large
    before = workers()
    for view in "ab":
        widget._heard(widget, {"view": view, "number": 0, "address": "runs"}, [])
        sent.of(view, 0)
    assert workers() == before + 1

    widget._heard(widget, {"view": "a", "left": True}, [])
    assert workers() == before + 1  # b looks still
    widget._heard(widget, {"view": "b", "left": True}, [])
    assert workers() == before
    widget._heard(widget, {"view": "c", "number": 0, "address": "runs"}, [])
    sent.of("c", 0)
    assert workers() == before + 1
    widget.close()
    assert workers() == before


def test_without_anywidget_a_large_map_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "SMALL", 0)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    notebook._widget.cache_clear()

    with pytest.raises(
        ImportError, match=r"anywidget, which isn't installed: pip install 'manyheads\[view\]'"
    ):
        notebook.shown(Gallery(a_map()))


def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not notebook.here()
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not notebook.here()


def test_ipython_without_a_kernel_is_no_notebook() -> None:
    code = (
        "from IPython.core.interactiveshell import InteractiveShell; InteractiveShell.instance(); "
        "from manyheads.viewer import notebook; print(notebook.here())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == "False"


def test_nbconvert_writes_the_page_and_where_there_is_no_kernel_the_picture(
    large: tuple[Any, mh.AttentionMap, Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbconvert import HTMLExporter

    widget, amap, _ = large
    monkeypatch.undo()
    small = notebook.shown(Gallery(amap))
    cells = []
    for one in (small, widget):
        bundle = one._repr_mimebundle_()
        bundle = bundle[0] if isinstance(bundle, tuple) else bundle
        data = {**bundle, "image/png": base64.b64encode(bundle["image/png"]).decode()}
        cells.append(new_code_cell(outputs=[new_output("display_data", data)]))

    text, _ = HTMLExporter().from_notebook_node(new_notebook(cells=cells))

    assert text.count("<iframe") == 1
    assert "widget-view" not in text.split("<body")[1]
    assert text.count('src="data:image/png;base64') == 2  # behind the frame, and instead of the widget


# -- in JupyterLab --------------------------------------------------------------------------------

CELLS = [
    f"""import threading, torch, manyheads as mh
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 3, 12, 8).unbind()
small = mh.attention_with_map(q, k, v, mask=mh.Causal())[1].labelled({WORDS!r})
small.view()""",
    """q, k, v = torch.randn(3, 1, 4, 3000, 16).unbind()
large = mh.attention_with_map(q, k, v, mask=mh.Causal())[1]
large.view()""",
    """with mh.observe(mh.MultiHeadAttention(32, 4)) as seen:
    seen.model(torch.randn(1, 40, 32)) if hasattr(seen, "model") else None
large.only(heads=[2, 3]).view()""",
    """print("done", sum(one.name == "manyheads viewer" for one in threading.enumerate()))""",
]
