"""Errors that public functions and classes document, where no other test provokes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads import checker, figures, lm, measures, storage
from manyheads.classic import annotated, components, modeling_attention, torch_multihead
from manyheads.observe import NoSuchLayer, Recording, Reduced, record_attention
from manyheads.problem import Problem
from manyheads.text import models
from tests.errors import raises

Q, K = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)
X = torch.ones(2, 5, 12)
MANY = mh.MultiHeadAttention(12, 4)
ONE, CROSS = mh.SelfAttention(12), mh.CrossAttention(12, 6)
TINY = lm.LanguageModel(lm.Config(vocab=16, embed=16, heads=2, layers=1, hidden=8, context=8))
FIRST = modeling_attention.SelfAttention(12, 12)
FIRST_HEADS = modeling_attention.MultiHeadSelfAttention(12, 12, 4)
SECOND = torch_multihead.MultiheadAttention(12, 4)
THIRD, THIRD_CROSS = components.SelfAttention(12, 4, 4), components.CrossAttention(12, 6, 4, 4)
THIRD_HEADS = components.MultiHeadedAttention([THIRD], 12)
FOURTH = annotated.MultiHeadAttention(4, 12)
PREPARE = annotated.PrepareForMultiHeadAttention(12, 4, 3, True)
ABSENT = "no folder/of this name"
BAD: Any = "no such thing"  # valid for no argument
BEHIND_A_FILE = Path(__file__) / "report"
REPORT = checker.Report("mine", "self", False, [], pair=(X[0], X[0], "output"))
MASK: Any = torch.ones(5, 5) > 0  # a tensor, which is no mask


@cache
def amap() -> mh.AttentionMap:
    return mh.attention_with_map(Q, K, K)[1]


@cache
def seen() -> Recording:
    with torch.no_grad(), mh.observe(MANY) as found:
        MANY(X)
    return found


def ruled() -> mh.AttentionMap:
    """A map that can't be saved."""
    return amap().under(mh.Rule(lambda b, h, i, j: j <= i))


def observing(run: Any = X, **options: Any) -> Any:
    with torch.no_grad(), mh.observe(options.pop("model", MANY), **options) as found:
        MANY(run)
    return found


def attending(q: Tensor, k: Tensor, **options: Any) -> None:
    class Recorded(nn.Module):
        def forward(self) -> Tensor:
            return record_attention(Problem.of(q, k, k), lambda: q)

    model = Recorded()
    with mh.observe(model, **options):
        model()


