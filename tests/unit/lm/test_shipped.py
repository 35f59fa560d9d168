"""The model that ships: what its card says is so, and its heads have learned to copy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import make_shipped_model as recipe
import numpy as np
import pytest
import torch

from manyheads import lm
from manyheads.lm import checkpoint, data
from manyheads.lm.checkpoint import LOG
from manyheads.lm.train import held_out_loss

CARD = (checkpoint.SHIPPED / "card.md").read_text("utf-8")


@pytest.fixture(scope="module")
def shipped() -> lm.LanguageModel:
    return lm.load()[0]


@pytest.fixture(scope="module")
def held_out(python_documents: list[data.Document]) -> list[data.Document]:
    """The held-out text: names decide the split, so it is the same for every version of Python."""
    return recipe.split(python_documents)[1]


@pytest.fixture(scope="module")
def held_ids(held_out: list[data.Document]) -> data.Tokens:
    return np.concatenate([[data.END_ID], *(ids for _, ids in data.encode(lm.load()[1], held_out))])


def test_it_is_small_and_has_no_pickle() -> None:
    files = {path.name: path.stat().st_size for path in checkpoint.SHIPPED.iterdir()}
    assert set(files) == {*checkpoint.FILES[:3], "card.md", LOG}
    assert files["model.safetensors"] <= 10_000_000
    assert sum(files.values()) < 11_000_000


def test_the_card_names_these_weights() -> None:
    assert checkpoint.file_digest(checkpoint.SHIPPED / "model.safetensors") in CARD
    assert re.search(r"SHA-256 of all documents: `[0-9a-f]{64}`", CARD)


def test_the_log_covers_the_whole_run() -> None:
    lines = [json.loads(line) for line in (checkpoint.SHIPPED / LOG).read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == recipe.OPTIONS["steps"]
    assert lines[-1]["held_out_loss"] < lines[0]["loss"] / 2


def test_its_context_is_long_enough(shipped: lm.LanguageModel) -> None:
    assert shipped.config.context >= 256


@pytest.mark.full
def test_a_head_attends_to_the_previous_token(shipped: lm.LanguageModel, held_ids: data.Tokens) -> None:
    assert recipe.previous_token(shipped, held_ids).max() > recipe.PREVIOUS


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", [recipe.SEED, 7_654_321])
def test_a_head_attends_to_the_token_after_the_same_one(shipped: lm.LanguageModel, seed: int) -> None:
    assert recipe.induction(shipped, seed).max() > recipe.INDUCTION


@pytest.mark.full
@torch.no_grad()
def test_the_scores_of_planted_weights(shipped: lm.LanguageModel, held_ids: data.Tokens) -> None:
    """The same numbers by hand, from the dense weights of one text and one repeated sequence."""
    text = torch.from_numpy(held_ids[:256].astype(np.int64))[None]
    previous = torch.stack([amap.dense()[0] for amap in shipped.attend(text)[1]])  # [layers, h, t, s]
    by_hand = previous.diagonal(-1, -2, -1).mean(-1)  # [layers, h]
    once = held_ids[:256]
    measured = recipe.previous_token(shipped, np.tile(once, recipe.TEXTS))
    torch.testing.assert_close(measured, by_hand, rtol=1e-3, atol=1e-4)

    rng = np.random.default_rng(5)
    said = rng.choice(np.arange(1, shipped.config.vocab), 128, replace=False)  # none occurs twice
    ids = torch.from_numpy(np.tile(said, 2))[None]
    weights = torch.stack([amap.dense()[0] for amap in shipped.attend(ids)[1]])
    after = weights.diagonal(-127, -2, -1)[..., 1:].mean(-1)  # query 128 + n attends to key n + 1
    assert after.max() > recipe.INDUCTION


@pytest.mark.full
def test_it_compresses_held_out_text_better_than_xz(
    shipped: lm.LanguageModel, held_out: list[data.Document], held_ids: data.Tokens
) -> None:
    nats = held_out_loss(shipped, held_ids) * (len(held_ids) - 1)
    bits = nats / math.log(2) / recipe.byte_count(held_out)
    assert bits < recipe.xz_bits(held_out)
    assert bits > 0.5  # a model that has seen the text would do better than this


def test_loading_touches_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lm.load()
    assert not list(tmp_path.iterdir())
