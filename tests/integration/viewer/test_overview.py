"""The overview in a browser: a matrix of heads on one screen, with scores, a preview and one scale."""

from __future__ import annotations

import re

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import manyheads as mh
from manyheads.observe import Recording
from manyheads.viewer.server import Server
from tests.chromium import wait_until_painted
from tests.integration.viewer.pages import a_map, box_of, has_in_url, in_a_browser, loaded, new_page, opened

pytestmark = in_a_browser


class Layers(torch.nn.Module):
    """Layers of attention, one after the other."""

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(mh.MultiHeadAttention(8 * heads, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.layer_norm(x + block(x, mask=mh.Causal()), x.shape[-1:])
        return x


def a_recording(layers: int, heads: int) -> Recording:
    torch.manual_seed(layers)
    with mh.observe(model := Layers(layers, heads)) as recording, torch.no_grad():
        model(2 * torch.randn(1, 12, 8 * heads))
    return recording


def places(page: Page) -> list[str]:
    return [card.get_attribute("data-place") or "" for card in page.locator(".card").all()]


@pytest.mark.parametrize(("layers", "heads"), [(4, 6), (12, 12), (24, 16), (32, 32)])
def test_usual_models_fit_one_screen(page: Page, served: list[Server], layers: int, heads: int) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    opened(page, served, a_recording(layers, heads), at="#score=entropy")
    expect(page.locator(".card")).to_have_count(layers * heads)
    expect(page.locator(".progress")).not_to_contain_text("scores:")  # it takes space of the toolbar
    wait_until_painted(page)
    sizes = page.locator(".matrices").evaluate(
        "x => [x.scrollHeight, x.clientHeight, x.scrollWidth, x.clientWidth]"
    )
    assert sizes[0] <= sizes[1]
    assert sizes[2] <= sizes[3]
    first, last = (
        box_of(page.locator(".card").first),
        box_of(page.locator(f".card[data-place='0/0/{heads - 1}']")),
    )
    assert first["y"] == last["y"]  # all heads of a layer are in one row
    assert first["width"] >= 14
    below = box_of(page.locator(".card[data-place='0/1/0']"))
    assert below["x"] == first["x"]
    assert below["y"] > first["y"]


def test_cells_show_scores_and_are_sorted_once_all_are_computed(page: Page, served: list[Server]) -> None:
    """The order by score isn't available before, whatever the link says."""
    recording, held = a_recording(3, 5), []
    page.route(re.compile("/scores/0/2/"), lambda route: held.append(route), times=1)
    opened(page, served, recording, at="#score=entropy&order=score&sort=entropy&minimum=0.5")
    expect(page.locator(".progress")).to_have_text("scores: 2 of 3 layers")
    in_order = [f"0/{layer}/{head}" for layer in range(3) for head in range(5)]
    assert places(page) == in_order
    expect(page.locator("#order input[value=score]")).to_be_disabled()
    assert page.locator(".card.marked").count() == 0
    held[0].continue_()
    expect(page.locator(".progress")).to_have_text("")
    entropy = torch.cat([recording[f"blocks.{n}"].entropy()[0].mean(-1) for n in range(3)])
    ranks = entropy.argsort(descending=True).tolist()
    expect(page.locator(".card").first).to_have_attribute("data-place", in_order[ranks[0]])
    wait_until_painted(page)  # the scores are written in the next frame
    assert places(page) == [in_order[n] for n in ranks]
    shown = [float(card.get_attribute("data-value") or "nan") for card in page.locator(".card").all()]
    assert shown == pytest.approx(entropy[ranks].tolist(), rel=1e-5)
    texts = [text.inner_text() for text in page.locator(".card .strip b").all()]
    assert texts == [f"{value:.2f}" for value in entropy[ranks].tolist()]
    marked = {card.get_attribute("data-place") for card in page.locator(".card.marked").all()}
    assert marked == {in_order[n] for n in ranks[:3]}
    page.locator("#order label", has_text="layer and head").click()
    expect(page).not_to_have_url(re.compile("order"))
    assert places(page) == in_order
    page.locator("#score").select_option("previous_token")
    previous = mh.measures.previous_token(recording["blocks.1"])[0, 3]
    card = page.locator(".card[data-place='0/1/3']")
    expect(card.locator("b")).to_have_text(f"{float(previous):.2f}")
    expect(card).to_have_attribute(
        "aria-label", f"layer 1, head 3 · blocks.1, previous token {float(previous):.2f}"
    )


def test_scores_and_thumbnails_are_requested_once(page: Page, served: list[Server]) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url.partition("/data/")[2]))
    opened(page, served, a_recording(2, 3), at="#score=entropy")
    expect(page.locator(".card canvas.drawn")).to_have_count(6)
    expect(page.locator(".progress")).to_have_text("")
    before = [name for name in requests if name.startswith(("scores/", "tiles/"))]
    assert len(before) == len(set(before)) == 2 + 6
    page.locator("#page-text").click()
    page.locator("#page-overview").click()
    expect(page.locator(".card canvas.drawn")).to_have_count(6)
    expect(page.locator("#order input[value=score]")).to_be_enabled()
    assert [name for name in requests if name.startswith(("scores/", "tiles/"))] == before


