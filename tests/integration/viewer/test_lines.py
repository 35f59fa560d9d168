"""The page of lines in a browser: its lines and weights equal the map's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import manyheads as mh
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.integration.viewer.pages import a_map, has_in_url, in_a_browser, loaded, opened, weight
from tests.waiting import wait_until

pytestmark = in_a_browser


def token(page: Page, side: str, n: int) -> Locator:
    return page.locator(f".column.{side} li[data-n='{n}']")


def count_lines(page: Page, expected: int) -> None:
    expect(page.locator(".board .note")).to_have_attribute("data-lines", str(expected))


def listed(page: Page) -> list[tuple[int, int, float]]:
    """Return head, token and weight of every line of the list."""
    values = page.locator("aside.beside li .value").all()
    return [
        (int(x.get_attribute("data-head") or -1), int(x.get_attribute("data-n") or -1), weight(x))
        for x in values
    ]


def largest(weights: torch.Tensor, heads: list[int], first: int = 0) -> list[tuple[int, int, float]]:
    """Return head, token and weight of the twelve largest of `[h, n]`, of tokens from `first` on."""
    rows = [
        (heads[h], first + n, float(weights[h, n]))
        for h in range(weights.shape[0])
        for n in range(weights.shape[1])
        if weights[h, n] > 0
    ]
    return sorted(rows, key=lambda row: -row[2])[:12]


def assert_listed(page: Page, expected: list[tuple[int, int, float]]) -> None:
    expect(page.locator("aside.beside li .value")).to_have_count(len(expected))
    expect(page.locator(".board .note")).to_have_attribute("data-lines", re.compile(r"\d"))
    found = listed(page)
    assert [x[:2] for x in found] == [x[:2] for x in expected]
    assert [x[2] for x in found] == pytest.approx([x[2] for x in expected], rel=1e-6)


def test_lines_are_the_weights_of_the_chosen_heads(page: Page, served: list[Server]) -> None:
    amap = a_map(30, heads=3)
    opened(page, served, amap, at="#page=lines&least=0.1")
    count_lines(page, int((amap[0] >= 0.1).sum()))
    token(page, "query", 20).hover()
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "query 20")
    assert_listed(page, largest(amap[0, :, 20], [0, 1, 2]))
    token(page, "key", 4).hover()
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "key 4")
    assert_listed(page, largest(amap[0, :, :, 4], [0, 1, 2]))
    page.locator("select[aria-label='least weight']").select_option("0.5")
    count_lines(page, int((amap[0] >= 0.5).sum()))
    has_in_url(page, "least=0.5")


def test_the_number_of_lines_is_that_of_the_token_that_is_shown(page: Page, served: list[Server]) -> None:
    amap = a_map(30)
    drawn = amap.dense()[0] >= 0.1
    opened(page, served, amap, at="#page=lines&least=0.1&token=9")
    note, total = page.locator(".board .note"), int(drawn.sum())
    expect(note).to_have_text(f"{int(drawn[:, 9].sum())} of {total} lines: weights of at least 0.1")
    page.keyboard.press("Escape")
    expect(note).to_have_text(f"{total} lines: weights of at least 0.1")


def test_heads_are_chosen_by_chips(page: Page, served: list[Server]) -> None:
    amap = a_map(30, heads=4)
    opened(page, served, amap, at="#page=lines&least=0.1")
    per_head = [int((amap[0, head] >= 0.1).sum()) for head in range(4)]
    assert len({sum(per_head), sum(per_head) - per_head[2], per_head[1], per_head[3]}) == 4
    chip = page.locator(".chip")
    count_lines(page, sum(per_head))
    chip.nth(2).click()  # hides it
    count_lines(page, sum(per_head) - per_head[2])
    has_in_url(page, "heads=0,1,3")
    chip.nth(1).dblclick()  # shows only this head
    count_lines(page, per_head[1])
    page.wait_for_url(re.compile(r"heads=1(&|$)"))
    chip.nth(3).click(modifiers=["Alt"])
    count_lines(page, per_head[3])
    expect(page.locator(".chip[aria-pressed=true]")).to_have_text("3")
    page.locator(".chip-none").click()
    count_lines(page, 0)
    expect(page.locator(".board .note")).to_have_text("no head is chosen")
    page.locator(".chip-all").click()
    count_lines(page, sum(per_head))


def test_a_line_leads_from_its_query_to_its_key_in_the_colour_of_its_head(
    page: Page, served: list[Server]
) -> None:
    """Two heads with one weight of 1 for each query: to the previous token and to the one before that."""
    t, q = 8, torch.zeros(1, 2, 8, 8)
    bias = torch.full((1, 2, t, t), -torch.inf)
    for head in range(2):
        for i in range(t):
            bias[0, head, i, max(0, i - 1 - head)] = 0.0
    amap = mh.attention_with_map(q, q, q, bias=mh.Dense(bias))[1].labelled([*"abcdefgh"])
    opened(page, served, amap, at="#page=lines&theme=light")
    count_lines(page, 16)
    colour = """([i, j]) => {
        const canvas = document.querySelector('canvas.all-lines'), ratio = canvas.width / canvas.clientWidth;
        const row = canvas.clientHeight / 8, x = canvas.width / 2, y = ((i + j) / 2 + 0.5) * row * ratio;
        const found = new Set();
        for (let dy = -6; dy <= 6; dy++) {
          const [r, g, b, a] = canvas.getContext('2d').getImageData(x, Math.round(y + dy), 1, 1).data;
          if (a > 200) found.add([r, g, b].map((n) => Math.round(n / 8)).join());
        }
        return [...found];
    }"""

    def is_drawn(rgb: tuple[int, int, int], i: int, j: int) -> bool:
        wanted = [round(n / 8) for n in rgb]
        found: list[Any] = page.evaluate(colour, [i, j])
        return any(
            all(abs(int(a) - b) <= 2 for a, b in zip(each.split(","), wanted, strict=True)) for each in found
        )

    blue, orange = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
    for i in (3, 6):
        assert is_drawn(blue, i, i - 1)
        assert is_drawn(orange, i, i - 2)
        assert not is_drawn(orange, i, i - 1)
    page.locator(".chip").nth(0).click()
    count_lines(page, 8)
    assert not is_drawn(blue, 3, 2)
    assert is_drawn(orange, 3, 1)


def test_a_span_of_a_long_text(page: Page, served: list[Server]) -> None:
    amap = a_map(3_000)
    opened(page, served, amap, at="#page=lines&token=2000&length=100&least=0.01")
    expect(token(page, "query", 2000)).to_have_class(re.compile("selected"))
    expect(page.locator(".column.key li")).to_have_count(100)
    start = int(page.locator(".column.key li").first.get_attribute("data-n") or -1)
    assert start < 2000 < start + 100
    count_lines(page, int((amap[0, :, start : start + 100, start : start + 100] >= 0.01).sum()))
    row = amap[0, :, 2000, start : start + 100]
    assert_listed(page, largest(row, [0, 1], start))
    share = round(100 * float(row.sum(-1).mean()))
    expect(page.locator("aside.beside")).to_contain_text(f"{share} % of its weight")
    page.get_by_label("next tokens").click()
    expect(page.locator(".column.key li").first).to_have_attribute("data-n", str(start + 100))
    page.get_by_label("first token").fill("7")
    page.keyboard.press("Enter")
    expect(page.locator(".column.query li").first).to_have_attribute("data-n", "7")
    count_lines(page, int((amap[0, :, 7:107, 7:107] >= 0.01).sum()))


def test_few_queries_and_cross_attention(page: Page, served: list[Server]) -> None:
    """The queries of a step are the last tokens; those of cross-attention have numbers only."""
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 90, 8)
    step = mh.attention_with_map(q, k, k, mask=mh.Causal())[1].labelled([f"w{n}" for n in range(90)])
    opened(page, served, step, at="#page=lines&length=50&token=88")
    expect(page.locator(".column.query li")).to_have_count(4)
    expect(token(page, "query", 2)).to_have_text("w8888")  # the label w88, and its position
    keys = page.locator(".column.key li")
    start = int(keys.first.get_attribute("data-n") or -1)
    assert start == 40
    assert_listed(page, largest(step[0, :, 2, 40:90], [0, 1], 40))
    cross = mh.attention_with_map(q, k, k)[1].labelled([f"w{n}" for n in range(90)])
    opened(page, served, cross, at="#page=lines&length=50")
    expect(token(page, "query", 3)).to_contain_text("query 3")
    token(page, "query", 3).click()
    expect(token(page, "query", 3)).to_have_class(re.compile("selected"))
    assert_listed(page, largest(cross[0, :, 3, :50], [0, 1]))
    token(page, "key", 49).click()
    assert_listed(page, largest(cross[0, :, :, 49], [0, 1]))


def test_tokens_are_reached_by_the_keyboard(page: Page, served: list[Server]) -> None:
    amap = a_map(20)
    opened(page, served, amap, at="#page=lines")
    count_lines(page, int((amap[0] >= 0.02).sum()))
    token(page, "query", 0).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "End"):
        page.keyboard.press(key)
    expect(token(page, "key", 19)).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(token(page, "query", 19)).to_be_focused()
    assert_listed(page, largest(amap[0, :, 19], [0, 1]))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("token=19"))
    expect(token(page, "query", 19)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    expect(page.locator(".column li.selected")).to_have_count(0)


def test_tokens_read_as_in_the_text(page: Page, served: list[Server]) -> None:
    text = mh.TokenizedText(("[CLS]", "The", " sta", "tion", " 机", "", " السلام", "\n"), (0,))
    amap = a_map(8).labelled(text)
    opened(page, served, amap, at="#page=lines")
    expect(page.locator(".column.key li")).to_have_count(8)
    labels = [item.inner_text() for item in page.locator(".column.key .label").all()]
    assert labels == ["[CLS]", "The", "sta", "tion", "机", "part 2 of 2", "السلام", "⏎"]
    expect(token(page, "key", 5)).to_have_attribute("title", "part 2 of 2 of “机”")
    expect(token(page, "key", 5)).to_have_attribute("aria-label", "机, part 2 of 2, 5")
    expect(token(page, "key", 3)).to_have_attribute("title", "a piece of “station”")
    for n, name in ((0, "special"), (3, "joined"), (5, "shared")):
        assert name in (token(page, "query", n).get_attribute("class") or "")
        assert name not in (token(page, "query", 1).get_attribute("class") or "")


def test_a_column_that_begins_within_a_character_names_it(page: Page, served: list[Server]) -> None:
    pieces = tuple(piece for _ in range(20) for piece in ("机", "", "", "x"))
    opened(page, served, a_map(80).labelled(mh.TokenizedText(pieces)), at="#page=lines&length=25&start=5")
    expect(page.locator(".column.key li")).to_have_count(25)
    labels = [item.inner_text() for item in page.locator(".column.key .label").all()]
    assert labels[:7] == ["机 part 2 of 3", "part 3 of 3", "x", "机", "part 2 of 3", "part 3 of 3", "x"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_two_of_32_heads_look_alike(page: Page, served: list[Server], theme: str) -> None:
    """The colour and the dashes of a head are those of its chip, of its swatch and of its line."""
    amap = a_map(12, heads=32)
    opened(page, served, amap, at=f"#page=lines&theme={theme}&token=1")
    count_lines(page, int((amap[0] >= 0.02).sum()))
    looks = [
        (chip.evaluate("chip => chip.style.getPropertyValue('--chip')"), dashes(chip))
        for chip in page.locator(".chip").all()
    ]
    assert len(set(looks)) == len(looks) == 32
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "query 1")
    for row in page.locator("aside.beside .by-head li:not(.muted)").all():
        head = int(row.locator(".value").get_attribute("data-head") or -1)
        assert dashes(row) == looks[head][1]
    drawn = page.evaluate(
        """() => {
            const used = [], { setLineDash } = CanvasRenderingContext2D.prototype;
            CanvasRenderingContext2D.prototype.setLineDash = function (dashes) {
              used.push(`${this.strokeStyle} ${dashes.join(" ")}`);
              setLineDash.call(this, dashes);
            };
            document.querySelector(".column.query li:nth-child(5)").focus();
            return used;
        }"""
    )
    expected = [f"{color} {'' if pattern == 'none' else pattern}" for color, pattern in looks]
    assert [look.strip() for look in drawn] == [look.strip() for look in expected]


def dashes(element: Locator) -> str:
    return element.locator(".line-sample line").get_attribute("stroke-dasharray") or ""


@pytest.mark.parametrize("folder", [False, True])
def test_an_exported_page_has_the_lines(page: Page, tmp_path: Path, folder: bool) -> None:
    amap, options = a_map(300), {"full": True, "budget": 1e5} if folder else {}
    plan = plan_export(Api(amap), tmp_path / "page.html", heads=[1], **options)
    assert plan.has_folder == folder
    plan.write()
    page.goto(f"file://{tmp_path}/page.html#page=lines&length=100&token=270&least=0.05")
    expect(token(page, "query", 270)).to_have_class(re.compile("selected"))
    start = int(page.locator(".column.key li").first.get_attribute("data-n") or -1)
    expected = largest(amap[0, 1:, 270, start : start + 100], [0], start)[:5]
    expect(page.locator("aside.beside li .value").first).to_be_visible()
    assert [x[1] for x in listed(page)[:5]] == [x[1] for x in expected]
    assert [x[2] for x in listed(page)[:5]] == pytest.approx([x[2] for x in expected], rel=2**-11)


def test_a_page_of_pooled_cells_says_that_it_has_no_lines(page: Page, tmp_path: Path) -> None:
    plan_export(Api(a_map(2_000, heads=1)), tmp_path / "page.html", budget=2e6).write()
    page.goto(f"file://{tmp_path}/page.html#page=lines")
    reason = "This file has cells of at least 4 × 4 weights, not single weights."
    expect(page.locator(".board .note")).to_contain_text(reason)
    page.keyboard.press("w")
    token(page, "query", 7).click()
    expect(page.locator(".pair-panel")).to_contain_text(reason)
    aside = page.locator("aside.beside")
    expect(aside).to_contain_text(reason)
    expect(aside).not_to_contain_text("masked, 0 or NaN")
    page.mouse.move(2, 2)  # otherwise the text would show the token below the pointer
    page.keyboard.press("x")
    expect(aside).to_have_attribute("data-token", "7")
    expect(aside).to_contain_text(reason)
    expect(aside).not_to_contain_text("Loading")
    expect(page.locator(".banner")).to_be_hidden()
    page.keyboard.press("h")
    loaded(page)
    page.mouse.move(500, 500)
    page.locator("#pair").click()  # close the drawer, which takes the panel's place
    panel = page.locator(".side-panel")
    expect(panel).to_be_visible()
    expect(panel).to_contain_text(reason)
    for part in (".profile", ".top-keys", ".why"):
        expect(panel.locator(part)).to_be_hidden()


def test_lines_open_at_the_top_after_a_long_text(page: Page, served: list[Server]) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3000, 8)
    amap = mh.attention_with_map(q, k, k)[1]
    opened(page, served, amap, at="#page=text")
    wait_until(lambda: page.evaluate("document.querySelector('main').scrollTop") > 0)  # to the last token
    page.locator("#page-lines").click()
    expect(page.locator(".column .label").first).to_be_in_viewport()
