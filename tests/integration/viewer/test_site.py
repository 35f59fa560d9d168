"""The documentation: its links, and the viewer's pages that it embeds, which follow the theme of the site.

They need Sphinx: `pip install -c constraints.txt -e '.[docs]'`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.waiting import HANG

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx isn't installed: the extra `docs`"),
]

DOCS = Path(__file__).parents[3] / "docs"
WORDS = re.compile(r"^```{viewer} (\w+)", re.M)
EMBEDDING = {
    path.relative_to(DOCS).with_suffix(".html"): names
    for path in DOCS.rglob("*.md")
    if (names := WORDS.findall(path.read_text(encoding="utf-8")))
}


@pytest.fixture(scope="module")
def site(build_once: Callable[..., Path]) -> Path:
    """The site, built as for its readers: the lessons are run, and warnings are errors."""

    def build(folder: Path) -> None:
        options = ["-q", "-W", "-d", folder / "doctrees"]
        command = [sys.executable, "-m", "sphinx", *options, DOCS, folder / "html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, done.stderr

    return build_once("site", build) / "html"


@pytest.mark.parametrize("name", EMBEDDING, ids=str)
def test_embedded_pages_open_and_follow_the_theme(name: Path, site: Path, page: Page) -> None:
    page.goto((site / name).as_uri())
    frames = page.locator("figure.viewer iframe")
    expect(frames).to_have_count(len(EMBEDDING[name]))
    for n in range(len(EMBEDDING[name])):
        frames.nth(n).scroll_into_view_if_needed()
        viewer = frames.nth(n).content_frame
        expect(viewer.locator("nav")).to_be_visible()
        expect(viewer.locator("body")).to_have_attribute("data-theme", "light")
        address = viewer.locator("body").evaluate("() => location.href")
        assert not address.endswith("#"), "the browser scrolls the page to the frame"
    page.locator(".theme-toggle:visible").first.click()
    expect(page.locator("body")).to_have_attribute("data-theme", "dark")
    for n in range(len(EMBEDDING[name])):
        expect(frames.nth(n).content_frame.locator("body")).to_have_attribute("data-theme", "dark")


def test_pages_embed_what_is_exported(site: Path) -> None:
    exported = {path.stem for path in (site / "live").glob("*.html")}
    assert exported == {name for names in EMBEDDING.values() for name in names}


class Anchors(HTMLParser):
    """The anchors of a page, and its links to pages and files."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {name for key in ("id", "name") if (name := values.get(key))}
        self.links += [link for key in ("href", "src") if (link := values.get(key))]


def test_all_internal_links_and_anchors_exist(site: Path) -> None:
    """Those between pages, to their files, and from and to the pages of source code."""
    live = site / "live"  # the viewer's pages, whose fragments are states
    pages = {path: Anchors(path) for path in site.rglob("*.html") if path.parent != live}
    assert site / "_modules" / "manyheads" / "observe" / "recording.html" in pages
    dead = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchor = unquote(address.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append((str(path.relative_to(site)), link))
    assert not dead
