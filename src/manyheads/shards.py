"""Tensors whose tokens are in several files, mapped into memory as one.

A shard is a safetensors file of consecutive tokens of a map: tensors `[n, …]` with the tokens first, so that
the shards, one after the other, are the whole tensors. `map_as_one` gives them consecutive addresses: it
reserves memory for the whole tensor, and maps the pages of each file into it. What a tile doesn't need is
never read. A file can only be mapped at page boundaries, so a shard's data is preceded by padding.
docs/format.md describes the format, `storage` the index that names the shards.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMAT = "manyheads shard"
HEADER = 4096  # bytes of a shard's header, the length of the header included
PAGE = 1 << 16  # padding is for pages of up to this size
PADDED = 1 << 18  # bytes of a tensor, of which some pages can be mapped; smaller ones are copied
LONGEST = 1 << 40  # tokens of a map
MOST = 1 << 16  # shards of a map
MAP_FIXED = 0x10  # on Linux and macOS

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Shard(NamedTuple):
    """A shard, as the index describes it.

    Attributes:
        name: The name of the file, which is in the folder of the index.
        tokens: The number of its tokens.
        bytes: The size of the file.
    """

    name: str
    tokens: int
    bytes: int


class Piece(NamedTuple):
    """A part of a tensor: consecutive bytes of a file."""

    path: Path
    offset: int
    bytes: int


# -- writing -----------------------------------------------------------------------------------------


def header_of(tensors: Mapping[str, Tensor], first: int, save: str) -> tuple[bytes, dict[str, int]]:
    """Return the header of a shard, and the bytes of padding before each tensor.

    Args:
        tensors: The tensors `[n, …]` by name.
        first: The position of the first token.
        save: The text that identifies the save.

    Returns:
        The header and the paddings.
    """
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "save": save, "first": str(first)}}
    padding = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        row = size // max(len(tensor), 1)
        # The address of the data within the whole tensor and its offset in the file differ by whole pages.
        unit, start = (PAGE, first * row) if size >= PADDED else (8, 0)
        padding[name] = (start - HEADER - at) % unit
        if padding[name]:
            header[f"padding.{name}"] = _describe("U8", [padding[name]], at, padding[name])
            at += padding[name]
        header[name] = _describe(CODES[tensor.dtype], [*tensor.shape], at, size)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (HEADER - 8 - len(text))
    return len(text).to_bytes(8, "little") + text, padding


def _describe(code: str, shape: Sequence[int], start: int, size: int) -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [start, start + size]}


def file_size(tensors: Mapping[str, Tensor], first: int, save: str) -> int:
    """Return the size in bytes of the shard of these tensors `[n, …]`."""
    _, padding = header_of(tensors, first, save)
    return HEADER + sum(padding.values()) + sum(x.numel() * x.element_size() for x in tensors.values())


def write_shard(file: Any, tensors: Mapping[str, Tensor], first: int, save: str) -> None:
    """Write a shard.

    Args:
        file: The file, open for writing bytes.
        tensors: The tensors `[n, …]` by name, contiguous.
        first: The position of the first token.
        save: The text that identifies the save.
    """
    header, padding = header_of(tensors, first, save)
    file.write(header)
    for name, tensor in tensors.items():
        file.write(bytes(padding[name]))
        file.write(tensor.cpu().contiguous()[..., None].view(torch.uint8).numpy().data)


def describe_shards(shards: Sequence[Shard], save: str) -> str:
    """Return the JSON by which an index describes its shards."""
    return json.dumps({"save": save, "files": [shard._asdict() for shard in shards]})


def names_of(text: str) -> list[str]:
    """Return the names of the shards in an index."""
    return [shard.name for shard in _parse(text)[1]]


# -- reading -----------------------------------------------------------------------------------------


def open_shards(folder: Path, text: str) -> dict[str, Tensor]:
    """Return the tensors `[s, …]` of the shards of an index, mapped into memory.

    Args:
        folder: The folder of the index and the shards.
        text: The JSON of `describe_shards`.

    Returns:
        The tensors by name.

    Raises:
        ValueError: If a shard is damaged, cut short or of another save, or the shards don't fit each other.
        OSError: If a shard is missing or can't be read.
    """
    save, shards = _parse(text)
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, list[int]]] = {}  # the dtype and the sizes after the tokens
    first = 0  # the position of the shard's first token
    for number, shard in enumerate(shards):
        path = folder / shard.name
        what = f"shard {number + 1} of {len(shards)}, {path}"
        header = _read_header(path, shard, what)
        found = header.pop("__metadata__", {})
        if found.get("format") != FORMAT:
            raise ValueError(
                f"Expected {what}, to be a shard of a map, got another file. Save the map again."
            )
        if found.get("save") != save:
            raise ValueError(
                f"Expected {what}, to belong to the save {save}, got {brief(found.get('save'))}. Keep the "
                "index and the shards of one save together."
            )
        if found.get("first", str(first)) != str(first):  # earlier files of version 4 don't have it
            raise ValueError(
                f"Expected {what}, to begin at token {first}, got {brief(found['first'])}. Give the "
                "shards the names that they were saved with, or save the map again."
            )
        first += shard.tokens
        named = {name: each for name, each in header.items() if not name.startswith("padding.")}
        if number and named.keys() != kinds.keys():
            raise ValueError(
                f"Expected {what}, to have {', '.join(kinds)}, got {', '.join(named)}. Save the map again."
            )
        for name, tensor in named.items():
            shape, (start, stop) = tensor["shape"], tensor["data_offsets"]
            kind = tensor["dtype"], shape[1:]
            is_alike = shape[:1] == [shard.tokens] and kinds.setdefault(name, kind) == kind
            if tensor["dtype"] not in DTYPES or len(shape) not in (3, 4) or not is_alike:
                raise ValueError(
                    f"Expected {name} of {what}, to have {shard.tokens} tokens in the dtype and sizes of the "
                    f"other shards, got {tensor['dtype']} {shape}. Save the map again."
                )
            pieces.setdefault(name, []).append(Piece(path, HEADER + start, stop - start))
    tokens = sum(shard.tokens for shard in shards)
    return {
        name: map_as_one(pieces[name]).view(DTYPES[code]).reshape(tokens, *sizes)
        for name, (code, sizes) in kinds.items()
    }


def _parse(text: str) -> tuple[str, list[Shard]]:
    """Return the save and the shards that an index describes."""
    try:
        tree = json.loads(text)
        save, files = tree["save"], tree["files"]
        shards = [Shard(**each) for each in files]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"Expected a save and its files in the index, got {brief(text)}. Save it again."
        ) from None
    if not isinstance(save, str) or not 0 < len(shards) <= MOST:
        raise ValueError(
            f"Expected the name of a save and 1 to {MOST} shards, got {brief(tree)}. Save it again."
        )
    for shard in shards:
        is_name = (
            isinstance(shard.name, str) and shard.name.isprintable() and shard.name not in ("", ".", "..")
        )
        if not is_name or any(mark in shard.name for mark in "/\\:"):
            raise ValueError(
                f"Expected the name of a file in the folder of the index, got {brief(shard.name)}. "
                "Save it again."
            )
        for size in (shard.tokens, shard.bytes):
            if type(size) is not int or not 0 <= size <= LONGEST:
                raise ValueError(
                    f"Expected a number of tokens and of bytes, got {brief(shard)}. Save it again."
                )
    return save, shards


def _read_header(path: Path, shard: Shard, what: str) -> dict[str, Any]:
    """Return the header of a shard after a check that the file is as long as it says."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(
            f"Expected {what}, got none. Keep the index and all shards in one folder, or save the map again."
        )
    size = path.stat().st_size
    if size != shard.bytes:
        raise ValueError(
            f"Expected {what}, to have {shard.bytes:,} bytes, got {size:,}: it was cut short or changed. "
            "Save the map again."
        )
    damaged = f"Expected {what}, to be a shard of a map, got a damaged file"
    try:
        with safe_open(path, framework="pt"):  # checks the header, and that its tensors are the whole data
            pass
        with open(path, "rb") as file:
            header = file.read(HEADER)
        tree: dict[str, Any] = json.loads(header[8:])
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{damaged}: {error}. Save the map again.") from None
    if int.from_bytes(header[:8], "little") != HEADER - 8:
        raise ValueError(f"{damaged}, whose header is too long. Save the map again.")
    return tree


