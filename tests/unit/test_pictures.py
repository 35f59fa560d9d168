"""Maps of patches: `AttentionMap.image`, `Recording.overlay` and `rollout_image`, `figures.overlay`."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import manyheads
from manyheads import AttentionMap, Causal, Patches, TokenizedText, figures, measures
from manyheads.observe import Recording, open_run
from tests.errors import raises

transformers = pytest.importorskip("transformers")


@cache
def amap(dtype: torch.dtype = torch.float32) -> AttentionMap:
    """A map of a class token, 12 patches and a token after them."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 14, 8, dtype=dtype), torch.randn(2, 2, 14, 8, dtype=dtype)
    return manyheads.attention_with_map(q, k, k)[1]


# -- AttentionMap.image ------------------------------------------------------------------------------

QUERIES = st.one_of(
    st.integers(-14, 13),
    st.lists(st.integers(-14, 13), max_size=5),
    st.builds(slice, st.integers(-16, 16), st.integers(-16, 16), st.sampled_from([None, 1, 2, -1])),
)
KEYS = (slice(1, 13), list(range(12, 0, -1)), torch.arange(-13, -1), np.arange(1, 13), slice(-2, 0, -1))


@given(QUERIES, st.sampled_from(KEYS), st.sampled_from([(3, 4), (4, 3), (1, 12), (12, 1)]))
def test_an_image_is_a_part_of_the_matrix(queries: Any, keys: Any, grid: tuple[int, int]) -> None:
    image, dense = amap().image(queries, keys, grid), amap().dense().numpy()
    columns = keys.numpy() if isinstance(keys, Tensor) else keys
    rows = queries if isinstance(queries, int | slice) else np.array(queries, dtype=int)
    want = dense[:, :, rows][..., columns].copy()  # [b, h, (n,) 12]
    np.testing.assert_allclose(image.numpy(), want.reshape(*want.shape[:-1], *grid), rtol=0, atol=1e-6)


def test_the_shapes_of_images() -> None:
    assert amap().image(0, keys=slice(1, 13), grid=(3, 4)).shape == (2, 4, 3, 4)
    for several in ([0], slice(0, 1), torch.tensor([0])):
        assert amap().image(several, keys=slice(1, 13), grid=(3, 4)).shape == (2, 4, 1, 3, 4)
    assert amap().image([], keys=slice(1, 13), grid=(3, 4)).shape == (2, 4, 0, 3, 4)
    assert amap().image(0, grid=(2, 7)).shape == (2, 4, 2, 7)
    assert amap().image(0, Patches((3, 4), 1)).shape == (2, 4, 3, 4)


def test_many_queries_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = amap().image(slice(None), slice(1, 13), (3, 4))
    monkeypatch.setattr("manyheads.maps.STEP", 250)  # two queries
    torch.testing.assert_close(amap().image(slice(None), slice(1, 13), (3, 4)), whole)
    assert amap(torch.float64).image([1, 2], Patches((3, 4), 1)).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"queries": 0, "grid": (3, 4)},
            ValueError,
            ("12 keys for grid=(3, 4)", "got 14", "keys=slice(2, None)"),
        ),
        ({"queries": 0, "keys": slice(1, 12), "grid": (3, 4)}, ValueError, ("got 11 of s = 14",)),
        ({"queries": 0, "keys": slice(1, 13)}, ValueError, ("grid=(rows, cols)", "slice(1, 13")),
        ({"queries": 0}, ValueError, ("aren't known", "Patches(grid=(rows, cols)")),
        ({"queries": 0, "keys": Patches((3, 4), 1), "grid": (3, 4)}, ValueError, ("either grid or Patches",)),
        ({"queries": 0, "keys": Patches((3, 4), 3)}, ValueError, ("s = 14",)),
        ({"queries": 0, "keys": 3, "grid": (1, 1)}, TypeError, ("the key 3",)),
        ({"queries": 0, "keys": [20] * 12, "grid": (3, 4)}, IndexError, ("key [20",)),
        ({"queries": 14, "grid": (2, 7)}, IndexError, ("query 14", "t = 14")),
        ({"queries": True, "grid": (2, 7)}, IndexError, ("True",)),
        ({"queries": 1.0, "grid": (2, 7)}, IndexError, ("1.0",)),
        ({"queries": "dog", "grid": (2, 7)}, IndexError, ("'dog'",)),
        ({"queries": 0, "grid": 14}, TypeError, ("(rows, cols)", "14")),
        ({"queries": 0, "grid": (-2, -7)}, ValueError, ("at least 1", "-2")),
        ({"queries": slice(None), "grid": (2, 7), "max_bytes": 100}, ValueError, ("14 queries", "max_bytes")),
        ({"queries": 0, "grid": (2, 7), "max_bytes": 100}, ValueError, ("image of a query", "max_bytes")),
        ({"queries": 0, "grid": (2, 7), "max_bytes": "1"}, TypeError, ("max_bytes", "'1'")),
    ],
)
def test_an_image_that_does_not_exist_raises(arguments: dict, error: Any, words: tuple[str, ...]) -> None:
    with raises(error, *words):
        amap().image(**arguments)


