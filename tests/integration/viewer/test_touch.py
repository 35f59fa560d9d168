"""The viewer on a phone, emulated by Chromium: pinch, drag and tap, and no page is wider than the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from manyheads.viewer.server import Server
from tests.chromium import wait_until_painted
from tests.integration.viewer.pages import (
    a_map,
    area_of,
    box_of,
    collect_errors,
    exact,
    has_in_url,
    in_a_browser,
    loaded,
    opened,
    pair,
    token_shown,
    weight,
)
from tests.waiting import HANG

pytestmark = in_a_browser


@pytest.fixture
def phone(browser: Browser, served: list[Server]) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2
    )
    context.set_default_timeout(1000 * HANG)
    page = context.new_page()
    wrong = collect_errors(page)
    yield page
    context.close()
    assert wrong == []


def touch(page: Page, *paths: tuple[tuple[float, float], tuple[float, float]], steps: int = 8) -> None:
    """Move fingers, each from a place to another."""
    session = page.context.new_cdp_session(page)

    def fingers(share: float) -> list[dict[str, Any]]:
        return [
            {"id": n, "x": x + share * (to_x - x), "y": y + share * (to_y - y)}
            for n, ((x, y), (to_x, to_y)) in enumerate(paths)
        ]

    def send(kind: str, points: list[dict[str, Any]]) -> None:
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", fingers(0))
    for step in range(1, steps + 1):
        send("touchMove", fingers(step / steps))
    send("touchEnd", [])
    session.detach()
    wait_until_painted(page)


# Whether the link has the view that is drawn: it is saved a moment after the last move of a finger.
IS_SAVED = """() => {
    const [x, y, n] = new URLSearchParams(location.hash.slice(1)).get("view")?.split(",").map(Number) ?? [];
    const { keys, queries } = document.querySelector(".note").dataset;
    const isNear = (middle, range) =>
        range.split(",").every((end, m) => Math.abs(middle + (m - 0.5) * n - end) <= 1);
    return isNear(x, keys) && isNear(y, queries);
}"""


def view(page: Page) -> tuple[float, float, float]:
    """Return the key and query in the middle of the matrix, and how many tokens are in view."""
    loaded(page)
    page.wait_for_function(IS_SAVED)
    value = page.evaluate("() => new URLSearchParams(location.hash.slice(1)).get('view')")
    x, y, tokens = map(float, value.split(","))
    return x, y, tokens


def test_pinch_zooms_and_a_finger_moves(phone: Page, served: list[Server]) -> None:
    opened(phone, served, a_map(500), at="#page=head&view=250,250,100")
    loaded(phone)
    left, above, wide, high = area_of(phone.locator("canvas.map").first)
    x, y = left + wide / 2, above + high / 2
    touch(phone, ((x - 25, y), (x - 50, y)), ((x + 25, y), (x + 50, y)))
    pinched = view(phone)
    assert pinched[2] == pytest.approx(50, rel=0.1)  # the fingers are twice as far apart
    assert pinched[:2] == pytest.approx((250, 250), abs=2)
    touch(phone, ((x, y), (x - 40, y - 20)))
    moved = view(phone)
    assert moved[2] == pytest.approx(pinched[2])
    pixels = wide / pinched[2]  # per token
    assert (moved[0] - pinched[0]) * pixels == pytest.approx(40, abs=12)  # a tap may move by some pixels
    assert (moved[1] - pinched[1]) * pixels == pytest.approx(20, abs=12)


def test_a_tap_reads_a_weight(phone: Page, served: list[Server]) -> None:
    amap = a_map(7)
    opened(phone, served, amap, at="#page=head&head=1")
    loaded(phone)
    expect(phone.locator(".reading")).to_have_text("Tap a weight to pin it.")
    left, above, wide, high = area_of(phone.locator("canvas.map").first)
    phone.touchscreen.tap(left + 0.3 * wide, above + 0.7 * high)
    reading = phone.locator(".reading").first
    expect(reading).not_to_have_attribute("data-weight", "")
    i, j = pair(reading)
    assert exact(phone) == float(amap[0, 1, i, j])
    has_in_url(phone, f"pin={i},{j}")


def test_a_tap_selects_a_token(phone: Page, served: list[Server]) -> None:
    amap = a_map(20)
    opened(phone, served, amap, at="#page=text&heads=1")
    phone.locator("[data-token='9']").first.tap()
    expect(phone.locator("aside.beside")).to_have_attribute("data-token", "9")
    shown = weight(phone.locator("aside.beside li .value").first)
    assert shown == pytest.approx(float(amap[0, 1, 9].max()), rel=1e-5)
    has_in_url(phone, "token=9")


@pytest.mark.parametrize("name", ["overview", "head", "head&second=0,0,1", "text&token=3", "lines&token=3"])
def test_a_page_is_as_wide_as_the_phone(phone: Page, served: list[Server], name: str) -> None:
    opened(phone, served, a_map(200, heads=12), at=f"#page={name}")
    loaded(phone)
    if "token=" in name:
        token_shown(phone, 3)
    widths = [
        phone.evaluate(f"() => {element}.scrollWidth")
        for element in ("document.documentElement", "document.querySelector('main')")
    ]
    assert max(widths) <= 390
    for canvas in phone.locator("canvas.map").all():
        box = box_of(canvas)
        assert box["width"] > 300
        assert box["height"] > 150


def test_the_number_of_lines_is_not_cut(phone: Page, served: list[Server]) -> None:
    opened(phone, served, a_map(200, heads=12), at="#page=lines&token=3")
    note = phone.locator(".board .note")
    expect(note).to_have_text(re.compile(r"^\d+ of [\d,]+ lines: weights of at least 0.02$"))
    assert note.evaluate("note => note.scrollWidth <= note.clientWidth")


@pytest.mark.parametrize(("heads", "least"), [(12, 300), (2, 300)])
def test_the_overview_uses_the_width_of_the_phone(
    phone: Page, served: list[Server], heads: int, least: int
) -> None:
    opened(phone, served, a_map(200, heads=heads))
    expect(phone.locator(".card canvas.drawn")).to_have_count(heads)
    assert box_of(phone.locator(".matrix"))["width"] > least
    assert phone.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_the_matrix_of_a_head_uses_the_width_of_the_phone(phone: Page, served: list[Server]) -> None:
    opened(phone, served, a_map(200), at="#page=head")
    loaded(phone)
    *_, wide, high = area_of(phone.locator("canvas.map"))
    assert wide == high > 180


@pytest.mark.parametrize("at", ["overview", "head", "head&second=0,0,1", "text", "lines"])
def test_controls_leave_most_of_the_screen_to_the_page(phone: Page, served: list[Server], at: str) -> None:
    """Most of them appear after a tap on "settings"."""
    opened(phone, served, a_map(50, heads=12), at=f"#page={at}")
    body, settings = phone.locator("main.body"), phone.locator("#settings")
    expect(phone.locator("#findings")).to_be_hidden()
    assert box_of(body)["y"] <= 150
    if "page=head" in phone.url:
        expect(phone.locator("select.choose-head").first).to_be_visible()
    if at in ("text", "lines"):  # heads are chosen in one line, which scrolls
        phone.locator(".chip[data-head='11']").tap()
        has_in_url(phone, "heads=0,1,2,3,4,5,6,7,8,9,10$")
    settings.tap()
    expect(settings).to_have_attribute("aria-expanded", "true")
    for name in ("#findings", "#theme", ".search input"):
        expect(phone.locator(name)).to_be_visible()
    phone.locator("#theme").tap()
    settings.tap()
    expect(phone.locator("#findings")).to_be_hidden()
    phone.keyboard.press("/")
    expect(phone.locator(".search input")).to_be_focused()
