"""The language model: a pre-norm causal transformer that uses this library's attention.

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

ROTARY_BASE = 1000.0  # less than the usual 10,000, because the contexts are short
LONGEST_CONTEXT = 2**20  # the largest number of tokens in a context


@dataclass(frozen=True)
class Config:
    """The sizes of a language model.

    Attributes:
        vocab: The number of tokens. Ids are 0 … vocab − 1.
        embed: The model size e.
        heads: The number of heads h. The head size embed / heads is a multiple of 4.
        layers: The number of blocks, each of attention and a feed-forward layer.
        hidden: The width of the feed-forward layers.
        context: The longest sequence, in tokens.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If sizes are too small, too large, or don't fit each other.
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
        whole(self.context, "context", 2, LONGEST_CONTEXT)
        if self.embed % (4 * self.heads):
            raise ValueError(
                f"Expected embed to be a multiple of 4 * heads, got embed = {self.embed} and heads = "
                f"{self.heads}."
            )

    @property
    def parameter_count(self) -> int:
        """Return the number of parameters of a model with these sizes."""
        attention = 4 * self.embed * (self.embed + 1)
        feed_forward = 3 * self.embed * self.hidden
        norms = self.embed * (2 * self.layers + 1)
        return self.vocab * self.embed + self.layers * (attention + feed_forward) + norms


