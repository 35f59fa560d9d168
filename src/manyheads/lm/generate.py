"""Generation: one token after another, with the key/value cache."""

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
    """How to draw a token from logits; ValueError or TypeError for what can't be.

    temperature: logits are divided by it; 0 takes the likeliest token (greedy).
    top_k: only the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833); all if None.
    top_p: of these the likeliest whose probabilities first sum to p (Holtzman et al. 2019,
        arXiv:1904.09751).
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
        """One token id from logits `[vocab]`, drawn by the generator random, or by PyTorch's own."""
        if self.temperature == 0:
            return int(logits.argmax())
        top = logits.double() - logits.max()  # so that no temperature overflows
        ordered, ids = (top / self.temperature).sort(descending=True, stable=True)  # [vocab]
        if self.top_k is not None:
            ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        weights = ordered.softmax(-1)
        before = weights.cumsum(-1) - weights  # what the likelier ones sum to
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
    """Yield up to `tokens` ids that continue ids `[1, t]`; the end-of-text token ends it too.

    `sampling` is how each is drawn (`Sampling()` if None), `seed` what the draws begin from. `cached=False`
    reads everything anew for each token: slower, the same tokens. The model's context
    must hold prompt and tokens together: ValueError otherwise, before anything is generated. TypeError for
    what are no ids or no number.
    """
    whole(tokens, "tokens", 1)
    check_seed(seed)
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be one prompt [1, t], and {kind(ids)} came.")
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(f"ids must be one prompt [1, t] of at least one token, not {sizes(ids)}.")
    room = room_for(model, ids)
    if tokens > room:
        raise ValueError(
            f"the model's context is {model.context} tokens: after a prompt of "
            f"{ids.shape[1]} there is room for {room}, and {tokens} came."
        )
    return _continue(model, ids, tokens, sampling or Sampling(), seed, cached)


def room_for(model: LanguageModel, ids: Tensor) -> int:
    """How many tokens the context has room for after a prompt `[1, t]`."""
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
    """What `complete` made: the text after the prompt, and why it ended there.

    end: the "tokens" asked for, a "stop" text, the "end" of the text, or the "context" is full; empty for a
        piece of `stream` that another one follows.
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
    """Continue a prompt, up to `tokens` tokens, before `stop`, or until the context is full.

    `model` and `tokenizer` are what `load` gives; `sampling` and `seed` are as in `generate`. Raises
    ValueError for an empty prompt, one that fills the context, an empty `stop`; TypeError for what is no
    number of tokens.
    """
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
    """Yield the text of `complete` in pieces, each as soon as no later token can change it.

    Characters that are split over several tokens come whole, and nothing of `stop` is given. The last piece
    has the `end`; its text may be empty.

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
        raise ValueError("stop must be some text, and an empty one came: leave it out.")
    if not prompt:
        raise ValueError("the prompt must have some text, and an empty one came.")
    ids = torch.tensor([tokenizer.encode(prompt).ids], dtype=torch.int64)  # [1, t]
    room = room_for(model, ids)
    if room == 0:
        raise ValueError(
            f"the model's context is {model.context} tokens, and the prompt has "
            f"{ids.shape[1]}: shorten it to leave room for an answer."
        )
    drawn = generate(model, ids, min(tokens, room), sampling, seed=seed)
    return _pieces(tokenizer, drawn, stop or "", tokens, room)


def _pieces(tokenizer: Tokenizer, drawn: Iterator[int], stop: str, tokens: int, room: int) -> Iterator[Text]:
    made: list[int] = []
    text, given = "", 0
    for token in drawn:
        made.append(token)
        text = tokenizer.decode(made)
        if stop and stop in text:
            yield Text(text[given : text.index(stop)], "stop")
            return
        # A character whose bytes aren't complete yet decodes to U+FFFD; the next token may change it.
        final = text.rstrip("\N{REPLACEMENT CHARACTER}")
        final = final[: len(final) - _begun(final, stop)]
        if len(final) > given:
            yield Text(final[given:], "")
            given = len(final)
    end = "end" if len(made) < min(tokens, room) else "tokens" if tokens <= room else "context"
    yield Text(text[given:], end)


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
