"""Which keys a cache keeps: four policies from papers, and what a policy costs.

    cache.keep(policies.SnapKV(budget=256))

A policy is a function of the cache that returns the keys to keep, as `Cache.keep` describes. Those of this
module are objects with a budget, the number of keys that a head keeps; with fewer keys they keep all.

    policy                  keeps, besides the most recent keys         it needs
    Recency(budget)         nothing                                     nothing
    AttentionSinks(budget)  the first keys                              nothing
    SnapKV(budget)          keys that the last queries attend to        Cache(votes=32), its window
    H2O(budget)             keys that all queries have attended to      Cache(votes="all")

`measure` computes what a policy costs in one attention layer, and `measure_model` in a language model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.biases import Bias
from manyheads.cache import Cache
from manyheads.functional import attention_with_map
from manyheads.maps import AttentionMap
from manyheads.masks import Drop, Mask
from manyheads.shapes import kind, shape_of, sizes, whole

Votes = int | Literal["all"] | None
Policy = Callable[[Cache], Tensor]


@dataclass(frozen=True)
class Recency:
    """Keep the most recent keys, as a sliding window does (Beltagy et al. 2020, arXiv:2004.05150).

    Attributes:
        budget: The number of keys to keep.

    Raises:
        TypeError: If the budget isn't an integer.
        ValueError: If it is less than 1.
    """

    budget: int

    def __post_init__(self) -> None:
        whole(self.budget, "the budget of Recency", least=1)

    def __call__(self, cache: Cache) -> Tensor:
        """Return the keys to keep, `[n]`."""
        return torch.arange(len(cache))[-self.budget :]


@dataclass(frozen=True)
class AttentionSinks:
    """Keep the first keys and the most recent ones: StreamingLLM (Xiao et al. 2023, arXiv:2309.17453).

    The paper counts positions within the cache, so that they stay in the trained range in endless texts; here
    keys keep the positions that they have in the text.

    Attributes:
        budget: The number of keys to keep, the first ones included.
        sinks: The number of first keys to keep.

    Raises:
        TypeError: If a number isn't an integer.
        ValueError: If there are fewer sinks than 1, or the budget has no room for a recent key.
    """

    budget: int
    sinks: int = 4

    def __post_init__(self) -> None:
        whole(self.sinks, "sinks", least=1)
        whole(self.budget, f"the budget of AttentionSinks, with {self.sinks} sinks,", least=self.sinks + 1)

    def __call__(self, cache: Cache) -> Tensor:
        """Return the keys to keep, `[n]`."""
        keys = torch.arange(len(cache))
        return torch.cat((keys[: self.sinks], keys[self.sinks :][self.sinks - self.budget :]))


@dataclass(frozen=True)
class H2O:
    """Keep recent keys, and those with the largest sums of weights: heavy hitters (Zhang et al. 2023).

    The paper (arXiv:2306.14048) adds up the weights of all queries so far, and drops a key after each token;
    call `cache.keep` as often as you like. Query heads that share a key head vote together.

    Attributes:
        budget: The number of keys to keep.
        recent: The number of these that are the most recent, half of them if None, as in the paper.

    Raises:
        TypeError: If a number isn't an integer.
        ValueError: If the budget is less than 1, or there are more recent keys.
    """

    budget: int
    recent: int | None = None

    def __post_init__(self) -> None:
        whole(self.budget, "the budget of H2O", least=1)
        whole(self._recent, f"recent, with a budget of {self.budget},", most=self.budget)

    @property
    def _recent(self) -> int:
        return self.budget // 2 if self.recent is None else self.recent

    @property
    def votes(self) -> Votes:
        """The votes that the cache has to keep."""
        return "all"

    def __call__(self, cache: Cache) -> Tensor:
        """Return the keys to keep, `[b, g, n]`; raise ValueError if the cache keeps no votes, or NaN."""
        return _most_voted(group_votes(cache), self.budget, self._recent)


@dataclass(frozen=True)
class SnapKV:
    """Keep the last keys, and those that the last queries attend to (Li et al. 2024, arXiv:2404.14469).

    The votes of a key are the largest sum of weights among its neighbours, so that runs of keys are kept. The
    paper drops keys once, after the prompt. Query heads that share a key head vote together.

    Attributes:
        budget: The number of keys to keep.
        window: The number of last queries that vote, and of last keys that are kept: 32 if None, but at most
            half of the budget.
        pool: The number of neighbours, the key itself included, an odd number.

    Raises:
        TypeError: If a number isn't an integer.
        ValueError: If the budget is less than 1, the window larger than the budget, or pool isn't odd.
    """

    budget: int
    window: int | None = None
    pool: int = 7

    def __post_init__(self) -> None:
        whole(self.budget, "the budget of SnapKV", least=1)
        whole(self.votes, f"window, with a budget of {self.budget},", least=1, most=self.budget)
        if whole(self.pool, "pool", least=1) % 2 == 0:
            raise ValueError(
                f"Expected pool to be odd, with as many neighbours on each side, got {self.pool}."
            )

    @property
    def votes(self) -> int:
        """The votes that the cache has to keep: the window."""
        return min(32, max(self.budget // 2, 1)) if self.window is None else self.window

    def __call__(self, cache: Cache) -> Tensor:
        """Return the keys to keep, `[b, g, n]`; raise ValueError if the cache keeps too few votes, or NaN."""
        votes = group_votes(cache, self.votes)  # [b, g, s]
        before = votes[..., : max(votes.shape[2] - self.votes, 0)]
        if before.numel():
            before = F.max_pool1d(before, self.pool, stride=1, padding=self.pool // 2)
        return _most_voted(torch.cat((before, votes[..., before.shape[2] :]), 2), self.budget, self.votes)


def group_votes(cache: Cache, last: int | None = None) -> Tensor:
    """Return the attention that each key received from all query heads that share its key head.

    Args:
        cache: The cache.
        last: The number of queries, all whose votes the cache keeps if None.

    Returns:
        The sums of weights `[b, g, len(cache)]`.

    Raises:
        TypeError: If last isn't an integer.
        ValueError: If the cache keeps no votes, too few, or votes that are NaN.
    """
    received = cache.received(last)  # [b, h, s]
    is_nan = received.isnan()
    if is_nan.any():
        b, h, s = is_nan.nonzero()[0].tolist()
        raise ValueError(
            f"Expected votes that are numbers, got NaN for {int(is_nan.sum())} keys, the first of them key "
            f"{s} of batch entry {b}, head {h}. Find where queries or keys become NaN, for example by "
            "torch.isfinite of the layer's input, or use Recency or AttentionSinks, which need no votes."
        )
    return received.unflatten(1, (cache.keys.shape[1], -1)).sum(2)


def _most_voted(votes: Tensor, budget: int, recent: int) -> Tensor:
    """Return the last keys, and as many of those with the largest votes as the budget allows, `[b, g, n]`."""
    s = votes.shape[2]
    votes = votes.clone()
    votes[..., max(s - recent, 0) :] = torch.inf
    return votes.topk(min(budget, s)).indices


# -- what a policy costs -------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a policy costs in one attention layer. t counts the queries after the prompt."""

    kept: Tensor
    """The positions of the keys that are kept after the prompt, `[b, g, n]`."""
    dropped: Tensor
    """The weight that each query would have on dropped keys if all were kept, `[b, h, t]`, from 0 to 1."""
    error: Tensor
    """The change of each output, ‖kept − all‖ / ‖all‖ (Euclidean), `[b, h, t]`."""


