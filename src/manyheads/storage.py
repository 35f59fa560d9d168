"""Maps and recordings in one `safetensors` file, with everything but tensors as JSON in its header.

A file is a list of entries: the name of a layer, the number of a call, and its map or its statistics.
docs/format.md describes the format. What is read goes through the same checks as a caller's arguments.
Tensors are memory-mapped: q, k and lse are read from the disk when they are used; masks and biases, which are
checked, at once.
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

from manyheads import biases, masks
from manyheads.biases import Bias
from manyheads.masks import FAR, Mask, extremes
from manyheads.problem import Problem
from manyheads.shapes import kind, sizes, whole
from manyheads.trees import Value

FORMAT, VERSION = "manyheads", 1

# Limits of a file: enough for a million tokens and a thousand layers, too little to fill the memory.
HEADER = 2**25  # bytes
DEPTH = 100  # masks in masks, lists in lists
AXES = 8  # of a tensor
LONGEST = 2**20  # an axis of a tensor without entries; others are as long as the file allows

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

Tokens = tuple[str, ...] | tuple[tuple[str, ...], ...]  # of the s keys, or of each of b sequences
Schema = dict[str, tuple[type, ...]]  # the fields of a JSON object, and what each may be
Picks = tuple[Tensor, Tensor] | None  # batch entries and heads, None: all

NONE = type(None)

# The names of masks, biases and their fields in files; they stay even if a class is renamed.
IDS: Schema = {"ids": (Tensor,), "queries": (Tensor, NONE)}
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
    "ALiBi": (biases.ALiBi, {"slopes": (Tensor,)}),
    "Relative": (biases.Relative, {"table": (Tensor,)}),
    "Dense": (biases.Dense, {"values": (Tensor,)}),
}
WORDS = {cls: word for word, (cls, _) in PARTS.items()}

# The axes of their tensors, by the letters of shapes.py; a tensor of fewer axes has the last of these.
LETTERS = {
    "n": "b",
    "ids": "bs",
    "queries": "bt",
    "tensor": "bhts",
    "slopes": "h",
    "table": "hn",
    "values": "bhts",
}

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


class Stored(NamedTuple):
    """The content of a map: `AttentionMap.of(*stored)`."""

    problem: Problem
    lse: Tensor  # [b, h, t]
    tokens: Tokens | None
    provenance: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Kept:
    """Statistics of one call: tensors by name, and plain data as JSON has it."""

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]
    tokens: Tokens | None = None


class Entry(NamedTuple):
    """One call of one layer; `name` is a label, of printable characters, and never a path."""

    name: str
    call: int
    content: Stored | Kept


class Run(NamedTuple):
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

    tokens: labels of the whole run; provenance: JSON data, in which tuples become lists. Tensors are written
    one after the other from any device; tensors that share memory are written once. Raises ValueError or
    TypeError for what can't be written, such as a `Rule`; OSError from the disk.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"Expected a file to save maps in, got the folder {path}. Name a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Expected a folder {path.parent} to save {path.name} in, got none. Make it first."
        )
    _check_calls(entries)
    out = _Writer()
    written = [out.entry(str(number), entry) for number, entry in enumerate(entries)]
    place = out.label(None if tokens is None else _labels(tokens))
    run = {
        "entries": written,
        "labels": list(out.labels),
        "tokens": place,
        "provenance": _object(provenance or {}, "provenance"),
    }
    # Wide numbers first, and all of it from a multiple of 64, so that every tensor is aligned.
    tensors = dict(sorted(out.tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(json.dumps(run, separators=(",", ":")), tensors)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for tensor in tensors.values():
            file.write(_numbers(tensor))


class _Writer:
    """Turns entries into JSON, and collects their tensors by name and token labels by number."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.labels: dict[Tokens, int] = {}
        self._names: dict[Any, str] = {}  # of tensors, by where their numbers are in memory

    def entry(self, place: str, entry: Entry) -> dict[str, Any]:
        written: dict[str, Any] = {"name": entry.name, "call": entry.call}
        content = entry.content
        try:
            if isinstance(content, Kept):
                _check_names(content.tensors)
                written["statistics"] = {
                    name: self.tensor(tensor, f"{place}.{name}") for name, tensor in content.tensors.items()
                }
                written["tokens"] = self.label(None if content.tokens is None else _labels(content.tokens))
                return written | {"plain": _object(content.plain, "plain")}
            problem, lse, tokens, provenance = content
            _check_map(problem, lse)
            written["map"] = {
                name: self.value(getattr(problem, name), f"{place}.{name}") for name in PROBLEM
            } | {"lse": self.tensor(lse, f"{place}.lse")}
            written["tokens"] = self.label(None if tokens is None else _fitting(_labels(tokens), problem))
            return written | {"provenance": _object(provenance, "provenance")}
        except (TypeError, ValueError) as error:
            raise ValueError(f"Call {entry.call} of {entry.name!r} can't be saved: {error}") from None

    def value(self, value: Any, place: str, depth: int = 0, picks: Picks = None) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value, place)
        if isinstance(value, Value):
            return self.part(value, place, depth, picks)
        if isinstance(value, tuple):
            return [_bounded(number) for number in value]
        return _bounded(value)

    def part(self, part: Value, place: str, depth: int, picks: Picks) -> dict[str, Any]:
        if isinstance(part, masks.Only | biases.OnlyBias):
            # Its tensors are for more sequences and heads; a file has only the selected ones.
            inner = part.mask if isinstance(part, masks.Only) else part.bias
            b, h = (part.batch, part.heads) if picks is None else (part.batch[picks[0]], part.heads[picks[1]])
            return self.part(inner, place, depth, (b, h))
        word = WORDS.get(type(part))
        if isinstance(part, masks.Rule):
            raise ValueError(
                f"its mask has {part}, whose function can't be saved. Save what it keeps as a tensor: "
                "amap.under(Keep(tensor))."
            )
        if word is None:
            raise ValueError(f"Expected one of {', '.join(PARTS)} in a file, got {kind(part)}.")
        if depth > DEPTH:
            raise ValueError(
                f"its mask is nested more than {DEPTH} deep. Save what it keeps as a tensor, Keep(tensor)."
            )
        written: dict[str, Any] = {"is": word}
        for name in PARTS[word][1]:
            value = getattr(part, name)
            if isinstance(value, Tensor) and picks is not None:
                value = _pick(value, LETTERS[name], picks)
            written[name] = self.value(value, f"{place}.{name}", depth + 1, picks)
        return written

    def tensor(self, tensor: Tensor, name: str) -> dict[str, str]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected {name} to be a tensor, got {kind(tensor)}.")
        _check_tensor(name, CODES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)
        if tensor.is_meta:
            raise ValueError(f"Expected numbers in {name}, got a tensor on the meta device.")
        tensor = tensor.detach().resolve_neg()
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if where not in self._names:
            self._names[where] = name
            self.tensors[name] = tensor
        return {"tensor": self._names[where]}

    def label(self, tokens: Tokens | None) -> int | None:
        return None if tokens is None else self.labels.setdefault(tokens, len(self.labels))


