"""The folder of a run: other files are kept, and damage is found before training."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from manyheads import lm
from manyheads.lm import checkpoint, data
from manyheads.lm.checkpoint import HELD_OUT, LOCK, LOG, TRAINING, locked

training = sys.modules["manyheads.lm.train"]

GIVEN: dict[str, Any] = {
    "steps": 5,
    "context": 32,
    "device": "cpu",
    "vocab_size": 300,
    "layers": 2,
    "heads": 2,
    "embed": 16,
    "save_every": 2,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def finished(train: Callable[[dict[str, Any]], Path]) -> Path:
    return train(GIVEN)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


Command = Callable[..., tuple[int, str, str]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Files of other programs


@pytest.mark.parametrize("name", [*checkpoint.FILES, TRAINING, HELD_OUT, LOG])
def test_files_of_the_same_name_are_not_touched(
    text: Path, tmp_path: Path, command: Command, name: str
) -> None:
    (tmp_path / name).write_text("another program's file")
    before = contents(tmp_path)
    code, _, err = command("train", "--out", tmp_path, "--data", text, "--steps", 1, "--context", 32)
    assert code == 2
    assert f"Training would overwrite {tmp_path / name}" in err
    assert err.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [*checkpoint.FILES, TRAINING, HELD_OUT])
def test_a_missing_file_is_named(run: Path, text: Path, command: Command, name: str) -> None:
    (run / name).unlink()
    before = contents(run)
    for words in (["--resume"], ["--data", text]):
        code, _, err = command("train", "--out", run, *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert f"has no {name}" in err
        assert "a different --out" in err
        assert "add --resume" not in err
        assert "without --resume" not in err
    assert contents(run) == before


def test_other_files_in_the_folder_stay(text: Path, tmp_path: Path) -> None:
    for folder in (".writing", ".written"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes.txt").write_text("another program's file")
    (tmp_path / "train.npy.part").write_text("another program's file")
    before = contents(tmp_path)
    lm.train(tmp_path, GIVEN, [text])
    lm.train(tmp_path, {"steps": 6}, resume=True)
    assert before.items() <= contents(tmp_path).items()


def test_a_start_that_fails_leaves_nothing(text: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "bad").mkdir()
    shutil.copytree(text, tmp_path / "bad" / "text")
    (tmp_path / "bad" / "z.txt").write_bytes(b"good \xff")
    out = tmp_path / "new" / "run"
    code, _, err = command("train", "--out", out, "--data", tmp_path / "bad")
    assert (code, err.splitlines()[-1:]) == (2, [line for line in err.splitlines() if "byte 5 of" in line])
    assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)  # this one it didn't create
    assert command("train", "--out", out, "--data", tmp_path / "bad")[0] == 2
    assert set(contents(out)) <= {LOCK}
    assert command("train", "--out", out, "--data", text, "--steps", 1, "--context", 32)[0] == 0


def test_a_run_killed_before_its_first_checkpoint_starts_again(text: Path, tmp_path: Path) -> None:
    (tmp_path / checkpoint.WRITING).mkdir()
    (tmp_path / checkpoint.WRITING / TRAINING).write_text("half of it")
    (tmp_path / checkpoint.WRITING / "model.safetensors").write_bytes(b"\0")
    lm.train(tmp_path, GIVEN, [text])
    assert set(contents(tmp_path)) == {*checkpoint.FILES, TRAINING, HELD_OUT, LOG, LOCK}


def test_a_run_of_an_earlier_version_resumes(run: Path) -> None:
    """It has no checksums, and earlier names of the options."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        save_file(load_file(run / name), run / name, {"kind": checkpoint.KIND})
    state = json.loads((run / "state.json").read_text())
    options = state["options"]
    for old, new in training.RENAMED.items():
        options[old] = options.pop(new)
    del options["schedule_steps"], state["sha256"]
    (run / "state.json").write_text(json.dumps(state))
    lm.load(run)
    assert lm.train(run, {"steps": 6}, resume=True).step == 6


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path, command: Command) -> None:
    (tmp_path / LOG).write_text("another program's file")
    code, _, err = command("train", "--out", tmp_path, "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert contents(tmp_path) == {LOG: b"another program's file"}


# Two processes

HOLD = """
import sys, time
from pathlib import Path
from manyheads.lm.checkpoint import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_locked_out_until_the_first_ends(text: Path, run: Path, command: Command) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        before = contents(run)
        for words in (["--resume", "--steps", 9], ["--data", text]):
            code, _, err = command("train", "--out", run, *words)
            assert (code, err.count("\n")) == (2, 1)
            assert "Another process is training" in err or "already has a run" in err
        assert contents(run) == before
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    assert command("train", "--out", run, "--resume", "--steps", 6)[0] == 0


def test_two_starts_in_one_empty_folder(text: Path, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(BlockingIOError, match="Another process is training"):
        lm.train(tmp_path, GIVEN, [text])
    assert set(contents(tmp_path)) == {LOCK}


# Damage


def damage(path: Path) -> None:
    """Change 64 bytes of the tensors, so that they stay finite."""
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for place in rng.integers(len(content) // 2, len(content), 64):
        content[place - place % 4] ^= 0x55  # the lowest byte of a little-endian float
    path.write_bytes(content)


@pytest.fixture(scope="module")
def other(train: Callable[[dict[str, Any]], Path]) -> Path:
    """A finished run of the same sizes from another seed."""
    return train(GIVEN | {"seed": 1})


def assert_not_resumed(command: Command, run: Path, words: str) -> None:
    """Assert that resuming raises an error with these words, in one line, and changes nothing."""
    before = contents(run)
    code, out, err = command("train", "--out", run, "--resume", "--steps", 9)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err
    assert not re.search(r"[A-Z][a-z]+Error|__", err)
    assert contents(run) == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_file_of_another_run_is_not_resumed(run: Path, other: Path, command: Command, name: str) -> None:
    shutil.copy(other / name, run / name)
    assert_not_resumed(command, run, f"{run / name} doesn't belong to this checkpoint")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_step(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: t - 1 if name.endswith("/step") else t for name, t in tensors.items()}, path)


def swap_ids(path: Path) -> None:
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokenizer))


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; those of the options one by one."""
    content = json.loads(path.read_text())
    if fields.get("options"):
        fields["options"] = content["options"] | fields["options"]
    path.write_text(json.dumps(content | fields))


STATES: list[dict[str, Any]] = [
    {"step": -1}, {"step": 1.5}, {"seconds": "long"}, {"facts": {}}, {"options": []},
    *({"options": options} for options in (
        {"steps": -3}, {"no_such": 1}, {"learning_rate": 1e300}, {"learning_rate": 10**400},
        {"decay": 1e300}, {"schedule_steps": 10**400},
    )),
]  # fmt: skip
CONTENTS = (b"", b"\n", b"{}", b"[]", b"\xff\n", b'{"step": "x"}\n', b"[" * 10**5, b"null\n")
VALID_LOGS = (b"", b"{}", b"[]", b"[" * 10**5)  # an empty one, and a last line that was cut short
DAMAGED: list[tuple[str, Callable[[Path], Any], str]] = [
    ("model.safetensors", damage, " is damaged"),
    ("tokenizer.json", swap_ids, " doesn't belong to this checkpoint"),
    ("config.json", lambda path: edit(path, heads=1), ""),  # tensors have the same shapes
    *(("optimizer.safetensors", change, "") for change in (damage, truncate, change_step, Path.unlink)),
    ("optimizer.safetensors", lambda path: save_file({}, path), ""),
    ("optimizer.safetensors", lambda path: path.write_bytes(b""), ""),
    *(("state.json", lambda path, fields=fields: edit(path, **fields), "") for fields in STATES),
    *((name, lambda path, content=content: path.write_bytes(content), "")
      for name in ("tokenizer.json", "config.json", "state.json", LOG)
      for content in CONTENTS if name != LOG or content not in VALID_LOGS),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), DAMAGED)
