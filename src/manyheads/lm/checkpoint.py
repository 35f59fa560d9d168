"""A model in a folder: `model.safetensors, config.json, tokenizer.json`; to go on training also
`optimizer.safetensors, state.json`. No pickle.

These files must fit each other even if the process is killed while it writes them. So they are
written into a folder beside them, that folder is renamed, which is the one moment that counts, and
then they are moved into place. Who comes later and finds the renamed folder finishes the moving.

Each safetensors file has checksums of its tensors and of the model's config in its header, so that damaged
weights and a config of another model are found when they are read. `state.json` has the checksum of every
other file, so that a run isn't resumed with a file of another one. Files without checksums, written by
earlier versions, are read without these checks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from manyheads.files import replacing
from manyheads.lm.model import Config, LanguageModel
from manyheads.shapes import sizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KIND = "manyheads-lm-1"
CHECKSUMS = "sha256-tensors-config"  # in a header: the two checksums with a space between them
CHECKSUM = "sha256"  # in a header of an earlier version, of the tensors; in state.json, of each file
SHIPPED = Path(__file__).with_name("shipped")
FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "optimizer.safetensors",
    "state.json",
)
# Folders in a checkpoint's folder. The names are this project's own: what they hold may be deleted.
WRITING, WRITTEN = ".manyheads-writing", ".manyheads-written"


def save(
    folder: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    optimizer: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a model and its tokenizer into a folder: all files or none, whenever the process dies.

    optimizer: tensors by name, of any shapes `[...]`, and state: what JSON can say; both or neither. OSError
    from the disk, which names the file; the checkpoint that was there before then stays.
    """
    settle(folder)
    part, digests = folder / WRITING, {}

    def put(name: str, content: bytes) -> None:
        digests[name] = hashlib.sha256(content).hexdigest()
        with disk_errors(folder / name):
            (part / name).write_bytes(content)
            with open(part / name, "rb") as written:
                os.fsync(written.fileno())

    shutil.rmtree(part, ignore_errors=True)
    try:
        with disk_errors(part):
            part.mkdir(parents=True)
        put("model.safetensors", _tensor_bytes(model.state_dict(), model.config))
        put("config.json", _json_bytes(asdict(model.config)))
        put("tokenizer.json", tokenizer.to_str(pretty=True).encode())
        if optimizer is not None and state is not None:
            put("optimizer.safetensors", _tensor_bytes(optimizer, model.config))
            put("state.json", _json_bytes({**state, CHECKSUM: digests}))
        os.rename(part, folder / WRITTEN)
    except (Exception, KeyboardInterrupt):  # nothing is left that would keep a disk full
        shutil.rmtree(part, ignore_errors=True)
        raise
    settle(folder)


def settle(folder: Path) -> None:
    """Finish the moving that a killed process left undone, if there is any."""
    written = folder / WRITTEN
    if written.is_dir():
        for name in FILES:
            if (written / name).exists():
                os.replace(written / name, folder / name)
        written.rmdir()


def load(folder: str | os.PathLike[str] | None = None) -> tuple[LanguageModel, Tokenizer]:
    """(model, tokenizer) of a checkpoint in a folder, on the CPU, for evaluation; None is the shipped model.

    Raises FileNotFoundError where something is missing, ValueError for what isn't a checkpoint.
    """
    path = SHIPPED if folder is None else Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"a model is a folder, and there is no folder {path}.")
    for name in FILES[:3]:
        if not (path / name).is_file():
            raise FileNotFoundError(
                f"a model is a folder with {', '.join(FILES[:3])}, and {path} has no {name}."
            )
    config, tokenizer = read_config(path)
    model = LanguageModel(config)
    model.load_state_dict(read_tensors(path / "model.safetensors", model.state_dict(), config))
    return model.eval(), tokenizer


