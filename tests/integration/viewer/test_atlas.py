"""The page of an atlas in a browser, served and exported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from manyheads import atlas
from manyheads.viewer.server import Server
from tests.integration.viewer.pages import collect_errors, in_a_browser

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")

pytestmark = in_a_browser

TEXT = "the <b>café</b> 🙂 you want to read is not the café you need to read, the 🙂 said & read\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> atlas.Atlas:
    folder = tmp_path_factory.mktemp("atlas")
    (folder / "text.txt").write_text(TEXT * 8, encoding="utf-8")
    return atlas.record("shipped", [folder / "text.txt"], folder / "atlas", length=64)


def columns(page: Page, name: str) -> list[float]:
    """Return a column of the table of heads."""
    names = [re.sub(" [▾▴]", "", each) for each in page.locator(".table thead th").all_inner_texts()]
    cells = page.locator(f".table tbody tr td:nth-child({names.index(name) + 1})").all_inner_texts()
    return [float(cell) for cell in cells]


def check_page(page: Page, recorded: atlas.Atlas) -> None:
    """Sort the table, select heads in the table and in the map, and read their examples."""
    expect(page.locator(".map td")).to_have_count(24)
    heads = recorded.to_pandas("heads")
    for name in ("entropy", "induction"):
        sort = page.get_by_role("button", name=re.compile(f"^{name}( [▾▴])?$"))
        sort.click()
        expect(page.locator('.table th[aria-sort="descending"]')).to_have_text(f"{name} ▾")
        values = columns(page, name)
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(heads[name].max(), abs=1e-3)
        sort.click()
        expect(page.locator('.table th[aria-sort="ascending"]')).to_have_text(f"{name} ▴")
        assert columns(page, name) == values[::-1]
    page.locator(".table tbody tr:last-child button").click()
    best = heads.loc[heads["induction"].idxmax()]
    expect(page.locator("section h2")).to_contain_text(f"Layer {best['layer']}, head {best['head']}")
    page.locator(".map td").nth(13).click()  # of 6 heads in each layer
    expect(page.locator("section h2")).to_contain_text("Layer 2, head 1")
    expect(page).to_have_url(re.compile("#2.1$"))
    rows = [row for row in recorded.rows("examples") if (row["layer"], row["head"]) == (2, 1)]
    examples = page.locator(".example")
    expect(examples).to_have_count(len(rows))
    for n, row in enumerate(rows[:3]):
        lines = examples.nth(n).locator(".row tr")
        first = lines.first.locator("th, td").all_inner_texts()
        assert first[0] == f"“{row['key_tokens'][0]}”"
        assert float(first[2]) == pytest.approx(row["weights"][0], abs=1e-3)
        shown = [lines.nth(m).locator("td").nth(1).inner_text() for m in range(lines.count())]
        assert sum(float(text.removeprefix("< ")) for text in shown) == pytest.approx(1, abs=5e-3)
        caption = examples.nth(n).locator("caption")
        expect(caption).to_have_text(f"“{row['query_token']}” at {row['query']} attends to")
        tokens = recorded.passage(row["passage"])
        examples.nth(n).get_by_text("whole passage").click()
        whole = examples.nth(n).locator("details p")
        expect(whole).to_be_visible()
        assert whole.evaluate("element => element.textContent") == "".join(tokens.pieces)
        marked = set(whole.locator("mark").evaluate_all("all => all.map(x => x.textContent)"))
        assert marked == {tokens.characters(key) for key in row["keys"]}
        query = whole.locator(".query").evaluate("element => element.textContent")
        assert query == tokens.characters(row["query"])


def test_the_exported_page(page: Page, recorded: atlas.Atlas, tmp_path: Path) -> None:
    page.goto(recorded.export(tmp_path / "page.html").as_uri())
    check_page(page, recorded)
    expect(page.get_by_text("manyheads view DIR")).to_be_visible()
    assert not page.get_by_text("open in the viewer").count()


def test_the_served_page_opens_examples_in_the_viewer(
    page: Page, recorded: atlas.Atlas, served: list[Server]
) -> None:
    served.append(recorded.view(browser=False))
    page.goto(served[0].url)
    check_page(page, recorded)
    assert not page.get_by_text("manyheads view DIR").count()
    with page.expect_popup() as opened:
        page.get_by_role("link", name="open in the viewer").first.click()
    wrong = collect_errors(opened.value)
    expect(opened.value.locator("canvas.map").first).to_be_visible()
    assert wrong == []
