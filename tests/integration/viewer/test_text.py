"""The text page in a browser."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

import manyheads as mh
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.chromium import wait_until_painted
from tests.integration.viewer.pages import (
    a_map,
    box_of,
    has_in_url,
    hover,
    in_a_browser,
    loaded,
    opened,
    token_shown,
    weight,
)

pytestmark = in_a_browser


def test_the_text_shows_the_weights_from_and_to_a_token(page: Page, served: list[Server]) -> None:
    amap = a_map(30)
    opened(page, served, amap, at="#page=text")
    page.locator(".token[data-token='9']").hover()
    expect(page.locator("aside")).to_have_attribute("data-token", "9")
    row, column = amap[0, :, 9].mean(0), amap[0, :, :, 9].mean(0)
    shown = [weight(element) for element in page.locator("aside li .value").all()]
    wanted = [*row.topk(10).values.tolist(), *column.topk(12).values.tolist()]
    assert shown == pytest.approx(wanted, rel=1e-6)
    assert page.locator("svg.lines path").count() > 0
    page.locator(".chip", has_text="1").dblclick()
    page.locator(".token[data-token='9']").hover()
    first = "document.querySelector('aside li .value').dataset.weight"  # of both heads before
    page.wait_for_function(f"wanted => Math.abs({first} / wanted - 1) < 1e-6", arg=float(amap[0, 1, 9].max()))


def test_a_token_is_shown_as_text_and_never_run(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(24), at="#page=text&token=7")
    expect(page.locator("aside[data-token='7'] h2")).to_have_text("<script>alert(1)</script> 7")
    expect(page.locator(".token[data-token='7']")).to_have_text("<script>alert(1)</script>")
    expect(page.locator(".token[data-token='8']")).to_have_text("&amp;")
    page.keyboard.press("h")
    has_in_url(page, "pin=")
    loaded(page)
    hover(page, 0.6, 0.5)


WRITTEN = "She said:  “naïve” السلام عليكم, 机器学习.\n\n\tdef f(x):\n\t\treturn x  # नमस्ते 👩‍👧"
PIECE = re.compile(r"\s*.", re.DOTALL)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_text_reads_as_it_was_written(page: Page, served: list[Server], theme: str) -> None:
    """Tokens of one character, or of several bytes of one, and special tokens, which aren't in the text."""
    pieces = ["[CLS]"]
    for piece in PIECE.findall(WRITTEN):
        pieces += [piece] if piece.isascii() else [piece, ""]
    text = mh.TokenizedText((*pieces, "[SEP]"), (0, len(pieces)))
    assert text.text == WRITTEN
    q, k = (torch.randn(1, 2, len(text), 8) for _ in range(2))
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal())[1].labelled(text)
    opened(page, served, amap, at=f"#page=text&theme={theme}")
    expect(page.locator(".token").first).to_have_attribute("data-mark", "[CLS]")
    assert page.locator(".words").evaluate("words => words.textContent") == WRITTEN
    # A word is one run of letters: there is no space between its pieces, and a hairline.
    place = list(text).index("i")
    before, after = (page.locator(f".token[data-token='{place + n}']") for n in (-1, 0))
    assert "joined" in (after.get_attribute("class") or "")
    left, right = box_of(before), box_of(after)
    assert abs(left["x"] + left["width"] - right["x"]) < 1
    # The tokens of one character have one span; each of them can be chosen.
    place = list(text).index("机")
    page.locator(f".token[data-token='{place}']").click()
    expect(page.locator("aside h2")).to_have_text(f"机 {place}")
    page.locator("aside .shared button").nth(1).click()
    expect(page.locator("aside")).to_have_attribute("data-token", str(place + 1))
    weights = [weight(element) for element in page.locator("aside ol").first.locator(".value").all()]
    assert weights == pytest.approx(amap[0, :, place + 1].mean(0).topk(12).values.tolist(), rel=1e-6)
    page.keyboard.press("h")
    has_in_url(page, "pin=")  # the weight of the selected token
    loaded(page)
    i, j = hover(page, 0.5, 0.4)
    for n in (i, j):
        named = f"“{text[n]}”" if text.word(n) is None else f"“{text[n]}” of “{text.word(n)}”"
        assert named in re.sub("[\u2068\u2069]", "", page.locator(".reading").inner_text())


def test_cross_attention_selects_the_key_of_the_pinned_weight(page: Page, served: list[Server]) -> None:
    q, k = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 9, 8)
    cross = mh.attention_with_map(q, k, k)[1].labelled([*"abcdefghi"])
    opened(page, served, cross, at="#page=head&pin=5,7")
    page.keyboard.press("x")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "7")
    expect(page.locator(".token.selected")).to_have_text("h")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "6")
    page.keyboard.press("b")
    page.locator(".column.query li").nth(5).click()
    page.keyboard.press("x")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "8")  # no key is selected


