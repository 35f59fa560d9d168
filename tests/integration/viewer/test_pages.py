"""How tests open pages: a page whose script fails makes them fail at once."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from tests.integration.viewer.pages import in_a_browser, new_page, started

pytestmark = in_a_browser


@pytest.mark.parametrize(
    "script", ["let let = 1;", "throw Error('too bad');", "Promise.reject(Error('too bad'));"]
)
def test_a_page_whose_script_fails_fails_the_test_at_once(browser: Browser, script: str) -> None:
    page = new_page(browser)
    page.goto(f"data:text/html,<p>text</p><script>{script}</script>")
    with pytest.raises(pytest.fail.Exception, match=r"The page's script fails: .*(let|too bad)"):
        started(page)
    page.context.close()
