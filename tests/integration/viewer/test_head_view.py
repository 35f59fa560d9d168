"""The view of the head page: zoom, links, contrast, pooling, digits, labels, minimap and comparisons."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, Route, expect

import manyheads as mh
from manyheads.figures.fonts import lacking
from manyheads.viewer import assets
from manyheads.viewer.api import Api
from manyheads.viewer.server import Server
from tests.chromium import wait_until_painted
from tests.integration.viewer.pages import (
    a_map,
    area_of,
    box_of,
    exact,
    has_in_url,
    hover,
    in_a_browser,
    loaded,
    new_page,
    opened,
    pair,
    weight,
)

pytestmark = in_a_browser


NUMBER_OF_QUERIES = """
    ((queries) => queries[1] - queries[0])(document.querySelector(".note").dataset.queries.split(","))
"""


def in_view(note: Locator) -> tuple[range, range]:
    """Return the queries and keys in view."""
    first, last = (
        range(*map(int, (note.get_attribute(f"data-{name}") or "").split(",")))
        for name in ("queries", "keys")
    )
    return first, last


def run_script(page: Page, files: str, body: str, argument: Any = None) -> Any:
    """Return the result of a function's body that uses functions of some scripts."""
    scripts = "\n".join(assets.read(f"{name}.js") for name in files.split())
    return page.evaluate(f"argument => {{ {scripts}\n{body} }}", argument)


@pytest.mark.parametrize(
    ("view", "queries", "keys"),
    [
        ("450.5,430.5,21", range(420, 441), range(440, 461)),
        ("300,480,150", range(405, 555), range(225, 375)),
        ("0,0,50", range(50), range(50)),  # the view stays within the matrix
    ],
)
def test_a_link_shows_the_same_tokens_in_windows_of_any_size(
    browser: Browser, served: list[Server], view: str, queries: range, keys: range
) -> None:
    served.append(Server(Api(a_map(900))))
    for size in ((1280, 800), (1920, 1080), (1024, 900)):
        page = new_page(browser, viewport={"width": size[0], "height": size[1]})
        page.goto(f"{served[-1].url}#page=head&view={view}")
        loaded(page)
        assert in_view(page.locator(".note")) == (queries, keys)
        left, above, wide, high = area_of(page.locator("canvas.map"))
        assert wide == high
        assert left + wide <= size[0]
        assert above + high <= size[1]
        page.close()


def test_zooming_keeps_the_weight_under_the_pointer(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(900), at="#page=head")
    loaded(page)
    left, above, wide, high = area_of(page.locator("canvas.map"))
    page.mouse.move(left + 0.3 * wide, above + 0.6 * high)
    for _ in range(12):
        page.mouse.wheel(0, -200)
    page.wait_for_function(f"() => {NUMBER_OF_QUERIES} < 60")
    loaded(page)
    queries, keys = in_view(page.locator(".note"))
    assert abs(queries.start + 0.6 * len(queries) - 540) < 2
    assert abs(keys.start + 0.3 * len(keys) - 270) < 2
    for _ in range(14):
        page.mouse.wheel(0, 200)
    expect(page.locator(".note")).to_have_attribute("data-queries", "0,900")
    expect(page.locator(".note")).to_have_attribute("data-keys", "0,900")
    page.wait_for_function("() => !location.hash.includes('view=')")  # the whole matrix needs no view


def test_colours_end_at_the_largest_weight_of_the_cells_in_view(page: Page, served: list[Server]) -> None:
    """A tile's larger weights that are out of view must not darken the picture."""
    q = torch.eye(200)[None, None] * 16
    bias = torch.zeros(200, 200)
    bias[:, 0] = 17.0  # the first key has nearly all weight, in the tile of every view
    amap = mh.attention_with_map(q, q * 0, q, bias=mh.Dense(bias))[1]
    opened(page, served, amap, at="#page=head&view=150,150,20")
    loaded(page)
    note = page.locator(".note")
    expect(note).to_have_attribute("data-level", "0")
    queries, keys = in_view(note)
    largest = float(amap[0, 0, queries.start : queries.stop, keys.start : keys.stop].max())
    assert largest < 1e-6
    assert largest <= float(note.get_attribute("data-top") or "nan") <= 2.51 * largest
    page.keyboard.press("0")
    expect(note).to_have_attribute("data-top", "1")


