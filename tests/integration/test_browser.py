"""The viewer in a browser: its weights equal the map's, at 7, 2,000 and 100,000 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

import manyheads as mh
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.chromium import CHROMIUM, FLAGS, MISSING, wait_until_painted
from tests.waiting import HANG

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "<script>alert(1)</script>", "&amp;", "dog"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture
def served() -> Iterator[list[Server]]:
    opened: list[Server] = []
    yield opened
    for server in opened:
        server.close()


@pytest.fixture
def page(browser: Browser, served: list[Server]) -> Iterator[Page]:
    """A page of a laptop's size, without errors or dialogs, which closes before its server."""
    context = browser.new_context(viewport={"width": 1366, "height": 768}, accept_downloads=True)
    context.set_default_timeout(1000 * HANG)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
    yield page
    context.close()
    assert wrong == []


def a_map(t: int, heads: int = 2, mask: mh.Mask | None = None) -> mh.AttentionMap:
    torch.manual_seed(t)
    q, k = (torch.randn(1, heads, t, 16) for _ in range(2))
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal() if mask is None else mask)[1]
    return amap.labelled([WORDS[n % len(WORDS)] for n in range(t)])


def opened(page: Page, served: list[Server], *maps: mh.AttentionMap, at: str = "") -> str:
    """Open maps at a place in the viewer and return its address without the token."""
    served.append(Server(Api(*maps)))
    page.goto(served[-1].url + at)
    page.wait_for_selector("nav")
    return served[-1].url.partition("?")[0]


def loaded(page: Page) -> None:
    """Wait until every head in view is scanned and drawn."""
    wait_until_painted(page)
    panes = page.locator(".note").count()
    expect(page.locator('.note[data-missing="0"][data-complete="true"]')).to_have_count(panes)


def box_of(canvas: Locator) -> Any:
    box = canvas.bounding_box()
    assert box is not None
    return box


def weight(element: Locator) -> float:
    return float(element.get_attribute("data-weight") or "nan")


def pair(reading: Locator) -> tuple[int, int]:
    """Return the query and the key that a reading names."""
    return int(reading.get_attribute("data-query") or -1), int(reading.get_attribute("data-key") or -1)


def hover(page: Page, row: float, col: float) -> tuple[int, int]:
    """Point at a place of the visible matrix and return the query and key that the page names."""
    box = box_of(page.locator("canvas.map").first)
    x, y = 154 + col * (box["width"] - 154 - 74), 124 + row * (box["height"] - 132)
    page.mouse.move(box["x"] + x, box["y"] + y)
    reading = page.locator(".reading").first
    expect(reading).not_to_have_attribute("data-weight", "")
    return pair(reading)


def exact(page: Page) -> float:
    """Return the exact weight under the pointer, once the page has it."""
    reading = page.locator(".reading").first
    expect(reading).to_have_attribute("data-exact", "true")
    return weight(reading)


@pytest.mark.parametrize("length", [7, 2_000])
def test_weights_equal_the_map_at_every_zoom(page: Page, served: list[Server], length: int) -> None:
    amap = a_map(length)
    opened(page, served, amap)
    expect(page.locator(".card")).to_have_count(2)
    page.locator(".card").nth(1).click()
    loaded(page)
    assert "head=1" in page.url
    page.keyboard.press("1")  # single weights
    loaded(page)
    expect(page.locator(".note").first).to_have_attribute("data-level", "0")
    for row, col in ((0.5, 0.42), (0.7, 0.5), (0.8, 0.46)):
        i, j = hover(page, row, col)
        if j > i:
            expect(page.locator(".value").first).to_have_text("masked")
            continue
        assert exact(page) == float(amap[0, 1, i, j])
        assert f"“{amap.tokens[i]}”" in page.locator(".reading").first.inner_text()  # type: ignore[index]
    page.keyboard.press("[")
    loaded(page)
    assert "head=1" not in page.url
    i, j = hover(page, 0.71, 0.41)
    assert exact(page) == float(amap[0, 0, i, j])