def test_thumbnails_load_while_head_scores_are_computed(page: Page, served: list[Server]) -> None:
    """A browser has six connections to a server: head scores of eight layers take one of them."""
    requests: list[str] = []
    page.route("**/scores/**", lambda route: requests.append(route.request.url))  # and never answers
    opened(page, served, *(a_map(20, heads=1) for _ in range(8)))
    expect(page.locator(".card canvas.drawn")).to_have_count(8)
    assert len(requests) == 1
    names = [name.inner_text() for name in page.locator(".matrices h2").all()]
    assert [name.partition("“")[0].strip() for name in names] == [f"attention ({n})" for n in range(8)]


def test_all_cells_have_the_colours_of_one_scale(page: Page, served: list[Server]) -> None:
    """A uniform head of 20 keys has weights of 1/20: they look the same beside a head with weights of 1."""
    q, k = torch.zeros(1, 2, 20, 20), torch.eye(20).expand(1, 2, 20, 20)
    q[:, 1] = 100 * torch.eye(20)
    amap = mh.attention_with_map(q, k, k)[1]
    opened(page, served, amap, at="#scale=linear")
    expect(page.locator(".card canvas.drawn")).to_have_count(2)
    expect(page.locator(".color-bar")).to_have_attribute("data-top", "1")
    read = "canvas => Array.from(canvas.getContext('2d').getImageData(15, 15, 1, 1).data)"
    colours = served[-1].api.request("runs").result()
    table = bytes.fromhex(str(colours).partition('"colors": "')[2].partition('"')[0])
    n = round(255 * float(amap[0, 0, 15, 15]))
    assert page.locator(".card canvas").nth(0).evaluate(read) == [*table[3 * n : 3 * n + 3], 255]
    page.locator("#scale label", has_text="√").click()
    n = round(255 * float(amap[0, 0, 15, 15]) ** 0.5)
    wanted = [*table[3 * n : 3 * n + 3], 255]
    page.wait_for_function(
        f"wanted => String(({read})(document.querySelector('.card canvas'))) === String(wanted)", arg=wanted
    )


def test_the_scale_says_that_some_cells_are_above_its_end(page: Page, served: list[Server]) -> None:
    """One cell in 3,600 has a weight of 1, the others about 1/60."""
    q, k = torch.zeros(1, 1, 60, 8), torch.zeros(1, 1, 60, 8)
    q[..., 7, 0] = k[..., 3, 0] = 20
    opened(page, served, mh.attention_with_map(q, k, k)[1])
    bar = page.locator(".color-bar")
    expect(bar).to_have_attribute("data-top", "0.02")
    expect(bar).to_have_attribute("aria-label", "colours of weights: √ scale from 0 to at least 0.02")


def test_pointer_and_keys_preview_heads_and_open_one(page: Page, served: list[Server]) -> None:
    recording = a_recording(3, 4)
    opened(page, served, recording)
    title = page.locator(".preview h2")
    page.locator(".card[data-place='0/2/1']").hover()
    expect(title).to_have_text("layer 2 · head 1")
    entropy = float(recording["blocks.2"].entropy()[0, 1].mean())
    expect(page.locator(".preview [data-score=entropy] .value")).to_have_text(f"{entropy:.2f} nats")
    page.mouse.move(5, 5)
    expect(title).to_have_text("layer 0 · head 0")
    page.locator(".card[data-place='0/0/0']").focus()
    for key, name in (
        ("ArrowDown", "layer 1 · head 0"),
        ("ArrowRight", "layer 1 · head 1"),
        ("End", "layer 1 · head 3"),
        ("ArrowRight", "layer 1 · head 3"),
        ("ArrowUp", "layer 0 · head 3"),
        ("ArrowLeft", "layer 0 · head 2"),
    ):
        page.keyboard.press(key)
        expect(title).to_have_text(name)
    assert page.locator(".card[tabindex='0']").count() == 1
    has_in_url(page, "head=2")
    page.keyboard.press("Enter")
    expect(page.locator("canvas.map")).to_be_visible()
    has_in_url(page, "page=head.*head=2")
    page.go_back()
    expect(page.locator(".card.selected")).to_have_attribute("data-place", "0/0/2")


