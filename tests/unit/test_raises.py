"""Every error that the public functions and classes document is raised by our own code, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import walk_tb
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
from manyheads.shapes import Shape
from manyheads.text import models

HOME = Path(mh.__file__).parent

Q, K = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)
X = torch.ones(2, 5, 12)
MANY = mh.MultiHeadAttention(12, 4)
ONE, CROSS = mh.SelfAttention(12), mh.CrossAttention(12, 6)
SIZES = Shape(2, 4, 2, 5, 5, 8, 8)
TINY = lm.LanguageModel(lm.Config(vocab=16, embed=16, heads=2, layers=1, hidden=8, context=8))
FIRST = modeling_attention.SelfAttention(12, 12)
FIRST_HEADS = modeling_attention.MultiHeadSelfAttention(12, 12, 4)
SECOND = torch_multihead.MultiheadAttention(12, 4)
THIRD, THIRD_CROSS = components.SelfAttention(12, 4, 4), components.CrossAttention(12, 6, 4, 4)
THIRD_HEADS = components.MultiHeadedAttention([THIRD], 12)
FOURTH = annotated.MultiHeadAttention(4, 12)
PREPARE = annotated.PrepareForMultiHeadAttention(12, 4, 3, True)
ABSENT = "no folder/of this name"
BAD: Any = "no such thing"  # what nothing takes
BEHIND_A_FILE = Path(__file__) / "report"
REPORT = checker.Report("mine", "self", False, [], pair=(X[0], X[0], "output"))
MASK: Any = torch.ones(5, 5) > 0  # a mask that says no polarity


@cache
def amap() -> mh.AttentionMap:
    return mh.attention_with_map(Q, K, K)[1]


@cache
def seen() -> Recording:
    with torch.no_grad(), mh.observe(MANY) as found:
        MANY(X)
    return found


def ruled() -> mh.AttentionMap:
    """A map that no file can hold."""
    return amap().under(mh.Rule(lambda b, h, i, j: j <= i))


def stale() -> Tensor:
    q = Q.clone()
    found = mh.attention_with_map(q, K, K)[1]
    q.zero_()
    return found.entropy()


def observing(run: Any = X, **options: Any) -> Any:
    with torch.no_grad(), mh.observe(options.pop("model", MANY), **options) as found:
        MANY(run)
    return found


def attending(q: Tensor, k: Tensor, **options: Any) -> None:
    """A module that tells what it computes."""

    class Telling(nn.Module):
        def forward(self) -> Tensor:
            return record_attention(Problem.of(q, k, k), lambda: q)

    model = Telling()
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
    ("masks.Window", TypeError, lambda: mh.Window(left=BAD)),
    ("masks.Window", ValueError, lambda: mh.Window(left=-1)),
    ("masks.Diagonal", TypeError, lambda: mh.Diagonal(BAD)),
    ("masks.Prefix", TypeError, lambda: mh.Prefix(BAD)),
    ("masks.Prefix", ValueError, lambda: mh.Prefix(-1)),
    ("masks.Lengths", TypeError, lambda: mh.Lengths(BAD)),
    ("masks.Lengths", TypeError, lambda: mh.Lengths(3, left=BAD)),
    ("masks.Lengths", ValueError, lambda: mh.Lengths(-1)),
    ("masks.Keys", TypeError, lambda: mh.Keys(BAD)),
    ("masks.Keys", ValueError, lambda: mh.Keys([-1])),
    ("masks.Documents", TypeError, lambda: mh.Documents(BAD)),
    ("masks.SameToken", TypeError, lambda: mh.SameToken(BAD)),
    ("masks.AfterSameToken", TypeError, lambda: mh.AfterSameToken(BAD)),
    ("masks.Keep", TypeError, lambda: mh.Keep(BAD)),
    ("masks.Keep", ValueError, lambda: mh.Keep(MASK[0])),
    ("masks.Drop", TypeError, lambda: mh.Drop(BAD)),
    ("masks.Drop", ValueError, lambda: mh.Drop(MASK[0])),
    ("masks.Rule", TypeError, lambda: mh.Rule(BAD)),
    ("masks.Rule.keep", TypeError, lambda: mh.Rule(lambda b, h, i, j: 3).keep(0, 0, 0, 0)),
    ("masks.Mask.check", ValueError, lambda: mh.Keep(MASK[:2]).check(SIZES)),
    ("masks.Mask.table", TypeError, lambda: mh.Causal().table(BAD)),
    ("masks.Mask.table", TypeError, lambda: mh.Causal().table(4, 4, cast(Any, 1.5))),
    ("masks.Mask.table", ValueError, lambda: mh.Causal().table(-1)),
    ("masks.Mask.draw", TypeError, lambda: mh.Causal().draw(offset=BAD)),
    ("masks.Mask.draw", ValueError, lambda: mh.Causal().draw(-1)),
    ("values.Value.to", RuntimeError, lambda: mh.Keep(MASK).to(BAD)),
    # biases and positions
    ("biases.ALiBi", TypeError, lambda: mh.ALiBi(BAD)),
    ("biases.ALiBi", ValueError, lambda: mh.ALiBi(0)),
    ("biases.Relative", TypeError, lambda: mh.Relative(BAD)),
    ("biases.Relative", ValueError, lambda: mh.Relative(torch.zeros(4, 2))),
    ("biases.Relative.learned", TypeError, lambda: mh.Relative.learned(BAD, 2)),
    ("biases.Relative.learned", ValueError, lambda: mh.Relative.learned(4, -1)),
    ("biases.Dense", TypeError, lambda: mh.Dense(BAD)),
    ("biases.Dense", ValueError, lambda: mh.Dense(torch.tensor([torch.nan]))),
    ("biases.Bias.check", ValueError, lambda: mh.ALiBi(3).check(SIZES)),
    ("positions.Sinusoidal", TypeError, lambda: mh.Sinusoidal(BAD)),
    ("positions.Sinusoidal", ValueError, lambda: mh.Sinusoidal(3)),
    ("positions.Sinusoidal.encode", TypeError, lambda: mh.Sinusoidal(4).encode(BAD)),
    ("positions.Sinusoidal.__call__", ValueError, lambda: mh.Sinusoidal(4)(X)),
    ("positions.Rotary.__call__", ValueError, lambda: mh.Rotary(4)(Q[..., :2], IDS)),
    ("positions.Rotary", TypeError, lambda: mh.Rotary(BAD)),
    ("positions.Rotary", ValueError, lambda: mh.Rotary(3)),
    ("positions.Rotary.scaled", ValueError, lambda: mh.Rotary(4).scaled(0.5)),
    # functions, layers, the cache
    ("functional.attention", TypeError, lambda: mh.attention(Q, K, BAD)),
    ("functional.attention", ValueError, lambda: mh.attention(Q, K, K[:1])),
    ("functional.attention_with_map", TypeError, lambda: mh.attention_with_map(Q, K, BAD)),
    ("functional.attention_with_map", ValueError, lambda: mh.attention_with_map(Q, K, K[:1])),
    ("functional.explain", TypeError, lambda: mh.explain(Q, K, BAD)),
    ("functional.explain", ValueError, lambda: mh.explain(Q, K, K, kernel=BAD)),
    ("layers.SelfAttention", TypeError, lambda: mh.SelfAttention(BAD)),
    ("layers.SelfAttention", ValueError, lambda: mh.SelfAttention(0)),
    ("layers.SelfAttention.forward", TypeError, lambda: ONE(BAD)),
    ("layers.SelfAttention.forward", ValueError, lambda: ONE(X[0])),
    ("layers.SelfAttention.attend", TypeError, lambda: ONE.attend(X, mask=MASK)),
    ("layers.SelfAttention.attend", ValueError, lambda: ONE.attend(X[0])),
    ("layers.CrossAttention", TypeError, lambda: mh.CrossAttention(12, BAD)),
    ("layers.CrossAttention", ValueError, lambda: mh.CrossAttention(12, 0)),
    ("layers.CrossAttention.forward", TypeError, lambda: CROSS(X, BAD)),
    ("layers.CrossAttention.forward", ValueError, lambda: CROSS(X, X)),
    ("layers.CrossAttention.attend", TypeError, lambda: CROSS.attend(X, BAD)),
    ("layers.CrossAttention.attend", ValueError, lambda: CROSS.attend(X, X)),
    ("layers.MultiHeadAttention", TypeError, lambda: mh.MultiHeadAttention(12, BAD)),
    ("layers.MultiHeadAttention", ValueError, lambda: mh.MultiHeadAttention(12, 5)),
    ("layers.MultiHeadAttention.forward", TypeError, lambda: MANY(X, mask=MASK)),
    ("layers.MultiHeadAttention.forward", TypeError, lambda: MANY(X, cache=BAD)),
    ("layers.MultiHeadAttention.forward", ValueError, lambda: MANY(X[0])),
    ("layers.MultiHeadAttention.attend", TypeError, lambda: MANY.attend(BAD)),
    ("layers.MultiHeadAttention.attend", ValueError, lambda: MANY.attend(X, X, cache=mh.Cache())),
    ("layers.MultiHeadAttention.load", TypeError, lambda: MANY.load({"q.weight": BAD})),
    ("layers.MultiHeadAttention.load", TypeError, lambda: MANY.load(BAD)),
    ("layers.MultiHeadAttention.load", ValueError, lambda: MANY.load({})),
    ("layers.MultiHeadAttention.export", ValueError, lambda: MANY.export(BAD)),
    ("cache.Cache", TypeError, lambda: mh.Cache(BAD)),
    ("cache.Cache", TypeError, lambda: mh.Cache(mask=BAD)),
    ("cache.Cache", ValueError, lambda: mh.Cache(0)),
    ("cache.Cache.vote", TypeError, lambda: mh.Cache(votes=2).vote(BAD)),
    ("cache.Cache.vote", ValueError, lambda: mh.Cache(votes=2).vote(amap())),
    ("cache.Cache.received", TypeError, lambda: mh.Cache(votes=2).received("x")),
    ("cache.Cache.received", ValueError, lambda: mh.Cache(votes=2).received()),
    ("cache.Cache.append", TypeError, lambda: mh.Cache().append(BAD, K)),
    ("cache.Cache.append", ValueError, lambda: mh.Cache(3).append(K, K)),
    ("cache.Cache.write", TypeError, lambda: mh.Cache().write(K, BAD)),
    ("cache.Cache.write", ValueError, lambda: mh.Cache(3).write(K, K)),
    # maps
    ("maps.AttentionMap", RuntimeError, stale),
    ("maps.AttentionMap.of", TypeError, lambda: mh.AttentionMap.of(BAD)),
    ("maps.AttentionMap.of", ValueError, lambda: mh.AttentionMap.of(Problem.of(Q, K, K), Q)),
    ("maps.AttentionMap.under", TypeError, lambda: amap().under(BAD)),
    ("maps.AttentionMap.under", ValueError, lambda: amap().under(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.only", IndexError, lambda: amap().only(heads=9)),
    ("maps.AttentionMap.to", ValueError, lambda: amap().to(BAD)),
    ("maps.AttentionMap.to", TypeError, lambda: amap().to(torch.int64)),
    ("maps.AttentionMap.labelled", TypeError, lambda: amap().labelled(BAD)),
    ("maps.AttentionMap.labelled", ValueError, lambda: amap().labelled(["a"])),
    ("maps.AttentionMap.again", ValueError, lambda: amap().again(Problem.of(Q, K, K), Q)),
    ("maps.AttentionMap.again", TypeError, lambda: amap().again(Problem.of(Q, K, K), BAD)),
    ("maps.AttentionMap.dense", TypeError, lambda: amap().dense(BAD)),
    ("maps.AttentionMap.dense", ValueError, lambda: amap().dense(10)),
    ("maps.AttentionMap.__getitem__", IndexError, lambda: amap()[0, 9]),
    ("maps.AttentionMap.received", TypeError, lambda: amap().received(BAD)),
    ("maps.AttentionMap.received", ValueError, lambda: amap().received(normalize=BAD)),
    ("maps.AttentionMap.top", TypeError, lambda: amap().top(BAD)),
    ("maps.AttentionMap.top", ValueError, lambda: amap().top(0)),
    ("maps.AttentionMap.mass", TypeError, lambda: amap().mass(BAD)),
    ("maps.AttentionMap.mass", ValueError, lambda: amap().mass(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.masses", TypeError, lambda: amap().masses(BAD)),
    ("maps.AttentionMap.masses", ValueError, lambda: amap().masses(mh.Keep(MASK[:2]))),
    ("maps.AttentionMap.pooled", TypeError, lambda: amap().pooled(BAD, 2)),
    ("maps.AttentionMap.pooled", ValueError, lambda: amap().pooled(9, 2)),
    ("maps.AttentionMap.value_norms", TypeError, lambda: amap().value_norms(BAD, X[0])),
    ("maps.AttentionMap.value_norms", ValueError, lambda: amap().value_norms(K, X)),
    ("maps.AttentionMap.divergence", TypeError, lambda: amap().divergence(BAD)),
    ("maps.AttentionMap.divergence", ValueError, lambda: amap().divergence(amap().only(heads=0))),
    ("maps.AttentionMap.statistics", TypeError, lambda: amap().statistics("top")),
    ("maps.AttentionMap.statistics", ValueError, lambda: amap().statistics(BAD)),
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
    ("measures.duplicate_token", ValueError, lambda: measures.duplicate_token(amap(), IDS[:, :2])),
    ("measures.induction", TypeError, lambda: measures.induction(amap(), BAD)),
    ("measures.induction", TypeError, lambda: measures.induction(BAD, IDS)),
    ("measures.induction", ValueError, lambda: measures.induction(amap(), IDS[:, :2])),
    ("measures.local", TypeError, lambda: measures.local(amap(), BAD)),
    ("measures.local", TypeError, lambda: measures.local(BAD, 1)),
    ("measures.local", ValueError, lambda: measures.local(amap(), -1)),
    ("measures.rollout", TypeError, lambda: measures.rollout(BAD)),
    ("measures.rollout", TypeError, lambda: measures.rollout([amap()], rows=BAD)),
    ("measures.rollout", ValueError, lambda: measures.rollout([amap()])),
    ("measures.rollout", IndexError, lambda: measures.rollout([amap()], rows=9)),
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
    ("figures.head", TypeError, lambda: figures.head(BAD)),
    ("figures.head", ValueError, lambda: figures.head(Q)),
    ("figures.beside", TypeError, lambda: figures.beside(BAD, BAD)),
    ("figures.beside", ValueError, lambda: figures.beside(X[0], X[0, :2])),
    ("figures.grid", TypeError, lambda: figures.grid(BAD)),
    ("figures.grid", ValueError, lambda: figures.grid(X)),
    ("figures.visible", TypeError, lambda: figures.visible(BAD, 0, 0)),
    ("figures.visible", IndexError, lambda: figures.visible(amap(), 9, 0)),
    ("figures.received", TypeError, lambda: figures.received(BAD)),
    ("figures.received", ValueError, lambda: figures.received(amap(), normalize=BAD)),
    ("figures.entropy", TypeError, lambda: figures.entropy(BAD)),
    ("figures.entropy", ValueError, lambda: figures.entropy([])),
    ("figures.measures", TypeError, lambda: figures.measures([3])),
    ("figures.measures", ValueError, lambda: figures.measures([])),
    ("figures.difference.difference", ValueError, lambda: figures.difference(Q, Q)),
    ("figures.positions.curves", TypeError, lambda: figures.curves(BAD, [0])),
    ("figures.positions.curves", ValueError, lambda: figures.curves(X[0], [99])),
    ("figures.positions.image", TypeError, lambda: figures.image(BAD)),
    ("figures.positions.image", ValueError, lambda: figures.image(Q)),
    # the checker
    ("checker.check", checker.Unclear, lambda: checker.check(BAD)),
    ("checker.assert_attention", checker.Unclear, lambda: checker.assert_attention(BAD)),
    ("checker.assert_attention", AssertionError, lambda: checker.assert_attention(values_alone, "attention")),
    ("checker.report.Report.save_json", OSError, lambda: REPORT.save_json(BEHIND_A_FILE)),
    ("checker.report.Report.save_junit", OSError, lambda: REPORT.save_junit(BEHIND_A_FILE)),
    ("checker.report.Report.save_picture", OSError, lambda: REPORT.save_picture(BEHIND_A_FILE)),
    # the language model
    ("lm.model.Config", TypeError, lambda: lm.Config(BAD)),
    ("lm.model.Config", ValueError, lambda: lm.Config(0)),
    ("lm.model.LanguageModel", TypeError, lambda: lm.LanguageModel(BAD)),
    ("lm.model.LanguageModel", ValueError, lambda: lm.LanguageModel(TINY.config, 2.0)),
    ("lm.model.LanguageModel.forward", TypeError, lambda: TINY(BAD)),
    ("lm.model.LanguageModel.forward", ValueError, lambda: TINY(IDS + 99)),
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
    ("lm.generate.Sampling", ValueError, lambda: lm.Sampling(-1)),
    ("lm.generate.Sampling", ValueError, lambda: lm.Sampling(top_p=0.0)),
    ("lm.generate.generate", TypeError, lambda: lm.generate(TINY, IDS[:1], BAD)),
    ("lm.generate.generate", TypeError, lambda: lm.generate(TINY, BAD, 1)),
    ("lm.generate.generate", ValueError, lambda: lm.generate(TINY, IDS, 1)),
    ("lm.generate.complete", TypeError, lambda: lm.complete(*lm.load(), "a", BAD)),
    ("lm.generate.complete", ValueError, lambda: lm.complete(*lm.load(), "")),
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
    ("classic.modeling_attention.SelfAttention", ValueError, lambda: modeling_attention.SelfAttention(0, 1)),
    ("classic.modeling_attention.SelfAttention.forward", TypeError, lambda: FIRST(BAD)),
    ("classic.modeling_attention.SelfAttention.forward", ValueError, lambda: FIRST(X[0])),
    ("classic.modeling_attention.SelfAttention.attend", TypeError, lambda: FIRST.attend(X, mask=MASK)),
    ("classic.modeling_attention.SelfAttention.attend", ValueError, lambda: FIRST.attend(X[0])),
    ("classic.modeling_attention.MultiHeadSelfAttention", TypeError,
     lambda: modeling_attention.MultiHeadSelfAttention(12, 12, BAD)),
    ("classic.modeling_attention.MultiHeadSelfAttention", ValueError,
     lambda: modeling_attention.MultiHeadSelfAttention(12, 12, 5)),
    ("classic.modeling_attention.MultiHeadSelfAttention.forward", TypeError, lambda: FIRST_HEADS(BAD)),
    ("classic.modeling_attention.MultiHeadSelfAttention.forward", ValueError, lambda: FIRST_HEADS(X[0])),
    ("classic.modeling_attention.MultiHeadSelfAttention.attend", TypeError,
     lambda: FIRST_HEADS.attend(X, mask=MASK)),
    ("classic.modeling_attention.MultiHeadSelfAttention.attend", ValueError,
     lambda: FIRST_HEADS.attend(X[0])),
    ("classic.torch_multihead.MultiheadAttention", TypeError,
     lambda: torch_multihead.MultiheadAttention(12, BAD)),
    ("classic.torch_multihead.MultiheadAttention", ValueError,
     lambda: torch_multihead.MultiheadAttention(12, 0)),
    ("classic.torch_multihead.MultiheadAttention", torch_multihead.Refused,
     lambda: torch_multihead.MultiheadAttention(12, 5)),
    ("classic.torch_multihead.MultiheadAttention.forward", TypeError, lambda: SECOND(BAD, X, X)),
    ("classic.torch_multihead.MultiheadAttention.forward", torch_multihead.Refused, lambda: SECOND(Q, Q, Q)),
    ("classic.torch_multihead.MultiheadAttention.attend", TypeError, lambda: SECOND.attend(BAD, X, X)),
    ("classic.torch_multihead.MultiheadAttention.attend", torch_multihead.Refused,
     lambda: SECOND.attend(Q, Q, Q)),
    ("classic.torch_multihead.replace", TypeError, lambda: torch_multihead.replace(BAD)),
    ("classic.components.PositionalEncoder", TypeError, lambda: components.PositionalEncoder(BAD)),
    ("classic.components.PositionalEncoder", ValueError, lambda: components.PositionalEncoder(3)),
    ("classic.components.PositionalEncoder.forward", TypeError,
     lambda: components.PositionalEncoder(12)(BAD)),
    ("classic.components.PositionalEncoder.forward", ValueError,
     lambda: components.PositionalEncoder(12, 2)(X)),
    ("classic.components.attention", TypeError, lambda: components.attention(X, X, BAD)),
    ("classic.components.attention", ValueError, lambda: components.attention(X, X[..., :3], X)),
    ("classic.components.CrossAttention", TypeError, lambda: components.CrossAttention(12, 6, 4, BAD)),
    ("classic.components.CrossAttention", ValueError, lambda: components.CrossAttention(12, 6, 4, 0)),
    ("classic.components.CrossAttention.forward", TypeError, lambda: THIRD_CROSS(X, BAD)),
    ("classic.components.CrossAttention.forward", ValueError, lambda: THIRD_CROSS(X, X)),
    ("classic.components.CrossAttention.attend", TypeError, lambda: THIRD_CROSS.attend(X, BAD)),
    ("classic.components.CrossAttention.attend", ValueError, lambda: THIRD_CROSS.attend(X, X)),
    ("classic.components.SelfAttention", TypeError, lambda: components.SelfAttention(12, 4, BAD)),
    ("classic.components.SelfAttention", ValueError, lambda: components.SelfAttention(12, 4, 0)),
    ("classic.components.SelfAttention.forward", TypeError, lambda: THIRD(X, MASK)),
    ("classic.components.SelfAttention.forward", ValueError, lambda: THIRD(X[0])),
    ("classic.components.SelfAttention.attend", TypeError, lambda: THIRD.attend(X, MASK)),
    ("classic.components.SelfAttention.attend", ValueError, lambda: THIRD.attend(X[0])),
    ("classic.components.MultiHeadedAttention", TypeError,
     lambda: components.MultiHeadedAttention([BAD], 12)),
    ("classic.components.MultiHeadedAttention", ValueError, lambda: components.MultiHeadedAttention([], 12)),
    ("classic.components.MultiHeadedAttention.forward", TypeError, lambda: THIRD_HEADS(BAD)),
    ("classic.components.MultiHeadedAttention.forward", ValueError, lambda: THIRD_HEADS(X[0])),
    ("classic.components.MultiHeadedAttention.attend", TypeError, lambda: THIRD_HEADS.attend(BAD)),
    ("classic.components.MultiHeadedAttention.attend", ValueError, lambda: THIRD_HEADS.attend(X[0])),
    ("classic.annotated.PrepareForMultiHeadAttention", TypeError,
     lambda: annotated.PrepareForMultiHeadAttention(12, 4, BAD, True)),
    ("classic.annotated.PrepareForMultiHeadAttention", ValueError,
     lambda: annotated.PrepareForMultiHeadAttention(12, 4, 0, True)),
    ("classic.annotated.PrepareForMultiHeadAttention.forward", TypeError, lambda: PREPARE(BAD)),
    ("classic.annotated.PrepareForMultiHeadAttention.forward", ValueError, lambda: PREPARE(Q)),
    ("classic.annotated.MultiHeadAttention", TypeError, lambda: annotated.MultiHeadAttention(BAD, 12)),
    ("classic.annotated.MultiHeadAttention", ValueError, lambda: annotated.MultiHeadAttention(5, 12)),
    ("classic.annotated.MultiHeadAttention.get_scores", TypeError, lambda: FOURTH.get_scores(BAD, Q)),
    ("classic.annotated.MultiHeadAttention.get_scores", ValueError, lambda: FOURTH.get_scores(X, Q)),
    ("classic.annotated.MultiHeadAttention.prepare_mask", TypeError,
     lambda: FOURTH.prepare_mask(BAD, X.shape, X.shape)),
    ("classic.annotated.MultiHeadAttention.prepare_mask", ValueError,
     lambda: FOURTH.prepare_mask(MASK, X.shape, X.shape)),
    ("classic.annotated.MultiHeadAttention.forward", TypeError, lambda: FOURTH(query=BAD, key=X, value=X)),
    ("classic.annotated.MultiHeadAttention.forward", ValueError, lambda: FOURTH(query=X[0], key=X, value=X)),
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
    with pytest.raises(error) as caught:
        call()
    if isinstance(caught.value, OSError) or path == "values.Value.to":  # raised by the disk and by PyTorch
        return
    last = [frame for frame, _ in walk_tb(caught.value.__traceback__)][-1]
    assert Path(last.f_code.co_filename).is_relative_to(HOME)
    if error is not AssertionError:  # whose message is a report of several lines
        message = str(caught.value)
        assert message[-1] in ".)", message
        assert "\n" not in message
