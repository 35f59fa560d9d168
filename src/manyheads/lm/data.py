"""Text, tokens and batches: where documents come from, and what the model sees at each step.

    documents → split → tokenizer (training documents only) → token files → batches

Every stage is a pure function of its input, so that the same text gives the same run anywhere. A
document is on one side of the split only, and no text occurs in two documents.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = np.ndarray[Any, np.dtype[Any]]  # [n], uint16 or uint32, usually memory-mapped

END, END_ID = "<|endoftext|>", 0  # the token before each document and after the last one
HELD_OUT = 0.1  # the share of documents held out, by the hash of their names
PASSAGE = 4000  # characters; a longer text file is cut into passages of about this size
TESTS = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages"})


class Document(NamedTuple):
    """One text and the name that decides on which side of the split it falls."""

    name: str
    text: str


def python_documents() -> list[Document]:
    """The text that every Python brings: `pydoc_data.topics` and the library's own docstrings.

    A document is one topic, or all the docstrings of one module. The sources are parsed, never
    imported; tests are left out, and so is a docstring that came before. Names, not texts, decide
    the split, so that it is the same for every version of Python.
    """
    from pydoc_data.topics import topics  # plain data: a dictionary of strings

    documents = [Document(f"topic:{name}", topics[name]) for name in sorted(topics)]
    seen: set[str] = set()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not TESTS & set(parts):
            fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(fresh)
            documents.append(Document("module:" + ".".join(parts), "\n\n".join(fresh)))
    return _unique(documents)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template or a broken example, not a module
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def text_documents(paths: Sequence[str | os.PathLike[str]]) -> list[Document]:
    """Text files, or folders of them, as documents; long files are cut into passages.

    A cut is made at a blank line where one is near, else at the end of a line, a space, or anywhere.

    Everything in a folder is read, hidden files aside. Raises FileNotFoundError for what isn't
    there and ValueError for what isn't UTF-8 text or has none.
    """
    documents: list[Document] = []
    for given in map(Path, paths):
        if given.is_dir():
            files = sorted(path for path in given.rglob("*") if path.is_file())
            files = [f for f in files if not any(p[0] == "." for p in f.relative_to(given).parts)]
        elif given.is_file():
            files = [given]
        else:
            raise FileNotFoundError(f"--data wants text files or folders of them: there is no {given}.")
        if not files:
            raise ValueError(f"--data wants a folder with text files in it, and {given} has none.")
        for file in files:
            try:
                text = file.read_text("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"--data wants UTF-8 text, and byte {error.start} of {file} is none."
                ) from None
            if "\0" in text:
                raise ValueError(f"--data wants text, and {file} has NUL bytes in it.")
            documents += [Document(f"{file.name}:{i}", p) for i, p in enumerate(_passages(text))]
    documents = _unique(documents)
    if not documents:
        raise ValueError(f"--data wants text, and {', '.join(map(str, paths))} held none.")
    return documents


def _passages(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PASSAGE:
        size = start + PASSAGE
        for mark in ("\n\n", "\n", " ", ""):
            stop = text.find(mark, size, size + PASSAGE)
            stop = text.rfind(mark, start + 1, size) if stop < 0 else stop
            if stop > 0:
                break
        yield text[start:stop]
        start = stop + len(mark)
    yield text[start:]


def _unique(documents: Iterable[Document]) -> list[Document]:
    """The documents, without those whose text came before, and without blank ones."""
    first = {document.text: document for document in reversed(list(documents))}
    return [document for text, document in reversed(first.items()) if text.strip()]


def digest(documents: Iterable[Document]) -> str:
    """SHA-256 of the names and texts, in order."""
    total = hashlib.sha256()
    for document in documents:
        for part in document:
            data = part.encode()
            total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out): a tenth is held out, by the hash of the name, and at least one.

    Raises ValueError for fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(
            "the text is too short to hold a part of it out: give at least two files, or one "
            f"of more than {PASSAGE:,} characters."
        )
    hashes = [hashlib.sha256(document.name.encode()).digest() for document in documents]
    limit = int(HELD_OUT * (1 << 64))
    out = {i for i, h in enumerate(hashes) if int.from_bytes(h[:8], "big") < limit}
    if not out or len(out) == len(documents):
        out = {min(range(len(documents)), key=lambda i: hashes[i])}
    training = [document for i, document in enumerate(documents) if i not in out]
    return training, [document for i, document in enumerate(documents) if i in out]


def byte_count(documents: Iterable[Document]) -> int:
    """How many bytes of UTF-8 the texts are."""
    return sum(len(document.text.encode()) for document in documents)


def train_tokenizer(documents: Iterable[Document], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` tokens: any text goes in, and comes out unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Tokens:
    """All the documents as one row of ids `[n]`, with END before each and after the last."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    pieces = [np.array([END_ID], dtype)]
    for encoded in tokenizer.encode_batch([document.text for document in documents]):
        pieces.append(np.array([*encoded.ids, END_ID], dtype))
    return np.concatenate(pieces)


