"""Text generation with the key/value cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.lm.data import END_ID
from manyheads.lm.model import LanguageModel
from manyheads.shapes import check_seed, kind, real, sizes, whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing a token from logits.

    Attributes:
        temperature: The number by which logits are divided. 0 takes the most likely token (greedy).
        top_k: The number of most likely tokens to draw from (Fan et al. 2018, arXiv:1805.04833), all if None.
        top_p: The probability p: of these tokens, draw from the most likely ones whose probabilities sum to p
            (Holtzman et al. 2019, arXiv:1904.09751).

    Raises:
        TypeError: If a value isn't a number.
        ValueError: If a value is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        real(self.temperature, "temperature", lambda x: 0 <= x < math.inf, "0 (greedy) or a positive number")
        if self.top_k is not None:
            whole(self.top_k, "top-k", 1)
        real(self.top_p, "top-p", lambda p: 0 < p <= 1, "above 0 and at most 1")

    def draw(self, logits: Tensor, random: torch.Generator | None = None) -> int:
        """Draw a token.

        Args:
            logits: The logits `[vocab]`.
            random: The random generator, PyTorch's own if None.

        Returns:
            The id of the token.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        logits = logits.double() - logits.max()  # at most 0, so that dividing can't overflow
        ordered, ids = (logits / self.temperature).sort(descending=True, stable=True)  # [vocab]
        if self.top_k is not None:
            ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        probabilities = ordered.softmax(-1)
        more_likely = probabilities.cumsum(-1) - probabilities  # the sum over all more likely tokens
        probabilities = probabilities * (more_likely < self.top_p)
        return int(ids[torch.multinomial(probabilities, 1, generator=random)])


def generate(
    model: LanguageModel,
    ids: Tensor,
    tokens: int = 100,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    cached: bool = True,
) -> Iterator[int]:
    """Generate the ids that continue a prompt, until the model generates an end-of-text token.

    Args:
        model: The model.
        ids: The prompt `[1, t]`.
        tokens: The largest number of tokens to generate.
        sampling: The settings for drawing tokens, `Sampling()` if None.
        seed: The random seed of the draws.
        cached: Whether to keep keys and values in a cache. If not, the model reads the whole text for each
            token, which is slower and gives the same ids.

    Returns:
        An iterator over the ids. The arguments are checked before it is returned.

    Raises:
        TypeError: If ids isn't a tensor, or tokens or seed isn't an integer.
        ValueError: If ids has the wrong shape or is empty, or prompt and tokens exceed the context.
    """
    whole(tokens, "tokens", 1)
    check_seed(seed)
    if not isinstance(ids, Tensor):
        raise TypeError(f"Expected ids to be one prompt [1, t], got {kind(ids)}.")
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(f"Expected ids to be one prompt [1, t] with a token or more, got {sizes(ids)}.")
    free = _free_tokens(model, ids)
    if tokens > free:
        raise ValueError(
            f"Expected at most {free} tokens, as the model's context is {model.context} and the prompt has "
            f"{ids.shape[1]}, got {tokens}."
        )
    return _continue(model, ids, tokens, sampling or Sampling(), seed, cached)


def _free_tokens(model: LanguageModel, ids: Tensor) -> int:
    """Return the number of tokens that fit into the context after a prompt `[1, t]`."""
    return max(0, model.context - ids.shape[1])


@torch.inference_mode()
def _continue(
    model: LanguageModel, ids: Tensor, tokens: int, sampling: Sampling, seed: int, cached: bool
) -> Iterator[int]:
    random = torch.Generator().manual_seed(seed)
    caches = model.caches(ids.shape[1] + tokens) if cached else None
    new = ids
    for _ in range(tokens):
        logits = model(new if cached else ids, caches)[0, -1]  # [vocab]
        token = sampling.draw(logits.float().cpu(), random)
        if token == END_ID:
            return
        yield token
        new = ids.new_tensor([[token]])
        ids = torch.cat([ids, new], 1)


@dataclass(frozen=True)
class Text:
    """A generated text, or a piece of one.

    Attributes:
        text: The text after the prompt.
        end: Why generation ended: "tokens" (the requested number was generated), "stop" (the stop text was
            generated), "end" (an end-of-text token was generated) or "context" (the context is full). Empty
            for all pieces of `stream` but the last.
    """

    text: str
    end: str


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = 100,
    sampling: Sampling | None = None,
    *,
    stop: str | None = None,
    seed: int = 0,
) -> Text:
    """Return the whole continuation of a prompt. Arguments and errors are those of `stream`."""
    pieces = list(stream(model, tokenizer, prompt, tokens, sampling, stop=stop, seed=seed))
    return Text("".join(piece.text for piece in pieces), pieces[-1].end)


def stream(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = 100,
    sampling: Sampling | None = None,
    *,
    stop: str | None = None,
    seed: int = 0,
) -> Iterator[Text]:
    """Continue a prompt until `tokens` tokens or `stop` are generated, or the context is full.

    The text is returned in pieces, each as soon as no later token can change it. No character is split
    between two pieces, and no piece contains a part of `stop`. The last piece has the `end`, and its text may
    be empty.

    Args:
        model: The model, as `load` returns it.
        tokenizer: Its tokenizer, as `load` returns it.
        prompt: The text to continue.
        tokens: The largest number of tokens to generate.
        sampling: The settings for drawing tokens, `Sampling()` if None.
        stop: The text that ends the generation.
        seed: The random seed of the draws.

    Returns:
        An iterator over the pieces. The arguments are checked before it is returned.

    Raises:
        ValueError: If the prompt or `stop` is empty, or the prompt fills the context.
        TypeError: If `tokens` or `seed` is not an integer.
    """
    whole(tokens, "tokens", 1)
    if stop == "":
        raise ValueError("Expected stop to be a text, got an empty one. Leave it out if you need none.")
    if not prompt:
        raise ValueError("Expected a prompt of at least one character, got an empty one.")
    ids = torch.tensor([tokenizer.encode(prompt).ids], dtype=torch.int64)  # [1, t]
    free = _free_tokens(model, ids)
    if free == 0:
        raise ValueError(
            f"Expected a prompt shorter than the model's context, {model.context}, got {ids.shape[1]} "
            "tokens. Shorten it."
        )
    generated = generate(model, ids, min(tokens, free), sampling, seed=seed)
    return _pieces(tokenizer, generated, stop or "", tokens, free)


def _pieces(
    tokenizer: Tokenizer, generated: Iterator[int], stop: str, tokens: int, free: int
) -> Iterator[Text]:
    ids: list[int] = []
    text, done = "", 0  # `done` is the number of characters in the pieces so far
    for token in generated:
        ids.append(token)
        text = tokenizer.decode(ids)
        if stop and stop in text:
            yield Text(text[done : text.index(stop)], "stop")
            return
        # An incomplete character decodes to U+FFFD, which the next token may change.
        final = text.rstrip("\N{REPLACEMENT CHARACTER}")
        final = final[: len(final) - _overlap(final, stop)]
        if len(final) > done:
            yield Text(final[done:], "")
            done = len(final)
    end = "end" if len(ids) < min(tokens, free) else "tokens" if tokens <= free else "context"
    yield Text(text[done:], end)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