def test_a_damaged_file_is_named(
    run: Path, command: Command, name: str, change: Callable[[Path], Any], words: str
) -> None:
    change(run / name)
    assert_not_resumed(command, run, f"{name}{words}")
    if name in ("model.safetensors", "config.json"):
        code, out, err = command("generate", "A", "--model", run)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{name}{words}" in err


@pytest.mark.parametrize("header", [None, {"sha256": True}])
def test_weights_of_an_earlier_version_load(run: Path, header: dict[str, bool] | None) -> None:
    """They have no checksum, or one of the tensors only."""
    tensors = load_file(run / "model.safetensors")
    checksum = checkpoint._checksum(tensors)
    save_file(tensors, run / "model.safetensors", header and {"sha256": checksum})
    lm.load(run)
    if header:
        damage(run / "model.safetensors")
        with pytest.raises(ValueError, match="is damaged"):
            lm.load(run)


@pytest.mark.parametrize(
    "change",
    [{"layers": 10**9}, {"hidden": 10**12}, {"embed": 16 * 10**6}, {"context": 10**12}, {"layers": 10**400}],
)
def test_a_config_of_absurd_size_raises_before_a_model_is_built(
    run: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    edit(run / "config.json", **change)
    monkeypatch.setattr(checkpoint, "LanguageModel", pytest.fail)
    monkeypatch.setattr(training, "LanguageModel", pytest.fail)
    for call in (lambda: lm.load(run), lambda: lm.train(run, {"steps": 9}, resume=True)):
        with pytest.raises(ValueError, match=r"config\.json"):
            call()


# A full disk


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_named_while_tokens_are_written() -> None:
    with (
        pytest.raises(OSError, match=r"^/dev/full can't be written: No space left on device\. Free"),
        data.token_file(Path("/dev/full"), np.dtype(np.uint16)) as append,
    ):
        append(np.zeros(100_000, np.uint16))


@pytest.mark.parametrize("name", checkpoint.FILES)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_that_fills_while_a_checkpoint_is_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, name: str, nth: int
) -> None:
    """The last checkpoint stays, nothing unfinished does, and with some space the run goes on."""
    real, left = checkpoint.replacing, [nth]

    @contextmanager
    def replacing(path: Path) -> Iterator[BinaryIO]:
        with real(path) as file:
            yield file
            if path.name == name:
                left[0] -= 1
                if not left[0]:
                    file.truncate(file.tell() // 2)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "run"
    words = ["train", "--out", out, "--data", text, "--steps", 2, "--context", 32, "--embed", 24]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "replacing", replacing)
        code, _, err = command(*words)
    assert code == 2
    said = [line for line in err.splitlines() if line.startswith("manyheads:")]
    assert said == [
        f"manyheads: {out / name} can't be written: No space left on device. Free some space on that disk "
        "and try again."
    ]
    assert not (out / checkpoint.WRITING).exists()
    if nth == 1:  # no checkpoint yet: what was prepared is gone too
        assert not out.exists()
        assert command(*words)[0] == 0
    else:
        lm.load(out)
        assert command("train", "--out", out, "--resume")[0] == 0
    assert checkpoint.read_json(out / "state.json")["step"] == 2


