"""Text, tokens and batches: where documents come from, and what the model sees at each step.

    documents → split → tokenizer (training documents only) → token files → batches

Every stage is a pure function of its input, so that the same text gives the same run anywhere. A
document is on one side of the split only, and no text occurs in two documents.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from manyheads.lm.checkpoint import disk_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = np.ndarray[Any, np.dtype[Any]]  # [n], uint16 or uint32, usually memory-mapped

END, END_ID = "<|endoftext|>", 0  # the token before each document and after the last one
HELD_OUT = 0.1  # the share of documents held out, by the hash of their names
PASSAGE = 4000  # characters; a longer text file is cut into passages of about this size
CHUNK = 2**20  # bytes of a file that are read at once
AT_ONCE = 64  # documents that are encoded at once
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


class TextFiles:
    """The documents of text files, or of folders of them; long files are cut into passages.

    A cut is made at a blank line where one is near, else at the end of a line, a space, or anywhere.
    Everything in a folder is read, hidden files aside. Every iteration reads the files anew, so that memory
    doesn't grow with them. `size` is how many bytes they are; `on_read` is called with the number of bytes
    after each read.

    Raises FileNotFoundError for a path that doesn't exist; while it is read, ValueError for what isn't UTF-8
    text or has none, and for a file that changes between two iterations.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.paths = [Path(path) for path in paths]
        self.files = [(file, _signature(file)) for path in self.paths for file in _files_of(path)]
        self.size = sum(size for _, (size, _) in self.files)
        self.on_read: Callable[[int], object] = lambda size: None

    def __iter__(self) -> Iterator[Document]:
        for place, document in enumerate(self._passages()):
            if place in self._names:
                yield Document(self._names[place], document.text)

    @cached_property
    def _names(self) -> dict[int, str]:
        """The names of the documents by their places: of equal texts the last place and the first name."""
        names: dict[bytes, str] = {}
        places: dict[bytes, int] = {}
        for place, document in enumerate(self._passages()):
            if document.text.strip():
                key = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
                names.setdefault(key, document.name)
                places[key] = place
        if not places:
            raise ValueError(f"--data wants text, and {', '.join(map(str, self.paths))} held none.")
        return {place: names[key] for key, place in places.items()}

    def _passages(self) -> Iterator[Document]:
        for file, signature in self.files:
            for i, text in enumerate(_cut(self._chunks(file))):
                yield Document(f"{file.name}:{i}", text)
            if _signature(file) != signature:
                raise ValueError(f"{file} changed while it was read: start again once it is complete.")

    def _chunks(self, file: Path) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        lines = io.IncrementalNewlineDecoder(decoder, translate=True)
        position = 0
        with open(file, "rb") as source:
            data = None
            while data != b"":
                data = source.read(CHUNK)
                begin = position - len(decoder.getstate()[0])  # where a character that was cut begins
                try:
                    text = lines.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"--data wants UTF-8 text, and byte {begin + error.start} of {file} is none."
                    ) from None
                if "\0" in text:
                    raise ValueError(f"--data wants text, and {file} has NUL bytes in it.")
                position += len(data)
                self.on_read(len(data))
                yield text


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"--data wants text files or folders of them: there is no {path}.")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    files = [f for f in files if not any(p[0] == "." for p in f.relative_to(path).parts)]
    if not files:
        raise ValueError(f"--data wants a folder with text files in it, and {path} has none.")
    return files


def _signature(file: Path) -> tuple[int, int]:
    """Return (size, time of the last change) of a file."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def text_documents(paths: Sequence[str | os.PathLike[str]]) -> list[Document]:
    """Return the documents of `TextFiles` as a list; raises the same errors."""
    return list(TextFiles(paths))


def _cut(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the passages of a text that comes in chunks; where it is cut doesn't depend on these."""
    text = ""
    for chunk in chunks:
        text, start = text + chunk, 0
        while len(text) - start >= 2 * PASSAGE:  # as far as a cut looks ahead
            stop, skipped = _cut_after(text, start)
            yield text[start:stop]
            start = stop + skipped
        text = text[start:]
    while len(text) > PASSAGE:
        stop, skipped = _cut_after(text, 0)
        yield text[:stop]
        text = text[stop + skipped :]
    yield text


def _cut_after(text: str, start: int) -> tuple[int, int]:
    """Return where a passage that begins at `start` ends, and how many characters are left out after it."""
    size = start + PASSAGE
    for mark in ("\n\n", "\n", " "):
        stop = text.find(mark, size, size + PASSAGE)
        stop = text.rfind(mark, start + 1, size) if stop < 0 else stop
        if stop > 0:
            return stop, len(mark)
    return size, 0


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


def held_out_places(names: Sequence[str]) -> set[int]:
    """Return which documents are held out: a tenth, by the hash of the name, and at least one.

    Raises ValueError for fewer than two documents.
    """
    if len(names) < 2:
        raise ValueError(
            "the text is too short to hold a part of it out: give at least two files, or one "
            f"of more than {PASSAGE:,} characters."
        )
    hashes = [hashlib.sha256(name.encode()).digest()[:8] for name in names]
    limit = int(HELD_OUT * (1 << 64))
    out = {i for i, h in enumerate(hashes) if int.from_bytes(h, "big") < limit}
    if not out or len(out) == len(names):
        out = {min(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())}
    return out


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents into (training, held out), as `held_out_places` says; raises the same ValueError."""
    out = held_out_places([document.name for document in documents])
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
    tokenizer.encode_special_tokens = True  # END where a text spells it is text
    return tokenizer


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the dtype of a tokenizer's ids."""
    return np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Tokens:
    """All the documents as one row of ids `[n]`, with END before each and after the last."""
    dtype = token_dtype(tokenizer)
    return np.concatenate([np.array([END_ID], dtype), *(ids for _, ids in encoded(tokenizer, documents))])


def encoded(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield each document with its ids `[n]`, of which the last is END."""
    dtype, left = token_dtype(tokenizer), iter(documents)
    while batch := list(islice(left, AT_ONCE)):
        for document, made in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
            yield document, np.array([*made.ids, END_ID], dtype)


@contextmanager
def token_file(path: Path, dtype: np.dtype[Any]) -> Iterator[Callable[[Tokens], None]]:
    """Write a token file (NumPy's own format) piece by piece: yields a function that appends ids `[n]`."""
    count = 0

    def write_header() -> None:
        described = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, described)  # NumPy leaves room for a longer number

    def append(ids: Tokens) -> None:
        nonlocal count
        with disk_errors(path):
            file.write(ids.astype(dtype).tobytes())
        count += len(ids)

    with disk_errors(path):
        file = open(path, "wb")  # noqa: SIM115 (closed below, where it may fail)
    try:
        with disk_errors(path):
            write_header()
        yield append
        with disk_errors(path):
            file.seek(0)
            write_header()
    finally:
        with disk_errors(path):  # what a full disk didn't take is tried again
            file.close()


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
