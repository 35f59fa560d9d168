"""Models that read text, with their tokenizers: checkpoints of `manyheads train` and Hugging Face models.

Hugging Face models are loaded from a folder or from the local cache. Nothing is downloaded, no code that
comes with a model is run, and the messages of transformers are suppressed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from manyheads import extras, lm
from manyheads.lm.checkpoint import is_ours
from manyheads.observe import Recording, observe
from manyheads.tokens import TokenizedText

SHIPPED = "shipped"  # the name of the model that comes with the package
# Names that configurations use for the length of the longest text that a model reads.
CONTEXTS = ("max_position_embeddings", "max_encoder_position_embeddings", "n_positions", "max_seq_len")
MARGIN = 64  # tokens after the last one that may share a character with it


@dataclass(frozen=True)
class Model:
    """A model that reads text, one sequence at a time, on the CPU.

    Attributes:
        name: The name that the caller used.
        module: The model.
        reader: The part of the model that reads text. It is called with ids `[1, t]`.
        context: The largest number of tokens that it reads; None if there is no limit.
        encode: A function of a text and the largest number of tokens (None: no limit) that returns the ids of
            its tokens, and the text with its tokens.
        notes: Sentences to show with its maps.
        scaled: A function that returns the model with its rotary frequencies scaled for a number of tokens
            beyond the context; None if the model doesn't support this.
        layers: The modules of the layers, in order, if they are known.
        hidden: A function of ids `[b, t]` that runs all layers, but computes no logits; None if `reader`
            computes none.
        logits: A function of ids `[b, t]` that returns the logits of the next tokens `[b, t, vocab]`; None if
            the model doesn't predict them.
    """

    name: str
    module: nn.Module
    reader: Callable[[torch.Tensor], object]
    context: int | None
    encode: Callable[[str, int | None], tuple[list[int], TokenizedText]]
    notes: tuple[str, ...] = ()
    scaled: Callable[[int], Model] | None = None
    layers: tuple[nn.Module, ...] = ()
    hidden: Callable[[torch.Tensor], object] | None = None
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None

    def losses(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token but the first, given the tokens before it.

        Args:
            ids: The tokens `[b, t]`.

        Returns:
            The losses in nats, `[b, t - 1]`.

        Raises:
            ValueError: If the model doesn't predict the next token.
        """
        if self.logits is None:
            raise ValueError(
                f"Expected a model that predicts the next token, got {self.name}, which was loaded without "
                "the layer that does. Give its name, or load it with with_logits=True."
            )
        with torch.no_grad(), _quiet():
            logits = self.logits(ids[:, :-1])  # [b, t - 1, vocab]
        return F.cross_entropy(logits.float().mT, ids[:, 1:], reduction="none")

    def read(self, ids: Sequence[int], on_layer: Callable[[], object] = lambda: None) -> Recording:
        """Record the attention of the model while it reads a text.

        Args:
            ids: The tokens.
            on_layer: A function that is called after each layer.

        Returns:
            The recording.

        Raises:
            ValueError: If the model can't read a text, calls no attention, or computes NaN or infinity.
        """

        def hook(*_: object) -> None:
            on_layer()

        with ExitStack() as stack:
            for module in self.layers:
                stack.callback(module.register_forward_hook(hook).remove)
            recording = stack.enter_context(observe(self.module))
            stack.enter_context(torch.no_grad())
            try:
                with _quiet():
                    self.reader(torch.tensor([ids]))
            except Exception as error:  # a Hugging Face model may raise any
                raise ValueError(
                    f"{self.name} can't read a plain text: {_first_sentence(error)}. Choose a model of text."
                ) from None
        for layer in recording:
            if any(bool((call.lse.isnan() | call.lse.isposinf()).any()) for call in recording.calls(layer)):
                raise ValueError(f"{self.name} computes NaN or infinity in {layer}. Load its weights again.")
        return recording


def load(name: str | os.PathLike[str] | None = None, with_logits: bool = False) -> Model:
    """Load a model that reads text.

    Args:
        name: A folder with a checkpoint of `manyheads train` or a Hugging Face model, or a name in the local
            cache of Hugging Face. None is the model that ships with manyheads.
        with_logits: Whether it must predict the next token. Of a Hugging Face model, the layer that does is
            loaded only then.

    Returns:
        The model with its tokenizer.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If it can't be loaded, doesn't read text, or doesn't predict the next token and must.
        ImportError: If it is a Hugging Face model and transformers isn't installed.
    """
    if name is None:
        return _load_checkpoint(SHIPPED, None)
    folder = Path(name) if Path(name).exists() else _find_cached(os.fspath(name))
    if _is_hugging_face(folder):
        return _load_hugging_face(os.fspath(name), folder, with_logits)
    return _load_checkpoint(os.fspath(name), folder)


