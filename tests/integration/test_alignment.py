"""Word times of Whisper, equal to those of transformers; generations of T5 and Marian."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.whisper import generation_whisper
from transformers.utils import ModelOutput

from manyheads import observe, warping

HEADS = [[1, 0], [1, 3], [2, 2]]


def whisper(sharpness: float, seed: int = 0) -> transformers.WhisperForConditionalGeneration:
    """A small Whisper with random weights; queries and keys of its cross-attention are multiplied."""
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=128, num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=150, max_target_positions=60, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder_attn.q_proj.weight" in name or "encoder_attn.k_proj.weight" in name:
                weight *= sharpness
    settings = model.generation_config
    settings.no_timestamps_token_id, settings.is_multilingual, settings.alignment_heads = 100, False, HEADS
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    return model


@pytest.mark.parametrize("sharpness", [1, 8, 30])
@pytest.mark.parametrize("frames", [None, 220, [220, 300]], ids=["all", "some", "different"])
def test_token_times_are_those_of_transformers(sharpness: float, frames: Any) -> None:
    model, sound, ids = whisper(sharpness), torch.randn(2, 16, 300), torch.randint(3, 120, (2, 30))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(sound, decoder_input_ids=ids, output_attentions=True)
    theirs = model._extract_token_timestamps(
        ModelOutput(cross_attentions=(out.cross_attentions,), sequences=ids),
        HEADS,
        num_frames=torch.tensor(frames) if isinstance(frames, list) else frames,
        num_input_ids=3,
    )
    model.set_attn_implementation("sdpa")
    with observe(model) as recording, torch.no_grad():
        model(sound, decoder_input_ids=ids)
    for batch in range(2):
        count = frames[batch] if isinstance(frames, list) else frames
        found = recording.align(
            HEADS,
            batch=batch,
            queries=slice(3, None),
            keys=None if count is None else slice(0, count // 2),
            seconds=0.02,
        )
        assert torch.equal(found.times[:, 0].float(), theirs[batch, 3:-1])
        assert torch.equal(found.times[:-1, 1].float(), theirs[batch, 4:-1])


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_times_of_a_generation_are_those_of_transformers(options: dict[str, Any]) -> None:
    model, sound = whisper(20), torch.randn(1, 16, 300)
    with observe(model) as recording, torch.no_grad():
        out = model.generate(sound, max_new_tokens=12, return_token_timestamps=True, **options)
    found = recording.align(HEADS, queries=slice(2, None), seconds=0.02)  # after a prompt of two tokens
    theirs = out["token_timestamps"][0]
    assert torch.equal(found.times[:, 0].float(), theirs[: len(found.queries)])
    assert len(theirs) == len(found.queries) + 1  # the last token isn't read by the decoder


@pytest.mark.full
def test_a_generation_with_beams_raises() -> None:
    model = whisper(20)
    with observe(model) as recording, torch.no_grad():
        model.generate(torch.randn(1, 16, 300), max_new_tokens=12, num_beams=3)
    with pytest.raises(ValueError, match="as in beam search"):
        recording.align(HEADS, batch=0)


def test_paths_are_those_of_transformers() -> None:
    """Bit for bit, also with ties, in blocks of any width."""
    random = np.random.default_rng(0)
    for n in range(20):
        t, s = int(random.integers(1, 30)), int(random.integers(1, 100))
        costs = random.normal(size=(t, s))
        costs = np.round(2 * costs) / 2 if n % 2 else costs
        theirs = np.stack(generation_whisper._dynamic_time_warping(costs), 1)
        for width in (s, max(1, s // 3)):
            [path] = warping.warp(
                lambda i, j, costs=costs: np.ascontiguousarray(costs[None, :, i:j]),
                (1, t, s),
                width,
                np.float32,
            )
            assert np.array_equal(path, theirs)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def marian() -> Any:
    config = transformers.MarianConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.MarianMTModel(config).eval()


@pytest.mark.parametrize("make", [t5, marian])
def test_steps_of_a_padded_batch_are_aligned_as_the_whole(make: Any) -> None:
    torch.manual_seed(0)
    model, ids, mask = make(), torch.randint(3, 90, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    with observe(model) as recording, torch.no_grad():
        for length in (4, 7):  # the last generation counts
            out = model.generate(ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length)
    with observe(model) as whole, torch.no_grad():
        model(ids, attention_mask=mask, decoder_input_ids=out[:, :-1])
    for batch, keys in ((0, 9), (1, 6)):
        found, want = (
            each.align([(0, 0), (1, 3)], batch=batch, median_filter=1) for each in (recording, whole)
        )
        assert len(found.queries) == 7
        assert found.keys.tolist() == list(range(keys))
        assert torch.equal(found.path, want.path)
