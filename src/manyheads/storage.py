"""Maps and recordings in one `safetensors` file, with everything but tensors as JSON in its header.

A file is a list of entries: the name of a layer, the number of a call, and its map or its statistics.
docs/format.md describes the format. The content of a file is checked like the arguments of a function.
Tensors are memory-mapped: q, k and lse are read from the disk when they are used, but masks and biases
immediately, to check them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief  # the content of a hostile file may be long
from secrets import token_hex
from tempfile import TemporaryFile
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from manyheads import biases, masks, shards
from manyheads.biases import Bias
from manyheads.masks import FAR, Mask, min_max
from manyheads.problem import Problem
from manyheads.shapes import kind, sizes, whole
from manyheads.tokens import TokenizedText
from manyheads.trees import Value

FORMAT, VERSIONS = "manyheads", (1, 2, 3, 4)

# Limits of a file: enough for a million tokens and a thousand layers, but too small to exhaust the memory.
HEADER = 2**25  # bytes of the header
DEPTH = 100  # nested masks or lists
AXES = 8  # axes of a tensor
SHARDED = ("q", "k", "lse")  # the tensors that are in shards, if a map has any, with the tokens first
LONGEST = 2**20  # size of an axis of an empty tensor; other tensors are limited by the file's size

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

Labels = tuple[str, ...] | TokenizedText  # of the keys of one sequence
Tokens = Labels | tuple[Labels, ...]  # of the s keys: one list, or one per sequence
Schema = dict[str, tuple[type, ...]]  # the fields of a JSON object, and the types of each
Selected = tuple[Tensor, Tensor] | None  # indices of batch entries and heads; None for all

NONE = type(None)

# The names of masks, biases and their fields in files. Don't change them when a class is renamed.
IDS: Schema = {"ids": (Tensor,), "queries": (Tensor, NONE)}
PLACES: Schema = {"positions": (Tensor,), "tokens": (int,), "group": (int,)}
PARTS: dict[str, tuple[type[Value], Schema]] = {
    "Full": (masks.Full, {}),
    "Causal": (masks.Causal, {}),
    "Window": (masks.Window, {"left": (int, NONE), "right": (int, NONE)}),
    "Diagonal": (masks.Diagonal, {"k": (int,)}),
    "Prefix": (masks.Prefix, {"n": (int, Tensor)}),
    "Lengths": (masks.Lengths, {"n": (int, Tensor), "left": (bool,)}),
    "Keys": (masks.Keys, {"keys": (list,)}),
    "Documents": (masks.Documents, IDS),
    "SameToken": (masks.SameToken, IDS),
    "AfterSameToken": (masks.AfterSameToken, IDS),
    "Keep": (masks.Keep, {"tensor": (Tensor,)}),
    "Drop": (masks.Drop, {"tensor": (Tensor,)}),
    "And": (masks.And, {"left": (Mask,), "right": (Mask,)}),
    "Or": (masks.Or, {"left": (Mask,), "right": (Mask,)}),
    "Not": (masks.Not, {"mask": (Mask,)}),
    "AtPositions": (masks.AtPositions, {"mask": (Mask,), **PLACES}),
    "ALiBi": (biases.ALiBi, {"slopes": (Tensor,)}),
    "Relative": (biases.Relative, {"table": (Tensor,)}),
    "Dense": (biases.Dense, {"values": (Tensor,)}),
    "BiasAtPositions": (biases.BiasAtPositions, {"bias": (Bias,), **PLACES}),
}
WORDS = {cls: word for word, (cls, _) in PARTS.items()}

# The axes of tensor fields, in the letters of shapes.py. A tensor with fewer axes has the last of them.
LETTERS = {
    "n": "b",
    "ids": "bs",
    "queries": "bt",
    "tensor": "bhts",
    "slopes": "h",
    "table": "hn",
    "values": "bhts",
}

TEXT: Schema = {"pieces": (list,), "special": (list,)}
RUN: Schema = {"entries": (list,), "labels": (list,), "tokens": (int, NONE), "provenance": (dict,)}
CALL: Schema = {"name": (str,), "call": (int,)}
MAP: Schema = CALL | {"map": (dict,), "tokens": (int, NONE), "provenance": (dict,)}
STATISTICS: Schema = CALL | {"statistics": (dict,), "tokens": (int, NONE), "plain": (dict,)}
PROBLEM: Schema = {
    "q": (Tensor,),
    "k": (Tensor,),
    "mask": (Mask, NONE),
    "bias": (Bias, NONE),
    "scale": (float, int),
    "softcap": (float, int, NONE),
    "sink": (Tensor, NONE),
    "offset": (int, Tensor),
}


class StoredMap(NamedTuple):
    """The content of a map: `AttentionMap.of(*stored)`."""

    problem: Problem
    lse: Tensor  # [b, h, t]
    tokens: Tokens | None
    provenance: Mapping[str, Any]
    value_norm: Tensor | None = None  # [b, g, s] float32


@dataclass(frozen=True, eq=False)
class StoredStatistics:
    """Statistics of one call: tensors by name, and JSON data."""

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]
    tokens: Tokens | None = None


class Entry(NamedTuple):
    """One call of one layer. `name` is a label of printable characters, never a path."""

    name: str
    call: int
    content: StoredMap | StoredStatistics


class FileContent(NamedTuple):
    """The content of a file."""

    entries: tuple[Entry, ...]
    tokens: Tokens | None
    provenance: Mapping[str, Any]


# -- writing ---------------------------------------------------------------------------------------


def write(
    path: str | os.PathLike[str],
    entries: Sequence[Entry],
    *,
    tokens: Tokens | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write entries into one file, which replaces the file at `path` when it is complete.

    Tensors are written one after the other, from any device. Tensors that share memory are written once.

    Args:
        path: The file.
        entries: The entries.
        tokens: Labels of the keys of all entries.
        provenance: JSON data, in which tuples become lists.

    Raises:
        TypeError: If tokens or provenance have other types.
        ValueError: If an entry can't be saved, for example because its mask has a `Rule`.
        OSError: If the file can't be written.
    """
    path = check_path(path)
    header, tensors = _encode(entries, tokens, provenance)
    with replacing(path) as file:
        _write_file(file, header, tensors)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return a path to save maps at; raise OSError if it is a folder, or in none."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"Expected a file to save maps in, got the folder {path}. Name a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Expected a folder {path.parent} to save {path.name} in, but it doesn't exist. Create it first."
        )
    return path


