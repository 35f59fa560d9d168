"""Accessibility: axe-core reports no violation on any page, in both themes, at desktop and phone size."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from manyheads.viewer.server import Server
from tests.integration.viewer.pages import a_map, in_a_browser, loaded, opened, token_shown

pytestmark = in_a_browser

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PAGES = {
    "overview": "#page=overview",
    "head": "#page=head&pin=5,3",
    "compare": "#page=head&second=0,0,1",
    "text": "#page=text&token=3",
    "lines": "#page=lines&token=3",
}


def violations(page: Page) -> str:
    """Return axe-core's report, empty if it found nothing."""
    results = Axe().run(page, options={"runOnly": RULES})
    assert results.response["passes"], "axe-core checked nothing"
    return "" if results.violations_count == 0 else results.generate_report()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_axe_finds_nothing(
    page: Page, served: list[Server], name: str, theme: str, size: tuple[int, int]
) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    opened(page, served, a_map(7), at=f"{PAGES[name]}&theme={theme}")
    loaded(page)
    if name in ("text", "lines"):
        token_shown(page, 3)
    assert not violations(page), violations(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert not violations(page), violations(page)


def test_axe_finds_an_unlabelled_button(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(7))
    page.evaluate("() => document.querySelector('main').append(document.createElement('button'))")
    assert "button-name" in violations(page)
