"""Maps and runs in one file: tensors in a `safetensors` file, all else as JSON in its header.

A file is a list of entries: the name of a layer, the number of a call, and what is kept of it, either all
that a map needs or statistics. docs/format.md writes the format down. What is read goes through the checks
that a caller's own values go through, so that no file makes what a caller couldn't. Tensors are mapped into
memory: q, k and lse are read from the disk where they are used, masks and biases, which are checked, at once.
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
from reprlib import repr as brief  # what a hostile file holds may be long
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

# What a file may hold: enough for a million tokens and a thousand layers, too little to fill a memory.
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
Picks = tuple[Tensor, Tensor] | None  # which batch entries and which heads, None: all

NONE = type(None)

# The words for masks, biases and their fields are part of the format: a class may be renamed, these can't.
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
    """What a map is made of: `AttentionMap.of(*stored)`."""

    problem: Problem
    lse: Tensor  # [b, h, t]
    tokens: Tokens | None
    provenance: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Kept:
    """Statistics of one call: tensors by their names, and what else there is to say, as JSON can say it."""

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]
    tokens: Tokens | None = None


class Entry(NamedTuple):
    """One call of one layer; `name` is a label, of printable characters, and never a path."""

    name: str
    call: int
    content: Stored | Kept


class Run(NamedTuple):
    """All that a file holds."""

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
    """Write entries into one file, whole or not at all: what stood at `path` stays until then.

    tokens: labels of the whole run; provenance: what JSON can say, of which tuples come back as lists.
    Tensors are written one after the other from wherever they are; what shares memory is written once.
    Raises ValueError or TypeError for what can't be written, such as a `Rule`; OSError from the disk.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"maps are saved in a file, and {path} is a folder: name a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in: make it first.")
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
    """Says things in JSON, and collects what JSON refers to: tensors by name, token labels by number."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.labels: dict[Tokens, int] = {}
        self._names: dict[Any, str] = {}  # of tensors, by where their numbers are in memory

    def entry(self, place: str, entry: Entry) -> dict[str, Any]:
        said: dict[str, Any] = {"name": entry.name, "call": entry.call}
        content = entry.content
        try:
            if isinstance(content, Kept):
                _check_names(content.tensors)
                said["statistics"] = {
                    name: self.tensor(tensor, f"{place}.{name}") for name, tensor in content.tensors.items()
                }
                said["tokens"] = self.label(None if content.tokens is None else _labels(content.tokens))
                return said | {"plain": _object(content.plain, "plain")}
            problem, lse, tokens, provenance = content
            _check_map(problem, lse)
            said["map"] = {
                name: self.value(getattr(problem, name), f"{place}.{name}") for name in PROBLEM
            } | {"lse": self.tensor(lse, f"{place}.lse")}
            said["tokens"] = self.label(None if tokens is None else _fitting(_labels(tokens), problem))
            return said | {"provenance": _object(provenance, "provenance")}
        except (TypeError, ValueError) as error:
            raise ValueError(f"call {entry.call} of {entry.name!r} can't be saved: {error}") from None

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
            # It looks into what was made for more sequences and heads: a file has these alone.
            inner = part.mask if isinstance(part, masks.Only) else part.bias
            b, h = (part.batch, part.heads) if picks is None else (part.batch[picks[0]], part.heads[picks[1]])
            return self.part(inner, place, depth, (b, h))
        word = WORDS.get(type(part))
        if isinstance(part, masks.Rule):
            raise ValueError(
                f"its mask holds {part}, and a function can't be written into a file: "
                "say what it keeps as a tensor, Keep(tensor), and take the map under that."
            )
        if word is None:
            raise ValueError(f"Expected one of {', '.join(PARTS)} in a file, got {kind(part)}.")
        if depth > DEPTH:
            raise ValueError(
                f"its mask is nested more than {DEPTH} deep: say what it keeps as a tensor, Keep(tensor)."
            )
        said: dict[str, Any] = {"is": word}
        for name in PARTS[word][1]:
            value = getattr(part, name)
            if isinstance(value, Tensor) and picks is not None:
                value = _pick(value, LETTERS[name], picks)
            said[name] = self.value(value, f"{place}.{name}", depth + 1, picks)
        return said

    def tensor(self, tensor: Tensor, name: str) -> dict[str, str]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected {name} to be a tensor, got {kind(tensor)}.")
        _check_tensor(name, CODES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, where tensors hold no numbers.")
        tensor = tensor.detach().resolve_neg()
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if where not in self._names:
            self._names[where] = name
            self.tensors[name] = tensor
        return {"tensor": self._names[where]}

    def label(self, tokens: Tokens | None) -> int | None:
        return None if tokens is None else self.labels.setdefault(tokens, len(self.labels))


def _pick(tensor: Tensor, letters: str, picks: tuple[Tensor, Tensor]) -> Tensor:
    """Return what a tensor holds for the picked batch entries and heads; itself where that is all of it."""
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
            f"names, tokens and provenance take {len(text) / 1e6:.1f} MB as text, and a file holds "
            f"{HEADER / 1e6:.1f} MB of it: save fewer calls in one file, or without tokens."
        )
    return text + b" " * (-(8 + len(text)) % 64)


def _numbers(tensor: Tensor) -> memoryview:
    """Return a tensor's numbers as they lie in a file: compact, and copied only if necessary."""
    # A new last axis has a stride of 1, which a look at the bytes asks for, whatever the others have.
    lined_up = tensor.cpu().contiguous()[..., None].view(torch.uint8)
    return lined_up.numpy().data


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` that replaces it when complete; nothing is left of an incomplete one."""
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
    """Make a folder, and be sure that it can be written; OSError, which calls it `name`, where it can't."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            return path
    except FileExistsError:
        raise FileExistsError(f"{name} must be a folder, and {path} is a file.") from None
    except OSError as error:
        raise OSError(f"{name} {path} can't be written: {error.strerror}.") from None


def file_for(path: Path, name: str) -> Path:
    """Return a file whose folder can be written; OSError, which calls it `name`, where it can't."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise OSError(f"{name} {path} can't be written: {error.strerror}.") from None


# -- reading ---------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Run:
    """Everything in a file that `write` wrote, its tensors mapped into memory.

    The file may be replaced while its tensors are in use, also by `write`, but not cut short. A tensor
    that is changed in place doesn't change the file. That lse belongs to q and k isn't computed again: a
    file's numbers are trusted as its maker is.

    Raises ValueError for what isn't such a file, and OSError where there is none.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}{', it is a folder' if path.is_dir() else ''}.")
    with open(path, "rb") as start:
        length = int.from_bytes(start.read(8), "little")
    try:
        if length > HEADER:
            raise SafetensorError(f"its header would take {length:,} bytes")
        with safe_open(path, framework="pt") as file:
            run = _metadata(path, file.metadata() or {})
            try:
                return _Reader(file).run(run)
            except (TypeError, ValueError) as error:
                said = shorten(str(error), 1000, placeholder=" ….")
                raise ValueError(f"{path} isn't what manyheads writes: {said}") from None
    except SafetensorError as error:
        raise ValueError(
            f"{path} can't be read as safetensors, it may be cut short or of another kind: {error}."
        ) from None


def _metadata(path: Path, metadata: Mapping[str, str]) -> str:
    """Return the run's JSON, out of a header that says it is one of ours and of a version that is known."""
    version = metadata.get("version", "")
    if metadata.get("format") != FORMAT or "run" not in metadata or not re.fullmatch("[1-9][0-9]*", version):
        raise ValueError(
            f"{path} is a safetensors file, but not one of maps. Expected the mark of manyheads, got "
            f"{brief(dict(metadata)) if metadata else 'none'}."
        )
    if version != str(VERSION):
        raise ValueError(
            f"{path} is of version {version[:9]} of the format, and this manyheads reads up to {VERSION}: "
            "upgrade it."
        )
    return metadata["run"]


class _Reader:
    """The way back from JSON; every tensor that the file holds must be asked for."""

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
            raise ValueError(f"nothing in it asks for its tensor {brief(unused[0])}.")
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
            raise ValueError(f"it asks for a tensor {brief(name)}, which the file doesn't hold.")
        if name not in self.tensors:
            self.tensors[name] = self._load(name)
        return self.tensors[name]

    def _load(self, name: str) -> Tensor:
        said = self.file.get_slice(name)
        _check_tensor(name, said.get_dtype(), said.get_shape())
        tensor: Tensor = self.file.get_tensor(name)
        if tensor.data_ptr() % tensor.element_size():
            raise ValueError(f"tensor {brief(name)} must stand at a multiple of its numbers' size.")
        # A byte of 2 is neither True nor False, and differs from itself from one operation to the next.
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise ValueError(f"tensor {brief(name)} must hold the bytes 0 and 1 only, as it is boolean.")
        return tensor

    def label(self, place: int | None) -> Tokens | None:
        if place is None:
            return None
        if not 0 <= place < len(self.labels):
            raise ValueError(f"it asks for tokens {place}, and the file holds {len(self.labels)} such lists.")
        return self.labels[place]


def _fields(
    tree: Any, schema: Schema, what: str, read: Callable[[Any], Any] = lambda part: part
) -> dict[str, Any]:
    """Return the fields of a JSON object, read, which must be these and of these kinds."""
    if not isinstance(tree, dict) or tree.keys() != schema.keys():
        got = f"{brief(list(tree))}" if isinstance(tree, dict) else brief(tree)
        raise ValueError(f"Expected {what} to have {', '.join(schema) or 'no fields'}, got {got}.")
    fields = {name: read(tree[name]) for name in schema}
    for name, kinds in schema.items():
        # True is an int to Python, and not here.
        if not isinstance(fields[name], kinds) or (isinstance(fields[name], bool) and bool not in kinds):
            wanted = " or ".join("null" if one is NONE else one.__name__ for one in kinds)
            raise ValueError(f"Expected the {brief(name)} of {what} to be {wanted}, got {brief(tree[name])}.")
    return fields


# -- checks, of what is written and of what is read ------------------------------------------------


def _check_calls(entries: Sequence[Entry]) -> None:
    seen = set()
    for entry in entries:
        _check_names([entry.name])
        whole(entry.call, "the number of a call")
        if entry[:2] in seen:
            raise ValueError(
                f"Expected every call once in a file, got call {entry.call} of {entry.name!r} twice."
            )
        seen.add(entry[:2])


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
    """Token labels, one list of text or several."""
    several = isinstance(tokens, list | tuple) and bool(tokens) and not isinstance(tokens[0], str)
    lists = tokens if several else [tokens]
    for labels in lists:
        if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
            raise ValueError(f"Expected tokens to be a list of text, or a list of such, got {brief(tokens)}.")
    return tuple(map(tuple, tokens)) if several else tuple(tokens)


def _fitting(tokens: Tokens, problem: Problem) -> Tokens:
    """Labels of this problem's keys: s, or s for each of b sequences."""
    b, s = problem.shape.b, problem.shape.s
    several = bool(tokens) and not isinstance(tokens[0], str)
    if (several and len(tokens) != b) or any(
        len(labels) != s for labels in (tokens if several else [tokens])
    ):
        counts = [len(labels) for labels in tokens] if several else len(tokens)
        raise ValueError(f"Expected tokens to be s = {s}, or b = {b} lists of them, got {brief(counts)}.")
    return tokens


def _object(value: Any, where: str) -> dict[str, Any]:
    """Return a dictionary that JSON can say."""
    if not isinstance(value, Mapping):
        raise TypeError(f"Expected {where} to be a dictionary, got {brief(value)}.")
    plain: dict[str, Any] = _plain(value, where)
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return what JSON can say and gives back as it was, but for tuples, which become lists."""
    if depth > DEPTH:
        raise ValueError(f"{where} is nested more than {DEPTH} deep.")
    if isinstance(value, list | tuple):
        return [_plain(part, f"{where}[{n}]", depth + 1) for n, part in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain(part, f"{where}[{brief(name)}]", depth + 1) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"Expected {where} to be a finite number, as JSON knows no other, got {value}.")
    if value is None or isinstance(value, str | int | float):
        return _bounded(value)
    raise TypeError(
        f"Expected {where} to be text, a number, True, False, None, a list, or a dictionary with names of "
        f"text, got {brief(value)}."
    )
