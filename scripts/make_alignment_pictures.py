"""Draw the pictures of alignments in the documentation, of planted attention with noise.

python scripts/make_alignment_pictures.py --out docs
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import manyheads
from manyheads import figures
from manyheads.maps import AttentionMap
from manyheads.observe import Recording
from manyheads.problem import Problem


def recording_of(scores: Tensor) -> Recording:
    """Return a recording of one cross-attention layer with these scores `[1, h, t, s]`."""
    _, h, t, _ = scores.shape
    q, k = torch.eye(t).expand(1, h, t, t), scores.mT.contiguous()  # the scores are q · k
    recording = Recording()
    recording.add("decoder.layers.0.encoder_attn", AttentionMap.of(Problem.of(q, k, k, scale=1.0)), k)
    return recording


def draw_words(out: Path) -> None:
    """Draw words of different lengths, by two heads of four."""
    words = ["the", "train", "left", "the", "station", "on", "time", "and", "nobody", "saw", "it"]
    starts = [0, 15, 40, 80, 95, 140, 160, 200, 215, 260, 290, 320]
    scores = torch.randn(1, 4, len(words), starts[-1], generator=torch.Generator().manual_seed(0))
    for n, (start, stop) in enumerate(pairwise(starts)):
        scores[0, 1:3, n, start:stop] += 6.0
    tokens = manyheads.TokenizedText(tuple(" " * (n > 0) + word for n, word in enumerate(words)))
    found = recording_of(scores).align(tokens=tokens, seconds=0.02)
    figures.alignment(found, title="When each word is spoken").savefig(out / "word-times.png")


def draw_translation(out: Path) -> None:
    """Draw a translation that changes the order of words."""
    source = ["four", "hundred", "twenty", "three"]
    target = {"vier": 0, "hundert": 1, "drei": 3, "und": 2, "zwanzig": 2}
    scores = torch.randn(1, 1, len(target), len(source), generator=torch.Generator().manual_seed(0))
    for n, key in enumerate(target.values()):
        scores[0, 0, n, key] += 4.0
    found = recording_of(scores).align([(0, 0)], tokens=list(target), median_filter=1)
    figures.alignment(found, keys=source, mark="largest").savefig(out / "translation.png")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder of the pictures.")
    options = parser.parse_args()
    draw_words(options.out)
    draw_translation(options.out)


if __name__ == "__main__":
    main()