def encode_index(stored: StoredMap, described: str) -> tuple[bytes, dict[str, Tensor]]:
    """Return an index of shards: a file of one map whose q, k and lse are in shards.

    Args:
        stored: The map; of the numbers of q, k and lse none are used.
        described: The JSON of `shards.describe_shards`.

    Returns:
        The header of the index, and its tensors `[…]` by name, for `write_encoded`.

    Raises:
        ValueError: If the map can't be saved, for example because its mask has a `Rule`.
    """
    return _encode([Entry("", 0, stored)], None, None, described)


def write_encoded(path: Path, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write a header and tensors `[…]` into a file, which replaces the file at `path` when it is complete."""
    with replacing(path) as file:
        _write_file(file, header, tensors)


def _write_file(file: BinaryIO, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for tensor in tensors.values():
        file.write(_to_bytes(tensor))


def _encode(
    entries: Sequence[Entry],
    tokens: Tokens | None,
    provenance: Mapping[str, Any] | None,
    described: str | None = None,
) -> tuple[bytes, dict[str, Tensor]]:
    """Return the header of a file and its tensors in order; `described` are the shards of a single map."""
    _check_calls(entries)
    writer = _Writer(described is not None)
    written = [writer.entry(str(number), entry) for number, entry in enumerate(entries)]
    label = writer.label(tokens)
    run = {
        "entries": written,
        "labels": [_plain_labels(labels) for labels in writer.labels],
        "tokens": label,
        "provenance": _json_object(provenance or {}, "provenance"),
    }
    # Tensors with larger elements come first, and the data starts at a multiple of 64 bytes, so that every
    # tensor is aligned.
    tensors = dict(sorted(writer.tensors.items(), key=lambda item: -item[1].element_size()))
    metadata = {"version": str(writer.version), "run": json.dumps(run, separators=(",", ":"))}
    if described is not None:
        metadata["shards"] = described
    return _header(metadata, tensors), tensors


class _Writer:
    """Converts entries to JSON data, and collects their tensors by name and their token labels by index."""

    def __init__(self, is_index: bool = False) -> None:
        self.is_index = is_index
        self.tensors: dict[str, Tensor] = {}
        self.labels: dict[Tokens, int] = {}
        self.has_value_norms = False
        self._names: dict[Any, str] = {}  # names of tensors by address, shape, strides, dtype and device

    @property
    def version(self) -> int:
        """The oldest version of the format that has everything that was written."""
        if self.is_index:
            return 4
        if self.has_value_norms:
            return 3
        return 2 if any(map(_has_text, self.labels)) else 1

    def entry(self, prefix: str, entry: Entry) -> dict[str, Any]:
        """Return an entry as JSON data. The names of its tensors begin with the prefix."""
        written: dict[str, Any] = {"name": entry.name, "call": entry.call}
        content = entry.content
        try:
            if isinstance(content, StoredStatistics):
                _check_names(content.tensors)
                return written | {
                    "statistics": {
                        name: self.tensor(tensor, f"{prefix}.{name}")
                        for name, tensor in content.tensors.items()
                    },
                    "tokens": self.label(content.tokens),
                    "plain": _json_object(content.plain, "plain"),
                }
            problem, lse, tokens, provenance, value_norm = content
            _check_map(problem, lse, value_norm)
            sharded = SHARDED if self.is_index else ()
            fields = {
                name: self.value(getattr(problem, name), f"{prefix}.{name}")
                for name in PROBLEM
                if name not in sharded
            }
            if not self.is_index:
                fields["lse"] = self.tensor(lse, f"{prefix}.lse")
            fields |= {name: {"tensor": name} for name in sharded}
            if value_norm is not None:
                fields["value_norm"] = self.tensor(value_norm, f"{prefix}.value_norm")
                self.has_value_norms = True
            return written | {
                "map": fields,
                "tokens": self.label(tokens, problem.shape.b, problem.shape.s),
                "provenance": _json_object(provenance, "provenance"),
            }
        except (TypeError, ValueError) as error:
            raise ValueError(f"Call {entry.call} of {entry.name!r} can't be saved: {error}") from None

    def value(self, value: Any, name: str, depth: int = 0, selected: Selected = None) -> Any:
        """Return a field of a problem, mask or bias as JSON data."""
        if isinstance(value, Tensor):
            return self.tensor(value, name)
        if isinstance(value, Value):
            return self.part(value, name, depth, selected)
        if isinstance(value, tuple):
            return [_bounded(number) for number in value]
        return _bounded(value)

    def part(self, part: Value, name: str, depth: int, selected: Selected) -> dict[str, Any]:
        """Return a mask or bias of the selected batch entries and heads as JSON data."""
        if isinstance(part, masks.Only | biases.OnlyBias):
            # Its tensors have all batch entries and heads; only the selected ones are saved.
            inner = part.mask if isinstance(part, masks.Only) else part.bias
            batch, heads = part.batch, part.heads
            if selected is not None:
                batch, heads = batch[selected[0]], heads[selected[1]]
            return self.part(inner, name, depth, (batch, heads))
        if isinstance(part, masks.Rule):
            raise ValueError(
                f"its mask has {part}, whose function can't be saved. Save the mask as a tensor: "
                "amap.under(Keep(tensor))."
            )
        if isinstance(part, masks.AtPositions | biases.BiasAtPositions) and selected is not None:
            part, selected = part.only(*selected), None  # positions are selected by key head
        if type(part) not in WORDS:
            raise ValueError(f"Expected one of {', '.join(PARTS)} in a file, got {kind(part)}.")
        if depth > DEPTH:
            raise ValueError(
                f"its mask is nested more than {DEPTH} deep. Save the mask as a tensor, Keep(tensor)."
            )
        word = WORDS[type(part)]
        written: dict[str, Any] = {"is": word}
        for field in PARTS[word][1]:
            value = getattr(part, field)
            if isinstance(value, Tensor) and selected is not None:
                value = _select(value, LETTERS[field], selected)
            written[field] = self.value(value, f"{name}.{field}", depth + 1, selected)
        return written

    def tensor(self, tensor: Tensor, name: str) -> dict[str, str]:
        """Return a reference to a tensor, which is stored under this name unless it was stored before."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected {name} to be a tensor, got {kind(tensor)}.")
        _check_tensor(name, CODES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)
        if tensor.is_meta:
            raise ValueError(f"Expected {name} to have data, got a tensor on the meta device.")
        tensor = tensor.detach().resolve_neg()
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if memory not in self._names:
            self._names[memory] = name
            self.tensors[name] = tensor
        return {"tensor": self._names[memory]}

    def label(self, tokens: Any, b: int | None = None, s: int | None = None) -> int | None:
        """Return the index of token labels in the file's list of them; None without tokens."""
        return None if tokens is None else self.labels.setdefault(labels_of(tokens, b, s), len(self.labels))


