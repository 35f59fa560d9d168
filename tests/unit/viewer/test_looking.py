"""`viewer.looking`: the picture that is shown beside a matrix."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

import manyheads as mh
from manyheads.patches import pack
from manyheads.viewer import looking, widget
from manyheads.viewer.api import Api
from manyheads.viewer.export import plan_export
from tests.errors import raises
from tests.waiting import HANG

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def a_map(patches: Any = None) -> mh.AttentionMap:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 7, 8)
    amap = mh.attention_with_map(q, q, q)[1]
    amap.provenance["patches"] = pack([[mh.Patches((2, 3), 1)]]) if patches is None else patches
    return amap


def pixels(url: str) -> np.ndarray:
    return matplotlib.image.imread(BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))


def test_a_picture_is_sent_with_its_patches_and_weights() -> None:
    api, amap = Api(a_map(), picture=[PICTURE, PICTURE[::-1].copy()]), a_map()
    try:
        for batch, picture in enumerate((PICTURE, PICTURE[::-1])):
            answer = json.loads(api.request(f"patches/0/0/{batch}").result(HANG))
            assert (answer["grid"], answer["keys"], answer["first"]) == ([2, 3], [1, 2, 3, 4, 5, 6], 0)
            np.testing.assert_allclose(pixels(answer["src"])[..., :3], picture / 255, atol=1 / 255)
            weights = json.loads(api.request(f"image/0/0/1/4/{batch}").result(HANG))
            np.testing.assert_allclose(weights, amap[batch, 1, 4, 1:].numpy(), atol=1e-7)
        assert json.loads(api.request("runs").result(HANG))["runs"][0]["layers"][0]["has_patches"] is True
        with pytest.raises(LookupError):
            api.request("image/0/0/1/7/0").result(HANG)
    finally:
        api.close()


def test_without_a_picture_or_patches_nothing_is_sent() -> None:
    far = pack([[mh.Patches((1 << 30, 1 << 30))]])  # such as in a damaged file
    for amap, src in ((a_map(), False), (a_map("a reason"), None), (a_map([[]]), None), (a_map(far), None)):
        api = Api(amap)
        try:
            answer = json.loads(api.request("patches/0/0/1").result(HANG))
            assert answer is None if src is None else answer["src"] is None
        finally:
            api.close()


def test_large_pictures_are_reduced_and_files_are_read(tmp_path: Path) -> None:
    assert pixels(looking.encode_picture(np.zeros((30, 3000, 3), np.uint8))).shape[:2] == (10, 1024)
    path = tmp_path / "picture.png"
    matplotlib.image.imsave(path, PICTURE)
    np.testing.assert_allclose(pixels(looking.encode_picture(path))[..., :3], PICTURE / 255, atol=1 / 255)
    with pytest.raises(FileNotFoundError):
        looking.encode_picture(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("no picture")
    with raises(ValueError, "text.png"):
        looking.encode_picture(tmp_path / "text.png")


def test_a_picture_of_unknown_patches_raises() -> None:
    with raises(ValueError, "aren't known", "Patches(grid"):
        Api(mh.attention_with_map(*[torch.ones(1, 1, 3, 4)] * 3)[1], picture=PICTURE)
    with raises(ValueError, "It attends in windows"):
        Api(a_map("It attends in windows."), picture=PICTURE)
    with raises(ValueError, "normalized"):
        Api(a_map(), picture=np.full((3, 4, 4), -2.0))
    with raises(TypeError, "an int"):
        Api(a_map(), picture=3)


def test_in_a_notebook_a_page_has_its_picture() -> None:
    shown = widget.display(Api(a_map(), picture=PICTURE))
    assert isinstance(shown, widget.EmbeddedPage)
    assert "patches/0/0/0" in shown.page


@pytest.mark.parametrize("budget", [2e6, 8e5], ids=["exact", "pooled"])
def test_an_export_has_the_picture_and_announces_its_size(tmp_path: Path, budget: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 400, 8)
    amap = mh.attention_with_map(q, q, q)[1]
    amap.provenance["patches"] = pack([[mh.Patches((20, 19), 1)]])
    noise = torch.randint(256, (90, 120, 3), dtype=torch.uint8).numpy()  # a PNG of some 30 KB
    plan = plan_export(Api(amap, picture=noise), tmp_path / "page.html", heads=[1], budget=budget)
    [page] = plan.write()
    assert plan.size == pytest.approx(page.stat().st_size, rel=0.02)
    assert plan.size <= budget
    assert ("show the picture without weights" in plan.description) == (plan.finest > 0) == (budget < 1e6)
    answers = re.search('id="answers">(.*?)</script>', page.read_text())
    assert answers is not None
    patches = json.loads(base64.b64decode(json.loads(answers[1])["patches/0/0/0"]))
    assert patches["grid"] == [20, 19]
    np.testing.assert_allclose(pixels(patches["src"])[..., :3], noise / 255, atol=1 / 255)
