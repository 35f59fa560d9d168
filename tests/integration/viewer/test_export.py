"""Images and exported pages in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Download, Page, Route, expect

import manyheads as mh
from manyheads.highlights import format_score
from manyheads.viewer import pictures
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.integration.viewer.pages import (
    a_map,
    box_of,
    hover,
    in_a_browser,
    loaded,
    opened,
    weight,
)

pytestmark = in_a_browser


def test_a_png_waits_for_its_tiles_and_is_sharp(page: Page, served: list[Server], tmp_path: Path) -> None:
    held: list[Route] = []  # the requests for tiles of the zoomed view
    are_held = True

    def hold(route: Route) -> None:
        if are_held and "/tiles/0/0/0/0/" in route.request.url:
            held.append(route)
        else:
            route.continue_()

    page.route(re.compile("/data/tiles/"), hold)
    opened(page, served, a_map(600), at="#page=head&theme=light")
    page.keyboard.press("1")
    page.keyboard.press("p")
    expect(page.locator(".banner")).to_contain_text("saved when its tiles are loaded")
    downloads: list[Download] = []
    page.on("download", lambda download: downloads.append(download))
    assert downloads == []
    are_held = False
    with page.expect_download() as waiting:
        for route in held:
            route.continue_()
    assert waiting.value.suggested_filename == "layer-0-head-0.png"
    waiting.value.save_as(tmp_path / "head.png")
    image = Image.open(tmp_path / "head.png").convert("RGB")
    box = box_of(page.locator("canvas.map"))
    assert image.width == round(2 * (box["width"] + 28))
    assert image.height > 2 * box["height"]
    # The matrix is that of the page, at twice the resolution: what is loaded is the same.
    top = image.height - 2 * (box["height"] + 14)
    colors = {
        color for _, color in image.crop((300, int(top), 900, image.height - 100)).getcolors(10**6) or ()
    }
    assert len(colors) > 50
    loading = (243, 245, 247)  # the colour of tiles that aren't loaded
    pixels = np.asarray(image)
    assert (pixels == loading).all(-1).mean() < 0.01


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_png_has_no_blank_band_below_its_title(
    page: Page, served: list[Server], tmp_path: Path, theme: str
) -> None:
    opened(page, served, a_map(9).labelled(list("abcdefghi")), at=f"#page=head&theme={theme}")
    loaded(page)
    with page.expect_download() as waiting:
        page.locator("#png").click()
    waiting.value.save_as(tmp_path / "head.png")
    pixels = np.asarray(Image.open(tmp_path / "head.png").convert("RGB")).astype(int)
    is_blank = (np.abs(pixels - pixels[0, 0]).max(-1) < 8).all(1)  # [rows]
    ends = np.flatnonzero(np.diff(is_blank.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert max(stop - start for start, stop in ends if stop < len(pixels) // 2) <= 2 * 24
    assert len(ends) > 3  # the title, model and text, and the rest are apart


def test_the_ticks_of_figures_are_those_of_the_page(page: Page) -> None:
    static = Path(pictures.__file__).parent / "static"
    source = "".join((static / name).read_text("utf-8") for name in ("numbers.js", "colorbar.js"))
    for scale in pictures.SCALES:
        for top in (digit * 10.0**n for digit in (1, 2, 5) for n in range(-9, 0)):
            call = f"colorTicks({top!r}, {scale!r}).map(({{ label }}) => label)"
            shown = page.evaluate(f"(() => {{ {source}; return {call} }})()")
            assert [label for _, label in pictures.color_ticks(top, scale)] == shown


def test_the_scores_of_findings_are_those_of_the_page(page: Page) -> None:
    source = (Path(pictures.__file__).parent / "static/numbers.js").read_text("utf-8")
    values = [0.0, 0.004, 0.7149, *(1 - n * 0.00013 for n in range(80)), 1.0, 1.001, 5.1]
    shown = page.evaluate(f"(values) => {{ {source}; return values.map(twoDecimals) }}", values)
    assert [format_score(value) for value in values] == shown


@pytest.mark.parametrize("format", ["svg", "pdf"])
def test_the_view_is_saved_for_papers(page: Page, served: list[Server], tmp_path: Path, format: str) -> None:
    opened(page, served, a_map(700), at="#page=head&scale=log")
    loaded(page)
    page.keyboard.press("1")
    loaded(page)
    with page.expect_download() as waiting:
        page.locator(f"#{format}").click()
    assert waiting.value.suggested_filename == f"layer-0-head-0.{format}"
    waiting.value.save_as(tmp_path / "head")
    data = (tmp_path / "head").read_bytes()
    if format == "pdf":
        assert data.startswith(b"%PDF")
        return
    note = page.locator(".note").first
    (i0, i1), (j0, j1) = (
        (note.get_attribute(f"data-{axis}") or "").split(",") for axis in ("queries", "keys")
    )
    title = f"queries {int(i0):,} to {int(i1) - 1:,}, keys {int(j0):,} to {int(j1) - 1:,}"
    assert title in re.sub(r"\s+", " ", " ".join(re.findall(r">([^<>]+)</t", data.decode())))
    assert "&lt;script&gt;alert(1)" in data.decode()  # a token, as text
    page.locator("#compare").click()
    loaded(page)
    with page.expect_download() as waiting:
        page.locator("#svg").click()
    waiting.value.save_as(tmp_path / "both")
    both = (tmp_path / "both").read_text("utf-8")
    assert {*re.findall(r">(layer \d, head \d)", both)} == {"layer 0, head 0", "layer 0, head 1"}
    page.locator("#show label", has_text="difference").click()
    loaded(page)
    with page.expect_download() as waiting:
        page.locator("#svg").click()
    waiting.value.save_as(tmp_path / "difference")
    assert "difference: layer 0, head 0" in (tmp_path / "difference").read_text("utf-8")


def test_the_matrices_of_a_compared_png_begin_at_one_height(
    page: Page, served: list[Server], tmp_path: Path
) -> None:
    """The title of one of them takes several lines."""
    long = a_map(9).labelled(mh.TokenizedText((" The station master," * 9, *[""] * 8)))
    opened(page, served, long, a_map(9), at="#page=head&second=1,0,0&theme=light")
    loaded(page)
    with page.expect_download() as waiting:
        page.locator("#png").click()
    waiting.value.save_as(tmp_path / "both.png")
    pixels = np.asarray(Image.open(tmp_path / "both.png").convert("RGB")).astype(int)
    yellow = (abs(pixels - (253, 231, 37)) < 4).all(
        -1
    )  # the largest weight, of query 0 and key 0, and the end of the bar
    half = pixels.shape[1] // 2
    first, second = (np.flatnonzero(side.sum(1) > 20)[0] for side in (yellow[:, :half], yellow[:, half:]))
    assert first == second


@pytest.mark.parametrize("folder", [False, True])
def test_an_exported_page_opens_from_a_disk(page: Page, tmp_path: Path, folder: bool) -> None:
    amap, options = a_map(300), {"full": True, "budget": 1e5} if folder else {}
    plan = plan_export(Api(amap), tmp_path / "page.html", heads=[1], **options)
    assert plan.has_folder == folder
    plan.write()
    page.goto(f"file://{tmp_path}/page.html#page=head")
    loaded(page)
    expect(page.locator("#png")).to_have_attribute("title", re.compile("drawn by the command manyheads view"))
    expect(page.locator("#svg")).to_have_count(0)
    page.keyboard.press("1")
    loaded(page)
    i, j = hover(page, 0.7, 0.45)
    shown = weight(page.locator(".reading").first)
    assert shown == pytest.approx(float(amap[0, 1, i, j]), rel=2**-11 if folder else 1e-7)
    page.keyboard.press("x")
    page.locator(".token[data-token='20']").hover()
    expect(page.locator("aside")).to_have_attribute("data-token", "20")
    first = page.locator("aside li .value").first
    assert weight(first) == pytest.approx(float(amap[0, 1, 20].max()), rel=2**-11)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_a_pooled_page_shows_cells_and_says_so(page: Page, tmp_path: Path, pooling: str) -> None:
    amap = a_map(2_000, heads=1)
    plan = plan_export(Api(amap), tmp_path / "page.html", budget=2e6)
    assert plan.finest == 2
    plan.write()
    page.goto(f"file://{tmp_path}/page.html#page=head&pooling={pooling}&view=1000,1400,99")
    loaded(page)  # the view is limited: a cell is as large as a single weight elsewhere
    note = page.locator(".note").first
    expect(note).to_have_attribute("data-level", "2")
    expect(note).to_contain_text("this file has cells of at least 4 × 4 weights")
    reading = page.locator(".reading").first
    for row, col in ((0.5, 0.42), (0.6, 0.5), (0.9, 0.1)):
        i, j = hover(page, row, col)
        assert (i % 4, j % 4) == (0, 0)
        cell = amap[0, 0, i : i + 4, j : j + 4]
        wanted = cell.mean() if pooling == "mean" else cell.max()
        assert weight(reading) == pytest.approx(float(wanted), rel=1e-3)
        assert "mean weight" in reading.inner_text() or "largest weight" in reading.inner_text()
