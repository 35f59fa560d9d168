"""The model, its checkpoints, and generation with and without the cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from manyheads import lm
from manyheads.lm import checkpoint, data
from tests.errors import raises

DOCUMENTS = [data.Document(f"d{i}", f"document number {i} says hello {i}") for i in range(50)]
TOKENIZER = data.train_tokenizer(DOCUMENTS, 300)
SMALL = lm.Config(TOKENIZER.get_vocab_size(), embed=32, heads=4, layers=2, hidden=48, context=24)


@pytest.fixture
def model() -> lm.LanguageModel:
    return lm.LanguageModel(SMALL).eval()


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, shape)


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab": 0},
        {"embed": 30},
        {"heads": 3},
        {"layers": 0},
        {"context": 1},
        {"hidden": -1},
        {"embed": 8, "heads": 4},
    ],
)
def test_an_invalid_config_raises(sizes: dict[str, int]) -> None:
    with raises(ValueError, "Expected"):
        lm.Config(**{"vocab": 300, "embed": 32, "heads": 4, **sizes})
    with raises(TypeError):
        lm.Config(300, embed=32.0)  # type: ignore[arg-type]


@torch.no_grad()
def test_attend_gives_the_same_logits_and_a_map_per_layer(model: lm.LanguageModel) -> None:
    ids = ids_of(3, 10)
    logits, maps = model.attend(ids)
    torch.testing.assert_close(logits, model(ids))
    assert [tuple(amap.shape) for amap in maps] == [(3, 4, 10, 10)] * 2
    for amap in maps:
        torch.testing.assert_close(amap.dense().sum(-1), torch.ones(3, 4, 10))


def test_fake_ids_are_not_read(model: lm.LanguageModel) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, SMALL.vocab)


@torch.no_grad()
def test_no_token_attends_to_a_later_one(model: lm.LanguageModel) -> None:
    ids, changed = ids_of(1, 12), ids_of(1, 12)
    changed[:, :7] = ids[:, :7]
    torch.testing.assert_close(model(ids)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(ids)[:, 7:], model(changed)[:, 7:])


@torch.no_grad()
def test_a_scaled_model_reads_longer_texts_and_is_saved_unscaled(
    model: lm.LanguageModel, tmp_path: Path
) -> None:
    longer, ids = model.scaled(96), ids_of(1, 96)
    assert longer(ids).isfinite().all()
    with pytest.raises(ValueError, match="at most 96 tokens, the model's context, got 97"):
        longer(ids_of(1, 97))
    with pytest.raises(ValueError, match="at most 24 tokens, the model's context, got 96"):
        model(ids)
    assert torch.equal(model.scaled(24)(ids[:, :24]), model(ids[:, :24]))
    assert not torch.allclose(longer(ids[:, :24]), model(ids[:, :24]))  # every position is scaled
    lm.save(tmp_path, longer, TOKENIZER)
    assert torch.equal(lm.load(tmp_path)[0](ids[:, :24]), model(ids[:, :24]))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@torch.no_grad()
def test_logits_are_the_same_with_caches(cuts: list[int]) -> None:
    model, ids = lm.LanguageModel(SMALL).eval(), ids_of(2, sum(cuts))
    caches, parts = model.caches(), []
    for part in ids.split(cuts, 1):
        parts.append(model(part, caches))
    torch.testing.assert_close(torch.cat(parts, 1), model(ids))


def test_every_parameter_gets_a_gradient(model: lm.LanguageModel) -> None:
    model(ids_of(2, 9)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_invalid_ids_raise(model: lm.LanguageModel) -> None:
    with raises(ValueError, match="at most 24 tokens, the model's context, got 25"):
        model(ids_of(1, 25))
    with raises(ValueError, match="between 0 and"):
        model(torch.tensor([[SMALL.vocab]]))
    with raises(ValueError, match="between 0 and"):
        model(torch.tensor([[-1]]))
    with raises(ValueError, match=r"integers \[b, t\]"):
        model(torch.zeros(1, 3))
    with raises(ValueError, match="one per layer"):
        model(ids_of(1, 3), model.caches()[:1])
    caches = model.caches()
    with torch.no_grad():
        model(ids_of(1, 20), caches)
        with raises(ValueError, match="context"):
            model(ids_of(1, 5), caches)


@pytest.mark.parametrize("length", [1, 5, 23])
def test_greedy_with_the_cache_is_greedy_without(model: lm.LanguageModel, length: int) -> None:
    ids, greedy = ids_of(1, length), lm.Sampling(temperature=0)
    tokens = 24 - length
    cached = list(lm.generate(model, ids, tokens, greedy))
    assert cached == list(lm.generate(model, ids, tokens, greedy, cached=False))
    assert cached
    assert len(cached) == tokens or data.END_ID not in cached


def test_generate_fills_the_context_and_raises_for_more(model: lm.LanguageModel) -> None:
    with raises(ValueError, match=r"at most 4 tokens, .*got 5"):
        lm.generate(model, ids_of(1, 20), 5)
    for bad in (ids_of(1, 0), ids_of(2, 3)):
        with raises(ValueError, match="one prompt"):
            lm.generate(model, bad, 1)


def test_the_end_token_ends_the_text(model: lm.LanguageModel) -> None:
    model.logits = lambda x: torch.zeros(*x.shape[:2], SMALL.vocab)  # type: ignore[method-assign]
    assert list(lm.generate(model, ids_of(1, 3), 9, lm.Sampling(temperature=0))) == []
    assert lm.complete(model, TOKENIZER, "hello", 9, lm.Sampling(temperature=0)) == lm.Text("", "end")


def draws(sampling: lm.Sampling, logits: list[float], n: int = 2000) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sampling.draw(torch.tensor(logits), random) for _ in range(n)])
    return torch.bincount(drawn, minlength=len(logits)) / n


LOGITS = [0.5, 2.0, 1.0, -1.0, 1.5]


def test_sampling_draws_from_the_softmax() -> None:
    for temperature in (0.7, 1.0, 2.0):
        expected = (torch.tensor(LOGITS) / temperature).softmax(0)
        assert (draws(lm.Sampling(temperature), LOGITS) - expected).abs().max() < 0.05


def test_top_k_and_top_p_keep_the_most_likely_tokens() -> None:
    assert draws(lm.Sampling(1.0, top_k=2), LOGITS).nonzero().flatten().tolist() == [1, 4]
    p = torch.tensor(LOGITS).softmax(0)  # 0.40 for entry 1, 0.24 for entry 4, …
    assert draws(lm.Sampling(1.0, top_p=float(p[1]) * 0.9), LOGITS)[1] == 1
    kept = draws(lm.Sampling(1.0, top_p=float(p[1] + p[4]) * 0.99), LOGITS)
    assert kept.nonzero().flatten().tolist() == [1, 4]
    both = draws(lm.Sampling(1.0, top_k=1, top_p=1.0), LOGITS)
    assert both[1] == 1
    assert draws(lm.Sampling(0), LOGITS)[1] == 1
    assert draws(lm.Sampling(1e-300), LOGITS)[1] == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_k": -3},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
    ],
)
def test_invalid_sampling_raises(bad: dict[str, Any]) -> None:
    with raises(ValueError, "Expected"):
        lm.Sampling(**bad)


def test_complete_stops_before_a_text_and_at_the_context(model: lm.LanguageModel) -> None:
    whole = lm.complete(model, TOKENIZER, "hello", 15, lm.Sampling(0))
    assert whole.end == "tokens"
    assert whole == lm.complete(model, TOKENIZER, "hello", 15, lm.Sampling(0))
    stop = whole.text[3:5]
    cut = lm.complete(model, TOKENIZER, "hello", 15, lm.Sampling(0), stop=stop)
    assert cut == lm.Text(whole.text[: whole.text.index(stop)], "stop")
    assert lm.complete(model, TOKENIZER, "hello", 1000, lm.Sampling(0)).end in ("context", "end")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "hello", "tokens": 0}, "Expected tokens to be at least 1"),
        ({"prompt": "hello", "stop": ""}, "stop"),
        ({"prompt": "hello", "seed": -1}, "seed"),
        ({"prompt": "hello", "seed": 1 << 64}, "Expected seed to be below"),
        ({"prompt": "zq" * 24}, "model's context, 24"),
    ],
)
def test_complete_raises(model: lm.LanguageModel, arguments: dict[str, Any], said: str) -> None:
    with raises(ValueError, match=said):
        lm.complete(model, TOKENIZER, **arguments)


# Checkpoints


@torch.no_grad()
def test_save_and_load(model: lm.LanguageModel, tmp_path: Path) -> None:
    lm.save(tmp_path / "a", model, TOKENIZER)
    assert {f.name for f in (tmp_path / "a").iterdir()} == set(checkpoint.FILES[:3])
    again, tokenizer = lm.load(tmp_path / "a")
    assert again.config == model.config
    assert not again.training
    ids = ids_of(1, 8)
    assert torch.equal(again(ids), model(ids))
    assert tokenizer.to_str() == TOKENIZER.to_str()


@pytest.fixture
def saved(model: lm.LanguageModel, tmp_path: Path) -> Path:
    lm.save(tmp_path / "saved", model, TOKENIZER)
    return tmp_path / "saved"


def test_load_raises_for_a_missing_file(saved: Path) -> None:
    with pytest.raises(FileNotFoundError, match="which isn't a folder"):
        lm.load(saved / "nowhere")
    with pytest.raises(FileNotFoundError, match="which isn't a folder"):
        lm.load(saved / "config.json")
    for name in checkpoint.FILES[:3]:
        copy = saved.with_name("copy")
        shutil.copytree(saved, copy, dirs_exist_ok=True)
        (copy / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"got no {name}"):
            lm.load(copy)


@pytest.mark.parametrize("name", checkpoint.FILES[:3])
@pytest.mark.parametrize("keep", [0, 5, 60, 0.5])
def test_load_raises_for_a_truncated_file(saved: Path, name: str, keep: float) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
    with pytest.raises(ValueError, match=name):
        lm.load(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "bert"}, "that manyheads didn.t write"),
        ({"embed": 64}, "Restore it and config.json from the same copy"),
        ({"layers": 3}, "has no tensor"),
        ({"layers": 1}, "which the model doesn't have"),
        ({"heads": 5}, "Expected embed to be a multiple"),
        ({"heads": "4"}, "whole number"),
        ({"vocab": 301}, "belong together"),
        ({"extra": 1}, "Expected vocab, embed, .*got"),
    ],
)
def test_load_raises_for_another_config(saved: Path, change: dict[str, Any], said: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said):
        lm.load(saved)


def test_load_raises_for_weights_that_are_not_finite(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match="NaN"):
        lm.load(saved)


def test_a_scaled_model_generates_beyond_the_trained_context(model: lm.LanguageModel) -> None:
    longer, greedy = model.scaled(96), lm.Sampling(temperature=0)
    longer.logits = lambda x: torch.nn.functional.one_hot(torch.tensor([[7]]), SMALL.vocab)  # type: ignore
    assert list(lm.generate(longer, ids_of(1, 20), 76, greedy)) == [7] * 76
    assert lm.complete(longer, TOKENIZER, "hello", 1000, greedy).end == "context"
    with pytest.raises(
        ValueError, match="at most 76 tokens, as the model's context is 96 and the prompt has 20"
    ):
        lm.generate(longer, ids_of(1, 20), 77)
    with pytest.raises(ValueError, match="than the model's context, 96, got 101"):
        lm.complete(longer, TOKENIZER, "!" * 101)


def test_the_number_of_parameters_of_a_config(model: lm.LanguageModel) -> None:
    assert SMALL.parameter_count == sum(parameter.numel() for parameter in model.parameters())


# Streaming


class Fixed:
    """A model that draws given ids, whatever it reads."""

    def __init__(self, ids: list[int]) -> None:
        self.context, self.left = 1000, [*ids, data.END_ID]

    def caches(self, length: int) -> list[Any]:
        return []

    def __call__(self, ids: torch.Tensor, caches: list[Any]) -> torch.Tensor:
        logits = torch.zeros(1, 1, SMALL.vocab)
        logits[0, 0, self.left.pop(0)] = 1
        return logits


def pieces_of(ids: list[int], stop: str | None = None) -> list[lm.Text]:
    greedy = lm.Sampling(temperature=0)
    return list(lm.stream(Fixed(ids), TOKENIZER, "x", 999, greedy, stop=stop))  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("ab€🙂 �"), max_size=12),
    stray=st.lists(st.integers(1, 256), max_size=3),
    stop=st.none() | st.text(st.sampled_from("ab€"), min_size=1, max_size=3),
)
def test_a_stream_is_the_text_in_final_pieces(text: str, stray: list[int], stop: str | None) -> None:
    """Also where bytes are no character, and none of the stop text is given before it is complete."""
    ids = [*TOKENIZER.encode(text).ids, *stray, *TOKENIZER.encode(text).ids]
    pieces = pieces_of(ids, stop)
    whole = TOKENIZER.decode(ids)
    stopped = stop is not None and stop in whole
    assert "".join(piece.text for piece in pieces) == (whole.split(stop)[0] if stopped else whole)
    assert [piece.end for piece in pieces] == [""] * (len(pieces) - 1) + ["stop" if stopped else "end"]


def test_a_stream_yields_no_incomplete_characters() -> None:
    ids = TOKENIZER.encode("a€b").ids
    assert len(ids) == 5  # the euro sign is three bytes
    assert [piece.text for piece in pieces_of(ids)] == ["a", "€", "b", ""]
    assert [piece.text for piece in pieces_of(TOKENIZER.encode("zwyz").ids, "wyy")] == ["z", "wyz", ""]


# Compiling and exporting


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_model_compiles_in_one_graph(model: lm.LanguageModel, dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (7, 24):
        ids = ids_of(2, length)
        torch.testing.assert_close(compiled(ids), model(ids))
    with pytest.raises(ValueError, match="at most 24 tokens"):
        model(ids_of(1, 25))


@pytest.mark.full
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_model_exports_with_a_dynamic_length(model: lm.LanguageModel, grad: bool, strict: bool) -> None:
    with torch.set_grad_enabled(grad):
        lengths = ({1: torch.export.Dim("t", min=2, max=24)},)
        exported = torch.export.export(model, (ids_of(1, 9),), dynamic_shapes=lengths, strict=strict)
        for length in (2, 9, 24):
            ids = ids_of(1, length)
            torch.testing.assert_close(exported.module()(ids), model(ids))
        with pytest.raises((IndexError, RuntimeError)):
            exported.module()(torch.tensor([[1, SMALL.vocab]]))


class Killed(BaseException):
    """Raised where the process would be killed."""


def generation(folder: Path) -> set[float]:
    """The numbers that `test_save_survives` wrote into the files of a checkpoint."""
    found = {float(load_file(folder / "model.safetensors")["norm.weight"][0])}
    found.add(float(load_file(folder / "optimizer.safetensors")["moment"]))
    found.add(float(checkpoint.read_json(folder / "state.json")["step"]))
    return found


def test_save_survives_a_crash_before_every_change_of_the_disk(
    model: lm.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(folder: Path, number: float) -> None:
        with torch.no_grad():
            model.norm.weight.fill_(number)
        moment = {"moment": torch.tensor(number)}
        lm.save(folder, model, TOKENIZER, optimizer=moment, state={"step": number})

    outcomes = []
    for last in range(100):
        folder = tmp_path / str(last)
        save(folder, 1.0)
        left = [last]

        def dying(real: Any, left: list[int] = left) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return real(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for module, name in (
                (os, "rename"),
                (os, "replace"),
                (Path, "rmdir"),
                (Path, "mkdir"),
                (Path, "write_text"),
                (Path, "write_bytes"),
            ):
                patch.setattr(module, name, dying(getattr(module, name)))
            try:
                save(folder, 2.0)
                died = False
            except Killed:
                died = True
        lm.load(folder)  # at any moment what is there can be read
        checkpoint.finish_write(folder)
        assert len(generation(folder)) == 1
        outcomes.append(generation(folder).pop())
        save(folder, 3.0)
        assert generation(folder) == {3.0}
        assert {f.name for f in folder.iterdir()} == set(checkpoint.FILES)
        if not died:
            break
    else:
        pytest.fail("saving never ended")
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)  # the old one up to the renaming, then the new one
    assert {1.0, 2.0} == set(outcomes)