def _find_cached(name: str) -> Path:
    """Return the folder of a model in the local cache of Hugging Face."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    expected = f"Expected a folder or a name in the local cache of Hugging Face, got {name}."
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:  # the text isn't a valid name
        raise FileNotFoundError(expected) from None
    except OSError:
        raise FileNotFoundError(f"{expected} If it is a name, run hf download {name}.") from None


def _is_hugging_face(folder: Path) -> bool:
    """Return True if a folder has a model of transformers, not a checkpoint of manyheads."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            is_checkpoint = is_ours(file.metadata())
    except (OSError, SafetensorError):  # its weights may be in other files
        is_checkpoint = False
    return isinstance(config, dict) and "model_type" in config and not is_checkpoint


# -- checkpoints of manyheads ----------------------------------------------------------------------


def _load_checkpoint(name: str, folder: Path | None) -> Model:
    model, tokenizer = lm.load(folder)

    def encode(text: str, limit: int | None) -> tuple[list[int], TokenizedText]:
        # A space is added, so that a "the" at the start is the same token as later ones.
        added = 0 if text[:1].isspace() else 1
        encoding = tokenizer.encode(" " * added + text)
        if limit is not None:
            encoding.truncate(limit + MARGIN)
        spans = [(max(0, start - added), stop - added) for start, stop in encoding.offsets]
        tokens = TokenizedText.from_spans(text, spans, encoding.tokens)
        return encoding.ids[:limit], tokens[:limit]

    def run_layers(model: lm.LanguageModel, ids: torch.Tensor) -> torch.Tensor:
        model.check(ids, None)
        x = model.embed(ids)  # [b, t, e]
        for block in model.blocks:
            x = block(x)
        return x

    def wrap(model: lm.LanguageModel) -> Model:
        return Model(
            name,
            model,
            model,
            model.context,
            encode,
            scaled=lambda context: wrap(model.scaled(context)),
            layers=tuple(model.blocks),
            hidden=partial(run_layers, model),
            logits=model,
        )

    return wrap(model)


# -- Hugging Face models ---------------------------------------------------------------------------