def read_config(folder: Path) -> tuple[Config, Tokenizer]:
    """Read (config, tokenizer) of a checkpoint.

    Raises ValueError if they don't fit each other, or describe a model that is larger than the file with its
    weights, so that a model of absurd size is refused before it is built.
    """
    config, tokenizer = _read_config(folder / "config.json"), read_tokenizer(folder / "tokenizer.json")
    if tokenizer.get_vocab_size() != config.vocab:
        raise ValueError(
            f"{folder}: config.json and tokenizer.json don't belong together, the model knows "
            f"{config.vocab} tokens and the tokenizer {tokenizer.get_vocab_size()}."
        )
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    if config.parameter_count > size:  # each takes at least a byte
        raise ValueError(
            f"{folder / 'config.json'} describes a model of {config.parameter_count:,} parameters, but "
            f"{weights} has only {size:,} bytes: one of them is damaged or belongs to another model."
        )
    return config, tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer that encodes the spelling of a special token, where a text has it, as text.

    Raises ValueError for a file that isn't a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a broken file
        raise ValueError(f"{path} can't be read as a tokenizer: {error}.") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tensors(path: Path, wanted: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The tensors of a file, which must have the names and shapes of `wanted` and be finite.

    Raises ValueError otherwise, and if the file's checksums don't fit them or the model's config.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(
            f"{path} can't be read as safetensors, it may be cut short or of another kind: {error}."
        ) from None
    of_tensors, _, of_config = header.get(CHECKSUMS, header.get(CHECKSUM, "")).partition(" ")
    if of_tensors and of_tensors != _checksum(tensors):
        raise ValueError(f"{path} is damaged: its tensors don't match its checksum. Restore it from a copy.")
    for name, tensor in wanted.items():
        if name not in tensors:
            raise ValueError(f"{path} has no tensor {name}: it belongs to another kind of model.")
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: {name} must be {sizes(tensor)}, and {sizes(tensors[name])} came: it "
                "belongs to a model of another size."
            )
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{path}: {name} has NaN or infinite entries.")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"{path} has a tensor {extra[0]} that the model has no place for.")
    if of_config and of_config != _config_checksum(config):
        raise ValueError(
            f"{path} belongs to a model of another config than {path.with_name('config.json')} describes. "
            "Restore both from one copy."
        )
    return tensors


def is_ours(header: Mapping[str, str] | None) -> bool:
    """Return True if a safetensors file's header says that this project, or an earlier version, wrote it."""
    header = header or {}
    return header.get("kind") == KIND or CHECKSUMS in header or CHECKSUM in header


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of this project's kind as a dictionary; ValueError otherwise."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that aren't UTF-8
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(found, dict) or found.pop("kind", None) != KIND:
        raise ValueError(f'{path} must be of the kind "{KIND}": it was written by something else.')
    return found


def check_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise ValueError if a file of a checkpoint isn't the one whose checksum `state.json` has."""
    for name, digest in digests.items():
        if file_digest(folder / name) != digest:
            raise ValueError(
                f"{folder / name} doesn't belong to this checkpoint: {folder / 'state.json'} has another "
                "checksum for it. Restore it from a copy, or start a new run in another --out."
            )


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it; raises OSError, which names the file."""
    with disk_errors(path), replacing(path) as file:
        file.write(content)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as one that names the path and says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = " Free some space on that disk and try again." if full else ""
        raise OSError(f"{path} can't be written: {error.strerror or error}.{advice}") from None


def _tensor_bytes(tensors: Mapping[str, Tensor], config: Config) -> bytes:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    # One entry only: safetensors writes several in random order, and equal runs have equal files.
    return as_bytes(dict(tensors), {CHECKSUMS: f"{_checksum(tensors)} {_config_checksum(config)}"})


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of contiguous tensors on the CPU: names, dtypes, shapes and numbers."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _config_checksum(config: Config) -> str:
    return hashlib.sha256(_json_bytes(asdict(config))).hexdigest()


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps({"kind": KIND, **content}, indent=2, ensure_ascii=False) + "\n").encode()


def _read_config(path: Path) -> Config:
    found = read_json(path)
    if found.keys() != {field.name for field in fields(Config)}:
        raise ValueError(
            f"{path} must give {', '.join(field.name for field in fields(Config))}, and it gives "
            f"{', '.join(found) or 'nothing'}."
        )
    try:
        return Config(**found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
