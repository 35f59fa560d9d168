"""What the README and the docs show runs: each Python block, each command, and CI runs the README's own two.

Some need libraries that the everyday tests don't: `.ci/run` installs them before it runs the full tier.
"""

from __future__ import annotations

import csv
import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

import manyheads
from manyheads.lm.checkpoint import SHIPPED
from manyheads.observe.recording import Recording
from manyheads.text import report
from tests.chromium import CHROMIUM, MISSING
from tests.paths import python_path
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *GUIDES]
PAGES += sorted((ROOT / "docs" / "explanation").glob("*.md"))
PEERS = ("x_transformers", "labml_nn", "keras", "jax", "diffusers")  # the extras `findings`, `diffusion`
SLOW = (  # guides whose examples take seconds or need another extra
    "check-homework-in-ci",
    "export-to-onnx",
    "run-on-our-kernel",
    "which-words-shape-a-generated-picture",
)
OPTIONAL = {"onnx": ("manyheads.onnx", "onnx")}  # by extra: what shows that a text needs it, and a package


def blocks(path: Path) -> list[str]:
    """The page's Python blocks."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)


def commands(path: Path) -> list[str]:
    """The page's indented lines that start one of our commands."""
    return re.findall(r"^    (manyheads .*)$", path.read_text(encoding="utf-8"), re.M)


def shell(path: Path) -> list[str]:
    """The page's indented lines that start any command."""
    words = "manyheads|pip|python3?|bash|cd|git"
    return re.findall(rf"^    ((?:{words}) .*)$", path.read_text(encoding="utf-8"), re.M)


def needs(text: str) -> None:
    """Skip where a library that the text names isn't installed."""
    for peer in PEERS:
        if peer in text and find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed: pip install -c constraints.txt '.[findings,diffusion]'")
    for extra, (name, package) in OPTIONAL.items():
        if name in text and find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -c constraints.txt '.[{extra}]'")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": python_path(folder), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "timeout": HANG, "check": False}
    return subprocess.run(command, cwd=folder, env=env, **options)


def execute(page: Path) -> dict:
    """Run a page's Python blocks one after the other, and return the names that they define.

    If the next block is text, it is what the block prints; `...` stands for anything.
    """
    names: dict = {}
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, re.S | re.M)
    assert len(shown) == len(blocks(page))
    for block, expected in shown:
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(block, page.name, "exec"), names)
        if expected:
            matches = doctest.OutputChecker().check_output(expected, output.getvalue(), doctest.ELLIPSIS)
            assert matches, output.getvalue()
        print(output.getvalue(), end="")
    return names