def _load_hugging_face(name: str, folder: Path, with_logits: bool) -> Model:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise extras.missing(f"{name} is a Hugging Face model and", "transformers", "hf") from None
    logits = None
    with _quiet():
        if with_logits:
            predictor = _load_predictor(name, folder)
            model, logits = predictor.base_model, partial(_compute_logits, predictor)
        else:
            model = _load_weights(name, folder)
        tokenizer = _load_tokenizer(name, folder)
    reader, vocabulary = _find_reader(model), None
    with suppress(AttributeError, NotImplementedError):  # some models have no input embeddings
        vocabulary = len(model.get_input_embeddings().weight)

    def encode(text: str, limit: int | None) -> tuple[list[int], TokenizedText]:
        with _quiet():
            ids, tokens = _encode(tokenizer, text, limit)
        largest = max(ids, default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise ValueError(
                f"{name}: the tokenizer returned the id {largest}, and the model has {vocabulary} tokens. "
                "They belong to different models."
            )
        return ids, tokens

    notes = () if reader is model else ("the encoder of an encoder-decoder model is shown",)
    return Model(name, model, reader, _find_context(reader, tokenizer), encode, notes, logits=logits)


def _load_predictor(name: str, folder: Path) -> Any:
    """Return the causal language model of a folder, whose `base_model` is that of `_load_weights`."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    expected = f"Expected a model that predicts the next token from earlier ones, got {name}, "
    hint = "Choose a causal language model."
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        raise ValueError(
            f"{name} can't be loaded by transformers: {_first_sentence(error)}. "
            "Download it again with hf download."
        ) from None
    if config.is_encoder_decoder:
        raise ValueError(f"{expected}an encoder-decoder model, whose encoder reads the text. {hint}")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{expected}whose type {config.model_type} has no such model in transformers. {hint}"
        )
    predictor = _load_weights(name, folder, "AutoModelForCausalLM")
    # A masked language model, such as BERT, can be loaded as a causal one, but reads later tokens too.
    ids = torch.arange(1, 9).clamp(max=config.get_text_config().vocab_size - 1)[None]
    other = ids.clone()
    other[0, -1] = 0
    with torch.no_grad():
        first, second = (_compute_logits(predictor, each)[:, :-1] for each in (ids, other))
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{expected}whose predictions depend on later ones. {hint}")
    return predictor


def _compute_logits(predictor: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the next tokens `[b, t, vocab]` for ids `[b, t]`."""
    logits: torch.Tensor = predictor(input_ids=ids, use_cache=False).logits
    return logits


def _load_weights(name: str, folder: Path, loader: str = "AutoModel") -> Any:
    """Return the model of a folder in evaluation mode; by `AutoModel`, without the layer that predicts."""
    import transformers

    try:
        model, loaded = getattr(transformers, loader).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below
        )
    except Exception as error:  # transformers raises many types
        raise ValueError(
            f"{name} can't be loaded by transformers: {_first_sentence(error)}. "
            "Download it again with hf download."
        ) from None
    if model.main_input_name != "input_ids":
        raise ValueError(f"Expected a model of text, got {name}, which reads {model.main_input_name}.")
    # transformers initializes missing weights at random. This is harmless in a decoder and in a pooler after
    # the last layer, which aren't used, and for sinusoidal tables, which aren't random.
    reads = {id(x) for x in _find_reader(model).parameters()}
    absent = {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])}
    random = [
        path
        for path, x in model.named_parameters()
        if path in absent and id(x) in reads and "pooler" not in path
        if "Sinusoid" not in type(model.get_submodule(path.rpartition(".")[0])).__name__
    ]
    inner = {id(x) for x in model.base_model.parameters()}
    if random and not any(id(model.get_parameter(path)) in inner for path in random):
        raise ValueError(
            f"Expected a model that predicts the next token, got {name}, which was saved without the layer "
            "that does. Choose one that was saved as a causal language model."
        )
    if random:
        raise ValueError(
            f"{name}: {len(random)} of the weights that config.json describes are missing or have the wrong "
            f"size, the first is {random[0]}. The files belong to different models."
        )
    return model.eval()


def _find_reader(model: Any) -> Any:
    """Return the part that reads a text: the encoder, if the decoder needs a separate input."""
    return model.get_encoder() if "decoder_input_ids" in signature(model.forward).parameters else model


def _load_tokenizer(name: str, folder: Path) -> Any:
    """Return the tokenizer of a folder. If its files are missing, transformers creates an empty one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, truncation_side="right"
        )
        files = type(tokenizer).vocab_files_names.values()
        if files and not any((folder / file).exists() for file in {*files, "tokenizer.json"}):
            raise ValueError(f"there is no {' or '.join(sorted({*files, 'tokenizer.json'}))}")
    except Exception as error:  # transformers raises many types
        raise ValueError(
            f"{name} has no tokenizer that can be loaded: {_first_sentence(error)}. Save one beside it."
        ) from None
    return tokenizer


def _encode(tokenizer: Any, text: str, limit: int | None) -> tuple[list[int], TokenizedText]:
    """Return the tokens of a text as the model reads them, including special tokens."""
    encoded = tokenizer(text, truncation=limit is not None, max_length=limit)
    ids = encoded["input_ids"]
    if encoded.is_fast:
        return ids, TokenizedText.from_encoding(text, encoded)
    return ids, TokenizedText.from_ids(ids, tokenizer)  # a tokenizer in Python reports no offsets


def _find_context(reader: Any, tokenizer: Any) -> int | None:
    """Return the context length from the config or the position embeddings, else from the tokenizer."""
    config = reader.config.get_text_config()
    limits = [getattr(config, name) for name in CONTEXTS if isinstance(getattr(config, name, None), int)]
    for path, part in reader.named_modules():
        if f".{path}".endswith(".position_embeddings") and isinstance(part, nn.Embedding):
            # With a padding token, as in RoBERTa, the first position is the index after it.
            limits.append(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    limit = min(limits or [tokenizer.model_max_length])
    return limit if 0 < limit < 10**9 else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log, the progress bars and the warnings of transformers."""
    if sys.modules.get("transformers") is None:
        yield
        return
    from transformers.utils import logging as log

    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, without its full stop."""
    message = shorten(str(error), 300, placeholder=" …") or type(error).__name__
    return re.split(r"(?<=[.!]) ", message)[0].rstrip(".! ")