@pytest.mark.parametrize(("t", "s"), [(5, 30_000), (30_000, 5), (1, 30_000), (300, 30_000)])
def test_few_queries_or_keys_are_not_pooled(page: Page, served: list[Server], t: int, s: int) -> None:
    torch.manual_seed(t)
    q, k = torch.randn(1, 1, t, 16) * 2, torch.randn(1, 1, s, 16)
    amap = mh.attention_with_map(q, k, k)[1]
    opened(page, served, amap, at="#page=head")
    loaded(page)
    note, reading = page.locator(".note"), page.locator(".reading")
    text = note.inner_text()
    found = re.search(r"the largest of ([\d,]+) × ([\d,]+) weights", text)
    assert found is not None
    rows, cols = (int(part.replace(",", "")) for part in found.groups())
    assert (rows if t < s else cols) == 1
    assert (cols if t < s else rows) > 8
    left, above, *_ = area_of(page.locator("canvas.map"))
    for x, y in ((3, 3), (30, 20), (4, 37)):
        page.mouse.move(left + x, above + y)
        wait_until_painted(page)
        expect(reading).not_to_have_attribute("data-weight", "")
        i, j = (int(reading.get_attribute(f"data-{name}") or "") for name in ("query", "key"))
        cell = amap[0, 0, i : i + rows, j : j + cols]
        assert weight(reading) == pytest.approx(float(cell.max()), rel=2e-3, abs=1e-11)


def test_numbers_in_cells_have_only_true_digits(page: Page) -> None:
    rng = np.random.default_rng(0)
    weights = np.concatenate([10 ** rng.uniform(-13, 0, 3_000), rng.uniform(0.99, 1, 100)])
    stored = ((weights * 2**15).astype(np.float16).astype(np.float64) / 2**15).tolist()
    body = "return argument.map((weight) => [2, 3].map((digits) => formatCell(weight, digits, false)));"
    for true, texts in zip(weights, run_script(page, "numbers headpane", body, stored), strict=True):
        for digits, text in zip((2, 3), texts, strict=True):
            if text.startswith("< "):
                assert true < float(text[2:])
                continue
            mantissa, _, exponent = text.partition("e")
            assert len(mantissa.replace(".", "").lstrip("0")) <= (3 if true > 0.99 else digits)
            unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
            assert float(text) > 0
            assert abs(float(text) - true) <= unit  # the last digit is right, up to rounding twice


def test_a_weight_has_one_format_and_doesnt_break(page: Page) -> None:
    short = "return argument.map((weight) => format(weight, 2));"
    assert run_script(page, "numbers", short, [0.9986, 0.99996]) == ["0.999", "1"]
    weights = [1, 0.99987, 0.99996, 0.5, 0.0012, 1.58e-10, 0]
    body = "return argument.map((weight) => format(weight, 4));"
    assert run_script(page, "numbers", body, weights) == [
        "1",
        "0.9999",
        "1",
        "0.5",
        "0.0012",
        "1.58e-10",
        "0",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("whose nephew couldn't, watched the ", "watched the "),  # not "couldn't", from its middle
        ("the cat s", "the cat s"),
        ("read at any length. [", "any length. ["),
        ("antidisestablishmentarian", "antidisestablishmentarian"),
    ],
)
def test_contexts_start_at_a_word(page: Page, text: str, words: str) -> None:
    assert run_script(page, "tokens", "return lastWords(argument, 15);", text) == words


def test_a_cut_name_of_few_letters_is_left_out(page: Page) -> None:
    body = """
        const context = document.createElement("canvas").getContext("2d"), tokens = { whole: () => null };
        return argument.map((width) => labelOf(context, tokens, ["AutoModel"], 0, 0, false, width));
    """
    names = run_script(page, "numbers tokens rulers", body, [30, 50, 200])
    assert names[::2] == ["0", "\u2068AutoModel\u2069 0"]
    assert re.fullmatch("\u2068Auto[Mode]*…\u2069 0", names[1])  # how many letters fit depends on the font


def test_strips_of_compared_heads_have_one_scale(page: Page) -> None:
    body = "return barsOf(argument, [0, 2], 0, 10, 4).map(({ share }) => share);"
    assert run_script(page, "strips", body, [1, 2]) == [0.25, 0.5]