def test_layers_with_only_statistics_show_scores(page: Page, served: list[Server]) -> None:
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 9, 16)
    with mh.observe(model, keep="statistics") as recording, torch.no_grad():
        model(x, x, x)
    opened(page, served, recording)
    card = page.locator(".card").nth(1)
    expect(card).to_have_attribute("aria-disabled", "true")
    previous = float(recording[""].columns()["previous_token"][0, 1])
    expect(card.locator("b")).to_have_text(f"{previous:.2f}")
    expect(page.locator(".facts")).to_contain_text("only statistics were recorded")
    card.click(force=True)
    wait_until_painted(page)
    expect(page.locator("#page-overview")).to_have_attribute("aria-current", "page")


def test_kinds_of_layers_and_runs_have_matrices_of_their_own(page: Page, served: list[Server]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 2, 2, 2, 16, batch_first=True).eval()
    with mh.observe(model) as recording, torch.no_grad():
        model(torch.randn(1, 8, 16), torch.randn(1, 5, 16))
    opened(page, served, recording, a_map(9, heads=3))
    expect(page.locator(".matrices h2")).to_have_count(4)
    names = [name.inner_text() for name in page.locator(".matrices h2").all()]
    kinds = [
        "encoder.layers.0–1.self_attn",
        "decoder.layers.0–1.self_attn",
        "decoder.layers.0–1.multihead_attn",
    ]
    title = str(recording.provenance["model"])
    assert names[:3] == [f"{title} · {kind}" for kind in kinds]
    assert names[3].startswith("attention")
    rows = [row.inner_text() for row in page.locator(".matrix").nth(2).locator("[role=rowheader]").all()]
    assert rows == ["3", "5"]
    expect(page.locator(".matrix").nth(3).locator(".card")).to_have_count(3)


def test_the_header_names_model_text_and_sizes(page: Page, served: list[Server]) -> None:
    text = mh.TokenizedText(("[CLS]", " naïve", " 机", "", " text\n", " x" * 300, "[SEP]"), (0, 6))
    q, k = (torch.randn(1, 2, 7, 8) for _ in range(2))
    opened(page, served, mh.attention_with_map(q, k, k)[1].labelled(text))
    subject = page.locator(".subject")
    excerpt = subject.locator(".excerpt").inner_text()
    assert excerpt.startswith("“naïve 机 text x x x")
    assert excerpt.endswith("…”")
    assert len(excerpt) <= 203
    expect(subject).to_contain_text("7 tokens")
    expect(subject).to_contain_text("1 layer × 2 heads")


def test_controls_are_radio_groups(page: Page, served: list[Server]) -> None:
    opened(page, served, a_map(30))
    group = page.get_by_role("group", name="colours")
    expect(group.get_by_role("radio", name="√")).to_be_checked()
    group.get_by_role("radio", name="√").focus()
    page.keyboard.press("ArrowRight")
    expect(group.get_by_role("radio", name="linear")).to_be_checked()
    has_in_url(page, "scale=linear")
    page.keyboard.press("l")
    expect(group.get_by_role("radio", name="log")).to_be_checked()
    page.keyboard.press("m")
    expect(page.get_by_role("group", name="cells").get_by_role("radio", name="mean")).to_be_checked()


def test_messages_do_not_move_the_page_and_are_dismissed(browser: Browser, served: list[Server]) -> None:
    page = new_page(browser)
    page.route("**/scores/**", lambda route: route.fulfill(status=500, body="No scores today."))
    opened(page, served, a_map(30), at="#page=head")
    loaded(page)
    matrix = box_of(page.locator("canvas.map"))
    page.keyboard.press("o")
    banner = page.get_by_role("alert").filter(has_text="No scores today.")
    expect(banner).to_be_visible()
    page.locator("#page-head").focus()
    page.evaluate("() => location.hash = 'page=head'")
    expect(page.locator("canvas.map")).to_be_visible()
    expect(banner).to_be_visible()
    loaded(page)
    assert box_of(page.locator("canvas.map")) == matrix
    banner.get_by_role("button", name="dismiss").click()
    expect(banner).to_be_hidden()
    page.close()