def test_a_hundred_thousand_tokens_at_every_zoom(page: Page, served: list[Server]) -> None:
    q, k = (torch.randn(1, 1, 100_000, 8) for _ in range(2))
    window = mh.Window(left=4_000, right=0)
    amap = mh.attention_with_map(q, k, k, mask=window)[1].labelled([f"w{n}" for n in range(100_000)])
    held: list[Route] = []  # the request that starts the scan: until then tiles are sampled
    page.route(re.compile("/scan/"), lambda request: held.append(request), times=1)
    opened(page, served, amap, at="#page=head&view=50000,60000,0.006")
    expect(page.locator(".note").first).to_contain_text("estimated from 1 query in 512")
    held[0].continue_()
    loaded(page)
    pooled = "pooled: each cell shows the largest of 256 × 256 weights"
    expect(page.locator(".note").first).to_contain_text(pooled)
    page.keyboard.press("0")
    transition = "document.querySelector('canvas.map').__transition"  # d3's, to the whole matrix
    page.wait_for_function(f"() => !{transition}")
    for press in ("m", "+", "+", "+", "+"):
        page.keyboard.press(press)
        loaded(page)
        i, j = hover(page, 0.51, 0.5)
        level = int(page.locator(".note").first.get_attribute("data-level") or -1)
        reading = page.locator(".reading").first
        shown = weight(reading)
        side = 1 << level
        cell = amap[0, 0, i : i + side, j : j + side]
        wanted = float(cell.mean()) if "mean" in reading.inner_text() else float(cell.max())
        if shown == shown:
            assert shown == pytest.approx(wanted, rel=2e-3, abs=1e-9)
    page.goto(re.sub("#.*", "", page.url) + "#page=head&view=50000.5,50010.5,60")
    expect(page.locator(".note").first).to_have_attribute("data-level", "0")
    loaded(page)
    i, j = hover(page, 0.5, 0.5)
    assert abs(i - 50_010) < 12
    assert abs(j - 50_000) < 12
    if j <= i:
        assert exact(page) == float(amap[0, 0, i, j])
    page.locator("#page-text").click()
    page.locator("input[type=number]").fill("70000")
    page.keyboard.press("Enter")
    expect(page.locator("aside")).to_have_attribute("data-token", "70000")
    best = amap[0, 0, 70_000].topk(1)
    first = page.locator("aside li .value").first
    assert weight(first) == pytest.approx(float(best.values[0]), rel=1e-6)


def test_a_link_restores_the_view(page: Page, served: list[Server]) -> None:
    amap = a_map(900)
    opened(page, served, amap, at="#page=head&scale=log&pooling=mean&theme=dark")
    loaded(page)
    page.keyboard.press("+")
    page.keyboard.press("ArrowDown")
    loaded(page)
    hover(page, 0.6, 0.5)
    page.mouse.down(), page.mouse.up()  # pins the crosshair
    page.mouse.move(5, 5)
    expect(page.locator(".reading").first).to_have_attribute("data-exact", "true")
    page.wait_for_url(re.compile("pin="))
    loaded(page)
    link, text = page.url, page.locator(".reading").first.inner_text()
    picture = page.locator("canvas.map").first.evaluate("(canvas) => canvas.toDataURL()")
    assert "view=" in link
    assert "pin=" in link
    page.goto("about:blank")
    page.goto(link)
    loaded(page)
    expect(page.locator(".reading").first).to_have_text(text)
    same = "picture => document.querySelector('canvas.map').toDataURL() === picture"
    page.wait_for_function(same, arg=picture)
    assert page.url == link


def test_two_heads_and_two_runs_zoom_together(page: Page, served: list[Server]) -> None:
    one, other = a_map(300), a_map(300, mask=mh.Window(left=20, right=0))
    opened(page, served, one, other, at="#page=head")
    page.locator("#compare").click()
    expect(page.locator(".pane")).to_have_count(2)
    loaded(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    loaded(page)
    box = box_of(page.locator("canvas.map").nth(1))
    page.mouse.move(box["x"] + 300, box["y"] + 400)
    readings = page.locator(".reading")
    i, j = pair(readings.nth(1))
    assert pair(readings.nth(0)) == (i, j)
    for n in range(2):
        expect(readings.nth(n)).to_have_attribute("data-exact", "true")
    for n, amap in enumerate((one, other)):
        text = readings.nth(n).get_attribute("data-weight") or ""
        assert text == "NaN" or float(text) == float(amap[0, 0, i, j])
    page.locator("#theme").click()
    assert page.locator(".manyheads").get_attribute("data-theme") == "dark"


def test_the_overview_sorts_and_filters_by_head_scores(page: Page, served: list[Server]) -> None:
    amap = a_map(60, heads=5)
    opened(page, served, amap, at="#sort=entropy")
    expect(page.locator("dd[data-score=entropy]")).to_have_count(5)
    entropy = amap.entropy()[0].mean(-1)
    places = [card.get_attribute("data-place") or "" for card in page.locator(".card").all()]
    assert [int(place.split("/")[2]) for place in places] == entropy.argsort(descending=True).tolist()
    least = float(entropy.sort().values[2]) - 1e-6
    page.locator("#score").select_option("entropy")
    page.locator("#minimum").press_sequentially(str(least))
    expect(page.locator(".card")).to_have_count(3)


def test_thumbnails_load_while_head_scores_are_computed(page: Page, served: list[Server]) -> None:
    """A browser has six connections to a server: head scores of eight layers take one of them."""
    requests: list[str] = []
    page.route("**/scores/**", lambda route: requests.append(route.request.url))  # and never answers
    opened(page, served, *(a_map(20, heads=1) for _ in range(8)), at="#sort=entropy")
    expect(page.locator("canvas.drawn")).to_have_count(8)
    assert len(requests) == 1
    names = [name.inner_text() for name in page.locator(".card-name").all()]
    assert names == [f"attention ({n}) · layer 0 · head 0" for n in range(8)]


def test_a_pinned_weight_out_of_view_is_shown(page: Page, served: list[Server]) -> None:
    amap = a_map(2_000)
    opened(page, served, amap, at="#page=head&view=1800,1900,40&pin=700,300")
    for head in range(2):
        loaded(page)
        assert exact(page) == float(amap[0, head, 700, 300])
        page.keyboard.press("]")
        expect(page.locator(".pane-title")).to_contain_text(f"head {1 - head}")


def test_few_keys_are_drawn_wide_enough_to_point_at(page: Page, served: list[Server]) -> None:
    q, k = torch.randn(1, 1, 5_000, 16), torch.randn(1, 1, 3, 16)
    amap = mh.attention_with_map(q, k, k)[1]
    opened(page, served, amap, at="#page=head")
    loaded(page)
    box = box_of(page.locator("canvas.map"))
    reading, read = page.locator(".reading"), 0
    for step in range(-40, 41, 5):  # pixels beside the middle
        page.mouse.move(box["x"] + (98 + box["width"] - 74) / 2 + step, box["y"] + 300)
        read += reading.get_attribute("data-weight") != ""
    assert read > 12
    page.keyboard.press("1")
    loaded(page)
    expect(page.locator(".note")).to_have_attribute("data-level", "0")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 300)
    shown, (i, j) = exact(page), pair(reading)
    assert shown == float(amap[0, 0, i, j])


