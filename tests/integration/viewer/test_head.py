"""The page of a head in a browser: its weights equal the map's, at 7, 2,000 and 100,000 tokens."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import Browser, Page, Route, expect

import manyheads as mh
from manyheads.viewer.server import Server
from tests.integration.viewer.pages import (
    a_map,
    area_of,
    box_of,
    exact,
    has_in_url,
    hover,
    in_a_browser,
    keep_messages,
    loaded,
    new_page,
    opened,
    pair,
    weight,
)

pytestmark = in_a_browser


@pytest.mark.parametrize("length", [7, 2_000])
def test_weights_equal_the_map_at_every_zoom(page: Page, served: list[Server], length: int) -> None:
    amap = a_map(length)
    opened(page, served, amap)
    expect(page.locator(".card")).to_have_count(2)
    page.locator(".card").nth(1).click()
    loaded(page)
    has_in_url(page, "head=1")
    page.keyboard.press("1")  # single weights
    loaded(page)
    expect(page.locator(".note").first).to_have_attribute("data-level", "0")
    for row, col in ((0.5, 0.42), (0.7, 0.5), (0.8, 0.46)):
        i, j = hover(page, row, col)
        if j > i:
            expect(page.locator(".value").first).to_have_text("masked")
            continue
        assert exact(page) == float(amap[0, 1, i, j])
        assert f"“\u2068{amap.tokens[i]}\u2069”" in page.locator(".reading").first.inner_text()  # type: ignore[index]
    page.keyboard.press("[")
    loaded(page)
    expect(page).not_to_have_url(re.compile("head=1"))
    i, j = hover(page, 0.71, 0.41)
    assert exact(page) == float(amap[0, 0, i, j])


def test_a_hundred_thousand_tokens_at_every_zoom(page: Page, served: list[Server]) -> None:
    q, k = (torch.randn(1, 1, 100_000, 8) for _ in range(2))
    window = mh.Window(left=4_000, right=0)
    amap = mh.attention_with_map(q, k, k, mask=window)[1].labelled([f"w{n}" for n in range(100_000)])
    held: list[Route] = []  # the request that starts the scan: until then tiles are sampled
    page.route(re.compile("/scan/"), lambda request: held.append(request), times=1)
    opened(page, served, amap, at="#page=head&view=50000,60000,92000")
    expect(page.locator(".note").first).to_contain_text("estimated from 1 query in 512")
    held[0].continue_()
    loaded(page)
    pooled = "pooled: each cell shows the largest of 256 × 256 weights"
    expect(page.locator(".note").first).to_contain_text(pooled)
    page.keyboard.press("0")
    transition = "document.querySelector('canvas.map').__transition"  # d3's, to the whole matrix
    page.wait_for_function(f"() => !{transition}")
    for press in ("m", "+", "+", "+", "+"):
        page.keyboard.press(press)
        loaded(page)
        i, j = hover(page, 0.51, 0.5)
        level = int(page.locator(".note").first.get_attribute("data-level") or -1)
        reading = page.locator(".reading").first
        shown = weight(reading)
        side = 1 << level
        cell = amap[0, 0, i : i + side, j : j + side]
        wanted = float(cell.mean()) if "mean" in reading.inner_text() else float(cell.max())
        if shown == shown:
            assert shown == pytest.approx(wanted, rel=2e-3, abs=1e-9)
    page.goto(re.sub("#.*", "", page.url) + "#page=head&view=50000.5,50010.5,9")
    expect(page.locator(".note").first).to_have_attribute("data-level", "0")
    loaded(page)
    i, j = hover(page, 0.5, 0.5)
    assert abs(i - 50_010) < 12
    assert abs(j - 50_000) < 12
    if j <= i:
        assert exact(page) == float(amap[0, 0, i, j])
    page.locator("#page-text").click()
    page.locator("input[type=number]").fill("70000")
    page.keyboard.press("Enter")
    expect(page.locator("aside")).to_have_attribute("data-token", "70000")
    best = amap[0, 0, 70_000].topk(1)
    first = page.locator("aside li .value").first
    assert weight(first) == pytest.approx(float(best.values[0]), rel=1e-6)


def test_a_link_restores_the_view(page: Page, served: list[Server]) -> None:
    amap = a_map(900)
    opened(page, served, amap, at="#page=head&scale=log&pooling=mean&theme=dark")
    loaded(page)
    page.keyboard.press("+")
    page.keyboard.press("ArrowDown")
    loaded(page)
    hover(page, 0.6, 0.5)
    page.mouse.down(), page.mouse.up()  # pins the crosshair
    page.mouse.move(5, 5)
    expect(page.locator(".reading").first).to_have_attribute("data-exact", "true")
    page.wait_for_url(re.compile("pin="))
    loaded(page)
    has_in_url(page, "view=.*pin=")
    link, text = page.url, page.locator(".reading").first.inner_text()
    note = page.locator(".note")
    drawn = {name: note.get_attribute(f"data-{name}") for name in ("level", "queries", "keys", "top")}
    page.goto("about:blank")
    page.goto(link)
    loaded(page)
    expect(page.locator(".reading").first).to_have_text(text)
    assert drawn == {name: note.get_attribute(f"data-{name}") for name in drawn}
    expect(page).to_have_url(link)


def test_two_heads_and_two_runs_zoom_together(page: Page, served: list[Server]) -> None:
    one, other = a_map(300), a_map(300, mask=mh.Window(left=20, right=0))
    opened(page, served, one, other, at="#page=head")
    page.locator("#compare").click()
    expect(page.locator(".pane")).to_have_count(2)
    loaded(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    loaded(page)
    box = box_of(page.locator("canvas.map").nth(1))
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.6 * box["height"])
    readings = page.locator(".reading")
    expect(readings.nth(1)).to_have_attribute("data-query", re.compile(r"\d"))
    i, j = pair(readings.nth(1))
    assert pair(readings.nth(0)) == (i, j)
    for n in range(2):
        expect(readings.nth(n)).to_have_attribute("data-exact", "true")
    for n, amap in enumerate((one, other)):
        text = readings.nth(n).get_attribute("data-weight") or ""
        assert text == "NaN" or float(text) == float(amap[0, 0, i, j])
    page.locator("#theme").click()
    expect(page.locator(".manyheads")).to_have_attribute("data-theme", "dark")


def test_a_pinned_weight_out_of_view_is_shown(page: Page, served: list[Server]) -> None:
    amap = a_map(2_000)
    opened(page, served, amap, at="#page=head&view=1800,1900,12&pin=700,300")
    for head in range(2):
        loaded(page)
        assert exact(page) == float(amap[0, head, 700, 300])
        page.keyboard.press("]")
        expect(page.locator(".pane-title")).to_contain_text(f"head {1 - head}")


def test_few_keys_are_drawn_wide_enough_to_point_at(page: Page, served: list[Server]) -> None:
    q, k = torch.randn(1, 1, 5_000, 16), torch.randn(1, 1, 3, 16)
    amap = mh.attention_with_map(q, k, k)[1]
    opened(page, served, amap, at="#page=head")
    loaded(page)
    left, above, *_ = area_of(page.locator("canvas.map"))
    reading = page.locator(".reading")
    for step in range(2, 120, 5):  # pixels beside the rulers, where the matrix is
        page.mouse.move(left + step, above + 200)
        expect(reading).to_have_attribute("data-key", str(step // 40))
    page.keyboard.press("1")
    loaded(page)
    expect(page.locator(".note")).to_have_attribute("data-level", "0")
    page.mouse.move(left + 60, above + 200)
    shown, (i, j) = exact(page), pair(reading)
    assert shown == float(amap[0, 0, i, j])


def test_queries_may_begin_within_a_character_or_have_no_labels(page: Page, served: list[Server]) -> None:
    text = mh.TokenizedText((" sta", "tion", " 机", "", "", " the", " end", "ing"))
    q, k = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 8, 8)
    for mask, named in (
        (mh.Causal(), "query 0 “机” → key 1 “tion” of “station”"),
        (None, "query 0 → key 1 “tion”"),
    ):
        amap = mh.attention_with_map(q, k, k, mask=mask)[1].labelled(text)
        opened(page, served, amap, at="#page=head&pin=0,1")
        loaded(page)
        assert exact(page) == float(amap[0, 0, 0, 1])
        assert named in re.sub("[\u2068\u2069]", "", page.locator(".reading").inner_text())


def test_a_link_with_wrong_values_shows_the_nearest_valid_ones(page: Page, served: list[Server]) -> None:
    wrong = "head=99&layer=-4&run=x&view=a,b,c&pin=1&pooling=sum&batch=7&theme=blue"
    keep_messages(page)
    opened(page, served, a_map(20), at=f"#page=head&{wrong}")
    loaded(page)
    expect(page.locator(".pane-title")).to_have_text("layer 0, head 1 attention")
    expect(page.locator(".banner")).to_contain_text("This link names a run, layer, head and pin")
    expect(page.locator(".banner")).to_be_visible()
    has_in_url(page, "head=1")
    expect(page).not_to_have_url(re.compile("layer=|pin="))


def test_missing_fonts_are_reported_after_the_message_of_a_link(page: Page, served: list[Server]) -> None:
    keep_messages(page)
    amap = a_map(3).labelled(["a", "\U00012345", "b"])  # cuneiform
    opened(page, served, amap, at="#page=head&head=99")
    loaded(page)
    page.wait_for_timeout(700)
    expect(page.locator(".banner")).to_contain_text("This link names a head")
    page.locator(".banner .dismiss").click()
    expect(page.locator(".banner")).to_contain_text("No installed font has the characters")


def test_a_closed_server_is_reported(browser: Browser, served: list[Server]) -> None:
    page = new_page(browser)
    opened(page, served, a_map(3_000), at="#page=head")
    loaded(page)
    served.pop().close()
    page.keyboard.press("1")
    expect(page.locator(".banner")).to_contain_text("The viewer doesn't respond")
    page.close()
