"""A model that reads text, with its tokenizer: one of ours, or one of Hugging Face's.

Theirs are read from a folder or from the local cache. Nothing is downloaded, no code that comes with a
model is run, and what transformers prints meanwhile is kept from the page.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from manyheads import lm
from manyheads.lm.checkpoint import is_ours
from manyheads.observe import Recording, observe
from manyheads.tokens import Token, covered, printable, tokens, words

SHIPPED = "shipped"  # the name of the model that comes with the package
# What configurations call the longest text that a model reads.
CONTEXTS = ("max_position_embeddings", "max_encoder_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Model:
    """A model that reads text, one sequence at a time, on the CPU.

    name: as the caller wrote it.
    module: the model itself.
    reader: the part of it that reads text, from ids `[1, t]`.
    context: the most tokens that it reads; None where there is no such number.
    encode: a function that gives a text as tokens, at most so many; None is all.
    notes: what to know about what is shown.
    stretched: a function that gives the same model for texts of so many tokens, beyond its context; None
        where there is none.
    layers: the modules that run one after another, where they are known.
    """

    name: str
    module: nn.Module
    reader: Callable[[torch.Tensor], object]
    context: int | None
    encode: Callable[[str, int | None], list[Token]]
    notes: tuple[str, ...] = ()
    stretched: Callable[[int], Model] | None = None
    layers: tuple[nn.Module, ...] = ()

    def read(self, ids: Sequence[int], after: Callable[[], object] = lambda: None) -> Recording:
        """The attention of the model while it reads ids; `after` is called when one of its layers is done.

        ValueError where it can't, where no attention is seen, and where NaN or infinity is computed.
        """

        def done(*_: object) -> None:
            after()

        with ExitStack() as stack:
            for module in self.layers:
                stack.callback(module.register_forward_hook(done).remove)
            seen = stack.enter_context(observe(self.module))
            stack.enter_context(torch.no_grad())
            try:
                with _quiet():
                    self.reader(torch.tensor([ids]))
            except Exception as error:  # whatever a model of others raises
                raise ValueError(f"{self.name} can't read a text alone: {_brief(error)}.") from None
        for layer in seen:
            if any(bool((call.lse.isnan() | call.lse.isposinf()).any()) for call in seen.calls(layer)):
                raise ValueError(f"{self.name} computes NaN or infinity in {layer}: its weights are broken.")
        return seen


def load(name: str | os.PathLike[str] | None = None) -> Model:
    """The model in a folder, a checkpoint of `manyheads train` or a model of Hugging Face; None is ours.

    A name that is no folder is looked up in the local cache of Hugging Face.

    Raises FileNotFoundError where there is none, ValueError for one that can't be loaded or reads no
    text, ImportError without transformers for one of theirs.
    """
    if name is None:
        return _ours(SHIPPED, None)
    folder = Path(name) if Path(name).exists() else _cached(os.fspath(name))
    return _theirs(os.fspath(name), folder) if _is_theirs(folder) else _ours(os.fspath(name), folder)


def _cached(name: str) -> Path:
    """The folder of a model in the local cache of Hugging Face."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    missing = f"a model is a folder or a name in the local cache of Hugging Face, and {name} is neither"
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:
        raise FileNotFoundError(f"{missing}.") from None
    except OSError:
        raise FileNotFoundError(f"{missing}: if it is a name, get it first, hf download {name}.") from None


