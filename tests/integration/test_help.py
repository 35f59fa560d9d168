"""The help of the commands: its speed, its layout, its examples, the version and shell completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

import manyheads
from manyheads.cli import app
from tests.waiting import HANG

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
ORDER = ("Arguments", "Options", "Help", "Examples", "Exit codes")  # groups of options follow "Options"
PAGES = [["--help"], *([name, "--help"] for name in COMMANDS)]


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `manyheads` to its end."""
    command = [sys.executable, "-m", "manyheads", *words]
    options = {"capture_output": True, "encoding": "utf-8", "timeout": HANG, "check": False} | options
    return subprocess.run(command, **options)


# -- pages -----------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("words", [["--version"], [], *PAGES], ids=" ".join)
def test_help_is_printed_without_slow_imports(words: list[str]) -> None:
    """With them, it would take seconds."""
    code = (
        "import atexit, sys; from manyheads.__main__ import main;"
        "atexit.register(lambda: print('modules:', *sys.modules, file=sys.stderr)); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, encoding="utf-8")
    printed, _, loaded = done.stderr.rpartition("modules:")
    assert (done.returncode, printed) == (0, "")
    assert done.stdout
    assert "manyheads.cli" in loaded.split()
    for slow in ("torch", "numpy", "rich.console", "matplotlib", "tokenizers", "safetensors"):
        assert slow not in loaded.split()


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"manyheads {manyheads.__version__}\n", "")


@pytest.mark.every(4)
@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_a_page_fits_a_terminal_of_80_columns_and_has_no_colors_in_a_pipe(words: list[str]) -> None:
    page = run(*words, env={**os.environ, "COLUMNS": "80"}).stdout
    assert page == run(*words[:-1], "-h", env={**os.environ, "COLUMNS": "80"}).stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "\x1b" not in page
    titles = re.findall(r"^(\S.*):$", page, re.M)
    assert "Examples" in titles
    assert len(titles) == len(set(titles))
    others = [title for title in titles if title not in ORDER]
    if words[1:]:
        assert titles == [title for title in (*ORDER[:2], *others, *ORDER[2:]) if title in titles]


def test_the_program_alone_prints_its_help() -> None:
    """On standard output with exit code 0, as pip, cargo and gh do; git, uv and typer report an error."""
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, run("--help").stdout, "")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_sentence_that_is_printed_whole(name: str) -> None:
    printed = "".join(run(name, "-h").stdout.split())
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name
        assert parameter.help[0].isupper(), parameter.help
        assert parameter.help.endswith("."), parameter.help
        assert re.sub(r"\s", "", parameter.help) in printed, parameter.help
        assert parameter.metavar or parameter.is_flag, parameter.name


def test_a_page_says_what_is_required_what_is_the_default_and_what_turns_it_off() -> None:
    page = " ".join(run("train", "-h").stdout.split())
    assert "Usage: manyheads train --out DIR [OPTIONS]" in page.replace("python -m manyheads", "manyheads")
    assert "--out DIR Folder of the run: checkpoints, tokenizer and log. [required]" in page
    assert "--hidden N Width of the feed-forward layers. [default: 7/3 of --embed]" in page
    page = " ".join(run("generate", "-h").stdout.split())
    assert "--temperature T Sampling temperature (0 is greedy). [default: 0.8]" in page
    page = " ".join(run("view", "-h").stdout.split())
    assert "--no-open Print the link instead of opening a browser." in page
    assert " --open " not in page
    assert "[default: True]" not in page


def test_a_wrong_option_names_the_usage_and_the_help() -> None:
    done = run("view")
    assert (done.returncode, done.stdout) == (2, "")
    assert "manyheads view [OPTIONS] FILE...\n" in done.stderr
    assert "view -h' for help" in done.stderr
    assert done.stderr.endswith("Missing argument 'FILE...'.\n")


@pytest.mark.skipif(os.name != "posix", reason="a pseudo-terminal")
@pytest.mark.parametrize("no_color", ["", "1"])
def test_colors_in_a_terminal_unless_the_user_wants_none(no_color: str) -> None:
    import pty

    reader, writer = pty.openpty()
    with open(writer, "w") as terminal, open(reader, "rb", 0) as screen:
        run("kernels", "-h", capture_output=False, stdout=terminal, env={**os.environ, "NO_COLOR": no_color})
        page = screen.read(10_000)
    assert b"Usage:" in page
    assert (b"\x1b[1mUsage:" in page) is (not no_color)


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("manyheads ", set(COMMANDS)),
        ("manyheads sh", {"show"}),
        ("manyheads generate --t", {"--tokens", "--temperature", "--top-k", "--top-p"}),
        ("manyheads show --format ", {"png", "svg", "pdf"}),
    ],
)
def test_a_shell_completes(line: str, words: set[str]) -> None:
    number = len(shlex.split(line + "x")) - 1
    asked = {"_MANYHEADS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(number)}
    code = "import sys; sys.argv[0] = 'manyheads'; from manyheads.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == words


# -- examples --------------------------------------------------------------------------------------

# Options that make an example short; of two values, the last counts.
SHORT = {
    "bench": "--dtype float32 --rounds 1",
    "lessons": "--no-start",
    "train": "--steps 2 --layers 1 --heads 2 --embed 16 --context 32 --vocab-size 300",
    "view": "--no-open",
}
SENTENCE = "The file is open and the file is read. "
FILES = {  # what the examples read and don't make themselves
    "attention.py": """\
from manyheads import Keep, SelfAttention as MyAttention

class Masked(MyAttention):
    def forward(self, x, segments):
        return super().forward(x, mask=Keep(segments))
""",
    "book.txt": SENTENCE * 60,
    "books/1.txt": SENTENCE * 300,
}


def examples(epilog: str) -> list[list[str]]:
    """Return the words of each example of a page."""
    return [shlex.split(line) for line in re.findall(r"^ +manyheads (.*)$", epilog, re.M)]


def serve(words: list[str], folder: Path) -> None:
    """Run a command until it prints the link of the viewer."""
    command = [sys.executable, "-m", "manyheads", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, encoding="utf-8") as served:
        try:
            assert served.stdout is not None
            assert any("http://127.0.0.1:" in line for line in served.stdout)
        finally:
            served.terminate()


def examples_of(name: str) -> list[list[str]]:
    """Return the words of each example of a command's page, or those that only the first page has."""
    if name:
        return examples(COMMANDS[name].epilog or "")
    first = examples(app.registered_callback.epilog or "")  # type: ignore[union-attr]
    return [words for words in first if words not in examples_of(words[0])]


@pytest.mark.full
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_examples_of_a_page_run(name: str, run_command: Callable[..., Any], tmp_path: Path) -> None:
    """They run one after the other, in a folder with the files that they name."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    if name == "view":
        model, _ = manyheads.lm.load()
        with manyheads.observe(model) as recording:
            model(torch.arange(20)[None])
        recording.save(tmp_path / "other.safetensors")
        manyheads.atlas.record("shipped", [tmp_path / "book.txt"], tmp_path / "my-atlas")
    assert any(words[0] == name for words in examples_of(name)) or not name
    for words in examples_of(name):
        words += SHORT.get(words[0], "").split()
        if words[0] == "view" and "--export" not in words:
            serve(words, tmp_path)
        else:
            done = run_command(*words)
            assert done.code == 0, (words, done.err, done.out)
            assert done.out + done.err or "--processes" in words, words  # those print by themselves
