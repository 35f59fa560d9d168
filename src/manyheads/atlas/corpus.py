"""The text of an atlas: files, which are cut into shards, and shards, which are read in windows.

    files → parts, at line ends → shards of about the same size → windows of at most so many tokens

Files are read as streams, so that memory doesn't grow with their size. How they are cut depends on their
content only, so that every process computes the same shards and windows.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.tokens import TokenizedText

BLOCK = 2**20  # bytes that are read at once
SHARDS = 256  # the number of shards that a corpus is cut into, unless they would be too small or too large
SMALLEST, LARGEST = 2**15, 2**22  # bytes of a shard
LINE = 2**16  # the longest part of a line that is kept together, in bytes
PER_TOKEN = 8  # characters of a token, more than in most texts

Encode = Callable[[str, int | None], tuple[list[int], TokenizedText]]


@dataclass(frozen=True)
class TextFile:
    """A text file.

    Attributes:
        path: Its path, as it was given.
        size: Its bytes.
        checksum: The BLAKE2b checksum of its content.
    """

    path: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Part:
    """A part of a file, which no window crosses: the bytes from `start` to `stop` of the file `file`."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """Text files and their shards.

    Attributes:
        files: The files.
        shards: The parts of each shard.
    """

    files: tuple[TextFile, ...]
    shards: tuple[tuple[Part, ...], ...]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    def shard_size(self, shard: int) -> int:
        """Return the bytes of a shard."""
        return sum(part.stop - part.start for part in self.shards[shard])

    def has_text_of(self, other: Corpus) -> bool:
        """Return True if the files have the same content, whatever their paths."""
        contents = [[(file.size, file.checksum) for file in corpus.files] for corpus in (self, other)]
        return contents[0] == contents[1]

    def pack(self) -> dict[str, Any]:
        """Return the corpus as JSON data."""
        return {
            "files": [[file.path, file.size, file.checksum] for file in self.files],
            "shards": [[[part.file, part.start, part.stop] for part in parts] for parts in self.shards],
        }

    @classmethod
    def unpack(cls, plain: Mapping[str, Any]) -> Corpus:
        """Return the corpus of JSON data."""
        return cls(
            tuple(TextFile(*file) for file in plain["files"]),
            tuple(tuple(Part(*part) for part in parts) for parts in plain["shards"]),
        )


def survey(
    paths: Sequence[str | os.PathLike[str]], on_read: Callable[[int], object] = lambda size: None
) -> Corpus:
    """Read text files once, check that they are text, and cut them into shards.

    Args:
        paths: Files, or folders, in which all files except hidden and blank ones are read.
        on_read: A function that is called with the number of bytes after each read.

    Returns:
        The files and their shards.

    Raises:
        FileNotFoundError: If a path doesn't exist.
        ValueError: If a file is blank or isn't UTF-8 text, or there are no files.
        OSError: If a file can't be read.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found = [(file, file == Path(path)) for path in paths for file in _files_of(Path(path))]
    if not found:
        raise ValueError("Expected text files for an atlas, got none. Name at least one.")
    target = min(max(sum(file.stat().st_size for file, _ in found) // SHARDS, SMALLEST), LARGEST)
    files: list[TextFile] = []
    shards: list[list[Part]] = [[]]
    room = target
    for file, is_named in found:
        scanned = _scan(file, target, on_read)
        if scanned is None:
            if is_named:
                raise ValueError(f"Expected text in {file}, got a blank file. Leave it out.")
            continue
        size, checksum, ends = scanned
        for start, stop in zip([0, *ends], [*ends, size], strict=True):
            if room <= 0:
                shards.append([])
                room = target
            shards[-1].append(Part(len(files), start, stop))
            room -= stop - start
        files.append(TextFile(str(file), size, checksum))
    if not files:
        raise ValueError(f"Expected text in {', '.join(map(str, paths))}, got blank files only.")
    return Corpus(tuple(files), tuple(map(tuple, shards)))


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"Expected a text file or a folder, got {path}, which is missing.")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if not any(name[0] == "." for name in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"Expected a folder with text files, got {path}, which has none.")
    return files


def _scan(file: Path, target: int, on_read: Callable[[int], object]) -> tuple[int, str, list[int]] | None:
    """Return the size of a file, its checksum, and where to cut it; None if it is blank."""
    checksum, decoder = hashlib.blake2b(digest_size=16), codecs.getincrementaldecoder("utf-8")()
    position, is_blank = 0, True
    size = file.stat().st_size
    pieces = max(1, round(size / target))
    wanted = [size * n // pieces for n in range(1, pieces)]  # where it would be cut if lines didn't matter
    ends: list[int] = []
    with readable(file), open(file, "rb") as source:
        while block := source.read(BLOCK):
            if b"\0" in block:
                raise ValueError(
                    f"Expected text in {file}, got NUL byte {position + block.index(0)}. Leave the file out."
                )
            pending = len(decoder.getstate()[0])
            is_blank &= not _decode(decoder, block, file, position - pending).strip()
            checksum.update(block)
            while wanted and wanted[0] < position + len(block):
                end = _line_end(block, max(0, wanted[0] - position), position, wanted[0])
                if end is None:
                    break  # the line goes on in the next block
                wanted.pop(0)
                if end < size and end > (ends[-1] if ends else 0):
                    ends.append(end)
            position += len(block)
            on_read(len(block))
        _decode(decoder, b"", file, position - len(decoder.getstate()[0]), final=True)
    return None if is_blank else (position, checksum.hexdigest(), [end for end in ends if end < position])


def _line_end(block: bytes, start: int, position: int, wanted: int) -> int | None:
    """Return the end of the line at `start` of a block, as a byte of the file; None if it isn't in the block.

    A line is cut between two characters if it goes on for more than `LINE` bytes after the byte `wanted`.
    """
    last = wanted + LINE - position  # in the block
    end = block.find(b"\n", start, max(last, 0))
    if end >= 0:
        return position + end + 1
    for n in range(max(last, start), len(block)):
        if block[n] & 0xC0 != 0x80:  # the first byte of a character
            return position + n
    return None


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, file: Path, start: int, final: bool = False
) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Expected UTF-8 text in {file}, got an invalid byte at {start + error.start}. Convert it to "
            "UTF-8, or leave it out."
        ) from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise an OSError of the block with a message that names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} can't be read: {error.strerror or error}. Restore it, or make it readable."
        ) from None