def _is_theirs(folder: Path) -> bool:
    """Is this a model of transformers? Its config says of which type it is, and its weights aren't ours."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            ours = is_ours(file.metadata())
    except (OSError, SafetensorError):  # theirs may have other files
        ours = False
    return isinstance(config, dict) and "model_type" in config and not ours


# -- ours ------------------------------------------------------------------------------------------


def _ours(name: str, folder: Path | None) -> Model:
    """A checkpoint of `lm`. A text that begins with a word gets a space before it, as within a longer
    text: so its first "the" is the same token as its second."""
    model, tokenizer = lm.load(folder)

    def encode(text: str, most: int | None) -> list[Token]:
        ids = tokenizer.encode(text if text[:1].isspace() else f" {text}").ids
        return tokens(tokenizer, ids[:most])

    def of(model: lm.LanguageModel) -> Model:
        return Model(
            name,
            model,
            model,
            model.context,
            encode,
            stretched=lambda context: of(model.stretched(context)),
            layers=tuple(model.blocks),
        )

    return of(model)


# -- theirs ----------------------------------------------------------------------------------------


def _theirs(name: str, folder: Path) -> Model:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ImportError(
            f"{name} is a Hugging Face model and needs transformers, which isn't installed. "
            "Run pip install '.[hf]' in a clone of manyheads."
        ) from None
    with _quiet():
        model = _model(name, folder)
        tokenizer = _tokenizer(name, folder)
    reader, known = _reader(model), _vocabulary(model)

    def encode(text: str, most: int | None) -> list[Token]:
        with _quiet():
            found = _tokens(tokenizer, text, most)
        for token in found:
            if known is not None and token.id >= known:
                raise ValueError(
                    f"{name}: the model knows {known} tokens, and its tokenizer gives number {token.id}: "
                    "they don't belong together."
                )
        return found

    notes = () if reader is model else ("of an encoder-decoder model the encoder is shown",)
    return Model(name, model, reader, _context(reader, tokenizer), encode, notes)


def _model(name: str, folder: Path) -> Any:
    """The weights in a folder as a model for evaluation, without any head."""
    from transformers import AutoModel

    try:
        model, loaded = AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told of below
        )
    except Exception as error:  # of many kinds
        raise ValueError(f"{name} can't be loaded as a model of Hugging Face: {_brief(error)}.") from None
    if model.main_input_name != "input_ids":
        raise ValueError(f"{name} reads {model.main_input_name}, and show needs a model that reads text.")
    # What isn't there is made up: no harm behind the last layer, in a decoder, or in a constant.
    reads = {id(x) for x in _reader(model).parameters()}
    lost = {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])}
    made_up = [
        path
        for path, x in model.named_parameters()
        if path in lost and id(x) in reads and "pooler" not in path
        if "Sinusoid" not in type(model.get_submodule(path.rpartition(".")[0])).__name__
    ]
    if made_up:
        raise ValueError(
            f"{name}: {len(made_up)} of the weights that its config.json speaks of aren't there, or of "
            f"another size, {made_up[0]} for one: the files belong to different models."
        )
    return model.eval()


def _reader(model: Any) -> Any:
    """What reads a text: the encoder, where the model wants another text for its decoder; else the model."""
    return model.get_encoder() if "decoder_input_ids" in signature(model.forward).parameters else model


def _vocabulary(model: Any) -> int | None:
    """How many tokens a model knows, if it says."""
    try:
        return len(model.get_input_embeddings().weight)
    except (AttributeError, NotImplementedError):
        return None


def _tokenizer(name: str, folder: Path) -> Any:
    """The tokenizer in a folder, which must be there: transformers would make an empty one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, truncation_side="right"
        )
        files = type(tokenizer).vocab_files_names.values()
        if files and not any((folder / file).exists() for file in {*files, "tokenizer.json"}):
            raise ValueError(f"there is no {' or '.join(sorted({*files, 'tokenizer.json'}))}")
    except Exception as error:  # of many kinds
        raise ValueError(f"{name} has no tokenizer that can be loaded: {_brief(error)}.") from None
    return tokenizer


def _tokens(tokenizer: Any, text: str, most: int | None) -> list[Token]:
    """A text as the tokens that its model reads, special ones included, with the tokenizer's labels."""
    encoded = tokenizer(text, truncation=most is not None, max_length=most, return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    labels = [printable(label) for label in tokenizer.convert_ids_to_tokens(ids)]
    if not encoded.is_fast:  # it doesn't say where in the text a token stands
        special = encoded["special_tokens_mask"]
        texts = ["" if special[n] else tokenizer.decode([i]) or labels[n] for n, i in enumerate(ids)]
        return [Token(*one, None) for one in zip(ids, texts, labels, strict=True)]
    spans, parts = encoded.encodings[0].offsets, encoded.encodings[0].word_ids
    return [
        Token(i, text[slice(*span)], label, printable(covered(text, spans, run)) if len(run) > 1 else None)
        for i, span, label, run in zip(ids, spans, labels, words(text, spans, parts), strict=True)
    ]


def _context(reader: Any, tokenizer: Any) -> int | None:
    """The most tokens that a model reads: what it says, or what its tables of positions hold; if it has
    neither, what its tokenizer says."""
    config = reader.config.get_text_config()
    most = [getattr(config, name) for name in CONTEXTS if isinstance(getattr(config, name, None), int)]
    for path, part in reader.named_modules():
        if f".{path}".endswith(".position_embeddings") and isinstance(part, nn.Embedding):
            # With a padding token, positions begin behind its number: so do RoBERTa's.
            most.append(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    most = most or [tokenizer.model_max_length]
    return min(most) if 0 < min(most) < 10**9 else None


@contextmanager
def _quiet() -> Iterator[None]:
    """A time in which transformers prints and logs nothing, and nobody warns."""
    if sys.modules.get("transformers") is None:
        yield
        return
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def _brief(error: Exception) -> str:
    """The first sentence of an error of others, without its full stop."""
    said = shorten(str(error), 300, placeholder=" …") or type(error).__name__
    return re.split(r"(?<=[.!]) ", said)[0].rstrip(".! ")
