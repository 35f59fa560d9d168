"""Tokens, the crosshair and heads travel between the pages; findings, pairs and the search."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import manyheads as mh
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from manyheads.viewer.server import Server
from tests.integration.viewer.pages import (
    a_map,
    box_of,
    exact,
    has_in_url,
    hover,
    in_a_browser,
    keep_messages,
    loaded,
    new_page,
    opened,
    weight,
)

pytestmark = in_a_browser


def is_pinned(page: Page, query: int, key: int) -> None:
    has_in_url(page, rf"pin={query},{key}(&|$)")


def test_the_pinned_weight_selects_its_query_in_text_and_lines(page: Page, served: list[Server]) -> None:
    amap = a_map(40, heads=6)
    opened(page, served, amap, at="#page=head&head=5")
    loaded(page)
    i, j = hover(page, 0.7, 0.5)
    page.mouse.down(), page.mouse.up()
    is_pinned(page, i, j)
    page.keyboard.press("x")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", str(i))
    # The text shows the attention of this head, and all heads are a click away.
    expect(page.locator(".chip[aria-pressed=true]")).to_have_text("5")
    first = page.locator("aside.beside li .value").first
    expect(first).to_be_visible()
    assert abs(weight(first) - float(amap[0, 5, i].max())) < 1e-6
    page.locator(".chip-all").click()
    mean = float(amap[0, :, i].mean(0).max())
    page.wait_for_function(
        "wanted => Math.abs(document.querySelector('aside li .value').dataset.weight / wanted - 1) < 1e-5",
        arg=mean,
    )
    page.keyboard.press("b")
    expect(page.locator(".column.query li.selected")).to_have_attribute("data-n", str(i))
    page.keyboard.press("h")
    loaded(page)
    is_pinned(page, i, j)  # nothing else was chosen since


def test_a_token_of_the_text_is_the_row_of_the_crosshair(page: Page, served: list[Server]) -> None:
    """The view, which is far away, moves to it."""
    amap = a_map(2_000)
    opened(page, served, amap, at="#page=head&view=100,100,30&head=1")
    loaded(page)
    page.keyboard.press("x")
    page.locator(".token[data-token='1500']").click()
    page.wait_for_url(re.compile("token=1500"))
    page.keyboard.press("h")
    best = int(amap[0, 1, 1500].argmax())
    is_pinned(page, 1500, best)
    loaded(page)
    assert exact(page) == float(amap[0, 1, 1500, best])
    page.wait_for_url(re.compile(rf"view={best}\.5,1500\.5,"))


def test_a_key_of_lines_is_the_column_of_the_crosshair(page: Page, served: list[Server]) -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8)
    cross = mh.attention_with_map(q, k, k)[1].labelled([*"abcdefghi"])
    opened(page, served, cross, at="#page=lines")
    page.locator(".column.key li").nth(7).click()
    page.wait_for_url(re.compile("token=7.*side=key"))
    page.keyboard.press("h")
    is_pinned(page, int(cross[0, 0, :, 7].argmax()), 7)
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("pin="))
    page.keyboard.press("b")
    page.locator(".column.query li").nth(4).click()
    page.keyboard.press("h")
    is_pinned(page, 4, int(cross[0, 0, 4].argmax()))
    page.keyboard.press("b")
    expect(page.locator(".column.query li.selected")).to_have_attribute("data-n", "4")


def test_heads_travel_and_the_history_of_the_browser_returns_to_them(
    page: Page, served: list[Server]
) -> None:
    opened(page, served, a_map(30, heads=4), at="#page=lines")
    page.locator(".chip").nth(2).dblclick()
    page.wait_for_url(re.compile("heads=2"))
    page.keyboard.press("h")
    loaded(page)
    expect(page.locator(".pane-title")).to_contain_text("head 2")
    page.keyboard.press("]")
    expect(page.locator(".pane-title")).to_contain_text("head 3")
    page.keyboard.press("x")
    expect(page.locator(".chip[aria-pressed=true]")).to_have_text("3")
    page.keyboard.press("]")
    expect(page.locator(".chip[aria-pressed=true]")).to_have_text("0")
    page.go_back()
    expect(page.locator(".chip[aria-pressed=true]")).to_have_text("3")
    page.go_back()
    expect(page.locator(".pane-title")).to_contain_text("head 3")
    page.go_back()
    expect(page.locator(".pane-title")).to_contain_text("head 2")
    page.go_back()
    expect(page.locator(".chip[aria-pressed=true]")).to_have_text("2")
    page.go_forward()
    expect(page.locator(".pane-title")).to_contain_text("head 2")


def test_words_are_found_on_every_page(page: Page, served: list[Server]) -> None:
    pieces = (" The", " sta", "tion", " and", " the", " STA", "TION", ".", " Station", "s")
    amap = a_map(10).labelled(mh.TokenizedText(pieces))
    opened(page, served, amap, at="#page=text")
    count = page.locator(".search .count")
    page.keyboard.press("/")
    page.keyboard.type("station")
    expect(count).to_have_text("1 of 3")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "1")
    expect(page.locator(".token.found")).to_have_count(5)
    page.keyboard.press("Enter")
    expect(count).to_have_text("2 of 3")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "5")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    expect(count).to_have_text("3 of 3")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "8")
    page.locator("#page-lines").click()
    expect(page.locator(".column.query li.selected")).to_have_attribute("data-n", "8")
    page.get_by_label("next match").click()
    expect(page.locator(".column.query li.selected")).to_have_attribute("data-n", "1")
    page.locator("#page-head").click()
    has_in_url(page, "pin=1,")
    page.get_by_label("next match").click()
    page.wait_for_url(re.compile("pin=5,"))
    page.locator("#page-overview").click()
    page.get_by_label("next match").click()
    page.wait_for_url(re.compile("token=8"))
    page.locator("#search").fill("AND  the")
    expect(count).to_have_text("1 of 1")
    page.wait_for_url(re.compile("token=3"))
    page.locator("#search").fill("(")
    expect(count).to_have_text("not found")
    page.keyboard.press("Escape")
    expect(count).to_have_text("")


def test_enter_in_the_search_of_the_overview_opens_the_text(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(30))
    page.keyboard.press("/")
    page.keyboard.type("dog")
    page.keyboard.press("Enter")
    expect(page.locator("#page-text")).to_have_attribute("aria-current", "page")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "9")
    page.keyboard.press("Enter")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", "19")


def test_words_are_found_among_a_hundred_thousand_tokens(page: Page, served: list[Server]) -> None:
    q, k = torch.randn(1, 1, 100_000, 4), torch.randn(1, 1, 100_000, 4)
    labels = [" train" if n % 9_999 == 7 else f" w{n}" for n in range(100_000)]
    amap = mh.attention_with_map(q, k, k, mask=mh.Window(left=100, right=0))[1]
    amap = amap.labelled(mh.TokenizedText(tuple(labels)))
    opened(page, served, amap, at="#page=text&token=50000")
    page.keyboard.press("/")
    page.keyboard.type("Train")
    expect(page.locator(".search .count")).to_have_text("6 of 11")
    expect(page.locator("aside.beside")).to_have_attribute("data-token", str(5 * 9_999 + 7))
    expect(page.locator(".token.found")).to_have_text("train")


def test_the_heads_with_the_largest_weights_of_a_pair(page: Page, served: list[Server]) -> None:
    amaps = [a_map(30, heads=8), a_map(30, heads=3)]
    opened(page, served, *amaps, at="#page=head&pin=20,4")
    loaded(page)
    page.keyboard.press("w")
    rows = page.locator(".ranked button")
    expect(rows).to_have_count(8)
    weights = amaps[0][0, :, 20, 4]
    order = weights.argsort(descending=True).tolist()
    assert [row.get_attribute("data-place") for row in rows.all()] == [f"0/{head}" for head in order]
    assert [weight(row.locator(".value")) for row in rows.all()] == weights[order].tolist()
    bars = torch.tensor([box_of(row.locator(".bar"))["width"] for row in rows.all()])
    scale = bars[0] / weights.max().sqrt()  # one for all rows, however long their numbers are
    assert bars.tolist() == pytest.approx((scale * weights[order].sqrt()).tolist(), abs=1)
    rows.nth(0).click()
    loaded(page)
    expect(page.locator(".pane-title")).to_contain_text(f"head {order[0]}")
    assert exact(page) == float(weights.max())
    page.get_by_label("to key").fill("25")
    page.keyboard.press("Enter")
    expect(page.locator(".pair-panel")).to_contain_text("masked for this query")
    for key in ("Escape", "Escape", "w"):  # close the panel, unpin, open it again
        page.keyboard.press(key)
    page.locator("#page-text").click()
    page.locator(".token[data-token='20']").click()
    page.locator(".token[data-token='9']").click(modifiers=["Shift"])
    expect(page.get_by_label("to key")).to_have_value("9")
    expect(rows).to_have_count(8)
    assert weight(rows.first.locator(".value")) == float(amaps[0][0, :, 20, 9].max())


def test_findings_fly_to_their_weight(page: Page, served: list[Server]) -> None:
    torch.manual_seed(0)
    words = [f" w{n}" for n in range(400)]
    words[350] = words[120] = " train"
    bias = torch.zeros(1, 2, 400, 400)
    bias[0, 1, 350, 121] = 12.0  # the token after the first "train"
    q = torch.zeros(1, 2, 400, 8)
    clear = mh.attention_with_map(q, q, q, mask=mh.Causal(), bias=mh.Dense(bias))[1]
    clear = clear.labelled(mh.TokenizedText(tuple(words)))
    opened(page, served, clear)
    page.keyboard.press("f")
    card = page.locator(".finding").first
    expect(card).to_contain_text('the second "train" attends to "w121"')
    card.click()
    is_pinned(page, 350, 121)
    page.wait_for_url(re.compile(r"head=1.*view=121\.5,350\.5,"))  # the end of its way
    expect(card).to_have_attribute("aria-current", "true")
    loaded(page)
    page.mouse.move(2, 2)
    expect(page.locator(".reading").first).to_have_attribute("data-query", "350")
    expect(page.locator(".reading").first).to_have_attribute("data-key", "121")
    assert exact(page) == float(clear[0, 1, 350, 121])


def test_a_finding_of_a_readable_matrix_does_not_zoom(page: Page, served: list[Server]) -> None:
    words = [f" w{n}" for n in range(21)]
    words[18] = words[5] = " train"
    bias = torch.zeros(1, 1, 21, 21)
    bias[0, 0, 18, 6] = 12.0
    q = torch.zeros(1, 1, 21, 8)
    clear = mh.attention_with_map(q, q, q, mask=mh.Causal(), bias=mh.Dense(bias))[1]
    page.emulate_media(reduced_motion="reduce")  # a zoom would be done at once
    opened(page, served, clear.labelled(mh.TokenizedText(tuple(words))))
    page.keyboard.press("f")
    page.locator(".finding", has_text='attends to "w6"').click()
    is_pinned(page, 18, 6)
    loaded(page)
    expect(page.locator(".pane .note")).to_have_attribute("data-queries", "0,21")
    expect(page.locator(".pane .note")).to_have_attribute("data-keys", "0,21")


def test_findings_are_requested_again_after_an_error(browser: Browser, served: list[Server]) -> None:
    page = new_page(browser)
    opened(page, served, a_map(30))
    failing = [True]
    page.route(re.compile("/findings/"), lambda route: route.abort() if failing else route.continue_())
    page.keyboard.press("f")
    expect(page.locator(".findings [role=alert]")).to_have_text(re.compile("The viewer doesn't respond"))
    failing.clear()
    page.locator(".findings").get_by_role("button", name="try again").click()
    expect(page.locator(".findings [role=alert]")).to_have_count(0)
    expect(page.locator(".findings")).not_to_contain_text("Searching")
    expect(page.locator(".findings")).not_to_be_empty()
    page.close()


def test_findings_need_tokens(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(12).labelled(None))
    page.keyboard.press("f")
    expect(page.locator(".findings")).to_contain_text("Findings need self-attention over a text")


def test_an_exported_page_has_findings_and_the_heads_of_a_pair(page: Page, tmp_path: Path) -> None:
    amap = a_map(300, heads=3)
    api = Api(amap)
    plan_export(api, tmp_path / "page.html").write()
    findings = json.loads(api.request("findings/0/0").result())["findings"]
    page.goto(f"file://{tmp_path}/page.html#page=head&pin=280,3")
    page.keyboard.press("w")
    rows = page.locator(".ranked button")
    expect(rows).to_have_count(3)
    weights = amap[0, :, 280, 3].sort(descending=True).values
    assert [weight(row.locator(".value")) for row in rows.all()] == weights.tolist()
    page.keyboard.press("f")
    expect(page.locator(".finding")).to_have_count(len(findings))
    for card, finding in zip(page.locator(".finding").all(), findings, strict=True):
        assert finding["sentence"].partition(": ")[2] in card.inner_text()


def test_escape_closes_what_is_open_before_it_unpins(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(30), at="#page=head&pin=20,4")
    loaded(page)
    page.keyboard.press("w")
    page.keyboard.press("/")
    page.keyboard.type("cat")
    expect(page.locator(".search .count")).to_have_text(re.compile("of 3"))
    page.keyboard.press("Escape")
    expect(page.locator("#search")).to_have_value("")
    expect(page.locator(".drawer")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".drawer")).to_be_hidden()
    expect(page.locator("#pair")).to_be_focused()
    has_in_url(page, "token=|pin=")
    page.keyboard.press("Escape")
    page.wait_for_function("!/token=|pin=/.test(location.hash)")


def test_a_message_ends_with_its_page(page: Page, served: list[Server]) -> None:
    keep_messages(page)
    opened(page, served, a_map(30), at="#page=lines")
    page.keyboard.press("k")  # copy the link
    expect(page.locator(".banner")).to_be_visible()
    page.keyboard.press("x")
    expect(page.locator(".banner")).to_be_hidden()


def test_english_sentences_with_arabic_tokens_are_read_from_the_left(
    page: Page, served: list[Server]
) -> None:
    words = ["مرحبا", "بالعالم", "هذا", "نص", "عربي", "طويل"]
    q = 12 * torch.eye(6)[None, None]
    k = q.roll(2, 2)  # each query attends to the key two places after it
    amap = mh.attention_with_map(q, k, k)[1].labelled(mh.TokenizedText(tuple(f" {word}" for word in words)))
    opened(page, served, amap, at="#page=head&pin=1,1")
    page.keyboard.press("f")
    sentence = page.locator(".finding span").first
    assert sentence.evaluate("x => getComputedStyle(x).direction") == "ltr"
    quoted = sentence.locator("bdi").all_inner_texts()
    assert quoted
    assert all(text[0] == text[-1] == '"' and text[1:-1] in words for text in quoted)
    key = page.locator(".top-keys .token-text").first
    assert key.evaluate("x => getComputedStyle(x).direction") == "ltr"
    expect(key.locator("bdi mark")).to_have_count(1)
