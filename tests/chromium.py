"""Chromium for the viewer's tests: where it is, its flags, and how tests wait for it."""

from __future__ import annotations

import os
import shutil

from playwright.sync_api import Frame, Page, expect

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


def wait_until_painted(page: Page | Frame) -> None:
    """Wait until the effects of keys and pointer are drawn: two animation frames."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