# Going on, sizes, and what is said


def test_a_finished_run_continues(run: Path, text: Path, tmp_path: Path, command: Command) -> None:
    """Bit for bit like a single run whose schedule ended earlier."""
    code, _, err = command("train", "--out", run, "--resume", "--steps", 8)
    assert code == 0
    assert "schedule up to step 5, then stays at 0.0001" in re.sub(r"\s+", " ", err)
    lm.train(tmp_path / "whole", GIVEN | {"steps": 8, "schedule_steps": 5}, [text])
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rates = [json.loads(line)["rate"] for line in (run / LOG).read_text().splitlines()]
    assert rates[-3:] == [0.0001] * 3


def test_a_loss_of_nan_suggests_a_lower_learning_rate(
    text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.Run, "advance", lambda run: (float("nan"), 1.0))
    code, _, err = command("train", "--out", tmp_path / "run", "--data", text, "--context", 32)
    assert code == 2
    assert "at step 0. Start again in a different --out with a lower --learning-rate than 0.002" in err


def test_sizes_are_options(text: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    words = "--layers 1 --heads 2 --embed 16 --hidden 24 --vocab-size 280 --batch-size 3 --learning-rate 0.01"
    words += " --steps 2 --context 32"
    assert command("train", "--out", out, "--data", text, *words.split())[0] == 0
    assert lm.load(out)[0].config == lm.Config(280, embed=16, heads=2, layers=1, hidden=24, context=32)
    options = json.loads((out / "state.json").read_text())["options"]
    assert (options["batch_size"], options["learning_rate"]) == (3, 0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", 0], "Expected steps to be at least 1"),
        (["--context", 1], "Expected context to be at least 2"),
        (["--seed", -1], "Expected seed to be at least 0"),
        (["--device", "toaster"], "got 'toaster'"),
        (["--device", "cuda:99"], "got 'cuda:99'"),
        (["--device", "meta"], "got 'meta'"),
        (["--device", "meta:0"], "got 'meta:0'"),
        (["--device", "hpu"], "got 'hpu'"),
        (["--device", "privateuseone"], "got 'privateuseone'"),
        (["--seed", 1 << 64], f"Expected seed to be below 2^64, got {1 << 64}."),
        (["--resume"], "no checkpoint to resume from. Start without --resume"),
        (["--data", "nowhere"], "got nowhere, which is missing"),
        (["--layers", 0], "Expected layers to be at least 1"),
        (["--heads", 5], "heads = 5"),
        (["--embed", -4], "Expected embed to be at least 1"),
        (["--hidden", 0], "Expected hidden to be at least 1"),
        (["--vocab-size", 256], "Expected --vocab-size to be at least 257"),
        (["--batch-size", 0], "Expected --batch-size to be at least 1"),
        (["--learning-rate", 0], "Expected --learning-rate to be a positive number"),
        (["--learning-rate", "nan"], "Expected --learning-rate to be a positive number"),
        (["--learning-rate", 1e300], "Expected --learning-rate to be a positive number of at most 1"),
        (["--vocab-size", 2**32], "Expected --vocab-size to be at most 1048576"),
        (["--vocab-size", 10**25], "Expected --vocab-size to be at most 1048576"),
        (["--steps", 10**10], "Expected steps to be at most 1000000000"),
        (["--embed", 12 * 10**9], "smaller model"),
        (["--layers", 10**12], "smaller model"),
        (["--batch-size", 10**12], "smaller model"),
        (["--context", 10**12], "context to be at most"),
        (["--context", 10**6], "smaller --context"),
    ],
)
def test_invalid_options_raise_before_the_text_is_read(
    text: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: list[object],
    said: str,
) -> None:
    monkeypatch.setattr(data.TextFiles, "__iter__", pytest.fail)
    code, _, err = command("train", "--out", tmp_path / "run", "--data", text, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert not (tmp_path / "run").exists()


def test_out_is_checked_before_the_text_is_read(
    text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.TextFiles, "__iter__", pytest.fail)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, err = command("train", "--out", out, "--data", text)
        assert (code, err.count("\n")) == (2, 1)


def test_the_help_shows_the_defaults(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    printed = " ".join(command("train", "--help")[1].split())
    options = lm.Options()
    for name in ("steps", "context", "layers", "heads", "embed", "vocab_size", "batch_size", "learning_rate"):
        option = "--" + name.replace("_", "-")
        entry = printed.partition(f" {option} ")[2]
        assert entry.partition("[default: ")[2].startswith(f"{getattr(options, name)}]"), option


def test_a_run_prints_how_to_try_its_model(text: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "a [b] run"
    code, _, err = command("train", "--out", out, "--data", text, "--steps", 1, "--context", 32)
    assert code == 0
    assert "nan" not in err
    advice = err.splitlines()[-1]
    assert str(out) in advice
    words = shlex.split(advice.partition("try it with: manyheads ")[2])
    code, printed, _ = command(*words)
    assert code == 0
    assert printed.startswith("A")


def test_an_end_token_in_a_text_is_encoded_as_text(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(9):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} before {data.END} after " * 20)
    out = tmp_path / "run"
    lm.train(out, GIVEN | {"steps": 1}, [tmp_path / "text"])
    tokenizer = lm.load(out)[1]
    ids = np.concatenate([data.read_tokens(out / name) for name in (TRAINING, HELD_OUT)])
    assert (ids == data.END_ID).sum() == 9 + 2
    assert tokenizer.decode(ids.tolist()).count(data.END) == 9 * 20
    for loaded in (tokenizer, lm.load()[1]):
        assert data.END_ID not in loaded.encode(f"a {data.END} b").ids


def test_generate_prints_pieces_as_they_are_generated(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lm.complete(*lm.load(run), "The", 20, lm.Sampling(), seed=1)
    flushed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *words, **how: flushed.append((words, how)))  # type: ignore
    assert command("generate", "The", "--model", run, "--tokens", 20, "--seed", 1)[0] == 0
    printed = [words[0] for words, how in flushed if how.get("flush")]  # type: ignore[attr-defined]
    assert printed[0] == "The"
    assert "".join(printed[1:]) == whole.text
    assert len(printed) > 3


def test_reading_text_takes_little_memory(tmp_path: Path) -> None:
    """Of 60 MB, a few are in memory at a time."""
    line = "some words that are said again and again, line by line\n"
    with open(tmp_path / "long.txt", "w") as file:
        for i in range(60):
            file.write(f"{i}\n" + line * (1_000_000 // len(line)))
    files, count = data.TextFiles([tmp_path]), 0
    tracemalloc.start()
    try:
        for document in files:
            count += len(document.text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 15e6
    assert files.size > 59e6
    assert count > 0


def test_a_file_that_changes_while_it_is_read_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one " * 3000)
    files = data.TextFiles([tmp_path])
    list(files)
    (tmp_path / "a.txt").write_text("two " * 2999)
    with pytest.raises(ValueError, match=r"a\.txt changed while it was read"):
        list(files)


def test_passages_do_not_depend_on_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(np.random.default_rng(0).choice(list("ab€ \r\n🙂"), 50_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    whole = list(data.TextFiles([tmp_path]))
    for chunk in (1, 7, 4096):
        monkeypatch.setattr(data, "CHUNK", chunk)
        assert list(data.TextFiles([tmp_path])) == whole
