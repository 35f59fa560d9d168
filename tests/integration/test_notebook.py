"""The viewer in a notebook: a page for small maps, a widget for larger ones, and both in JupyterLab."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import expect

import manyheads as mh
from manyheads.viewer import widget as module
from manyheads.viewer.api import Api
from tests.chromium import CHROMIUM, MISSING, launched, wait_until_painted
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

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
    """The messages that a widget sends from its worker's thread."""

    def of(self, view: str, number: int) -> tuple[dict[str, Any], list[bytes]]:
        def found() -> list[tuple[dict[str, Any], list[bytes]]]:
            return [sent for sent in list(self) if (sent[0]["view"], sent[0]["number"]) == (view, number)]

        wait_until(lambda: found() != [])
        return found()[0]


Large = tuple[Any, mh.AttentionMap, Sent]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[Large]:
    """A widget, its map, and its messages."""
    monkeypatch.setattr(module, "EMBEDDED_BYTES", 0)
    amap, sent = a_map(), Sent()
    widget = module.display(Api(amap))
    monkeypatch.setattr(widget, "send", lambda message, buffers=(): sent.append((message, list(buffers))))
    yield widget, amap, sent
    widget.close()


def test_a_small_map_is_a_page_in_a_frame_with_a_picture_behind_it() -> None:
    bundle = module.display(Api(a_map().labelled(WORDS)))._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain", "image/png"}
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == "a viewer of attention"
    text = bundle["text/html"]
    assert text.count("<iframe") == 1
    assert 'sandbox="allow-scripts allow-downloads"' in text
    drawn = base64.b64encode(bundle["image/png"]).decode()
    assert f"base64,{drawn}" in text.split("<iframe")[0]  # where frames are taken out
    picture = f"&lt;img alt=&quot;every head&quot; src=&quot;data:image/png;base64,{drawn}"
    assert f"&lt;noscript&gt;{picture}" in text


def test_a_large_map_is_a_widget_with_a_picture_beside_it(large: Large) -> None:
    widget, *_ = large
    bundle = widget._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == "a viewer of attention"


def test_a_very_large_map_has_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PICTURE_WEIGHTS", 10)
    bundle = module.display(Api(a_map()))._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "<img" not in bundle["text/html"]


def test_an_answer_names_the_view_that_requested_it(large: Large) -> None:
    widget, amap, sent = large
    for view, place in (("a", "5/2"), ("b", "7/3")):
        widget._receive(widget, {"view": view, "number": 0, "address": f"weight/0/0/1/{place}/0"}, [])
    for view, i, j in (("a", 5, 2), ("b", 7, 3)):
        message, (answer,) = sent.of(view, 0)
        assert "error" not in message
        assert json.loads(answer)["weight"] == float(amap[0, 1, i, j])


@pytest.mark.parametrize(
    ("address", "words"), [("nowhere", "Unknown address"), ("weight/0/0/9/0/0/0", "Expected head between")]
)
def test_a_wrong_address_is_answered_with_an_error(large: Large, address: str, words: str) -> None:
    widget, _, sent = large
    widget._receive(widget, {"view": "a", "number": 3, "address": address}, [])
    message, buffers = sent.of("a", 3)
    assert words in message["error"]
    assert not buffers


def test_a_cancelled_request_is_not_answered(large: Large) -> None:
    widget, _, sent = large
    widget._receive(widget, {"view": "a", "number": 0, "address": "runs"}, [])
    sent.of("a", 0)
    begin = threading.Event()
    widget._api.worker.submit(begin.wait, -1)
    widget._receive(widget, {"view": "a", "number": 1, "address": "runs"}, [])
    widget._receive(widget, {"view": "a", "number": 1, "cancelled": True}, [])
    widget._receive(widget, {"view": "a", "number": 2, "cancelled": True}, [])  # never requested
    begin.set()
    widget._receive(widget, {"view": "a", "number": 3, "address": "runs"}, [])
    sent.of("a", 3)
    assert [message["number"] for message, _ in sent] == [0, 3]


