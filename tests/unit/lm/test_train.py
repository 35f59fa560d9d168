"""Training: it learns, and a run that was stopped or killed ends as if it hadn't been."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_shipped_model as recipe
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manyheads import lm
from manyheads.lm import checkpoint, data
from manyheads.lm.checkpoint import HELD_OUT, LOCK, LOG, TRAINING
from manyheads.lm.train import Run, held_out_loss
from tests.waiting import wait_until

# The package re-exports a function of the module's own name.
training = sys.modules["manyheads.lm.train"]

Command = Callable[..., tuple[int, str, str]]

GIVEN: dict[str, Any] = {
    "steps": 9,
    "context": 32,
    "seed": 3,
    "device": "cpu",
    "vocab_size": 300,
    "repeated": 1,
    "save_every": 4,
    "log_every": 2,
    "evaluate_every": 5,
}


@pytest.fixture(scope="module")
def whole(train: Callable[[dict[str, Any]], Path]) -> Path:
    """A run that nothing interrupted."""
    return train(GIVEN)


def same(one: Path, other: Path) -> None:
    """Assert that two runs ended with the same bits and the same log."""
    for name in ("model.safetensors", "optimizer.safetensors", "tokenizer.json", "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    stories = []
    for folder in (one, other):
        lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
        for line in lines:
            del line["seconds"], line["tokens_per_s"]
        stories.append(lines)
    assert stories[0] == stories[1]


def test_a_run_writes_a_checkpoint_and_a_log(whole: Path, text: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {*checkpoint.FILES, TRAINING, HELD_OUT, LOG, LOCK}
    lines = [json.loads(line) for line in (whole / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5, 6, 8, 9]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [5, 9]
    model, tokenizer = lm.load(whole)
    held_out = recipe.split(list(data.TextFiles([text])))[1]
    ids = data.read_tokens(whole / HELD_OUT)
    assert tokenizer.decode(ids.tolist()) == "".join(document.text for document in held_out)
    loss = held_out_loss(model, ids)
    assert loss == pytest.approx(lines[-1]["held_out_loss"], rel=1e-3)
    bits = loss / math.log(2) * (len(ids) - 1) / sum(len(d.text.encode()) for d in held_out)
    assert bits == pytest.approx(lines[-1]["held_out_bits_per_byte"], rel=1e-3)


def test_it_learns(text: Path, tmp_path: Path) -> None:
    before = lm.train(tmp_path / "a", GIVEN | {"steps": 1, "repeated": 0}, [text])
    after = lm.train(tmp_path / "b", GIVEN | {"steps": 30, "repeated": 0}, [text])
    losses = [held_out_loss(run.model, run.held_out) for run in (before, after)]
    assert losses[1] < losses[0] / 2


def test_held_out_loss_covers_every_token_but_the_first(whole: Path) -> None:
    model, _ = lm.load(whole)
    ids = data.read_tokens(whole / HELD_OUT)[:75]  # two windows of 32 and a rest
    total = 0.0
    with torch.no_grad():
        for start in (0, 32, 64):
            window = torch.from_numpy(ids[start : start + 33].astype(np.int64))[None]
            logits = model(window[:, :-1])
            total += float(F.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
    assert held_out_loss(model, ids) == pytest.approx(total / 74)


@pytest.mark.full
@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGINT), (4, signal.SIGTERM), (6, signal.SIGINT)])
def test_a_stopped_run_is_saved_and_resumes_to_the_same_end(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, number: int
) -> None:
    advance = Run.advance

    def stopped(run: Run) -> tuple[float, float]:
        if run.step == at:
            signal.raise_signal(number)
        return advance(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", stopped)
        with pytest.raises(KeyboardInterrupt):
            lm.train(tmp_path / "run", GIVEN, [text])
    assert checkpoint.read_json(tmp_path / "run" / "state.json")["step"] == at + 1
    assert lm.train(tmp_path / "run", resume=True).step == GIVEN["steps"]
    same(whole, tmp_path / "run")


class Killed(BaseException):
    """Raised where the process would be killed."""


@pytest.mark.full
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_run_killed_while_saving_resumes_to_the_same_end(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real, calls = os.replace, [0]

    def dying(source: Any, target: Any) -> None:
        if checkpoint.WRITTEN in str(source):
            calls[0] += 1
            if calls[0] == {"before": 8, "between": 10, "after": 12}[where]:  # the second save
                raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Killed):
            lm.train(tmp_path / "run", GIVEN, [text])
    with open(tmp_path / "run" / LOG, "a") as log:
        log.write('{"step": 8, "loss": 1.0}\n{"step": 9, "lo')  # what the dead process still wrote
    lm.train(tmp_path / "run", resume=True)
    same(whole, tmp_path / "run")


CHILD = """
import json, sys
from pathlib import Path
from manyheads import lm
out, text, given = sys.argv[1:]
try:
    lm.train(out, json.loads(given), [Path(text)])
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.full
def test_a_killed_process_resumes_to_the_same_end(text: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", CHILD, str(out), str(text), json.dumps(GIVEN)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        log = out / LOG
        wait_until(lambda: child.poll() is not None or (log.exists() and log.read_text() != ""))  # a step
        assert child.poll() is None, "it ended by itself"
    finally:
        child.kill()
        child.wait()
    lm.train(out, {"seed": GIVEN["seed"]}, [text], resume=True)
    same(whole, out)


@pytest.mark.full
def test_another_seed_gives_other_weights(text: Path, whole: Path, tmp_path: Path) -> None:
    lm.train(tmp_path / "run", GIVEN | {"seed": 4}, [text])
    ours, theirs = (lm.load(folder)[0].embedding.weight for folder in (whole, tmp_path / "run"))
    assert not torch.allclose(ours, theirs)


def test_training_keeps_the_random_state_of_the_caller(text: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    lm.train(tmp_path / "run", GIVEN | {"steps": 1}, [text])
    lm.train(tmp_path / "run", {"steps": 2}, resume=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_decay_is_on_matrices_only(whole: Path) -> None:
    run = Run.resume(whole, {}, [])
    for group in run.optimizer.param_groups:
        assert group["params"]
        for parameter in group["params"]:
            assert (parameter.dim() >= 2) == (group["weight_decay"] > 0)


def test_rate_warms_up_and_falls() -> None:
    options = lm.Options(steps=1000, learning_rate=1.0)
    rates = [options.rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(1.0)
    assert int(np.argmax(rates)) in (99, 100)
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-4)


def test_tensorboard_if_it_is_installed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(training, "find_spec", lambda name: name == "tensorboard")
    lm.train(tmp_path / "run", GIVEN, [text])
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [e.step for e in events.Scalars("loss")] == [line["step"] for line in lines]


# Invalid input to the command: one sentence on standard error and exit code 2.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "already has a run"),
        (["--resume", "--steps", 8], "Expected --steps to be at least 9"),
        (["--resume", "--context", 64], "Expected --context 32,"),
        (["--resume", "--seed", 4], "Expected --seed 3,"),
        (["--resume", "--data", __file__], "a different text"),
    ],
)
def test_train_raises_if_the_folder_has_a_run(
    whole: Path, command: Command, words: list[object], said: str
) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    given = ["train", "--out", whole, *words]
    code, _, err = command(*given)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_resume_raises_for_changed_files(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    lm.train(out, GIVEN | {"steps": 1}, [text])
    np.save(out / TRAINING, np.arange(500, dtype=np.uint16) % 300)
    with pytest.raises(ValueError, match=r"train\.npy doesn't belong to this checkpoint"):
        lm.train(out, resume=True)
    (out / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="that manyheads didn't write"):
        lm.train(out, resume=True)


def test_train_and_generate_as_commands(text: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    words = ["train", "--out", out, "--data", text, "--steps", 2, "--context", 32, "--seed", 0]
    assert command(*words)[0] == 0
    words = ["generate", "The 3th", "--model", out, "--temperature", 0, "--tokens", 500]
    code, printed, err = command(*words)
    assert code == 0
    assert printed.startswith("The 3th")
    assert "context is full" in err or len(lm.load(out)[1].encode(printed).ids) < 32
    for bad in (["--temperature", -1], ["--top-p", 2], ["--top-k", 0], ["--tokens", 0]):
        words = ["generate", "The", "--model", out, *bad]
        code, printed, err = command(*words)
        assert (code, printed, err.count("\n")) == (2, "", 1)
    for prompt, model in (("", out), ("The", tmp_path / "none"), ("The", text)):
        words = ["generate", prompt, "--model", model]
        code, printed, err = command(*words)
        assert (code, printed, err.count("\n")) == (2, "", 1)


def test_an_interrupted_command_exits_with_130(
    text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run) -> tuple[float, float]:
        signal.raise_signal(signal.SIGTERM)
        run.step += 1
        return 1.0, 1.0

    monkeypatch.setattr(Run, "advance", stopped)
    words = ["train", "--out", tmp_path / "run", "--data", text, "--steps", 50, "--context", 32]
    assert command(*words)[0] == 130


def test_ctrl_c_before_the_first_step_says_what_is_saved(
    text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "train",
        "--out",
        tmp_path / "run",
        "--data",
        text,
        "--steps",
        2,
        "--context",
        32,
        "--device",
        "cpu",
    ]

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(data, "train_tokenizer", interrupted)
        code, _, errors = command(*words)
    assert code == 130
    assert errors.endswith("stopped before the first step; nothing was saved\n")
    assert not (tmp_path / "run").exists()
    assert command(*words)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Run, "restore", interrupted)
        code, _, errors = command("train", "--out", tmp_path / "run", "--resume", "--steps", 4)
    assert (code, errors) == (130, "stopped before the first step; continue with --resume\n")
