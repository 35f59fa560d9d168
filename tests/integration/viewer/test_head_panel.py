"""The side panel of the head page: a query's row, its largest weights, and why a weight is what it is."""

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
from tests.integration.viewer.pages import a_map, in_a_browser, loaded, opened, pair, weight

pytestmark = in_a_browser


def numbers(text: str) -> list[float]:
    return [float(x.replace("−", "-")) for x in re.findall(r"−?\d[\d.]*(?:e[+-]?\d+)?", text)]


def test_the_panel_shows_the_row_of_the_pinned_query(page: Page, served: list[Server]) -> None:
    amap = a_map(60)
    opened(page, served, amap, at="#page=head&head=1&pin=41,7")
    loaded(page)
    panel = page.locator(".side-panel")
    expect(panel.locator("h3").first).to_have_text("Query 41 “\u2068cat\u2069” over 60 keys")
    expect(panel.locator(".top-keys button")).to_have_count(12)
    wanted = amap[0, 1, 41].topk(12)
    shown = [weight(element) for element in panel.locator(".top-keys .value").all()]
    assert shown == pytest.approx(wanted.values.tolist(), rel=1e-6)
    third = panel.locator(".top-keys button").nth(2)
    assert third.get_attribute("data-key") == str(int(wanted.indices[2]))
    third.click()
    expect(page.locator(".reading")).to_have_attribute("data-key", str(int(wanted.indices[2])))
    assert pair(page.locator(".reading")) == (41, int(wanted.indices[2]))
    expect(panel.locator(".why .pair")).to_contain_text(f"key {int(wanted.indices[2])} ")
    chart = panel.locator("canvas.profile")
    box = chart.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 44 + (10.5 / 60) * (box["width"] - 56), box["y"] + 50)
    expect(page.locator(".reading")).to_have_attribute("data-key", "10")


def test_without_a_crosshair_the_panel_shows_the_last_query_of_the_text(
    page: Page, served: list[Server]
) -> None:
    text = mh.TokenizedText(("the", " cat", " sat", " on", " ", "[SEP]"), special=(5,))
    torch.manual_seed(5)
    q, k = (torch.randn(1, 2, 6, 16) for _ in range(2))
    amap = mh.attention_with_map(q, k, k)[1].labelled(text)
    opened(page, served, amap, at="#page=head&head=1")
    loaded(page)
    panel = page.locator(".side-panel")
    expect(panel.locator("h3").first).to_have_text("Query 3 “\u2068on\u2069” over 6 keys")
    expect(panel.locator(".hint")).to_contain_text("the last query, and its largest weight")
    wanted = amap[0, 1, 3].sort(descending=True)
    shown = [weight(element) for element in panel.locator(".top-keys .value").all()]
    assert shown == pytest.approx(wanted.values.tolist(), rel=1e-6)
    expect(panel.locator(".why .pair")).to_contain_text(f"key {int(wanted.indices[0])} ")
    panel.locator(".top-keys button").nth(1).click()
    expect(panel.locator(".hint")).to_contain_text("the query under the crosshair")
    expect(page.locator(".reading")).to_have_attribute("data-key", str(int(wanted.indices[1])))
    assert pair(page.locator(".reading")) == (3, int(wanted.indices[1]))
    expect(panel.locator(".why .pair")).to_contain_text(f"key {int(wanted.indices[1])} ")
    page.keyboard.press("Escape")
    expect(panel.locator(".why .pair")).to_contain_text(f"key {int(wanted.indices[0])} ")