def _pick(tensor: Tensor, letters: str, picks: tuple[Tensor, Tensor]) -> Tensor:
    """Return a tensor's entries for the selected batch entries and heads; itself if that is all of it."""
    for axis, letter in enumerate(letters[len(letters) - tensor.dim() :]):
        size = tensor.shape[axis]
        if letter not in "bh" or size == 1:
            continue
        chosen = picks["bh".index(letter)]
        if not torch.equal(chosen, torch.arange(size, device=chosen.device)):
            tensor = tensor.index_select(axis, chosen)
    return tensor


def _header(run: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file, padded so that what follows is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": str(VERSION), "run": run}}
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


def _numbers(tensor: Tensor) -> memoryview:
    """Return a tensor's numbers as they are in a file: contiguous, and copied only if necessary."""
    # `view` needs a last axis of stride 1, which a new one has.
    bytes_ = tensor.cpu().contiguous()[..., None].view(torch.uint8)
    return bytes_.numpy().data


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` that replaces it when complete; an incomplete one is removed."""
    part = path.with_name(f".{token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def folder_for(path: Path, name: str) -> Path:
    """Make a folder and check that it can be written; raise OSError, which calls it `name`, if it can't."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            return path
    except FileExistsError:
        raise FileExistsError(f"Expected {name} to be a folder, got the file {path}.") from None
    except OSError as error:
        raise OSError(f"{name} {path} can't be written: {error.strerror}.") from None


def file_for(path: Path, name: str) -> Path:
    """Return a file whose folder can be written; raise OSError, which calls it `name`, if it can't."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise OSError(f"{name} {path} can't be written: {error.strerror}.") from None


# -- reading ---------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Run:
    """Return the content of a file that `write` wrote, with its tensors memory-mapped.

    The file may be replaced while its tensors are in use, also by `write`, but not truncated. Changing a
    tensor in place doesn't change the file. Whether lse belongs to q and k isn't checked.

    Raises ValueError for another kind of file, and OSError if there is none.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file {path}, got {'a folder' if path.is_dir() else 'none'}.")
    with open(path, "rb") as start:
        length = int.from_bytes(start.read(8), "little")
    try:
        if length > HEADER:
            raise SafetensorError(f"its header has {length:,} bytes")
        with safe_open(path, framework="pt") as file:
            run = _metadata(path, file.metadata() or {})
            try:
                return _Reader(file).run(run)
            except (TypeError, ValueError) as error:
                reason = shorten(str(error), 1000, placeholder=" ….")
                raise ValueError(f"{path} isn't a file of manyheads: {reason}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} isn't a safetensors file, or is truncated: {error}.") from None


def _metadata(path: Path, metadata: Mapping[str, str]) -> str:
    """Return the run's JSON from the metadata of a file of this format and version."""
    version = metadata.get("version", "")
    if metadata.get("format") != FORMAT or "run" not in metadata or not re.fullmatch("[1-9][0-9]*", version):
        raise ValueError(
            f"{path} is a safetensors file, but not of manyheads. Expected format '{FORMAT}', got "
            f"{brief(dict(metadata)) if metadata else 'none'}."
        )
    if version != str(VERSION):
        raise ValueError(
            f"{path} has version {version[:9]} of the format, and this manyheads reads up to {VERSION}. "
            "Upgrade it."
        )
    return metadata["run"]


class _Reader:
    """Turns JSON into entries; every tensor of the file must be used."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.names = set(file.keys())
        self.tensors: dict[str, Tensor] = {}
        self.labels: list[Tokens] = []

    def run(self, text: str) -> Run:
        try:
            tree = json.loads(text)
        except RecursionError:
            raise ValueError("its JSON is nested too deep.") from None
        except ValueError as error:
            raise ValueError(f"its JSON can't be read: {error}.") from None
        run = _fields(tree, RUN, "a run")
        self.labels = [_labels(labels) for labels in run["labels"]]
        entries = []
        for number, entry in enumerate(run["entries"]):
            try:
                entries.append(self.entry(entry))
            except (TypeError, ValueError) as error:
                raise ValueError(f"in entry {number}, {error}") from None
        _check_calls(entries)
        if unused := sorted(self.names - self.tensors.keys()):
            raise ValueError(f"its tensor {brief(unused[0])} belongs to no entry.")
        return Run(tuple(entries), self.label(run["tokens"]), _object(run["provenance"], "provenance"))

    def entry(self, tree: Any) -> Entry:
        if isinstance(tree, dict) and "statistics" in tree:
            entry = _fields(tree, STATISTICS, "statistics")
            tensors = _fields(
                entry["statistics"], dict.fromkeys(entry["statistics"], (Tensor,)), "it", self.value
            )
            _check_names(tensors)
            kept = Kept(tensors, _object(entry["plain"], "plain"), self.label(entry["tokens"]))
            return Entry(entry["name"], entry["call"], kept)
        entry = _fields(tree, MAP, "a map")
        given = _fields(entry["map"], PROBLEM | {"lse": (Tensor,)}, "a map", self.value)
        lse, k = given.pop("lse"), given["k"]
        problem = Problem.of(v=k.new_empty(*k.shape[:3], 0), **given)
        _check_map(problem, lse)
        tokens = self.label(entry["tokens"])
        stored = Stored(
            problem,
            lse,
            None if tokens is None else _fitting(tokens, problem),
            _object(entry["provenance"], "provenance"),
        )
        return Entry(entry["name"], entry["call"], stored)

    def value(self, tree: Any, depth: int = 0) -> Any:
        if isinstance(tree, dict):
            return self.part(tree, depth) if "is" in tree else self.tensor(tree)
        if isinstance(tree, list):
            return [_bounded(number) for number in tree]
        return _bounded(tree)

    def part(self, tree: dict[str, Any], depth: int) -> Value:
        word, fields = tree["is"], {name: part for name, part in tree.items() if name != "is"}
        if not isinstance(word, str) or word not in PARTS:
            raise ValueError(f"Expected a mask or bias to be one of {', '.join(PARTS)}, got {brief(word)}.")
        if depth > DEPTH:
            raise ValueError(f"its mask is nested more than {DEPTH} deep.")
        cls, schema = PARTS[word]
        return cls(**_fields(fields, schema, word, lambda part: self.value(part, depth + 1)))

    def tensor(self, tree: Any) -> Tensor:
        name = _fields(tree, {"tensor": (str,)}, "the place of a tensor")["tensor"]
        if name not in self.names:
            raise ValueError(f"it refers to a tensor {brief(name)}, which isn't in the file.")
        if name not in self.tensors:
            self.tensors[name] = self._load(name)
        return self.tensors[name]

    def _load(self, name: str) -> Tensor:
        header = self.file.get_slice(name)
        _check_tensor(name, header.get_dtype(), header.get_shape())
        tensor: Tensor = self.file.get_tensor(name)
        if tensor.data_ptr() % tensor.element_size():
            raise ValueError(f"Expected tensor {brief(name)} at a multiple of its item size.")
        # A byte of 2 is neither True nor False, and differs from itself from one operation to the next.
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise ValueError(f"Expected only the bytes 0 and 1 in the boolean tensor {brief(name)}.")
        return tensor

    def label(self, place: int | None) -> Tokens | None:
        if place is None:
            return None
        if not 0 <= place < len(self.labels):
            raise ValueError(
                f"it refers to tokens {place}, and the file has {len(self.labels)} lists of them."
            )
        return self.labels[place]


def _fields(
    tree: Any, schema: Schema, what: str, read: Callable[[Any], Any] = lambda part: part
) -> dict[str, Any]:
    """Return the fields of a JSON object, read and checked against a schema."""
    if not isinstance(tree, dict) or tree.keys() != schema.keys():
        got = f"{brief(list(tree))}" if isinstance(tree, dict) else brief(tree)
        raise ValueError(f"Expected {what} to have {', '.join(schema) or 'no fields'}, got {got}.")
    fields = {name: read(tree[name]) for name in schema}
    for name, kinds in schema.items():
        # True is an int to Python, and not here.
        if not isinstance(fields[name], kinds) or (isinstance(fields[name], bool) and bool not in kinds):
            wanted = " or ".join("null" if kind is NONE else kind.__name__ for kind in kinds)
            raise ValueError(f"Expected the {brief(name)} of {what} to be {wanted}, got {brief(tree[name])}.")
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
            raise ValueError(f"Expected a name to be text of printable characters, got {brief(name)}.")


def _check_tensor(name: str, code: str, shape: Sequence[int]) -> None:
    if code not in DTYPES:
        raise ValueError(f"Expected tensor {brief(name)} to be one of {', '.join(DTYPES)}, got {code}.")
    if len(shape) > AXES:
        raise ValueError(f"Expected tensor {brief(name)} to have at most {AXES} axes, got {len(shape)}.")
    if 0 in shape and max(shape) > LONGEST:
        raise ValueError(
            f"Expected axes of at most {LONGEST} for tensor {brief(name)}, which is empty, got {list(shape)}."
        )


def _check_map(problem: Problem, lse: Tensor) -> None:
    for position in extremes(problem.offset):
        _bounded(position)
    want = problem.shape[:2] + problem.shape[3:4]
    if tuple(lse.shape) != want or lse.dtype != problem.dtype:
        raise ValueError(
            f"Expected lse to be {problem.dtype}, [b, h, t] = {list(want)}, got {lse.dtype}, {sizes(lse)}."
        )


def _bounded(value: Any) -> Any:
    """Return a whole number within what positions may be; anything else as it is."""
    if isinstance(value, int) and abs(value) > FAR:
        raise ValueError(f"Expected a whole number between -2^60 and 2^60, got {brief(value)}.")
    return value


def _labels(tokens: Any) -> Tokens:
    """Return token labels, one list of str or several, checked."""
    several = isinstance(tokens, list | tuple) and bool(tokens) and not isinstance(tokens[0], str)
    lists = tokens if several else [tokens]
    for labels in lists:
        if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
            raise ValueError(f"Expected tokens to be a list of text, or a list of such, got {brief(tokens)}.")
    return tuple(map(tuple, tokens)) if several else tuple(tokens)


def _fitting(tokens: Tokens, problem: Problem) -> Tokens:
    """Return the labels if there are s, or s for each of b sequences."""
    b, s = problem.shape.b, problem.shape.s
    several = bool(tokens) and not isinstance(tokens[0], str)
    if (several and len(tokens) != b) or any(
        len(labels) != s for labels in (tokens if several else [tokens])
    ):
        counts = [len(labels) for labels in tokens] if several else len(tokens)
        raise ValueError(f"Expected tokens to be s = {s}, or b = {b} lists of them, got {brief(counts)}.")
    return tokens


def _object(value: Any, where: str) -> dict[str, Any]:
    """Return a mapping as JSON data."""
    if not isinstance(value, Mapping):
        raise TypeError(f"Expected {where} to be a dictionary, got {brief(value)}.")
    plain: dict[str, Any] = _plain(value, where)
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value as JSON data, which is read back the same but for tuples, which become lists."""
    if depth > DEPTH:
        raise ValueError(f"{where} is nested more than {DEPTH} deep.")
    if isinstance(value, list | tuple):
        return [_plain(part, f"{where}[{n}]", depth + 1) for n, part in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain(part, f"{where}[{brief(name)}]", depth + 1) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"Expected {where} to be a finite number, got {value}.")
    if value is None or isinstance(value, str | int | float):
        return _bounded(value)
    raise TypeError(
        f"Expected {where} to be text, a number, True, False, None, a list, or a dictionary with names of "
        f"text, got {brief(value)}."
    )
