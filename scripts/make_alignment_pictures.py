"""Train two small encoder-decoders, and draw the pictures of alignments in the documentation.

    python scripts/make_alignment_pictures.py --out docs

A Whisper hears words of noise: each word has a spectrum of its own, and lasts 0.1 to 0.4 s. A Marian model
translates English numbers to German ones, which name the ones before the tens. Both take about two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from torch import Tensor

import manyheads
from manyheads import figures

WORDS = ["the", "train", "left", "station", "on", "time", "and", "no", "body", "saw", "it", "go"]
BINS, FRAMES, START, END = 16, 400, 1, 2
ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EINS = ["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ZEHN = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def whisper() -> transformers.WhisperForConditionalGeneration:
    """Return a small Whisper with random weights."""
    config = transformers.WhisperConfig(
        vocab_size=3 + len(WORDS), num_mel_bins=BINS, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=FRAMES // 2, max_target_positions=16, pad_token_id=0, bos_token_id=START,
        eos_token_id=END, decoder_start_token_id=START, dropout=0.0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def sounds(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return sounds [b, bins, frames], tokens [b, t] and the frame at which each word starts [b, words]."""
    spectra = torch.randn(len(WORDS), BINS, generator=torch.Generator().manual_seed(7))
    n = 10
    words = torch.rand(count, len(WORDS), generator=generator).argsort(-1)[:, :n]  # [b, n], all different
    lengths = torch.randint(10, 40, (count, n), generator=generator)
    starts = torch.cat((torch.zeros(count, 1, dtype=torch.long), lengths.cumsum(-1)), -1)
    frame = torch.arange(FRAMES)
    which = (frame >= starts[:, 1:, None]).sum(1).clamp(max=n - 1)  # [b, frames]
    loud = frame < starts[:, -1:]
    sound = spectra[words.gather(1, which)] * loud[..., None]  # [b, frames, bins]
    sound = sound + 0.3 * torch.randn(sound.shape, generator=generator)
    tokens = torch.cat((torch.full((count, 1), START), words + 3, torch.full((count, 1), END)), -1)
    return sound.mT.contiguous(), tokens, starts


def marian(vocabulary: list[str]) -> transformers.MarianMTModel:
    """Return a small Marian model with random weights."""
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, dropout=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


def number(generator: torch.Generator) -> tuple[list[str], list[str]]:
    """Return two numbers, and between them "and", in English and in German."""
    english, german = [], []
    for n in range(2):
        hundreds, tens, ones = (int(torch.randint(m, (1,), generator=generator)) for m in (9, 8, 9))
        english += ["plus"] * n + [ONES[hundreds], "hundred", TENS[tens], ONES[ones]]
        german += ["plus"] * n + [EINS[hundreds], "hundert", EINS[ones], "und", ZEHN[tens]]
    return english, german


def train(model: torch.nn.Module, batches, steps: int, rate: float) -> None:
    """Train a model on batches of (inputs, tokens)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for step in range(steps):
        inputs, tokens = next(batches)
        loss = model(inputs, decoder_input_ids=tokens[:, :-1], labels=tokens[:, 1:].contiguous()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


def draw_words(out: Path, steps: int) -> None:
    """Train the Whisper, align a sound, and draw it."""
    torch.manual_seed(0)
    model, generator = whisper(), torch.Generator().manual_seed(1)
    train(model, iter(lambda: sounds(32, generator)[:2], None), steps, 2e-3)
    sound, tokens, starts = sounds(1, torch.Generator().manual_seed(5))
    with manyheads.observe(model) as recording, torch.no_grad():
        model(sound, decoder_input_ids=tokens[:, :-1])
    print(*recording.find_alignment_heads(least=-1.0), sep="\n")
    # Token n + 1 is predicted from token n, whose query therefore attends to it.
    spoken = [WORDS[n - 3] for n in tokens[0, 1:-1].tolist()]
    text = manyheads.TokenizedText(
        (*((" " if n else "") + word for n, word in enumerate(spoken)), "<end>"), (10,)
    )
    found = recording.align(tokens=text, seconds=0.02)
    for word, start in zip(found.words, starts[0].tolist(), strict=False):
        print(f"{word.text:>8} {word.start:.2f} s, spoken at {start / 100:.2f} s")
    figure = figures.alignment(found, title=f"Ten words, aligned by {len(found.heads)} heads")
    figure.savefig(out / "word-times.png")


def draw_translation(out: Path, steps: int) -> None:
    """Train the Marian model, and draw a translation."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    words = sorted({"hundred", "plus", "hundert", "und", *ONES, *EINS, *TENS, *ZEHN})
    vocabulary = ["<pad>", "<s>", "</s>", *words]
    number_of = {word: n for n, word in enumerate(vocabulary)}

    def batch() -> tuple[Tensor, Tensor]:
        pairs = [number(generator) for _ in range(64)]
        english = torch.tensor([[number_of[word] for word in [*pair[0], "</s>"]] for pair in pairs])
        german = torch.tensor([[number_of[word] for word in ["<s>", *pair[1], "</s>"]] for pair in pairs])
        return english, german

    model = marian(vocabulary)
    train(model, iter(batch, None), steps, 3e-3)
    pair = batch()
    english, german = ([vocabulary[n] for n in ids[3].tolist()] for ids in pair)
    with manyheads.observe(model) as recording, torch.no_grad():
        model(pair[0][3:4], decoder_input_ids=pair[1][3:4, :-1])
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    found = max(
        (recording.align([head], tokens=german[1:], median_filter=1) for head in heads),
        key=lambda each: float(each.pooled(len(each.queries), len(each.keys)).amax(-1).mean()),
    )
    print("head", found.heads)
    figure = figures.alignment(found, keys=english, mark="largest", title="The largest weight of each word")
    figure.savefig(out / "translation.png")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder of the pictures.")
    parser.add_argument("--steps", type=int, default=1200, help="Steps of training of each model.")
    options = parser.parse_args()
    draw_translation(options.out, options.steps // 2)
    draw_words(options.out, options.steps)


if __name__ == "__main__":
    main()
