"""The language model: a pre-norm causal transformer on this library's own attention.

    ids → embedding → (x + attention(norm(x)), x + feed-forward(norm(x))) × layers → norm → logits

Rotary positions (Su et al. 2021, arXiv:2104.09864), RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467),
SwiGLU (Shazeer 2020, arXiv:2002.05202), and one matrix for the embedding and for the logits (Press & Wolf
2017, arXiv:1608.05859).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.cache import Cache
from manyheads.layers import MultiHeadAttention
from manyheads.maps import AttentionMap
from manyheads.masks import Causal
from manyheads.positions import Rotary
from manyheads.shapes import can_read, kind, real, sizes, whole

ROTARY_BASE = 1000.0  # below the usual 10,000: the contexts are short
LONGEST_CONTEXT = 2**20  # tokens


@dataclass(frozen=True)
class Config:
    """The sizes of a language model; ValueError or TypeError where they don't fit.

    vocab: how many tokens there are; ids are 0 … vocab − 1.
    embed: the model size e.
    heads: the number of heads h; the head size is embed / heads, which 4 divides.
    layers: how many blocks of attention and feed-forward.
    hidden: the width of the feed-forward part.
    context: the longest sequence, in tokens.
    """

    vocab: int
    embed: int = 192
    heads: int = 6
    layers: int = 4
    hidden: int = 448
    context: int = 512

    def __post_init__(self) -> None:
        for name in ("vocab", "embed", "heads", "layers", "hidden"):
            whole(getattr(self, name), name, 1)
        whole(self.context, "context", 2)
        if self.context > LONGEST_CONTEXT:
            raise ValueError(
                f"Expected a context of at most {LONGEST_CONTEXT:,} tokens, got {self.context:,}."
            )
        if self.embed % (4 * self.heads):
            raise ValueError(
                "embed must be heads times a head size that 4 divides, and "
                f"embed = {self.embed}, heads = {self.heads} came."
            )

    @property
    def parameter_count(self) -> int:
        """The number of parameters of a model of these sizes, known before it is built."""
        attention = 4 * self.embed * (self.embed + 1)
        feed_forward = 3 * self.embed * self.hidden
        norms = self.embed * (2 * self.layers + 1)
        return self.vocab * self.embed + self.layers * (attention + feed_forward) + norms


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): down(silu(gate(x)) · up(x))."""

    def __init__(self, embed: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(embed, hidden, bias=False)
        self.up = nn.Linear(embed, hidden, bias=False)
        self.down = nn.Linear(hidden, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[b, t, e]` to `[b, t, e]`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer of the transformer; what it adds is dropped out with probability `dropout`."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        # Half of a head turns with the position, half of it compares tokens at any distance.
        rotary = Rotary(config.embed // config.heads // 2, base=ROTARY_BASE)
        self.attention_norm = nn.RMSNorm(config.embed, eps=1e-6)
        self.attention = MultiHeadAttention(config.embed, config.heads, position=rotary)
        self.feed_forward_norm = nn.RMSNorm(config.embed, eps=1e-6)
        self.feed_forward = FeedForward(config.embed, config.hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """`[b, t, e]` to `[b, t, e]`."""
        return self.rest(x, self.attention(self.attention_norm(x), mask=Causal(), cache=cache))

    def attend(self, x: Tensor) -> tuple[Tensor, AttentionMap]:
        """The same, and the map of this layer's heads."""
        attended, amap = self.attention.attend(self.attention_norm(x), mask=Causal())
        return self.rest(x, attended), amap

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention."""
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LanguageModel(nn.Module):
    """Token ids `[b, t]` in, logits of the next token out, `[b, t, vocab]`.

    A decoder alone (Vaswani et al. 2017, arXiv:1706.03762), its norms before each part (Xiong et al. 2020,
    arXiv:2002.04745). `config` has the sizes; `dropout` belongs to training, not to them: it isn't stored
    with the weights. TypeError for what is no `Config`, TypeError or ValueError for what is no probability.
    """

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        if not isinstance(config, Config):
            raise TypeError(f"a LanguageModel is made of a Config, and {kind(config)} came.")
        real(dropout, "dropout", lambda p: 0 <= p <= 1, "a number between 0 and 1")
        self.config = config
        self.context = config.context  # the longest sequence it reads
        self.embedding = nn.Embedding(config.vocab, config.embed)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(config, dropout) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=1e-6)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of deviation 0.02, smaller where a layer writes to the residual stream.

        The biases of q and k begin as a random taste for distances: they turn with the position, so
        what they add to a score depends on how far apart two tokens stand. At zero both would stay
        there for long, as the gradient of each is a multiple of the other.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("q.bias", "k.bias")):
                nn.init.normal_(parameter, std=1.0)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                writes = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
                depth = math.sqrt(2 * self.config.layers) if writes else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, ids: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Logits `[b, t, vocab]` for ids `[b, t]`; with caches, ids continue what these hold.

        Raises ValueError for ids of another shape, beyond the vocabulary or beyond the context, TypeError
        for what is no tensor.
        """
        self.check(ids, caches)
        x = self.embed(ids)  # [b, t, e]
        for layer, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[layer])
        return self.logits(x)  # [b, t, vocab]

    def attend(self, ids: Tensor) -> tuple[Tensor, list[AttentionMap]]:
        """Logits `[b, t, vocab]` and each layer's map `[b, h, t, t]`, for ids `[b, t]`.

        TypeError or ValueError, as `forward`.
        """
        self.check(ids, None)
        x = self.embed(ids)  # [b, t, e]
        maps = []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, amap = block.attend(x)
            maps.append(amap)
        return self.logits(x), maps  # [b, t, vocab]

    def embed(self, ids: Tensor) -> Tensor:
        """`[b, t]` to `[b, t, e]`, times √e as in Vaswani et al. 2017, section 3.4."""
        return self.dropout(self.embedding(ids) * math.sqrt(self.config.embed))

    def logits(self, x: Tensor) -> Tensor:
        """x `[b, t, e]` to `[b, t, vocab]`."""
        return F.linear(self.norm(x), self.embedding.weight)

    def caches(self, length: int | None = None) -> list[Cache]:
        """Return empty caches for one generation, one per layer, with room for `length` tokens.

        Without a length they have room for the whole context. Raises TypeError or ValueError for a length
        that isn't a positive integer.
        """
        return [Cache(self.context if length is None else length) for _ in self.blocks]

    def scaled(self, context: int) -> LanguageModel:
        """A copy that reads ids `[b, t]` up to `context` tokens, beyond those it was trained on.

        Its rotary positions are `Rotary.scaled` by as much as that takes (Peng et al. 2023,
        arXiv:2309.00071); its config, and so what is saved of it, stays. The shipped model's loss in nats on
        held-out documentation, a text of L tokens (its context is 512, where the loss is 3.3):

            L                                        1,024   4,096   16,384   32,768
            as trained                                3.30    4.33     5.28     5.57
            position interpolation (Chen et al.)      5.28    5.28     5.42     5.59
            larger base: this                         3.32    3.68     4.16     4.66
            YaRN, frequencies by parts                3.34    3.75     4.34     4.83
            YaRN, and sharper scores                  3.35    3.71     4.14     4.65

        Sharper scores (YaRN's temperature) beside the larger base win 0.04 to 0.15 from 4,096 tokens on, and
        lose as much within the trained context; what heads do there is kept. TypeError for what is no whole
        number, ValueError for less than the trained context.
        """
        whole(context, "context", self.config.context)
        longer = deepcopy(self)
        longer.context = context
        for block in longer.blocks:
            assert isinstance(block, Block)
            assert block.attention.position is not None
            block.attention.position = block.attention.position.scaled(context / self.config.context)
        return longer

    def check(self, ids: Tensor, caches: Sequence[Cache] | None) -> None:
        """Raise TypeError or ValueError for ids `[b, t]` or caches that the model can't take."""
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids must be integers [b, t], and {kind(ids)} came.")
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be integers [b, t], and {ids.dtype} {sizes(ids)} came.")
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"caches must be one per layer, {len(self.blocks)}, and {len(caches)} came.")
        held = caches[0].offset if caches else 0
        if held + ids.shape[1] > self.context:
            raise ValueError(
                f"the model's context is {self.context} tokens, and "
                f"{held + ids.shape[1]} came: shorten the text."
            )
        # Reading the values would wait for a GPU at every step, and break a compiled graph in two. On a GPU,
        # and in a compiled or exported model, the embedding's own bounds check raises instead.
        if ids.device.type == "cpu" and can_read(ids) and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab:
                raise ValueError(
                    f"ids must be between 0 and {self.config.vocab - 1}, and {low if low < 0 else high} came."
                )
