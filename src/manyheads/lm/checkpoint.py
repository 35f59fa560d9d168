"""The files of a model: `model.safetensors, config.json, tokenizer.json`, without pickle.

The folder of a training run also has `optimizer.safetensors, state.json`, the token files and the log. A run
on several processes writes the state of the optimizer by `torch.distributed.checkpoint`, as safetensors files
in the folder `optimizer-shards`, one for each process; any number of processes, also one, reads them.

The files of a checkpoint are consistent even if the process is killed while it writes them: they are written
to a temporary folder, the complete folder is renamed, and then the files are moved to their places. If the
process is killed before all are moved, the next process that opens the checkpoint moves the rest.

The header of each safetensors file has checksums of its tensors and of the model's config, to detect damaged
weights and mismatched configs. `state.json` has the checksum of every other file, to prevent resuming a run
with a file of a different run. Files of earlier versions have no checksums, and are read without checks.

Training doesn't overwrite files, except those of a run that it resumes. A lock prevents a second process from
training in the folder. The operating system releases it when the process ends.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from manyheads.lm.model import Config, LanguageModel
from manyheads.shapes import sizes
from manyheads.storage import folder_for, replacing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KIND = "manyheads-lm-1"
CHECKSUMS = "sha256-tensors-config"  # the header's entry with both checksums, separated by a space
CHECKSUM = "sha256"  # the entry of state.json with the checksums of files, and of earlier versions' headers
SHIPPED = Path(__file__).with_name("shipped")
OPTIMIZER = "optimizer.safetensors"
FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    OPTIMIZER,
    "state.json",
)
TRAINING, HELD_OUT, LOG = "train.npy", "held_out.npy", "log.jsonl"
RUN_FILES = (*FILES, TRAINING, HELD_OUT)  # the files that are needed to resume a run
SHARDS = "optimizer-shards"  # the folder that a run on several processes has in place of FILES[3]
# Folders inside the folder of a checkpoint. Their names are reserved: files inside them may be deleted.
WRITING, WRITTEN = ".manyheads-writing", ".manyheads-written"
LOCK = ".manyheads-lock"
RESTORE = "Restore it from a copy, or start a new run in a different --out."


def save(
    folder: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    optimizer: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Save a model and its tokenizer: all files or none, even if the process is killed.

    Args:
        folder: The folder. An earlier checkpoint in it is replaced.
        model: The model.
        tokenizer: Its tokenizer.
        optimizer: Tensors to resume training with, `[...]` by name, together with `state`.
        state: Plain values to resume training with.

    Raises:
        OSError: If a file can't be written. The earlier checkpoint is kept.
    """
    with writing(folder) as staging:
        contents = model_files(model.state_dict(), model.config, tokenizer)
        if optimizer is not None and state is not None:
            contents |= run_files(contents, {OPTIMIZER: tensor_bytes(optimizer, model.config)}, {}, state)
        write_files(staging, folder, contents)


