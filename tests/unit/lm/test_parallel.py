"""Training on several processes: the losses of one, checkpoints for any number, a sentence for each fault."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyheads import lm
from manyheads.distributed import processes
from manyheads.distributed.processes import Group
from manyheads.lm import checkpoint, data, parallel
from manyheads.lm.checkpoint import LOG, OPTIMIZER, SHARDS
from manyheads.lm.train import Run, held_out_loss
from tests.waiting import wait_until

training = sys.modules["manyheads.lm.train"]

GIVEN: dict[str, Any] = {
    "steps": 9,
    "context": 32,
    "seed": 3,
    "device": "cpu",
    "vocab_size": 301,  # odd sizes: shards of different lengths
    "layers": 2,
    "heads": 2,
    "embed": 24,
    "hidden": 31,
    "batch_size": 8,
    "repeated": 1,
    "dropout": 0.1,
    "save_every": 4,
    "log_every": 1,
    "evaluate_every": 5,
}
# Differences of losses in nats, between orders of additions in float32.
ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "autocast_dtype", lambda device: None)


def curve(folder: Path) -> tuple[list[float], list[float], float]:
    """Return the losses and gradient norms of a log, and the last held-out loss."""
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    return (
        [line["loss"] for line in lines],
        [line["gradient_norm"] for line in lines],
        lines[-1]["held_out_loss"],
    )


def same_curve(one: Path, other: Path) -> None:
    """Assert that two runs are equal except for rounding: their losses, gradients, and last logits."""
    for mine, theirs, rounding in zip(curve(one), curve(other), (ROUNDING, 3e-4, ROUNDING), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=rounding)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        logits = [lm.load(folder)[0](ids) for folder in (one, other)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


# -- parts -------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_the_parts_of_all_processes_are_the_batch(size: int, accumulate: int, rows: int) -> None:
    total = rows * size * accumulate
    parts = [part for r in range(size) for part in parallel.parts_of(total, Group(r, size), accumulate)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(total))
    assert [part.is_last for part in parts] == ([False] * (accumulate - 1) + [True]) * size
    assert all(part.rows == total for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_a_part_is_that_of_the_whole_batch(dtype: torch.dtype) -> None:
    x = torch.randn(6, 40, 24).to(dtype)
    torch.manual_seed(7)
    expected = [F.dropout(x, 0.3), F.dropout(x, 0.3)]
    dropout = parallel.BatchDropout(0.3)
    for part in parallel.parts_of(6, Group(1, 3), 1):
        dropout.part = part
    torch.manual_seed(7)
    for whole in expected:
        torch.testing.assert_close(
            dropout(x[2:4]), whole[2:4], rtol=0.01 if dtype != torch.float32 else 0, atol=0
        )
    dropout.eval()
    assert torch.equal(dropout(x[2:4]), x[2:4])


def test_every_dropout_of_a_model_is_replaced() -> None:
    model = lm.LanguageModel(lm.Config(300, 24, 2, 2, 31, 32), 0.1)
    replaced = parallel.use_batch_dropout(model)
    assert len(replaced) == 3
    assert all(type(module) is not nn.Dropout for module in model.modules())


def test_accumulated_gradients_are_those_of_the_batch(text: Path, tmp_path: Path) -> None:
    for accumulate in (1, 2, 8):
        lm.train(tmp_path / str(accumulate), GIVEN | {"accumulate": accumulate}, [text])
        same_curve(tmp_path / "1", tmp_path / str(accumulate))


def test_accumulate_may_change_when_a_run_is_resumed(text: Path, tmp_path: Path) -> None:
    lm.train(tmp_path / "one", GIVEN, [text])
    lm.train(tmp_path / "run", GIVEN | {"steps": 4, "schedule_steps": 9}, [text])
    run = lm.train(tmp_path / "run", {"steps": 9, "accumulate": 4}, resume=True)
    assert run.options.accumulate == 4
    same_curve(tmp_path / "one", tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 3}, "Expected batch_size to be a multiple of 3 .* got 8"),
        ({"accumulate": 0}, "Expected accumulate to be at least 1, got 0"),
        ({"accumulate": 9}, "Expected accumulate to be .* 8, got 9"),
    ],
)
def test_parts_that_do_not_divide_the_batch(
    text: Path, tmp_path: Path, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lm.train(tmp_path / "run", GIVEN | options, [text])
    assert not (tmp_path / "run").exists()


def test_one_process_has_nothing_to_shard(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected --shard with several processes, got one"):
        lm.train(tmp_path / "run", GIVEN, [text], shard=True)


def test_memory_is_counted_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    options = lm.Options(**GIVEN | {"device": "cpu"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    parameters = 16 * options.config(301).parameter_count
    logits = 8 * 8 * 32 * 301  # of all processes
    for shards, needed in ((1, 2 * parameters + logits), (2, parameters + logits)):
        memory = type("Memory", (), {"total": needed})
        monkeypatch.setattr(training.psutil, "virtual_memory", lambda memory=memory: memory)
        options.check_memory(301, 2, shards)
        memory.total = needed - 2  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="of memory, but cpu has"):
            options.check_memory(301, 2, shards)


# -- several processes -------------------------------------------------------------------------------


def work(rank: int, size: int, port: int, function: Callable[..., None], *arguments: object) -> None:
    """Run a function in one of several processes."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", port)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    training.autocast_dtype = lambda device: None  # type: ignore[attr-defined]
    training.find_spec = lambda name: None  # type: ignore[attr-defined] # without TensorBoard
    with processes.join(timeout=120) as group:
        function(group, *arguments)


