"""The viewer without a pointer: keys reach every page, head, weight and token; focus is visible."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from manyheads.viewer.server import Server
from tests.integration.viewer.pages import (
    a_map,
    exact,
    has_in_url,
    in_a_browser,
    loaded,
    opened,
    pair,
    token_shown,
    weight,
)

pytestmark = in_a_browser

FOCUSED = """() => {
    const element = document.activeElement, visible = (other) => {
        if (!other) return false;
        const { outlineStyle, outlineWidth } = getComputedStyle(other);
        return outlineStyle !== "none" && parseFloat(outlineWidth) >= 1;
    };
    element.number ??= (window.numbers = (window.numbers ?? 0) + 1);
    return {
        number: element.number, name: element.outerHTML.slice(0, 120), body: element === document.body,
        // a hidden radio button shows its focus on its label's text
        visible: visible(element) || visible(element.nextElementSibling),
    };
}"""


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until an element that matches has the focus."""
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab doesn't reach {selector}")


def test_from_the_overview_to_a_weight(page: Page, served: list[Server]) -> None:
    amap = a_map(7)
    opened(page, served, amap)
    expect(page.locator(".card")).to_have_count(2)
    tab_to(page, "[data-place='0/0/0']")
    for _ in range(10):  # cards are reached by Tab, or by arrows in a grid
        if page.evaluate("() => document.activeElement.dataset.place") == "0/0/1":
            break
        page.keyboard.press("ArrowRight")
        if page.evaluate("() => document.activeElement.dataset.place") == "0/0/0":
            page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    loaded(page)
    has_in_url(page, "head=1")
    expect(page.locator("canvas.map")).to_be_focused()
    reading = page.locator(".reading[aria-live=polite]").first
    for key, times in (("ArrowDown", 2), ("ArrowLeft", 1)):
        for _ in range(times):
            page.keyboard.press(f"Shift+{key}")
    expect(reading).to_have_attribute("data-query", "5")  # from the middle, 3 and 3
    expect(reading).to_have_attribute("data-key", "2")
    assert exact(page) == float(amap[0, 1, 5, 2])
    assert f"{float(amap[0, 1, 5, 2]):.3g}"[:4] in reading.inner_text()
    page.keyboard.press("Escape")
    expect(reading).to_have_attribute("data-weight", "")


def test_the_crosshair_stays_in_the_matrix_and_in_view(page: Page, served: list[Server]) -> None:
    amap = a_map(2_000)
    opened(page, served, amap, at="#page=head&head=1&pin=1990,1990&view=1985,1985,20")
    loaded(page)
    for key in ("ArrowRight", "ArrowDown"):
        for _ in range(20):
            page.keyboard.press(f"Shift+{key}")
    reading = page.locator(".reading").first
    expect(reading).to_have_attribute("data-query", "1999")
    expect(reading).to_have_attribute("data-key", "1999")
    loaded(page)
    assert exact(page) == float(amap[0, 1, 1999, 1999])
    for _ in range(30):
        page.keyboard.press("Shift+ArrowLeft")
    expect(reading).to_have_attribute("data-key", "1969")
    assert pair(reading) == (1999, 1969)
    assert exact(page) == float(amap[0, 1, 1999, 1969])
    loaded(page)
    first, last = map(int, (page.locator(".note").first.get_attribute("data-keys") or "").split(","))
    assert 1969 in range(first, last)  # the view followed


def test_pages_heads_and_theme_by_keys(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(7))
    for key, name in (("h", "head"), ("x", "text"), ("o", "overview")):
        page.keyboard.press(key)
        expect(page.locator(f"#page-{name}")).to_have_attribute("aria-current", "page")
    page.keyboard.press("h")
    page.keyboard.press("]")
    expect(page.locator("select.choose-head")).to_have_value("1")
    before = page.locator("[data-theme]").get_attribute("data-theme")
    page.keyboard.press("t")
    expect(page.locator("[data-theme]")).not_to_have_attribute("data-theme", str(before))
    tab_to(page, "select.choose-head")
    page.keyboard.press("ArrowUp")
    expect(page.locator("select.choose-head")).to_have_value("0")
    expect(page.locator("select.choose-head")).to_be_focused()  # it was replaced


def test_the_dialog_returns_the_focus(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(7))
    tab_to(page, "#help")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Help")
    expect(dialog).to_contain_text("the weights of each row sum to 1")
    page.keyboard.press("h")  # shortcuts don't work behind a dialog
    expect(page.locator("#page-overview")).to_have_attribute("aria-current", "page")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("#help")).to_be_focused()


def test_a_token_of_the_text(page: Page, served: list[Server]) -> None:
    amap = a_map(20)
    opened(page, served, amap, at="#page=text&heads=1&token=9")
    aside = page.locator("aside.beside[aria-live=polite]")
    expect(aside).to_have_attribute("data-token", "9")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    expect(aside).to_have_attribute("data-token", "10")
    expect(aside.locator("li .value").first).to_be_visible()
    shown = weight(page.locator("aside.beside li .value").first)
    assert shown == pytest.approx(float(amap[0, 1, 10].max()), rel=1e-5)
    tab_to(page, "aside.beside li button")
    page.keyboard.press("Enter")
    expect(aside).to_have_attribute("data-token", str(int(amap[0, 1, 10].argmax())))


@pytest.mark.parametrize("name", ["overview", "head", "head&second=0,0,1", "text&token=3", "lines&token=3"])
def test_focus_is_visible_and_never_trapped(page: Page, served: list[Server], name: str) -> None:
    opened(page, served, a_map(7), at=f"#page={name}")
    loaded(page)
    if "token=" in name:
        token_shown(page, 3)
    page.locator("#page-overview").focus()  # the first element
    numbers = [page.evaluate(FOCUSED)["number"]]
    for _ in range(150):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["number"] in numbers or focused["body"]:
            break
        numbers.append(focused["number"])
        assert focused["visible"], focused["name"]
    else:
        raise AssertionError("150 presses of Tab don't go around the page")
    assert focused["body"] or focused["number"] == numbers[0], f"the focus returns to {focused['name']}"
    assert len(numbers) > 5