def test_lines_follow_words_that_move_beside_the_drawer(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(300), at="#page=text&heads=0&token=120")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "120")
    page.keyboard.press("f")
    expect(page.locator(".drawer")).to_be_visible()
    wait_until_painted(page)
    start = """() => {
        const path = document.querySelector(".lines path"), { x, y } = path.getPointAtLength(0);
        const sheet = path.ownerSVGElement.getBoundingClientRect();
        const box = document.querySelector(".token.selected").getBoundingClientRect();
        return [sheet.x + x - box.x - box.width / 2, sheet.y + y + 8 - box.y - box.height / 2];
    }"""
    assert page.evaluate(start) == pytest.approx([0, 0], abs=1)


def test_without_a_chosen_head_the_text_says_so(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(12), at="#page=text&heads=none&token=5")
    aside = page.locator("aside.beside")
    expect(aside).to_have_text(re.compile("No head is chosen.$"))
    page.locator(".chip-all").click()
    expect(aside).to_contain_text("attends to")
    expect(aside).not_to_contain_text("No head is chosen.")


def test_tokens_without_labels_have_numbers(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(12).labelled(None), at="#page=text&token=5")
    aside = page.locator("aside.beside")
    expect(aside.locator("h2")).to_have_text("token 5")
    expect(aside.locator("li button").first).to_have_text(re.compile(r"^token \d+$"))


def test_a_selected_token_of_a_long_text_is_shown_with_the_text_around_it(
    page: Page, served: list[Server]
) -> None:
    """Pages don't begin at multiples of their length, and stay when a token on them is selected."""
    opened(page, served, a_map(9_000), at="#page=text&token=4001")
    tokens, selected = page.locator(".token"), page.locator(".token.selected")

    def shows(first: int, chosen: int | None) -> None:
        expect(tokens.first).to_have_attribute("data-token", str(first))
        expect(tokens).to_have_count(2000)
        if chosen is not None:
            expect(selected).to_have_attribute("data-token", str(chosen))
            expect(selected).to_be_in_viewport()

    shows(3001, 4001)
    page.locator(".token[data-token='4040']").click()
    shows(3001, 4040)
    page.get_by_label("token", exact=True).fill("8999")
    page.keyboard.press("Enter")
    shows(7000, 8999)
    page.get_by_role("button", name="← previous").click()
    shows(5000, None)
    page.locator(".chip").first.click()  # the page stays
    expect(page.locator(".chip").first).to_have_attribute("aria-pressed", "false")
    shows(5000, None)
    page.evaluate("() => location.hash = 'page=text&token=3'")
    shows(0, 3)


def test_a_page_of_a_long_text_begins_with_a_word(page: Page, served: list[Server]) -> None:
    pieces = tuple(piece for _ in range(2000) for piece in (" sta", "tion", " 机", "", ""))
    opened(page, served, a_map(10_000).labelled(mh.TokenizedText(pieces)), at="#page=text&token=5003")
    expect(page.locator(".token").first).to_have_attribute("data-token", "4005")
    expect(page.locator("aside h2")).to_have_text("机 5,003")


def test_a_text_opens_at_its_last_token(page: Page, served: list[Server]) -> None:
    """The first token of a causal model attends to itself only; the last one to the whole text."""
    words = [f" w{n}" for n in range(4_997)]
    amap = a_map(5_000).labelled(mh.TokenizedText(("<s>", *words, " ", "</s>"), (0, 4_999)))
    opened(page, served, amap, at="#page=text&heads=0")
    token_shown(page, 4_997)
    expect(page.locator(".token[data-token='4997']")).to_be_in_viewport()
    expect(page.locator(".token.selected")).to_have_count(1)
    assert "token=" not in page.url  # no token is selected
    page.keyboard.press("[")  # another head
    token_shown(page, 4_997)
    page.locator(".token[data-token='4990']").click()
    token_shown(page, 4_990)
    page.keyboard.press("Escape")
    expect(page.locator(".token[data-token='4990']")).to_be_in_viewport()
    page.locator("button", has_text="previous").click()
    token_shown(page, 1_000)


def test_a_pinned_weight_is_where_a_text_opens(page: Page, served: list[Server]) -> None:
    amap = a_map(5_000)
    opened(page, served, amap, at="#page=text&heads=0&pin=3000,17")
    token_shown(page, 3_000)
    expect(page.locator(".token[data-token='3000']")).to_be_in_viewport()


def test_a_text_with_nan_weights_says_so(page: Page, served: list[Server], tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 12, 8)
    q[0, 1, 5] = math.nan
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal())[1].labelled([f"w{n}" for n in range(12)])
    opened(page, served, amap, at="#page=text&heads=1&token=5")
    expect(page.locator("aside.beside")).to_contain_text("Weights here aren't numbers (NaN).")
    page.locator("#page-head").click()
    page.goto(page.url.partition("#")[0] + "#page=head&head=1&pin=5,3")
    loaded(page)
    expect(page.locator(".reading")).to_contain_text("weight not a number (NaN), or masked")
    expect(page.locator(".habit")).to_have_text("has weights that aren't numbers (NaN)")
    plan_export(Api(amap), tmp_path / "page.html").write()
    page.goto((tmp_path / "page.html").as_uri() + "#page=text&heads=1&token=5")
    expect(page.locator("aside.beside")).to_contain_text("No key has a weight above 0.")