def test_labels_never_overlap_and_the_chosen_one_is_kept(page: Page) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        places = np.sort(rng.uniform(0, 300, 30)).tolist()
        chosen = int(rng.integers(30))
        labels = [
            {"at": at, "size": float(rng.uniform(10, 60)), "isChosen": n == chosen}
            for n, at in enumerate(places)
        ]
        kept = run_script(page, "rulers", "return withoutOverlaps(argument);", labels)
        assert any(label["isChosen"] for label in kept)
        for one, other in itertools.pairwise(kept):
            assert other["at"] - one["at"] >= (one["size"] + other["size"]) / 2 - 1
        free = [x for x in labels if all(abs(x["at"] - y["at"]) > 100 for y in labels if y is not x)]
        assert all(label in kept for label in free)


def test_the_minimap_shows_and_moves_the_view(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(900), at="#page=head")
    loaded(page)
    minimap = page.locator("canvas.minimap")
    expect(minimap).to_be_hidden()
    page.keyboard.press("1")
    expect(minimap).to_be_visible()
    box = minimap.bounding_box()
    assert box is not None
    left, above, *_ = area_of(page.locator("canvas.map"))
    assert box["x"] + box["width"] < left
    assert box["y"] + box["height"] < above
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.75 * box["height"])
    page.mouse.down()
    loaded(page)
    queries, keys = in_view(page.locator(".note"))
    assert abs(sum(keys) / len(keys) - 225) < 12
    assert abs(sum(queries) / len(queries) - 675) < 12
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.9 * box["height"])
    page.mouse.up()
    loaded(page)
    queries, keys = in_view(page.locator(".note"))
    assert abs(sum(keys) / len(keys) - 450) < 12


def test_compared_heads_have_one_scale_and_a_difference(page: Page, served: list[Server]) -> None:
    first, second = a_map(300), a_map(300, mask=mh.Window(left=20, right=0))
    opened(page, served, first, second, at="#page=head&second=1,0,1&view=150,150,30")
    expect(page.locator(".pane")).to_have_count(2)
    loaded(page)
    wait_until_painted(page)  # the largest weight of a pane changes the colours of the other one
    notes = page.locator(".note")
    tops = {notes.nth(n).get_attribute("data-top") for n in range(2)}
    assert len(tops) == 1
    queries, keys = in_view(notes.first)
    part = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
    page.locator("#side-panel").click()
    panels = page.locator(".side-panel")
    expect(panels).to_have_count(2)
    for n in range(2):
        expect(panels.nth(n).locator(".top-keys button").first).to_be_visible()
    largest = max(float(first[0, 0][part].max()), float(second[0, 1][part].max()))
    assert largest * 0.999 <= float(tops.pop() or "nan") <= 2.51 * largest
    page.locator("#show label", has_text="difference").click()
    expect(page.locator(".pane")).to_have_count(1)
    loaded(page)
    expect(page.locator(".pane-title")).to_contain_text("difference: layer 0, head 0 · attention (0)")
    for row, col in ((0.6, 0.55), (0.8, 0.3), (0.9, 0.1)):
        i, j = hover(page, row, col)
        wanted = float(first[0, 0, i, j]) - float(second[0, 1, i, j])
        assert exact(page) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        written = page.locator(".reading").inner_text().replace("−", "-")
        found = re.match(r"difference (\S+) = (\S+)(?: \(masked\))? - (\S+)", written)
        assert found is not None
        weights = [wanted, float(first[0, 0, i, j]), float(second[0, 1, i, j])]
        assert [float(text) for text in found.groups()] == [float(f"{weight:.4g}") for weight in weights]
    has_in_url(page, "show=difference")
    page.mouse.down(), page.mouse.up()
    panels = page.locator(".side-panel")
    for panel, amap, head in ((panels.nth(0), first, 0), (panels.nth(1), second, 1)):
        expect(panel.locator(".panel-name")).to_contain_text(f"layer 0, head {head}")
        expect(panel.locator(".top-keys .value").first).to_have_attribute(
            "data-weight", str(float(amap[0, head, i].max()))
        )


