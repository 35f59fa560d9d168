"""The data of the language model: documents, their split, the tokenizer, token files and batches.

    documents → split → tokenizer (training documents only) → token files → batches

Every stage is a pure function of its input, so that the same text gives the same run on any machine. Each
document is either for training or held out, and no two documents have the same text.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from manyheads.lm.checkpoint import opened

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = np.ndarray[Any, np.dtype[Any]]  # [n], uint16 or uint32, usually memory-mapped

END, END_ID = "<|endoftext|>", 0  # the token before each document and after the last one
IGNORE = -100  # a target that doesn't count in the loss
HELD_OUT = 0.1  # the share of documents that are held out
PASSAGE = 4000  # characters: longer files are cut into passages of about this size
CHUNK = 2**20  # the number of characters that are read at once
BATCH = 64  # the number of documents that are encoded at once
TESTS = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages"})


class Document(NamedTuple):
    """A text, and a name whose hash decides if the text is held out."""

    name: str
    text: str


def python_documents() -> list[Document]:
    """Return the text that comes with Python: `pydoc_data.topics` and the docstrings of the standard library.

    A document is a topic, or all docstrings of a module. The sources are parsed and not imported. Tests and
    repeated docstrings are left out. The split depends on the names of documents, not on their texts, so that
    it is the same in every version of Python.
    """
    from pydoc_data.topics import topics  # a dictionary of strings

    documents = [Document(f"topic:{name}", topics[name]) for name in sorted(topics)]
    used: set[str] = set()  # docstrings of the modules so far
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not TESTS & set(parts):
            new = [text for text in dict.fromkeys(_docstrings(path)) if text not in used]
            used.update(new)
            documents.append(Document("module:" + ".".join(parts), "\n\n".join(new)))
    names = _unique(documents)
    return [Document(names[i], document.text) for i, document in enumerate(documents) if i in names]


def _unique(documents: Iterable[Document]) -> dict[int, str]:
    """Return the names of the documents by their positions, without blank and repeated documents.

    A repeated text has the name of its first document and the position of its last.
    """
    names: dict[bytes, str] = {}
    positions: dict[bytes, int] = {}
    for position, document in enumerate(documents):
        if document.text.strip():
            key = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
            names.setdefault(key, document.name)
            positions[key] = position
    return {position: names[key] for key, position in positions.items()}


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or an example of invalid code
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


class TextFiles:
    """The documents of text files. Long files are cut into passages, preferably at a blank line.

    Every iteration reads the files again, so that memory doesn't grow with their size. It raises ValueError
    if a file isn't UTF-8 text or changes while it is read, or if there is no text at all.

    Args:
        paths: Files, or folders, in which all files except hidden ones are read.

    Attributes:
        size: The bytes of all files.
        on_read: A function that is called with the number of bytes after each read.

    Raises:
        FileNotFoundError: If a path doesn't exist.
        ValueError: If a folder has no files.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.paths = [Path(path) for path in paths]
        self.files = [(file, _signature(file)) for path in self.paths for file in _files_of(path)]
        self.size = sum(size for _, (size, _) in self.files)
        self.on_read: Callable[[int], object] = lambda size: None

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents."""
        for position, document in enumerate(self._passages()):
            if position in self._names:
                yield Document(self._names[position], document.text)

    @cached_property
    def _names(self) -> dict[int, str]:
        names = _unique(self._passages())
        if not names:
            raise ValueError(f"Expected text in --data, got none in {', '.join(map(str, self.paths))}.")
        return names

    def _passages(self) -> Iterator[Document]:
        for file, signature in self.files:
            for i, text in enumerate(_cut(self._chunks(file))):
                yield Document(f"{file.name}:{i}", text)
            if _signature(file) != signature:
                raise ValueError(f"{file} changed while it was read. Start again when it is complete.")

    def _chunks(self, file: Path) -> Iterator[str]:
        position = 0
        with open(file, "rb") as source, io.TextIOWrapper(source, "utf-8") as decoded:
            try:
                while text := decoded.read(CHUNK):
                    if "\0" in text:
                        raise ValueError(f"Expected text in --data, got NUL bytes in {file}.")
                    start, position = position, source.tell()
                    self.on_read(position - start)
                    yield text
            except UnicodeDecodeError as error:
                invalid = source.tell() - len(error.object) + error.start
                raise ValueError(
                    f"Expected UTF-8 text in --data, got an invalid byte {invalid} of {file}."
                ) from None


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"Expected a text file or a folder for --data, got {path}, which is missing.")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if not any(p[0] == "." for p in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"Expected a folder with text files for --data, got {path}, which has none.")
    return files


def _signature(file: Path) -> tuple[int, int]:
    """Return the size of a file and the time of its last change."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _cut(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the passages of a text that is read in chunks. The passages don't depend on the chunks."""
    text = ""
    # `_cut_after` reads up to 2 * PASSAGE characters, so shorter texts are cut only at the end.
    for chunk, shortest in chain(((chunk, 2 * PASSAGE) for chunk in chunks), [("", PASSAGE + 1)]):
        text, start = text + chunk, 0
        while len(text) - start >= shortest:
            stop, skipped = _cut_after(text, start)
            yield text[start:stop]
            start = stop + skipped
        text = text[start:]
    yield text