def test_the_panel_explains_a_weight_step_by_step(page: Page, served: list[Server]) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(1, 2, 9, 16) * 2, torch.randn(1, 1, 9, 16)
    bias, sink = mh.ALiBi(torch.tensor([0.5, 0.25])), torch.tensor([0.5, -1.0])
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal(), bias=bias, sink=sink, softcap=4.0)[1]
    opened(page, served, amap, at="#page=head&head=1&pin=7,3")
    loaded(page)
    rows = page.locator(".why dd")
    expect(rows.first).not_to_be_empty()
    dot = float(q[0, 1, 7].double() @ k[0, 0, 3].double())
    capped = 4 * torch.tensor(dot / 16).tanh().item()
    score = capped - 0.25 * 4
    shown = [numbers(text)[0] for text in rows.all_inner_texts()]
    steps = [dot, dot / 4, capped, score, score, float(amap.lse[0, 1, 7]), float(amap[0, 1, 7, 3])]
    assert shown == pytest.approx([*steps, float(amap.sink_weight()[0, 1, 7])], rel=5e-4)
    names = page.locator(".why dt").all_inner_texts()
    assert names[0] == "q·k"
    assert names[1] == "× scale 0.25"
    assert names[2].startswith("softcap: 4 · tanh(")
    assert names[3] == "− bias 1"
    score, lse = numbers(names[6].replace("(", " ").replace("− ", "").removeprefix("weight = exp"))
    assert math.exp(score - lse) == pytest.approx(steps[-1], rel=1e-4)  # the digits shown give the weight
    expect(page.locator(".why")).to_contain_text("the run has no values")
    page.keyboard.press("Escape")
    expect(page.locator(".side-panel > p")).to_contain_text("This is the last query")
    page.goto("about:blank")
    opened(page, served, amap, at="#page=head&head=1&pin=3,7")
    expect(page.locator(".why dl")).to_contain_text("masked by Causal(): score")
    assert page.locator(".why dd").last.inner_text() == "= 0"


def test_the_panel_shows_the_contribution_of_a_key_in_an_observed_model(
    page: Page, served: list[Server]
) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 5)

    class Attention(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, v, is_causal=True, enable_gqa=True)

    model = Attention()
    with mh.observe(model) as recording:
        model()
    amap = recording[0]
    opened(page, served, amap, at="#page=head&head=3&pin=7,2")
    loaded(page)
    norm = float(v[0, 1, 2].norm())  # heads 2 and 3 use key head 1
    expect(page.locator(".why dt").last).to_contain_text("× norm of the value")
    assert numbers(page.locator(".why dt").last.inner_text()) == pytest.approx([norm], rel=6e-3)
    found = numbers(page.locator(".why dd").last.inner_text())
    assert found == pytest.approx([norm * float(amap[0, 3, 7, 2])], rel=6e-3)
    expect(page.locator(".why")).not_to_contain_text("the run has no values")


def test_an_exported_page_says_why_it_explains_no_weight(page: Page, tmp_path: Path) -> None:
    amap = a_map(40)
    plan_export(Api(amap), tmp_path / "page.html").write()
    page.goto(f"file://{tmp_path}/page.html#page=head&pin=30,4")
    loaded(page)
    expect(page.locator(".why p")).to_contain_text("not the queries and keys that they are computed from")
    shown = [weight(element) for element in page.locator(".top-keys .value").all()]
    assert shown == pytest.approx(amap[0, 0, 30].topk(12).values.tolist(), rel=1e-6)
    expect(page.locator("#next")).to_be_hidden()


def test_a_head_is_described_in_words(page: Page, served: list[Server]) -> None:
    t = 50
    positions = torch.eye(t)[None, None] * 40
    q, k = positions, positions.roll(1, 2)
    amap = mh.attention_with_map(q, k.roll(-2, 2), k, mask=mh.Causal(), scale=1.0)[1]
    opened(page, served, amap, at="#page=head")
    previous = float(mh.measures.previous_token(amap)[0, 0])
    expect(page.locator(".habit")).to_have_text(f"attends to the previous token ({previous:.2f})")


def test_the_labels_of_products_are_whole(page: Page, served: list[Server]) -> None:
    page.add_init_script("""
        window.cut = [], window.written = [];
        const fillText = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
          if (this.canvas.classList.contains("products")) {
            written.push(text);
            if (this.textAlign === "right" && x < this.measureText(text).width) cut.push(text);
          }
          return fillText.call(this, text, x, ...rest);
        };
    """)
    q, k = torch.full((2, 1, 1, 4, 4), 0.3333)
    q[..., 0] = -0.251  # a negative product of three digits
    opened(page, served, mh.attention_with_map(q, k, k)[1], at="#page=head&pin=2,1")
    loaded(page)
    page.wait_for_function("written.includes('−0.0837')")
    assert page.evaluate("cut") == []
