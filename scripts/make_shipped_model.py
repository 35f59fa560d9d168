"""Make the model that ships with manyheads: `python scripts/make_shipped_model.py --out DIR`.

It trains a model (or continues the run in DIR), measures it, and writes the weights, the tokenizer, the log
and a model card into DIR/shipped. Exit code 1: the model isn't good enough.
"""

from __future__ import annotations

import argparse
import lzma
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyheads import measures
from manyheads.kernels import processor
from manyheads.lm import checkpoint, data
from manyheads.lm.checkpoint import HELD_OUT, LOG, TRAINING
from manyheads.lm.generate import complete
from manyheads.lm.model import LanguageModel
from manyheads.lm.train import Run, held_out_loss, train

OPTIONS = {
    "steps": 5500,
    "context": 512,
    "batch_size": 4,
    "repeated": 2,  # half of the tokens
    "vocab_size": 2048,
    "learning_rate": 2.5e-3,
    "dropout": 0.05,
    "seed": 2,
    "device": "cpu",
}
PREVIOUS, INDUCTION = 0.5, 0.4  # the scores that the best heads must exceed
TEXTS, LENGTH = 50, 256  # the number of texts and of random sequences, and the tokens of each
SEED = 20_260_101  # the seed of the random sequences; the seeds of training are [seed, step]
PROMPT = "Return the"


def split(documents: Sequence[data.Document]) -> tuple[list[data.Document], list[data.Document]]:
    """Split documents into those for training and those that are held out."""
    positions = data.held_out_positions([document.name for document in documents])
    training = [document for i, document in enumerate(documents) if i not in positions]
    return training, [document for i, document in enumerate(documents) if i in positions]


def byte_count(documents: Iterable[data.Document]) -> int:
    """Return the bytes of the texts in UTF-8."""
    return sum(len(document.text.encode()) for document in documents)


@torch.no_grad()
def previous_token(model: LanguageModel, held_out: data.Tokens) -> Tensor:
    """Return the previous-token score `[layers, h]`, averaged over 50 held-out texts of 256 tokens."""
    last_start = len(held_out) - LENGTH
    if last_start < (TEXTS - 1) * LENGTH:
        raise ValueError(f"Expected {TEXTS} held-out texts of {LENGTH} tokens, got {len(held_out)} tokens.")
    starts = np.linspace(0, last_start, TEXTS).astype(int)  # the texts don't overlap
    ids = np.stack([held_out[start : start + LENGTH] for start in starts]).astype(np.int64)
    maps = model.attend(torch.from_numpy(ids))[1]
    return torch.stack([measures.previous_token(amap).mean(0) for amap in maps])


@torch.no_grad()
def induction(model: LanguageModel, seed: int = SEED) -> Tensor:
    """Return the induction score `[layers, h]`, averaged over 50 repeated sequences of 128 random tokens."""
    rng = np.random.default_rng(seed)
    half = rng.integers(data.END_ID + 1, model.config.vocab, (TEXTS, LENGTH // 2))
    ids = torch.from_numpy(np.concatenate([half, half], 1))  # [b, t]
    maps = model.attend(ids)[1]
    return torch.stack([measures.induction(amap, ids).mean(0) for amap in maps])


def xz_bits(documents: Sequence[data.Document], before: Sequence[data.Document] = ()) -> float:
    """Return the bits per byte that xz needs for documents, if it has compressed the documents `before`."""

    def size(texts: Sequence[data.Document]) -> int:
        joined = "\0".join(document.text for document in texts).encode()
        return len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)) if texts else 0

    return 8 * (size([*before, *documents]) - size(before)) / byte_count(documents)