def test_the_worker_runs_while_a_view_is_open(large: Large) -> None:
    widget, _, sent = large
    before = workers()
    for view in "ab":
        widget._receive(widget, {"view": view, "number": 0, "address": "runs"}, [])
        sent.of(view, 0)
    assert workers() == before + 1
    widget._receive(widget, {"view": "a", "closed": True}, [])
    assert workers() == before + 1  # view b is still open
    widget._receive(widget, {"view": "b", "closed": True}, [])
    assert workers() == before
    widget._receive(widget, {"view": "c", "number": 0, "address": "runs"}, [])
    sent.of("c", 0)
    assert workers() == before + 1
    widget.close()
    assert workers() == before


def test_a_large_map_without_anywidget_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EMBEDDED_BYTES", 0)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    module._widget_class.cache_clear()

    expected = r"anywidget, which isn't installed\. Run pip install '\.\[view\]' in a clone"
    with pytest.raises(ImportError, match=expected):
        module.display(Api(a_map()))


def test_a_terminal_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not module.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not module.in_notebook()


@pytest.mark.full
def test_ipython_without_a_kernel_is_not_a_notebook() -> None:
    code = (
        "from IPython.core.interactiveshell import InteractiveShell; InteractiveShell.instance(); "
        "from manyheads.viewer import widget; print(widget.in_notebook())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.full
def test_nbconvert_writes_the_page_and_the_picture_of_a_widget(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbconvert import HTMLExporter
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    widget, amap, _ = large
    monkeypatch.undo()
    small = module.display(Api(amap))
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
    """model = torch.nn.Sequential(mh.MultiHeadAttention(32, 4), torch.nn.Linear(32, 32))
with mh.observe(model) as recording:
    model(torch.randn(1, 40, 32))
recording.view()""",
    "large.only(heads=[2, 3]).view()",
    """print("workers:", sum(one.name == "manyheads viewer" for one in threading.enumerate()))
print("weights:", small[0, 1].flatten().tolist())""",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with folders of its own and a notebook in it."""
    import nbformat  # slow: jsonschema builds the grammars of internet addresses
    from nbformat.v4 import new_code_cell, new_notebook

    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("jupyterlab isn't installed")
    if CHROMIUM is None:
        pytest.skip(MISSING)
    folders = {name: tmp_path / name for name in ("config", "data", "runtime", "ipython", "home", "books")}
    for folder in folders.values():
        folder.mkdir()
    # Without a kernel's name JupyterLab opens a dialog.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = new_notebook(cells=[new_code_cell(cell) for cell in CELLS], metadata={"kernelspec": kernel})
    nbformat.write(book, folders["books"] / "book.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folders["books"],
        "IdentityProvider.token": "token",
        "LabApp.workspaces_dir": tmp_path / "workspaces",
        "LabApp.user_settings_dir": tmp_path / "settings",
        "LabApp.expose_app_in_browser": True,
        "LabApp.news_url": None,
        "LabApp.extension_manager": "readonly",
    }
    environment = {f"JUPYTER_{name.upper()}_DIR": folders[name] for name in ("config", "data", "runtime")}
    environment |= {"IPYTHONDIR": folders["ipython"], "HOME": folders["home"], "OMP_NUM_THREADS": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of its kernel's Python
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env={**os.environ, **environment, "PATH": path},
            stdout=log,
            stderr=log,
        )
    try:
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=HANG).close()
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                return False
            return True

        wait_until(answers)
        yield f"{address}/lab/tree/book.ipynb?token=token"
    finally:
        server.terminate()  # and with it its kernels
        server.wait(HANG)


class Book:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        page.set_default_timeout(1000 * HANG)
        page.goto(address)
        self.cells = page.locator(".jp-Notebook .jp-Cell")
        page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
        page.evaluate(
            "jupyterapp.restored.then(() => jupyterapp.shell.currentWidget.context.sessionContext.ready)"
        )

    def command(self, name: str, **given: Any) -> None:
        self.page.evaluate("([name, given]) => void jupyterapp.commands.execute(name, given)", [name, given])

    def run(self) -> dict[str, Any]:
        """Run all cells and return what the last one printed."""
        self.command("notebook:clear-all-cell-outputs")
        self.command("notebook:run-all-cells")
        printed = self.output(4).locator("pre")
        printed.filter(has_text="weights:").wait_for()
        return {
            name: json.loads(value)
            for name, value in (x.split(": ") for x in printed.inner_text().splitlines())
        }

    def output(self, cell: int) -> Any:
        return self.cells.nth(cell).locator(".jp-OutputArea-output")

    def read(self, viewer: Any) -> tuple[int, int, float]:
        """Open head 1, zoom to single weights with the wheel, and return the one under the pointer."""
        viewer.locator(".card").nth(1).scroll_into_view_if_needed()
        viewer.locator(".card").nth(1).click()
        plot, reading = viewer.locator(".map"), viewer.locator(".reading")
        viewer.locator('.note[data-missing="0"][data-complete="true"][data-labelled="true"]').wait_for()
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        plot.hover(position={"x": box["width"] * 0.4, "y": box["height"] * 0.7})
        for _ in range(14):
            self.page.mouse.wheel(0, -400)
            wait_until_painted(self.page)
        viewer.locator('.reading[data-exact="true"]').wait_for()
        found = reading.evaluate("element => ({...element.dataset})")
        return int(found["query"]), int(found["key"]), float(found["weight"])


@pytest.fixture
def book(lab: str) -> Iterator[Book]:
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield Book(page, lab)
    assert not wrong


def large_map() -> mh.AttentionMap:
    """Return the notebook's map of 3,000 tokens, from the same random numbers."""
    torch.manual_seed(0)
    torch.randn(3, 1, 3, 12, 8)
    q, k, v = torch.randn(3, 1, 4, 3000, 16).unbind()
    return mh.attention_with_map(q, k, v, mask=mh.Causal())[1]


@pytest.mark.full
@pytest.mark.flaky(reruns=1)
def test_viewers_in_jupyterlab_read_weights_take_keys_and_follow_the_theme(book: Book) -> None:
    small, large = book.output(0).frame_locator("iframe"), book.output(1).locator(".manyheads")
    other, seen = book.output(3).locator(".manyheads"), book.output(2).frame_locator("iframe")

    result = book.run()
    assert result["workers"] <= 2  # of the two widgets; pages have none
    i, j, weight = book.read(small)
    assert weight == result["weights"][i * 12 + j]
    i, j, weight = book.read(large)
    assert weight == pytest.approx(float(large_map()[0, 1, i, j]), rel=1e-6)

    # The viewer takes the keys, not the notebook, also when the focused element was replaced.
    large.locator(".map").click()
    for key in "]abxmdlo":
        book.page.keyboard.press(key)
        wait_until_painted(book.page)
    expect(book.cells).to_have_count(len(CELLS))
    expect(large.locator("#pooling input[value=mean]")).to_be_checked()
    expect(large.locator("#scale input[value=linear]")).to_be_checked()
    large.locator("#page-head").click()
    expect(large.locator(".choose-head")).to_have_value("2")
    large.locator(".choose-head").select_option("3")
    expect(large.locator(".pane-title")).to_contain_text("head 3")
    large.locator("#page-text").click()
    large.locator(".token").nth(40).hover()
    large.locator('.beside[data-token="40"] .value').first.wait_for()

    # Other viewers are unchanged.
    other.scroll_into_view_if_needed()
    expect(other.locator("#pooling input[value=max]")).to_be_checked()
    expect(other.locator("#page-overview")).to_have_attribute("aria-current", "page")
    seen.locator("#page-text").click()
    seen.locator(".token").nth(3).wait_for()

    # Both kinds follow the notebook's theme.
    for theme in ("dark", "light"):
        book.command("apputils:change-theme", theme=f"JupyterLab {theme.title()}")
        book.page.locator(f'body[data-jp-theme-name="JupyterLab {theme.title()}"]').wait_for(state="attached")
        for cell in (3, 0):
            book.cells.nth(cell).scroll_into_view_if_needed()
        other.and_(book.page.locator(f'[data-theme="{theme}"]')).wait_for(state="attached")
        small.locator(f'body[data-theme="{theme}"]').wait_for(state="attached")

    # Running the cells again leaves no workers behind.
    assert book.run()["workers"] <= 2
