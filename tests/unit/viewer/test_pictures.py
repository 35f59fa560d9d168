"""The view of a head as a file for papers: its cells equal the map, and its text is text."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image

import manyheads as mh
from manyheads.figures import heatmaps, strips
from manyheads.observe import Recording
from manyheads.viewer import assets, pictures
from manyheads.viewer.api import Api
from manyheads.viewer.pyramid import Pyramid

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ("the", "cat", "sät", "on", "$a$", "机", "<b>")


def a_map(t: int, mask: mh.Mask | None = None) -> mh.AttentionMap:
    q, k = (torch.randn(1, 2, t, 8) for _ in range(2))
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal() if mask is None else mask)[1]
    return amap.labelled([WORDS[n % len(WORDS)] for n in range(t)])


def finish(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(
    ("t", "rows", "cols"),
    [
        (7, range(7), range(7)),
        (900, range(900), range(900)),
        (900, range(300, 340), range(250, 330)),
        (3_000, range(100, 2_950), range(7, 2_999)),
    ],
)
def test_the_cells_of_a_part_equal_the_map(t: int, rows: range, cols: range) -> None:
    head = Pyramid(a_map(t).only(heads=1))
    level = pictures.find_level(head, rows, cols)
    side = 1 << level
    assert max(len(rows), len(cols)) / side <= pictures.MOST
    assert level == 0 or max(len(rows), len(cols)) / side > pictures.MOST / 2
    rows, cols = (pictures._align(indices, side, t) for indices in (rows, cols))
    assert (rows.start % side, cols.start % side) == (0, 0)
    cells = finish(pictures._collect(head, level, rows, cols))
    weights = head.amap[0, 0, rows.start : rows.stop, cols.start : cols.stop].numpy()
    starts = [np.arange(0, len(indices), side) for indices in (rows, cols)]
    largest = np.maximum.reduceat(np.maximum.reduceat(weights, starts[0], 0), starts[1], 1)
    np.testing.assert_allclose(np.nan_to_num(cells[-1].numpy()), largest, rtol=1e-6, atol=1e-9)
    is_masked = cols.start + starts[1] > (rows.start + starts[0] + side - 1).clip(max=rows.stop - 1)[:, None]
    assert (np.isnan(cells[-1].numpy()) == is_masked).all()


def test_an_svg_has_its_tokens_as_text_and_a_pixel_for_each_cell() -> None:
    api = Api(a_map(40))
    answer = api.request("figure/0/0/1/10/20/5/17/max/linear/svg/0").result()
    assert isinstance(answer, bytes)
    texts = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", answer.decode())
    for word in ("cat", "sät", "机", "&lt;b&gt;", "$a$"):
        assert word in texts
    assert any(text.startswith("layer 0, head 1") for text in texts)
    assert "attention · “the cat sät on $a$ 机 &lt;b&gt; the" in " ".join(texts)
    assert "queries 10 to 19, keys 5 to 16" in texts
    data = re.search(r'href="data:image/png;base64,([^"]*)"', answer.decode())
    assert data is not None
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data[1]))).convert("RGBA"))
    assert (image[..., 3] == 0).any()  # masked cells show the hatching
    api.close()


@pytest.mark.parametrize("format", ["svg", "pdf"])
def test_queries_of_cross_attention_have_the_labels_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    drawn = []
    render = pictures._render

    def keep_labels(planes: Any, rows: range, cols: range, labels: Any, *rest: Any) -> bytes:
        drawn.append(tuple(map(list, labels)))
        return render(planes, rows, cols, labels, *rest)

    monkeypatch.setattr(pictures, "_render", keep_labels)
    words = ("vier", "hundert", "drei")
    own = a_map(3).problem
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    recording = Recording()
    recording.add("decoder", mh.AttentionMap.of(own).labelled(words), own.k)
    cross = mh.attention_with_map(q, k, k)[1].labelled(WORDS)
    recording.add("cross", cross, k)
    api = Api(recording)
    assert json.loads(api.request("tokens/0/1/0").result())["queries"] == list(words)
    answer = api.request(f"figure/0/1/0/1/3/0/7/max/sqrt/{format}/0").result()
    api.request("comparison/0,1,0,0/0,1,1,0/0/3/0/7/max/sqrt/svg").result()
    assert drawn == [(list(words[1:]), list(WORDS)), (list(words), list(WORDS))]
    assert isinstance(answer, bytes)
    if format == "svg":
        assert b">hundert" in answer
    api.close()


def test_the_title_says_what_the_head_attends_to() -> None:
    t = 60
    scores = torch.full((t, t), -30.0)
    scores[range(1, t), range(t - 1)] = 30.0  # the previous token
    q, k = torch.zeros(1, 1, t, 8), torch.zeros(1, 1, t, 8)
    amap = mh.attention_with_map(q, k, k, mask=mh.Causal(), bias=mh.Dense(scores[None, None]))[1]
    api = Api(amap)
    answer = api.request(f"figure/0/0/0/0/{t}/0/{t}/max/sqrt/svg/0").result()
    assert isinstance(answer, bytes)
    texts = re.findall(r">([^<>\n]+)</t", answer.decode())
    assert "layer 0, head 0 — attends to the previous token (1.00)" in texts
    assert not any("queries 0 to" in text for text in texts)  # all are in view
    api.close()


def test_the_strips_of_a_figure_equal_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(heatmaps, "draw_strips", lambda axes, strips, shape: drawn.append((strips, shape)))
    api = Api(a_map(900))
    amap = api.runs[0].layers[0].map
    api.request("figure/0/0/1/100/900/50/880/max/sqrt/svg/0").result()
    ((found, shape),) = drawn
    assert shape == (400, 415)  # cells of 2 × 2
    weights = amap[0, 1].double()
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    np.testing.assert_allclose(found.received, weights.sum(0)[50:880], rtol=1e-4)
    np.testing.assert_allclose(found.entropy, entropy[100:900], rtol=1e-4, atol=1e-5)
    api.close()


def test_the_labels_of_a_part_know_their_words() -> None:
    text = mh.TokenizedText((" tail", "or") * 20)
    part = pictures._part(text, range(10, 16))
    assert isinstance(part, mh.TokenizedText)
    assert [part.word(n) for n in range(6)] == ["tailor"] * 6
    assert pictures._part(text, range(38, 42)) == ["tail", "or", "", ""]


@pytest.mark.full
@pytest.mark.parametrize("control", ["", "\x00"])
def test_an_svg_joins_pieces_and_has_the_text(control: str) -> None:
    """Joining marks as on the page, and the text as it was written, without what no XML file can have."""
    tokens = mh.TokenizedText(("The", " sta", "tion", " 漢", "", f" <b>{control}"))
    amap = a_map(len(tokens)).labelled(tokens)
    head = Pyramid(amap.only(heads=1))
    svg = finish(pictures.draw_view(head, range(6), range(6), title="a head")).decode()
    root = ElementTree.fromstring(svg)
    words = {"purl": "http://purl.org/dc/elements/1.1/"}
    assert [x.text for x in root.iterfind(".//purl:description", words)] == [
        tokens.text.replace("\x00", "\ufffd")
    ]
    joined = root.findall(".//*[@id='joined']")
    assert [len(list(x.iter("{http://www.w3.org/2000/svg}path"))) for x in joined] == [2, 2]
    pdf = finish(pictures.draw_view(head, range(6), range(6), title="a head", format="pdf"))
    assert pdf.startswith(b"%PDF")


def test_the_bars_of_strips_are_the_largest_of_each_cell() -> None:
    values = np.array([3.0, 1.0, 0.0, 5.0, 2.0])
    bars, edges = strips._bars(values, 3)
    assert bars.tolist() == [3.0, 5.0, 2.0]
    assert edges.tolist() == [-0.5, 1.5, 3.5, 4.5]


@pytest.mark.parametrize(
    ("top", "scale", "labels"),
    [
        (1.0, "sqrt", ["0", "0.01", "0.1", "0.25", "0.5", "1"]),
        (0.02, "sqrt", ["0", "2e-4", "0.002", "0.005", "0.01", "0.02"]),
        (5e-6, "sqrt", ["0", "5e-8", "5e-7", "1e-6", "2e-6", "5e-6"]),
        (0.5, "linear", ["0", "0.125", "0.25", "0.375", "0.5"]),
        (1.0, "log", ["≤ 1e-4", "0.001", "0.01", "0.1", "1"]),
    ],
)
def test_the_ticks_of_the_colour_bar(top: float, scale: str, labels: list[str]) -> None:
    found = pictures.color_ticks(top, scale)
    assert [label for _, label in found] == labels
    assert [weight for weight, _ in found] == pytest.approx([float(label.strip("≤ ")) for label in labels])


@pytest.mark.full
def test_long_texts_are_pooled_and_say_so() -> None:
    api = Api(a_map(5_000))
    for pooling, name in (("max", "largest"), ("mean", "mean")):
        answer = api.request(f"figure/0/0/0/0/5000/0/5000/{pooling}/sqrt/svg/0").result()
        assert isinstance(answer, bytes)
        assert f"{name} attention weight of each cell" in answer.decode()
        assert "query, up to 8 in a cell" in answer.decode()
    answer = api.request("figure/0/0/0/1000/3000/1000/3000/max/log/pdf/0").result()
    assert isinstance(answer, bytes)
    assert answer.startswith(b"%PDF")
    assert b"/Type3" not in answer
    assert b"/FontFile2" in answer  # TrueType
    api.close()


@pytest.mark.parametrize(
    "address",
    [
        "figure/0/0/0/0/7/0/7/sum/sqrt/svg/0", "figure/0/0/0/0/7/0/7/max/cubic/svg/0",
        "figure/0/0/0/0/7/0/7/max/sqrt/exe/0", "figure/0/0/0/5/5/0/7/max/sqrt/svg/0",
        "figure/0/0/0/0/8/0/7/max/sqrt/svg/0", "figure/0/0/9/0/7/0/7/max/sqrt/svg/0",
    ],
)  # fmt: skip
def test_a_wrong_figure_raises_one_sentence(address: str) -> None:
    api = Api(a_map(7))
    with pytest.raises(LookupError) as caught:
        api.request(address).result()
    assert str(caught.value.args[0]).endswith(".")
    api.close()


@pytest.mark.parametrize("scale", ["sqrt", "linear", "log"])
def test_a_figure_of_a_difference_has_its_colours(scale: str) -> None:
    """Blue below 0, red above, hatched where both heads are masked; a weight that one of them masks is 0."""
    t = 12
    one, other = a_map(t), a_map(t, mh.Window(left=3, right=0))
    api = Api(one, other)
    file = api.request(f"difference/0,0,1,0/1,0,0,0/0/{t}/0/{t}/max/{scale}/svg").result()
    assert isinstance(file, bytes)
    texts = " ".join(re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", file.decode()))
    assert "difference: layer 0, head 1 − layer 0, head 0" in texts
    assert "difference of the weights" in texts
    data = re.search(r'href="data:image/png;base64,([^"]*)"', file.decode())
    assert data is not None
    image = Image.open(io.BytesIO(base64.b64decode(data[1]))).convert("RGBA")
    pixels = np.asarray(image).astype(int)[::-1]  # the file draws it upside down
    side = pixels.shape[0] // t
    cells = pixels[side // 2 :: side, side // 2 :: side]
    difference = (one[0, 1] - other[0, 0]).numpy()
    assert ((cells[..., 3] == 0) == np.triu(np.ones((t, t), bool), 1)).all()
    clear = np.tril(abs(difference) > 0.05)
    assert clear.any()
    is_red = cells[..., 0] > cells[..., 2]
    assert (is_red[clear] == (difference > 0)[clear]).all()
    api.close()


def test_a_difference_needs_heads_of_one_size() -> None:
    api = Api(a_map(7), a_map(9))
    with pytest.raises(ValueError, match="same size for a difference, got 7 queries × 7 keys and 9 × 9"):
        api.request("difference/0,0,0,0/1,0,0,0/0/7/0/7/max/sqrt/pdf").result()
    for wrong in ("0,0,0", "0,0,9,0", "0,0,0,x"):
        with pytest.raises(LookupError):
            api.request(f"difference/{wrong}/1,0,0,0/0/7/0/7/max/sqrt/pdf").result()
    api.close()


@pytest.mark.full
def test_a_figure_of_two_heads_has_both_and_one_scale() -> None:
    t = 12
    one, other = a_map(t), a_map(t, mh.Window(left=3, right=0))
    api = Api(one, other)
    for format in ("svg", "pdf"):
        file = api.request(f"comparison/0,0,1,0/1,0,0,0/2/{t}/0/{t}/max/sqrt/{format}").result()
        assert isinstance(file, bytes)
        if format == "pdf":
            assert file.startswith(b"%PDF")
            continue
        texts = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", file.decode())
        assert {"layer 0, head 1", "layer 0, head 0", "queries 2 to 11, keys 0 to 11", "cat"} <= set(texts)
        images = [Image.open(io.BytesIO(base64.b64decode(x))).convert("RGBA") for x in
                  re.findall(r'href="data:image/png;base64,([^"]*)"', file.decode())]  # fmt: skip
        shown = [image for image in images if image.size[0] > 1][:2]
        for image, amap, head in zip(shown, (one, other), (1, 0), strict=True):
            pixels = np.asarray(image).astype(int)[::-1]
            middles = [
                ((np.arange(n) + 0.5) * size / n).astype(int)
                for n, size in zip((t - 2, t), pixels.shape[:2], strict=True)
            ]
            cells = pixels[np.ix_(*middles)]
            weights = amap[0, head, 2:].numpy()
            assert ((cells[..., 3] == 0) == (weights == 0)).all()
            clear = weights > 0
            order = cells[..., 1][clear][np.argsort(weights[clear])]  # green grows along viridis
            assert (np.diff(order) >= 0).all()
    api.close()


def test_a_figure_of_two_heads_needs_one_size_and_labels_only_what_both_have() -> None:
    api = Api(a_map(7), a_map(9), a_map(7).labelled([*"abcdefg"]))
    with pytest.raises(ValueError, match="same size in an SVG or PDF file, got 7 queries × 7 keys and 9 × 9"):
        api.request("comparison/0,0,0,0/1,0,0,0/0/7/0/7/max/sqrt/pdf").result()
    svg = api.request("comparison/0,0,0,0/2,0,0,0/0/7/0/7/max/log/svg").result()
    assert isinstance(svg, bytes)
    assert "cat" not in re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", svg.decode())
    api.close()


def test_the_pages_colours_are_those_of_figures() -> None:
    for name, colors in json.loads(assets.read("colors.json")).items():
        assert bytes(colormaps[name](range(256), bytes=True)[:, :3]).hex() == colors
    assert pictures.DIFFERENCES in json.loads(assets.read("colors.json"))