def write_tokens(path: Path, ids: Tokens) -> None:
    """Write a token file (NumPy's own format) under a temporary name, then rename it."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        np.save(file, ids, allow_pickle=False)
    os.replace(part, path)


def read_tokens(path: Path) -> Tokens:
    """Map a token file into memory; ValueError if it isn't one."""
    try:
        ids: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} should be a token file, and it can't be read as one.") from error
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"{path} should hold one row of uint16 or uint32 ids, not {ids.dtype}.")
    return ids


def repeats(length: int, tokens: Tokens, vocab: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Runs of random tokens, each said again and again: ids `[length]`, and which can be foretold.

    A row is cut into segments of 64 or 128 tokens, or left whole; each repeats a run of its own, of
    3 tokens to a quarter of the segment (256 in a whole row), short ones as often as long ones: short
    runs are where heads learn to copy, long ones where they learn to look far. Two fifths of the
    runs draw from the whole vocabulary alike, the others as the text does. Foretold are the tokens
    that were said before, but for the first of them: only looking back can tell them.
    """
    segment = int(rng.choice([64, 128, length], p=[0.5, 0.25, 0.25]))
    ids, told = np.empty(length, np.int64), np.empty(length, bool)
    for start in range(0, length, segment):
        size = min(segment, length - start)
        longest = segment // 4 if segment < length else 256
        run = round(float(np.exp(rng.uniform(np.log(3), np.log(longest)))))
        if rng.uniform() < 0.4:
            said = rng.integers(END_ID + 1, vocab, run)  # END is not said
        else:
            said = tokens[rng.integers(0, len(tokens), run)].astype(np.int64)
        ids[start : start + size] = np.tile(said, size // run + 1)[:size]
        told[start : start + size] = np.arange(size) > run
    return ids, told


IGNORE = -100  # a target that no loss is taken on


def batch(
    tokens: Tokens, *, rows: int, context: int, repeated: int, vocab: int, seed: int, step: int
) -> tuple[Tokens, Tokens]:
    """Inputs and targets `[rows, context]` of one step: a pure function of seed and step.

    The last `repeated` rows are made of `repeats`, the others are windows of the text that begin
    anywhere. So a resumed run sees what an uninterrupted one would have seen.
    """
    rng = np.random.default_rng([seed, step])
    inputs = np.empty((rows, context), np.int64)
    targets = np.empty((rows, context), np.int64)
    for row in range(rows):
        if row < rows - repeated:
            start = int(rng.integers(0, len(tokens) - context))
            ids = tokens[start : start + context + 1].astype(np.int64)
            targets[row] = ids[1:]
        else:
            ids, told = repeats(context + 1, tokens, vocab, rng)
            targets[row] = np.where(told[1:], ids[1:], IGNORE)
        inputs[row] = ids[:-1]
    return inputs, targets