def values_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention."""
    return v


def ruled_run() -> Recording:
    found = Recording()
    found.add("layer", ruled(), K)
    return found


def in_a_folder(call: Callable[[Path], Any]) -> None:
    with TemporaryDirectory() as folder:
        call(Path(folder))


def no_model(folder: Path) -> Any:
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return lm.load(folder)


def of_theirs(folder: Path) -> Any:
    (folder / "config.json").write_text('{"model_type": "no such type"}')
    return models.load(folder)


def without_transformers() -> Any:
    with patch.dict(sys.modules, transformers=None):
        in_a_folder(of_theirs)


def without_pandas() -> Any:
    with patch.dict(sys.modules, pandas=None):
        return seen().table().to_pandas()


INVALID: list[tuple[type[Exception], Callable[[], Any]]] = [
    # masks
    (TypeError, lambda: mh.Lengths(BAD)),
    (TypeError, lambda: mh.Lengths(3, left=BAD)),
    (ValueError, lambda: mh.Lengths(-1)),
    (ValueError, lambda: mh.Drop(MASK[0])),
    (TypeError, lambda: mh.Causal().table(BAD)),
    (TypeError, lambda: mh.Causal().table(4, 4, cast(Any, 1.5))),
    (ValueError, lambda: mh.Causal().table(-1)),
    (TypeError, lambda: mh.Causal().draw(offset=BAD)),
    (ValueError, lambda: mh.Causal().draw(-1)),
    # biases and positions
    (TypeError, lambda: mh.Relative.learned(BAD, 2)),
    (TypeError, lambda: mh.Sinusoidal(4).encode(BAD)),
    (ValueError, lambda: mh.Rotary(4).scaled(0.5)),
    # functions, layers, the cache
    (TypeError, lambda: mh.SelfAttention(BAD)),
    (TypeError, lambda: ONE.attend(X, mask=MASK)),
    (ValueError, lambda: ONE.attend(X[0])),
    (TypeError, lambda: mh.CrossAttention(12, BAD)),
    (ValueError, lambda: mh.CrossAttention(12, 0)),
    (TypeError, lambda: CROSS(X, BAD)),
    (TypeError, lambda: CROSS.attend(X, BAD)),
    (ValueError, lambda: CROSS.attend(X, X)),
    (TypeError, lambda: MANY(X, mask=MASK)),
    (TypeError, lambda: MANY(X, cache=BAD)),
    (TypeError, lambda: MANY.attend(BAD)),
    (ValueError, lambda: MANY.attend(X, X, cache=mh.Cache())),
    (TypeError, lambda: MANY.load({"q.weight": BAD})),
    (TypeError, lambda: MANY.load(BAD)),
    (TypeError, lambda: mh.Cache(BAD)),
    (TypeError, lambda: mh.Cache(mask=BAD)),
    (TypeError, lambda: mh.Cache(votes=2).received("x")),
    (TypeError, lambda: mh.Cache().append(BAD, K)),
    (TypeError, lambda: mh.Cache().write(K, BAD)),
    (ValueError, lambda: mh.Cache(3).write(K, K)),
    # maps
    (TypeError, lambda: amap().under(BAD)),
    (ValueError, lambda: amap().under(mh.Keep(MASK[:2]))),
    (ValueError, lambda: amap().again(Problem.of(Q, K, K), Q)),
    (TypeError, lambda: amap().again(Problem.of(Q, K, K), BAD)),
    (TypeError, lambda: amap().masses(BAD)),
    (ValueError, lambda: amap().masses(mh.Keep(MASK[:2]))),
    (ValueError, lambda: in_a_folder(lambda folder: ruled().save(folder / "map"))),
    (TypeError, lambda: amap().view(3)),
    (ValueError, lambda: amap().view(Recording())),
    (OSError, lambda: amap().view(port=70_000)),
    (OSError, lambda: amap().save(ABSENT)),
    (ValueError, lambda: mh.AttentionMap.open(__file__)),
    (OSError, lambda: mh.AttentionMap.open(ABSENT)),
    # measures
    (TypeError, lambda: measures.previous_token(BAD)),
    (TypeError, lambda: measures.current_token(BAD)),
    (TypeError, lambda: measures.first_token(BAD)),
    (TypeError, lambda: measures.duplicate_token(amap(), BAD)),
    (TypeError, lambda: measures.duplicate_token(BAD, IDS)),
    (TypeError, lambda: measures.induction(amap(), BAD)),
    (TypeError, lambda: measures.induction(BAD, IDS)),
    (ValueError, lambda: measures.induction(amap(), IDS[:, :2])),
    (TypeError, lambda: measures.local(amap(), BAD)),
    (TypeError, lambda: measures.local(BAD, 1)),
    # observe
    (TypeError, lambda: observing(model=BAD)),
    (ValueError, lambda: observing(keep=BAD)),
    (MemoryError, lambda: observing(max_bytes=10)),
    (ValueError, lambda: mh.open_run(__file__)),
    (OSError, lambda: mh.open_run(ABSENT)),
    (NoSuchLayer, lambda: seen().calls(BAD)),
    (TypeError, lambda: seen().calls(cast(Any, 1.5))),
    (NoSuchLayer, lambda: seen()[BAD]),
    (TypeError, lambda: seen()[cast(Any, 1.5)]),
    (TypeError, lambda: seen().label(BAD)),
    (ValueError, lambda: seen().label(["a"])),
    (TypeError, lambda: seen().table(BAD)),
    (ValueError, lambda: seen().table(IDS[:, :2])),
    (TypeError, lambda: seen().view(3)),
    (ValueError, lambda: Recording().view()),
    (OSError, lambda: seen().view(port=70_000)),
    (ValueError, lambda: Recording().plot()),
    (ValueError, lambda: in_a_folder(lambda folder: ruled_run().save(folder / "run"))),
    (OSError, lambda: seen().save(ABSENT)),
    (ValueError, lambda: seen().table().sorted(BAD)),
    (ImportError, without_pandas),
    (TypeError, lambda: Reduced.of(amap(), {"top": ()})),
    (ValueError, lambda: Reduced.of(amap(), {BAD: ()})),
    (TypeError, lambda: Reduced.of(amap(), {"entropy": ()}).labelled(BAD)),
    (ValueError, lambda: Reduced.of(amap(), {"entropy": ()}).labelled(["a"])),
    (ValueError, lambda: Reduced.of(amap(), {"mass": mh.Causal()}).stored()),
    (ValueError, lambda: Reduced.restored(storage.StoredStatistics({}, {}))),
    (ValueError, lambda: attending(Q.to("meta"), K.to("meta"))),
    (MemoryError, lambda: attending(Q, K, max_bytes=10)),
    # figures
    (TypeError, lambda: figures.beside(BAD, BAD)),
    (TypeError, lambda: figures.visible(BAD, 0, 0)),
    (IndexError, lambda: figures.visible(amap(), 9, 0)),
    (TypeError, lambda: figures.received(BAD)),
    (ValueError, lambda: figures.difference(Q, Q)),
    (TypeError, lambda: figures.curves(BAD, [0])),
    (TypeError, lambda: figures.image(BAD)),
    # the checker
    (checker.Unclear, lambda: checker.check(BAD)),
    (checker.Unclear, lambda: checker.assert_attention(BAD)),
    (AssertionError, lambda: checker.assert_attention(values_alone, "attention")),
    (OSError, lambda: REPORT.save_json(BEHIND_A_FILE)),
    (OSError, lambda: REPORT.save_junit(BEHIND_A_FILE)),
    (OSError, lambda: REPORT.save_picture(BEHIND_A_FILE)),
    # the language model
    (TypeError, lambda: lm.LanguageModel(BAD)),
    (ValueError, lambda: lm.LanguageModel(TINY.config, 2.0)),
    (TypeError, lambda: TINY(BAD)),
    (TypeError, lambda: TINY.attend(BAD)),
    (ValueError, lambda: TINY.attend(IDS + 99)),
    (TypeError, lambda: TINY.scaled(BAD)),
    (ValueError, lambda: TINY.scaled(7)),
    (TypeError, lambda: TINY.caches(BAD)),
    (ValueError, lambda: TINY.caches(0)),
    (TypeError, lambda: TINY.check(BAD, None)),
    (ValueError, lambda: TINY.check(X, None)),
    (TypeError, lambda: lm.Sampling(top_k=BAD)),
    (TypeError, lambda: lm.Sampling(temperature=BAD)),
    (TypeError, lambda: lm.generate(TINY, IDS[:1], BAD)),
    (TypeError, lambda: lm.generate(TINY, BAD, 1)),
    (TypeError, lambda: lm.complete(*lm.load(), "a", BAD)),
    (TypeError, lambda: lm.stream(*lm.load(), "a", BAD)),
    (ValueError, lambda: lm.stream(*lm.load(), "")),
    (FileNotFoundError, lambda: lm.load(ABSENT)),
    (ValueError, lambda: in_a_folder(no_model)),
    (OSError, lambda: lm.save(Path(__file__), *lm.load())),
    (TypeError, lambda: lm.Options(steps=BAD)),
    (TypeError, lambda: lm.Options(learning_rate=BAD)),
    (ValueError, lambda: lm.Options(dropout=7.0)),
    (ValueError, lambda: lm.Options(clip=-1.0)),
    (ValueError, lambda: lm.Options(decay=-1.0)),
    (ValueError, lambda: lm.Options(steps=0)),
    (TypeError, lambda: lm.Options().config(BAD)),
    (ValueError, lambda: lm.Options().config(0)),
    (ValueError, lambda: lm.Options().check_memory(10**15)),
    (TypeError, lambda: lm.train(ABSENT, {"steps": BAD})),
    (ValueError, lambda: lm.train(ABSENT, {"steps": 0})),
    (OSError, lambda: lm.train(__file__)),
    # models that read text
    (FileNotFoundError, lambda: models.load(ABSENT)),
    (ValueError, lambda: in_a_folder(of_theirs)),
    (ImportError, without_transformers),
    (ValueError, lambda: models.load().read([-1])),
    # the classic presentations
    (TypeError, lambda: modeling_attention.SelfAttention(BAD, 1)),
    (TypeError, lambda: FIRST.attend(X, mask=MASK)),
    (ValueError, lambda: FIRST.attend(X[0])),
    (TypeError, lambda: modeling_attention.MultiHeadSelfAttention(12, 12, BAD)),
    (TypeError, lambda: FIRST_HEADS(BAD)),
    (TypeError, lambda: FIRST_HEADS.attend(X, mask=MASK)),
    (ValueError, lambda: FIRST_HEADS.attend(X[0])),
    (TypeError, lambda: torch_multihead.MultiheadAttention(12, BAD)),
    (TypeError, lambda: SECOND.attend(BAD, X, X)),
    (torch_multihead.Refused, lambda: SECOND.attend(Q, Q, Q)),
    (TypeError, lambda: torch_multihead.replace(BAD)),
    (TypeError, lambda: components.PositionalEncoder(BAD)),
    (TypeError, lambda: components.CrossAttention(12, 6, 4, BAD)),
    (ValueError, lambda: components.CrossAttention(12, 6, 4, 0)),
    (TypeError, lambda: THIRD_CROSS(X, BAD)),
    (TypeError, lambda: THIRD_CROSS.attend(X, BAD)),
    (ValueError, lambda: THIRD_CROSS.attend(X, X)),
    (TypeError, lambda: components.SelfAttention(12, 4, BAD)),
    (TypeError, lambda: THIRD(X, MASK)),
    (TypeError, lambda: THIRD.attend(X, MASK)),
    (ValueError, lambda: THIRD.attend(X[0])),
    (TypeError, lambda: THIRD_HEADS(BAD)),
    (ValueError, lambda: THIRD_HEADS(X[0])),
    (TypeError, lambda: THIRD_HEADS.attend(BAD)),
    (ValueError, lambda: THIRD_HEADS.attend(X[0])),
    (TypeError, lambda: annotated.PrepareForMultiHeadAttention(12, 4, BAD, True)),
    (ValueError, lambda: annotated.PrepareForMultiHeadAttention(12, 4, 0, True)),
    (TypeError, lambda: PREPARE(BAD)),
    (TypeError, lambda: annotated.MultiHeadAttention(BAD, 12)),
    (TypeError, lambda: FOURTH.get_scores(BAD, Q)),
    (ValueError, lambda: FOURTH.get_scores(X, Q)),
    (TypeError, lambda: FOURTH.prepare_mask(BAD, X.shape, X.shape)),
    (ValueError, lambda: FOURTH.prepare_mask(MASK, X.shape, X.shape)),
    (TypeError, lambda: FOURTH(query=BAD, key=X, value=X)),
    (TypeError, lambda: FOURTH.attend(query=BAD, key=X, value=X)),
    (ValueError, lambda: FOURTH.attend(query=X[0], key=X, value=X)),
]  # fmt: skip


@pytest.mark.every(4)
@pytest.mark.parametrize(("error", "call"), INVALID)
def test_documented_errors_are_raised_in_one_line(error: type[Exception], call: Callable[[], Any]) -> None:
    from_the_disk = issubclass(error, OSError)
    is_report = error is AssertionError  # of several lines
    with pytest.raises(error) if from_the_disk or is_report else raises(error):
        call()