MEMORY = """
import sys, torch
import manyheads as mh

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000

def look(side):
    q, k = torch.randn(2, 1, 4, side * side + 1, 64)
    amap = mh.AttentionMap.of(mh.problem.Problem.of(q, k, k))
    images = [amap.image(0, slice(1, None), (side, side)), amap.image([5, 7], slice(1, None), (side, side))]
    assert abs(float(amap[0, 3, 0].sum()) - 1) < 1e-4
    return sum(x.nbytes for x in (q, k, *images)) / 1e6

torch.set_num_threads(1)
small = look(10)
before = peak()
held = look(100)
print(peak() - before - held + small)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_an_image_of_10000_tokens_takes_little_memory() -> None:
    """The weights would take 1.6 GB. It computes the log-sum-exp of all rows, tile by tile."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40  # MB


# -- recordings --------------------------------------------------------------------------------------


@cache
def recorded() -> Recording:
    """A ViT of three layers, 4 × 6 patches and two pictures."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=(24, 36), patch_size=6, hidden_size=32, num_hidden_layers=3,
                                    num_attention_heads=2, intermediate_size=32)  # fmt: skip
    model = transformers.ViTModel(config).eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name or "query" in name or "key" in name:
            parameter.data *= 8
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(torch.randn(2, 3, 24, 36))
    return recording


def siglip() -> Recording:
    config = transformers.SiglipVisionConfig(image_size=24, patch_size=6, hidden_size=32, num_hidden_layers=2,
                                             num_attention_heads=2, intermediate_size=32)  # fmt: skip
    model = transformers.SiglipVisionModel(config).eval()
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(torch.randn(1, 3, 24, 24))
    return recording


def test_the_patches_of_a_recording_are_used_and_saved(tmp_path: Any) -> None:
    recorded().save(tmp_path / "run.safetensors")
    for recording in (recorded(), open_run(tmp_path / "run.safetensors")):
        assert recording.patches() == Patches((4, 6), 1, special=("class token",))
        image = recording[-1].image(0)
        torch.testing.assert_close(image, recording[-1][:, :, 0, 1:].unflatten(-1, (4, 6)))


def test_rollout_is_the_product_of_the_layers() -> None:
    layers = [recorded()[n].dense().double().mean(1) for n in range(3)]  # [b, t, t]
    product = torch.eye(25, dtype=torch.float64)
    for weights in layers:
        product = (weights + torch.eye(25)) / 2 @ product
    for queries, rows in ((None, [0]), (3, [3]), ([2, 2, -1], [2, 2, 24]), (slice(None), [*range(25)])):
        got = recorded().rollout_image(queries)
        want = product[:, rows].mean(1)[:, 1:].unflatten(-1, (4, 6))
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
    last = [recorded()[n] for n in range(3)]
    whole = measures.rollout(last, rows=slice(None))
    torch.testing.assert_close(measures.rollout_mean(last), whole.mean(1))
    torch.testing.assert_close(
        recorded().rollout_image(patches=Patches((5, 5))), whole[:, 0:25].mean(1).unflatten(-1, (5, 5))
    )


def test_rollout_without_a_class_token_is_the_mean_over_all_tokens() -> None:
    recording = siglip()
    want = measures.rollout([recording[0], recording[1]], rows=slice(None)).mean(1)
    torch.testing.assert_close(recording.rollout_image(), want.unflatten(-1, (4, 4)))


def test_a_rollout_that_does_not_exist_raises() -> None:
    with raises(KeyError, "'text'"):
        recorded().rollout_image(layers="text")
    with raises(TypeError, "Patches", "a tuple"):
        recorded().rollout_image(patches=(4, 6))  # type: ignore[arg-type]
    with raises(ValueError, "s = 25"):
        recorded().rollout_image(patches=Patches((5, 6)))
    with raises(ValueError, "at least one position"):
        recorded().rollout_image([])
    with raises(IndexError, "25"):
        recorded().rollout_image(25)
    with raises(ValueError, "as many queries as keys"):
        siglip().rollout_image(layers="head")
    with raises(ValueError, "Nothing was recorded"):
        Recording().rollout_image()
    layer = manyheads.MultiHeadAttention(16, 2)
    with manyheads.observe(layer) as recording:
        layer(torch.randn(1, 5, 16))
    with raises(ValueError, "aren't known", "Patches(grid"):
        recording.rollout_image()
    assert recording.rollout_image(patches=Patches((2, 2), 1)).shape == (1, 2, 2)
    with manyheads.observe(layer, keep="statistics") as recording:
        layer(torch.randn(1, 5, 16))
    with raises(ValueError, 'keep="maps"'):
        recording.rollout_image(patches=Patches((2, 2), 1))


# -- figures -----------------------------------------------------------------------------------------

PICTURE = np.random.default_rng(0).integers(0, 256, (24, 36, 3), dtype=np.uint8)
PIXELS = torch.tensor(PICTURE).permute(2, 0, 1) / 255  # [3, h, w]
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def normalized() -> Tensor:
    return (PIXELS - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@pytest.mark.parametrize(
    ("picture", "options"),
    [
        (PICTURE, {}),
        (torch.tensor(PICTURE), {}),
        (PIXELS, {}),
        (PIXELS[None], {}),
        (PIXELS.half(), {}),
        (PIXELS.bfloat16(), {}),
        (PIXELS.double().requires_grad_(), {}),
        (PIXELS.permute(1, 2, 0).numpy(), {}),
        (normalized(), {"mean": MEAN, "std": STD}),
        ((PIXELS - 0.5) / 0.5, {"mean": 0.5, "std": 0.5}),
        (torch.cat((PIXELS, torch.ones(1, 24, 36))), {}),
    ],
)
def test_a_picture_of_any_kind_becomes_the_same_pixels(picture: Any, options: dict) -> None:
    pixels = figures.overlays.read_picture(picture, **options)
    assert pixels.shape == (24, 36, 3)
    tolerance = 0.01 if getattr(picture, "dtype", None) in (torch.bfloat16, torch.float16) else 1e-5
    np.testing.assert_allclose(pixels, PICTURE / 255, rtol=0, atol=tolerance)


def test_pictures_of_pil_and_grey_pictures() -> None:
    image = pytest.importorskip("PIL.Image")
    for picture in (image.fromarray(PICTURE), image.fromarray(PICTURE).convert("RGBA")):
        np.testing.assert_array_equal(figures.overlays.read_picture(picture), PICTURE / 255)
    grey = figures.overlays.read_picture(PICTURE[..., 0])
    np.testing.assert_array_equal(grey, np.repeat(PICTURE[..., :1], 3, 2) / 255)
    with raises(ValueError, "mode F"):
        figures.overlays.read_picture(image.new("F", (4, 4)))


@pytest.mark.parametrize(
    ("picture", "options", "error", "words"),
    [
        (normalized(), {}, ValueError, ("normalized", "mean=", "image_mean")),
        (PICTURE.astype(float), {}, ValueError, ("0 to 255", "Divide it by 255")),
        (PICTURE.astype(int), {}, TypeError, ("int64", "uint8")),
        (PICTURE, {"mean": 0.5, "std": 0.5}, TypeError, ("floats", "uint8")),
        (PIXELS, {"mean": 0.5}, ValueError, ("both mean and std",)),
        (PIXELS, {"mean": (0.5, 0.5), "std": 0.5}, ValueError, ("3 numbers",)),
        (normalized(), {"mean": 9.0, "std": 1.0}, ValueError, ("aren't those of the processor",)),
        (PIXELS * torch.nan, {}, ValueError, ("NaN",)),
        (torch.stack([PIXELS] * 2), {}, ValueError, ("[2, 3, 24, 36]", "pictures[0]")),
        (torch.rand(5, 24, 36), {}, ValueError, ("[5, 24, 36]",)),
        (torch.rand(3, 0, 4), {}, ValueError, ("[3, 0, 4]",)),
        ("cat.png", {}, TypeError, ("a str",)),
        (PIXELS, {"query": (4, 0)}, ValueError, ("4 × 6", "(4, 0)")),
        (PIXELS, {"query": 3}, TypeError, ("(row, column)", "3")),
        (PIXELS, {"interpolation": "lanczos"}, ValueError, ("nearest, bilinear, bicubic", "'lanczos'")),
        (PIXELS, {"scale": "log"}, ValueError, ('"shared"', "'log'")),
        (PIXELS, {"alpha": 2}, ValueError, ("0 to 1", "2")),
        (PIXELS, {"titles": ["a"]}, ValueError, ("each of 2 heads", "1")),
        (PIXELS, {"mean": 0.5, "std": 0.0}, ValueError, ("std to be positive", "0.0")),
        (PIXELS, {"titles": 3}, TypeError, ("titles to be a list of strings", "3")),
        (PIXELS, {"titles": "ab"}, TypeError, ("titles to be a list of strings", "'ab'")),
        (PIXELS, {"titles": ["a", 2]}, TypeError, ("titles to be strings", "2")),
        (PIXELS, {"batch": 0}, ValueError, ("[b, h, rows, cols]",)),
    ],
)
def test_a_picture_or_option_that_does_not_fit_raises(
    picture: Any, options: dict, error: Any, words: tuple[str, ...]
) -> None:
    with raises(error, *words):
        figures.overlay(picture, torch.rand(2, 4, 6), **options)


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        (torch.rand(2, 3, 1, 4, 6), ValueError, ("[2, 3, 1, 4, 6]", "image[:, :, n]")),
        (torch.rand(2, 3, 4, 6), ValueError, ("batch", "2 maps")),
        (torch.rand(6), ValueError, ("[rows, cols]", "[6]")),
        (torch.rand(0, 4, 6), ValueError, ("[0, 4, 6]",)),
        (torch.rand(65, 4, 6), ValueError, ("64", "65")),
        (torch.rand(2, 4, 6) - 1, ValueError, ("at least 0",)),
        (torch.full((4, 6), torch.nan), ValueError, ("NaN",)),
        ([[1.0]], TypeError, ("a list",)),
    ],
)
def test_a_map_that_does_not_fit_raises(image: Any, error: Any, words: tuple[str, ...]) -> None:
    with raises(error, *words):
        figures.overlay(PIXELS, image)


def written(figure: Any) -> list[str]:
    """Return all texts of a figure."""
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_the_figure_says_what_it_shows() -> None:
    image = torch.rand(1, 3, 4, 6) / 10
    figure = figures.overlay(PIXELS, image, query=(3, 5), interpolation="bilinear", title="layer 2")
    texts = written(figure)
    assert "4 × 6 patches, bilinear interpolation; marked: the query, patch 3, 5" in texts
    assert {"picture", "head 0", "head 2", "layer 2", "attention weight"} <= {*texts}
    panels = figure.axes[:4]
    maps = [axes.get_images()[-1] for axes in panels[1:]]
    for shown, weights in zip(maps, image[0], strict=True):
        np.testing.assert_allclose(np.asarray(shown.get_array()), weights.numpy(), atol=1e-7)
        assert shown.get_clim() == maps[0].get_clim()
        assert shown.get_interpolation() == "bilinear"
        assert shown.get_extent() == panels[0].get_images()[0].get_extent()  # on top of each other
    each = figures.overlay(PIXELS, image, scale="each")
    assert np.asarray(each.axes[3].get_images()[-1].get_array()).max() == pytest.approx(1)
    assert any(re.fullmatch(r"head 2, to 0\.\d+", text) for text in written(each))


@pytest.mark.parametrize("shape", [(24, 36), (200, 10), (10, 200)])
def test_the_weights_of_a_patch_are_drawn_over_it(shape: tuple[int, int], tmp_path: Any) -> None:
    """A single bright patch, with the picture hidden, in pictures of any aspect."""
    image = torch.zeros(2, 4, 6)
    image[0, 3, 1] = 1.0
    figure = figures.overlay(np.zeros((*shape, 3), np.uint8), image, alpha=1.0)
    figure.savefig(tmp_path / "a.png", dpi=100)
    drawn = matplotlib.image.imread(tmp_path / "a.png")
    box = figure.axes[1].get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    height = figure.get_figheight()
    yellow = (drawn[..., 0] > 0.9) & (drawn[..., 1] > 0.8) & (drawn[..., 2] < 0.4)
    down, across = np.nonzero(yellow[:, : int(box.x1 * 100)])  # without the colour bar
    at = across.mean() / 100, height - down.mean() / 100
    assert at[0] == pytest.approx(box.x0 + 1.5 / 6 * box.width, abs=0.04)
    assert at[1] == pytest.approx(box.y1 - 3.5 / 4 * box.height, abs=0.04)
    assert box.height / box.width == pytest.approx(shape[0] / shape[1], rel=0.05)


def test_a_recording_draws_the_class_token_a_patch_and_a_word() -> None:
    recording = recorded()
    figure = recording.overlay(PIXELS, batch=1)
    shown = np.asarray(figure.axes[2].get_images()[-1].get_array())
    np.testing.assert_allclose(shown, recording[-1][1, 1, 0, 1:].view(4, 6).numpy(), atol=1e-7)
    assert any("class token" in text for text in written(figure))
    figure = recording.overlay(PIXELS, (3, -1), layer=0, titles=["a", "b"])
    shown = np.asarray(figure.axes[1].get_images()[-1].get_array())
    np.testing.assert_allclose(shown, recording[0][0, 0, 24, 1:].view(4, 6).numpy(), atol=1e-7)
    assert any("patch 3, 5" in text for text in written(figure))

    layer = manyheads.MultiHeadAttention(16, 2)
    with manyheads.observe(layer) as words:
        layer(torch.randn(1, 6, 16), mask=Causal())
    words[0].provenance["patches"] = manyheads.patches.pack([[Patches((1, 2), 1)]])
    words.label(TokenizedText(("a", " x", " x", " un", "known", " dog")))
    figure = words.overlay(PIXELS, "unknown")
    shown = np.asarray(figure.axes[1].get_images()[-1].get_array())
    np.testing.assert_allclose(shown[0], words[0][0, 0, 3:5, 1:3].mean(0).numpy(), atol=1e-7)
    assert any("“unknown”" in text for text in written(figure))
    with raises(ValueError, "'x'", "2 times, at the tokens 1, 2"):
        words.overlay(PIXELS, "x")
    with raises(ValueError, "'cat'", "never"):
        words.overlay(PIXELS, "cat")
    with raises(ValueError, "no class token", "(row, column)"):
        words.overlay(PIXELS)
    words.label(["a", "Ġb", "c", "d", "e", "▁dog"])
    assert words.overlay(PIXELS, "dog").axes


def test_a_query_that_does_not_exist_raises() -> None:
    recording = recorded()
    with raises(ValueError, "no labels", "'dog'", "TokenizedText.from_ids"):
        recording.overlay(PIXELS, "dog")
    with raises(IndexError, "4 × 6 patches"):
        recording.overlay(PIXELS, (4, 0))
    with raises(IndexError, "token 25", "0 to 24"):
        recording.overlay(PIXELS, 25)
    for query in (True, 1.5, [1], (1, 2, 3)):
        with raises(TypeError, "(row, column)"):
            recording.overlay(PIXELS, query)  # type: ignore[arg-type]
    with raises(IndexError, "batch entry"):
        recording.overlay(PIXELS, batch=2)
    assert siglip().overlay(PIXELS).axes  # the only query of its pooling head
    with raises(ValueError, "or select another layer, such as layer=-2"):
        siglip().overlay(PIXELS, (1, 2))
    assert siglip().overlay(PIXELS, (1, 2), layer=-2).axes