def test_the_side_panel_of_compared_heads(page: Page, served: list[Server]) -> None:
    """It is hidden where it would make the matrices small, until its button or key shows it."""
    maps, matrices = page.locator("canvas.map"), "#page=head&second=0,0,1&pin=41,7"

    def sides() -> list[float]:
        wait_until_painted(page)
        return [area_of(matrix)[2] for matrix in maps.all()]

    page.set_viewport_size({"width": 1920, "height": 1080})
    opened(page, served, a_map(60), at=matrices)
    loaded(page)
    expect(page.locator(".side")).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(page.locator(".side")).to_be_hidden()
    expect(page.locator("#side-panel")).to_have_attribute("aria-pressed", "false")
    first, second = sides()
    assert first == second > 400
    page.keyboard.press("s")
    expect(page.locator(".side")).to_be_visible()
    expect(page.locator("#side-panel")).to_have_attribute("aria-pressed", "true")
    first, second = sides()
    assert first == second
    page.keyboard.press("f")
    expect(page.locator(".side")).to_be_hidden()  # the drawer takes its place
    page.locator("#side-panel").click()
    expect(page.locator(".side")).to_be_visible()
    expect(page.locator(".drawer")).to_be_hidden()
    page.set_viewport_size({"width": 1000, "height": 800})
    expect(page.locator(".side .top-keys button").first).to_be_visible()  # over the second matrix
    page.locator("#side-panel").click()
    expect(page.locator(".side")).to_be_hidden()


def test_heads_of_different_sizes_have_no_difference(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(30), a_map(40), at="#page=head&second=1,0,0&show=difference")
    expect(page.locator(".head-page > .opening")).to_have_text(
        "A difference needs heads of the same size. These have 30 queries × 30 keys and 40 queries × 40 keys."
    )
    for name in ("png", "svg", "pdf"):  # there is no view to save
        expect(page.locator(f"#{name}")).to_be_disabled()
    page.locator("#show label", has_text="both").click()
    expect(page.locator(".pane")).to_have_count(2)
    loaded(page)
    expect(page.locator("#png")).to_be_enabled()


def test_numbers_of_a_colour_bar_of_differences_are_exact(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(30), at="#page=head")
    colors = "new DifferenceColors('00'.repeat(768))"
    labels = f"[0.02, 0.05, 0.1].map((top) => {colors}.ticks(top, 'sqrt').map(({{ label }}) => label))"
    script = page.evaluate("() => fetch('viewer.js').then((response) => response.text())")
    found = page.evaluate(f"() => {{ {script.partition('show(document.body')[0]}; return {labels}; }}")
    assert [ticks[3] for ticks in found] == ["+0.005", "+0.0125", "+0.025"]


