"""Chromium for the viewer's tests: where it is, its flags, and how tests wait for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Frame, Page, Playwright, expect, sync_playwright

from tests.waiting import HANG

# Chromium without windows needs half the time; it is what Playwright installs for tests.
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
CHROMIUM = os.environ.get("MANYHEADS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "Chromium isn't installed: apt-get install chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
expect.set_options(timeout=1000 * HANG)


_running: list[Playwright] = []  # at most one, because a thread can't start a second one


@contextmanager
def launched() -> Iterator[Browser]:
    """Launch a browser, by the Playwright that is running already if a fixture was left open.

    pytest-rerunfailures forgets the open fixtures of a test that it runs again.
    """
    if _running:
        browser = _running[0].chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
        return
    with sync_playwright() as playwright:
        _running.append(playwright)
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        _running.clear()


def wait_until_painted(page: Page | Frame) -> None:
    """Wait until the effects of keys and pointer are drawn: two animation frames."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