def _select(tensor: Tensor, letters: str, selected: tuple[Tensor, Tensor]) -> Tensor:
    """Return a tensor's entries for the selected batch entries and heads, or the tensor if these are all."""
    for axis, letter in enumerate(letters[len(letters) - tensor.dim() :]):
        size = tensor.shape[axis]
        if letter not in "bh" or size == 1:
            continue
        indices = selected["bh".index(letter)]
        if not torch.equal(indices, torch.arange(size, device=indices.device)):
            tensor = tensor.index_select(axis, indices)
    return tensor


def _has_text(tokens: Tokens) -> bool:
    """Return True if tokens have a text."""
    return isinstance(tokens, TokenizedText) or any(isinstance(each, TokenizedText) for each in tokens)


def _plain_labels(tokens: Tokens) -> Any:
    """Return tokens as JSON data."""
    if isinstance(tokens, TokenizedText):
        return {"pieces": tokens.pieces, "special": tokens.special}
    return [each if isinstance(each, str) else _plain_labels(each) for each in tokens]


def _header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file, padded so that the tensors are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, **metadata}}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > HEADER - 64:
        raise ValueError(
            f"Expected at most {HEADER / 1e6:.1f} MB of names, tokens and provenance in a file, got "
            f"{len(text) / 1e6:.1f} MB. Save fewer calls in one file, or no tokens."
        )
    return text + b" " * (-(8 + len(text)) % 64)


