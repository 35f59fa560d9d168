"""Responses that arrive late, in another order, or after their page was left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import APIResponse, Page, Request, Route, expect

import manyheads as mh
from manyheads.viewer import assets
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.chromium import wait_until_painted
from tests.integration.viewer.pages import (
    a_map,
    has_in_url,
    hover,
    in_a_browser,
    loaded,
    opened,
)
from tests.waiting import wait_until

pytestmark = in_a_browser


def wait_for(page: Page, happened: Callable[[], bool]) -> None:
    """Return as soon as a condition on the events of a page holds; Playwright delivers them meanwhile."""

    def has_happened() -> bool:
        wait_until_painted(page)
        return happened()

    wait_until(has_happened)


class Held:
    """Responses of the server, held until `release`.

    Args:
        page: The page that requests them.
        address: A regular expression of their addresses.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.routes, self.is_released = page, list[Route](), False
        self.done: list[Request] = []
        page.route(re.compile(f"/data/{address}"), self._hold)
        for event in ("requestfinished", "requestfailed"):
            page.on(event, lambda request: self.done.append(request))  # type: ignore[call-overload]

    def _hold(self, route: Route) -> None:
        if self.is_released:
            route.continue_()
        else:
            self.routes.append(route)

    def wait(self) -> None:
        """Wait until one is requested."""
        wait_for(self.page, lambda: self.routes != [])

    def release(self) -> None:
        """Let them arrive, and wait until the page has handled them."""
        self.wait()
        self.is_released = True
        for route in self.routes:
            route.continue_()
        wait_for(self.page, lambda: all(route.request in self.done for route in self.routes))
        wait_until_painted(self.page)


@pytest.mark.parametrize("order", ["xbho", "ohbx", "hxob", "bxoh"])
def test_pages_are_left_before_the_tokens_arrive(page: Page, served: list[Server], order: str) -> None:
    amap, tokens = a_map(10), Held(page, "tokens/")
    opened(page, served, amap)
    for key in order:
        page.keyboard.press(key)
    tokens.release()
    if order[-1] == "o":
        expect(page.locator(".card canvas.drawn")).to_have_count(2)
    elif order[-1] == "x":
        expect(page.locator("aside.beside")).to_have_attribute("data-token", "9")
        expect(page.locator(".token")).to_have_count(10)
    elif order[-1] == "b":
        expect(page.locator(".board .note")).to_have_attribute("data-lines", re.compile(r"\d"))
        expect(page.locator(".column.key li")).to_have_count(10)
    else:
        loaded(page)
        i, j = hover(page, 0.7, 0.2)
        expect(page.locator(".reading")).to_have_attribute("data-weight", str(float(amap[0, 0, i, j])))
    expect(page.locator(".banner")).to_be_hidden()


def test_keys_do_nothing_before_the_tokens_of_the_text_arrive(page: Page, served: list[Server]) -> None:
    tokens = Held(page, "tokens/")
    opened(page, served, a_map(10), at="#page=text")
    page.keyboard.press("ArrowRight")
    tokens.release()
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "9")
    page.keyboard.press("ArrowRight")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "9")
    has_in_url(page, "token=9")


def test_the_heads_of_a_pair_are_those_of_the_last_choice(page: Page, served: list[Server]) -> None:
    """The pair of a selected token is known only when its row has arrived; meanwhile a weight is pinned."""
    rows, requests = Held(page, "row/"), list[str]()
    page.on("request", lambda request: requests.append(request.url.partition("/data/")[2]))
    opened(page, served, a_map(30), at="#page=text&token=20")
    page.keyboard.press("w")
    page.locator(".token[data-token='9']").click(modifiers=["Shift"])
    expect(page.get_by_label("to key")).to_have_value("9")
    rows.release()
    assert [address for address in requests if address.startswith("heads/")] == ["heads/0/0/20/9/0"]


def test_a_weight_that_is_no_longer_pinned_is_not_shown(page: Page, served: list[Server]) -> None:
    weights = Held(page, "weight/")
    opened(page, served, a_map(30), at="#page=head&pin=20,4")
    loaded(page)
    weights.wait()
    page.keyboard.press("Escape")
    expect(page.locator(".reading")).to_have_attribute("data-weight", "")
    weights.release()
    expect(page.locator(".reading")).to_have_text("Hover over a weight; click to pin it.")


def test_names_of_tokens_are_shown_when_they_arrive_last(page: Page, served: list[Server]) -> None:
    tokens = Held(page, "tokens/")
    amap = a_map(30)
    with page.expect_request_finished(lambda request: "/explain/" in request.url):
        opened(page, served, amap, at="#page=head&pin=20,4")
    tokens.release()
    loaded(page)
    expect(page.locator(".top-keys mark")).to_have_count(12)
    expect(page.locator(".why .pair")).to_contain_text("query 20 “\u2068the\u2069”")