def read(corpus: Corpus, part: Part) -> str:
    """Return the text of a part.

    Args:
        corpus: The corpus.
        part: The part.

    Returns:
        The text, without the byte order mark of a file.

    Raises:
        ValueError: If the file has changed since it was surveyed.
        OSError: If it can't be read.
    """
    file = corpus.files[part.file]
    with readable(Path(file.path)), open(file.path, "rb") as source:
        size = os.fstat(source.fileno()).st_size
        source.seek(part.start)
        data = source.read(part.stop - part.start)
    text = None
    if size == file.size:
        with suppress(UnicodeDecodeError):
            text = data.decode()
    if text is None:
        raise ValueError(
            f"{file.path} changed while it was read. Restore it, or choose a different folder for its atlas."
        )
    return text.removeprefix("\ufeff") if part.start == 0 else text


@dataclass(frozen=True)
class Window:
    """A passage that the model reads at once.

    Attributes:
        part: The part of the file.
        byte: The byte of the file at which it begins.
        ids: Its tokens.
        tokens: Its text and tokens.
    """

    part: Part
    byte: int
    ids: list[int]
    tokens: TokenizedText


def windows(corpus: Corpus, part: Part, encode: Encode, length: int) -> Iterator[Window]:
    """Yield consecutive windows of a part, encoded as the model reads a text.

    Args:
        corpus: The corpus.
        part: The part.
        encode: The function of the model that encodes a text, `text.models.Model.encode`.
        length: The largest number of tokens in a window.

    Yields:
        The windows of at least two tokens. All but the last of a part have `length` tokens.
    """
    text = read(corpus, part)
    byte = part.start + (3 if part.start == 0 and _has_mark(corpus, part) else 0)
    at, ahead = 0, PER_TOKEN * length
    while at < len(text):
        rest = text[at : at + ahead]
        ids, tokens = encode(rest, length)
        if len(ids) < length and at + ahead < len(text):  # a text of long tokens, such as blanks
            ahead *= 2
            continue
        # A tokenizer may drop characters, such as blanks at the end, and one that reports no offsets may
        # change them.
        covered = tokens.text if at + ahead < len(text) or len(ids) >= length else rest
        covered = covered if covered and rest.startswith(covered) else rest[: max(1, len(covered))]
        if len(ids) >= 2:
            yield Window(part, byte, ids, tokens)
        if len(ids) >= length:
            ahead = length + len(covered) * 5 // 4  # the next window has about as many characters
        at += len(covered)
        byte += len(covered.encode())


def _has_mark(corpus: Corpus, part: Part) -> bool:
    """Return True if a file begins with a byte order mark."""
    with open(corpus.files[part.file].path, "rb") as source:
        return source.read(3) == codecs.BOM_UTF8
