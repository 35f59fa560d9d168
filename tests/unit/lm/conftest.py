"""What the tests of training share: runs, and the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyheads import cli, lm
from manyheads.lm import data

# The package re-exports a function of the module's own name.
training = sys.modules["manyheads.lm.train"]

Command = Callable[..., tuple[int, str, str]]
Train = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="session", autouse=True)
def _without_tensorboard() -> Iterator[None]:
    """TensorBoard takes seconds to import; only its own test uses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "find_spec", lambda name: None)
        yield


@pytest.fixture(scope="session")
def python_documents() -> list[data.Document]:
    """The text that comes with Python, which takes seconds to read."""
    return data.python_documents()


@pytest.fixture(scope="module")
def train(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A function that trains with some options, and returns the folder of the run."""

    def call(options: dict[str, Any]) -> Path:
        out = tmp_path_factory.mktemp("trained") / "run"
        lm.train(out, options, [text])
        return out

    return call


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs `manyheads …`: exit code, standard output and standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manyheads", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call
