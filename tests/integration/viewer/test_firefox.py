"""The viewer in Firefox: every page opens without errors, and weights equal the map's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyheads.viewer.api import Api
from manyheads.viewer.server import Server
from tests.firefox import FIREFOX, MISSING, Firefox
from tests.integration.viewer.pages import LOADED, a_map

pytestmark = [
    pytest.mark.full,
    pytest.mark.flaky(reruns=1),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(FIREFOX is None, reason=MISSING),
]

ARE_LOADED = f"""(document.querySelectorAll(".note").length > 0
    && document.querySelectorAll(".note").length === document.querySelectorAll('.note{LOADED}').length)"""


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    firefox = Firefox(tmp_path_factory.mktemp("firefox") / "profile")
    yield firefox
    firefox.close()


@pytest.mark.parametrize("length", [7, 2_000])
def test_pages_in_firefox(firefox: Firefox, served: list[Server], tmp_path: Path, length: int) -> None:
    amap = a_map(length)
    served.append(Server(Api(amap)))
    firefox.errors.clear()
    firefox.open(served[-1].url, 1280, 800)
    firefox.wait_until("document.querySelector('#page-overview[aria-current=page]') !== null")
    firefox.screenshot(tmp_path / "overview.png")
    firefox.evaluate("location.hash = 'page=head&head=1'")
    firefox.wait_until(ARE_LOADED)
    firefox.press("1")  # single weights
    firefox.wait_until(f"{ARE_LOADED} && document.querySelector('.note').dataset.level === '0'")
    canvas = "document.querySelector('canvas.map')"
    box = firefox.evaluate(f"{canvas}.getBoundingClientRect()")
    left, above, wide, high = map(float, firefox.evaluate(f"{canvas}.dataset.area").split(","))
    firefox.point(box["x"] + left + 0.4 * wide, box["y"] + above + 0.6 * high)
    reading = firefox.wait_until(
        "((dataset) => dataset.exact === 'true' && {...dataset})(document.querySelector('.reading').dataset)"
    )
    assert float(reading["weight"]) == float(amap[0, 1, int(reading["query"]), int(reading["key"])])
    firefox.screenshot(tmp_path / "head.png")
    firefox.press("x")
    firefox.wait_until("document.querySelector('aside.beside')?.dataset.token")
    # A long text opens at its end.
    firefox.evaluate("document.querySelector('[data-token=\"5\"]').scrollIntoView()")
    token = firefox.evaluate("document.querySelector('[data-token=\"5\"]').getBoundingClientRect()")
    firefox.point(token["x"] + token["width"] / 2, token["y"] + token["height"] / 2, click=True)
    firefox.wait_until("document.querySelector('aside.beside')?.dataset.token === '5'")
    shown = firefox.evaluate("Number(document.querySelector('aside.beside li .value').dataset.weight)")
    assert shown == pytest.approx(float(amap[0, 1, 5].max()), rel=1e-5)
    firefox.screenshot(tmp_path / "text.png")
    firefox.press("b")
    firefox.wait_until("Number(document.querySelector('.board .note')?.dataset.lines) > 0")
    firefox.screenshot(tmp_path / "lines.png")
    assert firefox.errors == []
