"""The folder of a training run: which files in it belong to the run, and which process writes them.

A marker file says that the folder holds a run. Without it, files of the run's names belong to somebody else
and are never touched. A lock, which the operating system releases when its process dies, keeps a second
process out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from manyheads.files import folder_for
from manyheads.lm import checkpoint

TRAINING, HELD_OUT, LOG = "train.npy", "held_out.npy", "log.jsonl"
MARKER, LOCK = ".manyheads-run", ".manyheads-lock"
MARKER_START = "This folder holds a run of `manyheads train`"
MARKER_TEXT = f"""{MARKER_START}, which replaces these files in it:
{" ".join((*checkpoint.FILES, TRAINING, HELD_OUT, LOG))}
"""


def check_vacant(folder: Path) -> None:
    """Raise FileExistsError if a folder holds a run, or files that a new run would overwrite."""
    names = [*checkpoint.FILES, checkpoint.WRITTEN]
    marked = is_marked(folder)
    if not marked:  # a run that died before its first checkpoint left the others, and would write them anew
        names += [TRAINING, HELD_OUT, LOG, MARKER]
    found = [name for name in names if os.path.lexists(folder / name)]
    if not found:
        return
    if not (marked or checkpoint.WRITTEN in found or _has_state(folder)):
        raise FileExistsError(_foreign(folder / found[0]))
    missing = _missing(folder)
    if missing and checkpoint.WRITTEN not in found:
        raise FileExistsError(
            f"{folder} holds a run that can't be resumed, as it has no {missing[0]}. Restore the file from a "
            "copy, or choose another --out."
        )
    raise FileExistsError(
        f"{folder} already holds a run ({found[0]}): add --resume to go on with it, or choose another --out."
    )


def check_complete(folder: Path) -> None:
    """Raise FileNotFoundError if a file is missing that resuming a run needs."""
    missing = _missing(folder)
    if set(checkpoint.FILES) <= set(missing):
        raise FileNotFoundError(
            f"{folder} has no checkpoint to resume from. Start without --resume, or choose another --out."
        )
    if missing:
        raise FileNotFoundError(
            f"{folder} has no {missing[0]}, which --resume needs. Restore the file from a copy, or start a "
            "new run in another --out."
        )


def _missing(folder: Path) -> list[str]:
    return [n for n in (*checkpoint.FILES, TRAINING, HELD_OUT) if not (folder / n).is_file()]


def _has_state(folder: Path) -> bool:
    """Return True if the folder has a run's state; runs of earlier versions have no marker."""
    try:
        checkpoint.read_json(folder / "state.json")
    except (OSError, ValueError):
        return False
    return True


def _foreign(path: Path) -> str:
    return (
        f"{path} wasn't written by manyheads, and training would overwrite it. Choose another --out, or move "
        "the file away."
    )


def is_marked(folder: Path) -> bool:
    """Return True if the folder's marker says that it holds a run."""
    marker = folder / MARKER
    return marker.is_file() and marker.read_bytes().startswith(MARKER_START.encode())


def mark(folder: Path) -> None:
    """Write the folder's marker; raises FileExistsError for a foreign file there, OSError from the disk."""
    if os.path.lexists(folder / MARKER) and not is_marked(folder):
        raise FileExistsError(_foreign(folder / MARKER))
    checkpoint.write(folder / MARKER, MARKER_TEXT.encode())


@contextmanager
def prepared(folder: Path) -> Iterator[Path]:
    """Mark a folder and yield an empty one in it for new files; if the block fails, nothing of both is left.

    Raises OSError from the disk.
    """
    part = folder / checkpoint.WRITING
    mark(folder)
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        (folder / LOG).unlink(missing_ok=True)
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for name in (TRAINING, HELD_OUT, MARKER):
            (folder / name).unlink(missing_ok=True)
        raise


@contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create a folder if there is none, and hold its lock.

    If the block fails, folders that were created and hold nothing else are removed. Raises BlockingIOError
    as `locked`, OSError from the disk.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with locked(folder_for(folder, "--out")):
            try:
                yield
            except BaseException:
                with suppress(OSError):
                    if made and os.listdir(folder) == [LOCK]:
                        (folder / LOCK).unlink()  # while it is held, so that it isn't another process's
                raise
    except BaseException:
        with suppress(OSError):  # the first that isn't empty
            for path in made:
                path.rmdir()
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; raises BlockingIOError if another process, or another thread, holds it."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"Another process is training in {folder}. Wait until it ends, or choose another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()