def map_as_one(pieces: Sequence[Piece]) -> Tensor:
    """Return consecutive bytes of several files as one tensor, without reading them.

    Args:
        pieces: The pieces, in order.

    Returns:
        The bytes, uint8 `[n]`. Changing them doesn't change the files.

    Raises:
        OSError: If a file can't be mapped.
    """
    total = sum(piece.bytes for piece in pieces)
    if total == 0:
        return torch.empty(0, dtype=torch.uint8)
    if sys.platform == "win32":
        raise OSError(
            "Expected Linux or macOS to open a map of shards, got Windows. Open it on another machine."
        )
    # When this memory is released, so is all that is mapped into it.
    memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at = 0
    for piece in pieces:
        first, last = (
            -(-at // mmap.PAGESIZE) * mmap.PAGESIZE,
            (at + piece.bytes) // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if first >= last or (piece.offset - at) % mmap.PAGESIZE:
            first = last = at  # no whole page, or not at a page of the file
        with open(piece.path, "rb") as file:
            if first < last:
                _map_file(file.fileno(), address + first, last - first, piece.offset + first - at, piece.path)
            for start, stop in ((at, first), (last, at + piece.bytes)):
                file.seek(piece.offset + start - at)
                if file.readinto(memoryview(memory)[start:stop]) != stop - start:
                    raise OSError(
                        f"The shard {piece.path} was cut short while it was read. Save the map again."
                    )
        at += piece.bytes
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_file(descriptor: int, address: int, size: int, offset: int, path: Path) -> None:
    """Map a part of a file to an address, over the memory that is reserved there."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # of private copies of pages
    mapped = library.mmap(address, size, writable, mmap.MAP_PRIVATE | MAP_FIXED, descriptor, offset)
    if mapped != address:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(f"The shard {path} can't be mapped into memory: {reason}. Copy it to a local disk.")