@pytest.mark.parametrize(
    ("t", "s", "cell", "size"),
    [
        (3, 20_000, "1 × 128", "3 queries × 20,000 keys"),
        (20_000, 3, "128 × 1", "20,000 queries × 3 keys"),
        (1, 500, "1 × 2", "1 query × 500 keys"),
    ],
)
def test_elongated_maps_have_sharp_cells_of_their_size(
    page: Page, served: list[Server], t: int, s: int, cell: str, size: str
) -> None:
    """A cell pools the longer axis only."""
    q, k = torch.randn(1, 1, t, 8), torch.randn(1, 1, s, 8)
    opened(page, served, mh.attention_with_map(q, k, k)[1], at="#score=entropy")
    canvas = page.locator(".thumbnail.large")
    expect(canvas).to_have_class(re.compile("sharp"))
    facts = page.locator(".facts")
    expect(facts).to_contain_text(f"each cell: the largest of {cell} weights")
    expect(facts).to_contain_text(size)
    expect(page.locator(".subject")).to_contain_text(size)
    rows, cols = canvas.evaluate("canvas => [canvas.height, canvas.width]")
    assert (min(rows, cols), rows < cols) == (min(t, s), t < s)
    # Scores that compare positions don't exist in cross-attention.
    expect(page.locator(".scores [data-score=entropy]")).to_have_count(1)
    expect(page.locator(".scores [data-score]")).to_have_count(1)


def test_small_scores_use_the_whole_scale(page: Page, served: list[Server]) -> None:
    """The bars of scores end at the largest one, rounded up."""
    opened(page, served, a_map(60, heads=3))
    hint = page.locator(".progress")
    expect(hint).to_have_text("choose a score to sort by, highest first")
    page.locator("#score").select_option("previous_token")
    expect(hint).to_have_text("")
    cards = page.locator(".card")
    values = [float(card.get_attribute("data-value") or "nan") for card in cards.all()]
    top = next(end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if max(values) <= end)
    assert top < 0.5
    widths = [
        card.evaluate("card => parseFloat(card.querySelector('i').style.width)") for card in cards.all()
    ]
    assert widths == pytest.approx([100 * value / top for value in values], rel=1e-3)
    expect(page.locator(".score-scale")).to_have_text(f"previous token0{top:g}")
    listed = page.locator(".scores [data-score=previous_token] .bar i")  # beside other scores, of 1
    assert listed.evaluate("bar => parseFloat(bar.style.width)") == pytest.approx(100 * values[0], rel=1e-3)


def test_runs_whose_texts_begin_alike_are_told_apart(page: Page, served: list[Server]) -> None:
    start = " The station master, whose nephew was late, watched the"
    maps = [
        a_map(9).labelled(mh.TokenizedText((f"{start} {end}", *[""] * 8)))
        for end in ("evening train leave.", "morning train leave.")
    ]
    opened(page, served, *maps)
    parts = ["“…evening train leave.”", "“…morning train leave.”"]
    expect(page.locator(".subject .excerpt")).to_have_text(parts)
    expect(page.locator(".matrices h2 .excerpt")).to_have_text(parts)
    page.evaluate("() => location.hash = 'page=head&second=1,0,0&show=difference'")
    expect(page.locator(".pane-title")).to_contain_text("attention (0), “…evening train leave.”")
    expect(page.locator(".pane-title")).to_contain_text("attention (1), “…morning train leave.”")
    expect(page.locator(".subject .excerpt")).to_have_text(parts)


def fits(page: Page) -> bool:
    return bool(
        page.locator(".matrices").evaluate(
            "x => x.scrollHeight <= x.clientHeight && x.scrollWidth <= x.clientWidth"
        )
    )


def test_runs_with_different_numbers_of_heads_fit_one_screen(page: Page, served: list[Server]) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    opened(page, served, a_recording(3, 6), a_recording(3, 6), a_recording(4, 12))
    expect(page.locator(".card canvas.drawn")).to_have_count(84)
    assert fits(page)
    facts = page.locator(".subject .muted").last
    expect(facts).to_have_text("3 runs")
    assert (
        box_of(facts)["x"] + box_of(facts)["width"]
        <= box_of(page.locator(".subject"))["x"] + box_of(page.locator(".subject"))["width"]
    )


def test_sorted_heads_fit_beside_the_drawer(page: Page, served: list[Server]) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    opened(page, served, a_recording(4, 12), at="#score=entropy&order=score")
    page.keyboard.press("f")
    expect(page.locator(".matrices.sorted")).to_be_visible()
    wait_until_painted(page)
    assert page.locator(".drawer").is_visible()
    assert fits(page)


def test_before_cells_are_known_the_scale_ends_at_1(page: Page, served: list[Server]) -> None:
    page.route(re.compile("/tiles/"), lambda route: None)  # and never answers
    opened(page, served, a_map(20))
    expect(page.locator(".color-bar")).to_have_attribute("data-top", "1")
