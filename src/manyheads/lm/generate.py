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
    """How a token is drawn from logits.

    Attributes:
        temperature: The logits are divided by it. 0 takes the most likely token (greedy).
        top_k: Draw from the k most likely tokens (Fan et al. 2018, arXiv:1805.04833), from all if None.
        top_p: Draw from the most likely of these whose probabilities sum to p (Holtzman et al. 2019,
            arXiv:1904.09751).

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
        top = logits.double() - logits.max()  # so that no temperature overflows
        ordered, ids = (top / self.temperature).sort(descending=True, stable=True)  # [vocab]
        if self.top_k is not None:
            ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        weights = ordered.softmax(-1)
        before = weights.cumsum(-1) - weights  # the sum over more likely tokens
        weights = weights * (before < self.top_p)
        return int(ids[torch.multinomial(weights, 1, generator=random)])


def generate(
    model: LanguageModel,
    ids: Tensor,
    tokens: int = 100,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    cached: bool = True,
) -> Iterator[int]:
    """Generate the ids that continue a prompt, up to an end-of-text token.

    Args:
        model: The model.
        ids: The prompt `[1, t]`.
        tokens: The largest number of tokens to generate.
        sampling: How each token is drawn; None is `Sampling()`.
        seed: The random seed of the draws.
        cached: If False, read the whole text again for each token: slower, with the same result.

    Returns:
        An iterator over the ids. The arguments are checked before it is returned.

    Raises:
        TypeError: If ids isn't a tensor, or tokens or seed isn't an integer.
        ValueError: If ids isn't a prompt, or prompt and tokens exceed the context.
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
    """Return how many tokens fit into the context after a prompt `[1, t]`."""
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
        end: Why it ended: "tokens" (the requested number), "stop" (the stop text), "end" (an end-of-text
            token) or "context" (it is full). Empty for a piece of `stream` before the last.
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
    """Continue a prompt until there are `tokens` tokens, `stop` is generated, or the context is full.

    The text comes in pieces, each as soon as no later token can change it. No character is split over two
    pieces, and no piece contains a part of `stop`. The last piece has the `end`, and may have an empty text.

    Args:
        model: The model, as `load` returns it.
        tokenizer: Its tokenizer, as `load` returns it.
        prompt: The text to continue.
        tokens: The largest number of tokens to generate.
        sampling: How each token is drawn; None is `Sampling()`.
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
        raise ValueError("Expected stop to have some text, got an empty one. Leave it out.")
    if not prompt:
        raise ValueError("Expected a prompt with some text, got an empty one.")
    ids = torch.tensor([tokenizer.encode(prompt).ids], dtype=torch.int64)  # [1, t]
    free = _free_tokens(model, ids)
    if free == 0:
        raise ValueError(
            f"Expected a prompt shorter than the model's context, {model.context}, got {ids.shape[1]} "
            "tokens. Shorten it."
        )
    drawn = generate(model, ids, min(tokens, free), sampling, seed=seed)
    return _pieces(tokenizer, drawn, stop or "", tokens, free)


def _pieces(tokenizer: Tokenizer, drawn: Iterator[int], stop: str, tokens: int, free: int) -> Iterator[Text]:
    ids: list[int] = []
    text, done = "", 0
    for token in drawn:
        ids.append(token)
        text = tokenizer.decode(ids)
        if stop and stop in text:
            yield Text(text[done : text.index(stop)], "stop")
            return
        # An incomplete character decodes to U+FFFD, which the next token may change.
        final = text.rstrip("\N{REPLACEMENT CHARACTER}")
        final = final[: len(final) - _count_begun(final, stop)]
        if len(final) > done:
            yield Text(final[done:], "")
            done = len(final)
    end = "end" if len(ids) < min(tokens, free) else "tokens" if tokens <= free else "context"
    yield Text(text[done:], end)


def _count_begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
