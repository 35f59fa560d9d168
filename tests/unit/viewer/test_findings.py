"""The findings of a long text are the same in `manyheads show` and in the viewer of its saved recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads.text import models, report
from manyheads.viewer.api import Api

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 30_000
PREVIOUS, FIRST, INDUCTION = range(3)
EARLIER, AFTER, QUERY = 40, 41, 700  # an earlier occurrence of the token at QUERY, and the token after it
OUTSIDE = 20_000  # a token that stands out as much, but that isn't among those that are searched


class Planted(nn.Module):
    """A layer with three heads: they attend to the previous token, the first one, and one earlier token."""

    def forward(self, ids: Tensor) -> Tensor:
        """Attend from every query to the keys of its head."""
        t = ids.shape[1]
        angles = torch.arange(t)[:, None] * 0.5 * 4.0 ** -torch.arange(4)  # [t, 4]
        shifted = angles - 0.5 * 4.0 ** -torch.arange(4)
        q, k = torch.zeros(1, 3, t, 8), torch.zeros(1, 3, t, 8)
        q[:, PREVIOUS], k[:, PREVIOUS] = (6 * torch.cat([x.sin(), x.cos()], -1) for x in (shifted, angles))
        q[:, FIRST, :, 0] = k[:, FIRST, 0, 0] = 7.0
        q[:, INDUCTION, QUERY, 0] = q[:, INDUCTION, OUTSIDE, 0] = k[:, INDUCTION, AFTER, 0] = 8.0
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)


def read_planted(length: int) -> models.Model:
    words = [f" w{n}" for n in range(length)]
    words[EARLIER], words[AFTER], words[QUERY] = " cat", " sat", " cat"
    ids = list(range(length))
    ids[QUERY] = EARLIER
    module = Planted()
    encode = lambda text, limit: (ids, mh.TokenizedText(tuple(words)))  # noqa: E731
    return models.Model("planted", module, module, None, encode)


@pytest.mark.full
def test_findings_of_show_and_of_the_viewer_are_equal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "load", lambda name: read_planted(LENGTH))
    reading = report.read("a text that the planted model replaces")
    expected = [
        (x.layer, x.head, x.query, x.key, pytest.approx(x.weight, abs=1e-6), reading.describe(x))
        for x in reading.findings
    ]
    assert (0, INDUCTION, QUERY, AFTER) in [x[:4] for x in expected]
    reading.recording.save(tmp_path / "run.safetensors")
    api = Api(tmp_path / "run.safetensors")
    response = json.loads(api.request("findings/0/0").result())
    api.close()
    assert (response["searched"], response["tokens"]) == (1024, LENGTH)
    found = [
        (x["layer"], x["head"], x["query"], x["key"], x["weight"], x["sentence"])
        for x in response["findings"]
    ]
    assert found == expected
    (sentence,) = [x[5] for x in found if x[1] == INDUCTION]
    assert "induction" in sentence
    assert '"sat"' in sentence
