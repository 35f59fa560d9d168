"""Take screenshots of the viewer. Every pair of page, size, theme, length, script and tokenizer occurs.

    python scripts/screenshots.py FOLDER
    python scripts/screenshots.py FOLDER --only page=head --only length=7
    python scripts/screenshots.py --documentation docs  # instead, the pictures of docs/viewer.md

The maps come from heads with random content, some of which attend to the previous token, to the first one, or
to earlier occurrences of the same token. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import pydoc
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import BrowserContext, Page, Request, sync_playwright
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from torch import Tensor, nn

import manyheads as mh
from manyheads import TokenizedText
from manyheads.text import report
from manyheads.viewer.api import Api
from manyheads.viewer.server import Server

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]

PAGES = {
    "overview": "#page=overview",
    "head": "#page=head&layer=1&head=1",
    "weights": "#page=head&layer=1&head=0",  # zoomed in to single weights, with a pinned crosshair
    "compare": "#page=head&layer=0&head=0&second=0,1,1",
    "text": "#page=text&layer=1&heads=0",
    "lines": "#page=lines&layer=1&heads=0,1",
}
TEXTS = {
    "English": "The station master, whose naïve nephew couldn't, watched the evening train leave. ",
    "Chinese": "我爱机器学习，机器也爱我。今天的火车准时离开了车站，而站长的侄子还没有到。",
    "Arabic": "السَّلامُ عليكم يا عالم، غادر القطارُ المحطةَ في الموعد، ولم يصل ابنُ أخي المدير. ",
    "emoji": "We ❤️ trains 🚂! The 👨‍👩‍👧‍👦 family waved 👋🏽 at the 🇩🇪 and 🇫🇷 crews, e\u0301tonne\u0301s. ",
    "code": "def leave(train, at=None):\n\tif not at:\n\t\treturn False\n    return train['time'] <= at\n\n",
}
DOCUMENTATION = {
    "viewer-overview": "#page=overview",
    "viewer-head": "#page=head&layer=1&head=2",
    "viewer-weights": "#page=head&layer=2&head=3&scale=log&pin=869,775&view=780.5,868,28",
    "viewer-text": "#page=text&layer=2&heads=5&token=71",
    "viewer-lines": "#page=lines&layer=1&heads=0,2,4",
}
MODULES = ("argparse", "logging", "asyncio", "unittest", "email.message", "http.client", "socket", "ssl")
LLAMA = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# -- what to show ----------------------------------------------------------------------------------


def cover(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return rows in which every pair of values of two parameters occurs, chosen greedily."""
    names = list(values)

    def pairs_of(row: Row) -> set[frozenset[tuple[str, Any]]]:
        return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}

    candidates = [dict(zip(names, row, strict=True)) for row in itertools.product(*values.values())]
    missing = set().union(*map(pairs_of, candidates))
    rows = []
    while missing:
        rows.append(max(candidates, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


def byte_level(pattern: str | None = None) -> Tokenizer:
    """Return a tokenizer like GPT-2's, or with a pattern like Llama 3's, trained on the documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(pattern=Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_documentation(), trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a tokenizer like multilingual BERT's: lowercase, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = WordPieceTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*_documentation(), TEXTS["Chinese"], TEXTS["Arabic"]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": cache(byte_level),
    "Llama": cache(lambda: byte_level(LLAMA)),
    "BERT": cache(word_piece),
}


class Heads(nn.Module):
    """A layer of heads that attend to the previous token, the first, the same token, or random ones."""

    def __init__(self, heads: int, causal: bool, seed: int) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.random = torch.Generator().manual_seed(seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Attend with queries and keys made of positions, a mark of the first token, content and noise."""
        t, d = len(ids), 8
        previous, first, same, _ = (torch.arange(self.heads) % 4 == torch.arange(4)[:, None])[..., None, None]
        frequencies = 0.5 * 4.0 ** -torch.arange(d // 2)
        angles = torch.arange(t)[:, None] * frequencies
        content = torch.randn(int(ids.max()) + 1, d, generator=self.random)[ids]
        is_first = (torch.arange(t) == 0).float()[:, None]

        def features(angles: Tensor, mark: Tensor) -> Tensor:
            positions = 6 * torch.cat([angles.sin(), angles.cos()], dim=-1)
            noise = torch.randn(self.heads, t, d, generator=self.random)
            parts = [previous * positions, 5 * first * mark, 3 * same * content, noise]
            return torch.cat([part.expand(self.heads, t, -1) for part in parts], dim=-1)[None]

        q, k = features(angles - frequencies, torch.ones(t, 1)), features(angles, is_first)
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=self.causal)


class Model(nn.Module):
    """Layers that all read the same tokens."""

    def __init__(self, layers: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heads(heads, causal, seed) for seed in range(layers))

    def forward(self, ids: Tensor) -> None:
        """Attend in every layer."""
        for layer in self.layers:
            layer(ids)


@cache
def record(length: int, script: str, kind: str) -> mh.Recording:
    """Return the maps of a model over a text of a length in tokens."""
    tokenizer, passage = TOKENIZERS[kind](), TEXTS[script]
    text = passage * length
    offsets = tokenizer.encode(text[: 20 * length], add_special_tokens=False).offsets
    text = text[: offsets[length - 1][1]]
    encoding = tokenizer.encode(text)
    model = Model(2, 2, kind != "BERT") if length >= 30_000 else Model(4, 12, kind != "BERT")
    with mh.observe(model) as recording:
        model(torch.tensor(encoding.ids))
    recording.label(TokenizedText.from_encoding(text, encoding))
    return recording


@cache
def _documentation() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]


# -- pictures --------------------------------------------------------------------------------------


def take(context: BrowserContext, server: Server, address: str, path: Path, keys: Sequence[str] = ()) -> None:
    """Open a place of the viewer, press keys, wait until everything is computed, and save a picture."""
    page, pending = context.new_page(), set[Request]()
    page.on("request", lambda request: pending.add(request))
    page.on("requestfinished", lambda request: pending.discard(request))
    page.on("requestfailed", lambda request: pending.discard(request))
    page.on("pageerror", lambda error: print(f"{path.name}: {error}"))
    page.on("console", lambda message: message.type == "error" and print(f"{path.name}: {message.text}"))
    page.goto(server.url + address)
    wait_until_complete(page, pending)
    for key in keys:
        page.keyboard.press(key)
        wait_until_complete(page, pending)
    page.screenshot(path=path)
    page.close()


def wait_until_complete(page: Page, pending: Collection[Request]) -> None:
    """Wait until all matrices are drawn and nothing was requested for half a second."""
    incomplete = page.locator('.pane .note:not([data-missing="0"][data-complete="true"])')
    page.wait_for_selector("nav")
    quiet = 0
    while quiet < 5:
        page.wait_for_timeout(100)
        quiet = 0 if pending or incomplete.count() else quiet + 1


def take_covering(context_of: Callable[..., BrowserContext], folder: Path, only: Mapping[str, str]) -> None:
    """Take a picture for each row of the covering choice."""
    rows = cover(
        {
            "length": [7, 500, 2_000, 30_000, 100_000],
            "page": list(PAGES),
            "text": list(TEXTS),
            "tokenizer": list(TOKENIZERS),
            "size": ["1280x800", "1920x1080", "390x844"],
            "theme": ["light", "dark"],
        }
    )
    rows = [row for row in rows if all(str(row[name]) == value for name, value in only.items())]
    for number, row in enumerate(
        sorted(rows, key=lambda row: (row["length"], row["text"], row["tokenizer"]))
    ):
        recording = record(row["length"], row["text"], row["tokenizer"])
        server = Server(Api(recording))
        name = "-".join(str(value) for value in row.values())
        keys = ["1", "Shift+ArrowLeft"] if row["page"] == "weights" else []
        address = f"{PAGES[row['page']]}&theme={row['theme']}"
        take(context_of(row["size"]), server, address, folder / f"{number:02}-{name}.png", keys)
        server.close()
        print(name, flush=True)


def take_documentation(context: BrowserContext, folder: Path) -> None:
    """Take the documentation's pictures, of the shipped model over 32,768 tokens of pydoc."""
    text = "\n".join(pydoc.plain(pydoc.render_doc(name)) for name in MODULES)
    server = Server(Api(report.read(text, long=True, truncate=True).recording))
    for name, address in DOCUMENTATION.items():
        take(context, server, f"{address}&theme=light", folder / f"{name}.png")
    server.close()


def main() -> None:
    """Parse the arguments and take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="Folder of the pictures.")
    parser.add_argument("--documentation", action="store_true", help="Take the documentation's pictures.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME=VALUE", help="Take these only.")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])

        @cache
        def context_of(size: str) -> BrowserContext:
            width, height = map(int, size.split("x"))
            return browser.new_context(viewport={"width": width, "height": height}, has_touch=width < 600)

        if arguments.documentation:
            take_documentation(context_of("1280x800"), arguments.folder)
        else:
            take_covering(context_of, arguments.folder, dict(pair.split("=") for pair in arguments.only))


if __name__ == "__main__":
    main()
