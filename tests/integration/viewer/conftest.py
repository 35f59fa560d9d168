"""A browser for the tests of the viewer, its pages and servers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from manyheads.viewer.api import Api
from manyheads.viewer.server import Server
from tests.chromium import launched
from tests.integration.viewer.pages import collect_errors, mark_errors
from tests.waiting import HANG


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A browser for all tests of this folder; after them, Playwright's event loop must not run on."""
    with launched() as browser:
        yield browser


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
    page = context.new_page()
    wrong = collect_errors(page)
    mark_errors(page)
    yield page
    context.close()
    assert wrong == []


@pytest.fixture(autouse=True)
def slow_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MANYHEADS_SLOW_VIEWER=SECONDS, delay responses at random by up to so long.

    It finds tests and pages that rely on a response being there when they look.
    """
    longest, respond = float(os.environ.get("MANYHEADS_SLOW_VIEWER", 0)), Api.request
    if not longest:
        return

    def respond_later(api: Api, address: str) -> Future[Any]:
        response, later = respond(api, address), Future[Any]()

        def finish() -> None:
            if not later.set_running_or_notify_cancel():
                return
            if response.cancelled():
                later.set_exception(RuntimeError("The request was cancelled."))
            elif error := response.exception():
                later.set_exception(error)
            else:
                later.set_result(response.result())

        response.add_done_callback(lambda _: threading.Timer(random.uniform(0, longest), finish).start())
        later.add_done_callback(lambda _: response.cancel())
        return later

    monkeypatch.setattr(Api, "request", respond_later)