def byte_level(text: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's, trained on a text."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.train_from_iterator([text], BpeTrainer(show_progress=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learned)


def gpt2(layers: int, tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.GPT2Model:
    """Return a small GPT-2 with random weights."""
    size = len(tokenizer)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=size, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config).eval()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """The recordings whose viewer an example opens; it runs in an empty folder."""
    recordings: list = []
    monkeypatch.setattr(Recording, "view", lambda recording: recordings.append(recording))
    monkeypatch.chdir(tmp_path)
    return recordings


def test_the_example_of_the_readme_runs_without_the_hub(
    shown: list, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the lines of the second block it needs nothing but the package, and has the picture's scores."""
    block, lines = blocks(ROOT / "README.md")
    assert "the four from `tokenizer` to `ids`" in README
    replaced = re.sub(r"^tokenizer = .*\nmodel = .*\n.*\nids = .*\n", lambda _: lines, block, flags=re.M)
    assert replaced != block
    names: dict = {}
    exec(replaced, names)
    [recording] = shown
    assert recording is names["recording"]
    assert recording[2].tokens.text == names["text"]
    torch.testing.assert_close(recording[2][0, 5].sum(-1), torch.ones(names["ids"].shape[1]))
    assert Path("heads.png").stat().st_size > 10_000
    assert "blocks.2.attention" in capsys.readouterr().out
    [sentence] = re.findall(r'manyheads show "(.*)"', README)
    pictured = report.read(sentence).recording
    assert names["heads"][0].induction == pytest.approx(
        pictured.table(names["ids"]).sorted("induction")[0].induction, rel=1e-5
    )


def test_the_example_of_the_readme_runs_on_a_gpt2_with_random_weights(
    monkeypatch: pytest.MonkeyPatch, shown: list, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines that need the Hub say so, and get a small model of the same class here."""
    block, _ = blocks(ROOT / "README.md")
    fetched = [line for line in README.splitlines() if "from_pretrained" in line]
    assert fetched
    assert all('("gpt2")  # needs the Hugging Face Hub' in line for line in fetched)
    tokenizer = byte_level(README)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda name: gpt2(6, tokenizer))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)

    names: dict = {}
    exec(block, names)
    [recording] = shown
    assert len(recording) == 6
    assert recording[5].tokens.text == names["text"]
    torch.testing.assert_close(recording[5][0, 1].sum(-1), torch.ones(names["ids"].shape[1]))
    assert "induction" in capsys.readouterr().out


def test_the_readme_is_short() -> None:
    """It has at most 120 lines, and its paragraphs are as wide at most."""
    lines = README.splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 120 and not line.startswith(("|", "    "))]


@pytest.fixture(scope="module")
def names() -> dict:
    """What the blocks of the guide to the functions and layers define."""
    return execute(ROOT / "docs" / "guides" / "attention-in-your-code.md")


def test_the_functions_and_layers_have_the_shapes_of_their_comments(names: dict) -> None:
    assert tuple(names["out"].shape) == (1, 10, 512)
    assert tuple(names["amap"].shape) == (1, 8, 10, 10)


def test_token_by_token_gives_the_same_output(names: dict) -> None:
    whole = names["layer"](names["x"], mask=names["Causal"]())
    assert (torch.cat(names["steps"], 1) - whole).abs().max().item() < 1e-5


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.full] * (page.stem in SLOW))
        for page in GUIDES
        if page.stem != "index"
    ],
)
def test_the_examples_of_a_guide_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a guide's blocks one after the other, in a folder of its own."""
    needs(page.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    execute(page)


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for words in re.findall(r"^(?:.*\()?.*readme \w+ '(.*?)'", script, re.M):
        first = next(line for line in README.splitlines() if words in line)
        assert first.startswith("    pip install ")
    assert "readme tests 'python -m pytest'" in script


def test_the_first_command_of_the_readme_prints_what_the_readme_shows(tmp_path: Path) -> None:
    [command] = re.findall(r'&& (manyheads show ".*")', README)
    done = run([sys.executable, "-m", *shlex.split(command)], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^    (Layer .*)$", README, re.M)
    assert shown
    assert set(shown) <= set(done.stdout.splitlines())


@pytest.mark.full
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_of_the_examples_runs(path: Path, tmp_path: Path) -> None:
    """It ends without an error, prints something, and writes the files that it names."""
    needs(path.read_text(encoding="utf-8"))
    done = run([sys.executable, str(path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for name in re.findall(r"wrote (\S+)", done.stdout):
        assert (tmp_path / name).stat().st_size > 5_000
    if path.stem == "training_log":
        check_that_every_head_is_logged(tmp_path / "training_log.csv")


def check_that_every_head_is_logged(path: Path) -> None:
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    heads = {(f"layers.{layer}", str(head)) for layer in range(2) for head in range(4)}
    for step in range(0, 121, 20):
        assert {(row["layer"], row["head"]) for row in rows if row["step"] == str(step)} == heads


@pytest.mark.full
def test_the_script_draws_the_pictures_of_the_guides(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_guide_pictures.py"
    done = run([sys.executable, str(script), "--out", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert {"masks.png", "word-times.png"} <= drawn
    guides = "".join(page.read_text(encoding="utf-8") for page in GUIDES)
    assert all((ROOT / "docs" / name).exists() and f"(../{name})" in guides for name in drawn)


PAGE = ROOT / "docs" / "findings.md"
FINDINGS = blocks(PAGE)
[JUDGED] = re.findall(r"PyTorch ([\d.]+) on a CPU", PAGE.read_text(encoding="utf-8"))


@pytest.mark.every(3, "full")  # they are about other libraries
@pytest.mark.parametrize("block", FINDINGS, ids=[str(n) for n in range(len(FINDINGS))])
def test_a_finding_of_the_docs_is_true(block: str, tmp_path: Path) -> None:
    """Run the script, which asserts what the page says, in a process of its own."""
    assert "assert " in block
    needs(block)
    if torch.__version__.partition("+")[0] != JUDGED:
        pytest.skip(f"the page is about PyTorch {JUDGED}")
    (tmp_path / "finding.py").write_text(block, encoding="utf-8")
    done = run([sys.executable, "finding.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# Files that the pages' commands speak of: these, and the adapters as docs/checker.md has them.
LATE = '''
import torch
from torch import nn


class MyAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        t = x.shape[1]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(t, t).triu(2).bool(), -torch.inf)  # one too far
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
'''
GROUPS = '''
from torch import nn
from x_transformers import Attention


class Groups(nn.Module):
    """Self-attention."""

    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.attention = Attention(dim, heads=heads, dim_head=dim // heads, kv_heads=kv_heads)

    def forward(self, x):
        return self.attention(x)
'''
RENAMED = '''
import torch
from torch import nn


class Attention(nn.Module):
    """Cross-attention."""

    def __init__(self, dim, h):
        super().__init__()
        self.h = h
        self.a, self.b, self.c, self.d = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, cond, segments):
        q, k, v = self.a(x), self.b(cond), self.c(cond)
        q, k, v = (one.unflatten(-1, (self.h, -1)).transpose(1, 2) for one in (q, k, v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~segments, torch.finfo(scores.dtype).min)
        return self.d((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    used, keras, jax = blocks(ROOT / "docs" / "checker.md")
    files = {"attention": LATE, "groups": GROUPS, "mine": RENAMED}
    files |= {"keras_attention": keras, "jax_attention": jax}
    files["used"] = f"from manyheads import SelfAttention as MyAttention\n{used}"
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.full
def test_the_python_examples_of_the_checker_run(folder: Path) -> None:
    done = run([sys.executable, "used.py"], folder)
    assert done.returncode == 0, done.stderr
    assert "SelfAttention" in done.stdout


# What each of the pages' commands finds, as their prose says: the checks that fail, and the name.
RIGHT: tuple[set[str], list[str]] = (set(), [])
FOUND: dict[str, tuple[set[str], list[str]]] = {
    "attention.py:MyAttention": ({"values", "causality"}, ["causal-late"]),
    "groups.py:Groups": ({"values"}, ["key-heads-tiled"]),
    "jax_attention.py:attention": RIGHT,
    "keras_attention.py:KerasAttention": RIGHT,
    "labml_nn.transformers.mha:MultiHeadAttention": RIGHT,
    "mine.py:Attention": RIGHT,
    "torch.nn.functional:scaled_dot_product_attention": RIGHT,
    "torch.nn:MultiheadAttention": RIGHT,
    "transformers.models.llama.modeling_llama:eager_attention_forward": RIGHT,
    "x_transformers:Attention": RIGHT,
}
COMMANDS = sorted({command for page in PAGES for command in commands(page) if " check " in command})


@pytest.mark.every(2, "full")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_check_reports_what_its_page_shows(
    command: str, run_command: Callable[..., Any], folder: Path
) -> None:
    needs((folder / f"{m[1]}.py").read_text() if (m := re.search(r" (\w+)\.py:", command)) else command)
    words = [*shlex.split(command, comments=True)[1:], "--json", "report.json"]
    done = run_command(*words)  # in the folder
    assert (folder / "report.json").exists(), done.err
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    failed = {check["name"] for check in report["checks"] if check["status"] == "failed"}
    names = [one["mistake"] for one in report["diagnosis"]]
    assert (failed, names) == FOUND[words[1]]
    assert done.code == bool(failed)


def test_a_recording_is_labelled_as_the_viewers_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list = []
    monkeypatch.setattr(Recording, "view", lambda recording: shown.append(recording))
    text = "the train, the trains"
    tokenizer = byte_level(text)
    left: dict = {"manyheads": manyheads, "text": text, "model": gpt2(1, tokenizer), "tokenizer": tokenizer}
    [block] = blocks(ROOT / "docs" / "viewer.md")
    exec(compile(block, "viewer.md", "exec"), left)
    [recording] = shown
    labels = recording[0].tokens
    assert isinstance(labels, manyheads.TokenizedText)
    assert labels.text == text


VIEWS = sorted(
    {command for page in PAGES for command in commands(page) if re.search(r" view |--open", command)}
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the viewer's commands name."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "FILE").write_text("the train left the station on time " * 100, encoding="utf-8")
    model, _ = manyheads.lm.load()
    with manyheads.observe(model) as recording:
        model(torch.arange(300)[None])
    for name in ("run", "one", "other", "head"):
        recording.save(folder / f"{name}.safetensors")
    manyheads.atlas.record("shipped", [folder / "FILE"], folder / "my-atlas")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("command", VIEWS)
def test_the_viewer_opens_as_in_its_page(command: str, runs: Path) -> None:
    """A served page answers under its link; an exported page is a file."""
    words = [sys.executable, "-m", "manyheads", *shlex.split(command, comments=True)[1:]]
    if "--export" in words:
        done = run(words, runs)
        assert done.returncode == 0, done.stderr
        assert "<html" in (runs / "page.html").read_text(encoding="utf-8")
        return
    quiet = {**os.environ, "BROWSER": "true", "OMP_NUM_THREADS": "1"}  # a browser that shows nothing
    with subprocess.Popen(words, cwd=runs, env=quiet, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            links = (re.search(r"http://127\.0\.0\.1:\S+", line) for line in served.stdout)
            link = next(found[0] for found in links if found)
            with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(link) as answer:
                assert "<html" in answer.read().decode()
        finally:
            served.terminate()


TRAINING = (ROOT / "docs" / "guides" / "train-on-several-processes.md").read_text(encoding="utf-8")
TRAININGS = re.findall(r"^    ((?:manyheads|torchrun) .*)$", TRAINING, re.M)


@pytest.mark.full
def test_the_commands_to_train_on_several_processes_run(tmp_path: Path) -> None:
    """One after the other, with a small model."""
    (tmp_path / "books").mkdir()
    text = "\n".join(f"The {n}th line of the file is followed by the {n + 1}th." for n in range(400))
    (tmp_path / "books" / "1.txt").write_text(text)
    small = "--steps 4 --layers 1 --heads 2 --embed 16 --context 32 --vocab-size 300 --device cpu"
    starts = {"manyheads": "-m manyheads", "torchrun": "-m torch.distributed.run"}
    for command in TRAININGS:
        name, *words = shlex.split(command)
        more = shlex.split(small) if "--data" in words else ["--steps", "6"] if "--resume" in words else []
        done = run([sys.executable, *starts[name].split(), *words, *more], tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        assert "Traceback" not in done.stderr
    for model, step in (("my-model", 6), ("other-model", 4)):
        assert json.loads((tmp_path / model / "state.json").read_text())["step"] == step


ATLASES = re.findall(
    r"^    ((?:manyheads atlas|torchrun) .*)$",
    (ROOT / "docs" / "guides" / "atlas-of-heads.md").read_text(encoding="utf-8"),
    re.M,
)


@pytest.mark.full
@pytest.mark.parametrize("command", ATLASES)
def test_an_atlas_is_recorded_as_in_its_guide(command: str, tmp_path: Path) -> None:
    """By the shipped model, over a short text, on two processes at most."""
    (tmp_path / "short.txt").write_text("the train left the station on time " * 20, encoding="utf-8")
    name, *words = shlex.split(command.replace("my-model", "shipped").replace(" 4", " 2"))
    words[words.index("--text") + 1 : words.index("--out")] = ["short.txt"]
    start = {"manyheads": "-m manyheads", "torchrun": "-m torch.distributed.run"}[name]
    done = run([sys.executable, *start.split(), *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert manyheads.atlas.open(tmp_path / words[words.index("--out") + 1]).rows("scores")


TEXTS = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
BENCHMARKS = sorted(set(re.findall(r"`python (benchmarks/.*?)`", TEXTS)))


@pytest.mark.full
@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_runs(command: str) -> None:
    """As the page has it, but short."""
    words = re.sub(r" --length \d+", "", command).split()
    if "viewer" in command:
        if CHROMIUM is None:
            pytest.skip(MISSING)
        words += ["--browser", CHROMIUM]
    if "gpu" in command and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    short = ["--length", "512", *(["--ranks", "2"] if "memory" in words else ["--rounds", "1"])]
    done = run([sys.executable, str(ROOT / words[0]), *words[1:], *short], ROOT)
    assert done.returncode == 0, done.stderr
    assert " 512 " in done.stdout


def test_no_example_is_left_out() -> None:
    """What a page gains is run here too: Python only where it is run, and no command of another kind."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys()
    pages = ("checker.md", "findings.md", "viewer.md")
    run_here = {ROOT / "README.md", *GUIDES, *(ROOT / "docs" / name for name in pages)} - {
        ROOT / "docs/guides/index.md"
    }
    assert {page for page in PAGES if blocks(page)} == run_here
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for page in PAGES:
        for line in shell(page):
            in_ci = line in script or any(
                words in line for words in re.findall(r"readme \w+ '(.*?)'", script)
            )
            here = line in COMMANDS + VIEWS + TRAININGS + ATLASES or "--model" in line or "venv" in line
            installs = re.search(r"^pip install -c constraints.txt (?:-e )?'\.\[([\w,]+)\]'", line)
            assert in_ci or here or (installs and set(installs[1].split(",")) <= extras), line
    assert BENCHMARKS
    assert VIEWS


@pytest.mark.full
def test_a_model_is_shown_and_saved(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "observe-a-model.md"
    [command] = [command for command in commands(page) if " --model " in command]
    words = shlex.split(command.replace("NAME_OR_PATH", shlex.quote(str(SHIPPED))))
    done = run([sys.executable, "-m", "manyheads", *words[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    assert manyheads.open_run(tmp_path / "run.safetensors")