def _cut_after(text: str, start: int) -> tuple[int, int]:
    """Return the end of the passage that begins at `start`, and the number of characters to skip after it."""
    end = start + PASSAGE
    for separator in ("\n\n", "\n", " "):
        stop = text.find(separator, end, end + PASSAGE)
        stop = text.rfind(separator, start + 1, end) if stop < 0 else stop
        if stop > 0:
            return stop, len(separator)
    return end, 0


def digest(documents: Iterable[Document]) -> str:
    """Return the SHA-256 of the names and texts, in order."""
    checksum = hashlib.sha256()
    for text in chain.from_iterable(documents):
        data = text.encode()
        checksum.update(len(data).to_bytes(8, "little") + data)
    return checksum.hexdigest()


def held_out_positions(names: Sequence[str]) -> set[int]:
    """Return the positions of the held-out documents: about a tenth, chosen by hashes, and at least one.

    Args:
        names: The names of all documents.

    Returns:
        The positions.

    Raises:
        ValueError: If there are fewer than two documents.
    """
    if len(names) < 2:
        raise ValueError(
            "Expected at least two documents, of which one is held out, got a text that is too short. Give "
            f"two files or more, or one of more than {PASSAGE:,} characters."
        )
    hashes = [hashlib.sha256(name.encode()).digest() for name in names]
    limit = int(HELD_OUT * (1 << 64))
    positions = {i for i, digest in enumerate(hashes) if int.from_bytes(digest[:8], "big") < limit}
    return positions if 0 < len(positions) < len(names) else {hashes.index(min(hashes))}


def train_tokenizer(documents: Iterable[Document], vocab: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab` tokens, which encodes any text without loss."""
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
    tokenizer.encode_special_tokens = True  # END in a text is encoded as text
    return tokenizer


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the dtype of a tokenizer's ids."""
    return np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield each document with its ids `[n]`, of which the last is END."""
    dtype, remaining = token_dtype(tokenizer), iter(documents)
    while batch := list(islice(remaining, BATCH)):
        encodings = tokenizer.encode_batch([document.text for document in batch])
        for document, encoding in zip(batch, encodings, strict=True):
            yield document, np.array([*encoding.ids, END_ID], dtype)


@contextmanager
def token_file(path: Path, dtype: np.dtype[Any]) -> Iterator[Callable[[Tokens], None]]:
    """Write a token file in NumPy's format: yield a function that appends ids `[n]`."""
    count = 0

    def header() -> bytes:
        content = io.BytesIO()
        fields = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(content, fields)  # its size is the same for every count
        return content.getvalue()

    def append(ids: Tokens) -> None:
        nonlocal count
        write(ids.astype(dtype).tobytes())
        count += len(ids)

    with opened(path, "wb") as write:
        write(header())
        yield append
    with opened(path, "r+b") as write:
        write(header())


def read_tokens(path: Path) -> Tokens:
    """Map a token file into memory; raise ValueError if it isn't a token file."""
    try:
        ids: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"Expected a token file, got {path}, which can't be read as one.") from error
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"Expected one row of uint16 or uint32 ids in {path}, got {ids.dtype} {ids.shape}.")
    return ids


def repeats(length: int, tokens: Tokens, vocab: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Return runs of random tokens that are repeated, from which heads learn to copy.

    The sequence is cut into segments of 64 or 128 tokens, or is a single segment. Each segment repeats a run
    of tokens, whose length is log-uniform between 3 and a quarter of the segment (256 tokens in a single
    segment). From short runs heads learn to copy, from long ones to attend to distant tokens. Two fifths of
    the runs are drawn uniformly from the vocabulary, the others from the text.

    Args:
        length: The number of tokens.
        tokens: The text to draw from, ids `[n]`.
        vocab: The size of the vocabulary.
        rng: The random generator.

    Returns:
        The ids `[length]`, and booleans `[length]` that are True for predictable ids: those that repeat a
        run, except the first token of the first repetition.
    """
    segment = int(rng.choice([64, 128, length], p=[0.5, 0.25, 0.25]))
    ids, predictable = np.empty(length, np.int64), np.empty(length, bool)
    for start in range(0, length, segment):
        size = min(segment, length - start)
        longest = segment // 4 if segment < length else 256
        run = round(float(np.exp(rng.uniform(np.log(3), np.log(longest)))))
        if rng.uniform() < 0.4:
            drawn = rng.integers(END_ID + 1, vocab, run)  # without END
        else:
            drawn = tokens[rng.integers(0, len(tokens), run)].astype(np.int64)
        ids[start : start + size] = np.tile(drawn, size // run + 1)[:size]
        predictable[start : start + size] = np.arange(size) > run
    return ids, predictable


def batch(
    tokens: Tokens, *, rows: int, context: int, repeated: int, vocab: int, seed: int, step: int
) -> tuple[Tokens, Tokens]:
    """Return the inputs and targets of a step, a pure function of the seed and the step.

    Args:
        tokens: The text, ids `[n]`.
        rows: The number of sequences, which are windows of the text at random positions.
        context: The length of a sequence.
        repeated: The number of sequences, the last ones, that `repeats` makes instead.
        vocab: The size of the vocabulary.
        seed: The random seed.
        step: The step.

    Returns:
        Inputs and targets `[rows, context]`.
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
            ids, predictable = repeats(context + 1, tokens, vocab, rng)
            targets[row] = np.where(predictable[1:], ids[1:], IGNORE)
        inputs[row] = ids[:-1]
    return inputs, targets