class FeedForward(nn.Module):
    """A SwiGLU layer (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, embed: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(embed, hidden, bias=False)
        self.up = nn.Linear(embed, hidden, bias=False)
        self.down = nn.Linear(hidden, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[b, t, e]` for x `[b, t, e]`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer of the transformer. Dropout acts on both terms that it adds to the residual stream."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        # Half of a head's entries rotate with the position. The others compare tokens at any distance.
        rotary = Rotary(config.embed // config.heads // 2, base=ROTARY_BASE)
        self.attention_norm = nn.RMSNorm(config.embed, eps=1e-6)
        self.attention = MultiHeadAttention(config.embed, config.heads, position=rotary)
        self.feed_forward_norm = nn.RMSNorm(config.embed, eps=1e-6)
        self.feed_forward = FeedForward(config.embed, config.hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the output `[b, t, e]` for x `[b, t, e]`."""
        return self._finish(x, self.attention(self.attention_norm(x), mask=Causal(), cache=cache))

    def attend(self, x: Tensor) -> tuple[Tensor, AttentionMap]:
        """Return the output `[b, t, e]` and the map of the heads."""
        attended, amap = self.attention.attend(self.attention_norm(x), mask=Causal())
        return self._finish(x, attended), amap

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LanguageModel(nn.Module):
    """A decoder-only transformer with pre-norm, from token ids to the logits of the next token.

    Vaswani et al. 2017 (arXiv:1706.03762), Xiong et al. 2020 (arXiv:2002.04745).

    Args:
        config: The sizes.
        dropout: The dropout probability in training. It isn't saved with the weights.

    Attributes:
        context: The longest sequence that the model reads, in tokens.

    Raises:
        TypeError: If config isn't a `Config`.
        ValueError: If dropout isn't a probability.
    """

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        if not isinstance(config, Config):
            raise TypeError(f"Expected config to be a Config, got {kind(config)}.")
        real(dropout, "dropout", lambda p: 0 <= p <= 1, "a number between 0 and 1")
        self.config = config
        self.context = config.context
        self.embedding = nn.Embedding(config.vocab, config.embed)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(config, dropout) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=1e-6)
        self._initialize()

    def _initialize(self) -> None:
        """Draw weights with standard deviation 0.02, smaller in layers that write to the residual stream.

        The biases of q and k start as a random preference for distances: they rotate with the position, so
        their contribution to a score depends on the distance of two tokens. If both started at zero, they
        would stay near zero for long, because the gradient of each is a multiple of the other.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("q.bias", "k.bias")):
                nn.init.normal_(parameter, std=1.0)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                is_residual = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
                divisor = math.sqrt(2 * self.config.layers) if is_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / divisor)

    def forward(self, ids: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            ids: The tokens, integers `[b, t]`.
            caches: The cache of each layer. The ids continue the tokens in the caches.

        Returns:
            The logits `[b, t, vocab]`.

        Raises:
            TypeError: If ids isn't a tensor.
            ValueError: If ids has the wrong shape, or exceeds the vocabulary or the context.
        """
        self.check(ids, caches)
        x = self.embed(ids)  # [b, t, e]
        for layer, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[layer])
        return self.logits(x)  # [b, t, vocab]

    def attend(self, ids: Tensor) -> tuple[Tensor, list[AttentionMap]]:
        """Return the logits and the map of each layer.

        Args:
            ids: The tokens, integers `[b, t]`.

        Returns:
            The logits `[b, t, vocab]`, and maps `[b, h, t, t]`.

        Raises:
            TypeError: If ids isn't a tensor.
            ValueError: If ids has the wrong shape, or exceeds the vocabulary or the context.
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
        """Return the embeddings `[b, t, e]` of ids `[b, t]`, times √e (Vaswani et al. 2017, section 3.4)."""
        return self.dropout(self.embedding(ids) * math.sqrt(self.config.embed))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits `[b, t, vocab]` of the last layer's output x `[b, t, e]`."""
        return F.linear(self.norm(x), self.embedding.weight)

    def caches(self, length: int | None = None) -> list[Cache]:
        """Return an empty cache for each layer.

        Args:
            length: The largest number of tokens, the context if None.

        Returns:
            The caches.

        Raises:
            TypeError: If length isn't an integer.
            ValueError: If length is less than 1.
        """
        return [Cache(self.context if length is None else length) for _ in self.blocks]

    def scaled(self, context: int) -> LanguageModel:
        """Return a copy that reads texts longer than the trained context, by RoPE scaling.

        The copy uses `Rotary.scaled` (Peng et al. 2023, arXiv:2309.00071) and has the same config, so it is
        saved like the original. The table has the loss of the shipped model in nats, on L tokens of held-out
        documentation (within its context of 512 tokens the loss is 3.3):

            L                                        1,024   4,096   16,384   32,768
            as trained                                3.30    4.33     5.28     5.57
            position interpolation (Chen et al.)      5.28    5.28     5.42     5.59
            larger base (used here)                   3.32    3.68     4.16     4.66
            YaRN, frequencies by parts                3.34    3.75     4.34     4.83
            YaRN with its temperature                 3.35    3.71     4.14     4.65

        YaRN's temperature with the larger base lowers the loss by 0.04 to 0.15 from 4,096 tokens on, and
        raises it as much within the trained context, where heads should work as they do without scaling.

        Args:
            context: The longest sequence, in tokens.

        Returns:
            The scaled copy.

        Raises:
            TypeError: If context isn't an integer.
            ValueError: If context is less than the trained one.
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
        """Check the arguments of `forward`.

        Args:
            ids: The tokens, integers `[b, t]`.
            caches: The cache of each layer, or None.

        Raises:
            TypeError: If ids isn't a tensor.
            ValueError: If ids has the wrong shape, or exceeds the vocabulary or the context.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(f"Expected ids to be integers [b, t], got {kind(ids)}.")
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"Expected ids to be integers [b, t], got {ids.dtype} {sizes(ids)}.")
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"Expected {len(self.blocks)} caches, one per layer, got {len(caches)}.")
        total = ids.shape[1] + (caches[0].offset if caches else 0)
        if total > self.context:
            raise ValueError(
                f"Expected at most {self.context} tokens, the model's context, got {total}. Shorten the text."
            )
        # Reading the values would wait for a GPU at every step, and cause a graph break under torch.compile.
        # On a GPU, and in a compiled or exported model, the embedding itself checks the bounds.
        if ids.device.type == "cpu" and can_read(ids) and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab:
                raise ValueError(
                    f"Expected ids between 0 and {self.config.vocab - 1}, got {low if low < 0 else high}."
                )