def run_in(size: int, function: Callable[..., None], *arguments: object) -> None:
    """Run a function in several processes; raise an error if one fails."""
    with closing(socket.socket()) as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    torch.multiprocessing.spawn(work, (size, port, function, *arguments), nprocs=size)


def train_in_several(group: Group, folder: Path, text: Path) -> None:
    """Train in several ways, resume what others have trained, and meet faults."""
    lm.train(folder / "replicated", GIVEN, [text])
    run = lm.train(folder / "sharded", GIVEN | {"accumulate": 2}, [text], shard=True)
    assert all(type(p).__name__ == "DTensor" for p in run.model.parameters())
    # Checkpoints of one process, and of a different kind.
    lm.train(folder / "from-one", {"steps": 9}, resume=True)
    lm.train(folder / "from-one-sharded", {"steps": 9}, resume=True, shard=True)
    lm.train(folder / "both", GIVEN | {"steps": 4, "schedule_steps": 9}, [text])
    lm.train(folder / "both", {"steps": 6}, resume=True, shard=True)
    lm.train(folder / "both", {"steps": 9}, resume=True)
    lm.train(folder / "to-one", GIVEN | {"steps": 4, "schedule_steps": 9}, [text], shard=True)
    # Each process evaluates some of the windows.
    model, _ = lm.load(folder / "sharded")
    ids = data.read_tokens(folder / "sharded" / checkpoint.HELD_OUT)
    whole, shared = held_out_loss(model, ids), held_out_loss(model, ids, group=group)
    assert shared == pytest.approx(whole, rel=1e-6)

    def fails(error: type[Exception], message: str, **changes: Any) -> None:
        out = changes.pop("out", "damaged")
        with pytest.raises(error, match=message):
            lm.train(folder / out, changes.pop("given", {"steps": 12}), changes.pop("paths", ()), **changes)
        group.wait()

    fails(FileExistsError, "already has a run", out="replicated", given=GIVEN)
    fails(ValueError, "--seed 3, with which the run", given={"seed": 4}, resume=True, out="replicated")
    fails(ValueError, "a multiple of 6", given=GIVEN | {"accumulate": 3}, out="new", paths=[text])
    fails(ValueError, "different text than --data", paths=[text / "1.txt"], resume=True, out="replicated")
    # A stop request that reaches one process only.
    advance = Run.advance

    def stopped(run: Run) -> tuple[float, float]:
        if run.step == 6 and group.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return advance(run)

    Run.advance = stopped  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        lm.train(folder / "stopped", GIVEN, [text])
    Run.advance = advance  # type: ignore[method-assign]
    assert checkpoint.read_json(folder / "stopped" / "state.json")["step"] == 7
    lm.train(folder / "stopped", resume=True)
    # A full disk, in one process and in the other.
    from torch.distributed.checkpoint.filesystem import FileSystem

    before = (folder / "damaged" / "state.json").read_bytes()
    create, write_files = FileSystem.create_stream, checkpoint.write_files

    def full(*arguments: object, **more: object) -> Any:
        if group.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(*arguments, **more)  # type: ignore[arg-type]

    def full_first(staging: Path, folder: Path, contents: Any) -> None:
        with checkpoint.disk_errors(folder / "model.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    FileSystem.create_stream = full  # type: ignore[method-assign, assignment]
    fails(OSError, f"damaged/{SHARDS} can't be written: No space left", resume=True)
    FileSystem.create_stream = create  # type: ignore[method-assign]
    checkpoint.write_files = full_first
    fails(OSError, "damaged/model.safetensors can't be written: No space left", resume=True)
    checkpoint.write_files = write_files
    assert (folder / "damaged" / "state.json").read_bytes() == before
    assert not (folder / "damaged" / checkpoint.WRITING).exists()
    # Shards that are missing, cut short, and of a different checkpoint.
    shard = sorted((folder / "damaged" / SHARDS).iterdir())[-1]
    content = shard.read_bytes()
    group.wait()
    for change, error, message in (
        (None, FileNotFoundError, f"has no {SHARDS}/{shard.name}, which --resume needs"),
        (content[:-5], ValueError, f"{shard.name} can't be read as safetensors: .*may be truncated"),
        (content[:-5] + b"12345", ValueError, f"{shard.name} doesn't belong to this checkpoint"),
    ):
        if group.is_first:
            shard.unlink(missing_ok=True) if change is None else shard.write_bytes(change)
        group.wait()
        fails(error, message, resume=True)


@pytest.mark.full
def test_several_processes_train_as_one(text: Path, tmp_path: Path) -> None:
    """In a single start of two processes, because a start takes seconds."""
    lm.train(tmp_path / "one", GIVEN, [text])
    half = GIVEN | {"steps": 4, "schedule_steps": 9}
    for name in ("from-one", "from-one-sharded"):
        lm.train(tmp_path / name, half, [text])
    lm.train(tmp_path / "base", half, [text])
    (tmp_path / "damaged").mkdir()  # a run of two processes, which the processes damage
    run_in(2, train_and_copy, tmp_path, text)
    for name in ("replicated", "sharded", "from-one", "from-one-sharded", "both", "stopped"):
        same_curve(tmp_path / "one", tmp_path / name)
        names = {path.name for path in (tmp_path / name).iterdir()}
        expected = {*checkpoint.RUN_FILES, SHARDS, LOG, checkpoint.LOCK} - {OPTIMIZER}
        assert names == expected, name
        assert len(list((tmp_path / name / SHARDS).iterdir())) == 2
    # Shards are resumed by one process, whose checkpoint has none.
    lm.train(tmp_path / "to-one", {"steps": 9}, resume=True)
    same_curve(tmp_path / "one", tmp_path / "to-one")
    assert not (tmp_path / "to-one" / SHARDS).exists()
    assert (tmp_path / "to-one" / OPTIMIZER).exists()
    with pytest.raises(ValueError, match="doesn't belong to this checkpoint"):
        lm.train(tmp_path / "damaged", {"steps": 12}, resume=True)
    # Another start, of more processes than some parameters have rows.
    lm.train(tmp_path / "small", GIVEN | {"heads": 1, "embed": 4, "hidden": 2}, [text])
    run_in(4, train_small, tmp_path, text)
    same_curve(tmp_path / "small", tmp_path / "small-sharded")


def train_and_copy(group: Group, folder: Path, text: Path) -> None:
    if group.is_first:
        (folder / "damaged").rmdir()
    group.wait()
    lm.train(folder / "damaged", GIVEN, [text])
    train_in_several(group, folder, text)


def train_small(group: Group, folder: Path, text: Path) -> None:
    small = GIVEN | {"heads": 1, "embed": 4, "hidden": 2, "steps": 5, "schedule_steps": 9}
    lm.train(folder / "small-sharded", small, [text], shard=True)
    lm.train(folder / "small-sharded", {"steps": 9}, resume=True, shard=True)


# -- the command -------------------------------------------------------------------------------------


def test_the_command_checks_the_number_of_processes(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, errors = command("train", "--out", "run", "--processes", "0")
    assert (code, errors) == (2, "manyheads: Expected processes to be at least 1, got 0.\n")


COMMAND = [sys.executable, "-m", "manyheads", "train"]
TINY = ("--context", 32, "--vocab-size", 300, "--layers", 1, "--heads", 1, "--embed", 8)


def start(*words: object) -> subprocess.Popen[str]:
    """Start the training of two processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, *map(str, words), "--processes", "2"], env=environment, stderr=subprocess.PIPE, text=True
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the two processes that a command has started."""
    found: list[psutil.Process] = []

    def both() -> bool:
        assert launcher.poll() is None, launcher.communicate()
        found[:] = psutil.Process(launcher.pid).children()
        return len(found) == 2

    wait_until(both)
    return found


def step_of(folder: Path) -> int:
    """Return the step of the last checkpoint, −1 without one."""
    try:
        return int(json.loads((folder / "state.json").read_text())["step"])
    except (OSError, ValueError):
        return -1


@pytest.mark.parametrize(
    "kills",
    [pytest.param(1, marks=pytest.mark.full), pytest.param(20, marks=pytest.mark.exhaustive)],
)
def test_killed_and_interrupted_runs_end_with_a_sentence_and_resume(
    text: Path, tmp_path: Path, kills: int
) -> None:
    """Killed at any step, by turns while training and while starting; the end is that of an unkilled run."""
    out, rng = tmp_path / "run", np.random.default_rng(kills)
    for kill in range(kills):
        launcher = start("--out", out, *(["--resume"] if kill else new(text)))
        processes = ranks_of(launcher)
        if kill % 2 == 0:
            reach(launcher, out, step_of(out) + 100)
        time.sleep(rng.uniform(0, 2))
        processes[rng.integers(2)].kill()
        _, errors = launcher.communicate(timeout=300)
        said = [line for line in errors.splitlines() if line.startswith("manyheads")]
        assert launcher.returncode == 2, errors
        assert len(said) == 1, errors
        assert re.match(
            r"manyheads: The process of rank [01] was killed \(SIGKILL\), and the others", said[0]
        )
        assert "Traceback" not in errors
        assert not any(process.is_running() for process in processes)
    other = tmp_path / "other"
    launcher = start("--out", other, *new(text))
    processes = ranks_of(launcher)
    reach(launcher, other, 100)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 130
    assert f"stopped and saved at step {step_of(other)}; continue with --resume\n" in errors
    assert not any(process.is_running() for process in processes)
    steps = max(step_of(out), step_of(other)) + 20
    for folder in (out, other):
        launcher = start("--out", folder, "--resume", "--steps", steps)
        _, errors = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, errors
        assert step_of(folder) == steps
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert lm.load(out)[0].config.embed == 8


def new(text: Path) -> tuple[object, ...]:
    """Return the options of a new run, which is never finished."""
    return ("--data", text, *TINY, "--device", "cpu", "--steps", 100_000)


def reach(launcher: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until a run has a checkpoint of this step, or a later one."""
    wait_until(lambda: step_of(folder) >= step or launcher.poll() is not None)
    assert launcher.poll() is None, launcher.communicate()
