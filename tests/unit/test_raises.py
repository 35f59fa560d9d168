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


WRONG: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    # masks
    ("masks.Lengths", TypeError, lambda: mh.Lengths(BAD)),
    ("masks.Lengths", TypeError, lambda: mh.Lengths(3, left=BAD)),
    ("masks.Lengths", ValueError, lambda: mh.Lengths(-1)),
    ("masks.Drop", ValueError, lambda: mh.Drop(MASK[0])),
    ("masks.Mask.table", TypeError, lambda: mh.Causal().table(BAD)),
    ("masks.Mask.table", TypeError, lambda: mh.Causal().table(4, 4, cast(Any, 1.5))),
    ("masks.Mask.table", ValueError, lambda: mh.Causal().table(-1)),
    ("masks.Mask.draw", TypeError, lambda: mh.Causal().draw(offset=BAD)),
    ("masks.Mask.draw", ValueError, lambda: mh.Causal().draw(-1)),
    ("values.Value.to", RuntimeError, lambda: mh.Keep(MASK).to(BAD)),
    # biases and positions
    ("biases.Relative.learned", TypeError, lambda: mh.Relative.learned(BAD, 2)),
    ("positions.Sinusoidal.encode", TypeError, lambda: mh.Sinusoidal(4).encode(BAD)),
    ("positions.Rotary.scaled", ValueError, lambda: mh.Rotary(4).scaled(0.5)),
    # functions, layers, the cache
    ("layers.SelfAttention", TypeError, lambda: mh.SelfAttention(BAD)),
    ("layers.SelfAttention.attend", TypeError, lambda: ONE.attend(X, mask=MASK)),
    ("layers.SelfAttention.attend", ValueError, lambda: ONE.attend(X[0])),
    ("layers.CrossAttention", TypeError, lambda: mh.CrossAttention(12, BAD)),
    ("layers.CrossAttention", ValueError, lambda: mh.CrossAttention(12, 0)),
    ("layers.CrossAttention.forward", TypeError, lambda: CROSS(X, BAD)),
    ("layers.CrossAttention.attend", TypeError, lambda: CROSS.attend(X, BAD)),
    ("layers.CrossAttention.attend", ValueError, lambda: CROSS.attend(X, X)),
    ("layers.MultiHeadAttention.forward", TypeError, lambda: MANY(X, mask=MASK)),
    ("layers.MultiHeadAttention.forward", TypeError, lambda: MANY(X, cache=BAD)),
    ("layers.MultiHeadAttention.attend", TypeError, lambda: MANY.attend(BAD)),
    ("layers.MultiHeadAttention.attend", ValueError, lambda: MANY.attend(X, X, cache=mh.Cache())),
    ("layers.MultiHeadAttention.load", TypeError, lambda: MANY.load({"q.weight": BAD})),
    ("layers.MultiHeadAttention.load", TypeError, lambda: MANY.load(BAD)),
    ("cache.Cache", TypeError, lambda: mh.Cache(BAD)),
    ("cache.Cache", TypeError, lambda: mh.Cache(mask=BAD)),
    ("cache.Cache.received", TypeError, lambda: mh.Cache(votes=2).received("x")),
    ("cache.Cache.append", TypeError, lambda: mh.Cache().append(BAD, K)),
    ("cache.Cache.write", TypeError, lambda: mh.Cache().write(K, BAD)),
    ("cache.Cache.write", ValueError, lambda: mh.Cache(3).write(K, K)),
    # maps
    ("maps.AttentionMap.under", TypeError, lambda: amap().under(BAD)),
    ("maps.AttentionMap.under", ValueError, lambda: amap().under(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.again", ValueError, lambda: amap().again(Problem.of(Q, K, K), Q)),
    ("maps.AttentionMap.again", TypeError, lambda: amap().again(Problem.of(Q, K, K), BAD)),
    ("maps.AttentionMap.masses", TypeError, lambda: amap().masses(BAD)),
    ("maps.AttentionMap.masses", ValueError, lambda: amap().masses(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.save", ValueError, lambda: in_a_folder(lambda folder: ruled().save(folder / "map"))),
    ("maps.AttentionMap.view", TypeError, lambda: amap().view(3)),
    ("maps.AttentionMap.view", ValueError, lambda: amap().view(Recording())),
    ("maps.AttentionMap.view", OSError, lambda: amap().view(port=70_000)),
    ("maps.AttentionMap.save", OSError, lambda: amap().save(ABSENT)),
    ("maps.AttentionMap.open", ValueError, lambda: mh.AttentionMap.open(__file__)),
    ("maps.AttentionMap.open", OSError, lambda: mh.AttentionMap.open(ABSENT)),
    # measures
    ("measures.previous_token", TypeError, lambda: measures.previous_token(BAD)),
    ("measures.current_token", TypeError, lambda: measures.current_token(BAD)),
    ("measures.first_token", TypeError, lambda: measures.first_token(BAD)),
    ("measures.duplicate_token", TypeError, lambda: measures.duplicate_token(amap(), BAD)),
    ("measures.duplicate_token", TypeError, lambda: measures.duplicate_token(BAD, IDS)),
    ("measures.induction", TypeError, lambda: measures.induction(amap(), BAD)),
    ("measures.induction", TypeError, lambda: measures.induction(BAD, IDS)),
    ("measures.induction", ValueError, lambda: measures.induction(amap(), IDS[:, :2])),
    ("measures.local", TypeError, lambda: measures.local(amap(), BAD)),
    ("measures.local", TypeError, lambda: measures.local(BAD, 1)),
    # observe
    ("observe.observe", TypeError, lambda: observing(model=BAD)),
    ("observe.observe", ValueError, lambda: observing(keep=BAD)),
    ("observe.observe", MemoryError, lambda: observing(max_bytes=10)),
    ("observe.recording.open_run", ValueError, lambda: mh.open_run(__file__)),
    ("observe.recording.open_run", OSError, lambda: mh.open_run(ABSENT)),
    ("observe.recording.Recording.calls", NoSuchLayer, lambda: seen().calls(BAD)),
    ("observe.recording.Recording.calls", TypeError, lambda: seen().calls(cast(Any, 1.5))),
    ("observe.recording.Recording.__getitem__", NoSuchLayer, lambda: seen()[BAD]),
    ("observe.recording.Recording.__getitem__", TypeError, lambda: seen()[cast(Any, 1.5)]),
    ("observe.recording.Recording.label", TypeError, lambda: seen().label(BAD)),
    ("observe.recording.Recording.label", ValueError, lambda: seen().label(["a"])),
    ("observe.recording.Recording.table", TypeError, lambda: seen().table(BAD)),
    ("observe.recording.Recording.table", ValueError, lambda: seen().table(IDS[:, :2])),
    ("observe.recording.Recording.view", TypeError, lambda: seen().view(3)),
    ("observe.recording.Recording.view", ValueError, lambda: Recording().view()),
    ("observe.recording.Recording.view", OSError, lambda: seen().view(port=70_000)),
    ("observe.recording.Recording.plot", ValueError, lambda: Recording().plot()),
    ("observe.recording.Recording.save", ValueError,
     lambda: in_a_folder(lambda folder: ruled_run().save(folder / "run"))),
    ("observe.recording.Recording.save", OSError, lambda: seen().save(ABSENT)),
    ("observe.table.Table.sorted", ValueError, lambda: seen().table().sorted(BAD)),
    ("observe.table.Table.to_pandas", ImportError, without_pandas),
    ("observe.summaries.Reduced.of", TypeError, lambda: Reduced.of(amap(), {"top": ()})),
    ("observe.summaries.Reduced.of", ValueError, lambda: Reduced.of(amap(), {BAD: ()})),
    ("observe.summaries.Reduced.labelled", TypeError,
     lambda: Reduced.of(amap(), {"entropy": ()}).labelled(BAD)),
    ("observe.summaries.Reduced.labelled", ValueError,
     lambda: Reduced.of(amap(), {"entropy": ()}).labelled(["a"])),
    ("observe.summaries.Reduced.stored", ValueError,
     lambda: Reduced.of(amap(), {"mass": mh.Causal()}).stored()),
    ("observe.summaries.Reduced.restored", ValueError, lambda: Reduced.restored(storage.Kept({}, {}))),
    ("observe.intercept.record_attention", ValueError, lambda: attending(Q.to("meta"), K.to("meta"))),
    ("observe.intercept.record_attention", MemoryError, lambda: attending(Q, K, max_bytes=10)),
    # figures
    ("figures.beside", TypeError, lambda: figures.beside(BAD, BAD)),
    ("figures.visible", TypeError, lambda: figures.visible(BAD, 0, 0)),
    ("figures.visible", IndexError, lambda: figures.visible(amap(), 9, 0)),
    ("figures.received", TypeError, lambda: figures.received(BAD)),
    ("figures.difference.difference", ValueError, lambda: figures.difference(Q, Q)),
    ("figures.positions.curves", TypeError, lambda: figures.curves(BAD, [0])),
    ("figures.positions.image", TypeError, lambda: figures.image(BAD)),
    # the checker
    ("checker.check", checker.Unclear, lambda: checker.check(BAD)),
    ("checker.assert_attention", checker.Unclear, lambda: checker.assert_attention(BAD)),
    ("checker.assert_attention", AssertionError, lambda: checker.assert_attention(values_alone, "attention")),
    ("checker.report.Report.save_json", OSError, lambda: REPORT.save_json(BEHIND_A_FILE)),
    ("checker.report.Report.save_junit", OSError, lambda: REPORT.save_junit(BEHIND_A_FILE)),
    ("checker.report.Report.save_picture", OSError, lambda: REPORT.save_picture(BEHIND_A_FILE)),
    # the language model
    ("lm.model.LanguageModel", TypeError, lambda: lm.LanguageModel(BAD)),
    ("lm.model.LanguageModel", ValueError, lambda: lm.LanguageModel(TINY.config, 2.0)),
    ("lm.model.LanguageModel.forward", TypeError, lambda: TINY(BAD)),
    ("lm.model.LanguageModel.attend", TypeError, lambda: TINY.attend(BAD)),
    ("lm.model.LanguageModel.attend", ValueError, lambda: TINY.attend(IDS + 99)),
    ("lm.model.LanguageModel.scaled", TypeError, lambda: TINY.scaled(BAD)),
    ("lm.model.LanguageModel.scaled", ValueError, lambda: TINY.scaled(7)),
    ("lm.model.LanguageModel.caches", TypeError, lambda: TINY.caches(BAD)),
    ("lm.model.LanguageModel.caches", ValueError, lambda: TINY.caches(0)),
    ("lm.model.LanguageModel.check", TypeError, lambda: TINY.check(BAD, None)),
    ("lm.model.LanguageModel.check", ValueError, lambda: TINY.check(X, None)),
    ("lm.generate.Sampling", TypeError, lambda: lm.Sampling(top_k=BAD)),
    ("lm.generate.Sampling", TypeError, lambda: lm.Sampling(temperature=BAD)),
    ("lm.generate.generate", TypeError, lambda: lm.generate(TINY, IDS[:1], BAD)),
    ("lm.generate.generate", TypeError, lambda: lm.generate(TINY, BAD, 1)),
    ("lm.generate.complete", TypeError, lambda: lm.complete(*lm.load(), "a", BAD)),
    ("lm.generate.stream", TypeError, lambda: lm.stream(*lm.load(), "a", BAD)),
    ("lm.generate.stream", ValueError, lambda: lm.stream(*lm.load(), "")),
    ("lm.checkpoint.load", FileNotFoundError, lambda: lm.load(ABSENT)),
    ("lm.checkpoint.load", ValueError, lambda: in_a_folder(no_model)),
    ("lm.checkpoint.save", OSError, lambda: lm.save(Path(__file__), *lm.load())),
    ("lm.train.Options", TypeError, lambda: lm.Options(steps=BAD)),
    ("lm.train.Options", TypeError, lambda: lm.Options(learning_rate=BAD)),
    ("lm.train.Options", ValueError, lambda: lm.Options(dropout=7.0)),
    ("lm.train.Options", ValueError, lambda: lm.Options(clip=-1.0)),
    ("lm.train.Options", ValueError, lambda: lm.Options(decay=-1.0)),
    ("lm.train.Options", ValueError, lambda: lm.Options(steps=0)),
    ("lm.train.Options.config", TypeError, lambda: lm.Options().config(BAD)),
    ("lm.train.Options.config", ValueError, lambda: lm.Options().config(0)),
    ("lm.train.Options.check_memory", ValueError, lambda: lm.Options().check_memory(10**15)),
    ("lm.train.train", TypeError, lambda: lm.train(ABSENT, {"steps": BAD})),
    ("lm.train.train", ValueError, lambda: lm.train(ABSENT, {"steps": 0})),
    ("lm.train.train", OSError, lambda: lm.train(__file__)),
    # models that read text
    ("text.models.load", FileNotFoundError, lambda: models.load(ABSENT)),
    ("text.models.load", ValueError, lambda: in_a_folder(of_theirs)),
    ("text.models.load", ImportError, without_transformers),
    ("text.models.Model.read", ValueError, lambda: models.load().read([-1])),
    # the classic presentations
    ("classic.modeling_attention.SelfAttention", TypeError, lambda: modeling_attention.SelfAttention(BAD, 1)),
    ("classic.modeling_attention.SelfAttention.attend", TypeError, lambda: FIRST.attend(X, mask=MASK)),
    ("classic.modeling_attention.SelfAttention.attend", ValueError, lambda: FIRST.attend(X[0])),
    ("classic.modeling_attention.MultiHeadSelfAttention", TypeError,
     lambda: modeling_attention.MultiHeadSelfAttention(12, 12, BAD)),
    ("classic.modeling_attention.MultiHeadSelfAttention.forward", TypeError, lambda: FIRST_HEADS(BAD)),
    ("classic.modeling_attention.MultiHeadSelfAttention.attend", TypeError,
     lambda: FIRST_HEADS.attend(X, mask=MASK)),
    ("classic.modeling_attention.MultiHeadSelfAttention.attend", ValueError,
     lambda: FIRST_HEADS.attend(X[0])),
    ("classic.torch_multihead.MultiheadAttention", TypeError,
     lambda: torch_multihead.MultiheadAttention(12, BAD)),
    ("classic.torch_multihead.MultiheadAttention.attend", TypeError, lambda: SECOND.attend(BAD, X, X)),
    ("classic.torch_multihead.MultiheadAttention.attend", torch_multihead.Refused,
     lambda: SECOND.attend(Q, Q, Q)),
    ("classic.torch_multihead.replace", TypeError, lambda: torch_multihead.replace(BAD)),
    ("classic.components.PositionalEncoder", TypeError, lambda: components.PositionalEncoder(BAD)),
    ("classic.components.CrossAttention", TypeError, lambda: components.CrossAttention(12, 6, 4, BAD)),
    ("classic.components.CrossAttention", ValueError, lambda: components.CrossAttention(12, 6, 4, 0)),
    ("classic.components.CrossAttention.forward", TypeError, lambda: THIRD_CROSS(X, BAD)),
    ("classic.components.CrossAttention.attend", TypeError, lambda: THIRD_CROSS.attend(X, BAD)),
    ("classic.components.CrossAttention.attend", ValueError, lambda: THIRD_CROSS.attend(X, X)),
    ("classic.components.SelfAttention", TypeError, lambda: components.SelfAttention(12, 4, BAD)),
    ("classic.components.SelfAttention.forward", TypeError, lambda: THIRD(X, MASK)),
    ("classic.components.SelfAttention.attend", TypeError, lambda: THIRD.attend(X, MASK)),
    ("classic.components.SelfAttention.attend", ValueError, lambda: THIRD.attend(X[0])),
    ("classic.components.MultiHeadedAttention.forward", TypeError, lambda: THIRD_HEADS(BAD)),
    ("classic.components.MultiHeadedAttention.forward", ValueError, lambda: THIRD_HEADS(X[0])),
    ("classic.components.MultiHeadedAttention.attend", TypeError, lambda: THIRD_HEADS.attend(BAD)),
    ("classic.components.MultiHeadedAttention.attend", ValueError, lambda: THIRD_HEADS.attend(X[0])),
    ("classic.annotated.PrepareForMultiHeadAttention", TypeError,
     lambda: annotated.PrepareForMultiHeadAttention(12, 4, BAD, True)),
    ("classic.annotated.PrepareForMultiHeadAttention", ValueError,
     lambda: annotated.PrepareForMultiHeadAttention(12, 4, 0, True)),
    ("classic.annotated.PrepareForMultiHeadAttention.forward", TypeError, lambda: PREPARE(BAD)),
    ("classic.annotated.MultiHeadAttention", TypeError, lambda: annotated.MultiHeadAttention(BAD, 12)),
    ("classic.annotated.MultiHeadAttention.get_scores", TypeError, lambda: FOURTH.get_scores(BAD, Q)),
    ("classic.annotated.MultiHeadAttention.get_scores", ValueError, lambda: FOURTH.get_scores(X, Q)),
    ("classic.annotated.MultiHeadAttention.prepare_mask", TypeError,
     lambda: FOURTH.prepare_mask(BAD, X.shape, X.shape)),
    ("classic.annotated.MultiHeadAttention.prepare_mask", ValueError,
     lambda: FOURTH.prepare_mask(MASK, X.shape, X.shape)),
    ("classic.annotated.MultiHeadAttention.forward", TypeError, lambda: FOURTH(query=BAD, key=X, value=X)),
    ("classic.annotated.MultiHeadAttention.attend", TypeError,
     lambda: FOURTH.attend(query=BAD, key=X, value=X)),
    ("classic.annotated.MultiHeadAttention.attend", ValueError,
     lambda: FOURTH.attend(query=X[0], key=X, value=X)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "error", "call"),
    WRONG,
    ids=[f"{n} {path} {error.__name__}" for n, (path, error, _) in enumerate(WRONG)],
)
def test_the_error_is_ours_and_one_line(path: str, error: type[Exception], call: Callable[[], Any]) -> None:
    elsewhere = issubclass(error, OSError) or path == "values.Value.to"  # raised by the disk or by PyTorch
    report = error is AssertionError  # of several lines
    with pytest.raises(error) if elsewhere or report else raises(error):
        call()
