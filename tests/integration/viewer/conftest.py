"""A browser for the tests of the viewer, its pages and servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from manyheads.viewer.server import Server
from tests.chromium import CHROMIUM, FLAGS
from tests.waiting import HANG


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