def test_tiles_that_were_estimated_before_the_end_of_the_scan_are_replaced(
    page: Page, served: list[Server]
) -> None:
    estimated: list[tuple[Route, APIResponse]] = []
    page.route(re.compile("/data/tiles/"), lambda route: estimated.append((route, route.fetch())), times=1)
    scan = Held(page, "scan/")
    q, k = torch.randn(1, 1, 32_000, 4), torch.randn(1, 1, 32_000, 4)
    amap = mh.attention_with_map(q, k, k, mask=mh.Window(left=100, right=0))[1]
    page.set_viewport_size({"width": 1000, "height": 600})  # of which the coarsest tile is drawn
    opened(page, served, amap, at="#page=head")
    wait_for(page, lambda: estimated != [])
    scan.release()
    note = page.locator(".note")
    expect(note).to_have_attribute("data-complete", "true")
    expect(note).to_have_attribute("data-level", "7")
    expect(note).to_have_attribute("data-missing", "1")
    route, response = estimated[0]
    route.fulfill(response=response)
    loaded(page)
    expect(note).to_have_attribute("data-sampled", "1")


def test_no_picture_is_saved_of_a_page_that_was_left(page: Page, served: list[Server]) -> None:
    tiles = Held(page, "tiles/")
    opened(page, served, a_map(30), at="#page=head")
    page.keyboard.press("p")
    expect(page.locator(".banner")).to_contain_text("saved when its tiles are loaded")
    page.keyboard.press("x")
    tiles.release()
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "29")
    expect(page.locator(".banner")).to_be_hidden()


def test_a_file_is_named_after_the_head_that_it_shows(page: Page, served: list[Server]) -> None:
    figures = Held(page, "figure/")
    opened(page, served, a_map(30), at="#page=head")
    loaded(page)
    page.locator("#svg").click()
    figures.wait()
    page.keyboard.press("]")
    expect(page.locator(".pane-title")).to_contain_text("head 1")
    with page.expect_download() as waiting:
        figures.release()
    assert waiting.value.suggested_filename == "layer-0-head-0.svg"


def test_words_are_searched_in_the_text_that_is_shown(page: Page, served: list[Server]) -> None:
    """The tokens of a run arrive when another run is shown."""
    texts = [["one", "two", "one"], ["one", "one", "one", "one"]]
    maps = [a_map(len(text)).labelled(text) for text in texts]
    second = Held(page, "tokens/1/")
    opened(page, served, *maps, at="#page=text")
    expect(page.locator(".token")).to_have_count(3)
    page.locator(".choose-run").select_option("1")
    page.locator("#search").fill("one")
    second.wait()
    wait_until_painted(page)
    page.locator("#search").press("Enter")
    page.locator(".choose-run").select_option("0")
    expect(page.locator(".token")).to_have_count(3)
    second.release()
    expect(page.locator(".search .count")).to_have_text(re.compile("of 2"))
    expect(page.locator(".token.found")).to_have_count(2)


def test_a_larger_thumbnail_is_not_replaced_by_a_smaller_one(page: Page, served: list[Server]) -> None:
    small = Held(page, r"tiles/0/0/0/3/")
    page.set_viewport_size({"width": 700, "height": 500})
    opened(page, served, a_map(500, heads=12))
    small.wait()
    page.set_viewport_size({"width": 1920, "height": 1080})
    canvas = page.locator(".card[data-place='0/0/0'] canvas.drawn")
    expect(canvas).to_be_visible()
    wide = canvas.evaluate("canvas => canvas.width")
    small.release()
    assert canvas.evaluate("canvas => canvas.width") == wide > 64


@pytest.mark.parametrize("name", ["overview", "lines"])
def test_an_exported_text_is_left_before_its_weights_are_read(page: Page, tmp_path: Path, name: str) -> None:
    """An exported page reads its data to the end, also after its request was cancelled."""
    plan_export(Api(a_map(30)), tmp_path / "page.html").write()
    page.goto(f"file://{tmp_path}/page.html#page=text")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "29")
    page.evaluate(
        """name => {
            const token = document.querySelector(".token[data-token='20']");
            token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            document.querySelector(`#page-${name}`).click();
        }""",
        name,
    )
    wait_until_painted(page)
    expect(page.locator(f"#page-{name}")).to_have_attribute("aria-current", "page")
    expect(page.locator(".banner")).to_be_hidden()


def test_a_viewer_is_removed_before_its_responses_arrive(page: Page, served: list[Server]) -> None:
    """As in a notebook, when a cell runs again."""
    opened(page, served, a_map(10))
    tokens = Held(page, "tokens/")
    page.evaluate(
        f"""async () => {{
            {assets.script()}
            const root = document.createElement("div");
            document.body.append(root);
            window.viewer = show(root, new HttpClient("data/"), false);
            while (!root.querySelector("nav")) await new Promise(requestAnimationFrame);
            root.querySelector("#page-text").click();
        }}"""
    )
    tokens.wait()
    page.evaluate("() => viewer.remove()")
    tokens.release()
