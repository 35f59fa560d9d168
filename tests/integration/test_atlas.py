"""`manyheads atlas` on one process and several, killed and continued; its pages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from manyheads import atlas, lm
from manyheads.atlas import corpus
from manyheads.text import models

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")

PATIENCE = 240  # seconds, to detect a hang


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, and text for seven shards."""
    folder = tmp_path_factory.mktemp("atlas")
    _, tokenizer = lm.load()
    torch.manual_seed(0)
    config = lm.Config(tokenizer.get_vocab_size(), embed=16, heads=2, layers=2, hidden=16, context=256)
    (folder / "model").mkdir()
    lm.save(folder / "model", lm.LanguageModel(config), tokenizer)
    words = ["the", "file", "you", "want", "to", "read", "is", "not", "a", "mask,", "which", "hides", "keys"]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(words), (46_000,), generator=generator).tolist()
    text = " ".join(words[n] + ("\n" if i % 13 == 0 else "") for i, n in enumerate(drawn))
    (folder / "text.txt").write_text(text)
    return folder


def arguments(folder: Path, out: str) -> list[str]:
    return ["atlas", str(folder / "model"), "--text", str(folder / "text.txt"), "--out", str(folder / out)]


def run(*words: str, launcher: tuple[str, ...] = ("-m", "manyheads")) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


@pytest.mark.full
def test_killed_and_continued_on_any_number_of_processes_it_has_the_same_bits(folder: Path) -> None:
    done = run(*arguments(folder, "one"))
    assert done.returncode == 0, done.stderr
    assert "4 heads over" in done.stdout
    assert len(atlas.open(folder / "one").plan.text.shards) > 5
    for n, first in (("2", ()), ("4", ("--processes", "2"))):
        out = f"out{n}"
        process = subprocess.Popen(
            [sys.executable, "-m", "manyheads", *arguments(folder, out), *first],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        end = time.monotonic() + PATIENCE
        while not [*(folder / out).glob("shards/*.npz")] and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        done = run(*arguments(folder, out), "--processes", n)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("heads over") == 1
        assert contents(folder / out) == contents(folder / "one")


@pytest.mark.full
def test_torchrun_prints_a_fault_once(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "manyheads")
    (folder / "bad.txt").write_bytes(b"abc\xff")
    done = run(
        "atlas", "shipped", "--text", str(folder / "bad.txt"), "--out", str(folder / "bad"), launcher=torchrun
    )
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("manyheads: "))
    assert "invalid byte at 3" in line


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_the_cost_of_heads_of_hugging_face_models(name: str, tmp_path: Path) -> None:
    """It is that of zeros in the head's slice of the input of the output projection."""
    tf = pytest.importorskip("transformers")
    from tests.integration.test_show_models import MODELS, TEXT, build, saved

    kind, options, tokenizer = MODELS[name]
    torch.manual_seed(0)
    model = saved(tmp_path / "model", build(kind, **options), tokenizer())
    (tmp_path / "text.txt").write_text(f"{TEXT}\n" * 4)
    recorded = atlas.record(model, [tmp_path / "text.txt"], tmp_path / "atlas", length=32, ablate=True)
    plain = tf.AutoModelForCausalLM.from_pretrained(model).eval()
    encode = models.load(model).encode
    windows = [
        torch.tensor([window.ids])
        for parts in recorded.plan.text.shards
        for part in parts
        for window in corpus.windows(recorded.plan.text, part, encode, 32)
    ]

    def total_loss() -> float:
        with torch.no_grad():
            logits = [plain(ids).logits[0, :-1] for ids in windows]
        pairs = zip(logits, windows, strict=True)
        return float(sum(F.cross_entropy(x, ids[0, 1:], reduction="sum") for x, ids in pairs))

    before = total_loss()
    rows = recorded.rows("ablation")
    assert len(rows) == 8
    assert rows[0]["loss"] == pytest.approx(before / rows[0]["tokens"], rel=1e-5)
    for row in rows[::3]:
        layer = plain.base_model.get_submodule(row_path(recorded, row))
        projection = layer.c_proj if name == "gpt2" else layer.o_proj
        columns = torch.arange(32).view(4, 8)[row["head"]]
        hook = projection.register_forward_pre_hook(lambda _, x, c=columns: x[0].index_fill(-1, c, 0.0))
        cost = (total_loss() - before) / row["tokens"]
        hook.remove()
        assert row["cost"] == pytest.approx(cost, abs=1e-5)
        assert abs(cost) > 1e-4
    recorded.read_passage(0)  # by the model without the layer that predicts, whose other weights are the same


def row_path(recorded: atlas.Atlas, row: dict) -> str:
    return recorded.facts["layers"][row["layer"]][0]


@pytest.mark.full
def test_a_model_that_does_not_predict_cannot_be_ablated(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.integration.test_show_models import KV, MODELS, TEXT, build, plain_words, saved

    (tmp_path / "text.txt").write_text(TEXT)
    cases = {
        "bert": ("whose predictions depend on later ones", *MODELS["bert"]),
        "t5": ("an encoder-decoder model", *MODELS["t5"]),
        "albert": ("whose type albert has no such model", *MODELS["albert"]),
        "llama": ("which was saved without the layer that does", "LlamaModel", KV, plain_words),
    }
    for name, (message, kind, options, tokenizer) in cases.items():
        model = saved(tmp_path / name, build(kind, **options), tokenizer())
        with pytest.raises(ValueError, match=message):
            atlas.record(model, [tmp_path / "text.txt"], tmp_path / "atlas", ablate=True)
        with pytest.raises(ValueError, match="loaded without the layer"):
            atlas.record(models.load(model), [tmp_path / "text.txt"], tmp_path / "atlas", ablate=True)


def test_faults_are_one_sentence_and_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from manyheads import cli

    cases = {
        ("shipped", "--text", str(folder / "none.txt")): "which is missing",
        ("nothing", "--text", str(folder / "text.txt")): "got nothing",
        ("shipped", "--text", str(folder / "text.txt"), "--length", "9999"): "length",
    }
    for words, message in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["manyheads", "atlas", *words, "--out", str(folder / "faulty")])
            with pytest.raises(SystemExit) as exit:
                cli.main()
        assert exit.value.code == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1


def test_the_pages_of_an_atlas(folder: Path, tmp_path: Path) -> None:
    """The exported page needs nothing else; on the served one an example opens in the viewer."""
    pytest.importorskip("starlette")
    (tmp_path / "text.txt").write_text("the file you want to read is not the file you need to read\n" * 9)
    recorded = atlas.record(folder / "model", [tmp_path / "text.txt"], tmp_path / "atlas", length=64)
    page = recorded.export(tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r'(src|href)="', page)
    assert "Content-Security-Policy" in page
    with pytest.raises(ValueError, match=r"end in \.html"):
        recorded.export(tmp_path / "page.txt")

    server = recorded.view(browser=False)
    try:
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        served = browser.open(server.url).read().decode()
        assert '"link":"open/0/0/0"' in served
        base = server.url.partition("?")[0]
        for name in ("atlas.js", "atlas.css"):
            assert browser.open(base + name).status == 200
        with browser.open(base + "open/1/1/0") as opened:  # it follows the redirection
            assert "viewer.js" in opened.read().decode()
            assert opened.url.partition("#")[0] != base
        for name in ("open/9/9/9", "nothing"):
            with pytest.raises(urllib.error.HTTPError) as error:
                browser.open(base + name)
            assert error.value.code == 404
            error.value.close()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(base)  # without the token
        assert error.value.code == 403
        error.value.close()
    finally:
        server.close()
