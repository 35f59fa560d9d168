"""The command as a process: interruption at any moment, pipes, narrow and ASCII terminals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import manyheads
from tests.paths import python_path
from tests.waiting import HANG

TEXT = "the train left the station on time"
# Says when the handler of SIGINT is installed: before that, Python itself handles it.
READY = (
    "import sys; from manyheads import __main__ as command; command.handle_interrupts();"
    "print('ready', file=sys.stderr, flush=True);"
)


def execute(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end."""
    options = {"capture_output": True, "encoding": "utf-8", "timeout": HANG, "check": False} | options
    return subprocess.run([sys.executable, *words], **options)


run, python = partial(execute, "-m", "manyheads"), partial(execute, "-c")


# -- Ctrl-C ----------------------------------------------------------------------------------------


def interrupted(words: Sequence[str], delay: float, folder: Path) -> tuple[int, str, str]:
    """Run a command and send it SIGINT after some seconds; its exit code, output and errors."""
    process = subprocess.Popen(
        [sys.executable, "-c", READY + "command.main()", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG)
    return process.returncode, out, err


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize(
    "parts", [pytest.param(8, marks=pytest.mark.full), pytest.param(40, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("words", [["generate", TEXT, "--tokens", "40"], ["show", TEXT]], ids=" ".join)
def test_an_interrupted_command_ends_quietly(words: list[str], parts: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    whole = run(*words, cwd=tmp_path)
    took = time.monotonic() - begin
    assert (whole.returncode, whole.stderr) == (0, "")
    for n in range(parts):  # a random moment within each
        delay = took * (n + random.random()) / parts
        code, out, err = interrupted(words, delay, tmp_path)
        assert err == "", delay
        if code != 130:
            assert (code, out) == (0, whole.stdout), delay  # it had ended before
    assert not list(tmp_path.rglob(".*")), "a temporary file is left"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_an_import_that_drops_keyboard_interrupt_doesnt_keep_the_command_running(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    sum(range(10**7))\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    done = python(
        READY + "command.main()", "kernels", env={**os.environ, "PYTHONPATH": python_path(tmp_path)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ready\n")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("atexit.register(strike); command.main()", id="while Python shuts down"),
        pytest.param(
            "Struck = type('Struck', (), {'__del__': lambda self: strike()}); Struck(); wait()",
            id="in a destructor",
        ),
        pytest.param("\ntry: strike()\nexcept KeyboardInterrupt: strike()\nwait()", id="twice"),
    ],
)
def test_interrupted_where_an_exception_would_be_lost(code: str) -> None:
    setup = (
        "import atexit, os, signal; wait = lambda: [0 for _ in range(10**8)];"
        "strike = lambda: (os.kill(os.getpid(), signal.SIGINT), wait());"
    )
    done = python(READY + setup + code, "--version")
    assert (done.returncode, done.stderr) == (130, "ready\n")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_sigint_stays_ignored_if_the_caller_ignores_it() -> None:
    code = READY + "import os, signal; os.kill(os.getpid(), signal.SIGINT); command.main()"
    start = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv({sys.executable!r}, "
    done = python(f"{start}{[sys.executable, '-c', code, '--version']!r})")
    assert (done.returncode, done.stdout) == (0, f"manyheads {manyheads.__version__}\n")


# -- output ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_leaves_doesnt_stop_the_work(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        done = run("show", TEXT, cwd=tmp_path, capture_output=False, stdout=gone, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("manyheads-out/*.png"))) == 1


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_of_one_line_gets_it_and_the_files_are_written(tmp_path: Path) -> None:
    """As in `manyheads show … --all | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "manyheads", "show", TEXT, "--all"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("Layer ")
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert (process.wait(HANG), errors) == (0, "")
    assert len(list(tmp_path.glob("manyheads-out/*.png"))) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [["show", "naïve ⏎ 日本"], ["generate", "naïve", "--tokens", "3"], ["kernels"]],
    ids=lambda words: words[0],
)
def test_an_ascii_terminal(words: list[str], tmp_path: Path) -> None:
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = run(*words, cwd=tmp_path, env={**os.environ, **ascii})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


# -- input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        *("show text --out", "show text --save", "view", "view maps --export", "train --out", "lessons"),
        *("train --out run --data", "generate text --model", "check a:b --out", "check a:b --json"),
        *("check a:b --junit", "bench --out"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(words: str, run_command: Any) -> None:
    code, out, err = run_command(*words.split(), "")
    assert (code, out) == (2, "")
    assert err.endswith("Expected a path, got ''. Use . for the current folder.\n")
    assert not list(Path().iterdir())


@pytest.mark.full
@pytest.mark.parametrize("words", [["show", TEXT, "--open"], ["view", "maps"]], ids=lambda words: words[0])
def test_without_uvicorn_the_viewer_raises_before_any_work(words: list[str], tmp_path: Path) -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from manyheads.__main__ import main; main()"
    done = python(code, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "manyheads: The viewer needs uvicorn, which isn't installed. "
        "Run pip install '.[view]' in a clone of manyheads.\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_show_does_not_import_the_compiler_of_torch(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; from manyheads.__main__ import main;"
        "atexit.register(lambda: print('torch._dynamo' in sys.modules, file=sys.stderr)); main()"
    )
    done = python(code, "show", TEXT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "False\n")
