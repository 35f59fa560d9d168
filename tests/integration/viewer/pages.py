"""What tests of the viewer's pages share: maps to show, and how to open, wait, point and read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import manyheads as mh
from manyheads.viewer.api import Api
from manyheads.viewer.server import Server
from tests.chromium import CHROMIUM, MISSING, wait_until_painted
from tests.waiting import HANG

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "<script>alert(1)</script>", "&amp;", "dog"]

# What the note below a matrix has when its tiles, numbers, scan, tokens and description have arrived.
LOADED = "".join(
    f'[data-{name}="{value}"]'
    for name, value in {
        "missing": 0,
        "unwritten": 0,
        "complete": "true",
        "labelled": "true",
        "described": "true",
    }.items()
)

in_a_browser = [
    pytest.mark.full,
    pytest.mark.flaky(reruns=1),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
]


def a_map(t: int, heads: int = 2, mask: mh.Mask | None = None) -> mh.AttentionMap:
    torch.manual_seed(t)
    q, k = (torch.randn(1, heads, t, 16) for _ in range(2))
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal() if mask is None else mask)[1]
    return amap.labelled([WORDS[n % len(WORDS)] for n in range(t)])


def new_page(browser: Browser, **options: Any) -> Page:
    """Return a page in a context of its own, which waits until only a hang takes longer."""
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * HANG)
    mark_errors(page)
    return page


def mark_errors(page: Page) -> None:
    """Let pages opened from now on have the message of an error of their scripts, for `started`."""
    page.add_init_script("""
        const mark = (error) => (document.documentElement.dataset.error ??= error);
        addEventListener("error", (event) => event instanceof ErrorEvent && mark(event.message));
        addEventListener("unhandledrejection", (event) => mark(event.reason));
    """)


def started(page: Page) -> None:
    """Wait until the page has started; fail at once if its script fails."""
    page.wait_for_selector("nav, [data-error]", state="attached")
    error = page.locator("html").get_attribute("data-error")
    if error is not None:
        pytest.fail(f"The page's script fails: {error}")


def collect_errors(page: Page) -> list[str]:
    """Return a list to which the page's errors and dialogs are added."""
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
    return wrong


def keep_messages(page: Page) -> None:
    """Let pages opened from now on show a message until something hides it, not for some seconds."""
    page.add_init_script(
        "const start = setTimeout; window.setTimeout = (f, time = 0) => (time < 4000 ? start(f, time) : 0);"
    )


def opened(page: Page, served: list[Server], *maps: mh.AttentionMap, at: str = "") -> str:
    """Open maps at a place in the viewer and return its address without the token."""
    served.append(Server(Api(*maps)))
    page.goto(served[-1].url + at)
    started(page)
    return served[-1].url.partition("?")[0]


def loaded(page: Page) -> None:
    """Wait until every head in view is scanned and drawn, with all that its layout depends on."""
    started(page)
    wait_until_painted(page)
    panes = page.locator(".pane .note").count()
    expect(page.locator(f".pane .note{LOADED}")).to_have_count(panes)


def token_shown(page: Page, n: int) -> None:
    """Wait until Text or Lines list the weights of a token."""
    aside = page.locator("aside.beside")
    expect(aside).to_have_attribute("data-token", re.compile(rf"\b{n}$"))
    expect(aside.locator("li .value").first).to_be_visible()


def box_of(canvas: Locator) -> Any:
    box = canvas.bounding_box()
    assert box is not None
    return box


def weight(element: Locator) -> float:
    return float(element.get_attribute("data-weight") or "nan")


def has_in_url(page: Page, part: str) -> None:
    """Wait until the page's address has a part, a regular expression."""
    expect(page).to_have_url(re.compile(part))


def pair(reading: Locator) -> tuple[int, int]:
    """Return the query and the key that a reading names."""
    return int(reading.get_attribute("data-query") or -1), int(reading.get_attribute("data-key") or -1)


def area_of(canvas: Locator) -> tuple[float, float, float, float]:
    """Return the left and upper edges of the matrix on the page, its width and its height."""
    box = box_of(canvas)
    left, above, wide, high = map(float, (canvas.get_attribute("data-area") or "").split(","))
    return box["x"] + left, box["y"] + above, wide, high


def hover(page: Page, row: float, col: float) -> tuple[int, int]:
    """Point at a place of the visible matrix and return the query and key that the page names."""
    left, above, wide, high = area_of(page.locator("canvas.map").first)
    page.mouse.move(left + col * wide, above + row * high)
    wait_until_painted(page)
    reading = page.locator(".reading").first
    expect(reading).not_to_have_attribute("data-weight", "")
    return pair(reading)


def exact(page: Page) -> float:
    """Return the exact weight under the pointer, once the page has it."""
    reading = page.locator(".reading").first
    expect(reading).to_have_attribute("data-exact", "true")
    return weight(reading)
