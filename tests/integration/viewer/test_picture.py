"""The picture beside the matrix of a head, in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import manyheads as mh
from manyheads.patches import pack
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.integration.viewer.pages import a_map, in_a_browser, loaded

pytestmark = in_a_browser

PATCHES = mh.Patches((3, 4), 1, special=("class token",))
PICTURE = np.zeros((60, 80, 3), np.uint8)
PICTURE[:, :40] = (200, 30, 30)


def a_map_of_patches() -> mh.AttentionMap:
    """A class token and 12 patches, of which patch 1, 2 attends mostly to patch 2, 0."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 13, 16), torch.randn(1, 2, 13, 16)
    q[0, :, PATCHES.token(1, 2)] = 3 * k[0, :, PATCHES.token(2, 0)]
    amap = mh.attention_with_map(q, k, k)[1]
    amap.provenance["patches"] = pack([[PATCHES]])
    return amap


def open_picture(page: Page, served: list[Server], picture: object = PICTURE) -> Locator:
    served.append(Server(Api(a_map_of_patches(), picture=picture)))
    page.goto(served[-1].url + "#page=head")
    loaded(page)
    return page.locator("canvas.picture")


def at(canvas: Locator, row: int, col: int) -> dict[str, float]:
    """Return the middle of a patch on the canvas."""
    box = canvas.bounding_box()
    assert box is not None
    return {"x": (col + 0.5) / 4 * box["width"], "y": (row + 0.5) / 3 * box["height"]}


def test_a_patch_under_the_pointer_shows_where_it_looks(page: Page, served: list[Server]) -> None:
    canvas = open_picture(page, served)
    expect(page.locator(".picture-panel .muted")).to_contain_text("hover over a patch")
    canvas.hover(position=at(canvas, 1, 2))
    query = PATCHES.token(1, 2)
    expect(canvas).to_have_attribute("data-query", str(query))
    expect(canvas).to_have_attribute("data-largest", str(2 * 4 + 0))  # patch 2, 0
    expect(page.locator(".picture-panel h3")).to_have_text("What patch 1, 2 attends to")
    expect(page.locator(".reading")).to_have_attribute("data-query", str(query))  # the crosshair follows
    expected = float(a_map_of_patches()[0, 0, query, 1:].sum())
    assert float(canvas.get_attribute("data-sum") or 0) == pytest.approx(expected, abs=1e-4)
    # The brightest patch is that of the largest weight.
    luma = canvas.evaluate(
        """(canvas) => {
          const { width, height } = canvas, context = canvas.getContext("2d");
          return Array.from({ length: 12 }, (_, n) => {
            const x = (n % 4 + 0.3) / 4 * width, y = (Math.floor(n / 4) + 0.3) / 3 * height;
            const [r, g, b] = context.getImageData(x, y, 1, 1).data;
            return 0.299 * r + 0.587 * g + 0.114 * b;
          });
        }"""
    )
    assert int(np.argmax(luma)) == 8


def test_a_pinned_query_is_shown_and_a_click_on_a_patch_pins_it(page: Page, served: list[Server]) -> None:
    canvas = open_picture(page, served)
    canvas.click(position=at(canvas, 2, 3))
    page.mouse.move(5, 5)
    query = PATCHES.token(2, 3)
    expect(canvas).to_have_attribute("data-query", str(query))
    expect(page.locator(".reading")).to_have_attribute("data-key", str(query))
    for _ in range(query):
        page.keyboard.press("Shift+ArrowUp")
    expect(page.locator(".picture-panel h3")).to_have_text("What class token attends to")
    page.keyboard.press("Escape")
    expect(page.locator(".picture-panel h3")).to_have_text("Picture")
    page.keyboard.press("c")  # two heads: no picture
    expect(canvas).to_have_count(0)


def test_without_a_picture_the_patches_are_drawn_alone(page: Page, served: list[Server]) -> None:
    canvas = open_picture(page, served, None)
    canvas.hover(position=at(canvas, 1, 2))
    expect(canvas).to_have_attribute("data-largest", "8")


def test_an_exported_page_shows_the_picture(page: Page, tmp_path: Path) -> None:
    """Its weights are those of the served page, which `AttentionMap.image` returns."""
    path, query = tmp_path / "page.html", PATCHES.token(1, 2)
    plan_export(Api(a_map_of_patches(), picture=PICTURE), path).write()
    page.goto(path.as_uri() + "#page=head")
    loaded(page)
    canvas = page.locator("canvas.picture")
    canvas.hover(position=at(canvas, 1, 2))
    expect(canvas).to_have_attribute("data-query", str(query))
    expect(canvas).to_have_attribute("data-largest", "8")
    expected = float(a_map_of_patches().image(query)[0, 0].sum())
    assert float(canvas.get_attribute("data-sum") or 0) == pytest.approx(expected, abs=1e-4)
    colors = canvas.evaluate(
        "(canvas) => [...canvas.getContext('2d').getImageData(9, 9, 1, 1).data.slice(0, 3)]"
    )
    assert len(set(colors)) > 1  # not the grey of a page without weights and picture


def test_a_pooled_export_shows_the_picture_without_weights(page: Page, tmp_path: Path) -> None:
    patches = mh.Patches((20, 20))
    amap = mh.attention_with_map(*[torch.randn(1, 1, 400, 8)] * 3)[1]
    amap.provenance["patches"] = pack([[patches]])
    path = tmp_path / "page.html"
    plan = plan_export(Api(amap, picture=PICTURE), path, budget=800_000)
    assert plan.finest
    plan.write()
    page.goto(path.as_uri() + "#page=head")
    loaded(page)
    page.locator("canvas.picture").hover()
    expect(page.locator(".picture-panel .muted")).to_contain_text("export with --full")


def test_other_maps_have_no_picture(page: Page, served: list[Server]) -> None:
    served.append(Server(Api(a_map(12))))
    page.goto(served[-1].url + "#page=head")
    loaded(page)
    expect(page.locator("canvas.picture")).to_have_count(0)