def model_files(weights: Mapping[str, Tensor], config: Config, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the contents of the files of a model."""
    return {
        "model.safetensors": tensor_bytes(weights, config),
        "config.json": _json_bytes(asdict(config)),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
    }


def run_files(
    model: Mapping[str, bytes],
    optimizer: Mapping[str, bytes],
    shards: Mapping[str, str],
    state: Mapping[str, Any],
) -> dict[str, bytes]:
    """Return the contents of the other files of a run, given its shards' checksums by name."""
    files = {**model, **optimizer}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {**optimizer, "state.json": _json_bytes({**state, CHECKSUM: {**digests, **shards}})}


def write_files(staging: Path, folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files into the folder `staging`. Errors name them as those in `folder`."""
    for name, content in contents.items():
        with disk_errors(folder / name), replacing(staging / name) as file:
            file.write(content)


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder. If the block succeeds, its files replace those in `folder`, all or none."""
    finish_write(folder)
    staging = folder / WRITING
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with disk_errors(staging):
            staging.mkdir(parents=True)
        yield staging
        os.rename(staging, folder / WRITTEN)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # frees the space if the disk is full
        raise
    finish_write(folder)


def finish_write(folder: Path) -> None:
    """Move the files of a complete checkpoint to their places if a process was killed before moving them."""
    written = folder / WRITTEN
    if written.is_dir():
        # The optimizer's state of the earlier checkpoint, which may have had another number of processes.
        if (written / SHARDS).is_dir() or (written / OPTIMIZER).exists():
            _remove_shards(folder)
        if (written / SHARDS).is_dir():
            (folder / OPTIMIZER).unlink(missing_ok=True)
        for name in (*RUN_FILES, SHARDS):
            if (written / name).exists():
                os.replace(written / name, folder / name)
        written.rmdir()


def _remove_shards(folder: Path) -> None:
    """Remove the shards in a folder, and nothing else."""
    if (folder / SHARDS).is_dir():
        for path in (folder / SHARDS).glob("shard-*.safetensors"):
            path.unlink()
        (folder / SHARDS).rmdir()


def load(folder: str | os.PathLike[str] | None = None) -> tuple[LanguageModel, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        folder: The folder of a checkpoint, or None for the model that ships with manyheads.

    Returns:
        The model, on the CPU and in evaluation mode, and the tokenizer.

    Raises:
        FileNotFoundError: If the folder or a file in it is missing.
        ValueError: If the files aren't a checkpoint, or are damaged.
    """
    path = SHIPPED if folder is None else Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"Expected the folder of a model, got {path}, which isn't a folder.")
    for name in FILES[:3]:
        if not (path / name).is_file():
            raise FileNotFoundError(f"Expected {', '.join(FILES[:3])} in {path}, got no {name}.")
    config, tokenizer = read_config(path)
    model = LanguageModel(config)
    model.load_state_dict(read_tensors(path / "model.safetensors", model.state_dict(), config))
    return model.eval(), tokenizer


def read_config(folder: Path) -> tuple[Config, Tokenizer]:
    """Read the config and the tokenizer of a checkpoint.

    Args:
        folder: The folder.

    Returns:
        The config and the tokenizer.

    Raises:
        ValueError: If the two don't fit each other, or describe a model that is larger than its weights'
            file. This is checked before a model is built, to use no memory for invalid sizes.
    """
    config, tokenizer = _read_config(folder / "config.json"), read_tokenizer(folder / "tokenizer.json")
    if tokenizer.get_vocab_size() != config.vocab:
        raise ValueError(
            f"{folder}: config.json and tokenizer.json don't belong together: the model has "
            f"{config.vocab} tokens and the tokenizer {tokenizer.get_vocab_size()}. "
            "Restore both from the same copy."
        )
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    if config.parameter_count > size:  # a parameter takes at least one byte
        raise ValueError(
            f"{folder / 'config.json'} describes a model of {config.parameter_count:,} parameters, but "
            f"{weights} has only {size:,} bytes. Restore both from the same copy."
        )
    return config, tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer. It encodes the names of special tokens in a text as ordinary text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a plain Exception for a damaged file
        raise ValueError(f"{path} can't be read as a tokenizer: {error}. Restore it from a copy.") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tensors(path: Path, expected: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Args:
        path: The file.
        expected: Tensors with the expected names and shapes.
        config: The config of the model.

    Returns:
        The tensors by name.

    Raises:
        ValueError: If names, shapes or checksums differ, or a number isn't finite.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(
            f"{path} can't be read as safetensors: {error}. It may be truncated or have a different format. "
            "Restore it from a copy."
        ) from None
    of_tensors, _, of_config = header.get(CHECKSUMS, header.get(CHECKSUM, "")).partition(" ")
    if of_tensors and of_tensors != _checksum(tensors):
        raise ValueError(f"{path} is damaged: its tensors don't match its checksum. Restore it from a copy.")
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(f"{path} has no tensor {name}. Restore it and config.json from the same copy.")
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"Expected {name} in {path} to be {sizes(tensor)}, got {sizes(tensors[name])}. Restore it "
                "and config.json from the same copy."
            )
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{path}: {name} has NaN or infinite entries. Restore it from a copy.")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        raise ValueError(
            f"{path} has a tensor {unexpected[0]}, which the model doesn't have. Restore it and config.json "
            "from the same copy."
        )
    if of_config and of_config != _config_checksum(config):
        raise ValueError(
            f"{path} belongs to a model with a different config than {path.with_name('config.json')}. "
            "Restore both from the same copy."
        )
    return tensors


def is_ours(header: Mapping[str, str] | None) -> bool:
    """Return True if any version of manyheads wrote the safetensors file with this header."""
    header = header or {}
    return header.get("kind") == KIND or CHECKSUMS in header or CHECKSUM in header


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that manyheads wrote, or raise ValueError if it isn't one."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # invalid JSON, or bytes that aren't UTF-8
        raise ValueError(f"{path} can't be read as JSON: {error}. Restore it from a copy.") from None
    if not isinstance(content, dict) or content.pop("kind", None) != KIND:
        raise ValueError(
            f'Expected "kind": "{KIND}" in {path}, got a file that manyheads didn\'t write. Choose a '
            "folder of a model that manyheads saved."
        )
    return content


def check_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise ValueError if the checksum of a file of a checkpoint differs from that in `state.json`."""
    for name, digest in digests.items():
        if file_digest(folder / name) != digest:
            raise ValueError(
                f"{folder / name} doesn't belong to this checkpoint: {folder / 'state.json'} has a different "
                f"checksum for it. {RESTORE}"
            )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file. It replaces an earlier file only after it has been written completely."""
    with disk_errors(path), replacing(path) as file:
        file.write(content)


@contextmanager
def opened(path: Path, mode: str) -> Iterator[Callable[[bytes], None]]:
    """Open a file, and yield a function that appends bytes to it. Errors name the path."""
    with disk_errors(path):
        file = open(path, mode)  # noqa: SIM115 (closing it may raise, see below)

    def append(content: bytes) -> None:
        with disk_errors(path):
            file.write(content)
            file.flush()

    try:
        yield append
    finally:
        with disk_errors(path):  # closing retries the writes that failed, and may fail again
            file.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise the OSErrors of a block with a message that names the path and the fix."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "Free some space on that disk and try again."
            if full
            else "Choose a folder that you can write to."
        )
        raise OSError(f"{path} can't be written: {error.strerror or error}. {advice}") from None


def tensor_bytes(tensors: Mapping[str, Tensor], config: Config) -> bytes:
    """Return the content of a safetensors file, with checksums of its tensors and of the config."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    # Both checksums are in one entry. Several entries would be written in random order, but equal runs must
    # have equal files.
    return as_bytes(dict(tensors), {CHECKSUMS: f"{_checksum(tensors)} {_config_checksum(config)}"})


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of contiguous tensors on the CPU, with their names, dtypes and shapes."""
    checksum = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        checksum.update(tensor.flatten().view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _config_checksum(config: Config) -> str:
    return hashlib.sha256(_json_bytes(asdict(config))).hexdigest()


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps({"kind": KIND, **content}, indent=2, ensure_ascii=False) + "\n").encode()


def _read_config(path: Path) -> Config:
    content = read_json(path)
    names = [field.name for field in fields(Config)]
    if content.keys() != set(names):
        raise ValueError(f"Expected {', '.join(names)} in {path}, got {', '.join(content) or 'nothing'}.")
    try:
        return Config(**content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error} Restore it from a copy.") from None


# -- shards -----------------------------------------------------------------------------------------


def write_shards(staging: Path, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into shards, each process its own. All processes call it.

    Args:
        staging: The folder to write into.
        folder: The folder that errors name.
        tensors: Tensors by name, the same names in all processes: replicated, or sharded over the processes
            (`DTensor`).

    Raises:
        OSError: If a file can't be written, in every process.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(staging / SHARDS), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:
        with disk_errors(folder / SHARDS):
            raise _first_failure(error) from None


def shard_digests(staging: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of shards by their names."""
    return {f"{SHARDS}/{name}": file_digest(staging / SHARDS / name) for name in names}


def check_shards(folder: Path, names: Iterable[str], expected: Mapping[str, Tensor]) -> None:
    """Check that the shards of a folder have the expected tensors.

    Args:
        folder: The folder of the run.
        names: The names of the shards, relative to the folder.
        expected: Tensors with the expected names and shapes.

    Raises:
        FileNotFoundError: If a shard is missing.
        ValueError: If a shard can't be read, or names or shapes differ.
    """
    import torch.distributed.checkpoint as dcp

    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {name}, which --resume needs. {RESTORE}")
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path} can't be read as safetensors: {error}. It may be truncated. {RESTORE}"
            ) from None
    found = dcp.HuggingFaceStorageReader(str(folder / SHARDS)).read_metadata().state_dict_metadata
    for name, tensor in expected.items():
        size = list(getattr(found.get(name), "size", ()))
        if size != list(tensor.shape):
            raise ValueError(
                f"Expected {name} in {folder / SHARDS} to be {sizes(tensor)}, got {size or 'no tensor'}. "
                f"{RESTORE}"
            )


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read shards into tensors. If there is a process group, all its processes call it.

    Args:
        folder: The folder of the run.
        tensors: Tensors by name, replicated or sharded over the processes, whose entries are replaced.

    Raises:
        ValueError: If a number isn't finite, or a shard can't be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    reader = dcp.HuggingFaceStorageReader(str(folder / SHARDS))
    try:
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except dcp.CheckpointException as error:
        raise ValueError(f"{folder / SHARDS} can't be read: {_first_failure(error)}. {RESTORE}") from None
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.isfinite(local).all():
            raise ValueError(f"{folder / SHARDS}: {name} has NaN or infinite entries. {RESTORE}")


def _first_failure(error: Any) -> Exception:
    """Return the error of the first process that failed to write or read a checkpoint."""
    failure = next(iter(error.failures.values()))[0]
    return failure if isinstance(failure, Exception) else OSError(str(failure))


# -- the folder of a run ---------------------------------------------------------------------------


def check_vacant(folder: Path) -> None:
    """Raise FileExistsError if a folder has a run, or files that a new run would overwrite."""
    present = [name for name in (*RUN_FILES, SHARDS, LOG, WRITTEN) if os.path.lexists(folder / name)]
    missing = _missing(folder)
    if present and (not missing or WRITTEN in present):
        raise FileExistsError(
            f"{folder} already has a run ({present[0]}). Add --resume to continue it, or choose a different "
            "--out."
        )
    if present:
        raise FileExistsError(
            f"Training would overwrite {folder / present[0]}, and {folder} can't be resumed, as it has no "
            f"{missing[0]}. {RESTORE}"
        )


def check_complete(folder: Path) -> None:
    """Raise FileNotFoundError if a file that is needed to resume a run is missing."""
    missing = _missing(folder)
    if {*FILES} - {OPTIMIZER} <= {*missing}:
        raise FileNotFoundError(
            f"{folder} has no checkpoint to resume from. Start without --resume, or choose a different --out."
        )
    if missing:
        raise FileNotFoundError(f"{folder} has no {missing[0]}, which --resume needs. {RESTORE}")


def _missing(folder: Path) -> list[str]:
    has_shards = (folder / SHARDS).is_dir()
    names = [name for name in RUN_FILES if not (has_shards and name == OPTIMIZER)]
    return [name for name in names if not (folder / name).is_file()]


@contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create and lock a folder. If the block fails, remove those of the created folders that are empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with locked(folder_for(folder, "--out")):
            try:
                yield
            except BaseException:
                with suppress(OSError):
                    if new and os.listdir(folder) == [LOCK]:
                        (folder / LOCK).unlink()  # before unlocking: later it could be another process's lock
                raise
    except BaseException:
        with suppress(OSError):  # raised for the first folder that isn't empty
            for path in new:
                path.rmdir()
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, or raise BlockingIOError if another process or thread has locked it."""
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise BlockingIOError(
            f"Another process is training in {folder}. Wait until it ends, or choose a different --out."
        ) from None