def test_the_text_shows_the_weights_from_and_to_a_token(page: Page, served: list[Server]) -> None:
    amap = a_map(30)
    opened(page, served, amap, at="#page=text")
    page.locator(".token[data-token='9']").hover()
    expect(page.locator("aside")).to_have_attribute("data-token", "9")
    row, column = amap[0, :, 9].mean(0), amap[0, :, :, 9].mean(0)
    shown = [weight(element) for element in page.locator("aside li .value").all()]
    wanted = [*row.topk(10).values.tolist(), *column.topk(12).values.tolist()]
    assert shown == pytest.approx(wanted, rel=1e-6)
    assert page.locator("svg.lines path").count() > 0
    page.locator("fieldset label", has_text="1").locator("input").check()
    page.locator(".token[data-token='9']").hover()
    first = "document.querySelector('aside li .value').dataset.weight"  # of both heads before
    page.wait_for_function(f"wanted => Math.abs({first} / wanted - 1) < 1e-6", arg=float(amap[0, 1, 9].max()))


def test_a_token_is_shown_as_text_and_never_run(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(24), at="#page=text&token=7")
    expect(page.locator("aside[data-token='7'] h2")).to_have_text("<script>alert(1)</script> 7")
    expect(page.locator(".token[data-token='7']")).to_have_text("<script>alert(1)</script>")
    expect(page.locator(".token[data-token='8']")).to_have_text("&amp;")
    page.keyboard.press("h")
    loaded(page)
    hover(page, 0.6, 0.5)


def test_the_view_is_saved_as_a_png(page: Page, served: list[Server], tmp_path: Path) -> None:
    opened(page, served, a_map(40), at="#page=head")
    loaded(page)
    with page.expect_download() as waiting:
        page.keyboard.press("p")
    waiting.value.save_as(tmp_path / "head.png")
    assert waiting.value.suggested_filename == "layer-0-head-0.png"
    assert (tmp_path / "head.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("folder", [False, True])
def test_an_exported_page_opens_from_a_disk(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    from manyheads.viewer import export

    if folder:
        monkeypatch.setattr(export, "PAGE_BYTES", 10_000.0)
    amap = a_map(300)
    plan_export(Api(amap), tmp_path / "page.html", heads=[1]).write()
    page.goto(f"file://{tmp_path}/page.html#page=head")
    loaded(page)
    page.keyboard.press("1")
    loaded(page)
    i, j = hover(page, 0.7, 0.45)
    shown = weight(page.locator(".reading").first)
    assert shown == pytest.approx(float(amap[0, 1, i, j]), rel=2**-11 if folder else 1e-7)
    page.keyboard.press("x")
    page.locator(".token[data-token='20']").hover()
    expect(page.locator("aside")).to_have_attribute("data-token", "20")
    first = page.locator("aside li .value").first
    assert weight(first) == pytest.approx(float(amap[0, 1, 20].max()), rel=2**-11)


def test_a_link_with_wrong_values_shows_the_nearest_valid_ones(page: Page, served: list[Server]) -> None:
    wrong = "head=99&layer=-4&run=x&view=a,b,c&pin=1&pooling=sum&batch=7&theme=blue"
    opened(page, served, a_map(20), at=f"#page=head&{wrong}")
    loaded(page)
    expect(page.locator(".pane-title")).to_have_text("layer 0: attention, head 1")


def test_a_closed_server_is_reported(browser: Browser, served: list[Server]) -> None:
    page = browser.new_page()
    opened(page, served, a_map(3_000), at="#page=head")
    loaded(page)
    served.pop().close()
    page.keyboard.press("1")
    expect(page.locator(".banner")).to_contain_text("The viewer doesn't respond")
    page.close()
