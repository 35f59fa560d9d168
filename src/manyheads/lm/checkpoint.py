"""A model in a folder: `model.safetensors, config.json, tokenizer.json`; to go on training also
`optimizer.safetensors, state.json`. No pickle.

These files must fit each other even if the process is killed while it writes them. So they are
written into a folder beside them, that folder is renamed, which is the one moment that counts, and
then they are moved into place. Who comes later and finds the renamed folder finishes the moving.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from torch import Tensor

from manyheads.lm.model import Config, LanguageModel
from manyheads.shapes import sizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KIND = "manyheads-lm-1"
SHIPPED = Path(__file__).with_name("shipped")
FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "optimizer.safetensors",
    "state.json",
)
WRITING, WRITTEN = ".writing", ".written"


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
    from the disk.
    """
    settle(folder)
    part = folder / WRITING
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    (part / "model.safetensors").write_bytes(as_bytes(weights, {"kind": KIND}))
    _write_json(part / "config.json", {"kind": KIND, **asdict(model.config)})
    tokenizer.save(str(part / "tokenizer.json"))
    if optimizer is not None and state is not None:
        moments = {name: tensor.contiguous().cpu() for name, tensor in optimizer.items()}
        (part / "optimizer.safetensors").write_bytes(as_bytes(moments, {"kind": KIND}))
        _write_json(part / "state.json", {"kind": KIND, **state})
    for file in part.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    os.rename(part, folder / WRITTEN)
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
    from tokenizers import Tokenizer

    path = SHIPPED if folder is None else Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"a model is a folder, and there is no folder {path}.")
    for name in FILES[:3]:
        if not (path / name).is_file():
            raise FileNotFoundError(
                f"a model is a folder with {', '.join(FILES[:3])}, and {path} has no {name}."
            )
    config = _read_config(path / "config.json")
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception for a broken file
        raise ValueError(f"{path / 'tokenizer.json'} can't be read as a tokenizer: {error}.") from None
    if tokenizer.get_vocab_size() != config.vocab:
        raise ValueError(
            f"{path}: config.json and tokenizer.json don't belong together, the model knows "
            f"{config.vocab} tokens and the tokenizer {tokenizer.get_vocab_size()}."
        )
    model = LanguageModel(config)
    model.load_state_dict(read_tensors(path / "model.safetensors", model.state_dict()))
    return model.eval(), tokenizer


def read_tensors(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, which must have the names and shapes of `wanted` and be finite."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} can't be read as safetensors, it may be cut short or of another kind: {error}."
        ) from None
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
    return tensors


def tensor_names(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file; ValueError if it isn't one."""
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ValueError(
            f"{path} can't be read as safetensors, it may be cut short or of another kind: {error}."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of this project's kind as a dictionary; ValueError otherwise."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # broken JSON, or bytes that aren't UTF-8
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(found, dict) or found.pop("kind", None) != KIND:
        raise ValueError(f'{path} must be of the kind "{KIND}": it was written by something else.')
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, put: Callable[[Path], object]) -> None:
    """Let `put` write a temporary file, then rename it to `path`."""
    part = path.with_name(path.name + ".part")
    put(part)
    os.replace(part, path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


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