def bigram_bits(training: data.Tokens, held_out: data.Tokens, vocab: int, bytes_: int) -> float:
    """Return the bits per byte under a bigram model with interpolated Kneser-Ney smoothing.

    P(w | v) = max(c(v w) − D, 0) / c(v) + D · n(v ·) / c(v) · P(w), where c counts pairs and n counts
    different pairs; P(w) = n(· w) / n(· ·), with one added to each n; D = n₁ / (n₁ + 2 n₂), from the
    numbers n₁ and n₂ of pairs that occur once and twice (Chen & Goodman 1999, section 2.7).
    """
    pairs, counts = np.unique(training[:-1].astype(np.int64) * vocab + training[1:], return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5
    first, second = np.divmod(pairs, vocab)
    totals = np.bincount(first, counts, vocab)  # c(v)
    followers = np.bincount(first, minlength=vocab)  # n(v ·)
    unigram = (np.bincount(second, minlength=vocab) + 1) / (len(pairs) + vocab)  # P(w)

    v, w = held_out[:-1].astype(np.int64), held_out[1:].astype(np.int64)
    index = np.minimum(np.searchsorted(pairs, v * vocab + w), len(pairs) - 1)
    count = np.where(pairs[index] == v * vocab + w, counts[index], 0)  # c(v w)
    known = totals[v] > 0
    total = np.where(known, totals[v], 1)
    backoff = np.where(known, discount * followers[v] / total, 1.0)  # an unknown v has no counts
    probability = np.maximum(count - discount, 0) / total + backoff * unigram[w]
    return float(-np.log2(probability).sum() / bytes_)


@dataclass(frozen=True)
class Result:
    """Bits per byte of the same held-out text, and scores of the heads `[layers, h]`."""

    model: float
    xz: float
    xz_after_training: float
    token_bigram: float
    byte_bigram: float
    previous: Tensor
    induction: Tensor

    def shortcomings(self) -> list[str]:
        """Return the requirements that the model doesn't meet, as sentences."""
        required = {
            f"no previous-token head is above {PREVIOUS}": self.previous.max() > PREVIOUS,
            f"no induction head is above {INDUCTION}": self.induction.max() > INDUCTION,
            "its bits per byte are not below those of xz": self.model < self.xz,
            "its bits per byte are not below those of a bigram model": self.model
            < min(self.token_bigram, self.byte_bigram),
        }
        return [sentence for sentence, met in required.items() if not met]


def measure(run: Run) -> Result:
    """Measure the results of a run on Python's own text for the model card."""
    training, held_out = split(data.python_documents())
    model, _ = checkpoint.load(run.out)
    ids, held_ids = data.read_tokens(run.out / TRAINING), data.read_tokens(run.out / HELD_OUT)
    size = byte_count(held_out)

    def as_bytes(documents: Sequence[data.Document]) -> data.Tokens:
        joined = "\0".join(["", *(document.text for document in documents), ""])
        return np.frombuffer(joined.encode(), np.uint8)

    return Result(
        model=run.bits_per_byte(held_out_loss(model, held_ids)),
        xz=xz_bits(held_out),
        xz_after_training=xz_bits(held_out, before=training),
        token_bigram=bigram_bits(ids, held_ids, model.config.vocab, size),
        byte_bigram=bigram_bits(as_bytes(training), as_bytes(held_out), 256, size),
        previous=previous_token(model, held_ids),
        induction=induction(model),
    )


def card(run: Run, result: Result) -> str:
    """Return the model card in Markdown."""
    model, tokenizer = checkpoint.load(run.out)
    config, options, facts = model.config, run.options, run.facts
    size = (run.out / "model.safetensors").stat().st_size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share = options.repeated / options.batch_size
    tokens = options.steps * options.batch_size * options.context
    sample = complete(model, tokenizer, PROMPT, 120).text
    heads = [
        f"| {layer} | {head} | {result.previous[layer, head]:.2f} | {result.induction[layer, head]:.2f} |"
        for layer in range(config.layers)
        for head in range(config.heads)
    ]
    return f"""# The shipped language model

A causal transformer on this library's own attention, small enough to inspect every head. It demonstrates what
attention does; its text isn't reliable.

Made by `python scripts/make_shipped_model.py --out DIR`, without any downloads.

## Architecture

- {config.layers} layers of {config.heads} heads, model size {config.embed}, feed-forward {config.hidden}, \
context {config.context} tokens, vocabulary {config.vocab}
- {parameters:,} parameters in float32, {size:,} bytes; SHA-256 of `model.safetensors`:
  `{checkpoint.file_digest(run.out / "model.safetensors")}`

## Training data

- `pydoc_data.topics` and the docstrings of the standard library of Python \
{platform.python_version()} on {platform.system()}; SHA-256 of all documents: \
`{facts["documents_sha256"]}`
- training: {facts[TRAINING]["documents"]} documents, {facts[TRAINING]["bytes"]:,} bytes, \
{facts[TRAINING]["tokens"]:,} tokens; held-out: {facts[HELD_OUT]["documents"]} documents, \
{facts[HELD_OUT]["bytes"]:,} bytes, {facts[HELD_OUT]["tokens"]:,} tokens. The split is by document; \
the tokenizer was trained on the training documents only.
- {share:.0%} of the training tokens are synthetic: repeated sequences of random tokens, from which heads \
learn to copy. The loss on them counts only repeated tokens.

## Training

- {options.steps:,} steps of {options.batch_size * options.context:,} tokens ({tokens:,} in all, \
{tokens * (1 - share) / facts[TRAINING]["tokens"]:.0f} passes over the text), seed {options.seed}, \
AdamW, learning rate {options.learning_rate}, weight decay {options.decay}, dropout {options.dropout}
- Sequences were split into 8 parts in the first quarter of the steps, then into 4, into 2, and not at all
- {run.seconds / 60:.0f} minutes of wall-clock time, in \
{"bfloat16 autocast" if run.dtype else "float32"} on {processor()}, {os.cpu_count()} cores, \
{torch.get_num_threads()} threads, PyTorch {torch.__version__.split("+")[0]}
- all options: `{asdict(options)}`

## Loss on held-out text

Bits per byte of the {facts[HELD_OUT]["bytes"]:,} held-out bytes. Every method also encodes the ends of \
the documents.

| method | bits per byte |
|---|---|
| this model | {result.model:.3f} |
| `xz` (preset 9e) on the held-out text alone | {result.xz:.3f} |
| `xz`, increase if the held-out text is appended to the training text | {result.xz_after_training:.3f} |
| bigram model of tokens, fitted on the training text (Kneser-Ney) | {result.token_bigram:.3f} |
| bigram model of bytes, fitted on the training text | {result.byte_bigram:.3f} |

## Head scores

Previous token: the mean weight on the previous token, over {TEXTS} held-out texts of {LENGTH} \
tokens. Induction: the mean weight on tokens that followed earlier occurrences of the query's token, over \
{TEXTS} repeated sequences of {LENGTH // 2} random tokens (seed {SEED}, not used in training).

| layer | head | previous token | induction |
|---|---|---|---|
{chr(10).join(heads)}

## A sample

Prompt `{PROMPT}`, temperature 0.8, seed 0:

```text
{PROMPT}{sample}
```
"""


def make(out: Path) -> list[str]:
    """Train or continue, measure, write out/shipped, and return the unmet requirements."""
    resume = (out / "state.json").exists() or (out / checkpoint.WRITTEN).exists()
    run = train(out, OPTIONS, resume=resume)
    result = measure(run)
    shipped = out / "shipped"
    checkpoint.save(shipped, *checkpoint.load(out))
    text = card(run, result)
    checkpoint.write(shipped / "card.md", text.encode())
    checkpoint.write(shipped / LOG, (out / LOG).read_bytes())
    return result.shortcomings()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Make the model that ships with manyheads.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    try:
        shortcomings = make(parser.parse_args().out)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"manyheads: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if shortcomings:
        sys.exit(f"the model isn't good enough to ship: {'; '.join(shortcomings)}.")


if __name__ == "__main__":
    main()