class ModelCost(NamedTuple):
    """What a policy costs in a language model that uses it in each layer. t counts tokens after a prompt."""

    kept: Tensor
    """The positions of the keys that are kept after the prompt, `[layers, b, g, n]`."""
    dropped: Tensor
    """The weight that each query has on dropped keys in the model that keeps all, `[layers, b, h, t]`."""
    divergence: Tensor
    """The Kullback–Leibler divergence of the next token's probabilities, all ‖ kept, in nats, `[b, t]`."""
    loss: Tensor
    """The increase of the loss of each next token, in nats, `[b, t − 1]`; negative if keys were harmful."""


def measure(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prompt: int,
    every: int | None = None,
    votes: Votes = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Cost:
    """Compute what a policy drops, and how much the outputs change, in one attention layer.

    The prompt fills a cache, the policy chooses the keys to keep, and the other queries attend to these and
    to the keys after the prompt. They are compared with attention to all keys, for the same q, k and v.

    Args:
        policy: The policy, as for `Cache.keep`.
        q: The queries `[b, h, t, d]` of the prompt and of what follows, with their positional encoding.
        k: The keys `[b, g, t, d]`.
        v: The values `[b, g, t, w]`.
        prompt: The number of tokens of the prompt, from 1 to t − 1.
        every: Use the policy again after each `every` tokens. If None, use it once, after the prompt.
        votes: The votes that the cache keeps; those that the policy needs if None, "all" for a function.
        mask: The mask by position, `Causal()` if None; not `Keep`, `Drop` or `queries=`, which go by row.
        bias: The bias by position: `ALiBi` or `Relative`.
        scale: The factor of q·k, 1/√d if None.
        softcap: The softcap of the scores.
        sink: A logit per head, `[h]`.

    Returns:
        The cost of each query.

    Raises:
        TypeError: If an argument has the wrong type, or the policy returns something else than integers.
        ValueError: If sizes don't fit each other, a number isn't finite, or the policy chooses invalid keys.
    """
    shape = shape_of(q, k, v)
    if shape.t != shape.s:
        raise ValueError(f"Expected a key for each query, got q {sizes(q)} and k {sizes(k)}.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.isfinite().all():
            raise ValueError(f"Expected {name} to be finite, got NaN or infinity: costs would be NaN.")
    steps = _steps(shape.t, prompt, every)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink}
    cache = Cache(mask=mask, votes=_votes_of(policy, votes))
    dropped, error, kept = [], [], k.new_zeros(0)
    with torch.no_grad():
        for start, stop in steps:
            rows = q[:, :, start:stop]
            keys, values = cache.write(k[:, :, start:stop], v[:, :, start:stop])
            new, h = stop - start, shape.h
            placed = cache.place(cache.mask, h, new)
            placed_bias = None if bias is None else cache.place(bias, h, new)
            out, amap = attention_with_map(
                rows, keys, values, mask=placed, bias=placed_bias, offset=start, **options
            )
            if start:
                every_key, full = attention_with_map(
                    rows, k[:, :, :stop], v[:, :, :stop], mask=cache.mask, bias=bias, offset=start, **options
                )
                dropped.append(full.mass(_dropped(cache, h, stop)))
                error.append(_relative_error(out, every_key))
            cache.offset = stop
            if cache.votes is not None:
                cache.vote(amap)
            if stop < shape.t:
                positions = cache.keep(policy) if not start or every is not None else cache.positions
                kept = kept if start else positions
    return Cost(kept, torch.cat(dropped, 2), torch.cat(error, 2))


class CachedModel(Protocol):
    """A language model that takes a cache for each layer, such as `manyheads.lm.LanguageModel`."""

    def __call__(self, ids: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Return the logits `[b, t, vocabulary]` of ids `[b, t]`, which continue the tokens in the caches."""
        ...

    def attend(self, ids: Tensor) -> tuple[Tensor, list[AttentionMap]]:
        """Return the logits `[b, t, vocabulary]` and the map of each layer, without caches."""
        ...


def measure_model(
    policy: Policy,
    model: CachedModel,
    ids: Tensor,
    *,
    prompt: int,
    every: int | None = None,
    votes: Votes = None,
) -> ModelCost:
    """Compute what a policy drops in each layer of a language model, and what it costs in the model's output.

    The model reads the prompt, each layer's cache keeps the keys that the policy chooses, and the model reads
    the rest of the text. It is compared with the same model and whole caches, on the same text.

    Args:
        policy: The policy, as for `Cache.keep`.
        model: A `manyheads.lm.LanguageModel`, or another `CachedModel`.
        ids: The tokens of the text, integers `[b, t]`.
        prompt: The number of tokens of the prompt, from 1 to t − 1.
        every: Use the policy again after each `every` tokens. If None, use it once, after the prompt.
        votes: The votes that the caches keep; those that the policy needs if None, "all" for a function.

    Returns:
        The cost of each token after the prompt.

    Raises:
        TypeError: If ids isn't a tensor, the model has no `attend`, or the policy returns something else than
            integers.
        ValueError: If sizes don't fit each other, or the policy chooses invalid keys.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"Expected ids to be integers [b, t], got {kind(ids)}.")
    if ids.dim() != 2:
        raise ValueError(f"Expected ids to be integers [b, t], got {sizes(ids)}.")
    if not callable(getattr(model, "attend", None)):
        raise TypeError(
            f"Expected a manyheads.lm.LanguageModel, or another model with attend(ids), got {kind(model)}. "
            "For other models, measure the queries, keys and values of a layer with policies.measure."
        )
    steps = _steps(ids.shape[1], prompt, every)
    with torch.no_grad():
        expected, maps = model.attend(ids)  # [b, t, vocabulary]
        caches = [Cache(votes=_votes_of(policy, votes)) for _ in maps]
        logits, dropped, kept = [], [], ids.new_zeros(0)
        for start, stop in steps:
            h = maps[0].shape[1]
            if start:
                by_layer = []
                for cache, amap in zip(caches, maps, strict=True):
                    mask = _dropped(cache, h, ids.shape[1])
                    by_layer.append(amap.mass(mask)[:, :, start:stop])
                dropped.append(torch.stack(by_layer))
            out = model(ids[:, start:stop], caches)
            if start:
                logits.append(out)
            if stop < ids.shape[1] and (not start or every is not None):
                positions = [cache.keep(policy) for cache in caches]
                kept = kept if start else torch.stack(positions)
    full, given = (x.float().log_softmax(-1) for x in (expected[:, prompt:], torch.cat(logits, 1)))
    divergence = (full.exp() * (full - given)).sum(-1).clamp(min=0.0)  # [b, t]
    following = ids[:, prompt + 1 :, None].long()
    loss = (full - given)[:, :-1].gather(2, following)[..., 0]  # [b, t − 1]
    return ModelCost(kept, torch.cat(dropped, 3), divergence, loss)


def _steps(t: int, prompt: int, every: int | None) -> list[tuple[int, int]]:
    """Return the ranges of tokens that are read at once: the prompt, and the rest in parts of `every`."""
    whole(prompt, f"prompt, the number of tokens before keys are dropped, of {t},", least=1, most=t - 1)
    width = t if every is None else whole(every, "every", least=1)
    return [(0, prompt), *((start, min(start + width, t)) for start in range(prompt, t, width))]


def _votes_of(policy: object, votes: Votes) -> Votes:
    """Return the votes that a policy needs: "all" for a function, None for one that needs none."""
    if votes is not None:
        return votes
    return None if isinstance(policy, Recency | AttentionSinks) else getattr(policy, "votes", "all")


def _dropped(cache: Cache, h: int, s: int) -> Mask:
    """Return the mask of the keys that a cache has dropped, among s keys."""
    positions = cache.positions  # [b, g, n]
    b, g, _ = positions.shape
    dropped = torch.ones(b, g, s, dtype=torch.bool, device=positions.device)
    dropped.scatter_(2, positions, False)
    dropped[:, :, cache.offset :] = False  # keys that come later
    return ~Drop(dropped.repeat_interleave(h // g, 1)[:, :, None])


def _relative_error(out: Tensor, expected: Tensor) -> Tensor:
    """Return ‖out − expected‖ / ‖expected‖ of `[b, h, t, w]`; 0 if both are 0."""
    out, expected = out.double(), expected.double()
    difference, size = (out - expected).norm(dim=-1), expected.norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / size).to(torch.float32)