def test_the_next_largest_weights_of_a_head(page: Page, served: list[Server]) -> None:
    amap = a_map(700)
    opened(page, served, amap, at="#page=head&view=100,600,40")
    loaded(page)
    wanted = amap[0, 0, 1:].flatten().topk(4)  # query 0 sees a single key
    places = (wanted.indices + 700).tolist()
    for n, (value, place) in enumerate(zip(wanted.values.tolist(), places, strict=True)):
        page.keyboard.press("n")
        expect(page.locator(".note")).to_contain_text(f"weight {n + 1} of this head, in descending order")
        expect(page.locator(".banner")).to_be_hidden()  # it would cover the matrix
        expect(page.locator(".reading")).to_have_attribute("data-query", str(place // 700))
        expect(page.locator(".reading")).to_have_attribute("data-key", str(place % 700))
        assert exact(page) == value
        loaded(page)  # at the end of its way
        queries, keys = in_view(page.locator(".note"))
        assert place // 700 in queries
        assert place % 700 in keys
    page.keyboard.press("]")
    loaded(page)
    page.locator("#next").click()
    best = int(amap[0, 1, 1:].argmax()) + 700
    expect(page.locator(".reading")).to_have_attribute("data-query", str(best // 700))
    assert math.isclose(exact(page), float(amap[0, 1, 1:].max()))


def test_a_jump_shows_the_pinned_weight_in_place_of_the_hovered_one(page: Page, served: list[Server]) -> None:
    amap = a_map(60)
    opened(page, served, amap, at="#page=head")
    reading, panel = page.locator(".reading").first, page.locator(".side-panel h3").first
    jumps = (
        lambda: page.keyboard.press("h"),
        lambda: page.evaluate("() => (location.hash = '#page=head&pin=50,4')"),
        lambda: page.keyboard.press("n"),
    )
    for leave, jump in zip(("o", "", ""), jumps, strict=True):
        page.evaluate("() => (location.hash = '#page=head&pin=40,3')")
        expect(reading).to_have_attribute("data-query", "40")
        loaded(page)
        assert hover(page, 0.3, 0.2) == (18, 11)
        if leave:
            page.keyboard.press(leave)
            expect(page.locator(".card").first).to_be_visible()
        jump()  # the mouse doesn't move
        page.wait_for_function("() => document.querySelector('.reading')?.dataset.query !== '18'")
        i, j = map(int, page.evaluate("() => new URLSearchParams(location.hash).get('pin')").split(","))
        expect(reading).to_have_attribute("data-key", str(j))
        expect(reading).to_have_attribute("data-query", str(i))
        assert exact(page) == float(amap[0, 0, i, j])
        expect(panel).to_contain_text(f"Query {i} ")


def texts_drawn(page: Page) -> list[tuple[str, float, float]]:
    """Return the texts that the canvas draws next, with their places."""
    page.evaluate(
        """() => {
            const draw = CanvasRenderingContext2D.prototype.fillText;
            window.drawn = [];
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
                if (this.canvas.matches(".map")) {
                    const { a, b, c, d, e, f } = this.getTransform(), ratio = devicePixelRatio;
                    window.drawn.push([text, (a * x + c * y + e) / ratio, (b * x + d * y + f) / ratio]);
                }
                return draw.call(this, text, x, y, ...rest);
            };
        }"""
    )
    page.keyboard.press("l")
    loaded(page)
    page.evaluate("() => (window.drawn = [])")
    page.keyboard.press("l")
    loaded(page)
    drawn: list[tuple[str, float, float]] = page.evaluate("() => window.drawn")
    return drawn


def test_numbers_in_cells_are_rounded_once_and_never_cut(page: Page, served: list[Server]) -> None:
    p = 0.894795  # float16 has 0.895, which would be rounded to 0.90
    weights = torch.rand(40, 40)
    weights.fill_diagonal_(0)
    weights = weights * (1 - p) / weights.sum(1, keepdim=True) + p * torch.eye(40)
    q = torch.zeros(1, 1, 40, 8)
    amap = mh.attention_with_map(q, q, q, bias=mh.Dense(weights.log()))[1]
    opened(page, served, amap, at="#page=head&view=12.3,12.4,9")
    loaded(page)
    canvas = page.locator("canvas.map")
    left, above, wide, high = map(float, (canvas.get_attribute("data-area") or "").split(","))
    size = wide / 9
    assert 44 < size < 60
    x0, y0 = 12.3 * size - wide / 2, 12.4 * size - high / 2
    numbers = 0
    for text, x, y in texts_drawn(page):
        if not (left < x < left + wide and above < y < above + high):
            continue
        j, i = (x - left + x0) / size - 0.5, (y - above + y0) / size - 0.5
        assert abs(i - round(i)) + abs(j - round(j)) < 0.02
        i, j = round(i), round(j)
        weight = float(amap[0, 0, i, j])
        assert float(text) == float(f"{weight:.2g}")
        assert left <= x - size / 2 + 1.01
        assert x + size / 2 <= left + wide + 1.01
        assert text == "0.89" or i != j
        numbers += 1
    assert numbers == 64


def test_a_pin_in_pooled_cells_shows_its_own_weight_and_n_zooms_in(page: Page, served: list[Server]) -> None:
    amap = a_map(2_000)
    opened(page, served, amap, at="#page=head&pin=701,333")
    loaded(page)
    note, reading = page.locator(".note"), page.locator(".reading")
    assert int(note.get_attribute("data-level") or 0) > 0
    assert exact(page) == float(amap[0, 0, 701, 333])
    assert pair(reading) == (701, 333)
    assert reading.inner_text().startswith("weight ")
    page.keyboard.press("n")
    best = int(amap[0, 0, 1:].argmax()) + 2_000  # query 0 sees a single key
    expect(note).to_have_attribute("data-level", "0")
    loaded(page)
    assert exact(page) == float(amap[0, 0, 1:].max())
    assert pair(reading) == (best // 2_000, best % 2_000)


def test_the_drawer_takes_the_place_of_the_side_panel(page: Page, served: list[Server]) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    opened(page, served, a_map(60), at="#page=head&pin=41,7")
    loaded(page)
    before = area_of(page.locator("canvas.map"))[2]
    expect(page.locator(".side")).to_be_visible()
    page.keyboard.press("f")
    expect(page.locator(".side")).to_be_hidden()
    expect(page.locator(".drawer")).to_be_visible()
    assert area_of(page.locator("canvas.map"))[2] >= 0.95 * before
    page.keyboard.press("f")
    expect(page.locator(".side")).to_be_visible()


@pytest.mark.parametrize(("mask", "is_masked"), [(mh.Causal(), True), (mh.Full(), False)])
def test_rulers_and_legend_say_what_is_in_view(
    page: Page, served: list[Server], mask: mh.Mask, is_masked: bool
) -> None:
    opened(page, served, a_map(60, mask=mask), at="#page=head&view=30,30,12")
    loaded(page)
    texts = [text for text, *_ in texts_drawn(page)]
    assert ("masked" in texts) == is_masked
    names = [text for text in texts if text.startswith("\u2068")]
    assert "\u2068cat\u2069 31" in names
    assert all(re.search(r"\d+$", name) for name in names)


def test_a_head_that_the_server_evicted_is_scanned_again(page: Page, served: list[Server]) -> None:
    """The largest weights and the coarse cells of a large head come from its scan."""
    opened(page, served, a_map(30_000, heads=1), at="#page=head")
    loaded(page)
    served[0].api._pyramids.clear()
    page.keyboard.press("n")
    expect(page.locator(".banner")).to_contain_text("when the scan of this head is complete")
    expect(page.locator(".pane .note")).to_contain_text("weight 1 of this head, in descending order")
    page.keyboard.press("0")
    expect(page.locator(".pane .note")).to_have_attribute("data-level", "6")
    served[0].api._pyramids.clear()
    page.keyboard.press("+")
    expect(page.locator(".pane .note")).to_have_attribute("data-level", "5")
    loaded(page)
    expect(page.locator(".pane .note")).to_have_attribute("data-sampled", "1")


def test_the_next_largest_weight_is_shown_when_the_scan_is_complete(page: Page, served: list[Server]) -> None:
    """The key isn't lost, and small cells are zoomed in to."""
    held: list[Route] = []
    page.route(re.compile("/scan/"), lambda route: held.append(route), times=1)
    opened(page, served, a_map(400, heads=1), at="#page=head")
    expect(page.locator(".pane .note")).to_have_attribute("data-missing", "0")
    page.keyboard.press("n")
    expect(page.locator(".banner")).to_contain_text("when the scan of this head is complete")
    held[0].continue_()
    expect(page.locator(".pane .note")).to_contain_text("weight 1 of this head, in descending order")
    page.wait_for_url(re.compile("view="))
    _, _, wide, _ = area_of(page.locator("canvas.map"))
    keys = [int(n) for n in (page.locator(".pane .note").get_attribute("data-keys") or "").split(",")]
    assert wide / (keys[1] - keys[0]) >= 14


def test_matrices_of_compared_runs_begin_at_one_height(page: Page, served: list[Server]) -> None:
    """Both names have a part of their text. Figures of different sizes are disabled, to the eye as well."""
    texts = [text.split() for text in ("the cat sat on the mat", "a dog ran home")]
    maps = [
        a_map(len(words)).labelled(mh.TokenizedText(tuple(f" {word}" for word in words))) for words in texts
    ]
    opened(page, served, *maps, at="#page=head")
    loaded(page)
    page.keyboard.press("c")
    expect(page.locator(".pane")).to_have_count(2)
    loaded(page)
    tops = [box_of(canvas)["y"] for canvas in page.locator("canvas.map").all()]
    assert tops[0] == tops[1]
    for title, word in zip(page.locator(".pane-title").all(), ("mat", "dog"), strict=True):
        expect(title).to_contain_text(word)
    expect(page.locator("#svg")).to_be_disabled()
    opacity = page.locator("#svg").evaluate("button => Number(getComputedStyle(button).opacity)")
    assert opacity < 0.8


def test_missing_fonts_are_reported_once(page: Page, served: list[Server]) -> None:
    """U+12345 is cuneiform, for which few machines have a font."""
    tokens = mh.TokenizedText(("a", " \U00012345", " b"))
    if lacking(tokens.text) is None:
        pytest.skip("this machine has a font of cuneiform")
    opened(page, served, a_map(3).labelled(tokens), at="#page=head")
    loaded(page)
    banner = page.locator(".banner")
    expect(banner).to_contain_text("No installed font has the characters drawn as boxes, such as U+12345")
    banner.locator(".dismiss").click()
    page.keyboard.press("x")
    expect(page.locator(".token").first).to_be_visible()
    expect(banner).to_be_hidden()
