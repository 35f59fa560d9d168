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
from manyheads.shapes import kind, real, sizes, whole

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
    whole(seed, "seed")
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be one prompt [1, t], and {kind(ids)} came.")
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(f"ids must be one prompt [1, t] of at least one token, not {sizes(ids)}.")
    room = room_for(model, ids)
    if tokens > room:
        raise ValueError(
            f"the model's context is {model.config.context} tokens: after a prompt of "
            f"{ids.shape[1]} there is room for {room}, and {tokens} came."
        )
    return _continue(model, ids, tokens, sampling or Sampling(), seed, cached)


def room_for(model: LanguageModel, ids: Tensor) -> int:
    """How many tokens the context has room for after a prompt `[1, t]`."""
    return max(0, model.config.context - ids.shape[1])


@torch.inference_mode()
def _continue(
    model: LanguageModel, ids: Tensor, tokens: int, sampling: Sampling, seed: int, cached: bool
) -> Iterator[int]:
    random = torch.Generator().manual_seed(seed)
    caches = model.caches() if cached else None
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

    end: the "tokens" asked for, a "stop" text, the "end" of the text, or the "context" is full.
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
    whole(tokens, "tokens", 1)
    if stop == "":
        raise ValueError("stop must be some text, and an empty one came: leave it out.")
    if not prompt:
        raise ValueError("the prompt must have some text, and an empty one came.")
    ids = torch.tensor([tokenizer.encode(prompt).ids], dtype=torch.int64)  # [1, t]
    room = room_for(model, ids)
    if room == 0:
        raise ValueError(
            f"the model's context is {model.config.context} tokens, and the prompt has "
            f"{ids.shape[1]}: shorten it to leave room for an answer."
        )
    made: list[int] = []
    for token in generate(model, ids, min(tokens, room), sampling, seed=seed):
        made.append(token)
        text = tokenizer.decode(made)
        if stop is not None and stop in text:
            return Text(text[: text.index(stop)], "stop")
    end = "end" if len(made) < min(tokens, room) else "tokens" if tokens <= room else "context"
    return Text(tokenizer.decode(made), end)
