"""Lazy patterns of q and k that other tools have recorded, compared with their own dense patterns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import manyheads as mh
from manyheads import bridges
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("one_thread")


def cache_of(layers: int = 2, rotary: bool = False, t: int = 6) -> dict[str, Tensor]:
    """Return what a TransformerLens model with four query heads and two key heads would have recorded."""
    torch.manual_seed(0)
    cache = {}
    for layer in range(layers):
        for name, heads in (("q", 4), ("k", 2)):
            x = torch.randn(2, t, heads, 8)
            cache[f"blocks.{layer}.attn.hook_{name}"] = x
            if rotary:
                cache[f"blocks.{layer}.attn.hook_rot_{name}"] = -2 * x
    cache["blocks.0.hook_resid_pre"] = torch.randn(2, t, 32)
    return cache


def dense_pattern(q: Tensor, k: Tensor) -> Tensor:
    q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(2, 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("rotary", [False, True])
def test_patterns_have_the_keys_of_a_cache(rotary: bool) -> None:
    cache = cache_of(rotary=rotary)
    patterns = bridges.Patterns(cache)
    assert list(patterns) == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    assert len(patterns) == 2
    for layer in range(2):
        names = (f"blocks.{layer}.attn.hook_{'rot_' if rotary else ''}{x}" for x in "qk")
        expected = dense_pattern(*(cache[name] for name in names))
        for key in (("pattern", layer), ("pattern", layer, "attn"), layer, list(patterns)[layer]):
            torch.testing.assert_close(patterns[key].dense(), expected)
        torch.testing.assert_close(patterns["pattern", layer][1, 3, -1, :2], expected[1, 3, -1, :2])
    assert [name for name in cache if bridges.is_query_or_key(name)] == [*cache][:-1]


def test_options_of_a_lazy_pattern() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    full = bridges.lazy_pattern(q, k, mask=mh.Full(), scale=1.0, softcap=2.0)
    expected = (2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 2)).softmax(-1)
    torch.testing.assert_close(full.dense(), expected)
    patterns = bridges.Patterns(cache_of(), mask=mh.Full())
    assert patterns[0][0, 0, 0, -1] > 0


def test_what_is_not_in_a_cache_raises() -> None:
    cache = cache_of()
    patterns = bridges.Patterns(cache)
    for ask, kind, words in [
        (lambda: bridges.Patterns(3), TypeError, "cache of run_with_cache, got an int"),
        (lambda: bridges.Patterns({}), ValueError, "blocks.0.attn.hook_q and hook_k"),
        (
            lambda: bridges.Patterns({"blocks.3.attn.hook_q": cache["blocks.0.attn.hook_q"]}),
            ValueError,
            "layer 3",
        ),
        (lambda: bridges.lazy_pattern(torch.ones(2), torch.ones(2)), ValueError, "four dimensions"),
    ]:
        with raises(kind, match=words):
            ask()  # type: ignore[no-untyped-call]
    for key in (
        "blocks.9.attn.hook_pattern",
        ("pattern", 2),
        ("attn_scores", 0),
        "blocks.0.hook_resid_pre",
        True,
    ):
        with pytest.raises(KeyError, match="with a layer among 0, 1, got"):
            patterns[key]


# -- the tools themselves, where they are installed ------------------------------------------------


def gpt2(**sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=60, bos_token_id=0, eos_token_id=0, **sizes
    )
    return transformers.GPT2LMHeadModel(config).eval()


def tokenizer() -> Any:
    """Return a byte-level tokenizer with GPT-2's end of text, which needs no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = "<|endoftext|>"
    learned.train_from_iterator(
        ["the cat sat on the mat"], BpeTrainer(show_progress=False, special_tokens=[end])
    )
    return PreTrainedTokenizerFast(tokenizer_object=learned, eos_token=end, pad_token=end)


@pytest.mark.full
def test_transformer_lens_has_the_same_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lens = pytest.importorskip("transformer_lens")
        # It loads the tokenizer of the name "gpt2" from the Hub, also if it gets one.
        utilities = pytest.importorskip("transformer_lens.utilities.hf_utils")
        monkeypatch.setattr(
            utilities, "autotokenizer_with_special_token_compat", lambda *_, **__: tokenizer()
        )
        model = lens.TransformerBridge.boot_transformers("gpt2", hf_model=gpt2(), tokenizer=tokenizer())
        ids = torch.randint(19, (2, 7))
        with torch.no_grad():
            _, dense = model.run_with_cache(ids)
            _, small = model.run_with_cache(ids, names_filter=bridges.is_query_or_key)
    assert not any("pattern" in name for name in small.keys())  # noqa: SIM118
    patterns = bridges.Patterns(small)
    for layer in range(2):
        torch.testing.assert_close(patterns["pattern", layer].dense(), dense["pattern", layer])


@pytest.mark.full
def test_nnsight_has_the_same_patterns() -> None:
    """Of eager attention in one trace, and of q and k in another, or observed around the trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nnsight = pytest.importorskip("nnsight")
        model, ids = gpt2(), torch.randint(60, (2, 7))
        wrapped = nnsight.NNsight(model)
        with torch.no_grad(), wrapped.trace(ids):
            qkv = wrapped.transformer.h[1].attn.c_attn.output.save()
        with mh.observe(model) as recording, torch.no_grad(), wrapped.trace(ids):
            wrapped.lm_head.output.save()
        model.set_attn_implementation("eager")
        with torch.no_grad(), wrapped.trace(ids):
            weights = wrapped.transformer.h[1].attn.output[1].save()
    q, k, _ = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in qkv.split(32, -1))
    torch.testing.assert_close(bridges.lazy_pattern(q, k).dense(), weights)
    torch.testing.assert_close(recording[1].dense(), weights)