def _to_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in contiguous order. They are copied only if necessary."""
    # `view` needs a last axis of stride 1, which a scalar, or a tensor whose last axis has size 1, may lack.
    return tensor.cpu().contiguous()[..., None].view(torch.uint8).numpy().data


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success and is removed after an error."""
    temporary = path.with_name(f".{token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def folder_for(path: Path, name: str) -> Path:
    """Create a folder if needed and check that files can be created in it. Errors call it `name`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            return path
    except FileExistsError:
        raise FileExistsError(f"Expected {name} to be a folder, got the file {path}.") from None
    except OSError as error:
        raise OSError(f"{name} {path} can't be written: {error.strerror}. Choose a different one.") from None


def file_for(path: Path, name: str) -> Path:
    """Check that a file can be created at `path`. Errors call it `name`."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise OSError(f"{name} {path} can't be written: {error.strerror}. Choose a different one.") from None


# -- reading ---------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> FileContent:
    """Read a file that `write` has written. Its tensors are memory-mapped.

    While its tensors are in use, the file may be replaced (as `write` does), but not truncated. Changing a
    tensor in place doesn't change the file. `read` doesn't check that lse is the log-sum-exp of q and k.

    Args:
        path: The file.

    Returns:
        The content.

    Raises:
        ValueError: If it isn't a valid manyheads file.
        OSError: If it can't be read.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file {path}, got {'a folder' if path.is_dir() else 'none'}.")
    with open(path, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    try:
        if length > HEADER:
            raise SafetensorError(f"its header has {length:,} bytes")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            run = _metadata(path, metadata)
            described = metadata.get("shards")
            sharded = {} if described is None else shards.open_shards(path.parent, described)
            try:
                return _Reader(file, sharded).run(run)
            except (TypeError, ValueError) as error:
                reason = shorten(str(error), 1000, placeholder=" ….")
                raise ValueError(f"{path} isn't a valid manyheads file: {reason} Save it again.") from None
    except SafetensorError as error:
        raise ValueError(
            f"{path} isn't a safetensors file, or is truncated: {error}. Save it again."
        ) from None


def _metadata(path: Path, metadata: Mapping[str, str]) -> str:
    """Return the JSON of the run from the metadata of a file of this format and version."""
    version = metadata.get("version", "")
    if metadata.get("format") == shards.FORMAT:
        raise ValueError(f"Expected the index of a map, got one of its shards, {path}. Open the index.")
    if metadata.get("format") != FORMAT or "run" not in metadata or not re.fullmatch("[1-9][0-9]*", version):
        raise ValueError(
            f"{path} is a safetensors file, but not a manyheads file. Expected format '{FORMAT}', got "
            f"{brief(dict(metadata)) if metadata else 'none'}."
        )
    if version not in map(str, VERSIONS):
        raise ValueError(
            f"{path} has format version {version[:9]}, but this manyheads reads versions up to "
            f"{VERSIONS[-1]}. Upgrade manyheads."
        )
    return metadata["run"]


class _Reader:
    """Converts JSON data to entries, and checks that every tensor of the file and its shards is used."""

    def __init__(self, file: Any, sharded: Mapping[str, Tensor]) -> None:
        self.file, self.sharded = file, sharded
        self.names = {*file.keys(), *sharded}
        self.tensors: dict[str, Tensor] = {}
        self.labels: list[Tokens] = []

    def run(self, text: str) -> FileContent:
        try:
            tree = json.loads(text)
        except RecursionError:
            raise ValueError("its JSON is nested too deeply.") from None
        except ValueError as error:
            raise ValueError(f"its JSON can't be read: {error}.") from None
        run = _fields(tree, RUN, "a run")
        self.labels = [labels_of(_read_labels(labels)) for labels in run["labels"]]
        entries = []
        for number, entry in enumerate(run["entries"]):
            try:
                entries.append(self.entry(entry))
            except (TypeError, ValueError) as error:
                raise ValueError(f"in entry {number}, {error}") from None
        _check_calls(entries)
        if unused := sorted(self.names - self.tensors.keys()):
            raise ValueError(f"its tensor {brief(unused[0])} belongs to no entry.")
        provenance = _json_object(run["provenance"], "provenance")
        return FileContent(tuple(entries), self.label(run["tokens"]), provenance)

    def entry(self, tree: Any) -> Entry:
        if isinstance(tree, dict) and "statistics" in tree:
            entry = _fields(tree, STATISTICS, "statistics")
            schema: Schema = dict.fromkeys(entry["statistics"], (Tensor,))
            tensors = _fields(entry["statistics"], schema, "statistics", self.value)
            _check_names(tensors)
            plain, tokens = _json_object(entry["plain"], "plain"), self.label(entry["tokens"])
            return Entry(entry["name"], entry["call"], StoredStatistics(tensors, plain, tokens))
        entry = _fields(tree, MAP, "a map")
        expected: Schema = PROBLEM | {"lse": (Tensor,)}
        if "value_norm" in entry["map"]:
            expected |= {"value_norm": (Tensor,)}
        fields = _fields(entry["map"], expected, "a map", self.value)
        lse, value_norm, k = fields.pop("lse"), fields.pop("value_norm", None), fields["k"]
        problem = Problem.of(v=k.new_empty(*k.shape[:3], 0), **fields)
        _check_map(problem, lse, value_norm)
        tokens = self.label(entry["tokens"], problem.shape.b, problem.shape.s)
        provenance = _json_object(entry["provenance"], "provenance")
        stored = StoredMap(problem, lse, tokens, provenance, value_norm)
        return Entry(entry["name"], entry["call"], stored)

    def value(self, tree: Any, depth: int = 0) -> Any:
        if isinstance(tree, dict):
            return self.part(tree, depth) if "is" in tree else self.tensor(tree)
        if isinstance(tree, list):
            return [_bounded(number) for number in tree]
        return _bounded(tree)

    def part(self, tree: dict[str, Any], depth: int) -> Value:
        fields = dict(tree)
        word = fields.pop("is")
        if not isinstance(word, str) or word not in PARTS:
            raise ValueError(f"Expected a mask or bias to be one of {', '.join(PARTS)}, got {brief(word)}.")
        if depth > DEPTH:
            raise ValueError(f"its mask is nested more than {DEPTH} deep.")
        cls, schema = PARTS[word]
        found = _fields(fields, schema, word, lambda field: self.value(field, depth + 1))
        if "positions" in found:
            _check_positions(**{name: found[name] for name in PLACES})
        return cls(**found)

    def tensor(self, tree: Any) -> Tensor:
        name = _fields(tree, {"tensor": (str,)}, "a reference to a tensor")["tensor"]
        if name not in self.names:
            raise ValueError(f"it refers to a tensor {brief(name)}, which isn't in the file.")
        if name not in self.tensors:
            self.tensors[name] = self._load(name)
        return self.tensors[name]

    def _load(self, name: str) -> Tensor:
        if name in self.sharded:
            return self.sharded[name].movedim(0, 2)  # [s, b, …] to [b, …, s, …]
        header = self.file.get_slice(name)
        _check_tensor(name, header.get_dtype(), header.get_shape())
        tensor: Tensor = self.file.get_tensor(name)
        if tensor.data_ptr() % tensor.element_size():
            raise ValueError(f"Expected tensor {brief(name)} to start at a multiple of its element size.")
        # PyTorch's operators disagree on whether other bytes, such as 2, are True.
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise ValueError(f"Expected only the bytes 0 and 1 in the boolean tensor {brief(name)}.")
        return tensor

    def label(self, number: int | None, b: int | None = None, s: int | None = None) -> Tokens | None:
        if number is None:
            return None
        if not 0 <= number < len(self.labels):
            raise ValueError(
                f"it refers to list of tokens {number}, but the file has {len(self.labels)} lists."
            )
        return labels_of(self.labels[number], b, s)


def _read_labels(tree: Any) -> Any:
    """Return JSON data with objects replaced by the texts that they describe."""
    if isinstance(tree, dict):
        return TokenizedText(**{name: tuple(x) for name, x in _fields(tree, TEXT, "a text").items()})
    return (
        [_read_labels(each) if isinstance(each, dict) else each for each in tree]
        if isinstance(tree, list)
        else tree
    )


def _fields(
    tree: Any, schema: Schema, name: str, read: Callable[[Any], Any] = lambda field: field
) -> dict[str, Any]:
    """Return the fields of a JSON object, read and checked. Errors call the object `name`."""
    if not isinstance(tree, dict) or tree.keys() != schema.keys():
        got = brief(list(tree) if isinstance(tree, dict) else tree)
        raise ValueError(f"Expected {name} to have {', '.join(schema) or 'no fields'}, got {got}.")
    fields = {field: read(tree[field]) for field in schema}
    for field, types in schema.items():
        # In Python, True is an int; in a file, it isn't allowed as one.
        if not isinstance(fields[field], types) or (isinstance(fields[field], bool) and bool not in types):
            expected = " or ".join("null" if each is NONE else each.__name__ for each in types)
            raise ValueError(
                f"Expected the {brief(field)} of {name} to be {expected}, got {brief(tree[field])}."
            )
    return fields


# -- checks, when writing and when reading ---------------------------------------------------------


def _check_calls(entries: Sequence[Entry]) -> None:
    known = set()
    for entry in entries:
        _check_names([entry.name])
        whole(entry.call, "the number of a call")
        if entry[:2] in known:
            raise ValueError(
                f"Expected every call once in a file, got call {entry.call} of {entry.name!r} twice."
            )
        known.add(entry[:2])


def _check_names(names: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"Expected a name to be a string of printable characters, got {brief(name)}.")


def _check_tensor(name: str, code: str, shape: Sequence[int]) -> None:
    if code not in DTYPES:
        raise ValueError(f"Expected tensor {brief(name)} to be one of {', '.join(DTYPES)}, got {code}.")
    if len(shape) > AXES:
        raise ValueError(f"Expected tensor {brief(name)} to have at most {AXES} axes, got {len(shape)}.")
    if 0 in shape and max(shape) > LONGEST:
        raise ValueError(
            f"Expected axes of at most {LONGEST} for tensor {brief(name)}, which is empty, got {list(shape)}."
        )


def _check_map(problem: Problem, lse: Tensor, value_norm: Tensor | None) -> None:
    for position in min_max(problem.offset):
        _bounded(position)
    expected = problem.shape[:2] + problem.shape[3:4]
    if tuple(lse.shape) != expected or lse.dtype != problem.dtype:
        raise ValueError(
            f"Expected lse to be {problem.dtype}, [b, h, t] = {list(expected)}, got {lse.dtype}, "
            f"{sizes(lse)}."
        )
    keys = problem.k.shape[:3]
    if value_norm is not None and (value_norm.shape != keys or value_norm.dtype != torch.float32):
        raise ValueError(
            f"Expected value_norm to be torch.float32, [b, g, s] = {list(keys)}, got {value_norm.dtype}, "
            f"{sizes(value_norm)}."
        )


def _check_positions(positions: Tensor, tokens: int, group: int) -> None:
    """Raise ValueError unless these are positions `[b or 1, g or 1, s]` of the keys that a cache has kept."""
    is_ascending = positions.dtype == torch.int64 and positions.dim() == 3 and group > 0
    if is_ascending and positions.numel():
        low, high = min_max(positions)
        is_ascending = low >= 0 and high < tokens and bool((positions.diff(dim=2) > 0).all())
    if not is_ascending:
        raise ValueError(
            f"Expected ascending positions below {tokens}, int64 [b, g, s], and a group of at least 1, got "
            f"{sizes(positions)} of {positions.dtype} and {group}."
        )


def _bounded(value: Any) -> Any:
    """Return a value; raise ValueError for an integer beyond the range of positions."""
    if isinstance(value, int) and abs(value) > FAR:
        raise ValueError(f"Expected a whole number between -2^60 and 2^60, got {brief(value)}.")
    return value


def labels_of(tokens: Any, b: int | None = None, s: int | None = None) -> Tokens:
    """Return labels of the keys as tuples.

    Args:
        tokens: A list of s strings or a `TokenizedText`, or b of them.
        b: The number of sequences.
        s: The number of keys. If None, no numbers are checked.

    Returns:
        The labels.

    Raises:
        TypeError: If a label isn't a string.
        ValueError: If the number of labels or of lists isn't s or b.
    """
    expected = "Expected tokens to be a list of strings, or a list of such lists"
    if s is not None:
        expected = f"Expected tokens to be a list of s = {s} strings, or b = {b} such lists"
    has_lists = _is_list(tokens) and len(tokens) > 0 and _is_list(tokens[0])
    lists = tokens if has_lists else [tokens]
    for labels in lists:
        if not _is_list(labels):
            raise TypeError(f"{expected}, got {kind(labels)}.")
        if others := [label for label in labels if not isinstance(label, str)]:
            raise TypeError(f"{expected}, got {brief(others[0])} in a list.")
    counts = [len(labels) for labels in lists]
    if s is not None and (any(count != s for count in counts) or (has_lists and len(lists) != b)):
        got = f"{len(lists)} with {brief(counts)} strings" if has_lists else f"{counts[0]} strings"
        raise ValueError(f"{expected}, got {got}.")
    frozen = [each if isinstance(each, TokenizedText) else tuple(each) for each in lists]
    return tuple(frozen) if has_lists else frozen[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _json_object(value: Any, name: str) -> dict[str, Any]:
    """Return a mapping as JSON data. Errors call it `name`."""
    if not isinstance(value, Mapping):
        raise TypeError(f"Expected {name} to be a dictionary, got {brief(value)}.")
    plain: dict[str, Any] = _json(value, name)
    return plain


def _json(value: Any, name: str, depth: int = 0) -> Any:
    """Return a value as JSON data, in which tuples become lists."""
    if depth > DEPTH:
        raise ValueError(f"{name} is nested more than {DEPTH} deep. Save less of it.")
    if isinstance(value, list | tuple):
        return [_json(child, f"{name}[{n}]", depth + 1) for n, child in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json(child, f"{name}[{brief(key)}]", depth + 1) for key, child in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"Expected {name} to be a finite number, got {value}.")
    if value is None or isinstance(value, str | int | float):
        return _bounded(value)
    raise TypeError(
        f"Expected {name} to be a string, a number, True, False, None, a list, or a dictionary with keys "
        f"that are strings, got {brief(value)}."
    )
